"""Arithmetic that has the same bits everywhere: a wide type in between, one rounding at the store.

The wide type is fp32, fp64 when either side is fp64, and an integer's own type.
"""

import struct

import torch
import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


@triton.jit
def widen(x, WIDE: tl.constexpr):
    """``x`` in the wide type; exact."""
    if INTERPRETED:  # whose own conversion of bf16 denormals is wrong
        if x.dtype == tl.bfloat16:
            bits = x.to(tl.int16, bitcast=True).to(tl.int32)
            x = (bits << 16).to(tl.float32, bitcast=True)
    return x.to(WIDE)


@triton.jit
def multiply(x, scale, WIDE: tl.constexpr):
    """``x * scale`` in the wide type; an fp64 scale arrives as the integer of its bits (see ``scale_argument``)."""
    if tl.float64 == WIDE:
        x *= scale.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        x *= scale
    return x


@triton.jit
def narrow(x, NARROW: tl.constexpr):
    """``x`` rounded to nearest even; fp64 reaches 16 bits through fp32 as in ``torch.Tensor.to``; NaN stays NaN."""
    if NARROW.primitive_bitwidth < 32:  # pyright: ignore[reportAttributeAccessIssue]
        if x.dtype == tl.float64:
            x = x.to(tl.float32)
    if INTERPRETED:  # whose own conversion to bf16 truncates
        if tl.bfloat16 == NARROW:
            bits = x.to(tl.int32, bitcast=True)
            rounded = bits + 0x7FFF + ((bits >> 16) & 1)
            bits = tl.where(x != x, bits | 0x400000, rounded)
            x = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return x.to(NARROW)


def wide_type(
    name: str, source: torch.dtype, target: torch.dtype, scaled: bool, summed: bool = False
) -> torch.dtype | None:
    """The type arithmetic runs in, or None when ``source`` to ``target`` is a copy of bits.

    Raises:
        TypeError: a cast or scale of anything but fp16, bf16, fp32 and fp64, or a sum of what cannot be summed.

    Example:
        ``wide_type("pack", torch.float32, torch.bfloat16, False)`` is ``torch.float32``.
    """
    if source is target and not scaled and not summed:
        return None
    if source in _FLOATS and target in _FLOATS:
        return torch.float64 if torch.float64 in (source, target) else torch.float32
    if source is target and source in _INTEGERS and not scaled:
        return source
    what = "scale" if scaled else "sum" if source is target else "cast"
    raise TypeError(f"{name}: cannot {what} {source} to {target}: only fp16, bf16, fp32 and fp64 take arithmetic")


def checked_scale(name: str, scale: float, wide: torch.dtype | None) -> float:
    """``scale`` as a Python float that the wide type can hold."""
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: scale must be a number, not {type(scale).__name__} (a tensor would synchronise)")
    scale = float(scale)
    if wide is not torch.float64 and _FLOAT32_MAX < abs(scale) < float("inf"):
        raise ValueError(f"{name}: scale {scale} does not fit the fp32 it is applied in")
    return scale


def scale_argument(scale: float, wide: torch.dtype | None) -> float | int:
    """What a kernel takes for ``scale``: the integer of its bits for fp64, since a float argument is fp32."""
    return struct.unpack("q", struct.pack("d", scale))[0] if wide is torch.float64 else scale
