"""Flight records of several ranks merged: one trace for Perfetto, and in words where the ranks diverged.

The n-th calls of a group belong together. Nothing but the files is read, so they may come from another machine.
"""

import json
import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritoncomm.debug.flight import FORMAT, PERIODIC
from tritoncomm.debug.texts import by_text, named_ranks, one_line
from tritoncomm.debug.transfers import Transfers
from tritoncomm.errors import ArgumentError

__all__ = ["Record", "perfetto", "read", "story"]

_COMPARED = ("name", "kind", "shape", "dtype", "arguments")
_OWN = {  # may differ between ranks
    "all_to_all_single": ("shape", "arguments"), "hop": ("name", "shape", "arguments"), "reshard": ("shape", "dtype"),
    "to_heads": ("shape",), "to_sequence": ("shape",),
}  # fmt: skip
_MAX_LINES, _MAX_TEXT = 20, 300
_FAILED = ", which failed: "
_MAX_RANKS, _MAX_INT = 1 << 20, 1 << 63


def _is_int(value: Any, low: int = 0, high: int = _MAX_INT) -> bool:
    return type(value) is int and low <= value < high


def _is_rank(value: Any) -> bool:
    return _is_int(value, 0, _MAX_RANKS)


def _is_text(value: Any) -> bool:
    return type(value) is str


def _is_ranks(value: Any) -> bool:
    return type(value) is list and all(map(_is_rank, value))


def _is_mapping(value: Any, has: Callable[[Any], bool] = lambda _: True) -> bool:
    return type(value) is dict and all(map(has, value.values()))


# What of a record is read, and whether a value is one that a rank writes: a file may hold anything.
_RECORD: dict[str, Callable[[Any], bool]] = {
    "rank": _is_rank, "world": _is_rank, "host": _is_text, "pid": _is_int, "time": _is_int,
    "groups": lambda value: _is_mapping(value, _is_ranks), "counts": lambda value: _is_mapping(value, _is_int),
    "calls": lambda value: type(value) is list and all(map(_is_mapping, value)),
}  # fmt: skip
_CALL: dict[str, Callable[[Any], bool]] = {
    "name": _is_text, "kind": _is_text, "group": _is_text, "file": _is_text, "path": _is_text, "error": _is_text,
    "count": _is_int, "line": _is_int, "start": _is_int, "end": _is_int, "thread": _is_int, "bytes_copied": _is_int,
    "bytes_sent": _is_int, "arguments": _is_mapping, "shape": lambda _: True, "dtype": lambda _: True,
}  # fmt: skip
_ACTIVE: dict[str, Callable[[Any], bool]] = {
    "name": _is_text, "group": _is_text, "state": _is_text, "created": _is_int, "sequence": _is_int,
    "number": lambda value: value is None or _is_int(value),
}  # fmt: skip
_KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a named pipe", stat.S_IFSOCK: "a socket"}


@dataclass(frozen=True)
class Record:
    """What one rank wrote.

    Attributes:
        rank: global.
        data: the file's content.
        calls: by group, and there by count.
    """

    rank: int
    data: dict[str, Any]
    calls: dict[str, dict[int, dict[str, Any]]]

    def ranks(self, group: str) -> list[int]:
        """Global ranks of a group, as far as this record has them."""
        return self.data["groups"].get(group, [])

    def is_before(self, call: Mapping[str, Any]) -> bool:
        """Whether this periodic record was written before a call of another rank began, and so cannot have it."""
        return self.data.get("reason") == PERIODIC and self.data["time"] < call["start"]


