"""The command `tritoncomm tune`: arguments, a progress bar, tables of cases and of results, exit codes."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from tritoncomm_kernels import installed_triton

from tritoncomm.cli._console import refuse, say, table, terminal
from tritoncomm.parsing import counted, dtype_name
from tritoncomm.tune.candidates import Candidate, candidates
from tritoncomm.tune.cases import MODELS, Case
from tritoncomm.tune.machine_code import TARGETS
from tritoncomm.tune.measure import open_gpu
from tritoncomm.tune.search import COMPLETE, INTERRUPTED
from tritoncomm.tune.tuner import Outcome, TuneRequest, cases_of, measure, rank_static

__all__ = ["case_rows", "progress", "show_cases", "show_measured", "show_static", "tune", "verdict"]

_SHOWN = 3


def tune(
    op: Annotated[list[str] | None, typer.Option(help="pack, unpack or reduce; all by default. Repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Like 4096x8192; the last dim is split. Repeatable.")] = None,
    world: Annotated[list[int] | None, typer.Option(help="Ranks the dim is split over; 8. Repeatable.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Element type like bf16, fp32, fp8_e4m3; bfloat16. Repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="llama3-8b, llama3-70b, qwen3-32b, deepseek-v3 or a file.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Ranks that share the model's layers; 8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of one micro-batch of the model; 8192.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds after which nothing new starts.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File, or folder with a file per GPU or target; the user's cache by default.")
    ] = None,
    target: Annotated[str | None, typer.Option(help=f"With --static: {', '.join(TARGETS)}.")] = None,
    static: Annotated[
        bool, typer.Option("--static", help="Rank by machine code; needs no GPU, times nothing.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the fastest tiles of the kernels on this GPU, and the sizes below which plain torch is faster.

    Every candidate is checked against plain torch before it is timed. Results go to a table that this user's jobs on
    this kind of GPU read from then on. Ctrl-C keeps what is done, and the same command goes on from there. Examples:

    \b
    tritoncomm tune
    tritoncomm tune --model llama3-70b --tensor-parallel 8
    tritoncomm tune --model llama3-70b --list
    tritoncomm tune --op pack --shape 4096x8192 --world 4 --world 8 --budget 60
    tritoncomm tune --static --target sm_90 --out sm_90.json

    The first tunes for units and sizes of all kinds, the second for what a model's layers exchange, which the third
    only lists. The last needs no GPU: it compiles every candidate, leaves out those that spill, need too many
    registers or lose the width of their accesses, and ranks the rest by a static cost, which is no time.

    Exits with 0 when done or out of time, 1 when an output was wrong or there is no result, 2 for invalid arguments or
    without a GPU, 130 when interrupted.
    """
    request = TuneRequest(op or (), shape or (), world or (), dtype or (), model, tensor_parallel, tokens, budget, out)
    console, errors = terminal(), terminal(stderr=True)  # standard output gets the tables or one JSON document
    try:
        if listing:
            cases = cases_of(request)
            print(json.dumps(case_rows(cases), indent=1)) if as_json else show_cases(cases, console, model)
            raise typer.Exit(0)
        outcome = _search(request, static, target, errors)
    except (ValueError, OSError, ImportError) as error:
        raise refuse(error) from None
    for message in outcome.warnings:
        say(errors, f"warning: {message}", "yellow")
    if as_json:
        print(json.dumps(outcome.content, indent=1, sort_keys=True))
    else:
        (show_static if static else show_measured)(outcome, console)
    raise typer.Exit(verdict(outcome, errors))


def _search(request: TuneRequest, static: bool, target: str | None, errors: Console) -> Outcome:
    """Rank by machine code, or measure on this GPU, behind a progress bar; ``target`` None is this GPU's."""
    if target is not None and not static:
        raise ValueError("--target goes with --static; without it the GPU at hand is measured")
    cases_of(request)  # refuses invalid arguments before it asks for Triton and a GPU
    installed_triton.require()
    if target is not None:
        with progress(errors) as follow:
            return rank_static(request, target, follow)
    bench = open_gpu()
    if bench is None:
        need = "--static needs --target" if static else "there is no GPU to measure on: rank candidates by machine code"
        raise ValueError(f"{need}, for example `tritoncomm tune --static --target sm_90` ({', '.join(TARGETS)})")
    if static and bench.target is None:
        raise ValueError(f"--static: {bench.device_name} is none of the targets, give --target {', '.join(TARGETS)}")
    with progress(errors) as follow:
        return rank_static(request, bench.target or "", follow) if static else measure(request, bench, follow)


