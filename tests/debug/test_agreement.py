"""Ranks that differ in tables or variables are named in one warning, by whoever comes last; nobody waits."""

import json
import os
import socket
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from jobs import run_job
from torch.distributed import FileStore, HashStore
from tritoncomm_kernels import tables

import tritoncomm
from tritoncomm.debug import agreement

ALIKE = {
    "device": "X, 8 SMs", "tuned tables": "abcd", "TRITONCOMM_PATH": "auto", "TRITONCOMM_TABLE": "/t.json",
    "TRITONCOMM_CHECK": "off",
}  # fmt: skip
OTHER = ALIKE | {"device": "Y, 4 SMs", "tuned tables": "built in", "TRITONCOMM_TABLE": ""}


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({}, ""),
        ({1: {"TRITONCOMM_PATH": "torch"}}, "TRITONCOMM_PATH is auto on ranks 0, 2-4, torch on rank 1."),
        ({4: {"tuned tables": "built in"}}, "tuned tables for X, 8 SMs is abcd on ranks 0-3, built in on rank 4."),
        ({0: {"TRITONCOMM_TABLE": ""}}, ""),
        (
            {rank: {"tuned tables": ""} | ({"TRITONCOMM_TABLE": ""} if rank == 0 else {}) for rank in range(5)},
            "TRITONCOMM_TABLE for X, 8 SMs is unset on rank 0, /t.json on ranks 1-4.",
        ),
        ({3: OTHER, 4: OTHER}, ""),
        ({3: OTHER, 4: OTHER | {"tuned tables": "ef"}}, "tables for Y, 4 SMs is built in on rank 3, ef on rank 4."),
        ({2: {"TRITONCOMM_CHECK": "on"}}, "TRITONCOMM_CHECK is off on ranks 0-1, 3-4, on on rank 2. Messages between"),
        ({3: OTHER | {"TRITONCOMM_PATH": "triton"}}, "TRITONCOMM_PATH is auto on ranks 0-2, 4, triton on rank 3."),
    ],
)
def test_what_differs_is_told_by_rank(changed: dict[int, dict[str, str]], words: str) -> None:
    told = agreement.difference([ALIKE | changed.get(rank, {}) for rank in range(5)])
    assert bool(told) is bool(words)
    assert words in told
    assert ("Results are the same" in told) is bool(words and "CHECK" not in words)


def test_many_ranks_make_a_short_line() -> None:
    told = agreement.difference([ALIKE | {"TRITONCOMM_PATH": "torch" if rank % 2 else "auto"} for rank in range(4096)])
    assert "auto on ranks 0, 2, 4, 6, 8, 10, ..., torch on ranks 1, 3, 5, 7, 9, 11, ..." in told


@pytest.mark.parametrize("kind", ["hash", "file"])
def test_the_last_rank_compares_and_rounds_are_apart(tmp_path: Path, kind: str) -> None:
    store: Any = HashStore() if kind == "hash" else FileStore(str(tmp_path / "store"), 3)
    changed = ALIKE | {"TRITONCOMM_PATH": "torch"}
    for order, ranks, words in (
        ((2, 0, 1), [ALIKE] * 3, ""),
        ((1, 2, 0), [ALIKE, ALIKE, changed], "torch on rank 2"),
        ((0, 1, 2), [ALIKE] * 3, ""),
    ):
        told = [agreement.compare(store, rank, 3, ranks[rank]) for rank in order]
        assert told[:2] == ["", ""]
        assert words in told[2]
        assert bool(told[2]) is bool(words)


def test_a_rank_that_comes_more_often_waits_for_nobody() -> None:
    store = HashStore()
    assert [agreement.compare(store, 0, 2, ALIKE) for _ in range(5)] == [""] * 5
    late = agreement.compare(store, 1, 2, OTHER | {"TRITONCOMM_PATH": "torch"})
    assert "torch on rank 1" in late, "with the first round of rank 0"


def test_a_count_without_the_rank_behind_it_is_not_waited_for() -> None:
    store = HashStore()
    store.add(f"{agreement._KEY}/1", 1)
    assert agreement.compare(store, 0, 2, ALIKE) == ""


def table(path: Path, tile: int) -> Path:
    content = {
        "kind": "measured", "format": tables.FORMAT, "device": "X", "sm_count": 8, "source": tables.source_hash(),
        "triton": triton.__version__, "results": {path.name: {}}, "crossover_bytes": {},
        "configs": {"pack": {"16": {"tile_bytes": tile, "segment_bytes": 256, "num_warps": 8}}},
    }  # fmt: skip
    path.write_text(json.dumps(content))
    return path


def test_the_digest_is_of_what_counts_and_not_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {}
    for name, tile in (("a", 4096), ("b", 4096), ("c", 8192)):
        monkeypatch.setenv("TRITONCOMM_TABLE", str(table(tmp_path / name, tile)))
        tables.chosen.cache_clear()
        found[name] = tables.digest("X", 8)
    monkeypatch.setenv("TRITONCOMM_TABLE", "none")
    tables.chosen.cache_clear()
    try:
        assert found["a"] == found["b"] != found["c"]
        assert tables.digest("X", 8) == "built in"
    finally:
        tables.chosen.cache_clear()


def test_cuda_is_not_started_to_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_device_properties", None)
    assert agreement.settings()["device"] == "CPU"


def initialize_twice() -> list[str]:
    """The warnings of one rank that initializes twice over its own default group."""
    import torch.distributed as dist

    import tritoncomm

    rank = int(os.environ["PLACE"])
    dist.init_process_group("gloo", store=dist.FileStore(os.environ["STORE"], 2), rank=rank, world_size=2)
    os.environ["TRITONCOMM_PATH"] = os.environ["LATER"]  # after the import
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            tritoncomm.initialize(tensor=2)
            tritoncomm.destroy()
    return [str(one.message) for one in caught if issubclass(one.category, RuntimeWarning)]


def test_a_job_warns_once_each_time_it_initializes(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    rank_0 = {"PLACE": "0", "STORE": store, "LATER": "off", "TRITONCOMM_CHECK": "1"}
    rank_1 = {"PLACE": "1", "STORE": store, "LATER": "torch", "TRITONCOMM_CHECK": "False"}
    answers = run_job(initialize_twice, [rank_0, rank_1])
    said = [message for one in answers for message in one]
    assert len(said) == 2, answers
    for message in said:
        assert "TRITONCOMM_PATH is auto on rank 0, torch on rank 1" in message
        assert "TRITONCOMM_CHECK is on on rank 0, off on rank 1. Messages between" in message


def end_early(kind: str) -> str:
    """Rank 0 holds the job's store and ends as soon as it is initialized."""
    rank = int(os.environ["RANK"])
    real = agreement.compare
    if rank:
        agreement.compare = lambda *args: (time.sleep(1.0), real(*args))[1]
    tritoncomm.initialize(check=False)
    if not rank:
        os._exit(0)
    return kind


def test_a_rank_may_end_before_others_compare() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    common = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [common | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    assert run_job(end_early, ranks, "initialized", lost=(0,))[1] == "initialized"
