"""When the flight record is written: beside handlers of the program, in threads and forks, on disks that are full."""

import contextlib
import faulthandler
import io
import json
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import run_job

import tritoncomm
from tritoncomm import record, variables
from tritoncomm.debug import flight, signals
from tritoncomm.errors import PeerError
from tritoncomm.groups import ParallelMode, get_group

ROOT = Path(__file__).parents[2]
NAME = "tritoncomm-flight-0.json"


def turn_on(folder: Path, with_signals: bool = True) -> None:
    """Turn the record on, as the variables do at import, and make one call."""
    variables.FLIGHT.assign((16, str(folder)))
    variables.FLIGHT_SIGNALS.assign(with_signals)
    record.begin("f", "all_reduce", None, torch.ones(2), (None,))
    record.add("f", "view", 0, 1, 0.0)


def reason_in(folder: Path, seconds: float = 10.0, calls: int = 1) -> str:
    """Why the record was written, which is then removed; empty if it is not within the time."""
    end = time.monotonic() + seconds
    while not (folder / NAME).exists():
        if time.monotonic() > end:
            return ""
        time.sleep(0.01)
    data = json.loads((folder / NAME).read_text())
    (folder / NAME).unlink()
    assert [call["name"] for call in data["calls"]] == ["f"] * calls
    while partial := [path.name for path in folder.iterdir() if path.name.startswith(".")]:
        assert time.monotonic() < end + 5, f"{partial} stay"  # another thread may be writing one
        time.sleep(0.01)
    return data["reason"]


def send() -> None:
    os.kill(os.getpid(), signal.SIGUSR1)


def said(function: Callable[[], Any]) -> str:
    """What it prints on standard error."""
    with contextlib.redirect_stderr(io.StringIO()) as stream:
        function()
    return stream.getvalue()


def handler_before(folder: Path) -> None:
    """The program's own handler, and its own descriptor, are called as well."""
    seen: list[int] = []
    signal.signal(signal.SIGUSR1, lambda number, frame: seen.append(number))
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    turn_on(folder)
    send()
    assert reason_in(folder) == "signal SIGUSR1"
    assert seen == [signal.SIGUSR1]
    assert os.read(read, 8) == bytes([signal.SIGUSR1])


def handler_after(folder: Path) -> None:
    turn_on(folder)
    seen: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: (seen.append(number), before(number, frame)))
    assert callable(before)
    send()
    assert reason_in(folder) == "signal SIGUSR1"
    assert seen == [signal.SIGUSR1]


def descriptor_after(folder: Path) -> None:
    """As asyncio sets its own, and takes it away again."""
    turn_on(folder)
    read, write = os.pipe()
    os.set_blocking(write, False)
    signal.set_wakeup_fd(write)
    for expected in (write, -1):
        send()
        assert reason_in(folder) == "signal SIGUSR1"
        assert signal.set_wakeup_fd(-1) == expected
    assert os.read(read, 8) == bytes([signal.SIGUSR1])


def foreign_handler(folder: Path) -> None:
    """A handler that Python does not know is left alone, and the record says that it is not written."""
    with (folder / "traceback").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file)
        assert "SIGUSR1 does not write the flight record: it has a handler outside" in said(lambda: turn_on(folder))
        send()
    assert "foreign_handler" in (folder / "traceback").read_text()
    assert not reason_in(folder, 0.3)


def foreign_handler_after(folder: Path) -> None:
    turn_on(folder)
    with (folder / "traceback").open("w") as file:
        faulthandler.register(signal.SIGUSR1, file=file, chain=True)
        send()
        assert reason_in(folder) == "signal SIGUSR1"
    assert "foreign_handler_after" in (folder / "traceback").read_text()


def ignored(folder: Path) -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    assert "SIGUSR1 does not write the flight record: the program, or what started it, ignores" in said(
        lambda: turn_on(folder)
    )
    send()
    assert not reason_in(folder, 0.3)


def in_fork(function: Callable[[], None]) -> None:
    """Call ``function`` in a forked process, and wait for it; what it raises is on its standard error."""
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
    child = os.fork()
    if not child:
        code = 1
        try:
            function()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0


