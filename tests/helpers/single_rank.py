"""Send a group of one rank through the backend as well: tests of a backend on one device."""

from collections.abc import Iterator
from contextlib import contextmanager

from tritoncomm.core import eager

__all__ = ["force_single_rank_collectives"]


@contextmanager
def force_single_rank_collectives() -> Iterator[None]:
    """No early return for groups of one rank inside the block."""
    before, eager._single_rank_returns_early = eager._single_rank_returns_early, False
    try:
        yield
    finally:
        eager._single_rank_returns_early = before
