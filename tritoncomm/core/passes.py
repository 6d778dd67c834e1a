"""Passes over memory between the tensors of a call and its wire: a view, one launch of a kernel, or copies by torch.

A planner lists the blocks of the tensors and their places in the wire; only this module chooses how they are copied.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from math import prod
from typing import Literal, NamedTuple

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from torch.autograd import profiler
from tritoncomm_kernels import PADDING, Segments, in_turns, torch_path
from tritoncomm_kernels.dtypes import checked_scale, wide_type

from tritoncomm import record, variables
from tritoncomm.core.blocks import Block, check_cover, table_of
from tritoncomm.core.memory import contiguous_stride, empty, has_wrapper
from tritoncomm.core.ops import PassResult, Results, has_lazy, path_for, reduce
from tritoncomm.core.plan import Ints

__all__ = ["Pass", "TablePass", "WrittenBox", "takes_kernel", "whole_tensors"]

_IN_ORDER = 4  # `torch.sum` adds up to 4 terms sequentially, more pairwise
_CHECKED = 64  # blocks of a pass that are always compared with its wire
_BUFFERS = 16  # a pass by torch with a scale needs a buffer, of so large a part of a block
_KernelName = Literal["gather_segments", "scatter_segments", "copy_segments"]
_ARITHMETIC = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class WrittenBox(NamedTuple):
    """A box of a tensor, and its parts of the wire, which are summed if there are several.

    Attributes:
        stack: all parts as one box with a first dim of the parts, where torch adds them up in order; else None.
    """

    block: Block
    parts: tuple[Block, ...]
    stack: Block | None


class Pass:
    """Blocks of tensors and their places in one wire: packed by one pass over memory, unpacked by another.

    Args:
        blocks: no two of one pass share bytes of the wire, and together they have all of them, where it has one dtype.
            Their order decides the order of sums.
        dtypes: of every tensor's elements in the wire.
        elements: size of the wire in elements of ``dtypes[0]``.
        sums: an unpack adds up blocks of the same elements, and the indices of a first dim of stride 0, in order, with
            one rounding.

    Raises:
        ArgumentError: blocks of one dtype that overlap in the wire, leave a part of it, or lie outside; of up to 64
            blocks, in check mode of any number.
    """

    def __init__(
        self, blocks: Sequence[Block], dtypes: Sequence[torch.dtype], elements: int, *, sums: bool = False
    ) -> None:
        self.blocks = tuple([block for block in blocks if 0 not in block.size])
        self.dtypes, self.elements, self.sums = tuple(dtypes), elements, sums
        is_thorough = variables.CHECK.value or variables.HASH.value
        if elements and (is_thorough or len(self.blocks) <= _CHECKED) and len(set(self.dtypes)) == 1:
            check_cover(self.blocks, elements, self.dtypes[0].itemsize, *([elements] if is_thorough else []))

    @cached_property
    def table(self) -> Segments | None:
        """The blocks as the table of a kernel; None if it would have too many segments."""
        blocks = self.blocks
        if self.sums:  # parts of a sum are segments of their own
            blocks = [block.at(i, self._itemsize(block)) for block in blocks for i in range(block.size[0])]
        return table_of(blocks, self.dtypes)

    @cached_property
    def is_in_order(self) -> bool:
        """Whether the wire has one tensor's elements in the order of its memory, so that it can be a view."""
        return len(self.dtypes) == 1 and all(
            block.offset * self._itemsize(block) == block.wire_byte
            and all(size == 1 or a == b for size, a, b in zip(block.size, block.stride, block.wire_stride, strict=True))
            for block in self.blocks
        )

    @cached_property
    def parts(self) -> int:
        """Number of parts, as many as a kernel sums, if an unpack adds up a whole wire into one flat tensor; else 0."""
        if not self.sums or len(self.blocks) != 1:
            return 0
        ((_, size, stride, offset, wire, wire_stride),) = self.blocks
        is_flat = len(size) == 2 and (stride, offset, wire, wire_stride) == ((0, 1), 0, 0, (size[1], 1))
        return size[0] if is_flat and size[0] <= kernels.MAX_PARTS else 0

    @cached_property
    def joined(self) -> tuple[Ints, int] | None:
        """Shape of the wire and dim along which one ``torch.cat`` of all blocks fills it; None if none does."""
        first = self.blocks[0] if self.blocks else None
        if first is None or any(b.tensor == PADDING or b.wire_stride != first.wire_stride for b in self.blocks):
            return None
        for dim in range(len(first.size)):
            shape = (*first.size[:dim], sum(block.size[dim] for block in self.blocks), *first.size[dim + 1 :])
            dense = tuple([prod(shape[i + 1 :]) for i in range(len(shape))])
            if dense != first.wire_stride or prod(shape) != self.elements:
                continue
            start, fits = 0, True
            for block in self.blocks:
                others = (*block.size[:dim], *block.size[dim + 1 :])
                fits = fits and block.wire_byte == start and others == (*shape[:dim], *shape[dim + 1 :])
                start += block.size[dim] * dense[dim] * self._itemsize(block)
            if fits:
                return shape, dim
        return None

    def _itemsize(self, block: Block) -> int:
        """Return the bytes of an element of a block in the wire; 1 of padding."""
        return 1 if block.tensor == PADDING else self.dtypes[block.tensor].itemsize

    @cached_property
    def targets(self) -> list[WrittenBox]:
        """Boxes that an unpack by torch writes, in the order of the blocks."""
        # By the box of the tensor, which is a block without its place in the wire: the boxes of the wire that are added
        # up there, and the one block that has them all as its first dim, if there is one.
        targets: dict[Block, list[Block]] = {}
        stacks: dict[Block, Block] = {}
        for block in self.blocks:
            if block.tensor == PADDING:
                continue
            parts, count = [block], 1
            if self.sums and not block.stride[0]:  # each index of the first dim lies in the same box
                count = block.size[0]
                parts = [block.at(i, self._itemsize(block)) for i in range(count)]
            for part in parts:
                targets.setdefault(part._replace(wire_byte=0, wire_stride=()), []).append(part)
            if 1 < count <= _IN_ORDER:  # more would be added up in another order by ``torch.sum``
                stacks[parts[0]._replace(wire_byte=0, wire_stride=())] = block
        return [
            WrittenBox(
                target,
                tuple(parts),
                stacks[target] if target in stacks and len(parts) == stacks[target].size[0] else None,
            )
            for target, parts in targets.items()
        ]

    def pack(
        self,
        tensors: Sequence[Tensor],
        wire: Tensor | None = None,
        scale: float | None = None,
        slots: list[Tensor] | None = None,
    ) -> PassResult:
        """Bring the blocks of the tensors into the wire, with a cast to its dtypes.

        Args:
            wire: contiguous buffer to fill; by default a new one, or a view of the tensor that is in order already.
            scale: factor applied before the one rounding.
            slots: views of the wire, one for each of ``whole_tensors``, where the caller has them.
        """
        # The profiler's range ends with this function, as the name does.
        _range = profiler._is_profiler_enabled and record.profiler_range("pack")
        first = tensors[0]
        if scale is not None:
            checked_scale("pack", scale, torch.float64)  # its type alone: ``put`` checks it for the wide type
        is_lazy = has_lazy(tensors)
        is_plain = wire is None and scale is None and first.dtype is self.dtypes[0]
        if is_plain and not is_lazy and self.is_in_order and first.numel() == self.elements:
            # As memory, not by ``view(-1)``: a transposed tensor with one index per rank is in order, yet not
            # contiguous.
            return PassResult(first.as_strided((self.elements,), (1,)), "view", 0)
        path = path_for(first, "segments")
        if path == "torch" and is_plain and self.joined is not None:
            views = []
            for block in self.blocks:
                x = tensors[block.tensor]
                # Without an offset a view as the tensor starts is enough.
                views.append(block.view(x) if block.offset else x.as_strided(block.size, block.stride))
            wire = torch.cat(views, self.joined[1])
            return PassResult(wire.view(-1), path, 2 * wire.nbytes)
        if wire is None:
            wire = empty(first, (self.elements,), (1,), self.dtypes[0])
        # A table reads memory as it is; torch reads the values of tensors with lazy bits, and of wrappers.
        if path == "torch" or is_lazy or has_wrapper(tensors) or self.table is None:
            return PassResult(wire, "torch", self._pack_blocks(tensors, wire, scale, slots))
        return PassResult(wire, path, kernels.gather_segments(tensors, wire, self.table, scale=scale))

    def unpack(
        self, wire: Tensor, tensors: Sequence[Tensor], scale: float | None = None, accumulate: bool = False
    ) -> PassResult:
        """Bring the blocks of the wire into the tensors, with a cast to their dtypes: the inverse of ``pack``.

        Args:
            scale: factor applied before the one rounding.
            accumulate: add to the tensors instead of overwriting them.
        """
        if self.parts and not accumulate:  # the wire is that many dense tensors, which are added up
            return reduce(wire.view(self.parts, -1), scale=scale, out=tensors[0])
        _range = profiler._is_profiler_enabled and record.profiler_range("unpack")
        path = path_for(wire, "segments")
        has_kernel = not self.sums or all(dtype in _ARITHMETIC for dtype in self.dtypes)
        if path == "torch" or not has_kernel or has_lazy(tensors) or has_wrapper(tensors) or self.table is None:
            return PassResult(tensors[0], "torch", self._unpack_blocks(wire, tensors, scale, accumulate))
        options = {"scale": scale, "accumulate": accumulate, "sums": self.sums}
        return PassResult(tensors[0], path, kernels.scatter_segments(wire, tensors, self.table, **options))

    def results(self, wire: Tensor, shapes: Sequence[Ints]) -> Results:
        """Unpack the wire into new contiguous tensors of these shapes and the wire's dtype."""
        outs = []
        for shape in shapes:
            outs.append(empty(wire, shape, contiguous_stride(shape), wire.dtype))
        _, path, copied = self.unpack(wire, outs)
        return Results(outs, path, copied)

    def _pack_blocks(
        self, tensors: Sequence[Tensor], wire: Tensor, scale: float | None, slots: list[Tensor] | None
    ) -> int:
        """Pack block by block, by torch; return the bytes copied."""
        if slots is not None:
            torch._foreach_copy_(slots, list(tensors))  # pyright: ignore[reportPrivateImportUsage]
            return 2 * sum([slot.nbytes for slot in slots])
        copied, sources, places = 0, [], []
        for block in self.blocks:
            dtype = torch.uint8 if block.tensor == PADDING else self.dtypes[block.tensor]
            typed = wire if wire.dtype is dtype else _typed(wire, dtype)
            start = typed.storage_offset() + block.wire_byte // dtype.itemsize
            place = typed.as_strided(block.size, block.wire_stride, start)
            copied += place.nbytes
            if block.tensor == PADDING:
                place.zero_()
                continue
            x = tensors[block.tensor]
            x = block.view(x) if block.offset else x.as_strided(block.size, block.stride)
            copied += x.nbytes
            wide = wide_type("pack", x.dtype, dtype, scale is not None)
            if scale is not None or (wide is torch.float64 and dtype.itemsize == 2):  # through fp32, as kernels round
                # In pieces, so that the copies of the wide type stay small.
                for part, source in zip(place.chunk(_BUFFERS), x.chunk(_BUFFERS), strict=True):
                    torch_path.put(part, [source], scale, wide)
            else:
                sources.append(x)
                places.append(place)
        if sources:
            torch._foreach_copy_(places, sources)  # pyright: ignore[reportPrivateImportUsage]
        return copied

    def _unpack_blocks(self, wire: Tensor, tensors: Sequence[Tensor], scale: float | None, accumulate: bool) -> int:
        """Unpack block by block, by torch; return the bytes copied."""
        copied = 0
        for block, parts, stack in self.targets:
            x, dtype = tensors[block.tensor], self.dtypes[block.tensor]
            typed = wire if wire.dtype is dtype else _typed(wire, dtype)
            # What ``view`` does, without the call where there is no offset.
            x = block.view(x) if block.offset else x.as_strided(block.size, block.stride)
            is_plain = x.dtype is dtype and scale is None and not accumulate
            if is_plain and len(parts) == 1:
                start = typed.storage_offset() + parts[0].wire_byte // dtype.itemsize
                x.copy_(typed.as_strided(block.size, parts[0].wire_stride, start))
            elif is_plain and stack is not None:  # all parts are one box of the wire, one behind the other
                torch.sum(stack.in_wire(typed), 0, dtype=dtype, out=x)
            else:
                wide = dtype  # complex numbers are added as they are
                if not dtype.is_complex:
                    wide = wide_type("unpack", dtype, x.dtype, scale is not None, summed=True)
                torch_path.put(x, [part.in_wire(typed) for part in parts], scale, wide, accumulate)
            copied += prod(block.size) * (len(parts) * dtype.itemsize + x.itemsize * (2 if accumulate else 1))
        return copied

    def packed_bytes(self, tensors: Sequence[Tensor]) -> int:
        """Return the bytes that a pack of these tensors reads plus writes where it is no view."""
        copied = 0
        for block in self.blocks:
            itemsize = 0 if block.tensor == PADDING else tensors[block.tensor].itemsize
            copied += prod(block.size) * (self._itemsize(block) + itemsize)
        return copied

    def unpacked_bytes(self, tensors: Sequence[Tensor], accumulate: bool = False) -> int:
        """Return the bytes that an unpack into these tensors reads plus writes."""
        copied = 0
        for block, parts, _ in self.targets:
            itemsize = tensors[block.tensor].itemsize * (2 if accumulate else 1)
            copied += prod(block.size) * (len(parts) * self.dtypes[block.tensor].itemsize + itemsize)
        return copied


