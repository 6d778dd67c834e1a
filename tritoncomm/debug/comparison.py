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
from collections.abc import Callable, Sequence
from typing import Any

from tritoncomm.debug.store import Blocked, JobStore
from tritoncomm.debug.texts import named_ranks, table_of

__all__ = ["FANOUT", "Comparison", "Stall", "combine", "fail"]

FANOUT = 16
PATIENCE = 0.4  # seconds until a rank that waits publishes its whereabouts
_FIRST_PAUSE = 0.05  # seconds; a rank that comes to a call that has failed reads the verdict after this time
_LONGEST_PAUSE, _LATE_PAUSE = 1.0, 0.1  # seconds between two looks for a verdict
_LONGEST_LOOK = 5.0  # seconds between two looks for a reason
_CLAIMED = 10.0  # seconds that a rank waits for the table of a timeout that another rank makes
_AGREED, _DIFFERENT = b"+", b"?"
_UNEQUAL = b"\xff" * 8


def combine(digests: Sequence[bytes]) -> bytes:
    """Combine digests: their first 8 bytes if they are equal, else a mark; and the sum of their last 8 bytes."""
    firsts = {each[:8] for each in digests}
    total = sum(int.from_bytes(each[8:], "little") for each in digests) % 2**64
    return (firsts.pop() if len(firsts) == 1 else _UNEQUAL) + total.to_bytes(8, "little")


class Comparison:
    """One call of a group, compared between its ranks.

    Args:
        store: client of this rank.
        base: prefix of the call's keys, equal on all ranks of the group and of no other call.
        ranks: global ranks in group order.
        place: rank in the group.
        timeout: seconds until the group's own collectives give up.
        words: the call and its source line.
        which: number of the call, and its group.
        stale: keys that the first rank deletes once all ranks have come; it adds those of this call.
    """

    def __init__(
        self,
        store: JobStore,
        base: str,
        ranks: Sequence[int],
        place: int,
        timeout: float,
        words: str,
        which: str,
        stale: list[str],
    ) -> None:
        self._store, self._base, self._ranks, self._place = store, base, ranks, place
        self._limit, self._words, self._which, self._stale = timeout, words, which, stale
        self._left = f"rank {store.rank} has left this call"

    def compare(self, digest: bytes, content: Callable[[], Any], judge: Callable[[list[Any]], str]) -> str:
        """Compare this call between the ranks; return the difference, the same text on all ranks, or nothing.

        Args:
            digest: of this rank, 16 bytes.
            content: called if the digests do not fit together; returns the call of this rank as JSON can hold it.
            judge: called on the first rank with the contents of all ranks; returns the difference between them. Nothing
                if they fit together after all.
        """
        verdict = self._verdict(digest)
        if verdict == _DIFFERENT:
            verdict = self._report(json.dumps(content()), judge)
        return "" if verdict == _AGREED else verdict.decode()

    def _verdict(self, digest: bytes) -> bytes:
        """Pass the digests of this rank and its children to the parent, and return the verdict on the call."""
        store, base = self._store, self._base
        first = FANOUT * self._place + 1
        children = range(first, min(first + FANOUT, len(self._ranks)))
        if children:
            if store.has(f"{base}/verdict"):  # of a call that failed before this rank came
                return self._ends(base)
            digests = self._read(base, [f"{base}/{child}" for child in children], children)
            if digests is None:
                return self._ends(base)
            digest = combine([digest, *digests])
        if self._place:
            store.set(f"{base}/{self._place}", digest)
            return self._ends(base, f"{base}/{self._place}")
        while self._stale:  # all ranks have come, so all have read the verdicts of earlier calls
            store.delete(self._stale.pop())
        fits = digest[:8] != _UNEQUAL and not any(digest[8:])
        return self._decide(base, _AGREED if fits else _DIFFERENT)

    def _report(self, content: str, judge: Callable[[list[Any]], str]) -> bytes:
        """Send this rank's content to the first rank, and return the verdict that it makes of all contents."""
        store, base = self._store, f"{self._base}/report"
        store.set(f"{base}/{self._place}", content)
        if self._place:
            return self._ends(base, f"{base}/{self._place}")
        others = range(1, len(self._ranks))
        contents = self._read(base, [f"{base}/{other}" for other in others], others)
        if contents is None:
            return self._ends(base, f"{base}/0")
        text = judge([json.loads(each) for each in [content, *contents]])
        store.delete(f"{base}/0")
        return self._decide(base, text.encode() or _AGREED)

    def _decide(self, base: str, verdict: bytes) -> bytes:
        """Set the verdict as the first rank, unless the call has failed before; return the one that holds."""
        self._stale.append(f"{base}/verdict")
        return self._store.set_once(f"{base}/verdict", verdict)

    def _ends(self, base: str, own: str = "") -> bytes:
        """Wait for the verdict, and return it; then delete ``own``, the key that this rank has set."""
        key, parent = f"{base}/verdict", (self._place - 1) // FANOUT if base == self._base else 0
        mine = Blocked(base, f"{self._words}{self._which}", [["", self._ranks[parent]]] if self._place else [])
        stall = Stall(self._store, mine, self._limit, self._fail_late)
        try:
            values = self._store.read([key], stall.pause, self._left)
        finally:
            stall.end()
            if own:
                self._store.delete(own)
            if not self._place:
                self._stale.append(key)
        assert values is not None, "a stall ends the wait for a verdict by setting it"
        return values[0]

    def _read(self, base: str, keys: list[str], places: Sequence[int]) -> list[bytes] | None:
        """Wait for keys that other ranks of the group set, and return their values; None once the call has failed."""
        awaited = [[key, self._ranks[place]] for key, place in zip(keys, places, strict=True)]
        mine = Blocked(base, f"{self._words}{self._which}", awaited)
        stall = Stall(self._store, mine, self._limit, self._fail_late, f"{base}/verdict")
        try:
            return self._store.read(keys, stall.pause)
        except KeyboardInterrupt:
            fail(self._store, base, self._left)
            raise
        finally:
            stall.end()

    def _fail_late(self, base: str) -> None:
        """Fail the call with a table of ranks that came and of ranks that did not, and the whereabouts of these."""
        texts: dict[int, str] = {}
        absent = []
        for place, rank in enumerate(self._ranks):
            each = self._store.blocked(rank)
            if place == self._place:
                texts[rank] = self._words
            elif each is not None and each.base == base:
                texts[rank] = each.words.removesuffix(self._which)
            elif self._store.has(f"{base}/{place}"):
                texts[rank] = "in this call"
            else:
                absent.append(rank)
                texts[rank] = "no call" if each is None else f"no call; blocked in {each.words}"
        came = f"{named_ranks(absent)} did not come" if absent else "the ranks came too late"
        fail(self._store, base, f"{came} to{self._which.lstrip(',')} within {self._limit:g} s:\n{table_of(texts)}")


