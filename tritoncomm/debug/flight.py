"""Flight record: the last calls of this rank, kept in memory and written as JSON by ``dump``.

``TRITONCOMM_FLIGHT=1`` keeps them, and so does check mode. The entry of a call is made before the call starts, so the
record of a rank that hangs ends with the hanging call. It keeps neither tensors nor process groups alive. The path of
the record is a line on standard error, of the first periodic record, of the first other one, and of each ``dump()``.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from tritoncomm import variables
from tritoncomm.core.validation import members
from tritoncomm.debug.descriptor import KINDS, as_json
from tritoncomm.debug.sites import OURS, call_site, leave_site, located, site_above, source_of, sources
from tritoncomm.debug.texts import label_of
from tritoncomm.debug.torch_recorder import Active
from tritoncomm.errors import CommError

__all__ = [
    "FORMAT",
    "PERIODIC",
    "Entry",
    "Flight",
    "FlightCall",
    "dump",
    "flight",
    "open_calls",
    "report",
    "write_if_changed",
    "write_on",
]  # fmt: skip

FORMAT = 1
PERIODIC = "periodic"
"""Reason of the records that the watchdog writes from time to time into a folder that the program has named."""
_DEBUG = str(Path(__file__).parent) + os.sep
_frame, _thread, _time = sys._getframe, threading.get_ident, time.time_ns
_current_node: Any = torch._C._current_autograd_node


class FlightCall(NamedTuple):
    """One recorded call of a collective or a p2p step: a snapshot of its entry.

    Attributes:
        count: number of this call on its group, from 1 on. Calls of one group with equal counts belong together.
        shape: of the tensor, or a list of the tensors' shapes.
        dtype: of the (first) tensor.
        arguments: of the kind, in its order; or a function followed by its arguments, which returns them.
        code: code object of the program's function that made the call; in a backward, that called the forward.
        offset: of the call in that code.
        start: nanoseconds since the epoch.
        end: likewise; on a GPU, the moment at which the call had been issued. 0 while the call runs or is waited for.
        path: of the local pass: view, torch or triton.
        bytes_copied: bytes read plus written by packing and unpacking.
        bytes_sent: bytes that this rank sent.
        error: type and text of the error that the call failed with; "" without one.
    """

    count: int
    name: str
    kind: str
    group: str
    shape: Any
    dtype: Any
    arguments: tuple[Any, ...]
    code: Any
    offset: int
    thread: int
    start: int
    end: int = 0
    path: str = ""
    bytes_copied: int = 0
    bytes_sent: int = 0
    error: str = ""

    @property
    def site(self) -> Any:
        """Call site in the program: code object and offset of an instruction in it; None if unknown."""
        return None if self.code is None else (self.code, self.offset)

    def which(self) -> str:
        """Return ``call 12 of group '2'``: the number of the call on its group, and the group's name."""
        return f"call {self.count} of group {label_of(self.group)!r}"

    def as_json(self, number: int, places: dict[tuple[int, int], tuple[str, int]]) -> dict[str, Any]:
        """Return the call as a dict of JSON values, with file and line in place of code and offset.

        ``places`` caches (file, line) by identity of the code and offset: most calls come from few lines.
        """
        key = (id(self.code), self.offset)
        if key not in places:
            places[key] = located(self.site)
        names, arguments = KINDS.get(self.kind, ()), self.arguments
        if arguments and isinstance(arguments[0], FunctionType):  # left to now, as calls are to be cheap
            arguments = arguments[0](*arguments[1:])
        data = {"number": number} | self._asdict() | dict(zip(("file", "line"), places[key], strict=True))
        data["arguments"] = {name: as_json(value) for name, value in zip(names, arguments, strict=False)}
        data |= {"shape": as_json(self.shape), "dtype": as_json(self.dtype)}
        del data["code"], data["offset"]
        return data


