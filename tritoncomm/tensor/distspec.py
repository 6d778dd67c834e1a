"""Where the pieces of a tensor are: on every rank whole, or cut along dims."""

import enum
from collections.abc import Sequence
from typing import Any

from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import ShapeError

__all__ = ["DistPlacementPattern", "ReplicaSpec", "ShardSpec", "_DistSpec", "cuts", "local_shape", "partitions"]


class DistPlacementPattern(enum.Enum):
    """Whole on every rank, or cut."""

    REPLICATE = "r"
    SHARD = "s"


class _DistSpec:
    """A placement with what it needs to know: ``dims`` and ``num_partitions`` of a shard.

    Equal specs say the same in the same words: ``ShardSpec([-1], [2])`` is not ``ShardSpec([1], [2])``.
    """

    def __init__(self, dist_placement_pattern: DistPlacementPattern, **meta_info: Any) -> None:
        self.placement = dist_placement_pattern
        for name, value in meta_info.items():
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DistSpec) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        told = [
            f"{name}={value}" for name, value in sorted(vars(self).items(), key=lambda item: item[0] == "placement")
        ]
        return f"DistSpec({', '.join(told)})"


def ReplicaSpec() -> _DistSpec:
    """Every rank holds the whole tensor."""
    return _DistSpec(DistPlacementPattern.REPLICATE)


def ShardSpec(dims: list[int], num_partitions: list[int]) -> _DistSpec:
    """Dim ``dims[i]`` is cut into ``num_partitions[i]`` pieces; ranks count through them row-major.

    A dim that does not divide is cut as ``torch.chunk`` cuts it: 9 over 4 is 3, 3, 3, 0.

    Raises:
        AssertionError: not two lists of the same length.
        ShapeError: a dim twice, or fewer than one partition.
    """
    assert isinstance(dims, list), "dims must be a list"
    assert isinstance(num_partitions, list), "num_partitions must be a list"
    assert len(dims) == len(num_partitions), f"{len(dims)} dims, but {len(num_partitions)} partitions"
    if len(set(dims)) != len(dims) or any(parts < 1 for parts in num_partitions):
        raise ShapeError(f"ShardSpec: dims {dims} with partitions {num_partitions} is no cut")
    return _DistSpec(DistPlacementPattern.SHARD, dims=tuple(dims), num_partitions=tuple(num_partitions))


def partitions(spec: _DistSpec, ndim: int) -> dict[int, int]:
    """Pieces by dim counted from the front, dims in the order of the spec; empty when nothing is cut.

    Raises:
        ShapeError: a dim that the tensor does not have, or the same dim in two notations.
    """
    if spec.placement is DistPlacementPattern.REPLICATE:
        return {}
    found: dict[int, int] = {}
    for dim, parts in zip(spec.dims, spec.num_partitions, strict=True):  # type: ignore[attr-defined]
        if not -ndim <= dim < ndim:
            raise ShapeError(f"{spec}: a tensor of {ndim} dims has no dim {dim}")
        if dim % ndim in found:
            raise ShapeError(f"{spec}: dim {dim % ndim} twice")
        found[dim % ndim] = parts
    return {dim: parts for dim, parts in found.items() if parts > 1}


def cuts(shape: Sequence[int], parts: dict[int, int], rank: int) -> list[tuple[int, int, int]]:
    """(dim, start, size) of a rank's piece along every cut dim; ranks count row-major through ``parts``."""
    found = []
    for dim, count in reversed(parts.items()):
        rank, index = divmod(rank, count)
        sizes = chunk_sizes(shape[dim], count)
        found.append((dim, sum(sizes[:index]), sizes[index]))
    return found[::-1]


def local_shape(shape: Sequence[int], parts: dict[int, int], rank: int) -> tuple[int, ...]:
    """Shape of a rank's piece."""
    result = list(shape)
    for dim, _, size in cuts(shape, parts, rank):
        result[dim] = size
    return tuple(result)
