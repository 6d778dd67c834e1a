"""Host time of resharding: planning 1,000 tensors from 64 to 64 ranks, a bucket of an executed plan, sequences.

Plans are executed over a no-op process group with small tensors: on the CPU, where passes are torch's, and on a stub
CUDA driver, where they are launched as on a GPU and nothing runs (that needs a C compiler, and a machine without a CUDA
device). What is measured is the host, not the exchange; the no-op group's own time, which grows with its ranks, is
shown beside it. Plans of real models are those of ``reshard_models``, with every dim, and so the buckets, divided.

    PYTHONPATH=.:kernels python bench/reshard_host.py

It exits with 1 when a bucket of ``plan.execute`` takes more than ``guard.BUCKET_US`` besides the no-op group.
"""

import itertools
import random
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import numpy as np
import torch

from bench import guard
from bench.bench_launch import missing
from bench.hosts import helpers, no_op_group
from bench.reshard_models import CASES as MODELS
from bench.reshard_models import Case, items_of
from tritoncomm.core import backend
from tritoncomm.reshard import Layout, layout, planner, reshard, reshard_plan, sequence_layout
from tritoncomm.reshard.api import BUCKET_BYTES
from tritoncomm.reshard.boxes import KINDS
from tritoncomm.reshard.execute import messages

__all__ = ["execution", "model", "packed", "planning", "sequence", "sequence_planning"]

GRID = np.arange(64)
CASES = {
    "S0*64 to S1*64": ((GRID, [0]), (GRID, [1])),
    "R*8,S0*8 to R*16,S0*4": ((GRID.reshape(8, 8), [None, 0]), (GRID.reshape(16, 4), [None, 0])),
    "S0*8,S1*8 to S1*16,R*4": ((GRID.reshape(8, 8), [0, 1]), (GRID.reshape(16, 4), [1, None])),
}
ROUNDS = 400
SIZE = 16  # of both dims of a tensor: torch's fake process group copies what is sent
TOKENS, UNIT = 131_072, 16
DIVISOR = 64  # of every dim of a model


