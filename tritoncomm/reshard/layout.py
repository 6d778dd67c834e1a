"""Layouts: which boxes of a tensor's index space every rank owns, and where they are in its local tensor."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.reshard.layout_arguments import Placement, boxes_of, grid_of, listed, normalize_placements, shape_of

__all__ = ["Array", "Distinct", "Layout"]

Array = NDArray[np.int64]


class Layout:
    """The boxes of an index space that every rank of an ordered set owns.

    The same region on several ranks is a replica. A rank may own several boxes; its local tensor has each of them at a
    position of its own. Layouts compare and hash by what they describe; every rank makes the same one.

    Args:
        shape: of the global tensor.
        ranks: global ranks.
        owner: index into ``ranks`` of every box.
        start: first index of every box, ``[boxes, dims]``.
        size: extent of every box, ``[boxes, dims]``.
        at: position of every box in its rank's local tensor, ``[boxes, dims]``.
        local: shape of every rank's local tensor, ``[ranks, dims]``.

    Raises:
        ShapeError: the boxes are not inside the tensor or the local tensors.
        ArgumentError: a rank is listed twice.
    """

    def __init__(
        self,
        shape: Sequence[int],
        ranks: Sequence[int],
        owner: Array,
        start: Array,
        size: Array,
        at: Array,
        local: Array,
    ) -> None:
        self.shape, self.ranks = tuple(shape), tuple(ranks)
        if len(set(self.ranks)) != len(self.ranks):
            raise ArgumentError(f"Layout: a rank is listed twice in {list(self.ranks)}")
        kept = size.all(1)
        if not kept.all():
            owner, start, size, at = owner[kept], start[kept], size[kept], at[kept]
        self.owner, self.start, self.size, self.at, self._local = owner, start, size, at, local
        self.sharded: tuple[bool, ...] = (True,) * len(self.shape)  # where False, all boxes have the dim's full extent
        self.may_repeat = True  # whether a region may have replicas
        self.axes: tuple[Ints, Ints] | None = None  # a mesh and its sharding axes, if no box is empty
        limit = np.array(self.shape, np.int64)
        if ((start < 0) | (size < 0) | (start + size > limit)).any():
            raise ShapeError(f"Layout: a box is not inside the tensor {list(self.shape)}")
        if ((at < 0) | (at + size > local[owner])).any():
            raise ShapeError(f"Layout: a box of the tensor {list(self.shape)} is not inside its rank's local tensor")
        state = hashlib.blake2b(repr((self.shape, self.ranks)).encode(), digest_size=16)
        for each in (owner, start, size, at, local):
            state.update(each.tobytes())  # in C order, whatever the strides
        self.digest = state.digest()

    @staticmethod
    def on_mesh(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> "Layout":
        """Shards and replicas over a mesh of any number of axes, as DTensor has them.

        Every axis in turn shards what the axes before it left, by chunks of ``ceil(size / ranks)``.

        Args:
            shape: of the global tensor.
            mesh: a torch ``DeviceMesh``, or global ranks as a nested list or array, one level per axis.
            placements: for every axis a placement of torch's, or the dim that it shards, or None for a replica.

        Raises:
            ShapeError: no such dim, or not one placement per axis.
            ArgumentError: what is no shape, mesh or placement.
            UnsupportedError: a partial placement, or a strided shard other than FSDP2 over tensor parallelism.
        """
        grid, shape = grid_of(mesh), shape_of(shape)
        return _on_mesh(shape, grid.shape, tuple(grid.flatten().tolist()), normalize_placements(placements, shape))

    @staticmethod
    def of_dtensor(tensor: Any) -> "Layout":
        """The layout of a DTensor."""
        return Layout.on_mesh(tensor.shape, tensor.device_mesh, tensor.placements)

    @staticmethod
    def replicated(shape: Sequence[int], ranks: Sequence[int]) -> "Layout":
        """The full tensor on each of these ranks; of one rank: its owner."""
        return Layout.on_mesh(shape, listed(ranks, "ranks"), [None])

    @staticmethod
    def split(shape: Sequence[int], dim: int, sizes: Mapping[int, int] | Sequence[int]) -> "Layout":
        """Uneven shards of one dim: its size on every rank, in rank order.

        Args:
            shape: of the global tensor.
            dim: the sharded dim.
            sizes: by global rank, or of ranks 0, 1, 2 and so on.

        Raises:
            ShapeError: no such dim, or the sizes do not add up to it.
            ArgumentError: what is no shape, dim or size.
        """
        shape, (dim,) = shape_of(shape), checked_ints((dim,), "Layout.split: the dim")
        given = sizes if isinstance(sizes, Mapping) else dict(enumerate(listed(sizes, "sizes")))
        by_rank = dict(
            zip(checked_ints(given, "ranks"), checked_ints(given.values(), "Layout.split: sizes"), strict=True)
        )
        if not -len(shape) <= dim < len(shape):
            raise ShapeError(f"Layout.split: a tensor {list(shape)} has no dim {dim}")
        dim %= len(shape)
        if sum(by_rank.values()) != shape[dim] or min(by_rank.values(), default=0) < 0:
            raise ShapeError(f"Layout.split: sizes {by_rank} do not add up to dim {dim} of {list(shape)}")
        boxes: dict[int, list[tuple[Ints, Ints]]] = {}
        first = 0
        for rank, size in by_rank.items():
            start, extent = [0] * len(shape), list(shape)
            start[dim], extent[dim] = first, size
            boxes[rank] = [(tuple(start), tuple(extent))]
            first += size
        return Layout.of_boxes(shape, boxes)

    @staticmethod
    def of_boxes(shape: Sequence[int], boxes: Mapping[int, Sequence[tuple[Sequence[int], Sequence[int]]]]) -> "Layout":
        """Any boxes (start, extent) by global rank.

        Several boxes of a rank are concatenated in its local tensor: along the dim in which their extents differ, else
        along the first one in which their starts do.

        Args:
            shape: of the global tensor.
            boxes: of every rank; a rank without boxes has an empty local tensor, of a 0-dim tensor none.

        Raises:
            ShapeError: a box is not inside the tensor, or boxes of a rank cannot be concatenated along one dim.
            ArgumentError: what is no shape, rank or box.
        """
        shape, boxes = shape_of(shape), boxes_of(boxes)
        boxes = boxes if shape else {rank: mine for rank, mine in boxes.items() if mine}
        owner, start, size, at, shapes = [], [], [], [], []
        for index, (rank, mine) in enumerate(boxes.items()):
            if any({len(box[0]), len(box[1])} != {len(shape)} for box in mine):
                raise ShapeError(f"Layout.of_boxes: rank {rank} needs (start, extent) over the dims of {list(shape)}")
            positions, local = _concatenated(shape, rank, mine)
            owner += [index] * len(mine)
            start += [box[0] for box in mine]
            size += [box[1] for box in mine]
            at += positions
            shapes.append(local)
        start, size, at, local = (np.array(x, np.int64).reshape(len(x), len(shape)) for x in (start, size, at, shapes))
        return Layout(shape, list(boxes), np.array(owner, np.int64), start, size, at, local)

    def local_shape(self, rank: int) -> Ints | None:
        """Shape of a rank's local tensor; None if the layout has none there."""
        place = _places(self.ranks).get(rank)
        return None if place is None else tuple(self._local[place].tolist())

    @cached_property
    def is_single(self) -> bool:
        """Whether every rank has one box at most."""
        return bool((np.bincount(self.owner) <= 1).all())

    @cached_property
    def distinct(self) -> "Distinct":
        """The regions without their replicas, and which ranks have each."""
        return Distinct(self)

    @cached_property
    def problem(self) -> str:
        """Why this is no tiling of the tensor (replicas apart), in words; empty if it is one.

        A tiling covers every element, and its regions are either equal or disjoint.
        """
        regions = self.distinct
        start, size = regions.start, regions.size
        volume = int(size.prod(1).sum())
        if len(start) > 1:
            low = np.maximum(start[:, None], start[None])
            high = np.minimum((start + size)[:, None], (start + size)[None])
            overlaps = np.triu((high > low).all(2), 1)
            if overlaps.any():
                one, other = (int(each[0]) for each in np.nonzero(overlaps))
                return (
                    f"the boxes {_text(start[one], size[one])} of rank {self._holder(one)} and "
                    f"{_text(start[other], size[other])} of rank {self._holder(other)} overlap in part"
                )
        missing = math.prod(self.shape) - volume
        return f"it does not cover {missing} of the {math.prod(self.shape)} elements" if missing else ""

    def _holder(self, region: int) -> int:
        return self.ranks[int(self.owner[self.distinct.boxes[region, 0]])]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        boxes = [
            f"{_text(start, size)} on rank {self.ranks[owner]}"
            for owner, start, size in zip(self.owner[:3].tolist(), self.start, self.size, strict=False)
        ]
        more = [f"... of {len(self.owner)} boxes"] if len(self.owner) > 3 else []
        return f"Layout({list(self.shape)} over {len(self.ranks)} ranks: {', '.join(boxes + more)})"


