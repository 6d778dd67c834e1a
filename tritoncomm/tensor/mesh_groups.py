"""The process groups of a mesh: one for every line of ranks along every axis."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor

from tritoncomm.errors import GroupError
from tritoncomm.tensor import group_registry

__all__ = ["Line", "Members", "groups_along"]

Line = tuple[list[int], Any]


@dataclass(frozen=True, slots=True)
class Members:
    """This rank's process group along one axis.

    Attributes:
        group: the process group.
        order: for each place along the axis the rank inside the group, where several axes in another order are one;
            None where the group has the same order.
    """

    group: dist.ProcessGroup
    order: tuple[int, ...] | None


def groups_along(ids: Tensor, given: Sequence[dist.ProcessGroup]) -> tuple[dict[int, list[Line]], dict[int, Members]]:
    """By axis every line of ranks with its group, and this rank's own.

    Groups of lines this rank is not in are torch's ``NON_GROUP_MEMBER``.

    Args:
        ids: global ranks as a grid.
        given: this rank's groups by axis; without them groups are found, and made where they are missing.

    Raises:
        GroupError: torch.distributed is not initialized.
    """
    if not dist.is_initialized():
        raise GroupError("DeviceMesh: torch.distributed is not initialized; call tritoncomm.initialize() first")
    me = dist.get_rank()
    axes = [ids.movedim(axis, -1).reshape(-1, size).tolist() for axis, size in enumerate(ids.shape)]
    if not given:
        lines = [tuple(sorted(ranks)) for lines in axes for ranks in lines if len(ranks) > 1]
        group_registry.make_groups(lines, me)
    found: dict[int, list[Line]] = {}
    members: dict[int, Members] = {}
    for axis, lines in enumerate(axes):
        found[axis] = []
        for ranks in lines:
            group: Any = dist.GroupMember.NON_GROUP_MEMBER
            if me in ranks:
                group = given[axis] if given else _group_over(tuple(sorted(ranks)), me)
                counted = dist.get_process_group_ranks(group)
                members[axis] = Members(group, None if counted == ranks else tuple(map(counted.index, ranks)))
            found[axis].append((ranks, group))
    return found, members


def _group_over(ranks: tuple[int, ...], me: int) -> dist.ProcessGroup:
    """The group of these ranks, which exists by now; one of this rank alone is made on the spot."""
    group_registry.make_groups([ranks], me)
    return group_registry.made(ranks)
