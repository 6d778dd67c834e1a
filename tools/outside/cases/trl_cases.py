"""TRL's SFTTrainer behind the mixin on two ranks is SFTTrainer in one process."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAM, IMAGES, PAGE = HERE / "trl_program.py", HERE / "trl_vision.py", HERE.parents[2] / "docs" / "vision.md"
COUNTED = ("mean_token_accuracy", "num_tokens", "eval_mean_token_accuracy")


def launched(program: list[Path | str], ranks: int, **more: Any) -> subprocess.CompletedProcess[str]:
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    return subprocess.run(
        [sys.executable, *launcher, *program], capture_output=True, text=True, timeout=240, check=False, **more
    )


def run(program: Path, first: str, second: str, ranks: int) -> tuple[list[dict[str, float]], str]:
    """What the program logged, and its error output."""
    done = launched([program, first, second], ranks)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0].removeprefix("RESULT ")) if found else [], done.stdout + done.stderr


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["padded", "packing", "padding_free", "lora"])
@pytest.mark.parametrize("model", ["llama", "qwen3_next"])
def test_two_ranks_are_one_process(model: str, kind: str) -> None:
    (alone, text), (ours, ours_text) = run(PROGRAM, model, kind, 1), run(PROGRAM, model, kind, 2)
    assert len(alone) == 7, text
    assert len(ours) == 7, ours_text
    for own, other in zip(ours, alone, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            if key == "num_tokens":  # batches are padded to a multiple of the ranks
                assert value <= own[key] <= value + 16
            else:
                assert own[key] == pytest.approx(value, abs=1e-6 if key in COUNTED else 1e-5), key


@pytest.mark.timeout(300)
def test_the_auxiliary_loss_of_routers_is_refused_by_its_option() -> None:
    logs, text = run(PROGRAM, "qwen3_next", "router", 2)
    assert logs == []
    assert "UnsupportedError: SequenceSFTTrainer: router_aux_loss_coef: every rank would add" in text
    assert "pass router_aux_loss_coef=0.0 to SFTConfig" in text


@pytest.mark.timeout(500)
@pytest.mark.parametrize(("ranks", "sequence"), [(2, 2), (4, 2)], ids=["2", "4 in groups of 2"])
@pytest.mark.parametrize("kind", ["llava", "lora", "qwen3_vl"])
def test_images_train_as_with_trl_alone(kind: str, ranks: int, sequence: int) -> None:
    """In as many processes as there are groups: the mean of a batch is one of the batch of a process."""
    alone, text = run(IMAGES, kind, "0", ranks // sequence)
    ours, ours_text = run(IMAGES, kind, str(sequence), ranks)
    assert len(alone) == 5, text
    assert len(ours) == 5, ours_text
    for own, other in zip(ours, alone, strict=True):
        assert own == pytest.approx(other, rel=2e-5)


@pytest.mark.timeout(300)
def test_the_program_of_the_page_on_images(tmp_path: Path) -> None:
    sys.path.insert(0, str(HERE))
    importlib.import_module("trl_vision").written(tmp_path)
    code = PAGE.read_text().partition("```python\n")[2].partition("```\n")[0]
    on_cpus = "use_cpu=True, bf16=False, max_steps=2, report_to=[], "
    code = code.replace('SFTConfig("out", ', f'SFTConfig("out", {on_cpus}', 1)
    code = code.replace(', fsdp=True, fsdp_config={"version": 2}', "", 1)  # accelerate shards none on CPUs
    (tmp_path / "program.py").write_text(code)
    done = launched(["program.py"], 2, cwd=tmp_path)
    assert not done.returncode, done.stderr
    assert "mean_token_accuracy" in done.stdout
    assert code.count("\n") <= 15
