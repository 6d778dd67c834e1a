"""Checks in a process of their own that may crash or hang: what they found by then stays, the others go on after.

A GPU that met an illegal access answers no call of that process any more, and a collective that a rank has left never
ends. So the checks run in a child process, which says in a file what it begins and what it has found. One that dies or
takes too long is replaced by another that begins with the next check.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import torch

from bench.checks import Group, run_check

__all__ = ["LOST", "Check", "run_checks", "supervise"]

LOST = 75  # exit status of a child whose GPU no longer answers
Check = Callable[[Group], None]


class _Progress:
    """One line of JSON for every check that was begun, and one for every check that ended."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def begin(self, name: str) -> None:
        self._add({"begun": name})

    def end(self, group: Group) -> None:
        self._add({"ended": group.result()})

    def read(self) -> tuple[list[str], dict[str, Group]]:
        """Names in the order they were begun, and what ended."""
        lines = [json.loads(line) for line in self._path.read_text().splitlines() if line.endswith("}")]
        groups = [Group(**line["ended"]) for line in lines if "ended" in line]
        return [line["begun"] for line in lines if "begun" in line], {group.name: group for group in groups}

    def _add(self, line: dict[str, object]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def run_checks(checks: Mapping[str, Check], path: Path, deadline: float) -> None:
    """In the child: run the checks that nobody has begun; leave with ``LOST`` once the GPU no longer answers."""
    progress = _Progress(path)
    begun, _ = progress.read()
    for name, check in checks.items():
        if name in begun:
            continue
        progress.begin(name)
        group = run_check(name, check, deadline)
        progress.end(group)
        if group.failures and not _gpu_answers():
            os._exit(LOST)


def _gpu_answers() -> bool:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"    the GPU no longer answers this process: {str(error).splitlines()[0]}", flush=True)
        return False
    return True


def supervise(
    command: Sequence[str],
    names: Sequence[str],
    path: Path,
    deadline: float,
    each: float,
    found: Callable[[list[Group]], None],
) -> list[Group]:
    """Run ``command`` (which calls ``run_checks``) until every one of ``names`` was begun or the time is over.

    Args:
        path: the file that the child adds to.
        deadline: of the whole run, a value of ``time.monotonic()``.
        each: seconds that one check may take.
        found: called with all groups whenever there are more.

    Returns:
        A group for every name; a failure where the check crashed or hung, skipped where there was no time.
    """
    path.write_text("")
    progress = _Progress(path)
    while set(names) - set(progress.read()[0]) and time.monotonic() < deadline:
        before = len(progress.read()[0])
        with _child(command) as child:
            problem = _watch(child, progress, deadline, each, found)
        begun, ended = progress.read()
        for name in begun:
            if name not in ended:
                group = Group(name, failures=[problem])
                progress.end(group)
                print(group.line(), f"    FAILED: {problem}", sep="\n", flush=True)
        if len(begun) == before:
            raise RuntimeError(f"the checks did not start: {problem}")
    ended = progress.read()[1]
    late = [Group(name, skipped="the time of the run is over") for name in names if name not in ended]
    for group in late:
        print(group.line(), flush=True)
    groups = [*ended.values(), *late]
    found(groups)
    return groups


@contextmanager
def _child(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child that takes all of its own children with it, also when this process is told to end."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    child = subprocess.Popen(command, start_new_session=True)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):  # it and its children have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        signal.signal(signal.SIGTERM, before)


def _watch(
    child: "subprocess.Popen[bytes]",
    progress: _Progress,
    deadline: float,
    each: float,
    found: Callable[[list[Group]], None],
) -> str:
    """Wait for the child, no longer than it may take; how it ended."""
    seen, since = (0, 0), time.monotonic()
    while True:
        begun, ended = progress.read()
        if seen != (len(begun), len(ended)):
            seen, since = (len(begun), len(ended)), time.monotonic()
            found(list(ended.values()))
        limit = min(since + each, deadline + each / 4)
        try:
            status = child.wait(max(0.0, min(0.5, limit - time.monotonic())))
        except subprocess.TimeoutExpired:
            if time.monotonic() >= limit:
                return f"did not end within {time.monotonic() - since:.0f} s"
            continue
        return f"the process ended with {signal.Signals(-status).name if status < 0 else f'status {status}'}"
