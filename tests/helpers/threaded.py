"""Ranks as threads of this process, over torch's threaded process group: they move real data on any one device.

That group belongs to torch's own tests and is no public API; all that is used of it is here. The threads share one CUDA
context and the current stream, and rank 0 copies for all of them: good for correctness, not for timing an exchange.
"""

import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from tritoncomm_kernels.launch import Launch

__all__ = ["ThreadedRanksError", "available", "launches_take_turns", "run_ranks"]


class ThreadedRanksError(RuntimeError):
    """There is no threaded process group in this torch, or a rank failed or did not end."""


def available() -> Any:
    """The module of the threaded process group.

    Raises:
        ThreadedRanksError: this torch has none, or not the parts that are used here.
    """
    try:
        from torch.testing._internal.distributed import multi_threaded_pg as threaded

        for owner, name in (
            (threaded, "_install_threaded_pg"),
            (threaded, "_uninstall_threaded_pg"),
            (threaded, "ProcessLocalGroup"),
            (torch._C._distributed_c10d, "_set_thread_isolation_mode"),
        ):
            getattr(owner, name)
    except (ImportError, AttributeError) as error:
        raise ThreadedRanksError(f"torch {torch.__version__} has no threaded process group: {error}") from error
    return threaded


@contextmanager
def _installed() -> Iterator[Any]:
    """torch.distributed with a world per thread; the class of the threaded process group."""
    threaded, isolate = available(), torch._C._distributed_c10d._set_thread_isolation_mode
    isolate(True)
    world = threaded._install_threaded_pg()
    if not hasattr(world, "comms"):  # torch 2.11's own destroy_process_group() looks for it
        world.comms = []
    threaded.ProcessLocalGroup.reduce = _reduce
    try:
        yield threaded.ProcessLocalGroup
    finally:
        del threaded.ProcessLocalGroup.reduce
        threaded.ProcessLocalGroup.reset()
        threaded._uninstall_threaded_pg()
        isolate(False)


def _reduce(group: Any, tensors: list[Any], options: Any) -> Any:
    """Reduce to a root, which the threaded group lacks: every rank has the sum, and the root keeps it."""
    (x,), summed = tensors, [tensors[0].clone()]
    every = dist.AllreduceOptions()
    every.reduceOp = options.reduceOp
    work = group.allreduce(summed, every)
    if options.rootRank == group.rank():
        x.copy_(summed[0])
    return work


class _Backend:
    """A backend with a name, which the threaded group lacks."""

    def name(self) -> str:
        return "threaded"


def run_ranks(world: int, function: Callable[[int, ProcessGroup], Any], timeout: float = 120) -> list[Any]:
    """Call ``function(rank, group)`` in as many threads at the same time; results in rank order.

    Backward runs in the thread that calls it, not in autograd's thread of the device: there, one rank would wait in a
    collective for another whose backward comes after its own.

    Raises:
        ThreadedRanksError: no threaded process group, or a rank raised (with its traceback) or did not end in time.
    """
    results: list[Any] = [None] * world
    errors: dict[int, str] = {}
    store, over = dist.HashStore(), threading.Event()

    def rank_main(rank: int, kind: Any) -> None:
        try:
            dist.init_process_group("threaded", rank=rank, world_size=world, store=store)
            group: Any = dist.group.WORLD
            group._get_backend = lambda _: _Backend()  # it is asked for its name only
            with torch.autograd.set_multithreading_enabled(False):
                results[rank] = function(rank, group)
            dist.destroy_process_group()
        except SystemExit:  # what the group raises in ranks that wait for one that failed
            errors.setdefault(rank, "left a collective because another rank failed")
        except BaseException as error:
            if not over.is_set():  # a rank that comes too late must not end what runs by then
                errors[rank] = traceback.format_exc(limit=-4)
                kind.exception_handle(error)

    with torch.autograd.set_multithreading_enabled(False), _installed() as kind:
        threads = [threading.Thread(target=rank_main, args=(rank, kind), daemon=True) for rank in range(world)]
        for thread in threads:
            thread.start()
        end = time.monotonic() + timeout
        for rank, thread in enumerate(threads):
            thread.join(max(0.0, end - time.monotonic()))
            if thread.is_alive():
                errors.setdefault(rank, f"did not end within {timeout} s")
        if errors:
            kind.exception_handle(None)  # wakes those that wait for a rank that does not come
            for thread in threads:
                thread.join(1)
        over.set()
    told: dict[str, list[int]] = {}
    for rank in sorted(errors):
        told.setdefault(errors[rank], []).append(rank)
    if told:
        raise ThreadedRanksError("\n".join(f"ranks {ranks}: {error}" for error, ranks in told.items()))
    return results


@contextmanager
def launches_take_turns() -> Iterator[None]:
    """Triton's interpreter keeps the running program in globals: there, one thread launches at a time."""
    lock, call = threading.Lock(), Launch.__call__

    def locked(self: Launch, *arguments: Any) -> None:
        with lock:
            call(self, *arguments)

    Launch.__call__ = locked
    try:
        yield
    finally:
        Launch.__call__ = call
