"""The commands `tritoncomm plan`, `tritoncomm doctor` and `tritoncomm bench`: arguments, tables, exit codes."""

import json
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tritoncomm import cost, pictures, suite
from tritoncomm.arguments import dtype_name, parse_dtype, parse_ints
from tritoncomm.doctor import Finding, examine
from tritoncomm.explain import OPS, Explanation, explain
from tritoncomm.steps import Movement

__all__ = ["add_to"]

MIB = 2**20
_MARKS = {"ok": "[green]ok[/]", "note": "[yellow]note[/]", "problem": "[red]problem[/]"}


def add_to(app: typer.Typer) -> None:
    """Add the three commands."""
    app.command(epilog=_PLAN_EPILOG)(plan)
    app.command(epilog=_DOCTOR_EPILOG)(doctor)
    app.command(epilog=_BENCH_EPILOG)(bench)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else 110, highlight=False, soft_wrap=False)


@contextmanager
def _told(console: Console) -> Iterator[None]:
    """What the user got wrong is one line and exit code 2, never a traceback."""
    try:
        yield
    except (ValueError, TypeError, OSError, suite.SuiteError) as error:
        console.print(f"error: {error}", style="red", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None


_PLAN_EPILOG = (
    "Examples: `tritoncomm plan sp2hp --shape 4096,2,8192 --world 8` for GPUs; `--device 'NVIDIA H200'` with the tuned "
    "table of that GPU; `tritoncomm plan all_to_all --shape 2,1024,32,128 --dim 2,1 --world 4 --json` for Ulysses, with `--strides 12582912,12288,128,1` "
    "where the input is one third of a fused qkv; `tritoncomm plan all_to_all --shape 8,512 --world 2 --sizes 3,5 "
    "--out-sizes 4,2` for split sizes. "
    f"Mappings: {', '.join(OPS)}, or their full names. Exits with 2 when such a call would be refused."
)


def plan(
    op: Annotated[str, typer.Argument(help="The mapping, for example sp2hp or all_gather.")],
    shape: Annotated[str, typer.Option(help="Input on one rank, like 4096,2,8192 or 4096x2x8192.")],
    world: Annotated[int, typer.Option(help="Number of ranks.")],
    dtype: Annotated[
        str, typer.Option(help="Element type of the input: torch's name, or bf16, fp32, fp8_e4m3.")
    ] = "bfloat16",
    dim: Annotated[str, typer.Option(help="The dim; scatter_dim,gather_dim for all_to_all.")] = "",
    device: Annotated[str, typer.Option(help="cuda, cpu, or the name of a GPU, for its tuned table.")] = "cuda",
    sizes: Annotated[str, typer.Option(help="Pieces of the dim per rank, like 3,5; all-to-all: what goes out.")] = "",
    out_sizes: Annotated[str, typer.Option(help="all-to-all: what comes from each rank.")] = "",
    rank: Annotated[int, typer.Option(help="The rank that is told about; with --sizes they differ.")] = 0,
    strides: Annotated[str, typer.Option(help="x.stride() of an input that is not contiguous.")] = "",
    held: Annotated[bool, typer.Option("--held", help="copy, reduce: the caller keeps the tensor.")] = False,
    latency: Annotated[float | None, typer.Option(help="Microseconds per step of a collective; 5, cpu 50.")] = None,
    link: Annotated[float | None, typer.Option(help="GB/s a rank sends inside a node; 350, cpu 1.")] = None,
    network: Annotated[float | None, typer.Option(help="GB/s a rank sends to other nodes; 50, cpu 1.")] = None,
    memory: Annotated[float | None, typer.Option(help="GB/s of a copy, read plus written; 4000, cpu 10.")] = None,
    node: Annotated[int | None, typer.Option(help="Ranks in a node; 8.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Explain what a mapping does, without running it: path per step, passes, bytes, tiles, predicted time.

    Bytes are exactly those that `tritoncomm.counters()` would show. Times are predictions from the figures given here,
    nothing is measured.
    """
    console = _console()
    with _told(console):
        rates = _rates("cpu" if device == "cpu" else "cuda", latency, link, network, memory, node)
        if device == "cuda" and torch.cuda.is_available():
            device = torch.cuda.get_device_name()
        told = explain(
            op, parse_ints(shape, "--shape", 0), world, parse_dtype(dtype), parse_ints(dim, "--dim"), device, rates,
            held, sizes=parse_ints(sizes, "--sizes", 0) or None, rank=rank,
            out_sizes=parse_ints(out_sizes, "--out-sizes", 0) or None,
            stride=parse_ints(strides, "--strides", 0) or None,
        )  # fmt: skip
    if as_json:
        print(json.dumps(_as_json(told), indent=1))
    else:
        _show(told, console)


def _rates(
    kind: str,
    latency: float | None,
    link: float | None,
    network: float | None,
    memory: float | None,
    node: int | None,
) -> cost.Rates:
    scaled = {"latency": (latency, 1e-6), "link": (link, 1e9), "network": (network, 1e9), "memory": (memory, 1e9)}
    given: dict[str, Any] = {name: value * unit for name, (value, unit) in scaled.items() if value is not None}
    for name, value in given.items():
        if value < 0 or (value == 0 and name != "latency"):
            raise ValueError(f"--{name} must be more than 0")
    if node is not None:
        if node < 1:
            raise ValueError("--node must be 1 or more")
        given["node"] = node
    return replace(cost.DEFAULTS[kind], **given)


def _as_json(told: Explanation) -> dict[str, Any]:
    def movement(one: Movement) -> dict[str, Any]:
        local, collective = one.seconds
        totals = {"path": one.path, "passes": one.passes, "packed": one.packed, "wire": one.wire}
        return asdict(one) | totals | {"predicted_seconds": {"local": local, "collective": collective}}

    return {
        "mapping": told.op,
        "world": told.world,
        "dtype": dtype_name(told.dtype),
        "device": told.device,
        "forward": movement(told.forward),
        "backward": None if told.backward is None else movement(told.backward),
        "no_backward": told.no_backward,
        "assumed": asdict(told.rates),
        "projection": [asdict(share) | {"share": share.share} for share in told.projection],
    }


def _show(told: Explanation, console: Console) -> None:
    kind = dtype_name(told.dtype)
    console.print(f"{told.op}: {kind}, {told.world} ranks, {told.device}", style="bold", markup=False)
    for direction, one in (("forward", told.forward), ("backward", told.backward)):
        if one is None:
            console.print(f"{direction}: none: {told.no_backward}", markup=False, soft_wrap=True)
            continue
        console.print(_movement_table(direction, one))
        for step in one.steps:
            if step.tile:
                console.print(f"  {step.name}: tile {step.tile} ({step.origin})", markup=False, soft_wrap=True)
    rates = told.rates
    console.print(
        f"predicted, not measured: {rates.latency * 1e6:g} us per step, {rates.link / 1e9:g} GB/s per link, "
        f"{rates.network / 1e9:g} GB/s to other nodes of {rates.node} ranks, copies at {rates.memory / 1e9:g} GB/s "
        f"({rates.source}, unless given)",
        markup=False,
        soft_wrap=True,
    )
    if not told.projection:
        return
    shares = ", ".join(f"{s.world}: {'-' if s.share is None else f'{s.share:.0%}'}" for s in told.projection)
    what = "PROJECTION, not measured: share of pack and unpack in forward + backward by ranks, same shape on every rank"
    console.print(f"{what}: {shares}", markup=False, soft_wrap=True)


def _movement_table(direction: str, one: Movement) -> Table:
    local, collective = one.seconds
    table = Table(title=f"{direction}: {escape(f'{list(one.shape)} -> {list(one.result)}')}", title_justify="left")
    table.add_column("step")
    table.add_column("path")
    table.add_column("what")
    for heading in ("MiB copied", "MiB sent", "us, predicted"):
        table.add_column(heading, justify="right")
    for step in one.steps:
        numbers = (f"{step.packed / MIB:.3f}", f"{step.wire / MIB:.3f}", f"{step.seconds * 1e6:.1f}")
        table.add_row(step.name, step.path, escape(step.what), *numbers)
    passes = f"{one.passes} pass{'' if one.passes == 1 else 'es'} over memory"
    total = f"{(local + collective) * 1e6:.1f}"
    table.add_section()
    table.add_row("all", one.path, passes, f"{one.packed / MIB:.3f}", f"{one.wire / MIB:.3f}", total)
    return table


_DOCTOR_EPILOG = (
    "Examples: `tritoncomm doctor` on the machine that will train, with the variables of the job set; "
    "`tritoncomm doctor --json` for a job's log. Exits with 0 when all is well (no GPU is a note), 1 for a problem."
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    self_test: Annotated[bool, typer.Option(help="Let two ranks exchange known values (seconds).")] = True,
) -> None:
    """Look at torch, Triton, backends, GPUs, links, tuned table and variables; let two ranks exchange known values."""
    console = _console()
    if as_json:
        findings = list(examine(self_test))
        ok = all(finding.level != "problem" for finding in findings)
        print(json.dumps({"ok": ok, "findings": [asdict(finding) for finding in findings]}, indent=1))
        raise typer.Exit(0 if ok else 1)
    with console.status("looking"):
        findings = list(examine(self_test))
    console.print(_findings_table(findings))
    problems = sum(finding.level == "problem" for finding in findings)
    console.print("all well" if not problems else f"{problems} problem{'s' if problems > 1 else ''}")
    raise typer.Exit(1 if problems else 0)


def _findings_table(findings: list[Finding]) -> Table:
    table = Table()
    table.add_column("what", no_wrap=True)
    table.add_column("", no_wrap=True)
    table.add_column("how it is", overflow="fold")
    table.add_column("what to do", overflow="fold")
    for one in findings:
        table.add_row(escape(one.name), _MARKS[one.level], escape(one.value), escape(one.advice))
    return table


_BENCH_EPILOG = (
    "Examples: `tritoncomm bench p2p`; `tritoncomm bench --check` before a commit; `tritoncomm bench mappings --plot "
    "--out figures`. Parts: one per `bench/bench_<part>.py`, and `gpu`. Exits with 0; with 1 when a part fails, or "
    "when --check finds a target missed or a ratio worse; with 2 without a checkout."
)


def bench(
    part: Annotated[str | None, typer.Argument(help="One part; by default all that this machine can run.")] = None,
    out: Annotated[Path | None, typer.Option(help="Keep the results there, as <device>/<part>.json.")] = None,
    plot: Annotated[bool, typer.Option("--plot", help="Draw PNG and SVG into --out, or bench-results.")] = False,
    check: Annotated[bool, typer.Option("--check", help="Fail when a ratio is worse than the committed one.")] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds per row; fewer are quicker and noisier.")] = None,
    only: Annotated[str, typer.Option(help="Only rows whose name contains this.")] = "",
) -> None:
    """Run the benchmarks of a checkout, print ours against peers as ratios, draw them, compare them with the last ones.

    Every ratio was measured in one run, peers interleaved with ours. Kernels on a GPU are measured where there is one.
    """
    console = _console()
    with tempfile.TemporaryDirectory() as scratch, _told(console):
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
    """Say what was missed; the exit code."""
    status = 0
    for one in outcomes:
        for line in one.missed:
            console.print(f"missed, {one.part}: {line}", style="yellow", markup=False, soft_wrap=True)
        if one.status not in (0, 1) or (one.status and not one.missed):
            console.print(f"{one.part} did not run: {one.last}", style="red", markup=False, soft_wrap=True)
            status = 1
        elif one.status and check:
            status = 1
    return max(status, min(suite.verdict(folder), 1)) if check else status


def _rows_table(name: str, rows: list[dict[str, Any]]) -> Table:
    peers = list(dict.fromkeys(peer for row in rows for peer in row["us"] if peer != "ours"))
    compared = {peer for row in rows for peer in row["ratio"]}
    table = Table(title=f"{name}: microseconds (median), ours / peer (p20) with its spread", title_justify="left")
    table.add_column("row")
    table.add_column("ours", justify="right")
    for peer in peers:
        table.add_column(peer, justify="right")
        if peer in compared:
            table.add_column(f"ours / {peer}", justify="right")
    for row in rows:
        cells = [row["row"], f"{row['us']['ours']['median']:.1f}"]
        for peer in peers:
            us, ratio, spread = row["us"].get(peer), row["ratio"].get(peer), row["spread"].get(peer, 0.0)
            cells += ["-" if us is None else f"{us['median']:.1f}"]
            if peer in compared:
                cells += ["-" if ratio is None else f"{ratio:.2f} ± {spread / 2:.2f}"]
        table.add_row(*cells)
    return table
