"""The demo as a user runs it, and as it fails."""

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tritoncomm import cli
from tritoncomm.demo import DemoError, Settings, report, run

ROOT = Path(__file__).parents[1]
SMALL = {"steps": 3, "layers": 1, "hidden": 32, "sequence": 16, "batch": 2}


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tritoncomm", "demo", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110, check=False)


def remove_gather_backward() -> None:
    """Run in every rank: the gradient of the gathered sequence is no longer summed."""
    from tritoncomm.regions import _GatherFromSequenceParallelRegion as region

    def wrong(ctx, grad_output):
        rows = grad_output.shape[0] // ctx.group.size()
        return grad_output.narrow(0, rows * ctx.group.rank(), rows), None, None, None, None

    region.backward = staticmethod(wrong)


def raise_in_rank() -> None:
    raise RuntimeError("on purpose")


def test_command_trains_and_agrees(tmp_path):
    picture = tmp_path / "loss.png"
    result = demo("--steps", "3", "--plot", str(picture))
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("all_to_all_sp2hp", "all_to_all_hp2sp.backward", "reduce_scatter_to_sequence_parallel_region"):
        assert name in result.stdout
    assert result.stdout.splitlines()[-1].startswith("largest relative difference to the single-process losses:")
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ranks"), [("float64", 4), ("bfloat16", 2)])
def test_losses_are_those_of_one_process(dtype, ranks):
    settings = Settings(ranks=ranks, dtype=dtype, **SMALL)
    outcome = run(settings)
    assert len(outcome.losses) == len(outcome.reference) == 3
    assert outcome.largest_difference()[0] <= settings.limit


def test_exit_status_is_one_when_losses_differ(monkeypatch):
    from typer.testing import CliRunner

    from tritoncomm import cli

    monkeypatch.setattr(report, "run", lambda settings, follow: run(Settings(**SMALL), follow, remove_gather_backward))
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "3"])
    assert result.exit_code == 1, result.output
    assert "largest relative difference" in result.output.splitlines()[-1]


def test_failing_rank_is_named():
    with pytest.raises(DemoError, match=r"rank \d failed(.|\n)*on purpose"):
        run(Settings(**SMALL), prepare=raise_in_rank)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "3"), "3 ranks do not divide"),
        (("--text", "no-such-file"), "no-such-file"),
        (("--steps", "0"), "steps"),
    ],
    ids=["ranks", "text", "steps"],
)
def test_bad_arguments_are_explained(arguments, words):
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert words in result.output


def test_readme_example_runs(tmp_path):
    readme = (ROOT / "README.md").read_text()
    example = tmp_path / "example.py"
    example.write_text(readme.split("```python\n")[1].split("```")[0])
    result = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=100, check=False)
    assert result.returncode == 0, result.stderr
    assert "all_to_all_hp2sp.backward" in result.stdout
