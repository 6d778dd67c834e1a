"""The flight record: the last calls of this rank, kept in memory, written as JSON by ``dump``.

``TRITONCOMM_FLIGHT=1`` keeps them, and so does check mode. The entry of a call is made before the call starts, so the
record of a rank that hangs ends with what it hangs in. Neither tensors nor process groups are kept alive by it.
"""

import json
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d

from tritoncomm import variables
from tritoncomm.debug.descriptor import KINDS, as_json

__all__ = ["FORMAT", "Call", "Flight", "call_site", "dump", "flight", "located", "open_calls", "write_on"]

FORMAT = 1
_HERE = str(Path(__file__).parents[1]) + os.sep
_DEBUG = str(Path(__file__).parent) + os.sep
_TORCH = str(Path(torch.__path__[0])) + os.sep
_names: Mapping[ProcessGroup, str] = getattr(distributed_c10d, "_pg_names", {})
_current_node = torch._C._current_autograd_node
_frame = sys._getframe
_SITE = "_tritoncomm_site"


class Call:
    """One call of a collective or a p2p step.

    Attributes:
        number: of this call on this rank.
        count: of this call on its group; the calls of one group with equal counts belong together.
        name: the function that was called.
        kind: a key of ``descriptor.KINDS``.
        group: name of the process group.
        shape: of the tensor, or a list of the tensors' shapes.
        dtype: of the (first) tensor.
        arguments: those of the kind.
        site: where the program called, ``(code, offset)``; in a backward, where it called the forward.
        thread: identifier of the calling thread.
        start: nanoseconds since the epoch.
        end: the same, 0 while the call runs; of an asynchronous call, and on a GPU, when it had been issued.
        path: view, torch or triton.
        bytes_copied: by packing and unpacking.
        bytes_sent: by this rank.
        error: why it failed.
    """

    __slots__ = (
        "arguments", "bytes_copied", "bytes_sent", "count", "dtype", "end", "error", "group", "kind", "name", "number",
        "path", "shape", "site", "start", "thread",
    )  # fmt: skip

    def __init__(
        self, number: int, count: int, name: str, kind: str, group: str, shape: Any, dtype: Any, arguments: Any,
        site: Any, thread: int, start: int,
    ) -> None:  # fmt: skip
        self.number, self.count, self.name, self.kind, self.group = number, count, name, kind, group
        self.shape, self.dtype, self.arguments, self.site = shape, dtype, arguments, site
        self.thread, self.start, self.end, self.path, self.error = thread, start, 0, "", ""
        self.bytes_copied = self.bytes_sent = 0

    def as_json(self) -> dict[str, Any]:
        """The attributes by name."""
        file, line = located(self.site)
        names = KINDS.get(self.kind, ())
        return {
            "number": self.number, "count": self.count, "name": self.name, "kind": self.kind, "group": self.group,
            "shape": as_json(self.shape), "dtype": as_json(self.dtype),
            "arguments": {name: as_json(value) for name, value in zip(names, self.arguments, strict=False)},
            "path": self.path, "bytes_copied": self.bytes_copied, "bytes_sent": self.bytes_sent, "start": self.start,
            "end": self.end, "file": file, "line": line, "thread": self.thread, "error": self.error,
        }  # fmt: skip


def located(site: Any) -> tuple[str, int]:
    """File and line of a ``Call.site``; ("", 0) for None."""
    if site is None:
        return "", 0
    code, offset = site
    line = next((line for start, end, line in code.co_lines() if start <= offset < end), None)
    return code.co_filename, line or code.co_firstlineno


class _Sources(dict[str, int]):
    """By file: 2 for this package's, 1 for torch's, 0 for the program's."""

    def __missing__(self, file: str) -> int:
        kind = 2 if file.startswith(_HERE) else 1 if file.startswith((_TORCH, "<frozen")) else 0
        self[file] = kind
        return kind


_source = _Sources()


def call_site(depth: int = 1) -> Any:
    """Where the program called this package, ``depth`` frames up or further.

    A forward leaves it on its node of autograd's graph, where its backward finds it again.
    """
    node = _current_node()
    if node is not None and (site := getattr(node, _SITE, None)) is not None:
        return site
    frame, ctx = _frame(depth + 1), None
    while (kind := _source[frame.f_code.co_filename]) or frame.f_code.co_name == "<genexpr>":
        if kind == 2 and frame.f_code.co_name == "forward":
            ctx = frame.f_locals.get("ctx", ctx)
        if frame.f_back is None:
            break
        frame = frame.f_back
    site = frame.f_code, frame.f_lasti
    if ctx is not None:
        setattr(ctx, _SITE, site)
    return site


