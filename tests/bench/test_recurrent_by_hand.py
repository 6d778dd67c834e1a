"""The exchanges of recurrent layers by hand, to which the benchmark compares, have the values and gradients of ours."""

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.bench_recurrent import CASES, Case, forwards_of


@pytest.mark.ranks(4)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_values_and_gradients_are_ours(group: ProcessGroup, case: Case) -> None:
    torch.manual_seed(group.rank())
    forwards, leaves, gradient = forwards_of(case, group)
    results: list[list[Tensor]] = []
    for forward in forwards.values():
        out = forward()
        results.append([out, *torch.autograd.grad(out, leaves, gradient)])
    for ours, plain in zip(*results, strict=True):
        assert torch.equal(ours, plain)
