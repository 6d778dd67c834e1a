"""A stage and its neighbours: the transfers there can be, the group each goes over, and the order they are posted in.

A transfer between neighbours on the ring of a group is part of a batch. Any other pair of ranks (a neighbour named by
the caller, inside the pipeline's group or not) exchanges one by one: NCCL sets up a communicator of the whole group for
a batch, so the first batch of a group waits until all of its ranks post one, and one of the single transfers connects
no more than its two ranks.
"""

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from tritoncomm.errors import GroupError
from tritoncomm.p2p.devices import cuda_backend

__all__ = ["Endpoint", "Line", "Way", "posting_order"]

_KEYS = ("send_prev", "recv_prev", "send_next", "recv_next")
_TWO_STAGES = ("send_next", "recv_prev", "send_prev", "recv_next")

Queue = deque[Any]


class _Shared:
    """What all lines of a group have in common.

    Attributes:
        backend: carries its CUDA tensors, empty where none does.
        queues: sends that nobody waited for yet, by the receiver's rank in the group.
    """

    __slots__ = ("backend", "queues")

    def __init__(self, group: ProcessGroup) -> None:
        self.backend = cuda_backend(group)
        self.queues: dict[int, Queue] = {}


# Nothing in here refers to the group: it dies with the group, whoever destroys that.
_shared: weakref.WeakKeyDictionary[ProcessGroup, _Shared] = weakref.WeakKeyDictionary()


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
    """One end of a transfer, which keeps no group alive.

    Attributes:
        stage: this rank, as errors name it.
        is_send: whether it sends.
        peer: global rank of the other end.
        queue: of a sender: the sends to that rank that nobody waited for yet; dead once their group is gone.
    """

    stage: str
    is_send: bool
    peer: int
    queue: "weakref.ref[Queue] | None"


class Way(NamedTuple):
    """One direction of a line.

    Attributes:
        key: send_prev, recv_prev, send_next or recv_next.
        is_send: whether this rank sends.
        place: the peer's rank in ``group``.
        group: the process group that carries it.
        modes: of CPU and of CUDA tensors: ``direct``, ``batched`` (all in one call), ``host`` (through pinned memory).
        end: what errors say.
    """

    key: str
    is_send: bool
    place: int
    group: ProcessGroup
    modes: tuple[str, str]
    end: Endpoint


@dataclass(frozen=True, slots=True)
class Line:
    """A stage and its neighbours.

    Attributes:
        group: the process group of the stages.
        outside: the group for a neighbour that is not in ``group``, if there may be one.
        prev: global rank of the stage before, on a ring.
        next: global rank of the stage after.
        rank: global rank of this stage.
        stage: its rank in the group.
        stages: ranks in the group.
        batch: the directions in the order of a batch, those that are posted one by one last.
        singles: the directions in an order that no backend which blocks in single calls can deadlock on.
        ways: the directions of singles and of a batch, by key.
    """

    group: ProcessGroup
    outside: ProcessGroup | None
    prev: int
    next: int
    rank: int
    stage: int
    stages: int
    batch: tuple[Way, ...]
    singles: tuple[Way, ...]
    ways: tuple[dict[str, Way], dict[str, Way]]
    sides: dict[str, "Line | None"] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        group: ProcessGroup,
        prev: int | None = None,
        next: int | None = None,
        outside: ProcessGroup | None = None,
    ) -> "Line":
        """The ring of ``group``, or other neighbours (global ranks).

        Two stages use the default group for every other single call, so that both directions run at once.

        Raises:
            GroupError: a neighbour is in neither group.
        """
        return _Plan(group, prev, next, outside).line()

    def peer(self, key: str) -> int:
        """Global rank at the other end of ``send_prev``, ``recv_next``, ..."""
        return self.prev if key.endswith("prev") else self.next

    @property
    def is_alone(self) -> bool:
        """Whether this rank is its own neighbour on both sides."""
        return self.prev == self.next == self.rank

    def __str__(self) -> str:
        return _stage(self.stage, self.stages, self.rank)


