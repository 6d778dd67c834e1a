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
so, the gradient or the input comes out of an operator, as in a model, because Megatron overwrites it; that operator is
in the times and counts of both.
``python bench/bench_end_to_end.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bench import guard, part
from bench.bench_mappings import load_peer
from bench.cost import REPEATS, Cost, Samples, run_backward
from bench.timing import figures, geometric_mean, quantile, quiet_host, versions
from tritoncomm import mappings

PART = "end_to_end"  # of the suite: the name of the results file
WORLDS = (2, 4)
ROUNDS, WARM_UP = 70, 3  # rounds on 2 ranks; half of them on 4, which take twice as long
PROVIDERS = ("ours", "megatron")
COUNTED = ("messages", "passes", "peak")


@dataclass(frozen=True)
class Case:
    """One mapping of a tensor of ``shape`` on every one of ``world`` ranks."""

    name: str
    shape: tuple[int, ...]
    world: int
    note: str = ""
    fresh: bool = False  # the gradient comes out of an operator, as in a model: nothing but autograd holds it
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
        Case("copy_to_tensor_model_parallel_region", (256, 1024), world, "fresh gradient", fresh=True),
        Case("reduce_from_tensor_model_parallel_region", (256, 1024), world, "temporary input", temporary=True),
    )
]


@dataclass
class Row:
    """What one case takes: by provider what is counted, and microseconds on rank 0."""

    case: Case
    counted: dict[str, dict[str, float]]
    samples: Samples = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        ours, theirs = (quantile(self.samples[provider], 0.2) for provider in PROVIDERS)
        return ours / theirs

    def figures(self) -> dict[str, Any]:
        """The row in the results file."""
        return figures(self.case.label, self.samples, counted=self.counted)


@contextmanager
def _host() -> Iterator[None]:
    """The CPU as the device that Megatron allocates on, and no warnings of either's insides."""
    current = torch.cuda.current_device
    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        torch.cuda.current_device = current


def calls(case: Case, group: ProcessGroup) -> dict[str, Callable[[], tuple[Tensor, Tensor]]]:
    """By provider: the result and the gradient of the input, of the same tensors."""
    generator = torch.Generator().manual_seed(dist.get_rank())
    leaf = torch.randn(case.shape, generator=generator).requires_grad_()
    found: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {}
    gradient: Tensor | None = None
    for provider, module in zip(PROVIDERS, (mappings, load_peer()), strict=True):
        function = getattr(module, case.name)

        def forward(function: Any = function) -> Tensor:
            out = function(leaf * 2.0 if case.temporary else leaf, group=group)
            return out * 2.0 if case.fresh else out

        if gradient is None:
            gradient = torch.randn(forward().shape, generator=generator)

        def both(forward: Any = forward, gradient: Tensor = gradient) -> tuple[Tensor, Tensor]:
            out = forward()
            (grad,) = run_backward((out,), (gradient,), False, False, (leaf,), True, accumulate_grad=False)
            return out, grad

        found[provider] = both
    return found


def count(group: ProcessGroup, case: Case) -> dict[str, tuple[int, ...]]:
    """On this rank: (messages, bytes moved, peak bytes) by provider; results and gradients have to be equal bits."""
    found: dict[str, tuple[int, ...]] = {}
    with _host():
        made = calls(case, group)
        for ours, theirs in zip(*(call() for call in made.values()), strict=True):
            assert ours.shape == theirs.shape, case.label
            assert torch.equal(ours.detach().view(torch.int32), theirs.detach().view(torch.int32)), case.label
        for provider, call in made.items():
            runs = []
            for _ in range(REPEATS):  # Gloo's threads let go of a tensor when they please: the least is what is needed
                with Cost() as cost:
                    call()
                runs.append((cost.messages, cost.moved, cost.peak))
            found[provider] = tuple(min(counts) for counts in zip(*runs, strict=True))
    return found


def clock(group: ProcessGroup, case: Case, rounds: int) -> Samples:
    """On this rank: microseconds of one call by provider; all ranks start it together, who comes first alternates."""
    samples: Samples = {provider: [] for provider in PROVIDERS}
    with _host(), quiet_host():
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


