"""Many segments between several tensors and one wire, against the definition one element at a time."""

import copy
import pickle
import random
from itertools import pairwise
from typing import Any

import naive
import numpy as np
import pytest
import torch
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from devices import Device
from kernel_cases import assert_same_numbers, canaries_live, guarded, in_every_way
from torch import Tensor
from tritoncomm_kernels import PADDING, Segment, Segments, device_table, segment_copy, segment_tiles, torch_path
from tritoncomm_kernels.segments import layouts_of

MODULES = [kernels, torch_path]
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
        gap = dice.choice((0, 0, 1, 8))
        table.append((i, offset, rows, row, stride, at, row + gap if gap else 0))
        at += max(rows * (row + gap) - gap, 0) * size
    return tensors, table


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("seed", range(6))
def test_copies_of_any_bits(device: Device, module: Any, seed: int) -> None:
    tensors, table = drawn(seed, COPIED, seed % 2 == 0, device.at)
    segments = Segments(table, COPIED)
    wire, raw = guarded((segments.wire_bytes,), torch.uint8, device.at)
    wire.fill_(0x7F)  # gaps stay as they are
    expected = naive.here(wire)
    naive.gather_segments([naive.here(x) for x in tensors], expected, segments)
    copied = module.gather_segments(tensors, wire, segments)
    assert torch.equal(wire.cpu(), expected)
    assert canaries_live(raw)
    padding = sum(s.rows * s.row for s in segments.segments if s.tensor == PADDING)
    assert copied == 2 * segments.nbytes - padding
    wire = random_bits((segments.wire_bytes,), torch.uint8, seed, device.at)
    targets, twins = (
        [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device.at) for x in tensors] for _ in range(2)
    )
    for x in (*targets, *twins):
        x.untyped_storage().fill_(0x7F)
    twins = [naive.here(x) for x in twins]
    naive.scatter_segments(naive.here(wire), twins, segments)
    assert module.scatter_segments(wire, targets, segments) == 2 * (segments.nbytes - padding)
    for x, twin in zip(targets, twins, strict=True):
        assert torch.equal(bits(x.cpu()), bits(twin))


