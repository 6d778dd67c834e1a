"""The interpreter that tests make faster reduces to the bits of Triton's own."""

from importlib import metadata
from typing import Any

import interpreter
import pytest
import torch
import triton
import triton.language as tl
from triton.runtime.interpreter import ReduceOps
from tritoncomm_kernels.numerics import INTERPRETED

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="kernels are compiled here")


@triton.jit
def _combine(a, b, c, d):
    return a * 0.75 + c, b * 3 - d  # neither associative nor commutative


@triton.jit
def _plus(a, b):
    return a + b


@triton.jit
def _reduce_kernel(x_ptr, out_ptr, counts_ptr, AXIS: tl.constexpr, KEEP: tl.constexpr):
    row, column = tl.arange(0, 4)[:, None], tl.arange(0, 8)[None, :]
    x = tl.load(x_ptr + row * 8 + column)
    a, b = tl.reduce((x, row * 8 + column), AXIS, _combine, keep_dims=KEEP)
    places = row * 8 + column
    tl.store(out_ptr + places, x * 0 + a if KEEP else x * 0 + tl.expand_dims(a, AXIS))
    tl.store(counts_ptr + places, places * 0 + (b if KEEP else tl.expand_dims(b, AXIS)))
    tl.store(out_ptr + 32, tl.reduce(x, None, _plus))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.skipif(metadata.version("triton") not in interpreter.KNOWN, reason="this interpreter is left as it is")
def test_reductions_have_the_bits_of_triton_s_own(monkeypatch: pytest.MonkeyPatch, axis: int, keep: bool) -> None:
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def reduced() -> Any:
        out, counts = torch.zeros(33), torch.zeros(32, dtype=torch.int32)
        _reduce_kernel[(1,)](x, out, counts, AXIS=axis, KEEP=keep)
        return out, counts

    ours = reduced()
    assert ReduceOps.generic_reduce is interpreter._reduce
    monkeypatch.setattr(ReduceOps, "generic_reduce", interpreter.ORIGINAL[0])
    theirs = reduced()
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))
    assert all(each.any() for each in ours)