class Distinct:
    """The regions of a layout without their replicas.

    Attributes:
        start, size: of every region, ``[regions, dims]``.
        boxes: its boxes in the layout, one per replica, ``[regions, most replicas]``; -1 where there are fewer.
        replicas: number of boxes of every region.
        region: of every box of the layout.
    """

    def __init__(self, layout: Layout) -> None:
        if not layout.may_repeat:
            self.start, self.size, self.region = layout.start, layout.size, np.arange(len(layout.owner))
            self.boxes, self.replicas = self.region[:, None], np.ones_like(self.region)
            return
        replicas = (
            _replicas_of(np.concatenate([layout.start, layout.size], 1))
            if layout.axes is None
            else (_replicas_on_mesh(*layout.axes))
        )
        firsts, self.boxes, self.replicas, self.region = replicas
        self.start, self.size = layout.start[firsts], layout.size[firsts]


def _replicas_of(rows: Array) -> tuple[Array, Array, Array, Array]:
    """Groups of equal rows: the first row of each, all of its rows (padded with -1), their number; each row's group."""
    text, width = rows.tobytes(), rows.shape[1] * 8
    members: dict[bytes, list[int]] = {}
    region = []
    for index in range(len(rows)):
        boxes = members.setdefault(text[index * width : (index + 1) * width], [])
        boxes.append(index)
        region.append(len(members) - 1 if len(boxes) == 1 else int(region[boxes[0]]))
    most = max(map(len, members.values()), default=0)
    firsts = np.array([boxes[0] for boxes in members.values()], np.int64)
    padded = [boxes + [-1] * (most - len(boxes)) for boxes in members.values()]
    counts = np.array([len(boxes) for boxes in members.values()], np.int64)
    return firsts, np.array(padded, np.int64).reshape(len(members), most), counts, np.array(region, np.int64)


