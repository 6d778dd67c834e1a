"""The steps of every movement, told from shapes, strides and sizes: what `engine` would do."""

import math
from collections.abc import Callable
from dataclasses import replace

from tritoncomm.core import routes
from tritoncomm.core.plan import Ints, Plan
from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.explain.steps import Call, Step

__all__ = [
    "Move",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "identity",
    "reduce_scatter",
    "rows",
    "rows_back",
    "split",
    "swapped",
    "to_hidden",
    "to_sequence",
]

Steps = tuple[list[Step], Ints]
Move = Callable[[Ints, Ints, Call], Steps]


def identity(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Nothing happens."""
    return [], shape


def all_reduce(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Reduce over the ranks, in place unless the tensor is held or not contiguous."""
    call.check_sum()
    size, copies = call.nbytes(shape), call.flat(shape)
    if not copies:
        where = "the tensor is held elsewhere: into a copy" if call.held else "nothing else holds the tensor: in place"
        copies = [call.local("copy", where, 2 * size if call.held else 0)]
    sent = call.collective("all-reduce", f"{list(shape)}", 2 * size * (call.world - 1) // call.world)
    return [*copies, sent], shape


def all_gather(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Join a dim from the ranks."""
    dim, sizes, world = dims[0], call.sizes, call.world
    if sizes is not None and (len(set(sizes)) != 1 or len(sizes) != world or sizes[0] != shape[dim]):
        joined = routes.piece(shape, _joined(shape, dim, sizes, call), sum(sizes))
        mine = call.nbytes(shape)
        what = f"{list(shape)} from this rank, {list(sizes)} of dim {dim % len(shape)} from all"
        sent = call.collective("all-gather", what, mine * (world - 1), call.nbytes(joined) - mine)
        return [*call.flat(shape), sent, call.unpack(joined, dim, sizes)], joined
    route = routes.gathered(shape, call.dtype, dim, world)
    sent = call.collective("all-gather", f"{list(shape)} from every rank", route.wire_bytes)
    return [*call.flat(shape), sent, call.unpack(route.shape, dim)], route.shape


def reduce_scatter(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Reduce over the ranks, keep this rank's piece of a dim."""
    call.check_sum()
    dim, sizes, world = dims[0], call.sizes, call.world
    if sizes is not None and (len(set(sizes)) != 1 or len(sizes) != world or sizes[0] * world != shape[dim]):
        packed = call.pack(shape, dim, sizes)
        what = f"{list(sizes)} of dim {dim % len(shape)} to the ranks"
        sent = call.collective("reduce-scatter", what, call.nbytes(shape) * (world - 1) // world)
        return [packed, sent], routes.piece(shape, dim, sizes[call.rank])
    route = routes.scattered(shape, call.dtype, dim, world)
    sent = call.collective("reduce-scatter", f"{list(route.shape)} to every rank", route.wire_bytes)
    copies = call.flat(shape) if route.is_view else []
    return [*(copies or [call.pack(shape, dim)]), sent], route.shape


def split(shape: Ints, dims: Ints, call: Call) -> Steps:
    """This rank's piece of a dim."""
    start, end, _ = routes.piece_of(shape, dims[0], call.world, call.rank, call.sizes)
    piece = call.input(shape).narrow(dims[0], start, end - start)
    moved = 0 if piece.is_contiguous() else 2 * call.nbytes(tuple(piece.shape))
    return [call.local("split", f"{list(shape)} -> this rank's {list(piece.shape)}", moved)], tuple(piece.shape)


def rows(shape: Ints, dims: Ints, call: Call) -> Steps:
    """All-to-all along dim 0, by split sizes or evenly."""
    world, rank = call.world, call.rank
    route = routes.rows_exchanged(shape, call.dtype, world, rank, call.out_sizes, call.sizes)
    result = shape if route.shape is None else route.shape
    taken = call.out_sizes if call.out_sizes is not None else (shape[0] // world,) * world
    received = call.nbytes((sum(taken) - taken[rank], *shape[1:]))
    what = f"{list(shape)}, rows in rank order"
    if route.out_rows:
        what = f"rows {list(route.in_rows)} to the ranks, {list(route.out_rows)} from them"
    return [*call.flat(shape), call.collective("all-to-all", what, route.wire_bytes, received)], result


def all_to_all(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Cut the first of two dims, join the second."""
    if call.sizes is not None or call.out_sizes is not None:
        return _all_to_all_uneven(shape, dims[0], dims[1], call)
    route = routes.exchanged(shape, call.dtype, *dims, call.world)
    cut = list(routes.piece(shape, dims[0], shape[dims[0]] // call.world))
    sent = call.collective("all-to-all", f"{cut} to every rank", route.wire_bytes)
    return [call.pack(shape, dims[0]), sent, call.unpack(route.shape, dims[1])], route.shape


def _all_to_all_uneven(shape: Ints, scatter_dim: int, gather_dim: int, call: Call) -> Steps:
    world, rank, cut = call.world, call.rank, call.sizes
    if cut is None:
        routes.exchanged(shape, call.dtype, scatter_dim, gather_dim, world)  # refuses what does not divide
        cut = (shape[scatter_dim] // world,) * world
    Plan.along(shape, scatter_dim, world, cut)
    join = call.out_sizes if call.out_sizes is not None else (shape[gather_dim],) * world
    gather_dim, scatter_dim = _joined(shape, gather_dim, join, call), scatter_dim % len(shape)
    if scatter_dim == gather_dim:
        raise ArgumentError(f"plan: sizes need two different dims, not {scatter_dim} twice")
    mine = routes.piece(shape, scatter_dim, cut[rank])
    joined = routes.piece(mine, gather_dim, sum(join))
    kept = call.nbytes(mine)
    what = f"{list(cut)} of dim {scatter_dim} to the ranks, {list(join)} of dim {gather_dim} from them"
    moved = call.collective("all-to-all", what, call.nbytes(shape) - kept, call.nbytes(joined) - kept)
    return [call.pack(shape, scatter_dim, cut), moved, call.unpack(joined, gather_dim, join)], joined


def _joined(shape: Ints, dim: int, sizes: Ints, call: Call) -> int:
    try:
        return routes.joined(shape, dim, sizes, call.world, call.rank)
    except ShapeError as error:
        raise ShapeError(f"plan: {error} (told for rank {call.rank} of {call.world})") from None


def to_hidden(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Sequence-parallel to hidden-parallel; any leading dims are read as they lie."""
    flat = (math.prod(shape[:-1]), shape[-1])
    if call.stride is None:
        return all_to_all(flat, (1, 0), call)
    steps, _ = all_to_all(shape, (len(shape) - 1, 0), call)
    return steps, (flat[0] * call.world, flat[1] // call.world)


def to_sequence(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Hidden-parallel to sequence-parallel; where leading dims cannot be joined in place, flattening them copies."""
    flat = (math.prod(shape[:-1]), shape[-1])
    if call.stride is None:
        return all_to_all(flat, (0, 1), call)
    try:
        stride = call.input(shape).view(flat).stride()
    except RuntimeError:
        flattened = replace(call, world=1).pack(shape, 0)
        steps, found = all_to_all(flat, (0, 1), replace(call, stride=None))
        return [flattened, *steps], found
    return all_to_all(flat, (0, 1), replace(call, stride=stride))


def swapped(shape: Ints, dims: Ints, call: Call) -> Steps:
    """``exchange`` with dims and sizes swapped."""
    return all_to_all(shape, dims[::-1], _swapped(call))


def rows_back(shape: Ints, dims: Ints, call: Call) -> Steps:
    """``rows`` with the sizes swapped."""
    return rows(shape, dims, _swapped(call))


def _swapped(call: Call) -> Call:
    return replace(call, sizes=call.out_sizes, out_sizes=call.sizes)
