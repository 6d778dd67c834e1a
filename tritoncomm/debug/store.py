"""Store of the job: the keys of check mode, and the whereabouts of blocked ranks.

A key-value store, and not a process group, carries the comparisons: its timeouts leave it usable, it works where ranks
call on different groups, and no group has to be made by ranks of which one may be elsewhere. All other modules reach
the store through this one.
"""

import atexit
import json
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import distributed_c10d

from tritoncomm import record
from tritoncomm.debug.texts import encodable, of_backward, one_line
from tritoncomm.errors import MismatchError, PeerError

__all__ = ["Blocked", "JobStore", "Reading", "job_store", "last_of", "raise_if"]

_ROOT = "tc"  # short: every request carries it
_PASSED_OVER, _MISSING = "-", "~"  # values that no key has otherwise
_TRIES = 50
_FOREVER = timedelta(days=30)  # a read that times out prints two lines of C++ warnings, so reads never do


class Blocked(NamedTuple):
    """Whereabouts of a blocked rank, as other ranks read them.

    Attributes:
        base: prefix of the keys of the call or transfer in which it waits.
        words: that call with its source line, its number and its group; or that transfer.
        awaited: ``[key, rank]`` of every rank that it waits for. A rank has come once its key is set; an empty key is
            never set.
    """

    base: str
    words: str
    awaited: list[list[Any]]


class Reading:
    """Blocking read of several keys in a thread of its own; the calling thread may end its wait for another reason.

    Attributes:
        has_failed: whether a read ended with an error of the store, which closes the connection.
    """

    def __init__(self, store: Any) -> None:
        # A connection serves one request at a time, so each thread has its own. The calling thread stays open to
        # signals.
        self._store = store.clone()
        self._store.set_timeout(_FOREVER)
        self._requests: SimpleQueue[list[str]] = SimpleQueue()
        self._results: SimpleQueue[list[bytes] | RuntimeError] = SimpleQueue()
        self.has_failed = False
        threading.Thread(target=self._serve, name="tritoncomm-store", daemon=True).start()

    def _serve(self) -> None:
        """Read the requested keys for ever, one request after the other, and pass on their values or the error."""
        while True:
            keys = self._requests.get()
            try:
                self._results.put([self._store.get(keys[0])] if len(keys) == 1 else self._store.multi_get(keys))
            except RuntimeError as error:
                self._results.put(error)

    def start(self, keys: list[str]) -> None:
        """Ask the thread to read ``keys``, and return at once; ``wait`` returns their values."""
        self._requests.put(keys)

    def wait(self, seconds: float) -> list[bytes] | None:
        """Return the values of the requested keys once all are set; None after ``seconds``, and the read goes on."""
        try:
            result = self._results.get(timeout=seconds)
        except Empty:
            return None
        if isinstance(result, RuntimeError):
            self.has_failed = True
            raise result
        return result


