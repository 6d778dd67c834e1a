"""The kernels in plain torch: the path of CPU tensors (cross entropy has another), and of GPU tensors where it wins."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncomm_kernels.config import Config, power_of_two
from tritoncomm_kernels.dtypes import checked_scale, wide_type
from tritoncomm_kernels.geometry import (
    DOT_LANES,
    BucketSort,
    OwnerSort,
    check_ids,
    check_parts,
    geometry_of,
    indexed_rows,
    listed_rows,
)
from tritoncomm_kernels.segments import (
    PADDING,
    CheckedSegments,
    Copies,
    Segments,
    checked_copies,
    checked_segments,
    in_turns,
    layouts_of,
)  # fmt: skip

__all__ = [
    "copy_segments",
    "dot_rows",
    "gather_rows",
    "gather_segments",
    "gradient",
    "pack",
    "reduce",
    "scale_dot_rows",
    "scale_rows",
    "scatter_rows",
    "scatter_segments",
    "sort_by_bucket",
    "sort_by_owner",
    "statistics",
    "sum_rows",
    "unpack",
]

_COPIED = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.uint8)
# Elements of the wide type that a pass over rows by indices buffers at most: 1 MiB of fp32, which stay in a cache.
_BUFFERED = 1 << 18
_SUMMED = 1 << 16  # elements that a thread sums before it goes on: 256 KiB of fp32, which stay in its cache


def pack(
    rows: Tensor,
    wire: Tensor,
    scale: float | None = None,
    *,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """``wire[w, o, k] = rows[o, w*run + k] * scale``, zeros past the end of a row; see ``tritoncomm_kernels.pack``."""
    splits = _checked("pack", rows, wire, scale, sizes, "wire")
    wide = wide_type("pack", rows.dtype, wire.dtype, scale is not None)
    for block, shard in _shards(rows, wire, splits):
        if shard.shape[-1] < block.shape[-1]:
            block[..., shard.shape[-1] :].zero_()
            block = block[..., : shard.shape[-1]]
        put(block, [shard], scale, wide)
    return rows.nbytes + wire.nbytes


def unpack(
    wire: Tensor,
    rows: Tensor,
    scale: float | None = None,
    *,
    accumulate: bool = False,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """``rows[o, w*run + k] = wire[w, o, k] * scale``, added when accumulating; see ``tritoncomm_kernels.unpack``."""
    splits = _checked("unpack", rows, wire, scale, sizes, "rows")
    wide = wide_type("unpack", wire.dtype, rows.dtype, scale is not None, accumulate)
    for block, shard in _shards(rows, wire, splits):
        put(shard, [block[..., : shard.shape[-1]]], scale, wide, accumulate)
    return rows.numel() * wire.element_size() + rows.nbytes * (2 if accumulate else 1)


def reduce(wire: Tensor, out: Tensor, scale: float | None = None, *, config: Config | None = None) -> int:
    """``out[k] = (wire[0, k] + wire[1, k] + ...) * scale``, summed in rank order; see ``tritoncomm_kernels.reduce``."""
    check_parts(wire.shape, wire.stride(), out.shape, out.stride())
    if wire.is_complex() and wire.dtype is out.dtype and scale is None:
        wire, out = torch.view_as_real(wire).flatten(1), torch.view_as_real(out).flatten()
    wide = wide_type("reduce", wire.dtype, out.dtype, scale is not None, summed=True)
    assert wide is not None
    factor = None if scale is None else checked_scale("reduce", scale, wide)
    block = _SUMMED * torch.get_num_threads()
    sums = None if out.dtype is wide else wire.new_empty(min(block, out.numel()), dtype=wide)
    for start in range(0, out.numel(), block):
        result, (first, *others) = out[start : start + block], wire[:, start : start + block]
        total = result if sums is None else sums[: result.numel()]
        if others and wire.dtype is wide:
            torch.add(first, others.pop(0), out=total)
        else:
            total.copy_(first)
        for part in others:
            total += part
        if factor is not None:
            total *= factor
        if total is not result:
            result.copy_(_narrowed(total, out.dtype))
    return wire.nbytes + out.nbytes


def gather_segments(tensors: Sequence[Tensor], wire: Tensor, segments: Segments, *, scale: float | None = None) -> int:
    """Rows of several tensors into a wire, zeros where it is padding; see ``tritoncomm_kernels.gather_segments``."""
    checked = checked_segments("gather_segments", segments, layouts_of(wire, tensors), scale is not None)
    if not segments.segments:
        return 0
    with torch.no_grad():
        zeros, copies, casts = _segment_views(tensors, wire, segments, checked)
        if zeros:
            torch._foreach_zero_(zeros)  # pyright: ignore[reportPrivateImportUsage]
        if copies:
            _copy_all([(block, rows) for rows, block in copies])
        for rows, (block,), wide in casts:
            put(block, [rows], scale, wide)
    return checked.copied


def scatter_segments(
    wire: Tensor,
    tensors: Sequence[Tensor],
    segments: Segments,
    *,
    scale: float | None = None,
    accumulate: bool = False,
    sums: bool = False,
) -> int:
    """A wire back into rows of several tensors; see ``tritoncomm_kernels.scatter_segments``."""
    layouts = layouts_of(wire, tensors)
    checked = checked_segments("scatter_segments", segments, layouts, scale is not None, accumulate, sums)
    if not segments.segments:
        return 0
    with torch.no_grad():
        _, copies, casts = _segment_views(tensors, wire, segments, checked)
        if copies:
            _copy_all(copies)
        for rows, blocks, wide in casts:
            put(rows, blocks, scale, wide, accumulate)
    return checked.copied


def copy_segments(tensors: Sequence[Tensor], targets: Sequence[Tensor], copies: Copies) -> int:
    """Rows of several tensors into as many others; see ``tritoncomm_kernels.copy_segments``."""
    every = in_turns(tensors, targets)
    if not every:
        return 0
    checked = checked_copies("copy_segments", copies, layouts_of(every[-1], every))
    pairs = []
    with torch.no_grad():
        for segment, wide in zip(copies.segments, checked.wides, strict=True):
            index, offset, rows, row, stride, target_byte, target_stride = segment
            source, target = tensors[index], targets[index]
            target_start = int(target.storage_offset()) + target_byte // target.itemsize
            target_rows = target.as_strided((rows, row), (target_stride or row, 1), target_start)
            x = source.as_strided((rows, row), (stride, 1), int(source.storage_offset()) + offset)
            if wide is None:
                pairs.append((target_rows, x))
            else:
                put(target_rows, [x], scale=None, wide=wide)
        if pairs:
            _copy_all(pairs)
    return checked.copied


def gather_rows(x: Tensor, index: Tensor, out: Tensor) -> int:
    """``out[i] = x[index[i]]``, zeros where there is no such row; see ``tritoncomm_kernels.gather_rows``."""
    if torch.is_grad_enabled():
        with torch.no_grad():
            return gather_rows(x, index, out)
    rows = indexed_rows("gather_rows", x, index, out)
    if not rows.moved:
        return 0
    if not rows.limit:
        out.zero_()
        return rows.moved
    x, out = _as_integers(x), _as_integers(out)
    if not x.is_cuda:
        # An index that is no row raises, and is left to what follows: a search for one takes five operators.
        with suppress(IndexError):
            torch.index_select(x, 0, index, out=out)
            return rows.moved
    is_row = (index >= 0) & (index < rows.limit)
    out.copy_(x.index_select(0, torch.where(is_row, index, 0)))
    out.masked_fill_((~is_row).view(-1, *(1 for _ in out.shape[1:])), 0)
    return rows.moved


def scatter_rows(x: Tensor, index: Tensor, out: Tensor) -> int:
    """``out[index[i]] = x[i]``, left out where there is no such row; see ``tritoncomm_kernels.scatter_rows``."""
    rows = indexed_rows("scatter_rows", x, index, out)
    if not rows.moved:
        return 0
    with torch.no_grad():
        is_row = (index >= 0) & (index < rows.limit)
        x, out, index = _as_integers(x), _as_integers(out), index.long()
        if x.is_cuda or not bool(is_row.all()):
            x, index = x[is_row], index[is_row]
        out.index_copy_(0, index, x)
    return rows.moved


def sum_rows(x: Tensor, index: Tensor, weights: Tensor | None, out: Tensor, behind: Tensor | None = None) -> int:
    """``out[i] = sum of weights[i, s] * x[index[i, s]]`` in the order of s; see ``tritoncomm_kernels.sum_rows``."""
    lists = listed_rows("sum_rows", rows=x, totals=out, index=index, weights=weights, slots=index, behind=behind)
    if behind is not None:
        return sum_rows(torch.cat([x, behind]), index, weights, out)
    for sources, factors, total in _blocks(lists.slots * lists.row, index, weights, out):
        is_row = (sources >= 0) & (sources < lists.rows)
        places = is_row.view(-1).nonzero().view(-1)  # each use of a mask as an index would search them again
        parts = x.index_select(0, sources.view(-1).index_select(0, places)).to(lists.wide)
        if factors is not None:
            parts *= factors.reshape(-1, 1).index_select(0, places)
        if x.is_cuda:  # where index_add_ adds atomically, in no order
            wide = torch.segment_reduce(parts, "sum", lengths=is_row.sum(1), axis=0, unsafe=True, initial=0)
        else:  # index_add_ adds the rows in order here, in a tenth of the time of segment_reduce
            wide = total.zero_() if total.dtype is lists.wide else parts.new_zeros(total.shape)
            wide.index_add_(0, places // lists.slots, parts)
        if wide is not total:
            total.copy_(_narrowed(wide, out.dtype))
    nbytes = index.numel() * (lists.row * x.itemsize + index.itemsize) + out.nbytes
    return nbytes + (0 if weights is None else weights.nbytes)


def scale_rows(x: Tensor, pair: Tensor, weights: Tensor, out: Tensor) -> int:
    """``out[j] = weights[i, s] * x[i]``, where ``pair[j] = i*slots + s``; see ``tritoncomm_kernels.scale_rows``."""
    lists = listed_rows("scale_rows", rows=out, totals=x, index=pair, weights=weights, slots=weights)
    factors = weights.reshape(-1, 1)
    for pairs, target in _blocks(lists.row, pair, out):
        rows, places, mask = _rows_of_pairs(x, pairs, lists.slots)
        scaled = rows.to(lists.wide).mul_(factors.index_select(0, places))
        if mask is None:
            target.copy_(_narrowed(scaled, out.dtype))
        else:
            target.zero_()[mask] = _narrowed(scaled, out.dtype).to(out.dtype)
    return lists.rows * (lists.row * (x.itemsize + out.itemsize) + pair.itemsize + weights.itemsize)


def dot_rows(x: Tensor, y: Tensor, pair: Tensor, out: Tensor) -> int:
    """``out[i, s] = x[i] . y[j]``, where ``pair[j] = i*slots + s``; see ``tritoncomm_kernels.dot_rows``."""
    lists = listed_rows("dot_rows", rows=y, totals=x, index=pair, weights=out, slots=out)
    if not out.is_contiguous():
        raise ValueError(f"dot_rows: out must be contiguous, not strided by {out.stride()}")
    lanes = min(DOT_LANES, power_of_two(lists.row))
    steps = -(-lists.row // lanes)
    for pairs, rows_of_y in _blocks(lists.row, pair, y):
        rows, places, mask = _rows_of_pairs(x, pairs, lists.slots)
        products = rows.to(lists.wide).mul_(rows_of_y if mask is None else rows_of_y[mask])
        if steps * lanes != lists.row:
            products = torch.nn.functional.pad(products, (0, steps * lanes - lists.row))
        # As the kernel adds up: partial sums by the element modulo the lanes, then pairs of neighbours.
        if steps:
            total, *blocks = products.view(-1, steps, lanes).unbind(1)
        else:
            total, blocks = products.new_zeros(len(products), lanes), []
        for block in blocks:
            total += block
        while (half := total.shape[1] // 2) > 0:
            even, odd = total.view(-1, half, 2).unbind(2)
            total = even + odd
        out.view(-1).index_copy_(0, places.long(), total.view(-1) + 0.0)  # -0 becomes +0, with which a sum begins
    return lists.rows * (lists.row * (x.itemsize + y.itemsize) + pair.itemsize + out.itemsize)


def sort_by_owner(ids: Tensor, per: int, owner: int, counts: Tensor) -> OwnerSort:
    """Sort tokens by the owners of their ids, those of ``owner`` last; see ``tritoncomm_kernels.sort_by_owner``."""
    check_ids("sort_by_owner", ids, counts)
    (tokens, k), owners = ids.shape, counts.shape[0]
    edges = torch.arange(0, (owners + 1) * per, per, dtype=ids.dtype, device=ids.device)
    # Keys: 0 for an id of no owner, below the first edge or behind the last one; w + 1 for owner w. Then W + 1 for
    # ``owner``, which comes last; and W + 2 more where an earlier id of the token has that key.
    keys = torch.bucketize(ids.contiguous(), edges, right=True).remainder_(owners + 1).sort(1).values
    before, behind = keys[:, :-1], keys[:, 1:]
    behind.add_(before == behind, alpha=owners + 2)
    if k > owners:
        keys = keys.sort(1).values  # so that the first slots of a token have all of its owners
    keys, order = keys.masked_fill(keys == owner + 1, owners + 1).view(-1).sort(stable=True)
    ramp = torch.arange(max(keys.shape[0], 2 * owners + 4), device=keys.device)
    sizes = torch.searchsorted(keys, ramp[: 2 * owners + 4]).diff()
    # By key: 0, 1 to W, W + 1, W + 2 (an id of no owner again), and W + 3 to 2 W + 2 (an id of an owner again).
    wrong, rows, last, wrong_again, rows_again = sizes.split_with_sizes((1, owners, 1, 1, owners))
    torch.stack([rows, rows_again, wrong.expand(owners), wrong_again.expand(owners)], 1, out=counts)
    counts[owner, :1].copy_(last)
    index = torch.empty_like(order).scatter_(0, order, ramp[: keys.shape[0]]).view(tokens, k)
    if k > owners:
        index = index[:, :owners].contiguous()
    return OwnerSort(torch.div(order, k, rounding_mode="floor"), index)


def sort_by_bucket(ids: Tensor, first: int, buckets: int, number: int, total: int, alignment: int = 1) -> BucketSort:
    """Sort ids stably by bucket; see ``tritoncomm_kernels.sort_by_bucket``."""
    check_ids("sort_by_bucket", ids)
    # Modulo the number of all, ids of no bucket come behind the others.
    keys, order = torch.sub(ids, first).remainder_(number).reshape(-1).sort(stable=True)
    ramp = torch.arange(max(order.shape[0], buckets + 1), device=keys.device, dtype=keys.dtype)
    bounds, places = torch.searchsorted(keys, ramp[: buckets + 1]), ramp[: order.shape[0]]
    counts = bounds.diff()
    if alignment == 1:
        pairs, index = order[:total], ids.new_empty(order.shape).scatter_(0, order, places)
    else:
        padded = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
        shift = padded.cumsum(0) - padded - bounds[:-1]  # by how much padding moves a bucket's places
        in_buckets = keys < buckets
        # Ids of no bucket go to one place behind all others, which is cut off.
        places = torch.where(in_buckets, places + shift[keys.clamp(max=buckets - 1).long()], total)
        index = order.new_empty(order.shape).scatter_(0, order, places)
        pairs, counts = order.new_full((total + 1,), -1).scatter_(0, places, order)[:total], padded
    return BucketSort(counts, pairs, torch.div(pairs, ids.shape[1], rounding_mode="floor"), index.view(ids.shape))


def scale_dot_rows(x: Tensor, y: Tensor, pair: Tensor, weights: Tensor, scaled: Tensor, out: Tensor) -> int:
    """Do ``scale_rows`` and ``dot_rows``; see ``tritoncomm_kernels.scale_dot_rows``."""
    moved_twice = len(pair) * (x.shape[1] * x.itemsize + pair.itemsize)  # by a kernel once
    return scale_rows(x, pair, weights, scaled) + dot_rows(x, y, pair, out) - moved_twice


class _PairRows(NamedTuple):
    """Rows of pairs, the pairs that are places, and the mask of these; None where all are."""

    rows: Tensor
    places: Tensor
    mask: Tensor | None = None


def _rows_of_pairs(x: Tensor, pairs: Tensor, slots: int) -> _PairRows:
    """Return the row of each pair's list; pairs of no list are left out."""
    lines = pairs // slots
    if not x.is_cuda and x.numel():  # of rows without elements torch raises another error
        with suppress(IndexError):
            return _PairRows(x.index_select(0, lines), pairs)
    mask = (lines >= 0) & (lines < x.shape[0])
    return _PairRows(x.index_select(0, lines[mask]), pairs[mask], mask)


