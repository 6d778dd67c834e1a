"""Cheapest path of ``CommSpec`` collectives (ColossalAI's contract) between two sharding specs of a tensor."""

import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from tritoncomm.errors import ShapeError
from tritoncomm.tensor.comm_spec import CollectiveCommPattern, CommSpec
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.redistribute import unchanged
from tritoncomm.tensor.sharding_spec import ShardingSpec
from tritoncomm.tensor.simulators import mix_gather_simulator

__all__ = ["Path", "shortest_path"]

Axes = tuple[int, ...]
Layout = tuple[Axes, ...]
"""By dim, the mesh axes that shard it, the first one slowest."""
CommKwargs = dict[str, Any]
_Pattern = CollectiveCommPattern


@dataclass(frozen=True)
class Path:
    """Result of ``shortest_path``; prints as a table.

    Attributes:
        layouts: the sharding specs from source to target; one more than steps.
        cost: sum of the steps' costs.
    """

    steps: tuple[CommSpec, ...]
    layouts: tuple[ShardingSpec, ...]
    cost: float

    def run(self, tensor: Tensor) -> Any:
        """Redistribute the local tensor from the source layout to the target layout; differentiable.

        None on a rank outside the mesh. Without steps it is ``tensor`` itself, detached if grad mode is off.
        """
        expected = self.layouts[0].get_sharded_shape_per_device()
        if tensor.shape != expected:
            raise ShapeError(f"Path.run: the local shape is {list(expected)}, not {list(tensor.shape)}")
        result: Any = tensor if self.steps else unchanged(tensor)
        for step in self.steps:
            if result is not None:
                result = step.covert_spec_to_action(result)
        return result

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to redistribute"
        names = [",".join(map(str, layout.sharding_sequence)) for layout in self.layouts]
        width = max(map(len, names)) + 2
        lines = [f"{'from':<{width}}{'to':<{width}}{'pattern':<28}{'forward':>14}{'backward':>14}"]
        for step, (before, after) in zip(self.steps, itertools.pairwise(names), strict=True):
            cost, name = step.get_comm_cost(), step.comm_pattern.name
            costs = f"{cost['forward']:>14.3f}{cost['backward']:>14.3f}"
            lines.append(f"{before:<{width}}{after:<{width}}{name:<28}{costs}")
        return "\n".join([*lines, f"{'total':<{2 * width + 42}}{self.cost:>14.3f}"])


def shortest_path(
    source_spec: ShardingSpec, target_spec: ShardingSpec, *, forward_only: bool = False, shard_cost: float = 100
) -> Path:
    """Find the cheapest sequence of collectives from one layout to another, by Dijkstra's algorithm.

    A step gathers the last axes of a dim, shards a dim along free axes, moves the last axes of one dim to the end of
    another, or gathers everything over a mesh of two axes. Several axes are merged into one. The cost of a step is
    ``CommSpec.get_comm_cost``, forward and backward, for its local shape. Intermediate layouts divide the tensor
    evenly. Every rank finds the same path; if the mesh has process groups, all its ranks call.

    Args:
        source_spec: the current layout; steps use its mesh.
        target_spec: the target layout, for the same shape and mesh.
        forward_only: whether to ignore the cost of gradients.
        shard_cost: of splitting a tensor locally.

    Raises:
        ShapeError: the specs are of different tensors or meshes.

    Example:
        ``S0,R`` to ``R,S0`` is one all-to-all; ``S0,S1`` to ``R,R`` one mixed gather.
    """
    mesh, shape = source_spec.device_mesh, source_spec.entire_shape
    if shape != target_spec.entire_shape or not mesh.logical_mesh_id.equal(target_spec.device_mesh.logical_mesh_id):
        raise ShapeError("shortest_path: source and target are specs of different tensors or meshes")
    source, target = _layout(source_spec), _layout(target_spec)
    search = _Search(mesh, shape, {"forward_only": forward_only, "shard_cost": shard_cost})
    cost, hops = search.cheapest(source, target)  # of every step the layout before, and arguments of its CommSpec
    layouts_before = [_spec(mesh, shape, layout) for layout, _ in hops]
    layouts = [*layouts_before, _spec(mesh, shape, target)]
    steps = [
        CommSpec(sharding_spec=spec, **arguments, **search.options)
        for spec, (_, arguments) in zip(layouts_before, hops, strict=True)
    ]
    return Path(tuple(steps), tuple(layouts), cost)