def planning(name: str) -> float:
    """Seconds to plan 1,000 tensors of different shapes on one rank, layouts and checks included."""
    started = time.perf_counter()
    shapes = {f"w{i}": (1024 + 8 * (i % 500), 1024 + 8 * (i // 2)) for i in range(1000)}
    sides = [{key: Layout.on_mesh(s, *side) for key, s in shapes.items()} for side in CASES[name]]
    reshard_plan(dict.fromkeys(shapes, torch.bfloat16), *sides, ranks=range(64), rank=3)
    return time.perf_counter() - started


def median(call: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Microseconds of a warm call."""
    for _ in range(rounds // 20):
        call()
    times = []
    for _ in range(rounds):
        started = time.perf_counter()
        call()
        times.append(time.perf_counter() - started)
    return statistics.median(times) * 1e6


def execution(host: Any, world: int, tensors: int, buckets: int) -> dict[str, float]:
    """Microseconds per bucket of a plan, also into given tensors, of a cached plan, and of the no-op group alone."""
    with host, no_op_group(world) as group:
        source, target = (Layout.on_mesh((SIZE, SIZE), range(world), [dim]) for dim in (0, 1))
        given = {f"w{i}": torch.ones(SIZE // world, SIZE) for i in range(tensors)}
        out = {name: torch.empty(SIZE, SIZE // world) for name in given}
        sent = 4 * (SIZE // world) ** 2 * (world - 1) * tensors
        limit: dict[str, Any] = {"bucket_bytes": sent // buckets}
        plan = reshard_plan(given, source, target, **limit)
        wire = torch.empty(sent // buckets, dtype=torch.uint8)
        counts = tuple(0 if peer == 0 else len(wire) // (world - 1) for peer in range(world))
        assert (len(plan.transfers.buckets), plan.transfers.local_copies) == (buckets, 0)
        assert plan.transfers.buckets[0].send.counts == counts
        return {
            "plan.execute": median(lambda: plan.execute(given)) / buckets,
            "plan.execute(out=)": median(lambda: plan.execute(given, out=out)) / buckets,
            "reshard": median(lambda: reshard(given, source, target, **limit)) / buckets,
            "the group alone": median(lambda: backend.all_to_all(wire, wire, counts, counts, group, "reshard")),
        }


def model(host: Any, case: Case, rounds: int = 80) -> dict[str, float]:
    """Of the first rank: tensors, buckets, blocks per bucket that it copies directly, and the times of ``execution``.

    Bytes are divided by ``DIVISOR`` squared, those of a bucket and of the largest block that is staged, too, so that
    the plan is about that of the model.
    """
    less = DIVISOR**2
    with host, no_op_group(case.world) as group, mock.patch.object(planner, "_SMALL", planner._SMALL // less):
        items = items_of(case, DIVISOR)
        given = {item.name: torch.ones(item.source.local_shape(0) or 0, dtype=item.dtype) for item in items}
        source, target = ({item.name: getattr(item, side) for item in items} for side in ("source", "target"))
        plan = reshard_plan(given, source, target, bucket_bytes=BUCKET_BYTES // less)
        out = {name: torch.empty_like(x) for name, x in plan.execute(given).items()}
        buckets = plan.transfers.buckets
        wires = [[torch.empty(side.nbytes, dtype=torch.uint8) for side in (b.recv, b.send)] for b in buckets]

        def exchanges() -> None:
            for bucket, (received, wire) in zip(buckets, wires, strict=True):
                if not plan.transfers.is_disjoint:
                    counts = bucket.recv.counts, bucket.send.counts
                    backend.all_to_all(received, wire, *counts, group, "reshard")
                else:
                    sides = messages(wire, bucket.send), messages(received, bucket.recv)
                    backend.send_and_receive(*sides, group, "reshard").wait()

        return {
            "tensors": len(items),
            "buckets": len(buckets),
            "blocks that are copied directly": sum(len(b.direct.tensor) for b in buckets) / len(buckets),
            "plan.execute": median(lambda: plan.execute(given), rounds) / len(buckets),
            "plan.execute(out=)": median(lambda: plan.execute(given, out=out), rounds) / len(buckets),
            "the group alone": median(exchanges, rounds) / len(buckets),
        }


def too_slow(figures: dict[str, float]) -> bool:
    """Whether a bucket takes more than its target of host time, without the no-op group's own."""
    executed = (us for name, us in figures.items() if name.startswith("plan.execute"))
    return max(executed) - figures["the group alone"] > guard.BUCKET_US


def packed(count: int) -> list[int] | None:
    """Boundaries of that many sequences of drawn lengths, multiples of 16; None for one."""
    inner = random.Random(count).sample(range(1, TOKENS // UNIT), count - 1)
    return [0, *sorted(UNIT * each for each in inner), TOKENS] if count > 1 else None


def sequence_planning(kinds: Any, bounds: list[int] | None, world: int = 8) -> tuple[float, int]:
    """Milliseconds of a plan of q ``[1, 131072, 8, 128]`` with nothing cached, tables included; its blocks."""
    times, plan = [], None
    for _ in range(5 if bounds is None or len(bounds) < 200 else 1):
        layout._sequence.cache_clear()
        started = time.perf_counter()
        source, target = (Layout.sequence((1, TOKENS, 8, 128), 1, kind, range(world), bounds) for kind in kinds)
        plan = reshard_plan({"q": torch.bfloat16}, source, target, ranks=range(world), rank=3)
        given, result = (torch.empty(each.local_shape(3) or 0, device="meta") for each in (source, target))
        if plan.transfers.items:  # the same layouts have no plan
            plan._executor._prepared(((given.stride(), 0),), ((result.stride(), 0),), False)
        times.append(time.perf_counter() - started)
    assert plan is not None
    blocks = sum(len(s.tensor) for b in plan.transfers.buckets for s in (b.send, b.recv, b.staged, b.direct))
    return min(times) * 1e3, blocks


def sequence(host: Any, world: int, kinds: Any) -> dict[str, float]:
    """Microseconds of a call with a cached plan, of the plan alone, and of the no-op group."""
    with host, no_op_group(world) as group:
        x = torch.ones(1, 64, 4, 16)
        source, target = (Layout.sequence((1, 64 * world, 4, 16), 1, kind, range(world)) for kind in kinds)
        plan = reshard_plan(x, source, target)
        (bucket,) = plan.transfers.buckets
        wires = [torch.empty(side.nbytes, dtype=torch.uint8) for side in (bucket.recv, bucket.send)]
        counts = bucket.recv.counts, bucket.send.counts
        bounds = torch.tensor([0, 64 * world])
        return {
            "sequence_layout": median(lambda: sequence_layout(x, *kinds)),
            "with cu_seqlens": median(lambda: sequence_layout(x, *kinds, cu_seqlens=bounds)),
            "plan.execute": median(lambda: plan.execute(x)),
            "the group alone": median(lambda: backend.all_to_all(*wires, *counts, group, "reshard")),
        }


if __name__ == "__main__":
    for pair in itertools.permutations(KINDS, 2):
        print(
            "plan of 131,072 tokens, 8 ranks, {} to {}: {:.2f} ms, {} blocks".format(
                *pair, *sequence_planning(pair, None)
            )
        )
    for number, pair in itertools.product((16, 128, 1024), (("contiguous", "zigzag"), ("zigzag", "striped"))):
        figures = sequence_planning(pair, packed(number))
        print("plan of {} packed sequences, {} to {}: {:.1f} ms, {} blocks".format(number, *pair, *figures))
    for case in CASES:
        print(f"plan of 1,000 tensors, {case}: {planning(case):.2f} s")
    torch.set_num_threads(1)  # the no-op group copies what is sent, and waits for threads that other work keeps busy
    stub = "" if missing() else "stub CUDA driver"
    status = 0
    for where in filter(None, ("CPU", stub)):
        for ranks, count, parts in ((2, 1, 1), (8, 1, 1), (2, 8, 1), (2, 8, 8), (8, 8, 8), (2, 32, 1)):
            host = helpers("fake_gpu.device").Device().current(runs=False) if where == stub else nullcontext()
            times = execution(host, ranks, count, parts)
            figures = ", ".join(f"{name} {us:.1f}" for name, us in times.items()) + "  MISSED" * too_slow(times)
            status |= too_slow(times)
            print(f"{where}, {ranks} ranks, {count} tensors in {parts} buckets, us per bucket: {figures}")
        for trained in MODELS[:2]:
            host = helpers("fake_gpu.device").Device().current(runs=False) if where == stub else nullcontext()
            times = model(host, trained)
            figures = ", ".join(f"{name} {us:.1f}" for name, us in times.items()) + "  MISSED" * too_slow(times)
            status |= too_slow(times)
            print(f"{where}, {trained}, us per bucket: {figures}")
        for ranks, pair in itertools.product((2, 8), (("contiguous", "zigzag"), ("striped", "zigzag"))):
            host = helpers("fake_gpu.device").Device().current(runs=False) if where == stub else nullcontext()
            figures = ", ".join(f"{name} {us:.1f}" for name, us in sequence(host, ranks, pair).items())
            print(f"{where}, {ranks} ranks, {pair[0]} to {pair[1]}, us: {figures}")
    sys.exit(status)
