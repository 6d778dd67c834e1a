"""All-gathers of uneven parts: padded to one message or not, their values are those of ``torch.cat``."""

import itertools
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode

from tritoncomm import ArgumentError, collective, mappings, record
from tritoncomm.core import ops
from tritoncomm.core.plan import Ints, padded_size
from tritoncomm.explain import explain

DTYPES = (torch.float32, torch.bfloat16, torch.bool, torch.int16, torch.complex64, torch.float8_e4m3fn)


def uneven(world: int) -> list[Ints]:
    """Sizes whose shorter parts are last, first, in the middle, balanced, empty; and too uneven to be padded."""
    long = (17,) * (world - 1)
    balanced = (17,) * ((world + 1) // 2) + (16,) * (world // 2)
    return [(*long, 16), (*long, 13), (14, *long), (17, 16, *long[1:]), balanced, (*long, 0), (1, *long)]


def part(sizes: Ints, rank: int, dim: int, dtype: torch.dtype) -> Tensor:
    shape = [3, 1, 4]
    shape[dim] = sizes[rank]
    count = torch.Size(shape).numel()
    return (torch.arange(count).reshape(shape) + 7 * rank).remainder(5).to(dtype)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.uint8) if x.is_floating_point() and x.itemsize == 1 else x


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_values_are_those_of_cat(group: ProcessGroup, path: Any) -> None:
    rank, world = group.rank(), group.size()
    for sizes, dim, dtype in itertools.product(uneven(world), (0, 1, -1), DTYPES if path == "torch" else DTYPES[:3]):
        asynchronous = dtype is DTYPES[1]
        parts = [part(sizes, each, dim, dtype) for each in range(world)]
        x = parts[rank] if dim else parts[rank].mT.contiguous().mT  # any strides
        with ops.path(path):
            out = collective.all_gather(x, dim, group, asynchronous, sizes=sizes)
            if asynchronous:
                out, handle = out
                assert handle.wait() is out
        context = f"{sizes} {dim} {dtype}"
        assert out.is_contiguous(), context
        assert not out._is_view(), context
        assert torch.equal(bits(out), torch.cat([bits(each) for each in parts], dim)), context


@pytest.mark.ranks(3)
def test_a_plan_says_what_is_sent_and_copied(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    for sizes, dim in itertools.product(uneven(world), (0, 1, 2)):
        x = part(sizes, rank, dim, torch.float32)
        with record.recording() as counted:
            collective.all_gather(x, dim, group, sizes=sizes)
        told = explain("all_gather", tuple(x.shape), world, x.dtype, device="cpu", dims=(dim,), sizes=sizes, rank=rank)
        copied, sent = told.forward.bytes_copied, told.forward.bytes_sent
        assert [(count.bytes_copied, count.bytes_sent) for count in counted.values()] == [(copied, sent)]
        told_by = "padded to" if padded_size(sizes) else "a broadcast for each rank"
        assert any(told_by in step.what for step in told.forward.steps)


@pytest.mark.ranks(2, 4)
def test_reduce_scatter_copies_each_part_once(group: ProcessGroup) -> None:
    """Gloo writes into the parts of other ranks, which are copied; this rank's part is the result."""

    class Clones(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            counts[0] += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    counts, sizes = [0], tuple(range(1, group.size() + 1))
    with Clones():
        mappings.reduce_scatter_dim(torch.ones(sum(sizes), 2), 0, group, sizes=sizes)
    assert counts[0] == group.size() - 1


@pytest.mark.ranks(2)
def test_a_quantized_tensor_is_refused_by_name(group: ProcessGroup) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are deprecated
        x = torch.quantize_per_tensor(torch.zeros(9 - group.rank()), 0.1, 0, torch.quint8)
    with pytest.raises(ArgumentError, match="dequantize"):
        collective.all_gather(x, 0, group, sizes=(9, 8))


@pytest.mark.parametrize(
    ("sizes", "padded"),
    [((9, 7), 9), ((9, 6), 0), ((8, 8), 8), ((0, 0), 0), ((8, 8, 8, 8, 8, 8, 8, 0), 0), ((*[1] * 8, 0), 1)],
)
def test_padding_is_an_eighth_at_most(sizes: Ints, padded: int) -> None:
    assert padded_size(sizes) == padded
