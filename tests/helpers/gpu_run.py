"""Tests on a GPU, those of most worth first, within a total time: ``python tests/helpers/gpu_run.py test``.

A GPU that met an illegal access answers no call of that process any more, and a collective that a rank has left never
ends. So pytest runs in a process of its own, with this file as its plugin, which writes down every test that begins or
ends. A process that dies, or whose test takes too long, is replaced by another that goes on with the next test. One
line per test function, and every failure, is printed as soon as it is known. ``<run>.json`` in $OUT, when that is set,
is written as often. Exits 0 when everything holds, 1 when something does not, 2 without a CUDA device.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Any

import pytest
import torch

from bench.timing import versions, write_json

ROOT = Path(__file__).resolve().parents[2]
ENDED = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED)
LOST = 75  # exit status of a process whose GPU no longer answers
SHOWN = 5  # different failures of a test function; the file has all
EACH_S = 120  # of one test, which has crashed or hangs beyond that
START_S = 60  # until the first test begins
LATE = "the time of the run is over"
# What never ran on a GPU, and what everything else rests on, comes first.
GROUPS, LAUNCHES = "tests/gpu/test_groups.py", "tests/gpu/test_launches.py"
RANKS, KERNELS = "tests/gpu/test_ranks.py", "tests/kernels/test_kernels.py"
SEGMENTS, ROWS = "tests/kernels/test_segments.py", "tests/kernels/test_rows.py"
SEGMENT_CALL, COPIES = "tests/kernels/test_segment_call.py", "tests/kernels/test_copies.py"
ORDER = {
    "test": (
        f"{GROUPS}::test_initialize_and_destroy",
        f"{GROUPS}::test_one_rank",
        f"{KERNELS}::test_dtypes_and_layouts",
        f"{KERNELS}::test_split_sizes",
        f"{GROUPS}::test_mappings_of_two_processes",
        f"{LAUNCHES}::test_capture",
        f"{LAUNCHES}::test_capture_of_mappings",
        f"{LAUNCHES}::test_streams",
        f"{LAUNCHES}::test_sizes_on_two_streams",
        f"{GROUPS}::test_p2p_of_two_processes",
        f"{GROUPS}::test_compile_of_two_processes",
        f"{GROUPS}::test_two_processes_over_nccl",
        f"{GROUPS}::test_cuda_graphs",
        f"{LAUNCHES}::test_hooks",
        f"{LAUNCHES}::test_accesses_beyond_32_bits",
        f"{SEGMENTS}::test_copies_of_any_bits",
        f"{SEGMENTS}::test_segments_of_many_programs",
        f"{SEGMENTS}::test_addresses_of_many_tensors",
        f"{SEGMENT_CALL}::test_access_widths_of_other_addresses",
        f"{SEGMENT_CALL}::test_sums",
        f"{SEGMENT_CALL}::test_launches_of_few_alignments_are_kept",
        f"{COPIES}::test_copies_of_any_bits",
        f"{COPIES}::test_casts",
        f"{COPIES}::test_other_addresses",
        f"{KERNELS}::test_reduce_sums_in_rank_order",
        f"{KERNELS}::test_reduce_casts_and_scales",
        f"{KERNELS}::test_reduce_of_odd_lengths",
        f"{KERNELS}::test_cast_scale_accumulate",
        f"{SEGMENTS}::test_casts_scales_and_sums",
        f"{SEGMENTS}::test_sums_of_integers",
        f"{SEGMENTS}::test_rows_that_segments_share_are_added_up",
        f"{ROWS}::test_rows_by_index",
        "tests/kernels/test_cross_entropy.py::test_statistics_and_gradient",
        f"{GROUPS}::test_handles_on_a_side_stream",
        f"{KERNELS}::test_access_widths",
        f"{KERNELS}::test_ragged_rows_and_gaps",
        f"{KERNELS}::test_shapes",
        f"{KERNELS}::test_broadcast_rows_are_read",
        f"{KERNELS}::test_rows_beyond_32_bits",
        f"{KERNELS}::test_tensors_beyond_32_bits",
    ),
    "ranks": (f"{RANKS}::test_backward_runs_in_the_thread_of_its_rank", f"{RANKS}::test_ranks"),
}
BUDGET_S = {"test": 345, "ranks": 90}  # later tests are skipped, visibly


@dataclass
class Progress:
    """A file with one line of JSON for every test that has begun, and for every test that has ended."""

    path: Path

    def add(self, **event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def read(self) -> tuple[list[str], dict[str, dict[str, Any]]]:
        """Tests in the order they have begun, and results by test."""
        lines = [json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")]
        return [line["begun"] for line in lines if "begun" in line], {x["test"]: x for x in lines if "test" in x}


class Plugin:
    """In pytest: leave out what has begun, skip what is late, write down the rest."""

    def __init__(self, progress: Progress, deadline: float) -> None:
        self.progress, self.deadline = progress, deadline
        self.begun, self.reports = set(progress.read()[0]), []

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items[:] = [item for item in items if item.nodeid not in self.begun]

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.progress.add(begun=nodeid)
        self.reports = []

    def pytest_runtest_setup(self) -> None:
        if time.monotonic() > self.deadline:
            pytest.skip(LATE)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.reports.append(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        outcomes = [report.outcome for report in self.reports]
        outcome = next((one for one in ("failed", "skipped") if one in outcomes), "passed")
        said = [report.longrepr for report in self.reports if report.outcome == outcome != "passed"]
        text = "\n".join(str(one[2] if isinstance(one, tuple) else one) for one in said)
        seconds = round(sum(report.duration for report in self.reports), 2)
        self.progress.add(test=nodeid, outcome=outcome, seconds=seconds, message=text[-4000:])
        if outcome == "failed" and not _gpu_answers():
            os._exit(LOST)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--progress", type=Path)
    parser.addoption("--deadline", type=float)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Plugin(Progress(config.getoption("progress")), config.getoption("deadline")))


def _gpu_answers() -> bool:
    try:
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
    except RuntimeError as error:
        print(f"the GPU no longer answers this process: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
        return False
    return True


@dataclass
class Run:
    """The parent: starts pytest, watches it, prints and writes what is known."""

    command: Sequence[str]
    progress: Progress
    deadline: float
    each: float
    save: Callable[[list[dict[str, Any]]], None]
    log: Path
    printed: int = 0
    results: list[dict[str, Any]] = field(default_factory=list)

    def run(self) -> list[dict[str, Any]]:
        """Start processes until one has gone through all tests that are left; the results."""
        self.progress.path.touch()
        while time.monotonic() < self.deadline:
            before, status, problem = len(self.progress.read()[0]), *self._one_process()
            begun, ended = self.progress.read()
            for test in begun:
                if test not in ended:
                    print(f"{test}: {problem}", flush=True)
                    self.progress.add(test=test, outcome="failed", seconds=0.0, message=problem)
            if status in ENDED or (status == pytest.ExitCode.NO_TESTS_COLLECTED and begun):
                break
            if len(begun) == before:
                raise RuntimeError(f"pytest began no test: {problem}\n{self.log.read_text()[-4000:]}")
            print(f"{problem}; another process goes on", flush=True)
        else:
            self.progress.add(test="all that has not begun", outcome="skipped", seconds=0.0, message=LATE)
        self.update(final=True)
        return self.results

    def _one_process(self) -> tuple[int, str]:
        """Its exit status and how it ended, no later than it may."""
        with self.log.open("w") as log, _child(self.command, log) as child:
            seen, since, patience = self.progress.path.stat().st_size, time.monotonic(), max(self.each, START_S)
            while True:
                if seen != (size := self.progress.path.stat().st_size):
                    seen, since, patience = size, time.monotonic(), self.each
                    self.update()
                limit = min(since + patience, self.deadline + self.each / 4)
                try:
                    status = child.wait(max(0.0, min(0.5, limit - time.monotonic())))
                except subprocess.TimeoutExpired:
                    if time.monotonic() >= limit:
                        return -signal.SIGKILL, f"did not end within {time.monotonic() - since:.0f} s"
                    continue
                return status, f"the process ended with {signal.Signals(-status).name if status < 0 else status}"

    def update(self, final: bool = False) -> None:
        """Print every test function that is complete, and write all results."""
        self.results = list(self.progress.read()[1].values())
        groups = [(name, list(tests)) for name, tests in groupby(self.results, _function)]
        for name, tests in groups[self.printed : len(groups) - (not final)]:
            outcomes = [test["outcome"] for test in tests]
            counts = ", ".join(f"{outcomes.count(one)} {one}" for one in dict.fromkeys(outcomes))
            print(f"{name:68} {counts} ({sum(test['seconds'] for test in tests):.1f} s)")
            by_message: dict[tuple[str, str], list[str]] = {}
            for test in tests:
                by_message.setdefault((test["outcome"], test["message"]), []).append(test["test"])
            for (outcome, message), names in list(by_message.items())[:SHOWN]:
                if outcome != "passed":
                    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                    print(f"    {outcome.upper()}: {names[0]}{more}\n{indent(message, ' ' * 8)}")
            self.printed += 1
        sys.stdout.flush()
        self.save(self.results)


def _function(test: dict[str, Any]) -> str:
    return test["test"].partition("[")[0]


@contextmanager
def _child(command: Sequence[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A child that takes all of its own children with it, also when this process is told to end."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    paths = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, start_new_session=True)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):  # it and its children have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        signal.signal(signal.SIGTERM, before)


def command_for(tests: Sequence[str], device: str, progress: Path, deadline: float, each: float) -> list[str]:
    """pytest without any plugin that is not its own: what the settings of the repository name may be missing."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", "addopts=--import-mode=importlib"]
    command += ["-W", "ignore", "-p", "no:cacheprovider", "-p", "no:timeout", "-p", "gpu_run"]
    command += ["-o", f"faulthandler_timeout={0.9 * each}", "--device", device]
    return [*command, "--progress", str(progress), "--deadline", str(deadline), *tests]


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests on a GPU within a total time.")
    parser.add_argument("run", choices=ORDER)
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only test functions whose name contains this")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new starts")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_run: no CUDA device here; nothing was tested")
        return 2
    started = time.monotonic()
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else options.device
    print(f"device: {name}, torch {torch.__version__}", flush=True)
    content = {"device": name, "versions": versions()}

    def save(results: list[dict[str, Any]]) -> None:
        if out := os.environ.get("OUT"):
            write_json(f"{out}/gpu_{options.run}.json", {**content, "tests": results})

    with tempfile.TemporaryDirectory() as folder:
        progress, log = Path(folder) / "progress", Path(folder) / "log"
        deadline = started + (options.budget or BUDGET_S[options.run])
        tests = [test for test in ORDER[options.run] if options.only in test]
        command = command_for(tests, options.device, progress, deadline, EACH_S)
        results = Run(command, Progress(progress), deadline, EACH_S, save, log).run()
    outcomes = [result["outcome"] for result in results]
    counts = ", ".join(f"{outcomes.count(one)} {one}" for one in ("passed", "failed", "skipped"))
    print(f"{counts}, {time.monotonic() - started:.0f} s")
    return 1 if "failed" in outcomes else 0


if __name__ == "__main__":
    sys.exit(main())
