"""Losses of whole sequences over shards, of a trainer that makes the calls of TRL's DPOTrainer and KTOTrainer."""

import importlib.util
from collections.abc import Callable
from typing import Any

import pytest
from jobs import run_late_ranks
from preference_jobs import CASES, Outcome, Report, run_job_of_preferences

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "peft")),
        reason="transformers, accelerate or peft is not installed",
    ),
    pytest.mark.timeout(300),  # processes that import transformers each, on a machine that may be busy
]


RUN = ("reference", "hybrid", "generates")  # which has adapters, too


def job(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    return run_late_ranks(function, world, *args, timeout=60.0 * world)


@pytest.fixture(scope="module")
def two_ranks() -> list[Report]:
    return job(run_job_of_preferences, 2, 2, RUN)


# One process's own norms move by 3e-4 where each weight of a hybrid model moves by one rounding.
NUMBERS, WEIGHTS = {"hybrid": 3e-4}, {"hybrid": 4e-6}


def check(case: str, alone: Outcome, sharded: Outcome, is_one_lane: bool = True) -> None:
    assert len({log["loss"] for log in alone.logs if "loss" in log}) == 3
    steps = 4 if not is_one_lane else len(alone.logs)  # numbers of a part of a step are then of other samples
    for mine, other in zip(sharded.logs[:steps], alone.logs[:steps], strict=True):
        assert mine == pytest.approx(other, rel=NUMBERS.get(case, 2e-5), abs=2e-5)
    for mine, other in zip(sharded.weights, alone.weights, strict=True):
        assert abs(mine - other).max() <= WEIGHTS.get(case, 1e-6)


@pytest.mark.parametrize("case", RUN)
def test_two_ranks_train_as_one_process(two_ranks: list[Report], case: str) -> None:
    """Losses, norms, weights, and every number that is gathered, one of them into the loss; also in evaluation."""
    for report in two_ranks:
        check(case, two_ranks[0].alone[case], report.sharded[case])
        assert set(report.sharded[case].attentions) == {"tritoncomm_ulysses"}
        assert len(report.sharded[case].attentions) == (8 if CASES[case].has_adapters else 16)


def test_the_fused_head_returns_numbers_of_all_tokens(two_ranks: list[Report]) -> None:
    """With the dtypes and the gradients of one process; a loss divided by another count is another loss."""
    for report in two_ranks:
        alone, sharded, counted = report.outputs
        assert sharded.keys() == alone.keys()
        for name, x in alone.items():
            assert (sharded[name].dtype, sharded[name].shape) == (x.dtype, x.shape), name
            assert abs(sharded[name] * 1.0 - x).max() <= 2e-5 * max(1.0, abs(x).max()), name
        assert counted["loss"] == pytest.approx(-alone["log_probs"].sum() / 7, rel=1e-5)


MISUSES = {
    "logits of predict": "UnsupportedError: Mixed: logits of full sequences are not supported over sequence shards",
    "metrics of logits": "UnsupportedError: Mixed: compute_metrics: not supported over sequence shards",
    "no fused head": "ArgumentError: tritoncomm_ulysses: shard_batch did not make these position_ids",
    "by place": "ArgumentError: tritoncomm_ulysses: LlamaForCausalLM: a call of the fused head needs keywords",
    "no labels": "ArgumentError: tritoncomm_ulysses: LlamaForCausalLM: a call of the fused head needs keywords",
    "unknown entry": "ArgumentError: shard_batch: 'token_type_ids' is not supported, only input_ids, ",
    "router's loss": "UnsupportedError: tritoncomm_ulysses: LlamaForCausalLM: the fused head returns aux_loss, which",
    "head of a unit": "UnsupportedError: Mixed: the head of LlamaForCausalLM is sharded, and the model is no unit of",
    "head of a unit, labels": "UnsupportedError: Sharded: the head of LlamaForCausalLM is sharded, and the model is no",
    "earlier TRL": "UnsupportedError: Mixed: DPOTrainer of TRL before 1.15 makes logits; install trl>=1.15",
}


def test_every_misuse_raises_on_every_rank(two_ranks: list[Report]) -> None:
    for report in two_ranks:
        assert report.errors.keys() == MISUSES.keys()
        for case, text in MISUSES.items():
            assert report.errors[case].startswith(text), (case, report.errors[case])


def test_another_attention_takes_every_hook_away(two_ranks: list[Report]) -> None:
    """Of the model, of a copy, and of one that was saved and loaded."""
    assert [report.undone for report in two_ranks] == [[0, 0, 0]] * 2


@pytest.mark.slow
def test_two_sequence_groups_are_data_parallel() -> None:
    reports = job(run_job_of_preferences, 4, 2, ("reference", "adapters"))
    for name in ("reference", "adapters"):
        for report in reports:
            check(name, reports[0].alone[name], report.sharded[name], is_one_lane=False)
