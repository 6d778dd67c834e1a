"""What a cross entropy over a cut vocabulary needs of a piece of the logits: its statistics, and its gradient.

Each reads the piece once; nothing as large as the piece is made but the gradient. Unlike a copy, an exponential has not
the same bits everywhere: results agree with plain torch to rounding.
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
    logits_ptr, place_ptr, hard_ptr, flat_ptr, out_ptr, stride_row, rows, cols,
    HAS_FLAT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per row: a running maximum, the sum of powers under it, the sum of factors times logits."""
    row = tl.program_id(0).to(tl.int64)
    row_ptr = logits_ptr + row * stride_row
    lane = tl.arange(0, BLOCK)
    most = tl.full((), float("-inf"), WIDE)
    total = tl.full((BLOCK,), 0.0, WIDE)
    told = tl.full((BLOCK,), 0.0, WIDE)
    for first in range(0, cols, BLOCK):
        inside = first + lane < cols
        x = widen(tl.load(row_ptr + first + lane, mask=inside, other=float("-inf")), WIDE)
        new = tl.maximum(most, tl.reduce(x, 0, _larger))
        base = tl.where(new == float("-inf"), 0.0, new).to(WIDE)
        total = total * tl.exp(most - base) + tl.exp(x - base)
        most = new
        if HAS_FLAT:
            factor = tl.load(flat_ptr + first + lane, mask=inside, other=0.0)
            told += tl.where(factor == 0.0, 0.0, factor * x)
    base = tl.where(most == float("-inf"), 0.0, most).to(WIDE)
    tl.store(out_ptr + row, base + tl.log(tl.reduce(total, 0, _sum)))
    place = tl.load(place_ptr + row)
    here = place >= 0
    wanted = widen(tl.load(row_ptr + tl.where(here, place, 0), mask=here, other=0.0), WIDE)
    found = tl.where(here, wanted * tl.load(hard_ptr + row), 0.0)
    if HAS_FLAT:
        found += tl.reduce(told, 0, _sum)
    tl.store(out_ptr + rows + row, found)


@triton.jit
def _gradient_kernel(
    logits_ptr, place_ptr, hard_ptr, flat_ptr, total_ptr, lse_ptr, upstream_ptr, out_ptr, stride_row, cols, blocks,
    HAS_FLAT: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program per block of a row."""
    program = tl.program_id(0)
    row, first = (program // blocks).to(tl.int64), (program % blocks) * BLOCK
    lane = first + tl.arange(0, BLOCK)
    inside = lane < cols
    x = widen(tl.load(logits_ptr + row * stride_row + lane, mask=inside, other=0.0), WIDE)
    total, upstream = tl.load(total_ptr + row), tl.load(upstream_ptr + row)
    place, hard = tl.load(place_ptr + row), tl.load(hard_ptr + row)
    out = tl.exp(x - tl.load(lse_ptr + row)) * total
    if HAS_FLAT:
        out -= tl.load(flat_ptr + lane, mask=inside, other=0.0)
    out = tl.where(lane == place, out - hard, out) * upstream
    out = tl.where(total == 0.0, 0.0, out).to(WIDE)
    tl.store(out_ptr + row * cols + lane, narrow(out, out_ptr.dtype.element_ty), mask=inside)


def statistics(logits: Tensor, place: Tensor, hard: Tensor, flat: Tensor | None, out: Tensor) -> int:
    """Per row ``out[0] = log sum exp x`` and ``out[1] = hard * x[place] + sum(flat * x)``.

    Args:
        logits: ``[rows, cols]``, rows contiguous, any stride between them.
        place: ``[rows]`` int64, a column, or -1 for none.
        hard: ``[rows]`` factors in the type of the arithmetic: fp32, fp64 for fp64.
        flat: ``[cols]`` factors alike in all rows, or None.
        out: ``[2, rows]``, in the type of the arithmetic, contiguous.

    Returns:
        Bytes read plus bytes written.

    Traffic: reads ``logits`` once.
    """
    rows, cols = logits.shape
    if rows:
        block, warps = _tile(logits, cols)
        launched(
            _statistics_kernel, (rows,), logits, place, hard, flat if flat is not None else hard, out,
            logits.stride(0), rows, cols,
            HAS_FLAT=flat is not None, WIDE=TRITON_TYPE[out.dtype], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return logits.nbytes + place.nbytes + hard.nbytes + out.nbytes


def gradient(
    logits: Tensor,
    place: Tensor,
    hard: Tensor,
    flat: Tensor | None,
    total: Tensor,
    lse: Tensor,
    upstream: Tensor,
    out: Tensor,
) -> int:
    """``out = (exp(x - lse) * total - flat - hard at place) * upstream``, 0 in rows whose ``total`` is 0.

    Args:
        logits, place, hard, flat: as for ``statistics``.
        total: ``[rows]`` factors of the softmax.
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
            _gradient_kernel, (rows * blocks,), logits, place, hard, flat if flat is not None else hard, total, lse,
            upstream, out, logits.stride(0), cols, blocks,
            HAS_FLAT=flat is not None, WIDE=TRITON_TYPE[lse.dtype], BLOCK=block, num_warps=warps,
        )  # fmt: skip
    return logits.nbytes + out.nbytes + 4 * lse.nbytes + place.nbytes


def _tile(logits: Tensor, cols: int) -> tuple[int, int]:
    """Columns of a block, a power of two, and warps."""
    if not logits.is_cuda:
        return min(_INTERPRETED_BLOCK, max(16, 1 << max(cols - 1, 0).bit_length())), 4
    return min(_BLOCK_BYTES // logits.element_size(), max(128, 1 << max(cols - 1, 0).bit_length())), 8
