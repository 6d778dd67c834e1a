"""The loop of every search: what is done is kept, whatever ends it, and the next run goes on from there."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["COMPLETE", "INTERRUPTED", "OUT_OF_TIME", "SAVE_EVERY_S", "Task", "search"]

COMPLETE = "complete"
OUT_OF_TIME = "out of time"
INTERRUPTED = "interrupted"
SAVE_EVERY_S = 2.0


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
    follow: Callable[[str, int, int], None] | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Do the tasks whose results are not in ``done`` yet, in order, and put the results there.

    Args:
        tasks: what to do.
        done: results by key, of an earlier run too; added to task by task.
        save: writes ``done``; called every two seconds and at the end, also after Ctrl-C.
        budget: seconds after which no further task starts; None for no limit.
        follow: told the group, how many keys are done and how many there are, after each task.
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
            if clock() - saved >= SAVE_EVERY_S:
                save()
                saved = clock()
    except KeyboardInterrupt:
        state = INTERRUPTED
    finally:
        save()
    return state
