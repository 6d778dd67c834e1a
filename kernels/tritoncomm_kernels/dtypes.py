"""The wide type of arithmetic, and the scale as a kernel's argument.

The wide type is fp32, fp64 if either side is fp64, and an integer's own type.
"""

import struct
from functools import lru_cache

import torch

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_FLOAT32_MAX = torch.finfo(torch.float32).max


@lru_cache(maxsize=256)
def wide_type(
    name: str, source: torch.dtype, target: torch.dtype, scaled: bool, summed: bool = False
) -> torch.dtype | None:
    """Return the type of the arithmetic, or None if ``source`` to ``target`` is a copy of bits; reject other dtypes.

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
    """Return ``scale`` as a Python float that the wide type can hold."""
    if not isinstance(scale, (int, float)):
        raise TypeError(f"{name}: scale must be a number, not {type(scale).__name__} (a tensor would synchronise)")
    scale = float(scale)
    if wide is not torch.float64 and _FLOAT32_MAX < abs(scale) < float("inf"):
        raise ValueError(f"{name}: scale {scale} does not fit the fp32 it is applied in")
    return scale


def scale_argument(scale: float, wide: torch.dtype | None) -> float | int:
    """Return a kernel's argument for ``scale``: for fp64 the integer of its bits, because a float argument is fp32."""
    return struct.unpack("q", struct.pack("d", scale))[0] if wide is torch.float64 else scale
