"""Transfers between neighbouring stages: the only caller of isend and irecv.

Up to four at once, posted together or one by one. Where both neighbours are the same rank, activations go before
gradients on both sides, so that the two cannot be confused; tags are not relied on (NCCL has none). Gloo does not carry
CUDA tensors between two ranks: those go through pinned host memory.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core.backend import (
    InFlight,
    advice,
    batch,
    is_backend_error,
    is_not_carried,
    noted,
    raise_for,
    released,
)
from tritoncomm.errors import GroupError, PeerError, UnsupportedError
from tritoncomm.p2p.neighbours import Direction, Endpoint, Neighbours, Queue

__all__ = ["Posted", "keep_alive", "post", "post_one"]

_MAX_UNWAITED = 64


def _failure(end: Endpoint, name: str, x: Tensor, error: RuntimeError) -> Exception:
    what = f"send {x.nbytes} bytes to" if end.is_send else f"receive {x.nbytes} bytes from"
    if is_not_carried(error):
        return UnsupportedError(f"{name}: {end.stage} cannot {what} rank {end.peer}: {error}")
    if not is_backend_error(error):
        return noted(error, name, f"where {end.stage} wanted to {what} rank {end.peer}")
    failure = PeerError(f"{name}: {end.stage} could not {what} rank {end.peer}: {error}{advice()}")
    record.failed(name, failure)
    return failure


class Posted(InFlight):
    """A transfer in flight; it keeps its buffers alive until it has been waited for, but never its group.

    Dropped without a wait, a transfer of a GPU's memory orders the current stream behind it.
    """

    __slots__ = ("_call", "_end", "_host", "_name", "_tensor")

    def __init__(self, work: Any, direction: Direction, x: Tensor, name: str, host: Tensor | None = None) -> None:
        InFlight.__init__(self, work, direction.group, x)
        self._end, self._tensor, self._name, self._host = direction.end, x, name, host
        self._call = record.current(name)

    def wait(self) -> None:
        """Afterwards the source may be reused or freed, or the result is there (on a GPU: in stream order).

        Raises:
            PeerError: the other side died or did not post its transfer within the group's timeout.
        """
        if self._work is None:
            return
        end = self._end
        try:
            record.wait(self._call, self._work)
        except RuntimeError as error:
            raise_for(error, _failure(end, self._name, self._tensor, error))
        if self._host is not None and not end.is_send:
            self._tensor.detach().copy_(self._host)
        released(self._buffers)
        self._work = self._host = None
        self._buffers = ()
        queue = None if end.queue is None else end.queue()
        if queue is not None and self in queue:
            while queue.popleft() is not self:  # earlier sends in the same direction are complete as well
                pass

    def is_completed(self) -> bool:
        """Whether ``wait()`` would not have to wait for the backend."""
        return self._work is None or self._work.is_completed()


def keep_alive(handles: Iterable[Posted]) -> None:
    """Keep pending sends alive: dropping a handle must not free a buffer in flight, nor order a stream behind it.

    A stream that waits for a send would wait for its receiver, which may need a later result of the stream. Sends of a
    GPU's memory are let go of here once they have completed; those that a CUDA graph captures are joined when dropped.
    """
    for posted in handles:
        queue = _queued(posted)
        if queue is not None and len(queue) > _MAX_UNWAITED:
            queue[0].wait()


def _queued(posted: Posted) -> Queue | None:
    """The queue of a send, which has it now; None for a receive, in a capture, and once the group is gone."""
    queue = None if posted._end.queue is None else posted._end.queue()
    if queue is not None and posted._tensor.is_cuda and posted._host is None:
        if torch.cuda.is_current_stream_capturing():
            return None
        while queue and queue[0].is_completed():
            queue.popleft()
    if queue is not None:
        queue.append(posted)
    return queue


def _abandon(handles: Iterable[Posted]) -> None:
    """A step fails with these transfers in flight: sends of a GPU's memory are kept until they have completed.

    Received memory is let go of behind its transfer when the handle is dropped. In host memory a backend drops both.
    """
    for posted in handles:
        if posted._buffers:
            _queued(posted)


def post(neighbours: Neighbours, name: str, tensors: dict[str, Tensor], batched: bool) -> dict[str, Posted]:
    """Start transfers; a handle for each, in the order of posting.

    Args:
        neighbours: of this stage.
        name: the public function, for errors.
        tensors: by ``send_prev``, ``recv_prev``, ``send_next``, ``recv_next``; contiguous, in dtypes the backend moves.
        batched: as one batch, or one by one.

    Raises:
        PeerError: the backend refuses, because a peer is known to be gone.
    """
    directions = [each for each in (neighbours.batch if batched else neighbours.singles) if each.key in tensors]
    posted: dict[str, Posted] = {}
    try:
        together = [each for each in directions if each.modes[tensors[each.key].is_cuda] == "batched"]
        if together:
            posted |= _post_batch(together, name, tensors)
        for each in directions:
            if each.key not in posted:
                posted[each.key] = post_one(each, name, tensors[each.key])
    except BaseException:
        _abandon(posted.values())
        raise
    return posted


def post_one(direction: Direction, name: str, x: Tensor) -> Posted:
    """One transfer of ``post``, on its own.

    Raises:
        PeerError: the backend refuses, because the peer is known to be gone.
    """
    _, is_send, group_peer, group, modes, end = direction
    host = _on_host(x, is_send) if modes[x.is_cuda] == "host" else None
    live = group() or _alive(group)
    try:
        work = (live.send if is_send else live.recv)([x if host is None else host], group_peer, 0)
    except RuntimeError as error:
        raise_for(error, _failure(end, name, x, error))
    return Posted(work, direction, x, name, host)


def _alive(group: Any) -> ProcessGroup:
    live = group()
    if live is None:
        raise GroupError("the process group of this transfer has been destroyed")
    return live


def _post_batch(directions: list[Direction], name: str, tensors: dict[str, Tensor]) -> dict[str, Posted]:
    """All of these, which have one group, in one call of the backend."""
    first = directions[0]
    group = first.group() or _alive(first.group)
    transfers = [(each.is_send, each.group_peer, tensors[each.key]) for each in directions]
    try:
        works = batch(transfers, group)
    except RuntimeError as error:
        raise_for(error, _failure(first.end, name, tensors[first.key], error))
    if len(works) < len(directions):  # one for all
        works *= len(directions)
    return {each.key: Posted(work, each, tensors[each.key], name) for each, work in zip(directions, works, strict=True)}


def _on_host(x: Tensor, is_send: bool) -> Tensor:
    """Memory to send from or receive into, pinned for a CUDA tensor."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    if is_send:
        host.copy_(x.detach())
    return host
