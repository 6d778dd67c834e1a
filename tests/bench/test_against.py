"""Two commits compared: a slowdown is seen, noise is not, a worse row is measured again, a missing part is named."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from bench import against
from bench.against import NotMeasuredError, Rows, compare_part

BASE, HERE = Path("base"), Path("here")


def row(name: str, ratio: float, **more: Any) -> dict[str, Any]:
    return {"row": name, "ratio": {"peer": ratio}, "us": {"ours": {"p20": 10 * ratio}}, **more}


def runner(ratios: dict[Path, Iterator[float] | float], log: list[tuple[Path, str]]) -> Callable[..., Rows]:
    """A part of one row "a, forward" and one row "b", whose ratio stays 1; the ratios of the first are given."""

    def run(tree: Path, part: str, only: str) -> Rows:
        log.append((tree, only))
        given = ratios[tree]
        ratio = given if isinstance(given, float) else next(given)
        rows = [row("a, forward", ratio, mode="forward"), row("b", 1.0)]
        return {line["row"]: line for line in rows if only in line["row"]}

    return run


def test_a_slowdown_is_seen_after_it_was_measured_again() -> None:
    log: list[tuple[Path, str]] = []
    first, second = compare_part("p", BASE, HERE, runner({BASE: 0.5, HERE: 0.6}, log), pairs=2)
    assert (first.row, first.is_worse, round(first.quotient, 2)) == ("a, forward", True, 1.2)
    assert (second.row, second.is_worse) == ("b", False)
    assert log == [(BASE, ""), (HERE, ""), (HERE, ""), (BASE, ""), *((t, "a") for t in (BASE, HERE, HERE, BASE))]
    assert "WORSE" in str(first)
    assert "WORSE" not in str(second)


def test_one_slow_moment_is_measured_again_and_passes() -> None:
    here = iter([0.6, 0.5, 0.5])
    first, _ = compare_part("p", BASE, HERE, runner({BASE: 0.5, HERE: here}, []), pairs=1)
    assert first.is_worse is False, "two measurements, of which one was slow: the spread is as large as the difference"


@pytest.mark.parametrize("ratios", [[0.5, 0.55, 0.52], [0.5, 0.7, 0.6], [0.4, 0.4, 0.4]])
def test_noise_is_no_slowdown(ratios: list[float]) -> None:
    first, _ = compare_part("p", BASE, HERE, runner({BASE: 0.5, HERE: iter(2 * ratios)}, []), pairs=3)
    assert not first.is_worse


def test_a_small_slowdown_in_every_pair_is_seen() -> None:
    first, _ = compare_part("p", BASE, HERE, runner({BASE: 0.5, HERE: 0.52}, []), pairs=3)
    assert first.is_worse, "1.04 each time"
    first, _ = compare_part("p", BASE, HERE, runner({BASE: 0.5, HERE: 0.505}, []), pairs=3)
    assert not first.is_worse


def test_many_worse_rows_are_measured_again_with_their_part() -> None:
    log = []

    def run(tree: Path, part: str, only: str) -> Rows:
        log.append(only)
        return {str(i): row(str(i), 2.0 if tree == HERE else 1.0) for i in range(against.SINGLE + 1)}

    assert all(line.is_worse for line in compare_part("p", BASE, HERE, run, pairs=1))
    assert log == [""] * 4


def test_rows_and_peers_of_one_tree_only_are_left_out() -> None:
    def run(tree: Path, part: str, only: str) -> Rows:
        own = row(f"only in {tree}", 1.0)
        other = row("other peers", 1.0) | {"ratio": {str(tree): 1.0}}
        return {line["row"]: line for line in (own, other, row("both", 1.0))}

    assert [line.row for line in compare_part("p", BASE, HERE, run, pairs=1)] == ["both"]
    with pytest.raises(NotMeasuredError, match="no row in common"):
        compare_part("p", BASE, HERE, lambda tree, part, only: {str(tree): row(str(tree), 1.0)})


SCRIPT = """
import json, sys
path = sys.argv[sys.argv.index("--json") + 1]
json.dump({"rows": [{"row": "a", "ratio": {"peer": RATIO}, "us": {"ours": {"p20": 1.0}}}]}, open(path, "w"))
"""


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Two commits, "old" and the working tree; part "one" becomes slower, part "two" is new, part "dies" never runs."""
    bench = tmp_path / "bench"
    bench.mkdir()

    def git(*arguments: str) -> None:
        identity = ("-c", "user.name=x", "-c", "user.email=x@y")
        subprocess.run(["git", "-C", str(tmp_path), *identity, *arguments], check=True, capture_output=True)

    (bench / "bench_one.py").write_text(SCRIPT.replace("RATIO", "0.5"))
    (bench / "bench_dies.py").write_text("raise SystemExit('no compiler')")
    git("init")
    git("add", ".")
    git("commit", "-m", "old")
    git("tag", "old")
    (bench / "bench_one.py").write_text(SCRIPT.replace("RATIO", "0.7"))
    (bench / "bench_two.py").write_text(SCRIPT.replace("RATIO", "0.7"))
    return tmp_path


def test_the_command_on_a_repository(repository: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert against.main(["old", "--pairs", "1", "--parts", "one", "two", "dies"], repository) == 1
    printed = capsys.readouterr().out
    assert "1.40 ± 0.00  WORSE" in printed
    assert "two: not comparable: there is no bench/bench_two.py in old" in printed
    assert "dies: not comparable: bench/bench_dies.py in old: no compiler" in printed
    assert against.main(["old", "--pairs", "1", "--parts", "two"], repository) == 2
    listed = subprocess.run(["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True)
    assert len(listed.stdout.splitlines()) == 1
    with pytest.raises(ValueError, match="git has no worktree of nothing"):
        against.main(["nothing"], repository)
