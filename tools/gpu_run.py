"""A run on a GPU within a total time: ``python tools/gpu_run.py all``, or the tests of one part alone, as ``nccl``.

``all`` runs the parts of ``PARTS`` one after the other and keeps their results in one folder. It stops after the tests
if these fail, because wrong kernels are not worth timing. ``--parts first`` and ``--parts second`` are for a GPU of
twelve minutes: what tells most, in at most 420 s and 290 s. ``--dry`` runs on a CPU what each part needs: it collects
the tests, and runs the benchmarks with tiny sizes.

The parts of ``ORDER`` run pytest, the tests of most worth first. A GPU that met an illegal access answers no
call of that process any more, and a collective that a rank has left never ends. So pytest runs in a process of its own,
with this file as its plugin, which writes down every test that begins or ends. A process that dies, or whose test takes
too long, is replaced by another that goes on with the next test. One line per test function, and every failure, is
printed as soon as it is known. ``tests_<run>.json`` in $OUT, when that is set, is written as often.

Exits 0 when everything ran and passed; tests that this machine cannot run are listed with the reason. Exits 1 when
something failed or never ran, 2 without a CUDA device, 3 when nothing failed and the time was over before the end.
"""

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Any

import pytest
import torch

from bench.device import machine
from bench.timing import results_folder, versions, write_json

ROOT = Path(__file__).resolve().parents[1]
PASSED, FAILED, NO_DEVICE, LATE_STATUS = 0, 1, 2, 3  # exit status
COMPLETE = (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.NO_TESTS_COLLECTED)
LOST = 75  # exit status of a process whose GPU no longer answers
SHOWN = 5  # different failures of a test function; the file has all
EACH_S = 120  # of one test, which has crashed or hangs beyond that
START_S = 60  # until the first test begins
LATE = "the time of the run is over"
# What never ran on a GPU, and what everything else rests on, comes first.
GROUPS, LAUNCHES = "tests/gpu/test_groups.py", "tests/gpu/test_launches.py"
EXCHANGES = "tests/gpu/test_exchanges.py"
RANKS, KERNELS = "tests/gpu/test_ranks.py", "tests/kernels/test_kernels.py"
SEGMENTS, ROWS = "tests/kernels/test_segments.py", "tests/kernels/test_rows.py"
ENTROPY = "tests/kernels/test_cross_entropy.py"
SEGMENT_CALL, COPIES = "tests/kernels/test_segment_call.py", "tests/kernels/test_copies.py"
ORDER = {
    "test": (
        f"{GROUPS}::test_initialize_and_destroy",
        f"{GROUPS}::test_one_rank",
        f"{GROUPS}::test_mappings_of_two_processes",
        f"{LAUNCHES}::test_capture",
        f"{LAUNCHES}::test_capture_of_mappings",
        f"{LAUNCHES}::test_capture_of_reshardings",
        f"{LAUNCHES}::test_streams",
        f"{LAUNCHES}::test_sizes_on_two_streams",
        f"{LAUNCHES}::test_local_steps_do_not_wait",
        f"{LAUNCHES}::test_mappings_do_not_wait",
        f"{GROUPS}::test_p2p_of_two_processes",
        f"{GROUPS}::test_two_processes",
        f"{GROUPS}::test_compile_of_two_processes",
        f"{GROUPS}::test_cuda_graphs",
        f"{LAUNCHES}::test_hooks",
        f"{LAUNCHES}::test_accesses_beyond_32_bits",
        f"{GROUPS}::test_handles_on_a_side_stream",
    ),
    "kernels": (
        f"{ROWS}::test_rows_by_index",
        "tests/kernels/test_row_sums.py::test_lists_of_rows",
        "tests/kernels/test_id_sort.py::test_sorts_are_pythons",
        "tests/kernels/test_id_sort.py::test_more_slots_than_a_program_compares",
        f"{ENTROPY}::test_statistics_and_gradient",
        f"{ENTROPY}::test_the_bound_of_both_kernels",
        f"{ENTROPY}::test_edges",
        f"{KERNELS}::test_dtypes_and_layouts",
        f"{KERNELS}::test_packs_in_the_order_of_the_wire",
        f"{KERNELS}::test_split_sizes",
        f"{SEGMENTS}::test_copies_of_any_bits",
        f"{SEGMENTS}::test_segments_of_many_programs",
        f"{SEGMENTS}::test_addresses_of_many_tensors",
        f"{SEGMENT_CALL}::test_access_widths_of_other_addresses",
        f"{SEGMENT_CALL}::test_sums",
        f"{SEGMENT_CALL}::test_launches_of_few_alignments_are_kept",
        f"{COPIES}::test_copies_of_any_bits",
        f"{COPIES}::test_casts",
        f"{COPIES}::test_other_addresses",
        f"{KERNELS}::test_reduce_casts_and_scales",
        f"{KERNELS}::test_reduce_of_odd_lengths",
        f"{KERNELS}::test_cast_scale_accumulate",
        f"{SEGMENTS}::test_casts_scales_and_sums",
        f"{SEGMENTS}::test_sums_of_integers",
        f"{SEGMENTS}::test_rows_that_segments_share_are_added_up",
        f"{KERNELS}::test_access_widths",
        f"{KERNELS}::test_eviction_changes_no_bit",
        f"{KERNELS}::test_ragged_rows_and_gaps",
        f"{KERNELS}::test_shapes",
        f"{KERNELS}::test_broadcast_rows_are_read",
        f"{KERNELS}::test_rows_beyond_32_bits",
        f"{KERNELS}::test_tensors_beyond_32_bits",
        "tests/kernels/test_examples.py::test_an_example_has_the_numbers_that_it_shows",
        f"{KERNELS}::test_reduce_sums_in_rank_order",  # compiles a kernel for each number of parts, a minute
    ),
    "nccl": (
        f"{GROUPS}::test_two_processes_over_nccl",
        f"{EXCHANGES}::test_two_over_nccl",
        f"{EXCHANGES}::test_graphs_of_compiled_over_nccl",
        f"{EXCHANGES}::test_four_over_nccl",
        f"{EXCHANGES}::test_a_lost_rank_ends_its_peer_in_time",
    ),
    "ranks": (f"{RANKS}::test_backward_runs_in_the_thread_of_its_rank", f"{RANKS}::test_ranks"),
}
BUDGET_S = {"test": 135, "kernels": 135, "nccl": 170, "ranks": 90}  # later tests are skipped, visibly


