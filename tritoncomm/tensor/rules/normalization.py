"""Normalizations."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []

_ACCEPTS = "input Shard(d) of a dim that is not normalized; weight and bias replicated"
_COLLECTIVES = "all-reduce of the gradients of weight and bias"


def _affine(
    input: Tensor, tensors: Sequence[Tensor | None], dims: Sequence[int], replicated: Sequence[int],
    local: Callable[..., Tensor],
) -> OperatorCall:  # fmt: skip
    """Describe ``local(input, *tensors)``: each tensor is None or has the dims ``dims`` of the input."""
    labels = tuple(range(len(shape_of(input))))
    operands = [Operand(x, tuple(dims)) for x in tensors if x is not None]

    def run(_: Sharding, x: Tensor, *rest: Tensor) -> Tensor:
        remaining = iter(rest)
        return local(x, *(None if each is None else next(remaining) for each in tensors))

    return OperatorCall([Operand(input, labels), *operands], [labels], run, frozenset(replicated))


def _normalize(function: Any, input: Tensor, shape: Any, tensors: Sequence[Tensor | None], eps: Any) -> OperatorCall:
    """Describe a normalization over the last dims, of the sizes ``shape``, which must not be sharded."""
    sizes, count = (shape,) if isinstance(shape, int) else tuple(shape), len(shape_of(input))
    dims = range(count - len(sizes), count)
    return _affine(input, tensors, dims, dims, lambda x, *rest: function(x, sizes, *rest, eps))


@rule(F.layer_norm, torch.layer_norm, accepts=_ACCEPTS, collectives=_COLLECTIVES)
def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> OperatorCall:  # fmt: skip
    return _normalize(F.layer_norm, input, normalized_shape, (weight, bias), eps)


@rule(F.rms_norm, torch.rms_norm, accepts=_ACCEPTS, collectives=_COLLECTIVES)
def _rms_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None
) -> OperatorCall:
    return _normalize(F.rms_norm, input, normalized_shape, (weight,), eps)


@rule(
    F.batch_norm,
    accepts="evaluation: input Shard(d) of any dim but the channels; training: Replicate()",
    result="same sharding; training: Replicate()",
    collectives="evaluation: all-reduce of the gradients of weight and bias; training: the input is gathered",
)
def _batch_norm(
    input: Tensor, running_mean: Any, running_var: Any, weight: Tensor | None = None, bias: Tensor | None = None,
    training: bool = False, momentum: float = 0.1, eps: float = 1e-5,
) -> OperatorCall:  # fmt: skip
    """Describe a batch norm; in training no dim may be sharded, so the input is gathered."""

    def local(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
        return F.batch_norm(x, running_mean, running_var, scale, shift, training, momentum, eps)

    # Statistics of the batch take all samples; the running ones are per channel (dim 1), and whole on every rank.
    replicated = range(len(shape_of(input))) if training or running_mean is None else (1,)
    return _affine(input, (weight, bias), (1,), replicated, local)
