"""transformers' Trainer on batches with images over sequence shards is the Trainer of one process."""

import importlib.util

import pytest
from jobs import run_late_ranks
from vision_jobs import CASES, VisionReport, run_job_of_vision

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "peft")),
        reason="transformers, accelerate or peft is not installed",
    ),
    pytest.mark.timeout(300),  # processes that import transformers each, on a machine that may be busy
]


@pytest.fixture(scope="module")
def two_ranks() -> list[VisionReport]:
    return run_late_ranks(run_job_of_vision, 2, timeout=60.0)


@pytest.mark.parametrize("case", list(CASES))
def test_two_ranks_train_as_one_process(two_ranks: list[VisionReport], case: str) -> None:
    """Losses, norms, weights, an evaluation and predictions; also the counts that a Trainer gathers."""
    alone = two_ranks[0].alone[case]
    assert len(set(alone.steps.losses)) == 3
    for report in two_ranks:
        found = report.sharded[case]
        assert found.steps.losses == pytest.approx(alone.steps.losses, rel=1e-5)
        assert found.steps.norms == pytest.approx(alone.steps.norms, rel=1e-4)
        assert found.evaluation == pytest.approx(alone.evaluation, rel=1e-5)
        assert found.counts == alone.counts
        for mine, other in zip(found.weights, alone.weights, strict=True):
            assert abs(mine - other).max() <= 1e-6
        if alone.predictions is not None:
            assert found.predictions.shape == alone.predictions.shape
            assert abs(found.predictions - alone.predictions).max() <= 2e-5


def test_ranks_with_samples_of_their_own_are_refused(two_ranks: list[VisionReport]) -> None:
    """As those of a Trainer without the mixin."""
    for report in two_ranks:
        assert "MismatchError" in report.errors["plain"]
        assert "ranks of the group have different batches" in report.errors["plain"]