def over_ranks(pool: Any, case: Case) -> dict[str, dict[str, float]]:
    """What the ranks counted, in inputs of a rank."""
    ranks, size = pool.run(count, case, world=case.world), 4 * torch.Size(case.shape).numel()
    found: dict[str, dict[str, float]] = {}
    for provider in PROVIDERS:
        messages, moved, peak = zip(*(rank[provider] for rank in ranks), strict=True)
        numbers = max(messages), round(sum(moved) / case.world / (2 * size), 3), round(max(peak) / size, 3)
        found[provider] = dict(zip(COUNTED, numbers, strict=True))
    return found


def measure(case: Case, pool: Any, rounds: int = ROUNDS) -> Row:
    """Both providers in one row; one that is worse than the committed one gets as many rounds again."""
    row = Row(case, over_ranks(pool, case))
    row.samples = pool.run(clock, case, rounds, world=case.world)[0]
    if guard.is_worse(PART, row.figures()):
        for provider, more in pool.run(clock, case, rounds, world=case.world)[0].items():
            row.samples[provider] += more
    return row


def table(rows: list[Row]) -> str:
    """One line per case: what is counted, and the microseconds at p20."""
    width = max(len(row.case.label) for row in rows)
    lines = [f"{'ours / megatron':{width}}" + "".join(f"  {name:>13}" for name in COUNTED) + f"  {'us on rank 0':>24}"]
    for row in rows:
        cells = "".join(f"  {' / '.join(f'{row.counted[p][what]:.4g}' for p in PROVIDERS):>13}" for what in COUNTED)
        ours, theirs = (quantile(row.samples[provider], 0.2) for provider in PROVIDERS)
        lines.append(f"{row.case.label:{width}}{cells}  {f'{ours:.0f} / {theirs:.0f} = {row.ratio:.2f}':>24}")
    lines.append(f"{'geometric mean':{width + 45}}  {geometric_mean([row.ratio for row in rows]):24.2f}")
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """What is counted and above Megatron's."""
    return [
        f"{row.case.label}: {what} {row.counted['ours'][what]:g}, Megatron's {row.counted['megatron'][what]:g}"
        for row in rows
        for what in COUNTED
        if row.counted["ours"][what] > row.counted["megatron"][what]
    ]


def as_json(rows: list[Row]) -> dict[str, Any]:
    means = {
        f"{world} ranks": geometric_mean(ratios)
        for world in WORLDS
        if (ratios := [row.ratio for row in rows if row.case.world == world])
    }
    return {
        "versions": versions("megatron-core"),
        "unit": "microseconds per call, forward and backward, Gloo over loopback; passes and peak memory in inputs",
        "rows": [row.figures() for row in rows],
        "geometric_mean": {ranks: round(mean, 3) for ranks, mean in means.items()},
    }


@contextmanager
def processes() -> Iterator[Any]:
    """Real ranks."""
    here = Path(__file__).resolve().parent
    for folder in (here, here.parent / "tests" / "helpers"):
        if str(folder) not in sys.path:
            sys.path.append(str(folder))
    from pool import Pool

    pool = Pool()
    try:
        yield pool
    finally:
        pool.stop()


@pytest.fixture(scope="module")
def pool() -> Iterator[Any]:
    if load_peer() is None:
        pytest.skip("megatron-core is not installed: there is nothing to compare the mappings with")
    with processes() as made:
        yield made


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_mapping_moves_and_holds_no_more_than_megatrons(case: Case, pool: Any, rows: list[Row]) -> None:
    row = measure(case, pool)
    rows.append(row)
    assert not failures([row])
    assert not [str(line) for line in guard.against_committed(PART, {"rows": [row.figures()]})]


def test_mappings_together(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    if len(rows) < len(CASES):
        pytest.skip(f"{len(rows)} of {len(CASES)} mappings were measured")
    with capsys.disabled():
        print("\n" + table(rows))


def main() -> int:
    options = part.arguments(
        "Mappings forward and backward on real ranks, against megatron-core's.", "mappings", ROUNDS
    )
    if load_peer() is None:
        print("megatron-core is not installed: there is nothing to compare the mappings with")
        return 2
    with processes() as pool:
        rows = [measure(case, pool, options.rounds) for case in CASES if options.only in case.label]
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
