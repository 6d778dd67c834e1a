"""The table of versions in docs/compatibility.md: ``make test-matrix`` runs the tests of every environment.

``tests/compatibility.json`` keeps the results. A run replaces the cells that it has run, and drops those of an
environment whose versions have changed since. ``--write`` only writes the page.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tritoncomm.integrations.megatron import TESTED

__all__ = ["PAGE", "RESULTS", "measure", "page"]

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PAGE = ROOT / "tests" / "compatibility.json", ROOT / "docs" / "compatibility.md"
NCCL = ROOT / "bench" / "results"
NOT_RUN = "not run"

ENVIRONMENTS = {"default": ".venv", "oldest": ".venv-oldest", "newest": ".venv-newest"}
PACKAGES = {
    "torch": "torch", "triton": "Triton", "numpy": "numpy", "transformers": "transformers", "accelerate": "accelerate",
    "deepspeed": "DeepSpeed", "yunchang": "yunchang",
}  # fmt: skip
MEGATRON = {version: "3.10" if version < "0.17" else "3.12" for version in TESTED}  # the oldest Python of each
SUITE, GPU = "tests", "compiled kernels on a stub CUDA driver"
PARTS: dict[str, list[str]] = {
    SUITE: ["tests", "-m", "not slow", "-n", "2", "--dist", "loadfile"],
    GPU: ["--device", "sm90", "tests/fake_gpu/on_stub.py", "tests/kernels", "tests/gpu/test_ranks.py"],
} | {
    version: ["tests/integrations/test_megatron.py", "tests/p2p/test_megatron.py", "--megatron", version]
    for version in MEGATRON
}

HEAD = """# Versions

Written by `make test-matrix`, which runs the tests in every environment that is there and keeps the cells of the others
from the run before; a test compares this page with `tests/compatibility.json`. Every cell has the day and the commit of
its run.

`make test-rest` sets up the first environment, with the versions of `constraints.txt`. `make test-oldest` and
`make test-newest` set up the other two.
"""
BETWEEN = """
The tests compare with transformers, DeepSpeed, yunchang and Megatron-core 0.16.1 as installed in each environment.

## Megatron-core

Tests of the integration and of the pipeline schedules, the slow ones included, with each release in a process of its
own: `make test-megatron`. Releases from 0.17 on declare Python 3.12 or newer, and import on older ones too.
"""
HARDWARE = """
## Hardware

| | kernels compiled | tested | times measured |
|---|---|---|---|
| sm_90 (H100, H200) | in CI | on one GPU | [kernels, on one GPU](benchmarks.md) |
| sm_80, sm_100 | in CI | their code on a CPU | no |
| sm_89, sm_120 | in `make test-all` | no | no |
| gfx942 | in CI | no | no |
| gfx90a, gfx950 | in `make test-all` | no | no |
| CPU | - | in CI, with plain torch and with Triton's interpreter | [mappings, over Gloo](benchmarks.md) |

The integrations (FSDP2, DDP, transformers, Megatron-core, DeepSpeed, yunchang) ran on CPUs over Gloo; the sums and the
attention that they call ran over NCCL, too. `Trainer` over sequence shards with FSDP2 ran on an H200 as well.

### Over NCCL

Ranks of one GPU, each with a `NCCL_HOSTID` of its own, so that they meet over the loopback interface: values, the order
of streams, graphs and failures are NCCL's, times are not. `python tools/gpu_run.py nccl` runs these. Seconds of each,
with what it compiles:
"""
OUTSIDE = """
## Peers' own tests

