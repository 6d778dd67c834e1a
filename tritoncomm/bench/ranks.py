"""Rank of a benchmark: compares the values of all providers, then times them with all other ranks."""

import gc
import logging
import random
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from tritoncomm import runtime
from tritoncomm.bench.exchanges import MIB, Calls, Place, TimedExchange
from tritoncomm.bench.samples import figures, quantile
from tritoncomm.bench.settings import Settings, chosen
from tritoncomm.groups import ParallelMode, get_group

__all__ = ["Row", "rows"]

Row = dict[str, Any]
Samples = dict[str, list[float]]  # microseconds by provider
WARM_UP, LEAST, MOST = 3, 10, 100  # rounds
SHARE = 0.6  # of the budget, for the rounds; the rest is for values and preparations
MATMUL = 8192  # side of the matrices whose product runs beside an exchange


def rows(settings: Settings) -> Iterator[Row]:
    """Join the job, and yield a row as soon as it is measured; the same rows on all ranks.

    A row without ``us`` has the reason in ``problem`` or ``refused``, or is ``left_out`` for want of time.
    """
    torch.set_num_threads(1)
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # DTensor's all-to-all over Gloo
    started = time.monotonic()
    world = settings.world()
    runtime.initialize(tensor=world, backend=settings.backend(), timeout=settings.timeout)
    try:
        place, cases = _place(settings, world), list(chosen(settings))
        seconds = SHARE * settings.budget / len(cases) / (1 if place.capture is None else 2)
        for exchange, mib in cases:
            label = f"{exchange.name} {mib:g} MiB"
            if _largest(time.monotonic() - started, place) > settings.budget:
                yield {"row": label, "left_out": True}
                continue
            for row in _measured(exchange, mib, label, place, seconds):
                yield {"exchange": exchange.name, "MiB": mib, **row}
            gc.collect()
    finally:
        runtime.destroy()


def _place(settings: Settings, world: int) -> Place:
    group = get_group(ParallelMode.TENSOR)
    device = torch.device("cuda", torch.cuda.current_device()) if settings.on_gpu() else torch.device("cpu")
    mesh = DeviceMesh.from_group(group, device.type)
    hidden = 4096 if 4096 % world == 0 else 512 * world
    capture = _graph_of if settings.on_gpu() else (lambda call: call) if settings.dry else None
    return Place(group, mesh, device, settings.on_gpu(), settings.torch_dtype, hidden, capture)


