"""The benchmarks of a checkout: which parts there are, running them, reading what they wrote."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tritoncomm import launchers

__all__ = ["Outcome", "SuiteError", "check", "folder", "parts", "rows", "run"]

GPU = "gpu"
_FILES = {"mappings": "host_cost"}  # parts whose results have another name
_MISSED, _PROGRESS = "MISSED: ", "written:"


class SuiteError(RuntimeError):
    """There are no benchmarks here, no such part, or nothing to run it on."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of a part: its exit status (1: a target was missed, 2: it could not run), the targets, its last line."""

    part: str
    status: int
    missed: tuple[str, ...]
    last: str


def folder() -> Path:
    """``bench/`` beside the package.

    Raises:
        SuiteError: the package is installed without its sources.
    """
    bench = Path(__file__).resolve().parents[2] / "bench"
    if not (bench / "guard.py").is_file():
        raise SuiteError(
            f"there are no benchmarks beside {bench.parent}: they are in the sources, not in the installed package; "
            "clone the repository and run `make bench` or `tritoncomm bench` there"
        )
    return bench


def parts() -> list[str]:
    """Names of the parts: ``bench_<part>.py``, and ``gpu`` for the kernels on a GPU."""
    return sorted(path.stem.removeprefix("bench_") for path in folder().glob("bench_*.py")) + [GPU]


def check(part: str) -> None:
    """Refuse a part that cannot run here.

    Raises:
        SuiteError: no such part, or no GPU for ``gpu``.
    """
    if part not in parts():
        raise SuiteError(f"no part {part!r}; there are {', '.join(parts())}")
    if part == GPU and not torch.cuda.is_available():
        raise SuiteError("part gpu needs a CUDA device, and torch sees none here")


def run(
    part: str, out: Path, rounds: int | None = None, only: str = "", follow: Callable[[str], None] = lambda line: None
) -> Outcome:
    """Run one part in a process of its own; results go to ``out/<device>/<name>.json``, after every row.

    Args:
        part: one of ``parts()``.
        out: folder of the results.
        rounds: samples of every provider; the part's own default without it.
        only: rows whose label contains this.
        follow: called with every line that the part prints, as it is printed, except missed targets.

    Raises:
        SuiteError: no such part, or no GPU for ``gpu``.
    """
    bench = folder()
    check(part)
    paths = [str(bench.parent), str(bench.parent / "kernels"), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    launchers.forget(environment)
    command = [sys.executable, str(bench / f"bench_{part}.py"), "--json", str(_results(part, out))]
    if part == GPU:
        command = [sys.executable, str(bench / "gpu_bench.py")]
        environment["OUT"] = str(_results(part, out).parent)
    command += [*(("--rounds", str(rounds)) if rounds else ()), *(("--only", only) if only else ())]
    lines = [line for line in _lines(command, environment, follow) if line]
    last = next((line for line in reversed(lines[:-1]) if not line.startswith(_PROGRESS)), "")
    missed = tuple(line.removeprefix(_MISSED) for line in lines if line.startswith(_MISSED))
    return Outcome(part, int(lines[-1]), missed, last)


def _lines(command: Sequence[str], environment: dict[str, str], follow: Callable[[str], None]) -> Iterator[str]:
    """Lines of the output of a process, then its exit status."""
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    with subprocess.Popen(command, env=environment, stdout=pipe, stderr=both, text=True) as child:
        try:
            for line in map(str.rstrip, child.stdout or ()):
                if not line.startswith((_MISSED, _PROGRESS)):
                    follow(line)
                yield line
        except KeyboardInterrupt:
            child.wait(30)  # it is interrupted too, and writes the rows that it has
            raise
        yield str(child.wait())


def _results(part: str, out: Path) -> Path:
    device = torch.cuda.get_device_name(0) if part == GPU else "cpu"
    name = "".join(c if c.isalnum() else "-" for c in device.lower())
    return out.absolute() / name / f"{'gpu_bench' if part == GPU else _FILES.get(part, part)}.json"


def rows(out: Path, measured: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
    """``{"<device>/<name>": rows}`` of these parts; a row has ``row``, ``us``, ``ratio`` and ``spread``."""
    paths = [path for path in (_results(part, out) for part in measured) if path.is_file()]
    return {f"{path.parent.name}/{path.stem}": json.loads(path.read_text())["rows"] for path in paths}
