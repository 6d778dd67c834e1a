"""`tritoncomm.verify`: right programs are equal, and of wrong ones the first wrong module is named."""

import copy
import json
import math
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from jobs import without_launcher
from pool import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from typer.testing import CliRunner
from verify_faults import BUILDS, FAULTS
from verify_processes import run_kind
from verify_programs import PROGRAMS, masked, sampled

from tritoncomm import cli, mappings, verify
from tritoncomm.demo.plain_model import PlainTransformer
from tritoncomm.demo.settings import Settings
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.verify import explanations, processes, running
from tritoncomm.verify.processes import VerifyError
from tritoncomm.verify.relations import difference, find, is_telling

ROOT = Path(__file__).parents[1]


def report_of(group: ProcessGroup, model: str, fault: str = "") -> verify.Report:
    """The report on a model with a fault, or on a program that is right."""
    build = partial(BUILDS[model], fault=fault) if fault else PROGRAMS[model]
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        alone = (BUILDS[model] if fault else build)(0, 1, None, None)
        assert isinstance(alone.model, torch.nn.Module)
        verify.draw(alone.model)
        state = {name: x.clone() for name, x in alone.model.state_dict().items()}
        whole = verify.record(alone)
        torch.manual_seed(0)
        return verify.compare(whole, verify.record(build(group.rank(), group.size(), group, state)), group)
    finally:
        torch.set_default_dtype(before)


MODELS = (
    "llama", "mistral", "qwen2", "qwen3", "qwen3_moe", "mixtral", "gemma3_text", "phi3", "gpt2", "gpt_neox",
    "olmo2", "cohere", "granite", "starcoder2",
)  # fmt: skip


def run_model(group: ProcessGroup, kind: str) -> verify.Report:
    """The report on a model of transformers under our Ulysses attention."""
    from tritoncomm.integrations import transformers as ours
    from tritoncomm.verify.transformers_models import case_of

    build, before = case_of(kind), torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        alone = build(0, 1, None, None)
        assert isinstance(alone.model, torch.nn.Module)
        verify.without_noise(alone.model)
        verify.draw(alone.model)
        state = {name: x.clone() for name, x in alone.model.state_dict().items()}
        whole, mine = verify.record(alone), build(group.rank(), group.size(), group, state)
        assert isinstance(mine.model, torch.nn.Module)
        verify.without_noise(mine.model)
        return verify.compare(whole, verify.record(mine), group)
    finally:
        torch.set_default_dtype(before)
        ours.unregister()


def run_cases(group: ProcessGroup, cases: list[tuple[str, ...]]) -> list[verify.Report]:
    return [report_of(group, *case) for case in cases]


RIGHT = [(name,) for name in PROGRAMS]


@pytest.mark.parametrize(
    ("world", "programs"),
    [(2, RIGHT[::8]), pytest.param(2, RIGHT, marks=pytest.mark.slow), pytest.param(4, RIGHT, marks=pytest.mark.slow)],
    ids=["an eighth", "2 ranks", "4 ranks"],
)
def test_right_programs_are_equal(pool: Pool, world: int, programs: list[tuple[str]]) -> None:
    wrong = []
    programs = [each for each in programs if each[0] not in ("hsdp", "fsdp2 over tensor parallel") or world == 4]
    for every in pool.run(run_cases, programs, world=world, timeout=300):
        for (name,), report in zip(programs, every, strict=True):
            if (
                not report.equal
                or 2 * report.counts["compared"] < sum(report.counts.values()) - report.counts["compared"]
            ):
                wrong.append(f"{name}: {report}")
    assert not wrong, "\n\n".join(wrong)


NEW = [
    ("padded vocabulary",),
    ("sampler",),
    ("sampler, token numbers",),
    ("torch's pipeline",),
    ("fsdp2 over tensor parallel",),
]


def test_other_orders_are_equal(pool: Pool) -> None:
    """A dim split twice, forwards that infer shapes, samples by strides: those of the model's inputs alone."""
    for every in pool.run(run_cases, NEW, world=4, timeout=100):
        for (name,), report in zip(NEW, every, strict=True):
            assert report.equal, f"{name}: {report}"
            assert report.counts["gradients"] >= 4
    (report, *_) = pool.run(mixed_report, world=2)
    assert report.first == "", str(report)


MASKED = {"mask": "embed", "sum": "down", "logits": "head"}
"""First wrong module of the faults of a padded vocabulary, whose lookups are wrong before they are masked."""


