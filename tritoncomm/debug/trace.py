"""Merged trace: the flight records of several ranks as one Perfetto trace, and in words where the ranks diverged.

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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tritoncomm.debug.flight import FORMAT, PERIODIC
from tritoncomm.debug.p2p_check import ORDER
from tritoncomm.debug.texts import by_text, named_ranks, one_line, table_of
from tritoncomm.errors import ArgumentError

__all__ = [
    "REFUSED", "Call", "Message", "Record", "by_ranks", "is_even", "messages_of", "read", "story", "text",
    "write_perfetto",
]  # fmt: skip

Call = dict[str, Any]
"""A call as its record has it."""
Calls = dict[str, dict[int, Call]]
"""Calls by the name of their group, and there by their count on this group."""

_COMPARED = ("name", "kind", "shape", "dtype", "arguments")
_MAY_DIFFER = {  # by kind: attributes that may differ between the ranks of one call
    "all_to_all_single": ("shape", "arguments"), "hop": ("name", "shape", "arguments"), "reshard": ("shape", "dtype"),
    "to_heads": ("shape",), "to_sequence": ("shape",),
}  # fmt: skip
_MAX_LINES, _MAX_TEXT = 20, 300
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
    known: dict[tuple[int, ...], tuple[int, ...]] = {}  # one object for the ranks of a group in all records

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
        # Thousands of records name the same ranks.
        data["groups"] = {name: known.setdefault(each := tuple(ranks), each) for name, ranks in data["groups"].items()}
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
        values = call["count"], hash(repr(_compared(call))), hash(_with_line(call))
        for column, value in zip(columns, values, strict=True):
            column.append(value)
        for _, peer, _ in _transfers(call, record.rank):
            record.peers.setdefault(call["group"], set()).add(peer)
    running = [call for call in calls if not call["end"] and not call["error"]]  # of any thread
    # An asynchronous call has ended when its wait() fails: the record's reason has its name and its error.
    failed = [call for call in calls if call["error"] and reason == f"{call['name']}: {call['error'].split(':')[0]}"]
    last = [call for call in calls[-1:] if not call["end"]]
    record.current = next(reversed(running or failed or last), None)
    active = min(data["active"], key=lambda each: each["created"], default={"number": None})
    if active["number"] is not None:
        record.issued = next((call for call in calls if call.get("number") == active["number"]), None)
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
                for key, peer, specs in _transfers(call, rank):
                    if peer == other:
                        is_receive = key.startswith("recv")
                        channel = ends.setdefault((peer, rank) if is_receive else (rank, peer), ([], []))
                        channel[is_receive].append(End(call, specs))
        for sender, receiver in sorted(ends):
            for count, (sent, received) in enumerate(zip_longest(*ends[sender, receiver]), 1):
                yield Message(sender, receiver, count, sent, received)


def _transfers(call: Call, rank: int) -> Iterator[tuple[str, int, list[list[Any]] | None]]:
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


def text(call: Call) -> str:
    """Return a call as ``all_gather_dim(float32 [4, 8], dim=0)``, at most 300 characters of it inside the brackets."""
    shape = "" if call["shape"] is None else f"{call['dtype'] or ''} {call['shape']}".strip()
    arguments = [
        f"{key}={value}" for key, value in call["arguments"].items() if value not in (None, "") and key != "transfers"
    ]
    inside = ", ".join(filter(None, (shape, *arguments)))
    return f"{call['name']}({inside if len(inside) <= _MAX_TEXT else f'{inside[:_MAX_TEXT]}...'})"


def _with_line(call: Call) -> str:
    """Return a call with the file and line of the program that made it: ``f(float32 [4]) at train.py:41``."""
    return f"{text(call)} at {call['file']}:{call['line']}"


def _with_group(call: Call, record: Record) -> str:
    """Return a call of a record with its line, its count and its group: ``f() at a.py:1, call 2 of group '0' ...``."""
    return f"{_with_line(call)}, call {call['count']} of {_group_text(call['group'], record)}"


def _group_text(group: str, record: Record) -> str:
    """Return ``group '0' of ranks 0-3``; ``group '0'`` where the record does not have the group's ranks."""
    ranks = record.ranks(group)
    return f"group {group!r} of ranks {named_ranks(ranks).partition(' ')[2]}" if ranks else f"group {group!r}"


