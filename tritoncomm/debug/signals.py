"""Automatic writing of the flight record: after an uncaught error, by a watchdog, at exit, and on two signals.

The watchdog reports calls that are late, and every ten seconds brings the record in a named folder up to date. Signals
write the record only with TRITONCOMM_FLIGHT_SIGNALS=1: otherwise this package installs no handler, because a record
must not change how a process ends.

Python runs a signal handler between two instructions of the main thread, so never while that is blocked in a
collective. The interpreter's C handler, though, writes the signal's number at once to the wakeup descriptor
(``signal.set_wakeup_fd``), here a pipe, and a thread that reads the pipe writes the record. Where the program has
replaced the descriptor since, as asyncio does, the Python handler writes the record itself.
"""

import atexit
import contextlib
import ctypes
import os
import signal
import sys
import threading
import time
from functools import cache
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from tritoncomm import variables
from tritoncomm.debug.flight import PERIODIC, flight, open_calls, report, write_if_changed, write_on
from tritoncomm.debug.texts import label_of
from tritoncomm.debug.torch_recorder import Recorder

__all__ = ["PERIOD", "SHARE", "SIGNALS", "WATCHDOG_SECONDS", "handle", "install"]

SIGNALS = (signal.SIGUSR1, signal.SIGTERM)
WATCHDOG_SECONDS = 60.0
"""Age at which the watchdog reports a call that blocks the host, or a collective that the device has not completed."""
PERIOD = 10.0
"""Least number of seconds between two periodic records, and between two queries of torch's recorder."""
SHARE = 0.005
"""Largest share of its time that the watchdog spends on periodic records and queries."""

_is_on = False  # whether signals write the record
_pipe: tuple[int, int] | None = None  # read end and write end of the wakeup pipe
_program_fd = -1  # wakeup descriptor of the program, which gets every signal too
_ending = threading.RLock()
_masks = threading.local()  # signal mask of a thread that forks


@cache
def install() -> None:
    """Start the watchdog and hook uncaught errors, the end of the process, and forks; later calls do nothing."""
    # Error hooks that the program had before are still called.
    program_hook, program_thread_hook = sys.excepthook, threading.excepthook

    def hook(kind: type[BaseException], error: BaseException, traceback: TracebackType | None) -> Any:
        """Write the record, then call the program's hook for an error that ends the main thread."""
        write_on(f"uncaught {kind.__name__}: {error}")
        return program_hook(kind, error, traceback)

    def thread_hook(args: threading.ExceptHookArgs) -> Any:
        """Write the record, then call the program's hook for an error that ends another thread."""
        if args.exc_type is not SystemExit:  # which ends a thread silently
            name = "" if args.thread is None else f" in thread {args.thread.name!r}"
            write_on(f"uncaught {args.exc_type.__name__}{name}: {args.exc_value}")
        return program_thread_hook(args)

    sys.excepthook, threading.excepthook = hook, thread_hook
    atexit.register(_at_exit)
    _start_thread(_watch, "watchdog")
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)


def handle(on: bool) -> None:
    """Let SIGUSR1 and SIGTERM write the flight record, or (``on`` is False) restore their default actions."""
    if on == _is_on:
        return
    # Python allows it in the main thread only; elsewhere nothing is changed.
    if threading.current_thread() is threading.main_thread():
        _install_handlers() if on else _remove_handlers()
    elif on:
        report("signals do not write the flight record: Python installs handlers in the main thread only")


def _start_thread(target: Any, name: str) -> None:
    """Start a daemon thread ``tritoncomm-NAME`` that runs a function."""
    threading.Thread(target=target, name=f"tritoncomm-{name}", daemon=True).start()


def _at_exit() -> None:
    """Write the record into the folder of ``TRITONCOMM_FLIGHT`` as the process ends, unless the file has all calls."""
    # A rank that ends early, having made fewer calls than the others, leaves its record. A periodic record is replaced
    # even if it has all calls: its reason has to become the end of the process.
    if variables.FLIGHT.value[1] and (flight.written != flight.progress() or flight.reason == PERIODIC):
        write_on("the process ends")


def _install_handlers() -> None:
    """Make SIGUSR1 and SIGTERM write the record: set the wakeup descriptor, and handlers where the program has none."""
    global _is_on, _pipe, _program_fd
    _is_on, usable = True, False
    for number in SIGNALS:
        if reason := _reason_against(number):
            report(f"{number.name} does not write the flight record: {reason}")
            continue
        usable = True
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle)
    if usable:
        if _pipe is None:
            _pipe = os.pipe()
            os.set_blocking(_pipe[1], False)  # Python accepts no other wakeup descriptor
            _start_thread(_read, "signals")
        _program_fd = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)


def _remove_handlers() -> None:
    """Restore the default action of signals that have this package's handler, and the program's wakeup descriptor."""
    global _is_on
    _is_on = False
    for number in filter(_is_ours, SIGNALS):
        signal.signal(number, signal.SIG_DFL)
    # The program may have set another descriptor since. The pipe stays open: the program may have saved its descriptor,
    # and may set it again.
    if _owns_wakeup():
        signal.set_wakeup_fd(_program_fd)


def _is_ours(number: signal.Signals) -> bool:
    """Whether the Python handler of a signal is the one of this package."""
    return signal.getsignal(number) is _handle


