"""The same movements under torch.compile: functional collectives that inductor knows, and opaque pack and unpack ops.

The ops run the eager code, so paths, counters and alignment checks happen at run time. Sizes reach them as symbols, so
one graph serves every sequence length. Arguments are checked while a call is traced, as in eager mode.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import ops
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["all_gather", "all_reduce", "all_to_all", "all_to_all_single", "reduce_scatter", "split"]

_library = torch.library.Library("tritoncomm", "DEF")
_library.define("pack(Tensor x, int dim, int world, SymInt[]? sizes, str name) -> Tensor")
_library.define("unpack(Tensor wire, SymInt[] shape, int dim, int world, SymInt[]? sizes, str name) -> Tensor")
_library.define("count(Tensor(a!) result, str name, SymInt bytes_sent) -> ()")


def _as_sizes(sizes: list[int] | None) -> Ints | None:
    return None if sizes is None else tuple(sizes)


def _pack(x: Tensor, dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    started = record.now()
    wire, path, moved = ops.pack(x, dim, world, _as_sizes(sizes))
    if path == "view":
        wire, path, moved = wire.clone(), "torch", 2 * x.nbytes
    record.add(name, path, moved, 0, started, calls=0)
    return wire.view(-1)


def _unpack(wire: Tensor, shape: list[int], dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    started = record.now()
    out, path, moved = ops.unpack(wire.view(-1), shape, dim, world, _as_sizes(sizes))
    record.add(name, path, moved, 0, started, calls=0)
    return out


def _count(result: Tensor, name: str, bytes_sent: int) -> None:
    record.add(name, "compiled", 0, bytes_sent, record.now())


for _name, _function in (("pack", _pack), ("unpack", _unpack), ("count", _count)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("tritoncomm::pack", lib=_library)
def _(x: Tensor, dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    length = x.shape[dim] if sizes is not None else -(-x.shape[dim] // world) * world
    return x.new_empty(math.prod(x.shape[:dim]) * length * math.prod(x.shape[dim + 1 :]))


@torch.library.register_fake("tritoncomm::unpack", lib=_library)
def _(wire: Tensor, shape: list[int], dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    return wire.new_empty(shape)


torch.library.register_fake("tritoncomm::count", lambda result, name, bytes_sent: None, lib=_library)

_c10d = torch.ops._c10d_functional


def _finished(pending: Tensor, name: str, bytes_sent: int) -> Tensor:
    """Wait for a collective, and count the call.

    ``count`` is declared to write the result, and does not: an operator that writes what is used later is neither
    dropped nor merged with its like. A tally from outside the graph would be a saved tensor of the backward graph, and
    autograd refuses that backward once another forward has written the tally; inductor loses track of effect tokens.
    """
    result = _c10d.wait_tensor(pending)
    torch.ops.tritoncomm.count(result, name, bytes_sent)
    return result


def _result(x: Tensor) -> Tensor:
    """A tensor of its own over the same memory, to be returned from a forward.

    torch 2.11 takes every value of a compiled forward for an output of it: where the last operator returns its own
    input (``wait_tensor``, an idle ``contiguous``) the gradient goes to the wrong one of the two, and is lost.
    """
    return x.view(x.shape)


def _split_sizes(x: Tensor, dim: int, world: int, sizes: Ints | None, name: str) -> Ints:
    """What ``dim`` is split into: ``sizes``, or equal sizes."""
    size = x.shape[dim]
    if sizes is None:
        if size % world:
            raise ShapeError(f"{name}: dim {dim} of size {size} does not divide over {world} ranks")
        return (size // world,) * world
    if len(sizes) != world or sum(sizes) != size or any(part < 0 for part in sizes):
        raise ShapeError(f"{name}: split sizes do not cut dim {dim} of shape {tuple(x.shape)} over {world} ranks")
    return sizes


def _all_gather_sizes(shape: Ints, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Ints:
    """The size of ``dim`` on every rank: ``sizes``, or this rank's on all of them."""
    world, size = group.size(), shape[dim]
    if sizes is None:
        return (size,) * world
    if len(sizes) != world or sizes[group.rank()] != size or any(part < 0 for part in sizes):
        raise ShapeError(f"{name}: split sizes need {world} entries, mine the size of dim {dim} of {tuple(shape)}")
    return sizes


def _all_equal(sizes: Ints | None) -> bool:
    return sizes is None or all(size == sizes[0] for size in sizes)


def _all_to_all(
    x: Tensor, out_counts: list[int], in_counts: list[int], group: ProcessGroup, name: str, bytes_sent: int
) -> Tensor:
    """All-to-all of a flat tensor by numbers of elements."""
    wire = torch.view_as_real(x).flatten() if x.is_complex() else x
    width = 2 if x.is_complex() else 1
    out_counts, in_counts = ([width * count for count in counts] for counts in (out_counts, in_counts))
    out = _finished(_c10d.all_to_all_single(wire, out_counts, in_counts, group.group_name), name, bytes_sent)
    return torch.view_as_complex(out.view(-1, 2)) if x.is_complex() else out


