"""Tuned tables as files that anybody may have written: a right answer, a named error or one warning."""

import copy
import io
import json
import os
import random
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import triton
from tritoncomm_kernels import tables
from tritoncomm_kernels.config import config_for, crossover_of

from tritoncomm.tune import results

DEVICE = ("GPU X", 8)
HOSTILE = (
    None, True, False, 0, 1, -1, 3, 64, 2**17, 2**31, 2**63, 10**400, -(10**30), 0.5, 1e308, float("nan"), float("inf"),
    "", "16", "pack", "\ud800", "x" * 5000, "\n", [], [1], [[]], {}, {"16": 1}, {"pack": {}}, {"tile_bytes": 64},
)  # fmt: skip


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    tables.chosen.cache_clear()
    yield
    tables.chosen.cache_clear()


def valid() -> dict[str, Any]:
    """A table with something of everything."""
    entry = {"tile_bytes": 4096, "segment_bytes": 256, "num_warps": 8}
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


def nodes(content: Any) -> list[tuple[Any, Any]]:
    """Every (container, key) of a JSON document."""
    keys = list(content) if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    found = [(content, key) for key in keys]
    return found + [node for key in keys for node in nodes(content[key])]


def mutated(drawn: random.Random) -> bytes:
    """A valid table with one to three changes to its structure or to its bytes."""
    content = valid()
    kind = drawn.choice(("value", "value", "value", "delete", "rename", "bytes", "cut", "nest"))
    for _ in range(drawn.randint(1, 3)):
        places = nodes(content)
        if kind not in ("value", "delete", "rename") or not places:
            break
        holder, key = drawn.choice(places)
        if kind == "value":
            holder[key] = copy.deepcopy(drawn.choice(HOSTILE))
        elif kind == "delete" or isinstance(holder, list):
            del holder[key]
        else:
            holder[drawn.choice(("pack", "unpack", "32", "16", "", "\ud800", "num_warps"))] = holder.pop(key)
    text = json.dumps(content).encode()
    if kind == "bytes":
        spoiled = bytearray(text)
        for _ in range(drawn.randint(1, 5)):
            spoiled[drawn.randrange(len(spoiled))] = drawn.randrange(256)
        return bytes(spoiled)
    if kind == "cut":
        return text[: drawn.randrange(len(text))]
    if kind == "nest":
        deep = drawn.choice((10, 500, 5000, 100_000))
        return text.replace(b'"complete": true', b'"complete": ' + b"[" * deep + b"]" * deep)
    return text


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


def test_4000_mutated_tables_are_read_or_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn, outcomes, started = random.Random(11), Counter[str](), time.process_time()
    key, longest = results.measured_key(*DEVICE), 0
    for _ in range(4000):
        file = InMemory(mutated(drawn))
        try:
            read = tables.read(file)
        except tables.TableError as error:
            outcomes["refused"] += 1
            longest = max(longest, len(str(error).encode()))
        else:
            outcomes["read"] += 1
            _is_right(read, monkeypatch)
        try:
            content = tables.read_json(file)
        except tables.TableError:
            continue
        if results._difference(content, key):
            outcomes["not gone on with"] += 1
        else:
            outcomes["gone on with"] += 1
            done = content.get("results", {})
            results.configs(done), results.crossovers(done), results.wrong(done)
    assert longest < 400, "nobody reads a document in a warning"
    assert min(outcomes.values()) > 200, outcomes
    assert len(outcomes) == 4
    assert time.process_time() - started < 10


