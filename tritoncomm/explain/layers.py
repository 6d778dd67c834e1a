"""The steps of layers: attention and recurrences by heads, convolutions by a halo, sums over a wire, and experts."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from tritoncomm.core.heads import HeadLayout, heads_plan, sequence_plan
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.node_exchange import Nodes
from tritoncomm.core.plan import Ints, check_split_sizes, normalize_dim, split_evenly
from tritoncomm.core.rows import wire_row
from tritoncomm.core.wire_chunks import WireExchange, plan_chunks, row_stride
from tritoncomm.core.wire_sum import Wire, chunk_elements
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.experts.listed_rows import wide_of
from tritoncomm.explain.collectives import Steps, located, rows
from tritoncomm.explain.steps import Movement, PlannedCall, Step
from tritoncomm.parsing import dtype_name
from tritoncomm.record import CopyPath
from tritoncomm.recurrent import plan_halo, plan_heads
from tritoncomm.ulysses import plan_exchange

__all__ = ["LAYERS", "Directions", "ExplainedLayer", "sum_over_wire"]

_SHAPES = {4: "[batch, positions, heads, head_dim]", 3: "[batch, channels, positions]", 2: "[tokens, hidden]"}


class Directions(NamedTuple):
    """Forward and backward of a layer."""

    forward: Movement
    backward: Movement


class ExplainedLayer(NamedTuple):
    """A layer that is explained.

    Attributes:
        name: of the function or class.
        dims: number of dims of the shape.
        positions: dim of the positions where the caller names none; None if there is no choice.
        steps: steps of forward and of backward, from the shape and the call.
    """

    name: str
    dims: int
    positions: int | None
    steps: Callable[[Ints, PlannedCall], Directions]

    def explained(self, shape: Ints, call: PlannedCall) -> Directions:
        """Return forward and backward; over one rank nothing is sent, and neither has a step."""
        if len(shape) != self.dims:
            raise ShapeError(f"plan: {self.name} takes {_SHAPES[self.dims]}, not {list(shape)}")
        if call.stride is not None:
            raise ArgumentError(f"plan: {self.name} is explained for contiguous tensors, without strides")
        if call.world == 1:
            unmoved = Movement(self.name, shape, result=shape, steps=())
            return Directions(unmoved, replace(unmoved, name=f"{self.name}.backward"))
        with located(shape, call):
            return self.steps(shape, call)


def _ulysses(shape: Ints, call: PlannedCall) -> Directions:
    """Explain the exchanges around an attention; ``heads`` are those of queries, and of keys and values."""
    q_heads, *kv_heads = call.layer.heads or (shape[2],)
    positions = normalize_dim(shape, call.dims[0])
    if len(kv_heads) > 1 or q_heads != shape[2] or positions > 1:
        raise ArgumentError(
            f"UlyssesAttention takes the heads of queries, {shape[2]} as in the shape, and those of keys and values, "
            f"not {list(call.layer.heads)}, and positions in dim 0 or 1"
        )
    kv = (*shape[:2], *(kv_heads or [q_heads]), shape[3])
    planned = plan_exchange(shape, kv, kv, call.world, call.rank, positions, call.sizes, "UlyssesAttention")
    return _around("UlyssesAttention", [shape, kv, kv], planned.qkv, planned.out, call)


def _by_heads(shape: Ints, call: PlannedCall) -> Directions:
    """Explain the exchanges around a recurrence; ``heads`` are those of every tensor, the result has the most."""
    heads = call.layer.heads or (shape[2],)
    if max(heads) != shape[2]:
        raise ArgumentError(f"by_heads: the shape has the most heads of {list(heads)}, not {shape[2]}")
    if call.world > shape[2]:
        raise UnsupportedError(f"by_heads: {shape[2]} heads are fewer than ranks; columns are not explained")
    positions = call.sizes or (shape[1],) * call.world
    planned = plan_heads(heads, positions, call.world, "by_heads")
    shapes = [(*shape[:2], count, shape[3]) for count in heads]
    return _around("by_heads", shapes, planned.tensors, planned.out, call)


def _around(
    name: str, shapes: Sequence[Ints], layout: HeadLayout, out_layout: HeadLayout, call: PlannedCall
) -> Directions:
    """Explain the exchanges of tensors of these shapes to heads, and of a result back, which has the most heads."""

    def to_heads(shapes: Sequence[Ints], layout: HeadLayout, text: str) -> list[Step]:
        strides = tuple(map(contiguous_stride, shapes))
        planned = heads_plan(tuple(shapes), strides, layout, call.rank, call.dtype).exchange
        return call.exchange(planned, shapes, text)

    def to_sequence(shapes: Sequence[Ints], layout: HeadLayout, text: str) -> list[Step]:
        strides = tuple(map(contiguous_stride, shapes))
        planned = sequence_plan(tuple(shapes), strides, layout, call.rank, call.dtype)
        return call.exchange(planned, shapes, text)

    def shapes_by_heads(layout: HeadLayout, shapes: Sequence[Ints]) -> list[Ints]:
        """Return the shapes of all positions of this rank's heads."""
        total = sum(layout.seq_sizes)
        lead = [(shape[0], total) if layout.seq_dim else (total, shape[1]) for shape in shapes]
        counts = [share.sizes[call.rank] for share in layout.shares]
        return [(*ends, count, shape[3]) for ends, count, shape in zip(lead, counts, shapes, strict=True)]

    result = max(shapes, key=lambda shape: shape[2])
    there, back = "positions to the ranks of their heads", "heads to the ranks of their positions"
    full, full_out = shapes_by_heads(layout, shapes), shapes_by_heads(out_layout, [result])
    forward = [*to_heads(shapes, layout, there), *to_sequence(full_out, out_layout, back)]
    backward = [*to_heads([result], out_layout, there), *to_sequence(full, layout, back)]
    return _directions(name, shapes[0], result, forward, backward)


