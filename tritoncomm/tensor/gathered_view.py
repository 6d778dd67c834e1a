"""Gathered view: a view along a sharded dim, made of a gathered copy, whose in-place writes go to the shard.

An operator for which torch returns a view runs on a gathered copy if the dim is sharded. Each result that shares the
copy's storage is such a view, and its strides determine the elements of the shard that it shows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.core.memory import version_of
from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import dispatch
from tritoncomm.tensor.box import Box, Slices, box_of, refuse_graph, write_shard
from tritoncomm.tensor.colo_tensor import ColoTensor
from tritoncomm.tensor.distspec import ReplicaSpec, _DistSpec, partitions
from tritoncomm.tensor.elementwise import ELEMENTWISE, KEEPS_LAYOUT, QUERIES, RESHAPES_IN_PLACE, writes
from tritoncomm.tensor.layout import LocalShard, is_colo, is_view, plain, refuse_sharing, shares_storage
from tritoncomm.tensor.op_wrapper import implementation
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.rules.engine import replicated
from tritoncomm.tensor.rules.indexing import set_by_mask, without_leading_ones
from tritoncomm.tensor.rules.random_ops import INITIALISERS, SAMPLERS

__all__ = ["ShardView", "of_gathered", "run"]

Args = Sequence[Any]
Kwargs = dict[str, Any]
Sources = Sequence[tuple[Tensor, "Snapshot"]]

_NAMES = """
    __getitem__ select narrow split split_with_sizes chunk unbind tensor_split hsplit vsplit dsplit view view_as
    unflatten squeeze unsqueeze transpose swapaxes swapdims t adjoint permute movedim moveaxis expand expand_as
    broadcast_to diagonal alias detach
"""
_GETTERS = [getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data")]
_VIEWS = frozenset(
    [getattr(owner, name) for name in _NAMES.split() for owner in (Tensor, torch) if hasattr(owner, name)] + _GETTERS
)
"""Operators that return views for any strides; ``reshape`` and others copy depending on the strides."""

_REAL, _IMAG = (getattr(Tensor, name).__get__ for name in ("real", "imag"))  # torch dispatches only the getters

_ALIASES = frozenset(["conj", "positive", "real", "__pos__"])
_STATISTICS = {
    F.batch_norm: slice(1, 3), F.instance_norm: slice(1, 3), torch.batch_norm: slice(3, 5),
    torch.instance_norm: slice(3, 5), torch.native_batch_norm: slice(3, 5),
}  # fmt: skip
"""Positions of the running statistics, which these operators update without a version bump."""


@dataclass(frozen=True, slots=True, eq=False)
class Snapshot:
    """Shard of which a copy was gathered.

    Attributes:
        memory: the local tensor of ``base``, detached.
        parts: as they were when the copy was gathered.
        offset: storage offset of the copy.
        exact: whether torch would return a view for any strides, and the copy is contiguous.
    """

    base: ColoTensor
    memory: Tensor
    parts: tuple[tuple[int, int], ...]
    offset: int
    exact: bool

    def box(self, view: Tensor, name: str) -> Box | None:
        """Return the elements of the base that ``view`` shows, None for none; reject a view that has no box."""
        if not shares_storage(plain(self.base), self.memory) or self.base.partitions != self.parts:
            raise UnsupportedError(f"{name}: the shard that this is a view of has other memory now; index it again")
        # A view of another dtype, or with lazy bits, does not show the elements as the shard has them.
        same = view.dtype == self.memory.dtype and not view.is_conj() and not view.is_neg()
        box = box_of(self.base.global_shape, view, self.offset) if self.exact and same else None
        if box is None and view.numel():
            raise UnsupportedError(
                f"{name}: this may be a view of {self.base.dist_spec} by more than integers and slices of its dims, "
                "and then no write can be mapped to the shard; clone() it, or write by index"
            )
        return box


def of_gathered(result: Any, gathered: Sequence[tuple[Any, Tensor]], func: Callable[..., Any]) -> Any:
    """Return the result of ``func`` on gathered shards; tensors that share memory with a copy become views.

    Args:
        gathered: pairs of a sharded ColoTensor and its gathered copy, which was passed to ``func``.
    """
    results = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
    sources = [
        (copy, Snapshot(base, plain(base).detach(), base.partitions, int(copy.storage_offset()), copy.is_contiguous()))
        for base, copy in gathered
        if any(shares_storage(x, copy) for x in results)
    ]
    return track(result, sources, func) if sources or _is_array(result) else result


def track(result: Any, sources: Sources, func: Callable[..., Any]) -> Any:
    """Return the result of ``func``, in which every tensor that shares memory with a source becomes a ``ShardView``."""

    def tracked(x: Any) -> Any:
        if not isinstance(x, Tensor) or is_view(x):
            return x
        for copy, snapshot in sources:
            if shares_storage(x, copy):
                # Operators outside of ``_VIEWS``, as reshape, may view the gathered copy where they would copy the
                # shards: a write into such a result is refused, which ``exact`` decides.
                return _as_view(x, replace(snapshot, exact=snapshot.exact and func in _VIEWS))
        return x

    if _is_array(result):
        if not result.flags.owndata:
            result.setflags(write=False)  # writes to an array over a gathered copy would not reach the shard
        return result
    return tracked(result) if isinstance(result, Tensor) else tree_map(tracked, result)


def _is_array(x: Any) -> bool:
    return type(x).__module__ == "numpy" and hasattr(x, "setflags")


def _as_view(x: Tensor, snapshot: Snapshot) -> Any:
    """Return a tensor as a ``ShardView`` of the snapshot's shard: the same memory and attributes, another class."""
    like: Any = x if is_colo(x) else snapshot.base._wrap(x, snapshot.base.process_group, ReplicaSpec(), x.shape)
    with torch._C.DisableTorchFunctionSubclass():
        view = like.as_subclass(ShardView)
    vars(view).update(vars(like))
    view._snapshot = snapshot
    return view


