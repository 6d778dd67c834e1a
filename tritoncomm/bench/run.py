"""Run of a benchmark: ranks that are started here, or this process as a rank of a launcher's job."""

import os
import platform
import socket
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import multiprocessing
from torch.cuda import nccl
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes
from tritoncomm_kernels import installed_triton

from tritoncomm import launchers
from tritoncomm.bench.ranks import Row, rows
from tritoncomm.bench.settings import Settings

__all__ = ["BenchError", "Settings", "content", "run"]

_POLL_S = 0.1


class BenchError(RuntimeError):
    """A rank failed; the message has its traceback."""


def run(settings: Settings) -> Iterator[Row]:
    """Measure, and yield each row as soon as it is measured.

    With ``settings.ranks`` processes are started here. Without, this process is a rank of a launcher's job.

    Raises:
        BenchError: a rank that was started here failed.
    """
    return rows(settings) if settings.ranks is None else _started(settings)


def content(settings: Settings, found: Sequence[Row]) -> dict[str, Any]:
    """Return the content of a results file."""
    on_gpu = settings.on_gpu()
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": installed_triton.version() or "not installed",
    }
    if on_gpu:
        versions["NCCL"] = ".".join(map(str, nccl.version()))
    return {
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "unit": "microseconds per call of the slowest rank",
        "ranks": settings.world(),
        "backend": settings.backend(),
        "dtype": settings.dtype,
        "versions": versions,
        "rows": [row for row in found if "us" in row],
        "refused": [f"{row['row']}: {one}" for row in found for one in row.get("refused", ())],
        "left_out": [row["row"] for row in found if "left_out" in row],
        "failed": [f"{row['row']}: {row['problem']}" for row in found if "problem" in row],
    }


def _started(settings: Settings) -> Iterator[Row]:
    """Start the ranks, and yield rank 0's rows as they come."""
    context: Any = multiprocessing.get_context("forkserver")  # imports torch once; with spawn every process does
    context.set_forkserver_preload(["torch", "torch.distributed"])
    queue = context.Queue()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started: Any = start_processes(
        _rank_main, (settings, port, queue), settings.world(), join=False, daemon=True, start_method="forkserver"
    )
    try:
        has_ended = False
        while not has_ended:
            has_ended = started.join(timeout=_POLL_S)
            while not queue.empty():
                yield queue.get()
    except (ProcessRaisedException, ProcessExitedException) as error:
        raise BenchError(str(error)) from None
    finally:
        for process in started.processes:
            process.kill()


def _rank_main(rank: int, settings: Settings, port: int, queue: Any) -> None:
    """Measure as a rank; rank 0 puts the rows into the queue."""
    launchers.forget(os.environ)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(settings.ranks), MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )  # fmt: skip
    for row in rows(settings):
        if rank == 0:
            queue.put(row)
    if rank == 0:
        queue.close()
        queue.join_thread()
