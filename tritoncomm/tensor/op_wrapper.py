"""Implementations of operators on ColoTensors: the program's, by ColossalAI's ``colo_op_impl``, and this package's."""

from collections.abc import Callable
from typing import Any

__all__ = ["colo_op_impl", "implementation", "own_impl", "own_implementation"]

_COLOSSAL_OPS: dict[Callable[..., Any], Callable[..., Any]] = {}
_OWN_OPS: dict[Callable[..., Any], Callable[..., Any]] = {}


def colo_op_impl(func: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the decorated function, with unchanged arguments, wherever ``func`` is called with a ColoTensor.

    Inside of it torch's operators run on the local tensors, so that it may call ``func`` itself. Plain tensors that it
    returns become ColoTensors of the layout of the first ColoTensor among the arguments, if they have its local shape.

    Example: ``@colo_op_impl(torch.add)`` above ``def add(input, other, *, alpha=1): ...``.
    """

    def register(impl: Callable[..., Any]) -> Callable[..., Any]:
        _COLOSSAL_OPS[func] = impl
        return impl

    return register


def implementation(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the program's implementation of ``func``, if any."""
    return _COLOSSAL_OPS.get(func)


def own_impl(func: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register an implementation of this package, in which operators are dispatched as everywhere."""

    def register(impl: Callable[..., Any]) -> Callable[..., Any]:
        _OWN_OPS[func] = impl
        return impl

    return register


def own_implementation(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return this package's implementation of ``func``, if any."""
    return _OWN_OPS.get(func)
