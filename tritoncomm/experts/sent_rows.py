"""Autograd functions of rows that travel: to the ranks of their experts, and back to the ranks of their tokens.

Each is the adjoint of the other. ``start`` and ``wait`` split one in two functions, so that other work runs between
them, in backward too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core.autograd import called, direct
from tritoncomm.core.call import enter
from tritoncomm.core.ops import reinterpreted
from tritoncomm.core.rows import RowRoutes, RowsInFlight, start_to_ranks, start_to_tokens, sum_of_ranks
from tritoncomm.experts.listed_rows import dense_rows, wide_of
from tritoncomm.record import Span

__all__ = ["RowsCall", "move_rows", "start_rows"]


class RowsCall(NamedTuple):
    """One exchange of rows, forward or backward.

    Attributes:
        names: of the call and of its backward.
        is_return: whether rows go back to the ranks of their tokens, and are added up there.
        is_apart: whether the start and the wait are calls of their own.
    """

    routes: RowRoutes
    group: ProcessGroup
    names: tuple[str, str]
    is_return: bool
    is_apart: bool

    def reversed(self) -> "RowsCall":
        """Return the call of the backward."""
        return self._replace(names=(self.names[1], self.names[1]), is_return=not self.is_return)


class StartedRows:
    """Rows between their start and their wait.

    Attributes:
        rows: None before the start, and after the wait.
        gradients: rows that the backward of the wait has started, for the backward of the start.
    """

    __slots__ = ("gradients", "rows")

    def __init__(self) -> None:
        self.rows: RowsInFlight | None = None
        self.gradients: StartedRows | None = None


def move_rows(call: RowsCall, *tensors: Tensor, span: Span | None = None) -> tuple[Tensor, ...]:
    """Send rows of tensors, and wait for those that arrive; see ``_Move``."""
    return _Move.apply(call, span, *tensors)


def start_rows(call: RowsCall, *tensors: Tensor, span: Span | None = None) -> Callable[[], tuple[Tensor, ...]]:
    """Start what ``move_rows`` does, and return a function that waits for it."""
    started = StartedRows()
    token = _Start.apply(started, call, span, *tensors)
    return partial(_Wait.apply, started, call, token)


@direct
class _Move(Function):
    """Forward: rows to the ranks that need them, or back to the ranks of their tokens. Backward: the other way."""

    @staticmethod
    def forward(ctx: Any, call: RowsCall, span: Span | None, *tensors: Tensor) -> Any:
        _save(ctx, call, len(tensors))
        span = span or _entered(call, tensors)
        rows = _started(call, tensors)
        rows.wait()
        results = _results(call, rows)
        span.end(rows.path, rows.copied, rows.nbytes)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        gradients = grads[:2]  # ids have no gradient
        sums = called(_Move, _loaded(ctx).reversed(), None, *gradients)
        return None, None, *sums, *[None] * (len(grads) - len(gradients))


@direct
class _Start(Function):
    """Forward: start the rows of ``_Move``; an empty tensor stands for them. Backward: wait for their gradients."""

    @staticmethod
    def forward(ctx: Any, started: StartedRows, call: RowsCall, span: Span | None, *tensors: Tensor) -> Any:
        _save(ctx, call, len(tensors))
        ctx.started = started
        span = span or _entered(call, tensors)
        started.rows = rows = _started(call, tensors)
        span.end(rows.path, rows.copied, rows.nbytes)
        return tensors[0].new_empty(0, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, token: Tensor) -> Any:
        sums = called(_Wait, ctx.started.gradients, _loaded(ctx).reversed(), token)
        return None, None, None, *sums, *[None] * (ctx.number - len(sums))


@direct
class _Wait(Function):
    """Forward: wait for the rows of ``_Start``. Backward: start their gradients."""

    @staticmethod
    def forward(ctx: Any, started: StartedRows, call: RowsCall, token: Tensor) -> Any:
        rows = started.rows
        assert rows is not None
        rows.wait()
        copied, results = rows.copied, _results(call, rows)
        started.rows = None
        if rows.copied != copied:  # what the start has not counted
            record.add(call.names[0], rows.path, rows.copied - copied, 0, calls=0)
        _save(ctx, call, len(results))
        ctx.started = started
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.started.gradients = StartedRows()
        gradients = grads[:2]  # ids have no gradient
        return None, None, called(_Start, ctx.started.gradients, _loaded(ctx).reversed(), None, *gradients)


def _save(ctx: Any, call: RowsCall, number: int) -> None:
    """Save what a backward needs; tensors go with the graph, and where hooks of saved tensors put them."""
    ctx.group, ctx.call, ctx.number = call.group, (call.routes[:3], call.names, call.is_return, call.is_apart), number
    ctx.save_for_backward(call.routes.tokens, call.routes.index)


def _loaded(ctx: Any) -> RowsCall:
    """Return the call that ``_save`` saved."""
    counts, *how = ctx.call
    return RowsCall(RowRoutes(*counts, *ctx.saved_tensors), ctx.group, *how)


def _entered(call: RowsCall, tensors: Sequence[Tensor]) -> Span:
    """Enter a call, and return its span."""
    routes, kind, arguments = call.routes, "to_ranks", (None,)
    if call.is_return:
        kind, arguments = "to_tokens", (routes.send_counts, routes.recv_counts)  # rows come back from where they went
    return enter(call.names[0], kind, call.group, tensors, arguments) or Span(call.names[0])


def _started(call: RowsCall, tensors: Sequence[Tensor]) -> RowsInFlight:
    """Start the all-to-all of a call."""
    start = start_to_tokens if call.is_return else start_to_ranks
    if len(tensors) == 3:
        # Weights and ids are so short that one gather of both takes half of the time of two.
        x, weights, ids = tensors
        tensors = x, torch.cat([reinterpreted(weights, torch.uint8), reinterpreted(ids, torch.uint8)], 1)
    return start([dense_rows(x) for x in tensors], call.routes, call.group, call.names[0], call.is_apart)


def _results(call: RowsCall, rows: RowsInFlight) -> tuple[Tensor, ...]:
    """Return the results of a call once its rows have arrived."""
    if call.is_return:
        return tuple(sum_of_ranks(rows, call.routes))
    if len(rows.columns) != 2 or rows.columns[1].dtype is not torch.uint8:
        return tuple(rows.columns)
    x, tail = rows.columns
    wide = wide_of(x.dtype)
    size = tail.shape[1] // (wide.itemsize + 4) * wide.itemsize  # ids are int32
    # Ids live as long as the rows. A backward may keep weights, and a view of them would keep the whole buffer.
    return x, reinterpreted(tail[:, :size], wide), tail[:, size:].view(torch.int32)
