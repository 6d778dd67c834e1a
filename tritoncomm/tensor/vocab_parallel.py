"""Cross entropy of logits whose classes are cut over the ranks.

With x the logits of a row, w the class weights, e the smoothing, C the classes, t the target:

    loss = (1 - e) w[t] (lse - x[t]) + e/C (lse sum(w) - sum(w x)),    lse = log sum exp x

A rank reads its piece once for the log-sum-exp of it (and the weighted sum); the ranks exchange two or three numbers a
row. Backward reads the piece once more and writes the gradient:

    d loss / d x[c] = softmax[c] ((1 - e) w[t] + e/C sum(w)) - (1 - e) w[t] [c = t] - e/C w[c]

The logits are left alone, and no tensor as large as the piece is made but the gradient: by kernels on GPUs, on CPUs by
torch on blocks of rows that stay in the cache.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup
from tritoncomm_kernels import cross_entropy as softmax

from tritoncomm import record
from tritoncomm.core import eager, ops
from tritoncomm.core.function import direct

__all__ = ["cross_entropy_rows"]

_BLOCK = 1 << 19  # elements of a block of rows


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the rows want, without the logits.

    Attributes:
        place: [rows] class of the target counted from the first one here, -1 where it is elsewhere or does not count.
        hard: [rows] factor of the target's loss: (1 - e) w[t], 0 where ignored.
        total: [rows] sum of all factors of a row: what multiplies lse.
        flat: factors of every class here, alike in all rows: e/C w[c]; None without smoothing.
        counts: [rows] what a mean divides by: w[t], 0 where ignored.
        kept: [rows] whether the row counts.
        soft: [rows, classes here] factors of their own; None for targets that are classes.
    """

    place: Tensor
    hard: Tensor
    total: Tensor
    flat: Tensor | None
    counts: Tensor
    kept: Tensor
    soft: Tensor | None


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    piece: tuple[int, int],
    classes: int,
    ignore_index: int,
    smoothing: float,
    group: ProcessGroup,
) -> tuple[Tensor, Tensor]:
    """Loss of every row, the same on all ranks, and what a mean divides by.

    Args:
        logits: ``[..., classes here]``, this rank's piece.
        target: ``[...]`` classes, or ``[..., classes here]`` probabilities.
        weight: ``[classes here]``, this rank's piece of the class weights.
        piece: (start, size) of the classes here.
        classes: of the whole.
        ignore_index: a class that does not count.
        smoothing: e above.
        group: the ranks.

    Returns:
        ``[...]`` in the dtype of the logits, and a number.
    """
    rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    with torch.no_grad():
        wanted = _soft(target, weight, classes, smoothing, wide, group, rows) if target.is_floating_point() else (
            _hard(target.reshape(-1), weight, piece, classes, ignore_index, smoothing, wide, group)
        )  # fmt: skip
    loss = _Rows.apply(rows, wanted, wide, group)
    counted = wanted.counts.sum()
    return loss.view(logits.shape[:-1]), counted.to(loss.dtype)


def _hard(
    target: Tensor, weight: Tensor | None, piece: tuple[int, int], classes: int, ignore_index: int, smoothing: float,
    wide: torch.dtype, group: ProcessGroup,
) -> _Wanted:  # fmt: skip
    start, size = piece
    kept = target != ignore_index
    if not target.is_cuda and bool((kept & ((target < 0) | (target >= classes))).any()):
        raise IndexError(f"cross_entropy: a target is out of bounds for {classes} classes")
    here = kept & (target >= start) & (target < start + size)
    place = (target - start).masked_fill(~here, -1)
    factor = kept.to(wide)
    weights_sum: Any = float(classes)
    if weight is not None:
        own = weight.to(wide)[place.clamp(min=0)] * here if size else torch.zeros_like(factor)
        both = torch.cat([own, own.new_zeros(1) + weight.sum().to(wide)])
        both = eager.all_reduce(both, group, "cross_entropy.weights")
        factor, weights_sum = both[:-1], both[-1]
    hard = factor * (1 - smoothing)
    total, flat = hard, None
    if smoothing:
        spread = smoothing / classes
        total = hard + kept.to(wide) * spread * weights_sum
        flat = (
            torch.full((size,), spread, dtype=wide, device=target.device)
            if weight is None
            else weight.to(wide) * spread
        )
    counts = kept.to(wide) if weight is None else factor
    return _Wanted(place, hard, total, flat, counts, kept, None)


def _soft(
    target: Tensor, weight: Tensor | None, classes: int, smoothing: float, wide: torch.dtype, group: ProcessGroup,
    rows: Tensor,
) -> _Wanted:  # fmt: skip
    soft = target.reshape(rows.shape).to(wide) * (1 - smoothing) + smoothing / classes
    soft = soft if weight is None else soft * weight.to(wide)
    total = eager.all_reduce(soft.sum(-1), group, "cross_entropy.targets")
    nowhere = torch.full((len(rows),), -1, device=rows.device)
    ones = torch.ones(len(rows), dtype=wide, device=rows.device)
    return _Wanted(nowhere, torch.zeros_like(ones), total, None, ones, ones.bool(), soft)


