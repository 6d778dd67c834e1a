"""Layouts of a sequence against index arithmetic: values, gradients, bytes, refusals, on one process and on ranks."""

import itertools
import warnings
from collections.abc import Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from bits import bits, random_bits
from reshardings import Cases, local_of, run_cases, simulate
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm import record
from tritoncomm.core import backend, ops
from tritoncomm.core.passes import TablePass
from tritoncomm.errors import ArgumentError, CommError, GroupError, MismatchError, ShapeError, UnsupportedError
from tritoncomm.reshard import Layout, planner, reshard, reshard_plan, sequence_layout
from tritoncomm.reshard.boxes import KINDS
from tritoncomm.reshard.plan import ALIGNMENT, Item

PAIRS = list(itertools.product(KINDS, KINDS))
F32 = torch.float32


def tokens(kind: str, bounds: Sequence[int], world: int, rank: int) -> Tensor:
    """The indices that a rank has, in the order of its local tensor."""
    if kind == "full":
        return torch.arange(bounds[-1])
    parts = [torch.arange(0)]
    for low, high in itertools.pairwise(bounds):
        sequence = torch.arange(low, high)
        if kind == "striped":
            parts.append(sequence[rank::world])
        elif kind == "zigzag":
            chunks = sequence.view(2 * world, (high - low) // (2 * world))
            parts += [chunks[rank], chunks[-1 - rank]]
        elif high > low:
            parts += sequence.chunk(world)[rank : rank + 1]
    return torch.cat(parts)


def bounds_for(world: int, kinds: Sequence[str]) -> list[list[int]]:
    """One sequence, several, some without tokens, some shorter than the ranks; zigzag takes multiples of chunks."""
    unit = 2 * world if "zigzag" in kinds else 1
    cases = [[12], [1], [3, 0, 1], [0, 5, 2, 7, 0], [0], [2] * 9]
    if unit == 1:
        cases += [[world * 7 + 3], [world - 1, 40, world + 1], [4 * world, world, 2 * world * world]]
    return [[0, *itertools.accumulate(unit * n for n in sizes)] for sizes in cases]


def check_pair(kinds: tuple[str, str], bounds: tuple[list[int], list[int]], world: int, dim: int) -> None:
    """Both ways, exact; exactly the bytes that ranks lack."""
    shape = [2, 3, 2]
    shape[dim] = bounds[0][-1]
    full = random_bits(tuple(shape), torch.int16)
    own = [[tokens(kind, each, world, rank) for rank in range(world)] for kind, each in zip(kinds, bounds, strict=True)]
    sides = [Layout.sequence(shape, dim, kind, range(world), each) for kind, each in zip(kinds, bounds, strict=True)]
    expected = [[full.index_select(dim, index) for index in side] for side in own]
    for way in (1, -1):
        source, target = sides[::way]
        before, after = expected[::way]
        assert [source.local_shape(rank) for rank in range(world)] == [tuple(x.shape) for x in before]
        item = Item("x", source, target, torch.int16, torch.int16)
        results, plans = simulate([item], [[x] for x in before], 2**20)
        for rank, ((result,), plan) in enumerate(zip(results, plans, strict=True)):
            assert torch.equal(result, after[rank]), (kinds[::way], bounds, world, dim, rank)
            have, need = own[::way][0][rank], own[::way][1][rank]
            lacking = int((~torch.isin(need, have)).sum()) * (full.numel() // max(1, shape[dim])) * 2
            moved = plan.transfers
            assert int(moved.lacking[rank]) == lacking
            (bucket,) = moved.buckets
            assert bucket.recv.messages <= world - 1
            assert 0 <= moved.bytes_received - lacking <= (ALIGNMENT - 1) * bucket.recv.messages
            assert moved.launches <= 2


@pytest.mark.parametrize("world", [3, *(pytest.param(each, marks=pytest.mark.slow) for each in (1, 2, 4))])
@pytest.mark.parametrize("kinds", list(itertools.combinations_with_replacement(KINDS, 2)), ids="-".join)
def test_every_pair(world: int, kinds: tuple[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for place, bounds in enumerate(bounds_for(world, kinds)):
        monkeypatch.setattr(planner, "_SMALL_GROUP", 256 * (place % 2))  # as in large groups, too
        check_pair(kinds, (bounds, bounds), world, place % 3)
        one = [0, bounds[-1]]
        check_pair(kinds, (one, bounds) if place % 2 else (bounds, one), world, (place + 1) % 3)


@pytest.mark.parametrize("kind", KINDS)
def test_layouts_are_tilings(kind: str) -> None:
    """Which is not looked at when they are made: it takes longer than that."""
    for world, bounds in ((1, [0, 8]), (3, [0, 12, 12, 18, 36]), (4, [0, 32])):
        layout = Layout.sequence((2, bounds[-1]), 1, kind, range(world), bounds)
        assert layout._find_problem() == ""
        assert layout.in_rows((1, 2 * world * layout.step[1]))._find_problem() == ""


def test_steps_are_checked() -> None:
    def made(*rows: tuple[int, int], step: Any = (3,)) -> Layout:
        """Every third index of 10 from a start on, a rank each."""
        start, size = (np.array(each, np.int64).reshape(-1, 1) for each in zip(*rows, strict=True))
        return Layout((10,), range(len(rows)), np.arange(len(rows)), start, size, 0 * start, size, step)

    assert made((0, 4), (1, 3), (2, 3)).problem == ""
    assert "does not cover 3 of the 10" in made((0, 4), (2, 3)).problem
    assert "overlap in part" in made((0, 4), (1, 3), (2, 3), (4, 1)).problem
    assert "1:8:3" in str(made((1, 3)))
    assert made((0, 4)) != Layout.of_boxes((10,), {0: [((0,), (4,))]})
    with pytest.raises(ShapeError, match="not inside"):
        made((1, 4))
    for step in ((0,), (-3,), (3, 3), ()):
        with pytest.raises(ArgumentError, match="steps"):
            made((0, 1), step=step)


def test_equal_layouts_are_equal() -> None:
    """However they are described: what is the same is handed back, and plans are shared."""

    def of(kind: str, bounds: Any = None, world: int = 4) -> Layout:
        return Layout.sequence((16, 3), 0, kind, range(world), bounds)

    assert of("striped", [0, 4, 4, 16]) == of("striped")
    assert of("striped", [0, 5, 16]) != of("striped")
    assert len({of(kind, bounds, 1) for kind in KINDS for bounds in (None, [0, 2, 16])}) == 1
    assert of("contiguous") == Layout.on_mesh((16, 3), range(4), [0])
    assert of("full") == Layout.replicated((16, 3), range(4))
    assert len(of("zigzag").boxes().owner) == 7, "the chunks of the last rank are one box"


def test_plans_of_long_sequences_are_small() -> None:
    """Some boxes per pair of ranks, not one per token; bytes on the wire are those that ranks lack."""
    shape, world = (1, 131072, 8, 128), 8
    for kinds in PAIRS:
        for bounds in (None, [0, 16 * 77, 131072], [0, 131, 131072]):
            if bounds and bounds[1] % 16 and "zigzag" in kinds:
                continue
            source, target = (Layout.sequence(shape, 1, kind, range(world), bounds) for kind in kinds)
            plan = reshard_plan({"x": torch.bfloat16}, source, target, ranks=range(world), rank=3).transfers
            blocks = sum(len(side.tensor) for b in plan.buckets for side in (b.send, b.recv, b.staged, b.direct))
            assert blocks <= 16 * world
            have, need = (tokens(kind, bounds or [0, shape[1]], world, 3) for kind in kinds)
            assert plan.lacking[3] == (~torch.isin(need, have)).sum() * 8 * 128 * 2
            assert (plan.sent.sum(), plan.received.sum()) == (plan.lacking.sum(),) * 2
            assert (plan.messages <= world - 1).all()
            assert plan.launches <= 3  # one of what stays


def test_other_layouts_and_other_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between strides of different numbers of ranks, along two dims, and to heads; on kernels, too."""
    shape, every = (24, 4, 2), range(4)
    full = random_bits(shape, torch.int32)
    layouts = {
        "striped": Layout.sequence(shape, 0, "striped", every),
        "striped over three": Layout.sequence(shape, 0, "striped", (3, 0, 1), [0, 7, 24]),
        "striped over two": Layout.sequence(shape, 0, "striped", (3, 2)),
        "striped along another dim": Layout.sequence(shape, 1, "striped", (1, 2, 3)),
        "zigzag": Layout.sequence(shape, 0, "zigzag", (2, 1)),
        "heads": Layout.on_mesh(shape, every, [1]),
        "a mesh": Layout.on_mesh(shape, [[0, 1], [2, 3]], [0, None]),
        "uneven": Layout.split(shape, 0, [5, 0, 18, 1]),
        "one rank": Layout.replicated(shape, [2]),
    }
    stripes = {
        "striped": lambda rank: full[rank::4],
        "striped over three": lambda rank: torch.cat([part[(1, 2, 0, 0)[rank] :: 3] for part in (full[:7], full[7:])])
        if rank != 2
        else full.new_empty(0),
        "striped over two": lambda rank: full[{3: 0, 2: 1}[rank] :: 2] if rank > 1 else full.new_empty(0),
        "striped along another dim": lambda rank: full[:, rank - 1 :: 3] if rank else full.new_empty(0),
    }  # fmt: skip

    def local(name: str, rank: int) -> Tensor:
        return (stripes[name](rank) if name in stripes else local_of(layouts[name], rank, full)).contiguous()

    def check(source: str, target: str) -> None:
        item = Item("x", layouts[source], layouts[target], torch.int32, torch.int32)
        results, _ = simulate([item], [[local(source, rank)] for rank in every], 4096)
        for rank, (result,) in enumerate(results):
            assert torch.equal(result, local(target, rank)), (source, target, rank)

    for place, (source, target) in enumerate(itertools.permutations(layouts, 2)):
        monkeypatch.setattr(planner, "_SMALL_GROUP", 256 * (place % 2))
        check(source, target)
    with ops.path("triton"):
        for source, target in (("striped", "zigzag"), ("uneven", "striped"), ("striped", "striped over three")):
            check(source, target)


# ---- on ranks ----


def run_pairs(group: TorchGroup, pairs: Sequence[tuple[str, str]]) -> None:
    """Forward and backward, along every dim; replicated and partial gradients of full results."""
    world, rank = group.size(), group.rank()
    for place, kinds in enumerate(pairs):
        for bounds in bounds_for(world, kinds):
            dim = place % 3
            shape = [2, 2, 2]
            shape[dim] = bounds[-1]
            full = torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(place)).double()
            weights = [
                torch.randint(-9, 9, shape, generator=torch.Generator().manual_seed(w)).double() for w in range(world)
            ]
            mine, goal = (tokens(kind, bounds, world, rank) for kind in kinds)
            x = full.index_select(dim, mine).requires_grad_()
            for grad in ("replicated", "partial"):
                weight = weights[rank if grad == "partial" else 0]
                y = sequence_layout(x, *kinds, dim=dim - 3 * (place % 2), cu_seqlens=bounds, group=group, grad=grad)
                assert torch.equal(y, full.index_select(dim, goal)), (kinds, bounds, rank)
                assert y.requires_grad
                (given,) = torch.autograd.grad((y * weight.index_select(dim, goal)).sum(), x)
                total = torch.zeros_like(full)
                for other in range(world if grad == "partial" else 1):
                    has = torch.isin(torch.arange(bounds[-1]), tokens(kinds[1], bounds, world, other))
                    has = has if grad == "partial" else torch.ones_like(has)
                    total += weights[other] * has.view([-1 if d == dim else 1 for d in range(3)])
                assert torch.equal(given, total.index_select(dim, mine)), (kinds, bounds, rank, grad)


@pytest.mark.ranks(1, 2, *(pytest.param(world, marks=pytest.mark.slow) for world in (3, 4)))
def test_forward_and_backward(group: TorchGroup) -> None:
    run_pairs(group, PAIRS if group.size() != 2 else PAIRS[1::2])  # on two ranks the others are slow tests
    if group.size() == 2:
        with ops.path("triton"):
            run_pairs(group, [("zigzag", "striped")])


@pytest.mark.slow
@pytest.mark.ranks(2)
def test_forward_and_backward_of_the_other_pairs(group: TorchGroup) -> None:
    run_pairs(group, PAIRS[::2])


case = Cases()


def same(x: Tensor, expected: Tensor) -> None:
    assert x.shape == expected.shape
    assert torch.equal(bits(x.resolve_neg().resolve_conj()), bits(expected))


@case
def calls_are_counted_under_their_own_names(group: TorchGroup) -> None:
    """Also where another function has moved the same tensor between the same layouts."""
    world = group.size()
    x, shape = torch.ones(1, 2 * world, 4), (1, 2 * world * world, 4)
    sides = [Layout.sequence(shape, 1, kind, dist.get_process_group_ranks(group)) for kind in ("contiguous", "zigzag")]
    for _ in range(2):
        with record.recording() as counted:
            sequence_layout(x, "contiguous", "zigzag", group=group)
            reshard(x, *sides, group=group)
        assert {name for name, _ in counted} == {"sequence_layout", "reshard"}, counted


@case
def positions_and_several_tensors(group: TorchGroup) -> None:
    """q, k, v, position ids and labels in one exchange; a round trip gives the same bits."""
    world, rank = group.size(), group.rank()
    length = 4 * world
    mine, goal = tokens("contiguous", [0, length], world, rank), tokens("zigzag", [0, length], world, rank)
    full = {name: random_bits((2, length, 3, 4), torch.bfloat16, seed) for seed, name in enumerate("qkv")}
    full |= {"positions": torch.arange(length).expand(2, length), "mask": random_bits((2, length), torch.bool)}
    given = {name: x[:, mine] for name, x in full.items()}
    with mock.patch.object(backend, "all_to_all", wraps=backend.all_to_all) as exchange:
        moved = sequence_layout(given, "contiguous", "zigzag", group=group)
        assert exchange.call_count == int(world > 1)
    assert list(moved) == list(given)
    for name, x in moved.items():
        same(x, full[name][:, goal])
        assert x.is_contiguous()
        assert x._base is None or world == 1
    assert torch.equal(moved["positions"][0], goal)
    back = sequence_layout(moved, "zigzag", "contiguous", group=group)
    for name, x in back.items():
        same(x, given[name])
    results = sequence_layout([given["q"], given["positions"]], "contiguous", "striped", group=group)
    assert torch.equal(results[1][1], tokens("striped", [0, length], world, rank))
    assert sequence_layout({}, "contiguous", "striped", group=group) == {}


@case
def one_pack_and_one_unpack(group: TorchGroup) -> None:
    """Also of packed sequences of any length, forward and backward; nothing is sent from full tensors."""
    world, rank = group.size(), group.rank()
    bounds = [0, 7, 7, 30, 64]
    x = torch.randn(len(tokens("striped", bounds, world, rank)), 8, requires_grad=True)
    options: dict[str, Any] = {"dim": 0, "cu_seqlens": bounds, "group": group}
    counts = []
    for _ in range(2):
        with (
            mock.patch.object(backend, "all_to_all", wraps=backend.all_to_all) as exchange,
            mock.patch.object(TablePass, "pack", autospec=True, side_effect=TablePass.pack) as pack,
            mock.patch.object(TablePass, "unpack", autospec=True, side_effect=TablePass.unpack) as unpack,
        ):
            y = sequence_layout(x, "striped", "contiguous", **options)
            y.sum().backward()
            counts.append((exchange.call_count, pack.call_count, unpack.call_count))
    assert set(counts) <= ({(2, 2, 2)} if world > 1 else {(0, 0, 0), (0, 2, 2)})
    with mock.patch.object(backend, "all_to_all", wraps=backend.all_to_all) as exchange:
        full = torch.randn(64, 8)
        same(sequence_layout(full, "full", "striped", **options), full[tokens("striped", bounds, world, rank)])
        assert exchange.call_count == 0


@case
def the_same_layout_is_handed_back(group: TorchGroup) -> None:
    x = torch.randn(2, 4 * group.size(), 3, requires_grad=True)
    for kind in KINDS:
        assert sequence_layout(x, kind, kind, group=group) is x
    assert sequence_layout(x, "striped", ("striped", [0, x.shape[1] * group.size()]), group=group) is x
    if group.size() == 1:
        assert sequence_layout(x, "striped", "zigzag", group=group) is x
    with torch.no_grad():
        assert not sequence_layout(x, "striped", "striped", group=group).requires_grad


@case
def views_and_kinds(group: TorchGroup) -> None:
    """Any strides, overlapping windows, lazy views, every dtype; results have memory of their own."""
    world, rank = group.size(), group.rank()
    length = 6 * world
    bounds = [0, 2 * world, length]
    mine, goal = tokens("zigzag", bounds, world, rank), tokens("striped", [0, length], world, rank)
    options: dict[str, Any] = {"cu_seqlens": bounds, "group": group}
    full = torch.arange(2.0 * length * 4).view(2, length, 4)
    x = full[:, mine]
    apart = torch.zeros(2, 2 * len(mine), 9)[:, ::2, 3:7].copy_(x)
    shifted = torch.empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for given in (
        x,
        x.transpose(0, 1).contiguous().transpose(0, 1),
        x.mT.contiguous().mT,
        apart,
        shifted,
        (-x)._neg_view(),
    ):
        for _ in range(2):
            same(sequence_layout(given, "zigzag", ("striped", None), **options), full[:, goal])
    same(
        sequence_layout(torch.ones(1, 1, 4).expand(x.shape), "zigzag", "striped", **options),
        torch.ones(2, len(tokens("striped", bounds, world, rank)), 4),
    )
    for dtype in (torch.bool, torch.int64, torch.float8_e4m3fn, torch.bfloat16, torch.complex64, torch.uint8):
        other = random_bits((2, length), dtype)
        same(sequence_layout(other[:, mine], "zigzag", ("striped", None), **options), other[:, goal])
    z = torch.complex(full, -full)
    same(sequence_layout(z[:, mine].conj(), "zigzag", ("striped", None), **options), z.conj().resolve_conj()[:, goal])
    with torch.inference_mode():
        same(sequence_layout(x, "zigzag", ("striped", None), **options), full[:, goal])
    twice = sequence_layout([x, x], "zigzag", ("striped", None), **options)
    twice[0].add_(int(world > 1))  # one rank gets its tensors back
    same(twice[1], full[:, goal])
    double = x.double().requires_grad_()
    y = sequence_layout(double, "zigzag", ("striped", None), **options)
    (once,) = torch.autograd.grad((y**3).sum(), double, create_graph=True)
    (grad,) = torch.autograd.grad(once.sum(), double)
    assert torch.equal(grad, 6 * x.double())


@case
def boundaries(group: TorchGroup) -> None:
    """As any sequence of ints; uneven sequences by (0, S); without tokens."""
    world, rank = group.size(), group.rank()
    bounds = [0, 3, 3, 13]
    full = torch.arange(13.0)
    x = full[tokens("contiguous", bounds, world, rank)]
    expected = full[tokens("striped", bounds, world, rank)]
    for given in (
        bounds,
        tuple(bounds),
        torch.tensor(bounds),
        torch.tensor(bounds, dtype=torch.int32),
        np.array(bounds),
    ):
        same(sequence_layout(x, "contiguous", "striped", dim=0, cu_seqlens=given, group=group), expected)
    one = full[tokens("striped", [0, 13], world, rank)]
    same(sequence_layout(x, "contiguous", ("striped", None), dim=0, cu_seqlens=bounds, group=group), one)
    same(sequence_layout(one, ("striped", None), "contiguous", dim=0, cu_seqlens=bounds, group=group), x)
    same(sequence_layout(one, "striped", "full", dim=0, cu_seqlens=(0, 13), group=group), full)
    same(sequence_layout(full, "full", "striped", dim=0, group=group), one)
    for empty in ([0], [0, 0, 0]):
        for kinds in PAIRS:
            assert sequence_layout(torch.ones(2, 0), *kinds, cu_seqlens=empty, group=group).shape == (2, 0)
            assert sequence_layout(torch.ones(0, 4 * world), *kinds, group=group).shape[0] == 0


@case
def refusals(group: TorchGroup) -> None:
    """Before anything is sent, on every rank, by name; the group stays usable."""
    world = group.size()
    x = torch.ones(2, 4)

    def call(x: Any = x, source: Any = "contiguous", target: Any = "striped", **options: Any) -> Any:
        return sequence_layout(x, source, target, group=group, **options)

    for kind, words, options in (
        (ArgumentError, "the target must be one of contiguous, zigzag, striped, full", {"target": "zig-zag"}),
        (ArgumentError, "the source must be one of", {"source": None}),
        (ArgumentError, "the source must be one of", {"source": np.array(["zigzag", "full"])}),
        (ArgumentError, "the source must be one of", {"source": ("zigzag",)}),
        (ArgumentError, "the source must be one of", {"source": ["zigzag", None]}),
        (ArgumentError, "tensor must be a tensor|expected a tensor", {"x": 3}),
        (ArgumentError, "a must be a tensor, not NoneType", {"x": {"a": None}}),
        (ShapeError, "dim 2 is out of range", {"dim": 2}),
        (ShapeError, "dim 1 is out of range", {"x": {"a": x, "b": torch.ones(4)}}),
        (ArgumentError, "a dim must be an int", {"dim": "1"}),
        (ArgumentError, "cu_seqlens must be ints", {"cu_seqlens": [0, 1.5]}),
        (ArgumentError, "cu_seqlens must be ints", {"cu_seqlens": 4}),
        (ArgumentError, "cu_seqlens must be ints", {"cu_seqlens": torch.tensor([0.0, 4.0])}),
        (ArgumentError, "cu_seqlens must be ints", {"cu_seqlens": torch.tensor([[0, 4]])}),
        (ArgumentError, "cu_seqlens cannot be read", {"cu_seqlens": torch.empty(2, dtype=torch.int64, device="meta")}),
        (ShapeError, "must start with 0", {"cu_seqlens": [1, 4 * world]}),
        (ShapeError, "must start with 0", {"cu_seqlens": []}),
        (ShapeError, "descends from 4 to 2 after sequence 1", {"cu_seqlens": [0, 4, 2, 4 * world]}),
        (ShapeError, "the source: cu_seqlens must start", {"source": ("striped", [3])}),
        (ShapeError, r"\[2, 4\] on rank", {"cu_seqlens": [0, 4 * world + 4]}),
        (ShapeError, "cu_seqlens ends with 9, but dim 1", {"source": ("striped", [0, 8]), "target": ("full", [0, 9])}),
        (ShapeError, "into .* chunks .* but the sequence has", {"target": "zigzag", "x": torch.ones(2, 1)}),
        (ShapeError, "but sequence 1 has 1 tokens", {"target": "zigzag", "cu_seqlens": [0, 4 * world - 1, 4 * world]}
         | ({"cu_seqlens": [0, 2 * world, 2 * world + 1, 4 * world]})),
        (ArgumentError, "grad must be", {"grad": "none"}),
        (CommError, "sequence_layout: tensor is .*meta|no data", {"x": x.to("meta")}),
        (CommError, "sequence_layout", {"x": x.to_sparse()}),
    ):  # fmt: skip
        with pytest.raises(kind, match=words) as caught:
            call(**options)
        assert "sequence" in str(caught.value), options
        if world > 1:  # on one rank only
            with pytest.raises(CommError) as caught:
                call(**(options if group.rank() == world - 1 else {"target": "full"}))
            if group.rank() != world - 1:
                assert isinstance(caught.value, MismatchError)
                assert f"refused on other ranks, nothing was sent: rank {world - 1} of the group" in str(caught.value)
    for differ in ({"target": "full"}, {"x": torch.ones(3, 4)}, {"x": x.double()}, {"cu_seqlens": [0, 1, 4 * world]}):
        if world == 4:
            local = torch.ones(2, len(tokens("contiguous", differ.get("cu_seqlens", [0, 16]), world, group.rank())))
            with pytest.raises((MismatchError, ShapeError), match=r"different plans|refused|has"):
                call(**({"x": local} | differ if group.rank() == 2 else {"target": "contiguous", "source": "striped"}))
    with pytest.raises(UnsupportedError, match="sequence_layout"):
        torch.func.vmap(lambda each: sequence_layout(each, "contiguous", "striped", dim=0, group=group))(x)
    with pytest.raises(GroupError, match="sequence_layout"):
        sequence_layout(x, "contiguous", "striped", group="no such group")
    assert sequence_layout(x, "contiguous", "full", group=group).shape == (2, 4 * world)


@case
def plans_of_states(group: TorchGroup) -> None:
    """``Layout.sequence`` in plans: other dims, casts, ``out``."""
    world, rank, ranks = group.size(), group.rank(), dist.get_process_group_ranks(group)
    shapes = {"hidden": (8 * world, 2, 4), "positions": (2, 8 * world)}
    dims = {"hidden": 0, "positions": 1}
    sides = [
        {name: Layout.sequence(shape, dims[name], kind, ranks) for name, shape in shapes.items()}
        for kind in ("zigzag", "striped")
    ]
    full = {
        "hidden": random_bits(shapes["hidden"], torch.int8).float(),
        "positions": torch.arange(8 * world).expand(2, -1),
    }
    mine, goal = (tokens(kind, [0, 8 * world], world, rank) for kind in ("zigzag", "striped"))
    given = {name: x.index_select(dims[name], mine) for name, x in full.items()}
    expected = {name: x.index_select(dims[name], goal) for name, x in full.items()}
    plan = reshard_plan(given, *sides, group=group, dtype={"hidden": torch.bfloat16, "positions": torch.int64})
    expected["hidden"] = expected["hidden"].bfloat16()
    out = {name: torch.zeros_like(x) for name, x in expected.items()}
    for results in (plan.execute(given), plan.execute(given), plan.execute(given, out=out)):
        for name, x in results.items():
            same(x, expected[name])
    assert "striped" not in str(plan)
    x = full["hidden"].index_select(0, mine)
    gaps = torch.zeros(*expected["hidden"].shape[:2], 9)[..., 2:6]
    same(reshard(x, sides[0]["hidden"], sides[1]["hidden"], group=group, out=gaps), full["hidden"][goal])


@pytest.mark.ranks(1, 2, (1, 3), pytest.param(4, marks=pytest.mark.slow))
def test_uses(group: TorchGroup) -> None:
    run_cases(case, group)


def test_torch_compile_breaks_its_graph(group: TorchGroup) -> None:
    """The graph breaks, with the values of eager mode."""
    world, rank = group.size(), group.rank()
    full = torch.arange(8.0 * world)
    x = full[tokens("contiguous", [0, 8 * world], world, rank)].requires_grad_()
    function = torch.compile(
        lambda x: sequence_layout(x * 2, "contiguous", "zigzag", dim=0, group=group) + 1, backend="aot_eager"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Dynamo looks at .grad of x * 2
        y = function(x)
    assert torch.equal(y, full[tokens("zigzag", [0, 8 * world], world, rank)] * 2 + 1)
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 2))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (((4, 4), 2, "full", [0]), "has no dim 2"),
        (((4, 4), "0", "full", [0]), "the dim must be ints"),
        (((4, 4), 0, "ring", [0]), "the kind must be one of"),
        (((4, 4), 0, np.array(["full", "full"]), [0]), "the kind must be one of"),
        (((4, 4), 0, "striped", []), "no ranks"),
        (((4, 4), 0, "striped", [0, 0]), "listed twice"),
        (((4, 4), 0, "striped", 3), "ranks must be ints"),
        (((4, 4), 0, "zigzag", [0, 1, 2]), "divides each sequence into 6 chunks for 3 ranks, but the sequence has 4"),
        (((4, 4), 0, "striped", [0, 1], [0, 3]), "ends with 3, but dim 0"),
        ((3, 0, "striped", [0, 1]), "a shape must be ints"),
    ],
)
def test_sequences_that_are_none(arguments: tuple[Any, ...], words: str) -> None:
    with pytest.raises(CommError, match=words):
        Layout.sequence(*arguments)
