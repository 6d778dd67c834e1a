"""Gradients of ColoTensors: ColoTensors of the tensor's layout, so that norms are of the global gradient.

Autograd makes plain local tensors. They are wrapped where Python reads them: by ``x.grad``, in hooks of
``register_hook`` and in the results of ``torch.autograd.grad``. The wrapped gradient replaces the plain one in
``x.grad``: it shares its memory, and autograd adds to it in place.
"""

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import get_gradient_edge
from torch.utils._pytree import tree_leaves, tree_map

from tritoncomm.core import eager
from tritoncomm.core.call import compare_arguments
from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.layout import is_colo, plain, refuse_sharing
from tritoncomm.tensor.op_wrapper import own_impl
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.rules.table import rule

__all__ = ["delete_gradient", "gradient_of", "set_gradient", "shards_by_group"]

_descriptor: Any = Tensor.grad
_get, _set = _descriptor.__get__, _descriptor.__set__
# GradScaler looks for infs by this operator only, which has no public name (torch 2.11 to 2.13).
_check_and_unscale: Any = torch._amp_foreach_non_finite_check_and_unscale_  # pyright: ignore[reportPrivateImportUsage]


def gradient_of(x: Any) -> Tensor | None:
    """Return the gradient of a ColoTensor as a ColoTensor of its layout; a sparse gradient stays plain."""
    with torch._C.DisableTorchFunctionSubclass():
        gradient = _get(x)
        if type(gradient) is not Tensor or gradient.layout is not torch.strided:
            return gradient
        wrapped = x._wrap_like(gradient)
        _set(x, wrapped)
    return wrapped


def set_gradient(x: Any, gradient: Tensor | None) -> None:
    """Set the gradient of a ColoTensor; a plain tensor is a local one."""
    _check_layout("grad =", x, gradient)
    with torch._C.DisableTorchFunctionSubclass():
        _set(x, gradient)


def delete_gradient(x: Any) -> None:
    """Set the gradient to None, as torch does."""
    set_gradient(x, None)


def _check_layout(name: str, like: Any, gradient: Any) -> None:
    """Reject a gradient of another layout than ``like``, or of another rank's file; a plain tensor is a local one."""
    refuse_sharing(name, gradient)
    if not is_colo(gradient) or (not gradient.partitions and not like.partitions):
        return
    if gradient.partitions != like.partitions or gradient.process_group != like.process_group:
        raise UnsupportedError(f"{name}: a gradient of {gradient.dist_spec} for {like.dist_spec}; redistribute it")


@own_impl(Tensor.register_hook)
def _register_hook(x: Any, hook: Callable[[Tensor], Tensor | None]) -> Any:
    """Register ``hook`` for gradients of the layout of ``x``; a leaf may be redistributed before it has one."""
    leaf = ref(x) if x.is_leaf else None  # not x itself, which refers to its hooks
    wrap, pg, dist_spec, shape = x._wrap, x.process_group, x.dist_spec, x.global_shape

    def hooked(gradient: Tensor) -> Tensor | None:
        owner: Any = None if leaf is None else leaf()
        wrapped = wrap(gradient, pg, dist_spec, shape) if owner is None else owner._wrap_like(gradient)
        result = hook(wrapped)
        _check_layout("register_hook", wrapped, result)
        return plain(result) if is_colo(result) else result

    with torch._C.DisableTorchFunctionSubclass():
        return x.register_hook(hooked)


def _local(tensors: Any) -> Any:
    """Replace ColoTensors in the arguments by plain tensors of their graph."""
    with torch.enable_grad():
        return tree_map(lambda x: plain(x) if is_colo(x) else x, tensors)


def _edges(tensors: Any) -> Any:
    """Replace ColoTensors in the arguments by edges of the graph, which autograd takes as inputs."""
    with torch._C.DisableTorchFunctionSubclass():
        return tree_map(lambda x: get_gradient_edge(x) if is_colo(x) else x, tensors)


# Autograd is called with plain tensors and edges of the graph. Called with ColoTensors while the dispatch of their
# operators is disabled, it would run hooks and recomputed activations on local tensors.


@own_impl(Tensor.backward)
def _backward_of(self: Any, gradient: Any = None, *args: Any, **kwargs: Any) -> None:
    _backward(self, gradient, *args, **kwargs)


@own_impl(torch.autograd.backward)
def _backward(tensors: Any, grad_tensors: Any = None, *args: Any, inputs: Any = None, **kwargs: Any) -> None:
    """Add to the gradients of leaves, or of ``inputs``."""
    for x in tree_leaves(inputs):
        if is_colo(x) and not x.is_leaf:
            x.retain_grad()
    torch.autograd.backward(_local(tensors), _local(grad_tensors), *args, inputs=_edges(inputs), **kwargs)


@own_impl(torch.autograd.grad)
def _gradients(
    outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, materialize_grads: bool = False, **kwargs: Any
) -> tuple[Any, ...]:
    """Return gradients of ColoTensors as ColoTensors; batched gradients (``is_grads_batched``) stay plain."""
    # ``materialize_grads`` is not passed on: the zeros are made below, in the layout of each input.
    if materialize_grads and kwargs.get("allow_unused") is None:
        kwargs["allow_unused"] = True
    gradients = torch.autograd.grad(_local(outputs), _edges(inputs), _local(grad_outputs), *args, **kwargs)

    def wrapped(x: Any, gradient: Any) -> Any:
        if gradient is None:
            return torch.zeros_like(x) if materialize_grads else None
        return x._wrap_like(gradient) if is_colo(x) and gradient.dim() == x.dim() else gradient

    sources = (inputs,) if isinstance(inputs, Tensor) else inputs
    return tuple(wrapped(x, gradient) for x, gradient in zip(sources, gradients, strict=True))


def shards_by_group(tensors: Sequence[Any]) -> list[tuple[ProcessGroup, list[int]]]:
    """Return the tensor groups of shards, in one order on all ranks, with the indices of their shards."""
    # Keyed by ranks: process groups that differ in their data-parallel ranks only share a collective.
    found: dict[tuple[int, ...], tuple[ProcessGroup, list[int]]] = {}
    for index, x in enumerate(tensors):
        if is_colo(x) and x.partitions:
            pg = x.process_group
            found.setdefault(tuple(pg.tp_rank_list() or ()), (pg, []))[1].append(index)
    return list(found.values())


@own_impl(_check_and_unscale)
@rule(
    named="torch.amp.GradScaler: unscale_, step",
    accepts="any sharding; plain tensors are replicated", result="in place; the same decision on every rank",
    collectives="all-reduce of one number",
)  # fmt: skip
def _unscale(gradients: Sequence[Tensor], found_inf: Tensor, inv_scale: Tensor) -> None:
    """Multiply the gradients by ``inv_scale``; ``found_inf`` is 1 if any rank has one that is not finite."""
    with torch._C.DisableTorchFunctionSubclass():
        _check_and_unscale(gradients, found_inf, inv_scale)
    for pg, _ in shards_by_group(gradients):
        compare_arguments("GradScaler.unscale_", pg.tp_process_group(), inv_scale=inv_scale)
        eager.all_reduce(found_inf, pg.tp_process_group(), "GradScaler.unscale_", dist.ReduceOp.MAX, in_place=True)
