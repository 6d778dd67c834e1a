"""`tritoncomm plan` and `doctor` as a user runs them, and as they refuse."""

import json
import os
import resource
import shlex
import subprocess
import sys
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from jobs import without_launcher
from rich.console import Console
from tritoncomm_kernels import launch
from typer.testing import CliRunner

from tritoncomm import cli, doctor
from tritoncomm.cli._console import say
from tritoncomm.doctor import _open_files, selftest
from tritoncomm.explain import OPS, explain

ROOT = Path(__file__).parents[2]
PLAN = ("plan", "sp2hp", "--shape", "4096,2,8192", "--world", "8")


def run(*arguments: str) -> Any:
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exception is None or isinstance(result.exception, SystemExit), result.output
    return result


def test_plan_tells_the_same_in_words_and_in_json() -> None:
    words = run(*PLAN)
    assert words.exit_code == 0
    for part in (
        "all_to_all_sp2hp",
        "pack",
        "all-to-all",
        "256.000",
        "112.000",
        "1 pass over",
        "16 B per access",
        "(built in)",
    ):
        assert part in words.output, part
    assert "predicted, not measured" in words.output
    assert "PROJECTION, not measured" in words.output
    told, known = json.loads(run(*PLAN, "--json").output), explain("sp2hp", (4096, 2, 8192), 8)
    assert told["forward"]["bytes_copied"] == known.forward.bytes_copied == 256 * 2**20
    assert told["backward"]["bytes_sent"] == known.backward.bytes_sent == 112 * 2**20
    assert told["forward"]["steps"][0]["path"] == "triton"
    assert [share["world"] for share in told["projection"]] == [2, 4, 8, 16, 32, 64]
    assert told["dtype"] == "bfloat16"


SHORT = {
    "bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32",
    "fp64": "float64", "double": "float64", "fp8_e4m3": "float8_e4m3fn", "fp8_e5m2": "float8_e5m2",
    "torch.bfloat16": "bfloat16", "BF16": "bfloat16", "int64": "int64",
}  # fmt: skip


@pytest.mark.parametrize(("short", "name"), SHORT.items())
def test_short_names_of_element_types_are_known_to_every_command(short: str, name: str) -> None:
    told = json.loads(run("plan", "sp2hp", "--shape", "8x4", "--world", "2", "--dtype", short, "--json").output)
    assert told["dtype"] == name
    rows = json.loads(run("tune", "--shape", "8x4", "--world", "2", "--dtype", short, "--list", "--json").output)
    assert {row["dtype"] for row in rows} == {name}
    assert ("reduce" in {row["op"] for row in rows}) is not name.startswith("float8")


def test_plan_tells_of_split_sizes_and_strides() -> None:
    sent = ("plan", "all_to_all", "--shape", "8,4", "--world", "2", "--dtype", "fp32", "--sizes", "3,5", "--out-sizes")
    told = json.loads(run(*sent, "3,1", "--json").output)
    assert (told["forward"]["result"], told["forward"]["bytes_sent"]) == ([4, 4], 5 * 16)
    assert (told["backward"]["result"], told["backward"]["bytes_sent"]) == ([8, 4], 1 * 16)
    assert told["projection"] == []
    assert "PROJECTION" not in run(*sent, "3,1").output
    assert json.loads(run(*sent, "1,5", "--rank", "1", "--json").output)["forward"]["bytes_sent"] == 3 * 16
    sliced = ("plan", "sp2hp", "--shape", "4096,8192", "--world", "8", "--json", "--strides")
    assert json.loads(run(*sliced, "24576,1").output)["forward"]["bytes_copied"] == 128 * 2**20
    (copy, *_) = json.loads(run("plan", "all_to_all", *sliced[2:], "24576,1").output)["forward"]["steps"]
    assert (copy["name"], copy["path"], copy["bytes_copied"]) == ("copy", "torch", 128 * 2**20)


def test_plan_says_why_there_is_no_backward() -> None:
    for dtype, why in (("int32", "int32 has no gradients"), ("fp8_e4m3", "cannot reduce float8_e4m3fn")):
        arguments = ("plan", "all_gather", "--shape", "8,4", "--world", "2", "--dtype", dtype)
        assert why in run(*arguments).output
        told = json.loads(run(*arguments, "--json").output)
        assert (told["forward"]["bytes_sent"] > 0, told["backward"]) == (True, None)
        assert why in told["no_backward"]


def test_plan_takes_the_figures_of_the_machine() -> None:
    figures = ("--memory", "1000", "--link", "100", "--latency", "0", "--node", "4", "--network", "10", "--json")
    told = json.loads(run(*PLAN, *figures).output)
    assert told["forward"]["predicted_seconds"]["local"] == pytest.approx(256 * 2**20 / 1e12)
    wire = 112 * 2**20  # to seven ranks, four of them in the other node
    assert told["forward"]["predicted_seconds"]["collective"] == pytest.approx(wire * 4 / 7 / 10e9)


