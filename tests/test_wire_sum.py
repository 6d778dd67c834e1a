"""Reduce-scatter over a 16-bit wire: bit for bit the fp32 sum in rank order of the wire's values, rounded once."""

import math
import time
import weakref
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
from bits import bits
from hypothesis import given, settings
from hypothesis import strategies as st
from pool import Pool
from sums_by_hand import FLOATS, by_hand, shard, values
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm import collective, p2p, record, variables
from tritoncomm import mappings as m
from tritoncomm.core import exchange, ops, passes, wire_chunks, wire_sum
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import ArgumentError, MismatchError, ShapeError, UnsupportedError


def run_cases(group: ProcessGroup, cases: list[dict[str, Any]]) -> int:
    """Compare every case with the sum by hand; the number of cases."""
    world, rank = group.size(), group.rank()
    for i, case in enumerate(cases):
        time.sleep(0.001 * ((3 * rank + i) % 4))  # ranks come in another order every time
        shape, dim, dtype, wire = case["shape"], case["dim"], case["dtype"], case["wire"]
        layout, result, scale = case.get("layout", "contiguous"), case.get("result"), case.get("scale")
        sizes = case.get("sizes") or (shape[dim] // world,) * world
        layouts = layout.split("|")  # of the ranks in turn
        every = [values(each, shape, dtype, layouts[each % len(layouts)]) for each in range(world)]
        op = ReduceOp.AVG if case.get("average") else ReduceOp.SUM
        out = None
        if result is not None:
            out = values(99, shard(every[0], dim, sizes, rank).shape, result).clone()
        before = out.clone() if out is not None and case.get("accumulate") else None
        factor = (1.0 if scale is None else scale) / world if case.get("average") else scale
        expected = by_hand(
            [shard(x, dim, sizes, rank) for x in every], wire, result or dtype, factor, before,
        )  # fmt: skip
        with ops.path(case.get("path", "auto")):
            y = collective.reduce_scatter(
                every[rank], dim, group, op, case.get("asynchronous", False),
                sizes=case.get("sizes"), wire=wire, scale=scale, out=out, accumulate=case.get("accumulate", False),
            )  # fmt: skip
        if case.get("asynchronous"):
            y, handle = y
            assert handle.wait() is y
        assert out is None or y is out
        assert y.is_contiguous()
        assert y.dtype is (result or dtype)
        assert torch.equal(bits(y), bits(expected)), case
    return len(cases)


def grid(world: int) -> list[dict[str, Any]]:
    """Dtypes, dims, layouts and options, each with the others' first."""
    shape = (4 * world, 8, 2 * world)
    cases: list[dict[str, Any]] = []
    for dtype, wire in product(FLOATS, wire_sum.WIRES):
        cases.append({"shape": shape, "dim": 0, "dtype": dtype, "wire": wire})
    for dim, layout in product((0, -1, 2), ("contiguous", "transposed", "strided|contiguous", "columns|transposed")):
        cases.append({"shape": shape, "dim": dim, "dtype": torch.float32, "wire": torch.bfloat16, "layout": layout})
    plain = {"shape": shape, "dim": 0, "dtype": torch.bfloat16, "wire": torch.bfloat16}
    for result in FLOATS:
        cases += [plain | {"result": result, "accumulate": each, "scale": 0.3} for each in (False, True)]
    uneven = tuple([3, 0, 5, 1, 2, 0, 7, 4][:world])
    for dim in (0, 1):
        sizes_shape = (sum(uneven), 6) if dim == 0 else (6, sum(uneven))
        cases.append(plain | {"shape": sizes_shape, "dim": dim, "sizes": uneven})
    # One index of the split dim per rank: by memory some of them are in rank order, also where the indices are not.
    for layout, dim in product(("transposed", "transposed|contiguous", "columns|transposed", "strided"), (0, -1)):
        small = (world, 6) if dim == 0 else (6, world)
        cases.append(plain | {"shape": small, "dim": dim, "layout": layout})
        cases.append(plain | {"shape": (*small[:1], 2, *small[1:]), "dim": dim, "layout": layout, "asynchronous": True})
    cases += [plain | {"average": True}, plain | {"average": True, "scale": 2.0}, plain | {"asynchronous": True}]
    cases += [plain | {"shape": (0, 4)}, plain | {"shape": (4 * world, 0)}, plain | {"shape": (world,)}]
    return cases


@pytest.mark.parametrize("world", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
def test_the_sum_is_that_of_the_wire(pool: Pool, world: int) -> None:
    assert min(pool.run(run_cases, grid(world), world=world)) > 30


def test_the_kernels_have_the_same_bits(pool: Pool) -> None:
    cases = [case | {"path": "triton"} for case in grid(2)[::3]]
    assert min(pool.run(run_cases, cases, world=2)) > 10


def drawn(seed: int, world: int) -> list[dict[str, Any]]:
    """Cases that hypothesis would have drawn, the same on every rank."""
    made = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[int(torch.randint(len(options), (), generator=made))]

    cases = []
    for _ in range(50):
        dims = pick(1, 2, 3)
        shape = [pick(1, 2, 3, 5, 8) for _ in range(dims)]
        dim, sizes = pick(*range(dims)), None
        if pick(True, False):
            sizes = tuple(pick(0, 1, 2, 5) for _ in range(world))
            shape[dim] = sum(sizes)
        else:
            shape[dim] *= world
        result = pick(None, *FLOATS)
        cases.append({
            "shape": tuple(shape), "dim": dim, "sizes": sizes, "dtype": pick(*FLOATS), "wire": pick(*wire_sum.WIRES),
            "layout": pick("contiguous", "strided", "columns", "transposed", "transposed|contiguous"),
            "result": result, "average": pick(True, False),
            "accumulate": result is not None and pick(True, False), "scale": pick(None, 0.5, -1.7),
            "asynchronous": pick(True, False, False),
        })  # fmt: skip
    return cases


@pytest.mark.parametrize(("world", "seed"), [(2, 0), (2, 1), (4, 2), (4, 3)])
def test_drawn_cases(pool: Pool, world: int, seed: int) -> None:
    assert pool.run(run_cases, drawn(seed, world), world=world) == [50] * world


def run_chunks(group: ProcessGroup) -> int:
    """Every size of a chunk has the same bits, on one level and on two."""
    world, rank, compared = group.size(), group.rank(), 0
    for shape, dim in (((8 * world, 3), 0), ((3, 8 * world), 1), ((5, 3, 4 * world), 2), ((16 * world,), 0)):
        sizes = (shape[dim] // world,) * world
        layouts = ["contiguous", "columns", "strided", "transposed"]  # of the ranks: chunks are the same for all
        every = [values(each, shape, torch.float32, layouts[each] if dim else "contiguous") for each in range(world)]
        own = [shard(x, dim, sizes, rank) for x in every]
        layout = (every[rank].shape, every[rank].stride(), dim, sizes)
        for node, between in ((None, torch.float32), (2, torch.float32), (2, torch.bfloat16)):
            nodes = None if node is None else wire_sum.Nodes(world // node, node, rank // node, rank % node)
            wire = wire_sum.Wire(torch.bfloat16, between, nodes)
            expected = by_hand(own, torch.bfloat16, torch.float32, 0.5, node=node, between=between)
            for chunk_bytes in (None, 2, 10, 64, 1 << 20):
                out = torch.full((own[0].numel(),), math.nan)
                wire_sum.sum_shards(
                    [every[rank]], (layout,), out, group, "f", wire, 0.5, chunk_bytes=chunk_bytes
                )  # fmt: skip
                assert torch.equal(bits(out.view(own[0].shape)), bits(expected)), (shape, node, chunk_bytes)
                compared += 1
    return compared


def test_chunks_and_nodes_have_the_same_bits(pool: Pool) -> None:
    assert pool.run(run_chunks, world=4) == [60] * 4


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_chunks_cover_every_shard_once(data: st.DataObject) -> None:
    world = data.draw(st.sampled_from([1, 2, 3, 4]))
    layouts = []
    for _ in range(data.draw(st.integers(1, 3))):
        shape = data.draw(st.lists(st.integers(0, 5), min_size=1, max_size=3))
        dim = data.draw(st.integers(0, len(shape) - 1))
        sizes = data.draw(st.lists(st.integers(0, 4), min_size=world, max_size=world))
        shape[dim] = sum(sizes)
        x = torch.empty(shape)
        layouts.append((tuple(shape), x.stride(), dim, tuple(sizes)))
    nodes = data.draw(st.sampled_from([None, (2, world // 2)])) if world % 2 == 0 else None
    most = data.draw(st.integers(1, 40))
    tensors, first = [], 0
    for shape, *_ in layouts:
        tensors.append(torch.arange(first, first + math.prod(shape), dtype=torch.float32).view(shape))
        first += math.prod(shape)
    order = (
        list(range(world)) if nodes is None else [n * nodes[1] + i for i in range(nodes[1]) for n in range(nodes[0])]
    )
    plans = []
    for rank in range(world):
        place = None if nodes is None else wire_sum.Nodes(*nodes, rank // nodes[1], rank % nodes[1])
        arguments = (tuple(layouts), world, rank, most, torch.float32, torch.float32, place)
        plans.append(wire_chunks.plan_chunks.__wrapped__(*arguments))
    assert len({len(plan) for plan in plans}) == 1
    for rank in range(world):
        found, at = [], 0
        for chunks in zip(*plans, strict=True):
            chunk, counts = chunks[rank], [each.size for each in chunks]
            wire = torch.full((sum(counts),), math.nan)
            chunk.levels[0].pack.pack(tensors, wire)
            assert chunk.start == at
            at += chunk.size
            parts = dict(zip(order, wire.split([counts[each] for each in order]), strict=True))
            found.append(parts[rank])
        own = [shard(x, dim, sizes, rank).flatten() for x, (_, _, dim, sizes) in zip(tensors, layouts, strict=True)]
        assert torch.equal(torch.cat([torch.empty(0), *found]), torch.cat(own))


def run_many(group: ProcessGroup, path: str) -> int:
    """Several tensors by one exchange, with uneven shards: each is the sum by hand."""
    world, rank, compared = group.size(), group.rank(), 0
    shapes = [((5, 8), 1), ((16,), 0), ((7, 3), 0), ((2, 1, 4), 1), ((0, 3), 1), ((3, 4, 6), -1)]
    for dtype, result, scale in product(FLOATS[:2], (None, torch.float32), (None, 0.3)):
        every = [[values(10 * i + each, shape, dtype) for i, (shape, _) in enumerate(shapes)] for each in range(world)]
        with ops.path(path):
            found = collective.split_reduce_scatter(
                every[rank], [dim for _, dim in shapes], group, dtype=result, scale=scale, wire=torch.bfloat16
            )
        for i, (shape, dim) in enumerate(shapes):
            sizes = chunk_sizes(shape[dim], world)
            parts = [shard(each[i], dim, sizes, rank) for each in every]
            expected = by_hand(parts, torch.bfloat16, result or dtype, scale)
            assert torch.equal(bits(found[i]), bits(expected)), (i, dtype, result, scale)
            compared += 1
        first = found[0].untyped_storage().data_ptr()
        assert all(x.untyped_storage().data_ptr() == first for x in found)
    with pytest.raises(ArgumentError, match="need wire"):
        collective.split_reduce_scatter(torch.ones(4), 0, group, exchange="node")
    with pytest.raises(ArgumentError, match="one floating-point dtype"):
        collective.split_reduce_scatter([torch.ones(4), torch.ones(4).half()], 0, group, wire=torch.bfloat16)
    return compared


@pytest.mark.parametrize(("world", "path"), [(1, "torch"), (2, "torch"), (2, "triton"), (4, "torch")])
def test_several_tensors_travel_together(pool: Pool, world: int, path: str) -> None:
    assert pool.run(run_many, path, world=world) == [48] * world


def run_all_reduce(group: ProcessGroup) -> int:
    world, rank, compared = group.size(), group.rank(), 0
    for shape, dtype, layout, average in product(
        ((8,), (3, 5), (1,), (0,), (4, 4), (9,)), FLOATS[:3], ("contiguous", "strided"), (False, True)
    ):
        every = [values(each, shape, dtype, layout) for each in range(world)]
        expected = by_hand([each.clone() for each in every], torch.bfloat16, dtype, 1 / world if average else None)
        y = collective.all_reduce(every[rank], group, ReduceOp.AVG if average else ReduceOp.SUM, wire=torch.bfloat16)
        assert (y is every[rank]) == every[rank].is_contiguous()
        assert torch.equal(bits(y), bits(expected)), (shape, dtype, layout)
        compared += 1
    with record.recording() as counted:
        collective.all_reduce(torch.ones(64), group, wire=torch.bfloat16)
    assert sum(count.calls for count in counted.values()) == 1
    assert sum(count.bytes_sent for count in counted.values()) == 64 * (world - 1) // world * (2 + 4)
    if world == 4:  # parts of 3, 3, 3 and 0 elements, which are gathered as 3 each: 12, and copied back once
        with record.recording() as counted:
            collective.all_reduce(torch.ones(9), group, wire=torch.bfloat16)
        own = (3, 3, 3, 0)[rank]
        assert sum(count.bytes_sent for count in counted.values()) == (9 - own) * 2 + 3 * 4 * 3
        assert sum(count.bytes_copied for count in counted.values()) == 9 * (4 + 2) + own * (4 * 2 + 4) + 2 * 9 * 4
    with pytest.raises(UnsupportedError, match="no async_op"):
        collective.all_reduce(torch.ones(4), group, async_op=True, wire=torch.bfloat16)
    with pytest.raises(ArgumentError, match="need wire"):
        collective.all_reduce(torch.ones(4), group, scale=2.0)
    return compared


@pytest.mark.parametrize("world", [1, 2, 4])
def test_every_rank_has_the_sum(pool: Pool, world: int) -> None:
    assert pool.run(run_all_reduce, world=world) == [72] * world


def run_counts(group: ProcessGroup) -> tuple[int, int, int]:
    x = torch.ones(1 << 12, 1 << 9, dtype=torch.float32)
    with record.recording() as counted:
        collective.reduce_scatter(x, 0, group, wire=torch.bfloat16)
    (count,) = counted.values()
    return count.calls, count.bytes_copied, count.bytes_sent


def test_bytes(pool: Pool) -> None:
    """Read once, the wire written once and read once, the result written once; half of the bytes of fp32 are sent."""
    elements, world = 1 << 21, 2
    copied = elements * (4 + 2) + elements * 2 + elements // world * 4
    assert pool.run(run_counts, world=world) == [(1, copied, elements // world * 2)] * world


def run_unpacked(group: ProcessGroup) -> list[tuple[str, int, int]]:
    found = []
    for x, dim in ((torch.ones(8, 4), 0), (torch.ones(4, 8), 1), (torch.ones(8, 8)[:, :4], 0)):
        with record.recording() as counted:
            collective.reduce_scatter(x.bfloat16() if x.is_contiguous() else x, dim, group, wire=torch.bfloat16)
        ((_, path), count), *_ = counted.items()
        found.append((path, count.bytes_copied, count.bytes_sent))
    return found


def test_what_lies_in_order_is_not_packed(pool: Pool) -> None:
    """A contiguous tensor of the wire's dtype is the wire: it is read by the sum alone."""
    summed = 32 * 2 + 16 * 2
    expected = [
        ("torch", summed, 32),
        ("torch", 2 * 32 * 2 + summed, 32),
        ("torch", 32 * (4 + 2) + 32 * 2 + 16 * 4, 32),
    ]
    assert pool.run(run_unpacked, world=2) == [expected] * 2


def run_lazy(group: ProcessGroup, path: str) -> None:
    """A lazy negative is summed by its values, also where its memory is in the order of the wire."""
    for dtype, dim in product((torch.bfloat16, torch.float32), (0, 1)):
        x = values(group.rank(), (4, 8), dtype)
        lazy = torch._neg_view(-x)
        assert lazy.is_neg()
        with ops.path(path):  # pyright: ignore[reportArgumentType]
            found, expected = (collective.reduce_scatter(each, dim, group, wire=torch.bfloat16) for each in (lazy, x))
            whole = collective.all_reduce(torch._neg_view(-x), group, wire=torch.bfloat16)
        assert torch.equal(bits(found), bits(expected)), (dtype, dim)
        assert torch.equal(whole.chunk(group.size(), dim)[group.rank()], found), (dtype, dim)


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_lazy_bits(pool: Pool, path: str) -> None:
    pool.run(run_lazy, path, world=2)


def run_memory(group: ProcessGroup) -> float:
    """Most bytes of buffers that are alive at a time, as a share of the wire's."""
    live = [0, 0]
    made = wire_sum.empty

    def tracked(*arguments: Any) -> Tensor:
        x = made(*arguments)
        live[0] += x.nbytes
        live[1] = max(live)
        weakref.finalize(x, lambda size: live.__setitem__(0, live[0] - size), x.nbytes)
        return x

    x = torch.ones(48, 1 << 12)
    with (
        mock.patch.object(passes, "empty", tracked),
        mock.patch.object(exchange, "empty", tracked),
        mock.patch.object(wire_sum, "_LEAST", 1 << 10),
    ):
        for _ in range(2):
            collective.reduce_scatter(x, 0, group, wire=torch.bfloat16)
    return live[1] / (2 * x.numel())


def test_memory(pool: Pool) -> None:
    """A few chunks of twelve: four, and what Gloo has not let go yet; all at once would be the wire twice."""
    for share in pool.run(run_memory, world=2):
        assert 3 / 12 < share <= 7 / 12


def run_errors(group: ProcessGroup) -> None:
    x, wire = torch.ones(4, 4), {"wire": torch.bfloat16}
    bad: list[tuple[type[Exception], str, Any, dict[str, Any]]] = [
        (ArgumentError, "wire must be bfloat16 or float16, not torch.int8", x, {"wire": torch.int8}),
        (ArgumentError, "scale, accumulate needs wire", x, {"scale": 2.0, "accumulate": True}),
        (ArgumentError, "wire_between needs exchange='node'", x, wire | {"wire_between": torch.float32}),
        (ArgumentError, "wire_between must be", x, wire | {"wire_between": torch.int8, "exchange": "node"}),
        (ArgumentError, "exchange must be", x, wire | {"exchange": "ring"}),
        (ArgumentError, "accumulate needs out", x, wire | {"accumulate": True}),
        (ArgumentError, "out must be contiguous", x, wire | {"out": torch.ones(4, 4)}),
        (ArgumentError, "out must be contiguous", x, wire | {"out": torch.ones(2, 4, dtype=torch.int32)}),
        (ArgumentError, "out shares memory", x, wire | {"out": x[1:3]}),
        (ArgumentError, "out shares memory", x.t(), wire | {"out": x[:2]}),
        (ArgumentError, "out requires grad", x, wire | {"out": torch.ones(2, 4, requires_grad=True)}),
        (UnsupportedError, "op is SUM or AVG", x, wire | {"op": ReduceOp.MAX}),
        (ArgumentError, "scale must be a number, not str", x, wire | {"scale": "2"}),
        (UnsupportedError, "must be of one of the dtypes float16", x.int(), wire),
        (UnsupportedError, "must be of one of the dtypes", x.to(torch.complex64), wire),
        (UnsupportedError, "float64, not torch.float8_e4m3fn", x.to(torch.float8_e4m3fn), wire),
        (ShapeError, "^reduce_scatter: .*does not divide", torch.ones(3, 4), wire),
        (ShapeError, "sizes", x, wire | {"sizes": (1, 1)}),
    ]
    for kind, text, tensor, options in bad:
        with pytest.raises(kind, match=text):
            collective.reduce_scatter(tensor, 0, group, **options)
    for shape in ((4, 6), (1 << 10, 1 << 10)):  # of one piece, and of several: the shard itself is a place for the sum
        for dtype, asynchronous in product((torch.bfloat16, torch.float32), (False, True)):
            every = [values(each, shape, dtype) for each in range(2)]
            own = every[group.rank()].chunk(2)[group.rank()]
            expected = by_hand([each.chunk(2)[group.rank()].clone() for each in every], torch.bfloat16, dtype)
            y = collective.reduce_scatter(every[group.rank()], 0, group, async_op=asynchronous, out=own, **wire)
            y = y[1].wait() if asynchronous else y
            assert y is own
            assert torch.equal(bits(y), bits(expected))
    memory = torch.ones(6, 4)  # out beside the tensor in one memory, as in a flat buffer of gradients
    assert torch.equal(collective.reduce_scatter(memory[:4], 0, group, out=memory[4:], **wire), torch.full((2, 4), 2.0))
    with pytest.raises(ArgumentError, match=r"^all_reduce: scale must be a number"):
        collective.all_reduce(x, group, scale="2", **wire)
    with pytest.raises(ArgumentError, match=r"^split_reduce_scatter: scale must be a number"):
        collective.split_reduce_scatter([x], 0, group, scale="2", **wire)
    with variables.NODE.override(1), pytest.raises(UnsupportedError, match="on 2 nodes"):
        collective.reduce_scatter(x, 0, group, **wire)
    with variables.NODE.override(1):
        assert torch.equal(collective.reduce_scatter(x, 0, group, exchange="flat", **wire), 2 * x[:2])


def test_errors_by_name(pool: Pool) -> None:
    pool.run(run_errors, world=2)


def run_seen(group: ProcessGroup) -> list[tuple[str, int, int, int]]:
    """The record sees one call each, with all that it copies and sends; check mode compares them."""
    collective.reduce_scatter(torch.ones(8), 0, group, wire=torch.bfloat16)
    seen = []
    with p2p.check():
        for call in (
            lambda: collective.reduce_scatter(torch.ones(8), 0, group, wire=torch.bfloat16),
            lambda: collective.split_reduce_scatter([torch.ones(8)], 0, group, wire=torch.bfloat16),
            lambda: collective.all_reduce(torch.ones(8), group, wire=torch.bfloat16),
            lambda: collective.all_reduce(torch.ones(2, 4).t(), group, wire=torch.bfloat16),
        ):
            with record.recording() as counted:
                call()
            ((name, _), count), *more = counted.items()
            assert not more
            seen.append((name, count.calls, count.bytes_copied, count.bytes_sent))
    kinds = torch.bfloat16, torch.float16
    with p2p.check(), pytest.raises(MismatchError, match="wire"):
        collective.reduce_scatter(torch.ones(8), 0, group, wire=kinds[group.rank()])
    return seen


def test_the_record_and_check_mode_see_them(pool: Pool) -> None:
    summed = 8 * (4 + 2) + 8 * 2 + 4 * 4
    expected = [("reduce_scatter", 1, summed, 8), ("split_reduce_scatter", 1, summed, 8)]
    expected += [("all_reduce", 1, summed, 8 + 16), ("all_reduce", 1, summed + 2 * 32, 8 + 16)]
    assert pool.run(run_seen, world=2) == [expected] * 2


def run_compiled(group: ProcessGroup) -> bool:
    x = torch.randn(8, 4)
    step = torch.compile(lambda x: collective.reduce_scatter(2 * x, 0, group, wire=torch.bfloat16) + 1, backend="eager")
    return torch.equal(step(x), collective.reduce_scatter(2 * x, 0, group, wire=torch.bfloat16) + 1)


def test_a_compiled_region_breaks_there(pool: Pool) -> None:
    assert pool.run(run_compiled, world=2) == [True, True]


def run_mapping(group: ProcessGroup, compiled: bool) -> int:
    """The mapping sums as the collective does; its gradient, and that one's gradient, are those without a wire."""
    world, rank, compared = group.size(), group.rank(), 0
    function: Any = lambda *args, **options: m.reduce_scatter_dim(*args, **options) * 1  # noqa: E731
    if compiled:
        function = torch.compile(function, backend="eager")
    uneven = (3, 0, 2, 1)[:world]
    for dtype, (dim, sizes) in product(FLOATS, ((0, None), (-1, None), (1, uneven))):
        shape = [4 * world, 6, 4 * world]
        if sizes is not None:
            shape[dim] = sum(sizes)
        x = values(rank, tuple(shape), dtype, "strided")
        assert not m.reduce_scatter_dim(x, dim, group, sizes=sizes, wire=torch.bfloat16).requires_grad
        x.requires_grad_()
        y = function(x, dim, group, sizes=sizes, wire=torch.bfloat16)
        expected = collective.reduce_scatter(x, dim, group, sizes=sizes, wire=torch.bfloat16)
        assert torch.equal(bits(y), bits(expected))
        weight = values(10 + rank, tuple(y.shape), dtype).requires_grad_()
        (grad,) = torch.autograd.grad(y, x, weight, create_graph=True)
        assert torch.equal(grad, collective.all_gather(weight, dim % 3, group, sizes=sizes))
        (again,) = torch.autograd.grad(grad.sum(), weight)
        assert torch.equal(again, torch.full_like(weight, world))
        compared += 1
    with pytest.raises(ArgumentError, match=r"^reduce_scatter_dim: exchange needs wire"):
        m.reduce_scatter_dim(torch.ones(world), 0, group, exchange="node")
    with pytest.raises(
        UnsupportedError, match=r"^reduce_scatter_dim: with wire the tensor must be of one of the dtypes"
    ):
        m.reduce_scatter_dim(torch.ones(world).int(), 0, group, wire=torch.bfloat16)
    return compared


@pytest.mark.parametrize(
    ("world", "compiled"),
    [(2, False), *(pytest.param(*each, marks=pytest.mark.slow) for each in ((1, False), (2, True), (4, False)))],
)
def test_the_mapping(pool: Pool, world: int, compiled: bool) -> None:
    assert pool.run(run_mapping, compiled, world=world) == [12] * world


def run_nodes(group: ProcessGroup) -> None:
    world, rank = group.size(), group.rank()
    every = [values(each, (8, 6), torch.float32) for each in range(world)]
    own = [x.chunk(world)[rank] for x in every]
    for between in (None, torch.bfloat16):
        expected = by_hand(own, torch.float16, torch.float32, node=2, between=between or torch.float32)
        for asynchronous in (False, True):
            with variables.NODE.override(2):
                y = collective.reduce_scatter(
                    every[rank], 0, group, async_op=asynchronous, wire=torch.float16, exchange="node",
                    wire_between=between,
                )  # fmt: skip
            y = y[1].wait() if asynchronous else y
            assert torch.equal(bits(y), bits(expected))


def run_uneven_nodes(group: ProcessGroup) -> None:
    """Values of the wire's dtype lie in rank order, and the wire of two levels does not: they are packed."""
    world, rank, sizes = group.size(), group.rank(), (3, 1, 4, 2)
    every = [values(each, (10,), torch.bfloat16) for each in range(world)]
    own = [shard(x, 0, sizes, rank).clone() for x in every]
    for asynchronous in (False, True):
        with variables.NODE.override(2):
            y = collective.reduce_scatter(
                every[rank], 0, group, async_op=asynchronous, sizes=sizes, wire=torch.bfloat16, exchange="node"
            )
        y = y[1].wait() if asynchronous else y
        assert torch.equal(bits(y), bits(by_hand(own, torch.bfloat16, torch.bfloat16, node=2)))


def test_two_levels(pool: Pool) -> None:
    pool.run(run_nodes, world=4)
    pool.run(run_uneven_nodes, world=4)


def run_waits_in_other_orders(group: ProcessGroup) -> None:
    """Handles are waited for in another order on each node, with collectives of the program between them."""
    rank = group.rank()
    every = [[values(10 * i + each, (8, 6), torch.float32) for each in range(4)] for i in range(3)]
    with variables.NODE.override(2):
        started = [
            collective.reduce_scatter(x[rank], 0, group, async_op=True, wire=torch.bfloat16, exchange="node")
            for x in every
        ]
    assert torch.equal(collective.all_gather(torch.full((1,), float(rank)), 0, group), torch.arange(4.0))
    for i in (0, 1, 2) if rank < 2 else (2, 0, 1):
        y = started[i][1].wait()
        expected = by_hand([x.chunk(4)[rank] for x in every[i]], torch.bfloat16, torch.float32, node=2)
        assert torch.equal(bits(y), bits(expected))
    assert torch.equal(collective.all_gather(torch.full((1,), float(rank)), 0, group), torch.arange(4.0))


def test_two_levels_are_waited_for_in_any_order(pool: Pool) -> None:
    pool.run(run_waits_in_other_orders, world=4)
    pool.run(run_in_check_mode, world=4)


def run_in_check_mode(group: ProcessGroup) -> None:
    with variables.CHECK.override(True):
        run_waits_in_other_orders(group)


def test_what_overflows_is_inf(group: ProcessGroup) -> None:
    x = torch.full((group.size(),), 1e6)
    assert collective.reduce_scatter(x, 0, group, wire=torch.float16).isinf().all()
