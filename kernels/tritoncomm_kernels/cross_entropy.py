"""Vocabulary-parallel cross entropy: per-row softmax statistics and logit gradient of one vocabulary shard.

Each kernel reads the shard once and allocates nothing shard-sized but the gradient.

Unlike copies and sums these kernels do not give the bits of torch's path. In fp32 their exponentials are the
hardware's ``2**(x * log2 e)``, those below 2**-126 are zero, and terms are added in another order. Tests hold them to a
bound, with ``u = 2**-24`` (2**-53 for fp64). The log-sum-exp of a row is within ``64 u + 2 u |lse|`` of the exact one.
In the gradient ``exp(x - lse)`` is within ``(8 + 4 |x - lse|) u`` of the exact one, relative to it, or within 2**-126.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.config import lanes_of
from tritoncomm_kernels.launch import INTERPRETED, TRITON_TYPE, launched
from tritoncomm_kernels.numerics import narrow, widen

__all__ = ["gradient", "statistics"]

_BLOCK_BYTES, _WARPS = 8192, 8  # of gradient
_STATISTICS_ROWS, _STATISTICS_WARPS = 4, 4
_INTERPRETED_BLOCK, _INTERPRETED_ROWS = 64, 4
_HAS_EX2 = torch.version.hip is None and not INTERPRETED  # the instruction of PTX
_LOG2_E = tl.constexpr(1.4426950408889634)
_LOWEST = {torch.float32: torch.finfo(torch.float32).min, torch.float64: torch.finfo(torch.float64).min}


# Not tl.max, tl.sum and tl.zeros, which are written in Triton's own language: once the interpreter has run one of them,
# nothing compiles in that process any more.


@triton.jit
def _larger(a, b):
    """Return the larger of two partial maxima of ``tl.reduce``.

    Example:
        ``tl.reduce([1.0, 3.0, -2.0, 0.0], 0, _larger)`` is 3.0.
    """
    return tl.maximum(a, b)


@triton.jit
def _sum(a, b):
    """Add two partial sums of ``tl.reduce``.

    Example:
        ``tl.reduce([1.0, 3.0, -2.0, 0.0], 0, _sum)`` is 2.0.
    """
    return a + b


@triton.jit
def _exp(x, HAS_EX2: tl.constexpr):
    """Return ``e**x``; in fp32 results below 2**-126 are zero.

    ``tl.exp`` keeps them, at the price of a comparison and two products around every exponential.

    Example:
        ``[0.0, 1.0, -1.0, -inf]`` gives ``[1.0, 2.7183, 0.3679, 0.0]``.
    """
    if x.dtype == tl.float64:
        x = tl.exp(x)
    elif HAS_EX2:
        x = tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        x = tl.exp2(x * _LOG2_E)
    return x


@triton.jit
def _joined(x, col_max, sum_exp, HAS_EX2: tl.constexpr):
    """Extend every column's maximum, and sum of exponentials below it, by the rows of a tile.

    Example:
        Tile ``[[0.0, 1.0], [0.0, 3.0]]``, maxima ``[0.0, 2.0]`` and sums ``[1.0, 1.0]`` so far:
        maxima ``[0.0, 3.0]``, sums ``[3.0, 1.5032]``.
    """
    new_max = tl.maximum(col_max, tl.reduce(x, 0, _larger))
    terms = tl.reduce(_exp(x - new_max[None, :], HAS_EX2), 0, _sum)
    return new_max, sum_exp * _exp(col_max - new_max, HAS_EX2) + terms


@triton.jit
def _weighted(x, weight):
    """Return the weighted sum of every column of a tile; an infinite logit of weight 0 does not count.

    Example:
        Tile ``[[1.0, 2.0], [3.0, inf]]`` by weights ``[[0.5, 0.5], [0.5, 0.0]]``: ``[2.0, 1.0]``.
    """
    return tl.reduce(tl.where(weight == 0.0, 0.0, weight * x), 0, _sum)


@triton.jit
def _statistics_kernel(
    logits_ptr, target_col_ptr, target_weight_ptr, smoothing_ptr, out_ptr, stride_row, rows, cols,
    SMOOTHED: tl.constexpr, WIDE: tl.constexpr, LOWEST: tl.constexpr, HAS_EX2: tl.constexpr, ROWS: tl.constexpr,
    COLS: tl.constexpr,
):  # fmt: skip
    """Reduce one row per program: its log-sum-exp to ``out[0]``, its weighted logits to ``out[1]``.

    The row is read in tiles of ROWS x COLS, of which a thread holds whole columns. Each column has a maximum and sums
    of its own, so no thread waits for another before the last tile. The maximum starts at LOWEST, which is finite, so
    that no difference is one of two infinities.

    Example:
        Logits ``[[1.0, 1.0], [2.0, 2.0]]``, target columns ``[0, -1]`` (the second is on another rank), weights 1.
        Program 0 writes ``[1.6931, _, 1.0, _]``, which is 1 + log 2 and the logit of the target.
        Program 1 writes ``[_, 2.6931, _, 0.0]``.
    """
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    place = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    col_max = tl.full((COLS,), LOWEST, WIDE)
    sum_exp = tl.full((COLS,), 0.0, WIDE)
    weighted_sum = tl.full((COLS,), 0.0, WIDE)
    full = cols // (ROWS * COLS) * (ROWS * COLS)
    for first in range(0, full, ROWS * COLS):
        x = widen(tl.load(row_ptr + first + place), WIDE)
        col_max, sum_exp = _joined(x, col_max, sum_exp, HAS_EX2)
        if SMOOTHED:
            weighted_sum += _weighted(x, tl.load(smoothing_ptr + first + place))
    if full < cols:  # a mask takes instructions for every element
        mask = full + place < cols
        x = widen(tl.load(row_ptr + full + place, mask=mask, other=float("-inf")), WIDE)
        col_max, sum_exp = _joined(x, col_max, sum_exp, HAS_EX2)
        if SMOOTHED:
            weighted_sum += _weighted(x, tl.load(smoothing_ptr + full + place, mask=mask, other=0.0))
    row_max = tl.reduce(col_max, 0, _larger)
    total = tl.reduce(sum_exp * _exp(col_max - row_max, HAS_EX2), 0, _sum)
    tl.store(out_ptr + row, row_max + tl.log(total))
    target_col = tl.load(target_col_ptr + row)
    is_local = target_col >= 0
    target_logit = widen(tl.load(row_ptr + tl.where(is_local, target_col, 0), mask=is_local, other=0.0), WIDE)
    target_term = tl.where(is_local, target_logit * tl.load(target_weight_ptr + row), 0.0)
    if SMOOTHED:
        target_term += tl.reduce(weighted_sum, 0, _sum)
    tl.store(out_ptr + rows + row, target_term)


@triton.jit
def _gradient_kernel(
    logits_ptr, target_col_ptr, target_weight_ptr, smoothing_ptr, row_weight_ptr, lse_ptr, upstream_ptr, out_ptr,
    stride_row, cols, blocks, SMOOTHED: tl.constexpr, WIDE: tl.constexpr, HAS_EX2: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Write the gradient of one block of a row per program.

    Example:
        Logits ``[[0.0, 0.0, 0.0, 0.0]]``, log-sum-exp log 4, target column 2, weights 1, upstream gradient 4, BLOCK 2.
        Program 0 writes ``[1.0, 1.0, _, _]``, which is ``softmax * 4``.
        Program 1 writes ``[_, _, -3.0, 1.0]``, which is ``(softmax - 1) * 4`` at the target.
    """
    program = tl.program_id(0)
    row, first = (program // blocks).to(tl.int64), (program % blocks) * BLOCK
    lane = first + tl.arange(0, BLOCK)
    mask = lane < cols
    x = widen(tl.load(logits_ptr + row * stride_row + lane, mask=mask, other=0.0), WIDE)
    row_weight, upstream = tl.load(row_weight_ptr + row), tl.load(upstream_ptr + row)
    target_col, target_weight = tl.load(target_col_ptr + row), tl.load(target_weight_ptr + row)
    out = _exp(x - tl.load(lse_ptr + row), HAS_EX2) * row_weight
    if SMOOTHED:
        out -= tl.load(smoothing_ptr + lane, mask=mask, other=0.0)
    out = tl.where(lane == target_col, out - target_weight, out) * upstream
    out = tl.where(row_weight == 0.0, 0.0, out).to(WIDE)  # an ignored row is 0 even where its logits are inf or nan
    tl.store(out_ptr + row * cols + lane, narrow(out, out_ptr.dtype.element_ty), mask=mask)


def statistics(
    logits: Tensor, target_col: Tensor, target_weight: Tensor, smoothing_weights: Tensor | None, out: Tensor
) -> int:
    """``out[0] = log sum exp x`` and ``out[1] = target_weight * x[target_col] + sum(smoothing_weights * x)`` per row.

    Args:
        logits: ``[rows, cols]``, rows contiguous, any stride between them.
        target_col: ``[rows]`` int64, a column, or -1 where the target is on another rank.
        target_weight: ``[rows]`` in the type of the arithmetic: fp32, fp64 for fp64.
        smoothing_weights: ``[cols]``, the same for all rows, or None.
        out: ``[2, rows]``, in the type of the arithmetic, contiguous.

    Returns:
        Bytes read plus bytes written.

    Traffic: reads ``logits`` once.
    """
    rows, cols = logits.shape
    if rows:
        tile_rows, tile_cols = _INTERPRETED_ROWS, _INTERPRETED_BLOCK // _INTERPRETED_ROWS
        if logits.is_cuda:
            lanes = lanes_of(logits.get_device())
            tile_rows, tile_cols = statistics_tile(logits.dtype, cols, lanes)
        launched(
            _statistics_kernel, (rows,), logits, target_col, target_weight,
            target_weight if smoothing_weights is None else smoothing_weights, out, logits.stride(0), rows, cols,
            SMOOTHED=smoothing_weights is not None, WIDE=TRITON_TYPE[out.dtype], LOWEST=_LOWEST[out.dtype],
            HAS_EX2=_HAS_EX2, ROWS=tile_rows, COLS=tile_cols, num_warps=_STATISTICS_WARPS,
        )  # fmt: skip
    return logits.nbytes + target_col.nbytes + target_weight.nbytes + out.nbytes


def gradient(
    logits: Tensor,
    target_col: Tensor,
    target_weight: Tensor,
    smoothing_weights: Tensor | None,
    row_weight: Tensor,
    lse: Tensor,
    upstream: Tensor,
    out: Tensor,
) -> int:
    """``out = (exp(x - lse) * row_weight - smoothing_weights - target_weight at target_col) * upstream``.

    Rows whose ``row_weight`` is 0 get 0.

    Args:
        logits: as for ``statistics``.
        target_col: as for ``statistics``.
        target_weight: as for ``statistics``.
        smoothing_weights: as for ``statistics``.
        row_weight: ``[rows]`` sum of the weights of a row, the factor of its softmax.
        lse: ``[rows]`` log-sum-exp over all ranks.
        upstream: ``[rows]`` gradients of the rows' losses.
        out: ``[rows, cols]``, contiguous.

    Returns:
        Bytes read plus bytes written.

    Traffic: reads ``logits`` once, writes ``out`` once.
    """
    rows, cols = logits.shape
    if rows and cols:
        block = _gradient_block(logits, cols)
        blocks = -(-cols // block)
        launched(
            _gradient_kernel, (rows * blocks,), logits, target_col, target_weight,
            target_weight if smoothing_weights is None else smoothing_weights, row_weight, lse, upstream, out,
            logits.stride(0), cols, blocks,
            SMOOTHED=smoothing_weights is not None, WIDE=TRITON_TYPE[lse.dtype], HAS_EX2=_HAS_EX2, BLOCK=block,
            num_warps=_WARPS,
        )  # fmt: skip
    per_row = 4 * lse.nbytes + target_col.nbytes  # lse, target_weight, row_weight and upstream have one dtype
    return logits.nbytes + out.nbytes + per_row


def statistics_tile(dtype: torch.dtype, cols: int, lanes: int) -> tuple[int, int]:
    """Return rows and columns of a tile, powers of two, for warps of ``lanes`` threads."""
    power = 1 << max(cols - 1, 0).bit_length()
    threads = _STATISTICS_WARPS * lanes
    # A thread holds 16 bytes of every row of the tile, so that as many loads are in flight as the tile has rows. With 8
    # rows bf16 takes a tenth fewer instructions, and half as many programs fit by their registers (sm_90, Triton 3.7).
    tile_cols = min(threads * 16 // dtype.itemsize, max(threads, power))
    return min(_STATISTICS_ROWS, max(power // tile_cols, 1)), tile_cols


def _gradient_block(logits: Tensor, cols: int) -> int:
    """Return the columns of a block, a power of two."""
    power = 1 << max(cols - 1, 0).bit_length()
    if not logits.is_cuda:
        return min(_INTERPRETED_BLOCK, max(16, power))
    return min(_BLOCK_BYTES // logits.element_size(), max(128, power))
