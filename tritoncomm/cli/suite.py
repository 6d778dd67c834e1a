"""The benchmarks of a checkout: which parts there are, running them, reading what they wrote."""

import importlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritoncomm import launchers

__all__ = ["Outcome", "SuiteError", "folder", "parts", "rows", "run", "verdict"]

GPU = "gpu"
_FILES = {"mappings": "host_cost"}  # parts whose results have another name
_PROGRESS = "written:"


class SuiteError(RuntimeError):
    """There are no benchmarks here, no such part, or nothing to run it on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a part said, and its exit status: 1 when it missed a target, 2 when it could not run."""

    part: str
    status: int
    missed: tuple[str, ...]
    last: str


def folder() -> Path:
    """``bench/`` beside the package.

    Raises:
        SuiteError: the package is installed without its sources.
    """
    found = Path(__file__).resolve().parents[2] / "bench"
    if not (found / "guard.py").is_file():
        raise SuiteError(
            f"there are no benchmarks beside {found.parent}: they are in the sources, not in the installed package; "
            "clone the repository and run `make bench` or `tritoncomm bench` there"
        )
    return found


def parts() -> list[str]:
    """Names of the parts: ``bench_<part>.py``, and ``gpu`` for the kernels on a GPU."""
    return sorted(path.stem.removeprefix("bench_") for path in folder().glob("bench_*.py")) + [GPU]


def run(part: str, out: Path, rounds: int | None = None, only: str = "") -> Outcome:
    """Run one part in a process of its own; results go to ``out/<device>/<name>.json``.

    Raises:
        SuiteError: no such part, or no GPU for ``gpu``.
    """
    bench = folder()
    if part not in parts():
        raise SuiteError(f"no part {part!r}; there are {', '.join(parts())}")
    if part == GPU and not torch.cuda.is_available():
        raise SuiteError("part gpu needs a CUDA device, and torch sees none here")
    paths = [str(bench.parent), str(bench.parent / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    launchers.forget(environment)
    command = [sys.executable, str(bench / f"bench_{part}.py"), "--json", str(_results(part, out))]
    if part == GPU:
        command = [sys.executable, str(bench / "gpu_bench.py")]
        environment["OUT"] = str(_results(part, out).parent)
    command += [*(("--rounds", str(rounds)) if rounds else ()), *(("--only", only) if only else ())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    missed = tuple(line.removeprefix("MISSED: ") for line in lines if line.startswith("MISSED: "))
    return Outcome(part, done.returncode, missed, next((x for x in reversed(lines) if not x.startswith(_PROGRESS)), ""))


def _results(part: str, out: Path) -> Path:
    device = torch.cuda.get_device_name(0) if part == GPU else "cpu"
    name = "".join(c if c.isalnum() else "-" for c in device.lower())
    return out.absolute() / name / f"{'gpu_bench' if part == GPU else _FILES.get(part, part)}.json"


def rows(out: Path, measured: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """``{"<device>/<name>": rows}`` of these parts; a row has ``row``, ``us``, ``ratio`` and ``spread``."""
    guard, found = _guard(), {}
    for path in [_results(part, out) for part in measured]:
        if path.is_file():
            found[f"{path.parent.name}/{path.stem}"] = guard.rows_of(json.loads(path.read_text()))
    return found


def verdict(out: Path) -> int:
    """Compare what is below ``out`` with the committed figures, and say so: 0, 1 if worse, 2 if there are none."""
    guard = _guard()
    return guard.judge(out, guard.RESULTS)


def _guard() -> Any:
    """The checkout's ``bench/guard.py``."""
    root = str(folder().parent)
    if root not in sys.path:
        sys.path.insert(0, root)
    return importlib.import_module("bench.guard")
