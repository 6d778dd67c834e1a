"""Tuning: what is tried, what machine code rules out, searches that are cut short, tables that count or do not."""

import ast
import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
import tritoncomm_kernels as kernels
from fake_bench import DEVICE, FakeBench
from tiles import EVERY_TARGET, audit, reachable
from tritoncomm_kernels import Config, config, copy, launch, tables
from tritoncomm_kernels.config import config_for, crossover_of, origin_of
from typer.testing import CliRunner

from tritoncomm import cli
from tritoncomm.cli import tune as tune_command
from tritoncomm.core import ops
from tritoncomm.tune import cases, measure, results, search, static, tuner
from tritoncomm.tune.candidates import Candidate, candidates, default, groups
from tritoncomm.tune.cases import Case
from tritoncomm.tune.machine_code import TARGETS
from tritoncomm.tune.tuner import TuneRequest

ROOT = Path(__file__).parents[2]
BF16 = torch.bfloat16


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An empty cache folder for the user's tables, and nothing remembered."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITONCOMM_TABLE", raising=False)
    forget()
    yield
    forget()


def forget() -> None:
    tables.chosen.cache_clear()
    config.crossover.cache_clear()


def tune(*arguments: str) -> Any:
    return CliRunner().invoke(cli.app, ["tune", *arguments])


def process(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    """The command in a process of its own; TRITON_INTERPRET only if given."""
    paths = [str(ROOT), str(ROOT / "kernels"), os.environ.get("PYTHONPATH", "")]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    variables.pop("TRITON_INTERPRET", None)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit "ignore"
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "tritoncomm", "tune", *arguments],
            env=variables | environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip
    finally:
        signal.signal(signal.SIGINT, before)


def reader(tile: int = 4096, **changed: Any) -> dict[str, Any]:
    """A whole table for the test device."""
    entry = {"tile_bytes": tile, "segment_bytes": 256, "num_warps": 8}
    content = results.measured_key(*DEVICE) | {
        "configs": {"pack": {"16": entry}},
        "crossover_bytes": {"pack": {"16": 5}},
    }
    return content | changed


def put(content: Any, path: Path | None = None) -> Path:
    path = path or results.user_path(*DEVICE)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


def tuned(op: str = "pack", unit: int = 16) -> tuple[int, int]:
    found = config_for(op, unit, 4096, 65536, device_name=DEVICE[0], sm_count=DEVICE[1])
    return found.block_rows * found.block_cols, found.num_warps


# Candidates and machine code


@pytest.mark.parametrize(("op", "unit"), groups(), ids=lambda x: str(x))
@pytest.mark.parametrize("lanes", [32, 64])
def test_the_default_is_a_candidate_and_comes_first(op: str, unit: int, lanes: int) -> None:
    tried = candidates(op, unit, lanes)
    assert tried[0] == default(op, unit, lanes)
    assert len(set(tried)) == len(tried) >= 8
    if lanes == 32:
        assert str(tried[0].config(op, unit)) == str(config_for(op, unit, 2**20, 2**20))


def test_tiles_of_any_tensor_are_among_the_reachable_ones() -> None:
    for op, unit in groups():
        found = {str(tile) for tile in reachable(op, unit, default(op, unit))}
        for outer in (1, 2, 3, 5, 17, 100, 4096, 10**6):
            for cols in (1, 3, 16, 100, 513, 4096, 5000, 10**7):
                assert str(config_for(op, unit, outer, cols * unit)) in found


@pytest.mark.parametrize(
    ("op", "unit", "target", "tile", "reason"),
    [
        ("reduce", 8, "gfx942", Candidate(65536, 512, 4), "spills"),
        ("pack", 16, "sm_90", Candidate(32768, 512, 4), "registers, more than 64"),
        ("pack", 16, "sm_80", Candidate(1024, 512, 4), "accesses of 8 bytes, not 16"),
        ("pack", 16, "gfx942", Candidate(2048, 512, 4), "accesses of 8 bytes, not 16"),
    ],
    ids=["spills", "registers", "narrow", "narrow-amd"],
)
def test_bad_machine_code_is_pruned(op: str, unit: int, target: str, tile: Candidate, reason: str) -> None:
    bad, good = static.judge(op, unit, [tile, default(op, unit, TARGETS[target].warp_size)], target)
    assert reason in bad.pruned
    assert good.pruned == ""
    assert good.widths == [16]
    assert good.spills == 0
    assert good.registers <= 128
    verdicts = {tile.label: bad, default(op, unit, TARGETS[target].warp_size).label: good}
    assert tile not in static.rank(op, unit, verdicts, target)


