"""What describes a layout, checked and in the form in which layouts are made of it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError

__all__ = ["Placement", "boxes_of", "grid_of", "listed", "normalize_placements", "shape_of"]

Placement = tuple[int, int] | None
"""One mesh axis: (dim, split factor) shards, None replicates; a split factor above 1 is torch's ``_StridedShard``."""
_MOST = 2**62
_START, _EXTENT = "Layout.of_boxes: a start", "Layout.of_boxes: an extent"


def listed(values: Any, what: str) -> list[Any]:
    """A list.

    Raises:
        ArgumentError: nothing that can be one.
    """
    try:
        return list(values)
    except TypeError:
        raise ArgumentError(f"Layout: {what} must be a sequence of ints, not {values!r:.80}") from None


def shape_of(shape: Any) -> Ints:
    """A shape, of no more elements than an index array counts.

    Raises:
        ArgumentError: no sequence of ints.
        ShapeError: negative or too large.
    """
    sizes = checked_ints(shape, "Layout: a shape")
    if min(sizes, default=0) < 0 or math.prod(sizes) > _MOST:
        raise ShapeError(f"Layout: there is no tensor of shape {list(sizes)}")
    return sizes


def grid_of(mesh: Any) -> NDArray[np.int64]:
    """Global ranks of a mesh, one dim per axis.

    Raises:
        ArgumentError: something else than ints, levels of different lengths, or no ranks.
    """
    given = getattr(mesh, "mesh", mesh)
    try:
        grid = np.asarray(given)
    except (TypeError, ValueError, RuntimeError):
        grid = np.asarray(None)
    if not grid.ndim or not grid.size or grid.dtype.kind not in "iu":
        raise ArgumentError(f"Layout: a mesh must be global ranks, as deep as it has axes, not {given!r:.80}")
    return grid.astype(np.int64, copy=False)


def boxes_of(boxes: Any) -> dict[int, list[tuple[Ints, Ints]]]:
    """Boxes by rank as tuples of ints.

    Raises:
        ArgumentError: they are not.
    """
    try:
        made = {
            rank: [(checked_ints(start, _START), checked_ints(extent, _EXTENT)) for start, extent in mine]
            for rank, mine in boxes.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, CommError):
            raise
        what = f"(start, extent) of every box by global rank, not {boxes!r:.80}"
        raise ArgumentError(f"Layout.of_boxes: expected {what}") from None
    return dict(zip(checked_ints(made, "Layout.of_boxes: ranks"), made.values(), strict=True))


def normalize_placements(placements: Sequence[Any], shape: Ints) -> tuple[Placement, ...]:
    """Placements of torch's, dims and None as (dim, split factor) and None, dims counted from the front."""
    if not isinstance(placements, list | tuple):
        raise ArgumentError(f"Layout: placements must be a sequence, one per mesh axis, not {placements!r:.80}")
    return tuple([_placement(each, shape) for each in placements])


def _placement(placement: Any, shape: Ints) -> Placement:
    if not isinstance(placement, int | None) and not hasattr(placement, "is_replicate"):
        raise ArgumentError(f"Layout: {placement!r:.80} is no placement: neither torch's, nor a dim, nor None")
    if placement is None or (not isinstance(placement, int) and placement.is_replicate()):
        return None
    if not isinstance(placement, int) and placement.is_partial():
        raise UnsupportedError(f"Layout: {placement} is partial, and no rank has its values; reduce it first")
    dim = placement if isinstance(placement, int) else getattr(placement, "dim", None)
    if dim is None:
        raise UnsupportedError(f"Layout: {placement!r} is neither a shard nor a replica")
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"Layout: a tensor {list(shape)} has no dim {dim} to shard")
    return dim % len(shape), int(getattr(placement, "split_factor", 1))
