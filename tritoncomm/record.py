"""Record of calls: counters, which are always on, and hooks that report every call to one observer.

Both run on the host: a CUDA graph, captured by hand or by ``torch.compile(mode="reduce-overhead")``, counts while it is
warmed up and captured, and not when it is replayed.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import astuple, dataclass
from operator import sub
from time import perf_counter
from typing import Any, Literal, Protocol

from torch.autograd import profiler
from torch.distributed import ProcessGroup

__all__ = [
    "CopyPath",
    "Count",
    "Observer",
    "Span",
    "add",
    "begin",
    "counters",
    "current",
    "failed",
    "hooks",
    "is_observed",
    "now",
    "observe",
    "profiler_range",
    "recording",
    "reset",
    "timing",
    "total",
    "wait",
]

CopyPath = Literal["view", "torch", "triton"]
"""Way of a local pass: a view without a copy, a copy by torch, or a copy by a Triton kernel."""
_Path = CopyPath | Literal["compiled", "cpu", "device"]


class Observer(Protocol):
    """Object that is told of every collective and p2p step of this process, as ``tritoncomm.debug.flight`` is."""

    def begin(self, name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...] = (), depth: int = 4) -> None:
        """Take note that a call starts. An error raised here stops the call before anything is sent.

        Args:
            kind: collective that runs, a key of ``tritoncomm.debug.descriptor.KINDS``.
            x: tensor of the call, a sequence of its tensors, or None.
            arguments: of the kind, in its order; or a function followed by its arguments, which returns them when the
                flight record is written.
            depth: number of frames from this method up to the frame of the program, or fewer.
        """
        ...

    def end(self, name: str, path: str, bytes_copied: int, bytes_sent: int, calls: int) -> None:
        """Take note that the call of ``name`` has ended, or (``calls`` is 0) that it copied and sent more bytes."""
        ...

    def failed(self, name: str, error: BaseException) -> None:
        """Take note that ``name`` raises ``error``; a ``CommError`` where the backend or another rank failed."""
        ...

    def current(self, name: str) -> Any:
        """Return a token of the call of ``name`` that this thread is in, for ``wait``; None without such a call."""
        ...

    def wait(self, call: Any, work: Any) -> None:
        """Run ``work.wait()``; the call of the token ``call`` may have returned before."""
        ...

    def note_forward(self, node: Any) -> None:
        """Take note that a forward runs and has made ``node`` of autograd's graph, whose backward will run later."""
        ...


class Hooks:
    """Hooks by which calls report to the observer: one object, ``hooks``, that every call asks.

    Attributes:
        observer: receiver of the reports; None, as at the start, where nobody listens.
        clock: returns the start time of a call in seconds; ``float``, which returns 0.0, while ``timing`` is off.
    """

    __slots__ = ("clock", "observer")

    def __init__(self) -> None:
        self.observer: Observer | None = None
        self.clock: Callable[[], float] = float

    def observe(self, observer: Observer | None) -> None:
        """Report every call to ``observer`` from now on, instead of to the one before; None ends the reports."""
        self.observer = observer

    def begin(
        self,
        name: str,
        kind: str,
        group: ProcessGroup | None,
        x: Any,
        arguments: tuple[Any, ...] = (),
        depth: int = 3,
    ) -> "Span":
        """Report as ``Observer.begin`` that a call starts, and return its span, which ends the call."""
        if self.observer is not None:
            self.observer.begin(name, kind, group, x, arguments, depth + 1)
        return Span(name)

    def current(self, name: str) -> Any:
        """Return the observer's token of the running call of ``name``, for ``wait``; None without an observer."""
        return None if self.observer is None else self.observer.current(name)

    def wait(self, call: Any, work: Any) -> None:
        """Run ``work.wait()``, through the observer where ``call`` is a token of ``current`` and not None."""
        if call is None or self.observer is None:
            work.wait()
        else:
            self.observer.wait(call, work)

    def failed(self, name: str, error: BaseException) -> None:
        """Report to the observer that ``name`` raises ``error``."""
        if self.observer is not None:
            self.observer.failed(name, error)


hooks = Hooks()


