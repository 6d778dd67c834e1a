"""Every example runs under torchrun on two ranks of CPUs, and the Python of the page beside it runs as it stands."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from pool import Pool
from torch.distributed import ProcessGroup

ROOT = Path(__file__).parents[1]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_runs(path: Path) -> None:
    if "transformers" in path.read_text() and importlib.util.find_spec("transformers") is None:
        pytest.skip("transformers is not installed")
    variables = {key: value for key, value in os.environ.items() if key not in LAUNCHED}
    variables |= {"PYTHONPATH": f"{ROOT}:{ROOT / 'kernels'}", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(path)]
    done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "on 2 ranks" in done.stdout, done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_example_is_short(path: Path) -> None:
    assert len(path.read_text().splitlines()) < 80


def run_page(group: ProcessGroup, blocks: list[str]) -> int:
    """Every Python block of the page, with the names that the page assumes."""
    torch.manual_seed(0)
    b, s, heads, kv_heads, head_dim = 2, 4, 8, 2, 8
    names: dict[str, Any] = {"group": group, "torch": torch, "scale": 0.5}
    names |= {name: torch.randn(b, s, n, head_dim) for name, n in (("q", heads), ("k", kv_heads), ("v", kv_heads))}
    names["fused"] = torch.randn(b, s, 3, heads, head_dim)
    for block in blocks:
        exec(compile(block, "docs/ulysses.md", "exec"), names)
    return len(blocks)


def test_page_runs(pool: Pool) -> None:
    page = (ROOT / "docs" / "ulysses.md").read_text()
    blocks = [part.split("```")[0] for part in page.split("```python\n")[1:]]
    if importlib.util.find_spec("transformers") is None:
        blocks = [block for block in blocks if "transformers" not in block]
    assert len(blocks) >= 3
    assert pool.run(run_page, blocks, world=2) == [len(blocks)] * 2
