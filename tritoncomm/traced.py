"""The same movements under torch.compile: functional collectives that inductor knows, and opaque pack and unpack ops.

The ops run the eager code, so paths, counters and alignment checks happen at run time and nothing recompiles per call.
"""

import math
from typing import Any

import torch
from torch import Tensor
from torch._higher_order_ops.effects import _EffectType, _register_effectful_op
from torch.distributed import ProcessGroup

from tritoncomm import ops, record
from tritoncomm.errors import ShapeError
from tritoncomm.plan import Ints, Plan

__all__ = ["all_reduce", "exchange", "exchange_rows", "gather", "scatter_reduce", "split"]

_library = torch.library.Library("tritoncomm", "DEF")
_library.define("pack(Tensor x, int dim, int world, int[]? sizes, str name) -> Tensor")
_library.define("unpack(Tensor wire, int[] shape, int dim, int world, int[]? sizes, str name) -> Tensor")
_library.define("count(str name, int wire) -> ()")


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


def _count(name: str, wire: int) -> None:
    record.add(name, "compiled", 0, wire, record.now())


for _name, _function in (("pack", _pack), ("unpack", _unpack), ("count", _count)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("tritoncomm::pack", lib=_library)
def _(x: Tensor, dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    length = x.shape[dim] if sizes is not None else -(-x.shape[dim] // world) * world
    return x.new_empty(x.numel() // x.shape[dim] * length if x.shape[dim] else 0)


@torch.library.register_fake("tritoncomm::unpack", lib=_library)
def _(wire: Tensor, shape: list[int], dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    return wire.new_empty(shape)


torch.library.register_fake("tritoncomm::count", lambda name, wire: None, lib=_library)
_register_effectful_op(torch.ops.tritoncomm.count.default, _EffectType.ORDERED)

_c10d = torch.ops._c10d_functional


def _result(x: Tensor) -> Tensor:
    """A tensor of its own over the same memory, to be returned from a forward.

    torch 2.11 takes every value of a compiled forward for an output of it: where the last operator returns its own
    input (``wait_tensor``, an idle ``contiguous``) the gradient goes to the wrong one of the two, and is lost.
    """
    return x.view(x.shape)


def _even(size: int, world: int, dim: int, name: str) -> None:
    if size % world:
        raise ShapeError(f"{name}: dim {dim} of size {size} does not divide over {world} ranks")


def _all_to_all(x: Tensor, out_counts: list[int], in_counts: list[int], group: ProcessGroup) -> Tensor:
    wire = torch.view_as_real(x).flatten() if x.is_complex() else x
    width = 2 if x.is_complex() else 1
    out = _c10d.all_to_all_single(
        wire, [width * count for count in out_counts], [width * count for count in in_counts], group.group_name
    )
    out = _c10d.wait_tensor(out)
    return torch.view_as_complex(out.view(-1, 2)) if x.is_complex() else out


def gather(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """Concatenate the ranks' tensors along ``dim``."""
    world, dim = group.size(), dim % x.dim()
    if world == 1:
        return x
    torch.ops.tritoncomm.count(name, x.numel() * x.element_size() * (world - 1))
    sizes = sizes or (x.shape[dim],) * world
    shape = (*x.shape[:dim], sum(sizes), *x.shape[dim + 1 :])
    plan = Plan(math.prod(shape[:dim]), 0, 0, world, len(set(sizes)) == 1, False)
    if plan.even:
        wire = _c10d.wait_tensor(_c10d.all_gather_into_tensor(x.contiguous(), world, group.group_name))
        if plan.outer == 1:
            return wire.view(shape)
        return torch.ops.tritoncomm.unpack(wire, shape, dim, world, None, name)
    rest = math.prod(shape[:dim]) * math.prod(shape[dim + 1 :])
    mine = x.contiguous().view(-1)
    wire = _all_to_all(mine.repeat(world), [rest * size for size in sizes], [mine.numel()] * world, group)
    if plan.outer == 1:
        return wire.view(shape)
    return torch.ops.tritoncomm.unpack(wire, shape, dim, world, list(sizes), name)


def _wire(x: Tensor, dim: int, world: int, sizes: Ints | None, name: str) -> Tensor:
    """x in rank order, flat."""
    if math.prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    return torch.ops.tritoncomm.pack(x, dim, world, None if sizes is None else list(sizes), name)


def scatter_reduce(x: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, name: str) -> Tensor:
    """Sum over the ranks and keep this rank's piece of ``dim``."""
    world, rank, dim = group.size(), group.rank(), dim % x.dim()
    if world == 1:
        return x
    torch.ops.tritoncomm.count(name, x.numel() * x.element_size() * (world - 1) // world)
    if sizes is not None and len(set(sizes)) > 1:
        summed = _c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group.group_name))
        return _result(summed.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous())
    _even(x.shape[dim], world, dim, name)
    wire = _wire(x, dim, world, None, name)
    out = _c10d.wait_tensor(_c10d.reduce_scatter_tensor(wire, "sum", world, group.group_name))
    return out.view((*x.shape[:dim], x.shape[dim] // world, *x.shape[dim + 1 :]))


def split(x: Tensor, dim: int, world: int, rank: int, sizes: Ints | None) -> Tensor:
    """This rank's piece of ``dim``; plain torch, which inductor fuses with what follows."""
    if sizes is None:
        _even(x.shape[dim], world, dim, "split")
    sizes = sizes or (x.shape[dim] // world,) * world
    return _result(x.narrow(dim, sum(sizes[:rank]), sizes[rank]).contiguous())


def all_reduce(x: Tensor, group: ProcessGroup, name: str) -> Tensor:
    """Sum over the ranks, never in place: inductor reuses the buffer where it can."""
    world = group.size()
    if world == 1:
        return x
    torch.ops.tritoncomm.count(name, 2 * x.numel() * x.element_size() * (world - 1) // world)
    return _result(_c10d.wait_tensor(_c10d.all_reduce(x.contiguous(), "sum", group.group_name)))


def exchange_rows(x: Tensor, group: ProcessGroup, out_sizes: Ints | None, in_sizes: Ints | None, name: str) -> Tensor:
    """All-to-all along dim 0."""
    world = group.size()
    if world == 1:
        return x
    if in_sizes is None:
        _even(x.shape[0], world, 0, name)
    rows = sum(out_sizes) if out_sizes is not None else x.shape[0]
    if out_sizes is None:
        _even(rows, world, 0, name)
    torch.ops.tritoncomm.count(name, x.numel() * x.element_size() * (world - 1) // world)
    rest = math.prod(x.shape[1:])
    counts = [
        [size * rest for size in (sizes or (count // world,) * world)]
        for sizes, count in ((out_sizes, rows), (in_sizes, x.shape[0]))
    ]
    return _all_to_all(x.contiguous().view(-1), counts[0], counts[1], group).view((rows, *x.shape[1:]))


def exchange(
    x: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: ProcessGroup,
    name: str,
    shape: Any = None,
    scatter_sizes: Ints | None = None,
    gather_sizes: Ints | None = None,
) -> Tensor:
    """Cut ``scatter_dim`` over the ranks and join ``gather_dim`` from them."""
    world, rank = group.size(), group.rank()
    if world == 1:
        return x if shape is None else x.reshape(shape)
    scatter_dim, gather_dim = scatter_dim % x.dim(), gather_dim % x.dim()
    if scatter_sizes is None:
        _even(x.shape[scatter_dim], world, scatter_dim, name)
    torch.ops.tritoncomm.count(name, x.numel() * x.element_size() * (world - 1) // world)
    cut = scatter_sizes or (x.shape[scatter_dim] // world,) * world
    block = (*x.shape[:scatter_dim], cut[rank], *x.shape[scatter_dim + 1 :])
    join = gather_sizes or (block[gather_dim],) * world
    joined = (*block[:gather_dim], sum(join), *block[gather_dim + 1 :])
    sent_unit = x.numel() // max(x.shape[scatter_dim], 1)
    got_unit = math.prod(joined) // max(joined[gather_dim], 1)
    wire = _wire(x, scatter_dim, world, scatter_sizes, name)
    wire = _all_to_all(wire, [got_unit * n for n in join], [sent_unit * n for n in cut], group)
    if math.prod(joined[:gather_dim]) != 1:
        sizes = None if gather_sizes is None else list(gather_sizes)
        wire = torch.ops.tritoncomm.unpack(wire, joined, gather_dim, world, sizes, name)
    return wire.view(joined if shape is None else shape)