def test_plan_as_a_process_of_its_own() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    command = [sys.executable, "-m", "tritoncomm", "plan", "ag_last", "--shape", "3,5", "--world", "4", "--json"]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["forward"]["result"] == [3, 20]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("plan", "nothing", "--shape", "4,4", "--world", "2"), "no mapping 'nothing'; there are sp2hp"),
        (("plan", "nothing", "--shape", "4,4"), "no mapping 'nothing'; there are sp2hp"),
        (("plan", "sp2h", "--shape", "4,4"), "no mapping 'sp2h'; did you mean sp2hp? `tritoncomm plan` lists all"),
        (("plan",), "which mapping? There are sp2hp, hp2sp"),
        (("plan", "sp2hp"), "--shape is missing"),
        (("plan", "sp2hp", "--shape", "4,9", "--world", "2"), "does not divide over 2 ranks"),
        (("plan", "sp2hp", "--shape", "4,x", "--world", "2"), "--shape must be integers"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "0"), "one rank or more"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--dim", "2"), "dim 2 is out of range"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--dtype", "bf17"), "'bf17' is no dtype"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--dtype", "quint8"), "dtype 'quint8' cannot be moved"),
        (("plan", "rs_last", "--shape", "4,4", "--world", "2", "--dtype", "fp8_e5m2"), "cannot reduce float8_e5m2"),
        (("demo", "--dtype", "fp16"), "dtype must be one of float32, float64, bfloat16, not 'float16'"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--link", "0"), "--link must be more than 0"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--link", "1e300"), "and 1e+09 at most"),
        ((*PLAN, "--link", "nan"), "--link must be"),
        ((*PLAN, "--memory", "inf"), "--memory must be"),
        ((*PLAN, "--latency", "-1"), "--latency must be"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--node", "0"), "--node must be 1 or more"),
        (("plan", "sp2hp", "--shape", f"4,{10**18}", "--world", "2"), "larger than 4 EiB"),
        (("plan", "sp2hp", "--shape", f"4,{10**20}", "--world", "2"), "beyond 2**62"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", f"{10**7}"), "no job has more than 1048576 ranks"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", f"{10**30}"), "beyond 2**62"),
        (
            ("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--device", "H800"),
            "nothing is known of a device 'H800'",
        ),
        (("plan", "sp2hp", "--world", "2"), "--shape"),
        (("plan", "sp2hp", "--shape", "4,4", "--world", "2", "--sizes", "1,3"), "takes no sizes; all_gather"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--out-sizes", "1,3"), "takes no sizes of what comes"),
        (("plan", "all_gather", "--shape", "4,4", "--world", "2", "--sizes", "3,4"), "(rank 0 of 2, shape"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--sizes", "3,4"), "do not add up to dim 0 of size 4"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--rank", "2"), "rank 2 is none of 0 to 1"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--strides", "4"), "one of 0 or more for every dim"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--strides", "4,-1"), "--strides '4,-1': -1 is below 0"),
        (("plan", "split", "--shape", "4,4", "--world", "2", "--overwrite"), "only copy and reduce can overwrite"),
        (("bench", "--ranks", "1"), "an exchange needs 2 ranks or more"),
        (("bench", "--only", "nothing"), "no exchange has 'nothing' in its name: sp2hp, hp2sp, "),
        (("bench", "--dtype", "int8"), "the dtype is bfloat16, float16, float32, float64, not int8"),
        (("bench", "--mib", "0"), "a size is more than 0 and at most 4096 MiB"),
        (("bench", "--device", "tpu"), "the device is auto, cpu or cuda, not 'tpu'"),
        (("bench", "--json", "/no/such/folder"), "No such file or directory: /no/such/folder"),
    ],
)
def test_bad_arguments_are_one_line(arguments: tuple[str, ...], words: str) -> None:
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert words in result.stderr
    assert result.stdout == "", "what a program reads is not mixed with errors"
    assert len(result.stderr.splitlines()) == 1 or "Usage:" in result.stderr


def test_blocks_off_16_bytes_are_told() -> None:
    """In the table's words and in JSON; nothing is said of a plain shape."""
    told = run(
        "plan",
        "all_to_all_dims",
        "--dim",
        "1,0",
        "--shape",
        "7,16",
        "--world",
        "2",
        "--sizes",
        "11,5",
        "--out-sizes",
        "7,3",
    )
    assert "all-to-all: blocks of ranks 1 start at no multiple of 16 bytes" in told.output
    plain = run("plan", "sp2hp", "--shape", "8,64", "--world", "2")
    assert "multiple of 16" not in plain.output
    assert json.loads(run("plan", "sp2hp", "--shape", "7,5", "--world", "1", "--json").output)["forward"]["steps"] == []


