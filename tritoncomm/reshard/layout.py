"""Layouts: the boxes of a tensor's index space that every rank owns, and their places in its local tensor."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import numpy as np

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from tritoncomm.reshard.boxes import KINDS, Array, Boxes, bounds_of, in_rows, replicas_of, rows_shape, runs_of

__all__ = ["Layout", "Regions"]

_Placement = tuple[int, int] | None
"""One mesh axis: (dim, split factor) shards, None replicates; a split factor above 1 is torch's ``_StridedShard``."""
_MOST_ELEMENTS = 2**62


class Regions(NamedTuple):
    """The distinct boxes of a layout; equal boxes of several ranks are one region.

    Attributes:
        start, size: first index and extent of every region, ``[regions, dims]``.
        boxes: the equal boxes of every region, ``[regions, most]``, padded with -1.
        replicas: number of equal boxes of every region.
    """

    start: Array
    size: Array
    boxes: Array
    replicas: Array


class Layout:
    """The boxes of an index space that every rank of an ordered set owns.

    Equal boxes on several ranks are replicas. A rank may own several boxes; its local tensor has each of them at a
    position of its own. Layouts compare and hash by their content, which is equal on every rank that builds them.

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
        self.shape, self.ranks = tuple(shape), tuple(ranks)
        self.step: Ints = (1,) * len(self.shape) if step is None else tuple(step)
        filled = size.all(1)  # empty boxes would be replicas of each other
        if not filled.all():
            owner, start, size, at = owner[filled], start[filled], size[filled], at[filled]
        self.owner, self.start, self.size, self.at, self._local = owner, start, size, at, local
        self.elements, self._problem = math.prod(self.shape), "" if is_tiling else None
        self._check()
        # Digests are compared instead of arrays, which have an entry per box: every call looks its layouts up.
        state = hashlib.blake2b(repr((self.shape, self.ranks, self.step)).encode(), digest_size=16)
        for array in (owner, start, size, at, local):
            state.update(array.tobytes())  # in C order, whatever the strides
        self.digest = state.digest()

    def _check(self) -> None:
        """Check the steps, the ranks and the boxes of a new layout.

        Raises:
            ShapeError: a box is not inside the tensor or its rank's local tensor.
            ArgumentError: a rank is listed twice, or a step is below 1.
        """
        if len(self.step) != len(self.shape) or min(self.step, default=1) < 1:
            raise ArgumentError(f"Layout: the steps of {list(self.shape)} must be 1 or more, not {list(self.step)}")
        if len(set(self.ranks)) != len(self.ranks):
            raise ArgumentError(f"Layout: a rank is listed twice in {list(self.ranks)}")
        reach = (self.size - 1) * np.array(self.step, np.int64) + 1
        if ((self.start < 0) | (self.size < 0) | (self.start + reach > np.array(self.shape, np.int64))).any():
            raise ShapeError(f"Layout: a box is not inside the tensor {list(self.shape)}")
        if ((self.at < 0) | (self.at + self.size > self._local[self.owner])).any():
            raise ShapeError(f"Layout: a box of the tensor {list(self.shape)} is not inside its rank's local tensor")

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
            raise ArgumentError(f"Layout: a mesh must be global ranks, as deep as it has axes, not {axes!r:.80}")
        shape, ranks = _checked_shape(shape), tuple(grid.flatten().tolist())
        if not isinstance(placements, list | tuple):
            raise ArgumentError(f"Layout: placements must be a sequence, one per mesh axis, not {placements!r:.80}")
        return _on_mesh(shape, grid.shape, ranks, tuple([_checked_placement(each, shape) for each in placements]))

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

    def local_shape(self, rank: int) -> Ints | None:
        """Return the shape of a global rank's local tensor; None if the rank has no part of the layout."""
        return tuple(self._local[self.ranks.index(rank)].tolist()) if rank in self.ranks else None

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
    def is_single(self) -> bool:
        """Whether every rank of the layout owns at most one box."""
        return bool((np.bincount(self.owner) <= 1).all())

    @cached_property
    def sharded(self) -> tuple[bool, ...]:
        """For every dim of the global tensor, whether a box of the layout has less than the dim's full extent."""
        return tuple((self.size != np.array(self.shape, np.int64)).any(0).tolist())

    @cached_property
    def regions(self) -> Regions:
        """The distinct boxes of a layout: start and extent, the indices of all equal boxes, and their number."""
        firsts, boxes, replicas = replicas_of(np.concatenate([self.start, self.size], 1))
        return Regions(self.start[firsts], self.size[firsts], boxes, replicas)

    @property
    def problem(self) -> str:
        """The reason why the layout is no tiling of its tensor, in words; empty if it is one.

        A tiling covers every element, and two of its boxes are either equal or disjoint.
        """
        if self._problem is None:
            self._problem = self._find_problem()
        return self._problem

    def _find_problem(self) -> str:
        """Compare all pairs of regions; return the first overlap, or the number of uncovered elements, in words."""
        if any(step > 1 for step in self.step):
            return self.in_rows(self.step).problem
        start, size, boxes, _ = self.regions
        if len(start) > 1:
            low = np.maximum(start[:, None], start[None])
            high = np.minimum((start + size)[:, None], (start + size)[None])
            overlaps = np.triu((high > low).all(2), 1)
            if overlaps.any():
                first, other = (
                    f"{_text(start[i], size[i])} of rank {self.ranks[int(self.owner[boxes[i, 0]])]}"
                    for i in np.argwhere(overlaps)[0].tolist()
                )
                return f"the boxes {first} and {other} overlap in part"
        missing = self.elements - int(size.prod(1).sum())
        return f"it does not cover {missing} of the {self.elements} elements" if missing else ""

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
    """A layout whose strided boxes are dense boxes of the view in which each dim is rows of its period.

    Args:
        layout: the layout with steps.
        periods: period of every dim, a multiple of the dim's step.
    """

    def __init__(self, layout: Layout, periods: Ints) -> None:
        self._layout, self._periods = layout, periods
        boxes = in_rows(Boxes(layout.owner, layout.start, layout.size, layout.at), layout.step, periods)
        super().__init__(
            rows_shape(layout.shape, periods), layout.ranks, *boxes, layout._local, is_tiling=layout._problem == ""
        )
        self.elements = layout.elements  # the last row of the view may reach past the end of a dim

    def _check(self) -> None:
        """Check nothing: the original layout was checked, and positions in the view exceed the local shapes."""

    def strides_of(self, strides: Ints) -> Ints:
        """Return strides of a local tensor for rows and columns, from its strides for the original dims.

        Strides of another number of dims are returned as they are: of the empty tensor of a rank without a part.
        """
        if len(strides) != len(self._periods):
            return strides
        along = zip(strides, self._periods, self._layout.step, strict=True)
        pairs = ([stride] if period == 1 else [stride * (period // step), stride] for stride, period, step in along)
        return tuple(stride for pair in pairs for stride in pair)


@lru_cache(maxsize=4096)  # a state dict asks for the layouts of all of its tensors in every call
def _on_mesh(shape: Ints, mesh: Ints, ranks: Ints, placements: tuple[_Placement, ...]) -> Layout:
    """Build the layout of shards and replicas over a device mesh from checked arguments; cached.

    Args:
        shape: shape of the global tensor.
        mesh: size of every mesh axis.
        ranks: global ranks of the mesh, the last axis fastest.
        placements: for every axis the sharded dim and the split factor, or None for a replica.

    Raises:
        ShapeError: not one placement per axis.
        UnsupportedError: a strided shard other than FSDP2 over tensor parallelism.
    """
    if len(placements) != len(mesh):
        raise ShapeError(f"Layout: {len(placements)} placements for a mesh of {len(mesh)} axes, {list(mesh)}")
    count, dims = len(ranks), len(shape)
    start, size = np.zeros((count, dims), np.int64), np.empty((count, dims), np.int64)
    size[:] = shape
    coordinates = np.indices(mesh, np.int64).reshape(len(mesh), count)
    # Every axis divides what the axes before it left of the dim, so that uneven sizes come out as DTensor's.
    for axis in _splitting_order(shape, mesh, placements):
        placement = placements[axis]
        assert placement is not None
        dim, length = placement[0], size[:, placement[0]]
        run = -(-length // mesh[axis])
        first = np.minimum(coordinates[axis] * run, length)
        start[:, dim] += first
        size[:, dim] = np.minimum(first + run, length) - first
    at = np.zeros_like(start)
    # Shards of a mesh tile by construction; to check it takes longer than to construct them.
    return Layout(shape, ranks, np.arange(count), start, size, at, size, is_tiling=True)


def _splitting_order(shape: Ints, mesh: Ints, placements: tuple[_Placement, ...]) -> list[int]:
    """Return the sharding axes of a mesh in the order in which they split a tensor.

    Axes split from left to right, but an axis with a strided shard splits after the axes of the same dim right of it.

    Args:
        shape: shape of the global tensor.
        mesh: size of every mesh axis.
        placements: for every axis the sharded dim and the split factor, or None for a replica.

    Raises:
        UnsupportedError: a strided shard that does not divide evenly, or whose factor is not the number of shards by
            the axes after it.
    """
    order: list[int] = []
    # From right to left: a strided shard has to know how many shards the axes right of it make.
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
    """Build the layout of a sequence-sharded tensor from checked arguments; cached.

    Args:
        shape: shape of the global tensor.
        dim: the sequence dim.
        kind: contiguous, zigzag, striped or full; see ``Layout.sequence``.
        ranks: global ranks in the order of the context-parallel group.
        bounds: boundaries of the packed sequences.

    Raises:
        ShapeError: a zigzag sequence that is no multiple of twice the number of ranks.
    """
    if kind == "full":
        return Layout.replicated(shape, ranks)
    runs = runs_of(kind, bounds, len(ranks), "Layout.sequence")
    start, at = np.zeros((2, len(runs.owner), len(shape)), np.int64)
    size, local = (np.tile(np.array(shape, np.int64), (len(rows), 1)) for rows in (runs.owner, runs.local))
    start[:, dim], size[:, dim], at[:, dim], local[:, dim] = runs[1:5]
    step = tuple(runs.step if place == dim else 1 for place in range(len(shape)))
    return Layout(shape, ranks, runs.owner, start, size, at, local, step, is_tiling=True)


def _checked_shape(shape: Any) -> Ints:
    """Check the shape of a global tensor and return it as ints.

    Raises:
        ArgumentError: the shape is no sequence of ints.
        ShapeError: a size is negative, or the tensor has more elements than an index array can count.
    """
    sizes = checked_ints(shape, "Layout: a shape")
    if min(sizes, default=0) < 0 or math.prod(sizes) > _MOST_ELEMENTS:
        raise ShapeError(f"Layout: there is no tensor of shape {list(sizes)}")
    return sizes


def _checked_dim(dim: Any, shape: Ints, name: str) -> int:
    """Check a dim of a tensor and return it counted from the front.

    Args:
        dim: the dim, maybe negative.
        shape: shape of the tensor.
        name: the calling function, for errors.

    Raises:
        ArgumentError: the dim is no int.
        ShapeError: the tensor has no such dim.
    """
    (place,) = checked_ints((dim,), f"{name}: the dim")
    if not -len(shape) <= place < len(shape):
        raise ShapeError(f"{name}: a tensor {list(shape)} has no dim {place}")
    return place % len(shape)


def _checked_placement(placement: Any, shape: Ints) -> _Placement:
    """Check the placement of one mesh axis; return the dim that it shards and its split factor, or None for a replica.

    Args:
        placement: a placement of torch's, a dim, or None.
        shape: shape of the global tensor.

    Raises:
        ArgumentError: ``placement`` is of another kind.
        ShapeError: the tensor has no such dim.
        UnsupportedError: a partial placement, or one that neither shards nor replicates.
    """
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
    """Check a mapping from global ranks to lists of boxes (start, extent), and return it with tuples of ints.

    Raises:
        ArgumentError: ``boxes`` is no such mapping.
    """
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
    """Concatenate the boxes of one rank in its local tensor.

    The boxes are concatenated along the dim in which their extents differ, else along the first dim in which their
    starts do.

    Args:
        shape: shape of the global tensor.
        rank: the global rank, for errors.
        boxes: start and extent of every box.

    Returns:
        The position of every box in the local tensor, and the local tensor's shape.

    Raises:
        ShapeError: extents differ in several dims, or a 0-dim tensor has several boxes.
    """
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
    along = (*longer, *apart, 0)[0]
    positions, total = [], 0
    for _, size in boxes:
        positions.append(tuple(total if dim == along else 0 for dim in range(len(shape))))
        total += size[along] if shape else 0
    return positions, tuple(total if dim == along else size for dim, size in enumerate(extent))


def _text(start: Array, size: Array, step: Ints = ()) -> str:
    """Return a box as text, a slice per dim: ``[0:4, 1:8:3]``.

    Args:
        start, size: first index and extent of the box.
        step: step of every dim; 1 by default.
    """
    ranges = [
        f"{first}:{first + (count - 1) * each + 1}" + f":{each}" * (each > 1)
        for first, count, each in zip(start.tolist(), size.tolist(), step or (1,) * len(start), strict=True)
    ]
    return f"[{', '.join(ranges)}]"
