"""Dispatch of torch operators on ColoTensors.

In this order: an implementation registered with ``op_wrapper.colo_op_impl``; attributes and queries of the local
tensor; operators with code of their own, as initialisers and lists; element-wise operators; the sharding rules of
``rules``; everything else runs on replicas, with a warning once.
A result never carries a layout that it does not have.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.distributed import distributed_c10d
from torch.utils._pytree import tree_map

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import rules as rules
from tritoncomm.tensor.distspec import ReplicaSpec
from tritoncomm.tensor.elementwise import ELEMENTWISE, KEEPS_LAYOUT, MAKES_NEW, QUERIES, RESHAPES_IN_PLACE, writes
from tritoncomm.tensor.layout import LocalShard, is_colo, plain, refuse_sharing
from tritoncomm.tensor.op_wrapper import implementation, own_impl, own_implementation
from tritoncomm.tensor.rules import random_ops
from tritoncomm.tensor.rules.engine import execute
from tritoncomm.tensor.rules.foreach import on_lists
from tritoncomm.tensor.rules.indexing import set_item
from tritoncomm.tensor.rules.pointwise import elementwise, keep
from tritoncomm.tensor.rules.table import RULES

__all__ = ["colo_tensors", "run"]

_ACCESSORS = ("__get__", "__set__", "__delete__")
_COMPLEX_PARTS = ("real", "imag")
_OTHER_NAMES = {
    "axis": "dim", "keepdims": "keepdim", "axis0": "dim0", "axis1": "dim1", "split_size": "split_size_or_sections",
    "ord": "p",
}  # fmt: skip
"""Torch's names of arguments by their aliases: numpy's names, or the names of one form of an operator."""

_warned: set[str] = set()


@own_impl(Tensor.size)
def _size(self: Any, dim: int | None = None) -> Any:
    return self.size_global() if dim is None else self.size_global(dim)


@own_impl(Tensor.__len__)
def _length(self: Any) -> int:
    return self.size_global(0)


@own_impl(Tensor.module_load)
def _module_load(self: Any, other: Tensor, assign: bool = False) -> Any:
    """Return the tensor that ``load_state_dict`` puts in place of ``self``: its layout, the values of ``other``."""
    refuse_sharing("load_state_dict", other)
    if assign:
        return other.detach()
    with torch.no_grad():
        self.copy_(other)
    kind = type(self)
    if not issubclass(kind, LocalShard):
        return self.detach()
    return kind._rebuild(plain(self).detach(), self.requires_grad, self._state())


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run ``func(*args, **kwargs)`` with ColoTensors among the arguments."""
    impl = implementation(func)
    if impl is not None:
        return _laid_out(_run_local(impl, args, kwargs), next(colo_tensors(args, kwargs)))
    impl = own_implementation(func)
    if impl is not None:
        return impl(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    # Attributes with a rule, as ``.T``, are operators.
    if func not in RULES and (name in QUERIES or name in _ACCESSORS):
        is_getter_of = getattr(func, "__self__", Tensor).__name__ if name == "__get__" else ""
        if is_getter_of in _COMPLEX_PARTS:  # x.real and x.imag are tensors of the layout of x
            return keep(func, args, kwargs, args[0])
        if name == "__set__":
            _check_assignment(func, *args)
        return _run_local(func, args, kwargs)
    if func in random_ops.INITIALISERS or name in random_ops.SAMPLERS:
        return random_ops.initialise(func, args, kwargs)
    if name in KEEPS_LAYOUT:
        if args and not is_colo(args[0]):
            return _run_local(func, args, kwargs)  # a plain tensor that takes dtype and device of a ColoTensor
        return keep(func, args, kwargs, next(colo_tensors(args, kwargs)))
    if name in MAKES_NEW:
        x = _run_local(func, args, kwargs)
        return args[0]._wrap(x, args[0].process_group, ReplicaSpec(), x.shape)
    if name in ELEMENTWISE and not (name == "where" and len(args) + len(kwargs) == 1):  # which is nonzero
        return elementwise(func, name, args, kwargs)
    if name.startswith(("_foreach_", "_fused_")):
        return on_lists(func, name, args, kwargs)
    if name == "__setitem__":
        return set_item(*args)
    if name in random_ops.RANDOM_ELEMENTWISE:
        return random_ops.random_elementwise(func, args, kwargs)
    if isinstance(func, OpOverload | OpOverloadPacket):
        _refuse_reshaping(name.partition(".")[0])
        return _run_local(func, args, kwargs)  # below autograd, called by dispatch modes on local tensors
    if getattr(func, "__module__", None) == distributed_c10d.__name__:
        return _run_local(func, args, kwargs)  # of any group, into local memory: ``dist.all_reduce(p.grad)``
    describe = RULES.get(func)
    call = None if describe is None else _describe(describe, args, kwargs)
    if call is None:
        return _on_replicas(func, name, args, kwargs)
    result = execute(call)
    return LocalShard._with_views(result, call.gathered, func) if call.gathered else result


def _describe(describe: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Return the rule's description of the call; None if it does not accept the arguments. No rule accepts ``out=``."""
    if kwargs.get("out") is not None:
        return None
    kwargs = {_OTHER_NAMES.get(name, name): value for name, value in kwargs.items() if name != "out"}
    try:
        return describe(*args, **kwargs)
    except TypeError:
        try:
            inspect.signature(describe).bind(*args, **kwargs)
        except TypeError:  # the arguments do not fit: a call without a rule
            return None
        raise  # they fit: the error is one of the rule itself


def colo_tensors(*trees: Any) -> Iterator[Any]:
    """Yield the ColoTensors in nested arguments."""
    for tree in trees:
        if is_colo(tree):
            yield tree
        elif isinstance(tree, list | tuple):
            yield from colo_tensors(*tree)
        elif isinstance(tree, dict):
            yield from colo_tensors(*tree.values())


def _run_local(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run on the local tensors; new tensors come back plain."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _laid_out(result: Any, like: Any) -> Any:
    """Return a result in which plain tensors of the local shape of ``like`` have its layout; others have none."""
    shape = plain(like).shape

    def wrapped(x: Any) -> Any:
        if type(x) is not Tensor or x.shape != shape:
            return x
        return like._wrap(x, like.process_group, like.dist_spec, like.global_shape)

    return tree_map(wrapped, result)


def _check_assignment(func: Any, target: Any, value: Any) -> None:
    """Reject ``x.data = value`` if the layout would no longer describe it, or the memory belongs to a view."""
    # ``func`` is the setter of any attribute; torch itself rejects a value for ``data`` that is no tensor. The memory
    # of a view is a gathered copy: writes to it would not reach the shard. ``refuse_sharing`` raises for such a value.
    if func.__self__ is not Tensor.data or not isinstance(value, Tensor):
        return
    refuse_sharing("data =", value)
    if value.shape != plain(target).shape:
        raise UnsupportedError(
            f"data =: the local tensor has the shape {list(plain(target).shape)}, not {list(value.shape)}; "
            "make a new ColoTensor"
        )


def _refuse_reshaping(name: str) -> None:
    """Reject an in-place change of shape or memory, which the layout would no longer describe."""
    if name in RESHAPES_IN_PLACE:
        raise UnsupportedError(f"{name} changes shape or memory under the layout; use the form that returns a tensor")


def _on_replicas(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Run an operator without a rule: shards are gathered first, and every rank computes the full result."""
    _refuse_reshaping(name)
    tensors = list(colo_tensors(args, kwargs))
    sharded = [x for x in tensors if x.partitions]
    if sharded and (writes(name) or any(x is y for x in colo_tensors(kwargs.get("out")) for y in sharded)):
        raise UnsupportedError(f"{name} has no rule for writing into a shard; redistribute it first")
    if sharded and name == "_make_dual":
        raise UnsupportedError("torch.func: forward-mode AD has no rule for shards; use reverse mode")
    if sharded and name not in _warned:
        _warned.add(name)
        warnings.warn(
            f"{name} has no rule for these shards: it gathers them and runs on replicas, on every rank; a rank that "
            "calls it alone waits for the others",
            stacklevel=4,
        )
    pg, first = (sharded or tensors)[0].process_group, next(iter((*args, *kwargs.values())))
    gathered: list[tuple[Any, Tensor]] = []
    # Tensors of ``out=`` are written at the end. The operator gets stand-ins for them, which torch may resize, and
    # after an error ``out`` is as it was.
    outs = {id(x): (x, _resizable(x)) for x in colo_tensors(kwargs.get("out"))}

    def gather(x: Any) -> Any:
        if not is_colo(x):
            return x
        if not x.partitions:
            return plain(x)
        gathered.append((x, plain(x.redistribute(ReplicaSpec()))))
        return gathered[-1][1]

    if outs:
        stand_in = lambda x: outs[id(x)][1] if id(x) in outs else x  # noqa: E731
        kwargs = {**kwargs, "out": tree_map(stand_in, kwargs["out"])}
    args, kwargs = tree_map(gather, tuple(args)), tree_map(gather, kwargs)
    if random_ops.draws_on_replicas(name, args) and pg.tp_world_size() > 1:
        with random_ops.seeded(random_ops.agreed_seed(pg, tensors[0]), tensors[0].device):
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)
    written = _copy_outs(name, list(outs.values()))

    def as_replica(x: Any) -> Any:
        if gathered and isinstance(x, Tensor) and x.layout is not torch.strided:
            raise UnsupportedError(f"{name}: the result of shards would be {x.layout}; layouts are of strided tensors")
        if id(x) in written:
            return written[id(x)]
        return tensors[0]._wrap(x, pg, ReplicaSpec(), x.shape) if isinstance(x, Tensor) else x

    # An operator in place returns its first argument, which is a replica here and was written.
    if writes(name) and result is not None:
        return first if is_colo(first) else result
    result = tree_map(as_replica, result)
    return LocalShard._with_views(result, gathered, func) if gathered else result


def _resizable(out: Any) -> Tensor:
    """Return an empty stand-in for ``out``, which torch resizes to the shape of the result."""
    return plain(out).detach().new_empty(0).requires_grad_(out.requires_grad)


def _copy_outs(name: str, outs: Sequence[tuple[Any, Tensor]]) -> dict[int, Any]:
    """Copy the results into the tensors of ``out=``; return these tensors by ``id`` of the result."""
    # All shapes are checked before the first copy: a call that raises has written nothing.
    for x, result in outs:
        if result.shape != plain(x).shape:
            sizes = f"{list(plain(x).shape)} cannot be resized to {list(result.shape)}"
            raise UnsupportedError(f"{name}: out= of shape {sizes}")
    for x, result in outs:
        plain(x).copy_(result)
    return {id(result): x for x, result in outs}
