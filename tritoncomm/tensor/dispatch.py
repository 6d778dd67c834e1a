"""What an operator does to the layout of its ColoTensors: a rule says, or it gets whole tensors.

In this order: an implementation registered with ``op_wrapper.colo_op_impl``; attributes and methods that only look;
element-wise operators; the rules of ``rules``; everything else runs on replicas, and says so once. A result never
carries a layout that it does not have.
"""

import inspect
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.utils._pytree import tree_map

from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor import rules as rules
from tritoncomm.tensor.distspec import ReplicaSpec
from tritoncomm.tensor.elementwise import ELEMENTWISE, LOOKS, MAKES_NEW, MOVES_ONLY, RESHAPES_IN_PLACE, writes
from tritoncomm.tensor.layout import is_colo, plain, wrap
from tritoncomm.tensor.op_wrapper import implementation
from tritoncomm.tensor.rules.engine import execute
from tritoncomm.tensor.rules.foreach import on_lists
from tritoncomm.tensor.rules.indexing import set_item
from tritoncomm.tensor.rules.pointwise import elementwise, keep
from tritoncomm.tensor.rules.random_ops import (
    INITIALISERS,
    NOISY,
    NOISY_ELEMENTS,
    SAMPLERS,
    agreed_seed,
    initialise,
    noisy_elements,
    seeded,
)
from tritoncomm.tensor.rules.table import RULES
from tritoncomm.tensor.snapshot import of_gathered, refuse_sharing

__all__ = ["run"]

_ACCESSORS = ("__get__", "__set__", "__delete__")
_PARTS = ("real", "imag")
_BACKWARD = (Tensor.backward, torch.autograd.backward, torch.autograd.grad)

_told: set[str] = set()


def run(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """``func(*args, **kwargs)`` with ColoTensors among the arguments."""
    impl = implementation(func)
    if impl is not None:
        return impl(*args, **kwargs)
    name = getattr(func, "__name__", str(func))
    if func not in RULES and (name in LOOKS or name in _ACCESSORS or func in _BACKWARD):
        if name == "__get__" and getattr(func, "__self__", Tensor).__name__ in _PARTS:  # type: ignore[attr-defined]
            return keep(func, args, kwargs, args[0])
        if name == "__set__":
            _check_assignment(func, *args)
        return _look(func, args, kwargs)
    if func in INITIALISERS or name in SAMPLERS:
        return initialise(func, args, kwargs)
    if name in MOVES_ONLY:
        return keep(func, args, kwargs, next(_coloured(args, kwargs)))
    if name in MAKES_NEW:
        made = _look(func, args, kwargs)
        return wrap(made, args[0].process_group, ReplicaSpec(), made.shape)
    if name in ELEMENTWISE:
        return elementwise(func, name, args, kwargs)
    if name.startswith(("_foreach_", "_fused_")):
        return on_lists(func, name, args, kwargs)
    if name == "__setitem__":
        return set_item(*args)
    if name in NOISY_ELEMENTS:
        return noisy_elements(func, args, kwargs)
    if isinstance(func, OpOverload | OpOverloadPacket):
        _refuse_reshaping(name.partition(".")[0])
        return _look(func, args, kwargs)  # below autograd, as dispatch modes see it: pieces are all there is
    describe = RULES.get(func)
    call = None if describe is None else _described(describe, args, kwargs)
    if call is None:
        return _on_replicas(func, name, args, kwargs)
    result = execute(call)
    return of_gathered(result, call.gathered, func) if call.gathered else result


def _described(describe: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The call as its rule sees it; None where the rule does not know these arguments."""
    try:
        return describe(*args, **kwargs)
    except TypeError:
        try:
            inspect.signature(describe).bind(*args, **kwargs)
        except TypeError:
            return None
        raise


def _coloured(*trees: Any) -> Iterator[Any]:
    """ColoTensors in nested arguments."""
    for tree in trees:
        if is_colo(tree):
            yield tree
        elif isinstance(tree, list | tuple):
            yield from _coloured(*tree)
        elif isinstance(tree, dict):
            yield from _coloured(*tree.values())


def _look(func: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """Attributes and questions; what is not the tensor itself comes back plain."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def _check_assignment(func: Any, target: Any, value: Any) -> None:
    """Refuse ``x.data = value`` where the layout would not describe the shard any more, or the memory is a view's."""
    if func.__self__ is not Tensor.data or not isinstance(value, Tensor):
        return
    refuse_sharing("data =", value)
    if value.shape != plain(target).shape:
        raise UnsupportedError(
            f"data =: the local tensor has the shape {list(plain(target).shape)}, not {list(value.shape)}; "
            "make a new ColoTensor"
        )


def _refuse_reshaping(name: str) -> None:
    if name in RESHAPES_IN_PLACE:
        raise UnsupportedError(f"{name} changes shape or memory under the layout; use the form that returns a tensor")


def _on_replicas(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """No rule: every rank computes on whole tensors."""
    _refuse_reshaping(name)
    tensors = list(_coloured(args, kwargs))
    sharded = [x for x in tensors if x._parts]
    if sharded and (writes(name) or any(x is y for x in _coloured(kwargs.get("out")) for y in sharded)):
        raise UnsupportedError(f"{name} has no rule for writing into a shard; redistribute it first")
    if sharded and name not in _told:
        _told.add(name)
        warnings.warn(
            f"{name} has no rule for these shards: it gathers them and runs on the whole tensors, on every rank; a "
            "rank that calls it alone waits for the others",
            stacklevel=4,
        )
    pg = (sharded or tensors)[0].process_group
    gathered: list[tuple[Any, Tensor]] = []
    outs = {id(x): (x, _resizable(x)) for x in _coloured(kwargs.get("out"))}

    def whole(x: Any) -> Any:
        if not is_colo(x):
            return x
        if not x._parts:
            return plain(x)
        gathered.append((x, plain(x.redistribute(ReplicaSpec()))))
        return gathered[-1][1]

    def out(x: Any) -> Any:
        return outs[id(x)][1] if id(x) in outs else x

    if outs:
        kwargs = {**kwargs, "out": tree_map(out, kwargs["out"])}
    args, kwargs = tree_map(whole, tuple(args)), tree_map(whole, kwargs)
    if name in NOISY and pg.tp_world_size() > 1:
        with seeded(agreed_seed(pg, tensors[0]), tensors[0].device):
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)
    written = _written(name, list(outs.values()))

    def coloured(x: Any) -> Any:
        if id(x) in written:
            return written[id(x)]
        return wrap(x, pg, ReplicaSpec(), x.shape) if isinstance(x, Tensor) else x

    if writes(name) and tensors and result is not None:
        return tensors[0]
    result = tree_map(coloured, result)
    return of_gathered(result, gathered, func) if gathered else result


def _resizable(out: Any) -> Tensor:
    """What an operator writes into instead of ``out``: no elements yet, so that torch gives it the result's shape."""
    return plain(out).detach().new_empty(0).requires_grad_(out.requires_grad)


def _written(name: str, outs: Sequence[tuple[Any, Tensor]]) -> dict[int, Any]:
    """The tensors of ``out=`` with their results copied into them, by ``id`` of the result.

    Raises:
        UnsupportedError: a result has another shape; nothing is written then.
    """
    for x, made in outs:
        if made.shape != plain(x).shape:
            sizes = f"{list(plain(x).shape)} cannot be resized to {list(made.shape)}"
            raise UnsupportedError(f"{name}: out= of shape {sizes}")
    for x, made in outs:
        plain(x).copy_(made)
    return {id(made): x for x, made in outs}
