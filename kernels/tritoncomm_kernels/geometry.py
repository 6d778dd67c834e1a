"""The address map of one call in integers, checked: shared by pack and unpack on every path."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncomm_kernels.dtypes import wide_type

Ints = tuple[int, ...]
MAX_PARTS = 64
MAX_IDS = 64  # ids of a token
OWNER_COUNTS = 4
DOT_LANES = 1024  # partial sums of a dot product, by the element modulo this: the order of addition follows from it


class TooLargeError(ValueError):
    """More units than the kernels' 32-bit integers can count; plain torch has no such limit."""


@dataclass(frozen=True)
class Geometry:
    """``rows[o, starts[w] + k] <-> block w of the wire[o, k]``; all numbers in elements.

    Attributes:
        run: elements of a row that go to one rank (0 when sizes are given).
        starts: where each rank's part of a row starts, and the end of the row; None without sizes.
        dims, strides: sizes and strides of the outer dims after neighbours that one stride can walk were coalesced; at
            least one dim.
        stride_element: stride inside a row.
        stride_rank: stride between ranks (0 when sizes are given).
        cells: elements of the wire.
    """

    outer: int
    row: int
    run: int
    world: int
    starts: Ints | None
    dims: Ints
    strides: Ints
    stride_element: int
    stride_rank: int
    cells: int


@lru_cache(maxsize=4096)
def geometry_of(
    name: str, shape: Ints, stride: Ints, wire_shape: Ints, wire_stride: Ints, sizes: Ints | None, target: str
) -> Geometry:
    """Check that rows and wire describe one split and return it; ``target`` names the side that is written."""
    if not shape:
        raise ValueError(f"{name}: rows must have a dim")
    outer, row = math.prod(shape[:-1]), shape[-1]
    if sizes is None:
        world, run = _even(name, outer, row, wire_shape, wire_stride, target)
        starts = None
        stride_rank = wire_stride[0] if world > 1 else 0
    else:
        world, run, stride_rank = len(sizes), 0, 0
        starts = _uneven(name, outer, row, wire_shape, wire_stride, sizes)
    # Rows that are written must not overlap. The wire was checked above.
    if target == "rows" and any(size > 1 and step == 0 for size, step in zip(shape, stride, strict=True)):
        raise ValueError(f"{name}: rows {tuple(shape)} with strides {stride} overlap and cannot be written")
    dims, strides = coalesce(shape[:-1], stride[:-1])
    step = stride[-1] if row > 1 else 1
    return Geometry(outer, row, run, world, starts, dims, strides, step, stride_rank, math.prod(wire_shape))


def _even(name: str, outer: int, row: int, shape: Ints, stride: Ints, target: str) -> tuple[int, int]:
    """Return (world, run) of a wire ``[world, outer, run]``; reject a wire that does not fit the rows."""
    if len(shape) != 3 or shape[0] < 1 or shape[1] != outer or shape[0] * shape[2] < row:
        raise ValueError(f"{name}: wire {tuple(shape)} is no [world, outer, run] for {outer} rows of {row} elements")
    world, _, run = shape
    if (run > 1 and stride[2] != 1) or (outer > 1 and run and stride[1] != run):
        raise ValueError(f"{name}: every [outer, run] block of wire must be contiguous, not {tuple(shape)} by {stride}")
    if target == "wire" and world > 1 and outer and stride[0] < outer * run:
        raise ValueError(f"{name}: ranks {stride[0]} elements apart overlap in wire {tuple(shape)}")
    return world, run


def _uneven(name: str, outer: int, row: int, shape: Ints, stride: Ints, sizes: Ints) -> Ints:
    """Return where each rank's part of a row starts, then the row's end; reject sizes or a wire that do not fit."""
    if not sizes or min(sizes) < 0 or sum(sizes) != row:
        raise ValueError(f"{name}: sizes {list(sizes)} do not add up to rows of {row} elements")
    if len(shape) != 1 or shape[0] != outer * row or (shape[0] > 1 and stride[0] != 1):
        raise ValueError(f"{name}: wire with sizes must be flat and contiguous with {outer}*{row} elements")
    return tuple(accumulate(sizes, initial=0))


def coalesce(shape: Sequence[int], stride: Sequence[int]) -> tuple[Ints, Ints]:
    """Coalesce neighbouring dims that one stride can walk; at least one dim remains.

    Example:
        shape (2, 3, 4) by (36, 12, 1) gives (6, 4) by (12, 1).
    """
    merged: list[tuple[int, int]] = []
    for size, step in zip(shape, stride, strict=True):
        if size == 1:
            continue
        if merged and merged[-1][1] == size * step:
            merged[-1] = (merged[-1][0] * size, step)
        else:
            merged.append((size, step))
    merged = merged or [(1, 0)]
    return tuple(size for size, _ in merged), tuple(step for _, step in merged)