def _stage(stage: int, stages: int, rank: int) -> str:
    return f"stage {stage} of {stages} (rank {rank})"


class _Plan:
    """What the directions of a line are worked out from."""

    def __init__(self, group: ProcessGroup, prev: int | None, next: int | None, outside: ProcessGroup | None) -> None:
        self.group, self.outside, self.stage = group, outside, group.rank()
        self.ranks = ranks = dist.get_process_group_ranks(group)
        self.prev = ranks[self.stage - 1] if prev is None else prev
        self.next = ranks[(self.stage + 1) % len(ranks)] if next is None else next
        self.text = _stage(self.stage, len(ranks), ranks[self.stage])
        outer = [] if outside is None else dist.get_process_group_ranks(outside)
        for rank in (self.prev, self.next):
            if rank not in ranks and rank not in outer:
                raise GroupError(f"rank {rank} is not in the group of ranks {outer or ranks}")

    def line(self) -> Line:
        prev, next = self._side(self.prev), self._side(self.next)
        sides = {"send_prev": prev, "recv_prev": prev, "send_next": next, "recv_next": next}
        keys = _TWO_STAGES if self.prev == self.next else _KEYS
        order = {key: self._order(key, sides[key]) for key in keys}
        ordered = sorted(keys, key=order.__getitem__)
        batch = [self._way(key, sides[key]) for key in keys if sides[key].is_near]
        batch += [self._way(key, sides[key]) for key in ordered if not sides[key].is_near]
        singles, other = [], self._other()
        for key in ordered:
            side = sides[key]
            if other is not None and order[key][1] == 1:  # what the odd one of two stages sends
                side = side._replace(group=other, place=dist.get_group_rank(other, side.peer))
            singles.append(self._way(key, side._replace(is_near=False)))
        ways = {way.key: way for way in singles}, {way.key: way for way in batch}
        stage, ranks = self.stage, self.ranks
        return Line(
            self.group, self.outside, self.prev, self.next, ranks[stage], stage, len(ranks),
            tuple(batch), tuple(singles), ways,
        )  # fmt: skip

    def _side(self, peer: int) -> "_Side":
        if peer in self.ranks:
            place = self.ranks.index(peer)
            near = (place - self.stage) % len(self.ranks) in (0, 1, len(self.ranks) - 1)
            return _Side(peer, place, self.group, True, near)
        assert self.outside is not None
        return _Side(peer, dist.get_group_rank(self.outside, peer), self.outside, False, False)

    def _order(self, key: str, side: "_Side") -> tuple[bool, int, int, int]:
        own, other = (self.stage, side.place) if side.in_ring else (self.ranks[self.stage], side.peer)
        source, target = (own, other) if key.startswith("send") else (other, own)
        return posting_order(key, source, target, side.in_ring)

    def _other(self) -> ProcessGroup | None:
        """The group that two stages use for every other single call."""
        return None if len(self.ranks) != 2 or "ucc" in dist.get_backend(self.group) else dist.group.WORLD

    def _way(self, key: str, side: "_Side") -> Way:
        shared, is_send = _shared.get(side.group), key.startswith("send")
        if shared is None:
            shared = _shared[side.group] = _Shared(side.group)
        queue = weakref.ref(shared.queues.setdefault(side.place, deque())) if is_send else None
        modes = ("direct", "host" if shared.backend == "gloo" else "batched" if side.is_near else "direct")
        return Way(key, is_send, side.place, side.group, modes, Endpoint(self.text, is_send, side.peer, queue))


class _Side(NamedTuple):
    """A neighbour.

    Attributes:
        peer: its global rank.
        place: its rank in ``group``.
        group: the group that both ends use.
        in_ring: whether it is in the pipeline's group.
        is_near: whether it is next to this stage on the ring, so that a batch serves it.
    """

    peer: int
    place: int
    group: ProcessGroup
    in_ring: bool
    is_near: bool
