"""transformers' Trainer over sequence shards is the Trainer of one process; every misuse raises on every rank."""

import ast
import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
from jobs import run_late_ranks
from trainer_classes import trainers
from trainer_jobs import KINDS, PACKED, Report, Run, run_job_of_trainers

import tritoncomm
from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations.transformers import trainer
from tritoncomm.integrations.transformers.trainer import TRAINERS, UlyssesTrainerMixin

pytestmark = [
    pytest.mark.skipif(
        any(importlib.util.find_spec(name) is None for name in ("transformers", "accelerate", "peft")),
        reason="transformers, accelerate or peft is not installed",
    ),
    pytest.mark.timeout(300),  # processes that import transformers each, on a machine that may be busy
]


def job(function: Callable[..., Any], world: int, *args: Any) -> list[Any]:
    return run_late_ranks(function, world, *args, timeout=60.0 * world)


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
    "own loss": "UnsupportedError: tritoncomm_ulysses: WhisperForCausalLM computes its loss by a formula of its own",
    "prompts": "UnsupportedError: Sharded: prompt learning puts virtual tokens before every shard",
    "generation": "UnsupportedError: Sequence: predict_with_generate: not supported over sequence shards; set "
    "predict_with_generate=False, and generate on full sequences after switch(model, 'sdpa')",
    "options": "UnsupportedError: Sharded: compute_loss_func, label_smoothing_factor, dispatch_batches, "
    "train_sampling_strategy='batch_rebalance', deepspeed: not supported over sequence shards",
    "no use_cpu": "ArgumentError: Sharded: accelerate takes this job of 2 ranks for 1; without a GPU, set "
    "use_cpu=True in TrainingArguments",
    "fsdp": "UnsupportedError: Sharded: FSDP was asked for, and every rank has all weights: accelerate shards none on "
    "CPUs; leave fsdp out",
}


def test_every_misuse_raises_on_every_rank(two_ranks: list[Report]) -> None:
    for report in two_ranks:
        assert report.errors.keys() == MISUSES.keys()
        for case, text in MISUSES.items():
            assert report.errors[case].startswith(text), (case, report.errors[case])


@pytest.mark.parametrize(("size", "is_frozen", "refused"), [(2, True, True), (4, True, False), (2, False, False)])
def test_frozen_weights_on_gpus_in_some_of_the_ranks_are_refused(
    monkeypatch: pytest.MonkeyPatch, size: int, is_frozen: bool, refused: bool
) -> None:
    """Of 4 ranks, with stand-ins for weights of a GPU that FSDP2 has sharded, as transformers does by itself."""
    monkeypatch.setattr(trainer, "DTensor", SimpleNamespace)
    weights = [SimpleNamespace(is_cuda=True, requires_grad=not (is_frozen and n)) for n in range(2)]
    one: Any = object.__new__(UlyssesTrainerMixin)
    one.args, one.accelerator = SimpleNamespace(fsdp=False), SimpleNamespace(num_processes=4)
    one.model = SimpleNamespace(parameters=lambda: weights)
    one.sequence_group = SimpleNamespace(size=lambda: size)
    error = pytest.raises(UnsupportedError, match="frozen weights under FSDP2 on GPUs, in sequence groups of 2 of 4")
    with error if refused else nullcontext():
        one._UlyssesTrainerMixin__check_weights()


def attributes(kind: type) -> set[str]:
    """Names of a class and its bases, and of all that their methods assign to self."""
    names = set(dir(kind))
    for base in kind.__mro__:
        if base.__module__.partition(".")[0] not in ("transformers", "trl", "tritoncomm"):
            continue
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base)))):
            if (
                isinstance(node, ast.Attribute)
                and isinstance(node.ctx, ast.Store)
                and ast.unparse(node.value) == "self"
            ):
                names.add(node.attr)
    return names


def test_nobody_else_takes_the_names_of_the_mixin() -> None:
    """TRL's GRPOTrainer has a counter `_step`; names of a class begin with its own name where they are private."""
    import transformers

    overridden = attributes(transformers.Trainer)
    own = {name for name in attributes(UlyssesTrainerMixin) if not name.startswith("__")} - overridden
    assert {name for name in own if name.startswith("_") and not name.startswith("_UlyssesTrainerMixin__")} == set()
    for kind in trainers():
        assert own & (attributes(kind) - overridden) == set(), kind


def test_trainers_of_trl_are_right_or_refused_when_they_are_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """By their own names, subclasses too, with the remedy; a trainer that TRL adds is not known, and refused."""
    monkeypatch.setitem(sys.modules, "trl", SimpleNamespace(__version__="1.15.0"))
    right = {name for name, kind in TRAINERS.items() if kind.strategy is not None}
    assert right == {"SFTTrainer", "DPOTrainer", "KTOTrainer"}
    for name in (*TRAINERS, "NewTrainer"):
        base = type(name, (), {"__module__": f"trl.trainer.{name.lower()}", "training_step": None})
        reason = TRAINERS[name].reason if name in TRAINERS else "is not known to be right"
        words = "'x' is not registered" if name in right else f"Mixed: {name} {reason}: not supported over sequence"
        for kind in (base, type("Own", (base,), {"__module__": "own"})):
            mixed = type("Mixed", (UlyssesTrainerMixin, kind), {})
            with pytest.raises(tritoncomm.errors.CommError, match=words):
                mixed(ulysses="x")
    monkeypatch.undo()
    for kind in trainers():
        name = kind.__name__
        assert not kind.__module__.startswith("trl.") or name in TRAINERS, f"is {name} right over sequence shards?"