def read(files: Iterable[str | os.PathLike[str]]) -> list[Record]:
    """The records in files, by rank; folders stand for the records in them.

    Raises:
        ArgumentError: a file that is no record, or two of one rank.
    """
    paths: list[Path] = []
    for each in map(Path, files):
        paths += sorted(each.glob("tritoncomm-flight-*.json")) if each.is_dir() else [each]
    records: dict[int, Record] = {}
    for path in paths:
        data = _content(path)
        rank, calls = data["rank"], {}
        if rank in records:
            raise ArgumentError(f"{path} is a second record of rank {rank}")
        for call in data["calls"]:
            calls.setdefault(call["group"], {})[call["count"]] = call
        records[rank] = Record(rank, data, calls)
    if not records:
        raise ArgumentError("there are no flight records in the given files")
    return [records[rank] for rank in sorted(records)]


def _content(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        ArgumentError: there is none.
    """
    mode = path.stat().st_mode
    if not stat.S_ISREG(mode):  # reading a pipe waits for a writer, reading a device may never end
        raise ArgumentError(f"{path} is no flight record: it is {_KINDS.get(stat.S_IFMT(mode), 'a device')}")
    try:
        data = json.loads(path.read_text())
    except RecursionError:
        raise ArgumentError(f"{path} is no flight record: it is nested too deeply") from None
    except ValueError as error:
        raise ArgumentError(f"{path} is no flight record: {type(error).__name__}: {error}") from None
    if type(data) is not dict or "format" not in data:
        raise ArgumentError(f"{path} is no flight record: it has no format")
    if data["format"] != FORMAT:
        raise ArgumentError(f"{path} has format {reprlib.repr(data['format'])}, this version reads {FORMAT}")
    _check_fields(path, "", data, _RECORD)
    for i, call in enumerate(data["calls"]):
        _check_fields(path, f"calls[{i}].", call, _CALL)
    active = data.setdefault("active", [])  # older records have none
    if type(active) is not list or not all(map(_is_mapping, active)):
        raise ArgumentError(f"{path} is no flight record: active is {reprlib.repr(active)}")
    for i, each in enumerate(active):
        _check_fields(path, f"active[{i}].", each, _ACTIVE)
    return data


def _check_fields(path: Path, place: str, values: dict[str, Any], fields: dict[str, Callable[[Any], bool]]) -> None:
    for name, is_right in fields.items():
        if name not in values or not is_right(values[name]):
            shown = reprlib.repr(values[name]) if name in values else "missing"
            raise ArgumentError(f"{path} is no flight record: {place}{name} is {shown}")


def perfetto(records: Sequence[Record]) -> dict[str, Any]:
    """The trace, in the JSON format of Chrome and Perfetto: a process per rank, a track per thread.

    Calls of one group with equal counts are joined by an arrow, and so are the two ends of a message. A call that has
    not ended lasts until its record was written.
    """
    events: list[dict[str, Any]] = []
    begin = min((call["start"] for each in records for call in each.data["calls"]), default=0)
    for each in records:
        name = f"rank {each.rank} ({each.data['host']}, pid {each.data['pid']})"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": {"sort_index": each.rank}})
        for call in each.data["calls"]:
            events += _events(each, call, begin)
    for group, transfers in _transfers_of(records).items():
        for each in transfers.messages():
            for step, rank, call in (("s", each.sender, each.sent), ("f", each.receiver, each.received)):
                name = f"{group}/{each.sender}-{each.receiver}/{each.count}"
                events.append(_place(rank, call, begin) | {"ph": step, "name": "message", "id": name, "bp": "e"})
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(record: Record, call: dict[str, Any], begin: int) -> list[dict[str, Any]]:
    """A call as a slice, with the step of its arrow."""
    place = _place(record.rank, call, begin)
    end = ((call["end"] or record.data["time"]) - begin) / 1e3
    keys = ("shape", "dtype", "arguments", "group", "count", "path", "bytes_copied", "bytes_sent", "error")
    details = {key: call[key] for key in keys} | {"at": f"{call['file']}:{call['line']}", "ended": bool(call["end"])}
    slices = [place | {"ph": "X", "name": call["name"], "dur": max(end - place["ts"], 0.001), "args": details}]
    ranks = record.ranks(call["group"])
    if call["kind"] != "hop" and len(ranks) > 1:
        step = "s" if record.rank == ranks[0] else "f" if record.rank == ranks[-1] else "t"
        arrow = {"ph": step, "name": "call", "id": f"{call['group']}/{call['count']}", "bp": "e"}
        slices.append(place | arrow)
    return slices


def _place(rank: int, call: dict[str, Any], begin: int) -> dict[str, Any]:
    """Where in the trace a call begins."""
    start = (call["start"] - begin) / 1e3
    return {"pid": rank, "tid": call["thread"] % (1 << 31), "ts": start, "cat": "tritoncomm"}


def _words(call: dict[str, Any]) -> str:
    shape = "" if call["shape"] is None else f"{call['dtype'] or ''} {call['shape']}".strip()
    given = [(key, value) for key, value in call["arguments"].items() if value not in (None, "")]
    arguments = [f"{key}={value}" for key, value in given if key != "transfers"]
    inside = ", ".join(filter(None, (shape, *arguments)))
    if len(inside) > _MAX_TEXT:
        inside = f"{inside[:_MAX_TEXT]}..."
    return f"{call['name']}({inside}) at {call['file']}:{call['line']}"


def story(records: Sequence[Record]) -> list[str]:
    """In words: the ranks without a record, the first call of every group that differs, and who waits for whom."""
    lines = _of_one_job(records)
    transfers = _transfers_of(records)
    for group in transfers:
        lines += _first_difference(group, records) + _unpaired(transfers[group], records)
    waits = {each.rank: text for each in records if (text := _waits(each, records, transfers))}
    for text, ranks in by_text(waits):
        now, last = ("is in", "its last call") if len(ranks) == 1 else ("are in", "their last call")
        lines.append(f"{named_ranks(ranks)} {f'made as {last}' if _FAILED in text else now} {text}")
    hangs = {each.rank: text for each in records if (text := _hangs(each, records))}
    lines += [f"on the device of {named_ranks(ranks)}: {text}" for text, ranks in by_text(hangs)]
    ends = {each.rank: one_line(text) for each in records if (text := _uncaught(each))}
    lines += [f"{named_ranks(ranks)} ended by an {text}" for text, ranks in by_text(ends)]
    lines = lines or ["the records agree, and no call was under way when they were written"]
    return ["".join(c if c.isprintable() else repr(c)[1:-1] for c in line) for line in lines]


def _transfers_of(records: Sequence[Record]) -> dict[str, Transfers]:
    """The p2p steps of every group, by its name."""
    groups = sorted({group for each in records for group in each.calls})
    return {
        group: Transfers({each.rank: each.calls[group] for each in records if group in each.calls}) for group in groups
    }


def _uncaught(record: Record) -> str:
    """The error that ended a rank; nothing if it is that of a call, which ``_waits`` has."""
    reason = record.data.get("reason")
    if type(reason) is not str or not reason.startswith("uncaught "):
        return ""
    return "" if any(call["error"] and call["error"] in reason for call in record.data["calls"]) else reason


def _of_one_job(records: Sequence[Record]) -> list[str]:
    """Ranks that have no record, and records that do not seem to be of one run."""
    known, lines = {each.rank for each in records}, []
    worlds = {each.rank: str(each.data["world"]) for each in records}
    if len(set(worlds.values())) > 1:
        sizes = ", ".join(f"{world} on {named_ranks(ranks)}" for world, ranks in by_text(worlds))
        lines.append(f"these records are not of one run: the number of ranks is {sizes}")
    begun = max((min((call["start"] for call in each.data["calls"]), default=0) for each in records), default=0)
    if early := [each.rank for each in records if each.data["calls"] and each.data["time"] < begun]:
        lines.append(
            f"{named_ranks(early)} wrote before all calls that another record has: they came later, or these are of "
            "several runs"
        )
    world = max(each.data["world"] for each in records)
    if absent := [rank for rank in range(world) if rank not in known]:
        lines.append(f"no record of {named_ranks(absent)} of {world}")
    return lines


def _first_difference(group: str, records: Sequence[Record]) -> list[str]:
    """The first call of a group, of those that all of its records still hold, that ranks made differently.

    Groups of other ranks may have the same name.
    """
    by_ranks: dict[tuple[int, ...], list[Record]] = {}
    for each in records:
        if group in each.calls:
            by_ranks.setdefault(tuple(each.ranks(group)), []).append(each)
    unknown = by_ranks.pop((), []) if len(by_ranks) == 2 else []  # destroyed since, but there is one that it was
    for holders in by_ranks.values():
        holders = sorted(holders + unknown, key=lambda each: each.rank)
        oldest = max(min(each.calls[group]) for each in holders)
        for count in sorted({count for each in holders for count in each.calls[group] if count >= oldest}):
            calls = {each.rank: each.calls[group][count] for each in holders if count in each.calls[group]}
            if all(call["kind"] == "hop" for call in calls.values()):
                continue
            if differ := _differ(list(calls.values())):
                head = f"{_named(group, holders[0])}: call {count} is the first that differs, in {', '.join(differ)}:"
                return [head, *_by_words({rank: _words(call) for rank, call in calls.items()})]
        if line := _fewer(group, holders, records):
            return [line]
    return []


def _fewer(group: str, holders: Sequence[Record], records: Sequence[Record]) -> str:
    """Ranks that had made fewer calls, where the first one that they lack has ended elsewhere: it was asynchronous."""
    ranks = {*holders[0].ranks(group)}
    others = [each for each in records if each.rank in ranks and group not in each.calls]
    made = {each.rank: each.data["counts"].get(group, 0) for each in others}
    made |= {each.rank: max(each.calls[group]) for each in holders}
    if any(call["kind"] == "hop" for each in holders for call in each.calls[group].values()):
        return ""  # a pipeline's stages make different numbers of steps
    count = min(made.values()) + 1
    has = next((each for each in holders if count in each.calls[group]), None)
    if has is None or not has.calls[group][count]["end"]:
        return ""
    early = {each.rank for each in (*others, *holders) if each.is_before(has.calls[group][count])}
    behind = sorted(rank for rank, last in made.items() if last < count and rank not in early)
    if not behind:
        return ""
    call = f"{_words(has.calls[group][count])}, call {count} of {_named(group, has)}"
    return f"{named_ranks(behind)} had not come to {call}, which rank {has.rank} had issued"


def _unpaired(transfers: Transfers, records: Sequence[Record]) -> list[str]:
    """The first messages between ranks whose ends differ, and those that were not sent to a rank that went on."""
    lines, seen, by_rank = [], set[tuple[int, int]](), {each.rank: each for each in records}
    for each in transfers.messages():
        if not each.fits and (ranks := (each.sender, each.receiver)) not in seen:
            seen.add(ranks)
            head = (
                f"message {each.count} from rank {each.sender} to rank {each.receiver} is the first whose ends differ:"
            )
            lines += [head, *_by_words({each.sender: _words(each.sent), each.receiver: _words(each.received)})]
    for sender, receiver, count, call in transfers.not_sent():
        if call["end"] and not by_rank[sender].is_before(call):
            lines.append(
                f"rank {sender} had not sent message {count} to rank {receiver}, which that had issued: {_words(call)}"
            )
    return lines[:_MAX_LINES] + [f"and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)


def _named(group: str, record: Record) -> str:
    """A group's name, and its ranks where the record has them."""
    ranks = record.ranks(group)
    return f"group {group!r} of ranks {_short(ranks)}" if ranks else f"group {group!r}"


def _short(ranks: Sequence[int]) -> str:
    return named_ranks(ranks).partition(" ")[2]


def _differ(calls: Sequence[dict[str, Any]]) -> list[str]:
    """Attributes in which calls differ; none of what ranks may differ in, as the shapes of an uneven all-gather."""
    own = set(_OWN.get(calls[0]["kind"], ()))
    compared = [call | {"arguments": _without_even_sizes(call["arguments"])} for call in calls]
    if any(value is not None for key, value in compared[0]["arguments"].items() if key.endswith("sizes")):
        own.add("shape")
    return [key for key in _COMPARED if key not in own and any(call[key] != compared[0][key] for call in compared)]


def _without_even_sizes(arguments: dict[str, Any]) -> dict[str, Any]:
    """Split sizes that are all equal are none."""
    even = {
        key for key, value in arguments.items()
        if key.endswith("sizes") and type(value) is list and all(size == value[0] for size in value)
    }  # fmt: skip
    return arguments | dict.fromkeys(even)


def _by_words(words: dict[int, str]) -> list[str]:
    lines = [f"  {named_ranks(ranks)}: {text}" for text, ranks in by_text(words)]
    return lines[:_MAX_LINES] + [f"  and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)


def _waits(record: Record, records: Sequence[Record], transfers: Mapping[str, Transfers]) -> str:
    """What a rank was in when it wrote its record, and which ranks had not come to that call."""
    calls = record.data["calls"]
    under_way = [call for call in calls if not call["end"] and not call["error"]]  # of any thread
    reason = record.data.get("reason")  # of an asynchronous call that failed when it was waited for, its name and error
    failed = [call for call in calls if call["error"] and reason == f"{call['name']}: {call['error'].split(':')[0]}"]
    if not under_way and not failed and (not calls or calls[-1]["end"]):
        return ""
    call = (under_way or failed or calls)[-1]
    line = f"{_words(call)}, call {call['count']} of {_named(call['group'], record)}"
    if call["error"]:
        line += f"{_FAILED}{one_line(call['error'])}"
    known = {each.rank: each for each in records}
    if call["kind"] == "hop":
        came = transfers[call["group"]].others(record.rank, call)
        behind = sorted(rank for rank, has_come in came.items() if has_come is False)
        unknown = sorted({*came} - {*known})
    else:
        behind, unknown = _behind(call, record, records)
    return line + _in_words(call, behind, unknown, known)


def _behind(call: Mapping[str, Any], record: Record, records: Sequence[Record]) -> tuple[list[int], list[int]]:
    """Ranks of a call's group that had made fewer calls, and those without a record."""
    ranks = record.ranks(call["group"])
    others = [each for each in records if each.rank in ranks and each.rank != record.rank]
    behind = [each.rank for each in others if each.data["counts"].get(call["group"], 0) < call["count"]]
    return behind, sorted({*ranks} - {each.rank for each in records})


def _in_words(
    call: Mapping[str, Any], behind: Sequence[int], unknown: Sequence[int], records: Mapping[int, Record]
) -> str:
    """Name the ranks that did not come to a call, as far as the records tell."""
    early = [rank for rank in behind if rank in records and records[rank].is_before(call)]
    missing = [rank for rank in behind if rank not in early]
    words = ""
    if missing:
        words += f"; {named_ranks(missing)} did not come to it"
    if early:
        words += f"; {'the records' if len(early) > 1 else 'the record'} of {named_ranks(early)} came before it"
    if unknown:
        words += f"; of {named_ranks(unknown)} there is no record"
    return words


def _hangs(record: Record, records: Sequence[Record]) -> str:
    """The oldest collective that the device of a rank has not completed, and which ranks had not come to it."""
    active = min(record.data["active"], key=lambda each: each["created"], default=None)
    if active is None:
        return ""
    which = f"{active['name']}, torch's collective {active['sequence']} of {_named(active['group'], record)}"
    call = next((each for each in record.data["calls"] if each.get("number") == active["number"]), None)
    if call is None or active["number"] is None:
        return f"{which}, of no call in the record, {active['state']}"
    line = f"{_words(call)}, call {call['count']} of {_named(call['group'], record)}, {active['state']}"
    if call["kind"] == "hop":
        return line
    return line + _in_words(call, *_behind(call, record, records), {each.rank: each for each in records})
