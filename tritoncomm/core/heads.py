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
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import Segments

from tritoncomm.core import backend, eager, ops, segments
from tritoncomm.core.blocks import Block, table_of
from tritoncomm.core.call import enter
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.plan import Ints, located
from tritoncomm.core.validation import check_input
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.record import CopyPath, Span

__all__ = [
    "HEAD_DIM",
    "HeadShare",
    "Layout",
    "split_heads",
    "to_heads",
    "to_sequence",
]

HEAD_DIM = 2


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
class Layout:
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


@dataclass(frozen=True, eq=False)
class ExchangePlan:
    """Plan of one direction of the exchange for one rank. Compared by identity: segment tables are looked up by it.

    Attributes:
        pack, unpack: copies between tensors and a wire: blocks of neighbouring ranks, ``[ranks, two dims of tokens,
            heads, head_dim]``, of one size and at one stride. ``unpack`` is empty if the wire already is the result.
        packed_shape: shape of the wire if one ``torch.cat`` of all tensors makes it; None if copies fill it.
        fused: shape of the tensor that has all results side by side; only to heads.
        splits: number of heads of each result in ``fused``; of columns, if the head_dims differ.
        split_dim: dim of ``fused`` that ``splits`` cuts.
        send_counts, recv_counts: elements to and from each rank; empty if all are equal.
        elements: number of elements of the sent wire, and of the received one.
    """

    pack: tuple[Block, ...]
    unpack: tuple[Block, ...]
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
    """Return the shares of the query and of the key/value heads; a query head goes to a rank that has its kv head.

    Example:
        ``split_heads(8, 2, 4)`` gives every rank two query heads, and kv heads 0, 0, 1, 1.
    """
    if kv_heads < 1 or q_heads % kv_heads:
        raise ShapeError(f"{q_heads} query heads are no multiple of {kv_heads} key/value heads")
    if q_heads < world:
        raise ShapeError(f"{q_heads} query heads are fewer than the {world} ranks that attend with them")
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


def _by_heads(
    shapes: Sequence[Ints], strides: Sequence[Ints], shares: tuple[HeadShare, ...], world: int, itemsize: int
) -> tuple[tuple[Block, ...], Ints]:
    """List the copies between tensors with all heads and a wire with a block per rank; count a block's elements."""
    first_dim, second_dim = shapes[0][:2]
    tokens, start, copies = first_dim * second_dim, 0, []
    counts = [tokens * sum(share.sizes[w] * shape[3] for share, shape in zip(shares, shapes, strict=True))
              for w in range(world)]  # fmt: skip
    for first, count, steps in _runs(shares, world):
        # ``block`` is the elements of one rank's block, ``width`` the elements of a token in it. ``column`` is the
        # element of a token where a tensor's heads begin.
        block, column = counts[first], 0
        width = block // tokens if tokens else 0
        for i, (share, shape, stride) in enumerate(zip(shares, shapes, strides, strict=True)):
            heads, head_dim, head = share.sizes[first], shape[3], share.starts[first]
            size = count, first_dim, second_dim, heads, head_dim
            wire_stride = block, second_dim * width, width, head_dim, 1
            at = (start + column) * itemsize
            copies.append(Block(i, size, (steps[i] * stride[2], *stride), head * stride[2], at, wire_stride))
            column += heads * head_dim
        start += count * block
    return tuple(copies), tuple(counts)


