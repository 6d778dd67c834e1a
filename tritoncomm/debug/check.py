"""Check mode of collectives: before a call its ranks compare it, and all raise where their calls differ.

In full mode every call is compared, in hash mode the calls of a group are compared N at a time. Both go through
``comparison``: a digest per comparison, and the calls themselves only after a difference.

torch numbers the groups that the whole job makes. A group that only its members make is named after its ranks, so one
that is destroyed and made again has the name of its predecessor, whose last verdict is still in the store. The members
of such a group agree on an incarnation: the first to compare opens one, the others join it. Whoever leaves its first
comparison closes it, or fails it because a member does not come. It is kept where that comparison agreed; after
another verdict the next call opens a new one, because members that did not come cannot know which calls they missed.
"""

import hashlib
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout

from tritoncomm import variables
from tritoncomm.core.validation import ranks_of, state_of
from tritoncomm.debug.comparison import Comparison
from tritoncomm.debug.descriptor import Descriptor, describe, difference
from tritoncomm.debug.flight import Call, Entry
from tritoncomm.debug.sites import located
from tritoncomm.debug.store import job_store, raise_if
from tritoncomm.debug.texts import named_ranks, table_of
from tritoncomm.errors import UnsupportedError

__all__ = ["check_call", "compare"]

_MAX_LISTED = 16  # ranks of a group in a message, one by one


class _Member:
    """One group as this rank checks it.

    Attributes:
        store: client of the job's store; None where nothing is sent.
        name: of the group.
        ranks: global ranks, in group order.
        rank: in the group.
        timeout: seconds until the group's own collectives give up.
        sends: whether its backend sends anything; torch's fake process group does not.
        incarnation: token in its keys; empty for a numbered group, None until its members agree.
        count: checked calls so far, of this incarnation.
        stale: keys that are deleted once all ranks have come to a later call.
        window: calls since the last comparison.
        state: size of the group and this rank, where they may change in place; another state makes a new member.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name, self.ranks, self.rank = name, ranks_of(group, "check mode"), group.rank()
        self.sends, self.timeout = _backend_of(group).name().lower() != "fake", timeout_of(group)
        self.store: Any = job_store() if self.sends else None
        self.count, self.state = 0, state_of(group)
        is_unique = name.isdecimal()  # a number is given once, and a group of another size is refused by `ranks_of`
        self.incarnation: str | None = "" if is_unique else None
        # The first rank alone deletes keys, of groups of one name one after the other.
        self.stale = self.store.stale_of(name) if self.sends and not is_unique else list[str]()
        self.window: list[tuple[Call, Descriptor]] = []

    @property
    def key(self) -> str:
        """Name and incarnation."""
        return f"{self.name}@{self.incarnation}" if self.incarnation else self.name


def _backend_of(group: ProcessGroup) -> Any:
    """Return torch's backend object of a group, of its first device type."""
    return group._get_backend(next(iter(group._device_types), torch.device("cpu")))


def timeout_of(group: ProcessGroup) -> float:
    """Return the seconds until the group's own transfers give up."""
    limit = getattr(getattr(_backend_of(group), "options", None), "_timeout", None) or default_pg_timeout
    return limit.total_seconds()


_lock = threading.Lock()
_members: "weakref.WeakKeyDictionary[ProcessGroup, _Member]" = weakref.WeakKeyDictionary()


def _member_of(group: Any, call: Call) -> _Member:
    """Return this rank's state of a group; its first checked call makes it.

    Raises:
        UnsupportedError: torch does not know the group.
    """
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
    """Compare a call with those of the other ranks of its group before it starts; in hash mode every N-th time.

    Calls of p2p steps are left to ``p2p_check``.

    Args:
        entry: of the flight record.
        group: process group of the call.
        x: its tensor, or its tensors.

    Raises:
        MismatchError: on every rank that the difference concerns, with a table of who called what.
        PeerError: the process that holds the job's store is gone.
        UnsupportedError: the call is captured in a CUDA graph, whose replays could not be compared, or torch does not
            know the group.
    """
    call = Call._make(entry)
    if call.kind == "hop":
        return
    first = next(iter(x), None) if isinstance(x, list | tuple) else x
    if first is not None and first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{call.name}: check mode cannot compare calls that a CUDA graph replays; turn it off")
    member = _member_of(group, call)
    if not member.sends:
        return
    device = "" if first is None else first.device.type
    member.window.append((call, _described(call, member, device)))
    member.count += 1
    if variables.CHECK.value or len(member.window) >= variables.HASH.value:
        raise_if(call.name, lambda: compare(member))


def _described(call: Call, member: _Member, device: str) -> Descriptor:
    """Return the descriptor of a call of this rank."""
    world = len(member.ranks)
    return describe(call.name, call.kind, call.shape, call.dtype, call.arguments, world, member.rank, device)


