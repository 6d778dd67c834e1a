"""Tables of segments: which rows of which tensors lie where in a flat wire, checked once."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncomm_kernels.dtypes import wide_type
from tritoncomm_kernels.geometry import Ints, coalesce

__all__ = ["PADDING", "CheckedSegments", "Layout", "Segment", "Segments", "checked_segments", "layouts_of"]

Layout = tuple[torch.dtype, Ints, Ints, int, bool]  # dtype, shape, stride, device, not what is in memory

PADDING = -1  # index of no tensor: bytes of the wire that a gather sets to zero and a scatter leaves out


class Segment(NamedTuple):
    """``rows`` rows of ``row`` contiguous elements of one tensor, one after the other in the wire.

    Attributes:
        tensor: index of the tensor, or ``PADDING``.
        offset: elements from the tensor's data pointer to the first row.
        rows: number of rows.
        row: elements of a row; of padding, bytes.
        stride: elements from one row to the next.
        wire: byte offset of the first row in the wire.
    """

    tensor: int
    offset: int
    rows: int
    row: int
    stride: int
    wire: int


@dataclass(frozen=True, init=False)
class Segments:
    """``wire[s.wire + (r*s.row + k)*itemsize] <-> tensors[s.tensor][s.offset + r*s.stride + k]`` for every segment s.

    Immutable and hashable (the hash is computed once), so that plans are cached by it: make it once and keep it.

    Args:
        segments: rows ``(tensor, offset, rows, row, stride, wire)``, see ``Segment``; empty ones are dropped.
        dtypes: of every tensor's elements in the wire. A tensor of the same dtype is copied bit by bit, whatever its
            bits and wherever its bytes are in the wire; one of another dtype is cast, with one rounding.

    Raises:
        ValueError: an index of no tensor, a negative number, or segments that overlap in the wire.

    Example:
        ``Segments([(0, 0, 2, 3, 8, 0)], [torch.float32])`` has the first 3 columns of 2 rows of 8, in 24 bytes.
    """

    segments: tuple[Segment, ...]
    dtypes: tuple[torch.dtype, ...]

    def __init__(self, segments: Iterable[Sequence[int]], dtypes: Iterable[torch.dtype]) -> None:
        rows = [Segment(*(int(n) for n in one)) for one in segments]
        object.__setattr__(self, "dtypes", tuple(dtypes))
        for segment in rows:
            if not PADDING <= segment.tensor < len(self.dtypes) or min(segment[1:]) < 0:
                raise ValueError(f"segments: {segment} is no segment of {len(self.dtypes)} tensors")
        object.__setattr__(self, "segments", tuple(s for s in rows if s.rows and s.row))
        _check_wire(self.spans)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[Any, ...]:
        return Segments, (self.segments, self.dtypes)  # without what is cached: hashes differ from process to process

    @cached_property
    def _hash(self) -> int:
        return hash((self.segments, self.dtypes))

    @cached_property
    def spans(self) -> tuple[tuple[int, int], ...]:
        """First byte in the wire and the one after the last, of every segment."""
        return tuple((s.wire, s.wire + s.rows * s.row * self.itemsize(s.tensor)) for s in self.segments)

    @cached_property
    def wire_bytes(self) -> int:
        """Bytes that a wire must have, up to the end of the last segment."""
        return max((end for _, end in self.spans), default=0)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the wire that belong to a segment."""
        return sum(end - start for start, end in self.spans)

    def itemsize(self, tensor: int) -> int:
        """Bytes of an element in the wire; 1 for padding."""
        return 1 if tensor == PADDING else self.dtypes[tensor].itemsize


@dataclass(frozen=True)
class CheckedSegments:
    """What one table means for tensors of certain layouts.

    Attributes:
        wides: for every tensor the type that arithmetic runs in, None where bits are copied.
        copied: bytes read plus bytes written.
    """

    wides: tuple[torch.dtype | None, ...]
    copied: int


def layouts_of(tensors: Sequence[Tensor]) -> tuple[Layout, ...]:
    """What a plan depends on, of every tensor."""
    return tuple(
        [(x.dtype, x.shape, x.stride(), x.get_device(), x.is_neg() or x.is_conj() or x.is_meta) for x in tensors]
    )


