"""Copies and sums of CPU tensors: as few strided copies as strides allow, and sums in blocks, bit for bit."""

import pytest
import torch
from bits import bits
from tritoncomm_kernels import Segment, Segments, torch_path
from tritoncomm_kernels.segments import checked_segments, layouts_of

WORLD, ROWS, EACH = 8, 6, 5
RAGGED = [Segment(0, 5 * w, 2, 3, 40, at) for w, at in ((0, 0), (1, 24), (2, 48), (4, 96), (5, 121), (7, 160))]


def shards(itemsize: int, first: int = 0) -> list[Segment]:
    """The columns of ``[ROWS, WORLD * EACH]`` that go to each rank, one after the other, from byte ``first`` on."""
    nbytes = ROWS * EACH * itemsize
    return [Segment(0, EACH * w, ROWS, EACH, WORLD * EACH, first + nbytes * w) for w in range(WORLD)]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("first", [0, 3])
def test_shards_of_a_tensor_are_one_copy(dtype: torch.dtype, first: int) -> None:
    x = torch.randn(ROWS, WORLD * EACH).to(dtype)
    table = Segments(shards(dtype.itemsize, first), [dtype])
    wire = torch.full((table.wire_bytes,), 7, dtype=torch.uint8)
    assert len(checked_segments("gather_segments", table, layouts_of(wire, [x]), False).copies) == 1
    torch_path.gather_segments([x], wire, table)
    assert wire[:first].tolist() == [7] * first
    by_rank = x.view(ROWS, WORLD, EACH).transpose(0, 1).contiguous()
    assert torch.equal(wire[first:], bits(by_rank).view(-1))
    back = torch.zeros_like(x)
    torch_path.scatter_segments(wire, [back], table)
    assert torch.equal(bits(back), bits(x))


def test_segments_at_other_distances_are_copies_of_their_own() -> None:
    x = torch.arange(80, dtype=torch.int8).view(2, 40)
    table = Segments(RAGGED, [torch.int8])
    wire = torch.zeros(table.wire_bytes, dtype=torch.uint8)
    copies = checked_segments("gather_segments", table, layouts_of(wire, [x]), False).copies
    assert [(each.wire, each.size[0]) for each in copies] == [(0, 3), (96, 2), (160, 1)]
    torch_path.gather_segments([x], wire, table)
    for segment in RAGGED:
        at = segment.offset
        expected = [*range(at, at + 3), *range(40 + at, 43 + at)]
        assert wire[segment.wire : segment.wire + 6].tolist() == expected


@pytest.mark.parametrize("elements", [1, 7, 8, 20])
@pytest.mark.parametrize("parts", [1, 2, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_blocks_of_a_sum(
    elements: int, parts: int, dtype: torch.dtype, scale: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = torch.randn(parts, elements).to(dtype)
    wire[:, 0] = -0.0
    out = torch.full((elements,), float("nan"), dtype=dtype)
    wide = torch.promote_types(dtype, torch.float32)
    total = wire[0].to(wide)
    for part in wire[1:]:
        total = total + part
    monkeypatch.setattr(torch_path, "_SUMMED", 4)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    torch_path.reduce(wire, out, scale)
    expected = total if scale is None else total * torch.tensor(scale, dtype=wide)
    assert torch.equal(bits(out), bits(expected.to(dtype)))
