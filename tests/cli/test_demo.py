"""The demo as a user runs it, and as it fails."""

import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.multiprocessing as multiprocessing
from checkouts import checkout
from jobs import run_job
from typer.testing import CliRunner

from tritoncomm import cli
from tritoncomm.cli import demo as demo_command
from tritoncomm.cli._console import terminal
from tritoncomm.demo import DemoError, DemoOutcome, Settings, run

ROOT = Path(__file__).parents[2]
SMALL = {"steps": 3, "layers": 1, "hidden": 32, "sequence": 16, "batch": 2}


def demo(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tritoncomm", "demo", *arguments]
    return subprocess.run(command, env=checkout(), capture_output=True, text=True, timeout=110, check=False)


def remove_gather_backward() -> None:
    """Run in every rank: the gradient of the gathered sequence is no longer summed."""
    from tritoncomm.mappings.functions import _GatherFromSequenceParallelRegion as region

    def wrong(ctx, grad_output):
        rows = grad_output.shape[0] // ctx.group.size()
        return grad_output.narrow(0, rows * ctx.group.rank(), rows), None, None, None, None

    region._backward_cls.apply = wrong


def raise_in_rank() -> None:
    raise RuntimeError("on purpose")


def kill_rank_one() -> None:
    """Run in every rank: rank 1 dies in the middle of its second step, without a word."""
    from tritoncomm.demo import train

    whole, steps = train._sum_gradients, []

    def once(model):
        steps.append(model)
        if model.rank == 1 and len(steps) == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        whole(model)

    train._sum_gradients = once


def break_ranks(monkeypatch, prepare, ranks=2) -> None:
    """Make the command train the small model with ``prepare`` run in its ranks."""
    monkeypatch.setattr(
        demo_command, "run", lambda settings, follow: run(Settings(ranks=ranks, **SMALL), follow, prepare)
    )


def test_command_trains_and_agrees(tmp_path):
    picture = tmp_path / "loss.png"
    result = demo("--steps", "3", "--plot", str(picture))
    assert result.returncode == 0, result.stdout + result.stderr
    for name in ("all_to_all_sp2hp", "all_to_all_hp2sp.backward", "reduce_scatter_to_sequence_parallel_region"):
        assert name in result.stdout
    assert result.stdout.splitlines()[-1] == "equal: the losses of 2 ranks are those of one process"
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "ranks"), [("float64", 4), ("bfloat16", 2)])
def test_losses_are_those_of_one_process(dtype, ranks):
    settings = Settings(ranks=ranks, dtype=dtype, **SMALL)
    outcome = run(settings)
    assert len(outcome.losses) == len(outcome.reference) == 3
    assert outcome.largest_difference()[0] <= settings.limit


@pytest.mark.parametrize(
    "layout",
    [
        pytest.param({"ranks": 2, "pipeline": 2, "virtual": 2}, id="stages-of-two-chunks", marks=pytest.mark.slow),
        pytest.param(
            {"ranks": 4, "pipeline": 2, "virtual": 1}, id="stages-of-two-tensor-ranks", marks=pytest.mark.slow
        ),
    ],
)
def test_losses_of_a_pipeline_are_those_of_one_process(layout):
    outcome = run(Settings(**(SMALL | {"layers": 4, "batch": 4}), **layout))
    assert len(outcome.losses) == SMALL["steps"]
    assert outcome.largest_difference()[0] <= 1e-5
    hop = "send_forward_recv_backward" if layout["virtual"] == 1 else "send_forward_backward_recv_forward_backward"
    assert outcome.counters[hop, "view"].bytes_sent > 0


@pytest.mark.slow  # tests/tensor/test_training.py trains the same layers
@pytest.mark.parametrize(("ranks", "dtype"), [(2, "float32"), (4, "float64")])
def test_losses_of_the_tensor_layer_are_those_of_plain_torch(ranks, dtype):
    outcome = run(Settings(ranks=ranks, dtype=dtype, tensor_layer=True, **SMALL))
    assert len(outcome.losses) == SMALL["steps"]
    assert outcome.largest_difference()[0] <= outcome.settings.limit
    names = {name for name, _ in outcome.counters}
    assert {"cross_entropy", "reduce_from_tensor_model_parallel_region"} <= names
    assert not names & {"redistribute", "all_gather_dim"}, "an activation was gathered"


@pytest.mark.slow
def test_exit_status_is_one_when_losses_differ(monkeypatch):
    break_ranks(monkeypatch, remove_gather_backward)
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "3"])
    assert result.exit_code == 1, result.output
    assert result.output.splitlines()[-1] == "different: the losses of 2 ranks are not those of one process"


def test_failing_rank_is_named(monkeypatch):
    break_ranks(monkeypatch, raise_in_rank, ranks=1)
    result = CliRunner().invoke(cli.app, ["demo", "--steps", "3"])
    assert result.exit_code == 1
    assert re.search(r"rank 0 failed(.|\n)*on purpose", result.output)