def _by_positions(
    shapes: Sequence[Ints], strides: Sequence[Ints], seq_dim: int, seq_sizes: Ints, itemsize: int
) -> tuple[tuple[Block, ...], Ints]:
    """List the copies between tensors with all positions and a wire with a block per rank; count a block's elements."""
    batch, width = shapes[0][1 - seq_dim], sum(shape[2] * shape[3] for shape in shapes)
    copies, wire_start, position = [], 0, 0
    for size, ranks in groupby(seq_sizes):
        # As in ``_by_heads``, ``block`` and ``width`` count elements of a rank's block, and of a token in it.
        count, block, column = len(list(ranks)), batch * size * width, 0
        # On the wire tokens keep the tensors' order of batch and sequence.
        lead = (batch, size) if seq_dim else (size, batch)
        for i, (shape, stride) in enumerate(zip(shapes, strides, strict=True)):
            steps, wire_stride = (size * stride[seq_dim], *stride), (block, lead[1] * width, width, shape[3], 1)
            at = (wire_start + column) * itemsize
            copies.append(Block(i, (count, *lead, *shape[2:]), steps, position * stride[seq_dim], at, wire_stride))
            column += shape[2] * shape[3]
        wire_start, position = wire_start + count * block, position + count * size
    return tuple(copies), tuple([batch * size * width for size in seq_sizes])


def _joined(copies: tuple[Block, ...]) -> Ints | None:
    """Return the shape of the wire if one ``torch.cat`` can do all copies, else None."""
    first = copies[0].size
    # Without one copy per tensor and one head_dim, cat cannot put the tensors side by side in the dim of the heads.
    if len({copy.tensor for copy in copies}) < len(copies) or any(copy.size[4] != first[4] for copy in copies):
        return None
    return (*first[:3], sum(copy.size[3] for copy in copies), first[4])


@lru_cache(maxsize=4096)
def heads_plan(
    shapes: tuple[Ints, ...], strides: tuple[Ints, ...], layout: Layout, rank: int, itemsize: int
) -> ExchangePlan:
    """Plan the exchange from this rank's positions of all heads to all positions of its heads."""
    seq_dim, shares, seq_sizes = layout.seq_dim, layout.shares, layout.seq_sizes
    world = len(seq_sizes)
    _check(shapes, [share.heads for share in shares], seq_sizes[rank], seq_dim)
    pack, sent = _by_heads(shapes, strides, shares, world, itemsize)
    lead = _lead(shapes[0], seq_dim, sum(seq_sizes))
    heads = [share.sizes[rank] for share in shares]
    results = tuple([(*lead, n, shape[3]) for n, shape in zip(heads, shapes, strict=True)])
    width = sum(n * shape[3] for n, shape in zip(heads, shapes, strict=True))
    one_size = len({shape[3] for shape in shapes}) == 1
    # Tensors with one head_dim lie side by side in the dim of the heads, others in the last dim under one head.
    fused = (*lead, sum(heads), shapes[0][3]) if one_size else (*lead, 1, width)
    unpack, arriving = _by_positions([fused], [contiguous_stride(fused)], seq_dim, seq_sizes, itemsize)
    splits = heads if one_size else [n * shape[3] for n, shape in zip(heads, shapes, strict=True)]
    # Blocks of positions in rank order are the sequence already.
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
    """Plan the exchange from all positions of this rank's heads to its positions of all heads.

    Args:
        out_strides: strides of the results; empty for contiguous ones.
    """
    seq_dim, shares, seq_sizes = layout.seq_dim, layout.shares, layout.seq_sizes
    _check(shapes, [share.sizes[rank] for share in shares], sum(seq_sizes), seq_dim)
    pack, sent = _by_positions(shapes, strides, seq_dim, seq_sizes, itemsize)
    lead = _lead(shapes[0], seq_dim, seq_sizes[rank])
    results = tuple([(*lead, share.heads, shape[3]) for share, shape in zip(shares, shapes, strict=True)])
    out_strides = out_strides or tuple([contiguous_stride(shape) for shape in results])
    unpack, arriving = _by_heads(results, out_strides, shares, len(seq_sizes), itemsize)
    elements = sum(sent), sum(arriving)
    counts = ((), ()) if layout.even else (sent, arriving)
    bytes_sent = (elements[0] - sent[rank]) * itemsize
    # Nothing is fused in this direction: each result is a tensor of its own.
    return ExchangePlan(pack, unpack, _joined(pack), results, (), [], 0, *counts, bytes_sent, elements)


