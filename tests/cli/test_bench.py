"""The command `tritoncomm bench`: ranks of its own or of a launcher, values before times, a table, a file."""

import json
import re
import subprocess
import sys
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from checkouts import checkout
from pool import Pool
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh

from bench import report
from tritoncomm.bench import by_hand, ranks
from tritoncomm.bench.exchanges import EXCHANGES, Place, TimedExchange
from tritoncomm.bench.run import content
from tritoncomm.bench.settings import SIZES, Settings, chosen, matches
from tritoncomm.cli.bench import cells, summary

SMALL = 1 / 16  # MiB
WITHOUT_DTENSOR = {"all_to_all", "Ulysses q, k, v, output", "dispatch and combine"}


def place_of(group: ProcessGroup, on_gpu: bool = False) -> Place:
    mesh, capture = DeviceMesh.from_group(group, "cpu"), ranks._graph_of if on_gpu else None
    return Place(group, mesh, torch.device("cpu"), on_gpu, torch.bfloat16, 64, capture)


def exchange(name: str) -> TimedExchange:
    (found,) = (one for one in EXCHANGES if one.name == name)
    return found


def peers_of(name: str) -> set[str]:
    has_none = name in WITHOUT_DTENSOR or "wire" in name or name.startswith("hop")
    return {"plain", "bare"} if has_none else {"plain", "DTensor", "bare"}


OF_EACH_KIND = ("sp2hp", "gather_from_sequence", "Ulysses", "all_reduce", "dispatch", "hop both")


