"""One part of the suite as a command: cases in; a line per row, targets, a results file and an exit status out.

Every row is printed, and the results file written, as soon as the row is measured; a file whose run was interrupted
says so (``incomplete``). A row that misses its limit, or is worse than the committed figures, is measured again with
as many rounds, pooled with the first, before it counts.
"""

import argparse
import json
import math
import shutil
import sys
import textwrap
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from bench import guard
from bench.timing import figures, geometric_mean, interleaved, quiet_host, versions, write_json
from tritoncomm.bench.settings import matches

__all__ = ["Clock", "Part", "Row", "Run", "Samples", "counts", "line"]

Row = dict[str, Any]  # of the results file
Samples = dict[str, list[float]]  # microseconds by provider
FIXED = {"row", "mode", "us", "ratio", "spread", "limit", "limit_with_spread", "case", "share_of_roof", "target"}
WIDTH, WIDE = 78, 120  # of labels, of a terminal that shows them beside their figures
INDENT = " " * 4
SHOWN = 8  # names of cases, where none is chosen
INTERRUPTED = 130


@dataclass(frozen=True)
class Part:
    """Definition of one part of the suite.

    Attributes:
        name: of the results file.
        cases: labels, or objects that have a ``label``.
        measure: the rows of a case, given what ``host`` provides and the clock; its module's docstring is the help.
        unit: of the times.
        host: what holds while cases are measured.
        rounds: samples of every provider, by default.
        peer: the provider that limits and means refer to; empty for the fastest, None for no means.
        missing: why nothing can be measured here, empty if it can.
        packages: those whose versions count besides torch and Triton.
        targets: what a row misses besides its limit.
        means: largest geometric mean over the rows of some modes, by name.
        budget_s: cases that would begin later are left out.
    """

    name: str
    cases: Sequence[Any]
    measure: Callable[[Any, Any, "Clock"], Iterable[Row]]
    unit: str = "microseconds per call"
    host: Callable[[], AbstractContextManager[Any]] = nullcontext
    rounds: int = 100
    peer: str | None = ""
    missing: Callable[[], str] = str
    packages: tuple[str, ...] = ()
    targets: Callable[[Row], list[str]] = lambda row: []
    means: Mapping[str, tuple[Collection[str], float]] = field(default_factory=dict)
    budget_s: float = math.inf

    def main(self) -> int:
        """The command: 0 all is well, 1 something was missed, 2 nothing was measured, 130 interrupted."""
        options = self.parser().parse_args()
        if reason := self.missing():
            print(f"nothing was measured: {reason}")
            return 2
        run = Run(self, options.rounds, options.only, options.json)
        try:
            run.measure()
        except KeyboardInterrupt:
            print(f"interrupted after {len(run.rows)} rows")
        return run.finish()

    def test(self) -> Callable[..., None]:
        """A test of every case for pytest-benchmark: rows hold their limits; the time is that of the first row's call.

        Ratios to the peers are in ``extra_info``. Where a case has no host calls to repeat (ranks in processes of
        their own), the time is that of measuring it once.
        """
        import pytest  # optional: the commands do without it

        @pytest.mark.timeout(600)  # a case that was not quiet is measured twice, on a machine that may be slow
        @pytest.mark.filterwarnings("ignore")
        @pytest.mark.parametrize("case", self.cases, ids=_label)
        def test_case(benchmark: Any, case: Any) -> None:
            if reason := self.missing():
                pytest.skip(reason)
            clock, rows = Benchmarked(self, self.rounds), []
            with self.host() as host:
                for row in self.measure(case, host, clock):
                    if clock.timed and not rows:  # here, where the groups that the case made still exist
                        call, inner = clock.timed[0]
                        benchmark.pedantic(call, rounds=20, iterations=inner, warmup_rounds=1)
                    rows.append(row)
                    benchmark.extra_info.update({f"{row['row']}, of {peer}": one for peer, one in row["ratio"].items()})
                if not clock.timed:
                    benchmark.pedantic(lambda: list(self.measure(case, host, clock)), rounds=1)
            missed = [line for row in rows for line in self.missed(row)]
            assert not missed, "\n".join(missed)

        return test_case

    def parser(self) -> argparse.ArgumentParser:
        about = (sys.modules[self.measure.__module__].__doc__ or "").partition("\n")[0]
        parser = argparse.ArgumentParser(description=about)
        parser.add_argument("--json", metavar="PATH", help="also write the rows there, with versions")
        parser.add_argument("--rounds", type=int, default=self.rounds)
        parser.add_argument(
            "--only", nargs="+", default=("",), metavar="TEXT", help="only cases whose label has all words of a text"
        )
        return parser

    def ratio(self, row: Row) -> float:
        """Ours over the peer's time."""
        return row["ratio"][self.peer] if self.peer else max(row["ratio"].values())

    def over_limit(self, row: Row) -> list[str]:
        """Describe the limit that a row misses; its spread raises the limit, up to ``limit_with_spread``."""
        limit = row.get("limit")
        if limit is None:
            return []
        peer = self.peer or max(row["ratio"], key=row["ratio"].__getitem__)
        most = max(limit, min(limit + row["spread"].get(peer, 0.0), row.get("limit_with_spread", limit)))
        if row["ratio"][peer] <= most:
            return []
        return [f"{row['row']}: {row['ratio'][peer]:.2f} of {peer}'s time, at most {most:.2f}"]

    def missed(self, row: Row) -> list[str]:
        """Describe the limit, targets and committed figures that a row misses."""
        worse = guard.against_committed(self.name, {"rows": [row]})
        return [*self.over_limit(row), *self.targets(row), *(f"worse: {one}" for one in worse)]

    def mean(self, rows: Iterable[Row], modes: Collection[str] | None = None) -> float:
        return geometric_mean([self.ratio(row) for row in rows if modes is None or row.get("mode") in modes])

    def missed_means(self, rows: Sequence[Row]) -> Iterator[str]:
        for name, (modes, most) in self.means.items():
            mean = self.mean(rows, modes)
            if mean > most:
                yield f"geometric mean, {name}: {mean:.2f} of {self.peer}'s time, at most {most}"

    def content(self, rows: Sequence[Row]) -> dict[str, Any]:
        """The results file."""
        content = {"versions": versions(*self.packages), "unit": self.unit, "rows": list(rows)}
        if self.peer is None:
            return content
        modes = list(dict.fromkeys(row["mode"] for row in rows if "mode" in row))
        mean = {mode: round(self.mean(rows, [mode]), 3) for mode in modes} or round(self.mean(rows), 3)
        return {**content, "geometric_mean": mean}


