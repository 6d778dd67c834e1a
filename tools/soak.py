"""Load over time: ``python tools/soak.py [--calls 50000] [--ranks 2 4] [--json PATH]``.

Mappings, p2p steps, resharding and attention over ever-changing shapes, groups that are made and destroyed, calls in
hash mode with a flight record, threads on groups of their own, forked workers of a data loader. Caches are full before
a phase begins: calls over a group that sends nothing have filled them. Memory, Python objects, descriptors, threads,
groups and cache entries are taken after half of a phase and at its end; what the second half adds is printed, and more
than the limits is a failure.
"""

import argparse
import ctypes
import functools
import gc
import json
import multiprocessing
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed import ProcessGroup, distributed_c10d
from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend that sends nothing
from torch.utils.data import DataLoader

from tritoncomm import mappings, p2p, variables
from tritoncomm.core import backend
from tritoncomm.reshard import Layout, reshard
from tritoncomm.ulysses import UlyssesAttention

__all__ = ["LIMITS", "PHASES", "Usage", "fill", "main", "soak", "usage"]

WARM_UP = 0.5  # of the calls
THREADS, GROUPS, EPOCHS = 4, 256, 30
CALLS = 50_000
_OBSERVED = 64  # calls on each group: enough to fill the cache of what calls are compared by, long before half
_BATCH, _STRAGGLERS = 4000, 40  # calls that fill caches, and the entries that so many may still add
_heap = ctypes.CDLL(None)


@dataclass(frozen=True)
class Usage:
    """Usage of a process.

    Attributes:
        memory: resident MiB, without what was freed and glibc keeps.
        objects: blocks of Python's allocator that are in use.
        descriptors: open files.
        threads: of the process.
        groups: process groups that torch knows.
        cached: entries of the product's caches.
        beyond: entries of the product's caches that have no limit.
    """

    memory: float
    objects: int
    descriptors: int
    threads: int
    groups: int
    cached: int
    beyond: int

    @classmethod
    def now(cls) -> "Usage":
        """Of this process, once threads that are about to end have ended."""
        gc.collect()
        time.sleep(0.5)
        objects = sys.getallocatedblocks()
        _heap.malloc_trim(0)
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        infos = _caches()
        return cls(
            round(pages * os.sysconf("SC_PAGE_SIZE") / 2**20, 1),
            objects,
            len(os.listdir("/proc/self/fd")),
            len(os.listdir("/proc/self/task")),
            len(distributed_c10d._world.pg_map),
            sum(info.currsize for info in infos),
            sum(info.currsize for info in infos if info.maxsize is None),
        )


LIMITS = Usage(memory=4.0, objects=30_000, descriptors=0, threads=0, groups=0, cached=2_000, beyond=0)
"""Most that the second half of a phase may add."""


def _caches() -> list[Any]:
    """Statistics of all caches of the product."""
    caches: list[Any] = [each for each in gc.get_objects() if type(each) is functools._lru_cache_wrapper]
    return [each.cache_info() for each in caches if str(each.__module__).startswith("tritoncomm")]


def _one_mapping(draw: random.Random, group: ProcessGroup) -> None:
    """A random mapping forward and backward, over a shape that hardly ever comes twice."""
    world = group.size()
    rows, batch, hidden = world * draw.randint(1, 40), draw.randint(1, 9), world * draw.randint(1, 40)
    dtype = draw.choice((torch.float32, torch.bfloat16, torch.float64))
    x = torch.ones(rows, batch, hidden, dtype=dtype, requires_grad=True)
    sizes = [draw.randint(0, 5) for _ in range(world)]
    kind = draw.randrange(8)
    if kind == 0:
        out = mappings.all_to_all_sp2hp(x, group)
    elif kind == 1:
        out = mappings.all_to_all_hp2sp(x.flatten(0, 1), group)
    elif kind == 2:
        out = mappings.gather_from_sequence_parallel_region(x, True, group)
    elif kind == 3:
        out = mappings.reduce_scatter_to_sequence_parallel_region(x, group)
    elif kind == 4:
        out = mappings.gather_from_tensor_model_parallel_region(x, group)
    elif kind == 5:
        out = mappings.reduce_from_tensor_model_parallel_region(x * 1, group)
    elif kind == 6:  # every rank sends sizes[w] rows to rank w
        x = torch.ones(sum(sizes), hidden, dtype=dtype, requires_grad=True)
        out = mappings.all_to_all(group, x, [sizes[group.rank()]] * world, sizes)
    else:
        x = torch.ones(sizes[group.rank()], hidden, dtype=dtype, requires_grad=True)
        out = mappings.gather_from_sequence_parallel_region(x, True, group, output_split_sizes=sizes)
    out.sum().backward()


