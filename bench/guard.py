"""The regression guard: this run's ratios (ours / a peer's) against the targets and the committed ratios.

The targets of host time are constants of this module, and docs/benchmarks.md lists them.

Committed ratios are those of the same kind of device. Only ratios are compared, because both sides of a ratio were
measured in the same rounds. A row is worse when

    ratio > committed ratio * 1.10 + spread

where spread is the larger of the two runs' own: rounds are cut into ten groups of neighbours, each group gives a ratio,
and the spread is the distance between the 20 % and the 80 % quantile of these ten. Processes differ among each other
too, in how their memory lies and in what else the machine does. So the committed figures come from several runs: of
each row that with the median ratio is kept, and the spread is the median one, or the range of the ratios if that is
larger.

``python bench/guard.py FOLDER`` compares every ``FOLDER/<device>/<part>.json`` with ``bench/results/``; it exits with 1
when a row is worse and with 2 when there is nothing to compare. ``python bench/guard.py --keep FOLDER FOLDER ...``
makes the runs in these folders the committed figures.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from bench.timing import cpu, geometric_mean, write_json

__all__ = [
    "ALLOWED",
    "BUCKET_US",
    "COUNTED",
    "MEAN",
    "MORE_WORK",
    "NEWEST_MEAN",
    "RESULTS",
    "ROW",
    "SPREAD",
    "STEP",
    "Worse",
    "against_committed",
    "committed",
    "compare",
    "is_baseline",
    "is_worse",
    "mean_target",
    "merged",
    "row_target",
    "rows_of",
]

ALLOWED = 0.10
ROW = 1.00  # of a peer's host time: a row at most
SPREAD = 0.05  # the most that a row's own spread may add to its limit
MEAN, NEWEST_MEAN = 0.90, 1.00  # of Megatron's: geometric mean of the mappings, up to torch 2.13 and after it
MORE_WORK = 1.20  # of Megatron's host time: a hop with a header, or one that Megatron makes with bare calls
COUNTED = 1.05  # of Megatron's host time: a compiled layer, whose graph counts its collectives as it runs
STEP = 0.97  # of Megatron's own: a whole training step of its GPT, patched
BUCKET_US = 100  # host time of ``plan.execute`` per bucket of a resharding
TORCH = (2, 13)  # the newest release on which rows have a target of their own
RESULTS = Path(__file__).resolve().parent / "results"


def _has_row_targets(version: str) -> bool:
    """Whether rows have targets on this torch: its newer releases made Megatron's own host time smaller."""
    major, minor = version.split(".")[:2]
    return (int(major), int(minor)) <= TORCH


def row_target(limit: float = ROW, version: str = torch.__version__) -> dict[str, float]:
    """Limits of a row of host times, as ``harness.Part`` reads them; none on a torch newer than ``TORCH``."""
    return {"limit": limit, "limit_with_spread": round(limit + SPREAD, 2)} if _has_row_targets(version) else {}


def mean_target(version: str = torch.__version__) -> float:
    """Largest geometric mean of the mappings."""
    return MEAN if _has_row_targets(version) else NEWEST_MEAN


@dataclass(frozen=True)
class Worse:
    """A row whose ratio to a peer grew by more than it may."""

    row: str
    peer: str
    was: float
    now: float
    most: float

    def __str__(self) -> str:
        return f"{self.row}: {self.now:.3f} of {self.peer}'s time, {self.was:.3f} before, at most {self.most:.3f}"


