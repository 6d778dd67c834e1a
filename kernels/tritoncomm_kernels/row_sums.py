"""sum_rows, scale_rows and dot_rows: lists of rows by indices in device memory, as the experts of a token.

Each is a gradient of the other two, and ``scale_dot_rows`` does the last two at once. With lists of ``slots`` places,
weights ``w[list, slot]`` and rows y, of which each is in one place at most:

- ``sum_rows``: ``x[list] = w[list, 0] * y[index[list, 0]] + w[list, 1] * y[index[list, 1]] + ...``, in this order
- ``scale_rows``: ``y[j] = w[list, slot] * x[list]``, where ``pair[j] = list*slots + slot``
- ``dot_rows``: ``w[list, slot] = x[list] . y[j]``, likewise

No kernel adds atomically, and every order of addition is fixed: equal calls give equal bits.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false
# pyright: reportArgumentType=false

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.address import _divide
from tritoncomm_kernels.config import lanes_of, power_of_two
from tritoncomm_kernels.geometry import DOT_LANES, ListedRows, listed_rows
from tritoncomm_kernels.launch import INTERPRETED, TRITON_TYPE, Launch, RowsPlan, check_place, tile_of_rows
from tritoncomm_kernels.numerics import narrow, widen

__all__ = ["dot_rows", "scale_dot_rows", "scale_rows", "sum_rows"]

_DOT_THREADS = 128  # 16 bytes of bf16 each


@triton.jit(
    do_not_specialize=[
        "scale", "index_at", "weights_at", "limit", "stride_rows", "stride_out", "stride_weights", "count", "row",
        "blocks", "total", "behind", "stride_behind",
    ]
)  # fmt: skip
def _sum_rows_kernel(
    rows_ptr, out_ptr, scale, index_at: tl.int64, weights_at: tl.int64,
    limit: tl.int64, stride_rows: tl.int64, stride_out: tl.int64, stride_weights: tl.int64, count: tl.int32,
    row: tl.int32, blocks: tl.int32, total: tl.int64, behind: tl.int64, stride_behind: tl.int64,
    INDEX: tl.constexpr, SLOTS: tl.constexpr, HAS_WEIGHTS: tl.constexpr, HAS_BEHIND: tl.constexpr, WIDE: tl.constexpr,
    VEC: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Add up the rows of ``count`` lists, each of ``row`` units of VEC elements; an index of no row adds nothing.

    With HAS_BEHIND rows from ``limit`` to ``total`` are of another tensor, which starts ``behind`` units after
    ``rows_ptr``. ``scale`` is not read: a launch passes two pointers and a factor first.

    Example:
        Rows ``[[1.0, 2.0], [3.0, 4.0]]`` (``limit`` 2) by index ``[[1, 0], [-1, 1]]`` with weights
        ``[[1.0, 10.0], [9.0, 0.5]]``, BLOCK_ROWS 1, BLOCK_COLS 2.
        Program 0 writes ``[13.0, 24.0, _, _]``.
        Program 1 writes ``[_, _, 1.5, 2.0]``.
    """
    pid = tl.program_id(0)
    row_block = _divide(pid, blocks)
    column_block = pid - row_block * blocks
    i = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    unit, element = column_block * (BLOCK_COLS // VEC) + lane // VEC, lane % VEC
    in_lists, mask = i < count, (i < count) & (unit < row)
    index_ptr = index_at.to(tl.pointer_type(INDEX)) + i.to(tl.int64) * SLOTS
    weights_ptr = weights_at.to(tl.pointer_type(WIDE)) + i.to(tl.int64) * stride_weights
    acc = tl.full([BLOCK_ROWS, BLOCK_COLS], 0, WIDE)
    for slot in tl.static_range(SLOTS):
        source = tl.load(index_ptr + slot, mask=in_lists, other=-1).to(tl.int64)
        if HAS_BEHIND:  # one pointer for both: its alignment is known, and that of an integer is not
            is_row = (source >= 0) & (source < total)
            start = tl.where(source < limit, source * stride_rows, behind + (source - limit) * stride_behind)
            offset = (tl.where(is_row, start, 0) + unit) * VEC + element
        else:
            is_row = (source >= 0) & (source < limit)
            offset = (tl.where(is_row, source, 0) * stride_rows + unit) * VEC + element
        part = widen(tl.load(rows_ptr + offset, mask=mask & is_row, other=0), WIDE)
        if HAS_WEIGHTS:
            part *= tl.load(weights_ptr + slot, mask=in_lists & is_row, other=0)
        acc += part
    out_ptr += (i.to(tl.int64) * stride_out + unit) * VEC + element
    tl.store(out_ptr, narrow(acc, out_ptr.dtype.element_ty), mask=mask)


@triton.jit(
    do_not_specialize=[
        "scale", "pair_at", "weights_at", "limit", "stride_lists", "stride_out", "stride_weights", "count", "row",
        "blocks",
    ]
)  # fmt: skip
def _scale_rows_kernel(
    lists_ptr, out_ptr, scale, pair_at: tl.int64, weights_at: tl.int64,
    limit: tl.int64, stride_lists: tl.int64, stride_out: tl.int64, stride_weights: tl.int64, count: tl.int32,
    row: tl.int32, blocks: tl.int32,
    INDEX: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, BLOCK_ROWS: tl.constexpr,
    BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Write ``count`` rows, each of ``row`` units of VEC elements: the row of a pair's list times the pair's weight.

    Example:
        Lists' rows ``[[1.0, 2.0], [3.0, 4.0]]`` with weights ``[[1.0, 10.0], [9.0, 0.5]]`` (``limit`` 4) by pairs
        ``[3, -1, 1]``, BLOCK_ROWS 2, BLOCK_COLS 2.
        Program 0 writes ``[1.5, 2.0, 0.0, 0.0, _, _]``.
        Program 1 writes ``[_, _, _, _, 10.0, 20.0]``.
    """
    pid = tl.program_id(0)
    row_block = _divide(pid, blocks)
    column_block = pid - row_block * blocks
    i = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    unit, element = column_block * (BLOCK_COLS // VEC) + lane // VEC, lane % VEC
    pair = tl.load(pair_at.to(tl.pointer_type(INDEX)) + i, mask=i < count, other=-1).to(tl.int64)
    is_pair, mask = (pair >= 0) & (pair < limit), (i < count) & (unit < row)
    pair = tl.where(is_pair, pair, 0)
    source = pair // SLOTS
    weights_ptr = weights_at.to(tl.pointer_type(WIDE)) + source * stride_weights + (pair - source * SLOTS)
    x = widen(tl.load(lists_ptr + (source * stride_lists + unit) * VEC + element, mask=mask & is_pair, other=0), WIDE)
    x *= tl.load(weights_ptr, mask=is_pair, other=0)
    out_ptr += (i.to(tl.int64) * stride_out + unit) * VEC + element
    tl.store(out_ptr, narrow(x, out_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _add(a, b):
    """Add two values of ``tl.reduce``.

    Example:
        ``tl.reduce([[1.0, 2.0], [3.0, 4.0]], 1, _add)`` is ``[3.0, 7.0]``.
    """
    return a + b


@triton.jit
def _folded(x, LANES: tl.constexpr):
    """Add up LANES values, a power of two: each even one and its neighbour, and so on with the sums.

    Example:
        ``[1.0, 2.0, 3.0, 4.0]`` with LANES 4 is ``[3.0, 7.0]``, then ``[10.0]``.
    """
    # tl.reduce leaves the order to the compiler, so that it gets two values at a time.
    if LANES > 1:
        x = _folded(tl.reduce(tl.reshape(x, [LANES // 2, 2]), 1, _add), LANES // 2)
    return x


@triton.jit(do_not_specialize=["scale", "pair_at", "out_at", "limit", "stride_lists", "stride_rows", "row"])
def _dot_rows_kernel(
    lists_ptr, rows_ptr, scale, pair_at: tl.int64, out_at: tl.int64,
    limit: tl.int64, stride_lists: tl.int64, stride_rows: tl.int64, row: tl.int32,
    INDEX: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the dot product of one row, of ``row`` units of VEC elements, with the row of its pair's list.

    Example:
        Lists' rows ``[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]`` and rows ``[[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]]`` by pairs
        ``[3, 0]`` of 2 slots (``limit`` 4), LANES 2.
        Program 0 writes ``[_, _, _, 10.0]``.
        Program 1 writes ``[6.0, _, _, _]``.
    """
    j = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_at.to(tl.pointer_type(INDEX)) + j).to(tl.int64)
    if (pair >= 0) & (pair < limit):
        lane = tl.arange(0, LANES)
        x_ptr = lists_ptr + (pair // SLOTS * stride_lists) * VEC + lane
        y_ptr = rows_ptr + (j * stride_rows) * VEC + lane
        acc = tl.full([LANES], 0, WIDE)
        for block in range((row * VEC + LANES - 1) // LANES):
            # By units: a mask by element would make every access as narrow as an element.
            mask = block * (LANES // VEC) + lane // VEC < row
            x = widen(tl.load(x_ptr + block * LANES, mask=mask, other=0), WIDE)
            acc += x * widen(tl.load(y_ptr + block * LANES, mask=mask, other=0), WIDE)
        tl.store(out_at.to(tl.pointer_type(WIDE)) + pair + tl.arange(0, 1), _folded(acc, LANES))


@triton.jit(
    do_not_specialize=[
        "scale", "pair_at", "out_at", "weights_at", "limit", "stride_lists", "stride_rows", "stride_weights", "row",
        "scaled", "stride_scaled",
    ]
)  # fmt: skip
def _scale_dot_rows_kernel(
    lists_ptr, rows_ptr, scale, pair_at: tl.int64, out_at: tl.int64, weights_at: tl.int64,
    limit: tl.int64, stride_lists: tl.int64, stride_rows: tl.int64, stride_weights: tl.int64, row: tl.int32,
    scaled: tl.int64, stride_scaled: tl.int64,
    INDEX: tl.constexpr, SLOTS: tl.constexpr, WIDE: tl.constexpr, VEC: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Write the dot product of row j with the row of its pair's list, and the list's row times the pair's weight.

    Program j does row j. The scaled rows start ``scaled`` units after ``rows_ptr``.

    Example:
        Lists' rows ``[[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]`` with weights ``[[1.0, 10.0], [9.0, 0.5]]`` and rows
        ``[[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]]`` by pairs ``[3, 0, -1]``: dot products are ``[[6.0, _],
        [_, 10.0]]``, scaled rows are ``[[2.0, 2.5, 3.0], [1.0, 2.0, 3.0], [0.0, 0.0, 0.0]]``.
    """
    j = tl.program_id(0).to(tl.int64)
    pair = tl.load(pair_at.to(tl.pointer_type(INDEX)) + j).to(tl.int64)
    is_pair = (pair >= 0) & (pair < limit)
    pair = tl.where(is_pair, pair, 0)
    list_index = pair // SLOTS
    lane = tl.arange(0, LANES)
    weights_ptr = weights_at.to(tl.pointer_type(WIDE)) + list_index * stride_weights + (pair - list_index * SLOTS)
    weight = tl.load(weights_ptr, mask=is_pair, other=0)
    x_ptr, y_ptr = lists_ptr + (list_index * stride_lists) * VEC + lane, rows_ptr + (j * stride_rows) * VEC + lane
    scaled_ptr = rows_ptr + (scaled + j * stride_scaled) * VEC + lane
    acc = tl.full([LANES], 0, WIDE)
    for block in range((row * VEC + LANES - 1) // LANES):
        # By units: a mask by element would make every access as narrow as an element.
        mask = block * (LANES // VEC) + lane // VEC < row
        x = widen(tl.load(x_ptr + block * LANES, mask=mask & is_pair, other=0), WIDE)
        acc += x * widen(tl.load(y_ptr + block * LANES, mask=mask & is_pair, other=0), WIDE)
        tl.store(scaled_ptr + block * LANES, narrow(x * weight, rows_ptr.dtype.element_ty), mask=mask)
    if is_pair:  # the sum is a tensor of one element, so the pointer is one, too
        tl.store(out_at.to(tl.pointer_type(WIDE)) + pair + tl.arange(0, 1), _folded(acc, LANES))


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None, out: Tensor, behind: Tensor | None = None) -> int:
    """Add up rows by lists of indices: ``out[i] = w[i, 0] * x[index[i, 0]] + w[i, 1] * x[index[i, 1]] + ...``.

    The sum is fp32 (fp64 if either side is fp64), from +0 in the order of the list, rounded once at the store. An index
    that is no row of ``x``, negative ones included, adds nothing and reads nothing. The indices are read on the device.

    Args:
        x: ``[rows, row]``, every row contiguous, any stride between rows.
        index: ``[lists, slots]``, contiguous, int64 or int32.
        weights: ``[lists, slots]`` in the type of the sum, every list contiguous; None for 1.
        out: ``[lists, row]``, every row contiguous, not in the memory of ``x``.
        behind: ``[others, row]`` of the dtype of ``x``, every row contiguous: rows that the index counts after those
            of ``x``.

    Returns:
        Bytes read plus bytes written, as if every index were a row.

    Raises:
        ValueError: the shapes do not fit, rows are not contiguous, two devices, a lazy negative view.
        TypeError: two dtypes of rows, a dtype without arithmetic here, or an index that is neither int64 nor int32.
        TooLargeError: 2**31 rows or units of a row, or nearly that.

    Example:
        Rows ``[[1, 2], [3, 4]]`` by index ``[[1, 0], [-1, 1]]`` and weights ``[[1, 10], [9, 0.5]]`` are ``[[13, 24],
        [1.5, 2]]``.

    Traffic: reads index, weights and every indexed row once, writes ``out`` once.
    """
    lists = listed_rows("sum_rows", rows=x, totals=out, index=index, weights=weights, slots=index, behind=behind)
    limit, count = lists.rows, lists.lists
    if count and lists.row:
        addressed = index, index if weights is None else weights  # without weights the second is not read
        _run("sum_rows", addressed, lists, (x, out), (limit, count), weights, behind)
    nbytes = index.numel() * (lists.row * x.itemsize + index.itemsize) + out.nbytes
    return nbytes + (0 if weights is None else weights.nbytes)


def scale_rows(x: Tensor, pair: Tensor, weights: Tensor, out: Tensor) -> int:
    """Gather rows of lists times weights: ``out[j] = weights[i, s] * x[i]``, where ``pair[j] = i*slots + s``.

    The product is rounded once, from fp32 (fp64 if either side is fp64). A pair that is no place of ``weights``,
    negative ones included, gives a row of zeros. The pairs are read on the device.

    Args:
        x: ``[lists, row]``, every row contiguous, any stride between rows.
        pair: ``[rows]``, contiguous, int64 or int32.
        weights: ``[lists, slots]`` in the type of the product, every list contiguous.
        out: ``[rows, row]``, every row contiguous, not in the memory of ``x``.

    Returns:
        Bytes read plus bytes written, as if every pair were a place.

    Raises:
        ValueError, TypeError, TooLargeError: as ``sum_rows``.

    Example:
        Rows ``[[1, 2], [3, 4]]`` by pairs ``[3, -1, 1]`` and weights ``[[1, 10], [9, 0.5]]`` are ``[[1.5, 2], [0, 0],
        [10, 20]]``.

    Traffic: reads pairs, weights and rows once for every pair, writes ``out`` once.
    """
    lists = listed_rows("scale_rows", rows=out, totals=x, index=pair, weights=weights, slots=weights)
    limit, count = lists.lists * lists.slots, lists.rows
    if not limit:
        out.zero_()
    elif count and lists.row:
        _run("scale_rows", (pair, weights), lists, (x, out), (limit, count), weights)
    return count * (lists.row * (x.itemsize + out.itemsize) + pair.itemsize + weights.itemsize)


def dot_rows(x: Tensor, y: Tensor, pair: Tensor, out: Tensor) -> int:
    """Multiply rows with the rows of their lists: ``out[i, s] = x[i] . y[j]``, where ``pair[j] = i*slots + s``.

    Partial sum r of 1,024 adds up the products of elements r, r + 1024, ... in this order; then neighbours are added,
    and neighbours of those sums, and so on. A pair that is no place of ``out`` is skipped, and places of no pair stay.

    Args:
        x: ``[lists, row]``, every row contiguous, any stride between rows.
        y: ``[rows, row]``, likewise.
        pair: ``[rows]``, contiguous, int64 or int32.
        out: ``[lists, slots]``, contiguous, fp32 (fp64 if either side is fp64).

    Returns:
        Bytes read plus bytes written, as if every pair were a place.

    Raises:
        ValueError, TypeError, TooLargeError: as ``sum_rows``.

    Example:
        Rows ``[[1, 2, 3], [4, 5, 6]]`` and ``[[1, 0, 1], [1, 1, 1]]`` by pairs ``[3, 0]`` write ``out[1, 1] = 10`` and
        ``out[0, 0] = 6``.

    Traffic: reads pairs, and both rows once for every pair; writes a number for every pair.
    """
    # Places of products have the shape and the dtype that weights have, and are checked like them.
    lists = listed_rows("dot_rows", rows=y, totals=x, index=pair, weights=out, slots=out)
    if not out.is_contiguous():
        raise ValueError(f"dot_rows: out must be contiguous, not strided by {out.stride()}")
    if lists.rows and lists.row and out.numel():
        _run("dot_rows", (pair, out), lists, (x, y), limits=(out.numel(), lists.rows))
    elif not lists.row:
        out.view(-1)[pair[(pair >= 0) & (pair < out.numel())].long()] = 0
    return lists.rows * (lists.row * (x.itemsize + y.itemsize) + pair.itemsize + out.itemsize)


def scale_dot_rows(x: Tensor, y: Tensor, pair: Tensor, weights: Tensor, scaled: Tensor, out: Tensor) -> int:
    """Do ``scale_rows(x, pair, weights, scaled)`` and ``dot_rows(x, y, pair, out)`` at once, with their bits.

    Args:
        x: ``[lists, row]``, every row contiguous, any stride between rows.
        y: ``[rows, row]``, likewise.
        pair: ``[rows]``, contiguous, int64 or int32.
        weights: ``[lists, slots]``, as of ``scale_rows``, in the dtype of ``out``.
        scaled: ``[rows, row]`` of the dtype of ``y``, every row contiguous, not in the memory of ``x`` or ``y``.
        out: ``[lists, slots]``, as of ``dot_rows``.

    Returns:
        Bytes read plus bytes written, as if every pair were a place.

    Raises:
        ValueError, TypeError, TooLargeError: as ``sum_rows``.

    Traffic: reads pairs, weights and both rows once for every pair; writes a row and a number for every pair.
    """
    name = "scale_dot_rows"
    # Places of products have the shape and the dtype that weights have, and are checked like them.
    lists = listed_rows(name, rows=y, totals=x, index=pair, weights=out, slots=out)
    listed_rows(name, rows=scaled, totals=x, index=pair, weights=weights, slots=weights)
    if not out.is_contiguous() or scaled.dtype is not y.dtype:
        raise ValueError(f"{name}: out must be contiguous, not strided by {out.stride()}, and scaled rows of "
                         f"{y.dtype}, not {scaled.dtype}")  # fmt: skip
    if lists.rows and lists.row and out.numel():
        _run(name, (pair, out, weights), lists, (x, y), (out.numel(), lists.rows), weights, scaled)
    else:  # rows without elements, whose products are 0
        scaled.zero_()
        out.view(-1)[pair[(pair >= 0) & (pair < out.numel())].long()] = 0
    row_bytes = lists.row * (x.itemsize + 2 * y.itemsize) + pair.itemsize + out.itemsize + weights.itemsize
    return lists.rows * row_bytes


_KERNELS = {
    "scale_dot_rows": _scale_dot_rows_kernel,
    "sum_rows": _sum_rows_kernel,
    "scale_rows": _scale_rows_kernel,
    "dot_rows": _dot_rows_kernel,
}


def _run(
    name: str,
    addressed: Sequence[Tensor],
    lists: ListedRows,
    tensors: tuple[Tensor, Tensor],
    limits: tuple[int, int],
    weights: Tensor | None = None,
    beside: Tensor | None = None,
) -> None:
    """Launch one call.

    Args:
        addressed: tensors whose addresses are integers for the kernel, in its order; the first one is the index.
        tensors: first and second pointer of the kernel.
        limits: number of rows or places that an index may name, and number of lists or rows to write.
        beside: rows that the kernel reaches from the pointer to rows of their dtype.
    """
    first, second = tensors
    check_place(name, first, second, *addressed, *(() if beside is None else (beside,)))
    limit, count = limits
    strides = [_row_stride(x, lists.row) for x in tensors]
    distance = stride_beside = 0  # elements from the rows to those beside them, and from one of these to the next
    if beside is not None:
        rows = first if name == "sum_rows" else second
        distance = (beside.data_ptr() - rows.data_ptr()) // rows.itemsize
        stride_beside = _row_stride(beside, lists.row)
    # A unit divides the length of a row and all distances of rows, so that every row starts with a whole one.
    unit = math.gcd(_elements_per_access(first, second), lists.row, *strides, distance, stride_beside)
    types, shape = (first.dtype, second.dtype, lists.wide, addressed[0].dtype), (lists.slots, lists.row, unit)
    plan = _plan(name, first.get_device(), types, shape, power_of_two(count), (weights is not None, beside is not None))
    # A tensor without elements has no address, and nothing is read there.
    addresses = [x.data_ptr() or addressed[0].data_ptr() for x in addressed]
    row, stride_weights = lists.row // unit, 0 if weights is None else weights.stride(0)
    beside_units = distance // unit, stride_beside // unit
    numbers: tuple[int, ...] = (row,)  # the last arguments of each kernel
    if name == "sum_rows":
        total = limit + (0 if beside is None else beside.shape[0])
        numbers = stride_weights, count, row, plan.blocks, total, *beside_units
    elif name == "scale_rows":
        numbers = stride_weights, count, row, plan.blocks
    elif name == "scale_dot_rows":
        numbers = stride_weights, row, *beside_units
    numbers = *addresses, limit, strides[0] // unit, strides[1] // unit, *numbers
    scale = 1.0  # every launch has one, and these kernels do not read it
    plan.launch(first, second, scale, *numbers, grid=plan.grid(name, count, lists.row))


def _row_stride(x: Tensor, row: int) -> int:
    """Return the elements from one row of ``x`` to the next; of a single row its length."""
    return x.stride(0) if x.shape[0] > 1 else row


def _elements_per_access(first: Tensor, second: Tensor) -> int:
    """Return how many elements an access may have: 16 bytes of the smaller, or as many bytes as both are aligned to."""
    small, large = sorted((first.itemsize, second.itemsize))
    aligned = math.gcd((first.data_ptr() | second.data_ptr()) & 15 or 16, 16)  # bytes
    return 16 // small if aligned == 16 else max(aligned // large, 1)


@lru_cache(maxsize=1024)
def _plan(
    name: str,
    device: int,
    types: tuple[torch.dtype, ...],
    shape: tuple[int, int, int],
    count: int,
    has: tuple[bool, bool],
) -> RowsPlan:
    """Prepare calls over about ``count`` rows, a power of two: each number would need an entry of its own.

    Args:
        types: dtypes of what the two pointers point to, of the arithmetic, and of the index.
        shape: slots of a list, elements of a row, elements of a unit.
        has: whether there are weights, and rows of another tensor behind those of the first (``behind``).
    """
    kernel, (*pointers, wide, index), (slots, row, vec) = _KERNELS[name], types, shape
    small = min(dtype.itemsize for dtype in pointers)
    tile, lanes = tile_of_rows(vec * small, count, row * small), min(DOT_LANES, power_of_two(row))
    rows, cols, warps = tile.block_rows, max(tile.block_cols // small, vec), tile.num_warps
    if name in ("dot_rows", "scale_dot_rows"):
        rows, cols, warps = 1, row, _DOT_THREADS // lanes_of(device)
    elif name == "sum_rows" and not INTERPRETED:
        # A thread has a load for each slot in flight: eight of 16 bytes suffice for the memory's latency, and take a
        # third of the registers of a copy's tile. So a tile has one access of each thread.
        warps = 4
        tile_bytes = max(vec * small, 4) * warps * lanes_of(device)
        row_bytes = min(power_of_two(row * small), tile_bytes)
        rows, cols = max(min(tile_bytes // row_bytes, count), 1), max(row_bytes // small, vec)
    constants = {
        "INDEX": TRITON_TYPE[index], "SLOTS": slots, "HAS_WEIGHTS": has[0], "HAS_BEHIND": has[1],
        "WIDE": TRITON_TYPE[wide], "VEC": vec, "LANES": lanes, "BLOCK_ROWS": rows, "BLOCK_COLS": cols,
    }  # fmt: skip
    constants = {each: constants[each] for each in kernel.arg_names if each.isupper()}
    launch = Launch(kernel, device, 1, (pointers[0], pointers[1]), arguments=(), constants=constants, num_warps=warps)
    return RowsPlan(launch, rows, -(-row // cols))
