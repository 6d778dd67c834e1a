"""What a ColoTensor is told: its ranks, its layout, how operators use it."""

from dataclasses import dataclass

from tritoncomm.tensor.compute_spec import ComputeSpec
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["ColoTensorSpec"]

_REPLICA = ReplicaSpec()


@dataclass(init=False)
class ColoTensorSpec:
    """The layout of a ColoTensor.

    Args:
        pg: the ranks; None makes ``ProcessGroup()``.
        dist_attr: where the pieces are, whole on every rank by default.
        compute_attr: how operators compute on it, if they should.
    """

    pg: ProcessGroup
    dist_attr: _DistSpec
    compute_attr: ComputeSpec | None

    def __init__(
        self, pg: ProcessGroup | None, dist_attr: _DistSpec = _REPLICA, compute_attr: ComputeSpec | None = None
    ) -> None:
        self.pg = ProcessGroup() if pg is None else pg
        self.dist_attr = ReplicaSpec() if dist_attr is _REPLICA else dist_attr
        self.compute_attr = compute_attr
