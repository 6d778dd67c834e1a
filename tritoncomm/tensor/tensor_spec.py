"""ColoTensorSpec: process group, placement and compute pattern."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from tritoncomm.core.plan import Ints
from tritoncomm.reshard import Layout
from tritoncomm.tensor.compute_spec import ComputeSpec
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.resharding import layout_of

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
    _wrap: ClassVar[Callable[..., Any]]
    """``ColoTensor._wrap``, which its module sets."""

    def __init__(
        self, pg: ProcessGroup | None, dist_attr: _DistSpec = _REPLICA, compute_attr: ComputeSpec | None = None
    ) -> None:
        self.pg = ProcessGroup() if pg is None else pg
        self.dist_attr = ReplicaSpec() if dist_attr is _REPLICA else dist_attr
        self.compute_attr = compute_attr

    def reshard_layout(self, shape: Ints) -> Layout:
        """Return the layout of a tensor of this global shape, as ``reshard`` takes it."""
        return layout_of(self.pg, self.dist_attr, shape)

    def reshard_wrap(self, local: Tensor, shape: Ints) -> Any:
        """Return a local tensor of that layout as a ColoTensor; ranks outside the process group get it back plain."""
        return local if self.pg.tp_rank_list() is None else self._wrap(local, self.pg, self.dist_attr, shape)
