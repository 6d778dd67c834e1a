"""Whether all ranks of a job have the same variables and tuned tables; where they differ one rank warns.

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

__all__ = ["check", "compare", "difference", "settings"]

_KEY = "tritoncomm/agreement"
_SHOWN = 6


def check() -> None:
    """Warn on one rank if ranks of the default group differ in the library's variables or in tuned tables.

    Every rank calls it; `initialize()` does. No rank waits for another: each leaves what it has in the store of the
    default group, and whoever comes last compares.
    """
    world = dist.get_world_size()
    if world == 1 or dist.get_backend() == "fake":
        return
    store = distributed_c10d._get_default_store()
    message = "" if store is None else compare(store, dist.get_rank(), world, settings())
    if message:
        warnings.warn(message, RuntimeWarning, stacklevel=3)


def settings() -> dict[str, str]:
    """What every variable comes to on this rank, and the tables that count for its current device."""
    mine = variables.effective()
    if not (torch.cuda.is_available() and torch.cuda.is_initialized()):  # a check must not be what starts CUDA
        return {"device": "CPU", "tuned tables": ""} | mine
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    device = (properties.name, properties.multi_processor_count)
    return {"device": f"{device[0]}, {device[1]} SMs", "tuned tables": tables.digest(*device)} | mine


def compare(store: Any, rank: int, world: int, mine: Mapping[str, str]) -> str:
    """Leave ``mine`` in the store; on the last of the ranks what differs in words, else nothing.

    Rounds are counted per rank, so ranks that are started again or initialize more often than others are compared with
    nobody, and wait for nobody.
    """
    key = f"{_KEY}/{store.add(f'{_KEY}/rounds/{rank}', 1)}"
    store.set(f"{key}/{rank}", json.dumps(dict(mine)))
    names = [f"{key}/{other}" for other in range(world)]
    if store.add(key, 1) != world or not store.check(names):
        return ""
    return difference([json.loads(value) for value in store.multi_get(names)])


def difference(settings: Sequence[Mapping[str, str]]) -> str:
    """What ranks differ in, and what follows from it.

    Tables are compared on devices of one kind; where nobody read one, so is the variable that names it: a node may have
    the same table elsewhere.
    """
    speed = [_line(variables.PATH.name, settings, range(len(settings)))]
    for device in sorted({one["device"] for one in settings}):
        ranks = [rank for rank, one in enumerate(settings) if one["device"] == device]
        are_read = all(settings[rank]["tuned tables"] for rank in ranks)
        speed.append(_line("tuned tables" if are_read else tables.VARIABLE, settings, ranks, f" for {device}"))
    slower = "; ".join(filter(None, speed))
    sentences = [
        slower and f"{slower}. Results are the same, but every collective waits for the slowest rank",
        _line(variables.CHECK.name, settings, range(len(settings))),
    ]
    if sentences[1]:
        sentences[1] += ". Messages between ranks that differ in it fail: only one side sends or expects a header"
    words = ". ".join(filter(None, sentences))
    return words and (
        f"ranks are configured differently: {words}. Give every rank the same variables and one table (docs/tuning.md)"
    )


def _line(name: str, settings: Sequence[Mapping[str, str]], ranks: Sequence[int], where: str = "") -> str:
    values: dict[str, list[int]] = {}
    for rank in ranks:
        values.setdefault(settings[rank][name], []).append(rank)
    if len(values) < 2:
        return ""
    return f"{name}{where} is " + ", ".join(f"{value or 'unset'} on {_ranks(who)}" for value, who in values.items())


def _ranks(ranks: Sequence[int]) -> str:
    """``ranks 0-3, 7``, the first few runs."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and runs[-1][1] == rank - 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    words = [str(first) if first == last else f"{first}-{last}" for first, last in runs[:_SHOWN]]
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(words)}{', ...' if len(runs) > _SHOWN else ''}"