def fail(store: JobStore, base: str, text: str) -> None:
    """Set the verdict of a call that cannot end, unless it has one.

    The incarnation of its group (see ``check``) is closed before, if it is still open: a rank that comes after the
    verdict opens the next one, whether or not the ranks of this call have left it by then.
    """
    name, at, incarnation = base.removesuffix("/report").rpartition("/")[0].rpartition("@")
    if at:
        store.replace(f"{name}/open", incarnation, "")
    store.set_once(f"{base}/verdict", text)


class Stall:
    """Wait of a rank that may never end: publishes where it is, and looks for reasons.

    Args:
        store: client of this rank.
        mine: the whereabouts to publish.
        timeout: seconds until the call fails.
        fail_late: called with ``mine.base`` after the timeout; fails the call.
        verdict: key whose value ends the wait; empty where the wait is for that key.
        in_helper: whether the calling thread makes no calls of its own.

    Attributes:
        has_looked: whether it has looked for a reason.
    """

    def __init__(
        self,
        store: JobStore,
        mine: Blocked,
        timeout: float = math.inf,
        fail_late: Callable[[str], None] | None = None,
        verdict: str = "",
        in_helper: bool = False,
    ) -> None:
        self._store, self._mine, self._limit, self._fail_late = store, mine, timeout, fail_late
        self._verdict, self._in_helper = verdict, in_helper
        self._is_published = self.has_looked = False
        self._look_at = PATIENCE
        if not in_helper:
            store.enter_wait()

    def end(self) -> None:
        """Take back what this stall has published."""
        if not self._in_helper:
            self._store.leave_wait()
        if self._is_published:
            self._store.withdraw()

    def pause(self, waited: float) -> float | None:
        """Return the seconds until the next call of this method; None once the verdict that ends the wait is set.

        After the timeout it fails the call, but not before it has looked once: two ranks of a circle that go on without
        a look would block in their calls.

        Args:
            waited: seconds since the wait began; 0 in the first call.
        """
        if not waited:
            return min(_FIRST_PAUSE, PATIENCE, self._limit)
        if self._verdict and self._store.has(self._verdict):
            return None
        is_late = waited >= self._limit
        if is_late and self.has_looked:
            self._claim(waited)
        else:
            self.look_if_due(waited, is_late)
        if self._verdict and self._store.has(self._verdict):
            return None
        if is_late:
            return _LATE_PAUSE
        longest = _LONGEST_PAUSE if self._verdict else self._limit  # whoever waits for its verdict sees it at once
        return max(0.001, min(longest, self._look_at - waited, self._limit - waited))

    def look_if_due(self, waited: float, is_late: bool) -> None:
        """Publish where this rank is, and look for a reason: after ``PATIENCE``, then ever more rarely, or if late."""
        if waited >= self._look_at or is_late:
            self._look_at = waited + min(_LONGEST_LOOK, waited / 2)
            self.has_looked = True
            self._look()

    def _look(self) -> None:
        """Publish where this rank is; fail the call if a rank that it waits for has ended, or if there is a circle."""
        # A rank with several threads is in no circle: another thread may make the missing call.
        has_threads = self._store.has_threads
        if not self._is_published:
            self._store.publish(self._mine._replace(awaited=[]) if has_threads else self._mine)
            self._is_published = True
        if (has_threads or not fail_circle(self._store, self._mine)) and self._fail_late is not None:
            _fail_ended(self._store, self._mine)

    def _claim(self, waited: float) -> None:
        """Fail the call because of its timeout, unless another rank is about to do so."""
        base, mine = self._mine.base, str(self._store.rank)
        assert self._fail_late is not None, "a wait with a timeout can fail"
        if self._store.set_once(f"{base}/late", mine).decode() == mine or waited > self._limit + _CLAIMED:
            if not self._store.has(f"{base}/verdict"):  # set by a rank that has deleted its claim again
                self._fail_late(base)
            self._store.delete(f"{base}/late")


