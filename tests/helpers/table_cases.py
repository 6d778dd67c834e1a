"""Tuned tables that anybody may have written, and what has to come of them."""

import io
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

from hostile import spoiled
from tritoncomm_kernels import tables
from tritoncomm_kernels.config import config_for, crossover_of

from tritoncomm.tune import results

__all__ = ["DEVICE", "mutated", "outcomes_of", "valid"]

DEVICE = ("GPU X", 8)


def valid() -> dict[str, Any]:
    """A table with something of everything."""
    entry = {"tile_bytes": 4096, "segment_bytes": 256, "num_warps": 8, "evict_first": False}
    candidate = {"op": "pack", "unit": 16, "case": "a"} | entry
    verdict = dict.fromkeys(("registers", "spills", "loads_in_flight", "bytes_in_flight"), 1)
    verdict |= {"pruned": "", "cost": 1.5, "instructions_per_16_bytes": 2, "widths": [16]}
    return results.measured_key(*DEVICE) | {
        "configs": {"pack": {"16": entry, "1": entry}, "reduce": {"4": entry}},
        "crossover_bytes": {"pack": {"16": 65536, "2": 0}, "unpack": {}},
        "results": {
            "a": candidate | {"us": 1.5},
            "b": candidate | {"wrong": "3 of 7 elements differ"},
            "c": {"op": "pack", "unit": 16, "bytes": 4096, "torch_us": 2, "triton_us": 3.5},
        },
        "judged": {"pack 16 a": {"op": "pack", "unit": 16} | entry | verdict},
        "complete": True, "torch": "2.13.0",
    }  # fmt: skip


def mutated(drawn: random.Random) -> bytes:
    """A valid table with one to three changes to its structure or to its bytes."""
    return spoiled(valid(), drawn, ("pack", "unpack", "32", "16", "num_warps", "evict_first"))


class InMemory:
    """A file as far as ``read_json`` looks at one."""

    def __init__(self, text: bytes) -> None:
        self._text = text

    def exists(self) -> bool:
        return True

    def is_file(self) -> bool:
        return True

    def open(self, mode: str) -> io.BytesIO:
        assert mode == "rb"
        return io.BytesIO(self._text)

    def __str__(self) -> str:
        return "table.json"


def outcomes_of(text: bytes) -> Iterator[str]:
    """What comes of a table in a file: it is read or refused, and a search goes on with it or does not."""
    file = InMemory(text)
    try:
        read = tables.read(file)
    except tables.TableError as error:
        message = str(error)
        yield "refused"
    else:
        message = ""
        _is_right(read)
        yield "read"
    assert len(message.encode()) < 400, "nobody reads a document in a warning"
    try:
        content = tables.read_json(file)
    except tables.TableError:
        return
    if results._difference(content, results.measured_key(*DEVICE)):
        yield "not gone on with"
        return
    done = content.get("results", {})
    results.configs(done), results.crossovers(done), results.wrong(done)
    yield "gone on with"


def _is_right(read: tables.Table) -> None:
    """Every tile and crossover that a table gives is one that kernels and paths can have."""
    with mock.patch.object(tables, "chosen", return_value=(read,)):
        for op, units in read.configs.items():
            for unit in units:
                tile = config_for(op, int(unit), 4096, 8192, device_name="GPU X")
                assert tile.block_rows.bit_count() == tile.block_cols.bit_count() == 1
                assert int(unit) <= tile.block_rows * tile.block_cols <= 2**17
                assert tile.num_warps in (1, 2, 4, 8, 16)
        for op in read.crossover_bytes:
            found = crossover_of(op, "GPU X")
            assert found is None or 0 <= found.least <= found.most <= 2**62
