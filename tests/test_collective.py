"""The collectives over any dim, op, layout and group, against closed forms."""

import enum
import itertools
from functools import reduce as fold
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fuzz_calls import assert_right
from mapping_cases import Call, Matrix
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import ArgumentError, UnsupportedError, record
from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.core import ops
from tritoncomm.core.plan import chunk_sizes

SIZES = {2: [(3, 4), (7, 0), (2, 2)], 4: [(1, 0, 4, 2), (2, 2, 2, 2)]}
LAYOUTS = ["contiguous", "transposed", "sliced"]
OPS: dict[str, Any] = {
    "SUM": torch.add,
    "AVG": None,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}


def held(
    group: ProcessGroup, shape: tuple[int, ...], dtype: torch.dtype = torch.float32, seed: int = 0
) -> list[Tensor]:
    made = [torch.Generator().manual_seed(seed + rank) for rank in range(group.size())]
    return [torch.randint(-4, 5, shape, generator=one).to(dtype) for one in made]


def laid_out(x: Tensor, layout: str) -> Tensor:
    if layout == "transposed":
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced":
        return torch.cat([x, x], -1)[..., : x.shape[-1]]
    return x.clone()


def same(found: Tensor, wanted: Tensor, what: object = "") -> None:
    assert found.dtype is wanted.dtype, what
    assert found.shape == wanted.shape, what
    assert torch.equal(found, wanted), (what, found, wanted)


def own(found: Tensor) -> None:
    assert found.is_contiguous()
    assert found._base is None


@pytest.mark.ranks(2, (1, 3), *(pytest.param(world, marks=pytest.mark.slow) for world in (4, 8)))
@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter"])
def test_gather_and_scatter_any_dim(group: ProcessGroup, name: str, path: str) -> None:
    """Also by sizes, which numpy may have."""
    name, world = f"collective.{name}", group.size()
    with record.recording() as counted:
        for dim, layout, asynchronous in itertools.product(range(-3, 3), LAYOUTS, (False, True)):
            if path == "triton" and layout != "contiguous":
                continue  # the strides that a kernel walks are in mappings/test_mappings.py
            options: Any = {"layout": layout, "dims": (dim, 0), "asynchronous": asynchronous, "path": path}
            assert_right(group, Call(name, (8, 8, 8), **options))
            for sizes in SIZES.get(world, ()):
                shape = [2, 3, 4]
                shape[dim] = sum(sizes)
                given = np.array(sizes) if asynchronous else sizes
                assert_right(group, Call(name, tuple(shape), sizes=(given, None), **options))
    assert (path == "triton") == any(each == "triton" for _, each in counted), counted


@pytest.mark.ranks(2, 4)
def test_all_to_all(group: ProcessGroup) -> None:
    even = [2] * group.size()
    rows = Matrix(((0, 2, 1, 0), (1, 0, 2, 1), (2, 1, 0, 2), (0, 2, 1, 0)))
    sizes: list[tuple[Any, Any]] = [
        (None, None),
        (even, None),
        (None, tuple(even)),
        (np.array(even), even),
        (None, rows),
    ]
    for given, layout, asynchronous in itertools.product(sizes, LAYOUTS, (False, True)):
        shape, options = (2 * group.size(), 3), {"layout": layout, "asynchronous": asynchronous}
        assert_right(group, Call("collective.all_to_all", shape, sizes=given, **options))


def test_a_handle_gives_the_result(group: ProcessGroup) -> None:
    x = torch.ones(4, 8, 4)
    for call, shape in ((c.all_gather, (4, 16, 4)), (c.reduce_scatter, (4, 4, 4))):
        out, handle = call(x, 1, group, async_op=True)
        assert out.shape == shape, "before wait()"
        assert handle.wait() is out
        assert handle.is_completed()


def _expected(op: str, parts: list[Tensor]) -> Tensor:
    if op == "AVG":
        return fold(torch.add, parts) / len(parts)
    return fold(OPS[op], parts)


