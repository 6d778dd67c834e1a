"""Shapes and traffic of every collective, from shapes alone: result, bytes sent and received, elements per rank.

The one source of these formulas: eager calls cache what the functions return, compiled calls trace through them (sizes
may be symbols), dry runs print it. Errors name dims and sizes; ``located`` adds the function and the rank.
"""

import math
from collections.abc import Sequence
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
    "check_split_sizes",
    "chunk_sizes",
    "located",
    "normalize_dim",
    "normalize_sizes",
    "reduce_scatter",
    "resized",
    "split",
    "split_evenly",
]

Ints = tuple[int, ...]


class CollectivePlan(NamedTuple):
    """One collective as one rank takes part in it.

    Attributes:
        shape: of the result.
        bytes_sent: to the other ranks, by a bandwidth-optimal algorithm.
        bytes_received: from the other ranks.
        in_order: what is received is the result as it stands; otherwise it has to be unpacked.
        send_sizes: size of the split dim for every rank, empty where nothing is split or split evenly.
        recv_sizes: size of the gathered dim from every rank, empty where nothing is gathered or all sizes are equal.
        send_counts: elements to every rank; empty with ``send_sizes``.
        recv_counts: elements from every rank; empty with ``recv_sizes``.
    """

    shape: Ints
    bytes_sent: int
    bytes_received: int
    in_order: bool = True
    send_sizes: Ints = ()
    recv_sizes: Ints = ()
    send_counts: Ints = ()
    recv_counts: Ints = ()


def all_gather(
    shape: Ints, itemsize: int, dim: int, world: int, rank: int, sizes: Ints | None = None
) -> CollectivePlan:
    """Concatenate the ranks' tensors along ``dim``: ``[..., n, ...] -> [..., n*world, ...]`` or ``sum(sizes)``.

    Raises:
        ShapeError: no such dim, or ``sizes`` do not have this rank's size in its place.
    """
    dim = normalize_dim(shape, dim)
    recv_sizes, recv_counts = _gathered(shape, dim, world, rank, sizes)
    result = resized(shape, dim, shape[dim] * world if sizes is None else sum(recv_sizes))
    own = math.prod(shape) * itemsize
    sent, received = own * (world - 1), math.prod(result) * itemsize - own
    return CollectivePlan(result, sent, received, _leads(shape, dim), (), recv_sizes, (), recv_counts)


def reduce_scatter(
    shape: Ints, itemsize: int, dim: int, world: int, rank: int, sizes: Ints | None = None
) -> CollectivePlan:
    """Reduce over the ranks and keep this rank's shard of ``dim``: ``[..., n, ...] -> [..., n/world, ...]``.

    Raises:
        ShapeError: no such dim, it does not divide, or ``sizes`` do not add up to it.
    """
    dim = normalize_dim(shape, dim)
    send_sizes, send_counts = _scattered(shape, dim, world, sizes)
    own = split_evenly(shape, dim, world) if sizes is None else send_sizes[rank]
    sent = math.prod(shape) * itemsize * (world - 1) // world
    return CollectivePlan(resized(shape, dim, own), sent, sent, _leads(shape, dim), send_sizes, (), send_counts)


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
    """Split ``scatter_dim`` over the ranks and concatenate ``gather_dim`` from them; a missing list of sizes is even.

    Raises:
        ShapeError: no such dim, it does not divide, or sizes that do not fit.
        ArgumentError: sizes, and both dims are the same.
    """
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
    own = resized(shape, scatter_dim, split_evenly(shape, scatter_dim, world) if even else send_sizes[rank])
    recv_sizes, recv_counts = _gathered(own, gather_dim, world, rank, gather_sizes)
    result = resized(own, gather_dim, own[gather_dim] * world if even else sum(recv_sizes))
    kept = math.prod(own) * itemsize
    sent, received = math.prod(shape) * itemsize - kept, math.prod(result) * itemsize - kept
    in_order = _leads(own, gather_dim)
    return CollectivePlan(result, sent, received, in_order, send_sizes, recv_sizes, send_counts, recv_counts)


def all_to_all_single(
    shape: Ints, itemsize: int, world: int, rank: int, out_sizes: Ints | None = None, in_sizes: Ints | None = None
) -> CollectivePlan:
    """All-to-all of the rows of dim 0; by split sizes as soon as this rank was given a list, else even.

    Equal sizes of this rank say nothing about those of the others, and NCCL has another call for the even exchange.

    Raises:
        ShapeError: no rows, they do not divide, or sizes that do not fit the tensor or each other.
    """
    if not shape:
        raise ShapeError("a 0-dim tensor has no rows to exchange")
    if in_sizes is not None:
        check_split_sizes(shape, 0, world, in_sizes)
    if out_sizes is not None and (len(out_sizes) != world or any(size < 0 for size in out_sizes)):
        raise ShapeError(f"output split sizes {list(out_sizes)} need {world} entries of 0 or more")
    send = in_sizes if in_sizes is not None else (split_evenly(shape, 0, world),) * world
    recv = out_sizes if out_sizes is not None else (split_evenly(shape, 0, world),) * world
    if send[rank] != recv[rank]:
        raise ShapeError(f"this rank sends {send[rank]} rows to itself, but expects {recv[rank]}")
    row = math.prod(shape[1:])
    result = (sum(recv), *shape[1:])
    sent, received = (shape[0] - send[rank]) * row * itemsize, (sum(recv) - recv[rank]) * row * itemsize
    if in_sizes is None and out_sizes is None:
        return CollectivePlan(result, sent, received)
    counts = tuple([size * row for size in send]), tuple([size * row for size in recv])
    return CollectivePlan(result, sent, received, True, send, recv, *counts)


