"""The command `tritoncomm demo`: arguments, progress, a table of what each mapping costs, a picture of the losses."""

import os
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from tritoncomm.cli._console import refuse, say, table, terminal
from tritoncomm.demo import DemoError, DemoOutcome, Settings, check_text, run
from tritoncomm.parsing import counted, dtype_name, parse_dtype

__all__ = ["check_plot", "demo", "plot", "show", "train_with_progress"]

_PICTURES = (".png", ".svg")


def demo(
    ranks: Annotated[int | None, typer.Option(help="Processes that train together; 2 by default.")] = None,
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
    picture: Annotated[
        Path | None, typer.Option("--plot", help="Draw both loss curves into this .png or .svg file.")
    ] = None,
) -> None:
    """Train a small transformer on several ranks and on one, and compare the losses at every step.

    Exits with 1 when they differ by more than 1e-5 of the loss (float64: 1e-10, bfloat16: 2e-3) or a rank fails, with
    2 for invalid arguments.
    """
    console = terminal()
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
        check_text(settings)  # an error comes instead of the bars, not below them
        outcome = train_with_progress(settings, console)
        if picture is not None:
            plot(outcome, picture)
            say(console, f"drawn: {picture}")
    except (ValueError, OSError, DemoError) as error:
        raise refuse(error, 1 if isinstance(error, DemoError) else 2) from None
    show(outcome, console)
    largest, _ = outcome.largest_difference()
    raise typer.Exit(0 if largest <= settings.limit else 1)


def _ranks(ranks: int | None, tensor: int | None, pipeline: int) -> int:
    """Return the number of processes to start."""
    if tensor is None:
        return ranks if ranks is not None else max(Settings.ranks, pipeline)
    product = tensor * pipeline
    if ranks not in (None, product):
        stages = f"{counted(pipeline, 'stage')} of {counted(tensor, 'tensor rank')}"
        raise ValueError(f"{stages} are {counted(product, 'rank')}, not {ranks}")
    return product


def train_with_progress(settings: Settings, console: Console) -> DemoOutcome:
    """Run the demo behind a progress bar per role."""
    columns = (
        TextColumn("{task.description:>14}"), BarColumn(30), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars = {
            role: progress.add_task(label, total=settings.steps, loss="-")
            for role, label in (("ranks", counted(settings.ranks, "rank")), ("single process", "single process"))
        }

        def follow(role: str, step: int, loss: float) -> None:
            """Move the bar of a role to a step, counted from 0, with its loss."""
            progress.update(bars[role], completed=step + 1, loss=f"{loss:.4f}")

        return run(settings, follow)


def show(outcome: DemoOutcome, console: Console) -> None:
    """Print the table of rank 0, sorted by time, and the verdict as the last line."""
    settings = outcome.settings
    title = f"{_layout(settings)}, {counted(settings.steps, 'step')}, {outcome.seconds:.1f} s of training"
    names = ("mapping or p2p step", "path")
    rows = table(title, (*names, "calls", "MB\ncopied", "MB\nsent", "% of\ntime"), names)
    for (name, path), count in sorted(outcome.counters.items(), key=lambda item: -item[1].seconds):
        share = f"{100 * count.seconds / outcome.seconds:.1f}"
        rows.add_row(
            name, path, str(count.calls), f"{count.bytes_copied / 1e6:.2f}", f"{count.bytes_sent / 1e6:.2f}", share
        )
    console.print(rows)
    largest, step = outcome.largest_difference()
    say(console, f"largest relative difference of a loss: {largest:.1e} at step {step}, limit {settings.limit:.0e}")
    ranks = counted(settings.ranks, "rank")
    verdict = "equal: the losses of {} are" if largest <= settings.limit else "different: the losses of {} are not"
    say(console, f"{verdict.format(ranks)} those of one process")


def _layout(settings: Settings) -> str:
    """Return in words the rank that the table is of, and the layout of the job."""
    if settings.pipeline == 1:
        return f"rank 0 of {settings.ranks}"
    chunks = f" of {counted(settings.virtual, 'chunk')}" if settings.virtual > 1 else ""
    stages = f"{counted(settings.pipeline, 'stage')}{chunks}, {counted(settings.tensor, 'tensor rank')} each"
    return f"rank 0 of {settings.ranks} ({stages})"


def check_plot(path: Path) -> None:
    """Reject, before training, a picture that could not be drawn afterwards."""
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'tritoncomm[plot]'")
    if path.suffix.lower() not in _PICTURES:
        raise ValueError(f"--plot {path}: the name must end in {' or '.join(_PICTURES)}")
    folder = path.absolute().parent
    if not folder.is_dir():
        raise ValueError(f"--plot {path}: there is no folder {path.parent}")
    if path.exists() and not path.is_file():
        raise ValueError(f"--plot {path}: not a regular file")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"--plot {path}: no permission to write")


def plot(outcome: DemoOutcome, path: Path) -> None:
    """Draw both loss curves into a picture."""
    # An extra, and slow to import.
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator  # of the same extra

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(outcome.reference, linewidth=4, alpha=0.4, label="single process")
    axes.plot(outcome.losses, linewidth=1.2, color="black", label=counted(outcome.settings.ranks, "rank"))
    axes.set(xlabel="step", ylabel="cross-entropy per byte (nats)", title="The same training on one and several ranks")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))  # there is no half step
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format=path.suffix[1:].lower())
