"""`tools/outside`: a test that passes alone and fails with ours is found, and nothing else is."""

import json
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import matrix
import pytest
from outside import __main__ as outside
from outside import ranks, suites

SUITE = replace(suites.OWN, package="torch", tests=("t.py",), alone=True)


def outcomes(**tests: str) -> dict[str, Any]:
    return {name: {"outcome": outcome, "text": f"first\nlast of {name}"} for name, outcome in tests.items()}


def judged(monkeypatch: pytest.MonkeyPatch, *runs: dict[str, Any], **more: Any) -> tuple[outside.Result, list[Any]]:
    """The result of a suite whose runs have these outcomes, and the runs that were asked for."""
    left, asked = [*runs], []

    def run(name: str, *arguments: str) -> dict[str, Any]:
        asked.append(arguments)
        return left.pop(0)

    monkeypatch.setattr(outside, "run", run)
    return outside.judge("suite", replace(SUITE, **more)), asked


def test_what_fails_with_ours_alone_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    alone = outcomes(a="passed", b="passed", c="failed", d="skipped", e="passed")
    ours = outcomes(a="passed", b="failed", c="failed", d="skipped")
    result, asked = judged(monkeypatch, alone, ours, outcomes(b="failed"))
    assert asked == [("alone",), ("ours",), ("ours", "b", "e")]
    assert result.differ == {"b": "last of b", "e": "did not run"}
    assert result.alone == {"c": "last of c"}
    assert result.cell == "3 passed, 1 failed, 1 skipped alone; 1 passed, 2 failed, 1 skipped with ours"


def test_what_passes_when_it_runs_again_does_not_differ(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = judged(monkeypatch, outcomes(a="passed"), outcomes(a="failed"), outcomes(a="passed"))
    assert len(asked) == 3
    assert result.differ == {}
    assert result.cell == "1 passed alone; 1 passed with ours"


def test_a_named_difference_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    failing = outcomes(a="failed", b="passed")
    passing = outcomes(a="passed", b="passed")
    result, _ = judged(monkeypatch, passing, failing, failing, known={"a": "it asks for the impossible"})
    assert result.differ == {}
    assert result.cell == "2 passed alone; 1 passed, 1 failed with ours; 1 named differences"


def test_tests_that_compare_themselves_have_to_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    result, asked = judged(monkeypatch, outcomes(a="failed"), outcomes(a="failed"), alone=False)
    assert asked == [("ours",), ("ours", "a")]
    assert result.differ == {"a": "last of a"}


def test_a_suite_without_its_package_says_so() -> None:
    result = outside.judge("suite", replace(SUITE, modules=("no_such_module",)))
    assert result.cell == "not run: ModuleNotFoundError: No module named 'no_such_module'"


def test_the_outcome_of_a_test_is_that_of_all_ranks() -> None:
    def log(*lines: tuple[str, str]) -> str:
        return "".join(json.dumps([*line, f"text of {line[0]}"]) + "\n" for line in lines)

    first = log(("a", "started"), ("a", "passed"), ("b", "passed"), ("c", "skipped"), ("d", "passed"), ("e", "started"))
    second = log(
        ("a", "skipped"), ("b", "started"), ("b", "failed"), ("b", "passed"), ("c", "skipped"), ("e", "passed")
    )
    found = ranks._together([first, second])
    assert {test: one["outcome"] for test, one in found.items()} == {
        "a": "passed", "b": "failed", "c": "skipped", "d": "failed", "e": "failed",
    }  # fmt: skip
    assert found["b"]["text"] == "failed on rank 1: text of b"
    assert found["d"]["text"].startswith("not reached on rank 1")


def git(folder: Path, *command: str) -> None:
    author = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *author, *command], cwd=folder, check=True, capture_output=True)


def test_sources_come_from_a_folder_or_by_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source, clones = suites.Source("who/what", "v1", "WORLD_WHAT"), tmp_path / "clones"
    monkeypatch.setattr(suites, "CLONES", clones)
    origin = tmp_path / "origin"
    origin.mkdir()
    monkeypatch.setenv("WORLD_WHAT", str(origin))
    assert suites.checkout(source) == origin
    git(origin, "init", "-q")
    (origin / "t.py").write_text("1")
    git(origin, "add", ".")
    git(origin, "commit", "-qm", "one")
    with pytest.raises(RuntimeError, match=r"who/what at v1: .*set WORLD_WHAT to a folder or a git repository"):
        suites.checkout(source)
    git(origin, "tag", "v1")
    (origin / "t.py").write_text("2")
    folder = suites.checkout(source)
    assert folder == clones / "who+what-v1"
    assert (folder / "t.py").read_text() == "1"
    monkeypatch.delenv("WORLD_WHAT")
    assert suites.checkout(source) == folder  # without fetching it again


def test_every_row_of_the_page_is_a_suite() -> None:
    rows = json.loads(matrix.RESULTS.read_text()).get("world", {})
    assert rows.keys() <= suites.SUITES.keys()