class JobStore:
    """This rank's client of the job's default store. Keys in arguments lack its prefix.

    Attributes:
        counts: number of transfers so far by channel, for check mode of p2p steps.
        unmet: transfers by channel that this rank has sent before their receivers came.
        callers: identifiers of the threads of this rank that have waited in a call.
    """

    def __init__(self, store: Any, rank: int) -> None:
        self._store, self.rank = store.clone(), rank
        # Ranks that destroy and make their default group again over the same store do not read the keys of before.
        self._prefix = f"{_ROOT}{self._store.add(f'{_ROOT}/rounds/{rank}', 1)}/"
        self.counts: dict[str, int] = {}
        self.unmet: dict[str, Any] = {}
        self.callers: set[int] = set()
        self._stale: dict[str, list[str]] = {}
        self._orphans: list[tuple[frozenset[int], list[str]]] = []
        self._seen: list[tuple[frozenset[int], list[str]]] = []
        self._channels: dict[str, tuple[weakref.ref[Any], int]] = {}
        self._tokens = 0
        self._is_published = False
        self._idle: list[Reading] = []

    def set(self, key: str, value: str | bytes) -> None:
        """Set ``key`` to a value, whether or not it has one."""
        self._store.set(self._prefix + key, _encoded(value))

    def set_once(self, key: str, value: str | bytes) -> bytes:
        """Set ``key`` if it has no value, and return the value that it then has: this one, or the earlier one."""
        # torch sets the key if it is missing or has the expected value, which is empty here.
        return self._store.compare_set(self._prefix + key, "", _encoded(value))

    def replace(self, key: str, old: str, new: str) -> None:
        """Set ``key`` to ``new`` if its value is ``old``; else do nothing."""
        self._store.compare_set(self._prefix + key, old, new)

    def delete(self, key: str) -> None:
        """Delete a key, if it is set."""
        self._store.delete_key(self._prefix + key)

    def has(self, key: str) -> bool:
        """Whether a key is set."""
        return self._store.check([self._prefix + key])

    def get(self, key: str) -> bytes | None:
        """Return a key's value without waiting; None if it is not set."""
        # ``get`` would block where the owner has deleted its key since a ``check``. A comparison with a text that no
        # key has changes nothing, and returns that text for a missing key.
        value = self._store.compare_set(self._prefix + key, _MISSING, _MISSING)
        return None if value == _MISSING.encode() else value

    def read(
        self, keys: Sequence[str], until: Callable[[float], float | None], abandoned: str = ""
    ) -> list[bytes] | None:
        """Block until all keys are set, and return their values in the same order; None if ``until`` ends the read.

        Args:
            until: called with the seconds since the read began, first with 0. It returns the seconds until its next
                call, or None to end the read.
            abandoned: value that missing keys get if the read ends early, also by an exception; other ranks read it.
        """
        names = [self._prefix + key for key in keys]
        try:
            reading = self._idle.pop()
        except IndexError:
            reading = Reading(self._store)
        reading.start(names)
        values, begun = None, time.monotonic()
        try:
            pause = until(0.0)
            while pause is not None and (values := reading.wait(pause)) is None:
                pause = until(time.monotonic() - begun)
        finally:
            if values is None:
                self._end(reading, names, abandoned)
            else:
                self._idle.append(reading)
        return values

    def _end(self, reading: Reading, names: list[str], abandoned: str) -> None:
        """End the read of a thread that still waits for ``names``, by setting the missing keys."""
        if reading.has_failed:  # the store is gone, or does not answer
            return
        for _ in range(_TRIES):  # several tries, as other ranks may delete keys while this one sets them
            for name in names:
                self._store.compare_set(name, "", abandoned or _PASSED_OVER)
            if reading.wait(0.1) is not None:
                self._idle.append(reading)
                break
        if abandoned:  # a value for other ranks, which stays
            return
        # The fillers were for this thread alone, so they are deleted again. The owner of a key may have set it
        # meanwhile, and its value has to stay. The store has no delete that compares. So a filler is first replaced by
        # ``_MISSING``, which leaves other values alone, and only keys that then have this value are deleted.
        for name in names:
            self._store.compare_set(name, _PASSED_OVER, _MISSING)
            value = self._store.compare_set(name, _MISSING, _MISSING)  # changes nothing, and returns the value
            if value == _MISSING.encode():
                self._store.delete_key(name)

    def token(self) -> str:
        """Return a text that is unique among all calls of this method on all ranks: ``RANK.NUMBER``."""
        self._tokens += 1
        return f"{self.rank}.{self._tokens}"

    def stale_of(self, group: str) -> list[str]:
        """Return the list of keys that a later call over any group of this name deletes; the callers append to it."""
        return self._stale.setdefault(group, [])

    def orphan(self, ranks: Sequence[int], keys: list[str]) -> None:
        """Take over the stale keys of a group that is gone, over these ranks; ``delete_orphans`` deletes them."""
        if keys:
            self._orphans.append((frozenset(ranks), keys.copy()))
            keys.clear()

    def delete_orphans(self, ranks: Sequence[int]) -> None:
        """Delete keys of groups whose ranks have all come to a call over ``ranks``, and to one more before it."""
        if not self._orphans and not self._seen:
            return
        present = frozenset(ranks)
        for orphan in [each for each in self._seen if each[0] <= present]:
            self._seen.remove(orphan)
            for key in orphan[1]:
                if not (key.endswith("/open") and self.get(key)):  # a group of the same name has opened it again
                    self.delete(key)
        # A thread of another rank may still be about to read a verdict while a second thread makes the first such call.
        for orphan in [each for each in self._orphans if each[0] <= present]:
            self._orphans.remove(orphan)
            self._seen.append(orphan)

    def channel(self, name: str, ends: Sequence[int], group: Any) -> str:
        """Return the prefix of the keys of a channel, for transfers from global rank ``ends[0]`` to ``ends[1]``."""
        base = f"{name}/{ends[0]}-{ends[1]}"
        reference, number = self._channels.get(base, (None, 0))
        if reference is None or reference() is not group:
            # A rank that has not used the channel cannot tell whether it was closed for this group or for one before:
            # it takes number 0, and the verdict of an earlier group refuses its first transfer too. Without a verdict
            # the number stays, and the counts of its transfers go on.
            while reference is not None and self.has(f"{base}@{number}/verdict"):
                number += 1
            # A group of the same name that is made afterwards has a new channel, with the next number.
            self._channels[base] = (weakref.ref(group), number)
        return f"{base}@{number}"

    def publish(self, mine: Blocked) -> None:
        """Set the key from which other ranks read the whereabouts of this rank, in place of earlier ones."""
        self.set(f"blocked/{self.rank}", json.dumps(mine))
        self._is_published = True

    def withdraw(self) -> None:
        """Delete the whereabouts of this rank, if they are published."""
        if self._is_published:
            self._is_published = False
            self.delete(f"blocked/{self.rank}")

    def blocked(self, rank: int) -> Blocked | None:
        """Return the whereabouts of a rank; None if it has not published them."""
        text = self.get(f"blocked/{rank}")
        return None if text is None else Blocked(*json.loads(text))

    def ended(self, ranks: Sequence[int]) -> dict[int, str]:
        """Return the reasons of the ranks that have announced their end, by rank; ask without waiting."""
        reasons = {rank: self.get(f"ended/{rank}") for rank in ranks}
        return {rank: reason.decode() for rank, reason in reasons.items() if reason is not None}

    def leave(self, reason: str) -> None:
        """Announce to other ranks that this process ends, and why; ``ended`` reads it."""
        self.set(f"ended/{self.rank}", reason)


