"""Softmax and log-softmax, including a sharded dim."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tritoncomm.tensor.layout import shape_of
from tritoncomm.tensor.rules.across_ranks import max_over_ranks, sum_over_ranks
from tritoncomm.tensor.rules.call import Call, Operand, Sharding
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


@rule(
    F.softmax, torch.softmax, Tensor.softmax, named="softmax", accepts="any sharding, the softmax dim included",
    result="same sharding", collectives="softmax dim: all-gather of maxima, all-reduce of sums and of their gradients",
)  # fmt: skip
def _softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Call | None:
    return _softmax_like(input, dim, dtype if dtype is not None else _as_dtype(_stacklevel), False)


@rule(
    F.log_softmax, torch.log_softmax, Tensor.log_softmax, named="log_softmax",
    accepts="any sharding, the softmax dim included", result="same sharding", collectives="as softmax",
)  # fmt: skip
def _log_softmax(
    input: Tensor, dim: int | None = None, _stacklevel: int = 3, dtype: torch.dtype | None = None
) -> Call | None:
    return _softmax_like(input, dim, dtype if dtype is not None else _as_dtype(_stacklevel), True)


def _as_dtype(third: Any) -> torch.dtype | None:
    """``torch.softmax(x, dim, dtype)`` has the dtype where ``F.softmax`` has a stack level."""
    return third if isinstance(third, torch.dtype) else None


def _softmax_like(input: Tensor, dim: int | None, dtype: torch.dtype | None, log: bool) -> Call | None:
    count = len(shape_of(input))
    if dim is None or not count:
        return None
    dim %= count
    local = torch.log_softmax if log else torch.softmax

    def run(sharding: Sharding, x: Tensor) -> Tensor:
        if not sharding.has(dim):
            return local(x, dim, dtype=dtype)
        assert sharding.group is not None
        target = dtype or x.dtype
        wide = x.to(torch.float64 if target is torch.float64 else torch.float32)
        if x.shape[dim]:
            row_max = wide.detach().amax(dim, keepdim=True)
        else:
            row_max = wide.new_full([1 if d == dim else s for d, s in enumerate(x.shape)], -math.inf)
        shifted = wide - max_over_ranks(row_max, sharding.group)
        exps = shifted.exp()
        sum_exp = sum_over_ranks(exps.sum(dim, keepdim=True), sharding.group, shared=True)
        return (shifted - sum_exp.log() if log else exps / sum_exp).to(target)

    labels = tuple(range(count))
    return Call([Operand(input, labels)], [labels], run, own=frozenset({dim}))
