"""What a case of faults must not leave behind: processes, descriptors (ports are some of them), shared memory."""

import gc
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import forkserver, resource_tracker
from pathlib import Path
from typing import Any

from pool import fork_server

__all__ = ["Holdings", "nothing_left"]

_SECONDS = 5.0  # until ended processes are gone
_SHARED = re.compile(r"torch_(\d+)_\d+_\d+")


class Holdings:
    """What is there now.

    Attributes:
        ranks: processes of the server that forks them.
        descriptors: of this process, by number, and what each leads to.
        shared: names of shared memory whose process is dead.
    """

    def __init__(self) -> None:
        gc.collect()
        server: Any = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
        self.ranks = set(Path(f"/proc/{server}/task/{server}/children").read_text().split())
        self.descriptors = {name: _target(name) for name in os.listdir("/proc/self/fd")}
        owners = {name: _SHARED.fullmatch(name) for name in os.listdir("/dev/shm")}
        self.shared = {name for name, owner in owners.items() if owner and not Path(f"/proc/{owner[1]}").exists()}

    def since(self, before: "Holdings") -> dict[str, Any]:
        """What is there now and was not before."""
        more = {
            "ranks": sorted(self.ranks - before.ranks),
            "descriptors": [each for each in self.descriptors.items() if each not in before.descriptors.items()],
            "shared memory": sorted(self.shared - before.shared),
        }
        if len(self.descriptors) <= len(before.descriptors):  # numbers are used again
            del more["descriptors"]
        return {name: value for name, value in more.items() if value}


def _target(name: str) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:  # that of the listing itself
        return ""


@contextmanager
def nothing_left() -> Iterator[None]:
    """What the block started is gone when it ends."""
    fork_server()
    forkserver.ensure_running()
    resource_tracker.ensure_running()
    before = Holdings()
    yield
    end = time.monotonic() + _SECONDS
    while (left := Holdings().since(before)) and time.monotonic() < end:
        time.sleep(0.1)
    assert not left, left
