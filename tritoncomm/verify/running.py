"""A verification in processes of its own: one that is alone, then the ranks, which are compared with it."""

import importlib.util
import inspect
import os
import socket
import sys
import tempfile
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from tritoncomm.errors import ArgumentError
from tritoncomm.verify.comparison import Report, compare
from tritoncomm.verify.drawing import draw, without_noise
from tritoncomm.verify.processes import Progress, VerifyError, run_processes
from tritoncomm.verify.recorder import record
from tritoncomm.verify.recording import ROOT, Case, Recording, plain
from tritoncomm.verify.widening import Widened

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
    # Only the name is checked here: the file is imported by the processes, which have the variables that it may read.
    if settings.target.startswith(TRANSFORMERS):
        builder(settings.target)
    else:
        _file_of(settings.target)
    with tempfile.TemporaryDirectory() as name:
        runs = _Runner(settings, Path(name), follow)
        whole, ranks = runs.both()
        report = compare(whole, ranks)
        return report if report.first is None else runs.explained(report, whole, ranks)


class _Runner:
    """Runs of a case, alone and on ranks, each with files of its own.

    Attributes:
        count: of runs so far, which their files are named after.
    """

    def __init__(self, settings: Settings, folder: Path, follow: Callable[[str], None]) -> None:
        self.settings, self.folder, self.follow, self.count = settings, folder, follow, 0

    def both(self) -> "_Pair":
        """Return the recordings of one process and of the ranks.

        Those of a step in 16 bits have a recording in float64 as their ``exact``, where the program runs in it.
        """
        written = _Mode(self.settings.dtype)
        self.follow("one process")
        whole = self.alone(written)
        if not whole.is_rounded:
            return _Pair(whole, self.on_ranks(written))
        wide = _Mode("float64", is_widened=True)  # whatever dtypes the program names
        with suppress(VerifyError):  # a program may check its dtypes
            whole.exact = _unrounded(self.alone(wide))
        if whole.exact is None:  # then float64 is the default dtype alone, in one process
            with suppress(VerifyError):
                whole.exact = _unrounded(self.alone(_Mode("float64")))
            return _Pair(whole, self.on_ranks(written))
        ranks = self.on_ranks(written)
        with suppress(VerifyError):
            exact = [_unrounded(each) for each in self.on_ranks(wide)]
            if all(each is not None and each.is_wide for each in exact):
                for rank, each in zip(ranks, exact, strict=True):
                    rank.exact = each
        return _Pair(whole, ranks)

    def explained(self, report: Report, whole: Recording, ranks: list[Recording]) -> Report:
        """Run again and record the gradients of outputs, too; return the report on these runs, with what they tell."""
        # Runs that differ in float64, too, are explained in float64, where rounding is no cause.
        run = _Mode(self.settings.dtype, backward=True)
        exact = [each.exact for each in ranks if each.exact is not None]
        reference, is_equal_in_float64 = whole, False
        if whole.exact is not None and len(exact) == len(ranks):
            is_equal_in_float64 = compare(whole.exact, exact).equal
            if not is_equal_in_float64:
                run, reference = _Mode("float64", is_widened=True, backward=True), whole.exact
        self.follow("one process, again")
        again = self.alone(run)
        same = compare(reference, [again])
        if same.first is not None:
            words = f"not comparable: a rerun in one process differs, first in {same.first or ROOT}"
            return Report(first=None, lines=same.lines, problem=words, counts=report.counts)
        again.exact, again.noise = reference.exact, reference.noise
        again.has_autocast &= not run.is_widened  # a step in float64 runs without autocast
        second = compare(again, self.on_ranks(run))
        if second.first is None:
            report.lines.append("a rerun of the ranks is equal: what differs depends on time")
            return report
        second.lines += ["in float64 all is equal"] if is_equal_in_float64 else []
        return second

    def alone(self, run: "_Mode") -> Recording:
        """Run the case in one process."""
        return self._recorded(_run_alone, 1, run)[0]

    def on_ranks(self, run: "_Mode") -> list[Recording]:
        """Run the case on the ranks."""
        self.follow(f"{self.settings.ranks} ranks{', in float64' if run.is_widened else ''}")
        return self._recorded(_run_rank, self.settings.ranks, run)

    def _recorded(self, function: Callable[..., None], count: int, run: "_Mode") -> list[Recording]:
        """Run a function of (rank, progress, settings, folder, name, run) in processes of its own."""
        self.count += 1
        name, settings = f"{self.count}", self.settings
        arguments = (settings, str(self.folder), name, run)
        run_processes(function, arguments, count, self.folder / f"{name}.run", settings.timeout, settings.is_quiet)
        return [Recording.load(self.folder / f"{name}.{rank}") for rank in range(count)]


class _Pair(NamedTuple):
    """Recordings of one process and of the ranks."""

    whole: Recording
    ranks: list[Recording]


