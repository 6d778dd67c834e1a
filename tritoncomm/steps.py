"""The steps of every movement, told from shapes: what `engine` would do with a contiguous tensor."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch.distributed import ReduceOp
from tritoncomm_kernels.config import config_for, crossover_bytes, origin_of

from tritoncomm import c10d, ops, routes
from tritoncomm.arguments import dtype_name
from tritoncomm.cost import Rates, collective_seconds, pass_seconds
from tritoncomm.errors import UnsupportedError
from tritoncomm.plan import Ints, Plan

__all__ = [
    "Call",
    "Move",
    "Movement",
    "Step",
    "all_reduce",
    "exchange",
    "gather",
    "identity",
    "rows",
    "scatter_reduce",
    "split",
    "swapped",
    "to_hidden",
    "to_sequence",
]


@dataclass(frozen=True, slots=True)
class Step:
    """One thing that happens to the tensor.

    Attributes:
        name: pack, unpack, copy, split, view, or the collective.
        path: view, torch or triton; ``backend`` for the collective.
        what: the shapes, in words.
        packed: bytes read plus written by a local pass.
        wire: bytes that this rank sends.
        seconds: predicted.
        tile: the kernel's tile, empty without a kernel.
        origin: where the tile came from.
    """

    name: str
    path: str
    what: str
    packed: int
    wire: int
    seconds: float
    tile: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Movement:
    """All steps of one direction; ``shape`` becomes ``result`` on every rank."""

    name: str
    shape: Ints
    result: Ints
    steps: tuple[Step, ...]

    @property
    def path(self) -> str:
        """As `record` counts it: the first local path that moves something, else view."""
        return next((step.path for step in self.steps if step.packed), "view")

    @property
    def passes(self) -> int:
        """Local passes over memory."""
        return sum(step.packed > 0 for step in self.steps)

    @property
    def packed(self) -> int:
        """Bytes read plus written by local passes."""
        return sum(step.packed for step in self.steps)

    @property
    def wire(self) -> int:
        """Bytes that this rank sends."""
        return sum(step.wire for step in self.steps)

    @property
    def seconds(self) -> tuple[float, float]:
        """Predicted: local passes, collective."""
        local = sum(step.seconds for step in self.steps if step.path != "backend")
        return local, sum(step.seconds for step in self.steps) - local


@dataclass(frozen=True, slots=True)
class Call:
    """What all steps of a call share."""

    dims: Ints
    world: int
    dtype: torch.dtype
    kind: str  # of device: cpu or cuda
    device_name: str | None
    rates: Rates
    held: bool

    def nbytes(self, shape: Ints) -> int:
        """Bytes of a tensor of that shape."""
        return math.prod(shape) * self.dtype.itemsize

    def path(self, op: str, nbytes: int) -> str:
        """The path of a pack or unpack of so many bytes, as `ops` chooses it."""
        if ops.forced_path() != "auto":
            return ops.forced_path()
        if self.kind == "cpu" or nbytes < crossover_bytes(op, self.device_name):
            return "torch"
        return "triton"

    def check_sum(self) -> None:
        """Refuse to reduce what the backend cannot, as `c10d` does."""
        backend = "gloo" if self.kind == "cpu" else "nccl"
        if problem := c10d.refused(ReduceOp.SUM, self.dtype, backend):
            raise UnsupportedError(f"plan: {backend} cannot reduce {dtype_name(self.dtype)}: {problem}")

    def local(self, name: str, what: str, moved: int, path: str = "torch", tile: str = "", origin: str = "") -> Step:
        """A pass that reads and writes ``moved`` bytes; a view if none."""
        return Step(name, path if moved else "view", what, moved, 0, pass_seconds(moved, self.rates), tile, origin)

    def collective(self, name: str, what: str, wire: int) -> Step:
        """A collective in which this rank sends ``wire`` bytes."""
        return Step(name, "backend", what, 0, wire, collective_seconds(name, wire, self.world, self.rates))


Steps = tuple[list[Step], Ints]
Move = Callable[[Ints, Ints, Call], Steps]


def _layout(call: Call, name: str, shape: Ints, dim: int) -> Step:
    """pack or unpack of the tensor ``shape`` cut along ``dim``; nothing where the tensor is the wire."""
    plan, dim = Plan.along(shape, dim, call.world), dim % len(shape)
    wire = f"[{call.world}, {plan.outer}, {plan.run}]"
    what = f"{list(shape)} along dim {dim} -> wire {wire}"
    if name == "unpack":
        what = f"wire {wire} -> {list(shape)} along dim {dim}"
    if plan.outer == 1:
        return call.local(name, f"{list(shape)} is the wire as it lies", 0)
    path, moved = call.path(name, call.nbytes(shape)), 2 * call.nbytes(shape)
    if path != "triton" or not moved:
        return call.local(name, what, moved, path)
    size = call.dtype.itemsize
    unit = math.gcd(16, size * plan.row, size * plan.run)
    tile = config_for(name, unit, plan.outer, plan.world * plan.run * size, device_name=call.device_name)
    told = f"{tile.block_rows} x {tile.block_cols} B, {tile.num_warps} warps, {unit} B per access"
    return call.local(name, what, moved, path, told, origin_of(name, unit, call.device_name))


def identity(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Nothing happens."""
    return [], shape


