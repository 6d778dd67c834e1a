"""Rows that travel by indices: each rank sends rows of its tensors to the ranks that need them, and gets them back.

A row of the wire holds a row of every tensor, side by side. Rows that this rank needs itself never enter a wire.
"""

from collections.abc import Sequence
from itertools import zip_longest
from types import ModuleType
from typing import NamedTuple

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import torch_path

from tritoncomm.core.backend import Work, released
from tritoncomm.core.exchange import all_to_all
from tritoncomm.core.memory import empty, fills_storage, version_of
from tritoncomm.core.ops import path_for
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError
from tritoncomm.record import CopyPath

__all__ = [
    "RowRoutes",
    "RowsInFlight",
    "WireRow",
    "exchange_counts",
    "row_passes",
    "start_to_ranks",
    "start_to_tokens",
    "sum_of_ranks",
    "wire_row",
]

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
    """Passes over rows by indices, and sorts of ids, on one path; ``kernels`` is the module that has them."""

    path: CopyPath
    kernels: ModuleType


def row_passes(x: Tensor) -> RowPasses:
    """Return the passes for a tensor: by kernels, or by torch."""
    path = path_for(x, "rows")
    return RowPasses(path, kernels if path == "triton" else torch_path)


def exchange_counts(counts: Tensor, group: ProcessGroup, name: str) -> None:
    """Send row w of ``counts[0]`` to rank w, and receive the ranks' rows for this one in ``counts[1]``."""
    all_to_all(counts[0], send_counts=(), recv_counts=(), group=group, name=name, recv_wire=counts[1])


class RowsInFlight:
    """Rows of tensors between the start and the wait of their all-to-all.

    Attributes:
        columns: for each tensor the rows of this rank, columns of one buffer: from the other ranks in rank order, then
            its own. Rows of other ranks are undefined until ``wait()``.
        behind: for each tensor this rank's own rows, if they are not in ``columns``; else empty.
        path, copied, nbytes: path of the passes, and the bytes that they copied and that the all-to-all sends.
    """

    __slots__ = (
        "_is_apart", "_name", "_source", "_version", "_wire", "_work", "behind", "columns", "copied", "nbytes", "path",
    )  # fmt: skip

    def __init__(
        self, columns: list[Tensor], work: Work, wire: Tensor, is_apart: bool, path: CopyPath, copied: int
    ) -> None:
        self.columns, self._work, self._wire, self._is_apart = columns, work, wire, is_apart
        self.behind: Sequence[Tensor] = ()
        self.path: CopyPath = path
        self.copied, self.nbytes = copied, wire.nbytes
        self._source: Tensor | None = None

    def watch(self, source: Tensor, name: str) -> None:
        """Raise in ``wait()`` if ``source``, the tensor that is sent, has changed in place until then."""
        self._source, self._version, self._name = source, version_of(source), name

    def wait(self) -> list[Tensor]:
        """Wait for the rows of other ranks, and return ``columns``: the rows of each tensor that was sent.

        Raises:
            ArgumentError: the tensor that is sent has changed in place.
        """
        if self._work is not None:
            self._work.wait()
            self._work = None  # only after a wait that succeeds: a second wait for failed work fails as well
        if self._is_apart:  # the current stream may be another than the stream of the start
            released((self.columns[0], self._wire))
        if self._source is not None and version_of(self._source) != self._version:
            raise ArgumentError(
                f"{self._name}: the rows have changed in place before wait(), so that other ranks may have got either "
                "value; change them after wait(), or a copy"
            )
        return self.columns


def start_to_ranks(
    tensors: Sequence[Tensor], routes: RowRoutes, group: ProcessGroup, name: str, is_apart: bool
) -> RowsInFlight:
    """Start to send rows of tensors ``[rows, ...]`` to the ranks that need them.

    Args:
        is_apart: whether the caller runs other work before the wait.
    """
    path, passes = row_passes(tensors[0])
    starts, width = wire_row([x.shape[1] * x.itemsize for x in tensors])
    num_send, num_recv = sum(routes.send_counts), sum(routes.recv_counts)
    wire = _buffer(tensors[0], num_send, width)
    buffer = _buffer(tensors[0], num_recv + routes.local, width)
    remote_rows, own_rows_place = buffer.split_with_sizes((num_recv, routes.local))
    remote_index, own_index = routes.tokens.split_with_sizes((num_send, routes.local))
    copied = 0
    # This rank's own rows are copied while the all-to-all runs. A wait that is apart may run on another stream, which
    # it orders behind the all-to-all only: then the copy comes first, so that the all-to-all is behind it.
    if is_apart:
        copied += _gather(passes, tensors, own_index, _views(own_rows_place, tensors, starts))
    copied += _gather(passes, tensors, remote_index, _views(wire, tensors, starts))
    work = all_to_all(wire, routes.send_counts, routes.recv_counts, group, name, remote_rows, asynchronous=True).work
    if not is_apart:
        copied += _gather(passes, tensors, own_index, _views(own_rows_place, tensors, starts))
    return RowsInFlight(_views(buffer, tensors, starts), work, wire, is_apart, path, copied)


