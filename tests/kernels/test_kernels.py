"""The kernels on every device, against their definition and torch's path, bit for bit."""

import inspect
import itertools
import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from devices import Device
from kernel_cases import COPIED, FLOATS, SPLIT_SIZES, assert_same_numbers, copies, guarded, in_every_way, name_of
from torch import Tensor
from triton.runtime import interpreter
from tritoncomm_kernels import copy, torch_path
from tritoncomm_kernels.address import _wire_order_kernel
from tritoncomm_kernels.reduction import _plan as _reduce_plan

from tritoncomm.tune.machine_code import compiled_kernels

SHAPES = [(4, 144, 2), (3, 200, 4), (5, 12, 3), (2, 9, 4), (1, 13, 2), (2, 1, 4), (3, 8, 1)]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, 6e-8, 1.00390625, 1.01171875, 3.4e38, 65504.0]
SPECIAL += [1e-40, -1e-40, 65520.0, 1e308, 1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 2.0**-24 * 1.5, -1.00390625]
N = 0  # as many rows as the device is worth
# Storage, and the rows in it.
LAYOUTS: dict[str, tuple[tuple[int, ...], Callable[[Tensor], Tensor]]] = {
    "contiguous": ((N, 96), lambda x: x),
    "one-row": ((480,), lambda x: x),
    "columns-of-a-wider-tensor": ((N, 160), lambda x: x[:, 32:128]),
    "odd-offset": ((N, 101), lambda x: x[:, 5:]),
    "two-outer-dims": ((4, N, 96), lambda x: x.transpose(0, 1)),
    "three-outer-dims": ((2, 5, 3, 2, 120), lambda x: x.permute(2, 0, 3, 1, 4)[..., 0, :96]),
    "every-second-row": ((2, N, 6, 16), lambda x: x[:, :, ::2]),
    "every-second-element": ((N, 192), lambda x: x[:, ::2]),
    "odd-columns-of-three-outer-dims": ((4, 5, N, 16), lambda x: x[:, 1:3, :, 3:11]),
}
slow_on_cpu = [pytest.param(dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.uint8, torch.complex64)]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", COPIED, ids=name_of)
def test_dtypes_and_layouts(device: Device, dtype: torch.dtype, layout: str) -> None:
    shape, view = LAYOUTS[layout]
    shape = tuple(size or device.pick(3, 61) for size in shape)
    for world in device.pick((4,), (2, 4, 7, 64)):
        copies(view(random_bits(shape, dtype, world, device.at)), world)


@pytest.mark.parametrize(
    "sizes",
    [pytest.param(sizes, marks=[pytest.mark.slow] * (len(sizes) in (33, 64))) for sizes in SPLIT_SIZES],
    ids=lambda sizes: f"{len(sizes)}-ranks-{sizes[0]}-{max(sizes)}",
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.int64, marks=pytest.mark.slow), *slow_on_cpu], ids=name_of
)
def test_split_sizes(device: Device, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    copies(random_bits((3, sum(sizes)), dtype, 0, device.at), len(sizes), sizes)
    copies(random_bits((2, 3, sum(sizes) + 8), dtype, 1, device.at).transpose(0, 1)[..., 8:], len(sizes), sizes)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float32, torch.float64], ids=name_of)
def test_access_widths(device: Device, dtype: torch.dtype) -> None:
    """Runs and offsets that leave 16, 8, 4, 2 and 1 bytes to an access."""
    for run in device.pick((16, 24, 20, 18, 17, 1), (16, 64, 24, 20, 18, 17, 3, 2, 1, 513, 4096 + 8)):
        for shift in device.pick((0, 1), (0, 1, 2, 4, 8)):
            copies(random_bits((5, 4 * run + shift), dtype, run, device.at)[:, shift:], 4)