def _lead(shape: Ints, seq_dim: int, positions: int) -> Ints:
    """Return the first two sizes of ``shape`` with ``positions`` as the size of the sequence."""
    return (shape[0], positions) if seq_dim else (positions, shape[1])


def _check(shapes: tuple[Ints, ...], heads: list[int], positions: int, seq_dim: int) -> None:
    """Check that every tensor has four dims, ``positions`` positions, its number of ``heads`` and one common batch."""
    for shape, count in zip(shapes, heads, strict=True):
        if len(shape) != 4 or shape[:2] != _lead(shapes[0], seq_dim, positions) or shape[2] != count:
            raise ShapeError(f"shape {tuple(shape)}: expected {positions} positions in dim {seq_dim}, {count} heads "
                             f"in dim 2, and the batch of the other tensors")  # fmt: skip


_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IN_ORDER = 4  # number of parts that torch.sum adds in order; of more parts it sums some first


def _check_tensors(tensors: Sequence[Tensor], name: str) -> None:
    """Reject tensors that differ in dtype or device, or that ``check_input`` rejects."""
    first = tensors[0]
    for x in tensors:
        check_input(x, name)
        if x.dtype is not first.dtype or x.device != first.device:
            raise ArgumentError(
                f"{name}: one message needs one dtype and device, not {first.dtype} on {first.device} "
                f"and {x.dtype} on {x.device}"
            )


@lru_cache(maxsize=512)
def _table(plan: ExchangePlan, packs: bool, dtype: torch.dtype, count: int) -> Segments | None:
    """Return the segment table of ``plan.pack`` or ``plan.unpack``; None if it would have too many segments.

    Args:
        count: number of tensors of that side.
    """
    copies = plan.pack if packs else plan.unpack
    # A block per rank: ranks that share a head have the same rows, which are summed.
    blocks = [copy.at(w, dtype.itemsize) for copy in copies for w in range(copy.size[0])]
    return table_of(blocks, [dtype] * count)


def _pack(tensors: Sequence[Tensor], plan: ExchangePlan, by_kernel: bool) -> tuple[Tensor, CopyPath, int]:
    """Pack the tensors into one wire by ``plan``; return the wire, the path and the bytes copied."""
    first = tensors[0]
    if plan.packed_shape is not None and len(tensors) == 1:
        wire = ops.resolved(plan.pack[0].view(first)).contiguous()
        return (wire, "view", 0) if wire.data_ptr() == first.data_ptr() else (wire, "torch", 2 * wire.nbytes)
    table = _table(plan, True, first.dtype, len(tensors)) if by_kernel else None
    if table is not None:
        wire = first.new_empty(plan.elements[0])
        return wire, *segments.gather(tensors, wire, table)
    if plan.packed_shape is not None:
        wire = torch.cat([copy.view(tensors[copy.tensor]) for copy in plan.pack], 3)
        return wire, "torch", 2 * wire.nbytes
    wire = first.new_empty(plan.elements[0])
    for copy in plan.pack:
        copy.in_wire(wire).copy_(copy.view(tensors[copy.tensor]))
    return wire, "torch", 2 * wire.nbytes


def _exchange(wire: Tensor, plan: ExchangePlan, group: ProcessGroup, name: str) -> Tensor:
    """Send the wire, and return the received one: of the same shape if all ranks' blocks are equal, else flat."""
    if not plan.send_counts and wire.shape[0] % group.size() == 0:
        received = torch.empty_like(wire)
        backend.all_to_all(received, wire, (), (), group, name)
        return received
    received = wire.new_empty(plan.elements[1])
    backend.all_to_all(received, wire.view(-1), plan.recv_counts, plan.send_counts, group, name)
    return received


