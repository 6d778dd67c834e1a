"""Arguments that differ between ranks after a plan was made: an error with advice, and by name in check mode."""

import time
from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from torch.distributed import ProcessGroup as TorchGroup

import tritoncomm
from tritoncomm import p2p
from tritoncomm.errors import CommError, MismatchError, PeerError, ShapeError
from tritoncomm.reshard import Layout, reshard

TIMEOUT = 2.0
ROWS, COLUMNS = Layout.on_mesh((8, 4), [0, 1], [0]), Layout.on_mesh((8, 4), [0, 1], [1])
WHOLE = Layout.replicated((8, 4), [0, 1])


def call(group: TorchGroup, target: Any = COLUMNS, rows: int = 4) -> Any:
    return reshard({"w": torch.ones(rows, 4)}, ROWS, target, group=group)


def second_target(group: TorchGroup, rank: int) -> None:
    call(group, WHOLE if rank else COLUMNS)


def wrong_shape(group: TorchGroup, rank: int) -> None:
    call(group, rows=3 if rank else 4)


def both_cached(group: TorchGroup, rank: int) -> None:
    call(group, WHOLE)
    call(group, WHOLE if rank else COLUMNS)


def both_new(group: TorchGroup, rank: int) -> None:
    call(group, WHOLE if rank else ROWS)


CASES: dict[str, Callable[..., None]] = {
    "new plan": second_target,
    "refused": wrong_shape,
    "both new": both_new,
    "two plans": both_cached,  # without check mode Gloo ends the process that gets too much
}


def _boxes(order: tuple[int, ...]) -> Layout:
    mine = {0: [((row, 0), (1, 4)) for row in (0, 2, 4, 6)], 1: [((row, 0), (1, 4)) for row in order]}
    return Layout.of_boxes((8, 4), mine)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_the_first_box_that_differs_is_named(pool: Pool, dtype: torch.dtype | None) -> None:
    """The words of a layout end after its third box."""
    where = "[5:6, 0:4] on rank 1 according to rank 0, the target box [7:8, 0:4] on rank 1 according to rank 1"
    for text in pool.run(run_boxes, dtype):
        assert f"different plans, nothing was sent: w has the target box {where}" in text


def run_boxes(group: TorchGroup, dtype: torch.dtype | None) -> str:
    targets = {"v": COLUMNS, "w": _boxes((1, 3, 5, 7) if group.rank() == 0 else (1, 3, 7, 5))}
    tensors = dict.fromkeys(targets, torch.ones(4, 4))
    with pytest.raises(MismatchError) as caught:
        reshard(tensors, ROWS, targets, group=group, dtype=dtype)
    return str(caught.value)


ADVICE = "run again with TRITONCOMM_CHECK=1, which names the rank and its call"


def run_case(group: TorchGroup, name: str, checks: bool) -> tuple[str, str, float]:
    """Kind and text of the error, and the seconds it took; on a group of its own, which is not usable afterwards."""
    tritoncomm.destroy()
    own, rank = dist.new_group([0, 1], timeout=timedelta(seconds=TIMEOUT)), group.rank()
    call(own)
    dist.barrier(group)
    started = time.monotonic()
    with p2p.check() if checks else nullcontext(), pytest.raises(CommError) as caught:
        CASES[name](own, rank)
    seconds = time.monotonic() - started
    dist.barrier(group)
    return type(caught.value).__name__, str(caught.value), seconds


@pytest.fixture
def pair() -> Any:
    """Ranks of their own: what one of them sent alone stays posted."""
    ranks = Pool(2)
    yield ranks
    ranks.stop()


def test_ranks_that_do_not_compare_say_how_to_compare(pair: Pool) -> None:
    for name in ("new plan", "refused"):
        for rank, (kind, text, seconds) in enumerate(pair.run(run_case, name, False)):
            alone = name == "refused" and rank == 1
            assert kind == (ShapeError if alone else PeerError).__name__, (name, rank, text)
            assert text.startswith("reshard: w is [3, 4]") if alone else ADVICE in text, (name, rank, text)
            assert seconds < (0.5 if alone else TIMEOUT + 3), (name, rank)


def test_new_plans_are_compared(pair: Pool) -> None:
    for kind, text, seconds in pair.run(run_case, "both new", False):
        assert kind == MismatchError.__name__, text
        assert "have different plans, nothing was sent: w is" in text
        assert seconds < TIMEOUT


def test_check_mode_compares_before_anything_is_sent(pair: Pool) -> None:
    for name in CASES:
        for rank, (kind, text, seconds) in enumerate(pair.run(run_case, name, True)):
            alone = name == "refused" and rank == 1
            assert kind == (ShapeError if alone else MismatchError).__name__, (name, rank, text)
            assert alone or ("have different plans" if name == "both new" else "differ in plan") in text, (name, text)
            assert seconds < TIMEOUT, (name, rank)
