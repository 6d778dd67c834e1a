"""The address map in integers, against a walk over every element."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritoncomm.core.address_map import AddressMap, rows_layout, unit_bytes, wire_layout
from tritoncomm.core.plan import chunk_sizes, normalize_sizes
from tritoncomm.errors import ArgumentError, ShapeError

SHAPES = [(6,), (2, 6), (4, 8, 4), (2, 3, 4, 5), (1, 7), (0, 4), (4, 0), (3, 1, 2, 2, 2)]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: "x".join(map(str, s)))
@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
def test_along_is_torch_chunk(shape: tuple[int, ...], world: int) -> None:
    for dim in range(-len(shape), len(shape)):
        plan = AddressMap.along(shape, dim, world)
        d = dim % len(shape)
        inner = math.prod(shape[d + 1 :])
        assert (plan.outer, plan.row, plan.world) == (math.prod(shape[:d]), shape[d] * inner, world)
        assert plan.run == math.ceil(shape[d] / world) * inner
        assert plan.lengths is None
        assert plan.even == (shape[d] % world == 0 or plan.row == 0)
        assert plan.is_view == (plan.outer == 1 and plan.even)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", range(10))
def test_chunk_sizes(size: int, world: int) -> None:
    found = chunk_sizes(size, world)
    wanted = [len(piece) for piece in torch.arange(size).chunk(world)] if size else []
    assert list(found) == (wanted + [0] * world)[:world]


def test_the_example_of_the_docstring() -> None:
    plan = AddressMap.along((2, 6), 1, 3)
    assert (plan.outer, plan.row, plan.run, plan.world) == (2, 6, 2, 3)
    assert chunk_sizes(9, 4) == (3, 3, 3, 0)


def test_along_with_sizes() -> None:
    plan = AddressMap.along((2, 7, 3), 1, 3, (3, 0, 4))
    assert (plan.outer, plan.row, plan.run, plan.lengths) == (2, 21, 12, (9, 0, 12))
    assert not plan.even
    assert not plan.is_view
    assert AddressMap.along((7, 3), 0, 3, (3, 0, 4)).is_view
    assert AddressMap.along((6, 3), 0, 3, (2, 2, 2)).even


@pytest.mark.parametrize("sizes", [(3, 3), (7,), (8, -1), (3, 4, 0), ()], ids=str)
def test_sizes_that_do_not_cut(sizes: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="7"):
        AddressMap.along((7,), 0, 2, sizes)


@pytest.mark.parametrize("dim", [2, -3, 9])
def test_no_such_dim(dim: int) -> None:
    with pytest.raises(ShapeError, match=f"dim {dim}"):
        AddressMap.along((2, 3), dim, 2)


def test_plans_are_cached() -> None:
    assert AddressMap.along([4, 6], 1, 2) is AddressMap.along((4, 6), 1, 2)


@pytest.mark.parametrize(
    "sizes", [[1, 2], (1, 2), np.array([1, 2]), np.array([1, 2], np.int32), torch.tensor([1, 2])], ids=repr
)
def test_normalize_sizes(sizes: object) -> None:
    found = normalize_sizes(sizes, "f")
    assert found == (1, 2)
    assert found is not None
    assert all(type(size) is int for size in found)


def test_normalize_sizes_refuses() -> None:
    assert normalize_sizes(None, "f") is None
    tensors = (torch.tensor([1, 2], device="meta"), torch.tensor([1.0, 2.0]), torch.tensor(3), torch.ones(2, 2).int())
    for bad in (*tensors, 3, [1.5, 2], "ab", [None]):
        with pytest.raises(ArgumentError, match="f: split sizes"):
            normalize_sizes(bad, "f")


@pytest.mark.parametrize("shape", [(4,), (4, 6), (2, 4, 6), (6, 4, 2, 2)], ids=str)
def test_wire_layout(shape: tuple[int, ...]) -> None:
    for dim, transposed in itertools.product(range(-len(shape), len(shape)), (False, True)):
        x = torch.arange(math.prod(shape)).view(shape)
        if transposed:
            x = x.flip(0).permute(*reversed(range(x.dim()))).contiguous().permute(*reversed(range(x.dim())))
        is_wire, layout = wire_layout(tuple(x.shape), x.stride(), dim, 2)
        assert layout is not None
        assert is_wire == (x.is_contiguous() and math.prod(x.shape[: dim % x.dim()]) == 1)
        wire = x.as_strided(*layout)
        assert torch.equal(wire, torch.stack(x.chunk(2, dim)))


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_layout_reads_the_tensor(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 5))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims)))
    order = data.draw(st.permutations(range(dims)))
    cut = data.draw(st.integers(0, dims - 1))
    whole = torch.arange(math.prod(s + 1 for s in shape)).view([s + 1 for s in shape])
    x = whole.permute(*order)
    x = x.narrow(cut, 0, x.shape[cut] - 1) if data.draw(st.booleans()) else x
    dim = data.draw(st.integers(-dims, dims - 1))
    layout = rows_layout(tuple(x.shape), x.stride(), dim)
    d = dim % dims
    if layout is None:
        assert not x.is_contiguous()
        return
    rows = x.as_strided(*layout)
    assert rows.dim() <= 4
    assert rows.shape[-1] == math.prod(x.shape[d:])
    assert torch.equal(rows.reshape(-1), x.reshape(-1))


def test_rows_layout_of_everything_contiguous() -> None:
    for shape in SHAPES:
        x = torch.empty(shape)
        for dim in range(len(shape)):
            assert rows_layout(shape, x.stride(), dim) is not None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.sampled_from([1, 2, 3, 4, 8, 12]), min_size=1, max_size=3),
    st.data(),
    st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128]),
)
def test_the_unit_is_the_one_that_the_kernel_takes(shape: list[int], data: st.DataObject, dtype: torch.dtype) -> None:
    from tritoncomm_kernels.copy import _plan

    dim, world = data.draw(st.integers(0, len(shape) - 1)), data.draw(st.sampled_from([1, 2, 4]))
    storage = [size + data.draw(st.sampled_from([0, 0, 1, 4, 8])) for size in shape]
    x = torch.empty(storage, dtype=dtype, device="meta")[tuple(slice(size) for size in shape)]
    if data.draw(st.booleans()):
        x = x.transpose(0, -1)
    layout, sizes = rows_layout(x.shape, x.stride(), dim), None
    if layout is None:
        return
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, x.shape[dim]))
        world, sizes = 2, (first, x.shape[dim] - first)
    plan = AddressMap.along(x.shape, dim, world, sizes)
    wire = torch.empty((plan.outer * plan.row,) if sizes else (world, plan.outer, plan.run), device="meta")
    shapes = (*layout, tuple(wire.shape), wire.stride())
    launch, *_ = _plan("pack", -1, dtype, dtype, 0, *shapes, plan.lengths, False, False, None)
    unit = launch.constants["VEC"] * launch.types[0].itemsize
    assert unit_bytes(tuple(x.shape), x.stride(), dim, world, sizes, dtype.itemsize) == unit
    if x.is_contiguous():
        assert unit_bytes(tuple(x.shape), None, dim, world, sizes, dtype.itemsize) == unit
