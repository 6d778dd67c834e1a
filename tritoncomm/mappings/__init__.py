"""Collectives inside autograd: Megatron-LM's tensor-parallel mappings, and the general ones along any dims.

Internal functions take a checked ``group``. ``name`` is the public mapping, for errors and counters; ``on_stream``
issues an exchange on the backend's own stream and waits for it. W is the number of ranks.
"""

from tritoncomm.mappings.exchanges import (
    _AllToAll,
)
from tritoncomm.mappings.functions import (
    _AllGatherFromTensorParallelRegion,
    _CopyToModelParallelRegion,
    _GatherFromModelParallelRegion,
    _GatherFromSequenceParallelRegion,
    _ReduceFromModelParallelRegion,
    _ReduceScatterToSequenceParallelRegion,
    _ReduceScatterToTensorParallelRegion,
    _ScatterToModelParallelRegion,
    _ScatterToSequenceParallelRegion,
)
from tritoncomm.mappings.general import (
    all_gather_dim,
    all_to_all_dims,
    reduce_scatter_dim,
    split_dim,
)
from tritoncomm.mappings.helpers import (
    _gather_along_first_dim,
    _gather_along_last_dim,
    _reduce,
    _reduce_scatter_along_first_dim,
    _reduce_scatter_along_last_dim,
    _split_along_first_dim,
    _split_along_last_dim,
)
from tritoncomm.mappings.overwriting import overwrite_inputs
from tritoncomm.mappings.tensor_parallel import (
    all_gather_last_dim_from_tensor_parallel_region,
    all_to_all,
    all_to_all_hp2sp,
    all_to_all_sp2hp,
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
    gather_from_tensor_model_parallel_region,
    reduce_from_tensor_model_parallel_region,
    reduce_scatter_last_dim_to_tensor_parallel_region,
    reduce_scatter_to_sequence_parallel_region,
    scatter_to_sequence_parallel_region,
    scatter_to_tensor_model_parallel_region,
)

__all__ = [
    "_AllGatherFromTensorParallelRegion",
    "_AllToAll",
    "_CopyToModelParallelRegion",
    "_GatherFromModelParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ReduceFromModelParallelRegion",
    "_ReduceScatterToSequenceParallelRegion",
    "_ReduceScatterToTensorParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ScatterToSequenceParallelRegion",
    "_gather_along_first_dim",
    "_gather_along_last_dim",
    "_reduce",
    "_reduce_scatter_along_first_dim",
    "_reduce_scatter_along_last_dim",
    "_split_along_first_dim",
    "_split_along_last_dim",
    "all_gather_dim",
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_dims",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "overwrite_inputs",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_dim",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
    "split_dim",
]