@pytest.mark.parametrize(("world", "frozen"), [(2, False), (2, True), (4, False)])
def test_an_output_that_is_repaired_hides_no_fault(pool: Pool, world: int, frozen: bool) -> None:
    for rank in pool.run(run_masked, frozen, world=world):
        for fault, module in MASKED.items():
            report = rank[fault]
            assert report.first == (module if fault != "logits" else ""), f"{fault}: {report}"
        assert "never summed" in str(rank["sum"])
        assert "embed" not in rank["sum"].lines[0]


def run_masked(group: ProcessGroup, frozen: bool) -> dict[str, verify.Report]:
    reports = {}
    for fault in MASKED:
        torch.manual_seed(0)
        alone = masked(0, 1, None, None, frozen=frozen)
        verify.draw(alone.model)  # pyright: ignore
        state = {name: x.clone() for name, x in alone.model.state_dict().items()}  # pyright: ignore
        whole = verify.record(alone)
        mine = verify.record(masked(group.rank(), group.size(), group, state, fault, frozen))
        reports[fault] = verify.compare(whole, mine, group)
    return reports


def test_what_is_kept_elsewhere_and_in_another_dtype() -> None:
    """Gradients in fp32 of a step in float64, as mixed optimizers keep them; values that only a hook returns."""
    runs = []
    for hooks in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8, dtype=torch.float64)
        values = {id(x): x.detach().clone() for x in model.parameters()}

        def step(model: nn.Module = model) -> Tensor:
            loss = model(torch.ones(4, 8, dtype=torch.float64)).square().mean()
            loss.backward()
            return loss.detach()

        more = {
            "gradient": lambda x: x.grad.float(),
            "value": lambda x, values=values: values[id(x)],
        }  # fmt: skip
        case = verify.Case(model, step, **(more if hooks else {}))  # pyright: ignore
        runs.append(verify.record(case))
    report = verify.compare(runs[0], [runs[1]])
    assert report.equal, str(report)
    assert "the ranks' gradients are torch.float32: compared within its rounding" in report.lines
    runs[1].gradients["weight"] = runs[1].gradients["weight"] * (1 + 1e-4)  # pyright: ignore
    assert verify.compare(runs[0], [runs[1]]).first == ""
    runs[1].parameters["weight"] = torch.zeros(0)
    assert "parameter weight" in str(verify.compare(runs[0], [runs[1]]))


