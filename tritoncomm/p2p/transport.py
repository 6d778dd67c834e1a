"""Directed transfers between neighbouring stages: the only caller of isend and irecv.

Up to four at once, posted together or one by one. Where both neighbours are the same rank, activations go before
gradients on both sides, so that nothing is taken for the other; tags are not relied on (NCCL has none). Gloo moves no
CUDA tensors between two ranks: those go through pinned host memory.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tritoncomm.errors import PeerError
from tritoncomm.p2p.neighbours import Endpoint, Line, Way

__all__ = ["Posted", "keep", "move", "post", "start"]

_MOST_UNWAITED = 64


def _failure(end: Endpoint, name: str, x: Tensor, error: Exception) -> PeerError:
    what = f"send {x.nbytes} bytes to" if end.is_send else f"receive {x.nbytes} bytes from"
    return PeerError(f"{name}: {end.stage} could not {what} rank {end.peer}: {error}")


class Posted:
    """A transfer under way; it keeps its buffers alive until it has been waited for, and its group never."""

    __slots__ = ("_end", "_host", "_name", "_tensor", "_work")

    def __init__(self, work: Any, end: Endpoint, x: Tensor, name: str, host: Tensor | None = None) -> None:
        self._work, self._end, self._tensor, self._name, self._host = work, end, x, name, host

    def wait(self) -> None:
        """Afterwards the source may be reused or freed, or the result is there (on a GPU: in stream order).

        Raises:
            PeerError: the other side died or did not come within the group's timeout.
        """
        if self._work is None:
            return
        end = self._end
        try:
            self._work.wait()
        except RuntimeError as error:
            raise _failure(end, self._name, self._tensor, error) from error
        if self._host is not None and not end.is_send:
            self._tensor.detach().copy_(self._host)
        self._work = self._host = None
        queue = None if end.queue is None else end.queue()
        if queue is not None and self in queue:
            while queue.popleft() is not self:  # those posted before it in the same direction are done as well
                pass

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()


def keep(handles: Iterable[Posted]) -> None:
    """Hold sends until they were waited for: a handle that the caller drops must not take the send with it."""
    for posted in handles:
        queue = None if posted._end.queue is None else posted._end.queue()
        if queue is not None:
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
    together = [way for way in ways if way.modes[tensors[way.key].is_cuda] == "batched"]
    posted = {}
    if together:
        works = _batch([(way, tensors[way.key]) for way in together])
        for way, work in zip(together, works, strict=True):
            posted[way.key] = Posted(work, way.end, tensors[way.key], name)
    for way in ways:
        if way.key not in posted:
            posted[way.key] = start(way, name, tensors[way.key])
    return posted


def start(way: Way, name: str, x: Tensor) -> Posted:
    """One transfer of ``post``, on its own.

    Raises:
        PeerError: the backend refuses, because the peer is known to be gone.
    """
    _, is_send, place, group, modes, end = way
    host = _on_host(x, is_send) if modes[x.is_cuda] == "host" else None
    try:
        work = (group.send if is_send else group.recv)([x if host is None else host], place, 0)
    except RuntimeError as error:
        raise _failure(end, name, x, error) from error
    return Posted(work, end, x, name, host)


def move(line: Line, name: str, tensors: dict[str, Tensor], batched: bool) -> None:
    """``post`` and wait for everything, without a handle for each.

    Raises:
        PeerError: a peer died or did not come within the group's timeout.
    """
    works, handles = [], []
    for way in line.batch if batched else line.singles:
        key, is_send, place, group, modes, end = way
        if key not in tensors:
            continue
        x = tensors[key]
        mode = modes[x.is_cuda]
        if mode != "direct":
            if mode == "batched":  # those come first
                handles += post(line, name, tensors, batched).values()
                break
            handles.append(start(way, name, x))
            continue
        try:
            works.append(((group.send if is_send else group.recv)([x], place, 0), end, x))
        except RuntimeError as error:
            raise _failure(end, name, x, error) from error
    for work, end, x in works:
        try:
            work.wait()
        except RuntimeError as error:
            raise _failure(end, name, x, error) from error
    for handle in handles:
        handle.wait()


def _batch(transfers: list[tuple[Way, Tensor]]) -> list[Any]:
    """All in one call of the backend; a work for each."""
    calls = [dist.P2POp(dist.isend if way.is_send else dist.irecv, x, way.end.peer, way.group) for way, x in transfers]
    works = dist.batch_isend_irecv(calls)
    return works if len(works) == len(transfers) else works[:1] * len(transfers)  # coalesced: one for all


def _on_host(x: Tensor, is_send: bool) -> Tensor:
    """Memory to send from or receive into, pinned for a CUDA tensor."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    if is_send:
        host.copy_(x.detach())
    return host
