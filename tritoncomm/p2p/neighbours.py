"""The neighbours of a pipeline stage: possible transfers, the process group of each, and the order of posting them.

A transfer between neighbours on the ring of a group is part of a batch. Any other pair of ranks (a neighbour that the
caller names, inside the pipeline's group or not) exchanges one by one: NCCL creates a communicator of the whole group
for a batch, so the first batch of a group waits until all of its ranks post one. A single transfer connects only its
two ranks over torch's nccl-lazy, and over its older nccl without a bound device. nccl2 has one communicator and stream
for all transfers of a group.
"""

import weakref
from collections import deque
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tritoncomm.core.backend import cuda_backend, default_device
from tritoncomm.core.validation import PerGroup, ranks_of
from tritoncomm.errors import GroupError

__all__ = ["Direction", "Endpoint", "Neighbours", "Queue", "posting_order"]

_KEYS = ("send_prev", "recv_prev", "send_next", "recv_next")
_TWO_STAGES = ("send_next", "recv_prev", "send_prev", "recv_next")

Queue = deque[Any]


class _Shared(NamedTuple):
    """State per process group.

    Attributes:
        backend: carries its CUDA tensors, empty where none does.
        queues: sends that have not been waited for, by the receiver's rank in the group.
        neighbours: those looked up so far, by (prev, next, outside).
    """

    backend: str
    queues: dict[int, Queue]
    neighbours: "dict[Any, Neighbours]"


# No value holds a strong reference to a group, or a destroyed group would keep its descriptors and threads.
_shared: PerGroup[_Shared] = PerGroup()


def _shared_by(group: ProcessGroup) -> _Shared:
    shared = _shared.get(group)
    if shared is None:
        shared = _shared.set(group, _Shared(cuda_backend(group), {}, {}))
    return shared


def posting_order(key: str, source: int, target: int, in_ring: bool) -> tuple[bool, int, int, int]:
    """Sort key of a transfer, equal on both of its ranks.

    Ranks that post their transfers in this order cannot deadlock, even if every transfer blocks until its other side is
    posted: the smallest transfer of the job that is still open is the next one of both its ranks. On a ring this is
    Megatron's order: activations first, and even stages send while odd ones receive.

    Args:
        key: of either side: send_next and recv_prev carry activations, send_prev and recv_next gradients.
        source: the sender's rank in the ring's group, or global rank outside of it.
        target: the receiver's.
        in_ring: whether both are in the ring's group.
    """
    is_gradient = key in ("send_prev", "recv_next")
    return is_gradient, source % 2 if in_ring else 2, -source if is_gradient else source, target


class Endpoint(NamedTuple):
    """One end of a transfer, without a reference to its group.

    Attributes:
        stage: this rank, as errors name it.
        is_send: whether it sends.
        peer: global rank of the other end.
        queue: of a sender: the sends to that rank that have not been waited for; dead once their group is gone.
    """

    stage: str
    is_send: bool
    peer: int
    queue: "weakref.ref[Queue] | None"


class Direction(NamedTuple):
    """One direction of transfer.

    Attributes:
        key: send_prev, recv_prev, send_next or recv_next.
        is_send: whether this rank sends.
        group_peer: the peer's rank in ``group``.
        group: the process group that carries it.
        modes: of CPU and of CUDA tensors: ``direct``, ``batched`` (all in one call), ``host`` (through pinned memory).
        end: how errors name it, and the queue of its sends.
    """

    key: str
    is_send: bool
    group_peer: int
    group: "weakref.ref[ProcessGroup]"
    modes: tuple[str, str]
    end: Endpoint


