"""Compiled kernels, launched by Triton and run as PTX on the CPU, against the reference; no GPU takes part."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler here")


def run_tests(least: int, *arguments: str) -> None:
    """Tests of the device on the stub CUDA driver."""
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": paths}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    counted = re.search(r"^(\d+) passed(, \d+ (deselected|skipped))* in ", done.stdout, re.MULTILINE)
    assert counted is not None, done.stdout
    assert int(counted[1]) >= least, done.stdout


@needs_compiler
def test_compiled_kernels() -> None:
    some = "on_stub or access_widths or (casts and bfloat16)"
    run_tests(12, "--device=sm90", "--small", "-k", some, "tests/fake_gpu/on_stub.py", "tests/kernels")


@needs_compiler
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("capability", ["sm80", "sm90", "sm100"])
def test_compiled_kernels_of_every_kind(capability: str) -> None:
    run_tests(500, f"--device={capability}", "tests/fake_gpu/on_stub.py", "tests/kernels", "tests/gpu/test_ranks.py")


READY = """
import torch
from bench.bench_launch import ready, seen
from fake_gpu.device import Device
from tritoncomm_kernels import pack
with Device().current(runs=True):
    rows, wire = torch.randn(16, 256), torch.empty(4, 16, 64)
    launch = seen(lambda: pack(rows, wire))
    call = ready(launch, rows, wire)
    launch.variants.clear()  # a call of the prepared launch would fill it
    wire.zero_()
    call()
    print(torch.equal(wire, rows.view(16, 4, 64).transpose(0, 1)), launch.variants)
"""


@needs_compiler
def test_the_floor_of_a_launch_is_the_launcher_alone() -> None:
    """It does what the prepared launch does, and does not go through it."""
    paths = os.pathsep.join(str(ROOT / folder) for folder in (".", "kernels", "tests/helpers"))
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"} | {"PYTHONPATH": paths}
    done = subprocess.run([sys.executable, "-c", READY], env=env, capture_output=True, text=True, timeout=100)
    assert done.stdout == "True {}\n", done.stderr
