"""Blocks of tensors as segments, gathered and scattered on the path that is chosen."""

import random
from typing import Any

import numpy as np
import pytest
import torch
from bits import bits, random_bits
from torch import Tensor
from tritoncomm_kernels import Segment

from tritoncomm import ShapeError
from tritoncomm.core import ops
from tritoncomm.core.blocks import MOST_SEGMENTS, Block, Blocks, table_of
from tritoncomm.core.passes import TablePass

LAYOUTS = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.transpose(0, 2),
    "columns": lambda x: x[..., 1:],
    "rows": lambda x: x[:, 1:],
    "strided": lambda x: x[:, :, ::2],
    "expanded": lambda x: x[:, :1].expand(-1, 3, -1),
    "flat": lambda x: x.view(-1),
    "scalar": lambda x: x[0, 0, 0],
}


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks(layout: str, path: str) -> None:
    x: Tensor = LAYOUTS[layout](random_bits((4, 5, 6), torch.bfloat16))
    dice = random.Random(0)
    for _ in range(20 if path == "torch" else 5):
        start = [dice.randint(0, size) for size in x.shape]
        extent = [dice.randint(0, size - at) for size, at in zip(x.shape, start, strict=True)]
        block = x[tuple(slice(at, at + n) for at, n in zip(start, extent, strict=True))]
        table = table_of([Block.of_box(0, x.shape, x.stride(), start, extent, 3)], [x.dtype])
        assert table is not None
        by_table = TablePass(table, (1,))  # of the second of a call's tensors
        assert table.wire_bytes == (3 + block.nbytes if block.numel() else 0)
        wire = torch.full((3 + block.nbytes,), 90, dtype=torch.uint8)
        with ops.path(path):
            assert by_table.pack([wire, x], wire).path == path
        assert torch.equal(wire[3:], bits(torch.cat([block.reshape(-1)])))
        assert (wire[:3] == 90).all()
        if layout != "expanded":
            back = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).fill_(7)
            expected = back.clone()
            expected[tuple(slice(at, at + n) for at, n in zip(start, extent, strict=True))] = block
            with ops.path(path):
                assert by_table.unpack(wire, [wire, back]).path == path
            assert torch.equal(bits(back), bits(expected))


def segments(*blocks: Block, itemsize: int = 2) -> list[Segment]:
    return Blocks.of(blocks).segments(np.full(len(blocks), itemsize)) or []


def test_neighbouring_dims_are_coalesced() -> None:
    def of_box(*box: Any, itemsize: int = 2) -> list[Segment]:
        return segments(Block.of_box(*box), itemsize=itemsize)

    assert of_box(3, (6, 10), (10, 1), (2, 3), (2, 5), 0) == [Segment(3, 23, 2, 5, 10, 0)]
    assert of_box(0, (4, 5, 6), (30, 6, 1), (1, 0, 0), (2, 5, 6), 8) == [Segment(0, 30, 1, 60, 0, 8)]
    assert of_box(0, (4, 5, 6), (30, 6, 1), (0, 1, 0), (4, 2, 6), 0) == [Segment(0, 6, 4, 12, 30, 0)]
    assert of_box(0, (2, 5, 6), (30, 6, 1), (0, 1, 2), (2, 2, 3), 0) == [
        Segment(0, 8, 2, 3, 6, 0),
        Segment(0, 38, 2, 3, 6, 12),
    ]
    assert of_box(0, (6, 4), (1, 6), (0, 0), (6, 4), 0)[1] == Segment(0, 6, 6, 1, 1, 2, 4)
    tokens = of_box(0, (2, 100, 3, 4), (1200, 4, 400, 1), (0, 0, 0, 0), (2, 100, 3, 4), 0)
    assert len(tokens) == 6, "the longest dim is the rows of a segment"
    assert tokens[1] == Segment(0, 400, 100, 4, 4, 8, 12)


def test_blocks_strided_on_both_sides() -> None:
    assert segments(Block(1, (2, 3, 4), (12, 4, 1), 5, 6, (24, 8, 1))) == [Segment(1, 5, 6, 4, 4, 6, 8)]
    assert segments(Block(1, (3, 0), (1, 1), 0, 0, (1, 1))) == []
    assert segments(Block(1, (), (), 3, 8, ())) == [Segment(1, 3, 1, 1, 0, 8)]
    apart = Block(1, (2, 3), (3, 1), 0, 0, (8, 1))  # one stride walks the tensor, two walk the wire
    assert segments(apart, Block(0, (4,), (1,), 2, 100, (1,))) == [
        Segment(1, 0, 2, 3, 3, 0, 8), Segment(0, 2, 1, 4, 0, 100),
    ]  # fmt: skip


def test_a_table_of_too_many_segments_is_none() -> None:
    assert len(segments(Block(0, (MOST_SEGMENTS + 1, 1, 2), (4, 1, 3), 0, 0, (4, 1, 2)))) == 2, (
        "rows by the longest dim"
    )
    square = Block(0, (100, 100, 3), (1000, 7, 2), 0, 0, (300, 3, 1))
    assert len(segments(square)) == 300
    assert len(Blocks.of([square] * 27).segments(np.ones(27, np.int64), MOST_SEGMENTS) or ()) == 8100
    assert table_of([square] * 28, [torch.int8]) is None
    assert table_of([], [torch.int8]) is not None


@pytest.mark.parametrize(("start", "extent"), [((0, 0), (3, 5)), ((0, -1), (1, 1)), ((2, 0), (1, 1)), ((0,), (1,))])
def test_blocks_outside_are_refused(start: tuple[int, ...], extent: tuple[int, ...]) -> None:
    with pytest.raises(ShapeError, match="not inside"):
        Block.of_box(0, (2, 4), (4, 1), start, extent, 0)
