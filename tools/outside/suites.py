"""The suites: whose tests, at which commit, on how many ranks, and how ours takes the peer's place."""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from outside import peers

__all__ = ["ROOT", "SUITES", "Source", "Suite", "checkout", "missing"]

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
CLONES = ROOT / ".world"


@dataclass(frozen=True)
class Source:
    """A repository at a tag or commit.

    Attributes:
        repository: on GitHub.
        commit: that is checked out.
        variable: names a folder with the files, or another git repository to fetch from.
    """

    repository: str
    commit: str
    variable: str


@dataclass(frozen=True)
class Suite:
    """Tests of a peer.

    Attributes:
        package: whose version is told: the installed one's, or the tag of the source where that has the package.
        tests: files, from the folder of the source.
        source: of the tests; None for those of this folder.
        ranks: of the tests.
        together: every rank runs pytest; False where a test starts its ranks itself.
        prepare: imports the peer, with ours in its place where asked, before the ranks are forked.
        enter: runs on each rank, before pytest.
        options: further ones of pytest.
        modules: without which the suite cannot run.
        is_installed: whether the package is; else it comes with the source.
        alone: False where the tests compare with the peer themselves.
        known: why a test may fail with ours, by the end of its name.
        limit: seconds of the whole run; ``timeout`` of a test.
    """

    package: str
    tests: tuple[str, ...]
    prepare: Callable[[bool], None]
    source: Source | None = None
    ranks: int = 2
    together: bool = True
    enter: Callable[[bool], None] = lambda is_ours: None
    options: tuple[str, ...] = ()
    modules: tuple[str, ...] = ()
    is_installed: bool = True
    alone: bool = True
    known: Mapping[str, str] = field(default_factory=dict)
    limit: float = 500.0
    timeout: int = 90


def checkout(source: Source) -> Path:
    """Return the folder of a source, which the first call fetches.

    Raises:
        RuntimeError: git cannot fetch it.
    """
    given = os.environ.get(source.variable)
    if given and not any(Path(given, name).exists() for name in ("HEAD", ".git")):
        return Path(given)
    folder = CLONES / f"{source.repository.replace('/', '+')}-{source.commit}"
    if folder.exists():
        return folder
    part = folder.with_suffix(".part")
    part.mkdir(parents=True, exist_ok=True)
    where = Path(given).resolve().as_uri() if given else f"https://github.com/{source.repository}"
    for command in (
        ["init", "-q"],
        ["fetch", "-q", "--depth", "1", where, source.commit],
        ["checkout", "-q", "FETCH_HEAD"],
    ):
        done = subprocess.run(["git", *command], cwd=part, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(
                f"{source.repository} at {source.commit}: {done.stderr.strip()}; without a network, set "
                f"{source.variable} to a folder or a git repository that has it"
            )
    part.rename(folder)
    return folder


MEGATRON = Suite(
    "megatron-core",
    (),
    peers.megatron,
    Source("NVIDIA/Megatron-LM", "core_v0.19.0", "WORLD_MEGATRON"),
    ranks=8,
    enter=peers.patched,
    modules=("megatron.core",),
)
COLOSSALAI = Suite(
    "colossalai",
    tuple(f"tests/test_{name}" for name in ("comm", "device", "tensor")),
    peers.colossalai,
    Source("hpcaitech/ColossalAI", "v0.2.8", "WORLD_COLOSSALAI"),
    ranks=4,
    together=False,
    options=("-k", "not test_model_parameters"),  # which joins a group that the ranks of later tests inherit
    is_installed=False,
)
YUNCHANG = Source("feifeibear/long-context-attention", "56118e0d8fe377d43441226dd8bdd07135c92c22", "WORLD_YUNCHANG")
DEEPSPEED = Source("deepspeedai/DeepSpeed", "edaa7221267243c7be7fb49c5d5f5c4fb97b4641", "WORLD_DEEPSPEED")
OWN = Suite("", (), peers.nothing, alone=False)


def _megatron(*tests: str, **more: Any) -> Suite:
    """Unit tests of Megatron-core."""
    return replace(MEGATRON, tests=tuple(f"tests/unit_tests/{test}" for test in tests), **more)


def _own(package: str, cases: str, **more: Any) -> Suite:
    """Tests of this folder, which compare with the package themselves."""
    return replace(OWN, package=package, tests=(str(HERE / "cases" / f"{cases}_cases.py"),), **more)


SUITES = {
    "Megatron's mappings, layers, cross entropy": _megatron(
        "tensor_parallel/test_mappings.py",
        "tensor_parallel/test_layers.py",
        "tensor_parallel/test_cross_entropy.py",
        "tensor_parallel/test_tensor_parallel_utils.py",
    ),
    "Megatron's schedules": _megatron("pipeline_parallel/test_schedules.py"),
    "Megatron's communicators of modules and bridges": _megatron(
        "pipeline_parallel/test_multimodule_communicator.py", "pipeline_parallel/test_bridge_communicator.py"
    ),
    "Megatron's token dispatchers": _megatron(
        "transformer/moe/test_token_dispatcher.py", "transformer/moe/test_a2a_token_dispatcher.py"
    ),
    "Megatron's resharding over Gloo": _megatron(
        "resharding/test_model_swap.py",
        ranks=4,
        options=("-k", "gloo"),
        prepare=peers.megatron_resharding,
        enter=peers.with_buffer,
    ),
    "DeepSpeed's Ulysses": Suite(
        "deepspeed",
        ("tests/unit/sequence_parallelism/test_ulysses.py",),
        peers.deepspeed,
        DEEPSPEED,
        ranks=4,
        together=False,
        options=("-k", "not CheckpointLoad"),  # hangs on a machine without its compiled optimizers
        modules=("deepspeed", "transformers"),
    ),
    "yunchang's attention": _own(
        "yunchang", "yunchang", prepare=peers.yunchang, source=YUNCHANG, modules=("yunchang",)
    ),
    "ColossalAI's communication, tensor, device": COLOSSALAI,
    "the same with its own operators": replace(COLOSSALAI, prepare=peers.colossalai_registered),
    "DTensor's redistributions": _own("torch", "dtensor", ranks=4),
    "transformers' tensor parallelism under `verify`": _own("transformers", "families", modules=("transformers",)),
    "types of mappings by spmd_types": _own("spmd_types", "spmd", ranks=1, modules=("spmd_types",)),
    "TRL's SFTTrainer": _own("trl", "trl", together=False, modules=("trl", "datasets", "peft")),
    "TRL's DPOTrainer and KTOTrainer": _own(
        "trl", "trl_preference", ranks=4, together=False, modules=("trl", "datasets", "peft"), limit=900.0, timeout=900
    ),
}


def missing(suite: Suite) -> str:
    """Why a suite cannot run in this environment; empty if it can."""
    code = "; ".join(f"import {module}" for module in suite.modules)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    return "" if not done.returncode else (done.stderr.strip().splitlines() or ["does not import"])[-1]
