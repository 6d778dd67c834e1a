"""Every mapping on the kernels and in plain torch: the same bits forward and backward, whatever the layout."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from bits import bits, random_bits
from mapping_cases import LAYOUTS, MAPPINGS, fits, laid_out
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import UnsupportedError, record
from tritoncomm import mappings as m
from tritoncomm.core import ops

COPIED = ["float32", "bfloat16", "float16", "float64", "int64", "bool", "float8_e4m3fn", "complex64", "int16", "uint32"]
SUMMED = COPIED[:5]
NEITHER, BOTH = (False, False), (True, True)
FORWARD_ONLY = ["int64", "bool", "float8_e4m3fn", "int16", "uint32"]
SHAPES = [(8, 4, 12), (8,), (4, 12), (4, 4, 4, 4), (4, 1, 4, 2, 4)]

Call = Callable[[Tensor, ProcessGroup], Tensor]


@dataclass(frozen=True)
class Case:
    """A mapping, and what of it adds up and what of it runs on the kernels."""

    call: Call
    sums: tuple[bool, bool]
    kernels: tuple[bool, bool]
    admits: Callable[[tuple[int, ...], int], bool]


def cuts(*dims: int) -> Callable[[tuple[int, ...], int], bool]:
    """Whether there are such dims, the first of which is cut evenly."""
    return lambda shape, world: max(dims) < len(shape) and shape[dims[0]] % world == 0


def has(dim: int) -> Callable[[tuple[int, ...], int], bool]:
    return lambda shape, world: dim < len(shape)


# mapping: where a kernel runs, forward and backward; the others move whole rows or nothing
ON_KERNELS = {
    "scatter_tp": (False, True),
    "gather_tp": (True, False),
    "ag_last": BOTH,
    "rs_last": BOTH,
    "sp2hp": BOTH,
    "hp2sp": BOTH,
}
CASES = {
    name: Case(
        call,
        ("sum" in forward, "sum" in backward),
        ON_KERNELS.get(name, NEITHER),
        lambda shape, world, form=forward: fits(form, shape, world),
    )
    for name, (call, forward, backward) in MAPPINGS.items()
} | {
    "all_gather_dim-1": Case(lambda x, g: m.all_gather_dim(x, 1, g), (False, True), BOTH, has(1)),
    "reduce_scatter_dim-0": Case(lambda x, g: m.reduce_scatter_dim(x, 0, g), (True, False), NEITHER, cuts(0)),
    "reduce_scatter_dim-1": Case(lambda x, g: m.reduce_scatter_dim(x, 1, g), (True, False), BOTH, cuts(1)),
    "split_dim-1": Case(lambda x, g: m.split_dim(x, 1, g), NEITHER, (False, True), cuts(1)),
    "all_to_all_dims-0-1": Case(lambda x, g: m.all_to_all_dims(x, 0, 1, g), NEITHER, BOTH, cuts(0, 1)),
    "all_to_all_dims-1-0": Case(lambda x, g: m.all_to_all_dims(x, 1, 0, g), NEITHER, BOTH, cuts(1, 0)),
    "all_to_all_dims-2-1": Case(lambda x, g: m.all_to_all_dims(x, 2, 1, g), NEITHER, BOTH, cuts(2, 1)),
}


def fused(x: Tensor) -> Tensor:
    """The same values as the middle third of a fused projection: dim 1 is a slice."""
    return torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]]


def in_layout(x: Tensor, layout: str) -> Tensor:
    return fused(x) if layout == "fused" else laid_out(x, layout)


def layouts_of(shape: tuple[int, ...]) -> list[str]:
    """The layouts that are not the same one in this number of dims."""
    return {1: ["contiguous", "sliced"], 2: ["contiguous", "transposed", "sliced"]}.get(len(shape), [*LAYOUTS, "fused"])


def made(shape: tuple[int, ...], dtype: str, summed: bool, seed: int) -> Tensor:
    """Any bits where they are only moved, numbers where they are added up."""
    if summed and dtype != "int64":
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(getattr(torch, dtype))
    return random_bits(shape, getattr(torch, dtype), seed)


def kernel_ran(counted: dict[tuple[str, str], record.Count]) -> bool:
    return any(path == "triton" for _, path in counted)


def strided(x: Tensor) -> Tensor:
    """A layout that the kernels read in place, wherever the cut is."""
    return fused(x) if x.dim() > 1 else laid_out(x, "sliced")


def moved(
    call: Call, x: Tensor, summed: bool, path: str, group: ProcessGroup
) -> tuple[list[Tensor], tuple[bool, bool]]:
    """The result and, where x has one, its gradient; and whether a kernel made them."""
    with ops.path(path), record.recording() as forward:
        out = call(x, group)
    if not x.requires_grad:
        return [out], (kernel_ran(forward), False)
    grad = strided(made(tuple(out.shape), str(x.dtype).removeprefix("torch."), summed, 7 + group.rank()))
    with ops.path(path), record.recording() as backward:
        (found,) = torch.autograd.grad(out, x, grad)
    return [out.detach(), found], (kernel_ran(forward), kernel_ran(backward))


def assert_same_bits(found: list[Tensor], wanted: list[Tensor], what: object) -> None:
    for a, b in zip(found, wanted, strict=True):
        assert a.dtype is b.dtype, what
        assert a.shape == b.shape, what
        assert torch.equal(bits(a), bits(b)), what


def run_both_paths(group: ProcessGroup, name: str) -> tuple[int, int]:
    """Every shape in every layout, the dtypes in turn; how many pairs were compared and how many layouts refused."""
    case, rank, world = CASES[name], group.rank(), group.size()
    dtypes = itertools.cycle(SUMMED if case.sums[0] else COPIED)
    compared = refused = 0
    for _ in range(world):  # another dtype per layout at another world size
        next(dtypes)
    for shape in SHAPES:
        if not case.admits(shape, world):
            continue
        for layout in layouts_of(shape):
            dtype = next(dtypes)
            what = (name, shape, dtype, layout)
            x = in_layout(made(shape, dtype, case.sums[0], rank), layout)
            x.requires_grad_(dtype not in FORWARD_ONLY)
            wanted, _ = moved(case.call, x, case.sums[1], "torch", group)
            try:
                found, used = moved(case.call, x, case.sums[1], "triton", group)
            except UnsupportedError:
                assert layout != "contiguous", what
                refused += 1
                continue
            assert_same_bits(found, wanted, what)
            if shape is SHAPES[0]:
                assert used == (case.kernels[0], case.kernels[1] and x.requires_grad), what
            compared += 1
    return compared, refused


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_same_bits_on_both_paths(pool: Pool, name: str, world: int) -> None:
    for compared, refused in pool.run(run_both_paths, name, world=world):
        assert compared >= 8
        assert refused == 0 or name not in MAPPINGS


# mapping: (call, what adds up, where a kernel runs); dim 1 holds rows, dim 2 heads
UNEVEN: dict[str, tuple[Any, tuple[bool, bool], tuple[bool, bool]]] = {
    "all_to_all_dims": (
        lambda x, g, rows, heads: m.all_to_all_dims(x, 2, 1, g, scatter_sizes=heads, gather_sizes=rows),
        NEITHER,
        BOTH,
    ),
    "all_gather_dim": (lambda x, g, rows, _: m.all_gather_dim(x, 1, g, sizes=rows), (False, True), BOTH),
    "reduce_scatter_dim": (
        lambda x, g, rows, _: m.reduce_scatter_dim(x, 1, g, sizes=rows),
        (True, False),
        BOTH,
    ),
    "split_dim": (lambda x, g, rows, _: m.split_dim(x, 1, g, sizes=rows), NEITHER, (False, True)),
}


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_same_bits_of_uneven_pieces_on_both_paths(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    rows, heads = ((4, 1), (3, 2)) if world == 2 else ((1, 3, 0, 2), (2, 0, 2, 1))
    for name, (mapping, sums, kernels) in UNEVEN.items():
        mine = sum(rows) if name in ("reduce_scatter_dim", "split_dim") else rows[rank]
        for layout, dtype in (("contiguous", "float32"), ("fused", "bfloat16"), ("fused", "float64")):
            what = (name, layout, dtype)
            x = in_layout(made((2, mine, sum(heads), 3), dtype, sums[0], rank), layout).requires_grad_()

            def call(x: Tensor, group: ProcessGroup, mapping: Any = mapping) -> Tensor:
                return mapping(x, group, rows, heads)

            wanted, _ = moved(call, x, sums[1], "torch", group)
            found, used = moved(call, x, sums[1], "triton", group)
            assert_same_bits(found, wanted, what)
            assert used == kernels, what
