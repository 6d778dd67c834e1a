"""Every operator rule, for every layout of every operand: values, gradients and layouts against plain torch."""

import itertools
import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from operator_cases import CASES, layouts_of, made, run_case, run_under_autocast
from pool import Pool
from shards import ranks_of, shard_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ShardSpec
from tritoncomm.tensor.layout import plain
from tritoncomm.tensor.rules.table import ROWS

RULES_FOLDER = Path(__file__).parents[2] / "tritoncomm" / "tensor" / "rules"
NO_ROWS = {"__init__", "engine", "table"}


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", CASES)
def test_layouts(pool: Pool, name: str, world: int) -> None:
    assert min(pool.run(run_case, name, 30, world=world)) > 1


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_every_layout(pool: Pool, name: str, world: int) -> None:
    assert min(pool.run(run_case, name, world=world, timeout=600)) > 1


def autocast_of_every_operator(group: TorchGroup, low: torch.dtype, limit: int) -> None:
    for name in CASES:
        assert run_under_autocast(group, name, low, limit), name


@pytest.mark.parametrize("low", [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.slow)], ids=str)
@pytest.mark.parametrize("limit", [2, pytest.param(100, marks=pytest.mark.slow)])
def test_dtypes_under_autocast_are_torch_s(pool: Pool, low: torch.dtype, limit: int) -> None:
    """By torch's lists of fp32, of promotion and of low precision; gradients in the dtypes of the operands."""
    pool.run(autocast_of_every_operator, low, limit, world=2, timeout=110)


def test_the_documented_operators_are_the_code() -> None:
    docs = Path(__file__).parents[2] / "docs"
    filled = runpy.run_path(str(docs / "operators.py"))["filled"]
    text = (docs / "tensor.md").read_text()
    assert text == filled(text), "run `make docs`"
    assert "F.linear" not in text
    assert len(ROWS) > 50
    assert {row.module for row in ROWS} == {path.stem for path in RULES_FOLDER.glob("*.py")} - NO_ROWS


def test_at_other_ranks(pool: Pool) -> None:
    for name in ("linear", "cross_entropy", "softmax", "max dim"):
        pool.run(run_case, name, world=1)
        pool.run(run_case, name, world=(1, 3))


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_equal_and_allclose(group: TorchGroup) -> None:
    """``equal`` and ``allclose`` over every pair of layouts: torch's answer for the global tensors, on every rank."""
    pg, rank, world = ranks_of(group), group.rank(), group.size()
    for shape in ((8, 4), (3, 6)):
        full = made(shape, torch.float64, 0)
        other, near, holes = full.clone(), full + 1e-9, full.clone()
        other.view(-1)[-1] += 1  # only the last rank's shard differs
        holes[0, 0] = torch.nan
        for spec, layout in itertools.product(layouts_of(shape, world), repeat=2):
            if spec is None:
                continue
            x = ColoTensor(shard_of(full, spec, rank), ColoTensorSpec(pg, spec), shape).requires_grad_()

            def layouts_under(y: Tensor, spec: Any = spec, layout: Any = layout, shape: Any = shape) -> list[Tensor]:
                local = shard_of(y, spec, rank)  # a plain tensor of the local shape is a shard
                if layout is None:
                    return [y.clone(), local]
                return [ColoTensor(shard_of(y, layout, rank), ColoTensorSpec(pg, layout), shape)]

            for y in (full, other, near):
                for actual in layouts_under(y):
                    context = (shape, spec, layout, type(actual))
                    assert torch.equal(x, actual) is actual.equal(x) is (y is full), context
                    assert actual.allclose(x) is (y is not other), context
                    assert torch.allclose(x, actual, rtol=0, atol=1e-12) is (y is full), context
            torch.testing.assert_close(x, x.detach().clone())
        x = ColoTensor(
            shard_of(holes, ShardSpec([0], [world]), rank), ColoTensorSpec(pg, ShardSpec([0], [world])), shape
        )
        assert not torch.equal(x, holes)
        assert not torch.allclose(x, holes)
        assert torch.allclose(x, holes, equal_nan=True)
        # A wrong shape on one rank only: the answer is the same everywhere, without a deadlock.
        assert not torch.equal(x, holes.new_zeros(7) if rank == 0 else plain(x))
        assert not torch.equal(x, ColoTensor(full[:1], ColoTensorSpec(pg)))
        assert torch.allclose(x * 0 + full[0], ColoTensor(full[:1], ColoTensorSpec(pg)), equal_nan=True) is False
        assert torch.allclose(x.nan_to_num(0) * 0 + full[0], full[:1])
        with pytest.raises(ValueError, match="broadcast"):
            torch.allclose(x, torch.ones(3, 7, 2))


OTHER_NAMES = {
    "max": lambda x: torch.max(x, axis=1).values,
    "amax": lambda x: x.amax(1, keepdims=True),
    "argmin": lambda x: torch.argmin(x, axis=1),
    "sum": lambda x: torch.sum(x, axis=1, keepdims=True, out=None),
    "mean": lambda x: x.mean(axis=1),
    "any": lambda x: torch.any(x > 0, axis=1),
    "cat": lambda x: torch.cat([x, x], axis=1),
    "norm": lambda x: torch.linalg.vector_norm(x, ord=1, dim=1),
    "torch.norm": lambda x: torch.norm(x, p="fro", dim=1, out=None),
    "swapaxes": lambda x: x.swapaxes(axis0=1, axis1=0),
    "split": lambda x: x.split(split_size=3, dim=1)[1],
    "narrow": lambda x: x.narrow(-1, 1, 2),
    "unbind": lambda x: x.unbind(-1)[2],
    "select": lambda x: x.select(-1, 3),
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_arguments_by_other_names_keep_the_sharding(group: TorchGroup, name: str) -> None:
    pg, rank, world = ranks_of(group), group.rank(), group.size()
    full = made((8, 4), torch.float64, 0)
    spec, result = ShardSpec([0], [world]), OTHER_NAMES[name](full)
    y = OTHER_NAMES[name](ColoTensor(shard_of(full, spec, rank), ColoTensorSpec(pg, spec)))
    dim = 1 if name == "swapaxes" else 0
    assert y.partitions == ((dim, world),)
    assert torch.equal(plain(y), shard_of(result, ShardSpec([dim], [world]), rank))


def test_dims_that_do_not_exist_or_broadcast(group: TorchGroup) -> None:
    pg, world = ranks_of(group), group.size()
    x = ColoTensor(torch.ones(2, 4), ColoTensorSpec(pg, ShardSpec([0], [world])))
    number = ColoTensor(torch.tensor(2.0), ColoTensorSpec(pg))
    for call in (torch.unbind, lambda x: x.narrow(0, 0, 1), lambda x: x.select(0, 0), lambda x: x.split(1)):
        with pytest.raises((RuntimeError, IndexError)):
            call(number)
    with pytest.raises(ValueError, match="do not broadcast"):
        torch.matmul(x.reshape(1, 2 * world, 4).expand(2, -1, -1), torch.ones(3, 4, 1))
