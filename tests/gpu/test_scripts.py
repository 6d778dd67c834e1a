"""What `make gpu` runs, on the CPU, so that the first run on a GPU is not the first run."""

import json
import math
import os
import re
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from bench import (
    closed_forms,
    gpu_bench,
    gpu_groups,
    gpu_ranks,
    gpu_test,
    guard,
    report,
    supervised,
    threaded,
    timing,
)
from bench.checks import Group, run_check
from bench.device import Device
from bench.formulations import PEERS
from bench.gpu_bench import Case
from bench.setting import make_setting
from tritoncomm import mappings
from tritoncomm.core import ops

ROOT = Path(__file__).parents[2]


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
        return {*PEERS[case.op], *(["compiled"] if case.is_compiled else [])}
    named = {"reduce": {"sum"}, "statistics": {"logsumexp + gather"}, "gradient": {"exp + scatter"}}
    return named[case.op] | ({"compiled"} if case.op in gpu_bench.ENTROPY else set())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", list(one_of_each()), ids=lambda case: case.label.replace(" ", "-"))
def test_every_peer_of_a_row_agrees(case: Case) -> None:
    prepared = gpu_bench.prepare(case, Device(dry=True))
    assert not prepared.wrong
    assert set(prepared.calls) == {"ours", *peers_of(case)}


def run_bench(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], only: str) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["gpu_bench.py", "--dry", "--only", only])
    return gpu_bench.main(), capsys.readouterr().out


@pytest.mark.filterwarnings("ignore")
def test_a_peer_that_differs_or_fails_is_told(
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
    monkeypatch.setattr(gpu_bench.kernels, "unpack", lambda wire, rows: rows.zero_().nbytes)
    status, said = run_bench(monkeypatch, capsys, "copy-out 64 MiB run 65536")
    assert status == 1
    assert "agree(result, want)" in said
    assert "0 rows" in said


@pytest.mark.filterwarnings("ignore")
def test_many_ranks_in_one_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    world, run, results = dist.distributed_c10d._world, gpu_ranks.run, []
    monkeypatch.setattr(gpu_ranks, "run", lambda *arguments: results.append(run(*arguments)) or results[0])
    monkeypatch.setattr(sys, "argv", ["gpu_ranks.py", "--dry", "--worlds", "2"])
    status, said = gpu_ranks.main(), capsys.readouterr().out
    assert status == 0, said
    mapped = 2 * (1 + 2 * 2 * len(closed_forms.MAPPINGS)) + 1  # ranks, directions, dtypes
    by_sizes = 2 * 2 * 2 * len(closed_forms.by_sizes(2))
    moved = 2 * 2 * 2 * 2 * 6  # and shapes, transitions
    counts = [group["checks"] for group in results[0]["groups"]]
    assert counts == [mapped, by_sizes, moved, len(gpu_ranks.LOCAL)]
    assert gpu_ranks.LEFT_OUT in said
    assert "are a projection from" in said
    assert not guard.compare(results[0], results[0])
    timing.write_json(tmp_path / "nvidia-x" / "gpu_ranks.json", results[0])
    page = report.page(tmp_path).split("## nvidia-x/gpu_ranks")[1]
    assert f"{gpu_ranks.SHARE}: ours / " in page
    assert page.count(", local part |") == len(gpu_ranks.LOCAL)
    results[0]["groups"][0]["failures"].append("no")
    monkeypatch.setattr(gpu_ranks, "run", lambda *_: results[0])
    assert gpu_ranks.main() == 1
    assert dist.distributed_c10d._world is world
    assert torch.autograd.is_multithreading_enabled()


def failures(check: Any, path: str = "triton") -> list[str]:
    with ops.path(path), threaded.launches_take_turns():
        return run_check("two", lambda group: check(group, 2, torch.device("cpu")), time.monotonic() + 60).failures


def doubled(x: Tensor, group: ProcessGroup) -> Tensor:
    """Right forward, twice the gradient."""
    y = mappings.scatter_to_sequence_parallel_region(x, group)
    return 2 * y - y.detach()


@pytest.mark.filterwarnings("ignore")
def test_what_is_wrong_on_many_ranks_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "DTYPES", (torch.float32,))
    monkeypatch.setattr(gpu_ranks, "MAPPINGS", ("scatter_sp",))
    assert failures(gpu_ranks.check_mappings) == []
    assert failures(gpu_ranks.check_mappings, "torch") == ["no kernel was launched"]
    for wrong, told in ((lambda x, _: x[: x.shape[0] // 2], ""), (doubled, ", backward")):
        with monkeypatch.context() as patch:
            patch.setitem(closed_forms.MAPPINGS, "scatter_sp", wrong)
            found = failures(gpu_ranks.check_mappings)
        assert f"scatter_sp torch.float32, rank 1 of 2{told}" in found
        assert all(line.endswith(", backward") for line in found if told)
    assert failures(gpu_ranks.check_transitions) == []
    pack = ops.pack
    monkeypatch.setattr(ops, "pack", lambda *given, **out: pack(*given, **out) if out else (pack(*given)[0] * 0, "", 0))
    assert "(1, 0) (16, 24) torch.float32, rank 1 of 2" in failures(gpu_ranks.check_transitions)


def test_what_is_timed_is_compared_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def check(group: Group, world: int, _: Any) -> None:
        gpu_ranks.time_local_parts(group, Device(dry=True), (world,), 1, [])

    assert failures(check) == []
    monkeypatch.setitem(PEERS["pack"], gpu_ranks.PEER, lambda rows, *_: rows)
    wrong = f"world 2: pack and {gpu_ranks.PEER} differ"
    assert failures(check) == [f"sp2hp, {wrong}", f"reduce_scatter_last, {wrong}"]


def test_a_check_that_raises_or_comes_too_late_is_told() -> None:
    def late(group: Group) -> None:
        group.expect(False, "in time")
        group.deadline = 0
        group.expect(False, "too late")

    assert "ZeroDivisionError" in run_check("raises", lambda _: print(1 / 0), math.inf).failures[0]
    found = run_check("late", late, math.inf)
    assert (found.failures, found.checks, bool(found.skipped)) == (["in time"], 1, True)


@pytest.mark.filterwarnings("ignore")
def test_backward_in_another_thread_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_ranks, "MAPPINGS", ())
    monkeypatch.setattr(gpu_ranks.threading, "get_ident", iter(range(99)).__next__)
    assert "rank 1: backward ran in another thread" in failures(gpu_ranks.check_mappings)


def test_a_rank_that_fails_or_hangs_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()

    def fails(rank: int, group: ProcessGroup) -> None:
        assert rank != 1, "no"
        dist.all_reduce(torch.ones(1), group=group)

    def hangs(rank: int, group: ProcessGroup) -> None:
        if rank == 1:
            go_on.wait(60)
        else:
            dist.all_reduce(torch.ones(1), group=group)

    with pytest.raises(threaded.ThreadedRanksError, match=r"ranks \[0\]: left a collective.*\nranks \[1\]: Trace"):
        threaded.run_ranks(2, fails)
    with pytest.raises(threaded.ThreadedRanksError, match=r"ranks \[0, 1\]: did not end within 1 s"):
        threaded.run_ranks(2, hangs, timeout=1)
    go_on.set()
    assert threaded.run_ranks(2, lambda rank, group: (rank, group.size())) == [(0, 2), (1, 2)]


def test_a_torch_without_threaded_ranks_is_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delattr(torch._C._distributed_c10d, "_set_thread_isolation_mode")
    monkeypatch.setattr(sys, "argv", ["gpu_ranks.py", "--dry"])
    assert gpu_ranks.main() == 2
    said = capsys.readouterr().out
    assert "has no threaded process group" in said
    assert "_set_thread_isolation_mode" in said


GROUPS = {"initialize() and destroy()": 12, "mappings: one rank, NCCL": 78, "torch.compile: CUDA graphs": 22}
LAUNCHES = ("capture and replay", "streams", "launch hooks", "narrow units beyond 2**31")
SLOW = ("torch.compile: CUDA graphs", "launch hooks")


def named(*names: str, slow: tuple[str, ...] = SLOW) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] if name in slow else []) for name in names]


