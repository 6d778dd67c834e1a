"""Check mode of p2p steps: both ends of a transfer compare what they are about to do.

The transfers from one rank to another are counted on both sides. Each end sets the keys of all its transfers, with what
it sends or expects, and then waits a moment for those of the other ends: a sender before it posts, a receiver before it
receives. It is a moment only, because another stage may be at work, or may come only after something that this rank is
about to send. Where two ends differ they raise after the transfer, and the group stays usable.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tritoncomm.debug.exchange import Blocked, Exchange, exchange, fail_circle, table_of
from tritoncomm.debug.flight import call_site, located
from tritoncomm.errors import MismatchError, PeerError

__all__ = ["CheckedHop", "Content"]

_PAIRS = {"send_next": "recv_prev", "send_prev": "recv_next", "recv_prev": "send_next", "recv_next": "send_prev"}
_MOMENT = 1.0  # seconds
_ORDER = ("send_next", "send_prev", "recv_prev", "recv_next")  # between the same two ranks, activations go first


class Content(NamedTuple):
    """What one end of a transfer sends or expects.

    Attributes:
        words: for the table.
        specs: shape and dtype of every tensor; None where only the header has the shapes.
        count: number of tensors.
        dtype: of all of them, where only the header has the shapes.
    """

    words: str
    specs: list[Any] | None
    count: int = 1
    dtype: str = ""

    def fits(self, sent: "Content") -> bool:
        """Whether a receiver that expects this can take what is sent."""
        if self.specs is not None or sent.specs is None:
            return self.specs == sent.specs
        return len(sent.specs) == self.count and all(dtype == self.dtype for _, dtype in sent.specs)


class CheckedHop:
    """The comparisons of one p2p step; nothing is waited for when it is made.

    Args:
        neighbours: of this stage (``p2p.neighbours.Neighbours``).
        name: the function that was called.
        contents: by key (send_next, recv_prev, ...) what is sent or expected.
    """

    def __init__(self, neighbours: Any, name: str, contents: Mapping[str, Content]) -> None:
        self._over: Exchange = exchange()
        self._name, self._stage = name, str(neighbours)
        file, line = located(call_site(2))
        self._waits: dict[str, _Wait] = {}
        for key in _ORDER:
            if key not in contents:
                continue
            peer, is_send = neighbours.peer(key), key.startswith("send")
            ends = [self._over.rank, peer] if is_send else [peer, self._over.rank]
            channel = f"{neighbours.channel(key)}/{ends[0]}-{ends[1]}"
            count = self._over.counts[channel] = self._over.counts.get(channel, 0) + 1
            base = f"{self._over.prefix}/{channel}/{count}"
            words = f"{name}: {key} {contents[key].words} at {file}:{line}"
            self._over.store.set(f"{base}/{1 - is_send}", json.dumps([key, contents[key], words]))
            self._waits[key] = _Wait(Blocked(base, ends, words), int(is_send), contents[key])

    def meet(self, key: str, in_helper: bool = False) -> None:
        """Wait a moment for the other end of a transfer, and publish what this rank is blocked in if it does not come.

        The transfer itself has the group's timeout, so the wait for a slow stage goes on there.

        Raises:
            MismatchError: the other end waits in another call that cannot end before this one.
        """
        if key not in self._waits:
            return
        wait, over = self._waits[key], self._over
        verdict = f"{wait.mine.base}/verdict"

        def ready() -> Any:
            return over.get(f"{wait.mine.base}/{wait.place}") or over.get(verdict)

        def stuck() -> Any:
            return fail_circle(over, wait.mine)

        seen = over.wait(ready, _MOMENT, wait.mine, stuck, lambda: None, in_helper)
        if seen is None:
            over.publish(wait.mine)
        elif not seen.startswith(b"["):
            raise MismatchError(f"{self._name}: {seen.decode()}")

    def problem(self, key: str) -> str:
        """Why the other end of a transfer that is complete does not belong to it; empty if it does."""
        if key not in self._waits:
            return ""
        wait, over = self._waits.pop(key), self._over
        theirs = f"{wait.mine.base}/{wait.place}"
        over.withdraw()
        content = over.wait(lambda: over.get(theirs), _MOMENT, wait.mine, lambda: None, lambda: None, True)
        if content is None:
            return ""  # sent without check mode: the header shows it
        over.store.delete_key(theirs)
        their_key, their_content, their_words = json.loads(content)
        # What does not fit is the receiver's to refuse, as its header shows; both refuse another direction.
        if their_key == _PAIRS[key] and (wait.place or wait.content.fits(Content(*their_content))):
            return ""
        peer = wait.mine.ranks[wait.place]
        table = table_of({over.rank: wait.mine.words, peer: their_words})
        return f"{self._name}: {self._stage} and rank {peer} do not agree on a transfer:\n{table}"

    def explained(self, error: PeerError) -> Exception:
        """The error of a transfer, or the verdict on it that another rank made while this one was blocked in it."""
        self._over.withdraw()
        for wait in self._waits.values():
            verdict = self._over.get(f"{wait.mine.base}/verdict")
            if verdict is not None:
                return MismatchError(f"{self._name}: {verdict.decode()}")
        return error


class _Wait(NamedTuple):
    """A transfer that has not been compared yet: what is published, the place of the other end, what is expected."""

    mine: Blocked
    place: int
    content: Content
