"""A p2p step in flight, and what can be waited for."""

from contextlib import suppress
from typing import NoReturn

from torch import Tensor
from torch.distributed import DistNetworkError

from tritoncomm.debug.p2p_check import CheckedHop
from tritoncomm.errors import MismatchError, PeerError
from tritoncomm.p2p.transport import Posted

__all__ = ["Handle", "Hop"]


class Hop:
    """A p2p step in flight.

    Attributes:
        posted: the transfers by key.
        headers: the headers sent.
        received: the tensors by key, defined once waited for.
        problems: by key, why a message is refused; raised once it has been transferred.
        checked: in check mode, the comparison with the other ends.
        empty: keys of sends without elements, which are not posted; in check mode their headers are sent.
    """

    __slots__ = ("checked", "empty", "headers", "posted", "problems", "received")

    def __init__(self, checked: CheckedHop | None = None) -> None:
        self.posted: dict[str, Posted] = {}
        self.headers: list[Posted] = []
        self.received: dict[str, list[Tensor]] = {}
        self.problems: dict[str, str] = {}
        self.checked = checked
        self.empty: list[str] = []

    def meet(self, key: str, in_helper: bool = False) -> None:
        """In check mode: see whether the other end of a transfer comes, before it is waited for."""
        if self.checked is not None:
            self.checked.meet(key, in_helper)

    def compare(self, key: str) -> None:
        """In check mode: compare a transfer with what its other end did, and note what is wrong."""
        if self.checked is not None:
            self.note(key, self.checked.problem(key))

    def note(self, key: str, problem: str | None) -> None:
        """A transfer has a problem, where there is a text."""
        if problem:
            self.problems[key] = f"{self.problems[key]}; {problem}" if key in self.problems else problem

    def explain(self, error: PeerError) -> NoReturn:
        """Raise ``error``; in check mode with what the other end does instead, where that is known."""
        explained = error if self.checked is None else self.checked.explained(error)
        try:
            if explained is error:
                raise error
            raise explained from error
        finally:
            del error, explained  # their traceback has this frame

    def give_up(self, error: BaseException) -> None:
        """In check mode: the other ends learn that their transfers will not be completed because of ``error``."""
        if self.checked is not None:
            with suppress(DistNetworkError):  # the error that is being raised matters more
                self.checked.give_up(f"{type(error).__name__}: {error}")

    def wait(self) -> None:
        """Wait for every transfer."""
        if self.checked is None:
            self._wait()
            return
        try:
            self._wait()
        except PeerError as error:
            self.explain(error)
        for key in [*(each for each in self.posted if each.startswith("send")), *self.empty]:
            self.compare(key)
        if self.problems:
            raise MismatchError("; ".join(self.problems.values()))

    def complete_empty(self) -> None:
        """Compare the sends without elements; where a message that has no handle to wait for is wrong, end the step."""
        for key in self.empty:
            self.compare(key)
        if any(key not in self.posted for key in self.problems):
            self.wait()

    def _wait(self) -> None:
        for posted in self.posted.values():
            posted.wait()
        for posted in self.headers:
            posted.wait()
        if self.problems and self.checked is None:
            raise MismatchError("; ".join(self.problems.values()))


class Handle:
    """One transfer of a hop; ``wait()`` raises its mismatch."""

    __slots__ = ("_hop", "_key")

    def __init__(self, hop: Hop, key: str) -> None:
        self._hop, self._key = hop, key

    def wait(self) -> None:
        is_checked_send = self._hop.checked is not None and self._key.startswith("send")
        try:
            self._hop.posted[self._key].wait()
        except PeerError as error:
            if is_checked_send:
                self._hop.explain(error)
            raise
        if is_checked_send:
            self._hop.compare(self._key)
        if self._key in self._hop.problems:
            raise MismatchError(self._hop.problems[self._key])

    def is_completed(self) -> bool:
        return self._hop.posted[self._key].is_completed()
