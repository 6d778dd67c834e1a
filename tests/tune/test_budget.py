"""Judging candidates ends within its share of the budget, on as many cores as there are, and is not done twice."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from fake_bench import FakeBench
from tritoncomm_kernels import tables

from tritoncomm.cli import tune as tune_command
from tritoncomm.tune import search, static, tuner
from tritoncomm.tune.candidates import Candidate, candidates
from tritoncomm.tune.tuner import TuneRequest

OPS = ("pack", "unpack", "reduce")


def verdict(cost: float, pruned: str = "") -> static.Verdict:
    return static.Verdict(pruned, cost, cost, 32, 0, [16], 8, 65536)


@pytest.fixture
def judge(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[str, int, int]]:
    """Judgement without a compiler: larger tiles cost less, one warp count is pruned; the calls."""
    calls: list[tuple[str, int, int]] = []

    def made_up(op: str, unit: int, tried: Sequence[Candidate], target: str) -> list[static.Verdict]:
        calls.append((op, unit, len(tried)))
        return [verdict(1 / one.tile_bytes, "spills" if one.tile_bytes > 2**15 else "") for one in tried]

    monkeypatch.setattr(static, "judge", made_up)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return calls


class Gpu(FakeBench):
    """A device whose machine code can be read."""

    target = "sm_90"


def in_threads(monkeypatch: pytest.MonkeyPatch, pool: Callable[..., Executor] = ThreadPoolExecutor) -> None:
    """Threads for processes, on a machine of four cores."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(4)))
    monkeypatch.setattr(search, "ProcessPoolExecutor", lambda workers, *_: pool(workers))


def test_a_budget_that_judging_would_use_up_ends_with_a_table(
    monkeypatch: pytest.MonkeyPatch, judge: list[tuple[str, int, int]]
) -> None:
    clock = [0.0]
    one_batch = search.judge

    def slow(*batch: Any) -> list[dict[str, Any]]:
        clock[0] += 3.0
        return one_batch(*batch)

    monkeypatch.setattr(search, "judge", slow)
    request = TuneRequest(ops=["pack"], shapes=["64x1024"], budget=30)
    first = Gpu(clock=clock)
    outcome = tuner.measure(request, first, clock=lambda: clock[0])
    assert outcome.state == search.OUT_OF_TIME
    assert len(judge) == 4, "a third of the budget, and the batch that was under way"
    assert len(first.timed) == 18
    assert outcome.content["configs"]["pack"]["16"]
    labels = [label for _, label in first.timed]
    judged = [key.rpartition(" ")[2] for key in outcome.content["judged"]]
    assert labels[0] == candidates("pack", 16)[0].label
    tile = {label: int(label.partition("/")[0]) for label in judged}
    ranked = [label for label in labels[1:] if label in judged]
    assert ranked == labels[1 : 1 + len(ranked)], "what was judged goes first"
    assert [tile[label] for label in ranked] == sorted((tile[label] for label in ranked), reverse=True)
    assert all(tile[label] <= 2**15 for label in ranked)

    second = Gpu(clock=clock)
    outcome = tuner.measure(TuneRequest(ops=["pack"], shapes=["64x1024"]), second, clock=lambda: clock[0])
    assert outcome.state == search.COMPLETE
    assert sum(count for _, _, count in judge) == len(candidates("pack", 16)), "nothing is judged twice"
    assert not {label for _, label in second.timed} & set(labels)
    assert outcome.warnings == []


def test_a_budget_that_is_over_at_once_ends_with_a_sentence(judge: list[tuple[str, int, int]]) -> None:
    clock = iter(range(10**6))
    outcome = tuner.measure(TuneRequest(ops=["pack"], shapes=["64x1024"], budget=0.5), Gpu(), clock=lambda: next(clock))
    lines: list[str] = []
    code = tune_command.verdict(
        outcome, SimpleNamespace(print=lambda line, **_: lines.append(line), is_terminal=False, stderr=False, width=80)
    )  # type: ignore[arg-type]
    assert (code, outcome.state) == (1, search.OUT_OF_TIME)
    assert "0 results" in lines[0]
    assert "over before the first one: give a larger --budget" in lines[0]
    assert outcome.path is not None
    assert tables.read(outcome.path).configs == {}


