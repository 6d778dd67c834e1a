"""The exchange of Ulysses, not differentiable: sequence shards of all heads <-> all positions of a share of the heads.

Several tensors share one message; ``head_plan`` has the order of its wire. Kernels pack them in one launch and unpack
what arrives in another, with the sums of shared heads; torch copies block by block.
"""

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import Segments

from tritoncomm.core import backend, cached, eager, ops, segments
from tritoncomm.core.call import enter
from tritoncomm.core.head_plan import HEAD_DIM, BlockCopy, ExchangePlan, HeadShare, Layout, heads_plan, sequence_plan
from tritoncomm.core.plan import Ints, located
from tritoncomm.core.validation import check_input
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.record import CopyPath, Span

__all__ = ["to_heads", "to_sequence"]

_SUMMED = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_IN_ORDER = 4  # parts that torch.sum adds up one after the other; of more it sums some first


def _checked(tensors: Sequence[Tensor], name: str) -> None:
    first = tensors[0]
    for x in tensors:
        check_input(x, name)
        if x.dtype is not first.dtype or x.device != first.device:
            raise ArgumentError(
                f"{name}: one message needs one dtype and device, not {first.dtype} on {first.device} "
                f"and {x.dtype} on {x.device}"
            )


def _view(x: Tensor, copy: BlockCopy) -> Tensor:
    return x.as_strided(copy.size, copy.stride, x.storage_offset() + copy.start)


def _wire_view(wire: Tensor, copy: BlockCopy) -> Tensor:
    return wire.as_strided(copy.size, copy.wire_stride, copy.wire_start)


@lru_cache(maxsize=512)
def _table(plan: ExchangePlan, packs: bool, dtype: torch.dtype, count: int) -> Segments | None:
    """One side of a plan as segments of ``count`` tensors; None where there would be too many."""
    size = dtype.itemsize
    blocks = (
        segments.strided_segments(
            copy.index, copy.size[1:], copy.stride[1:], copy.start + w * copy.stride[0], size,
            (copy.wire_start + w * copy.wire_stride[0]) * size, copy.wire_stride[1:],
        )
        for copy in (plan.pack if packs else plan.unpack)
        for w in range(copy.size[0])
    )  # fmt: skip
    rows = list(itertools.islice(itertools.chain.from_iterable(blocks), segments.MOST_SEGMENTS + 1))
    return None if len(rows) > segments.MOST_SEGMENTS else Segments(rows, [dtype] * count)


def _pack(tensors: Sequence[Tensor], plan: ExchangePlan, by_kernel: bool) -> tuple[Tensor, CopyPath, int]:
    """The wire, the path, and the bytes read plus written for it."""
    first = tensors[0]
    if plan.packed_shape is not None and len(tensors) == 1:
        wire = cached.resolved(_view(first, plan.pack[0])).contiguous()
        return (wire, "view", 0) if wire.data_ptr() == first.data_ptr() else (wire, "torch", 2 * wire.nbytes)
    table = _table(plan, True, first.dtype, len(tensors)) if by_kernel else None
    if table is not None:
        wire = first.new_empty(plan.elements[0])
        return wire, *segments.gather(tensors, wire, table)
    if plan.packed_shape is not None:
        wire = torch.cat([_view(tensors[copy.index], copy) for copy in plan.pack], 3)
        return wire, "torch", 2 * wire.nbytes
    wire = first.new_empty(plan.elements[0])
    for copy in plan.pack:
        _wire_view(wire, copy).copy_(_view(tensors[copy.index], copy))
    return wire, "torch", 2 * wire.nbytes


def _sent(wire: Tensor, plan: ExchangePlan, group: ProcessGroup, name: str) -> Tensor:
    """What arrives in exchange for the wire: of its shape where all blocks are equal, else flat."""
    if not plan.send_counts and wire.shape[0] % group.size() == 0:
        received = torch.empty_like(wire)
        backend.all_to_all(received, wire, (), (), group, name)
        return received
    received = wire.new_empty(plan.elements[1])
    backend.all_to_all(received, wire.view(-1), plan.recv_counts, plan.send_counts, group, name)
    return received


