"""Check mode by the number of ranks: ``python -m bench.check_scale`` measures a checked call at 8 to 4,096 ranks.

The store is a real TCPStore in a process of its own. Three ranks run the real code, each in its process: the first
rank, its first child, and the last rank. Their process group sends nothing, so a call is its comparison. One more
process stands for the other ranks: it makes the requests of each of them, in the same order, over at most 64
connections. ``--write`` writes the figures, and the table of docs/reliability.md.
"""

import argparse
import json
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.guard import RESULTS
from tritoncomm import collective, variables
from tritoncomm.debug import check
from tritoncomm.debug.comparison import FANOUT, combine
from tritoncomm.debug.store import JobStore

__all__ = ["Counted", "main", "measure", "table"]

WORLDS = {8: 40, 64: 40, 512: 20, 4096: 20}  # and the number of calls that are timed
FILE = RESULTS / "cpu" / "scale" / "check_scale.json"  # not one of the files with ratios, which docs/benchmarks.md has
PAGE = Path(__file__).resolve().parents[1] / "docs" / "reliability.md"
BEGIN, END = "<!-- check_scale -->\n", "<!-- end of check_scale -->\n"
_THREADS, _CONNECTIONS = 8, 64
_TIMEOUT = timedelta(seconds=300)
_HASHED = 2000  # calls of hash mode that are timed


class Counted:
    """A store that notes the requests of one rank, each with the bytes of its values; its clones do so too."""

    def __init__(self, store: Any, requests: list[tuple[str, int]]) -> None:
        self._store, self._requests = store, requests

    def clone(self) -> "Counted":
        """Another connection to the same store."""
        return Counted(self._store.clone(), self._requests)

    def __getattr__(self, name: str) -> Any:
        attribute = getattr(self._store, name)
        if name == "set_timeout":  # of the client, no request
            return attribute

        def request(*arguments: Any) -> Any:
            value = attribute(*arguments)
            values = value if isinstance(value, list) else [value, *arguments[1:]]
            self._requests.append((name, sum(len(each) for each in values if isinstance(each, bytes))))
            return value

        return request