`make test-world` runs them on the CPU, over Gloo: first alone, then with ours in the peer's place. A test that passes
alone and fails with ours fails the run. A shim takes the place of CUDA, and the tests' files stay as they are. What
fails alone needs a GPU, a network, a package that is not there or another version: ColossalAI 0.2.8 is of torch 1.13,
and DeepSpeed's tests are newer than its release. Tests that compare ours with the package themselves have one count.
"""


def page(results: Mapping[str, Any]) -> str:
    """The page in Markdown."""
    names = list(ENVIRONMENTS)
    rows = [["", *names]]
    for package, shown in {"python": "Python", **PACKAGES}.items():
        rows.append([shown, *(_version(results, name, package) for name in names)])
    rows += [[part, *(_cell(results, name, part) for name in names)] for part in (SUITE, GPU)]
    megatron = [["release", "declares Python", *names]]
    for version, python in MEGATRON.items():
        megatron.append([version, f"{python} or newer", *(_cell(results, name, version) for name in names)])
    outside = [["suite", "of", "ranks", "tests", "day"]]
    for name, row in results.get("world", {}).items():
        outside.append([name, row["package"], str(row["ranks"]), row["cell"], row["date"]])
    tables = [*_table(rows), BETWEEN, *_table(megatron), HARDWARE, *_over_nccl(), OUTSIDE, *_table(outside), ""]
    return "\n".join([HEAD, *tables])


def _over_nccl() -> Iterator[str]:
    """The results of ``tools/gpu_run.py nccl`` on every GPU that ran it, one table each."""
    ranks = {"test_two_processes_over_nccl": 2, "test_two_over_nccl": 2, "test_four_over_nccl": 4}
    for path in sorted(NCCL.glob("*/tests/nccl.json")):
        content, by_function = json.loads(path.read_text()), {}
        for result in content["tests"]:
            test, _, case = result["test"].rpartition("::")[2].rstrip("]").partition("[")
            name = case.removeprefix("run_") if test in ranks else f"{test.removeprefix('test_')} {case}".strip(" -")
            cell = f"{result['outcome']}, {result['seconds']:.1f} s"
            by_function.setdefault(name.replace("_", " "), {})[ranks.get(test, 2)] = cell
        versions = content["versions"]
        yield f"{content['device']}, torch {versions['torch']}, Triton {versions['triton']}, NCCL {content['nccl']}:\n"
        yield from _table(
            [["", "2 ranks", "4 ranks"], *([n, of.get(2, "-"), of.get(4, "-")] for n, of in by_function.items())]
        )


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *others = (f"| {' | '.join(row)} |" for row in rows)
    yield head
    yield f"|{'---|' * len(rows[0])}"
    yield from others


def _version(results: Mapping[str, Any], environment: str, package: str) -> str:
    if environment not in results:
        return NOT_RUN
    return results[environment]["versions"].get(package, "not installed")


def _cell(results: Mapping[str, Any], environment: str, part: str) -> str:
    result = results.get(environment, {}).get("parts", {}).get(part)
    if result is None:
        return NOT_RUN
    counts = [f"{result[kind]} {kind}" for kind in ("failed", "passed", "skipped") if result[kind]]
    return f"{', '.join(counts) or 'no test ran'} ({result['date']}, {result['commit']})"


def measure(
    root: Path,
    results: dict[str, Any],
    names: Sequence[str],
    parts: Mapping[str, Sequence[str]],
    commit: str,
    save: Callable[[], None],
) -> bool:
    """Run the parts in the environments below ``root``, put the counts into ``results``, and ``save`` after each part.

    Returns:
        Whether all tests passed.
    """
    good = True
    for name in names:
        python = root / ENVIRONMENTS[name] / "bin" / "python"
        versions = _versions(python)
        row = results.get(name, {})
        if row.get("versions") != versions:
            row = results[name] = {"versions": versions, "parts": {}}
        for part, arguments in parts.items():
            print(f"{name}: {part}", flush=True)
            result = _run(python, arguments)
            good = good and result["passed"] > 0 and not result["failed"]
            row["parts"][part] = {**result, "date": time.strftime("%Y-%m-%d"), "commit": commit}
            print(_cell(results, name, part), flush=True)
            save()  # a run of all parts takes an hour, and may be interrupted
    return good


def _versions(python: Path) -> dict[str, str]:
    """Versions of Python and of the packages that the interpreter has."""
    code = (
        "import json, platform, sys\nfrom importlib import metadata\n"
        "installed = {d.metadata['Name'].lower(): d.version for d in metadata.distributions()}\n"
        "print(json.dumps({'python': platform.python_version(), "
        "**{name: installed[name] for name in sys.argv[1:] if name in installed}}))"
    )
    out = subprocess.run([python, "-c", code, *PACKAGES], capture_output=True, text=True, check=True, cwd=ROOT).stdout
    return {name: version.partition("+")[0] for name, version in json.loads(out).items()}


def _run(python: Path, arguments: Sequence[str]) -> dict[str, int]:
    """Numbers of tests that failed, passed and were skipped; a pytest that breaks off has one failure at least."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [python, "-m", "pytest", "-q", f"--junitxml={report}", *arguments]
        path = os.pathsep.join([str(ROOT), str(ROOT / "kernels")])
        status = subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": path}).returncode
        suites = list(ElementTree.parse(report).getroot().iter("testsuite")) if report.exists() else []
    total, skipped, failures, errors = (
        sum(int(suite.get(kind, 0)) for suite in suites) for kind in ("tests", "skipped", "failures", "errors")
    )
    failed = failures + errors
    return {"failed": max(failed, int(status != 0)), "passed": total - failed - skipped, "skipped": skipped}


def _commit() -> str:
    """The commit of the tree, ``-dirty`` where files differ from it, but for the two that this command writes."""
    written = [f":!{path.relative_to(ROOT)}" for path in (RESULTS, PAGE)]
    described, changed = (
        subprocess.run(["git", *command], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()
        for command in (("rev-parse", "--short", "HEAD"), ("diff", "--name-only", "HEAD", "--", ".", *written))
    )
    return f"{described}-dirty" if changed else described


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what is asked for, write results and page; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="only write the page")
    parser.add_argument("--root", type=Path, default=ROOT, help="the folder that has the environments")
    names = ", ".join(ENVIRONMENTS)
    parser.add_argument(
        "--environments", nargs="+", choices=ENVIRONMENTS, metavar="NAME", help=f"of {names}; those there"
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help=", ".join(PARTS))
    options = parser.parse_args(arguments)
    results = json.loads(RESULTS.read_text())

    def save() -> None:
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        PAGE.write_text(page(results))

    good = True
    if not options.write:
        here = [name for name, folder in ENVIRONMENTS.items() if (options.root / folder / "bin" / "python").exists()]
        names = options.environments or here
        if missing := [name for name in names if name not in here]:
            parser.error(f"there is no {', '.join(ENVIRONMENTS[name] for name in missing)} in {options.root}")
        commit = _commit()
        good = measure(options.root, results, names, {part: PARTS[part] for part in options.parts}, commit, save)
    save()
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
