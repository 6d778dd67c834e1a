"""Serialization of ColoTensors; ``torch.load`` accepts them with its default arguments."""

from typing import Any

import torch
from torch import Tensor

from tritoncomm.tensor.colo_parameter import ColoParameter
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.distspec import DistPlacementPattern, _DistSpec
from tritoncomm.tensor.process_group import ProcessGroup

__all__ = ["rebuild"]

_CLASSES: dict[str, Any] = {"ColoTensor": ColoTensor, "ColoParameter": ColoParameter}


def rebuild(name: str, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> ColoTensor:
    """A tensor from its local data and layout; the process group is looked up on first use."""
    return _CLASSES[name]._rebuild(data, requires_grad, state)


torch.serialization.add_safe_globals(
    [rebuild, ProcessGroup, _DistSpec, DistPlacementPattern, ComputeSpec, ComputePattern]
)
