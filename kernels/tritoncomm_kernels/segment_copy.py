"""gather_segments and scatter_segments: rows of many tensors to and from one flat wire, in one launch.

Copies see bytes and never dtypes, so that tensors of any dtypes share the launch; each pair of dtypes that are cast is
a launch of its own.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tritoncomm_kernels.config import LANES
from tritoncomm_kernels.device_table import addresses_on
from tritoncomm_kernels.dtypes import checked_scale, scale_argument
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, fits
from tritoncomm_kernels.numerics import INTERPRETED
from tritoncomm_kernels.segment_kernel import BY_VALUE, _segments_kernel
from tritoncomm_kernels.segment_tiles import BLOCKS, divide
from tritoncomm_kernels.segments import PADDING, Layout, Segments, checked_segments, layouts_of

__all__ = ["gather_segments", "scatter_segments"]

_BITS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8)  # behind the units of 16 bytes to 1
_WARPS = 4
_CAST_UNITS = 8 * LANES  # of 16 bytes of the smaller type, or of one element, at a time


def gather_segments(tensors: Sequence[Tensor], wire: Tensor, segments: Segments, *, scale: float | None = None) -> int:
    """Copy the table's rows of the tensors into the wire, scaled where there is a factor; zeros where it is padding.

    With equal dtypes and no scale the bits are unchanged; otherwise the arithmetic is fp32 (fp64 when either side is
    fp64) with one rounding at the store. Bytes of the wire that belong to no segment stay as they are.

    Args:
        tensors: those of the table, in its order, any shapes and strides. Addresses of up to 16 are arguments of the
            kernel; those of more are copied to the device when they change.
        wire: contiguous, of any dtype, ``segments.wire_bytes`` or longer.
        segments: the table. Its plan is made and copied to the device at the first call with it, for every layout and
            alignment of the tensors.
        scale: a factor; floating point tensors only.

    Returns:
        Bytes read plus bytes written.

    Raises:
        ValueError: the table does not fit the tensors or the wire, or has elements to be cast that are not aligned.
        RuntimeError: a table or addresses for the first time while a CUDA graph is captured.
        TypeError: a cast or scale of a dtype that has no arithmetic here.

    Example:
        ``Segments([(0, 1, 2, 3, 8, 0)], [torch.int8])`` of ``arange(16)`` is the wire ``[1, 2, 3, 9, 10, 11]``.

    Traffic: reads every segment once, writes it once.
    """
    return _run("gather_segments", tensors, wire, segments, scale, False)


def scatter_segments(
    wire: Tensor,
    tensors: Sequence[Tensor],
    segments: Segments,
    *,
    scale: float | None = None,
    accumulate: bool = False,
) -> int:
    """Copy the table's rows back from the wire into the tensors, or add them to what is there.

    Padding is not read. Arguments, arithmetic and errors as in ``gather_segments``; here a table whose rows overlap in
    a tensor is refused, too.

    Returns:
        Bytes read plus bytes written.

    Traffic: reads every segment once, writes it once (reads it in the tensors too when accumulating).
    """
    return _run("scatter_segments", tensors, wire, segments, scale, accumulate)


def _run(
    name: str, tensors: Sequence[Tensor], wire: Tensor, segments: Segments, scale: float | None, accumulate: bool
) -> int:
    if not wire.is_cuda and not INTERPRETED:
        raise RuntimeError(f"{name}: {wire.device} tensors need a GPU or TRITON_INTERPRET=1")
    layouts, addresses = layouts_of((wire, *tensors)), tuple([x.data_ptr() for x in tensors])
    at, every = wire.data_ptr(), 0
    for address in addresses:
        every |= address
    alignment = tuple([address & 15 for address in addresses]) if every & 15 else None
    launches, copied = _plan(name, segments, layouts, alignment, at & 15, scale is not None, accumulate)
    if len(addresses) <= BY_VALUE:
        listed, values = wire, (*addresses, *(0,) * (BY_VALUE - len(addresses)))
    else:
        listed, values = _listed(addresses, wire), (0,) * BY_VALUE
    for launch, wide in launches:
        factor = 1.0 if scale is None else scale_argument(checked_scale(name, scale, wide), wide)
        launch(wire, listed, factor, *values)
    return copied


def _listed(addresses: tuple[int, ...], wire: Tensor) -> Tensor:
    """The addresses on the device, for its current stream."""
    device = wire.get_device()
    stream = 0 if device < 0 else torch.cuda.current_stream(device).cuda_stream
    return addresses_on(addresses, device).on(stream)


@lru_cache(maxsize=128)  # each has a table on the device, of about a thousandth of what it copies
def _plan(
    name: str,
    segments: Segments,
    layouts: tuple[Layout, ...],
    alignment: tuple[int, ...] | None,
    wire_align: int,
    scaled: bool,
    accumulates: bool,
) -> tuple[list[tuple[Launch, torch.dtype | None]], int]:
    """The launches of one kind of call with the type of their arithmetic, and the bytes read plus written."""
    wire, *tensors = layouts
    checked = checked_segments(name, segments, tuple(tensors), wire, scaled, accumulates)
    groups: dict[Any, list[tuple[int, ...]]] = {}
    for segment in segments.segments:
        if segment.tensor != PADDING:
            wide, (dtype, *_) = checked.wides[segment.tensor], tensors[segment.tensor]
            kind = None if wide is None else (dtype, segments.dtypes[segment.tensor], wide)
            groups.setdefault(kind, []).append(segment)
        elif name.startswith("gather"):
            groups.setdefault(None, []).append(segment)
    with torch.device("cpu"):  # whatever the default device is just now
        aligned = torch.tensor(alignment or (0,) * len(tensors), dtype=torch.int64)
        ends = (aligned, wire_align, wire[3])
        return [
            (_launch(name, kind, torch.tensor(rows), segments, ends, scaled, accumulates), kind[2] if kind else None)
            for kind, rows in groups.items()
        ], checked.copied


def _launch(
    name: str,
    kind: tuple[torch.dtype, torch.dtype, torch.dtype] | None,
    rows: Tensor,
    segments: Segments,
    ends: tuple[Tensor, int, int],
    scaled: bool,
    accumulates: bool,
) -> Launch:
    """The launch for segments that are copied (kind None), or cast between the dtypes of a tensor and the wire.

    Args:
        name: of the operation.
        kind: dtype of the tensors, in the wire, and of the arithmetic.
        rows: the segments, ``[n, 6]``.
        segments: their table.
        ends: addresses modulo 16 of the tensors and of the wire; the device.
        scaled, accumulates: what is done on the way.
    """
    aligned, wire_align, device = ends
    if kind is None:
        itemsizes, types, vec, block = None, (_BITS, _BITS), (2, 1, 1, 1, 1), BLOCKS
        rows = _in_bytes(rows, segments)
    else:
        itemsizes, types = (kind[0].itemsize, kind[1].itemsize), ((kind[0],) * 2, (kind[1],) * 2)
        _check_aligned(name, kind, rows, aligned, wire_align)
        widest = 16 // min(itemsizes)
        vec, block = (widest, 1), (_CAST_UNITS, _CAST_UNITS)
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count if device >= 0 else 1
    work = divide(rows, itemsizes, aligned, wire_align, multiprocessors)
    fits(name, (work.programs,))
    constants = dict(
        LISTED=aligned.numel() > BY_VALUE, WIDTHS=work.kinds, STRIDED=work.strided, SCATTER=name.startswith("scatter"),
        PADDED=bool((rows[:, 0] == PADDING).any()), ROWS=tuple(TRITON_TYPE[dtype] for dtype in types[0]),
        WIRE=tuple(TRITON_TYPE[dtype] for dtype in types[1]), WIDE=TRITON_TYPE[kind[2]] if kind else None,
        HAS_SCALE=scaled and kind is not None, ACCUMULATE=accumulates and kind is not None, VEC=vec, BLOCK=block,
    )  # fmt: skip
    return Launch(
        _segments_kernel, device, work.programs, (torch.int64, torch.int64), (), constants, _WARPS, work.table
    )


def _in_bytes(rows: Tensor, segments: Segments) -> Tensor:
    """Segments of any dtypes as segments of bytes."""
    itemsizes = torch.tensor([*(dtype.itemsize for dtype in segments.dtypes), 1])[rows[:, 0]]  # the last one: padding
    scaled = rows.clone()
    scaled[:, [1, 3, 4]] *= itemsizes.unsqueeze(1)
    return scaled


def _check_aligned(name: str, kind: tuple[torch.dtype, ...], rows: Tensor, aligned: Tensor, wire_align: int) -> None:
    """Elements that are cast are read as such, so that they must be where their type may be."""
    wrong = (rows[:, 5] + wire_align) % kind[1].itemsize
    if bool(wrong.any()) or bool((aligned[rows[:, 0]] % kind[0].itemsize).any()):
        raise ValueError(f"{name}: {kind[1]} in the wire cannot be cast where bytes are not aligned to it")
