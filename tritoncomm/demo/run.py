"""Spawns the ranks and the single process, follows them, and compares their losses."""

import queue as queues
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.multiprocessing as multiprocessing

from tritoncomm.demo.data import read_text
from tritoncomm.demo.settings import Settings
from tritoncomm.demo.train import rank_main
from tritoncomm.record import Count

__all__ = ["DemoError", "Outcome", "run"]

Follow = Callable[[str, int, float], None]


class DemoError(RuntimeError):
    """A process of the demo failed; says which and why."""


@dataclass(frozen=True)
class Outcome:
    """What a run found.

    Attributes:
        settings: of the run.
        losses: of rank 0, one per step.
        reference: losses of the single process.
        seconds: rank 0's training loop.
        counters: of rank 0.
    """

    settings: Settings
    losses: list[float]
    reference: list[float]
    seconds: float
    counters: dict[tuple[str, str], Count]

    def largest_difference(self) -> tuple[float, int]:
        """Largest relative difference of a loss to the single process, and its step; NaN counts as infinite."""
        pairs = zip(self.losses, self.reference, strict=True)
        differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        differences = [d if d == d else float("inf") for d in differences]
        largest = max(differences)
        return largest, differences.index(largest)


def run(settings: Settings, follow: Follow | None = None, prepare: Callable[[], None] | None = None) -> Outcome:
    """Train on ``settings.ranks`` processes and on one, at the same time.

    Args:
        settings: what to train.
        follow: called with ("ranks" or "single process", step, loss) as training goes on.
        prepare: called in every rank before training, never in the single process (tests break things with it).

    Raises:
        DemoError: a process failed or nothing happened for ``settings.timeout`` seconds.
    """
    read_text(settings.text)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    port = _free_port()
    jobs = [("ranks", settings, rank) for rank in range(settings.ranks)]
    jobs.append(("single process", replace(settings, ranks=1), 0))
    processes = [
        context.Process(target=rank_main, args=(role, job, rank, port, queue, prepare), daemon=True)
        for role, job, rank in jobs
    ]
    for process in processes:
        process.start()
    try:
        results = _collect(queue, processes, settings, follow or (lambda *_: None))
    finally:
        for process in processes:
            process.join(timeout=10)
            if process.is_alive():
                process.kill()
    losses, seconds, counters = results["ranks", 0]
    return Outcome(settings, losses, results["single process", 0][0], seconds, counters)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _collect(queue: Any, processes: list[Any], settings: Settings, follow: Follow) -> dict[tuple[str, int], Any]:
    results: dict[tuple[str, int], Any] = {}
    quiet_since = time.monotonic()
    while len(results) < len(processes):
        try:
            role, rank, kind, value = queue.get(timeout=1)
            quiet_since = time.monotonic()
        except queues.Empty:
            _raise_if_stuck(processes, len(results), time.monotonic() - quiet_since, settings.timeout)
            continue
        if kind == "failed":
            for process in processes:
                process.kill()
            raise DemoError(f"{role}, rank {rank} failed:\n{value}")
        if kind == "done":
            results[role, rank] = value
        elif rank == 0:
            follow(role, *value)
    return results


def _raise_if_stuck(processes: list[Any], finished: int, quiet: float, timeout: float) -> None:
    dead = [i for i, process in enumerate(processes) if process.exitcode not in (None, 0)]
    if dead or quiet > timeout:
        for process in processes:
            process.kill()
        what = f"process {dead[0]} ended without a word" if dead else f"nothing happened for {quiet:.0f} s"
        raise DemoError(f"{what}; {finished} of {len(processes)} processes had finished")
