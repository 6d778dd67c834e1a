"""Softmax, log-softmax and cross entropy, including a sharded class dim."""

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritoncomm.core.autograd import wants_grad
from tritoncomm.core.call import compare_arguments
from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding, dtype_of_result, from_front
from tritoncomm.tensor.rules.reductions import extremum_over_ranks, sum_over_ranks
from tritoncomm.tensor.rules.table import rule
from tritoncomm.tensor.vocab_parallel import cross_entropy_rows

__all__: list[str] = []


@rule(
    F.softmax, "softmax", accepts="any sharding, the softmax dim included",
    collectives="softmax dim: all-gather of maxima, all-reduce of sums and of their gradients",
)  # fmt: skip
def _softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> OperatorCall | None:
    return _softmax_like(input, dim, _stacklevel if dtype is None else dtype, log=False)


@rule(F.log_softmax, "log_softmax", accepts="any sharding, the softmax dim included", collectives="as softmax")
def _log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> OperatorCall | None:
    return _softmax_like(input, dim, _stacklevel if dtype is None else dtype, log=True)


def _softmax_like(input: Tensor, dim: int | None, dtype_or_level: Any, log: bool) -> OperatorCall | None:
    """Describe softmax or its logarithm; a call without a dim runs on replicas."""
    # ``F.softmax`` has ``_stacklevel`` where ``torch.softmax`` has the dtype.
    count, dtype = len(shape_of(input)), dtype_or_level if isinstance(dtype_or_level, torch.dtype) else None
    if dim is None or not count or not (dtype or input.dtype).is_floating_point:
        return None  # torch raises for integers
    dim = from_front(dim, count)
    local = torch.log_softmax if log else torch.softmax

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        if not sharding.has(dim):
            return local(x, dim, dtype=dtype)
        target = dtype or dtype_of_result(lambda one: local(one, 0), x)
        wide = x.to(torch.float64 if target is torch.float64 else torch.float32)
        shifted = wide - extremum_over_ranks(wide, (dim,), sharding.group)
        exps = shifted.exp()
        # ``shared``: each rank divides its own shard by the sum, so the gradients of the sum are added up.
        sum_exp = sum_over_ranks(exps.sum(dim, keepdim=True), sharding.group, shared=True)
        return (shifted - sum_exp.log() if log else exps / sum_exp).to(target)

    labels = tuple(range(count))
    return OperatorCall([Operand(input, labels)], [labels], run, own=frozenset({dim}))


@rule(
    F.cross_entropy,
    accepts="any sharding of the logits, the classes (vocabulary-parallel) included, unless soft targets require grad; "
    "targets and weights likewise",
    result="Replicate(); reduction none: sharding of the rows",
    collectives="classes: all-gather of two numbers per row, with class weights or soft targets also an all-reduce; "
    "rows: all-reduce of the sums",
)
def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> OperatorCall | None:  # fmt: skip
    """Describe cross entropy; the classes have the label ``c``. Deprecated arguments run on replicas (None)."""
    shape = shape_of(input)
    if size_average is not None or reduce is not None or not shape or reduction not in ("none", "mean", "sum"):
        return None
    if not input.is_floating_point() or 0 in shape:
        return None  # torch raises for integers; without elements it gives NaN, or an error
    classes = 0 if len(shape) == 1 else 1
    rows = tuple(d for d in range(len(shape)) if d != classes)
    labels = tuple("c" if d == classes else d for d in range(len(shape)))
    soft = len(shape_of(target)) == len(shape) and target.is_floating_point()
    operands = [Operand(input, labels), Operand(target, labels if soft else rows)]
    if weight is not None:
        operands.append(Operand(weight, ("c",)))

    local = partial(F.cross_entropy, ignore_index=ignore_index, label_smoothing=label_smoothing)

    def run(sharding: Sharding, logits: Tensor, targets: Tensor, weights: Tensor | None = None) -> Tensor:
        if not sharding.parts:
            return local(logits, targets, weights, reduction=reduction)
        compare_arguments(
            "cross_entropy", sharding.group, reduction=reduction, ignore_index=ignore_index,
            label_smoothing=label_smoothing,
        )  # fmt: skip
        if sharding.has("c"):
            loss, counted = cross_entropy_rows(
                logits.movedim(classes, -1), targets.movedim(classes, -1) if soft else targets, weights,
                bounds=sharding.shard("c"), classes=shape[classes], ignore_index=ignore_index,
                smoothing=label_smoothing, group=sharding.group,
                dtype=dtype_of_result(lambda one: F.cross_entropy(one[None], one[None]), logits),
            )  # fmt: skip
            if reduction == "none":
                return loss
            return loss.sum() if reduction == "sum" else loss.sum() / counted
        # Only rows are sharded from here on: losses of this rank's rows, and sums of them over the ranks.
        loss = local(logits, targets, weights, reduction="none")
        if reduction == "none":
            return loss
        total = sum_over_ranks(loss.sum(), sharding.group)
        if reduction == "sum":
            return total
        if soft:
            return total / math.prod(shape[dim] for dim in rows)  # a number, as a tensor would change the dtype
        valid = targets != ignore_index
        counts = valid if weights is None else weights.detach()[targets.masked_fill(~valid, 0)] * valid
        wide = torch.promote_types(loss.dtype, torch.float32)
        return total / sum_over_ranks(counts.sum(dtype=wide), sharding.group).to(loss.dtype)

    # ``run`` reduces over the ranks itself: the classes always, the rows unless each keeps its loss.
    own = frozenset(labels) if reduction != "none" else frozenset({"c"})
    result = rows if reduction == "none" else ()
    # ``cross_entropy_rows``, for sharded classes, has no gradient for soft targets.
    replicated = frozenset({"c"} if soft and wants_grad(target) else ())
    return OperatorCall(operands, [result], run, replicated, own=own)
