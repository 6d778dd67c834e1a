"""The runner of the GPU tests: order, crashes, hangs, its time, and what it needs on a machine with a GPU."""

import ast
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gpu_run
import pytest

from bench import device

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


def run(
    tmp_path: Path, seconds: float = 60, each: float = 3, asked: Sequence[str] = ("test_it.py",)
) -> list[dict[str, Any]]:
    (tmp_path / "conftest.py").write_text(CONFTEST)
    progress, deadline = gpu_run.Progress(tmp_path / "progress"), time.monotonic() + seconds
    progress.path.unlink(missing_ok=True)
    progress.add(asked=[str(tmp_path / name) for name in asked])
    command = gpu_run.command_for("cpu", progress, deadline, each)
    seen: list[Any] = []
    runner = gpu_run.Run(command, progress, deadline, each, seen.append, tmp_path / "log")
    assert runner.run() == seen[-1]
    return seen[-1]


def statuses(results: list[dict[str, Any]]) -> dict[str, str]:
    return {result["test"].rpartition("/")[2]: result["outcome"] for result in results}


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


@pytest.mark.slow
def test_a_missing_module_or_test_fails_and_the_others_run(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("import no_such_module\ndef test_one(): pass\n")
    (tmp_path / "test_other.py").write_text("def test_two(): pass\ndef test_three(): pass\n")
    names = ["test_it.py::test_one", *(f"test_other.py::test_{name}" for name in ("three", "gone", "two"))]
    results = run(tmp_path, 110, 110, names)
    assert statuses(results) == {
        "test_it.py": "failed",
        "test_other.py::test_three": "passed",
        "test_other.py::test_two": "passed",
        "test_it.py::test_one": "failed",
        "test_other.py::test_gone": "failed",
    }
    assert "no_such_module" in results[0]["message"]
    assert "did not collect it" in results[-1]["message"]
    assert gpu_run.summary(results) == (["2 passed, 3 failed, 0 skipped"], gpu_run.FAILED)


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import os; os._exit(1)",
        pytest.param("import os; os._exit(0)", marks=pytest.mark.slow),
        pytest.param("raise ImportError('broken plugin')", marks=pytest.mark.slow),
    ],
)
def test_a_pytest_that_dies_before_the_first_test_is_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], code: str
) -> None:
    """Its exit status proves nothing: 1 is also that of an uncaught exception."""
    (tmp_path / "test_it.py").write_text("def test_one(): pass\n")
    monkeypatch.setattr(sys.modules[__name__], "CONFTEST", f"{code}\n")
    (result,) = run(tmp_path, 110, 110)
    assert (result["test"], result["outcome"]) == ("pytest", "failed")
    assert "pytest began no test" in capsys.readouterr().out
    assert gpu_run.summary([result])[1] == gpu_run.FAILED


def test_the_summary_says_in_words_what_did_not_run() -> None:
    passed = {"test": "a.py::test_a", "outcome": "passed", "message": ""}
    pair = {"test": "b.py::test_b[1]", "outcome": "skipped", "message": "Skipped: needs two GPUs"}
    late = {"test": "c.py::test_c", "outcome": "skipped", "message": f"Skipped: {gpu_run.LATE}"}
    lines = ["1 passed, 0 failed, 2 skipped", "not run: test_b: needs two GPUs"]
    assert gpu_run.summary([passed, pair, pair]) == (lines, gpu_run.PASSED)
    assert gpu_run.summary([passed, late])[1] == gpu_run.LATE_STATUS
    assert gpu_run.summary([passed, late, {**passed, "outcome": "failed"}])[1] == gpu_run.FAILED
    assert gpu_run.summary([])[1] == gpu_run.FAILED


def parts(tmp_path: Path, **codes: int | str) -> tuple[int, list[str]]:
    """Exit status of parts that end with these codes, and the names of those that ran."""
    made = []
    for name, code in codes.items():
        end = code if isinstance(code, str) else f"exit({code})"
        text = f"open({str(tmp_path / 'ran')!r}, 'a').write('{name} '); {end}"
        made.append(gpu_run.Part(name, ("-c", text), 4, decides=name in ("test", "ranks")))
    status = gpu_run.run_parts(made, tmp_path)
    return status, (tmp_path / "ran").read_text().split()


