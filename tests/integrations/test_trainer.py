"""transformers' Trainer over sequence shards is the Trainer of one process; every misuse raises on every rank."""

import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from jobs import run_job
from torch.distributed import TCPStore
from trainer_jobs import KINDS, PACKED, Report, Run, run_job_of_trainers

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "peft")),
        reason="transformers, accelerate or peft is not installed",
    ),
    pytest.mark.timeout(300),  # processes that import transformers each, on a machine that may be busy
]


def job(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    """``function(variables of all ranks, *args)`` in processes that are ranks as soon as they take these variables."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world), "TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_USE_AGENT_STORE": "True",
    }  # fmt: skip
    ranks = [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(world)]
    places = [{"PLACE": str(rank), "OMP_NUM_THREADS": "1"} for rank in range(world)]
    results = run_job(function, places, ranks, *args, timeout=60.0 * world)
    assert not any(result is None or isinstance(result, str) for result in results), results
    return results


@pytest.fixture(scope="module")
def two_ranks() -> list[Report]:
    return job(run_job_of_trainers, 2, 2, 2, 5)


def check_runs(alone: Run | None, runs: Iterable[Run], evaluated: int, logits: float = 1e-6) -> None:
    assert alone is not None
    for sharded in runs:
        assert sharded.losses == pytest.approx(alone.losses, abs=1e-6)
        assert len(set(alone.losses)) == 3
        assert sharded.norms == pytest.approx(alone.norms, abs=1e-6)
        assert max(alone.norms) > 0.5  # so that gradients are clipped
        assert sharded.tokens == alone.tokens
        assert sharded.evaluation == pytest.approx(alone.evaluation, abs=1e-6)
        assert sharded.predictions.shape == alone.predictions.shape == (evaluated, 15, 32)
        assert abs(sharded.predictions - alone.predictions).max() <= logits
        for mine, other in zip(sharded.weights, alone.weights, strict=True):
            assert abs(mine - other).max() <= 1e-6


def test_three_steps_are_those_of_one_process(two_ranks: list[Report]) -> None:
    check_runs(two_ranks[0].alone, [report.sharded for report in two_ranks], 5)


def test_adapters_train_as_in_one_process(two_ranks: list[Report]) -> None:
    """LoRA of peft: frozen weights have no gradient, and the shards of the adapters' gradients are summed."""
    runs = [report.adapted for report in two_ranks]
    assert runs[0] is not None
    check_runs(runs[0][0], [run[1] for run in runs if run], 5, logits=4e-6)  # adapters multiply twice


@pytest.mark.parametrize("case", PACKED)
def test_packed_documents_train_as_rows_of_one_process(two_ranks: list[Report], case: str) -> None:
    """Also where labels at starts of documents, which are left out, would be counted in the mean."""
    alone = two_ranks[0].packed[case][0]
    assert alone is not None
    assert len(set(alone.losses)) == 4
    for report in two_ranks:
        assert report.packed[case][1].losses == pytest.approx(alone.losses, abs=2e-6)
        assert report.packed[case][1].norms == pytest.approx(alone.norms, rel=1e-4)


def check_sums(reports: list[Report]) -> None:
    alone = reports[0].sums[0]
    assert alone is not None
    assert len({right for _, right, _ in alone.counts}) > 1
    for _, sharded in (report.sums for report in reports):
        assert sharded.losses == pytest.approx(alone.losses, abs=1e-6)
        assert alone.losses[-1] == alone.losses[-2]
        totals = [[sum(column) for column in zip(*run.counts, strict=True)] for run in (alone, sharded)]
        assert totals[0] == totals[1]  # batches differ where there are more groups than one
        assert len(reports) > 2 or sharded.counts == alone.counts


def test_counts_that_a_class_gathers_are_those_of_one_process(two_ranks: list[Report]) -> None:
    check_sums(two_ranks)


@pytest.mark.parametrize("kind", KINDS)
def test_shards_change_little_more_than_bf16_does(two_ranks: list[Report], kind: str) -> None:
    """Two ranks round the gradient of each weight twice before it is added; autocast rounds about as much."""
    exact, alone = (two_ranks[0].rounded[kind][name] for name in ("exact", "alone"))
    for report in two_ranks:
        for own, other, true in zip(report.rounded[kind]["sharded"], alone, exact, strict=True):
            assert len(set(other)) == len(own) == 4
            changed, rounded = (max(map(abs, map(float.__sub__, other, each))) for each in (own, true))
            assert changed <= 3 * rounded, (own, other, true)


def test_rank_0_saves_the_model(two_ranks: list[Report]) -> None:
    assert ["model.safetensors" in report.saved for report in two_ranks] == [True, False]
    assert all(f"rng_state_{rank}.pth" in report.saved for rank, report in enumerate(two_ranks))


@pytest.mark.slow
def test_two_sequence_groups_are_data_parallel() -> None:
    reports = job(run_job_of_trainers, 4, 2, 1, 4)
    check_runs(reports[0].alone, [report.sharded for report in reports], 4)
    check_sums(reports)


NOT_SHARDED = "ArgumentError: tritoncomm_ulysses: shard_batch did not make these position_ids"
MAY_BE_MEANS = (
    "UnsupportedError: Mixed: compute_loss of trainer_jobs._summing_trainer.<locals>.Summing gathers numbers of a "
    "sequence shard for metrics. If each is a sum over tokens of its shard, and no mean, set metrics_are_sums = True"
)
OTHER_SAMPLES = "MismatchError: shard_batch: ranks of the group have different batches, nothing was sent: input_ids is"
MISUSES = {
    "train": NOT_SHARDED,
    "evaluate": NOT_SHARDED,
    "predict": NOT_SHARDED,
    "own samples": OTHER_SAMPLES,
    "own samples, in check mode": OTHER_SAMPLES,
    "no labels": "ArgumentError: Sharded: a batch needs labels, only input_ids are there",
    "sums or means, train": MAY_BE_MEANS,
    "sums or means, evaluate": MAY_BE_MEANS,
    "no registration": "ArgumentError: 'none' is not registered here",
    "a group of one": "register: the sequence group has one rank of 2, so no sequence is sharded; "
    "initialize(context=...) with the number of ranks that share one",
    "options": "UnsupportedError: Sharded: compute_loss_func, label_smoothing_factor, dispatch_batches, "
    "train_sampling_strategy='batch_rebalance': not supported over sequence shards",
}


def test_every_misuse_raises_on_every_rank(two_ranks: list[Report]) -> None:
    for report in two_ranks:
        assert report.errors.keys() == MISUSES.keys()
        for case, text in MISUSES.items():
            assert report.errors[case].startswith(text), (case, report.errors[case])
