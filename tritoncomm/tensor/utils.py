"""Helpers of ColossalAI's contract for modules and sharding specs, and state dicts of the unsharded module."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.distspec import shard_of
from tritoncomm.tensor.layout import plain, refuse_sharing, shape_of
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
    """Yield ColoTensors that are plain attributes of modules, then parameters; ``prefix`` and ``recurse`` for both."""
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
    if tensor.layout is not torch.strided or not tensor.is_contiguous():
        raise ValueError(f"{param_name} is not contiguous")
    if param_name in module._parameters:
        delattr(module, param_name)
    setattr(module, param_name, ColoTensor.from_torch_tensor(tensor))


def full_state_dict(module: nn.Module) -> dict[str, Any]:
    """Return the state dict of the unsharded module, ColoTensors gathered; all ranks of their groups call."""
    with torch.no_grad():
        return {
            name: plain(value.to_replicate()).clone() if isinstance(value, ColoTensor) else value
            for name, value in module.state_dict().items()
        }


def load_full_state_dict(module: nn.Module, state: dict[str, Any]) -> None:
    """Load the state dict of the unsharded module; each rank keeps its shard of every ColoTensor."""
    own = module.state_dict(keep_vars=True)
    if own.keys() != state.keys():
        raise ValueError(f"missing {sorted(own.keys() - state.keys())}, unknown {sorted(state.keys() - own.keys())}")
    # Every name and shape is checked first: a call that raises has loaded nothing.
    for name, target in own.items():
        refuse_sharing(f"load_full_state_dict: {name}", state[name])
        if isinstance(target, Tensor) and tuple(state[name].shape) != shape_of(target):
            raise ValueError(f"{name} is {list(shape_of(target))}, the state dict has {list(state[name].shape)}")
    module.load_state_dict({name: _own_part(target, state[name]) for name, target in own.items()})


def _own_part(target: Any, source: Any) -> Any:
    """Return this rank's shard of ``source`` if ``target`` is one; extra state of modules as it is."""
    if not isinstance(target, ColoTensor) or not target.partitions:
        return source
    return shard_of(source, target.partitions, target.process_group.tp_local_rank())
