"""The prologue of a collective: ``enter`` checks it, reports it to the observer, and returns the span that ends it."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core.validation import check_input, keeps_size, members, world_of
from tritoncomm.record import Span, hooks

__all__ = ["enter", "world_of_one"]


def enter(
    name: str, kind: str, group: ProcessGroup, x: Tensor | Sequence[Tensor], arguments: tuple[Any, ...]
) -> Span | None:
    """Check a collective, report it to the observer, and return the span that ends it; None over a group of one rank.

    Args:
        kind: key of ``tritoncomm.debug.descriptor.KINDS``; ``arguments`` are in the order of that kind.
        x: tensor to check; the caller checks a sequence of tensors itself.
    """
    # What ``world_of`` does for a group that torch knows, which takes a tenth of a microsecond more as a call.
    world = len(members[group]) if keeps_size and group in members else world_of(group, name)
    if world == 1:
        return None
    if hooks.observer is not None:  # not by ``hooks.begin``: one more call would take 0.1 us
        # The flight record searches the program's line from three frames above this one on, which are 4 from ``begin``.
        # So the caller is a function that a public function has called.
        hooks.observer.begin(name, kind, group, x, arguments, 4)
    span = Span(name, world)
    if isinstance(x, Tensor):
        check_input(x, name)
    return span


def world_of_one(x: Tensor, name: str) -> int:
    """Return 1 for a plan over one rank, by which split sizes are checked, once ``x`` is known to have a shape."""
    check_input(x, name)
    return 1
