"""What describes a layout, checked and in the form in which layouts are made of it."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from tritoncomm.reshard.boxes import KINDS, bounds_of

__all__ = [
    "Placement",
    "boxes_of",
    "concatenated",
    "grid_of",
    "listed",
    "normalize_placements",
    "sequence_of",
    "shape_of",
]

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


def concatenated(
    shape: Ints, rank: int, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[list[Ints], Ints]:
    """Positions of a rank's boxes in its local tensor, and that tensor's shape.

    Raises:
        ShapeError: their extents differ in several dims, or they are several of a 0-dim tensor.
    """
    if not boxes:
        return [], (0,) * len(shape)
    (first, extent), *_ = boxes
    if len(boxes) == 1:
        return [(0,) * len(shape)], tuple(extent)
    if not shape:
        raise ShapeError(f"Layout.of_boxes: rank {rank} has the one element of a 0-dim tensor {len(boxes)} times")
    longer = [dim for dim in range(len(shape)) if any(each[dim] != extent[dim] for _, each in boxes)]
    along = (*longer, *(dim for dim in range(len(shape)) if any(start[dim] != first[dim] for start, _ in boxes)), 0)[0]
    if len(longer) > 1:
        raise ShapeError(
            f"Layout.of_boxes: the boxes of rank {rank} have different extents in dims {longer}: {list(boxes)}"
        )
    positions, total = [], 0
    for _, each in boxes:
        positions.append(tuple(total if dim == along else 0 for dim in range(len(shape))))
        total += each[along]
    return positions, tuple(total if dim == along else size for dim, size in enumerate(extent))


def sequence_of(shape: Any, dim: Any, kind: Any, ranks: Any, cu_seqlens: Any) -> tuple[Ints, int, str, Ints, Ints]:
    """The arguments of ``Layout.sequence`` as ints, the dim counted from the front.

    Raises:
        ArgumentError: they are not what they are called.
        ShapeError: no such dim, or boundaries that do not go from 0 to the end.
    """
    name = "Layout.sequence"
    shape, (dim,) = shape_of(shape), checked_ints((dim,), f"{name}: the dim")
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"{name}: a tensor {list(shape)} has no dim {dim}")
    if not isinstance(kind, str) or kind not in KINDS:
        raise ArgumentError(f"{name}: the kind must be one of {', '.join(KINDS)}, not {kind!r:.80}")
    members = checked_ints(listed(ranks, "ranks"), f"{name}: ranks")
    if not members:
        raise ArgumentError(f"{name}: there are no ranks to have the sequence")
    length = shape[dim]
    bounds = (0, length) if cu_seqlens is None else bounds_of(cu_seqlens, name)
    if bounds[-1] != length:
        raise ShapeError(
            f"{name}: cu_seqlens ends with {bounds[-1]}, but dim {dim} of {list(shape)} has {length} tokens"
        )
    return shape, dim % len(shape), kind, members, bounds


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
