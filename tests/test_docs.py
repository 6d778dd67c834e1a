"""The Python of README.md and docs/*.md runs as it stands, on two ranks.

The blocks of a page run in order and share their names. In front of a block may stand, invisible to readers:

    <!-- setup:                      code that the page takes for granted
    tritoncomm.initialize(tensor=2)
    -->
    <!-- not run: the reason -->     for one that cannot run here; ``NOT_RUN`` counts them
"""

import importlib.util
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import run_job, without_launcher

from tritoncomm.integrations.megatron import TESTED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = {"experts.md": 1, "hybrid.md": 3, "trainer.md": 5, "transformers.md": 1, "vision.md": 1}
SETUPS = {"integrations_megatron.md": 1}  # silences Megatron's warnings; the page runs without it
# Other frameworks that blocks import, by what installs them (as `make test` does).
PEERS = {
    "megatron": "pip install --no-deps megatron-core==0.16.1",
    "transformers": "pip install transformers==5.23.0 accelerate==1.15.0",
}
BLOCK = re.compile(r"^<!-- setup:\n(?P<setup>.*?)^-->\n+|^(?:<!-- not run: (?P<reason>[^\n]+) -->\n+)?"
                   r"^```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)  # fmt: skip


def blocks(text: str) -> Iterator[tuple[int, str]]:
    """Line number and code of every block and every setup, except those that are not run."""
    for match in BLOCK.finditer(text):
        kind = "setup" if match["setup"] is not None else "code"
        if match["reason"] is None:
            yield text.count("\n", 0, match.start(kind)), match[kind]


def missing(code: str) -> list[str]:
    """Other frameworks that a block imports, and that are not installed."""
    used = [name for name in PEERS if re.search(rf"\b(import .*\b{name}|from {name})\b", code)]
    return [name for name in used if importlib.util.find_spec(name) is None]


def run_pages(store: str, pages: list[tuple[str, str]]) -> list[str]:
    """The problem of every page on this rank, empty where there is none; nothing runs after a problem."""
    # Imported here because this function runs in processes of their own.
    import torch
    import torch.distributed as dist

    import tritoncomm
    from tritoncomm import variables

    rank = int(os.environ["RANK"])
    dist.init_process_group("gloo", store=dist.FileStore(store, 2), rank=rank, world_size=2)
    dist.barrier()  # both are connected before one may end
    problems = []
    for name, text in pages:
        names: dict[str, Any] = {"__name__": "page"}  # a page imports what it uses
        torch.manual_seed(0)
        problem = next((f"not run: {problem}" for problem in problems if problem), "")
        for line, code in [] if problem else blocks(text):
            try:
                if not missing(code):
                    exec(compile("\n" * line + code, name, "exec"), names)
            except Exception as error:
                problem = f"{name}: {error!r} in the block at line {line}"
                break
        problems.append(problem)
        tritoncomm.destroy()
        variables.set_check(False)
    return problems


@pytest.fixture(scope="module")
def problems(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    """Problems of any rank, by page."""
    store = str(tmp_path_factory.mktemp("docs") / "store")
    pages = [(path.name, path.read_text()) for path in PAGES]
    answers = run_job(run_pages, [{"RANK": str(rank)} for rank in range(2)], store, pages, timeout=100)
    assert all(isinstance(answer, list) for answer in answers), answers
    return {name: {answer[k] for answer in answers} for k, (name, _) in enumerate(pages)}


def left_out(path: Path) -> str:
    """Blocks of a page that need a missing framework, with its install command; empty where all ran."""
    lines = [
        f"{path.name}:{line} needs {name}: {PEERS[name]}"
        for line, code in blocks(path.read_text())
        for name in missing(code)
    ]
    return "; ".join(lines)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_blocks_of_a_page_run(path: Path, problems: dict[str, set[str]]) -> None:
    assert problems[path.name] == {""}
    if reason := left_out(path):
        pytest.skip(f"other blocks of the page passed; {reason}")


def test_blocks_without_their_framework_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "page.md"
    page.write_text("```python\nimport torch\n```\n\n```python\nfrom transformers import pipeline\n```\n")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert left_out(page) == "page.md:5 needs transformers: pip install transformers==5.23.0 accelerate==1.15.0"
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    assert left_out(page) == ""
    makefile = (ROOT / "Makefile").read_text().replace("$(firstword $(megatrons))", TESTED[0])
    for command in PEERS.values():
        assert all(package in makefile for package in re.findall(r"\S+==\S+", command))


def test_the_script_of_the_mappings_runs_under_torchrun(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "mappings.md").read_text()
    (script := tmp_path / "exchange.py").write_text(next(code for _, code in blocks(page)))
    paths = os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        command,
        env=without_launcher(os.environ) | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_every_block_is_seen() -> None:
    """Each fenced block of Python is run or counted: none is indented, capitalised or otherwise out of sight."""
    for path in PAGES:
        text = path.read_text()
        codes = [match for match in BLOCK.finditer(text) if match["code"] is not None]
        assert len(codes) == len(re.findall(r"```\s*py", text, re.IGNORECASE)), path.name
        assert sum(match["reason"] is not None for match in codes) == NOT_RUN.get(path.name, 0), path.name
        assert text.count("<!-- setup:") == sum(match["setup"] is not None for match in BLOCK.finditer(text))


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_a_script(path: Path) -> None:
    """Visible blocks run without hidden ones, and end the groups that they make."""
    text = path.read_text()
    hidden = [match["setup"] for match in BLOCK.finditer(text) if match["setup"] is not None]
    assert len(hidden) == SETUPS.get(path.name, 0)
    codes = "".join(match["code"] or "" for match in BLOCK.finditer(text))
    assert "tritoncomm.initialize(" not in codes or "tritoncomm.destroy()" in codes.partition("initialize(")[2]


def test_a_block_that_fails_is_seen(tmp_path: Path) -> None:
    page = (
        "text\n\n<!-- setup:\nx = 1\n-->\n```python\nassert x == 2\n```\n\n<!-- not run: no -->\n```python\n1/0\n```\n"
    )
    assert [code for _, code in blocks(page)] == ["x = 1\n", "assert x == 2\n"]
    pages = [("one.md", page), ("two.md", "")]
    answers = run_job(run_pages, [{"RANK": str(rank)} for rank in range(2)], str(tmp_path / "store"), pages)
    expected = "one.md: AssertionError() in the block at line 6"
    assert answers == [[expected, f"not run: {expected}"]] * 2


def links(text: str) -> list[str]:
    """Targets inside the repository; code has brackets of its own."""
    plain = re.sub(r"```.*?```|<!--.*?-->", "", text, flags=re.DOTALL)
    targets = re.findall(r"(?<!\w)\[[^\]]+\]\(([^)\s]+)\)", plain)
    return [target.partition("#")[0] for target in targets if "://" not in target and not target.startswith("#")]


@pytest.mark.parametrize("path", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    assert [target for target in links(path.read_text()) if not (path.parent / target).exists()] == []


def test_every_page_is_linked() -> None:
    reachable, waiting = set(), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path not in reachable and path.suffix == ".md":
            reachable.add(path)
            waiting += [(path.parent / target).resolve() for target in links(path.read_text())]
    assert {path.resolve() for path in PAGES} - reachable == set()
