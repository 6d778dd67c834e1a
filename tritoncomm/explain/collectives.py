"""The steps of every collective of ``core.eager``, from shapes, strides and sizes."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from tritoncomm.core import eager, plan
from tritoncomm.core.plan import Ints
from tritoncomm.errors import CommError
from tritoncomm.explain.steps import PlannedCall, Step

__all__ = [
    "Move",
    "Steps",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "identity",
    "located",
    "reduce_scatter",
    "rows",
    "split",
    "to_hidden",
    "to_sequence",
]

Steps = tuple[list[Step], Ints]
"""(steps, shape of the result)."""
Move = Callable[[Ints, Ints, PlannedCall], Steps]
"""From the shape of the input, the mapping's dims and the call to the steps."""


def identity(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return no step."""
    return [], shape


def all_reduce(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps of a sum over the ranks; in place if the call overwrites and the tensor is contiguous."""
    call.check_sum()
    size, copies = call.nbytes(shape), call.flat(shape)
    if not copies:  # a contiguous input; the copy of a strided one is the buffer of the sum
        where = "in place: overwrite_inputs is on" if call.overwrite else "into a copy: overwrite_inputs is off"
        copies = [call.local("copy", where, 0 if call.overwrite else 2 * size)]
    sent = call.collective("all-reduce", f"{list(shape)}", plan.all_reduce_bytes(size, call.world))
    return [*copies, sent], shape


def all_gather(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps that concatenate a dim from the ranks."""
    dim = plan.normalize_dim(shape, dims[0])
    sizes = _unless_equal(call, shape[dim])
    with located(shape, call):
        planned, unpack, _ = eager.plan_gather(shape, call.dtype, dim, call.world, call.rank, sizes)
    text, copies = f"{list(shape)} from every rank", call.flat(shape)
    if sizes is not None:
        how = f"padded to {planned.padded}" if planned.padded else "a broadcast for each rank"
        text = f"{list(shape)} from this rank, {list(sizes)} of dim {dim} from all, {how}"
    if planned.padded and shape[dim] < planned.padded:
        copies.append(call.local("copy", f"{list(shape)} into the wire", 2 * call.nbytes(shape)))
    collective = call.collective("all-gather", text, planned.bytes_sent, planned.bytes_received)
    unpacked = call.local("unpack", f"{list(planned.shape)} is already in rank order (no copy)", 0)
    if unpack is not None:
        unpacked = call.local_pass("unpack", unpack, [planned.shape])
    return [*copies, collective, unpacked], planned.shape


def reduce_scatter(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps of a sum over the ranks of which this rank keeps its shard of a dim."""
    call.check_sum()
    dim = plan.normalize_dim(shape, dims[0])
    sizes = _unless_equal(call, shape[dim] // call.world)
    with located(shape, call):
        planned = plan.reduce_scatter(shape, call.dtype.itemsize, dim, call.world, call.rank, sizes)
    text = f"{list(planned.shape)} to every rank"
    if sizes is not None:
        text = f"{list(sizes)} of dim {dim} to the ranks"
    copies = call.flat(shape) if planned.in_order and sizes is None else []
    packed = copies or [call.pack(shape, dim, sizes)]
    return [*packed, call.collective("reduce-scatter", text, planned.bytes_sent)], planned.shape


def split(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the step to this rank's shard of a dim."""
    start, size = plan.split(shape, dims[0], call.world, call.rank, call.sizes)
    shard = call.input(shape).narrow(dims[0], start, size)
    copied = 0 if shard.is_contiguous() else 2 * call.nbytes(tuple(shard.shape))
    return [call.local("split", f"{list(shape)} -> this rank's {list(shard.shape)}", copied)], tuple(shard.shape)


def rows(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps of an all-to-all along dim 0, by split sizes or evenly."""
    itemsize = call.dtype.itemsize
    with located(shape, call):
        planned = plan.all_to_all_single(shape, itemsize, call.world, call.rank, call.out_sizes, call.sizes)
    text = f"{list(shape)}, rows in rank order"
    send, recv = planned.send_sizes, planned.recv_sizes
    if recv:
        text = f"rows {list(send)} to the ranks, {list(recv)} from them"
    row = math.prod(shape[1:])
    counts = [[size * row for size in sizes or (shape[0] // call.world,) * call.world] for sizes in (send, recv)]
    misaligned = call.misaligned(*map(tuple, counts))
    collective = call.collective("all-to-all", text, planned.bytes_sent, planned.bytes_received, misaligned)
    return [*call.flat(shape), collective], planned.shape


def all_to_all(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps that split the first of two dims and concatenate the second."""
    (scatter_dim, gather_dim), (send, recv) = dims, (call.sizes, call.out_sizes)
    stride, itemsize = call.input(shape).stride(), call.dtype.itemsize
    with located(shape, call):
        planned = eager.plan_exchange(
            shape,
            stride,
            itemsize,
            scatter_dim,
            gather_dim,
            call.world,
            call.rank,
            scatter_sizes=send,
            gather_sizes=recv,
        )
    text = f"{list(plan.resized(shape, scatter_dim, shape[scatter_dim] // call.world))} to every rank"
    if planned.send_counts:  # counts are there where ranks send or receive unequal parts
        send = send or (shape[scatter_dim] // call.world,) * call.world
        recv = recv or (shape[gather_dim],) * call.world
        text = f"{list(send)} of dim {scatter_dim % len(shape)} to the ranks, "
        text += f"{list(recv)} of dim {gather_dim % len(shape)} from them"
    return call.exchange(planned, [shape], text), planned.shapes[0]


@contextmanager
def located(shape: Ints, call: PlannedCall) -> Iterator[None]:
    """Add the rank and the shape of a call to the errors of its planner."""
    try:
        yield
    except CommError as error:
        raise type(error)(f"plan: {error} (rank {call.rank} of {call.world}, shape {list(shape)})") from None


def _unless_equal(call: PlannedCall, size: int) -> Ints | None:
    """Return split sizes, or None where the collective of equal shards serves."""
    return None if call.sizes is not None and plan.all_equal(call.sizes, call.world, size) else call.sizes


def to_hidden(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
    """Return the steps from sequence-parallel to hidden-parallel; any leading dims are read in place."""
    flat = (math.prod(shape[:-1]), shape[-1])
    if call.stride is None:
        return all_to_all(flat, (1, 0), call)
    steps, _ = all_to_all(shape, (len(shape) - 1, 0), call)
    return steps, (flat[0] * call.world, flat[1] // call.world)


def to_sequence(shape: Ints, dims: Ints, call: PlannedCall) -> Steps:
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
