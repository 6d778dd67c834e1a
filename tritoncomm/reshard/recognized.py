"""Tensors that a plan was executed with, so that others of their kind need no checks."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor

from tritoncomm.core.memory import extent_of, has_memory, recognizer
from tritoncomm.core.ops import path_for
from tritoncomm.reshard.steps import Addresses, Step, addresses_of

__all__ = ["Recognized", "recognized"]


class Recognized(NamedTuple):
    """Tensors of one call.

    Attributes:
        are_as_before: whether others are of the same kind; see ``core.memory.recognizer``.
        steps: the buckets for their strides.
        require_grad: whether one of them does.
        extents: ``extent_of`` all of them.
        direct: numbers of those, before and after, of which blocks are copied directly.
        addresses: of all tensors, where results were written into.
        seen: addresses of the tensors that had memory last.
    """

    are_as_before: Callable[..., bool]
    steps: list[Step]
    require_grad: bool
    extents: list[int]
    direct: list[int]
    addresses: Addresses
    seen: set[tuple[int, ...]]

    def have_memory(self, tensors: Sequence[Tensor], results: Sequence[Tensor] | None, before: tuple[int, ...]) -> bool:
        """Whether what will be read without a look at its bounds was not freed; ``before`` are the tensors' addresses.

        Kernels read everything so, and torch what is copied directly. Storages take 0.5 us each, so for kernels they
        are asked when an address has changed, as that of freed memory has.
        """
        if path_for(tensors[0], "segments") == "torch":
            given = [*tensors, *(results or ())] if self.direct else ()
            return all(has_memory(given[i], self.extents[i]) for i in self.direct)
        if before not in self.seen:
            if not all(map(has_memory, tensors, self.extents)):
                return False
            self.seen.clear()
            self.seen.add(before)
        return True


def recognized(tensors: Sequence[Tensor], results: Sequence[Tensor] | None, steps: list[Step]) -> Recognized | None:
    """Tensors, and results that were written into; None if they have something special."""
    given = [*tensors, *(results or ())]
    made = recognizer(given) if len({x.device for x in given}) == 1 else None
    if made is None:
        return None
    used, count = {i for step in steps for i in step.direct}, len(tensors)
    used |= {count + i for i in used if results is not None}
    addresses, requires_grad = addresses_of(tensors, results or ()), any(x.requires_grad for x in given)
    return Recognized(made, steps, requires_grad, [*map(extent_of, given)], sorted(used), addresses, {addresses[0]})
