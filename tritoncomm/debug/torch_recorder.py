"""Collectives that torch's own recorder holds as issued and not completed.

On a GPU a call of this package has ended when it was issued, so a hang on the device is invisible to the host. torch's
recorder queries the events of every NCCL collective. It is a ring of 2000 collectives, or TORCH_FR_BUFFER_SIZE.
"""

import ctypes
import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch._C import _distributed_c10d

__all__ = ["Active", "Recorder", "buffer_size", "has_starts"]

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # the first that is set counts, as in torch
_SIZE = 2000  # torch's default, in 2.11 to 2.13
_THREAD_LOCAL = 1  # of cudaStreamCaptureMode, and of hipStreamCaptureMode
_ON = ("1", "true", "yes", "y", "on", "t")  # as torch reads its switches


class Active(NamedTuple):
    """A collective or transfer that was issued and has not completed.

    Attributes:
        created: nanoseconds since the epoch, when it was issued.
        group: name of the process group.
        name: as torch calls it, ``nccl:all_reduce``.
        sequence: count of this collective, or of this transfer, on its group.
        state: ``issued, not started``, ``started, not completed``, or, where torch does not record when a device begins
            a collective, ``issued, not completed``.
    """

    created: int
    group: str
    name: str
    sequence: int
    state: str


class Recorder:
    """torch's recorder, asked from one thread.

    Attributes:
        problem: why it cannot be asked, or not any more; empty while it can.
    """

    def __init__(self) -> None:
        # No public function returns the recorder's entries. Tested: the entry points of torch 2.11 with CUDA, and the
        # entries of 2.13, whose recorder of CPU groups writes the same format. nccl2 has a recorder of its own where
        # the second function takes the name of a backend; that is read in torch's source and was never run.
        module: Any = _distributed_c10d
        self._dumps: list[Callable[..., bytes]] = []
        if legacy := getattr(module, "_dump_nccl_trace_json", None):
            self._dumps.append(legacy)
        if "backend:" in (getattr(by_backend := getattr(module, "_dump_fr_trace_json", None), "__doc__", None) or ""):
            self._dumps.append(partial(cast("Callable[..., bytes]", by_backend), backend="nccl2"))
        self._may_query = False
        self.problem = ""
        if not self._dumps:
            self.problem = "this build of torch has no recorder of NCCL"
        elif not buffer_size():
            self.problem = "torch's recorder is off, as TORCH_FR_BUFFER_SIZE is 0"

    def active(self) -> list[Active]:
        """Ask for the collectives that have not completed, oldest first; none where there is a ``problem``."""
        if self.problem or not torch.cuda.is_initialized():
            return []
        try:
            if not self._may_query:
                _allow_queries()
                self._may_query = True
            return sorted(
                each for dump in self._dumps for each in _read(dump(includeCollectives=True, onlyActive=True))
            )
        except Exception as error:  # a private format must not end the watchdog, which reports the problem once
            self.problem = f"torch's recorder cannot be read: {type(error).__name__}: {error}"
            return []


def buffer_size() -> int:
    """Number of collectives that torch's recorder keeps; 0 where it is off."""
    text = next((os.environ[name] for name in _SIZES if name in os.environ), str(_SIZE))
    with suppress(ValueError):
        return max(int(text), 0)
    return _SIZE


def has_starts() -> bool:
    """Whether torch records when a device begins a collective, which costs an event for each of them."""
    names = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
    is_detailed = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return is_detailed or any(os.environ.get(name, "").lower() in _ON for name in names)


def _read(content: bytes) -> list[Active]:
    """Parse the entries of a dump; without any collective it has no list of entries."""
    return [_active(each) for each in json.loads(content).get("entries", []) if not each.get("retired")]


def _active(entry: dict[str, Any]) -> Active:
    group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
    sequence = int(entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"])
    state = "issued, not completed"
    if entry["state"] == "started":
        state = "started, not completed"
    elif has_starts() and name.startswith("nccl:"):
        state = "issued, not started"
    return Active(int(entry["time_created_ns"]), group, name, sequence, state)


def _allow_queries() -> None:
    """Let this thread query events while another thread captures a CUDA graph.

    Otherwise a query invalidates the capture. torch's own watchdog does the same; Python has no function for it.

    Raises:
        OSError: the device's runtime library is not found.
        RuntimeError: the runtime refuses.
    """
    is_hip = torch.version.hip is not None
    major = (torch.version.cuda or "").split(".")[0]
    name = "hipThreadExchangeStreamCaptureMode" if is_hip else "cudaThreadExchangeStreamCaptureMode"
    for library in (None, "libamdhip64.so" if is_hip else f"libcudart.so.{major}"):
        with suppress(OSError, AttributeError):
            exchange = getattr(ctypes.CDLL(library), name)
            break
    else:
        raise OSError(f"{name} is not found")
    if status := exchange(ctypes.byref(ctypes.c_int(_THREAD_LOCAL))):
        raise RuntimeError(f"{name} failed with status {status}")