class Counted(nn.Module):
    """Modules without tensors, and a parameter of integers; the counter runs ``times`` times."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times, self.counter, self.last = times, Counter(), nn.Linear(4, 4, dtype=torch.float64)
        self.codes = nn.Parameter(torch.arange(4), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            self.counter(3)
        return self.last(x)


class Counter(nn.Module):
    def forward(self, number: int) -> int:
        return number


def test_modules_without_tensors_and_parameters_of_integers() -> None:
    def recorded_with(times: int) -> verify.Recording:
        torch.manual_seed(0)
        model = Counted(times)
        x = torch.randn(2, 4, generator=torch.Generator().manual_seed(1)).double()

        def step() -> Tensor:
            loss = model(x).square().mean()
            loss.backward()
            return loss

        return verify.record(verify.Case(model, step))

    assert verify.compare(recorded_with(1), [recorded_with(1)]).equal
    report = verify.compare(recorded_with(1), [recorded_with(2)])
    assert report.problem == ""
    assert report.equal, "the module around it is right"
    whole, part = recorded_with(1), recorded_with(1)
    part.parameters["codes"] = part.parameters["codes"] + 1
    assert "parameter codes" in str(verify.compare(whole, [part]))


def mixed_report(group: ProcessGroup) -> verify.Report:
    torch.manual_seed(0)
    alone = sampled(0, 1, None, None)
    whole = verify.record(alone)
    return verify.compare(
        whole, verify.record(sampled(group.rank(), group.size(), group, alone.model.state_dict(), mixed=True)), group
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("world", [2, 4])  # by 4 with two heads of keys and values
def test_models_over_sequence_shards_are_equal(pool: Pool, kind: str, world: int) -> None:
    pytest.importorskip("transformers")
    reports = pool.run(run_model, kind, world=world, timeout=300)
    assert all(each == reports[0] for each in reports)
    assert reports[0].equal, str(reports[0])
    assert reports[0].counts["compared"] > 100


EVERY = [(model, fault) for fault, model in FAULTS]


def test_every_fault_stands_in_two_models() -> None:
    models: dict[str, set[str]] = {}
    for fault, model in FAULTS:
        models.setdefault(fault, set()).add(model)
    assert len(models) >= 20
    assert all(len(each) >= 2 for each in models.values())
    named = {fault for fault in models if all(words for (each, _), (_, words) in FAULTS.items() if each == fault)}
    assert len(named) >= 14, "the cause in words"


@pytest.mark.parametrize(
    ("world", "cases"),
    [(2, EVERY[::6]), pytest.param(2, EVERY, marks=pytest.mark.slow), pytest.param(4, EVERY, marks=pytest.mark.slow)],
    ids=["a sixth", "2 ranks", "4 ranks"],
)
def test_faults_are_named(pool: Pool, world: int, cases: list[tuple[str, str]]) -> None:
    ranks = pool.run(run_cases, cases, world=world, timeout=300)
    assert all(each == ranks[0] for each in ranks)
    wrong = []
    for (model, fault), report in zip(cases, ranks[0], strict=True):
        first, words = FAULTS[fault, model]
        if report.equal or report.first != first or words not in str(report):
            wrong.append(f"{model}, {fault}: {report.first}\n{report}")
    assert not wrong, "\n\n".join(wrong)


def recorded(
    change: Callable[[str, Tensor], Tensor] = lambda place, x: x, dtype: torch.dtype = torch.float64, **more: Any
) -> verify.Recording:
    """A step of a small model; ``change`` gets weight, output and gradient of its first module, and the loss."""
    made = torch.Generator().manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)).double()
    verify.draw(model)
    model.to(dtype)
    for name in more.get("frozen", ()):
        model.get_parameter(name).requires_grad_(False)
    if "adapter" in more:
        model.add_module("adapter", torch.nn.Linear(2, 2, dtype=dtype))
        torch.nn.init.zeros_(model.adapter.weight)
        torch.nn.init.zeros_(model.adapter.bias)
    x = torch.randn(8, 6, generator=made, dtype=torch.float64).to(dtype)
    with torch.no_grad():
        model[0].weight.copy_(change("parameter", model[0].weight))
    model[0].register_forward_hook(lambda module, args, out: change("output", out))

    def step() -> Tensor:
        hidden = model[2](model[1](model[0](x)))
        loss = (hidden + model.adapter(hidden) if "adapter" in more else hidden).square().mean()
        loss.backward()
        if model[0].weight.grad is not None:
            model[0].weight.grad = change("gradient", model[0].weight.grad)
        return change("loss", loss.detach())

    return verify.record(verify.Case(model, step))


def odd(where: str, value: float, whole: bool) -> Callable[[str, Tensor], Tensor]:
    """A change that sets all values of a place, or the last one."""

    def change(place: str, x: Tensor) -> Tensor:
        if place != where:
            return x
        mask = (
            torch.ones(x.shape, dtype=torch.bool) if whole else torch.arange(x.numel()).view(x.shape) == x.numel() - 1
        )
        return x.masked_fill(mask, value)

    return change


@pytest.mark.parametrize("whole", [True, False], ids=["all values", "one value"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", ["parameter", "output", "gradient", "loss"])
def test_what_is_not_finite_differs(where: str, value: float, whole: bool) -> None:
    """On one rank or on both, as an all-reduce makes it; the first module is named, with where it is so."""
    right, wrong = recorded(), recorded(odd(where, value, whole))
    for ranks, words in (([right, wrong], "rank 1"), ([wrong, wrong], "ranks 0, 1")):
        report = verify.compare(right, ranks)
        assert not report.equal, (where, words)
        assert report.first == ("" if where == "loss" else "0"), str(report)
        if where != "loss":
            kind = "NaN" if math.isnan(value) else "infinite"
            assert f"is {kind} on {words} (" in str(report), str(report)
            assert ("(all values)" in str(report)) == whole, str(report)
    assert verify.compare(wrong, [wrong, wrong]).problem == "" or where == "loss"


@pytest.mark.parametrize("name", ["0.weight", "2.bias"])
def test_both_sides_of_a_gradient_are_compared(name: str) -> None:
    """A gradient that one process has not, or has as zeros, and ranks have, and the other way round."""
    trained, frozen, module = recorded(), recorded(frozen=[name]), name[:1]
    report = verify.compare(frozen, [trained, trained])
    assert report.first == module
    assert f"gradient of {name} is not there in one process, and not zero on ranks 0, 1" in str(report)
    report = verify.compare(trained, [frozen, frozen])
    assert report.first == module
    assert f"gradient of {name} is None on ranks 0, 1" in str(report)
    zeros = copy.deepcopy(trained)
    zeros.gradients[name] = torch.zeros_like(zeros.parameters[name])
    report = verify.compare(zeros, [trained, zeros])
    assert report.first == module
    assert f"gradient of {name} is zero in one process, and not zero on rank 0" in str(report)
    assert verify.compare(zeros, [frozen, zeros]).equal, "zeros and none are the same to an optimizer"
    assert verify.compare(frozen, [frozen, zeros]).equal


class _Undefined(torch.autograd.Function):
    """A copy, which gives its input no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> None:
        return None


