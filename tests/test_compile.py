"""torch.compile(fullgraph=True) of the mappings gives what eager gives, compiles once, and is counted."""

import shutil
from collections.abc import Callable
from typing import Any

import pytest
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings as m
from tritoncomm import record

CALLS = 20


def whole_layer(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Every sequence- and tensor-parallel mapping, evenly cut."""

    def layer(x: Tensor) -> Tensor:
        hidden = m.all_to_all_sp2hp(x, group)
        rows = m.all_to_all_hp2sp(hidden * 2, group)
        full = m.gather_from_sequence_parallel_region(rows, group=group)
        part = m.reduce_scatter_to_sequence_parallel_region(full.relu(), group)
        heads = m.all_to_all_dims(part.view(4, 4, 4), 1, 0, group)
        copied = m.copy_to_tensor_model_parallel_region(heads, group)
        total = m.reduce_from_tensor_model_parallel_region(copied * 0.5, group)
        last = m.scatter_to_tensor_model_parallel_region(total, group)
        return m.gather_from_tensor_model_parallel_region(last, group).sin()

    return layer


def uneven_layer(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Split sizes: tokens that go to ranks unevenly and come back, and rows and heads that do not divide."""
    rank, world = group.rank(), group.size()
    heads, rows = ((3, 1), (4, 0)) if world == 2 else ((2, 0, 1, 1), (1, 0, 12, 3))
    sent = [1 + (rank + to) % 2 for to in range(world)]
    sent[-1] += 4 * world // 2 - sum(sent)
    table = [[1 + (source + to) % 2 for to in range(world)] for source in range(world)]
    for row in table:
        row[-1] += 4 * world // 2 - sum(row)
    received = [table[source][rank] for source in range(world)]
    sizes = [sum(table[source][to] for source in range(world)) for to in range(world)]

    def layer(x: Tensor) -> Tensor:
        tokens = m.all_to_all(group, x.repeat(world // 2, 1), received, sent)
        full = m.gather_from_sequence_parallel_region(tokens.relu(), group=group, output_split_sizes=sizes)
        part = m.reduce_scatter_to_sequence_parallel_region(full * 2, group, sizes)
        back = m.all_to_all(group, part, sent, received)
        mine = m.all_to_all_dims(back.view(2, world, 4, 4), 2, 1, group, scatter_sizes=heads)
        home = m.all_to_all_dims(mine * 2, 1, 2, group, scatter_sizes=rows, gather_sizes=heads)
        every = m.all_gather_dim(home, 1, group, sizes=rows)
        some = m.reduce_scatter_dim(every.relu(), 1, group, sizes=rows)
        return (some + m.split_dim(every, 1, group, sizes=rows)).sin()

    return layer


def run_compiled(group: ProcessGroup, backend: str, made_by: str = "whole_layer") -> dict[str, int]:
    import torch._dynamo
    from torch._dynamo.utils import counters

    layer = globals()[made_by](group)
    torch._dynamo.reset()
    counters.clear()
    compiled: Any = torch.compile(layer, fullgraph=True, backend=backend)
    made = torch.Generator().manual_seed(group.rank())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for call in range(CALLS):
            values = torch.randn(4, 16, generator=made)
            x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
            if call == 1:
                record.reset()
            out = compiled(x)
            out.sum().backward()
            wanted = layer(y) if call in (0, 1, CALLS - 1) else None
            if wanted is not None:
                wanted.sum().backward()
                torch.testing.assert_close(out, wanted)
                torch.testing.assert_close(x.grad, y.grad)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    counted = record.counters()
    return {name: count.calls for (name, path), count in counted.items() if path == "compiled"}


def check(answers: list[dict[str, int]]) -> None:
    for calls in answers:
        assert calls.get("all_to_all_sp2hp") == CALLS - 1, calls
        assert calls.get("all_to_all_hp2sp") == CALLS - 1, calls
        assert calls.get("all_to_all_dims", 0) >= CALLS - 1, calls
        assert calls.get("gather_from_sequence_parallel_region") == CALLS - 1, calls
        assert any(name.endswith(".backward") for name in calls), calls


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_is_eager(pool: Pool, backend: str, world: int) -> None:
    check(pool.run(run_compiled, backend, world=world))


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_split_sizes_compile(pool: Pool, backend: str, world: int) -> None:
    for calls in pool.run(run_compiled, backend, "uneven_layer", world=world):
        assert calls.get("all_to_all") == 2 * (CALLS - 1), calls
        assert calls.get("all_to_all_dims") == 4 * (CALLS - 1), calls
        assert calls.get("reduce_scatter_dim") == 2 * (CALLS - 1), calls
        assert calls.get("reduce_scatter_to_sequence_parallel_region") == CALLS - 1, calls


@pytest.mark.skipif(not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler")
def test_inductor(pool: Pool) -> None:
    check(pool.run(run_compiled, "inductor", world=2, timeout=110))
