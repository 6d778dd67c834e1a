"""Autograd functions of mappings: a fast ``apply``, a group that is not kept alive, and when a graph is recorded."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.errors import GroupError, UnsupportedError

__all__ = ["called", "direct", "once_differentiable", "outside_graphs", "wants_grad", "without_graph"]

P = ParamSpec("P")
T = TypeVar("T")

_base = torch.autograd.Function
_transformed = torch._C._are_functorch_transforms_active
_attributes, _torchs_apply = _base.__dict__, _base.__dict__.get("apply")  # none of its own from torch 2.15 on


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate ``function`` so that torch.compile breaks the graph and runs it as in eager mode."""

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # The decorator torch.compiler.disable would do the same, but it imports torch._dynamo at once: every import of
        # the library would take 1.5 s more.
        if is_dynamo_compiling():
            outside: Any = torch.compiler.disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward without a derivative of its own: whoever differentiates its gradients gets an error.

    torch's decorator of this name only does so if the incoming gradients require grad. Those of a mean do not: there a
    second derivative would lack the part of this function, without an error.
    """

    @wraps(backward)
    def run(ctx: Any, *grads: Any) -> Any:
        with torch.no_grad():
            outputs = backward(ctx, *grads)
        if not torch.is_grad_enabled():  # without create_graph
            return outputs
        name = type(ctx).__name__.removesuffix("Backward")
        return _NoSecondDerivative.apply(name, torch.empty(0, requires_grad=True), *outputs)

    return run


class _NoSecondDerivative(torch.autograd.Function):
    """Forward: the gradients of a backward. Backward: an error."""

    @staticmethod
    def forward(ctx: Any, name: str, anchor: Tensor, *grads: Tensor | None) -> Any:
        ctx.name = name
        return tuple([None if grad is None else grad.view_as(grad) for grad in grads])

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise UnsupportedError(f"{ctx.name}: its gradient has no derivative; leave it out of second derivatives")


@outside_graphs  # torch.compile traces the frame of a forward behind a graph break
def _note_forward(observer: record.Observer, node: Any) -> None:
    """Report a new node of autograd's graph to the observer."""
    observer.note_forward(node)


def _group_of(ctx: Any) -> ProcessGroup | None:
    """Return the group of a node of autograd's graph; None if its forward stored None."""
    reference = ctx.group_reference
    if reference is None:
        return None
    group = reference()
    if group is None:
        raise GroupError(f"{type(ctx).__name__.removesuffix('Backward')}.backward: its process group was destroyed")
    return group


def _refer_to_group(ctx: Any, group: ProcessGroup | None) -> None:
    """Store a weak reference to the group in a node of autograd's graph, and report the node to the observer."""
    ctx.group_reference = None if group is None else ref(group)
    if record.hooks.observer is not None:
        _note_forward(record.hooks.observer, ctx)


_weak_group = property(_group_of, _refer_to_group)
"""The attribute ``group`` of a node of autograd's graph, which does not keep the group alive.

Gloo's thread may hold the last reference to a tensor that it has sent or received; it frees the tensor's graph then. A
group that ended there would wait for its own thread for ever, and its threads and descriptors would stay.
TODO: delete when ProcessGroupGloo can be destroyed from its own threads (torch 2.13 cannot).
"""


def direct(cls: Any) -> Any:
    """Decorate an autograd function for a fast ``apply``; its forward stores ``ctx.group``, a weak reference."""
    # The node's ``apply`` is a Python method that looks ``backward`` up and calls it; with ``backward`` itself in its
    # place, bound to the node, which is its ctx, each backward saves that call. Forwards are called by position, ctx
    # first.
    cls._backward_cls.apply, cls._backward_cls.group = cls.backward, _weak_group
    # From torch 2.15 on the ordinary apply is the C++ entry, and it stays.
    if not hasattr(_base.apply, "__func__"):
        return cls
    # Function.apply also binds defaults, and searches the arguments for tensors that outlived a functorch transform.
    # Both together take as long as a small mapping. Inside such a transform, for subclasses, and where somebody has
    # replaced it, as checkers of types do, the ordinary one runs.
    # ``super(_base, cls)`` skips ``Function``, whose base class has the C++ entry.
    enter = super(_base, cls).apply  # pyright: ignore[reportAttributeAccessIssue]

    def apply(entered: Any, *args: Any) -> Any:
        if entered is cls and _attributes["apply"] is _torchs_apply and not _transformed():
            return enter(*args)
        return super(cls, entered).apply(*args)  # pyright: ignore[reportAttributeAccessIssue]

    cls.apply = classmethod(apply)
    return cls


class _NoContext:
    """The context of a forward that no backward follows."""

    needs_input_grad = (False,) * 8

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep nothing."""


def called(function: Any, *arguments: Any) -> Any:
    """Return ``function.apply(*arguments)``; where autograd records nothing, as in a backward, its forward alone."""
    # Nodes that no graph has took 7 % of the host time of dispatch and combine with their backward.
    if torch.is_grad_enabled() or _transformed() or _attributes.get("apply") is not _torchs_apply:
        return function.apply(*arguments)
    return function.forward(_NoContext(), *arguments)


def wants_grad(x: Tensor) -> bool:
    """Whether autograd records operations on ``x``: it requires grad, and grad mode is on."""
    return x.requires_grad and torch.is_grad_enabled()


def without_graph(x: Tensor) -> Tensor:
    """Return ``x.detach()`` if ``x`` requires grad, else ``x`` itself, which is faster."""
    return x.detach() if x.requires_grad else x
