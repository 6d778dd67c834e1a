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
from tritoncomm.reshard.boxes import runs_of
from tritoncomm.reshard.layout_arguments import (
    Placement,
    boxes_of,
    concatenated,
    grid_of,
    listed,
    normalize_placements,
    sequence_of,
    shape_of,
)
from tritoncomm.reshard.replicas import replicas_of, replicas_on_mesh
from tritoncomm.reshard.rows import Boxes, in_rows, row_steps, rows_shape

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
        step: of every dim, from one index of a box to the next in the tensor; 1 by default. ``size`` counts indices.
        is_tiling: the boxes are known to tile the tensor, so that ``problem`` does not check it.
        may_repeat: whether a region may have replicas.
        sharded: of every dim, whether a box may have less than its full extent; all by default.
        axes: a mesh and its sharding axes, where no box is empty.

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
        step: Sequence[int] | None = None,
        *,
        is_tiling: bool = False,
        may_repeat: bool = True,
        sharded: tuple[bool, ...] | None = None,
        axes: tuple[Ints, Ints] | None = None,
    ) -> None:
        self.shape, self.ranks = tuple(shape), tuple(ranks)
        self.step: Ints = (1,) * len(self.shape) if step is None else tuple(step)
        if len(self.step) != len(self.shape) or min(self.step, default=1) < 1:
            raise ArgumentError(f"Layout: the steps of {list(self.shape)} must be 1 or more, not {list(self.step)}")
        if len(set(self.ranks)) != len(self.ranks):
            raise ArgumentError(f"Layout: a rank is listed twice in {list(self.ranks)}")
        kept = size.all(1)
        if not kept.all():
            owner, start, size, at = owner[kept], start[kept], size[kept], at[kept]
        self.owner, self.start, self.size, self.at, self._local = owner, start, size, at, local
        self.sharded = (True,) * len(self.shape) if sharded is None else sharded
        self.may_repeat, self.axes, self.elements = may_repeat, axes, math.prod(self.shape)
        self._problem = "" if is_tiling else None
        limit = np.array(self.shape, np.int64)
        reach = size if step is None else (size - 1) * np.array(self.step, np.int64) + 1
        if ((start < 0) | (size < 0) | (start + reach > limit)).any():
            raise ShapeError(f"Layout: a box is not inside the tensor {list(self.shape)}")
        if ((at < 0) | (at + size > local[owner])).any():
            raise ShapeError(f"Layout: a box of the tensor {list(self.shape)} is not inside its rank's local tensor")
        state = hashlib.blake2b(repr((self.shape, self.ranks, self.step)).encode(), digest_size=16)
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
            positions, local = concatenated(shape, rank, mine)
            owner += [index] * len(mine)
            start += [box[0] for box in mine]
            size += [box[1] for box in mine]
            at += positions
            shapes.append(local)
        start, size, at, local = (np.array(x, np.int64).reshape(len(x), len(shape)) for x in (start, size, at, shapes))
        return Layout(shape, list(boxes), np.array(owner, np.int64), start, size, at, local)

    @staticmethod
    def sequence(shape: Sequence[int], dim: int, kind: str, ranks: Sequence[int], cu_seqlens: Any = None) -> "Layout":
        """A sequence over the ranks of context or sequence parallelism; the other dims are not sharded.

        With ``S`` tokens and ``n`` ranks, rank ``r`` of ``ranks`` has, in this order:

        - ``contiguous``: tokens ``r*run`` to ``(r + 1)*run``, ``run = ceil(S / n)``, as ``torch.chunk``;
        - ``zigzag``: chunks ``r`` and ``2n - 1 - r`` of ``2n`` chunks, the load balance of causal ring attention;
        - ``striped``: tokens ``r, r + n, r + 2n, ...``;
        - ``full``: all of them.

        Of packed sequences each is divided by itself, and a rank has its part of each, one after the other, as
        TransformerEngine's THD format has them. A sequence without tokens has no part anywhere.

        Args:
            shape: of the global tensor.
            dim: of the sequence.
            kind: one of the above.
            ranks: global ranks, in the order of the context-parallel group.
            cu_seqlens: where packed sequences begin and end, ``0, ..., S``: ints or a tensor; None for one sequence.

        Raises:
            ShapeError: no such dim, boundaries that do not go from 0 to ``S``, or a zigzag sequence that is no multiple
                of ``2n`` tokens.
            ArgumentError: what is no shape, dim, kind, rank or boundary.
        """
        return _sequence(*sequence_of(shape, dim, kind, ranks, cu_seqlens))

    def local_shape(self, rank: int) -> Ints | None:
        """Shape of a rank's local tensor; None if the layout has none there."""
        place = _places(self.ranks).get(rank)
        return None if place is None else tuple(self._local[place].tolist())

    def in_rows(self, periods: Ints) -> "Layout":
        """The layout with strided boxes as dense ones: dims with a period above 1 are viewed as rows, see ``rows``.

        Args:
            periods: of every dim, multiples of the steps. Local shapes stay; positions are in dims of ``strides_of``.
        """
        return _RowLayout(self, periods)

    def strides_of(self, strides: Ints) -> Ints:
        """Strides of a local tensor for the dims in which boxes are positioned."""
        return strides

    @cached_property
    def is_single(self) -> bool:
        """Whether every rank has one box at most."""
        return bool((np.bincount(self.owner) <= 1).all())

    @cached_property
    def distinct(self) -> "Distinct":
        """The regions without their replicas, and which ranks have each."""
        return Distinct(self)

    @property
    def problem(self) -> str:
        """Why this is no tiling of the tensor (replicas apart), in words; empty if it is one.

        A tiling covers every element, and its regions are either equal or disjoint.
        """
        if self._problem is None:
            self._problem = self._find_problem()
        return self._problem

    def _find_problem(self) -> str:
        if any(step > 1 for step in self.step):
            return self.in_rows(self.step).problem
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
        missing = self.elements - volume
        return f"it does not cover {missing} of the {self.elements} elements" if missing else ""

    def _holder(self, region: int) -> int:
        return self.ranks[int(self.owner[self.distinct.boxes[region, 0]])]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def __repr__(self) -> str:
        boxes = [
            f"{_text(start, size, self.step)} on rank {self.ranks[owner]}"
            for owner, start, size in zip(self.owner[:3].tolist(), self.start, self.size, strict=False)
        ]
        more = [f"... of {len(self.owner)} boxes"] if len(self.owner) > 3 else []
        return f"Layout({list(self.shape)} over {len(self.ranks)} ranks: {', '.join(boxes + more)})"


