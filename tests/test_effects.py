"""The record of effects: it is the same twice, sees what a user would see, and names the cases that differ."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import effects
import entries
import pytest
from effects import Effect, differences, record_domain
from pool import Pool
from torch.distributed import ProcessGroup

from tritoncomm.core import backend, passes


@pytest.fixture(scope="module")
def recorded(pool: Pool) -> list[dict[str, Effect]]:
    return pool.run(record_domain, "messages", "torch", world=2)


def test_a_record_has_effects_and_errors_and_is_the_same_twice(pool: Pool, recorded: list[dict[str, Effect]]) -> None:
    again = pool.run(record_domain, "messages", "torch", world=2)
    assert json.loads(json.dumps(again)) == json.loads(json.dumps(recorded))
    assert len(recorded[0]) > 50
    effect = recorded[0]["ring, two, float32 contiguous"]
    assert [x[:3] for x in effect["results"]] == [["float32", [4, 3], [3, 1]], ["float32", [5], [1]]]
    assert {name for name, *_ in effect["backend"]} <= {"send", "recv", "_start_coalescing", "_end_coalescing"}
    assert effect["peak"] > 0
    assert sum(sent for _, _, sent in effect["counters"].values()) == 4 * (12 + 5)
    hidden = [x for one in recorded[0].values() for x in one.get("results", [])]
    assert {x[0] for x in hidden} >= {"float32", "uint16", "complex64"}


def record_lazy_bits(group: ProcessGroup) -> dict[str, Effect]:
    """A tree that forgets lazy bits."""
    with mock.patch.object(passes, "has_lazy", return_value=False):
        return record_domain(group, "messages", "triton")


def record_more_messages(group: ProcessGroup) -> dict[str, Effect]:
    """A tree that sends a message of its own before every reduce-scatter."""
    reduce_scatter = backend.reduce_scatter

    def after_barrier(*args: object, **kwargs: object) -> object:
        group.barrier().wait()
        return reduce_scatter(*args, **kwargs)  # pyright: ignore[reportArgumentType]

    with mock.patch.object(backend, "reduce_scatter", after_barrier):
        return record_domain(group, "many", "torch")


def differ(pool: Pool, function: Callable[..., Any], domain: str, path: str) -> list[tuple[str, str]]:
    plain, other = (
        {name: {"rank 0": effect} for name, effect in pool.run(*call, world=2)[0].items()}
        for call in ((record_domain, domain, path), (function,))
    )
    return differences(plain, other)


def test_a_record_sees_forgotten_lazy_bits_and_other_messages(pool: Pool) -> None:
    found = differ(pool, record_lazy_bits, "messages", "triton")
    assert {field for field, _ in found} >= {"error", "results"}
    assert all("negative" in text or "conjugate" in text for _, text in found), found
    fields = {field for field, _ in differ(pool, record_more_messages, "many", "torch")}
    assert "backend" in fields
    assert "results" not in fields


def test_errors_have_no_addresses() -> None:
    texts = [
        effects._masked(RuntimeError(f"closed by peer [127.0.0.1]:{port}, x at 0x{port}00000")) for port in (14239, 27)
    ]
    assert texts[0] == texts[1] == ["RuntimeError", "closed by peer , x at "]


def test_differences_are_named() -> None:
    base = {"a": {"rank 0": {"peak": 1}, "rank 1": {"peak": 2}}, "gone": {"rank 0": {}}}
    here = copy.deepcopy({"a": base["a"], "new": {"rank 0": {}}})
    here["a"]["rank 1"]["peak"] = 3
    assert differences(base, base) == []
    fields, texts = zip(*differences(base, here), strict=True)
    assert fields == ("peak", "case", "case")
    assert texts[0].startswith("a, rank 1, peak:")
    assert texts[1:] == ("gone: only at the base", "new: only here")


def test_a_record_of_ranks_that_lost_each_other_is_rejected() -> None:
    lost = {"gather over 3": {"rank 1 torch": {"error": ["PeerError", "the all-gather failed on rank 1"]}}}
    with pytest.raises(RuntimeError, match="gather over 3, rank 1 torch: ranks lost each other"):
        effects._check_in_step({"split over 3": {"rank 0 torch": {"error": ["ShapeError", "6 rows"]}}, **lost})


def test_the_command_compares_two_trees(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    records = {effects.ROOT: {"a": {"rank 0": {"peak": 2}}}, tmp_path: {"a": {"rank 0": {"peak": 1}}}}
    monkeypatch.setattr(effects, "_record_of", lambda tree, domains, out: records[tree])
    assert effects.main([str(tmp_path)]) == 1
    assert "1 differences {'peak': 1}" in capsys.readouterr().out
    records[tmp_path] = records[effects.ROOT]
    assert effects.main([str(tmp_path)]) == 0


def test_entries_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    assert entries.main([str(entries.ROOT)]) == 0
    rows = [line.rsplit(maxsplit=2) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) >= 8
    assert all(int(base) == int(here) > 5 for _, base, here in rows)
