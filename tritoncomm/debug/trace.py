"""Merged trace: the flight records of several ranks as one Perfetto trace, and in words where the ranks diverged.

Calls of one group with equal counts belong together. So do the two ends of the n-th message from one rank to another.
The files are the only input, so they may come from another machine.
"""

import json
import os
import reprlib
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, NamedTuple

from tritoncomm.debug.flight import FORMAT, PERIODIC
from tritoncomm.debug.p2p_check import ORDER
from tritoncomm.debug.texts import by_text, named_ranks, one_line
from tritoncomm.errors import ArgumentError

__all__ = [
    "REFUSED", "Call", "Message", "Record", "by_ranks", "is_even", "messages_of", "perfetto",
    "read", "story", "text",
]  # fmt: skip

Call = dict[str, Any]
"""A call as its record has it."""

_COMPARED = ("name", "kind", "shape", "dtype", "arguments")
_MAY_DIFFER = {  # by kind: attributes that may differ between the ranks of one call
    "all_to_all_single": ("shape", "arguments"), "hop": ("name", "shape", "arguments"), "reshard": ("shape", "dtype"),
    "to_heads": ("shape",), "to_sequence": ("shape",),
}  # fmt: skip
_MAX_LINES, _MAX_TEXT = 20, 300
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


@dataclass(frozen=True)
class Record:
    """The flight record of one rank.

    Attributes:
        rank: global rank of the process that wrote the file.
        data: content of the file.
        calls: calls by the name of their group, and there by their count on this group.
    """

    rank: int
    data: dict[str, Any]
    calls: dict[str, dict[int, Call]]

    def ranks(self, group: str) -> list[int]:
        """Return the global ranks of the group of this name; an empty list where the record does not have them."""
        return self.data["groups"].get(group, [])

    def is_before(self, call: Call) -> bool:
        """Whether the watchdog wrote this record before another rank's call began, so it says nothing of that call."""
        return self.data.get("reason") == PERIODIC and self.data["time"] < call["start"]


