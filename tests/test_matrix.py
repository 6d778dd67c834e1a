"""`tools/matrix.py`: the table of versions says what has run, and nothing else."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import matrix
import pytest

PASSES, FAILS, SKIPS = "def test_a(): pass\n", "def test_b(): assert 0\n", "def test_c(): __import__('pytest').skip()\n"


def test_the_page_is_made_of_the_committed_results() -> None:
    assert matrix.PAGE.read_text() == matrix.page(json.loads(matrix.RESULTS.read_text()))


def test_cells_of_the_page() -> None:
    counts = {"failed": 0, "passed": 3, "skipped": 2, "date": "2026-01-02", "commit": "abc"}
    parts = {"0.16.1": counts, "0.17.1": {**counts, "failed": 1}, "0.19.2": {**counts, "passed": 0, "skipped": 0}}
    text = matrix.page({"oldest": {"versions": {"python": "3.11.7", "torch": "2.11.0"}, "parts": parts}})
    assert "| Python | not run | 3.11.7 | not run |" in text
    assert "| Triton | not run | not installed | not run |" in text
    assert "| 0.16.1 | 3.10 or newer | not run | 3 passed, 2 skipped (2026-01-02, abc) | not run |" in text
    assert "| 1 failed, 3 passed, 2 skipped (2026-01-02, abc) |" in text
    assert "| 0.18.2 | 3.12 or newer | not run | not run | not run |" in text
    assert "| no test ran (2026-01-02, abc) |" in text


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the default environment, whose interpreter is this one; its pytest starts without plugins."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    python = tmp_path / matrix.ENVIRONMENTS["default"] / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return tmp_path


def _measured(root: Path, text: str, results: dict[str, Any]) -> bool:
    path = root / "test_it.py"
    path.write_text(text)
    arguments = [str(path), f"--rootdir={root}", "-p", "no:cacheprovider", "-c", os.devnull]
    saved: list[str] = []
    good = matrix.measure(
        root, results, ["default"], {"tests": arguments}, "abc", lambda: saved.append(json.dumps(results, default=str))
    )
    assert saved == [json.dumps(results, default=str)]
    return good


def test_a_run_is_counted_and_other_cells_are_kept(root: Path) -> None:
    results: dict[str, Any] = {}
    assert _measured(root, PASSES + SKIPS, results)
    row = results["default"]
    assert {kind: row["parts"]["tests"][kind] for kind in ("failed", "passed", "skipped")} == {
        "failed": 0, "passed": 1, "skipped": 1,
    }  # fmt: skip
    assert row["versions"]["python"] == sys.version.split()[0]
    assert row["versions"]["numpy"]
    row["parts"]["0.19.2"] = other = object()
    assert not _measured(root, PASSES + FAILS, results)
    assert results["default"]["parts"]["tests"]["failed"] == 1
    assert results["default"]["parts"]["0.19.2"] is other
    row["versions"]["torch"] = "0.1"
    assert not _measured(root, "raise SystemExit(3)", results), "nothing was collected"
    assert results["default"]["parts"].keys() == {"tests"}, "cells of other versions are no results"
    assert results["default"]["parts"]["tests"]["failed"] == 1


def test_an_environment_that_is_asked_for_and_missing_is_an_error(root: Path, capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit):
        matrix.main(["--root", str(root), "--environments", "default", "oldest"])
    assert "there is no .venv-oldest in" in capsys.readouterr().err
