"""The kernel of gather_, scatter_ and copy_segments: a list of copies in device memory, as many for every program.

A record is four int64 or more: the byte offset from the tensor's address, ``byte offset in the wire | skip << 48``,
``units | magic << 32`` and ``gap << 32 | tensor << 4 | padding << 3 | kind``, where kind 0 has the widest units; then
the gap between rows in the wire, and ``index in the table | parts << 32`` of a list of further parts to be added up,
each ``byte offset from the first one, gap``. Unit i of a record is at unit ``i + (i + skip) // row * gap`` of either
side, with that side's gap, where the division is ``(i + skip) * magic >> 31``. Addresses of tensors are arguments, or
in a list on the device; where they are in pairs, the second is the address of that tensor's wire.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false

import triton
import triton.language as tl

from tritoncomm_kernels.numerics import converted, widen

__all__ = ["BY_VALUE", "_segments_kernel"]

BY_VALUE = 16  # tensors whose addresses are arguments of the kernel; those of more are in a list

_ADDRESSES = [f"tensor_{i}" for i in range(BY_VALUE)]


@triton.jit
def _walk(
    rows_at, wire_at, units, skip, magic, gap, wire_gap, parts_ptr, parts, readable, scale, ROWS: tl.constexpr,
    WIRE: tl.constexpr, VEC: tl.constexpr, BLOCK: tl.constexpr, WIDE: tl.constexpr, SUMMED: tl.constexpr,
    WORDS: tl.constexpr, STRIDED: tl.constexpr, SCATTER: tl.constexpr, PADDED: tl.constexpr, HAS_SCALE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """One record in blocks of BLOCK units of VEC elements; with more than one its addresses are multiples of 16."""
    rows_ptr, wire_ptr = rows_at.to(tl.pointer_type(ROWS)), wire_at.to(tl.pointer_type(WIRE))
    if VEC > 1:
        rows_ptr, wire_ptr = tl.multiple_of(rows_ptr, 16), tl.multiple_of(wire_ptr, 16)
    lane, element = tl.arange(0, BLOCK)[:, None], tl.arange(0, VEC)[None, :]
    for block in range((units + BLOCK - 1) // BLOCK):
        i = block * BLOCK + lane
        mask, offset, place = i < units, i.to(tl.int64), i.to(tl.int64)
        if STRIDED:
            r = ((i + skip).to(tl.uint32).to(tl.uint64) * magic.to(tl.uint32).to(tl.uint64)) >> 31
            r = r.to(tl.int32).to(tl.int64)
            offset += r * gap
            if WORDS > 4:
                place += r * wire_gap
        in_rows = rows_ptr + (offset * VEC + element)
        in_wire = wire_ptr + ((place if WORDS > 4 else i) * VEC + element)
        if SCATTER:
            x = tl.load(in_wire, mask=mask)
        elif PADDED:
            x = tl.load(in_rows, mask=i < readable, other=0)
        else:
            x = tl.load(in_rows, mask=mask)
        if SUMMED:
            x = widen(x, WIDE)
            part_ptr = parts_ptr
            for _ in range(parts):
                other_ptr = (wire_at + tl.load(part_ptr)).to(tl.pointer_type(WIRE))
                other = i.to(tl.int64)
                if STRIDED:
                    other += r * tl.load(part_ptr + 1)
                if VEC > 1:
                    other_ptr = tl.multiple_of(other_ptr, 16)
                x += widen(tl.load(other_ptr + (other * VEC + element), mask=mask), WIDE)
                part_ptr += 2
        if SCATTER:
            tl.store(in_rows, converted(x, scale, in_rows, mask, ROWS, WIDE, HAS_SCALE, ACCUMULATE), mask=mask)
        else:
            tl.store(in_wire, converted(x, scale, in_rows, mask, WIRE, WIDE, HAS_SCALE, False), mask=mask)


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

    Kind w of a record moves units of ``VEC[w]`` elements, ``BLOCK[w]`` at a time, from elements ``ROWS[w]`` of a
    tensor to ``WIRE[w]``, or back, by way of ``WIDE[w]``; the WIDTHS first kinds occur, and the parts of those from
    SUMS on are added up.
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
        rows_at, place = tl.load(record_ptr), tl.load(record_ptr + 1)
        sizes, kind = tl.load(record_ptr + 2), tl.load(record_ptr + 3)
        wire_gap, more = 0 * sizes, 0 * sizes
        if WORDS > 4:
            wire_gap = tl.load(record_ptr + 4)
        if WORDS > 5:
            more = tl.load(record_ptr + 5)
        record_ptr += WORDS
        wire_at, skip = place & 0xFFFFFFFFFFFF, (place >> 48).to(tl.int32)
        units, magic, gap, code = sizes.to(tl.int32), (sizes >> 32).to(tl.int32), kind >> 32, kind.to(tl.int32)
        readable, tensor = tl.where((code & 8) != 0, 0, units), (code >> 4) & 0xFFFFFFF
        if PAIRED:
            tensor *= 2
        else:
            wire_at += wire_ptr.to(tl.int64)
        if LISTED:
            rows_at += tl.load(list_ptr + tensor)
            if PAIRED:
                wire_at += tl.load(list_ptr + tensor + 1)
        else:
            address, paired = tensor_0, tensor_1
            for t in tl.static_range(1, 16):
                address = tl.where(tensor == t, addresses[t], address)
                if PAIRED:
                    paired = tl.where(tensor + 1 == t, addresses[t], paired)
            rows_at += address
            if PAIRED:
                wire_at += paired
        parts_ptr, parts = table_ptr + (more & 0xFFFFFFFF), (more >> 32).to(tl.int32)
        for w in tl.static_range(WIDTHS):
            if WIDTHS == 1 or (code & 7) == w:
                _walk(
                    rows_at, wire_at, units, skip, magic, gap, wire_gap, parts_ptr, parts, readable, scale, ROWS[w],
                    WIRE[w], VEC[w], BLOCK[w], WIDE[w], w >= SUMS, WORDS, STRIDED, SCATTER, PADDED, HAS_SCALE,
                    ACCUMULATE,
                )  # fmt: skip