def test_an_output_whose_gradient_autograd_leaves_undefined() -> None:
    """Its hooks get None, as of outputs of TRL's fused head that no loss takes; nothing is recorded of it."""

    def recorded_with(factor: float) -> verify.Recording:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Linear(8, 8)).double()
        verify.draw(model)
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()

        def step() -> Tensor:
            hidden = model[0](x)
            loss = model[1](hidden.detach() if factor else hidden).square().mean() + _Undefined.apply(hidden).sum()
            loss.backward()
            return loss

        return verify.record(verify.Case(model, step), backward=True)

    assert verify.compare(recorded_with(1), [recorded_with(1)]).equal
    report = verify.compare(recorded_with(0), [recorded_with(1)])
    assert report.first == "0", str(report)
    assert verify.compare(recorded_with(1), [recorded_with(0)]).first == "0"


def test_a_parameter_that_trains_on_ranks_alone() -> None:
    plain, adapted = recorded(), recorded(adapter=True)
    report = verify.compare(plain, [adapted, adapted])
    assert report.first == "adapter"
    assert "parameter adapter.weight has a gradient on ranks 0, 1, and one process has no such parameter" in str(report)
    assert "on ranks alone: adapter, adapter.weight, adapter.bias" in str(report)
    for name in ("adapter.weight", "adapter.bias"):
        adapted.gradients[name] = None
    report = verify.compare(plain, [adapted, adapted])
    assert report.equal, "what reaches no loss and no gradient is listed alone"
    assert "on ranks alone: adapter" in str(report)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_bound_is_less_than_the_value(dtype: torch.dtype) -> None:
    """With the step in float64 beside it each wrong gradient is seen; what is below its rounding is counted."""
    whole, exact = recorded(dtype=dtype), recorded()
    rank = copy.deepcopy(whole)
    whole.exact = exact
    assert verify.compare(whole, [rank, rank]).equal
    for factor, words in ((0.0, "is 0 on all ranks"), (-1.0, "has the other sign"), (0.5, "is 1/2 of the whole one")):
        wrong = copy.deepcopy(rank)
        for name, x in whole.gradients.items():
            assert x is not None
            wrong.gradients[name] = x * factor
        report = verify.compare(whole, [wrong, wrong])
        assert report.first == "2", str(report)
        assert sum(f"gradient of {name} {words}" in str(report) for name in whole.gradients) == 4, str(report)
    exact.gradients["0.bias"] = torch.zeros(8, dtype=torch.float64)  # as in front of a norm
    other = copy.deepcopy(rank)
    other.gradients["0.bias"] = -10 * whole.gradients["0.bias"]  # type: ignore[operator]
    report = verify.compare(whole, [other, other])
    assert report.problem == "not checked: 1 tensor below the rounding of 16 bits"
    assert report.first is None
    assert report.not_compared == {"below the rounding of 16 bits": ["gradient 0.bias"]}
    whole.exact = None
    report = verify.compare(whole, [rank, rank])
    assert not report.equal
    assert "no step in float64 shows the rounding of 16 bits" in str(report)


def test_factors_in_words() -> None:
    whole = torch.tensor([1.0, 2.0, 4.0])
    words = {2: "is 2 times the whole one", 0.5: "is 1/2 of the whole one", -1: "has the other sign",
             -0.5: "is -1/2 of", -0.25: "is -1/4 of", -2: "is -2 times", 0: "is 0", 0.3: "is 0.3 times"}  # fmt: skip
    for factor, expected in words.items():
        assert str(explanations.factor_of([factor * whole], [whole], 1e-7)).startswith(expected)
    for value in (math.nan, math.inf):
        assert explanations.factor_of([torch.full((3,), value)], [whole], 1e-7) is None


def test_a_module_around_modules_that_one_rank_has_is_named(pool: Pool) -> None:
    for world in (2, 4):
        for (report,) in pool.run(run_cases, [("channels", "another expert's gate")], world=world):
            assert report.first == "mixture", str(report)


