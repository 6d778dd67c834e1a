"""The exchange of Ulysses, not differentiable: sequence shards of all heads <-> all positions of a share of the heads.

Several tensors share one message; ``head_plan`` has the order of its wire.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend, cached, eager, ops
from tritoncomm.core.head_plan import HEAD_DIM, BlockCopy, ExchangePlan, HeadShare, Layout, heads_plan, sequence_plan
from tritoncomm.core.plan import Ints, located
from tritoncomm.core.validation import check_input
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["to_heads", "to_sequence"]


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


def _pack(tensors: Sequence[Tensor], plan: ExchangePlan) -> tuple[Tensor, int]:
    """The wire, and the bytes read plus written for it."""
    first = tensors[0]
    if plan.packed_shape is not None:
        if len(tensors) > 1:
            wire = torch.cat([_view(tensors[copy.index], copy) for copy in plan.pack], 3)
            return wire, 2 * wire.nbytes
        x = cached.resolved(first)
        wire = _view(x, plan.pack[0]).contiguous()
        return wire, 0 if wire.data_ptr() == x.data_ptr() else 2 * wire.nbytes
    wire = first.new_empty(plan.elements[0])
    for copy in plan.pack:
        _wire_view(wire, copy).copy_(_view(tensors[copy.index], copy))
    return wire, 2 * wire.nbytes


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
    started = record.now()
    _range = None
    if record.switch._is_profiler_enabled:
        _range = record.begin(name, "to_heads", group, tensors, (layout,))
    _checked(tensors, name)
    plan = _planned(heads_plan, tensors, layout, group, name)
    wire, copied = _pack(tensors, plan)
    received = _sent(wire, plan, group, name)
    path = "torch" if copied else "view"
    del wire  # what was sent is not needed while what arrived is unpacked
    if not plan.unpack:
        fused = torch.ops.aten._unsafe_view(received, plan.fused)
    elif len(plan.unpack) == 1:
        fused, path, unpacked = ops.unpack(received, plan.fused, layout.seq_dim, len(layout.seq_sizes))
        copied += unpacked
    else:
        fused = received.new_empty(plan.fused)
        for copy in plan.unpack:
            _view(fused, copy).copy_(_wire_view(received, copy))
        path, copied = "torch", copied + 2 * fused.nbytes
    record.add(name, path, copied, plan.bytes_sent, started)
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
    started = record.now()
    _range = None
    if record.switch._is_profiler_enabled:
        _range = record.begin(name, "to_sequence", group, tensors, (layout,))
    _checked(tensors, name)
    out_strides = () if outs is None else tuple([x.stride() for x in outs])
    plan = _planned(sequence_plan, tensors, layout, group, name, out_strides)
    wire, copied = _pack(tensors, plan)
    received = _sent(wire, plan, group, name)
    del wire
    results, unpacked = _unpack_heads(received, plan, layout, outs)
    record.add(name, "torch", copied + unpacked, plan.bytes_sent, started)
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
        torch.sum(blocks, 0, dtype=received.dtype, out=target)
    return results, copied + sum(x.nbytes for x in results)


def _unpacked(received: Tensor, copy: BlockCopy, shape: Ints, share: HeadShare) -> Tensor:
    """A tensor whose heads lie at one stride in the blocks of all ranks, or are summed over them."""
    if share.replicated:
        return _wire_view(received, copy).sum(0, dtype=received.dtype)
    (count, *tokens, heads, head_dim), (block, *steps) = copy.size, copy.wire_stride
    size, stride = (*tokens, count, heads, head_dim), (*steps[:2], block, *steps[2:])
    rows = received.as_strided(size, stride, copy.wire_start).clone(memory_format=torch.contiguous_format)
    return torch.ops.aten._unsafe_view(rows, shape)
