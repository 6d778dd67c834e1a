"""Neighbours of a pipeline stage: the directions of its transfers, their process groups, and the order of posting.

A transfer between neighbours on the ring of a group is part of a batch. Transfers of any other pair of ranks (a
neighbour that the caller names, in the pipeline's group or not) are posted one by one. NCCL creates a communicator of
the whole group for a batch, so the first batch of a group waits until all ranks of the group post one. A single
transfer connects only its two ranks over torch's nccl-lazy, and over its older nccl without a bound device. nccl2 has
one communicator and stream for all transfers of a group.
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

# Orders of a batch. If one rank is both neighbours, activations come first at both ends.
_KEYS = ("send_prev", "recv_prev", "send_next", "recv_next")
_TWO_STAGES = ("send_next", "recv_prev", "send_prev", "recv_next")

Queue = deque[Any]


class _Shared(NamedTuple):
    """State that all neighbours of one process group share.

    Attributes:
        backend: name of the backend that carries CUDA tensors of the group; empty if none does.
        queues: sends in flight whose handles were dropped or are pending, by the receiver's rank in the group.
        neighbours: by (prev, next, outside).
    """

    backend: str
    queues: dict[int, Queue]
    neighbours: "dict[Any, Neighbours]"


# No value holds a strong reference to a group, or a destroyed group would keep its descriptors and threads.
_shared: PerGroup[_Shared] = PerGroup()


def _shared_by(group: ProcessGroup) -> _Shared:
    """Return the shared state of a process group, made at the first call."""
    shared = _shared.get(group)
    if shared is None:
        shared = _shared.set(group, _Shared(cuda_backend(group), {}, {}))
    return shared


def posting_order(key: str, source: int, target: int, in_ring: bool) -> tuple[bool, int, int, int]:
    """Compute the sort key of a transfer, equal on its sender and its receiver.

    Args:
        key: the key of either side.
        source, target: ranks of sender and receiver in the ring's group; global ranks outside of it.
    """
    # Ranks that post in this order cannot deadlock, even if a transfer blocks until its other side is posted. The
    # smallest transfer of the job that is still open is the next one of both its ranks. On a ring the order is
    # Megatron's: activations first, and even stages send while odd ones receive.
    is_gradient = key in ("send_prev", "recv_next")
    return is_gradient, source % 2 if in_ring else 2, -source if is_gradient else source, target


class Endpoint(NamedTuple):
    """This rank's end of a transfer, as errors name it; without a reference to its group.

    Attributes:
        stage: this stage and rank in words.
        peer: global rank of the other end.
        queue: for a send: weak reference to the sends in flight to the same peer, dead once their group is gone.
    """

    stage: str
    is_send: bool
    peer: int
    queue: "weakref.ref[Queue] | None"


class Direction(NamedTuple):
    """Direction of a transfer: from or to one neighbour, and how it is posted.

    Attributes:
        group_peer: the peer's rank in ``group``.
        modes: how to post CPU tensors, and CUDA tensors: ``direct``, ``batched`` (all in one call) or ``host`` (through
            pinned memory).
    """

    key: str
    is_send: bool
    group_peer: int
    group: "weakref.ref[ProcessGroup]"
    modes: tuple[str, str]
    end: Endpoint


class Neighbours:
    """A stage and its neighbours, immutable. Groups are referenced weakly: callers keep them alive.

    Attributes:
        group: the process group of the stages.
        outside: the group for a neighbour that is not in ``group``, if there may be one.
        prev: global rank of the previous stage; of the last stage for the first one.
        next: global rank of the next stage; of the first stage for the last one.
        rank: global rank of this stage.
        stage: rank of this stage in the group.
        stages: ranks in the group.
        is_single_rank: whether this rank is its own neighbour on both sides.
        backend: carries the group's CUDA tensors, empty where none does.
        adjacent: the keys of the transfers whose other end is next to this stage on the ring.
        batch: the directions in the order of a batch; directions that are posted one by one come last.
        singles: the directions in an order that cannot deadlock on a backend with blocking single calls.
        directions: the directions of ``singles`` by key, and the directions of ``batch`` by key: ``[batched]``.
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
        self.adjacent = frozenset(key for key in keys if peers[self.peer(key)].is_adjacent)
        batched = [key for key in keys if key in self.adjacent]
        batched += [key for key in ordered if key not in self.adjacent]
        self.batch = tuple(self._direction(key, peers[self.peer(key)]) for key in batched)
        # Two stages that each send before they receive would wait for each other where a group has one stream for all
        # transfers. So the sends of the odd one go over the default group; UCC needs no second group.
        other = None if len(ranks) != 2 or "ucc" in dist.get_backend(group) else dist.group.WORLD
        singles = []
        for key in ordered:
            peer = peers[self.peer(key)]
            _, sender_parity, *_ = order[key]  # as ``posting_order`` has it
            if other is not None and sender_parity == 1:
                peer = peer._replace(group=other, group_peer=dist.get_group_rank(other, peer.rank))
            # As of a peer that is not adjacent, so that its mode is not ``batched``.
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
        """Return the neighbours of this rank on the ring of ``group``, or named ones; made once per group.

        Args:
            prev, next: global ranks; None for the ring's.
            outside: the group of a named neighbour that is not in ``group``.
        """
        shared, key = _shared_by(group), (prev, next, None if outside is None else weakref.ref(outside))
        neighbours = shared.neighbours.get(key)
        if neighbours is None:
            neighbours = shared.neighbours[key] = cls(group, prev, next, outside)
        return neighbours

    def peer(self, key: str) -> int:
        """Return the global rank at the other end of the transfer ``key``."""
        return self.prev if key.endswith("prev") else self.next

    def channel(self, key: str) -> str:
        """Return the name of the group that both ends of the transfer ``key`` share; ``-`` where they share none."""
        group = self.group()
        return group.group_name if group is not None and self.peer(key) in dist.get_process_group_ranks(group) else "-"

    def default_device(self) -> torch.device:
        """Return the current GPU if the group carries CUDA tensors over another backend than Gloo, else the CPU."""
        return default_device(self.backend)

    def __str__(self) -> str:
        return f"stage {self.stage} of {self.stages} (rank {self.rank})"

    def _peer(self, rank: int, ranks: list[int], group: ProcessGroup, outside: ProcessGroup | None) -> "_Peer":
        """Find a neighbour by its global rank in ``group``, whose global ranks are ``ranks``, else in ``outside``."""
        if rank in ranks:
            group_peer = ranks.index(rank)
            # The distance on the ring: 0 is this rank itself.
            is_adjacent = (group_peer - self.stage) % len(ranks) in (0, 1, len(ranks) - 1)
            return _Peer(rank, group_peer, group, in_ring=True, is_adjacent=is_adjacent)
        outer = [] if outside is None else dist.get_process_group_ranks(outside)
        if outside is None or rank not in outer:
            raise GroupError(f"rank {rank} is not in the group of ranks {outer or ranks}")
        return _Peer(rank, dist.get_group_rank(outside, rank), outside, in_ring=False, is_adjacent=False)

    def _order(self, key: str, peer: "_Peer") -> tuple[bool, int, int, int]:
        """Compute the ``posting_order`` of the transfer ``key`` between this rank and ``peer``."""
        own, other = (self.stage, peer.group_peer) if peer.in_ring else (self.rank, peer.rank)
        source, target = (own, other) if key.startswith("send") else (other, own)
        return posting_order(key, source, target, peer.in_ring)

    def _direction(self, key: str, peer: "_Peer") -> Direction:
        """Make the direction of the transfer ``key``: through host memory on Gloo, in a batch for an adjacent peer."""
        shared, is_send = _shared_by(peer.group), key.startswith("send")
        queue = weakref.ref(shared.queues.setdefault(peer.group_peer, deque())) if is_send else None
        modes = ("direct", "host" if shared.backend == "gloo" else "batched" if peer.is_adjacent else "direct")
        end = Endpoint(str(self), is_send, peer.rank, queue)
        return Direction(key, is_send, peer.group_peer, weakref.ref(peer.group), modes, end)


class _Peer(NamedTuple):
    """A neighbour of this stage, by its global rank.

    Attributes:
        group_peer: rank of the neighbour in ``group``, which both ends use.
        in_ring: whether the neighbour is in the pipeline's group.
        is_adjacent: whether the neighbour is next to this stage on the ring, so that a batch serves both.
    """

    rank: int
    group_peer: int
    group: ProcessGroup
    in_ring: bool
    is_adjacent: bool
