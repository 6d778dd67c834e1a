"""Reader of torch's own flight recorder: the collectives that were issued and that the device has not completed.

On a GPU a call of this package ends when it is issued, so the host does not see a hang on the device. torch's recorder
queries the events of every NCCL collective. It keeps the last 2000 of them, or TORCH_FR_BUFFER_SIZE.
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

_SIZES = ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE")  # torch takes the first one that is set
_SIZE = 2000  # torch's default, in 2.11 to 2.13
_THREAD_LOCAL = 1  # value in the enumerations cudaStreamCaptureMode and hipStreamCaptureMode
_ON = ("1", "true", "yes", "y", "on", "t")  # texts that torch takes for true


class Active(NamedTuple):
    """Collective or p2p transfer that was issued and has not completed.

    Attributes:
        created: time of issue, in nanoseconds since the epoch.
        name: torch's name, as ``nccl:all_reduce``.
        sequence: count of collectives, or of transfers, on this group, this one included.
        state: ``issued, not started``, ``started, not completed``, or, where torch does not record when a device begins
            a collective, ``issued, not completed``.
    """

    created: int
    group: str
    name: str
    sequence: int
    state: str


class Recorder:
    """Reader of torch's recorder, for one thread; ``problem`` is why it cannot be read, empty while it can."""

    def __init__(self) -> None:
        """Look up the functions of this build of torch that dump the recorders of NCCL and nccl2."""
        # No public function returns the recorder's entries. Tested: the entry points of torch 2.11 with CUDA, and the
        # entries of 2.13, whose recorder of CPU groups writes the same format.
        module: Any = _distributed_c10d
        self._dumps: list[Callable[..., bytes]] = []
        if legacy := getattr(module, "_dump_nccl_trace_json", None):
            self._dumps.append(legacy)
        by_backend = getattr(module, "_dump_fr_trace_json", None)
        signature = getattr(by_backend, "__doc__", None) or ""  # of a function in C++, which has no other
        if "backend:" in signature:  # nccl2 has a recorder of its own: by torch's source, not run on a GPU
            self._dumps.append(partial(cast("Callable[..., bytes]", by_backend), backend="nccl2"))
        self._may_query = False
        self.problem = ""
        if not self._dumps:
            self.problem = "this build of torch has no recorder of NCCL"
        elif not buffer_size():
            self.problem = "torch's recorder is off, as TORCH_FR_BUFFER_SIZE is 0"

    def active(self) -> list[Active]:
        """Return NCCL's collectives and transfers that were issued and have not completed, oldest first."""
        # A reader must not start CUDA.
        if self.problem or not torch.cuda.is_initialized():
            return []
        try:
            if not self._may_query:
                _allow_queries()
                self._may_query = True
            contents = [json.loads(dump(includeCollectives=True, onlyActive=True)) for dump in self._dumps]
            entries = [entry for content in contents for entry in content.get("entries", [])]  # none before the first
            return sorted(_active(entry) for entry in entries if not entry.get("retired"))
        except Exception as error:  # a private format must not end the watchdog, which reports the problem once
            self.problem = f"torch's recorder cannot be read: {type(error).__name__}: {error}"
            return []


def buffer_size() -> int:
    """Return the number of entries that torch's recorder keeps, by the environment or its default; 0 if it is off."""
    text = next((os.environ[name] for name in _SIZES if name in os.environ), str(_SIZE))
    with suppress(ValueError):
        return max(int(text), 0)
    return _SIZE


def has_starts() -> bool:
    """Whether torch's recorder sees when a device begins a collective, for which it records one more event each."""
    names = ("TORCH_NCCL_ENABLE_TIMING", "TORCH_NCCL_DESYNC_DEBUG")
    is_detailed = os.environ.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL"
    return is_detailed or any(os.environ.get(name, "").lower() in _ON for name in names)


def _active(entry: dict[str, Any]) -> Active:
    """Make an ``Active`` of one entry of torch's recorder; an entry of another format raises one of several errors."""
    group, name = str(entry["process_group"][0]), str(entry["profiling_name"])
    sequence = int(entry["p2p_seq_id" if entry.get("is_p2p") else "collective_seq_id"])
    state = "issued, not completed"
    if entry["state"] == "started":
        state = "started, not completed"
    elif has_starts() and name.startswith("nccl:"):
        state = "issued, not started"
    return Active(int(entry["time_created_ns"]), group, name, sequence, state)


def _allow_queries() -> None:
    """Let this thread query events while another thread captures a graph, where a query ends the capture."""
    # The runtime library sets the thread's capture mode: a function of torch in Python is missing. torch's own watchdog
    # does the same.
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
