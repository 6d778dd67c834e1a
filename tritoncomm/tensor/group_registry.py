"""Process groups by their ranks: found where they exist, made by their members where not."""

import hashlib
import weakref
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tritoncomm import groups

__all__ = ["adopt", "exists", "known", "made", "make_groups"]

_made: dict[tuple[str, tuple[int, ...]], dist.ProcessGroup] = {}
_times: dict[tuple[str, tuple[int, ...]], int] = {}
_together: weakref.WeakKeyDictionary[Any, set[tuple[str, tuple[int, ...]]]] = weakref.WeakKeyDictionary()


def known(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A group of these ranks that exists already."""
    world = dist.group.WORLD
    found = _made.get((backend, ranks))
    if found is not None and _is_alive(found):
        return found
    if world is not None and backend == dist.get_backend() and ranks == tuple(range(dist.get_world_size())):
        return world
    for entry in groups.groups.values():
        if entry.ranks == ranks:
            for group in (entry.group, entry.cpu_group):
                if dist.get_backend(group) == backend:
                    return group
    return None


def _is_alive(group: dist.ProcessGroup) -> bool:
    """False once torch.distributed was shut down, or started again."""
    try:
        dist.get_process_group_ranks(group)
    except (KeyError, ValueError, RuntimeError):
        return False
    return True


def _elsewhere(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A group of these ranks that the program made."""
    for group, members in c10d._world.pg_group_ranks.items():
        if tuple(sorted(members, key=members.__getitem__)) == ranks and dist.get_backend(group) == backend:
            return group
    return None


def make_groups(lists: Sequence[tuple[int, ...]], rank: int, backend: str | None = None) -> None:
    """Have a group over every list that this rank is in; its members call, in the same order, or the whole job.

    Args:
        lists: global ranks in ascending order.
        rank: this one.
        backend: of the default group, unless given.
    """
    backend = dist.get_backend() if backend is None else backend
    if _needs_everybody():
        _make_together(lists, rank, backend)
        return
    for ranks in lists:
        if rank in ranks and exists(backend, ranks) is None:
            _made[backend, ranks] = _by_members(ranks, backend)


def _make_together(lists: Sequence[tuple[int, ...]], rank: int, backend: str) -> None:
    """Make every group, also those that this rank is not in.

    What exists is decided by what all processes know alike, the groups made here: a rank that is in no group cannot
    see that its members have one from elsewhere, and would wait for them.
    """
    made = _together.setdefault(dist.group.WORLD, set())
    for ranks in lists:
        is_world = backend == dist.get_backend() and len(ranks) == dist.get_world_size()
        if is_world or (backend, ranks) in made:
            continue
        group: Any = dist.new_group(list(ranks), backend=backend)
        made.add((backend, ranks))
        if rank in ranks:
            _made[backend, ranks] = group


def exists(backend: str, ranks: tuple[int, ...]) -> dist.ProcessGroup | None:
    """A group that exists, made here or by the program."""
    found = known(backend, ranks) or _elsewhere(backend, ranks)
    if found is not None:
        _made[backend, ranks] = found
    return found


def made(ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
    """The group over these ranks, after ``make_groups``."""
    found = known(dist.get_backend() if backend is None else backend, ranks)
    assert found is not None, ranks
    return found


def _needs_everybody() -> bool:
    """Whether torch waits for the whole job when a group is made: groups split off the default group, or a barrier."""
    return c10d._get_default_group().bound_device_id is not None or c10d._is_barrier_after_init() == 1


def _by_members(ranks: tuple[int, ...], backend: str) -> dist.ProcessGroup:
    """A group that nobody but its members takes part in making.

    torch names groups by how many a process has made, so processes that make different groups disagree about the next
    name, and wait forever. For the time of the call the count is a number that follows from the ranks alone.
    """
    times = _times[backend, ranks] = _times.get((backend, ranks), 0) + 1
    name = hashlib.sha256(f"tritoncomm {backend} {ranks} {times}".encode()).hexdigest()[:15]
    before, c10d._world.group_count = c10d._world.group_count, 2**60 + int(name, 16)
    try:
        group: Any = dist.new_group(list(ranks), backend=backend)
    finally:
        c10d._world.group_count = before
    return group


def adopt(group: dist.ProcessGroup) -> None:
    """Take a group that the program made for the one over its ranks."""
    _made.setdefault((dist.get_backend(group), tuple(dist.get_process_group_ranks(group))), group)
