"""Redistribution of a sharded tensor: ours against ``DTensor.redistribute``, on the same ranks and the same tensors.

Counted on four Gloo ranks, forward and backward: messages (collective calls), passes (bytes that local ops read and
write, as multiples of once over an even piece; mean over the ranks) and the most new memory held at once (in even
pieces; of the rank that holds most). On CPUs DTensor's all-to-all is an all-gather, and a chunk of what it brings. Host
time is taken with small tensors over a process group that moves nothing.
``python bench/bench_redistribution.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import math
import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed.tensor import Replicate, Shard

from bench import guard, part
from bench.cost import PROVIDERS, REPEATS, ROUNDS, WORLD, WORST, Cost, Ranks, Samples, local, paired, run_backward
from bench.timing import figures, geometric_mean, quantile, quiet_host, versions
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.dispatch import plain
from tritoncomm.tensor.distspec import _DistSpec

PART = "redistribution"  # of the suite: the name of the results file
INNER = 10
MODES = ("forward", "forward, with grad", "forward + backward")
WAYS = ("forward", "backward")


@dataclass(frozen=True)
class Case:
    """From one layout to another; a dim to cut, or None for a replica."""

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


@dataclass
class Row:
    """What one case takes: microseconds by mode and provider, and by provider and way what is counted."""

    case: Case
    counted: dict[str, dict[str, dict[str, float]]]
    samples: dict[str, Samples] = field(default_factory=dict)

    def ratio(self, mode: str) -> float:
        ours, theirs = (quantile(self.samples[mode][provider], 0.2) for provider in PROVIDERS)
        return ours / theirs

    def figures(self, mode: str, samples: Samples | None = None) -> dict[str, Any]:
        """The row of one mode in the results file."""
        name, samples = f"{self.case.label}, {mode}", samples or self.samples[mode]
        return figures(name, samples, mode=mode, counted=self.counted)


def tensors(case: Case, pg: ProcessGroup) -> tuple[dict[str, Any], dict[str, Any]]:
    """A leaf by provider, and a gradient of what comes out; of both providers the same values."""

    def both(spec: _DistSpec, seed: int) -> dict[str, Any]:
        torch.manual_seed(seed)
        full = ColoTensor(torch.randn(case.shape), ColoTensorSpec(pg))
        made = plain(full.redistribute(spec))  # a cut, which needs nobody else
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


def count(group: TorchGroup, case: Case) -> dict[str, dict[str, tuple[int, int, int]]]:
    """On this rank: (messages, bytes moved, peak bytes) by provider and way; the results have to be equal bits."""
    pg = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=WORLD)
    leaves, gradients = tensors(case, pg)
    found: dict[str, dict[str, tuple[int, int, int]]] = {}
    results: dict[str, tuple[Tensor, Tensor]] = {}
    for provider in PROVIDERS:
        call, runs = call_of(case, provider, leaves[provider]), []
        for _ in range(REPEATS):  # Gloo's threads let go of a tensor when they please: the least is what is needed
            with Cost() as forward:
                out = call()
            with Cost() as backward:
                (grad,) = torch.autograd.grad(out, leaves[provider], gradients[provider])
            runs.append([(cost.messages, cost.moved, cost.peak) for cost in (forward, backward)])
            results[provider] = (local(out.detach()), local(grad))
            del out, grad
        found[provider] = {way: min(run[place] for run in runs) for place, way in enumerate(WAYS)}
    for ours, theirs in zip(*results.values(), strict=True):
        assert ours.shape == theirs.shape, case.label
        assert torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)), case.label
    return found


def over_ranks(pool: Any, case: Case) -> dict[str, dict[str, dict[str, float]]]:
    """What the ranks counted, in even pieces of the tensor."""
    ranks = pool.run(count, case, world=WORLD)
    size = 4 * math.prod(case.shape) / WORLD
    found: dict[str, dict[str, dict[str, float]]] = {provider: {} for provider in PROVIDERS}
    for provider in PROVIDERS:
        for way in WAYS:
            messages, moved, peak = zip(*(rank[provider][way] for rank in ranks), strict=True)
            found[provider][way] = {
                "messages": max(messages),
                "passes": round(sum(moved) / WORLD / (2 * size), 3),
                "peak": round(max(peak) / size, 3),
            }
    return found


def calls(case: Case, pg: ProcessGroup) -> dict[str, dict[str, Callable[[], Any]]]:
    """What is timed, by mode and provider."""
    leaves, gradients = tensors(case, pg)
    found: dict[str, dict[str, Callable[[], Any]]] = {mode: {} for mode in MODES}
    for provider in PROVIDERS:
        leaf, gradient = leaves[provider], gradients[provider]
        forward = call_of(case, provider, leaf)

        def both(forward: Any = forward, leaf: Any = leaf, gradient: Any = gradient) -> Any:
            return run_backward((forward(),), (gradient,), False, False, (leaf,), True, accumulate_grad=False)

        for mode, call in zip(MODES, (call_of(case, provider, leaf.detach()), forward, both), strict=True):
            found[mode][provider] = call
    return found


def measure(case: Case, pool: Any, pg: ProcessGroup, rounds: int = ROUNDS, inner: int = INNER) -> Row:
    """Both providers in one row; a mode that misses a limit gets as many rounds again, pooled with the first."""
    row, found = Row(case, over_ranks(pool, case)), calls(case, pg)
    with quiet_host():
        for mode in MODES:
            row.samples[mode] = paired(PART, found[mode], partial(row.figures, mode), rounds, inner)
    return row


def table(rows: list[Row]) -> str:
    """One line per transition: what is counted, forward + backward, and the microseconds at p20 by mode."""
    width = max(len(row.case.label) for row in rows)
    head = [f"  {name:>19}" for name in ("messages", "passes", "peak memory")] + [f"  {mode:>24}" for mode in MODES]
    lines = [f"{'ours / dtensor':{width}}" + "".join(head)]
    for row in rows:
        cells = ""
        for what in ("messages", "passes", "peak"):
            told = ["+".join(f"{row.counted[p][way][what]:.3g}" for way in WAYS) for p in PROVIDERS]
            cells += f"  {' / '.join(told):>19}"
        for mode in MODES:
            ours, theirs = (quantile(row.samples[mode][provider], 0.2) for provider in PROVIDERS)
            cells += f"  {f'{ours:.1f} / {theirs:.1f} = {row.ratio(mode):.2f}':>24}"
        lines.append(f"{row.case.label:{width}}{cells}")
    means = [geometric_mean([row.ratio(mode) for row in rows]) for mode in MODES]
    lines.append(f"{'geometric mean':{width + 63}}" + "".join(f"  {mean:24.2f}" for mean in means))
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """What misses the targets: no more messages, passes and memory than DTensor, and not slower."""
    found = []
    for row in rows:
        for way in WAYS:
            ours, theirs = (row.counted[provider][way] for provider in PROVIDERS)
            for what, mine in ours.items():
                if mine > theirs[what]:
                    found.append(f"{row.case.label}, {way}: {what} {mine:g}, DTensor's {theirs[what]:g}")
        for mode in MODES:
            if row.ratio(mode) > WORST:
                found.append(f"{row.case.label}, {mode}: {row.ratio(mode):.2f} of DTensor's time, at most {WORST}")
    return found


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "unit": "microseconds per redistribution; passes and peak memory in even pieces of the tensor",
        "world": WORLD,
        "rows": [row.figures(mode) for row in rows for mode in MODES],
        "geometric_mean": {mode: round(geometric_mean([row.ratio(mode) for row in rows]), 3) for mode in MODES},
    }


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[Any, ProcessGroup]]:
    with Ranks() as made:
        yield made


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_redistribution_costs_no_more_than_dtensors(benchmark: Any, case: Case, ranks: Any, rows: list[Row]) -> None:
    row = measure(case, *ranks)
    rows.append(row)
    benchmark.extra_info.update({f"ratio, {mode}": round(row.ratio(mode), 3) for mode in MODES})
    benchmark.pedantic(calls(case, ranks[1])[MODES[2]]["ours"], rounds=20, iterations=INNER, warmup_rounds=1)
    assert not failures([row])
    assert not [str(line) for line in guard.against_committed(PART, {"rows": [row.figures(mode) for mode in MODES]})]


def test_redistributions_together(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    if len(rows) < len(CASES):
        pytest.skip(f"{len(rows)} of {len(CASES)} redistributions were measured")
    with capsys.disabled():
        print("\n" + table(rows))


def main() -> int:
    options = part.arguments("Redistribution against DTensor's on the same ranks.", "transitions", ROUNDS)
    warnings.simplefilter("ignore")
    with Ranks() as (pool, pg):
        rows = [measure(case, pool, pg, options.rounds) for case in CASES if options.only in case.label]
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
