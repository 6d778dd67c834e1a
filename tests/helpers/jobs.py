"""Ranks in fresh processes that are told about their job by environment variables only."""

import gc
import os
import re
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from pool import PATIENCE, fork_server, strict_warnings
from torch.distributed import TCPStore

__all__ = ["run_job", "run_late_ranks", "without_launcher"]

_LAUNCHERS = re.compile(
    r"RANK|WORLD_SIZE|LOCAL_\w+|GROUP_\w+|ROLE_\w+|MASTER_\w+|TORCHELASTIC_\w+|OMPI_\w+|PMI\w*_\w+|MPI_\w+|SLURM_\w+"
    r"|PBS_\w+|LSB_\w+|JOB_ID|TRITONCOMM_\w+"
)


def without_launcher(variables: Mapping[str, str]) -> dict[str, str]:
    """An environment without the variables of launchers, schedulers and this library."""
    return {name: value for name, value in variables.items() if not _LAUNCHERS.fullmatch(name)}


def run_job(
    function: Callable[..., Any],
    ranks: Sequence[dict[str, str]],
    *args: Any,
    timeout: float = 60,
    lost: Sequence[int] = (),
    preload: Sequence[str] = (),
) -> list[Any]:
    """``function(*args)`` in one process per entry of ``ranks``, with these variables and no launcher's; the results.

    A rank that raises gives its exception's text, one that does not answer in time None; those of ``lost`` are not
    waited for, and give None. The first job of this process imports the modules of ``preload`` once for all ranks.
    """
    context = fork_server(preload)
    pipes = [context.Pipe() for _ in ranks]
    processes = [
        context.Process(target=_rank, args=(theirs, variables, list(sys.path), function, args), daemon=True)
        for (_, theirs), variables in zip(pipes, ranks, strict=True)
    ]
    for process in processes:
        process.start()
    try:
        return [
            None if rank in lost or not ours.poll(PATIENCE * timeout) else ours.recv()
            for rank, (ours, _) in enumerate(pipes)
        ]
    finally:
        for process, pipe in zip(processes, pipes, strict=True):
            process.kill()
            process.join()
            process.close()
            for end in pipe:
                end.close()


def run_late_ranks(
    function: Callable[..., Any], world: int, *args: Any, timeout: float, env: Mapping[str, str] | None = None
) -> list[Any]:
    """``function(variables of all ranks, *args)`` in processes that are ranks as soon as they take these variables.

    Each has its own place among them in the variable ``PLACE``, and those of ``env``. A rank that fails is an error.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    places = [{"PLACE": str(rank), "OMP_NUM_THREADS": "1", **(env or {})} for rank in range(world)]
    results = run_job(function, places, ranks, *args, timeout=timeout)
    assert not any(result is None or isinstance(result, str) for result in results), results
    return results


def _rank(
    connection: Any, variables: dict[str, str], path: list[str], function: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    sys.path[:] = path
    gc.freeze()  # modules stay, and need not be looked through by every collection
    strict_warnings()
    for name in os.environ.keys() - without_launcher(os.environ).keys():
        del os.environ[name]
    os.environ.update(variables)
    if threads := variables.get("OMP_NUM_THREADS"):  # which the fork server's torch has read before
        torch.set_num_threads(int(threads))
    try:
        connection.send(function(*args))
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}" if str(error) else traceback.format_exc())
