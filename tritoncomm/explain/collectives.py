"""The steps of every collective of ``core.eager``, from shapes, strides and sizes."""

import math
from collections.abc import Callable
from dataclasses import replace

from tritoncomm.core import plan
from tritoncomm.core.plan import CollectivePlan, Ints
from tritoncomm.errors import CommError
from tritoncomm.explain.steps import Call, Step

__all__ = [
    "Move",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "identity",
    "reduce_scatter",
    "rows",
    "split",
    "to_hidden",
    "to_sequence",
]

Steps = tuple[list[Step], Ints]
"""(steps, shape of the result)."""
Move = Callable[[Ints, Ints, Call], Steps]
"""From the shape of the input, the mapping's dims and the call to the steps."""


def identity(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return no step."""
    return [], shape


def all_reduce(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps of a sum over the ranks; in place if the call overwrites and the tensor is contiguous."""
    call.check_sum()
    size, copies = call.nbytes(shape), call.flat(shape)
    if not copies:  # a contiguous input; the copy of a strided one is the buffer of the sum
        where = "in place: overwrite_inputs is on" if call.overwrite else "into a copy: overwrite_inputs is off"
        copies = [call.local("copy", where, 0 if call.overwrite else 2 * size)]
    sent = call.collective("all-reduce", f"{list(shape)}", plan.all_reduce_bytes(size, call.world))
    return [*copies, sent], shape


def all_gather(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps that concatenate a dim from the ranks."""
    dim = plan.normalize_dim(shape, dims[0])
    sizes = _unless_equal(call, shape[dim])
    planned = _plan(plan.all_gather, shape, call, dim, call.world, call.rank, sizes, True)
    what, copies = f"{list(shape)} from every rank", call.flat(shape)
    if sizes is not None:
        how = f"padded to {planned.padded}" if planned.padded else "a broadcast for each rank"
        what = f"{list(shape)} from this rank, {list(sizes)} of dim {dim} from all, {how}"
    if planned.padded and shape[dim] < planned.padded:
        copies.append(call.local("copy", f"{list(shape)} into the wire", 2 * call.nbytes(shape)))
    sent = call.collective("all-gather", what, planned.bytes_sent, planned.bytes_received)
    unpack = call.unpack_padded if planned.padded else call.unpack
    return [*copies, sent, unpack(planned.shape, dim, sizes)], planned.shape


def reduce_scatter(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps of a sum over the ranks of which this rank keeps its shard of a dim."""
    call.check_sum()
    dim = plan.normalize_dim(shape, dims[0])
    sizes = _unless_equal(call, shape[dim] // call.world)
    planned = _plan(plan.reduce_scatter, shape, call, dim, call.world, call.rank, sizes)
    what = f"{list(planned.shape)} to every rank"
    if sizes is not None:
        what = f"{list(sizes)} of dim {dim} to the ranks"
    copies = call.flat(shape) if planned.in_order and sizes is None else []
    packed = copies or [call.pack(shape, dim, sizes)]
    return [*packed, call.collective("reduce-scatter", what, planned.bytes_sent)], planned.shape


def split(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the step to this rank's shard of a dim."""
    start, size = plan.split(shape, dims[0], call.world, call.rank, call.sizes)
    shard = call.input(shape).narrow(dims[0], start, size)
    copied = 0 if shard.is_contiguous() else 2 * call.nbytes(tuple(shard.shape))
    return [call.local("split", f"{list(shape)} -> this rank's {list(shard.shape)}", copied)], tuple(shard.shape)


def rows(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps of an all-to-all along dim 0, by split sizes or evenly."""
    planned = _plan(plan.all_to_all_single, shape, call, call.world, call.rank, call.out_sizes, call.sizes)
    what = f"{list(shape)}, rows in rank order"
    if planned.recv_sizes:
        what = f"rows {list(planned.send_sizes)} to the ranks, {list(planned.recv_sizes)} from them"
    misaligned = call.misaligned((shape, 0, planned.send_sizes), (planned.shape, 0, planned.recv_sizes))
    sent = call.collective("all-to-all", what, planned.bytes_sent, planned.bytes_received, misaligned)
    return [*call.flat(shape), sent], planned.shape


def all_to_all(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps that split the first of two dims and concatenate the second."""
    scatter_dim, gather_dim = dims
    planned = _plan(plan.all_to_all, shape, call, *dims, call.world, call.rank, call.sizes, call.out_sizes)
    send, recv = planned.send_sizes or None, planned.recv_sizes or None
    what = f"{list(plan.resized(shape, scatter_dim, shape[scatter_dim] // call.world))} to every rank"
    if send is not None and recv is not None:
        ends = f"dim {scatter_dim % len(shape)} to the ranks", f"dim {gather_dim % len(shape)} from them"
        what = f"{list(send)} of {ends[0]}, {list(recv)} of {ends[1]}"
    misaligned = call.misaligned((shape, scatter_dim, send), (planned.shape, gather_dim, recv))
    sent = call.collective("all-to-all", what, planned.bytes_sent, planned.bytes_received, misaligned)
    return [call.pack(shape, scatter_dim, send), sent, call.unpack(planned.shape, gather_dim, recv)], planned.shape


def _plan(function: Callable[..., CollectivePlan], shape: Ints, call: Call, *args: object) -> CollectivePlan:
    """Return ``function(shape, itemsize, *args)``, a function of ``plan``; its errors get the rank and the shape."""
    try:
        return function(shape, call.dtype.itemsize, *args)
    except CommError as error:
        raise type(error)(f"plan: {error} (rank {call.rank} of {call.world}, shape {list(shape)})") from None


def _unless_equal(call: Call, size: int) -> Ints | None:
    """Return split sizes, or None where the collective of equal shards serves."""
    return None if call.sizes is not None and plan.all_equal(call.sizes, call.world, size) else call.sizes


def to_hidden(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps from sequence-parallel to hidden-parallel; any leading dims are read in place."""
    flat = (math.prod(shape[:-1]), shape[-1])
    if call.stride is None:
        return all_to_all(flat, (1, 0), call)
    steps, _ = all_to_all(shape, (len(shape) - 1, 0), call)
    return steps, (flat[0] * call.world, flat[1] // call.world)


def to_sequence(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Return the steps from hidden-parallel to sequence-parallel."""
    flat = (math.prod(shape[:-1]), shape[-1])
    if call.stride is None:
        return all_to_all(flat, (0, 1), call)
    try:
        stride = call.input(shape).view(flat).stride()
    except RuntimeError:
        # Flattening copies where one stride cannot walk the leading dims: a pack for one rank.
        flattened = replace(call, world=1).pack(shape, 0)
        steps, result = all_to_all(flat, (0, 1), replace(call, stride=None))
        return [flattened, *steps], result
    return all_to_all(flat, (0, 1), replace(call, stride=stride))
