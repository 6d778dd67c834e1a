"""The cheapest sequence of collectives between two sharding specs of a tensor."""

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
Told = dict[str, Any]
_Pattern = CollectiveCommPattern


@dataclass(frozen=True)
class Path:
    """What ``shortest_path`` found; prints as a table.

    Attributes:
        steps: the collectives in order.
        layouts: the sharding specs, from the source to the target; one more than steps.
        cost: sum of the steps' costs.
    """

    steps: tuple[CommSpec, ...]
    layouts: tuple[ShardingSpec, ...]
    cost: float

    def run(self, tensor: Tensor) -> Any:
        """Take this rank's piece from the source's layout to the target's; differentiable.

        Returns:
            The piece; None on a rank outside the mesh. Without steps ``tensor`` itself, detached where autograd is
            off and it requires grad.

        Raises:
            ShapeError: the tensor is no piece under the source's layout.
        """
        wanted = self.layouts[0].get_sharded_shape_per_device()
        if tensor.shape != wanted:
            raise ShapeError(f"Path.run: a piece has shape {list(wanted)}, not {list(tensor.shape)}")
        result: Any = tensor if self.steps else unchanged(tensor)
        for step in self.steps:
            if result is not None:
                result = step.covert_spec_to_action(result)
        return result

    def __str__(self) -> str:
        if not self.steps:
            return "nothing to move"
        names = [",".join(map(str, layout.sharding_sequence)) for layout in self.layouts]
        width = max(map(len, names)) + 2
        lines = [f"{'from':<{width}}{'to':<{width}}{'pattern':<28}{'forward':>14}{'backward':>14}"]
        for step, (before, after) in zip(self.steps, itertools.pairwise(names), strict=True):
            cost, name = step.get_comm_cost(), step.comm_pattern.name
            told = f"{cost['forward']:>14.3f}{cost['backward']:>14.3f}"
            lines.append(f"{before:<{width}}{after:<{width}}{name:<28}{told}")
        return "\n".join([*lines, f"{'total':<{2 * width + 42}}{self.cost:>14.3f}"])


