"""The load test counts what ranks hold, and reports what grows."""

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import asdict
from typing import Any

import pytest
import soak
from pool import Pool


@pytest.fixture(scope="module")
def pair() -> Iterator[Pool]:
    """Ranks of their own: two that make groups count them, and others would not."""
    ranks = Pool(2)
    yield ranks
    ranks.stop()


@pytest.mark.parametrize(
    "phase",
    [
        "groups",
        *(pytest.param(phase, marks=pytest.mark.slow) for phase in ("hops", "observed", "mappings", "exchanges")),
    ],
)
def test_a_phase_reports_growth(pair: Pool, phase: str) -> None:
    growth = soak.soak(pair, phase, 2, 40)
    limits = asdict(soak.LIMITS)
    assert growth.keys() == limits.keys()
    assert [name for name in ("descriptors", "threads", "groups", "beyond") if growth[name] > limits[name]] == []


def test_caches_are_filled_by_calls_that_send_nothing(pair: Pool) -> None:
    before = pair.run(soak.usage)[0]
    entries = pair.run(soak.fill, 1, 40)[0]
    after = pair.run(soak.usage)[0]
    assert entries[-1] == after.cached > before.cached
    assert (after.groups, after.descriptors, after.threads) == (before.groups, before.descriptors, before.threads)


def test_growth_beyond_the_limits_is_a_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grown = asdict(soak.LIMITS) | {"descriptors": 1}

    def fake(_: Any, phase: str, world: int, calls: int) -> dict[str, float]:
        assert (world, calls) == (2, 10)
        return grown if phase == "hops" else asdict(soak.LIMITS)

    monkeypatch.setattr(soak, "soak", fake)
    monkeypatch.setattr(soak, "filled", lambda world: nullcontext())
    arguments = ["--calls", "10", "--ranks", "2", "--phases"]
    assert soak.main([*arguments, "mappings"]) == 0
    assert soak.main([*arguments, "mappings", "hops"]) == 1
    assert "GROWS: descriptors" in capsys.readouterr().out
