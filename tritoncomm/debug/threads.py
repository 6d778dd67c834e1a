"""Threads of this process that may still make a call, while one of them waits in check mode."""

import os
import sys
import threading
from collections.abc import Collection
from typing import Any

import torch.autograd.graph

from tritoncomm.debug.sites import OURS, source_of

__all__ = ["others_may_call"]

_ENGINE = torch.autograd.graph.__file__
_EXECUTOR = os.path.join("concurrent", "futures", "thread.py")


def others_may_call(callers: Collection[int], in_helper: bool) -> bool:
    """Whether another thread of this process may make a call while this one waits.

    Args:
        callers: identifiers of threads that have made calls. Daemon threads without a call are taken for those of
            libraries (progress bars, data loaders), which never make one.
        in_helper: this thread serves a call of another one, which waits inside of this package.
    """
    frames, own = sys._current_frames(), threading.get_ident()
    others = [
        frames[each.ident]
        for each in threading.enumerate()
        if each.ident in frames and each.ident != own and (each.ident in callers or not each.daemon)
    ]
    found = any(
        not _awaits_a_thread(frame) and not (in_helper and source_of(frame.f_code.co_filename) == OURS)
        for frame in others
    )
    # This frame is in the dict: the circle would keep the frames of all threads, and their tensors.
    frames.clear()
    others.clear()
    return found


def _awaits_a_thread(frame: Any) -> bool:
    """Whether a thread with this innermost frame goes on only after another thread has done something."""
    file = frame.f_code.co_filename
    if file == threading.__file__:
        # Without a timeout; -1 in ``Thread.join`` of Python 3.11.
        return frame.f_locals.get("timeout") in (None, -1)
    # The main thread in ``backward()``, whose hooks run in this thread; an idle thread of a pool.
    return file == _ENGINE or file.endswith(_EXECUTOR)
