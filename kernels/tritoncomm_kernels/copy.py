"""pack and unpack: the address map between the rows of a tensor and a wire in rank order, in one pass.

Copies see integers of the widest access that both sides allow and never the dtype.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tritoncomm_kernels.address import (
    BY_VALUE,
    TABLE_RANKS,
    _copy_kernel,
    _copy_split_kernel,
    _copy_table_kernel,
    _wire_order_kernel,
)
from tritoncomm_kernels.config import Config
from tritoncomm_kernels.dtypes import checked_scale, scale_argument, wide_type
from tritoncomm_kernels.geometry import Geometry, Ints, geometry_of
from tritoncomm_kernels.launch import TRITON_TYPE, Launch, check_place, fits, tile_on, wire_order_tile
from tritoncomm_kernels.numerics import INTERPRETED
from tritoncomm_kernels.tables import EVICT_UNITS

__all__ = ["pack", "plain_copy", "unpack"]

WIRE_ORDER_CELLS = 2**30  # elements of a rank's block that one integer counts in the order of the wire
_INTEGERS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}


def pack(
    rows: Tensor,
    wire: Tensor,
    scale: float | None = None,
    *,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """Copy rows into rank order: ``wire[w, o, k] = rows[o, w*run + k] * scale``.

    Positions past the end of a row are written as zero. With equal dtypes and no scale the bits are unchanged;
    otherwise the arithmetic is fp32 (fp64 when either side is fp64) with one rounding at the store.

    Args:
        rows: ``[*outer, row]`` with up to three outer dims once neighbours are coalesced, any strides.
        wire: ``[world, outer, run]``, each ``[outer, run]`` contiguous, any stride between ranks; with ``sizes`` flat.
        scale: a factor; floating point tensors only.
        sizes: elements of a row per rank; rank w's block ``[outer, sizes[w]]`` starts at ``outer * sum(sizes[:w])``.
            Sizes for more than 16 ranks are copied to the device at the first call with them.
        config: the tile; ``config_for`` chooses by default.

    Returns:
        Bytes read plus bytes written.

    Raises:
        ValueError: the shapes do not describe one split.
        TooLargeError: a size or stride of 2**31 units or nearly that.
        TypeError: a cast or scale of a dtype that has no arithmetic here.

    Example:
        rows ``[[0, 1, 2, 3, 4]]``, world 2, run 3 give wire ``[[[0, 1, 2]], [[3, 4, 0]]]``.

    Traffic: reads ``rows`` once, writes ``wire`` once.
    """
    return _run("pack", rows, wire, scale, accumulate=False, sizes=sizes, config=config)


def unpack(
    wire: Tensor,
    rows: Tensor,
    scale: float | None = None,
    *,
    accumulate: bool = False,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """Copy back from rank order: ``rows[o, w*run + k] = wire[w, o, k] * scale``; ``accumulate`` adds to the rows.

    Padding on the wire is not read. Arguments, arithmetic and errors as in ``pack``.

    Returns:
        Bytes read plus bytes written.

    Traffic: reads the wire once, writes ``rows`` once (reads ``rows`` too when accumulating).
    """
    return _run("unpack", rows, wire, scale, accumulate, sizes, config)


def plain_copy(
    name: str, device: int, dtype: torch.dtype, alignment: int, shape: Ints, stride: Ints, world: int
) -> tuple[Launch | None, int]:
    """Prepare the launch of ``pack`` or ``unpack`` between rows and a contiguous wire of equal shards.

    Args:
        name: ``pack`` or ``unpack``.
        device: index of a CUDA device, -1 for CPU tensors in the interpreter.
        dtype: of both.
        alignment: the addresses of both, or-ed, modulo 16.
        shape, stride: of the rows.
        world: ranks, which divide a row.

    Returns:
        The launch, and the bytes that it reads plus writes. The launch is called with rows, wire and 1.0, for tensors
        of exactly this kind; it is None where there is nothing to copy, and for CPU tensors without the interpreter.
        Neither tensor may be a lazy conjugate or negative view.
    """
    if device < 0 and not INTERPRETED:
        return None, 0
    outer, run = math.prod(shape[:-1]), shape[-1] // world
    wire_shape, wire_stride = (world, outer, run), (outer * run, run, 1)
    # ``_plan`` is cached. The arguments are passed by position, as ``_run`` does, so that both find the same entry.
    sizes = config = None
    scaled = accumulates = False
    launch, nbytes, _ = _plan(
        name,
        device,
        dtype,
        dtype,
        alignment,
        shape,
        stride,
        wire_shape,
        wire_stride,
        sizes,
        scaled,
        accumulates,
        config,
    )
    return launch, nbytes


def _run(
    name: str,
    rows: Tensor,
    wire: Tensor,
    scale: float | None,
    accumulate: bool,
    sizes: Sequence[int] | None,
    config: Config | None,
) -> int:
    """Launch one call by its cached plan, and return the bytes read plus written; see ``pack``."""
    check_place(name, rows, wire)
    launch, moved, wide = _plan(
        name, rows.get_device(), rows.dtype, wire.dtype, (rows.data_ptr() | wire.data_ptr()) & 15, rows.shape,
        rows.stride(), wire.shape, wire.stride(), None if sizes is None else tuple(sizes), scale is not None,
        accumulate, config,
    )  # fmt: skip
    if launch is not None:
        factor = 1.0 if scale is None else scale_argument(checked_scale(name, scale, wide), wide)
        launch(rows, wire, factor)
    elif name == "pack" and moved:  # rows without elements: the wire is all padding
        wire.zero_()
    return moved


@lru_cache(maxsize=4096)
def _plan(
    name: str,
    device: int,
    rows_dtype: torch.dtype,
    wire_dtype: torch.dtype,
    alignment: int,
    shape: Ints,
    stride: Ints,
    wire_shape: Ints,
    wire_stride: Ints,
    sizes: Ints | None,
    scaled: bool,
    accumulates: bool,
    config: Config | None,
) -> tuple[Launch | None, int, torch.dtype | None]:
    """Prepare one kind of call: its launch (None with nothing to copy), the bytes it moves, its arithmetic type."""
    target = "wire" if name == "pack" else "rows"
    geo = geometry_of(name, shape, stride, wire_shape, wire_stride, sizes, target)
    ends = (rows_dtype, wire_dtype) if name == "pack" else (wire_dtype, rows_dtype)
    wide = wide_type(name, *ends, scaled, accumulates)
    # A pack writes all cells of the wire, as padding is zeroed; an unpack writes the elements of the rows, and reads
    # them too when it accumulates.
    valid = geo.outer * geo.row
    writes = geo.cells if name == "pack" else valid * (2 if accumulates else 1)
    nbytes = valid * ends[0].itemsize + writes * ends[1].itemsize
    if not valid:  # rows without elements may have padding on the wire: ``_run`` zeroes it without a kernel
        zeroed_bytes = geo.cells * wire_dtype.itemsize if name == "pack" else 0
        return None, zeroed_bytes, wide
    if len(geo.dims) > 3:
        raise ValueError(f"{name}: rows {tuple(shape)} with strides {stride} have more than three outer dims")
    launch = _launch(
        _CopyKind(name, device, (rows_dtype, wire_dtype), wide, scaled, accumulates), geo, alignment, config
    )
    return launch, nbytes, wide


class _CopyKind(NamedTuple):
    """A copy between rows and a wire.

    Attributes:
        dtypes: of the rows and of the wire.
        wide: type of the arithmetic, None where bits are copied.
    """

    name: str
    device: int
    dtypes: tuple[torch.dtype, torch.dtype]
    wide: torch.dtype | None
    scaled: bool
    accumulates: bool


def _launch(kind: _CopyKind, geo: Geometry, alignment: int, config: Config | None) -> Launch:
    """Choose the kernel and the tile of a copy, and return its launch."""
    name, (rows_dtype, wire_dtype) = kind.name, kind.dtypes
    types, vec, unit, scaling = _unit(geo, rows_dtype, wire_dtype, kind.wide, alignment)
    # ``starts`` and ``longest`` count units, not elements. ``longest`` is the longest piece of a row that tiles divide:
    # the row with its padding, or the largest shard.
    starts = None if geo.starts is None else _in_units(scaling, *geo.starts)
    longest = _in_units(scaling, geo.world * geo.run)[0] if starts is None else max(_lengths(starts))
    in_wire_order = config is None and _is_in_wire_order(name, geo, wire_dtype.itemsize, unit)
    if in_wire_order:
        tile = wire_order_tile(kind.device, unit)
    else:
        # Split sizes and strided rows make long addresses, for which ``tile_on`` takes fewer rows.
        addresses_are_long = geo.starts is not None or geo.stride_element != 1
        tile = config or tile_on(kind.device, name, unit, geo.outer, longest * unit, addresses_are_long)
    # ``tile.block_cols`` is bytes of the larger of the two types. A tile has at least one unit of each row.
    block_cols = max(tile.block_cols // max(types[0].itemsize, types[1].itemsize), vec)
    step = block_cols // vec  # units of a row in a tile
    if in_wire_order:
        shards = _wire_shards(geo, scaling, step)
    elif starts is None:
        shards = _equal_shards(geo, scaling, longest, step)
    else:
        shards = _given_shards(geo.outer, starts, step)
    kernel, tiles, inner, shard_constants, table = shards
    bands = 1 if in_wire_order else -(-geo.outer // tile.block_rows)  # tiles from the first row to the last
    # The integers stand in the order of the kernel's signature: those of the walk, then those of the shards.
    numbers, grid = (*_walk(geo, scaling), *inner), bands * tiles
    # The row is checked too: a kernel counts its columns even if the row is no argument.
    fits(name, (*numbers, grid, _in_units(scaling, geo.row)[0]))
    constants = shard_constants | dict(
        VEC=vec, OUTER_DIMS=len(geo.dims), STRIDED=geo.stride_element != 1, UNPACK=name == "unpack",
        WIDE=None if kind.wide is None else TRITON_TYPE[kind.wide], HAS_SCALE=kind.scaled, ACCUMULATE=kind.accumulates,
        EVICT_FIRST=tile.evict_first and unit in EVICT_UNITS, BLOCK_ROWS=tile.block_rows, BLOCK_COLS=block_cols,
    )  # fmt: skip
    return Launch(kernel, kind.device, grid, types, numbers, constants, tile.num_warps, table)


def _unit(
    geo: Geometry, rows_dtype: torch.dtype, wire_dtype: torch.dtype, wide: torch.dtype | None, alignment: int
) -> tuple[tuple[torch.dtype, torch.dtype], int, int, tuple[int, int]]:
    """Choose the unit of a copy, which is what one thread moves in one access.

    Returns:
        The element types of both pointers; the number of these elements in a unit; the bytes of a unit; and two
        numbers (a, b), such that n elements of the rows are n * a / b units.
    """
    # A stride of a dim of size 1 is never walked, so it does not narrow the unit.
    strides = [step for size, step in zip(geo.dims, geo.strides, strict=True) if size > 1]
    numbers = [*strides, geo.stride_rank, geo.run, geo.row, *(geo.starts or ())]
    # Neighbours in a strided row are no neighbours in memory: a unit is one element.
    if geo.stride_element != 1:
        numbers = [1]
    # Copies of bits see integers, at most 8 bytes each: a unit of 16 bytes is two of them. The unit divides the
    # addresses and every number, in bytes.
    if wide is None:
        size = rows_dtype.itemsize
        unit = math.gcd(alignment or 16, 16, *(n * size for n in numbers))
        element = min(unit, 8)
        integer = _INTEGERS[element]
        return (integer, integer), unit // element, unit, (size, unit)
    # Arithmetic keeps both types. If both addresses are multiples of 16, a unit may have 16 bytes of the smaller type.
    # Else it may have as many elements of the larger type as the alignment holds.
    small, large = sorted((rows_dtype.itemsize, wire_dtype.itemsize))
    aligned = math.gcd(alignment or 16, 16)
    most_elements = 16 // small if aligned == 16 else max(aligned // large, 1)
    vec = math.gcd(*numbers, most_elements)
    return (rows_dtype, wire_dtype), vec, vec * small, (1, vec)


def _in_units(scaling: tuple[int, int], *numbers: int) -> Ints:
    """Convert numbers of elements to units."""
    return tuple(n * scaling[0] // scaling[1] for n in numbers)


def _walk(geo: Geometry, scaling: tuple[int, int]) -> Ints:
    """Return the kernels' strides of three outer dims, sizes of the inner two, and stride inside a row."""
    strides = [step if size > 1 else 0 for size, step in zip(geo.dims, geo.strides, strict=True)]
    # The size of the outermost dim is not needed: its index is the last quotient.
    sizes = (*geo.dims, 1, 1)[1:3]
    # Absent outer dims have stride 0 and size 1.
    inside = 1 if geo.stride_element == 1 else _in_units(scaling, geo.stride_element)[0]
    return (*_in_units(scaling, *strides, 0, 0)[:3], *sizes, inside)