@pytest.mark.parametrize("words", [OF_EACH_KIND, pytest.param((), marks=pytest.mark.slow)], ids=["some", "all"])
def test_exchanges_are_measured_with_their_peers(tmp_path: Path, words: tuple[str, ...]) -> None:
    """One command, within 80 columns; its file has a place on the page of benchmarks."""
    path = tmp_path / "exchanges.json"
    expected = [one for one, _ in chosen(Settings(only=words, sizes=(SMALL,), device="cpu"))]
    command = [sys.executable, "-m", "tritoncomm", "bench", "--mib", str(SMALL), "--budget", "200", "--json", str(path)]
    command += [text for word in words for text in ("--only", word)]
    done = subprocess.run(command, env=checkout() | {"COLUMNS": "80"}, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert all(len(line) <= 80 for line in lines if "written" not in line and "±" not in line)
    assert f"{len(expected)} rows: values and gradients of all providers are equal" in lines
    content = json.loads(path.read_text())
    assert {row["exchange"]: set(row["ratio"]) for row in content["rows"]} == {
        one.name: peers_of(one.name) for one in expected
    }
    assert (content["ranks"], content["backend"], content["failed"], content["left_out"]) == (2, "gloo", [], [])
    for row in content["rows"]:
        assert any(line.startswith(f"{row['exchange']} {SMALL:g} ") for line in lines), row["row"]
    page = report.page(written_as(tmp_path, "nvidia-x", content))
    assert "2 ranks over gloo, bfloat16." in page
    assert page.count("MiB, eager |") == len(expected)


def written_as(folder: Path, device: str, content: dict[str, Any]) -> Path:
    """A folder of results with the content as the exchanges of a device."""
    (folder / "results" / device).mkdir(parents=True)
    (folder / "results" / device / "exchanges.json").write_text(json.dumps(content))
    return folder / "results"


def test_the_page_has_exchanges_over_nccl_beside_the_targets(tmp_path: Path) -> None:
    us = {name: {"p20": 1.0} for name in ("ours", "plain")}
    row = {"row": "sp2hp 16 MiB, captured", "us": us, "ratio": {"plain": 0.9}, "spread": {"plain": 0.1}}
    content = {"backend": "nccl", "ranks": 8, "dtype": "bfloat16", "versions": {"NCCL": "2.30"}, "rows": [row]}
    assert report.PLACE in report.page(tmp_path)
    page = report.page(written_as(tmp_path, "nvidia-x", content))
    assert "nvidia-x: 0.90 ± 0.05 of its time (sp2hp 16 MiB, captured) |" in page
    assert report.PLACE not in page


@pytest.mark.slow
def test_it_joins_the_ranks_of_a_launcher() -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "3"]
    command = [*launcher, "-m", "tritoncomm", "bench", "--mib", str(SMALL), "--only", "hop", "--budget", "5"]
    done = subprocess.run(command, env=checkout(), capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("3 ranks over Gloo") == 1
    assert done.stdout.count("hop both ways") == 1


def wrong_on_one_rank(x: torch.Tensor, group: ProcessGroup) -> torch.Tensor:
    out = by_hand.ByHand.apply(x, group, by_hand.exchange_columns, by_hand.exchange_rows)
    return out + (torch.arange(len(out))[:, None] == 3) if group.rank() == 1 else out


def run_wrong(group: ProcessGroup) -> list[dict[str, Any]]:
    """Rows of an exchange whose peer has other values in one row of one rank."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(by_hand, "all_to_all_sp2hp", wrong_on_one_rank)
        return list(ranks._measured(exchange("sp2hp"), SMALL, "sp2hp", place_of(group), 0.1))


def test_what_differs_on_one_rank_is_not_timed(pool: Pool) -> None:
    """All ranks know it, and the command exits with 1."""
    for (row,) in pool.run(run_wrong, world=2):
        assert "us" not in row
        assert row["problem"] == "rank 1: result 0 of plain differs from ours in 32 of 32768 values"
        assert cells(row) == f"sp2hp: {row['problem']}"


def test_a_rank_that_fails_ends_the_run() -> None:
    """The error has the exchange and the rank, and no rank waits for another's timeout."""
    no_kernels = {"TRITONCOMM_PATH": "triton", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "tritoncomm", "bench", "--mib", str(SMALL), "--only", "sp2hp", "--device", "cpu"]
    done = subprocess.run(command, env=checkout() | no_kernels, capture_output=True, text=True, timeout=50)
    assert done.returncode == 1
    assert re.search(r"sp2hp 0.0625 MiB failed on rank [01]", done.stderr)


class Event:
    """A CUDA event whose time is always 1 ms after the one before."""

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None: ...

    def synchronize(self) -> None: ...

    def elapsed_time(self, end: "Event") -> float:
        return 1.0


class Graph:
    """A CUDA graph that calls again what it captured: nothing, but that it was asked."""

    replays = 0

    def replay(self) -> None:
        Graph.replays += 1


def run_as_on_a_gpu(group: ProcessGroup) -> list[dict[str, Any]]:
    """Rows with functions of CUDA in place of which nothing happens; DTensor refuses to be captured."""
    captured: list[Graph] = []

    def graph(one: Graph, capture_error_mode: str) -> AbstractContextManager[None]:
        assert capture_error_mode == "thread_local"
        captured.append(one)
        if len(captured) == 3:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        return nullcontext()

    with pytest.MonkeyPatch.context() as patch:
        cuda = {"Event": Event, "CUDAGraph": Graph, "graph": graph, "Stream": object, "stream": lambda _: nullcontext()}
        cuda |= {"synchronize": lambda: None, "reset_peak_memory_stats": lambda: None}
        cuda |= {"memory_allocated": lambda: 0, "max_memory_allocated": lambda: 2**17}
        for name, value in cuda.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(ranks, "MATMUL", 8)
        return list(ranks._measured(exchange("sp2hp"), SMALL, "sp2hp", place_of(group, on_gpu=True), 0.1))


def test_a_gpu_has_graphs_memory_and_a_product_beside(pool: Pool) -> None:
    for eager, captured in pool.run(run_as_on_a_gpu, world=2):
        providers = ["ours", "plain", "DTensor", "bare"]
        assert eager["peak"] == dict.fromkeys(providers, 2.0)
        assert eager["matmul"] == dict.fromkeys(providers, 1.0)
        assert list(captured["us"]) == ["ours", "plain", "bare"]
        assert captured["us"]["ours"]["p20"] == 1000.0
        assert captured["refused"] == ["DTensor: operation not permitted when stream is capturing"]
        rows = content(Settings(device="cpu"), [eager, captured, {"row": "hop, captured", "refused": ["ours: waits"]}])
        assert cells({"row": "hop, captured", "refused": ["ours: waits"]}) == "hop, captured: ours: waits"
        assert rows["failed"] == []
        assert "cannot be captured: hop, captured: ours: waits" in summary(rows)
        assert "peak memory: at most 2.00 inputs where plain has 2.00 (sp2hp, eager)" in summary(rows)


def test_sizes_and_names_choose_the_exchanges() -> None:
    assert [mib for _, mib in chosen(Settings(only=("hp2sp",), device="cpu"))] == list(SIZES["cpu"])
    assert [one.name for one, _ in chosen(Settings(only=("hop", "copy"), sizes=(2,)))] == [
        "hop forward", "hop both ways", "hop forward, strided", "copy_to",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("words", "name", "expected"),
    [
        ("hop", "hop both ways", True),
        ("WAYS hop", "hop both ways", True),
        ("hop forward", "hop both ways", False),
        ("24", "pack run 1024 world 8", False),
        ("run 1024", "pack run 1024 world 8", True),
        ("sp2hp", "all_to_all_sp2hp [8, 16]", True),
        ("", "anything", True),
    ],
)
def test_words_choose_names(words: str, name: str, expected: bool) -> None:
    assert matches(words, name) is expected
