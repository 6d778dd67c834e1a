"""ColoTensorSpec: process group, placement and compute pattern."""

from dataclasses import dataclass

from tritoncomm.tensor.compute_spec import ComputeSpec
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["ColoTensorSpec"]

_REPLICA = ReplicaSpec()


@dataclass(init=False)
class ColoTensorSpec:
    """Process group, placement and compute pattern of a ColoTensor.

    Args:
        pg: the process group; None makes ``ProcessGroup()``.
        dist_attr: the placement, a replica by default.
        compute_attr: the compute spec, if any.
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