def _serve(pipe: Any) -> None:
    """Hold the store, and answer each message with the CPU seconds of this process so far."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while pipe.recv():
        pipe.send(time.process_time())


def _client(port: int) -> Any:  # torch's stubs lack clone and bytes
    return TCPStore("127.0.0.1", port, is_master=False, timeout=_TIMEOUT, wait_for_workers=False)


def _real(place: int, world: int, port: int, calls: int, pipe: Any) -> None:
    """Make the checked calls of one rank, and send the figures of each: seconds, CPU seconds, requests, bytes."""
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=place, world_size=world, store=FakeStore())
    group, x, requests = dist.group.WORLD, torch.ones(4), list[tuple[str, int]]()
    assert group is not None
    with variables.CHECK.override(True):
        collective.all_reduce(x, group)
        member = check._members[group]
        member.store, member.count, member.timeout = JobStore(Counted(_client(port), requests), place), 0, 300.0
        window = [
            (None, check.describe("all_reduce", "all_reduce", x.shape, x.dtype, (dist.ReduceOp.SUM,), 1, 0, "cpu"))
        ]
        pipe.send((member.key, check._digest([each for _, each in window], place)))
        pipe.recv()
        figures = []
        for _ in range(calls + 1):  # the first one opens connections
            requests.clear()
            started, cpu = time.perf_counter(), time.process_time()
            collective.all_reduce(x, group)
            sent = sum(size for _, size in requests)
            figures.append((time.perf_counter() - started, time.process_time() - cpu, len(requests), sent))
    hashed = []
    for every in (0, 10 * _HASHED):
        with variables.HASH.override(every):
            member.window.clear()
            cpu = time.process_time()
            for _ in range(_HASHED):
                collective.all_reduce(x, group)
            hashed.append((time.process_time() - cpu) / _HASHED)
    pipe.send((figures[1:], hashed[1] - hashed[0]))


def _simulate(world: int, port: int, calls: int, real: Sequence[int], pipe: Any) -> None:
    """Make the requests of all ranks but the ``real`` ones, in threads that each stand for every eighth rank."""
    places = [place for place in range(1, world) if place not in real]
    with ThreadPoolExecutor(128) as pool:
        opened = list(pool.map(lambda _: _client(port), range(min(len(places), _CONNECTIONS))))
    clients = {place: opened[place % len(opened)] for place in places}
    pipe.send("ready")
    key, digest = pipe.recv()

    def ranks(first: int) -> None:
        places = [place for place in reversed(range(first, world, _THREADS)) if place in clients]
        for call in range(1, calls + 2):
            base = f"tc1/{key}/{call}"
            for place in places:  # children before their parents
                client, combined = clients[place], digest
                children = range(FANOUT * place + 1, min(FANOUT * (place + 1) + 1, world))
                if children:
                    client.check([f"{base}/verdict"])
                    combined = combine([digest, *client.multi_get([f"{base}/{child}" for child in children])])
                client.set(f"{base}/{place}", combined)
            for place in places:
                assert clients[place].get(f"{base}/verdict") == b"+"
                clients[place].delete_key(f"{base}/{place}")

    threads = [threading.Thread(target=ranks, args=(first,)) for first in range(_THREADS)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    pipe.send("done")


def _fast(seconds: Iterable[float]) -> float:
    """Return the time that a fifth of the calls stay below."""
    ordered = sorted(seconds)
    return ordered[len(ordered) // 5]


def measure(world: int, calls: int) -> dict[str, Any]:
    """Return the figures of a checked call of ``world`` ranks, over ``calls`` calls.

    Seconds are those of the slowest of the real ranks. CPU time, requests and bytes are listed by real rank. Times are
    at p20, requests and bytes the least: a rank that waits for 0.05 s and more asks for the reason. The CPU time of the
    store is the mean per call, all ranks together.
    """
    context = multiprocessing.get_context("spawn")
    started: list[Any] = []
    os.environ["RES_OPTIONS"] = "timeout:1 attempts:1"  # a connection waits for the name of its own end

    def start(function: Callable[..., None], *arguments: Any) -> Any:
        ours, theirs = context.Pipe()
        started.append(context.Process(target=function, args=(*arguments, theirs), daemon=True))
        started[-1].start()
        return ours

    server = start(_serve)
    port, places = server.recv(), sorted({0, 1, world - 1})
    others = start(_simulate, world, port, calls, places)
    ranks = [start(_real, place, world, port, calls) for place in places]
    assert others.recv() == "ready"
    (key, digest), *_ = [pipe.recv() for pipe in ranks]
    server.send("time")
    before = server.recv()
    for pipe in ranks:
        pipe.send("go")
    others.send((key, digest))
    results = [pipe.recv() for pipe in ranks]
    assert others.recv() == "done"
    server.send("time")
    cpu = (server.recv() - before) / (calls + 1)
    for each in started:
        each.terminate()
        each.join()
    figures = [list(zip(*of_rank, strict=True)) for of_rank, _ in results]
    parents = len(range(1, -(-(world - 1) // FANOUT)))  # ranks with children, but the first
    # As the store counts: a get and a multi_get are two, a wait and the values.
    served = 4 * (world - 1) + 3 * parents + 4
    return {
        "world": world, "seconds": _fast(map(max, zip(*(columns[0] for columns in figures), strict=True))),
        "store_cpu_ms": cpu * 1e3, "store_requests": served, "store_requests_per_cpu_second": served / cpu,
        "hash_us": statistics.median(added for _, added in results) * 1e6,
        "ranks": {
            name: {"cpu_ms": _fast(columns[1]) * 1e3, "requests": min(columns[2]), "bytes": min(columns[3])}
            for name, columns in zip(("first", "child of the first", "last"), figures, strict=True)
        },
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the figures as a table in Markdown, one line per number of ranks."""
    lines = [
        "| ranks | requests of first, inner, last rank | bytes | CPU ms of a rank | a call, ms | store, CPU ms |",
        "|---|---|---|---|---|---|",
    ]
    for row in rows:
        ranks = row["ranks"].values()
        requests, sizes = (", ".join(str(each[name]) for each in ranks) for name in ("requests", "bytes"))
        cpu = ", ".join(f"{each['cpu_ms']:.1f}" for each in ranks)
        cells = (f"{row['world']:,}", requests, sizes, cpu, f"{row['seconds'] * 1e3:.0f}", f"{row['store_cpu_ms']:.0f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    """Measure, print the table, and with ``--write`` write the results file and the page."""
    parser = argparse.ArgumentParser(description="A checked call by the number of ranks.")
    parser.add_argument("--worlds", type=int, nargs="*", default=list(WORLDS), help="numbers of ranks, 3 or more")
    parser.add_argument("--write", action="store_true", help="write the results file and the table of the page")
    arguments = parser.parse_args()
    rows = []
    for world in arguments.worlds:
        rows.append(measure(world, WORLDS.get(world, 10)))
        print(json.dumps(rows[-1]), flush=True)
    print(table(rows), end="")
    if arguments.write:
        FILE.write_text(
            json.dumps({"torch": torch.__version__, "cores": os.cpu_count(), "rows": rows}, indent=1) + "\n"
        )
        head, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(head + BEGIN + table(rows) + END + rest.partition(END)[2])
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
