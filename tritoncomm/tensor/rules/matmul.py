"""Matrix products: linear, addmm, matmul and related."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.engine import Labels, Operand, OperatorCall, Sharding, broadcast_labels, broadcast_shapes
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []

_COLLECTIVES = "contracted dim: all-reduce; all-reduce of the gradients of replicated operands"


def _product(a: Tensor, b: Tensor) -> tuple[Labels, Labels, Labels] | None:
    """Return the labels of both sides and of ``a @ b``: batch dims from the right, then m, k, n."""
    shape_a, shape_b = (shape_of(x) for x in (a, b))
    if not shape_a or not shape_b:
        return None
    sizes = broadcast_shapes([shape_a[:-2], shape_b[:-2]])
    left: Labels = (*broadcast_labels(shape_a[:-2], sizes), "m", "k") if len(shape_a) > 1 else ("k",)
    right: Labels = (*broadcast_labels(shape_b[:-2], sizes), "k", "n") if len(shape_b) > 1 else ("k",)
    result = (*range(-len(sizes), 0), *(("m",) if len(shape_a) > 1 else ()), *(("n",) if len(shape_b) > 1 else ()))
    return left, right, result


def _factor(x: Tensor, labels: Labels) -> Operand:
    return Operand(x, labels, is_factor=True)


@rule(
    "matmul", Tensor.__matmul__, "mm", "bmm", "mv",
    named="matmul, @, mm, bmm, mv",
    accepts="Shard of a batch dim, of the rows of the first, the columns of the second, or the contracted dim of both",
    result="same sharding; contracted dim: partial, all-reduced", collectives=_COLLECTIVES,
)  # fmt: skip
def _matmul(input: Tensor, other: Tensor | None = None, *, mat2: Tensor | None = None) -> OperatorCall | None:
    """Describe a product; ``mat2`` is mm's and bmm's name of the second factor. Numbers (0 dims) run on replicas."""
    other = mat2 if other is None else other
    if other is None:
        return None
    labels = _product(input, other)
    if labels is None:
        return None
    left, right, result = labels
    return OperatorCall([_factor(input, left), _factor(other, right)], [result], lambda _, a, b: torch.matmul(a, b))


_REVERSED = "@ with a plain tensor on the left"


@rule(Tensor.__rmatmul__, named=_REVERSED, accepts="as matmul", result="as matmul", collectives=_COLLECTIVES)
def _rmatmul(input: Tensor, other: Tensor) -> OperatorCall | None:
    return _matmul(other, input)


@rule(
    F.linear,
    accepts="input Shard(batch dim); weight Shard(0) (column-parallel); both Shard(-1) (row-parallel); with a compute "
    "spec the sharding of the weight",
    result="batch dim: same sharding; column: Shard(-1), gathered if the compute spec sets it; row: partial, "
    "all-reduced, or Shard(d) after `set_output_shard(d)`",
    collectives="batch dim: all-reduce of the gradients of weight and bias; column: all-reduce of the input's "
    "gradient; row: all-reduce, or reduce-scatter",
)  # fmt: skip
def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> OperatorCall | None:
    """Describe a linear layer: k is the contracted dim, n the outputs; the bias of a sharded k is added once."""
    if len(shape_of(weight)) != 2 or not len(shape_of(input)):
        return None
    batch = tuple(range(len(shape_of(input)) - 1))
    late = [] if bias is None else [Operand(bias, broadcast_labels(shape_of(bias), shape_of(weight)[:1], ("n",)))]
    operands = [_factor(input, (*batch, "k")), _factor(weight, ("n", "k"))]
    call = by_weight(OperatorCall(operands, [(*batch, "n")], _linear_local, late=late), weight, index=1)
    if late and len(batch) > 1 and call.scatter is None:
        # torch returns this result as a view, which cannot be reduced in place, so the flat rows are reduced.
        shape = (*shape_of(input)[:-1], shape_of(weight)[0])
        call.run, call.after = _linear_rows, lambda x: torch.ops.aten._unsafe_view(x, shape)
    return call


def _linear_local(sharding: Sharding, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    """Multiply local tensors; a partial product includes the bias on the first rank, without a pass of its own."""
    if bias and sharding.has("k"):
        bias = (_OnFirstRank.apply(bias[0], sharding.rank),)
    return F.linear(x, weight, *bias)


def _linear_rows(sharding: Sharding, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
    """Return ``_linear_local``, with the rows of a partial product flattened to ``[rows, n]``."""
    return _linear_local(sharding, x.flatten(0, -2) if sharding.has("k") else x, weight, *bias)


class _OnFirstRank(torch.autograd.Function):
    """Forward: the tensor on the first rank, zeros elsewhere. Backward: the gradient, which is replicated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return torch.zeros_like(x) if rank else x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _OnAllRanks.apply(grad, ctx.rank), None


class _OnAllRanks(torch.autograd.Function):
    """The adjoint of ``_OnFirstRank``: the tensor, which is replicated. Backward: the gradient on the first rank."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, rank: int) -> Tensor:
        ctx.rank = rank
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _OnFirstRank.apply(grad, ctx.rank), None


def by_weight(call: OperatorCall, weight: Tensor, index: int) -> OperatorCall:
    """Apply the compute spec of a weight: its sharding is used, and the result is gathered or reduce-scattered.

    ``index`` is the weight's place among the operands. A weight without a spec leaves the call as it is.
    """
    spec = weight.compute_spec if is_colo(weight) else None
    if spec is not None:
        call.prefer, call.gather, call.scatter = index, spec.output_replicate, spec.output_shard
    return call


@rule(
    "addmm",
    accepts="as linear, for beta * input + alpha * (mat1 @ mat2)", result="as linear", collectives="as linear",
)  # fmt: skip
def _addmm(input: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> OperatorCall:
    """Describe ``beta * input + alpha * (mat1 @ mat2)``; the input is added once, after a sum over the ranks."""
    labels = broadcast_labels(shape_of(input), (shape_of(mat1)[0], shape_of(mat2)[1]), ("m", "n"))

    # ``run`` gets no bias for a partial product: ``finish`` adds it after the sum over the ranks.
    def run(_: Sharding, a: Tensor, b: Tensor, *bias: Tensor) -> Tensor:
        return torch.addmm(bias[0], a, b, beta=beta, alpha=alpha) if bias else a @ b

    def finish(product: Tensor, bias: Tensor) -> Tensor:
        scaled, bias = product if alpha == 1 else product * alpha, bias.to(product.dtype)  # as autocast does
        return scaled if beta == 0 else scaled + (bias if beta == 1 else bias * beta)

    operands = [_factor(mat1, ("m", "k")), _factor(mat2, ("k", "n"))]
    late = [Operand(input, labels)]
    return by_weight(OperatorCall(operands, [("m", "n")], run, late=late, finish=finish), mat2, index=1)
