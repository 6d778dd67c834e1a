"""Random programs of one to eight operators over random layouts, shapes and worlds, against plain torch."""

from typing import Any

import pytest
from pool import Pool
from programs import run_programs

PROGRAMS: list[tuple[Any, int, int]] = [(2, 200_000, 150), (4, 400_000, 100), ((1, 3), 300_000, 60), (1, 100_000, 40)]


@pytest.mark.parametrize(("world", "first", "count"), PROGRAMS, ids=["2", "4", "ranks1and3", "1"])
def test_programs(pool: Pool, world: Any, first: int, count: int) -> None:
    counts = pool.run(run_programs, first, count, world=world)[0]
    assert len(counts) > 20
