"""Host cost of every mapping against megatron-core's own, over a process group that moves nothing.

With small CPU tensors and a fake process group a call is all host work: what is compared is Python, autograd and the
calls into the backend. Where Megatron overwrites an input or a gradient that the caller still holds (the two rows that
say so), ours makes a copy first; what that copy costs is allowed for in the limit of these rows.
``python bench/bench_mappings.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench import guard, part
from bench.timing import figures, geometric_mean, interleaved, quantile, quiet_host, versions
from tritoncomm import mappings

PART = "host_cost"  # of the suite: the name of the results file
WORLD = 4
ROUNDS, INNER = 200, 40
WORST, MEAN = 1.05, 0.80  # of Megatron's time: no mapping above, geometric mean at most
COPY = 0.03  # one clone of 512 bytes, of that time
MODES = ("forward", "forward, with grad", "forward + backward")
HELD_TO_MEAN = {"forward": MODES[:2], "forward + backward": MODES[2:]}


@dataclass(frozen=True)
class Case:
    """One mapping with its arguments after the input; ``local_out`` is the shape on rank 0."""

    name: str
    shape: tuple[int, ...]
    local_out: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    fresh: bool = False  # the gradient comes out of another op, as in a model: nothing but autograd holds it
    temporary: bool = False  # so does the input
    limit: float = WORST

    @property
    def label(self) -> str:
        return f"{self.name} {list(self.shape)}{f' {self.note}' if self.note else ''}"


# The fake group gathers pieces of one size only, so the sizes of a gather are equal here.

CASES = [
    Case("copy_to_tensor_model_parallel_region", (8, 16), (8, 16), note="held gradient", limit=WORST + COPY),
    Case("copy_to_tensor_model_parallel_region", (8, 16), (8, 16), note="fresh gradient", fresh=True),
    Case("reduce_from_tensor_model_parallel_region", (8, 16), (8, 16), note="held input", limit=WORST + COPY),
    Case("reduce_from_tensor_model_parallel_region", (8, 16), (8, 16), note="temporary input", temporary=True),
    Case("scatter_to_tensor_model_parallel_region", (8, 2, 16), (8, 2, 4)),
    Case("gather_from_tensor_model_parallel_region", (8, 2, 16), (8, 2, 64)),
    Case("scatter_to_sequence_parallel_region", (8, 2, 16), (2, 2, 16)),
    Case("gather_from_sequence_parallel_region", (8, 2, 16), (32, 2, 16)),
    Case(
        "gather_from_sequence_parallel_region",
        (8, 2, 16),
        (32, 2, 16),
        {"tensor_parallel_output_grad": False},
        "replicated gradient",
    ),
    Case(
        "gather_from_sequence_parallel_region",
        (8, 2, 16),
        (32, 2, 16),
        {"output_split_sizes": [8] * WORLD},
        "sizes",
    ),
    Case("reduce_scatter_to_sequence_parallel_region", (8, 2, 16), (2, 2, 16)),
    Case(
        "reduce_scatter_to_sequence_parallel_region",
        (8, 2, 16),
        (2, 2, 16),
        {"input_split_sizes": [2] * WORLD},
        "sizes",
    ),
    Case("all_gather_last_dim_from_tensor_parallel_region", (8, 16), (8, 64)),
    Case("reduce_scatter_last_dim_to_tensor_parallel_region", (8, 16), (8, 4)),
    Case("all_to_all", (8, 16), (8, 16)),
    Case(
        "all_to_all",
        (8, 16),
        (10, 16),
        {"output_split_sizes_": [2, 1, 4, 3], "input_split_sizes": [1, 2, 3, 2]},
        "split sizes",
    ),
    Case("all_to_all_sp2hp", (8, 16), (32, 4)),
    Case("all_to_all_hp2sp", (8, 16), (2, 64)),
]


# What torch.autograd.grad calls; its own checks take as long as a mapping does, for both providers alike.
_backward = torch.autograd.Variable._execution_engine.run_backward  # type: ignore


@dataclass
class Row:
    """Microseconds per call by mode, of ours and of Megatron's, over the rounds."""

    case: Case
    samples: dict[str, tuple[list[float], list[float]]] = field(default_factory=dict)

    def cost(self, mode: str) -> tuple[float, float]:
        ours, theirs = self.samples[mode]
        return quantile(ours, 0.2), quantile(theirs, 0.2)

    def ratio(self, mode: str) -> float:
        ours, theirs = self.cost(mode)
        return ours / theirs

    def figures(self, mode: str) -> dict[str, Any]:
        """The row of one mode in the results file."""
        ours, theirs = self.samples[mode]
        label = f"{self.case.label}, {mode}"
        return figures(label, {"ours": ours, "megatron": theirs}, mode=mode, limit=self.case.limit)

    def suspect(self, mode: str) -> bool:
        """Above its limit, or worse than the committed figures."""
        return self.ratio(mode) > self.case.limit or guard.is_worse(PART, self.figures(mode))


def calls(module: Any, case: Case, group: dist.ProcessGroup) -> dict[str, Callable[[], Any]]:
    """The three calls that are timed, of one provider."""
    function, arguments = getattr(module, case.name), case.arguments
    plain = torch.randn(case.shape)
    leaf = torch.randn(case.shape, requires_grad=True)
    gradient = torch.randn(case.local_out)

    def call(x: Tensor) -> Callable[[], Tensor]:
        if case.name == "all_to_all":
            return lambda: function(group, x, **arguments)
        if case.temporary:
            return lambda: function(x * 2.0, group=group, **arguments)
        return lambda: function(x, group=group, **arguments)

    def both() -> tuple[Tensor, ...]:
        out = forward() * 2.0 if case.fresh else forward()
        return _backward((out,), (gradient,), False, False, (leaf,), True, accumulate_grad=False)

    forward = call(leaf)
    return dict(zip(MODES, (call(plain), forward, both), strict=True))


