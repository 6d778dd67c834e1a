"""The names of a call: the tensors that this rank has, and the dtypes of those that only other ranks have."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tritoncomm.core.agreement import largest
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.plan import Item, Participants

__all__ = ["Kinds", "Sides", "kinds_of", "named", "shortened"]

Sides = Mapping[str, tuple[Layout, Layout]]
"""Source and target layout of every tensor, by name."""

# Every rank has the same torch, and so the same numbers. The first one also stands for a dtype that does not matter.
_DTYPES = sorted(
    {x for x in vars(torch).values() if isinstance(x, torch.dtype)}, key=lambda x: (x != torch.float32, str(x))
)
_ANY_SOURCE = 2  # a source of the first dtype
_NUMBERS = {dtype: number for number, dtype in enumerate(_DTYPES, start=1)}
_SHOWN = 3  # names of an error


@dataclass(frozen=True)
class Kinds:
    """Knowledge of a rank about the tensors of a call, by their names, which are equal on every rank.

    Attributes:
        names: of all tensors, in the order of the plan.
        sources: of every tensor twice the number of its dtype, plus 1 if it requires grad; 0 if this rank lacks it.
        results: of every result the number of its dtype; 0 if it is the tensor's, or that of an ``out`` elsewhere.
        has_outs: whether results that are 0 are those of an ``out`` that another rank has.
    """

    names: tuple[str, ...]
    sources: tuple[int, ...]
    results: tuple[int, ...]
    has_outs: bool

    @cached_property
    def _places(self) -> dict[str, int]:
        """Place of every name."""
        return {key: place for place, key in enumerate(self.names)}

    @property
    def is_complete(self) -> bool:
        """Whether this rank knows all that a plan needs."""
        return all(self.sources) and (all(self.results) or not self.has_outs)

    def told_by(self, moving: Sequence[Item], sides: Sides) -> "Kinds | None":
        """Return these kinds, completed by those of a plan's tensors; None if the plan is not one of these tensors."""
        items = {item.name: item for item in moving}
        sources, results = [], []
        for key, source, result in zip(self.names, self.sources, self.results, strict=True):
            item = items.pop(key, None)
            if item is None:  # a tensor that does not move has no part on a rank that lacks it, so any dtype will do
                if sides[key][0] != sides[key][1]:
                    return None
                sources.append(source or _ANY_SOURCE)
                results.append(result or sources[-1] // 2)
                continue
            # Of a source twice its dtype's number, and one more if it requires grad; of a result the number; 0:
            # unknown.
            plan_source, plan_result = 2 * _NUMBERS[item.dtype] + item.has_grad, _NUMBERS[item.result]
            if not result and not self.has_outs:
                result = plan_source // 2
            is_same = (item.source, item.target) == sides[key]
            if not is_same or source not in (0, plan_source) or result not in (0, plan_result):
                return None
            sources.append(plan_source)
            results.append(plan_result)
        return None if items else Kinds(self.names, tuple(sources), tuple(results), has_outs=False)

    def shared(self, participants: Participants, name: str) -> "Kinds":
        """Return what all ranks of the group know together; every rank calls.

        Raises:
            ArgumentError: no rank has a tensor of one of the names; on every rank.
        """
        numbers = [*self.sources, *self.results]
        if participants.group is not None:
            numbers = largest(name, participants.group, numbers)
        sources, results = tuple(numbers[: len(self.names)]), tuple(numbers[len(self.names) :])
        nobodys = [key for key, number in zip(self.names, sources, strict=True) if not number]
        if nobodys:
            raise ArgumentError(f"{name}: no rank of the group gives {shortened(nobodys)}")
        return Kinds(self.names, sources, results, has_outs=False)

    def source_of(self, key: str, device: torch.device) -> Tensor:
        """Return an empty tensor in place of the tensor ``key``, which this rank lacks."""
        number, records = divmod(self.sources[self._places[key]], 2)
        return torch.empty(0, dtype=_DTYPES[number - 1], device=device, requires_grad=bool(records))

    def result_of(self, key: str, default: torch.dtype, device: torch.device) -> Tensor:
        """Return an empty tensor in place of ``out`` of ``key``, which this rank lacks."""
        number = self.results[self._places[key]]
        return torch.empty(0, dtype=_DTYPES[number - 1] if number else default, device=device)


def kinds_of(name: str, tensors: Any, source: Any, dtype: Any, out: Any) -> Kinds:
    """Return what this rank knows of the tensors of a call; the arguments are those of ``reshard``.

    The names are those of ``tensors``, or, of two mappings, those of ``source``: a rank passes the tensors that it has.
    """
    by_name = named(tensors, name)
    names = tuple(by_name)
    if isinstance(tensors, Mapping) and isinstance(source, Mapping):
        names = tuple(named(source, name))
        known = set(names)
        unknown = [key for key in by_name if key not in known]
        if unknown:
            raise ArgumentError(f"{name}: nothing is given for {unknown}, but for {list(names)}")
    records = out is None and torch.is_grad_enabled()
    outs = {} if out is None else named(out, name)
    dtypes = dtype if isinstance(dtype, Mapping) else dict.fromkeys(names, dtype)
    results = [dtypes[key] if dtypes.get(key) is not None else outs.get(key) for key in names]
    return Kinds(
        names,
        sources=tuple([_number(by_name.get(key), records) for key in names]),
        results=tuple([_number(result) // 2 for result in results]),  # without the bit of a gradient
        has_outs=out is not None,
    )


def _number(x: Any, records: bool = False) -> int:
    """Return the number of a tensor or of a dtype in ``Kinds.sources``; 0 of None, 2 of what is neither."""
    if x is None:
        return 0
    kind: Any = x if isinstance(x, torch.dtype) else getattr(x, "dtype", None)
    return 2 * _NUMBERS.get(kind, 1) + (records and bool(getattr(x, "requires_grad", False)))


def shortened(names: Sequence[str]) -> str:
    """Write names as text, three at most."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more


def named(tensors: Any, name: str) -> dict[str, Any]:
    """Return tensors, or their dtypes, by name: a sequence by its indices, a single one as ``tensor``."""
    if isinstance(tensors, Tensor | torch.dtype):
        return {"tensor": tensors}
    if isinstance(tensors, list | tuple):
        return {str(index): x for index, x in enumerate(tensors)}
    if not isinstance(tensors, Mapping):
        raise ArgumentError(
            f"{name}: expected a tensor, a mapping or a sequence of tensors, not {type(tensors).__name__}"
        )
    by_name = {str(key): x for key, x in tensors.items()}
    if len(by_name) < len(tensors):
        texts = [str(key) for key in tensors]
        raise ArgumentError(
            f"{name}: several names are {sorted({text for text in texts if texts.count(text) > 1})} as text"
        )
    return by_name