class Neighbours:
    """A stage and its neighbours, unchanged once made. The groups are referenced weakly: callers keep them alive.

    Attributes:
        group: the process group of the stages.
        outside: the group for a neighbour that is not in ``group``, if there may be one.
        prev: global rank of the previous stage, on a ring.
        next: global rank of the next stage.
        rank: global rank of this stage.
        stage: its rank in the group.
        stages: ranks in the group.
        is_single_rank: whether this rank is its own neighbour on both sides.
        backend: carries the group's CUDA tensors, empty where none does.
        batch: the directions in the order of a batch, those that are posted one by one last.
        singles: the directions in an order that cannot deadlock on a backend with blocking single calls.
        directions: those of ``singles`` and of ``batch``, by key.
    """

    def __init__(self, group: ProcessGroup, prev: int | None, next: int | None, outside: ProcessGroup | None) -> None:
        ranks = ranks_of(group, "p2p")
        self.group, self.outside = weakref.ref(group), None if outside is None else weakref.ref(outside)
        self.stage, self.stages, self.rank = group.rank(), len(ranks), ranks[group.rank()]
        self.prev: int = ranks[self.stage - 1] if prev is None else prev
        self.next: int = ranks[(self.stage + 1) % len(ranks)] if next is None else next
        self.is_single_rank = self.prev == self.next == self.rank
        self.backend = _shared_by(group).backend
        peers = {rank: self._peer(rank, ranks, group, outside) for rank in (self.prev, self.next)}
        keys = _TWO_STAGES if self.prev == self.next else _KEYS
        order = {key: self._order(key, peers[self.peer(key)]) for key in keys}
        ordered = sorted(keys, key=order.__getitem__)
        batched = [key for key in keys if peers[self.peer(key)].is_adjacent]
        batched += [key for key in ordered if not peers[self.peer(key)].is_adjacent]
        self.batch = tuple(self._direction(key, peers[self.peer(key)]) for key in batched)
        # Two stages use the default group for what the odd one of them sends.
        other = None if len(ranks) != 2 or "ucc" in dist.get_backend(group) else dist.group.WORLD
        singles = []
        for key in ordered:
            peer = peers[self.peer(key)]
            if other is not None and order[key][1] == 1:
                peer = peer._replace(group=other, group_peer=dist.get_group_rank(other, peer.rank))
            singles.append(self._direction(key, peer._replace(is_adjacent=False)))
        self.singles = tuple(singles)
        self.directions = ({each.key: each for each in self.singles}, {each.key: each for each in self.batch})

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        prev: int | None = None,
        next: int | None = None,
        outside: ProcessGroup | None = None,
    ) -> "Neighbours":
        """The ring of ``group``, or other neighbours (global ranks); built once per group.

        Two stages use the default group for every other single call: one group may have one stream for all of them.

        Raises:
            GroupError: a neighbour is in neither group.
        """
        shared, key = _shared_by(group), (prev, next, None if outside is None else weakref.ref(outside))
        neighbours = shared.neighbours.get(key)
        if neighbours is None:
            neighbours = shared.neighbours[key] = cls(group, prev, next, outside)
        return neighbours

    def peer(self, key: str) -> int:
        """Global rank at the other end of ``send_prev``, ``recv_next``, ..."""
        return self.prev if key.endswith("prev") else self.next

    def channel(self, key: str) -> str:
        """Name of the group over which ``key`` is exchanged, the same at both ends: a peer of another ring has none."""
        group = self.group()
        return group.group_name if group is not None and self.peer(key) in dist.get_process_group_ranks(group) else "-"

    def default_device(self) -> torch.device:
        """The current GPU where the group carries CUDA tensors over NCCL, else the CPU."""
        return default_device(self.backend)

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.stages} (rank {self.rank})"

    def _peer(self, rank: int, ranks: list[int], group: ProcessGroup, outside: ProcessGroup | None) -> "_Peer":
        if rank in ranks:
            group_peer = ranks.index(rank)
            is_adjacent = (group_peer - self.stage) % len(ranks) in (0, 1, len(ranks) - 1)
            return _Peer(rank, group_peer, group, True, is_adjacent)
        outer = [] if outside is None else dist.get_process_group_ranks(outside)
        if outside is None or rank not in outer:
            raise GroupError(f"rank {rank} is not in the group of ranks {outer or ranks}")
        return _Peer(rank, dist.get_group_rank(outside, rank), outside, False, False)

    def _order(self, key: str, peer: "_Peer") -> tuple[bool, int, int, int]:
        own, other = (self.stage, peer.group_peer) if peer.in_ring else (self.rank, peer.rank)
        source, target = (own, other) if key.startswith("send") else (other, own)
        return posting_order(key, source, target, peer.in_ring)

    def _direction(self, key: str, peer: "_Peer") -> Direction:
        shared, is_send = _shared_by(peer.group), key.startswith("send")
        queue = weakref.ref(shared.queues.setdefault(peer.group_peer, deque())) if is_send else None
        modes = ("direct", "host" if shared.backend == "gloo" else "batched" if peer.is_adjacent else "direct")
        end = Endpoint(str(self), is_send, peer.rank, queue)
        return Direction(key, is_send, peer.group_peer, weakref.ref(peer.group), modes, end)


class _Peer(NamedTuple):
    """A neighbour.

    Attributes:
        rank: its global rank.
        group_peer: its rank in ``group``.
        group: the group that both ends use.
        in_ring: whether it is in the pipeline's group.
        is_adjacent: whether it is next to this stage on the ring, so that a batch serves it.
    """

    rank: int
    group_peer: int
    group: ProcessGroup
    in_ring: bool
    is_adjacent: bool
