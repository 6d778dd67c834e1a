"""pack, unpack, reduce and fused wires against torch.chunk, cat and sum, bit for bit, on both paths."""

import itertools
import math
from typing import Any

import pytest
import torch
from bits import bits, random_bits
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from tritoncomm_kernels import launch
from tritoncomm_kernels.launch import Launch

from tritoncomm.core import blocks, ops
from tritoncomm.core.fused import plan_fused
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.core.split import split_of
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError

INTS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
DTYPES = [
    torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64,
    torch.float8_e4m3fn,
]  # fmt: skip
PATHS = ["torch", "triton"]
SHAPES = [(8,), (4, 8), (1, 8), (3, 4, 8), (2, 4, 2, 8), (0, 8)]


def name_of(value: object) -> str:
    if isinstance(value, tuple):
        return "x".join(map(str, value)) or "scalar"
    return str(value).removeprefix("torch.")


def assert_same_bits(found: Tensor, wanted: Tensor) -> None:
    assert found.dtype is wanted.dtype
    assert found.shape == wanted.shape
    assert torch.equal(bits(found), bits(wanted))


def layouts(x: Tensor) -> dict[str, Tensor]:
    """The same values in other memory."""
    found = {"contiguous": x}
    if x.dim() >= 2:
        found["transposed"] = x.transpose(0, -1).contiguous().transpose(0, -1)
    if x.numel():
        wide = torch.cat([x, x, x], -1)
        found["sliced"] = wide[..., x.shape[-1] : 2 * x.shape[-1]]
        found["stepped"] = torch.stack([x, x], -1)[..., 0]
    if x.dim() >= 3:
        order = (1, 2, 0, *range(3, x.dim()))
        back = tuple(order.index(i) for i in range(x.dim()))
        found["permuted"] = x.permute(order).contiguous().permute(back)
    return found


def refused(view: Tensor, dim: int, world: int, path: str) -> bool:
    """Whether forced triton has to refuse, and does; plain torch never refuses."""
    d = dim % view.dim()
    in_order = d == 0 or view.shape[:d].numel() == 1
    readable = split_of(view.shape, view.stride(), dim, 1).rows is not None
    readable |= in_order and split_of(view.shape, view.stride(), -1, 1).rows is not None and view.shape[d] % world == 0
    if path == "torch" or readable:
        return False
    with ops.path(path), pytest.raises(UnsupportedError, match="pack: path triton is forced"):
        ops.pack(view, dim, world)
    return True


def flat_wire(x: Tensor, dim: int, sizes: tuple[int, ...]) -> Tensor:
    return torch.cat([piece.reshape(-1) for piece in x.split(list(sizes), dim)])


def pack_cases() -> list[Any]:
    """All shapes and dtypes on the torch path; the interpreter is slow: one dtype there, other widths at one shape."""
    widths = {dtype.itemsize: dtype for dtype in reversed(DTYPES)}.values()
    return [
        pytest.param(path, dtype, shape, id=f"{name_of(shape)}-{name_of(dtype)}-{path}")
        for path, dtype, shape in itertools.product(PATHS, DTYPES, SHAPES)
        if path == "torch" or dtype is torch.bfloat16 or (dtype in widths and shape == (3, 4, 8))
    ]


