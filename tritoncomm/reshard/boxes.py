"""Which tokens of a sequence every rank has: contiguous, zigzag and striped, of packed sequences each by itself."""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, ShapeError

__all__ = ["KINDS", "Runs", "bounds_of", "runs_of"]

KINDS = ("contiguous", "zigzag", "striped", "full")
_Array = NDArray[np.int64]


class Runs(NamedTuple):
    """Runs of tokens ``start, start + step, ...``; those of a rank in the order of its local tensor.

    Attributes:
        owner: the rank of every run, as an index; ascending.
        start, size: first token and number of tokens of every run.
        at: first token in the local tensor.
        local: tokens of every rank.
        step: of all runs.
    """

    owner: _Array
    start: _Array
    size: _Array
    at: _Array
    local: _Array
    step: int


def bounds_of(cu_seqlens: Any, name: str) -> Ints:
    """Where packed sequences begin and end, as ints.

    Args:
        cu_seqlens: ints, a tensor or an array of one dim; those of a GPU are read, which waits for it.
        name: of the function, for errors.

    Raises:
        ArgumentError: something else.
        ShapeError: they do not start at 0, or descend.
    """
    given = cu_seqlens
    if hasattr(given, "tolist"):
        try:
            given = given.tolist()
        except (RuntimeError, TypeError) as error:  # without data, or a subclass that hides it
            raise ArgumentError(f"{name}: cu_seqlens cannot be read: {error}") from error
    bounds = checked_ints(given, f"{name}: cu_seqlens")
    if not bounds or bounds[0]:
        raise ShapeError(f"{name}: cu_seqlens starts with 0, not as {list(bounds[:4])}")
    for index, (low, high) in enumerate(itertools.pairwise(bounds)):
        if high < low:
            raise ShapeError(f"{name}: cu_seqlens descends from {low} to {high} after sequence {index}")
    return bounds


def runs_of(kind: str, bounds: Sequence[int], world: int, name: str) -> Runs:
    """The tokens of every rank.

    Runs of a rank that go on where the one before ends are one.

    Args:
        kind: ``contiguous``, ``zigzag`` or ``striped``.
        bounds: of the packed sequences, checked by ``bounds_of``.
        world: number of ranks.
        name: of the function, for errors.

    Raises:
        ShapeError: zigzag, and a sequence is no multiple of ``2 * world`` tokens.
    """
    edges = np.array(bounds, np.int64)
    first, length = edges[:-1], np.diff(edges)
    rank = np.arange(world)[:, None]
    step = 1
    if kind == "contiguous":
        run = -(-length // world)
        low = np.minimum(rank * run, length)
        start, size = first + low, np.minimum(low + run, length) - low
    elif kind == "striped":
        step = world
        start, size = first + rank, np.maximum(0, -(-(length - rank) // world))
    else:
        uneven = np.nonzero(length % (2 * world))[0]
        if len(uneven):
            which = "the sequence" if len(length) == 1 else f"sequence {uneven[0]}"
            raise ShapeError(
                f"{name}: zigzag divides each sequence into {2 * world} chunks for {world} ranks, but {which} has "
                f"{length[uneven[0]]} tokens; pad it to a multiple of {2 * world}"
            )
        chunk = length // (2 * world)
        start = np.stack([first + rank * chunk, first + (2 * world - 1 - rank) * chunk], 2)
        size = np.broadcast_to(chunk[None, :, None], start.shape)
    owner = np.repeat(np.arange(world), start[0].size)
    return _merged(owner, start.reshape(-1), size.reshape(-1), world, step)


def _merged(owner: _Array, start: _Array, size: _Array, world: int, step: int) -> Runs:
    kept = size > 0
    owner, start, size = owner[kept], start[kept], size[kept]
    opens = np.ones(len(owner), bool)
    opens[1:] = (owner[1:] != owner[:-1]) | (start[1:] != (start + size * step)[:-1])
    firsts = np.nonzero(opens)[0]
    size = np.add.reduceat(size, firsts) if len(firsts) else size
    owner, start = owner[firsts], start[firsts]
    local = np.bincount(owner, size, world).astype(np.int64)
    at = np.cumsum(size) - size - (np.cumsum(local) - local)[owner]
    return Runs(owner, start, size, at, local, step)
