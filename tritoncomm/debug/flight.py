"""The flight record: the last calls of this rank, kept in memory, written as JSON by ``dump``.

``TRITONCOMM_FLIGHT=1`` keeps them, and so does check mode. The entry of a call is made before the call starts, so the
record of a rank that hangs ends with what it hangs in. Neither tensors nor process groups are kept alive by it. The
path of each record that is written is a line on standard error, of periodic ones once.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import FunctionType
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tritoncomm import variables
from tritoncomm.debug.descriptor import KINDS, as_json
from tritoncomm.debug.sites import OURS, call_site, leave_site, located, site_above, source_of, sources
from tritoncomm.debug.torch_recorder import Active
from tritoncomm.errors import CommError

__all__ = [
    "FORMAT", "PERIODIC", "Call", "Entry", "Flight", "dump", "flight", "open_calls", "report", "write_if_changed",
    "write_on",
]  # fmt: skip

FORMAT = 1
PERIODIC = "periodic"
"""Reason of the records that the watchdog writes into a named folder."""
_DEBUG = str(Path(__file__).parent) + os.sep
_names: Mapping[ProcessGroup, str] = getattr(distributed_c10d, "_pg_names", {})
_frame, _thread, _time = sys._getframe, threading.get_ident, time.time_ns
_current_node: Any = torch._C._current_autograd_node


class Call(NamedTuple):
    """One call of a collective or a p2p step, as its entry in the record has it when this is made of it.

    Attributes:
        count: of this call on its group; the calls of one group with equal counts belong together.
        name: the function that was called.
        kind: a key of ``descriptor.KINDS``.
        group: name of the process group.
        shape: of the tensor, or a list of the tensors' shapes.
        dtype: of the (first) tensor.
        arguments: those of the kind, or a function and what it makes them of.
        code: of the function in which the program called; in a backward, in which it called the forward.
        offset: of that call in the code.
        thread: identifier of the calling thread.
        start: nanoseconds since the epoch.
        end: the same, 0 while the call runs, or is waited for; on a GPU, when it had been issued.
        path: view, torch or triton.
        bytes_copied: by packing and unpacking.
        bytes_sent: by this rank.
        error: why it failed.
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
        """As ``call_site`` returns it."""
        return None if self.code is None else (self.code, self.offset)

    def which(self) -> str:
        """Its count and its group, in words."""
        return f"call {self.count} of group {self.group!r}"

    def as_json(self, number: int, places: dict[tuple[int, int], tuple[str, int]]) -> dict[str, Any]:
        """The attributes by name, and the number of this call on this rank.

        Args:
            number: of this call.
            places: files and lines found so far, by identity of the code and offset; most calls come from few lines.
        """
        key = (id(self.code), self.offset)
        if key not in places:
            places[key] = located(self.site)
        file, line = places[key]
        names, arguments = KINDS.get(self.kind, ()), self.arguments
        if arguments and isinstance(arguments[0], FunctionType):
            arguments = arguments[0](*arguments[1:])
        return {
            "number": number, "count": self.count, "name": self.name, "kind": self.kind, "group": self.group,
            "shape": as_json(self.shape), "dtype": as_json(self.dtype),
            "arguments": {name: as_json(value) for name, value in zip(names, arguments, strict=False)},
            "path": self.path, "bytes_copied": self.bytes_copied, "bytes_sent": self.bytes_sent, "start": self.start,
            "end": self.end, "file": file, "line": line, "thread": self.thread, "error": self.error,
        }  # fmt: skip


# An entry of the record is a list in the order of ``Call``: of what can be completed later, it is the cheapest to make.
# It holds as little as possible, because that of the call that it displaces has to come back into the cache.
Entry = list[Any]
_NAME, _START, _END, _PATH, _COPIED, _SENT, _ERROR = map(
    Call._fields.index, ("name", "start", "end", "path", "bytes_copied", "bytes_sent", "error")
)
_REFUSED = "raised before anything was sent"


