"""The kernels, in the interpreter, against index arithmetic and against their torch twins, bit for bit."""

import inspect
import itertools
import math

import pytest
import torch
import tritoncomm_kernels as kernels
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime import interpreter
from tritoncomm_kernels import reference
from tritoncomm_kernels.reduce import _plan as _reduce_plan

from tritoncomm.tune.machine_code import compiled_kernels

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
COPIED = (*FLOATS, torch.int8, torch.int64, torch.bool, torch.float8_e4m3fn, torch.complex64, torch.complex128)
SHAPES = [(4, 144, 2), (3, 200, 4), (5, 12, 3), (2, 9, 4), (1, 13, 2), (2, 1, 4), (3, 8, 1)]
SPECIAL = [math.nan, -math.nan, math.inf, -math.inf, -0.0, 0.0, 1e-45, 6e-8, 1.00390625, 1.01171875, 3.4e38, 65504.0]


def name_of(value: object) -> str:
    return "x".join(map(str, value)) if isinstance(value, tuple) else str(value).rpartition(".")[2]


def random_bits(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, shape, generator=generator).bool()
    raw = torch.randint(256, (*shape[:-1], shape[-1] * dtype.itemsize), generator=generator, dtype=torch.uint8)
    return raw.view(dtype)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def guarded(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A poisoned tensor of ``shape`` inside a buffer with 16 canary bytes at either end."""
    size = math.prod(shape) * dtype.itemsize
    raw = torch.full((size + 32,), 0x7F, dtype=torch.uint8)
    if dtype is torch.bool:
        raw[16 : 16 + size] = 1
    return raw[16 : 16 + size].view(dtype).view(shape), raw


def canaries_live(raw: Tensor) -> bool:
    return bool((raw[:16] == 0x7F).all() and (raw[-16:] == 0x7F).all())


def by_index(rows: Tensor, world: int) -> Tensor:
    """The definition: one element at a time."""
    outer, row = rows.shape
    run = -(-row // world)
    wire = torch.zeros(world, outer, run, dtype=rows.dtype)
    for w, o, k in itertools.product(range(world), range(outer), range(run)):
        if w * run + k < row:
            wire[w, o, k] = rows[o, w * run + k]
    return wire


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}-world{s[2]}{'-ragged' if s[1] % s[2] else ''}")
@pytest.mark.parametrize("dtype", COPIED, ids=name_of)
def test_copy_keeps_every_bit(dtype: torch.dtype, shape: tuple[int, int, int]) -> None:
    outer, row, world = shape
    rows = random_bits((outer, row), dtype)
    run = -(-row // world)
    wire, raw = guarded((world, outer, run), dtype)
    twin = torch.empty_like(wire)
    assert kernels.pack(rows, wire) == reference.pack(rows, twin) == (rows.numel() + wire.numel()) * dtype.itemsize
    assert torch.equal(bits(wire), bits(twin))
    assert canaries_live(raw)
    if rows.numel() <= 64:
        assert torch.equal(bits(wire), bits(by_index(rows, world)))
    back, raw = guarded((outer, row), dtype)
    assert kernels.unpack(wire, back) == reference.unpack(wire, twin.new_empty(outer, row))
    assert torch.equal(bits(back), bits(rows))
    assert canaries_live(raw)


MANY = ((5, *(0,) * 9, 8, *(3, 0, 16) * 4), (0,) * 140 + (40,), (8,) * 17, (0,) * 16 + (24,), (9,) + (0,) * 299)


@pytest.mark.parametrize(
    "sizes",
    [(3, 5, 1), (0, 9, 0), (8, 0, 8), (16, 16), (7,), (1,) * 8, (2, 0, 3) * 3, (0, 8) * 8, *MANY],
    ids=lambda sizes: f"{len(sizes)}-ranks-{sizes[0]}-{max(sizes)}",
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int64], ids=name_of)
def test_split_sizes(dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    rows = random_bits((3, sum(sizes)), dtype)
    wire, raw = guarded((rows.numel(),), dtype)
    kernels.pack(rows, wire, sizes=sizes)
    expected = torch.cat([piece.flatten() for piece in rows.split(list(sizes), 1)])
    assert torch.equal(bits(wire), bits(expected))
    assert canaries_live(raw)
    back = torch.empty_like(rows)
    kernels.unpack(wire, back, sizes=sizes)
    assert torch.equal(bits(back), bits(rows))
    reference.pack(rows, wire.zero_(), sizes=sizes)
    assert torch.equal(bits(wire), bits(expected))


LAYOUTS = {
    "slice-of-rows": lambda x: x[:, :, ::2],
    "two-outer-dims": lambda x: x.transpose(0, 1),
    "three-outer-dims": lambda x: x.permute(2, 0, 1, 3),
    "element-stride": lambda x: x[..., ::2],
    "columns-at-an-odd-place": lambda x: x[:, 1:3, :, 3:11],
    "broadcast": lambda x: x[:, :1].expand(4, 3, 6, 16),
    "one-dim": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strided_rows_are_read_and_written_in_place(layout: str) -> None:
    rows = LAYOUTS[layout](torch.randn(4, 5, 6, 16))
    outer, row = rows.numel() // rows.shape[-1], rows.shape[-1]
    wire = torch.full((2, outer, row // 2), math.nan)
    kernels.pack(rows, wire)
    assert torch.equal(wire, rows.reshape(outer, 2, row // 2).transpose(0, 1))
    if layout != "broadcast":
        target = LAYOUTS[layout](torch.zeros(4, 5, 6, 16))
        kernels.unpack(wire, target)
        assert torch.equal(target, rows)


def test_ranks_apart() -> None:
    """A rank stride larger than a block: several tensors share a wire, and what lies between is left alone."""
    rows = torch.randn(3, 8)
    wire = torch.full((4, 20), math.nan)
    kernels.pack(rows, wire[:, 5:11].unflatten(1, (3, 2)))
    assert torch.equal(wire[:, 5:11].unflatten(1, (3, 2)), rows.unflatten(1, (4, 2)).transpose(0, 1))
    assert wire[:, :5].isnan().all()
    assert wire[:, 11:].isnan().all()


def special(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 3
    x.view(-1)[: len(SPECIAL)] = torch.tensor(SPECIAL, dtype=torch.float64)
    return x.to(dtype)


def assert_same_numbers(a: Tensor, b: Tensor) -> None:
    """The same bits, where one NaN is as good as another."""
    assert torch.equal(a.isnan(), b.isnan())
    assert torch.equal(bits(a.masked_fill(a.isnan(), 0)), bits(b.masked_fill(b.isnan(), 0)))


@pytest.mark.parametrize("scale", [None, 0.1, 3.0])
@pytest.mark.parametrize("target", FLOATS, ids=name_of)
@pytest.mark.parametrize("source", FLOATS, ids=name_of)
def test_cast_scale_accumulate(source: torch.dtype, target: torch.dtype, scale: float | None) -> None:
    rows = special((3, 10), source, 1)
    wire, twin = torch.empty(3, 3, 4, dtype=target), torch.empty(3, 3, 4, dtype=target)
    kernels.pack(rows, wire, scale)
    reference.pack(rows, twin, scale)
    assert_same_numbers(wire, twin)
    if scale is None:
        assert_same_numbers(wire[0], rows[:, :4].to(target))
    total, twin_total = special((3, 10), source, 2), special((3, 10), source, 2)
    kernels.unpack(wire, total, scale, accumulate=True)
    reference.unpack(wire, twin_total, scale, accumulate=True)
    assert_same_numbers(total, twin_total)


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 16, 17, 24, 64])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.float64, torch.float64),
        (torch.int32, torch.int32),
        (torch.complex64, torch.complex64),
    ],
    ids=name_of,
)
def test_reduce_sums_in_rank_order(source: torch.dtype, target: torch.dtype, parts: int) -> None:
    generator = torch.Generator().manual_seed(parts)
    if source is torch.int32:
        wire = torch.randint(-(2**31), 2**31 - 1, (parts, 37), generator=generator, dtype=torch.int32)
    else:
        wire = torch.randn(parts, 37, generator=generator, dtype=source if source.is_complex else torch.float32).to(
            source
        )
    out, twin = torch.empty(37, dtype=target), torch.empty(37, dtype=target)
    assert kernels.reduce(wire, out) == reference.reduce(wire, twin) == wire.nbytes + out.nbytes
    total = wire[0].clone() if source in (torch.float64, torch.int32, torch.complex64) else wire[0].float()
    for part in wire[1:]:
        total = total + part
    assert torch.equal(bits(out), bits(total.to(target)))
    assert torch.equal(bits(out), bits(twin))


@pytest.mark.parametrize("length", [1, 7, 8, 37, 1001])
@pytest.mark.parametrize("parts", [1, 3, 17])
@pytest.mark.parametrize(
    ("source", "target"),
    [(torch.bfloat16, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16)],
    ids=name_of,
)
def test_reduce_of_odd_lengths(source: torch.dtype, target: torch.dtype, parts: int, length: int) -> None:
    """Parts 16 bytes apart are read in units of 16 bytes whatever their length, and nothing else is touched."""
    generator = torch.Generator().manual_seed(length)
    step = -(-length // 8) * 8
    wire = torch.randn(parts, step, generator=generator, dtype=torch.float64).to(source)
    wire[:, length:] = math.nan
    out, raw = guarded((length,), target)
    twin = torch.empty(length, dtype=target)
    assert kernels.reduce(wire[:, :length], out, 0.5) == reference.reduce(wire[:, :length], twin, 0.5)
    assert torch.equal(bits(out), bits(twin))
    assert canaries_live(raw)
    ends = ((parts, length), (step, 1), (length,), (1,))
    launch = _reduce_plan(-1, source, target, 0, *ends, False, None)[0]
    assert launch.constants["VEC"] == 16 // min(source.itemsize, target.itemsize)


@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 7, 8, 9, 16, 17, 33, 128, 129]),
    st.lists(st.tuples(st.integers(0, 128), st.sampled_from([1, 2, 5, 16, 40])), min_size=1, max_size=5),
    st.sampled_from([1, 2, 8]),
    st.sampled_from([torch.int8, torch.bfloat16, torch.int64]),
    st.sampled_from([(1, 1), (3, 4), (5, 4)]),
    st.sampled_from([0, 1, 8]),
)
def test_random_split_sizes(
    world: int, some: list[tuple[int, int]], unit: int, dtype: torch.dtype, outer: tuple[int, int], left: int
) -> None:
    """By value and in a table, empty and hot ranks, tiles of one row and more, rows with strides."""
    lengths = dict.fromkeys(range(world), 0) | {rank % world: unit * length for rank, length in some}
    sizes, (rows, block_rows) = tuple(lengths.values()), outer
    x = random_bits((rows, left + sum(sizes)), dtype)[:, left:]
    config = kernels.Config(block_rows, 16 * dtype.itemsize)
    wire, raw = guarded((x.numel(),), dtype)
    twin = torch.empty_like(wire)
    assert kernels.pack(x, wire, sizes=sizes, config=config) == reference.pack(x, twin, sizes=sizes)
    assert torch.equal(bits(wire), bits(twin))
    back = torch.empty_like(x)
    kernels.unpack(wire, back, sizes=sizes, config=config)
    assert torch.equal(bits(back), bits(x))
    assert canaries_live(raw)


@pytest.mark.parametrize(
    ("sizes", "table", "tiles"),
    [((64,) * 16, False, 16), ((64,) * 17, True, 17), ((16,) * 128, True, 128), ((7168, *(16,) * 63), True, 63 + 14)],
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


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_random_plans(data: st.DataObject) -> None:
    outer, row, world = data.draw(st.integers(0, 5)), data.draw(st.integers(0, 40)), data.draw(st.integers(1, 6))
    dtype = data.draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.int64]))
    left, extra = data.draw(st.integers(0, 3)), data.draw(st.integers(0, 3))
    wide = random_bits((outer, left + row + extra), dtype) if left + row + extra else torch.empty(outer, 0, dtype=dtype)
    rows = wide[:, left : left + row]
    run = -(-row // world) + data.draw(st.integers(0, 2))
    wire, raw = guarded((world, outer, run), dtype)
    twin = torch.empty_like(wire)
    assert kernels.pack(rows, wire) == reference.pack(rows, twin)
    assert torch.equal(bits(wire), bits(twin))
    back = torch.empty_like(rows)
    kernels.unpack(wire, back)
    assert torch.equal(bits(back), bits(rows))
    assert canaries_live(raw)


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
        for module in (kernels, reference):
            with pytest.raises(kind, match=r"pack|reduce"):
                call(module)
    with pytest.raises(ValueError, match="three outer dims"):
        kernels.pack(torch.randn(3, 3, 3, 3, 8).permute(3, 2, 1, 0, 4), torch.empty(2, 81, 4))
    with pytest.raises(ValueError, match="lazy"):
        kernels.pack(torch.randn(3, 8, dtype=torch.complex64).conj(), wire.to(torch.complex64))


def test_twins_have_the_same_signature() -> None:
    for name in ("pack", "unpack", "reduce"):
        assert inspect.signature(getattr(kernels, name)) == inspect.signature(getattr(reference, name))
