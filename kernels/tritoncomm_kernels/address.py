"""Kernels of pack and unpack: one address map between rows and a wire, walked in either direction.

A tile is BLOCK_ROWS rows by BLOCK_COLS columns of the row, and each program moves one tile. With equal shards the
columns run over all ranks, so reads stay contiguous for any run. With split sizes a tile belongs to one rank.
Every integer is int32, counts units of VEC elements and is never specialised; products widen to int64.

In the examples ``_`` is memory that the program does not write.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl

from tritoncomm_kernels.numerics import INTERPRETED, converted

__all__ = ["BY_VALUE", "TABLE_RANKS", "_copy_kernel", "_copy_split_kernel", "_copy_table_kernel", "_wire_order_kernel"]

BY_VALUE = 16  # up to this many ranks the split sizes are arguments of the kernel; beyond it a table holds them
TABLE_RANKS = 128  # ranks whose table entries a kernel compares in one step

_WALK = ["scale", "stride_0", "stride_1", "stride_2", "size_1", "size_2", "stride_element"]
_STARTS = [f"{name}_{w}" for name in ("start", "tile") for w in range(1, BY_VALUE)]

# Triton 3.6 lets the lanes of a warp walk down the rows unless it sees that neighbouring columns are neighbours in
# memory. Every lane then has a sector of its own, and the tile is transposed in shared memory. The hint
# ``max_contiguous(..., [1, 2])`` makes the lanes walk along a row. It widens no access, because pointers are known to
# be aligned to one element only. The hint stands beside the pointer arithmetic: on a function's argument it is lost.
# TODO: delete when Triton 3.7 is the oldest.
_WALKS_DOWN = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7))


@triton.jit
def _divide(a, b):
    """Return ``a // b`` of two numbers that are not negative; a signed division takes more instructions.

    Example:
        ``[0, 6, 7, 8]`` by 3 is ``[0, 2, 2, 2]``.
    """
    return (a.to(tl.uint32) // b.to(tl.uint32)).to(tl.int32)


@triton.jit
def _sum(a, b):
    """Add two partial sums of ``tl.reduce``.

    Example:
        ``tl.reduce([1, 1, 1, 0], 0, _sum)`` is 3.
    """
    return a + b


if INTERPRETED:  # the interpreter reduces by its own function at once, by any other one element by element
    _sum = getattr(tl.standard, "_sum_combine", _sum)


@triton.jit
def _row_offset(o, stride_0, stride_1, stride_2, size_1, size_2, OUTER_DIMS: tl.constexpr):
    """Return where row ``o`` starts, in units; rows are counted through the outer dims with the last one fastest.

    Example:
        Outer dims ``[2, 3]`` with strides 20 and 5 (``size_1`` is 3): rows ``[0, 1, 2, 3]`` start at
        ``[0, 5, 10, 20]``.
    """
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
def _in_rows(
    rows_ptr, o, column, element, stride_0, stride_1, stride_2, size_1, size_2, stride_element,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr,
):  # fmt: skip
    """Return pointers to element ``element`` of unit ``column`` of row ``o``, for a tile of rows by columns.

    Example:
        Units of 2 elements (VEC 2), rows 3 units apart. Rows ``[[0], [1]]``, units ``[[0, 0, 1, 1]]`` and elements
        ``[[0, 1, 0, 1]]`` are at ``[[0, 1, 2, 3], [6, 7, 8, 9]]``, counted in elements.
    """
    offset = _row_offset(o, stride_0, stride_1, stride_2, size_1, size_2, OUTER_DIMS)
    if STRIDED:
        columns = column.to(tl.int64) * stride_element
    else:
        columns = column.to(tl.int64)
    if VEC == 1 or STRIDED:  # two additions take fewer registers than one sum if accesses are narrow, else more
        rows_ptr += offset * VEC
        rows_ptr += columns * VEC + element
    else:
        rows_ptr += (offset + column) * VEC + element
    if STRIDED and VEC == 1 and column.shape[1] > 1 and _WALKS_DOWN:  # the hint keeps lanes along rows, see there
        rows_ptr = tl.max_contiguous(rows_ptr, [1, 2])
    return rows_ptr


@triton.jit
def _move(
    rows_ptr, wire_ptr, in_row, in_wire, scale, UNPACK: tl.constexpr, WIDE: tl.constexpr, HAS_SCALE: tl.constexpr,
    ACCUMULATE: tl.constexpr, EVICT_FIRST: tl.constexpr,
):  # fmt: skip
    """Copy one tile from rows to wire, with zeros past the end of a row; with UNPACK from wire to rows.

    With EVICT_FIRST the elements read leave the caches first: only the elements written are read again soon.

    Example:
        Four columns, of which the row has three. Pack of rows ``[5, 6, 7, 8]`` writes the wire ``[5, 6, 7, 0]``.
        Unpack of that wire writes the rows ``[5, 6, 7, _]``.
    """
    if UNPACK:
        x = tl.load(wire_ptr, mask=in_row, eviction_policy="evict_first" if EVICT_FIRST else "")
        x = converted(x, scale, rows_ptr, in_row, rows_ptr.dtype.element_ty, WIDE, HAS_SCALE, ACCUMULATE)
        tl.store(rows_ptr, x, mask=in_row)
    else:
        x = tl.load(rows_ptr, mask=in_row, other=0, eviction_policy="evict_first" if EVICT_FIRST else "")
        x = converted(x, scale, wire_ptr, in_wire, wire_ptr.dtype.element_ty, WIDE, HAS_SCALE, ACCUMULATE=False)
        if HAS_SCALE:  # an infinite scale makes NaN of the zeros that the masked load returns
            x = tl.where(in_row, x, 0)
        tl.store(wire_ptr, x, mask=in_wire)


@triton.jit(do_not_specialize=[*_WALK, "stride_rank", "outer", "row", "run", "cols", "blocks"])
def _copy_kernel(
    rows_ptr, wire_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, stride_rank: tl.int32, outer: tl.int32, row: tl.int32, run: tl.int32, cols: tl.int32,
    blocks: tl.int32,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, UNPACK: tl.constexpr, WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr, EVICT_FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of ``rows[o, w*run + k] <-> wire[w, o, k]``; ``blocks`` tiles hold the ``cols`` units of a row.

    Example:
        Pack of one row ``[0, 1, 2, 3, 4]`` for 2 ranks: ``row`` 5, ``run`` 3, ``cols`` 6, BLOCK_COLS 4, ``blocks`` 2.
        Program 0 reads columns 0 to 3 and writes the wire ``[0, 1, 2, 3, _, _]``.
        Program 1 reads column 4, past which the row ends, and writes ``[_, _, _, _, 4, 0]``.
    """
    pid = tl.program_id(0)
    row_block = _divide(pid, blocks)
    column_block = pid - row_block * blocks
    o = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    column, element = column_block * (BLOCK_COLS // VEC) + lane // VEC, lane % VEC
    w = _divide(column, run)
    in_row, in_wire = (o < outer) & (column < row), (o < outer) & (column < cols)
    # Rank w's block starts ``w * stride_rank`` units into the wire, and ``k`` is the column in a row of the block.
    k = column - w * run
    wire_ptr += (o.to(tl.int64) * run + (w.to(tl.int64) * stride_rank + k)) * VEC + element
    if VEC == 1 and BLOCK_COLS > 1 and _WALKS_DOWN:  # the hint keeps lanes along rows, see there
        wire_ptr = tl.max_contiguous(wire_ptr, [1, 2])
    rows_ptr = _in_rows(
        rows_ptr, o, column, element, stride_0, stride_1, stride_2, size_1, size_2, stride_element, VEC, OUTER_DIMS,
        STRIDED,
    )  # fmt: skip
    _move(rows_ptr, wire_ptr, in_row, in_wire, scale, UNPACK, WIDE, HAS_SCALE, ACCUMULATE, EVICT_FIRST)


@triton.jit(do_not_specialize=[*_WALK, "stride_rank", "flat", "row", "run", "world"])
def _wire_order_kernel(
    rows_ptr, wire_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, stride_rank: tl.int32, flat: tl.int32, row: tl.int32, run: tl.int32, world: tl.int32,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, UNPACK: tl.constexpr, WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr, EVICT_FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of ``rows[o, w*run + k] <-> wire[w, o, k]`` in the order of the wire.

    The ``flat`` units of a rank's block follow each other, whatever their row, so that every 32-byte sector of the wire
    is written whole. In the rows two runs may share a sector, which is then read twice. BLOCK_ROWS is 1.

    Example:
        Pack of rows ``[[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]`` for 2 ranks with BLOCK_COLS 4: ``run`` 3,
        ``flat`` 6. Program 0 (rank 0) writes the wire ``[0, 1, 2, 10, _, _, _, _, _, _, _, _]``.
        Program 1 (rank 1) writes ``[_, _, _, _, _, _, 3, 4, 5, 13, _, _]``.
        Program 2 (rank 0) writes ``[_, _, _, _, 11, 12, _, _, _, _, _, _]``.
    """
    # Ranks are the fastest, so that all that share a sector of the rows read it at about the same time.
    pid = tl.program_id(0)
    tile = _divide(pid, world)
    w = pid - tile * world
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    unit, element = tile * (BLOCK_COLS // VEC) + lane // VEC, lane % VEC
    o = _divide(unit, run)
    column = w * run + (unit - o * run)
    in_wire = unit < flat
    in_row = in_wire & (column < row)
    wire_ptr += (w.to(tl.int64) * stride_rank + unit) * VEC + element
    if VEC == 1 and BLOCK_COLS > 1 and _WALKS_DOWN:  # the hint keeps lanes along rows, see there
        wire_ptr = tl.max_contiguous(wire_ptr, [1, 2])
    rows_ptr = _in_rows(
        rows_ptr, o, column, element, stride_0, stride_1, stride_2, size_1, size_2, stride_element, VEC, OUTER_DIMS,
        STRIDED,
    )  # fmt: skip
    _move(rows_ptr, wire_ptr, in_row, in_wire, scale, UNPACK, WIDE, HAS_SCALE, ACCUMULATE, EVICT_FIRST)


@triton.jit
def _copy_shard(
    rows_ptr, wire_ptr, scale, row_block, place, start, stop, stride_0, stride_1, stride_2, size_1, size_2,
    stride_element, outer, VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, UNPACK: tl.constexpr,
    WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr, EVICT_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy tile ``place`` of one rank's shard: units ``start`` to ``stop`` of every row.

    The shard begins at unit ``outer * start`` of the wire.

    Example:
        Pack of rows ``[[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]``, shard from 2 to 6, BLOCK_COLS 2. Tile 1 has
        columns 4 and 5. It writes the wire ``[_, _, _, _, _, _, 4, 5, _, _, 14, 15]``.
    """
    o = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    k, element = place * (BLOCK_COLS // VEC) + lane // VEC, lane % VEC
    run = stop - start
    mask = (o < outer) & (k < run)
    wire_ptr += (start.to(tl.int64) * outer + o.to(tl.int64) * run + k) * VEC + element
    column = k + start
    rows_ptr = _in_rows(
        rows_ptr, o, column, element, stride_0, stride_1, stride_2, size_1, size_2, stride_element, VEC, OUTER_DIMS,
        STRIDED,
    )  # fmt: skip
    _move(rows_ptr, wire_ptr, mask, mask, scale, UNPACK, WIDE, HAS_SCALE, ACCUMULATE, EVICT_FIRST)


@triton.jit(do_not_specialize=[*_WALK, "outer", "row", "tiles", *_STARTS])
def _copy_split_kernel(
    rows_ptr, wire_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, outer: tl.int32, row: tl.int32, tiles: tl.int32,
    start_1: tl.int32, start_2: tl.int32, start_3: tl.int32, start_4: tl.int32, start_5: tl.int32, start_6: tl.int32,
    start_7: tl.int32, start_8: tl.int32, start_9: tl.int32, start_10: tl.int32, start_11: tl.int32,
    start_12: tl.int32, start_13: tl.int32, start_14: tl.int32, start_15: tl.int32,
    tile_1: tl.int32, tile_2: tl.int32, tile_3: tl.int32, tile_4: tl.int32, tile_5: tl.int32, tile_6: tl.int32,
    tile_7: tl.int32, tile_8: tl.int32, tile_9: tl.int32, tile_10: tl.int32, tile_11: tl.int32, tile_12: tl.int32,
    tile_13: tl.int32, tile_14: tl.int32, tile_15: tl.int32,
    RANKS: tl.constexpr, VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, UNPACK: tl.constexpr,
    WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr, EVICT_FIRST: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of uneven shards; starts and first tiles of up to RANKS ranks are arguments.

    Example:
        Pack of rows ``[[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]`` by sizes 2, 0, 4 with BLOCK_COLS 2: 3 ``tiles``.
        Ranks 1 and 2 start at ``start_1 = start_2 = 2`` with tile 1, absent ranks at 6 with tile 3.
        Program 0 (rank 0) writes the wire ``[0, 1, 10, 11, _, _, _, _, _, _, _, _]``.
        Program 1 (rank 2) writes ``[_, _, _, _, 2, 3, _, _, 12, 13, _, _]``.
        Program 2 (rank 2) writes ``[_, _, _, _, _, _, 4, 5, _, _, 14, 15]``.
    """
    # Sizes as arguments reach the kernel without a copy to the device, so a call with new sizes needs no table.
    # start_w is the first unit of rank w in a row, and tile_w is its first tile; rank 0 has 0 for both, so that index i
    # of both tuples is of rank i + 1.
    starts = (
        start_1, start_2, start_3, start_4, start_5, start_6, start_7, start_8, start_9, start_10, start_11, start_12,
        start_13, start_14, start_15, row,
    )  # fmt: skip
    firsts = (
        tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12, tile_13,
        tile_14, tile_15,
    )  # fmt: skip
    pid = tl.program_id(0)
    row_block = _divide(pid, tiles)
    tile = pid - row_block * tiles
    first, start, stop = 0 * tile, 0 * tile, 0 * tile + start_1  # rank 0, as integers of the tile's type
    # The last rank whose first tile is not after this one has it: a rank without units shares its first tile with the
    # next rank.
    for i in tl.static_range(RANKS - 1):
        has_begun = tile >= firsts[i]
        first = tl.where(has_begun, firsts[i], first)
        start = tl.where(has_begun, starts[i], start)
        stop = tl.where(has_begun, starts[i + 1], stop)
    _copy_shard(
        rows_ptr, wire_ptr, scale, row_block, tile - first, start, stop, stride_0, stride_1, stride_2, size_1, size_2,
        stride_element, outer, VEC, OUTER_DIMS, STRIDED, UNPACK, WIDE, HAS_SCALE, ACCUMULATE, EVICT_FIRST, BLOCK_ROWS,
        BLOCK_COLS,
    )  # fmt: skip


@triton.jit(do_not_specialize=[*_WALK, "outer", "tiles"])
def _copy_table_kernel(
    rows_ptr, wire_ptr, table_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, outer: tl.int32, tiles: tl.int32,
    STEPS: tl.constexpr, RANKS: tl.constexpr, VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr,
    UNPACK: tl.constexpr, WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr,
    EVICT_FIRST: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy one tile of uneven shards by a table: ``STEPS * RANKS`` first tiles, the ranks' starts, the row's end.

    A rank without an entry of its own has a first tile that no program reaches, 2**31 - 1.

    Example:
        Sizes 2, 0, 4 as in ``_copy_split_kernel`` with RANKS 4: the table is ``[0, 1, 1, 2147483647, 0, 2, 2, 6]``.
        Program 1 finds 3 first tiles of at most 1, so it takes rank 2, tile 1 - 1 = 0, units 2 to 6.
        It writes the wire ``[_, _, _, _, 2, 3, _, _, 12, 13, _, _]``.
    """
    pid = tl.program_id(0)
    row_block = _divide(pid, tiles)
    tile = pid - row_block * tiles
    rank = tl.arange(0, RANKS)
    # Each step compares the first tiles of RANKS ranks; the number of tiles that are not after this one is the rank
    # plus 1.
    begun = (tl.load(table_ptr + rank) <= tile).to(tl.int32)
    for step in tl.static_range(1, STEPS):
        begun += (tl.load(table_ptr + step * RANKS + rank) <= tile).to(tl.int32)
    w = tl.reduce(begun, 0, _sum) - 1
    first = tl.load(table_ptr + w)
    starts_ptr = table_ptr + STEPS * RANKS
    start, stop = tl.load(starts_ptr + w), tl.load(starts_ptr + w + 1)
    _copy_shard(
        rows_ptr, wire_ptr, scale, row_block, tile - first, start, stop, stride_0, stride_1, stride_2, size_1, size_2,
        stride_element, outer, VEC, OUTER_DIMS, STRIDED, UNPACK, WIDE, HAS_SCALE, ACCUMULATE, EVICT_FIRST, BLOCK_ROWS,
        BLOCK_COLS,
    )  # fmt: skip
