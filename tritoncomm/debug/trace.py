"""Flight records of several ranks merged: one trace for Perfetto, and in words where the ranks diverged.

The n-th calls of a group belong together. Nothing but the files is read, so they may come from another machine.
"""

import json
import os
import reprlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tritoncomm.debug.agreement import named_ranks
from tritoncomm.debug.flight import FORMAT
from tritoncomm.errors import ArgumentError

__all__ = ["Record", "perfetto", "read", "story"]

_COMPARED = ("name", "kind", "shape", "dtype", "arguments")
_OWN = {"all_to_all_single": ("shape", "arguments"), "hop": ("name", "shape", "arguments")}  # may differ between ranks
_MAX_LINES = 20
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


@dataclass(frozen=True)
class Record:
    """What one rank wrote.

    Attributes:
        rank: global.
        data: the file's content.
        calls: by group and count.
    """

    rank: int
    data: dict[str, Any]
    calls: dict[tuple[str, int], dict[str, Any]]

    def ranks(self, group: str) -> list[int]:
        """Global ranks of a group, as far as this record has them."""
        return self.data["groups"].get(group, [])


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
        rank, calls = data["rank"], {(call["group"], call["count"]): call for call in data["calls"]}
        if rank in records:
            raise ArgumentError(f"{path} is a second record of rank {rank}")
        records[rank] = Record(rank, data, calls)
    if not records:
        raise ArgumentError("there are no flight records in the given files")
    return [records[rank] for rank in sorted(records)]


def _content(path: Path) -> dict[str, Any]:
    """The record in a file.

    Raises:
        ArgumentError: there is none.
    """
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
    return data


def _check_fields(path: Path, place: str, values: dict[str, Any], fields: dict[str, Callable[[Any], bool]]) -> None:
    for name, is_right in fields.items():
        if name not in values or not is_right(values[name]):
            shown = reprlib.repr(values[name]) if name in values else "missing"
            raise ArgumentError(f"{path} is no flight record: {place}{name} is {shown}")


def perfetto(records: Sequence[Record]) -> dict[str, Any]:
    """The trace, in the JSON format of Chrome and Perfetto: a process per rank, a track per thread.

    Calls of one group with equal counts are joined by an arrow. A call that has not ended lasts until its record was
    written.
    """
    events: list[dict[str, Any]] = []
    begin = min((call["start"] for each in records for call in each.data["calls"]), default=0)
    for each in records:
        name = f"rank {each.rank} ({each.data['host']}, pid {each.data['pid']})"
        events.append({"ph": "M", "name": "process_name", "pid": each.rank, "args": {"name": name}})
        events.append({"ph": "M", "name": "process_sort_index", "pid": each.rank, "args": {"sort_index": each.rank}})
        for call in each.data["calls"]:
            events += _events(each, call, begin)
    return {"traceEvents": events, "displayTimeUnit": "ns"}


def _events(record: Record, call: dict[str, Any], begin: int) -> list[dict[str, Any]]:
    """A call as a slice, with the step of its arrow."""
    start = (call["start"] - begin) / 1e3
    end = ((call["end"] or record.data["time"]) - begin) / 1e3
    place = {"pid": record.rank, "tid": call["thread"] % (1 << 31), "ts": start, "cat": "tritoncomm"}
    keys = ("shape", "dtype", "arguments", "group", "count", "path", "bytes_copied", "bytes_sent", "error")
    details = {key: call[key] for key in keys} | {"at": f"{call['file']}:{call['line']}", "ended": bool(call["end"])}
    slices = [place | {"ph": "X", "name": call["name"], "dur": max(end - start, 0.001), "args": details}]
    ranks = record.ranks(call["group"])
    if call["kind"] != "hop" and len(ranks) > 1:
        step = "s" if record.rank == ranks[0] else "f" if record.rank == ranks[-1] else "t"
        arrow = {"ph": step, "name": "call", "id": f"{call['group']}/{call['count']}", "bp": "e"}
        slices.append(place | arrow)
    return slices


def _words(call: dict[str, Any]) -> str:
    shape = "" if call["shape"] is None else f"{call['dtype'] or ''} {call['shape']}".strip()
    arguments = [f"{key}={value}" for key, value in call["arguments"].items() if value is not None]
    inside = ", ".join(filter(None, (shape, *arguments)))
    return f"{call['name']}({inside}) at {call['file']}:{call['line']}"


def story(records: Sequence[Record]) -> list[str]:
    """In words: the ranks without a record, the first call of every group that differs, and who waits for whom."""
    known, lines = {each.rank for each in records}, []
    world = max(each.data["world"] for each in records)
    if absent := [rank for rank in range(world) if rank not in known]:
        lines.append(f"no record of {named_ranks(absent)} of {world}")
    groups = sorted({group for each in records for group, _ in each.calls})
    for group in groups:
        lines += _first_difference(group, records)
    lines += [line for each in records if (line := _waits(each, records))]
    return lines or ["the records agree, and no call was under way when they were written"]


def _first_difference(group: str, records: Sequence[Record]) -> list[str]:
    """The first call of a group, of those that all of its records still hold, that ranks made differently."""
    holders = [each for each in records if any(name == group for name, _ in each.calls)]
    oldest = max(min(count for name, count in each.calls if name == group) for each in holders)
    for count in sorted({count for each in holders for name, count in each.calls if name == group and count >= oldest}):
        calls = {each.rank: each.calls[group, count] for each in holders if (group, count) in each.calls}
        if all(call["kind"] == "hop" for call in calls.values()):
            continue
        if differ := _differ(list(calls.values())):
            head = f"group {group!r}: call {count} is the first that differs, in {', '.join(differ)}:"
            return [head, *_by_words({rank: _words(call) for rank, call in calls.items()})]
    return []


def _differ(calls: Sequence[dict[str, Any]]) -> list[str]:
    """Attributes in which calls differ; none of what ranks may differ in, as the shapes of an uneven all-gather."""
    own = set(_OWN.get(calls[0]["kind"], ()))
    if any(value is not None for key, value in calls[0]["arguments"].items() if key.endswith("sizes")):
        own.add("shape")
    return [key for key in _COMPARED if key not in own and any(call[key] != calls[0][key] for call in calls)]


def _by_words(words: dict[int, str]) -> list[str]:
    by_text: dict[str, list[int]] = {}
    for rank, text in sorted(words.items()):
        by_text.setdefault(text, []).append(rank)
    lines = [f"  {named_ranks(ranks)}: {text}" for text, ranks in by_text.items()]
    return lines[:_MAX_LINES] + [f"  and {len(lines) - _MAX_LINES} more"] * (len(lines) > _MAX_LINES)


def _waits(record: Record, records: Sequence[Record]) -> str:
    """What a rank was in when it wrote its record, and which ranks had not come to that call."""
    calls = record.data["calls"]
    if not calls or calls[-1]["end"]:
        return ""
    call = calls[-1]
    line = f"rank {record.rank} is in {_words(call)}, call {call['count']} of group {call['group']!r}"
    if call["error"]:
        line += f", which failed: {call['error'].splitlines()[0]}"
    if call["kind"] == "hop":
        return line
    others = [each for each in records if each.rank in record.ranks(call["group"]) and each.rank != record.rank]
    missing = [each.rank for each in others if each.data["counts"].get(call["group"], 0) < call["count"]]
    unknown = [rank for rank in record.ranks(call["group"]) if rank not in {each.rank for each in records}]
    if missing:
        line += f"; {named_ranks(missing)} did not come to it"
    if unknown:
        line += f"; of {named_ranks(unknown)} there is no record"
    return line
