"""Views along sharded dims: gathered values, whose in-place writes go to the shard."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import dispatch
from tritoncomm.tensor.box import Slices
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.elementwise import ELEMENTWISE, KEEPS_LAYOUT, QUERIES, RESHAPES_IN_PLACE, writes
from tritoncomm.tensor.layout import is_colo, plain, shares_storage
from tritoncomm.tensor.op_wrapper import implementation
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.rules.engine import replicated
from tritoncomm.tensor.rules.indexing import set_by_mask, without_leading_ones
from tritoncomm.tensor.rules.random_ops import INITIALISERS, SAMPLERS
from tritoncomm.tensor.snapshot import (
    Snapshot,
    is_view,
    refuse_graph,
    refuse_sharing,
    register_view,
    track,
    write_shard,
)

__all__ = ["ShardView", "run"]

Args = Sequence[Any]
_REAL, _IMAG = (getattr(Tensor, name).__get__ for name in ("real", "imag"))  # torch dispatches only the getters
Kwargs = dict[str, Any]

_ALIASES = frozenset(["conj", "positive", "real", "__pos__"])
_STATISTICS = {
    F.batch_norm: slice(1, 3), F.instance_norm: slice(1, 3), torch.batch_norm: slice(3, 5),
    torch.instance_norm: slice(3, 5), torch.native_batch_norm: slice(3, 5),
}  # fmt: skip
"""Positions of the running statistics, which these update without a version bump."""


def run(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """``func(*args, **kwargs)`` with views of sharded dims among the arguments.

    Raises:
        UnsupportedError: it would write into such a view, and the write cannot be mapped to the shard.
    """
    name = getattr(func, "__name__", str(func)).partition(".")[0]
    if implementation(func) is not None:
        return dispatch.run(func, args, kwargs)
    if name == "__set__":
        return _assign(func, args)
    if name == "__get__":
        return _attribute(func, args)
    views = [x for x in tree_leaves(_written(func, name, args, kwargs)) if is_view(x)]
    if views:
        return _write(views[0], func, name, args, kwargs)
    return _read(func, name, args, kwargs)


def _written(func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """The arguments that an operator writes into."""
    if name.startswith("_fused_"):
        return args, kwargs
    if func in _STATISTICS:
        return args[_STATISTICS[func]], kwargs.get("running_mean"), kwargs.get("running_var")
    first = args[0] if args else next(iter(kwargs.values()), None)
    writes_first = name == "__setitem__" or (writes(name) and name not in QUERIES and name not in KEEPS_LAYOUT)
    return [first if writes_first or kwargs.get("inplace") else None, kwargs.get("out")]


def _read(func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """Run an operator that does not write into a view; results that share memory with one become views as well."""
    if name in QUERIES or (name in ELEMENTWISE and name not in _ALIASES):
        return dispatch.run(func, args, kwargs)
    views = [x for x in tree_leaves((args, kwargs)) if is_view(x)]
    before = [_version(x) for x in views]
    result = dispatch.run(func, args, kwargs)
    if [_version(x) for x in views] != before:
        raise UnsupportedError(f"{name} wrote into a view of a sharded dim instead of the shard; pass a clone()")
    return track(result, [(x, x._snapshot) for x in views], func)


def _version(x: Tensor) -> int:
    with torch._C.DisableTorchFunctionSubclass():
        return 0 if x.is_inference() else x._version


def _attribute(func: Any, args: Args) -> Any:
    view = args[0]
    if func.__self__ is Tensor._base:
        return view._snapshot.base
    value = dispatch.run(func, args, {})
    return track(value, [(view, view._snapshot)], func) if isinstance(value, Tensor) else value


def _assign(func: Any, args: Args) -> Any:
    """Refuse ``x.data = value``, which would detach the view from its shard; other attributes are set."""
    if func.__self__ is Tensor.data:
        refuse_sharing("data =", args[0])
    return dispatch.run(func, args, {})


def _write(target: Any, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """A write into ``target``, carried out on the shard."""
    if name == "__setitem__":
        return _set_item(*args)
    if name in RESHAPES_IN_PLACE:
        return dispatch.run(func, args, kwargs)
    drawn = func in INITIALISERS or name in SAMPLERS
    mapped = name in ELEMENTWISE and not isinstance(func, OpOverload | OpOverloadPacket)
    if not (drawn or mapped) or kwargs.get("out") is not None:
        raise UnsupportedError(f"{name} cannot write into a view of a sharded dim; use a clone(), or copy_()")
    if func not in INITIALISERS:
        refuse_graph(name, [target._snapshot.base, *tree_leaves((args, kwargs))])
    return _draw(target, func, name, args, kwargs) if drawn else _map(target, func, name, args, kwargs)


def _draw(target: Any, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """A random or constant fill: drawn as for a replica, then copied to the shard."""
    snapshot = target._snapshot
    box = snapshot.box(target, name)
    result = dispatch.run(func, args, kwargs)
    values = plain(target).detach()
    _into_shard(name, snapshot, box, lambda region, slices: region.copy_(values[slices]))
    return result


def _map(target: Any, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """An in-place element-wise operator, applied to the view's memory and to the elements of the shard it shows."""
    snapshot = target._snapshot
    box, shape = snapshot.box(target, name), target.shape
    args, kwargs = tree_map(lambda x: _operand(x, target), (tuple(args), kwargs))
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not target]
    wide = {id(x): x.broadcast_to(shape) for x in operands if x.dim()}

    def on(memory: Tensor, slices: Slices | None = None) -> None:
        def operand(x: Any) -> Any:
            if x is target:
                return memory
            return wide[id(x)][slices] if slices is not None and id(x) in wide else x

        given, named = tree_map(operand, (args, kwargs))
        func(*given, **named)

    with torch.no_grad():
        on(plain(target).detach())
    _into_shard(name, snapshot, box, on)
    return target


