"""The transfer plan of one rank: its buckets, the messages and blocks of each, totals of all ranks, and its table."""

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.distributed import ProcessGroup

from tritoncomm.core.cost import Rates, collective_seconds, pass_seconds
from tritoncomm.core.plan import Ints
from tritoncomm.errors import GroupError, ShapeError, UnsupportedError
from tritoncomm.parsing import counted
from tritoncomm.reshard.boxes import Array
from tritoncomm.reshard.holders import Members
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.overlaps import cut_at_edges, distinct_blocks, tensors_across_buckets

__all__ = [
    "ALIGNMENT", "Bucket", "Item", "Participants", "Side", "StayingBlocks", "Totals", "TransferPlan", "check_items",
    "digest_of",
]  # fmt: skip

ALIGNMENT = 16
"""Bytes that the blocks of a tensor in a message start at a multiple of: the widest access of the copy kernels."""
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_SHOWN = 12  # buckets of a printed table
_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "bytes"))


class Participants(NamedTuple):
    """Ranks of a call.

    Attributes:
        group: None for a plan that is only looked at.
        ranks: global ranks of the group.
        position: position of this rank in the group.
    """

    group: ProcessGroup | None
    ranks: Ints
    position: int

    @property
    def rank(self) -> int:
        """Global rank of this process."""
        return self.ranks[self.position]


@dataclass(frozen=True)
class Item:
    """One tensor of a request.

    Attributes:
        dtype, result: dtypes before and after.
        has_grad: whether a gradient comes back.
    """

    name: str
    source: Layout
    target: Layout
    dtype: torch.dtype
    result: torch.dtype
    has_grad: bool = False

    @property
    def carried(self) -> torch.dtype:
        """Dtype of a tensor's elements on the wire: the smaller one of its dtypes before and after."""
        return self.result if self.result.itemsize < self.dtype.itemsize else self.dtype

    @cached_property
    def _hash(self) -> int:
        return hash((self.name, self.source, self.target, self.dtype, self.result, self.has_grad))

    def __hash__(self) -> int:  # every call looks its plan up
        return self._hash

    def reversed(self) -> "Item":
        """Return the description of a tensor's gradient: source and target change places, and so do both dtypes."""
        return Item(self.name, self.target, self.source, self.result, self.dtype, self.has_grad)

    def boxes(self) -> list[str]:
        """Return all boxes of both layouts in words."""
        sides = {"source": self.source, "target": self.target}
        return [f"the {side} box {text}" for side, layout in sides.items() for text in layout.texts()]

    def __str__(self) -> str:
        grad = ", with gradient" if self.has_grad else ""
        return f"{self.dtype} to {self.result}{grad}, {self.source} to {self.target}"


@dataclass(frozen=True)
class Side:
    """Blocks that a rank sends in one bucket, or receives, in the order of the wire.

    Attributes:
        tensor: index of every block's tensor.
        start, size: first index and extent of every block in its local tensor, ``[dims, blocks]``; tensors of fewer
            dims have leading ones.
        wire: byte offset of every block.
        peers: position in the group of every rank with a message, ascending.
        lengths: bytes of the message to, or from, each of these, alignment included.
        world: number of ranks of the group.
    """

    tensor: Array
    start: Array
    size: Array
    wire: Array
    peers: Array
    lengths: Array
    world: int

    @cached_property
    def counts(self) -> Ints:
        """Bytes of the message to, or from, every position of the group; an all-to-all-v takes them."""
        counts = np.zeros(self.world, np.int64)
        counts[self.peers] = self.lengths
        return tuple(counts.tolist())

    @cached_property
    def nbytes(self) -> int:
        """Bytes that a rank sends, or receives, in one bucket, alignment included."""
        return int(self.lengths.sum())

    @cached_property
    def messages(self) -> int:
        """Number of peers that a rank sends a message to, or gets one from, in one bucket."""
        return len(self.peers)

    @cached_property
    def parts(self) -> list[tuple[int, int, int]]:
        """For every message of one side of a bucket: the peer's position in the group, the first byte, the bytes."""
        starts = np.cumsum(self.lengths) - self.lengths
        return list(zip(self.peers.tolist(), starts.tolist(), self.lengths.tolist(), strict=True))