def test_small_sizes_are_shown_in_a_unit_that_shows_them() -> None:
    for shape, unit, amount in (("8,8", "bytes", "256"), ("128,128", "KiB", "64.000")):
        assert amount in run("plan", "sp2hp", "--shape", shape, "--world", "2").output.partition(unit)[2]


def test_version_and_commands() -> None:
    told = run("--version")
    assert (told.exit_code, told.output) == (
        0,
        f"tritoncomm 0.1.0, torch {version('torch')}, triton {version('triton')}\n",
    )


def test_plan_help_has_every_mapping() -> None:
    told = " ".join(run("plan", "--help").output.split())
    for short, name in OPS.items():
        assert f"{short} ({name})" in told


@pytest.mark.parametrize("command", ["plan", "doctor"])
def test_help_has_examples(command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert f"tritoncomm {command}" in result.output.split("Examples:")[1]
    assert "xits with" in " ".join(result.output.split())


def at_80_columns(*arguments: str) -> list[str]:
    result = CliRunner().invoke(cli.app, list(arguments), env={"COLUMNS": "80"})
    assert result.exit_code == 0, result.output
    return result.stdout.splitlines()


@pytest.mark.parametrize("command", ["", "demo", "tune", "plan", "doctor"])
def test_help_breaks_a_paragraph_only_where_the_line_is_full(command: str) -> None:
    lines = at_80_columns(*filter(None, [command]), "--help")
    text = lines[2 : next(i for i, line in enumerate(lines) if line.startswith("╭"))]
    breaks = 0
    for line, after in pairwise(line.strip() for line in text):
        if line and after and not line.startswith("tritoncomm "):
            assert len(line) + 1 + len(after.split()[0]) > 78, (line, after)
            breaks += 1
    assert breaks


def test_the_plan_keeps_its_figures_on_80_columns() -> None:
    for dtype in ("bfloat16", "float64"):
        arguments = ("plan", "sp2hp", "--shape", "4096,64,65536", "--world", "64", "--dtype", dtype)
        lines = at_80_columns(*arguments)
        known = explain("sp2hp", (4096, 64, 65536), 64, getattr(torch, dtype))
        assert max(map(len, lines)) <= 80
        for step in (*known.forward.steps, *known.backward.steps):
            sizes = [f"{size / 2**20:.3f}" for size in (step.bytes_copied, step.bytes_sent)]
            figures = [*sizes, f"{step.seconds * 1e6:.1f}"]
            assert [line.split()[-3:] for line in lines].count(figures) >= 1, figures
    assert "1 rank," in at_80_columns("plan", "copy", "--shape", "4,4", "--world", "1")[0]


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "reshard", "--shape", "8192,8192", "--source", "S0*8", "--target", "R*2,S1*4"),
        ("plan", "all_to_all", "--shape", "8,512", "--world", "2", "--sizes", "3,5", "--out-sizes", "3,1"),
        ("doctor", "--no-self-test"),
    ],
    ids=lambda arguments: arguments[1],
)  # fmt: skip
def test_a_pipe_gets_80_columns(monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...]) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    result = CliRunner().invoke(cli.app, list(arguments))
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 80


def test_the_cases_of_a_model_fit_80_columns() -> None:
    lines = at_80_columns("tune", "--model", "llama3-70b", "--list")
    assert lines[0].strip() == "cases of llama3-70b"
    assert max(map(len, lines)) <= 80
    vocabulary = [line.split() for line in lines if "vocabulary" in line]
    figures = ["8192", "x", "128256", "8", "bfloat16", "16", "2004.0", "80", "vocabulary"]
    assert vocabulary == [[op, *figures] for op in ("pack", "unpack")]


