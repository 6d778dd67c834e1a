"""ColossalAI's stage functions: values, guards, shapes, shards."""

import itertools
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from bits import bits
from stage_cases import SHAPES, made, strided
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, p2p
from tritoncomm.core import ops
from tritoncomm.errors import ArgumentError, GroupError, MismatchError
from tritoncomm.groups import Group, ParallelMode
from tritoncomm.p2p import stages as stage_functions

DTYPES = ("float32", "bfloat16", "float16", "float64", "int64", "bool", "complex64", "float8_e4m3fn")


def pipeline(group: ProcessGroup, tensor: ProcessGroup | None = None) -> None:
    """Register groups as ``initialize()`` would."""
    members = {ParallelMode.PIPELINE: group, ParallelMode.GLOBAL: dist.group.WORLD}
    if tensor is not None:
        members[ParallelMode.TENSOR] = tensor
    groups.register({m: Group(g, m) for m, g in members.items() if g})


def same(received: Any, expected: Tensor, what: Any) -> None:
    assert isinstance(received, Tensor), (what, received)
    assert (received.shape, received.dtype) == (expected.shape, expected.dtype), what
    assert torch.equal(bits(received), bits(expected)), what
    assert received.is_leaf
    assert received._base is None
    assert received.is_contiguous()
    assert received.requires_grad == (expected.is_floating_point() or expected.is_complex())


@pytest.mark.ranks(2, 4, (1, 3))
@pytest.mark.parametrize("dtype", DTYPES)
def test_between_stages(group: ProcessGroup, dtype: str) -> None:
    pipeline(group)
    stage, stages = group.rank(), group.size()
    first, last = stage == 0, stage == stages - 1
    kind = getattr(torch, dtype)
    for shape in SHAPES:
        out, back = strided(made(stage, shape, dtype)), strided(made(stage, shape, dtype, 2))
        before, after = made(stage - 1, shape, dtype), made(stage + 1, shape, dtype, 2)
        x = p2p.recv_forward(shape, dtype=kind)
        p2p.send_forward(out)
        assert (x is None) == first
        if not first:
            same(x, before, (shape, "recv_forward"))
        grad = p2p.recv_backward(torch.Size(shape), dtype=kind)
        p2p.send_backward(back)
        assert (grad is None) == last
        if not last:
            same(grad, after, (shape, "recv_backward"))
        if stage % 2 == 0:
            grad = p2p.send_forward_recv_backward(out, shape, dtype=kind)
            assert (grad is None) == last
            if grad is not None:
                same(grad, after, (shape, "send_forward_recv_backward"))
        else:
            x = p2p.send_backward_recv_forward(back, shape, dtype=kind)
            same(x, before, (shape, "send_backward_recv_forward"))
        if stage % 2 == 0 and not last:
            assert p2p.send_forward_recv_backward(out, None, recv_next=False) is None
        elif stage % 2:
            assert p2p.send_backward_recv_forward(None, shape, dtype=kind) is not None


@pytest.mark.ranks(1, 2, 4, (2, 3))
def test_round_the_ring(group: ProcessGroup) -> None:
    pipeline(group)
    stage, stages = group.rank(), group.size()
    before, after = (stage - 1) % stages, (stage + 1) % stages
    for shape in ((2, 3), (0, 2), (4,)):
        out, back = made(stage, shape), made(stage, shape, sign=2)
        x, grad = p2p.send_forward_backward_recv_forward_backward(out, back, shape, shape)
        same(x, made(before, shape), "activation")
        same(grad, made(after, shape, sign=2), "gradient")
        same(p2p.send_forward_recv_forward(out, shape), made(before, shape), "ring forward")
        same(p2p.send_backward_recv_backward(back, shape), made(after, shape, sign=2), "ring backward")
        assert p2p.send_forward_backward_recv_forward_backward(None, None, None, None, False, False) == (None, None)
        if stages > 1:
            got = p2p.send_forward_recv_forward(out if stage == 0 else None, shape, recv_prev=stage == 1)
            assert (got is None) == (stage != 1)
        else:
            with pytest.raises(ArgumentError, match="receive just what it sends"):
                p2p.send_forward_recv_forward(out, shape, recv_prev=False)
            with pytest.raises(MismatchError, match=r"expects \[9\] float32, but rank \d sent"):
                p2p.send_forward_recv_forward(out, (9,))
        lazy = torch.view_as_complex(torch.tensor([[3.0, 5.0]])).conj().imag  # contiguous, with a negative bit
        assert (lazy.is_neg(), lazy.is_contiguous()) == (True, True)
        same(p2p.send_forward_recv_forward(lazy, (1,)), torch.tensor([-5.0]), "one lazy element")
        several = [made(stage, shape), strided(made(stage, (3, 5))), made(stage, (7,), sign=3)]
        acts, grads = p2p.send_forward_backward_recv_forward_backward(
            several, several[:2], [shape, (3, 5), [7]], (shape, [3, 5])
        )
        for x, y in zip(acts, [made(before, shape), made(before, (3, 5)), made(before, (7,), sign=3)], strict=True):
            same(x, y, "list")
        for x, y in zip(grads, [made(after, shape), made(after, (3, 5))], strict=True):
            same(x, y, "tuple")


