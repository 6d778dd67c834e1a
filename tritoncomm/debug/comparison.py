"""Comparison of a call between the ranks of its group, up a tree of ranks in the job's store.

Each rank contributes a digest of 16 bytes: 8 bytes that have to be equal on all ranks, and 8 bytes whose sum over the
ranks has to be 0 modulo 2**64. A rank waits for the digests of at most 16 children, combines them with its own, and
sets the result for its parent. The first rank of the group sets the verdict, which all other ranks wait for. So a rank
sends at most four requests for a call, however many ranks there are, and a parent one more. Texts are exchanged only
after a difference.

A rank that waits longer than ``PATIENCE`` publishes its whereabouts, and looks for a reason why the call cannot end: a
circle of ranks that wait for each other, as where two ranks call on different groups; the end of a process; the timeout
of the group. Whoever finds one sets the verdict, and with it ends the call on all ranks. The group stays usable.
"""

import json
import math
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from tritoncomm.debug.store import Blocked, JobStore
from tritoncomm.debug.texts import named_ranks, table_of
from tritoncomm.debug.threads import others_may_call

__all__ = ["FANOUT", "Comparison", "Stall", "combine", "fail"]

FANOUT = 16
PATIENCE = 0.4  # seconds until a rank that waits publishes its whereabouts, in groups of up to 1,024 ranks
_FIRST_PAUSE = 0.05  # seconds; a rank that comes to a call that has failed reads the verdict after this time
_LONGEST_PAUSE, _LATE_PAUSE = 1.0, 0.1  # seconds between two looks for a verdict
_LONGEST_LOOK = 5.0  # seconds between two looks for a reason
_CLAIMED = 10.0  # seconds that a rank waits for the table of a timeout that another rank makes
_AGREED, _DIFFERENT = b"+", b"?"  # verdicts; any other verdict is the text of a failure
_UNEQUAL = b"\xff" * 8  # in place of first halves that are not equal


def combine(digests: Sequence[bytes]) -> bytes:
    """Combine digests into one: 8 bytes that are equal or else 0xff, and the sum of the last 8 bytes modulo 2**64."""
    firsts = {each[:8] for each in digests}
    total = sum(int.from_bytes(each[8:], "little") for each in digests) % 2**64
    return (firsts.pop() if len(firsts) == 1 else _UNEQUAL) + total.to_bytes(8, "little")


