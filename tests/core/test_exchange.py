"""Passes over blocks and exchanges: every way of a pass gives the bits of a copy element by element."""

import itertools
import math
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from bits import bits, random_bits
from fuzz_calls import tensor_of
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import PADDING

from tritoncomm import ArgumentError, collective, mappings, p2p
from tritoncomm.core import blocks, ops, passes
from tritoncomm.core.blocks import Block
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.memory import contiguous_stride
from tritoncomm.core.passes import Pass
from tritoncomm.record import Span
from tritoncomm.recurrent import by_heads
from tritoncomm.ulysses import UlyssesAttention

PATHS = ("torch", "triton")
LAYOUTS: dict[str, Any] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2).contiguous().transpose(0, 2),
    "sliced": lambda x: torch.cat([x, x], 2)[..., : x.shape[2]],
    "negative": lambda x: torch._neg_view(-x),
}


def shards(x: Tensor, dim: int, world: int) -> Pass:
    """Every rank's shard of a dim, one block for all ranks."""
    n, size = x.shape[dim] // world, list(x.shape)
    size[dim] = n
    block = Block(0, (world, *size), (n * x.stride(dim), *x.stride()), 0, 0, contiguous_stride((world, *size)))
    return Pass([block], [x.dtype], x.numel())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("most", [8192, 2], ids=["table", "too long a table"])
def test_pack_and_unpack_are_chunks(layout: str, path: str, most: int) -> None:
    x = LAYOUTS[layout](random_bits((4, 6, 8), torch.float32).nan_to_num())
    for dim, world in itertools.product(range(3), (1, 2)):
        over = shards(x, dim, world)
        with mock.patch.object(blocks, "MOST_SEGMENTS", most), ops.path(path):
            wire, taken, copied = over.pack([x])
            expected = torch.cat([chunk.reshape(-1) for chunk in x.chunk(world, dim)])
            assert torch.equal(bits(wire), bits(expected.resolve_neg())), (dim, world)
            assert copied == (0 if taken == "view" else 2 * x.nbytes)
            if layout == "negative":
                assert taken == "torch", "a kernel would read its memory"
            back = torch.empty_strided(x.shape, x.stride()).fill_(math.nan)
            over.unpack(wire, [back])
            assert torch.equal(bits(back), bits(x.resolve_neg())), (dim, world)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64, torch.int32, torch.complex64], ids=str)
