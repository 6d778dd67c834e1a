"""Blocks that are added up where they overlap: divided until those of a tensor are equal or disjoint."""

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from tritoncomm.reshard.layout import Array

__all__ = ["crosses", "distinct", "divided", "overlaps"]

_Boxes = tuple[Array, Array, Array, Array]


def overlaps(tensor: Array, start: Array, size: Array) -> NDArray[np.bool_]:
    """Whether a block has elements in common with another one of its tensor.

    Args:
        tensor: index of every block's tensor.
        start, size: of the blocks, ``[dims, blocks]``; none is empty.
    """
    result = np.zeros(len(tensor), bool)
    for mine, boxes, box, counts in _by_tensor(tensor, start, size):
        result[mine] = ((counts > 1) | _meets(boxes).any(0))[box]
    return result


def crosses(tensor: Array, start: Array, size: Array, bucket: Array) -> set[int]:
    """Tensors of which blocks of different buckets have elements in common."""
    labelled = np.concatenate([start, bucket[None]]), np.concatenate([size, np.ones_like(bucket)[None]])
    result = set()
    for mine, boxes, _, _ in _by_tensor(tensor, *labelled):
        low = boxes[len(start)]
        if (low != low[0]).any() and (_meets(np.delete(boxes, [len(start), -1], 0)) & (low[:, None] != low)).any():
            result.add(int(tensor[mine[0]]))
    return result


def divided(tensor: Array, start: Array, size: Array) -> tuple[Array, Array, Array, Array]:
    """The block that every part is of, its tensor, and the part's start and size, in the order of the blocks.

    Parts of a tensor are equal or disjoint: blocks that overlap otherwise are split where others start and end.

    Example:
        ``[0, 5)`` and ``[3, 8)`` are the parts ``[0, 3)``, ``[3, 5)``, ``[3, 5)`` and ``[5, 8)``.
    """
    parts = [(np.empty(0, np.int64), np.empty((len(start), 0), np.int64), np.empty((len(start), 0), np.int64))]
    for mine, boxes, _, _ in _by_tensor(tensor, start, size):
        first, extent = start[:, mine], size[:, mine]
        parts.append(_split(mine, first, extent) if _meets(boxes).any() else (mine, first, extent))
    block, first, extent = (np.concatenate([part[i] for part in parts], -1) for i in range(3))
    order = np.argsort(block, kind="stable")
    return block[order], tensor[block[order]], first[:, order], extent[:, order]


def distinct(tensor: Array, start: Array, size: Array) -> tuple[Array, Array, Array, Array]:
    """Blocks without those that are equal to others of their tensor, and how many each stands for."""
    firsts, numbers = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for mine, _, box, counts in _by_tensor(tensor, start, size):
        firsts.append(mine[np.unique(box, return_index=True)[1]])
        numbers.append(counts)
    kept = np.concatenate(firsts)
    return tensor[kept], start[:, kept], size[:, kept], np.concatenate(numbers)


def _by_tensor(tensor: Array, start: Array, size: Array) -> Iterator[_Boxes]:
    """By tensor: its blocks, their distinct starts and sizes one below the other, which of those each has, counts."""
    order = np.argsort(tensor, kind="stable")
    for mine in np.split(order, np.nonzero(np.diff(tensor[order]))[0] + 1):
        if len(mine):
            boxes = np.concatenate([start[:, mine], size[:, mine]])
            boxes, box, counts = np.unique(boxes, axis=1, return_inverse=True, return_counts=True)
            yield mine, boxes, box.reshape(-1), counts


def _meets(boxes: Array) -> NDArray[np.bool_]:
    """Which of different boxes have elements in common, ``[boxes, boxes]``."""
    dims = len(boxes) // 2
    low, high = boxes[:dims], boxes[:dims] + boxes[dims:]
    result = ~np.eye(boxes.shape[1], dtype=bool)
    for first, end in zip(low, high, strict=True):
        result &= (first[:, None] < end) & (first < end[:, None])
    return result


def _split(block: Array, start: Array, size: Array) -> tuple[Array, Array, Array]:
    """Blocks of one tensor, each split where any of them starts or ends."""
    edges = [np.unique([first, first + extent]) for first, extent in zip(start, size, strict=True)]
    place: Callable[[Array], Array] = lambda at: np.stack(  # noqa: E731
        [np.searchsorted(edge, row) for edge, row in zip(edges, at, strict=True)]
    )
    first = place(start)
    along = place(start + size) - first
    counts = along.prod(0)
    of = np.repeat(np.arange(len(block)), counts)
    index = np.arange(len(of)) - np.repeat(np.cumsum(counts) - counts, counts)
    low, extent = np.empty((2, len(edges), len(of)), np.int64)
    for dim in reversed(range(len(edges))):
        index, digit = np.divmod(index, along[dim, of])
        at = first[dim, of] + digit
        low[dim], extent[dim] = edges[dim][at], edges[dim][at + 1] - edges[dim][at]
    return block[of], low, extent
