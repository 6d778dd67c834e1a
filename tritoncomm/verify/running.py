"""A verification in processes of its own: one that is alone, then the ranks, which compare themselves with it."""

import importlib.util
import json
import multiprocessing
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, start_processes

from tritoncomm.errors import ArgumentError, CommError
from tritoncomm.verify.comparison import Report, compare
from tritoncomm.verify.recording import Case, Recording, draw, record, without_noise

__all__ = ["DTYPES", "Settings", "VerifyError", "builder", "verify"]

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}
TRANSFORMERS = "transformers:"  # begins a target that is a model type or a config file, with ":full" behind it or not
_TIMEOUT = timedelta(minutes=10)


class VerifyError(CommError):
    """A run that could not be compared: a rank raised, or died. The message has its traceback, once."""


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
    """

    target: str
    ranks: int = 2
    dtype: str = "float64"
    keep_values: bool = False
    keep_noise: bool = False
    only: tuple[str, ...] = ()
    skip: tuple[str, ...] = ()
    seed: int = 0


def builder(target: str) -> Callable[..., Case]:
    """Return the function that ``FILE.py:function`` names."""
    if target.startswith(TRANSFORMERS):
        from tritoncomm.verify.transformers_models import case_of  # transformers takes seconds to import

        name, _, size = target.removeprefix(TRANSFORMERS).partition(":")
        try:
            return case_of(name, size == "full")
        except ModuleNotFoundError as error:
            raise ArgumentError(f"a model of transformers needs the package {error.name}, which is not here") from None
    path, _, name = target.rpartition(":")
    if not path.endswith(".py") or not name.isidentifier():
        raise ArgumentError(f"expected FILE.py:function, not {target!r}")
    if not Path(path).is_file():
        raise ArgumentError(f"no file {path}")
    module = _module(Path(path))
    if not callable(getattr(module, name, None)):
        raise ArgumentError(f"{path} has no function {name}")
    return getattr(module, name)


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
        VerifyError: a process raised or died; the others were ended.
    """
    if settings.dtype not in DTYPES:
        raise ArgumentError(f"dtype must be one of {', '.join(DTYPES)}, not {settings.dtype!r}")
    if settings.ranks < 1:
        raise ArgumentError(f"ranks must be 1 or more, not {settings.ranks}")
    builder(settings.target)
    with tempfile.TemporaryDirectory() as folder:
        follow("one process")
        _processes(_run_alone, (settings, folder, settings.dtype, "whole"), 1)
        if (Path(folder) / "whole.rounded").exists():
            with suppress(VerifyError):  # of a program that names its dtype; the report says what that means
                _processes(_run_alone, (settings, folder, "float64", "exact"), 1)
        follow(f"{settings.ranks} ranks")
        _processes(_run_rank, (settings, folder), settings.ranks)
        return Report(**json.loads((Path(folder) / "report.json").read_text()))


def _processes(function: Callable[..., None], arguments: tuple[Any, ...], count: int) -> None:
    """Run a function of (rank, *arguments) in new processes; when one fails, end the others and raise."""
    method = "spawn"
    if "forkserver" in multiprocessing.get_all_start_methods():
        method = "forkserver"  # torch is imported once, not by every process
        multiprocessing.set_forkserver_preload(["torch", __name__])
    running: Any = start_processes(function, arguments, nprocs=count, join=False, start_method=method)
    try:
        while not running.join():
            pass
    except ProcessRaisedException as error:
        text = str(error).strip().partition("\n\n")[2] or str(error)
        where = f"rank {error.error_index}" if count > 1 else "one process"
        raise VerifyError(f"{where} raised:\n{text}") from None
    except ProcessExitedException as error:
        raise VerifyError(f"process {error.error_index} of {count} died: {error}") from None


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


def _run_alone(_: int, settings: Settings, folder: str, dtype: str, name: str) -> None:
    """Run the case in this process alone; write its recording and its parameters."""
    group = _start(0, 1, settings, dtype, Path(folder) / f"{name}.store")
    case = builder(settings.target)(0, 1, group, None)
    noise = _ready(case, settings, dtype)
    modules = _chunks(case.model)
    if not settings.keep_values:
        for i, module in enumerate(modules):
            draw(module, settings.seed + i)
    if name == "whole":
        state = {key: x for module in modules for key, x in module.state_dict().items()}
        torch.save(state, Path(folder) / "state.pt")
    torch.manual_seed(settings.seed)
    recording = record(case, only=settings.only or None, skip=settings.skip)
    recording.noise = noise
    if recording.is_rounded:
        (Path(folder) / f"{name}.rounded").touch()
    (Path(folder) / f"{name}.recording").write_bytes(recording.to_bytes())
    dist.destroy_process_group()


def _run_rank(rank: int, settings: Settings, folder: str) -> None:
    """Run the case on this rank, and compare; rank 0 writes the report."""
    group = _start(rank, settings.ranks, settings, settings.dtype, Path(folder) / "ranks.store")
    whole = Recording.load(Path(folder) / "whole.recording")
    # A step in float64 that rounds to 16 bits, too, says nothing of the rounding.
    if (exact := Path(folder) / "exact.recording").exists() and not (Path(folder) / "exact.rounded").exists():
        whole.exact = Recording.load(exact)
    case = builder(settings.target)(rank, settings.ranks, group, torch.load(Path(folder) / "state.pt"))
    _ready(case, settings, settings.dtype)
    torch.manual_seed(settings.seed)
    report = compare(whole, record(case, only=settings.only or None, skip=settings.skip), group)
    if rank == 0:
        (Path(folder) / "report.json").write_text(json.dumps(asdict(report)))
    dist.destroy_process_group()


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
