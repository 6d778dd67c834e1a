"""Tuning without a terminal: arguments to cases, cases to a search, results to a file."""

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tritoncomm_kernels import tables
from tritoncomm_kernels.tables import OPS

from tritoncomm.parsing import dtype_name, parse_dtype
from tritoncomm.tune import cases, results, static
from tritoncomm.tune.candidates import Candidate, candidates, groups
from tritoncomm.tune.cases import Case
from tritoncomm.tune.machine_code import TARGETS, can_read
from tritoncomm.tune.measure import Bench
from tritoncomm.tune.search import INTERRUPTED, Follow, Task, batches, search

__all__ = ["Outcome", "TuneRequest", "cases_of", "measure", "rank_static"]

_JUDGING = 1 / 3  # of a budget, at most: what is not judged by then is measured as it comes


@dataclass(frozen=True)
class TuneRequest:
    """Arguments of the command, unchecked; see ``cases_of``.

    Attributes:
        ops: operations, all by default.
        shapes: like ``4096x8192``.
        worlds: ranks; 8 by default.
        dtypes: names; bfloat16 by default.
        model: a model's name or file.
        tensor_parallel: ranks of the model; 8 by default.
        tokens: tokens of a micro-batch of the model; 8192 by default.
        budget: seconds.
    """

    ops: Sequence[str] = ()
    shapes: Sequence[str] = ()
    worlds: Sequence[int] = ()
    dtypes: Sequence[str] = ()
    model: str | None = None
    tensor_parallel: int | None = None
    tokens: int | None = None
    budget: float | None = None
    out: Path | None = None


@dataclass
class Outcome:
    """State and results of a search.

    Attributes:
        state: ``complete``, ``out of time`` or ``interrupted``.
        content: content of the file ``path``, which is None if there is no file.
        warnings: about files that are not used.
        wrong: candidates whose output was wrong.
        left: number of results that are missing.
    """

    state: str
    content: dict[str, Any]
    path: Path | None
    warnings: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    left: int = 0


def cases_of(request: TuneRequest) -> list[Case]:
    """Return the cases of a request; without shapes and model a sweep over units and sizes."""
    ops = tuple(request.ops) or OPS
    for op in ops:
        if op not in OPS:
            raise ValueError(f"--op {op!r} is none of {', '.join(OPS)}")
    if request.budget is not None and not request.budget > 0:
        raise ValueError(f"--budget must be a positive number of seconds, not {request.budget:g}")
    if request.tensor_parallel is not None and request.model is None:
        raise ValueError("--tensor-parallel goes with --model; --shape takes --world")
    if request.tokens is not None and request.model is None:
        raise ValueError("--tokens goes with --model; --shape has its rows in it")
    dtypes = [parse_dtype(name) for name in request.dtypes or ("bfloat16",)]
    if request.model is not None:
        if request.shapes or request.worlds:
            raise ValueError("--model has shapes of its own: give --tensor-parallel, not --shape or --world")
        model, name = cases.read_model(request.model), Path(request.model).stem
        world = 8 if request.tensor_parallel is None else request.tensor_parallel
        tokens = 8192 if request.tokens is None else request.tokens
        model_cases = [case for dtype in dtypes for case in cases.from_model(model, world, tokens, dtype, ops, name)]
        return _without_unsummable(model_cases, request)
    if request.shapes:
        shapes = [cases.parse_shape(text) for text in request.shapes]
        return _without_unsummable(cases.from_shapes(shapes, request.worlds or (8,), dtypes, ops), request)
    if request.worlds or request.dtypes:
        raise ValueError("--world and --dtype go with --shape (or --dtype with --model)")
    return cases.sweep(ops)


def _without_unsummable(every: list[Case], request: TuneRequest) -> list[Case]:
    """Return the cases without sums of dtypes that cannot be summed; reject them if they were asked for."""
    left_out = [case for case in every if case.op == "reduce" and not cases.can_sum(case.dtype)]
    if left_out and "reduce" in request.ops:
        raise ValueError(f"--op reduce cannot sum {dtype_name(left_out[0].dtype)}; give --op pack --op unpack")
    return [case for case in every if case not in left_out]


def rank_static(request: TuneRequest, target: str, follow: Follow | None = None) -> Outcome:
    """Compile every candidate for a target, leave out the bad ones, rank the rest."""
    if target not in TARGETS:
        raise ValueError(f"--target {target!r} is none of {', '.join(TARGETS)}")
    chosen = _groups_of(cases_of(request))
    content, outcome = _begin(request.out, f"{target}.json", results.static_key(target) | {"cost": static.COST})
    todo = [batch for op, unit in chosen for batch in batches(op, unit, target)]

    def save() -> None:
        """Rank the results so far, and write the file."""
        content["ranking"] = _ranking(content["results"], target)
        _finish(outcome, todo)

    end = time.monotonic() + _budget(request)
    outcome.state = search(todo, content["results"], save, end=end, follow=follow, parallel=True)
    return outcome


