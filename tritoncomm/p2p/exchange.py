"""Directed transfers between neighbouring stages: the only caller of isend and irecv.

Up to four at once, posted together or one by one. Where both neighbours are the same rank, activations go before
gradients on both sides, so that nothing is taken for the other; tags are not relied on (NCCL has none). Gloo moves no
CUDA tensors between two ranks: those go through pinned host memory.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import c10d
from tritoncomm.errors import GroupError, PeerError

__all__ = ["Line", "Posted", "Way", "keep", "move", "post", "start"]

_MOST_UNWAITED = 64
_TOGETHER = ("send_prev", "recv_prev", "send_next", "recv_next")
_EVEN = ("send_next", "recv_prev", "send_prev", "recv_next")
_ODD = ("recv_prev", "send_next", "recv_next", "send_prev")


class Way(NamedTuple):
    """One direction of a line; ``place`` is the peer's rank inside ``group``."""

    key: str
    is_send: bool
    place: int
    group: ProcessGroup

    def start(self, x: Tensor) -> Any:
        """The transfer of a contiguous tensor, under way."""
        return self.group.send([x], self.place, 0) if self.is_send else self.group.recv([x], self.place, 0)


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
        batch: the directions in the order of a batch.
        singles: the directions in an order that no backend which blocks in single calls can deadlock on.
        ways: the directions of singles and of a batch, by key.
    """

    group: ProcessGroup
    prev: int
    next: int
    rank: int
    stage: int
    stages: int
    batch: tuple[Way, ...]
    singles: tuple[Way, ...]
    ways: tuple[dict[str, Way], dict[str, Way]]
    modes: dict[str, str] = field(default_factory=dict)
    sides: dict[str, "Line | None"] = field(default_factory=dict)

    @classmethod
    def of(cls, group: ProcessGroup, prev: int | None = None, next: int | None = None) -> "Line":
        """The ring of ``group``, or other neighbours (global ranks).

        Two stages use the default group for every other single call, so that both directions run at once.

        Raises:
            GroupError: a neighbour is not in the group.
        """
        ranks, stage = dist.get_process_group_ranks(group), group.rank()
        before = ranks[stage - 1] if prev is None else prev
        after = ranks[(stage + 1) % len(ranks)] if next is None else next
        for rank in (before, after):
            if rank not in ranks:
                raise GroupError(f"rank {rank} is not in the group of ranks {ranks}")
        peers = {"prev": before, "next": after}

        def way(key: str, over: ProcessGroup) -> Way:
            verb, _, side = key.partition("_")
            place = ranks.index(peers[side]) if over is group else peers[side]
            return Way(key, verb == "send", place, over)

        together = _EVEN if before == after else _TOGETHER
        alone, world = _ODD if stage % 2 else _EVEN, dist.group.WORLD
        other = world if len(ranks) == 2 and world is not None and "ucc" not in dist.get_backend(group) else group
        singles = tuple(way(key, over) for key, over in zip(alone, (group, other, group, other), strict=True))
        batch = tuple(way(key, group) for key in together)
        ways = {way.key: way for way in singles}, {way.key: way for way in batch}
        return cls(group, before, after, ranks[stage], stage, len(ranks), batch, singles, ways)

    def peer(self, key: str) -> int:
        """Global rank at the other end of ``send_prev``, ``recv_next``, ..."""
        return self.prev if key.endswith("prev") else self.next

    def mode(self, x: Tensor) -> str:
        """How tensors of this device go: direct, batched (NCCL wants a batch as one call), or through the host."""
        kind = x.device.type
        found = self.modes.get(kind)
        if found is None:
            gloo = kind == "cuda" and c10d.backend_name(self.group, x) == "gloo"
            found = self.modes[kind] = "host" if gloo else ("batched" if kind == "cuda" else "direct")
        return found

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.stages} (rank {self.rank})"


def _failure(line: Line, name: str, way: Way, x: Tensor, error: Exception) -> PeerError:
    what = f"send {x.nbytes} bytes to" if way.is_send else f"receive {x.nbytes} bytes from"
    return PeerError(f"{name}: {line} could not {what} rank {line.peer(way.key)}: {error}")


class Posted:
    """A transfer under way; it keeps its buffers alive until it has been waited for."""

    __slots__ = ("_host", "_kept", "_line", "_name", "_tensor", "_way", "_work")

    def __init__(self, work: Any, way: Way, x: Tensor, line: Line, name: str, host: Tensor | None = None) -> None:
        self._work, self._way, self._tensor, self._line, self._name, self._host = work, way, x, line, name, host
        self._kept: deque[Posted] | None = None

    def wait(self) -> None:
        """Afterwards the source may be reused or freed, or the result is there (on a GPU: in stream order).

        Raises:
            PeerError: the other side died or did not come within the group's timeout.
        """
        if self._work is None:
            return
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failure(self._line, self._name, self._way, self._tensor, error) from error
        if self._host is not None and not self._way.is_send:
            self._tensor.copy_(self._host)
        self._work = self._host = None
        if self._kept is not None and self in self._kept:
            while self._kept.popleft() is not self:  # those posted before it on the same way are done as well
                pass

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()


_unwaited: dict[tuple[ProcessGroup, int], deque[Posted]] = {}


def keep(handles: Iterable[Posted]) -> None:
    """Hold sends until they were waited for: a handle that the caller drops must not take the send with it."""
    for posted in handles:
        way = posted._way
        if way.is_send:
            posted._kept = queue = _unwaited.setdefault((way.group, way.place), deque())
            queue.append(posted)
            if len(queue) > _MOST_UNWAITED:
                queue[0].wait()


def post(line: Line, name: str, tensors: dict[str, Tensor], batched: bool) -> dict[str, Posted]:
    """Start transfers; a handle for each, in the order they were posted.

    Args:
        line: the neighbours.
        name: the function a caller knows, for errors.
        tensors: by ``send_prev``, ``recv_prev``, ``send_next``, ``recv_next``; contiguous, in dtypes the backend moves.
        batched: as one batch, or one by one.

    Raises:
        PeerError: the backend refuses, because a peer is known to be gone.
    """
    ways = [way for way in (line.batch if batched else line.singles) if way.key in tensors]
    if not ways:
        return {}
    mode = line.mode(tensors[ways[0].key])
    if mode == "batched" and batched:
        works = _batch(line, [(way, tensors[way.key]) for way in ways])
        found = zip(ways, works, strict=True)
        return {way.key: Posted(work, way, tensors[way.key], line, name) for way, work in found}
    posted = {}
    for way in ways:
        x = tensors[way.key]
        host = _on_host(x, way) if mode == "host" else None
        try:
            work = way.start(x if host is None else host)
        except RuntimeError as error:
            raise _failure(line, name, way, x, error) from error
        posted[way.key] = Posted(work, way, x, line, name, host)
    return posted


def start(line: Line, name: str, key: str, x: Tensor, batched: bool) -> Posted:
    """``post`` of one CPU tensor."""
    way = line.ways[batched][key]
    try:
        return Posted(way.start(x), way, x, line, name)
    except RuntimeError as error:
        raise _failure(line, name, way, x, error) from error


def move(line: Line, name: str, tensors: dict[str, Tensor], batched: bool) -> None:
    """``post`` and wait for everything, without a handle for each.

    Raises:
        PeerError: a peer died or did not come within the group's timeout.
    """
    works = []
    for way in line.batch if batched else line.singles:
        key, is_send, place, group = way
        if key not in tensors:
            continue
        x = tensors[key]
        if x.is_cuda and not works and line.mode(x) != "direct":
            for posted in post(line, name, tensors, batched).values():
                posted.wait()
            return
        try:
            works.append(((group.send if is_send else group.recv)([x], place, 0), way, x))
        except RuntimeError as error:
            raise _failure(line, name, way, x, error) from error
    for work, way, x in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise _failure(line, name, way, x, error) from error


def _batch(line: Line, transfers: list[tuple[Way, Tensor]]) -> list[Any]:
    """All in one call of the backend; a work for each."""
    calls = [
        dist.P2POp(dist.isend if way.is_send else dist.irecv, x, line.peer(way.key), way.group) for way, x in transfers
    ]
    works = dist.batch_isend_irecv(calls)
    return works if len(works) == len(transfers) else works[:1] * len(transfers)  # coalesced: one for all


def _on_host(x: Tensor, way: Way) -> Tensor:
    """Pinned memory to send from or receive into."""
    host = torch.empty(x.shape, dtype=x.dtype, pin_memory=True)
    if way.is_send:
        host.copy_(x)
    return host
