"""`python -m bench` as a user runs it, and as it refuses."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import without_launcher

import bench.__main__ as command
from bench import pictures

ROOT = Path(__file__).parents[2]


def run(*arguments: str, columns: int = 80) -> subprocess.CompletedProcess[str]:
    """The command in a process of its own, on a terminal of so many columns."""
    variables = without_launcher(os.environ) | {"COLUMNS": str(columns), "PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}"}
    variables.pop("TRITON_INTERPRET", None)
    words = [sys.executable, "-m", "bench", *arguments]
    return subprocess.run(words, cwd=ROOT, env=variables, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.skipif(shutil.which("cc") is None or torch.cuda.is_available(), reason="part launch needs cc and no GPU")
@pytest.mark.slow
def test_a_part_runs_and_is_drawn(tmp_path: Path) -> None:
    done = run("launch", "--only", "launch, reduce", "--rounds", "10", "--plot", "--out", str(tmp_path))
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert lines[1] == "launch, reduce"
    assert "of fn[grid](...)" in lines[2]
    assert max(len(line) for line in lines if not line.startswith("drawn:")) <= 80
    assert json.loads((tmp_path / "cpu" / "launch.json").read_text())["rows"]
    assert (tmp_path / "cpu-launch-times.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (tmp_path / "cpu-launch-times.svg").read_text()


def test_help_and_parts_fit_80_columns(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit):
        command.main(["--help"])
    told = capsys.readouterr().out
    assert "python -m bench p2p" in told.split("examples:")[1]
    assert "exits with 0" in told
    assert max(map(len, told.splitlines())) <= 80
    assert command.main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert [line.split()[0] for line in listed.splitlines()] == command.parts()
    assert ("(needs a GPU)" in listed) is not torch.cuda.is_available()
    assert sorted(command.PARTS) == sorted(command.parts())
    assert max(map(len, listed.splitlines())) <= 80


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("nothing",), "no part 'nothing'; --list shows them"),
        (("kernels", "--rounds", "0"), "--rounds must be 1 or more"),
        (("gpu",), "part gpu needs a CUDA device"),
        (("kernels", "--plot"), "--plot needs matplotlib: pip install -e '.[bench]'"),
    ],
)
def test_bad_arguments_are_one_sentence(
    arguments: Sequence[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(pictures, "find_spec", lambda name: None)
    with pytest.raises(SystemExit) as stopped:
        command.main(arguments)
    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("status", "missed", "last", "check", "code", "words"),
    [
        (0, (), "", True, 0, ""),
        (1, ("x: 2.00 of Megatron's time",), "", False, 0, "missed, p2p: x: 2.00"),
        (1, ("worse: a [b]: 0.800",), "", True, 1, "missed, p2p: worse: a [b]: 0.800"),
        (2, (), "megatron-core is not installed", False, 2, "p2p: megatron-core is not installed"),
        (1, (), "RuntimeError: broken", False, 1, "p2p did not run: RuntimeError: broken"),
    ],
)
def test_the_answer_of_a_part_is_told(
    status: int, missed: tuple[str, ...], last: str, check: bool, code: int, words: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.setattr(command, "run", lambda *_: command.Outcome("p2p", status, missed, last))
    assert command.main(["p2p", *(["--check"] if check else [])]) == code
    assert words in capsys.readouterr().out


def test_share_of_the_roof_is_drawn_over_size(tmp_path: Path) -> None:
    us = {"ours": {"p20": 9.0, "median": 9.5, "p80": 11.0}}
    rows: list[dict[str, Any]] = [
        {
            "row": f"{op} {mib}", "us": us, "ratio": {"roof": 1.1}, "spread": {"roof": 0.1}, "share_of_roof": 0.9,
            "case": {"op": op, "nbytes": mib * 2**20, "sweep": "size"},
        }
        for op in ("pack", "reduce") for mib in (1, 64)
    ]  # fmt: skip
    made = pictures.draw("gpu/kernels", rows, tmp_path)
    assert [path.name for path in made] == [
        f"gpu-kernels-{kind}.{end}" for kind in ("times", "roof") for end in ("png", "svg")
    ]
    (axes,) = pictures._roof("x", rows).axes
    assert [line.get_label() for line in axes.lines[:2]] == ["pack", "reduce"]
    assert list(axes.lines[0].get_xdata()) == [1, 64]
