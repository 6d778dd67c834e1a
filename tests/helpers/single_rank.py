"""Send a group of one rank through the backend as well: tests of a backend on one device."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

from torch.distributed import ProcessGroup

from tritoncomm import collective
from tritoncomm.core import eager
from tritoncomm.core.validation import check_input
from tritoncomm.record import Span

__all__ = ["force_single_rank_collectives"]


def _enter(name: str, kind: str, group: ProcessGroup, x: Any, arguments: tuple[Any, ...]) -> Span:
    """Check the tensor as ``call.enter`` does, and return a span for groups of one rank too."""
    check_input(x, name)
    return Span(name, group.size())


@contextmanager
def force_single_rank_collectives() -> Iterator[None]:
    """No early return for groups of one rank inside the block."""
    with mock.patch.object(eager, "enter", _enter), mock.patch.object(collective, "enter", _enter):
        yield
