"""Programs on streams, under the rules of both NCCL backends: no race, no early reuse, captures that replay."""

import random
from collections.abc import Iterable

import pytest
from stream_order.mutants import MUTANTS
from stream_order.program import Scenario, play
from stream_order.scenarios import scenarios

ALL = scenarios()
DRAWN = 100  # scenarios that run in every run of the tests, and every mutant with SEEN of them
SEEN = 3


def family_of(scenario: Scenario) -> str:
    return scenario.name.partition(" ")[0].rstrip(",")


FAMILIES = list(dict.fromkeys(map(family_of, ALL)))


def of_family(name: str) -> list[Scenario]:
    return [each for each in ALL if family_of(each) == name]


def drawn() -> list[Scenario]:
    """An equal share of scenarios from each family, all of a small one."""
    draw, share = random.Random(0), DRAWN // len(FAMILIES)
    return [x for name in FAMILIES for x in draw.sample(of_family(name), min(share, len(of_family(name))))]


def check(chosen: Iterable[Scenario]) -> int:
    """Play scenarios, none of which may have a problem; the number of their operations."""
    operations, problems = 0, {}
    for scenario, report in play(chosen):
        operations += report.operations
        if report.problems:
            problems[scenario.id] = report.problems
    assert problems == {}
    return operations


def test_drawn_scenarios() -> None:
    chosen = drawn()
    assert DRAWN * 0.8 < len(chosen) <= DRAWN
    assert check(chosen) > 20 * len(chosen)


@pytest.mark.parametrize("name", MUTANTS)
def test_every_mutant_is_seen(name: str) -> None:
    mutant = MUTANTS[name]
    chosen = [each for each in ALL if all(word in f"{each.rules.name} {each.name}" for word in mutant.words)]
    chosen = random.Random(0).sample(chosen, SEEN)
    with mutant.apply():
        for scenario, report in play(chosen):
            assert any(problem.startswith(mutant.problem) for problem in report.problems), scenario.id


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", FAMILIES)
def test_all_scenarios(family: str) -> None:
    check(of_family(family))
