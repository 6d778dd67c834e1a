"""Results of a search: the tasks that make them, the table they give, and the file that keeps them."""

import json
import os
import reprlib
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, fields
from pathlib import Path
from statistics import geometric_mean
from typing import Any, get_type_hints

import torch
from tritoncomm_kernels import installed_triton, tables

from tritoncomm.tune.candidates import Candidate, default
from tritoncomm.tune.cases import Case
from tritoncomm.tune.measure import Bench
from tritoncomm.tune.search import Task
from tritoncomm.tune.static import Verdict

__all__ = [
    "configs",
    "crossover_tasks",
    "crossovers",
    "measured_key",
    "resume",
    "static_key",
    "tasks",
    "user_path",
    "write",
    "wrong",
]

_BETTER = 0.99  # of the default's time; closer ones are noise
_NO_SLOWER = 1.02
_SIZES = [2**n for n in range(12, 27)]
_ROW_BYTES = {16: 4096, 8: 8 * 200, 4: 8 * 100, 2: 8 * 1026, 1: 8 * 513}
_DTYPES = {8: torch.float64, 4: torch.float32, 2: torch.bfloat16, 1: torch.int8}
# Fields of one result: a static verdict, a time, a wrong output, the times of both paths.
_CANDIDATE = {"op": str, "unit": int} | get_type_hints(Candidate)
_JUDGED = _CANDIDATE | get_type_hints(Verdict)
_TIMED = _CANDIDATE | {"case": str, "us": float}
_WRONG = _CANDIDATE | {"case": str, "wrong": str}
_PATHS = {"op": str, "unit": int, "bytes": int, "torch_us": float, "triton_us": float}


def tasks(bench: Bench, cases: Sequence[Case], tried: Mapping[tuple[str, int], Sequence[Candidate]]) -> Iterator[Task]:
    """Yield one task per case and candidate of its operation and unit: check, then time."""
    for case in cases:
        for candidate in tried[case.op, case.unit]:

            def work(case: Case = case, candidate: Candidate = candidate) -> list[dict[str, Any]]:
                """Return one result, in which ``wrong`` stands in place of a time. Defaults keep the loop's values."""
                problem = bench.check(case, candidate)
                result = {"wrong": problem} if problem else {"us": round(bench.time(case, candidate), 3)}
                return [{"op": case.op, "unit": case.unit, "case": case.label} | asdict(candidate) | result]

            yield Task(case.label, (f"{case.label} | {candidate.label}",), work)


def crossover_tasks(bench: Bench, groups: Sequence[tuple[str, int]]) -> Iterator[Task]:
    """Yield a task per operation, unit and size, which times a call on both paths."""
    for op, unit in groups:
        for nbytes in _SIZES:
            case = _case(op, unit, nbytes)

            def work(case: Case = case) -> list[dict[str, Any]]:
                """Return one result: the times of both paths."""
                torch_us, triton_us = bench.paths(case)
                sizes = {"op": case.op, "unit": case.unit, "bytes": case.nbytes}
                return [sizes | {"torch_us": round(torch_us, 3), "triton_us": round(triton_us, 3)}]

            yield Task(f"crossover of {op}, {unit} bytes", (f"crossover {op} {unit} {nbytes}",), work)


