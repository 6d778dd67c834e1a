"""The pool of ranks that other tests run on."""

import pytest
from pool import Pool, WorkerError
from torch.distributed import ProcessGroup


def skips(group: ProcessGroup, ranks: tuple[int, ...]) -> int:
    if group.rank() in ranks:
        pytest.skip("nothing to do here")
    return group.rank()


def test_a_skip_on_all_ranks_skips_the_test_and_one_on_some_fails(pool: Pool) -> None:
    with pytest.raises(pytest.skip.Exception, match="nothing to do here"):
        pool.run(skips, (0, 1), world=2)
    assert pool.run(skips, (), world=2) == [0, 1]
    with pytest.raises(WorkerError, match="rank 1:\nskipped, and others not: nothing to do here"):
        pool.run(skips, (1,), world=2)
    assert pool.run(skips, (), world=2) == [0, 1]