def test_eviction_changes_no_bit(device: Device) -> None:
    """With equal shards, split sizes by value and in a table, in the units that may have it and in others."""
    config = kernels.Config(4, 256, evict_first=True)
    for world, sizes in ((4, None), (3, (16, 0, 24)), (20, (8,) * 20)):
        for shift in (0, 4, 2):  # elements: units of 16, 8 and 4 bytes
            row = sum(sizes) if sizes else 64
            rows = random_bits((9, row + 8), torch.bfloat16, shift, device.at)[:, shift : shift + row]
            shape = (9 * row,) if sizes else (world, 9, row // world)
            wires = [torch.empty(shape, dtype=rows.dtype, device=device.at) for _ in range(2)]
            kernels.pack(rows, wires[0], sizes=sizes, config=config)
            kernels.pack(rows, wires[1], sizes=sizes)
            assert torch.equal(*(bits(wire) for wire in wires))
            back = torch.empty_like(rows)
            kernels.unpack(wires[0], back, sizes=sizes, config=config)
            assert torch.equal(bits(back), bits(rows))


@pytest.mark.parametrize("world", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.uint8], ids=name_of)
def test_ragged_rows_and_gaps(device: Device, dtype: torch.dtype, world: int) -> None:
    """Rows that do not divide (zero padding), empty ranks, and space between the ranks of a wire."""
    for row, gap in itertools.product(device.pick((1, 9, 130), (1, 9, 63, 65, 130, 1000, 8193)), (0, 48)):
        copies(random_bits((7, row), dtype, row, device.at), world, gap=gap)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}-world{s[2]}{'-ragged' if s[1] % s[2] else ''}")
