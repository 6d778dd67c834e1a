"""The bytes of Megatron's M2N service, by hand for small worlds."""

import math

import pytest

from bench.reshard_models import BATCH, CASES, Case, llama_70b, m2n_bytes

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
