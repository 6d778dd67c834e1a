"""Benchmarks of `make gpu-bench` and `make gpu-ranks`, run on the CPU before they first run on a GPU."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpu_run
import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from bench import gpu_bench, gpu_ranks, gpu_step, guard, report, timing
from bench.device import BLOCK, GRACE_S, Device, gpu_main
from bench.formulations import OF_LISTS, PEERS
from bench.gpu_bench import Case
from bench.harness import Clock
from tritoncomm.core import ops
from tritoncomm.demo import Settings

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "kernels" / "tritoncomm_kernels"


def one_of_each() -> Iterator[Case]:
    """The first case of every operation, of every cast, and with and without a compiled peer."""
    seen = set()
    for case in gpu_bench.cases():
        kind = (case.op, case.out_dtype, case.is_compiled)
        if kind not in seen:
            seen.add(kind)
            yield gpu_bench.shrunk(case)


def peers_of(case: Case) -> set[str]:
    if case.op in PEERS:
        several = {"launch each", "foreach"} if case.op in ("copy-in", "copy-out") else set()
        return several.union(PEERS[case.op], ["compiled"] if case.is_compiled else [])
    if case.op in OF_LISTS:
        return set(OF_LISTS[case.op])
    several = {"FSDP2's op", "launch each", "foreach"}
    named = {
        "reduce": {"sum"}, "statistics": {"logsumexp + gather"}, "gradient": {"exp + scatter"},
        "mixed-in": {*several, "split + cat"}, "mixed-out": {*several, "chunk + contiguous"},
        "mixed-copy": {"contiguous", "launch each", "foreach"},
        "gather rows": {"index_select", "x[index]"}, "scatter rows": {"index_copy_"}, "padded": {"split + cat"},
        "sort owners": {"torch"}, "sort buckets": {"torch"},
    }  # fmt: skip
    return named[case.op] | ({"compiled"} if case.op in gpu_bench.ENTROPY else set())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", list(one_of_each()), ids=lambda case: case.label.replace(" ", "-"))
def test_every_peer_of_a_row_agrees(case: Case) -> None:
    prepared = gpu_bench.prepare(case, Device(dry=True))
    assert not prepared.wrong
    assert set(prepared.calls) == {"ours", *peers_of(case)}


def run_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only: str) -> tuple[int, str]:
    monkeypatch.setenv("COLUMNS", "160")  # rows in one line; xdist sets the width of its terminal
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--dry", "--only", only])
    return gpu_main(gpu_bench.PART), capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_peer_that_differs_or_fails_is_reported(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    only = "copy-in 64 MiB run 65536"
    status, said = run_bench(monkeypatch, capsys, only)
    assert (status, "of split + cat" in said, "0 failed" in said) == (0, True, True)
    assert "1 rows" in said

    def refuses(*_: Any) -> None:
        raise RuntimeError("not for this size")

    for wrong, code, told in (
        (lambda params, world, dtype: torch.stack(params).to(dtype), 1, "split + cat: other bits"),
        (refuses, 0, "split + cat left out: RuntimeError: ['not for this size']"),
    ):
        monkeypatch.setitem(PEERS["copy-in"], "split + cat", wrong)
        status, said = run_bench(monkeypatch, capsys, only)
        (line,) = (line for line in said.splitlines() if line.startswith("copy-in 0") and "roof" in line)
        assert "of split + cat" not in line
        assert "of FSDP2's op" in line
        assert (status, told in said) == (code, True)


@pytest.mark.filterwarnings("ignore")
def test_a_kernel_that_differs_fails_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def zeros(wire: torch.Tensor, rows: list[torch.Tensor], table: Any) -> int:
        return sum(row.zero_().nbytes for row in rows)

    monkeypatch.setattr(gpu_bench.kernels, "scatter_segments", zeros)
    status, said = run_bench(monkeypatch, capsys, "copy-out 64 MiB run 65536")
    assert status == 1
    assert "agree(result, want)" in said
    assert "0 rows" in said


class Timed(Device):
    """A device whose roof takes 10 us, or more by ``spread`` in every second round, and all else 11."""

    def __init__(self, spread: float) -> None:
        super().__init__(dry=True)
        self.spread, self.rounds = spread, []

    def times(self, calls: dict[str, Any], rounds: int, is_warm: bool = False) -> dict[str, list[float]]:
        self.rounds.append(rounds)
        roof = [10.0, 10.0 + self.spread] * rounds
        return {name: roof if name == "roof" else [11.0] * len(roof) for name in calls}


def test_a_share_near_its_target_is_measured_with_more_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times the rounds where the spread decides, and no more where it does not."""
    case = Case("unpack", "run", 4096, 512, 8)
    monkeypatch.setattr(Case, "has_target", True)
    for spread, rounds in ((3.0, [2, 4]), (0.0, [2])):
        device = Timed(spread)
        (row,) = gpu_bench.measure(case, device, Clock(gpu_bench.PART, 2))
        assert device.rounds == rounds
        assert row["target"] == 0.95


