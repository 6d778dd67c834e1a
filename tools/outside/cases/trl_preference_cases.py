"""TRL's DPOTrainer and KTOTrainer behind the mixin are those of TRL itself; its other trainers are refused."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tritoncomm.errors import CommError, UnsupportedError
from tritoncomm.integrations.transformers.trainer import TRAINERS, UlyssesTrainerMixin
from tritoncomm.verify.running import Settings, verify

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

trl_preferences: Any = importlib.import_module("trl_preferences")
CASES, MISTAKES = trl_preferences.CASES, importlib.import_module("trl_mistakes").MISTAKES
RECIPE = Path(__file__).parents[3] / "examples" / "verify_dpo.py"
PAGE = Path(__file__).parents[3] / "docs" / "trainer.md"
JOBS = {"2": (2, 2), "4 in groups of 2": (4, 2), "4": (4, 4)}
BY_CANCELLATION = ("rewards", "kl", "logits")  # differences of log-probabilities, and means about zero
IN_BF16 = tuple(name for name, case in CASES.items() if case.rounds)


def launched(program: list[str | Path], ranks: int, **more: Any) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    env = os.environ | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
    command = [sys.executable, *launcher, *program]
    return subprocess.run(command, capture_output=True, text=True, timeout=500, env=env, **more)


def run(folder: Path, ranks: int, sequence: int) -> dict[str, Any]:
    """Results of all cases; with 0, of TRL as it is."""
    file = folder / f"{ranks}-{sequence}"
    done = launched([HERE / "trl_preferences.py", file, str(sequence), *CASES], ranks)
    assert file.exists(), done.stdout + done.stderr
    return torch.load(file)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("preferences")


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, Any]:
    return run(folder, 1, 0)


@pytest.fixture(scope="module")
def data_parallel(folder: Path) -> dict[str, Any]:
    """TRL on two processes, which KTO and evaluations need: their numbers depend on the batch of a process."""
    return run(folder, 2, 0)


@pytest.fixture(scope="module", params=list(JOBS))
def sharded(folder: Path, request: pytest.FixtureRequest) -> tuple[int, dict[str, Any]]:
    ranks, sequence = JOBS[request.param]
    return ranks // sequence, run(folder, ranks, sequence)


def differences(mine: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Numbers that are further apart than rounding of fp32 in another order takes them."""
    wrong = []
    for own, log in zip(mine["logs"], other["logs"], strict=True):
        assert own.keys() == log.keys()
        largest = max(abs(x) for name, x in log.items() if "logps" in name) if log else 0.0
        for name, x in log.items():
            relative = 1e-4 if "norm" in name or ("loss" in name and x > 2) else 1e-5  # squares of differences
            bound = 1e-5 * largest if any(part in name for part in BY_CANCELLATION) else relative * max(abs(x), 1e-3)
            if not abs(own[name] - x) <= bound:
                wrong.append(f"{name}: {own[name]}, not {x}")
    assert mine["weights"].keys() == other["weights"].keys()
    for name, x in other["weights"].items():
        if not (mine["weights"][name] - x).abs().max() <= 1e-6:
            wrong.append(f"{name}: off by {(mine['weights'][name] - x).abs().max():.1e}")
    return wrong


@pytest.mark.timeout(900)
def test_every_number_is_that_of_trl(
    sharded: tuple[int, dict[str, Any]], alone: dict[str, Any], data_parallel: dict[str, Any]
) -> None:
    lanes, results = sharded
    wrong = {}
    for name, case in CASES.items():
        if not case.rounds:
            is_of_batch = lanes > 1 and (case.is_kto or case.is_evaluated)
            wrong[name] = differences(results[name], (data_parallel if is_of_batch else alone)[name])
    assert not any(wrong.values()), json.dumps({name: each for name, each in wrong.items() if each}, indent=1)
    assert len(wrong) == 24


