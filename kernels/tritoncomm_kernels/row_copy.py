"""gather_rows and scatter_rows: rows of a tensor by indices in device memory, as of a permutation of tokens."""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.address import _divide
from tritoncomm_kernels.config import power_of_two
from tritoncomm_kernels.geometry import indexed_rows
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, RowsPlan, check_place, tile_of_rows

__all__ = ["gather_rows", "scatter_rows"]

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


@triton.jit(do_not_specialize=["scale", "index_at", "limit", "stride_far", "stride_near", "count", "row", "blocks"])
def _rows_kernel(
    far_ptr, near_ptr, scale, index_at: tl.int64,
    limit: tl.int64, stride_far: tl.int64, stride_near: tl.int64, count: tl.int32, row: tl.int32, blocks: tl.int32,
    INDEX: tl.constexpr, SCATTER: tl.constexpr, VEC: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Copy ``near[i] = far[index[i]]`` for ``count`` rows of ``row`` units, zeros for an index of no row; or back.

    Example:
        Gather from rows ``[[1, 2], [3, 4]]`` (``limit`` 2) by ``[1, -1, 1]`` with BLOCK_ROWS 2, BLOCK_COLS 2.
        Program 0 reads the first two indices and writes ``[3, 4, 0, 0, _, _]``.
        Program 1 reads the third index and writes ``[_, _, _, _, 3, 4]``.
        Scatter of rows ``[[5, 6], [7, 8], [9, 10]]`` by ``[1, -1, 0]``: program 0 writes ``[_, _, 5, 6]``, program 1
        writes ``[9, 10, _, _]``.
    """
    pid = tl.program_id(0)
    row_block = _divide(pid, blocks)
    column_block = pid - row_block * blocks
    near_row = row_block * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    unit, element = column_block * (BLOCK_COLS // VEC) + lane // VEC, lane % VEC
    far_row = tl.load(index_at.to(tl.pointer_type(INDEX)) + near_row, mask=near_row < count, other=-1).to(tl.int64)
    is_row = (far_row >= 0) & (far_row < limit)
    mask = (near_row < count) & (unit < row)
    far_ptr += (tl.where(is_row, far_row, 0) * stride_far + unit) * VEC + element
    near_ptr += (near_row.to(tl.int64) * stride_near + unit) * VEC + element
    if SCATTER:
        tl.store(far_ptr, tl.load(near_ptr, mask=mask & is_row), mask=mask & is_row)
    else:
        tl.store(near_ptr, tl.load(far_ptr, mask=mask & is_row, other=0), mask=mask)


def gather_rows(x: Tensor, index: Tensor, out: Tensor) -> int:
    """Copy rows by index: ``out[i] = x[index[i]]``; no bit changes.

    The index is read on the device: nothing waits for it. An index that is no row of ``x``, negative ones included,
    reads nothing and gives a row of zeros: padding of a capacity, say, is index -1.

    Args:
        x: ``[n, *row]``, every row contiguous, any stride between rows.
        index: ``[m]``, contiguous, int64 or int32, on the device of ``x``; rows may occur several times.
        out: ``[m, *row]`` of the dtype of ``x``, every row contiguous, not in the memory of ``x``.

    Returns:
        Bytes read plus bytes written, as if every index were a row.

    Raises:
        ValueError: the shapes do not fit, rows are not contiguous or overlap where they are written, two devices, a
            lazy conjugate or negative view.
        TypeError: two dtypes, or an index that is neither int64 nor int32.
        TooLargeError: 2**31 rows or units of a row, or nearly that.

    Example:
        Rows ``[[1, 2], [3, 4]]`` by ``[1, -1, 1]`` are ``[[3, 4], [0, 0], [3, 4]]``.

    Traffic: reads the index and every indexed row once, writes ``out`` once.
    """
    return _run("gather_rows", index, x, out)


def scatter_rows(x: Tensor, index: Tensor, out: Tensor) -> int:
    """Copy rows to their index: ``out[index[i]] = x[i]``, the inverse of ``gather_rows`` by a permutation.

    An index that is no row of ``out`` is left out, and rows of ``out`` that no index names stay as they are. Where two
    indices are equal, one of their rows remains.

    Args:
        x: ``[m, *row]``, every row contiguous, any stride between rows.
        index: ``[m]``, contiguous, int64 or int32, on the device of ``x``.
        out: ``[n, *row]`` of the dtype of ``x``, every row contiguous, not in the memory of ``x``.

    Returns:
        Bytes read plus bytes written, as if every index were a row.

    Raises:
        ValueError, TypeError, TooLargeError: as ``gather_rows``.

    Example:
        Rows ``[[1, 2], [3, 4]]`` by ``[2, 0]`` into zeros are ``[[3, 4], [0, 0], [1, 2]]``.

    Traffic: reads the index and ``x`` once, writes every indexed row once.
    """
    return _run("scatter_rows", index, x, out)


def _run(name: str, index: Tensor, x: Tensor, out: Tensor) -> int:
    """Launch one call, and return the bytes read plus written; see ``gather_rows``."""
    check_place(name, x, out, index)
    rows = indexed_rows(name, x, index, out)
    count, size = rows.indices, rows.itemsize
    if count and rows.row:
        far, near = (x, out) if name == "gather_rows" else (out, x)  # the index is of rows of ``far``
        # Both strides and the row have to be whole units, as every row starts with one.
        alignment = ((x.data_ptr() | out.data_ptr()) & 15) or 16
        row_bytes = rows.row * size
        stride_far, stride_near = rows.stride_far * size, rows.stride_near * size
        unit = math.gcd(alignment, 16, row_bytes, stride_far, stride_near)
        plan = _plan(name, x.get_device(), unit, row_bytes, power_of_two(count), index.dtype)
        row, grid = row_bytes // unit, plan.grid(name, count, row_bytes // unit)
        numbers = rows.limit, stride_far // unit, stride_near // unit, count, row, plan.blocks
        plan.launch(far, near, 1.0, index.data_ptr(), *numbers, grid=grid)
    return rows.moved


@lru_cache(maxsize=1024)
def _plan(name: str, device: int, unit: int, row_bytes: int, count: int, index: torch.dtype) -> RowsPlan:
    """Prepare calls over about ``count`` rows of units, a power of two: each number would need an entry of its own."""
    element = min(unit, 8)
    tile = tile_of_rows(unit, count, row_bytes)
    vec, block_cols = unit // element, max(tile.block_cols, unit) // element
    constants = dict(
        INDEX=TRITON_TYPE[index], SCATTER=name == "scatter_rows", VEC=vec, BLOCK_ROWS=tile.block_rows,
        BLOCK_COLS=block_cols,
    )  # fmt: skip
    types = (_INTEGERS[element], _INTEGERS[element])
    launch = Launch(_rows_kernel, device, 1, types, arguments=(), constants=constants, num_warps=tile.num_warps)
    return RowsPlan(launch, tile.block_rows, -(-row_bytes // unit // (block_cols // vec)))