def assert_agree(case: Case, ours: dict[str, Callable[[], Any]], theirs: dict[str, Callable[[], Any]]) -> None:
    """Shapes, dtypes and gradients of both; the fake group moves no data, so values are left to the tests."""
    for mode in MODES[:2]:
        for result in (ours[mode](), theirs[mode]()):
            assert tuple(result.shape) == case.local_out, (case.label, mode, result.shape)
            assert result.dtype is torch.float32
            assert result.requires_grad is (mode == MODES[1])
    for gradients in (ours[MODES[2]](), theirs[MODES[2]]()):
        (gradient,) = gradients
        assert tuple(gradient.shape) == case.shape, (case.label, gradient.shape)
        assert gradient.dtype is torch.float32


def measure(case: Case, peer: Any, group: dist.ProcessGroup, rounds: int = ROUNDS, inner: int = INNER) -> Row:
    """Both providers in one row; a mode that misses a limit gets as many rounds again, pooled with the first."""
    ours, theirs = calls(mappings, case, group), calls(peer, case, group)
    assert_agree(case, ours, theirs)
    row = Row(case)
    with quiet_host():
        for mode in MODES:
            pair = (ours[mode], theirs[mode])
            row.samples[mode] = tuple(interleaved(pair, rounds, inner))
            if row.suspect(mode):
                for kept, more in zip(row.samples[mode], interleaved(pair, rounds, inner), strict=True):
                    kept += more
    return row


def table(rows: list[Row]) -> str:
    """One line per mapping: microseconds of ours / Megatron's at p20 and their ratio, by mode."""
    width = max(len(row.case.label) for row in rows)
    lines = [f"{'ours / megatron, us at p20':{width}}" + "".join(f"  {mode:>22}" for mode in MODES)]
    for row in rows:
        cells = ""
        for mode in MODES:
            ours, theirs = row.cost(mode)
            cells += f"  {f'{ours:.1f} / {theirs:.1f} = {ours / theirs:.2f}':>22}"
        lines.append(f"{row.case.label:{width}}{cells}")
    means = [geometric_mean([row.ratio(mode) for row in rows]) for mode in MODES]
    lines.append(f"{'geometric mean':{width}}" + "".join(f"  {mean:22.2f}" for mean in means))
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """What misses the targets."""
    found = [
        f"{row.case.label}, {mode}: {row.ratio(mode):.2f} of Megatron's time, at most {row.case.limit:.2f}"
        for row in rows
        for mode in MODES
        if row.ratio(mode) > row.case.limit
    ]
    for name, modes in HELD_TO_MEAN.items():
        mean = geometric_mean([row.ratio(mode) for row in rows for mode in modes])
        if mean > MEAN:
            found.append(f"geometric mean, {name}: {mean:.2f} of Megatron's time, at most {MEAN}")
    return found


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {
        "versions": versions("megatron-core"),
        "unit": "microseconds per call",
        "world": WORLD,
        "rows": [row.figures(mode) for row in rows for mode in MODES],
        "geometric_mean": {mode: round(geometric_mean([row.ratio(mode) for row in rows]), 3) for mode in MODES},
    }


def load_peer() -> Any | None:
    """Megatron's mappings, or None when megatron-core is not installed."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import megatron.core.tensor_parallel.mappings as peer
    except ImportError:
        return None
    return peer


class _Host:
    """The fake group, and the CPU as the device that Megatron allocates on."""

    def __enter__(self) -> dist.ProcessGroup:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
        self._current_device = torch.cuda.current_device
        torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore
        group = dist.group.WORLD
        assert group is not None
        return group

    def __exit__(self, *_: object) -> None:
        torch.cuda.current_device = self._current_device
        dist.destroy_process_group()


@pytest.fixture(scope="module")
def peer() -> Any:
    found = load_peer()
    if found is None:
        pytest.skip("megatron-core is not installed: there is nothing to compare the mappings with")
    return found


@pytest.fixture(scope="module")
def group() -> Iterator[dist.ProcessGroup]:
    with _Host() as made:
        yield made


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_mapping_costs_no_more_than_megatrons(
    benchmark: Any, case: Case, peer: Any, group: dist.ProcessGroup, rows: list[Row]
) -> None:
    row = measure(case, peer, group)
    rows.append(row)
    benchmark.extra_info.update({f"ratio, {mode}": round(row.ratio(mode), 3) for mode in MODES})
    benchmark.pedantic(calls(mappings, case, group)[MODES[2]], rounds=20, iterations=INNER, warmup_rounds=1)
    assert not [line for line in failures([row]) if not line.startswith("geometric")]
    assert not [str(line) for line in guard.against_committed(PART, {"rows": [row.figures(mode) for mode in MODES]})]


def test_mappings_in_the_mean(peer: Any, rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    if len(rows) < len(CASES):
        pytest.skip(f"{len(rows)} of {len(CASES)} mappings were measured")
    with capsys.disabled():
        print("\n" + table(rows))
    assert not [line for line in failures(rows) if line.startswith("geometric")]


def main() -> int:
    options = part.arguments("Host cost of every mapping against megatron-core's.", "mappings", ROUNDS)
    peer = load_peer()
    if peer is None:
        print("megatron-core is not installed: there is nothing to compare the mappings with")
        return 2
    warnings.simplefilter("ignore")
    with _Host() as group:
        rows = [measure(case, peer, group, options.rounds) for case in CASES if options.only in case.label]
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
