"""The recipes of `tritoncomm verify`: silent as they are, and the first wrong module is named where a fault stands."""

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest
import torch
import vision_mistakes
from hybrid_mistakes import MISTAKES, make
from pool import Pool
from verify_recipes import FAULTS, OF_TORCH, OF_TRL, RECIPES, Fault, run_in_job, run_recipe, summing_gather, written

from tritoncomm.verify import Report
from tritoncomm.verify.running import Settings, verify

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def job(request: pytest.FixtureRequest) -> Iterator[tuple[Pool, int]]:
    """Ranks whose world is the job, as recipes have it."""
    pool = Pool(request.param)
    yield pool, request.param
    pool.stop()


def test_recipes_are_short_and_on_the_page() -> None:
    page = (ROOT / "docs" / "verify.md").read_text()
    for recipe in (*RECIPES, *OF_TRL):
        path = ROOT / "examples" / f"verify_{recipe}.py"
        assert len(path.read_text().splitlines()) <= 40, path
        assert f"examples/{path.name}" in page
    assert len(FAULTS) >= 20
    assert {fault.recipe for fault in FAULTS} == set(RECIPES) - {"hybrid", "vision"}  # whose faults are MISTAKES


def reported(
    job: tuple[Pool, int], recipe: str, fault: Fault | None = None, dtype: torch.dtype = torch.float64
) -> Report:
    """The report on a recipe, by ranks of the job; one that asks for the size of the job has processes of its own."""
    pool, world = job
    if recipe in ("accelerate", "unchanged"):
        with tempfile.TemporaryDirectory() as folder:
            return verify(Settings(f"{written(Path(folder), recipe, fault)}:build", world))
    (report, *others) = pool.run(run_recipe, recipe, fault, nullcontext, dtype, world=world, timeout=120)
    assert all(each == report for each in others)
    return report


def problems(job: tuple[Pool, int], faults: Sequence[Fault]) -> list[str]:
    """Reports that do not name the fault as they should."""
    found = []
    for fault in faults:
        report = reported(job, fault.recipe, fault)
        if report.first != fault.first or fault.words not in str(report):
            found.append(f"{fault}: {report.first}\n{report}")
    return found


def silent(job: tuple[Pool, int], recipes: Sequence[str]) -> list[str]:
    """Reports on right recipes that do not say equal, or compared little."""
    found = []
    for recipe in recipes:
        report = reported(job, recipe)
        if not report.equal or report.counts["compared"] < 9 or 2 * report.counts["alone"] > report.counts["compared"]:
            found.append(f"{recipe}: {report}")
    return found


def test_recipes_of_torch(job: tuple[Pool, int]) -> None:
    wrong = silent(job, OF_TORCH) + problems(job, [each for each in FAULTS if each.recipe in OF_TORCH])
    assert not wrong, "\n\n".join(wrong)


@pytest.mark.slow
@pytest.mark.timeout(300)  # accelerate has processes of its own, with its imports
@pytest.mark.parametrize("package", ["unchanged", "transformers", "log_probs", "experts", "accelerate", "deepspeed"])
def test_recipes_of_others(job: tuple[Pool, int], package: str) -> None:
    if package != "unchanged":
        pytest.importorskip({"experts": "transformers", "log_probs": "transformers"}.get(package, package))
    wrong = silent(job, [package]) + problems(job, [each for each in FAULTS if each.recipe == package])
    for exchange in ("all_to_all", "auto") if package == "experts" else ():
        report = reported(job, package, Fault(package, '"tritoncomm")', f'"{exchange}")', ""))
        wrong += [] if report.equal else [f"{exchange}: {report}"]
    for stage in "23" if package == "deepspeed" else "":
        dtype = torch.float32 if stage == "3" else torch.float64  # of which DeepSpeed refuses stage 3
        report = reported(job, package, Fault(package, '["1"]', f'["{stage}"]', ""), dtype)
        if not report.equal or report.counts["compared"] != 18:
            wrong.append(f"ZeRO stage {stage}: {report}")
    assert not wrong, "\n\n".join(wrong)


def test_a_gather_that_sums_is_named(job: tuple[Pool, int]) -> None:
    pytest.importorskip("transformers")
    pool, world = job
    report = pool.run(run_recipe, "log_probs", None, summing_gather, world=world, timeout=120)[0]
    assert report.first == "norm", str(report)
    assert f"gradient of norm.weight is {world} times the whole one" in str(report)


@pytest.mark.parametrize("name", [*MISTAKES, ""])
def test_mistakes_of_other_implementations_of_recurrent_layers(job: tuple[Pool, int], name: str) -> None:
    """They were public, some with silently wrong numbers; without one, hybrid models are equal, packed and padded."""
    pytest.importorskip("transformers")
    pool, world = job
    if name:
        mistake = MISTAKES[name]
        (report, *others) = pool.run(run_recipe, "hybrid", mistake.fault, partial(make, name), world=world, timeout=120)
        assert all(each == report for each in others)
        assert report.first == mistake.first, str(report)
        assert mistake.words in str(report)
        return
    wrong = silent(job, ["hybrid"])
    for family in ("nemotron_h", "lfm2"):
        report = reported(job, "hybrid", Fault("hybrid", '["qwen3_next"]', f'["{family}"]', ""))
        wrong += [] if report.equal else [f"{family}: {report}"]
    padded = reported(job, "hybrid", MISTAKES["padding as content"].fault)
    assert not wrong + ([] if padded.equal else [f"padded: {padded}"]), "\n\n".join(wrong)


@pytest.mark.parametrize("name", [*vision_mistakes.MISTAKES, ""])
def test_mistakes_of_other_implementations_of_vision_language_models(job: tuple[Pool, int], name: str) -> None:
    pytest.importorskip("transformers")
    pool, world = job
    if not name:
        assert not silent(job, ["vision"])
        return
    mistake, made = vision_mistakes.MISTAKES[name], partial(vision_mistakes.make, name)
    (report, *others) = pool.run(run_recipe, "vision", mistake.fault, made, world=world, timeout=120)
    assert all(each == report for each in others)
    assert report.first == mistake.first, str(report)
    assert mistake.words in str(report)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "micro_batches"), [("llama", 2), ("qwen3", 1), ("qwen3", 2)])
def test_families_of_transformers(job: tuple[Pool, int], kind: str, micro_batches: int) -> None:
    """Silent where gradients alone are right, and else the same parameters; `make test-world` has ten families."""
    pytest.importorskip("transformers")
    pool, world = job
    for report, wrong in pool.run(run_in_job, kind, micro_batches, world=world, timeout=120):
        assert report.equal == (not wrong), f"plain torch: {wrong}\n{report}"
        assert all(f"gradient of {name} " in str(report) for name in wrong), f"plain torch: {wrong}\n{report}"
