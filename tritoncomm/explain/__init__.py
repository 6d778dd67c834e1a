"""Dry run of a mapping or a layer: steps, code paths, bytes, kernel tiles and predicted time.

The bytes equal the counts of ``record`` for the real call; times are predictions of ``cost``. In all modules ``op``
or ``short`` is the short name of a mapping, ``call`` describes one call on one rank, and no tensor has memory.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from tritoncomm_kernels import tables

from tritoncomm.core import cost
from tritoncomm.core.cost import DEFAULTS, Rates
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.explain import collectives as do
from tritoncomm.explain.collectives import Move
from tritoncomm.explain.layers import LAYERS, sum_over_wire
from tritoncomm.explain.steps import LayerArguments, Movement, PlannedCall
from tritoncomm.parsing import dtype_name

__all__ = ["LAYERS", "OPS", "Explanation", "LayerArguments", "Share", "cost", "explain"]

PROJECTED = (2, 4, 8, 16, 32, 64)
_MOST_RANKS, _MOST_BYTES = 2**20, 2**62
_SIZED = ("all_gather", "reduce_scatter", "split", "gather_sp", "reduce_scatter_sp")
_EXCHANGES = ("all_to_all", "all_to_all_dims")


@dataclass(frozen=True, slots=True)
class Share:
    """Projected seconds, forward and backward, at another number of ranks; None where the shape does not divide."""

    world: int
    local: float | None = None
    collective: float | None = None

    @property
    def share(self) -> float | None:
        """Local passes as a share of the total."""
        if self.local is None or self.collective is None:
            return None
        total = self.local + self.collective
        return self.local / total if total else 0.0


@dataclass(frozen=True, slots=True)
class Explanation:
    """A mapping or layer forward and backward, and the projected share of its local passes at other numbers of ranks.

    Attributes:
        backward: None where there is none, for the reason ``no_backward``.
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
    "sp2hp": ("all_to_all_sp2hp", (), do.to_hidden, do.to_sequence),
    "hp2sp": ("all_to_all_hp2sp", (), do.to_sequence, do.to_hidden),
    "all_to_all": ("all_to_all", (), do.rows, do.rows),
    "all_to_all_dims": ("all_to_all_dims", 2, do.all_to_all, do.all_to_all),
    "all_gather": ("all_gather_dim", 1, do.all_gather, do.reduce_scatter),
    "reduce_scatter": ("reduce_scatter_dim", 1, do.reduce_scatter, do.all_gather),
    "split": ("split_dim", 1, do.split, do.all_gather),
    "ag_last": ("all_gather_last_dim_from_tensor_parallel_region", (-1,), do.all_gather, do.reduce_scatter),
    "rs_last": ("reduce_scatter_last_dim_to_tensor_parallel_region", (-1,), do.reduce_scatter, do.all_gather),
    "gather_sp": ("gather_from_sequence_parallel_region", (0,), do.all_gather, do.reduce_scatter),
    "reduce_scatter_sp": ("reduce_scatter_to_sequence_parallel_region", (0,), do.reduce_scatter, do.all_gather),
    "scatter_sp": ("scatter_to_sequence_parallel_region", (0,), do.split, do.all_gather),
    "gather_tp": ("gather_from_tensor_model_parallel_region", (-1,), do.all_gather, do.split),
    "scatter_tp": ("scatter_to_tensor_model_parallel_region", (-1,), do.split, do.all_gather),
    "copy": ("copy_to_tensor_model_parallel_region", (), do.identity, do.all_reduce),
    "reduce": ("reduce_from_tensor_model_parallel_region", (), do.all_reduce, do.identity),
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
    overwrite: bool = False,
    *,
    sizes: Sequence[int] | None = None,
    out_sizes: Sequence[int] | None = None,
    rank: int = 0,
    stride: Sequence[int] | None = None,
    sm_count: int = 0,
    layer: LayerArguments = LayerArguments(),  # noqa: B008  (a tuple, never changed)
) -> Explanation:
    """Return the dry run of a mapping or a layer, forward and backward (of a contiguous gradient).

    What a layer computes itself, an attention or experts, is not in it. Of a dispatch and a combine without sizes the
    rows are those of random experts.

    Args:
        op: a short name of ``OPS`` or the mapping's own name; or a layer of ``LAYERS``, short or by its own name.
        shape, stride: of the input on this rank; contiguous by default. Of ``combine`` the shape of the result.
        dims: of the mappings that take some: one (0 by default), or scatter_dim and gather_dim of an all-to-all; of
            Ulysses and of ``conv_halo`` the dim of the positions.
        device: ``cpu``, ``cuda``, or the name of a GPU whose tuned table counts.
        rates: of the prediction; ``cost.DEFAULTS`` of the kind of device by default.
        overwrite: ``mappings.overwrite_inputs`` is on: ``reduce`` and the gradient of ``copy`` are summed in place.
        sizes: of a mapping along one dim its size on each rank; of an all-to-all the sizes to each rank; of Ulysses,
            ``by_heads`` and ``conv_halo`` the positions of each rank; of a dispatch and a combine the rows to each
            rank, those that stay included.
        out_sizes: of an all-to-all: sizes from each rank; of a dispatch and a combine rows from each rank.
        rank: rank to report on, which matters with sizes.
        sm_count: multiprocessors of the named GPU; by default those of the largest part of it that has a table.
        layer: heads, taps and experts of layers; the wire of a ``reduce_scatter``.
    """
    short, dims = _named(op, checked_ints(dims, "plan: dims"))
    shape = checked_ints(shape, "plan: a shape")
    world, rank, sm_count = checked_ints((world, rank, sm_count), "plan: world, rank and sm_count")
    sizes, out_sizes, stride = (
        None if numbers is None else checked_ints(numbers, "plan: sizes and strides")
        for numbers in (sizes, out_sizes, stride)
    )
    for value, kind in ((dtype, torch.dtype), (device, str), (rates, Rates | None)):
        if not isinstance(value, kind):
            raise ArgumentError(f"plan: expected {getattr(kind, '__name__', kind)}, not {value!r:.80}")
    if world < 1 or not shape or min(shape) < 0:
        raise ShapeError(f"plan: shape {list(shape)} over {world} ranks: sizes of 0 or more, one rank or more")
    _check_extent(shape, max(world, *PROJECTED), dtype, out_sizes or (), stride or ())
    _check_device(device, sm_count)
    kind = "cpu" if device == "cpu" else "cuda"
    name = None if device in ("cpu", "cuda") else device
    call = PlannedCall(
        dims, world, dtype, kind, name, rates or DEFAULTS[kind], overwrite, sm_count, rank, sizes, out_sizes, stride,
        layer,
    )  # fmt: skip
    _check(short, shape, call)
    forward, backward, why = _both(short, shape, call)
    worlds = PROJECTED if call.sizes is None and call.out_sizes is None else ()  # sizes are those of one world
    shares = tuple(_share(short, shape, replace(call, world=world_size, rank=0)) for world_size in worlds)
    return Explanation(_name_of(short), world, dtype, device, call.rates, forward, backward, why, shares)


