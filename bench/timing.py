"""Timing on the host: rounds interleaved between the providers, quantiles, and what the numbers were made with."""

import gc
import json
import math
import platform
import shutil
import subprocess
import timeit
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

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

GROUPS = 10


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


def quantile(samples: Sequence[float], q: float) -> float:
    """The sample that a share ``q`` of all samples does not exceed."""
    ordered = sorted(samples)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def spread(ours: Sequence[float], theirs: Sequence[float], groups: int = GROUPS) -> float:
    """Spread of the ratio of the two within a run: p80 - p20 of the ratios of groups of neighbouring rounds."""
    size = max(1, len(ours) // groups)
    starts = range(0, len(ours) - size + 1, size)
    ratios = [quantile(ours[i : i + size], 0.2) / quantile(theirs[i : i + size], 0.2) for i in starts]
    return quantile(ratios, 0.8) - quantile(ratios, 0.2)


def figures(
    row: str, samples: Mapping[str, Sequence[float]], uncompared: Collection[str] = (), **more: Any
) -> dict[str, Any]:
    """One row of a results file from samples by provider: ``us`` of each, ``ratio`` and ``spread`` to every peer.

    A ratio is ours at p20 over the peer's at p20. Providers in ``uncompared`` get none.
    """
    ours = samples["ours"]
    us = {
        name: {key: round(quantile(times, q), 3) for key, q in (("p20", 0.2), ("median", 0.5), ("p80", 0.8))}
        for name, times in samples.items()
    }
    peers = {name: times for name, times in samples.items() if name not in ("ours", *uncompared)}
    ratio = {name: round(quantile(ours, 0.2) / quantile(times, 0.2), 3) for name, times in peers.items()}
    wander = {name: round(spread(ours, times), 3) for name, times in peers.items()}
    return {"row": row, "us": us, "ratio": ratio, "spread": wander, **more}


def geometric_mean(ratios: Sequence[float]) -> float:
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))


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
