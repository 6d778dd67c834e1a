"""Where host time is measured: a no-op process group, the CPU as Megatron's device, real ranks, and the peers."""

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.harness import Part

__all__ = [
    "MEGATRON", "cpu_device", "enqueue", "helpers", "megatron_part", "no_op_group", "peer", "real_ranks",
    "run_backward",
]  # fmt: skip

MEGATRON = "pip install --no-deps megatron-core==0.16.1"

# What torch.autograd.grad calls; its own checks take as long as a small operator does, for every provider.
run_backward = torch.autograd.Variable._execution_engine.run_backward  # type: ignore


def peer(module: str) -> Any:
    """A module of megatron-core, by its name in ``megatron.core``."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return importlib.import_module(f"megatron.core.{module}")


def missing_megatron() -> str:
    """Install command of megatron-core; empty where it is installed. Nothing of it is imported."""
    try:
        found = importlib.util.find_spec("megatron.core")
    except ImportError:
        found = None
    return "" if found is not None else f"megatron-core is not installed: {MEGATRON}"


# A part against megatron-core.
megatron_part = partial(Part, peer="megatron", missing=missing_megatron, packages=("megatron-core",))


@contextmanager
def cpu_device() -> Iterator[None]:
    """The CPU as the device that Megatron allocates on and synchronises."""
    before = torch.cuda.current_device, torch.cuda.synchronize
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    torch.cuda.synchronize = lambda device=None: None
    try:
        yield
    finally:
        torch.cuda.current_device, torch.cuda.synchronize = before


@contextmanager
def no_op_group(world: int, rank: int = 0) -> Iterator[ProcessGroup]:
    """A process group that answers every collective at once and moves no data."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=world)
    try:
        assert dist.group.WORLD is not None
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def enqueue(collectives: Sequence[str]) -> Callable[[], None]:
    """Starts these collectives on a Gloo group of one rank and does not wait: the host time that a backend adds."""
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1)
    source, out = torch.zeros(8, 16), torch.zeros(8, 16)
    arguments: dict[str, tuple[Any, ...]] = {"allreduce": ([out],), "alltoall_base": (out, source, [], [])}
    started = [(getattr(group, name), arguments.get(name, (out, source))) for name in collectives]

    def call() -> None:
        for collective, given in started:
            collective(*given)

    return call


def helpers(module: str) -> Any:
    """A module of the tests' helpers; ranks import this folder's modules by their names too."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "tests" / "helpers"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    return importlib.import_module(module)


@contextmanager
def real_ranks() -> Iterator[Any]:
    """Gloo ranks in processes of their own, for ``pool.run(function, *args, world=...)``."""
    pool = helpers("pool").Pool()
    try:
        yield pool
    finally:
        pool.stop()
