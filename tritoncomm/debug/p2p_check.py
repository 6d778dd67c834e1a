"""Check mode of p2p steps: both ends of a transfer compare what they send and expect.

Why: a wrong transfer ends in one stage with a wrong shape, or with a timeout, while the mistake is in another stage.

Both ends count the transfers from one rank to the other. Each end sets a key for every transfer of its step, with what
it sends or expects, and then waits for the key of the other end: a sender before it posts, a receiver before it
receives. The wait is bounded by ``LONGEST_WAIT``, because the peer may be computing, or may depend on a later send of
this rank. Where two ends differ both raise after the transfer, and their group stays usable. A sender whose receiver
comes later than that raises at the end of its next step.

An end that fails before its transfer is complete closes the channel: it sets the channel's verdict, which refuses this
transfer and all later ones of the two to both ends. They may be a message apart, and each would receive the message of
the one before. A circle of waiting ranks closes the channels of its transfers too.
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
_REMEDY = "Nothing passes between the two any more: make their process group again, as by destroy() and initialize()"
ORDER = ("send_next", "send_prev", "recv_prev", "recv_next")  # between the same two ranks, activations go first


class Content(NamedTuple):
    """Tensors that one end of a transfer sends or expects.

    Attributes:
        words: for the table.
        specs: shape and dtype of every tensor; None where only the header has the shapes.
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
        mine: whereabouts of this rank while it waits in the transfer; its ``base`` is the prefix of the channel's keys.
        peer: global rank of the other end.
        peer_key: key that the other end sets.
        content: tensors that this end sends or expects.
        key: send_next, recv_prev, ...
    """

    mine: Blocked
    peer: int
    peer_key: str
    content: Content
    key: str

    @property
    def verdict(self) -> str:
        """Key of the verdict that closes the channel."""
        return f"{self.mine.base}/verdict"

    @property
    def words(self) -> str:
        """Step and source line, without the number of the transfer."""
        return self.mine.words.rpartition(", transfer ")[0]


class CheckedHop:
    """Comparisons of one p2p step; making it sets the keys of all its transfers, and waits for nothing.

    Args:
        neighbours: of this stage (``p2p.neighbours.Neighbours``).
        contents: by key (send_next, recv_prev, ...) the tensors sent or expected.
        refused: whether the step is given up next. It sets no keys: a peer that saw one before the verdict would enter
            a transfer that nobody makes.
    """

    def __init__(self, neighbours: Any, name: str, contents: Mapping[str, Content], *, refused: bool = False) -> None:
        self._store: JobStore = job_store()
        self._name, self._stage = name, str(neighbours)
        file, line = located(call_site(2))
        self._transfers: dict[str, _Transfer] = {}
        for key in ORDER:
            if key not in contents:
                continue
            peer, is_send = neighbours.peer(key), key.startswith("send")
            # Global ranks of the sender and the receiver: both ends have one channel, and count its transfers alike.
            ends = [self._store.rank, peer] if is_send else [peer, self._store.rank]
            channel = self._store.channel(neighbours.channel(key), ends, neighbours.group())
            count = self._store.counts[channel] = self._store.counts.get(channel, 0) + 1
            words = f"{name}: {key} {contents[key].words} at {file}:{line}"
            which = f", transfer {count} from rank {ends[0]} to rank {ends[1]}"
            sender_key, receiver_key = f"{channel}/{count}/0", f"{channel}/{count}/1"
            own_key, peer_key = (sender_key, receiver_key) if is_send else (receiver_key, sender_key)
            if not refused:
                self._store.set(own_key, json.dumps([key, contents[key], words]))
            mine = Blocked(channel, words + which, [[peer_key, peer]])
            self._transfers[key] = _Transfer(mine, peer, peer_key, contents[key], key)

    def meet(self, key: str, in_helper: bool = False) -> None:
        """Wait for the other end of transfer ``key``, at most ``LONGEST_WAIT`` seconds; raise on a closed channel.

        ``in_helper``: the caller is a helper thread, so that this rank's own thread may be inside another call.
        """
        if key not in self._transfers:
            return
        transfer, store = self._transfers[key], self._store

        def ready() -> bytes | None:
            # An end that closes the channel writes the verdict first, then keys of its later steps. Here the key is
            # read first: if it was one of a closed channel, the verdict is there when that is read.
            peer_content = store.get(transfer.peer_key)
            return store.get(transfer.verdict) or peer_content

        # No error if the other end is late: the transfer itself waits for it, up to the group's timeout. Meanwhile
        # other ranks can read this rank's whereabouts. A peer's key is a JSON list, and a verdict is plain text;
        # ``problem`` compares the contents after the transfer.
        content = _poll(ready, Stall(store, transfer.mine, in_helper=in_helper))
        if content is None:
            store.publish(transfer.mine)
        elif not content.startswith(b"["):
            text = _with_remedy(content.decode())
            self.give_up(text)
            raise MismatchError(f"{self._name}: {text}")

    def give_up(self, why: str) -> None:
        """Close the channels of this step's incomplete transfers: later transfers over them fail, with ``why``."""
        self._store.withdraw()
        while self._transfers:  # a helper thread may take transfers out too
            _, transfer = self._transfers.popitem()
            text = f"ranks {self._store.rank} and {transfer.peer} are out of step since rank {self._store.rank} gave up"
            self._store.set_once(transfer.verdict, _with_remedy(f"{text} its {transfer.words}: {why}"))

    def problem(self, key: str) -> str:
        """Compare the tensors that both ends of a completed transfer named, and return their difference as text.

        The text is empty if they agree, and if the receiver is late: ``earlier`` compares them later.
        """
        if key not in self._transfers:
            return ""
        transfer, store = self._transfers.pop(key), self._store
        store.withdraw()
        if (content := _poll(partial(store.get, transfer.peer_key))) is not None:
            return self._difference(transfer, content)
        if key.startswith("send"):  # a receiver that is late, or, as its header shows, sends without check mode
            store.unmet.setdefault(transfer.mine.base, deque(maxlen=_MAX_UNMET)).append(transfer)
        return ""

    def earlier(self) -> str:
        """Compare this rank's sends of earlier steps whose receivers came late; wait for no receiver."""
        texts = []
        for transfers in self._store.unmet.values():
            while transfers and (content := self._store.get(transfers[0].peer_key)) is not None:
                if text := self._difference(transfers.popleft(), content):
                    texts.append(f"in an earlier step, {text}")
        return "; ".join(texts)

    def _difference(self, transfer: _Transfer, content: bytes) -> str:
        """Compare a transfer with the value of the other end's key, and delete that key; return the difference."""
        self._store.delete(transfer.peer_key)
        their_key, listed, their_words = json.loads(content)
        theirs, ours = Content(*listed), transfer.content
        # ``fits`` is a method of the receiver's content, and takes the sender's.
        fits = theirs.fits(ours) if transfer.key.startswith("send") else ours.fits(theirs)
        if their_key == PAIRS[transfer.key] and fits:
            return ""
        table = table_of({self._store.rank: transfer.words, transfer.peer: their_words})
        return f"{self._name}: {self._stage} and rank {transfer.peer} do not agree on a transfer:\n{table}"

    def explained(self, error: PeerError) -> Exception:
        """Give the step up because a transfer failed with ``error``, and return the error to raise instead."""
        try:
            # In this order: the verdict of another rank on a channel, the peers whose processes have ended, ``error``
            # itself.
            verdicts = [self._store.get(each.verdict) for each in self._transfers.values()]
            text = next((_with_remedy(each.decode()) for each in verdicts if each is not None), "")
            if not text and (ended := self._store.ended([each.peer for each in self._transfers.values()])):
                error = PeerError(f"{error}:\n{table_of(ended)}")
            self.give_up(text or str(error))
        except dist.DistNetworkError:  # the store is gone too, and the error of the transfer is the earlier one
            return error
        return MismatchError(f"{self._name}: {text}") if text else error


def _poll(ready: Callable[[], bytes | None], stall: Stall | None = None) -> bytes | None:
    """Call ``ready`` until it returns a value, and return it; None after ``LONGEST_WAIT`` seconds without one."""
    # Polling, not a blocking read as in ``comparison``: a peer that never comes would hold a blocked read. A stall
    # looks for a circle at least once before the wait is given up.
    begun, pause = time.monotonic(), 5e-5  # seconds
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


def _with_remedy(text: str) -> str:
    """Append to a text what to do after a channel was closed, unless the text has it already."""
    return text if _REMEDY in text else f"{text}\n{_REMEDY}"
