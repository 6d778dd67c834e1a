"""Mappings end to end: forward and backward on 2 and 4 real ranks, against megatron-core's own on the same ranks.

Every rank is a process that has 1 MiB of float32; both providers get the same tensors, and their results and gradients
have to be the same bits. All ranks meet at a barrier before each sample of one call; rank 0's clock counts, and both
providers take their turn in every round. Counted besides, forward and backward together: messages (collective calls),
passes (bytes that local ops read and write, as multiples of once over this rank's input; mean over the ranks) and the
most new memory held at once (in inputs; of the rank that holds most); an all-reduce is one pass, for Gloo sums in a
copy. Ours may exceed Megatron's in none of them. Time has no limit but the guard, and where ranks outnumber cores its
spread is mostly that of waiting for a core.

The ranks talk through Gloo over loopback, which copies in the host's memory, on cores that they share: these times say
nothing about NCCL, about links between GPUs or about what share of a call the copies have there. In the rows that say
``overwrite_inputs``, ours overwrites the gradient or the input as Megatron does. An operator makes it there, as in a
model; that operator is in the times and counts of both.
``python bench/bench_end_to_end.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.cost import Counts, least, more_than, over_ranks
from bench.harness import Clock, Row, Samples
from bench.hosts import cpu_device, megatron_part, peer, real_ranks, run_backward
from bench.timing import quiet_host
from tritoncomm import mappings

WORLDS = (2, 4)
ROUNDS, WARM_UP = 70, 3  # rounds on 2 ranks; half of them on 4, which take twice as long
PROVIDERS = ("ours", "megatron")


@dataclass(frozen=True)
class Case:
    """One mapping of a tensor of ``shape`` on every one of ``world`` ranks."""

    name: str
    shape: tuple[int, ...]
    world: int
    note: str = ""
    fresh: bool = False  # the gradient comes out of an operator, as in a model
    temporary: bool = False  # so does the input

    @property
    def label(self) -> str:
        return f"{self.name} {list(self.shape)}{f' {self.note}' if self.note else ''}, world {self.world}"


CASES = [
    case
    for world in WORLDS
    for case in (
        Case("all_to_all_sp2hp", (256, 1024), world),
        Case("all_to_all_hp2sp", (1024, 256), world),
        Case("all_gather_last_dim_from_tensor_parallel_region", (1024, 256), world),
        Case("reduce_scatter_last_dim_to_tensor_parallel_region", (256, 1024), world),
        Case("gather_from_sequence_parallel_region", (128, 2, 1024), world),
        Case("copy_to_tensor_model_parallel_region", (256, 1024), world, "overwrite_inputs", fresh=True),
        Case("reduce_from_tensor_model_parallel_region", (256, 1024), world, "overwrite_inputs", temporary=True),
    )
]


def calls(case: Case, group: ProcessGroup) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """By provider: the result and the gradient of the input, of the same tensors."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    leaf = torch.randn(case.shape, generator=generator).requires_grad_()
    timed: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    gradient: Tensor | None = None
    for provider, module in zip(PROVIDERS, (mappings, peer("tensor_parallel.mappings")), strict=True):
        function = getattr(module, case.name)

        def forward(function: Any = function) -> Tensor:
            with mappings.overwrite_inputs(case.fresh or case.temporary):
                out = function(leaf * 2.0 if case.temporary else leaf, group=group)
            return out * 2.0 if case.fresh else out

        if gradient is None:
            gradient = torch.randn(forward().shape, generator=generator)

        def both(forward: Any = forward, gradient: Tensor = gradient) -> tuple[Tensor, Tensor]:
            out = forward()
            (grad,) = run_backward((out,), (gradient,), False, False, (leaf,), True, accumulate_grad=False)
            return out, grad

        timed[provider] = both
    return timed


def count(group: ProcessGroup, case: Case) -> dict[str, Counts]:
    """Costs of a call on this rank, by provider; results and gradients have to be equal bits."""
    with warnings.catch_warnings(), cpu_device():
        warnings.simplefilter("ignore")
        timed = calls(case, group)
        for ours, theirs in zip(*(call() for call in timed.values()), strict=True):
            assert ours.shape == theirs.shape, case.label
            assert torch.equal(ours.detach().view(torch.int32), theirs.detach().view(torch.int32)), case.label
        return {provider: least(call) for provider, call in timed.items()}


def clock(group: ProcessGroup, case: Case, rounds: int) -> Samples:
    """On this rank: microseconds of one call by provider; all ranks start it together, who comes first alternates."""
    samples: Samples = {provider: [] for provider in PROVIDERS}
    with warnings.catch_warnings(), cpu_device(), quiet_host():
        warnings.simplefilter("ignore")
        order = list(calls(case, group).items())
        for i in range(-WARM_UP, max(1, 2 * rounds // case.world)):
            for provider, call in order:
                dist.barrier(group)
                started = time.perf_counter()
                call()
                if i >= 0:
                    samples[provider].append((time.perf_counter() - started) * 1e6)
            order.reverse()
    return samples


def measure(case: Case, pool: Any, timer: Clock) -> Iterator[Row]:
    """Both providers in one row; counts are in inputs of a rank."""
    ranks, size = pool.run(count, case, world=case.world), 4 * torch.Size(case.shape).numel()
    counted = {provider: over_ranks([rank[provider] for rank in ranks], size) for provider in PROVIDERS}

    def sample() -> Samples:
        return pool.run(clock, case, timer.rounds, world=case.world)[0]

    yield timer.row(case.label, sample, mode=f"world {case.world}", counted=counted)


def missed(row: Row) -> list[str]:
    return more_than(row["row"], *(row["counted"][provider] for provider in PROVIDERS), "Megatron")


PART = megatron_part(
    name="end_to_end",
    unit="microseconds per call, forward and backward, Gloo over loopback; passes and peak memory in inputs",
    cases=CASES,
    measure=measure,
    host=real_ranks,
    rounds=ROUNDS,
    targets=missed,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