def _encoded(value: str | bytes) -> str | bytes:
    """Return a value that the store takes: texts of errors may have names that are not UTF-8."""
    return encodable(value) if isinstance(value, str) else value


_current: "list[tuple[Any, JobStore]]" = []  # at most one: the default store, and its client
_lock = threading.Lock()
_pid = os.getpid()


@atexit.register
def _announce_end() -> None:
    """Announce in the store, at the end of this process, that it ends, and the uncaught error if there is one."""
    # A backend sees a closed connection, the store does not. Killed and forked processes announce nothing; ranks wait
    # for killed ones until their timeout.
    if not _current or os.getpid() != _pid:
        return
    error = getattr(sys, "last_value", None)
    reason = "has ended" if error is None else f"has ended with {type(error).__name__}: {one_line(str(error))}"
    with suppress(RuntimeError):  # the store has ended before
        _current[0][1].leave(reason)


def job_store() -> JobStore:
    """Return this rank's client of torch's default store, one for all threads; make another one for another store."""
    store = distributed_c10d._get_default_store()
    with _lock:
        if not _current or _current[0][0] is not store:
            _current[:] = [(store, JobStore(store, dist.get_rank()))]
        return _current[0][1]


def last_of(store: Any, root: str, rank: int, world: int, text: str) -> list[bytes] | None:
    """Publish ``text``; return all texts, in rank order, on the rank that comes last, if they differ; else None."""
    # Nobody waits: each rank counts its own calls, and a rank that calls more often than others gets None. A rank whose
    # text equals that of the first to come publishes no text of its own.
    key = f"{root}/{store.add(f'{root}/rounds/{rank}', 1)}"
    first = store.compare_set(f"{key}/first", "", text)
    if first != text.encode():
        store.set(f"{key}/{rank}", text)
        store.add(f"{key}/others", 1)
    # Adding 0 reads the number of ranks whose text differs from the first one.
    if store.add(key, 1) != world or not store.add(f"{key}/others", 0):
        return None
    names = (f"{key}/{other}" for other in range(world))
    return [store.get(name) if store.check([name]) else first for name in names]


def raise_if(name: str, problem: Callable[[], str]) -> None:
    """Call ``problem``; unless its text is empty, report it to the flight record and raise ``MismatchError``."""
    try:
        text = problem()
    except dist.DistNetworkError as error:
        failure = PeerError(f"{name}: the store of the job is gone, and with it its first process: {error}")
        record.failed(name, failure)
        raise failure from error
    if text:
        advice = of_backward([line for line in text.splitlines() if line.startswith("  rank")])
        failure = MismatchError(f"{name}: {text}" + (f"\n{advice}" if advice else ""))
        record.failed(name, failure)
        raise failure
