"""The command `tritoncomm bench`: arguments, a table that grows as it is measured, a file."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from tritoncomm import launchers
from tritoncomm.cli._console import paragraphs, refuse, say, terminal
from tritoncomm.errors import ArgumentError, GroupError
from tritoncomm.parsing import counted, dtype_name, parse_dtype

__all__ = ["EPILOG", "bench", "cells", "summary"]

PEERS = ("plain", "DTensor", "bare")
HEAD = f"{'exchange, MiB of input per rank':36} {'ours':>10} " + " ".join(f"{f'/{peer}':>9}" for peer in PEERS)
EPILOG = paragraphs(
    "Examples:",
    "tritoncomm bench --ranks 8",
    "torchrun --nproc-per-node 8 -m tritoncomm bench --json bench.json",
    "tritoncomm bench --ranks 2 --only sp2hp --only hop --mib 64",
    "Under torchrun, mpirun or srun every rank takes part, and rank 0 prints.",
    "Exits with 0 when all was measured, 1 when values differ or an exchange failed, 2 for invalid arguments,"
    " 3 when the time was over before the end.",
)


def bench(
    ranks: Annotated[int | None, typer.Option(help="Processes to start, with a GPU each; 2 by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="Of the tensors, like bf16 or fp32.")] = "bfloat16",
    mib: Annotated[
        list[float] | None,
        typer.Option(help="MiB of each rank's input; by default 1, 4 and 16, on GPUs 64 and 256 too. Repeatable."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Words of an exchange's name. Repeatable.")] = None,
    budget: Annotated[float, typer.Option(min=1, help="Seconds after which no further exchange begins.")] = 270,
    path: Annotated[Path | None, typer.Option("--json", help="Write the rows there.")] = None,
) -> None:
    """Time every mapping, sum, hop and dispatch between ranks, against plain torch, DTensor and bare collectives.

    Values are compared first, forward and backward are timed, and the slowest rank counts. On CPUs the ranks talk over
    Gloo, which copies in the host's memory: those times say nothing about GPUs.
    """
    # DTensor takes a second to import, which every other command would wait for.
    from tritoncomm.bench.run import BenchError, content, run
    from tritoncomm.bench.settings import Settings  # takes the names of the exchanges from there

    console = terminal()
    try:
        launch = launchers.started_by(os.environ)
        launch = None if launch is None or launch.size == 1 else launch
        if launch is not None and ranks not in (None, launch.size):
            raise ArgumentError(f"{launch.launcher} started {launch.size} ranks: leave --ranks out")
        to_start = None  # the launcher's ranks take part
        if launch is None:
            to_start = Settings.ranks if ranks is None else ranks
        settings = Settings(
            ranks=to_start,
            device=device,
            dtype=dtype_name(parse_dtype(dtype)),
            sizes=tuple(mib or ()),
            only=tuple(only or ()),
            budget=budget,
        )
        if path is not None and (launch is None or launch.rank == 0):
            path.touch()
    except (ArgumentError, GroupError, OSError, ValueError) as error:
        raise refuse(error) from None
    if launch is not None and launch.rank > 0:
        list(run(settings))
        raise typer.Exit(0)
    where = "NCCL" if settings.on_gpu() else "Gloo on CPUs: these times say nothing about GPUs"
    say(console, f"{settings.world()} ranks over {where}")
    say(console, f"forward and backward, {settings.dtype}: ours in us, and as a ratio to each peer")
    say(console, HEAD)
    found: list[dict[str, Any]] = []
    try:
        for row in run(settings):
            found.append(row)
            say(console, cells(row))
            if path is not None:  # an interrupted run keeps its rows
                path.write_text(json.dumps(content(settings, found), indent=1, sort_keys=True) + "\n")
    except (BenchError, OSError) as error:
        raise refuse(error, 1) from None
    result = content(settings, found)
    for line in summary(result):
        say(console, line)
    if path is not None:
        say(console, f"written: {path}")
    raise typer.Exit(1 if result["failed"] else 3 if result["left_out"] else 0)


def cells(row: Mapping[str, Any]) -> str:
    """Return the line of a row: ours in microseconds, and as a ratio to each peer."""
    if "us" not in row:
        reasons = [row["problem"]] if "problem" in row else row.get("refused", ["left out, the time is over"])
        return f"{row['row']}: {reasons[0]}"
    label = row["row"].replace(" MiB", "").removesuffix(", eager")
    ratios = (f"{row['ratio'][peer]:9.2f}" if peer in row["ratio"] else f"{'-':>9}" for peer in PEERS)
    return f"{label:36} {row['us']['ours']['p20']:10.0f} {' '.join(ratios)}"


def summary(result: Mapping[str, Any]) -> Sequence[str]:
    """Return the lines below the table."""
    rows = result["rows"]
    lines = [
        "/plain   ours over Megatron-LM's formulation in plain torch",
        "/DTensor ours over a redistribution of torch's DTensor, where it has one",
        "/bare    ours over the collectives alone, on contiguous buffers: the floor",
        "Times are those of the slowest rank at p20.",
    ]
    if rows:
        # A spread is the whole width, p80 - p20, of which ± shows half.
        slower = [row for row in rows if "plain" in row["ratio"] and row["ratio"]["plain"] - row["spread"]["plain"] > 1]
        lines.append(f"{counted(len(rows), 'row')}: values and gradients of all providers are equal")
        lines.append(f"slower than plain torch by more than the spread: {counted(len(slower), 'row')}")
        lines += [f"  {row['row']}: {row['ratio']['plain']:.2f} ± {row['spread']['plain'] / 2:.2f}" for row in slower]
        if peak := [row for row in rows if "peak" in row]:
            worst = max(peak, key=lambda row: row["peak"]["ours"] - row["peak"]["plain"])
            lines.append(
                f"peak memory: at most {worst['peak']['ours']:.2f} inputs where plain has {worst['peak']['plain']:.2f}"
                f" ({worst['row']})"
            )
        if product := [row for row in rows if "matmul" in row]:
            worst = max(product, key=lambda row: row["matmul"]["ours"])
            lines.append(
                f"a matrix product beside it takes up to {worst['matmul']['ours']:.2f} of its time alone"
                f" ({worst['row']}; beside plain {worst['matmul']['plain']:.2f})"
            )
    lines += [f"cannot be captured: {one}" for one in result["refused"]]
    lines += [f"failed: {one}" for one in result["failed"]]
    if result["left_out"]:
        lines.append(f"left out for want of time: {'; '.join(result['left_out'])}")
    return lines
