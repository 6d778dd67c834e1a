"""The pool of ranks, and the interpreter for kernels where there is no GPU."""

import os
from collections.abc import Iterator

import pytest

os.environ.setdefault("TRITON_INTERPRET", "1")

from pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Gloo ranks for ``pool.run(function, *args, world=...)``."""
    ranks = Pool()
    yield ranks
    ranks.stop()