@lru_cache(maxsize=256)
def _replicas_on_mesh(mesh: Ints, axes: Ints) -> tuple[Array, Array, Array, Array]:
    """The same of ranks on a mesh whose sharding axes are given: boxes that are not empty differ where those do."""
    coordinates = np.indices(mesh, np.int64).reshape(len(mesh), math.prod(mesh))
    return _replicas_of(np.ascontiguousarray(coordinates[list(axes)].T))


@lru_cache(maxsize=256)
def _places(ranks: Ints) -> dict[int, int]:
    return {rank: place for place, rank in enumerate(ranks)}


@lru_cache(maxsize=4096)
def _on_mesh(shape: Ints, mesh: Ints, ranks: Ints, placements: tuple[Placement, ...]) -> Layout:
    if len(placements) != len(mesh):
        raise ShapeError(f"Layout: {len(placements)} placements for a mesh of {len(mesh)} axes, {list(mesh)}")
    count, dims = len(ranks), len(shape)
    start, size = np.zeros((count, dims), np.int64), np.empty((count, dims), np.int64)
    size[:] = shape
    coordinates = np.indices(mesh, np.int64).reshape(len(mesh), count)
    for axis in _order(shape, mesh, placements):
        placement = placements[axis]
        assert placement is not None
        dim, length = placement[0], size[:, placement[0]]
        run = -(-length // mesh[axis])
        first = np.minimum(coordinates[axis] * run, length)
        start[:, dim] += first
        size[:, dim] = np.minimum(first + run, length) - first
    layout = Layout(shape, ranks, np.arange(count), start, size, np.zeros_like(start), size)
    layout.may_repeat = any(each is None and size > 1 for each, size in zip(placements, mesh, strict=True))
    layout.problem = ""  # a tiling by construction, which takes longer to check than to make
    split = {each[0] for each, size in zip(placements, mesh, strict=True) if each is not None and size > 1}
    layout.sharded = tuple(dim in split for dim in range(dims))
    if len(layout.owner) == count:
        layout.axes = mesh, tuple(axis for axis, placement in enumerate(placements) if placement is not None)
    return layout


def _order(shape: Ints, mesh: Ints, placements: tuple[Placement, ...]) -> list[int]:
    """The sharding axes in the order in which they split: left to right, a strided one after those right of it."""
    order: list[int] = []
    for axis, placement in reversed(list(enumerate(placements))):
        if placement is None:
            continue
        dim, factor = placement
        after = [other for other in order if placements[other][0] == dim]  # type: ignore[index]
        if factor == 1:
            order.insert(0, axis)
            continue
        split = math.prod(mesh[other] for other in after)
        if factor != split or shape[dim] % (split * mesh[axis]):
            raise UnsupportedError(
                f"Layout: a strided shard of dim {dim} with split factor {factor} on axis {axis} of a mesh "
                f"{list(mesh)} and a tensor {list(shape)}; supported is one that divides evenly and whose factor is "
                f"the number of shards by the axes after it, {split} here, as FSDP2 over tensor parallelism has it"
            )
        order.append(axis)
    return order


def _concatenated(
    shape: Ints, rank: int, boxes: Sequence[tuple[Sequence[int], Sequence[int]]]
) -> tuple[list[Ints], Ints]:
    """Positions of a rank's boxes in its local tensor, and that tensor's shape."""
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


def _text(start: Array, size: Array) -> str:
    ranges = (f"{first}:{first + extent}" for first, extent in zip(start.tolist(), size.tolist(), strict=True))
    return f"[{', '.join(ranges)}]"