@dataclass(frozen=True)
class Clock:
    """Makes rows of a part out of samples."""

    part: Part
    rounds: int

    def time(self, row: str, calls: Mapping[str, Callable[[], Any]], inner: int, **more: Any) -> Row:
        """A row of host times: ``rounds`` interleaved samples of ``inner`` calls of every provider."""

        def sample() -> Samples:
            with quiet_host():
                samples = interleaved(list(calls.values()), self.rounds, inner)
            return dict(zip(calls, samples, strict=True))

        return self.row(row, sample, **more)

    def row(self, row: str, sample: Callable[[], Samples], **more: Any) -> Row:
        """A row of samples, taken twice where the first do not hold."""
        samples = sample()
        result = figures(row, samples, **more)
        if self.part.over_limit(result) or guard.is_worse(self.part.name, result):
            for provider, again in sample().items():
                samples[provider] += again
            result = figures(row, samples, **more)
        return result


@dataclass(frozen=True)
class Benchmarked(Clock):
    """A clock that remembers our calls, so that pytest-benchmark can repeat one."""

    timed: list[tuple[Callable[[], Any], int]] = field(default_factory=list)  # and the calls in a sample

    def time(self, row: str, calls: Mapping[str, Callable[[], Any]], inner: int, **more: Any) -> Row:
        self.timed.append((calls["ours"], inner))
        return super().time(row, calls, inner, **more)