def test_sums_and_statistics_have_a_roof_of_reads() -> None:
    device = Device(dry=True)
    read = device.reads(6 * 4 * BLOCK + 3)
    read.args[0].fill_(2)
    assert read().tolist() == [2 * BLOCK] * 6
    roofs = {}
    for case in one_of_each():
        (row,) = gpu_bench.measure(case, device, Clock(gpu_bench.PART, 1))
        roofs[case.op] = row["roof"]
        assert row["target"] is None or case.op in gpu_bench.TARGET
    assert {op for op, roof in roofs.items() if roof == "reads"} == {"reduce", "statistics", "sum rows", "dot rows"}


def local_parts(only: str = "") -> list[dict[str, Any]]:
    with ops.path("triton"):
        cases = [case for case in gpu_ranks.CASES if only in case.label]
        return [row for case in cases for row in gpu_ranks.measure(case, Device(dry=True), Clock(gpu_ranks.PART, 1))]


def test_local_parts_are_timed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    rows = local_parts()
    assert len(rows) == len(gpu_ranks.CASES) == 12
    assert capsys.readouterr().out.count("projection: ") == len(rows)
    content = gpu_ranks.PART.content(rows)
    assert not guard.compare(content, content)
    timing.write_json(tmp_path / "nvidia-x" / "gpu_ranks.json", content)
    page = report.page(tmp_path).split("## nvidia-x/gpu_ranks")[1]
    assert f"{gpu_ranks.SHARE}: ours / " in page
    assert page.count(", local part |") == len(rows)


def test_what_is_timed_is_compared_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PEERS["pack"], gpu_ranks.PEER, lambda rows, *_: rows)
    for case in ("sp2hp world 2", "reduce_scatter_last world 2"):
        with pytest.raises(AssertionError, match=rf"^{case}: pack and split \+ cat differ"):
            local_parts(case)
    assert len(local_parts("hp2sp world 2")) == 1


def test_without_a_gpu_nothing_is_measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_ranks.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_main(gpu_ranks.PART) == 2
    assert "gpu_ranks: no CUDA device here" in capsys.readouterr().out


def test_the_run_on_a_gpu_fits_its_time() -> None:
    """The limits of the parts of `make gpu`, and the budgets inside them."""
    limits = {part.name: part.limit for part in gpu_run.PARTS}
    assert sum(limits.values()) <= 25 * 60
    for name, seconds in gpu_run.SHORT_S.items():
        assert sum(part.limit for part in gpu_run.parts_of([name])) <= seconds
    for name, budget in gpu_run.BUDGET_S.items():
        assert limits[name] > budget + gpu_run.EACH_S / 4
    for part, names in ((gpu_bench.PART, ("bench", "tuned")), (gpu_ranks.PART, ("local",))):
        assert min(limits[name] for name in names) >= part.budget_s + GRACE_S
    (tune,) = (part for part in gpu_run.PARTS if part.name == "tune")
    assert tune.limit > float(tune.command[tune.command.index("--budget") + 1])


def test_device_time_is_shared_out_by_owner(capsys: pytest.CaptureFixture[str]) -> None:
    names = {node.name for path in KERNELS.glob("*.py") for node in ast.parse(path.read_text()).body
             if isinstance(node, ast.FunctionDef) and node.name.endswith("_kernel")}  # fmt: skip
    assert set(gpu_step.OURS) == names
    times = [("_copy_kernel", 2.0), ("ncclDevKernel_AllGather", 3.0), ("sm90_gemm", 4.0), ("_segments_kernel", 1.0)]
    owners = gpu_step.shares(times)
    assert owners == {"tritoncomm": 3.0, "NCCL": 3.0, "others": 4.0}
    settings = Settings(device="cpu")
    assert gpu_step.report([owners, owners], 0.0, settings, dry=True) == 0
    assert "1.5 us of a step on a rank,  30.0% of its device time" in capsys.readouterr().out
    assert gpu_step.report([owners, owners], 1.0, settings, dry=True) == 1


def test_events_of_a_device_are_found() -> None:
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        torch.ones(3).add(1)
    names = {name for name, _ in gpu_step.times_on(DeviceType.CPU, profiler.events() or ())}
    assert {"aten::ones", "aten::add"} <= names
    assert not gpu_step.times_on(DeviceType.CUDA, profiler.events() or ())


@pytest.mark.slow
def test_a_step_is_profiled_on_every_rank(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_step.py", "--dry"])
    assert gpu_step.main() == 0
    assert "cpu: 2 ranks over gloo" in capsys.readouterr().out
    monkeypatch.setattr(sys, "argv", ["gpu_step.py"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_step.main() == 2