def run(func: Callable[..., Any], args: Args, kwargs: Kwargs) -> Any:
    """Run ``func(*args, **kwargs)`` with views of sharded dims among the arguments."""
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
    """Return the arguments that an operator writes into."""
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
    # ``_written`` knows the names of operators that write. The versions reveal a write of any other operator, which has
    # reached the gathered copy only.
    if [_version(x) for x in views] != before:
        raise UnsupportedError(f"{name} wrote into a view of a sharded dim instead of the shard; pass a clone()")
    return track(result, [(x, x._snapshot) for x in views], func)


def _version(x: Tensor) -> int:
    """Return the number of writes that torch has counted on a tensor; inference tensors have none."""
    with torch._C.DisableTorchFunctionSubclass():
        return version_of(x)


def _attribute(func: Any, args: Args) -> Any:
    """Read an attribute of a view: ``_base`` is the ColoTensor, and tensors over the view's memory are views too."""
    view = args[0]
    if func.__self__ is Tensor._base:
        return view._snapshot.base
    value = dispatch.run(func, args, {})
    return track(value, [(view, view._snapshot)], func) if isinstance(value, Tensor) else value


def _assign(func: Any, args: Args) -> Any:
    """Reject ``x.data = value``, which would detach the view from its shard; set other attributes."""
    if func.__self__ is Tensor.data:
        refuse_sharing("data =", args[0])
    return dispatch.run(func, args, {})