@pytest.mark.parametrize(("path", "dtype", "shape"), pack_cases())
def test_pack_then_unpack(path: str, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    x = random_bits(shape, dtype)
    for (layout, view), dim, world in itertools.product(layouts(x).items(), range(-1, len(shape)), (1, 2, 4)):
        if shape[dim] % world:
            continue
        if refused(view, dim, world, path):
            assert layout in ("transposed", "permuted") or (layout == "sliced" and dim not in (-1, len(shape) - 1))
            continue
        with ops.path(path):
            wire, taken, moved = ops.pack(view, dim, world)
        wanted = torch.stack([piece.contiguous() for piece in view.tensor_split(world, dim)])
        assert_same_bits(wire.reshape(wanted.shape), wanted)
        assert taken in ("view", path)
        assert moved == (0 if taken == "view" else 2 * x.nbytes)
        wire = wanted.clone()
        with ops.path(path):
            out, taken, moved = ops.unpack(wire, shape, dim, world)
        assert_same_bits(out, x)
        assert out._base is None
        assert out.is_contiguous()
        assert taken == path
        assert moved == 2 * x.nbytes


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("shape", [(9,), (3, 9), (5, 3, 2), (2, 3, 2, 5)], ids=name_of)
@pytest.mark.parametrize("world", [2, 4])
def test_uneven_is_padded_with_zeros(path: str, shape: tuple[int, ...], world: int) -> None:
    x = random_bits(shape, torch.bfloat16)
    for (_, view), dim in itertools.product(layouts(x).items(), range(len(shape))):
        if shape[dim] % world == 0 or refused(view, dim, world, path):
            continue
        with ops.path(path):
            wire, taken, _ = ops.pack(view, dim, world)
        assert taken == path
        outer = torch.Size(shape[:dim]).numel()
        blocks = view.split(list(chunk_sizes(shape[dim], world)), dim)
        for w, block in enumerate(blocks):
            rows = block.reshape(outer, -1) if block.numel() else block.new_empty(outer, 0)
            assert_same_bits(wire[w][:, : rows.shape[1]], rows)
            assert not bits(wire[w][:, rows.shape[1] :]).any()
        with ops.path(path):
            out, _, _ = ops.unpack(wire, shape, dim, world)
        assert_same_bits(out, x)
        assert out._base is None


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sizes", [(3, 0, 4), (7, 0, 0), (2, 2, 3)], ids=name_of)
def test_split_sizes(path: str, sizes: tuple[int, ...]) -> None:
    for shape, dim in (((7, 3), 0), ((2, 7), 1), ((2, 7, 2), 1), ((2, 3, 7), -1)):
        x = random_bits(shape, torch.float32)
        for layout, view in layouts(x).items():
            if path == "triton" and dim and layout != "contiguous":
                continue
            with ops.path(path):
                wire, _, _ = ops.pack(view, dim, 3, sizes)
                assert_same_bits(wire.view(-1), flat_wire(x, dim, sizes))
                out, _, _ = ops.unpack(wire.clone(), shape, dim, 3, sizes)
            assert_same_bits(out, x)
            assert out._base is None


@pytest.mark.parametrize("path", PATHS)
def test_out_scale_dtype_accumulate(path: str) -> None:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    chunks = torch.stack(list(x.chunk(2, 1)))
    with ops.path(path):
        half, _, moved = ops.pack(x, 1, 2, dtype=torch.bfloat16)
        assert_same_bits(half, chunks.bfloat16())
        assert moved == x.nbytes + half.nbytes
        scaled, _, _ = ops.pack(x, 1, 2, scale=0.3)
        assert_same_bits(scaled, chunks * 0.3)
        both, _, _ = ops.pack(x, 1, 2, dtype=torch.float16, scale=0.25)
        assert_same_bits(both, (chunks * 0.25).half())
        own = torch.full((2, 3, 4), torch.nan)
        wire, _, _ = ops.pack(x, 1, 2, out=own)
        assert wire is own
        assert_same_bits(own, chunks)
        out = torch.ones(3, 8)
        result, _, _ = ops.unpack(chunks, (3, 8), 1, 2, out=out, accumulate=True)
        assert result is out
        assert_same_bits(out, x + 1)
        target = torch.full((8, 3), torch.nan).t()
        ops.unpack(chunks, (3, 8), 1, 2, out=target)
        assert_same_bits(target, x)
        widened, _, _ = ops.unpack(half, (3, 8), 1, 2, dtype=torch.float32, scale=2.0)
        assert_same_bits(widened, x.bfloat16().float() * 2.0)


def packed(
    tensors: list[Tensor], dims: list[int], world: int, dtype: torch.dtype | None = None, scale: float | None = None
) -> tuple[Tensor, list[tuple[int, tuple[int, ...]]], str, int]:
    """Wire of several tensors ``[world, total]``, offset and shape of each one's shard, path and bytes copied."""
    shapes, strides = tuple(x.shape for x in tensors), tuple(x.stride() for x in tensors)
    front = tuple(dim % x.dim() for x, dim in zip(tensors, dims, strict=True))
    plan = plan_fused(shapes, strides, front, world, 0, dtype or tensors[0].dtype)
    wire, path, copied = plan.pack.pack(tensors, scale=scale)
    return wire.view(world, -1), [(shard.start, shard.shape) for shard in plan.shards], path, copied


@pytest.mark.parametrize("path", PATHS)
def test_pack_many(path: str) -> None:
    first, second, third = torch.arange(40.0).view(5, 8), torch.arange(16.0), torch.arange(18.0).view(2, 9)
    with ops.path(path):
        wire, pieces, _, moved = packed([first, second, third], [1, 0, -1], 4)
    assert wire.shape == (4, 10 + 4 + 6)
    assert pieces == [(0, (5, 2)), (10, (4,)), (14, (2, 3))]
    assert moved == first.nbytes + second.nbytes + third.nbytes + wire.nbytes
    for w in range(4):
        assert torch.equal(wire[w, :10].view(5, 2), first.chunk(4, 1)[w])
        assert torch.equal(wire[w, 10:14], second.chunk(4)[w])
        last = third.split(list(chunk_sizes(9, 4)), 1)[w]
        assert torch.equal(wire[w, 14:].view(2, 3)[:, : last.shape[1]], last)
        assert not wire[w, 14:].view(2, 3)[:, last.shape[1] :].any()


def test_pack_many_is_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of many gradients, whatever their layouts and shards; the same wire, counts and shards as one after the other."""
    launches, call, empty = [], Launch.__call__, Tensor.new_empty

    def poisoned(x: Tensor, *given: Any, **more: Any) -> Tensor:
        made = empty(x, *given, **more)
        return made.fill_(math.nan) if made.is_floating_point() else made

    monkeypatch.setattr(Tensor, "new_empty", poisoned)
    monkeypatch.setattr(Launch, "__call__", lambda self, *given: [launches.append(self), call(self, *given)][1])
    made = torch.Generator().manual_seed(0)
    shapes = [((5, 8), 1), ((16,), 0), ((2, 10), 1), ((3, 2, 5), 1), ((7, 4), 0), ((1, 1), 0), ((0, 4), 1)] * 3
    tensors = [torch.randn(shape, generator=made, dtype=torch.float64) for shape, _ in shapes]
    tensors[3] = torch.randn(5, 2, 3, generator=made, dtype=torch.float64).permute(2, 1, 0)
    dims = [dim for _, dim in shapes]
    for dtype, scale, count in ((None, None, 1), (torch.float32, 0.25, 2)):
        with ops.path("torch"):
            expected = packed(tensors, dims, 4, dtype=dtype, scale=scale)
        launches.clear()
        with ops.path("triton"):
            wire, shards, path, copied = packed(tensors, dims, 4, dtype=dtype, scale=scale)
        assert len(launches) == count
        assert (shards, path, copied) == (expected[1], "triton", expected[3])
        assert_same_bits(wire, expected[0])


@pytest.mark.parametrize("most", [4, 3])
def test_pack_many_of_many_short_rows(monkeypatch: pytest.MonkeyPatch, most: int) -> None:
    """Rows that are all padded are not listed one by one; without a table torch copies block by block."""
    monkeypatch.setattr(blocks, "MOST_SEGMENTS", most)
    plan_fused.cache_clear()
    tensors = [torch.randn(30, 3), torch.randn(8)]
    with ops.path("torch"):
        expected = packed(tensors, [1, 0], 2)
    with ops.path("triton"):
        wire, shards, path, copied = packed(tensors, [1, 0], 2)
    plan_fused.cache_clear()
    assert (shards, path, copied) == (expected[1], "triton" if most == 4 else "torch", expected[3])
    assert_same_bits(wire, expected[0])


@pytest.mark.parametrize(("source", "target"), [(torch.float32, torch.bfloat16), (torch.float64, torch.bfloat16)])
def test_a_layout_no_kernel_reads_is_scaled_and_stays(source: torch.dtype, target: torch.dtype) -> None:
    x = (torch.rand(5, 4, 3, dtype=source) + 1).permute(2, 1, 0)
    kept = x.clone()
    assert split_of(x.shape, x.stride(), 1, 1).rows is None
    wire = ops.pack(x, 1, 2, dtype=target, scale=0.3)[0]
    assert torch.equal(x, kept)
    expected = (kept * 0.3).float().to(target)
    assert_same_bits(wire.view(2, 3, 2, 5), torch.stack(expected.chunk(2, 1)))


def test_pack_many_dtypes() -> None:
    mixed = [torch.ones(4), torch.ones(4, dtype=torch.bfloat16)]
    wire, _, _, _ = packed(mixed, [0, 0], 2, dtype=torch.float16, scale=0.5)
    assert wire.dtype is torch.float16
    assert (wire == 0.5).all()


def test_views_cost_nothing() -> None:
    x = torch.randn(8, 3)
    wire, taken, moved = ops.pack(x, 0, 4)
    assert (taken, moved) == ("view", 0)
    assert wire.data_ptr() == x.data_ptr()
    wire, taken, _ = ops.pack(x.view(1, 1, 24), 2, 4)
    assert taken == "view"
    assert wire.data_ptr() == x.data_ptr()
    flat, taken, _ = ops.pack(x, 0, 2, (3, 5))
    assert taken == "view"
    assert flat.data_ptr() == x.data_ptr()


def test_choosing_a_path() -> None:
    x = torch.ones(2, 4)
    assert ops.path_for(x) == "torch"
    with ops.path("triton"):
        assert ops.path_for(x) == "triton"
        with ops.path("torch"):
            assert ops.path_for(x) == "torch"
        assert ops.path_for(x) == "triton"
        with ops.path("auto"):
            assert ops.path_for(x) == "torch"
    assert ops.path_for(x) == "torch"
    with pytest.raises(ArgumentError, match="cuda"), ops.path("cuda"):
        pass
    with pytest.raises(KeyError), ops.path("triton"):
        raise KeyError
    assert ops.path_for(x) == "torch"


def test_a_layout_no_kernel_reads_is_refused_by_triton_only() -> None:
    x = torch.arange(2.0**6).view(2, 2, 2, 2, 2, 2).permute(5, 3, 1, 4, 2, 0)
    with ops.path("torch"):
        wire, taken, moved = ops.pack(x, 4, 2)
    assert taken == "torch"
    assert moved == 2 * x.nbytes
    assert torch.equal(wire.view(2, -1), torch.stack([c.reshape(-1) for c in x.chunk(2, 4)]))
    with ops.path("triton"), pytest.raises(UnsupportedError, match="pack: path triton is forced"):
        ops.pack(x, 4, 2)


def test_wrong_dims() -> None:
    with pytest.raises(ShapeError, match="dim 2"):
        ops.pack(torch.ones(2, 2), 2, 2)
    with pytest.raises(ShapeError, match="split sizes"):
        ops.pack(torch.ones(2, 2), 0, 2, (1, 2))


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """``auto`` takes the kernels, which are planned and checked but not launched: tensors may be on the meta device."""
    launched: list[tuple[int, ...]] = []
    monkeypatch.setattr(
        ops, "path_for", lambda x, *_, **__: "triton" if ops._forced.value == "auto" else ops.forced_path()
    )
    monkeypatch.setattr(launch.Launch, "__call__", lambda call, *rest: launched.append(call.arguments))
    return launched


LARGE = [((524288, 8194), torch.bfloat16, 2), ((262144, 16386), torch.int8, 2), ((2**31 - 2**20, 2), torch.int8, 2)]


@pytest.mark.parametrize(
    ("shape", "dtype", "world"),
    [pytest.param(*each, marks=pytest.mark.slow) for each in LARGE],
    ids=name_of,
)
def test_more_units_than_a_kernel_counts_go_to_torch(
    shape: tuple[int, int], dtype: torch.dtype, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched = as_on_a_gpu(monkeypatch)
    x = torch.empty(shape, dtype=dtype, device="meta")
    wire, taken, moved = ops.pack(x, 1, world)
    assert (taken, moved, wire.shape) == ("torch", 2 * x.nbytes, (world, shape[0], shape[1] // world))
    out, taken, moved = ops.unpack(wire, shape, 1, world)
    assert (taken, moved, out.shape) == ("torch", 2 * x.nbytes, shape)
    parts = torch.empty((2, 2**31 + 1), dtype=torch.int8, device="meta")
    assert ops.reduce(parts)[1] == "torch"
    assert not launched
    for call in (lambda: ops.pack(x, 1, world), lambda: ops.unpack(wire, shape, 1, world), lambda: ops.reduce(parts)):
        with ops.path("triton"), pytest.raises(UnsupportedError, match="32-bit"):
            call()


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.data())
def test_every_size_has_a_path(data: st.DataObject) -> None:
    """Kernels take what they count in 31 bits, torch the rest; nothing raises, and no number is truncated."""
    dtype = data.draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float32, torch.complex128]))
    outer, run = (2 ** data.draw(st.integers(0, 33)) + data.draw(st.integers(-1, 1)) for _ in range(2))
    world, sized = data.draw(st.sampled_from([1, 2, 8, 40])), data.draw(st.booleans())
    if not 0 < outer * run * world < 2**50:
        return
    x = torch.empty(outer, world * run, dtype=dtype, device="meta")
    sizes = (run - 1, run + 1, *[run] * (world - 2)) if sized and world > 1 else None
    with pytest.MonkeyPatch.context() as patch:
        launched = as_on_a_gpu(patch)
        wire, taken, _ = ops.pack(x, 1, world, sizes)
        back = ops.unpack(wire, x.shape, 1, world, sizes)[1]
    assert all(number < 2**31 for numbers in launched for number in numbers)
    assert len(launched) == [taken, back].count("triton")
    assert back == "triton" or outer * run * world * dtype.itemsize >= 2**30
