"""Layouts: the boxes of a tensor's index space that every rank owns, and their places in its local tensor."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from tritoncomm.reshard.boxes import (
    KINDS,
    Array,
    Boxes,
    bounds_of,
    distinct_rows,
    in_rows,
    range_boxes,
    rows_shape,
    runs_of,
)
from tritoncomm.reshard.holders import Holders, Members, members_of, on_axes
from tritoncomm.reshard.intersections import BoxIndex

__all__ = ["FlatLayout", "Layout", "checked_pairs"]

_Placement = tuple[int, int] | None
"""One mesh axis: (dim, split factor) shards, None replicates; a split factor above 1 is torch's ``_StridedShard``."""
_MOST_ELEMENTS = 2**62


class Layout:
    """The boxes of an index space that every rank of an ordered set owns.

    Equal boxes on several ranks are replicas of one region. A rank may own several boxes; its local tensor has each of
    them at a position of its own. Layouts compare and hash by their content, which is equal on every rank that builds
    them.

    Args:
        shape: shape of the global tensor.
        ranks: global ranks.
        owner: index into ``ranks`` of every box.
        start: first index of every box, ``[boxes, dims]``.
        size: extent of every box, ``[boxes, dims]``.
        at: position of every box in its rank's local tensor, ``[boxes, dims]``.
        local: shape of every rank's local tensor, ``[ranks, dims]``.
        step: of every dim, the distance of two indices of a box in the tensor; 1 by default. ``size`` counts indices.
        is_tiling: the caller vouches that the boxes tile the tensor, so that ``problem`` does not check it.

    Attributes:
        shape, step: the arguments.
        elements: number of elements of the global tensor.
        holders: the ranks and their boxes, each of which is a region.
        start, size: first index and extent of every region in lexicographic order, ``[regions, dims]``; none is empty.

    Raises:
        ShapeError: a box is not inside the tensor or its local tensor.
        ArgumentError: a rank is listed twice, or a step is below 1.
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
    ) -> None:
        # The place of each box's owner in ``ranks``, ``[boxes]``; its first index, its extent and its first index in
        # the owner's local tensor, ``[boxes, dims]``. The shapes of the local tensors, ``[ranks, dims]``.
        shape = tuple(shape)
        filled = np.nonzero(size.all(1))[0]  # empty boxes would be replicas of each other
        chosen = filled[np.argsort(owner[filled], kind="stable")]
        boxes = Boxes(owner[chosen], start[chosen], size[chosen], at[chosen])
        step = (1,) * len(shape) if step is None else tuple(step)
        self._check(shape, step, boxes, local)
        first, region = distinct_rows(np.concatenate([boxes.start, boxes.size], 1))
        # Equal ranks are one object for all layouts: ``members_of`` caches it by the bytes of their numbers.
        holders = Holders(members_of(np.array(ranks, np.int64).tobytes()), boxes.owner, region)
        # Where each rank has one box that is its local tensor, as on a mesh, there are no positions to know.
        places = boxes.at, local
        if holders.is_simple and not boxes.at.any() and np.array_equal(local, boxes.size):
            places = None
        self._set(shape, step, holders, boxes.start[first], boxes.size[first], places, is_tiling)

    @classmethod
    def _of_regions(cls, shape: Ints, holders: Holders, start: Array, size: Array) -> "Layout":
        """Build the layout of regions, in lexicographic order, that tile a tensor, and of which every rank has one."""
        self = cls.__new__(cls)
        self._set(shape, (1,) * len(shape), holders, start, size, places=None, is_tiling=True)
        return self

    def _set(
        self, shape: Ints, step: Ints, holders: Holders, start: Array, size: Array,
        places: tuple[Array, Array] | None, is_tiling: bool,
    ) -> None:  # fmt: skip
        """Set the attributes. ``places``: position of every box, and shape of every rank's local tensor."""
        self.shape, self.step, self.holders = shape, step, holders
        self.start, self.size, self._places = start, size, places
        self.elements = math.prod(shape)
        self._problem = "" if is_tiling else None  # "": there is none; None: nobody has looked
        # Digests are compared instead of arrays, which have an entry per box: every call looks its layouts up.
        state = hashlib.blake2b(repr((shape, step)).encode() + holders.digest, digest_size=16)
        for array in (start, size, *(places or ())):
            state.update(array.tobytes())  # in C order, whatever the strides
        self.digest = state.digest()

    @staticmethod
    def _check(shape: Ints, step: Ints, boxes: Boxes, local: Array) -> None:
        """Check that the steps are 1 or more, and the boxes inside the tensor and the local tensors."""
        if len(step) != len(shape) or min(step, default=1) < 1:
            raise ArgumentError(f"Layout: the steps of {list(shape)} must be 1 or more, not {list(step)}")
        reach = (boxes.size - 1) * np.array(step, np.int64) + 1
        if ((boxes.start < 0) | (boxes.size < 0) | (boxes.start + reach > np.array(shape, np.int64))).any():
            raise ShapeError(f"Layout: a box is not inside the tensor {list(shape)}")
        if ((boxes.at < 0) | (boxes.at + boxes.size > local[boxes.owner])).any():
            raise ShapeError(f"Layout: a box of the tensor {list(shape)} is not inside its rank's local tensor")

    @staticmethod
    def on_mesh(shape: Sequence[int], mesh: Any, placements: Sequence[Any]) -> "Layout":
        """Build the layout of shards and replicas over a device mesh of any number of axes, as DTensor has it.

        Each axis in turn shards what the axes before it left, by chunks of ``ceil(size / ranks)``.

        Args:
            shape: shape of the global tensor.
            mesh: a torch ``DeviceMesh``, or global ranks as a nested list or array, one level per axis.
            placements: for every axis a placement of torch's, or the dim that it shards, or None for a replica.

        Raises:
            ShapeError: no such dim, or not one placement per axis.
            ArgumentError: ``shape``, ``mesh`` or ``placements`` is of another kind.
            UnsupportedError: a partial placement, or a strided shard other than FSDP2 over tensor parallelism.
        """
        axes = getattr(mesh, "mesh", mesh)
        try:
            grid = np.asarray(axes)
        except (TypeError, ValueError, RuntimeError):
            grid = np.asarray(None)  # a 0-dim array, which the next line rejects
        if not grid.ndim or not grid.size or grid.dtype.kind not in "iu":
            raise ArgumentError(f"Layout: a mesh must be global ranks, nested once for each axis, not {axes!r:.80}")
        shape = _checked_shape(shape)
        members = members_of(grid.astype(np.int64).tobytes())  # as bytes, because it is cached by its argument
        if not isinstance(placements, list | tuple):
            raise ArgumentError(f"Layout: placements must be a sequence, one per mesh axis, not {placements!r:.80}")
        return _on_mesh(shape, grid.shape, members, tuple([_checked_placement(each, shape) for each in placements]))

    @staticmethod
    def of_dtensor(tensor: Any) -> "Layout":
        """Build the layout of a DTensor from its mesh and placements."""
        return Layout.on_mesh(tensor.shape, tensor.device_mesh, tensor.placements)

    @staticmethod
    def replicated(shape: Sequence[int], ranks: Sequence[int]) -> "Layout":
        """Build the layout of a tensor that each of ``ranks`` has in full; a single rank is its owner."""
        return Layout.on_mesh(shape, checked_ints(ranks, "Layout.replicated: ranks"), [None])

    @staticmethod
    def split(shape: Sequence[int], dim: int, sizes: Mapping[int, int] | Sequence[int]) -> "Layout":
        """Build the layout of uneven shards of one dim, in the order of ``sizes``.

        Args:
            shape: shape of the global tensor.
            dim: the sharded dim.
            sizes: size of the dim on every rank: by global rank, or a sequence for ranks 0, 1, 2 and so on.

        Raises:
            ShapeError: no such dim, or the sizes do not add up to it.
            ArgumentError: ``shape``, ``dim`` or ``sizes`` is of another kind.
        """
        shape = _checked_shape(shape)
        dim = _checked_dim(dim, shape, "Layout.split")
        by_rank = sizes if isinstance(sizes, Mapping) else None
        extents = checked_ints(sizes if by_rank is None else by_rank.values(), "Layout.split: sizes")
        ranks = range(len(extents)) if by_rank is None else checked_ints(by_rank, "Layout.split: ranks")
        if sum(extents) != shape[dim] or min(extents, default=0) < 0:
            raise ShapeError(f"Layout.split: sizes {list(extents)} do not add up to dim {dim} of {list(shape)}")
        boxes: dict[int, list[tuple[Ints, Ints]]] = {}
        first = 0
        for rank, extent in zip(ranks, extents, strict=True):
            start = (*(0,) * dim, first, *(0,) * (len(shape) - dim - 1))
            boxes[rank] = [(start, (*shape[:dim], extent, *shape[dim + 1 :]))]
            first += extent
        return Layout.of_boxes(shape, boxes)

    @staticmethod
    def of_boxes(shape: Sequence[int], boxes: Mapping[int, Sequence[tuple[Sequence[int], Sequence[int]]]]) -> "Layout":
        """Build the layout of any boxes (start, extent) by global rank.

        Several boxes of a rank are concatenated in its local tensor: along the dim in which their extents differ, else
        along the first one in which their starts do.

        Args:
            shape: shape of the global tensor.
            boxes: boxes of every rank. A rank without boxes has an empty local tensor; if the tensor has 0 dims, none.

        Raises:
            ShapeError: a box is not inside the tensor, or boxes of a rank cannot be concatenated along one dim.
            ArgumentError: ``shape`` or ``boxes`` is of another kind.
        """
        shape, owner, start, size, at, local = _checked_shape(shape), [], [], [], [], []
        by_rank = {rank: own for rank, own in _checked_boxes(boxes).items() if own or shape}
        for index, (rank, own) in enumerate(by_rank.items()):
            if any({len(box[0]), len(box[1])} != {len(shape)} for box in own):
                raise ShapeError(f"Layout.of_boxes: rank {rank} needs (start, extent) over the dims of {list(shape)}")
            positions, local_shape = _concatenated(shape, rank, own)
            owner += [index] * len(own)
            start += [box[0] for box in own]
            size += [box[1] for box in own]
            at += positions
            local.append(local_shape)
        start, size, at, local = (np.array(x, np.int64).reshape(len(x), len(shape)) for x in (start, size, at, local))
        return Layout(shape, list(by_rank), np.array(owner, np.int64), start, size, at, local)

    @staticmethod
    def flat(shape: Sequence[int], ranges: Mapping[int, Sequence[tuple[int, int]]]) -> "Layout":
        """Build the layout of contiguous ranges of the flattened tensor, as distributed optimizers and ZeRO have them.

        A local tensor has one dim: the ranges of its rank, one after the other. A range is at most ``2 * dims - 1``
        boxes of the tensor.

        Args:
            shape: shape of the global tensor.
            ranges: by global rank, the first element of every range and the first one behind it, in row-major order. A
                rank without ranges has an empty local tensor.

        Raises:
            ShapeError: a range is not inside the tensor.
            ArgumentError: ``shape`` or ``ranges`` is of another kind.
        """
        shape, name = _checked_shape(shape), "Layout.flat: a range"
        try:
            by_rank = [list(own) for own in ranges.values()]
        except (AttributeError, TypeError) as error:
            raise ArgumentError(f"Layout.flat: expected (start, end) of every range by global rank: {error}") from None
        owner = np.repeat(np.arange(len(by_rank)), [len(own) for own in by_rank])
        low, high = checked_pairs([each for own in by_rank for each in own], name)
        return FlatLayout(shape, checked_ints(ranges, "Layout.flat: ranks"), owner, low, high)

    @staticmethod
    def sequence(shape: Sequence[int], dim: int, kind: str, ranks: Sequence[int], cu_seqlens: Any = None) -> "Layout":
        """Build the layout of a sequence over the ranks of context or sequence parallelism; other dims are not sharded.

        With ``S`` tokens and ``n`` ranks, rank ``r`` of ``ranks`` has, in this order:

        - ``contiguous``: tokens ``r*run`` to ``(r + 1)*run``, ``run = ceil(S / n)``, as ``torch.chunk``;
        - ``zigzag``: chunks ``r`` and ``2n - 1 - r`` of ``2n`` chunks, the load balance of causal ring attention;
        - ``striped``: tokens ``r, r + n, r + 2n, ...``;
        - ``full``: all tokens.

        Of packed sequences each is divided by itself, and a rank has its part of each, one after the other, as
        TransformerEngine's THD format has them. A sequence without tokens has no part anywhere.

        Args:
            shape: shape of the global tensor.
            dim: the sequence dim.
            kind: one of the above.
            ranks: global ranks, in the order of the context-parallel group.
            cu_seqlens: boundaries ``0, ..., S`` of packed sequences: ints or a tensor; None for one sequence.

        Raises:
            ShapeError: no such dim, boundaries that do not go from 0 to ``S``, or a zigzag sequence that is no multiple
                of ``2n`` tokens.
            ArgumentError: an argument is of another kind, or there is no such ``kind``.
        """
        name = "Layout.sequence"
        shape = _checked_shape(shape)
        dim = _checked_dim(dim, shape, name)
        if not isinstance(kind, str) or kind not in KINDS:
            raise ArgumentError(f"{name}: the kind must be one of {', '.join(KINDS)}, not {kind!r:.80}")
        members = checked_ints(ranks, f"{name}: ranks")
        if not members:
            raise ArgumentError(f"{name}: there are no ranks to divide the sequence among")
        bounds = (0, shape[dim]) if cu_seqlens is None else bounds_of(cu_seqlens, name)
        if bounds[-1] != shape[dim]:
            raise ShapeError(
                f"{name}: cu_seqlens ends with {bounds[-1]}, but dim {dim} of {list(shape)} has {shape[dim]} tokens"
            )
        return _sequence(shape, dim, kind, members, bounds)

    @property
    def ranks(self) -> Ints:
        """The global ranks of a layout, in its order."""
        return self.holders.members.ranks

    def boxes(self, index: Array | slice = slice(None)) -> Boxes:
        """Return some boxes of a layout, all by default; those of a rank are in the order of its local tensor."""
        owner, region = self.holders.owner[index], self.holders.region[index]
        start, size = self.start[region], self.size[region]
        return Boxes(owner, start, size, np.zeros_like(start) if self._places is None else self._places[0][index])

    def local_shape(self, rank: int) -> Ints | None:
        """Return the shape of a global rank's local tensor; None if the rank has no part of the layout."""
        place = self.holders.members.place_of(rank)
        if place < 0:
            return None
        local = self.size[self.holders.region[place]] if self._places is None else self._places[1][place]
        return tuple(local.tolist())

    @property
    def locals(self) -> Array:
        """Shape of every rank's local tensor, ``[ranks, dims]``."""
        return self.size[self.holders.region] if self._places is None else self._places[1]

    def in_rows(self, periods: Ints) -> "Layout":
        """View each dim as rows of ``period`` columns, and return the layout of that view, in which no box is strided.

        Every strided box becomes a few dense boxes. Local tensors keep their shapes; ``strides_of`` returns their
        strides for the dims of the view.

        Args:
            periods: period of every dim, a multiple of the dim's step; 1 leaves a dim as it is.
        """
        return _RowLayout(self, periods)

    def strides_of(self, strides: Ints) -> Ints:
        """Return the strides of a local tensor, one per dim of the layout's boxes: ``strides`` as they are.

        A layout made by ``in_rows``, whose boxes have other dims than the tensor, converts them.
        """
        return strides

    @cached_property
    def index(self) -> BoxIndex:
        """The index of the regions of a layout without steps."""
        return BoxIndex(self.start, self.size)

    @cached_property
    def intervals(self) -> list[tuple[Array, Array]]:
        """Per dim: start and extent of the regions' distinct intervals, ``[intervals, 2]``; each region's interval."""
        rows = [np.stack(column, 1) for column in zip(self.start.T, self.size.T, strict=True)]
        return [(row[first], group) for row, (first, group) in ((row, distinct_rows(row)) for row in rows)]

    @property
    def problem(self) -> str:
        """The reason why the layout is no tiling of its tensor, in words; empty if it is one.

        A tiling covers every element, and two of its boxes are either equal or disjoint.
        """
        if self._problem is None:
            self._problem = self._find_problem()
        return self._problem

    def _find_problem(self) -> str:
        """Find two regions that overlap, or the number of uncovered elements, and return that in words."""
        if any(step > 1 for step in self.step):
            return self.in_rows(self.step).problem
        met = self.index.meeting(self.start, self.size)
        overlaps = np.nonzero(met.one < met.other)[0]  # each pair once, and no region with itself
        if len(overlaps):
            earliest = overlaps[np.lexsort((met.other[overlaps], met.one[overlaps]))[0]]
            regions = [met.one[earliest], met.other[earliest]]
            boxes = self.holders.order[self.holders.first[regions]]  # the first box of each
            first, other = (
                f"{_text(start, size)} of rank {self.ranks[owner]}"
                for owner, start, size in zip(*self.boxes(boxes)[:3], strict=True)
            )
            return f"the boxes {first} and {other} overlap in part"
        missing = self.elements - int(self.size.prod(1).sum())
        return f"it does not cover {missing} of the {self.elements} elements" if missing else ""

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self.digest == other.digest)

    def __hash__(self) -> int:
        return hash(self.digest)

    def has_part(self, part: "Layout") -> bool:
        """Whether all ranks of ``part``, a layout of this shape, own the same boxes here, at the same places."""
        if (part.shape, part.step) != (self.shape, self.step):
            return False
        own, others = (
            {(layout.ranks[owner], *start, *size, *at) for owner, start, size, at in zip(
                boxes.owner.tolist(), boxes.start.tolist(), boxes.size.tolist(), boxes.at.tolist(), strict=True
            )}
            for layout, boxes in ((self, self.boxes()), (part, part.boxes()))
        )  # fmt: skip
        ranks = set(part.ranks)
        return {box for box in own if box[0] in ranks} == others

    def texts(self, which: slice = slice(None)) -> list[str]:
        """Return boxes in words: ``[0:4, 0:8] on rank 1``."""
        return [
            f"{_text(start, size, self.step)} on rank {self.ranks[owner]}"
            for owner, start, size in zip(*self.boxes(which)[:3], strict=True)
        ]

    def __repr__(self) -> str:
        boxes = self.texts(slice(3))
        more = [f"... of {len(self.holders.owner)} boxes"] if len(self.holders.owner) > 3 else []
        return f"Layout({list(self.shape)} over {len(self.ranks)} ranks: {', '.join(boxes + more)})"


