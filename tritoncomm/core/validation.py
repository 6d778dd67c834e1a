"""Checks of tensors and groups before the first byte is sent: unchecked they end in a backend's error or wrong data."""

import operator
import sys
from collections.abc import Sequence
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
    "check_inputs",
    "check_kind",
    "check_tensor",
    "checked_dim",
    "checked_ints",
    "keeps_size",
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
keeps_size = not hasattr(ProcessGroup, "reconfigure")
"""Whether a group keeps its ranks: before torch 2.14."""
_Value = TypeVar("_Value")


class PerGroup(Generic[_Value]):
    """A cache of one value per process group. A value goes when its group is freed, or gets another size or rank."""

    def __init__(self) -> None:
        # reconfigure() of torch 2.14 changes a group in place, so each value stands with its ``state_of``. A group that
        # exchanged its ranks for as many others looks as before: torch counts no generations.
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
    return None if keeps_size else (group.size(), group.rank())


def check_input(x: Tensor, name: str) -> None:
    """Reject a tensor that no collective sends: one that ``check_kind`` rejects, a tangent, a ``make_fx`` trace."""
    if forward_ad._current_level >= 0:
        refuse_forward_ad(x, name)
    if _modes():
        refuse_tracing(name)
    if type(x) is not Tensor or x.layout is not _strided or x.is_nested or x.is_quantized:
        check_kind(x, name)


def check_inputs(tensors: Sequence[Tensor], name: str) -> None:
    """Reject tensors of one message that ``check_input`` rejects, or that differ in dtype or device."""
    for x in tensors:  # what ``check_input`` does, which would take half of a small exchange if it were called for each
        if forward_ad._current_level >= 0:
            refuse_forward_ad(x, name)
        if type(x) is not Tensor or x.layout is not _strided or x.is_nested or x.is_quantized:
            check_kind(x, name)
    if _modes():
        refuse_tracing(name)
    first = tensors[0]
    for x in tensors[1:]:
        if x.dtype is not first.dtype or x.device != first.device:
            raise ArgumentError(
                f"{name}: one message needs one dtype and device, not {first.dtype} on {first.device} "
                f"and {x.dtype} on {x.device}"
            )


def checked_dim(x: Tensor, dim: int, name: str) -> int:
    """Return ``dim`` of ``x``, which may be negative, counted from the front."""
    if type(dim) is not int:
        try:
            dim = int(dim.__index__())
        except (AttributeError, TypeError):
            raise ArgumentError(f"{name}: a dim must be an int, not {dim!r}") from None
    dims = x.dim()
    if not -dims <= dim < dims:
        check_kind(x, name)  # a nested tensor has no shape
        raise ShapeError(f"{name}: dim {dim} is out of range for shape {tuple(x.shape)}")
    return dim % dims


def checked_ints(values: Any, what: str) -> tuple[int, ...]:
    """Return ``values``, an iterable of integers, as a tuple of ints; ``what`` begins the text of an error."""
    try:
        result = tuple([operator.index(each) for each in values])
    except TypeError:
        raise ArgumentError(f"{what} must be ints, not {values!r:.80}") from None
    # No tensor has such a size, and no index array holds it.
    if any(abs(each) > _MOST for each in result):
        raise ShapeError(f"{what}: {values!r:.80} is beyond 2**62")
    return result


def world_of(group: ProcessGroup, name: str) -> int:
    """Return the number of ranks of ``group``; reject a destroyed one."""
    if group in members:  # its ranks; the length of a dict takes less time than a call into torch
        return len(members[group]) if keeps_size else group.size()
    if group in distributed_c10d._world.pg_map:  # where ranks are threads, each thread has a table of its own
        return group.size()
    try:
        registered = group.group_name
    except RuntimeError:
        registered = ""
    # A group that torch never registered passes: fault-tolerant trainers make some.
    if registered:
        try:
            _resolve_process_group(registered)
        except (RuntimeError, ValueError):
            which = f"process group {registered!r}" if dist.is_initialized() else "process group, as all others,"
            raise GroupError(f"{name}: the {which} was destroyed") from None
    return group.size()


def ranks_of(group: ProcessGroup, name: str) -> list[int]:
    """Return the global ranks of ``group``, in the order of the group."""
    _check_ranks(group, name)
    return dist.get_process_group_ranks(group)