def _one_exchange(draw: random.Random, group: ProcessGroup) -> None:
    """Attention over sequence shards, or a resharding of two tensors, forward and backward."""
    world, rank = group.size(), group.rank()
    if draw.random() < 0.5:
        shape = draw.randint(1, 3), draw.randint(1, 12)
        kv_heads, dim = draw.choice((1, 2, world, 2 * world)), draw.choice((4, 8))
        heads = kv_heads * world * draw.randint(1, 3)
        q, k, v = (torch.ones(*shape, each, dim, requires_grad=True) for each in (heads, kv_heads, kv_heads))
        UlyssesAttention(group)(q, k, v).sum().backward()
        return
    ranks = dist.get_process_group_ranks(group)
    tensors, sources, targets = {}, {}, {}
    for name in ("a", "b"):
        shape = world * draw.randint(1, 20), world * draw.randint(1, 20)
        sources[name], targets[name] = (Layout.on_mesh(shape, ranks, [dim]) for dim in (0, 1))
        if draw.random() < 0.5:
            rest = shape[0] - world + 1
            targets[name] = Layout.split(shape, 0, {each: rest if each == ranks[0] else 1 for each in ranks})
        tensors[name] = torch.ones(sources[name].local_shape(ranks[rank]) or (0,), requires_grad=True)
    made = reshard(tensors, sources, targets, group=group, bucket_bytes=draw.choice((1 << 20, 4096)))
    sum(x.sum() for x in made.values()).backward()


def _sends_nothing(*_: Any) -> None:
    """A collective of split sizes, which torch's fake group would check."""


def usage(_: ProcessGroup) -> Usage:
    """Usage of this rank now."""
    return Usage.now()


def fill(group: ProcessGroup, batches: int = 60, calls: int = _BATCH) -> list[int]:
    """Fill the caches by calls over a group that sends nothing; entries after every batch of calls."""
    ranks = dist.get_process_group_ranks(group)
    made = dist.new_group(ranks, backend="fake", use_local_synchronization=True)
    assert isinstance(made, ProcessGroup)
    draw, entries = random.Random(4), [0]
    uneven = dict.fromkeys(("all_gather_list", "reduce_scatter_list", "all_to_all"), _sends_nothing)
    with mock.patch.multiple(backend, **uneven):
        for _ in range(batches):
            for call in range(calls):
                _one_mapping(draw, made)
                if call % 8 == 0:
                    _one_exchange(draw, made)
            entries.append(sum(info.currsize for info in _caches()))
            if entries[-1] - entries[-2] < _STRAGGLERS:
                break
    dist.destroy_process_group(made)
    return entries


def run_mappings(group: ProcessGroup, calls: int) -> Any:
    draw = random.Random(1)
    return _watched(lambda _: _one_mapping(draw, group), calls)


def run_exchanges(group: ProcessGroup, calls: int) -> Any:
    draw = random.Random(5)
    return _watched(lambda _: _one_exchange(draw, group), calls)


def run_observed(group: ProcessGroup, calls: int) -> Any:
    """Mappings in hash mode with a flight record, on groups that come and go."""
    draw, ranks = random.Random(6), dist.get_process_group_ranks(group)

    def use(_: int) -> None:
        made = dist.new_group(ranks)
        assert isinstance(made, ProcessGroup)
        for _ in range(_OBSERVED):
            _one_mapping(draw, made)
        dist.destroy_process_group(made)

    with variables.HASH.override(32), variables.FLIGHT.override((1000, "")):
        return _watched(use, calls)


def run_hops(group: ProcessGroup, calls: int) -> Any:
    """One step of a ring, with lists of tensors and with known and with announced shapes."""
    draw, communicators = random.Random(2), []
    for variable in (False, True):
        config = SimpleNamespace(pipeline_dtype=torch.float32, batch_p2p_comm=False, variable_seq_lengths=variable)
        communicators.append(p2p.P2PCommunicator(group, config))

    def hop(_: int) -> None:
        shape = (draw.randint(1, 60), draw.randint(1, 9), draw.randint(1, 60))
        x = torch.ones(shape)
        received = draw.choice(communicators).send_forward_recv_forward(x, True, shape)
        assert received.shape == x.shape

    return _watched(hop, calls)


def run_groups(group: ProcessGroup, calls: int) -> Any:
    """Groups of all ranks, made, used and destroyed one after the other."""
    draw = random.Random(3)

    def use(_: int) -> None:
        made = dist.new_group(dist.get_process_group_ranks(group))
        assert isinstance(made, ProcessGroup)
        _one_mapping(draw, made)
        dist.destroy_process_group(made)

    return _watched(use, calls)


