"""What tests run on, and the pool of ranks."""

import gc
import inspect
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from interpreter import speed_up
from pool import OTHERS, PRELOADED, Pool

if TYPE_CHECKING:
    from devices import Device


def pytest_addoption(parser: pytest.Parser) -> None:
    names = ("cpu", "cuda", "sm80", "sm90", "sm100")
    text = "the CPU with interpreted kernels, a GPU, or a stub CUDA driver; other than cpu, tests of the device only"
    parser.addoption("--device", choices=names, default="cpu", help=text)
    parser.addoption("--small", action="store_true", help="small cases on any device")
    text = "the version of megatron-core to test with: that in .megatron/VERSION, or the installed one"
    parser.addoption("--megatron", metavar="VERSION", help=text)
    text = "modules, with commas between, that the processes of ranks have from the start; missing ones are left out"
    parser.addoption("--preload", metavar="MODULES", default="", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if not os.environ.get("CI"):  # others' warnings come with their versions, and are errors in CI only
        config.addinivalue_line("filterwarnings", f"default:::{OTHERS}")
    if config.getoption("megatron") is not None:
        _choose_megatron(config.getoption("megatron"))
    PRELOADED.extend(filter(None, config.getoption("preload").split(",")))
    # The kernels of a process are either interpreted or compiled, and Triton decides when it is imported.
    if config.getoption("device") == "cpu":
        os.environ.setdefault("TRITON_INTERPRET", "1")
        if os.environ["TRITON_INTERPRET"] == "1":
            speed_up()
    else:
        os.environ["TRITON_INTERPRET"] = "0"


def _choose_megatron(version: str) -> None:
    """Let this process and its ranks import this version: from ``.megatron/VERSION``, or the installed one.

    Raises:
        pytest.UsageError: there is no such version here.
    """
    folder = Path(__file__).parents[1] / ".megatron" / version
    if folder.is_dir():
        sys.path.insert(0, str(folder))
    try:
        found = metadata.version("megatron-core")
    except metadata.PackageNotFoundError:
        found = "none"
    if found != version:
        raise pytest.UsageError(f"megatron-core {version} is asked for, but there is {found}: make .megatron/{version}")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("device") != "cpu":
        others = [item for item in items if "device" not in getattr(item, "fixturenames", ())]
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in others]


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests stay, and need not be looked through by every collection


@dataclass(frozen=True)
class OnRanks:
    """Calls a function on ranks of the pool, each with its process group.

    Attributes:
        pool: of the ranks.
        options: ``world`` and ``timeout`` of ``Pool.run``.
    """

    pool: Pool
    options: dict[str, Any]

    def __call__(self, function: Callable[..., None], *args: Any) -> None:
        self.pool.run(function, *args, **self.options)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    marker = metafunc.definition.get_closest_marker("ranks")
    if marker is not None and marker.args:
        metafunc.parametrize("group", marker.args, ids=str, indirect=True)


@pytest.fixture
def group(request: pytest.FixtureRequest, pool: Pool) -> OnRanks:
    """A test with this first argument runs on two ranks, or on the ranks that its mark ``ranks`` has."""
    marker = request.node.get_closest_marker("ranks")
    return OnRanks(pool, {"world": getattr(request, "param", 2), **(marker.kwargs if marker else {})})


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test of a process group on ranks of the pool; the other arguments are the same on every rank."""
    on_ranks = pyfuncitem.funcargs.get("group")
    if not isinstance(on_ranks, OnRanks):
        return None
    parameters = list(inspect.signature(pyfuncitem.function).parameters)
    on_ranks(pyfuncitem.function, *(pyfuncitem.funcargs[name] for name in parameters if name != "group"))
    return True


def _records() -> set[Path]:
    """Flight records in the tree and in the working folder: those of calls that fail where no folder is named."""
    folders = {Path.cwd(), Path(__file__).parent, Path(__file__).parents[1]}
    return {path for folder in folders for path in folder.glob("tritoncomm-flight-*.json")}


@pytest.fixture(scope="session", autouse=True)
def _no_records_are_left() -> Iterator[None]:
    """Tests that keep a flight record name its folder."""
    before = _records()
    yield
    assert not _records() - before, "a test has left its flight record"


@pytest.fixture(scope="session")
def made_device(request: pytest.FixtureRequest) -> "Device":
    from devices import make_device  # imports Triton

    return make_device(request.config.getoption("device"), request.config.getoption("small"))


@pytest.fixture
def device(made_device: "Device") -> Iterator["Device"]:
    """What this run tests on: ``at`` is for tensors, ``pick(small, large)`` for the size of cases."""
    with made_device.current():
        yield made_device


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo ranks for ``pool.run(function, *args, world=...)``."""
    ranks = Pool()
    yield ranks
    ranks.stop()
