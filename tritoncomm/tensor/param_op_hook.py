"""Hooks around every operator on ColoParameters, forward and backward."""

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tritoncomm.tensor.snapshot import is_view

__all__ = ["ColoParamOpHook", "ColoParamOpHookManager", "params_in"]

Hooks = tuple["ColoParamOpHook", ...]


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
            args, kwargs = _through_identity(_After, params, hooks, (args, kwargs))
        _inside.operator = True
        try:
            result = call(args, kwargs)
        finally:
            _inside.operator = False
        for hook in hooks:
            hook.post_forward(params)
        return _through_identity(_Before, params, hooks, result) if in_graph else result


class _Inside(threading.local):
    """Whether this thread is inside a hooked operator."""

    operator = False


_inside = _Inside()


class _Identity(Function):
    """Identity; the backward calls hooks and passes the gradients on."""

    @staticmethod
    def forward(ctx: Any, params: list[Tensor], hooks: Hooks, *tensors: Tensor) -> Any:
        ctx.params, ctx.hooks = params, hooks
        return tuple(x.view_as(x) for x in tensors)


class _After(_Identity):
    """Backward: ``post_backward``."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for hook in ctx.hooks:
            hook.post_backward(ctx.params)
        return None, None, *grads


class _Before(_Identity):
    """Backward: ``pre_backward``."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        for hook in ctx.hooks:
            hook.pre_backward(ctx.params)
        return None, None, *grads


def _through_identity(kind: Any, params: list[Tensor], hooks: Hooks, tree: Any) -> Any:
    """``tree`` with every tensor that requires grad passed through the identity; classes and layouts are kept."""
    graph_tensors: list[Tensor] = []

    def collect(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            graph_tensors.append(x)
        return x

    _map(collect, tree)
    if not graph_tensors:
        return tree
    with torch._C.DisableTorchFunctionSubclass():
        outputs = iter(kind.apply(params, hooks, *graph_tensors))

    def substitute(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return wrap_like(next(outputs), x)
        return x

    return _map(substitute, tree)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, x) for x in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, x) for x in tree)
    return function(tree)


def wrap_like(x: Tensor, like: Tensor) -> Tensor:
    """``x`` with the class and attributes of ``like``, if that is a ColoTensor."""
    # Imported here because that module imports this one.
    from tritoncomm.tensor.colo_tensor import ColoTensor

    if not isinstance(like, ColoTensor):
        return x
    with torch._C.DisableTorchFunctionSubclass():
        made = x.as_subclass(type(like) if is_view(like) else ColoTensor)
    for name, value in vars(like).items():
        setattr(made, name, value)
    return made


def params_in(tree: Any, kind: type) -> list[Tensor]:
    """All ColoParameters in nested lists and tuples.

    Raises:
        RuntimeError: a dict inside, as in ColossalAI.
    """
    if isinstance(tree, kind):
        return [tree]
    if isinstance(tree, dict):
        raise RuntimeError("Found Dict: ColoParameters inside a dict argument are not supported")
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [x for each in tree for x in params_in(each, kind)]
    return []
