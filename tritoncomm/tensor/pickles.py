"""Pickles of ColoTensors, which ``torch.load`` accepts with its default arguments; files refer to ``rebuild``."""

import math
import reprlib
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.tensor.colo_parameter import ColoParameter
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.distspec import DistPlacementPattern, _DistSpec, check_spec, local_shape
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import check_partitions

__all__ = ["rebuild"]

_CLASSES: dict[str, Any] = {"ColoTensor": ColoTensor, "ColoParameter": ColoParameter}


def rebuild(name: str, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> ColoTensor:
    """Make a tensor from its local data and layout; the process group is looked up on first use.

    Raises:
        ArgumentError: an argument of another kind, from a file that ``torch.save`` did not write.
        ShapeError: the layout does not fit the tensor, or the data is no rank's shard of it.
    """
    kinds = (ProcessGroup, _DistSpec, ComputeSpec | None, tuple, bool)
    if not (
        isinstance(name, str)
        and name in _CLASSES
        and isinstance(data, Tensor)
        and type(requires_grad) is bool
        and isinstance(state, tuple)
        and len(state) == len(kinds)
        and all(map(isinstance, state, kinds))
        and all(type(size) is int and size >= 0 for size in state[3])
    ):
        raise ArgumentError(f"a damaged file: this is no {reprlib.repr(name)}, {reprlib.repr(state)}")
    if requires_grad and not (data.is_floating_point() or data.is_complex()):
        raise ArgumentError(f"a damaged file: {name} of {data.dtype} requires grad")
    pg, spec, _, shape, _ = state
    parts = check_spec(spec, len(shape))
    if pg.is_init:
        check_partitions(parts, pg.tp_world_size(), name)
    shards = {local_shape(shape, parts, rank) for rank in range(math.prod(count for _, count in parts))}
    if tuple(data.shape) not in shards:
        raise ShapeError(f"a damaged file: {list(data.shape)} is no shard of {list(shape)} in {spec}")
    return _CLASSES[name]._rebuild(data, requires_grad, state)


torch.serialization.add_safe_globals(
    [rebuild, ProcessGroup, _DistSpec, DistPlacementPattern, ComputeSpec, ComputePattern]
)
