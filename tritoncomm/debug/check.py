"""Check mode: before a call its ranks compare what they are about to do, and all raise where they differ.

Per call every member of the group sets one key in the job's store, the first of them compares and sets the verdict,
which is set once and which everyone reads. Keys are deleted when they were read, so the store does not grow.

torch numbers the groups that the whole job makes. A group that only its members make is named after its ranks, so one
that is destroyed and made again has the name of its predecessor, whose last verdict is still in the store. The members
of such a group agree on an incarnation: the first to compare opens one, the others join it. Whoever leaves its first
comparison closes it, or fails it because a member does not come. It is kept where that comparison agreed; after
another verdict the next call opens a new one, because members that did not come cannot know which calls they missed.
"""

import hashlib
import json
import threading
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout

from tritoncomm import variables
from tritoncomm.core.validation import ranks_of, state_of
from tritoncomm.debug.agreement import named_ranks
from tritoncomm.debug.descriptor import Descriptor, describe, difference
from tritoncomm.debug.exchange import (
    Blocked,
    Exchange,
    exchange,
    fail,
    fail_circle,
    fail_ended,
    in_words,
    raise_if,
    table_of,
)
from tritoncomm.debug.flight import Call, Entry
from tritoncomm.debug.sites import located
from tritoncomm.errors import UnsupportedError

__all__ = ["check_call", "compare", "fold_call"]

_AGREED = b"agreed"
_NAME, _KIND, _GROUP = map(Call._fields.index, ("name", "kind", "group"))


class _Member:
    """One group as this rank checks it.

    Attributes:
        over: what its keys are exchanged over; None where nothing is sent.
        name: of the group.
        ranks: global ranks, in group order.
        rank: in the group.
        timeout: seconds until the group's own collectives give up.
        sends: whether its backend sends anything; torch's fake process group does not.
        incarnation: token in its keys; empty for a numbered group, None until its members agree.
        count: checked calls so far, of this incarnation.
        verdicts: keys that are deleted once all ranks have come to a later call.
        window: in hash mode, the calls since the last comparison, and their devices.
        group: itself, referenced weakly.
        state: its size and this rank where they may change in place; another one makes a new member.
    """

    __slots__ = (
        "count", "group", "incarnation", "name", "over", "rank", "ranks", "sends", "state", "timeout", "verdicts",
        "window",
    )  # fmt: skip

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name, self.ranks, self.rank = name, ranks_of(group, "check mode"), group.rank()
        self.group = weakref.ref(group, self._forget)
        self.sends, self.timeout = _backend_of(group).name().lower() != "fake", timeout_of(group)
        self.over: Any = exchange() if self.sends else None
        self.count, self.state = 0, state_of(group)
        is_unique = name.isdecimal()  # a number is given once, and a group of another size is refused by `ranks_of`
        self.incarnation: str | None = "" if is_unique else None
        self.verdicts = self.over.verdicts_of(name) if self.sends and not is_unique else list[str]()
        self.window: list[tuple[Entry, Any]] = []

    @property
    def key(self) -> str:
        """Its name and its incarnation."""
        return f"{self.name}@{self.incarnation}" if self.incarnation else self.name

    def _forget(self, _: object) -> None:
        """The group is gone, and with it the calls that hash mode keeps of it."""
        if _by_name.get(self.name) is self:
            del _by_name[self.name]


def _backend_of(group: ProcessGroup) -> Any:
    return group._get_backend(next(iter(group._device_types), torch.device("cpu")))


def timeout_of(group: ProcessGroup) -> float:
    """Seconds until the group's own transfers give up."""
    limit = getattr(getattr(_backend_of(group), "options", None), "_timeout", None) or default_pg_timeout
    return limit.total_seconds()


_lock = threading.Lock()
_members: "weakref.WeakKeyDictionary[ProcessGroup, _Member]" = weakref.WeakKeyDictionary()
_by_name: dict[str, _Member] = {}  # in hash mode: a weak key takes as long as all else that it does for a call


