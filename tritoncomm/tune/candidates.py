"""Candidate tiles: bytes per thread x bytes of a row x warps x eviction, for one operation and one width of access."""

from dataclasses import asdict, dataclass
from itertools import product

from tritoncomm_kernels.config import Config, default_candidate, tile_for
from tritoncomm_kernels.tables import EVICT_UNITS, OPS, UNITS

__all__ = ["Candidate", "candidates", "default", "groups"]

_WARPS = (4, 8)
_SEGMENTS = (256, 512, 1024, 2048, 4096)
_BYTES_PER_THREAD = (32, 64, 128, 256)
_NARROW_BYTES_PER_THREAD = (16, 32, 64)  # in units of 1 and 2 bytes every byte costs instructions and registers
_SUMMED_BYTES_PER_THREAD = (16, 32, 64, 128)


@dataclass(frozen=True, order=True)
class Candidate:
    """One row of a tuned table.

    Attributes:
        segment_bytes: bytes of a row in a tile, where there are rows enough to fill it; unused by ``reduce``.
        evict_first: whether elements that were read leave the caches first; ``pack`` and ``unpack`` in units of 8 and
            16 bytes only.
    """

    tile_bytes: int
    segment_bytes: int
    num_warps: int
    evict_first: bool = False

    @property
    def label(self) -> str:
        """Key of a candidate in files: ``tile/segment/warps``, with ``/evict`` where that is on."""
        return f"{self.tile_bytes}/{self.segment_bytes}/{self.num_warps}{'/evict' if self.evict_first else ''}"

    def config(self, op: str, unit: int, outer: int = 2**20, cols_bytes: int = 2**20) -> Config:
        """Return the tile of ``outer`` rows of ``cols_bytes`` bytes; by default of a tensor that fills any tile."""
        return tile_for(op, unit, outer, cols_bytes, *asdict(self).values())


def default(op: str, unit: int, lanes: int = 32) -> Candidate:
    """Return the candidate of ``config_for`` without a table, for warps of ``lanes`` threads."""
    return Candidate(*default_candidate(op, unit, lanes))


def candidates(op: str, unit: int, lanes: int = 32) -> list[Candidate]:
    """Return every candidate, the default first, then in order."""
    first = default(op, unit, lanes)
    if op == "reduce":
        sizes, segments = _SUMMED_BYTES_PER_THREAD, (first.segment_bytes,)
    else:
        sizes, segments = (_NARROW_BYTES_PER_THREAD if unit <= 2 else _BYTES_PER_THREAD), _SEGMENTS
    evictions = (False, True) if op != "reduce" and unit in EVICT_UNITS else (False,)
    axes = product(sizes, _WARPS, segments, evictions)
    tiles = {Candidate(each * lanes * warps, segment, warps, first_out) for each, warps, segment, first_out in axes}
    return [first, *sorted(tiles - {first})]


def groups() -> list[tuple[str, int]]:
    """Return operation and unit of every entry that a table can have."""
    return [(op, unit) for op in OPS for unit in sorted(UNITS, reverse=True) if op != "reduce" or unit <= 8]
