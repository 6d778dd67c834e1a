"""What an import brings in, and what waits for its first use: Triton, p2p and tensor."""

import importlib
import os
import pickle
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import tritoncomm_kernels
from jobs import run_job, without_launcher
from tritoncomm_kernels import installed_triton

ROOT = Path(__file__).parents[1]


def load_lazily() -> list[Any]:
    import tritoncomm

    lazy = ("experts", "integrations", "p2p", "parallel", "recurrent", "reshard", "tensor", "ulysses")
    early = [name for name in lazy if f"tritoncomm.{name}" in sys.modules]
    names = {*lazy, "ops", "patch_megatron", "unpatch_megatron"} <= set(dir(tritoncomm))
    used = [
        tritoncomm.p2p.P2PCommunicator, tritoncomm.tensor.ColoTensor, tritoncomm.ulysses.UlyssesAttention,
        tritoncomm.parallel.ColwiseParallel, tritoncomm.reshard.Layout, tritoncomm.integrations.yunchang.SeqAllToAll4D,
        tritoncomm.recurrent.by_heads, tritoncomm.experts.dispatch,
    ]  # fmt: skip
    import tritoncomm.ops  # a module of its own, too

    assert tritoncomm.ops.pack is tritoncomm.core.ops.pack
    assert tritoncomm.patch_megatron is tritoncomm.integrations.megatron.patch
    assert tritoncomm.unpatch_megatron is tritoncomm.integrations.megatron.unpatch
    try:
        tritoncomm.nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018
    except AttributeError as error:
        return [early, names, len(used), str(error)]
    return []


def test_packages_are_there_after_the_import_and_loaded_at_their_first_use() -> None:
    assert run_job(load_lazily, [{}]) == [[[], True, 8, "module 'tritoncomm' has no attribute 'nothing'"]]


# Names that programs import, or that a file of an earlier release may hold, by the path that they had.
EARLIER = {
    "megatron": ("Report", "patch", "patched", "unpatch"),
    "megatron_functions": (
        "FrozenLinear", "FrozenLinear016", "ReduceScatterWithFP32Accumulation", "TrainedLinear", "TrainedLinear016",
        "VocabParallelCrossEntropy", "copy_to_tensor_model_parallel_region", "frozen_linear_functions",
        "linear_functions", "reduce_from_tensor_model_parallel_region",
    ),
    "megatron_resharding": ("PackedCopyService",),
    "batch_notes": ("BatchNotes",),
    "sequence_batch": ("next_labels", "shard_batch"),
    "switching": ("Registration", "Switch", "Untraced"),
    "recurrent_layers": ("Functions", "_enter", "_leave", "leave_model"),
    "rotary_tables": ("_append", "_cut"),
    "model_parts": ("wrong_part",),
    "losses": ("LossCall",),
    "trainer": ("UlyssesTrainerMixin",),
    "transformers": ("_begin", "_check_loss", "_Untraced", "register", "switch", "unregister"),
    "transformers_experts": ("register", "unregister"),
}  # fmt: skip


@pytest.mark.parametrize("module", EARLIER)
def test_earlier_import_paths_stay(module: str) -> None:
    for name in EARLIER[module]:
        value = pickle.loads(f"ctritoncomm.integrations.{module}\n{name}\n.".encode())
        assert callable(value)
        assert pickle.loads(pickle.dumps(value)) is value
    path = ROOT / "tritoncomm" / "integrations" / f"{module}.py"
    if path.exists():
        assert len(path.read_text().splitlines()) <= 7
        assert path.read_text().startswith('"""Earlier import path')


def mapping(path: str) -> list[float]:
    """A gather that no view can do, forward and backward, on the default group."""
    import tritoncomm

    x = torch.arange(6.0).view(2, 3).requires_grad_()
    with tritoncomm.path(path):
        y = tritoncomm.mappings.all_to_all_sp2hp(x.expand(4, 2, 3).contiguous().flatten(1))
        y.square().sum().backward()
    assert x.grad is not None
    return [*y.flatten().tolist(), *x.grad.flatten().tolist()]


def import_every_module() -> int:
    """Import all modules of the package but ``__main__``; their number."""
    paths = [path for path in sorted((ROOT / "tritoncomm").rglob("*.py")) if path.stem != "__main__"]
    for path in paths:
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"))
    return len(paths)


def triton_after_calls(store: str, world: int) -> list[Any]:
    """Whether Triton was imported: after the import, the call on CPU tensors, every other module, a forced call."""
    import torch.distributed as dist

    import tritoncomm

    imported = ["triton" in sys.modules]
    if store:
        rank = int(os.environ["PLACE"])
        dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    tritoncomm.initialize(tensor=world)
    result = mapping("auto")
    imported.append("triton" in sys.modules)
    import_every_module()
    imported.append("triton" in sys.modules)
    same = mapping("triton") == result
    return [*imported, "triton" in sys.modules, same]


