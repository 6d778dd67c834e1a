"""Many segments between several tensors and one wire, against the definition one element at a time."""

import copy
import pickle
import random
from itertools import pairwise
from typing import Any

import pytest
import torch
from bits import bits, random_bits
from kernel_cases import assert_same_numbers, canaries_live, guarded
from torch import Tensor
from tritoncomm_kernels import PADDING, Segment, Segments, reference

MODULES = [reference]
COPIED = (torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.float8_e4m3fn)


def drawn(seed: int, dtypes: tuple[torch.dtype, ...], aligned: bool, device: Any = "cpu") -> tuple[list[Tensor], Any]:
    """Tensors with gaps in them and a table: empty segments, touching ones, gaps and odd bytes, padding in between."""
    dice = random.Random(seed)
    shapes = [(dice.randint(1, 9), dice.randint(1, 70), dice.randint(0, 5)) for _ in dtypes]
    tensors = [
        random_bits((rows, row + gap), dtype, seed + i, device)[:, :row]
        for i, (dtype, (rows, row, gap)) in enumerate(zip(dtypes, shapes, strict=True))
    ]
    blocks = []
    for i, (rows, row, _) in enumerate(shapes):
        edges = sorted({0, rows, *(dice.randint(0, rows) for _ in range(2))})
        column = dice.randint(0, row)
        for first, last in pairwise(edges):
            stride = tensors[i].stride(0)
            blocks.append((i, first * stride, last - first, column, stride))
            blocks.append((i, first * stride + column, last - first, row - column, stride))
    blocks += [(PADDING, 0, dice.randint(0, 3), dice.randint(0, 20), 0) for _ in range(3)]
    dice.shuffle(blocks)
    table, at = [], 0
    for i, offset, rows, row, stride in blocks:
        size = 1 if i == PADDING else dtypes[i].itemsize
        step = size if aligned else 1
        at = -(-(at + dice.choice((0, 0, 1, 16))) // step) * step
        table.append((i, offset, rows, row, stride, at))
        at += rows * row * size
    return tensors, table


def by_index(tensors: list[Tensor], wire: Tensor, table: Any, into: bool) -> None:
    """The definition, one element at a time, in bytes."""
    for i, offset, rows, row, stride, at in table:
        if i == PADDING:
            if into:
                wire[at : at + rows * row] = 0
            continue
        size = tensors[i].element_size()
        memory = tensors[i].as_strided((offset + (rows - 1) * stride + row,), (1,)) if rows and row else tensors[i]
        for r in range(rows):
            for k in range(row):
                first = at + (r * row + k) * size
                element = memory[offset + r * stride + k : offset + r * stride + k + 1]
                if into:
                    wire[first : first + size] = element.view(torch.uint8)
                else:
                    element.view(torch.uint8)[:] = wire[first : first + size]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("seed", range(6))
def test_copies_of_any_bits(module: Any, seed: int) -> None:
    tensors, table = drawn(seed, COPIED, aligned=seed % 2 == 0)
    segments = Segments(table, COPIED)
    wire, raw = guarded((segments.wire_bytes,), torch.uint8)
    expected = wire.clone()
    by_index(tensors, expected, table, into=True)
    copied = module.gather_segments(tensors, wire, segments)
    assert torch.equal(wire, expected)
    assert canaries_live(raw)
    padding = sum(s.rows * s.row for s in segments.segments if s.tensor == PADDING)
    assert copied == 2 * segments.nbytes - padding
    wire = random_bits((segments.wire_bytes,), torch.uint8, seed)
    targets, twins = ([torch.empty_strided(x.shape, x.stride(), dtype=x.dtype) for x in tensors] for _ in range(2))
    for x in (*targets, *twins):
        x.untyped_storage().fill_(0x7F)
    by_index(twins, wire, table, into=False)
    assert module.scatter_segments(wire, targets, segments) == 2 * (segments.nbytes - padding)
    for x, twin in zip(targets, twins, strict=True):
        assert torch.equal(bits(x), bits(twin))


@pytest.mark.parametrize("module", MODULES)
def test_casts_scales_and_sums(module: Any) -> None:
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.float32)
    carried = (torch.bfloat16, torch.float32, torch.float16, torch.bfloat16, torch.float32)
    tensors, table = drawn(3, kinds, aligned=True)
    tensors = [torch.randn(x.shape).to(x.dtype) for x in tensors]
    table = [(i, o, r, k, tensors[i].stride(0) if i >= 0 else 0, 0) for i, o, r, k, _, _ in table]
    table = [(i, 0 if i < 0 else o, r, k, s, 128 * n * 8) for n, (i, o, r, k, s, _) in enumerate(table) if i >= 0]
    table = [one for one in table if one[1] + (one[2] - 1) * one[4] + one[3] <= tensors[one[0]].numel()]
    segments = Segments(table, carried)
    for scale in (None, 0.3):
        wire = torch.zeros(segments.wire_bytes, dtype=torch.uint8)
        module.gather_segments(tensors, wire, segments, scale=scale)
        for (i, offset, rows, row, stride, _), (start, end) in zip(segments.segments, segments.spans, strict=True):
            wide = torch.float64 if torch.float64 in (kinds[i], carried[i]) else torch.float32
            value = tensors[i].as_strided((rows, row), (stride, 1), offset).to(wide) * (scale or 1.0)
            value = value.float() if carried[i].itemsize == 2 else value
            assert_same_numbers(wire[start:end].view(carried[i]).view(rows, row), value.to(carried[i]))
        totals = [x.clone() for x in tensors]
        module.scatter_segments(wire, totals, segments, scale=scale, accumulate=True)
        for (i, offset, rows, row, stride, _), (start, end) in zip(segments.segments, segments.spans, strict=True):
            wide = torch.float64 if torch.float64 in (kinds[i], carried[i]) else torch.float32
            value = wire[start:end].view(carried[i]).view(rows, row).to(wide) * (scale or 1.0)
            value = tensors[i].as_strided((rows, row), (stride, 1), offset).to(wide) + value
            value = value.float() if kinds[i].itemsize == 2 else value
            assert_same_numbers(totals[i].as_strided((rows, row), (stride, 1), offset), value.to(kinds[i]))


