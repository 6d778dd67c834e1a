"""What a rank does, left in the job's store for others to read when their exchange fails: nothing is read before that.

Ranks compare a plan when it is made. A rank whose arguments differ from those of a cached plan compares alone, and the
others exchange without it, until both time out: the notes say why.
"""

import json
import time
from contextlib import suppress
from typing import NoReturn

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tritoncomm.debug.exchange import exchange
from tritoncomm.errors import CommError, MismatchError

__all__ = ["explain", "leave", "pending", "withdraw"]

_WAIT, _PAUSE = 1.0, 0.05  # seconds for what others leave when they fail, too
_SHOWN = 4  # ranks of a message

pending: set[str] = set()
"""Names of the groups in which this rank has left something."""


def leave(group: ProcessGroup, what: str, plan: str) -> None:
    """Say what this rank does in the group now.

    Args:
        group: the process group.
        what: in words.
        plan: digest of the plan; ranks with the same one do the same.
    """
    if not _has_store(group):
        return
    try:
        over = exchange()
        over.store.set(_key(group, over.rank), json.dumps([what, plan]))
    except RuntimeError:  # a store that cannot be cloned, or is gone: errors then name less, and nothing else changes
        return
    pending.add(group.group_name)


def withdraw(group: ProcessGroup) -> None:
    """Take back what was left, if anything."""
    if group.group_name not in pending:
        return
    pending.discard(group.group_name)
    with suppress(RuntimeError):  # the store is gone, and the note with it
        over = exchange()
        over.store.delete_key(_key(group, over.rank))


def explain(failure: CommError, group: ProcessGroup, name: str, what: str, plan: str) -> NoReturn:
    """Raise what an exchange failed with, or ``MismatchError`` if another rank did something else meanwhile.

    An error is never its own cause, and no frame keeps it: such circles would keep the group until the next garbage
    collection.

    Args:
        failure: what the backend says.
        group: the process group.
        name: the function.
        what, plan: of this rank, as for ``leave``.
    """
    problem = _difference(failure, group, name, what, plan)
    try:
        if problem:
            raise MismatchError(problem) from failure
        raise failure
    finally:
        del failure


def _difference(failure: CommError, group: ProcessGroup, name: str, what: str, plan: str) -> str:
    """What other ranks did instead; nothing if that is not known."""
    try:
        leave(group, what, plan)
        others = _others(group)
    except RuntimeError:  # the store is gone, with its process
        return ""
    differ = {rank: text for rank, (text, theirs) in others.items() if theirs != plan}
    if not differ:
        return ""
    shown = "; ".join(f"rank {rank} {text}" for rank, text in list(differ.items())[:_SHOWN])
    return f"{name}: ranks have different arguments: this rank {what}; {shown} ({failure})"


def _has_store(group: ProcessGroup) -> bool:
    return dist.is_initialized() and dist.get_backend(group) != "fake" and group.size() > 1


def _key(group: ProcessGroup, rank: int) -> str:
    return f"tritoncomm/reshard/{group.group_name}/{rank}"


def _others(group: ProcessGroup) -> dict[int, tuple[str, str]]:
    """What other ranks of the group have left, by global rank; waits a little for those that have not."""
    over, end = exchange(), time.monotonic() + _WAIT
    missing = [rank for rank in dist.get_process_group_ranks(group) if rank != over.rank]
    notes: dict[int, tuple[str, str]] = {}
    while missing and time.monotonic() < end:
        for rank in list(missing):
            content = over.get(_key(group, rank))
            if content is not None:
                notes[rank] = tuple(json.loads(content))
                missing.remove(rank)
        time.sleep(_PAUSE)
    return notes
