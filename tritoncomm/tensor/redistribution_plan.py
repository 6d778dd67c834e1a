"""What a redistribution would do, before it does it."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritoncomm.core import ops
from tritoncomm.errors import ArgumentError
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.dist_spec_mgr import transition_between
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec, cuts, local_shape
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, blocks, steps

__all__ = ["RedistributionPlan", "Step", "redistribute_plan"]

_LATENCY, _BANDWIDTH, _COPY = 10e-6, 300e9, 2e12  # seconds; bytes per second over the wire, and through memory


@dataclass(frozen=True, slots=True)
class Step:
    """One movement.

    Attributes:
        name: cut, gather or all_to_all.
        before: passes over memory before the collective.
        after: passes over memory after it.
        path: who makes them: view (nobody), torch or triton.
        wire: bytes this rank sends.
        copied: bytes read plus written by the passes.
        seconds: predicted time, latency and bandwidths as given to ``redistribute_plan``.
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
        return "\n".join(lines) if self.steps else "nothing to move"


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
    """What ``redistribute(target, pg)`` would run.

    Args:
        tensor_or_spec: a ColoTensor, or a layout with ``pg`` and ``shape``.
        target: the layout wanted.
        pg: the ranks wanted; the tensor's own by default.
        shape: of the whole tensor, for a layout.
        dtype: of the tensor, for a layout.
        latency: seconds a collective takes at least.
        bandwidth: bytes per second a rank sends.
        copy_bandwidth: bytes per second read plus written by a pass over memory.

    Raises:
        ArgumentError: a layout without ranks or shape.
        ShapeError: a layout that does not fit.
    """
    if isinstance(tensor_or_spec, ColoTensor):
        x, old = plain(tensor_or_spec), tensor_or_spec.dist_spec
        here, shape = tensor_or_spec.process_group, tensor_or_spec.size_global()
    elif pg is None or shape is None:
        raise ArgumentError("redistribute_plan: a layout needs pg and shape")
    else:
        x, old, here = torch.empty(0, dtype=dtype), tensor_or_spec, pg
    assert shape is not None
    there = here if pg is None else pg
    if there == here:
        ways = [(transition_between(shape, old, target, here), here)]
    else:
        ways = [(transition_between(shape, old, ReplicaSpec(), here), here)]
        ways.append((transition_between(shape, ReplicaSpec(), target, there), there))
    rates = (latency, bandwidth, copy_bandwidth)
    found = [_step(name, way, group, x, rates) for way, group in ways for name in steps(way.old, way.new)]
    return RedistributionPlan(tuple(found))


def _step(name: str, way: Transition, pg: ProcessGroup, x: Tensor, rates: tuple[float, float, float]) -> Step:
    """The passes and bytes of one movement, as ``transitions`` makes them."""
    shape, old, new = way.shape, dict(way.old), dict(way.new)
    world, rank, item = pg.tp_world_size(), pg.tp_local_rank(), x.element_size()
    local = local_shape(shape, old, rank) if old else shape
    mine, path = math.prod(local) * item, ops.path_for(x)
    if name == "cut":
        kept = math.prod(local_shape(shape, new, rank)) * item
        before, after, wire, copied = 0, 1, 0, 2 * kept
        if all(_leads(shape, dim) for dim in new):
            path = "torch"
    elif name == "gather":
        after = int(len(old) > 1 or not _leads(shape, next(iter(old))))
        before, wire, copied = 0, mine * (world - 1), 2 * math.prod(shape) * item * after
        if len(old) > 1:
            path = "torch"
    elif len(old) > 1 or len(new) > 1:
        sent, got = blocks(way, rank, world), blocks(way.reversed(), rank, world)
        before, after, path = int(not sent.in_order), int(not got.in_order), "torch"
        kept = math.prod(got.shape) * item
        wire, copied = mine - sent.counts[rank] * item, 2 * (mine * before + kept * after)
    else:
        ((dim, _),) = new.items()
        ((_, _, size),) = cuts(shape, new, rank)
        result = local_shape(shape, new, rank)
        kept = math.prod(result) * item
        before, after = int(not _leads(local, dim)), int(not _leads(result, next(iter(old))))
        wire, copied = mine - mine // max(shape[dim], 1) * size, 2 * (mine * before + kept * after)
    if not before + after:
        path = "view"
    latency, bandwidth, copy_bandwidth = rates
    seconds = copied / copy_bandwidth + (latency + wire / bandwidth if name != "cut" else 0.0)
    return Step(name, before, after, path, wire, copied, seconds)


def _leads(shape: Sequence[int], dim: int) -> bool:
    """Whether the pieces of a dim lie one behind the other in memory."""
    return math.prod(shape[:dim]) == 1
