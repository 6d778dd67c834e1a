"""Host time of the flight record and of check mode: what each adds to a call; docs/reliability.md has the figures.

The record and hash mode are measured over a no-op process group, full check mode on two ranks of Gloo over a TCP store.
"""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.autograd import profiler

from bench.hosts import no_op_group
from tritoncomm import mappings, record, variables
from tritoncomm.debug import check

__all__ = ["main"]

ROUNDS, CALLS = 60, 400


def _timed(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Microseconds per call."""
    started = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - started) / calls / 1e3


def _flag(owner: Any) -> Callable[[], None]:
    def run() -> None:
        for _ in range(1000):
            _range = record.begin("", "", None, None) if owner.switch._is_profiler_enabled else None

    return run


def _without() -> None:
    for _ in range(1000):
        _range = record.span("") if profiler._is_profiler_enabled else None


def _added(call: Callable[[], Any], on: Callable[[], Any], off: Callable[[], Any], calls: int = CALLS) -> str:
    """What ``on`` adds to a call, measured in turns."""
    added, base = [], []
    for _ in range(ROUNDS):
        off()
        before = _timed(call, calls)
        on()
        added.append(_timed(call, calls) - before)
        base.append(before)
    off()
    added.sort()
    spread = f"{added[ROUNDS // 5]:.2f} to {added[-ROUNDS // 5]:.2f}"
    return f"+{statistics.median(added):.2f} us ({spread}) to {statistics.median(base):.2f} us"


def _flight(on: bool) -> None:
    variables.FLIGHT.assign((4096 if on else 0, ""))


def _single(group: Any) -> None:
    x, wants = torch.ones(8, 16), torch.ones(8, 16, requires_grad=True)
    calls = {
        "all_gather_dim": lambda: mappings.all_gather_dim(x, 0, group),
        "all_gather_dim, with a gradient": lambda: mappings.all_gather_dim(wants, 0, group),
    }
    pairs = [(_timed(_without, 50), _timed(_flag(record), 50)) for _ in range(ROUNDS)]
    print(f"off: +{statistics.median(b - a for a, b in pairs):.3f} ns per call")  # microseconds of a thousand calls
    for name, call in calls.items():
        print(f"record, {name}: {_added(call, lambda: _flight(True), lambda: _flight(False))}")
    variables.HASH.assign(1 << 60)
    calls["all_gather_dim"]()
    check._members[group].sends = True
    variables.HASH.assign(0)
    for name, call in calls.items():
        text = _added(call, lambda: variables.HASH.assign(1 << 60), lambda: variables.HASH.assign(0))
        print(f"hash, {name}: {text}")


def _rank(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, group = torch.ones(8, 16), dist.group.WORLD
    text = _added(
        lambda: mappings.all_gather_dim(x, 0, group),
        lambda: variables.CHECK.assign(True),
        lambda: variables.CHECK.assign(False),
        50,
    )
    if not rank:
        print(f"full, all_gather_dim on two ranks of Gloo: {text}")
    dist.barrier()


def main() -> None:
    """Print what each mode adds."""
    with no_op_group(4) as group:
        _single(group)
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    ranks = [context.Process(target=_rank, args=(rank, port)) for rank in range(2)]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


if __name__ == "__main__":
    main()
