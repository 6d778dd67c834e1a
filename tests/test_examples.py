"""Every example trains under torchrun on two CPU ranks, and gives the losses of the run that it compares with."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import without_launcher

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted(path for path in (ROOT / "examples").glob("*.py") if not path.name.startswith("verify_"))
PEERS = ("megatron", "transformers")  # packages that an example may be about; importing them takes long
STEP = re.compile(r"step (\d+): loss ([\d.]+) on 2 ranks, ([\d.]+)")


def peers_of(path: Path) -> list[str]:
    """The packages that an example needs besides torch."""
    return [name for name in PEERS if re.search(rf"^ *from {name}\b", path.read_text(), re.MULTILINE)]


def run(path: Path, *arguments: str) -> str:
    """The output of an example on two ranks without a GPU."""
    missing = [name for name in peers_of(path) if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"{missing[0]} is not installed")
    paths = f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"
    variables = {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TRITON_INTERPRET": "0"}
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*launcher, str(path), *arguments],
        env=without_launcher(os.environ) | variables,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def check_losses(output: str) -> None:
    """Steps are printed once each, in order; both runs have the same losses, and they fall."""
    steps = STEP.findall(output)
    assert len(steps) >= 4, output
    assert [int(step) for step, *_ in steps] == list(range(len(steps))), output
    ours, expected = ([float(row[column]) for row in steps] for column in (1, 2))
    assert ours == pytest.approx(expected, rel=1e-4), output
    assert ours[-1] < ours[0], output


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_trains(path: Path) -> None:
    check_losses(run(path))


def test_the_program_of_the_trainers_page_trains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = (ROOT / "docs" / "trainer.md").read_text()
    code = text[text.index("```python\n") + 10 :]
    program = tmp_path / "program.py"
    program.write_text(code[: code.index("```\n")])
    monkeypatch.chdir(tmp_path)
    losses = re.findall(r"'loss': '?([\d.]+)", run(program))
    assert len(losses) == 3
    assert float(losses[-1]) < float(losses[0])


def test_an_exchange_of_ones_own_trains() -> None:
    check_losses(run(ROOT / "examples" / "own_exchange.py"))


@pytest.mark.slow
def test_megatron_trains_with_sequence_parallelism() -> None:
    check_losses(run(ROOT / "examples" / "megatron_patched.py", "--sequence-parallel"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_names_its_command_and_starts_under_every_launcher(path: Path) -> None:
    text = path.read_text()
    assert f"\n    torchrun --nproc-per-node 2 examples/{path.name}" in text.split('"""')[1]
    assert "WORLD_SIZE" not in text, "srun and mpirun do not set it before initialize()"


def test_what_make_test_runs() -> None:
    own = {path.stem for path in EXAMPLES if not peers_of(path)}
    assert own >= {"pipeline", "shard_existing_module", "tensor_parallel_block"}


@pytest.mark.parametrize(
    "output",
    ["", "step 0: loss 2.0 on 2 ranks, 2.0 on one\n" * 4]
    + ["".join(f"step {k}: loss {9 - k + bad}.0 on 2 ranks, {9 - k}.0 on one\n" for k in range(4)) for bad in (1,)]
    + ["".join(f"step {k}: loss {k}.0 on 2 ranks, {k}.0 on one\n" for k in range(4))],
    ids=["nothing", "one-step-again", "other-losses", "rising"],
)
def test_wrong_output_is_seen(output: str) -> None:
    with pytest.raises(AssertionError):
        check_losses(output)