@direct
class _Rows(torch.autograd.Function):
    """Forward: loss of every row. Backward: gradient of this rank's piece of the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: _Wanted, wide: torch.dtype, group: ProcessGroup) -> Tensor:
        started = record.now()
        numbers = torch.empty(2, len(rows), dtype=wide, device=rows.device)  # log-sum-exp, factors times logits
        path = ops.path_for(rows, "reduce") if wanted.soft is None and rows.stride(-1) == 1 else "torch"
        if path == "triton":
            moved = softmax.statistics(rows, wanted.place, wanted.hard, wanted.flat, numbers)
        else:
            moved = rows.nbytes
            for block in _blocks(rows):
                _statistics(rows[block], wanted, block, numbers)
        record.add("cross_entropy.rows", path, moved, 0, started)
        everybody = eager.all_gather(numbers.unsqueeze(0), 0, group, None, "cross_entropy")
        lse, told = torch.logsumexp(everybody[:, 0], 0), everybody[:, 1].sum(0)
        ctx.save_for_backward(rows, lse, numbers[0])
        ctx.wanted, ctx.path = wanted, path
        return torch.where(wanted.kept, lse * wanted.total - told, 0.0).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        started = record.now()
        rows, lse, here = ctx.saved_tensors
        wanted: _Wanted = ctx.wanted
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        upstream = grad.to(lse.dtype).contiguous()
        moved = rows.nbytes + out.nbytes
        if ctx.path == "triton":
            moved = softmax.gradient(
                rows, wanted.place, wanted.hard, wanted.flat, wanted.total, lse, upstream * wanted.kept, out
            )
        else:
            share = torch.exp(here - lse)  # of this piece in the sum over all classes
            for block in _blocks(rows):
                _gradient(rows[block], wanted, block, share, upstream, out)
        record.add("cross_entropy.backward", ctx.path, moved, 0, started)
        return out, None, None, None


def _statistics(x: Tensor, wanted: _Wanted, block: slice, numbers: Tensor) -> None:
    """The numbers of some rows, by torch."""
    if not x.shape[1]:
        numbers[0, block], numbers[1, block] = -torch.inf, 0.0
        return
    wide, place = x.to(numbers.dtype), wanted.place[block]
    largest = x.amax(-1).to(numbers.dtype)  # lse = max x - log max softmax: one pass and two readings
    lse = largest - torch.softmax(wide, -1).amax(-1).log_()
    numbers[0, block] = torch.where(largest == -torch.inf, largest, lse)
    if wanted.soft is not None:
        numbers[1, block] = (wide * wanted.soft[block]).sum(-1)
        return
    picked = wide.gather(1, place.clamp(min=0).unsqueeze(1)).squeeze(1)
    told = torch.where(place >= 0, picked * wanted.hard[block], 0.0)
    if wanted.flat is not None:
        told += (wide @ wanted.flat) * wanted.kept[block]
    numbers[1, block] = told


def _gradient(x: Tensor, wanted: _Wanted, block: slice, share: Tensor, upstream: Tensor, out: Tensor) -> None:
    """The gradient of some rows, by torch."""
    upstream, place, kept = upstream[block], wanted.place[block], wanted.kept[block]
    direct = x.dtype is upstream.dtype
    part = out[block] if direct else torch.empty(x.shape, dtype=upstream.dtype, device=x.device)
    torch.softmax(x if direct else x.to(upstream.dtype), -1, out=part)
    part.mul_((upstream * wanted.total[block] * share[block]).unsqueeze(1))
    nothing = ~kept | (share[block] == 0)  # ignored, or all logits here -inf, of which softmax makes NaN
    if x.is_cuda:  # not looked at where looking waits for the device
        part.masked_fill_(nothing.unsqueeze(1), 0.0)
    elif len(empty := nothing.nonzero().squeeze(1)):
        part.index_fill_(0, empty, 0.0)
    if wanted.soft is not None:
        part -= wanted.soft[block] * upstream.unsqueeze(1)
    elif x.shape[1]:
        if wanted.flat is not None:
            part -= torch.outer(upstream * kept, wanted.flat)
        hard = torch.where(place >= 0, wanted.hard[block] * upstream, 0.0)
        part.scatter_add_(1, place.clamp(min=0).unsqueeze(1), -hard.unsqueeze(1))
    if not direct:
        out[block] = part


def _blocks(rows: Tensor) -> list[slice]:
    """Rows in blocks that stay in the cache; on a GPU, where each costs launches, all at once."""
    count, width = rows.shape
    step = count if rows.is_cuda else max(1, _BLOCK // max(width, 1))
    return [slice(i, min(i + step, count)) for i in range(0, count, max(step, 1))]
