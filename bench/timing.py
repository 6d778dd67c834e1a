"""Timing on the host: rounds interleaved between the providers, quantiles, and what the numbers were made with."""

import gc
import json
import platform
import shutil
import subprocess
import timeit
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from tritoncomm.bench.samples import figures, geometric_mean, quantile, spread

__all__ = [
    "cpu",
    "figures",
    "geometric_mean",
    "interleaved",
    "quantile",
    "quiet_host",
    "results_folder",
    "spread",
    "versions",
    "write_json",
]


@contextmanager
def quiet_host() -> Iterator[None]:
    """One thread, and no garbage collection between two calls."""
    threads, collecting = torch.get_num_threads(), gc.isenabled()
    torch.set_num_threads(1)
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.unfreeze()
        torch.set_num_threads(threads)
        if collecting:
            gc.enable()


def interleaved(calls: Sequence[Callable[[], Any]], rounds: int = 200, inner: int = 50) -> list[list[float]]:
    """Microseconds per call of every provider, one sample per round.

    A round times every provider once, so what slows the machine down for a while slows all of them; who comes first
    alternates from round to round.
    """
    timers = [timeit.Timer(call) for call in calls]
    for timer in timers:
        timer.timeit(2 * inner)
    samples: list[list[float]] = [[] for _ in calls]
    order = list(range(len(calls)))
    for _ in range(rounds):
        for i in order:
            samples[i].append(timers[i].timeit(inner) / inner * 1e6)
        order.reverse()
    return samples


def versions(*packages: str) -> dict[str, str]:
    """Versions of the packages, of Python and of this tree, and the processor."""
    result = {"python": platform.python_version(), "cpu": cpu(), "commit": _commit()}
    for package in ("torch", "triton", *packages):
        try:
            result[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            result[package] = "not installed"
    return result


@cache
def cpu() -> str:
    """The processor: its model name, with the family and model numbers where the system reports them.

    A hypervisor often replaces the name by a generic one ("AMD EPYC"); the numbers still distinguish generations.
    """
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n", 1)[0] if info.is_file() else ""
    fields = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in first.splitlines())}
    name = fields.get("model name") or platform.processor() or platform.machine()
    numbers = [f"{key.removeprefix('cpu ')} {fields[key]}" for key in ("cpu family", "model") if key in fields]
    return " ".join((name, *numbers))


def _commit() -> str:
    git = shutil.which("git")
    if git is None:
        return "unknown"
    command = [git, "-C", str(Path(__file__).resolve().parent), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() if done.returncode == 0 else "unknown"


def write_json(path: str | Path, content: Any) -> Path:
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
    return path


def results_folder(device_name: str) -> Path:
    """The folder of a device's committed results."""
    folder = "".join(c if c.isalnum() else "-" for c in device_name.lower())
    return Path(__file__).resolve().parent / "results" / folder
