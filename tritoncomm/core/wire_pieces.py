"""The pieces of a sum over a wire: the shards of all tensors, cut the same way on every rank."""

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

import torch
from tritoncomm_kernels import Segments
from tritoncomm_kernels.geometry import coalesce

from tritoncomm.core.blocks import Block, table_of
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.plan import Ints
from tritoncomm.core.split import Split, split_by

__all__ = ["Layout", "Piece", "pieces", "row_stride"]

Layout = tuple[Ints, Ints, int, Ints]
"""Of a tensor: shape, strides, the dim that is split, its size on every rank."""


@dataclass(frozen=True, eq=False)
class Piece:
    """A part of every rank's shards.

    Attributes:
        blocks: from the tensors into the wire, which has the ranks in the order of the exchange.
        counts: elements that every rank gets.
        start: where this rank's elements begin among its shards of all tensors.
        tensors: number of the call's tensors.
        dtype: of the wire.
    """

    blocks: tuple[Block, ...]
    counts: Ints
    start: int
    tensors: int
    dtype: torch.dtype

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the wire has one tensor's elements in the order of its memory: without a cast no pack is needed."""
        itemsize = self.dtype.itemsize
        return self.tensors == 1 and all(
            block.offset * itemsize == block.wire
            and all(size == 1 or a == b for size, a, b in zip(block.size, block.stride, block.wire_stride, strict=True))
            for block in self.blocks
        )

    @cached_property
    def table(self) -> Segments | None:
        """The blocks as a table; None if it would have too many segments."""
        return table_of(self.blocks, [self.dtype] * self.tensors)


class _Box(NamedTuple):
    """A box of one tensor's outer dims, those before the split one, and a range of the columns of every rank.

    Attributes:
        start, size: of the box in the outer dims.
        columns: of every rank the first column of its shard, and the number of columns.
    """

    tensor: int
    start: Ints
    size: Ints
    columns: tuple[tuple[int, int], ...]


@lru_cache(maxsize=256)
def pieces(
    layouts: tuple[Layout, ...], world: int, rank: int, most: int, dtype: torch.dtype, nodes: tuple[int, int] | None
) -> list[Piece]:
    """Cut the shards of all tensors into pieces of about ``most`` elements, the same on every rank but for ``start``.

    Args:
        nodes: number of nodes and ranks of each; the wire then has, for each local rank, what goes to that rank of
            every node. None for an exchange from rank to rank.
    """
    splits = [split_by(*layout[:3], world, layout[3]) for layout in layouts]
    order = list(range(world))
    if nodes is not None:
        count, size = nodes
        order = [node * size + local for local in range(size) for node in range(count)]
    result, start, held, boxes = [], 0, 0, []
    for box, elements in _boxes(splits, most):
        if boxes and held + elements > most:
            result.append(_piece(splits, boxes, order, start, dtype))
            start, held, boxes = start + result[-1].counts[rank], 0, []
        boxes.append(box)
        held += elements
    return [*result, _piece(splits, boxes, order, start, dtype)] if boxes else result


def _boxes(splits: Sequence[Split], most: int) -> Iterator[tuple[_Box, int]]:
    """Yield boxes of ``most`` elements of all ranks at most, in the order of the shards, and their elements.

    They follow from the shapes alone: ranks may have other strides.
    """
    for i, split in enumerate(splits):
        lead = split.shape[: split.dim] or (1,)
        if not split.row or 0 in lead:
            continue
        # The outermost dim whose index has few enough elements; all dims before it are walked one by one.
        inner = [math.prod(lead[d + 1 :]) * split.row for d in range(len(lead))]
        depth = next((d for d, elements in enumerate(inner) if elements <= most), len(lead) - 1)
        rows = max(most // inner[depth], 1)
        cuts = -(-split.row // most) if inner[depth] > most else 1  # one row is too much: its columns are cut
        for index in itertools.product(*map(range, lead[:depth])):
            for first in range(0, lead[depth], rows):
                size = (*(1 for _ in index), min(rows, lead[depth] - first), *lead[depth + 1 :])
                start = (*index, first, *(0 for _ in lead[depth + 1 :]))
                for cut in range(cuts):
                    edges = [(n * cut // cuts, n * (cut + 1) // cuts) for n in split.lengths or ()]
                    columns = tuple([(low, high - low) for low, high in edges])
                    yield _Box(i, start, size, columns), math.prod(size) * sum(n for _, n in columns)


def row_stride(shape: Ints, stride: Ints, dim: int) -> int | None:
    """Return the stride that walks the dims from ``dim`` on, merged; None if no single one does."""
    sizes, steps = coalesce(shape[dim:], stride[dim:])
    if 0 in shape or sizes == (1,):
        return 1
    return steps[0] if len(steps) == 1 else None


def _piece(
    splits: Sequence[Split], boxes: Sequence[_Box], order: Sequence[int], start: int, dtype: torch.dtype
) -> Piece:
    """Return the piece of some boxes, whose wire has the ranks in this order."""
    counts = [sum(math.prod(box.size) * box.columns[rank][1] for box in boxes) for rank in range(len(order))]
    blocks, at = [], 0
    for rank in order:
        for box in boxes:
            split, (column, count) = splits[box.tensor], box.columns[rank]
            inside = row_stride(split.shape, split.stride, split.dim)
            assert inside is not None
            outer = split.stride[: split.dim] or (0,)
            offset = sum(i * step for i, step in zip(box.start, outer, strict=True))
            offset += (sum((split.lengths or ())[:rank]) + column) * inside
            size = (*box.size, count)
            blocks.append(Block(box.tensor, size, (*outer, inside), offset, at, contiguous_stride(size)))
            at += math.prod(size) * dtype.itemsize
    return Piece(_merged(blocks, dtype.itemsize), tuple(counts), start, len(splits), dtype)


def _merged(blocks: Sequence[Block], itemsize: int) -> tuple[Block, ...]:
    """Join neighbouring blocks of one size, at equal distances in a tensor and in the wire, to one of one dim more."""
    runs: list[tuple[Block, int, Ints]] = []  # first block, number of blocks, distances
    for block in blocks:
        if 0 in block.size:
            continue
        if runs:
            first, count, apart = runs[-1]
            steps = apart if count > 1 else (block.offset - first.offset, block.wire - first.wire)
            place = first.offset + count * steps[0], first.wire + count * steps[1]
            is_next = place == (block.offset, block.wire) and steps[0] >= 0 and steps[1] % itemsize == 0
            if first[:3] == block[:3] and is_next:
                runs[-1] = first, count + 1, steps
                continue
        runs.append((block, 1, (0, 0)))
    return tuple([
        first if count == 1 else first._replace(
            size=(count, *first.size), stride=(apart[0], *first.stride),
            wire_stride=(apart[1] // itemsize, *first.wire_stride),
        )
        for first, count, apart in runs
    ])  # fmt: skip
