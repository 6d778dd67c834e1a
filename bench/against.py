"""Two commits on one machine: ``python -m bench.against BASE`` measures this tree and BASE alternately.

Both trees run their own benchmark files, in alternating processes of a few rounds each (base, here, here, base, ...),
so both see the same load of the machine. Only the results files are compared, row by row: the ratio to a peer that was
measured in the same rounds, ours here over ours at the base. The figure of a row is the median over the pairs of
processes, of all peers that both have; its spread is the distance between the 20 % and the 80 % quantile. A row is
worse above 1.02 and the spread: that much the same code differs by in two places of memory. Rows that are worse are
measured again, as often, before they fail. Exits 1 when a row is worse, 2 when nothing could be compared.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.guard import rows_of
from bench.timing import geometric_mean, quantile

__all__ = ["ALLOWED", "PARTS", "Comparison", "NotMeasuredError", "compare_part", "main", "run_part", "worktree"]

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("mappings", "p2p", "redistribution", "tensor", "launch")  # host time
PAIRS, ROUNDS = 8, 6  # processes of each commit, and rounds in each: processes differ more than their rounds
ALLOWED = 0.02
SINGLE = 3  # so many rows are measured again one by one; more, with their whole part

Rows = dict[str, dict[str, Any]]
Run = Callable[[Path, str, str], Rows]  # tree, part, only rows with this in their name


class NotMeasuredError(RuntimeError):
    """A tree has no such part, or the part did not run."""


@dataclass
class Comparison:
    """One row over all pairs of processes: the quotients of the ratios to a peer, and microseconds of both."""

    row: str
    only: str  # the label that selects it
    quotients: list[float] = field(default_factory=list)
    base_us: list[float] = field(default_factory=list)
    here_us: list[float] = field(default_factory=list)

    def add(self, base: dict[str, Any], here: dict[str, Any]) -> None:
        peers = base["ratio"].keys() & here["ratio"].keys()
        self.quotients.append(geometric_mean([here["ratio"][peer] / base["ratio"][peer] for peer in peers]))
        self.base_us.append(base["us"]["ours"]["p20"])
        self.here_us.append(here["us"]["ours"]["p20"])

    @property
    def quotient(self) -> float:
        return quantile(self.quotients, 0.5)

    @property
    def spread(self) -> float:
        return quantile(self.quotients, 0.8) - quantile(self.quotients, 0.2)

    @property
    def is_worse(self) -> bool:
        return self.quotient > 1 + ALLOWED + self.spread

    def __str__(self) -> str:
        times = f"{quantile(self.here_us, 0.5):9.1f} / {quantile(self.base_us, 0.5):9.1f} us"
        return f"{self.row:90} {times}  {self.quotient:5.2f} ± {self.spread / 2:.2f}{'  WORSE' * self.is_worse}"


def compare_part(part: str, base: Path, here: Path, run: Run, pairs: int = PAIRS) -> list[Comparison]:
    """All rows that both trees have; those that are worse are measured again.

    Raises:
        NotMeasuredError: by ``run``, or the trees have no row and peer in common.
    """
    compared: dict[str, Comparison] = {}
    _measure(compared, part, base, here, run, pairs, "")
    if not compared:
        raise NotMeasuredError("the trees have no row in common")
    labels = sorted({one.only for one in compared.values() if one.is_worse})
    for only in labels if len(labels) <= SINGLE else [""]:
        _measure(compared, part, base, here, run, pairs, only)
    return list(compared.values())


def _measure(
    compared: dict[str, Comparison], part: str, base: Path, here: Path, run: Run, pairs: int, only: str
) -> None:
    """Add the quotients of so many pairs of processes; which tree comes first alternates."""
    for pair in range(pairs):
        order = (base, here) if pair % 2 == 0 else (here, base)
        rows = {tree: run(tree, part, only) for tree in order}
        for name, row in rows[base].items():
            other = rows[here].get(name)
            if other is not None and row["ratio"].keys() & other["ratio"].keys():
                label = name.removesuffix(f", {row['mode']}") if "mode" in row else name
                compared.setdefault(name, Comparison(name, label)).add(row, other)


def run_part(tree: Path, part: str, only: str, rounds: int = ROUNDS) -> Rows:
    """Rows of one part, measured by the tree's own benchmark file in a process of its own.

    Raises:
        NotMeasuredError: the tree has no such file, or the file wrote no results.
    """
    script = tree / "bench" / f"bench_{part}.py"
    if not script.is_file():
        raise NotMeasuredError(f"there is no bench/{script.name} in {tree.name}")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tree), str(tree / "kernels")))}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "rows.json"
        command = [sys.executable, str(script), "--json", str(path), "--rounds", str(rounds), "--only", only]
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, check=False)
        if not path.is_file():
            last = (done.stdout + done.stderr).strip().splitlines()[-1:]
            raise NotMeasuredError(f"bench/{script.name} in {tree.name}: {' '.join(last) or f'exit {done.returncode}'}")
        return {row["row"]: row for row in rows_of(json.loads(path.read_text()))}


@contextmanager
def worktree(commit: str, root: Path = ROOT) -> Iterator[Path]:
    """The commit in a git worktree that is removed afterwards."""
    with tempfile.TemporaryDirectory() as scratch:
        tree = Path(scratch) / commit.replace("/", "-")
        git = ["git", "-C", str(root), "worktree"]
        added = subprocess.run(
            [*git, "add", "--detach", str(tree), commit], capture_output=True, text=True, check=False
        )
        if added.returncode:
            raise ValueError(f"git has no worktree of {commit}: {added.stderr.strip()}")
        try:
            yield tree
        finally:
            subprocess.run([*git, "remove", "--force", str(tree)], capture_output=True, check=True)


def main(arguments: Sequence[str] | None = None, root: Path = ROOT) -> int:
    parser = argparse.ArgumentParser(description="This tree against another commit, measured alternately.")
    parser.add_argument("base", help="the commit to compare with")
    parser.add_argument("--parts", nargs="+", default=PARTS, help=f"of {', '.join(PARTS)}")
    parser.add_argument("--pairs", type=int, default=PAIRS, help="processes of each commit")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds in each process")
    options = parser.parse_args(arguments)

    def run(tree: Path, part: str, only: str) -> Rows:
        return run_part(tree, part, only, options.rounds)

    compared: list[Comparison] = []
    with worktree(options.base, root) as base:
        for part in options.parts:
            try:
                lines = compare_part(part, base, root, run, options.pairs)
            except NotMeasuredError as error:
                print(f"{part}: not comparable: {error}", flush=True)
                continue
            mean = geometric_mean([line.quotient for line in lines])
            print(f"{part}: here / {options.base}, us at p20 and quotient of the ratios to the peers; mean {mean:.2f}")
            print(*lines, sep="\n", flush=True)
            compared += lines
    worse = [line for line in compared if line.is_worse]
    print(f"{len(compared)} rows compared, {len(worse)} worse by more than {ALLOWED:.0%} beyond their spread")
    if not compared:
        return 2
    return 1 if worse else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the worktree is removed then, too
    sys.exit(main())
