"""The runner of the GPU tests: order, crashes, hangs, its time, and what it needs on a machine with a GPU."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gpu_run
import pytest

ROOT = Path(__file__).parents[2]
CONFTEST = """
import gpu_run, pytest
gpu_run._gpu_answers = lambda: False
def pytest_addoption(parser): parser.addoption("--device")
"""
TESTS = """
import os, pytest, signal, time
def test_first(): pass
@pytest.mark.parametrize("n", [1, 2])
def test_crashes(n):
    if n == 1: os.kill(os.getpid(), signal.SIGSEGV)
def test_hangs(): time.sleep(60)
def test_after(): pass
def test_fails(): assert [1] == [2]
def test_left_out(): pytest.skip("no")
def test_last(): pass
"""


def run(tmp_path: Path, seconds: float = 60, each: float = 3) -> list[dict[str, Any]]:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    path, progress, deadline = tmp_path / "test_it.py", tmp_path / "progress", time.monotonic() + seconds
    command = gpu_run.command_for([str(path)], "cpu", progress, deadline, each)
    seen: list[Any] = []
    runner = gpu_run.Run(command, gpu_run.Progress(progress), deadline, each, seen.append, tmp_path / "log")
    assert runner.run() == seen[-1]
    return seen[-1]


@pytest.mark.slow
def test_a_crash_or_a_hang_ends_one_test_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    results = {result["test"].rpartition("::")[2]: result for result in run(tmp_path)}
    names = ["first", "crashes[1]", "crashes[2]", "hangs", "after", "fails", "left_out", "last"]
    assert list(results) == [f"test_{name}" for name in names]
    outcomes = [result["outcome"] for result in results.values()]
    assert outcomes == ["passed", "failed", "passed", "failed", "passed", "failed", "skipped", "passed"]
    assert results["test_crashes[1]"]["message"] == "the process ended with SIGSEGV"
    assert re.fullmatch(r"did not end within \d s", results["test_hangs"]["message"])
    assert "assert [1] == [2]" in results["test_fails"]["message"]
    printed = capsys.readouterr().out
    assert re.search(r"::test_crashes +1 failed, 1 passed \(.*\n +FAILED: .*test_crashes\[1\]\n", printed)
    assert f"the process ended with {gpu_run.LOST}; another process goes on" in printed


def test_what_there_is_no_time_for_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (result,) = run(tmp_path, 0)
    assert (result["outcome"], result["message"]) == ("skipped", gpu_run.LATE)
    assert "all that has not begun" in capsys.readouterr().out
    (tmp_path / "progress").touch()
    with pytest.raises(pytest.skip.Exception, match=gpu_run.LATE):
        gpu_run.Plugin(gpu_run.Progress(tmp_path / "progress"), time.monotonic() - 1).pytest_runtest_setup()


def test_tests_that_never_begin_are_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_run, "START_S", 110)  # a busy machine
    (tmp_path / "test_it.py").write_text("import no_such_module\n")
    with pytest.raises(RuntimeError, match=r"began no test: the process ended with 2\n(.*\n)*.*no_such_module"):
        run(tmp_path, 110)


def test_every_test_of_the_device_has_its_place_in_the_order() -> None:
    tests = {
        f"{path.relative_to(ROOT)}::{node.name}"
        for folder in ("gpu", "kernels", "core", "mappings")
        for path in (ROOT / "tests" / folder).glob("test_*.py")
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
        if "device" in [argument.arg for argument in node.args.args]
    }
    assert tests == {test for tests in gpu_run.ORDER.values() for test in tests}


@pytest.mark.parametrize(
    ("name", "only"), [("test", "test_p2p"), pytest.param("ranks", "backward", marks=pytest.mark.slow)]
)
def test_the_command_needs_nothing_but_pytest(tmp_path: Path, name: str, only: str) -> None:
    """A machine with a GPU may have neither hypothesis nor the plugins that the settings name."""
    for module in ("hypothesis", "pytest_timeout", "megatron"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not installed')\n")
    paths = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "kernels")))
    env = os.environ | {"PYTHONPATH": paths, "OUT": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "tests/helpers/gpu_run.py", name, "--device", "cpu", "--only", only]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n1 passed, 0 failed, 0 skipped, " in done.stdout
    (written,) = json.loads((tmp_path / f"gpu_{name}.json").read_text())["tests"]
    assert (written["outcome"], only in written["test"]) == ("passed", True)


def test_without_a_gpu_nothing_is_tested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "test"])
    monkeypatch.setattr(gpu_run.torch.cuda, "is_available", lambda: False)
    assert gpu_run.main() == 2
    assert "nothing was tested" in capsys.readouterr().out