def _into_shard(name: str, snapshot: Snapshot, box: Any, write: Callable[[Tensor, Slices], Any]) -> None:
    base = snapshot.base
    write_shard(name, snapshot.memory, base.global_shape, snapshot.parts, base.process_group, box, write)


def _operand(x: Any, target: Any) -> Any:
    """An operand of a write as a plain global tensor that does not share memory with ``target``."""
    if x is target or not is_colo(x):
        return x
    values = replicated(x, x.process_group)
    return values.clone() if shares_storage(values, target) else values


def _set_item(target: Any, index: Any, value: Any) -> None:
    """``target[index] = value`` as a write into the view ``target[index]``, or by ``masked_fill_``."""
    if set_by_mask(target, index, value):
        return
    part = target[index]
    if not is_view(part):
        raise UnsupportedError(f"{index!r} has no rule for writing into a view of a sharded dim; clone() it first")
    if isinstance(value, Tensor):
        part.copy_(without_leading_ones(value, part.dim()))
    else:
        part.fill_(value)


@register_view
class ShardView(ColoTensor):
    """A view of a sharded dim: a replica of its elements at the time it was made.

    Element-wise in-place operators with numbers and replicas, ``copy_``, random fills and assignments by integers and
    slices write into the shard as well; other writes raise ``UnsupportedError``. Later writes to the shard are not
    visible in the view.
    """

    _snapshot: Snapshot
    _run = staticmethod(run)

    @property
    def real(self) -> Any:  # type: ignore[override]
        """The real part, which is read-only."""
        return run(_REAL, (self,), {})

    @property
    def imag(self) -> Any:  # type: ignore[override]
        """The imaginary part, which is read-only."""
        return run(_IMAG, (self,), {})

    def set_dist_spec(self, dist_spec: _DistSpec) -> None:
        """Accept only a replica.

        Raises:
            UnsupportedError: the layout is sharded.
        """
        assert isinstance(dist_spec, _DistSpec), f"{dist_spec!r} is not a dist spec"
        if partitions(dist_spec, self.dim()):
            refuse_sharing("set_dist_spec", self)

    def redistribute(self, dist_spec: _DistSpec, pg: ProcessGroup | None = None) -> ColoTensor:
        """As for any ColoTensor; a replica remains a view."""
        return track(super().redistribute(dist_spec, pg), [(self, self._snapshot)], Tensor.detach)

    def to_dtensor(self) -> Any:
        """Refused: the memory of a view is a copy.

        Raises:
            UnsupportedError: always.
        """
        refuse_sharing("to_dtensor", self)

    def __copy__(self) -> Any:
        return self.detach().requires_grad_(self.requires_grad)

    @classmethod
    def _rebuild(cls, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> ColoTensor:
        return ColoTensor._rebuild(data, requires_grad, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, (_, *state) = super().__reduce_ex__(protocol)
        return rebuild, (ColoTensor.__name__, *state)
