"""Signatures of Megatron's functions and classes: a name is replaced if ours takes every call that Megatron's takes."""

import inspect
from collections.abc import Iterator
from typing import Any

from tritoncomm.errors import UnsupportedError
from tritoncomm.p2p import P2PCommunicator

__all__ = ["check_signature", "forward_of", "parameters_of"]


def check_signature(label: str, theirs: Any, ours: Any) -> None:
    """Reject a function of Megatron's if ours does not take every call that it takes."""
    for suffix, expected, offered in _callables(label, theirs, ours):
        names = parameters_of(expected)
        own = parameters_of(offered)
        more = own[len(names) :]  # arguments that only ours has: a call of Megatron's leaves them out
        if len(names) > len(own) or any(p.default is p.empty for p in more) or not all(map(_takes, own, names)):
            signatures = f"({', '.join(map(str, names))}), ours takes ({', '.join(map(str, own))})"
            raise UnsupportedError(f"{label}{suffix} takes {signatures}")


def _takes(ours: inspect.Parameter, theirs: inspect.Parameter) -> bool:
    """Whether our parameter takes each value that Megatron's takes; one without a default may have any in ours."""
    is_same = (ours.name, ours.kind) == (theirs.name, theirs.kind)
    return is_same and (theirs.default is theirs.empty or theirs.default == ours.default)


def parameters_of(function: Any) -> list[inspect.Parameter]:
    """Return the parameters that a caller passes, without annotations, which may differ."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{function!r} has no signature") from error
    return [p.replace(annotation=p.empty) for p in parameters if p.name != "ctx"]


def forward_of(autograd_class: Any) -> Any:
    """Return the function with the arguments of ``apply``: ``forward``, or ``apply`` of our classes without it."""
    return getattr(autograd_class, "forward", None) or getattr(autograd_class, "apply", None)


def _callables(label: str, theirs: Any, ours: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (suffix of the name, Megatron's, ours) of a function, or of the functions that callers of a class call."""
    if inspect.isclass(theirs) != inspect.isclass(ours) or not callable(theirs):
        raise UnsupportedError(f"{label} is an object of {type(theirs).__name__}")
    if not inspect.isclass(theirs):
        yield "", theirs, ours
    elif ours is not P2PCommunicator:
        yield ".apply", forward_of(theirs), forward_of(ours)
    else:
        for member in inspect.classify_class_attrs(theirs):
            if member.defining_class is object or member.kind == "data":
                continue
            offered = inspect.getattr_static(ours, member.name, None)
            if offered is None or isinstance(offered, property) != (member.kind == "property"):
                raise UnsupportedError(f"{label}.{member.name}: tritoncomm has no such {member.kind}")
            if member.kind != "property":
                yield f".{member.name}", getattr(theirs, member.name), getattr(ours, member.name)
