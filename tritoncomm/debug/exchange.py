"""Keys in the default store through which ranks compare what they do, and see who waits for whom.

A store and not a process group: it has timeouts that leave it usable, it works where ranks call on different groups,
and no group has to be made by ranks of which one may be elsewhere.

A rank that waits longer than ``_PATIENCE`` publishes what it is blocked in. If ranks wait for each other in a circle,
as where two of them call on different groups, whoever sees it first fails all calls of the circle.
"""

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tritoncomm import record
from tritoncomm.debug.agreement import by_text, named_ranks, one_line
from tritoncomm.errors import MismatchError, PeerError

__all__ = ["Blocked", "Exchange", "exchange", "fail", "fail_circle", "fail_ended", "in_words", "raise_if", "table_of"]

_ROOT = "tritoncomm/check"
_PATIENCE, _LONGEST_PAUSE = 0.4, 0.02  # seconds
_MAX_SHOWN = 40  # lines of a table


class Blocked(NamedTuple):
    """What a rank waits in.

    Attributes:
        base: prefix of the call's keys.
        ranks: of the group.
        words: the call, and where it was made.
    """

    base: str
    ranks: list[int]
    words: str


class Exchange:
    """This rank's end of the comparisons over one default store.

    Attributes:
        store: a client of its own, so that no other thread waits for it.
        rank: global.
        prefix: of all keys.
        counts: transfers so far by channel, of check mode of p2p steps.
        unmet: by channel, transfers that this rank has sent and whose receivers had not come when it went on.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store.clone(), rank
        # Ranks that destroy and make their default group again over the same store do not read the keys of before.
        self.prefix = f"{_ROOT}/{self.store.add(f'{_ROOT}/rounds/{rank}', 1)}"
        self.counts: dict[str, int] = {}
        self.unmet: dict[str, deque[Any]] = {}
        self._verdicts: dict[str, list[str]] = {}
        self._channels: dict[str, tuple[weakref.ref[Any], int]] = {}
        self._tokens = 0
        self._inside: set[int] = set()  # threads
        self._has_threads = self._published = False

    def token(self) -> str:
        """A text that no other call of this, on any rank, returns."""
        self._tokens += 1
        return f"{self.rank}.{self._tokens}"

    def verdicts_of(self, name: str) -> list[str]:
        """Keys that all groups of this name, one after the other, have to delete."""
        return self._verdicts.setdefault(name, [])

    def channel(self, name: str, ends: Sequence[int], group: Any) -> str:
        """Part of a channel's keys, equal at both ends. Once closed, the next group of this name has another."""
        base = f"{name}/{ends[0]}-{ends[1]}"
        seen, number = self._channels.get(base, (None, 0))
        if seen is None or seen() is not group:
            closed = None if seen is None else self.get(f"{self.prefix}/{base}/closed")
            number = number if closed is None else int(closed) + 1
            self._channels[base] = (weakref.ref(group), number)
        return f"{name}@{number}/{ends[0]}-{ends[1]}" if number else base

    def close(self, name: str, ends: Sequence[int]) -> None:
        """Nothing passes over a channel any more, until it has another group."""
        base = f"{name}/{ends[0]}-{ends[1]}"
        self.store.set(f"{self.prefix}/{base}/closed", str(self._channels[base][1]))

    def blocked(self, rank: int) -> Blocked | None:
        """What another rank is blocked in, as far as it has published that."""
        text = self.get(f"{self.prefix}/blocked/{rank}")
        return None if text is None else Blocked(*json.loads(text))

    def get(self, key: str) -> bytes | None:
        """A value; None where there is none."""
        values = self.get_all([key])
        return None if values is None else values[0]

    def get_all(self, keys: list[str]) -> list[bytes] | None:
        """The values of all keys; None where one is missing, also if its owner deletes it while they are read."""
        if not self.store.check(keys):
            return None
        self.store.set_timeout(timedelta(seconds=1))
        try:
            return self.store.multi_get(keys) if len(keys) > 1 else [self.store.get(keys[0])]
        except dist.DistNetworkError:
            raise
        except RuntimeError:  # DistStoreError, which a FileStore does not raise
            return None

    def publish(self, mine: Blocked) -> None:
        """Let other ranks know what this one is blocked in."""
        self.store.set(f"{self.prefix}/blocked/{self.rank}", json.dumps(mine))
        self._published = True

    def withdraw(self) -> None:
        """This rank is not blocked any more."""
        if self._published:
            self._published = False
            self.store.delete_key(f"{self.prefix}/blocked/{self.rank}")

    def wait(
        self,
        ready: Callable[[], Any],
        timeout: float,
        mine: Blocked,
        stuck: Callable[[], Any],
        late: Callable[[], Any],
        in_helper: bool = False,
    ) -> Any:
        """Poll ``ready`` until it returns something.

        Args:
            ready: None while there is nothing.
            timeout: seconds; then the result of ``late``.
            mine: published after a while.
            stuck: asked now and then, after a while; what it returns ends the wait.
            late: called after the timeout.
            in_helper: called in a thread that makes no calls of its own.
        """
        begun = now = time.monotonic()
        pause, look, published, thread = 5e-5, begun + _PATIENCE, False, threading.get_ident()
        # Two ranks of a circle that both stall until the timeout, and go on without a look, would block in their calls.
        looked = timeout < 2 * _PATIENCE
        if not in_helper:
            self._inside.add(thread)
            self._has_threads = self._has_threads or len(self._inside) > 1
        try:
            while (value := ready()) is None:
                now = time.monotonic()
                if now - begun > timeout and (looked or self._has_threads):
                    return late()
                if now > look and not self._has_threads:  # another thread of this rank may make the missing call
                    if not published:
                        self.publish(mine)
                        published = True
                    else:
                        looked = True
                        if (value := stuck()) is not None:
                            return value
                    look = now + min(5.0, 0.5 * (now - begun))
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
            return value
        finally:
            self._inside.discard(thread)
            if published:
                self.withdraw()

    def ended(self, ranks: Iterable[int]) -> dict[int, str]:
        """Of these ranks, those whose processes have ended, and why."""
        words = {rank: self.get(f"{self.prefix}/ended/{rank}") for rank in ranks}
        return {rank: text.decode() for rank, text in words.items() if text is not None}


