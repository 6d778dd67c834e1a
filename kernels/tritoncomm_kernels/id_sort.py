"""sort_by_owner and sort_by_bucket: stable counting sorts of expert ids in device memory, three launches each.

The first launch counts the keys of each block of ids, the second adds the blocks' counts up, and the third writes the
places. No kernel adds atomically: equal calls give equal bits.
"""
# pyright: reportInvalidTypeForm=false, reportGeneralTypeIssues=false, reportPossiblyUnboundVariable=false

from functools import lru_cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritoncomm_kernels.address import _divide, _sum
from tritoncomm_kernels.config import power_of_two
from tritoncomm_kernels.geometry import MAX_IDS, OWNER_COUNTS, BucketSort, OwnerSort, check_ids
from tritoncomm_kernels.launch import Launch, check_place, fits

__all__ = ["sort_by_bucket", "sort_by_owner"]

# A program compares its ids with each other: 64 of them are 32 comparisons of each thread of 4 warps, which stay in its
# registers.
_IDS = 64
_CHUNK = 64  # buckets that a program counts or adds up at a time
_SCANNED, _ROWS = 16, 64  # buckets of a program that adds up the blocks' counts, and blocks at a time


@triton.jit
def _token_of(n, KP: tl.constexpr):
    """Return the token of place ``n``, of which each token has KP, a power of two.

    Example:
        ``[0, 1, 3, 4]`` with KP 4 is ``[0, 0, 0, 1]``.
    """
    return n // KP


@triton.jit
def _key_of(ids_ptr, n, stride, tokens, first, per, buckets, K: tl.constexpr, KP: tl.constexpr):
    """Return the bucket of each place: ``buckets`` for an id of none, ``buckets + 1`` for a place without an id.

    Example:
        Ids ``[[5, 2, 9]]`` (K 3, KP 4) with ``first`` 2, two buckets of ``per`` 2: places 0 to 3 are ``[1, 0, 2, 3]``.
    """
    t = _token_of(n, KP)
    s = n - t * KP
    is_id = (t < tokens) & (s < K)
    x = tl.load(ids_ptr + t.to(tl.int64) * stride + s, mask=is_id, other=0).to(tl.int64) - first
    is_in = is_id & (x >= 0) & (x < per.to(tl.int64) * buckets)
    key = _divide(tl.where(is_in, x, 0).to(tl.int32), per)
    return tl.where(is_in, key, tl.where(is_id, buckets, buckets + 1))


@triton.jit
def _repeats(key_i, key_j, n_i, n_j, buckets, KP: tl.constexpr):
    """Return 1 for each pair of places of which the second is an earlier one of the same token and bucket.

    Example:
        Places 0 to 3 of one token (KP 4) with keys ``[1, 1, 0, 1]`` are ``[[0, 0, 0, 0], [1, 0, 0, 0], [0, 0, 0, 0],
        [1, 1, 0, 0]]``.
    """
    same = (key_i == key_j) & (_token_of(n_i, KP) == _token_of(n_j, KP))
    return (same & (n_j < n_i) & (key_i < buckets)).to(tl.int32)


