"""Plans of the exchange of Ulysses: which heads and positions every rank has, and the strided copies to its wire.

To rank w the wire holds, token by token, the heads that rank w attends with, those of every tensor side by side
(``rank, token, [q heads | k heads | v heads]``): what arrives is one tensor, and is unpacked, if at all, in one pass.
Blocks of ranks that have equally many heads (or positions) are at one stride and are copied at once, so that an uneven
split costs two copies and not one per rank.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from typing import NamedTuple

from tritoncomm.core.plan import Ints
from tritoncomm.errors import ShapeError

__all__ = [
    "HEAD_DIM",
    "BlockCopy",
    "ExchangePlan",
    "HeadShare",
    "Layout",
    "heads_plan",
    "sequence_plan",
    "split_heads",
]

HEAD_DIM = 2


class HeadShare(NamedTuple):
    """The heads of one tensor that every rank attends with: one range per rank, in rank order.

    Attributes:
        starts: first head of every rank; ranges overlap where ranks share a head.
        sizes: number of heads of every rank.
        heads: number of heads of the tensor.
    """

    starts: Ints
    sizes: Ints
    heads: int

    @property
    def replicated(self) -> bool:
        """Whether some ranks share a head."""
        return sum(self.sizes) > self.heads


@dataclass(frozen=True, eq=False)
class Layout:
    """How tensors of ``[batch, sequence, heads, head_dim]`` (or sequence first) are split; the same on all ranks.

    Layouts are compared by identity, because plans are looked up by them in every call: keep one per kind of call.

    Attributes:
        seq_dim: 1 where the batch is first, else 0; heads are dim 2.
        shares: per tensor of the exchange.
        seq_sizes: positions of every rank.
        even: every pair of ranks exchanges as many elements.
        plain: one tensor, and no rank shares its heads.
    """

    seq_dim: int
    shares: tuple[HeadShare, ...]
    seq_sizes: Ints
    even: bool = field(init=False)
    plain: bool = field(init=False)

    def __post_init__(self) -> None:
        even = len(set(self.seq_sizes)) == 1 and all(len(set(share.sizes)) == 1 for share in self.shares)
        object.__setattr__(self, "even", even)
        object.__setattr__(self, "plain", len(self.shares) == 1 and not self.shares[0].replicated)


class BlockCopy(NamedTuple):
    """A strided copy between one tensor and the wire: blocks of some ranks, of one size and at one stride."""

    index: int
    size: Ints
    stride: Ints
    start: int
    wire_stride: Ints
    wire_start: int
    head: int
    heads: int


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """One direction of the exchange as one rank takes part in it; compared by identity, as tables are looked up by it.

    Attributes:
        pack: copies into the wire.
        unpack: copies out of the wire that arrived.
        packed_shape: of the wire where it is one ``torch.cat`` of all tensors, None where it is filled copy by copy.
        shapes: of the results.
        fused: shape of the results side by side, to heads only.
        splits: heads of each result in ``fused``; columns, where head_dims differ.
        split_dim: the dim of ``fused`` that ``splits`` split.
        send_counts, recv_counts: elements to and from every rank, empty where all are equal.
        bytes_sent: to the other ranks.
        elements: sent, and received.
    """

    pack: tuple[BlockCopy, ...]
    unpack: tuple[BlockCopy, ...]
    packed_shape: Ints | None
    shapes: tuple[Ints, ...]
    fused: Ints
    splits: list[int]
    split_dim: int
    send_counts: Ints
    recv_counts: Ints
    bytes_sent: int
    elements: tuple[int, int]


def split_heads(q_heads: int, kv_heads: int, world: int) -> tuple[HeadShare, HeadShare]:
    """Which query heads and which key/value heads every rank attends with; a query head is where its kv head is.

    With at least as many kv heads as ranks, kv heads are split as evenly as possible, the first ranks having one more.
    With fewer, every rank has one kv head, and the ranks of a kv head split its query heads.

    Raises:
        ShapeError: query heads are no multiple of kv heads, or fewer than ranks.

    Example:
        ``split_heads(8, 2, 4)`` gives every rank two query heads, and kv heads 0, 0, 1, 1.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ShapeError(f"{q_heads} query heads are no multiple of {kv_heads} key/value heads")
    if q_heads < world:
        raise ShapeError(f"{q_heads} query heads are fewer than the {world} ranks that attend with them")
    per = q_heads // kv_heads
    if kv_heads >= world:
        sizes = _evenly(kv_heads, world)
        return _share(tuple([per * size for size in sizes])), _share(sizes)
    ranks = _evenly(world, kv_heads)
    q_sizes = tuple([size for count in ranks for size in _evenly(per, count)])
    starts = tuple([head for head, count in enumerate(ranks) for _ in range(count)])
    return _share(q_sizes), HeadShare(starts, (1,) * world, kv_heads)