@dataclass
class Progress:
    """A file of JSON lines: the tests that are asked for, then every test that begins, and every test that ends."""

    path: Path

    def add(self, **event: Any) -> None:
        with self.path.open("a") as file:
            file.write(json.dumps(event) + "\n")

    def read(self) -> "Events":
        return Events([json.loads(line) for line in self.path.read_text().splitlines() if line.endswith("}")])


@dataclass
class Events:
    """The lines of a ``Progress``.

    Attributes:
        lines: decoded, in order.
    """

    lines: list[dict[str, Any]]

    @property
    def asked(self) -> list[str]:
        """Files, or ``file::function``, in the order in which they run."""
        return next((line["asked"] for line in self.lines if "asked" in line), [])

    @property
    def collected(self) -> set[str]:
        """The part of ``asked`` that pytest found."""
        return {test for line in self.lines for test in line.get("collected", ())}

    @property
    def begun(self) -> list[str]:
        return [line["begun"] for line in self.lines if "begun" in line]

    @property
    def results(self) -> dict[str, dict[str, Any]]:
        """The last result of every test."""
        return {line["test"]: line for line in self.lines if "test" in line}

    @property
    def sessions(self) -> list[int]:
        """Exit status of every pytest that came to its end."""
        return [line["session"] for line in self.lines if "session" in line]


class Plugin:
    """In pytest: order the tests, leave out what has begun, skip what is late, write down the rest."""

    def __init__(self, progress: Progress, deadline: float) -> None:
        self.progress, self.deadline = progress, deadline
        events = progress.read()
        self.begun, self.reports = set(events.begun), []
        self.asked = {_place(test): (i, test) for i, test in enumerate(events.asked)}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen: list[tuple[int, str, pytest.Item]] = []
        for item in items:
            function = item.name.partition("[")[0]
            asked = self.asked.get((item.path, function)) or self.asked.get((item.path, ""))
            if asked is not None:
                chosen.append((*asked, item))
        chosen.sort(key=lambda one: one[0])
        self.progress.add(collected=list(dict.fromkeys(test for _, test, _ in chosen)))
        items[:] = [item for _, _, item in chosen if item.nodeid not in self.begun]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.progress.add(test=report.nodeid, outcome="failed", seconds=0.0, message=report.longreprtext[-4000:])

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

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.progress.add(session=int(exitstatus))


