"""Processes of a run, watched: an error, an end or a hang of one of them is named with the module that it stood in."""

import json
import mmap
import multiprocessing
import os
import signal
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

from torch.multiprocessing.spawn import start_processes

from tritoncomm.errors import ArgumentError, CommError
from tritoncomm.parsing import counted
from tritoncomm.verify.recording import ROOT

__all__ = ["Progress", "VerifyError", "run_processes"]

_GRACE = 3.0  # seconds in which the errors of other ranks are collected: the first one may be of another's making
_HEAD = struct.Struct("=QQ?H")  # events, collectives, whether a module began, bytes of the place
_SIZE = 512


class VerifyError(CommError):
    """A run that could not be compared: a rank raised, ended, or hangs. The message has its traceback, once."""


class State(NamedTuple):
    """Progress of a process.

    Attributes:
        events: modules that began, collectives, and printed lines.
        collectives: of them.
        has_begun: whether a module was called.
        place: module that it is in, in words.
    """

    events: int
    collectives: int
    has_begun: bool
    place: str


class Progress:
    """Progress of this process, in a file that its parent reads while the process runs."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(bytes(_SIZE))
        with path.open("r+b") as file:
            self._memory = mmap.mmap(file.fileno(), _SIZE)
        self._events = self._collectives = 0
        self._place, self._has_begun = b"", False

    def follow(self, module: str | None) -> None:
        """Note that a module begins, by its name; or a collective, by None."""
        if module is None:
            self._collectives += 1
        else:
            self._has_begun = True
            self._place = (module or ROOT).encode()[: _SIZE - _HEAD.size]
        self.event()

    def event(self) -> None:
        """Note that something happened."""
        self._events += 1
        head = _HEAD.pack(self._events, self._collectives, self._has_begun, len(self._place))
        self._memory[: _HEAD.size + len(self._place)] = head + self._place

    @staticmethod
    def read(path: Path) -> State:
        """Return the progress of another process."""
        content = (path.read_bytes() if path.exists() else b"").ljust(_SIZE, b"\0")  # it may be being made
        events, collectives, has_begun, length = _HEAD.unpack_from(content)
        return State(events, collectives, has_begun, content[_HEAD.size :][:length].decode(errors="replace"))


@dataclass(frozen=True)
class _Folder:
    """Files by which the processes of a run and their parent know of each other."""

    path: Path

    def progress(self, rank: int) -> Path:
        return self.path / f"progress.{rank}"

    def error(self, rank: int) -> Path:
        return self.path / f"error.{rank}"

    def end(self, rank: int) -> Path:
        return self.path / f"end.{rank}"

    def has_ended(self, rank: int) -> bool:
        """Whether a process has come to the end of its step."""
        return self.end(rank).exists()


def run_processes(
    function: Callable[..., None], arguments: Sequence[Any], count: int, folder: Path, timeout: float, quiet: bool
) -> None:
    """Run ``function(rank, progress, *arguments)`` in new processes; when one fails, end the others and raise.

    Args:
        folder: for the files of this run alone.
        timeout: seconds without progress of any process after which they are ended, from the first module on.
        quiet: what the processes print goes to standard error.

    Raises:
        ArgumentError: a process raised it.
        VerifyError: a process raised, died, ended early, or hangs.
    """
    folder.mkdir()
    files, method = _Folder(folder), "spawn"
    if "forkserver" in multiprocessing.get_all_start_methods():
        method = "forkserver"  # torch, and what its dispatch modes import, is imported once, not by every process
        multiprocessing.set_forkserver_preload(["torch", "torch._dynamo", "tritoncomm.verify.running"])
    given = (function, tuple(arguments), count, files, quiet)
    context: Any = start_processes(_child, given, nprocs=count, join=False, start_method=method)
    try:
        _watch(context.processes, files, timeout)
    finally:
        for process in context.processes:
            process.kill()
        for process in context.processes:
            process.join()


def _child(
    rank: int, function: Callable[..., None], arguments: tuple[Any, ...], count: int, files: _Folder, quiet: bool
) -> None:
    """Run the function in this process; write how it ended."""
    progress = Progress(files.progress(rank))
    if quiet:
        os.dup2(2, 1)  # standard output goes where standard error goes
    write = sys.stdout.write

    def write_and_note(text: str) -> int:
        """Write, which counts as progress."""
        progress.event()
        return write(text)

    sys.stdout.write = write_and_note
    try:
        function(rank, progress, *arguments)
    except SystemExit:
        raise  # the parent sees that no step has ended
    except BaseException as error:
        kind = "argument" if isinstance(error, ArgumentError) else "raised"
        text = str(error) if kind == "argument" else traceback.format_exc()
        partial = files.path / f"partial.{rank}"
        partial.write_text(json.dumps({"kind": kind, "text": text}))
        partial.rename(files.error(rank))
        raise SystemExit(1) from None
    files.end(rank).touch()
    # A process that ends closes its connections, which a peer in the middle of its step would take for an error.
    while not all(map(files.has_ended, range(count))):
        time.sleep(0.02)


def _watch(processes: Sequence[BaseProcess], files: _Folder, timeout: float) -> None:
    """Wait until all processes have ended; raise when one has failed, or none makes progress."""
    ranks = range(len(processes))
    states, since = [Progress.read(files.progress(rank)) for rank in ranks], time.monotonic()
    while alive := [process.sentinel for process in processes if process.exitcode is None]:
        wait(alive, 0.2)
        if any(files.error(rank).exists() or _has_died(processes[rank], files, rank) for rank in ranks):
            break
        now = [Progress.read(files.progress(rank)) for rank in ranks]
        # Until the first rank has begun no time counts: imports take what they take.
        if now != states or not any(state.has_begun for state in now):
            states, since = now, time.monotonic()
        elif time.monotonic() - since > timeout:
            raise VerifyError(f"no progress for {timeout:g} s: {_standing(states, files)}")
    if not all(map(files.has_ended, ranks)):
        raise _failure(processes, files)


def _has_died(process: BaseProcess, files: _Folder, rank: int) -> bool:
    """Whether a process is over before the end of its step."""
    return process.exitcode is not None and not files.has_ended(rank)


def _failure(processes: Sequence[BaseProcess], files: _Folder) -> CommError:
    """Return the error of the process that failed first."""
    # A rank that raises leaves its peers in a collective, which then raise, too: the earliest counts. One that dies
    # writes nothing, so it counts before what its peers say of it.
    end, count = time.monotonic() + _GRACE, len(processes)
    while time.monotonic() < end and not all(
        files.error(rank).exists() or process.exitcode is not None for rank, process in enumerate(processes)
    ):
        time.sleep(0.05)
    label = (lambda rank: f"rank {rank}") if count > 1 else (lambda _: "one process")
    for rank, process in enumerate(processes):
        if process.exitcode is None or files.error(rank).exists() or files.has_ended(rank):
            continue
        status = process.exitcode
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with exit status {status}"
        state = Progress.read(files.progress(rank))
        return VerifyError(f"{label(rank)} {how} before the end of its step, {_place(state)}")
    written = [rank for rank in range(count) if files.error(rank).exists()]
    rank = min(written, key=lambda each: files.error(each).stat().st_mtime_ns)
    error = json.loads(files.error(rank).read_text())
    if error["kind"] == "argument":
        return ArgumentError(error["text"])
    return VerifyError(
        f"{label(rank)} raised, {_place(Progress.read(files.progress(rank)))}:\n{error['text'].rstrip()}"
    )


def _standing(states: Sequence[State], files: _Folder) -> str:
    """Say what every rank stands in, the one first for which the others wait: it has the fewest collectives."""
    order = sorted(range(len(states)), key=lambda rank: (states[rank].collectives, rank))
    if len(states) == 1:
        return _place(states[0])
    return "; ".join(
        f"rank {rank} has ended its step, {_place(states[rank])}"
        if files.has_ended(rank)
        else f"rank {rank}, {_place(states[rank])}"
        for rank in order
    )


def _place(state: State) -> str:
    """Return the last module of a process in words."""
    if not state.has_begun:
        return "before its first module"
    return f"last module {state.place}, after {counted(state.collectives, 'collective')}"