@pytest.mark.parametrize("world", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_triton_is_imported_for_the_first_kernel(world: int, tmp_path: Path) -> None:
    """Not with the package, nor by calls on CPU tensors: it would be most of the time that the import takes."""
    store = str(tmp_path / "store") if world > 1 else ""
    answers = run_job(triton_after_calls, [{"PLACE": str(rank)} for rank in range(world)], store, world)
    assert answers == [[False, False, False, world > 1, True]] * world


SENTENCE = r"kernels need Triton 3\.6 or newer, and .*: `pip install torch 'triton>=3\.6'` installs the one that"


def without_triton(store: str, world: int) -> list[Any]:
    """In a process that cannot import Triton: modules, a mapping on CPU tensors, commands, what a kernel is told."""
    sys.modules["triton"] = None  # pyright: ignore[reportArgumentType]
    import torch.distributed as dist
    from typer.testing import CliRunner

    import tritoncomm

    modules = import_every_module()
    rank = int(os.environ["PLACE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    tritoncomm.initialize(tensor=world)
    result = mapping("auto")
    with pytest.raises(ImportError, match=SENTENCE):
        mapping("triton")
    answers = {}
    for line in COMMANDS:
        done = CliRunner().invoke(tritoncomm.cli.app, line.split())
        answers[line] = (done.exit_code, " ".join(done.output.split()))
    os.environ["TRITONCOMM_PATH"] = "triton"
    os.environ["TRITON_INTERPRET"] = "1"
    found = {one.name: one.level + " " + one.advice for one in tritoncomm.doctor.examine(self_test=False)}
    return [modules, result, answers, found["triton"], found["TRITONCOMM_PATH"]]


# What is printed without Triton, and the exit code.
COMMANDS = {
    "--version": (0, "triton not installed"),
    "plan sp2hp --shape 64,8 --world 4": (0, "all_to_all_sp2hp"),
    "doctor --no-self-test": (0, "all well"),
    "tune --list": (0, "tiles"),
    "tune": (2, "kernels need Triton"),
    "tune --static --target gfx942": (2, "kernels need Triton"),
}


def test_everything_but_kernels_goes_without_triton(tmp_path: Path) -> None:
    """torch's CPU builds bring none."""
    ranks = [{"PLACE": str(rank)} for rank in range(2)]
    for modules, result, answers, *levels in run_job(without_triton, ranks, str(tmp_path / "store"), 2):
        assert modules > 100
        assert (len(result), result[24:]) == (30, [8.0 * i for i in range(6)])
        for line, (code, words) in COMMANDS.items():
            assert answers[line][0] == code, answers[line]
            assert words in answers[line][1], answers[line]
        for level, found in zip(("note", "problem"), levels, strict=True):
            assert re.match(f"{level} {SENTENCE}", found), found


@pytest.mark.slow
def test_the_demo_trains_without_triton(tmp_path: Path) -> None:
    """In processes of which none can import it."""
    (tmp_path / "triton.py").write_text("raise ImportError('no Triton here')")
    paths = os.pathsep.join([str(tmp_path), str(ROOT), str(ROOT / "kernels")])
    env = without_launcher(os.environ) | {"PYTHONPATH": paths}
    command = [sys.executable, "-m", "tritoncomm", "demo", "--steps", "2"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("version", "hip", "told"),
    [
        ("3.6.0", None, ""),
        ("3.10.1+git0abc", None, ""),
        ("3.7+fb", "6.4.43482", ""),
        ("3.5.1", None, "and this is 3.5.1: `pip install torch 'triton>=3.6'` installs the one that torch wants"),
        ("3.5.1", "6.4.43482", "and this is 3.5.1: `pip install --force-reinstall torch --index-url "
         "https://download.pytorch.org/whl/rocm6.4` brings the one for ROCm"),
        (None, None, "it cannot be imported (import of triton halted; None in sys.modules): `pip install torch"),
    ],
)  # fmt: skip
def test_a_triton_that_is_too_old_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, version: str | None, hip: str | None, told: str
) -> None:
    monkeypatch.setitem(sys.modules, "triton", version and SimpleNamespace(__version__=version))
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.delitem(vars(tritoncomm_kernels), "pack", raising=False)
    assert told in installed_triton.problem()
    if told:
        with pytest.raises(ImportError, match=re.escape(told)):
            tritoncomm_kernels.pack  # noqa: B018
    else:
        installed_triton.require()


def sympy_after_mappings(store: str, world: int) -> list[str]:
    """The mappings whose forward and backward imported sympy, which torch's symbolic shapes do."""
    import torch.distributed as dist
    from mapping_cases import MAPPINGS, run

    import tritoncomm

    rank = int(os.environ["PLACE"])
    dist.init_process_group("gloo", store=dist.FileStore(store, world), rank=rank, world_size=world)
    tritoncomm.initialize(tensor=world)
    importers = ["the import"] if "sympy" in sys.modules else []
    for name, call in MAPPINGS.items():
        x = torch.ones(4, 2, 4, requires_grad=True)
        run(call, x, dist.group.WORLD).square().sum().backward()
        assert x.grad is not None
        if "sympy" in sys.modules and not importers:
            importers.append(name)
    return importers


@pytest.mark.parametrize("world", [1, 2])
def test_no_mapping_imports_sympy(world: int, tmp_path: Path) -> None:
    """It takes half a second. ``backward(gradient)`` imports it in torch; that of a scalar does not."""
    ranks = [{"PLACE": str(rank)} for rank in range(world)]
    assert run_job(sympy_after_mappings, ranks, str(tmp_path / "store"), world) == [[]] * world


def test_names_of_kernels_are_looked_up_once() -> None:
    for name in tritoncomm_kernels.__all__:
        value = getattr(tritoncomm_kernels, name)
        assert vars(tritoncomm_kernels)[name] is value, name
        assert name in dir(tritoncomm_kernels)
    with pytest.raises(AttributeError, match="module 'tritoncomm_kernels' has no attribute 'nothing'"):
        tritoncomm_kernels.nothing  # pyright: ignore[reportAttributeAccessIssue]  # noqa: B018


def test_no_lazy_name_is_that_of_a_module() -> None:
    """Importing a module of a package sets its name in the package, over a function of that name."""
    modules = {path.stem for path in Path(tritoncomm_kernels.__path__[0]).glob("*.py")}
    assert modules.isdisjoint(tritoncomm_kernels._LAZY)
    assert modules.issuperset(tritoncomm_kernels._LAZY.values())