def relations(whole: torch.Tensor) -> list[verify.Relation]:
    """Relations of four ranks to a tensor ``[8, 12, 6]``."""
    of = verify.Relation
    return [
        of.equal(), of.chunk(0, 4), of.chunk(1, 4), of.chunk(0, 2), of.chunk(0, 2, 2), of.chunk(2, 2, 1),
        of(((0, 2, 1), (1, 2, 2))), of(((0, 2, 2), (1, 2, 1))), of.mirrored(0, 4), of.mirrored(1, 2),
        of.fused(1, 4, (4, 4, 4)), of.fused(1, 2, (4, 4, 4)), of.fused(1, 2, (6, 6)), of.chunk(1, 4, 1, (1, 6, 2, 3)),
        of.addends(4), of.addends(2), of.addends(2, 2), of(((1, 2, 1),), summed=(2, 2)),
        of(((0, 2, 2),), summed=(2, 1)),
        of(((1, 4, 1),), view="transposed"), of(view="transposed"), of(((0, 4, 1),), view="flat"),
    ]  # fmt: skip


def held(relation: verify.Relation, whole: torch.Tensor, ranks: int) -> list[torch.Tensor]:
    """What ranks hold by a relation; addends are random."""
    viewed = {"": whole, "transposed": whole.transpose(0, 1), "flat": whole.flatten(0, 1)}[relation.view]
    parts = []
    for k in range(ranks):
        part = relation.of(viewed, k)
        assert part is not None
        parts.append(part.clone())
    count, step = relation.summed
    for k in range(ranks):
        place = k // step % count
        if count > 1 and place < count - 1:
            addend = torch.randn(parts[k].shape, dtype=whole.dtype)
            last = k + (count - 1 - place) * step
            parts[last] = parts[last] - addend
            parts[k] = addend
    return parts


def test_a_relation_is_found_by_its_values() -> None:
    torch.manual_seed(0)
    whole = torch.randn(8, 12, 6, dtype=torch.float64)
    for relation in relations(whole):
        parts = held(relation, whole, 4)
        found = find(whole, parts, 1e-12)
        assert found.relation is not None, relation
        again = held(found.relation, whole, 4) if not relation.is_partial else parts
        assert all(map(torch.equal, parts, again)), (relation, found.relation)
        assert found.relation.summed == relation.summed, relation
        wrong = [x.contiguous().clone() for x in parts]
        wrong[1][(0,) * wrong[1].dim()] += 1e-6
        assert find(whole, wrong, 1e-12).relation is None, relation


def test_what_is_constant_proves_nothing() -> None:
    assert not is_telling(torch.zeros(3))
    assert not is_telling(torch.ones(2, 2))
    assert not is_telling(torch.zeros(()))
    assert not is_telling(torch.empty(0))
    assert is_telling(torch.tensor([1.0, 2.0]))
    assert is_telling(torch.tensor(0.5))


def test_differences_see_what_is_no_number() -> None:
    nan, inf = float("nan"), float("inf")
    assert difference(torch.tensor([nan, 1.0, inf]), torch.tensor([nan, 1.5, inf])) == 0.5
    assert difference(torch.tensor([nan]), torch.tensor([1.0])) == inf
    assert difference(torch.tensor([inf]), torch.tensor([-inf])) == inf


def alone(model: torch.nn.Module, x: torch.Tensor, **options: object) -> verify.Recording:
    return verify.record(verify.Case(model, lambda: model(x).square().sum(), **options))  # type: ignore[arg-type]


def test_names_of_another_program() -> None:
    torch.manual_seed(0)
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).double(), torch.randn(2, 4).double()
    whole = alone(model, x)
    stage = torch.nn.ModuleDict({"front": model[0], "back": model[1]})

    def run() -> torch.Tensor:
        return stage["back"](stage["front"](x)).square().sum()

    names = {"front.weight": "0.weight", "front.bias": "0.bias", "back": "1"}
    renamed = verify.record(verify.Case(stage, run, rename=names))
    assert {call.name for call in renamed.calls} == {"0", "1"}
    report = verify.compare(whole, [renamed])
    assert report.equal, str(report)
    assert report.counts["alone"] == 1, "the sequence itself has no partner"
    pattern = verify.record(
        verify.Case(stage, run, rename=lambda name: name.replace("front", "0").replace("back", "1"))
    )
    assert verify.compare(whole, [pattern]).equal
    skipped = verify.record(verify.Case(stage, run, rename=lambda name: None))
    report = verify.compare(whole, [skipped])
    assert report.problem == "not comparable: no output was compared, and one process has outputs"


