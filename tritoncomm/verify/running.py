"""A verification in processes of its own: one that is alone, then the ranks, which are compared with it."""

import importlib.util
import inspect
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tritoncomm.errors import ArgumentError
from tritoncomm.verify.comparison import Report, compare
from tritoncomm.verify.processes import Progress, VerifyError, run_processes
from tritoncomm.verify.recording import ROOT, Case, Recording, draw, record, without_noise

__all__ = ["DTYPES", "Settings", "builder", "verify"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TRANSFORMERS = "transformers:"  # begins a target that is a model type or a config file, with ":full" behind it or not
_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True)
class Settings:
    """Arguments of ``verify``.

    Attributes:
        target: ``FILE.py:function``, or ``transformers:NAME`` with a model type or a config file.
        ranks: of the parallel run.
        dtype: of parameters and of torch's default, a key of ``DTYPES``.
        keep_values: keep the values of the parameters, instead of drawing them.
        keep_noise: keep dropout and router noise, instead of setting them to 0.
        only, skip: see ``record``.
        seed: of the parameters, and of torch in every process.
        timeout: seconds without a module, a collective or a printed line after which a run is a hang.
        arguments: ``sys.argv[1:]`` of the file.
        is_quiet: what the program prints goes to standard error.
    """

    target: str
    ranks: int = 2
    dtype: str = "float64"
    keep_values: bool = False
    keep_noise: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0
    timeout: float = 120.0
    arguments: tuple[str, ...] = ()
    is_quiet: bool = False


def builder(target: str, arguments: tuple[str, ...] = ()) -> Callable[..., Case]:
    """Return the function that ``FILE.py:function`` names, for which the file is imported."""
    if target.startswith(TRANSFORMERS):
        from tritoncomm.verify.transformers_models import case_of  # transformers takes seconds to import

        name, _, size = target.removeprefix(TRANSFORMERS).partition(":")
        try:
            return case_of(name, size == "full")
        except ModuleNotFoundError as error:
            raise ArgumentError(f"a model of transformers needs the package {error.name}, which is not here") from None
    path, name = _file_of(target)
    sys.argv = [str(path), *arguments]
    function: Any = getattr(_module(path), name, None)
    if not callable(function):
        raise ArgumentError(f"{path} has no function {name}")
    try:
        inspect.signature(function).bind(0, 1, None, None)
    except TypeError as error:
        told = f"{name}{inspect.signature(function)} is called as {name}(rank, world, group, whole)"
        raise ArgumentError(f"{told}: {error}") from None
    return cast("Callable[..., Case]", function)


def _file_of(target: str) -> tuple[Path, str]:
    """Return file and function of a target."""
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ArgumentError(f"expected FILE.py:function, not {target!r}")
    if not Path(path).is_file():
        raise ArgumentError(f"no file {path}")
    return Path(path), name


