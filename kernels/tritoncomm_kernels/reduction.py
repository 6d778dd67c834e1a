"""reduce: the sum of a wire's parts in rank order, with one rounding at the end."""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.config import Config
from tritoncomm_kernels.dtypes import checked_scale, scale_argument, wide_type
from tritoncomm_kernels.geometry import Ints, check_parts
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, check_place, fits, tile_on
from tritoncomm_kernels.numerics import multiply, narrow, widen

__all__ = ["reduce"]

_UNROLLED = 16
_CHUNK = 8
_NAMES = ["scale", "stride_rank", "units", "tail_elements", "parts"]


@triton.jit
def _total(
    part_ptr, mask, step, scale, parts, PARTS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr,
    HAS_SCALE: tl.constexpr,
):  # fmt: skip
    """Return the scaled sum of ``parts`` parts at ``part_ptr``, ``step`` elements apart.

    The first PARTS parts are summed unrolled. With CHUNK the others follow in a loop, in chunks of CHUNK.

    Example:
        Four parts ``[[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]``, ``step`` 2, PARTS 2, CHUNK 2, scale 0.5:
        ``[8.0, 10.0]``, in one turn of the loop.
    """
    acc = widen(tl.load(part_ptr, mask=mask, other=0), WIDE)
    for w in tl.static_range(1, PARTS):
        acc += widen(tl.load(part_ptr + w * step, mask=mask, other=0), WIDE)
    if CHUNK > 0:
        part_ptr += PARTS * step
        for _ in range((parts - PARTS) // CHUNK):
            for w in tl.static_range(CHUNK):
                acc += widen(tl.load(part_ptr + w * step, mask=mask, other=0), WIDE)
            part_ptr += CHUNK * step
    if HAS_SCALE:
        acc = multiply(acc, scale, WIDE)
    return acc


@triton.jit(do_not_specialize=_NAMES)
def _reduce_kernel(
    wire_ptr, out_ptr, scale, stride_rank: tl.int32, units: tl.int32, tail_elements: tl.int32, parts: tl.int32,
    VEC: tl.constexpr, PARTS: tl.constexpr, CHUNK: tl.constexpr, WIDE: tl.constexpr, HAS_SCALE: tl.constexpr,
    TAIL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Sum one block of ``units`` units of VEC elements; with TAIL program 0 also sums ``tail_elements`` behind them.

    A mask by element over the whole block would make every access as narrow as an element.

    Example:
        Parts ``[[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]]``, 6 elements (``stride_rank`` 3) apart:
        VEC 2, BLOCK 2, ``units`` 2, ``tail_elements`` 1.
        Program 0 writes ``[11.0, 22.0, _, _, 55.0]``.
        Program 1 writes ``[_, _, 33.0, 44.0, _]``.
    """
    pid = tl.program_id(0)
    step = stride_rank.to(tl.int64) * VEC
    lane = tl.arange(0, BLOCK)
    unit = pid * (BLOCK // VEC) + lane // VEC
    offset, mask = unit.to(tl.int64) * VEC + lane % VEC, unit < units
    acc = _total(wire_ptr + offset, mask, step, scale, parts, PARTS, CHUNK, WIDE, HAS_SCALE)
    tl.store(out_ptr + offset, narrow(acc, out_ptr.dtype.element_ty), mask=mask)
    if TAIL:
        if pid == 0:
            element = tl.arange(0, VEC)
            tail_offset, tail_mask = units.to(tl.int64) * VEC + element, element < tail_elements
            tail = _total(wire_ptr + tail_offset, tail_mask, step, scale, parts, PARTS, CHUNK, WIDE, HAS_SCALE)
            tl.store(out_ptr + tail_offset, narrow(tail, out_ptr.dtype.element_ty), mask=tail_mask)


def reduce(wire: Tensor, out: Tensor, scale: float | None = None, *, config: Config | None = None) -> int:
    """Sum the parts in rank order: ``out[k] = (wire[0, k] + wire[1, k] + ...) * scale``.

    The sum is fp32 (fp64 when either side is fp64, the integer itself for integers), rounded once at the store.

    Args:
        wire: ``[world, n]``, 1 to 64 parts, each contiguous, any stride between them.
        out: ``[n]``, contiguous.
        scale: a factor applied to the sum; floating point tensors only.
        config: the tile; ``config_for`` chooses by default.

    Returns:
        Bytes read plus bytes written.

    Raises:
        ValueError: the shapes do not fit, or there are too many parts.
        TooLargeError: 2**31 units or nearly that.
        TypeError: a dtype without arithmetic here.

    Example:
        wire ``[[1, 2], [3, 4]]`` with scale 0.5 gives out ``[2, 3]``.

    Traffic: reads ``wire`` once, writes ``out`` once.
    """
    if wire.is_complex() and wire.dtype is out.dtype and scale is None:
        wire, out = torch.view_as_real(wire).flatten(1), torch.view_as_real(out).flatten()
    check_place("reduce", wire, out)
    launch, moved, wide = _plan(
        wire.get_device(), wire.dtype, out.dtype, (wire.data_ptr() | out.data_ptr()) & 15, wire.shape, wire.stride(),
        out.shape, out.stride(), scale is not None, config,
    )  # fmt: skip
    if launch is not None:
        launch(wire, out, 1.0 if scale is None else scale_argument(checked_scale("reduce", scale, wide), wide))
    return moved


@lru_cache(maxsize=4096)
def _plan(
    device: int,
    wire_dtype: torch.dtype,
    out_dtype: torch.dtype,
    alignment: int,
    shape: Ints,
    stride: Ints,
    out_shape: Ints,
    out_stride: Ints,
    scaled: bool,
    config: Config | None,
) -> tuple[Launch | None, int, torch.dtype | None]:
    check_parts(shape, stride, out_shape, out_stride)
    wide = wide_type("reduce", wire_dtype, out_dtype, scaled, summed=True)
    assert wide is not None
    parts, length = shape
    if length == 0:
        return None, 0, wide
    moved = parts * length * wire_dtype.itemsize + length * out_dtype.itemsize
    small, large = sorted((wire_dtype.itemsize, out_dtype.itemsize))
    aligned = math.gcd(alignment or 16, 16)
    # Elements of one access: 16 bytes of the smaller type if both addresses allow it, else what the alignment holds of
    # the larger type. Every part has to begin with a whole access, so that the distance of parts is a multiple.
    most_elements = 16 // small if aligned == 16 else max(aligned // large, 1)
    step = stride[0] if parts > 1 else 0
    vec = math.gcd(step, most_elements)
    tile = config or tile_on(device, "reduce", small, 1, length * small)
    block = max(tile.block_cols // small, vec)
    units, tail_elements = divmod(length, vec)
    numbers = (step // vec, units, tail_elements, parts)
    fits("reduce", numbers)
    # Few parts are summed without a loop. Of many, the first ones are, so that the loop gets a multiple of _CHUNK.
    first = parts if parts <= _UNROLLED else _CHUNK + parts % _CHUNK
    constants = dict(
        VEC=vec, PARTS=first, CHUNK=0 if parts <= _UNROLLED else _CHUNK, WIDE=TRITON_TYPE[wide], HAS_SCALE=scaled,
        TAIL=tail_elements > 0, BLOCK=block,
    )  # fmt: skip
    grid = max(-(-units * vec // block), 1)
    return (
        Launch(_reduce_kernel, device, grid, (wire_dtype, out_dtype), numbers, constants, tile.num_warps),
        moved,
        wide,
    )
