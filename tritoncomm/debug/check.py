"""Check mode: before a call its ranks compare what they are about to do, and all raise where they differ.

Descriptors go through the default store, not through a process group: a store has timeouts that leave it usable, it
works where ranks call on different groups, and no group has to be made by ranks of which one may be elsewhere. Per
call every member of the group sets one key, the first of them compares and sets the verdict, which is set once and
which everyone reads; keys are deleted when they were read, so the store does not grow.

A rank that waits longer than ``_PATIENCE`` publishes what it is blocked in. If ranks wait for each other in a circle,
as where two of them call on different groups, whoever sees it first fails all calls of the circle.
"""

import json
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout

from tritoncomm import record, variables
from tritoncomm.debug.agreement import named_ranks
from tritoncomm.debug.descriptor import Descriptor, describe, difference
from tritoncomm.debug.flight import Call, located
from tritoncomm.errors import MismatchError, PeerError, UnsupportedError

__all__ = ["Blocked", "Exchange", "blocked_table", "check_call", "circle_of", "compare", "exchange", "timeout_of"]

_ROOT = "tritoncomm/check"
_AGREED = b"agreed"
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
    """

    def __init__(self, store: Any, rank: int) -> None:
        self.store, self.rank = store.clone(), rank
        # Ranks that destroy and make their default group again over the same store do not read the keys of before.
        self.prefix = f"{_ROOT}/{self.store.add(f'{_ROOT}/rounds/{rank}', 1)}"
        self.counts: dict[str, int] = {}
        self._inside: set[int] = set()  # threads
        self._has_threads = False

    def blocked(self, rank: int) -> Blocked | None:
        """What another rank is blocked in, as far as it has published that."""
        key = f"{self.prefix}/blocked/{rank}"
        if not self.store.check([key]):
            return None
        text = self._get(key)
        return None if text is None else Blocked(*json.loads(text))

    def get(self, key: str) -> bytes | None:
        """A value; None where there is none."""
        return self._get(key) if self.store.check([key]) else None

    def _get(self, key: str) -> bytes | None:
        """A value that is there, unless its owner deletes it in between."""
        self.store.set_timeout(timedelta(seconds=1))
        try:
            return self.store.get(key)
        except dist.DistStoreError:
            return None

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
        if not in_helper:
            self._inside.add(thread)
            self._has_threads = self._has_threads or len(self._inside) > 1
        key = f"{self.prefix}/blocked/{self.rank}"
        try:
            while (value := ready()) is None:
                now = time.monotonic()
                if now - begun > timeout:
                    return late()
                if now > look and not self._has_threads:  # another thread of this rank may make the missing call
                    if not published:
                        self.store.set(key, json.dumps(mine))
                        published = True
                    elif (value := stuck()) is not None:
                        return value
                    look = now + min(5.0, 0.5 * (now - begun))
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE)
            return value
        finally:
            self._inside.discard(thread)
            if published:
                self.store.delete_key(key)


class _Member:
    """One group as this rank checks it.

    Attributes:
        name: of the group.
        ranks: global ranks, in group order.
        rank: in the group.
        timeout: seconds until the group's own collectives give up.
        sends: whether its backend sends anything; torch's fake process group does not.
        count: checked calls so far.
        verdicts: keys that are deleted once all ranks have come to a later call.
        digest: in hash mode, of all calls so far.
        window: in hash mode, the calls since the last comparison.
    """

    __slots__ = ("count", "digest", "name", "rank", "ranks", "sends", "timeout", "verdicts", "window")

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name, self.ranks, self.rank = name, dist.get_process_group_ranks(group), group.rank()
        self.sends, self.timeout = _backend_of(group).name().lower() != "fake", timeout_of(group)
        self.count, self.digest = 0, 0
        self.verdicts: list[str] = []
        self.window: list[tuple[Descriptor, Any]] = []


def _backend_of(group: ProcessGroup) -> Any:
    return group._get_backend(next(iter(group._device_types), torch.device("cpu")))


def timeout_of(group: ProcessGroup) -> float:
    """Seconds until the group's own transfers give up."""
    limit = getattr(getattr(_backend_of(group), "options", None), "_timeout", None) or default_pg_timeout
    return limit.total_seconds()


_members: "weakref.WeakKeyDictionary[ProcessGroup, _Member]" = weakref.WeakKeyDictionary()
_exchanges: "list[tuple[Any, Exchange]]" = []  # over the default store of now


