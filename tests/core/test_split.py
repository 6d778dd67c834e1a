"""The address map in integers, against a walk over every element."""

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tritoncomm.core.split import split_by, split_of

SHAPES = [(6,), (2, 6), (4, 8, 4), (2, 3, 4, 5), (1, 7), (0, 4), (4, 0), (3, 1, 2, 2, 2)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_rows_reads_the_tensor(data: st.DataObject) -> None:
    dims = data.draw(st.integers(1, 5))
    shape = tuple(data.draw(st.lists(st.integers(0, 4), min_size=dims, max_size=dims)))
    order = data.draw(st.permutations(range(dims)))
    cut = data.draw(st.integers(0, dims - 1))
    whole = torch.arange(math.prod(s + 1 for s in shape)).view([s + 1 for s in shape])
    x = whole.permute(*order)
    x = x.narrow(cut, 0, x.shape[cut] - 1) if data.draw(st.booleans()) else x
    dim = data.draw(st.integers(-dims, dims - 1))
    layout = split_of(x.shape, x.stride(), dim, 1).rows
    d = dim % dims
    if layout is None:
        assert not x.is_contiguous()
        return
    rows = x.as_strided(*layout)
    assert rows.dim() <= 4
    assert rows.shape[-1] == math.prod(x.shape[d:])
    assert torch.equal(rows.reshape(-1), x.reshape(-1))


def test_rows_of_everything_contiguous() -> None:
    for shape in SHAPES:
        x = torch.empty(shape)
        for dim in range(len(shape)):
            assert split_of(shape, x.stride(), dim, 1).rows is not None


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
    layout, sizes = split_of(x.shape, x.stride(), dim, 1).rows, None
    if layout is None:
        return
    if data.draw(st.booleans()):
        first = data.draw(st.integers(0, x.shape[dim]))
        world, sizes = 2, (first, x.shape[dim] - first)
    plan = split_by(x.shape, x.stride(), dim, world, sizes)
    wire = torch.empty((plan.outer * plan.row,) if sizes else (world, plan.outer, plan.run), device="meta")
    shapes = (*layout, tuple(wire.shape), wire.stride())
    launch, *_ = _plan("pack", -1, dtype, dtype, 0, *shapes, plan.lengths, False, False, None)
    unit = launch.constants["VEC"] * launch.types[0].itemsize
    assert plan.unit(dtype.itemsize) == unit
    if x.is_contiguous():
        assert split_by(x.shape, None, dim, world, sizes).unit(dtype.itemsize) == unit