def forked(folder: Path) -> None:
    """A worker has default actions, and its errors write nothing in its rank's place."""

    def worker() -> None:
        assert [signal.getsignal(each) for each in signals.SIGNALS] == [signal.SIG_DFL] * 2
        assert signal.set_wakeup_fd(-1) == -1
        assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
        sys.excepthook(KeyError, KeyError("worker"), None)
        assert not flight.flight.entries

    turn_on(folder)
    in_fork(worker)
    assert signal.pthread_sigmask(signal.SIG_BLOCK, ()) == set()
    assert not reason_in(folder, 0.3)
    send()
    assert reason_in(folder) == "signal SIGUSR1", "and the rank still writes its own"


def forked_and_blocked(folder: Path) -> None:
    """``terminate()`` ends a worker that is in native code, where no handler in Python would run."""
    lock = threading.Lock()
    lock.acquire()
    turn_on(folder)
    warnings.simplefilter("ignore", DeprecationWarning)  # of forks beside threads
    child = os.fork()
    if not child:
        lock.acquire()
        os._exit(1)
    time.sleep(0.2)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert not reason_in(folder, 0.3)


def forked_rank(folder: Path) -> None:
    """A forked process that makes calls is a rank: of a launcher that forks after the package was imported."""

    def rank() -> None:
        turn_on(folder)
        assert flight.flight.counts == {"unregistered NoneType": 1}
        assert all(map(signals._is_ours, signals.SIGNALS))
        assert {"tritoncomm-signals", "tritoncomm-watchdog"} <= {each.name for each in threading.enumerate()}
        for _ in range(2):
            send()
            assert reason_in(folder) == "signal SIGUSR1"

    turn_on(folder)
    in_fork(rank)


def as_lightning(sent: list[int]) -> None:
    """Take SIGTERM as a framework does that requeues its job: after the handler of before, where there is one."""
    before = signal.getsignal(signal.SIGTERM)

    def checkpoint(number: int, frame: Any) -> None:
        if before not in (signal.SIG_DFL, signal.SIG_IGN, None):
            assert callable(before)
            before(number, frame)
        sent.append(number)

    signal.signal(signal.SIGTERM, checkpoint)


def without_signals(folder: Path) -> None:
    """Frameworks that inspect or chain handlers find the same ones as without the record."""
    turn_on(folder, with_signals=False)
    assert [signal.getsignal(each) for each in signals.SIGNALS] == [signal.SIG_DFL] * 2
    assert not any(map(signals._is_caught, signals.SIGNALS))
    assert signal.set_wakeup_fd(-1) == -1
    assert "tritoncomm-signals" not in {each.name for each in threading.enumerate()}
    sent: list[int] = []
    as_lightning(sent)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(0.2)
    assert sent == [signal.SIGTERM]
    assert not reason_in(folder, 0.1)


def chained_terminate(folder: Path) -> None:
    """A handler of the program that calls that of before goes on to its own work, and decides how the process ends."""
    turn_on(folder)
    sent: list[int] = []
    as_lightning(sent)
    os.kill(os.getpid(), signal.SIGTERM)
    assert reason_in(folder) == "signal SIGTERM"
    assert sent == [signal.SIGTERM]


def own_terminate_before(folder: Path) -> None:
    sent: list[int] = []
    as_lightning(sent)
    before = signal.getsignal(signal.SIGTERM)
    turn_on(folder)
    assert signal.getsignal(signal.SIGTERM) is before
    os.kill(os.getpid(), signal.SIGTERM)
    assert reason_in(folder) == "signal SIGTERM"
    assert sent == [signal.SIGTERM]


def off_and_on_again(folder: Path) -> None:
    """Signals are turned off and on again, as by a second ``initialize()``."""
    turn_on(folder)
    variables.FLIGHT_SIGNALS.assign(False)
    assert [signal.getsignal(each) for each in signals.SIGNALS] == [signal.SIG_DFL] * 2
    assert signal.set_wakeup_fd(-1) == -1
    for _ in range(3):
        turn_on(folder)
    assert sum(each.name == "tritoncomm-signals" for each in threading.enumerate()) == 1
    assert sum(each.name == "tritoncomm-watchdog" for each in threading.enumerate()) == 1
    send()
    assert reason_in(folder, calls=4) == "signal SIGUSR1"
    variables.FLIGHT.assign((0, ""))
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def initialized_again(folder: Path) -> None:
    """Groups that are made again change neither handlers nor threads, nor what the watchdog writes."""
    os.environ |= {"TRITONCOMM_FLIGHT": f"16:{folder}", "TRITONCOMM_FLIGHT_SIGNALS": "0"}
    signals.PERIOD = 0.1
    for _ in range(3):
        tritoncomm.initialize()
        record.begin("f", "all_reduce", get_group(ParallelMode.GLOBAL), torch.ones(2), (None,))
        record.add("f", "view", 0, 1, 0.0)
        tritoncomm.destroy()
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    assert sum(each.name == "tritoncomm-watchdog" for each in threading.enumerate()) == 1
    (folder / NAME).unlink(missing_ok=True)  # of the first calls
    record.begin("f", "all_reduce", None, torch.ones(2), (None,))
    assert reason_in(folder, calls=4) == "periodic"


