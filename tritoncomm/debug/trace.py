"""Merged trace: the flight records of several ranks, their messages, and one Perfetto trace; ``story`` has the words.

Calls of one group with equal counts belong together. So do the two ends of the n-th message from one rank to another.
The files are the only input, so they may come from another machine.

Records of thousands of ranks do not fit into memory. A file is read once for a summary, which has two hashes of each
call, and again where its calls are shown. Messages are paired between two ranks at a time.
"""

import json
import os
import reprlib
import stat
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tritoncomm.debug.flight import FORMAT, PERIODIC
from tritoncomm.debug.p2p_check import ORDER
from tritoncomm.errors import ArgumentError

__all__ = [
    "REFUSED", "Call", "Message", "Record", "fields_compared", "messages_of", "read", "transfers", "with_line",
    "write_perfetto",
]  # fmt: skip

Call = dict[str, Any]
"""A call as its record has it."""
Calls = dict[str, dict[int, Call]]
"""Calls by the name of their group, and there by their count on this group."""

_COMPARED = ("name", "kind", "shape", "dtype", "arguments")
_MAY_DIFFER = {  # by kind: attributes that may differ between the ranks of one call
    "all_to_all_single": ("shape", "arguments"), "hop": ("name", "shape", "arguments"), "reshard": ("shape", "dtype"),
    "to_heads": ("shape",), "to_sequence": ("shape",), "to_ranks": ("shape",), "to_tokens": ("shape",),
}  # fmt: skip
_MAX_TEXT = 300
_LOADED = 16  # records whose calls are in memory at a time, about 5 MiB each
REFUSED = "raised before"
"""Beginning of the errors of calls that sent nothing."""
_FILE_TYPES = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}
_INT, _RANK = range(1 << 63), range(1 << 20)
# The fields that are read, because a file may hold anything: integers of a range, or values of a type; a list stands
# for a list of such values, a tuple for an object whose values are such, a dict for an object that has these fields.
_CALL: dict[str, Any] = {
    **dict.fromkeys(("name", "kind", "group", "file", "path", "error"), str),
    **dict.fromkeys(("count", "line", "start", "end", "thread", "bytes_copied", "bytes_sent"), _INT),
    "arguments": dict, "shape": object, "dtype": object,
}  # fmt: skip
_ACTIVE = {"name": str, "group": str, "state": str, "created": _INT, "sequence": _INT, "number": object}
_RECORD = {
    "format": _INT, "rank": _RANK, "world": _RANK, "host": str, "pid": _INT, "time": _INT, "groups": ([_RANK],),
    "counts": (_INT,), "calls": [_CALL], "active": [_ACTIVE],
}  # fmt: skip
_JSON_TYPES = {range: int, list: list, tuple: dict, dict: dict}


class Hashes(NamedTuple):
    """Calls of one rank over one group, as three columns.

    Attributes:
        counts: count of each call on the group.
        compared: hash of the attributes that all ranks of the call must share.
        shown: hash of the call's text with its line.
    """

    counts: "array[int]"
    compared: "array[int]"
    shown: "array[int]"


@dataclass
class Record:
    """Summary of the flight record of one rank.

    Attributes:
        data: content of the file without its calls.
        load: function that reads the calls of a file again, and caches the last 16 files.
        hashes: calls by the name of their group.
        start: time of the earliest start of a call; 0 without calls.
        current: the call that the rank was in, or failed in, when it wrote the record; None if it was in none.
        issued: the call that issued the oldest collective that the device has not completed; None if there is none.
        hops: names of the groups over which there were p2p steps.
        peers: ranks with which this one exchanged messages, by the name of the group.
        is_explained: whether the uncaught error that ended the rank is the error of one of its calls.
    """

    path: Path
    data: dict[str, Any]
    load: Callable[[Path], Calls]
    hashes: dict[str, Hashes] = field(default_factory=dict)
    start: int = 0
    current: Call | None = None
    issued: Call | None = None
    hops: set[str] = field(default_factory=set)
    peers: dict[str, set[int]] = field(default_factory=dict)
    is_explained: bool = False

    @property
    def rank(self) -> int:
        """Global rank of the process that wrote the file."""
        return self.data["rank"]

    @property
    def calls(self) -> Calls:
        """Calls, read from the file again unless they are cached."""
        return self.load(self.path)

    def count(self, group: str) -> int:
        """Return the number of calls that the rank made over a group, those included that the record has lost."""
        return self.data["counts"].get(group, 0)

    def oldest(self, group: str) -> int:
        """Return the count of the oldest recorded call over a group, or of the next one where none is recorded."""
        return min(self.hashes[group].counts) if group in self.hashes else self.count(group) + 1

    def ranks(self, group: str) -> Sequence[int]:
        """Return the global ranks of the group of this name; an empty list where the record does not have them."""
        return self.data["groups"].get(group, ())

    def is_before(self, call: Call) -> bool:
        """Whether the watchdog wrote this record before another rank's call began, so it says nothing of that call."""
        return self.data.get("reason") == PERIODIC and self.data["time"] < call["start"]


