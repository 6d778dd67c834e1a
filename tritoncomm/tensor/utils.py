"""Module parameters as ColoTensors, unsharded state dicts, and helpers of sharding specs."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.distspec import shard_of
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.simulators import (
    all_gather_simulator,
    all_to_all_simulator,
    convert_dim_partition_dict,
    merge_same_dim_mesh_list,
    mix_gather_simulator,
    shard_simulator,
)

__all__ = [
    "all_gather_simulator",
    "all_to_all_simulator",
    "convert_dim_partition_dict",
    "convert_parameter",
    "full_state_dict",
    "load_full_state_dict",
    "merge_same_dim_mesh_list",
    "mix_gather_simulator",
    "named_params_with_colotensor",
    "shard_simulator",
]


def named_params_with_colotensor(
    module: nn.Module, prefix: str = "", recurse: bool = True
) -> Iterator[tuple[str, Tensor]]:
    """ColoTensors that are plain attributes of modules, then the parameters; ``prefix`` and ``recurse`` for both."""
    modules = module.named_modules(prefix=prefix) if recurse else [(prefix, module)]
    for name, owner in modules:
        for key, value in vars(owner).items():
            if isinstance(value, ColoTensor):
                yield f"{name}.{key}" if name else key, value
    yield from module.named_parameters(prefix=prefix, recurse=recurse)


def convert_parameter(module: nn.Module, param_name: str) -> None:
    """Replace a parameter by a ColoTensor over the same memory.

    Raises:
        ValueError: no such attribute, not a tensor, or not contiguous.
    """
    if not hasattr(module, param_name):
        raise ValueError(f"{type(module).__name__} has no parameter {param_name}")
    tensor = getattr(module, param_name)
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{param_name} is not a tensor but {type(tensor).__name__}")
    if not tensor.is_contiguous():
        raise ValueError(f"{param_name} is not contiguous")
    if param_name in module._parameters:
        delattr(module, param_name)
    setattr(module, param_name, ColoTensor.from_torch_tensor(tensor))


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """The state dict of the unsharded module, on every rank: plain tensors, ColoTensors gathered.

    All ranks of their groups call.
    """
    with torch.no_grad():
        return {
            name: plain(value.to_replicate()).clone() if isinstance(value, ColoTensor) else value
            for name, value in module.state_dict().items()
        }


def load_full_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Load the state dict of the unsharded module; each rank keeps its shard of every ColoTensor.

    Raises:
        ValueError: a name is missing or unknown, or a shape differs.
    """
    own = module.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        raise ValueError(f"missing {sorted(own.keys() - state.keys())}, unknown {sorted(state.keys() - own.keys())}")
    with torch.no_grad():
        for name, target in own.items():
            source = state[name]
            if not isinstance(target, ColoTensor):
                target.copy_(source)
                continue
            if tuple(source.shape) != tuple(target.size_global()):
                raise ValueError(f"{name} is {list(target.size_global())}, the state dict has {list(source.shape)}")
            parts, pg = target.partitions, target.process_group
            plain(target).copy_(shard_of(source, parts, pg.tp_local_rank()) if parts else source)
