"""Plans of collectives: shape of the result, bytes sent and received, elements per rank, all from shapes alone.

No other module has these formulas. Eager calls without split sizes look plans up in caches.
Compiled calls trace through the plain functions, where sizes may be symbols, and dry runs print the plans. Errors name
dims and sizes; ``located`` adds the function and the rank.
"""

import math
import operator
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch.distributed import ProcessGroup

from tritoncomm.errors import ArgumentError, ShapeError

__all__ = [
    "CollectivePlan",
    "Ints",
    "all_equal",
    "all_gather",
    "all_reduce_bytes",
    "all_to_all",
    "all_to_all_single",
    "cached_all_to_all_single",
    "cached_reduce_scatter",
    "cached_split",
    "check_split_sizes",
    "chunk_sizes",
    "ends_short",
    "located",
    "normalize_dim",
    "normalize_sizes",
    "padded_size",
    "reduce_scatter",
    "resized",
    "split",
    "split_evenly",
]

Ints = tuple[int, ...]


class CollectivePlan(NamedTuple):
    """Plan of one collective for one rank of the group.

    Attributes:
        shape: shape of the result.
        bytes_sent: bytes that this rank sends to the other ranks, by a bandwidth-optimal algorithm.
        bytes_received: bytes that this rank receives from the other ranks.
        in_order: whether the received buffer, in rank order, already is the result; else it has to be unpacked. Of a
            reduce-scatter: whether the input already is in rank order; else it has to be packed.
        send_sizes, recv_sizes: size of the split or gathered dim per rank; empty for none, or where all are equal.
        send_counts, recv_counts: elements per rank; empty where the sizes are, and of an exchange of rows.
        padded: size of the gathered dim that each rank's part has on the wire, the largest of ``recv_sizes``, where one
            even message carries uneven parts; 0 for none.
    """

    shape: Ints
    bytes_sent: int
    bytes_received: int
    in_order: bool = True
    send_sizes: Ints = ()
    recv_sizes: Ints = ()
    send_counts: Ints = ()
    recv_counts: Ints = ()
    padded: int = 0


def all_gather(
    shape: Ints, itemsize: int, dim: int, world: int, rank: int, sizes: Ints | None = None, pads: bool = False
) -> CollectivePlan:
    """Plan an all-gather along ``dim``: ``[..., n, ...] -> [..., n*world, ...]``, or ``[..., sum(sizes), ...]``.

    Args:
        pads: pad uneven parts where ``padded_size`` says so.
    """
    dim = normalize_dim(shape, dim)
    recv_sizes, recv_counts = _gathered(shape, dim, world, rank, sizes)
    result = resized(shape, dim, shape[dim] * world if sizes is None else sum(recv_sizes))
    in_order, own = _leads(shape, dim), math.prod(shape) * itemsize
    padded = padded_size(recv_sizes) if pads and recv_sizes else 0  # size of every part; 0 if none is padded
    if padded:
        sent = math.prod(resized(shape, dim, padded)) * itemsize * (world - 1)
        in_order = in_order and ends_short(recv_sizes)
        return CollectivePlan(
            result, sent, sent, in_order, recv_sizes=recv_sizes, recv_counts=recv_counts, padded=padded
        )
    sent, received = own * (world - 1), math.prod(result) * itemsize - own
    return CollectivePlan(result, sent, received, in_order, recv_sizes=recv_sizes, recv_counts=recv_counts)


def reduce_scatter(
    shape: Ints, itemsize: int, dim: int, world: int, rank: int, sizes: Ints | None = None
) -> CollectivePlan:
    """Plan a reduce-scatter along ``dim``: ``[..., n, ...] -> [..., n/world, ...]``, or ``[..., sizes[rank], ...]``."""
    dim = normalize_dim(shape, dim)
    send_sizes, send_counts = _scattered(shape, dim, world, sizes)
    own = split_evenly(shape, dim, world) if sizes is None else send_sizes[rank]
    sent = math.prod(shape) * itemsize * (world - 1) // world
    return CollectivePlan(
        resized(shape, dim, own), sent, sent, _leads(shape, dim), send_sizes=send_sizes, send_counts=send_counts
    )


