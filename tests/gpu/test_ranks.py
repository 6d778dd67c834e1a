"""Many ranks on one device, as threads of one process that run at the same time: NCCL takes one rank per GPU.

p2p is left out, because the threaded group neither sends nor receives.
"""

import itertools
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from bits import bits
from devices import Device
from fuzz_calls import assert_right
from mapping_cases import MAPPINGS, by_sizes, value
from shards import shard_of
from sums_by_hand import by_hand, shard, values
from threaded import ThreadedRanksError, run_ranks
from torch.distributed import ProcessGroup

from tritoncomm import collective, counters, mappings, tensor
from tritoncomm.core import ops
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.tensor.dispatch import plain

DTYPES = ("bfloat16", "float32")
WORLDS = [2, pytest.param(4, marks=pytest.mark.slow), pytest.param(8, marks=pytest.mark.slow)]


def run_mappings(rank: int, group: ProcessGroup, device: Device) -> None:
    for dtype, call in itertools.product(DTYPES, MAPPINGS.values()):
        asked = replace(call, shape=(8, 8, 16), dtype=dtype, kind="leaf", path=device.path)
        assert_right(group, asked, device=device.at)


def run_split_sizes(rank: int, group: ProcessGroup, device: Device) -> None:
    for dtype, call in itertools.product(DTYPES, by_sizes(group.size()).values()):
        assert_right(group, replace(call, dtype=dtype, kind="leaf", path=device.path), device=device.at)


def run_redistributions(rank: int, group: ProcessGroup, device: Device) -> None:
    """Every redistribution between dim 0, dim 1 and replicated, even and ragged; backward with equal gradients."""
    ranks = tensor.ProcessGroup(tp_degree=group.size())
    specs = [tensor.ShardSpec([0], [group.size()]), tensor.ShardSpec([1], [group.size()]), tensor.ReplicaSpec()]
    for dtype, shape in itertools.product(DTYPES, ((16, 24), (9, 17))):
        full = value(shape, dtype, 1).to(device.at)
        gradient = full * 3 + 1
        for old, new in itertools.permutations(specs, 2):
            local = shard_of(full, old, rank).requires_grad_()
            leaf = tensor.ColoTensor(local, tensor.ColoTensorSpec(ranks, old), full.shape)
            out = plain(leaf.redistribute(new))
            what = (dtype, shape, old, new, rank)
            assert torch.equal(out, shard_of(full, new, rank)), what
            out.backward(shard_of(gradient, new, rank))
            assert leaf.grad is not None, what
            assert torch.equal(plain(leaf.grad), shard_of(gradient, old, rank)), ("backward", *what)


def run_sums(rank: int, group: ProcessGroup, device: Device) -> None:
    """Sums over 16-bit wires, bit for bit those by hand: packed, exchanged in pieces, added up in rank order."""
    world = group.size()
    shapes = (
        ((8 * world, 6), 0, None),
        ((6, 16 * world), 1, None),
        ((3 * world + 1, 5), 0, chunk_sizes(3 * world + 1, world)),
    )
    for (shape, dim, sizes), dtype, wire in itertools.product(
        shapes, (torch.bfloat16, torch.float32), (torch.bfloat16, torch.float16)
    ):
        every = [values(each, shape, dtype) for each in range(world)]
        parts = [shard(x, dim, sizes or (shape[dim] // world,) * world, rank) for x in every]
        options = {"sizes": sizes, "wire": wire}
        out = collective.reduce_scatter(every[rank].to(device.at), dim, group, **options)  # type: ignore[arg-type]
        assert torch.equal(bits(out.cpu()), bits(by_hand(parts, wire, dtype))), (shape, dtype, wire)
        before = values(99, parts[0].shape, torch.float32)
        total = before.to(device.at, copy=True)
        collective.reduce_scatter(
            every[rank].to(device.at),
            dim,
            group,
            **options,
            scale=0.5,
            out=total,
            accumulate=True,  # type: ignore[arg-type]
        )
        expected = by_hand(parts, wire, torch.float32, 0.5, before)
        assert torch.equal(bits(total.cpu()), bits(expected)), (shape, dtype, wire, "accumulated")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("function", [run_mappings, run_split_sizes, run_redistributions, run_sums])
@pytest.mark.parametrize("world", WORLDS)
def test_ranks(device: Device, world: int, function: Callable[[int, ProcessGroup, Device], None]) -> None:
    with ops.path(device.path), device.threads():
        run_ranks(world, lambda rank, group: function(rank, group, device))


@pytest.mark.filterwarnings("ignore")
def test_backward_runs_in_the_thread_of_its_rank(device: Device) -> None:
    """Without that ranks would wait for each other in autograd's one thread of the device; the kernels are launched."""

    def on_rank(rank: int, group: ProcessGroup) -> tuple[int, int]:
        x = value((8, 16), "float32", rank).to(device.at).requires_grad_()
        threads: list[int] = []
        x.register_hook(lambda _: threads.append(threading.get_ident()))
        mappings.all_to_all_sp2hp(x, group).sum().backward()
        (ident,) = threads
        return ident, threading.get_ident()

    before = counters().get(("all_to_all_sp2hp", "triton"))
    with ops.path(device.path), device.threads():
        results = run_ranks(2, on_rank)
    assert all(backward == own for backward, own in results)
    assert counters().get(("all_to_all_sp2hp", "triton")) != before, "no kernel was launched"


def test_a_rank_that_fails_or_hangs_is_reported() -> None:
    go_on = threading.Event()

    def fails(rank: int, group: ProcessGroup) -> None:
        assert rank != 1, "no"
        dist.all_reduce(torch.ones(1), group=group)

    def hangs(rank: int, group: ProcessGroup) -> None:
        if rank == 1:
            go_on.wait(60)
        else:
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(ThreadedRanksError, match=r"ranks \[0\]: left a collective.*\nranks \[1\]: Trace"):
        run_ranks(2, fails)
    with pytest.raises(ThreadedRanksError, match=r"ranks \[0, 1\]: did not end within 1 s"):
        run_ranks(2, hangs, timeout=1)
    go_on.set()
    assert run_ranks(2, lambda rank, group: (rank, group.size())) == [(0, 2), (1, 2)]


def test_a_torch_without_threaded_ranks_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")
    with pytest.raises(ThreadedRanksError, match=r"has no threaded process group.*_set_thread_isolation_mode"):
        run_ranks(2, lambda rank, group: None)
