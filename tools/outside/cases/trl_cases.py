"""TRL's SFTTrainer behind the mixin on two ranks is SFTTrainer in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "trl_program.py"
COUNTED = ("mean_token_accuracy", "num_tokens", "eval_mean_token_accuracy")


def run(model: str, kind: str, ranks: int) -> tuple[list[dict[str, float]], str]:
    """What the program logged, and its error output."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run(
        [sys.executable, *launcher, PROGRAM, model, kind], capture_output=True, text=True, timeout=240
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0].removeprefix("RESULT ")) if found else [], done.stdout + done.stderr


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["padded", "packing", "padding_free", "lora"])
@pytest.mark.parametrize("model", ["llama", "qwen3_next"])
def test_two_ranks_are_one_process(model: str, kind: str) -> None:
    (alone, text), (ours, ours_text) = run(model, kind, 1), run(model, kind, 2)
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
    logs, text = run("qwen3_next", "router", 2)
    assert logs == []
    assert "UnsupportedError: SequenceSFTTrainer: router_aux_loss_coef: every rank would add" in text
    assert "pass router_aux_loss_coef=0.0 to SFTConfig" in text