def _supported(op: str, dtype: torch.dtype) -> bool:
    if dtype in (torch.float8_e4m3fn, torch.int16, torch.uint32):
        return False
    if op in ("BAND", "BOR", "BXOR"):
        return not dtype.is_floating_point and not dtype.is_complex
    if dtype.is_complex:
        return op in ("SUM", "AVG")
    return op != "AVG" or dtype.is_floating_point


def run_ops(group: ProcessGroup, op: str) -> None:
    rank, world = group.rank(), group.size()
    code = getattr(c.ReduceOp, op)
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.int32, torch.complex64, torch.float8_e4m3fn)
    for dtype in (*kinds, torch.int16, torch.uint32):
        parts = held(group, (4, 2), dtype)
        calls: dict[str, Any] = {
            "all_reduce": lambda x: c.all_reduce(x, group, code),
            "reduce_scatter": lambda x: c.reduce_scatter(x, 0, group, code),
            "reduce": lambda x: c.reduce(x, dist.get_process_group_ranks(group)[-1], group, code),
        }
        for name, call in calls.items():
            x = parts[rank].clone()
            if not _supported(op, dtype):
                with pytest.raises(UnsupportedError) as caught:
                    call(x)
                message = str(caught.value)
                assert name in message, message
                assert "gloo" in message, message
                assert str(dtype) in message, message
                assert op in message, message
                assert torch.equal(x.view(torch.uint8), parts[rank].view(torch.uint8))
                continue
            out, wanted = call(x), _expected(op, parts)
            if name == "reduce_scatter":
                wanted = wanted.chunk(world)[rank]
            if name != "reduce" or rank == world - 1:
                same(out, wanted, (op, dtype, name))
    after = torch.ones(2)
    same(c.all_reduce(after, group), torch.full((2,), float(world)), "the group works afterwards")


@pytest.mark.parametrize("op", OPS)
def test_reduce_ops(pool: Pool, op: str) -> None:
    pool.run(run_ops, op, world=2)
    if op in ("SUM", "MAX"):
        pool.run(run_ops, op, world=4)


