"""The prologue of a collective: ``enter`` checks it, reports it to the observer, and returns the span that ends it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core.validation import check_input, world_of
from tritoncomm.record import Span, hooks

__all__ = ["enter"]


def enter(
    name: str, kind: str, group: ProcessGroup, x: Tensor | Sequence[Tensor], arguments: tuple[Any, ...]
) -> Span | None:
    """Start a collective of ``name`` over ``group``; return its span, or None where the group has one rank.

    Nothing is checked or reported over a group of one rank. The caller is a function that a public function has called:
    the flight record looks for the line of the program three frames above this one, or higher.

    Args:
        name: function that the program called, for errors, counters and reports.
        kind: collective that runs, a key of ``tritoncomm.debug.descriptor.KINDS``.
        group: ranks that take part.
        x: tensor that is sent, which is checked; a sequence of tensors is left to the caller to check.
        arguments: arguments of the kind, in its order.

    Raises:
        GroupError: the group was destroyed.
        ArgumentError, UnsupportedError: ``check_input`` refuses ``x``.
        CommError: the observer refuses the call, as check mode does where ranks differ.
    """
    world = world_of(group, name)
    if world == 1:
        return None
    if hooks.observer is not None:  # not by ``hooks.begin``: one more call would take 0.1 us
        hooks.observer.begin(name, kind, group, x, arguments, 4)
    span = Span(name, world)
    if isinstance(x, Tensor):
        check_input(x, name)
    return span