class _RowLayout(Layout):
    """Layout whose strided boxes are dense boxes of the view in which each dim is rows of its period."""

    def __init__(self, layout: Layout, periods: Ints) -> None:
        self._layout, self._periods = layout, periods
        boxes, shape = in_rows(layout.boxes(), layout.step, periods), rows_shape(layout.shape, periods)
        super().__init__(shape, layout.ranks, *boxes, layout.locals, is_tiling=layout._problem == "")
        self.elements = layout.elements  # the last row of the view may reach past the end of a dim

    @staticmethod
    def _check(shape: Ints, step: Ints, boxes: Boxes, local: Array) -> None:
        """Check nothing: the original layout was checked, and positions in the view exceed the local shapes."""

    def strides_of(self, strides: Ints) -> Ints:
        """Return strides of a local tensor for rows and columns, from its strides for the original dims."""
        strides = self._layout.strides_of(strides)
        # The empty tensor of a rank without a part may have any dims.
        if len(strides) != len(self._periods):
            return strides
        along = zip(strides, self._periods, self._layout.step, strict=True)
        pairs = ([stride] if period == 1 else [stride * (period // step), stride] for stride, period, step in along)
        return tuple(stride for pair in pairs for stride in pair)


class FlatLayout(Layout):
    """Layout of ranges of the flattened tensor; see ``Layout.flat``. ``owner`` is every range's place, ascending."""

    def __init__(self, shape: Ints, ranks: Sequence[int], owner: Array, low: Array, high: Array) -> None:
        outside = np.nonzero((low < 0) | (high < low) | (high > math.prod(shape)))[0]
        if len(outside):
            odd, elements = [int(low[outside[0]]), int(high[outside[0]])], math.prod(shape)
            raise ShapeError(f"Layout.flat: a range {odd} is not inside the {elements} elements of {list(shape)}")
        local = np.bincount(owner, high - low, len(ranks)).astype(np.int64)
        # ``place`` is where each range begins in its rank's local tensor: the elements of all ranges before it, without
        # those of the ranks before its own.
        lengths = high - low
        elements_before = np.cumsum(lengths) - lengths
        of_ranks_before = np.cumsum(local) - local
        place = elements_before - of_ranks_before[owner]
        extent = np.repeat(np.array(shape, np.int64)[:, None], len(low), 1)
        index, start, size = range_boxes(extent, low, high)
        # A local tensor is addressed with the strides of the global one. Its range lies ``shift`` elements further on
        # (or before, if negative), which are as many indices of the last dim. A tensor without dims has none.
        self._strides = np.array(contiguous_stride(shape), np.int64)
        shift, at = place - low, start.copy()
        at[-1:] += shift[index]
        # The distinct ranges tile the tensor if the first begins at 0, each begins where the one before it ends, and
        # the last ends with the tensor. Then no box needs to be compared with another.
        ranges = np.stack([low, high], 1)[high > low]
        lows, highs = ranges[distinct_rows(ranges)[0]].T
        begins_and_end, zero_and_ends = np.append(lows, math.prod(shape)), np.insert(highs, 0, 0)
        is_tiling = np.array_equal(begins_and_end, zero_and_ends)
        boxes = owner[index], start.T, size.T, at.T
        super().__init__(shape, ranks, *boxes, local[:, None], is_tiling=is_tiling)

    @staticmethod
    def _check(shape: Ints, step: Ints, boxes: Boxes, local: Array) -> None:
        """Check nothing: ranges are checked, and positions count elements of a local tensor of one dim."""

    def strides_of(self, strides: Ints) -> Ints:
        """Return the strides of the global tensor, times the stride of a local tensor."""
        return tuple((self._strides * strides[0]).tolist()) if len(strides) == 1 else strides


@lru_cache(maxsize=4096)  # a state dict asks for the layouts of all of its tensors in every call
def _on_mesh(shape: Ints, mesh: Ints, members: Members, placements: tuple[_Placement, ...]) -> Layout:
    """Build the layout of shards and replicas over a device mesh from checked arguments; cached.

    Args:
        members: global ranks of the mesh, the last axis fastest.
        placements: for every axis the sharded dim and the split factor, or None for a replica.
    """
    if len(placements) != len(mesh):
        raise ShapeError(f"Layout: {len(placements)} placements for a mesh of {len(mesh)} axes, {list(mesh)}")
    # Every axis divides what the axes before it left of the dim, so that uneven sizes come out as DTensor's.
    by_dim: dict[int, list[int]] = {}
    for axis in _splitting_order(shape, mesh, placements):
        placement = placements[axis]
        assert placement is not None
        by_dim.setdefault(placement[0], []).append(axis)
    sides = [_shards(length, [mesh[axis] for axis in by_dim.get(dim, ())]) for dim, length in enumerate(shape)]
    holders = on_axes(members, mesh, tuple(tuple(by_dim[dim]) for dim in sorted(by_dim)))
    # The regions are the product of the dims' shards, the last dim fastest.
    grid = np.indices([len(first) for first, _ in sides], np.int64).reshape(
        len(shape), math.prod(len(f) for f, _ in sides)
    )
    start, size = np.empty((2, grid.shape[1], len(shape)), np.int64)
    for dim, (first, length) in enumerate(sides):
        start[:, dim], size[:, dim] = first[grid[dim]], length[grid[dim]]
    # Shards of a mesh tile by construction; to check it takes longer than to construct them.
    if size.all():
        return Layout._of_regions(shape, holders, start, size)
    # Some shards are empty. They are no regions of a layout, so it numbers the regions anew from the ranks' boxes.
    start, size = start[holders.region], size[holders.region]
    return Layout(shape, members.ranks, holders.owner, start, size, np.zeros_like(start), size, is_tiling=True)


def _shards(length: int, shards: Sequence[int]) -> tuple[Array, Array]:
    """Divide a dim by several axes, each of which divides the shards of the ones before; return starts and extents."""
    start, size = np.zeros(1, np.int64), np.full(1, length, np.int64)
    for count in shards:
        low = np.minimum(np.arange(count) * -(-size // count)[:, None], size[:, None])
        high = np.minimum(low + -(-size // count)[:, None], size[:, None])
        start, size = (start[:, None] + low).reshape(-1), (high - low).reshape(-1)
    return start, size


def _splitting_order(shape: Ints, mesh: Ints, placements: tuple[_Placement, ...]) -> list[int]:
    """Return the sharding axes of a mesh in the order in which they split a tensor."""
    # Axes split from left to right, but an axis with a strided shard splits after the axes of the same dim right of it.
    order: list[int] = []
    # From right to left: a strided shard has to know how many shards the axes right of it make of its dim.
    for axis, placement in reversed(list(enumerate(placements))):
        if placement is None:
            continue
        dim, factor = placement
        right_of_it = [other for other in order if placements[other][0] == dim]  # type: ignore[index]
        if factor == 1:
            order.insert(0, axis)
            continue
        split = math.prod(mesh[other] for other in right_of_it)
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
    """Build the layout of a sequence-sharded tensor from checked arguments; cached. See ``Layout.sequence``."""
    if kind == "full":
        return Layout.replicated(shape, ranks)
    runs = runs_of(kind, bounds, len(ranks), "Layout.sequence")
    start, at = np.zeros((2, len(runs.owner), len(shape)), np.int64)
    size, local = (np.tile(np.array(shape, np.int64), (len(rows), 1)) for rows in (runs.owner, runs.local))
    start[:, dim], size[:, dim], at[:, dim], local[:, dim] = runs[1:5]
    step = tuple(runs.step if place == dim else 1 for place in range(len(shape)))
    return Layout(shape, ranks, runs.owner, start, size, at, local, step, is_tiling=True)


def checked_pairs(pairs: Sequence[Any], name: str) -> Array:
    """Check pairs of ints and return them as an array ``[2, pairs]``."""
    # There is a pair per rank and tensor: all in one array cost a tenth of one check each, which names the odd one.
    try:
        array = np.array(pairs)
    except (RuntimeError, TypeError, ValueError):
        array = np.empty(0)
    is_plain = array.dtype.kind == "i" and array.shape == (len(pairs), 2)
    if not is_plain or array.min(initial=0) < -_MOST_ELEMENTS or array.max(initial=0) > _MOST_ELEMENTS:
        for each in pairs:
            if len(checked_ints(each, name)) != 2:
                raise ShapeError(f"{name} is of two ints, not {each!r:.80}")
        array = np.array([checked_ints(each, name) for each in pairs], np.int64).reshape(-1, 2)
    return array.astype(np.int64).T


def _checked_shape(shape: Any) -> Ints:
    """Check the shape of a global tensor and return it as ints."""
    sizes = checked_ints(shape, "Layout: a shape")
    if min(sizes, default=0) < 0 or math.prod(sizes) > _MOST_ELEMENTS:
        raise ShapeError(f"Layout: there is no tensor of shape {list(sizes)}")
    return sizes


def _checked_dim(dim: Any, shape: Ints, name: str) -> int:
    """Check a dim of a tensor and return it counted from the front."""
    (place,) = checked_ints((dim,), f"{name}: the dim")
    if not -len(shape) <= place < len(shape):
        raise ShapeError(f"{name}: a tensor {list(shape)} has no dim {place}")
    return place % len(shape)


def _checked_placement(placement: Any, shape: Ints) -> _Placement:
    """Check the placement of one mesh axis; return its sharded dim and split factor, or None for a replica."""
    if not isinstance(placement, int | None) and not hasattr(placement, "is_replicate"):
        raise ArgumentError(f"Layout: {placement!r:.80} is no placement: neither torch's, nor a dim, nor None")
    if placement is None or (not isinstance(placement, int) and placement.is_replicate()):
        return None
    if not isinstance(placement, int) and placement.is_partial():
        raise UnsupportedError(f"Layout: {placement} is partial, and no rank has its values; reduce it first")
    dim = placement if isinstance(placement, int) else getattr(placement, "dim", None)
    if dim is None:
        raise UnsupportedError(f"Layout: {placement!r} is neither a shard nor a replica")
    return _checked_dim(dim, shape, "Layout"), int(getattr(placement, "split_factor", 1))


def _checked_boxes(boxes: Any) -> dict[int, list[tuple[Ints, Ints]]]:
    """Check a mapping from global ranks to lists of boxes (start, extent), and return it with tuples of ints."""
    try:
        by_rank = {
            rank: [
                (checked_ints(start, "Layout.of_boxes: a start"), checked_ints(extent, "Layout.of_boxes: an extent"))
                for start, extent in own
            ]
            for rank, own in boxes.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        if isinstance(error, CommError):
            raise
        expected = "(start, extent) of every box by global rank"
        raise ArgumentError(f"Layout.of_boxes: expected {expected}, not {boxes!r:.80}") from None
    return dict(zip(checked_ints(by_rank, "Layout.of_boxes: ranks"), by_rank.values(), strict=True))


def _concatenated(shape: Ints, rank: int, boxes: Sequence[tuple[Ints, Ints]]) -> tuple[list[Ints], Ints]:
    """Concatenate the boxes of one rank: return their positions in the local tensor, and its shape."""
    if not boxes:
        return [], (0,) * len(shape)
    (first, extent), *more = boxes
    if more and not shape:
        raise ShapeError(f"Layout.of_boxes: rank {rank} has the one element of a 0-dim tensor {len(boxes)} times")
    longer = [dim for dim in range(len(shape)) if any(size[dim] != extent[dim] for _, size in boxes)]
    if len(longer) > 1:
        raise ShapeError(
            f"Layout.of_boxes: the boxes of rank {rank} have different extents in dims {longer}: {list(boxes)}"
        )
    apart = [dim for dim in range(len(shape)) if any(start[dim] != first[dim] for start, _ in boxes)]
    # Along the dim in which their extents differ, else along the first dim in which their starts do.
    along = (*longer, *apart, 0)[0]
    positions, total = [], 0
    for _, size in boxes:
        positions.append(tuple(total if dim == along else 0 for dim in range(len(shape))))
        total += size[along] if shape else 0
    return positions, tuple(total if dim == along else size for dim, size in enumerate(extent))


def _text(start: Array, size: Array, step: Ints = ()) -> str:
    """Return a box as text, a slice per dim: ``[0:4, 1:8:3]``."""
    ranges = [
        f"{first}:{first + (count - 1) * each + 1}" + f":{each}" * (each > 1)
        for first, count, each in zip(start.tolist(), size.tolist(), step or (1,) * len(start), strict=True)
    ]
    return f"[{', '.join(ranges)}]"
