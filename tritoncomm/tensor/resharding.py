"""Layouts of ColoTensors for ``reshard``, which redistributes between process groups without a replica."""

from tritoncomm.core.plan import Ints
from tritoncomm.reshard import Layout
from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import check_partitions, layout_over

__all__ = ["exchange_between", "layout_of"]


def layout_of(pg: ProcessGroup, dist_spec: _DistSpec, shape: Ints, ranks: Ints | None = None) -> Layout:
    """Return ``reshard``'s layout over all ranks of a process group, whose data-parallel ranks are replicas.

    Args:
        ranks: some of the ranks, consecutive tensor-parallel groups; all by default.
    """
    parts = partitions(dist_spec, len(shape))
    check_partitions(parts, pg.tp_world_size(), "reshard")
    return layout_over(shape, parts, tuple(pg.ranks_in_group()) if ranks is None else ranks)


def exchange_between(
    spec: _DistSpec, pg: ProcessGroup, target: _DistSpec, target_pg: ProcessGroup, shape: Ints
) -> tuple[ProcessGroup, Layout, Layout] | None:
    """Return the process group with more tensor-parallel ranks, and both layouts over these ranks.

    Redistribution is one all-to-all-v over them. None if that does not suffice: a side is a replica, or a
    tensor-parallel group of the smaller process group is not inside one of the larger.
    """
    dims, (tp, other) = len(shape), (pg.tp_world_size(), target_pg.tp_world_size())
    if not partitions(spec, dims) or not partitions(target, dims) or pg.ranks_in_group() != target_pg.ranks_in_group():
        return None
    if tp % other and other % tp:
        return None
    larger = pg if tp >= other else target_pg
    ranks = tuple(larger.tp_rank_list() or ())
    return larger, layout_of(pg, spec, shape, ranks), layout_of(target_pg, target, shape, ranks)