TORCHRUN = {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4"}
SRUN = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_STEP_NODELIST": "n[1-2]"}


@pytest.mark.parametrize(
    ("variables", "command", "runs"),
    [
        (TORCHRUN | {"RANK": "0", "LOCAL_RANK": "0"}, "plan", True),
        (TORCHRUN | {"RANK": "1", "LOCAL_RANK": "1"}, "plan", False),
        (SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, "plan", False),
        (SRUN | {"SLURM_PROCID": "2", "SLURM_LOCALID": "0"}, "doctor", True),
        (SRUN | {"SLURM_PROCID": "3", "SLURM_LOCALID": "1"}, "doctor", False),
        ({"RANK": "1", "WORLD_SIZE": "2"}, "plan", True),  # of nodes, without a launcher
        ({"OMPI_COMM_WORLD_RANK": "0", "OMPI_COMM_WORLD_SIZE": "1"}, "plan", True),
    ],
)
def test_a_launcher_runs_a_command_once(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], command: str, runs: bool
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    result = run(*PLAN) if command == "plan" else run("doctor", "--no-self-test")
    assert result.exit_code == 0, result.output
    assert bool(result.stdout) is runs
    several = {"WORLD_SIZE": "4"}.items() <= variables.items() or SRUN.items() <= variables.items()
    assert ("started 4 ranks: `tritoncomm" in result.stderr) is (runs and several)


def test_variables_that_contradict_each_other_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PMIX_RANK", "3")
    refused = run(*PLAN)
    assert (refused.exit_code, refused.stdout) == (2, "")
    assert "PMIX_RANK is 3, but no variable says" in refused.stderr
    findings = {one["name"]: one for one in json.loads(run("doctor", "--no-self-test", "--json").output)["findings"]}
    assert findings["launcher"]["level"] == "problem"
    assert "PMIX_RANK is 3" in findings["launcher"]["value"]


@pytest.mark.parametrize(
    ("limits", "rank", "has_gpu", "level"),
    [
        ((16384 + 256, 20000), 0, False, "ok"),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), 0, False, "ok"),
        ((16384, 20000), 0, False, "problem"),
        ((1024, 20000), 5, False, "problem"),  # Gloo connects every rank with every other
        ((1024, 20000), 0, True, "problem"),  # the store is there
        ((1024, 1024), 5, True, "note"),
    ],
)
def test_the_limit_of_open_files_is_compared_with_the_ranks(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], rank: int, has_gpu: bool, level: str
) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: limits)
    for variables in (
        {"RANK": str(rank), "WORLD_SIZE": "16384"},
        {"SLURM_PROCID": str(rank), "SLURM_STEP_NUM_TASKS": "16384"},
    ):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            finding = _open_files(has_gpu)
        assert (finding.level, "16384 ranks" in finding.value) == (level, True)
        assert ("`ulimit -n 16640`" in finding.advice) is (level != "ok")
        assert ("the hard limit, 1024," in finding.advice) is (limits[1] == 1024)
    assert _open_files(False).level == "ok", "one rank"
    monkeypatch.setenv("PMIX_RANK", "3")  # which the launcher's own finding tells
    assert _open_files(False).level == "ok"


# doctor


def test_doctor_is_content_without_a_gpu() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    assert "exact" in result.output
    assert result.output.splitlines()[-1] == "all well"


def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """Let a shell script be the ranks of the self test: its third argument is the rank."""
    script = tmp_path / "rank"
    script.write_text(f"#!/bin/sh\n{text}\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))


def test_doctor_names_what_is_wrong_and_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    rank(tmp_path, monkeypatch, '[ "$3" = 0 ] && sleep 30; echo; echo "RuntimeError: no such interface"; exit 1')
    result = run("doctor", "--json")
    assert result.exit_code == 1
    told = json.loads(result.output)
    (problem,) = (one for one in told["findings"] if one["level"] == "problem")
    assert told["ok"] is False
    assert problem["name"] == "self test"
    assert problem["value"].endswith("gloo: rank 1: RuntimeError: no such interface")
    assert "GLOO_SOCKET_IFNAME" in problem["advice"]
    words = run("doctor")
    assert words.exit_code == 1
    assert "no such interface" in " ".join(words.output.split())
    assert words.output.splitlines()[-1] == "1 problem"


def test_doctor_does_not_blame_the_network_for_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONCOMM_PATH", "treton")
    given = []
    monkeypatch.setattr(selftest, "run", lambda backend, without: given.append(without) or "")
    findings = {one["name"]: one for one in json.loads(run("doctor", "--json").output)["findings"]}
    assert findings["TRITONCOMM_PATH"]["level"] == "problem"
    assert given == [("TRITONCOMM_PATH",)]
    assert findings["self test"]["level"] == "ok"
    assert findings["self test"]["value"].endswith("exact (without TRITONCOMM_PATH)")


def test_doctor_does_not_blame_the_network_for_an_installation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank(tmp_path, monkeypatch, """echo "ModuleNotFoundError: No module named 'tritoncomm'"; exit 1""")
    findings = {one["name"]: one for one in json.loads(run("doctor", "--json").output)["findings"]}
    assert "the network is not to blame" in findings["self test"]["advice"]


def test_the_self_test_is_no_rank_of_the_job_around_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rank(tmp_path, monkeypatch, """echo "${LOCAL_RANK-none} ${SECRET-none}"; exit 1""")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("SECRET", "x")
    assert selftest.run("gloo", 5, ("SECRET",)) == "rank 0: none none"


@pytest.mark.parametrize(
    ("creator", "variable", "kind"),
    [
        ("_create_nccl2_process_group", None, "nccl2"),
        ("_create_nccl_process_group", "0", "nccl-legacy"),
        ("_create_nccl_lazy_process_group", None, "nccl-lazy"),
        ("my_backend", None, "my_backend"),
        (None, None, "nccl-legacy"),  # torch 2.14
        (None, "1", "nccl2"),
    ],
)
def test_doctor_says_what_nccl_is(
    monkeypatch: pytest.MonkeyPatch, creator: str | None, variable: str | None, kind: str
) -> None:
    c10d = dist.distributed_c10d
    monkeypatch.delenv("TORCH_DIST_USE_NCCL2", raising=False)
    if not hasattr(c10d, "ProcessGroupNCCL2"):
        assert doctor.nccl_kind() == "", "one implementation: nothing to tell apart"
    if variable is not None:
        monkeypatch.setenv("TORCH_DIST_USE_NCCL2", variable)
    monkeypatch.setattr(c10d, "ProcessGroupNCCL2", object, raising=False)
    plugins: dict[str, Any] = {}

    def ensure(name: str) -> None:
        if creator is not None:
            plugins[name.upper()] = SimpleNamespace(creator_fn=SimpleNamespace(__name__=creator))

    monkeypatch.setattr(c10d.Backend, "_plugins", plugins)
    monkeypatch.setattr(c10d.Backend, "_ensure_backend_registered", ensure, raising=False)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert found(monkeypatch)["NCCL"].value == f'built in; backend "nccl" is {kind}'
    debug = found(monkeypatch, TORCH_DISTRIBUTED_DEBUG="DETAIL")["TORCH_DISTRIBUTED_DEBUG"]
    assert debug.level == ("problem" if kind == "nccl2" else "note")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("echo exact", ""),
        ("sleep 30", "rank 0: no output in time"),
        ('[ "$3" = 1 ] && exit 0; echo exact', "rank 1: no output in time"),
        ('echo "wrong values"; echo bye', "rank 0: bye"),
    ],
)
def test_self_test_believes_only_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, told: str) -> None:
    rank(tmp_path, monkeypatch, text)
    assert selftest.run("gloo", seconds=1.5) == told


