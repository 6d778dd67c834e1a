"""Segments of several tensors copied into as many others, against the definition one element at a time."""

import pickle
import random
from typing import Any

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import random_bits
from devices import Device
from kernel_cases import in_every_way
from torch import Tensor
from tritoncomm_kernels import Copies, SegmentCall, Segments, in_turns, torch_path

MODULES = [kernels, torch_path]
COPIED = (torch.int8, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.float8_e4m3fn)


def strips(dice: random.Random, rows: int, row: int) -> list[tuple[int, int, int, int]]:
    """First row and column, rows and columns of blocks that share no element of ``[rows, row]``."""
    cut, column = dice.randint(0, rows), dice.randint(0, row)
    blocks = [(0, 0, cut, row), (cut, 0, rows - cut, column), (cut, column, rows - cut, row - column)]
    full = [block for block in blocks if block[2] and block[3]]
    return dice.sample(full, dice.randint(1, len(full)))


def drawn(seed: int, dtypes: Any, device: Any) -> tuple[list[Tensor], list[Tensor], list[tuple[int, ...]]]:
    """Tensors and targets at odd addresses with gaps in their rows, and blocks that are elsewhere in the targets."""
    dice = random.Random(seed)
    tensors, targets, table = [], [], []
    for i, (dtype, into) in enumerate(dtypes):
        rows, row = dice.randint(1, 9), dice.randint(1, 70)
        sides = []
        for kind in (dtype, into):
            gap, shift = dice.choice((0, 0, 1, 16)), dice.choice((0, 0, 1, 3, 16))
            memory = random_bits((shift + rows * (row + gap),), kind, dice.randint(0, 99), device)
            sides.append(memory[shift:].view(rows, row + gap))
        tensors.append(sides[0])
        targets.append(sides[1])
        from_, to = (x.stride(0) for x in sides)
        for first, column, count, width in strips(dice, rows, row):
            table.append((i, first * from_ + column, count, width, from_, (first * to + column) * into.itemsize, to))
    return tensors, targets, table


@pytest.mark.parametrize("seed", range(8))
def test_copies_of_any_bits(device: Device, seed: int) -> None:
    pairs = [(dtype, dtype) for dtype in COPIED[: 6 if seed % 2 else 1] * (1 + seed // 4)]
    tensors, targets, table = drawn(seed, pairs, device.at)
    copies = Copies(table, [dtype for _, dtype in pairs])
    count = len(tensors)
    in_every_way(lambda module, *x: module.copy_segments(x[:count], x[count:], copies), *tensors, *targets)


CASTS = [
    (torch.float32, torch.bfloat16), (torch.bfloat16, torch.float32), (torch.float64, torch.float16),
    (torch.int32, torch.int32),
]  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
def test_casts(device: Device, seed: int) -> None:
    tensors, targets, table = drawn(seed, CASTS, device.at)
    for x in (*tensors, *targets):
        x.copy_(torch.randn(x.shape).to(x.dtype) * 8)
    copies, count = Copies(table, [dtype for _, dtype in CASTS]), len(tensors)
    in_every_way(lambda module, *x: module.copy_segments(x[:count], x[count:], copies), *tensors, *targets, nan=True)


@pytest.mark.parametrize("count", [1, 8, 9, 40])
def test_other_addresses(device: Device, count: int) -> None:
    """By value up to 8 pairs, in a list beyond; whatever their alignment is at the time."""
    rows = [(i, 1, 3, 9, 16, 2 * i, 12) for i in range(count)]
    copies = Copies(rows, [torch.int16] * count)
    call = None
    for shift in (0, 3, 8, 0):
        made = [random_bits((64 + shift,), torch.int16, i, device.at)[shift:].view(4, 16) for i in range(count)]
        targets = [torch.zeros(40 + i + shift, dtype=torch.int16, device=device.at)[shift:] for i in range(count)]
        every = in_turns(made, targets)
        call = call or SegmentCall("copy_segments", copies, every, every[-1])
        call(every, every[-1])
        for i, (x, y) in enumerate(zip(made, targets, strict=True)):
            expected = torch.zeros_like(y)
            for r in range(3):
                expected[i + 12 * r : i + 12 * r + 9] = x.flatten()[1 + 16 * r : 10 + 16 * r]
            assert torch.equal(y, expected), (count, shift, i)


def test_copies_are_one_launch_and_casts_are_others() -> None:
    dtypes = [*CASTS, (torch.int8, torch.int8), (torch.float32, torch.bfloat16)]
    tensors, targets, table = drawn(1, dtypes, "cpu")
    every = in_turns(tensors, targets)
    call = SegmentCall("copy_segments", Copies(table, [dtype for _, dtype in dtypes]), every, every[-1])
    call(every, every[-1])
    (launches,) = call._launches.values()
    assert len(launches) == 4


def test_tables_are_values() -> None:
    rows = [(0, 0, 2, 3, 8, 4, 9)]
    copies = Copies(rows, [torch.int8])
    assert pickle.loads(pickle.dumps(copies)) == copies
    assert type(pickle.loads(pickle.dumps(copies))) is Copies
    assert copies != Segments(rows, [torch.int8])
    x, y = torch.arange(16, dtype=torch.int8).view(2, 8), torch.zeros(2, 9, dtype=torch.int8)
    assert kernels.copy_segments([x], [y], copies) == 12
    assert y[:, 4:7].tolist() == [[0, 1, 2], [8, 9, 10]]
    assert not y[:, :4].any()
    assert not y[:, 7:].any()


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ([(-1, 0, 1, 4, 0, 0)], "no segment of 2 tensors"),
        ([(2, 0, 1, 4, 0, 0)], "no segment of 2 tensors"),
        ([(0, 0, 1, 4, 4, 2)], "starts inside of an element"),
        ([(0, 0, 1, 4, 4, 0), (0, 4, 1, 4, 4, 12)], "bytes 12 to 16 of target 0 belong to two rows"),
        ([(0, 0, 2, 4, 4, 0, 3)], "belong to two rows"),
    ],
)
def test_bad_tables_are_refused(rows: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Copies(rows, [torch.float32, torch.float32])


@pytest.mark.parametrize("module", MODULES)
def test_bad_calls_are_refused(module: Any) -> None:
    copies = Copies([(0, 0, 1, 4, 4, 0), (1, 0, 1, 4, 4, 0)], [torch.float32] * 2)  # one place in each target
    x, y = [torch.ones(4), torch.ones(4)], [torch.zeros(4), torch.zeros(4)]
    module.copy_segments(x, y, copies)
    assert torch.equal(torch.cat(y), torch.ones(8))
    for tensors, targets, text in (
        (x, y[:1], "2 tensors for 1 targets"),
        (x[:1], y[:1], "for a table of"),
        ([x[0][:3], x[1]], y, "ends beyond the 3 elements of its tensor"),
        (x, [y[0], y[1][:3]], "or 3 there"),
        (x, [y[0].double(), y[1]], "for a table of"),
        ([x[0].to("meta"), x[1]], y, "meta"),
        ([x[0], torch.complex(x[1], x[1]).conj().imag], y, "lazy"),
    ):
        with pytest.raises(ValueError, match=text):
            module.copy_segments(tensors, targets, copies)
    with pytest.raises(TypeError, match="int64"):
        module.copy_segments([x[0].long(), x[1]], y, copies)
    assert module.copy_segments([], [], Copies([], [])) == 0
    assert module.copy_segments(x, y, Copies([(0, 0, 0, 4, 4, 0)], [torch.float32] * 2)) == 0
