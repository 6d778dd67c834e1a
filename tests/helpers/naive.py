"""The kernels' copies and sums by their definitions, one element at a time, at addresses that are counted here.

Nothing is shared with the package: a fault in its layouts, tables, checks or dtypes is none here. Tensors are on the
CPU; arguments are those of the kernels, and are taken to be right. Results are the bytes read plus written.
"""

from collections.abc import Iterable, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "copy_segments",
    "dot_rows",
    "gather_rows",
    "gather_segments",
    "here",
    "pack",
    "reduce",
    "scale_dot_rows",
    "scale_rows",
    "scatter_rows",
    "scatter_segments",
    "sum_rows",
    "unpack",
]

Move = tuple[int, list[int]]
"""Byte address of an element that is written, and those of the elements that it is the sum of; none: zero."""
Side = tuple[Tensor, torch.dtype]
"""Memory that is read or written, and the dtype of the elements there, which is not the tensor's where it is bytes."""


def here(x: Tensor) -> Tensor:
    """A copy on the CPU of the whole memory of ``x``, with its layout in it."""
    memory = x.untyped_storage().cpu().clone()  # on a stub of the driver the memory of a GPU is the CPU's
    return torch.empty(0, dtype=x.dtype).set_(memory, x.storage_offset(), x.shape, x.stride())


def pack(rows: Tensor, wire: Tensor, scale: float | None = None, *, sizes: Sequence[int] | None = None) -> int:
    places = _places(rows, wire, sizes)
    moves = [(at, [element]) for element, at in places]
    if sizes is None:
        filled = {at for at, _ in moves}
        moves += [(at, []) for at in _addresses(wire) if at not in filled]
    return _write(moves, (wire, wire.dtype), (rows, rows.dtype), scale)


def unpack(
    wire: Tensor, rows: Tensor, scale: float | None = None, *, accumulate: bool = False,
    sizes: Sequence[int] | None = None,
) -> int:  # fmt: skip
    moves = [(element, [at]) for element, at in _places(rows, wire, sizes)]
    return _write(moves, (rows, rows.dtype), (wire, wire.dtype), scale, accumulate)


def reduce(wire: Tensor, out: Tensor, scale: float | None = None) -> int:
    moves = [
        (_address(out, (k,)), [_address(wire, (part, k)) for part in range(wire.shape[0])]) for k in range(out.shape[0])
    ]
    return _write(moves, (out, out.dtype), (wire, wire.dtype), scale, sums=True)


def gather_segments(tensors: Sequence[Tensor], wire: Tensor, segments: Any, *, scale: float | None = None) -> int:
    start, copied = wire.storage_offset() * wire.itemsize, 0
    for tensor, offset, rows, row, stride, at, step in segments.segments:
        size = 1 if tensor < 0 else segments.dtypes[tensor].itemsize
        moves: list[Move] = []
        for r, k in product(range(rows), range(row)):
            place = start + at + (r * (step or row) + k) * size
            if tensor < 0:
                moves.append((place, []))
            else:
                x = tensors[tensor]
                moves.append((place, [(x.storage_offset() + offset + r * stride + k) * x.itemsize]))
        if tensor < 0:
            copied += _write(moves, (wire, torch.uint8), (wire, torch.uint8))
        else:
            x = tensors[tensor]
            copied += _write(moves, (wire, segments.dtypes[tensor]), (x, x.dtype), scale)
    return copied


def scatter_segments(
    wire: Tensor,
    tensors: Sequence[Tensor],
    segments: Any,
    *,
    scale: float | None = None,
    accumulate: bool = False,
    sums: bool = False,
) -> int:
    """Segments with the same rows of a tensor are parts of a sum where ``sums`` says so, which no table has else."""
    start, copied = wire.storage_offset() * wire.itemsize, 0
    parts: dict[int, dict[int, list[int]]] = {}  # by tensor and address there, the places in the wire
    for tensor, offset, rows, row, stride, at, step in segments.segments:
        if tensor < 0:
            continue
        x, size = tensors[tensor], segments.dtypes[tensor].itemsize
        for r, k in product(range(rows), range(row)):
            element = (x.storage_offset() + offset + r * stride + k) * x.itemsize
            place = start + at + (r * (step or row) + k) * size
            parts.setdefault(tensor, {}).setdefault(element, []).append(place)
    for tensor, by_element in parts.items():
        x, dtype = tensors[tensor], segments.dtypes[tensor]
        for count in {len(places) for places in by_element.values()}:
            moves = [move for move in by_element.items() if len(move[1]) == count]
            copied += _write(moves, (x, x.dtype), (wire, dtype), scale, accumulate, sums=count > 1)
    return copied


