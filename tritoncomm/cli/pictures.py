"""Pictures of benchmark results, as PNG and SVG: time against peers, share of the roof over size. Needs matplotlib."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

__all__ = ["check", "draw"]

_COLOURS = ("#31688e", "#35b779", "#bd3786", "#f28e2b")


def check() -> None:
    """Refuse, before anything is measured, pictures that could not be drawn.

    Raises:
        ValueError: matplotlib is missing.
    """
    if find_spec("matplotlib") is None:
        raise ValueError("--plot needs matplotlib: pip install 'tritoncomm[plot]'")


def draw(name: str, rows: Sequence[dict[str, Any]], folder: Path) -> list[Path]:
    """Pictures of one results file: ratios to every peer, and the share of the roof where it was measured."""
    stem = name.replace("/", "-")
    made = _saved(_ratios(name, rows), folder / f"{stem}-ratios")
    if any("share_of_roof" in row for row in rows):
        made += _saved(_roof(name, rows), folder / f"{stem}-roof")
    return made


def _saved(figure: Any, path: Path) -> list[Path]:
    path.parent.mkdir(parents=True, exist_ok=True)
    made = [path.with_name(f"{path.name}.{kind}") for kind in ("png", "svg")]
    for target in made:
        figure.savefig(target, dpi=120, format=target.suffix[1:])
    return made


def _ratios(name: str, rows: Sequence[dict[str, Any]]) -> Any:
    """One bar per row and peer, as wide as ours takes of the peer's time; the whisker is the ratio's spread."""
    # An extra, and slow to import.
    from matplotlib.figure import Figure

    peers = list(dict.fromkeys(peer for row in rows for peer in row["ratio"]))
    height = 0.8 / max(len(peers), 1)
    figure = Figure(figsize=(10, 1.2 + 0.16 * len(rows) * (1 + len(peers))), layout="constrained")
    axes = figure.subplots()
    for i, peer in enumerate(peers):
        own = [(place, row) for place, row in enumerate(rows) if peer in row["ratio"]]
        axes.barh(
            [place + (i - (len(peers) - 1) / 2) * height for place, _ in own],
            [row["ratio"][peer] for _, row in own],
            height=height,
            xerr=[row["spread"].get(peer, 0.0) / 2 for _, row in own],
            color=_COLOURS[i % len(_COLOURS)],
            ecolor="#555555",
            label=f"ours / {peer}",
        )
    axes.axvline(1.0, color="black", linewidth=1)
    axes.set_yticks(range(len(rows)), [row["row"] for row in rows], fontsize=7)
    axes.invert_yaxis()
    axes.set(xlabel="time, ours as a share of the peer's (smaller is better)", title=name)
    figure.legend(fontsize=8, loc="outside lower right", ncols=max(len(peers), 1))
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