@triton.jit(do_not_specialize=["scale", "stride", "tokens", "first", "per", "buckets", "blocks"])
def _count_ids_kernel(
    ids_ptr, partial_ptr, scale, stride: tl.int64, tokens: tl.int32, first: tl.int64, per: tl.int32, buckets: tl.int32,
    blocks: tl.int32,
    K: tl.constexpr, KP: tl.constexpr, IDS: tl.constexpr, DISTINCT: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Count the places of each bucket in each block of IDS places: ``partial[block, bucket]``, last those of none.

    With DISTINCT places that repeat a bucket of their token are in a second array ``[blocks, buckets + 1]`` behind.

    Example:
        Ids ``[[0, 1], [0, 5]]`` of two buckets of ``per`` 1 (K 2, KP 2) with IDS 2.
        Program 0 writes ``[1, 1, 0, _, _, _]``.
        Program 1 writes ``[_, _, _, 1, 0, 1]``.
    """
    b = tl.program_id(0)
    n_i = b * IDS + tl.arange(0, IDS)[:, None]
    key_i = _key_of(ids_ptr, n_i, stride, tokens, first, per, buckets, K, KP)
    repeats = tl.full([IDS, 1], 0, tl.int32)
    if DISTINCT:
        n_j = b * IDS + tl.arange(0, IDS)[None, :]
        key_j = _key_of(ids_ptr, n_j, stride, tokens, first, per, buckets, K, KP)
        repeats = tl.reduce(_repeats(key_i, key_j, n_i, n_j, buckets, KP), 1, _sum)[:, None]
    row_ptr = partial_ptr + b.to(tl.int64) * (buckets + 1)
    for start in range(0, buckets + 1, CHUNK):
        c = start + tl.arange(0, CHUNK)
        hits = key_i == c[None, :]
        firsts = tl.reduce((hits & (repeats == 0)).to(tl.int32), 0, _sum)
        tl.store(row_ptr + c, firsts, mask=c <= buckets)
        if DISTINCT:
            others = tl.reduce((hits & (repeats > 0)).to(tl.int32), 0, _sum)
            tl.store(row_ptr + blocks.to(tl.int64) * (buckets + 1) + c, others, mask=c <= buckets)


@triton.jit(do_not_specialize=["scale", "buckets", "blocks", "alignment"])
def _scan_ids_kernel(
    partial_ptr, counts_ptr, scale, buckets: tl.int32, blocks: tl.int32, alignment: tl.int32,
    DISTINCT: tl.constexpr, COLUMNS: tl.constexpr, ROWS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Replace the counts of CHUNK buckets by the sums of the blocks before, and write their totals.

    Totals are multiples of ``alignment``. With DISTINCT a bucket has COLUMNS of them: distinct ids, repeated ids, ids
    of no bucket (the same number for every bucket), and 0. ``partial_ptr`` has a row of counts for each block, then a
    row of repeated ids for each.

    Example:
        Counts ``[[1, 1, 0], [2, 0, 5]]`` of two blocks become ``[[0, 0, 0], [1, 1, 5]]``, and the totals are
        ``[3, 1]``; with ``alignment`` 4 ``[4, 4]``.
    """
    c = tl.program_id(0) * CHUNK + tl.arange(0, CHUNK)
    total, repeated = tl.full([CHUNK], 0, tl.int32), tl.full([CHUNK], 0, tl.int32)
    wrong = tl.full([ROWS], 0, tl.int32)
    width = (buckets + 1).to(tl.int64)
    for start in range(0, blocks, ROWS):
        r = start + tl.arange(0, ROWS)
        mask = (r < blocks)[:, None] & (c < buckets)[None, :]
        offset = r.to(tl.int64)[:, None] * width + c[None, :]
        x = tl.load(partial_ptr + offset, mask=mask, other=0)
        tl.store(partial_ptr + offset, total[None, :] + tl.associative_scan(x, 0, _sum) - x, mask=mask)
        total += tl.reduce(x, 0, _sum)
        if DISTINCT:
            repeated += tl.reduce(tl.load(partial_ptr + blocks * width + offset, mask=mask, other=0), 0, _sum)
            wrong += tl.load(partial_ptr + r.to(tl.int64) * width + buckets, mask=r < blocks, other=0)
    in_buckets = c < buckets
    if DISTINCT:
        counts_ptr += c * COLUMNS
        tl.store(counts_ptr, total.to(tl.int64), mask=in_buckets)
        tl.store(counts_ptr + 1, repeated.to(tl.int64), mask=in_buckets)
        all_wrong = tl.reduce(wrong, 0, _sum) + tl.full([CHUNK], 0, tl.int32)  # for every bucket
        tl.store(counts_ptr + 2, all_wrong.to(tl.int64), mask=in_buckets)
        tl.store(counts_ptr + 3, tl.full([CHUNK], 0, tl.int64), mask=in_buckets)
    else:
        padded = _divide(total + (alignment - 1), alignment) * alignment
        tl.store(counts_ptr + c, padded.to(tl.int64), mask=in_buckets)


@triton.jit(
    do_not_specialize=[
        "scale", "counts_at", "pairs_at", "lines_at", "index_at", "stride", "tokens", "first", "per", "buckets", "last",
    ]
)  # fmt: skip
def _place_ids_kernel(
    ids_ptr, partial_ptr, scale, counts_at: tl.int64, pairs_at: tl.int64, lines_at: tl.int64, index_at: tl.int64,
    stride: tl.int64, tokens: tl.int32, first: tl.int64, per: tl.int32, buckets: tl.int32, last: tl.int32,
    K: tl.constexpr, KP: tl.constexpr, SLOTS: tl.constexpr, IDS: tl.constexpr, DISTINCT: tl.constexpr,
    COLUMNS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Write for each sorted place its token and, without DISTINCT, its id's number; and for each id its place.

    The bucket ``last`` comes behind all others. With DISTINCT the slots of a token are in the order of their buckets;
    behind them are those of its ids that repeat a bucket, with the index -1.

    Example:
        Ids ``[[1, 0], [0, 5]]`` of two buckets of ``per`` 1, totals ``[2, 1]``: bucket 0 has ids 1 and 2, bucket 1 has
        id 0. Pairs are ``[1, 2, 0]``, lines ``[0, 1, 0]``, and the index is ``[[2, 0], [1, -1]]``.
    """
    b = tl.program_id(0)
    n_i, n_j = b * IDS + tl.arange(0, IDS)[:, None], b * IDS + tl.arange(0, IDS)[None, :]
    key_i = _key_of(ids_ptr, n_i, stride, tokens, first, per, buckets, K, KP)
    key_j = _key_of(ids_ptr, n_j, stride, tokens, first, per, buckets, K, KP)
    is_place_i, is_place_j = key_i < buckets, key_j < buckets
    if DISTINCT:
        is_place_i = is_place_i & (tl.reduce(_repeats(key_i, key_j, n_i, n_j, buckets, KP), 1, _sum)[:, None] == 0)
        is_place_j = is_place_j & (tl.reduce(_repeats(key_j, key_i, n_j, n_i, buckets, KP), 0, _sum)[None, :] == 0)
    # Places before this one: in this block, in buckets before its own, and of its own bucket in blocks before.
    before = tl.reduce(((key_i == key_j) & (n_j < n_i) & is_place_j).to(tl.int32), 1, _sum)[:, None]
    counts_ptr = counts_at.to(tl.pointer_type(tl.int64))
    for start in range(0, buckets, CHUNK):
        c = start + tl.arange(0, CHUNK)[None, :]
        size = tl.load(counts_ptr + c * COLUMNS, mask=c < buckets, other=0).to(tl.int32)
        is_before = (c != last) & ((c < key_i) | (key_i == last))
        before += tl.reduce(tl.where(is_before, size, 0), 1, _sum)[:, None]
    target = before + tl.load(partial_ptr + b.to(tl.int64) * (buckets + 1) + key_i, mask=is_place_i, other=0)
    t = _token_of(n_i, KP)
    slot = n_i - t * KP
    is_id = key_i <= buckets
    tl.store(lines_at.to(tl.pointer_type(tl.int32)) + target, t, mask=is_place_i)
    if DISTINCT:
        of_token = _token_of(n_j, KP) == t
        is_repeat_j = (key_j <= buckets) & (is_place_j == 0)
        num_places = tl.reduce((of_token & is_place_j).to(tl.int32), 1, _sum)[:, None]
        places_before = tl.reduce((of_token & is_place_j & (key_j < key_i)).to(tl.int32), 1, _sum)[:, None]
        repeats_before = tl.reduce((of_token & is_repeat_j & (n_j < n_i)).to(tl.int32), 1, _sum)[:, None]
        slot = tl.where(is_place_i, places_before, num_places + repeats_before)
    else:
        tl.store(pairs_at.to(tl.pointer_type(tl.int32)) + target, t * K + slot, mask=is_place_i)
    index_ptr = index_at.to(tl.pointer_type(tl.int32)) + t.to(tl.int64) * SLOTS + slot
    tl.store(index_ptr, tl.where(is_place_i, target, -1), mask=is_id & (slot < SLOTS))


def sort_by_owner(ids: Tensor, per: int, owner: int, counts: Tensor) -> OwnerSort:
    """Sort tokens by the owners of their ids: owner w has the ids from ``w*per`` to ``w*per + per - 1``.

    Tokens of ``owner`` come last. The ids are read on the device: nothing waits for them.

    Args:
        ids: ``[tokens, k]``, int64 or int32, every token contiguous, k at most 64.
        counts: ``[owners, 4]``, contiguous, int64, to write. Column 0 is the number of tokens that have an id of this
            owner. Column 1 is the number of further ids of this owner that these tokens have. Columns 2 and 3 are the
            same in every row, and add up to the number of ids that no owner has.

    Raises:
        ValueError: k is above 64, tokens are not contiguous, two devices, counts of another shape.
        TypeError: ids that are neither int64 nor int32, or counts that are not int64.
        TooLargeError: 2**31 ids, or nearly that.

    Example:
        Ids ``[[2, 0], [2, 3]]`` of two owners of 2, ``owner`` 0. Token 0 has ids of both owners, and token 1 two ids of
        owner 1. Owner 0 comes last: lines are ``[0, 1, 0, _]``, first both tokens for owner 1, then token 0 for owner
        0. The index has the places of each token among them, by owner: ``[[2, 0], [1, -1]]``. The counts are ``[[1, 0,
        0, 0], [2, 1, 0, 0]]``.

    Traffic: reads the ids twice, and writes two numbers for each.
    """
    name, owners = "sort_by_owner", counts.shape[0]
    check_ids(name, ids, counts)
    slots = min(ids.shape[1], owners)
    lines, index = ids.new_empty(ids.shape[0] * slots, dtype=torch.int32), _index(ids, slots)
    pairs = lines  # a placeholder: this sort writes no pairs
    _sort(name, (counts, pairs, lines, index), ids, (0, per, owners), alignment=1, last=owner)
    return OwnerSort(lines, index)


def sort_by_bucket(ids: Tensor, first: int, buckets: int, number: int, total: int, alignment: int = 1) -> BucketSort:
    """Sort ids stably: bucket b has the id ``first + b``.

    Args:
        ids: ``[tokens, k]``, int64 or int32, every token contiguous, k at most 64.
        number: ids are from 0 to ``number - 1``; torch's path, which has the same signature, needs it.
        total: number of ids that have a bucket; with padding at least as many as the buckets need.
        alignment: every bucket is padded to a multiple of this number, with -1.

    Raises:
        ValueError, TypeError, TooLargeError: as ``sort_by_owner``.

    Example:
        Ids ``[[5, 2], [3, 5]]`` with ``first`` 2 and 2 buckets: pairs are ``[1, 2]``, and the index is ``[[-1, 0],
        [1, -1]]``.

    Traffic: reads the ids twice, and writes three numbers for each.
    """
    name = "sort_by_bucket"
    check_ids(name, ids)
    counts, index = ids.new_empty(buckets, dtype=torch.int64), _index(ids, ids.shape[1])
    shape = 2, total
    # The kernels leave out the padding of buckets, which is -1.
    outs = ids.new_empty(shape, dtype=torch.int32) if alignment == 1 else ids.new_full(shape, -1, dtype=torch.int32)
    pairs, lines = outs.unbind()
    ids_per_bucket = 1
    _sort(name, (counts, pairs, lines, index), ids, (first, ids_per_bucket, buckets), alignment, last=-1)
    return BucketSort(counts, pairs, lines, index)


def _index(ids: Tensor, slots: int) -> Tensor:
    """Allocate an index of ``slots`` places for each token."""
    return ids.new_empty((ids.shape[0], slots), dtype=torch.int32)


def _sort(
    name: str,
    outs: tuple[Tensor, Tensor, Tensor, Tensor],
    ids: Tensor,
    buckets: tuple[int, int, int],
    alignment: int,
    last: int,
) -> None:
    """Launch the three kernels of a sort.

    Args:
        outs: counts, pairs, lines and index, whose addresses are integers for the kernels.
        buckets: first id, ids of a bucket, number of buckets.
        last: bucket that comes behind all others; -1 for none.
    """
    (tokens, k), (first, per, number) = ids.shape, buckets
    counts, *_, index = outs
    check_place(name, ids, *outs)
    if k > MAX_IDS:
        raise ValueError(f"{name}: {k} ids of a token are above {MAX_IDS}")
    padded = power_of_two(k)
    fits(name, (tokens * padded, per * number, number * OWNER_COUNTS))
    if not tokens:
        counts.zero_()
        return
    blocks, is_distinct = -(-tokens * padded // _IDS), name == "sort_by_owner"
    # Counts of each block, behind them those of repeated ids.
    partial = ids.new_empty((1 + is_distinct) * blocks * (number + 1), dtype=torch.int32)
    launches = _launches(ids.get_device(), ids.dtype, k, index.shape[1], is_distinct)
    stride = ids.stride(0) if tokens > 1 else k  # of a dim of size 1 a stride may be any number
    keys, no_scale = (stride, tokens, first, per, number), 1.0  # every launch has a scale
    launches.count(ids, partial, no_scale, *keys, blocks, grid=blocks)
    launches.scan(partial, counts, no_scale, number, blocks, alignment, grid=-(-number // _SCANNED))
    # An output without elements has no address, and nothing is written there.
    addresses = [x.data_ptr() or counts.data_ptr() for x in outs]
    launches.write(ids, partial, no_scale, *addresses, *keys, last, grid=blocks)


class _Launches(NamedTuple):
    """Prepared launches of a sort."""

    count: Launch
    scan: Launch
    write: Launch


@lru_cache(maxsize=256)
def _launches(device: int, dtype: torch.dtype, k: int, slots: int, is_distinct: bool) -> _Launches:
    """Prepare the launches for any number of tokens and buckets."""
    columns = OWNER_COUNTS if is_distinct else 1
    constants: dict[str, Any] = {
        "K": k, "KP": power_of_two(k), "SLOTS": slots, "IDS": _IDS, "DISTINCT": is_distinct, "COLUMNS": columns,
        "ROWS": _ROWS, "CHUNK": _CHUNK,
    }  # fmt: skip

    def launch(kernel: Any, first: torch.dtype, second: torch.dtype, **changes: int) -> Launch:
        """Prepare one kernel with the constants of its signature."""
        values = constants | changes
        return Launch(
            kernel,
            device,
            1,
            (first, second),
            arguments=(),
            constants={x: values[x] for x in kernel.arg_names if x in values},
            num_warps=4,
        )

    return _Launches(
        launch(_count_ids_kernel, dtype, torch.int32),
        launch(_scan_ids_kernel, torch.int32, torch.int64, CHUNK=_SCANNED),
        launch(_place_ids_kernel, dtype, torch.int32),
    )
