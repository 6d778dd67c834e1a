"""The command `tritoncomm bench`: arguments, tables, exit codes."""

import tempfile
from functools import partial
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from tritoncomm.cli import pictures, suite
from tritoncomm.cli._console import paragraphs, refusing, say, terminal

__all__ = ["EPILOG", "bench"]

EPILOG = paragraphs(
    "Examples:",
    "tritoncomm bench --list",
    "tritoncomm bench p2p",
    "tritoncomm bench mappings --only all_to_all --rounds 20",
    "tritoncomm bench mappings --plot --out figures",
    "tritoncomm bench --check   (before a commit)",
    "Exits with 0; with 1 when a part fails, or when --check finds a target missed or a ratio worse; with 2 for "
    "invalid arguments, or without a checkout.",
)


def bench(
    part: Annotated[
        str | None, typer.Argument(help="One part, see --list; by default all that this machine can run.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the results there, as <device>/<part>.json.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw PNG and SVG into --out, or bench-results.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail when a ratio is worse than the committed one.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds per row; fewer are quicker and noisier.")] = None,
    only: Annotated[str, typer.Option(help="Only rows whose name contains this.")] = "",
    listing: Annotated[bool, typer.Option("--list", help="List the parts and stop.")] = False,
) -> None:
    """Run the benchmarks of a checkout, print ours against peers as ratios, draw them, compare them with the last ones.

    Every ratio was measured in one run, peers interleaved with ours. Kernels on a GPU are measured where there is one.
    """
    console = terminal()
    with tempfile.TemporaryDirectory() as scratch, refusing(suite.SuiteError):
        if listing:
            here = _runnable()
            for name in suite.parts():
                say(console, f"{name}{'' if name in here else '   (needs a GPU)'}")
            raise typer.Exit(0)
        if plot:
            pictures.check()
        if rounds is not None and rounds < 1:
            raise ValueError("--rounds must be 1 or more")
        if part:
            suite.check(part)
        folder = out or Path("bench-results" if plot else scratch)
        outcomes = []
        for name in [part] if part else _runnable():
            console.print(f"{name}: microseconds of ours at p20, ratio of p20 to each peer and half its spread")
            outcomes.append(suite.run(name, folder, rounds, only, partial(say, console)))
        results = suite.rows(folder, [one.part for one in outcomes])
        for name, rows in results.items() if plot else ():
            for picture in pictures.draw(name, rows, folder):
                say(console, f"drawn: {picture}")
        raise typer.Exit(_judged(outcomes, check, console))


def _runnable() -> list[str]:
    return [name for name in suite.parts() if name != suite.GPU or torch.cuda.is_available()]


def _judged(outcomes: list[suite.Outcome], check: bool, console: Console) -> int:
    """Print what was missed and which parts had nothing to measure; the exit code, 2 where that is all of them."""
    status = 0
    idle = [one for one in outcomes if one.status == 2]
    for one in outcomes:
        for line in one.missed:
            say(console, f"missed, {one.part}: {line}", "yellow")
        if one in idle:
            say(console, f"{one.part}: {one.last}", "dim")
        elif one.status not in (0, 1) or (one.status and not one.missed):
            say(console, f"{one.part} did not run: {one.last}", "red")
            status = 1
        elif one.status and check:
            status = 1
    return 2 if len(idle) == len(outcomes) else status
