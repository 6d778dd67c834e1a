"""Hooks around every operator on ColoParameters, forward and backward."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.layout import is_colo, is_view

__all__ = ["ColoParamOpHook", "ColoParamOpHookManager", "params_in"]

Hooks = tuple["ColoParamOpHook", ...]
Callbacks = Sequence[Callable[[list[Tensor]], None]]


class ColoParamOpHook(ABC):
    """Callbacks around an operator; ``params`` are the ColoParameters among its arguments."""

    @abstractmethod
    def pre_forward(self, params: list[Tensor]) -> None:
        """Before the operator runs."""

    @abstractmethod
    def post_forward(self, params: list[Tensor]) -> None:
        """After it ran."""

    @abstractmethod
    def pre_backward(self, params: list[Tensor]) -> None:
        """Before its backward runs."""

    @abstractmethod
    def post_backward(self, params: list[Tensor]) -> None:
        """After its backward ran."""


class ColoParamOpHookManager:
    """The active hooks; they run in the given order, forward and backward."""

    hooks: Hooks = ()

    @staticmethod
    @contextmanager
    def use_hooks(*hooks: ColoParamOpHook) -> Iterator[None]:
        """Activate these hooks inside the block (no arguments: no hooks); blocks nest and restore on exceptions."""
        before, ColoParamOpHookManager.hooks = ColoParamOpHookManager.hooks, hooks
        try:
            yield
        finally:
            ColoParamOpHookManager.hooks = before

    @staticmethod
    def has_hook() -> bool:
        """Whether a hook is active and this thread is not already inside a hooked operator."""
        return len(ColoParamOpHookManager.hooks) > 0 and not _inside.operator

    @staticmethod
    def around(
        params: list[Tensor], call: Callable[..., Any], args: Any, kwargs: dict[str, Any], in_graph: bool = True
    ) -> Any:
        """Run ``call(args, kwargs)`` between the hooks.

        Two identities are recorded by autograd: one over the inputs, whose backward is ``post_backward``, and one over
        the outputs, whose backward is ``pre_backward``; without ``in_graph`` only the forward hooks run.
        """
        hooks = ColoParamOpHookManager.hooks
        for hook in hooks:
            hook.pre_forward(params)
        if in_graph:
            args, kwargs = _through_identity([hook.post_backward for hook in hooks], params, (args, kwargs))
        _inside.operator = True
        try:
            result = call(args, kwargs)
        finally:
            _inside.operator = False
        for hook in hooks:
            hook.post_forward(params)
        return _through_identity([hook.pre_backward for hook in hooks], params, result) if in_graph else result


class _Inside(threading.local):
    """Whether this thread is inside a hooked operator."""

    operator = False


_inside = _Inside()


class _Identity(Function):
    """Forward: the identity. Backward: callbacks, and the gradients unchanged."""

    @staticmethod
    def forward(ctx: Any, callbacks: Callbacks, params: list[Tensor], *tensors: Tensor) -> Any:
        ctx.callbacks, ctx.params = callbacks, params
        return tuple(x.view_as(x) for x in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for callback in ctx.callbacks:
            callback(ctx.params)
        return None, None, *grads


def _through_identity(callbacks: Callbacks, params: list[Tensor], tree: Any) -> Any:
    """Pass every tensor in ``tree`` that requires grad through the identity; classes and layouts are kept."""
    leaves, spec = tree_flatten(tree)
    at = [i for i, x in enumerate(leaves) if isinstance(x, Tensor) and wants_grad(x)]
    if not at:
        return tree
    with torch._C.DisableTorchFunctionSubclass():
        outputs: Any = _Identity.apply(callbacks, params, *(leaves[i] for i in at))
    for i, x in zip(at, outputs, strict=True):
        leaves[i] = _wrap_like(x, leaves[i])
    return tree_unflatten(leaves, spec)


def _wrap_like(x: Tensor, like: Tensor) -> Tensor:
    """Return ``x`` with class, layout and attributes of ``like``, if ``like`` is a ColoTensor."""
    if not is_colo(like):
        return x
    wrapped = like._wrap(x, like.process_group, like.dist_spec, like.global_shape)
    if is_view(like):
        with torch._C.DisableTorchFunctionSubclass():
            wrapped = wrapped.as_subclass(type(like))
    vars(wrapped).update(vars(like))
    return wrapped


def params_in(tree: Any, kind: type) -> list[Tensor]:
    """Return all ColoParameters in nested lists and tuples; a dict inside raises, as in ColossalAI."""
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        raise RuntimeError("Found Dict: ColoParameters inside a dict argument are not supported")
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [x for each in tree for x in params_in(each, kind)]
    return []