def _gather(passes: ModuleType, tensors: Sequence[Tensor], index: Tensor, columns: Sequence[Tensor]) -> int:
    """Gather rows of each tensor into its columns; return the bytes copied."""
    return sum([passes.gather_rows(x, index, column) for x, column in zip(tensors, columns, strict=True)])


def start_to_tokens(
    tensors: Sequence[Tensor], routes: RowRoutes, group: ProcessGroup, name: str, is_apart: bool
) -> RowsInFlight:
    """Start to send the rows of a buffer back to the ranks that they came from; see ``sum_of_ranks``.

    Args:
        is_apart: whether the caller runs other work before the wait.
    """
    path, _ = row_passes(tensors[0])
    starts, width = wire_row([x.shape[1] * x.itemsize for x in tensors])
    num_send, num_recv = sum(routes.recv_counts), sum(routes.send_counts)
    parts, copied = [x.split_with_sizes((num_send, routes.local)) for x in tensors], 0
    first = tensors[0]
    is_wire = len(tensors) == 1 and first.is_contiguous() and first.shape[1] * first.itemsize == width
    # A caller that runs other work before the wait may write to its rows, which the version of the tensor shows. All
    # views of a storage share one version, which writes to other parts raise as well: so a part of a storage is copied.
    source = first if is_wire and (not is_apart or fills_storage(first)) else None
    if source is not None:
        wire = parts[0][0].view(torch.uint8)
    else:
        wire = _buffer(tensors[0], num_send, width)
        copied += _copy([remote_part for remote_part, _ in parts], _views(wire, tensors, starts))
    own_rows = [own_part for _, own_part in parts]
    # This rank's own rows are not sent. Kernels read them where they are. They are copied behind the received rows for
    # torch's path, which sums one buffer, and for a wait that is apart, before which the caller may change them.
    is_copied = path == "torch" or is_apart
    buffer = _buffer(wire, num_recv + routes.local * is_copied, width)
    remote_rows, own_place = buffer.split_with_sizes((num_recv, len(buffer) - num_recv))
    targets = _views(own_place, tensors, starts) if is_copied else []
    if is_apart:
        copied += _copy(own_rows, targets)
    work = all_to_all(wire, routes.recv_counts, routes.send_counts, group, name, remote_rows, asynchronous=True).work
    if is_copied and not is_apart:
        copied += _copy(own_rows, targets)
    rows = RowsInFlight(_views(buffer, tensors, starts), work, wire, is_apart, path, copied)
    rows.behind = [] if is_copied else own_rows
    if is_apart and source is not None:
        rows.watch(source, name)
    return rows


def _copy(tensors: Sequence[Tensor], columns: Sequence[Tensor]) -> int:
    """Copy each tensor into its columns; return the bytes copied."""
    for x, column in zip(tensors, columns, strict=True):
        column.copy_(x)
    return 2 * sum([x.nbytes for x in tensors])


def sum_of_ranks(rows: RowsInFlight, routes: RowRoutes) -> list[Tensor]:
    """Add up the rows of ``start_to_tokens`` that are of one row, in rank order: the adjoint of ``start_to_ranks``.

    The sum is fp32 (fp64 for fp64), with one rounding at the end.
    """
    passes, results = row_passes(rows.columns[0]).kernels, []
    for column, behind in zip_longest(rows.columns, rows.behind):
        results.append(column.new_empty(routes.index.shape[0], column.shape[1]))
        rows.copied += passes.sum_rows(column, routes.index, weights=None, out=results[-1], behind=behind)
    return results


class WireRow(NamedTuple):
    """First byte of each tensor's columns in a row of a wire, and the bytes of a row."""

    starts: list[int]
    width: int


def wire_row(row_bytes: Sequence[int]) -> WireRow:
    """Return the columns of a wire for rows of so many bytes per tensor, each aligned to 8 bytes, and rows to 16."""
    starts, width = [], 0
    for nbytes in row_bytes:
        starts.append(-(-width // 8) * 8)
        width = starts[-1] + nbytes
    # Rows of no columns have a byte too, so that every row of a wire starts where its elements are aligned.
    return WireRow(starts, -(-max(width, 1) // _ALIGNMENT) * _ALIGNMENT)


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