@pytest.mark.timeout(900)
def test_weights_move(alone: dict[str, Any]) -> None:
    """More than the bound on differences by a factor of a thousand, and losses differ from step to step."""
    for name, case in CASES.items():
        before = trl_preferences.model_of(case.model, 0).state_dict()
        moved = [(x - before[key]).abs().max() for key, x in alone[name]["weights"].items() if key in before]
        assert case.has_adapters or max(moved) > 1e-3, name
        assert len({log["loss"] for log in alone[name]["logs"] if "loss" in log}) == 3, name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", IN_BF16)
def test_shards_round_as_much_as_one_process_in_bf16(
    sharded: tuple[int, dict[str, Any]], data_parallel: dict[str, Any], alone: dict[str, Any], name: str
) -> None:
    rounded, exact = data_parallel[name]["logs"], alone["DPO"]["logs"]
    for key in ("loss", "grad_norm", "logps/chosen", "logps/rejected", "rewards/margins"):
        numbers = [[log[key] for log in logs if key in log] for logs in (sharded[1][name]["logs"], rounded, exact)]
        mine, own = (max(abs(x - y) for x, y in zip(each, numbers[2], strict=True)) for each in numbers[:2])
        assert mine <= 3 * own + 1e-6, (key, numbers)


@pytest.mark.timeout(300)
def test_the_program_of_the_page(tmp_path: Path) -> None:
    code = PAGE.read_text().partition("## Preferences")[2].partition("```python\n")[2].partition("```\n")[0]
    code = code.replace(
        'DPOConfig("out", ', 'DPOConfig("out", use_cpu=True, bf16=False, max_steps=2, report_to=[], ', 1
    )
    code = code.replace(', fsdp=True, fsdp_config={"version": 2}', "", 1)  # accelerate shards none on CPUs
    (tmp_path / "program.py").write_text(code)
    trl_preferences.model_of("llama", 0).save_pretrained(tmp_path / "policy")
    trl_preferences.tokenizer().save_pretrained(tmp_path / "policy")
    trl_preferences.samples(False).to_json(tmp_path / "pairs.jsonl")
    done = launched(["program.py"], 2, cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert "rewards/margins" in done.stdout
    assert code.count("\n") <= 15


@pytest.mark.timeout(300)
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_recipe_of_verify_is_equal(ranks: int) -> None:
    report = verify(Settings(f"{RECIPE}:build", ranks, is_quiet=True))
    assert report.equal, str(report)
    assert report.counts["compared"] > 100


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", MISTAKES)
def test_public_mistakes_are_named(tmp_path: Path, name: str) -> None:
    text, line = RECIPE.read_text(), "    torch.distributed.init_process_group()\n"
    assert text.count(line) == 1
    planted = f"{line}    if world > 1:\n        __import__('trl_mistakes').plant({name!r})\n"
    (path := tmp_path / RECIPE.name).write_text(text.replace(line, planted))
    (tmp_path / "trl_mistakes.py").write_text((HERE / "trl_mistakes.py").read_text())
    report = verify(Settings(f"{path}:build", is_quiet=True))
    assert not report.equal
    assert MISTAKES[name] in str(report)


def test_every_trainer_of_trl_is_right_or_refused_by_its_name() -> None:
    """Also of a TRL that comes: what the table does not know is refused, and fails here."""
    of_all = importlib.import_module("trainer_classes").trainers()
    kinds = {f"{kind.__module__}.{kind.__name__}": kind for kind in of_all if kind.__module__.startswith("trl.")}
    assert len(kinds) >= 15
    for path, kind in kinds.items():
        of_trl = TRAINERS.get(kind.__name__)
        assert of_trl is not None, f"is {path} right over sequence shards?"
        mixed = type("Mixed", (UlyssesTrainerMixin, kind), {})
        error, words = (CommError, "'x' is not registered") if of_trl.strategy else (UnsupportedError, kind.__name__)
        with pytest.raises(error, match=words):
            mixed(ulysses="x")