def shortest_path(
    source_spec: ShardingSpec, target_spec: ShardingSpec, *, forward_only: bool = False, shard_cost: float = 100
) -> Path:
    """The sequence of collectives from one layout to another whose costs add up to the least (Dijkstra).

    A step gathers the last axes of a dim, cuts a dim by free axes, moves the last axes of one dim to the end of
    another, or gathers everything over a mesh of two axes. Several axes go as one. Its cost is what
    ``CommSpec.get_comm_cost`` says, forward and backward, for the elements a rank holds at that point. Layouts on the
    way divide the tensor evenly. Every rank finds the same; where the mesh has process groups every rank of it calls.

    Args:
        source_spec: the layout now; steps use its mesh.
        target_spec: the layout wanted, for the same shape and grid of ranks.
        forward_only: whether gradients do not count.
        shard_cost: of cutting a tensor on its device.

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
    cost, way = search.cheapest(source, target)
    layouts = [_spec(mesh, shape, layout) for layout in (*(here for here, _ in way), target)]
    options = search.options
    steps = [CommSpec(sharding_spec=spec, **told, **options) for spec, (_, told) in zip(layouts[:-1], way, strict=True)]
    return Path(tuple(steps), tuple(layouts), cost)


class _Search:
    """Dijkstra over the layouts of a tensor on a mesh; equal costs go to fewer steps, and alike on every rank."""

    def __init__(self, mesh: DeviceMesh, shape: Sequence[int], options: dict[str, Any]) -> None:
        ids = mesh.logical_mesh_id
        self.mesh = DeviceMesh(ids, None, None, mesh.mesh_alpha, mesh.mesh_beta)  # makes no process groups
        self.shape, self.options = tuple(shape), options
        self._prices: dict[Any, float] = {}

    def cheapest(self, source: Layout, target: Layout) -> tuple[float, list[tuple[Layout, Told]]]:
        """The cost, and the layout before each step with what is told to ``CommSpec``."""
        best, came = {source: (0.0, 0)}, {}
        queue = [((0.0, 0), source)]
        while queue:
            known, here = heapq.heappop(queue)
            if here == target:
                break
            if known > best[here]:
                continue
            for there, told in self._edges(here):
                found = (known[0] + self._price(here, told), known[1] + 1)
                if there not in best or found < best[there]:
                    best[there], came[there] = found, (here, told)
                    heapq.heappush(queue, (found, there))
        way: list[tuple[Layout, Told]] = []
        at = target
        while at != source:
            way.append(came[at])
            at = came[at][0]
        return best[target][0], way[::-1]

    def _price(self, here: Layout, told: Told) -> float:
        """What ``CommSpec`` says; that depends on no more than pattern, axes and number of elements."""
        key = (told["comm_pattern"], str(told["logical_process_axis"]), frozenset(itertools.chain(*here)))
        if key not in self._prices:
            spec = CommSpec(sharding_spec=_spec(self.mesh, self.shape, here), **told, **self.options)
            self._prices[key] = spec.get_comm_cost()["total"]
        return self._prices[key]

    def _edges(self, here: Layout) -> Iterator[tuple[Layout, Told]]:
        """Every layout one step away, and the step."""
        free = [axis for axis in range(len(self.mesh.mesh_shape)) if axis not in itertools.chain(*here)]
        added = [axes for count in range(1, len(free) + 1) for axes in itertools.permutations(free, count)]
        for dim, axes in enumerate(here):
            for more in added:
                if self._divides(dim, (*axes, *more)):
                    yield _with(here, {dim: (*axes, *more)}), _told(_Pattern.SPLIT_FWD_GATHER_BWD, dim, dim, more)
            for kept in range(len(axes)):
                left, moved = axes[:kept], axes[kept:]
                yield _with(here, {dim: left}), _told(_Pattern.GATHER_FWD_SPLIT_BWD, dim, dim, moved)
                for other, present in enumerate(here):
                    if other != dim and self._divides(other, (*present, *moved)):
                        after = _with(here, {dim: left, other: (*present, *moved)})
                        yield after, _told(_Pattern.ALL2ALL_FWD_ALL2ALL_BWD, dim, other, moved)
        cut = [(dim, list(axes)) for dim, axes in enumerate(here) if axes]
        if len(self.mesh.mesh_shape) == 2 and not free:
            gather_dim, axes = mix_gather_simulator(cut[0], cut[1] if len(cut) > 1 else (-1, []))
            told = _told(_Pattern.MIXGATHER_FWD_SPLIT_BWD, gather_dim, None, axes)
            yield ((),) * len(here), told

    def _divides(self, dim: int, axes: Axes) -> bool:
        return self.shape[dim] % math.prod(self.mesh.mesh_shape[axis] for axis in axes) == 0


def _told(pattern: CollectiveCommPattern, gather_dim: Any, shard_dim: int | None, axes: Sequence[int]) -> Told:
    """Arguments of ``CommSpec``."""
    axis = axes[0] if len(axes) == 1 else list(axes)
    return {"comm_pattern": pattern, "gather_dim": gather_dim, "shard_dim": shard_dim, "logical_process_axis": axis}


def _with(here: Layout, changed: dict[int, Axes]) -> Layout:
    return tuple(changed.get(dim, axes) for dim, axes in enumerate(here))


def _layout(spec: ShardingSpec) -> Layout:
    return tuple(tuple(each.shard_list) for each in spec.sharding_sequence)


def _spec(mesh: DeviceMesh, shape: Sequence[int], layout: Layout) -> ShardingSpec:
    return ShardingSpec(mesh, shape, {dim: list(axes) for dim, axes in enumerate(layout) if axes})
