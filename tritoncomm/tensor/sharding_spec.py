"""ShardingSpec of ColossalAI's contract: ``[S0, R, S1]`` shards dim 0 over mesh axis 0 and dim 2 over axis 1."""

import math
from collections.abc import Sequence
from itertools import takewhile
from typing import Any

import torch

from tritoncomm.errors import ArgumentError, CommError, ShapeError
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.simulators import merge_same_dim_mesh_list

__all__ = [
    "DuplicatedShardingDimensionError",
    "ShardingNotDivisibleError",
    "ShardingOutOfIndexError",
    "ShardingSpec",
    "ShardingSpecException",
    "_DimSpec",
]

_GATHER, _SHARD, _STEP = 20, 5, 6


class ShardingSpecException(CommError):
    """Base class of invalid sharding specs."""


class DuplicatedShardingDimensionError(ShardingSpecException, ValueError):
    """A mesh axis shards more than one dim, or one dim twice."""


class ShardingOutOfIndexError(ShardingSpecException, IndexError):
    """A dim that the tensor does not have, or an axis that the mesh does not have."""


class ShardingNotDivisibleError(ShardingSpecException, ValueError):
    """A dim does not divide evenly by the ranks that shard it."""


class _DimSpec:
    """Mesh axes of one dim, the first one slowest; written ``R``, ``S0``, ``S01``. A replicated dim has none."""

    def __init__(self, shard_list: Sequence[int]) -> None:
        self.shard_list = list(shard_list)

    @classmethod
    def named(cls, name: str) -> "_DimSpec":
        """Return the spec written ``name``, for meshes of up to ten axes."""
        if name != "R" and not (name[:1] == "S" and name[1:].isdecimal()):
            raise ArgumentError(f"{name!r} is not a dim spec; write R, S0, S01, ...")
        return cls([int(axis) for axis in name[1:]])

    @property
    def is_replica(self) -> bool:
        """Whether no axis shards the dim."""
        return not self.shard_list

    def difference(self, other: "_DimSpec") -> int:
        """Return the cost of the change to ``other``: 20 per axis gathered, 5 per axis sharded, 6 between two steps."""
        own_axes, other_axes = self.shard_list, other.shard_list
        # A common prefix is kept. ``S1`` to ``S01`` gathers one axis and shards two: 20 + 6 + 5 + 6 + 5 = 42.
        common = takewhile(lambda pair: pair[0] == pair[1], zip(own_axes, other_axes, strict=False))
        prefix = sum(1 for _ in common)
        gathers, shards = len(own_axes) - prefix, len(other_axes) - prefix
        return _GATHER * gathers + _SHARD * shards + _STEP * max(gathers + shards - 1, 0)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _DimSpec) and self.shard_list == other.shard_list

    def __hash__(self) -> int:
        return hash(tuple(self.shard_list))

    def __repr__(self) -> str:
        return "S" + "".join(map(str, self.shard_list)) if self.shard_list else "R"