_exchanges: "list[tuple[Any, Exchange]]" = []  # over the default store of now
_lock = threading.Lock()
_pid = os.getpid()


@atexit.register
def _leave_word() -> None:
    """At the end of the process, for those that wait for it: a backend may see a closed connection, the store does not.

    Processes that are killed leave none; they are waited for until the timeout.
    """
    if not _exchanges or os.getpid() != _pid:
        return
    over, error = _exchanges[0][1], getattr(sys, "last_value", None)
    why = "has ended" if error is None else f"has ended with {type(error).__name__}: {one_line(str(error))}"
    with suppress(RuntimeError):  # the store has ended before
        over.store.set(f"{over.prefix}/ended/{over.rank}", why)


def exchange() -> Exchange:
    """The comparisons over the default store of now."""
    store = distributed_c10d._get_default_store()
    with _lock:  # the first calls of several threads have one
        if not _exchanges or _exchanges[0][0] is not store:
            _exchanges[:] = [(store, Exchange(store, dist.get_rank()))]
        return _exchanges[0][1]


def raise_if(name: str, problem: Callable[[], str]) -> None:
    """Raise what a comparison of the calls of ``name`` says, if it does, and note it in the flight record.

    Raises:
        MismatchError: the text of ``problem``.
        PeerError: the process that holds the job's store is gone.
    """
    try:
        text = problem()
    except dist.DistNetworkError as error:
        failure = PeerError(f"{name}: the store of the job is gone, and with it its first process: {error}")
        record.failed(name, failure)
        raise failure from error
    if text:
        failure = MismatchError(f"{name}: {text}")
        record.failed(name, failure)
        raise failure


