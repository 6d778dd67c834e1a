"""Which tiles tensors get, and whether their machine code is good."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from tritoncomm_kernels import Config

from tritoncomm.tune.candidates import Candidate
from tritoncomm.tune.machine_code import TARGETS, build_all
from tritoncomm.tune.static import Check, checks, fault

__all__ = ["EVERY_TARGET", "audit", "reachable"]

# One of each vendor, the others in `make test-all`: these repeat most of what a compilation can get wrong.
_IN_EVERY_RUN = ("sm_90", "gfx942")
EVERY_TARGET = [each if each in _IN_EVERY_RUN else pytest.param(each, marks=pytest.mark.slow) for each in TARGETS]

_SIZE = {"i64": 8, "i32": 4, "i16": 2, "i8": 1, "fp32": 4, "bf16": 2}


def reachable(op: str, unit: int, candidate: Candidate) -> set[Config]:
    """Every tile that tensors of any size get from a candidate."""
    sizes = [2**n for n in range(21)]
    return {candidate.config(op, unit, outer, cols) for outer in sizes for cols in sizes if cols >= unit}


def audit(tiles: Sequence[tuple[str, int, Config]], target: str) -> list[str]:
    """Faults in the machine code of tiles, in words.

    Args:
        tiles: operation, unit and tile.
        target: a key of ``TARGETS``.

    The width of accesses counts where a tile has a full unit for every thread; tiles of smaller tensors have not.
    """
    mine = [(unit, tile, check) for op, unit, tile in tiles for check in checks(op, unit, tile)]
    codes = build_all([check.build for _, _, check in mine], target)
    faults = []
    for (unit, tile, check), code in zip(mine, codes, strict=True):
        threads = tile.num_warps * TARGETS[target].warp_size
        full = tile.block_rows * tile.block_cols >= threads * _bytes_needed(check)
        reason = fault(code, check if full else replace(check, width=0))
        if reason:
            faults.append(f"{target}, unit {unit}, {tile.block_rows} x {tile.block_cols} B: {reason}")
    return faults


def _bytes_needed(check: Check) -> int:
    """Bytes of a tile per thread from which every access can have its width: of the smaller of two element types."""
    sizes = [_SIZE.get(kind.removeprefix("*"), 8) for name, kind in check.build.types.items() if name.endswith("_ptr")]
    return check.width * max(sizes[:2]) // min(sizes[:2])