def periodically(folder: Path) -> None:
    """Into the folder that is named, where the record has changed, and once more when it has stopped to change."""
    signals.PERIOD = 0.1
    turn_on(folder, with_signals=False)
    assert reason_in(folder) == "periodic"
    assert reason_in(folder) == "periodic", "once more"
    assert not reason_in(folder, 0.5)
    record.begin("f", "all_reduce", None, torch.ones(2), (None,))
    assert reason_in(folder, calls=2) == "periodic"
    assert flight.write_on("f: PeerError") is not None
    time.sleep(0.5)
    assert reason_in(folder, calls=2) == "f: PeerError", "which says more, and has all calls"
    os.chdir(folder)
    variables.FLIGHT.assign((16, ""))
    record.begin("f", "all_reduce", None, torch.ones(2), (None,))
    assert not reason_in(folder, 0.5), "and nowhere else"


def paths_are_printed(folder: Path) -> None:
    """The path is printed once for periodic records, once for others, and for each ``dump()``."""
    signals.PERIOD = 0.1
    turn_on(folder, with_signals=False)

    def write() -> None:
        for reason in ("dump()", "f: PeerError", "uncaught PeerError", flight.PERIODIC, "dump()", flight.PERIODIC):
            flight.dump() if reason == "dump()" else flight.write_on(reason)

    end = f"is in {folder / NAME}"
    assert said(write).splitlines() == [
        f"tritoncomm: the flight record ({reason}) {end}" for reason in ("dump()", "f: PeerError", "periodic", "dump()")
    ]
    os.chdir(folder)
    variables.FLIGHT.assign((16, ""))
    assert said(lambda: flight.write_on("x")) == f"tritoncomm: the flight record (x) {end}\n"


def in_thread(folder: Path) -> None:
    """Errors that end a thread, and a thread that turns the record on."""
    text = said(lambda: run(lambda: turn_on(folder), "first"))
    assert "signals do not write the flight record: Python installs handlers in the main thread only" in text
    assert "worker failed" in said(lambda: run(fail, "second"))
    assert reason_in(folder) == "uncaught KeyError in thread 'second': 'worker failed'"
    run(sys.exit, "third")
    assert not reason_in(folder, 0.1)


def run(function: Callable[[], Any], name: str) -> None:
    thread = threading.Thread(target=function, name=name)
    thread.start()
    thread.join()


def fail() -> None:
    raise KeyError("worker failed")


def without_a_folder(folder: Path) -> None:
    """An error is reported in one line and never replaces the one that is being reported."""
    (folder / "file").touch()
    turn_on(folder / "file" / "below")
    for _ in range(2):
        text = said(lambda: record.failed("f", PeerError("x")))
        assert text.startswith("tritoncomm: the flight record cannot be written: "), text
        assert text.count("\n") == 1
    sys.stderr.close()
    record.failed("f", PeerError("x"))


