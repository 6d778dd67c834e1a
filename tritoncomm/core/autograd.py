"""When autograd records a mapping, and its functions without the Python around them (as long as a small mapping)."""

from collections.abc import Callable
from functools import wraps
from typing import Any, ParamSpec, TypeVar
from weakref import ref

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.errors import GroupError

__all__ = ["direct", "outside_graphs", "wants_grad", "without_graph"]

P = ParamSpec("P")
T = TypeVar("T")

_base = torch.autograd.Function
_transformed = torch._C._are_functorch_transforms_active


def outside_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Decorator: under torch.compile the graph breaks, and the function runs as it does in eager mode.

    As ``torch.compiler.disable`` does, which imports torch._dynamo: 1.5 s more for every import of this.
    """

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if is_dynamo_compiling():
            outside: Any = torch.compiler.disable(function)
            return outside(*args, **kwargs)
        return function(*args, **kwargs)

    return call


@outside_graphs  # torch.compile traces the frame of a forward behind a graph break
def _note_forward(observer: record.Observer, node: Any) -> None:
    """Report to ``observer`` that a forward has made ``node`` of autograd's graph."""
    observer.note_forward(node)


def _group_of(ctx: Any) -> ProcessGroup | None:
    reference = ctx.group_reference
    if reference is None:
        return None
    group = reference()
    if group is None:
        raise GroupError(f"{type(ctx)._forward_cls.__name__}.backward: its process group was destroyed")
    return group


def _refer_to_group(ctx: Any, group: ProcessGroup | None) -> None:
    ctx.group_reference = None if group is None else ref(group)
    if record.hooks.observer is not None:
        _note_forward(record.hooks.observer, ctx)


_weak_group = property(_group_of, _refer_to_group)
"""``ctx.group`` of a node, which does not keep the group.

Gloo's thread may be the last to refer to a tensor that it has sent or received, and then it frees the tensor's graph. A
group that ended there would wait for the thread that frees it, for ever: its threads and descriptors would stay.
TODO: delete when ProcessGroupGloo can be destroyed from its own threads (torch 2.13 cannot).
"""


def direct(cls: Any) -> Any:
    """Class decorator: ``apply`` is autograd's C++ entry, the graph's node runs ``backward`` itself and keeps no group.

    A group is ``ctx.group``, and not a part of another attribute: only that is referenced weakly.

    For functions whose ``forward`` takes ctx first and is called by position. What is left out is the binding of
    defaults and a look at every argument for tensors that outlived a functorch transform. Inside such a transform, and
    for subclasses, ``apply`` stays the ordinary one; torch.compile does not see the difference. From torch 2.15 on the
    ordinary one is the C++ entry, and is left as it is.
    """
    cls._backward_cls.apply, cls._backward_cls.group = cls.backward, _weak_group
    if not hasattr(_base.apply, "__func__"):
        return cls
    enter, ordinary = super(_base, cls).apply, _base.apply.__func__  # pyright: ignore[reportAttributeAccessIssue]

    def apply(called: Any, *args: Any) -> Any:
        return enter(*args) if called is cls and not _transformed() else ordinary(called, *args)

    cls.apply = classmethod(apply)
    return cls


def wants_grad(x: Tensor) -> bool:
    """Whether operations on ``x`` must be recorded by autograd."""
    return x.requires_grad and torch.is_grad_enabled()


def without_graph(x: Tensor) -> Tensor:
    """``x`` for, or from, an operation that is not recorded: the same object unless it requires grad, else detached."""
    return x.detach() if x.requires_grad else x
