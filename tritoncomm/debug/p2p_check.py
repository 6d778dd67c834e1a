"""Check mode of p2p steps: both ends of a transfer compare what they send and expect.

Why: a wrong transfer ends in one stage with a wrong shape, or with a timeout, while the mistake is in another stage.

Both ends count the transfers from one rank to the other. Each end sets a key for every transfer of its step, with what
it sends or expects, and then waits for the key of the other end: a sender before it posts, a receiver before it
receives. The wait is bounded by ``LONGEST_WAIT``, because the peer may be computing, or may depend on a later send of
this rank. Where two ends differ both raise after the transfer, and their group stays usable. A sender whose receiver
comes later than that raises at the end of its next step.

An end that fails before its transfer is complete abandons it: it sets the verdict of the transfer, which refuses the
transfer to the other end once; from then on both ends count the same again. If one of them has posted the transfer, or
may have, the channel is closed: all later transfers of the two are refused, because each would receive the message of
the one before. The verdict of a circle comes from neither end; then each end sets a key of its own once it has read it.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from tritoncomm.debug.comparison import Stall
from tritoncomm.debug.sites import call_site, located
from tritoncomm.debug.store import Blocked, JobStore, job_store
from tritoncomm.debug.texts import table_of
from tritoncomm.errors import MismatchError, PeerError

__all__ = ["LONGEST_WAIT", "ORDER", "PAIRS", "CheckedHop", "Content"]

PAIRS = {"send_next": "recv_prev", "send_prev": "recv_next", "recv_prev": "send_next", "recv_next": "send_prev"}
LONGEST_WAIT = 1.0  # seconds
_LONGEST_PAUSE = 0.02  # seconds between two looks for a key
_MAX_UNMET = 1024  # per channel
_ABANDONED = "gave this transfer up"
_REMEDY = "Each end is refused this transfer once, then both count the same again: the step may be repeated on both"
_CLOSED = (
    " are out of step since a step that one of them gave up when the other may have sent its part: make their process "
    "group again, as by destroy() and initialize(). It was given up because of"
)
ORDER = ("send_next", "send_prev", "recv_prev", "recv_next")  # between the same two ranks, activations go first


class Content(NamedTuple):
    """Tensors that one end of a transfer sends or expects.

    Attributes:
        words: for the table.
        specs: shape and dtype of every tensor; None where only the header has the shapes.
        count: number of tensors.
        dtype: of all tensors, where only the header has the shapes.
    """

    words: str
    specs: list[Any] | None
    count: int = 1
    dtype: str = ""

    def fits(self, sent: "Content") -> bool:
        """Whether a receiver that expects this content can take the content ``sent``."""
        if self.specs is not None or sent.specs is None:
            return self.specs == sent.specs
        return len(sent.specs) == self.count and all(dtype == self.dtype for _, dtype in sent.specs)


class _Transfer(NamedTuple):
    """One transfer of a step that has not been compared yet.

    Attributes:
        mine: whereabouts of this rank while it waits in the transfer.
        peer: global rank of the other end.
        is_send: whether this end sends.
        content: tensors that this end sends or expects.
        key: send_next, recv_prev, ...
        next_base: prefix of the keys of the next transfer over the channel.
        channel: prefix of the channel's keys.
        group: name of the group that carries the channel.
        ends: global ranks of the sender and the receiver.
    """

    mine: Blocked
    peer: int
    is_send: bool
    content: Content
    key: str
    next_base: str
    channel: str
    group: str
    ends: list[int]

    @property
    def base(self) -> str:
        """Prefix of the keys of this transfer."""
        return self.mine.base

    @property
    def peer_key(self) -> str:
        """Key that the other end sets."""
        return f"{self.base}/{int(self.is_send)}"


class CheckedHop:
    """Comparisons of one p2p step; making it sets the keys of all its transfers, and waits for nothing.

    Args:
        neighbours: of this stage (``p2p.neighbours.Neighbours``).
        name: the function that was called.
        contents: by key (send_next, recv_prev, ...) the tensors sent or expected.
    """

    def __init__(self, neighbours: Any, name: str, contents: Mapping[str, Content]) -> None:
        self._store: JobStore = job_store()
        self._name, self._stage = name, str(neighbours)
        file, line = located(call_site(2))
        self._transfers: dict[str, _Transfer] = {}
        self._posted: set[str] = set()
        for key in ORDER:
            if key not in contents:
                continue
            peer, is_send = neighbours.peer(key), key.startswith("send")
            ends = [self._store.rank, peer] if is_send else [peer, self._store.rank]
            group = neighbours.channel(key)
            channel = self._store.channel(group, ends, neighbours.group())
            count = self._store.counts[channel] = self._store.counts.get(channel, 0) + 1
            base, next_base = f"{channel}/{count}", f"{channel}/{count + 1}"
            words = f"{name}: {key} {contents[key].words} at {file}:{line}"
            which = f", transfer {count} from rank {ends[0]} to rank {ends[1]}"
            self._store.set(f"{base}/{int(not is_send)}", json.dumps([key, contents[key], words]))
            mine = Blocked(base, words + which, [[f"{base}/{int(is_send)}", peer]])
            self._transfers[key] = _Transfer(mine, peer, is_send, contents[key], key, next_base, channel, group, ends)

    def meet(self, key: str, in_helper: bool = False) -> None:
        """Wait at most ``LONGEST_WAIT`` for the other end of a transfer; publish this rank's whereabouts if it is late.

        The transfer itself has the group's timeout, so a wait for a slow stage goes on there.

        Args:
            key: of the transfer; nothing happens for one that is complete.
            in_helper: whether the calling thread makes no calls of its own.

        Raises:
            MismatchError: the other end waits in another call that cannot end before this one, or has abandoned this
                transfer.
        """
        if key not in self._transfers:
            return
        transfer, store = self._transfers[key], self._store
        verdict = f"{transfer.base}/verdict"

        def ready() -> bytes | None:
            theirs = store.get(
                transfer.peer_key
            )  # first: an end that abandons and comes again sets this verdict before
            return store.get(verdict) or theirs

        found = _poll(store, ready, Stall(store, transfer.mine, in_helper=in_helper))
        if found is not None and not found.startswith(b"["):
            text = found.decode()
            self.give_up(text)
            raise MismatchError(f"{self._name}: {_with_remedy(text)}")
        self._posted.add(key)
        if found is None:
            store.publish(transfer.mine)

    def give_up(self, why: str) -> None:
        """Abandon every incomplete transfer of this step, and tell the other ends ``why``, once each."""
        store = self._store
        store.withdraw()
        while self._transfers:  # a helper thread may take transfers out too
            key, transfer = self._transfers.popitem()
            text = _with_remedy(f"rank {store.rank} {_ABANDONED}, its {_words(transfer)}: {why}")
            verdict = store.set_once(f"{transfer.base}/verdict", text).decode()
            if _CLOSED not in verdict:
                if not self._may_be_posted(transfer, key in self._posted, verdict, text):
                    continue
                verdict = _CLOSED.join((f"ranks {store.rank} and {transfer.peer}", f":\n{why}"))
            store.close(transfer.group, transfer.ends)
            store.set_once(f"{transfer.next_base}/verdict", verdict)

    def _may_be_posted(self, transfer: _Transfer, is_posted: bool, verdict: str, own: str) -> bool:
        """Whether one end may have posted a transfer that the other end abandons.

        Args:
            transfer: the transfer.
            is_posted: whether this end has posted it.
            verdict: the verdict on it.
            own: the verdict that this rank wanted to set.
        """
        store, is_circle = self._store, verdict != own
        if verdict.startswith(f"rank {transfer.peer} {_ABANDONED}"):
            return False  # the other end has closed the channel, if it had to
        if is_posted:
            return True
        if is_circle:
            store.set(f"{transfer.base}/refused/{int(not transfer.is_send)}", "1")
        if not store.has(transfer.peer_key):
            return False  # an end that comes after the verdict is refused by it
        if not is_circle:
            return True
        refused = partial(store.get, f"{transfer.base}/refused/{int(transfer.is_send)}")
        return _poll(store, refused) is None

    def problem(self, key: str) -> str:
        """Compare a complete transfer with its other end; return the difference, or nothing."""
        if key not in self._transfers:
            return ""
        transfer, store = self._transfers.pop(key), self._store
        store.withdraw()
        content = _poll(store, partial(store.get, transfer.peer_key))
        if content is not None:
            return self._difference(transfer, content)
        if transfer.is_send:  # a receiver that is late, or, as its header shows, sends without check mode
            store.unmet.setdefault(transfer.channel, deque(maxlen=_MAX_UNMET)).append(transfer)
        return ""

    def earlier(self) -> str:
        """Compare sends of earlier steps with receivers that have come since; return the differences, or nothing."""
        texts = []
        for transfers in self._store.unmet.values():
            while transfers and (content := self._store.get(transfers[0].peer_key)) is not None:
                if text := self._difference(transfers.popleft(), content):
                    texts.append(f"in an earlier step, {text}")
        return "; ".join(texts)

    def _difference(self, transfer: _Transfer, content: bytes) -> str:
        """Compare a transfer with its other end's content, whose key it deletes; return the difference, or nothing."""
        self._store.delete(transfer.peer_key)
        their_key, listed, their_words = json.loads(content)
        theirs = Content(*listed)
        fits = theirs.fits(transfer.content) if transfer.is_send else transfer.content.fits(theirs)
        if their_key == PAIRS[transfer.key] and fits:
            return ""
        table = table_of({self._store.rank: _words(transfer), transfer.peer: their_words})
        return f"{self._name}: {self._stage} and rank {transfer.peer} do not agree on a transfer:\n{table}"

    def explained(self, error: PeerError) -> Exception:
        """Abandon the step, and return the error to raise instead of a transfer's ``error``.

        It is the verdict on a transfer, if another rank has set one while this rank was blocked. Else it is ``error``
        itself, with the names of peers that have ended.
        """
        try:
            verdicts = [self._store.get(f"{each.base}/verdict") for each in self._transfers.values()]
            text = next((each.decode() for each in verdicts if each is not None), "")
            if not text and (ended := self._store.ended([each.peer for each in self._transfers.values()])):
                error = PeerError(f"{error}:\n{table_of(ended)}")
            self.give_up(text or str(error))
        except dist.DistNetworkError:  # the store is gone too, and the error of the transfer is the earlier one
            return error
        return MismatchError(f"{self._name}: {_with_remedy(text)}") if text else error


def _poll(store: JobStore, ready: Callable[[], bytes | None], stall: Stall | None = None) -> bytes | None:
    """Ask ``ready`` until it returns a value, and return it; None after ``LONGEST_WAIT``.

    It asks, and does not block as ``comparison`` does, because a peer that never comes would hold a blocked read.

    Args:
        store: client of this rank.
        ready: returns None while there is no value.
        stall: looks for a circle meanwhile, once at least before None is returned.
    """
    begun, pause = time.monotonic(), 5e-5
    try:
        while (value := ready()) is None:
            waited = time.monotonic() - begun
            is_late = waited > LONGEST_WAIT
            if is_late and (stall is None or stall.has_looked):
                return None
            if stall is not None:
                stall.look_if_due(waited, is_late)
            time.sleep(pause)
            pause = min(pause * 1.5, _LONGEST_PAUSE)
        return value
    finally:
        if stall is not None:
            stall.end()


def _words(transfer: _Transfer) -> str:
    """Return the words of a transfer without its number."""
    return transfer.mine.words.rpartition(", transfer ")[0]


def _with_remedy(text: str) -> str:
    """Add what to do to a text, unless it says so already."""
    return text if _REMEDY in text or _CLOSED in text else f"{text}\n{_REMEDY}"