def _module(path: Path) -> ModuleType:
    """Import a file as a module."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules.setdefault(path.stem, module)  # processes that it starts itself find it
    sys.path.insert(0, str(path.parent))
    spec.loader.exec_module(module)
    return module


def verify(settings: Settings, follow: Callable[[str], None] = lambda text: None) -> Report:
    """Run the case in one process and on ``settings.ranks`` ranks, and compare them.

    Args:
        follow: called with what runs now.

    Raises:
        ArgumentError: the settings name no function, or no dtype.
        VerifyError: a process raised, died, ended early or hangs; the others were ended.
    """
    if settings.dtype not in DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, not {settings.dtype!r}")
    if settings.ranks < 1:
        raise ArgumentError(f"ranks must be 1 or more, not {settings.ranks}")
    # The file itself is imported by the processes, which have what it may read: variables, arguments.
    if settings.target.startswith(TRANSFORMERS):
        builder(settings.target)
    else:
        _file_of(settings.target)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        follow("one process")
        whole = _alone(settings, folder, settings.dtype, "whole")
        if whole.is_rounded:
            with suppress(VerifyError):  # of a program that names its dtype; the report says what that means
                exact = _alone(settings, folder, "float64", "exact")
                # A step in float64 that rounds to 16 bits, too, says nothing of the rounding.
                whole.exact = None if exact.is_rounded else exact
        follow(f"{settings.ranks} ranks")
        _run(_run_rank, settings, folder, settings.ranks, "ranks")
        ranks = [Recording.load(folder / f"rank.{rank}") for rank in range(settings.ranks)]
        report = compare(whole, ranks)
        if report.first is not None:
            follow("one process, again")
            again = compare(whole, [_alone(settings, folder, settings.dtype, "again")])
            if again.first is not None:
                where = again.first or ROOT
                return Report(
                    None,
                    again.lines,
                    f"not comparable: a rerun in one process differs, first in {where}",
                    report.counts,
                )
        return report


def _alone(settings: Settings, folder: Path, dtype: str, name: str) -> Recording:
    """Return the recording of the case in one process."""
    _run(_run_alone, settings, folder, 1, name, dtype, name)
    return Recording.load(folder / f"{name}.recording")


def _run(function: Callable[..., None], settings: Settings, folder: Path, count: int, name: str, *more: str) -> None:
    """Run a function of (rank, progress, settings, folder, *more) in processes of its own."""
    arguments = (settings, str(folder), *more)
    run_processes(function, arguments, count, folder / f"{name}.run", settings.timeout, settings.is_quiet)


def _start(rank: int, world: int, settings: Settings, dtype: str, store: Path) -> dist.ProcessGroup:
    """Join the process group of a run, with its dtype and seed."""
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    torch.set_default_dtype(DTYPES[dtype])
    torch.manual_seed(settings.seed)
    shared = FileStore(str(store), world)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=_TIMEOUT)
    # What torchrun sets, for programs that read it. One that joins the process group itself has joined this one.
    if rank == 0:
        shared.set("port", str(_free_port()))
    launch = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in launch.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=shared.get("port").decode())
    dist.init_process_group = _joined
    group = dist.group.WORLD
    assert group is not None
    return group


def _joined(*_: Any, **__: Any) -> None:
    """Take the place of ``init_process_group`` in a process that has joined."""


def _free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _run_alone(_: int, progress: Progress, settings: Settings, folder: str, dtype: str, name: str) -> None:
    """Run the case in this process alone; write its recording and its parameters."""
    group = _start(0, 1, settings, dtype, Path(folder) / f"{name}.store")
    case = builder(settings.target, settings.arguments)(0, 1, group, None)
    noise = _ready(case, settings, dtype)
    modules = _chunks(case.model)
    if not settings.keep_values:
        for i, module in enumerate(modules):
            draw(module, settings.seed + i)
    if name == "whole":
        state = {key: x for module in modules for key, x in module.state_dict().items()}
        torch.save(state, Path(folder) / "state.pt")
    torch.manual_seed(settings.seed)
    recording = record(case, only=settings.only or None, skip=settings.skip, follow=progress.follow)
    recording.noise = noise
    (Path(folder) / f"{name}.recording").write_bytes(recording.to_bytes())


def _run_rank(rank: int, progress: Progress, settings: Settings, folder: str) -> None:
    """Run the case on this rank, and write its recording."""
    group = _start(rank, settings.ranks, settings, settings.dtype, Path(folder) / "ranks.store")
    case = builder(settings.target, settings.arguments)(
        rank, settings.ranks, group, torch.load(Path(folder) / "state.pt")
    )
    _ready(case, settings, settings.dtype)
    torch.manual_seed(settings.seed)
    to = Path(folder) / f"rank.{rank}"
    record(case, only=settings.only or None, skip=settings.skip, to=to, follow=progress.follow)


def _chunks(model: Any) -> list[nn.Module]:
    """Return the modules of a case's model."""
    return [model] if isinstance(model, nn.Module) else list(model)


def _ready(case: Any, settings: Settings, dtype: str) -> list[str]:
    """Check what ``build`` returned, and take its noise away; return what that changed, in words."""
    noise = []
    if not isinstance(case, Case):
        raise ArgumentError(f"{settings.target} has to return a verify.Case, not {type(case).__name__}")
    for module in _chunks(case.model):
        if not settings.keep_noise:
            noise += without_noise(module)
        # Parameters of a default dtype have it already; a model of another dtype is moved, shards and all.
        for x in (*module.parameters(), *module.buffers()):
            if x.is_floating_point() and x.dtype != DTYPES[dtype]:
                x.data = x.data.to(DTYPES[dtype])
            elif x.is_complex() and dtype != "bfloat16":  # there is no complex number of 16 bits each
                x.data = x.data.to(DTYPES[dtype].to_complex())
    return noise
