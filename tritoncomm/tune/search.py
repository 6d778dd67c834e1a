"""The loop of every search, in this process or on several cores: results are kept whatever ends it, and reused."""

import math
import os
import signal
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeout
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from multiprocessing import get_context
from typing import Any

from tritoncomm.tune import static
from tritoncomm.tune.candidates import Candidate, candidates
from tritoncomm.tune.machine_code import TARGETS

__all__ = ["COMPLETE", "INTERRUPTED", "OUT_OF_TIME", "Follow", "Task", "batches", "judge", "search"]

COMPLETE = "complete"
OUT_OF_TIME = "out of time"
INTERRUPTED = "interrupted"
Follow = Callable[[str, int, int], None]
_SAVE_EVERY_S = 2.0
_CANDIDATES = 4  # of a batch: one run of the disassembler, about a second of one core
_WORTH_A_WORKER = 8  # batches; a worker's imports take as long as three of them
_MAX_WORKERS = 8


@dataclass(frozen=True)
class Task:
    """Work that gives one result per key.

    Attributes:
        group: name in the progress bar.
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
    end: float = math.inf,
    follow: Follow | None = None,
    clock: Callable[[], float] = time.monotonic,
    parallel: bool = False,
) -> str:
    """Do the tasks whose results are not in ``done`` yet, in order, and put the results there; return how it ended.

    Args:
        done: results by key, of an earlier run too; added to task by task.
        save: writes ``done``; called every two seconds and at the end, also after Ctrl-C.
        end: reading of the clock, in seconds, from which on no further task starts.
        follow: called with the group, the keys done and the keys in total after each task.
    """
    missing = [task for task in tasks if not done.keys() >= set(task.keys)]
    workers = min(len(os.sched_getaffinity(0)), len(missing) // _WORTH_A_WORKER, _MAX_WORKERS) if parallel else 1
    total, left = (sum(len(task.keys) for task in some) for some in (tasks, missing))
    saved = clock()
    # The results of each missing task, in order. Without workers a task runs here, when its results are asked for.
    # Threads would not help with compilation, half of which is Python.
    finished = _in_processes(missing, workers, end - clock()) if workers > 1 else (task.work() for task in missing)
    try:
        with closing(finished):
            for task in missing:
                if clock() >= end:
                    return OUT_OF_TIME
                done.update(zip(task.keys, next(finished), strict=True))
                left -= len(task.keys)
                if follow is not None:
                    follow(task.group, total - left, total)
                if clock() - saved >= _SAVE_EVERY_S:
                    save()
                    saved = clock()
    except FutureTimeout:
        return OUT_OF_TIME
    except BrokenProcessPool:  # a worker was killed, or cannot import the main program: this process goes on
        return search(tasks, done, save, end=end, follow=follow, clock=clock)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        save()
    return COMPLETE


def _in_processes(tasks: Sequence[Task], workers: int, seconds: float) -> Generator[Sequence[Any], None, None]:
    """Yield the results of tasks in their order; raise ``TimeoutError`` after ``seconds``."""
    # Ctrl-C reaches all processes: this one ends the workers.
    pool = ProcessPoolExecutor(workers, get_context("spawn"), signal.signal, (signal.SIGINT, signal.SIG_IGN))
    try:
        yield from pool.map(_work, tasks, timeout=None if seconds == math.inf else seconds)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # a task that runs ends within a second or two


def _work(task: Task) -> Sequence[Any]:
    """Run a task: a function of the module, which a worker can be sent."""
    return task.work()


def batches(op: str, unit: int, target: str) -> list[Task]:
    """Return tasks that judge all candidates of one operation and unit, a few at a time, the built-in rule's first."""
    tried = candidates(op, unit, TARGETS[target].warp_size)
    batched = [tried[i : i + _CANDIDATES] for i in range(0, len(tried), _CANDIDATES)]
    return [
        Task(
            f"{op}, {unit} bytes",
            tuple(f"{op} {unit} {one.label}" for one in batch),
            partial(judge, op, unit, batch, target),
        )
        for batch in batched
    ]


def judge(op: str, unit: int, tried: Sequence[Candidate], target: str) -> list[dict[str, Any]]:
    """Return the verdicts of ``static.judge`` as results of a search, one per candidate."""
    verdicts = static.judge(op, unit, tried, target)
    name = {"op": op, "unit": unit}
    return [name | asdict(one) | asdict(verdict) for one, verdict in zip(tried, verdicts, strict=True)]