def test_sums_are_in_order_with_one_rounding(dtype: torch.dtype, path: str) -> None:
    """Parts in one block, at distances of their own, or both; up to more than torch.sum adds in order."""
    made = torch.Generator().manual_seed(0)
    for count, kind in itertools.product((1, 2, 4, 5, 9), ("one block", "blocks", "both")):
        parts = torch.randint(-99, 99, (count, 3, 7), generator=made).to(dtype)
        parts = parts / 7 if dtype.is_floating_point else parts
        first = {"one block": count, "blocks": 0, "both": count // 2}[kind]
        listed = [Block(0, (first, 3, 7), (0, 14, 1), 2, 0, (21, 7, 1))] if first else []
        listed += [Block(0, (1, 3, 7), (0, 14, 1), 2, i * 21 * dtype.itemsize, (21, 7, 1)) for i in range(first, count)]
        out = torch.full((3, 14), 5).to(dtype)
        wide = torch.promote_types(dtype, torch.float32) if dtype.is_floating_point else dtype
        total = parts[0].to(wide)
        for part in parts[1:]:
            total = total + part.to(wide)
        with ops.path(path):
            Pass(listed, [dtype], parts.numel(), sums=True).unpack(parts.flatten(), [out])
        assert torch.equal(out[:, 2:9], total.to(dtype)), (count, kind)
        assert (out[:, :2] == 5).all()
        assert (out[:, 9:] == 5).all()


@pytest.mark.parametrize("path", PATHS)
def test_casts_and_scales_round_once(path: str) -> None:
    x = torch.randn(4, 6, dtype=torch.float64)
    for dtype, scale in itertools.product((torch.float32, torch.bfloat16), (None, 0.3)):
        block = Block(0, (2, 4, 3), (3, 6, 1), 0, 0, (12, 3, 1))
        over = Pass([block], [dtype], 24)
        with ops.path(path):
            wire, *_ = over.pack([x], scale=scale)
        value = x if scale is None else x * scale
        value = value.float() if dtype is torch.bfloat16 else value
        assert torch.equal(wire, torch.cat([half.flatten() for half in value.chunk(2, 1)]).to(dtype))
        back = torch.ones_like(x)
        with ops.path(path):
            over.unpack(wire, [back], scale=scale, accumulate=True)
        wide = torch.cat(wire.double().view(2, 4, 3).unbind(), 1)
        assert torch.equal(back, 1 + (wide if scale is None else wide * scale))


def test_which_blocks_one_cat_joins() -> None:
    side_by_side = [Block(i, (2, 3, n), (9, 3, 1), 0, 4 * at, (24, 8, 1)) for i, (n, at) in enumerate([(5, 0), (3, 5)])]
    assert Pass(side_by_side, [torch.float32] * 2, 48).joined == ((2, 3, 8), 2)
    assert Pass(side_by_side[::-1], [torch.float32] * 2, 48).joined is None
    apart = [Block(i, (2, 3, 4), (12, 4, 1), 0, 4 * at, stride) for i, (at, stride) in
             enumerate([(0, (12, 4, 1)), (24, (4, 8, 1))])]  # fmt: skip
    assert Pass(apart, [torch.float32] * 2, 48).joined is None, "of other strides"


@pytest.mark.ranks(1, 2, 4)
def test_an_exchange_of_new_sizes_in_every_call(group: ProcessGroup) -> None:
    """Counts that are new each time are a value of the call: no cache has them."""
    world, rank = group.size(), group.rank()
    entries = passes.whole_tensors.cache_info().currsize
    for turn in range(4):
        rows = [[(a + 2 * b + turn) % 3 for b in range(world)] for a in range(world)]
        sent, received = rows[rank], [rows[w][rank] for w in range(world)]
        x = torch.arange(sum(sent) * 2.0).view(-1, 2) + 100 * rank
        pack = Pass([Block(0, x.shape, x.stride(), 0, 0, (2, 1))], [x.dtype], x.numel())
        counts = (tuple(2 * n for n in side) for side in (sent, received))
        exchange = Exchange(pack, None, *counts, 8 * (sum(sent) - sent[rank]), shapes=[(sum(received), 2)])
        (out,) = exchange.run([x], group, Span("test"))
        starts = [[sum(row[:b]) for b in range(world)] for row in rows]
        expected = [
            torch.arange(sum(rows[w]) * 2.0).view(-1, 2)[starts[w][rank] :][: rows[w][rank]] + 100 * w
            for w in range(world)
        ]
        assert torch.equal(out, torch.cat(expected))
        assert out._base is None
    assert passes.whole_tensors.cache_info().currsize == entries


@pytest.mark.ranks(2)
def test_a_wrapper_is_read_where_its_data_is(group: ProcessGroup) -> None:
    """Of a slice the wrapper itself says that it starts at the beginning of its memory."""
    calls: dict[str, Any] = {
        "rows": lambda x: collective.split_reduce_scatter(x, 0, group),
        "columns": lambda x: collective.split_reduce_scatter([x, x], (1, 0), group)[0],
        "wire": lambda x: collective.reduce_scatter(x, 1, group, sizes=[1, 3], wire=torch.bfloat16),
        "uneven": lambda x: collective.reduce_scatter(x, 1, group, sizes=[1, 3]),
        "all_reduce": lambda x: collective.all_reduce(x.clone(), group, wire=torch.bfloat16),
        "all_to_all": lambda x: mappings.all_to_all_dims(x, 1, 0, group),
        "heads": lambda x: UlyssesAttention(group, attention=lambda q, k, v: q + v)(*[x.view(1, 4, 4, 1)] * 3),
        "by_heads": lambda x: by_heads(lambda q: q.cumsum(1), group)(x.view(1, 4, 4, 1)),
    }
    for (name, call), dtype in itertools.product(calls.items(), (torch.float32, torch.float64)):
        if dtype is torch.float64 and name in ("wire", "all_reduce"):
            continue
        x = (torch.arange(48) + group.rank()).to(dtype).view(6, 8)[1:5, 2:6]
        for path in PATHS:  # no kernel can read it
            with ops.path(path):
                found = call(tensor_of("wrapper", x, group))
            assert torch.equal(found.inside, call(x)), (name, dtype, path)


def test_blocks_that_do_not_cover_their_wire() -> None:
    """Bytes for elements and elements for bytes, gaps, overlaps, and a wire that is too short or too long."""
    size, stride, dtype = (2, 3), (3, 1), torch.float32

    def made(places: list[int], elements: int, wire_stride: tuple[int, ...] = (3, 1)) -> Pass:
        return Pass([Block(0, size, stride, 0, at, wire_stride) for at in places], [dtype], elements)

    made([0, 24], 12)
    made([24, 0], 12)
    made([0, 12], 12, (6, 1))
    Pass([Block(0, size, stride, 0, 0, (3, 1)), Block(PADDING, (8,), (0,), 0, 24, (1,))], [dtype], 8)
    Pass([Block(0, size, stride, 0, 0, (3, 1))] * 2, [dtype], 0)  # of bytes, whose number it does not know
    Pass([Block(0, (0, 3), stride, 0, 0, (3, 1)), Block(0, size, stride, 0, 0, (3, 1))], [dtype], 6)
    for places, elements, wire_stride, words in (
        ([0, 6], 12, (3, 1), "block 1 begins inside of an element, at byte 6"),
        ([0, 4], 12, (3, 1), "blocks 0 and 1 overlap at element 1 of a wire of 12"),
        ([0, 48], 12, (3, 1), "no block has element 6 of a wire of 12"),
        ([0, 24], 13, (3, 1), "no block has element 12 of a wire of 13"),
        ([0, 24], 11, (3, 1), "block 1 ends at element 12 of a wire of 11"),
        ([0, 0], 12, (3, 1), "blocks 0 and 1 overlap at element 0"),
        ([0], 6, (2, 1), "blocks 0 and 0 overlap at element 2"),
        ([0, 12], 12, (12, 4), "no block has element 1 of a wire of 12"),
        ([], 4, (3, 1), "no block has element 0 of a wire of 4"),
    ):
        with pytest.raises(ArgumentError, match=f"pass: {words}.*wire_byte counts bytes"):
            made(places, elements, wire_stride)
    many = [4 * i for i in range(65)]
    blocks = [Block(0, (1,), (1,), 0, at, (1,)) for at in [*many[:-1], 0]]
    Pass(blocks, [dtype], 65)  # more than are looked at
    with p2p.check(), pytest.raises(ArgumentError, match="blocks 0 and 64 overlap"):
        Pass(blocks, [dtype], 65)
    rows = [Block(0, (1 << 15, 1), (2, 1), 0, 0, (2, 1))]
    Pass(rows, [dtype], 1 << 16)  # rows, too
    with p2p.check(), pytest.raises(ArgumentError, match="no block has element 1"):
        Pass(rows, [dtype], 1 << 16)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4), st.integers(0, 2), st.booleans(), st.integers(-3, 3))
def test_drawn_blocks_that_cover_their_wire_or_do_not(
    world: int, rows: int, columns: int, dim: int, is_moved: bool, by: int
) -> None:
    """Against marks on a list."""
    size, world = (rows, columns, 2), world + 1
    shape = [*size]
    shape[dim] *= world
    dense = contiguous_stride(tuple(shape))
    blocks = [Block(0, size, dense, 0, 4 * rank * size[dim] * dense[dim], dense) for rank in range(world)]
    if is_moved:
        blocks[-1] = blocks[-1]._replace(wire_byte=max(blocks[-1].wire_byte + 4 * by, 0))
    elements, marks = math.prod(shape), list[int]()
    for block in blocks:
        for place in itertools.product(*map(range, block.size)):
            marks.append(block.wire_byte // 4 + sum(a * b for a, b in zip(place, block.wire_stride, strict=True)))
    with nullcontext() if sorted(marks) == list(range(elements)) else pytest.raises(ArgumentError, match=r"^pass: "):
        Pass(blocks, [torch.float32], elements)
