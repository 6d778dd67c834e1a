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
from tritoncomm.tensor.elementwise import ELEMENTWISE, LOOKS, MAKES_NEW, MOVES_ONLY
from tritoncomm.tensor.layout import is_colo, plain, wrap
from tritoncomm.tensor.op_wrapper import implementation
from tritoncomm.tensor.rules.elementwise import elementwise, keep, writes
from tritoncomm.tensor.rules.engine import execute
from tritoncomm.tensor.rules.foreach import on_lists
from tritoncomm.tensor.rules.joins import set_item
from tritoncomm.tensor.rules.noise import (
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
        return _look(func, args, kwargs)  # below autograd, as dispatch modes see it: pieces are all there is
    describe = RULES.get(func)
    call = None if describe is None else _described(describe, args, kwargs)
    return _on_replicas(func, name, args, kwargs) if call is None else execute(call)


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


def _on_replicas(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """No rule: every rank computes on whole tensors."""
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

    def whole(x: Any) -> Any:
        if not is_colo(x):
            return x
        return plain(x.redistribute(ReplicaSpec())) if x._parts else plain(x)

    args, kwargs = tree_map(whole, tuple(args)), tree_map(whole, kwargs)
    if name in NOISY and pg.tp_world_size() > 1:
        with seeded(agreed_seed(pg, tensors[0]), tensors[0].device):
            result = func(*args, **kwargs)
    else:
        result = func(*args, **kwargs)

    def coloured(x: Any) -> Any:
        return wrap(x, pg, ReplicaSpec(), x.shape) if isinstance(x, Tensor) else x

    return tensors[0] if writes(name) and tensors and result is not None else tree_map(coloured, result)
