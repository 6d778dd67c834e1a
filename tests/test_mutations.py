"""The mutations of ``make mutations`` still apply; a survivor is reported."""

from pathlib import Path

import mutations
import pytest
from mutations import MUTATIONS, RED, ROOT, SURVIVED, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda each: each.what)
def test_each_occurs_once_and_names_tests(mutation: Mutation) -> None:
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.old != mutation.new
    names = [name for name in mutation.tests.split() if not name.startswith("--device")]
    assert names
    assert [name for name in names if not (ROOT / name).exists()] == []


def test_at_least_twenty() -> None:
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS) >= 20


def test_survivors_and_what_did_not_run_are_failures(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ends = {
        MUTATIONS[0].what: (RED, "FAILED it"),
        MUTATIONS[1].what: (SURVIVED, "1 passed"),
        MUTATIONS[2].what: (4, ""),
    }

    def run(mutation: Mutation, folder: Path) -> tuple[int, str]:
        assert folder.is_dir()
        return ends[mutation.what]

    monkeypatch.setattr(mutations, "run", run)
    assert mutations.main([MUTATIONS[0].what]) == 0
    assert mutations.main(list(ends)) == 1
    shown = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in shown] == ["red", "1", "red", "SURVIVED", "NOT", "1"]
    assert shown[-1] == "1 of 3 mutations turn a test red"
