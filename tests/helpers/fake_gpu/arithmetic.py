"""What PTX instructions compute, on the bits of all threads at once.

Approximate functions (``ex2``, ``rcp``, and ``fma`` for them) are right to the last bit or two; ``.ftz`` keeps
denormals.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from fake_gpu.program import PtxError

__all__ = ["BITS", "OPERATIONS", "SIGNED", "UNSIGNED", "Array", "constant"]

Array = np.ndarray[Any, Any]
BITS = {"b8": 8, "u8": 8, "s8": 8, "b16": 16, "u16": 16, "s16": 16, "f16": 16, "bf16": 16, "b32": 32, "u32": 32}
BITS |= {"s32": 32, "f32": 32, "b64": 64, "u64": 64, "s64": 64, "f64": 64, "f16x2": 32, "bf16x2": 32}
BITS |= {"f32x2": 64, "s16x2": 32, "u16x2": 32}
UNSIGNED = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}
SIGNED = {8: np.int8, 16: np.int16, 32: np.int32, 64: np.int64}
_FLOAT = {16: np.float16, 32: np.float32, 64: np.float64}


class Reader(Protocol):
    """Whose registers are read."""

    def read(self, operand: str, kind: str) -> Array: ...


def constant(text: str, bits: int) -> Any:
    if text.startswith(("0f", "0F", "0d", "0D")):
        value = int(text[2:], 16)
    else:
        value = int(text.rstrip("U"), 0)
    return np.asarray(value % 2**bits, np.uint64).astype(UNSIGNED[bits])


def _typed(bits: Array, kind: str) -> Array:
    """Unsigned bits as numbers of ``kind``."""
    width = BITS[kind]
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind[0] == "f":
        return bits.view(_FLOAT[width])
    return bits.view(SIGNED[width]) if kind[0] == "s" else bits


def _kind(kinds: Sequence[str]) -> str:
    return next(kind for kind in reversed(kinds) if kind in BITS)


def _binary(compute: Callable[[Array, Array], Array]) -> Any:
    """An operation on two operands of one type."""

    def step(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
        if kinds[-1] == "pred":
            return compute(runner.read(operands[0], "pred"), runner.read(operands[1], "pred"))
        return _computed(runner, kinds, operands[:2], compute)

    return step


def _computed(runner: Reader, kinds: Sequence[str], operands: Sequence[str], compute: Callable[..., Array]) -> Array:
    """On numbers, on both halves of packed ones, or on 16-bit floats and, last, fp32 (as in ``add.rn.f32.bf16``)."""
    kind = _kind(kinds)
    if "f32" in kinds[:-1]:
        mixed = [*(kind for _ in operands[:-1]), "f32"]
        numbers = [_typed(runner.read(operand, one), one) for operand, one in zip(operands, mixed, strict=True)]
        return compute(*(number.astype(np.float32) for number in numbers)).astype(np.float32)
    bits = [runner.read(operand, kind) for operand in operands]
    one, packed, _ = kind.partition("x2")
    if not packed:
        return _computed_short(one, bits, compute)
    whole, half = UNSIGNED[BITS[kind]], UNSIGNED[BITS[one]]
    by = whole(BITS[one])
    low, high = ([(b >> shift).astype(half) for b in bits] for shift in (whole(0), by))
    low, high = (_computed_short(one, part, compute) for part in (low, high))
    return low.view(half).astype(whole) | high.view(half).astype(whole) << by


def _computed_short(kind: str, bits: Sequence[Array], compute: Callable[..., Array]) -> Array:
    """16-bit floats go through fp32, which is wide enough for one rounding to be exact."""
    numbers = [_typed(b, kind) for b in bits]
    if kind not in ("f16", "bf16"):
        return compute(*numbers)
    return _rounded(compute(*(number.astype(np.float32) for number in numbers)), kind)


def _unary(compute: Callable[[Array], Array]) -> Any:
    def step(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
        if kinds[-1] == "pred":
            return compute(runner.read(operands[0], "pred"))
        return _computed(runner, kinds, operands[:1], compute)

    return step


def _shift(left: bool) -> Any:
    """Shifts by the width or more give 0, or the sign."""

    def step(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
        value = _typed(runner.read(operands[0], kinds[0]), kinds[0])
        width = BITS[kinds[0]]
        by = runner.read(operands[1], "b32")
        most = np.minimum(by, width - 1).astype(value.dtype)
        moved = value << most if left else value >> most
        sign = value >> value.dtype.type(width - 1) if not left and kinds[0][0] == "s" else np.zeros_like(value)
        return np.where(by >= width, sign, moved)

    return step


def _mul(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    kind = _kind(kinds)
    if kind.startswith(("f", "bf")):
        return _computed(runner, kinds, operands[:2], np.multiply)
    a, b = (_typed(runner.read(operand, kind), kind) for operand in operands[:2])
    if kinds[0] == "wide":
        wide = (SIGNED if kind[0] == "s" else UNSIGNED)[2 * BITS[kind]]
        return a.astype(wide) * b.astype(wide)
    if kinds[0] == "hi":
        # Of 64 bits no wider type of numpy holds the product.
        upper = [int(x) * int(y) >> BITS[kind] for x, y in zip(*np.broadcast_arrays(a, b), strict=True)]
        return np.array(upper, a.dtype)
    return a * b


def _mad(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    product = _mul(runner, kinds, operands)
    kind = _kind(kinds)
    wide = f"{kind[0]}{2 * BITS[kind]}" if kinds[0] == "wide" else kind
    return product + _typed(runner.read(operands[2], wide), wide)


def _fma(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    """Through a wider type, rounded twice: for the functions that are correct to a bound anyway."""
    kind = _kind(kinds)
    if kind not in ("f32", "f64"):
        return _computed(runner, kinds, operands, lambda a, b, c: a.astype(np.float64) * b + c)
    wide = np.longdouble if kind == "f64" else np.float64
    a, b, c = (_typed(runner.read(operand, kind), kind).astype(wide) for operand in operands)
    return (a * b + c).astype(_FLOAT[BITS[kind]])


def _divide(a: Array, b: Array) -> Array:
    """Integers round toward zero; dividing by zero gives some number, as on a GPU."""
    if a.dtype.kind == "f":
        return a / b
    safe = np.where(b == 0, a.dtype.type(1), b)
    whole = a // safe
    inexact = (whole * safe != a) & ((a < 0) != (safe < 0))
    return whole + inexact.astype(a.dtype)


def _set_predicate(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    kind = _kind(kinds)
    a, b = (_typed(runner.read(operand, kind), kind) for operand in operands[:2])
    name = kinds[0]
    if kind[0] != "f":
        return _COMPARE[name](a, b)
    unordered = np.isnan(a) | np.isnan(b)
    if name in ("num", "nan"):
        return unordered == (name == "nan")
    if name.endswith("u"):
        return _COMPARE[name[:-1]](a, b) | unordered
    return _COMPARE[name](a, b) & ~unordered


def _select(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    a, b = (runner.read(operand, kinds[0]) for operand in operands[:2])
    return np.where(runner.read(operands[2], "pred"), a, b)


def _convert(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    """``cvt.[rounding].to.from``; to nearest even where a float is rounded."""
    to, of = [kind for kind in kinds if kind in BITS]
    values = [_typed(runner.read(operand, of), of) for operand in operands]
    if to in ("bf16x2", "f16x2"):
        high, low = (_rounded(value, to[:-2]).astype(np.uint32) for value in values)
        return high << np.uint32(16) | low
    (value,) = values
    if to in ("bf16", "f16"):
        return _rounded(value, to)
    if to[0] == "f":
        return value.astype(_FLOAT[BITS[to]])
    if of[0] in "fb" and of in ("f16", "bf16", "f32", "f64"):
        raise PtxError(f"unknown instruction cvt.{'.'.join(kinds)}")
    return value.astype((SIGNED if to[0] == "s" else UNSIGNED)[BITS[to]])


def _rounded(value: Array, to: str) -> Array:
    """Bits of a 16-bit float; NaN becomes the one of the GPU."""
    if to == "f16":
        bits = value.astype(np.float16).view(np.uint16)
    else:
        wide = value.astype(np.float32).view(np.uint32)
        even = wide >> np.uint32(16) & np.uint32(1)
        bits = ((wide + np.uint32(0x7FFF) + even) >> np.uint32(16)).astype(np.uint16)
    return np.where(np.isnan(value), np.uint16(0x7FFF), bits)


def _permute(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    a, b, selector = (runner.read(operand, "b32") for operand in operands)
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    out = np.zeros_like(a)
    for i in range(4):
        nibble = selector >> np.uint32(4 * i) & np.uint32(0xF)
        byte = (both >> (8 * (nibble & np.uint32(7))).astype(np.uint64)).astype(np.uint32) & np.uint32(0xFF)
        sign = np.where(byte & np.uint32(0x80), np.uint32(0xFF), np.uint32(0))
        out |= np.where(nibble & np.uint32(8), sign, byte) << np.uint32(8 * i)
    return out


def _extract(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    """A field of bits, signed if the type is."""
    value, start, length = (runner.read(operand, "u32") for operand in operands)
    above = np.maximum(np.uint32(32) - length - start, np.uint32(0))  # fields here never reach past the register
    moved = _typed(value << above, kinds[0])
    return np.where(length == 0, 0, moved >> (above + start).astype(moved.dtype))


def _move(runner: Reader, kinds: Sequence[str], operands: Sequence[str]) -> Array:
    return runner.read(operands[0], kinds[0])


def _smaller_or_larger(name: str) -> Callable[[Array, Array], Array]:
    numbers, floats = getattr(np, f"{name}imum"), getattr(np, f"f{name}")
    return lambda a, b: (floats if a.dtype.kind == "f" else numbers)(a, b)


_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal,
}  # fmt: skip
OPERATIONS: dict[str, Callable[[Reader, Sequence[str], Sequence[str]], Array]] = {
    "abs": _unary(np.abs),
    "add": _binary(np.add),
    "and": _binary(np.bitwise_and),
    "bfe": _extract,
    "createpolicy": lambda runner, kinds, operands: runner.read("0", "b64"),  # of caches, and there are none
    "cvt": _convert,
    "div": _binary(_divide),
    "ex2": _unary(np.exp2),
    "fma": _fma,
    "mad": _mad,
    "max": _binary(_smaller_or_larger("max")),
    "min": _binary(_smaller_or_larger("min")),
    "mov": _move,
    "mul": _mul,
    "neg": _unary(np.negative),
    "not": _unary(np.invert),
    "or": _binary(np.bitwise_or),
    "popc": _unary(np.bitwise_count),
    "prmt": _permute,
    "rem": _binary(np.fmod),
    "rcp": _unary(lambda x: 1 / x),
    "selp": _select,
    "setp": _set_predicate,
    "shl": _shift(True),
    "shr": _shift(False),
    "sub": _binary(np.subtract),
    "xor": _binary(np.bitwise_xor),
}
