"""A step in float64, whatever dtypes its program names: what rounding hides is seen, and nothing else changes."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

__all__ = ["Widened"]

_WIDE = {True: torch.float64, False: torch.complex128}  # by whether a dtype is real


class Widened(TorchDispatchMode):
    """Gives float64 for every cast to a narrower floating dtype, and for every new tensor of one.

    Random numbers are drawn in the dtype that was named, so that they are those of the program as it is written.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if not any(map(_is_floating, _flat((args, kwargs)))) or func.__name__.startswith("lift_fresh"):
            return _widened(func(*args, **kwargs))
        if _is_narrow(dtype := kwargs.get("dtype")):
            kwargs["dtype"] = _WIDE[dtype.is_floating_point]
        is_in_place = func.__name__.partition(".")[0].endswith("_") or "out" in kwargs
        if func.namespace == "aten" and not is_in_place and any(map(_is_wide, _flat(args))):
            args, kwargs = _widened(args), _widened(kwargs)  # what came past operators, as data of numpy does
        return func(*args, **kwargs)


def _is_narrow(dtype: Any) -> bool:
    """Whether something is a dtype that float64 or complex128 holds exactly."""
    return (
        isinstance(dtype, torch.dtype) and dtype not in _WIDE.values() and (dtype.is_floating_point or dtype.is_complex)
    )


def _is_floating(x: Any) -> bool:
    """Whether something is a tensor of a floating dtype."""
    return isinstance(x, Tensor) and (x.is_floating_point() or x.is_complex())


def _is_wide(x: Any) -> bool:
    """Whether something is a tensor in float64."""
    return isinstance(x, Tensor) and x.dtype in _WIDE.values()


def _flat(x: Any) -> Iterator[Any]:
    """Yield what stands in arguments of an operator."""
    if isinstance(x, list | tuple | dict):
        for inner in x.values() if isinstance(x, dict) else x:
            yield from _flat(inner)
    else:
        yield x


def _widened(x: Any) -> Any:
    """Return tensors in float64; anything else as it is."""
    if isinstance(x, Tensor):
        return x.to(_WIDE[x.is_floating_point()]) if _is_narrow(x.dtype) else x
    if isinstance(x, dict):
        return {key: _widened(inner) for key, inner in x.items()}
    return type(x)(map(_widened, x)) if type(x) in (list, tuple) else x