def _is_right(read: tables.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tile and crossover that a table gives is one that kernels and paths can have."""
    with monkeypatch.context() as patch:
        patch.setattr(tables, "chosen", lambda *_: (read,))
        for op, units in read.configs.items():
            for unit in units:
                tile = config_for(op, int(unit), 4096, 8192, device_name="GPU X")
                assert tile.block_rows.bit_count() == tile.block_cols.bit_count() == 1
                assert int(unit) <= tile.block_rows * tile.block_cols <= 2**17
                assert tile.num_warps in (1, 2, 4, 8, 16)
        for op in read.crossover_bytes:
            found = crossover_of(op, "GPU X")
            assert found is None or 0 <= found.least <= found.most <= 2**62


@pytest.mark.parametrize("nesting", [990, 3000, 200_000])
def test_deep_nesting_is_an_error_by_name(tmp_path: Path, nesting: int) -> None:
    path = tmp_path / "deep.json"
    path.write_text("[" * nesting + "]" * nesting)
    with pytest.raises(tables.TableError, match=r"nested too deeply|not a measured table"):
        tables.read(path)
    with pytest.warns(RuntimeWarning, match="deep.json.old"):
        assert results.resume(path, results.measured_key(*DEVICE)) == {}


def hostile_places(folder: Path) -> dict[str, tuple[str, str]]:
    """Values of TRITONCOMM_TABLE with what is said about them."""
    os.mkfifo(folder / "pipe")
    (folder / "pipes").mkdir()
    os.mkfifo(folder / "pipes" / tables.table_name(*DEVICE))
    with (folder / "huge").open("wb") as file:
        file.truncate(2**34)
    return {
        "pipe": (str(folder / "pipe"), "not a regular file"),
        "pipe in a folder": (str(folder / "pipes"), "not a regular file"),
        "device": ("/dev/zero", "not a regular file"),
        "huge": (str(folder / "huge"), "larger than 32 MiB"),
        "no user": ("~nosuchuser/table.json", "no such user"),
        "long name": ("/tmp/" + "x" * 5000, "File name too long"),
        "long path": ("/x" * 5000, "File name too long"),
        "below a file": (f"{folder}/huge/table.json", "Not a directory"),
        "nothing": (f"{folder}/nothing.json", "No such file"),
    }


def test_places_that_hold_no_table_are_one_warning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    tracemalloc.start()
    for name, (value, words) in hostile_places(tmp_path).items():
        monkeypatch.setenv(tables.VARIABLE, value)
        tables.chosen.cache_clear()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert tables.chosen(*DEVICE) == (), name
            assert tables.digest(*DEVICE) == "built in"
        assert [words in str(one.message) for one in caught] == [True], (name, [str(one.message) for one in caught])
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**27


def test_a_user_without_a_home_has_no_table_and_no_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "expanduser", lambda self: (_ for _ in ()).throw(RuntimeError("no home")))
    assert tables.chosen(*DEVICE) == ()
    with pytest.raises(FileNotFoundError, match="no home directory"):
        results.user_path(*DEVICE)


def test_a_folder_of_odd_names_has_the_largest_part(tmp_path: Path) -> None:
    for parts in ("4", "12", "²", "x"):
        (tmp_path / f"gpu-x-{parts}.json").write_text("{}")
    assert tables.table_in(tmp_path, "GPU X", 0).name == "gpu-x-12.json"


def test_tables_of_a_gpu_with_wide_warps_are_read(tmp_path: Path) -> None:
    entry = {"tile_bytes": 256 * 64 * 8, "segment_bytes": 4096, "num_warps": 8}  # the largest that tune tries on AMD
    path = tmp_path / "t.json"
    path.write_text(json.dumps(valid() | {"configs": {"pack": {"16": entry}}}))
    assert tables.read(path).configs["pack"]["16"] == entry
    path.write_text(json.dumps(valid() | {"configs": {"pack": {"16": entry | {"num_warps": 4}}}}))
    with pytest.raises(tables.TableError, match="more than 512 for each of its threads"):
        tables.read(path)


def test_an_empty_table_is_none_for_the_digest(tmp_path: Path) -> None:
    path = results.user_path(*DEVICE)
    results.write(path, results.measured_key(*DEVICE) | {"configs": {}, "crossover_bytes": {}})
    assert len(tables.chosen(*DEVICE)) == 1
    assert tables.digest(*DEVICE) == "built in"
    assert triton.__version__ in path.read_text()
