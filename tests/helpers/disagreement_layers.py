"""Rows of the layers above the mappings: ColoTensors, the styles of ``parallelize_module``, other packages' classes."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from disagreement_row import REPLICAS, Row
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import functional

from tritoncomm import parallel, tensor
from tritoncomm.integrations.deepspeed import DistributedAttention
from tritoncomm.integrations.megatron import trained_linear
from tritoncomm.integrations.yunchang import SeqAllToAll4D
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec, group_registry

__all__ = ["INTEGRATIONS", "PARALLEL", "TENSOR"]


def _over(group: Any) -> ProcessGroup:
    """The ranks of ``group``, which send over it from now on: ColoTensors look it up by its ranks."""
    ranks = tuple(dist.get_process_group_ranks(group))
    group_registry._register(group, dist.get_backend(group), ranks)
    return ProcessGroup(ranks=list(ranks), tp_degree=len(ranks))


def _spec(group: Any, dim: int | None) -> ColoTensorSpec:
    return ColoTensorSpec(_over(group), ReplicaSpec() if dim is None else ShardSpec([dim], [group.size()]))


def _colo(group: Any, x: Tensor, dim: int | None) -> ColoTensor:
    """``x`` as this rank's shard along ``dim``, or as a replica."""
    return ColoTensor(x, _spec(group, dim))


def _redistribute(group: Any, x: Tensor, dim: int = 1) -> Tensor:
    return _colo(group, x, 0).redistribute(ShardSpec([dim], [group.size()]))


def _handle_trans_spec(group: Any, x: Tensor, dim: int = 1) -> Tensor:
    old, new = (ShardSpec([each], [group.size()]) for each in (0, dim))
    return tensor.DistSpecManager.handle_trans_spec(x, old, new, _over(group))


def _linear(group: Any, x: Tensor) -> Tensor:
    return functional.linear(_colo(group, x, -1), _colo(group, x.new_ones(6, x.shape[-1]), -1))


def _cross_entropy(group: Any, x: Tensor) -> Tensor:
    return functional.cross_entropy(_colo(group, x, -1), torch.zeros(x.shape[0], dtype=torch.long))


def _clip(group: Any, x: Tensor) -> Tensor:
    parameter = tensor.ColoParameter(x.detach(), spec=_spec(group, 0))
    parameter.grad = x
    return tensor.clip_grad_norm_([parameter], 1.0)


def _check_replicas(group: Any, x: Tensor) -> None:
    module = nn.Module()
    module.w = tensor.ColoParameter(x, spec=_spec(group, None))
    tensor.check_replicas(module)


_ROWS: dict[str, Any] = {"shape": lambda w: (4, 4 * w, 4 * w), "other": lambda w: (8, 4 * w, 4 * w)}
_DIM: dict[str, Any] = {"differ": {"dim": lambda w: {"dim": 2}}, "words": {"dim": r"(dims?|\w+_dims?)"}}
TENSOR = {
    "redistribute": Row(_redistribute, **_ROWS, **_DIM),
    "DistSpecManager": Row(_handle_trans_spec, **_ROWS, **_DIM),
    "to_replicate": Row(lambda g, x: _colo(g, x, 0).to_replicate()),
    "sum": Row(lambda g, x: _colo(g, x, 0).sum(0), other=lambda w: (4 * w, 8 * w)),
    "linear": Row(_linear),
    "embedding": Row(
        lambda g, x: functional.embedding(torch.arange(3), _colo(g, x, 0)), other=lambda w: (4 * w, 8 * w)
    ),
    "cross_entropy": Row(_cross_entropy),
    "clip_grad_norm_": Row(_clip, impossible={"shape": "one number, of any parameters"}),
    "check_replicas": Row(_check_replicas, words={"shape": REPLICAS, "dtype": REPLICAS}),
}


def _styled(group: Any, module: nn.Module, style: Any, x: Tensor) -> Any:
    mesh = DeviceMesh.from_group(group, "cpu")
    return parallelize_module(module, mesh, style, src_data_rank=None)(x)


def _colwise(group: Any, x: Tensor, dim: int = 0) -> Any:
    module = nn.Linear(x.shape[-1], 8, dtype=x.dtype)
    return _styled(group, module, parallel.ColwiseParallel(input_layouts=Shard(dim)), x)


def _rowwise(group: Any, x: Tensor, dim: int = 0) -> Any:
    module = nn.Linear(x.shape[-1] * group.size(), 8, dtype=x.dtype)
    return _styled(group, module, parallel.RowwiseParallel(output_layouts=Shard(dim)), x)


def _rowwise_embedding(group: Any, x: Tensor) -> Any:
    module = nn.Embedding(4 * group.size(), 6)
    return _styled(group, module, parallel.RowwiseParallel(input_layouts=Replicate()), x.long())


_OTHER_DIM: dict[str, Any] = {"differ": {"dim": lambda w: {"dim": 1}}}
PARALLEL = {
    "ColwiseParallel": Row(_colwise, lambda w: (2, 4, 8), lambda w: (4, 4, 8), **_OTHER_DIM),
    "RowwiseParallel": Row(_rowwise, lambda w: (2 * w, 4 * w, 8), lambda w: (4 * w, 4 * w, 8), **_OTHER_DIM),
    "RowwiseParallel of an embedding": Row(_rowwise_embedding, impossible={"dtype": "ids are integers"}),
}


def _attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return q + k + v


def _gathering_linear(group: Any, x: Tensor) -> Tensor:
    buffers = SimpleNamespace(get_tensor=lambda shape, dtype, name: torch.empty(shape, dtype=dtype))
    return trained_linear._Linear.apply(x, x.new_ones(6, x.shape[-1]), None, False, group, lambda: buffers)


INTEGRATIONS = {
    "deepspeed.DistributedAttention": Row(
        lambda g, x: DistributedAttention(_attention, g, 2, 1)(x, x, x, 0),
        shape=lambda w: (2, 4, 4 * w, 8), other=lambda w: (2, 4, 4 * w, 4),
    ),
    "yunchang.SeqAllToAll4D": Row(
        lambda g, x, dim=2: SeqAllToAll4D.apply(g, x, dim, 3 - dim),
        shape=lambda w: (2, 4 * w, 4 * w, 8), other=lambda w: (2, 8 * w, 4 * w, 8),
        differ={"dim": lambda w: {"dim": 1}},
    ),
    "megatron linear": Row(_gathering_linear),
    "megatron linear, backward": Row(
        _gathering_linear, is_backward=True,
        impossible=dict.fromkeys(("shape", "dtype"), "a backward takes it from its forward, which has compared it"),
    ),
}  # fmt: skip