def measure(
    request: TuneRequest, bench: Bench, follow: Follow | None = None, clock: Callable[[], float] = time.monotonic
) -> Outcome:
    """Check and time candidates and both paths on a GPU, and write the table; the cheapest by static cost go first."""
    todo_cases, device = cases_of(request), (bench.device_name, bench.sm_count)
    chosen = _groups_of(todo_cases)
    path = request.out or results.user_path(*device)
    content, outcome = _begin(path, tables.table_name(*device), results.measured_key(*device))
    started, budget, judged = clock(), _budget(request), content.setdefault("judged", {})
    # Machine code is judged first, for a part of the budget. Candidates without a verdict are timed too.
    if bench.target is not None and can_read(bench.target):
        todo = [batch for op, unit in chosen for batch in batches(op, unit, bench.target)]
        end = started + budget * _JUDGING
        outcome.state = search(todo, judged, lambda: None, end=end, follow=follow, clock=clock, parallel=True)
        if outcome.state == INTERRUPTED:
            _finish(outcome, todo)
            return outcome
    tried = {group: _usable(*group, bench, judged) for group in chosen}
    todo = [*results.tasks(bench, todo_cases, tried), *results.crossover_tasks(bench, chosen)]

    def save() -> None:
        """Choose tiles and crossovers from the results so far, and write the file."""
        content["configs"] = results.configs(content["results"], bench.lanes)
        content["crossover_bytes"] = results.crossovers(content["results"])
        _finish(outcome, todo)

    outcome.state = search(todo, content["results"], save, end=started + budget, follow=follow, clock=clock)
    outcome.wrong = results.wrong(content["results"])
    return outcome


def _budget(request: TuneRequest) -> float:
    """Return the seconds that a search may take; infinity without a limit."""
    return math.inf if request.budget is None else request.budget


def _groups_of(every: Sequence[Case]) -> list[tuple[str, int]]:
    """Return operations and units of cases, in the order of ``groups``."""
    return [group for group in groups() if group in {(case.op, case.unit) for case in every}]


def _begin(path: Path | None, name: str, key: Mapping[str, Any]) -> tuple[dict[str, Any], Outcome]:
    """Return the file's content so far, and the outcome that will hold it; a folder gets a file called ``name``."""
    if path is not None:
        path = path / name if path.is_dir() else path
        if path.exists() and not path.is_file():
            raise ValueError(f"--out {path} is not a regular file: it would be replaced by one")
        path.parent.mkdir(parents=True, exist_ok=True)
        if not os.access(path.parent, os.W_OK):
            raise PermissionError(f"--out {path}: no file can be made in {path.parent}")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        content = {**results.resume(path, dict(key)), **key}
    content.setdefault("results", {})
    return content, Outcome("", content, path, [str(one.message) for one in caught])


def _finish(outcome: Outcome, todo: Sequence[Task]) -> None:
    """Count the results that are missing, and write the file if there is one; called at every save."""
    done = outcome.content["results"]
    outcome.left = sum(key not in done for task in todo for key in task.keys)
    outcome.content["complete"] = outcome.left == 0
    if outcome.path is not None:
        results.write(outcome.path, outcome.content)


def _ranking(done: Mapping[str, Mapping[str, Any]], target: str) -> dict[str, dict[str, list[str]]]:
    """Return ``{op: {unit: [candidate, ...]}}``, cheapest first."""
    ranking: dict[str, dict[str, list[str]]] = {}
    for op, unit in groups():
        verdicts = _verdicts(op, unit, done)
        if verdicts:
            ranking.setdefault(op, {})[str(unit)] = [one.label for one in static.rank(op, unit, verdicts, target)]
    return ranking


def _verdicts(op: str, unit: int, done: Mapping[str, Mapping[str, Any]]) -> dict[str, static.Verdict]:
    """Return the verdicts on one operation and unit, by candidate."""
    names, start = static.Verdict.__dataclass_fields__, f"{op} {unit} "
    return {
        key.removeprefix(start): static.Verdict(**{name: one[name] for name in names})
        for key, one in done.items()
        if key.startswith(start)
    }


def _usable(op: str, unit: int, bench: Bench, judged: Mapping[str, Mapping[str, Any]]) -> list[Candidate]:
    """Return the default, then the judged candidates that may be used, cheapest first, then the unjudged ones."""
    tried = candidates(op, unit, bench.lanes)
    verdicts = _verdicts(op, unit, judged)
    ranked = static.rank(op, unit, verdicts, bench.target) if bench.target is not None else []
    return list(dict.fromkeys([tried[0], *ranked, *(one for one in tried if one.label not in verdicts)]))