class Flight:
    """The calls of this rank; the observer of ``record`` while it is on.

    Attributes:
        calls: the last ones.
        before: called with every call before it starts, and its group and tensors: the comparison of check mode.
        counts: calls so far by group.
        last: the last call of every thread.
    """

    def __init__(self) -> None:
        self.calls: deque[Call] = deque(maxlen=1)
        self.before: Callable[[Call, Any, Any], None] | None = None
        self.counts: dict[str, int] = {}
        self._number = 0
        self.last: dict[int, Call] = {}

    def keep(self, calls: int) -> None:
        """Keep that many calls from now on; 0 forgets everything."""
        if calls != self.calls.maxlen:
            self.calls = deque(self.calls, maxlen=max(calls, 1))
        if not calls:
            self.calls.clear()
            self.last.clear()

    def begin(self, name: str, kind: str, group: Any, x: Any, arguments: tuple[Any, ...]) -> None:
        """A call starts."""
        group_name = _names.get(group) or _name_of(group)
        count = self.counts[group_name] = self.counts.get(group_name, 0) + 1
        self._number += 1
        if type(x) is list or type(x) is tuple:
            shape, dtype = [getattr(each, "shape", None) for each in x], getattr(x[0], "dtype", None) if x else None
        else:
            shape, dtype = (None, None) if x is None else (x.shape, x.dtype)
        thread = threading.get_ident()
        call = Call(
            self._number, count, name, kind, group_name, shape, dtype, arguments, call_site(3), thread, time.time_ns()
        )
        self.last[thread] = call
        self.calls.append(call)
        if self.before is not None:
            self.before(call, group, x)

    def end(self, name: str, path: str, bytes_copied: int, bytes_sent: int, calls: int) -> None:
        """A call was counted: complete its entry."""
        call = self.last.get(threading.get_ident())
        if call is None or call.name != name or (call.end and calls):
            return
        call.end, call.path = time.time_ns(), call.path or path
        call.bytes_copied += bytes_copied
        call.bytes_sent += bytes_sent

    def failed(self, name: str, error: BaseException) -> None:
        """A call raises: note it, and write the record where a folder for it is set."""
        call = self.last.get(threading.get_ident())
        if call is not None and call.name == name and not call.end:
            call.error = f"{type(error).__name__}: {error}"
        write_on(f"{name}: {type(error).__name__}")


flight = Flight()


def _name_of(group: Any) -> str:
    """Of a group that torch never registered: its own name, if it has one."""
    try:
        return group.group_name
    except (AttributeError, RuntimeError):
        return f"unregistered {type(group).__name__}"


def write_on(reason: str) -> Path | None:
    """``dump``, if the record is on (and not merely kept for check mode); None where it cannot be written."""
    if not variables.FLIGHT.value[0]:
        return None
    try:
        return dump(reason=reason)
    except OSError as error:  # the error that is being reported matters more
        print(f"tritoncomm: the flight record cannot be written: {error}", file=sys.stderr)
        return None


def open_calls() -> list[Call]:
    """The calls that are under way: not ended, and their thread is inside this package."""
    frames = sys._current_frames()
    return [
        call for thread, call in list(flight.last.items())
        if not call.end and not call.error and thread in frames and _is_inside(frames[thread])
    ]  # fmt: skip


def _is_inside(frame: Any) -> bool:
    while frame is not None:
        file = frame.f_code.co_filename
        if _source[file] == 2 and not file.startswith(_DEBUG):
            return True
        frame = frame.f_back
    return False


def _snapshot(reason: str) -> dict[str, Any]:
    """The record as ``dump`` writes it."""
    calls, under_way = list(flight.calls), open_calls()
    for call in calls:
        if not call.end and not call.error and call not in under_way:
            call.error = "raised before anything was sent"
    names = {call.group for call in calls}
    return {
        "format": FORMAT, "rank": dist.get_rank() if dist.is_initialized() else 0,
        "world": dist.get_world_size() if dist.is_initialized() else 1, "host": os.uname().nodename,
        "pid": os.getpid(), "time": time.time_ns(), "reason": reason, "groups": _ranks(names),
        "counts": dict(flight.counts), "calls": [call.as_json() for call in calls],
    }  # fmt: skip


def _ranks(names: Iterable[str]) -> dict[str, list[int]]:
    """Global ranks of the groups that still exist."""
    ranks = getattr(distributed_c10d, "_pg_group_ranks", {})
    return {name: list(ranks[group]) for group, name in list(_names.items()) if name in names and group in ranks}


def dump(path: str | os.PathLike[str] | None = None, *, reason: str = "dump()") -> Path:
    """Write the last calls of this rank as JSON; ``tritoncomm trace FILES...`` merges those of several ranks.

    Nothing is sent, so a rank may call it at any time, also while others wait for it.

    Args:
        path: a file, or a folder for ``tritoncomm-flight-RANK.json``; by default the folder of TRITONCOMM_FLIGHT,
            else the current one.
        reason: kept in the file.

    Returns:
        The file.
    """
    data = _snapshot(reason)
    file = Path(path if path is not None else variables.FLIGHT.value[1] or ".")
    if file.is_dir() or path is None:
        file.mkdir(parents=True, exist_ok=True)
        file /= f"tritoncomm-flight-{data['rank']}.json"
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    partial.write_text(json.dumps(data))
    partial.replace(file)  # a reader never sees half a file
    return file
