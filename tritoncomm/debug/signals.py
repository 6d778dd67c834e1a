"""When the flight record is written without being asked: on SIGUSR1 and SIGTERM, on an uncaught error, by a watchdog,
and at the end of the process.

Python runs a signal handler between two instructions of the main thread, which never comes while that is blocked in a
collective. The interpreter's C handler, though, writes the signal's number to a file descriptor at once
(``signal.set_wakeup_fd``), and a thread that reads it writes the record. Where the program has set another descriptor
since, as asyncio does, the handler itself writes it.

SIGTERM, with which launchers end the other ranks of a job that fails, ends the process as it would without this.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tritoncomm import variables
from tritoncomm.debug.flight import flight, open_calls, report, write_on

__all__ = ["SIGNAL", "WATCHDOG_SECONDS", "install"]

SIGNAL = signal.SIGUSR1
WATCHDOG_SECONDS = 60.0
"""Seconds after which a call that blocks the host is reported, once, with a record."""

_installed = threading.Event()
_descriptor = -1  # that signals are written to
_ending = threading.RLock()


def install() -> None:
    """Install all three, once per process; the signal only from the main thread. They do nothing while it is off."""
    if _installed.is_set():
        return
    _installed.set()
    _install_hooks()
    _start()
    os.register_at_fork(after_in_child=_after_fork)


def _start() -> None:
    """What a process has for itself: its threads, and the descriptor that signals are written to."""
    _install_signal()
    threading.Thread(target=_watch, name="tritoncomm-watchdog", daemon=True).start()


def _install_hooks() -> None:
    """Errors that end the program, or a thread of it; what was installed before is called as well."""
    before, before_in_threads = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        write_on(f"uncaught {kind.__name__}: {error}")
        return before(kind, error, traceback)

    def thread_hook(args: threading.ExceptHookArgs) -> Any:
        if args.exc_type is not SystemExit:  # which ends a thread silently
            name = "" if args.thread is None else f" in thread {args.thread.name!r}"
            write_on(f"uncaught {args.exc_type.__name__}{name}: {args.exc_value}")
        return before_in_threads(args)

    sys.excepthook, threading.excepthook = hook, thread_hook
    atexit.register(_at_exit)


def _at_exit() -> None:
    """A rank that made fewer calls than the others, and ends: where a folder is named, and nothing newer is in it."""
    if variables.FLIGHT.value[1] and flight.written < sum(flight.counts.values()) and not _forked:
        write_on("the process ends")


def _install_signal() -> None:
    """A program's own handler of the signal, and its own descriptor for signals, keep working."""
    global _descriptor
    if reason := _reason_against():
        report(f"{SIGNAL.name} does not write the flight record: {reason}")
        return
    read, _descriptor = os.pipe()
    os.set_blocking(_descriptor, False)
    if signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, _handle)  # the default is to end the process
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and not _is_caught(signal.SIGTERM):
        signal.signal(signal.SIGTERM, _terminate)
    before = signal.set_wakeup_fd(_descriptor, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(read, before), name="tritoncomm-signals", daemon=True).start()


def _reason_against() -> str:
    """Why the signal cannot be used; empty if it can."""
    if threading.current_thread() is not threading.main_thread():
        return "it was turned on outside of the main thread, where Python installs no handlers"
    handler = signal.getsignal(SIGNAL)
    if handler is signal.SIG_IGN:
        return "the program, or what started it, ignores the signal"
    if handler is None or (handler is signal.SIG_DFL and _is_caught(SIGNAL)):
        return "it has a handler outside of Python's signal module, as faulthandler.register sets one"
    return ""


def _is_caught(number: int) -> bool:
    """Whether the process has a handler of a signal, Python's or not; False where the system does not say."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _handle(number: int, frame: FrameType | None) -> None:
    """In the main thread, after the thread that reads the descriptor; in its place where that is another one."""
    if (now := signal.set_wakeup_fd(-1)) != -1:
        signal.set_wakeup_fd(now, warn_on_full_buffer=now != _descriptor)
    if now != _descriptor and not _forked:
        write_on(f"signal {SIGNAL.name}")


def _terminate(number: int, frame: FrameType | None) -> None:
    """In the main thread, if that is not blocked; the thread that reads the descriptor may be about it already."""
    _end()


def _end() -> None:
    """Write the record, and end the process by SIGTERM's default action; whoever comes second waits for that."""
    with _ending:
        write_on("signal SIGTERM")
        # From any thread, while Python's own module sets actions in the main one only.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)


_forked = False


def _after_fork() -> None:
    """In a forked process, as of a data loader: its signals are not this rank's, nor are the calls of its parent.

    Its threads are gone, and what it would write would take the place of its parent's record; until it makes a call.
    """
    global _forked
    _forked = True
    flight.forget()
    flight.counts.clear()
    flight.on_first_call = _become_rank
    with contextlib.suppress(ValueError):  # outside of the main thread
        now = signal.set_wakeup_fd(-1)
        if now not in (-1, _descriptor):
            signal.set_wakeup_fd(now)


def _become_rank() -> None:
    """A forked process makes its first call: it is a rank, as a launcher that forks starts them."""
    global _forked
    flight.on_first_call, _forked = None, False
    if variables.FLIGHT.value[0]:
        _start()


def _read(descriptor: int, before: int) -> None:
    while numbers := os.read(descriptor, 64):
        if before != -1:
            with contextlib.suppress(OSError):  # whoever had it may have closed it
                os.write(before, numbers)
        if SIGNAL in numbers:
            write_on(f"signal {SIGNAL.name}")
        if signal.SIGTERM in numbers and signal.getsignal(signal.SIGTERM) is _terminate and not _forked:
            _end()


def _watch() -> None:
    """Report every call that is under way for too long."""
    reported = 0
    while True:
        time.sleep(min(1.0, WATCHDOG_SECONDS / 4))
        now = time.time_ns()
        for call in open_calls(now - int(WATCHDOG_SECONDS * 1e9)):
            seconds = (now - call.start) / 1e9
            if call.start > reported:
                reported = call.start
                path = write_on(f"watchdog: {call.name} is under way for {seconds:.0f} s")
                if path is not None:
                    count = f"call {call.count} of group {call.group!r}"
                    report(f"{call.name}, {count}, waits for {seconds:.0f} s: {path}")
