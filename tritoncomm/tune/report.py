"""What `tritoncomm tune` shows: a progress bar with the time left, tables of cases and of results."""

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from tritoncomm.parsing import dtype_name
from tritoncomm.tune.candidates import candidates
from tritoncomm.tune.cases import MODELS, Case
from tritoncomm.tune.command import Outcome, Request, cases_of, measure, rank_static
from tritoncomm.tune.machine_code import TARGETS
from tritoncomm.tune.measure import open_gpu
from tritoncomm.tune.search import COMPLETE, INTERRUPTED

__all__ = ["case_rows", "progress", "run", "show_cases", "show_measured", "show_static", "verdict"]

_SHOWN = 3


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """A bar that a search reports to."""
    columns = (
        TextColumn("{task.description:>28}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=None)

        def follow(group: str, finished: int, total: int) -> None:
            bars.update(bar, description=group[:28], completed=finished, total=total)

        yield follow


def case_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """The cases as JSON holds them."""
    return [
        {
            "op": case.op,
            "outer": case.outer,
            "row": case.row,
            "world": case.world,
            "dtype": dtype_name(case.dtype),
            "unit": case.unit,
            "bytes": case.nbytes,
            "candidates": len(candidates(case.op, case.unit)),
            "note": case.note,
        }
        for case in cases
    ]


def show_cases(cases: Sequence[Case], console: Console) -> None:
    """What would be tuned."""
    table = Table(title="cases")
    for heading in ("op", "rows x row", "world", "dtype", "unit", "MiB", "tiles", "from"):
        table.add_column(heading, justify="left" if heading in ("op", "dtype", "from") else "right")
    for one in case_rows(cases):
        numbers = (f"{one['outer']} x {one['row']}", str(one["world"]), one["dtype"], str(one["unit"]))
        table.add_row(one["op"], *numbers, f"{one['bytes'] / 2**20:.1f}", str(one["candidates"]), one["note"])
    console.print(table)
    console.print(f"models: {', '.join(MODELS)}, or a JSON file", highlight=False, soft_wrap=True)


def show_static(outcome: Outcome, console: Console) -> None:
    """The cheapest candidates of every operation and unit, and what was left out."""
    results = outcome.content["results"]
    table = Table(title=f"static ranking for {outcome.content['target']} (no times: nothing ran)")
    for heading in ("op", "unit", "tile/segment/warps", "cost", "per 16 B", "registers", "loads", "pruned"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    for op, units in outcome.content.get("ranking", {}).items():
        for unit, ranked in units.items():
            tried = [one for key, one in results.items() if key.startswith(f"{op} {unit} ")]
            out = f"{sum(bool(one['pruned']) for one in tried)} of {len(tried)}"
            for label in ranked[:_SHOWN]:
                one = results[f"{op} {unit} {label}"]
                numbers = (f"{one['cost']:.1f}", f"{one['instructions_per_16_bytes']:.1f}", str(one["registers"]))
                table.add_row(op, unit, label, *numbers, str(one["loads_in_flight"]), out)
                out = ""
    console.print(table)


def show_measured(outcome: Outcome, console: Console) -> None:
    """The tiles that won, and the crossovers."""
    table = Table(title=f"{outcome.content['device']}, {outcome.content['sm_count']} SMs")
    for heading in ("op", "unit", "tile/segment/warps", "torch below"):
        table.add_column(heading, justify="left" if heading == "op" else "right")
    configs, limits = outcome.content.get("configs", {}), outcome.content.get("crossover_bytes", {})
    for op, unit in sorted({(name, unit) for part in (configs, limits) for name in part for unit in part[name]}):
        one = configs.get(op, {}).get(unit)
        tile = f"{one['tile_bytes']}/{one['segment_bytes']}/{one['num_warps']}" if one else "-"
        limit = limits.get(op, {}).get(unit)
        table.add_row(op, unit, tile, "-" if limit is None else f"{limit} B")
    console.print(table)


def verdict(outcome: Outcome, console: Console) -> int:
    """The last lines, and the exit code: 0 done or out of time, 1 an output was wrong, 130 interrupted."""
    for line in outcome.wrong:
        console.print(f"wrong output: {line}", style="red", markup=False, highlight=False, soft_wrap=True)
    where = f" in {outcome.path}" if outcome.path is not None else ""
    line = f"{outcome.state}: {len(outcome.content['results'])} results{where}"
    if outcome.state != COMPLETE:
        if not outcome.content["results"]:
            line += ", because the time was over before the first one: give a larger --budget"
        again = "the same command goes on from there" if outcome.path is not None else "--out FILE would keep them"
        line += f", {outcome.left} to do; {again}"
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if outcome.wrong:
        return 1
    return 130 if outcome.state == INTERRUPTED else 0


def run(request: Request, *, listing: bool, ranking: bool, target: str | None, as_json: bool) -> int:
    """Everything `tritoncomm tune` does, on the terminal; the exit code.

    Standard output gets the tables, or one JSON document; the bar and everything else go to standard error.

    Args:
        request: what to tune.
        listing: only list the cases.
        ranking: rank by machine code, without a GPU.
        target: what to compile for; the GPU at hand by default.
        as_json: print JSON.

    Raises:
        ValueError: arguments that make no sense or do not go together.
        OSError: a file cannot be read or written.
    """
    width = None if sys.stdout.isatty() else 110
    out, err = Console(width=width), Console(width=width, stderr=True)
    if listing:
        found = cases_of(request)
        print(json.dumps(case_rows(found), indent=1)) if as_json else show_cases(found, out)
        return 0
    outcome = _search(request, ranking, target, err)
    for message in outcome.warnings:
        err.print(f"warning: {message}", style="yellow", markup=False, highlight=False, soft_wrap=True)
    if as_json:
        print(json.dumps(outcome.content, indent=1, sort_keys=True))
    else:
        (show_static if ranking else show_measured)(outcome, out)
    return verdict(outcome, err)


def _search(request: Request, ranking: bool, target: str | None, err: Console) -> Outcome:
    if target is not None and not ranking:
        raise ValueError("--target goes with --static; without it the GPU at hand is measured")
    if ranking and target is not None:
        with progress(err) as follow:
            return rank_static(request, target, follow)
    cases_of(request)
    bench = open_gpu()
    if bench is None:
        what = (
            "--static needs --target" if ranking else "there is no GPU to measure on: rank candidates by machine code"
        )
        raise ValueError(f"{what}, for example `tritoncomm tune --static --target sm_90` ({', '.join(TARGETS)})")
    if ranking and bench.target is None:
        raise ValueError(f"--static: {bench.device_name} is none of the targets, give --target {', '.join(TARGETS)}")
    with progress(err) as follow:
        return rank_static(request, bench.target or "", follow) if ranking else measure(request, bench, follow)
