"""``python -m outside``: every suite alone and with ours; a line per suite, the tests that differ, an exit status.

``--only TEXT`` runs the suites whose name contains it, ``--write`` puts the rows into tests/compatibility.json and
docs/compatibility.md.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import matrix

from outside.suites import ROOT, SUITES, Suite, missing

__all__ = ["Result", "judge", "main"]

Outcomes = dict[str, dict[str, str]]  # by test; of ``ranks.run``


@dataclass
class Result:
    """What became of a suite.

    Attributes:
        cell: counts of tests, or why it did not run.
        differ: tests that pass alone and fail with ours, with the last line of what they said.
        alone: tests that fail alone, the same.
    """

    package: str
    cell: str
    differ: dict[str, str] = field(default_factory=dict)
    alone: dict[str, str] = field(default_factory=dict)


def main() -> int:
    """The command: 0 where nothing differs, 1 where a test passes alone and fails with ours, 2 where nothing ran."""
    parser = argparse.ArgumentParser(prog="outside", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", default="", help="only suites whose name contains this")
    parser.add_argument("--write", action="store_true", help="put the rows into the page of versions")
    options = parser.parse_args()
    differ = ran = 0
    for name, suite in SUITES.items():
        if options.only not in name:
            continue
        result = judge(name, suite)
        print(f"{name}, {result.package}, {suite.ranks} ranks: {result.cell}", flush=True)
        for what, tests in (("passes alone, fails with ours", result.differ), ("fails alone", result.alone)):
            for test, text in tests.items():
                print(f"    {what}: {test}\n        {text}", flush=True)
        differ += len(result.differ)
        ran += not result.cell.startswith("not run")
        if options.write:
            write(name, suite, result)
    return 2 if not ran else 1 if differ else 0


def judge(name: str, suite: Suite) -> Result:
    """Run a suite in both setups; what passes alone and fails with ours runs again, one by one, before it counts."""
    if reason := missing(suite):
        return Result(suite.package, f"not run: {reason}")
    given = metadata.version(suite.package) if suite.source is None or suite.is_installed else suite.source.commit[1:]
    package = f"{suite.package} {given.partition('+')[0]}"
    try:
        alone, ours = run(name, "alone") if suite.alone else None, run(name, "ours")
        differ = [test for test in ours if failed(ours, test) and (alone is None or passed(alone, test))]
        differ += [test for test in alone or () if passed(alone or {}, test) and test not in ours]
        if differ:
            ours |= run(name, "ours", *differ)
    except RuntimeError as error:
        return Result(package, f"not run: {error}")
    named = {test for test in differ if any(test.endswith(known) for known in suite.known)}
    cell = counts(ours) if alone is None else f"{counts(alone)} alone; {counts(ours)} with ours"
    return Result(
        package,
        cell + (f"; {len(named)} named differences" if named else ""),
        {test: last(ours, test) for test in differ if test not in named and (test not in ours or failed(ours, test))},
        {test: last(alone or {}, test) for test in alone or () if failed(alone or {}, test)},
    )


def passed(outcomes: Outcomes, test: str) -> bool:
    return test in outcomes and outcomes[test]["outcome"] == "passed"


def failed(outcomes: Outcomes, test: str) -> bool:
    return outcomes[test]["outcome"] == "failed"


def last(outcomes: Outcomes, test: str) -> str:
    """The last line of what a test said."""
    return (outcomes.get(test, {}).get("text", "").strip().splitlines() or ["did not run"])[-1][:200]


def counts(outcomes: Outcomes) -> str:
    found = [one["outcome"] for one in outcomes.values()]
    return ", ".join(f"{found.count(kind)} {kind}" for kind in ("passed", "failed", "skipped") if kind in found)


def write(name: str, suite: Suite, result: Result) -> None:
    """Put a row into the page of versions."""
    results = json.loads(matrix.RESULTS.read_text())
    row = {"package": result.package, "ranks": suite.ranks, "cell": result.cell, "date": time.strftime("%Y-%m-%d")}
    results.setdefault("world", {})[name] = row
    text = json.dumps(results, indent=1, sort_keys=True)
    matrix.RESULTS.write_text(f"{text}\n")
    matrix.PAGE.write_text(matrix.page(json.loads(text)))


def run(name: str, setup: str, *again: str) -> Outcomes:
    """Run a suite, or single tests of it, in a process of its own.

    Raises:
        RuntimeError: it wrote no outcomes.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "outcomes.json"
        path = [os.environ.get("PYTHONPATH", ""), *(str(ROOT / part) for part in ("", "kernels", "tools"))]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", "-m", "outside.ranks", name, setup, str(out), *again]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        if not out.exists():
            raise RuntimeError((done.stderr.strip().splitlines() or ["no outcomes"])[-1])
        return json.loads(out.read_text())


if __name__ == "__main__":
    sys.exit(main())