def found(monkeypatch: pytest.MonkeyPatch, **variables: str) -> dict[str, doctor.Finding]:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    return {one.name: one for one in doctor.examine(self_test=False)}


@pytest.mark.parametrize(
    ("name", "value", "level"),
    [
        ("TRITONCOMM_PATH", "auto", "ok"),
        ("TRITONCOMM_PATH", "torch", "note"),
        ("TRITONCOMM_PATH", "triton", "problem"),
        ("TRITONCOMM_PATH", "treton", "problem"),
        ("TRITONCOMM_PATH", "", "ok"),
        ("TRITONCOMM_PATH", "off", "ok"),
        ("TRITONCOMM_CHECK", "1", "note"),
        ("TRITONCOMM_CHECK", "false", "ok"),
        ("TRITONCOMM_CHECK", "hash:5", "note"),
        ("TRITONCOMM_CHECK", "hahs", "problem"),
        ("TRITONCOMM_FLIGHT", "1", "note"),
        ("TRITONCOMM_FLIGHT", "off", "ok"),
        ("TRITONCOMM_FLIGHT", "10000:/no/such/folder/yet", "note"),
        ("TRITONCOMM_FLIGHT", "/dev/null/records", "problem"),
        ("TRITONCOMM_FLIGHT_SIGNALS", "1", "note"),
        ("TRITONCOMM_FLIGHT_SIGNALS", "0", "ok"),
        ("TORCH_NCCL_ENABLE_TIMING", "1", "note"),
        ("TORCH_NCCL_ENABLE_TIMING", "0", "ok"),
        ("TRITONCOMM_STRICT", "1", "note"),
        ("TRITONCOMM_STRICT", "off", "ok"),
        ("TRITONCOMM_MEGATRON", "off", "note"),
        ("TRITONCOMM_MEGATRON", "1", "ok"),
        ("TRITONCOMM_MEGATRON", "offf", "problem"),
        ("TRITONCOMM_STRICT", "offf", "problem"),
        ("TRITONCOMM_FLIGHT_SIGNALS", "offf", "problem"),
        ("TRITONCOMM_PATHS", "torch", "note"),
        ("TORCH_DIST_USE_NCCL2", "0", "note"),
        ("NCCL_P2P_DISABLE", "1", "problem"),
        ("NCCL_P2P_DISABLE", "0", "ok"),
        ("NCCL_DEBUG", "INFO", "note"),
        ("NCCL_SOMETHING", "5", "note"),
        ("CUDA_DEVICE_MAX_CONNECTIONS", "1", "note"),
        ("TORCH_DISTRIBUTED_DEBUG", "DETAIL", "note"),
        ("CUDA_VISIBLE_DEVICES", "", "note"),
    ],
)
def test_doctor_reads_variables(monkeypatch: pytest.MonkeyPatch, name: str, value: str, level: str) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(doctor, "nccl_kind", str)  # another test has those that differ
    one = found(monkeypatch, **{name: value})[name]
    assert one.level == level
    assert bool(one.advice) is (level != "ok")


