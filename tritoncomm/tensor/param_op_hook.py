"""Hooks around every operator that takes ColoParameters, forward and backward."""

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
    """What happens around an operator; ``params`` are all ColoParameters among its arguments."""

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
    """The active hooks; they run in the order they were given, forward and backward."""

    hooks: Hooks = ()

    @staticmethod
    @contextmanager
    def use_hooks(*hooks: ColoParamOpHook) -> Iterator[None]:
        """Make these the active hooks inside the block (none: no hooks); blocks nest, also through exceptions."""
        before, ColoParamOpHookManager.hooks = ColoParamOpHookManager.hooks, hooks
        try:
            yield
        finally:
            ColoParamOpHookManager.hooks = before

    @staticmethod
    def has_hook() -> bool:
        """Whether any hook is active, and this thread is not inside an operator that has them around it already."""
        return len(ColoParamOpHookManager.hooks) > 0 and not _inside.operator

    @staticmethod
    def around(
        params: list[Tensor], call: Callable[..., Any], args: Any, kwargs: dict[str, Any], in_graph: bool = True
    ) -> Any:
        """Run ``call(args, kwargs)`` between the hooks.

        Two identities go into the graph: one over the tensors that go in, whose backward is ``post_backward``, one over
        those that come out, whose backward is ``pre_backward``; with ``in_graph`` false only the forward hooks run.
        """
        hooks = ColoParamOpHookManager.hooks
        for hook in hooks:
            hook.pre_forward(params)
        if in_graph:
            args, kwargs = _through(_After, params, hooks, (args, kwargs))
        _inside.operator = True
        try:
            result = call(args, kwargs)
        finally:
            _inside.operator = False
        for hook in hooks:
            hook.post_forward(params)
        return _through(_Before, params, hooks, result) if in_graph else result


class _Inside(threading.local):
    """Whether this thread runs an operator between hooks."""

    operator = False


_inside = _Inside()


class _Identity(Function):
    """Tensors as they are; backward calls hooks and hands the gradients on."""

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


def _through(kind: Any, params: list[Tensor], hooks: Hooks, tree: Any) -> Any:
    """``tree`` with every tensor that has a gradient to come led through the identity; classes and layouts stay."""
    found: list[Tensor] = []

    def collect(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            found.append(x)
        return x

    _map(collect, tree)
    if not found:
        return tree
    with torch._C.DisableTorchFunctionSubclass():
        passed = iter(kind.apply(params, hooks, *found))

    def exchange(x: Any) -> Any:
        if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled():
            return _dressed(next(passed), x)
        return x

    return _map(exchange, tree)


def _map(function: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _map(function, value) for key, value in tree.items()}
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(_map(function, x) for x in tree))
    if isinstance(tree, list | tuple):
        return type(tree)(_map(function, x) for x in tree)
    return function(tree)


def _dressed(x: Tensor, like: Tensor) -> Tensor:
    """``x`` as the ColoTensor that ``like`` is."""
    # ColoTensor runs these hooks, so it imports this module.
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
        RuntimeError: a dict inside; nobody could say in which order its values are.
    """
    if isinstance(tree, kind):
        return [tree]  # type: ignore[list-item]
    if isinstance(tree, dict):
        raise RuntimeError("Found Dict: ColoParameters inside a dict argument are not supported")
    if isinstance(tree, Sequence) and not isinstance(tree, str):
        return [x for each in tree for x in params_in(each, kind)]
    return []
