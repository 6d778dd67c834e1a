"""Calls of the kernels against their torch twins, in memory that shows what they touch besides."""

import math
from collections.abc import Callable

import naive
import torch
import tritoncomm_kernels as kernels
from bits import bits
from torch import Tensor
from tritoncomm_kernels import torch_path

__all__ = [
    "COPIED",
    "FLOATS",
    "SPLIT_SIZES",
    "assert_same_numbers",
    "canaries_live",
    "copies",
    "guarded",
    "in_every_way",
    "name_of",
]

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COPIED = (
    *FLOATS,
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.float8_e5m2),
)
SPLIT_SIZES = [
    *((3, 5, 1), (0, 9, 0), (8, 0, 8), (16, 16), (7,), (1,) * 8, (2, 0, 3) * 3, (0, 8) * 8),
    *((5, *(0,) * 9, 8, *(3, 0, 16) * 4), (0,) * 140 + (40,), (8,) * 17, (0,) * 16 + (24,), (9,) + (0,) * 299),
    *((3, 0, 5, 8), (16, 32, 0, 48), (0, 0, 7), (96,), (64, 1, 31), (1000, 24, 4096, 0, 8)),
    *(tuple(range(33)), (1,) * 64),
]
GUARD = 64  # elements
NAIVE_ELEMENTS = 1 << 13  # of rows that the definition copies too, one by one
POISON = {torch.bool: 1}


def name_of(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).rpartition(".")[2]


def memory(nbytes: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Bytes of one pattern."""
    return torch.full((nbytes,), POISON.get(dtype, 0x7F), dtype=torch.uint8, device=device)


def guarded(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> tuple[Tensor, Tensor]:
    """A poisoned tensor of ``shape`` inside a buffer with 16 canary bytes at either end."""
    size = math.prod(shape) * dtype.itemsize
    raw = memory(size + 32, dtype, torch.device(device))
    return raw[16 : 16 + size].view(dtype).view(shape), raw


def canaries_live(raw: Tensor) -> bool:
    return bool((raw[:16] == raw[0]).all() and (raw[-16:] == raw[0]).all() and raw[0] in (1, 0x7F))


def assert_same_numbers(a: Tensor, b: Tensor) -> None:
    """The same bits, where one NaN is as good as another."""
    assert a.dtype is b.dtype
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(bits(a.masked_fill(a.isnan(), 0)), bits(b.masked_fill(b.isnan(), 0)))


def in_every_way(call: Callable[..., int], *tensors: Tensor, nan: bool = False) -> list[Tensor]:
    """Run ``call(module, *tensors)`` by kernels, by torch and by definition: one result, the same bits in all memory.

    Returns the tensors of the kernels. With ``nan`` one NaN is as good as another.
    """
    results = []
    for module in (kernels, torch_path, naive):
        own = [naive.here(x) if module is naive else _copied(x) for x in tensors]
        results.append((call(module, *own), own))
    (moved, own), *others = results
    for other_moved, other in others:
        assert moved == other_moved
        for x, y in zip(own, other, strict=True):
            mine, theirs = (
                torch.empty(0, dtype=each.dtype).set_(naive.here(each).untyped_storage()) for each in (x, y)
            )
            if nan and x.is_floating_point():
                assert_same_numbers(mine, theirs)
            else:
                assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    return own


def _copied(x: Tensor) -> Tensor:
    """The tensor in a copy of its memory."""
    return torch.empty(0, dtype=x.dtype, device=x.device).set_(
        x.untyped_storage().clone(), x.storage_offset(), x.shape, x.stride()
    )


def copies(rows: Tensor, world: int, sizes: tuple[int, ...] | None = None, gap: int = 0) -> None:
    """pack of rows into a wire with ``gap`` between the ranks, and unpack into rows of the same strides.

    Kernels, torch and the definition write into memory of one pattern, which has to be equal afterwards, surroundings
    included.
    """
    row, dtype, itemsize = rows.shape[-1], rows.dtype, rows.dtype.itemsize
    outer, run = rows.numel() // row, -(-row // world)
    cells = outer * row if sizes is not None else world * outer * run + (world - 1) * gap
    results = []
    for module in (kernels, torch_path, *([naive] if rows.numel() <= NAIVE_ELEMENTS else [])):
        x = naive.here(rows) if module is naive else rows
        packed = memory((cells + 2 * GUARD) * itemsize, dtype, x.device)
        wire = packed.view(dtype)[GUARD : GUARD + cells]
        if sizes is None:
            wire = wire.as_strided((world, outer, run), (outer * run + gap, run, 1))
        bytes_packed = module.pack(x, wire, sizes=sizes)
        unpacked = memory(x.untyped_storage().nbytes(), dtype, x.device)
        back = unpacked.view(dtype).as_strided(x.shape, x.stride(), x.storage_offset())
        bytes_unpacked = module.unpack(wire, back, sizes=sizes)
        assert torch.equal(bits(back), bits(x)), module
        results.append((packed.cpu(), unpacked.cpu(), bytes_packed, bytes_unpacked))
    (packed, unpacked, *counts), *others = results
    for other_packed, other_unpacked, *other_counts in others:
        assert torch.equal(packed, other_packed)
        assert torch.equal(unpacked, other_unpacked)
        assert counts == other_counts