def exchange() -> Exchange:
    """The comparisons over the default store of now."""
    store = distributed_c10d._get_default_store()
    if not _exchanges or _exchanges[0][0] is not store:
        _exchanges[:] = [(store, Exchange(store, dist.get_rank()))]
        _members.clear()
    return _exchanges[0][1]


def _member_of(group: Any, call: Call) -> _Member:
    """This rank's state of a group, made at its first checked call."""
    member = _members.get(group)
    if member is None:
        if not dist.is_initialized() or group not in getattr(distributed_c10d, "_pg_group_ranks", (group,)):
            raise UnsupportedError(
                f"{call.name}: check mode compares over the store of torch's default process group; the group "
                f"{call.group!r} was made without it"
            )
        member = _members[group] = _Member(group, call.group)
    return member


def check_call(call: Call, group: Any, x: Any) -> None:
    """Compare a call with those of the other ranks of its group before it starts.

    Raises:
        MismatchError: on every rank that the difference concerns, with a table of who called what.
        PeerError: the process that holds the job's store is gone.
        UnsupportedError: the call is captured in a CUDA graph, whose replays could not be compared, or torch does not
            know the group.
    """
    if call.kind == "hop":
        return
    first = x[0] if isinstance(x, list | tuple) else x
    if first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{call.name}: check mode cannot compare calls that a CUDA graph replays; turn it off")
    over = exchange()
    member = _member_of(group, call)
    if not member.sends:
        return
    mine = describe(
        call.name, call.kind, call.shape, call.dtype, call.arguments, len(member.ranks), member.rank, first.device.type
    )
    try:
        problem = compare(over, member, mine, call) if variables.CHECK.value else _fold(over, member, mine, call)
    except dist.DistNetworkError as error:
        raise PeerError(f"{call.name}: the store of the job is gone, and with it its first process: {error}") from error
    if problem:
        failure = MismatchError(f"{call.name}: {problem}")
        record.failed(call.name, failure)
        raise failure


def _where(site: Any) -> str:
    file, line = located(site)
    return f"{file}:{line}" if file else "an unknown line"


def compare(over: Exchange, member: _Member, mine: Descriptor, call: Call) -> str:
    """Compare ``mine`` with the descriptors of the group's other ranks; what differs, the same text on all of them."""
    member.count += 1
    words = f"{mine.text} at {_where(call.site)}"
    content = json.dumps([mine.fields, words, mine.sends, mine.receives])
    return _agree(over, member, "", content, words, lambda rows: _judge(rows, member))


def _agree(
    over: Exchange, member: _Member, suffix: str, content: str, words: str, judge: Callable[[list[Any]], str]
) -> str:
    """Publish ``content``; the first rank judges what all ranks have published, and every rank returns its verdict."""
    store, base = over.store, f"{over.prefix}/{member.name}/{member.count}{suffix}"
    verdict, own, mine = f"{base}/verdict", f"{base}/{member.rank}", Blocked(base, member.ranks, words)
    keys = [f"{base}/{place}" for place in range(len(member.ranks))]
    store.set(own, content)

    def decide(text: str) -> bytes:
        """Set the verdict, unless another rank was faster; the one that holds."""
        return store.compare_set(verdict, "", text or _AGREED.decode())

    def ready() -> bytes | None:
        if member.rank or not store.check(keys):
            return over.get(verdict)
        made = decide(judge([json.loads(each) for each in store.multi_get(keys)]))
        while member.verdicts:  # all ranks are here, so all have read those of before
            store.delete_key(member.verdicts.pop())
        return made

    def stuck() -> bytes | None:
        circle = circle_of(over, mine)
        if circle is None:
            return None
        text = blocked_table(circle)
        for each in circle.values():
            store.compare_set(f"{each.base}/verdict", "", text)
        return decide(text)

    def late() -> bytes:
        return decide(_late_table(over, base, member))

    try:
        made = over.wait(ready, member.timeout, mine, stuck, late)
    finally:
        store.delete_key(own)
        if not member.rank:
            member.verdicts.append(verdict)
    return "" if made == _AGREED else made.decode()


