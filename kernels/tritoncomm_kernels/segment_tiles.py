"""Work of a launch: segments split into records, so that every program has as many bytes and as many small segments.

Made on the host, once for every table of segments and alignment of the tensors. numpy's arrays hold the numbers of all
records, so that thousands of segments take a few dozen operations. torch's operations cost several times as much: its
dispatcher is made for larger tensors.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import reduce
from typing import Any

import numpy as np

from tritoncomm_kernels.config import LANES

__all__ = ["BLOCKS", "Array", "Work", "divide", "joined", "wire_aligned"]

Array = np.ndarray[Any, np.dtype[Any]]

BLOCKS = tuple(LANES * units for units in (16, 32, 32, 32, 32))  # units of 16 to 1 bytes that a program copies at once
_MOST, _LEAST = 16 * 1024, 8 * 1024  # bytes of a program, if there are enough for every multiprocessor
_PROGRAMS = 16  # programs that one multiprocessor holds at a time
_SMALL = 16  # a record below 1/16 of a program's bytes is small: it is not split, and a program has at most 16 of them
_ROW_UNITS = 1 << 14  # longest row of a record, so that i * magic >> 31 is i // row for every i < 1 << 16
_STEP = 128  # bytes; records are split at multiples of it, so that no sector of memory is read twice


@dataclass(frozen=True)
class Work:
    """Records of the programs of one launch.

    Attributes:
        starts: number of the first record of every program, then the number of all records.
        records: int64 ``[n, words]``: see ``segment_kernel``.
        parts: int64 ``[n, parts - 1, 2]``, the further parts of every record.
        kinds: number of kinds of units, counted from the widest.
        strided: whether a record has rows.
        shares: bytes of every program, of all parts.
    """

    starts: Array
    records: Array
    parts: Array
    kinds: int
    strided: bool
    shares: Array

    @property
    def programs(self) -> int:
        """Number of programs."""
        return len(self.starts) - 1


@dataclass(frozen=True)
class _Records:
    """Numbers of all records, one array each, in elements.

    Attributes:
        tensor: index, or ``PADDING``.
        at: where a record starts in its tensor.
        wire: where it starts in the wire, in bytes: ``[n, parts]``, where more than one are added up.
        count: elements.
        has_rows: whether it is not contiguous on both sides.
        wire_stride: of rows in the wire, ``[n, parts]``.
        skip: elements of the first row that are not in the record.
        unit: elements of an access.
    """

    tensor: Array
    at: Array
    wire: Array
    count: Array
    has_rows: Array
    row: Array
    stride: Array
    wire_stride: Array
    skip: Array
    unit: Array

    def pick(self, index: Array) -> "_Records":
        """Return the records at an index or under a mask."""
        return _Records(*(getattr(self, name)[index] for name in _FIELDS))

    def __len__(self) -> int:
        return len(self.count)

    @staticmethod
    def joined(*parts: "_Records") -> "_Records":
        """Concatenate the records of all parts, in their order."""
        parts = tuple(part for part in parts if len(part)) or parts[:1]
        return (
            parts[0]
            if len(parts) == 1
            else _Records(*(np.concatenate([getattr(part, name) for part in parts]) for name in _FIELDS))
        )


_FIELDS = [one.name for one in fields(_Records)]


@dataclass(frozen=True)
class _Sides:
    """The tensors and the wire.

    Attributes:
        is_bits: whether elements are bytes to copy; otherwise they are numbers to cast or add.
        rows, wire: bytes of an element.
        rows_align, wire_align: addresses modulo 16, of every tensor; of the wire a single one, or as many.
    """

    is_bits: bool
    rows: int
    wire: int
    rows_align: Array
    wire_align: Array

    @property
    def widest(self) -> int:
        """Elements of the widest unit: 16 bytes of the smaller type."""
        return 16 // min(self.rows, self.wire)

    @property
    def nbytes(self) -> int:
        """Bytes of an element of the larger type."""
        return max(self.rows, self.wire)

    def addresses(self, records: _Records) -> tuple[Array, Array]:
        """Return the records' addresses modulo 16: in the tensors, and of every part in the wire."""
        padding = records.tensor < 0
        in_wire = records.wire + wire_aligned(self.wire_align, records.tensor)
        in_rows = self.rows_align[records.tensor.clip(min=0)] + records.at * self.rows
        # Padding has no tensor, so its wire decides the unit alone.
        return np.where(padding, in_wire[:, 0], in_rows) & 15, in_wire & 15