def _graph_of(call: Callable[[], Any]) -> Callable[[], Any]:
    """Capture a call, and return the replay of its graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watchdog looks at events meanwhile
        call()
    return graph.replay


def _measured(exchange: TimedExchange, mib: float, label: str, place: Place, seconds: float) -> Iterator[Row]:
    """Yield the rows of one exchange: eager, and captured on a GPU."""
    try:
        calls = exchange.calls(place, int(mib * MIB))
        problem = _different(calls)
    except Exception as error:  # ends the run: the other ranks may wait inside a collective
        raise RuntimeError(f"{label} failed on rank {place.group.rank()}") from error
    if problems := [f"rank {rank}: {one}" for rank, one in enumerate(_gathered(problem, place)) if one]:
        yield {"row": label, "problem": problems[0]}
        return
    samples = _samples(calls, place, seconds)
    row = figures(f"{label}, eager", samples, mode="eager", rounds=len(samples["ours"]))
    row["outside"] = round(1 - min(1.0, 1 / row["ratio"]["bare"]), 3)
    if place.on_gpu:
        row["peak"] = {name: _peak(call, mib) for name, call in calls.items()}
        row["matmul"] = {name: _beside(call, place) for name, call in calls.items()}
    yield row
    if place.capture is not None and not exchange.waits:
        yield _captured(calls, label, place, seconds)


def _captured(calls: Calls, label: str, place: Place, seconds: float) -> Row:
    """Return the row of the same calls as CUDA graphs; providers that cannot be captured are in ``refused``."""
    assert place.capture is not None
    graphs: dict[str, Callable[[], Any]] = {}
    refused: list[str] = []
    for name, call in calls.items():
        problem = ""
        try:
            replay = place.capture(call)
        except RuntimeError as error:
            replay, problem = call, str(error).splitlines()[0]
        if problems := [one for one in _gathered(problem, place) if one]:
            refused.append(f"{name}: {problems[0]}")
        else:
            graphs[name] = replay
    if "ours" not in graphs:
        return {"row": f"{label}, captured", "refused": refused}
    samples = _samples(graphs, place, seconds)
    return figures(f"{label}, captured", samples, mode="captured", rounds=len(samples["ours"]), refused=refused)


def _different(calls: Calls) -> str:
    """Return the first peer whose results are not ours, bit for bit; empty if there is none."""
    results = {name: call() for name, call in calls.items()}
    ours = results["ours"]
    for name, theirs in results.items():
        if name == "bare":  # the collectives alone, without results
            continue
        if len(theirs) != len(ours):
            return f"{name} has {len(theirs)} results, ours {len(ours)}"
        for i, (x, y) in enumerate(zip(ours, theirs, strict=True)):
            if (x.shape, x.dtype) != (y.shape, y.dtype):
                return f"result {i} of {name} is {y.dtype} {tuple(y.shape)}, ours {x.dtype} {tuple(x.shape)}"
            if not torch.equal(x, y):
                return f"result {i} of {name} differs from ours in {int((x != y).sum())} of {x.numel()} values"
    return ""


def _samples(calls: dict[str, Callable[[], Any]], place: Place, seconds: float) -> Samples:
    """Time rounds in which every provider takes its turn; a sample is the time of the slowest rank."""
    clock = _time_on_gpu if place.on_gpu else _time_on_cpu
    shuffle = random.Random(0).shuffle
    order, samples = list(calls.items()), {name: [] for name in calls}
    rounds, passed = MOST, 0
    while passed < WARM_UP + rounds:
        began = time.monotonic()
        for name, call in order:
            samples[name].append(clock(call, place))
        shuffle(order)  # the same order on all ranks; nobody always follows the same one
        passed += 1
        if passed == WARM_UP:
            rounds = int(min(MOST, max(LEAST, seconds / _largest(time.monotonic() - began, place))))
    slowest = torch.tensor([samples[name][WARM_UP:] for name in calls], dtype=torch.float64, device=place.device)
    dist.all_reduce(slowest, dist.ReduceOp.MAX, group=place.group)
    return dict(zip(calls, slowest.tolist(), strict=True))


def _time_on_cpu(call: Callable[[], Any], place: Place) -> float:
    dist.barrier(place.group)
    started = time.perf_counter()
    call()
    return (time.perf_counter() - started) * 1e6


def _time_on_gpu(call: Callable[[], Any], place: Place) -> float:
    """Time from the moment that all ranks' GPUs have met until this one has finished."""
    met = torch.zeros(1, device=place.device)
    torch.cuda.synchronize()
    dist.all_reduce(met, group=place.group)
    return _elapsed(call)


def _peak(call: Callable[[], Any], mib: float) -> float:
    """Return the most new memory that a call holds, in inputs."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / (mib * MIB), 2)


def _beside(call: Callable[[], Any], place: Place, rounds: int = 7) -> float:
    """Return the time of a matrix product beside the exchange over its time alone, at the median."""
    a = torch.ones(MATMUL, MATMUL, dtype=torch.bfloat16, device=place.device)
    side, ratios = torch.cuda.Stream(), []
    for _ in range(rounds):
        times = [_time_on_gpu(lambda: a @ a, place)]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            call()
        times.append(_elapsed(lambda: a @ a))
        torch.cuda.synchronize()  # the exchange may last longer
        ratios.append(times[1] / times[0])
    return round(quantile(ratios, 0.5), 3)


def _elapsed(call: Callable[[], Any]) -> float:
    """Return the microseconds of a call on the current stream, whatever runs on others."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) * 1e3


def _largest(value: float, place: Place) -> float:
    """Return the largest of all ranks' values."""
    largest = torch.tensor([value], dtype=torch.float64, device=place.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX, group=place.group)
    return largest.item()


def _gathered(text: str, place: Place) -> list[str]:
    """Return the texts of all ranks."""
    texts: list[Any] = [None] * place.group.size()
    dist.all_gather_object(texts, text, group=place.group)
    return texts