CASTS = [
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float64, torch.bfloat16),
    (torch.float32, torch.float32),
]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_casts_scales_and_sums(device: Device, module: Any, scale: float | None) -> None:
    kinds, carried = zip(*CASTS, strict=True)
    made = torch.Generator().manual_seed(0)
    tensors = [torch.randn(9, 72, generator=made).to(device.at, dtype) for dtype in kinds]
    blocks = [(0, 9, 0, 72), (0, 8, 0, 24), (1, 3, 1, 5), (2, 2, 40, 32), (8, 1, 3, 60)]
    ends = [1, 3, 8, 8 * 72, 8 * 24 * 8]
    table, at = [], 0
    for (top, rows, left, row), end in zip(blocks, ends, strict=True):
        for i, dtype in enumerate(carried):
            table.append((i, top * 72 + left, rows, row, 72, at))
            at = -(-(at + rows * row * dtype.itemsize) // 8) * 8 + end % 2 * 8
    table = [one for n, one in enumerate(table) if n // len(CASTS) != 0] if scale else table[: len(CASTS)]
    segments = Segments(table, carried)
    wire = torch.zeros(segments.wire_bytes, dtype=torch.uint8, device=device.at)
    module.gather_segments(tensors, wire, segments, scale=scale)
    for (i, offset, rows, row, stride, *_), (start, end) in zip(segments.segments, segments.spans, strict=True):
        value = tensors[i].as_strided((rows, row), (stride, 1), offset)
        value = value.to(wide(i)) * (1.0 if scale is None else scale)
        assert_same_numbers(wire[start:end].view(carried[i]).view(rows, row), rounded(value, carried[i]))
    if scale is not None:  # whose rows overlap in the tensors
        table = [one for n, one in enumerate(table) if n // len(CASTS) in (1, 2)]
        segments = Segments(table, carried)
    totals = [x.clone() for x in tensors]
    module.scatter_segments(wire, totals, segments, scale=scale, accumulate=True)
    for (i, offset, rows, row, stride, *_), (start, end) in zip(segments.segments, segments.spans, strict=True):
        value = wire[start:end].view(carried[i]).view(rows, row).to(wide(i)) * (1.0 if scale is None else scale)
        value = tensors[i].as_strided((rows, row), (stride, 1), offset).to(wide(i)) + value
        assert_same_numbers(totals[i].as_strided((rows, row), (stride, 1), offset), rounded(value, kinds[i]))


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8, torch.int16, torch.int64], ids=str)
def test_sums_of_integers(device: Device, dtype: torch.dtype) -> None:
    """In their own type, in wide units and narrow ones, with rows and without."""
    tensors = [random_bits((9, 48), dtype, i, device.at) for i in range(2)]
    size = dtype.itemsize
    rows = [(0, 0, 1, 33, 33, 0), (1, 0, 9, 16, 48, 64 * size), (1, 17, 9, 5, 48, 240 * size)]
    table = Segments(rows, [dtype, dtype])
    wire = random_bits((table.wire_bytes,), torch.uint8, 5, device.at)
    _, *totals = in_every_way(
        lambda module, x, *y: module.scatter_segments(x, y, table, accumulate=True), wire, *tensors
    )
    for one, before in zip(totals, tensors, strict=True):
        assert not torch.equal(one, before)


SUMMED = [(torch.bfloat16, None), (torch.float32, 0.3), (torch.float64, None), (torch.int8, None)]


@pytest.mark.parametrize(("dtype", "scale"), SUMMED, ids=str)
@pytest.mark.parametrize("accumulate", [False, True])
def test_rows_that_segments_share_are_added_up(
    device: Device, dtype: torch.dtype, scale: float | None, accumulate: bool
) -> None:
    """In the order of the table, with one rounding, next to bits that are copied; parts at several strides."""
    made, shape = torch.Generator().manual_seed(3), (6, 40)
    tensors = [(torch.randn(shape, generator=made) * 40).to(device.at, dtype) for _ in range(2)]
    size, row, column = dtype.itemsize, 16, 17
    starts, steps = (16 * size, 300 * size, 601 * size), (0, 24, 40)
    rows = [(0, 0, 6, row, 40, at, step) for at, step in zip(starts, steps, strict=True)]
    rows += [(0, column, 6, 9, 40, (900 + 60 * part) * size) for part in range(2)]
    rows += [(1, 0, 1, 33, 33, 1100 * size), (1, 40, 5, 40, 40, 1200 * size)]
    rows += [(1, 33, 1, 7, 7, (1500 + 7 * part) * size) for part in range(7)]
    table = Segments(rows, [dtype, dtype])
    wire = (torch.randn(table.wire_bytes // size, generator=made) * 40).to(device.at, dtype)
    options = {"scale": scale, "accumulate": accumulate, "sums": True}
    _, *totals = in_every_way(lambda module, x, *y: module.scatter_segments(x, y, table, **options), wire, *tensors)
    assert torch.equal(totals[0][:, 26:], tensors[0][:, 26:])


def test_sums_and_copies_are_one_launch() -> None:
    """Of one dtype; another dtype's sums are a launch of their own."""
    tensors = [torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16), torch.zeros(64, dtype=torch.int8)]
    layouts = layouts_of(torch.zeros(4096, dtype=torch.uint8), tensors)
    rows = [(0, 0, 1, 32, 32, 256 * part) for part in range(2)] + [(2, 0, 1, 64, 64, 1024), (0, 32, 1, 32, 32, 2048)]
    more = [(1, 0, 1, 32, 32, 3072 + 256 * part) for part in range(3)]
    for some, names in ((rows, [("None", "fp32")]), (rows + more, [("None", "fp32"), ("fp32",)])):
        table = Segments(some, [x.dtype for x in tensors])
        launches = segment_copy._plan("scatter_segments", table, layouts, None, 0, False, False, True)[0]
        assert [tuple(map(str, launch.constants["WIDE"])) for launch, _ in launches] == names
    with pytest.raises(ValueError, match="overlap and cannot be written"):
        segment_copy._plan("scatter_segments", Segments(rows, table.dtypes), layouts, None, 0, False, False)


def wide(i: int) -> torch.dtype:
    return torch.float64 if torch.float64 in CASTS[i] else torch.float32


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    return (x.float() if dtype.itemsize == 2 else x).to(dtype)


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


@pytest.mark.parametrize("seed", range(6))
def test_a_table_keeps_every_row(seed: int) -> None:
    """All but the empty ones, in their order: what is copied is what was given."""
    _, rows = drawn(seed, COPIED * 3, aligned=seed % 2 == 0)
    kept = [row for row in rows if row[2] and row[3]]
    assert len(kept) > 40
    for segment, (*given, step) in zip(Segments(rows, COPIED * 3).segments, kept, strict=True):
        assert [*segment[:6]] == given
        # A stride of the wire that follows from the rest is 0.
        assert segment.wire_stride == (0 if given[2] == 1 or step == given[3] else step)


@pytest.mark.parametrize(
    "rows",
    [
        [(2, 0, 1, 1, 1, 0)],
        [(-2, 0, 1, 1, 1, 0)],
        [(0, -1, 1, 1, 1, 0)],
        [(0, 0, 1, 1, 1, -4)],
        [(0, 0, 1, 4, 4, 0), (1, 0, 1, 1, 1, 15)],
        [(0, 0, 1, 4, 4, 0), (PADDING, 0, 1, 1, 1, 3)],
        [(0, 0, 3, 2, 2, 0, -3)],
        [(0, 0, 3, 2, 2, 0, 1)],
        [(0, 0, 3, 2, 2, 0, 4), (1, 0, 1, 1, 1, 20)],
        [(0, 0, 3, 2, 2, 0, 4), (1, 0, 2, 3, 3, 8, 4)],
        # Each number beyond an int64, also one that nothing is multiplied by.
        *[[(0, *(2**70 if i == wrong else n for i, n in enumerate((0, 1, 1, 1, 0, 0))))] for wrong in range(6)],
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
        (ValueError, "contiguous", lambda: gather([x], torch.empty(1, dtype=torch.uint8).expand(128), one)),
        (ValueError, "contiguous", lambda: scatter(torch.empty(1, dtype=torch.uint8).expand(128), [x], one)),
        (ValueError, "meta", lambda: gather([x.to("meta")], wire, one)),
        (ValueError, "lazy", lambda: gather([torch.empty(4, 8, dtype=torch.complex64).conj().imag], wire, one)),
        (ValueError, "overlap", lambda: scatter(wire, [x], Segments([(0, 0, 4, 3, 2, 0)], one.dtypes))),
        (ValueError, "overlap", lambda: scatter(wire, [x], two)),
        (TypeError, "cast", lambda: gather([x.int()], wire, one)),
        (TypeError, "scale", lambda: gather([x.int()], wire, Segments(one.segments, [torch.int32]), scale=2.0)),
        (TypeError, "sum", lambda: scatter(wire, [x > 0], Segments(one.segments, [torch.bool]), accumulate=True)),
        (TypeError, "sum", lambda: scatter(wire, [x > 0], Segments(twice, [torch.bool]), sums=True)),
        (ValueError, "overlap", lambda: scatter(wire, [x], Segments(twice, one.dtypes))),
        (
            ValueError,
            "overlap",
            lambda: scatter(wire, [x], Segments([*twice, (0, 1, 1, 3, 3, 64)], one.dtypes), sums=True),
        ),
        (  # rows at another distance are no parts of one sum
            ValueError,
            "overlap",
            lambda: scatter(wire, [x], Segments([(0, 0, 2, 2, 4, 0), (0, 0, 2, 2, 8, 16)], one.dtypes), sums=True),
        ),
        (ValueError, "aligned", lambda: gather([x.double()], wire, Segments([(0, 0, 1, 8, 8, 2)], one.dtypes))),
    ]
    two = Segments([(0, 0, 3, 3, 8, 0), (0, 10, 1, 3, 8, 64)], one.dtypes)
    twice = [(0, 0, 1, 4, 4, 0), (0, 0, 1, 4, 4, 16)]
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


def same_in_every_way(tensors: list[Tensor], segments: Segments) -> None:
    """Both directions, bit for bit, surroundings included."""
    wire = torch.full((segments.wire_bytes + 7,), 0x7F, dtype=torch.uint8, device=tensors[0].device)
    wire, *_ = in_every_way(lambda module, y, *x: module.gather_segments(x, y, segments), wire, *tensors)
    targets = [torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device) for x in tensors]
    for x in targets:
        x.untyped_storage().fill_(0x7F)
    in_every_way(lambda module, x, *y: module.scatter_segments(x, y, segments), wire, *targets)


def test_addresses_of_many_tensors(device: Device) -> None:
    """Beyond 16 tensors a list on the device, up to 16 arguments of the kernel."""
    for count in (15, 16, 17, 40):
        tensors = [random_bits((3, 5 + i), torch.bfloat16, i, device.at) for i in range(count)]
        rows = [(i, 1, 3, 4, 5 + i, 24 * i) for i in range(count)]
        same_in_every_way(tensors, Segments(rows, [torch.bfloat16] * count))


@pytest.mark.parametrize("shift", [1, *(pytest.param(each, marks=pytest.mark.slow) for each in (0, 8))])
def test_segments_of_many_programs(device: Device, shift: int) -> None:
    """Long ones, long rows, rows of one element and tiny ones, so that records begin in the middle of rows."""
    x = random_bits((11_000 + shift,), torch.int8, 0, device.at)[shift:]
    y = random_bits((70, 1000), torch.bfloat16, 1, device.at)
    z = random_bits((40, 33), torch.float32, 2, device.at)
    rows = [(0, 3, 1, 9_000, 9_000, 48), (1, 7, 70, 980, 1000, 80_000), (2, 0, 40, 31, 33, 300_000)]
    rows += [(2, 31, 40, 1, 33, 310_000), (2, 32, 20, 1, 33, 311_000)]
    rows += [(0, 9_100 + 9 * i, 1, i % 8, 8, 320_000 + 11 * i) for i in range(100)]
    rows += [(1, 1000 * i, 1, 5, 5, 330_000 + 10 * i) for i in range(70)]
    same_in_every_way([x, y, z], Segments(rows, [torch.int8, torch.bfloat16, torch.float32]))


def work(rows: list[tuple[int, ...]], multiprocessors: int = 132) -> segment_tiles.Work:
    rows = [(*row, 0) for row in rows]  # no gaps in the wire
    return segment_tiles.divide(np.array(rows), None, np.zeros(8, np.int64), np.array([0]), multiprocessors)


def test_programs_have_as_many_bytes() -> None:
    """Within 10 percent of the mean for 5,000 segments of 64 bytes to 32 MiB, and as many small ones each."""
    dice, rows, at = random.Random(0), [], 0
    for _ in range(5000):
        size = int(64 * 2 ** dice.uniform(0, 19))
        rows.append((dice.randrange(8), 16 * dice.randrange(1000), 1, size, size, at))
        at += -(-size // 16) * 16
    done = work(rows)
    shares = done.shares
    assert shares.sum() == sum(row[3] for row in rows)
    assert (np.abs(shares - shares.mean()) <= 0.1 * shares.mean()).all()
    counts = np.diff(done.starts)
    assert int(counts.max()) <= 8
    tiny = work([(0, 64 * i, 1, 64, 64, 64 * i) for i in range(5000)])
    counts = np.diff(tiny.starts)
    assert (int(counts.min()), int(counts.max())) == (15, 16)
    two = [(i, 0, 1, 2**20, 2**20, i * 2**20) for i in range(2)]
    mixed = work([*two, *((2, 64 * i, 1, 64, 64, 2**21 + 64 * i) for i in range(32))], 4)
    assert mixed.programs == 129
    assert int(mixed.shares.max() - mixed.shares.min()) <= 256
    assert int(np.diff(mixed.starts).max()) <= 3


def test_overlaps_are_seen_in_any_order() -> None:
    """Of rows that interleave, nest and repeat, against a count of every byte."""
    dice, found = random.Random(0), set()
    for _ in range(3000):
        stride = dice.randint(2, 12)
        blocks = []
        for _ in range(dice.randint(1, 5)):
            step = dice.choice((stride, stride, dice.randint(1, 12)))
            blocks.append((0, 0, dice.randint(1, 5), dice.randint(1, 5), 8, dice.randint(0, 60), step))
        counts = np.zeros(200, np.int64)
        for _, _, many, row, _, at, step in blocks:
            for r in range(many):
                counts[at + r * step : at + r * step + row] += 1
        text = ""
        try:
            Segments(blocks, [torch.int8])
        except ValueError as error:
            text = str(error)
        assert bool(text) == bool((counts > 1).any()), (blocks, text)
        if text:
            assert f"bytes {int((counts > 1).argmax())} to" in text
        found.add(bool(text))
    assert found == {False, True}


def test_what_is_not_aligned_is_parted() -> None:
    """Into units of 16 bytes and what is before and behind them, but not where one block of narrow units has it all."""

    def units(rows: list[tuple[int, ...]]) -> list[tuple[int, int]]:
        done = work(rows, 1)
        return sorted((16 >> int(code) % 8, int(size) % 2**32) for size, code in done.records[:, 2:4])

    assert units([(0, 0, 1, 1001, 1001, 0)]) == [(1, 1001)]
    assert units([(0, 6, 1, 6000, 6000, 22)]) == [(2, 3), (2, 5), (16, 374)]
    assert units([(0, 6, 1, 6000, 6000, 20)]) == [(2, 3000)]
    assert units([(0, 4, 5, 12, 24, 8)]) == [(4, 15)]
    assert units([(0, 4, 1, 2**13, 2**13, 4)]) == [(4, 1), (4, 3), (16, 511)]


def test_a_table_is_one_launch_and_casts_are_others() -> None:
    kinds = (torch.int8, torch.bfloat16, torch.float32, torch.complex64)
    tensors = [torch.zeros(64, dtype=dtype) for dtype in kinds]
    layouts = layouts_of(torch.zeros(8192, dtype=torch.uint8), tensors)
    rows = [(i, 0, 1, 64, 64, 1024 * i + i) for i in range(4)] + [(PADDING, 0, 1, 5, 0, 4096)]
    for dtypes, names in (
        (kinds, ["None"]),
        ((torch.int8, torch.float32, torch.float32, torch.complex64), ["None", "fp32"]),
    ):
        table = Segments([(*row[:5], row[5] // 8 * 8) for row in rows], dtypes)
        launches = segment_copy._plan("gather_segments", table, layouts, None, 0, False, False)[0]
        assert [str(launch.constants["WIDE"][0]) for launch, _ in launches] == names


def test_addresses_are_copied_when_they_change(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[list[int]] = []

    class Noted(device_table.Table):
        def __init__(self, content: device_table.Content, device: int) -> None:
            made.append(content.tolist())
            super().__init__(content, device)

    monkeypatch.setattr(device_table, "Table", Noted)
    device_table.addresses_on.cache_clear()
    first, second = [[torch.zeros(4) for _ in range(17)] for _ in range(2)]
    table, wire = Segments([(i, 0, 1, 4, 4, 16 * i) for i in range(17)], [torch.float32] * 17), torch.zeros(68)
    for tensors in (first, first, second, first):
        kernels.gather_segments(tensors, wire, table)
    device_table.addresses_on.cache_clear()
    lists = [content for content in made if len(content) == 17]
    assert lists == [[x.data_ptr() for x in tensors] for tensors in (first, second)]


@pytest.mark.parametrize("module", MODULES)
def test_the_default_device_does_not_matter(module: Any) -> None:
    x, wire = torch.arange(24.0).view(4, 6), torch.zeros(12)
    table = Segments([(0, 1, 4, 2, 6, 0), (0, 3, 4, 1, 6, 32)], [torch.float32])
    with torch.device("meta"):
        module.gather_segments([x], wire, table)
        module.scatter_segments(wire, [x], table)
    assert wire.tolist() == [1, 2, 7, 8, 13, 14, 19, 20, 3, 9, 15, 21]
