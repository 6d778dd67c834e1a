"""Modules with sharded parameters in the hands of torch: conversion, vectors, averages, data parallelism."""

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from shards import ranks_of
from torch import nn
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm import record
from tritoncomm.tensor import ColoParameter, ColoTensor, ProcessGroup, ShardSpec, shard_parameters
from tritoncomm.tensor.layout import plain


def made(pg: ProcessGroup) -> tuple[nn.Module, nn.Module]:
    """A module of one process, and the same one sharded."""
    torch.manual_seed(0)
    reference = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4)).double()
    sharded = copy.deepcopy(reference)
    world = pg.tp_world_size()
    shard_parameters(sharded, {"0.*": ShardSpec([0], [world]), "2.weight": ShardSpec([-1], [world])}, pg)
    return reference, sharded


CONVERSIONS: dict[str, tuple[Callable[[nn.Module], Any], torch.dtype, bool]] = {
    "float": (lambda m: m.float(), torch.float32, True),
    "bfloat16": (lambda m: m.to(torch.bfloat16), torch.bfloat16, True),
    "cpu": (lambda m: m.to("cpu"), torch.float64, True),
    "frozen": (lambda m: m.requires_grad_(False), torch.float64, False),
}


def run_helpers(group: TorchGroup) -> None:
    reference, module = made(ranks_of(group))
    vector = nn.utils.parameters_to_vector(module.parameters())
    assert tuple(vector.size()) == (76,)
    torch.testing.assert_close(plain(vector.to_replicate()), nn.utils.parameters_to_vector(reference.parameters()))
    norm = nn.utils.get_total_norm(list(module.parameters()))
    torch.testing.assert_close(plain(norm).detach(), nn.utils.get_total_norm(list(reference.parameters())).detach())
    average = torch.optim.swa_utils.AveragedModel(module)
    average.update_parameters(module)
    assert all(isinstance(p, ColoParameter) for p in average.parameters())
    state = module.state_dict()
    assert isinstance(state["0.weight"], ColoTensor)
    module.load_state_dict(state)


@pytest.mark.ranks(2, 4)
def test_modules_are_converted(group: TorchGroup) -> None:
    pg = ranks_of(group)
    for name, (convert, dtype, graded) in CONVERSIONS.items():
        _, module = made(pg)
        with record.recording() as counted:
            convert(module)
        assert not counted, (name, "something was sent or moved")
        weight: Any = module[0].weight  # type: ignore[index]
        assert isinstance(weight, ColoParameter), name
        assert (weight.dtype, weight.requires_grad) == (dtype, graded), name
        assert weight.dist_spec == ShardSpec([0], [group.size()]), name
        assert (tuple(weight.size()), tuple(weight.shape)) == ((8, 4), (8 // group.size(), 4)), name
        assert weight.has_compute_spec(), name


def test_helpers_of_torch(group: TorchGroup) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no rule for these shards")
        run_helpers(group)