@dataclass
class Comparison:
    """One call of a group, compared between its ranks.

    Attributes:
        base: prefix of the call's keys, equal on all ranks of the group and of no other call.
        ranks: global ranks in group order.
        place: rank in the group.
        timeout: seconds until the group's own collectives give up.
        words: the call and its source line.
        which: number of the call, and its group.
        stale: keys that the first rank deletes once all ranks have come; it adds the verdicts of this call.
    """

    store: JobStore
    base: str
    ranks: Sequence[int]
    place: int
    timeout: float
    words: str
    which: str
    stale: list[str]

    def compare(self, digest: bytes, content: Callable[[], Any], judge: Callable[[list[Any]], str]) -> str:
        """Wait for all ranks of the group to come to this call; return how their calls differ, or why it has failed.

        Args:
            digest: of this rank, 16 bytes.
            content: called if the digests do not fit together; returns the call of this rank in JSON values.
            judge: called on the first rank with the contents of all ranks; returns their difference, perhaps empty.
        """
        verdict = self._verdict(digest)
        if verdict == _DIFFERENT:
            verdict = self._report(json.dumps(content()), judge)
        return "" if verdict == _AGREED else verdict.decode()

    def _verdict(self, digest: bytes) -> bytes:
        """Wait for the digests of the children, pass all combined to the parent, and wait for the verdict.

        Returns ``_AGREED``, ``_DIFFERENT``, or the text of a call that has failed. The first rank sets the verdict.
        """
        store, base = self.store, self.base
        # The tree of places is a heap: place p has the children 16 p + 1 to 16 p + 16.
        first = FANOUT * self.place + 1
        children = range(first, min(first + FANOUT, len(self.ranks)))
        if children:
            if store.has(f"{base}/verdict"):  # of a call that failed before this rank came
                return self._ends(base)
            digests = self._read(base, children)
            if digests is None:
                return self._ends(base)
            digest = combine([digest, *digests])
        if self.place:
            store.set(f"{base}/{self.place}", digest)
            return self._ends(base, f"{base}/{self.place}")
        while self.stale:  # all ranks have come, so all have read the verdicts of earlier calls
            store.delete(self.stale.pop())
        store.delete_orphans(self.ranks)
        # 8 bytes of the calls' common hash, or ``_UNEQUAL``; then sums of rows sent less rows received, 0 where they
        # fit.
        fits = digest[:8] != _UNEQUAL and not any(digest[8:])
        return self._decide(base, _AGREED if fits else _DIFFERENT)

    def _report(self, content: str, judge: Callable[[list[Any]], str]) -> bytes:
        """Send the content of this rank, a JSON text, to the first rank; return its verdict on all contents."""
        # Without a tree: texts are exchanged only after a difference.
        store, base = self.store, f"{self.base}/report"
        store.set(f"{base}/{self.place}", content)
        if self.place:
            return self._ends(base, f"{base}/{self.place}")
        contents = self._read(base, range(1, len(self.ranks)))
        if contents is None:
            return self._ends(base, f"{base}/0")
        text = judge([json.loads(each) for each in [content, *contents]])
        store.delete(f"{base}/0")
        return self._decide(base, text or _AGREED)

    def _decide(self, base: str, verdict: str | bytes) -> bytes:
        """Set the verdict as the first rank, unless the call has one already; return the one that is set."""
        self.stale.append(f"{base}/verdict")
        return self.store.set_once(f"{base}/verdict", verdict)

    def _ends(self, base: str, rank_key: str = "") -> bytes:
        """Wait for the verdict, and return it; then delete ``rank_key``, the key that this rank has set, if any."""
        key, awaited = f"{base}/verdict", []
        if self.place:
            # This rank waits for its parent in the tree of digests. In the report that follows a difference, which has
            # another base, it waits for the first rank.
            parent = (self.place - 1) // FANOUT if base == self.base else 0
            awaited = [["", self.ranks[parent]]]  # an empty key is never set, so only the verdict ends this wait
        stall = self._stall(base, awaited)
        try:
            values = self.store.read([key], stall.pause, abandoned=self._left)
        finally:
            stall.end()
            if rank_key:
                self.store.delete(rank_key)
            if not self.place:
                self.stale.append(key)
        assert values is not None, "a stall ends the wait for a verdict by setting it"
        return values[0]

    def _read(self, base: str, places: Sequence[int]) -> list[bytes] | None:
        """Wait for the keys that ranks of the group set; return their values, or None once the call has failed."""
        keys = [f"{base}/{place}" for place in places]
        awaited = [[key, self.ranks[place]] for key, place in zip(keys, places, strict=True)]
        stall = self._stall(base, awaited, f"{base}/verdict")
        try:
            return self.store.read(keys, stall.pause)
        except BaseException:
            with suppress(RuntimeError):  # the store is gone, which ends the wait of the others too
                fail(self.store, base, self._left)
            raise
        finally:
            stall.end()

    @property
    def _left(self) -> str:
        """Verdict that this rank sets if an exception ends its wait."""
        return f"rank {self.store.rank} has left this call"

    def _stall(self, base: str, awaited: list[list[Any]], verdict: str = "") -> "Stall":
        """Begin to watch a wait for the ranks ``awaited`` (see ``Blocked``), or until the key ``verdict`` is set."""
        mine = Blocked(base, f"{self.words}{self.which}", awaited)
        return Stall(
            self.store, mine, timeout=self.timeout, fail_late=self._fail_late, verdict=verdict, world=len(self.ranks)
        )

    def _fail_late(self, base: str) -> None:
        """Set a verdict that names the ranks that did not come within the timeout."""
        # ``which`` is ``, call 3 of group ...``: it stands in the first line of the text, and not in the table.
        # By rank: the call of a rank that came, or the call in which a missing rank is blocked.
        texts: dict[int, str] = {}
        absent = []
        for place, rank in enumerate(self.ranks):
            each = self.store.blocked(rank)
            if place == self.place:
                texts[rank] = self.words
            elif each is not None and each.base == base:
                texts[rank] = each.words.removesuffix(self.which)
            elif self.store.has(f"{base}/{place}"):
                texts[rank] = "in this call"
            else:
                absent.append(rank)
                texts[rank] = "no call" if each is None else f"no call; blocked in {each.words}"
        came = f"{named_ranks(absent)} did not come" if absent else "the ranks came too late"
        fail(self.store, base, f"{came} to{self.which.lstrip(',')} within {self.timeout:g} s:\n{table_of(texts)}")