def test_doctor_tells_that_hash_mode_compares_no_p2p_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    for value, interval in (("hash:5", 5), ("HASH", 1000)):
        assert found(monkeypatch, TRITONCOMM_CHECK=value)["TRITONCOMM_CHECK"].advice == (
            f"ranks compare one digest every {interval} collectives; p2p steps are compared with TRITONCOMM_CHECK=1 "
            "only; set it on all ranks"
        )
    assert "p2p" not in found(monkeypatch, TRITONCOMM_CHECK="1")["TRITONCOMM_CHECK"].advice


def test_doctor_says_whether_torch_records_what_hangs_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCH_FR_BUFFER_SIZE", raising=False)
    module = torch._C._distributed_c10d
    monkeypatch.delattr(module, "_dump_nccl_trace_json", raising=False)
    monkeypatch.delattr(module, "_dump_fr_trace_json", raising=False)
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: False)
    one = found(monkeypatch)["torch's recorder"]
    assert (one.level, one.value) == ("note", "this build of torch has no recorder of NCCL")
    assert one.advice == "needed for GPUs only"
    monkeypatch.setattr(doctor.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(doctor, "nccl_kind", str)
    assert found(monkeypatch, TRITONCOMM_FLIGHT="1")["torch's recorder"].level == "note"
    monkeypatch.setattr(module, "_dump_nccl_trace_json", bytes, raising=False)
    one = found(monkeypatch)["torch's recorder"]
    assert (one.level, one.value) == ("ok", "on: keeps 2000 collectives, not when a device begins one")
    one = found(monkeypatch, TORCH_NCCL_ENABLE_TIMING="1", TORCH_FR_BUFFER_SIZE="50")["torch's recorder"]
    assert one.value == "on: keeps 50 collectives, and when a device begins one"
    one = found(monkeypatch, TORCH_FR_BUFFER_SIZE="0")["torch's recorder"]
    assert (one.level, one.value) == ("note", "torch's recorder is off, as TORCH_FR_BUFFER_SIZE is 0")
    monkeypatch.delenv("TRITONCOMM_FLIGHT")
    one = found(monkeypatch, TRITONCOMM_FLIGHT_SIGNALS="1")["TRITONCOMM_FLIGHT_SIGNALS"]
    assert one.advice == "does nothing without TRITONCOMM_FLIGHT"


def test_doctor_does_not_ask_to_unset_what_torchrun_and_images_set(monkeypatch: pytest.MonkeyPatch) -> None:
    torchrun = {"TORCHELASTIC_RUN_ID": "1", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", "TORCH_NCCL_BLOCKING_WAIT": "1"}
    noted = found(monkeypatch, NCCL_VERSION="2.28.3-1", **torchrun)
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING" not in noted
    assert "NCCL_VERSION" not in noted, "an image's, which NCCL does not read"
    assert noted["TORCH_NCCL_BLOCKING_WAIT"].level == "note"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    assert found(monkeypatch)["TORCH_NCCL_ASYNC_ERROR_HANDLING"].level == "note"


def test_doctor_reads_the_table_that_a_variable_names(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "gpu-x-8.json"

    def told(value: Path | str) -> doctor.Finding:
        return found(monkeypatch, TRITONCOMM_TABLE=str(value))["TRITONCOMM_TABLE"]

    assert told(path).level == "problem"
    assert "No such file" in told(path).value
    assert (told(tmp_path).level, told(tmp_path).value) == ("problem", f"{tmp_path}: no table in it")
    path.write_text("[]")
    assert (told(path).level, told("none").level, told("").level) == ("problem", "note", "ok")
    key = {"kind": "measured", "format": 1, "device": "GPU X", "sm_count": 8, "source": "0", "triton": "0"}
    path.write_text(json.dumps(key))
    assert (told(path).level, told(path).value) == ("ok", f"{path}: for GPU X with 8 SMs")
    assert (told(tmp_path).level, told(tmp_path).value) == ("ok", f"{tmp_path}: gpu-x-8.json")


def test_doctor_looks_at_gpus_and_links(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = SimpleNamespace(name="NVIDIA X", total_memory=80 * 2**30, multi_processor_count=132, major=9, minor=0)
    for name, value in {
        "is_available": lambda: True,
        "device_count": lambda: 2,
        "get_device_properties": lambda index: gpu,
        "can_device_access_peer": lambda a, b: False,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(dist, "is_nccl_available", lambda: False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    told = found(monkeypatch, TRITON_INTERPRET="1")
    assert "NVIDIA X, 80 GiB, 132 SMs, sm_90" in told["GPU 1"].value
    assert (told["kernels on sm_90"].level, told["kernels on sm_90"].value) == (
        "ok", "tests and benchmarks ran on an H100 and an H200",
    )  # fmt: skip
    gpu.major = 8
    assert found(monkeypatch)["kernels on sm_80"].value == "compiled for it in tests; never run on it"
    gpu.major, gpu.minor = 9, 7
    assert found(monkeypatch)["kernels on sm_97"].value.startswith("tests compile for sm_80, sm_89, sm_90")
    assert told["peer access"].value == "not between GPUs 0-1"
    assert told["tuned table"].value.startswith("none for NVIDIA X")
    monkeypatch.setenv("TRITONCOMM_TABLE", "/no/such/table.json")
    doctor.tables.chosen.cache_clear()
    said = [one for one in doctor.examine(self_test=False) if one.name == "tuned table"]
    doctor.tables.chosen.cache_clear()
    assert "table.json is ignored" in said[0].value
    assert (told["NCCL"].level, told["TRITON_INTERPRET"].level) == ("problem", "problem")


def test_doctor_names_a_compute_mode_that_ranks_cannot_share(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    smi = tmp_path / "nvidia-smi"
    monkeypatch.setattr(doctor.shutil, "which", lambda name: str(smi))
    for mode, count, findings in (("Exclusive_Process", 1, 1), ("Default", 1, 0), ("Prohibited", 0, 0)):
        smi.write_text(f"#!/bin/sh\necho {mode}\n")
        smi.chmod(0o755)
        assert doctor.compute_mode() == mode
        assert [one.value for one in doctor._compute_mode(count)] == [mode] * findings
    smi.write_text("#!/bin/sh\necho no driver; exit 9\n")
    assert doctor.compute_mode() == ""


def test_doctor_wants_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "NEEDED", {"torch": (99, 0), "no-such-package": (1, 0)})
    told = found(monkeypatch)
    assert told["torch"].advice == "too old: pip install 'torch>=99.0'"
    assert told["no-such-package"].level == "problem"


@pytest.mark.parametrize(
    ("kind", "hip", "level", "words"),
    [
        ("C", None, "ok", ""),
        ("run", "6.4", "ok", ""),
        ("run", None, "note", "at 1 us more of host time"),
        ("ordinary", "6.4", "note", "at 10 us more of host time"),
    ],
)
def test_doctor_notes_launches_that_are_not_direct(
    monkeypatch: pytest.MonkeyPatch, kind: str, hip: str | None, level: str, words: str
) -> None:
    monkeypatch.setattr(launch, "launch_kind", lambda: kind)
    monkeypatch.setattr(torch.version, "hip", hip)
    told = {one.name: one for one in doctor._triton(True)}
    assert told["triton"].level == "ok"
    assert told["kernel launch"].level == level
    assert words in told["kernel launch"].advice
    monkeypatch.setitem(sys.modules, "triton", None)
    assert [one.level for has_gpu in (True, False) for one in doctor._triton(has_gpu)] == ["problem", "note"]
    monkeypatch.delitem(sys.modules, "triton")
    assert [one.name for one in doctor._triton(False)] == ["triton"], "no launch without a GPU to launch on"


def test_self_test_sees_a_wrong_mapping(monkeypatch: pytest.MonkeyPatch, pool: Any) -> None:
    assert pool.run(exchange_wrongly, world=2) == ["gave wrong values"] * 2


def exchange_wrongly(group: Any) -> str:
    """On a rank of the pool: the self test's own comparison, with a mapping that scales its values."""
    right = selftest.all_to_all_sp2hp
    selftest.all_to_all_sp2hp = lambda x, _: right(x, group) * 2.0
    world, dist.group.WORLD = dist.group.WORLD, group
    try:
        selftest._exchange(group.rank(), torch.device("cpu"))
    except SystemExit as error:
        return " ".join(str(error).split()[1:4]).strip(":")
    finally:
        selftest.all_to_all_sp2hp = right
        dist.group.WORLD = world
    return "nothing"


RESHARD = ("plan", "reshard", "--shape", "8192,8192", "--source", "S0*8", "--target", "R*2,S1*4", "--rank", "3")


def test_plan_of_a_resharding() -> None:
    answer = json.loads(run(*RESHARD, "--json").output)
    assert (answer["world"], answer["rank"], answer["buckets"], answer["messages"]) == (8, 3, 1, 7)
    assert answer["bytes_sent"] == 7 * 1024 * 2048 * 2
    assert answer["all_ranks"]["bytes_sent"] == answer["all_ranks"]["bytes_lacking"]
    words = run(*RESHARD).output
    assert "56 messages" in words
    assert "at 5 us per step, 350 GB/s per link, 50 GB/s to other nodes of 8 ranks" in " ".join(words.split())
    assert "2 buckets" in run(*RESHARD, "--bucket", str(2**24)).output


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (("--source", "S0x8"), "--source must be axes"),
        (("--target", ""), "needs --source and --target"),
        (("--target", "S2*8"), "no dim 2"),
        (("--target", "S1*0"), "one rank or more"),
        (("--rank", "9"), "--rank 9 is in neither layout"),
        (("--world", "8"), "--world: the layouts of reshard have their ranks"),
    ],
)
def test_a_resharding_that_is_none(changed: tuple[str, str], said: str) -> None:
    result = CliRunner().invoke(cli.app, [*RESHARD, *changed])
    assert result.exit_code == 2
    assert said in " ".join(result.output.split())


def test_the_shell_completes_commands() -> None:
    paths = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
    code = "import sys; sys.argv[0] = 'tritoncomm'; from tritoncomm.cli import app; app(prog_name='tritoncomm')"
    asked = {"_TRITONCOMM_COMPLETE": "complete_bash", "COMP_WORDS": "tritoncomm d", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": paths, **asked}, capture_output=True, text=True,
        timeout=60, check=False,
    )  # fmt: skip
    assert done.stdout.split() == ["demo", "doctor"], done.stderr


def test_a_missing_file_is_named_without_a_number() -> None:
    assert "error: No such file or directory: nosuch" in run("trace", "nosuch").output


@pytest.mark.parametrize("is_terminal", [True, False])
def test_long_lines_wrap_between_words_but_for_errors_in_files(
    capsys: pytest.CaptureFixture[str], is_terminal: bool
) -> None:
    for stderr, lines in ((False, 3), (True, 3 if is_terminal else 1)):
        say(Console(width=80, force_terminal=is_terminal, stderr=stderr), "word " * 40)
        assert len("".join(capsys.readouterr()).rstrip().splitlines()) == lines
    line = f"written: {'/folder' * 20}"
    say(Console(width=80, force_terminal=is_terminal), line)
    assert capsys.readouterr().out.splitlines() == [line], "a path to be copied"


PEERS = ("transformers", "accelerate", "deepspeed", "yunchang", "megatron", "matplotlib", "safetensors", "datasets")
HIDDEN = f"""
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {PEERS!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Finder())
"""
CASE = """
import torch
from tritoncomm import verify

def build(rank, world, group, whole):
    model = torch.nn.Linear(4, 4)
    if whole is not None:
        model.load_state_dict(whole)
    def step():
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        return loss
    return verify.Case(model, step)
"""


def examples() -> list[str]:
    """Every example of every help text, without what stands in brackets behind it."""
    texts = [cli.plan.EPILOG, cli.doctor.EPILOG, cli.trace.EPILOG, cli.verify.EPILOG, cli.tune.tune.__doc__ or ""]
    lines = [line.strip() for text in texts for line in text.splitlines()]
    found = [line.partition("   (")[0] for line in lines if line.startswith("tritoncomm ")]
    assert len(found) >= 16
    return found


@pytest.mark.slow
@pytest.mark.parametrize("example", examples())
def test_examples_of_help_run_without_the_peers(tmp_path: Path, example: str) -> None:
    """Each does its work or refuses in a line, in an install without any optional package and without a GPU."""
    (tmp_path / "sitecustomize.py").write_text(HIDDEN)
    for name in ("model.py", "train.py"):
        (tmp_path / name).write_text(CASE)
    paths = os.pathsep.join(map(str, (tmp_path, ROOT, ROOT / "kernels")))
    variables = without_launcher(os.environ) | {"PYTHONPATH": paths, "TRITON_INTERPRET": "0", "HOME": str(tmp_path)}
    command = [sys.executable, "-m", *shlex.split(example)]
    done = subprocess.run(
        command, cwd=tmp_path, env=variables, capture_output=True, text=True, timeout=110, check=False
    )
    told = done.stdout + done.stderr
    assert "Traceback" not in told, told
    assert done.returncode in (0, 1, 2, 3), told
    if done.returncode:
        assert len(done.stderr.strip().splitlines()) <= 3, told
    if example.startswith("tritoncomm verify transformers"):
        assert done.returncode == 3
        assert "needs the package" in " ".join(told.split())
    elif example.startswith(("tritoncomm verify", "tritoncomm plan")) and "H200" not in example:
        assert done.returncode == 0, told
