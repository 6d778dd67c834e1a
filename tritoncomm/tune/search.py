"""The loop of every search, in this process or on several cores: results are kept whatever ends it, and reused."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from typing import Any

from tritoncomm.tune import static
from tritoncomm.tune.candidates import Candidate, candidates
from tritoncomm.tune.machine_code import TARGETS

__all__ = ["COMPLETE", "INTERRUPTED", "OUT_OF_TIME", "Batch", "Follow", "Task", "batches", "judge_all", "search"]

COMPLETE = "complete"
OUT_OF_TIME = "out of time"
INTERRUPTED = "interrupted"
Follow = Callable[[str, int, int], None]
_SAVE_EVERY_S = 2.0
_CANDIDATES = 4  # of a batch: one run of the disassembler, about a second of one core
_WORTH_A_WORKER = 8  # batches; a worker's imports take as long as three of them
_MAX_WORKERS = 8
_POLL_S = 0.5


@dataclass(frozen=True)
class Task:
    """Work that gives one result per key.

    Attributes:
        group: what the progress bar calls it.
        keys: names of the results, unique in a search.
        work: makes the results, in the order of the keys; values that JSON can hold.
    """

    group: str
    keys: tuple[str, ...]
    work: Callable[[], Sequence[Any]]


def search(
    tasks: Sequence[Task],
    done: dict[str, Any],
    save: Callable[[], None],
    *,
    budget: float | None = None,
    follow: Follow | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Do the tasks whose results are not in ``done`` yet, in order, and put the results there.

    Args:
        tasks: in this order.
        done: results by key, of an earlier run too; added to task by task.
        save: writes ``done``; called every two seconds and at the end, also after Ctrl-C.
        budget: seconds after which no further task starts; None for no limit.
        follow: called with the group, the keys done and the keys in total after each task.
        clock: seconds from any start.

    Returns:
        ``complete``, ``out of time`` or ``interrupted``.
    """
    total, started = sum(len(task.keys) for task in tasks), clock()
    finished, saved, state = 0, started, COMPLETE
    try:
        for task in tasks:
            if not done.keys() >= set(task.keys):
                if budget is not None and clock() - started >= budget:
                    state = OUT_OF_TIME
                    break
                done.update(zip(task.keys, task.work(), strict=True))
            finished += len(task.keys)
            if follow is not None:
                follow(task.group, finished, total)
            if clock() - saved >= _SAVE_EVERY_S:
                save()
                saved = clock()
    except KeyboardInterrupt:
        state = INTERRUPTED
    finally:
        save()
    return state


@dataclass(frozen=True)
class Batch:
    """Candidates of one operation and unit that are judged together."""

    op: str
    unit: int
    tried: tuple[Candidate, ...]
    target: str

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of the results."""
        return tuple(f"{self.op} {self.unit} {one.label}" for one in self.tried)

    @property
    def group(self) -> str:
        """What a progress bar calls it."""
        return f"{self.op}, {self.unit} bytes"

    def judge(self) -> list[dict[str, Any]]:
        """One result per key, of values that JSON can hold."""
        verdicts = static.judge(self.op, self.unit, self.tried, self.target)
        name = {"op": self.op, "unit": self.unit}
        return [name | asdict(one) | asdict(verdict) for one, verdict in zip(self.tried, verdicts, strict=True)]


def batches(op: str, unit: int, target: str) -> list[Batch]:
    """All candidates of one operation and unit, the built-in rule's first."""
    tried = candidates(op, unit, TARGETS[target].warp_size)
    return [Batch(op, unit, tuple(tried[i : i + _CANDIDATES]), target) for i in range(0, len(tried), _CANDIDATES)]


def judge_all(
    todo: Sequence[Batch],
    done: dict[str, Any],
    save: Callable[[], None],
    *,
    budget: float | None = None,
    follow: Follow | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Judge the batches whose results are not in ``done`` yet and put the results there; see ``search``.

    Where there is work for several cores it is done in processes of their own: half of a compilation is Python.

    Returns:
        ``complete``, ``out of time`` or ``interrupted``.
    """
    started = clock()
    missing = [batch for batch in todo if not done.keys() >= set(batch.keys)]
    workers = min(len(os.sched_getaffinity(0)), len(missing) // _WORTH_A_WORKER, _MAX_WORKERS)
    if workers > 1:
        try:
            return _in_processes(workers, todo, done, save, budget, follow, clock)
        except BrokenProcessPool:  # a worker was killed, or cannot import the main program: this process goes on
            budget = None if budget is None else budget - (clock() - started)
    tasks = [Task(batch.group, batch.keys, batch.judge) for batch in todo]
    return search(tasks, done, save, budget=budget, follow=follow, clock=clock)


def _in_processes(
    workers: int,
    todo: Sequence[Batch],
    done: dict[str, Any],
    save: Callable[[], None],
    budget: float | None,
    follow: Follow | None,
    clock: Callable[[], float],
) -> str:
    started = saved = clock()
    known = len(done)
    pool, state = ProcessPoolExecutor(workers, get_context("spawn")), COMPLETE
    try:
        with _no_interrupts():
            open_batches: dict[Future[Any], Batch] = {
                pool.submit(Batch.judge, batch): batch for batch in todo if not done.keys() >= set(batch.keys)
            }
        total = sum(len(batch.keys) for batch in todo)
        while open_batches:
            left = _POLL_S if budget is None else min(_POLL_S, budget - (clock() - started))
            if left <= 0:
                state = OUT_OF_TIME
                break
            for future in wait(open_batches, left, FIRST_COMPLETED).done:
                batch = open_batches.pop(future)
                done.update(zip(batch.keys, future.result(), strict=True))
                if follow is not None:
                    rest = sum(len(one.keys) for one in open_batches.values())
                    follow(batch.group, total - rest, total)
            if clock() - saved >= _SAVE_EVERY_S and len(done) > known:
                save()
                saved, known = clock(), len(done)
    except KeyboardInterrupt:
        state = INTERRUPTED
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a batch that runs ends within a second or two
        save()
    return state


@contextmanager
def _no_interrupts() -> Iterator[None]:
    """Processes that start inside do not see Ctrl-C: it is this process that ends them."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