def _owns_wakeup() -> bool:
    """Whether the wakeup descriptor, which gets the numbers of signals, is the pipe of this package."""
    descriptor = signal.set_wakeup_fd(-1)  # Python has no function that only reads it
    is_ours = _pipe is not None and descriptor == _pipe[1]
    if descriptor != -1:
        signal.set_wakeup_fd(descriptor, warn_on_full_buffer=not is_ours)
    return is_ours


def _reason_against(number: signal.Signals) -> str:
    """Return the reason why a signal cannot write the record; empty where it can."""
    handler = signal.getsignal(number)
    if handler is signal.SIG_IGN:
        return "the program, or what started it, ignores the signal"
    if handler is None or (handler is signal.SIG_DFL and _is_caught(number)):
        return "it has a handler outside of Python's signal module, as faulthandler.register sets one"
    return ""


def _is_caught(number: int) -> bool:
    """Whether this process has any handler of a signal, by ``/proc/self/status``; False where that file is missing."""
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (number - 1) & 1)
    return False


def _handle(number: int, frame: FrameType | None) -> None:
    """Write the record for a signal, in the main thread, unless the thread that reads the pipe will do it."""
    # SIGTERM also ends the process, and is not left to that thread: the main thread must not go on after it.
    if number == signal.SIGTERM or not _owns_wakeup():
        _write(signal.Signals(number))


def _write(number: signal.Signals) -> None:
    """Write the record because of a signal; after SIGTERM end the process too, by the signal's default action."""
    # A handler of the program for SIGTERM decides how the process ends, also if it calls this package's handler. Of two
    # threads that end the process the second waits until the first has written.
    if number == signal.SIGTERM and _is_ours(number):
        with _ending:
            write_on("signal SIGTERM")
            # signal.signal works in the main thread only, and this may be another one.
            ctypes.CDLL(None).signal(int(signal.SIGTERM), None)
            os.kill(os.getpid(), signal.SIGTERM)
    else:
        write_on(f"signal {number.name}")


def _read() -> None:
    """Read the numbers of signals from the pipe for ever; write the record for SIGUSR1 and SIGTERM."""
    assert _pipe is not None
    descriptor = _pipe[0]
    while numbers := os.read(descriptor, 64):
        if _program_fd != -1:
            with contextlib.suppress(OSError):  # the program may have closed it
                os.write(_program_fd, numbers)
        for number in SIGNALS:
            if number in numbers and _is_on:
                _write(number)


def _before_fork() -> None:
    """Block SIGUSR1 and SIGTERM in the thread that forks, if the pipe exists."""
    # Until the child has restored its default actions, it would write a signal's number to the pipe of its parent.
    if _pipe is not None:
        _masks.saved = signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)


def _after_fork_in_parent() -> None:
    """Restore the signal mask that the thread had before it forked."""
    if (mask := _masks.__dict__.pop("saved", None)) is not None:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Reset the state of a forked process, such as a worker of a data loader: empty record, default signal actions."""
    global _pipe
    # The child has no threads of its parent and writes no record, which would replace its parent's. Default actions let
    # a signal end it even in native code. With its first call it becomes a rank of its own, by ``_become_rank``.
    flight.forget()
    flight.counts.clear()
    flight.written, flight.active = (), []
    flight.on_first_call = _become_rank
    if _pipe is not None:
        _remove_handlers()
        _pipe = None
    _after_fork_in_parent()


def _become_rank() -> None:
    """Start the watchdog and install signal handlers in a forked process at its first call, if the record is on."""
    # A process that calls is a rank, started by a launcher that forks, and no worker of its parent.
    flight.on_first_call = None
    if variables.FLIGHT.value[0]:
        _start_thread(_watch, "watchdog")
        handle(variables.FLIGHT_SIGNALS.value)


def _watch() -> None:
    """Watch the calls of this process for ever; the function of the watchdog's thread."""
    # ``last_call`` and ``last_collective`` are the start times of the latest ones that were reported.
    recorder, last_call, last_collective = Recorder(), 0, 0
    due = time.monotonic() + PERIOD
    while True:
        time.sleep(min(1.0, WATCHDOG_SECONDS / 4, PERIOD / 2))
        now = time.time_ns()
        limit = now - int(WATCHDOG_SECONDS * 1e9)
        # The record is written once for each call that blocks the host for ``WATCHDOG_SECONDS``.
        for call in open_calls(limit):
            if call.start > last_call:
                last_call = call.start
                write_on(f"watchdog: {call.name} is under way for {(now - call.start) / 1e9:.0f} s, {call.which()}")
        if time.monotonic() < due or not variables.FLIGHT.value[0]:
            continue
        begun, problem = time.monotonic(), recorder.problem
        # Once in each PERIOD the collectives that are older than one PERIOD are noted in the record. If the device has
        # not completed the oldest of them within ``WATCHDOG_SECONDS``, the record is written to its file.
        flight.active = [each for each in recorder.active() if now - each.created >= PERIOD * 1e9]
        if recorder.problem != problem:
            report(recorder.problem)
        for oldest in flight.active[:1]:
            if last_collective < oldest.created <= limit:
                last_collective, seconds = oldest.created, (now - oldest.created) / 1e9
                where = f"{oldest.name} of group {label_of(oldest.group)!r}"
                write_on(f"watchdog: {where} was {oldest.state} for {seconds:.0f} s")
        write_if_changed()
        # The work above took ``ended - begun``. The next turn is so late that this is at most ``SHARE`` of the time.
        ended = time.monotonic()
        due = ended + max(PERIOD, (ended - begun) / SHARE)