# Distribution of a row's tiles over the ranks: the kernel, the number of tiles, its integers after those of ``_walk``,
# its own compile-time arguments, its table on the device.
_Shards = tuple[Any, int, Ints, dict[str, Any], Ints | None]


def _equal_shards(geo: Geometry, scaling: tuple[int, int], cols: int, step: int) -> _Shards:
    """Return tiles of ``step`` units along the full row, padding on the wire included."""
    tiles = -(-cols // step)
    stride_rank, row, run = _in_units(scaling, geo.stride_rank, geo.row, geo.run)
    return _copy_kernel, tiles, (stride_rank, geo.outer, row, run, cols, tiles), {}, None


def _is_in_wire_order(name: str, geo: Geometry, itemsize: int, unit: int) -> bool:
    """Whether a pack follows the wire, and not the rows: where runs share the 32-byte sectors of the wire.

    The rows then have the sectors that two programs touch, and reading one twice costs less than writing it twice.
    Measured with 64 MiB and more on an H100, where it takes 0.53 to 0.97 of the time. It is slower for units of 16
    bytes in runs of 16 and 48, of 1 byte in runs of 129 and more, and of 2 bytes with two outer dims.
    """
    shortest = 24 if unit == 8 else 64
    return (
        name == "pack" and geo.starts is None and geo.stride_element == 1 and geo.outer > 1 and geo.world > 1
        and geo.run * itemsize % 32 != 0 and geo.run * itemsize >= shortest
        and (unit >= 8 or (unit >= 2 and len(geo.dims) == 1))
        and geo.outer * geo.run <= WIRE_ORDER_CELLS
    )  # fmt: skip


def _wire_shards(geo: Geometry, scaling: tuple[int, int], step: int) -> _Shards:
    """Return tiles of ``step`` units along the block of each rank, which has all of its rows."""
    stride_rank, flat, row, run = _in_units(scaling, geo.stride_rank, geo.outer * geo.run, geo.row, geo.run)
    return _wire_order_kernel, -(-flat // step) * geo.world, (stride_rank, flat, row, run, geo.world), {}, None


def _given_shards(outer: int, starts: Ints, step: int) -> _Shards:
    """Return tiles of ``step`` units of each shard, for up to BY_VALUE ranks as arguments, for more in a table."""
    # ``starts`` has the first unit of each rank and the end of the row; ``first`` the first tile of each rank and the
    # number of all tiles.
    lengths = _lengths(starts)
    first = tuple(accumulate((-(-length // step) for length in lengths), initial=0))
    world, row, tiles = len(lengths), starts[-1], first[-1]
    # The first rank is no argument: it starts at unit 0 with tile 0.
    if world <= BY_VALUE:
        absent = BY_VALUE - world  # ranks, which start where the row ends; the kernel has arguments for BY_VALUE ranks
        unit_starts = (*starts[1:-1], *[row] * absent)
        tile_starts = (*first[1:-1], *[tiles] * absent)
        constants = {"RANKS": BY_VALUE if world > BY_VALUE // 2 else BY_VALUE // 2}  # that the kernel looks at
        return _copy_split_kernel, tiles, (outer, row, tiles, *unit_starts, *tile_starts), constants, None
    steps = -(-world // TABLE_RANKS)
    # The kernel counts the ranks whose first tile is at most its own, in full steps: entries without a rank never
    # count.
    never = (2**31 - 1,) * (steps * TABLE_RANKS - world)
    table = (*first[:-1], *never, *starts)
    return _copy_table_kernel, tiles, (outer, tiles), {"STEPS": steps, "RANKS": TABLE_RANKS}, table


def _lengths(starts: Ints) -> Ints:
    """Return the distances of neighbouring starts: the length of each rank's shard."""
    return tuple(end - start for start, end in pairwise(starts))
