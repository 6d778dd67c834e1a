"""Boxes of an index space as numpy arrays: runs of tokens per rank, strided boxes as dense ones, replicas.

A strided box holds every ``step``-th index of a dim. A dim with a *period* is viewed as rows of ``period`` columns:
index ``t`` is column ``t % period`` of row ``t // period``. If the period is a multiple of the step, a strided box is a
few dense columns, and a range of indices is at most three dense boxes: the end of a row, full rows, the start of a row.
So a striped sequence costs a few boxes instead of one per token, whatever divides.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = [
    "KINDS", "Array", "Boxes", "Runs", "bounds_of", "distinct_rows", "in_rows", "range_boxes", "rows_shape", "runs_of",
]  # fmt: skip

Array = NDArray[np.int64]
KINDS = ("contiguous", "zigzag", "striped", "full")
"""The ways to divide a sequence among ranks; see ``Layout.sequence``."""


class Boxes(NamedTuple):
    """Boxes of an index space and the ranks that own them.

    Attributes:
        owner: place of every box's rank.
        start, size: first index and extent of every box, ``[boxes, dims]``.
        at: position of every box in the local tensor of its rank, ``[boxes, dims]``.
    """

    owner: Array
    start: Array
    size: Array
    at: Array


class Runs(NamedTuple):
    """Runs of tokens ``start, start + step, ...`` and the ranks that own them.

    Attributes:
        owner: place of every run's rank; ascending. The runs of a rank are in the order of its local tensor.
        start, size: first token and number of tokens of every run.
        at: position of every run in the local tensor of its rank.
        local: number of tokens of every rank.
        step: distance of two tokens of a run; the same for all runs.
    """

    owner: Array
    start: Array
    size: Array
    at: Array
    local: Array
    step: int


def bounds_of(cu_seqlens: Any, name: str) -> Ints:
    """Read the boundaries ``0, ..., S`` of packed sequences, ints or a tensor of one dim; return them as ints."""
    values = cu_seqlens
    if hasattr(values, "tolist"):
        try:
            # Reading a tensor on a GPU waits for the GPU.
            values = values.tolist()
        except (RuntimeError, TypeError) as error:  # a tensor without data, or a subclass that hides it
            raise ArgumentError(f"{name}: cu_seqlens cannot be read: {error}") from error
    bounds = checked_ints(values, f"{name}: cu_seqlens")
    if not bounds or bounds[0]:
        raise ShapeError(f"{name}: cu_seqlens must start with 0, not as {list(bounds[:4])}")
    for index, (low, high) in enumerate(itertools.pairwise(bounds)):
        if high < low:
            raise ShapeError(f"{name}: cu_seqlens descends from {low} to {high} after sequence {index}")
    return bounds


def runs_of(kind: str, bounds: Sequence[int], world: int, name: str) -> Runs:
    """Divide packed sequences among ranks, each by itself; return the runs of tokens of every rank."""
    # Starts and sizes are ``[world, sequences]``, of zigzag ``[world, sequences, 2]``: flattened, the runs of a rank
    # are in the order of its local tensor.
    edges = np.array(bounds, np.int64)
    first, length = edges[:-1], np.diff(edges)
    rank = np.arange(world)[:, None]
    step = world if kind == "striped" else 1
    if kind == "contiguous":
        run = -(-length // world)  # ceil, as torch.chunk
        low = np.minimum(rank * run, length)
        start, size = first + low, np.minimum(low + run, length) - low
    elif kind == "striped":
        start, size = first + rank, np.maximum(0, -(-(length - rank) // world))
    else:  # zigzag; ``full`` has no runs
        uneven = np.nonzero(length % (2 * world))[0]
        if len(uneven):
            which = "the sequence" if len(length) == 1 else f"sequence {uneven[0]}"
            raise ShapeError(
                f"{name}: zigzag divides each sequence into {2 * world} chunks for {world} ranks, but {which} has "
                f"{length[uneven[0]]} tokens; pad it to a multiple of {2 * world}"
            )
        chunk = length // (2 * world)
        start = np.stack([first + rank * chunk, first + (2 * world - 1 - rank) * chunk], 2)
        size = np.broadcast_to(chunk[None, :, None], start.shape)
    owner = np.repeat(np.arange(world), start[0].size)
    return _merged(owner, start.reshape(-1), size.reshape(-1), world, step)


def _merged(owner: Array, start: Array, size: Array, world: int, step: int) -> Runs:
    """Drop empty runs of tokens, merge runs of one rank that continue each other, and compute local positions."""
    filled = size > 0
    owner, start, size = owner[filled], start[filled], size[filled]
    # The two chunks of the last rank of a zigzag adjoin, and so do whole packed sequences of one rank.
    opens = np.ones(len(owner), bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (start[1:] != (start + size * step)[:-1])
    firsts = np.nonzero(opens)[0]
    size = np.add.reduceat(size, firsts) if len(firsts) else size
    owner, start = owner[firsts], start[firsts]
    local = np.bincount(owner, size, world).astype(np.int64)
    # Tokens before the run, of all ranks, less the tokens of the ranks before this one.
    at = np.cumsum(size) - size - (np.cumsum(local) - local)[owner]
    return Runs(owner, start, size, at, local, step)


def rows_shape(shape: Ints, periods: Ints) -> Ints:
    """Return the shape of a tensor whose dims with a period above 1 are viewed as rows of ``period`` columns."""
    # The last row may reach past the dim's end.
    pairs = [(n,) if period == 1 else (-(-n // period), period) for n, period in zip(shape, periods, strict=True)]
    return tuple(n for pair in pairs for n in pair)


def in_rows(boxes: Boxes, steps: Ints, periods: Ints) -> Boxes:
    """Convert strided boxes to dense boxes of the view in which each dim is rows of its period (``rows_shape``).

    Args:
        periods: period of every dim, a multiple of its step; 1 leaves a dim as it is.
    """
    dim = 0
    for step, period in zip(steps, periods, strict=True):
        if period == 1:
            dim += 1
            continue
        # ``at`` is not divided: in the result its row is 0, and its column the index along the original dim.
        boxes = _columns(boxes, dim, period, step) if step > 1 else _ranges(boxes, dim, period)
        dim += 2  # a row and a column
    return boxes


def _ranges(boxes: Boxes, dim: int, period: int) -> Boxes:
    """Cut each box's index range of one dim into the end of a row, full rows and the start of a row."""
    low, size = boxes.start[:, dim], boxes.size[:, dim]
    high = low + size
    (top, left), (bottom, right) = np.divmod(low, period), np.divmod(high, period)
    full = -(-low // period)
    zeros, width = np.zeros_like(low), np.full_like(low, period)
    # By position: first row, first column, number of rows, number of columns, offset into the box in indices of the
    # dim.
    head = top, left, (left > 0).astype(np.int64), np.minimum(width, left + size) - left, zeros
    body = full, zeros, np.maximum(bottom - full, 0), width, full * period - low
    # Inside of one row a range is a head alone, or, from the start of the row on, a tail alone.
    tail = bottom, zeros, (bottom * period >= low).astype(np.int64), right, bottom * period - low
    return _assembled(boxes, dim, np.stack([head, body, tail], -1))


def _columns(boxes: Boxes, dim: int, period: int, step: int) -> Boxes:
    """Cut each box's every ``step``-th index of one dim into ``period // step`` columns of rows."""
    # Index ``low + step * k`` is in piece ``k % count``. Each piece starts at its ``nth`` index, and advances by a row
    # per ``count`` indices.
    low, size, count = boxes.start[:, dim, None], boxes.size[:, dim, None], period // step
    nth = np.broadcast_to(np.arange(count), (len(low), count))
    top, left = np.divmod(low + step * nth, period)
    return _assembled(boxes, dim, np.stack([top, left, -(-(size - nth) // count), np.ones_like(nth), nth]))


def _assembled(boxes: Boxes, dim: int, pieces: Array) -> Boxes:
    """Replace one dim of boxes by the row and column of the boxes' pieces; drop empty pieces.

    Args:
        pieces: first row, first column, number of rows, number of columns, and offset into the box (in indices of the
            dim) of every piece, ``[5, boxes, pieces]``.
    """
    box, piece = np.nonzero((pieces[2] > 0) & (pieces[3] > 0))
    top, left, rows, columns, offset = pieces[:, box, piece]
    start, size, at = (np.insert(array[box], dim, 0, 1) for array in boxes[1:])  # the original dim is ``dim + 1`` now
    start[:, dim], start[:, dim + 1] = top, left
    size[:, dim], size[:, dim + 1] = rows, columns
    # A position counts indices of the original dim: its row is 0, its column the box's position plus the piece's
    # offset.
    at[:, dim + 1] += offset
    return Boxes(boxes.owner[box], start, size, at)


def distinct_rows(rows: Array) -> tuple[Array, Array]:
    """Group equal rows of a matrix, such as equal boxes of several ranks.

    Returns:
        The distinct rows in lexicographic order, as indices of their first occurrences; and the group of every row.
    """
    if not rows.size:  # rows without columns are all equal
        return np.arange(min(len(rows), 1)), np.zeros(len(rows), np.int64)
    order = np.lexsort(rows.T[::-1])  # stable, so that the first of equal rows comes first
    opens = np.ones(len(rows), bool)
    opens[1:] = (rows[order[1:]] != rows[order[:-1]]).any(1)
    group = np.empty_like(order)
    group[order] = np.cumsum(opens) - 1
    return order[opens], group


def range_boxes(shape: Array, low: Array, high: Array) -> tuple[Array, Array, Array]:
    """Cut ranges of flattened boxes into boxes: at most ``2 * dims - 1`` each, in the order of their elements.

    Args:
        shape: extent of the box that every range lies in, ``[dims, ranges]``.

    Returns:
        For every piece, range by range: its range, its first index and its extent, ``[dims, pieces]``.

    Example:
        Elements 3 to 10 of a box ``[4, 5]`` are the end of row 0, all of row 1, and no part of row 2: ``[0:1, 3:5]``
        and ``[1:2, 0:5]``.
    """
    dims, count = shape.shape
    order, pieces = np.arange(count), []  # range, place among the range's pieces, dim, row, first and end of a piece
    # From the innermost dim out. The partial rows at both ends of a range, its head and its tail, become pieces of this
    # dim; the full rows between them are the range of the next one. A range inside of one row is a head alone.
    # Elements 3 to 10 of rows of 5: the head ends at 5, there is no tail, as row 1 ends at 10, and row 1 is left.
    for dim in reversed(range(1, dims)):
        length = np.maximum(shape[dim], 1)
        inside = (low // length == (high - 1) // length) & (high - low < length)
        left, right = low // length * length, high // length * length
        head_end, tail_start = np.where(inside, high, left + length), np.where(inside, high, right)
        has_elements = low < high
        heads = has_elements & (inside | (low > left))
        tails = has_elements & ~inside & (high > right)
        for chosen, place, first, end in ((heads, -dim, low, head_end), (tails, dim, tail_start, high)):
            index = np.nonzero(chosen)[0]
            row = first[index] // length[index]
            offset = row * length[index]
            pieces.append((index, np.full_like(index, place), np.full_like(index, dim), row, first[index] - offset,
                           end[index] - offset))  # fmt: skip
        low, high = np.where(heads, head_end, low), np.where(tails, tail_start, high)
        # What is left are full rows, which are counted as elements of the next dim.
        low, high = np.where(inside, 0, -(-low // length)), np.where(inside, 0, high // length)
    index = order[low < high]
    zeros = np.zeros_like(index)
    pieces.append((index, zeros, zeros, zeros, low[index], high[index]))
    index, place, dim, row, first, end = (np.concatenate(arrays) for arrays in zip(*pieces, strict=True))
    # Heads have negative places and tails positive ones, so the pieces of a range are in the order of their elements.
    order = np.lexsort((place, index))
    index, dim, row, first, end = index[order], dim[order], row[order], first[order], end[order]
    start, size = np.zeros((2, dims, len(index)), np.int64)
    # The number of a row has the indices of all outer dims as digits, the last one fastest.
    for axis in reversed(range(dims)):
        extent = shape[axis, index]
        outer = axis < dim
        row, digit = np.where(outer, row // extent, row), np.where(outer, row % extent, 0)
        start[axis] = np.where(axis == dim, first, digit)
        size[axis] = np.where(outer, 1, np.where(axis == dim, end - first, extent))
    return index, start, size
