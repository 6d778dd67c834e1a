"""What every movement checks before the first byte is sent; errors name function, dim, size, world and rank."""

from functools import lru_cache

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import ShapeError
from tritoncomm.plan import Ints, Plan

__all__ = ["even", "flat", "indivisible", "piece", "sized"]


def indivisible(name: str, shape: Ints, dim: int, size: int, group: ProcessGroup) -> ShapeError:
    return ShapeError(
        f"{name}: dim {dim} of size {size} does not divide over {group.size()} ranks "
        f"(rank {group.rank()}, shape {tuple(shape)})"
    )


@lru_cache(maxsize=8192)
def _even_plan(shape: Ints, dim: int, world: int) -> Plan | None:
    plan = Plan.along(shape, dim, world)
    return plan if plan.even else None


def even(shape: Ints, dim: int, world: int, name: str, group: ProcessGroup) -> Plan:
    try:
        plan = _even_plan(shape, dim, world)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error} (rank {group.rank()} of {world})") from None
    if plan is None:
        raise indivisible(name, shape, dim, shape[dim], group)
    return plan


def sized(shape: Ints, dim: int, world: int, sizes: Ints, name: str, group: ProcessGroup) -> Plan:
    try:
        return Plan.along(shape, dim, world, sizes)
    except ShapeError as error:
        raise ShapeError(f"{name}: {error} (rank {group.rank()}, shape {tuple(shape)})") from None


def flat(x: Tensor) -> tuple[Tensor, int]:
    """x contiguous, and the bytes moved for it."""
    if x.is_neg() or x.is_conj():
        return x.resolve_conj().resolve_neg().contiguous(), 2 * x.nbytes
    return (x, 0) if x.is_contiguous() else (x.contiguous(), 2 * x.nbytes)


def piece(shape: Ints, dim: int, size: int) -> Ints:
    dim %= len(shape)
    return (*shape[:dim], size, *shape[dim + 1 :])
