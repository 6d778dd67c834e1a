"""Libraries with one fault each, which scenarios have to see: the fault is in what they call."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest import mock

from stream_order import nccl, simulator
from stream_order.clocks import Stream

from tritoncomm.core import rows
from tritoncomm.experts import sent_rows

__all__ = ["MUTANTS", "Mutant"]


def _nothing(*args: Any, **kwargs: Any) -> None: ...


def _joined_start(*arguments: Any) -> rows.RowsInFlight:
    return rows.start_to_ranks(*arguments[:-1], False)


def _wait_without_order(work: nccl.Work, timeout: Any = None) -> bool:
    work.release()
    return True


@dataclass(frozen=True)
class Mutant:
    """A fault.

    Attributes:
        apply: makes it.
        problem: the kind of problem that it is.
        words: all of them are in the names of the scenarios that each have to see it.
    """

    apply: Callable[[], AbstractContextManager[Any]]
    problem: str
    words: tuple[str, ...]


MUTANTS: dict[str, Mutant] = {
    "no record_stream after a wait": Mutant(
        lambda: mock.patch.object(simulator.Simulator, "record", _nothing), "REUSE",
        ("collective", "waited on another stream"),
    ),
    "no record_stream after a transfer": Mutant(
        lambda: mock.patch.object(simulator.Simulator, "record", _nothing), "REUSE",
        ("nccl2", "p2p", " waited on another stream"),
    ),
    "no wait_event before a table is read": Mutant(
        lambda: mock.patch.object(Stream, "wait_event", _nothing), "RACE", ("local", "many sizes", "on two streams"),
    ),
    "no wait for a collective": Mutant(
        lambda: mock.patch.object(nccl.Work, "wait", _wait_without_order), "RACE",
        ("collective", "waited on its stream"),
    ),
    "no wait for a transfer": Mutant(
        lambda: mock.patch.object(nccl.Work, "wait", _wait_without_order), "RACE", ("p2p send_forward_recv", "single"),
    ),
    "rows of this rank are copied behind the start": Mutant(
        lambda: mock.patch.object(sent_rows, "start_to_ranks", _joined_start), "RACE",
        ("experts waited on another stream",),
    ),
    "no record_stream after rows": Mutant(
        lambda: mock.patch.object(rows, "released", _nothing), "REUSE", ("experts waited on another stream",),
    ),
    "no wait in a capture": Mutant(
        lambda: mock.patch.object(nccl.Work, "wait", _wait_without_order), "UNJOINED",
        ("capture collective all_", "cold"),
    ),
    "a capture is taken for eager calls": Mutant(
        lambda: mock.patch.object(simulator.Simulator, "is_capturing", property(lambda each: False)), "",
        ("capture local", "many sizes", "cold"),
    ),
}  # fmt: skip
