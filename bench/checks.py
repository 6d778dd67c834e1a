"""Counted checks without pytest: one printed line per group of them, and the time of the whole run as a limit."""

import faulthandler
import math
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

__all__ = ["Group", "limit_run", "run_check", "summary", "tried"]

SHOWN = 5


class _OutOfTimeError(Exception):
    pass


@dataclass
class Group:
    """One printed line: how many checks ran, which failed, and why it was skipped if it was."""

    name: str
    checks: int = 0
    failures: list[str] = field(default_factory=list)
    skipped: str = ""
    seconds: float = 0.0
    deadline: float = math.inf

    def expect(self, ok: bool, what: str) -> None:
        """Count a check; raises once the time of the whole run is over."""
        if time.monotonic() > self.deadline:
            raise _OutOfTimeError
        self.checks += 1
        if not ok:
            self.failures.append(what)

    def result(self) -> dict[str, Any]:
        """What a results file has of it."""
        return {name: value for name, value in vars(self).items() if name != "deadline"}

    def line(self) -> str:
        state = f"{len(self.failures)} failed" + (f", skipped: {self.skipped}" if self.skipped else "")
        return f"{self.name:34} {self.checks:6} checks, {state} ({self.seconds:.1f} s)"


def limit_run(seconds: float) -> None:
    """Print every line at once, and end the process after that long with the stack of every thread.

    Whatever ends a run, what it had found by then has been printed.
    """
    sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
    faulthandler.dump_traceback_later(seconds, exit=True)


def tried(group: Group, label: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """The result, or None and a failure that carries the error."""
    try:
        return call(*arguments)
    except Exception as error:
        group.expect(False, f"{label}: {type(error).__name__}: {error}")
        return None


def run_check(name: str, check: Callable[[Group], None], deadline: float) -> Group:
    """Run one group of checks until the deadline, and print how it went."""
    group, begun = Group(name, deadline=deadline), time.monotonic()
    try:
        check(group)
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except _OutOfTimeError:
        group.skipped = "the rest, the time of the run is over"
    except Exception:
        group.failures.append(traceback.format_exc(limit=-4))
    group.seconds = time.monotonic() - begun
    print(group.line(), flush=True)
    for failure in group.failures[:SHOWN]:
        print("    FAILED:", failure, flush=True)
    return group


def summary(groups: Sequence[Group], started: float) -> int:
    """Print the sums; the number of failures."""
    failed = sum(len(group.failures) for group in groups)
    print(f"{sum(group.checks for group in groups)} checks, {failed} failed, {time.monotonic() - started:.0f} s")
    return failed
