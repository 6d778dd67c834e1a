"""One run of a suite: ranks that run pytest on the same tests. ``python -m outside.ranks NAME SETUP OUT [TEST ...]``.

The peer is imported once, then the ranks are forked. OUT gets the outcome of each test: ``passed`` where every rank
passed or skipped it and one passed, ``skipped`` where all skipped it, else ``failed`` with the first rank's text.
"""

import json
import os
import signal
import socket
import sys
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import pytest

from outside.suites import ROOT, SUITES, Suite, checkout

__all__ = ["Outcome", "main", "run"]

Outcome = dict[str, str]  # "outcome" and "text"


class _Log:
    """A plugin of pytest that writes what becomes of each test, as soon as it is known."""

    def __init__(self, path: Path) -> None:
        self.file = path.open("a")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.put(nodeid, "started", "")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = "" if report.outcome == "passed" else str(report.longrepr)[-2000:]
            self.put(report.nodeid, report.outcome, text)

    def pytest_collectreport(self, report: Any) -> None:
        if report.outcome == "failed":
            self.put(report.nodeid, "failed", str(report.longrepr)[-2000:])

    def put(self, node: str, outcome: str, text: str) -> None:
        self.file.write(json.dumps([node, outcome, text]) + "\n")
        self.file.flush()


def run(suite: Suite, is_ours: bool, tests: list[str], limit: float) -> dict[str, Outcome]:
    """Run ``tests`` on the ranks of the suite; ranks that take longer than ``limit`` seconds are killed.

    Raises:
        RuntimeError: no test began; the last line of the first rank's output.
    """
    with tempfile.TemporaryDirectory() as folder, socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        held.close()
        logs = [Path(folder) / str(rank) for rank in range(suite.ranks if suite.together else 1)]
        children = {_fork(suite, is_ours, tests, rank, port, log) for rank, log in enumerate(logs)}
        end = time.monotonic() + limit
        while children and time.monotonic() < end:
            children -= {child for child in children if os.waitpid(child, os.WNOHANG)[0]}
            time.sleep(0.05)
        for child in children:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        results = _together([log.read_text() if log.exists() else "" for log in logs])
        if not results:
            raise RuntimeError(Path(f"{logs[0]}.out").read_text().strip().splitlines()[-1])
        return results


def _fork(suite: Suite, is_ours: bool, tests: list[str], rank: int, port: int, log: Path) -> int:
    """Start a rank; its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        if suite.together:
            names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": suite.ranks, "LOCAL_WORLD_SIZE": suite.ranks}
            os.environ.update({name: str(value) for name, value in names.items()})
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
        out = os.open(f"{log}.out", os.O_WRONLY | os.O_CREAT)
        os.dup2(out, 1)
        os.dup2(out, 2)
        suite.enter(is_ours)
        options = [
            "-p",
            "no:cacheprovider",
            "-q",
            "--tb=short",
            "--continue-on-collection-errors",
            f"--timeout={suite.timeout}",
            "--timeout-method=thread",
        ]
        status = int(pytest.main([*options, *suite.options, *tests], plugins=[_Log(log)]))
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(status)


def _together(logs: list[str]) -> dict[str, Outcome]:
    """The outcome of each test over all ranks."""
    by_node: dict[str, list[tuple[str, str]]] = {}
    for rank, log in enumerate(logs):
        for node, outcome, text in map(json.loads, log.splitlines()):
            row = by_node.setdefault(node, [("not reached", "")] * len(logs))
            if not (row[rank][0] == "failed" and outcome != "failed"):
                row[rank] = outcome, text
    results = {}
    for node, row in by_node.items():
        outcomes = {outcome for outcome, _ in row}
        bad = next((f"{outcome} on rank {rank}: {text}" for rank, (outcome, text) in enumerate(row)
                    if outcome not in ("passed", "skipped")), "")  # fmt: skip
        outcome = "failed" if bad else "skipped" if outcomes == {"skipped"} else "passed"
        results[node] = {"outcome": outcome, "text": bad or row[0][1]}
    return results


def main(name: str, setup: str, out: str, *again: str) -> None:
    """Run a suite, or the tests ``again`` of it one by one, and write the outcomes."""
    suite, is_ours = SUITES[name], setup == "ours"
    folder = checkout(suite.source) if suite.source is not None else Path.cwd()
    os.chdir(folder)
    sys.path.append(str(folder))  # behind the packages that are installed, which the folder may have too
    suite.prepare(is_ours)
    results: dict[str, Outcome] = {}
    if again:
        for test in again:
            # The name of a test of ours begins at the root of the repository, not in this folder.
            where = str(ROOT / test) if (ROOT / test.partition("::")[0]).exists() else test
            found = run(suite, is_ours, [where], suite.timeout + 30)
            results |= {node: one for node, one in found.items() if node == test}
    else:
        results = run(suite, is_ours, [*suite.tests], suite.limit)
    Path(out).write_text(json.dumps(results))


if __name__ == "__main__":
    main(*sys.argv[1:])
