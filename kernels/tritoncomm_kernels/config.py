"""Tile of a call: a pure function of its sizes, which tuned tables override per device."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch

from tritoncomm_kernels import tables

# Bytes of a tile and of a row's segment, and warps: within 2 % of the best that `tune` found on an H200 without
# evict_first. Instructions bound narrow accesses, so longer segments share a row's address. Every access needs
# registers, and unpack needs more: its addresses on the strided side wait for the loads.
_TILES = {
    ("pack", 16): (8192, 256, 4), ("pack", 8): (8192, 4096, 8), ("pack", 4): (8192, 4096, 8),
    ("pack", 2): (2048, 1024, 4), ("pack", 1): (2048, 512, 4),
    ("unpack", 16): (8192, 256, 4), ("unpack", 8): (8192, 512, 4), ("unpack", 4): (8192, 1024, 4),
    ("unpack", 2): (4096, 1024, 4), ("unpack", 1): (2048, 512, 4),
}  # fmt: skip
_SUM = 16, 512, 4  # bytes of a part for each thread; the second is not used
# Threads of a warp where no device is asked. AMD's CDNA has 64: twice the tile for as many loads in flight.
LANES = 64 if torch.version.hip else 32


@dataclass(frozen=True)
class Config:
    """One tile, and how it is moved.

    Attributes:
        block_rows: its rows, a power of two.
        block_cols: bytes of each row, a power of two.
        num_warps: warps that move it.
        evict_first: whether the elements that pack and unpack read leave the caches first. Only in units of 8 and 16
            bytes: narrower units are bound by instructions, and this hint adds some.
    """

    block_rows: int
    block_cols: int
    num_warps: int = 4
    evict_first: bool = False


def config_for(
    op: str,
    unit_bytes: int,
    outer: int,
    cols_bytes: int,
    *,
    tile_bytes: int | None = None,
    device_name: str | None = None,
    sm_count: int = 0,
    lanes: int = LANES,
) -> Config:
    """Return the tile for ``outer`` rows of ``cols_bytes`` bytes moved in units of ``unit_bytes``.

    It depends on the arguments and on ``tables.chosen`` only, so ranks with equal tables have equal tiles.

    Args:
        op: ``pack``, ``unpack`` or ``reduce``.
        unit_bytes: bytes per access; for ``reduce`` the bytes of one element.
        outer: number of rows.
        cols_bytes: bytes of a row, padding on the wire included.
        tile_bytes: size of the tile; by default 8 KiB, and less for narrow units, which take more registers.
        device_name: name of the GPU whose tuned tables count; none by default.
        sm_count: its multiprocessors, 0 if unknown.
        lanes: threads of its warps.

    Example:
        ``config_for("pack", 16, 4096, 8192)`` is 32 rows of 256 bytes; for one row it is 1 row of 8192 bytes.
    """
    tuned, _path = _tuned(device_name, sm_count, op, unit_bytes)
    tile, segment, warps = default_candidate(op, unit_bytes, lanes)
    tile = tile_bytes or tuned.get("tile_bytes", tile)
    segment = tuned.get("segment_bytes", segment)
    warps, evict_first = tuned.get("num_warps", warps), bool(tuned.get("evict_first", False))
    return tile_for(op, unit_bytes, outer, cols_bytes, tile, segment, warps, evict_first)


def tile_for(
    op: str,
    unit_bytes: int,
    outer: int,
    cols_bytes: int,
    tile_bytes: int,
    segment_bytes: int,
    num_warps: int,
    evict_first: bool = False,
) -> Config:
    """Return a tile of at most ``tile_bytes``: ``segment_bytes`` of each row, more if the rows are too few to fill it.

    A segment is what a tile has of one row. Units as in ``config_for``; ``reduce`` has no rows and uses ``tile_bytes``
    unchanged.
    """
    if op == "reduce":
        return Config(1, tile_bytes, num_warps)
    cols, rows = max(power_of_two(cols_bytes), unit_bytes), power_of_two(outer)
    threads = 32 * num_warps
    # Each row per thread costs an address. Where rows are shorter than a segment, or too few to fill a tile with full
    # segments, a thread takes at most 16 units.
    has_short_rows, has_few_rows = cols < segment_bytes, rows * segment_bytes < tile_bytes
    if has_short_rows or has_few_rows:
        tile_bytes = min(tile_bytes, 16 * threads * unit_bytes)
    block_rows = max(1, min(tile_bytes // min(cols, segment_bytes), rows))
    # Each unit per thread in a row costs an integer division and registers, so a thread takes at most 8 beyond one
    # segment.
    longest = max(8 * threads * unit_bytes, segment_bytes)
    return Config(block_rows, max(min(tile_bytes // block_rows, cols, longest), unit_bytes), num_warps, evict_first)


def default_candidate(op: str, unit_bytes: int, lanes: int = LANES) -> tuple[int, int, int]:
    """Return ``tile_bytes``, ``segment_bytes`` and ``num_warps`` without a table, for warps of ``lanes``."""
    if op == "reduce":
        each, segment, warps = _SUM
        return each * lanes * warps, segment, warps
    tile, segment, warps = _TILES[op, unit_bytes]
    return tile * lanes // 32, segment, warps


def origin_of(op: str, unit_bytes: int, device_name: str | None, sm_count: int = 0) -> str:
    """Return the source of the tile of ``config_for``: the path of a table, or ``built in``."""
    return _tuned(device_name, sm_count, op, unit_bytes)[1]


@dataclass(frozen=True, slots=True)
class Crossover:
    """Sizes in bytes below which tensors are faster on torch's path.

    Attributes:
        least: of all units; smaller tensors are faster there whatever their unit.
        most: of all units; tensors of that size and larger never are.
        by_unit: for every unit. One that was not measured has ``most``: a kernel is not taken where it may be slower.
    """

    least: int
    most: int
    by_unit: Mapping[int, int]


def crossover_of(op: str, device_name: str | None = None, sm_count: int = 0) -> Crossover | None:
    """Return the crossovers of ``op`` in the tables of a device, None without any."""
    sizes: dict[int, int] = {}
    for table in tables.chosen(device_name, sm_count) if device_name else ():
        # The union keeps the size of the first table, which has precedence.
        sizes = {int(unit): size for unit, size in table.crossover_bytes.get(op, {}).items()} | sizes
    if not sizes:
        return None
    by_unit = {unit: sizes.get(unit, max(sizes.values())) for unit in tables.UNITS}
    return Crossover(min(by_unit.values()), max(by_unit.values()), by_unit)


@lru_cache(maxsize=64)
def device_key(device: int) -> dict[str, Any]:
    """Return the arguments by which ``config_for`` finds the tuned tables of a device; none for CPU tensors."""
    if device < 0:
        return {}
    properties = torch.cuda.get_device_properties(device)
    return {"device_name": properties.name, "sm_count": properties.multi_processor_count}


@lru_cache(maxsize=64)
def lanes_of(device: int) -> int:
    """Return the threads of a warp of a device: 64 on AMD's CDNA, 32 on its RDNA and on NVIDIA."""
    return LANES if device < 0 else torch.cuda.get_device_properties(device).warp_size


@lru_cache(maxsize=64)
def crossover(op: str, device: int) -> Crossover | None:
    """Return the crossovers of ``op`` on a GPU, by its tuned tables; None without any."""
    return crossover_of(op, **device_key(device))


def _tuned(device_name: str | None, sm_count: int, op: str, unit_bytes: int) -> tuple[dict[str, int], str]:
    """Return the entry of the first table that has one, and the path of that table."""
    for table in tables.chosen(device_name, sm_count) if device_name else ():
        entry = table.configs.get(op, {}).get(str(unit_bytes))
        if entry:
            return dict(entry), table.origin
    return {}, "built in"


def power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
