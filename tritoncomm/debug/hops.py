"""Check mode of p2p steps: both ends of a transfer compare what they are about to do.

The transfers from one rank to another are counted on both sides. Each end sets a key with what it sends or expects and
reads that of the other end: the receiver before it receives, the sender once it has posted all its transfers, so that
no transfer is held back and what cannot deadlock without check mode does not with it. Where the two differ both raise
after the transfer, and the group stays usable.
"""

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from tritoncomm.debug.check import Blocked, Exchange, blocked_table, circle_of, exchange, timeout_of
from tritoncomm.debug.flight import call_site, located
from tritoncomm.errors import MismatchError, PeerError

__all__ = ["CheckedHop", "Content"]

_PAIRS = {"send_next": "recv_prev", "send_prev": "recv_next", "recv_prev": "send_next", "recv_next": "send_prev"}
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
        group = neighbours.group()
        self._timeout = timeout_of(group)
        file, line = located(call_site(2))
        self._waits: dict[str, tuple[Blocked, int, Content]] = {}
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
            self._waits[key] = Blocked(base, ends, words), int(is_send), contents[key]

    def problem(self, key: str, in_thread: bool = False) -> str:
        """Wait for the other end of a transfer; why the two do not belong together, empty if they do.

        Raises:
            MismatchError: the other end waits in another call that cannot end before this one.
            PeerError: it did not come within the group's timeout.
        """
        if key not in self._waits:
            return ""
        (mine, place, own), over = self._waits.pop(key), self._over
        theirs, verdict = f"{mine.base}/{place}", f"{mine.base}/verdict"

        def ready() -> Any:
            content = over.get(theirs)
            if content is not None:
                over.store.delete_key(theirs)
                return "", json.loads(content)
            failure = over.get(verdict)
            return None if failure is None else (failure.decode(), None)

        def stuck() -> Any:
            circle = circle_of(over, mine)
            if circle is None:
                return None
            text = blocked_table(circle)
            for each in circle.values():
                over.store.compare_set(f"{each.base}/verdict", "", text)
            return text, None

        def late() -> Any:
            each = over.blocked(mine.ranks[place])
            return f"late blocked in {each.words}" if each else "late", None

        failure, content = over.wait(ready, self._timeout, mine, stuck, late, in_thread)
        if content is None:
            raise self._failure(failure, mine, place)
        their_key, their_content, their_words = content
        other = Content(*their_content)
        if their_key == _PAIRS[key] and (other.fits(own) if place else own.fits(other)):
            return ""
        ends = {over.rank: mine.words, mine.ranks[place]: their_words}
        table = "\n".join(f"  rank {rank}: {words}" for rank, words in sorted(ends.items()))
        return f"{self._name}: {self._stage} and rank {mine.ranks[place]} do not agree on a transfer:\n{table}"

    def _failure(self, failure: str, mine: Blocked, place: int) -> Exception:
        peer = mine.ranks[place]
        if not failure.startswith("late"):
            return MismatchError(f"{self._name}: {failure}")
        doing = failure.removeprefix("late").strip()
        text = f"{self._name}: {self._stage} waited {self._timeout:g} s for the other end of a transfer at rank {peer}"
        table = f":\n  rank {self._over.rank}: {mine.words}\n  rank {peer}: {doing or 'no call'}"
        return (MismatchError if doing else PeerError)(text + table)