def to_heads(tensors: Sequence[Tensor], layout: Layout, group: ProcessGroup, name: str) -> Sequence[Tensor]:
    """``[b, s, H, d] -> [b, sum(seq_sizes), H of this rank, d]`` for every tensor, in one all-to-all.

    The results are disjoint slices of one buffer where there are several.
    """
    if layout.plain and (layout.even or ops.path_for(tensors[0]) == "triton"):
        return [_one(tensors[0], HEAD_DIM, layout.seq_dim, layout, group, name)]
    span = enter(name, "to_heads", group, tensors, (layout,)) or Span(name)
    _checked(tensors, name)
    by_kernel = ops.path_for(tensors[0], "segments") == "triton"
    if by_kernel:  # before the plan, which is made for their strides
        tensors = [cached.resolved(x) for x in tensors]
    plan = _planned(heads_plan, tensors, layout, group, name)
    wire, path, copied = _pack(tensors, plan, by_kernel)
    received = _sent(wire, plan, group, name)
    del wire  # what was sent is not needed while what arrived is unpacked
    if not plan.unpack:
        fused = torch.ops.aten._unsafe_view(received, plan.fused)
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
                _view(fused, copy).copy_(_wire_view(received, copy))
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
    """The adjoint of ``to_heads``: ``[b, S, H of this rank, d] -> [b, s, H, d]``; heads that ranks share are summed.

    ``outs`` are filled where given.
    """
    if layout.plain and outs is None and (layout.even or ops.path_for(tensors[0]) == "triton"):
        return [_one(tensors[0], layout.seq_dim, HEAD_DIM, layout, group, name)]
    span = enter(name, "to_sequence", group, tensors, (layout,)) or Span(name)
    _checked(tensors, name)
    by_kernel = ops.path_for(tensors[0], "segments") == "triton"
    if by_kernel:  # before the plan, which is made for their strides
        tensors = [cached.resolved(x) for x in tensors]
    out_strides = () if outs is None else tuple([x.stride() for x in outs])
    plan = _planned(sequence_plan, tensors, layout, group, name, out_strides)
    wire, path, copied = _pack(tensors, plan, by_kernel)
    received = _sent(wire, plan, group, name)
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
    shapes, strides = tuple([x.shape for x in tensors]), tuple([x.stride() for x in tensors])
    try:
        return function(shapes, strides, layout, group.rank(), tensors[0].itemsize, *more)
    except ShapeError as error:
        raise located(error, tensors[0].shape, name, group) from None


def _one(x: Tensor, scatter_dim: int, gather_dim: int, layout: Layout, group: ProcessGroup, name: str) -> Tensor:
    """The exchange of one tensor, whose packing the kernels take."""
    if layout.even:
        return eager.all_to_all(x, scatter_dim, gather_dim, group, name)
    sizes = {HEAD_DIM: layout.shares[0].sizes, layout.seq_dim: layout.seq_sizes}
    return eager.all_to_all(
        x, scatter_dim, gather_dim, group, name, scatter_sizes=sizes[scatter_dim], gather_sizes=sizes[gather_dim]
    )


def _unpack_heads(
    received: Tensor, plan: ExchangePlan, layout: Layout, outs: Sequence[Tensor] | None
) -> tuple[Sequence[Tensor], int]:
    """Every tensor out of the blocks that arrived, summed over the ranks that share a head; the bytes copied."""
    copied = received.nbytes
    if outs is None and len(plan.unpack) == len(plan.shapes):  # one run: every result is one strided read
        results: Sequence[Tensor] = [
            _unpacked(received, copy, shape, layout.shares[copy.index])
            for copy, shape in zip(plan.unpack, plan.shapes, strict=True)
        ]
        return results, copied + sum(x.nbytes for x in results)
    results = outs if outs is not None else [received.new_empty(shape) for shape in plan.shapes]
    shared: dict[tuple[int, int], list[Tensor]] = {}
    for copy in plan.unpack:
        blocks = _wire_view(received, copy)
        if layout.shares[copy.index].replicated:
            shared.setdefault((copy.index, copy.head), []).append(blocks)
        else:
            _view(results[copy.index], copy).copy_(blocks)
    for (index, head), parts in shared.items():
        blocks, target = parts[0], results[index].narrow(HEAD_DIM, head, 1)
        if len(parts) > 1:  # summed at once, so that low precision rounds once
            blocks = torch.cat(parts)
            copied += 2 * blocks.nbytes
        if blocks.shape[0] > _IN_ORDER:
            target.copy_(_summed(blocks))
        else:
            torch.sum(blocks, 0, dtype=received.dtype, out=target)
    return results, copied + sum(x.nbytes for x in results)


def _unpacked(received: Tensor, copy: BlockCopy, shape: Ints, share: HeadShare) -> Tensor:
    """A tensor whose heads lie at one stride in the blocks of all ranks, or are summed over them."""
    if share.replicated:
        blocks = _wire_view(received, copy)
        return blocks.sum(0, dtype=received.dtype) if copy.size[0] <= _IN_ORDER else _summed(blocks)
    (count, *tokens, heads, head_dim), (block, *steps) = copy.size, copy.wire_stride
    size, stride = (*tokens, count, heads, head_dim), (*steps[:2], block, *steps[2:])
    rows = received.as_strided(size, stride, copy.wire_start).clone(memory_format=torch.contiguous_format)
    return torch.ops.aten._unsafe_view(rows, shape)


def _summed(blocks: Tensor) -> Tensor:
    """The sum over dim 0 in order, which torch.sum of many does not keep, with one rounding."""
    if blocks.dtype not in _SUMMED:
        return blocks.sum(0, dtype=blocks.dtype)
    total = blocks[0].to(torch.promote_types(blocks.dtype, torch.float32), copy=True)
    for block in blocks[1:]:
        total += block
    return total.to(blocks.dtype)
