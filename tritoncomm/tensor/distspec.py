"""Placements: replicated, or sharded along dims."""

import enum
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from torch import Tensor

from tritoncomm.core.plan import chunk_sizes
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = [
    "DistPlacementPattern",
    "Parts",
    "ReplicaSpec",
    "ShardSpec",
    "_DistSpec",
    "bounds_by_label",
    "check_spec",
    "global_shape_of",
    "local_shape",
    "partitions",
    "shard_bounds",
    "shard_box",
    "shard_of",
    "uneven_sizes",
]

Parts = tuple[tuple[int, int], ...]


class DistPlacementPattern(enum.Enum):
    """Replicated or sharded."""

    REPLICATE = "r"
    SHARD = "s"


class _DistSpec:
    """Placement; a shard also has ``dims`` and ``num_partitions``.

    Specs compare by notation: ``ShardSpec([-1], [2])`` is not equal to ``ShardSpec([1], [2])``.
    """

    dims: tuple[int, ...]
    num_partitions: tuple[int, ...]

    def __init__(self, dist_placement_pattern: DistPlacementPattern, **meta_info: Any) -> None:
        self.placement = dist_placement_pattern
        for name, value in meta_info.items():
            setattr(self, name, value)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DistSpec) and vars(self) == vars(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        fields = sorted(vars(self).items(), key=lambda item: item[0] == "placement")
        return f"DistSpec({', '.join(f'{name}={value}' for name, value in fields)})"


def ReplicaSpec() -> _DistSpec:
    """Place the global tensor on every rank."""
    return _DistSpec(DistPlacementPattern.REPLICATE)


def ShardSpec(dims: list[int], num_partitions: list[int]) -> _DistSpec:
    """Split dim ``dims[i]`` into ``num_partitions[i]`` shards; ranks are assigned to them row-major.

    A dim that does not divide is split like ``torch.chunk``: 9 over 4 is 3, 3, 3, 0.

    Raises:
        AssertionError: not two lists of the same length.
        ArgumentError: a dim or a number of partitions that is not an integer.
        ShapeError: a dim twice, or fewer than one partition.
    """
    assert isinstance(dims, list), "dims must be a list"
    assert isinstance(num_partitions, list), "num_partitions must be a list"
    assert len(dims) == len(num_partitions), f"{len(dims)} dims, but {len(num_partitions)} partitions"
    dims, num_partitions = _integers(dims), _integers(num_partitions)
    if len(set(dims)) != len(dims) or any(parts < 1 for parts in num_partitions):
        raise ShapeError(f"ShardSpec: dims {dims} with partitions {num_partitions} is not a valid sharding")
    return _DistSpec(DistPlacementPattern.SHARD, dims=tuple(dims), num_partitions=tuple(num_partitions))


def _integers(values: list[int]) -> list[int]:
    """Return dims or numbers of partitions as ints; take objects with ``__index__``, as numpy's integers."""
    try:
        return [value if type(value) is int else int(value.__index__()) for value in values]
    except (AttributeError, TypeError):
        raise ArgumentError(f"ShardSpec: dims and partitions must be integers, not {values!r}") from None


def partitions(spec: _DistSpec, ndim: int) -> Parts:
    """Return (dim, number of shards) of every sharded dim, counted from the front, in the order of the spec."""
    if spec.placement is DistPlacementPattern.REPLICATE:
        return ()
    return _partitions(tuple(spec.dims), tuple(spec.num_partitions), ndim)


def check_spec(spec: Any, ndim: int) -> Parts:
    """Return ``partitions`` of a spec out of a file; reject other objects, and specs that do not fit ``ndim``."""
    placement = getattr(spec, "placement", None)
    if placement is DistPlacementPattern.SHARD:
        dims, counts = getattr(spec, "dims", None), getattr(spec, "num_partitions", None)
        if isinstance(dims, tuple) and isinstance(counts, tuple) and len(dims) == len(counts):
            # A pickle sets attributes without ``ShardSpec``: its checks run here.
            return partitions(ShardSpec([*dims], [*counts]), ndim)
    elif placement is DistPlacementPattern.REPLICATE:
        return ()
    raise ArgumentError(f"a damaged file: this is no placement of a tensor: {spec!r}")


@lru_cache(maxsize=4096)
def _partitions(dims: tuple[int, ...], counts: tuple[int, ...], ndim: int) -> Parts:
    """Return ``partitions`` of a sharded spec, dims of one shard left out; cached."""
    result: dict[int, int] = {}
    for dim, count in zip(dims, counts, strict=True):
        if not -ndim <= dim < ndim:
            raise ShapeError(f"{ShardSpec([*dims], [*counts])}: a tensor of {ndim} dims has no dim {dim}")
        if dim % ndim in result:
            raise ShapeError(f"{ShardSpec([*dims], [*counts])}: dim {dim % ndim} twice")
        result[dim % ndim] = count
    return tuple((dim, count) for dim, count in result.items() if count > 1)


def bounds_by_label(
    sizes: Mapping[Any, int] | Sequence[int], parts: Sequence[tuple[Any, int]], rank: int
) -> tuple[tuple[Any, int, int], ...]:
    """Return (label, start, size) of a rank's shard along every sharded label; ranks are assigned row-major."""
    bounds = []
    # Row-major: the last sharded label counts fastest through the ranks.
    for label, count in reversed(parts):
        rank, index = divmod(rank, count)
        chunks = chunk_sizes(sizes[label], count)
        bounds.append((label, sum(chunks[:index]), chunks[index]))
    return tuple(bounds[::-1])


shard_bounds = lru_cache(maxsize=4096)(bounds_by_label)
"""``bounds_by_label`` of a shape, whose labels are dims; cached."""


@lru_cache(maxsize=4096)
def shard_box(shape: tuple[int, ...], parts: Parts, rank: int) -> tuple[tuple[int, int], ...]:
    """Return (start, size) of a rank's shard along every dim."""
    bounds = {dim: (start, size) for dim, start, size in shard_bounds(shape, parts, rank)}
    return tuple(bounds.get(dim, (0, size)) for dim, size in enumerate(shape))


def shard_of(x: Tensor, parts: Parts, rank: int) -> Tensor:
    """Return a rank's shard of the global tensor ``x``, as a view."""
    for dim, start, size in shard_bounds(x.shape, parts, rank):
        x = x.narrow(dim, start, size)
    return x


@lru_cache(maxsize=4096)
def local_shape(shape: tuple[int, ...], parts: Parts, rank: int) -> tuple[int, ...]:
    """Return the shape of a rank's shard."""
    return tuple(size for _, size in shard_box(shape, parts, rank))


@lru_cache(maxsize=4096)
def uneven_sizes(size: int, count: int) -> tuple[int, ...] | None:
    """Return the shards' sizes of a dim that does not divide; None for one that does, whose collectives need none."""
    return None if size % count == 0 else chunk_sizes(size, count)


def global_shape_of(local: Sequence[int], parts: Parts) -> tuple[int, ...]:
    """Return the global shape if all shards have the shape ``local``."""
    counts = dict(parts)
    return tuple(size * counts.get(dim, 1) for dim, size in enumerate(local))
