"""Counters: what every mapping and collective did, cheap enough to be always on.

They are kept on the host: a CUDA graph, captured by hand or by ``torch.compile(mode="reduce-overhead")``, counts while
it is warmed up and captured, and not when it is replayed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

__all__ = ["Count", "add", "counters", "now", "recording", "reset", "span", "timing", "total"]

now: Callable[[], float] = float
"""Start timestamp for ``add``, or 0.0 (what ``float()`` gives) while timing is off."""


@dataclass(slots=True)
class Count:
    """One line of the record.

    Attributes:
        calls: how often it ran.
        packed: bytes read plus bytes written by local passes (pack, unpack, reduce, strided copies).
        wire: bytes this rank had to send, by the formula of a bandwidth-optimal algorithm.
        seconds: host time inside the calls, in seconds, while ``timing(True)``; a GPU may still be working afterwards.
    """

    calls: int = 0
    packed: int = 0
    wire: int = 0
    seconds: float = 0.0


_counts: dict[tuple[str, str], Count] = {}


def timing(on: bool) -> None:
    """Whether to take the time of every call (two clock readings each); off at the start."""
    global now
    now = perf_counter if on else float


def span(name: str) -> Any:
    """A range ``tritoncomm::name`` in the profiler's trace; it ends when the caller drops the result, as by returning.

    Functions open one only while a profiler is on, as torch's own do: ``torch.autograd.profiler._is_profiler_enabled``.
    """
    return torch.ops.profiler._record_function_enter_new(f"tritoncomm::{name}", None)


def add(name: str, path: str, packed: int, wire: int, started: float, calls: int = 1) -> None:
    """Count one call of ``name`` that took ``path`` and began at ``now()`` value ``started``.

    Under torch.compile a call is several ops: the collective counts it (path ``compiled``), pack and unpack count their
    traffic with ``calls=0``.
    """
    try:
        count = _counts[name, path]
    except KeyError:
        count = _counts[name, path] = Count()
    count.calls += calls
    if packed:
        count.packed += packed
    count.wire += wire
    if started:
        count.seconds += perf_counter() - started


def counters() -> dict[tuple[str, str], Count]:
    """A copy of the record: ``{(name, path): Count}``.

    The path is view, torch or triton; compiled for a collective inside ``torch.compile``, where pack and unpack add
    their bytes under torch or triton; cpu or device for the header of a message.
    """
    return {key: Count(c.calls, c.packed, c.wire, c.seconds) for key, c in _counts.items()}


def total(name: str) -> Count:
    """The counts of ``name`` over all paths."""
    counts = [c for (n, _), c in _counts.items() if n == name]
    return Count(
        sum(c.calls for c in counts),
        sum(c.packed for c in counts),
        sum(c.wire for c in counts),
        sum(c.seconds for c in counts),
    )


def reset() -> None:
    """Forget everything counted so far."""
    _counts.clear()


@contextmanager
def recording() -> Iterator[dict[tuple[str, str], Count]]:
    """Yield a dict that holds, once the block has ended, what was counted inside it."""
    before = counters()
    inside: dict[tuple[str, str], Count] = {}
    try:
        yield inside
    finally:
        for key, now in counters().items():
            was = before.get(key, Count())
            if now != was:
                inside[key] = Count(
                    now.calls - was.calls, now.packed - was.packed, now.wire - was.wire, now.seconds - was.seconds
                )