@dataclass(frozen=True)
class _Mode:
    """How the case is run.

    Attributes:
        dtype: of parameters, a key of ``DTYPES``.
        is_widened: whether float64 takes the place of every dtype that the program names.
        backward: whether the gradients of outputs are recorded.
    """

    dtype: str
    is_widened: bool = False
    backward: bool = False


def _unrounded(exact: Recording) -> Recording | None:
    """Return a recording in float64; None if it has 16 bits, too, so that it says nothing of their rounding."""
    return None if exact.is_rounded else exact


def _start(rank: int, world: int, settings: Settings, run: _Mode, store: Path) -> dist.ProcessGroup:
    """Join the process group of a run, with its dtype and seed."""
    torch.set_num_threads(max(1, torch.get_num_threads() // world))
    # A widened run builds its model in the program's dtype, so that it draws the same values.
    torch.set_default_dtype(DTYPES[settings.dtype if run.is_widened else run.dtype])
    torch.manual_seed(settings.seed)
    shared = FileStore(str(store), world)
    dist.init_process_group("gloo", store=shared, rank=rank, world_size=world, timeout=_TIMEOUT)
    # What torchrun sets, for programs that read it.
    if rank == 0:
        shared.set("port", str(_free_port()))
    launch = {"RANK": rank, "WORLD_SIZE": world, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": world}
    os.environ.update({name: str(value) for name, value in launch.items()})
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=shared.get("port").decode())
    dist.init_process_group = _joined  # for a program that joins the process group itself
    group = dist.group.WORLD
    assert group is not None
    return group


def _joined(*_: Any, **__: Any) -> None:
    """Take the place of ``init_process_group`` in a process that has joined."""


def _free_port() -> int:
    """Return a port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _run_alone(_: int, progress: Progress, settings: Settings, folder: str, name: str, run: _Mode) -> None:
    """Run the case in this process alone; write its recording and its parameters."""
    group = _start(0, 1, settings, run, Path(folder) / f"{name}.store")
    with Widened() if run.is_widened else nullcontext():
        case = builder(settings.target, settings.arguments)(0, 1, group, None)
        noise = _ready(case, settings, run.dtype)
        modules = _chunks(case.model)
        if not settings.keep_values:
            for i, module in enumerate(modules):
                draw(module, settings.seed + i)
        elif run.dtype != settings.dtype:
            # Initialisation draws other values in another dtype. The run in the program's own dtype, which is the
            # first one, has saved its values.
            values = torch.load(Path(folder) / f"{settings.dtype}.state")
            for module in modules:
                _load(module, values)
        state = {key: _whole_value(x) for module in modules for key, x in module.state_dict().items()}
        torch.save(state, Path(folder) / f"{run.dtype}.state")
        _record(case, settings, progress, Path(folder) / f"{name}.0", run, noise)


def _run_rank(rank: int, progress: Progress, settings: Settings, folder: str, name: str, run: _Mode) -> None:
    """Run the case on this rank, and write its recording."""
    group = _start(rank, settings.ranks, settings, run, Path(folder) / f"{name}.store")
    with Widened() if run.is_widened else nullcontext():
        state = torch.load(Path(folder) / f"{run.dtype}.state")
        case = builder(settings.target, settings.arguments)(rank, settings.ranks, group, state)
        noise = _ready(case, settings, run.dtype)
        _record(case, settings, progress, Path(folder) / f"{name}.{rank}", run, noise)


def _record(case: Case, settings: Settings, progress: Progress, to: Path, run: _Mode, noise: list[str]) -> None:
    """Record the step of a case into a file."""
    torch.manual_seed(settings.seed)
    choice: dict[str, Any] = {"only": settings.only or None, "skip": settings.skip}
    recording = record(case, **choice, follow=progress.follow, backward=run.backward)
    recording.noise = noise
    to.write_bytes(recording.to_bytes())


def _whole_value(x: Any) -> Any:
    """Return an ordinary tensor of a program that shards its model in one process, too."""
    return x.full_tensor() if hasattr(x, "full_tensor") else x


def _load(module: nn.Module, values: dict[str, Any]) -> None:
    """Copy values into the parameters and buffers of a model."""
    with torch.no_grad():
        for key, x in module.state_dict().items():
            if isinstance(x, torch.Tensor):
                plain(x).copy_(values[key])


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
        # Parameters of the default dtype have it already; a model with a dtype of its own is cast, shards and all.
        for x in (*module.parameters(), *module.buffers()):
            if x.is_floating_point() and x.dtype != DTYPES[dtype]:
                x.data = x.data.to(DTYPES[dtype])
            elif x.is_complex() and dtype != "bfloat16":  # which has no complex dtype
                x.data = x.data.to(DTYPES[dtype].to_complex())
    return noise
