"""The wheel and the source distribution have what they need; `make` names every target and runs every test."""

import importlib.util
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from jobs import without_launcher

ROOT = Path(__file__).parents[1]
SOURCES = ("tritoncomm", "kernels", "tests", "tools", "bench", "docs", "examples")
BUILT = importlib.util.find_spec("hatchling") is not None
needs_hatchling = pytest.mark.skipif(not BUILT, reason="hatchling is not installed (the extra `test` installs it)")
TABLE = "tritoncomm_kernels/configs/Some_GPU.json"


def run(*command: str, cwd: Path, path: str | None = None) -> str:
    """The output of Python with these arguments, with nothing of this checkout on its path."""
    variables = without_launcher(os.environ)
    paths = [each for each in os.environ.get("PYTHONPATH", "").split(os.pathsep) if each]
    others = [each for each in paths if not Path(each).resolve().is_relative_to(ROOT)]
    variables["PYTHONPATH"] = os.pathsep.join([path, *others] if path else others)
    done = subprocess.run(
        [sys.executable, *command], cwd=cwd, env=variables, capture_output=True, text=True, timeout=180, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def files(folder: Path) -> set[str]:
    """Files of a folder of the checkout, but for what tools leave there."""
    names = {path.relative_to(ROOT).as_posix() for path in folder.rglob("*") if path.is_file()}
    return {name for name in names if not re.search(r"__pycache__|(^|/)\.", name)}


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked source distribution."""
    folder = tmp_path_factory.mktemp("sdist")
    run("-m", "hatchling", "build", "-t", "sdist", "-d", str(folder), cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        tar.extractall(folder, filter="data")
    return folder / archive.name.removesuffix(".tar.gz")


@pytest.fixture(scope="module")
def site(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked wheel, built of the source distribution with a tuned table in its place."""
    table = sdist / "kernels" / TABLE
    table.parent.mkdir(exist_ok=True)
    table.write_text("{}")
    folder = tmp_path_factory.mktemp("wheel")
    run("-m", "hatchling", "build", "-t", "wheel", "-d", str(folder), cwd=sdist)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder / "site")
    return folder / "site"


@needs_hatchling
def test_the_source_distribution_has_every_source(sdist: Path) -> None:
    expected = set().union(*(files(ROOT / name) for name in SOURCES))
    expected |= {"README.md", "CHANGELOG.md", "LICENSE", "Makefile", "pyproject.toml", "constraints.txt", "mkdocs.yml"}
    assert sorted(name for name in expected if not (sdist / name).is_file()) == []


@needs_hatchling
def test_the_wheel_has_both_packages_and_nothing_else(site: Path) -> None:
    modules = files(ROOT / "tritoncomm") | {name.removeprefix("kernels/") for name in files(ROOT / "kernels")}
    built = {path.relative_to(site).as_posix() for path in site.rglob("*") if path.is_file()}
    assert {name for name in built if ".dist-info/" not in name} == modules | {TABLE}
    assert {"tritoncomm/py.typed", "tritoncomm_kernels/py.typed"} <= built


SMOKE = """
import pathlib, runpy, sys, torch, tritoncomm, tritoncomm_kernels
for module in (tritoncomm, tritoncomm_kernels):
    assert pathlib.Path(module.__file__).is_relative_to(sys.argv[1]), module.__file__
tritoncomm.initialize()
x = torch.arange(12.0).view(3, 4).requires_grad_()
y = tritoncomm.mappings.all_to_all_sp2hp(x)
y.sum().backward()
assert torch.equal(y, x) and torch.equal(x.grad, torch.ones(3, 4))
tritoncomm.destroy()
for arguments in (["--version"], ["doctor", "--no-self-test"], ["bench", "--mib", "0.1", "--only", "hop both"]):
    sys.argv = ["tritoncomm", *arguments]
    try:
        runpy.run_module("tritoncomm", run_name="__main__")
    except SystemExit as stop:
        assert not stop.code, stop.code
print(tritoncomm.__version__)
"""


@needs_hatchling
@pytest.mark.timeout(200)
def test_the_wheel_works_outside_the_checkout(site: Path, tmp_path: Path) -> None:
    """Import, a mapping, and `--version`, `doctor` and `bench`, in one process: torch takes long to import."""
    lines = run("-c", SMOKE, str(site), cwd=tmp_path, path=str(site)).splitlines()
    version = lines[-1]
    assert (site / f"tritoncomm-{version}.dist-info").is_dir(), "the versions of the package and of the wheel"
    assert lines[0].startswith(f"tritoncomm {version}, torch ")
    assert any(line.startswith("torch ") for line in lines), "doctor's table"
    assert "1 row: values and gradients of all providers are equal" in lines


def test_make_help_names_every_target() -> None:
    makefile = (ROOT / "Makefile").read_text()
    (phony,) = re.findall(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}  # the tests' own make
    done = subprocess.run(["make"], cwd=ROOT, env=env, capture_output=True, text=True, timeout=20, check=False)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    named = [name for line in lines for name in re.split(r"  +", line)[0].split()]
    assert sorted(named) == sorted(phony.split())
    assert all(len(re.split(r"  +", line)) == 2 and len(line) <= 80 for line in lines)


def test_two_targets_run_every_test_file_once() -> None:
    """What `make test` leaves out, for time, `make test-rest` runs; CI runs both."""
    command = ["make", "-n", "test", "test-rest", "PYTHON=python3"]
    env = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=20, check=True)
    found = re.findall(r"tests/\S*test_\w+\.py(?!\S)", done.stdout)
    files = [path.relative_to(ROOT).as_posix() for path in (ROOT / "tests").rglob("test_*.py")]
    assert sorted(found) == sorted(files)
    assert "make test\nmake test-rest\n" in (ROOT / ".ci" / "run").read_text()