def full_disk(folder: Path) -> None:
    """The record of before stays, and nothing of the one that did not fit."""
    turn_on(folder)
    assert flight.write_on("first") is not None
    resource.setrlimit(resource.RLIMIT_FSIZE, (50, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
    text = said(lambda: flight.write_on("second"))
    assert "cannot be written: OSError: " in text
    with pytest.raises(OSError, match="File too large"):
        flight.dump()
    assert reason_in(folder) == "first"


def many_writers(folder: Path) -> None:
    turn_on(folder)
    failed: list[str] = []

    def write(index: int) -> None:
        for count in range(20):
            failed.extend(["no file"] * (flight.write_on(f"{index}-{count}") is None))

    threads = [threading.Thread(target=write, args=(index,)) for index in range(8)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed
    assert reason_in(folder)


def without_calls(folder: Path) -> None:
    """A worker that imports the package has nothing to say, and says nothing in rank 0's place."""
    variables.FLIGHT.assign((16, str(folder)))
    variables.FLIGHT_SIGNALS.assign(True)
    send()
    said(lambda: sys.excepthook(KeyError, KeyError("worker"), None))
    assert not reason_in(folder, 0.3)


_PROGRAM = """
import os, signal, sys, threading, time, torch
from tritoncomm import record, variables
from tritoncomm.debug import signals
signals.PERIOD = 0.1
record.begin("f", "all_reduce", None, torch.ones(2), (None,))
record.add("f", "view", 0, 1, 0.0)
lock = threading.Lock()
lock.acquire()
print("ready", flush=True)
"""
_ENDS: dict[str, tuple[str, bool, int, str]] = {  # code, whether SIGTERM comes, exit code, and what is written
    "in python": ("while True: time.sleep(0.01)", True, -signal.SIGTERM, "signal SIGTERM"),
    "blocked": ("lock.acquire()", True, -signal.SIGTERM, "signal SIGTERM"),
    "a handler of its own": (
        "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), os._exit(3))); time.sleep(60)", True, 3,
        "signal SIGTERM",
    ),
    "its end": ("", False, 0, "the process ends"),
    "an error": ("1 / 0", False, 1, "uncaught ZeroDivisionError: division by zero"),
    "no folder": ("variables.FLIGHT.assign((16, ''))", False, 0, ""),
    "periodic, in python": ("while True: time.sleep(0.01)", True, -signal.SIGTERM, "periodic"),
    "periodic, blocked": ("lock.acquire()", True, -signal.SIGTERM, "periodic"),
    "periodic, a handler of its own": (
        "signal.signal(signal.SIGTERM, lambda *_: os._exit(3)); time.sleep(60)", True, 3, "periodic"
    ),
    "periodic, its end": ("time.sleep(0.5)", False, 0, "the process ends"),
}  # fmt: skip


def ended(folder: Path) -> None:
    """By SIGTERM, as launchers end the other ranks of a job that fails, by itself, and by an error."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join((str(ROOT), str(ROOT / "kernels")))}
    processes: dict[str, subprocess.Popen[bytes]] = {}
    for name, (code, *_) in _ENDS.items():
        into, with_signals = folder / name, not name.startswith("periodic")
        into.mkdir()
        processes[name] = subprocess.Popen(
            [sys.executable, "-c", _PROGRAM + code], cwd=into, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=environment | {"TRITONCOMM_FLIGHT": str(into), "TRITONCOMM_FLIGHT_SIGNALS": str(int(with_signals))},
        )  # fmt: skip
    for name, (_, is_terminated, exit_code, reason) in _ENDS.items():
        into, process = folder / name, processes[name]
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n", process.communicate()
        if is_terminated:
            deadline = time.monotonic() + 20
            while not (into / NAME).exists() and time.monotonic() < deadline:
                time.sleep(0.01)  # for the periodic record
            time.sleep(0.2)
            process.terminate()
        process.communicate(timeout=50)
        assert process.returncode == exit_code, name
        assert reason_in(into, 0) == reason, name


CASES = {
    each.__name__: each for each in (
        handler_before, handler_after, descriptor_after, foreign_handler, foreign_handler_after, ignored, forked,
        forked_and_blocked, forked_rank, without_signals, chained_terminate, own_terminate_before, off_and_on_again,
        initialized_again, periodically, paths_are_printed, in_thread, without_a_folder, full_disk, many_writers,
        without_calls,
    )
}  # fmt: skip


def run_case() -> str:
    folder = Path(os.environ["FOLDER"])
    folder.mkdir()
    assert signals.SIGNALS == (signal.SIGUSR1, signal.SIGTERM)
    {**CASES, "ended": ended}[os.environ["CASE"]](folder)
    return "good"


def in_processes(names: Collection[str], folder: Path) -> None:
    answers = run_job(run_case, [{"CASE": name, "FOLDER": str(folder / name)} for name in names])
    assert dict(zip(names, answers, strict=True)) == dict.fromkeys(names, "good")


def test_each_case_in_a_process_of_its_own(tmp_path: Path) -> None:
    in_processes(CASES, tmp_path)


@pytest.mark.slow
def test_ends_of_processes(tmp_path: Path) -> None:
    in_processes(["ended"], tmp_path)