def is_contiguous(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether elements lie one after the other; a dim that was expanded, of stride 0, is not contiguous."""
    sizes, steps = coalesce(shape, stride)
    return sizes == (1,) or steps == (1,)


def check_parts(shape: Ints, stride: Ints, out_shape: Ints, out_stride: Ints) -> None:
    """Reject shapes other than ``[world, n]`` and ``[n]`` with contiguous parts."""
    if len(shape) != 2 or not 1 <= shape[0] <= MAX_PARTS or tuple(out_shape) != (shape[1],):
        raise ValueError(f"reduce: wire {tuple(shape)} is no [1..{MAX_PARTS}, n] for out {tuple(out_shape)}")
    if shape[1] > 1 and (stride[1] != 1 or out_stride[0] != 1):
        raise ValueError(
            f"reduce: the parts of wire and out must be contiguous, not strided by {stride} and {out_stride}"
        )


class IndexedRows(NamedTuple):
    """``near[i] <-> far[index[i]]``, in elements.

    Attributes:
        indices: their number.
        limit: number of rows of the indexed tensor.
        stride_far, stride_near: from one row to the next of the indexed tensor, and of the other.
        moved: bytes read plus written where every index is a row.
    """

    indices: int
    limit: int
    row: int
    stride_far: int
    stride_near: int
    itemsize: int
    moved: int


def indexed_rows(name: str, x: Tensor, index: Tensor, out: Tensor) -> IndexedRows:
    """Check that ``gather_rows`` or ``scatter_rows`` can copy rows of ``x`` to ``out`` by this index."""
    dtype, shape, stride = x.dtype, x.shape, x.stride()
    out_dtype, out_shape, out_stride = out.dtype, out.shape, out.stride()
    kind, index_shape = index.dtype, index.shape
    if dtype is not out_dtype or kind not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: {dtype} by {kind} to {out_dtype}: one dtype, and an index of int64 or int32")
    if x.is_conj() or x.is_neg() or out.is_conj() or out.is_neg():
        raise ValueError(f"{name}: a lazy conjugate or negative view must be resolved first")
    if len(index_shape) != 1 or (index_shape[0] > 1 and index.stride(0) != 1):
        raise ValueError(f"{name}: the index must be flat and contiguous, not {tuple(index_shape)} by {index.stride()}")
    (far, near) = (x, out) if name == "gather_rows" else (out, x)  # ``far`` is the indexed tensor
    count, row = index_shape[0], math.prod(shape[1:])
    if not shape or shape[1:] != out_shape[1:] or len(out_shape) != len(shape) or near.shape[0] != count:
        raise ValueError(f"{name}: {count} rows of {tuple(shape)} do not fit into {tuple(out_shape)}")
    for each, strides in ((shape, stride), (out_shape, out_stride)):
        if row and each[0] and strides[1:] != (1,) and not is_contiguous(each[1:], strides[1:]):
            raise ValueError(f"{name}: every row must be contiguous, not {tuple(each)} by {strides}")
    if row and out_shape[0] > 1 and out_stride[0] < row:
        raise ValueError(f"{name}: rows {out_stride[0]} elements apart overlap in out {tuple(out_shape)}")
    limit = far.shape[0]
    stride_far, stride_near = far.stride(0) if limit > 1 else row, near.stride(0) if count > 1 else row
    moved = count * (2 * row * dtype.itemsize + kind.itemsize) if row else 0
    return IndexedRows(count, limit, row, stride_far, stride_near, dtype.itemsize, moved)


class ListedRows(NamedTuple):
    """Rows ``[rows, row]`` of a tensor in lists of ``slots`` places, in elements.

    Attributes:
        lists: number of lists.
        rows: number of rows of the tensor that the lists name, or that name them.
        wide: type of the arithmetic, also of the weights.
    """

    lists: int
    slots: int
    rows: int
    row: int
    wide: torch.dtype


def listed_rows(
    name: str,
    rows: Tensor,
    totals: Tensor,
    index: Tensor,
    weights: Tensor | None,
    slots: Tensor,
    behind: Tensor | None = None,
) -> ListedRows:
    """Check the tensors of ``sum_rows``, ``scale_rows`` and ``dot_rows``.

    Args:
        rows: ``[count, row]``, that are in the lists; read by ``sum_rows``, written by ``scale_rows``.
        totals: ``[lists, row]``, a row for every list; written by ``sum_rows``, read by ``scale_rows``.
        index: ``[lists, slots]`` by list, or ``[count]`` by row.
        weights: ``[lists, slots]``, every list contiguous; None without weights.
        slots: ``[lists, slots]``, the index or the weights, for its shape alone.
        behind: ``[others, row]``, that are in the lists, too.
    """
    list_shape, row_shape = tuple(slots.shape), rows.shape
    if len(list_shape) != 2:
        raise ValueError(f"{name}: lists must be [lists, slots], not {list_shape}")
    num_lists, num_slots = list_shape
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: an index must be int64 or int32, not {index.dtype}")
    if rows.is_neg() or totals.is_neg():
        raise ValueError(f"{name}: a lazy negative view must be resolved first")
    if not index.is_contiguous() or tuple(index.shape) not in (list_shape, row_shape[:1]):
        raise ValueError(f"{name}: the index must be contiguous for {num_lists} lists of {num_slots}, not "
                         f"{tuple(index.shape)} by {index.stride()}")  # fmt: skip
    wide = wide_type(name, rows.dtype, totals.dtype, scaled=True, summed=True)
    assert wide is not None
    if weights is not None and (weights.dtype is not wide or weights.shape != list_shape):
        raise ValueError(
            f"{name}: weights must be {wide} {list(list_shape)}, not {weights.dtype} {list(weights.shape)}"
        )
    if weights is not None and num_slots > 1 and weights.stride(1) != 1:
        raise ValueError(f"{name}: the weights of a list must be contiguous, not strided by {weights.stride()}")
    if not num_slots:
        raise ValueError(f"{name}: lists of no slots")
    for x in (rows, totals, *(() if behind is None else (behind,))):
        has_gaps = x.dim() == 2 and x.stride(1) != 1 and x.shape[1] > 1 and x.shape[0] > 0  # between elements of a row
        if x.dim() != 2 or x.shape[1] != row_shape[1] or has_gaps:
            raise ValueError(f"{name}: rows must be contiguous and equally long, not {tuple(rows.shape)} by "
                             f"{rows.stride()} and {tuple(totals.shape)} by {totals.stride()}")  # fmt: skip
    if behind is not None and (behind.dtype is not rows.dtype or behind.is_neg()):
        raise TypeError(f"{name}: rows are of {rows.dtype} and {behind.dtype}, or a lazy view")
    if totals.shape[0] != num_lists:
        raise ValueError(f"{name}: {num_lists} lists do not fit {tuple(totals.shape)}")
    return ListedRows(lists=num_lists, slots=num_slots, rows=row_shape[0], row=row_shape[1], wide=wide)


class OwnerSort(NamedTuple):
    """Tokens sorted by the owners of their ids, each once for every owner.

    Attributes:
        lines: the sorted tokens; undefined, or no tokens, behind as many as the counts say.
        index: ``[tokens, slots]``, places of each token in the order of its owners; past the places, or negative, for
            fewer owners. Slots are ``min(k, owners)``.
    """

    lines: Tensor
    index: Tensor


class BucketSort(NamedTuple):
    """Ids sorted by bucket; equal ones are in their order.

    Attributes:
        counts: ``[buckets]``, int64, padding included.
        pairs: ``[total]``, numbers ``token*k + slot``; -1 for padding.
        lines: ``[total]``, tokens; -1 likewise.
        index: ``[tokens, k]``, place of each id; past the places, or negative, for an id of no bucket.
    """

    counts: Tensor
    pairs: Tensor
    lines: Tensor
    index: Tensor


def check_ids(name: str, ids: Tensor, counts: Tensor | None = None) -> None:
    """Check the ids of a sort, and the counts of ``sort_by_owner``."""
    if ids.dim() != 2 or not ids.shape[1] or (ids.shape[1] > 1 and ids.stride(1) != 1):
        raise ValueError(f"{name}: ids {tuple(ids.shape)} with strides {ids.stride()} are no [tokens, k] of contiguous "
                         "tokens")  # fmt: skip
    if ids.dtype not in (torch.int64, torch.int32):
        raise TypeError(f"{name}: ids must be int64 or int32, not {ids.dtype}")
    if counts is None:
        return
    if counts.dtype is not torch.int64:
        raise TypeError(f"{name}: counts must be int64, not {counts.dtype}")
    if counts.dim() != 2 or counts.shape[1] != OWNER_COUNTS or not counts.is_contiguous():
        raise ValueError(f"{name}: counts {tuple(counts.shape)} are no contiguous [owners, {OWNER_COUNTS}]")