def copy_segments(tensors: Sequence[Tensor], targets: Sequence[Tensor], copies: Any) -> int:
    copied = 0
    for tensor, offset, rows, row, stride, at, step in copies.segments:
        x, y = tensors[tensor], targets[tensor]
        moves: list[Move] = []
        for r, k in product(range(rows), range(row)):
            place = (y.storage_offset() + r * (step or row) + k) * y.itemsize + at
            moves.append((place, [(x.storage_offset() + offset + r * stride + k) * x.itemsize]))
        copied += _write(moves, (y, y.dtype), (x, x.dtype))
    return copied


def gather_rows(x: Tensor, index: Tensor, out: Tensor) -> int:
    moves: list[Move] = []
    for i, row in enumerate(index.tolist()):
        for rest in np.ndindex(*x.shape[1:]):
            is_row = 0 <= row < x.shape[0]
            moves.append((_address(out, (i, *rest)), [_address(x, (row, *rest))] if is_row else []))
    _write(moves, (out, out.dtype), (x, x.dtype))
    return (2 * out.numel() * out.itemsize + index.numel() * index.itemsize) if moves else 0


def scatter_rows(x: Tensor, index: Tensor, out: Tensor) -> int:
    moves: list[Move] = []
    for i, row in enumerate(index.tolist()):
        if 0 <= row < out.shape[0]:
            for rest in np.ndindex(*x.shape[1:]):
                moves.append((_address(out, (row, *rest)), [_address(x, (i, *rest))]))
    _write(moves, (out, out.dtype), (x, x.dtype))
    return (2 * x.numel() * x.itemsize + index.numel() * index.itemsize) if x.numel() else 0


@np.errstate(all="ignore")
def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None, out: Tensor, behind: Tensor | None = None) -> int:
    x, wide = x if behind is None else torch.cat([x, behind]), _wide(x, out)
    for i, places in enumerate(index.tolist()):
        total = np.zeros(x.shape[1], wide)
        for s, at in enumerate(places):
            if 0 <= at < len(x):
                part = _numpy(x[at], wide)
                total = total + (part if weights is None else part * _numpy(weights[i, s], wide))
        out[i] = torch.from_numpy(total).to(out.dtype)
    read = index.numel() * (x.shape[1] * x.itemsize + index.itemsize)
    return read + out.nbytes + (0 if weights is None else weights.nbytes)


def scale_dot_rows(x: Tensor, y: Tensor, pair: Tensor, weights: Tensor, scaled: Tensor, out: Tensor) -> int:
    twice = len(pair) * (x.shape[1] * x.itemsize + pair.itemsize)  # read by both
    return scale_rows(x, pair, weights, scaled) + dot_rows(x, y, pair, out) - twice


