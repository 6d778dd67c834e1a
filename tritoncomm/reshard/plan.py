"""The plan of a resharding as one rank takes part in it: messages, buckets, and what they cost."""

import hashlib
import itertools
import math
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
from tritoncomm.reshard.layout import Array, Layout
from tritoncomm.reshard.overlaps import crosses, distinct, divided

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
    def parts(self) -> list[tuple[int, int, int]]:
        """Position in the group, first byte and bytes of every message."""
        ends = itertools.accumulate(self.counts)
        sizes = enumerate(zip(ends, self.counts, strict=True))
        return [(peer, end - count, count) for peer, (end, count) in sizes if count]

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
        own: blocks that stay on the rank where they are few bytes, and those that are added to others: the pack puts
            them between what is sent and what arrives, and the unpack takes them from there, so that they cost no
            launches.
        own_bytes: of those, alignment included.
        local: those that stay where they are many bytes, which are copied directly while the collective runs.
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
        """Most bytes of blocks that stay on this rank and go through the staging memory of a bucket."""
        return max((bucket.own_bytes for bucket in self.buckets), default=0)

    @cached_property
    def bytes_copied(self) -> int:
        """Bytes read plus written by this rank's passes: pack, unpack and local copies."""
        before, carried, after = self._itemsizes
        copied = 0
        for b in self.buckets:
            copied += int((b.send.elements * (before + carried)[b.send.tensor]).sum())
            copied += int((b.own.elements * (before + 2 * carried)[b.own.tensor]).sum())
            copied += int((b.recv.elements * carried[b.recv.tensor]).sum())
            copied += int((b.local.elements * (before + after)[b.local.tensor]).sum())
            tensor, start, size = _blocks(b)
            if self.sums:  # what overlaps is written once
                tensor, start, size = distinct(*divided(tensor, start, size)[1:])[:3]
            copied += int((size.prod(0) * after[tensor]).sum())
        return copied

    @cached_property
    def _itemsizes(self) -> tuple[Array, Array, Array]:
        """Bytes of an element of every tensor: before, on the wire, and where it arrives, twice where it is added."""
        sizes = [
            (item.dtype.itemsize, item.carried.itemsize, self.arrives(i).itemsize * (1 + (i in self.accumulated)))
            for i, item in enumerate(self.items)
        ]
        return tuple(np.array(sizes, np.int64).reshape(-1, 3).T)

    @cached_property
    def accumulated(self) -> frozenset[int]:
        """Tensors that have elements to which several buckets contribute: each adds to what is there."""
        if not self.sums or len(self.buckets) < 2:
            return frozenset()
        tensor, start, size = self._every_block
        counts = [len(_blocks(b)[0]) + len(b.local.tensor) for b in self.buckets]
        return frozenset(crosses(tensor, start, size, np.repeat(np.arange(len(counts)), counts)))

    @cached_property
    def complete(self) -> tuple[bool, ...]:
        """For every tensor, whether all elements that this rank has of it are received or copied."""
        if not self.sums:
            return tuple(not item.source.problem for item in self.items)
        tensor, _, size, _ = distinct(*divided(*self._every_block)[1:])
        elements = np.bincount(tensor, size.prod(0), len(self.items)).astype(np.int64).tolist()
        shapes = (item.target.local_shape(self.ranks[self.position]) for item in self.items)
        return tuple(
            count == (0 if shape is None else math.prod(shape)) for count, shape in zip(elements, shapes, strict=True)
        )

    @cached_property
    def _every_block(self) -> tuple[Array, Array, Array]:
        """Tensor, start and size of all blocks that are received or copied, bucket by bucket."""
        every = [each for b in self.buckets for each in (_blocks(b), (b.local.tensor, b.local.target, b.local.size))]
        tensor, start, size = (np.concatenate(each, -1) for each in zip(*every, strict=True))
        return tensor, start, size

    def arrives(self, index: int) -> torch.dtype:
        """The dtype that a tensor is received into: fp32, of fp64 fp64, where several buckets add to it."""
        result = self.items[index].result
        if index not in self.accumulated:
            return result
        return torch.float64 if result is torch.float64 else torch.float32

    @cached_property
    def bucket_launches(self) -> tuple[int, ...]:
        """Passes of every bucket: a pack, an unpack and direct copies, one of each for all tensors of one dtype.

        There is one more of each per pair of dtypes that are cast. Sums of one pair are in the launch of the copies,
        and those of others in one each; sums that several buckets contribute to are apart from the rest.
        """
        return tuple(self._packs(bucket) + self._unpacks(bucket) + self._copies(bucket) for bucket in self.buckets)

    def _packs(self, bucket: Bucket) -> int:
        given = [self.items[i] for i in {*bucket.send.tensor.tolist(), *bucket.own.tensor.tolist()}]
        return len({None if item.dtype is item.carried else (item.dtype, item.carried) for item in given})

    def _copies(self, bucket: Bucket) -> int:
        """Direct copies, without blocks that are added to what other buckets made: torch adds those one by one."""
        given = [self.items[i] for i in {*bucket.local.tensor.tolist()} - self.accumulated]
        return len({None if item.dtype is item.result else (item.dtype, item.result) for item in given})

    def _unpacks(self, bucket: Bucket) -> int:
        tensor, start, size = _blocks(bucket)
        counts = np.ones_like(tensor)
        if self.sums:
            tensor, _, _, counts = distinct(*divided(tensor, start, size)[1:])
        kinds: dict[tuple[bool, bool], set[Any]] = {}  # by whether it adds to what is there, and whether it adds parts
        for i, is_sum in {*zip(tensor.tolist(), (counts > 1).tolist(), strict=True)}:
            ends = self.items[i].carried, self.arrives(i)
            adds = i in self.accumulated
            is_copy = ends[0] is ends[1] and not is_sum and not adds
            kinds.setdefault((adds, is_sum), set()).add(None if is_copy else ends)
        launches = 0
        for adds in (False, True):
            others, sums = kinds.get((adds, False), set()), kinds.get((adds, True), set())
            launches += len(others) + max(0, len(sums - others) - (None in others))
        return launches

    def added(self, bucket: Bucket) -> tuple[Array, Array, Array]:
        """Parts of the blocks that an unpack adds up, in the order of the senders: equal or disjoint, see ``divided``.

        Returns:
            The block of every part, counted from the small ones that stay on to those that arrive; start and size.
        """
        received = bucket.recv
        senders = np.searchsorted(np.cumsum(received.counts), received.wire, side="right")
        order = np.argsort(np.concatenate([np.full_like(bucket.own.tensor, self.position), senders]), kind="stable")
        tensor, start, size = _blocks(bucket)
        block, _, start, size = divided(tensor[order], start[:, order], size[:, order])
        return order[block], start, size

    @cached_property
    def launches(self) -> int:
        """Passes of this rank on the kernel path."""
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


def _blocks(bucket: Bucket) -> tuple[Array, Array, Array]:
    """Tensor, start and size of what an unpack takes: small blocks that stay, then those that arrive."""
    own, received = bucket.own, bucket.recv
    return (
        np.concatenate([own.tensor, received.tensor]),
        np.concatenate([own.target, received.start], 1),
        np.concatenate([own.size, received.size], 1),
    )


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