def test_other_weights_are_not_comparable() -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    a, b = (torch.nn.Linear(4, 4) for _ in range(2))
    report = verify.compare(alone(a, x), [alone(b, x)])
    assert not report.equal
    assert report.problem == "not comparable: the runs do not start from the same weights"
    with pytest.raises(MismatchError, match="do not start from the same weights"):
        report.raise_if_different()
    verify.compare(alone(a, x), [alone(a, x)]).raise_if_different()


def test_what_is_recorded_can_be_chosen_and_kept(tmp_path: Path) -> None:
    model, x = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4)), torch.randn(2, 4)
    case = verify.Case(model, lambda: model(x).sum())
    assert {call.name for call in verify.record(case, only=["?"], skip=["1"]).calls} == {"0", "2"}
    kept = verify.record(case, to=tmp_path / "whole.recording")
    loaded = verify.Recording.load(tmp_path / "whole.recording")
    assert [call.name for call in loaded.calls] == ["0", "1", "2", ""]
    assert verify.compare(loaded, [kept]).equal
    assert not model[0]._forward_hooks
    assert not model[0]._forward_pre_hooks


def test_values_are_drawn_and_noise_is_named() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Dropout(0.25)).double()
    model[0].attention_dropout = 0.5  # type: ignore[assignment]
    verify.draw(model)
    assert all(len(p.detach().flatten().unique()) == p.numel() for p in model.parameters())
    assert all(torch.equal(p, p.float().double()) for p in model.parameters())  # some models keep parts in float32
    assert bool((model[1].weight > 0).all())
    assert sorted(verify.without_noise(model)) == ["0.attention_dropout = 0.5", "2.p = 0.25"]
    assert verify.without_noise(model) == []


CASE = """
import os, torch
from tritoncomm import verify

def build(rank, world, group, whole):
    model = torch.nn.Linear(4, 4)
    if whole is not None:
        model.load_state_dict(whole)
    {fault}
    x = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))
    def step():
        loss = model(x).square().mean()
        loss.backward()
        return loss
    return verify.Case(model, step)
"""


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        # A program that joins the group itself, by what torchrun sets.
        pytest.param(
            "torch.distributed.init_process_group('gloo', rank=int(os.environ['RANK']), "
            "world_size=int(os.environ['WORLD_SIZE']), init_method=f\"tcp://localhost:{os.environ['MASTER_PORT']}\"); "
            "assert os.environ['LOCAL_RANK'] == str(torch.distributed.get_rank())",
            0,
            "all equal",
            marks=pytest.mark.slow,
        ),
        pytest.param("if world > 1: model.bias.data += rank", 1, "only rank 1 differs", marks=pytest.mark.slow),
        pytest.param(
            "if rank == 1: raise ValueError('no such layer')", 2, "ValueError: no such layer", marks=pytest.mark.slow
        ),
        pytest.param(
            "if world > 1: model.reset_parameters()", 2, "do not start from the same weights", marks=pytest.mark.slow
        ),
        pytest.param("return None", 3, "has to return a verify.Case", marks=pytest.mark.slow),
    ],
    ids=["joins", "differs", "raises", "other weights", "no case"],
)
def test_the_command(tmp_path: Path, fault: str, code: int, text: str) -> None:
    (path := tmp_path / "case.py").write_text(CASE.format(fault=fault))
    done = command(f"{path}:build")
    assert done.returncode == code, done.stdout + done.stderr
    assert text in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count("Traceback") <= 1


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    variables = without_launcher(os.environ) | {"COLUMNS": "80", "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"}
    arguments = (sys.executable, "-m", "tritoncomm", "verify", *arguments)
    return subprocess.run(arguments, env=variables, capture_output=True, text=True, timeout=100, check=False)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["nothing.py:build"], "no file nothing.py"),
        (["model"], "expected FILE.py:function"),
        (["transformers"], "transformers MODEL"),
        (["transformers", "no_such_model"], "no model type"),
        (["x.py:build", "--dtype", "int8"], "dtype must be one of"),
        (["x.py:build", "--rank", "4"], "No such option"),
        (["x.py:build", "--ranks", "many"], "--ranks"),
        ([], "Missing argument"),
    ],
)
def test_bad_arguments(arguments: list[str], text: str) -> None:
    result = CliRunner().invoke(cli.app, ["verify", *arguments])
    assert result.exit_code == 3, result.output
    assert text in " ".join(result.output.split())


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("right", ""),
        ("prints", ""),
        ("sleeps", "no progress for 1 s: rank 1, last module layers.1, after 0 collectives; rank 0, last module a,"),
        ("returns early", "no progress for 1 s: rank 1 has ended its step, last module layers.1, after 0 collectives"),
        ("exits", "rank 1 ended with exit status 0 before the end of its step, last module layers.1"),
        ("leaves", "rank 1 ended with exit status 3 before the end of its step, last module layers.1"),
        ("is killed", "rank 1 was killed by SIGKILL before the end of its step, last module layers.1"),
        ("raises", "rank 1 raised, last module layers.1, after 0 collectives:\nTraceback"),
        ("both raise", "rank 1 raised, last module layers.1"),
        ("raise at once", "raised, last module the model, after 0 collectives:\nTraceback"),
        ("argument", "no function build"),
    ],
)
def test_a_rank_that_does_not_come_to_its_end_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, text: str
) -> None:
    monkeypatch.setattr(processes, "_GRACE", 0.7)
    begun = time.monotonic()
    error = ArgumentError if kind == "argument" else VerifyError
    with pytest.raises(error, match=re.escape(text)) if text else nullcontext():
        # A right program on a loaded machine may need a second between its step and its end.
        limit = 1.0 if "no progress" in text else 3.0
        processes.run_processes(run_kind, (kind,), 2, tmp_path / "run", limit, quiet=True)
    assert time.monotonic() - begun < 30


