"""Eight Gloo ranks, started once, that run many functions: ``pool.run(function, *args, world=2)``."""

import importlib
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

__all__ = ["RANK_LISTS", "Pool", "WorkerError", "strict_warnings"]

WORLD = 8
RANK_LISTS = ((0,), (0, 1), (0, 1, 2, 3), tuple(range(WORLD)), (0, 2), (1, 3), (2, 3))
START_SECONDS, GRACE_SECONDS = 90.0, 8.0
COLLECTIVE = timedelta(seconds=40)


class WorkerError(AssertionError):
    """A rank failed; the message has its rank and traceback."""


def strict_warnings() -> None:
    """Warnings are errors, except torch's own about its own insides."""
    warnings.simplefilter("error")
    # Dynamo looks at every attribute of an autograd.Function, deprecated ones included.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\..*")
    warnings.filterwarnings("ignore", message="Conversion of an array with ndim", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r".*torch\.jit.*", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message=r".*should not be instantiated.*", category=DeprecationWarning)


class Pool:
    """Processes with the process groups of ``RANK_LISTS``; rebuilt after a rank died or hung."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._stores: list[str] = []
        self.started = 0

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | Sequence[int] = 2, timeout: float = 90
    ) -> list[Any]:
        """Call ``function(group, *args)`` on the first ``world`` ranks, or on these; results in rank order."""
        ranks = tuple(range(world)) if isinstance(world, int) else tuple(world)
        if ranks not in RANK_LISTS:
            raise ValueError(f"no group over {ranks}; there are {RANK_LISTS}")
        self._start()
        module = function.__module__
        if module == "__main__":
            module = Path(str(sys.modules[module].__file__)).stem
        job = pickle.dumps((ranks, module, function.__qualname__, args))
        for rank in ranks:
            self._workers[rank][1].send_bytes(job)
        return self._collect(ranks, f"{module}.{function.__qualname__}", timeout)

    def stop(self) -> None:
        """End the processes that this pool started."""
        for process, connection in self._workers:
            connection.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers = []
        while self._stores:
            Path(self._stores.pop()).unlink(missing_ok=True)

    def _start(self) -> None:
        if self._workers:
            return
        self.started += 1
        context: Any = multiprocessing.get_context("forkserver")  # torch is imported once, not eight times
        context.set_forkserver_preload(["torch", "torch.distributed", "numpy"])
        before = os.environ.get("TRITON_INTERPRET")
        os.environ["TRITON_INTERPRET"] = "1"  # the child reads it before it imports anything
        try:
            handle, store = tempfile.mkstemp(prefix="tritoncomm-pool-")
            os.close(handle)
            for rank in range(WORLD):
                ours, theirs = context.Pipe()
                process = context.Process(target=_work, args=(rank, theirs, store, list(sys.path)), daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        finally:
            if before is None:
                del os.environ["TRITON_INTERPRET"]
            else:
                os.environ["TRITON_INTERPRET"] = before
        try:
            self._collect(range(WORLD), "start", START_SECONDS)
        finally:
            self._stores.append(store)

    def _collect(self, ranks: Sequence[int], what: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {self._workers[rank][1]: rank for rank in ranks}
        end = time.monotonic() + timeout
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, value = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._workers[rank][0].join(1)
                    good, value = False, f"died with exit code {self._workers[rank][0].exitcode}"
                if good:
                    results[rank] = value
                else:
                    problems[rank] = value
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        problems |= dict.fromkeys(waiting.values(), "did not answer")
        if problems:
            self.stop()  # the ranks no longer agree on what comes next
            alike: dict[str, list[int]] = {}
            for rank in sorted(problems):
                alike.setdefault(problems[rank], []).append(rank)
            told = "\n".join(f"rank {', '.join(map(str, who))}:\n{text}" for text, who in alike.items())
            raise WorkerError(f"{what} on ranks {tuple(ranks)}\n{told}")
        return [results[rank] for rank in ranks]


def _work(rank: int, connection: Connection, store: str, path: list[str]) -> None:
    sys.path[:] = path
    strict_warnings()
    try:
        import torch
        import torch.distributed as dist

        torch.set_num_threads(1)
        rendezvous = dist.FileStore(store, WORLD)
        dist.init_process_group("gloo", store=rendezvous, rank=rank, world_size=WORLD, timeout=COLLECTIVE)
        groups = {ranks: dist.new_group(list(ranks), timeout=COLLECTIVE) for ranks in RANK_LISTS}
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        return
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            ranks, module, name, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            function = getattr(importlib.import_module(module), name)
            answer = pickle.dumps((True, function(groups[ranks], *args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        connection.send_bytes(answer)
    os._exit(0)  # the peers may be gone already: nothing to say goodbye to
