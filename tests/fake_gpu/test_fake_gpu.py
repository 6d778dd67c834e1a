"""Compiled kernels, launched by Triton and run as PTX on the CPU, against the reference; no GPU takes part."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.fake_gpu import check

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


def run_checks(*arguments: str) -> subprocess.CompletedProcess[str]:
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    command = [sys.executable, "-m", "bench.fake_gpu.check", *arguments]
    return subprocess.run(command, env=kept | {"PYTHONPATH": paths}, capture_output=True, text=True)


def assert_all_held(done: subprocess.CompletedProcess[str], least: int) -> None:
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"^(\d+) checks, 0 failed", done.stdout, re.MULTILINE)
    assert counted is not None, done.stdout
    assert int(counted[1]) >= least, done.stdout


@needs_compiler
def test_compiled_kernels() -> None:
    groups = ("faults", "variants", "by value", "ordinary", "widths", "reduce")
    done = run_checks("--quick", *(f"--only={group}" for group in groups))
    assert_all_held(done, 130)
    assert len(re.findall(r"checks, 0 failed \(", done.stdout)) == len(groups), done.stdout


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("capability", ["8.0", "9.0", "10.0"])
def test_compiled_kernels_of_every_kind(capability: str) -> None:
    assert_all_held(run_checks("--capability", capability), 5400)


def test_it_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["check", "--quick"])
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert check.main() == 2
    assert "nothing was tested" in capsys.readouterr().out