def _fail_ended(store: JobStore, mine: Blocked) -> None:
    """Fail the call in which this rank waits if a rank that it waits for has ended."""
    ended = store.ended([rank for rank in _missing(store, mine) if rank != store.rank])
    if ended:
        table = table_of({store.rank: mine.words} | ended)
        fail(store, mine.base, f"{named_ranks(sorted(ended))} will not come to this call:\n{table}")


def _missing(store: JobStore, each: Blocked) -> list[int]:
    """Return the ranks that a blocked rank still waits for."""
    return [rank for key, rank in each.awaited if not key or not store.has(key)]


def fail_circle(store: JobStore, mine: Blocked) -> bool:
    """Fail all calls of a circle of waiting ranks that this rank waits for; return whether there is one.

    A blocked rank makes no other call, so a circle stays one. But ranks are read one after the other, and a rank may go
    on meanwhile, which sets and deletes keys of its call. So every rank of the circle still has to miss the next one,
    and then all of them have to be where they were found.
    """
    circle = _circle(store, mine)
    if circle is None:
        return False
    ranks = list(circle)
    following = zip(circle.values(), [*ranks[1:], ranks[0]], strict=True)
    if any(awaited not in _missing(store, each) for each, awaited in following):
        return False
    others = {rank: each for rank, each in circle.items() if rank != store.rank}
    # In this order: a verdict is deleted only after its ranks have come to a later call. This rank's own verdict may be
    # set as well, while the thread that reads it has not run yet.
    if any(store.has(f"{each.base}/verdict") for each in (mine, *others.values())):
        return False
    if any(store.blocked(rank) != each for rank, each in others.items()):
        return False
    table = table_of({rank: each.words for rank, each in circle.items()})
    text = f"ranks {sorted(circle)} wait for each other in different calls:\n{table}"
    for each in circle.values():
        fail(store, each.base, text)
    fail(store, mine.base, text)
    return True


def _circle(store: JobStore, mine: Blocked) -> dict[int, Blocked] | None:
    """Search, depth first, for ranks that wait for each other in a circle; return where each of them waits.

    The search begins at this rank, which need not be part of the circle. It follows from every rank the ranks that its
    call still waits for, and leaves out calls that have a verdict.
    """
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