def rank_in(group: ProcessGroup, global_rank: Any, name: str) -> int:
    """Return the rank in ``group`` of a global rank, in a time that does not grow with the group."""
    _check_ranks(group, name)
    try:
        rank = operator.index(global_rank)
        if 0 <= rank < dist.get_world_size():
            return dist.get_group_rank(group, rank)
    except (TypeError, ValueError):  # no integer, or a rank outside of the group
        pass
    raise GroupError(f"{name}: global rank {global_rank!r} is not in the group {ranks_of(group, name)}")


def _check_ranks(group: ProcessGroup, name: str) -> None:
    """Reject a group that was destroyed, or reconfigured so that torch's table has its global ranks of before."""
    world_of(group, name)
    if not keeps_size and group in members:
        rank, size = group.rank(), group.size()
        if size != len(members[group]) or members[group].get(dist.get_rank()) != rank:
            raise GroupError(
                f"{name}: the process group {group.group_name!r} was reconfigured to {size} ranks, of which torch does "
                f"not know the global ranks (it has the former ones, {list(members[group])}); make a new group"
            )


def refuse_forward_ad(x: Tensor, name: str) -> None:
    """Reject a dual tensor; the caller has found that a dual level of forward-mode AD is entered."""
    # A collective would send the values alone, and the tangent of the result would be zero.
    if is_functorch_wrapped_tensor(x) or forward_ad.unpack_dual(x).tangent is not None:
        raise UnsupportedError(f"{name}: forward-mode AD (dual tensors, torch.func.jvp) has no rule for collectives")


def refuse_tracing(name: str) -> None:
    """Reject a call that ``make_fx`` traces; the caller has found that a dispatch mode is active."""
    tracer = sys.modules.get("torch.fx.experimental.proxy_tensor")  # whoever traces has imported it, with sympy
    # It records the start of a collective and not the wait, so that its graph would read the result too early.
    if tracer is not None and tracer.get_proxy_mode() is not None:
        raise UnsupportedError(f"{name}: make_fx does not record the wait for a collective; trace with torch.export")


def refuse_transforms(x: Tensor, name: str, key: str) -> None:
    """Reject ``x``, the argument ``key``, inside a transform of torch.func or with a tangent; only data would go."""
    if is_functorch_wrapped_tensor(x):
        raise UnsupportedError(
            f"{name}: {key} is inside a transform of torch.func (vmap, grad, jvp), which has no rule"
        )
    if forward_ad._current_level >= 0:  # pyright: ignore[reportPrivateUsage]
        refuse_forward_ad(x, name)


def check_data(x: Tensor, name: str) -> None:
    """Check that ``x``, on its way to a waiting peer, has data and is one strided block of memory."""
    if _modes():
        refuse_tracing(name)
    if type(x) is Tensor and not (x.is_meta or x.is_nested or x.is_quantized) and x.layout is _strided:
        return
    fakes = sys.modules.get("torch._subclasses.fake_tensor")  # whoever has a FakeTensor has imported it
    if x.is_meta or (fakes is not None and isinstance(x, fakes.FakeTensor)):
        raise ArgumentError(f"{name}: a {'meta' if x.is_meta else 'fake'} tensor has no data to send")
    check_kind(x, name)


def check_tensor(x: Any, key: str, name: str) -> None:
    """Check that ``x``, the argument ``key``, is a tensor that has data in one strided block of memory."""
    if not isinstance(x, Tensor):
        raise ArgumentError(f"{name}: {key} must be a tensor, not {type(x).__name__}")
    check_data(x, f"{name}: {key}")


def check_kind(x: Tensor, name: str) -> None:
    """Reject a sparse, nested or quantized tensor, or a DTensor: one strided block of this rank's memory is sent."""
    if x.is_nested:
        raise ArgumentError(
            f"{name}: expected a strided tensor, not a nested one; pass its .values() or a padded tensor"
        )
    if x.layout is not _strided:
        raise ArgumentError(f"{name}: expected a strided tensor, not one of layout {x.layout}; call .to_dense()")
    distributed = sys.modules.get("torch.distributed.tensor")  # whoever has a DTensor has imported it
    if distributed is not None and isinstance(x, distributed.DTensor):
        raise ArgumentError(f"{name}: expected a plain tensor, not a DTensor; pass its local shard, .to_local()")
    if x.is_quantized:
        raise ArgumentError(
            f"{name}: expected a plain tensor, not a quantized one, whose scale would not be sent; "
            "call .dequantize() or .int_repr()"
        )
