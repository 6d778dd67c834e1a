"""Redistribution of a sharded tensor: ours against ``DTensor.redistribute``, on the same ranks and the same tensors.

Counted on four Gloo ranks, forward and backward: messages (collective calls), passes (bytes that local ops read and
write, as multiples of once over an even shard; mean over the ranks) and the most new memory held at once (in even
shards; of the rank that holds most). On CPUs DTensor's all-to-all is an all-gather, and a chunk of what it brings. Host
time is taken with small tensors over a no-op process group.
``python bench/bench_redistribution.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.tensor import Replicate, Shard

from bench.cost import PROVIDERS, WORLD, Cost, Counts, dtensor_part, local, min_of, more_than, over_ranks
from bench.guard import row_target
from bench.harness import Clock, Row
from bench.hosts import run_backward
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.dispatch import plain
from tritoncomm.tensor.distspec import _DistSpec

INNER, REPEATS = 10, 5
MODES = ("forward", "forward, with grad", "forward + backward")
WAYS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """From one layout to another; the sharded dim, or None for replicated."""

    shape: tuple[int, ...]
    old: int | None
    new: int | None

    @property
    def label(self) -> str:
        names = ["R" if dim is None else f"S({dim})" for dim in (self.old, self.new)]
        ragged = any(self.shape[dim] % WORLD for dim in (self.old, self.new) if dim is not None)
        return f"{names[0]} -> {names[1]} {list(self.shape)}{' ragged' * ragged}"

    @property
    def specs(self) -> tuple[_DistSpec, _DistSpec]:
        old, new = (ReplicaSpec() if dim is None else ShardSpec([dim], [WORLD]) for dim in (self.old, self.new))
        return old, new


CASES = [
    Case((16, 32), 0, 1),
    Case((4, 8, 16), 1, 2),
    Case((16, 32), 0, None),
    Case((16, 32), 1, None),
    Case((16, 32), None, 1),
    Case((17, 30), 0, 1),
    Case((4, 9, 15), 1, 2),
]


def tensors(case: Case, pg: ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """A leaf by provider, and a gradient of what comes out; of both providers the same values."""

    def both(spec: _DistSpec, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        full = ColoTensor(torch.randn(case.shape), ColoTensorSpec(pg))
        made = plain(full.redistribute(spec))  # a local split
        ours = ColoTensor(made.clone(), ColoTensorSpec(pg, spec), case.shape)
        return {"ours": ours, "dtensor": ColoTensor(made.clone(), ColoTensorSpec(pg, spec), case.shape).to_dtensor()}

    leaves, gradients = (both(spec, seed) for seed, spec in enumerate(case.specs))
    return {name: x.detach().requires_grad_() for name, x in leaves.items()}, gradients


def call_of(case: Case, provider: str, x: Any) -> Callable[[], Any]:
    """The redistribution of ``x``."""
    spec = case.specs[1]
    if provider == "ours":
        return lambda: x.redistribute(spec)
    mesh, target = x.device_mesh, [Replicate() if case.new is None else Shard(case.new)]
    return lambda: x.redistribute(mesh, target)


def count(group: TorchGroup, case: Case) -> dict[str, dict[str, Counts]]:
    """Costs of a call on this rank, by provider and direction; the results have to be equal bits."""
    pg = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=WORLD)
    leaves, gradients = tensors(case, pg)
    counted: dict[str, dict[str, Counts]] = {}
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for provider in PROVIDERS:
        call, runs = call_of(case, provider, leaves[provider]), []
        for _ in range(REPEATS):  # Gloo's threads release tensors at any time: the least is what is needed
            with Cost() as forward:
                out = call()
            with Cost() as backward:
                (grad,) = torch.autograd.grad(out, leaves[provider], gradients[provider])
            runs.append([(cost.messages, cost.moved, cost.peak) for cost in (forward, backward)])
            results[provider] = (local(out.detach()), local(grad))
            del out, grad
        counted[provider] = {way: min_of([run[i] for run in runs]) for i, way in enumerate(WAYS)}
    for ours, theirs in zip(*results.values(), strict=True):
        assert ours.shape == theirs.shape, case.label
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), case.label
    return counted


def calls(case: Case, pg: ProcessGroup) -> dict[str, dict[str, Callable[[], Any]]]:
    """Calls to time, by mode and provider."""
    leaves, gradients = tensors(case, pg)
    timed: dict[str, dict[str, Callable[[], Any]]] = {mode: {} for mode in MODES}
    for provider in PROVIDERS:
        leaf, gradient = leaves[provider], gradients[provider]
        forward = call_of(case, provider, leaf)

        def both(forward: Any = forward, leaf: Any = leaf, gradient: Any = gradient) -> Any:
            return run_backward((forward(),), (gradient,), False, False, (leaf,), True, accumulate_grad=False)

        for mode, call in zip(MODES, (call_of(case, provider, leaf.detach()), forward, both), strict=True):
            timed[mode][provider] = call
    return timed


def measure(case: Case, host: tuple[Any, ProcessGroup], clock: Clock) -> Iterator[Row]:
    """Both providers, a row for every mode; counts are in even shards of the tensor."""
    pool, pg = host
    ranks, size = pool.run(count, case, world=WORLD), 4 * math.prod(case.shape) / WORLD
    counted = {p: {way: over_ranks([rank[p][way] for rank in ranks], size) for way in WAYS} for p in PROVIDERS}
    for mode, pair in calls(case, pg).items():
        yield clock.time(f"{case.label}, {mode}", pair, INNER, mode=mode, counted=counted, **row_target())


def missed(row: Row) -> list[str]:
    """No more messages, passes and memory than DTensor."""
    ours, theirs = (row["counted"][provider] for provider in PROVIDERS)
    return [line for way in WAYS for line in more_than(f"{row['row']}, {way}", ours[way], theirs[way], "DTensor")]


PART = dtensor_part(
    name="redistribution",
    unit="microseconds per redistribution; passes and peak memory in even shards of the tensor",
    cases=CASES,
    measure=measure,
    targets=missed,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