def to_heads(tensors: Sequence[Tensor], layout: Layout, group: ProcessGroup, name: str) -> Sequence[Tensor]:
    """Exchange this rank's positions of all heads, ``[b, s, H, d]`` or sequence first, for all positions of its heads.

    Returns for each tensor ``[b, sum(seq_sizes), H of this rank, d]``; several are disjoint slices of one buffer.
    """
    if layout.plain and (layout.even or ops.path_for(tensors[0]) == "triton"):
        return [_one(tensors[0], HEAD_DIM, layout.seq_dim, layout, group, name)]
    span = enter(name, "to_heads", group, tensors, (layout,)) or Span(name)
    _check_tensors(tensors, name)
    by_kernel = ops.path_for(tensors[0], "segments") == "triton"
    if by_kernel:  # a table reads memory as it is; before the plan, which has the strides
        tensors = [ops.resolved(x) for x in tensors]
    plan = _planned(heads_plan, tensors, layout, group, name)
    wire, path, copied = _pack(tensors, plan, by_kernel)
    received = _exchange(wire, plan, group, name)
    del wire  # frees the sent buffer before the results are allocated
    if not plan.unpack:
        fused = torch.ops.aten._unsafe_view(received, plan.fused)
    # One copy: every rank has as many positions, which ``unpack`` puts side by side.
    elif len(plan.unpack) == 1:
        fused, path, unpacked = ops.unpack(received, plan.fused, layout.seq_dim, len(layout.seq_sizes))
        copied += unpacked
    else:
        fused = received.new_empty(plan.fused)
        table = _table(plan, False, fused.dtype, 1) if by_kernel else None
        if table is not None:
            path, unpacked = segments.scatter(received, [fused], table)
        else:
            for copy in plan.unpack:
                copy.view(fused).copy_(copy.in_wire(received))
            path, unpacked = "torch", 2 * fused.nbytes
        copied += unpacked
    span.end(path, copied, plan.bytes_sent)
    if len(tensors) == 1:
        return [fused]
    if plan.split_dim == HEAD_DIM:
        return torch.unsafe_split_with_sizes(fused, plan.splits, HEAD_DIM)
    columns = torch.unsafe_split_with_sizes(fused, plan.splits, plan.split_dim)
    return [torch.ops.aten._unsafe_view(x, shape) for x, shape in zip(columns, plan.shapes, strict=True)]


def to_sequence(
    tensors: Sequence[Tensor], layout: Layout, group: ProcessGroup, name: str, outs: Sequence[Tensor] | None = None
) -> Sequence[Tensor]:
    """Exchange all positions of this rank's heads for its positions of all heads: the adjoint of ``to_heads``.

    Returns for each tensor ``[b, s, H, d]``, with heads that ranks share summed; ``outs`` are tensors to fill.
    """
    if layout.plain and outs is None and (layout.even or ops.path_for(tensors[0]) == "triton"):
        return [_one(tensors[0], layout.seq_dim, HEAD_DIM, layout, group, name)]
    span = enter(name, "to_sequence", group, tensors, (layout,)) or Span(name)
    _check_tensors(tensors, name)
    by_kernel = ops.path_for(tensors[0], "segments") == "triton"
    if by_kernel:  # a table reads memory as it is; before the plan, which has the strides
        tensors = [ops.resolved(x) for x in tensors]
    out_strides = () if outs is None else tuple([x.stride() for x in outs])
    plan = _planned(sequence_plan, tensors, layout, group, name, out_strides)
    wire, path, copied = _pack(tensors, plan, by_kernel)
    received = _exchange(wire, plan, group, name)
    del wire
    table = None
    if by_kernel and (received.dtype in _SUMMED or not any(share.replicated for share in layout.shares)):
        table = _table(plan, False, received.dtype, len(tensors))
    if table is not None:
        results = outs if outs is not None else [received.new_empty(shape) for shape in plan.shapes]
        path, unpacked = segments.scatter(received, results, table, sums=True)
    else:
        results, unpacked = _unpack_heads(received, plan, layout, outs)
        path = "torch"
    span.end(path, copied + unpacked, plan.bytes_sent)
    return results


