"""The plan of a resharding as one rank takes part in it: messages, buckets, and what they cost."""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from tritoncomm import record
from tritoncomm.core.cost import Rates, collective_seconds, pass_seconds
from tritoncomm.core.plan import Ints
from tritoncomm.errors import GroupError, ShapeError
from tritoncomm.reshard.cells import layers_of
from tritoncomm.reshard.layout import Array, Layout

__all__ = ["ALIGNMENT", "Bucket", "Item", "Local", "Side", "Transfers", "check", "digest"]

ALIGNMENT = 16
"""Bytes that the blocks of a tensor in a message start at a multiple of: the widest access of the copy kernels."""


@dataclass(frozen=True)
class Item:
    """One tensor to reshard.

    Attributes:
        name: in messages.
        source, target: its layouts.
        dtype: before.
        result: dtype afterwards.
        has_grad: a gradient comes back.
    """

    name: str
    source: Layout
    target: Layout
    dtype: torch.dtype
    result: torch.dtype
    has_grad: bool = False

    @property
    def carried(self) -> torch.dtype:
        """The dtype on the wire: the smaller of the two."""
        return self.result if self.result.itemsize < self.dtype.itemsize else self.dtype

    def reversed(self) -> "Item":
        """The way of the gradient."""
        return Item(self.name, self.target, self.source, self.result, self.dtype, self.has_grad)

    def __str__(self) -> str:
        grad = ", with gradient" if self.has_grad else ""
        return f"{self.dtype} to {self.result}{grad}, {self.source} to {self.target}"


