"""gather_segments, scatter_segments, copy_segments: rows of many tensors to, from and without one flat wire, at once.

Copies see bytes and never dtypes, so that tensors of any dtypes share the launch; each pair of dtypes that are cast is
a launch of its own. Sums of one dtype are part of the copies' launch.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from operator import or_
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from tritoncomm_kernels.config import LANES
from tritoncomm_kernels.device_table import addresses_on
from tritoncomm_kernels.dtypes import checked_scale, scale_argument
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, fits, stream_of
from tritoncomm_kernels.numerics import INTERPRETED
from tritoncomm_kernels.segment_kernel import BY_VALUE, _segments_kernel
from tritoncomm_kernels.segment_tiles import BLOCKS, Array, Work, divide, joined, wire_aligned
from tritoncomm_kernels.segments import (
    PADDING,
    CheckedSegments,
    Copies,
    Layouts,
    Segments,
    checked_copies,
    checked_segments,
    in_turns,
    layouts_of,
)  # fmt: skip

__all__ = ["SegmentCall", "copy_segments", "gather_segments", "scatter_segments"]

_BITS = (torch.int64, torch.int64, torch.int32, torch.int16, torch.int8)  # behind the units of 16 bytes to 1
_WARPS = 256 // LANES
_ALIGNMENTS = 16  # of the addresses that a SegmentCall keeps launches for
_CAST_UNITS, _SUM_UNITS = 512, 256  # of 16 bytes of the smaller type, or of one element, at a time


class _Arithmetic(NamedTuple):
    """Dtypes of a cast or a sum: of the tensors, in the wire, and of the arithmetic between."""

    rows: torch.dtype
    wire: torch.dtype
    wide: torch.dtype


_Kind = _Arithmetic | None  # None: bits are copied


def gather_segments(tensors: Sequence[Tensor], wire: Tensor, segments: Segments, *, scale: float | None = None) -> int:
    """Copy the table's rows of the tensors into the wire, scaled where there is a factor; zeros where it is padding.

    With equal dtypes and no scale the bits are unchanged; otherwise the arithmetic is fp32 (fp64 when either side is
    fp64) with one rounding at the store. Bytes of the wire that belong to no segment stay as they are.

    Args:
        tensors: the table's tensors in its order, any shapes and strides. Up to 16 addresses are arguments of the
            kernel; more are copied to the device when they change.
        wire: contiguous, of any dtype, ``segments.wire_bytes`` or longer.
        segments: the table. Its plan is made and copied to the device at the first call with it, for every layout and
            alignment of the tensors.
        scale: a factor; floating point tensors only.

    Returns:
        Bytes read plus bytes written.

    Raises:
        ValueError: the table does not fit the tensors or the wire, or has elements to be cast that are not aligned.
        TypeError: a cast or scale of a dtype that has no arithmetic here.

    Example:
        ``Segments([(0, 1, 2, 3, 8, 0)], [torch.int8])`` of ``arange(16)`` is the wire ``[1, 2, 3, 9, 10, 11]``.

    Traffic: reads every segment once, writes it once.
    """
    return _run("gather_segments", tensors, wire, segments, scale, accumulate=False, sums=False)


def scatter_segments(
    wire: Tensor,
    tensors: Sequence[Tensor],
    segments: Segments,
    *,
    scale: float | None = None,
    accumulate: bool = False,
    sums: bool = False,
) -> int:
    """Copy the table's rows back from the wire into the tensors; ``accumulate`` adds them to the tensors.

    Padding is not read. Arguments, arithmetic and errors as in ``gather_segments``; a table whose rows overlap in a
    tensor is refused, too. With ``sums`` several segments may have equal rows: they are added up in the order of the
    table, with one rounding. This is the adjoint of a gather that reads rows several times.

    Args:
        wire, tensors, segments, scale: as there.
        accumulate: add to the tensors' values.
        sums: add up segments that have tensor, offset, rows, row and stride in common.

    Returns:
        Bytes read plus bytes written.

    Example:
        With ``sums`` segments ``(0, 0, 1, 2, 2, 0)`` and ``(0, 0, 1, 2, 2, 8)`` of a float32 wire ``[1, 2, 3, 4]`` are
        ``[4, 6]``.

    Traffic: reads every segment once, writes its rows once (reads them in the tensors too when accumulating).
    """
    return _run("scatter_segments", tensors, wire, segments, scale, accumulate, sums)


def copy_segments(tensors: Sequence[Tensor], targets: Sequence[Tensor], copies: Copies) -> int:
    """Copy the table's rows of the tensors into the targets, cast where the dtypes differ; see ``Copies``.

    Arithmetic, launches and errors as in ``gather_segments``, without a wire between. Tensors and targets share no
    memory; addresses of up to 8 pairs are arguments of the kernel.

    Returns:
        Bytes read plus bytes written.

    Example:
        ``Copies([(0, 1, 2, 3, 8, 0)], [torch.int8])`` of ``arange(16)`` makes a target ``[1, 2, 3, 9, 10, 11]``.

    Traffic: reads every segment once, writes it once.
    """
    every = in_turns(tensors, targets)
    if not every:
        return 0
    # The last target stands in for the wire, which these copies do not have.
    return _run("copy_segments", every, every[-1], copies, scale=None, accumulate=False, sums=False)


class SegmentCall:
    """The launches of one table, for tensors and a wire whose layouts never change.

    A call asks for addresses only, and keeps launches for every alignment of them. The caller vouches that dtypes,
    shapes, strides and the device equal those of the first tensors.

    Args:
        name: ``gather_segments``, ``scatter_segments`` or ``copy_segments``.
        segments: the table.
        tensors: any tensors with the layouts; of ``copy_segments`` every tensor and its target.
        wire: any wire; of ``copy_segments`` the last target.
        accumulate: add to the tensors' values.
        sums: add up segments of the same rows.

    Raises:
        RuntimeError: neither a GPU nor Triton's interpreter. The first call raises the errors of the function.
    """

    def __init__(
        self,
        name: str,
        segments: Segments,
        tensors: Sequence[Tensor],
        wire: Tensor,
        accumulate: bool = False,
        sums: bool = False,
    ) -> None:
        if not wire.is_cuda and not INTERPRETED:
            raise RuntimeError(f"{name}: {wire.device} tensors need a GPU or TRITON_INTERPRET=1")
        self._layout = name, segments, layouts_of(wire, tensors)
        self._options = accumulate, sums
        self._launches: dict[tuple[int, tuple[int, ...] | None], list[tuple[Launch, torch.dtype | None]]] = {}
        self._copied = 0

    def __call__(self, tensors: Sequence[Tensor], wire: Tensor) -> int:
        """Launch on the current stream, and return the bytes read plus written.

        Args:
            tensors: the table's tensors, in its order.
            wire: contiguous.
        """
        addresses = tuple(map(Tensor.data_ptr, tensors))
        aligned = tuple([address & 15 for address in addresses])
        key = wire.data_ptr() & 15, aligned if any(aligned) else None
        launches = self._launches.get(key)
        if launches is None:
            if len(self._launches) >= _ALIGNMENTS:
                self._launches.clear()
            has_scale = False
            # By position, as in ``_run``, because calls share the cache of plans.
            launches, self._copied = _plan(*self._layout, key[1], key[0], has_scale, *self._options)
            self._launches[key] = launches
        listed, values = _arguments(addresses, wire)
        for launch, _ in launches:
            launch(wire, listed, 1.0, *values)
        return self._copied


def _run(
    name: str,
    tensors: Sequence[Tensor],
    wire: Tensor,
    segments: Segments,
    scale: float | None,
    accumulate: bool,
    sums: bool,
) -> int:
    """Launch one call by its cached plan, and return the bytes read plus written; see ``gather_segments``."""
    if not wire.is_cuda and not INTERPRETED:
        raise RuntimeError(f"{name}: {wire.device} tensors need a GPU or TRITON_INTERPRET=1")
    layouts, addresses = layouts_of(wire, tensors), tuple(map(Tensor.data_ptr, tensors))
    # Modulo 16 bytes, the widest access of a kernel; None if all are multiples.
    alignment = tuple([address & 15 for address in addresses]) if reduce(or_, addresses, 0) & 15 else None
    wire_alignment, has_scale = wire.data_ptr() & 15, scale is not None
    launches, copied = _plan(name, segments, layouts, alignment, wire_alignment, has_scale, accumulate, sums)
    address_list, address_values = _arguments(addresses, wire)
    for launch, wide in launches:
        factor = 1.0 if scale is None else scale_argument(checked_scale(name, scale, wide), wide)
        launch(wire, address_list, factor, *address_values)
    return copied


def _arguments(addresses: tuple[int, ...], wire: Tensor) -> tuple[Tensor, tuple[int, ...]]:
    """Return addresses as arguments of a launch: a list on the device (the wire where there is none), and by value."""
    if len(addresses) <= BY_VALUE:
        return wire, (*addresses, *(0,) * (BY_VALUE - len(addresses)))
    device = wire.get_device()
    return addresses_on(addresses, device).on(stream_of(device)), (0,) * BY_VALUE


@lru_cache(maxsize=128)  # each has a table on the device, of about a thousandth of what it copies
def _plan(
    name: str,
    segments: Segments,
    layouts: Layouts,
    alignment: tuple[int, ...] | None,
    wire_align: int,
    scaled: bool,
    accumulates: bool,
    sums: bool = False,
) -> tuple[list[tuple[Launch, torch.dtype | None]], int]:
    """Prepare one kind of call: launches with the type of their arithmetic, and the bytes read plus written.

    ``alignment`` has the tensors' addresses modulo 16, None if all are 0; ``wire_align`` is that of the wire.
    """
    dtypes = layouts.dtypes[1:]
    aligned = np.array(alignment or (0,) * len(dtypes), np.int64)
    # Tensors and targets take turns in ``layouts`` and ``alignment``, behind the wire's layout.
    if isinstance(segments, Copies):
        checked, dtypes = checked_copies(name, segments, layouts), dtypes[::2]
        aligned, aligned_wire = aligned[::2], aligned[1::2]
    else:
        checked = checked_segments(name, segments, layouts, scaled, accumulates, sums)
        aligned_wire = np.array([wire_align])
    call = _Call(name, segments, aligned, aligned_wire, layouts.devices[0], scaled, accumulates)
    # Each pair of dtypes that are cast is a launch of its own. Sums join the launch of their kind, or the copies'.
    copies, added = _by_kind(call, checked, dtypes)
    launches = []
    for kind, rows in copies.items():
        of_sums = kind if kind in added else None
        if kind is None and added:  # the launch of the copies takes sums that no launch of casts takes, or any
            without_casts = [each for each in added if each not in copies]
            of_sums = next(iter(without_casts or added))
        launches.append(_launch(call, kind, rows, of_sums, added.pop(of_sums, {})))
    # Sums that joined no launch have one without copies.
    launches += [_launch(call, kind=None, rows=[], of_sums=kind, added=rows) for kind, rows in added.items()]
    return launches, checked.copied


@dataclass(frozen=True)
class _Call:
    """Common data of all launches of one kind of call.

    Attributes:
        aligned: addresses of the tensors, modulo 16.
        wire_align: address of the wire, or those of the targets, modulo 16.
        device: index of the device.
        scaled: whether elements are multiplied by a scale.
        accumulates: whether elements are added to the target's.
    """

    name: str
    segments: Segments
    aligned: Array
    wire_align: Array
    device: int
    scaled: bool
    accumulates: bool

    @property
    def is_paired(self) -> bool:
        """Whether every tensor has a target of its own instead of a common wire."""
        return isinstance(self.segments, Copies)


def _by_kind(
    call: _Call, checked: CheckedSegments, dtypes: Sequence[torch.dtype]
) -> tuple[dict[_Kind, list[Any]], dict[_Kind, dict[int, list[Any]]]]:
    """Sort segments by their arithmetic: copies and casts, and sums by the number of their parts, too."""
    copies: dict[_Kind, list[Any]] = {}
    added: dict[_Kind, dict[int, list[Any]]] = {}
    for i, (segment, wide) in enumerate(zip(checked.targets, checked.wides, strict=True)):
        if segment.tensor == PADDING:
            if call.name.startswith("gather"):
                copies.setdefault(None, []).append(segment)
            continue
        tensor = segment.tensor
        kind = None if wide is None else _Arithmetic(dtypes[tensor], call.segments.dtypes[tensor], wide)
        parts = checked.parts.get(i)
        if parts is None:
            copies.setdefault(kind, []).append(segment)
        else:
            # A row of a sum is (tensor, offset, rows, row, stride), then (wire, wire_stride) of each part.
            row = (*segment[:5], *(number for part in parts for number in part))
            added.setdefault(kind, {}).setdefault(len(parts), []).append(row)
    return copies, added


def _launch(
    call: _Call, kind: _Kind, rows: list[Any], of_sums: _Kind, added: dict[int, list[Any]]
) -> tuple[Launch, torch.dtype | None]:
    """Return one launch and the type of its arithmetic, for copied or cast segments and for sums of one kind.

    Args:
        kind, rows: arithmetic of the segments that are copied or cast, and these.
        of_sums, added: arithmetic of the sums, and these by the number of their parts.
    """
    # A kind of unit is an index into VEC, BLOCK and the types below. Kinds of the copies or casts come first, kinds of
    # the sums from ``first`` on; kinds that no record has are cut off.
    works = [_work(call, kind, np.array(rows))] if rows else []
    accesses = _accesses(kind, _CAST_UNITS)[: works[0].kinds] if rows else []
    first = len(accesses)
    summed = [_work(call, of_sums, np.array(each)) for each in added.values()]
    if summed:
        accesses += _accesses(of_sums, _SUM_UNITS)[: max(work.kinds for work in summed)]
        works += summed
    # One launch has one table, and the programs of all its works.
    widest_kinds = [*([0] if rows else []), *([first] * len(summed))]
    table, words = joined(works, widest_kinds)
    programs = sum(work.programs for work in works)
    arithmetic = of_sums or kind  # casts and sums of one launch have the same
    wide = None if arithmetic is None else arithmetic.wide
    fits(call.name, (programs,))
    in_rows, in_wire, wides, vec, block = zip(*accesses, strict=True)
    constants = dict(
        LISTED=call.aligned.size * (1 + call.is_paired) > BY_VALUE, WIDTHS=len(accesses), SUMS=first, WORDS=words,
        STRIDED=any(work.strided for work in works), SCATTER=call.name.startswith("scatter"),
        PADDED=any(row[0] == PADDING for row in rows), ROWS=tuple(TRITON_TYPE[dtype] for dtype in in_rows),
        WIRE=tuple(TRITON_TYPE[dtype] for dtype in in_wire),
        WIDE=tuple(TRITON_TYPE[dtype] if dtype else None for dtype in wides),
        HAS_SCALE=call.scaled and wide is not None, ACCUMULATE=call.accumulates and wide is not None, VEC=vec,
        BLOCK=block, PAIRED=call.is_paired,
    )  # fmt: skip
    launch = Launch(
        _segments_kernel,
        call.device,
        programs,
        types=(torch.int64, torch.int64),
        arguments=(),
        constants=constants,
        num_warps=_WARPS,
        table=table,
    )
    return launch, wide


def _accesses(kind: _Kind, units: int) -> list[tuple[torch.dtype, torch.dtype, torch.dtype | None, int, int]]:
    """Return (rows type, wire type, wide type, VEC, BLOCK) of every kind of unit, the widest first."""
    if kind is None:
        return [(bits, bits, None, 2 if i == 0 else 1, BLOCKS[i]) for i, bits in enumerate(_BITS)]
    # Casts and sums have two kinds: units of 16 bytes of the smaller type, and single elements.
    widest = 16 // min(kind.rows.itemsize, kind.wire.itemsize)
    return [(kind.rows, kind.wire, kind.wide, vec, units) for vec in (widest, 1)]


def _work(call: _Call, kind: _Kind, rows: Array) -> Work:
    """Return the work of segments of one arithmetic with equally many parts, ``[n, 5 + 2*parts]``."""
    if kind is None:
        itemsizes, rows = None, _in_bytes(rows, call.segments)
    else:
        itemsizes = (kind.rows.itemsize, kind.wire.itemsize)
        _check_aligned(call, kind, rows)
    multiprocessors = 1
    if call.device >= 0:
        multiprocessors = torch.cuda.get_device_properties(call.device).multi_processor_count
    return divide(rows, itemsizes, call.aligned, call.wire_align, multiprocessors)


def _in_bytes(rows: Array, segments: Segments) -> Array:
    """Convert segments of any dtypes to segments of bytes."""
    itemsizes = np.array([*(dtype.itemsize for dtype in segments.dtypes), 1])[rows[:, 0]]  # the last one: padding
    # The columns are offset, row, stride and wire_stride; rows is a number of rows, and wire has bytes already.
    scaled = rows.copy()
    scaled[:, [1, 3, 4, 6]] *= itemsizes[:, None]
    return scaled


def _check_aligned(call: _Call, kind: _Arithmetic, rows: Array) -> None:
    """Reject casts of elements at addresses that are not aligned to their type."""
    wrong_in_wire = (rows[:, 5::2] + wire_aligned(call.wire_align, rows[:, 0])) % kind.wire.itemsize
    wrong_in_rows = call.aligned[rows[:, 0]] % kind.rows.itemsize
    if bool(wrong_in_wire.any()) or bool(wrong_in_rows.any()):
        raise ValueError(f"{call.name}: {kind.wire} in the wire cannot be cast where bytes are not aligned to it")
