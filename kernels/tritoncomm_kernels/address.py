"""The kernels of pack and unpack: one address map, walked in either direction.

A tile is BLOCK_ROWS rows by BLOCK_COLS columns of the row; columns run over all ranks, so reads stay contiguous for any
run. Every integer is int32 in units of VEC elements and never specialised; products widen to int64.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from tritoncomm_kernels.numerics import multiply, narrow, widen

__all__ = ["_pack_kernel", "_unpack_kernel"]

_NAMES = [
    *("scale", "stride_0", "stride_1", "stride_2", "size_1", "size_2", "stride_element", "stride_rank"),
    *("outer", "row", "run", "cols", "blocks"),
]


@triton.jit
def _divide(a, b):
    """``a // b`` where neither is negative: a signed division takes more instructions to get the signs right."""
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _row_offset(o, stride_0, stride_1, stride_2, size_1, size_2, OUTER_DIMS: tl.constexpr):
    """Where row ``o`` starts, in units; the outer dims are walked with the last one fastest."""
    if OUTER_DIMS == 1:
        offset = o.to(tl.int64) * stride_0
    elif OUTER_DIMS == 2:
        o0 = _divide(o, size_1)
        offset = o0.to(tl.int64) * stride_0 + (o - o0 * size_1).to(tl.int64) * stride_1
    else:
        o01 = _divide(o, size_2)
        o0 = _divide(o01, size_1)
        offset = o0.to(tl.int64) * stride_0 + (o01 - o0 * size_1).to(tl.int64) * stride_1
        offset += (o - o01 * size_2).to(tl.int64) * stride_2
    return offset


@triton.jit
def _tile(
    rows_ptr, wire_ptr, starts_ptr, stride_0, stride_1, stride_2, size_1, size_2, stride_element, stride_rank,
    outer, row, run, cols, blocks,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Pointers and masks of one tile; everything is counted in units of VEC elements.

    With SPLIT the grid has a rank axis, ``run`` is the longest piece and ``starts_ptr`` holds where the pieces start.
    """
    pid = tl.program_id(0)
    if SPLIT:
        row_blocks = (outer + BLOCK_ROWS - 1) // BLOCK_ROWS
        tile = _divide(pid, blocks)
        w = _divide(tile, row_blocks)
        po = tile - w * row_blocks
        start = tl.load(starts_ptr + w).to(tl.int32)
        run = tl.load(starts_ptr + w + 1).to(tl.int32) - start
        pk = pid - tile * blocks
    else:
        po = _divide(pid, blocks)
        pk = pid - po * blocks
    o = po * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    c = pk * (BLOCK_COLS // VEC) + lane // VEC
    element = lane % VEC
    if SPLIT:
        in_row = (o < outer) & (c < run)
        in_wire = in_row
        wire_ptr += (start.to(tl.int64) * outer + o.to(tl.int64) * run + c) * VEC + element
        c += start
    else:
        w = _divide(c, run)
        in_row = (o < outer) & (c < row)
        in_wire = (o < outer) & (c < cols)
        wire_ptr += (o.to(tl.int64) * run + (w.to(tl.int64) * stride_rank + (c - w * run))) * VEC + element
    offset = _row_offset(o, stride_0, stride_1, stride_2, size_1, size_2, OUTER_DIMS)
    if STRIDED:
        rows_ptr += offset * VEC  # apart from the columns, which takes fewer registers
        rows_ptr += c.to(tl.int64) * stride_element * VEC + element
    else:
        rows_ptr += (offset + c) * VEC + element
    if VEC == 1 and BLOCK_COLS > 1:  # Triton 3.6 does not see that columns run along dim 1 and would walk down the rows
        wire_ptr = tl.max_contiguous(wire_ptr, [1, 2])
    return rows_ptr, wire_ptr, in_row, in_wire


@triton.jit(do_not_specialize=_NAMES)
def _pack_kernel(
    rows_ptr, wire_ptr, starts_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, stride_rank: tl.int32, outer: tl.int32, row: tl.int32, run: tl.int32,
    cols: tl.int32, blocks: tl.int32,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows_ptr, wire_ptr, in_row, in_wire = _tile(
        rows_ptr, wire_ptr, starts_ptr, stride_0, stride_1, stride_2, size_1, size_2, stride_element, stride_rank,
        outer, row, run, cols, blocks, VEC, OUTER_DIMS, STRIDED, SPLIT, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    x = tl.load(rows_ptr, mask=in_row, other=0)
    if WIDE is not None:
        x = widen(x, WIDE)
        if HAS_SCALE:
            x = tl.where(in_row, multiply(x, scale, WIDE), 0)
        x = narrow(x, wire_ptr.dtype.element_ty)
    tl.store(wire_ptr, x, mask=in_wire)


@triton.jit(do_not_specialize=_NAMES)
def _unpack_kernel(
    rows_ptr, wire_ptr, starts_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, stride_rank: tl.int32, outer: tl.int32, row: tl.int32, run: tl.int32,
    cols: tl.int32, blocks: tl.int32,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows_ptr, wire_ptr, in_row, _ = _tile(
        rows_ptr, wire_ptr, starts_ptr, stride_0, stride_1, stride_2, size_1, size_2, stride_element, stride_rank,
        outer, row, run, cols, blocks, VEC, OUTER_DIMS, STRIDED, SPLIT, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    x = tl.load(wire_ptr, mask=in_row)
    if WIDE is not None:
        x = widen(x, WIDE)
        if HAS_SCALE:
            x = multiply(x, scale, WIDE)
        if ACCUMULATE:
            x = widen(tl.load(rows_ptr, mask=in_row), WIDE) + x
        x = narrow(x, rows_ptr.dtype.element_ty)
    tl.store(rows_ptr, x, mask=in_row)
