"""TRL's SFTTrainer behind the mixin on two ranks is SFTTrainer in one process."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "trl_program.py"
COUNTED = ("mean_token_accuracy", "num_tokens", "eval_mean_token_accuracy")


def run(kind: str, ranks: int) -> tuple[list[dict[str, float]], str]:
    """What the program logged, and its error output."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)] if ranks > 1 else []
    done = subprocess.run([sys.executable, *launcher, PROGRAM, kind], capture_output=True, text=True, timeout=240)
    found = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    return json.loads(found[0].removeprefix("RESULT ")) if found else [], done.stdout + done.stderr


@pytest.mark.timeout(500)
@pytest.mark.parametrize("kind", ["padded", "lora", "positions"])
def test_two_ranks_are_one_process(kind: str) -> None:
    (alone, text), (ours, ours_text) = run(kind, 1), run(kind, 2)
    assert len(alone) == 7, text
    assert len(ours) == 7, ours_text
    for own, other in zip(ours, alone, strict=True):
        assert own.keys() == other.keys()
        for key, value in other.items():
            if key == "num_tokens" and kind == "positions":  # batches are padded to a multiple of the ranks
                assert value <= own[key] <= value + 16
            else:
                assert own[key] == pytest.approx(value, abs=1e-6 if key in COUNTED else 1e-5), key


@pytest.mark.timeout(300)
def test_boundaries_are_refused_by_name() -> None:
    logs, text = run("boundaries", 2)
    assert logs == []
    assert "ArgumentError: shard_batch: 'cu_seq_lens_q' is not supported" in text