def split(shape: Ints, dim: int, world: int, rank: int, sizes: Ints | None = None) -> tuple[int, int]:
    """Start and size of a rank's shard of ``dim``.

    Raises:
        ShapeError: no such dim, it does not divide, or ``sizes`` do not add up to it.
    """
    dim = normalize_dim(shape, dim)
    if sizes is None:
        size = split_evenly(shape, dim, world)
        return rank * size, size
    check_split_sizes(shape, dim, world, sizes)
    return sum(sizes[:rank]), sizes[rank]


def all_reduce_bytes(nbytes: int, world: int) -> int:
    """Bytes that a rank sends in an all-reduce: a reduce-scatter and an all-gather."""
    return 2 * nbytes * (world - 1) // world


def _scattered(shape: Ints, dim: int, world: int, sizes: Ints | None) -> tuple[Ints, Ints]:
    """Sizes and elements per rank of what is split along ``dim``; empty when it is split evenly."""
    if sizes is None:
        return (), ()
    check_split_sizes(shape, dim, world, sizes)
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return sizes, tuple([rest * size for size in sizes])


def _gathered(shape: Ints, dim: int, world: int, rank: int, sizes: Ints | None) -> tuple[Ints, Ints]:
    """Sizes and elements per rank of what is concatenated along ``dim``; empty when all ranks have this rank's size."""
    if sizes is None:
        return (), ()
    if len(sizes) != world or any(size < 0 for size in sizes) or sizes[rank] != shape[dim]:
        raise ShapeError(
            f"split sizes {list(sizes)} need {world} entries, this rank's being {shape[dim]}, the size of dim {dim}"
        )
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    return sizes, tuple([rest * size for size in sizes])


def resized(shape: Ints, dim: int, size: int) -> Ints:
    """``shape`` with ``dim`` of another size."""
    dim %= len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])


def normalize_dim(shape: Ints, dim: int) -> int:
    """``dim`` counted from the front."""
    if not -len(shape) <= dim < len(shape):
        raise ShapeError(f"dim {dim} is out of range")
    return dim % len(shape)


def split_evenly(shape: Ints, dim: int, world: int) -> int:
    """Size of ``dim`` on every rank."""
    if shape[dim] % world:
        raise ShapeError(f"dim {dim % len(shape)} of size {shape[dim]} does not divide over {world} ranks")
    return shape[dim] // world


def check_split_sizes(shape: Ints, dim: int, world: int, sizes: Ints) -> None:
    """``sizes`` have to add up to ``dim``, one for every rank."""
    if len(sizes) != world or sum(sizes) != shape[dim] or any(size < 0 for size in sizes):
        raise ShapeError(
            f"split sizes {list(sizes)} do not add up to dim {dim} of size {shape[dim]} over {world} ranks"
        )


def all_equal(sizes: Ints, world: int, size: int) -> bool:
    """Whether explicit sizes are those of the collective of equal shards, which needs no sizes."""
    return sizes.count(size) == len(sizes) == world


def _leads(shape: Ints, dim: int) -> bool:
    """Whether shards along ``dim`` lie one after the other in memory: all dims before it have size 1."""
    return math.prod(shape[:dim]) == 1


def located(error: Exception, shape: Sequence[int], name: str, group: ProcessGroup) -> Exception:
    """The error with the function, the shape, the number of ranks and the rank."""
    return type(error)(f"{name}: {error} (rank {group.rank()} of {group.size()} ranks, shape {tuple(shape)})")


def chunk_sizes(size: int, world: int) -> Ints:
    """Sizes of the chunks of ``torch.chunk`` over ``world`` ranks, empty ones included: 9 over 4 is (3, 3, 3, 0)."""
    run = -(-size // world)
    return tuple(max(0, min(run, size - w * run)) for w in range(world))


def normalize_sizes(sizes: Any, name: str) -> Ints | None:
    """Split sizes as a tuple of ints; None stays None.

    Accepted are lists, tuples, numpy arrays and CPU tensors of integers.

    Raises:
        ArgumentError: anything else; a tensor on a device, because reading it would synchronise the device.
    """
    if sizes is None:
        return None
    if isinstance(sizes, torch.Tensor):
        if sizes.device.type != "cpu":
            raise ArgumentError(
                f"{name}: split sizes must be a list of ints or a CPU tensor, not a tensor on {sizes.device} "
                "(reading it would synchronise)"
            )
        sizes = sizes.tolist() if sizes.dim() == 1 else sizes
    try:
        return tuple([size if type(size) is int else size.__index__() for size in sizes])
    except (TypeError, AttributeError):
        raise ArgumentError(f"{name}: split sizes must be a list of ints, not {sizes!r}") from None
