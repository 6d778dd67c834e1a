"""Vocabulary-parallel cross entropy: per-row softmax statistics and logit gradient of one vocabulary shard.

Each kernel reads the shard once and allocates nothing shard-sized but the gradient. Not bit-identical to torch (exp),
unlike the copies.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.launch import TRITON_TYPE, launched
from tritoncomm_kernels.numerics import narrow, widen

__all__ = ["gradient", "statistics"]

_BLOCK_BYTES = 8192
_INTERPRETED_BLOCK = 64


# tl.max, tl.sum and tl.zeros are written in Triton's own language: once one of them was interpreted, nothing compiles
# in that process any more. These reductions do without.


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


@triton.jit
def _sum(a, b):
    return a + b


@triton.jit
def _statistics_kernel(
    logits_ptr, target_col_ptr, target_weight_ptr, smoothing_ptr, out_ptr, stride_row, rows, cols,
    SMOOTHED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: a running maximum, the sum of exponentials under it, the weighted sum of the logits."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    lane = tl.arange(0, BLOCK)
    row_max = tl.full((), float("-inf"), WIDE)
    sum_exp = tl.full((BLOCK,), 0.0, WIDE)
    weighted_sum = tl.full((BLOCK,), 0.0, WIDE)
    for first in range(0, cols, BLOCK):
        mask = first + lane < cols
        x = widen(tl.load(row_ptr + first + lane, mask=mask, other=float("-inf")), WIDE)
        new_max = tl.maximum(row_max, tl.reduce(x, 0, _larger))
        base = tl.where(new_max == float("-inf"), 0.0, new_max).to(WIDE)
        sum_exp = sum_exp * tl.exp(row_max - base) + tl.exp(x - base)
        row_max = new_max
        if SMOOTHED:
            weight = tl.load(smoothing_ptr + first + lane, mask=mask, other=0.0)
            weighted_sum += tl.where(weight == 0.0, 0.0, weight * x)
    base = tl.where(row_max == float("-inf"), 0.0, row_max).to(WIDE)
    tl.store(out_ptr + row, base + tl.log(tl.reduce(sum_exp, 0, _sum)))
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
    stride_row, cols, blocks, SMOOTHED: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of a row."""
    program = tl.program_id(0)
    row, first = (program // blocks).to(tl.int64), (program % blocks) * BLOCK
    lane = first + tl.arange(0, BLOCK)
    mask = lane < cols
    x = widen(tl.load(logits_ptr + row * stride_row + lane, mask=mask, other=0.0), WIDE)
    row_weight, upstream = tl.load(row_weight_ptr + row), tl.load(upstream_ptr + row)
    target_col, target_weight = tl.load(target_col_ptr + row), tl.load(target_weight_ptr + row)
    out = tl.exp(x - tl.load(lse_ptr + row)) * row_weight
    if SMOOTHED:
        out -= tl.load(smoothing_ptr + lane, mask=mask, other=0.0)
    out = tl.where(lane == target_col, out - target_weight, out) * upstream
    out = tl.where(row_weight == 0.0, 0.0, out).to(WIDE)
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
        block, warps = _tile(logits, cols)
        launched(
            _statistics_kernel, (rows,), logits, target_col, target_weight,
            target_weight if smoothing_weights is None else smoothing_weights, out, logits.stride(0), rows, cols,
            SMOOTHED=smoothing_weights is not None, WIDE=TRITON_TYPE[out.dtype], BLOCK=block, num_warps=warps,
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
        block, warps = _tile(logits, cols)
        blocks = -(-cols // block)
        launched(
            _gradient_kernel, (rows * blocks,), logits, target_col, target_weight,
            target_weight if smoothing_weights is None else smoothing_weights, row_weight, lse, upstream, out,
            logits.stride(0), cols, blocks,
            SMOOTHED=smoothing_weights is not None, WIDE=TRITON_TYPE[lse.dtype], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return logits.nbytes + out.nbytes + 4 * lse.nbytes + target_col.nbytes


def _tile(logits: Tensor, cols: int) -> tuple[int, int]:
    """Columns of a block, a power of two, and warps."""
    power = 1 << max(cols - 1, 0).bit_length()
    if not logits.is_cuda:
        return min(_INTERPRETED_BLOCK, max(16, power)), 4
    return min(_BLOCK_BYTES // logits.element_size(), max(128, power)), 8