@dataclass(frozen=True)
class Side:
    """What a rank sends, or receives, in one bucket: blocks in the order of the wire.

    Attributes:
        tensor: index of every block's tensor.
        start, size: of the blocks in their local tensors, ``[dims, blocks]``; tensors of fewer dims have leading ones.
        wire: byte offset of every block.
        counts: bytes for every position of the group, alignment included.
    """

    tensor: Array
    start: Array
    size: Array
    wire: Array
    counts: Ints

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the wire."""
        return sum(self.counts)

    @cached_property
    def messages(self) -> int:
        """Ranks on the other side."""
        return sum(count > 0 for count in self.counts)

    @cached_property
    def elements(self) -> Array:
        """Elements of every block."""
        return self.size.prod(0)


@dataclass(frozen=True)
class Local:
    """Blocks that stay on the rank: their tensors, and where they are in the source and in the target.

    Attributes:
        wire: byte offset of every block in the staging memory, if they go through it.
    """

    tensor: Array
    source: Array
    target: Array
    size: Array
    wire: Array

    @cached_property
    def elements(self) -> Array:
        """Elements of every block."""
        return self.size.prod(0)

    def pick(self, index: Array, wire: Array) -> "Local":
        """Those at an index, with other offsets."""
        return Local(self.tensor[index], self.source[:, index], self.target[:, index], self.size[:, index], wire)


@dataclass(frozen=True)
class Bucket:
    """One exchange: pack, one collective, unpack.

    Attributes:
        own: small blocks that stay on the rank: the pack puts them between what is sent and what arrives, and the
            unpack takes them from there, so that they cost no launches.
        own_bytes: of those, alignment included.
        local: larger ones, which are copied directly while the collective runs.
        is_quiet: no rank sends anything, so there is no collective.
    """

    send: Side
    recv: Side
    own: Local
    own_bytes: int
    local: Local
    is_quiet: bool


@dataclass(frozen=True)
class Transfers(record.Traffic):
    """What one rank does, bucket by bucket, and totals of all ranks.

    Attributes:
        items: the tensors.
        ranks: global ranks of the group.
        position: of this rank in the group.
        buckets: in order.
        sent, received: bytes of every rank on the wire, alignment included.
        lacking: bytes that every rank needs and does not have.
        messages: sent by every rank, all buckets together.
        largest: the most bytes that any rank sends or receives in one bucket: the extra memory on each side.
        critical: the most bytes that any rank sends or receives in a bucket, summed over the buckets.
        is_disjoint: no rank is in a source and in a target.
        sums: what arrives is added up, in the order of the senders.
    """

    items: tuple[Item, ...]
    ranks: Ints
    position: int
    buckets: tuple[Bucket, ...]
    sent: Array
    received: Array
    lacking: Array
    messages: Array
    largest: int
    critical: int
    is_disjoint: bool
    sums: bool

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes this rank sends, alignment included."""
        return int(self.sent[self.position])

    @cached_property
    def bytes_received(self) -> int:
        """Bytes this rank receives, alignment included."""
        return int(self.received[self.position])

    @cached_property
    def own_bytes(self) -> int:
        """Most bytes of small blocks that stay on this rank and go through the staging memory of a bucket."""
        return max((bucket.own_bytes for bucket in self.buckets), default=0)

    @cached_property
    def bytes_copied(self) -> int:
        """Bytes read plus written by this rank's passes: pack, unpack and local copies."""
        before, carried, after = self._itemsizes
        written = 2 * after if self.sums else after  # sums read what they are added to
        return sum(
            int((b.send.elements * (before + carried)[b.send.tensor]).sum())
            + int((b.recv.elements * (carried + written)[b.recv.tensor]).sum())
            + int((b.own.elements * (before + 2 * carried + written)[b.own.tensor]).sum())
            + int((b.local.elements * (before + written)[b.local.tensor]).sum())
            for b in self.buckets
        )

    @cached_property
    def _itemsizes(self) -> tuple[Array, Array, Array]:
        """Bytes of an element of every tensor: before, on the wire, and where it arrives."""
        sizes = [(i.dtype.itemsize, i.carried.itemsize, self.arrives(i).itemsize) for i in self.items]
        return tuple(np.array(sizes, np.int64).reshape(-1, 3).T)

    def arrives(self, item: Item) -> torch.dtype:
        """The dtype that an item is received into: sums are fp32, of fp64 fp64."""
        if not self.sums:
            return item.result
        return torch.float64 if item.result is torch.float64 else torch.float32

    @cached_property
    def bucket_launches(self) -> tuple[int, ...]:
        """Packs and unpacks of every bucket: one of each for all tensors that are copied, one per pair of dtypes cast.

        Sums take an unpack for every sender, and more where blocks of one sender overlap.
        """
        packs = [None if item.dtype is item.carried else (item.dtype, item.carried) for item in self.items]
        unpacks = [
            None if self.arrives(item) is item.carried and not self.sums else (item.carried, self.arrives(item))
            for item in self.items
        ]
        return tuple(self._launches(bucket, packs, unpacks) for bucket in self.buckets)

    def _launches(self, bucket: Bucket, packs: list[Any], unpacks: list[Any]) -> int:
        own, arriving = bucket.own.tensor.tolist(), bucket.recv.tensor.tolist()
        turns = np.concatenate(self.turns(bucket)).tolist()
        pairs = zip(turns, (*own, *arriving), strict=True)
        return len({packs[i] for i in (*bucket.send.tensor.tolist(), *own)}) + len({(t, unpacks[i]) for t, i in pairs})

    def turns(self, bucket: Bucket) -> tuple[Array, Array]:
        """The unpack that takes a block, by number: of small blocks that stay, and of blocks that arrive.

        One takes all of them. Sums take the senders one after the other, and blocks of a sender that overlap apart.
        """
        own, received = bucket.own, bucket.recv
        turns = np.zeros_like(own.tensor), np.zeros_like(received.tensor)
        if not self.sums:
            return turns
        overlap = [not item.source.is_single for item in self.items]
        turns[0][:] = layers_of(own.tensor, own.target, own.size, overlap) + self.first_turn(bucket, self.position)
        senders = np.searchsorted(np.cumsum(received.counts), received.wire, side="right")
        for sender in np.unique(senders).tolist():
            mine = senders == sender
            layers = layers_of(received.tensor[mine], received.start[:, mine], received.size[:, mine], overlap)
            turns[1][mine] = layers + self.first_turn(bucket, sender)
        return turns

    def first_turn(self, bucket: Bucket, sender: int) -> int:
        """The number of a sender's first unpack."""
        return sender * (len(bucket.own.tensor) + len(bucket.recv.tensor) + 1)

    @cached_property
    def launches(self) -> int:
        """Packs and unpacks of this rank; large blocks that stay are copied on top (``local_copies``)."""
        return sum(self.bucket_launches)

    @cached_property
    def local_copies(self) -> int:
        """Blocks that this rank copies directly from its own tensors to its own results."""
        return sum(len(bucket.local.tensor) for bucket in self.buckets)

    def seconds(self, rates: Rates) -> tuple[float, float]:
        """Predicted seconds of the local passes of this rank, and of the collectives."""
        collectives = sum(
            collective_seconds("all-to-all", bucket.send.nbytes, len(self.ranks), rates, bucket.recv.nbytes)
            for bucket in self.buckets
            if not bucket.is_quiet
        )
        return pass_seconds(self.bytes_copied, rates), collectives


def check(items: Sequence[Item], ranks: Sequence[int], name: str, *, tiles: bool = True) -> None:
    """Check what every rank can see: layouts that fit each other, and a group with all of their ranks.

    Raises:
        ShapeError: layouts of different shapes, or a source that is no tiling.
        GroupError: a rank of a layout is not in the group.
    """
    known = set(ranks)
    for item in items:
        if item.source.shape != item.target.shape:
            raise ShapeError(
                f"{name}: {item.name} is {list(item.source.shape)} in the source layout and "
                f"{list(item.target.shape)} in the target layout"
            )
        for side, layout in (("source", item.source), ("target", item.target)):
            missing = [rank for rank in layout.ranks if rank not in known]
            if missing:
                raise GroupError(
                    f"{name}: ranks {missing} of the {side} layout of {item.name} are not in the group {list(ranks)}"
                )
        if tiles and item.source.problem:
            raise ShapeError(f"{name}: the source layout of {item.name} is no tiling: {item.source.problem}")


def digest(items: Sequence[Item], options: tuple[Any, ...]) -> bytes:
    """A fingerprint of everything that a plan depends on, but for the rank."""
    state = hashlib.blake2b(repr(options).encode(), digest_size=16)
    for item in items:
        state.update(
            f"{item.name}\0{item.dtype}\0{item.result}\0{item.has_grad}\0".encode()
            + item.source.digest
            + item.target.digest
        )
    return state.digest()