def story(records: Sequence[Record]) -> list[str]:
    """Describe in lines of text where the ranks of a job diverged, and the calls in which they were."""
    # In this order: missing and foreign records; by group its first differing call and its messages; the call of each
    # rank; collectives that devices have not completed; uncaught errors.
    lines = _job_lines(records)
    joined: _Joined = {}
    for group in sorted({group for each in records for group in each.hashes}):
        lines += _first_difference(group, records) + _message_lines(group, records, joined)
    by_rank = {each.rank: each for each in records}
    for texts in (
        {each.rank: _open_call(each, by_rank, joined) for each in records},
        {each.rank: _open_collective(each, by_rank, joined) for each in records},
        {each.rank: _uncaught(each) for each in records},
    ):
        lines += [f"{named_ranks(ranks)}: {line}" for line, ranks in by_text(texts) if line]
    lines = lines or ["the records agree, and no call was under way when they were written"]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


_Joined = dict[
    tuple[int, str, int], dict[int, bool]
]  # by rank, group and count of a p2p step: whether a peer joined it


def _job_lines(records: Sequence[Record]) -> list[str]:
    """Return a line for ranks that have no record, and lines for records that are not of one run of the job."""
    lines = []
    worlds = {each.rank: str(each.data["world"]) for each in records}
    if len(set(worlds.values())) > 1:
        sizes = ", ".join(f"{world} on {named_ranks(ranks)}" for world, ranks in by_text(worlds))
        lines.append(f"the records are of different runs: the world size is {sizes}")
    last = max(records, key=lambda each: each.start)
    if older := [each.rank for each in records if each.hashes and each.data["time"] < last.start]:
        why = f"rank {last.rank} started late, or the records are of different runs"
        lines.append(f"{named_ranks(older)} wrote before the first call in the record of rank {last.rank}: {why}")
    world, known = max(each.data["world"] for each in records), {each.rank for each in records}
    if absent := [rank for rank in range(world) if rank not in known]:
        lines.append(f"no record of {named_ranks(absent)} of {world}")
    return lines


def by_ranks(group: str, records: Sequence[Record]) -> dict[tuple[int, ...], list[Record]]:
    """Return the records with calls over groups of this name, by the global ranks of their group."""
    holders: dict[tuple[int, ...], list[Record]] = {}
    for each in records:
        if group in each.hashes:
            holders.setdefault(tuple(each.ranks(group)), []).append(each)
    # Groups of different ranks may have one name. A record lacks the ranks if the group was destroyed before: it
    # belongs to the only group with known ranks, if there is one.
    if () in holders and len(holders) == 2:
        unknown = holders.pop(())
        for known in holders.values():
            known[:] = sorted(known + unknown, key=lambda each: each.rank)
    return holders


def _first_difference(group: str, records: Sequence[Record]) -> list[str]:
    """Describe the first collective over a group that its ranks made differently, or that some ranks did not make."""
    for ranks, holders in by_ranks(group, records).items():
        # The first call that the records of all ranks with calls of the group still have.
        oldest = max(each.oldest(group) for each in holders)
        first: dict[int, int] = {}
        differing = set[int]()
        for each in holders:
            hashes = each.hashes[group]
            for count, compared in zip(hashes.counts, hashes.compared, strict=True):
                if count >= oldest and first.setdefault(count, compared) != compared:
                    differing.add(count)
        for count in sorted(differing):
            names, table = _compare(group, count, holders)
            if names:
                where = f"{_group_text(group, holders[0])}: call {count} is the first that differs"
                return [f"{where}, in {', '.join(names)}:", *table]
        if line := _missing_call(group, ranks, holders, records):
            return [line]
    return []


