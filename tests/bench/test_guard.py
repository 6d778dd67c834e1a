"""The regression guard: what it compares, what it lets pass, and that it sees a mapping that copies twice."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from bench import bench_mappings, guard, timing


def row(ratio: float, spread: float = 0.02, name: str = "a", peer: str = "peer") -> dict[str, Any]:
    return {"row": name, "us": {}, "ratio": {peer: ratio}, "spread": {peer: spread}}


def content(*rows: dict[str, Any]) -> dict[str, Any]:
    return {"versions": {"torch": "1", "cpu": "this model"}, "rows": list(rows)}


@pytest.mark.parametrize(
    ("now", "before", "passes"),
    [
        (row(0.50), row(0.50), True),
        (row(0.57), row(0.50), True),  # 0.55 and the spread of 0.02
        (row(0.58), row(0.50), False),
        (row(0.62, 0.08), row(0.50), True),  # this run's own spread is larger
        (row(0.62), row(0.50, 0.08), True),  # so was the committed one's
        (row(0.64), row(0.50, 0.08), False),
        (row(0.30), row(0.50), True),
        (row(9.00, name="b"), row(0.50), True),  # not a row of the committed file
        (row(9.00, peer="new"), row(0.50), True),  # a peer that is new
    ],
)
def test_a_ratio_may_worsen_by_a_tenth_beyond_its_spread(
    now: dict[str, Any], before: dict[str, Any], passes: bool
) -> None:
    assert bool(guard.compare(content(now), content(before))) is not passes


def test_what_is_worse_is_told() -> None:
    (line,) = guard.compare(content(row(0.8)), content(row(0.5)))
    assert str(line) == "a: 0.800 of peer's time, 0.500 before, at most 0.570"


def test_spread_is_how_far_groups_of_rounds_are_apart() -> None:
    theirs = [1.0] * 100
    assert timing.spread([2.0] * 100, theirs) == 0.0
    assert timing.spread([1.0] * 40 + [3.0] * 60, theirs) == 2.0
    assert timing.spread([2.0] * 90 + [9.0] * 10, theirs) == 0.0  # one slow moment of ten
    assert timing.spread([2.0] * 3, [1.0] * 3) == 0.0  # fewer rounds than groups
    found = timing.figures("a", {"ours": [1.0] * 40 + [3.0] * 60, "peer": theirs}, limit=1.0)
    assert (found["ratio"], found["spread"], found["limit"]) == ({"peer": 1.0}, {"peer": 2.0}, 1.0)


def test_several_runs_become_one_with_the_range_as_spread() -> None:
    merged = guard.merged([content(row(0.5)), content(row(0.9)), content(row(0.6, 0.01))])
    assert merged["runs"] == 3
    assert (merged["rows"][0]["ratio"], merged["rows"][0]["spread"]) == ({"peer": 0.6}, {"peer": 0.4})
    means = ({"a": 0.3}, {"a": 0.9}, {"a": 0.5})
    assert guard.merged([content() | {"geometric_mean": mean} for mean in means])["geometric_mean"] == {"a": 0.5}
    merged = guard.merged([content(row(0.5, 9.0)), content(row(0.5, 0.2)), content(row(0.5, 0.1))])  # one bad moment
    assert merged["rows"][0]["spread"] == {"peer": 0.2}


def test_exit_status_of_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", ["guard.py", *map(str, arguments)])
        return guard.main(), capsys.readouterr().out

    runs = {"old": row(0.5), "same": row(0.5), "slow": row(0.8), "other": row(0.8, name="b")}
    for name, found in runs.items():
        timing.write_json(tmp_path / name / "cpu" / "part.json", content(found))
    against = ("--baseline", tmp_path / "old")
    assert main(tmp_path / "same", *against)[0] == 0
    status, said = main(tmp_path / "slow", *against)
    assert status == 1
    assert "WORSE: cpu/part: a: 0.800" in said
    assert main(tmp_path / "other", *against)[0] == 2
    assert main(tmp_path / "same", tmp_path / "slow", *against)[0] == 1
    assert main("--keep", tmp_path / "slow", tmp_path / "same", *against)[0] == 0
    assert main(tmp_path / "slow", *against)[0] == 0


@pytest.mark.parametrize(("model", "worse"), [(timing.cpu(), True), ("another", False), (None, False)])
def test_figures_count_on_the_processor_that_they_were_made_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], model: str | None, worse: bool
) -> None:
    before, now = (content(row(ratio)) for ratio in (0.5, 0.8))
    before["versions"] = {"cpu": model} if model else {"processor": timing.cpu()}
    now["versions"]["cpu"] = timing.cpu()
    for name, figures in (("committed", before), ("run", now)):
        timing.write_json(tmp_path / name / "cpu" / "part.json", figures)
    monkeypatch.setattr(guard, "RESULTS", tmp_path / "committed")
    assert guard.is_worse("part", row(0.8)) is worse
    assert bool(guard.against_committed("part", now)) is worse
    assert guard.judge(tmp_path / "run", guard.RESULTS) == int(worse)
    assert ("no baseline on" in capsys.readouterr().out) is not worse


def test_runs_that_differ_in_processor_or_were_interrupted_are_not_kept(tmp_path: Path) -> None:
    for name, more in (("a", {}), ("b", {"versions": {"cpu": "another"}}), ("c", {"incomplete": True})):
        timing.write_json(tmp_path / name / "cpu" / "part.json", content(row(0.5)) | more)
    for runs in (["a", "b"], ["c"]):
        with pytest.raises(ValueError, match="incomplete, or were made on several processors"):
            guard.keep([tmp_path / run for run in runs], tmp_path / "kept")


def test_committed_figures_are_rows_that_hold_their_limits() -> None:
    files = sorted(guard.RESULTS.glob("*/*.json"))
    assert {path.stem for path in files} >= {"host_cost", "kernels", "p2p"}
    for path in files:
        found = json.loads(path.read_text())
        assert guard.rows_of(found), path
        assert not guard.compare(found, found), path
        for line in found.get("rows", ()):
            assert set(line["ratio"]) == set(line["spread"]) <= set(line["us"]), (path, line["row"])
            # Limits refer to Megatron where it is measured: plain torch, without checks or counts, may take less.
            peer = "megatron" if "megatron" in line["ratio"] else max(line["ratio"], key=line["ratio"].__getitem__)
            assert not replace(bench_mappings.PART, peer=peer).over_limit(line), (path, line["row"])


@pytest.mark.parametrize(
    ("ratio", "spread", "limits", "passes"),
    [
        (1.00, 0.00, guard.row_target(version="2.13.0+cpu"), True),
        (1.02, 0.01, guard.row_target(version="2.13.0+cpu"), False),
        (1.02, 0.02, guard.row_target(version="2.11.0"), True),
        (1.05, 0.30, guard.row_target(version="2.13.0"), True),
        (1.06, 0.30, guard.row_target(version="2.13.0"), False),
        (1.50, 0.00, guard.row_target(version="2.14.0a0+git0"), True),
        (0.97, 0.00, {"limit": guard.STEP}, True),
        (0.98, 0.30, {"limit": guard.STEP}, False),
    ],
)
def test_a_row_is_at_most_as_slow_as_its_peer(
    ratio: float, spread: float, limits: dict[str, float], passes: bool
) -> None:
    missed = replace(bench_mappings.PART, peer="peer").over_limit(row(ratio, spread) | limits)
    assert bool(missed) is not passes


def test_the_mean_of_the_mappings_depends_on_torch() -> None:
    assert [guard.mean_target(version) for version in ("2.11.0", "2.13.1+cu130", "2.14.0.dev", "3.0")] == [
        0.9, 0.9, 1.0, 1.0
    ]  # fmt: skip