def all_to_all(
    shape: Ints,
    itemsize: int,
    scatter_dim: int,
    gather_dim: int,
    world: int,
    rank: int,
    scatter_sizes: Ints | None = None,
    gather_sizes: Ints | None = None,
) -> CollectivePlan:
    """Plan an all-to-all that splits ``scatter_dim`` over the ranks and concatenates ``gather_dim`` from them."""
    scatter_dim, gather_dim = normalize_dim(shape, scatter_dim), normalize_dim(shape, gather_dim)
    even = scatter_sizes is None and gather_sizes is None
    if not even:
        if scatter_dim == gather_dim:
            raise ArgumentError(f"sizes need two different dims, not {scatter_dim} twice")
        if scatter_sizes is None:
            scatter_sizes = (split_evenly(shape, scatter_dim, world),) * world
        if gather_sizes is None:
            gather_sizes = (shape[gather_dim],) * world
    send_sizes, send_counts = _scattered(shape, scatter_dim, world, scatter_sizes)
    # An even exchange may split and gather one dim, so the gathered size is read from the split shape.
    own = resized(shape, scatter_dim, split_evenly(shape, scatter_dim, world) if even else send_sizes[rank])
    recv_sizes, recv_counts = _gathered(own, gather_dim, world, rank, gather_sizes)
    result = resized(own, gather_dim, own[gather_dim] * world if even else sum(recv_sizes))
    local = math.prod(own) * itemsize
    sent, received = math.prod(shape) * itemsize - local, math.prod(result) * itemsize - local
    in_order = _leads(own, gather_dim)
    return CollectivePlan(result, sent, received, in_order, send_sizes, recv_sizes, send_counts, recv_counts)


def all_to_all_single(
    shape: Ints, itemsize: int, world: int, rank: int, out_sizes: Ints | None = None, in_sizes: Ints | None = None
) -> CollectivePlan:
    """Plan an all-to-all of the rows of dim 0, whose sizes are rows: ``[n, ...] -> [sum(out_sizes), ...]``."""
    if not shape:
        raise ShapeError("a 0-dim tensor has no rows to exchange")
    if in_sizes is not None:
        check_split_sizes(shape, 0, world, in_sizes)
    if out_sizes is not None and (len(out_sizes) != world or min(out_sizes) < 0):
        raise ShapeError(f"output split sizes {list(out_sizes)} need {world} entries of 0 or more")
    rows, row = shape[0], shape[1:]
    if in_sizes is None and out_sizes is None:
        sent = (rows - split_evenly(shape, 0, world)) * math.prod(row) * itemsize
        return CollectivePlan(shape, sent, sent)
    # With one list the plan has both, even if all sizes are equal. Sizes of other ranks may differ, and NCCL has
    # another call for the even exchange.
    send = in_sizes if in_sizes is not None else (split_evenly(shape, 0, world),) * world
    recv = out_sizes if out_sizes is not None else (split_evenly(shape, 0, world),) * world
    own = send[rank]
    if own != recv[rank]:
        raise ShapeError(f"this rank sends {own} rows to itself, but expects {recv[rank]}")
    arriving, nbytes = sum(recv), math.prod(row) * itemsize
    return CollectivePlan(
        (arriving, *row),
        (rows - own) * nbytes,
        (arriving - own) * nbytes,
        in_order=True,
        send_sizes=send,
        recv_sizes=recv,
    )


def split(shape: Ints, dim: int, world: int, rank: int, sizes: Ints | None = None) -> tuple[int, int]:
    """Return (start, size) of the shard of ``dim`` that ``rank`` keeps."""
    dim = normalize_dim(shape, dim)
    if sizes is None:
        size = split_evenly(shape, dim, world)
        return rank * size, size
    check_split_sizes(shape, dim, world, sizes)
    return sum(sizes[:rank]), sizes[rank]


_cached = lru_cache(maxsize=8192)  # shapes repeat in every step, and a plan takes as long as a small collective
cached_reduce_scatter = _cached(reduce_scatter)
cached_all_to_all_single = _cached(all_to_all_single)
cached_split = _cached(split)


def all_reduce_bytes(nbytes: int, world: int) -> int:
    """Return the bytes that a rank sends in an all-reduce of ``nbytes`` bytes: a reduce-scatter and an all-gather."""
    return 2 * nbytes * (world - 1) // world


def _scattered(shape: Ints, dim: int, world: int, sizes: Ints | None) -> tuple[Ints, Ints]:
    """Return (``send_sizes``, ``send_counts``) of a plan that splits ``dim`` by ``sizes``; empty tuples for None."""
    if sizes is None:
        return (), ()
    check_split_sizes(shape, dim, world, sizes)
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return sizes, tuple([rest * size for size in sizes])


