"""Refuse, before the first byte is sent, tensors and groups that end in a backend's error or in a wrong result."""

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
    "ranks_of",
    "refuse_forward_ad",
    "refuse_tracing",
    "refuse_transforms",
    "state_of",
    "world_of",
]

_strided = torch.strided
# The public way to ask, `torch.fx.experimental.proxy_tensor.get_proxy_mode`, costs an import of torch.fx and sympy.
# Tested with torch 2.11, 2.13 and 2.15.
_modes = torch._C._len_torch_dispatch_stack
_proxy_mode = torch._C._TorchDispatchModeKey.PROXY
_MOST = 2**62
_members: dict[ProcessGroup, Any] = getattr(distributed_c10d, "_pg_group_ranks", {})
"""The groups that exist, in torch's own table; the length of an entry is the number of ranks, sooner than size()."""
_changes_in_place = hasattr(ProcessGroup, "reconfigure")  # torch 2.14 and newer
_Value = TypeVar("_Value")


class PerGroup(Generic[_Value]):
    """Values by process group. They are forgotten when the group is gone, or has another size or rank.

    ``reconfigure()`` of torch 2.14 changes both in place. A group whose ranks were exchanged for as many others cannot
    be told from the one before: torch counts no generations.
    """

    def __init__(self) -> None:
        self._values: WeakKeyDictionary[ProcessGroup, tuple[tuple[int, int] | None, _Value]] = WeakKeyDictionary()

    def get(self, group: ProcessGroup) -> _Value | None:
        """The value of a group; None where there is none."""
        found = self._values.get(group)
        if found is None or found[0] != state_of(group):
            return None
        return found[1]

    def set(self, group: ProcessGroup, value: _Value) -> _Value:
        """Keep a value for a group; returns it."""
        self._values[group] = state_of(group), value
        return value

    def forget(self, group: ProcessGroup) -> None:
        """Forget the value of a group."""
        self._values.pop(group, None)

    def __len__(self) -> int:
        return len(self._values)


def state_of(group: ProcessGroup) -> tuple[int, int] | None:
    """Size and own rank of a group where they may change."""
    return (group.size(), group.rank()) if _changes_in_place else None


def check_input(x: Tensor, name: str) -> None:
    """Check what ``name`` is about to send.

    Raises:
        ArgumentError: a DTensor, or a tensor that is not one strided block of memory.
        UnsupportedError: ``x`` carries a tangent of forward-mode AD, or the call is traced by ``make_fx``.
    """
    if forward_ad._current_level >= 0:
        refuse_forward_ad(x, name)
    if _modes():
        refuse_tracing(name)
    if type(x) is not Tensor or x.layout is not _strided or x.is_nested:
        check_kind(x, name)


def checked_dim(x: Tensor, dim: int, name: str) -> int:
    """``dim`` counted from the front.

    Raises:
        ArgumentError: not an integer, or a tensor that ``check_kind`` refuses.
        ShapeError: ``x`` has no such dim.
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
    """Integers as a tuple.

    Raises:
        ArgumentError: something else; ``what`` begins the message.
        ShapeError: one is beyond 2**62, which no tensor has and no index array holds.
    """
    try:
        result = tuple([operator.index(each) for each in values])
    except TypeError:
        raise ArgumentError(f"{what} must be ints, not {values!r:.80}") from None
    if any(abs(each) > _MOST for each in result):
        raise ShapeError(f"{what}: {values!r:.80} is beyond 2**62")
    return result


def world_of(group: ProcessGroup, name: str) -> int:
    """Number of ranks of a group.

    Raises:
        GroupError: it was destroyed. A group that torch never registered is its maker's business.
    """
    if group in _members:
        return group.size() if _changes_in_place else len(_members[group])
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
    """Global ranks of a group, in group order.

    Raises:
        GroupError: the group was destroyed; or it was reconfigured to another size or order, and torch's table has its
            ranks of before.
    """
    world_of(group, name)
    ranks = dist.get_process_group_ranks(group)
    if _changes_in_place and group in _members:
        rank, size = group.rank(), group.size()
        if size != len(ranks) or _members[group].get(dist.get_rank()) != rank:
            raise GroupError(
                f"{name}: the process group {group.group_name!r} was reconfigured to {size} ranks, of which torch does "
                f"not know the global ranks (it has those of before, {ranks}); make a new group"
            )
    return ranks


def refuse_forward_ad(x: Tensor, name: str) -> None:
    """Refuse a dual tensor; called where a dual level is entered.

    Raises:
        UnsupportedError: a collective would send the values alone, and the tangent would come out as zero.
    """
    if is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError(f"{name}: forward-mode AD (dual tensors, torch.func.jvp) has no rule for collectives")


def refuse_tracing(name: str) -> None:
    """Refuse a call that ``make_fx`` traces; called where a dispatch mode is active.

    Raises:
        UnsupportedError: ``make_fx`` records the start of a collective and not the wait for it, so that its graph reads
            the result too early.
    """
    if torch._C._get_dispatch_mode(_proxy_mode) is not None:
        raise UnsupportedError(f"{name}: make_fx does not record the wait for a collective; trace with torch.export")


def refuse_transforms(x: Tensor, name: str, key: str) -> None:
    """Refuse tensors that are more than their data: inside of transforms of functions, or with a tangent.

    Raises:
        UnsupportedError: an exchange would send the data alone.
    """
    if is_functorch_wrapped_tensor(x):
        raise UnsupportedError(
            f"{name}: {key} is inside a transform of torch.func (vmap, grad, jvp), which has no rule"
        )
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        refuse_forward_ad(x, name)


def check_data(x: Tensor, name: str) -> None:
    """``check_kind``, and that there is data: a peer waits for it.

    Raises:
        ArgumentError: a meta or fake tensor, or what ``check_kind`` refuses.
        UnsupportedError: the call is traced by ``make_fx``.
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
    """Refuse what is not one strided block of this rank's memory.

    Raises:
        ArgumentError: a sparse or nested tensor, or a DTensor.
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
