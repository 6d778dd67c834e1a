"""Ranks in processes, eight of Gloo by default, that run many functions: ``pool.run(function, *args, world=2)``."""

import faulthandler
import gc
import importlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

from interpreter import speed_up

__all__ = [
    "COLLECTIVE", "PATIENCE", "PRELOADED", "RANK_LISTS", "Pool", "WorkerError", "fork_server", "group_of",
    "mesh_of_four", "strict_warnings",
]  # fmt: skip

WORLD = 8
RANK_LISTS = ((0,), (0, 1), (0, 1, 2), (0, 1, 2, 3), tuple(range(WORLD)), (0, 2), (1, 3), (2, 3))
PATIENCE = 2.0  # of all seconds after which ranks are given up: three tests share two cores
START_SECONDS, GRACE_SECONDS = 180.0, 8.0
COLLECTIVE = timedelta(seconds=90)
ON_GPUS = ((0, 1), (2, 3), (0, 2), (1, 3))  # groups of parts of the world there: each has a communicator of its own
# Ranks that share a GPU. NCCL refuses two of them on one host, so each names a host of its own, and they meet over the
# loopback interface.
SHARING = {
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_RAS_ENABLE": "0",
}
TELL = signal.SIGRTMIN + 5  # a rank that gets it writes the stacks of its threads


_OURS = "|".join(["tritoncomm", "tests", "bench", *(path.stem for path in Path(__file__).parent.glob("*.py"))])
OTHERS = f"(?!({_OURS}))"
"""Pattern of the modules of third parties, whose warnings a stranger's tests do not depend on."""


PRELOADED = ["torch", "torch.distributed", "numpy"]
"""Modules that the fork server imports, once for all processes; ``--preload`` adds to them before the first."""


def fork_server(more: Sequence[str] = ()) -> Any:
    """Context of processes that have ``PRELOADED`` from the start, and ``more`` if these are the first processes."""
    context: Any = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, *more])
    return context


class WorkerError(AssertionError):
    """A rank failed; the message has its rank and traceback."""


def group_of(*ranks: int) -> Any:
    """The group of ``RANK_LISTS`` over these ranks; a group that some ranks alone make would shift torch's names."""
    import torch.distributed as dist

    groups = dist.distributed_c10d._world.pg_group_ranks
    return next(group for group, members in groups.items() if sorted(members) == list(ranks))


