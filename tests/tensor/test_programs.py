"""Random programs of one to eight operators over random layouts, shapes and worlds, against plain torch."""

from typing import Any

import pytest
from pool import Pool
from programs import run_programs


@pytest.mark.parametrize(
    ("world", "first", "count"),
    [
        pytest.param(2, 200_000, 150, id="2"),
        pytest.param(4, 400_000, 100, id="4", marks=pytest.mark.slow),
        pytest.param((1, 3), 300_000, 60, id="ranks1and3"),
        pytest.param(1, 100_000, 40, id="1"),
    ],
)
def test_programs(pool: Pool, world: Any, first: int, count: int) -> None:
    counts = pool.run(run_programs, first, count, world=world)[0]
    assert len(counts) > 20
