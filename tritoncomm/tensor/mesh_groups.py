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
        order: group rank of each position along the axis, where permuted axes were merged; None if they are equal.
    """

    group: dist.ProcessGroup
    order: tuple[int, ...] | None


def groups_along(ids: Tensor, given: Sequence[dist.ProcessGroup]) -> tuple[dict[int, list[Line]], dict[int, Members]]:
    """By axis every line of ranks with its group, and this rank's own group.

    Groups of lines this rank is not in are torch's ``NON_GROUP_MEMBER``.

    Args:
        ids: global ranks as a grid.
        given: this rank's groups by axis; if empty, groups are looked up and missing ones are made.

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
    lines_by_axis: dict[int, list[Line]] = {}
    members: dict[int, Members] = {}
    for axis, lines in enumerate(axes):
        lines_by_axis[axis] = []
        for ranks in lines:
            group: Any = dist.GroupMember.NON_GROUP_MEMBER
            if me in ranks:
                group = given[axis] if given else _group_over(tuple(sorted(ranks)), me)
                ranks_in_group = dist.get_process_group_ranks(group)
                members[axis] = Members(
                    group, None if ranks_in_group == ranks else tuple(map(ranks_in_group.index, ranks))
                )
            lines_by_axis[axis].append((ranks, group))
    return lines_by_axis, members


def _group_over(ranks: tuple[int, ...], me: int) -> dist.ProcessGroup:
    """The group of these ranks, which exists by now; that of a single rank is made here."""
    group_registry.make_groups([ranks], me)
    return group_registry.existing(ranks)
