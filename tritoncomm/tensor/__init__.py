"""ColoTensor: sharded tensors, their layouts, redistribution, operators and meshes.

In the modules of this package ``shape`` is the shape of the global tensor and ``x`` the local tensor of this rank.
``parts`` are (dim, number of shards) of every sharded dim, empty for a replica; ranks are assigned row-major.
``pg`` is the ``ProcessGroup`` of the shards, ``group`` torch's group of its tensor-parallel ranks and ``rank`` a
position in it (in ``group_registry`` a global rank). ``axis`` is an axis of the mesh, ``name`` the operator for errors.
"""

from tritoncomm.tensor import gathered_view as gathered_view
from tritoncomm.tensor import pickles as pickles
from tritoncomm.tensor import utils
from tritoncomm.tensor.alpha_beta import measure_mesh
from tritoncomm.tensor.colo_parameter import ColoParameter
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.comm_spec import CollectiveCommPattern, CommSpec
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.const import TensorType
from tritoncomm.tensor.device_mesh import DeviceMesh
from tritoncomm.tensor.dist_spec_mgr import DistSpecManager
from tritoncomm.tensor.distspec import DistPlacementPattern, ReplicaSpec, ShardSpec
from tritoncomm.tensor.param_op_hook import ColoParamOpHook, ColoParamOpHookManager
from tritoncomm.tensor.path_search import shortest_path
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.sharding_spec import (
    DuplicatedShardingDimensionError,
    ShardingNotDivisibleError,
    ShardingOutOfIndexError,
    ShardingSpec,
)
from tritoncomm.tensor.tensor_spec import ColoTensorSpec
from tritoncomm.tensor.training import check_replicas, clip_grad_norm_, shard_parameters, sharded_optimizer_state
from tritoncomm.tensor.utils import (
    convert_dim_partition_dict,
    convert_parameter,
    merge_same_dim_mesh_list,
    named_params_with_colotensor,
)

__all__ = [
    "CollectiveCommPattern",
    "ColoParamOpHook",
    "ColoParamOpHookManager",
    "ColoParameter",
    "ColoTensor",
    "ColoTensorSpec",
    "CommSpec",
    "ComputePattern",
    "ComputeSpec",
    "DeviceMesh",
    "DistPlacementPattern",
    "DistSpecManager",
    "DuplicatedShardingDimensionError",
    "ProcessGroup",
    "ReplicaSpec",
    "ShardSpec",
    "ShardingNotDivisibleError",
    "ShardingOutOfIndexError",
    "ShardingSpec",
    "TensorType",
    "check_replicas",
    "clip_grad_norm_",
    "convert_dim_partition_dict",
    "convert_parameter",
    "measure_mesh",
    "merge_same_dim_mesh_list",
    "named_params_with_colotensor",
    "shard_parameters",
    "sharded_optimizer_state",
    "shortest_path",
    "utils",
]
