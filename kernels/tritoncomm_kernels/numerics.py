"""Arithmetic of the kernels that has the same bits everywhere: a wide type in between, one rounding at the store."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


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


@triton.jit
def converted(
    x, scale, target_ptr, mask, NARROW: tl.constexpr, WIDE: tl.constexpr, HAS_SCALE: tl.constexpr,
    ACCUMULATE: tl.constexpr,
):  # fmt: skip
    """``x`` as elements NARROW: its bits where WIDE is None, else scaled and added to the target, rounded once."""
    if WIDE is not None:
        x = widen(x, WIDE)
        if HAS_SCALE:
            x = multiply(x, scale, WIDE)
        if ACCUMULATE:
            x = widen(tl.load(target_ptr, mask=mask), WIDE) + x
        x = narrow(x, NARROW)
    return x
