"""Blocks of local tensors as tables for the copy kernels, and as pairs of views."""

from collections.abc import Sequence

import numpy as np
import torch
from tritoncomm_kernels import Segments

from tritoncomm.reshard.layout import Array
from tritoncomm.reshard.plan import Local, Side

__all__ = ["Strides", "Table", "blocks_of", "local_pairs", "table_of"]

Strides = tuple[tuple[int, ...], ...]
Table = tuple[tuple[int, ...], Segments]
"""The tensors of a bucket, and its segments, whose indices count those."""
Blocks = tuple[Array, Array, Array, Array]
"""Tensor, start, size and byte offset on the wire of every block."""


def blocks_of(side: Side | Local, start: Array, shift: int = 0) -> Blocks:
    """Blocks of a side of a bucket, that many bytes further on."""
    return side.tensor, start, side.size, side.wire + shift


def table_of(parts: Sequence[Blocks], strides: Strides, dtypes: Sequence[torch.dtype]) -> Table | None:
    """The segments of blocks; None if there are none.

    Args:
        parts: the blocks.
        strides: of all tensors, in elements.
        dtypes: of all tensors on the wire.
    """
    tensor, wire = (np.concatenate([part[i] for part in parts]) for i in (0, 3))
    if not len(tensor):
        return None
    start, size = (np.concatenate([part[i] for part in parts], 1) for i in (1, 2))
    ids, position = np.unique(tensor, return_inverse=True)
    steps = _padded(strides, len(size), ids)[position].T
    itemsize = np.array([dtypes[i].itemsize for i in ids], np.int64)[position]
    rows = _rows(start, size, steps, wire, itemsize)
    rows[0] = position[rows[0]]
    used = tuple(ids.tolist())
    return used, Segments(zip(*(each.tolist() for each in rows), strict=True), [dtypes[i] for i in used])


def _padded(strides: Strides, dims: int, ids: Array) -> Array:
    """Strides of the tensors ``ids`` with leading zeros."""
    padded = [(0,) * (dims - len(strides[i])) + tuple(strides[i]) for i in ids.tolist()]
    return np.array(padded, np.int64).reshape(len(ids), dims)


def _rows(start: Array, size: Array, steps: Array, wire: Array, itemsize: Array) -> list[Array]:
    """Block, offset, rows, row, stride and wire offset of every segment; dims are coalesced where one stride can."""
    count = size.shape[1]
    columns = np.arange(count)
    # Levels from the innermost dim out: extent and step of each; ``top`` is the outermost level so far.
    extent, step = np.ones((2, len(size) + 2, count), np.int64)
    top = np.zeros(count, np.int64)
    for dim in reversed(range(len(size))):
        length, stride = size[dim], steps[dim]
        joins = (length == 1) | (stride == extent[top, columns] * step[top, columns])
        extent[top, columns] *= np.where(joins, length, 1)
        opens = np.nonzero(~joins)[0]
        top[opens] += 1
        extent[top[opens], opens], step[top[opens], opens] = length[opens], stride[opens]
    offset = (start * steps).sum(0)
    outer = extent[2:].prod(0)
    block = np.repeat(columns, outer)
    index = np.arange(len(block)) - np.repeat(np.cumsum(outer) - outer, outer)
    length = extent[0] * extent[1]
    at = wire[block] + index * (length * itemsize)[block]
    offset = offset[block]
    for level in range(2, len(extent)):
        index, digit = np.divmod(index, extent[level, block])
        offset = offset + digit * step[level, block]
    return [block, offset, extent[1, block], extent[0, block], step[1, block], at]


def local_pairs(local: Local, strides: tuple[Strides, Strides]) -> list[tuple[int, tuple[tuple[int, ...], ...]]]:
    """Blocks that stay: tensor, and size, strides and offset in the source, strides and offset in the result."""
    pairs = []
    sides = (local.source.T.tolist(), local.target.T.tolist())
    for place, (index, extent) in enumerate(zip(local.tensor.tolist(), local.size.T.tolist(), strict=True)):
        dims = len(strides[0][index])
        described: list[tuple[int, ...]] = [tuple(extent[len(extent) - dims :])]
        for side, steps in zip(sides, strides, strict=True):
            start = side[place][len(extent) - dims :]
            described += [steps[index], (sum(a * b for a, b in zip(start, steps[index], strict=True)),)]
        pairs.append((index, tuple(described)))
    return pairs
