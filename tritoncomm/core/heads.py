"""Exchange of heads, the all-to-all of Ulysses: from a rank's positions of all heads to all positions of its heads.

It is not differentiable; ``to_heads`` and ``to_sequence`` are adjoint.
Several tensors share one message. The wire has, for rank w, token by token the heads that rank w attends with, of
all tensors side by side: ``rank, token, [q heads | k heads | v heads]``. So one tensor arrives, and one pass unpacks
it, if any. Blocks of ranks that have equally many heads (or positions) lie at one stride and are one copy: an uneven
split costs two copies, not one per rank. Kernels pack all tensors in one launch and unpack in another, with the sums of
shared heads; torch copies block by block.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import groupby
from operator import attrgetter
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core.blocks import Block
from tritoncomm.core.call import enter
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints, located
from tritoncomm.core.validation import check_inputs
from tritoncomm.errors import ShapeError
from tritoncomm.record import Span

__all__ = [
    "HEAD_DIM",
    "HeadLayout",
    "HeadShare",
    "split_heads",
    "to_heads",
    "to_sequence",
]

HEAD_DIM = 2
_shape_of = attrgetter("shape")


class HeadShare(NamedTuple):
    """Heads of one tensor that each rank attends with: one range per rank, in rank order.

    Attributes:
        starts: first head of every rank; ranks that share a head have overlapping ranges.
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
class HeadLayout:
    """Split of the tensors of an exchange, ``[batch, sequence, heads, head_dim]`` or sequence first, over all ranks.

    Layouts are compared by identity, because every call looks its plan up by one: keep one per kind of call.

    Attributes:
        seq_dim: dim of the sequence: 1 if the batch is first, else 0. Heads are dim 2.
        shares: split of the heads, for each tensor of the exchange.
        seq_sizes: number of positions of every rank.
        even: whether every pair of ranks exchanges as many elements.
        plain: whether there is one tensor, and no two ranks share a head of it.
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


class ToHeads(NamedTuple):
    """Exchange to the heads of a rank, whose results lie side by side in one tensor.

    Attributes:
        exchange: its one result has the heads of all tensors in dim 2; of tensors of several head_dims, their columns
            in dim 3 under one head.
        sizes: number of heads, or of columns, of each tensor.
        shapes: of each tensor; empty if they have one head_dim.
    """

    exchange: Exchange
    sizes: list[int]
    shapes: tuple[Ints, ...]


def split_heads(
    q_heads: int, kv_heads: int, world: int, names: tuple[str, str] = ("query heads", "key/value heads")
) -> tuple[HeadShare, HeadShare]:
    """Return the shares of the query and of the key/value heads; a query head goes to a rank that has its kv head.

    Args:
        names: of both kinds of heads in errors.

    Example:
        ``split_heads(8, 2, 4)`` gives every rank two query heads, and kv heads 0, 0, 1, 1.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ShapeError(f"{q_heads} {names[0]} are no multiple of {kv_heads} {names[1]}")
    if q_heads < world:
        raise ShapeError(f"{q_heads} {names[0]} are fewer than the {world} ranks that share them")
    per = q_heads // kv_heads
    if kv_heads >= world:
        # The kv heads are split as evenly as possible, and the first ranks get one more.
        sizes = _evenly(kv_heads, world)
        return _share(tuple([per * size for size in sizes])), _share(sizes)
    # With fewer kv heads than ranks every rank has one kv head, and the ranks of a kv head split its query heads.
    ranks = _evenly(world, kv_heads)
    q_sizes = tuple([size for count in ranks for size in _evenly(per, count)])
    starts = tuple([head for head, count in enumerate(ranks) for _ in range(count)])
    return _share(q_sizes), HeadShare(starts, (1,) * world, kv_heads)


