"""Element types, lists of sizes and counts as text, the same for all commands."""

import re

import torch

__all__ = ["counted", "dtype_name", "parse_dtype", "parse_ints"]

_SHORT = {
    "bf16": "bfloat16",
    "fp16": "float16",
    "fp32": "float32",
    "fp64": "float64",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
}  # half, float, double and the like are torch's own
_SUPPORTED = re.compile(r"bfloat16|float(16|32|64|8_\w+)|complex(32|64|128)|u?int(8|16|32|64)|bool")


def parse_dtype(text: str) -> torch.dtype:
    """Parse ``bfloat16``, ``torch.bfloat16`` or ``bf16``: torch's names of element types, and short ones."""
    name = text.strip().removeprefix("torch.")
    dtype = getattr(torch, _SHORT.get(name.lower(), name), None)
    if not isinstance(dtype, torch.dtype):
        short = ", ".join(_SHORT)
        raise ValueError(f"{text!r} is no dtype: torch's names (bfloat16, float32, int64, ...) or {short}, half")
    if not _SUPPORTED.fullmatch(dtype_name(dtype)):
        raise ValueError(f"dtype {text!r} cannot be moved: quantized types and elements below a byte have no path here")
    return dtype


def counted(count: int, noun: str) -> str:
    """Return ``1 rank``, ``2 ranks``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``bfloat16`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def parse_ints(text: str, option: str, minimum: int | None = None) -> tuple[int, ...]:
    """Parse ``4096,1,8192`` or ``4096x1x8192``, the argument of ``option``; an empty text is an empty tuple."""
    try:
        numbers = tuple(int(part) for part in text.replace("x", ",").split(",")) if text.strip() else ()
    except ValueError:
        raise ValueError(f"{option} must be integers like 4096,1,8192 or 4096x1x8192, not {text!r}") from None
    if minimum is not None and min(numbers, default=minimum) < minimum:
        raise ValueError(f"{option} {text!r}: {min(numbers)} is below {minimum}")
    return numbers