@pytest.mark.parametrize("kind", ["one process", "several"])
def test_several_cores_find_the_same(
    monkeypatch: pytest.MonkeyPatch, judge: list[tuple[str, int, int]], kind: str
) -> None:
    if kind == "several":
        in_threads(monkeypatch)
    done: dict[str, Any] = {}
    said: list[tuple[str, int, int]] = []
    saved: list[int] = []
    todo = [batch for op in OPS for batch in search.batches(op, 8, "sm_90")]
    done.update(zip(todo[2].keys, todo[2].work(), strict=True))
    judge.clear()
    state = search.search(todo, done, lambda: saved.append(len(done)), follow=lambda *a: said.append(a), parallel=True)
    assert state == search.COMPLETE
    assert set(done) == {key for batch in todo for key in batch.keys}
    assert len(judge) == len(todo) - 1, "what is there already is not judged again"
    assert max(finished for _, finished, _ in said) == len(done)
    assert saved[-1] == len(done)
    assert done == {key: one for batch in todo for key, one in zip(batch.keys, batch.work(), strict=True)}


def test_a_batch_that_does_not_end_is_not_waited_for(
    monkeypatch: pytest.MonkeyPatch, judge: list[tuple[str, int, int]]
) -> None:
    in_threads(monkeypatch)
    hang, one_batch = threading.Event(), search.judge
    monkeypatch.setattr(
        search, "judge", lambda op, *batch: one_batch(op, *batch) if op == "pack" else hang.wait(20) and []
    )
    todo = [batch for op in OPS for batch in search.batches(op, 8, "sm_90")]
    done: dict[str, Any] = {}
    started = time.monotonic()
    try:
        assert search.search(todo, done, lambda: None, end=started + 0.3, parallel=True) == search.OUT_OF_TIME
        assert time.monotonic() - started < 10
    finally:
        hang.set()
    assert set(done) == {key for batch in todo if batch.group.startswith("pack") for key in batch.keys}


class Broken(ThreadPoolExecutor):
    """Workers that die."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_exception(BrokenProcessPool("killed"))
        return future


def test_without_workers_this_process_goes_on(
    monkeypatch: pytest.MonkeyPatch, judge: list[tuple[str, int, int]]
) -> None:
    in_threads(monkeypatch, Broken)
    todo, done = [batch for op in OPS for batch in search.batches(op, 8, "sm_90")], {}
    before = signal.getsignal(signal.SIGINT)
    assert search.search(todo, done, lambda: None, parallel=True) == search.COMPLETE
    assert len(judge) == len(todo)
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_keeps_what_is_judged(monkeypatch: pytest.MonkeyPatch, judge: list[tuple[str, int, int]]) -> None:
    def press(*_: Any) -> None:
        raise KeyboardInterrupt

    for several in (False, True):
        if several:
            in_threads(monkeypatch)
        todo, done = [batch for op in OPS for batch in search.batches(op, 8, "sm_90")], {}
        assert search.search(todo, done, lambda: None, follow=press, parallel=True) == search.INTERRUPTED
        assert 0 < len(done) < sum(len(batch.keys) for batch in todo)


def test_a_static_ranking_in_a_folder_is_named_after_its_target(
    tmp_path: Path, judge: list[tuple[str, int, int]]
) -> None:
    request = TuneRequest(ops=["pack"], shapes=["64x64"], out=tmp_path)
    outcome = tuner.rank_static(request, "sm_90")
    assert outcome.path == tmp_path / "sm_90.json"
    assert outcome.path.is_file()
    judge.clear()
    assert tuner.rank_static(request, "sm_90").state == search.COMPLETE
    assert judge == [], "what the file holds is not judged again"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_real_processes_find_what_this_one_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    todo = [batch for op in ("pack", "unpack") for batch in search.batches(op, 8, "sm_90")][:4]
    alone: dict[str, Any] = {}
    shared: dict[str, Any] = {}
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0})
    assert search.search(todo, alone, lambda: None, parallel=True) == search.COMPLETE
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1})
    monkeypatch.setattr(search, "_WORTH_A_WORKER", 2)
    assert search.search(todo, shared, lambda: None, parallel=True) == search.COMPLETE
    assert shared == alone


@pytest.mark.parametrize("name", ["pipe", "/dev/null"])
def test_what_is_no_regular_file_is_not_replaced(tmp_path: Path, name: str) -> None:
    out = tmp_path / name
    if name == "pipe":
        os.mkfifo(out)
    with pytest.raises(ValueError, match="is not a regular file"):
        tuner.rank_static(TuneRequest(ops=["pack"], shapes=["64x64"], out=out), "sm_90")
    assert not out.is_file()
