"""Plan of a redistribution, made without communication: steps, passes, bytes and predicted time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.core import ops, plan
from tritoncomm.core.cost import DEFAULTS, Rates, collective_seconds, pass_seconds
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard import Layout, reshard_plan
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.dist_spec_mgr import transition_between
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec, local_shape, uneven_sizes
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, layouts, steps
from tritoncomm.tensor.resharding import exchange_between

__all__ = ["RedistributionPlan", "Step", "redistribute_plan"]


@dataclass(frozen=True, slots=True)
class Step(record.Traffic):
    """One step of a redistribution.

    Attributes:
        name: split, all_gather, all_to_all, or reshard from shards of one process group to shards of another.
        before: passes over memory before the collective.
        after: passes over memory after it.
        path: of the passes: view (none), torch or triton.
        bytes_sent: bytes this rank sends.
        bytes_copied: bytes read plus written by the passes.
        seconds: predicted time with the latency and bandwidths given to ``redistribute_plan``.
    """

    name: str
    before: int
    after: int
    path: record.CopyPath
    bytes_sent: int
    bytes_copied: int
    seconds: float

    copied = property(attrgetter("bytes_copied"), doc="``bytes_copied``.")


def _sum(name: str, doc: str) -> Any:
    return property(lambda plan: sum(getattr(step, name) for step in plan.steps), doc=doc)


@dataclass(frozen=True, slots=True)
class RedistributionPlan(record.Traffic):
    """The steps from one layout to another; prints as a table."""

    steps: tuple[Step, ...]

    @property
    def passes(self) -> int:
        """Passes over memory outside the collectives."""
        return sum(step.before + step.after for step in self.steps)

    bytes_sent = _sum("bytes_sent", "Bytes this rank sends.")
    bytes_copied = _sum("bytes_copied", "Bytes read plus written by the passes.")
    seconds = _sum("seconds", "Predicted time.")

    def __str__(self) -> str:
        lines = [f"{'step':<12}{'path':<8}{'passes':>8}{'MB copied':>12}{'MB sent':>10}{'us':>10}"]
        for s in self.steps:
            lines.append(
                f"{s.name:<12}{s.path:<8}{f'{s.before} + {s.after}':>8}{s.bytes_copied / 1e6:>12.3f}"
                f"{s.bytes_sent / 1e6:>10.3f}{s.seconds * 1e6:>10.1f}"
            )
        return "\n".join(lines) if self.steps else "nothing to redistribute"


def redistribute_plan(
    tensor_or_spec: ColoTensor | _DistSpec,
    target: _DistSpec,
    pg: ProcessGroup | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    latency: float | None = None,
    bandwidth: float | None = None,
    copy_bandwidth: float | None = None,
) -> RedistributionPlan:
    """Return the steps that ``redistribute(target, pg)`` would run.

    Args:
        tensor_or_spec: a ColoTensor, or a layout together with ``pg`` and ``shape``.
        target: the target layout.
        pg: the target process group; the tensor's by default.
        shape: global shape, for a layout.
        dtype: of the tensor, for a layout.
        latency: seconds per step of a collective; this and the others by default as in ``cost.DEFAULTS``.
        bandwidth: bytes per second a rank sends, inside a node and to other nodes.
        copy_bandwidth: bytes per second, read plus written, of a pass over memory.

    Raises:
        ArgumentError: a layout without ``pg`` or ``shape``.
        ShapeError: a layout that does not match the tensor or the ranks.
    """
    if isinstance(tensor_or_spec, ColoTensor):
        x, old = plain(tensor_or_spec), tensor_or_spec.dist_spec
        source_pg, shape = tensor_or_spec.process_group, tensor_or_spec.size_global()
    elif pg is None or shape is None:
        raise ArgumentError("redistribute_plan: a layout needs pg and shape")
    else:
        x, old, source_pg = torch.empty(0, dtype=dtype), tensor_or_spec, pg
    assert shape is not None
    shape = tuple(shape)
    target_pg = source_pg if pg is None else pg
    figures = {"latency": latency, "link": bandwidth, "network": bandwidth, "memory": copy_bandwidth}
    overrides = {name: value for name, value in figures.items() if value is not None}
    rates = replace(DEFAULTS["cuda" if x.is_cuda else "cpu"], **overrides)
    exchange = exchange_between(old, source_pg, target, target_pg, shape) if target_pg != source_pg else None
    if exchange is not None:
        larger, *sides = exchange
        return RedistributionPlan((_exchange("reshard", sides, larger.tp_rank_list() or (), source_pg, x, rates),))
    if target_pg == source_pg:
        transitions = [(transition_between(shape, old, target, source_pg), source_pg)]
    else:
        transitions = [(transition_between(shape, old, ReplicaSpec(), source_pg), source_pg)]
        transitions.append((transition_between(shape, ReplicaSpec(), target, target_pg), target_pg))
    planned = [
        _step(name, transition, group, x, rates)
        for transition, group in transitions
        for name in steps(transition.old, transition.new)
    ]
    return RedistributionPlan(tuple(planned))


def _exchange(
    name: str, layouts: Sequence[Layout], ranks: Sequence[int], pg: ProcessGroup, x: Tensor, rates: Rates
) -> Step:
    """Return the step of a ``reshard`` from the first layout to the second."""
    moved = reshard_plan({"tensor": x.dtype}, *layouts, ranks=ranks, rank=pg.rank()).transfers
    before, after = (any(len(getattr(b, side).tensor) for b in moved.buckets) for side in ("send", "recv"))
    path = ops.path_for(x) if moved.bytes_copied else "view"
    return Step(name, int(before), int(after), path, moved.bytes_sent, moved.bytes_copied, sum(moved.seconds(rates)))


def _step(name: str, transition: Transition, pg: ProcessGroup, x: Tensor, rates: Rates) -> Step:
    """One step, with the passes that ``redistribute`` makes and the plan of the collective that it calls."""
    shape, old, new = transition.shape, transition.old, transition.new
    world, rank, item, path = pg.tp_world_size(), pg.tp_local_rank(), x.element_size(), ops.path_for(x)
    local, result = local_shape(shape, old, rank), local_shape(shape, new, rank)
    before, after, planned = False, True, plan.CollectivePlan(result, 0, 0)
    if name == "split":
        path = "torch" if all(_leads(shape, dim) for dim, _ in new) else path
    elif name == "all_to_all" and max(len(old), len(new)) > 1:
        ranks = tuple(pg.tp_rank_list() or ())
        return _exchange(name, layouts(transition, ranks), ranks, pg, x, rates)
    elif len(old) > 1:  # blocks are copied by torch from a flat wire
        path, counts = "torch", tuple(math.prod(local_shape(shape, old, w)) for w in range(world))
        planned = plan.all_gather((math.prod(local),), item, 0, world, rank, counts)
    else:
        old_dim, _ = next(iter(old))
        sizes = uneven_sizes(shape[old_dim], world)
        if name == "all_gather":
            planned = plan.all_gather(local, item, old_dim, world, rank, sizes)
        else:
            new_dim = new[0][0]
            before, new_sizes = not _leads(local, new_dim), uneven_sizes(shape[new_dim], world)
            planned = plan.all_to_all(local, item, new_dim, old_dim, world, rank, new_sizes, sizes)
        after = not planned.in_order
    copied = 2 * item * (math.prod(local) * before + math.prod(result) * after)
    seconds = pass_seconds(copied, rates)
    if name != "split":
        kind = name.replace("_", "-")
        seconds += collective_seconds(kind, planned.bytes_sent, world, rates, planned.bytes_received)
    path = path if before or after else "view"
    return Step(name, int(before), int(after), path, planned.bytes_sent, copied, seconds)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether the shards of a dim are contiguous in memory."""
    return math.prod(shape[:dim]) == 1