@dataclass(frozen=True)
class StayingBlocks:
    """Blocks of one bucket that stay on their rank.

    Attributes:
        tensor: index of every block's tensor.
        source, target: first index of every block in the local tensor before and after, ``[dims, blocks]``.
        size: extent of every block, ``[dims, blocks]``.
        wire: byte offset of every block in the staging memory; empty for blocks that are copied directly.
    """

    tensor: Array
    source: Array
    target: Array
    size: Array
    wire: Array

    def pick(self, index: Array, wire: Array) -> "StayingBlocks":
        """Return the blocks ``index``, at the byte offsets ``wire`` of the staging memory."""
        return StayingBlocks(
            self.tensor[index], self.source[:, index], self.target[:, index], self.size[:, index], wire
        )


@dataclass(frozen=True)
class Bucket:
    """Tensors, or parts of tensors, that one exchange moves: a pack, one collective, an unpack.

    Attributes:
        staged: blocks that stay on the rank and go through the staging memory: few bytes, or summands of a sum. The
            pack puts them between the sent and the received bytes, and the unpack takes them, so they cost no launch.
        staged_bytes: bytes of the staged blocks, alignment included.
        direct: the other blocks that stay; they are copied while the collective runs.
        is_quiet: no rank sends anything, so there is no collective.
    """

    send: Side
    recv: Side
    staged: StayingBlocks
    staged_bytes: int
    direct: StayingBlocks
    is_quiet: bool

    @property
    def unpacked(self) -> tuple[Array, Array, Array]:
        """Tensor, first index and extent of all blocks that a bucket's unpack writes: the staged, then the received."""
        return (
            np.concatenate([self.staged.tensor, self.recv.tensor]),
            np.concatenate([self.staged.target, self.recv.start], 1),
            np.concatenate([self.staged.size, self.recv.size], 1),
        )


class Totals(NamedTuple):
    """Bytes and messages of all ranks.

    Attributes:
        sent, received: bytes of every rank on the wire, alignment included.
        lacking: bytes that every rank needs and does not have.
        messages: number of messages that every rank sends, all buckets together.
        largest: the most bytes that any rank sends or receives in one bucket: the extra memory on each side.
        critical: the most bytes that any rank sends or receives in a bucket, summed over the buckets.
    """

    sent: Array
    received: Array
    lacking: Array
    messages: Array
    largest: int
    critical: int