def _case(op: str, unit: int, nbytes: int) -> Case:
    """Return a case of about ``nbytes`` for 8 ranks."""
    if op == "reduce":
        return Case(op, 1, nbytes // 8 // unit, 8, _DTYPES[unit])
    dtype = torch.int8 if unit == 1 else torch.bfloat16
    row = _ROW_BYTES[unit]
    return Case(op, max(nbytes // row, 2), row // dtype.itemsize, 8, dtype)


def configs(results: Mapping[str, Mapping[str, Any]], lanes: int = 32) -> dict[str, dict[str, dict[str, int]]]:
    """Return ``{op: {unit: candidate}}``, the fastest by the geometric mean of its times over the cases."""
    return _table(results, "case", lambda op, unit, timed: _winner(timed, default(op, unit, lanes)))


def _table(
    results: Mapping[str, Mapping[str, Any]], field: str, entry: Callable[[str, int, list[Mapping[str, Any]]], Any]
) -> dict[str, dict[str, Any]]:
    """Return ``{op: {unit: entry of the results that have the field}}``, without the entries that are None."""
    groups: dict[tuple[str, int], list[Mapping[str, Any]]] = {}
    for one in results.values():
        if field in one:
            groups.setdefault((one["op"], one["unit"]), []).append(one)
    table: dict[str, dict[str, Any]] = {}
    for (op, unit), group in sorted(groups.items()):
        value = entry(op, unit, group)
        if value is not None:
            table.setdefault(op, {})[str(unit)] = value
    return table


def _winner(timed: Sequence[Mapping[str, Any]], builtin: Candidate) -> dict[str, int] | None:
    """Return the fields of the fastest candidate of one operation and unit; None if ``builtin`` was not measured."""
    by_case: dict[str, dict[Candidate, float | None]] = {}
    for one in timed:
        candidate = Candidate(*(one[field.name] for field in fields(Candidate)))
        by_case.setdefault(one["case"], {})[candidate] = one.get("us")
    cases = list(by_case.values())
    # A search that was stopped may have timed only some candidates of its last case. Such a case is left out.
    largest = max(map(len, cases))
    finished = [case for case in cases if len(case) == largest]
    # A candidate has no time where its output was wrong. Such a candidate is left out of all cases.
    wrong = {candidate for case in cases for candidate, us in case.items() if us is None}
    everywhere = set.intersection(*(set(case) for case in finished)) - wrong
    # A time of 0 is below the clock's resolution, and counts as 1e-3 us.
    means = {one: geometric_mean(case[one] or 1e-3 for case in finished) for one in everywhere}
    if builtin not in means:  # no entry where the default was not measured
        return None
    best = min(means, key=lambda candidate: (means[candidate], candidate))
    # The default stays unless a candidate is at least 1 percent faster.
    return asdict(best if means[best] < _BETTER * means[builtin] else builtin)


def crossovers(results: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return ``{op: {unit: bytes}}``, the smallest size from which on triton's path was no slower at any size."""
    # Where sizes are missing there is no entry.
    return _table(results, "torch_us", lambda _op, _unit, rows: _crossover(rows) if len(rows) == len(_SIZES) else None)


def _crossover(rows: Sequence[Mapping[str, Any]]) -> int:
    """Return the smallest size above every size at which triton's path was slower; 0 if it never was."""
    slower = [row["bytes"] for row in rows if row["triton_us"] > _NO_SLOWER * row["torch_us"]]
    if not slower:
        return 0
    # Triton's path was slower at the largest size too: twice that size is assumed.
    return min((row["bytes"] for row in rows if row["bytes"] > max(slower)), default=2 * max(slower))


def wrong(results: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Return every candidate whose output was not plain torch's, in words."""
    return [f"{key}: {one['wrong']}" for key, one in sorted(results.items()) if "wrong" in one]


def measured_key(device_name: str, sm_count: int) -> dict[str, Any]:
    """Return the key of a measured table; every field has to match before it is used or continued."""
    return {"format": tables.FORMAT, "kind": "measured", "device": device_name, "sm_count": sm_count} | _versions()


def static_key(target: str) -> dict[str, Any]:
    """Return the key of a static ranking."""
    return {"format": tables.FORMAT, "kind": "static", "target": target} | _versions()


def _versions() -> dict[str, str]:
    """Return the part of a key that changes with the kernels and with Triton."""
    return {"source": tables.source_hash(), "triton": installed_triton.version()}


def user_path(device_name: str, sm_count: int) -> Path:
    """Return the path of the user's own table of a device, which ``config_for`` reads."""
    return tables.table_in(tables.user_folder(), device_name, sm_count)


def resume(path: Path | None, key: dict[str, Any]) -> dict[str, Any]:
    """Return the results of an earlier run, empty if there is no such file, or it does not match ``key``."""
    if path is None or not path.is_file():
        return {}
    try:
        content = tables.read_json(path)
        reason = _difference(content, key)
    except tables.TableError as error:
        content, reason = {}, str(error)
    if not reason:
        return content
    # A file that is damaged, of a newer format, or for something else is renamed and not overwritten.
    kept = path.with_name(f"{path.name}.old")
    os.replace(path, kept)
    warnings.warn(f"{path} is not gone on with: {reason}; it is kept as {kept.name}", RuntimeWarning, stacklevel=2)
    return {}


def _difference(content: Any, key: dict[str, Any]) -> str:
    """Return the reason why a search cannot go on with a file's content; empty if it can.

    A file has ``results`` of a search and, if they were measured, ``judged``: static verdicts that it began with.
    """
    if not isinstance(content, dict):
        return "not an object"
    if isinstance(content.get("format"), int) and content["format"] > tables.FORMAT:
        return f"of format {reprlib.repr(content['format'])}, newer than {tables.FORMAT}"
    for name, value in key.items():
        if content.get(name) != value:
            return f"its {name} is {reprlib.repr(content.get(name))}, not {value!r}"
    # ``key`` has the format, so an older or missing one has been refused. Results of a static ranking are verdicts.
    kinds = (_JUDGED,) if key["kind"] == "static" else (_TIMED, _WRONG, _PATHS)
    for section, allowed in (("results", kinds), ("judged", (_JUDGED,))):
        results = content.get(section, {})
        if not isinstance(results, dict):
            return f"its {section} are damaged: {reprlib.repr(results)}"
        for name, one in results.items():
            if not any(_has(one, fields) for fields in allowed):
                return f"its {section} are damaged: {reprlib.repr(name)} is {reprlib.repr(one)}"
    return ""


def _has(one: Any, fields: Mapping[str, Any]) -> bool:
    """Whether one result has these fields and no others, of these types; times are finite and positive."""
    if not isinstance(one, dict) or one.keys() != fields.keys():
        return False
    return all(map(_is_one, fields.values(), (one[name] for name in fields))) and (
        one["op"] in tables.OPS and one["unit"] in tables.UNITS
    )


def _is_one(kind: Any, value: Any) -> bool:
    """Whether a value is of a field's type, a list being one of ints; numbers are finite and not negative."""
    if kind is float:
        return type(value) in (int, float) and 0 <= value < 1e12
    if kind is int:
        return type(value) is int and 0 <= value < 2**62
    if kind in (str, bool):
        return type(value) is kind
    return type(value) is list and all(type(item) is int for item in value)


def write(path: Path, content: dict[str, Any]) -> None:
    """Write JSON that people can read, in one step: a reader sees the old file or the new one, never half of one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(content | {"torch": torch.__version__}, indent=1, sort_keys=True) + "\n"
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
