"""The steps of one direction of a mapping: local passes as ``ops`` would run them, and collectives."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple

import torch
from torch.distributed import ReduceOp
from tritoncomm_kernels.config import config_for, crossover_of, origin_of

from tritoncomm import record
from tritoncomm.core import backend, ops
from tritoncomm.core.cost import Rates, collective_seconds, pass_seconds
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.ops import SplitPass
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import Ints
from tritoncomm.core.split import Split, split_by
from tritoncomm.errors import UnsupportedError
from tritoncomm.parsing import dtype_name

__all__ = ["LayerArguments", "Movement", "PlannedCall", "Step"]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a mapping.

    Attributes:
        name: pack, unpack, copy, split, view, or the collective.
        path: view, torch or triton; ``backend`` for the collective.
        what: the shapes, in words.
        bytes_copied: bytes read plus written by a local pass.
        tile, origin: the kernel's tile and its source, empty without a kernel.
        misaligned: of an all-to-all over NCCL, the ranks whose block starts at no multiple of 16 bytes, sent or
            received. NCCL (2.28) copies such a block by single bytes, others by 16.
    """

    name: str
    path: record.CopyPath | Literal["backend"]
    what: str
    bytes_copied: int
    bytes_sent: int
    seconds: float
    tile: str = ""
    origin: str = ""
    misaligned: Ints = ()


