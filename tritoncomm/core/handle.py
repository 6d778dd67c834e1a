"""A collective in flight."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from tritoncomm.core import backend

__all__ = ["Handle"]


class Handle:
    """A collective in flight; it owns the buffers until ``wait()``, which returns the finished result.

    A handle that is dropped waits for nothing. Where memory is on a GPU, its stream is ordered behind the collective.
    """

    __slots__ = ("_finish", "_kept", "_work", "result")

    def __init__(self, work: backend.Work, result: Tensor, finish: Callable[[], Any] | None, *kept: Tensor) -> None:
        self._work, self.result, self._finish, self._kept = work, result, finish, kept

    def wait(self) -> Tensor:
        """Order the current stream after the collective (on the CPU: block), unpack, and return the result."""
        work, self._work = self._work, None
        if work is not None:
            work.wait()
        if self._finish is not None:
            finish, self._finish = self._finish, None
            finish()
        backend.released((self.result, *self._kept))
        self._kept = ()
        return self.result

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()
