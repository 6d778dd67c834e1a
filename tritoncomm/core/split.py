"""Split of a tensor over ranks, in integers: where each element lies in a buffer in rank order, the wire."""

import math
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING

import torch
from tritoncomm_kernels.geometry import coalesce

from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.plan import Ints, check_split_sizes, normalize_dim

if TYPE_CHECKING:
    from tritoncomm_kernels.launch import Launch

__all__ = ["Split", "split_by", "split_of"]


@dataclass(eq=False)  # never changed; a frozen one takes 3 us to make, and calls with new split sizes make one each
class Split:
    """``rows[o, w*run + k] <-> wire[w, o, k]`` where ``w*run + k < row``, for a tensor of one shape and strides.

    ``outer = prod(shape[:dim])``, ``row = prod(shape[dim:])``,
    ``run = ceil(shape[dim] / world) * prod(shape[dim+1:])``.
    With explicit ``sizes`` the wire is flat and rank w's block ``[outer, lengths[w]]`` starts at ``outer*offsets[w]``.

    Attributes:
        dim: counted from the front.
        sizes: of the dim on every rank; None where it is split as ``torch.chunk`` does: 9 over 4 is 3, 3, 3, 0, and the
            last rank's part of the wire is padding.
        outer: number of rows.
        row: number of elements of a row.
        run: number of elements of a row that go to one rank; with sizes, of the largest one.
        even: whether every rank gets the same number of elements.
        lengths: number of elements of a row per rank; None without sizes.
        launches: prepared launches of a kernel between the tensor and its wire, by the kernel, device, dtype and
            alignment, and the bytes that each copies.
    """

    shape: Ints
    stride: Ints
    dim: int
    world: int
    outer: int
    row: int
    run: int
    even: bool
    sizes: Ints | None = None
    lengths: Ints | None = None
    launches: "dict[tuple[str, int, torch.dtype, int], tuple[Launch | None, int]]" = field(default_factory=dict)

    @cached_property
    def is_wire(self) -> bool:
        """Whether the tensor's memory already is the wire: one row for all ranks, without padding."""
        has_padding = self.sizes is None and self.shape[self.dim] % self.world
        if has_padding or self.outer != 1:
            return False
        return self.is_dense or (self.rows is not None and self.rows[1][-1] == 1)

    @cached_property
    def is_dense(self) -> bool:
        """Whether the tensor is contiguous."""
        return self.stride == contiguous_stride(self.shape)

    @cached_property
    def wire_shape(self) -> Ints:
        """Shape of a new wire, ``[world, *shape of a shard]``; uneven ``[world, outer, run]``, by sizes flat."""
        if self.sizes is not None:
            return (self.outer * self.row,)
        return (self.world, self.outer, self.run) if self.ranks is None else self.ranks[0]

    @cached_property
    def ranks(self) -> tuple[Ints, Ints] | None:
        """Shape and strides that read the tensor in the order of an even wire; None for an uneven split."""
        shape, dim = self.shape, self.dim
        if self.sizes is not None or shape[dim] % self.world:
            return None
        each = shape[dim] // self.world
        return (self.world, *shape[:dim], each, *shape[dim + 1 :]), (each * self.stride[dim], *self.stride)

    @cached_property
    def gathered(self) -> tuple[Ints, Ints, Ints | None] | None:
        """Size, strides, shards: how to read a contiguous, even wire in the order of the tensor.

        None if the dim does not divide, or the wire already is in that order. ``size`` and ``strides`` are a view of
        the wire. With ``shards``, ``[world, *shape of a shard]``, the view has one dim more than the tensor: the ranks,
        in front of the dim, with which the copy merges them.

        Example:
            Two ranks with shards ``[3, 4]`` of dim 1: the view ``[3, 2, 4]`` with strides ``[4, 12, 1]``.
        """
        if self.ranks is None or self.world == 1 or self.outer == 1:
            return None
        shape, dim = self.shape, self.dim
        shard = self.ranks[0][1:]
        stride = contiguous_stride(shard)
        rank_stride = stride[0] * shard[0]
        if shard[dim] <= 1 or 0 in shape:
            # Each rank has one index of the dim, or nothing: the ranks are the dim, and no dims are to be merged.
            return shape, (*stride[:dim], rank_stride, *stride[dim + 1 :]), None
        # The rank's dim stands before the shard's: the result is this view with both merged into one.
        size, strides = (*shard[:dim], self.world, *shard[dim:]), (*stride[:dim], rank_stride, *stride[dim:])
        return size, strides, (self.world, *shard)

    @cached_property
    def rows(self) -> tuple[Ints, Ints] | None:
        """Size and strides of the tensor viewed as ``[*outer, row]``, where ``row`` merges the dims from ``dim`` on.

        None if it would have more than three outer dims, or one stride cannot walk the row: no kernel reads it then.
        """
        if self.is_dense or 0 in self.shape:
            return (self.outer, self.row), (max(self.row, 1), 1)
        outer = coalesce(self.shape[: self.dim], self.stride[: self.dim])
        row = coalesce(self.shape[self.dim :], self.stride[self.dim :])
        if len(outer[0]) > 3 or len(row[0]) > 1:
            return None
        return outer[0] + row[0], outer[1] + (row[1] if row[0] != (1,) else (1,))

    @property
    def walked(self) -> "Split | None":
        """The split whose rows a kernel walks: this one, or the tensor as rows of any length where its order is that
        of the wire; None if no kernel reads it.
        """
        if self.rows is not None or self.outer != 1 or not (self.even or self.sizes is not None):
            return None if self.rows is None else self
        whole = split_of(self.shape, self.stride, -1, 1)
        return None if whole.rows is None else whole

    def unit(self, itemsize: int) -> int:
        """Return the bytes per access of a kernel that copies between the tensor and its wire, aligned to 16 bytes."""
        split = self.walked
        # Elements of a row that are apart are accessed one by one.
        if split is None or split.rows is None or (split.rows[0][-1] > 1 and split.rows[1][-1] != 1):
            return math.gcd(16, itemsize)
        # An access has to divide the rows and blocks of both sides, and every stride that is walked.
        size, step = split.rows
        blocks = split.lengths or (split.run, split.outer * split.run if split.world > 1 else 0)
        strides = [pitch for rows, pitch in zip(size[:-1], step[:-1], strict=True) if rows > 1]
        return math.gcd(16, *(itemsize * n for n in (split.row, *blocks, *strides)))