@contextmanager
def progress(console: Console) -> Iterator[Callable[[str, int, int], None]]:
    """Return a bar that a search reports to."""
    columns = (
        TextColumn("{task.description:>28}"), BarColumn(20), MofNCompleteColumn(), TimeRemainingColumn(),
        TextColumn("left"),
    )  # fmt: skip
    with Progress(*columns, console=console, transient=True) as bars:
        bar = bars.add_task("starting", total=None)

        def follow(group: str, finished: int, total: int) -> None:
            """Move the bar to so many results of the total, under the name of the group at work."""
            bars.update(bar, description=group[:28], completed=finished, total=total)

        yield follow


def case_rows(cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Return the cases as JSON holds them."""
    return [
        asdict(case)
        | {"dtype": dtype_name(case.dtype), "unit": case.unit, "bytes": case.nbytes}
        | {"candidates": len(candidates(case.op, case.unit))}
        for case in cases
    ]


def show_cases(cases: Sequence[Case], console: Console, model: str | None = None) -> None:
    """Print the cases of a search; the name of a model only once."""
    name = Path(model or "").stem
    headings = ("op", "rows x row", "world", "dtype", "unit", "MiB", "tiles", "from")
    rows = table(f"cases of {name}" if name else "cases", headings, ("op", "dtype", "from"))
    for one in case_rows(cases):
        one |= {"size": f"{one['outer']} x {one['row']}", "MiB": f"{one['bytes'] / 2**20:.1f}"}
        one["note"] = one["note"].removeprefix(f"{name} ")
        shown = ("op", "size", "world", "dtype", "unit", "MiB", "candidates", "note")
        rows.add_row(*(str(one[key]) for key in shown))
    console.print(rows)
    say(console, f"models: {', '.join(MODELS)}, or a JSON file")


def show_static(outcome: Outcome, console: Console) -> None:
    """Print the cheapest candidates of every operation and unit, and how many were pruned."""
    results = outcome.content["results"]
    headings = ("op", "unit", "tile/segment/\nwarps", "cost", "per\n16 B", "registers", "loads", "pruned")
    rows = table(f"static ranking for {outcome.content['target']} (no times: nothing ran)", headings, ("op",))
    for op, units in outcome.content.get("ranking", {}).items():
        for unit, ranked in units.items():
            tried = [one for key, one in results.items() if key.startswith(f"{op} {unit} ")]
            pruned = f"{sum(bool(one['pruned']) for one in tried)} of {len(tried)}"
            for label in ranked[:_SHOWN]:
                one = results[f"{op} {unit} {label}"]
                numbers = (f"{one['cost']:.1f}", f"{one['instructions_per_16_bytes']:.1f}", str(one["registers"]))
                rows.add_row(op, unit, label, *numbers, str(one["loads_in_flight"]), pruned)
                pruned = ""  # in the first row of an operation and unit only
    console.print(rows)


def show_measured(outcome: Outcome, console: Console) -> None:
    """Print the tiles that won, and the crossovers."""
    title = f"{outcome.content['device']}, {counted(outcome.content['sm_count'], 'SM')}"
    rows = table(title, ("op", "unit", "tile/segment/warps", "torch below"), ("op",))
    configs, limits = outcome.content.get("configs", {}), outcome.content.get("crossover_bytes", {})
    for op, unit in sorted({(name, unit) for part in (configs, limits) for name in part for unit in part[name]}):
        entry, limit = configs.get(op, {}).get(unit), limits.get(op, {}).get(unit)
        rows.add_row(op, unit, Candidate(**entry).label if entry else "-", "-" if limit is None else f"{limit} B")
    console.print(rows)


def verdict(outcome: Outcome, console: Console) -> int:
    """Print the last lines; return the exit code.

    0 is done or out of time, 1 that an output was wrong or there is no result, 130 interrupted.
    """
    for line in outcome.wrong:
        say(console, f"wrong output: {line}", "red")
    where = f" in {outcome.path}" if outcome.path is not None else ""
    line = f"{outcome.state}: {counted(len(outcome.content['results']), 'result')}{where}"
    if outcome.state != COMPLETE:
        if not outcome.content["results"]:
            line += ", because the time was over before the first one: give a larger --budget"
        again = "the same command goes on from there" if outcome.path is not None else "--out FILE would keep them"
        line += f", {outcome.left} to do; {again}"
    say(console, line)
    if outcome.wrong:
        return 1
    return 130 if outcome.state == INTERRUPTED else int(not outcome.content["results"])
