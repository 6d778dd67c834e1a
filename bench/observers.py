"""Host time of the flight record and of check mode: what each adds to a call; docs/reliability.md has the figures.

The record and hash mode are measured over a no-op process group, full check mode on two ranks of Gloo over a TCP store.
"""

import multiprocessing
import socket
import statistics
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, TCPStore

from bench.hosts import no_op_group, run_backward
from tritoncomm import mappings, record, variables
from tritoncomm.debug import check
from tritoncomm.debug.store import JobStore
from tritoncomm.p2p import P2PCommunicator

__all__ = ["main"]

ROUNDS, CALLS, KEPT = 60, 400, variables.FLIGHT_CALLS


def _timed(call: Callable[[], Any], calls: int = CALLS) -> float:
    """Microseconds per call."""
    started = time.perf_counter_ns()
    for _ in range(calls):
        call()
    return (time.perf_counter_ns() - started) / max(calls, 1) / 1e3


def _hooked() -> None:
    for _ in range(1000):
        _span = record.begin("", "", None, None)


def _without() -> None:
    for _ in range(1000):
        _span = record.Span("")


def _added(
    call: Callable[[], Any], on: Callable[[], Any], off: Callable[[], Any], calls: int = CALLS, warm: int = 0
) -> str:
    """What ``on`` adds to a call, measured in turns after ``warm`` calls: median, and 20 % and 80 % quantiles."""
    added, base = [], []
    for _ in range(ROUNDS):
        off()
        before = _timed(call, calls)
        on()
        _timed(call, warm)
        added.append(_timed(call, calls) - before)
        base.append(before)
    off()
    added.sort()
    spread = f"{added[ROUNDS // 5]:.2f} to {added[-ROUNDS // 5]:.2f}"
    return f"+{statistics.median(added):.2f} us ({spread}) to {statistics.median(base):.2f} us"


def _flight(on: bool) -> None:
    variables.FLIGHT.assign((KEPT if on else 0, ""))


def _hash(on: bool) -> None:
    variables.HASH.assign(variables.HASH_EVERY if on else 0)


def _backward(wants: torch.Tensor, group: Any) -> None:
    out = mappings.all_gather_dim(wants, 0, group)
    run_backward((out,), (out,), False, False, (wants,))


def _single(group: Any) -> None:
    x, wants = torch.ones(8, 16), torch.ones(8, 16, requires_grad=True)
    stages = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))
    calls = {
        "all_gather_dim": lambda: mappings.all_gather_dim(x, 0, group),
        "all_gather_dim, with a gradient": lambda: mappings.all_gather_dim(wants, 0, group),
        "all_gather_dim and its backward": lambda: _backward(wants, group),
        "send_forward": lambda: stages.send_forward(x, False),
    }
    pairs = [(_timed(_without, 50), _timed(_hooked, 50)) for _ in range(ROUNDS)]
    print(f"off: +{statistics.median(b - a for a, b in pairs):.3f} ns per call")  # microseconds of a thousand calls
    for name, call in calls.items():
        text = _added(call, lambda: _flight(True), lambda: _flight(False), warm=KEPT)  # the record is full
        print(f"record, {name}: {text}", flush=True)
    _hash(True)
    calls["all_gather_dim"]()
    member = check._members[group]  # compares what it says with itself, in a store of this process
    member.store, member.ranks = JobStore(HashStore(), 0), [0]
    _hash(False)
    del calls["send_forward"]  # hash mode compares no p2p steps
    for name, call in calls.items():
        text = _added(call, lambda: _hash(True), lambda: _hash(False), variables.HASH_EVERY)
        print(f"hash, {name}: {text}", flush=True)


def _rank(rank: int, port: int) -> None:
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, 2, rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    x, group = torch.ones(8, 16), dist.group.WORLD
    assert group is not None
    stages = P2PCommunicator(group, SimpleNamespace(pipeline_dtype=torch.float32))

    def step() -> None:
        stages.recv_forward(x.shape, False) if rank else stages.send_forward(x, False)

    cases: list[tuple[str, Callable[[], Any], Any]] = [
        ("full, all_gather_dim", lambda: mappings.all_gather_dim(x, 0, group), variables.CHECK),
        ("full, a p2p step", step, variables.CHECK),
        ("a comparison of hash mode, of one call", lambda: mappings.all_gather_dim(x, 0, group), variables.HASH),
    ]
    for name, call, mode in cases:
        text = _added(call, lambda mode=mode: mode.assign(1), lambda mode=mode: mode.assign(0), 50)
        if not rank:
            print(f"{name}, two ranks of Gloo: {text}", flush=True)
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
