"""When the flight record is written without being asked: on SIGUSR1, on an uncaught error, by a watchdog.

Python runs a signal handler between two instructions of the main thread, which never comes while that is blocked in a
collective. The interpreter's C handler, though, writes the signal's number to a file descriptor at once
(``signal.set_wakeup_fd``), and a thread that reads it writes the record.
"""

import contextlib
import os
import signal
import sys
import threading
import time
from types import TracebackType
from typing import Any

from tritoncomm.debug.flight import open_calls, write_on

__all__ = ["SIGNAL", "WATCHDOG_SECONDS", "install"]

SIGNAL = signal.SIGUSR1
WATCHDOG_SECONDS = 60.0
"""Seconds after which a call that blocks the host is reported, once, with a record."""

_installed = threading.Event()


def install() -> None:
    """Install all three, once per process; the signal only from the main thread. They do nothing while it is off."""
    if not _installed.is_set() and threading.current_thread() is threading.main_thread():
        _installed.set()
        _install_hook()
        _install_signal()
        threading.Thread(target=_watch, name="tritoncomm-watchdog", daemon=True).start()


def _install_hook() -> None:
    before = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        write_on(f"uncaught {kind.__name__}: {error}")
        return before(kind, error, traceback)

    sys.excepthook = hook


def _install_signal() -> None:
    """A program's own handler of the signal, and its own descriptor for signals, keep working."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    if signal.getsignal(SIGNAL) is signal.SIG_DFL:
        signal.signal(SIGNAL, lambda number, frame: None)  # the default is to end the process
    before = signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    threading.Thread(target=_read, args=(read, before), name="tritoncomm-signals", daemon=True).start()


def _read(descriptor: int, before: int) -> None:
    while numbers := os.read(descriptor, 64):
        if before != -1:
            with contextlib.suppress(OSError):  # whoever had it may have closed it
                os.write(before, numbers)
        if SIGNAL in numbers:
            write_on(f"signal {SIGNAL.name}")


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
                    print(f"tritoncomm: {call.name}, {count}, waits for {seconds:.0f} s: {path}", file=sys.stderr)