def _directions(name: str, shape: Ints, result: Ints, forward: Sequence[Step], backward: Sequence[Step]) -> Directions:
    """Return both directions of a layer between tensors of these shapes."""
    gradient = Movement(f"{name}.backward", result, shape, tuple(backward))
    return Directions(Movement(name, shape, result, tuple(forward)), gradient)


def _conv_halo(shape: Ints, call: PlannedCall) -> Directions:
    """Explain the halo of a convolution; torch concatenates it with the shard, which is no step here."""
    dim, width = normalize_dim(shape, call.dims[0]), call.layer.taps - 1
    if dim == 0 or width < 0:
        raise ArgumentError(f"conv_halo takes positions in dim 1 or 2, not {dim}, and one tap or more")
    positions = call.sizes or (shape[dim],) * call.world
    check_split_sizes((sum(positions),), 0, call.world, positions)
    halo, other_dims = plan_halo(positions, width, call.rank), [*shape[:dim], *shape[dim + 1 :]]

    def steps(send: Ints, recv: Ints) -> Sequence[Step]:
        if not width:  # one tap needs no halo
            return ()
        (step,), _ = rows((sum(send), *other_dims), dims=(), call=replace(call, sizes=send, out_sizes=recv))
        return (replace(step, what=f"{sum(send)} positions to other ranks, {sum(recv)} arrive"),)

    there, back = steps(halo.sent, halo.received), steps(halo.received, halo.sent)
    return _directions("conv_halo", shape, shape, there, back)


