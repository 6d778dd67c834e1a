"""pack and unpack: the address map between the rows of a tensor and a wire in rank order, in one pass.

Copies see integers of the widest access that both sides allow and never the dtype.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from tritoncomm_kernels.address import _pack_kernel, _unpack_kernel
from tritoncomm_kernels.config import Config, config_for
from tritoncomm_kernels.geometry import Geometry, Ints, geometry_of
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, check_place, device_key, fits
from tritoncomm_kernels.numerics import checked_scale, scale_argument, wide_type

__all__ = ["pack", "plain_copy", "unpack"]

_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


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
        ValueError: the shapes do not describe one split.
        TooLargeError: a size or stride of 2**31 units or nearly that.
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


def plain_copy(
    name: str, device: int, dtype: torch.dtype, alignment: int, shape: Ints, stride: Ints, world: int
) -> tuple[Launch | None, int]:
    """What ``pack`` or ``unpack`` does between rows and a contiguous wire that cuts them evenly, prepared.

    Args:
        name: ``pack`` or ``unpack``.
        device: index of a CUDA device, -1 for CPU tensors in the interpreter.
        dtype: of both.
        alignment: the addresses of both, or-ed, modulo 16.
        shape, stride: of the rows.
        world: ranks, which divide a row.

    Returns:
        The launch, to be called with rows, wire and 1.0 on tensors of exactly this kind, None when there is nothing to
        copy; the bytes read plus written. Neither tensor may be a lazy conjugate or negative view.
    """
    outer, run = math.prod(shape[:-1]), shape[-1] // world
    wire = (world, outer, run), (outer * run, run, 1)
    return _plan(name, device, dtype, dtype, alignment, shape, stride, *wire, None, False, False, None)[:2]


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
    tile = config or config_for(name, unit, geo.outer, numbers["cols"] * unit, **device_key(device))
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
