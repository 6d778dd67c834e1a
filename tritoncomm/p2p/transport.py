"""Transfer: one message in one direction between two ranks. The only caller of the process groups' send and recv.

Up to four transfers are posted together or one by one. Where both neighbours are the same rank, activations go before
gradients on both sides, so that the two cannot be confused; tags are not relied on (NCCL has none). Gloo does not carry
CUDA tensors between two ranks: their transfers go through pinned host memory.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core.backend import (
    InFlight,
    Transfer,
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

__all__ = ["Posted", "keep_alive", "post", "post_and_wait", "post_one"]

_MAX_UNWAITED = 64


def _failure(end: Endpoint, name: str, x: Tensor, error: RuntimeError) -> Exception:
    """Return the error to raise for ``error`` of the transfer of ``x``, and report it to the observer."""
    doing = f"send {x.nbytes} bytes to" if end.is_send else f"receive {x.nbytes} bytes from"
    if is_not_carried(error):
        return UnsupportedError(f"{name}: {end.stage} cannot {doing} rank {end.peer}: {error}")
    if not is_backend_error(error):
        return noted(error, name, f"where {end.stage} wanted to {doing} rank {end.peer}")
    failure = PeerError(f"{name}: {end.stage} could not {doing} rank {end.peer}: {error}{advice()}")
    record.failed(name, failure)
    return failure


class Posted(InFlight):
    """A transfer in flight; it keeps its buffers alive until it has been waited for, but never its group."""

    __slots__ = ("_call", "_end", "_host", "_name", "_tensor")

    def __init__(self, work: Any, direction: Direction, x: Tensor, name: str, host: Tensor | None = None) -> None:
        # A hop between CPUs makes up to four of these, at a microsecond for each call of a function here.
        self._work, self._buffers = work, ()
        if x.is_cuda:
            InFlight.__init__(self, work, direction.group, x)
        self._end, self._tensor, self._name, self._host = direction.end, x, name, host
        self._call = None if record.hooks.observer is None else record.current(name)

    def wait(self) -> None:
        """Wait for the transfer; on a GPU order the current stream behind it. A second wait returns at once."""
        if self._work is None:
            return
        end = self._end
        try:
            self._work.wait() if self._call is None else record.wait(self._call, self._work)
        except RuntimeError as error:
            raise_for(error, _failure(end, self._name, self._tensor, error))
        # Gloo carries no CUDA tensors between ranks: this one arrived in pinned host memory.
        if self._host is not None and not end.is_send:
            self._tensor.detach().copy_(self._host)
        self._work = self._host = None
        if self._buffers:
            released(self._buffers)
            self._buffers = ()
        queue = None if end.queue is None else end.queue()
        if queue is not None and self in queue:
            while queue.popleft() is not self:  # earlier sends to the same peer are complete as well
                pass

    def is_completed(self) -> bool:
        """Whether ``wait()`` returns without waiting for the backend."""
        return self._work is None or self._work.is_completed()


def keep_alive(handles: Iterable[Posted]) -> None:
    """Keep pending sends alive after their handles are dropped, 64 per peer; one more waits for the oldest."""
    # A dropped handle must not free a buffer in flight, nor order a stream behind the send. The stream would wait for
    # the receiver, which may need a later result of the stream.
    for posted in handles:
        queue = _queued(posted)
        if queue is not None and len(queue) > _MAX_UNWAITED:
            queue[0].wait()


def _queued(posted: Posted) -> Queue | None:
    """Append a send to the queue of its peer, and return the queue; None for a transfer that is not queued."""
    # Receives have no queue, and a group that is gone has none either.
    queue = None if posted._end.queue is None else posted._end.queue()
    if queue is not None and posted._tensor.is_cuda and posted._host is None:
        # A CUDA graph joins a captured send when its handle is dropped.
        if torch.cuda.is_current_stream_capturing():
            return None
        # Completed sends of a GPU's memory are released here.
        while queue and queue[0].is_completed():
            queue.popleft()
    if queue is not None:
        queue.append(posted)
    return queue


def _abandon(handles: Iterable[Posted]) -> None:
    """Give up transfers in flight of a hop that fails: keep each send of a GPU's memory until it has completed."""
    for posted in handles:
        # Only memory of a GPU is in _buffers: the backend keeps host memory itself. A receive into a GPU's memory has
        # no queue, and orders the current stream behind it when its handle is dropped.
        if posted._buffers:
            _queued(posted)