@dataclass(frozen=True)
class TransferPlan:
    """Sent, received and copied blocks of one rank, bucket by bucket.

    Attributes:
        items: the tensors, in the index space of their dense boxes.
        buckets: the rank's part of every bucket.
        is_disjoint: no rank is both in a source and in a target layout.
        sums: whether received elements are summed, in the order of the senders.
        count_totals: plans the messages of all ranks; see ``totals``.
    """

    items: tuple[Item, ...]
    ranks: Ints
    position: int
    buckets: tuple[Bucket, ...]
    is_disjoint: bool
    sums: bool
    count_totals: Callable[[], Totals] = field(repr=False, compare=False)

    @cached_property
    def totals(self) -> Totals:
        """Bytes and messages of all ranks, for reports: takes time and memory by the messages of all ranks."""
        return self.count_totals()

    sent = property(attrgetter("totals.sent"), doc="Bytes that every rank sends, alignment included.")
    received = property(attrgetter("totals.received"), doc="Bytes that every rank receives, alignment included.")
    lacking = property(attrgetter("totals.lacking"), doc="Bytes that every rank needs and does not have.")
    messages = property(attrgetter("totals.messages"), doc="Number of messages that every rank sends.")
    largest = property(attrgetter("totals.largest"), doc="The most bytes that a rank sends or receives in a bucket.")
    critical = property(attrgetter("totals.critical"), doc="The most bytes of a rank in a bucket, summed over buckets.")

    @cached_property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends in all buckets of a plan, alignment included."""
        return sum(bucket.send.nbytes for bucket in self.buckets)

    @cached_property
    def bytes_received(self) -> int:
        """Bytes that this rank receives in all buckets of a plan, alignment included."""
        return sum(bucket.recv.nbytes for bucket in self.buckets)

    @cached_property
    def staged_bytes(self) -> int:
        """Largest number of bytes of one bucket that stay on this rank and are copied through the staging memory."""
        return max((bucket.staged_bytes for bucket in self.buckets), default=0)

    @cached_property
    def bytes_copied(self) -> int:
        """Bytes that this rank's packs, unpacks and direct copies read plus write, all buckets together."""
        # Bytes of an element before, on the wire, and where it arrives; the last twice where a bucket adds to it.
        sizes = []
        for i, item in enumerate(self.items):
            accesses = 2 if i in self.accumulated else 1
            sizes.append((item.dtype.itemsize, item.carried.itemsize, accesses * self.arrives(i).itemsize))
        before, carried, after = np.array(sizes, np.int64).reshape(-1, 3).T
        copied = 0
        for bucket in self.buckets:
            unpacked = bucket.unpacked
            if self.sums:  # an element whose addends arrive in several blocks is written once
                _, *pieces = cut_at_edges(*unpacked)
                unpacked = distinct_blocks(*pieces)[:3]
            # Blocks that are sent are read and written to the wire; staged ones are also read there; blocks that arrive
            # are read. Direct ones are read and written, and what is unpacked is written.
            for tensor, size, itemsizes in (
                (bucket.send.tensor, bucket.send.size, before + carried),
                (bucket.staged.tensor, bucket.staged.size, before + 2 * carried),
                (bucket.recv.tensor, bucket.recv.size, carried),
                (bucket.direct.tensor, bucket.direct.size, before + after),
                (unpacked[0], unpacked[2], after),
            ):
                copied += int((size.prod(0) * itemsizes[tensor]).sum())
        return copied

    @cached_property
    def accumulated(self) -> frozenset[int]:
        """Indices of the tensors that have an element to which several buckets contribute, so that each adds to it."""
        if not self.sums or len(self.buckets) < 2:
            return frozenset()
        counts = [len(b.recv.tensor) + len(b.staged.tensor) + len(b.direct.tensor) for b in self.buckets]
        return frozenset(tensors_across_buckets(*self._written, np.repeat(np.arange(len(counts)), counts)))

    @cached_property
    def complete(self) -> tuple[bool, ...]:
        """For every tensor, whether received and copied blocks cover the local result; if not, it starts as zeros."""
        if not self.sums:
            return tuple(not item.source.problem for item in self.items)
        tensor, _, size, _ = distinct_blocks(*cut_at_edges(*self._written)[1:])
        elements = np.bincount(tensor, size.prod(0), len(self.items)).astype(np.int64).tolist()
        shapes = (item.target.local_shape(self.ranks[self.position]) for item in self.items)
        return tuple(
            count == (0 if shape is None else math.prod(shape)) for count, shape in zip(elements, shapes, strict=True)
        )

    @cached_property
    def _written(self) -> tuple[Array, Array, Array]:
        """Tensor, first index and extent of all blocks that this rank receives or copies, bucket by bucket."""
        blocks = [
            each for b in self.buckets for each in (b.unpacked, (b.direct.tensor, b.direct.target, b.direct.size))
        ]
        tensor, start, size = (np.concatenate(each, -1) for each in zip(*blocks, strict=True))
        return tensor, start, size

    def arrives(self, index: int) -> torch.dtype:
        """Return the dtype of the memory that a tensor's elements arrive in."""
        result = self.items[index].result
        if index not in self.accumulated:
            return result
        # Several buckets add to the tensor: in fp32 or wider, rounded to the result's dtype at the end.
        return torch.float64 if result is torch.float64 else torch.float32

    @cached_property
    def bucket_launches(self) -> tuple[int, ...]:
        """Number of kernel launches of every bucket: of its pack, its unpack and its direct copies."""
        # One for all tensors whose dtype stays, and one for each pair of dtypes that is cast.
        launches = []
        for bucket in self.buckets:
            packed = [self.items[i] for i in {*bucket.send.tensor.tolist(), *bucket.staged.tensor.tolist()}]
            # torch adds blocks that are summed over several buckets one by one, without a launch of ours.
            copied = [self.items[i] for i in {*bucket.direct.tensor.tolist()} - self.accumulated]
            launches.append(
                _copy_launches([(item.dtype, item.carried) for item in packed])
                + self._unpack_launches(bucket)
                + _copy_launches([(item.dtype, item.result) for item in copied])
            )
        return tuple(launches)

    def _unpack_launches(self, bucket: Bucket) -> int:
        """Return the number of kernel launches that unpack a bucket: copies, casts and sums of each pair of dtypes."""
        tensor, start, size = bucket.unpacked
        counts = np.ones_like(tensor)
        if self.sums:
            tensor, _, _, counts = distinct_blocks(*cut_at_edges(tensor, start, size)[1:])
        # Pairs of dtypes by whether a block adds to earlier buckets, and whether it is a sum of several blocks.
        kinds: dict[tuple[bool, bool], set[Any]] = {}
        for i, is_sum in {*zip(tensor.tolist(), (counts > 1).tolist(), strict=True)}:
            dtypes = self.items[i].carried, self.arrives(i)
            adds = i in self.accumulated
            is_copy = dtypes[0] is dtypes[1] and not is_sum and not adds
            kinds.setdefault((adds, is_sum), set()).add(None if is_copy else dtypes)
        # Sums take the launch of the casts of their dtypes. Those of one pair that has none take that of plain copies.
        launches = 0
        for adds in (False, True):
            others, sums = kinds.get((adds, False), set()), kinds.get((adds, True), set())
            alone = len(sums - others)
            if alone and None in others:
                alone -= 1
            launches += len(others) + alone
        return launches

    def summands(self, bucket: Bucket) -> tuple[Array, Array, Array]:
        """Cut the blocks that a bucket's unpack sums at each other's edges: two pieces are then equal or disjoint.

        Returns:
            For every piece, in the order of the senders: its block, numbered as in ``Bucket.unpacked``; its first
            index; its extent.
        """
        received = bucket.recv
        # The wire is in the order of the senders, so an offset tells the sender; staying blocks are this rank's.
        senders = received.peers[np.searchsorted(np.cumsum(received.lengths), received.wire, side="right")]
        order = np.argsort(np.concatenate([np.full_like(bucket.staged.tensor, self.position), senders]), kind="stable")
        tensor, start, size = bucket.unpacked
        block, _, start, size = cut_at_edges(tensor[order], start[:, order], size[:, order])
        # The order of the senders is the order of the summation.
        return order[block], start, size

    @cached_property
    def launches(self) -> int:
        """Number of kernel launches of this rank in all buckets of a plan."""
        return sum(self.bucket_launches)

    @cached_property
    def local_copies(self) -> int:
        """Number of blocks that this rank copies directly from its own tensors to its own results."""
        return sum(len(bucket.direct.tensor) for bucket in self.buckets)

    def seconds(self, rates: Rates) -> tuple[float, float]:
        """Predict the seconds of this rank's packs, unpacks and copies, and the seconds of its collectives."""
        collectives = sum(
            collective_seconds("all-to-all", bucket.send.nbytes, len(self.ranks), rates, bucket.recv.nbytes)
            for bucket in self.buckets
            if not bucket.is_quiet
        )
        return pass_seconds(self.bytes_copied, rates), collectives

    def text(self, rates: Rates) -> str:
        """Return a plan as a table for people: buckets, messages, bytes, launches, memory and predicted time."""
        largest = max(int(self.sent.max()), int(self.received.max()))
        scale, unit = next((row for row in _UNITS if largest >= row[0]), _UNITS[-1])

        def amount(nbytes: float) -> str:
            return f"{nbytes / scale:.{3 if scale > 1 else 0}f}"

        rows = [
            (b.send.messages, b.recv.messages, b.send.nbytes, b.recv.nbytes, launches, len(b.direct.tensor))
            for b, launches in zip(self.buckets, self.bucket_launches, strict=True)
        ]
        lines = [
            f"{counted(len(self.items), 'tensor')} over {counted(len(self.ranks), 'rank')}; rank "
            f"{self.ranks[self.position]} in {counted(sum(not b.is_quiet for b in self.buckets), 'bucket')}:",
            f"{'bucket':<8}{'to':>5}{'from':>6}{f'{unit} sent':>13}{f'{unit} received':>16}{'launches':>10}"
            f"{'copies':>8}",
        ]
        table: list[tuple[str, tuple[int, ...]]] = [(str(index), row) for index, row in enumerate(rows[:_SHOWN])]
        if len(rows) > _SHOWN:
            table.append(("...", tuple(map(sum, zip(*rows[_SHOWN:], strict=True)))))
        table.append(("all", tuple(map(sum, zip(*rows, strict=True)))))
        for label, (receivers, senders, sent, received, launches, copies) in table:
            bytes_columns = f"{amount(sent):>13}{amount(received):>16}"
            lines.append(f"{label:<8}{receivers:>5}{senders:>6}{bytes_columns}{launches:>10}{copies:>8}")
        passes, exchange = (1e6 * seconds for seconds in self.seconds(rates))
        lines += [
            f"all ranks: {amount(self.sent.sum())} {unit} sent, {amount(self.lacking.sum())} lacking, in "
            f"{counted(int(self.messages.sum()), 'message')}",
            f"largest rank: {amount(self.sent.max())} {unit} sent, {amount(self.received.max())} received",
            f"extra memory: {amount(self.largest)} {unit} at most on each side, {amount(self.staged_bytes)} for blocks "
            "that stay",
            f"predicted, not measured: {passes:.1f} us of passes, {exchange:.1f} us of exchange",
            str(rates),
        ]
        return "\n".join(lines)


