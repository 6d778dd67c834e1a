"""Compute pattern of operators on a sharded weight."""

import enum

from tritoncomm.errors import ArgumentError

__all__ = ["ComputePattern", "ComputeSpec"]


class ComputePattern(enum.Enum):
    """Tensor-parallel decompositions; only TP1D has rules here."""

    TP1D = 0
    TP2D = 1
    TP2P5D = 2
    TP3D = 3


class ComputeSpec:
    """The pattern of an operator, and whether its output is gathered.

    Args:
        compute_pattern: a member of ``ComputePattern``.

    Attributes:
        output_replicate: whether a column-parallel operator gathers its output; True by default.
        output_shard: dim along which a row-parallel operator shards its output (sequence parallelism: a reduce-scatter
            in place of the all-reduce); None, the default, gives a replica.
    """

    def __init__(self, compute_pattern: ComputePattern) -> None:
        if not isinstance(compute_pattern, ComputePattern):
            raise ArgumentError(f"ComputeSpec: expected a ComputePattern, not {compute_pattern!r}")
        self.compute_pattern = compute_pattern
        self.output_replicate = True
        self.output_shard: int | None = None

    def set_output_replicate(self, flag: bool = True) -> None:
        """Set whether a column-parallel operator gathers its output."""
        self.output_replicate = flag

    def set_output_shard(self, dim: int | None) -> None:
        """Set the dim along which a row-parallel operator shards its output; None gives a replica."""
        self.output_shard = dim

    def __repr__(self) -> str:
        return f"ComputeSpec(pattern={self.compute_pattern}, replicate_output={self.output_replicate})"
