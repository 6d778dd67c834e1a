"""Box: the elements of a contiguous tensor that a strided view selects, and writes into a shard's part of them."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.distspec import Parts, shard_bounds
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["Box", "box_of", "refuse_graph", "write_shard"]

Slices = tuple[slice, ...]
Write = Callable[[Tensor, Slices], Any]


@dataclass(frozen=True, slots=True)
class Box:
    """Elements of a view as an arithmetic progression along every dim of its base.

    Attributes:
        ranges: (start, count, step) of every dim of the base.
        dims: the base's dim of every dim of the view; None where the view has size 1.

    Example:
        ``x[1::2, 3]`` of a tensor ``[8, 4]`` has the ranges (1, 4, 2) and (3, 1, 1), and the dims (0,).
    """

    ranges: tuple[tuple[int, int, int], ...]
    dims: tuple[int | None, ...]

    def within(self, shard: Sequence[tuple[int, int, int]]) -> tuple["Box", Slices] | None:
        """Return the part in a shard, relative to the shard's start, and its slices of the view; None if it is empty.

        Args:
            shard: (dim, start, size) of every sharded dim of the base.
        """
        ranges, sliced = list(self.ranges), {}
        for dim, begin, size in shard:
            start, count, step = ranges[dim]
            # The first element of the progression in the shard, and the first one behind it; -(a // -b) rounds up.
            first = max(0, -((begin - start) // -step))
            last = min(count, -((begin + size - start) // -step))
            if first >= last:
                return None
            ranges[dim] = (start + first * step - begin, last - first, step)
            sliced[dim] = slice(first, last)
        slices = tuple(slice(None) if dim is None else sliced.get(dim, slice(None)) for dim in self.dims)
        return Box(tuple(ranges), self.dims), slices

    def select(self, base: Tensor) -> Tensor:
        """Return the elements as a view of ``base``, with the dims of the view in their order."""
        index = tuple(
            slice(start, start + (count - 1) * step + 1, step) if dim in self.dims else start
            for dim, (start, count, step) in enumerate(self.ranges)
        )
        dims = [dim for dim in self.dims if dim is not None]
        selected = base[index].permute([sorted(dims).index(dim) for dim in dims])
        return selected[tuple(None if dim is None else slice(None) for dim in self.dims)]


def box_of(shape: Sequence[int], view: Tensor, offset: int = 0) -> Box | None:
    """Return the box of a view that indexes a contiguous base by integers and slices, its dims in any order.

    None for a view without elements, or with merged, repeated or diagonal dims; ``offset`` is the base's in storage.
    """
    if not view.numel():
        return None
    # The strides of a contiguous base are the digits of a number system: the view's offset in it is the first index of
    # every dim.
    strides, remainder = torch.empty(shape, device="meta").stride(), int(view.storage_offset()) - offset
    starts: list[int] = []
    for stride in strides:
        start, remainder = divmod(remainder, stride)
        starts.append(start)
    ranges = [
        (start, 1, 1) for start in starts
    ]  # (start, count, step) of every dim of the base; 1 if it has an integer
    dims: list[int | None] = []
    for count, stride in zip(view.shape, view.stride(), strict=True):
        dim = None if count == 1 else _base_dim(shape, strides, ranges, count, stride)
        if count > 1 and (dim is None or dim in dims):
            return None
        if dim is not None:
            ranges[dim] = (starts[dim], count, stride // strides[dim])
        dims.append(dim)
    return Box(tuple(ranges), tuple(dims))


def _base_dim(
    shape: Sequence[int], strides: Sequence[int], ranges: Sequence[tuple[int, int, int]], count: int, stride: int
) -> int | None:
    """Return the dim of the base along which a dim of the view steps within bounds; at most one exists."""
    for dim, (size, unit) in enumerate(zip(shape, strides, strict=True)):
        step, rest = divmod(stride, unit)
        if step and not rest and ranges[dim][0] + step * (count - 1) < size:
            return dim
    return None


def write_shard(
    name: str, memory: Tensor, shape: Sequence[int], parts: Parts, pg: ProcessGroup, box: Box | None, write: Write
) -> None:
    """Call ``write(region, slices)`` with the part of ``box`` in this rank's shard, and its slices of the view.

    Args:
        memory: the local tensor, detached.
        box: None for no elements.
    """
    sharded = dict(parts)
    # Along a dim of stride 0 all elements are one: a write into a part of them would show in all. Only dims that are
    # not sharded may have one, as shards have memory of their own along the others.
    shared = any(not memory.stride(dim) and size > 1 for dim, size in enumerate(shape) if dim not in sharded)
    if shared or (memory.is_inference() and not torch.is_inference_mode_enabled()):
        why = "elements of the shard share memory" if shared else "the shard was made in inference mode"
        raise UnsupportedError(f"{name}: {why}; clone() it first")
    part = None if box is None else box.within(shard_bounds(tuple(shape), parts, pg.tp_local_rank()))
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        if part is None:
            # A rank without such a part bumps the version of its memory too: autograd's check of saved tensors has to
            # have one outcome on all ranks.
            memory.narrow(next(iter(sharded)), 0, 0).zero_()
        else:
            write(part[0].select(memory), part[1])


def refuse_graph(name: str, tensors: Iterable[Any]) -> None:
    """Reject a write that autograd would have to record."""
    if torch.is_grad_enabled() and any(isinstance(x, Tensor) and x.requires_grad for x in tensors):
        raise UnsupportedError(
            f"{name}: a write into a part of a sharded dim has no gradient; use torch.no_grad(), or redistribute first"
        )