def test_a_function_that_takes_other_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "other_case.py").write_text("def build(rank, world): ...\nbuilt = 3\n")
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setattr(sys, "argv", [*sys.argv])
    with pytest.raises(
        ArgumentError, match=r"build\(rank, world\) is called as build\(rank, world, group, whole\): too"
    ):
        running.builder(f"{path}:build")
    with pytest.raises(ArgumentError, match="has no function built"):
        running.builder(f"{path}:built")


@pytest.mark.slow
def test_json_is_json_whatever_a_program_prints(tmp_path: Path) -> None:
    """Arguments reach the file; what it prints, and what a rank raises, is not in the way of the report."""
    talk = "import sys; print('talk', sys.argv[1:]); assert rank == 0 or sys.argv[1:] != ['--fail', '1'], 'failed'"
    (path := tmp_path / "case.py").write_text("print('imported')\n" + CASE.format(fault=talk))
    for arguments, status in ((("--", "--layers", "2"), 0), (("--", "--fail", "1"), 2)):
        done = command(f"{path}:build", "--json", *arguments)
        assert done.returncode == status, done.stdout + done.stderr
        content = json.loads(done.stdout)
        assert content["equal"] == (status == 0)
        assert ("AssertionError: failed" in content["problem"]) == (status == 2)
        assert f"talk {list(arguments[1:])}" in done.stderr


@pytest.mark.slow
def test_a_program_that_is_not_deterministic_is_told(tmp_path: Path) -> None:
    (path := tmp_path / "case.py").write_text(CASE.format(fault="model.bias.register_hook(lambda g: g * os.getpid())"))
    done = command(f"{path}:build")
    assert done.returncode == 2, done.stdout + done.stderr
    assert "not comparable: a rerun in one process differs, first in the model" in " ".join(done.stdout.split())


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """One line and 3, as for every argument that cannot be taken."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    result = CliRunner().invoke(cli.app, ["verify", "transformers", "llama"])
    assert result.exit_code == 3, result.output
    assert "needs the package transformers, which is not here" in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "dtype"), [("llama", "float64"), ("qwen3_moe", "float64"), ("gemma3_text", "bfloat16")]
)
def test_models_of_transformers(kind: str, dtype: str) -> None:
    pytest.importorskip("transformers")
    done = command("transformers", kind, "--dtype", dtype)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all equal" in done.stdout


def test_a_step_is_recorded_in_four_times_its_time() -> None:
    """The demo's model; and 1,000 modules are compared within ten seconds."""
    settings = Settings(layers=2, hidden=64, sequence=64, batch=4)
    model, numbers = PlainTransformer(settings), torch.randint(256, (64, 4))

    def step() -> torch.Tensor:
        loss = model(numbers, numbers)
        loss.backward()
        return loss

    case = verify.Case(model, step)
    verify.record(case)
    pairs = []
    for _ in range(5):
        started = time.perf_counter()
        step()
        between = time.perf_counter()
        verify.record(case)
        pairs.append((time.perf_counter() - between) / (between - started))
    assert min(pairs) <= 4
    many = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(1000))).double()
    recording = verify.record(verify.Case(many, lambda: many(torch.ones(2, 8).double()).sum()))
    started = time.perf_counter()
    assert verify.compare(recording, [recording, recording]).equal
    assert time.perf_counter() - started < 10