def _evenly(size: int, parts: int) -> Ints:
    """Return ``parts`` sizes that add up to ``size`` and differ by one at most, the larger ones first."""
    return tuple([size // parts + (part < size % parts) for part in range(parts)])


def _share(sizes: Ints) -> HeadShare:
    """Return the share of heads that gives rank w the next ``sizes[w]`` heads; no two ranks share one."""
    return HeadShare(tuple([sum(sizes[:w]) for w in range(len(sizes))]), sizes, sum(sizes))


def _runs(shares: tuple[HeadShare, ...], world: int) -> list[tuple[int, int, list[int]]]:
    """Group neighbouring ranks whose heads one strided copy can read or write.

    Returns (first rank, number of ranks, steps) of each run. For each tensor, ``steps`` has the number of heads from
    one rank's first head to the next rank's.
    """
    runs: list[tuple[int, int, list[int]]] = []
    for w in range(world):
        if runs:
            first, count, steps = runs[-1]
            ahead = [share.starts[w] - share.starts[w - 1] for share in shares]
            # Ranks of a run have equally many heads of every tensor, at one stride. Of a tensor with shared heads they
            # have the same head, so that one sum adds up their blocks.
            same = all(share.sizes[w] == share.sizes[first] for share in shares)
            summed = all(step == 0 for step, share in zip(ahead, shares, strict=True) if share.replicated)
            if same and summed and (count == 1 or ahead == steps):
                runs[-1] = first, count + 1, ahead
                continue
        runs.append((w, 1, [0] * len(shares)))
    return runs


def _flat(block: Block) -> Block:
    """Return a block whose heads and head_dim are one dim, where they lie so: tensors of any head_dims then join."""
    *size, heads, head_dim = block.size
    if block.stride[-2:] != (head_dim, 1):
        return block
    stride, wire_stride = (*block.stride[:-2], 1), (*block.wire_stride[:-2], 1)
    return block._replace(size=(*size, heads * head_dim), stride=stride, wire_stride=wire_stride)


def _by_heads(
    shapes: Sequence[Ints], strides: Sequence[Ints], shares: tuple[HeadShare, ...], world: int, itemsize: int
) -> tuple[tuple[Block, ...], Ints]:
    """List the copies between tensors with all heads and a wire with a block per rank; count a block's elements."""
    first_dim, second_dim = shapes[0][:2]
    tokens, start, copies = first_dim * second_dim, 0, []
    counts = [tokens * sum(share.sizes[w] * shape[3] for share, shape in zip(shares, shapes, strict=True))
              for w in range(world)]  # fmt: skip
    for rank, num_ranks, steps in _runs(shares, world):  # runs of ranks that share one copy, by their first rank
        block_elements, column = counts[rank], 0
        token_elements = block_elements // tokens if tokens else 0
        for i, (share, shape, stride) in enumerate(zip(shares, shapes, strides, strict=True)):
            # Dims: rank, the two of tokens, head, head_dim.
            heads, head_dim = share.sizes[rank], shape[3]
            size, tensor_stride = (num_ranks, first_dim, second_dim, heads, head_dim), (steps[i] * stride[2], *stride)
            wire_stride = block_elements, second_dim * token_elements, token_elements, head_dim, 1
            offset, at = share.starts[rank] * stride[2], (start + column) * itemsize
            copies.append(_flat(Block(i, size, tensor_stride, offset, at, wire_stride)))
            column += heads * head_dim
        start += num_ranks * block_elements
    return tuple(copies), tuple(counts)


def _by_positions(
    shapes: Sequence[Ints], strides: Sequence[Ints], seq_dim: int, seq_sizes: Ints, itemsize: int
) -> tuple[tuple[Block, ...], Ints]:
    """List the copies between tensors with all positions and a wire with a block per rank; count a block's elements."""
    batch, token_elements = shapes[0][1 - seq_dim], sum(shape[2] * shape[3] for shape in shapes)
    copies, wire_start, position = [], 0, 0
    for size, ranks in groupby(seq_sizes):  # ranks with as many positions share one copy, with a dim of ranks
        count, block_elements, column = len(list(ranks)), batch * size * token_elements, 0
        # On the wire tokens keep the tensors' order of batch and sequence.
        lead = (batch, size) if seq_dim else (size, batch)
        for i, (shape, stride) in enumerate(zip(shapes, strides, strict=True)):
            # Dims: rank, the two of tokens, head, head_dim.
            copy_size, tensor_stride = (count, *lead, *shape[2:]), (size * stride[seq_dim], *stride)
            wire_stride = (block_elements, lead[1] * token_elements, token_elements, shape[3], 1)
            at = (wire_start + column) * itemsize
            copies.append(_flat(Block(i, copy_size, tensor_stride, position * stride[seq_dim], at, wire_stride)))
            column += shape[2] * shape[3]
        wire_start, position = wire_start + count * block_elements, position + count * size
    return tuple(copies), tuple([batch * size * token_elements for size in seq_sizes])


@lru_cache(maxsize=4096)
def heads_plan(
    shapes: tuple[Ints, ...], strides: tuple[Ints, ...], layout: HeadLayout, rank: int, dtype: torch.dtype
) -> ToHeads:
    """Plan the exchange in which a rank sends its positions of all heads, and receives all positions of its heads."""
    seq_dim, shares, seq_sizes = layout.seq_dim, layout.shares, layout.seq_sizes
    _check(shapes, [share.heads for share in shares], seq_sizes[rank], seq_dim)
    blocks, sent = _by_heads(shapes, strides, shares, len(seq_sizes), dtype.itemsize)
    lead = _lead(shapes[0], seq_dim, sum(seq_sizes))
    heads = [share.sizes[rank] for share in shares]
    results = tuple([(*lead, n, shape[3]) for n, shape in zip(heads, shapes, strict=True)])
    # All tensors arrive in one buffer, side by side. If they have the same head_dim, the buffer is split along the
    # heads. Else it has a single head of many columns, which is split along these; each part then gets its own shape.
    columns = [n * shape[3] for n, shape in zip(heads, shapes, strict=True)]
    if len({shape[3] for shape in shapes}) == 1:
        fused, sizes, result_shapes = (*lead, sum(heads), shapes[0][3]), heads, ()
    else:
        fused, sizes, result_shapes = (*lead, 1, sum(columns)), columns, results
    arriving, received = _by_positions([fused], [contiguous_stride(fused)], seq_dim, seq_sizes, dtype.itemsize)
    unpack = Pass(arriving, [dtype], sum(received))
    exchange = Exchange(
        Pass(blocks, [dtype] * len(shapes), sum(sent)),
        None if unpack.is_in_order else unpack,
        send_counts=() if layout.even else sent,
        recv_counts=() if layout.even else received,
        bytes_sent=(sum(sent) - sent[rank]) * dtype.itemsize,
        shapes=[fused],
    )
    return ToHeads(exchange, sizes, result_shapes)


@lru_cache(maxsize=4096)
def sequence_plan(
    shapes: tuple[Ints, ...], strides: tuple[Ints, ...], layout: HeadLayout, rank: int, dtype: torch.dtype,
    out_strides: tuple[Ints, ...] = (),
) -> Exchange:  # fmt: skip
    """Plan the exchange from all positions of this rank's heads to its positions of all heads.

    Args:
        out_strides: strides of the results; empty for contiguous ones.
    """
    seq_dim, shares, seq_sizes = layout.seq_dim, layout.shares, layout.seq_sizes
    _check(shapes, [share.sizes[rank] for share in shares], sum(seq_sizes), seq_dim)
    blocks, sent = _by_positions(shapes, strides, seq_dim, seq_sizes, dtype.itemsize)
    lead = _lead(shapes[0], seq_dim, seq_sizes[rank])
    results = tuple([(*lead, share.heads, shape[3]) for share, shape in zip(shares, shapes, strict=True)])
    is_new = not out_strides
    out_strides = out_strides or tuple([contiguous_stride(shape) for shape in results])
    arriving, received = _by_heads(results, out_strides, shares, len(seq_sizes), dtype.itemsize)
    dtypes, has_sums = [dtype] * len(shapes), any(share.replicated for share in shares)
    unpack = Pass(arriving, dtypes, sum(received), sums=has_sums)
    return Exchange(
        Pass(blocks, dtypes, sum(sent)),
        None if is_new and not has_sums and unpack.is_in_order else unpack,
        send_counts=() if layout.even else sent,
        recv_counts=() if layout.even else received,
        bytes_sent=(sum(sent) - sent[rank]) * dtype.itemsize,
        shapes=results,
    )


def _lead(shape: Ints, seq_dim: int, positions: int) -> Ints:
    """Return the first two sizes of ``shape`` with ``positions`` as the size of the sequence."""
    return (shape[0], positions) if seq_dim else (positions, shape[1])


def _check(shapes: tuple[Ints, ...], heads: list[int], positions: int, seq_dim: int) -> None:
    """Check that every tensor has four dims, ``positions`` positions, its number of ``heads`` and one common batch."""
    for shape, count in zip(shapes, heads, strict=True):
        if len(shape) != 4 or shape[:2] != _lead(shapes[0], seq_dim, positions) or shape[2] != count:
            raise ShapeError(f"shape {tuple(shape)}: expected {positions} positions in dim {seq_dim}, {count} heads "
                             f"in dim 2, and the batch of the other tensors")  # fmt: skip


def to_heads(tensors: Sequence[Tensor], layout: HeadLayout, group: ProcessGroup, name: str) -> Sequence[Tensor]:
    """Exchange this rank's positions of all heads, ``[b, s, H, d]`` or sequence first, for all positions of its heads.

    Returns for each tensor ``[b, sum(seq_sizes), H of this rank, d]``; several are disjoint slices of one buffer.
    """
    span = enter(name, "to_heads", group, tensors, (layout,)) or Span(name)
    check_inputs(tensors, name)
    shapes, strides = tuple(map(_shape_of, tensors)), tuple(map(Tensor.stride, tensors))
    try:
        exchange, sizes, result_shapes = heads_plan(shapes, strides, layout, group.rank(), tensors[0].dtype)
    except ShapeError as error:
        raise located(error, tensors[0].shape, name, group) from None
    results = exchange.run(tensors, group, span)
    if len(tensors) == 1:
        return results
    if not result_shapes:  # all have one head_dim, and lie side by side in the dim of the heads
        return torch.unsafe_split_with_sizes(results[0], sizes, HEAD_DIM)
    columns = torch.unsafe_split_with_sizes(results[0], sizes, HEAD_DIM + 1)
    return [torch.ops.aten._unsafe_view(x, shape) for x, shape in zip(columns, result_shapes, strict=True)]


def to_sequence(
    tensors: Sequence[Tensor], layout: HeadLayout, group: ProcessGroup, name: str, outs: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """Exchange all positions of this rank's heads for its positions of all heads: the adjoint of ``to_heads``.

    Returns for each tensor ``[b, s, H, d]``, with heads that ranks share summed; ``outs`` are tensors to fill.
    """
    span = enter(name, "to_sequence", group, tensors, (layout,)) or Span(name)
    check_inputs(tensors, name)
    shapes, strides = tuple(map(_shape_of, tensors)), tuple(map(Tensor.stride, tensors))
    out_strides = () if outs is None else tuple(map(Tensor.stride, outs))
    try:
        exchange = sequence_plan(shapes, strides, layout, group.rank(), tensors[0].dtype, out_strides)
    except ShapeError as error:
        raise located(error, tensors[0].shape, name, group) from None
    return exchange.run(tensors, group, span, outs)
