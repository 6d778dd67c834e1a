"""Arithmetic of the kernels: in a wide type, with one rounding at the store, and the same bits on every device."""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED = tl.constexpr(bool(knobs.runtime.interpret))


@triton.jit
def widen(x, WIDE: tl.constexpr):
    """Convert ``x`` to the wide type; exact.

    Example:
        bf16 ``[1.5, -2.0]`` is fp32 ``[1.5, -2.0]``.
    """
    if INTERPRETED:  # the interpreter's own conversion of bf16 denormals is wrong
        if x.dtype == tl.bfloat16:
            bits = x.to(tl.int16, bitcast=True).to(tl.int32)
            x = (bits << 16).to(tl.float32, bitcast=True)
    return x.to(WIDE)


@triton.jit
def multiply(x, scale, WIDE: tl.constexpr):
    """Return ``x * scale`` in the wide type; an fp64 scale arrives as the integer of its bits (see ``scale_argument``).

    Example:
        fp64 ``[1.5, -2.0]`` by the scale 4602678819172646912, the bits of 0.5, is ``[0.75, -1.0]``.
    """
    if tl.float64 == WIDE:
        x *= scale.to(tl.int64).to(tl.float64, bitcast=True)
    else:
        x *= scale
    return x


@triton.jit
def narrow(x, NARROW: tl.constexpr):
    """Round ``x`` to nearest even; fp64 reaches 16 bits through fp32 as in ``torch.Tensor.to``; NaN stays NaN.

    Example:
        fp32 ``[1.00390625, 1.01171875]``, both halfway between two bf16, are bf16 ``[1.0, 1.015625]``.
    """
    if NARROW.primitive_bitwidth < 32:  # pyright: ignore[reportAttributeAccessIssue]
        if x.dtype == tl.float64:
            x = x.to(tl.float32)
    if INTERPRETED:  # the interpreter's own conversion to bf16 truncates
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
    """Return ``x`` as elements NARROW: its bits if WIDE is None, else scaled, added to the target and rounded once.

    Example:
        With HAS_SCALE and ACCUMULATE bf16 ``[3.0, -4.0]`` by 0.5 onto fp32 ``[1.0, 1.0]`` is ``[2.5, -1.0]``.
    """
    if WIDE is not None:
        x = widen(x, WIDE)
        if HAS_SCALE:
            x = multiply(x, scale, WIDE)
        if ACCUMULATE:
            x = widen(tl.load(target_ptr, mask=mask), WIDE) + x
        x = narrow(x, NARROW)
    return x
