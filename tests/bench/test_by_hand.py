"""The mappings in plain torch that the benchmark compares with are right: values and gradients of ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from bench import bench_mappings
from tritoncomm import mappings
from tritoncomm.bench import by_hand

WORLD = bench_mappings.WORLD
EVEN = [case for case in bench_mappings.CASES if case.note != "split sizes"]


def run_both(group: ProcessGroup, label: str) -> list[tuple[Tensor, Tensor]]:
    """Value and gradient of a case, of ours and by hand."""
    (case,) = (case for case in bench_mappings.CASES if case.label == label)

    def run(module: Any) -> tuple[Tensor, Tensor]:
        torch.manual_seed(group.rank())
        leaf = torch.randint(9, case.shape).float().requires_grad_()
        function: Callable[..., Tensor] = getattr(module, case.name)
        x = leaf * 1.0  # by hand overwrites
        if case.name == "all_to_all":
            out = function(group, x, **case.arguments)
        else:
            out = function(x, group=group, **case.arguments)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        assert leaf.grad is not None
        return out.detach(), leaf.grad

    return [run(mappings), run(by_hand)]


@pytest.mark.parametrize("case", EVEN, ids=lambda case: case.label)
def test_values_and_gradients_are_ours(pool: Pool, case: bench_mappings.Case) -> None:
    for (value, gradient), (plain_value, plain_gradient) in pool.run(run_both, case.label, world=WORLD):
        assert torch.equal(value, plain_value)
        assert torch.equal(gradient, plain_gradient)


def run_split_sizes(group: ProcessGroup) -> bool:
    """Whether an exchange by sizes, with rows from rank ``p`` to rank ``q`` in number ``p + q``, is ours."""
    rank, ranks = group.rank(), range(group.size())
    sent, received = [rank + q for q in ranks], [p + rank for p in ranks]
    x = torch.arange(sum(sent) * 2.0).view(-1, 2) + 100 * rank
    answers = []
    for module in (mappings, by_hand):
        leaf = x.clone().requires_grad_()
        out = module.all_to_all(group, leaf, received, sent)
        (out * torch.arange(out.numel()).view(out.shape)).sum().backward()
        answers.append((out.detach(), leaf.grad))
    return all(torch.equal(ours, plain) for ours, plain in zip(*answers, strict=True))


def test_an_exchange_by_sizes_is_ours(pool: Pool) -> None:
    assert pool.run(run_split_sizes, world=2) == [True, True]


def test_collectives_of_a_row_are_those_that_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row's enqueue has as many collectives as the call by hand starts."""
    started: list[str] = []

    def counted(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        return lambda *args, **kwargs: (started.append(name), original(*args, **kwargs))[1]

    for name in ("all_reduce", "all_gather", "reduce_scatter", "all_to_all_single"):
        monkeypatch.setattr(by_hand.dist, name, counted(name, getattr(by_hand.dist, name)))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(by_hand, name, counted(name, getattr(by_hand, name)))
    with bench_mappings.host() as group:
        for case in bench_mappings.CASES:
            for mode, call in bench_mappings.calls(by_hand, case, group).items():
                started.clear()
                call()
                assert len(started) == len(case.collectives(mode)), (case.label, mode, started)


def run_experts(group: ProcessGroup) -> tuple[Tensor, Tensor, Tensor]:
    """Two tokens of each expert from every rank, whose values are the expert's number: (x, result, rows of experts)."""
    ids = torch.tensor([3, 0, 2, 1, 1, 3, 0, 2])[:, None]
    x, seen = ids.float().expand(-1, 4).contiguous(), []

    def layer(rows: Tensor) -> Tensor:
        seen.append(rows)
        return rows * 2

    out = by_hand.experts(x, ids, torch.full(ids.shape, 0.5), 4, layer, group)
    return x, out, seen[0]


def test_rows_by_hand_are_sorted_by_expert(pool: Pool) -> None:
    for rank, (x, out, rows) in enumerate(pool.run(run_experts, world=2)):
        assert torch.equal(out, x)
        assert rows[:, 0].tolist() == [2.0 * rank] * 4 + [2.0 * rank + 1] * 4
