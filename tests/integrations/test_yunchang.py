"""yunchang's call sites on the adapters: closed forms, and the bits of yunchang where that runs."""

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import run_job
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

import tritoncomm
from tritoncomm.integrations.yunchang import SeqAllToAll4D, SeqAllToAll5D

CASES: list[tuple[Any, tuple[int, ...], tuple[int, int]]] = [
    (SeqAllToAll4D, (2, 4, 8, 3), (2, 1)),
    (SeqAllToAll4D, (2, 8, 4, 3), (1, 2)),
    (SeqAllToAll4D, (1, 4, 8, 3), (2, 1)),
    (SeqAllToAll5D, (2, 4, 3, 8, 5), (3, 1)),
    (SeqAllToAll5D, (2, 8, 3, 4, 5), (1, 3)),
]


def made(shape: tuple[int, ...], rank: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(rank))


def exchanged(group: ProcessGroup, use_world: bool = False) -> None:
    """Rank r has chunk r of the scattered dim of every rank, concatenated; the gradient returns where it came from."""
    world, rank = group.size(), group.rank()
    for function, shape, (scatter, gather) in CASES:
        if shape[scatter] % world:
            continue
        x = made(shape, rank).requires_grad_()
        out = function.apply(None if use_world else group, x, scatter, gather)
        wanted = torch.cat([made(shape, w).chunk(world, scatter)[rank] for w in range(world)], gather)
        assert torch.equal(out, wanted), (shape, scatter, gather)
        assert out.is_contiguous()
        back = function.apply(None if use_world else group, out, gather, scatter, True)
        assert torch.equal(back, x)
        (gradient,) = torch.autograd.grad(back, x, 3 * x.detach())
        assert torch.equal(gradient, 3 * x)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_closed_form(pool: Pool, world: int) -> None:
    pool.run(exchanged, world=world)


def test_all_ranks_without_a_group(pool: Pool) -> None:
    pool.run(exchanged, True, world=8)


def test_refusals(group: ProcessGroup) -> None:
    x = torch.zeros(2, 4, 8, 3)
    for error, text, call in (
        (tritoncomm.ShapeError, "expected 4 dims", lambda: SeqAllToAll4D.apply(group, x[0], 2, 1)),
        (tritoncomm.ShapeError, "dims 1 and 2", lambda: SeqAllToAll4D.apply(group, x, 3, 1)),
        (tritoncomm.ShapeError, "expected 5 dims", lambda: SeqAllToAll5D.apply(group, x, 3, 1)),
        (tritoncomm.ShapeError, "does not divide", lambda: SeqAllToAll4D.apply(group, x[:, :, :7], 2, 1)),
    ):
        with pytest.raises(error, match=text):
            call()
    assert SeqAllToAll4D.apply(group, x, 2, 1).shape == (2, 8, 4, 3)


def beside_yunchang(store: str, world: int) -> int:
    """Values and gradients of yunchang's classes and ours in the same processes; the number of cases."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    from yunchang.comm import all_to_all as theirs

    for function, shape, dims in CASES:
        results = []
        for each in (function, getattr(theirs, function.__name__)):
            x = made(shape, rank).requires_grad_()
            out = each.apply(dist.group.WORLD, x, *dims)
            out.backward(made(tuple(out.shape), 9))
            results.append((out, x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True)), (shape, dims)
    dist.barrier()
    return len(CASES)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 4])
def test_bits_of_yunchang(tmp_path: Path, world: int) -> None:
    pytest.importorskip("yunchang")
    ranks = [{"RANK": str(rank)} for rank in range(world)]
    assert run_job(beside_yunchang, ranks, str(tmp_path / "store"), world, timeout=200) == [len(CASES)] * world
