"""A run of the demo: the ranks and the single process, started, followed, and compared by their losses."""

import signal
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import multiprocessing
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from tritoncomm.demo.data import check_text
from tritoncomm.demo.settings import Settings
from tritoncomm.demo.train import Trained, rank_main
from tritoncomm.record import Count

__all__ = ["DemoError", "DemoOutcome", "run"]

Follow = Callable[[str, int, float], None]
_POLL_S = 0.1
# Seconds until the ranks and the single process have made their first step. A busy machine imports torch for minutes; a
# process that fails meanwhile ends, which is seen at once.
_START_S = 900.0


class DemoError(RuntimeError):
    """A process of the demo failed; the message names it and the reason."""


@dataclass(frozen=True)
class DemoOutcome:
    """Losses and counters of a run.

    Attributes:
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
        """Return the largest relative difference of a loss to the single process, and its step; NaN is infinite."""
        pairs = zip(self.losses, self.reference, strict=True)
        differences = [abs(ours - theirs) / abs(theirs) for ours, theirs in pairs]
        differences = [d if d == d else float("inf") for d in differences]
        largest = max(differences)
        return largest, differences.index(largest)


def run(settings: Settings, follow: Follow | None = None, prepare: Callable[[], None] | None = None) -> DemoOutcome:
    """Train on ``settings.ranks`` processes and on one, at the same time.

    Args:
        follow: called with ("ranks" or "single process", step, loss) as training goes on.
        prepare: called in every rank before training, never in the single process (tests break things with it).
    """
    check_text(settings)
    context: Any = multiprocessing.get_context("forkserver")  # imports torch once; with spawn every process does
    context.set_forkserver_preload(["torch", "torch.distributed"])
    results: dict[str, Trained] = {}
    queue, last_message, begun = context.Queue(), time.monotonic(), set[str]()
    arguments = settings, _free_port(), queue, prepare
    started: Any = start_processes(
        rank_main, arguments, settings.ranks + 1, join=False, daemon=True, start_method="forkserver"
    )
    try:
        have_ended = False
        while not have_ended:
            have_ended = started.join(timeout=_POLL_S)
            while not queue.empty():
                role, news = queue.get()
                last_message = time.monotonic()
                begun.add(role)
                if isinstance(news, Trained):
                    results[role] = news
                elif follow is not None:
                    follow(role, *news)
            quiet = time.monotonic() - last_message
            both_train = len(begun) == 2  # the ranks, and the single process
            if quiet > (settings.timeout if both_train else _START_S):
                finished = sum(process.exitcode == 0 for process in started.processes)
                raise DemoError(
                    f"nothing happened for {quiet:.0f} s; {finished} of {settings.ranks + 1} processes had finished"
                )
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise DemoError(_reason(error, started.processes)) from None
    finally:
        for process in started.processes:
            process.kill()
    ours = results["ranks"]
    return DemoOutcome(settings, ours.losses, results["single process"].losses, ours.seconds, ours.counters)


def _reason(error: ProcessRaisedException | ProcessExitedException, processes: Sequence[Any]) -> str:
    """Return the first error of a process, behind the processes that were killed, whose peers only show symptoms."""
    names = [*(f"rank {rank}" for rank in range(len(processes) - 1)), "single process"]
    ended = [(name, process.exitcode) for name, process in zip(names, processes, strict=True)]
    lines = [f"{name} was killed by signal {-code}" for name, code in ended if code < 0 and code != -signal.SIGTERM]
    if isinstance(error, ProcessRaisedException) or not lines:
        lines.append(f"{names[error.error_index]} failed:\n{error}")
    return "\n".join(lines)


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