@np.errstate(all="ignore")
def scale_rows(x: Tensor, pair: Tensor, weights: Tensor, out: Tensor) -> int:
    wide, slots = _wide(x, out), weights.shape[1]
    for j, at in enumerate(pair.tolist()):
        out[j] = 0
        if 0 <= at < weights.numel():
            row = _numpy(x[at // slots], wide) * _numpy(weights[at // slots, at % slots], wide)
            out[j] = torch.from_numpy(row).to(out.dtype)
    return len(pair) * (x.shape[1] * (x.itemsize + out.itemsize) + pair.itemsize + weights.itemsize)


@np.errstate(all="ignore")
def dot_rows(x: Tensor, y: Tensor, pair: Tensor, out: Tensor) -> int:
    wide, slots, row = _wide(x, y), out.shape[1], x.shape[1]
    for j, at in enumerate(pair.tolist()):
        if 0 <= at < out.numel():
            partial = np.zeros(1024, wide)
            products = _numpy(x[at // slots], wide) * _numpy(y[j], wide)
            for start in range(0, row, 1024):
                part = products[start : start + 1024]
                partial[: len(part)] += part
            while len(partial) > 1:
                partial = partial[0::2] + partial[1::2]
            out[at // slots, at % slots] = float(partial[0])
    return len(pair) * (row * (x.itemsize + y.itemsize) + pair.itemsize + out.itemsize)


def _wide(x: Tensor, y: Tensor) -> Any:
    return np.float64 if torch.float64 in (x.dtype, y.dtype) else np.float32


def _numpy(x: Tensor, wide: Any) -> Any:
    return x.to(torch.float64 if wide is np.float64 else torch.float32).numpy()


def _places(rows: Tensor, wire: Tensor, sizes: Sequence[int] | None) -> Iterable[tuple[int, int]]:
    """Byte addresses of every element of the rows, in the tensor and in the wire."""
    lead, row = rows.shape[:-1], rows.shape[-1]
    outer = int(np.prod(lead)) if lead else 1
    for o, index in enumerate(np.ndindex(*lead)):
        for k in range(row):
            if sizes is None:
                rank, inside = divmod(k, wire.shape[2])
                place = _address(wire, (rank, o, inside))
            else:
                rank, first = 0, 0
                while k >= first + sizes[rank]:
                    first += sizes[rank]
                    rank += 1
                place = _address(wire, (outer * first + o * sizes[rank] + k - first,))
            yield _address(rows, (*index, k)), place


def _address(x: Tensor, index: Sequence[int]) -> int:
    """Byte of the memory of ``x`` at which an element begins."""
    at = int(x.storage_offset())
    for i, step in zip(index, x.stride(), strict=True):
        at += i * step
    return at * x.itemsize


def _addresses(x: Tensor) -> list[int]:
    return [_address(x, index) for index in np.ndindex(*x.shape)]


def _memory(x: Tensor) -> np.ndarray:
    """All bytes of the memory of ``x``."""
    return torch.empty(0, dtype=torch.uint8).set_(x.detach().untyped_storage()).numpy()


def _read(x: Tensor, at: Iterable[int], dtype: torch.dtype) -> Tensor:
    """The elements that begin at these bytes."""
    every = np.asarray([*at], np.int64)[:, None] + np.arange(dtype.itemsize)
    return torch.from_numpy(_memory(x)[every].reshape(-1)).view(dtype)


def _write(
    moves: Sequence[Move], target: Side, source: Side, scale: float | None = None, add: bool = False, sums: bool = False
) -> int:
    """Write every element that moves name: its part, or with arithmetic in the wide type and one rounding at the end.

    All moves have as many parts, or none.
    """
    (to, narrow), (x, dtype) = target, source
    filled, zeros = [move for move in moves if move[1]], [at for at, parts in moves if not parts]
    memory, inside = _memory(to), np.arange(narrow.itemsize)
    for at in zeros:
        memory[at : at + narrow.itemsize] = 0
    written = len(moves) * narrow.itemsize
    if not filled:
        return written
    places = np.asarray([at for at, _ in filled], np.int64)
    read = [_read(x, parts, dtype) for parts in zip(*(parts for _, parts in filled), strict=True)]
    total = read[0]
    if dtype is not narrow or scale is not None or add or sums:
        wide = (
            torch.float64 if torch.float64 in (dtype, narrow) else torch.float32 if dtype.is_floating_point else dtype
        )
        total = total.to(wide)
        for part in read[1:]:
            total = total + part.to(wide)
        if scale is not None:
            total = total * torch.tensor(scale, dtype=wide)
        if add:
            total = _read(to, places.tolist(), narrow).to(wide) + total
            written += len(filled) * narrow.itemsize
        if wide is torch.float64 and narrow.itemsize == 2:
            total = total.float()
        total = total.to(narrow)
    memory[places[:, None] + inside] = total.view(torch.uint8).numpy().reshape(-1, narrow.itemsize)
    return written + len(read) * len(filled) * dtype.itemsize