def _planned(
    function: Any, tensors: Sequence[Tensor], layout: Layout, group: ProcessGroup, name: str, *more: Any
) -> Any:
    """Return the cached plan that ``function``, ``heads_plan`` or ``sequence_plan``, makes for the tensors."""
    shapes, strides = tuple([x.shape for x in tensors]), tuple([x.stride() for x in tensors])
    try:
        return function(shapes, strides, layout, group.rank(), tensors[0].itemsize, *more)
    except ShapeError as error:
        raise located(error, tensors[0].shape, name, group) from None


def _one(x: Tensor, scatter_dim: int, gather_dim: int, layout: Layout, group: ProcessGroup, name: str) -> Tensor:
    """Exchange one tensor without shared heads, by the all-to-all of ``eager`` with both dims."""
    if layout.even:
        return eager.all_to_all(x, scatter_dim, gather_dim, group, name)
    sizes = {HEAD_DIM: layout.shares[0].sizes, layout.seq_dim: layout.seq_sizes}
    return eager.all_to_all(
        x, scatter_dim, gather_dim, group, name, scatter_sizes=sizes[scatter_dim], gather_sizes=sizes[gather_dim]
    )


def _unpack_heads(
    received: Tensor, plan: ExchangePlan, layout: Layout, outs: Sequence[Tensor] | None
) -> tuple[Sequence[Tensor], int]:
    """Unpack the received wire by torch, and sum heads that ranks share; return the results and the bytes copied."""
    copied = received.nbytes
    if outs is None and len(plan.unpack) == len(plan.shapes):  # every result is one strided read
        results: Sequence[Tensor] = [
            _unpacked(received, copy, shape, layout.shares[copy.tensor])
            for copy, shape in zip(plan.unpack, plan.shapes, strict=True)
        ]
        return results, copied + sum(x.nbytes for x in results)
    results = outs if outs is not None else [received.new_empty(shape) for shape in plan.shapes]
    shared: dict[tuple[int, int], list[Block]] = {}  # by tensor and place in it
    for copy in plan.unpack:
        if layout.shares[copy.tensor].replicated:
            shared.setdefault((copy.tensor, copy.offset), []).append(copy)
        else:
            copy.view(results[copy.tensor]).copy_(copy.in_wire(received))
    for (index, _), copies in shared.items():
        target = copies[0].at(0, received.itemsize).view(results[index])
        blocks = copies[0].in_wire(received)
        if len(copies) > 1:  # summed at once, so that low precision rounds once
            blocks = torch.cat([copy.in_wire(received) for copy in copies])
            copied += 2 * blocks.nbytes
        if blocks.shape[0] > _IN_ORDER:
            target.copy_(_summed(blocks))
        else:
            torch.sum(blocks, 0, dtype=received.dtype, out=target)
    return results, copied + sum(x.nbytes for x in results)


def _unpacked(received: Tensor, copy: Block, shape: Ints, share: HeadShare) -> Tensor:
    """Unpack one tensor whose blocks of all ranks are one copy: side by side, or as a sum if heads are shared."""
    if share.replicated:
        blocks = copy.in_wire(received)
        return blocks.sum(0, dtype=received.dtype) if copy.size[0] <= _IN_ORDER else _summed(blocks)
    # The dim of the ranks moves behind the tokens, so that each token has the heads of all ranks side by side.
    (count, *tokens, heads, head_dim), (block, *steps) = copy.size, copy.wire_stride
    size, stride = (*tokens, count, heads, head_dim), (*steps[:2], block, *steps[2:])
    view = received.as_strided(size, stride, copy.wire // received.itemsize)
    rows = view.clone(memory_format=torch.contiguous_format)
    return torch.ops.aten._unsafe_view(rows, shape)


def _summed(blocks: Tensor) -> Tensor:
    """Return the sum over dim 0, in order and with one rounding; ``torch.sum`` of many parts changes the order."""
    if blocks.dtype not in _SUMMED:
        return blocks.sum(0, dtype=blocks.dtype)
    total = blocks[0].to(torch.promote_types(blocks.dtype, torch.float32), copy=True)
    for block in blocks[1:]:
        total += block
    return total.to(blocks.dtype)
