"""Tuned tables as files that anybody may have written: a right answer, a named error or one warning."""

import json
import os
import random
import time
import tracemalloc
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import triton
from table_cases import DEVICE, mutated, outcomes_of, valid
from tritoncomm_kernels import tables

from tritoncomm.tune import results


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(tables.VARIABLE, raising=False)
    tables.chosen.cache_clear()
    yield
    tables.chosen.cache_clear()


def test_4000_mutated_tables_are_read_or_refused_by_name() -> None:
    drawn, outcomes, started = random.Random(11), Counter[str](), time.process_time()
    for _ in range(4000):
        outcomes.update(outcomes_of(mutated(drawn)))
    assert min(outcomes.values()) > 200, outcomes
    assert len(outcomes) == 4
    assert time.process_time() - started < 10


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


def test_tables_without_evict_first_have_it_off(tmp_path: Path) -> None:
    """Tables of format 1 have none; only copies in units of 8 and 16 bytes may have it on."""
    entry, path = {"tile_bytes": 4096, "segment_bytes": 256, "num_warps": 8}, tmp_path / "t.json"

    def written(op: str, unit: str, **more: object) -> tables.Table:
        path.write_text(json.dumps(valid() | {"format": 1 if not more else 2, "configs": {op: {unit: entry | more}}}))
        return tables.read(path)

    assert written("pack", "16").configs["pack"]["16"] == entry
    for op, unit in (("pack", "8"), ("unpack", "16")):
        for on in (False, True):
            assert written(op, unit, evict_first=on).configs[op][unit]["evict_first"] is on
    for op, unit, value in (("pack", "4", True), ("reduce", "8", True), ("pack", "16", 1), ("pack", "16", None)):
        with pytest.raises(tables.TableError, match=rf"damaged: configs\.{op}\.{unit}\.evict_first is {value}"):
            written(op, unit, evict_first=value)


def test_an_empty_table_is_none_for_the_digest(tmp_path: Path) -> None:
    path = results.user_path(*DEVICE)
    results.write(path, results.measured_key(*DEVICE) | {"configs": {}, "crossover_bytes": {}})
    assert len(tables.chosen(*DEVICE)) == 1
    assert tables.digest(*DEVICE) == "built in"
    assert triton.__version__ in path.read_text()
