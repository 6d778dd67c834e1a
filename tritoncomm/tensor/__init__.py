"""ColoTensor: tensors of which every rank holds a piece, and what moves them between layouts."""

from tritoncomm.tensor import overrides as overrides
from tritoncomm.tensor import pickles as pickles
from tritoncomm.tensor.colo_parameter import ColoParameter
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.const import TensorType
from tritoncomm.tensor.dist_spec_mgr import DistSpecManager
from tritoncomm.tensor.distspec import DistPlacementPattern, ReplicaSpec, ShardSpec
from tritoncomm.tensor.param_op_hook import ColoParamOpHook, ColoParamOpHookManager
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.tensor_spec import ColoTensorSpec
from tritoncomm.tensor.utils import (
    convert_parameter,
    named_params_with_colotensor,
)

__all__ = [
    "ColoParamOpHook",
    "ColoParamOpHookManager",
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "ComputePattern",
    "ComputeSpec",
    "DistPlacementPattern",
    "DistSpecManager",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
    "TensorType",
    "convert_parameter",
    "named_params_with_colotensor",
]
