"""Agreement of a group's ranks on a plan (or batch) before anything is sent: they compare a digest, or all raise.

Ranks that lack a part of their plan say so, with a guess if they have one. If it is wrong, all tell each other what
they know, and compare again.
"""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend
from tritoncomm.errors import CommError, MismatchError, PeerError

__all__ = ["agree", "largest"]

_SHOWN = 4  # differences of a message
_KNOWS, _REFUSED, _LACKS, _TOLD = range(4)
"""States of a rank: it knows all values, has an error, lacks some, or was told those that it lacked."""


def agree(
    name: str,
    group: ProcessGroup,
    digest: bytes | None,
    error: CommError | None,
    describe: Callable[[], dict[str, str]],
    things: str = "plans",
    parts: Callable[[str], list[str]] | None = None,
    names: Sequence[str] = (),
    lacks: bool = False,
    is_told: bool = False,
) -> bool | None:
    """Compare a digest over all ranks of a group, and raise on every rank if they differ or a rank has an error.

    Returns on every rank the same of three: False if no rank lacks values and all agree; True if some lack values, but
    guessed what the others have; None if a guess was wrong or impossible. After None the ranks exchange what they know,
    which they can, because all have the same names.

    Args:
        digest: 16-byte hash of all values that have to be equal; None on a rank that cannot guess what it lacks.
        error: the error of this rank's own arguments, if any.
        describe: returns the hashed values in words, by name; called if ranks differ.
        things: the compared objects, for messages.
        parts: returns all parts of one of the values in words, by its name, where ``describe`` shortens it; called if
            ranks differ behind what it says.
        names: of the values that ranks tell each other, which have to be equal for that.
        lacks: whether this rank lacks values, so that its digest may be a wrong guess.
        is_told: whether it has been told what it lacks.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":  # "fake" has no other processes
        if error is not None:
            raise error
        return lacks if digest is not None else None
    # As integers, because texts would differ in length, which takes a second all-gather. One all-gather of 32 bytes a
    # rank if all agree. A rank with an error takes part, because the others would wait for it.
    if error is not None:
        own = [_REFUSED, 0, 0, 0]
    else:
        state = _KNOWS
        if lacks:
            state = _TOLD if is_told else _LACKS
        sent_digest = digest or bytes(16)
        names_hash = hashlib.blake2b("\0".join(names).encode(), digest_size=8).digest()
        words = (sent_digest[:8], sent_digest[8:], names_hash)
        own = [state, *(int.from_bytes(word, "little", signed=True) for word in words)]
    try:
        rows = _gathered(torch.tensor(own, device="cpu"), group, name)
        # A row is [state, first half of the digest, second half, hash of the names].
        states = {state for state, *_ in rows}
        if digest is not None and _REFUSED not in states and all(row[1:3] == own[1:3] for row in rows):
            return _LACKS in states or _TOLD in states
        if _LACKS in states and _REFUSED not in states:
            if all(row[3] == own[3] for row in rows):
                return None
            # The plans of ranks that lack values have nothing to compare but their names.
            describe, parts = lambda: {"the number of names": str(len(names)), **dict.fromkeys(names, "given")}, None
        texts = _gathered_texts({"plan": describe()} if error is None else {"error": str(error)}, group, name)
        # All ranks have the same texts, so that all come to the same conclusion.
        is_hidden = all(text == texts[0] for text in texts) and "plan" in texts[0]
        hidden = _hidden_difference(list(describe()), parts, group, name, things) if is_hidden else ""
    except PeerError as failure:
        # The exchange itself failed: this rank's own error is raised, with the failure as its cause.
        if error is not None:
            raise error from failure
        raise
    raise error or MismatchError(f"{name}: {hidden or _difference(texts, group.rank(), things)}")


def largest(name: str, group: ProcessGroup, values: Sequence[int]) -> list[int]:
    """Return the largest value at each place over all ranks of a group, which pass as many integers."""
    x = torch.tensor(values, dtype=torch.int64, device=backend.default_device(backend.cuda_backend(group)))
    backend.all_reduce(x, dist.ReduceOp.MAX, group, name)
    return x.tolist()


def _gathered(x: Tensor, group: ProcessGroup, name: str) -> list[list[int]]:
    """All-gather a tensor of integers on the CPU, as long on every rank, and return every rank's values as a list."""
    device = backend.default_device(backend.cuda_backend(group))
    out = torch.empty(group.size() * x.numel(), dtype=x.dtype, device=device)
    backend.all_gather(out, x.to(device), group, name)
    return out.view(group.size(), -1).tolist()


def _gathered_texts(own: Mapping[str, object], group: ProcessGroup, name: str) -> list[dict[str, object]]:
    """All-gather a JSON object of any length and return every rank's, by two all-gathers: of lengths, of texts."""
    text = json.dumps(own).encode()
    longest = max(length for (length,) in _gathered(torch.tensor([len(text)], device="cpu"), group, name))
    # An all-gather takes equal lengths, and JSON ignores the blanks.
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device="cpu")
    return [json.loads(bytes(row)) for row in _gathered(padded, group, name)]


def _hidden_difference(
    names: Sequence[str], parts_of: Callable[[str], list[str]] | None, group: ProcessGroup, name: str, things: str
) -> str:
    """Find the first part in which ranks' values differ, where the short descriptions of all ranks are equal.

    All ranks call, with the same names.
    """
    own = {key: hashlib.blake2b("\n".join(parts_of(key)).encode()).hexdigest() if parts_of else "" for key in names}
    hashes = _gathered_texts(own, group, name)
    differing = [key for key in names if len({each[key] for each in hashes}) > 1]
    if not differing or parts_of is None:
        return f"ranks of the group have different {things}, nothing was sent; they look alike in words"
    key = differing[0]
    lists: Any = [texts[key] for texts in _gathered_texts({key: parts_of(key)}, group, name)]
    by_rank = next(parts for parts in zip_longest(*lists, fillvalue="nothing more") if len(set(parts)) > 1)
    rank = next(rank for rank, part in enumerate(by_rank) if part != by_rank[0])
    where = f"{key} has {by_rank[0]} according to rank 0, {by_rank[rank]} according to rank {rank}"
    return f"ranks of the group have different {things}, nothing was sent: {where}"


def _difference(texts: list[dict[str, object]], rank: int, things: str) -> str:
    """Return a sentence for this rank's error message: the errors of other ranks, else the first difference.

    ``texts`` have of every rank its error as ``error``, or its values in words by name as ``plan``.
    """
    errors = [(other, text["error"]) for other, text in enumerate(texts) if "error" in text]
    if errors:
        shown = "; ".join(f"rank {other} of the group: {error}" for other, error in errors[:_SHOWN])
        return f"refused on other ranks, nothing was sent: {shown}"
    plans: list[dict[str, str]] = [text["plan"] for text in texts]  # type: ignore[misc]
    own = plans[rank]
    other = next(place for place, plan in enumerate(plans) if list(plan.items()) != list(own.items()))
    theirs = plans[other]
    names = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
    if not names:
        return f"ranks {rank} and {other} of the group have the same tensors in another order"
    shown = "; ".join(
        f"{name} is {own.get(name, 'missing')} on rank {rank}, {theirs.get(name, 'missing')} on rank {other}"
        for name in names[:_SHOWN]
    )
    return f"ranks of the group have different {things}, nothing was sent: {shown}{', ...' if names[_SHOWN:] else ''}"