def all_gather(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """Concatenate the ranks' tensors along ``dim``."""
    world, dim = group.size(), dim % x.dim()
    if world == 1:
        return x
    each = _all_gather_sizes(x.shape, dim, group, sizes, name)
    shape = (*x.shape[:dim], sum(each), *x.shape[dim + 1 :])
    bytes_sent = x.numel() * x.element_size() * (world - 1)
    if _all_equal(sizes):
        sizes = None
        pending = _c10d.all_gather_into_tensor(x.contiguous(), world, group.group_name)
        wire = _finished(pending, name, bytes_sent)
    else:
        rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
        mine = x.contiguous().view(-1)
        counts = [rest * size for size in each], [mine.numel()] * world
        wire = _all_to_all(mine.repeat(world), *counts, group, name, bytes_sent)
    return _joined(wire, shape, dim, world, sizes, name)


def _joined(wire: Tensor, shape: Ints, dim: int, world: int, sizes: Ints | None, name: str) -> Tensor:
    """What arrived in rank order, as the tensor of this shape."""
    if math.prod(shape[:dim]) == 1:
        return wire.view(shape)
    return torch.ops.tritoncomm.unpack(wire, shape, dim, world, None if sizes is None else list(sizes), name)


def _wire(x: Tensor, dim: int, world: int, sizes: Ints | None, name: str) -> Tensor:
    """x in rank order, flat."""
    if math.prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    return torch.ops.tritoncomm.pack(x, dim, world, None if sizes is None else list(sizes), name)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """Sum over the ranks and keep this rank's shard of ``dim``."""
    world, rank, dim = group.size(), group.rank(), dim % x.dim()
    if world == 1:
        return x
    each = _split_sizes(x, dim, world, sizes, name)
    if not _all_equal(sizes):  # no functional reduce-scatter takes sizes
        return _result(all_reduce(x, group, name).narrow(dim, sum(each[:rank]), each[rank]).contiguous())
    wire = _wire(x, dim, world, None, name)
    pending = _c10d.reduce_scatter_tensor(wire, "sum", world, group.group_name)
    out = _finished(pending, name, x.numel() * x.element_size() * (world - 1) // world)
    return out.view((*x.shape[:dim], each[rank], *x.shape[dim + 1 :]))


def split(x: Tensor, dim: int, world: int, rank: int, sizes: Ints | None) -> Tensor:
    """This rank's shard of ``dim``; plain torch, which inductor fuses with what follows."""
    dim %= x.dim()
    each = _split_sizes(x, dim, world, sizes, "split")
    return _result(x.narrow(dim, sum(each[:rank]), each[rank]).contiguous())


def all_reduce(x: Tensor, group: ProcessGroup, name: str) -> Tensor:
    """Sum over the ranks, never in place: inductor reuses the buffer where it can."""
    world = group.size()
    if world == 1:
        return x
    pending = _c10d.all_reduce(x.contiguous(), "sum", group.group_name)
    return _result(_finished(pending, name, 2 * x.numel() * x.element_size() * (world - 1) // world))


def all_to_all_single(
    x: Tensor, group: ProcessGroup, out_sizes: Ints | None, in_sizes: Ints | None, name: str
) -> Tensor:
    """All-to-all along dim 0, always by split sizes: the functional collective has no even form."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return x
    sent = _split_sizes(x, 0, world, in_sizes, name)
    received = out_sizes if out_sizes is not None else _split_sizes(x, 0, world, None, name)
    if len(received) != world or any(size < 0 for size in received):
        raise ShapeError(f"{name}: output split sizes need {world} entries of 0 or more")
    rest = math.prod(x.shape[1:])
    counts = [size * rest for size in received], [size * rest for size in sent]
    bytes_sent = (x.shape[0] - sent[rank]) * rest * x.element_size()
    out = _all_to_all(x.contiguous().view(-1), *counts, group, name, bytes_sent)
    return out.view((sum(received), *x.shape[1:]))


def all_to_all(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    name: str,
    shape: Any = None,
    scatter_sizes: Ints | None = None,
    gather_sizes: Ints | None = None,
) -> Tensor:
    """Split ``scatter_dim`` over the ranks and concatenate ``gather_dim`` from them."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return x if shape is None else x.reshape(shape)
    scatter_dim, gather_dim = scatter_dim % x.dim(), gather_dim % x.dim()
    if scatter_dim == gather_dim and (scatter_sizes is not None or gather_sizes is not None):
        raise ArgumentError(f"{name}: sizes need two different dims, not {scatter_dim} twice")
    sent = _split_sizes(x, scatter_dim, world, scatter_sizes, name)
    block = (*x.shape[:scatter_dim], sent[rank], *x.shape[scatter_dim + 1 :])
    received = _all_gather_sizes(block, gather_dim, group, gather_sizes, name)
    joined = (*block[:gather_dim], sum(received), *block[gather_dim + 1 :])
    sent_unit, received_unit = (
        math.prod(of[:dim]) * math.prod(of[dim + 1 :]) for of, dim in ((x.shape, scatter_dim), (joined, gather_dim))
    )
    counts = [received_unit * size for size in received], [sent_unit * size for size in sent]
    bytes_sent = (x.numel() - sent_unit * sent[rank]) * x.element_size()
    wire = _wire(x, scatter_dim, world, scatter_sizes, name)
    wire = _all_to_all(wire, *counts, group, name, bytes_sent)
    out = _joined(wire, joined, gather_dim, world, gather_sizes, name)
    return out if shape is None else out.view(shape)