@lru_cache(maxsize=8192)
def split_of(shape: Ints, stride: Ints | None, dim: int, world: int) -> Split:
    """Return the split of dim ``dim`` of a tensor over ``world`` ranks, as ``torch.chunk`` splits it.

    Args:
        stride: of the tensor; None for a contiguous one.

    Example:
        ``split_of((2, 6), None, 1, 3)`` has outer 2, row 6, run 2, world 3.
    """
    dim = normalize_dim(shape, dim)
    inner = math.prod(shape[dim + 1 :])
    outer, row, run = math.prod(shape[:dim]), shape[dim] * inner, -(-shape[dim] // world) * inner
    stride = contiguous_stride(shape) if stride is None else stride
    return Split(shape, stride, dim, world, outer, row, run, even=run * world == row)


@lru_cache(maxsize=256)  # of its own: sizes that are new in every call leave the other splits where they are
def split_by(shape: Ints, stride: Ints | None, dim: int, world: int, sizes: Ints | None) -> Split:
    """Return the split of a tensor by these sizes of ``dim``; without them ``split_of``."""
    if sizes is None:
        return split_of(shape, stride, dim, world)
    dim = normalize_dim(shape, dim)
    check_split_sizes(shape, dim, world, sizes)
    inner = math.prod(shape[dim + 1 :])
    lengths = tuple([size * inner for size in sizes])
    outer, row = math.prod(shape[:dim]), shape[dim] * inner
    stride = contiguous_stride(shape) if stride is None else stride
    return Split(shape, stride, dim, world, outer, row, max(lengths), len(set(sizes)) <= 1, sizes, lengths)