def test_the_loss_is_compared() -> None:
    model, x = torch.nn.Linear(4, 4).double(), torch.randn(2, 4).double()

    def case(factor: float) -> verify.Case:
        def step() -> torch.Tensor:
            model.zero_grad()
            loss = model(x).square().mean()
            loss.backward()
            return loss * factor

        return verify.Case(model, step)

    whole = verify.record(case(1))
    parts = [verify.record(case(factor)) for factor in (0.25, 0.75)]
    assert verify.compare(whole, parts).equal, "addends"
    assert verify.compare(whole, [verify.record(case(factor)) for factor in (0.5, 1.5)]).equal, "a mean"
    for factors, words in (((2, 2), "is 2 times the whole one"), ((2, 3), "neither equal nor its mean or addends")):
        report = verify.compare(whole, [verify.record(case(factor)) for factor in factors])
        assert report.first == ""
        assert words in str(report)


class Halves(torch.nn.Module):
    """A row-parallel product whose sum is made by the module around it, and then what ``after`` makes of it."""

    def __init__(self, group: ProcessGroup | None, after: float) -> None:
        super().__init__()
        world = 1 if group is None else group.size()
        self.group, self.after = group, after
        self.positions = torch.nn.Parameter(torch.zeros(8))
        self.up, self.down = torch.nn.Linear(8, 16 // world), torch.nn.Linear(16 // world, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.positions
        if self.group is not None and self.after:
            x = mappings.copy_to_tensor_model_parallel_region(x, self.group)
        y = self.down(self.up(x).relu())
        if self.group is None:
            return y
        return mappings.reduce_from_tensor_model_parallel_region(y, self.group) * (self.after or 1)


def run_halves(group: ProcessGroup, after: float, backward: bool = True) -> verify.Report:
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).double()
    alone = Halves(None, 1).double()
    verify.draw(alone)
    mine, dims = Halves(group, after).double(), {"up.weight": 0, "up.bias": 0, "down.weight": 1}
    state = {name: x.clone() for name, x in alone.state_dict().items()}
    rank, world = group.rank(), group.size()
    mine.load_state_dict({n: x.chunk(world, dims[n])[rank] if n in dims else x for n, x in state.items()})

    def case(model: torch.nn.Module) -> verify.Case:
        def step() -> torch.Tensor:
            loss = model(x).square().sum()
            if backward:
                loss.backward()
            return loss

        return verify.Case(model, step)

    return verify.compare(verify.record(case(alone)), verify.record(case(mine)), group)


def test_what_is_made_of_a_sum_is_no_missing_sum(pool: Pool) -> None:
    report, _ = pool.run(run_halves, 0.5)
    assert report.first == ""
    assert "what it makes of the addends of 2 ranks of down, with 1 collective, is wrong" in str(report)
    report, _ = pool.run(run_halves, 1)
    assert report.equal, str(report)
    report, _ = pool.run(run_halves, 1, False)
    assert report.equal
    assert "nothing was checked of backward" in str(report)
    report, _ = pool.run(run_halves, 0)
    assert report.first == ""
    assert "gradient of positions was never summed" in str(report)


def test_what_is_set_to_0_is_told() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Dropout(0.25)).double()
    case = verify.Case(model, lambda: model(torch.ones(2, 4).double()).sum())
    noise = running._ready(case, running.Settings("x.py:build"), "float64")
    assert noise == ["1.p = 0.25"]
    recording = verify.record(case)
    recording.noise = noise
    assert "set to 0: 1.p = 0.25" in verify.compare(recording, [recording]).lines


@pytest.mark.parametrize(
    ("dtype", "wanted"),
    [
        ("float64", (torch.float64, torch.complex128)),
        ("float32", (torch.float32, torch.complex64)),
        ("bfloat16", (torch.bfloat16, torch.complex64)),  # no complex number has 16 bits in each part
    ],
)
def test_a_model_of_another_dtype_is_moved(dtype: str, wanted: tuple[torch.dtype, torch.dtype]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, dtype=torch.float16), torch.nn.BatchNorm1d(4))
    model.filter = torch.nn.Parameter(torch.full((3,), 1 + 2j))
    before = model.filter
    running._ready(verify.Case(model, lambda: None), running.Settings("x.py:build"), dtype)
    assert {x.dtype for x in (*model.parameters(), *model.buffers())} == {*wanted, torch.int64}
    assert model.filter is before
    assert bool((model.filter == 1 + 2j).all())