def _place(test: str) -> tuple[Path, str]:
    """Path and function of ``file::function``; no function for a file."""
    path, _, function = test.partition("::")
    return (ROOT / path).resolve(), function


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
        while time.monotonic() < self.deadline:
            before = self.progress.read()
            status, problem = self._one_process()
            events = self.progress.read()
            for test in events.begun:
                if test not in events.results:
                    print(f"{test}: {problem}", flush=True)
                    self._fail(test, problem)
            if len(events.sessions) > len(before.sessions) and status in COMPLETE:
                self._fail_uncollected(events)
                break
            if len(events.begun) == len(before.begun):
                text = f"pytest began no test: {problem}\n{self.log.read_text()[-4000:]}"
                print(text, flush=True)
                self._fail("pytest", text)
                break
            print(f"{problem}; another process goes on", flush=True)
        else:
            self.progress.add(test="all that has not begun", outcome="skipped", seconds=0.0, message=LATE)
        self.update(final=True)
        return self.results

    def _fail(self, test: str, message: str) -> None:
        self.progress.add(test=test, outcome="failed", seconds=0.0, message=message)

    def _fail_uncollected(self, events: Events) -> None:
        """A test that is asked for and that pytest did not find is a failure."""
        for test in events.asked:
            if test not in events.collected:
                self._fail(test, "it is asked for, and pytest did not collect it")

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
        self.results = list(self.progress.read().results.values())
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
def _child(
    command: Sequence[str], log: Any, more: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """A child that takes all of its own children with it, also when this process is told to end."""

    def end(number: int, frame: FrameType | None) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    paths = [str(Path(__file__).parent), str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, **(more or {}), "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    child = subprocess.Popen(command, cwd=ROOT, env=env, stdout=log, start_new_session=True)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError):  # it and its children have ended
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
        signal.signal(signal.SIGTERM, before)


def command_for(device: str, progress: Progress, deadline: float, each: float) -> list[str]:
    """pytest over the files of the tests that are asked for, which ``Plugin`` chooses from.

    Without any plugin that is not its own: the plugins that the settings of the repository name may be missing. Files
    are named, not functions: pytest refuses a command with a function whose file cannot be imported.
    """
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-o", "addopts=--import-mode=importlib"]
    command += ["-W", "ignore", "-p", "no:cacheprovider", "-p", "no:timeout", "-p", "gpu_run"]
    command += ["-o", f"faulthandler_timeout={0.9 * each}", "--continue-on-collection-errors", "--device", device]
    files = dict.fromkeys(test.partition("::")[0] for test in progress.read().asked)
    return [*command, "--progress", str(progress.path), "--deadline", str(deadline), *files]


def summary(results: Sequence[Mapping[str, Any]]) -> tuple[list[str], int]:
    """The last lines of a run, and its exit status."""
    outcomes = [result["outcome"] for result in results]
    lines = [", ".join(f"{outcomes.count(one)} {one}" for one in ("passed", "failed", "skipped"))]
    by_reason: dict[str, list[str]] = {}
    for result in results:
        if result["outcome"] == "skipped":
            by_reason.setdefault(result["message"].removeprefix("Skipped: "), []).append(_function(result))
    for reason, functions in by_reason.items():
        names = ", ".join(name.rpartition("::")[2] for name in dict.fromkeys(functions))
        lines.append(f"not run: {names}: {reason}")
    if "failed" in outcomes or not outcomes:
        return lines, FAILED
    return lines, LATE_STATUS if LATE in by_reason else PASSED


def why_no_device() -> str:
    """torch's own reason why there is no CUDA device."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:  # the second from a build without CUDA
        return str(error).splitlines()[0]
    return "torch.cuda.is_available() is False, and torch.cuda.init() passes"


@dataclass(frozen=True)
class Part:
    """A part of ``all``.

    Attributes:
        name: in the summary.
        command: after the interpreter; ``{out}`` stands for the folder of the results.
        limit: seconds after which it is killed.
        dry: the command of a dry run on a CPU.
        env: more variables.
        decides: later parts run only if this one passes or is out of time.
    """

    name: str
    command: tuple[str, ...]
    limit: int
    dry: tuple[str, ...] = ()
    env: Mapping[str, str] = field(default_factory=dict)
    decides: bool = False


_RUN, _BENCH = "tools/gpu_run.py", "bench/gpu_bench.py"
_TABLES = "{out}/tables"
_RAGGED = ("--only", *(f"run {nbytes} world 8" for nbytes in (24, 72, 100, 144, 200, 1023, 1026)))
_TUNE = ("-m", "tritoncomm", "tune", "--model", "llama3-8b", "--list")
_SOME = (_BENCH, "--dry", "--only", "run 512 world 8 bfloat16")
# The limits add up to less than 25 minutes. The benchmark runs twice: with the built-in tiles, then with the table.
PARTS = (
    Part("test", (_RUN, "test"), 170, (_RUN, "test", "--dry"), decides=True),
    Part("nccl", (_RUN, "nccl"), 205, (_RUN, "nccl", "--dry")),
    Part("kernels", (_RUN, "kernels"), 170, (_RUN, "kernels", "--dry"), decides=True),
    Part("ranks", (_RUN, "ranks"), 125, (_RUN, "ranks", "--dry"), decides=True),
    Part("local", ("bench/gpu_ranks.py",), 55, ("bench/gpu_ranks.py", "--dry")),
    Part("step", ("bench/gpu_step.py",), 60, ("bench/gpu_step.py", "--dry")),
    Part("bench", (_BENCH, "--json", "{out}/gpu_bench.json"), 265, (_BENCH, "--dry")),
    Part("tune", ("-m", "tritoncomm", "tune", "--budget", "150", "--out", _TABLES), 185, _TUNE),
    Part("tuned", (_BENCH, "--json", "{out}/gpu_bench_tuned.json"), 265, _SOME, {"TRITONCOMM_TABLE": _TABLES}),
)
_EXCHANGES = "bench/gpu_exchanges.py"
# Asked for by name: rows that ``all`` measures with the others, and exchanges, for which it has no time.
ALONE = (
    Part(
        "ragged", (_BENCH, "--rounds", "150", "--json", "{out}/ragged.json", *_RAGGED), 75, (_BENCH, "--dry", *_RAGGED)
    ),
    Part("host", (_BENCH, "--json", "{out}/host.json", "--only", "host"), 40, (_BENCH, "--dry", "--only", "host")),
    Part("exchanges", (_EXCHANGES, "--json", "{out}/captured.json"), 45, (_EXCHANGES, "--dry", "--only", "sp2hp")),
)
SHORT = {"first": ("nccl", "exchanges", "ragged", "host", "local"), "second": ("bench",)}
SHORT_S = {"first": 420, "second": 290}


def parts_of(names: Sequence[str]) -> list[Part]:
    """The parts with these names, where ``first`` and ``second`` name several."""
    by_name = {part.name: part for part in (*PARTS, *ALONE)}
    chosen = [name for group in names for name in SHORT.get(group, (group,))]
    return [by_name[name] for name in dict.fromkeys(chosen)]


def dry_run(parts: Sequence[Part]) -> int:
    """Run on a CPU what each part needs; a part that fails here would have failed on the GPU."""
    ends = {}
    with tempfile.TemporaryDirectory() as folder:
        for part in parts:
            print(f"\n== {part.name}, dry", flush=True)
            started = time.monotonic()
            part = replace(part, command=part.dry, limit=300, env={"TRITON_INTERPRET": "1"})
            status = _run_part(part, Path(folder))
            ends[part.name] = "ready" if status == PASSED else f"NOT READY: {status}"
            print(f"{part.name}: {ends[part.name]}, {time.monotonic() - started:.0f} s")
    print("", *(f"{name:8} {end}" for name, end in ends.items()), sep="\n")
    return PASSED if set(ends.values()) == {"ready"} else FAILED


def run_parts(parts: Sequence[Part], folder: Path) -> int:
    """Run parts one after the other, print how each ended, and return the exit status of all."""
    ends: dict[str, str] = {}
    stopped = ""
    worst = PASSED
    for part in parts:
        if stopped:
            ends[part.name] = f"not run, because {stopped} failed"
            continue
        print(f"\n== {part.name}, at most {part.limit} s", flush=True)
        started, status = time.monotonic(), _run_part(part, folder)
        word = {PASSED: "passed", LATE_STATUS: "incomplete: the time was over"}.get(status, f"FAILED with {status}")
        if status == subprocess.TimeoutExpired:
            word = f"FAILED: it did not end within {part.limit} s"
        ends[part.name] = f"{word}, {time.monotonic() - started:.0f} s"
        if status == LATE_STATUS:
            worst = worst or LATE_STATUS
        elif status != PASSED:
            worst = FAILED
            stopped = part.name if part.decides else ""
    print(f"\nresults in {folder}")
    if (folder / "tables").is_dir():
        print(f"the tuned table is used with TRITONCOMM_TABLE={folder / 'tables'}; nothing is installed")
    for name, end in ends.items():
        print(f"{name:8} {end}")
    if torch.cuda.device_count() < 2:
        print("one GPU: exchanges between ranks ran on it, over the loopback interface; no time of one is measured")
    return worst


def _run_part(part: Part, folder: Path) -> Any:
    """Exit status of the part, or ``subprocess.TimeoutExpired``."""
    command = [sys.executable, *(word.format(out=folder) for word in part.command)]
    env = {"OUT": str(folder)} | {name: value.format(out=folder) for name, value in part.env.items()}
    with _child(command, None, env) as child:
        try:
            return child.wait(part.limit)
        except subprocess.TimeoutExpired:
            return subprocess.TimeoutExpired


def main() -> int:
    parser = argparse.ArgumentParser(description="Tests and benchmarks on a GPU within a total time.")
    parser.add_argument("run", choices=("all", *ORDER))
    parser.add_argument("--device", default="cuda", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only test functions whose name contains this")
    parser.add_argument("--budget", type=float, help="seconds after which nothing new starts")
    names = [part.name for part in PARTS]
    choices = [*names, *(part.name for part in ALONE), *SHORT]
    parser.add_argument("--parts", nargs="+", choices=choices, default=names, metavar="PART", help=" ".join(choices))
    parser.add_argument("--dry", action="store_true", help="run on a CPU what each part needs")
    options = parser.parse_args()
    if options.dry:
        return dry_run(parts_of(options.parts)) if options.run == "all" else collect_tests(options.run)
    if options.device == "cuda" and not torch.cuda.is_available():
        print("\n".join(machine()))
        print(f"gpu_run: no CUDA device here, nothing was tested: {why_no_device()}")
        return NO_DEVICE
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else options.device
    if options.run == "all":
        folder = Path(os.environ.get("OUT") or results_folder(name)).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        lines = machine()
        (folder / "machine.txt").write_text("\n".join(lines) + "\n")
        print("\n".join(lines), flush=True)
        return run_parts(parts_of(options.parts), folder)
    return run_tests(options.run, name, options.device, options.only, options.budget)


def collect_tests(run: str) -> int:
    """Collect the tests of ``ORDER[run]`` as for a GPU, and run none; the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        progress = Progress(Path(folder) / "progress")
        progress.add(asked=list(ORDER[run]))
        command = [*command_for("cpu", progress, math.inf, EACH_S), "--collect-only"]
        with _child(command, subprocess.DEVNULL) as child:
            status = child.wait(300)
        events = progress.read()
    problems = [f"{one['test']}: {one['message']}" for one in events.results.values()]
    problems += [f"{test}: pytest did not collect it" for test in ORDER[run] if test not in events.collected]
    print(f"{len(events.collected)} of {len(ORDER[run])} test functions collected", *problems, sep="\n")
    return FAILED if problems or status else PASSED


def run_tests(run: str, name: str, device: str, only: str, budget: float | None) -> int:
    """Run the tests of ``ORDER[run]`` whose names contain ``only``; the exit status."""
    started = time.monotonic()
    print(f"device: {name}, torch {torch.__version__}", flush=True)
    content = {"device": name, "versions": versions()}

    def save(results: list[dict[str, Any]]) -> None:
        if out := os.environ.get("OUT"):
            write_json(f"{out}/tests_{run}.json", {**content, "tests": results})

    with tempfile.TemporaryDirectory() as folder:
        progress, log = Progress(Path(folder) / "progress"), Path(folder) / "log"
        deadline = started + (budget or BUDGET_S[run])
        progress.add(asked=[test for test in ORDER[run] if only in test])
        command = command_for(device, progress, deadline, EACH_S)
        results = Run(command, progress, deadline, EACH_S, save, log).run()
    lines, status = summary(results)
    print(f"{lines[0]}, {time.monotonic() - started:.0f} s", *lines[1:], sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