def test_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert parts(tmp_path / ".", test=0, bench=0) == (gpu_run.PASSED, ["test", "bench"])
    for codes, status, ran in (
        ({"test": 1, "bench": 0}, gpu_run.FAILED, ["test"]),
        ({"test": 3, "bench": 0}, gpu_run.LATE_STATUS, ["test", "bench"]),
        ({"test": 3, "bench": 2, "tune": 0}, gpu_run.FAILED, ["test", "bench", "tune"]),
        ({"bench": -9, "tune": 3}, gpu_run.FAILED, ["bench", "tune"]),
    ):
        (tmp_path / "ran").unlink()
        assert parts(tmp_path, **codes) == (status, ran), codes
    capsys.readouterr()
    (tmp_path / "ran").unlink()
    assert parts(tmp_path, ranks="import time; time.sleep(60)", tune=0) == (gpu_run.FAILED, ["ranks"])
    shown = capsys.readouterr().out
    assert "ranks    FAILED: it did not end within 4 s" in shown
    assert "tune     not run, because ranks failed" in shown
    assert "no time of one is measured" in shown


SMI = """#!/bin/sh
case "$1" in
  --query-gpu*)
    echo "0, NVIDIA H100, 550.54, Exclusive_Process, Disabled, 1980 MHz, 1980 MHz, 9 MHz, 9 W, 650 W, 700 W, 31, 4 %" ;;
  --query-compute-apps*) [ -z "$BUSY" ] || echo "GPU-1, 4711, python, 512 MiB" ;;
esac
"""


def test_the_header_has_the_state_of_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setattr(device.shutil, "which", lambda _: str(smi))
    header = "\n".join(device.machine())
    for text in ("driver_version 550.54", "compute_mode Exclusive_Process", "mig.mode.current Disabled"):
        assert text in header
    for text in (
        "clocks.sm 1980 MHz",
        "power.draw 9 W",
        "power.limit 650 W",
        "power.max_limit 700 W",
        "no other process",
    ):
        assert text in header
    monkeypatch.setenv("BUSY", "1")
    assert "process_name python; used_memory 512 MiB" in "\n".join(device.machine())
    smi.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert "failed: no driver" in "\n".join(device.machine())
    monkeypatch.setattr(device.shutil, "which", lambda _: None)
    assert "no nvidia-smi" in "\n".join(device.machine())


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


def test_a_dry_run_needs_what_the_parts_need(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """A test that is gone, or a benchmark that does not start, is found without a GPU."""
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "all", "--dry", "--parts", "ranks", "host"])
    assert gpu_run.main() == 0
    printed = capfd.readouterr().out
    assert len(re.findall(r"^(ranks|host) +ready$", printed, re.MULTILINE)) == 2
    assert "2 of 2 test functions collected" in printed
    monkeypatch.setitem(gpu_run.ORDER, "ranks", ("tests/gpu/test_ranks.py::test_gone",))
    assert gpu_run.collect_tests("ranks") == gpu_run.FAILED
    assert "test_gone: pytest did not collect it" in capfd.readouterr().out
    (host,) = gpu_run.parts_of(["host"])
    assert gpu_run.dry_run([gpu_run.replace(host, dry=(*host.dry, "--no-such-option"))]) == gpu_run.FAILED
    assert "host     NOT READY: 2" in capfd.readouterr().out


@pytest.mark.parametrize(("name", "only"), [("test", "test_p2p"), ("ranks", "backward")])
@pytest.mark.slow
def test_the_command_needs_nothing_but_pytest(tmp_path: Path, name: str, only: str) -> None:
    """A machine with a GPU may have neither hypothesis nor the plugins that the settings name."""
    for module in ("hypothesis", "pytest_timeout", "megatron"):
        (tmp_path / f"{module}.py").write_text("raise ImportError('not installed')\n")
    paths = os.pathsep.join((str(tmp_path), str(ROOT), str(ROOT / "kernels")))
    env = os.environ | {"PYTHONPATH": paths, "OUT": str(tmp_path), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    command = [sys.executable, "tools/gpu_run.py", name, "--device", "cpu", "--only", only]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "\n1 passed, 0 failed, 0 skipped, " in done.stdout
    (written,) = json.loads((tmp_path / f"tests_{name}.json").read_text())["tests"]
    assert (written["outcome"], only in written["test"]) == ("passed", True)


def test_without_a_gpu_nothing_is_tested(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_run.py", "test"])
    monkeypatch.setattr(gpu_run.torch.cuda, "is_available", lambda: False)

    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old\n(found version 12040).")

    monkeypatch.setattr(gpu_run.torch.cuda, "init", init)
    assert gpu_run.main() == gpu_run.NO_DEVICE
    assert "nothing was tested: The NVIDIA driver on your system is too old\n" in capsys.readouterr().out
