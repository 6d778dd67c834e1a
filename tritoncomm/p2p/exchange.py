"""Directed transfers between neighbouring stages: the only caller of isend and irecv.

Up to four at once, posted together or one by one. Where both neighbours are the same rank, activations go before
gradients on both sides, so that nothing is taken for the other; tags are not relied on (NCCL has none). Gloo moves no
CUDA tensors between two ranks: those go through pinned host memory.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import c10d
from tritoncomm.errors import GroupError, PeerError

__all__ = ["Line", "Posted", "Transfer", "in_turn", "post", "together"]

_TOGETHER = ("send_prev", "recv_prev", "send_next", "recv_next")
_EVEN = ("send_next", "recv_prev", "send_prev", "recv_next")
_ODD = ("recv_prev", "send_next", "recv_next", "send_prev")
_BACKWARD_SIDE = ("send_prev", "recv_prev")


@dataclass(frozen=True, slots=True)
class Line:
    """A stage and its neighbours.

    Attributes:
        group: the process group of the stages.
        prev: global rank of the stage before, on a ring.
        next: global rank of the stage after.
        rank: global rank of this stage.
        stage: its place in the group.
        stages: ranks in the group.
        places: place in the group of the stage before and of the stage after.
    """

    group: ProcessGroup
    prev: int
    next: int
    rank: int
    stage: int
    stages: int
    places: tuple[int, int]

    @classmethod
    def of(cls, group: ProcessGroup, prev: int | None = None, next: int | None = None) -> "Line":
        """The ring of ``group``, or other neighbours (global ranks).

        Raises:
            GroupError: a neighbour is not in the group.
        """
        ranks, stage = dist.get_process_group_ranks(group), group.rank()
        before = ranks[stage - 1] if prev is None else prev
        after = ranks[(stage + 1) % len(ranks)] if next is None else next
        for rank in (before, after):
            if rank not in ranks:
                raise GroupError(f"rank {rank} is not in the group of ranks {ranks}")
        places = (ranks.index(before), ranks.index(after))
        return cls(group, before, after, ranks[stage], stage, len(ranks), places)

    def peer(self, key: str) -> int:
        """Global rank at the other end of ``send_prev``, ``recv_next``, ..."""
        return self.prev if key in _BACKWARD_SIDE else self.next

    def place(self, transfer: "Transfer") -> int:
        """The other end's rank inside the transfer's group."""
        if transfer.group is not self.group:
            return self.peer(transfer.key)
        return self.places[0 if transfer.key in _BACKWARD_SIDE else 1]

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.stages} (rank {self.rank})"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One message in one direction; ``tensor`` is contiguous and in a dtype that the backend moves."""

    key: str
    tensor: Tensor
    group: ProcessGroup


def together(line: Line, tensors: dict[str, Tensor]) -> list[Transfer]:
    """The order of a batch."""
    order = _EVEN if line.prev == line.next else _TOGETHER
    return [Transfer(key, tensors[key], line.group) for key in order if key in tensors]


def in_turn(line: Line, tensors: dict[str, Tensor]) -> list[Transfer]:
    """The order of single calls, which no backend that blocks in them can deadlock on.

    Two stages use the default group for every other call, so that both directions run at once.
    """
    other = line.group
    if line.stages == 2 and _backend(line.group, tensors) != "ucc":
        other = dist.group.WORLD or line.group
    order = _ODD if line.stage % 2 else _EVEN
    groups = (line.group, other, line.group, other)
    return [Transfer(key, tensors[key], group) for key, group in zip(order, groups, strict=True) if key in tensors]


def _backend(group: ProcessGroup, tensors: dict[str, Tensor]) -> str:
    for tensor in tensors.values():
        return c10d.backend_name(group, tensor)
    return ""


class Posted:
    """A transfer under way; it keeps its buffers alive until it has been waited for."""

    __slots__ = ("_finish", "_kept", "_line", "_name", "_transfer", "_work")

    def __init__(self, work: Any, transfer: Transfer, line: Line, name: str, host: Tensor | None) -> None:
        self._work, self._transfer, self._line, self._name, self._kept = work, transfer, line, name, host

    def wait(self) -> None:
        """Afterwards the source may be reused or freed, or the result is there (on a GPU: in stream order).

        Raises:
            PeerError: the other side died or did not come within the group's timeout.
        """
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise self._failure(error) from error
        if self._kept is not None and self._transfer.key.startswith("recv"):
            self._transfer.tensor.copy_(self._kept, non_blocking=True)
        self._kept = None

    def _failure(self, error: Exception) -> PeerError:
        key, tensor = self._transfer.key, self._transfer.tensor
        what = f"receive {tensor.nbytes} bytes from" if key.startswith("recv") else f"send {tensor.nbytes} bytes to"
        peer = self._line.peer(key)
        return PeerError(f"{self._name}: {self._line} could not {what} rank {peer}: {error}")

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()


def post(transfers: Iterable[Transfer], line: Line, name: str, batched: bool) -> dict[str, Posted]:
    """Start the transfers in this order; a handle for each, by key.

    Raises:
        PeerError: the backend refuses, because a peer is known to be gone.
    """
    ready = [_through_host(transfer) for transfer in transfers]
    if batched and ready and ready[0][0].tensor.is_cuda and ready[0][1] is None:
        ops = [_operation(sent, line) for sent, _ in ready]
        works = dist.batch_isend_irecv(ops)
        works = works if len(works) == len(ready) else works[:1] * len(ready)  # coalesced: one for all
        return {t.key: Posted(w, t, line, name, None) for w, (t, _) in zip(works, ready, strict=True)}
    posted = {}
    for transfer, host in ready:
        moved = transfer.tensor if host is None else host
        call = transfer.group.send if transfer.key.startswith("send") else transfer.group.recv
        try:
            work = call([moved], line.place(transfer), 0)
        except RuntimeError as error:
            raise Posted(None, transfer, line, name, host)._failure(error) from error
        posted[transfer.key] = Posted(work, transfer, line, name, host)
    return posted


def _operation(transfer: Transfer, line: Line) -> dist.P2POp:
    call = dist.isend if transfer.key.startswith("send") else dist.irecv
    return dist.P2POp(call, transfer.tensor, line.peer(transfer.key), transfer.group)


def _through_host(transfer: Transfer) -> tuple[Transfer, Tensor | None]:
    """The transfer, and pinned host memory to move instead where the backend takes no CUDA tensors."""
    x = transfer.tensor
    if not x.is_cuda or c10d.backend_name(transfer.group, x) != "gloo":
        return transfer, None
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    if transfer.key.startswith("send"):
        host.copy_(x)
    return transfer, host
