"""Agreement of a group's ranks on a plan (or batch) before anything is sent: they compare a digest, or all raise."""

import json
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core import backend
from tritoncomm.errors import CommError, MismatchError, PeerError

__all__ = ["agree"]

_SHOWN = 4  # differences of a message


def agree(
    name: str,
    group: ProcessGroup,
    digest: bytes,
    error: CommError | None,
    describe: Callable[[], dict[str, str]],
    things: str = "plans",
) -> None:
    """Compare a plan over the ranks of a group; one all-gather of 24 bytes per rank where they agree.

    Args:
        name: the function, for messages.
        group: the process group; all of its ranks call.
        digest: 16 bytes of everything that the plan depends on.
        error: error of this rank's own arguments, if any.
        describe: returns the digested values in words, by name; called where ranks differ.
        things: the compared objects, for messages.

    Raises:
        CommError: ``error`` itself.
        MismatchError: another rank has an error, or another plan; names the rank, the tensor and both sides.
        PeerError: another rank did not come, as one that has a plan for its arguments does not.
    """
    if group.size() == 1 or dist.get_backend(group) == "fake":
        if error is not None:
            raise error
        return
    try:
        _compare(name, group, digest, error, describe, things)
    except PeerError as failure:
        if error is not None:
            raise error from failure
        raise


def _compare(
    name: str,
    group: ProcessGroup,
    digest: bytes,
    error: CommError | None,
    describe: Callable[[], dict[str, str]],
    things: str,
) -> None:
    """One all-gather; texts where ranks differ."""
    rank = group.rank()
    halves = [int.from_bytes(half, "little", signed=True) for half in (digest[:8], digest[8:])]
    mine = [int(error is not None), *([0, 0] if error is not None else halves)]
    theirs = _gathered(torch.tensor(mine, device="cpu"), group, name)
    if all(each == [0, *halves] for each in theirs):
        return
    texts = _texts(group, name, {"error": str(error)} if error is not None else {"plan": describe()})
    if error is not None:
        raise error
    raise MismatchError(f"{name}: {_difference(texts, rank, things)}")


def _gathered(x: Tensor, group: ProcessGroup, name: str) -> list[list[int]]:
    """The tensor of every rank, as lists."""
    device = backend.default_device(backend.cuda_backend(group))
    out = torch.empty(group.size() * x.numel(), dtype=x.dtype, device=device)
    backend.all_gather(out, x.to(device), group, name)
    return out.view(group.size(), -1).tolist()


def _texts(group: ProcessGroup, name: str, mine: dict[str, object]) -> list[dict[str, object]]:
    """A text of every rank; they may differ in length."""
    text = json.dumps(mine).encode()
    longest = max(length for (length,) in _gathered(torch.tensor([len(text)], device="cpu"), group, name))
    padded = torch.tensor(list(text.ljust(longest)), dtype=torch.uint8, device="cpu")
    return [json.loads(bytes(row)) for row in _gathered(padded, group, name)]


def _difference(texts: list[dict[str, object]], rank: int, things: str) -> str:
    """What other ranks have to say, from the first that differs from this one."""
    errors = {other: text["error"] for other, text in enumerate(texts) if "error" in text}
    if errors:
        shown = "; ".join(f"rank {other} of the group: {error}" for other, error in list(errors.items())[:_SHOWN])
        return f"refused on other ranks, nothing was sent: {shown}"
    plans: list[dict[str, str]] = [text["plan"] for text in texts]  # type: ignore[misc]
    mine = plans[rank]
    other = next(place for place, plan in enumerate(plans) if list(plan.items()) != list(mine.items()))
    theirs = plans[other]
    names = [each for each in {**mine, **theirs} if mine.get(each) != theirs.get(each)]
    if not names:
        return f"ranks {rank} and {other} of the group have the same tensors in another order"
    shown = "; ".join(
        f"{each} is {mine.get(each, 'missing')} on rank {rank}, {theirs.get(each, 'missing')} on rank {other}"
        for each in names[:_SHOWN]
    )
    return f"ranks of the group have different {things}, nothing was sent: {shown}{', ...' if names[_SHOWN:] else ''}"