class TablePass:
    """A pass by a table of any length, always for tensors of one layout: its launches are prepared once.

    They stay here instead of in the kernels' cache: the plan of a large model has more passes than that cache has
    entries (128).

    Args:
        table: of segments; of copies between tensors, ``Copies``.
        used: indices of the table's tensors among those of a call, as a launch takes the addresses of its tensors.
        sums: an unpack adds up segments of the same rows.
    """

    def __init__(self, table: Segments, used: Ints, *, sums: bool = False) -> None:
        self.table, self.used, self.sums = table, used, sums
        self._launches: dict[tuple[str, bool], kernels.SegmentCall] = {}

    def pack(self, tensors: Sequence[Tensor], wire: Tensor) -> PassResult:
        """Bring the rows of the tensors into the wire."""
        _range = profiler._is_profiler_enabled and record.profiler_range("pack")
        rows = [tensors[i] for i in self.used]
        if takes_kernel(wire):
            return PassResult(wire, "triton", self._launch("gather_segments", rows, wire))
        return PassResult(wire, "torch", torch_path.gather_segments(rows, wire, self.table))

    def unpack(self, wire: Tensor, tensors: Sequence[Tensor], accumulate: bool = False) -> PassResult:
        """Bring the rows of the wire into the tensors, or add them to the tensors."""
        _range = profiler._is_profiler_enabled and record.profiler_range("unpack")
        rows = [tensors[i] for i in self.used]
        if takes_kernel(wire):
            return PassResult(rows[0], "triton", self._launch("scatter_segments", rows, wire, accumulate))
        options = {"accumulate": accumulate, "sums": self.sums}
        return PassResult(rows[0], "torch", torch_path.scatter_segments(wire, rows, self.table, **options))

    def copy(self, tensors: Sequence[Tensor], targets: Sequence[Tensor]) -> PassResult:
        """Copy the rows of the tensors into the targets by the kernel; a caller without one copies blocks by torch."""
        _range = profiler._is_profiler_enabled and record.profiler_range("copy_segments")
        pairs = in_turns([tensors[i] for i in self.used], [targets[i] for i in self.used])
        return PassResult(pairs[-1], "triton", self._launch("copy_segments", pairs, pairs[-1]))

    def _launch(self, name: _KernelName, rows: list[Tensor], wire: Tensor, accumulate: bool = False) -> int:
        """Launch the kernels, which the first call prepares; return the bytes copied."""
        launches = self._launches.get((name, accumulate))
        if launches is None:
            launches = kernels.SegmentCall(name, self.table, rows, wire, accumulate, self.sums)
            self._launches[name, accumulate] = launches
        return launches(rows, wire)


def takes_kernel(x: Tensor) -> bool:
    """Whether a table of segments is copied by a kernel; ``x`` is a tensor of the pass or its wire."""
    return path_for(x, "segments") == "triton"


@lru_cache(maxsize=1024)
def whole_tensors(layouts: tuple[tuple[Ints, torch.dtype, Ints], ...], starts: Ints) -> Pass:
    """Return the pass of whole tensors, each contiguous in a wire of bytes.

    Args:
        layouts: shape, dtype and strides of every tensor.
        starts: byte offset of each tensor in the wire.
    """
    blocks = [
        Block(i, shape, stride, 0, start, contiguous_stride(shape))
        for i, ((shape, _, stride), start) in enumerate(zip(layouts, starts, strict=True))
    ]
    return Pass(blocks, [dtype for _, dtype, _ in layouts], 0)


def _typed(wire: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the wire as elements of ``dtype``, as many as it has whole ones."""
    if wire.dtype is dtype:
        return wire
    flat = wire.view(-1).view(torch.uint8)
    return flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
