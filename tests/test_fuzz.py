"""Drawn inputs of every kind: a right answer or an error by name; and that the harness sees what is neither."""

from dataclasses import replace
from typing import Any

import fuzz
import fuzz_files
import pytest
from fuzz_calls import run_call, verdict
from hypothesis import strategies as st
from mapping_cases import FUNCTIONS, Call
from pool import Pool


@pytest.mark.parametrize("name", list(fuzz.DOMAINS))
def test_drawn_inputs(pool: Pool, name: str) -> None:
    cases = fuzz.DOMAINS[name].share // 2  # as many again are drawn in `make fuzz`
    assert fuzz.fuzz(pool, name, cases, 0) >= cases * 0.9


def test_2000_cases() -> None:
    assert sum(domain.share for domain in fuzz.DOMAINS.values()) == fuzz.ROUND == 2000


@pytest.mark.parametrize(
    ("outcomes", "words"),
    [
        (["right", "right"], ""),
        (["refused: ShapeError: a", "refused: ShapeError: b"], ""),
        (["right", "refused: ShapeError: a"], "ranks differ"),
        (["right", "problem: IndexError: a"], "rank 1: problem: IndexError: a"),
    ],
    ids=["right", "refused", "ranks differ", "unnamed"],
)
def test_verdicts(outcomes: list[str], words: str) -> None:
    assert (words in verdict(outcomes)) is True
    assert bool(verdict(outcomes)) is bool(words)


def run_wrong_call(group: Any, what: str) -> str:
    """``run_call`` of a function with one fault."""
    right = FUNCTIONS["all_gather_dim"]
    faults = {
        "value": lambda k, x, g: right.call(k, x, g) + 1,
        "shape": lambda k, x, g: right.call(k, x, g).unsqueeze(0),
        "input": lambda k, x, g: (right.call(k, x, g), x.add_(1))[0],
        "error": lambda k, x, g: right.call(k, x, g)[(0,) * 9],
        "gradient": lambda k, x, g: right.call(k, x, g) * 2 - right.call(k, x, g).detach(),
        "refusal": lambda k, x, g: right.call(replace(k, dims=(9, 9)), x, g),
    }
    FUNCTIONS["all_gather_dim"] = replace(right, call=faults[what])
    try:
        kind = "leaf" if what == "gradient" else "plain"
        return run_call(group, Call("all_gather_dim", (4, 4), kind=kind))
    finally:
        FUNCTIONS["all_gather_dim"] = right


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("value", "wrong values"), ("shape", "not torch.float32 (8, 4)"), ("input", "written into"),
        ("error", "IndexError"), ("gradient", "the gradient: wrong values"), ("refusal", "refused: ShapeError"),
    ],
)  # fmt: skip
def test_faults_are_seen(pool: Pool, what: str, words: str) -> None:
    for outcome in pool.run(run_wrong_call, what, world=2):
        assert outcome.startswith(("problem: ", "in backward"))
        assert words in outcome


def test_a_failure_is_reported_with_how_to_run_it_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def check(_: Any, case: int) -> None:
        assert case < 10, "too large"

    class NoPool:
        def __init__(self, *_: Any) -> None:
            pass

        def run(self, *_: Any, **__: Any) -> list[float]:
            return [0.0]

        def stop(self) -> None:
            pass

    monkeypatch.setattr(fuzz, "Pool", NoPool)
    monkeypatch.setitem(fuzz.DOMAINS, "headers", fuzz.Domain(50, st.integers(0, 100), check))
    assert fuzz.main(["--cases", "100", "--seed", "3", "--domains", "headers"]) == 1
    shown = capsys.readouterr().out
    assert "FAILED: --domains headers --seed 3 --cases 50" in shown
    assert "too large" in shown
    assert "case=10" in shown
    assert "reproduce_failure" in shown
    monkeypatch.setitem(fuzz.DOMAINS, "headers", fuzz.Domain(50, st.integers(0, 9), check))
    assert fuzz.main(["--cases", "100", "--seed", "3", "--domains", "headers"]) == 0


def test_a_header_that_is_read_otherwise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    words = fuzz_files.header.encode(()).tolist()
    fuzz_files.check_words(words)
    other = (((2,), fuzz_files.torch.float32),)
    monkeypatch.setattr(fuzz_files.header, "decode", lambda _: other)
    with pytest.raises(AssertionError):
        fuzz_files.check_words(words)
