"""Check mode of p2p steps: both ends of a transfer compare what they are about to do.

The transfers from one rank to another are counted on both sides. Each end sets the keys of all its transfers, with what
it sends or expects, and then waits a moment for those of the other ends: a sender before it posts, a receiver before it
receives. It is a moment only, because another stage may be at work, or may come only after something that this rank is
about to send. Where two ends differ both raise after the transfer, and the group stays usable; a sender whose receiver
comes after that moment raises at the end of its next step.

An end that fails before its transfer is complete gives it up: it sets the transfer's verdict, by which the other end is
refused once, when it comes to that transfer, and from then on both count the same again. Where one of them has gone on
to the transfer itself, or may have, all later transfers of the two are refused, as each would receive what the one
before it sent. The verdict of a circle comes from neither end: then each end leaves word that it is refused.
"""

import json
from collections import deque
from collections.abc import Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from tritoncomm.debug.exchange import Blocked, Exchange, exchange, fail_circle, table_of
from tritoncomm.debug.sites import call_site, located
from tritoncomm.errors import MismatchError, PeerError

__all__ = ["MOMENT", "ORDER", "PAIRS", "CheckedHop", "Content"]

PAIRS = {"send_next": "recv_prev", "send_prev": "recv_next", "recv_prev": "send_next", "recv_next": "send_prev"}
MOMENT = 1.0  # seconds
_MAX_UNMET = 1024  # per channel
_GAVE_UP = "gave this transfer up"
_REMEDY = "Each end is refused this transfer once, then both count the same again: the step may be repeated on both"
_CLOSED = (
    " are out of step since a step that one of them gave up when the other may have sent its part: make their process "
    "group again, as by destroy() and initialize(). It was given up because of"
)
ORDER = ("send_next", "send_prev", "recv_prev", "recv_next")  # between the same two ranks, activations go first


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
        self._gone_on: set[str] = set()  # keys of transfers that are made now
        for key in ORDER:
            if key not in contents:
                continue
            peer, is_send = neighbours.peer(key), key.startswith("send")
            ends = [self._over.rank, peer] if is_send else [peer, self._over.rank]
            group = neighbours.channel(key)
            channel = self._over.channel(group, ends, neighbours.group())
            count = self._over.counts[channel] = self._over.counts.get(channel, 0) + 1
            base, following = (f"{self._over.prefix}/{channel}/{each}" for each in (count, count + 1))
            words = f"{name}: {key} {contents[key].words} at {file}:{line}"
            self._over.store.set(f"{base}/{1 - is_send}", json.dumps([key, contents[key], words]))
            self._waits[key] = _Wait(Blocked(base, ends, words), int(is_send), contents[key], key, following, group)

    def meet(self, key: str, in_helper: bool = False) -> None:
        """Wait a moment for the other end of a transfer, and publish what this rank is blocked in if it does not come.

        The transfer itself has the group's timeout, so the wait for a slow stage goes on there.

        Raises:
            MismatchError: the other end waits in another call that cannot end before this one, or has given this
                transfer up.
        """
        if key not in self._waits:
            return
        wait, over = self._waits[key], self._over
        verdict = f"{wait.mine.base}/verdict"

        def ready() -> Any:
            theirs = over.get(wait.theirs)  # first: an end that gives up and comes again sets this verdict before
            return over.get(verdict) or theirs

        def stuck() -> Any:
            return fail_circle(over, wait.mine)

        seen = over.wait(ready, MOMENT, wait.mine, stuck, lambda: None, in_helper)
        if seen is not None and not seen.startswith(b"["):
            text = seen.decode()
            self.give_up(text)
            raise MismatchError(f"{self._name}: {_with_remedy(text)}")
        self._gone_on.add(key)
        if seen is None:
            over.publish(wait.mine)

    def give_up(self, why: str) -> None:
        """No transfer of this step that is not complete will be: let the other ends know, once each."""
        over = self._over
        over.withdraw()
        while self._waits:  # a helper thread may be at it too
            key, wait = self._waits.popitem()
            peer = wait.mine.ranks[wait.place]
            text = _with_remedy(f"rank {over.rank} {_GAVE_UP}, its {wait.mine.words}: {why}")
            made = over.store.compare_set(f"{wait.mine.base}/verdict", "", text).decode()
            if _CLOSED not in made:
                if not self._is_apart(wait, key in self._gone_on, made, text):
                    continue
                made = _CLOSED.join((f"ranks {over.rank} and {peer}", f":\n{why}"))
            over.close(wait.group, wait.mine.ranks)
            over.store.compare_set(f"{wait.following}/verdict", "", made)

    def _is_apart(self, wait: "_Wait", has_gone_on: bool, verdict: str, own: str) -> bool:
        """Whether one end may have made its part of a transfer that the other one gives up."""
        over, is_circle = self._over, verdict != own
        if verdict.startswith(f"rank {wait.mine.ranks[wait.place]} {_GAVE_UP}"):
            return False  # the other end has seen to it
        if has_gone_on:
            return True
        if is_circle:
            over.store.set(f"{wait.mine.base}/refused/{1 - wait.place}", "1")
        if over.get(wait.theirs) is None:
            return False  # an end that comes after the verdict is refused by it
        if not is_circle:
            return True
        refused = partial(over.get, f"{wait.mine.base}/refused/{wait.place}")
        return over.wait(refused, MOMENT, wait.mine, lambda: None, lambda: None, True) is None

    def problem(self, key: str) -> str:
        """Why the other end of a transfer that is complete does not belong to it; empty if it does."""
        if key not in self._waits:
            return ""
        wait, over = self._waits.pop(key), self._over
        over.withdraw()
        ready = partial(over.get, wait.theirs)
        content = over.wait(ready, MOMENT, wait.mine, lambda: None, lambda: None, True)
        if content is not None:
            return self._difference(wait, content)
        if wait.place:  # a receiver that is late, or, as its header shows, sends without check mode
            over.unmet.setdefault(wait.mine.base.rpartition("/")[0], deque(maxlen=_MAX_UNMET)).append(wait)
        return ""

    def earlier(self) -> str:
        """Why receivers that have come since do not belong to what earlier steps sent them; empty if they do."""
        texts = []
        for waits in self._over.unmet.values():
            while waits and (content := self._over.get(waits[0].theirs)) is not None:
                if text := self._difference(waits.popleft(), content):
                    texts.append(f"in an earlier step, {text}")
        return "; ".join(texts)

    def _difference(self, wait: "_Wait", content: bytes) -> str:
        over = self._over
        over.store.delete_key(wait.theirs)
        their_key, listed, their_words = json.loads(content)
        theirs = Content(*listed)
        fits = theirs.fits(wait.content) if wait.place else wait.content.fits(theirs)
        if their_key == PAIRS[wait.key] and fits:
            return ""
        peer = wait.mine.ranks[wait.place]
        table = table_of({over.rank: wait.mine.words, peer: their_words})
        return f"{self._name}: {self._stage} and rank {peer} do not agree on a transfer:\n{table}"

    def explained(self, error: PeerError) -> Exception:
        """The error of a transfer, or the verdict on it that another rank made while this one was blocked in it.

        A rank at the other end that has ended is named.
        """
        peers = {wait.mine.ranks[wait.place] for wait in self._waits.values()}
        try:
            verdicts = [self._over.get(f"{wait.mine.base}/verdict") for wait in self._waits.values()]
            text = next((each.decode() for each in verdicts if each is not None), "")
            if not text and (ended := self._over.ended(peers)):
                error = PeerError(f"{error}:\n{table_of(ended)}")
            self.give_up(text or str(error))
        except dist.DistNetworkError:  # the store is gone too, and the error of the transfer is the earlier one
            return error
        return MismatchError(f"{self._name}: {_with_remedy(text)}") if text else error


def _with_remedy(text: str) -> str:
    return text if _REMEDY in text or _CLOSED in text else f"{text}\n{_REMEDY}"


class _Wait(NamedTuple):
    """A transfer that has not been compared yet.

    Attributes:
        mine: what is published.
        place: of the other end: 1 if this one sends.
        content: what this end sends or expects.
        key: send_next, recv_prev, ...
        following: prefix of the keys of the next transfer between the two.
        group: name of the group that carries it.
    """

    mine: Blocked
    place: int
    content: Content
    key: str
    following: str
    group: str

    @property
    def theirs(self) -> str:
        """Key of the other end's part."""
        return f"{self.mine.base}/{self.place}"