def fail(store: JobStore, base: str, text: str) -> None:
    """Set the verdict ``text`` on a call that cannot end, unless it has one. All its ranks then return that text."""
    # The incarnation of the group (see ``check``) is closed before the verdict is set. So a rank that comes after the
    # verdict opens the next one, whether or not the ranks of this call have left it by then.
    name, at, incarnation = base.removesuffix("/report").rpartition("/")[0].rpartition("@")
    if at:  # ``base`` is ``NAME@INCARNATION/COUNT``; groups without an incarnation, and channels, have none to close
        store.replace(f"{name}/open", incarnation, "")
    store.set_once(f"{base}/verdict", text)


@dataclass
class Stall:
    """Watch over a wait of this rank that may never end: publishes where it waits, and looks for reasons.

    Attributes:
        mine: whereabouts to publish.
        timeout: seconds until the call fails.
        fail_late: called with ``mine.base`` after the timeout; fails the call. None for a wait that fails nothing.
        verdict: key that ends the wait once it is set; empty where the wait is for that key.
        in_helper: whether the calling thread makes no calls of its own.
        world: number of ranks that may look at the same time; above 1,024 all of them wait longer before they do.
        has_looked: whether it has looked for a reason.
    """

    store: JobStore
    mine: Blocked
    timeout: float = math.inf
    fail_late: Callable[[str], None] | None = None
    verdict: str = ""
    in_helper: bool = False
    world: int = 1
    has_looked: bool = field(default=False, init=False)
    _is_published: bool = field(default=False, init=False)
    _look_at: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        """Note that this thread makes calls, and set the time of the first look."""
        # In seconds since the wait began.
        self._look_at = PATIENCE * max(1.0, self.world / 1024)
        if not self.in_helper:
            self.store.callers.add(threading.get_ident())

    def end(self) -> None:
        """Withdraw the whereabouts that this stall has published."""
        if self._is_published:
            self.store.withdraw()

    def pause(self, waited: float) -> float | None:
        """Look for reasons if it is time to; return the seconds until the next call, or None to end the wait.

        ``waited`` are the seconds since the wait began; the first call, with 0, looks for nothing.
        """
        if not waited:
            return min(_FIRST_PAUSE, PATIENCE, self.timeout)
        if self.verdict and self.store.has(self.verdict):
            return None
        is_late = waited >= self.timeout
        # A late call fails only after a look for a circle: ranks of one that went on without it would block in their
        # collectives, where nobody looks any more.
        if is_late and self.has_looked:
            self._claim(waited)
        else:
            self.look_if_due(waited, is_late)
        if self.verdict and self.store.has(self.verdict):
            return None
        if is_late:
            return _LATE_PAUSE
        longest = _LONGEST_PAUSE if self.verdict else self.timeout  # whoever waits for its verdict sees it at once
        return max(0.001, min(longest, self._look_at - waited, self.timeout - waited))

    def look_if_due(self, waited: float, is_late: bool) -> None:
        """Publish where this rank waits, and look for a reason why its wait cannot end, if due or ``is_late``."""
        if waited >= self._look_at or is_late:
            # Looks become rarer: each after half of the time waited so far, at most 5 s.
            self._look_at = waited + min(_LONGEST_LOOK, waited / 2)
            self.has_looked = True
            self._look()

    def _look(self) -> None:
        """Publish the whereabouts of this rank; fail its call if a rank that it waits for has ended or waits for it."""
        # No circle with a rank of which another thread may make the missing call.
        may_call = others_may_call(self.store.callers, self.in_helper)
        if not self._is_published:
            self.store.publish(self.mine._replace(awaited=[]) if may_call else self.mine)
            self._is_published = True
        # A key stands for a digest that this rank awaits; it is empty where the rank awaits a verdict.
        searches = not may_call and any(key or self._is_elsewhere(rank) for key, rank in self.mine.awaited)
        if not (searches and fail_circle(self.store, self.mine)) and self.fail_late is not None:
            _fail_ended(self.store, self.mine)

    def _is_elsewhere(self, rank: int) -> bool:
        """Whether a rank is blocked in another call than this one."""
        # Most ranks of a large group wait for a verdict only. A parent in the same call searches for circles itself; a
        # search by each of its children would be most of the load of the store.
        each = self.store.blocked(rank)
        return each is not None and each.base != self.mine.base

    def _claim(self, waited: float) -> None:
        """Fail the call because of its timeout, unless another rank has begun to, which has 10 s for it."""
        base, mine = self.mine.base, str(self.store.rank)
        assert self.fail_late is not None, "a wait with a timeout can fail"
        if self.store.set_once(f"{base}/late", mine).decode() == mine or waited > self.timeout + _CLAIMED:
            if not self.store.has(f"{base}/verdict"):  # set by a rank that has deleted its claim again
                self.fail_late(base)
            self.store.delete(f"{base}/late")


