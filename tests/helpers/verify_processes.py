"""Ranks of a verification that end in every way."""

import os
import signal
import sys
import time
from pathlib import Path

from tritoncomm.errors import ArgumentError
from tritoncomm.verify.processes import Progress

__all__ = ["run_kind"]


def run_kind(rank: int, progress: Progress, kind: str) -> None:
    """Rank 0 waits in a collective behind its module ``a``; rank 1, in ``layers.1``, does what the kind says."""
    progress.follow("")
    if kind == "raise at once":  # each writes its error while the other does
        rename = Path.rename
        Path.rename = lambda self, to: (time.sleep(0.5), rename(self, to))[1]
        raise ValueError("no such layer")
    if rank == 0:
        progress.follow("a")
        progress.follow(None)
        if kind in ("right", "prints", "argument"):
            return
        if kind == "both raise":
            time.sleep(0.5)
            raise RuntimeError("connection closed by peer")
        time.sleep(60)
    progress.follow("layers.1")
    if kind == "returns early":
        return
    if kind == "sleeps":
        time.sleep(60)
    elif kind == "exits":
        os._exit(0)
    elif kind == "leaves":
        sys.exit(3)
    elif kind == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind in ("raises", "both raise"):
        raise ValueError("no such layer")
    elif kind == "argument":
        raise ArgumentError("no function build")
    elif kind == "prints":  # for longer than the limit
        for n in range(8):
            time.sleep(0.45)
            print("line", n)
