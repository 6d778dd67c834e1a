"""The ratchet of names holds on this tree, and sees one more name, tuple, homonym, or larger function."""

import ast
from pathlib import Path

import names
import pytest


def test_counts_are_at_their_limits(capsys: pytest.CaptureFixture[str]) -> None:
    assert names.main() == 0
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("what", "code"),
    [
        ("names that are no nouns", "each = 1\ndef f(what): ..."),
        (
            "anonymous tuples",
            "def f() -> tuple[int, str]: ...\ndef g() -> tuple[int, ...]: ...\ndef h() -> tuple[int, int]: ...",
        ),
        ("class names of several meanings", "class Pass: ...\nclass Exchange: ..."),
        ("most names bound by a function", f"def f({', '.join(f'x{i}' for i in range(39))}):\n    y = 1"),
        ("most names bound by a kernel", f"@triton.jit\ndef f({', '.join(f'x{i}' for i in range(64))}):\n    y = 1"),
    ],
)
def test_more_is_refused(
    what: str, code: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trees = [*names._trees(), (Path("new.py"), ast.parse(code))]
    monkeypatch.setattr(names, "_trees", lambda: iter(trees))
    assert names.main() == 1
    assert f"{what}: {names.LIMITS[what] + 2}" in capsys.readouterr().out


def test_a_limit_has_to_follow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(names.LIMITS, "anonymous tuples", names.LIMITS["anonymous tuples"] + 1)
    assert names.main() == 1
    assert "lower the limit" in capsys.readouterr().out
