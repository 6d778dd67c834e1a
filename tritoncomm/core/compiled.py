"""Collectives under torch.compile: functional collectives that inductor knows, and views that it fuses around them.

Pack and unpack by uneven sizes, or by a kernel, are opaque operators. They run the eager code, so paths, counters and
alignment checks happen at run time. Sizes reach them as symbols, so one graph serves every sequence length. Arguments
are checked while a call is traced, as in eager mode.
"""

import math
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record, variables
from tritoncomm.core import backend, ops, plan
from tritoncomm.core.plan import CollectivePlan, Ints
from tritoncomm.errors import CommError, UnsupportedError

__all__ = ["all_gather", "all_reduce", "all_to_all", "all_to_all_single", "reduce_scatter", "split", "traced"]

T = TypeVar("T")

_library = torch.library.Library("tritoncomm", "DEF")
_library.define("pack(Tensor x, int dim, int world, SymInt[]? sizes, str name) -> Tensor")
_library.define("unpack(Tensor wire, SymInt[] shape, int dim, int world, SymInt[]? sizes, str name) -> Tensor")
_library.define("count(Tensor(a!) result, str name, SymInt bytes_sent) -> ()")


def _pack(x: Tensor, dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    """Implement the operator ``pack``: a flat wire of ``x``, always new memory, counted under ``name``."""
    started = record.now()
    wire, path, copied = ops.pack(x, dim, world, None if sizes is None else tuple(sizes))
    # The result of an operator must not alias its input: the schema says so, and the compiler relies on it.
    if path == "view":
        wire, path, copied = wire.clone(), "torch", 2 * x.nbytes
    # The call itself, with the bytes that it sends, is counted by ``count``.
    record.add(name, path, copied, 0, started, calls=0)
    return wire.view(-1)


def _unpack(wire: Tensor, shape: list[int], dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    """Implement the operator ``unpack``: a tensor of ``shape`` from a flat wire, counted under ``name``."""
    started = record.now()
    out, path, copied = ops.unpack(wire.view(-1), shape, dim, world, None if sizes is None else tuple(sizes))
    record.add(name, path, copied, 0, started, calls=0)
    return out


def _count(result: Tensor, name: str, bytes_sent: int) -> None:
    """Implement the operator ``count``: count a call of ``name`` when the graph runs; ``result`` stays as it is."""
    record.add(name, "compiled", 0, bytes_sent, record.now())


for _name, _function in (("pack", _pack), ("unpack", _unpack), ("count", _count)):
    _library.impl(_name, _function, "CompositeExplicitAutograd")


@torch.library.register_fake("tritoncomm::pack", lib=_library)
def _(x: Tensor, dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    """Make the result of ``pack`` for tracing: a tensor of its shape without data."""
    length = x.shape[dim] if sizes is not None else -(-x.shape[dim] // world) * world
    return x.new_empty(math.prod(x.shape[:dim]) * length * math.prod(x.shape[dim + 1 :]))


@torch.library.register_fake("tritoncomm::unpack", lib=_library)
def _(wire: Tensor, shape: list[int], dim: int, world: int, sizes: list[int] | None, name: str) -> Tensor:
    """Make the result of ``unpack`` for tracing: a tensor of its shape without data."""
    return wire.new_empty(shape)


torch.library.register_fake("tritoncomm::count", lambda result, name, bytes_sent: None, lib=_library)

_c10d = torch.ops._c10d_functional


def _finished(pending: Tensor, name: str, bytes_sent: int) -> Tensor:
    """Add to the graph the wait for the collective ``pending`` and the count of its call; return the result."""
    result = _c10d.wait_tensor(pending)
    # The schema declares a write of the result that does not happen, so the compiler neither drops the operator nor
    # merges two of them. A tally from outside of the graph would be a saved tensor of the backward graph. Autograd
    # refuses that backward once another forward has written the tally. Effect tokens are no way either: inductor loses
    # track of them.
    torch.ops.tritoncomm.count(result, name, bytes_sent)
    return result


def _result(x: Tensor) -> Tensor:
    """Return a new tensor over the memory of ``x``, for a forward to return."""
    # Torch 2.11 loses the gradient if the last operator returns its own input, as wait_tensor does: the gradient goes
    # to the wrong one of the two.
    return _shaped(x, x.shape)


def _shaped(x: Tensor, shape: Any) -> Tensor:
    """Return ``x`` in ``shape``, and no view of it: autograd refuses in-place operators on a forward's views."""
    return torch.ops.aten._unsafe_view(x, shape)


def _check_sum(x: Tensor, name: str) -> None:
    """Reject a sum of a dtype that no backend adds up; see ``backend.check_op``."""
    if x.dtype in backend.moved_as_bytes:
        raise UnsupportedError(f"{name}: no backend sums {x.dtype}: {backend.unsummed(x.dtype)}")


def _as_bytes(x: Tensor) -> Tensor:
    """Return a flat tensor of a dtype that backends lack as bytes; see ``backend.carrier``."""
    return x.view(torch.uint8) if x.dtype in backend.moved_as_bytes else x


def _sum_of(x: Tensor) -> str:
    """Return the name of the reduction that sums tensors like ``x``: "max" for bools, see ``backend.op_of``."""
    return "max" if x.dtype is torch.bool else "sum"


def traced(function: Callable[..., T], functional: Callable[..., T], name: str) -> Callable[..., T]:
    """Return the function that torch.compile is to trace for ``name``: ``functional``, except in check mode."""
    if not (variables.CHECK.value or variables.HASH.value):
        return functional
    # Check mode compares calls on the host, so the eager function runs behind a break of the graph. With fullgraph=True
    # torch raises here, and names the reason.
    torch._dynamo.graph_break(f"{name}: check mode (TRITONCOMM_CHECK) compares calls on the host, outside of graphs")
    outside: Any = torch.compiler.disable(function)
    return outside


def _plan(function: Any, x: Tensor, group: ProcessGroup, name: str, *args: Any) -> CollectivePlan:
    """Return ``function(shape of x, itemsize, *args)``, a function of ``plan``; its errors get the name and rank."""
    try:
        return function(x.shape, x.element_size(), *args)
    except CommError as error:
        failure = plan.located(error, x.shape, name, group)
    raise failure  # not above, `from None`: Dynamo of torch 2.11 cannot trace that


def _all_to_all(
    x: Tensor, out_counts: list[int], in_counts: list[int], group: ProcessGroup, name: str, bytes_sent: int
) -> Tensor:
    """Add to the graph an all-to-all of the flat tensor ``x``, in rank order; counts are elements, one per rank."""
    # A complex element travels as two reals, and an element of a dtype that backends lack as its bytes. Counts grow
    # with it.
    wire = torch.view_as_real(x).flatten() if x.is_complex() else _as_bytes(x)
    width = x.element_size() // wire.element_size()
    out_counts, in_counts = ([width * count for count in counts] for counts in (out_counts, in_counts))
    out = _finished(_c10d.all_to_all_single(wire, out_counts, in_counts, group.group_name), name, bytes_sent)
    return torch.view_as_complex(out.view(-1, 2)) if x.is_complex() else out.view(x.dtype)


def all_gather(x: Tensor, dim: int, group: ProcessGroup, name: str, sizes: Ints | None = None) -> Tensor:
    """Add to the graph an all-gather along ``dim``, and return the gathered tensor; see ``eager.all_gather``."""
    world = group.size()
    if world == 1:
        return x
    planned = _plan(plan.all_gather, x, group, name, dim, world, group.rank(), sizes)
    sizes = _uneven(sizes, world, x.shape[dim])
    if sizes is None:
        local = x.contiguous()
        if x.dtype in backend.moved_as_bytes:
            local = _as_bytes(local.view(-1))
        pending = _c10d.all_gather_into_tensor(local, world, group.group_name)
        wire = _finished(pending, name, planned.bytes_sent).view(x.dtype)
    else:
        local = x.contiguous().view(-1)
        # No functional all-gather takes uneven sizes: each rank sends its tensor to every rank, as a copy per rank.
        counts = list(planned.recv_counts), [local.numel()] * world
        wire = _all_to_all(local.repeat(world), *counts, group, name, planned.bytes_sent)
    return _unpacked(wire, planned, dim, world, sizes, name)


def _uneven(sizes: Ints | None, world: int, size: int) -> Ints | None:
    """Return ``sizes``, or None if there are ``world`` sizes that all equal ``size``."""
    return None if sizes is None or plan.all_equal(sizes, world, size) else sizes


def _fuses(x: Tensor) -> bool:
    """Whether pack and unpack of tensors like ``x`` are views, which the compiler fuses with its neighbours."""
    # On GPUs only the path torch takes views, because no measurement says whether the kernels lose to the fusion there.
    return ops.forced_path() == "torch" or (ops.forced_path() == "auto" and not x.is_cuda)


def _unpacked(wire: Tensor, planned: CollectivePlan, dim: int, world: int, sizes: Ints | None, name: str) -> Tensor:
    """Add to the graph the unpack of ``wire``, if ``planned`` needs one; without it the result is over ``wire``."""
    shape = planned.shape
    if planned.in_order:
        return _shaped(wire, shape)
    if sizes is None and _fuses(wire):
        dim %= len(shape)
        rows = wire.view(world, *plan.resized(shape, dim, shape[dim] // world)).movedim(0, dim)
        return _shaped(rows.reshape(shape), shape)
    return torch.ops.tritoncomm.unpack(wire, shape, dim, world, None if sizes is None else list(sizes), name)


def _packed(x: Tensor, dim: int, world: int, sizes: Ints | None, name: str) -> Tensor:
    """Add to the graph the pack of ``x`` along ``dim`` by ``sizes``; return a flat wire in rank order."""
    dim %= x.dim()
    if math.prod(x.shape[:dim]) == 1:
        return x.contiguous().view(-1)
    if sizes is None and _fuses(x):
        return x.unflatten(dim, (world, x.shape[dim] // world)).movedim(dim, 0).reshape(-1)
    return torch.ops.tritoncomm.pack(x, dim, world, None if sizes is None else list(sizes), name)


def reduce_scatter(x: Tensor, dim: int, group: ProcessGroup, name: str, sizes: Ints | None = None) -> Tensor:
    """Add to the graph a sum over the ranks; return this rank's shard of ``dim``. See ``eager.reduce_scatter``."""
    world = group.size()
    if world == 1:
        return x
    planned = _plan(plan.reduce_scatter, x, group, name, dim, world, group.rank(), sizes)
    if _uneven(sizes, world, x.shape[dim] // world) is not None:  # no functional reduce-scatter takes split sizes
        return split(all_reduce(x, group, name), dim, group, name, sizes)
    _check_sum(x, name)
    wire = _packed(x, dim, world, sizes=None, name=name)
    pending = _c10d.reduce_scatter_tensor(wire, _sum_of(x), world, group.group_name)
    return _shaped(_finished(pending, name, planned.bytes_sent), planned.shape)


def split(x: Tensor, dim: int, group: ProcessGroup, name: str, sizes: Ints | None = None) -> Tensor:
    """Return this rank's shard of ``dim`` by plain operators of torch, which inductor fuses; see ``eager.split``."""
    if group.size() == 1:
        return x
    try:
        start, size = plan.split(x.shape, dim, group.size(), group.rank(), sizes)
    except CommError as error:
        failure = plan.located(error, x.shape, name, group)
    else:
        return _result(x.narrow(dim, start, size).contiguous())
    # Raised here without ``from None``, as Dynamo of torch 2.11 cannot trace that in an except clause.
    raise failure


def all_reduce(x: Tensor, group: ProcessGroup, name: str, in_place: bool = False) -> Tensor:
    """Add to the graph a sum over the ranks, and return it; see ``eager.all_reduce``."""
    world = group.size()
    if world == 1:
        return x
    _check_sum(x, name)
    pending = _c10d.all_reduce(x.contiguous(), _sum_of(x), group.group_name)
    total = _finished(pending, name, plan.all_reduce_bytes(x.numel() * x.element_size(), world))
    # The collective itself is never in place, as inductor reuses buffers. It does this copy in the pass that follows.
    if in_place and x.is_contiguous():
        x.detach().copy_(total)
        return x
    return _result(total)


def all_to_all_single(
    x: Tensor, group: ProcessGroup, out_sizes: Ints | None, in_sizes: Ints | None, name: str
) -> Tensor:
    """Add to the graph an all-to-all of the rows of dim 0, and return what arrives; see ``eager.all_to_all_single``."""
    world = group.size()
    if world == 1:
        return x
    planned = _plan(plan.all_to_all_single, x, group, name, world, group.rank(), out_sizes, in_sizes)
    row = math.prod(x.shape[1:])
    # The functional collective has no even form, so split sizes are always passed.
    received, sent = (
        _counts(tuple(row * n for n in sizes), x, world) for sizes in (planned.recv_sizes, planned.send_sizes)
    )
    return _shaped(_all_to_all(x.contiguous().view(-1), received, sent, group, name, planned.bytes_sent), planned.shape)


def _counts(counts: Ints, x: Tensor, world: int) -> list[int]:
    """Return ``counts`` as a list; if it is empty, ``world`` equal shares of the elements of ``x``."""
    return list(counts) if counts else [x.numel() // world] * world


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
    """Add to the graph an all-to-all of two dims, with its pack and unpack; see ``eager.all_to_all``."""
    world = group.size()
    if world == 1:
        return x if shape is None else x.reshape(shape)
    sizes = scatter_sizes, gather_sizes
    planned = _plan(plan.all_to_all, x, group, name, scatter_dim, gather_dim, world, group.rank(), *sizes)
    counts = _counts(planned.recv_counts, x, world), _counts(planned.send_counts, x, world)
    wire = _packed(x, scatter_dim, world, _uneven(scatter_sizes, world, x.shape[scatter_dim] // world), name)
    wire = _all_to_all(wire, *counts, group, name, planned.bytes_sent)
    out = _unpacked(wire, planned, gather_dim, world, _uneven(gather_sizes, world, x.shape[gather_dim]), name)
    return out if shape is None else _shaped(out, shape)
