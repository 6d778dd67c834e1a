"""Normalizations."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.engine import Call, Operand, Sharding
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []

_ACCEPTS = "input Shard(d) of a dim that is not normalized; weight and bias replicated"
_COLLECTIVES = "all-reduce of the gradients of weight and bias"


def _labels(input: Tensor, normalized_shape: Sequence[int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
    count = len(shape_of(input))
    normalized = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    return tuple(range(count)), tuple(range(count - len(normalized), count))


def _optional(tensors: Sequence[Tensor | None], labels: tuple[int, ...]) -> list[Operand]:
    return [Operand(x, labels) for x in tensors if x is not None]


def _normalize(function: Any, input: Tensor, shape: Any, tensors: tuple[Any, ...], eps: Any) -> Call:
    labels, normalized = _labels(input, shape)
    given = [x is not None for x in tensors]

    def run(_: Sharding, x: Tensor, *rest: Tensor) -> Tensor:
        remaining = iter(rest)
        sizes = (shape,) if isinstance(shape, int) else tuple(shape)
        return function(x, sizes, *(next(remaining) if present else None for present in given), eps)

    return Call([Operand(input, labels), *_optional(tensors, normalized)], [labels], run, frozenset(normalized))


@rule(F.layer_norm, torch.layer_norm, accepts=_ACCEPTS, collectives=_COLLECTIVES)
def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Call:  # fmt: skip
    return _normalize(F.layer_norm, input, normalized_shape, (weight, bias), eps)


@rule(F.rms_norm, torch.rms_norm, accepts=_ACCEPTS, collectives=_COLLECTIVES)
def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Call:
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
) -> Call:  # fmt: skip
    labels = tuple(range(len(shape_of(input))))
    given = [x is not None for x in (weight, bias)]

    def run(_: Sharding, x: Tensor, *rest: Tensor) -> Tensor:
        remaining = iter(rest)
        scale, shift = (next(remaining) if present else None for present in given)
        return F.batch_norm(x, running_mean, running_var, scale, shift, training, momentum, eps)

    replicated = frozenset(labels) if training or running_mean is None else frozenset({1})
    return Call([Operand(input, labels), *_optional((weight, bias), (1,))], [labels], run, replicated)
