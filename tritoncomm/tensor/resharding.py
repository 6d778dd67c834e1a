"""Layouts of ColoTensors as ``reshard`` has them, and redistribution between process groups without a replica."""

import torch
from torch import Tensor

from tritoncomm.core.plan import Ints
from tritoncomm.reshard import Layout, ReshardPlan, reshard, reshard_plan
from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import check_partitions

__all__ = ["across", "dry_run", "layout_of"]


def layout_of(pg: ProcessGroup, dist_spec: _DistSpec, shape: Ints, ranks: Ints | None = None) -> Layout:
    """The layout over all ranks of a process group, whose data-parallel ranks are replicas.

    Args:
        pg: the process group.
        dist_spec: the placement.
        shape: of the global tensor.
        ranks: some of the ranks, consecutive tensor-parallel groups; all by default.

    Raises:
        ShapeError: the spec does not fit the tensor or the ranks.
    """
    parts = partitions(dist_spec, len(shape))
    check_partitions(parts, pg.tp_world_size(), "reshard")
    counts = [count for _, count in parts] or [pg.tp_world_size()]
    grid = torch.tensor(pg.ranks_in_group() if ranks is None else ranks, device="cpu").view(-1, *counts)
    return Layout.on_mesh(shape, grid, [None, *([dim for dim, _ in parts] or [None])])


def _layouts(
    spec: _DistSpec, pg: ProcessGroup, target: _DistSpec, target_pg: ProcessGroup, shape: Ints
) -> tuple[ProcessGroup, Layout, Layout] | None:
    """The larger of two process groups, and both layouts over its tensor-parallel ranks.

    None where one exchange is not what happens: a side is a replica, or not every tensor-parallel group of one of them
    is inside one of the other.
    """
    dims, (tp, other) = len(shape), (pg.tp_world_size(), target_pg.tp_world_size())
    if not partitions(spec, dims) or not partitions(target, dims) or pg.ranks_in_group() != target_pg.ranks_in_group():
        return None
    if tp % other and other % tp:
        return None
    larger = pg if tp >= other else target_pg
    ranks = tuple(larger.tp_rank_list() or ())
    return larger, layout_of(pg, spec, shape, ranks), layout_of(target_pg, target, shape, ranks)


def across(
    local: Tensor, spec: _DistSpec, pg: ProcessGroup, target: _DistSpec, target_pg: ProcessGroup, shape: Ints
) -> Tensor | None:
    """A local shard in another layout over another process group; None where that takes a replica in between.

    Forward: one all-to-all-v over the larger of the two tensor-parallel groups. Backward: its adjoint.
    """
    layouts = _layouts(spec, pg, target, target_pg, shape)
    if layouts is None:
        return None
    larger, source, goal = layouts
    return reshard(local, source, goal, group=larger.tp_process_group())


def dry_run(
    dtype: torch.dtype, spec: _DistSpec, pg: ProcessGroup, target: _DistSpec, target_pg: ProcessGroup, shape: Ints
) -> ReshardPlan | None:
    """What ``across`` does, without communication."""
    layouts = _layouts(spec, pg, target, target_pg, shape)
    if layouts is None:
        return None
    larger, source, goal = layouts
    return reshard_plan({"tensor": dtype}, source, goal, ranks=larger.tp_rank_list(), rank=pg.rank())