@pytest.mark.ranks(2, 4, (1, 3), (2, 3))
def test_in_place_and_global_roots(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    parts = held(group, (4, 6))
    total = fold(torch.add, parts)
    for root, asynchronous, layout in itertools.product(range(world), (False, True), LAYOUTS):
        calls: dict[str, Any] = {
            "all_reduce": lambda x, a=asynchronous: c.all_reduce(x, group, async_op=a),
            "broadcast": lambda x, a=asynchronous, r=ranks[root]: c.broadcast(x, r, group, a),
            "reduce": lambda x, a=asynchronous, r=ranks[root]: c.reduce(x, r, group, async_op=a),
        }
        for name, call in calls.items():
            x = laid_out(parts[rank], layout)
            out = call(x)
            if asynchronous:
                out, handle = out
                assert handle.wait() is out
            wanted = parts[root] if name == "broadcast" else total
            if name != "reduce" or rank == root:
                same(out, wanted, (name, root, layout))
            assert out.is_contiguous()
            if x.is_contiguous():
                assert out is x
            else:
                same(x, parts[rank], "a strided input is left alone")


@pytest.mark.ranks(1)
def test_one_rank_gives_the_tensor_back(group: ProcessGroup) -> None:
    x = torch.ones(3, 2).t()
    calls: list[Any] = [
        lambda a: c.all_gather(x, 1, group, a),
        lambda a: c.reduce_scatter(x, 1, group, async_op=a),
        lambda a: c.all_reduce(x, group, async_op=a),
        lambda a: c.broadcast(x, 0, group, a),
        lambda a: c.reduce(x, 0, group, async_op=a),
        lambda a: c.all_to_all(x, group, async_op=a),
    ]
    for call in calls:
        assert call(False) is x
        out, handle = call(True)
        assert out is x
        assert handle is None


@pytest.mark.ranks(1, 2, 4)
def test_split_reduce_scatter(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    shapes, dims = [(5, 8), (16,), (2, 9), (7, 3, 2)], [1, 0, -1, 0]
    for layout, dtype, scale in itertools.product(
        ("contiguous", "transposed", "sliced"), (None, torch.bfloat16), (None, 0.5)
    ):
        held_by = [held(group, shape, seed=10 * i) for i, shape in enumerate(shapes)]
        mine = [laid_out(parts[rank], layout) for parts in held_by]
        found = c.split_reduce_scatter(mine, dims, group, dtype=dtype, scale=scale)
        for parts, dim, out in zip(held_by, dims, found, strict=True):
            wire = [part.mul(1 if scale is None else scale).to(dtype or part.dtype) for part in parts]
            sizes = list(chunk_sizes(parts[0].shape[dim], world))
            same(out, fold(torch.add, wire).split(sizes, dim)[rank], (layout, dtype, scale, dim))
    one = c.split_reduce_scatter(held_by[0][rank], 1, group)
    same(one, fold(torch.add, held_by[0]).chunk(world, 1)[rank])
    both = c.split_reduce_scatter([held_by[0][rank]] * 2, 1, group)
    assert len(both) == 2
    assert c.split_reduce_scatter([], 0, group) == []
    held_by = [held(group, shape, seed=10 * i) for i, shape in enumerate([(4 * world, 3), (world,), (2 * world, 0)])]
    for dtype in (None, torch.float64):  # tensors in rank order are concatenated, without one of another dtype
        found = c.split_reduce_scatter([parts[rank] for parts in held_by], 0, group, dtype=dtype)
        for parts, out in zip(held_by, found, strict=True):
            wire = [part.to(dtype or part.dtype) for part in parts]
            same(out, fold(torch.add, wire).chunk(world)[rank])
    found[0].mul_(torch.ones(3, requires_grad=True))  # autograd lets a program write into a shard


@pytest.mark.ranks(2)
def test_split_reduce_scatter_of_other_numbers(group: ProcessGroup) -> None:
    """What no pass computes is refused in the words of the call, on both paths."""
    whole, other = torch.ones(4, dtype=torch.int32), torch.ones(4, dtype=torch.complex64)
    refused: list[tuple[type[Exception], str, Tensor, dict[str, Any]]] = [
        (ArgumentError, "cannot scale torch.int32", whole, {"scale": 0.5}),
        (ArgumentError, "cannot scale torch.complex64", other, {"scale": 2}),
        (ArgumentError, "cannot cast torch.int32 to torch.float32", whole, {"dtype": torch.float32}),
        (ArgumentError, "scale must be a number, not str", torch.ones(4), {"scale": "1"}),
        (UnsupportedError, "does not fit the fp32", torch.ones(4), {"scale": 1e300}),
    ]
    for path, (kind, text, x, options) in itertools.product(("torch", "triton"), refused):
        with ops.path(path), pytest.raises(kind, match=f"^split_reduce_scatter: .*{text}"):
            c.split_reduce_scatter([x, x], 0, group, **options)
    assert c.split_reduce_scatter(whole, 0, group).tolist() == [2, 2]


class ForeignMode(enum.Enum):
    """As another library defines it."""

    GLOBAL = "global"
    TENSOR = "tensor"


@pytest.mark.ranks(8)
def test_modes_by_member_and_by_value(group: ProcessGroup) -> None:
    import tritoncomm as tc

    tc.destroy()  # what an earlier test of these ranks may have left
    tc.initialize(tensor=2)  # over the default group of eight, which is left alone
    try:
        for mode in (tc.ParallelMode.TENSOR, ForeignMode.TENSOR):
            out = c.all_reduce(torch.ones(2), mode)
            assert out.tolist() == [2.0, 2.0]
        assert c.all_gather(torch.ones(1), 0, ForeignMode.GLOBAL).shape == (8,)
        x = tc.mappings.reduce_from_tensor_model_parallel_region(torch.ones(2))
        assert x.tolist() == [2.0, 2.0]
        with pytest.raises(tc.GroupError):
            c.all_reduce(torch.ones(2), tc.ParallelMode.PARALLEL_1D)
    finally:
        tc.destroy()
    assert dist.is_initialized()
    with pytest.raises(tc.GroupError):
        c.all_reduce(torch.ones(2), tc.ParallelMode.TENSOR)


@pytest.mark.ranks(1, 2, 4)
def test_a_tensor_that_requires_grad(group: ProcessGroup) -> None:
    """Not differentiable: results have no graph; what is written in place is the very tensor."""
    world = group.size()
    calls: dict[str, Any] = {
        "all_gather": lambda x, dim, **how: c.all_gather(x, dim, group, **how),
        "all_gather-sizes": lambda x, dim, **how: c.all_gather(x, dim, group, sizes=[x.shape[dim]] * world, **how),
        "reduce_scatter": lambda x, dim, **how: c.reduce_scatter(x, dim, group, **how),
        "all_to_all": lambda x, dim, **how: c.all_to_all(x, group, **how),
        "split_reduce_scatter": lambda x, dim, **how: c.split_reduce_scatter(x, dim, group),
        "split_reduce_scatter of two": lambda x, dim, **how: c.split_reduce_scatter([x, x], dim, group)[1],
    }
    for leaf in (True, False):
        for name, call in calls.items():
            for dim in range(3):
                plain = held(group, (4, 8, 4))[group.rank()].float()
                x = plain.clone().requires_grad_()
                x = x if leaf else x * 1
                out = call(x, dim)
                assert not out.requires_grad, name
                same(out, call(plain, dim))
                if name.startswith("split"):
                    continue
                later, handle = call(x, dim, async_op=True)
                later = later if handle is None else handle.wait()
                assert not later.requires_grad, name
                same(later, out)
    for name, call in {
        "all_reduce": lambda x: c.all_reduce(x, group),
        "broadcast": lambda x: c.broadcast(x, dist.get_process_group_ranks(group)[0], group),
        "reduce": lambda x: c.reduce(x, dist.get_process_group_ranks(group)[0], group),
    }.items():
        x = torch.ones(4, 4, requires_grad=True)
        assert call(x) is x, name
        assert x.requires_grad, name


@pytest.mark.ranks(2, 4)
def test_sums_of_bools(group: ProcessGroup) -> None:
    """A sum of bools is whether any is true, in bytes that are 0 or 1."""
    world = group.size()
    mine = torch.arange(2 * world) % (group.rank() + 2) == 0
    every = torch.stack([torch.arange(2 * world) % (w + 2) == 0 for w in range(world)])
    wanted = every.any(0)
    start = 2 * group.rank()
    results = [
        (m.reduce_from_tensor_model_parallel_region(mine.clone(), group), wanted),
        (c.all_reduce(mine.clone(), group), wanted),
        (c.reduce_scatter(mine, 0, group), wanted[start : start + 2]),
        (c.reduce_scatter(mine, 0, group, sizes=[2 * world - (world - 1), *[1] * (world - 1)]), None),
        (c.split_reduce_scatter(mine, 0, group), wanted[start : start + 2]),
        (c.reduce(mine.clone(), dist.get_process_group_ranks(group)[0], group), wanted if not group.rank() else None),
    ]
    for x, expected in results:
        if expected is not None:
            same(x, expected)
        if group.rank() == 0:
            assert int(x.view(torch.uint8).max()) <= 1


@pytest.mark.parametrize("path", ["torch", "triton"])
def test_lazy_tensors_in_one_buffer(group: ProcessGroup, path: str) -> None:
    """Several with lazy bits in one buffer."""
    rank, world = group.rank(), group.size()
    negative = torch.view_as_complex(torch.arange(32.0).view(4, 4, 2) + rank).conj().imag
    conjugate = torch.view_as_complex(torch.arange(32.0).view(4, 4, 2) + rank).conj()
    assert negative.is_neg()
    assert conjugate.is_conj()
    with ops.path(path):
        for x in (negative, conjugate):
            one = 1 - 1j if x.is_complex() else -1
            expected = sum((x.clone() + one * (other - rank) for other in range(world)), torch.zeros(()))
            for given in ([x], [x, torch.ones_like(x).resolve_conj(), x]):
                found = c.split_reduce_scatter(given, 0, group)
                for out in found[::2]:
                    same(out, expected.chunk(world)[rank])


def test_lazy_elements(group: ProcessGroup) -> None:
    """A lazy negative bit on contiguous memory: a single element, or imaginary parts with strides of their own."""
    rank, world = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)

    def lazy() -> Tensor:
        x = torch.view_as_complex(torch.tensor([[3.0, 5.0 + rank]])).conj().imag
        assert (x.is_neg(), x.is_contiguous()) == (True, True)
        return x

    total = torch.tensor([-5.0 * world - sum(range(world))])
    same(c.all_reduce(lazy(), group), total)
    same(m.reduce_from_tensor_model_parallel_region(lazy(), group), total)
    same(c.broadcast(lazy(), ranks[1], group), torch.tensor([-6.0]))
    x = c.reduce(lazy(), ranks[0], group)
    if rank == 0:
        same(x, total)
    z = torch.view_as_complex(torch.arange(12.0).view(6, 2) + rank).conj()
    several = z.imag.as_strided((4,), (1,))
    assert (several.is_neg(), several.is_contiguous()) == (True, True)
    total = -(torch.arange(4.0) + 1) * world - sum(range(world))
    for reduced in (c.all_reduce(several.clone(), group), c.all_reduce(several, group)):
        same(reduced, total)
    same(m.reduce_from_tensor_model_parallel_region(several, group), total)
    same(m.all_gather_dim(several, 0, group)[:4], -(torch.arange(4.0) + 1))


def test_tensors_with_a_graph(group: ProcessGroup) -> None:
    """Reduced where they are, averages included; a copy of a strided one has no graph."""
    ranks, mean = dist.get_process_group_ranks(group), (group.size() - 1) / 2
    leaf = torch.full((2, 3), float(group.rank())).requires_grad_()
    assert c.all_reduce(leaf, group, c.ReduceOp.AVG) is leaf
    assert torch.equal(leaf.detach(), torch.full((2, 3), mean))
    assert c.broadcast(leaf, ranks[0], group) is leaf
    assert c.reduce(leaf, ranks[0], group, c.ReduceOp.AVG) is leaf
    strided = torch.full((2, 3), float(group.rank())).t().requires_grad_()
    for x in (
        c.all_reduce(strided, group),
        c.all_reduce(strided, group, c.ReduceOp.AVG),
        c.all_reduce(strided, group, async_op=True)[1].wait(),
        c.broadcast(strided, ranks[0], group),
        c.reduce(strided, ranks[0], group),
    ):
        assert not x.requires_grad


@pytest.mark.ranks(2)
def test_a_tensor_that_changes_before_the_wait(group: ProcessGroup) -> None:
    """What is sent as it is must not change while it travels; a copy of it was sent where its strides do not fit."""
    calls: list[Any] = [
        lambda x: c.all_gather(x, 0, group, async_op=True),
        lambda x: c.all_gather(x, 1, group, async_op=True),
        lambda x: c.reduce_scatter(x, 0, group, async_op=True),
        lambda x: c.all_to_all(x, group, async_op=True),
        lambda x: c.all_to_all(x, group, [2, 2], [2, 2], True),
        lambda x: c.all_reduce(x, group, async_op=True),
        lambda x: c.broadcast(x, 0, group, async_op=True),
        lambda x: c.reduce(x, 0, group, async_op=True),
    ]
    for call in calls:
        x = torch.ones(4, 4)
        _, handle = call(x)
        x += 1
        with pytest.raises(ArgumentError, match="changed in place since its start"):
            handle.wait()
        x = torch.ones(4, 4)
        _, handle = call(x)
        handle.wait()
        x += 1
        assert handle.wait() is handle.result
        with torch.inference_mode():  # without versions
            _, handle = call(torch.ones(4, 4))
            handle.wait()
    for call in calls:
        whole = torch.ones(8, 4)
        _, handle = call(whole[:4])
        whole[4:] += 1  # another part of the same storage
        handle.wait()
    for call in calls[:4]:
        x = torch.ones(4, 8)[:, ::2]
        out, handle = call(x)
        x += 1
        assert torch.equal(handle.wait(), out)
        assert out.max() <= group.size()
