"""ColoTensor: the local shard of a distributed tensor, with its global shape and layout."""

from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._foreach_utils import _foreach_supported_types

from tritoncomm.errors import ShapeError
from tritoncomm.reshard import reshard
from tritoncomm.tensor import dispatch, layout, optimizers, transforms
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.const import TensorType
from tritoncomm.tensor.dist_spec_mgr import DistSpecManager
from tritoncomm.tensor.distspec import (
    DistPlacementPattern,
    Parts,
    ReplicaSpec,
    _DistSpec,
    global_shape_of,
    local_shape,
    partitions,
)
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import check_partitions
from tritoncomm.tensor.resharding import exchange_between, layout_of
from tritoncomm.tensor.rules import gradients
from tritoncomm.tensor.tensor_spec import ColoTensorSpec

__all__ = ["ColoTensor"]


class ColoTensor(layout.LocalShard):
    """The local shard of a distributed tensor, with its global shape and layout.

    ``shape`` and ``numel()`` describe the local tensor, ``size()`` and ``numel_global()`` the global one. Every
    operator result carries its actual layout: element-wise operators keep it, operators without a rule gather first.

    Args:
        data: the local tensor, shared and not copied; None is an empty tensor.
        spec: process group and layout; None is a replica over ``ProcessGroup()``.
        global_shape: needed where a sharded dim does not divide evenly; otherwise shards are assumed to be equal.

    Attributes:
        global_shape: shape of the global tensor.
        partitions: (dim, number of shards) of every sharded dim, in the order of the spec; empty for a replica.

    Raises:
        ShapeError: the spec does not fit the tensor or the ranks.
    """

    _type = TensorType.NONMODEL
    has_initialized = True
    _parameter_class: ClassVar[Any]
    """``ColoParameter``, which its module sets."""
    _rebuilt_by: ClassVar[Any]
    """Function that files refer to: ``pickles.rebuild``, which that module sets."""

    def __new__(
        cls, data: Tensor | None, spec: ColoTensorSpec | None, global_shape: Sequence[int] | None = None
    ) -> "ColoTensor":
        return cls._make(data, data is not None and data.requires_grad, spec, global_shape)

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    @classmethod
    def _make(
        cls, data: Tensor | None, requires_grad: bool, spec: ColoTensorSpec | None, shape: Sequence[int] | None = None
    ) -> Any:
        """Make a tensor of this class over the memory of ``data``; reject a view, whose memory is a copy."""
        data = torch.empty(0) if data is None else data
        layout.refuse_sharing(cls.__name__, data)
        return torch.Tensor._make_subclass(cls, layout.plain(data), requires_grad)._set_up(spec, shape)

    def _set_up(self, spec: ColoTensorSpec | None, global_shape: Sequence[int] | None = None) -> "ColoTensor":
        """Set the layout of a spec; None is a replica over ``ProcessGroup()``."""
        self.has_initialized = spec is not None
        spec = ColoTensorSpec(ProcessGroup()) if spec is None else spec
        return self._set_layout(spec.pg, spec.dist_attr, spec.compute_attr, global_shape)

    def _set_layout(
        self, pg: ProcessGroup, dist_spec: _DistSpec, compute: ComputeSpec | None, shape: Sequence[int] | None
    ) -> "ColoTensor":
        """Set the attributes; the data already has this layout."""
        _watch_uses()
        local = tuple(layout.plain(self).shape)
        parts = partitions(dist_spec, len(local))
        if shape is None:
            shape = global_shape_of(local, parts)
        if parts:
            check_partitions(parts, pg.tp_world_size(), "ColoTensor")
            expected = local_shape(tuple(shape), parts, pg.tp_local_rank())
            if expected != local:
                raise ShapeError(f"ColoTensor: the local shard of {list(shape)} is {list(expected)}, not {list(local)}")
        return self._attach(pg, dist_spec, compute, shape, parts)

    def _attach(
        self, pg: ProcessGroup, dist_spec: _DistSpec, compute: ComputeSpec | None, shape: Sequence[int], parts: Parts
    ) -> "ColoTensor":
        """Set the layout, which has to match: nothing is checked."""
        self.process_group, self.dist_spec, self.compute_spec = pg, dist_spec, compute
        self.global_shape, self.partitions = tuple(shape), parts
        return self

    @staticmethod
    def _wrap(local: Tensor, pg: ProcessGroup, dist_spec: _DistSpec, shape: Sequence[int]) -> "ColoTensor":
        """Return a plain local tensor as a ColoTensor of this layout, which has to match: nothing is checked."""
        with torch._C.DisableTorchFunctionSubclass():
            result = local.as_subclass(ColoTensor)
        return result._attach(pg, dist_spec, None, shape, partitions(dist_spec, len(shape)))

    def _wrap_like(self, local: Tensor) -> "ColoTensor":
        """Return a plain tensor of this local shape as a ColoTensor of this layout; without a graph no view of it."""
        with torch._C.DisableTorchFunctionSubclass():
            result = local.as_subclass(ColoTensor) if local.requires_grad else Tensor._make_subclass(ColoTensor, local)
        return result._attach(self.process_group, self.dist_spec, None, self.global_shape, self.partitions)

    @staticmethod
    def from_torch_tensor(tensor: Tensor, spec: ColoTensorSpec | None = None) -> "ColoTensor":
        """Return a ColoTensor over the same memory, connected to the same autograd graph."""
        layout.refuse_sharing("from_torch_tensor", tensor)
        if isinstance(tensor, ColoTensor):
            tensor = layout.plain(tensor)
        return tensor.as_subclass(ColoTensor)._set_up(spec)

    @staticmethod
    def from_dtensor(tensor: Any) -> "ColoTensor":
        """Return a DTensor over all ranks of its mesh as a ColoTensor; shares its memory and propagates gradients.

        ``[Shard(0), Shard(1)]`` on 2 x 2 ranks is ``ShardSpec([0, 1], [2, 2])``.
        """
        # Imported here because torch.distributed.tensor takes longer to import than this package.
        from tritoncomm.tensor.dtensor import spec_of

        _watch_uses()
        spec = spec_of(tensor)
        return ColoTensor._wrap(tensor.to_local(), spec.pg, spec.dist_attr, tuple(tensor.shape))

    def to_dtensor(self) -> Any:
        """Return this tensor as a DTensor, without a copy; see ``dtensor.to_dtensor``."""
        # Imported here because torch.distributed.tensor takes longer to import than this package.
        from tritoncomm.tensor.dtensor import to_dtensor

        return to_dtensor(self)

    grad = property(  # pyright: ignore[reportAssignmentType, reportIncompatibleVariableOverride]
        gradients.gradient_of, gradients.set_gradient, gradients.delete_gradient,
        "The gradient, as a ColoTensor of this layout. A plain tensor that is set is a local gradient.",
    )  # fmt: skip

    @property
    def _is_param(self) -> bool:
        """Whether ``nn.Parameter(x)`` has made this tensor a parameter: a ColoParameter, unless it is a view."""
        # torch marks parameters of other classes by this name; a public one is missing (torch 2.11 to 2.15).
        return vars(self).get("is_marked", False)

    @_is_param.setter
    def _is_param(self, value: bool) -> None:  # pyright: ignore[reportIncompatibleVariableOverride]
        # ``nn.Parameter(x)`` sets this on its result, which becomes a ColoParameter by a change of its class: memory
        # and layout stay. A view keeps its class, and only notes the mark.
        if self._elsewhere:  # a shard of another rank's file: raises
            layout.refuse_sharing("nn.Parameter", self)
        if self._is_gathered:
            self.is_marked = value
        elif value and not isinstance(self, self._parameter_class):
            self.__class__ = self._parameter_class
            self.shared_param_modules = []

    def has_compute_spec(self) -> bool:
        """Whether a compute spec is set."""
        return self.compute_spec is not None

    def has_compute_pattern(self, compute_pattern: ComputePattern) -> bool:
        """Whether the compute spec has this pattern."""
        return self.compute_spec is not None and self.compute_spec.compute_pattern is compute_pattern

    def is_model_data(self) -> bool:
        """Whether this is a parameter."""
        return self._type is TensorType.MODEL

    def get_process_group(self) -> ProcessGroup:
        """Return the process group."""
        return self.process_group

    def set_process_group(self, pg: ProcessGroup) -> None:
        """Replace the process group without communication, which only a replica allows.

        Raises:
            AssertionError: not a process group, a shard, or a group with both a tensor and a data degree.
        """
        assert isinstance(pg, ProcessGroup), f"pg as type {type(pg)} is invalid"
        if self.process_group == pg:
            return
        assert self.get_tp_world_size() == 1 or self.get_dp_world_size() == 1, "use redistribute() to change the ranks"
        assert self.dist_spec.placement is DistPlacementPattern.REPLICATE, (
            "a shard cannot change its process group in place"
        )
        self.process_group = pg

    def get_tp_world_size(self) -> int:
        """Return the number of tensor-parallel ranks."""
        return self.process_group.tp_world_size()

    def get_dp_world_size(self) -> int:
        """Return the number of data-parallel ranks."""
        return self.process_group.dp_world_size()

    def set_dist_spec(self, dist_spec: _DistSpec) -> None:
        """Redistribute in place, without autograd, and the gradient with it; every rank has one, or none has.

        Raises:
            AssertionError: not a spec, or the tensor is the result of an operator.
        """
        assert isinstance(dist_spec, _DistSpec), f"{dist_spec!r} is not a dist spec"
        assert self.grad_fn is None, "Current tensor has grad_fn and it can't get converted"
        with DistSpecManager.no_grad(), torch.no_grad():
            local, gradient = self._redistributed(dist_spec, self.process_group), self.grad
            if isinstance(gradient, ColoTensor):
                gradient = gradient._redistributed(dist_spec, self.process_group)
        shape = self.global_shape
        with torch._C.DisableTorchFunctionSubclass():
            self.data = local
            self.grad = gradient  # after the data: torch requires their shapes to be equal
        self._set_layout(self.process_group, dist_spec, self.compute_spec, shape)

    def set_tensor_spec(self, dist_spec: _DistSpec | None, compute_spec: ComputeSpec | None) -> None:
        """Set the dist spec and the compute spec; None leaves one as it is."""
        if dist_spec is not None:
            self.set_dist_spec(dist_spec)
        if compute_spec is not None:
            self.compute_spec = compute_spec

    def _redistributed(self, dist_spec: _DistSpec, pg: ProcessGroup) -> Tensor:
        """Return the local tensor under another layout, as a plain tensor."""
        local, spec, shape = layout.plain(self), self.dist_spec, self.global_shape
        if pg is not self.process_group and pg != self.process_group:
            exchange = exchange_between(spec, self.process_group, dist_spec, pg, shape)
            # Shards over both process groups take one exchange, over the ranks of the larger one. Others become
            # replicas over the old group first, and are redistributed over the new one.
            if exchange is not None:
                larger, source, target = exchange
                return reshard(local, source, target, group=larger.tp_process_group())
            local = DistSpecManager.handle_trans_spec(local, spec, ReplicaSpec(), self.process_group, shape)
            spec = ReplicaSpec()
        return DistSpecManager.handle_trans_spec(local, spec, dist_spec, pg, shape)

    def redistribute(self, dist_spec: _DistSpec, pg: ProcessGroup | None = None) -> "ColoTensor":
        """Return a new tensor with another layout, and over another process group if one is given; differentiable.

        Forward: the collective of the case table in ``redistribute``; from shards over one process group to shards over
        another, one all-to-all-v. Backward: the adjoint. Nothing is summed.
        """
        pg = self.process_group if pg is None else pg
        return self._wrap(self._redistributed(dist_spec, pg), pg, dist_spec, self.global_shape)

    def reshard_layout(self) -> Any:
        """Return the layout as ``reshard`` takes it."""
        return layout_of(self.process_group, self.dist_spec, self.global_shape)

    def reshard_local(self) -> Tensor:
        """Return the local tensor as a plain tensor, connected to the same autograd graph."""
        return layout.plain(self)

    def to_replicate_(self) -> None:
        """Redistribute to a replica, in place."""
        self.set_dist_spec(ReplicaSpec())

    def to_replicate(self) -> "ColoTensor":
        """Return a replica of the global tensor; differentiable."""
        return self.redistribute(ReplicaSpec())

    def size_local(self, *args: int) -> Any:
        """Return the shape of the local tensor, or the size of one dim."""
        return layout.plain(self).size(*args)

    def size_global(self, *args: int) -> Any:
        """Return the global shape, or the global size of one dim."""
        return self.global_shape[args[0]] if args else torch.Size(self.global_shape)

    def numel_global(self) -> int:
        """Return the number of elements of the global tensor."""
        return torch.Size(self.global_shape).numel()

    def is_replicate(self) -> bool:
        """Whether every rank holds the global tensor."""
        return not partitions(self.dist_spec, len(self.global_shape)) or self.get_tp_world_size() == 1

    def is_shard_1dcol(self) -> bool:
        """Whether the spec is ``Shard(-1)``, in this notation."""
        return self.is_sharded() and self.dist_spec.dims == (-1,)

    def is_shard_1drow(self) -> bool:
        """Whether the spec is ``Shard(0)``."""
        return self.is_sharded() and self.dist_spec.dims == (0,)

    def is_sharded(self) -> bool:
        """Whether the placement is SHARD."""
        return self.dist_spec.placement is DistPlacementPattern.SHARD

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return a copy, as torch does: of a tensor with its gradient and attributes, of a parameter without them."""
        if id(self) in memo:
            return memo[id(self)]
        if not self.is_leaf:
            with torch._C.DisableTorchFunctionSubclass():  # torch raises its own error for non-leaf tensors
                return torch.Tensor.__deepcopy__(self, memo)
        with torch.no_grad():
            data = layout.plain(self).clone()
        pg, dist_spec, compute_spec, *rest = self._state()
        state = (pg, dist_spec, deepcopy(compute_spec, memo), *rest)
        memo[id(self)] = copy = type(self)._rebuild(data, self.requires_grad, state)
        if not isinstance(self, torch.nn.Parameter):
            more = {name: value for name, value in vars(self).items() if name not in vars(copy)}
            vars(copy).update(deepcopy(more, memo))
            copy.grad = deepcopy(self.grad, memo)
        return copy

    def _state(self) -> tuple[Any, ...]:
        """Everything but the values, as objects that ``torch.load`` accepts by default."""
        return self.process_group, self.dist_spec, self.compute_spec, self.global_shape, self.has_initialized

    @classmethod
    def _rebuild(cls, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> "ColoTensor":
        """Make a tensor of this class from its local data and ``_state()``, which has to match: nothing is checked."""
        _watch_uses()
        pg, dist_spec, compute_spec, shape, initialized = state
        tensor: ColoTensor = torch.Tensor._make_subclass(cls, data, requires_grad)
        tensor.has_initialized = initialized
        return tensor._attach(pg, dist_spec, compute_spec, shape, partitions(dist_spec, len(shape)))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the local data, the layout and the coordinate of the shard, for ``rebuild``."""
        with torch.no_grad():
            data = layout.plain(self).detach()
        return ColoTensor._rebuilt_by, (
            type(self).__name__,
            data,
            self.requires_grad,
            (*self._state(), self._coordinate()),
        )

    def _coordinate(self) -> tuple[int, int]:
        """Return the number of this shard, and the number of shards."""
        return (self.process_group.tp_local_rank(), self.process_group.tp_world_size()) if self.partitions else (0, 1)

    def __create_write_items__(self, fqn: str, _: Any) -> Any:
        # Imported here because torch.distributed.checkpoint doubles the import time.
        from tritoncomm.tensor.checkpoint import write_items

        return write_items(self, fqn)

    def __create_chunk_list__(self) -> Any:
        # Imported here because torch.distributed.checkpoint doubles the import time.
        from tritoncomm.tensor.checkpoint import chunks

        return chunks(self)

    def __get_tensor_shard__(self, index: Any) -> Tensor:
        # Imported here because torch.distributed.checkpoint doubles the import time.
        from tritoncomm.tensor.checkpoint import shard_at

        return shard_at(self, index)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        local = layout.plain(self)
        if self.requires_grad and self.is_leaf:
            local = local.detach().requires_grad_()  # printed as a leaf, not as an alias of one
        fields = [repr(local), repr(self.process_group), repr(self.dist_spec)]
        if self.compute_spec is not None:
            fields.append(repr(self.compute_spec))
        if self.is_sharded():
            fields.append(f"global size {list(self.size_global())}, local size {list(local.shape)}")
        return "ColoTensor: " + "\n".join(fields)

    def __format__(self, format_spec: str) -> str:
        """Return a 0-dim tensor as its number, as torch does; any other as its ``repr``."""
        return format(layout.plain(self), format_spec) if self.dim() == 0 else object.__format__(self, format_spec)

    def set_(self, *_: Any, **__: Any) -> Any:
        """Raise: torch does not dispatch this method through ``__torch_function__``.

        Raises:
            UnsupportedError: always.
        """
        return dispatch.run(torch.Tensor.set_, (self,), {})

    _run: Any = staticmethod(dispatch.run)

    @classmethod
    def _runner(cls, types: Sequence[type]) -> Any:
        """Return the function that runs operators on these classes; None if a class is unrelated to ColoTensor."""
        if not all(issubclass(cls, t) or issubclass(t, ColoTensor) for t in types):
            return None
        # Views, and shards of other ranks' files, run operators in a way of their own, also beside plain ColoTensors.
        special = [t._run for t in types if issubclass(t, ColoTensor) and t._run is not ColoTensor._run]
        return special[0] if special else ColoTensor._run

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        run = _runners.get((cls, types), _unknown)
        if run is _unknown:
            run = _runners[cls, types] = cls._runner(types)
        return NotImplemented if run is None else run(func, args, kwargs or {})


@cache
def _watch_uses() -> None:
    """Check, from the first ColoTensor on, what takes a shard for a full tensor without asking its class."""
    optimizers.watch()
    transforms.watch()


ColoTensorSpec._wrap = staticmethod(ColoTensor._wrap)

# torch.nn.utils clips by one all-gather per process group where its foreach form takes the class, by one per shard
# otherwise. No public name says so; DTensor adds itself to the same list (torch 2.11 to 2.13).
_foreach_supported_types.append(ColoTensor)

_unknown: Any = object()  # None is an entry of its own: a class that is unrelated to ColoTensor
_runners: dict[tuple[type, Any], Any] = {}
