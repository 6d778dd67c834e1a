"""Decide whether a tensor's storage is otherwise unreferenced, so that an all-reduce may run in place.

It may where the tensor is contiguous, not a leaf that requires grad, its memory is torch's own and in no other process,
and nothing else refers to the tensor, its storage or the Python objects of either, not even weakly. How many references
"nothing else" means depends on the versions of Python and torch, so it is measured: on a tensor that is referenced
elsewhere in every way that there is, and on one that is not. Where any of those ways does not show, the answer is
always no.

The measurement runs in a thread of its own, because a tracer, profiler or mode of the caller's thread may keep what it
sees, and counts taken then would later pass referenced tensors for unreferenced ones. Temporaries are measured at
import, gradients in the first backward: once autograd's engine has started, a process that has GPUs can no longer fork.
"""

import _thread
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from weakref import getweakrefcount

import torch
from torch import Tensor

from tritoncomm.core.function import direct

__all__ = ["gradient_is_exclusive", "max_references", "temporary_is_exclusive"]

Counts = tuple[int, int, int, int]
_NEVER: Counts = (0, 0, 0, 0)

_current_graph_task = torch._C._current_graph_task_id
_storage_use_count = torch._C._storage_Use_Count  # pyright: ignore[reportAttributeAccessIssue]
_use_count: Callable[[Tensor], int] = Tensor._use_count  # pyright: ignore[reportAttributeAccessIssue]


def _counts(references: int, x: Tensor) -> Counts:
    """References to the Python object (counted first, as callers do), the tensor, its storage, the storage's object."""
    storage = x.untyped_storage()
    return references, _use_count(x), _storage_use_count(storage._cdata), sys.getrefcount(storage)


def _exceeds(counts: Counts, limit: Counts) -> bool:
    return any(count > most for count, most in zip(counts, limit, strict=True))


def temporary_is_exclusive(references: int, x: Tensor) -> bool:
    """Whether ``x``, an argument with ``sys.getrefcount`` of ``references``, is an otherwise unreferenced temporary.

    The caller takes the count, so that this call does not refer to ``x`` yet.
    """
    return references <= _temporary[0] and _is_exclusive(x, _temporary)


def _is_exclusive(x: Tensor, limit: Counts) -> bool:
    if type(x) is not Tensor or _use_count(x) > limit[1] or getweakrefcount(x) or (x.requires_grad and x.is_leaf):
        return False
    try:
        if not x.is_contiguous() or x.is_neg() or x.is_conj():
            return False
    except RuntimeError:  # a sparse tensor, which is refused by name where it would be sent
        return False
    storage = x.untyped_storage()
    return (
        _storage_use_count(storage._cdata) <= limit[2]
        and sys.getrefcount(storage) <= limit[3]
        and not getweakrefcount(storage)
        and storage.resizable()  # memory that came from outside torch (numpy, dlpack, a file) is not
        and not (x.is_cpu and storage.is_shared())
    )


def _is_lone_view(x: Tensor) -> bool:
    """Whether ``x`` is the only view of a tensor that nothing else refers to, over that tensor's storage."""
    base = x._base
    return (
        type(base) is Tensor
        and _is_exclusive(x, _view)
        and sys.getrefcount(base) <= _view_base[0]
        and _use_count(base) <= _view_base[1]
        and not getweakrefcount(base)
        and base.untyped_storage()._cdata == x.untyped_storage()._cdata
    )


def gradient_is_exclusive(references: int, grad: Tensor, ctx: Any, function: Any) -> bool:
    """Whether ``grad``, given to ``function.backward`` with ``sys.getrefcount`` of ``references``, is unreferenced.

    Only autograd's engine passes gradients in the way that was measured; a plain call of ``backward`` or of a node
    refers to its arguments itself.
    """
    if type(ctx) is not function._backward_cls or _current_graph_task() == -1:
        return False
    if not _measured:
        _measure_gradients()
    return references <= max_references and (_is_exclusive(grad, _gradient) or _is_lone_view(grad))