def read(files: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """Read and check flight records, and return them in the order of their ranks.

    Args:
        files: paths of records; a folder stands for all files ``tritoncomm-flight-*.json`` in it.

    Raises:
        ArgumentError: a file is no flight record, two are of one rank, or there is none.
    """
    paths: list[Path] = []
    for path in map(Path, files):
        paths += sorted(path.glob("tritoncomm-flight-*.json")) if path.is_dir() else [path]
    records: dict[int, Record] = {}
    for path in paths:
        data = _content(path)
        if data["rank"] in records:
            raise ArgumentError(f"{path} is a second record of rank {data['rank']}")
        record = records[data["rank"]] = Record(data["rank"], data, {})
        for call in data["calls"]:
            record.calls.setdefault(call["group"], {})[call["count"]] = call
    if not records:
        raise ArgumentError("there are no flight records in the given files")
    return [records[rank] for rank in sorted(records)]


def _content(path: Path) -> dict[str, Any]:
    """Read one file and return its JSON object, after checking that it has the fields of a flight record.

    Raises:
        ArgumentError: the file is no regular file, no JSON, of another format, or a field is missing or wrong.
    """
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
    """Compare a value of a JSON file with the kind that it should have, a value of the tables above.

    Returns the place and the value of the first difference, as ``.calls[3].line is 'x'`` or ``.rank is missing``; an
    empty text where there is none.
    """
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
    """The sending or the receiving end of a message.

    Attributes:
        call: the p2p step that posted it.
        specs: shape and dtype of every tensor; None for all of them, or for one shape or dtype, that is not known.
    """

    call: Call
    specs: list[list[Any]] | None


class Message(NamedTuple):
    """The n-th message from one rank to another over one group.

    Attributes:
        sender: global rank.
        receiver: global rank.
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


def messages_of(group: str, records: Sequence[Record]) -> list[Message]:
    """Pair the p2p steps of all ranks over one group into messages, by sender, receiver and count.

    The n-th send of a rank to a peer belongs to the n-th receive of the peer from that rank. Counting starts at the
    first call of the group, so messages to or from ranks whose record has lost that call are left out.
    """
    complete = {each.rank: each.calls[group] for each in records if 1 in each.calls.get(group, ())}
    ends: dict[tuple[int, int], tuple[list[End], list[End]]] = {}  # by sender and receiver: sends, receives
    for rank, calls in complete.items():
        for count in sorted(calls):
            for key, peer, specs in _transfers(calls[count], rank):
                is_receive = key.startswith("recv")
                if peer in complete:
                    sends_and_receives = ends.setdefault((peer, rank) if is_receive else (rank, peer), ([], []))
                    sends_and_receives[is_receive].append(End(calls[count], specs))
    return [
        Message(*channel, count, sent, received)
        for channel in sorted(ends)
        for count, (sent, received) in enumerate(zip_longest(*ends[channel]), 1)
    ]


def _transfers(call: Call, rank: int) -> Iterator[tuple[str, int, list[list[Any]] | None]]:
    """Yield the sends and receives of a rank's p2p step, in the order in which two ranks count their messages.

    Each is its key (``send_next``, ``send_prev``, ``recv_prev`` or ``recv_next``), the peer's rank, and the ``specs``
    of an ``End``. Yields nothing for other calls, for steps that sent nothing because they were refused, for transfers
    of a rank to itself, and for values that are no transfers, because a file may hold anything.
    """
    listed = call["arguments"].get("transfers")
    if call["kind"] != "hop" or type(listed) is not list or call["error"].startswith(REFUSED):
        return
    for key in ORDER:
        for each in listed:
            match each:
                case [str(name), int(peer), None | list() as specs] if name == key and peer != rank:
                    if all(isinstance(spec, list) and len(spec) == 2 for spec in specs or ()):
                        yield key, peer, specs


def perfetto(records: Sequence[Record]) -> dict[str, Any]:
    """Return one trace of all ranks in the JSON format of Chrome and Perfetto: a process per rank, a track per thread.

    Arrows join the calls of one group with equal counts, and the two ends of each message. A call that has not ended
    lasts until its record was written. Times are microseconds since the first call.
    """
    events: list[dict[str, Any]] = []
    origin = min((call["start"] for each in records for call in each.data["calls"]), default=0)

    def event(rank: int, call: Call, **fields: Any) -> dict[str, Any]:
        """Make an event at the start of a rank's call, on the track of its thread."""
        start = (call["start"] - origin) / 1e3
        return {"pid": rank, "tid": call["thread"] % (1 << 31), "ts": start, "cat": "tritoncomm"} | fields

    for each in records:
        name = f"rank {each.rank} ({each.data['host']}, pid {each.data['pid']})"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": {"sort_index": each.rank}})
        for call in each.data["calls"]:
            duration = max((call["end"] or each.data["time"]) - call["start"], 1) / 1e3
            events.append(event(each.rank, call, ph="X", name=call["name"], dur=duration, args=call))
            ranks = each.ranks(call["group"])
            if call["kind"] != "hop" and len(ranks) > 1:
                phase = "s" if each.rank == ranks[0] else "f" if each.rank == ranks[-1] else "t"
                arrow = f"{call['group']}/{call['count']}"
                events.append(event(each.rank, call, ph=phase, name="call", id=arrow, bp="e"))
    for group in sorted({group for each in records for group in each.calls}):
        for message in messages_of(group, records):
            if message.sent is not None and message.received is not None:
                arrow = f"{group}/{message.sender}-{message.receiver}/{message.count}"
                options = {"name": "message", "id": arrow, "bp": "e"}
                events.append(event(message.sender, message.sent.call, ph="s", **options))
                events.append(event(message.receiver, message.received.call, ph="f", **options))
    return {"traceEvents": events, "displayTimeUnit": "ns"}


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
    """Return ``group '0' of ranks 0-3``; without the ranks where the record does not have them."""
    ranks = record.ranks(group)
    return f"group {group!r} of ranks {named_ranks(ranks).partition(' ')[2]}" if ranks else f"group {group!r}"


def _shortened(lines: list[str], indent: str = "") -> list[str]:
    """Return the first 20 lines, indented, and where there are more a line with the number of the others."""
    rest = [f"and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return [f"{indent}{line}" for line in lines[:_MAX_LINES] + rest]


def _table(calls: Mapping[int, Call]) -> list[str]:
    """Return one indented line for each distinct call of several ranks, with the ranks that made it."""
    texts = {rank: _with_line(call) for rank, call in calls.items()}
    return _shortened([f"{named_ranks(ranks)}: {line}" for line, ranks in by_text(texts)], "  ")


def story(records: Sequence[Record]) -> list[str]:
    """Describe in lines of text where the ranks of a job diverged, and what each of them was in.

    The lines name, in this order: ranks without a record and records of other runs; for each group the first call that
    ranks made differently, and messages with an end that differs or is missing; the call that a rank was in or failed
    in, with the ranks that have not joined it; collectives that a device has not completed; errors that ended a rank.
    Control characters are escaped. Without a finding there is one line that says so.
    """
    lines = _job_lines(records)
    groups = sorted({group for each in records for group in each.calls})
    messages = {group: messages_of(group, records) for group in groups}
    for group in groups:
        lines += _first_difference(group, records) + _message_lines(messages[group], records)
    for texts in (
        {each.rank: _open_call(each, records, messages) for each in records},
        {each.rank: _open_collective(each, records, messages) for each in records},
        {each.rank: _uncaught(each) for each in records},
    ):
        lines += [f"{named_ranks(ranks)}: {line}" for line, ranks in by_text(texts) if line]
    lines = lines or ["the records agree, and no call was under way when they were written"]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def _job_lines(records: Sequence[Record]) -> list[str]:
    """Return a line for ranks that have no record, and lines for records that are not of one run of the job."""
    lines = []
    worlds = {each.rank: str(each.data["world"]) for each in records}
    if len(set(worlds.values())) > 1:
        sizes = ", ".join(f"{world} on {named_ranks(ranks)}" for world, ranks in by_text(worlds))
        lines.append(f"the records are of different runs: the world size is {sizes}")
    starts = {each.rank: min((call["start"] for call in each.data["calls"]), default=0) for each in records}
    last = max(starts, key=lambda rank: starts[rank])
    if older := [each.rank for each in records if each.data["calls"] and each.data["time"] < starts[last]]:
        why = f"rank {last} started late, or the records are of different runs"
        lines.append(f"{named_ranks(older)} wrote before the first call in the record of rank {last}: {why}")
    world, known = max(each.data["world"] for each in records), {each.rank for each in records}
    if absent := [rank for rank in range(world) if rank not in known]:
        lines.append(f"no record of {named_ranks(absent)} of {world}")
    return lines


def by_ranks(group: str, records: Sequence[Record]) -> dict[tuple[int, ...], list[Record]]:
    """Divide the records with calls over a group of this name by the global ranks of that group.

    Groups of different ranks may have one name. Records that do not have the ranks, because the group was destroyed
    before, are under ``()``, or, where there is one group with known ranks only, with the records of that group.
    """
    holders: dict[tuple[int, ...], list[Record]] = {}
    for each in records:
        if group in each.calls:
            holders.setdefault(tuple(each.ranks(group)), []).append(each)
    if () in holders and len(holders) == 2:
        unknown = holders.pop(())
        for known in holders.values():
            known[:] = sorted(known + unknown, key=lambda each: each.rank)
    return holders


def _first_difference(group: str, records: Sequence[Record]) -> list[str]:
    """Describe the first collective over a group that its ranks made differently, or that some ranks did not make.

    Calls are compared from the first one that all records with calls of the group still have. Returns a headline and
    one line for each distinct call, one line for a call that was not made, or no lines where the ranks agree.
    """
    for ranks, holders in by_ranks(group, records).items():
        oldest = max(min(each.calls[group]) for each in holders)
        for count in sorted({count for each in holders for count in each.calls[group] if count >= oldest}):
            calls = {each.rank: each.calls[group][count] for each in holders if count in each.calls[group]}
            if all(call["kind"] == "hop" for call in calls.values()):
                continue
            if differences := _differences(list(calls.values())):
                where = f"{_group_text(group, holders[0])}: call {count} is the first that differs"
                return [f"{where}, in {', '.join(differences)}:", *_table(calls)]
        if line := _missing_call(group, ranks, holders, records):
            return [line]
    return []


def _differences(calls: Sequence[Call]) -> list[str]:
    """Return the names of the attributes in which calls differ, of those that all ranks of a call must share."""
    compared = [
        call | {"arguments": {key: None if is_even(key, value) else value for key, value in call["arguments"].items()}}
        for call in calls
    ]
    may_differ = set(_MAY_DIFFER.get(calls[0]["kind"], ()))
    if any(key.endswith("sizes") and value is not None for key, value in compared[0]["arguments"].items()):
        may_differ.add("shape")  # an uneven split gives every rank another shape
    return [
        key for key in _COMPARED if key not in may_differ and any(call[key] != compared[0][key] for call in compared)
    ]


def is_even(name: str, sizes: Any) -> bool:
    """Whether an argument holds split sizes that are all equal: its name ends with ``sizes``, its value is a list."""
    return name.endswith("sizes") and type(sizes) is list and all(size == sizes[0] for size in sizes)


def _missing_call(group: str, ranks: Sequence[int], holders: Sequence[Record], records: Sequence[Record]) -> str:
    """Name the ranks that made fewer calls over a group than the others, where the first missing call ended elsewhere.

    Such a call was asynchronous, so no rank is in it. Returns an empty text where all ranks made it, where no rank
    ended it, and for groups with p2p steps, because pipeline stages make different numbers of steps.

    Args:
        group: name of the group.
        ranks: global ranks of the group; empty where they are not known.
        holders: records of these ranks that have calls over the group.
        records: records of all ranks.
    """
    if any(call["kind"] == "hop" for each in holders for call in each.calls[group].values()):
        return ""
    members = [each for each in records if each.rank in ranks] or holders
    count = min(each.data["counts"].get(group, 0) for each in members) + 1
    issuer = next((each for each in holders if count in each.calls[group]), None)
    if issuer is None or not (call := issuer.calls[group][count])["end"]:
        return ""
    behind = [each.rank for each in members if each.data["counts"].get(group, 0) < count and not each.is_before(call)]
    where = f"did not join {_with_group(call, issuer)}, which rank {issuer.rank} issued"
    return f"{named_ranks(behind)} {where}" if behind else ""


def _message_lines(messages: Sequence[Message], records: Sequence[Record]) -> list[str]:
    """Describe, for each sender and receiver, the first message whose ends differ, and the first that was not sent.

    Returns at most 21 lines. A message counts as not sent where its receive has ended, because that was asynchronous;
    in a receive that has not ended the receiving rank waits, which another line says.
    """
    lines, by_rank = list[str](), {each.rank: each for each in records}
    differing, unsent = set[tuple[int, int]](), set[tuple[int, int]]()
    for each in messages:
        channel = each.sender, each.receiver
        if each.received is None:
            continue
        call = each.received.call
        if each.sent is None and channel not in unsent:
            unsent.add(channel)
            if call["end"] and not by_rank[each.sender].is_before(call):
                posted = f"whose receive is posted by {_with_line(call)}"
                lines.append(f"rank {each.sender} did not send message {each.count} to rank {each.receiver}, {posted}")
        elif each.sent is not None and not each.fits() and channel not in differing:
            differing.add(channel)
            where = f"message {each.count} from rank {each.sender} to rank {each.receiver}"
            lines.append(f"{where} is the first whose ends differ:")
            lines += _table({each.sender: each.sent.call, each.receiver: call})
    return _shortened(lines)


def _open_call(record: Record, records: Sequence[Record], messages: Mapping[str, Sequence[Message]]) -> str:
    """Describe the call that a rank was in, or failed in, when it wrote its record, and which ranks did not join it.

    Returns an empty text where the rank was in no call.

    Args:
        record: of the rank.
        records: of all ranks.
        messages: by group.
    """
    calls, reason = record.data["calls"], record.data.get("reason")
    running = [call for call in calls if not call["end"] and not call["error"]]  # of any thread
    # An asynchronous call has ended when its wait() fails: the record's reason has its name and its error.
    failed = [call for call in calls if call["error"] and reason == f"{call['name']}: {call['error'].split(':')[0]}"]
    last = [call for call in calls[-1:] if not call["end"]]
    if not (found := running or failed or last):
        return ""
    call = found[-1]
    line = f"{'failed in' if call['error'] else 'in'} {_with_group(call, record)}"
    if call["error"]:
        line += f": {one_line(call['error'])}"
    return line + _absent(call, record, records, messages)


def _absent(call: Call, record: Record, records: Sequence[Record], messages: Mapping[str, Sequence[Message]]) -> str:
    """Name the ranks that did not join a call of one rank, as an addition to a line: ``; rank 2 did not join it``.

    The ranks of a collective are those of its group, the ranks of a p2p step its peers. Ranks without a record, and
    ranks whose periodic record was written before the call, are named as such. Returns an empty text where all joined.

    Args:
        call: of the rank.
        record: of the rank.
        records: of all ranks.
        messages: by group.
    """
    by_rank, group = {each.rank: each for each in records}, call["group"]
    joined: dict[int, bool | None] = {}  # None where the records do not tell
    if call["kind"] == "hop":
        joined = {peer: None for _, peer, _ in _transfers(call, record.rank)}
        for each in messages[group]:
            ends = (each.sent, each.received) if each.sender == record.rank else (each.received, each.sent)
            if ends[0] is not None and ends[0].call is call:
                peer = each.receiver if each.sender == record.rank else each.sender
                joined[peer] = joined[peer] is not False and ends[1] is not None
    else:
        for rank in record.ranks(group):
            other = by_rank.get(rank)
            joined[rank] = None if other is None else other.data["counts"].get(group, 0) >= call["count"]
    joined.pop(record.rank, None)
    behind = sorted(rank for rank, has_joined in joined.items() if has_joined is False)
    early = [rank for rank in behind if by_rank[rank].is_before(call)]
    late = [rank for rank in behind if rank not in early]
    unknown = sorted({*joined} - {*by_rank})
    line = f"; {named_ranks(late)} did not join it" if late else ""
    line += f"; {named_ranks(early)} wrote the record before it" if early else ""
    return line + (f"; no record of {named_ranks(unknown)}" if unknown else "")


def _open_collective(record: Record, records: Sequence[Record], messages: Mapping[str, Sequence[Message]]) -> str:
    """Describe the oldest collective that a rank's device has not completed, and which ranks did not join its call.

    torch's recorder knows such collectives. Returns an empty text where the record has none.

    Args:
        record: of the rank.
        records: of all ranks.
        messages: by group.
    """
    active = min(record.data["active"], key=lambda each: each["created"], default=None)
    if active is None:
        return ""
    number = active["number"]
    calls = [each for each in record.data["calls"] if number is not None and each.get("number") == number]
    if not calls:
        where = f"torch's collective {active['sequence']} of {_group_text(active['group'], record)}"
        return f"the device has not completed {active['name']}, {where}, of no call in the record ({active['state']})"
    line = f"the device has not completed {_with_group(calls[0], record)} ({active['state']})"
    return line + _absent(calls[0], record, records, messages)


def _uncaught(record: Record) -> str:
    """Return ``ended by an uncaught ValueError: ...`` for a rank that an error ended.

    Returns an empty text where no error did, and where the error is that of a call in the record, which ``_open_call``
    describes.
    """
    reason = record.data.get("reason")
    if type(reason) is not str or not reason.startswith("uncaught "):
        return ""
    is_of_call = any(call["error"] and call["error"] in reason for call in record.data["calls"])
    return "" if is_of_call else f"ended by an {one_line(reason)}"
