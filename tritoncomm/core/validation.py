"""Checks of tensors and groups before the first byte is sent: unchecked they end in a backend's error or wrong data."""

import operator
import sys
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.autograd import forward_ad
from torch.distributed import ProcessGroup, distributed_c10d

from tritoncomm.errors import ArgumentError, GroupError, ShapeError, UnsupportedError

__all__ = [
    "PerGroup",
    "check_data",
    "check_input",
    "check_kind",
    "checked_dim",
    "checked_ints",
    "members",
    "rank_in",
    "ranks_of",
    "refuse_forward_ad",
    "refuse_tracing",
    "refuse_transforms",
    "state_of",
    "world_of",
]

_strided = torch.strided
_modes = torch._C._len_torch_dispatch_stack
_MOST = 2**62
members: dict[ProcessGroup, Any] = getattr(distributed_c10d, "_pg_group_ranks", {})
"""torch's table of the groups that exist. ``len`` of an entry is the number of ranks, faster than ``group.size()``."""
_changes_in_place = hasattr(ProcessGroup, "reconfigure")  # torch 2.14 and newer
_Value = TypeVar("_Value")


class PerGroup(Generic[_Value]):
    """A cache of one value per process group. A value goes when its group is freed, or gets another size or rank.

    ``reconfigure()`` of torch 2.14 changes both in place. A group that exchanged its ranks for as many others looks as
    before: torch counts no generations.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[ProcessGroup, tuple[tuple[int, int] | None, _Value]] = WeakKeyDictionary()

    def get(self, group: ProcessGroup) -> _Value | None:
        """Return the value of ``group``; None if there is none, or it was set for another size or rank."""
        found = self._values.get(group)
        if found is None or found[0] != state_of(group):
            return None
        return found[1]

    def set(self, group: ProcessGroup, value: _Value) -> _Value:
        """Store ``value`` for ``group``, and return it."""
        self._values[group] = state_of(group), value
        return value

    def forget(self, group: ProcessGroup) -> None:
        """Delete the value of ``group``, if there is one."""
        self._values.pop(group, None)

    def __len__(self) -> int:
        return len(self._values)


def state_of(group: ProcessGroup) -> tuple[int, int] | None:
    """Return (size, own rank) of ``group`` on torch releases that change them in place, 2.14 and newer; else None."""
    return (group.size(), group.rank()) if _changes_in_place else None


def check_input(x: Tensor, name: str) -> None:
    """Check the tensor that ``name`` is about to send.

    Raises:
        ArgumentError: ``x`` is a DTensor, or not one strided block of memory.
        UnsupportedError: ``x`` has a tangent of forward-mode AD, or ``make_fx`` traces the call.
    """
    if forward_ad._current_level >= 0:
        refuse_forward_ad(x, name)
    if _modes():
        refuse_tracing(name)
    if type(x) is not Tensor or x.layout is not _strided or x.is_nested:
        check_kind(x, name)


def checked_dim(x: Tensor, dim: int, name: str) -> int:
    """Return ``dim`` of ``x``, which may be negative, counted from the front.

    Raises:
        ArgumentError: ``dim`` is no integer, or ``x`` a tensor that ``check_kind`` refuses.
        ShapeError: ``x`` has no such dim. ``name`` begins the message.
    """
    if type(dim) is not int:
        try:
            dim = int(dim.__index__())
        except (AttributeError, TypeError):
            raise ArgumentError(f"{name}: a dim must be an int, not {dim!r}") from None
    if not -x.dim() <= dim < x.dim():
        check_kind(x, name)  # a nested tensor has no shape
        raise ShapeError(f"{name}: dim {dim} is out of range for shape {tuple(x.shape)}")
    return dim % x.dim()


def checked_ints(values: Any, what: str) -> tuple[int, ...]:
    """Return ``values``, an iterable of integers, as a tuple of ints.

    Raises:
        ArgumentError: ``values`` is something else; ``what`` begins the message.
        ShapeError: an integer is beyond 2**62: no tensor has such a size, and no index array holds it.
    """
    try:
        result = tuple([operator.index(each) for each in values])
    except TypeError:
        raise ArgumentError(f"{what} must be ints, not {values!r:.80}") from None
    if any(abs(each) > _MOST for each in result):
        raise ShapeError(f"{what}: {values!r:.80} is beyond 2**62")
    return result


def world_of(group: ProcessGroup, name: str) -> int:
    """Return the number of ranks of ``group``.

    Raises:
        GroupError: the group was destroyed. A group that torch never registered passes, as fault-tolerant trainers make
            some. ``name`` begins the message.
    """
    if group in members:
        return group.size() if _changes_in_place else len(members[group])
    if group in distributed_c10d._world.pg_map:  # of ranks that are threads
        return group.size()
    try:
        registered = group.group_name
    except RuntimeError:
        registered = ""
    if registered:
        try:
            _resolve_process_group(registered)
        except (RuntimeError, ValueError):
            which = f"process group {registered!r}" if dist.is_initialized() else "process group, as all others,"
            raise GroupError(f"{name}: the {which} was destroyed") from None
    return group.size()


def ranks_of(group: ProcessGroup, name: str) -> list[int]:
    """Return the global ranks of ``group``, in the order of the group.

    Raises:
        GroupError: the group was destroyed; or it was reconfigured to another size or order, and torch's table has its
            ranks of before.
    """
    _check_ranks(group, name)
    return dist.get_process_group_ranks(group)


def rank_in(group: ProcessGroup, global_rank: Any, name: str) -> int:
    """Return the rank in ``group`` of a global rank, in a time that does not grow with the group.

    Raises:
        GroupError: the group has no such rank; or as ``ranks_of``.
    """
    _check_ranks(group, name)
    try:
        rank = operator.index(global_rank)
        if 0 <= rank < dist.get_world_size():
            return dist.get_group_rank(group, rank)
    except (TypeError, ValueError):
        pass
    raise GroupError(f"{name}: global rank {global_rank!r} is not in the group {ranks_of(group, name)}")


def _check_ranks(group: ProcessGroup, name: str) -> None:
    """Raise ``GroupError`` where torch does not know the global ranks of ``group``, as ``ranks_of`` describes."""
    world_of(group, name)
    if _changes_in_place and group in members:
        rank, size = group.rank(), group.size()
        if size != len(members[group]) or members[group].get(dist.get_rank()) != rank:
            raise GroupError(
                f"{name}: the process group {group.group_name!r} was reconfigured to {size} ranks, of which torch does "
                f"not know the global ranks (it has the former ones, {list(members[group])}); make a new group"
            )


def refuse_forward_ad(x: Tensor, name: str) -> None:
    """Reject a dual tensor; the caller has found that a dual level of forward-mode AD is entered.

    Raises:
        UnsupportedError: ``x`` has a tangent. A collective would send the values alone, and the tangent of the result
            would be zero.
    """
    if is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError(f"{name}: forward-mode AD (dual tensors, torch.func.jvp) has no rule for collectives")


def refuse_tracing(name: str) -> None:
    """Reject a call that ``make_fx`` traces; the caller has found that a dispatch mode is active.

    Raises:
        UnsupportedError: ``make_fx`` traces. It records the start of a collective and not the wait, so that its graph
            would read the result too early.
    """
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # whoever traces has imported it, with sympy
    if tracer is not None and tracer.get_proxy_mode() is not None:
        raise UnsupportedError(f"{name}: make_fx does not record the wait for a collective; trace with torch.export")


def refuse_transforms(x: Tensor, name: str, key: str) -> None:
    """Reject a tensor inside a transform of torch.func, or with a tangent: an exchange would send its data alone.

    Args:
        x: tensor to check.
        name: function that the program called.
        key: name of the tensor in that call.

    Raises:
        UnsupportedError: ``x`` is such a tensor.
    """
    if is_functorch_wrapped_tensor(x):
        raise UnsupportedError(
            f"{name}: {key} is inside a transform of torch.func (vmap, grad, jvp), which has no rule"
        )
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        refuse_forward_ad(x, name)


def check_data(x: Tensor, name: str) -> None:
    """Check that ``x``, which ``name`` is about to send to a waiting peer, has data and is one strided block of memory.

    Raises:
        ArgumentError: ``x`` is a meta or fake tensor, a sparse or nested one, or a DTensor.
        UnsupportedError: ``make_fx`` traces the call.
    """
    if _modes():
        refuse_tracing(name)
    if type(x) is Tensor and not (x.is_meta or x.is_nested) and x.layout is _strided:
        return
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # whoever has a FakeTensor has imported it
    if x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)):
        raise ArgumentError(f"{name}: a {'meta' if x.is_meta else 'fake'} tensor has no data to send")
    check_kind(x, name)


def check_kind(x: Tensor, name: str) -> None:
    """Check that ``x``, an argument of ``name``, is one strided block of this rank's memory.

    Raises:
        ArgumentError: ``x`` is a sparse or nested tensor, or a DTensor.
    """
    if x.is_nested:
        raise ArgumentError(
            f"{name}: expected a strided tensor, not a nested one; pass its .values() or a padded tensor"
        )
    if x.layout is not _strided:
        raise ArgumentError(f"{name}: expected a strided tensor, not one of layout {x.layout}; call .to_dense()")
    distributed = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise ArgumentError(f"{name}: expected a plain tensor, not a DTensor; pass its local shard, .to_local()")