def _copy_launches(dtypes: Sequence[tuple[torch.dtype, torch.dtype]]) -> int:
    """Return the launches that copy tensors of these (before, after) dtypes: one without casts, one per cast pair."""
    return len({None if before is after else (before, after) for before, after in dtypes})


def check_items(items: Sequence[Item], ranks: Sequence[int], name: str, grad: str) -> None:
    """Check what every rank can check of a request's tensors: layouts that fit each other and the group, and casts."""
    group, members = np.array(ranks, np.int64), set[Members]()  # the tensors of a model have few sets of ranks
    for item in items:
        if item.source.shape != item.target.shape:
            raise ShapeError(
                f"{name}: {item.name} is {list(item.source.shape)} in the source layout and "
                f"{list(item.target.shape)} in the target layout"
            )
        for side, layout in (("source", item.source), ("target", item.target)):
            if layout.holders.members in members:
                continue
            members.add(layout.holders.members)
            missing = np.setdiff1d(layout.holders.members.ids, group).tolist()
            if missing:
                raise GroupError(
                    f"{name}: ranks {missing} of the {side} layout of {item.name} are not in the group {list(ranks)}"
                )
        if item.source.problem:
            raise ShapeError(f"{name}: the source layout of {item.name} is no tiling: {item.source.problem}")
        if item.dtype != item.result and not {item.dtype, item.result} <= set(_FLOATS):
            raise UnsupportedError(
                f"{name}: {item.name} cannot be cast from {item.dtype} to {item.result} on the way: only fp16, bf16, "
                "fp32 and fp64 are"
            )
        if item.has_grad and grad == "partial" and item.dtype not in _FLOATS:
            raise UnsupportedError(f"{name}: gradients of {item.name} cannot be summed as {item.dtype}")


def digest_of(items: Sequence[Item], options: tuple[Any, ...]) -> bytes:
    """Return a 16-byte hash of tensors' names, layouts and dtypes, and of options, which ranks compare."""
    state = hashlib.blake2b(repr(options).encode(), digest_size=16)
    for item in items:
        state.update(
            f"{item.name}\0{item.dtype}\0{item.result}\0{item.has_grad}\0".encode()
            + item.source.digest
            + item.target.digest
        )
    return state.digest()
