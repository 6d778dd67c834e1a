"""Tables of segments: which rows of which tensors lie where in a flat wire, checked once."""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from operator import attrgetter, le
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritoncomm_kernels.dtypes import wide_type
from tritoncomm_kernels.geometry import Ints, is_contiguous

__all__ = [
    "PADDING", "CheckedSegments", "Copies", "Layouts", "Segment", "Segments", "checked_copies", "checked_segments",
    "in_turns", "layouts_of",
]  # fmt: skip

_dtype_of, _is_meta = attrgetter("dtype"), attrgetter("is_meta")
_LARGEST = 2**62  # of any number here: beyond any memory, and an int64
PADDING = -1  # index of no tensor: bytes of the wire that a gather sets to zero and a scatter leaves out


class Segment(NamedTuple):
    """``rows`` rows of ``row`` contiguous elements of one tensor, and where they are in the wire.

    Attributes:
        tensor: index of the tensor, or ``PADDING``.
        offset: elements from the tensor's data pointer to the first row.
        rows: number of rows.
        row: elements of a row; of padding, bytes.
        stride: elements from one row to the next.
        wire: byte offset of the first row in the wire.
        wire_stride: elements (of padding, bytes) from one row to the next in the wire; 0 where one follows the other.
    """

    tensor: int
    offset: int
    rows: int
    row: int
    stride: int
    wire: int
    wire_stride: int = 0


