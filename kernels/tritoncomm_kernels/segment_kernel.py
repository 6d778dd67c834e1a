"""Kernel of gather_segments, scatter_segments and copy_segments: it copies the records of a table in device memory.

The table is int64 words: first records of P programs, R records of WORDS words each, lists of parts.
``segment_tiles._words`` packs the records, ``segment_tiles.joined`` places them, programs and parts;
``segment_copy`` launches with the table. A record has 4 words, 5 if rows have gaps in the wire, 6 if parts are added.

    word            bits   field      unit    written by  read by           content
    --------------  -----  ---------  ------  ----------  ----------------  ---------------------------------------
    starts
    p = 0 .. P-1    0-63   first      record  joined      _segments_kernel  number of the first record of program p
    P               0-63   R          record  joined      _segments_kernel  number of all records
    record r, at word P + 1 + r*WORDS
    0               0-63   rows_at    byte    _words      _segments_kernel  unit 0, from the address of its tensor
    1               0-47   wire_at    byte    _words      _segments_kernel  unit 0, from the wire (or the target)
    1               48-63  skip       unit    _words      _walk             units of the first row before the record
    2               0-31   units      unit    _words      _walk             length of the record
    2               32-63  magic      -       _words      _walk             ceil(2**31 / row); 0 without rows
    3               0-2    kind       index   joined      _segments_kernel  of VEC, BLOCK, ...; 0 has the widest unit
    3               3      padding    flag    _words      _walk             a gather writes zeros and reads nothing
    3               4-31   tensor     index   _words      _segments_kernel  of the address; of a pair of addresses
    3               32-63  gap        unit    _words      _walk             stride - row in the tensor, signed
    4 (WORDS > 4)   0-63   wire_gap   unit    _words      _walk             stride - row in the wire
    5 (WORDS > 5)   0-31   parts_at   word    joined      _walk             of the table: list of the further parts
    5 (WORDS > 5)   32-63  parts      part    joined      _walk             number of the further parts
    part k, at word parts_at + 2*k
    0               0-63   -          byte    _words      _walk             from the record's first part in the wire
    1               0-63   -          unit    _words      _walk             stride - row of this part in the wire

A unit is VEC[kind] elements. Unit i of a record is ``i + (i + skip) // row * gap`` units from unit 0 in the tensor, and
as far with ``wire_gap`` in the wire. The kernel divides by ``(i + skip) * magic >> 31``.
Addresses of tensors are arguments, or a list on the device. ``copy_segments`` has pairs: a tensor, then its target.

Example:
    ``Segments([(0, 1, 2, 3, 8, 0), (1, 0, 1, 2, 2, 8)], [torch.int8, torch.int16])`` is a gather of 2 rows of 3 bytes,
    8 bytes apart, and of 4 bytes. One program has both records. The words of the table, in hexadecimal::

        starts    0  2
        record 0  1  0  2aaaaaab00000006  500000004  # 6 units of 1 byte (kind 4), magic 2**31 / 3, gap 5, tensor 0
        record 1  0  8  1                 12         # 1 unit of 4 bytes (kind 2), no rows, tensor 1
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from tritoncomm_kernels.numerics import converted, widen

__all__ = ["BY_VALUE", "_segments_kernel"]

BY_VALUE = 16  # up to this many addresses are arguments of the kernel; more are in a list on the device

_ADDRESSES = [f"tensor_{i}" for i in range(BY_VALUE)]


@triton.jit
def _walk(
    rows_at, wire_at, units, skip, magic, gap, wire_gap, parts_ptr, parts, readable, scale, ROWS: tl.constexpr,
    WIRE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, SUMMED: tl.constexpr,
    WORDS: tl.constexpr, STRIDED: tl.constexpr, SCATTER: tl.constexpr, PADDED: tl.constexpr, HAS_SCALE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """Copy one record in blocks of BLOCK units of VEC elements; with VEC > 1 its addresses are multiples of 16.

    Example:
        Gather of 6 units of 1 byte: ``magic`` 715827883 (rows of 3), ``gap`` 5, no skip. Of a tensor ``0, 1, 2, ...``
        from byte 1 on it reads bytes 1 + ``[0, 1, 2, 8, 9, 10]`` and writes the wire ``[1, 2, 3, 9, 10, 11]``.
    """
    rows_ptr, wire_ptr = rows_at.to(tl.pointer_type(ROWS)), wire_at.to(tl.pointer_type(WIRE))
    if VEC > 1:
        rows_ptr, wire_ptr = tl.multiple_of(rows_ptr, 16), tl.multiple_of(wire_ptr, 16)
    lane, element = tl.arange(0, BLOCK)[:, None], tl.arange(0, VEC)[None, :]
    for block in range((units + BLOCK - 1) // BLOCK):
        i = block * BLOCK + lane
        # Units from the record's first unit: in the tensor, and in the wire where its rows have gaps.
        mask, offset, wire_place = i < units, i.to(tl.int64), i.to(tl.int64)
        if STRIDED:
            # Row of unit i, by a product instead of a division; exact below 2**31 units.
            r = ((i + skip).to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)) >> 31
            r = r.to(tl.int32).to(tl.int64)
            offset += r * gap
            if WORDS > 4:  # the wire has gaps between rows
                wire_place += r * wire_gap
        in_rows = rows_ptr + (offset * VEC + element)
        # Without gaps the offset stays an int32, which takes fewer registers.
        in_wire = wire_ptr + ((wire_place if WORDS > 4 else i) * VEC + element)
        if SCATTER:
            x = tl.load(in_wire, mask=mask)
        elif PADDED:  # ``readable`` is 0 in padding: zeros
            x = tl.load(in_rows, mask=i < readable, other=0)
        else:
            x = tl.load(in_rows, mask=mask)
        if SUMMED:
            x = widen(x, WIDE)
            part_ptr = parts_ptr  # two words a part: bytes from the first part, and the stride beyond a row
            for _ in range(parts):  # in the order of the table, so that sums have the same bits
                other_ptr = (wire_at + tl.load(part_ptr)).to(tl.pointer_type(WIRE))
                part_place = i.to(tl.int64)
                if STRIDED:
                    part_place += r * tl.load(part_ptr + 1)
                if VEC > 1:
                    other_ptr = tl.multiple_of(other_ptr, 16)
                x += widen(tl.load(other_ptr + (part_place * VEC + element), mask=mask), WIDE)
                part_ptr += 2
        if SCATTER:
            tl.store(in_rows, converted(x, scale, in_rows, mask, ROWS, WIDE, HAS_SCALE, ACCUMULATE), mask=mask)
        else:
            tl.store(in_wire, converted(x, scale, in_rows, mask, WIRE, WIDE, HAS_SCALE, ACCUMULATE=False), mask=mask)


@triton.jit(do_not_specialize=["scale", *_ADDRESSES])
def _segments_kernel(
    wire_ptr, list_ptr, table_ptr, scale,
    tensor_0: tl.int64, tensor_1: tl.int64, tensor_2: tl.int64, tensor_3: tl.int64, tensor_4: tl.int64,
    tensor_5: tl.int64, tensor_6: tl.int64, tensor_7: tl.int64, tensor_8: tl.int64, tensor_9: tl.int64,
    tensor_10: tl.int64, tensor_11: tl.int64, tensor_12: tl.int64, tensor_13: tl.int64, tensor_14: tl.int64,
    tensor_15: tl.int64,
    LISTED: tl.constexpr, WIDTHS: tl.constexpr, SUMS: tl.constexpr, WORDS: tl.constexpr, STRIDED: tl.constexpr,
    SCATTER: tl.constexpr, PADDED: tl.constexpr, ROWS: tl.constexpr, WIRE: tl.constexpr, WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """Copy the records of this program, from number ``table_ptr[program]`` up to the first one of the next program.

    A record of kind w moves units of ``VEC[w]`` elements, ``BLOCK[w]`` units at a time, from a tensor of dtype
    ``ROWS[w]`` to a wire of dtype ``WIRE[w]``, or back, with arithmetic in dtype ``WIDE[w]``. Kinds below WIDTHS occur;
    kinds from SUMS on add up parts.

    Example:
        The two records of the module's example, one for each of 2 programs: the starts are ``0, 1, 2``. The tensors
        are ``0, 1, 2, ...`` and ``[20, 21]``.
        Program 0 writes the wire ``[1, 2, 3, 9, 10, 11, _, _, _, _, _, _]``.
        Program 1 writes ``[_, _, _, _, _, _, _, _, 20, 0, 21, 0]``.
    """
    addresses = (
        tensor_0, tensor_1, tensor_2, tensor_3, tensor_4, tensor_5, tensor_6, tensor_7, tensor_8, tensor_9, tensor_10,
        tensor_11, tensor_12, tensor_13, tensor_14, tensor_15,
    )  # fmt: skip
    program = tl.program_id(0)
    first = tl.load(table_ptr + program)
    count = (tl.load(table_ptr + program + 1) - first).to(tl.int32)
    record_ptr = table_ptr + tl.num_programs(0) + 1 + first * WORDS
    for _ in range(count):
        # The words of a record, and the fields in their bits, as the module's table lays them out.
        rows_at, wire_word = tl.load(record_ptr), tl.load(record_ptr + 1)
        size_word, kind_word = tl.load(record_ptr + 2), tl.load(record_ptr + 3)
        wire_gap, part_list = 0 * size_word, 0 * size_word  # int64 zeros, where a record has no such words
        if WORDS > 4:
            wire_gap = tl.load(record_ptr + 4)
        if WORDS > 5:
            part_list = tl.load(record_ptr + 5)
        record_ptr += WORDS
        wire_at, skip = wire_word & 0xFFFFFFFFFFFF, (wire_word >> 48).to(tl.int32)
        units, magic = size_word.to(tl.int32), (size_word >> 32).to(tl.int32)
        gap, low_bits = kind_word >> 32, kind_word.to(tl.int32)
        kind, is_padding, tensor = low_bits & 7, (low_bits & 8) != 0, (low_bits >> 4) & 0xFFFFFFF
        readable = tl.where(is_padding, 0, units)
        # Byte offsets become addresses: ``rows_at`` in the tensor, ``wire_at`` in the wire. With PAIRED the tensor with
        # the next index is the target, which is there instead of the wire.
        if PAIRED:
            tensor *= 2
        else:
            wire_at += wire_ptr.to(tl.int64)
        if LISTED:
            rows_at += tl.load(list_ptr + tensor)
            if PAIRED:
                wire_at += tl.load(list_ptr + tensor + 1)
        else:
            address, paired = tensor_0, tensor_1  # a tuple takes no index that is known at run time
            for t in tl.static_range(1, 16):
                address = tl.where(tensor == t, addresses[t], address)
                if PAIRED:
                    paired = tl.where(tensor + 1 == t, addresses[t], paired)
            rows_at += address
            if PAIRED:
                wire_at += paired
        parts_ptr, parts = table_ptr + (part_list & 0xFFFFFFFF), (part_list >> 32).to(tl.int32)
        for w in tl.static_range(WIDTHS):
            if WIDTHS == 1 or kind == w:
                _walk(
                    rows_at, wire_at, units, skip, magic, gap, wire_gap, parts_ptr, parts, readable, scale, ROWS[w],
                    WIRE[w], VEC[w], BLOCK[w], WIDE[w], w >= SUMS, WORDS, STRIDED, SCATTER, PADDED, HAS_SCALE,
                    ACCUMULATE,
                )  # fmt: skip
