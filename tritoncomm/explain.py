"""What a mapping would do, told without doing it: steps, paths, bytes, tiles, and a predicted time.

The bytes are those that `record` counts for the real call with a contiguous input; times are predictions of `cost`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from tritoncomm import steps
from tritoncomm.arguments import dtype_name
from tritoncomm.cost import DEFAULTS, Rates
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.plan import Ints
from tritoncomm.steps import Call, Move, Movement

__all__ = ["OPS", "Explanation", "Share", "explain"]

PROJECTED = (2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class Share:
    """Projected seconds, forward and backward, at another number of ranks; None where the shape does not divide."""

    world: int
    local: float | None
    collective: float | None

    @property
    def share(self) -> float | None:
        """Local passes as a share of the whole."""
        if self.local is None or self.collective is None:
            return None
        whole = self.local + self.collective
        return self.local / whole if whole else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A mapping forward and backward, and what the share of its local passes would be at other numbers of ranks.

    Attributes:
        backward: None where there is none.
        no_backward: why not.
    """

    op: str
    world: int
    dtype: torch.dtype
    device: str
    rates: Rates
    forward: Movement
    backward: Movement | None
    no_backward: str
    projection: tuple[Share, ...]


# Short name: the mapping's name, its dims (a number: how many the caller gives), forward, backward.
_TABLE: dict[str, tuple[str, Ints | int, Move, Move]] = {
    "sp2hp": ("all_to_all_sp2hp", (), steps.to_hidden, steps.to_sequence),
    "hp2sp": ("all_to_all_hp2sp", (), steps.to_sequence, steps.to_hidden),
    "all_to_all": ("all_to_all", (), steps.rows, steps.rows),
    "all_to_all_dims": ("all_to_all_dims", 2, steps.exchange, steps.swapped),
    "all_gather": ("all_gather_dim", 1, steps.gather, steps.scatter_reduce),
    "reduce_scatter": ("reduce_scatter_dim", 1, steps.scatter_reduce, steps.gather),
    "split": ("split_dim", 1, steps.split, steps.gather),
    "ag_last": ("all_gather_last_dim_from_tensor_parallel_region", (-1,), steps.gather, steps.scatter_reduce),
    "rs_last": ("reduce_scatter_last_dim_to_tensor_parallel_region", (-1,), steps.scatter_reduce, steps.gather),
    "gather_sp": ("gather_from_sequence_parallel_region", (0,), steps.gather, steps.scatter_reduce),
    "reduce_scatter_sp": ("reduce_scatter_to_sequence_parallel_region", (0,), steps.scatter_reduce, steps.gather),
    "scatter_sp": ("scatter_to_sequence_parallel_region", (0,), steps.split, steps.gather),
    "gather_tp": ("gather_from_tensor_model_parallel_region", (-1,), steps.gather, steps.split),
    "scatter_tp": ("scatter_to_tensor_model_parallel_region", (-1,), steps.split, steps.gather),
    "copy": ("copy_to_tensor_model_parallel_region", (), steps.identity, steps.all_reduce),
    "reduce": ("reduce_from_tensor_model_parallel_region", (), steps.all_reduce, steps.identity),
}
OPS = {short: row[0] for short, row in _TABLE.items()}


def explain(
    op: str,
    shape: Sequence[int],
    world: int,
    dtype: torch.dtype = torch.bfloat16,
    dims: Sequence[int] = (),
    device: str = "cuda",
    rates: Rates | None = None,
    held: bool = False,
) -> Explanation:
    """Tell what a mapping does with a contiguous tensor, forward and backward, without doing it.

    Args:
        op: a short name of ``OPS`` or the mapping's own name.
        shape: of the input on this rank.
        world: number of ranks.
        dtype: of the input.
        dims: of the mappings that take some: one (0 by default), or scatter_dim and gather_dim of an all-to-all.
        device: ``cpu``, ``cuda``, or the name of a GPU whose tuned table counts.
        rates: of the prediction; ``cost.DEFAULTS`` of the kind of device by default.
        held: the caller keeps the input (``reduce``) or the gradient (``copy``), so it is not reduced in place.

    Raises:
        ArgumentError: no such mapping, or dims where it takes none.
        ShapeError: the shape does not divide, or has no such dim.
        UnsupportedError: a reduction of a dtype that the backend cannot reduce.
    """
    short, dims = _named(op, tuple(dims))
    if world < 1 or not shape or min(shape) < 0:
        raise ShapeError(f"plan: shape {list(shape)} over {world} ranks: sizes of 0 or more, one rank or more")
    kind = "cpu" if device == "cpu" else "cuda"
    name = None if device in ("cpu", "cuda") else device
    call = Call(dims, world, dtype, kind, name, rates or DEFAULTS[kind], held)
    forward, backward, why = _both(short, tuple(shape), call)
    shares = tuple(_share(short, tuple(shape), replace(call, world=other)) for other in PROJECTED)
    return Explanation(OPS[short], world, dtype, device, call.rates, forward, backward, why, shares)


def _named(op: str, dims: Ints) -> tuple[str, Ints]:
    """The short name, and the dims that its mapping takes."""
    short = next((short for short, name in OPS.items() if op in (short, name)), None)
    if short is None:
        raise ArgumentError(f"plan: no mapping {op!r}; there are {', '.join(OPS)}")
    if short == "all_to_all" and dims:
        short = "all_to_all_dims"
    takes = _TABLE[short][1]
    if isinstance(takes, tuple):
        if dims:
            raise ArgumentError(f"plan: {OPS[short]} takes no dims, not {list(dims)}")
        return short, takes
    if takes == 1 and not dims:
        dims = (0,)
    if len(dims) != takes:
        raise ArgumentError(f"plan: {OPS[short]} takes {takes} dims, not {len(dims)}: {list(dims)}")
    return short, dims


def _both(short: str, shape: Ints, call: Call) -> tuple[Movement, Movement | None, str]:
    """Forward, backward, and why there is no backward."""
    name, _, forth, back = _TABLE[short]
    steps, result = ([], shape) if call.world == 1 else forth(shape, call.dims, call)
    forward = Movement(name, shape, result, tuple(steps))
    if not (call.dtype.is_floating_point or call.dtype.is_complex):
        return forward, None, f"{dtype_name(call.dtype)} has no gradients"
    try:
        returned, _ = ([], shape) if call.world == 1 else back(result, call.dims, call)
    except UnsupportedError as error:
        return forward, None, str(error)
    return forward, Movement(f"{name}.backward", result, shape, tuple(returned)), ""


def _share(short: str, shape: Ints, call: Call) -> Share:
    try:
        forward, backward, _ = _both(short, shape, call)
    except ShapeError:
        return Share(call.world, None, None)
    back = (0.0, 0.0) if backward is None else backward.seconds
    return Share(call.world, *(a + b for a, b in zip(forward.seconds, back, strict=True)))
