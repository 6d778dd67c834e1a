"""Cross entropy of logits whose classes are cut over the ranks.

With x the logits of a row, w the class weights, e the smoothing, C the classes, t the target:

    loss = (1 - e) w[t] (lse - x[t]) + e/C (lse sum(w) - sum(w x)),    lse = log sum exp x

A rank reads its piece once for the log-sum-exp of it (and the weighted sum); the ranks exchange two or three numbers a
row. Backward reads the piece once more and writes the gradient:

    d loss / d x[c] = softmax[c] ((1 - e) w[t] + e/C sum(w)) - (1 - e) w[t] [c = t] - e/C w[c]

The logits are left alone. Rows are taken in blocks that stay in the cache, so no tensor as large as the piece is made
but the gradient.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.distributed import ProcessGroup

from tritoncomm import engine
from tritoncomm.autograd import direct

__all__ = ["cross_entropy_rows"]

_BLOCK = 1 << 19  # elements of a block of rows


@dataclass(frozen=True, slots=True)
class _Wanted:
    """What the rows want, without the logits.

    Attributes:
        classes: of the whole.
        start: the first class here.
        place: [rows] class of the target counted from ``start``, 0 where it is elsewhere.
        here: [rows] whether the target is here and counts.
        hard: [rows] factor of the target's loss: (1 - e) w[t], 0 where ignored.
        total: [rows] sum of all factors of a row: what multiplies lse.
        flat: factors of every class here, alike in all rows: e/C w[c]; None without smoothing.
        counts: [rows] what a mean divides by: w[t], 0 where ignored.
        kept: [rows] whether the row counts.
        soft: [rows, classes here] factors of their own; None for targets that are classes.
    """

    place: Tensor
    here: Tensor
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
    place = (target - start).masked_fill(~here, 0)
    factor = kept.to(wide)
    weights_sum: Any = float(classes)
    if weight is not None:
        own = weight.to(wide)[place] * here if size else torch.zeros_like(factor)
        both = torch.cat([own, own.new_zeros(1) + weight.sum().to(wide)])
        both = engine.all_reduce(both, group, "cross_entropy.weights")
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
    return _Wanted(place, here, hard, total, flat, counts, kept, None)


def _soft(
    target: Tensor, weight: Tensor | None, classes: int, smoothing: float, wide: torch.dtype, group: ProcessGroup,
    rows: Tensor,
) -> _Wanted:  # fmt: skip
    soft = target.reshape(rows.shape).to(wide) * (1 - smoothing) + smoothing / classes
    soft = soft if weight is None else soft * weight.to(wide)
    total = engine.all_reduce(soft.sum(-1), group, "cross_entropy.targets")
    nowhere = torch.zeros(len(rows), dtype=torch.int64, device=rows.device)
    ones = torch.ones(len(rows), dtype=wide, device=rows.device)
    return _Wanted(nowhere, nowhere.bool(), torch.zeros_like(ones), total, None, ones, ones.bool(), soft)


@direct
class _Rows(torch.autograd.Function):
    """Forward: loss of every row. Backward: gradient of this rank's piece of the logits."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, wanted: _Wanted, wide: torch.dtype, group: ProcessGroup) -> Tensor:
        count, here = rows.shape
        numbers = torch.empty(2, count, dtype=wide, device=rows.device)  # log-sum-exp, factors times logits
        for block in _blocks(count, here):
            x = rows[block]
            if here:
                wide_x = x.to(wide)
                torch.logsumexp(wide_x, -1, out=numbers[0, block])
                picked = wide_x.gather(1, wanted.place[block].unsqueeze(1)).squeeze(1)
                told = torch.where(wanted.here[block], picked * wanted.hard[block], 0.0)
                if wanted.flat is not None:
                    told = told + (wide_x @ wanted.flat) * wanted.kept[block]
                if wanted.soft is not None:
                    told = (wide_x * wanted.soft[block]).sum(-1)
                numbers[1, block] = told
            else:
                numbers[0, block], numbers[1, block] = -torch.inf, 0.0
        everybody = engine.gather(numbers.unsqueeze(0), 0, group, None, "cross_entropy")
        lse, told = torch.logsumexp(everybody[:, 0], 0), everybody[:, 1].sum(0)
        ctx.save_for_backward(rows, lse)
        ctx.wanted, ctx.wide = wanted, wide
        return torch.where(wanted.kept, lse * wanted.total - told, 0.0).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        rows, lse = ctx.saved_tensors
        wanted: _Wanted = ctx.wanted
        count, here = rows.shape
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        upstream = grad.to(ctx.wide)
        ones = torch.arange(count, device=rows.device)
        some = rows.is_cuda or not bool(wanted.kept.all())  # not looked at where looking waits for the device
        for block in _blocks(count, here):
            part = torch.sub(rows[block].to(ctx.wide), lse[block].unsqueeze(1)).exp_()
            part.mul_((upstream * wanted.total)[block].unsqueeze(1))
            if wanted.flat is not None:
                part -= torch.outer(upstream[block] * wanted.kept[block], wanted.flat)
            if wanted.soft is not None:
                part -= wanted.soft[block] * upstream[block].unsqueeze(1)
            elif here:
                hard = torch.where(wanted.here[block], wanted.hard[block] * upstream[block], 0.0)
                part.index_put_((ones[: len(part)], wanted.place[block]), -hard, accumulate=True)
            out[block] = part.masked_fill_(~wanted.kept[block].unsqueeze(1), 0.0) if some else part
        return out, None, None, None


def _blocks(count: int, width: int) -> list[slice]:
    """Rows in blocks that stay in the cache."""
    step = max(1, _BLOCK // max(width, 1))
    return [slice(i, min(i + step, count)) for i in range(0, count, step)]
