"""Overlaps of blocks whose values are summed: found, and cut until two pieces are either equal or disjoint.

Blocks are columns of an array, ``[dims, blocks]``; each belongs to a tensor, and blocks of two tensors never overlap.
"""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from tritoncomm.reshard.boxes import Array

__all__ = ["cut_at_edges", "distinct_blocks", "has_overlap", "tensors_across_buckets"]


def has_overlap(tensor: Array, start: Array, size: Array) -> NDArray[np.bool_]:
    """Return for every block whether it shares an element with another block of its tensor."""
    result = np.zeros(len(tensor), bool)
    for index, boxes, box, counts in _by_tensor(tensor, start, size):
        result[index] = ((counts > 1) | _meeting_pairs(boxes).any(0))[box]
    return result


def tensors_across_buckets(tensor: Array, start: Array, size: Array, bucket: Array) -> set[int]:
    """Return the tensors that have an element in blocks of two different buckets."""
    # The bucket is one more dim, so that equal blocks of two buckets are not merged into one box.
    labelled = np.concatenate([start, bucket[None]]), np.concatenate([size, np.ones_like(bucket)[None]])
    result = set()
    for index, boxes, _, _ in _by_tensor(tensor, *labelled):
        label = boxes[len(start)]
        if (label != label[0]).any():
            # Without the row of the buckets and the row of their extents, which are all 1.
            meets = _meeting_pairs(np.delete(boxes, [len(start), -1], 0))
            if (meets & (label[:, None] != label)).any():
                result.add(int(tensor[index[0]]))
    return result


def cut_at_edges(tensor: Array, start: Array, size: Array) -> tuple[Array, Array, Array, Array]:
    """Cut overlapping blocks at each other's edges, so that two pieces of a tensor are either equal or disjoint.

    Returns:
        For every piece, in the order of the blocks: its block, its tensor, its first index and its extent.

    Example:
        ``[0, 5)`` and ``[3, 8)`` are cut into ``[0, 3)``, ``[3, 5)``, ``[3, 5)`` and ``[5, 8)``.
    """
    pieces = [(np.empty(0, np.int64), np.empty((len(start), 0), np.int64), np.empty((len(start), 0), np.int64))]
    for index, boxes, _, _ in _by_tensor(tensor, start, size):
        blocks = index, start[:, index], size[:, index]
        # Blocks that are apart or equal stay whole: cutting them would only lengthen the tables.
        pieces.append(_cut(*blocks) if _meeting_pairs(boxes).any() else blocks)
    block, first, extent = (np.concatenate([piece[i] for piece in pieces], -1) for i in range(3))
    order = np.argsort(block, kind="stable")
    return block[order], tensor[block[order]], first[:, order], extent[:, order]


def distinct_blocks(tensor: Array, start: Array, size: Array) -> tuple[Array, Array, Array, Array]:
    """Drop blocks that repeat an equal block of their tensor.

    Returns:
        For every block that stays: its tensor, its first index, its extent, and the number of blocks equal to it,
        itself included.
    """
    firsts, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for index, _, box, counts in _by_tensor(tensor, start, size):
        firsts.append(index[np.unique(box, return_index=True)[1]])
        numbers.append(counts)
    chosen = np.concatenate(firsts)
    return tensor[chosen], start[:, chosen], size[:, chosen], np.concatenate(numbers)


def _by_tensor(tensor: Array, start: Array, size: Array) -> Iterator[tuple[Array, Array, Array, Array]]:
    """Yield the distinct boxes of every tensor that has blocks.

    Yields:
        The indices of the tensor's blocks; its distinct boxes, ``[2 * dims, boxes]``, starts above extents; the box of
        each of its blocks; the number of blocks of each box.
    """
    order = np.argsort(tensor, kind="stable")
    for index in np.split(order, np.nonzero(np.diff(tensor[order]))[0] + 1):
        if len(index):
            boxes = np.concatenate([start[:, index], size[:, index]])
            boxes, box, counts = np.unique(boxes, axis=1, return_inverse=True, return_counts=True)
            yield index, boxes, box.reshape(-1), counts


def _meeting_pairs(boxes: Array) -> NDArray[np.bool_]:
    """Return ``[boxes, boxes]``: whether two different boxes, ``[2 * dims, boxes]``, share an element."""
    dims = len(boxes) // 2
    low, high = boxes[:dims], boxes[:dims] + boxes[dims:]
    result = ~np.eye(boxes.shape[1], dtype=bool)
    for first, end in zip(low, high, strict=True):
        result &= (first[:, None] < end) & (first < end[:, None])
    return result


def _cut(block: Array, start: Array, size: Array) -> tuple[Array, Array, Array]:
    """Cut blocks of one tensor wherever any starts or ends: return block, first index and extent of every piece."""
    edges = [np.unique([low, low + extent]) for low, extent in zip(start, size, strict=True)]
    # By dim and block: the numbers of the edges at which the block starts and ends.
    first, last = (
        np.stack([np.searchsorted(edge, row) for edge, row in zip(edges, ends, strict=True)])
        for ends in (start, start + size)
    )
    along = last - first  # pieces of every block along each dim
    counts = along.prod(0)
    place = np.repeat(np.arange(len(block)), counts)
    index = np.arange(len(place)) - np.repeat(np.cumsum(counts) - counts, counts)
    low, extent = np.empty((2, len(edges), len(place)), np.int64)
    # The number of a piece in its block has the pieces along each dim as digits, the last dim fastest.
    for dim in reversed(range(len(edges))):
        index, digit = np.divmod(index, along[dim, place])
        at = first[dim, place] + digit
        low[dim], extent[dim] = edges[dim][at], edges[dim][at + 1] - edges[dim][at]
    return block[place], low, extent
