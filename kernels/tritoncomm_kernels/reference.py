"""pack, unpack and reduce in plain torch: the path for CPU tensors, and what the kernels are compared with."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from tritoncomm_kernels.config import Config
from tritoncomm_kernels.geometry import geometry_of
from tritoncomm_kernels.numerics import checked_scale, wide_type
from tritoncomm_kernels.reduce import check_parts

__all__ = ["pack", "reduce", "unpack"]


def pack(
    rows: Tensor,
    wire: Tensor,
    scale: float | None = None,
    *,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """``wire[w, o, k] = rows[o, w*run + k] * scale``, zeros past the end of a row; see ``tritoncomm_kernels.pack``."""
    cut = _checked("pack", rows, wire, scale, sizes, "wire")
    wide = wide_type("pack", rows.dtype, wire.dtype, scale is not None)
    for block, piece in _pieces(rows, wire, cut):
        if piece.shape[-1] < block.shape[-1]:
            block[..., piece.shape[-1] :].zero_()
            block = block[..., : piece.shape[-1]]
        _put(block, piece, scale, wide)
    return rows.nbytes + wire.nbytes


def unpack(
    wire: Tensor,
    rows: Tensor,
    scale: float | None = None,
    *,
    accumulate: bool = False,
    sizes: Sequence[int] | None = None,
    config: Config | None = None,
) -> int:
    """``rows[o, w*run + k] = wire[w, o, k] * scale``, added when accumulating; see ``tritoncomm_kernels.unpack``."""
    cut = _checked("unpack", rows, wire, scale, sizes, "rows")
    wide = wide_type("unpack", wire.dtype, rows.dtype, scale is not None, accumulate)
    for block, piece in _pieces(rows, wire, cut):
        _put(piece, block[..., : piece.shape[-1]], scale, wide, accumulate)
    return rows.numel() * wire.element_size() + rows.nbytes * (2 if accumulate else 1)


def reduce(wire: Tensor, out: Tensor, scale: float | None = None, *, config: Config | None = None) -> int:
    """``out[k] = (wire[0, k] + wire[1, k] + ...) * scale``, summed in rank order; see ``tritoncomm_kernels.reduce``."""
    check_parts(wire.shape, wire.stride(), out.shape, out.stride())
    if wire.is_complex() and wire.dtype is out.dtype and scale is None:
        wire, out = torch.view_as_real(wire).flatten(1), torch.view_as_real(out).flatten()
    wide = wide_type("reduce", wire.dtype, out.dtype, scale is not None, True)
    assert wide is not None
    total = wire[0].to(wide, copy=True)
    for part in wire[1:]:
        total += part
    if scale is not None:
        total *= checked_scale("reduce", scale, wide)
    out.copy_(_narrowed(total, out.dtype))
    return wire.nbytes + out.nbytes


def _checked(
    name: str, rows: Tensor, wire: Tensor, scale: float | None, sizes: Sequence[int] | None, target: str
) -> tuple[int, ...] | None:
    cut = None if sizes is None else tuple(sizes)
    geometry_of(name, rows.shape, rows.stride(), wire.shape, wire.stride(), cut, target)
    if scale is not None:
        checked_scale(name, scale, torch.float64)
    return cut


def _pieces(rows: Tensor, wire: Tensor, sizes: tuple[int, ...] | None) -> Iterator[tuple[Tensor, Tensor]]:
    """Blocks of the wire, shaped as the rows are, and the part of the rows each holds; one pair for an even cut."""
    lead, row = rows.shape[:-1], rows.shape[-1]
    if sizes is None:
        world, _, run = wire.shape
        blocks = wire.view(world, *lead, run) if wire.is_contiguous() else wire.unflatten(1, lead or (1,))
        if world * run == row:
            pieces = rows.unflatten(-1, (world, run)).movedim(-2, 0)
            yield blocks.view(pieces.shape) if not lead else blocks, pieces
            return
        for w in range(world):
            start = min(w * run, row)
            yield blocks[w].view(*lead, run), rows[..., start : min(start + run, row)]
        return
    outer, start = rows.numel() // row if row else 0, 0
    for size in sizes:
        block = wire[outer * start : outer * (start + size)].view(*lead, size)
        yield block, rows[..., start : start + size]
        start += size


def _put(target: Tensor, source: Tensor, scale: float | None, wide: torch.dtype | None, add: bool = False) -> None:
    """One strided copy, with the arithmetic of the kernels on the way."""
    if scale is None and not add:
        target.copy_(source if wide is None else _narrowed(source, target.dtype))
        return
    assert wide is not None
    value = source.to(wide)
    if scale is not None:
        value = value * checked_scale("scale", scale, wide)
    if add:
        value = target.to(wide) + value
    target.copy_(_narrowed(value, target.dtype))


def _narrowed(x: Tensor, dtype: torch.dtype) -> Tensor:
    """fp64 reaches 16 bits through fp32."""
    return x.float() if x.dtype is torch.float64 and dtype.itemsize == 2 else x
