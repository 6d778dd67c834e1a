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

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.distributed_c10d import default_pg_timeout

from tritoncomm import variables
from tritoncomm.core.validation import ranks_of, state_of
from tritoncomm.debug.comparison import Comparison
from tritoncomm.debug.descriptor import Descriptor, describe, difference
from tritoncomm.debug.flight import Entry, FlightCall
from tritoncomm.debug.sites import located
from tritoncomm.debug.store import job_store, raise_if
from tritoncomm.debug.texts import label_of, named_ranks, table_of
from tritoncomm.errors import UnsupportedError

__all__ = ["check_call", "compare"]

_MAX_LISTED = 16  # ranks of a group in a message, one by one


class _Member:
    """One group as this rank checks it.

    Attributes:
        store: client of the job's store; None for torch's fake process group, which sends nothing.
        timeout: seconds until the group's own collectives give up.
        incarnation: token in its keys; empty for a numbered group, None until its members agree.
        count: checked calls so far, of this incarnation.
        stale: keys that are deleted once all ranks have come to a later call.
        window: calls since the last comparison.
        state: size of the group and this rank, where they may change in place; another state makes a new member.
    """

    def __init__(self, group: ProcessGroup, name: str) -> None:
        self.name, self.ranks, self.rank = name, ranks_of(group, "check mode"), group.rank()
        backend, self.timeout = _backend_of(group), timeout_of(group)
        self.store: Any = None if backend.name().lower() == "fake" else job_store()
        self.count, self.state = 0, state_of(group)
        is_unique = name.isdecimal()  # a number is given once, and a group of another size is refused by `ranks_of`
        self.incarnation: str | None = "" if is_unique else None
        # The first rank alone deletes keys, of groups of one name one after the other.
        self.stale = self.store.stale_of(name) if self.store is not None and not is_unique else list[str]()
        self.window: list[tuple[FlightCall, Descriptor]] = []
        if self.store is not None:  # perhaps no later group of this name deletes its keys
            weakref.finalize(group, self.store.orphan, self.ranks, self.stale).atexit = False

    @property
    def key(self) -> str:
        """Prefix of the keys of this group's calls: its name, and its incarnation if it has one."""
        return f"{self.name}@{self.incarnation}" if self.incarnation else self.name


def _backend_of(group: ProcessGroup) -> Any:
    """Return torch's backend object of a group, of its first device type."""
    return group._get_backend(next(iter(group._device_types), torch.device("cpu")))


def timeout_of(group: ProcessGroup) -> float:
    """Return the seconds until the group's own collectives give up, or torch's default where its backend has none."""
    limit = getattr(getattr(_backend_of(group), "options", None), "_timeout", None) or default_pg_timeout
    return limit.total_seconds()


_lock = threading.Lock()
_members: "weakref.WeakKeyDictionary[ProcessGroup, _Member]" = weakref.WeakKeyDictionary()


def _member_of(group: Any, call: FlightCall) -> _Member:
    """Return this rank's ``_Member`` of a group, made at the first call and after a change of its size or ranks."""
    member = _members.get(group)
    if member is not None and member.state == state_of(group):
        return member
    # ``_pg_group_ranks`` has the groups that torch made and has not destroyed; a torch without that name skips this
    # check.
    if not dist.is_initialized() or group not in getattr(distributed_c10d, "_pg_group_ranks", (group,)):
        raise UnsupportedError(
            f"{call.name}: check mode compares over the store of torch's default process group; the group "
            f"{call.group!r} was made without it"
        )
    with _lock:  # of several threads one makes it
        if _members.get(group) is member:
            _members[group] = _Member(group, call.group)
        return _members[group]


def check_call(entry: Entry, group: Any, x: Any) -> None:
    """Compare a call with those of the other ranks of its group before it starts; all raise where they differ.

    In hash mode the calls of a group are collected, and compared at every N-th one.
    """
    call = FlightCall._make(entry)
    # ``p2p_check`` compares p2p steps.
    if call.kind == "hop":
        return
    first = next(iter(x), None) if isinstance(x, list | tuple) else x
    if first is not None and first.is_cuda and torch.cuda.is_current_stream_capturing():
        raise UnsupportedError(f"{call.name}: check mode cannot compare calls that a CUDA graph replays; turn it off")
    member = _member_of(group, call)
    if member.store is None:  # torch's fake process group, which sends nothing
        return
    device = "" if first is None else first.device.type
    place = {"world": len(member.ranks), "rank": member.rank, "device": device}
    # In full mode a window is one call. The ranks wait for each other at the end of a window only.
    member.window.append((call, describe(call.name, call.kind, call.shape, call.dtype, call.arguments, **place)))
    member.count += 1
    if variables.CHECK.value or len(member.window) >= variables.HASH.value:
        raise_if(call.name, lambda: compare(member))


def _with_line(call: FlightCall, descriptor: Descriptor) -> str:
    """Return ``f(float32 [4], op=SUM) at train.py:41``: the text of the descriptor, and the call's file and line."""
    file, line = located(call.site)
    return f"{descriptor.text} at {f'{file}:{line}' if file else 'an unknown line'}"


