"""Cross entropy, over a vocabulary that is cut as well."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.across_ranks import sum_over_ranks
from tritoncomm.tensor.rules.call import Call, Cut, Operand
from tritoncomm.tensor.rules.table import rule
from tritoncomm.tensor.vocab_parallel import cross_entropy_rows

__all__: list[str] = []


@rule(
    F.cross_entropy,
    accepts="logits cut in the classes (vocabulary-parallel) or in any other dim; targets and weights likewise",
    result="a replica; reduction none: the cut of the rows",
    collectives="classes: one all-gather of two numbers a row, with class weights or soft targets also an all-reduce; "
    "rows: all-reduces of sums",
)
def _cross_entropy(
    input: Tensor, target: Tensor, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
    reduce: Any = None, reduction: str = "mean", label_smoothing: float = 0.0,
) -> Call | None:  # fmt: skip
    shape = shape_of(input)
    if size_average is not None or reduce is not None or not shape or reduction not in ("none", "mean", "sum"):
        return None
    classes = 0 if len(shape) == 1 else 1
    rows = tuple(d for d in range(len(shape)) if d != classes)
    labels = tuple("c" if d == classes else d for d in range(len(shape)))
    soft = len(shape_of(target)) == len(shape) and target.is_floating_point()
    operands = [Operand(input, labels), Operand(target, labels if soft else rows)]
    if weight is not None:
        operands.append(Operand(weight, ("c",)))

    def run(cut: Cut, logits: Tensor, wanted: Tensor, weights: Tensor | None = None) -> Tensor:
        if not cut.parts:
            return F.cross_entropy(
                logits, wanted, weights, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing
            )
        assert cut.group is not None
        if cut.has("c"):
            loss, counted = cross_entropy_rows(
                logits.movedim(classes, -1), wanted.movedim(classes, -1) if soft else wanted, weights,
                cut.piece("c"), shape[classes], ignore_index, label_smoothing, cut.group,
            )  # fmt: skip
            if reduction == "none":
                return loss
            return loss.sum() if reduction == "sum" else loss.sum() / counted
        loss = F.cross_entropy(
            logits, wanted, weights, ignore_index=ignore_index, reduction="none", label_smoothing=label_smoothing
        )
        if reduction == "none":
            return loss
        total = sum_over_ranks(loss.sum(), cut.group)
        if reduction == "sum":
            return total
        if soft:
            counted = torch.tensor(float(_rows(shape, classes)), device=loss.device)
        else:
            kept = wanted != ignore_index
            counts = kept if weights is None else weights.detach()[wanted.masked_fill(~kept, 0)] * kept
            counted = sum_over_ranks(counts.sum().to(loss.dtype), cut.group)
        return total / counted

    own = frozenset(labels) if reduction != "none" else frozenset({"c"})
    result = rows if reduction == "none" else ()
    return Call(operands, [result], run, own=own)


def _rows(shape: tuple[int, ...], classes: int) -> int:
    count = 1
    for dim, size in enumerate(shape):
        count *= size if dim != classes else 1
    return count
