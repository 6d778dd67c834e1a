"""Vocabulary-parallel cross entropy: logits sharded along the classes.

With x the logits of a row, w the class weights, e the smoothing, C the classes, t the target:

    loss = (1 - e) w[t] (lse - x[t]) + e/C (lse sum(w) - sum(w x)),    lse = log sum exp x

A rank reads its shard once for its log-sum-exp (and the weighted sum); the ranks all-gather two numbers per row.
Backward reads the shard once more and writes the gradient:

    d loss / d x[c] = softmax[c] ((1 - e) w[t] + e/C sum(w)) - (1 - e) w[t] [c = t] - e/C w[c]

The logits are not modified, and the gradient is the only tensor of the size of the shard: by kernels on GPUs, on CPUs
by torch on blocks of rows that fit into the cache.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import eager, ops
from tritoncomm.core.autograd import direct, once_differentiable

__all__ = ["cross_entropy_rows"]

_BLOCK = 1 << 19  # elements of a block of rows


@dataclass(frozen=True, slots=True)
class _RowTargets:
    """Targets and weights per row.

    Attributes:
        target_col: ``[rows]`` local column of the target class, -1 if it is on another rank or ignored.
        target_weight: ``[rows]`` weight of the target term: (1 - e) w[t], 0 if ignored.
        total_weight: ``[rows]`` sum of all weights of a row, the factor of lse.
        smoothing_weights: ``[local classes]`` weights shared by all rows: e/C w[c]; None without smoothing.
        counts: ``[rows]`` contribution to the divisor of the mean: w[t], 0 if ignored.
        valid: ``[rows]`` whether the row is not ignored.
        soft_weights: ``[rows, local classes]`` weights of soft targets; None for class targets.
    """

    target_col: Tensor
    target_weight: Tensor
    total_weight: Tensor
    smoothing_weights: Tensor | None
    counts: Tensor
    valid: Tensor
    soft_weights: Tensor | None = None


def cross_entropy_rows(
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None,
    bounds: tuple[int, int],
    classes: int,
    ignore_index: int,
    smoothing: float,
    group: ProcessGroup,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Return the loss ``[...]`` of every row, equal on all ranks, and the divisor of the mean.

    Args:
        logits: ``[..., local classes]``, the local shard.
        target: ``[...]`` classes, or ``[..., local classes]`` probabilities.
        weight: ``[local classes]``, the local shard of the class weights.
        bounds: (start, size) of the local classes.
        classes: global number of classes.
        smoothing: e in the formulas above.
        dtype: of the loss; the logits' by default.
    """
    rows = logits.reshape(math.prod(logits.shape[:-1]), logits.shape[-1])
    wide = torch.float64 if logits.dtype is torch.float64 else torch.float32
    # Autocast would multiply in 16 bits.
    with torch.autocast(logits.device.type, enabled=False):
        with torch.no_grad():
            if target.is_floating_point():
                targets = _soft_targets(target, weight, classes, smoothing, wide, group, rows)
            else:
                flat = target.reshape(-1)
                targets = _class_targets(flat, weight, bounds, classes, ignore_index, smoothing, wide, group)
        loss = _Rows.apply(rows, targets, wide, dtype or logits.dtype, group)
        counted = targets.counts.sum()
    return loss.view(logits.shape[:-1]), counted.to(loss.dtype)


