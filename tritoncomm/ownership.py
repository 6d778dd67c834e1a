"""Whether anybody but the caller can see a tensor's memory, so that a collective may write into it.

A tensor is ours alone when it is contiguous, no leaf that wants a gradient, and nothing else holds the Python object,
the tensor or its storage. How many references "nothing else" means depends on the Python and torch versions: it is
measured once, on a tensor that is held elsewhere and on one that is not; where the two look the same, the answer is no.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from tritoncomm.autograd import direct

__all__ = ["gradient_is_ours", "gradients_measured", "measure_gradients", "temporary_is_ours"]

Counts = tuple[int, int, int]
_NEVER: Counts = (0, 0, 0)


def _use_count(x: Tensor) -> int:
    return x._use_count()  # pyright: ignore[reportAttributeAccessIssue]


def _storage_count(x: Tensor) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _may_be_written(x: Tensor) -> bool:
    return x.is_contiguous() and not (x.requires_grad and x.is_leaf) and not x.is_neg() and not x.is_conj()


def _probe(x: Tensor, _: Any = None) -> Counts:
    """Called like a mapping: what the references to its first argument look like."""
    return sys.getrefcount(x), _use_count(x), _storage_count(x)


def _temporary_counts() -> Counts:
    held = torch.empty(1)
    alone, shared = _probe(torch.empty(1)), _probe(held)
    return alone if alone[0] < shared[0] else _NEVER


def temporary_is_ours(references: int, x: Tensor) -> bool:
    """Whether ``x``, an argument with ``sys.getrefcount`` of ``references``, is a temporary nobody else can see.

    The count comes first so that the call itself does not hold ``x`` yet while it is taken.
    """
    return references <= _temporary[0] and _is_alone(x, _temporary)


def _is_alone(x: Tensor, alone: Counts) -> bool:
    return _may_be_written(x) and _use_count(x) <= alone[1] and _storage_count(x) <= alone[2]


@direct
class _Gradient(torch.autograd.Function):
    """Identity that reports the references to the gradient it is given, called as the mappings are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Counts]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        ctx.seen.append(
            (
                sys.getrefcount(grad_output),
                _use_count(grad_output),
                _storage_count(grad_output),
            )
        )
        return grad_output, None


def _gradient_counts() -> Counts:
    seen: list[Counts] = []
    kept: list[Tensor] = []
    with torch.enable_grad():
        for hold in (False, True):
            x = torch.ones(1, requires_grad=True)
            y = _Gradient.apply(x, seen)
            if hold:
                y.register_hook(kept.append)
            (y * 2).backward(torch.ones(1))
    alone, shared = seen
    return alone if alone[0] < shared[0] else _NEVER


def measure_gradients() -> None:
    """Take the measurement (the first forward does, so that no backward has to)."""
    global gradients_measured, _gradient
    gradients_measured, _gradient = True, _gradient_counts()


def gradient_is_ours(references: int, grad: Tensor, ctx: Any, function: Any) -> bool:
    """Whether ``grad``, given to ``function.backward`` with ``sys.getrefcount`` of ``references``, is held by nobody.

    Only autograd's engine hands gradients over in the way that was measured; a plain call of ``backward`` or of a node
    holds its arguments itself.
    """
    if references > _gradient[0] or type(ctx) is not function._backward_cls:
        return False
    return torch._C._current_graph_task_id() != -1 and _is_alone(grad, _gradient)


gradients_measured = False
_temporary = _temporary_counts()
_gradient = _NEVER
