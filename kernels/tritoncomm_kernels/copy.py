"""pack and unpack: the address map between the rows of a tensor and a wire in rank order, in one pass.

A tile is BLOCK_ROWS rows by BLOCK_COLS columns of the row; columns run over all ranks, so reads stay contiguous for any
run. Copies see integers of the widest access that both sides allow and never the dtype.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.config import Config, config_for
from tritoncomm_kernels.geometry import Geometry, Ints, geometry_of
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, check_place, device_name, fits
from tritoncomm_kernels.numerics import checked_scale, multiply, narrow, scale_argument, wide_type, widen

__all__ = ["pack", "unpack"]

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}
_NAMES = [
    *("scale", "stride_0", "stride_1", "stride_2", "size_1", "size_2", "stride_element", "stride_rank"),
    *("outer", "row", "run", "cols", "blocks"),
]


@triton.jit
def _row_offset(o, stride_0, stride_1, stride_2, size_1, size_2, OUTER_DIMS: tl.constexpr):
    """Where row ``o`` starts, in units; the outer dims are walked with the last one fastest."""
    if OUTER_DIMS == 1:
        offset = o.to(tl.int64) * stride_0
    elif OUTER_DIMS == 2:
        o0 = o // size_1
        offset = o0.to(tl.int64) * stride_0 + (o - o0 * size_1).to(tl.int64) * stride_1
    else:
        o01 = o // size_2
        o0 = o01 // size_1
        offset = o0.to(tl.int64) * stride_0 + (o01 - o0 * size_1).to(tl.int64) * stride_1
        offset += (o - o01 * size_2).to(tl.int64) * stride_2
    return offset


@triton.jit
def _tile(
    rows_ptr, wire_ptr, starts_ptr, stride_0, stride_1, stride_2, size_1, size_2, stride_element, stride_rank,
    outer, row, run, cols, blocks,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    """Pointers and masks of one tile; everything is counted in units of VEC elements.

    With SPLIT the grid has a rank axis, ``run`` is the longest piece and ``starts_ptr`` holds where the pieces start.
    """
    pid = tl.program_id(0)
    if SPLIT:
        row_blocks = tl.cdiv(outer, BLOCK_ROWS)
        tile = pid // blocks
        w = tile // row_blocks
        po = tile - w * row_blocks
        start = tl.load(starts_ptr + w).to(tl.int32)
        run = tl.load(starts_ptr + w + 1).to(tl.int32) - start
        pk = pid - tile * blocks
    else:
        po = pid // blocks
        pk = pid - po * blocks
    o = po * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    lane = tl.arange(0, BLOCK_COLS)[None, :]
    c = pk * (BLOCK_COLS // VEC) + lane // VEC
    element = lane % VEC
    if SPLIT:
        in_row = (o < outer) & (c < run)
        in_wire = in_row
        wire_ptr += (start.to(tl.int64) * outer + o.to(tl.int64) * run + c) * VEC + element
        c += start
    else:
        w = c // run
        in_row = (o < outer) & (c < row)
        in_wire = (o < outer) & (c < cols)
        wire_ptr += (o.to(tl.int64) * run + (w.to(tl.int64) * stride_rank + (c - w * run))) * VEC + element
    offset = _row_offset(o, stride_0, stride_1, stride_2, size_1, size_2, OUTER_DIMS)
    if STRIDED:
        rows_ptr += (offset + c.to(tl.int64) * stride_element) * VEC + element
    else:
        rows_ptr += (offset + c) * VEC + element
    if VEC == 1:  # Triton 3.6 does not see that columns run along dim 1 and would walk down the rows
        wire_ptr = tl.max_contiguous(wire_ptr, [1, 2])
    return rows_ptr, wire_ptr, in_row, in_wire


@triton.jit(do_not_specialize=_NAMES)
def _pack_kernel(
    rows_ptr, wire_ptr, starts_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, stride_rank: tl.int32, outer: tl.int32, row: tl.int32, run: tl.int32,
    cols: tl.int32, blocks: tl.int32,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows_ptr, wire_ptr, in_row, in_wire = _tile(
        rows_ptr, wire_ptr, starts_ptr, stride_0, stride_1, stride_2, size_1, size_2, stride_element, stride_rank,
        outer, row, run, cols, blocks, VEC, OUTER_DIMS, STRIDED, SPLIT, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    x = tl.load(rows_ptr, mask=in_row, other=0)
    if WIDE is not None:
        x = widen(x, WIDE)
        if HAS_SCALE:
            x = tl.where(in_row, multiply(x, scale, WIDE), 0)
        x = narrow(x, wire_ptr.dtype.element_ty)
    tl.store(wire_ptr, x, mask=in_wire)


@triton.jit(do_not_specialize=_NAMES)
def _unpack_kernel(
    rows_ptr, wire_ptr, starts_ptr, scale,
    stride_0: tl.int32, stride_1: tl.int32, stride_2: tl.int32, size_1: tl.int32, size_2: tl.int32,
    stride_element: tl.int32, stride_rank: tl.int32, outer: tl.int32, row: tl.int32, run: tl.int32,
    cols: tl.int32, blocks: tl.int32,
    VEC: tl.constexpr, OUTER_DIMS: tl.constexpr, STRIDED: tl.constexpr, SPLIT: tl.constexpr,
    WIDE: tl.constexpr, HAS_SCALE: tl.constexpr, ACCUMULATE: tl.constexpr,
    BLOCK_ROWS: tl.constexpr, BLOCK_COLS: tl.constexpr,
):  # fmt: skip
    rows_ptr, wire_ptr, in_row, _ = _tile(
        rows_ptr, wire_ptr, starts_ptr, stride_0, stride_1, stride_2, size_1, size_2, stride_element, stride_rank,
        outer, row, run, cols, blocks, VEC, OUTER_DIMS, STRIDED, SPLIT, BLOCK_ROWS, BLOCK_COLS,
    )  # fmt: skip
    x = tl.load(wire_ptr, mask=in_row)
    if WIDE is not None:
        x = widen(x, WIDE)
        if HAS_SCALE:
            x = multiply(x, scale, WIDE)
        if ACCUMULATE:
            x = widen(tl.load(rows_ptr, mask=in_row), WIDE) + x
        x = narrow(x, rows_ptr.dtype.element_ty)
    tl.store(rows_ptr, x, mask=in_row)


def pack(
    rows: Tensor,
    wire: Tensor,
    scale: float | None = None,
    *,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """Copy rows into rank order: ``wire[w, o, k] = rows[o, w*run + k] * scale``.

    Positions past the end of a row are written as zero. With equal dtypes and no scale the bits are unchanged;
    otherwise the arithmetic is fp32 (fp64 when either side is fp64) with one rounding at the store.

    Args:
        rows: ``[*outer, row]`` with up to three outer dims once neighbours are joined, any strides.
        wire: ``[world, outer, run]``, each ``[outer, run]`` contiguous, any stride between ranks; with ``sizes`` flat.
        scale: a factor; floating point tensors only.
        sizes: elements of a row per rank; rank w's block ``[outer, sizes[w]]`` starts at ``outer * sum(sizes[:w])``.
        config: the tile; ``config_for`` chooses by default.

    Returns:
        Bytes read plus bytes written.

    Raises:
        ValueError: the shapes do not describe one split, or are too large for 32-bit units.
        TypeError: a cast or scale of a dtype that has no arithmetic here.

    Example:
        rows ``[[0, 1, 2, 3, 4]]``, world 2, run 3 give wire ``[[[0, 1, 2]], [[3, 4, 0]]]``.

    Traffic: reads ``rows`` once, writes ``wire`` once.
    """
    return _run("pack", rows, wire, scale, False, sizes, config)


def unpack(
    wire: Tensor,
    rows: Tensor,
    scale: float | None = None,
    *,
    accumulate: bool = False,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """Copy back from rank order: ``rows[o, w*run + k] = wire[w, o, k] * scale``, plus what was there to accumulate.

    Padding on the wire is not read. Arguments, arithmetic and errors as in ``pack``.

    Returns:
        Bytes read plus bytes written.

    Traffic: reads the wire once, writes ``rows`` once (reads ``rows`` too when accumulating).
    """
    return _run("unpack", rows, wire, scale, accumulate, sizes, config)


def _run(
    name: str,
    rows: Tensor,
    wire: Tensor,
    scale: float | None,
    accumulate: bool,
    sizes: Sequence[int] | None,
    config: Config | None,
) -> int:
    check_place(name, rows, wire)
    launch, moved, wide = _plan(
        name, rows.get_device(), rows.dtype, wire.dtype, (rows.data_ptr() | wire.data_ptr()) & 15, rows.shape,
        rows.stride(), wire.shape, wire.stride(), None if sizes is None else tuple(sizes), scale is not None,
        accumulate, config,
    )  # fmt: skip
    if launch is not None:
        factor = 1.0 if scale is None else scale_argument(checked_scale(name, scale, wide), wide)
        launch(rows, wire, factor)
    elif name == "pack" and moved:
        wire.zero_()
    return moved


@lru_cache(maxsize=4096)
def _plan(
    name: str,
    device: int,
    rows_dtype: torch.dtype,
    wire_dtype: torch.dtype,
    alignment: int,
    shape: Ints,
    stride: Ints,
    wire_shape: Ints,
    wire_stride: Ints,
    sizes: Ints | None,
    scaled: bool,
    accumulate: bool,
    config: Config | None,
) -> tuple[Launch | None, int, torch.dtype | None]:
    """The launch of one kind of call (None when there is nothing to copy), the bytes it moves, the arithmetic type."""
    target = "wire" if name == "pack" else "rows"
    geo = geometry_of(name, shape, stride, wire_shape, wire_stride, sizes, target)
    ends = (rows_dtype, wire_dtype) if name == "pack" else (wire_dtype, rows_dtype)
    wide = wide_type(name, *ends, scaled, accumulate)
    valid = geo.outer * geo.row
    writes = geo.cells if name == "pack" else valid * (2 if accumulate else 1)
    moved = valid * ends[0].itemsize + writes * ends[1].itemsize
    if not valid:
        return None, geo.cells * wire_dtype.itemsize if name == "pack" else 0, wide
    if len(geo.dims) > 3:
        raise ValueError(f"{name}: rows {tuple(shape)} with strides {stride} have more than three outer dims")
    types, vec, unit, scaling = _unit(geo, rows_dtype, wire_dtype, wide, alignment)
    numbers = _in_units(geo, vec, scaling)
    tile = config or config_for(
        name, unit, geo.outer, numbers["cols"] * unit, device_name=device_name(device) if device >= 0 else None
    )
    width = max(types[0].itemsize, types[1].itemsize)
    block_cols = max(tile.block_cols // width, vec)
    numbers["blocks"] = -(-(numbers["run"] if geo.starts else numbers["cols"]) * vec // block_cols)
    fits(name, numbers.values())
    grid = -(-geo.outer // tile.block_rows) * numbers["blocks"] * (geo.world if geo.starts else 1)
    constants = dict(
        VEC=vec, OUTER_DIMS=len(geo.dims), STRIDED=geo.stride_element != 1, SPLIT=geo.starts is not None,
        WIDE=None if wide is None else TRITON_TYPE[wide], HAS_SCALE=scaled, ACCUMULATE=accumulate,
        BLOCK_ROWS=tile.block_rows, BLOCK_COLS=block_cols,
    )  # fmt: skip
    starts = None if geo.starts is None else tuple(s * scaling[0] // scaling[1] for s in geo.starts)
    kernel = _pack_kernel if name == "pack" else _unpack_kernel
    launch = Launch(kernel, device, grid, types, tuple(numbers.values()), constants, tile.num_warps, starts)
    return launch, moved, wide


def _unit(
    geo: Geometry, rows_dtype: torch.dtype, wire_dtype: torch.dtype, wide: torch.dtype | None, alignment: int
) -> tuple[tuple[torch.dtype, torch.dtype], int, int, tuple[int, int]]:
    """Types behind the pointers, elements per unit, bytes per unit, and the fraction that turns elements into units."""
    strides = [step for size, step in zip(geo.dims, geo.strides, strict=True) if size > 1]
    numbers = [*strides, geo.stride_rank, geo.run, geo.row, *(geo.starts or ())]
    if geo.stride_element != 1:
        numbers = [1]
    if wide is None:
        size = rows_dtype.itemsize
        unit = math.gcd(alignment or 16, 16, *(n * size for n in numbers))
        element = min(unit, 8)
        return (_INTEGERS[element], _INTEGERS[element]), unit // element, unit, (size, unit)
    small, large = sorted((rows_dtype.itemsize, wire_dtype.itemsize))
    aligned = math.gcd(alignment or 16, 16)
    vec = math.gcd(*numbers, 16 // small if aligned == 16 else max(aligned // large, 1))
    return (rows_dtype, wire_dtype), vec, vec * small, (1, vec)


def _in_units(geo: Geometry, vec: int, scaling: tuple[int, int]) -> dict[str, Any]:
    """The kernel's integers, in units, in signature order."""

    def units(n: int) -> int:
        return n * scaling[0] // scaling[1]

    dims = (*geo.dims, 1, 1)[:3]
    strides = tuple(units(step) if size > 1 else 0 for size, step in zip(geo.dims, geo.strides, strict=True))
    longest = max((b - a for a, b in zip(geo.starts, geo.starts[1:], strict=False)), default=0) if geo.starts else 0
    run = units(longest if geo.starts else geo.run)
    names = dict(zip(("stride_0", "stride_1", "stride_2"), (*strides, 0, 0), strict=False))
    return names | dict(
        size_1=dims[1], size_2=dims[2], stride_element=units(geo.stride_element) if geo.stride_element != 1 else 1,
        stride_rank=units(geo.stride_rank), outer=geo.outer, row=units(geo.row), run=run,
        cols=geo.world * run if not geo.starts else units(geo.row), blocks=0,
    )  # fmt: skip