def _name_of(short: str) -> str:
    """Return the name of the mapping or layer with this short name."""
    return LAYERS[short].name if short in LAYERS else OPS[short]


def _named(op: str, dims: Ints) -> tuple[str, Ints]:
    """Return the short name, and the dims that its mapping takes."""
    names = {**OPS, **{short: layer.name for short, layer in LAYERS.items()}}
    short = next((short for short, name in names.items() if op in (short, name)), None)
    if short is None:
        raise ArgumentError(f"plan: no mapping {op!r}; there are {', '.join(names)}")
    if short in LAYERS:
        default = LAYERS[short].positions
        max_dims = 0 if default is None else 1
        if len(dims) > max_dims:
            takes = "no dims" if default is None else "one dim, that of the positions"
            raise ArgumentError(f"plan: {names[short]} takes {takes}, not {list(dims)}")
        return short, dims or (() if default is None else (default,))
    if short == "all_to_all" and dims:
        short = "all_to_all_dims"
    _, takes, *_ = _TABLE[short]  # the dims of the mapping, or how many a caller gives
    if isinstance(takes, tuple):
        if dims:
            raise ArgumentError(f"plan: {OPS[short]} takes no dims, not {list(dims)}")
        return short, takes
    if takes == 1 and not dims:
        dims = (0,)
    if len(dims) != takes:
        raise ArgumentError(f"plan: {OPS[short]} takes {takes} dims, not {len(dims)}: {list(dims)}")
    return short, dims


