"""Commands that README, CONTRIBUTING and the quickstart print: each runs as it stands, or a row says where it runs."""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from jobs import without_launcher

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "CONTRIBUTING.md", "docs/quickstart.md")
PROGRAMS = r"(torchrun|tritoncomm|make|python3?|pip|git|pytest|\.venv/bin/python)\s"

# Run by this file, in seconds on two cores. Examples and recipes are small; the kernels' tests choose one name.
RUN = {
    "torchrun --nproc-per-node 2 examples/trainer_sequence_parallel.py",
    "torchrun --nproc-per-node 2 examples/experts.py",
    "torchrun --nproc-per-node 2 examples/fsdp2_half_bytes.py",
    "tritoncomm verify examples/verify_ddp.py:build --ranks 2",
    "tritoncomm doctor",
    "tritoncomm demo",
    "tritoncomm plan sp2hp --shape 4096,1,8192 --world 8",
    "tritoncomm plan ulysses --shape 2,1024,32,128 --heads 32,8 --world 8",
    ".venv/bin/python -m pytest tests/kernels/test_kernels.py -k ragged",
    ".venv/bin/python -m pytest tests/kernels/test_kernels.py -k ragged --device sm90",
    ".venv/bin/python -m bench mappings --only sp2hp --rounds 20",
}
# Run elsewhere, or names of commands without their arguments.
ELSEWHERE = {
    "git clone <URL of this repository> tritoncomm && cd tritoncomm": "the reader's URL",
    "pip install torch --index-url https://download.pytorch.org/whl/cpu": "a download, in .github/workflows/tests.yml",
    "pip install -e '.[cli]'": "tests/test_packaging.py::test_the_wheel_works_outside_the_checkout installs the wheel",
    "pip install -e '.[cli]' && tritoncomm demo": "its parts run here, and in `make demo`",
    "pip install dist/*.whl": "tests/test_packaging.py::test_the_wheel_works_outside_the_checkout",
    "tritoncomm bench --ranks 8": "tests/cli/test_bench.py::test_exchanges_are_measured_with_their_peers, 2 ranks",
    "tritoncomm verify FILE.py:build": "above, with a file",
    "tritoncomm tune": "tests/tune/test_tune.py::test_without_a_gpu_the_command_says_what_to_do",
    "tritoncomm trace FILES...": "tests/debug/test_trace.py",
    "torchrun --nproc-per-node 2 block.py": "tests/test_docs.py::test_blocks_of_a_page_run",
    "python -m tritoncomm": "tests/cli/test_bench.py::test_exchanges_are_measured_with_their_peers",
    "python -m bench": "above, with a part",
    "python -m http.server -d site": "Python's own",
    "pytest --device": "above, with a device",
}


def commands(text: str) -> list[str]:
    """Lines of the fenced blocks that are no Python, and code in sentences that begins with a program and arguments."""
    text = re.sub(r"^```python\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    fenced = re.findall(r"^```\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    lines = [line.removeprefix("$ ").partition("    #")[0].strip() for block in fenced for line in block.splitlines()]
    sentences = re.sub(r"^```\n.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    spans = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", sentences)]
    return [line for line in dict.fromkeys(lines + spans) if re.match(PROGRAMS, line)]


def printed() -> dict[str, str]:
    """The page of every command but ``tritoncomm NAME`` without arguments, which ``--help`` explains."""
    found = {command: page for page in PAGES for command in commands((ROOT / page).read_text())}
    return {command: page for command, page in found.items() if command in RUN or len(command.split()) > 2
            or not command.startswith("tritoncomm")}  # fmt: skip


def test_every_command_has_its_run() -> None:
    others = [command for command in printed() if not command.startswith("make ")]
    assert set(others) - RUN - ELSEWHERE.keys() == set(), "run it here, or say where it runs"
    everywhere = {command for page in PAGES for command in commands((ROOT / page).read_text())}
    assert (RUN | ELSEWHERE.keys()) - everywhere == set(), "printed no more"


def test_tests_that_run_commands_exist() -> None:
    for place in re.findall(r"tests/\S+\.py(?:::\w+)?", " ".join(ELSEWHERE.values())):
        path, _, name = place.partition("::")
        assert f"def {name}" in (ROOT / path).read_text(), place


def test_every_target_of_make_exists() -> None:
    targets = [command for command in printed() if command.startswith("make ")]
    assert len(targets) > 20
    for command in targets:
        words = [
            word.replace('"', "").replace("<commit>", "HEAD") for word in re.findall(r'[\w-]+="[^"]*"|\S+', command)
        ]
        done = subprocess.run([*words, "-n", f"PYTHON={sys.executable}"], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, f"{command}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("command", sorted(RUN))
def test_a_command_runs(command: str, tmp_path: Path) -> None:
    for word, package in (("trainer", "transformers"), ("bench", "megatron")):
        if word in command and importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    programs = {"torchrun": "torch.distributed.run", "tritoncomm": "tritoncomm"}
    program, *arguments = command.split()
    module = ["-m", programs[program]] if program in programs else []
    paths = os.pathsep.join((str(ROOT), str(ROOT / "kernels")))
    env = without_launcher(os.environ) | {"PYTHONPATH": paths, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    env |= {"XDG_CACHE_HOME": str(tmp_path)}
    for name in ("TRITON_INTERPRET", "CI"):
        env.pop(name, None)
    done = subprocess.run([sys.executable, *module, *arguments], cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]


def test_commands_are_found() -> None:
    text = (
        "`make demo` and `tritoncomm`\n```\n$ git clone x    # a clone\nrank 0: done\n```\n```python\nmake = 1\n```\n"
    )
    assert commands(text) == ["git clone x", "make demo"]
