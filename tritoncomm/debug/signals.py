"""Moments at which the flight record is written without being asked: an uncaught error, a call that is late, the end of
the process, each ten seconds into the folder that is named, and, with TRITONCOMM_FLIGHT_SIGNALS=1, two signals.

A record must not change how a process ends, so without that variable no signal has a handler of this package.

Python runs a signal handler between two instructions of the main thread, which never comes while that is blocked in a
collective. The interpreter's C handler, though, writes the signal's number to a file descriptor at once
(``signal.set_wakeup_fd``), and a thread that reads it writes the record. Where the program has set another descriptor
since, as asyncio does, the handler itself writes it.
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
from tritoncomm.debug.flight import PERIODIC, flight, open_calls, report, write_if_changed, write_on
from tritoncomm.debug.torch_recorder import Active, Recorder

__all__ = ["PERIOD", "SHARE", "SIGNALS", "WATCHDOG_SECONDS", "handle", "install"]

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
WATCHDOG_SECONDS = 60.0
"""Seconds after which a call that blocks the host, or has not completed on the device, is reported once."""
PERIOD = 10.0
"""Seconds between two records in a named folder, and between two questions to torch's recorder, or more."""
SHARE = 0.005
"""Share of its time that the watchdog may spend on both."""

_installed = threading.Event()
_is_on = False  # whether both signals write the record
_pipe: tuple[int, int] | None = None  # that signals are written to, and read from by a thread
_before = -1  # the program's own descriptor for signals
_ending = threading.RLock()
_reported: set[str] = set()
_masks = threading.local()  # of signals, of a thread that forks


def install() -> None:
    """Install the hooks and start the watchdog, once per process. They do nothing while the record is off."""
    if not _installed.is_set():
        _installed.set()
        _install_hooks()
        _start_watchdog()
        os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork)


def handle(on: bool) -> None:
    """Let both signals write the record, or restore their default actions; only the main thread can."""
    if on == _is_on:
        return
    if threading.current_thread() is threading.main_thread():
        _install_handlers() if on else _remove_handlers()
    elif on:
        _say_once("signals do not write the flight record: Python installs handlers in the main thread only")


def _start_watchdog() -> None:
    threading.Thread(target=_watch, name="tritoncomm-watchdog", daemon=True).start()


def _say_once(text: str) -> None:
    if text not in _reported:
        _reported.add(text)
        report(text)


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
    if variables.FLIGHT.value[1] and (flight.written != flight.progress() or flight.reason == PERIODIC):
        write_on("the process ends")


def _install_handlers() -> None:
    """Give each signal a handler where the program has none. Its own handlers stay, and the record is written too."""
    global _is_on, _pipe, _before
    usable = []
    for number in SIGNALS:
        if reason := _reason_against(number):
            _say_once(f"{number.name} does not write the flight record: {reason}")
            continue
        usable.append(number)
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle)
    _is_on = True
    if not usable:
        return
    if _pipe is None:
        _pipe = os.pipe()
        os.set_blocking(_pipe[1], False)
        threading.Thread(target=_read, args=(_pipe[0],), name="tritoncomm-signals", daemon=True).start()
    _before = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