def _fail_ended(store: JobStore, mine: Blocked) -> None:
    """Fail the call in which this rank waits if the process of a rank that it waits for has ended."""
    ended = store.ended([rank for rank in _missing(store, mine) if rank != store.rank])
    if ended:
        table = table_of({store.rank: mine.words} | ended)
        fail(store, mine.base, f"{named_ranks(sorted(ended))} will not come to this call:\n{table}")


def _missing(store: JobStore, each: Blocked) -> list[int]:
    """Return the global ranks that a blocked rank still waits for: those whose key is not set."""
    return [rank for key, rank in each.awaited if not key or not store.has(key)]


def fail_circle(store: JobStore, mine: Blocked) -> bool:
    """Search for a circle of ranks that wait for each other, and fail its calls and this rank's; False without one."""
    circle = _circle(store, mine)
    if circle is None:
        return False
    # A blocked rank makes no other call, so a circle stays one. But ranks were read one after the other, and a rank may
    # have gone on meanwhile, which sets and deletes keys of its call. So three things have to hold, in this order.
    # 1. Every rank of the circle still misses a key of the next one.
    ranks = list(circle)
    following = zip(circle.values(), [*ranks[1:], ranks[0]], strict=True)
    if any(awaited not in _missing(store, each) for each, awaited in following):
        return False
    others = {rank: each for rank, each in circle.items() if rank != store.rank}
    # 2. None of their calls has a verdict; this rank's own may have one, which the thread that reads it has not seen.
    if any(store.has(f"{each.base}/verdict") for each in (mine, *others.values())):
        return False
    # 3. All are where they were found. Last, as a verdict is deleted only after its ranks have come to a later call:
    # one that was deleted before the second check shows here.
    if any(store.blocked(rank) != each for rank, each in others.items()):
        return False
    table = table_of({rank: each.words for rank, each in circle.items()})
    text = f"ranks {sorted(circle)} wait for each other in different calls:\n{table}"
    for each in circle.values():
        fail(store, each.base, text)
    fail(store, mine.base, text)
    return True


def _circle(store: JobStore, mine: Blocked) -> dict[int, Blocked] | None:
    """Search, depth first from this rank, for ranks that wait for each other in a circle, with this rank or without.

    Returns the whereabouts of the circle's ranks, in the order in which each waits for the next; None without a circle.
    """
    # ``path`` holds the ranks from this one to the present one, and ``left`` their ranks to try. Calls with a verdict
    # end anyway and are passed by.
    path, left, seen = {store.rank: mine}, [(store.rank, iter(_missing(store, mine)))], {store.rank}
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
            each = store.blocked(other)
            if each is not None and not store.has(f"{each.base}/verdict"):
                path[other] = each
                left.append((other, iter(_missing(store, each))))
    return None