def _compare(group: str, count: int, holders: Sequence[Record]) -> tuple[list[str], list[str]]:
    """Return the attributes in which ranks differ in a call, and a table of its first 20 distinct forms."""
    # Only one record of each form is read.
    forms: dict[tuple[int, int], list[Record]] = {}
    for each in holders:
        counts, *hashes = each.hashes[group]
        if count in counts:
            compared, shown = (column[counts.index(count)] for column in hashes)
            forms.setdefault((compared, shown), []).append(each)
    # The first record of each form that differs in compared attributes, and of each of the first forms.
    differing = {compared: having[0] for (compared, _), having in reversed(forms.items())}
    first, *others = (_compared(each.calls[group][count]) for each in list(differing.values())[:_MAX_LINES])
    names = [key for key in first if any(key in other and other[key] != first[key] for other in others)]
    lines = [
        f"{named_ranks([each.rank for each in having])}: {_with_line(having[0].calls[group][count])}"
        for having in list(forms.values())[:_MAX_LINES]
    ]
    return names, _shortened(lines, len(forms), "  ")


def _compared(call: Call) -> dict[str, Any]:
    """Return the attributes of a call that all its ranks must share, by name; sizes that are all equal are None."""
    if call["kind"] == "hop":
        return {"kind": "hop"}
    arguments = {key: None if is_even(key, value) else value for key, value in call["arguments"].items()}
    may_differ = set(_MAY_DIFFER.get(call["kind"], ()))
    if any(key.endswith("sizes") and value is not None for key, value in arguments.items()):
        may_differ.add("shape")  # an uneven split gives every rank another shape
    return {key: (call | {"arguments": arguments})[key] for key in _COMPARED if key not in may_differ}


def is_even(name: str, sizes: Any) -> bool:
    """Whether an argument is a list of split sizes, as its name ends with ``sizes``, and all of them are equal."""
    return name.endswith("sizes") and type(sizes) is list and all(size == sizes[0] for size in sizes)


def _shortened(lines: Sequence[str], count: int, indent: str = "") -> list[str]:
    """Return the first 20 lines, indented, and the number of the others out of ``count``, if there are others."""
    rest = [f"and {count - _MAX_LINES} more"] if count > _MAX_LINES else []
    return [f"{indent}{line}" for line in [*lines[:_MAX_LINES], *rest]]


def _missing_call(group: str, ranks: Sequence[int], holders: Sequence[Record], records: Sequence[Record]) -> str:
    """Name the ranks that made fewer calls over a group than the others, where the first missing call ended elsewhere.

    ``ranks`` are empty where they are not known; ``holders`` are records of these ranks with calls over the group.
    """
    # Pipeline stages make different numbers of steps, so groups with p2p steps are left out.
    hop = hash(repr({"kind": "hop"}))
    if any(hop in each.hashes[group].compared for each in holders):
        return ""
    members = [each for each in records if each.rank in ranks] or holders
    count = min(each.count(group) for each in members) + 1
    issuer = next((each for each in holders if count in each.hashes[group].counts), None)
    # A call that has ended was asynchronous, so no rank is in it. A rank in a call has a line of its own.
    if issuer is None or not (call := issuer.calls[group][count])["end"]:
        return ""
    behind = [each.rank for each in members if each.count(group) < count and not each.is_before(call)]
    where = f"did not join {_with_group(call, issuer)}, which rank {issuer.rank} issued"
    return f"{named_ranks(behind)} {where}" if behind else ""


