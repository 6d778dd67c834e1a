"""The p2p steps of several flight records, paired: the n-th message from one rank to another has two ends.

Messages are counted from the first call of their group on, so only in records that still have it.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tritoncomm.debug.hops import ORDER

__all__ = ["Message", "Transfers"]

_REFUSED = "raised before"  # how errors of calls begin that sent nothing
_KEYS = frozenset(ORDER)
Call = dict[str, Any]
"""As a record has it."""


class _End(NamedTuple):
    """One end of a message: the p2p step, and shape and dtype of every tensor, None for what this end leaves open."""

    call: Call
    specs: list[list[Any]] | None

    def fits(self, other: "_End") -> bool:
        if self.specs is None or other.specs is None:
            return True
        return len(self.specs) == len(other.specs) and all(
            None in (mine, theirs) or mine == theirs
            for spec, its in zip(self.specs, other.specs, strict=True)
            for mine, theirs in zip(spec, its, strict=True)
        )


class Message(NamedTuple):
    """A message, and the p2p steps of its two ends.

    Attributes:
        sender, receiver: ranks.
        count: of the messages between these two, from 1.
        sent, received: the steps.
        fits: whether shapes and dtypes are the same at both ends, as far as these know them.
    """

    sender: int
    receiver: int
    count: int
    sent: Call
    received: Call
    fits: bool


class Transfers:
    """The messages between ranks over one group.

    Args:
        calls: of this group, by rank and count.
    """

    def __init__(self, calls: Mapping[int, Mapping[int, Call]]) -> None:
        self._complete = {rank for rank, each in calls.items() if 1 in each}
        self._ends: dict[tuple[int, int, int], list[_End]] = {}  # by sender, receiver, and whose end it is
        for rank in self._complete:
            for count in sorted(calls[rank]):
                for key, peer, specs in _listed(calls[rank][count], rank):
                    channel = (rank, peer) if key.startswith("send") else (peer, rank)
                    self._ends.setdefault((*channel, rank), []).append(_End(calls[rank][count], specs))

    def messages(self) -> Iterator[Message]:
        """Those of which both ends are there, by sender and receiver, in their order."""
        for sender, receiver, rank in sorted(self._ends):
            if rank == sender:
                both = zip(self._of(sender, receiver, sender), self._of(sender, receiver, receiver), strict=False)
                for count, (sent, received) in enumerate(both, 1):
                    yield Message(sender, receiver, count, sent.call, received.call, sent.fits(received))

    def not_sent(self) -> Iterator[tuple[int, int, int, Call]]:
        """Sender, receiver, and count and call of the first message that is expected, and was not sent."""
        for sender, receiver, rank in sorted(self._ends):
            if rank == receiver and sender in self._complete:
                sent = len(self._of(sender, receiver, sender))
                if expected := self._of(sender, receiver, receiver)[sent:]:
                    yield sender, receiver, sent + 1, expected[0].call

    def others(self, rank: int, call: Call) -> dict[int, bool | None]:
        """The ranks at the other ends of a step, and whether they came to it; None where that is not known."""
        came: dict[int, bool | None] = {}
        for key, peer, _ in _listed(call, rank):
            channel = (rank, peer) if key.startswith("send") else (peer, rank)
            mine = self._of(*channel, rank)
            place = next((i for i, each in enumerate(mine) if each.call["count"] == call["count"]), None)
            if place is None or peer not in self._complete:
                came.setdefault(peer, None)
            else:
                came[peer] = came.get(peer) is not False and place < len(self._of(*channel, peer))
        return came

    def _of(self, sender: int, receiver: int, rank: int) -> list[_End]:
        return self._ends.get((sender, receiver, rank), [])


def _listed(call: Call, rank: int) -> Iterator[tuple[str, int, list[list[Any]] | None]]:
    """Key, other rank and tensors of what a step sends and expects, in the order of messages between two ranks."""
    listed = call["arguments"].get("transfers")
    if call["kind"] != "hop" or type(listed) is not list or call["error"].startswith(_REFUSED):
        return
    by_key = {each[0]: each for each in listed if _is_transfer(each)}
    for key in ORDER:
        if key in by_key and by_key[key][1] != rank:
            yield key, by_key[key][1], by_key[key][2]


def _is_transfer(value: Any) -> bool:
    """Whether a value in a file is what ``p2p.message`` writes: key, rank, and a shape and a dtype for every tensor."""
    if type(value) is not list or len(value) != 3 or type(value[0]) is not str or value[0] not in _KEYS:
        return False
    specs = value[2]
    return type(value[1]) is int and (
        specs is None or (type(specs) is list and all(type(each) is list and len(each) == 2 for each in specs))
    )