def _class_targets(
    target: Tensor, weight: Tensor | None, bounds: tuple[int, int], classes: int, ignore_index: int, smoothing: float,
    wide: torch.dtype, group: ProcessGroup,
) -> _RowTargets:  # fmt: skip
    """Return targets and weights per row of class targets ``[rows]``; see ``cross_entropy_rows`` for the arguments."""
    start, size = bounds
    valid = target != ignore_index
    # On a GPU the check would synchronize the device.
    if not target.is_cuda and bool((valid & ((target < 0) | (target >= classes))).any()):
        raise IndexError(f"cross_entropy: a target is out of bounds for {classes} classes")
    is_local = valid & (target >= start) & (target < start + size)
    target_col = (target - start).masked_fill(~is_local, -1)
    is_counted = valid.to(wide)  # 0 or 1 of every row
    weights = is_counted
    weights_sum: Any = float(classes)
    if weight is not None:
        own = weight.to(wide)[target_col.clamp(min=0)] * is_local if size else torch.zeros_like(weights)
        # One all-reduce brings the weight of each row's target, which one rank holds, and the sum of all weights.
        both = torch.cat([own, own.new_zeros(1) + weight.sum(dtype=wide)])
        both = eager.all_reduce(both, group, "cross_entropy.weights")
        weights, weights_sum = both[:-1], both[-1]
    target_weight = weights * (1 - smoothing)
    total_weight, smoothing_weights = target_weight, None
    if smoothing:
        spread = smoothing / classes
        total_weight = target_weight + is_counted * spread * weights_sum
        class_weights = is_counted.new_ones(size) if weight is None else weight.to(wide)
        smoothing_weights = class_weights * spread
    return _RowTargets(target_col, target_weight, total_weight, smoothing_weights, weights, valid)


def _soft_targets(
    target: Tensor, weight: Tensor | None, classes: int, smoothing: float, wide: torch.dtype, group: ProcessGroup,
    rows: Tensor,
) -> _RowTargets:  # fmt: skip
    """Return targets and weights per row of soft targets: probabilities of the local classes."""
    soft_weights = target.reshape(rows.shape).to(wide) * (1 - smoothing) + smoothing / classes
    soft_weights = soft_weights if weight is None else soft_weights * weight.to(wide)
    total_weight = eager.all_reduce(soft_weights.sum(-1), group, "cross_entropy.targets")
    # No row has a target class: the soft weights take its place.
    no_target = torch.full((len(rows),), -1, device=rows.device)
    ones = torch.ones(len(rows), dtype=wide, device=rows.device)
    return _RowTargets(
        no_target, torch.zeros_like(ones), total_weight, smoothing_weights=None, counts=ones, valid=ones.bool(),
        soft_weights=soft_weights,
    )  # fmt: skip


