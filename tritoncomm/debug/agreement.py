"""Agreement of a job's ranks on variables and tuned tables; one rank warns where they differ.

Only TRITONCOMM_CHECK decides what is sent. Paths and tiles decide speed: a collective waits for the slowest rank.
"""

import json
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d
from tritoncomm_kernels import tables

from tritoncomm import variables
from tritoncomm.debug.store import last_of
from tritoncomm.debug.texts import named_ranks

__all__ = ["check", "compare", "difference", "settings"]

_KEY = "tritoncomm/agreement"


def check() -> None:
    """Warn on one rank if ranks of the default group differ in the library's variables or in tuned tables."""
    world = dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return
    store = distributed_c10d._get_default_store()
    try:
        # Nobody waits: each rank publishes its settings, and the last one to arrive compares them.
        message = "" if store is None else compare(store, dist.get_rank(), world, settings())
    except dist.DistNetworkError:  # the process that holds it has ended, as a short program may before others come here
        return
    if message:
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def settings() -> dict[str, str]:
    """Return this rank's settings by name: the library's variables, the device, and a digest of its tuned tables."""
    # The digest stays empty before the program has initialized CUDA.
    device, digest = "CPU", ""
    if torch.cuda.is_available() and torch.cuda.is_initialized():  # the check must not be what starts CUDA
        gpu = torch.cuda.get_device_properties(torch.cuda.current_device())
        device = f"{gpu.name}, {gpu.multi_processor_count} SMs"
        digest = tables.digest(gpu.name, gpu.multi_processor_count)
    return {"device": device, "tuned tables": digest} | variables.effective()


def compare(store: Any, rank: int, world: int, mine: Mapping[str, str]) -> str:
    """Publish this rank's settings; return the text of ``difference`` on the rank that comes last, empty on others."""
    # Each rank counts its own calls. So a rank that was restarted, or initializes more often than others, is not
    # compared.
    values = last_of(store, _KEY, rank, world, json.dumps(dict(mine)))
    return "" if values is None else difference([json.loads(value) for value in values])


def difference(settings: Sequence[Mapping[str, str]]) -> str:
    """Return a warning with the ranks of each setting in which ranks differ, and the consequence; empty if all agree.

    ``settings`` are in rank order. Only the choice of local pass, the tuned tables and check mode count.
    """
    every = range(len(settings))
    speed = [_line(variables.PATH.name, settings, every)]
    for device, ranks in sorted(_by_value("device", settings, every).items()):
        # Ranks with one kind of device compare the contents of their tables, as nodes may have one table in different
        # places. If one of them has read no table, they compare the variable that has the path.
        name = "tuned tables" if all(settings[rank]["tuned tables"] for rank in ranks) else tables.VARIABLE
        speed.append(_line(name, settings, ranks, f" for {device}"))
    slower, header = "; ".join(filter(None, speed)), _line(variables.CHECK.name, settings, every)
    if slower:
        slower += ". Results are the same, but every collective waits for the slowest rank"
    if header:
        header += ". Messages between ranks that differ in it fail: only one side has a header"
    words = ". ".join(filter(None, (slower, header)))
    return words and (
        f"ranks are configured differently: {words}. Give every rank the same variables and one table (docs/tuning.md)"
    )


def _by_value(name: str, settings: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> dict[str, list[int]]:
    """Return the ranks that have each value of the setting ``name``, by value."""
    groups: dict[str, list[int]] = {}
    for rank in ranks:
        groups.setdefault(settings[rank][name], []).append(rank)
    return groups


def _line(name: str, settings: Sequence[Mapping[str, str]], ranks: Sequence[int], where: str = "") -> str:
    """Return ``NAME is A on ranks 0-2, B on rank 3``, ``where`` behind the name; empty if the ranks have one value."""
    groups = _by_value(name, settings, ranks)
    values = ", ".join(f"{value or 'unset'} on {named_ranks(group)}" for value, group in groups.items())
    return f"{name}{where} is {values}" if len(groups) > 1 else ""
