"""Whether anybody but the caller can see a tensor's memory, so that a collective may write into it.

A tensor is ours alone when it is contiguous, no leaf that wants a gradient, and nothing else holds the Python object,
the tensor or its storage. How many references "nothing else" means depends on the Python and torch versions: it is
measured once, on a tensor that is held elsewhere and on one that is not; where the two look the same, the answer is no.
A gradient may also be a view of a tensor that nothing but the view holds, as the gradient of a linear layer's input is.
"""

import sys
from typing import Any

import torch
from torch import Tensor

from tritoncomm.autograd import direct

__all__ = ["gradient_is_ours", "gradients_measured", "measure_gradients", "most_references", "temporary_is_ours"]

Counts = tuple[int, int, int]
Base = tuple[int, int]
_NEVER: Counts = (0, 0, 0)
_NO_BASE: Base = (0, 0)


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
    def forward(ctx: Any, x: Tensor, seen: list[tuple[Counts, Base]]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        counts = (
            sys.getrefcount(grad_output),
            _use_count(grad_output),
            _storage_count(grad_output),
        )
        ctx.seen.append((counts, _base_counts(grad_output)))
        return grad_output, None


def _base_counts(x: Tensor) -> Base:
    """References to the tensor that ``x`` is a view of."""
    base = x._base
    return _NO_BASE if base is None else (sys.getrefcount(base), _use_count(base))


def _gradient_counts() -> tuple[Counts, Counts, Base]:
    """Of a gradient that is alone; of one that is a view of a tensor that is alone, and of that tensor."""
    seen: list[tuple[Counts, Base]] = []
    kept: list[Tensor] = []
    with torch.enable_grad():
        for view in (False, True):
            for hold in (False, True):
                x = torch.ones(1, requires_grad=True)
                y = _Gradient.apply(x, seen)
                z = y.view(1, 1) if view else y
                if hold:
                    z.register_hook(kept.append)
                (z * 2).backward(torch.ones_like(z))
    (alone, _), (shared, _), (viewed, base), (_, base_shared) = seen
    alone = alone if alone[0] < shared[0] else _NEVER
    told = base != _NO_BASE and base[0] < base_shared[0]
    return (alone, viewed, base) if told else (alone, _NEVER, _NO_BASE)


def measure_gradients() -> None:
    """Take the measurement (the first forward does, so that no backward has to)."""
    global gradients_measured, most_references, _gradient, _view, _view_base
    gradients_measured = True
    _gradient, _view, _view_base = _gradient_counts()
    most_references = _gradient[0]


def gradient_is_ours(references: int, grad: Tensor, ctx: Any, function: Any) -> bool:
    """Whether ``grad``, given to ``function.backward`` with ``sys.getrefcount`` of ``references``, is held by nobody.

    Only autograd's engine hands gradients over in the way that was measured; a plain call of ``backward`` or of a node
    holds its arguments itself.
    """
    if references > _gradient[0] or type(ctx) is not function._backward_cls:
        return False
    if torch._C._current_graph_task_id() == -1:
        return False
    return _is_alone(grad, _gradient) or _is_lone_view(grad)


def _is_lone_view(x: Tensor) -> bool:
    """Whether ``x`` is the only view of a tensor that nothing else holds."""
    if x._base is None or not _is_alone(x, _view):
        return False
    references, uses = _base_counts(x)
    return references <= _view_base[0] and uses <= _view_base[1]


gradients_measured = False
most_references = 0  # of a gradient that is ours; callers look at it first, because the rest costs a call
_temporary = _temporary_counts()
_gradient = _view = _NEVER
_view_base = _NO_BASE
