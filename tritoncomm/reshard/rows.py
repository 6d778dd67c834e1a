"""Boxes with steps as boxes without: a dim as rows of one period, in which a step is a column.

Index ``t`` of a dim is ``(t // period, t % period)``. What a rank has of every ``step``-th index, where the period is a
multiple of the step, is a box of a single column, or several; a range of indices is three boxes at most: the end of a
row, full rows, the beginning of one. So striped sequences cost a few boxes, not one per token, whatever divides.
"""

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints

__all__ = ["Boxes", "common_periods", "in_rows", "row_steps", "rows_shape"]

_Array = NDArray[np.int64]


class Boxes(NamedTuple):
    """Boxes of ranks.

    Attributes:
        owner: of every box.
        start, size: ``[boxes, dims]``.
        at: position in the local tensor.
    """

    owner: _Array
    start: _Array
    size: _Array
    at: _Array


def rows_shape(shape: Ints, periods: Ints) -> Ints:
    """A shape whose dims with a period above 1 are rows and columns; the last row may reach beyond the dim."""
    pairs = [(n,) if period == 1 else (-(-n // period), period) for n, period in zip(shape, periods, strict=True)]
    return tuple(n for pair in pairs for n in pair)


def row_steps(steps: Ints, periods: Ints) -> Ints:
    """How many indices of the local tensor it is from one row to the next."""
    return tuple(period // step for step, period in zip(steps, periods, strict=True))


def in_rows(boxes: Boxes, steps: Ints, periods: Ints) -> Boxes:
    """Boxes without steps over ``rows_shape``; a position counts local indices, in the column's place.

    Args:
        boxes: with the steps; none is empty.
        steps: of all boxes, for every dim.
        periods: multiples of the steps; 1 leaves a dim as it is.
    """
    place = 0
    for step, period in zip(steps, periods, strict=True):
        if period == 1:
            place += 1
            continue
        count = period // step
        boxes = _columns(boxes, place, period, step, count) if step > 1 else _ranges(boxes, place, period)
        place += 2
    return boxes


def _ranges(boxes: Boxes, dim: int, period: int) -> Boxes:
    """The end of a row, full rows and the beginning of a row, of every box."""
    low, size = boxes.start[:, dim], boxes.size[:, dim]
    high = low + size
    (top, left), (bottom, right) = np.divmod(low, period), np.divmod(high, period)
    full = -(-low // period)
    nothing, row = np.zeros_like(low), np.full_like(low, period)
    head = top, left, (left > 0).astype(np.int64), np.minimum(row, left + size) - left, nothing
    body = full, nothing, np.maximum(bottom - full, 0), row, full * period - low
    tail = bottom, nothing, (bottom * period >= low).astype(np.int64), right, bottom * period - low
    return _assembled(boxes, dim, np.stack([head, body, tail], -1))


def _columns(boxes: Boxes, dim: int, period: int, step: int, count: int) -> Boxes:
    """Every ``count``-th index of a box is in one column."""
    low, size = boxes.start[:, dim, None], boxes.size[:, dim, None]
    nth = np.broadcast_to(np.arange(count), (len(low), count))
    top, left = np.divmod(low + step * nth, period)
    return _assembled(boxes, dim, np.stack([top, left, -(-(size - nth) // count), np.ones_like(nth), nth]))


def _assembled(boxes: Boxes, dim: int, parts: _Array) -> Boxes:
    """Boxes of parts (row, column, rows, columns, indices into the box; ``[5, boxes, parts]``), without empty ones."""
    box, part = np.nonzero((parts[2] > 0) & (parts[3] > 0))
    top, left, rows, columns, into = parts[:, box, part]
    sides = []
    for whose, (one, other) in zip(boxes[1:], ((top, left), (rows, columns), (0 * into, into)), strict=True):
        made = np.insert(whose[box], dim, 0, 1)
        if whose is boxes.at:
            other = other + made[:, dim + 1]
        made[:, dim], made[:, dim + 1] = one, other
        sides.append(made)
    return Boxes(boxes.owner[box], *sides)


def common_periods(steps: Ints, others: Ints) -> Ints:
    """The periods in which boxes of both steps have none."""
    return tuple(map(math.lcm, steps, others))
