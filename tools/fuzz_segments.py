"""Drawn tables of segments and rows by index: interpreted kernels and torch, against the definition."""

import os
import traceback
from typing import Any

import naive
import torch
from fuzz_calls import bits, problem_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")

import tritoncomm_kernels as kernels
from tritoncomm_kernels import Copies, Segments, torch_path

__all__ = ["check_segments", "segments_of"]

_DTYPES = ("int8", "bfloat16", "float32", "int64", "complex64", "bool")


def segments_of(junk: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """A table, or an index of rows, with what it is for."""
    small, odd = st.integers(0, 12), st.one_of(st.integers(-2, 40), st.sampled_from([2**31, 2**62, -(2**63)]), junk)
    number = st.one_of(*[small] * 9, odd)
    row = st.tuples(st.one_of(*[st.integers(-1, 1)] * 9, odd), number, st.integers(-1, 12), *[number] * 4)
    tensor = st.tuples(st.sampled_from(_DTYPES), st.integers(0, 60), st.sampled_from([1, 1, 1, 2]))
    table = st.tuples(
        st.just("table"), st.lists(row, max_size=4), st.lists(tensor, min_size=1, max_size=2), st.integers(0, 300),
        st.booleans(),
    )  # fmt: skip
    index = st.tuples(
        st.just("rows"), st.lists(st.one_of(st.integers(-2, 6), st.sampled_from([2**31, 2**40])), max_size=6),
        st.tuples(st.sampled_from(_DTYPES), st.integers(0, 5), st.integers(0, 20)),
        st.sampled_from(["int64", "int32", "int64", "int16", "float32"]), st.booleans(),
    )  # fmt: skip
    copies = st.tuples(
        st.just("copies"), st.lists(row, max_size=4), st.lists(tensor, min_size=1, max_size=2),
        st.lists(tensor, min_size=1, max_size=2),
    )  # fmt: skip
    return st.one_of(table, table, copies, index)


def _filled(count: int, dtype: str, seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    kind = getattr(torch, dtype)
    if dtype == "bool":
        return torch.randint(0, 2, (count,), generator=made).bool()
    return torch.randint(0, 256, (count * kind.itemsize,), dtype=torch.uint8, generator=made).view(kind)


def _refused(call: Any) -> Any:
    """The result of a call; None where it is refused as documented, by the package itself and not inside torch."""
    try:
        return call()
    except (ValueError, TypeError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1].filename
        if "tritoncomm_kernels" not in last:
            raise AssertionError(problem_of(error)) from error
        return None


def check_segments(case: Any) -> None:
    """Both twins refuse the same, and write the same bytes: those of the loop."""
    {"table": _check_table, "copies": _check_copies, "rows": _check_rows}[case[0]](*case[1:])


def _check_table(rows: list[Any], given: list[Any], nbytes: int, scatters: bool) -> None:
    dtypes = [getattr(torch, dtype) for dtype, _, _ in given]
    table = _refused(lambda: Segments(rows, dtypes))
    if table is None:
        return
    tensors = [_filled(count * step, dtype, i)[::step] for i, (dtype, count, step) in enumerate(given)]
    wire = _filled(nbytes, "int8", 9).view(torch.uint8)
    results = []
    for twin in (kernels, torch_path):
        copies, out = [x.clone() if x.is_contiguous() else _strided(x) for x in tensors], wire.clone()
        if scatters:
            moved = _refused(lambda t=twin, o=out, c=copies: t.scatter_segments(o, c, table))
        else:
            moved = _refused(lambda t=twin, o=out, c=copies: t.gather_segments(c, o, table))
        results.append((moved, out, copies))
    (moved, out, copies), (again, other, others) = results
    assert moved == again, f"{moved} and {again} bytes"
    assert torch.equal(out, other)
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(copies, others, strict=True))
    wanted, expected = wire.clone(), [x.clone() if x.is_contiguous() else _strided(x) for x in tensors]
    if moved is not None:
        by_definition = naive.scatter_segments if scatters else naive.gather_segments
        ends = (wanted, expected) if scatters else (expected, wanted)
        assert moved == by_definition(*ends, table), f"{moved} bytes"
    assert torch.equal(out, wanted), f"wire {out.tolist()}, not {wanted.tolist()}"
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(copies, expected, strict=True))


def _check_copies(rows: list[Any], given: list[Any], into: list[Any]) -> None:
    """Tensors of one dtype on both sides, or a refusal of both twins: casts are compared elsewhere."""
    dtypes = [getattr(torch, dtype) for dtype, _, _ in into]
    table = _refused(lambda: Copies(rows, dtypes))
    if table is None:
        return
    tensors = [_filled(count * step, dtype, i)[::step] for i, (dtype, count, step) in enumerate(given)]
    results, moved = [], []
    for twin in (kernels, torch_path):
        targets = [_filled(count * step, dtype, 9 + i)[::step] for i, (dtype, count, step) in enumerate(into)]
        moved.append(_refused(lambda t=twin, y=targets: t.copy_segments(tensors, y, table)))
        results.append(targets)
    assert moved[0] == moved[1], f"{moved} bytes"
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(*results, strict=True))
    if any(x.dtype != dtype for x, dtype in zip(tensors, dtypes, strict=False)):
        return
    expected = [_filled(count * step, dtype, 9 + i)[::step] for i, (dtype, count, step) in enumerate(into)]
    if moved[0] is not None:
        assert moved[0] == naive.copy_segments(tensors, expected, table), f"{moved} bytes"
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(results[0], expected, strict=True))


def _strided(x: Tensor) -> Tensor:
    base = x.new_zeros(x.numel() * 2)
    base[::2] = x
    return base[::2]


def _check_rows(index: list[int], given: tuple[str, int, int], kind: str, scatters: bool) -> None:
    dtype, count, row = given
    if kind in ("int32", "int16"):
        index = [i for i in index if abs(i) < 2**15]
    if scatters:
        index = list(dict.fromkeys(index))  # of equal ones any may remain
    at = torch.tensor(index, dtype=getattr(torch, kind))
    far, near = _filled(count * row, dtype, 1).view(count, row), _filled(len(index) * row, dtype, 2)
    near = near.view(len(index), row)
    wanted_far, wanted_near = far.clone(), near.clone()
    for i, each in enumerate(index):
        if scatters and 0 <= each < count:
            wanted_far[each] = near[i]
        elif not scatters:
            wanted_near[i] = far[each] if 0 <= each < count else torch.zeros(row).to(near.dtype)
    for twin in (kernels, torch_path):
        a, b = far.clone(), near.clone()
        if scatters:
            moved = _refused(lambda t=twin, a=a, b=b: t.scatter_rows(b, at, a))
        else:
            moved = _refused(lambda t=twin, a=a, b=b: t.gather_rows(a, at, b))
        assert (moved is None) == (kind not in ("int64", "int32")), (twin.__name__, moved)
        if moved is not None:
            assert torch.equal(bits(a), bits(wanted_far)), twin.__name__
            assert torch.equal(bits(b), bits(wanted_near)), twin.__name__