@pytest.mark.ranks(4)
def test_explicit_neighbours_and_refusals(group: ProcessGroup) -> None:
    pipeline(group)
    ranks, stage = dist.get_process_group_ranks(group), group.rank()
    jump = ranks[(stage + 2) % 4]
    out = made(stage, (3,))
    x = p2p.send_forward_recv_forward(out, (3,), prev_rank=jump, next_rank=jump)
    same(x, made((stage + 2) % 4, (3,)), "explicit ranks")
    with pytest.raises(GroupError, match="rank 99"):
        p2p.send_forward_recv_forward(out, (3,), next_rank=99)
    with pytest.raises(ArgumentError, match="shape of what is received"):
        p2p.send_forward_recv_forward(out, None)
    with pytest.raises(ArgumentError, match="expected a tensor"):
        p2p.send_forward_recv_forward("x", (3,))
    with pytest.raises(ArgumentError, match="sequence of ints"):
        p2p.send_forward_recv_forward(out, [("x",)])
    same(p2p.send_forward_recv_forward(out, [3]), made((stage - 1) % 4, (3,)), "the group still works")


@pytest.mark.ranks(8)
def test_a_neighbour_outside_the_pipeline(group: ProcessGroup) -> None:
    rank = dist.get_rank()
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3))}
    for ranks, pair in pairs.items():
        if rank in ranks:
            pipeline(pair)
            other = (rank + 2) % 4
            x = p2p.send_forward_recv_forward(made(rank, (2,)), (2,), prev_rank=other, next_rank=other)
            same(x, made(other, (2,)), "over the default group")


@pytest.mark.ranks(8)
def test_one_neighbour_inside_and_one_outside(group: ProcessGroup) -> None:
    """Two pipelines of two stages; the last of one hands on to the first of the other, which it names."""
    rank = dist.get_rank()
    pairs = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3))}
    mine = [pair for ranks, pair in pairs.items() if rank in ranks]
    if not mine:
        return
    pipeline(mine[0])
    for shape in ((2,), (3, 4)):
        x = p2p.send_forward_recv_forward(
            None if rank == 3 else made(rank, shape),
            shape,
            recv_prev=rank > 0,
            prev_rank=1 if rank == 2 else None,
            next_rank=2 if rank == 1 else None,
        )
        if rank:
            same(x, made(rank - 1, shape), "each over the group that both ends are in")


@pytest.mark.ranks(8)
def test_neighbours_are_those_of_the_groups_in_force(group: ProcessGroup) -> None:
    stage = group.rank()
    pairs = {pair: dist.new_group(list(pair)) for pair in ((0, 1), (0, 2), (0, 3))}
    for other in (1, 2, 3, 1):  # each time stage 0 has another pipeline, and is its first or its last stage
        if stage not in (0, other):
            continue
        pipeline(pairs[0, other])
        out, peer = made(stage, (3,)), other - stage
        same(p2p.send_forward_recv_forward(out, (3,)), made(peer, (3,)), "the pipeline registered last")
        keys = [key for key in groups.derived if isinstance(key, tuple)]
        assert len(keys) == 1
        neighbours = groups.derived[keys[0]]
        same(p2p.send_forward_recv_forward(out, (3,)), made(peer, (3,)), "again")
        assert groups.derived[keys[0]] is neighbours, "the neighbours are looked up once"
        got = p2p.recv_forward((3,))
        p2p.send_forward(out)
        assert (got is None) == (stage == 0)
    groups.register({})
    assert not groups.derived
    with pytest.raises(GroupError, match="no process group for PIPELINE"):
        p2p.send_forward_recv_forward(torch.ones(3), (3,))


