"""How large a tile is: a pure function of the call, and tables that override it per device."""

import json
from dataclasses import dataclass
from functools import lru_cache
from importlib import resources

import torch

from tritoncomm_kernels.numerics import INTERPRETED

_TILE = 8192
_NARROW_TILE = 4096
_INTERPRETED_TILE = 128 * 1024
_SEGMENT = 512
_REDUCE_ELEMENTS = 2048
_LANES = 64 if torch.version.hip else 32  # of a warp: AMD's tile is twice as large for as many loads in flight


@dataclass(frozen=True)
class Config:
    """One tile: ``block_rows`` rows of ``block_cols`` bytes each (both powers of two), and the warps that move it."""

    block_rows: int
    block_cols: int
    num_warps: int = 4


def config_for(
    op: str,
    unit_bytes: int,
    outer: int,
    cols_bytes: int,
    *,
    tile_bytes: int | None = None,
    device_name: str | None = None,
) -> Config:
    """The tile for ``outer`` rows of ``cols_bytes`` bytes moved in units of ``unit_bytes``.

    The same on every rank: it depends on its arguments and on the table shipped for ``device_name`` only.

    Args:
        op: ``pack``, ``unpack`` or ``reduce``.
        unit_bytes: bytes per access; for ``reduce`` the bytes of one element.
        outer: number of rows.
        cols_bytes: bytes of a row, padding on the wire included.
        tile_bytes: size of the tile, by default 8 KiB, 4 KiB for units of 1 and 2 bytes (fewer registers), and
            128 KiB in the interpreter, where a program costs milliseconds whatever its size.
        device_name: key of a tuned table (``configs/<device>.json``).

    Example:
        ``config_for("pack", 16, 4096, 8192)`` is 16 rows of 512 bytes; for one row it is 1 row of 8192 bytes.
    """
    tuned = _tuned(device_name, op, unit_bytes)
    tile = tile_bytes or tuned.get("tile_bytes") or _default_tile(op, unit_bytes)
    warps = tuned.get("num_warps", 4)
    if op == "reduce":
        return Config(1, tile, warps)
    cols = max(_power_of_two(cols_bytes), unit_bytes, 64)
    segment = tile if INTERPRETED and tile_bytes is None else tuned.get("segment_bytes", _SEGMENT)
    block_rows = max(1, min(tile // min(cols, segment), _power_of_two(outer)))
    return Config(block_rows, max(min(tile // block_rows, cols), unit_bytes), warps)


def _default_tile(op: str, unit_bytes: int) -> int:
    if INTERPRETED:
        return _INTERPRETED_TILE
    if op == "reduce":
        return _REDUCE_ELEMENTS * unit_bytes
    return (_NARROW_TILE if unit_bytes <= 2 else _TILE) * _LANES // 32


def _tuned(device_name: str | None, op: str, unit_bytes: int) -> dict[str, int]:
    if device_name is None:
        return {}
    return _table(device_name).get(op, {}).get(str(unit_bytes), {})


@lru_cache(maxsize=16)
def _table(device_name: str) -> dict[str, dict[str, dict[str, int]]]:
    """``{op: {unit_bytes: {"tile_bytes": ..., "segment_bytes": ..., "num_warps": ...}}}``, empty if none is shipped."""
    name = "".join(c if c.isalnum() else "-" for c in device_name.lower())
    path = resources.files("tritoncomm_kernels") / "configs" / f"{name}.json"
    return json.loads(path.read_text()) if path.is_file() else {}


def _power_of_two(n: int) -> int:
    return 1 << max(n - 1, 0).bit_length()
