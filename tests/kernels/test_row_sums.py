"""Sums, products and dot products of rows in lists, against torch's path and one element at a time."""

from typing import Any

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import random_bits
from devices import Device
from kernel_cases import FLOATS, in_every_way
from torch import Tensor
from tritoncomm_kernels import torch_path

MODULES = [kernels, torch_path]
KINDS = [*((dtype, dtype) for dtype in FLOATS), (torch.bfloat16, torch.float32), (torch.float64, torch.bfloat16)]


def rows(count: int, row: int, dtype: torch.dtype, gap: int, seed: int, device: torch.device) -> Tensor:
    """Rows of random bits, NaN and infinities among them, ``gap`` elements apart."""
    return random_bits((count, row + gap), dtype, seed, device)[:, :row]


def numbers(count: int, row: int, dtype: torch.dtype, gap: int, seed: int, device: torch.device) -> Tensor:
    x = torch.randn(count, row + gap, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x.to(dtype).to(device)[:, :row]


def lists_of(rows: int, lists: int, slots: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Indices of lists, in which every row is in one place at most, and some are no rows; the pairs of the rows."""
    places = torch.randperm(lists * slots, generator=torch.Generator().manual_seed(rows))
    index = torch.tensor([-1, rows, 2**30, -(2**30)], dtype=dtype).repeat(lists * slots)[: lists * slots]
    pair = torch.full((rows,), -1, dtype=dtype)
    named = min(rows, lists * slots)
    index[places[:named]] = torch.arange(named, dtype=dtype)
    pair[:named] = places[:named].to(dtype)
    if rows > 3:
        pair[3] = lists * slots
        index[index == 3] = -5
    return index.view(lists, slots).to(device), pair.to(device)


@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("make", [rows, numbers])
def test_lists_of_rows(
    device: Device, kind: tuple[torch.dtype, torch.dtype], make: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every number of slots, rows of every alignment, gaps between them, and no rows at all."""
    first, second = kind
    wide = torch.float64 if torch.float64 in kind else torch.float32
    shapes = [(5, 4, 2, 33, 7), (9, 3, 8, 40, 0), (4, 6, 1, 16, 16), (0, 3, 2, 8, 0), (3, 0, 4, 8, 0), (40, 9, 5, 8, 8)]
    shapes += [(6, 3, 2, 1100, 4), (2, 2, 3, 1, 1), (5, 4, 2, 0, 8)]
    at = device.at
    for place, (count, lists, slots, row, gap) in enumerate(shapes):
        # Both dtypes of indices for every shape: one with bits, the other with numbers.
        index_dtype = (torch.int64, torch.int32)[(place + (make is rows)) % 2]
        monkeypatch.setattr(torch_path, "_BUFFERED", 100 if index_dtype is torch.int32 else 1 << 18)  # many blocks
        index, pair = lists_of(count, lists, slots, index_dtype, at)
        weights = make(lists, slots, wide, gap, 3, at)
        x, out = make(count, row, first, gap, 1, at), make(lists, row, second, gap, 2, at)
        in_every_way(lambda m, x, i, w, out: m.sum_rows(x, i, w, out), x, index, weights, out, nan=True)
        in_every_way(lambda m, x, i, out: m.sum_rows(x, i, None, out), x, index, out, nan=True)
        cut = (0, count // 2, count)[place % 3]  # the rows behind are as far away as they are in memory
        front, behind = x[:cut], make(count, row, first, 2 * gap, 1, at)[cut:]
        in_every_way(
            lambda m, x, i, w, b, out: m.sum_rows(x, i, w, out, b), front, index, weights, behind, out, nan=True
        )
        x, out = make(lists, row, first, gap, 1, at), make(count, row, second, gap, 2, at)
        in_every_way(lambda m, x, p, w, out: m.scale_rows(x, p, w, out), x, pair, weights, out, nan=True)
        dots = make(lists, slots, wide, 0, 4, at)
        y = make(count, row, second, gap, 5, at)
        in_every_way(lambda m, x, y, p, out: m.dot_rows(x, y, p, out), x, y, pair, dots, nan=True)
        y, scaled = y.to(second), make(count, row, second, 0, 6, at)
        both = torch.stack([dots, weights]).unbind()
        in_every_way(
            lambda m, x, y, p, w, scaled, out: m.scale_dot_rows(x, y, p, w, scaled, out),
            x, y, pair, both[1], scaled, both[0], nan=True,
        )  # fmt: skip


@pytest.mark.parametrize("module", MODULES)
def test_bad_lists_are_refused(module: Any) -> None:
    x, index, weights, out = (
        torch.zeros(4, 6),
        torch.zeros(3, 2, dtype=torch.int64),
        torch.zeros(3, 2),
        torch.zeros(3, 6),
    )
    pair = torch.zeros(4, dtype=torch.int64)
    total, scale, dot = module.sum_rows, module.scale_rows, module.dot_rows
    bad = [
        (ValueError, "slots\\]", lambda: total(x, pair, None, out)),
        (ValueError, "lists do not fit", lambda: total(x, index, None, out[:2])),
        (ValueError, "equally long", lambda: total(x, index, None, out[:, 1:])),
        (ValueError, "contiguous", lambda: total(torch.zeros(6, 4).t(), index, None, out)),
        (ValueError, "weights must be", lambda: total(x, index, weights[:2], out)),
        (ValueError, "weights must be", lambda: total(x, index, weights.double(), out)),
        (ValueError, "weights must be", lambda: total(x.double(), index, weights, out)),
        (ValueError, "weights of a list", lambda: total(x, index, torch.zeros(2, 3).t(), out)),
        (ValueError, "index must be contiguous", lambda: total(x, torch.zeros(2, 3, dtype=torch.int64).t(), None, out)),
        (ValueError, "no slots", lambda: total(x, index[:, :0], None, out)),
        (TypeError, "int64 or int32", lambda: total(x, index.short(), None, out)),
        (TypeError, "cannot scale", lambda: total(x.long(), index, None, out.long())),
        (ValueError, "index must be contiguous", lambda: scale(x, pair, weights, out)),
        (ValueError, "index must be contiguous", lambda: scale(out, pair[:2], weights, x)),
        (ValueError, "slots\\]", lambda: scale(out, pair, weights[0], x)),
        (ValueError, "out must be contiguous", lambda: dot(out, x, pair, torch.zeros(3, 3)[:, :2])),
        (ValueError, "weights must be", lambda: dot(out.double(), x, pair, weights)),
        (ValueError, "lists do not fit", lambda: dot(x, x, pair, weights)),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()


@pytest.mark.parametrize("module", MODULES)
def test_a_row_that_no_list_names_is_not_read(module: Any) -> None:
    """A NaN in it stays where it is; a sum begins with +0."""
    x = torch.tensor([[-0.0, 1.0], [float("nan"), float("inf")]])
    out = torch.zeros(2, 2)
    module.sum_rows(x, torch.tensor([[0, -1], [7, 0]]), None, out)
    assert out.tolist() == [[0.0, 1.0], [0.0, 1.0]]
    assert not out.signbit().any()