def test_without_gradients(group: ProcessGroup) -> None:
    pipeline(group)
    stage, stages = group.rank(), group.size()
    x = torch.ones(2, 3, requires_grad=True) * stage
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for count in (1, 2):  # the plain path and the general one
                received = p2p.send_forward_recv_forward([x] * count, [(2, 3)] * count)
                assert len(received) == count
                got = received[-1]
                assert got.requires_grad
                assert got.is_leaf
                assert got.is_inference() == torch.is_inference_mode_enabled()
                assert torch.equal(got, torch.full((2, 3), float((stage - 1) % stages)))


@pytest.mark.ranks(1, 2)
def test_lists_of_nothing(group: ProcessGroup) -> None:
    """Nothing is sent of a list of no tensors, and nobody waits for it; with headers and comparisons neither."""
    pipeline(group)
    for checks in (False, True):
        with p2p.check(checks):
            for _ in range(3):
                assert p2p.send_forward_recv_forward([], []) == []
                if group.rank() == 0:
                    p2p.send_forward([])  # of which the receiver need not know
                received = p2p.send_forward_recv_forward([torch.ones(2, 3)], [(2, 3)])
                assert torch.equal(received[0], torch.ones(2, 3))


def _grid(rank: int) -> tuple[ProcessGroup, ProcessGroup] | None:
    """Two stages of two tensor ranks, made by all ranks of the job: this one's (tensor group, pipeline)."""
    made_here = {ranks: dist.new_group(list(ranks)) for ranks in ((0, 1), (2, 3), (0, 2), (1, 3))}
    mine = [made_here[ranks] for ranks in made_here if rank in ranks]
    return (mine[0], mine[1]) if mine else None


@pytest.mark.ranks(8)
def test_each_tensor_rank_sends_its_shard(group: ProcessGroup) -> None:
    grid = _grid(group.rank())
    if grid is None:
        return
    tensor, ring = grid
    pipeline(ring, tensor)
    stage = ring.rank()
    for shape, dtype in itertools.product([(4, 3), (2, 5), (8,)], ["float32", "bfloat16", "int64"]):
        kind = getattr(torch, dtype)
        x = p2p.recv_forward(shape, dtype=kind, scatter_gather_tensors=True)
        p2p.send_forward(strided(made(7, shape, dtype)), scatter_gather_tensors=True)
        if stage:
            same(x, made(7, shape, dtype), (shape, "sharded"))
    stage_functions._warned.clear()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            received = p2p.send_forward_recv_forward(
                [made(stage, (3,)), made(stage, (2, 2))], [(3,), (2, 2)], scatter_gather_tensors=True
            )
            same(received[0], made(1 - stage, (3,)), "full")
            same(received[1], made(1 - stage, (2, 2)), "shard")
    texts = [str(w.message) for w in caught if "do not divide" in str(w.message)]
    assert len(texts) == 1, texts
    assert "3 elements of shape [3] do not divide over 2 tensor ranks" in texts[0]


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_lazy_bits(group: ProcessGroup, path: str) -> None:
    """Lazy negatives and conjugates travel as their values, one by one and several in a message."""
    pipeline(group)
    for dtype in (torch.float32, torch.complex64):
        x = (torch.arange(12.0).view(3, 4) - 5 + group.rank()).to(dtype) * (1 if dtype is torch.float32 else 1 - 2j)
        lazy = torch._neg_view(-x) if dtype is torch.float32 else x.conj().clone().conj()
        assert lazy.is_neg() or lazy.is_conj()
        peer = x + (1 - 2 * group.rank()) * (x[0, 1] - x[0, 0])
        for sent, shapes in ((lazy, (3, 4)), ([lazy, lazy[1:]], [(3, 4), (2, 4)])):
            with ops.path(path):  # pyright: ignore[reportArgumentType]
                got = p2p.send_forward_recv_forward(sent, shapes, True, dtype=dtype)
            for one, expected in zip([got] if isinstance(got, Tensor) else got, (peer, peer[1:]), strict=False):
                assert torch.equal(one.detach(), expected), (dtype, shapes)