# An entry of the record is a list in the order of ``FlightCall``: the cheapest object that can be completed later. It
# holds as little as possible, because the entry that it displaces has to come back into the processor's cache.
Entry = list[Any]
_NAME, _START, _END, _PATH, _COPIED, _SENT, _ERROR = map(
    FlightCall._fields.index, ("name", "start", "end", "path", "bytes_copied", "bytes_sent", "error")
)
_REFUSED = "raised before anything was sent"


class Flight:
    """Calls of this rank; the observer of ``record`` while the flight record or check mode is on.

    Attributes:
        entries: of the last calls, oldest first.
        before: function of check mode that compares a call with other ranks; called with the entry, the group and the
            tensors before each call. None without check mode.
        counts: number of calls so far, by name of the group.
        last: by thread: [its identifier, entry of its last call, start of its wait for a call that had returned or 0].
        on_first_call: called at the first call on a group; it notices a forked process that became a rank.
        written: result of ``progress()`` when the record was last written.
        reason: reason for which the record was last written.
        is_settled: whether the record has not changed in the last period.
        active: collectives that the device has not completed for long, oldest first, by the last answer of torch's
            recorder.
        reported: files whose path was printed, and whether for a periodic record.
        place: (global rank, number of ranks), kept for the time after the groups were destroyed.
    """

    def __init__(self) -> None:
        self.entries: deque[Entry] = deque(maxlen=1)
        self.before: Callable[[Entry, Any, Any], None] | None = None
        self.counts: dict[str, int] = {}
        self.last: dict[int, list[Any]] = {}
        self.on_first_call: Callable[[], None] | None = None
        self.written: tuple[int, ...] = ()
        self.reason, self.is_settled = "", False
        self.active: list[Active] = []
        self.reported: set[tuple[Path, bool]] = set()
        self.place = (0, 1)

    @property
    def calls(self) -> list[FlightCall]:
        """Snapshots of the last calls, oldest first."""
        return list(map(FlightCall._make, list(self.entries)))

    def keep(self, calls: int) -> None:
        """Set how many of the last calls the record keeps from now on; drop older ones. 0 keeps the last call only."""
        if calls != self.entries.maxlen:
            self.entries = deque(self.entries, maxlen=max(calls, 1))
        if not calls:
            self.forget()

    def forget(self) -> None:
        """Delete all calls recorded so far. Recording goes on, and the counts of calls by group stay."""
        self.entries.clear()
        self.last.clear()

    def progress(self) -> tuple[int, ...]:
        """Return a tuple that changes whenever the record does: calls, ends of last calls, ``active`` ones."""
        ends = [entry[_END] for _, entry, _ in list(self.last.values()) if entry is not None]
        return (sum(list(self.counts.values())), *ends, *(each.created for each in self.active))

    def begin(self, name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...] = (), depth: int = 4) -> None:
        """Append an entry for a call that starts to the record; in check mode then compare the call with other ranks.

        Args:
            x: tensor of the call, a sequence of its tensors, or None.
            arguments: of the kind; or a function that returns them, to be called when they are read, and its arguments.
            depth: number of frames from this method up to the frame of the program, or fewer.
        """
        # Every line is on the hot path: words, files and lines are left to ``dump``.
        group_name = _name_of(group)
        try:
            self.counts[group_name] = count = self.counts[group_name] + 1
        except KeyError:
            count = self._first_of(group_name)
        if x is None:
            shape = dtype = None
        else:
            try:
                shape, dtype = x.shape, x.dtype
            except (AttributeError, RuntimeError):  # no tensor, or a nested one, which the call rejects afterwards
                shape, dtype = _several(x)
        try:  # the program's frame is at ``depth`` for most calls, so there is no walk over frames
            frame = _frame(depth if _current_node() is None else depth - 1)  # the frame of our backward comes sooner
            code, offset = frame.f_code, frame.f_lasti
            # A source that is not 0 is a file of torch or of this package.
            if sources[code.co_filename] or code.co_name == "<genexpr>":
                code, offset = site_above(frame)
            del frame  # it keeps tensors
        except (KeyError, ValueError):  # a new file; a thread whose first function is closer than ``depth``
            code, offset = call_site(3)
        thread = _thread()
        try:
            last = self.last[thread]
        except KeyError:
            last = self.last[thread] = [thread, None, 0]
        # ``last[0]`` equals ``thread``, as one int object that all entries of the thread share. The last fields, which
        # ``end`` and ``failed`` fill in: end, path, bytes copied, bytes sent, error.
        last[1] = entry = [
            count, name, kind, group_name, shape, dtype, arguments, code, offset, last[0], _time(), 0, "", 0, 0, "",
        ]  # fmt: skip
        self.entries.append(entry)
        if self.before is not None:
            self.before(entry, group, x)

    def _first_of(self, group_name: str) -> int:
        """Set the count of a group to 1 and return 1; note this rank's place, and call ``on_first_call``."""
        self.counts[group_name] = 1
        self.place = _place(self.place)
        if self.on_first_call is not None:
            self.on_first_call()
        return 1

    def end(self, name: str, path: str, bytes_copied: int, bytes_sent: int, calls: int) -> None:
        """Complete the entry of this thread's last call with the time, path and bytes, if that call was of ``name``.

        ``calls`` is 1 at the end of a call, and 0 for a further pass of it, whose bytes are added and whose end becomes
        now.
        """
        last = self.last.get(_thread())
        if last is not None and (entry := last[1])[_NAME] == name:
            if not entry[_END]:
                entry[_END], entry[_PATH], entry[_COPIED], entry[_SENT] = _time(), path, bytes_copied, bytes_sent
            elif not calls:
                entry[_END] = _time()
                entry[_COPIED] += bytes_copied
                entry[_SENT] += bytes_sent

    def current(self, name: str) -> Entry | None:
        """Return the entry of this thread's last call if that was of the function ``name``; else None."""
        last = self.last.get(_thread())
        return last[1] if last is not None and last[1][_NAME] == name else None

    def wait(self, call: Entry, work: Any) -> None:
        """Run ``work.wait()``, and show the entry ``call`` as the running call of this thread until it returns."""
        if not call[_END]:
            work.wait()
            return
        # An asynchronous call has ended before: its end is 0 while it is waited for, and the time after the wait then.
        last = self.last.setdefault(thread := _thread(), [thread, call, 0])
        call[_END], last[1], last[2] = 0, call, _time()
        try:
            work.wait()  # if it fails, ``failed`` ends the call
            call[_END] = _time()
        finally:
            last[2] = 0

    note_forward = staticmethod(leave_site)

    def failed(self, name: str, error: BaseException) -> None:
        """Store ``error`` in the entry of this thread's last call, if that is of ``name`` and runs."""
        last = self.last.get(_thread())
        if last is not None and (entry := last[1])[_NAME] == name and not entry[_END]:
            entry[_ERROR] = f"{type(error).__name__}: {error}"
        # The backend or another rank failed, so the record is written at once.
        if isinstance(error, CommError):
            write_on(f"{name}: {type(error).__name__}")