def rows_of(content: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of a results file: ``row``, ``ratio`` and ``spread`` by peer, ``us`` by provider."""
    return content.get("rows", [])


def worse(now: dict[str, Any], before: dict[str, Any]) -> list[Worse]:
    """The peers to which one row's ratio worsened by more than 10 % beyond its spread."""
    found = []
    for peer, was in before["ratio"].items():
        if peer not in now["ratio"]:
            continue
        spread = max(now.get("spread", {}).get(peer, 0.0), before.get("spread", {}).get(peer, 0.0))
        most = was * (1 + ALLOWED) + spread
        if now["ratio"][peer] > most:
            found.append(Worse(now["row"], peer, was, now["ratio"][peer], most))
    return found


def compare(now: dict[str, Any], before: dict[str, Any]) -> list[Worse]:
    """All rows that both files have; a row that is new, or was not measured this time, is no regression."""
    known = {row["row"]: row for row in rows_of(before)}
    return [line for row in rows_of(now) if row["row"] in known for line in worse(row, known[row["row"]])]


def merged(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Several runs of one part as one: the median run of each row, with the spread that the module states."""
    rows: list[dict[str, Any]] = []
    for row in rows_of(runs[0]):
        same = [line for run in runs for line in rows_of(run) if line["row"] == row["row"]]
        same.sort(key=lambda line: geometric_mean(list(line["ratio"].values())))
        spread = {}
        for peer in row["ratio"]:
            ratios = [line["ratio"][peer] for line in same]
            spread[peer] = round(max(max(ratios) - min(ratios), _median([line["spread"][peer] for line in same])), 3)
        rows.append(same[len(same) // 2] | {"spread": spread})
    return runs[-1] | {"rows": rows, "runs": len(runs)} | _means(runs)


def _means(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """The median of the geometric means that the runs state, by mode where they do."""
    means = [run["geometric_mean"] for run in runs if "geometric_mean" in run]
    if not means:
        return {}
    if isinstance(means[0], dict):
        return {"geometric_mean": {mode: _median([mean[mode] for mean in means]) for mode in means[0]}}
    return {"geometric_mean": _median(means)}


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def committed(part: str, device: str = "cpu", results: Path | None = None) -> dict[str, Any] | None:
    """The committed file of one part of the suite, None where this kind of device has none."""
    path = (results or RESULTS) / device / f"{part}.json"
    return json.loads(path.read_text()) if path.is_file() else None


def is_baseline(before: dict[str, Any], processor: str | None = None) -> bool:
    """Whether committed figures count on this processor: they were made on the same model."""
    return before["versions"].get("cpu") == (processor or cpu())


def is_worse(part: str, row: dict[str, Any], device: str = "cpu") -> bool:
    """Whether a row of this part is worse than the committed one; False where none counts here."""
    return bool(against_committed(part, {"rows": [row]}, device))


def against_committed(part: str, content: dict[str, Any], device: str = "cpu") -> list[Worse]:
    """``compare`` with the committed file; empty where none counts here."""
    before = committed(part, device)
    return compare(content, before) if before and is_baseline(before) else []


def _folders(folder: Path, results: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    for path in sorted(folder.glob("*/*.json")):
        before = committed(path.stem, path.parent.name, results)
        if before is not None:
            yield f"{path.parent.name}/{path.stem}", json.loads(path.read_text()), before


def keep(folders: list[Path], results: Path) -> int:
    """Make these runs the committed figures.

    Raises:
        ValueError: a run was interrupted, or the runs were made on several processors.
    """
    for path in sorted(folders[0].glob("*/*.json")):
        part = path.relative_to(folders[0])
        runs = [json.loads((folder / part).read_text()) for folder in folders if (folder / part).is_file()]
        if len({run["versions"].get("cpu") for run in runs}) > 1 or any(run.get("incomplete") for run in runs):
            raise ValueError(f"{part}: the runs are incomplete, or were made on several processors")
        print("written:", write_json(results / part, merged(runs)), f"from {len(runs)} runs")
    return 0


def judge(folder: Path, results: Path) -> int:
    """Print what is worse than the committed figures; the exit status."""
    compared = skipped = worse_ratios = 0
    for name, now, before in _folders(folder, results):
        known = {row["row"] for row in rows_of(before)}
        common = sum(row["row"] in known for row in rows_of(now))
        old, new = before["versions"], now["versions"]
        if not is_baseline(before, new.get("cpu", "an unknown processor")):
            skipped += common
            print(f"{name}: no baseline on {new.get('cpu')}, committed on {old.get('cpu', 'an unknown processor')}")
            continue
        compared += common
        lines = compare(now, before)
        worse_ratios += len(lines)
        for line in lines:
            print(f"WORSE: {name}: {line}")
        changed = [f"{key} {old.get(key)}" for key in new if key != "commit" and old.get(key) != new[key]]
        if lines and changed:
            print(f"{name}: the committed figures were made with {', '.join(changed)}")
    if not compared and not skipped:
        print(f"nothing to compare: {folder} and {results} have no row in common")
        return 2
    print(f"{compared} rows compared, {worse_ratios} ratios worse by more than {ALLOWED:.0%} beyond their spread")
    return 1 if worse_ratios else 0


def main() -> int:
    parser = argparse.ArgumentParser(description="This run's ratios against the committed ones.")
    parser.add_argument("folders", type=Path, nargs="+", help="results of a run: <device>/<part>.json")
    parser.add_argument("--baseline", type=Path, default=RESULTS, help="the committed results")
    parser.add_argument("--keep", action="store_true", help="make these runs the committed results")
    options = parser.parse_args()
    if options.keep:
        return keep(options.folders, options.baseline)
    return max(judge(folder, options.baseline) for folder in options.folders)


if __name__ == "__main__":
    sys.exit(main())