def _judge(rows: Sequence[Any], member: _Member) -> str:
    """What differs between the descriptors of all ranks of the group; nothing if they fit together."""
    descriptors = [Descriptor(fields, words, 0, tuple(sends), tuple(got)) for fields, words, sends, got in rows]
    differ = difference(descriptors)
    if not differ:
        return ""
    table = _table({rank: each.text for rank, each in zip(member.ranks, descriptors, strict=True)})
    return (
        f"ranks {member.ranks} differ in {', '.join(differ)} in call {member.count} of their group {member.name!r}:"
        f"\n{table}"
    )


def _table(words: dict[int, str]) -> str:
    """A line for every distinct text, with the ranks that have it."""
    by_text: dict[str, list[int]] = {}
    for rank in sorted(words):
        by_text.setdefault(words[rank], []).append(rank)
    lines = [f"  {named_ranks(ranks)}: {text}" for text, ranks in list(by_text.items())[:_MAX_SHOWN]]
    if len(by_text) > _MAX_SHOWN:
        lines.append(f"  and {len(by_text) - _MAX_SHOWN} more")
    return "\n".join(lines)


def _missing(over: Exchange, each: Blocked) -> list[int]:
    """Ranks of a call that have not come to it."""
    return [rank for place, rank in enumerate(each.ranks) if not over.store.check([f"{each.base}/{place}"])]


def circle_of(over: Exchange, mine: Blocked) -> dict[int, Blocked] | None:
    """The blocked calls of ranks that wait for each other in a circle that this rank waits for; None if there is none.

    A rank waits for another as long as its call has neither that rank's key nor a verdict. A blocked rank makes no
    other call, so a circle stays one.
    """
    path, left, seen = {over.rank: mine}, [(over.rank, iter(_missing(over, mine)))], {over.rank}
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
                left.append((other, iter(_missing(over, each))))
    return None


def blocked_table(circle: dict[int, Blocked]) -> str:
    """Who waits for whom, in words."""
    table = _table({rank: f"{each.words}{_with(each)}" for rank, each in circle.items()})
    return f"ranks {sorted(circle)} wait for each other in different calls:\n{table}"


def _with(each: Blocked) -> str:
    group, count = each.base.split("/")[-2:]
    return f", call {count} of group {group!r} of ranks {each.ranks}"


def _late_table(over: Exchange, base: str, member: _Member) -> str:
    """Who came, who did not, and what those do instead."""
    words: dict[int, str] = {}
    absent = []
    for place, rank in enumerate(member.ranks):
        content = over.get(f"{base}/{place}")
        if content is not None:
            words[rank] = json.loads(content)[1]
            continue
        absent.append(rank)
        each = over.blocked(rank)
        words[rank] = f"no call; blocked in {each.words}{_with(each)}" if each else "no call"
    which = f"call {member.count} of group {member.name!r} of ranks {member.ranks}"
    return f"{named_ranks(absent)} did not come to {which} within {member.timeout:g} s:\n{_table(words)}"


_MULTIPLIER, _MASK = 0x9E3779B97F4A7C15, (1 << 64) - 1


def _fold(over: Exchange, member: _Member, mine: Descriptor, call: Call) -> str:
    """Hash mode: fold the call into the group's digest, and compare that every N calls; the first difference."""
    member.count += 1
    member.digest = (member.digest * _MULTIPLIER + mine.digest) & _MASK
    member.window.append((mine, call.site))
    if len(member.window) < variables.HASH.value:
        return ""
    window, member.window = member.window, []
    words = f"{mine.text} at {_where(call.site)}"
    content = json.dumps([f"{member.digest:016x}", words])
    problem = _agree(over, member, "", content, words, lambda rows: "digest" * (len({row[0] for row in rows}) > 1))
    if problem != "digest":
        return problem
    lines = [[each.digest, f"{each.text} at {_where(site)}"] for each, site in window]
    first = member.count - len(window) + 1
    return _agree(
        over, member, "/window", json.dumps([lines, words]), words, lambda rows: _first_difference(rows, member, first)
    )


def _first_difference(rows: Sequence[Any], member: _Member, first: int) -> str:
    """The first call, of those since the last comparison, that is not the same on all ranks."""
    for place, calls in enumerate(zip(*(row[0] for row in rows), strict=True)):
        if len({digest for digest, _ in calls}) > 1:
            table = _table({rank: words for rank, (_, words) in zip(member.ranks, calls, strict=True)})
            return f"call {first + place} of group {member.name!r} is the first that differs between ranks:\n{table}"
    return f"the digests of group {member.name!r} differ, but those of its last {len(rows[0][0])} calls do not"
