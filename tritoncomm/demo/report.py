"""What the demo shows: a progress bar, a table of what each mapping cost, a picture of the losses, one last line."""

from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from tritoncomm.demo.run import Outcome, run
from tritoncomm.demo.settings import Settings

__all__ = ["check_plot", "plot", "show", "train_with_progress"]


def train_with_progress(settings: Settings, console: Console) -> Outcome:
    """Run the demo behind a progress bar per role."""
    columns = (
        TextColumn("{task.description:>14}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("loss {task.fields[loss]}"),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        bars = {
            role: progress.add_task(role, total=settings.steps, loss="-")
            for role in (f"{settings.ranks} ranks", "single process")
        }

        def follow(role: str, step: int, loss: float) -> None:
            bar = bars["single process" if role == "single process" else f"{settings.ranks} ranks"]
            progress.update(bar, completed=step + 1, loss=f"{loss:.4f}")

        return run(settings, follow)


def _layout(settings: Settings) -> str:
    """Words for which ranks the table is of."""
    if settings.pipeline == 1:
        return f"rank 0 of {settings.ranks}"
    chunks = f" of {settings.virtual} chunks" if settings.virtual > 1 else ""
    return f"rank 0 of {settings.ranks} ({settings.pipeline} stages{chunks}, {settings.tensor} tensor ranks each)"


def show(outcome: Outcome, console: Console) -> None:
    """The table of rank 0, sorted by time, and the verdict as the last line."""
    table = Table(title=f"{_layout(outcome.settings)}, {outcome.settings.steps} steps, {outcome.seconds:.1f} s")
    table.add_column("mapping or hop", no_wrap=True)
    table.add_column("path")
    for heading in ("calls", "MB packed", "MB sent", "% of time"):
        table.add_column(heading, justify="right")
    for (name, path), count in sorted(outcome.counters.items(), key=lambda item: -item[1].seconds):
        numbers = (
            f"{count.packed / 1e6:.2f}",
            f"{count.wire / 1e6:.2f}",
            f"{100 * count.seconds / outcome.seconds:.1f}",
        )
        table.add_row(name, path, str(count.calls), *numbers)
    console.print(table)
    largest, step = outcome.largest_difference()
    line = f"largest relative difference to the single-process losses: {largest:.1e} at step {step}"
    console.print(f"{line} (limit {outcome.settings.limit:.0e})", highlight=False, soft_wrap=True)


def check_plot(path: Path) -> None:
    """Refuse, before training, a picture that could not be drawn afterwards.

    Raises:
        ValueError: matplotlib or the folder is missing.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'tritoncomm[plot]'")
    if not path.absolute().parent.is_dir():
        raise ValueError(f"--plot: there is no folder {path.parent}")


def plot(outcome: Outcome, path: Path) -> None:
    """Draw both loss curves into a picture."""
    # An extra, and slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(outcome.reference, linewidth=4, alpha=0.4, label="single process")
    axes.plot(outcome.losses, linewidth=1.2, color="black", label=f"{outcome.settings.ranks} ranks")
    axes.set(xlabel="step", ylabel="cross-entropy per byte (nats)", title="The same training on one and several ranks")
    axes.legend()
    axes.grid(alpha=0.3)
    figure.savefig(path, dpi=120, format="png")