def checked(name: str) -> Group:
    setting = make_setting(dry=True)
    return run_check(name, lambda group: gpu_test.CHECKS[name](group, setting), math.inf)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", named(*GROUPS, *LAUNCHES))
def test_groups_of_checks_run_dry(name: str) -> None:
    group = checked(name)
    assert (group.failures, group.skipped) == ([], "")
    assert group.checks >= GROUPS.get(name, 6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", named(*LAUNCHES, slow=(*SLOW, "capture and replay")))
def test_wrong_values_of_a_launch_are_seen(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    pack = ops.pack
    values = iter(range(10**6))

    def differs(*given: Any) -> Any:
        wire, *rest = pack(*given)
        return wire + next(values) % 100 + 1, *rest

    monkeypatch.setattr(ops, "pack", differs)
    assert any("pack" in failure for failure in checked(name).failures)


def on_two_ranks(group: ProcessGroup, name: str) -> tuple[int, list[str]]:
    found = Group(name)
    getattr(gpu_groups, name)(found, group.rank(), group, make_setting(dry=True))
    return found.checks, found.failures


@pytest.mark.parametrize(
    ("name", "least"),
    [
        pytest.param("_mappings", 42, marks=pytest.mark.slow),
        ("_p2p", 16),
        pytest.param("_compiled", 4, marks=pytest.mark.slow),
    ],
)
def test_what_two_processes_do(pool: Pool, name: str, least: int) -> None:
    for checks, failures in pool.run(on_two_ranks, name, world=2):
        assert failures == []
        assert checks >= least


@pytest.mark.slow
def test_two_processes() -> None:
    group = Group("two")
    gpu_groups._two_processes(group, make_setting(dry=True), "gloo", gpu_groups._mappings, fails_on_one_rank)
    assert group.checks == 85
    assert [failure.splitlines()[-1] for failure in group.failures] == ["ValueError: no"]


def fails_on_one_rank(group: Group, rank: int, *_: Any) -> None:
    if rank == 1:
        raise ValueError("no")


CHILD = """
import json, os, signal, sys, time
begun = [json.loads(line)["begun"] for line in open(sys.argv[1]) if "begun" in line]
def add(**line):
    with open(sys.argv[1], "a") as file:
        file.write(json.dumps(line) + chr(10))
for name in ("good", "crashes", "hangs", "also good", "leaves", "last"):
    if name in begun:
        continue
    add(begun=name)
    if name == "crashes":
        os.kill(os.getpid(), signal.SIGSEGV)
    if name == "hangs":
        time.sleep(60)
    add(ended=dict(name=name, checks=1, failures=["lost"] * (name == "leaves"), skipped="", seconds=0.1))
    if name == "leaves":
        os._exit(75)
"""


def test_a_crash_or_a_hang_ends_one_group_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, seen, started = tmp_path / "progress", [], time.monotonic()
    names = ["good", "crashes", "hangs", "also good", "leaves", "last"]
    command = [sys.executable, "-S", "-c", CHILD, str(path)]
    groups = supervised.supervise(command, names, path, started + 30, 2, seen.append)
    assert time.monotonic() - started < 25
    told = {group.name: (group.checks, group.failures) for group in groups}
    assert told["crashes"] == (0, ["the process ended with SIGSEGV"])
    assert re.fullmatch(r"did not end within \d s", told["hangs"][1][0])
    assert [told[name][0] for name in ("good", "also good", "leaves", "last")] == [1] * 4
    assert list(told) == names
    assert len(seen[-1]) == 6
    assert "FAILED: the process ended with SIGSEGV" in capsys.readouterr().out


def test_checks_that_never_start_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="did not start: the process ended with status 1"):
        supervised.supervise(["false"], ["one"], tmp_path / "progress", time.monotonic() + 30, 9, lambda _: None)


def test_what_there_is_no_time_for_is_told(tmp_path: Path) -> None:
    groups = supervised.supervise(["false"], ["one"], tmp_path / "progress", time.monotonic() - 1, 1, lambda _: None)
    assert [(group.name, group.skipped) for group in groups] == [("one", "the time of the run is over")]


def test_a_child_goes_on_where_another_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, ran = tmp_path / "progress", []
    path.write_text(json.dumps({"begun": "one"}) + "\n")

    def fails(group: Group) -> None:
        ran.append(group.name)
        group.expect(False, "no")

    supervised.run_checks(dict.fromkeys(("one", "two"), fails), path, math.inf)
    assert ran == ["two"]
    left: list[int] = []
    monkeypatch.setattr(supervised, "_gpu_answers", lambda: False)
    monkeypatch.setattr(os, "_exit", left.append)
    supervised.run_checks({"three": fails}, path, math.inf)
    assert left == [supervised.LOST]
    begun, ended = supervised._Progress(path).read()
    assert begun == ["one", "two", "three"]
    assert [group.failures for group in ended.values()] == [["no"], ["no"]]


@pytest.mark.slow
def test_the_whole_command_runs_dry(tmp_path: Path) -> None:
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    env = os.environ | {"PYTHONPATH": paths, "TRITON_INTERPRET": "1", "OUT": str(tmp_path)}
    command = [sys.executable, str(ROOT / "bench" / "gpu_test.py"), "--dry", "--only", "p2p"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^p2p: two processes, Gloo +41 checks, 0 failed", done.stdout, re.MULTILINE)
    (written,) = json.loads((tmp_path / "gpu_test.json").read_text())["groups"]
    assert (written["checks"], written["failures"]) == (41, [])


def test_the_run_on_a_gpu_fits_its_time() -> None:
    """The limits of `make gpu`, and the budgets inside them."""
    makefile = (ROOT / "Makefile").read_text()
    limits = {target: int(limit) for limit, target in re.findall(r"timeout (\d+) \$\(PY\) bench/(\w+)\.py", makefile)}
    (tune,) = re.findall(r"timeout (\d+) \$\(PY\) -m tritoncomm tune --budget (\d+)", makefile)
    runs = re.findall(r"^\t-?\$\(MAKE\) gpu-(\w+)$", makefile, re.MULTILINE)
    assert runs == ["test", "ranks", "bench", "bench"]
    assert sum(limits[f"gpu_{run}"] for run in runs) + int(tune[0]) <= 25 * 60
    assert int(tune[0]) > int(tune[1])
    assert limits["gpu_ranks"] >= gpu_ranks.BUDGET_S + gpu_ranks.GRACE_S
    assert limits["gpu_bench"] >= gpu_bench.PART.budget_s + gpu_bench.GRACE_S
    assert limits["gpu_test"] >= gpu_test.BUDGET_S + 20