def _check_extent(shape: Ints, world: int, dtype: torch.dtype, out_sizes: Sequence[int], stride: Sequence[int]) -> None:
    """Reject tensors that torch cannot hold, on any rank or gathered from all of them."""
    if world > _MOST_RANKS:
        raise ShapeError(f"plan: no job has more than {_MOST_RANKS} ranks")
    sizes = [max(size, 1) for size in shape]
    # The tensor gathered from all ranks; the result of an all-to-all, which has ``out_sizes`` in one of the dims.
    elements = max(math.prod(sizes) * world, math.prod(sizes) // min(sizes) * sum(out_sizes))
    reach = sum((size - 1) * step for size, step in zip(sizes, stride, strict=False))
    nbytes = max(elements, reach, *stride, 0) * dtype.itemsize
    if nbytes > _MOST_BYTES:
        raise ShapeError("plan: the tensors of such a call are larger than 4 EiB; is a size or a stride mistyped?")


def _check_device(device: str, sm_count: int) -> None:
    """Reject the name of an unknown GPU: the report would have the tiles and times of another one."""
    if device in ("cpu", "cuda"):
        return
    here = range(torch.cuda.device_count() if torch.cuda.is_available() else 0)
    if device in {torch.cuda.get_device_name(index) for index in here}:
        return
    if not device.isprintable() or len(device) > 100 or not tables.chosen(device, sm_count):
        raise ArgumentError(
            f"plan: nothing is known of a device {device[:100]!r}: no GPU here has this name, and no tuned table is "
            "for it (docs/tuning.md); give cuda, cpu or the name of such a GPU"
        )


def _check(short: str, shape: Ints, call: PlannedCall) -> None:
    """Reject arguments that the mapping does not take."""
    name = _name_of(short)
    if call.overwrite and short not in ("copy", "reduce"):
        raise ArgumentError(f"plan: only copy and reduce can overwrite, not {name}")
    if not 0 <= call.rank < call.world:
        raise ArgumentError(f"plan: rank {call.rank} is none of 0 to {call.world - 1}")
    _check_layer(short, call)
    if short in LAYERS:
        return
    if call.sizes is not None and short not in _SIZED + _EXCHANGES:
        raise ArgumentError(f"plan: {name} takes no sizes; {', '.join(_SIZED + _EXCHANGES)} do")
    if call.out_sizes is not None and short not in _EXCHANGES:
        raise ArgumentError(f"plan: {name} takes no sizes of what comes; {', '.join(_EXCHANGES)} do")
    if call.stride is not None and (len(call.stride) != len(shape) or min(call.stride) < 0):
        raise ShapeError(f"plan: strides {list(call.stride)} for shape {list(shape)}: one of 0 or more for every dim")


def _check_layer(short: str, call: PlannedCall) -> None:
    """Reject arguments of layers that this mapping or layer does not take."""
    of_experts = ("dispatch", "combine")
    takers = {
        "heads": ("ulysses", "by_heads"), "taps": ("conv_halo",), "topk": of_experts,
        "wire": ("reduce_scatter",), "by_nodes": ("reduce_scatter",),
    }  # fmt: skip
    for key, value in call.layer._asdict().items():
        if value and short not in takers[key]:
            raise ArgumentError(f"plan: {_name_of(short)} takes no {key}; {' and '.join(takers[key])} do")
    if call.layer.by_nodes and call.layer.wire is None:
        raise ArgumentError("plan: two levels need wire, the dtype that travels")
    if short in LAYERS and call.out_sizes is not None and short not in of_experts:
        raise ArgumentError(f"plan: {_name_of(short)} takes no sizes of what comes; {', '.join(_EXCHANGES)} do")
    if short in LAYERS and call.layer.heads and min(call.layer.heads) < 1:
        raise ArgumentError(f"plan: heads {list(call.layer.heads)} are 1 or more")


def _both(short: str, shape: Ints, call: PlannedCall) -> tuple[Movement, Movement | None, str]:
    """Return forward, backward, and why there is no backward."""
    if short in LAYERS:
        forward, backward = LAYERS[short].explained(shape, call)
        if not (call.dtype.is_floating_point or call.dtype.is_complex):
            return forward, None, f"{dtype_name(call.dtype)} has no gradients"
        return forward, backward, ""
    name, _, forth, back = _TABLE[short]
    forward = _movement(name, forth if call.layer.wire is None else sum_over_wire, shape, call)
    if not (call.dtype.is_floating_point or call.dtype.is_complex):
        return forward, None, f"{dtype_name(call.dtype)} has no gradients"
    adjoint = replace(call, stride=None)
    if short in _EXCHANGES:
        # An exchange is its own adjoint with both sides swapped.
        adjoint = replace(adjoint, dims=call.dims[::-1], sizes=call.out_sizes, out_sizes=call.sizes)
    try:
        backward = _movement(f"{name}.backward", back, forward.result, adjoint)
    except UnsupportedError as error:
        return forward, None, str(error)
    # The gradient has the shape of the input, also where that cannot be read from the adjoint's own plan.
    return forward, replace(backward, result=shape), ""


def _movement(name: str, move: Move, shape: Ints, call: PlannedCall) -> Movement:
    """Return one direction of a mapping; over one rank it has no step."""
    steps, result = ([], shape) if call.world == 1 else move(shape, call.dims, call)
    return Movement(name, shape, result, tuple(steps))


def _share(short: str, shape: Ints, call: PlannedCall) -> Share:
    """Return the predicted seconds of forward and backward over the ranks of ``call``."""
    try:
        forward, backward, _ = _both(short, shape, call)
    except (ShapeError, UnsupportedError):
        return Share(call.world)
    back = (0.0, 0.0) if backward is None else backward.seconds
    return Share(call.world, *(a + b for a, b in zip(forward.seconds, back, strict=True)))