@dataclass
class Run:
    """One run of a part: rows so far, what they missed, which cases failed, and which there was no time for."""

    part: Part
    rounds: int
    only: Sequence[str] = ("",)
    path: str | Path | None = None
    more: Mapping[str, Any] = field(default_factory=dict)  # of the results file
    rows: list[Row] = field(default_factory=list)
    missed: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    complete: bool = False

    def continue_from(self, path: str | Path) -> None:
        """Keep the rows of an earlier run, and measure only the cases that it had no time for."""
        earlier = json.loads(Path(path).read_text())
        self.rows += earlier["rows"]
        labels = set(earlier.get("left_out", ()))
        self.part = replace(self.part, cases=tuple(case for case in self.part.cases if _label(case) in labels))

    def measure(self) -> None:
        """Measure the cases that are asked for; one that raises is reported, and the others go on."""
        cases = [case for case in self.part.cases if any(matches(words, _label(case)) for words in self.only)]
        started = time.monotonic()
        clock = Clock(self.part, self.rounds)
        with warnings.catch_warnings(), self.part.host() as host:
            warnings.simplefilter("ignore")
            for case in cases:
                if time.monotonic() - started > self.part.budget_s:
                    self.left_out.append(_label(case))
                    continue
                try:
                    for row in self.part.measure(case, host, clock):
                        self.add(row)
                except Exception:  # the other rows are worth having
                    self.failed.append(f"{_label(case)}: {traceback.format_exc(limit=-4).strip()}")
                    print("FAILED:", self.failed[-1], flush=True)
        self.complete = True

    def add(self, row: Row) -> None:
        missed = self.part.missed(row)
        self.rows.append(row)
        self.missed += missed
        print(line(row, ["MISSED"] * bool(missed)), flush=True)
        self.write()

    def write(self) -> None:
        if self.path and self.rows:
            state = {"left_out": self.left_out, "failed": self.failed, "incomplete": not self.complete}
            state = {name: value for name, value in state.items() if value}
            write_json(self.path, {**self.part.content(self.rows), **self.more, **state})

    def finish(self) -> int:
        """Print the means and what was missed, and write the results; the exit status."""
        if not self.rows and not self.failed and not self.left_out:
            labels = [_label(case) for case in self.part.cases]
            more = [f"and {len(labels) - SHOWN} more"] * (len(labels) > SHOWN)
            print(textwrap.fill(f"cases: {'; '.join([*labels[:SHOWN], *more])}", 80))
            print("no case has all words of --only in its name, the text before a row's mode")
            return 2
        if self.left_out:
            print(f"{len(self.left_out)} cases left out, {self.part.budget_s} s are over: {'; '.join(self.left_out)}")
        if self.rows and self.part.peer is not None:
            mean = self.part.content(self.rows)["geometric_mean"]
            for mode, value in (mean if isinstance(mean, dict) else {"": mean}).items():
                cells = [" " * 12, f"{value:5.2f} of {self.part.peer or 'the fastest'}"]
                print(_fitted(" ".join(filter(None, ("geometric mean", mode))), cells))
        if self.complete:
            self.missed += self.part.missed_means(self.rows)
        for what in (*self.missed, *(f"failed: {one.splitlines()[0]} {one.splitlines()[-1]}" for one in self.failed)):
            print("MISSED:", what)
        print(f"{len(self.rows)} rows, {len(self.missed)} targets missed, {len(self.failed)} failed")
        self.write()
        if self.path:
            print("written:", self.path)
        if not self.complete:
            return INTERRUPTED
        if not self.rows and not self.failed:
            return 2
        return 1 if self.missed or self.failed else 0


def _label(case: Any) -> str:
    return case if isinstance(case, str) else case.label


def line(row: Row, more: Sequence[str] = ()) -> str:
    """A row on the terminal: ours at p20, the ratio to every peer of p20 with its spread, counts, and ``more``."""
    cells = [f"{row['us']['ours']['p20']:9.1f} us"]
    if row.get("target") is not None:
        cells.append(f"{row['share_of_roof']:.2f} of the roof, target {row['target']:.2f}")
    for peer, ratio in row["ratio"].items():
        cells.append(f"{ratio:5.2f} ±{row['spread'][peer] / 2:.2f} of {peer}")
    cells += [f"{label} {told}" for label, told in counts(row, list(row["us"])).items()]
    return _fitted(row["row"], [*cells, *more])


def _fitted(label: str, cells: Sequence[str]) -> str:
    """One line, with columns for the eye; on a narrow terminal the label, and the cells below it as they fit."""
    columns = shutil.get_terminal_size(fallback=(WIDE, 0)).columns  # COLUMNS, or those of the terminal
    if columns >= WIDE:
        return "  ".join([f"{label:{WIDTH}} {cells[0]}", *cells[1:]])
    lines = [label]
    for cell in cells:
        indented = lines[-1].startswith(INDENT)
        if indented and len(lines[-1]) + 2 + len(cell.strip()) <= columns:
            lines[-1] += f"  {cell.strip()}"
        elif cell.strip():
            lines.append(f"{INDENT}{cell.strip()}")
    return "\n".join(lines)


def counts(row: Row, providers: Collection[str]) -> dict[str, str]:
    """Counts of a row besides time, by label: ``ours / peer / ...``, several figures with commas between them."""
    by_label: dict[str, dict[str, str]] = {}
    for name, by_provider in row.items():
        if name in FIXED or not isinstance(by_provider, dict) or not set(by_provider) <= set(providers):
            continue
        for provider, value in by_provider.items():
            for label, figure in _leaves(name, value):
                by_label.setdefault(label, {})[provider] = figure
    return {label: " / ".join(values.get(p, "-") for p in providers) for label, values in by_label.items()}


def _leaves(label: str, value: Any) -> Iterator[tuple[str, str]]:
    """A number is one leaf, and so is a dict of numbers; a dict of dicts has one leaf per key."""
    if not isinstance(value, dict):
        yield label, f"{value:g}"
    elif any(isinstance(inner, dict) for inner in value.values()):
        for key, inner in value.items():
            yield from _leaves(key, inner)
    else:
        yield f"{label} ({', '.join(value)})", ", ".join(f"{number:.3g}" for number in value.values())
