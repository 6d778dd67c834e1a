"""Dry run of a redistribution: steps, passes, bytes and predicted time."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncomm.core import ops
from tritoncomm.errors import ArgumentError
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.dist_spec_mgr import transition_between
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec, local_shape, shard_bounds
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, blocks, steps

__all__ = ["RedistributionPlan", "Step", "redistribute_plan"]

_LATENCY, _BANDWIDTH, _COPY = 10e-6, 300e9, 2e12  # seconds; bytes per second over the wire, and through memory


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a redistribution.

    Attributes:
        name: split, all_gather or all_to_all.
        before: passes over memory before the collective.
        after: passes over memory after it.
        path: of the passes: view (none), torch or triton.
        wire: bytes this rank sends.
        copied: bytes read plus written by the passes.
        seconds: predicted time with the latency and bandwidths given to ``redistribute_plan``.
    """

    name: str
    before: int
    after: int
    path: str
    wire: int
    copied: int
    seconds: float


@dataclass(frozen=True, slots=True)
class RedistributionPlan:
    """The steps from one layout to another; prints as a table."""

    steps: tuple[Step, ...]

    @property
    def passes(self) -> int:
        """Passes over memory outside the collectives."""
        return sum(step.before + step.after for step in self.steps)

    @property
    def wire(self) -> int:
        """Bytes this rank sends."""
        return sum(step.wire for step in self.steps)

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return sum(step.seconds for step in self.steps)

    def __str__(self) -> str:
        lines = [f"{'step':<12}{'path':<8}{'passes':>8}{'MB copied':>12}{'MB sent':>10}{'us':>10}"]
        for s in self.steps:
            lines.append(
                f"{s.name:<12}{s.path:<8}{f'{s.before} + {s.after}':>8}{s.copied / 1e6:>12.3f}{s.wire / 1e6:>10.3f}"
                f"{s.seconds * 1e6:>10.1f}"
            )
        return "\n".join(lines) if self.steps else "nothing to redistribute"


def redistribute_plan(
    tensor_or_spec: ColoTensor | _DistSpec,
    target: _DistSpec,
    pg: ProcessGroup | None = None,
    *,
    shape: Sequence[int] | None = None,
    dtype: torch.dtype = torch.float32,
    latency: float = _LATENCY,
    bandwidth: float = _BANDWIDTH,
    copy_bandwidth: float = _COPY,
) -> RedistributionPlan:
    """The steps that ``redistribute(target, pg)`` would run.

    Args:
        tensor_or_spec: a ColoTensor, or a layout together with ``pg`` and ``shape``.
        target: the target layout.
        pg: the target process group; that of the tensor by default.
        shape: global shape, for a layout.
        dtype: of the tensor, for a layout.
        latency: minimum seconds of a collective.
        bandwidth: bytes per second a rank sends.
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
    if target_pg == source_pg:
        transitions = [(transition_between(shape, old, target, source_pg), source_pg)]
    else:
        transitions = [(transition_between(shape, old, ReplicaSpec(), source_pg), source_pg)]
        transitions.append((transition_between(shape, ReplicaSpec(), target, target_pg), target_pg))
    rates = (latency, bandwidth, copy_bandwidth)
    planned = [
        _step(name, transition, group, x, rates)
        for transition, group in transitions
        for name in steps(transition.old, transition.new)
    ]
    return RedistributionPlan(tuple(planned))


def _step(name: str, transition: Transition, pg: ProcessGroup, x: Tensor, rates: tuple[float, float, float]) -> Step:
    """The passes and bytes of one step, as ``redistribute`` runs it."""
    shape, old, new = transition.shape, transition.old, transition.new
    old_dims, new_dims = ([dim for dim, _ in parts] for parts in (old, new))
    world, rank, item = pg.tp_world_size(), pg.tp_local_rank(), x.element_size()
    local = local_shape(shape, old, rank) if old else shape
    old_bytes, path = math.prod(local) * item, ops.path_for(x)
    if name == "split":
        new_bytes = math.prod(local_shape(shape, new, rank)) * item
        before, after, wire, copied = 0, 1, 0, 2 * new_bytes
        if all(_leads(shape, dim) for dim in new_dims):
            path = "torch"
    elif name == "all_gather":
        after = int(len(old) > 1 or not _leads(shape, old_dims[0]))
        before, wire, copied = 0, old_bytes * (world - 1), 2 * math.prod(shape) * item * after
        if len(old) > 1:
            path = "torch"
    elif len(old) > 1 or len(new) > 1:
        sent, received = blocks(transition, rank, world), blocks(transition.reversed(), rank, world)
        before, after, path = int(not sent.in_order), int(not received.in_order), "torch"
        new_bytes = math.prod(received.shape) * item
        wire, copied = old_bytes - sent.counts[rank] * item, 2 * (old_bytes * before + new_bytes * after)
    else:
        (dim,) = new_dims
        ((_, _, size),) = shard_bounds(shape, new, rank)
        result = local_shape(shape, new, rank)
        new_bytes = math.prod(result) * item
        before, after = int(not _leads(local, dim)), int(not _leads(result, old_dims[0]))
        wire, copied = old_bytes - old_bytes // max(shape[dim], 1) * size, 2 * (old_bytes * before + new_bytes * after)
    if not before + after:
        path = "view"
    latency, bandwidth, copy_bandwidth = rates
    seconds = copied / copy_bandwidth + (latency + wire / bandwidth if name != "split" else 0.0)
    return Step(name, before, after, path, wire, copied, seconds)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether the shards of a dim are contiguous in memory."""
    return math.prod(shape[:dim]) == 1
