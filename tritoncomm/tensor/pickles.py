"""Pickles of ColoTensors, which ``torch.load`` accepts with its default arguments; files refer to ``rebuild``.

A file has the coordinate of its shard. On a rank that holds another one it loads as a ``LoadedShard``.
"""

import math
import reprlib
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm.errors import ArgumentError, MismatchError, ShapeError
from tritoncomm.tensor import dispatch
from tritoncomm.tensor.colo_parameter import ColoParameter
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.distspec import DistPlacementPattern, _DistSpec, check_spec, local_shape
from tritoncomm.tensor.elementwise import KEEPS_LAYOUT, QUERIES
from tritoncomm.tensor.group_registry import lookup
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import check_partitions

__all__ = ["LoadedShard", "rebuild"]

_REMEDY = "Use a file per rank, load_full_state_dict (of tensor.utils) or a distributed checkpoint"
_ASKS = QUERIES | {"__get__", "__len__", "size"}
_warned: set[str] = set()


def _refuse(self: Any, *_: Any, **__: Any) -> NoReturn:
    """Raise, in place of a method that would take this shard for the rank's own."""
    raise MismatchError(self._elsewhere)


class LoadedShard(ColoTensor):
    """Shard of another rank's file: it can be copied, cast, asked and saved again; anything else raises.

    Attributes:
        coordinate: number of the shard, and number of shards.
        saved_as: name of its class in the file.
    """

    coordinate: tuple[int, int]
    saved_as: str

    @staticmethod
    def _run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Run a query, a copy or a cast of a loaded shard; raise for any other operator."""
        name, first = getattr(func, "__name__", ""), args[0] if args else None
        if isinstance(first, LoadedShard) and (name in _ASKS or name in KEEPS_LAYOUT):
            result = dispatch.run(func, args, kwargs)
            return first._moved_to(result) if name in KEEPS_LAYOUT and isinstance(result, ColoTensor) else result
        shard = next((x for x in dispatch.colo_tensors(args, kwargs) if isinstance(x, LoadedShard)), first)
        raise MismatchError(f"{name}: {getattr(shard, '_elsewhere', '')}")

    def _moved_to(self, copy: Any) -> "LoadedShard":
        """Make ``copy``, a ColoTensor of this shard's values, a LoadedShard too."""
        copy.__class__ = LoadedShard
        copy.coordinate, copy.saved_as, copy._elsewhere = self.coordinate, self.saved_as, self._elsewhere
        return copy

    def _coordinate(self) -> tuple[int, int]:
        return self.coordinate

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = self.clone().detach().requires_grad_(self.requires_grad)
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        function, (_, *rest) = super().__reduce_ex__(protocol)
        return function, (self.saved_as, *rest)

    redistribute = set_dist_spec = to_dtensor = reshard_layout = _redistributed = _refuse
    __create_write_items__ = __create_chunk_list__ = __get_tensor_shard__ = _refuse


def rebuild(name: str, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> ColoTensor:
    """Make a tensor from its local data and layout; the process group is looked up on first use."""
    # By position in ``state``: process group, placement, compute spec, global shape, ``has_initialized``; files of
    # later versions add the coordinate. ``torch.load`` calls this with any file's arguments, so nothing is trusted.
    kinds = (ProcessGroup, _DistSpec, ComputeSpec | None, tuple, bool)
    if not (
        isinstance(name, str)
        and name in _CLASSES
        and isinstance(data, Tensor)
        and type(requires_grad) is bool
        and isinstance(state, tuple)
        and len(state) in (len(kinds), len(kinds) + 1)
        and all(map(isinstance, state, kinds))
        and all(type(size) is int and size >= 0 for size in state[3])
    ):
        raise ArgumentError(f"a damaged file: this is no {reprlib.repr(name)}, {reprlib.repr(state)}")
    if requires_grad and not (data.is_floating_point() or data.is_complex()):
        raise ArgumentError(f"a damaged file: {name} of {data.dtype} requires grad")
    pg, spec, _, shape, _ = state[: len(kinds)]
    parts = check_spec(spec, len(shape))
    count = math.prod(count for _, count in parts)
    if pg.is_init:
        check_partitions(parts, pg.tp_world_size(), name)
    shards = [local_shape(shape, parts, rank) for rank in range(count)]
    coordinate = _checked_coordinate(state[len(kinds) :], parts, count)
    if tuple(data.shape) not in (shards if coordinate is None else [shards[coordinate[0]]]):
        raise ShapeError(f"a damaged file: {list(data.shape)} is no shard of {list(shape)} in {spec}")
    tensor = _CLASSES[name]._rebuild(data, requires_grad, state[: len(kinds)])
    if coordinate is not None and parts and (elsewhere := _elsewhere(pg, coordinate, shape)):
        # The text is not empty: this rank holds another shard. The change of class makes operators on it raise;
        # ``saved_as`` keeps the saved class for the next file.
        tensor.__class__ = LoadedShard
        tensor.coordinate, tensor.saved_as, tensor._elsewhere = coordinate, name, elsewhere
    return tensor


def _checked_coordinate(rest: tuple[Any, ...], parts: Any, count: int) -> tuple[int, int] | None:
    """Return the coordinate in a file's state, or None with a warning for a file from before there was one."""
    if not rest:
        if parts:
            _warn_once("this file does not say whose shards it has: load it on the rank that saved it")
        return None
    (coordinate,) = rest
    is_pair = isinstance(coordinate, tuple) and len(coordinate) == 2 and all(type(each) is int for each in coordinate)
    if not is_pair or coordinate[1] != count or not 0 <= coordinate[0] < count:
        raise ArgumentError(f"a damaged file: {reprlib.repr(coordinate)} is no shard of {count}")
    return coordinate


def _elsewhere(pg: ProcessGroup, coordinate: tuple[int, int], shape: tuple[int, ...]) -> str:
    """Describe why a shard is not this rank's own; empty if it is, or if the ranks are unknown yet."""
    if not pg.is_init:
        return ""
    index, count = coordinate
    what, ranks = f"shard {index} of {count} of a tensor {list(shape)}, from another rank's file", pg.tp_rank_list()
    world = list(range(dist.get_world_size()))
    # The group of the file may be all ranks of this job, or some of them, which have a group here. Else it is another
    # job's.
    if pg.ranks_in_group() != world and (ranks is None or lookup(dist.get_backend(), tuple(ranks)) is None):
        saved = pg.ranks_in_group()
        whose = f"{len(saved)} ranks" if len(saved) != len(world) else f"ranks {reprlib.repr(saved)}"
        job = len(world) if len(saved) != len(world) else f"0 to {len(world) - 1}"
        _warn_once(f"this file is of {whose}, and the job has {job}. {_REMEDY}")
        return f"{what} and another number of ranks. {_REMEDY}"
    own = pg.tp_local_rank()
    return "" if own == index else f"{what}; this rank holds shard {own}. {_REMEDY}"


def _warn_once(text: str) -> None:
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, stacklevel=4)


_CLASSES: dict[str, Any] = {"ColoTensor": ColoTensor, "ColoParameter": ColoParameter}
ColoTensor._rebuilt_by = staticmethod(rebuild)

torch.serialization.add_safe_globals(
    [rebuild, ProcessGroup, _DistSpec, DistPlacementPattern, ComputeSpec, ComputePattern]
)
