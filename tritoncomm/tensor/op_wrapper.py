"""Registry of operator overrides for ColoTensors; ``colo_op_impl`` is ColossalAI's contract."""

from collections.abc import Callable
from typing import Any

__all__ = ["colo_op_impl", "implementation"]

_COLOSSAL_OPS: dict[Callable[..., Any], Callable[..., Any]] = {}


def colo_op_impl(func: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Run the decorated function, with unchanged arguments, wherever ``func`` is called with a ColoTensor.

    Example: ``@colo_op_impl(torch.add)`` above ``def add(input, other, *, alpha=1): ...``.
    """

    def register(impl: Callable[..., Any]) -> Callable[..., Any]:
        _COLOSSAL_OPS[func] = impl
        return impl

    return register


def implementation(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return the implementation registered for ``func``, if any."""
    return _COLOSSAL_OPS.get(func)
