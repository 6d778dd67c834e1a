"""How segments are shared among programs: as many bytes and as many small segments for each, as records of a table.

Made on the host, once for every table of segments and alignment of the tensors. Numbers of all records are in tensors,
so that thousands of segments take a few dozen operations.
"""

from dataclasses import dataclass, fields, replace

import torch
from torch import Tensor

from tritoncomm_kernels.config import LANES

__all__ = ["BLOCKS", "Work", "divide"]

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
        table: int64: number of the first record of every program and of all records; then the records.
        programs: number of programs.
        kinds: how many kinds of units there are, counted from the widest.
        strided: some record has rows.
        shares: bytes of every program, on the side that has more.
    """

    table: Tensor
    programs: int
    kinds: int
    strided: bool
    shares: Tensor


@dataclass(frozen=True)
class _Records:
    """Numbers of all records, one tensor each, in elements.

    Attributes:
        tensor: index, or ``PADDING``.
        at: where a record starts in its tensor.
        wire: and in the wire, in bytes.
        count: elements.
        has_rows: it is not contiguous in its tensor.
        row, stride: of rows.
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
        rows_align, wire_align: addresses modulo 16.
    """

    is_bits: bool
    rows: int
    wire: int
    rows_align: Tensor
    wire_align: int

    @property
    def widest(self) -> int:
        """Elements of the widest unit: 16 bytes of the smaller type."""
        return 16 // min(self.rows, self.wire)

    @property
    def nbytes(self) -> int:
        return max(self.rows, self.wire)

    def addresses(self, records: _Records) -> tuple[Tensor, Tensor]:
        """Where records start, modulo 16: in the tensors and in the wire."""
        padding = records.tensor < 0
        in_wire = records.wire + self.wire_align
        in_rows = self.rows_align[records.tensor.clamp(min=0)] + records.at * self.rows
        return torch.where(padding, in_wire, in_rows) & 15, in_wire & 15


def divide(
    rows: Tensor, itemsizes: tuple[int, int] | None, rows_align: Tensor, wire_align: int, multiprocessors: int
) -> Work:
    """Records of segments between tensors whose elements are all of one size and a wire.

    Args:
        rows: int64 ``[n, 6]``, segments as ``segments.Segment`` has them, none empty; in bytes if they are copied, so
            that tensors of any dtypes share a launch.
        itemsizes: bytes of an element of the tensors and in the wire where there is arithmetic, None for copies.
        rows_align: addresses of the tensors modulo 16.
        wire_align: address of the wire modulo 16.
        multiprocessors: of the device.

    Example:
        On 4 multiprocessors two segments of 1 MiB and 32 of 64 bytes are 65 programs, at most one of the 32 in each.
    """
    sides = _Sides(itemsizes is None, *(itemsizes or (1, 1)), rows_align, wire_align)
    records = _with_units(_records(rows), sides)
    total = int(records.count.sum()) * sides.nbytes
    share = min(max(-(-total // (multiprocessors * _PROGRAMS)), _LEAST), _MOST)
    is_small = records.count * sides.nbytes * _SMALL < share
    small, large = records.pick(is_small), records.pick(~is_small)
    programs = max(-(-total // share), -(-small.count.numel() // _SMALL), 1)
    of_small = _dealt(small, programs)
    bytes_small = torch.zeros(programs, dtype=torch.int64).scatter_add_(0, of_small, small.count * sides.nbytes)
    large, of_large = _split(large, sides, (total / programs - bytes_small.double()).clamp(min=0))
    program, order = torch.cat([of_large, of_small]).sort(stable=True)
    records = _Records.joined(large, small).pick(order)
    shares = torch.zeros(programs, dtype=torch.int64).scatter_add_(0, program, records.count * sides.nbytes)
    starts = torch.searchsorted(program, torch.arange(programs + 1))
    kind = _kind(records.unit, sides)
    table = torch.cat([starts, _words(records, sides, kind).flatten()])
    return Work(table, programs, int(kind.max()) + 1, bool(records.has_rows.any()), shares)


def _records(rows: Tensor) -> _Records:
    tensor, at, count, row, stride, wire = rows.unbind(1)
    has_rows = (count > 1) & (stride != row)
    return _Records(tensor, at, wire, count * row, has_rows, row, stride, torch.zeros_like(at), torch.ones_like(at))


def _with_units(records: _Records, sides: _Sides) -> _Records:
    """As wide units as both addresses allow, what is before and behind them as records of their own."""
    strided = records.pick(records.has_rows)
    strided = replace(strided, unit=_unit_of_rows(strided, sides))
    far = (strided.stride - strided.row).abs() // strided.unit >= 1 << 31
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
    return _allowed((*sides.addresses(records), records.row * smaller, records.stride * smaller), sides)


def _unit_of_bytes(records: _Records, sides: _Sides) -> tuple[Tensor, Tensor]:
    """Elements of a unit of contiguous records, and how many elements are before the first aligned one.

    A record that one block of narrow units has anyway is not parted for the sake of wider ones.
    """
    in_rows, in_wire = sides.addresses(records)
    if sides.is_bits:
        unit = _low_bit(in_rows - in_wire)
        narrow = _low_bit(in_rows | in_wire | records.count)
        unit = torch.where(records.count <= narrow * BLOCKS[-1], torch.minimum(narrow, unit), unit)
        return unit, -in_wire % unit
    small, at = (sides.rows, in_rows) if sides.rows <= sides.wire else (sides.wire, in_wire)
    head = -at % 16 // small
    fits = ((in_rows + head * sides.rows) | (in_wire + head * sides.wire)) % 16 == 0
    return torch.where(fits, sides.widest, 1), torch.where(fits, head, 0)


def _narrow_unit(records: _Records, sides: _Sides) -> Tensor:
    return _allowed((*sides.addresses(records), records.count * min(sides.rows, sides.wire)), sides)


def _allowed(numbers: tuple[Tensor, ...], sides: _Sides) -> Tensor:
    """Elements of the widest unit that divides all numbers of bytes; of casts there are two."""
    every = numbers[0]
    for number in numbers[1:]:
        every = every | number
    if sides.is_bits:
        return _low_bit(every)
    return torch.where(every % 16 == 0, sides.widest, 1)


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
    wire = records.wire + first * sides.wire
    return replace(records, at=at, wire=wire, count=count, has_rows=has_rows, skip=torch.where(has_rows, skip, 0))


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


def _words(records: _Records, sides: _Sides, kind: Tensor) -> Tensor:
    """What the kernel reads; see ``segment_kernel``."""
    unit, has_rows, padding = records.unit, records.has_rows, records.tensor < 0
    row = torch.where(has_rows, records.row // unit, 1)
    magic = torch.where(has_rows, ((1 << 31) + row - 1) // row, 0)
    gap = torch.where(has_rows, (records.stride - records.row) // unit, 0)
    place, sizes = records.wire | records.skip // unit << 48, records.count // unit | magic << 32
    code = gap << 32 | records.tensor.clamp(min=0) << 4 | padding.to(torch.int64) << 3 | kind
    return torch.stack([records.at * sides.rows, place, sizes, code], 1)
