"""The command `tritoncomm`."""

import os
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError as error:
    sys.exit(f"the command needs typer and rich ({error}): pip install 'tritoncomm[cli]'")

from tritoncomm import __version__, launchers
from tritoncomm.cli import commands
from tritoncomm.cli._console import refuse, terminal
from tritoncomm.demo import DemoError, Settings
from tritoncomm.demo.report import check_plot, plot, show, train_with_progress
from tritoncomm.errors import GroupError
from tritoncomm.parsing import dtype_name, parse_dtype
from tritoncomm.tune import report as tune_report
from tritoncomm.tune.command import Request

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"tritoncomm {__version__}, torch {version('torch')}, triton {version('triton')}")
        raise typer.Exit(0)


@app.callback()
def _about(
    context: typer.Context,
    wanted: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the versions and stop.")
    ] = False,
) -> None:
    """A communication layer for tensor, sequence and pipeline parallel training.

    Start with `demo` to see it train, `doctor` to see what a machine has, `plan` to see what a mapping costs. Under
    torchrun, mpirun or srun a command runs once, on rank 0, and `doctor` once on every node.
    """
    _run_once(context.invoked_subcommand or "")


def _run_once(command: str) -> None:
    """Leave a command to one rank of the job, or of the node: it starts the ranks that it needs itself.

    `doctor` runs where the variables contradict each other, to say so.
    """
    try:
        launch = launchers.started_by(os.environ)
    except GroupError as error:
        if command == "doctor":
            return
        raise refuse(error) from None
    if launch is None or launch.size == 1:
        return
    of_node = command == "doctor"
    if not launchers.is_first(launch, of_node=of_node):
        raise typer.Exit(0)
    where = "on the first rank of every node" if of_node else "on rank 0, and starts the ranks that it needs itself"
    terminal(stderr=True).print(
        f"{launch.launcher} started {launch.size} ranks: `tritoncomm {command}` runs once, {where}", soft_wrap=True
    )


@app.command()
def demo(
    ranks: Annotated[int | None, typer.Option(help="Processes that train together; 2 if nothing else says.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Tensor-parallel ranks per stage: ranks / pipeline.")] = None,
    pipeline: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    virtual: Annotated[int, typer.Option(help="Model chunks per stage (interleaved schedule).")] = 1,
    steps: Annotated[int, typer.Option(help="Training steps, 100 at most.")] = 60,
    text: Annotated[str | None, typer.Option(help="File to train on; Python's own documentation by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16, or short: fp32, fp64, bf16.")] = "float32",
    tensor_layer: Annotated[
        bool, typer.Option("--tensor-layer", help="Plain modules whose parameters are ColoParameters.")
    ] = False,
    picture: Annotated[Path | None, typer.Option("--plot", help="Draw both loss curves into this PNG.")] = None,
) -> None:
    """Train a small transformer on several ranks and on one, and compare the losses at every step.

    Exits with 1 when they differ by more than 1e-5 of the loss (float64: 1e-10, bfloat16: 2e-3) or a rank fails, with
    2 when the arguments make no sense.
    """
    console = Console(width=None if sys.stdout.isatty() else 110)
    try:
        settings = Settings(
            ranks=_ranks(ranks, tensor, pipeline),
            pipeline=pipeline,
            virtual=virtual,
            layers=max(Settings.layers, pipeline * virtual),
            steps=steps,
            text=text,
            device=device,
            dtype=dtype_name(parse_dtype(dtype)),
            tensor_layer=tensor_layer,
        )
        if picture is not None:
            check_plot(picture)
        outcome = train_with_progress(settings, console)
        if picture is not None:
            plot(outcome, picture)
    except (ValueError, OSError, DemoError) as error:
        raise refuse(error, 1 if isinstance(error, DemoError) else 2) from None
    show(outcome, console)
    largest, _ = outcome.largest_difference()
    raise typer.Exit(0 if largest <= settings.limit else 1)


@app.command()
def tune(
    op: Annotated[list[str] | None, typer.Option(help="pack, unpack or reduce; all by default. Repeatable.")] = None,
    shape: Annotated[list[str] | None, typer.Option(help="Like 4096x8192; the last dim is cut. Repeatable.")] = None,
    world: Annotated[list[int] | None, typer.Option(help="Ranks the dim is cut over; 8. Repeatable.")] = None,
    dtype: Annotated[
        list[str] | None, typer.Option(help="Element type like bf16, fp32, fp8_e4m3; bfloat16. Repeatable.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="llama3-8b, llama3-70b, qwen3-32b, deepseek-v3 or a file.")] = None,
    tensor_parallel: Annotated[int | None, typer.Option(help="Ranks that share the model's layers; 8.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of one micro-batch of the model; 8192.")] = None,
    listing: Annotated[bool, typer.Option("--list", help="List the cases and stop.")] = False,
    budget: Annotated[float | None, typer.Option(help="Seconds after which nothing new starts.")] = None,
    out: Annotated[
        Path | None, typer.Option(help="File, or folder with a file per GPU; the user's cache by default.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="With --static: sm_80, sm_90, sm_100 or gfx942.")] = None,
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

    Exits with 0 when done or out of time, 1 when an output was wrong, 2 when the arguments make no sense or there is
    no GPU, 130 when interrupted.
    """
    request = Request(op or (), shape or (), world or (), dtype or (), model, tensor_parallel, tokens, budget, out)
    try:
        code = tune_report.run(request, listing=listing, ranking=static, target=target, as_json=as_json)
    except (ValueError, OSError) as error:
        raise refuse(error) from None
    raise typer.Exit(code)


def _ranks(ranks: int | None, tensor: int | None, pipeline: int) -> int:
    """Processes to start."""
    if tensor is not None:
        if ranks not in (None, tensor * pipeline):
            raise ValueError(f"{pipeline} stages of {tensor} tensor ranks are {tensor * pipeline} ranks, not {ranks}")
        return tensor * pipeline
    return ranks if ranks is not None else max(Settings.ranks, pipeline)


commands.add_to(app)


def main() -> None:
    """Entry point of the installed command."""
    app()
