"""Tensors of a plan whose layout and dtype stay, beside those that move."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncomm.core.function import without_graph
from tritoncomm.core.memory import recognizer, share_memory
from tritoncomm.reshard.execute import Exchange, apply
from tritoncomm.reshard.steps import addresses_of

__all__ = ["Stays"]


class _Recognized(NamedTuple):
    """Tensors that stayed in a call.

    Attributes:
        are_as_before: whether others are of the same kind; see ``core.memory.recognizer``.
        require_grad: whether one of them does.
        moved: what the exchange recognises of the same call.
        addresses: of all of them, where they were copied into others.
    """

    are_as_before: Callable[..., bool]
    require_grad: bool
    moved: Any
    addresses: Any


class Stays:
    """The exchange of the tensors that move, with those that stay handed back, or copied into ``out``.

    Args:
        stays: by tensor.
        exchange: of the others.
    """

    def __init__(self, stays: Sequence[bool], exchange: Exchange) -> None:
        self._exchange = exchange
        self._staying, self._moving = ([i for i, each in enumerate(stays) if each is kind] for kind in (True, False))
        self._recognized: _Recognized | None = None
        self._recognized_into: _Recognized | None = None

    def run(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None, name: str) -> list[Tensor]:
        """All results, of checked local tensors; inside autograd without ``out``."""
        stay, moving = self._parts(tensors)
        if out is None:
            moved = apply(self._exchange, moving, name)
            self._recognize(stay, [], None)
            keep = torch.is_grad_enabled()
            return self._joined([x if keep else without_graph(x) for x in stay], moved)
        copies, (kept, into) = [x.detach() for x in stay], self._parts(out)
        is_shared = share_memory(out, tensors)
        if is_shared:  # what is written first may be read afterwards
            copies = [x.clone() for x in copies]
        self._exchange.run(moving, into, name)
        for target, x in zip(kept, copies, strict=True):
            target.detach().copy_(x)
        self._recognized_into = None
        # What moved is known of this call, or of another one (of another thread, too) with this memory, or not at all.
        known = self._exchange.recognized_into
        if not is_shared and known is not None and known.addresses == addresses_of(moving, into):
            self._recognize(stay, kept, known)
        return list(out)

    def replayed(
        self, tensors: Sequence[Tensor], name: str, out: Sequence[Tensor] | None = None
    ) -> Sequence[Tensor] | None:
        """``run`` for tensors of the kind that it had before; None for others. See ``Exchange.replayed``."""
        known = self._recognized if out is None else self._recognized_into
        if known is None or (known.require_grad and torch.is_grad_enabled()):
            return None
        stay, moving = self._parts(tensors)
        if out is None:
            if not known.are_as_before(*stay):
                return None
            moved = self._exchange.replayed(moving, name)
            if moved is None:
                return None
            return self._joined([without_graph(x) for x in stay] if known.require_grad else stay, moved)
        kept, into = self._parts(out)
        # That memory is apart was seen for all tensors of one call.
        if known.moved is not self._exchange.recognized_into or not known.are_as_before(*stay, *kept):
            return None
        if known.addresses != addresses_of(stay, kept) or self._exchange.replayed(moving, name, into) is None:
            return None
        torch._foreach_copy_(kept, stay)  # pyright: ignore[reportPrivateImportUsage]
        return out

    def _parts(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Those that stay, those that move."""
        return [tensors[i] for i in self._staying], [tensors[i] for i in self._moving]

    def _joined(self, stay: Sequence[Tensor], moved: Sequence[Tensor]) -> list[Tensor]:
        """All of them in the order of the plan."""
        made: list[Any] = [None] * (len(stay) + len(moved))
        for places, results in ((self._staying, stay), (self._moving, moved)):
            for i, x in zip(places, results, strict=True):
                made[i] = x
        return made

    def _recognize(self, stay: Sequence[Tensor], kept: Sequence[Tensor], moved: Any) -> None:
        """Know tensors of this kind from now on, if they have nothing special."""
        given, known = [*stay, *kept], None if kept else self._recognized
        if known is not None and known.are_as_before(*given):
            return
        made = recognizer(given)
        if made is not None and not any(x.is_conj() or x.is_neg() for x in given):
            known = _Recognized(made, any(x.requires_grad for x in given), moved, addresses_of(stay, kept))
            if kept:
                self._recognized_into = known
            else:
                self._recognized = known
