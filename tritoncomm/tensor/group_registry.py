"""Registry of process groups by rank list: existing groups are reused, missing ones are made by their members only."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

from tritoncomm import groups
from tritoncomm.errors import GroupError

__all__ = ["AxisMembers", "Line", "adopt", "find", "group_over", "groups_along", "lookup", "make_groups"]

# Weak references: torch keeps living groups, and a destroyed group can end with its threads and sockets.
_groups: dict[tuple[str, tuple[int, ...]], weakref.ref[dist.ProcessGroup]] = {}
_made_collectively: weakref.WeakKeyDictionary[Any, set[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()


def lookup(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return the group of these ranks: a registered one, the default group, or one of ``initialize()``; else None."""
    world = dist.group.WORLD
    reference = _groups.get((backend, ranks))
    if reference is not None and (registered := reference()) is not None and _is_alive(registered):
        return registered
    if world is not None and backend == dist.get_backend() and ranks == tuple(range(dist.get_world_size())):
        return world
    for entry in groups.groups.values():
        if entry.group.size() == len(ranks) and entry.ranks == ranks:
            for group in entry.existing:
                if dist.get_backend(group) == backend:
                    return group
    return None


def _is_alive(group: dist.ProcessGroup) -> bool:
    """Whether torch.distributed still has the group; false after a shutdown or restart."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def _find_in_torch(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return a group of these ranks that the program made with torch, else None."""
    for group, members in c10d._world.pg_group_ranks.items():
        # ``members`` has the rank in the group by global rank: sorted by it, the ranks are in group order.
        if tuple(sorted(members, key=members.__getitem__)) == ranks and dist.get_backend(group) == backend:
            return group
    return None


def make_groups(lists: Sequence[tuple[int, ...]], rank: int, backend: str | None = None) -> None:
    """Make missing groups for the lists that contain this rank; members call in the same order, or the full job calls.

    Each list has global ranks in ascending order; the backend is the default group's by default.
    """
    backend = dist.get_backend() if backend is None else backend
    # A bound default group is split, in which all of its ranks take part.
    if c10d._get_default_group().bound_device_id is not None:
        _make_collectively(lists, rank, backend)
        return
    for ranks in lists:
        if rank in ranks and find(backend, ranks) is None:
            _register(groups.make_group(f"tensor-{backend}", ranks, backend), backend, ranks)


def _make_collectively(lists: Sequence[tuple[int, ...]], rank: int, backend: str) -> None:
    """Make every group, including those without this rank."""
    # Only groups made here count as existing, because all processes know them. A rank outside a group cannot see that
    # the program made the group for its members, and would wait for them.
    known_groups = _made_collectively.setdefault(dist.group.WORLD, set())
    for ranks in lists:
        is_world = backend == dist.get_backend() and len(ranks) == dist.get_world_size()
        if is_world or (backend, ranks) in known_groups:
            continue
        group: Any = dist.new_group(list(ranks), timeout=groups.timeout, backend=backend)
        known_groups.add((backend, ranks))
        if rank in ranks:
            _register(group, backend, ranks)


def find(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """Return an existing group, made here or by the program, and register it; else None."""
    group = lookup(backend, ranks) or _find_in_torch(backend, ranks)
    if group is not None:
        _register(group, backend, ranks)
    return group


def group_over(ranks: tuple[int, ...], rank: int, backend: str | None = None) -> dist.ProcessGroup:
    """Return the group over these ranks; missing ones are made as by ``make_groups``."""
    make_groups([ranks], rank, backend)
    group = lookup(dist.get_backend() if backend is None else backend, ranks)
    assert group is not None, ranks
    return group


def adopt(group: dist.ProcessGroup) -> None:
    """Register a group that the program made."""
    backend, ranks = dist.get_backend(group), tuple(dist.get_process_group_ranks(group))
    reference = _groups.get((backend, ranks))
    if reference is None or reference() is None:
        _register(group, backend, ranks)


def _register(group: dist.ProcessGroup, backend: str, ranks: tuple[int, ...]) -> None:
    _groups[backend, ranks] = weakref.ref(group)


Line = tuple[list[int], Any]


@dataclass(frozen=True, slots=True)
class AxisMembers:
    """Process group of this rank along one axis.

    Attributes:
        order: group rank of each position along the axis, where permuted axes were merged; None if they are equal.
    """

    group: dist.ProcessGroup
    order: tuple[int, ...] | None


def groups_along(
    ids: Tensor, own_groups: Sequence[dist.ProcessGroup]
) -> tuple[dict[int, list[Line]], dict[int, AxisMembers]]:
    """Return by axis every line of ranks with its group (or torch's ``NON_GROUP_MEMBER``), and this rank's own group.

    Args:
        ids: global ranks as a grid.
        own_groups: this rank's groups by axis; if empty, groups are looked up and missing ones are made.
    """
    if not dist.is_initialized():
        raise GroupError("DeviceMesh: torch.distributed is not initialized; call tritoncomm.initialize() first")
    me = dist.get_rank()
    # By axis all lines of ranks along it: the other axes are flattened.
    lines_of_axes = [ids.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(ids.shape)]
    if not own_groups:
        # All groups are made before one is used: members of a line meet in the same order on every rank.
        lines = [tuple(sorted(ranks)) for lines in lines_of_axes for ranks in lines if len(ranks) > 1]
        make_groups(lines, me)
    lines_by_axis: dict[int, list[Line]] = {}
    members: dict[int, AxisMembers] = {}
    for axis, lines in enumerate(lines_of_axes):
        lines_by_axis[axis] = []
        for ranks in lines:
            group: Any = dist.GroupMember.NON_GROUP_MEMBER
            if me in ranks:
                group = own_groups[axis] if own_groups else group_over(tuple(sorted(ranks)), me)
                ranks_in_group = dist.get_process_group_ranks(group)
                # The rank in the group at every place of the line; None where both have one order.
                order = None if ranks_in_group == ranks else tuple(map(ranks_in_group.index, ranks))
                members[axis] = AxisMembers(group, order)
            lines_by_axis[axis].append((ranks, group))
    return lines_by_axis, members