def _member_of(group: Any, call: Call) -> _Member:
    """This rank's state of a group, made at its first checked call."""
    member = _members.get(group)
    if member is None or member.state != state_of(group):
        if not dist.is_initialized() or group not in getattr(distributed_c10d, "_pg_group_ranks", (group,)):
            raise UnsupportedError(
                f"{call.name}: check mode compares over the store of torch's default process group; the group "
                f"{call.group!r} was made without it"
            )
        with _lock:  # of several threads one makes it
            member = _members.get(group)
            if member is None or member.state != state_of(group):
                member = _members[group] = _Member(group, call.group)
    return member


def check_call(entry: Entry, group: Any, x: Any) -> None:
    """Compare a call with those of the other ranks of its group before it starts.

    Raises:
        MismatchError: on every rank that the difference concerns, with a table of who called what.
        PeerError: the process that holds the job's store is gone.
        UnsupportedError: the call is captured in a CUDA graph, whose replays could not be compared, or torch does not
            know the group.
    """
    call = Call._make(entry)
    if call.kind == "hop":
        return
    first = _first(call.name, x)
    member = _member_of(group, call)
    if member.sends:
        mine = _described(call, member, None if first is None else first.device)
        raise_if(call.name, lambda: compare(member.over, member, mine, call))


def fold_call(entry: Entry, group: Any, x: Any) -> None:
    """Hash mode: note the call, and every N calls of the group compare their digests; what it raises is the same.

    All that can be is left to that comparison: descriptors are made there.
    """
    member = _by_name.get(entry[_GROUP])
    if member is None or member.group() is not group or member.state != state_of(group):
        call = Call._make(entry)
        if call.kind == "hop":
            return
        member = _by_name[call.group] = _member_of(group, call)
    if not member.sends or entry[_KIND] == "hop":
        return
    try:
        device = x.device
        if x.is_cuda:
            _first(entry[_NAME], x)
    except AttributeError:
        device = getattr(_first(entry[_NAME], x), "device", None)
    member.count += 1
    member.window.append((entry, device))
    if len(member.window) >= variables.HASH.value:
        raise_if(entry[_NAME], lambda: _compare_window(member.over, member))


def _first(name: str, x: Any) -> Any:
    """The tensor, or the first of several; refuses one whose stream is captured."""
    first = next(iter(x), None) if isinstance(x, list | tuple) else x
    if first is not None and first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{name}: check mode cannot compare calls that a CUDA graph replays; turn it off")
    return first


def _described(call: Call, member: _Member, device: Any) -> Descriptor:
    return describe(
        call.name,
        call.kind,
        call.shape,
        call.dtype,
        call.arguments,
        len(member.ranks),
        member.rank,
        "" if device is None else device.type,
    )


def _where(site: Any) -> str:
    file, line = located(site)
    return f"{file}:{line}" if file else "an unknown line"


def compare(over: Exchange, member: _Member, mine: Descriptor, call: Call) -> str:
    """Compare ``mine`` with the descriptors of the group's other ranks; what differs, the same text on all of them."""
    member.count += 1
    words = f"{mine.text} at {_where(call.site)}"
    content = json.dumps([mine.fields, words, mine.sends, mine.receives])
    return _in_incarnation(
        over, member, lambda: _agree(over, member, "", content, words, lambda rows: _judge(rows, member))
    )


def _in_incarnation(over: Exchange, member: _Member, compare: Callable[[], str]) -> str:
    """Return what a comparison says. Where the members have not agreed on an incarnation of their group they do so."""
    if member.incarnation is not None:
        return compare()
    key = f"{over.prefix}/{member.name}/open"
    joined = over.store.compare_set(key, "", over.token()).decode()
    member.incarnation = joined
    try:
        problem = compare()
    finally:
        over.store.compare_set(key, joined, "")  # unless another member has closed it, and a third one opened the next
    if problem:
        member.incarnation, member.count = None, 0
    return problem


