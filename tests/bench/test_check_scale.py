"""The benchmark of check mode by the number of ranks: its committed figures, its page, and a run with few ranks."""

import json

import pytest

from bench import check_scale

ROWS = json.loads(check_scale.FILE.read_text())["rows"]


def test_the_page_has_the_committed_figures() -> None:
    assert check_scale.BEGIN + check_scale.table(ROWS) + check_scale.END in check_scale.PAGE.read_text()


def test_a_rank_does_as_much_in_a_large_group_as_in_a_small_one() -> None:
    by_world = {row["world"]: row for row in ROWS}
    assert by_world.keys() == check_scale.WORLDS.keys()
    for world in (512, 4096):
        for name, rank in by_world[world]["ranks"].items():
            assert rank["requests"] <= 8, (world, name)
            assert rank["bytes"] <= by_world[64]["ranks"][name]["bytes"], (world, name)
    assert by_world[4096]["store_cpu_ms"] <= 300
    assert by_world[4096]["seconds"] <= 0.5


@pytest.mark.slow
def test_requests_are_counted() -> None:
    row = check_scale.measure(40, 10)  # the least of 10 calls: a late child makes one request more
    assert [each["requests"] for each in row["ranks"].values()] == [4, 5, 3]
    assert row["store_requests"] == 4 * 39 + 3 * 2 + 4
    assert row["seconds"] > 0
