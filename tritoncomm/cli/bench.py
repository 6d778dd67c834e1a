"""The command `tritoncomm bench`: arguments, tables, exit codes."""

import tempfile
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tritoncomm.cli import pictures, suite
from tritoncomm.cli._console import refusing, terminal

__all__ = ["EPILOG", "bench"]

EPILOG = "\n\n".join(
    (
        "Examples:",
        "tritoncomm bench --list",
        "tritoncomm bench p2p",
        "tritoncomm bench mappings --only all_to_all --rounds 20",
        "tritoncomm bench mappings --plot --out figures",
        "tritoncomm bench --check   (before a commit)",
        "Exits with 0; with 1 when a part fails, or when --check finds a target missed or a ratio worse; with 2 for "
        "invalid arguments, or without a checkout.",
    )
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
                console.print(f"{name}{'' if name in here else '   (needs a GPU)'}", markup=False)
            raise typer.Exit(0)
        if plot:
            pictures.check()
        if rounds is not None and rounds < 1:
            raise ValueError("--rounds must be 1 or more")
        folder = out or Path("bench-results" if plot else scratch)
        outcomes = []
        for name in [part] if part else _runnable():
            with console.status(f"measuring {name}"):
                outcomes.append(suite.run(name, folder, rounds, only))
        found = {name: rows for name, rows in suite.rows(folder, [one.part for one in outcomes]).items() if rows}
        for name, rows in found.items():
            console.print(_rows_table(name, rows))
            for picture in pictures.draw(name, rows, folder) if plot else ():
                console.print(f"drawn: {picture}", markup=False, soft_wrap=True)
        raise typer.Exit(_judged(outcomes, folder, check, console))


def _runnable() -> list[str]:
    return [name for name in suite.parts() if name != suite.GPU or torch.cuda.is_available()]


def _judged(outcomes: list[suite.Outcome], folder: Path, check: bool, console: Console) -> int:
    """Say what was missed and what had nothing to measure; the exit code, 2 where that is everything."""
    status = 0
    idle = [one for one in outcomes if one.status == 2]
    for one in outcomes:
        for line in one.missed:
            console.print(f"missed, {one.part}: {line}", style="yellow", markup=False, soft_wrap=True)
        if one in idle:
            console.print(f"{one.part}: {one.last}", style="dim", markup=False, soft_wrap=True)
        elif one.status not in (0, 1) or (one.status and not one.missed):
            console.print(f"{one.part} did not run: {one.last}", style="red", markup=False, soft_wrap=True)
            status = 1
        elif one.status and check:
            status = 1
    if len(idle) == len(outcomes):
        return 2
    return max(status, min(suite.verdict(folder), 1)) if check else status


def _rows_table(name: str, rows: list[dict[str, Any]]) -> Table:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["us"] if peer != "ours"))
    compared = {peer for row in rows for peer in row["ratio"]}
    table = Table(title=f"{name}: microseconds (median), ours / peer (p20) with its spread", title_justify="left")
    table.add_column("row")
    table.add_column("ours", justify="right")
    for peer in peers:
        table.add_column(escape(peer), justify="right")
        if peer in compared:
            table.add_column(escape(f"ours / {peer}"), justify="right")
    for row in rows:
        cells = [escape(row["row"]), f"{row['us']['ours']['median']:.1f}"]
        for peer in peers:
            us, ratio, spread = row["us"].get(peer), row["ratio"].get(peer), row["spread"].get(peer, 0.0)
            cells += ["-" if us is None else f"{us['median']:.1f}"]
            if peer in compared:
                cells += ["-" if ratio is None else f"{ratio:.2f} ± {spread / 2:.2f}"]
        table.add_row(*cells)
    return table
