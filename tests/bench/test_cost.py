"""Counts of the benchmarks: passes over memory and peak memory of a call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import cost
from bench.cost import Cost


@pytest.mark.parametrize(
    ("call", "moved", "peak"),
    [
        pytest.param(lambda x: x + 1, 2, 1, id="add"),
        pytest.param(lambda x: x.add_(1), 2, 0, id="add-in-place"),
        pytest.param(lambda x: (x + 1) + 1, 4, 2, id="add-twice"),
        pytest.param(lambda x: [(x + 1).sum(), (x + 1).sum()], 6 + 2 / 64, 1 + 2 / 64, id="memory-released"),
        pytest.param(lambda x: x.t().view(8, 2, 4), 0, 0, id="view"),
        pytest.param(lambda x: x.t().reshape(-1), 2, 1, id="view-that-copies"),
        pytest.param(torch.zeros_like, 1, 1, id="only-written"),
        pytest.param(lambda x: torch.exp(x, out=x.new_empty(8, 8)), 2, 1, id="given-result"),
        pytest.param(lambda x: x + x.bfloat16(), 1.5 + 2.5 + 2, 1.5, id="dtypes-mixed"),
        pytest.param(lambda x: x.logsumexp(-1), 6 + 1 / 8, 1 + 1 / 8, id="composed"),
        pytest.param(
            lambda x: x.index_fill_(0, torch.ones(2, dtype=torch.int64), 0.0), 2 / 16 + 2 / 8, 1 / 16, id="few-rows"
        ),
    ],
)
def test_bytes_and_peak_of_a_call(call: Callable[[Tensor], Any], moved: float, peak: float) -> None:
    x = torch.ones(8, 8)
    with Cost() as counted:
        call(x)
    assert (counted.moved, counted.peak) == (moved * x.nbytes, peak * x.nbytes)
    assert cost.least(lambda: call(x)) == (0, moved * x.nbytes, peak * x.nbytes)


def test_counts_of_several_ranks() -> None:
    assert cost.over_ranks([(1, 80, 40), (2, 160, 20)], size=20) == {"messages": 2, "passes": 3.0, "peak": 2.0}
    counts = {"messages": 2.0, "passes": 3.0}
    assert cost.more_than("a", counts, counts, "DTensor") == []
    assert cost.more_than("a", counts, counts | {"passes": 2.5}, "DTensor") == ["a: passes 3, DTensor's 2.5"]