class ShardingSpec:
    """Sharding of a tensor of ``entire_shape`` over a mesh; given by dim or as a sequence, stored as both.

    Args:
        device_mesh: the mesh.
        entire_shape: global shape.
        dim_partition_dict: mesh axes by dim; negative dims count from the end. Not changed.
        sharding_sequence: one ``_DimSpec``, or its name, for every dim.

    Raises:
        ArgumentError: neither of the two is given, or a sequence entry is not a dim spec.
        DuplicatedShardingDimensionError: an axis is used twice.
        ShardingOutOfIndexError: no such dim or axis, or a sequence of the wrong length.
        ShardingNotDivisibleError: a dim does not divide.
        ShapeError: dict and sequence describe different layouts.

    Example:
        On a 2x2 mesh ``{0: [0, 1]}`` of an 8x4 tensor is ``[S01, R]``, and every rank holds 2x4.
    """

    def __init__(
        self,
        device_mesh: DeviceMesh,
        entire_shape: Sequence[int],
        dim_partition_dict: dict[int, list[int]] | None = None,
        sharding_sequence: Sequence[Any] | None = None,
    ) -> None:
        self.device_mesh = device_mesh
        self.entire_shape = torch.Size(entire_shape)
        if dim_partition_dict is None and sharding_sequence is None:
            raise ArgumentError("ShardingSpec: give dim_partition_dict or sharding_sequence")
        if sharding_sequence is not None:
            self.sharding_sequence = [_DimSpec.named(s) if isinstance(s, str) else s for s in sharding_sequence]
            self.convert_shard_sequence_to_dict()
        if dim_partition_dict is not None:
            by_sequence = self.dim_partition_dict if sharding_sequence is not None else None
            self.dim_partition_dict = merge_same_dim_mesh_list(len(self.entire_shape), dim_partition_dict)
            by_dict = {dim: axes for dim, axes in self.dim_partition_dict.items() if axes}
            if by_sequence is not None and by_sequence != by_dict:
                raise ShapeError(f"{dim_partition_dict} and {self.sharding_sequence} are different layouts")
            self.convert_dict_to_shard_sequence()
        self._check()

    def convert_dict_to_shard_sequence(self) -> None:
        """Set ``sharding_sequence`` from ``dim_partition_dict``.

        Raises:
            ShardingOutOfIndexError: no such dim.
        """
        ndim = len(self.entire_shape)
        if any(not 0 <= dim < ndim for dim in self.dim_partition_dict):
            raise ShardingOutOfIndexError(
                f"{self.dim_partition_dict} shards dims that a {ndim}-dim tensor does not have"
            )
        self.sharding_sequence = [_DimSpec(self.dim_partition_dict.get(dim, [])) for dim in range(ndim)]

    def convert_shard_sequence_to_dict(self) -> None:
        """Set ``dim_partition_dict`` from ``sharding_sequence``; replicated dims have no entry.

        Raises:
            ArgumentError: an entry is not a ``_DimSpec``.
            ShardingOutOfIndexError: not one entry for every dim.
        """
        if not all(isinstance(spec, _DimSpec) for spec in self.sharding_sequence):
            raise ArgumentError(f"{self.sharding_sequence} has entries that are not dim specs")
        if len(self.sharding_sequence) != len(self.entire_shape):
            raise ShardingOutOfIndexError(
                f"{self.sharding_sequence} does not match the shape {list(self.entire_shape)}"
            )
        specs = enumerate(self.sharding_sequence)
        self.dim_partition_dict = {dim: list(spec.shard_list) for dim, spec in specs if spec.shard_list}

    def sharding_sequence_difference(self, other: "ShardingSpec") -> int:
        """Sum over the dims of the cost of the change to ``other``; 0 for equal layouts.

        Raises:
            AssertionError: tensors of different numbers of dims.
        """
        own_sequence, other_sequence = self.sharding_sequence, other.sharding_sequence
        assert len(own_sequence) == len(other_sequence), (
            f"{own_sequence} and {other_sequence} are layouts of tensors with different numbers of dims"
        )
        return sum(own.difference(target) for own, target in zip(own_sequence, other_sequence, strict=True))

    def get_sharded_shape_per_device(self) -> torch.Size:
        """Return the shape of the local tensor, which is equal on all ranks."""
        parts = [self._num_shards(spec.shard_list) for spec in self.sharding_sequence]
        return torch.Size([size // count for size, count in zip(self.entire_shape, parts, strict=True)])

    def _num_shards(self, axes: Sequence[int]) -> int:
        return math.prod(self.device_mesh.mesh_shape[axis] for axis in axes)

    def _check(self) -> None:
        """Check that the mesh has all axes, none is used twice, and every dim divides by its ranks."""
        used = [axis for spec in self.sharding_sequence for axis in spec.shard_list]
        if len(set(used)) != len(used):
            raise DuplicatedShardingDimensionError(f"{self.sharding_sequence} uses a mesh axis twice")
        mesh_shape = self.device_mesh.mesh_shape
        if any(not 0 <= axis < len(mesh_shape) for axis in used):
            raise ShardingOutOfIndexError(
                f"{self.sharding_sequence} uses axes that a mesh of {mesh_shape} does not have"
            )
        for dim, (size, spec) in enumerate(zip(self.entire_shape, self.sharding_sequence, strict=True)):
            if size % self._num_shards(spec.shard_list):
                raise ShardingNotDivisibleError(
                    f"dim {dim} of size {size} does not divide over {self._num_shards(spec.shard_list)} ranks ({spec})"
                )

    def __repr__(self) -> str:
        sequence = ",".join(map(str, self.sharding_sequence))
        return f"DistSpec:\n\tshard_sequence: {sequence}\n\tdevice_mesh_shape: {self.device_mesh.mesh_shape}"