def sum_over_wire(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps of a reduce-scatter whose values travel in 16 bits, summed in fp32 in chunks."""
    dim, x = normalize_dim(shape, dims[0]), call.input(shape).to(call.dtype)
    wire, steps = _wire_of(call), []
    with located(shape, call):
        sizes = call.sizes or (split_evenly(shape, dim, call.world),) * call.world
        check_split_sizes(shape, dim, call.world, sizes)
    if not x.is_floating_point():
        raise UnsupportedError(f"plan: with wire the tensor must be floating point, not {call.dtype}")
    if row_stride(shape, x.stride(), dim) is None:
        flat = x.new_empty(shape, dtype=wire.dtype)
        steps.append(call.local("copy", f"{list(shape)} made contiguous in {wire.dtype}", x.nbytes + flat.nbytes))
        x = flat
    limit = max(chunk_elements(x.numel(), wire.dtype.itemsize), 1)
    layouts = ((shape, x.stride(), dim, sizes),)
    chunks = plan_chunks(layouts, call.world, call.rank, limit, wire.dtype, wire.between, wire.nodes)
    result = (*shape[:dim], sizes[call.rank], *shape[dim + 1 :])
    in_chunks: list[list[Step]] = []
    for chunk in chunks:
        source, of_levels = x, []
        for planned in chunk.levels:
            total_dtype = call.dtype if planned is chunk.levels[-1] else wire.between
            target = torch.empty((planned.unpack.elements // call.world,), dtype=total_dtype, device="meta")
            is_first = not of_levels
            of_levels += _sum_level(planned, source, target, _of_level(call, wire, is_first))
            source = target
        in_chunks.append(of_levels)
    # Chunks have the same steps, which are shown once, with the sums of their bytes.
    return [*steps, *(_added(parts) for parts in zip(*in_chunks, strict=True))], result


def _sum_level(planned: WireExchange, source: Tensor, target: Tensor, call: PlannedCall) -> list[Step]:
    """Return the steps of one level of a chunk: a pack, an all-to-all and a sum."""
    pack, dtype = planned.pack, planned.pack.dtypes[0]
    # A whole tensor in order is the wire; the sums of nodes are one by themselves.
    is_view = source.dtype is dtype and pack.is_in_order and (source.numel() == pack.elements or source.dim() == 1)
    packed, summed = 0 if is_view else pack.packed_bytes([source]), planned.unpack.unpacked_bytes([target])
    path, wire = call.path("segments", source.nbytes, source.itemsize), dtype_name(dtype)
    return [
        call.local("pack", f"values as {wire}", packed, path),
        replace(call, dtype=dtype, stride=None).all_to_all(planned, f"{wire} to the ranks of their shards"),
        call.local("sum", "in rank order, in fp32", summed, call.path("reduce", summed, 16)),
    ]


def _of_level(call: PlannedCall, wire: Wire, is_first: bool) -> PlannedCall:
    """Return the call with the rates of a level: in the node, or between nodes; the machine's for one level."""
    if wire.nodes is None:
        return call
    return replace(call, rates=replace(call.rates, node=call.world if is_first else 1))


def _added(steps: Sequence[Step]) -> Step:
    """Return the same step of all chunks as one."""
    first = max(steps, key=lambda step: step.bytes_copied)  # a view in one chunk may be a pass in another
    return replace(
        first,
        what=first.what if len(steps) == 1 else f"{first.what}, in {len(steps)} chunks",
        bytes_copied=sum(step.bytes_copied for step in steps),
        bytes_sent=sum(step.bytes_sent for step in steps),
        seconds=sum(step.seconds for step in steps),
        misaligned=tuple(sorted({rank for step in steps for rank in step.misaligned})),
    )


def _wire_of(call: PlannedCall) -> Wire:
    """Return the wire of a sum; two levels have as many ranks on a node as the rates say."""
    dtype, size = call.layer.wire, call.rates.node
    assert dtype is not None
    if dtype not in (torch.bfloat16, torch.float16):
        raise ArgumentError(f"plan: wire must be bfloat16 or float16, not {dtype}")
    if not call.layer.by_nodes or call.world <= size or size == 1:
        return Wire(dtype)
    if call.world % size:
        raise UnsupportedError(
            f"plan: two levels need as many ranks on every node; {call.world} are on nodes of {size}"
        )
    return Wire(dtype, nodes=Nodes(call.world // size, size, call.rank // size, call.rank % size))


class _ExpertRows(NamedTuple):
    """Rows of tokens that travel between the ranks of tokens and the ranks of experts.

    Attributes:
        local: rows that stay on this rank.
        outgoing, incoming: rows that a dispatch sends to other ranks, and receives.
        slots: most ranks of a token.
        path: of the passes.
        index_bytes: bytes of an index of a row.
    """

    local: int
    outgoing: int
    incoming: int
    slots: int
    path: CopyPath
    index_bytes: int


def _expert_rows(shape: Ints, call: PlannedCall) -> _ExpertRows:
    """Return the rows of a dispatch: those of the sizes, else as many as random experts are expected to get."""
    topk, world, tokens = call.layer.topk, call.world, shape[0]
    if topk < 1:
        raise ArgumentError("dispatch and combine need the number of experts of a token")
    if (call.sizes is None) is not (call.out_sizes is None):
        raise ArgumentError(
            "dispatch and combine take both sizes, of the rows to each rank and from each rank, or neither"
        )
    # A token goes to a rank unless all of its random experts are on others.
    expected = (round(tokens * (1 - (1 - 1 / world) ** topk)),) * world
    send, recv = call.sizes or expected, call.out_sizes or expected
    if len(send) != world or len(recv) != world or send[call.rank] != recv[call.rank] or max(send) > tokens:
        raise ShapeError(
            f"rows to the ranks {list(send)} and from them {list(recv)} need an entry for each of {world} ranks, at "
            f"most {tokens} rows, and as many for this rank in both"
        )
    path, local = call.path("rows", call.nbytes(shape), unit=16), send[call.rank]
    # ``slots`` is the most ranks that a token goes to.
    return _ExpertRows(
        local=local, outgoing=sum(send) - local, incoming=sum(recv) - local, slots=min(topk, world), path=path,
        index_bytes=4 if path == "triton" else 8,  # torch sorts to int64
    )  # fmt: skip


def _to_ranks(widths: Sequence[int], rows: _ExpertRows, call: PlannedCall) -> list[Step]:
    """Return the steps that bring rows of tensors, of so many bytes each, to the ranks of their experts."""
    row_bytes = wire_row(widths).width
    gather_bytes = sum(2 * width + rows.index_bytes for width in widths)  # bytes of a row that is gathered
    text = f"{rows.outgoing} rows of {row_bytes} B, {rows.incoming} arrive"
    return [
        call.local("gather", f"{rows.outgoing} rows for other ranks", rows.outgoing * gather_bytes, rows.path),
        call.collective("all-to-all", text, rows.outgoing * row_bytes, rows.incoming * row_bytes),
        call.local("gather", f"{rows.local} rows of this rank", rows.local * gather_bytes, rows.path),
    ]


def _to_tokens(widths: Sequence[int], tokens: int, rows: _ExpertRows, call: PlannedCall) -> list[Step]:
    """Return the steps that bring rows back to the ranks of their tokens, where they are added up."""
    row_bytes, total, steps = wire_row(widths).width, sum(widths), []
    if len(widths) > 1 or total != row_bytes:  # else the rows are the wire
        steps.append(call.local("copy", f"{rows.incoming} rows for other ranks", 2 * rows.incoming * total))
    text = f"{rows.incoming} rows of {row_bytes} B, {rows.outgoing} arrive"
    steps.append(call.collective("all-to-all", text, rows.incoming * row_bytes, rows.outgoing * row_bytes))
    if rows.path == "torch":  # a kernel adds rows of this rank where they are
        steps.append(call.local("copy", f"{rows.local} rows of this rank", 2 * rows.local * total))
    indices = tokens * rows.slots
    summed = sum(indices * (width + rows.index_bytes) + tokens * width for width in widths)
    text = f"up to {rows.slots} rows of a token, in rank order"
    return [*steps, call.local("sum", text, summed, rows.path)]


def _dispatch(shape: Ints, call: PlannedCall) -> Directions:
    """Explain a dispatch: rows, routing weights and ids go; gradients of rows and weights come back."""
    rows, width = _expert_rows(shape, call), shape[1] * call.dtype.itemsize
    weights, ids = call.layer.topk * wide_of(call.dtype).itemsize, call.layer.topk * 4
    there = _to_ranks([width, weights + ids], rows, call)
    back = _to_tokens([width, weights], shape[0], rows, call)
    return _directions("dispatch", shape, (rows.local + rows.incoming, shape[1]), there, back)


def _combine(shape: Ints, call: PlannedCall) -> Directions:
    """Explain a combine whose result has this shape."""
    rows, width = _expert_rows(shape, call), shape[1] * call.dtype.itemsize
    there, back = _to_tokens([width], shape[0], rows, call), _to_ranks([width], rows, call)
    return _directions("combine", (rows.local + rows.incoming, shape[1]), shape, there, back)


LAYERS = {
    "ulysses": ExplainedLayer("UlyssesAttention", dims=4, positions=1, steps=_ulysses),
    "by_heads": ExplainedLayer("by_heads", dims=4, positions=None, steps=_by_heads),
    "conv_halo": ExplainedLayer("conv_halo", dims=3, positions=2, steps=_conv_halo),
    "dispatch": ExplainedLayer("dispatch", dims=2, positions=None, steps=_dispatch),
    "combine": ExplainedLayer("combine", dims=2, positions=None, steps=_combine),
}