def _in_new_thread(measure: Callable[[], Any]) -> Any:
    """The result of ``measure()`` on a thread that no tracer, profiler, mode or hook reaches; None where there is none.

    Threads of ``_thread`` inherit nothing, those of ``threading`` run its trace and profile functions.
    """
    results: list[Any] = []
    caller, finished = _thread.get_native_id(), _thread.allocate_lock()
    finished.acquire()

    def run() -> None:
        try:
            if _thread.get_native_id() != caller:  # a green thread shares the caller's tracers and modes
                results.append(measure())
        finally:
            finished.release()

    _thread.start_new_thread(run, ())
    finished.acquire(timeout=20)
    return results[0] if results else None


def _hidden_references() -> bool:
    """Whether references may exist that counting does not show, or tools that add some while measuring.

    Python 3.14 lends a caller's local variable to the function it calls, without counting.
    TODO: delete when a way to see such loans is known.
    """
    monitoring: Any = getattr(sys, "monitoring", None)
    tools = monitoring is not None and any(monitoring.get_tool(number) for number in range(6))
    return tools or sys.version_info >= (3, 14)


def _probe(x: Tensor, _: Any = None) -> Counts:
    """The counts of an argument, called as a mapping is."""
    return _counts(sys.getrefcount(x), x)


_global: Any = None


def _temporary_counts() -> Counts:
    """Counts of a temporary, if every way to refer to it from elsewhere adds to one of them."""
    global _global
    exclusive = _probe(torch.empty(1))
    local, _global, items, holder = torch.empty(1), torch.empty(1), [torch.empty(1)], SimpleNamespace(x=torch.empty(1))
    storage = torch.empty(1).untyped_storage()

    def closure() -> Counts:
        return _probe(local)

    referenced = (
        _probe(local),
        _probe(_global),
        _probe(items[0]),
        _probe(holder.x),
        closure(),
        _probe(local.view(1)),
        _probe(local.detach()),
        _probe(torch.empty(0).set_(storage)),  # pyright: ignore[reportArgumentType]
    )
    _global = None
    return exclusive if all(_exceeds(counts, exclusive) for counts in referenced) else _NEVER


@direct
class _Gradient(torch.autograd.Function):
    """Identity that reports the counts of the gradient it is given, called as the mappings are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[tuple[Counts, Counts]]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        counts = _counts(sys.getrefcount(grad_output), grad_output)
        base = grad_output._base
        ctx.seen.append((counts, _NEVER if base is None else _counts(sys.getrefcount(base), base)))
        return grad_output, None


_keepers: tuple[Callable[[Tensor], Any], ...] = (
    lambda grad: grad,
    lambda grad: SimpleNamespace(grad=grad),
    lambda grad: grad.detach(),
    lambda grad: grad.view(-1),
    lambda grad: grad.untyped_storage(),
)


def _gradient_counts(view: bool) -> tuple[Counts, Counts]:
    """Counts of a gradient and of its base, if every way that a hook can keep it adds to one of them."""
    seen: list[tuple[Counts, Counts]] = []
    kept: list[Any] = []
    for keep in (None, *_keepers):
        x = torch.ones(1, requires_grad=True)
        y = _Gradient.apply(x, seen)
        z = y.view(1, 1) if view else y
        if keep is not None:
            z.register_hook(lambda grad, keep=keep: kept.append(keep(grad)))
        (z * 2).sum().backward()  # without a gradient, for which torch would import sympy: half a second
    (exclusive, base), *referenced = seen
    shown = all(_exceeds(counts, exclusive) or _exceeds(of_base, base) for counts, of_base in referenced)
    return (exclusive, base) if shown and (base != _NEVER) == view else (_NEVER, _NEVER)


def _measure_gradients() -> None:
    global _measured, max_references, _gradient, _view, _view_base
    both = None if _hidden_references() else _in_new_thread(lambda: (_gradient_counts(False), _gradient_counts(True)))
    (_gradient, _), (_view, _view_base) = both or ((_NEVER, _NEVER),) * 2
    _measured, max_references = True, _gradient[0]


_measured = False
max_references = sys.maxsize
"""Of a gradient that nothing else refers to; callers compare with it first, because the rest costs a call."""

_temporary: Counts = _NEVER if _hidden_references() else _in_new_thread(_temporary_counts) or _NEVER
_gradient = _view = _view_base = _NEVER