def _write(target: Any, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """Run a write into ``target`` on the view's memory and on the shard."""
    if name == "__setitem__":
        return _set_item(*args)
    if name in RESHAPES_IN_PLACE:
        return dispatch.run(func, args, kwargs)
    drawn = func in INITIALISERS or name in SAMPLERS
    mapped = name in ELEMENTWISE and not isinstance(func, OpOverload | OpOverloadPacket)
    if not (drawn or mapped) or kwargs.get("out") is not None:
        raise UnsupportedError(f"{name} cannot write into a view of a sharded dim; use a clone(), or copy_()")
    # ``torch.nn.init`` writes without grad mode.
    if func not in INITIALISERS:
        refuse_graph(name, [target._snapshot.base, *tree_leaves((args, kwargs))])
    return _draw(target, func, name, args, kwargs) if drawn else _map(target, func, name, args, kwargs)


def _draw(target: Any, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """Draw a random or constant fill as for a replica, then copy it to the shard."""
    snapshot = target._snapshot
    box = snapshot.box(target, name)
    result = dispatch.run(func, args, kwargs)
    values = plain(target).detach()
    _into_shard(name, snapshot, box, lambda region, slices: region.copy_(values[slices]))
    return result


def _map(target: Any, func: Callable[..., Any], name: str, args: Args, kwargs: Kwargs) -> Any:
    """Apply an in-place element-wise operator to the view's memory, and to the elements of the shard that it shows."""
    snapshot = target._snapshot
    box, shape = snapshot.box(target, name), target.shape
    args, kwargs = tree_map(lambda x: _operand(x, target), (tuple(args), kwargs))
    operands = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor) and x is not target]
    # An operand may broadcast against the view but not against the part of it in the shard, so it is expanded before
    # the slices are taken. Numbers broadcast to any part.
    wide = {id(x): x.broadcast_to(shape) for x in operands if x.dim()}

    def on(memory: Tensor, slices: Slices | None = None) -> None:
        def operand(x: Any) -> Any:
            if x is target:
                return memory
            return wide[id(x)][slices] if slices is not None and id(x) in wide else x

        positional, keywords = tree_map(operand, (args, kwargs))
        func(*positional, **keywords)

    # The operator runs twice, on the copy and on the shard. It is element-wise, so both show the same values
    # afterwards.
    with torch.no_grad():
        on(plain(target).detach())
    _into_shard(name, snapshot, box, on)
    return target


def _into_shard(name: str, snapshot: Snapshot, box: Any, write: Callable[[Tensor, Slices], Any]) -> None:
    """Call ``write(region, slices)`` with the part of a box in this rank's shard, and its slices of the view."""
    base = snapshot.base
    write_shard(name, snapshot.memory, base.global_shape, snapshot.parts, base.process_group, box, write)


def _operand(x: Any, target: Any) -> Any:
    """Return ``target`` as it is, and another operand as a plain global tensor without memory of ``target``."""
    if x is target or not is_colo(x):
        return x
    values = replicated(x, x.process_group)
    return values.clone() if shares_storage(values, target) else values


def _set_item(target: Any, index: Any, value: Any) -> None:
    """Run ``target[index] = value`` as a write into the view ``target[index]``, or by ``masked_fill_``."""
    if set_by_mask(target, index, value):
        return
    part = target[index]
    if not is_view(part):
        raise UnsupportedError(f"{index!r} has no rule for writing into a view of a sharded dim; clone() it first")
    # Both methods come back to ``run`` with the view ``part``, and write into the shard as well.
    if isinstance(value, Tensor):
        part.copy_(without_leading_ones(value, part.dim()))
    else:
        part.fill_(value)


class ShardView(ColoTensor):
    """View of a sharded dim: a replica of the elements as they were when it was made.

    Element-wise in-place operators with numbers and replicas, ``copy_``, random fills and assignments by integers and
    slices write into the shard as well; other writes raise. Later writes to the shard are not visible in the view.
    """

    _snapshot: Snapshot
    _is_gathered: ClassVar[bool] = True
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
        """Accept only a replica."""
        assert isinstance(dist_spec, _DistSpec), f"{dist_spec!r} is not a dist spec"
        if partitions(dist_spec, self.dim()):
            refuse_sharing("set_dist_spec", self)

    def redistribute(self, dist_spec: _DistSpec, pg: ProcessGroup | None = None) -> ColoTensor:
        """Redistribute as any ColoTensor; a replica remains a view."""
        # ``Tensor.detach`` stands for any operator of ``_VIEWS``: its result stays writable.
        return track(super().redistribute(dist_spec, pg), [(self, self._snapshot)], Tensor.detach)

    def to_dtensor(self) -> Any:
        """Raise: the memory of a view is a copy."""
        refuse_sharing("to_dtensor", self)

    def __copy__(self) -> Any:
        return self.detach().requires_grad_(self.requires_grad)

    @classmethod
    def _rebuild(cls, data: Tensor, requires_grad: bool, state: tuple[Any, ...]) -> ColoTensor:
        # A copy or a loaded file of a view has no shard behind it: it is a replica.
        return ColoTensor._rebuild(data, requires_grad, state)

    def __reduce_ex__(self, protocol: Any) -> Any:
        rebuild, (_, *state) = super().__reduce_ex__(protocol)
        return rebuild, (ColoTensor.__name__, *state)


LocalShard._with_views = staticmethod(of_gathered)