def all_reduce(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Reduce over the ranks, in place unless the tensor is held."""
    call.check_sum()
    size = call.nbytes(shape)
    where = "the tensor is held elsewhere: into a copy" if call.held else "nothing else holds the tensor: in place"
    copy = call.local("copy", where, 2 * size if call.held else 0)
    return [copy, call.collective("all-reduce", f"{list(shape)}", 2 * size * (call.world - 1) // call.world)], shape


def gather(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Join a dim from the ranks."""
    route = routes.gathered(shape, call.dtype, dims[0], call.world)
    sent = call.collective("all-gather", f"{list(shape)} from every rank", route.wire_bytes)
    return [sent, _layout(call, "unpack", route.shape, dims[0])], route.shape


def scatter_reduce(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Reduce over the ranks, keep this rank's piece of a dim."""
    call.check_sum()
    route = routes.scattered(shape, call.dtype, dims[0], call.world)
    sent = call.collective("reduce-scatter", f"{list(route.shape)} to every rank", route.wire_bytes)
    return [_layout(call, "pack", shape, dims[0]), sent], route.shape


def split(shape: Ints, dims: Ints, call: Call) -> Steps:
    """This rank's piece of a dim."""
    start, end, _ = routes.piece_of(shape, dims[0], call.world, 0, None)
    piece = routes.piece(shape, dims[0], end - start)
    is_view = Plan.along(shape, dims[0], call.world).outer == 1
    moved = 0 if is_view else 2 * call.nbytes(piece)
    return [call.local("split", f"{list(shape)} -> this rank's {list(piece)}", moved)], piece


def rows(shape: Ints, dims: Ints, call: Call) -> Steps:
    """All-to-all along dim 0."""
    route = routes.rows_exchanged(shape, call.dtype, call.world, 0, None, None)
    return [call.collective("all-to-all", f"{list(shape)}, rows in rank order", route.wire_bytes)], shape


def exchange(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Cut the first of two dims, join the second."""
    route = routes.exchanged(shape, call.dtype, *dims, call.world)
    cut = list(routes.piece(shape, dims[0], shape[dims[0]] // call.world))
    sent = call.collective("all-to-all", f"{cut} to every rank", route.wire_bytes)
    return [_layout(call, "pack", shape, dims[0]), sent, _layout(call, "unpack", route.shape, dims[1])], route.shape


def to_hidden(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Sequence-parallel to hidden-parallel, leading dims flattened."""
    flat = (math.prod(shape[:-1]), shape[-1])
    return exchange(flat, (1, 0), call)


def to_sequence(shape: Ints, dims: Ints, call: Call) -> Steps:
    """Hidden-parallel to sequence-parallel, leading dims flattened."""
    flat = (math.prod(shape[:-1]), shape[-1])
    return exchange(flat, (0, 1), call)


def swapped(shape: Ints, dims: Ints, call: Call) -> Steps:
    """``exchange`` with the dims swapped."""
    return exchange(shape, dims[::-1], call)
