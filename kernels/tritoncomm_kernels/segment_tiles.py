"""How segments are shared among programs: as many bytes and as many small segments for each, as records of a table.

Made on the host, once for every table of segments and alignment of the tensors. Numbers of all records are in tensors,
so that thousands of segments take a few dozen operations.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce

import torch
from torch import Tensor

from tritoncomm_kernels.config import LANES

__all__ = ["BLOCKS", "Work", "divide", "joined", "wire_aligned"]

BLOCKS = tuple(LANES * units for units in (16, 32, 32, 32, 32))  # that a program copies at a time, of 16 bytes to 1
_MOST, _LEAST = 32 * 1024, 8 * 1024  # bytes of a program, where there are enough for every multiprocessor
_PROGRAMS = 16  # that one multiprocessor holds at a time
_SMALL = 16  # a record of less than 1 in so many of a program's bytes is not split, and a program has so many at most
_ROW_UNITS = 1 << 14  # of a record with rows at most, so that i * magic >> 31 is i // row for every i < 1 << 16
_STEP = 128  # bytes to which records are split, so that no sector of memory is read twice


@dataclass(frozen=True)
class Work:
    """What the programs of one launch do.

    Attributes:
        starts: number of the first record of every program, and of all records.
        records: int64 ``[n, words]``: see ``segment_kernel``.
        parts: int64 ``[n, parts - 1, 2]``, of the further parts of every record.
        kinds: how many kinds of units there are, counted from the widest.
        strided: some record has rows.
        shares: bytes of every program, of all parts.
    """

    starts: Tensor
    records: Tensor
    parts: Tensor
    kinds: int
    strided: bool
    shares: Tensor

    @property
    def programs(self) -> int:
        """Number of programs."""
        return self.starts.numel() - 1


@dataclass(frozen=True)
class _Records:
    """Numbers of all records, one tensor each, in elements.

    Attributes:
        tensor: index, or ``PADDING``.
        at: where a record starts in its tensor.
        wire: and in the wire, in bytes: ``[n, parts]``, where more than one are added up.
        count: elements.
        has_rows: it is not contiguous on both sides.
        row, stride: of rows.
        wire_stride: of rows in the wire, ``[n, parts]``.
        skip: elements of the first row that are not in the record.
        unit: elements of an access.
    """

    tensor: Tensor
    at: Tensor
    wire: Tensor
    count: Tensor
    has_rows: Tensor
    row: Tensor
    stride: Tensor
    wire_stride: Tensor
    skip: Tensor
    unit: Tensor

    def pick(self, index: Tensor) -> "_Records":
        """Those at an index or under a mask."""
        return _Records(*(getattr(self, one.name)[index] for one in fields(self)))

    @staticmethod
    def joined(*parts: "_Records") -> "_Records":
        return _Records(*(torch.cat([getattr(part, one.name) for part in parts]) for one in fields(_Records)))


@dataclass(frozen=True)
class _Sides:
    """The tensors and the wire.

    Attributes:
        is_bits: elements are bytes to be copied; otherwise numbers of two types, or to be added.
        rows, wire: bytes of an element.
        rows_align, wire_align: addresses modulo 16, of every tensor; of the wire a single one, or as many.
    """

    is_bits: bool
    rows: int
    wire: int
    rows_align: Tensor
    wire_align: Tensor

    @property
    def widest(self) -> int:
        """Elements of the widest unit: 16 bytes of the smaller type."""
        return 16 // min(self.rows, self.wire)

    @property
    def nbytes(self) -> int:
        return max(self.rows, self.wire)

    def addresses(self, records: _Records) -> tuple[Tensor, Tensor]:
        """Where records start, modulo 16: in the tensors, and every part in the wire."""
        padding = records.tensor < 0
        in_wire = records.wire + wire_aligned(self.wire_align, records.tensor)
        in_rows = self.rows_align[records.tensor.clamp(min=0)] + records.at * self.rows
        return torch.where(padding, in_wire[:, 0], in_rows) & 15, in_wire & 15


def divide(
    rows: Tensor, itemsizes: tuple[int, int] | None, rows_align: Tensor, wire_align: Tensor, multiprocessors: int
) -> Work:
    """Records of segments between tensors whose elements are all of one size and a wire.

    Args:
        rows: int64 ``[n, 5 + 2*parts]``, segments as ``segments.Segment`` has them, none empty, and the last two
            numbers again for every further part that is added; in bytes if they are copied, so that tensors of any
            dtypes share a launch.
        itemsizes: bytes of an element of the tensors and in the wire where there is arithmetic, None for copies.
        rows_align: addresses of the tensors modulo 16.
        wire_align: address of the wire modulo 16, ``[1]``, or of every tensor's target.
        multiprocessors: of the device.

    Example:
        On 4 multiprocessors two segments of 1 MiB and 32 of 64 bytes are 65 programs, at most one of the 32 in each.
    """
    sides = _Sides(itemsizes is None, *(itemsizes or (1, 1)), rows_align, wire_align)
    records = _with_units(_records(rows), sides)
    nbytes = sides.nbytes * (records.wire.shape[1] + 1) // 2  # of an element of every part
    total = int(records.count.sum()) * nbytes
    share = min(max(-(-total // (multiprocessors * _PROGRAMS)), _LEAST), _MOST)
    is_small = records.count * nbytes * _SMALL < share
    small, large = records.pick(is_small), records.pick(~is_small)
    programs = max(-(-total // share), -(-small.count.numel() // _SMALL), 1)
    of_small = _dealt(small, programs)
    bytes_small = torch.zeros(programs, dtype=torch.int64).scatter_add_(0, of_small, small.count * nbytes)
    large, of_large = _split(large, sides, (total / programs - bytes_small.double()).clamp(min=0))
    program, order = torch.cat([of_large, of_small]).sort(stable=True)
    records = _Records.joined(large, small).pick(order)
    shares = torch.zeros(programs, dtype=torch.int64).scatter_add_(0, program, records.count * nbytes)
    starts = torch.searchsorted(program, torch.arange(programs + 1))
    kind = _kind(records.unit, sides)
    words, parts = _words(records, sides, kind)
    return Work(starts, words, parts, int(kind.max()) + 1, bool(records.has_rows.any()), shares)


def wire_aligned(wire_align: Tensor, tensor: Tensor) -> Tensor:
    """Addresses modulo 16 of the wires of these tensors, for all their parts."""
    return wire_align if wire_align.numel() == 1 else wire_align[tensor].unsqueeze(1)


def joined(works: Sequence[Work], kinds: Sequence[int]) -> tuple[Tensor, int]:
    """The table of one launch that does all the work, and the words of a record.

    Args:
        works: of every part of the launch; each has programs of its own.
        kinds: number of each one's widest kind in the launch.

    Returns:
        int64: the first record of every program and of all records; the records; the lists of their parts. A record
        has 4 words, one more where the wire has gaps between rows, and another where parts are added up.
    """
    starts, records, lists, first = [], [], [], 0
    for work, kind in zip(works, kinds, strict=True):
        starts.append(work.starts[:-1] + first)
        first += len(work.records)
        words = work.records.clone()
        words[:, 3] += kind
        records.append(words)
    count = sum(len(one) for one in starts) + 1
    has_parts = any(work.parts.numel() for work in works)
    words = 6 if has_parts else 5 if any(bool(one[:, 4].any()) for one in records) else 4
    at = count + first * words
    for work, one in zip(works, records, strict=True):
        added = work.parts.shape[1]
        if added:
            one[:, 5] = at + 2 * added * torch.arange(len(one)) | added << 32
            lists.append(work.parts.flatten())
            at += work.parts.numel()
    table = torch.cat([*starts, torch.tensor([first]), *(one[:, :words].flatten() for one in records), *lists])
    return table, words


def _records(rows: Tensor) -> _Records:
    tensor, at, count, row, stride = rows[:, :5].unbind(1)
    wire, wire_stride = rows[:, 5::2], rows[:, 6::2]
    wire_stride = torch.where(wire_stride == 0, row[:, None], wire_stride)
    has_rows = (count > 1) & ((stride != row) | (wire_stride != row[:, None]).any(1))
    skip, unit = torch.zeros_like(at), torch.ones_like(at)
    return _Records(tensor, at, wire, count * row, has_rows, row, stride, wire_stride, skip, unit)


def _with_units(records: _Records, sides: _Sides) -> _Records:
    """As wide units as both addresses allow, what is before and behind them as records of their own."""
    strided = records.pick(records.has_rows)
    strided = replace(strided, unit=_unit_of_rows(strided, sides))
    far = (strided.stride - strided.row).abs() // strided.unit >= 1 << 31  # in the wire gaps have 64 bits
    apart = (strided.row // strided.unit > _ROW_UNITS) | far
    flat = _Records.joined(records.pick(~records.has_rows), _row_by_row(strided.pick(apart), sides))
    unit, head = _unit_of_bytes(flat, sides)
    head = torch.minimum(head, flat.count)
    body = (flat.count - head) // unit * unit
    rest = flat.count - head - body
    before = _part(flat, sides, torch.zeros_like(head), head)
    behind = _part(flat, sides, head + body, rest)
    before, behind = (replace(one, unit=_narrow_unit(one, sides)) for one in (before, behind))
    every = _Records.joined(strided.pick(~apart), before, replace(_part(flat, sides, head, body), unit=unit), behind)
    return every.pick(every.count > 0)


def _unit_of_rows(records: _Records, sides: _Sides) -> Tensor:
    """Elements of a unit that every row starts with, on both sides: rows and strides have full units."""
    smaller = min(sides.rows, sides.wire)
    in_rows, in_wire = sides.addresses(records)
    steps = (records.row * smaller, records.stride * smaller, _every_bit(records.wire_stride * smaller))
    return _allowed((in_rows, _every_bit(in_wire), *steps), sides)


def _unit_of_bytes(records: _Records, sides: _Sides) -> tuple[Tensor, Tensor]:
    """Elements of a unit of contiguous records, and how many elements are before the first aligned one.

    A record that one block of narrow units has anyway is not parted for the sake of wider ones.
    """
    in_rows, in_parts = sides.addresses(records)
    in_wire = in_parts[:, 0]
    if sides.is_bits:
        unit = _low_bit(in_rows - in_wire)
        narrow = _low_bit(in_rows | in_wire | records.count)
        unit = torch.where(records.count <= narrow * BLOCKS[-1], torch.minimum(narrow, unit), unit)
        return unit, -in_wire % unit
    small, at = (sides.rows, in_rows) if sides.rows <= sides.wire else (sides.wire, in_wire)
    head = -at % 16 // small
    fits = ((in_rows + head * sides.rows) | _every_bit(in_parts + head[:, None] * sides.wire)) % 16 == 0
    return torch.where(fits, sides.widest, 1), torch.where(fits, head, 0)


def _narrow_unit(records: _Records, sides: _Sides) -> Tensor:
    in_rows, in_wire = sides.addresses(records)
    return _allowed((in_rows, _every_bit(in_wire), records.count * min(sides.rows, sides.wire)), sides)


def _allowed(numbers: tuple[Tensor, ...], sides: _Sides) -> Tensor:
    """Elements of the widest unit that divides all numbers of bytes; of casts there are two."""
    every = reduce(torch.bitwise_or, numbers)
    if sides.is_bits:
        return _low_bit(every)
    return torch.where(every % 16 == 0, sides.widest, 1)


def _every_bit(parts: Tensor) -> Tensor:
    """The bits that any part of a record has."""
    return reduce(torch.bitwise_or, parts.unbind(1))


def _low_bit(n: Tensor) -> Tensor:
    n = n | 16
    return n & -n


def _row_by_row(records: _Records, sides: _Sides) -> _Records:
    """A record for every row."""
    counts = records.count // records.row
    which = torch.repeat_interleave(torch.arange(counts.numel()), counts)
    r = torch.arange(which.numel()) - (counts.cumsum(0) - counts)[which]
    one = records.pick(which)
    return _part(one, sides, r * one.row, one.row)


def _part(records: _Records, sides: _Sides, first: Tensor, count: Tensor) -> _Records:
    """``count`` elements of each record, from number ``first`` on."""
    r = torch.where(records.has_rows, first // records.row, 0)
    skip = torch.where(records.has_rows, first - r * records.row, 0)
    at = records.at + torch.where(records.has_rows, r * records.stride + skip, first)
    has_rows = records.has_rows & (skip + count > records.row)
    r, skip, flat = r[:, None], skip[:, None], first[:, None]
    wire = records.wire + torch.where(records.has_rows[:, None], r * records.wire_stride + skip, flat) * sides.wire
    return replace(records, at=at, wire=wire, count=count, has_rows=has_rows, skip=torch.where(has_rows, skip[:, 0], 0))


def _dealt(records: _Records, programs: int) -> Tensor:
    """A program for each, the largest first, forwards and backwards in turns: as many for each and nearly as much."""
    order = records.count.argsort(descending=True, stable=True)
    turn, place = torch.arange(order.numel()) // programs, torch.arange(order.numel()) % programs
    place = torch.where(turn % 2 == 0, place, programs - 1 - place)
    return torch.empty_like(order).scatter_(0, order, place)


def _split(records: _Records, sides: _Sides, wanted: Tensor) -> tuple[_Records, Tensor]:
    """Records end to end, split so that every program gets the bytes it wants; the program of each."""
    ends = records.count.cumsum(0)
    if not ends.numel():
        return records, ends
    total, starts = int(ends[-1]), ends - records.count
    limits = (wanted.cumsum(0) / wanted.sum() * total).round().to(torch.int64)[:-1].clamp(max=total)
    j = torch.searchsorted(ends, limits, right=True).clamp(max=ends.numel() - 1)
    step = records.unit[j] * (_STEP // sides.nbytes // records.unit[j]).clamp(min=1)
    limits = starts[j] + (limits - starts[j] + step // 2) // step * step
    limits = torch.minimum(limits, ends[j])
    first = torch.cat([starts, limits[limits < total]]).unique()
    which = torch.searchsorted(ends, first, right=True)
    inside, count = first - starts[which], torch.diff(first, append=torch.tensor([total]))
    program = torch.searchsorted(limits, first, right=True)
    return _part(records.pick(which), sides, inside, count), program


def _kind(unit: Tensor, sides: _Sides) -> Tensor:
    """Number of a unit, the widest first."""
    if not sides.is_bits:
        return (unit < sides.widest).to(torch.int64)
    return 4 - sum(((unit > 1 << power).to(torch.int64) for power in range(4)), torch.zeros_like(unit))


def _words(records: _Records, sides: _Sides, kind: Tensor) -> tuple[Tensor, Tensor]:
    """What the kernel reads: the records, the list of parts of each yet to be placed; see ``segment_kernel``."""
    unit, has_rows, padding = records.unit, records.has_rows, records.tensor < 0
    row = torch.where(has_rows, records.row // unit, 1)
    magic = torch.where(has_rows, ((1 << 31) + row - 1) // row, 0)
    gap = torch.where(has_rows, (records.stride - records.row) // unit, 0)
    gaps = torch.where(has_rows[:, None], (records.wire_stride - records.row[:, None]) // unit[:, None], 0)
    place, sizes = records.wire[:, 0] | records.skip // unit << 48, records.count // unit | magic << 32
    code = gap << 32 | records.tensor.clamp(min=0) << 4 | padding.to(torch.int64) << 3 | kind
    words = torch.stack([records.at * sides.rows, place, sizes, code, gaps[:, 0], torch.zeros_like(unit)], 1)
    return words, torch.stack([records.wire[:, 1:] - records.wire[:, :1], gaps[:, 1:]], 2)