class _Search:
    """Dijkstra over the layouts of a tensor on a mesh; ties go to fewer steps, identically on every rank."""

    def __init__(self, mesh: DeviceMesh, shape: Sequence[int], options: dict[str, Any]) -> None:
        ids = mesh.logical_mesh_id
        self.mesh = DeviceMesh(ids, None, None, mesh.mesh_alpha, mesh.mesh_beta)  # makes no process groups
        self.shape, self.options = tuple(shape), options
        self._prices: dict[Any, float] = {}

    def cheapest(self, source: Layout, target: Layout) -> tuple[float, list[tuple[Layout, CommKwargs]]]:
        """Return the cost, and for each step the layout before it and the arguments of its ``CommSpec``."""
        # A distance is (cost, steps). The queue breaks the remaining ties by the layout itself, so every rank finds one
        # path.
        best, previous = {source: (0.0, 0)}, {}
        queue = [((0.0, 0), source)]
        while queue:
            reached, layout = heapq.heappop(queue)
            if layout == target:
                break
            if reached > best[layout]:
                continue
            for neighbour, kwargs in self._edges(layout):
                candidate = (reached[0] + self._price(layout, kwargs), reached[1] + 1)
                if neighbour not in best or candidate < best[neighbour]:
                    best[neighbour], previous[neighbour] = candidate, (layout, kwargs)
                    heapq.heappush(queue, (candidate, neighbour))
        hops: list[tuple[Layout, CommKwargs]] = []
        layout = target
        while layout != source:
            hops.append(previous[layout])
            layout = previous[layout][0]
        return best[target][0], hops[::-1]

    def _price(self, layout: Layout, kwargs: CommKwargs) -> float:
        """Return ``CommSpec.get_comm_cost``, cached by pattern, axes and the axes that shard the tensor."""
        # The cost depends on the local size, not on the dims: one price serves all dims that the same axes shard.
        key = (kwargs["comm_pattern"], str(kwargs["logical_process_axis"]), frozenset(itertools.chain(*layout)))
        if key not in self._prices:
            spec = CommSpec(sharding_spec=_spec(self.mesh, self.shape, layout), **kwargs, **self.options)
            self._prices[key] = spec.get_comm_cost()["total"]
        return self._prices[key]

    def _edges(self, layout: Layout) -> Iterator[tuple[Layout, CommKwargs]]:
        """Yield every layout one step away, with the arguments of the step."""
        free = [axis for axis in range(len(self.mesh.mesh_shape)) if axis not in itertools.chain(*layout)]
        # Every choice of free axes in every order.
        added = [axes for count in range(1, len(free) + 1) for axes in itertools.permutations(free, count)]
        for dim, axes in enumerate(layout):
            for more in added:
                grown = (*axes, *more)
                if self._divides(dim, grown):
                    yield _with(layout, {dim: grown}), _arguments(_Pattern.SPLIT_FWD_GATHER_BWD, dim, dim, more)
            for count in range(len(axes)):  # axes that stay; the others are gathered, or move to another dim
                left_axes, moved_axes = axes[:count], axes[count:]
                yield _with(layout, {dim: left_axes}), _arguments(_Pattern.GATHER_FWD_SPLIT_BWD, dim, dim, moved_axes)
                for other, present in enumerate(layout):
                    if other != dim and self._divides(other, (*present, *moved_axes)):
                        after = _with(layout, {dim: left_axes, other: (*present, *moved_axes)})
                        yield after, _arguments(_Pattern.ALL2ALL_FWD_ALL2ALL_BWD, dim, other, moved_axes)
        sharded = [(dim, list(axes)) for dim, axes in enumerate(layout) if axes]
        if len(self.mesh.mesh_shape) == 2 and not free:
            # Both axes are in use, by two dims or by one; dim -1 without axes stands for the missing second one.
            gather_dim, axes = mix_gather_simulator(sharded[0], sharded[1] if len(sharded) > 1 else (-1, []))
            kwargs = _arguments(_Pattern.MIXGATHER_FWD_SPLIT_BWD, gather_dim, None, axes)
            yield ((),) * len(layout), kwargs

    def _divides(self, dim: int, axes: Axes) -> bool:
        return self.shape[dim] % math.prod(self.mesh.mesh_shape[axis] for axis in axes) == 0


def _arguments(
    pattern: CollectiveCommPattern, gather_dim: Any, shard_dim: int | None, axes: Sequence[int]
) -> CommKwargs:
    """Return the arguments of ``CommSpec``."""
    axis = axes[0] if len(axes) == 1 else list(axes)
    return {"comm_pattern": pattern, "gather_dim": gather_dim, "shard_dim": shard_dim, "logical_process_axis": axis}


def _with(layout: Layout, changed: dict[int, Axes]) -> Layout:
    return tuple(changed.get(dim, axes) for dim, axes in enumerate(layout))


def _layout(spec: ShardingSpec) -> Layout:
    return tuple(tuple(each.shard_list) for each in spec.sharding_sequence)


def _spec(mesh: DeviceMesh, shape: Sequence[int], layout: Layout) -> ShardingSpec:
    return ShardingSpec(mesh, shape, {dim: list(axes) for dim, axes in enumerate(layout) if axes})
