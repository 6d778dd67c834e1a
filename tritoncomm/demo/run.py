"""Spawns the ranks and the single process, follows them, and compares their losses."""

import queue as queues
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch.multiprocessing as multiprocessing

from tritoncomm.demo.data import check_text
from tritoncomm.demo.settings import Settings
from tritoncomm.demo.train import rank_main
from tritoncomm.record import Count

__all__ = ["DemoError", "Outcome", "run"]

Follow = Callable[[str, int, float], None]
Processes = dict[tuple[str, int], Any]


class DemoError(RuntimeError):
    """A process of the demo failed; the message names it and the reason."""


@dataclass(frozen=True)
class Outcome:
    """Losses and counters of a run.

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
        ValueError: the text is too short.
        OSError: the text cannot be read.
        DemoError: a process failed or nothing happened for ``settings.timeout`` seconds.
    """
    check_text(settings)
    context: Any = multiprocessing.get_context("forkserver")  # imports torch once; with spawn every process does
    context.set_forkserver_preload(["torch", "torch.distributed"])
    queue, port = context.Queue(), _free_port()
    jobs = {("ranks", rank): (settings, prepare) for rank in range(settings.ranks)}
    jobs["single process", 0] = (replace(settings, ranks=1, pipeline=1, virtual=1), None)
    processes: Processes = {
        (role, rank): context.Process(target=rank_main, args=(role, job, rank, port, queue, first), daemon=True)
        for (role, rank), (job, first) in jobs.items()
    }
    try:
        for process in processes.values():
            process.start()
        results = _collect(queue, processes, settings.timeout, follow or (lambda *_: None))
        wait_until = time.monotonic() + 10
        for process in processes.values():
            process.join(max(0.0, wait_until - time.monotonic()))
    finally:
        _stop(processes)
    losses, seconds, counters = results["ranks", 0]
    return Outcome(settings, losses, results["single process", 0][0], seconds, counters)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _stop(processes: Processes) -> None:
    started = [process for process in processes.values() if process.pid is not None]
    for process in started:
        process.kill()
    for process in started:
        process.join(timeout=10)


def _collect(queue: Any, processes: Processes, timeout: float, follow: Follow) -> dict[tuple[str, int], Any]:
    results: dict[tuple[str, int], Any] = {}
    last_message = time.monotonic()
    while len(results) < len(processes):
        try:
            role, rank, kind, value = queue.get(timeout=1)
        except queues.Empty:
            _raise_if_stuck(processes, len(results), time.monotonic() - last_message, timeout)
            continue
        last_message = time.monotonic()
        if kind == "failed":
            time.sleep(0.5)  # the fork server may report a killed process after its peers' failures
            killed = [f"{why}\n" for why, code in _ended(processes) if code < 0]  # what peers report then is a symptom
            raise DemoError(f"{''.join(killed)}{_name(role, rank)} failed:\n{value}")
        if kind == "done":
            results[role, rank] = value
        elif rank == 0:
            follow(role, *value)
    return results


def _name(role: str, rank: int) -> str:
    return f"rank {rank}" if role == "ranks" else role


def _ended(processes: Processes) -> list[tuple[str, int]]:
    """Which processes ended badly, in words, with their exit code; below zero it is the signal that killed them."""
    codes = [(_name(*key), process.exitcode) for key, process in processes.items() if process.exitcode]
    return [
        (f"{name} was killed by signal {-code}" if code < 0 else f"{name} exited with {code}", code)
        for name, code in codes
    ]


def _raise_if_stuck(processes: Processes, finished: int, quiet: float, timeout: float) -> None:
    what = [why for why, _ in _ended(processes)]
    if quiet > timeout:
        what.append(f"nothing happened for {quiet:.0f} s")
    if what:
        raise DemoError(f"{', '.join(what)}; {finished} of {len(processes)} processes had finished")