def _evenly(size: int, parts: int) -> Ints:
    """``size`` in parts that differ by one at most, the larger ones first."""
    return tuple([size // parts + (part < size % parts) for part in range(parts)])


def _share(sizes: Ints) -> HeadShare:
    return HeadShare(tuple([sum(sizes[:w]) for w in range(len(sizes))]), sizes, sum(sizes))


def _runs(shares: tuple[HeadShare, ...], world: int) -> list[tuple[int, int, list[int]]]:
    """Neighbouring ranks whose heads lie at one stride: first rank, number of ranks, the step of every tensor.

    Of a replicated tensor they share one head, so that its blocks are summed as they stand.
    """
    runs: list[tuple[int, int, list[int]]] = []
    for w in range(world):
        if runs:
            first, count, steps = runs[-1]
            ahead = [share.starts[w] - share.starts[w - 1] for share in shares]
            same = all(share.sizes[w] == share.sizes[first] for share in shares)
            summed = all(step == 0 for step, share in zip(ahead, shares, strict=True) if share.replicated)
            if same and summed and (count == 1 or ahead == steps):
                runs[-1] = first, count + 1, ahead
                continue
        runs.append((w, 1, [0] * len(shares)))
    return runs


def _by_heads(
    shapes: Sequence[Ints], strides: Sequence[Ints], shares: tuple[HeadShare, ...], world: int
) -> tuple[tuple[BlockCopy, ...], Ints]:
    """Copies between local sequence shards of all heads and blocks of every rank's heads; elements per rank."""
    first_dim, second_dim = shapes[0][:2]
    tokens, start, copies = first_dim * second_dim, 0, []
    counts = [tokens * sum(share.sizes[w] * shape[3] for share, shape in zip(shares, shapes, strict=True))
              for w in range(world)]  # fmt: skip
    for first, count, steps in _runs(shares, world):
        block, column = counts[first], 0
        width = block // tokens if tokens else 0
        for i, (share, shape, stride) in enumerate(zip(shares, shapes, strides, strict=True)):
            heads, head_dim, head = share.sizes[first], shape[3], share.starts[first]
            size = count, first_dim, second_dim, heads, head_dim
            copies.append(
                BlockCopy(
                    i, size, (steps[i] * stride[2], *stride), head * stride[2],
                    (block, second_dim * width, width, head_dim, 1), start + column, head, heads,
                )
            )  # fmt: skip
            column += heads * head_dim
        start += count * block
    return tuple(copies), tuple(counts)


def _by_positions(
    shapes: Sequence[Ints], strides: Sequence[Ints], seq_dim: int, seq_sizes: Ints
) -> tuple[tuple[BlockCopy, ...], Ints]:
    """Copies between all positions of this rank's heads and blocks of every rank's positions; elements per rank."""
    batch, width = shapes[0][1 - seq_dim], sum(shape[2] * shape[3] for shape in shapes)
    copies, wire_start, position = [], 0, 0
    for size, ranks in groupby(seq_sizes):
        count, block, column = len(list(ranks)), batch * size * width, 0
        lead = (batch, size) if seq_dim else (size, batch)
        for i, (shape, stride) in enumerate(zip(shapes, strides, strict=True)):
            copies.append(
                BlockCopy(
                    i, (count, *lead, *shape[2:]), (size * stride[seq_dim], *stride), position * stride[seq_dim],
                    (block, lead[1] * width, width, shape[3], 1), wire_start + column, 0, shape[2],
                )
            )  # fmt: skip
            column += shape[2] * shape[3]
        wire_start, position = wire_start + count * block, position + count * size
    return tuple(copies), tuple([batch * size * width for size in seq_sizes])


def _strides(shape: Ints) -> Ints:
    """Those of a contiguous tensor."""
    return tuple([math.prod(shape[i + 1 :]) for i in range(len(shape))])


def _joined(copies: tuple[BlockCopy, ...]) -> Ints | None:
    """Shape of the wire where the copies are those of one ``torch.cat``: one run, and heads of one size."""
    first = copies[0].size
    if len({copy.index for copy in copies}) < len(copies) or any(copy.size[4] != first[4] for copy in copies):
        return None
    return (*first[:3], sum(copy.size[3] for copy in copies), first[4])


@lru_cache(maxsize=4096)
def heads_plan(
    shapes: tuple[Ints, ...], strides: tuple[Ints, ...], layout: Layout, rank: int, itemsize: int
) -> ExchangePlan:
    seq_dim, shares, seq_sizes = layout.seq_dim, layout.shares, layout.seq_sizes
    world = len(seq_sizes)
    _check(shapes, [share.heads for share in shares], seq_sizes[rank], seq_dim)
    pack, sent = _by_heads(shapes, strides, shares, world)
    lead = _lead(shapes[0], seq_dim, sum(seq_sizes))
    heads = [share.sizes[rank] for share in shares]
    results = tuple([(*lead, n, shape[3]) for n, shape in zip(heads, shapes, strict=True)])
    width = sum(n * shape[3] for n, shape in zip(heads, shapes, strict=True))
    one_size = len({shape[3] for shape in shapes}) == 1
    fused = (*lead, sum(heads), shapes[0][3]) if one_size else (*lead, 1, width)
    unpack, arriving = _by_positions([fused], [_strides(fused)], seq_dim, seq_sizes)
    splits = heads if one_size else [n * shape[3] for n, shape in zip(heads, shapes, strict=True)]
    if seq_dim == 0 or lead[0] == 1:
        unpack = ()
    elements = sum(sent), sum(arriving)
    counts = ((), ()) if layout.even else (sent, arriving)
    bytes_sent = (elements[0] - sent[rank]) * itemsize
    return ExchangePlan(
        pack, unpack, _joined(pack), results, fused, splits, 2 if one_size else 3, *counts, bytes_sent, elements
    )


@lru_cache(maxsize=4096)
def sequence_plan(
    shapes: tuple[Ints, ...], strides: tuple[Ints, ...], layout: Layout, rank: int, itemsize: int,
    out_strides: tuple[Ints, ...],
) -> ExchangePlan:  # fmt: skip
    seq_dim, shares, seq_sizes = layout.seq_dim, layout.shares, layout.seq_sizes
    _check(shapes, [share.sizes[rank] for share in shares], sum(seq_sizes), seq_dim)
    pack, sent = _by_positions(shapes, strides, seq_dim, seq_sizes)
    lead = _lead(shapes[0], seq_dim, seq_sizes[rank])
    results = tuple([(*lead, share.heads, shape[3]) for share, shape in zip(shares, shapes, strict=True)])
    out_strides = out_strides or tuple([_strides(shape) for shape in results])
    unpack, arriving = _by_heads(results, out_strides, shares, len(seq_sizes))
    elements = sum(sent), sum(arriving)
    counts = ((), ()) if layout.even else (sent, arriving)
    bytes_sent = (elements[0] - sent[rank]) * itemsize
    return ExchangePlan(pack, unpack, _joined(pack), results, (), [], 0, *counts, bytes_sent, elements)


def _lead(shape: Ints, seq_dim: int, positions: int) -> Ints:
    return (shape[0], positions) if seq_dim else (positions, shape[1])


def _check(shapes: tuple[Ints, ...], heads: list[int], positions: int, seq_dim: int) -> None:
    """Every tensor has the shape that the layout says."""
    for shape, count in zip(shapes, heads, strict=True):
        if len(shape) != 4 or shape[:2] != _lead(shapes[0], seq_dim, positions) or shape[2] != count:
            raise ShapeError(f"shape {tuple(shape)}: expected {positions} positions in dim {seq_dim}, {count} heads "
                             f"in dim 2, and the batch of the other tensors")  # fmt: skip