def test_tables_are_values() -> None:
    rows = [(0, 1, 2, 3, 8, 0), (1, 0, 0, 5, 5, 7), (PADDING, 0, 1, 4, 0, 24)]
    table = Segments(rows, [torch.float32, torch.int8])
    assert table == Segments(list(rows), (torch.float32, torch.int8))
    assert hash(table) == hash(Segments(rows, (torch.float32, torch.int8)))
    assert table != Segments(rows, (torch.int32, torch.int8))
    assert table.segments == (Segment(0, 1, 2, 3, 8, 0), Segment(PADDING, 0, 1, 4, 0, 24)), "empty ones are dropped"
    assert (table.wire_bytes, table.nbytes, table.spans) == (28, 28, ((0, 24), (24, 28)))
    for other in (pickle.loads(pickle.dumps(table)), copy.deepcopy(table)):
        assert other == table
        assert hash(other) == hash(table)
    assert (Segments([], []).wire_bytes, Segments([], []).nbytes) == (0, 0)


@pytest.mark.parametrize(
    "rows",
    [
        [(2, 0, 1, 1, 1, 0)],
        [(-2, 0, 1, 1, 1, 0)],
        [(0, -1, 1, 1, 1, 0)],
        [(0, 0, 1, 1, 1, -4)],
        [(0, 0, 1, 4, 4, 0), (1, 0, 1, 1, 1, 15)],
        [(0, 0, 1, 4, 4, 0), (PADDING, 0, 1, 1, 1, 3)],
    ],
)
def test_bad_tables_are_refused(rows: Any) -> None:
    with pytest.raises(ValueError, match="segment"):
        Segments(rows, [torch.float32, torch.float32])


@pytest.mark.parametrize("module", MODULES)
def test_bad_calls_are_refused(module: Any) -> None:
    x, wire = torch.randn(4, 8), torch.empty(128, dtype=torch.uint8)
    one = Segments([(0, 0, 4, 8, 8, 0)], [torch.float32])
    gather, scatter = module.gather_segments, module.scatter_segments
    bad = [
        (ValueError, "too short", lambda: gather([x], wire[1:], one)),
        (ValueError, "ends beyond", lambda: gather([x[:, 1:]], wire, Segments([(0, 1, 4, 8, 8, 0)], one.dtypes))),
        (ValueError, "ends beyond", lambda: scatter(wire, [torch.empty(0)], one)),
        (ValueError, "2 tensors", lambda: gather([x, x], wire, one)),
        (ValueError, "contiguous", lambda: gather([x], torch.empty(256, dtype=torch.uint8)[::2], one)),
        (ValueError, "on cpu", lambda: gather([x.to("meta")], wire, one)),
        (ValueError, "lazy", lambda: gather([torch.empty(4, 8, dtype=torch.complex64).conj().imag], wire, one)),
        (ValueError, "overlap", lambda: scatter(wire, [x], Segments([(0, 0, 4, 3, 2, 0)], one.dtypes))),
        (ValueError, "overlap", lambda: scatter(wire, [x], two)),
        (TypeError, "cast", lambda: gather([x.int()], wire, one)),
        (TypeError, "scale", lambda: gather([x.int()], wire, Segments(one.segments, [torch.int32]), scale=2.0)),
        (TypeError, "sum", lambda: scatter(wire, [x > 0], Segments(one.segments, [torch.bool]), accumulate=True)),
        (ValueError, "aligned", lambda: gather([x.double()], wire, Segments([(0, 0, 1, 8, 8, 2)], one.dtypes))),
    ]
    two = Segments([(0, 0, 3, 3, 8, 0), (0, 10, 1, 3, 8, 64)], one.dtypes)
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()
    gather([x], wire, two)  # read twice
    scatter(wire, [x], Segments([(0, 0, 3, 3, 8, 0), (0, 3, 3, 5, 8, 36)], one.dtypes))  # interleaved


@pytest.mark.parametrize("module", MODULES)
def test_nothing_to_copy(module: Any) -> None:
    empty = Segments([(0, 0, 0, 4, 4, 0), (0, 0, 4, 0, 4, 0)], [torch.float32])
    assert module.gather_segments([torch.empty(0)], torch.empty(0), empty) == 0
    assert module.scatter_segments(torch.empty(0), [torch.empty(0, 3)], empty) == 0
    assert module.gather_segments([], torch.empty(3), Segments([], [])) == 0


@pytest.mark.parametrize("module", MODULES)
def test_parameters_and_wires_of_other_dtypes(module: Any) -> None:
    """Autograd records nothing, and a wire that starts at an odd byte of its memory serves as well."""
    x = torch.nn.Parameter(torch.randn(4, 4))
    table = Segments([(0, 4, 2, 4, 4, 1)], [torch.float32])
    wire = torch.zeros(64, dtype=torch.int8)[3:]
    module.gather_segments([x], wire, table)
    assert torch.equal(wire[1:33].view(torch.uint8), bits(x.detach()[1:3]).view(-1))
    module.scatter_segments(wire.zero_(), [x], table)
    assert not x[1:3].any()
    assert x.is_leaf
    assert x[:1].all()
