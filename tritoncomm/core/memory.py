"""Memory of tensors: allocation below torch's dispatcher, and the bytes that tensors occupy or share.

``new_empty`` walks through the dispatcher, which takes longer than the rest of a small mapping. Plain tensors outside
of modes are allocated by the functions that inductor's generated code calls. torch has no public name for them; they
were tested with torch 2.11 to 2.15, and ``new_empty`` is the fallback where they are missing.
"""

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Parameter

__all__ = [
    "PLAIN", "contiguous_stride", "empty", "empty_on", "extent_of", "fills_storage", "has_memory", "has_wrapper",
    "share_elements", "share_memory", "version_of",
]  # fmt: skip

_Allocate = Callable[[Any, Any, torch.dtype], Tensor]
"""A function of torch that allocates an uninitialised tensor from a shape, strides and a dtype."""

# TODO: delete the checks for None when torch promises these names.
_fast: Any = getattr(getattr(torch._C, "_dynamo", None), "guards", None)
_on_cpu: _Allocate | None = getattr(_fast, "_empty_strided_cpu", None)
_on_cuda: _Allocate | None = getattr(_fast, "_empty_strided_cuda", None)
_current_device: Any = getattr(torch._C, "_cuda_getDevice", None)
_modes: Any = torch._C._len_torch_dispatch_stack
PLAIN = (Tensor, Parameter)
"""Types of tensors whose memory is known to be their own."""
_cpu = torch.device("cpu")
_MOST_WORK: Any = 1_000_000  # numpy's annotations know 0 and -1 only


def extent_of(x: Tensor) -> int:
    """Return the number of bytes in memory from the first element of ``x`` to the end of its last one."""
    if x.is_contiguous():
        return x.nbytes
    return (1 + sum((size - 1) * step for size, step in zip(x.shape, x.stride(), strict=True))) * x.itemsize


def has_memory(x: Tensor, extent: int) -> bool:
    """Whether the storage of ``x`` has ``extent`` bytes after its first element; a freed or shrunk one has not."""
    return not extent or x.untyped_storage().nbytes() >= x.storage_offset() * x.itemsize + extent


def version_of(x: Tensor) -> int:
    """Return a number that moves with every change in place of ``x``, and of other parts of its storage.

    Tensors of inference mode have none: 0.
    """
    return 0 if x.is_inference() else x._version


def fills_storage(x: Tensor) -> bool:
    """Whether a storage has no other part than ``x``, so that ``version_of`` moves with changes of ``x`` alone."""
    return x.untyped_storage().nbytes() == x.nbytes


def has_wrapper(tensors: Sequence[Tensor]) -> bool:
    """Whether a tensor has its data in another one: it has no memory that a kernel could read."""
    for x in tensors:  # noqa: SIM110  (a generator takes three times as long)
        if type(x) not in PLAIN and not x.data_ptr():
            return True
    return False


def share_memory(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether a storage of ``some`` tensors overlaps a storage of the ``others`` in memory."""
    # Addresses decide, as storages of different objects overlap where torch views memory of numpy, for instance.
    spans = sorted(map(_span_of, others))
    # ``ends`` has the largest end of the spans up to each: starts alone would miss a long span that starts early.
    ends = list(accumulate((end for _, end in spans), max))
    for start, end in map(_span_of, some):
        before = bisect_left(spans, (end,))  # number of spans that start before this one ends
        if start < end and before and ends[before - 1] > start:
            return True
    return False


def share_elements(x: Tensor, y: Tensor) -> bool:
    """Whether an element of ``x`` and one of ``y`` have bytes in common; the caller knows that the extents overlap."""
    if x.is_contiguous() and y.is_contiguous():
        return True
    try:
        return np.shares_memory(np.asarray(_Placed(x)), np.asarray(_Placed(y)), max_work=_MOST_WORK)
    # Numpy stops after a million candidates of strided tensors; an overlap is not found then.
    except np.exceptions.TooHardError:
        return False


class _Placed:
    """A tensor's address, shape and strides as numpy's array interface, by which numpy compares without reading."""

    def __init__(self, x: Tensor) -> None:
        # ``data`` is (address, whether it is read-only), ``|V`` an element of so many bytes, and strides are in bytes.
        self.__array_interface__ = {
            "version": 3, "data": (x.data_ptr(), True), "typestr": f"|V{x.itemsize}", "shape": tuple(x.shape),
            "strides": tuple(step * x.itemsize for step in x.stride()),
        }  # fmt: skip


def _span_of(x: Tensor) -> tuple[int, int]:
    """Return (first address, end) of the storage of ``x``; (0, 0) if ``x`` has no element."""
    if not x.numel():
        return 0, 0
    storage = x.untyped_storage()
    start = storage.data_ptr()
    return start, start + storage.nbytes()


@lru_cache(maxsize=8192)
def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides, in elements, of a contiguous tensor of ``shape``; a dim of size 0 counts as 1."""
    stride, step = [], 1
    for size in reversed(shape):
        stride.append(step)
        step *= int(size) or 1  # equal keys of other types share the entry
    return tuple(reversed(stride))


def empty(like: Tensor, shape: Sequence[int], stride: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate ``like.new_empty(shape, dtype=dtype)``, where ``stride`` is ``contiguous_stride(shape)``."""
    # For plain tensors outside of modes this takes less than half the time of new_empty.
    if like.__class__ in PLAIN and not _modes():
        if like.is_cpu:
            if _on_cpu is not None:
                return _on_cpu(tuple(shape), stride, dtype)  # a torch.Size is refused
        elif like.is_cuda and _on_cuda is not None and _current_device() == like.get_device():
            return _on_cuda(tuple(shape), stride, dtype)
    return like.new_empty(shape, dtype=dtype)


def empty_on(device: Any, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Allocate ``torch.empty(shape, dtype=dtype, device=device)``, in half the time on the CPU outside of modes."""
    if _on_cpu is not None and device == _cpu and not _modes():
        shape = tuple(shape)
        return _on_cpu(shape, contiguous_stride(shape), dtype)
    return torch.empty(shape, dtype=dtype, device=device)
