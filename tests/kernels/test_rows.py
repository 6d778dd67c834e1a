"""Rows by indices in device memory, against torch's index_select and one row at a time."""

from typing import Any
from unittest import mock

import pytest
import torch
import tritoncomm_kernels as kernels
from bits import bits, random_bits
from devices import Device
from kernel_cases import canaries_live, guarded
from tritoncomm_kernels import torch_path
from tritoncomm_kernels.launch import Launch

MODULES = [kernels, torch_path]
SHAPES = [((9, 40), 0), ((5, 33), 3), ((7, 4, 24), 8), ((6,), 0), ((1, 8), 8), ((300, 3), 1)]


@pytest.mark.parametrize("module", MODULES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn, torch.float32, torch.complex128], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int64, torch.int32], ids=str)
def test_rows_by_index(device: Device, module: Any, dtype: torch.dtype, index_dtype: torch.dtype) -> None:
    """Every shape of rows, with gaps between them and without; indices that are no rows leave everything alone."""
    for (count, *row), left in SHAPES:
        wide = random_bits((count, *row[:-1], left + row[-1]) if row else (count,), dtype, 1, device.at)
        x = wide.narrow(-1, left, row[-1]) if row and len(row) == 1 else wide
        places = [*torch.randperm(count).tolist(), 0, count - 1]
        wrong = [-1, count, -count, 2**31 - 1, -(2**31), *([2**40, -(2**63)] if index_dtype is torch.int64 else [])]
        for some in (places, places[:1], [*places, *wrong], wrong):
            index = torch.tensor(some, dtype=index_dtype, device=device.at)
            out, raw = guarded((len(some), *x.shape[1:]), dtype, device.at)
            copied = module.gather_rows(x, index, out)
            assert copied == 2 * out.nbytes + index.nbytes
            for i, at in enumerate(some):
                expected = x[at] if 0 <= at < count else torch.zeros_like(x[0])
                assert torch.equal(bits(out[i : i + 1]), bits(expected[None])), (i, at)
            assert canaries_live(raw)
        index = torch.tensor([*places[:count], *wrong], dtype=index_dtype, device=device.at)
        source = random_bits((len(index), *x.shape[1:]), dtype, 2, device.at)
        out, raw = guarded((count, *x.shape[1:]), dtype, device.at)
        module.scatter_rows(source, index, out)
        for i, at in enumerate(places[:count]):
            assert torch.equal(bits(out[at : at + 1]), bits(source[i : i + 1]))
        assert canaries_live(raw)
        before = bits(out).clone()
        module.scatter_rows(source[count:], index[count:], out)
        assert torch.equal(bits(out), before)


@pytest.mark.parametrize("module", MODULES)
def test_bad_rows_are_refused(module: Any) -> None:
    x, index, out = torch.zeros(4, 6), torch.zeros(3, dtype=torch.int64), torch.zeros(3, 6)
    gather, scatter = module.gather_rows, module.scatter_rows
    bad = [
        (ValueError, "do not fit", lambda: gather(x, index, out[:2])),
        (ValueError, "do not fit", lambda: gather(x, index, out[:, 1:])),
        (ValueError, "do not fit", lambda: scatter(x, index, out)),
        (ValueError, "every row", lambda: gather(torch.zeros(6, 4).t(), index, out)),
        (ValueError, "every row", lambda: gather(x[:, :3], index, out[:, ::2])),
        (ValueError, "every row", lambda: gather(x[:, :1].expand(4, 6), index, out)),
        (ValueError, "every row", lambda: gather(x, index, torch.zeros(1).expand(3, 6))),
        (ValueError, "every row", lambda: scatter(out[:, :1].expand(3, 6), index, x)),
        (ValueError, "overlap", lambda: gather(x, index, torch.zeros(6).expand(3, 6))),
        (ValueError, "overlap", lambda: scatter(out, index, torch.zeros(9).as_strided((4, 6), (1, 1)))),
        (ValueError, "flat", lambda: gather(x, torch.zeros(6, dtype=torch.int64)[::2], out)),
        (ValueError, "flat", lambda: gather(x, index.view(3, 1), out)),
        (ValueError, "lazy", lambda: gather(x.to(torch.complex64).conj(), index, out.to(torch.complex64))),
        (TypeError, "one dtype", lambda: gather(x, index, out.double())),
        (TypeError, "int64 or int32", lambda: gather(x, index.to(torch.int16), out)),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()
    gather(torch.zeros(6).expand(4, 6), index, out)  # read several times
    leaf = torch.nn.Parameter(torch.ones(4, 6))
    gather(leaf, index, out)
    scatter(out, index, leaf)
    assert leaf.is_leaf
    assert out.grad_fn is None


def test_the_limit_of_a_row_counts_units() -> None:
    """Tensors without memory, and no launch."""
    index = torch.zeros(1, dtype=torch.int64, device="meta")
    with mock.patch.object(Launch, "__call__", return_value=None):
        for row, fits in ((2**31, True), (2**31 + 1, False)):
            x = torch.empty(1, row, dtype=torch.int8, device="meta")
            if fits:  # units of 16 bytes
                assert kernels.gather_rows(x, index, torch.empty_like(x)) == 2 * row + 8
            else:
                with pytest.raises(kernels.TooLargeError, match="gather_rows"):
                    kernels.gather_rows(x, index, torch.empty_like(x))