flight = Flight()


def _place(before: tuple[int, int]) -> tuple[int, int]:
    """Return (global rank, number of ranks) of this process; ``before`` if torch.distributed is not initialized."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else before


def _several(x: Any) -> tuple[Any, Any]:
    """Return (list of shapes, dtype of the first) of a list of tensors; (None, None) of any other object."""
    if not isinstance(x, list | tuple):
        return None, None
    return [_shape(each) for each in x], getattr(x[0], "dtype", None) if x else None


def _shape(x: Any) -> Any:
    """Return the shape of a tensor; None of a nested one, or of another object: the call rejects them afterwards."""
    try:
        return x.shape
    except (AttributeError, RuntimeError):
        return None


def _name_of(group: Any) -> str:
    """Return the name of a process group; "unregistered" and its type if torch never registered it."""
    try:
        return group.group_name
    except (AttributeError, RuntimeError):
        return f"unregistered {type(group).__name__}"


def write_on(reason: str) -> Path | None:
    """Write the flight record to its file if ``TRITONCOMM_FLIGHT`` is on; return the path, None without a file.

    Nothing is raised. Standard error gets the path of the first periodic record (reason ``PERIODIC``) and of the first
    record with another reason. It gets every error, but only the first error of periodic records in a row.
    """
    # A process without calls may be a worker of a rank, whose record it would replace.
    if not variables.FLIGHT.value[0] or not flight.entries:
        return None
    # Read the progress before the write, so that a call that is made during the write counts as a change after it.
    progress = flight.progress()
    is_periodic = reason == PERIODIC
    reports_error = not is_periodic or flight.reason != PERIODIC
    flight.reason = reason
    try:
        file = _write(None, reason)
    except Exception as error:  # the error that is being reported matters more, and reporting threads go on
        if reports_error:
            report(f"the flight record cannot be written: {type(error).__name__}: {error}")
        return None
    flight.written = progress
    # Later records replace this file, so that its path is reported once.
    if (file, is_periodic) not in flight.reported:
        flight.reported.add((file, is_periodic))
        _report_written(file, reason)
    return file


def write_if_changed() -> None:
    """Write the periodic record into the folder of ``TRITONCOMM_FLIGHT`` if calls were made since the last write."""
    if not variables.FLIGHT.value[1]:
        return
    # In the first period without calls the record is written once more: the time in the file then shows that no call
    # followed the last one.
    has_changed = flight.written != flight.progress()
    if has_changed or (flight.reason == PERIODIC and not flight.is_settled):
        write_on(PERIODIC)
    flight.is_settled = not has_changed


def report(text: str) -> None:
    """Print ``tritoncomm: TEXT`` as a line on standard error; print nothing if that is closed or in use."""
    with suppress(OSError, ValueError, RuntimeError):  # no reader of the pipe, closed, a signal during another print
        print(f"tritoncomm: {text}", file=sys.stderr, flush=True)


def open_calls(before: int) -> list[FlightCall]:
    """Return snapshots of the calls that run and began before ``before`` (ns since the epoch), one per thread.

    ``start`` of a call that is waited for after its return is the start of the wait.
    """
    return [FlightCall._make(entry)._replace(start=since) for since, entry in _open_entries(before)]


def _open_entries(before: int) -> list[tuple[int, Entry]]:
    """Return (start of the call or of its wait, entry) for each call that ``open_calls`` returns."""
    # A call that waits is open since the start of its wait.
    open_ones = [
        (thread, since or entry[_START], entry) for thread, entry, since in list(map(tuple, flight.last.values()))
        if entry is not None and (since or entry[_START]) <= before and not entry[_END] and not entry[_ERROR]
    ]  # fmt: skip
    if not open_ones:
        return []
    # A call runs if it has not ended, and its thread is inside this package. Frames keep tensors alive, so they are
    # read only if a call may run.
    frames = sys._current_frames()
    under_way = []
    for thread, since, entry in open_ones:
        if thread in frames and _is_inside(frames[thread]):
            under_way.append((since, entry))
        elif not entry[_END]:  # it may have ended meanwhile
            entry[_ERROR] = _REFUSED  # it raised before it sent anything; so marked, nobody looks for it again
    frames.clear()  # this frame is in the dict: the circle would keep the frames of all threads, and their groups
    return under_way


def _is_inside(frame: Any) -> bool:
    """Whether ``frame`` or one of its callers is a function of this package outside of ``tritoncomm.debug``."""
    while frame is not None:
        file = frame.f_code.co_filename
        if source_of(file) == OURS and not file.startswith(_DEBUG):
            return True
        frame = frame.f_back
    return False


def _snapshot(reason: str) -> dict[str, Any]:
    """Return the flight record of this rank as a dict of JSON values: the content of its file."""
    # Copy the entries, then look which calls are open. In the other order a call that starts in between would be among
    # the entries without being open, and would be marked as rejected.
    entries = list(flight.entries)
    counts = dict(flight.counts)
    under_way = {id(entry) for _, entry in _open_entries(time.time_ns())}
    for entry in entries:
        # A call that has neither ended nor runs was rejected. The mark stays in the record in memory.
        if not entry[_END] and not entry[_ERROR] and id(entry) not in under_way:
            entry[_ERROR] = _REFUSED
    calls = list(map(FlightCall._make, entries))
    first = sum(counts.values()) - len(entries) + 1  # number of the oldest call among all of this rank
    names = {call.group for call in calls}
    rank, world = _place(flight.place)
    places: dict[tuple[int, int], tuple[str, int]] = {}  # lines of call sites that calls have in common
    active = [each._asdict() | {"number": _number_of(each, calls, first)} for each in flight.active]
    return {
        "format": FORMAT, "rank": rank, "world": world, "host": os.uname().nodename,
        "pid": os.getpid(), "time": time.time_ns(), "reason": reason, "groups": _ranks(names),
        "counts": counts, "calls": [call.as_json(number, places) for number, call in enumerate(calls, first)],
        "active": active,
    }  # fmt: skip


def _number_of(collective: Active, calls: list[FlightCall], first: int) -> int | None:
    """Return the number on this rank of the call that issued a collective of torch's recorder; None if none did.

    ``calls`` are recorded calls, oldest first, and ``first`` is the number of the first of them.
    """
    # The last call of the group that had begun when the collective was issued, if it had not ended by then. Times
    # decide: one call may issue several collectives or none, and torch counts collectives.
    for place in range(len(calls) - 1, -1, -1):
        call = calls[place]
        if call.group == collective.group and call.start <= collective.created:
            return first + place if not call.end or collective.created <= call.end else None
    return None


def _ranks(names: Iterable[str]) -> dict[str, list[int]]:
    """Return the global ranks of the groups of these names, by name; groups that do not exist any more are left out."""
    named: dict[str, Any] = {_name_of(group): ranks for group, ranks in list(members.items())}
    return {name: list(named[name]) for name in names if name in named}


def dump(path: str | os.PathLike[str] | None = None, *, reason: str = "dump()") -> Path:
    """Write the last calls of this rank to a JSON file; ``tritoncomm trace FILES...`` merges files of several ranks.

    Nothing is sent, so a rank may call it at any time, even while other ranks wait for it. The path is printed on
    standard error.

    Args:
        path: file, or folder for ``tritoncomm-flight-RANK.json``; by default the folder of TRITONCOMM_FLIGHT, else the
            current one.
        reason: text that the file has.

    Returns:
        The file.
    """
    file = _write(path, reason)
    _report_written(file, reason)
    return file


def _report_written(file: Path, reason: str) -> None:
    """Print a line on standard error with the path of a record that was written, and the reason."""
    report(f"the flight record ({reason}) is in {file.absolute()}")


def _write(path: str | os.PathLike[str] | None, reason: str) -> Path:
    """Write the record to a file, as ``dump`` does, and return its path; no part of the file is left after an error."""
    data = _snapshot(reason)
    file = Path(path if path is not None else variables.FLIGHT.value[1] or ".")
    if file.is_dir() or path is None:
        file.mkdir(parents=True, exist_ok=True)
        file /= f"tritoncomm-flight-{data['rank']}.json"
    partial = file.with_name(f".{file.name}.{os.getpid()}.{_thread()}")  # several threads may write at once
    try:
        partial.write_text(json.dumps(data))
        partial.replace(file)  # a reader never sees half a file
    except OSError:
        with suppress(OSError):
            partial.unlink(missing_ok=True)
        raise
    return file