def start_slowly() -> None:
    time.sleep(4)


def test_the_clock_starts_with_the_first_step():
    """A busy machine may import torch for longer than a step may take."""
    outcome = run(Settings(**(SMALL | {"timeout": 3})), prepare=start_slowly)
    assert outcome.largest_difference()[0] < 1e-4


@pytest.mark.slow
def test_killed_rank_is_named_before_its_peers():
    with pytest.raises(DemoError, match=r"^rank 1 was killed by signal 9"):
        run(Settings(**SMALL), prepare=kill_rank_one)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--ranks", "3"), "do not divide over 3 tensor ranks"),
        (("--text", "no-such-file"), "no-such-file"),
        (("--steps", "0"), "steps"),
        (("--pipeline", "2", "--tensor", "2", "--ranks", "2"), "are 4 ranks, not 2"),
        (("--pipeline", "2", "--tensor-layer"), "tensor layer"),
        (("--virtual", "2"), "virtual stages need a pipeline"),
        (("--text", os.devnull), "the text has 0 bytes"),
        (("--ranks", "1", "--pipeline", "2"), "1 rank cannot be split into 2 pipeline stages"),
        (("--plot", "no-such-folder/loss.png"), "no folder no-such-folder"),
        (("--plot", "loss.pdf"), "must end in .png or .svg"),
        (("--plot", "loss"), "must end in .png or .svg"),
    ],
    ids=["ranks", "text", "steps", "product", "layer", "virtual", "empty", "stages", "folder", "pdf", "no-ending"],
)
def test_bad_arguments_are_explained_before_anything_trains(arguments, words, monkeypatch):
    monkeypatch.setattr(multiprocessing, "get_context", None)
    result = CliRunner().invoke(cli.app, ["demo", *arguments])
    assert result.exit_code == 2
    assert words in result.output
    assert len(result.output.splitlines()) == 1, "an error and no progress bars"


def test_a_picture_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(ValueError, match="not a regular file"):
        demo_command.check_plot(tmp_path / "folder.png")
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(ValueError, match="no permission to write"):
        demo_command.check_plot(tmp_path / "loss.svg")


def outcome(ranks: int = 2) -> DemoOutcome:
    """A run that was never made, with names and figures of the longest kind."""
    count = SimpleNamespace(calls=12345, bytes_copied=123456789012, bytes_sent=98765432109, seconds=1.0)
    names = ("reduce_scatter_to_sequence_parallel_region.backward", "send_forward_backward_recv_forward_backward")
    counters = {(name, "triton"): count for name in names}
    return DemoOutcome(Settings(ranks=ranks, steps=1), [2.0, 1.0], [2.0, 1.0], 2.0, counters)


def test_the_table_keeps_its_figures_on_80_columns(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "80")
    demo_command.show(outcome(), terminal())
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert "rank 0 of 2, 1 step, 2.0 s of training" in lines[0]
    rows = [line.split() for line in lines if "12345" in line]
    assert [row[1:] for row in rows] == [["triton", "12345", "123456.79", "98765.43", "50.0"]] * 2
    assert "reduce_scatter_to_sequence_parallel_re" in rows[0][0]


@pytest.mark.parametrize(("name", "start"), [("loss.svg", b"<?xml"), ("loss.PNG", b"\x89PNG")])
def test_the_ending_chooses_the_kind_of_picture(name, start, tmp_path):
    demo_command.check_plot(tmp_path / name)
    demo_command.plot(outcome(ranks=1), tmp_path / name)
    content = (tmp_path / name).read_bytes()
    assert content.startswith(start)


def join(port: int) -> tuple[int, int]:
    """Enter the demo's job as one of its ranks; rank and size there."""
    import torch.distributed as dist

    from tritoncomm import runtime
    from tritoncomm.demo import train

    train._join(Settings(ranks=2, device="cpu", timeout=30), int(os.environ["PLACE"]), port)
    answer = dist.get_rank(), dist.get_world_size()
    runtime.destroy()
    return answer


def test_the_demo_of_a_rank_of_torchrun_has_a_store_of_its_own() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    torchrun = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    torchrun |= {"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    answers = run_job(join, [torchrun | {"PLACE": str(rank)} for rank in range(2)], port)
    assert answers == [(0, 2), (1, 2)]


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "rest", [("demo", "--steps", "1"), ("tune", "--list"), ("doctor", "--no-self-test")], ids=lambda rest: rest[0]
)
def test_torchrun_runs_a_command_once(rest: tuple[str, ...]) -> None:
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    done = subprocess.run(
        [*launcher, "-m", "tritoncomm", *rest], env=checkout(), capture_output=True, text=True, timeout=390, check=False
    )
    assert done.returncode == 0, done.stderr
    last = done.stdout.splitlines()[-1]
    assert done.stdout.splitlines().count(last) == 1
    assert done.stderr.count("torchrun started 2 ranks: `tritoncomm") == 1
