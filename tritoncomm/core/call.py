"""The prologue of a collective: ``enter`` checks it, reports it to the observer, and returns the span that ends it."""

from collections.abc import Sequence
from hashlib import blake2b
from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import variables
from tritoncomm.core.autograd import outside_graphs
from tritoncomm.core.validation import check_input, keeps_size, members, world_of
from tritoncomm.record import Span, hooks

__all__ = ["compare_arguments", "enter", "world_of_one"]

# From an observer's ``begin`` up to the line of the program, for the flight record: begin, enter, its caller, the
# public function, the program. So ``enter`` is called by a function that a public function has called.
_FRAMES_TO_PROGRAM = 4
_SHOWN = 160  # characters of an argument in an error
_PLAIN = (int, float, str, tuple, type(None))


def enter(
    name: str, kind: str, group: ProcessGroup, x: Tensor | Sequence[Tensor], arguments: tuple[Any, ...]
) -> Span | None:
    """Check a collective, report it to the observer, and return the span that ends it; None over a group of one rank.

    Args:
        kind: key of ``tritoncomm.debug.descriptor.KINDS``; ``arguments`` are in the order of that kind.
        x: tensor to check; the caller checks a sequence of tensors itself.
    """
    # For most groups the length of torch's own table of ranks is enough. The call of ``world_of``, which would find the
    # same, takes a tenth of a microsecond. It is needed for groups that are not in the table, and on releases of torch
    # in which a group may change its size.
    if keeps_size and group in members:
        world = len(members[group])
    else:
        world = world_of(group, name)
    if world == 1:
        return None
    if hooks.observer is not None:  # not by ``hooks.begin``: one more call would take 0.1 us
        hooks.observer.begin(name, kind, group, x, arguments, _FRAMES_TO_PROGRAM)
    span = Span(name, world)
    if isinstance(x, Tensor):
        check_input(x, name)
    return span


def compare_arguments(name: str, group: ProcessGroup, **arguments: Any) -> None:
    """In check mode, compare arguments that decide values and no message: no other rank would notice a difference.

    Args:
        arguments: by name; they are compared by their ``repr``, but for those of a dict (as a caller's own), in which
            only numbers and texts have values, and all others a type.
    """
    if variables.CHECK.value or variables.HASH.value:
        _compare(name, group, tuple([(key, _in_words(value)) for key, value in arguments.items()]))


def _in_words(value: Any) -> str:
    """Return an argument as a text of bounded length, with a digest of what is left out."""
    if isinstance(value, dict):
        value = {key: x if isinstance(x, _PLAIN) else type(x).__name__ for key, x in sorted(value.items())}
    text = repr(value)
    return text if len(text) < _SHOWN else f"{text[:_SHOWN]}... ({blake2b(text.encode(), digest_size=8).hexdigest()})"


@outside_graphs
def _compare(name: str, group: ProcessGroup, arguments: tuple[tuple[str, str], ...]) -> None:
    """Report the arguments to the observer as a call of their own, which sends nothing."""
    if hooks.observer is not None and world_of(group, name) > 1:
        hooks.observer.begin(name, "arguments", group, None, (arguments,), 6)
        hooks.observer.end(name, "view", 0, 0, 1)


def world_of_one(x: Tensor, name: str) -> int:
    """Return 1 for a plan over one rank, by which split sizes are checked, once ``x`` is known to have a shape."""
    check_input(x, name)
    return 1