class Flight:
    """The calls of this rank; the observer of ``record`` while it is on.

    Attributes:
        entries: of the last calls, oldest first.
        before: called with every call before it starts, and its group and tensors: the comparison of check mode.
        counts: calls so far by group.
        last: by thread, its identifier, the entry of its last call, and since when it waits for one that had returned.
        on_first_call: called with the first call of a forked process, which is a rank of its own then.
        written: ``progress()`` when the record was written last.
        reason: why the record was written last.
        is_settled: whether the record is the same as a period ago.
        active: collectives that the device has not completed for long, as torch's recorder said last; oldest first.
        place: global rank and number of ranks, which the process has still after its groups were destroyed.
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
        self.place = (0, 1)

    @property
    def calls(self) -> list[Call]:
        """The last calls, as they are now."""
        return list(map(Call._make, list(self.entries)))

    def keep(self, calls: int) -> None:
        """Keep that many calls from now on; 0 forgets everything."""
        if calls != self.entries.maxlen:
            self.entries = deque(self.entries, maxlen=max(calls, 1))
        if not calls:
            self.forget()

    def forget(self) -> None:
        """Forget the calls so far, but for their counts."""
        self.entries.clear()
        self.last.clear()

    def progress(self) -> tuple[int, ...]:
        """Numbers of which one differs when the record does."""
        ends = [entry[_END] for _, entry, _ in list(self.last.values()) if entry is not None]
        return (sum(list(self.counts.values())), *ends, *(each.created for each in self.active))

    def begin(self, name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...] = (), depth: int = 4) -> None:
        """``record.begin`` while this is on: every line is on the hot path, so all that can be is left to the dump.

        Its caller is never a function that programs call, but one that such a function has called.
        """
        try:
            group_name = _names[group]
        except (KeyError, TypeError):
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
            except AttributeError:
                shape, dtype = _several(x)
        try:  # most calls are of a mapping or a collective that the program called: its frame, and no walk
            frame = _frame(depth if _current_node() is None else depth - 1)  # that of a backward is passed by
            code, offset = frame.f_code, frame.f_lasti
            if sources[code.co_filename] or code.co_name == "<genexpr>":
                code, offset = site_above(frame)
            del frame  # which keeps its tensors
        except (KeyError, ValueError):  # a file that was not seen yet; a thread that begins here
            code, offset = call_site(3)
        thread = _thread()
        try:
            last = self.last[thread]
        except KeyError:
            last = self.last[thread] = [thread, None, 0]
        last[1] = entry = [
            count, name, kind, group_name, shape, dtype, arguments, code, offset, last[0], _time(), 0, "", 0, 0, "",
        ]  # fmt: skip
        self.entries.append(entry)
        if self.before is not None:
            self.before(entry, group, x)

    def _first_of(self, group_name: str) -> int:
        """The first call on a group of this name."""
        self.counts[group_name] = 1
        self.place = _place(self.place)
        if self.on_first_call is not None:
            self.on_first_call()
        return 1

    def end(self, name: str, path: str, bytes_copied: int, bytes_sent: int, calls: int) -> None:
        """``record.add`` while this is on: complete the entry of the call."""
        last = self.last.get(_thread())
        if last is not None and (entry := last[1])[_NAME] == name:
            if not entry[_END]:
                entry[_END], entry[_PATH], entry[_COPIED], entry[_SENT] = _time(), path, bytes_copied, bytes_sent
            elif not calls:
                entry[_END] = _time()
                entry[_COPIED] += bytes_copied
                entry[_SENT] += bytes_sent

    def current(self, name: str) -> Entry | None:
        """``record.current`` while this is on."""
        last = self.last.get(_thread())
        return last[1] if last is not None and last[1][_NAME] == name else None

    def wait(self, call: Entry, work: Any) -> None:
        """``record.wait`` while this is on: the call is under way again, if it had returned."""
        if not call[_END]:
            work.wait()
            return
        last = self.last.setdefault(thread := _thread(), [thread, call, 0])
        call[_END], last[1], last[2] = 0, call, _time()
        try:
            work.wait()  # where it fails, ``failed`` ends the call
            call[_END] = _time()
        finally:
            last[2] = 0

    note_forward = staticmethod(leave_site)

    def failed(self, name: str, error: BaseException) -> None:
        """A call raises: note it, and write the record if the backend or another rank failed."""
        last = self.last.get(_thread())
        if last is not None and (entry := last[1])[_NAME] == name and not entry[_END]:
            entry[_ERROR] = f"{type(error).__name__}: {error}"
        if isinstance(error, CommError):
            write_on(f"{name}: {type(error).__name__}")


flight = Flight()


def _place(before: tuple[int, int]) -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else before


def _several(x: Any) -> tuple[Any, Any]:
    """Shapes, and the dtype of the first, of several tensors, or of what the call itself is about to refuse."""
    if not isinstance(x, list | tuple):
        return None, None
    return [getattr(each, "shape", None) for each in x], getattr(x[0], "dtype", None) if x else None


def _name_of(group: Any) -> str:
    """Of a group that torch never registered: its own name, if it has one."""
    try:
        return group.group_name
    except (AttributeError, RuntimeError):
        return f"unregistered {type(group).__name__}"


def write_on(reason: str) -> Path | None:
    """``dump``, if the record is on (and not merely kept for check mode); None where it cannot be written.

    A process without calls writes nothing: it may be a worker of a rank, whose record it would replace.
    """
    if not variables.FLIGHT.value[0] or not flight.entries:
        return None
    is_news, progress = reason != PERIODIC or flight.reason != PERIODIC, flight.progress()
    flight.reason = reason
    try:
        file = _write(None, reason)
    except Exception as error:  # what is being reported matters more, and the threads that report go on
        if is_news:
            report(f"the flight record cannot be written: {type(error).__name__}: {error}")
        return None
    flight.written = progress
    if is_news:
        _report_written(file, reason)
    return file


def write_if_changed() -> None:
    """Write the record into the folder that is named, if there is one and the record has changed since it was written.

    Once it stays the same it is written once more: its time then shows that no call followed the last one.
    """
    if not variables.FLIGHT.value[1]:
        return
    has_changed = flight.written != flight.progress()
    if has_changed or (flight.reason == PERIODIC and not flight.is_settled):
        write_on(PERIODIC)
    flight.is_settled = not has_changed


def report(text: str) -> None:
    """A line on standard error, if there is one."""
    with suppress(OSError, ValueError, RuntimeError):  # closed, a pipe without a reader, a signal during another print
        print(f"tritoncomm: {text}", file=sys.stderr, flush=True)


def open_calls(before: int) -> list[Call]:
    """The calls that are under way since ``before`` (ns) or longer: not ended, and their thread is inside this package.

    Only where such a call may exist are the threads' frames looked at: a frame that is held keeps its tensors.
    """
    return [Call._make(entry)._replace(start=since) for since, entry in _open_entries(before)]


def _open_entries(before: int) -> list[tuple[int, Entry]]:
    """The entries, and since when each is under way, or is waited for."""
    open_ones = [
        (thread, since or entry[_START], entry) for thread, entry, since in list(map(tuple, flight.last.values()))
        if entry is not None and (since or entry[_START]) <= before and not entry[_END] and not entry[_ERROR]
    ]  # fmt: skip
    if not open_ones:
        return []
    frames = sys._current_frames()
    under_way = []
    for thread, since, entry in open_ones:
        if thread in frames and _is_inside(frames[thread]):
            under_way.append((since, entry))
        elif not entry[_END]:
            entry[_ERROR] = _REFUSED  # and not looked for again
    frames.clear()  # this frame is one of them: the circle would keep those of all threads, and their groups
    return under_way


def _is_inside(frame: Any) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if source_of(file) == OURS and not file.startswith(_DEBUG):
            return True
        frame = frame.f_back
    return False


def _snapshot(reason: str) -> dict[str, Any]:
    """The record as ``dump`` writes it."""
    # Entries first: one whose call ends only after this is complete, and is not taken for one that was refused.
    entries, counts = list(flight.entries), dict(flight.counts)
    under_way = {id(entry) for _, entry in _open_entries(time.time_ns())}
    for entry in entries:
        if not entry[_END] and not entry[_ERROR] and id(entry) not in under_way:
            entry[_ERROR] = _REFUSED
    calls, first = list(map(Call._make, entries)), sum(counts.values()) - len(entries) + 1
    names, (rank, world) = {call.group for call in calls}, _place(flight.place)
    places: dict[tuple[int, int], tuple[str, int]] = {}
    active = [each._asdict() | {"number": _number_of(each, calls, first)} for each in flight.active]
    return {
        "format": FORMAT, "rank": rank, "world": world, "host": os.uname().nodename,
        "pid": os.getpid(), "time": time.time_ns(), "reason": reason, "groups": _ranks(names),
        "counts": counts, "calls": [call.as_json(number, places) for number, call in enumerate(calls, first)],
        "active": active,
    }  # fmt: skip


def _number_of(collective: Active, calls: list[Call], first: int) -> int | None:
    """Number of the call that issued a collective: the last of its group that had begun, if that had not ended.

    torch counts the collectives of a group, and one call may issue several or none, so times tell which call it was.
    """
    for place in range(len(calls) - 1, -1, -1):
        call = calls[place]
        if call.group == collective.group and call.start <= collective.created:
            return first + place if not call.end or collective.created <= call.end else None
    return None


def _ranks(names: Iterable[str]) -> dict[str, list[int]]:
    """Global ranks of the groups that still exist."""
    ranks = getattr(distributed_c10d, "_pg_group_ranks", {})
    return {name: list(ranks[group]) for group, name in list(_names.items()) if name in names and group in ranks}


def dump(path: str | os.PathLike[str] | None = None, *, reason: str = "dump()") -> Path:
    """Write the last calls of this rank as JSON; ``tritoncomm trace FILES...`` merges those of several ranks.

    Nothing is sent, so a rank may call it at any time, also while others wait for it. The path is a line on standard
    error too.

    Args:
        path: a file, or a folder for ``tritoncomm-flight-RANK.json``; by default the folder of TRITONCOMM_FLIGHT,
            else the current one.
        reason: kept in the file.

    Returns:
        The file.
    """
    file = _write(path, reason)
    _report_written(file, reason)
    return file


def _report_written(file: Path, reason: str) -> None:
    report(f"the flight record ({reason}) is in {file.absolute()}")


def _write(path: str | os.PathLike[str] | None, reason: str) -> Path:
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