def _with_line(call: Call, descriptor: Descriptor) -> str:
    """Put a call and its source line into words."""
    file, line = located(call.site)
    return f"{descriptor.text} at {f'{file}:{line}' if file else 'an unknown line'}"


def compare(member: _Member) -> str:
    """Compare the calls of a member's window between the ranks, empty the window, and return the difference as text.

    The text is empty if the calls agree. Members without an incarnation agree on one in the store before; after a
    difference they forget it, and their count of calls with it.
    """
    window, member.window = member.window, []
    if member.incarnation is not None:
        return _compare(member, window)
    key = f"{member.name}/open"
    joined = member.store.set_once(key, member.store.token()).decode()
    member.incarnation = joined
    try:
        problem = _compare(member, window)
    finally:
        member.store.replace(key, joined, "")  # unless another member has closed it, and a third one opened the next
    if problem:
        member.incarnation, member.count = None, 0
    return problem


def _compare(member: _Member, window: list[tuple[Call, Descriptor]]) -> str:
    """Compare the calls of a window over the keys of the member's incarnation."""
    which = f", call {member.count} of group {member.name!r} of ranks {_listed(member.ranks)}"
    words, base = _with_line(*window[-1]), f"{member.key}/{member.count}"
    comparison = Comparison(member.store, base, member.ranks, member.rank, member.timeout, words, which, member.stale)

    def content() -> list[Any]:
        return [[each.fields, _with_line(call, each), each.sends, each.receives] for call, each in window]

    def judge(windows: list[Any]) -> str:
        return _first_difference(windows, member, member.count - len(window) + 1)

    return comparison.compare(_digest([each for _, each in window], member), content, judge)


def _digest(descriptors: Sequence[Descriptor], member: _Member) -> bytes:
    """Return the digest of a window: of its calls' fields, and of the rows that its all-to-alls send and expect.

    The sum of the last 8 bytes over the ranks is 0 if every rank expects the rows that the others send it.
    """
    fields = hashlib.blake2b(b"".join(each.digest for each in descriptors), digest_size=8).digest()
    rows, world = 0, len(member.ranks)
    for place, each in enumerate(descriptors):
        if each.sends or each.receives:
            rows += _hash_of_rows(each.sends, each.receives, member.rank, world, place)
    return fields + (rows % 2**64).to_bytes(8, "little")


def _hash_of_rows(sends: Sequence[int], receives: Sequence[int], rank: int, world: int, place: int) -> int:
    """Return the hashes of all ``(rank, other, rows sent)`` less those of all ``(other, rank, rows expected)``."""
    if len(sends) != world or len(receives) != world:
        return 1  # the call refuses these sizes itself, as far as the ranks have the same: the report tells
    own, others, zero = np.full(world, rank), np.arange(world), np.uint64(0)
    sent = _mixed(place, own, others, np.array(sends)).sum(initial=zero)
    expected = _mixed(place, others, own, np.array(receives)).sum(initial=zero)
    return int(sent) - int(expected)


def _mixed(*columns: Any) -> Any:
    """Return a 64-bit hash of every row of several columns of integers (the finalizer of SplitMix64, once a column)."""
    hashed = np.zeros(1, np.uint64)
    for column in columns:
        hashed = (hashed ^ np.asarray(column).astype(np.uint64)) + np.uint64(0x9E3779B97F4A7C15)
        hashed = (hashed ^ (hashed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        hashed = (hashed ^ (hashed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        hashed = hashed ^ (hashed >> np.uint64(31))
    return hashed


def _listed(ranks: Sequence[int]) -> str:
    """Put the ranks of a group into words: ``[0, 3, 2]``, or runs where there are many."""
    return str(list(ranks)) if len(ranks) <= _MAX_LISTED else named_ranks(sorted(ranks)).partition(" ")[2]


def _first_difference(windows: Sequence[Any], member: _Member, first: int) -> str:
    """Put the first call of the windows of all ranks that differs into words; nothing if all calls fit together.

    Args:
        windows: of every rank the calls, each as ``[fields, words, sends, receives]``.
        member: the group.
        first: number of the first call.
    """
    for place, calls in enumerate(zip(*windows, strict=False)):
        descriptors = [Descriptor(fields, words, b"", tuple(sent), tuple(got)) for fields, words, sent, got in calls]
        if differ := difference(descriptors):
            table = table_of({rank: each.text for rank, each in zip(member.ranks, descriptors, strict=True)})
            which = "" if max(map(len, windows)) == 1 else ", the first that differs"
            return (
                f"ranks {_listed(member.ranks)} differ in {', '.join(differ)} in call {first + place} of their group "
                f"{member.name!r}{which}:\n{table}"
            )
    if len(set(map(len, windows))) == 1:
        return ""
    lengths = table_of({rank: f"{len(each)} calls" for rank, each in zip(member.ranks, windows, strict=True)})
    return f"ranks compare their digests of group {member.name!r} at different intervals:\n{lengths}"
