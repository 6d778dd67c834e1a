"""Pictures of benchmark results, as PNG and SVG: time against peers, share of the roof over size. Needs matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["draw", "problem"]

_COLORS = ("#31688e", "#bd3786", "#35b779", "#f28e2b", "#7f7f7f", "#17becf")


def problem() -> str:
    """Install command of matplotlib where it is missing; empty where it is installed."""
    return "" if find_spec("matplotlib") else "--plot needs matplotlib: pip install -e '.[bench]'"


def draw(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Pictures of one results file: times of every provider, and the share of the roof where it was measured."""
    stem = name.replace("/", "-")
    made = _saved(_times(name, rows), folder / f"{stem}-times")
    if any("share_of_roof" in row for row in rows):
        made += _saved(_roof(name, rows), folder / f"{stem}-roof")
    return made


def _saved(figure: Any, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for target in made:
        figure.savefig(target, dpi=120, format=target.suffix[1:], facecolor="white")  # readable on dark pages
    return made


def _times(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    """A point per row and provider on a logarithmic axis: microseconds at p20, with a whisker to p80."""
    # An extra, and slow to import.
    from matplotlib.figure import Figure

    providers = sorted({provider for row in rows for provider in row["us"]}, key=lambda name: (name != "ours", name))
    figure = Figure(figsize=(10, 1.4 + 0.16 * len(rows) * (1 + len(providers))), layout="constrained")
    axes = figure.subplots()
    for i, provider in enumerate(providers):
        own = [(place, row["us"][provider]) for place, row in enumerate(rows) if provider in row["us"]]
        fast = [us["p20"] for _, us in own]
        axes.errorbar(
            fast,
            [place + (i - (len(providers) - 1) / 2) * 0.6 / len(providers) for place, _ in own],
            xerr=[[0.0] * len(own), [us["p80"] - us["p20"] for _, us in own]],
            fmt="o" if provider == "ours" else "s",
            markersize=5 if provider == "ours" else 4,
            capsize=2,
            color=_COLORS[i % len(_COLORS)],
            label=provider,
        )
    axes.set_xscale("log")
    axes.grid(axis="x", which="both", alpha=0.3)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=7)
    axes.set_ylim(len(rows) - 0.5, -0.5)  # the first row on top
    axes.set(xlabel="microseconds: p20, whisker to p80 (smaller is better)", title=name)
    figure.legend(fontsize=8, loc="outside lower right", ncols=max(len(providers), 1))
    return figure


def _roof(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    """Share of a plain copy's speed over the size of the tensor, one curve per operation."""
    # An extra, and slow to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    curves: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        case = row.get("case", {})
        if "share_of_roof" in row and case.get("sweep") == "size":
            curves.setdefault(case["op"], []).append((case["nbytes"] / 2**20, row["share_of_roof"]))
    for op, points in curves.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=op)
    axes.axhline(1.0, color="black", linewidth=1)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="MiB", ylabel="share of a contiguous copy's speed", title=name, ylim=(0, 1.1))
    axes.grid(alpha=0.3)
    if curves:
        axes.legend()
    return figure
