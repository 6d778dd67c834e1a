"""Counters: what every mapping and collective did, cheap enough to be always on.

They are kept on the host: a CUDA graph, captured by hand or by ``torch.compile(mode="reduce-overhead")``, counts while
it is warmed up and captured, and not when it is replayed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from operator import attrgetter, sub
from time import perf_counter
from types import SimpleNamespace
from typing import Any, Literal, Protocol

import torch
from torch.autograd import profiler

__all__ = [
    "CopyPath",
    "Count",
    "Traffic",
    "add",
    "begin",
    "count_call",
    "counters",
    "current",
    "failed",
    "listeners",
    "now",
    "observe",
    "recording",
    "reset",
    "span",
    "switch",
    "timing",
    "total",
    "wait",
]

CopyPath = Literal["view", "torch", "triton"]
"""How a local pass ran: not at all because its result is a view, in torch, or in a kernel."""
_Path = CopyPath | Literal["compiled", "cpu", "device"]

now: Callable[[], float] = float
"""Start timestamp for ``add``, or 0.0 (what ``float()`` gives) while timing is off."""

switch: Any = profiler
"""Collectives call ``begin`` where its ``_is_profiler_enabled`` is set: torch's own flag of its profiler, or, while an
observer is on, a constant. One check serves both, so an observer that is off costs nothing."""


class Observer(Protocol):
    """What takes the places of ``begin`` and ``add``, and hears of failures; see ``tritoncomm.debug.flight``.

    The places, and not calls from there: two more calls of a function take as long as the observer itself.
    """

    def begin(self, name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...] = (), depth: int = 3) -> Any:
        """``name`` starts; may raise, and then nothing is sent. Returns its ``span`` while a profiler is on."""
        ...

    def add(self, name: str, path: Any, bytes_copied: int, bytes_sent: int, started: float, calls: int = 1) -> None:
        """``name`` has ended; calls ``count_call`` with the same arguments."""
        ...

    def failed(self, name: str, error: BaseException) -> None:
        """``name`` raises ``error`` in its exchange; a ``CommError`` where the backend or another rank failed."""
        ...

    def current(self, name: str) -> Any:
        """The call of ``name`` that this thread is in, for ``wait``."""
        ...

    def wait(self, call: Any, work: Any) -> None:
        """``work.wait()``, of a call that may have returned before."""
        ...

    def enter(self, node: Any) -> None:
        """A forward has given its node of autograd's graph its group; the backward may come from another thread."""
        ...


_observer: Observer | None = None


class Traffic:
    """The names that the two quantities had first, for what has ``bytes_copied`` and ``bytes_sent``."""

    __slots__ = ()
    packed = property(attrgetter("bytes_copied"), doc="The same as ``bytes_copied``.")
    wire = property(attrgetter("bytes_sent"), doc="The same as ``bytes_sent``.")


@dataclass(slots=True)
class Count(Traffic):
    """One line of the record.

    Attributes:
        calls: how often it ran.
        bytes_copied: bytes read plus bytes written by local passes (pack, unpack, reduce, strided copies).
        bytes_sent: bytes this rank had to send, by the formula of a bandwidth-optimal algorithm.
        seconds: host time inside the calls, in seconds, while ``timing(True)``; a GPU may still be working afterwards.
    """

    calls: int = 0
    bytes_copied: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0


_counts: dict[tuple[str, _Path], Count] = {}


def timing(on: bool) -> None:
    """Whether to take the time of every call (two clock readings each); off at the start."""
    global now
    now = perf_counter if on else float


def span(name: str) -> Any:
    """A range ``tritoncomm::name`` in the profiler's trace; it ends when the caller drops the result, as by returning.

    Functions open one only while a profiler is on, as torch's own do: ``torch.autograd.profiler._is_profiler_enabled``.
    """
    return torch.ops.profiler._record_function_enter_new(f"tritoncomm::{name}", None)


def observe(observer: Observer | None) -> None:
    """Report every call to ``observer`` from now on; None ends that."""
    global _observer, switch, begin, add
    _observer = observer
    for listener in listeners:
        listener(observer)
    switch = profiler if observer is None else SimpleNamespace(_is_profiler_enabled=True)
    begin, add = (_begin, count_call) if observer is None else (observer.begin, observer.add)


listeners: list[Callable[[Observer | None], None]] = []
"""Called by ``observe``."""


def _begin(name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...] = (), depth: int = 3) -> Any:
    """A call starts: open its ``span`` while a profiler is on, and report it where there is an observer.

    Args:
        name: the function that a caller knows.
        kind: the collective, a key of ``tritoncomm.debug.descriptor.KINDS``.
        group: its process group.
        x: the tensor, or a sequence of tensors.
        arguments: those of the kind, in its order; or a function, and what it makes them of when the record is written.
        depth: frames from an observer's function to the program's, or fewer.
    """
    return span(name) if profiler._is_profiler_enabled else None


begin: Callable[..., Any] = _begin


def current(name: str) -> Any:
    """What ``wait`` takes, of a call of ``name`` that returns before it is over; None without an observer."""
    return None if _observer is None else _observer.current(name)


def wait(call: Any, work: Any) -> None:
    """``work.wait()``, so that an observer sees what the thread is in."""
    if call is None or _observer is None:
        work.wait()
    else:
        _observer.wait(call, work)


def failed(name: str, error: BaseException) -> None:
    """Report that ``name`` raises ``error``."""
    if _observer is not None:
        _observer.failed(name, error)


def count_call(name: str, path: _Path, bytes_copied: int, bytes_sent: int, started: float, calls: int = 1) -> None:
    """Count one call of ``name`` that took ``path`` and began at ``now()`` value ``started``.

    Under torch.compile a call is several ops: the collective counts it (path ``compiled``), pack and unpack count their
    traffic with ``calls=0``.
    """
    try:
        count = _counts[name, path]
    except KeyError:
        count = _counts[name, path] = Count()
    count.calls += calls
    if bytes_copied:
        count.bytes_copied += bytes_copied
    count.bytes_sent += bytes_sent
    if started:
        count.seconds += perf_counter() - started


add: Callable[..., None] = count_call
"""``count_call``, or what an observer does at the end of a call."""


def counters() -> dict[tuple[str, str], Count]:
    """A copy of the record: ``{(name, path): Count}``.

    The path is view, torch or triton; compiled for a collective inside ``torch.compile``, where pack and unpack add
    their bytes under torch or triton; cpu or device for the header of a message.
    """
    return {key: Count(*astuple(count)) for key, count in _counts.items()}


def total(name: str) -> Count:
    """The counts of ``name`` over all paths."""
    rows = [astuple(count) for (each, _), count in _counts.items() if each == name]
    return Count(*map(sum, zip(*rows, strict=True)))


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
                inside[key] = Count(*map(sub, astuple(now), astuple(was)))
