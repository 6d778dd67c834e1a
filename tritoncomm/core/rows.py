"""Rows that travel by indices: each rank sends rows of its tensors to the ranks that need them, and gets them back.

A row of the wire holds a row of every tensor, side by side. Rows that this rank needs itself never enter a wire.
"""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import torch_path

from tritoncomm.core.exchange import Exchange, StartedExchange
from tritoncomm.core.memory import empty
from tritoncomm.core.ops import path_for
from tritoncomm.core.plan import Ints
from tritoncomm.record import CopyPath, Span

__all__ = ["RowRoutes", "exchange_counts", "row_passes", "to_ranks", "to_tokens"]

_ALIGNMENT = 16  # bytes: the widest access of a kernel


class RowRoutes(NamedTuple):
    """Ranks to which the rows of tensors go.

    A buffer of rows has the rows to or from other ranks, in rank order, and then those that stay on this rank.

    Attributes:
        send_counts, recv_counts: rows to and from each rank, 0 for this one.
        local: number of rows that stay on this rank.
        tokens: ``[sum(send_counts) + local]``, the row of the tensors for each row of the buffer that is sent.
        index: ``[rows, slots]``, the rows of that buffer for each row of the tensors, in rank order; an index past the
            buffer's end is none.
    """

    send_counts: Ints
    recv_counts: Ints
    local: int
    tokens: Tensor
    index: Tensor


class RowPasses(NamedTuple):
    """Passes over rows by indices on one path; ``kernels`` has the functions of the four kernels."""

    path: CopyPath
    kernels: ModuleType


def row_passes(x: Tensor) -> RowPasses:
    """Return the passes for a tensor: by kernels, or by torch."""
    path = path_for(x, "rows")
    return RowPasses(path, kernels if path == "triton" else torch_path)


def exchange_counts(counts: Tensor, group: ProcessGroup, name: str) -> Tensor:
    """Send row w of ``counts``, ``[world, any]``, to rank w; return the ranks' rows for this one, on the device."""
    return Exchange(shapes=[tuple(counts.shape)]).start([counts], group, name, None, False).received


def to_ranks(tensors: Sequence[Tensor], routes: RowRoutes, group: ProcessGroup, span: Span) -> list[Tensor]:
    """Send rows of tensors ``[rows, ...]`` to the ranks that need them, and end the span of the call.

    Returns for each tensor the rows for this rank, columns of one buffer: from the other ranks in rank order, then its
    own.
    """
    path, passes = row_passes(tensors[0])
    starts, width = _columns(tensors)
    sent, received = sum(routes.send_counts), sum(routes.recv_counts)
    wire = _buffer(tensors[0], sent, width)
    buffer = _buffer(tensors[0], received + routes.local, width)
    arriving, kept = buffer.split_with_sizes((received, routes.local))
    copied, (leaving, staying) = 0, routes.tokens.split_with_sizes((sent, routes.local))
    for x, column in zip(tensors, _views(wire, tensors, starts), strict=True):
        copied += passes.gather_rows(x, leaving, column)
    started = _start(wire, arriving, routes.send_counts, routes.recv_counts, group, span)
    for x, column in zip(tensors, _views(kept, tensors, starts), strict=True):
        copied += passes.gather_rows(x, staying, column)
    if started.work is not None:
        started.work.wait()
    span.end(path, copied, wire.nbytes)
    return _views(buffer, tensors, starts)


def to_tokens(tensors: Sequence[Tensor], routes: RowRoutes, group: ProcessGroup, span: Span) -> list[Tensor]:
    """Send the rows of a buffer back, add up those of one row in rank order, and end the span: the adjoint of
    ``to_ranks``.

    The sum is fp32 (fp64 for fp64), with one rounding at the end.
    """
    path, passes = row_passes(tensors[0])
    starts, width = _columns(tensors)
    sent, received = sum(routes.recv_counts), sum(routes.send_counts)
    parts, copied = [x.split_with_sizes((sent, routes.local)) for x in tensors], 0
    if len(tensors) == 1 and tensors[0].is_contiguous() and tensors[0].shape[1] * tensors[0].itemsize == width:
        wire = parts[0][0].view(torch.uint8)
    else:
        wire = _buffer(tensors[0], sent, width)
        for (leaving, _), column in zip(parts, _views(wire, tensors, starts), strict=True):
            column.copy_(leaving)
            copied += 2 * leaving.nbytes
    buffer = _buffer(wire, received + routes.local, width)
    arriving, kept = buffer.split_with_sizes((received, routes.local))
    started = _start(wire, arriving, routes.recv_counts, routes.send_counts, group, span)
    for (_, staying), column in zip(parts, _views(kept, tensors, starts), strict=True):
        column.copy_(staying)
        copied += 2 * staying.nbytes
    if started.work is not None:
        started.work.wait()
    results = []
    for x, column in zip(tensors, _views(buffer, tensors, starts), strict=True):
        results.append(x.new_empty(routes.index.shape[0], x.shape[1]))
        copied += passes.sum_rows(column, routes.index, None, results[-1])
    span.end(path, copied, wire.nbytes)
    return results


def _start(wire: Tensor, received: Tensor, send: Ints, recv: Ints, group: ProcessGroup, span: Span) -> StartedExchange:
    """Start the all-to-all of rows of a wire; over one rank there is nothing to send."""
    exchange = Exchange(send_counts=send, recv_counts=recv, bytes_sent=wire.nbytes)
    if group.size() == 1:
        return StartedExchange(received, None, wire, "view", 0)
    return exchange.start([wire], group, span.name, received)


class _WireRow(NamedTuple):
    """First byte of each tensor's columns in a row of a wire, and the bytes of a row."""

    starts: list[int]
    width: int


def _columns(tensors: Sequence[Tensor]) -> _WireRow:
    """Return the columns of a wire for rows of these tensors, each aligned to 8 bytes, and rows to 16."""
    starts, width = [], 0
    for x in tensors:
        starts.append(-(-width // 8) * 8)
        width = starts[-1] + x.shape[1] * x.itemsize
    # Rows of no columns have a byte too, so that every row of a wire starts where its elements are aligned.
    return _WireRow(starts, -(-max(width, 1) // _ALIGNMENT) * _ALIGNMENT)


def _buffer(like: Tensor, rows: int, width: int) -> Tensor:
    """Allocate rows of ``width`` bytes."""
    return empty(like, (rows, width), (width, 1), torch.uint8)


def _views(wire: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """Return the columns of each tensor as views of a wire."""
    views = []
    for x, start in zip(tensors, starts, strict=True):
        typed = wire.view(x.dtype)
        if typed.shape[1] != x.shape[1]:
            typed = typed.narrow(1, start // x.itemsize, x.shape[1])
        views.append(typed)
    return views