def _blocks(row: int, *tensors: Tensor | None) -> Iterator[list[Any]]:
    """Yield blocks of tensors' first dim whose buffers, of ``row`` elements for each index, stay in a cache."""
    (first, *_), step = tensors, max(_BUFFERED // max(row, 1), 1)
    assert first is not None
    if first.shape[0] <= step:  # a slice would be an operator for each tensor
        yield list(tensors)
        return
    for start in range(0, first.shape[0], step):
        yield [x if x is None else x[start : start + step] for x in tensors]


def _as_integers(x: Tensor) -> Tensor:
    """View elements that not every operator of torch copies as integers of as many bytes."""
    kinds = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    return x if x.dtype in _COPIED else x.view(kinds[x.itemsize]) if x.itemsize in kinds else x


def statistics(
    logits: Tensor, target_col: Tensor, target_weight: Tensor, smoothing_weights: Tensor | None, out: Tensor
) -> int:
    """Log-sum-exp and weighted sum of the logits per row; see ``tritoncomm_kernels.cross_entropy``."""
    x, is_local = logits.to(out.dtype), target_col >= 0
    target_logit = x.gather(1, target_col.clamp(min=0).unsqueeze(1)).squeeze(1)
    out[0] = x.logsumexp(1)
    out[1] = torch.where(is_local, target_logit * target_weight, 0.0)
    if smoothing_weights is not None:
        out[1] += x @ smoothing_weights
    return logits.nbytes + target_col.nbytes + target_weight.nbytes + out.nbytes


def gradient(
    logits: Tensor,
    target_col: Tensor,
    target_weight: Tensor,
    smoothing_weights: Tensor | None,
    row_weight: Tensor,
    lse: Tensor,
    upstream: Tensor,
    out: Tensor,
) -> int:
    """Gradient of the logits of one vocabulary shard; see ``tritoncomm_kernels.cross_entropy``."""
    grad = (logits.to(lse.dtype) - lse.unsqueeze(1)).exp() * row_weight.unsqueeze(1)
    if smoothing_weights is not None:
        grad -= smoothing_weights
    local_weight = torch.where(target_col >= 0, target_weight, 0.0)
    grad.scatter_add_(1, target_col.clamp(min=0).unsqueeze(1), -local_weight.unsqueeze(1))
    # An ignored row is 0 even where its logits are inf or nan.
    out.copy_(torch.where(row_weight.unsqueeze(1) == 0, 0.0, grad * upstream.unsqueeze(1)))
    per_row = 4 * lse.nbytes + target_col.nbytes  # lse, target_weight, row_weight and upstream have one dtype
    return logits.nbytes + out.nbytes + per_row


def _checked(
    name: str, rows: Tensor, wire: Tensor, scale: float | None, sizes: Sequence[int] | None, target: str
) -> tuple[int, ...] | None:
    """Check the arguments of pack or unpack as the kernels do, and return ``sizes`` as a tuple."""
    splits = None if sizes is None else tuple(sizes)
    geometry_of(name, rows.shape, rows.stride(), wire.shape, wire.stride(), splits, target)
    if scale is not None:
        checked_scale(name, scale, torch.float64)  # its type alone: ``put`` checks it for the wide type
    return splits


def _shards(rows: Tensor, wire: Tensor, sizes: tuple[int, ...] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield (blocks of the wire, shaped as the rows, the shards of the rows that they hold).

    Without sizes there is one pair for all whole shards, one for a shorter one, and one for those without elements.
    """
    lead, row = rows.shape[:-1], rows.shape[-1]
    if sizes is not None:
        outer = rows.numel() // row if row else 0
        parts = wire.split([outer * size for size in sizes])
        blocks = [part.view(*lead, size) for part, size in zip(parts, sizes, strict=True)]
        yield from zip(blocks, rows.split(sizes, -1), strict=True)
        return
    world, _, run = wire.shape
    if wire.is_contiguous():
        blocks = wire.view(world, *lead, run)
    else:
        blocks = wire.unflatten(1, lead) if lead else wire.squeeze(1)
    whole, shorter = divmod(row, run) if run else (world, 0)  # number of whole shards, and elements of a shorter one
    if whole:
        yield blocks[:whole], rows[..., : whole * run].unflatten(-1, (whole, run)).movedim(-2, 0)
    filled = whole
    if shorter:
        yield blocks[whole], rows[..., whole * run :]
        filled += 1
    if filled < world:
        yield blocks[filled:], rows[..., :0].expand(world - filled, *lead, 0)


def _segment_views(
    tensors: Sequence[Tensor], wire: Tensor, segments: Segments, checked: CheckedSegments
) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]], list[tuple[Tensor, list[Tensor], torch.dtype]]]:
    """Return padding of the wire; copies as (rows, wire); casts and sums as (rows, parts of the wire, wide type)."""
    # ``as_strided`` counts from the start of the storage, so a byte of the wire is that many bytes further on.
    start, dtypes = int(wire.storage_offset()) * wire.itemsize, segments.dtypes
    flat = wire.view(-1).view(torch.uint8)
    typed = {dtype: _typed(flat, dtype) for dtype in {*dtypes, torch.uint8}}
    offsets = [x.storage_offset() for x in tensors]
    zeros, copies, casts = [], [], []
    for index, offset, size, strides, wire_byte, wire_strides in checked.copies:
        dtype = dtypes[index]
        rows = tensors[index].as_strided(size, strides, offsets[index] + offset)
        place, misaligned_bytes = divmod(start + wire_byte, dtype.itemsize)
        if misaligned_bytes:  # elements that no view of their dtype has: copied as bytes
            rows, dtype, place = rows.view(torch.uint8), torch.uint8, start + wire_byte
            wire_strides = (*(stride * dtypes[index].itemsize for stride in wire_strides[:-1]), 1)
        copies.append((rows, typed[dtype].as_strided(rows.shape, wire_strides, place)))
    for i, (index, offset, count, row, stride, wire_byte, wire_stride) in enumerate(checked.targets):
        size = (row,) if count == 1 else (count, row)
        if index == PADDING:
            zeros.append(_block(typed[torch.uint8], size, wire_stride, start + wire_byte))
            continue
        dtype, wide = dtypes[index], checked.wides[i]
        if wide is None:  # copied above
            continue
        strides = (1,) if count == 1 else (stride, 1)
        rows = tensors[index].as_strided(size, strides, offsets[index] + offset)
        parts = checked.parts.get(i) or ((wire_byte, wire_stride),)
        blocks = [_block(typed[dtype], size, part_stride, start + part_byte) for part_byte, part_stride in parts]
        if any(block is None for block in blocks):
            raise ValueError(
                f"segments: {dtype} cannot be cast at byte {wire_byte} of the wire, which is not aligned to it"
            )
        casts.append((rows, blocks, wide))
    return zeros, copies, casts


def _block(wire: Tensor, size: Sequence[int], step: int, at: int) -> Tensor | None:
    """Return rows of the wire from byte ``at`` of its memory on, ``step`` elements apart (0: one after the other).

    None if no element starts at that byte.
    """
    place, rest = divmod(at, wire.itemsize)
    return None if rest else wire.as_strided(size, (step or size[1], 1) if len(size) == 2 else (1,), place)


def _copy_all(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Copy the second of every pair into the first, in one call."""
    targets, sources = ([pair[side] for pair in pairs] for side in (0, 1))
    torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]


def _typed(flat: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the bytes as elements, from the first aligned element to the last whole one."""
    first = -flat.storage_offset() % dtype.itemsize
    count = max(flat.numel() - first, 0) // dtype.itemsize
    return flat[first : first + count * dtype.itemsize].view(dtype)


def put(
    target: Tensor, parts: Sequence[Tensor], scale: float | None, wide: torch.dtype | None, add: bool = False
) -> None:
    """Write the sum of ``parts``, in order, to ``target`` with the arithmetic of the kernels: scale, add, round once.

    Args:
        wide: type of the arithmetic; None copies the bits of one part.
        add: add the values of ``target`` before the rounding.
    """
    first, *others = parts
    if scale is None and not add and not others:
        target.copy_(first if wide is None else _narrowed(first, target.dtype))
        return
    assert wide is not None
    if target.dtype is wide and not add and (scale is None or not others):  # needs no buffer
        if scale is not None:
            torch.mul(first.to(wide), checked_scale("scale", scale, wide), out=target)
            return
        # Without a scale there are others: a copy of one part returned above.
        total = target.copy_(first) if first.dtype is not wide else torch.add(first, others.pop(0), out=target)
    else:
        total = first.to(wide, copy=bool(others))
    for part in others:
        total += part
    if scale is not None:
        total = total * checked_scale("scale", scale, wide)
    if add:
        total = target.to(wide) + total
    if total is not target:
        target.copy_(_narrowed(total, target.dtype))


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Convert fp64 to fp32 if the target has 16 bits: a kernel rounds twice there, too."""
    return x.float() if x.dtype is torch.float64 and dtype.itemsize == 2 else x