class Span:
    """One call of a function, from its start to ``end``. A profiler shows it until the caller drops the span.

    Attributes:
        world: number of ranks of the group; 0 in spans of ``Hooks.begin``.
        started: time of the start in seconds; 0.0 while ``timing`` is off.
    """

    __slots__ = ("_range", "name", "started", "world")

    def __init__(self, name: str, world: int = 0) -> None:
        self.name = name
        self.world = world
        self.started = hooks.clock()
        if profiler._is_profiler_enabled:
            self._range = profiler_range(name)

    def end(self, path: _Path, bytes_copied: int, bytes_sent: int) -> None:
        """Count the call by ``path`` and bytes, as ``add`` does, and report its end to the observer."""
        add(self.name, path, bytes_copied, bytes_sent, self.started)


@dataclass(slots=True)
class Count:
    """Counts of one function on one path: one line of the record.

    Attributes:
        bytes_copied: bytes read plus bytes written by local passes (pack, unpack, reduce, strided copies).
        bytes_sent: bytes that this rank had to send, by the formula of a bandwidth-optimal algorithm.
        seconds: host time inside the calls while ``timing(True)``; a GPU may still be working afterwards. 0.0, and
            left out of the text, where nothing was timed.
    """

    calls: int = 0
    bytes_copied: int = 0
    bytes_sent: int = 0
    seconds: float = 0.0

    def __repr__(self) -> str:
        timed = f", seconds={self.seconds:.6f}" if self.seconds else ""
        return f"Count(calls={self.calls}, bytes_copied={self.bytes_copied}, bytes_sent={self.bytes_sent}{timed})"


_counts: dict[tuple[str, _Path], Count] = {}


def timing(on: bool) -> None:
    """Measure the host time of every call from now on, by two clock readings each, or stop; off at the start."""
    hooks.clock = perf_counter if on else float


def now() -> float:
    """Return the time in seconds, to pass to ``add`` as the start of a call; 0.0 while ``timing`` is off."""
    return hooks.clock()


def is_observed() -> bool:
    """Whether an observer or torch's profiler is on, so that it makes sense to gather the arguments of ``begin``."""
    return hooks.observer is not None or profiler._is_profiler_enabled


def profiler_range(name: str) -> Any:
    """Open a range ``tritoncomm::name`` in the trace of torch's profiler; None while no profiler is on."""
    if not profiler._is_profiler_enabled:
        return None
    opened = profiler.record_function(f"tritoncomm::{name}")
    # The range ends when the caller drops the object, for instance by returning.
    opened.__enter__()
    return opened


def add(name: str, path: _Path, bytes_copied: int, bytes_sent: int, started: float = 0.0, calls: int = 1) -> None:
    """Count a call of ``name``, and report its end to the observer.

    Args:
        path: by which its local pass was made.
        started: ``now()`` at the start of the call; 0.0 adds no time.
        calls: 1 for a call; 0 for a pass of a call that is counted elsewhere, as pack and unpack under torch.compile.
    """
    try:
        count = _counts[name, path]
    except KeyError:
        count = _counts[name, path] = Count()
    count.calls += calls
    count.bytes_copied += bytes_copied
    count.bytes_sent += bytes_sent
    if started:
        count.seconds += perf_counter() - started
    if hooks.observer is not None:
        hooks.observer.end(name, path, bytes_copied, bytes_sent, calls)


begin, current, failed, observe, wait = hooks.begin, hooks.current, hooks.failed, hooks.observe, hooks.wait


def counters() -> dict[tuple[str, str], Count]:
    """Return a copy of the counters: ``{(name, path): Count}``.

    The path is view, torch or triton; compiled for a collective inside ``torch.compile``, where pack and unpack add
    their bytes under torch or triton; cpu or device for the header of a message.
    """
    return {key: Count(*astuple(count)) for key, count in _counts.items()}


def total(name: str) -> Count:
    """Return the counts of the function ``name``, summed over all paths."""
    rows = [astuple(count) for (each, _), count in _counts.items() if each == name]
    return Count(*map(sum, zip(*rows, strict=True)))


def reset() -> None:
    """Delete all counts."""
    _counts.clear()


@contextmanager
def recording() -> Iterator[dict[tuple[str, str], Count]]:
    """Yield a dict; when the block ends, it gets the counters of the block alone, in the form of ``counters``."""
    before = counters()
    inside: dict[tuple[str, str], Count] = {}
    try:
        yield inside
    finally:
        for key, now in counters().items():
            earlier = before.get(key, Count())
            if now != earlier:
                inside[key] = Count(*map(sub, astuple(now), astuple(earlier)))