@lru_cache(maxsize=1024)
def checked_segments(
    name: str,
    segments: Segments,
    layouts: tuple[Layout, ...],
    wire: Layout,
    scaled: bool,
    accumulates: bool = False,
) -> CheckedSegments:
    """Check that the table fits these tensors and this wire; once for every table and layout of the tensors.

    Raises:
        ValueError: another number of tensors or a segment beyond its tensor, a wire that is too short or not
            contiguous, two devices, a lazy conjugate or negative view, rows that overlap where they are written.
        TypeError: a cast, scale or sum of a dtype that has no arithmetic here.
    """
    _check_wire_layout(name, wire, segments)
    if any(lazy for *_, lazy in (wire, *layouts)):
        raise ValueError(f"{name}: a lazy conjugate or negative view must be resolved first, a meta tensor has no bits")
    if len({device for *_, device, _ in (wire, *layouts)}) > 1:
        raise ValueError(f"{name}: the tensors and the wire are not all on one device")
    if len(layouts) != len(segments.dtypes):
        raise ValueError(f"{name}: {len(layouts)} tensors for a table of {len(segments.dtypes)}")
    limits = [_extent(shape, stride) for _, shape, stride, _, _ in layouts]
    for segment in segments.segments:
        if segment.tensor != PADDING and _end(segment) > limits[segment.tensor]:
            raise ValueError(f"{name}: {segment} ends beyond the {limits[segment.tensor]} elements of its tensor")
    scatters = name.startswith("scatter")
    if scatters:
        _check_targets(name, segments)
    counts = [0] * len(layouts)
    for segment in segments.segments:
        if segment.tensor != PADDING:
            counts[segment.tensor] += segment.rows * segment.row
    wides: list[torch.dtype | None] = []
    copied = 0 if scatters else sum(s.rows * s.row for s in segments.segments if s.tensor == PADDING)
    for (dtype, *_), carried, count in zip(layouts, segments.dtypes, counts, strict=True):
        ends = (carried, dtype) if scatters else (dtype, carried)
        wides.append(wide_type(name, *ends, scaled, accumulates) if count else None)
        copied += count * (carried.itemsize + dtype.itemsize * (2 if accumulates else 1))
    return CheckedSegments(tuple(wides), copied)


def _check_wire_layout(name: str, wire: Layout, segments: Segments) -> None:
    dtype, shape, stride, _, _ = wire
    if 0 not in shape and coalesce(shape, stride)[1] not in ((1,), (0,)):
        raise ValueError(f"{name}: the wire must be contiguous, not {tuple(shape)} by {stride}")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < segments.wire_bytes:
        raise ValueError(f"{name}: a wire of {nbytes} bytes is too short for {segments.wire_bytes}")


def _extent(shape: Ints, stride: Ints) -> int:
    """Elements from the data pointer to the end of the last element."""
    if 0 in shape:
        return 0
    return 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))


def _end(segment: Segment) -> int:
    return segment.offset + (segment.rows - 1) * segment.stride + segment.row


def _check_wire(spans: Iterable[tuple[int, int]]) -> None:
    end = 0
    for start, stop in sorted(spans):
        if start < end:
            raise ValueError(f"segments: bytes {start} to {min(end, stop)} of the wire belong to two segments")
        end = stop


def _check_targets(name: str, segments: Segments) -> None:
    """Refuse rows that overlap in a tensor: what is written twice depends on the order, and sums would be lost."""
    by_tensor: dict[int, list[Segment]] = {}
    for segment in segments.segments:
        if segment.rows > 1 and segment.stride < segment.row and segment.tensor != PADDING:
            raise ValueError(f"{name}: the rows of {segment} overlap and cannot be written")
        by_tensor.setdefault(segment.tensor, []).append(segment)
    by_tensor.pop(PADDING, None)
    for tensor, mine in by_tensor.items():
        mine.sort(key=lambda segment: segment.offset)
        if all(_end(a) <= b.offset for a, b in pairwise(mine)):
            continue
        starts = torch.cat([s.offset + s.stride * torch.arange(s.rows, device="cpu") for s in mine])
        lengths = torch.cat([torch.full((s.rows,), s.row, device="cpu") for s in mine])
        starts, order = starts.sort()
        if bool((starts[:-1] + lengths[order][:-1] > starts[1:]).any()):
            raise ValueError(f"{name}: segments of tensor {tensor} overlap and cannot be written")
