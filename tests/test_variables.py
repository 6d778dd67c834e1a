"""The TRITONCOMM_* variables: read at import and by initialize(), one meaning of "off", blocks that go first."""

import ast
import itertools
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tritoncomm_kernels import tables

import tritoncomm
from tritoncomm import ArgumentError, record, variables
from tritoncomm.core import backend, ops
from tritoncomm.debug import signals

ROOT = Path(__file__).parents[1]
OFF = ("", " ", "0", "false", "False", "no", "NO", "off", "Off")


@pytest.fixture(autouse=True)
def _read_again_afterwards(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in ("PATH", "CHECK", "TABLE", "FLIGHT", "FLIGHT_SIGNALS", "STRICT", "MEGATRON"):
        monkeypatch.delenv(f"TRITONCOMM_{name}", raising=False)
    yield
    monkeypatch.undo()
    variables.read()


@pytest.mark.parametrize("text", ["²", "9" * 5000, "10" * 12])
def test_numbers_that_no_counter_reaches_are_none(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setenv("TRITONCOMM_CHECK", f"hash:{text}")
    monkeypatch.setenv("TRITONCOMM_FLIGHT", f"{text}:/logs")
    with pytest.warns(RuntimeWarning, match="hash:1000 is taken"):
        variables.read()
    assert variables.HASH.value == variables.HASH_EVERY
    assert variables.FLIGHT.value[0] == variables.FLIGHT_CALLS


def test_a_misspelt_variable_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONCOMM_FLIHGT", "1")
    with pytest.warns(RuntimeWarning, match="TRITONCOMM_FLIHGT: no such variable; there are .*TRITONCOMM_FLIGHT, "):
        tritoncomm.initialize()
    tritoncomm.destroy()
    assert list(variables.unknown()) == ["TRITONCOMM_FLIHGT"]


def test_the_advice_of_an_error_is_what_the_program_does_not_do_yet() -> None:
    assert backend.advice().endswith("TRITONCOMM_FLIGHT=1 for a record")
    with variables.FLIGHT.override((16, "")):
        assert backend.advice().endswith("TRITONCOMM_CHECK=1, which names the rank and its call")
        with variables.CHECK.override(True):
            assert not backend.advice()


def test_a_text_that_is_no_value_of_check_mode_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONCOMM_CHECK", "hahs")
    with pytest.warns(RuntimeWarning, match="switch .1, on, 0, off., hash or hash:N, not 'hahs'; every call is comp"):
        variables.read()
    assert variables.CHECK.value
    monkeypatch.delenv("TRITONCOMM_CHECK")
    for text in ("hahs", "hash:", "hash:0", "hash:-3", "1:2"):
        with pytest.raises(ArgumentError, match="initialize: check must be"):
            tritoncomm.initialize(check=text)
    assert not tritoncomm.groups.groups


@pytest.mark.parametrize("text", OFF)
def test_off_is_off_for_all_variables(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    for name in ("TRITONCOMM_PATH", "TRITONCOMM_CHECK", "TRITONCOMM_TABLE", "TRITONCOMM_STRICT"):
        monkeypatch.setenv(name, text)
    variables.read()
    assert not variables.STRICT.value
    nothing = "none" if text.strip() else ""
    assert variables.effective() == {
        "TRITONCOMM_PATH": "auto", "TRITONCOMM_CHECK": "off", "TRITONCOMM_MEGATRON": "on", "TRITONCOMM_TABLE": nothing
    }  # fmt: skip
    assert ops.path_for(torch.ones(1)) == "torch"
    assert not tritoncomm.p2p.hop.checking()
    assert not nothing or tables.chosen("Some GPU", 1) == ()


def test_every_combination_reads_as_its_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    paths = {"": "auto", "off": "auto", "auto": "auto", "torch": "torch", "triton": "triton"}
    checks = {"": "off", "no": "off", "1": "on", "true": "on", "hash": "hash:1000", "HASH:5": "hash:5"}
    named = {"": "", "none": "none", "FALSE": "none", "/t.json": "/t.json"}
    megatrons = {"": "on", "1": "on", "off": "off"}
    for path, check, megatron, table in itertools.product(paths, checks, megatrons, named):
        for name, value in (("PATH", path), ("CHECK", check), ("MEGATRON", megatron), ("TABLE", table)):
            monkeypatch.setenv(f"TRITONCOMM_{name}", value)
        variables.read()
        assert list(variables.effective().values()) == [paths[path], checks[check], megatrons[megatron], named[table]]


def test_a_misspelt_switch_of_an_a_b_run_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONCOMM_MEGATRON", "offf")
    variables.read()
    with pytest.raises(ArgumentError, match=r"TRITONCOMM_MEGATRON must be a switch .* not 'offf'"):
        tritoncomm.patch_megatron()
    assert variables.effective()["TRITONCOMM_MEGATRON"] == "offf", "ranks compare it"


def test_initialize_reads_them_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONCOMM_PATH", "triton")
    monkeypatch.setenv("TRITONCOMM_CHECK", "1")
    assert (ops.forced_path(), tritoncomm.p2p.hop.checking()) == ("auto", False)
    tables.chosen("Some GPU", 1)
    monkeypatch.setenv("TRITONCOMM_TABLE", "/no/such/table.json")
    try:
        tritoncomm.initialize()
    finally:
        tritoncomm.destroy()
    assert (ops.forced_path(), tritoncomm.p2p.hop.checking()) == ("triton", True)
    with pytest.warns(RuntimeWarning, match="No such file"):
        tables.chosen("Some GPU", 1)


@pytest.mark.parametrize(("check", "value"), [(True, "on"), ("hash:7", "hash:7"), (False, "off"), (None, "hash:1000")])
def test_initialize_turns_check_mode_on_and_off(
    monkeypatch: pytest.MonkeyPatch, check: bool | str | None, value: str
) -> None:
    monkeypatch.setenv("TRITONCOMM_CHECK", "hash")
    try:
        tritoncomm.initialize(check=check)
        assert variables.effective()["TRITONCOMM_CHECK"] == value
        assert (record.hooks.observer is None) is (value == "off")
    finally:
        tritoncomm.destroy()


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("", (0, "")), ("off", (0, "")), ("1", (4096, "")), ("yes", (4096, "")), ("250", (250, "")),
        ("/logs", (4096, "/logs")), ("250:/logs", (250, "/logs")),
    ],
)  # fmt: skip
def test_the_record_has_a_number_of_calls_and_a_folder(
    monkeypatch: pytest.MonkeyPatch, text: str, value: tuple[int, str]
) -> None:
    monkeypatch.setenv("TRITONCOMM_FLIGHT", text)
    monkeypatch.setattr(signals, "install", lambda: None)
    variables.FLIGHT.read()
    assert variables.FLIGHT.value == value


@pytest.mark.parametrize(("flight", "text", "on"), [("1", "1", True), ("1", "off", False), ("", "1", False)])
def test_signals_write_the_record_only_where_both_variables_say_so(
    monkeypatch: pytest.MonkeyPatch, flight: str, text: str, on: bool
) -> None:
    handled: list[bool] = []
    monkeypatch.setattr(signals, "install", lambda: None)
    monkeypatch.setattr(signals, "handle", handled.append)
    monkeypatch.setenv("TRITONCOMM_FLIGHT", flight)
    monkeypatch.setenv("TRITONCOMM_FLIGHT_SIGNALS", text)
    variables.read()
    assert handled[-1] is on


def test_a_block_goes_before_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    with tritoncomm.path("torch"), tritoncomm.p2p.check(False):
        monkeypatch.setenv("TRITONCOMM_PATH", "triton")
        monkeypatch.setenv("TRITONCOMM_CHECK", "1")
        variables.read()
        assert (ops.forced_path(), tritoncomm.p2p.hop.checking()) == ("torch", False)
        with tritoncomm.path("auto"):
            assert ops.forced_path() == "auto"
        assert ops.forced_path() == "torch"
    assert (ops.forced_path(), tritoncomm.p2p.hop.checking()) == ("triton", True)


def test_an_unknown_path_is_refused_at_its_first_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITONCOMM_PATH", "fast")
    variables.read()
    with pytest.raises(ArgumentError, match="TRITONCOMM_PATH must be one of auto, torch, triton, not 'fast'"):
        ops.path_for(torch.ones(1))
    with pytest.raises(ArgumentError, match="path must be one of"):
        tritoncomm.path("fast")


def test_each_variable_is_named_in_one_module_and_in_the_doctor() -> None:
    named: dict[str, list[str]] = {}
    for path in sorted([*(ROOT / "tritoncomm").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]):
        module = path.parent.name if path.stem == "__init__" else path.stem
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and str(node.value).startswith("TRITONCOMM_"):
                named.setdefault(str(node.value).split()[0], []).append(module)
    del named["TRITONCOMM_"]  # doctor's look for names that mean nothing
    assert {name: sorted({*stems} - {"doctor", "__init__"}) for name, stems in named.items()} == {
        "TRITONCOMM_PATH": ["variables"], "TRITONCOMM_CHECK": ["variables"], "TRITONCOMM_TABLE": ["tables"],
        "TRITONCOMM_FLIGHT": ["variables"], "TRITONCOMM_FLIGHT_SIGNALS": ["variables"],
        "TRITONCOMM_STRICT": ["variables"], "TRITONCOMM_NODE": ["variables"],
        "TRITONCOMM_MEGATRON": ["variables"],
    }  # fmt: skip


def test_errors_of_the_library_are_public() -> None:
    for error in ("PeerError", "MismatchError"):
        assert issubclass(getattr(tritoncomm, error), tritoncomm.CommError)
        assert error in tritoncomm.__all__