def compare(member: _Member) -> str:
    """Wait for all ranks of a group, and return the first difference of the calls since their last comparison."""
    # The window is emptied in any case, also by an error.
    window, member.window = member.window, []
    # An incarnation is a token in the keys of a group's comparisons, new after a failure. A member that comes late to
    # the failed call still has the old one, and finds the verdict under its own count.
    if member.incarnation is not None:
        return _compare(member, window)
    # A member without an incarnation first agrees with the others on one: the first to come opens it.
    key = f"{member.name}/open"
    joined = member.store.set_once(key, member.store.token()).decode()
    member.incarnation = joined
    try:
        problem = _compare(member, window)
    finally:
        # ``set_once`` takes the empty value for none, so the next member that comes here opens a new incarnation.
        # Replaced only if it still is ``joined``: another member may have closed it, and a third one opened the next.
        member.store.replace(key, joined, "")
        if not member.rank:  # at the next call all members have left this one
            member.stale.append(key)
    if problem:
        # Members that did not come cannot know which calls they missed, so the next call opens a new incarnation.
        member.incarnation, member.count = None, 0
    return problem


def _compare(member: _Member, window: list[tuple[FlightCall, Descriptor]]) -> str:
    """Compare the calls of ``window``, at least one, in the member's present incarnation; empty text if all agree."""
    # Digests that fit end the comparison. If they do not, every rank sends ``content()``, and the first rank calls
    # ``judge`` with the contents of all.
    which = f", call {member.count} of group {label_of(member.name)!r} of ranks {_listed(member.ranks)}"
    words, base = _with_line(*window[-1]), f"{member.key}/{member.count}"
    comparison = Comparison(
        member.store, base, member.ranks, place=member.rank, timeout=member.timeout, words=words, which=which,
        stale=member.stale,
    )  # fmt: skip

    def content() -> list[Any]:
        return [[each.fields, _with_line(call, each), each.sends, each.receives] for call, each in window]

    def judge(windows: list[Any]) -> str:
        return _first_difference(windows, member, member.count - len(window) + 1)

    return comparison.compare(_digest([each for _, each in window], member.rank), content, judge)


def _digest(descriptors: Sequence[Descriptor], rank: int) -> bytes:
    """Return the digest of a window of calls, 16 bytes, for ``comparison.combine``."""
    # First 8 bytes: a hash of the fields, equal on all ranks if the calls are. Last 8 bytes: hashes of the rows that
    # uneven all-to-alls send, less hashes of the rows that they expect; ``rank`` enters these only. Over the ranks they
    # add up to 0 modulo 2**64 if every rank expects the rows that the others send it.
    fields = hashlib.blake2b(b"".join(each.digest for each in descriptors), digest_size=8).digest()
    rows = 0
    for place, each in enumerate(descriptors):  # Python hashes tuples of integers alike in every process
        rows += sum(hash((place, rank, other, size)) for other, size in enumerate(each.sends))
        rows -= sum(hash((place, other, rank, size)) for other, size in enumerate(each.receives))
    return fields + (rows % 2**64).to_bytes(8, "little")


def _listed(ranks: Sequence[int]) -> str:
    """Return the ranks of a group as text: ``[0, 3, 2]`` in group order, or from 17 ranks on the runs ``0-31, 40``."""
    # ``named_ranks`` begins with the word "ranks", which the callers write themselves.
    return str(list(ranks)) if len(ranks) <= _MAX_LISTED else named_ranks(sorted(ranks)).partition(" ")[2]


def _first_difference(windows: Sequence[Any], member: _Member, first: int) -> str:
    """Return a table of the first call in which the windows of all ranks differ, which begin with call ``first``.

    Returns a table of the windows' lengths if they differ in that only, and an empty text if they agree.

    Args:
        windows: by rank of the group, its calls, each as ``[fields, words, sends, receives]``.
    """
    for place, calls in enumerate(zip(*windows, strict=False)):
        # The digest stays empty: ``difference`` compares the fields and the rows.
        descriptors = [Descriptor(fields, words, b"", tuple(sent), tuple(got)) for fields, words, sent, got in calls]
        if differ := difference(descriptors):
            table = table_of({rank: each.text for rank, each in zip(member.ranks, descriptors, strict=True)})
            which = "" if max(map(len, windows)) == 1 else ", the first that differs"
            return (
                f"ranks {_listed(member.ranks)} differ in {', '.join(differ)} in call {first + place} of their group "
                f"{label_of(member.name)!r}{which}:\n{table}"
            )
    if len(set(map(len, windows))) == 1:
        return ""
    # The windows agree as far as the shortest one goes, and the ranks compare at different intervals.
    lengths = table_of({rank: f"{len(each)} calls" for rank, each in zip(member.ranks, windows, strict=True)})
    return f"ranks compare their digests of group {label_of(member.name)!r} at different intervals:\n{lengths}"
