"""Bytes and units of the models of docs/reshard.md: Megatron's M2N service by hand, and the blocks of a plan."""

import math

import pytest
import torch

from bench.reshard_models import BATCH, CASES, Case, items_of, llama_70b, m2n_bytes
from tritoncomm.reshard import Layout
from tritoncomm.reshard.api import BUCKET_BYTES
from tritoncomm.reshard.plan import Item
from tritoncomm.reshard.planner import plan_transfers

SHARDED = sum(2 * math.prod(weight.shape) for weight in llama_70b() if weight.dim is not None)
NORMS = sum(2 * math.prod(weight.shape) for weight in llama_70b() if weight.dim is None)


@pytest.mark.parametrize(
    ("case", "slots", "largest"),
    [
        ((1, 1, 1, 1), 1, SHARDED + NORMS),
        ((1, 1, 2, 2), 2, SHARDED // 2 + NORMS),
        ((2, 2, 1, 1), 2, SHARDED // 2 + NORMS),  # norms come from rank 2 modulo 2
        ((2, 2, 2, 2), 4, SHARDED // 2 + NORMS),
        ((4, 2, 2, 2), 8, SHARDED // 2 + NORMS),  # the second replica sends nothing, and has slots
        ((2, 2, 4, 4), 8, SHARDED // 4 + NORMS),
    ],
)
def test_one_slot_per_pair_of_ranks(case: tuple[int, int, int, int], slots: int, largest: int) -> None:
    ranks, tensor, target_ranks, target_tensor = case
    small = Case("Llama-3-70B", ranks, tensor, 1, 1, target_ranks, target_tensor, True)
    assert m2n_bytes(small) == slots * largest


def test_batches_have_slots_of_their_own() -> None:
    alone = Case("Llama-3-70B", 1, 1, 1, 1, 1, 1, True)
    assert m2n_bytes(alone, BATCH) == m2n_bytes(alone)
    stages = Case("Llama-3-70B", 2, 1, 2, 1, 1, 1, True)  # a batch is of one stage, and both have slots
    assert m2n_bytes(stages, 1) == 2 * (SHARDED + NORMS) > m2n_bytes(stages) > SHARDED + NORMS


def test_the_service_refuses_ranks_on_both_sides() -> None:
    assert [m2n_bytes(case) is None for case in CASES] == [not case.apart for case in CASES]


def widths(items: list[Item], world: int, position: int) -> set[int]:
    """Bytes of the widest unit, 16 at most, that divides all offsets, rows and strides of each block of a rank."""
    found: set[int] = set()
    moved = plan_transfers(items, tuple(range(world)), position, BUCKET_BYTES)
    for bucket in moved.buckets:
        for side, name in ((bucket.send, "source"), (bucket.recv, "target")):
            for block, index in enumerate(side.tensor.tolist()):
                shape = getattr(items[index], name).local_shape(position)
                start, size = (each[-len(shape) :, block].tolist() for each in (side.start, side.size))
                strides = [2 * math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
                numbers = [int(side.wire[block]), sum(a * b for a, b in zip(start, strides, strict=True))]
                partial = [dim for dim, extent in enumerate(size) if extent < shape[dim]]
                if partial and partial[-1]:  # rows with gaps: of the dims from the last partial one on
                    numbers += [strides[partial[-1]] * size[partial[-1]], *strides[: partial[-1]]]
                found.add(math.gcd(16, *numbers))
    return found


@pytest.mark.parametrize("case", [CASES[0], CASES[-1]], ids=str)
def test_all_blocks_of_models_are_copied_in_units_of_16_bytes(case: Case) -> None:
    """So that rows on the wire need no padding."""
    items = items_of(case)
    for position in (0, case.world - 1):
        assert widths(items, case.world, position) == {16}


def test_odd_rows_are_copied_in_narrow_units() -> None:
    items = [
        Item("x", Layout.split((4, 30), 1, sizes), Layout.replicated((4, 30), (0, 1)), torch.bfloat16, torch.bfloat16)
        for sizes in ((16, 14), (17, 13))
    ]
    assert [widths([item], 2, 0) for item in items] == [{4, 16}, {2, 16}]
