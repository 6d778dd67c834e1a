"""Process groups on a GPU: streams of their own, and the tensors that they keep until their work is over."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from stream_order.memory import Space
from torch import Tensor

if TYPE_CHECKING:
    from stream_order.clocks import Event, Stream
    from stream_order.simulator import Simulator

__all__ = ["LEGACY", "NCCL2", "Communicators", "Rules", "Work"]


@dataclass(frozen=True)
class Rules:
    """Rules of a backend for streams and tensors.

    Attributes:
        name: of the backend.
        keeps_outputs: tensors that are written are kept until the work is waited for, or over; else inputs only.
        pairs: single sends and receives have a stream for each pair of ranks; else that of the group.
        records: single sends and receives call ``record_stream``.
    """

    name: str
    keeps_outputs: bool
    pairs: bool
    records: bool


# Up to torch 2.14, and from 2.15 on, with torch's names of the backends.
LEGACY = Rules("nccl", keeps_outputs=True, pairs=True, records=True)
NCCL2 = Rules("nccl2", keeps_outputs=False, pairs=False, records=False)


class Work:
    """A call that was issued on the stream of its group."""

    def __init__(self, simulator: Simulator, end: Event, tensors: list[Tensor], what: str) -> None:
        self._simulator, self._end, self._tensors, self._what = simulator, end, tensors, what

    def wait(self, timeout: Any = None) -> bool:
        """Order the current stream behind the call; a program with failures may fail here, too."""
        if self._simulator.fail_at:
            self._simulator.step(f"wait for {self._what}")
        self._simulator.current.follow(self._end)
        self.release()
        return True

    def release(self) -> None:
        """Let go of the tensors."""
        self._tensors = []
        self._simulator.sweep()

    def is_completed(self) -> bool:
        return self._simulator.ask(self._end.clock, f"is_completed() of {self._what}")

    def __del__(self) -> None:
        # The watchdog has them until the work is over; it does not watch what is captured.
        if self._tensors and self._end.graph is None:
            self._simulator.watched.append(self._tensors)


class _Done:
    """A transfer between hosts."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


class Communicators:
    """The communicators of all groups.

    Attributes:
        calls: number of calls issued.
    """

    def __init__(self, simulator: Simulator, rules: Rules) -> None:
        self._simulator, self._rules = simulator, rules
        self._streams: dict[Any, Stream] = {}
        self._batch: tuple[list[Tensor], list[Tensor]] | None = None
        self._mail: deque[Tensor] = deque()
        self.calls = 0

    def start_batch(self) -> None:
        assert self._batch is None, "a batch is open"
        self._batch = [], []

    def end_batch(self, group: int) -> Work:
        assert self._batch is not None, "no batch is open"
        (reads, writes), self._batch = self._batch, None
        self._deliver(reads, writes)
        return self._issued(group, reads, writes, "batch")

    def collective(self, group: int, options: Any, reads: list[Tensor], writes: list[Tensor], what: str) -> Work | None:
        """Issue a collective, on the current stream where it is synchronous."""
        if getattr(options, "asyncOp", True):
            return self._issued(group, reads, writes, what)
        self.calls += 1
        self._simulator.operate(reads, writes, what)
        return None

    def single(
        self, group: int, ranks: tuple[int, int], reads: list[Tensor], writes: list[Tensor]
    ) -> Work | _Done | None:
        """Issue a send or a receive, or make it part of the open batch."""
        if self._batch is not None:
            self._simulator.step("part of a batch")
            self._batch[0].extend(reads)
            self._batch[1].extend(writes)
            return None
        self._deliver(reads, writes)
        if any(self._simulator.space_of(x) is Space.HOST for x in (*reads, *writes)):
            return _Done()
        key = (group, min(ranks), max(ranks)) if self._rules.pairs else group
        return self._issued(key, reads, writes, "send" if reads else "receive", self._rules.records)

    def _deliver(self, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Every neighbour sends the headers that this rank sends."""
        with self._simulator.muted():
            self._mail.extend(x.clone() for x in reads if x.dtype is torch.int64)
            for x in writes:
                if x.dtype is torch.int64 and self._mail:
                    x.copy_(self._mail.popleft())

    def _issued(self, key: Any, reads: list[Tensor], writes: list[Tensor], what: str, records: bool = False) -> Work:
        simulator = self._simulator
        if key not in self._streams:
            self._streams[key] = simulator.new_stream()
        stream = self._streams[key]
        stream.follow(simulator.current.point())
        self.calls += 1
        simulator.operate(reads, writes, what, stream)
        if records:
            for x in (*reads, *writes):
                simulator.block_of(x).recorded.add(stream)
        kept = [*reads, *writes] if self._rules.keeps_outputs else list(reads)
        return Work(simulator, stream.point(), kept, what)