class _RowLayout(Layout):
    """A layout in the index space of ``rows_shape``, in which its boxes have no steps.

    Its boxes are within the tensor and its ranks' local tensors because those of ``layout`` are.
    """

    def __init__(self, layout: Layout, periods: Ints) -> None:  # pyright: ignore[reportMissingSuperCall]
        boxes = Boxes(layout.owner, layout.start, layout.size, layout.at)
        self.owner, self.start, self.size, self.at = in_rows(boxes, layout.step, periods)
        self.shape, self.ranks, self._local = rows_shape(layout.shape, periods), layout.ranks, layout._local
        self.step, self.elements = (1,) * len(self.shape), layout.elements
        is_sharded = zip(layout.sharded, layout.shape, periods, strict=True)
        self.sharded = tuple(a or n % period > 0 for a, n, period in is_sharded for _ in range(1 + (period > 1)))
        self.may_repeat, self.axes, self._problem = layout.may_repeat, None, layout._problem
        self.digest = hashlib.blake2b(layout.digest + repr(periods).encode(), digest_size=16).digest()
        self._periods, self._steps = periods, layout.step

    def strides_of(self, strides: Ints) -> Ints:
        """Strides of a local tensor for rows and columns; an empty tensor of a rank without a part keeps its own."""
        if len(strides) != len(self._periods):
            return strides
        along = zip(strides, self._periods, row_steps(self._steps, self._periods), strict=True)
        return tuple(
            n for stride, period, rows in along for n in ([stride] if period == 1 else [stride * rows, stride])
        )


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
            replicas_of(np.concatenate([layout.start, layout.size], 1))
            if layout.axes is None
            else (replicas_on_mesh(*layout.axes))
        )
        firsts, self.boxes, self.replicas, self.region = replicas
        self.start, self.size = layout.start[firsts], layout.size[firsts]


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
    split = {each[0] for each, length in zip(placements, mesh, strict=True) if each is not None and length > 1}
    sharding = tuple(axis for axis, placement in enumerate(placements) if placement is not None)
    return Layout(
        shape, ranks, np.arange(count), start, size, np.zeros_like(start), size,
        is_tiling=True,  # by construction; a check takes longer than the construction
        may_repeat=any(each is None and length > 1 for each, length in zip(placements, mesh, strict=True)),
        sharded=tuple(dim in split for dim in range(dims)),
        axes=(mesh, sharding) if size.all() else None,
    )  # fmt: skip


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


@lru_cache(maxsize=64)  # boundaries of packed sequences change from step to step
def _sequence(shape: Ints, dim: int, kind: str, ranks: Ints, bounds: Ints) -> Layout:
    if kind == "full":
        return Layout.replicated(shape, ranks)
    runs = runs_of(kind, bounds, len(ranks), "Layout.sequence")
    start, at = np.zeros((2, len(runs.owner), len(shape)), np.int64)
    size, local = (np.tile(np.array(shape, np.int64), (len(each), 1)) for each in (runs.owner, runs.local))
    start[:, dim], size[:, dim], at[:, dim], local[:, dim] = runs[1:5]
    step = tuple(runs.step if each == dim else 1 for each in range(len(shape)))
    sharded = tuple(each == dim for each in range(len(shape)))
    return Layout(
        shape, ranks, runs.owner, start, size, at, local, step, is_tiling=True, may_repeat=False, sharded=sharded
    )


def _text(start: Array, size: Array, step: Ints = ()) -> str:
    steps = step or (1,) * len(start)
    ranges = [
        f"{first}:{first + (count - 1) * each + 1}" + f":{each}" * (each > 1)
        for first, count, each in zip(start.tolist(), size.tolist(), steps, strict=True)
    ]
    return f"[{', '.join(ranges)}]"
