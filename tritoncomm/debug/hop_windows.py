"""Hash mode of p2p steps: each end of a channel notes its transfers, and compares every N of them with the other end.

After the last of N transfers, which both ends have then made or are making, each publishes its own and waits a
moment for those of the other. It is a moment only, because a sender may be ahead of its receiver: what the other end
has not published by then is compared after the next N.
"""

import json
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from tritoncomm import variables
from tritoncomm.debug.exchange import Blocked, Exchange, exchange, raise_if, table_of
from tritoncomm.debug.hops import MOMENT, PAIRS, Content
from tritoncomm.debug.sites import call_site, located

__all__ = ["compare_hops", "fold_hop"]


class _End:
    """This rank's end of the transfers from one rank to another.

    Attributes:
        over: what is compared over.
        base: prefix of the keys.
        ranks: sender and receiver.
        is_send: whether this is the sender's end.
        calls: the transfers since the last comparison: function, key, what is sent or expected, and the caller's site.
        content_of: makes the ``Content`` of what is sent or expected.
        count: windows published.
        unmet: windows published, in order, that the other end has not been seen to publish.
    """

    __slots__ = ("base", "calls", "content_of", "count", "is_send", "over", "ranks", "unmet")

    def __init__(self, neighbours: Any, key: str, content_of: Callable[[Any], Content]) -> None:
        self.over: Exchange = exchange()
        self.content_of = content_of
        peer, self.is_send = neighbours.peer(key), key.startswith("send")
        self.ranks = [self.over.rank, peer] if self.is_send else [peer, self.over.rank]
        self.base = f"{self.over.prefix}/{neighbours.channel(key)}/{self.ranks[0]}-{self.ranks[1]}/windows"
        self.calls: list[tuple[str, str, Any, Any]] = []
        self.count = 0
        self.unmet: deque[tuple[int, list[Any]]] = deque()

    def is_same(self, other: "_End") -> bool:
        """Whether both are the same end of one channel."""
        return (self.base, self.is_send) == (other.base, other.is_send)

    def publish(self) -> None:
        """Publish as many transfers as are compared at a time, the same ones once."""
        every = variables.HASH.value
        calls, self.calls = self.calls[:every], self.calls[every:]
        rows: dict[Any, int] = {}
        places = [rows.setdefault(each, len(rows)) for each in calls]
        listed = []
        for name, key, raw, site in rows:
            file, line = located(site)
            content = self.content_of(raw)
            listed.append([key, content, f"{name}: {key} {content.words} at {file}:{line}"])
        self.count += 1
        self.over.store.set(f"{self.base}/{self.count}/{int(not self.is_send)}", json.dumps([listed, places]))
        self.unmet.append((self.count, [[listed[place] for place in places], len(calls)]))

    def difference(self) -> str:
        """The first transfer that the two ends made differently, of those that both have published."""
        while self.unmet:
            count, (mine, length) = self.unmet[0]
            key = f"{self.base}/{count}/{int(self.is_send)}"
            waiting = Blocked(f"{self.base}/{count}", self.ranks, mine[-1][2])
            content = self.over.wait(partial(self.over.get, key), MOMENT, waiting, _nothing, _nothing, True)
            if content is None:
                return ""
            self.over.store.delete_key(key)
            self.unmet.popleft()
            listed, places = json.loads(content)
            if len(places) != length:
                return f"ranks {self.ranks} compare their transfers at different intervals: {length} and {len(places)}"
            for place, (own, other) in enumerate(zip(mine, (listed[each] for each in places), strict=True)):
                sent, expected = (own, other) if self.is_send else (other, own)
                fits = Content(*expected[1]).fits(Content(*sent[1]))
                if PAIRS[sent[0]] != expected[0] or not fits:
                    table = table_of({self.ranks[0]: sent[2], self.ranks[1]: expected[2]})
                    first = (count - 1) * length + place + 1
                    return (
                        f"transfer {first} from rank {self.ranks[0]} to rank {self.ranks[1]} is the first that differs "
                        f"between its ends:\n{table}"
                    )
        return ""


# By the neighbours of a stage, which live as long as their group. In a ring of two both directions of a stage lead to
# one rank: their transfers go over one channel, and have one end.
_ends: "weakref.WeakKeyDictionary[Any, dict[str, _End]]" = weakref.WeakKeyDictionary()


def _nothing() -> None:
    return None


def fold_hop(neighbours: Any, name: str, transfers: Iterable[tuple[str, Any]], content_of: Any) -> None:
    """Note the transfers of a step.

    Args:
        neighbours: of this stage (``p2p.neighbours.Neighbours``).
        name: the function that was called.
        transfers: ``send_next``, ``recv_prev``, ..., with what is sent or expected: anything that can be hashed.
        content_of: makes the ``Content`` of that.
    """
    ends = _ends.get(neighbours)
    if ends is None:
        ends = _ends[neighbours] = {}
    site = call_site(2)
    for key, raw in transfers:
        end = ends.get(key)
        if end is None:
            made = _End(neighbours, key, content_of)
            end = ends[key] = next((each for each in ends.values() if each.is_same(made)), made)
        end.calls.append((name, key, raw, site))


def compare_hops(neighbours: Any, name: str) -> None:
    """Compare the transfers of a step that has been made, and those before it, where there are enough.

    Raises:
        MismatchError: the two ends of a channel made different transfers; on both, as a rule.
        PeerError: the process that holds the job's store is gone.
    """
    ends = dict.fromkeys(_ends.get(neighbours, {}).values())
    full = [end for end in ends if len(end.calls) >= variables.HASH.value]
    if not full:
        return

    def problem() -> str:
        for end in full:
            while len(end.calls) >= variables.HASH.value:
                end.publish()
        return "; ".join([text for end in full if (text := end.difference())])

    raise_if(name, problem)