def test_eviction_is_an_axis_of_copies_in_wide_units() -> None:
    """Off by default; a table of it reaches the kernel, and narrow units never have it."""
    for op, unit in groups():
        tried = candidates(op, unit)
        assert not tried[0].evict_first
        doubled = [replace(one, evict_first=not one.evict_first) in tried for one in tried]
        assert set(doubled) == {op != "reduce" and unit in (8, 16)}, (op, unit)
    forget()
    put(reader(configs={"pack": {"16": asdict(Candidate(4096, 512, 4, True))}}))
    assert config_for("pack", 16, 4096, 65536, device_name=DEVICE[0], sm_count=DEVICE[1]).evict_first
    for unit, on in ((16, True), (8, True), (4, False), (1, False)):
        layout = ((64, 8 * unit), (8 * unit, 1), (8, 64, unit), (64 * unit, unit, 1), None, False, False)
        launch = copy._plan("pack", -1, torch.int8, torch.int8, 0, *layout, Config(4, 256, 4, True))[0]
        assert launch is not None
        assert launch.constants["EVICT_FIRST"] is on, unit


AUDITED = [(target, op, unit) for target in TARGETS for op, unit in groups()]


def shipped() -> list[tuple[str, int, Candidate]]:
    """Entries of the tables in the package."""
    folder = ROOT / "kernels" / "tritoncomm_kernels" / "configs"
    found = [tables.read(path) for path in sorted(folder.glob("*.json"))]
    return [
        (op, int(unit), Candidate(**entry))
        for one in found
        for op, units in one.configs.items()
        for unit, entry in units.items()
    ]


@pytest.mark.parametrize("target", EVERY_TARGET)
@pytest.mark.parametrize("op", tables.OPS)
def test_tiles_of_large_tensors_compile_well(op: str, target: str) -> None:
    """The tile of many rows and of one row, in every unit; shipped tables too."""
    tiles = [entry for entry in shipped() if entry[0] == op]
    tiles += [(name, unit, default(op, unit, TARGETS[target].warp_size)) for name, unit in groups() if name == op]
    large = {(op, unit, one.config(op, unit, outer)) for _, unit, one in tiles for outer in (1, 2**20)}
    assert audit(sorted(large, key=str), target) == []


@pytest.mark.slow
@pytest.mark.parametrize(("target", "op", "unit"), AUDITED, ids=lambda x: str(x))
def test_every_reachable_tile_compiles_well(target: str, op: str, unit: int) -> None:
    tried = [default(op, unit, TARGETS[target].warp_size)]
    tried += [entry for name, at, entry in shipped() if (name, at) == (op, unit)]
    tiles = {(op, unit, tile) for one in tried for tile in reachable(op, unit, one)}
    assert audit(sorted(tiles, key=str), target) == []


def test_the_audit_sees_a_bad_tile() -> None:
    good, bad = default("pack", 16), Candidate(32768, 512, 4)
    found = audit([("pack", 16, one.config("pack", 16)) for one in (good, bad)], "sm_90")
    assert "64 x 512 B: pack: " in found[0]
    assert not any("16 x 512 B" in line for line in found)


# Static runs through the command