def read(files: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Read and check flight records, and return their summaries in the order of their ranks.

    A folder stands for all files ``tritoncomm-flight-*.json`` in it.
    """
    paths: list[Path] = []
    for path in map(Path, files):
        paths += sorted(path.glob("tritoncomm-flight-*.json")) if path.is_dir() else [path]
    records: dict[int, Record] = {}
    shared: dict[tuple[int, ...], tuple[int, ...]] = {}  # thousands of records name the same ranks: one object for all

    def interned(ranks: Sequence[int]) -> tuple[int, ...]:
        return shared.setdefault(tuple(ranks), tuple(ranks))

    @lru_cache(_LOADED)
    def load(path: Path) -> Calls:
        """Read the calls of a file of which there is a summary."""
        data, calls = _content(path), dict[str, dict[int, Call]]()
        if data["time"] != records[data["rank"]].data["time"]:
            raise ArgumentError(f"{path} was written again while it was read; name a copy of the records")
        for call in data["calls"]:
            calls.setdefault(call["group"], {})[call["count"]] = call
        return calls

    for path in paths:
        data = _content(path)
        if data["rank"] in records:
            raise ArgumentError(f"{path} is a second record of rank {data['rank']}")
        data["groups"] = {name: interned(ranks) for name, ranks in data["groups"].items()}
        records[data["rank"]] = _summary(path, data, load)
    if not records:
        raise ArgumentError("there are no flight records in the given files")
    return [records[rank] for rank in sorted(records)]


def _summary(path: Path, data: dict[str, Any], load: Callable[[Path], Calls]) -> Record:
    """Return the summary of a record, and remove the calls from ``data``."""
    calls, reason = data.pop("calls"), data.get("reason")
    record = Record(path, data, load, start=min((call["start"] for call in calls), default=0))
    for call in calls:
        columns = record.hashes.setdefault(call["group"], Hashes(array("q"), array("q"), array("q")))
        values = call["count"], hash(repr(fields_compared(call))), hash(with_line(call))
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        if call["kind"] == "hop":
            record.hops.add(call["group"])
        for _, peer, _ in transfers(call, record.rank):
            record.peers.setdefault(call["group"], set()).add(peer)
    running = [call for call in calls if not call["end"] and not call["error"]]  # of any thread
    # An asynchronous call has ended when its wait() fails: the record's reason has its name and its error.
    failed = [call for call in calls if call["error"] and reason == f"{call['name']}: {call['error'].split(':')[0]}"]
    last = [call for call in calls[-1:] if not call["end"]]  # it failed before it ended
    record.current = next(reversed(running or failed or last), None)
    oldest_active = min(data["active"], key=lambda each: each["created"], default=None)
    if oldest_active is not None and oldest_active["number"] is not None:
        record.issued = next((call for call in calls if call.get("number") == oldest_active["number"]), None)
    record.is_explained = any(call["error"] and call["error"] in str(reason) for call in calls)
    return record


def _content(path: Path) -> dict[str, Any]:
    """Read one file, check that it has the fields of a flight record, and return its JSON object."""
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):  # reading a pipe waits for a writer, reading a device may never end
        raise ArgumentError(f"{path} is no flight record: it is {_FILE_TYPES.get(stat.S_IFMT(mode), 'a device')}")
    try:
        data = json.loads(path.read_text())
    except RecursionError:
        raise ArgumentError(f"{path} is no flight record: it is nested too deeply") from None
    except ValueError as error:
        raise ArgumentError(f"{path} is no flight record: {type(error).__name__}: {error}") from None
    if type(data) is dict:
        if (version := data.get("format", FORMAT)) != FORMAT:
            raise ArgumentError(f"{path} has format {reprlib.repr(version)}, this version reads {FORMAT}")
        data.setdefault("active", [])  # older records have none
    if problem := _problem(data, _RECORD):
        raise ArgumentError(f"{path} is no flight record: record{problem}")
    return data


def _problem(value: Any, kind: Any) -> str:
    """Return the first place where a value is not of its kind: ``.calls[3].line is 'x'``; empty if all are."""
    # A kind, as in ``_CALL`` and ``_RECORD`` above, is a type, a range of integers, {name: kind} of a dict with these
    # names, [kind] of a list, or (kind,) of a dict with any names.
    expected = kind if isinstance(kind, type) else _JSON_TYPES[type(kind)]
    if expected is not object and (type(value) is not expected or (expected is int and value not in kind)):
        return f" is {reprlib.repr(value)}"
    if isinstance(kind, dict):
        for name, inner in kind.items():
            if name not in value:
                return f".{name} is missing"
            if problem := _problem(value[name], inner):
                return f".{name}{problem}"
    elif isinstance(kind, list | tuple):
        for place, each in enumerate(value) if expected is list else value.items():
            if problem := _problem(each, kind[0]):
                return f"[{place!r}]{problem}"
    return ""


class End(NamedTuple):
    """Sending or receiving end of a message.

    Attributes:
        call: the p2p step that posted it.
        specs: shape and dtype of every tensor; None for all of them, or for one shape or dtype, that is not known.
    """

    call: Call
    specs: list[list[Any]] | None


class Message(NamedTuple):
    """The n-th message from one rank to another over one group.

    Attributes:
        count: n, from 1.
        sent: the sender's end; None if the sender has not posted it.
        received: the receiver's end; None if the receiver has not posted it.
    """

    sender: int
    receiver: int
    count: int
    sent: End | None
    received: End | None

    def fits(self) -> bool:
        """Whether both ends agree in the number, shapes and dtypes of the tensors, as far as both know them."""
        if self.sent is None or self.received is None or self.sent.specs is None or self.received.specs is None:
            return True
        sent, received = self.sent.specs, self.received.specs
        # Pairs of the two ends' shapes, and of their dtypes; None stands for an unknown one.
        values = [pair for specs in zip(sent, received, strict=False) for pair in zip(*specs, strict=True)]
        return len(sent) == len(received) and all(None in pair or pair[0] == pair[1] for pair in values)


def messages_of(group: str, records: Sequence[Record]) -> Iterator[Message]:
    """Pair the sends and receives of all ranks over one group; yield the messages of each two ranks in turn."""
    # Counting starts at the first call of the group, so messages to or from ranks whose record has lost that call are
    # left out.
    complete = {each.rank: each for each in records if group in each.peers and each.oldest(group) == 1}
    pairs = {(min(rank, peer), max(rank, peer)) for rank, each in complete.items() for peer in each.peers[group]}
    for pair in sorted(pair for pair in pairs if complete.keys() >= {*pair}):
        ends: dict[tuple[int, int], tuple[list[End], list[End]]] = {}  # by sender and receiver: sends, receives
        for rank, other in (pair, pair[::-1]):
            for _, call in sorted(complete[rank].calls[group].items()):
                for key, peer, specs in transfers(call, rank):
                    if peer == other:
                        is_receive = key.startswith("recv")
                        channel = ends.setdefault((peer, rank) if is_receive else (rank, peer), ([], []))
                        channel[is_receive].append(End(call, specs))
        for sender, receiver in sorted(ends):
            for count, (sent, received) in enumerate(zip_longest(*ends[sender, receiver]), 1):
                yield Message(sender, receiver, count, sent, received)


def transfers(call: Call, rank: int) -> Iterator[tuple[str, int, list[list[Any]] | None]]:
    """Yield (key, peer, specs as in ``End``) of a rank's p2p step, in the order in which messages are counted."""
    # A file may hold anything, so values that are no transfers are passed by; so are transfers of a rank to itself.
    listed = call["arguments"].get("transfers")
    if call["kind"] != "hop" or type(listed) is not list or call["error"].startswith(REFUSED):
        return
    for key in ORDER:
        for each in listed:
            match each:
                case [str(name), int(peer), None | list() as specs] if name == key and peer != rank:
                    if all(isinstance(spec, list) and len(spec) == 2 for spec in specs or ()):
                        yield key, peer, specs


def write_perfetto(records: Sequence[Record], file: Path) -> None:
    """Write one trace of all ranks in the JSON format of Chrome and Perfetto: a process per rank, a track per thread.

    Arrows join the calls of one group with equal counts, and the two ends of each message. Times are microseconds since
    the first call; a call that has not ended lasts until its record was written.
    """
    with file.open("w") as stream:
        stream.write('{"displayTimeUnit": "ns", "traceEvents": [')
        for number, event in enumerate(_events(records)):
            stream.write(("," if number else "") + json.dumps(event))
        stream.write("]}")


def _events(records: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield the events of the trace of all ranks: the calls and their arrows rank by rank, then the messages."""
    # ``ph`` is the kind of an event: M metadata, X a span; s, t and f begin, continue and end an arrow, which ``bp`` e
    # binds to the span around it.
    origin = min((each.start for each in records if each.hashes), default=0)

    def event(rank: int, call: Call, **fields: Any) -> dict[str, Any]:
        """Make an event at the start of a rank's call, on the track of its thread."""
        start = (call["start"] - origin) / 1e3
        return {"pid": rank, "tid": call["thread"] % (1 << 31), "ts": start, "cat": "tritoncomm"} | fields

    for each in records:
        name = f"rank {each.rank} ({each.data['host']}, pid {each.data['pid']})"
        yield {"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": {"sort_index": each.rank}}
        for call in (call for calls in each.calls.values() for call in calls.values()):
            duration = max((call["end"] or each.data["time"]) - call["start"], 1) / 1e3
            yield event(each.rank, call, ph="X", name=call["name"], dur=duration, args=call)
            ranks = each.ranks(call["group"])
            if call["kind"] != "hop" and len(ranks) > 1:
                phase = "s" if each.rank == ranks[0] else "f" if each.rank == ranks[-1] else "t"
                yield event(each.rank, call, ph=phase, name="call", id=f"{call['group']}/{call['count']}", bp="e")
    for group in sorted({group for each in records for group in each.peers}):
        for message in messages_of(group, records):
            if message.sent is not None and message.received is not None:
                arrow = f"{group}/{message.sender}-{message.receiver}/{message.count}"
                for phase, rank, end in (
                    ("s", message.sender, message.sent),
                    ("f", message.receiver, message.received),
                ):
                    yield event(rank, end.call, ph=phase, name="message", id=arrow, bp="e")


def _text(call: Call) -> str:
    """Return a call as ``all_gather_dim(float32 [4, 8], dim=0)``, at most 300 characters of it inside the brackets."""
    shape = "" if call["shape"] is None else f"{call['dtype'] or ''} {call['shape']}".strip()
    arguments = [
        f"{key}={value}" for key, value in call["arguments"].items() if value not in (None, "") and key != "transfers"
    ]
    inside = ", ".join(filter(None, (shape, *arguments)))
    return f"{call['name']}({inside if len(inside) <= _MAX_TEXT else f'{inside[:_MAX_TEXT]}...'})"


def with_line(call: Call) -> str:
    """Return a call with the file and line of the program that made it: ``f(float32 [4]) at train.py:41``."""
    return f"{_text(call)} at {call['file']}:{call['line']}"


def fields_compared(call: Call) -> dict[str, Any]:
    """Return the attributes of a call that all its ranks must share, by name; sizes that are all equal are None."""
    if call["kind"] == "hop":
        return {"kind": "hop"}
    arguments = {key: None if _is_even(key, value) else value for key, value in call["arguments"].items()}
    may_differ = set(_MAY_DIFFER.get(call["kind"], ()))
    if any(key.endswith("sizes") and value is not None for key, value in arguments.items()):
        may_differ.add("shape")  # an uneven split gives every rank another shape
    return {key: (call | {"arguments": arguments})[key] for key in _COMPARED if key not in may_differ}


def _is_even(name: str, sizes: Any) -> bool:
    """Whether an argument is a list of split sizes, as its name ends with ``sizes``, and all of them are equal."""
    return name.endswith("sizes") and type(sizes) is list and all(size == sizes[0] for size in sizes)