@dataclass(frozen=True, slots=True)
class Movement:
    """All steps of one direction; ``shape`` becomes ``result`` on every rank."""

    name: str
    shape: Ints
    result: Ints
    steps: tuple[Step, ...]

    @property
    def path(self) -> record.CopyPath | Literal["backend"]:
        """Path as ``record`` counts it: of the first pass of blocks or rows that moves something, else of any step."""
        moving = [step for step in self.steps if step.bytes_copied]
        first = [step for step in moving if step.name in ("pack", "unpack", "gather", "sum")] + moving
        return first[0].path if first else "view"

    @property
    def passes(self) -> int:
        """Number of local passes over memory."""
        return sum(step.bytes_copied > 0 for step in self.steps)

    @property
    def bytes_copied(self) -> int:
        """Bytes read plus written by local passes."""
        return sum(step.bytes_copied for step in self.steps)

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank sends."""
        return sum(step.bytes_sent for step in self.steps)

    @property
    def seconds(self) -> tuple[float, float]:
        """Predicted seconds of the local passes, and of the collective."""
        local = sum(step.seconds for step in self.steps if step.path != "backend")
        return local, sum(step.seconds for step in self.steps) - local


class LayerArguments(NamedTuple):
    """Arguments of layers that no mapping of one tensor has.

    Attributes:
        heads: of each tensor of an exchange of heads; empty for as many as the shape has.
        taps: of a convolution.
        topk: experts of a token.
        wire: dtype in which the values of a sum travel; None for the tensor's own.
        by_nodes: whether a sum over a wire has two levels.
    """

    heads: Ints = ()
    taps: int = 0
    topk: int = 0
    wire: torch.dtype | None = None
    by_nodes: bool = False


@dataclass(frozen=True, slots=True)
class PlannedCall:
    """Description of one call on one rank, which all its steps share.

    Attributes:
        kind: of device, cpu or cuda.
        device_name, sm_count: the GPU whose tables count, if any, and its multiprocessors, 0 if unknown.
        overwrite: whether an all-reduce writes into its input.
        rank: rank to report on (matters only with split sizes).
        sizes: size of the (scattered) dim on each rank.
        out_sizes: of an all-to-all, the sizes from each rank.
        stride: of the input, None when it is contiguous.
        layer: further arguments of layers.
    """

    dims: Ints
    world: int
    dtype: torch.dtype
    kind: str
    device_name: str | None
    rates: Rates
    overwrite: bool
    sm_count: int = 0
    rank: int = 0
    sizes: Ints | None = None
    out_sizes: Ints | None = None
    stride: Ints | None = None
    layer: LayerArguments = LayerArguments()  # noqa: RUF009  (a tuple, never changed)

    def nbytes(self, shape: Ints) -> int:
        """Return the bytes of a tensor of that shape."""
        return math.prod(shape) * self.dtype.itemsize

    def input(self, shape: Ints) -> torch.Tensor:
        """Return the input without memory."""
        if self.stride is None:
            return torch.empty(shape, device="meta")
        return torch.empty_strided(shape, self.stride, device="meta")

    def path(self, op: str, nbytes: int, unit: int) -> record.CopyPath:
        """Return the path of a pack or unpack of so many bytes in that unit, as ``ops`` chooses it."""
        if (forced := ops.forced_path()) != "auto":
            return forced
        limits = crossover_of(op, self.device_name, self.sm_count)
        return "torch" if self.kind == "cpu" or (limits and nbytes < limits.by_unit[unit]) else "triton"

    def check_sum(self) -> None:
        """Reject a dtype that the backend cannot reduce, as ``backend.check_op`` does."""
        name = "gloo" if self.kind == "cpu" else "nccl"
        if problem := backend.refused(ReduceOp.SUM, self.dtype, name):
            raise UnsupportedError(f"plan: {name} cannot reduce {dtype_name(self.dtype)}: {problem}")

    def local(
        self, name: str, text: str, copied: int, path: record.CopyPath = "torch", tile: str = "", origin: str = ""
    ) -> Step:
        """Return a pass that reads and writes ``copied`` bytes; a view if none."""
        return Step(name, path if copied else "view", text, copied, 0, pass_seconds(copied, self.rates), tile, origin)

    def collective(self, name: str, text: str, bytes_sent: int, bytes_received: int = 0, misaligned: Ints = ()) -> Step:
        """Return a collective, which this rank enters with that many bytes."""
        seconds = collective_seconds(name, bytes_sent, self.world, self.rates, bytes_received)
        return Step(name, "backend", text, 0, bytes_sent, seconds, misaligned=misaligned)

    def misaligned(self, *counts: Ints) -> Ints:
        """Return the ranks whose block starts at no multiple of 16 bytes, in any buffer; none on CPUs.

        Args:
            counts: of a buffer, the elements of every rank's block.
        """
        ranks: set[int] = set()
        for blocks in counts if self.kind == "cuda" else ():
            ends = accumulate((count * self.dtype.itemsize for count in blocks), initial=0)
            ranks |= {
                rank for rank, (start, count) in enumerate(zip(ends, blocks, strict=False)) if count and start % 16
            }
        return tuple(sorted(ranks))

    def exchange(self, planned: Exchange, shapes: Sequence[Ints], text: str) -> list[Step]:
        """Return the steps of an exchange of tensors of these shapes: a pack, the all-to-all, an unpack."""
        unpacked = self.local("unpack", f"{list(planned.shapes[0])} is already in rank order (no copy)", 0)
        if planned.unpack is not None:
            unpacked = self.local_pass("unpack", planned.unpack, planned.shapes)
        return [self.local_pass("pack", planned.pack, shapes), self.all_to_all(planned, text), unpacked]

    def all_to_all(self, planned: Exchange, text: str) -> Step:
        """Return the all-to-all of an exchange, whose wire has the dtype of the call."""
        equal = (planned.pack.elements // self.world,) * self.world
        send, recv = planned.send_counts or equal, planned.recv_counts or equal
        bytes_received = (sum(recv) - recv[self.rank]) * self.dtype.itemsize
        return self.collective("all-to-all", text, planned.bytes_sent, bytes_received, self.misaligned(send, recv))

    def local_pass(self, name: Literal["pack", "unpack"], planned: Pass | SplitPass, shapes: Sequence[Ints]) -> Step:
        """Return the step of a pass between tensors of these shapes and the wire."""
        if isinstance(planned, SplitPass):
            return self._layout(name, planned.split, name == "pack" and planned.split.is_wire)
        ends = [" ".join(str(list(shape)) for shape in shapes), f"wire [{sum(map(math.prod, shapes))}]"]
        text = " -> ".join(ends if name == "pack" else ends[::-1])
        if name == "pack" and planned.is_in_order:
            return self.local(name, f"{ends[0]} is already in rank order (no copy)", 0)
        tensors = [torch.empty(shape, dtype=self.dtype, device="meta") for shape in shapes]
        copied = planned.packed_bytes(tensors) if name == "pack" else planned.unpacked_bytes(tensors)
        path = self.path("segments", self.nbytes(shapes[0]), self.dtype.itemsize)
        return self.local(name, text, copied, path)

    def flat(self, shape: Ints) -> list[Step]:
        """Return the copy that makes the input contiguous; nothing where it is."""
        if self.input(shape).is_contiguous():
            return []
        text = f"{list(shape)} with strides {list(self.stride or ())} made contiguous"
        return [self.local("copy", text, 2 * self.nbytes(shape))]

    def pack(self, shape: Ints, dim: int, sizes: Ints | None = None) -> Step:
        """Return the pack of the input, split along ``dim``, into rank order."""
        split = split_by(shape, self.input(shape).stride(), dim, self.world, sizes)
        return self._layout("pack", split, split.is_wire)

    def _layout(self, name: str, split: Split, is_wire: bool) -> Step:
        """Return the step of a pack or unpack of a tensor; nothing is copied if the tensor ``is_wire`` already."""
        shape, itemsize = split.shape, self.dtype.itemsize
        if is_wire:
            return self.local(name, f"{list(shape)} is already in rank order (no copy)", 0)
        wire_shape = [self.world, split.outer, split.run] if split.sizes is None else [split.outer * split.row]
        tensor, wire = f"{list(shape)} along dim {split.dim}", f"wire {wire_shape}"
        text = f"{tensor} -> {wire}" if name == "pack" else f"{wire} -> {tensor}"
        copied = 2 * self.nbytes(shape)
        walked = split.walked  # the split as a kernel walks it, by rows; None if none does
        if walked is None:
            return self._copied(name, text, copied)
        unit = split.unit(itemsize)
        path = self.path(name, self.nbytes(shape), unit)
        if path != "triton" or not copied:
            return self.local(name, text, copied, path)
        # A tile is a piece of what all ranks get of a row, padding included; with sizes, of what the largest shard has.
        cols = walked.run if walked.lengths is not None else walked.world * walked.run
        gpu = {"device_name": self.device_name, "sm_count": self.sm_count}
        tile = config_for(name, unit, walked.outer, cols * itemsize, **gpu)
        tile_text = f"{tile.block_rows} x {tile.block_cols} B, {tile.num_warps} warps, {unit} B per access"
        return self.local(name, text, copied, path, tile_text, origin_of(name, unit, self.device_name, self.sm_count))

    def _copied(self, name: str, text: str, copied: int) -> Step:
        """Return the step of a layout that no kernel reads: torch's copies, or an error if triton is forced."""
        if ops.forced_path() == "triton":
            raise UnsupportedError(f"plan: path triton is forced, but no kernel walks {text} with these strides")
        return self.local(name, f"{text}, one strided copy per rank", copied)