def _message_lines(group: str, records: Sequence[Record], joined: _Joined) -> list[str]:
    """Describe, for each sender and receiver, the first message whose ends differ, and the first that was not sent.

    ``joined`` gets the p2p steps over the group in which their ranks still were.
    """
    lines, by_rank = list[str](), {each.rank: each for each in records}
    differing, unsent = set[tuple[int, int]](), set[tuple[int, int]]()
    open_ones = {
        (each.rank, call["group"], call["count"]) for each in records for call in (each.current, each.issued) if call
    }
    for each in messages_of(group, records):
        channel = each.sender, each.receiver
        for (rank, peer), end, other in (
            (channel, each.sent, each.received),
            (channel[::-1], each.received, each.sent),
        ):
            if end is not None and (step := (rank, group, end.call["count"])) in open_ones:
                peers = joined.setdefault(step, {})
                peers[peer] = peers.get(peer, True) and other is not None
        if each.received is None:
            continue
        call = each.received.call
        if each.sent is None and channel not in unsent:
            unsent.add(channel)
            # The receive has ended because it was asynchronous. In one that has not ended the receiving rank waits,
            # which another line says.
            if call["end"] and not by_rank[each.sender].is_before(call):
                posted = f"whose receive is posted by {_with_line(call)}"
                lines.append(f"rank {each.sender} did not send message {each.count} to rank {each.receiver}, {posted}")
        elif each.sent is not None and not each.fits() and channel not in differing:
            differing.add(channel)
            where = f"message {each.count} from rank {each.sender} to rank {each.receiver}"
            lines.append(f"{where} is the first whose ends differ:")
            lines += table_of({each.sender: _with_line(each.sent.call), each.receiver: _with_line(call)}).splitlines()
    return _shortened(lines, len(lines))


def _open_call(record: Record, by_rank: Mapping[int, Record], joined: _Joined) -> str:
    """Describe the call that a rank was in, or failed in, when it wrote its record, and which ranks did not join it."""
    if (call := record.current) is None:
        return ""
    line = f"{'failed in' if call['error'] else 'in'} {_with_group(call, record)}"
    if call["error"]:
        line += f": {one_line(call['error'])}"
    return line + _absent(call, record, by_rank, joined)


def _absent(call: Call, record: Record, by_rank: Mapping[int, Record], joined: _Joined) -> str:
    """Return which ranks have not joined a call, as an addition to a line: ``; rank 2 did not join it``."""
    group = call["group"]
    if call["kind"] == "hop":
        # A peer that ``_message_lines`` has not noted is not known to have stayed away.
        peers = joined.get((record.rank, group, call["count"]), {})
        behind = sorted(rank for rank, has_joined in peers.items() if not has_joined)
        ranks = {peer for _, peer, _ in _transfers(call, record.rank)}
    else:
        ranks = {*record.ranks(group)} - {record.rank}
        behind = sorted(rank for rank in ranks & by_rank.keys() if by_rank[rank].count(group) < call["count"])
    early = [rank for rank in behind if by_rank[rank].is_before(call)]
    late = [rank for rank in behind if rank not in early]
    unknown = sorted(ranks - by_rank.keys())
    line = f"; {named_ranks(late)} did not join it" if late else ""
    line += f"; {named_ranks(early)} wrote the record before it" if early else ""
    return line + (f"; no record of {named_ranks(unknown)}" if unknown else "")


def _open_collective(record: Record, by_rank: Mapping[int, Record], joined: _Joined) -> str:
    """Describe the oldest collective that a rank's device has not completed, and which ranks did not join its call."""
    active = min(record.data["active"], key=lambda each: each["created"], default=None)
    if active is None:
        return ""
    if record.issued is None:
        where = f"torch's collective {active['sequence']} of {_group_text(active['group'], record)}"
        return f"the device has not completed {active['name']}, {where}, of no call in the record ({active['state']})"
    line = f"the device has not completed {_with_group(record.issued, record)} ({active['state']})"
    return line + _absent(record.issued, record, by_rank, joined)


def _uncaught(record: Record) -> str:
    """Return ``ended by an uncaught ValueError: ...`` for a rank that an error ended, outside of a call; else empty."""
    reason = str(record.data.get("reason"))
    is_error = reason.startswith("uncaught ") and not record.is_explained
    return f"ended by an {one_line(reason)}" if is_error else ""
