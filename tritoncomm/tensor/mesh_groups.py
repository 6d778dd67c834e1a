"""The process groups of a mesh: one for every line of ranks along every axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tritoncomm.errors import GroupError
from tritoncomm.tensor import process_group

__all__ = ["Line", "Members", "groups_along"]

Line = tuple[list[int], Any]
_made: dict[tuple[int, ...], Any] = {}
_world: list[Any] = [None]


@dataclass(frozen=True, slots=True)
class Members:
    """This rank's process group along one axis.

    Attributes:
        group: the process group.
        order: for each place along the axis the rank inside the group; None where the group counts the same way.
    """

    group: dist.ProcessGroup
    order: tuple[int, ...] | None


def groups_along(ids: Tensor, given: Sequence[dist.ProcessGroup]) -> tuple[dict[int, list[Line]], dict[int, Members]]:
    """By axis every line of ranks with its group, and this rank's own.

    Groups of lines this rank is not in are torch's ``NON_GROUP_MEMBER``.

    Args:
        ids: global ranks as a grid.
        given: this rank's groups by axis; without them groups are found, and made where they are missing. A mesh of all
            ranks of the job is made by all of them.

    Raises:
        GroupError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise GroupError("DeviceMesh: torch.distributed is not initialized; call init_process_group() first")
    me = dist.get_rank()
    axes = [ids.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(ids.shape)]
    if not given:
        lines = [tuple(sorted(ranks)) for lines in axes for ranks in lines if len(ranks) > 1]
        if ids.numel() == dist.get_world_size():
            _make_together(lines)
        else:
            process_group.make_groups(lines, me, False)
    found: dict[int, list[Line]] = {}
    members: dict[int, Members] = {}
    for axis, lines in enumerate(axes):
        found[axis] = []
        for ranks in lines:
            group: Any = dist.GroupMember.NON_GROUP_MEMBER
            if me in ranks:
                group = given[axis] if given else _group_over(tuple(sorted(ranks)), ids.numel())
                counted = dist.get_process_group_ranks(group)
                members[axis] = Members(group, None if counted == ranks else tuple(map(counted.index, ranks)))
            found[axis].append((ranks, group))
    return found, members


def _make_together(lines: Sequence[tuple[int, ...]]) -> None:
    """Have a group over every line of a mesh of all ranks.

    Which of them are missing is decided by what all ranks made together, never by what this rank alone can find: a rank
    that finds its groups while another does not would leave the other waiting.
    """
    world = dist.group.WORLD
    if _world[0] is not world:
        _made.clear()
        _world[0] = world
    for ranks in lines:
        if ranks not in _made:
            _made[ranks] = world if len(ranks) == dist.get_world_size() else dist.new_group(list(ranks))


def _group_over(ranks: tuple[int, ...], devices: int) -> dist.ProcessGroup:
    """The group of these ranks, which exists by now; one of this rank alone is made on the spot."""
    if len(ranks) > 1 and devices == dist.get_world_size():
        return _made[ranks]
    backend = dist.get_backend()
    found = process_group._known(backend, ranks)
    if found is None and len(ranks) == 1:
        return process_group._of_one(backend, ranks)
    assert found is not None, ranks
    return found