def mesh_of_four(*names: str) -> Any:
    """The first four ranks as a mesh of two dims."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

    row, column = divmod(dist.get_rank(), 2)
    groups = [group_of(column, 2 + column), group_of(2 * row, 2 * row + 1)]
    return DeviceMesh.from_group(groups, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=names)


def strict_warnings() -> None:
    """Warnings are errors, except torch's own about its own insides; outside of CI everybody's but ours are shown."""
    warnings.simplefilter("error")
    if not os.environ.get("CI"):
        warnings.filterwarnings("default", module=OTHERS)
    # Dynamo looks at every attribute of an autograd.Function, deprecated ones included.
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\..*")
    warnings.filterwarnings("ignore", message="Conversion of an array with ndim", category=DeprecationWarning)
    warnings.filterwarnings("ignore", message="register: the sequence group has one rank")  # groups here have any size
    warnings.filterwarnings("ignore", message="Warning: Profiler clears events")  # torch 2.11, once in a process
    # Dynamo looks at it too where a graph breaks, and torch says so once in a process.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    warnings.filterwarnings("ignore", message=r".*torch\.jit.*")  # a FutureWarning from torch 2.15 on
    # A linear layer with a bias returns a view.
    warnings.filterwarnings("ignore", message=r"FSDP2-wrapped module .* returned a view", category=UserWarning)
    warnings.filterwarnings("ignore", message=r".*should not be instantiated.*", category=DeprecationWarning)
    # transformers has another name from 5.23 on; peft 0.21 asks by the old one, as tests do that run on older releases.
    warnings.filterwarnings("ignore", message=".*gradient_checkpointing.* is deprecated", category=FutureWarning)


class Pool:
    """Processes with the process groups of ``RANK_LISTS``; rebuilt after a rank died or hung.

    Args:
        size: number of ranks.
        backend: of the process groups.
        env: environment variables of the ranks.
        gpus: how many GPUs the ranks take turns on; with any, kernels are compiled and warnings are no errors.
        limit: timeout of the process groups.
    """

    def __init__(
        self,
        size: int = WORLD,
        backend: str = "gloo",
        env: Mapping[str, str] | None = None,
        gpus: int = 0,
        limit: timedelta = COLLECTIVE,
    ) -> None:
        self._size, self._backend, self._gpus, self._limit = size, backend, gpus, limit
        self._env = {"TRITON_INTERPRET": "0" if gpus else "1", **(env or {})}
        self._workers: list[tuple[BaseProcess, Connection]] = []
        self._groups: dict[int, int] = {}
        self._store: Any = None
        self._stacks: tempfile.TemporaryDirectory[str] | None = None
        self.started = 0

    def run(
        self, function: Callable[..., Any], *args: Any, world: int | Sequence[int] = 2, timeout: float = 90
    ) -> list[Any]:
        """Call ``function(group, *args)`` on the first ``world`` ranks, or on these; results in rank order."""
        ranks = tuple(range(world)) if isinstance(world, int) else tuple(world)
        if ranks not in RANK_LISTS or max(ranks) >= self._size:
            raise ValueError(f"no group over {ranks} of {self._size} ranks; there are {RANK_LISTS}")
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
        if self._stacks:
            self._stacks.cleanup()
        self._workers, self._groups = [], {}
        self._store = self._stacks = None

    def _start(self) -> None:
        if self._workers:
            return
        self.started += 1
        context = fork_server()
        # As torchrun's agent does, this process keeps the store: it outlives any rank.
        import torch.distributed as dist

        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self._stacks = tempfile.TemporaryDirectory()
        with mock.patch.dict(os.environ, self._env):  # of the server, which may import the main module first
            for rank in range(self._size):
                ours, theirs = context.Pipe()
                options = (self._size, self._backend, self._env, self._gpus, self._limit)
                stacks = f"{self._stacks.name}/{rank}"
                arguments = (rank, theirs, self._store.port, list(sys.path), stacks, *options)
                process = context.Process(target=_work, args=arguments, daemon=True)
                process.start()
                theirs.close()
                self._workers.append((process, ours))
        self._collect(range(self._size), "start", START_SECONDS)

    def _stack(self, rank: int) -> str:
        """What the threads of a rank that does not answer are in."""
        process = self._workers[rank][0]
        assert self._stacks is not None
        file = Path(self._stacks.name, str(rank))
        if process.pid is None or not process.is_alive() or not file.exists():
            return ""
        os.kill(process.pid, TELL)
        time.sleep(0.2)
        return file.read_text()

    def _collect(self, ranks: Sequence[int], what: str, timeout: float) -> list[Any]:
        results: dict[int, Any] = {}
        problems: dict[int, str] = {}
        waiting = {self._workers[rank][1]: rank for rank in ranks}
        end = time.monotonic() + PATIENCE * timeout
        while waiting and (ready := wait(list(waiting), max(0.0, end - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = waiting.pop(connection)
                try:
                    good, value, self._groups[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    self._workers[rank][0].join(GRACE_SECONDS)
                    good, value = False, f"died with exit code {self._workers[rank][0].exitcode}"
                if good:
                    results[rank] = value
                else:
                    problems[rank] = value
                    end = min(end, time.monotonic() + GRACE_SECONDS)
        problems |= {rank: f"did not answer\n{self._stack(rank)}" for rank in waiting.values()}
        skipped = {rank: value.reason for rank, value in results.items() if isinstance(value, Skip)}
        if skipped and not problems:
            if len(skipped) == len(results):
                importlib.import_module("pytest").skip(next(iter(skipped.values())))
            problems = {rank: f"skipped, and others not: {reason}" for rank, reason in skipped.items()}
        if not problems and len(set(self._groups.values())) > 1:
            # Torch names a group by its number, and would wait for ever for the ranks that call it by another name.
            problems = {rank: f"made {count} groups in all" for rank, count in self._groups.items()}
        if problems:
            self.stop()  # the ranks no longer agree on what comes next
            alike: dict[str, list[int]] = {}
            for rank in sorted(problems):
                alike.setdefault(problems[rank], []).append(rank)
            told = "\n".join(f"rank {', '.join(map(str, who))}:\n{text}" for text, who in alike.items())
            raise WorkerError(f"{what} on ranks {tuple(ranks)}\n{told}")
        return [results[rank] for rank in ranks]


class Skip(NamedTuple):
    """What a rank returns whose function has skipped its test."""

    reason: str


def _work(
    rank: int,
    connection: Connection,
    port: int,
    path: list[str],
    stacks: str,
    size: int,
    backend: str,
    env: dict[str, str],
    gpus: int,
    limit: timedelta,
) -> None:
    sys.path[:] = path
    faulthandler.register(TELL, file=open(stacks, "w"), all_threads=True)  # noqa: SIM115  (open until the end)
    os.environ.update(env)  # the server may be another pool's
    strict_warnings()
    if gpus:
        warnings.simplefilter("ignore")
    try:
        import torch
        import torch.distributed as dist

        if os.environ["TRITON_INTERPRET"] == "1":
            speed_up()
        gc.freeze()  # modules stay: without them a collection takes a millisecond, and tests make thousands
        torch.set_num_threads(1)
        bound = {}
        if gpus:
            if size > gpus and backend == "nccl":
                os.environ.update(SHARING, NCCL_HOSTID=f"tritoncomm-{rank}")
            torch.cuda.set_device(rank % gpus)
            bound = {"device_id": torch.device("cuda", rank % gpus)} if backend == "nccl" else {}
        options = {"rank": rank, "world_size": size, "timeout": limit, **bound}
        meeting = dist.TCPStore("127.0.0.1", port, is_master=False)
        meeting.set(f"here/{rank}", "")
        meeting.wait([f"here/{each}" for each in range(size)], timedelta(seconds=START_SECONDS))
        dist.init_process_group(backend, store=meeting, **options)
        lists = ON_GPUS if gpus else RANK_LISTS
        groups = {ranks: dist.new_group(list(ranks), timeout=limit) for ranks in lists if max(ranks) < size}
        groups.setdefault(tuple(range(size)), dist.group.WORLD)
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc(), 0)))
        return
    torchs = dist.distributed_c10d._world
    connection.send_bytes(pickle.dumps((True, None, torchs.group_count)))
    while True:
        try:
            ranks, module, name, args = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            break
        try:
            function = getattr(importlib.import_module(module), name)
            if "tritoncomm" in sys.modules:
                sys.modules["tritoncomm"].destroy()  # what an earlier function may have left initialized
            try:
                result = function(groups[ranks], *args)
            except BaseException as error:
                if type(error).__name__ != "Skipped":  # pytest's, which a rank does not import
                    raise
                result = Skip(str(error))
            answer = pickle.dumps((True, result, torchs.group_count))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc(), 0))
        connection.send_bytes(answer)
    os._exit(0)  # the peers may be gone already: nothing to say goodbye to
