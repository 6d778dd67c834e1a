"""Linear layers of Megatron's, shared by those of trained and of frozen weights: the product, and whose call it is."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup
from torch.nn import Parameter

from tritoncomm.core import eager
from tritoncomm.core.plan import Ints

__all__ = [
    "ASYNC", "LINEAR", "Buffers", "ResolveGroup", "all_gather_shared", "has_parameter", "is_autocast", "is_ours",
    "later_arguments", "later_keywords", "later_positionals", "matmul", "product",
]  # fmt: skip

Buffers = Callable[[], Any]  # Megatron's global memory buffer
ResolveGroup = Callable[[Any], Any]

LINEAR = "linear_with_grad_accumulation_and_async_allreduce"
ASYNC = "async_grad_allreduce"  # up to 0.16.1
# By name, arguments of later releases with the value that earlier ones mean: from 0.19 on, from 0.20 on.
_LATER: dict[str, Any] = {"gtp_remat_size": 1, "output_dtype": None}
matmul = torch.nn.functional.linear  # without bias: one call instead of `t` and `matmul`
is_autocast = torch._C._is_any_autocast_enabled


def all_gather_shared(x: Tensor, group: ProcessGroup, buffers: Buffers, name: str, asynchronous: bool) -> Any:
    """All-gather dim 0 into Megatron's global memory buffer: ``eager.all_gather``."""

    def shared(shape: Ints, dtype: torch.dtype) -> Tensor:
        return buffers().get_tensor(shape, dtype, "mpu")  # Megatron's name for this buffer, which calls share

    return eager.all_gather(x, 0, group, name, asynchronous=asynchronous, allocate=shared)


def product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: ProcessGroup | None = None,
    buffers: Buffers | None = None,
) -> Tensor:
    """Return ``x @ weight.t() + bias``; with ``buffers`` and a group x is all-gathered along dim 0 first."""
    if buffers is None or group is None:
        out = matmul(x, weight)
    elif is_compiling():
        out = matmul(eager.all_gather(x, 0, group, LINEAR), weight)
    else:
        out = matmul(all_gather_shared(x, group, buffers, LINEAR, asynchronous=False), weight)
    return out if bias is None else out + bias  # not the fused sum of `linear`, which rounds once


def is_ours(
    input: Tensor, weight: Tensor, gtp_remat_size: int, output_dtype: torch.dtype | None, is_deferred: bool
) -> bool:
    """Whether our linear functions take a call: plain tensors, no autocast, and an own gradient of the weight.

    Args:
        gtp_remat_size: ranks over which Megatron gathers the weight along a further axis.
        output_dtype: of the product, which Megatron leaves to TransformerEngine if it is not the input's.
        is_deferred: the gradient of the weight is fused into Megatron's buffer, or computed later.
    """
    if is_deferred or gtp_remat_size != 1 or output_dtype not in (None, input.dtype):
        return False
    autocast = torch.is_autocast_enabled(input.device.type) if is_compiling() else is_autocast()
    # Subclasses of tensors stay Megatron's; a ``Parameter`` counts as plain.
    return not autocast and type(input) is Tensor and (type(weight) is Parameter or type(weight) is Tensor)


def has_parameter(function: Any, name: str) -> bool:
    """Whether a function has a parameter ``name``, by which releases of Megatron differ."""
    return name in inspect.signature(function).parameters


def later_arguments(linear_class: Any) -> tuple[str, ...]:
    """Return the arguments of ``_LATER`` that an autograd class takes, in order."""
    return tuple(name for name in _LATER if has_parameter(linear_class.forward, name))


def later_keywords(gtp_remat_size: int, output_dtype: torch.dtype | None) -> dict[str, Any]:
    """Return arguments of ``_LATER`` by keyword, unless earlier releases mean these values: they do not take them."""
    values = dict(zip(_LATER, (gtp_remat_size, output_dtype), strict=True))
    return {name: value for name, value in values.items() if value != _LATER[name]}


def later_positionals(later: tuple[str, ...], gtp_remat_size: int, output_dtype: torch.dtype | None) -> list[Any]:
    """Return arguments of ``_LATER`` by position: those that ``apply`` takes, and values that only it can refuse."""
    values, given = (
        dict(zip(_LATER, (gtp_remat_size, output_dtype), strict=True)),
        later_keywords(gtp_remat_size, output_dtype),
    )
    return [value for name, value in values.items() if name in later or name in given]