def divide(
    rows: Array, itemsizes: tuple[int, int] | None, rows_align: Array, wire_align: Array, multiprocessors: int
) -> Work:
    """Split segments between a wire and tensors, whose elements all have one size, into records of programs.

    Args:
        rows: int64 ``[n, 5 + 2*parts]``: tensor, offset, rows, row and stride of a segment, none empty, as
            ``segments.Segment`` has them; then wire and wire stride of every part that is added, or of the one. In
            bytes if they are copied, so that tensors of any dtypes share a launch.
        itemsizes: bytes of an element of the tensors and in the wire where there is arithmetic, None for copies.
        rows_align, wire_align: addresses modulo 16 of the tensors; of the wire, ``[1]``, or of every tensor's target.

    Example:
        On 4 multiprocessors two segments of 1 MiB and 32 of 64 bytes are 129 programs, at most one of the 32 in each.
    """
    sides = _Sides(itemsizes is None, *(itemsizes or (1, 1)), rows_align, wire_align)
    records = _with_units(_records(rows), sides)
    # Bytes that an element moves, read or written, divided by 2: of a copy its size, half of it more for a further
    # part.
    nbytes = sides.nbytes * (records.wire.shape[1] + 1) // 2
    total = int(records.count.sum()) * nbytes
    share = min(max(-(-total // (multiprocessors * _PROGRAMS)), _LEAST), _MOST)
    # Small records are dealt out whole. Large ones are then split so that every program is filled up to the average.
    is_small = records.count * nbytes * _SMALL < share
    small, large = records.pick(is_small), records.pick(~is_small)
    programs = max(-(-total // share), -(-len(small) // _SMALL), 1)
    of_small = _dealt(small, programs)
    bytes_small = _summed(of_small, small.count * nbytes, programs)
    large, of_large = _split(large, sides, (total / programs - bytes_small).clip(min=0))
    program, records = of_large, large
    if len(small):
        program = np.concatenate([of_large, of_small])
        order = program.argsort(kind="stable")
        program, records = program[order], _Records.joined(large, small).pick(order)
    # The table has the records in the order of their programs, and a program reads a range of it.
    starts = program.searchsorted(np.arange(programs + 1))
    kind = _kind(records.unit, sides)
    words, parts = _words(records, sides, kind)
    shares = _summed(program, records.count * nbytes, programs)
    return Work(starts, words, parts, int(kind.max()) + 1, bool(records.has_rows.any()), shares)


def wire_aligned(wire_align: Array, tensor: Array) -> Array:
    """Return the address modulo 16 of the wire, or of the target of every tensor."""
    return wire_align if wire_align.size == 1 else wire_align[tensor][:, None]


def joined(works: Sequence[Work], kinds: Sequence[int]) -> tuple[Array, int]:
    """Return the table of one launch that does all the work, and the words of a record.

    Args:
        kinds: for each work the number of its widest kind in the launch.
    """
    # The table is int64: the first record of every program and the number of all records; the records; the lists of
    # their parts. A record has 4 words, one more where the wire has gaps between rows, and another for sums.
    starts, records, lists, num_records = [], [], [], 0
    for work, kind in zip(works, kinds, strict=True):
        starts.append(work.starts[:-1] + num_records)
        num_records += len(work.records)
        of_launch = work.records.copy()
        of_launch[:, 3] += kind
        records.append(of_launch)
    has_parts = any(work.parts.size for work in works)
    has_gaps = any(bool(one[:, 4].any()) for one in records)
    words = 6 if has_parts else 5 if has_gaps else 4
    at = sum(map(len, starts)) + 1 + num_records * words  # where the lists of parts begin
    for work, one in zip(works, records, strict=True):
        added = work.parts.shape[1]
        if added:
            # Word 5 is the place of the record's list in the table, and the number of its further parts, of two words
            # each, from bit 32 on.
            place = at + 2 * added * np.arange(len(one))
            one[:, 5] = place | (added << 32)
            lists.append(work.parts.flatten())
            at += work.parts.size
    table = np.concatenate([*starts, [num_records], *(one[:, :words].flatten() for one in records), *lists])
    return table, words


def _records(rows: Array) -> _Records:
    """Return segments, in the columns of ``divide``, as unsplit records with units of one element."""
    # Columns 5, 7, ... are the parts' places in the wire, columns 6, 8, ... their strides.
    tensor, at, count, row, stride = rows[:, :5].T
    wire, wire_stride = rows[:, 5::2], rows[:, 6::2]
    wire_stride = np.where(wire_stride == 0, row[:, None], wire_stride)
    has_rows = (count > 1) & ((stride != row) | (wire_stride != row[:, None]).any(1))
    skip, unit = np.zeros_like(at), np.ones_like(at)
    return _Records(tensor, at, wire, count * row, has_rows, row, stride, wire_stride, skip, unit)


def _with_units(records: _Records, sides: _Sides) -> _Records:
    """Give every record the widest unit that both addresses allow, and divide records of bytes at its bounds."""
    # A record of rows has one unit for all of them. A row too long for the division by ``magic``, or a gap beyond 32
    # bits, makes each row a record.
    strided, flat = records.pick(records.has_rows), records.pick(~records.has_rows)
    if len(strided):
        strided = replace(strided, unit=_unit_of_rows(strided, sides))
        far = np.abs(strided.stride - strided.row) // strided.unit >= 1 << 31  # in the wire gaps have 64 bits
        apart = (strided.row // strided.unit > _ROW_UNITS) | far
        if apart.any():
            flat = _Records.joined(flat, _row_by_row(strided.pick(apart), sides))
            strided = strided.pick(~apart)
    return _Records.joined(strided, *(_parted(flat, sides) if len(flat) else ()))


def _parted(flat: _Records, sides: _Sides) -> Iterator[_Records]:
    """Yield contiguous records in aligned units; the bytes before and behind the units are records of their own."""
    unit, head = _unit_of_bytes(flat, sides)
    head = np.minimum(head, flat.count)
    body = (flat.count - head) // unit * unit
    rest = flat.count - head - body
    before = _part(flat, sides, np.zeros_like(head), head)
    behind = _part(flat, sides, head + body, rest)
    before, behind = (replace(one, unit=_narrow_unit(one, sides)) for one in (before, behind))
    for one in (before, replace(_part(flat, sides, head, body), unit=unit), behind):
        yield one.pick(one.count > 0)


def _unit_of_rows(records: _Records, sides: _Sides) -> Array:
    """Return the elements of the widest unit that divides addresses, rows and strides on both sides."""
    smaller = min(sides.rows, sides.wire)
    in_rows, in_wire = sides.addresses(records)
    steps = (records.row * smaller, records.stride * smaller, _every_bit(records.wire_stride * smaller))
    return _allowed((in_rows, _every_bit(in_wire), *steps), sides)


def _unit_of_bytes(records: _Records, sides: _Sides) -> tuple[Array, Array]:
    """Return the elements of a unit of contiguous records, and the elements before the first aligned unit."""
    in_rows, in_parts = sides.addresses(records)
    in_wire = in_parts[:, 0]
    if sides.is_bits:
        # A wide unit needs addresses that are multiples of it on both sides. Single bytes in front, the head, may be
        # copied first. After a head both sides are aligned together if their distance is a multiple of the unit.
        unit = _low_bit(in_rows - in_wire)
        # Without a head, the addresses and the length have to be multiples of the unit. A short record, which takes one
        # block of such units, is not worth a head.
        headless = _low_bit(in_rows | in_wire | records.count)
        is_short = records.count <= headless * BLOCKS[-1]
        unit = np.where(is_short, np.minimum(headless, unit), unit)
        return unit, -in_wire % unit
    # Casts and sums: the head ends where the address of the smaller type is a multiple of 16. Wide units are used if
    # all other addresses are multiples of 16 there, too.
    small, at = (sides.rows, in_rows) if sides.rows <= sides.wire else (sides.wire, in_wire)
    head = -at % 16 // small
    fits = ((in_rows + head * sides.rows) | _every_bit(in_parts + head[:, None] * sides.wire)) % 16 == 0
    return np.where(fits, sides.widest, 1), np.where(fits, head, 0)


def _narrow_unit(records: _Records, sides: _Sides) -> Array:
    """Return the elements of the widest unit that divides the addresses and the length of contiguous records."""
    in_rows, in_wire = sides.addresses(records)
    return _allowed((in_rows, _every_bit(in_wire), records.count * min(sides.rows, sides.wire)), sides)


def _allowed(numbers: tuple[Array, ...], sides: _Sides) -> Array:
    """Return the elements of the widest unit that divides all numbers of bytes; casts have two units."""
    every = reduce(np.bitwise_or, numbers)
    if sides.is_bits:
        return _low_bit(every)
    return np.where(every % 16 == 0, sides.widest, 1)


def _every_bit(parts: Array) -> Array:
    """Return the bits that any part of a record has."""
    return np.bitwise_or.reduce(parts, 1)


def _low_bit(n: Array) -> Array:
    """Return the largest power of two up to 16 that divides each number."""
    n = n | 16
    return n & -n


def _row_by_row(records: _Records, sides: _Sides) -> _Records:
    """Split records into one for every row."""
    counts = records.count // records.row
    which = np.repeat(np.arange(len(counts)), counts)
    r = np.arange(len(which)) - (counts.cumsum() - counts)[which]
    one = records.pick(which)
    return _part(one, sides, r * one.row, one.row)


def _part(records: _Records, sides: _Sides, first: Array, count: Array) -> _Records:
    """Return ``count`` elements of each record, from number ``first`` on."""
    # ``r`` is the row in which the part starts, and ``skip`` the elements of that row before it. A part inside one row
    # is contiguous.
    r = np.where(records.has_rows, first // records.row, 0)
    skip = np.where(records.has_rows, first - r * records.row, 0)
    at = records.at + np.where(records.has_rows, r * records.stride + skip, first)
    has_rows = records.has_rows & (skip + count > records.row)
    r, skip, flat = r[:, None], skip[:, None], first[:, None]
    wire = records.wire + np.where(records.has_rows[:, None], r * records.wire_stride + skip, flat) * sides.wire
    return replace(records, at=at, wire=wire, count=count, has_rows=has_rows, skip=np.where(has_rows, skip[:, 0], 0))


def _dealt(records: _Records, programs: int) -> Array:
    """Return a program for every small record: dealt largest first, forwards and backwards in turns, as fair loads."""
    order = (-records.count).argsort(kind="stable")
    if not len(records):
        return order
    turn, place = np.divmod(np.arange(len(order)), programs)
    place = np.where(turn % 2 == 0, place, programs - 1 - place)
    program = np.empty_like(order)
    program[order] = place
    return program


def _split(records: _Records, sides: _Sides, shares: Array) -> tuple[_Records, Array]:
    """Split records so that every program gets about its wanted bytes; return the records and the program of each."""
    ends = records.count.cumsum()
    if not len(records):
        return records, ends
    total, starts = int(ends[-1]), ends - records.count
    # ``limits`` has the end of every program but the last, in elements of all records in a row. Each is rounded to a
    # step inside its record ``j``, so that units stay whole and no sector is read twice.
    limits = (shares.cumsum() / shares.sum() * total).round().astype(np.int64)[:-1].clip(max=total)
    j = ends.searchsorted(limits, "right").clip(max=len(ends) - 1)
    units_of_step = (_STEP // sides.nbytes // records.unit).clip(min=1)
    step = (records.unit * units_of_step)[j]  # elements
    rounded = starts[j] + (limits - starts[j] + step // 2) // step * step
    limits = np.minimum(rounded, ends[j])
    # The new records start where the old ones do, and at the limits between. np.unique hashes, which takes ten times
    # as long.
    new_starts = np.sort(np.concatenate([starts, limits[limits < total]]))
    new_starts = new_starts[np.append(new_starts[1:] > new_starts[:-1], True)]
    old_record = ends.searchsorted(new_starts, "right")
    # Records of 6 and 4 elements and the limit 5: new records start at 0, 5 and 6, with 5, 1 and 4 elements. They are
    # in the old records 0, 0 and 1, at 0, 5 and 0; programs 0, 1 and 1 copy them.
    inside, count = new_starts - starts[old_record], np.append(new_starts[1:], total) - new_starts
    program = limits.searchsorted(new_starts, "right")  # the number of limits up to the record's start
    return _part(records.pick(old_record), sides, inside, count), program


def _summed(program: Array, nbytes: Array, programs: int) -> Array:
    """Return the bytes of every program; exact up to 2**53."""
    return np.bincount(program, nbytes, programs).astype(np.int64)


def _kind(unit: Array, sides: _Sides) -> Array:
    """Return the number of a unit's kind, the widest first."""
    if not sides.is_bits:
        return (unit < sides.widest).astype(np.int64)
    return 4 - np.array([1, 2, 4, 8]).searchsorted(unit)  # units of 16, 8, 4, 2, 1 bytes are kinds 0 to 4


def _words(records: _Records, sides: _Sides, kind: Array) -> tuple[Array, Array]:
    """Pack the records, and the further parts of each, as ``segment_kernel`` has them; ``joined`` fills in words 5."""
    unit, has_rows, padding = records.unit, records.has_rows, records.tensor < 0
    # The kernel multiplies by ``magic`` and shifts by 31 instead of a division by the row; 0 keeps a record in row 0.
    row = np.where(has_rows, records.row // unit, 1)
    magic = np.where(has_rows, ((1 << 31) + row - 1) // row, 0)
    gap = np.where(has_rows, (records.stride - records.row) // unit, 0)
    gaps = np.where(has_rows[:, None], (records.wire_stride - records.row[:, None]) // unit[:, None], 0)
    # The docstring of ``segment_kernel`` lists the bits of words 1, 2 and 3.
    place, sizes = records.wire[:, 0] | records.skip // unit << 48, records.count // unit | magic << 32
    code = gap << 32 | records.tensor.clip(min=0) << 4 | padding.astype(np.int64) << 3 | kind
    words = np.stack([records.at * sides.rows, place, sizes, code, gaps[:, 0], np.zeros_like(unit)], 1)
    # Word 4 has the gap of the first part. Further parts are relative to the first part in the wire.
    return words, np.stack([records.wire[:, 1:] - records.wire[:, :1], gaps[:, 1:]], 2)