@pytest.mark.parametrize("dtype", COPIED, ids=name_of)
def test_shapes(device: Device, dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    outer, row, world = shape
    copies(random_bits((outer, row), dtype, 0, device.at), world)


def rows_by_hand(rows: Tensor, world: int, run: int) -> Tensor:
    """The wire of even runs: rows with zeros up to their end, cut into runs."""
    padded = F.pad(rows.contiguous(), (0, world * run - rows.shape[1]))
    return padded.view(len(rows), world, run).transpose(0, 1)


@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_packs_in_the_order_of_the_wire(device: Device, itemsize: int) -> None:
    """Runs that share the sectors of the wire, bit for bit, with gaps between blocks, which stay, and with padding."""
    dtype = {2: torch.bfloat16, 4: torch.float32, 8: torch.complex64}[itemsize]
    for nbytes, world, outer in itertools.product((72, 88, 120, 200, 1000), (2, 3, 8), device.pick((5,), (5, 1000))):
        run, gap = nbytes // itemsize, 3 if nbytes == 200 else 0
        plain = random_bits((outer, world * run + 5), dtype, nbytes, device.at)
        for rows in (plain[:, :-5], plain[:, 5:], plain[:, : world * run - 3], plain[:, 1 : 1 + world * run]):
            wires, around = zip(*(guarded((world, outer + gap, run), dtype, device.at) for _ in range(2)), strict=True)
            wire, twin = (each[:, :outer] for each in wires)
            assert kernels.pack(rows, wire) == torch_path.pack(rows, twin)
            what = nbytes, world, outer, rows.storage_offset(), rows.shape
            assert torch.equal(around[0], around[1]), what
            assert torch.equal(bits(wire), bits(rows_by_hand(rows, world, run))), what


@pytest.mark.parametrize(
    ("shape", "stride", "run", "expected"),
    [
        ((64, 576), (576, 1), 72, True),
        ((64, 96), (96, 1), 12, True),
        ((64, 32), (32, 1), 4, False),  # 8 bytes
        ((64, 64), (64, 1), 8, False),  # 16 bytes
        ((64, 192), (192, 1), 24, False),  # 48 bytes
        ((64, 512), (512, 1), 64, False),  # whole sectors
        ((64, 576), (1152, 2), 72, False),  # every second element
        ((64, 4104), (4104, 1), 513, True),
        ((4, 16, 4104), (4104, 16416, 1), 513, False),
        ((4, 16, 576), (576, 2304, 1), 72, True),
        ((1, 576), (576, 1), 72, False),  # one row is contiguous
    ],
)
def test_the_rule_of_the_order(shape: tuple[int, ...], stride: tuple[int, ...], run: int, expected: bool) -> None:
    """Of bfloat16 for 8 ranks; of unpacks, uneven shards and tiles that are named no call follows the wire."""
    outer = math.prod(shape[:-1])
    wire = (8, outer, run), (outer * run, run, 1)
    for name in ("pack", "unpack"):
        for config in (None, kernels.Config(1, 512)):
            plan = copy._plan(
                name, -1, torch.bfloat16, torch.bfloat16, 0, shape, stride, *wire, None, False, False, config
            )
            assert plan[0] is not None
            follows = plan[0].kernel is _wire_order_kernel
            assert follows == (expected and name == "pack" and config is None), (name, config)


def test_broadcast_rows_are_read(device: Device) -> None:
    rows = random_bits((4, 1, 6, 16), torch.float32, 0, device.at).expand(4, 3, 6, 16)
    wire = torch.full((2, 72, 8), math.nan, device=device.at)
    kernels.pack(rows, wire)
    assert torch.equal(bits(wire), bits(rows.reshape(72, 2, 8).transpose(0, 1)))


def test_rows_beyond_32_bits(device: Device) -> None:
    """Rows that begin beyond 2**31 elements, in memory that nothing touches in between."""
    device.require(4)
    buffer = torch.empty(3 * 2**30 + 2**20, dtype=torch.int8, device=device.at)
    for step in (2**30, 2**30 + 48, 2**30 + 1):
        rows = buffer.as_strided((4, 8192), (step, 1))
        rows.copy_(random_bits((4, 8192), torch.int8, step % 7, device.at))
        wire, twin = (torch.empty(4, 4, 2048, dtype=torch.int8, device=device.at) for _ in range(2))
        kernels.pack(rows, wire)
        torch_path.pack(rows, twin)
        assert torch.equal(wire, twin), step
        kept = rows.clone()
        rows.zero_()
        kernels.unpack(wire, rows)
        assert torch.equal(rows, kept), step


def test_tensors_beyond_32_bits(device: Device) -> None:
    """Tensors of more than 2**31 elements."""
    device.require(16)
    shape = device.pick((16, 96), (2**16 + 8, 2**15 + 64))
    rows = torch.randint(-128, 127, shape, dtype=torch.int8, device=device.at)
    wire = torch.full((2, shape[0], shape[1] // 2), 90, dtype=torch.int8, device=device.at)
    kernels.pack(rows, wire)
    for rank, shard in enumerate(rows.chunk(2, 1)):
        assert torch.equal(wire[rank], shard), rank
    back = torch.full_like(rows, 90)
    kernels.unpack(wire, back)
    assert torch.equal(back, rows)


def special(shape: tuple[int, ...], dtype: torch.dtype, seed: int, device: torch.device) -> Tensor:
    """Ordinary values, after every kind of special one: NaN, infinities, zeros, denormals, overflow and ties."""
    generator = torch.Generator(device).manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64, device=device) * 3
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64, device=device)[: x.numel()]
    return x.to(dtype)


@pytest.mark.parametrize("scale", [None, 1.0, 0.3, -1 / 3, 1e-3])
@pytest.mark.parametrize("target", FLOATS, ids=name_of)
@pytest.mark.parametrize("source", FLOATS, ids=name_of)
def test_cast_scale_accumulate(device: Device, source: torch.dtype, target: torch.dtype, scale: float | None) -> None:
    """One rounding, the same bits as the definition."""
    for outer, row, world in device.pick([(3, 10, 3)], [(3, 10, 3), (37, 520, 8)]):
        rows, run = special((outer, row), source, 1, device.at), -(-row // world)
        wire = torch.zeros(world, outer, run, dtype=target, device=device.at)
        wire, _ = in_every_way(lambda module, y, x: module.pack(x, y, scale), wire, rows, nan=True)
        if scale is None:
            assert_same_numbers(wire[0], rows[:, :run].to(target))
        for accumulate in (False, True):
            total = special((outer, row), source, 2, device.at).flip(0)
            options = {"accumulate": accumulate}
            in_every_way(lambda module, y, x: module.unpack(x, y, scale, **options), total, wire, nan=True)  # noqa: B023


PARTS = (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 23, 24, 25, 32, 33, 48, 63, 64)


@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
        (torch.int8, torch.int8),
        (torch.int32, torch.int32),
        (torch.int64, torch.int64),
        (torch.complex64, torch.complex64),
    ],
    ids=name_of,
)
def test_reduce_sums_in_rank_order(device: Device, source: torch.dtype, target: torch.dtype) -> None:
    """Every number of parts in one dtype; on a GPU, where each is a kernel to compile, a few in the others."""
    for parts in PARTS if source is target is torch.bfloat16 else device.pick((1, 2, 3, 8, 16, 17, 24, 64), (3, 17)):
        for length in device.pick((37,), (1, 40, 4104, 100_003)):
            if source.is_floating_point:
                generator = torch.Generator(device.at).manual_seed(parts)
                wire = torch.randn(parts, length + 24, generator=generator, device=device.at).to(source)
            else:
                wire = random_bits((parts, length + 24), torch.int8, parts, device.at).to(source)
                wire *= 2**24 + 1 if source is torch.int32 else 1
            wire = wire[:, 8 : 8 + length]
            out = torch.zeros(length, dtype=target, device=device.at)
            in_every_way(lambda module, y, x: module.reduce(x, y), out, wire)