def _remove_handlers() -> None:
    """Restore the default action of each signal, and the program's descriptor, where the program has set no other.

    The pipe stays open: whoever took its descriptor for that of before may set it again.
    """
    global _is_on
    _is_on = False
    for number in filter(_is_ours, SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    if _owns_wakeup():
        signal.set_wakeup_fd(_before)


def _is_ours(number: signal.Signals) -> bool:
    return signal.getsignal(number) is _handle


def _owns_wakeup() -> bool:
    """Whether signals are written to this package's descriptor. Python has no function that only reads it."""
    now = signal.set_wakeup_fd(-1)
    is_ours = _pipe is not None and now == _pipe[1]
    if now != -1:
        signal.set_wakeup_fd(now, warn_on_full_buffer=not is_ours)
    return is_ours


def _reason_against(number: signal.Signals) -> str:
    """Why a signal cannot be used; empty if it can."""
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN:
        return "the program, or what started it, ignores the signal"
    if handler is None or (handler is signal.SIG_DFL and _is_caught(number)):
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
    """In the main thread, unless that is blocked; the thread that reads the descriptor has the signal too."""
    if number == signal.SIGTERM or not _owns_wakeup():
        _write(signal.Signals(number))


def _write(number: signal.Signals) -> None:
    """Write the record, and end the process by SIGTERM where the program has no handler of its own.

    A handler of the program that calls this package's one decides itself how the process ends.
    """
    if number == signal.SIGTERM and _is_ours(number):
        _end()
    else:
        write_on(f"signal {number.name}")


def _end() -> None:
    """Write the record, and end the process as SIGTERM does; whoever comes second waits for that."""
    with _ending:
        write_on("signal SIGTERM")
        # From any thread, while Python's own module sets actions in the main one only.
        ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
        os.kill(os.getpid(), signal.SIGTERM)


def _read(descriptor: int) -> None:
    while numbers := os.read(descriptor, 64):
        if _before != -1:
            with contextlib.suppress(OSError):  # whoever had it may have closed it
                os.write(_before, numbers)
        for number in SIGNALS:
            if number in numbers and _is_on:
                _write(number)


def _before_fork() -> None:
    """Hold signals back: one that comes before the child has its own actions would be taken for its parent's."""
    if _pipe is not None:
        _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_parent() -> None:
    if (mask := _masks.__dict__.pop("before", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork() -> None:
    """In a forked process, as of a data loader: default actions, so that a signal ends it in native code too.

    Its threads are gone, and what it would write would take the place of its parent's record; until it makes a call.
    """
    global _pipe
    flight.forget()
    flight.counts.clear()
    flight.written, flight.active = (), []
    flight.on_first_call = _become_rank
    if _pipe is not None:
        _remove_handlers()
        _pipe = None
    _after_fork_in_parent()


def _become_rank() -> None:
    """A forked process makes its first call: it is a rank, as a launcher that forks starts them."""
    flight.on_first_call = None
    if variables.FLIGHT.value[0]:
        _start_watchdog()
        handle(variables.FLIGHT_SIGNALS.value)


def _watch() -> None:
    """Report each call that is under way for too long, and keep the record in a named folder up to date."""
    recorder, last_call, last_collective = Recorder(), 0, 0
    due = time.monotonic() + PERIOD
    while True:
        time.sleep(min(1.0, WATCHDOG_SECONDS / 4, PERIOD / 2))
        now = time.time_ns()
        limit = now - int(WATCHDOG_SECONDS * 1e9)
        for call in open_calls(limit):
            if call.start > last_call:
                last_call = call.start
                write_on(f"watchdog: {call.name} is under way for {(now - call.start) / 1e9:.0f} s, {call.which()}")
        if time.monotonic() < due or not variables.FLIGHT.value[0]:
            continue
        begun = time.monotonic()
        oldest = _ask(recorder, now)
        if oldest is not None and last_collective < oldest.created <= limit:
            last_collective = oldest.created
            seconds = (now - oldest.created) / 1e9
            write_on(f"watchdog: {oldest.name} of group {oldest.group!r} was {oldest.state} for {seconds:.0f} s")
        write_if_changed()
        ended = time.monotonic()
        due = ended + max(PERIOD, (ended - begun) / SHARE)


def _ask(recorder: Recorder, now: int) -> Active | None:
    """Keep the collectives that have not completed since ``PERIOD`` for the record; return the oldest of them."""
    had_problem = bool(recorder.problem)
    active = recorder.active()
    if recorder.problem and not had_problem:
        report(recorder.problem)
    flight.active = [each for each in active if now - each.created >= PERIOD * 1e9]
    return flight.active[0] if flight.active else None