def table_of(words: dict[int, str]) -> str:
    """A line for every distinct text, with the ranks that have it."""
    lines = [f"  {named_ranks(ranks)}: {text}" for text, ranks in by_text(words)]
    more = [f"  and {len(lines) - _MAX_SHOWN} more"] * (len(lines) > _MAX_SHOWN)
    return "\n".join(lines[:_MAX_SHOWN] + more)


def fail(over: Exchange, base: str, text: str) -> bytes:
    """Set the verdict of a call that some of its ranks do not come to, unless it has one; return the one that holds.

    The incarnation of its group is closed before, if it is still open: a rank that comes after the verdict opens the
    next one, whether or not the ranks of this call have left it by then.
    """
    name, at, incarnation = base.rpartition("/")[0].rpartition("@")
    if at:
        over.store.compare_set(f"{name}/open", incarnation, "")
    return over.store.compare_set(f"{base}/verdict", "", text)


def fail_ended(over: Exchange, mine: Blocked) -> bytes | None:
    """Fail the call that this rank is blocked in if one of its ranks has ended; the verdict on it, else None."""
    ended = over.ended(rank for rank in mine.ranks if rank != over.rank)
    if not ended:
        return None
    table = table_of({over.rank: f"{mine.words}{in_words(mine)}"} | ended)
    return fail(over, mine.base, f"{named_ranks(sorted(ended))} will not come to this call:\n{table}")


def _missing(over: Exchange, own: int, each: Blocked) -> list[int]:
    """The other ranks of the call that rank ``own`` is blocked in, that have not come to it."""
    others = [(place, rank) for place, rank in enumerate(each.ranks) if rank != own]
    return [rank for place, rank in others if not over.store.check([f"{each.base}/{place}"])]


def _circle(over: Exchange, mine: Blocked) -> dict[int, Blocked] | None:
    """The blocked calls of ranks that wait for each other in a circle that this rank waits for; None if there is none.

    A blocked rank makes no other call, so a circle stays one. But ranks are looked at one after the other, and one that
    goes on meanwhile takes keys of its call away, as if they had never come: so all have to be where they were seen.
    """
    circle = _seen_circle(over, mine)
    if circle is None:
        return None
    others = {rank: each for rank, each in circle.items() if rank != over.rank}
    # In this order: a verdict is deleted only after its ranks have come to a later call.
    if any(over.get(f"{each.base}/verdict") is not None for each in others.values()):
        return None
    return circle if all(over.blocked(rank) == each for rank, each in others.items()) else None


def _seen_circle(over: Exchange, mine: Blocked) -> dict[int, Blocked] | None:
    """``_circle`` as it looks: a rank waits for another if its call has neither that rank's key nor a verdict."""
    path, left, seen = {over.rank: mine}, [(over.rank, iter(_missing(over, over.rank, mine)))], {over.rank}
    while left:
        rank, missing = left[-1]
        other = next(missing, None)
        if other is None:
            left.pop()
            del path[rank]
        elif other in path:
            ranks = list(path)
            return {each: path[each] for each in ranks[ranks.index(other) :]}
        elif other not in seen:
            seen.add(other)
            each = over.blocked(other)
            if each is not None and over.get(f"{each.base}/verdict") is None:
                path[other] = each
                left.append((other, iter(_missing(over, other, each))))
    return None


def fail_circle(over: Exchange, mine: Blocked) -> bytes | None:
    """Fail all calls of a circle that this rank waits for; the verdict on its own call, None if there is no circle."""
    circle = _circle(over, mine)
    if circle is None:
        return None
    table = table_of({rank: f"{each.words}{in_words(each)}" for rank, each in circle.items()})
    text = f"ranks {sorted(circle)} wait for each other in different calls:\n{table}"
    for each in circle.values():
        fail(over, each.base, text)
    return fail(over, mine.base, text)


def in_words(each: Blocked) -> str:
    """Which call of which group it is, or which transfer between two ranks."""
    key, count = each.base.split("/")[-2:]
    group = key.partition("@")[0]
    if group == "-".join(map(str, each.ranks)):
        return f", transfer {count} from rank {each.ranks[0]} to rank {each.ranks[1]}"
    return f", call {count} of group {group!r} of ranks {each.ranks}"