@direct
class _Rows(torch.autograd.Function):
    """Forward: loss of every row. Backward: gradient of the local logits."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, targets: _RowTargets, wide: torch.dtype, dtype: torch.dtype, group: ProcessGroup
    ) -> Tensor:
        started = record.now()
        stats = torch.empty(2, len(rows), dtype=wide, device=rows.device)  # local log-sum-exp, weights times logits
        path = ops.path_for(rows, "reduce") if targets.soft_weights is None and rows.stride(-1) == 1 else "torch"
        if path == "triton":
            bytes_copied = kernels.statistics(
                rows, targets.target_col, targets.target_weight, targets.smoothing_weights, stats
            )
        else:
            bytes_copied = rows.nbytes
            for block in _blocks(rows):
                _statistics(rows[block], targets, block, stats)
        record.add("cross_entropy.rows", path, bytes_copied, 0, started)
        gathered = eager.all_gather(stats.unsqueeze(0), dim=0, group=group, name="cross_entropy")
        # ``[world, 2, rows]``: the log-sum-exp of the ranks' log-sum-exps is that of all classes, and terms add up.
        lse, target_term = torch.logsumexp(gathered[:, 0], 0), gathered[:, 1].sum(0)
        ctx.save_for_backward(rows, lse, stats[0])
        ctx.targets, ctx.path = targets, path
        return torch.where(targets.valid, lse * targets.total_weight - target_term, 0.0).to(dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Any:
        started = record.now()
        rows, lse, local_lse = ctx.saved_tensors
        targets: _RowTargets = ctx.targets
        out = torch.empty_like(rows, memory_format=torch.contiguous_format)
        grad_rows = grad.to(lse.dtype).contiguous()
        bytes_copied = rows.nbytes + out.nbytes
        if ctx.path == "triton":
            bytes_copied = kernels.gradient(
                rows,
                targets.target_col,
                targets.target_weight,
                targets.smoothing_weights,
                targets.total_weight,
                lse,
                grad_rows * targets.valid,
                out,
            )
        else:
            share = torch.exp(local_lse - lse)  # of the local classes in the sum of exponentials
            for block in _blocks(rows):
                _gradient(rows[block], targets, block, share, grad_rows, out)
        record.add("cross_entropy.backward", ctx.path, bytes_copied, 0, started)
        return out, None, None, None, None


def _statistics(x: Tensor, targets: _RowTargets, block: slice, stats: Tensor) -> None:
    """Write the log-sum-exp and the weighted logits of a block of rows into ``stats``, in torch."""
    if not x.shape[1]:
        stats[0, block], stats[1, block] = -torch.inf, 0.0
        return
    wide, target_col = x.to(stats.dtype), targets.target_col[block]
    # The largest softmax is exp(row_max - lse), so lse is row_max less its logarithm: one pass, two reductions.
    row_max = x.amax(-1).to(stats.dtype)
    lse = row_max - torch.softmax(wide, -1).amax(-1).log_()
    stats[0, block] = torch.where(row_max == -torch.inf, row_max, lse)  # else NaN
    if targets.soft_weights is not None:
        stats[1, block] = (wide * targets.soft_weights[block]).sum(-1)
        return
    # Column 0 stands for the targets of other ranks (-1), and is masked afterwards.
    target_logits = wide.gather(1, target_col.clamp(min=0).unsqueeze(1)).squeeze(1)
    target_term = torch.where(target_col >= 0, target_logits * targets.target_weight[block], 0.0)
    if targets.smoothing_weights is not None:
        target_term += (wide @ targets.smoothing_weights) * targets.valid[block]
    stats[1, block] = target_term


def _gradient(x: Tensor, targets: _RowTargets, block: slice, share: Tensor, grad_rows: Tensor, out: Tensor) -> None:
    """Write the gradient of a block of rows into ``out``, in torch.

    Args:
        x: logits of the block; all else is of all rows.
    """
    grad_rows, target_col, valid = grad_rows[block], targets.target_col[block], targets.valid[block]
    same_dtype = x.dtype is grad_rows.dtype
    # Softmax over the local classes, times their ``share``, is the softmax over all classes.
    part = out[block] if same_dtype else torch.empty(x.shape, dtype=grad_rows.dtype, device=x.device)
    torch.softmax(x if same_dtype else x.to(grad_rows.dtype), -1, out=part)
    part.mul_((grad_rows * targets.total_weight[block] * share[block]).unsqueeze(1))
    masked = ~valid | (share[block] == 0)  # ignored, or all local logits -inf, for which softmax gives NaN
    if x.is_cuda:  # unconditional, because a check would synchronize the device
        part.masked_fill_(masked.unsqueeze(1), 0.0)
    elif len(empty := masked.nonzero().squeeze(1)):
        part.index_fill_(0, empty, 0.0)
    if targets.soft_weights is not None:
        part -= targets.soft_weights[block] * grad_rows.unsqueeze(1)
    elif x.shape[1]:
        if targets.smoothing_weights is not None:
            part -= torch.outer(grad_rows * valid, targets.smoothing_weights)
        target_weight = torch.where(target_col >= 0, targets.target_weight[block] * grad_rows, 0.0)
        part.scatter_add_(1, target_col.clamp(min=0).unsqueeze(1), -target_weight.unsqueeze(1))
    if not same_dtype:
        out[block] = part


def _blocks(rows: Tensor) -> list[slice]:
    """Return blocks of rows that fit into the cache; on a GPU one block, because each block costs launches."""
    count, width = rows.shape
    step = count if rows.is_cuda else max(1, _BLOCK // max(width, 1))
    return [slice(i, min(i + step, count)) for i in range(0, count, max(step, 1))]
