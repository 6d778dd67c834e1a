"""The command `tritoncomm`."""

import sys
from pathlib import Path
from typing import Annotated

try:
    import typer
    from rich.console import Console
except ImportError as error:
    sys.exit(f"the command needs typer and rich ({error}): pip install 'tritoncomm[cli]'")

from tritoncomm.demo import DemoError, Settings
from tritoncomm.demo.report import check_plot, plot, show, train_with_progress

__all__ = ["app", "main"]

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def _about() -> None:
    """A communication layer for tensor, sequence and pipeline parallel training."""


@app.command()
def demo(
    ranks: Annotated[int | None, typer.Option(help="Processes that train together; 2 if nothing else says.")] = None,
    tensor: Annotated[int | None, typer.Option(help="Tensor-parallel ranks per stage: ranks / pipeline.")] = None,
    pipeline: Annotated[int, typer.Option(help="Pipeline stages.")] = 1,
    virtual: Annotated[int, typer.Option(help="Model chunks per stage (interleaved schedule).")] = 1,
    steps: Annotated[int, typer.Option(help="Training steps, 100 at most.")] = 60,
    text: Annotated[str | None, typer.Option(help="File to train on; Python's own documentation by default.")] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="float32, float64 or bfloat16.")] = "float32",
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
            dtype=dtype,
        )
        if picture is not None:
            check_plot(picture)
        outcome = train_with_progress(settings, console)
        if picture is not None:
            plot(outcome, picture)
    except (ValueError, OSError, DemoError) as error:
        console.print(f"error: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        raise typer.Exit(1 if isinstance(error, DemoError) else 2) from None
    show(outcome, console)
    largest, _ = outcome.largest_difference()
    raise typer.Exit(0 if largest <= settings.limit else 1)


def _ranks(ranks: int | None, tensor: int | None, pipeline: int) -> int:
    """Processes to start."""
    if tensor is not None:
        if ranks not in (None, tensor * pipeline):
            raise ValueError(f"{pipeline} stages of {tensor} tensor ranks are {tensor * pipeline} ranks, not {ranks}")
        return tensor * pipeline
    return ranks if ranks is not None else max(Settings.ranks, pipeline)


def main() -> None:
    """Entry point of the installed command."""
    app()
