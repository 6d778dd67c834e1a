"""Calls of ``reshard`` that are repeated: the plans of the last ones, without reading their arguments again."""

from collections import OrderedDict
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tritoncomm.core.validation import PerGroup
from tritoncomm.reshard.arguments import Call, plan_is_kept
from tritoncomm.reshard.layout import Layout

__all__ = ["keep", "recent_plan"]

_KEPT = 64  # of a group
_registered: Any = getattr(distributed_c10d, "_pg_group_ranks", {})


class _Recent(NamedTuple):
    """One call.

    Attributes:
        plan: what it executed.
        exchange: that of the plan.
        key: of the exchange among the group's plans.
        sides: source and target as they were given, which keeps their identities from being those of others.
        layouts: what was in them then.
    """

    plan: Any
    exchange: Any
    key: Any
    sides: tuple[Any, Any]
    layouts: tuple[Any, ...]


_calls: "PerGroup[OrderedDict[Any, _Recent]]" = PerGroup()


def recent_plan(source: Any, target: Any, group: Any, options: tuple[Any, ...]) -> Any:
    """The plan of a call with these layouts, the same objects with the same contents, and options; None otherwise.

    It stays among those that are kept longest, as it does on ranks that read their arguments: all ranks forget the same
    ones, so that either all of them compare a plan or none.
    """
    if not len(_calls):
        return None
    group = dist.group.WORLD if group is None else group
    calls = _calls.get(group) if isinstance(group, ProcessGroup) and group in _registered else None
    identity = id(source), id(target), options
    try:
        known = None if calls is None else calls.get(identity)
    except TypeError:  # dtypes by name
        return None
    if calls is None or known is None or known.layouts != (source, target):
        return None
    if not plan_is_kept(group, known.key, known.exchange):
        return None
    calls.move_to_end(identity)
    return known.plan


def keep(made: tuple[Any, Any], call: Call, source: Any, target: Any, options: tuple[Any, ...]) -> None:
    """Remember a call, its plan and exchange, if its layouts are plain ones and it records no gradient."""
    sides = source, target
    dtype = options[0]
    if call.group is None or not (dtype is None or isinstance(dtype, torch.dtype)):
        return
    if any(has_grad for *_, has_grad in call.rows) or not all(map(_is_plain, sides)):
        return
    call.locals.clear()  # a plan keeps no tensors
    call.outs.clear()
    group, call.group = call.group, None
    calls = _calls.get(group)
    if calls is None:
        calls = _calls.set(group, OrderedDict())
    copied = tuple(side if isinstance(side, Layout) else side.copy() for side in sides)
    calls[id(source), id(target), options] = _Recent(*made, call.key, sides, copied)
    if len(calls) > _KEPT:
        calls.popitem(last=False)


def _is_plain(side: Any) -> bool:
    """Whether it is a layout, or layouts by name or in a list."""
    if isinstance(side, dict):
        side = list(side.values())
    return isinstance(side, Layout) or (isinstance(side, list) and all(isinstance(each, Layout) for each in side))