def _agree(
    over: Exchange, member: _Member, suffix: str, content: str, words: str, judge: Callable[[list[Any]], str]
) -> str:
    """Publish ``content``; the first rank judges what all ranks have published, and every rank returns its verdict."""
    store, base = over.store, f"{over.prefix}/{member.key}/{member.count}{suffix}"
    verdict, own, mine = f"{base}/verdict", f"{base}/{member.rank}", Blocked(base, member.ranks, words)
    keys = [f"{base}/{place}" for place in range(len(member.ranks))]
    store.set(own, content)

    def decide(text: str) -> bytes:
        """Set the verdict, unless another rank was faster; the one that holds."""
        return store.compare_set(verdict, "", text or _AGREED.decode())

    def ready() -> bytes | None:
        rows = None if member.rank else over.get_all(keys)
        if rows is None:  # or another rank, whose call failed in a circle, has taken its key away again
            return over.get(verdict)
        made = decide(judge([json.loads(each) for each in rows]))
        while member.verdicts:  # all ranks are here, so all have read those of before
            store.delete_key(member.verdicts.pop())
        return made

    def stuck() -> bytes | None:
        return fail_circle(over, mine) or fail_ended(over, mine)

    def late() -> bytes:
        return fail(over, base, _late_table(over, base, member))

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
    table = table_of({rank: each.text for rank, each in zip(member.ranks, descriptors, strict=True)})
    return (
        f"ranks {member.ranks} differ in {', '.join(differ)} in call {member.count} of their group {member.name!r}:"
        f"\n{table}"
    )


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
        words[rank] = f"no call; blocked in {each.words}{in_words(each)}" if each else "no call"
    which = f"call {member.count} of group {member.name!r} of ranks {member.ranks}"
    return f"{named_ranks(absent)} did not come to {which} within {member.timeout:g} s:\n{table_of(words)}"


def _compare_window(over: Exchange, member: _Member) -> str:
    """Compare one digest of all calls since the last comparison; the first that differs."""
    return _in_incarnation(over, member, lambda: _window_difference(over, member))


def _window_difference(over: Exchange, member: _Member) -> str:
    window, member.window = member.window, []
    calls = [(Call._make(entry), device) for entry, device in window]
    descriptors = [_described(call, member, device) for call, device in calls]
    digest = hashlib.blake2b(array("Q", [each.digest for each in descriptors]).tobytes(), digest_size=16).hexdigest()
    words = f"{descriptors[-1].text} at {_where(calls[-1][0].site)}"
    content = json.dumps([digest, words])
    problem = _agree(over, member, "", content, words, lambda rows: "digest" * (len({row[0] for row in rows}) > 1))
    if problem != "digest":
        return problem
    lines = [
        [each.digest, f"{each.text} at {_where(call.site)}"] for each, (call, _) in zip(descriptors, calls, strict=True)
    ]
    first = member.count - len(window) + 1
    return _agree(
        over, member, "/window", json.dumps([lines, words]), words, lambda rows: _first_difference(rows, member, first)
    )


def _first_difference(rows: Sequence[Any], member: _Member, first: int) -> str:
    """The first call, of those since the last comparison, that is not the same on all ranks."""
    for place, calls in enumerate(zip(*(row[0] for row in rows), strict=False)):
        if len({digest for digest, _ in calls}) > 1:
            table = table_of({rank: words for rank, (_, words) in zip(member.ranks, calls, strict=True)})
            return f"call {first + place} of group {member.name!r} is the first that differs between ranks:\n{table}"
    lengths = table_of({rank: f"{len(row[0])} calls" for rank, row in zip(member.ranks, rows, strict=True)})
    return f"ranks compare their digests of group {member.name!r} at different intervals:\n{lengths}"