@dataclass(frozen=True, init=False)
class Segments:
    """``wire[s.wire + (r*step + k)*itemsize] <-> tensors[s.tensor][s.offset + r*s.stride + k]`` for every segment s.

    ``step`` is ``s.wire_stride``, or ``s.row`` where that is 0. Immutable and hashable (the hash is computed once), so
    that plans are cached by it: make it once and keep it.

    Args:
        segments: rows ``(tensor, offset, rows, row, stride, wire[, wire_stride])``, see ``Segment``; empty ones are
            dropped.
        dtypes: of every tensor's elements in the wire. A tensor of the same dtype is copied bit by bit, whatever its
            bits and wherever its bytes are in the wire; one of another dtype is cast, with one rounding.

    Raises:
        ValueError: an index of no tensor, a negative number or one beyond any memory, or segments that overlap in the
            wire.

    Example:
        ``Segments([(0, 0, 2, 3, 8, 0)], [torch.float32])`` has the first 3 columns of 2 rows of 8, in 24 bytes.
    """

    segments: tuple[Segment, ...]
    dtypes: tuple[torch.dtype, ...]
    _first: ClassVar = PADDING  # index of a tensor

    def __init__(self, segments: Iterable[Sequence[int]], dtypes: Iterable[torch.dtype]) -> None:
        rows = [Segment(*(int(n) for n in one)) for one in segments]
        object.__setattr__(self, "dtypes", tuple(dtypes))
        for segment in rows:
            if not self._first <= segment.tensor < len(self.dtypes) or min(segment[1:]) < 0 or max(segment) > _LARGEST:
                raise ValueError(f"segments: {segment} is no segment of {len(self.dtypes)} tensors")
        object.__setattr__(self, "segments", tuple(_canonical(s) for s in rows if s.rows and s.row))
        self._check()

    def _check(self) -> None:
        """Reject segments that overlap in the wire: each of its bytes belongs to one row at most."""
        shared = _overlap([self._in_wire(one) for one in self.segments])
        if shared is not None:
            raise ValueError(f"segments: bytes {shared[0]} to {shared[1]} of the wire belong to two rows")

    def _in_wire(self, segment: Segment) -> tuple[int, int, int, int]:
        """Return a segment's rows in the wire, or of ``Copies`` in the target, as a ``_Block`` in bytes."""
        size = self.itemsize(segment.tensor)
        return segment.wire, segment.rows, segment.row * size, (segment.wire_stride or segment.row) * size

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.segments, self.dtypes)  # without what is cached: hashes differ from process to process

    @cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.dtypes))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First byte in the wire and the one after the last, of every segment."""
        return tuple(
            (s.wire, s.wire + ((s.rows - 1) * (s.wire_stride or s.row) + s.row) * self.itemsize(s.tensor))
            for s in self.segments
        )

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that a wire must have, up to the end of the last segment."""
        return max((end for _, end in self.spans), default=0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the wire that belong to a segment."""
        return sum(s.rows * s.row * self.itemsize(s.tensor) for s in self.segments)

    def itemsize(self, tensor: int) -> int:
        """Bytes of an element in the wire; 1 for padding."""
        return 1 if tensor == PADDING else self.dtypes[tensor].itemsize


class Copies(Segments):
    """Segments of tensors that are copied into as many others: there, instead of in one wire.

    ``wire`` of a segment counts bytes from the data pointer of the target with the index of its tensor, and ``dtypes``
    are the targets'. No padding.

    Raises:
        ValueError: as for ``Segments``; rows that overlap in a target, or start inside of an element.

    Example:
        ``Copies([(0, 0, 2, 3, 8, 4, 9)], [torch.int8])`` copies ``x[:2, :3]`` of ``[2, 8]`` to ``y[:2, 4:7]`` of
        ``[2, 9]``.
    """

    _first: ClassVar = 0

    def _check(self) -> None:
        """Reject rows that overlap in their target, or start inside of an element; the "wire" is the target here."""
        inside = next((one for one in self.segments if one.wire % self.itemsize(one.tensor)), None)
        if inside is not None:
            raise ValueError(f"segments: {inside} starts inside of an element of {self.dtypes[inside.tensor]}")
        for tensor in {one.tensor for one in self.segments}:
            shared = _overlap([self._in_wire(one) for one in self.segments if one.tensor == tensor])
            if shared is not None:
                raise ValueError(f"segments: bytes {shared[0]} to {shared[1]} of target {tensor} belong to two rows")


class Part(NamedTuple):
    """Place in the wire of one segment of a sum; as in ``Segment``."""

    wire: int
    wire_stride: int


class Strided(NamedTuple):
    """Segments with equal rows, equally far apart in a tensor and in the wire: one strided copy.

    Attributes:
        offset: elements from the tensor's data pointer to the first segment.
        size: number of segments, rows of each, elements of a row.
        strides: in the tensor, in elements.
        wire: byte of the wire at which the first segment starts.
        steps: strides in the wire, in elements.
    """

    tensor: int
    offset: int
    size: Ints
    strides: Ints
    wire: int
    steps: Ints


@dataclass(frozen=True)
class CheckedSegments:
    """A table, checked for tensors of certain layouts.

    Attributes:
        targets: the segments; of the segments of a sum the first one.
        parts: all parts of a sum, by its place in ``targets``.
        wides: for every target the type of its arithmetic, None if bits are copied.
        copied: bytes read plus bytes written.
    """

    targets: tuple[Segment, ...]
    parts: dict[int, tuple[Part, ...]]
    wides: tuple[torch.dtype | None, ...]
    copied: int
    segments: Segments

    @cached_property
    def copies(self) -> list[Strided]:
        """Copies of bits, as few as strides allow: of the shards of one tensor, one to each rank, that is one copy."""
        groups: dict[Ints, list[Segment]] = {}
        for segment, wide in zip(self.targets, self.wides, strict=True):
            if wide is None and segment.tensor != PADDING:
                groups.setdefault((segment.tensor, *segment[2:5], segment.wire_stride), []).append(segment)
        return [each for group in groups.values() for each in _strided(group, self.segments.itemsize(group[0].tensor))]


class Layouts(NamedTuple):
    """Properties of the wire and of every tensor on which a plan depends, the wire first.

    Attributes:
        shapes: of all; if all are contiguous, their numbers of elements.
        strides: of all; None if all are contiguous.
        devices: the distinct ones, -1 for the CPU.
        is_lazy: whether a tensor is a lazy conjugate or negative view, or has no memory.
    """

    dtypes: tuple[torch.dtype, ...]
    shapes: tuple[Ints, ...] | Ints
    strides: tuple[Ints, ...] | None
    devices: Ints
    is_lazy: bool

    def extent(self, i: int) -> int:
        """Return the elements from the data pointer of tensor ``i`` to the end of its last element."""
        shape = self.shapes[i]
        if self.strides is None or isinstance(shape, int):
            return shape  # pyright: ignore[reportReturnType]
        return 0 if 0 in shape else 1 + sum((n - 1) * step for n, step in zip(shape, self.strides[i], strict=True))


def in_turns(tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors and targets in turns, the order in which ``SegmentCall`` takes them for ``copy_segments``.

    Raises:
        ValueError: another number of targets.
    """
    if len(tensors) != len(targets):
        raise ValueError(f"copy_segments: {len(tensors)} tensors for {len(targets)} targets")
    return [x for pair in zip(tensors, targets, strict=True) for x in pair]


def layouts_of(wire: Tensor, tensors: Sequence[Tensor]) -> Layouts:
    """Return the layouts of a call."""
    # One attribute of all tensors at a time, because the host pays for every tensor.
    every = (wire, *tensors)
    dtypes, devices = tuple(map(_dtype_of, every)), tuple(set(map(Tensor.get_device, every)))
    is_lazy = any(map(Tensor.is_neg, every)) or (_has_complex(dtypes) and any(map(Tensor.is_conj, every)))
    is_lazy = is_lazy or (-1 in devices and any(map(_is_meta, every)))
    if all(map(Tensor.is_contiguous, every)):
        return Layouts(dtypes, tuple(map(Tensor.numel, every)), strides=None, devices=devices, is_lazy=is_lazy)
    return Layouts(dtypes, tuple([x.shape for x in every]), tuple([x.stride() for x in every]), devices, is_lazy)


@lru_cache(maxsize=1024)
def _has_complex(dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether one of the dtypes is complex, so that a tensor may have a lazy conjugate bit."""
    return any(dtype.is_complex for dtype in dtypes)


@lru_cache(maxsize=1024)
def checked_segments(
    name: str,
    segments: Segments,
    layouts: Layouts,
    scaled: bool,
    accumulates: bool = False,
    sums: bool = False,
) -> CheckedSegments:
    """Check that the table fits these tensors and this wire; once for every table and layout of the tensors."""
    _check_wire_layout(name, layouts, segments)
    _check_memory(name, layouts)
    dtypes = layouts.dtypes[1:]
    if len(dtypes) != len(segments.dtypes):
        raise ValueError(f"{name}: {len(dtypes)} tensors for a table of {len(segments.dtypes)}")
    limits = [layouts.extent(i + 1) for i in range(len(dtypes))]
    for segment in segments.segments:
        if segment.tensor != PADDING and _end(segment) > limits[segment.tensor]:
            raise ValueError(f"{name}: {segment} ends beyond the {limits[segment.tensor]} elements of its tensor")
    scatters = name.startswith("scatter")
    targets, parts = _shared(segments.segments) if sums else (segments.segments, {})
    if scatters:
        _check_targets(name, targets)
    wides: list[torch.dtype | None] = []
    copied = 0
    for i, segment in enumerate(targets):
        count = segment.rows * segment.row
        if segment.tensor == PADDING:
            wides.append(None)
            copied += 0 if scatters else count
            continue
        # ``added`` is the number of parts: 1 for a segment that is no sum.
        carried, dtype, added = segments.dtypes[segment.tensor], dtypes[segment.tensor], len(parts.get(i, (0,)))
        ends = (carried, dtype) if scatters else (dtype, carried)
        wides.append(wide_type(name, *ends, scaled, accumulates or added > 1))
        # A sum reads all its parts and writes the tensor once; accumulation reads the tensor too.
        copied += count * (carried.itemsize * added + dtype.itemsize * (2 if accumulates else 1))
    return CheckedSegments(targets, parts, tuple(wides), copied, segments)


@lru_cache(maxsize=1024)
def checked_copies(name: str, copies: Copies, layouts: Layouts) -> CheckedSegments:
    """Check that the table fits tensors and their targets.

    Args:
        layouts: of (anything, tensor 0, target 0, tensor 1, target 1, ...), as tables with a wire have the wire first.
    """
    _check_memory(name, layouts)
    sources, targets = layouts.dtypes[1::2], layouts.dtypes[2::2]
    if len(sources) != len(copies.dtypes) or targets != copies.dtypes:
        raise ValueError(f"{name}: tensors of {sources} to {targets} for a table of {copies.dtypes}")
    wides: list[torch.dtype | None] = []
    copied = 0
    for segment, (_, end) in zip(copies.segments, copies.spans, strict=True):
        i = segment.tensor
        size, target_size = layouts.extent(1 + 2 * i), layouts.extent(2 + 2 * i)  # elements
        if _end(segment) > size or end > target_size * copies.itemsize(i):
            raise ValueError(f"{name}: {segment} ends beyond the {size} elements of its tensor, or {target_size} there")
        wides.append(wide_type(name, sources[i], targets[i], scaled=False, summed=False))
        copied += segment.rows * segment.row * (sources[i].itemsize + targets[i].itemsize)
    return CheckedSegments(copies.segments, {}, tuple(wides), copied, copies)


def _strided(group: Sequence[Segment], itemsize: int) -> Iterator[Strided]:
    """Join segments that have equal distances, so that one copy moves them all; yield these copies.

    Args:
        group: segments that are equal but for their offsets in the tensor and in the wire.
    """
    first = 0
    while first < len(group):
        # The segments from ``first`` up to ``end`` become one copy. ``distance`` is from one of them to the next: in
        # the tensor, in elements, and in the wire, in bytes.
        segment, end, distance = group[first], first + 1, (0, 0)
        while end < len(group):
            here, before = group[end], group[end - 1]
            next_distance = here.offset - before.offset, here.wire - before.wire
            is_second = end == first + 1
            if min(next_distance) < 0 or next_distance[1] % itemsize:
                break
            if not is_second and next_distance != distance:
                break
            distance, end = next_distance, end + 1
        _, offset, rows, row, stride, wire, wire_stride = segment
        size = end - first, rows, row
        strides = distance[0], stride, 1
        steps = distance[1] // itemsize, wire_stride or row, 1
        yield Strided(segment.tensor, offset, size, strides, wire, steps)
        first = end


def _check_memory(name: str, layouts: Layouts) -> None:
    """Reject lazy views, meta tensors, and tensors on several devices."""
    if layouts.is_lazy:
        raise ValueError(f"{name}: a lazy conjugate or negative view must be resolved first, a meta tensor has no bits")
    if len(layouts.devices) > 1:
        raise ValueError(f"{name}: the tensors are not all on one device")


def _shared(segments: tuple[Segment, ...]) -> tuple[tuple[Segment, ...], dict[int, tuple[Part, ...]]]:
    """Return the segments of distinct rows, and by their place all parts of rows that several segments share."""
    # The first five numbers of a segment are its rows in a tensor, the other two its place in the wire.
    parts: dict[Any, list[Segment]] = {}
    for i, segment in enumerate(segments):
        parts.setdefault(i if segment.tensor == PADDING else segment[:5], []).append(segment)
    every = list(parts.values())
    return tuple(same[0] for same in every), {
        i: tuple(Part(*one[5:]) for one in same) for i, same in enumerate(every) if len(same) > 1
    }


def _check_wire_layout(name: str, layouts: Layouts, segments: Segments) -> None:
    """Reject a wire that is not contiguous, or too short for the table."""
    # Position 0 is the wire; if all tensors are contiguous, ``shapes`` has numbers of elements instead of shapes.
    shape, elements = layouts.shapes[0], layouts.shapes[0]
    if layouts.strides is not None and not isinstance(shape, int):
        elements = math.prod(shape)
        if elements and not is_contiguous(shape, layouts.strides[0]):
            raise ValueError(f"{name}: the wire must be contiguous, not {tuple(shape)} by {layouts.strides[0]}")
    assert isinstance(elements, int)
    nbytes = elements * layouts.dtypes[0].itemsize
    if nbytes < segments.wire_bytes:
        raise ValueError(f"{name}: a wire of {nbytes} bytes is too short for {segments.wire_bytes}")


def _end(segment: Segment) -> int:
    """Return the elements from the tensor's data pointer to the end of the segment's last row."""
    return segment.offset + (segment.rows - 1) * segment.stride + segment.row


def _canonical(segment: Segment) -> Segment:
    """Replace a wire stride that follows from the rest by 0, so that equal tables compare equal."""
    if segment.wire_stride and (segment.rows == 1 or segment.wire_stride == segment.row):
        return segment._replace(wire_stride=0)
    return segment


def _check_targets(name: str, segments: Sequence[Segment]) -> None:
    """Reject rows that overlap in a tensor: their values would depend on the order of writes, and sums be lost."""
    by_tensor: dict[int, list[tuple[int, int, int, int]]] = {}
    for segment in segments:
        if segment.tensor == PADDING:
            continue
        if segment.rows > 1 and segment.stride < segment.row:
            raise ValueError(f"{name}: the rows of {segment} overlap and cannot be written")
        by_tensor.setdefault(segment.tensor, []).append(segment[1:5])
    for tensor, mine in by_tensor.items():
        if _overlap(mine) is not None:
            raise ValueError(f"{name}: segments of tensor {tensor} overlap and cannot be written")


_Block = tuple[int, int, int, int]
"""Start, number, length and stride of rows."""


def _overlap(blocks: Sequence[_Block]) -> tuple[int, int] | None:
    """Return the first range that two rows have in common."""
    tangle: list[_Block] = []  # blocks whose ranges touch: only those can have a row's bytes in common
    end = 0
    for block in sorted(blocks):
        start, rows, row, stride = block
        if tangle and start >= end:
            if (shared := _overlap_of(tangle)) is not None:
                return shared
            tangle = []
        tangle.append(block)
        end = max(end, start + (rows - 1) * stride + row)
    if end > _LARGEST:
        raise ValueError(f"segments: {end} bytes or elements are more than any memory has")
    return _overlap_of(tangle) if tangle else None


def _overlap_of(tangle: Sequence[_Block]) -> tuple[int, int] | None:
    """Return the first range that two rows of blocks, sorted by their starts, have in common."""
    if len(tangle) == 1 and tangle[0][1] == 1:
        return None
    # Each block's row has to end before the next block starts, and the last one's before the second row of the first.
    first, _, _, period = tangle[0]
    first_ends = [start + row for start, _, row, _ in tangle]
    next_starts = [*(start for start, *_ in tangle[1:]), first + period]
    if all(stride == period for *_, stride in tangle) and all(map(le, first_ends, next_starts)):
        return None  # side by side within every period
    start_of, counts, rows, strides = np.array(tangle).T
    # The arrays have one entry per row of all blocks. A row overlaps if one with an earlier start ends behind its own.
    which = np.repeat(np.arange(len(counts)), counts)
    row_in_block = np.arange(len(which)) - (counts.cumsum() - counts)[which]
    starts = start_of[which] + strides[which] * row_in_block
    order = starts.argsort(kind="stable")
    starts, stops = starts[order], (starts + rows[which])[order]
    before = np.maximum.accumulate(stops[:-1])
    wrong = np.nonzero(before > starts[1:])[0]
    if not len(wrong):
        return None
    i = int(wrong[0])
    return int(starts[i + 1]), int(min(before[i], stops[i + 1]))