def post(neighbours: Neighbours, name: str, wires: dict[str, Tensor], batched: bool) -> dict[str, Posted]:
    """Start the transfers of ``wires``, contiguous and of dtypes that backends move; return handles as posted."""
    directions = [each for each in (neighbours.batch if batched else neighbours.singles) if each.key in wires]
    posted: dict[str, Posted] = {}
    try:
        # ``modes`` are indexed by ``is_cuda``: the mode of CPU tensors, then the mode of CUDA tensors.
        together = [each for each in directions if each.modes[wires[each.key].is_cuda] == "batched"]
        if together:
            posted |= _post_batch(together, name, wires)
        for each in directions:
            if each.key not in posted:
                posted[each.key] = post_one(each, name, wires[each.key])
    except BaseException:
        _abandon(posted.values())
        raise
    return posted


def post_one(direction: Direction, name: str, x: Tensor) -> Posted:
    """Start the transfer of ``x`` in one direction, outside of a batch; return its handle."""
    _, is_send, group_peer, group, modes, end = direction
    host = _on_host(x, is_send) if modes[x.is_cuda] == "host" else None
    live = group() or _alive(group)  # which raises
    try:
        work = (live.send if is_send else live.recv)([x if host is None else host], group_peer, 0)
    except RuntimeError as error:
        raise_for(error, _failure(end, name, x, error))
    return Posted(work, direction, x, name, host)


def post_and_wait(neighbours: Neighbours, name: str, wires: dict[str, Tensor], batched: bool) -> None:
    """Start transfers, with the arguments of ``post``, and wait for all of them."""
    # Not by ``post``, whose handles cost the host 1.5 us each: a hop that sends one tensor takes 6 us, as Megatron's
    # does. So a transfer that is started by itself gets no handle.
    works, handles = [], []
    directions = neighbours.directions[bool(batched)]
    # Several transfers are started in the order of ``directions``. One transfer alone has no order.
    keys = directions if len(wires) > 1 else wires
    try:
        for key in keys:
            if key not in wires:
                continue
            x, direction = wires[key], directions[key]
            _, is_send, group_peer, group, modes, end = direction
            if (mode := modes[x.is_cuda]) != "direct":
                if mode == "batched":  # the first key is one of these, so that nothing was started: all go by ``post``
                    handles += post(neighbours, name, wires, batched).values()
                    break
                handles.append(post_one(direction, name, x))
                continue
            live = group() or _alive(group)
            try:
                works.append(((live.send if is_send else live.recv)([x], group_peer, 0), direction, x))
            except RuntimeError as error:
                raise_for(error, _failure(end, name, x, error))
        for work, direction, x in works:
            try:
                work.wait()
            except RuntimeError as error:
                raise_for(error, _failure(direction.end, name, x, error))
        for handle in handles:
            handle.wait()
    except BaseException:
        _abandon((*[Posted(work, direction, x, name) for work, direction, x in works], *handles))
        raise


def _alive(group: Any) -> ProcessGroup:
    """Return the process group of a weak reference; reject a group that has been destroyed."""
    live = group()
    if live is None:
        raise GroupError("the process group of this transfer has been destroyed")
    return live


def _post_batch(directions: list[Direction], name: str, wires: dict[str, Tensor]) -> dict[str, Posted]:
    """Start the transfers of ``directions``, which share one group, in one call of the backend; return handles."""
    first = directions[0]
    group = first.group() or _alive(first.group)
    transfers = [Transfer(each.group_peer, wires[each.key], each.is_send) for each in directions]
    try:
        works = batch(transfers, group)
    except RuntimeError as error:
        raise_for(error, _failure(first.end, name, wires[first.key], error))
    if len(works) < len(directions):  # one work for all: every handle waits for it
        works *= len(directions)
    return {each.key: Posted(work, each, wires[each.key], name) for each, work in zip(directions, works, strict=True)}


def _on_host(x: Tensor, is_send: bool) -> Tensor:
    """Return host memory of the shape of ``x``, pinned if ``x`` is on a GPU, with the values of ``x`` for a send."""
    host = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
    if is_send:
        host.copy_(x.detach())
    return host