@pytest.mark.parametrize("source", FLOATS, ids=name_of)
def test_reduce_casts_and_scales(device: Device, source: torch.dtype) -> None:
    for parts, length in itertools.product((3, 17), device.pick((7, 40), (1, 40, 100_003))):
        for target, scale in ((source, None), (torch.float32, 0.3), (torch.bfloat16, 1 / parts)):
            wire = special((parts, length + 24), source, 0, device.at)[:, 8 : 8 + length]
            out = torch.zeros(length, dtype=target, device=device.at)
            in_every_way(lambda module, y, x: module.reduce(x, y, scale), out, wire, nan=True)  # noqa: B023


@pytest.mark.parametrize("length", [1, 7, 8, 37, 1001])
@pytest.mark.parametrize("parts", [1, 3, 17])
@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)],
    ids=name_of,
)
def test_reduce_of_odd_lengths(
    device: Device, source: torch.dtype, target: torch.dtype, parts: int, length: int
) -> None:
    """Parts 16 bytes apart are read in units of 16 bytes whatever their length, and nothing else is touched."""
    generator = torch.Generator(device.at).manual_seed(length)
    step = -(-length // 8) * 8
    wire = torch.randn(parts, step, generator=generator, dtype=torch.float64, device=device.at).to(source)
    wire[:, length:] = math.nan
    out, _ = guarded((length,), target, device.at)
    in_every_way(lambda module, y, x: module.reduce(x, y, 0.5), out, wire[:, :length])
    ends = ((parts, length), (step, 1), (length,), (1,))
    launch = _reduce_plan(-1, source, target, 0, *ends, False, None)[0]
    assert launch.constants["VEC"] == 16 // min(source.itemsize, target.itemsize)


@pytest.mark.parametrize(
    ("sizes", "table", "tiles"),
    [((64,) * 16, False, 16), ((64,) * 17, True, 17), ((16,) * 128, True, 128), ((7168, *(16,) * 63), True, 63 + 28)],
    ids=["16-ranks", "17-ranks", "short", "hot"],
)
def test_split_sizes_have_one_program_per_tile(sizes: tuple[int, ...], table: bool, tiles: int) -> None:
    """Up to 16 ranks by value: nothing is copied to the device, so that a CUDA graph may capture any sizes."""
    row, outer = sum(sizes), 4096
    plan = compiled_kernels()["copy"]._plan
    for name in ("pack", "unpack"):
        ends = ((outer, row), (row, 1), (outer * row,), (1,), sizes, False, False, None)
        launch = plan(name, -1, torch.int8, torch.int8, 0, *ends)[0]
        assert (launch.table is not None) == table
        tile = launch.constants["BLOCK_ROWS"] * launch.constants["BLOCK_COLS"] * 8
        assert tile == 8192
        assert launch.grid == outer // launch.constants["BLOCK_ROWS"] * tiles


def test_bytes_are_those_the_interpreter_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    moved = [0]
    builder = interpreter.InterpreterBuilder
    load, store = builder.create_masked_load, builder.create_masked_store

    def counted_load(self, ptrs, mask, *rest):
        moved[0] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return load(self, ptrs, mask, *rest)

    def counted_store(self, ptrs, value, mask, *rest):
        moved[0] += int(mask.data.sum()) * ptrs.get_element_ty().primitive_bitwidth // 8
        return store(self, ptrs, value, mask, *rest)

    monkeypatch.setattr(builder, "create_masked_load", counted_load)
    monkeypatch.setattr(builder, "create_masked_store", counted_store)
    rows, wire = torch.randn(3, 10), torch.empty(4, 3, 3)
    calls = [
        lambda: kernels.pack(rows, wire),
        lambda: kernels.unpack(wire, rows),
        lambda: kernels.unpack(wire, rows, 2.0, accumulate=True),
        lambda: kernels.pack(rows, wire.bfloat16(), 0.5),
        lambda: kernels.reduce(torch.randn(5, 33), torch.empty(33)),
    ]
    for call in calls:
        moved[0] = 0
        assert call() == moved[0] > 0


def test_empty() -> None:
    wire = torch.full((2, 3, 1), math.nan)
    assert kernels.pack(torch.empty(3, 0), wire) == wire.nbytes
    assert torch.equal(wire, torch.zeros(2, 3, 1))
    assert kernels.unpack(wire, torch.empty(3, 0)) == 0
    assert kernels.pack(torch.empty(0, 4), torch.empty(2, 0, 2)) == 0
    assert kernels.reduce(torch.empty(3, 0), torch.empty(0)) == 0


def test_bad_arguments_are_refused() -> None:
    rows, wire = torch.randn(3, 8), torch.empty(2, 3, 4)
    bad = [
        (ValueError, lambda f: f.pack(rows, torch.empty(2, 3, 3))),
        (ValueError, lambda f: f.pack(rows, torch.empty(2, 4, 4))),
        (ValueError, lambda f: f.pack(rows, torch.empty(2, 4, 3).transpose(1, 2))),
        (ValueError, lambda f: f.pack(rows, torch.empty(24), sizes=(3, 4))),
        (ValueError, lambda f: f.unpack(wire, torch.empty(1, 8).expand(3, 8))),
        (TypeError, lambda f: f.pack(rows.int(), wire.int(), 2.0)),
        (TypeError, lambda f: f.pack(rows, wire.int())),
        (TypeError, lambda f: f.unpack(wire.bool(), rows.bool(), accumulate=True)),
        (ValueError, lambda f: f.reduce(torch.empty(65, 2), torch.empty(2))),
        (ValueError, lambda f: f.reduce(torch.empty(3, 2), torch.empty(3))),
    ]
    for kind, call in bad:
        for module in (kernels, torch_path):
            with pytest.raises(kind, match=r"pack|reduce"):
                call(module)
    with pytest.raises(ValueError, match="three outer dims"):
        kernels.pack(torch.randn(3, 3, 3, 3, 8).permute(3, 2, 1, 0, 4), torch.empty(2, 81, 4))
    with pytest.raises(ValueError, match="lazy"):
        kernels.pack(torch.randn(3, 8, dtype=torch.complex64).conj(), wire.to(torch.complex64))


def test_twins_have_the_same_signature() -> None:
    for name in ("pack", "unpack", "reduce"):
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(torch_path, name))