def run_threads(group: ProcessGroup, calls: int) -> Any:
    """Threads that call on groups of their own at the same time; new threads in every round."""
    own = [dist.new_group(dist.get_process_group_ranks(group)) for _ in range(THREADS)]
    draws = [random.Random(10 + i) for i in range(THREADS)]
    errors: list[BaseException] = []

    def work(i: int) -> None:
        try:
            for _ in range(10):
                _one_mapping(draws[i], own[i])
        except BaseException as error:
            errors.append(error)

    def round_of_threads(_: int) -> None:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(THREADS)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]

    usage = _watched(round_of_threads, calls)
    for each in own:
        dist.destroy_process_group(each)
    return usage


class _Rows:
    """A data set."""

    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((4, 8), float(i))


def run_forks(group: ProcessGroup, calls: int) -> Any:
    """Forked workers of a data loader, beside ranks that communicate."""
    multiprocessing.current_process()._config["daemon"] = False  # pyright: ignore  # whose children are forbidden

    def epoch(_: int) -> None:
        rows: Any = _Rows()
        for batch in DataLoader(rows, batch_size=4, num_workers=2, multiprocessing_context="fork"):
            mappings.all_to_all_sp2hp(batch.flatten(0, 1), group)

    return _watched(epoch, calls)


PHASES: dict[str, tuple[Callable[..., Any], Callable[[int], int]]] = {
    "mappings": (run_mappings, lambda calls: calls),
    "hops": (run_hops, lambda calls: calls),
    "exchanges": (run_exchanges, lambda calls: max(calls // 10, 4)),
    "groups": (run_groups, lambda calls: min(GROUPS, max(calls // 20, 4))),
    "observed": (run_observed, lambda calls: min(GROUPS, max(calls // 20, 4))),
    "threads": (run_threads, lambda calls: max(calls // 1000, 4)),
    "forks": (run_forks, lambda calls: min(EPOCHS, max(calls // 100, 4))),
}


def _watched(step: Callable[[int], None], calls: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Usage of this process after the warm-up, and at the end."""
    warm: Usage | None = None
    for call in range(calls):
        if warm is None and call >= WARM_UP * calls:
            warm = Usage.now()
        step(call)
    return asdict(warm or Usage.now()), asdict(Usage.now())


def soak(pool: Any, phase: str, world: int, calls: int) -> dict[str, float]:
    """The largest growth of any rank in one phase, by what grows."""
    function, count = PHASES[phase]
    usages = pool.run(function, count(calls), world=world, timeout=3600)
    return {name: round(max(end[name] - warm[name] for warm, end in usages), 1) for name in usages[0][0]}


@contextmanager
def filled(world: int) -> Iterator[Pool]:
    """Ranks whose caches are full."""
    # glibc gives new threads arenas of their own, which keep what was freed: growth that is no leak.
    pool = Pool(world, env={"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "2"})
    try:
        entries = pool.run(fill, world=world, timeout=3600)[0]
        print(f"{world} ranks: {entries[-1]} entries in caches after {_BATCH * (len(entries) - 1)} calls", flush=True)
        yield pool
    finally:
        pool.stop()


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Load over time: what grows is a leak.")
    parser.add_argument("--calls", type=int, default=CALLS, help="mapping calls, and p2p steps, of every rank")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--phases", nargs="+", default=list(PHASES), choices=list(PHASES))
    parser.add_argument("--json", type=Path, help="where to write the growth")
    options = parser.parse_args(arguments)
    limits, rows, leaks = asdict(LIMITS), [], 0
    print(f"{'phase':10}{'ranks':>6}{'calls':>8}{'minutes':>9}  growth of " + ", ".join(limits), flush=True)
    for world in options.ranks:
        with filled(world) as pool:
            for phase in options.phases:
                begun = time.monotonic()
                growth = soak(pool, phase, world, options.calls)
                minutes = (time.monotonic() - begun) / 60
                over = [name for name, value in growth.items() if value > limits[name]]
                leaks += bool(over)
                calls = PHASES[phase][1](options.calls)
                rows.append({"phase": phase, "ranks": world, "calls": calls, "minutes": minutes, "growth": growth})
                words = "  ".join(f"{value:g}" for value in growth.values())
                more = f"   GROWS: {', '.join(over)}" if over else ""
                print(f"{phase:10}{world:6}{calls:8}{minutes:9.1f}  {words}{more}", flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1))
    print(f"{leaks} of {len(rows)} phases grow beyond the limits")
    return min(leaks, 1)


if __name__ == "__main__":
    sys.exit(main())
