"""A program that uses the library on streams, and its run in the simulator."""

from __future__ import annotations

import gc
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
import torch.distributed as dist
from stream_order.clocks import Stream
from stream_order.nccl import Rules
from stream_order.simulator import Simulator
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.testing._internal.distributed.fake_pg import FakeStore

__all__ = ["RANK", "WORLD", "Program", "Report", "Run", "Scenario", "play"]

WORLD, RANK = 4, 1


class Program:
    """The surroundings of a scenario: a simulated GPU and its groups.

    Attributes:
        simulator: the GPU.
        group: of all ranks.
        pair: of the first two ranks.
    """

    def __init__(self, simulator: Simulator, group: ProcessGroup, pair: ProcessGroup) -> None:
        self.simulator, self.group, self.pair = simulator, group, pair

    def stream(self) -> Stream:
        """A new stream, behind all that was issued on the current one."""
        stream = self.simulator.new_stream()
        stream.wait_stream(self.simulator.current)
        return stream

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return self.simulator.tensor(*shape, dtype=dtype)

    def goes_on(self) -> None:
        """Later allocations and operations of the program, which may use what was freed."""
        self.simulator.sweep()
        self.simulator.tensor(4)


Run = Callable[[Program], None]


@dataclass(frozen=True)
class Scenario:
    """A program.

    Attributes:
        name: its words, separated by blanks.
        run: the program.
        rules: of the backend.
        completes: whether what was issued is over as soon as the program asks.
    """

    name: str
    run: Run
    rules: Rules
    completes: bool = False

    @property
    def id(self) -> str:
        return re.sub(r"[^A-Za-z0-9_.]+", "-", f"{self.rules.name} {self.name}")


@dataclass(frozen=True)
class Report:
    """A scenario that has run.

    Attributes:
        problems: what went wrong, in words.
        operations: how many were issued.
    """

    problems: tuple[str, ...]
    operations: int


def play(chosen: Iterable[Scenario]) -> Iterator[tuple[Scenario, Report]]:
    """Run scenarios, each as rank 1 of 4."""
    gc.collect()
    gc.freeze()  # what is there already is no garbage of a program, and takes time to look at
    try:
        for scenario in chosen:
            yield scenario, _play(scenario)
    finally:
        gc.unfreeze()


def _play(scenario: Scenario) -> Report:
    dist.init_process_group("fake", rank=RANK, world_size=WORLD, store=FakeStore())
    try:
        pair = dist.new_group([0, 1])
        assert dist.group.WORLD is not None
        with Simulator(scenario.rules, scenario.completes) as simulator:
            program = Program(simulator, dist.group.WORLD, pair)
            try:
                scenario.run(program)
            except Exception as error:
                simulator.report("ERROR", f"{type(error).__name__}: {error}")
            return Report(tuple(dict.fromkeys(simulator.finish())), simulator.operations)
    finally:
        dist.destroy_process_group()