@pytest.mark.slow
def test_static_runs_are_the_same_byte_for_byte(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compiled in another process without the interpreter, and in this one with it; each compiles anew."""
    arguments = ("--static", "--target", "gfx942", "--op", "pack", "--shape", "4x200", "--dtype", "int64", "--json")
    other = process(*arguments, TRITON_CACHE_DIR=str(tmp_path / "a"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "b"))
    here = tune(*arguments)
    out, err = other.communicate(timeout=100)
    assert (other.returncode, here.exit_code) == (0, 0), err
    assert launch.INTERPRETED
    assert out == here.stdout
    assert len(list((tmp_path / "b").iterdir())) == len(list((tmp_path / "a").iterdir())) > 10
    content = json.loads(out)
    assert content["kind"] == "static"
    assert content["complete"] is True
    assert {op: list(units) for op, units in content["ranking"].items()} == {"pack": ["8"]}
    ranked = content["ranking"]["pack"]["8"]
    assert len(content["results"]) == len(candidates("pack", 8, 64))
    pruned = {key.rpartition(" ")[2] for key, one in content["results"].items() if one["pruned"]}
    assert pruned
    assert {*ranked} | pruned == {one.label for one in candidates("pack", 8, 64)}
    assert not {*ranked} & pruned
    costs = [content["results"][f"pack 8 {label}"]["cost"] for label in ranked]
    assert costs == sorted(costs)


def test_a_static_ranking_is_no_table(tmp_path: Path) -> None:
    put(results.static_key("sm_90") | {"results": {}})
    with pytest.warns(RuntimeWarning, match="not a measured table"):
        assert tables.chosen(*DEVICE) == ()


# Measured runs, on a device that is made up


CASE = TuneRequest(ops=["pack"], shapes=["64x1024"])


def test_a_search_writes_the_table_that_config_for_reads() -> None:
    assert tuned() == (8192, 4)
    forget()
    outcome = tuner.measure(CASE, FakeBench())
    assert outcome.state == search.COMPLETE
    assert outcome.path == results.user_path(*DEVICE)
    assert outcome.content["configs"] == {"pack": {"16": asdict(Candidate(16384, 1024, 4))}}
    assert tuned() == (16384, 4)
    assert origin_of("pack", 16, *DEVICE) == str(outcome.path)
    assert origin_of("unpack", 16, *DEVICE) == "built in"
    limit = outcome.content["crossover_bytes"]["pack"]["16"]
    assert limit == 2**17
    found = crossover_of("pack", *DEVICE)
    assert (found.least, found.most, set(found.by_unit)) == (limit, limit, set(tables.UNITS))
    assert crossover_of("reduce", *DEVICE) is None


def test_an_interrupted_search_goes_on_where_it_stopped() -> None:
    whole = FakeBench()
    tuner.measure(CASE, whole)
    reference = json.loads(results.user_path(*DEVICE).read_text())
    results.user_path(*DEVICE).unlink()

    first = FakeBench(interrupt_after=7)
    outcome = tuner.measure(CASE, first)
    assert outcome.state == search.INTERRUPTED
    assert len(json.loads(outcome.path.read_text())["results"]) == 7
    assert outcome.left == len(reference["results"]) - 7
    second = FakeBench()
    assert tuner.measure(CASE, second).state == search.COMPLETE
    assert first.timed + second.timed == whole.timed
    assert json.loads(results.user_path(*DEVICE).read_text()) == reference
    third = FakeBench()
    assert tuner.measure(CASE, third).state == search.COMPLETE
    assert (third.timed, third.compared) == ([], 0)


def test_the_budget_ends_a_search_between_tasks() -> None:
    clock = [0.0]
    bench = FakeBench(clock=clock)
    outcome = tuner.measure(TuneRequest(ops=["pack"], shapes=["64x1024"], budget=5), bench, clock=lambda: clock[0])
    assert outcome.state == search.OUT_OF_TIME
    assert len(bench.timed) == 5
    assert outcome.content["complete"] is False
    assert (
        tune_command.verdict(
            outcome, SimpleNamespace(print=lambda *a, **k: None, is_terminal=False, stderr=False, width=80)
        )
        == 0
    )


def test_a_failure_saves_what_is_done() -> None:
    done: dict[str, int] = {}
    saved = []

    def fail() -> list[int]:
        raise RuntimeError("on purpose")

    todo = [search.Task("g", ("a",), lambda: [1]), search.Task("g", ("b",), fail)]
    with pytest.raises(RuntimeError, match="on purpose"):
        search.search(todo, done, lambda: saved.append(dict(done)))
    assert saved == [{"a": 1}]


def test_a_wrong_candidate_never_wins_and_fails_the_command() -> None:
    outcome = tuner.measure(CASE, FakeBench(wrong="16384/1024/4"))
    assert outcome.content["configs"]["pack"]["16"] == asdict(Candidate(32768, 1024, 8))
    assert len(outcome.wrong) == 1
    said = []
    assert (
        tune_command.verdict(
            outcome,
            SimpleNamespace(print=lambda text, **k: said.append(text), is_terminal=False, stderr=False, width=80),
        )
        == 1
    )
    assert "16384/1024/4: 3 of 7 elements differ" in said[0]


def measured(op: str, unit: int, times: dict[str, dict[Candidate, float | None]]) -> dict[str, dict[str, Any]]:
    found = {}
    for case, row in times.items():
        for one, us in row.items():
            sizes = asdict(one)
            result = {"wrong": "x"} if us is None else {"us": us}
            found[f"{case} {one.label}"] = {"op": op, "unit": unit, "case": case} | sizes | result
    return found


def test_the_winner_is_the_best_over_all_cases() -> None:
    first, a, b = default("pack", 16), Candidate(4096, 256, 4), Candidate(32768, 512, 8)

    def winner(**times: dict[Candidate, float | None]) -> dict[str, int] | None:
        return results.configs(measured("pack", 16, times)).get("pack", {}).get("16")

    def entry(one: Candidate) -> dict[str, int]:
        return asdict(one)

    assert winner(x={first: 10, a: 5, b: 9}, y={first: 10, a: 16, b: 8}) == entry(b), "the geometric mean decides"
    assert winner(x={first: 10, a: 9.95}) == entry(first), "less than one percent is noise"
    assert winner(x={first: 10, a: 5, b: 9}, y={first: 10}) == entry(a), "a case that is cut short does not count"
    assert winner(x={first: 10, a: 5}, y={first: 10, a: None}) == entry(first), "wrong once is wrong"
    assert winner(x={first: None, a: 5}) is None


def test_the_crossover_is_where_triton_stays_no_slower() -> None:
    def limit(ours: dict[int, float], drop: int = 0) -> dict[str, dict[str, int]]:
        rows = {
            str(size): {"op": "pack", "unit": 8, "bytes": size, "torch_us": 10.0, "triton_us": ours.get(size, 9.0)}
            for size in results._SIZES[drop:]
        }
        return results.crossovers(rows)

    assert limit({}) == {"pack": {"8": 0}}
    assert limit({2**12: 12, 2**13: 8, 2**14: 11}) == {"pack": {"8": 2**15}}
    assert limit({2**12: 10.1}) == {"pack": {"8": 0}}
    assert limit(dict.fromkeys(results._SIZES, 99.0)) == {"pack": {"8": 2**27}}
    assert limit({}, drop=1) == {}


# The bench itself, in the interpreter


def interpreted() -> measure.Bench:
    return measure.Bench(torch.device("cpu"), *DEVICE, None, 32, lambda call: [call(), 3.0][1], lambda: None)


BENCHED = [
    Case("pack", 5, 40, 4, BF16),
    Case("pack", 3, 10, 4, torch.float32),
    Case("unpack", 5, 40, 4, torch.int8),
    Case("unpack", 4, 9, 2, torch.complex64),
    Case("reduce", 1, 100, 3, torch.float32),
]


@pytest.mark.parametrize("case", BENCHED, ids=lambda case: case.label)
def test_the_bench_checks_bits_before_it_times(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, one = interpreted(), default(case.op, case.unit)
    assert bench.check(case, one) == ""
    assert bench.time(case, one) == 3.0
    real = getattr(kernels, case.op)

    def misses_one(source: torch.Tensor, target: torch.Tensor, **options: Any) -> int:
        moved = real(source, target, **options)
        target.view(-1)[-2:-1].view(torch.uint8).bitwise_xor_(1)
        return moved

    monkeypatch.setattr(kernels, case.op, lambda *a, **k: 0)
    assert "differ from plain torch" in bench.check(case, one), "a kernel that writes nothing, after one that did"
    monkeypatch.setattr(kernels, case.op, misses_one)
    assert bench.check(case, one).startswith("1 of ")


@pytest.mark.parametrize("op", tables.OPS)
def test_the_bench_times_both_paths(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = ops.path_for
    monkeypatch.setattr(ops, "path_for", lambda *a, **names: seen.append(real(*a, **names)) or seen[-1])
    monkeypatch.setattr(measure, "_CALLS", 1)
    assert min(interpreted().paths(Case(op, 2, 16, 2, torch.float32))) > 0
    assert set(seen) == {"torch", "triton"}


def test_a_search_with_real_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "_SIZES", [2**12])
    monkeypatch.setattr(measure, "_CALLS", 1)
    outcome = tuner.measure(TuneRequest(ops=["reduce"], shapes=["64"], worlds=[2]), interpreted())
    assert (outcome.state, outcome.wrong) == (search.COMPLETE, [])
    assert [one["us"] for one in outcome.content["results"].values() if "us" in one] == [3.0] * 8
    assert "2" in outcome.content["configs"]["reduce"]
    assert "2" in outcome.content["crossover_bytes"]["reduce"]


def test_architectures_of_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measure.architecture(SimpleNamespace(major=10, minor=3)) == "sm_103"
    monkeypatch.setattr(torch.version, "hip", "6.4.43482")
    assert measure.architecture(SimpleNamespace(gcnArchName="gfx942:sramecc+:xnack-")) == "gfx942"


def test_without_a_gpu_the_command_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for arguments in ((), ("--static",), ("--model", "llama3-8b")):
        result = tune(*arguments)
        assert result.exit_code == 2
        assert "tritoncomm tune --static --target sm_90" in result.stderr
        assert "Traceback" not in result.stderr


# Which table counts


def test_the_users_own_table_comes_first_then_the_shipped_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path / "package")
    monkeypatch.setattr(tables, "source_hash", lambda: "0123")
    entry = {"tile_bytes": 2048, "segment_bytes": 256, "num_warps": 2}
    content = reader(source="0123", triton="0.1") | {"configs": {"pack": {"16": entry}, "unpack": {"16": entry}}}
    shipped_path = put(content, tmp_path / "package" / "configs" / tables.table_name(DEVICE[0]))
    assert tuned() == (2048, 2), "a shipped table counts with any version of Triton"
    own = put(reader(source="0123"))
    forget()
    assert tuned() == (4096, 8)
    assert tuned("unpack") == (2048, 2), "entries the user's table does not have come from the shipped one"
    assert origin_of("pack", 16, *DEVICE) == str(own)
    assert origin_of("unpack", 16, *DEVICE) == str(shipped_path)


def test_the_variable_names_the_only_table_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(reader())
    other = put(reader(tile=2048), tmp_path / "other.json")
    monkeypatch.setenv("TRITONCOMM_TABLE", str(other))
    assert tuned() == (2048, 8)
    forget()
    monkeypatch.setenv("TRITONCOMM_TABLE", "none")
    assert origin_of("pack", 16, *DEVICE) == "built in"
    forget()
    monkeypatch.setenv("TRITONCOMM_TABLE", str(tmp_path / "missing.json"))
    with pytest.warns(RuntimeWarning, match="missing.json is ignored"):
        assert origin_of("pack", 16, *DEVICE) == "built in"


def test_the_variable_may_name_a_folder_with_a_table_per_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, sm_count, tile in ((*DEVICE, 2048), (DEVICE[0], 14, 4096), ("Other GPU", 7, 1024)):
        put(reader(tile, device=name, sm_count=sm_count), tmp_path / tables.table_name(name, sm_count))
    monkeypatch.setenv("TRITONCOMM_TABLE", str(tmp_path))
    found = {(name, n): tables.chosen(name, n) for name, n in (DEVICE, ("Other GPU", 7), (DEVICE[0], 14))}
    assert [one.configs["pack"]["16"]["tile_bytes"] for (one,) in found.values()] == [2048, 1024, 4096]
    assert tables.chosen(DEVICE[0], 0)[0].sm_count == 14, "of the largest part"
    with pytest.warns(RuntimeWarning, match=r"other-gpu-8.json is ignored: .*No such file"):
        assert tables.chosen("Other GPU", 8) == ()


def test_a_search_writes_into_a_folder_by_the_name_of_the_device(tmp_path: Path) -> None:
    outcome = tuner.measure(TuneRequest(ops=["pack"], shapes=["64x1024"], out=tmp_path), FakeBench())
    assert outcome.path == tmp_path / "test-gpu-7.json"
    assert outcome.path.is_file()


def test_plan_finds_the_users_own_table() -> None:
    plan = ("plan", "sp2hp", "--shape", "4096x8192", "--world", "8", "--device", DEVICE[0])
    unknown = CliRunner().invoke(cli.app, plan)
    assert (unknown.exit_code, f"nothing is known of a device '{DEVICE[0]}'" in unknown.stderr) == (2, True)
    forget()
    path = put(reader())
    told = CliRunner().invoke(cli.app, plan).output
    assert f"({path})" in told.replace("\n", "")
    assert "no tuned table" not in told


BAD = {
    "half": (json.dumps(reader())[:40], "not readable as JSON"),
    "a-list": ([1], "not a measured table"),
    "newer": (reader(format=tables.FORMAT + 1), "newer than"),
    "another-gpu": (reader(device="Other GPU"), "for Other GPU"),
    "another-part": (reader(sm_count=3), "with 3 SMs"),
    "other-kernels": (reader(source="0"), "other kernels"),
    "other-triton": (reader(triton="1.0"), "Triton 1.0"),
    "no-count": (reader(sm_count="7"), "sm_count"),
    "odd-tile": (reader(tile=5000), "tile_bytes is 5000"),
    "huge-tile": (reader(tile=2**20), "no power of two from 64"),
    "unknown-op": (reader(configs={"copy": {}}), "configs.copy"),
    "unknown-unit": (reader(configs={"pack": {"3": {}}}), "configs.pack"),
    "missing-field": (reader(configs={"pack": {"16": {"tile_bytes": 64}}}), "configs.pack.16"),
    "negative": (reader(crossover_bytes={"pack": {"16": -1}}), "crossover_bytes.pack.16"),
}


@pytest.mark.parametrize(("content", "reason"), BAD.values(), ids=BAD)
def test_a_table_that_does_not_count_is_ignored_with_one_warning(content: Any, reason: str) -> None:
    path = put(content)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            assert origin_of("pack", 16, *DEVICE) == "built in"
            assert crossover_of("pack", *DEVICE) is None
    assert len(caught) == 1
    assert f"tuned table {path} is ignored: " in str(caught[0].message)
    assert reason in str(caught[0].message)


@pytest.mark.parametrize("name", ["half", "newer", "another-gpu", "other-kernels"])
def test_a_search_starts_anew_beside_a_file_it_cannot_go_on_with(name: str) -> None:
    path = put(BAD[name][0])
    before = path.read_text()
    outcome = tuner.measure(CASE, FakeBench())
    assert len(outcome.warnings) == 1
    assert ("newer than" in outcome.warnings[0]) == (name == "newer")
    assert path.with_name(f"{path.name}.old").read_text() == before
    assert tuned() == (16384, 4)


def test_a_table_is_written_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "t" / "table.json"
    results.write(path, {"a": 1})

    def fail(source: str, target: Path) -> None:
        assert json.loads(path.read_text())["a"] == 1
        assert json.loads(Path(source).read_text())["a"] == 2
        raise OSError("on purpose")

    monkeypatch.setattr(results.os, "replace", fail)
    with pytest.raises(OSError, match="on purpose"):
        results.write(path, {"a": 2})
    assert [one.name for one in path.parent.iterdir()] == ["table.json"]
    assert json.loads(path.read_text()) == {"a": 1, "torch": torch.__version__}


def test_keys_follow_the_kernels_and_triton() -> None:
    key = results.measured_key(*DEVICE)
    assert key["triton"] == triton.__version__
    assert key["source"] == tables.source_hash()
    assert len(key["source"]) == 16
    sources = {
        path.name
        for path in (ROOT / "kernels" / "tritoncomm_kernels").glob("*.py")
        if "@triton.jit" in path.read_text()
        and path.name not in ("cross_entropy.py", "id_sort.py", "row_copy.py", "row_sums.py", "segment_kernel.py")
    }
    assert set(tables._SOURCES) == sources, "every file with a kernel whose tiles a table holds is part of the key"


def gpu(shape: tuple[int, ...], stride: tuple[int, ...] | None = None, address: int = 512, dtype: Any = BF16) -> Any:
    """What `ops` asks a tensor on a GPU."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    if stride is not None:
        meta = torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    asked = {name: getattr(meta, name) for name in ("shape", "stride", "nbytes", "element_size", "dim")}
    return SimpleNamespace(**asked, is_cuda=True, get_device=lambda: 0, data_ptr=lambda: address)


@pytest.fixture
def crossovers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose crossovers are 1000, 2000, ... bytes; unit 4 was not measured."""
    sizes = {"16": 1000, "8": 2000, "2": 10**5, "1": 10**6}
    put(reader(crossover_bytes={"pack": sizes, "unpack": sizes, "reduce": {"2": 3000, "4": 1000}}))
    monkeypatch.setattr(config, "device_key", lambda device: {"device_name": DEVICE[0], "sm_count": DEVICE[1]})


@pytest.mark.parametrize(
    ("x", "cut", "limit"),
    [
        (lambda n: gpu((n, 64)), (1, 4), 1000),  # runs of 32 bytes
        (lambda n: gpu((n, 64)), (1, 16), 2000),  # of 8
        (lambda n: gpu((n, 64)), (1, 32), 10**6),  # of 4, a unit that was not measured
        (lambda n: gpu((n, 64)), (1, 64), 10**5),
        (lambda n: gpu((n, 64), (68, 1)), (1, 4), 2000),  # rows 136 bytes apart
        (lambda n: gpu((n, 64), (1, n)), (1, 4), 10**5),  # a row that is not contiguous
        (lambda n: gpu((n, 64), address=520), (1, 4), 2000),
        (lambda n: gpu((n, 64), address=514), (1, 4), 10**5),
        (lambda n: gpu((n, 64)), (1, 2, (24, 40)), 1000),
        (lambda n: gpu((n, 64)), (1, 2, (28, 36)), 2000),
        (lambda n: gpu((n, 128), dtype=torch.int8), (1, 128), 10**6),
        (lambda n: gpu((n, 64)), (), 1000),
    ],
)  # fmt: skip
def test_small_tensors_take_torch_below_the_crossover_of_their_unit(
    crossovers: None, x: Any, cut: tuple[Any, ...], limit: int
) -> None:
    rows = limit // 128  # of 128 bytes
    assert ops.path_for(x(rows), "pack", *cut) == "torch"
    assert ops.path_for(x(rows + 1), "pack", *cut) == "triton"
    with ops.path("triton"):
        assert ops.path_for(x(1), "pack", *cut) == "triton"


def test_a_wire_has_the_unit_of_what_it_is_unpacked_into(crossovers: None) -> None:
    for world, limit in ((4, 1000), (16, 2000), (64, 10**5)):
        for rows, path in ((limit // 128, "torch"), (limit // 128 + 1, "triton")):
            wire = gpu((world, rows, 64 // world))
            assert ops.path_for(wire, "unpack", 1, world, None, (rows, 64)) == path
            assert ops.path_for(gpu((rows, 64)), "unpack", 1, world) == path


def test_a_sum_has_the_unit_of_its_elements(crossovers: None) -> None:
    for dtype, limit in ((BF16, 3000), (torch.float32, 1000)):
        assert ops.path_for(gpu((2, (limit - 1) // 8), dtype=dtype), "reduce") == "torch"
        assert ops.path_for(gpu((2, limit), dtype=dtype), "reduce") == "triton"


def test_units_come_from_the_first_table_that_has_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.resources, "files", lambda package: tmp_path / "package")
    monkeypatch.setattr(tables, "source_hash", lambda: "0123")
    shipped = reader(source="0123", crossover_bytes={"pack": {"16": 7, "2": 70}})
    put(shipped, tmp_path / "package" / "configs" / tables.table_name(DEVICE[0]))
    put(reader(source="0123"))
    found = crossover_of("pack", *DEVICE)
    assert (found.least, found.most, found.by_unit) == (5, 70, {16: 5, 2: 70, 1: 70, 4: 70, 8: 70})


def test_no_unit_is_worked_out_where_all_agree(crossovers: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "split_by", None)
    assert ops.path_for(gpu((7, 64)), "pack", 1, 4) == "torch"
    assert ops.path_for(gpu((10**6, 64)), "pack", 1, 4) == "triton"
    with pytest.raises(TypeError):
        ops.path_for(gpu((70, 64)), "pack", 1, 4)


def test_cpu_tensors_ask_for_no_table(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops, "crossover", None)
    assert ops.path_for(torch.ones(1)) == "torch"
    assert config.device_key(-1) == {}


# Arguments and models


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--op", "copy"), "--op 'copy' is none of pack, unpack, reduce"),
        (("--shape", "4x"), "--shape must be integers like 4096,1,8192 or 4096x1x8192, not '4x'"),
        (("--shape", "0x8"), "--shape '0x8': 0 is below 1"),
        (("--shape", "8x8", "--dtype", "bf17"), "'bf17' is no dtype"),
        (("--shape", "8x8", "--world", "0"), "world 0 is not in 1.."),
        (("--shape", "8x8", "--world", "65", "--op", "reduce"), "world 65 is not in 1..64"),
        (("--shape", "8x8", "--dtype", "fp8_e5m2", "--op", "reduce"), "--op reduce cannot sum float8_e5m2"),
        (("--world", "8"), "--world and --dtype go with --shape"),
        (("--tensor-parallel", "8"), "goes with --model"),
        (("--tokens", "64", "--shape", "8x8"), "--tokens goes with --model"),
        (("--model", "llama3-8b", "--shape", "8x8"), "--model has shapes of its own"),
        (("--model", "llama9"), "model 'llama9' is none of llama3-8b"),
        (("--model", "llama3-8b", "--tensor-parallel", "3"), "heads 32 does not divide over 3 tensor-parallel ranks"),
        (("--model", "llama3-8b", "--tensor-parallel", "1"), "--tensor-parallel must be 2 or more, not 1"),
        (("--model", "llama3-8b", "--tokens", "0"), "tokens must be positive"),
        (("--budget", "0"), "--budget must be a positive"),
        (("--target", "sm_90"), "--target goes with --static"),
        (("--static", "--target", "sm_20"), "--target 'sm_20' is none of sm_80"),
        (("--static", "--target", "sm_90", "--out", "/dev/null"), "not a regular file"),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_bad_arguments_say_what_is_wrong(arguments: tuple[str, ...], message: str) -> None:
    result = tune(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""


def test_a_place_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(tuner, "search", None)
    result = tune("--static", "--target", "sm_90", "--out", str(tmp_path / "file" / "x.json"))
    assert result.exit_code == 2
    assert str(tmp_path / "file") in result.stderr.replace("\n", "")
    monkeypatch.setattr(os, "access", lambda *a: False)
    result = tune("--static", "--target", "sm_90", "--out", str(tmp_path / "x.json"))
    assert result.exit_code == 2
    assert "no file can be made in" in result.stderr


def test_the_list_says_what_a_model_exchanges() -> None:
    result = tune("--model", "llama3-70b", "--tensor-parallel", "8", "--tokens", "4096", "--list", "--json")
    assert result.exit_code == 0
    rows = json.loads(result.stdout)
    assert {"op": "unpack", "outer": 4096, "row": 8192, "world": 8, "dtype": "bfloat16", "unit": 16,
            "bytes": 2**26, "candidates": 80, "note": "llama3-70b hidden"} in rows  # fmt: skip
    sizes = {(row["op"], row["outer"], row["row"]) for row in rows}
    assert ("pack", 512, 64 * 128) in sizes
    assert ("pack", 512, 8 * 128) in sizes
    assert ("reduce", 1, 512 * 8192) in sizes
    shown = tune("--model", "llama3-70b", "--list")
    assert shown.exit_code == 0
    assert "cases of llama3-70b" in shown.stdout
    assert "vocabulary" in shown.stdout
    assert tune("--list", "--op", "reduce").exit_code == 0


def test_shapes_worlds_and_dtypes_are_combined() -> None:
    request = TuneRequest(ops=["pack"], shapes=["2x3x40", "6x40"], worlds=[2, 4], dtypes=["bf16", "int8"])
    found = tuner.cases_of(request)
    assert [(one.outer, one.row, one.world, one.dtype) for one in found] == [
        (6, 40, world, dtype) for world in (2, 4) for dtype in (BF16, torch.int8)
    ], "the same rows come once"
    assert [one.unit for one in found] == [8, 4, 4, 2]


def test_the_sweep_covers_every_entry_of_a_table() -> None:
    assert {(one.op, one.unit) for one in cases.sweep()} == set(groups())
    for op in ("pack", "unpack"):  # eviction is chosen by sizes that fit a cache and sizes that do not
        assert {one.nbytes >> 20 for one in cases.sweep([op]) if one.unit == 16} == {16, 64, 256}


def test_published_models() -> None:
    """Their parameter counts come out right, which they would not with a wrong size: embeddings, attention and MLPs."""
    for name, layers, billions in (("llama3-8b", 32, 8.0), ("llama3-70b", 80, 70.6), ("qwen3-32b", 64, 32.8)):
        one = cases.MODELS[name]
        attention = one.hidden * one.head_dim * 2 * (one.heads + one.kv_heads)
        count = 2 * one.vocab * one.hidden + layers * (attention + 3 * one.hidden * one.ffn)
        assert count / 1e9 == pytest.approx(billions, rel=0.01)


def test_a_model_from_a_file(tmp_path: Path) -> None:
    sizes = {"hidden": 64, "heads": 8, "kv_heads": 2, "head_dim": 8, "ffn": 128, "vocab": 100}
    path = tmp_path / "tiny.json"
    path.write_text(json.dumps(sizes))
    found = cases.from_model(cases.read_model(str(path)), 4, 16, BF16, name="tiny")
    assert ("unpack", 16, 100, 4) in {(one.op, one.outer, one.row, one.world) for one in found}
    assert not any("key heads" in one.note for one in found), "2 key heads cannot be cut over 4 ranks"
    for changed, message in (
        ({"hidden": 0}, "hidden must be a positive integer, not 0"),
        ({"heads": "8"}, "heads must be a positive integer, not '8'"),
        ({"layers": 3}, "unknown field layers"),
    ):
        path.write_text(json.dumps(sizes | changed))
        with pytest.raises(ValueError, match=message):
            cases.read_model(str(path))
    path.write_text(json.dumps({"hidden": 64}))
    with pytest.raises(ValueError, match="no field heads, kv_heads"):
        cases.read_model(str(path))
    path.write_text("{")
    with pytest.raises(ValueError, match="not readable as JSON"):
        cases.read_model(str(path))
    path.write_text("[1]")
    with pytest.raises(ValueError, match="not an object"):
        cases.read_model(str(path))


# Documentation and place


def test_tuning_knows_neither_pipelines_nor_sharded_tensors() -> None:
    for path in sorted((ROOT / "tritoncomm" / "tune").glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert not any(name.startswith(("tritoncomm.p2p", "tritoncomm.tensor")) for name in names), path.name


def test_the_documentation_lists_every_option() -> None:
    text = (ROOT / "docs" / "tuning.md").read_text()
    listed = {line.split("`")[1].split()[0] for line in text.splitlines() if line.startswith("| `--")}
    found = {part for part in tune("--help").stdout.split() if part.startswith("--") and part != "--help"}
    wanted = {name for one in typer_options() for name in one}
    assert listed == wanted
    assert wanted <= found


def typer_options() -> list[list[str]]:
    """The long names of every option of the tuner."""
    import typer.main

    (found,) = [one for one in typer.main.get_group(cli.app).commands.items() if one[0] == "tune"]
    return [[name for name in one.opts if name.startswith("--")] for one in found[1].params if one.name != "help"]