def _gathered(shape: Ints, dim: int, world: int, rank: int, sizes: Ints | None) -> tuple[Ints, Ints]:
    """Return (``recv_sizes``, ``recv_counts``) of a plan that gathers ``dim`` by ``sizes``; empty tuples for None."""
    if sizes is None:
        return (), ()
    if len(sizes) != world or min(sizes) < 0 or sizes[rank] != shape[dim]:
        raise ShapeError(
            f"split sizes {list(sizes)} need {world} entries, this rank's being {shape[dim]}, the size of dim {dim}"
        )
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return sizes, tuple([rest * size for size in sizes])


def resized(shape: Ints, dim: int, size: int) -> Ints:
    """Return ``shape`` with ``size`` as the size of ``dim``."""
    dim %= len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])


def normalize_dim(shape: Ints, dim: int) -> int:
    """Return ``dim``, which may be negative, counted from the front."""
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim {dim} is out of range")
    return dim % len(shape)


def split_evenly(shape: Ints, dim: int, world: int) -> int:
    """Return the size of ``dim`` on each rank after an even split over ``world`` ranks."""
    if shape[dim] % world:
        raise ShapeError(f"dim {dim % len(shape)} of size {shape[dim]} does not divide over {world} ranks")
    return shape[dim] // world


def check_split_sizes(shape: Ints, dim: int, world: int, sizes: Ints) -> None:
    """Check that ``sizes`` has one entry per rank, none negative, which add up to the size of ``dim``."""
    if len(sizes) != world or sum(sizes) != shape[dim] or min(sizes) < 0:
        raise ShapeError(
            f"split sizes {list(sizes)} do not add up to dim {dim} of size {shape[dim]} over {world} ranks"
        )


def all_equal(sizes: Ints, world: int, size: int) -> bool:
    """Whether ``sizes`` has ``world`` entries, all equal to ``size``: a call that needs no sizes."""
    return sizes.count(size) == len(sizes) == world


def _leads(shape: Ints, dim: int) -> bool:
    """Whether shards along ``dim`` of a contiguous tensor lie one after the other: all dims before it have size 1."""
    return math.prod(shape[:dim]) == 1


def padded_size(sizes: Ints) -> int:
    """Return the size to which uneven parts are padded for one message, the largest; 0 for broadcasts of each part.

    Padding adds an eighth of all bytes at most.
    """
    largest = max(sizes)
    return largest if 8 * largest * len(sizes) <= 9 * sum(sizes) else 0


def ends_short(sizes: Ints) -> bool:
    """Whether parts of these sizes, each padded to the largest, are one run: only empty ones follow a shorter one."""
    largest = max(sizes)
    full = sizes.count(largest)
    return sizes[:full].count(largest) == full and not any(sizes[full + 1 :])


def located(error: Exception, shape: Sequence[int], name: str, group: ProcessGroup) -> Exception:
    """Return a copy of ``error`` whose text names the function ``name``, the shape, the world and the rank."""
    return type(error)(f"{name}: {error} (rank {group.rank()} of {group.size()} ranks, shape {tuple(shape)})")


def chunk_sizes(size: int, world: int) -> Ints:
    """Return the sizes of the chunks that ``torch.chunk`` makes, zeros included: 9 over 4 ranks is (3, 3, 3, 0)."""
    run = -(-size // world)
    full, rest = divmod(size, run) if run else (0, 0)
    # Without a loop over the ranks, of which a job may have thousands.
    return ((run,) * full + (rest,) + (0,) * (world - full - 1))[:world]


def normalize_sizes(sizes: Any, name: str) -> Ints | None:
    """Return split sizes (a list, tuple, numpy array or CPU tensor of integers) as a tuple of ints; None for None."""
    if sizes is None:
        return None
    try:
        if type(sizes) in (list, tuple) and type(sum(sizes)) is int:
            return tuple(sizes)  # all are ints; a loop in Python takes 3 times as long
        if isinstance(sizes, torch.Tensor):
            if sizes.device.type != "cpu":
                raise ArgumentError(
                    f"{name}: split sizes must be a list of ints or a CPU tensor, not a tensor on {sizes.device} "
                    "(reading it would synchronise)"
                )
            sizes = sizes.tolist() if sizes.dim() == 1 else sizes
        return tuple([operator.index(size) for size in sizes])
    except TypeError:
        raise ArgumentError(f"{name}: split sizes must be a list of ints, not {sizes!r}") from None
