"""A part as a command: rows as they are measured, targets, a second measurement, an interrupted run, exit statuses."""

import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import guard, harness, hosts
from bench.harness import Clock, Part, Row


def measure(case: str, host: dict[str, Any], clock: Clock) -> Iterator[Row]:
    """Ours takes what the host holds for this case, once per measurement; the peer always 10."""

    def sample() -> dict[str, list[float]]:
        return {"ours": [host[case].pop(0)] * clock.rounds, "peer": [10.0] * clock.rounds}

    yield clock.row(f"{case}, forward", sample, mode="forward", limit=1.05, passes={"ours": 1, "peer": 2})


class Host:
    """Times of the cases; a case without times is interrupted by the user."""

    def __init__(self, **times: Any) -> None:
        self.times = times

    def __enter__(self) -> dict[str, Any]:
        return self.times

    def __exit__(self, *_: object) -> None: ...


PART = Part("part", ("first", "second"), measure, "microseconds", rounds=4, peer="peer")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Any:
    monkeypatch.setenv("COLUMNS", "140")

    def main(part: Part, *arguments: str, **times: Any) -> tuple[int, str, dict[str, Any]]:
        path = tmp_path / "part.json"
        path.unlink(missing_ok=True)
        monkeypatch.setattr(sys, "argv", ["part.py", "--json", str(path), *arguments])
        status = replace(part, host=lambda: Host(**times)).main()
        return status, capsys.readouterr().out, json.loads(path.read_text()) if path.is_file() else {}

    return main


def test_a_run_prints_and_writes_its_rows(run: Any) -> None:
    status, printed, content = run(PART, first=[5.0], second=[8.0])
    assert status == 0
    first, second = printed.splitlines()[:2]
    assert first.startswith("first, forward ")
    assert "5.0 us   0.50 ±0.00 of peer  passes 1 / 2" in first
    assert "0.80 ±0.00 of peer" in second
    assert [row["row"] for row in content["rows"]] == ["first, forward", "second, forward"]
    assert content["geometric_mean"] == {"forward": 0.632}
    assert content["versions"]["cpu"]
    assert "incomplete" not in content
    assert len(run(PART, "--only", "SEC o", second=[8.0])[2]["rows"]) == 1
    status, printed, _ = run(PART, "--only", "second none")
    assert (status, printed.splitlines()[0]) == (2, "cases: first; second")
    assert printed.splitlines()[1].startswith("no case has all words of --only")


def test_a_row_above_its_limit_is_measured_again(run: Any) -> None:
    status, printed, content = run(PART, first=[20.0, 5.0], second=[20.0, 20.0])
    assert status == 1
    assert "MISSED" not in printed.splitlines()[0]
    assert printed.splitlines()[1].endswith("MISSED")
    assert "MISSED: second, forward: 2.00 of peer's time, at most 1.05" in printed
    assert [row["ratio"]["peer"] for row in content["rows"]] == [0.5, 2.0]


def test_a_row_that_is_worse_than_committed_fails(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {"rows": [{"row": "first, forward", "ratio": {"peer": 0.4}, "spread": {}}]}
    monkeypatch.setattr(guard, "against_committed", lambda part, now, device="cpu": guard.compare(now, before))
    status, printed, _ = run(PART, "--only", "first", first=[6.0, 6.0])
    assert (status, "MISSED: worse: first, forward: 0.600 of peer's time, 0.400 before" in printed) == (1, True)
    assert run(PART, "--only", "first", first=[6.0, 4.0])[0] == 0


def test_targets_and_means_are_held(run: Any) -> None:
    part = replace(PART, targets=lambda row: [f"{row['row']}: two passes"] * (row["passes"]["peer"] == 2))
    assert "MISSED: first, forward: two passes" in run(part, first=[5.0], second=[5.0])[1]
    status, printed, _ = run(replace(PART, means={"all": (["forward"], 0.6)}), first=[8.0], second=[8.0])
    assert (status, "MISSED: geometric mean, all: 0.80 of peer's time, at most 0.6" in printed) == (1, True)


def test_an_interrupted_run_keeps_its_rows(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(case: str, host: dict[str, Any], clock: Clock) -> Iterator[Row]:
        if case == "second":
            raise KeyboardInterrupt
        yield from measure(case, host, clock)

    status, printed, content = run(replace(PART, measure=interrupted), first=[5.0])
    assert (status, content["incomplete"], len(content["rows"])) == (130, True, 1)
    assert "interrupted after 1 rows" in printed


def test_a_case_that_raises_is_reported_and_the_others_go_on(run: Any) -> None:
    status, printed, content = run(PART, first=[], second=[5.0])
    assert (status, len(content["rows"])) == (1, 1)
    assert "IndexError: pop from empty list" in content["failed"][0]
    assert "MISSED: failed: first: Traceback (most recent call last): IndexError: pop from empty list" in printed


def test_what_there_is_no_time_for_is_left_out(run: Any) -> None:
    status, printed, _ = run(replace(PART, budget_s=-1.0), first=[5.0])
    assert (status, "2 cases left out" in printed) == (2, True)


def test_another_run_measures_what_there_was_no_time_for(tmp_path: Path) -> None:
    path = tmp_path / "part.json"
    path.write_text(json.dumps({"rows": [{"row": "first, forward"}], "left_out": ["second"]}))
    again = harness.Run(PART, 1)
    again.continue_from(path)
    assert (again.part.cases, [row["row"] for row in again.rows]) == (("second",), ["first, forward"])


def test_a_missing_peer_names_its_install_command(run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert hosts.missing_megatron() in ("", f"megatron-core is not installed: {hosts.MEGATRON}")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    status, printed, _ = run(replace(PART, missing=hosts.missing_megatron))
    assert status == 2
    assert "pip install --no-deps megatron-core==0.16.1" in printed


@pytest.mark.parametrize("path", sorted(Path(harness.__file__).parent.glob("bench_*.py")), ids=lambda path: path.stem)
def test_every_part_can_be_imported(path: Path) -> None:
    """Import modules that otherwise only `make bench` imports."""
    module = importlib.import_module(f"bench.{path.stem}")
    assert module.__doc__
    assert module.PART.name
    assert callable(module.test_case)
