"""What a tensor-parallel model is made of: ours against torch's DTensor, on the same ranks, forward and backward.

An MLP, column-parallel and then row-parallel, against ``parallelize_module`` (in "sequence" its input and output are
cut along the sequence); and the cross entropy of logits whose vocabulary is cut, against ``loss_parallel``. Values and
gradients of both are compared with those of plain torch on whole tensors in float64.

Counted on four Gloo ranks: messages (collective calls), passes (bytes that local ops read and write, as multiples of
once over this rank's input; mean over the ranks) and the most new memory held at once (in inputs; of the rank that
holds most). Host time is taken with small tensors over a process group that moves nothing.
``python bench/bench_tensor.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from bench import guard, part
from bench.cost import PROVIDERS, REPEATS, ROUNDS, WORLD, WORST, Cost, Ranks, Samples, local, paired, run_backward
from bench.timing import figures, geometric_mean, quantile, quiet_host, versions
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ShardSpec, shard_parameters

PART = "tensor"  # of the suite: the name of the results file
INNER = 5
COUNTED = ("messages", "passes", "peak")
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 4e-2}  # of the largest value; DTensor rounds log-softmax to bfloat16
NAMES = {torch.float32: "fp32", torch.bfloat16: "bf16"}
IGNORED = -100


@dataclass(frozen=True)
class Step:
    """Forward and backward of one provider: a call, what it is differentiated by, and the gradient of its result."""

    forward: Callable[[], Any]
    leaves: tuple[Any, ...]
    gradient: Any

    def __call__(self) -> tuple[Any, ...]:
        out = self.forward()
        grads = run_backward((out,), (self.gradient,), False, False, self.leaves, True, accumulate_grad=False)
        return tuple(x.wait() if isinstance(x, AsyncCollectiveTensor) else x for x in (out, *grads))


class Net(nn.Module):
    """Linear, GELU, linear, with biases."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self.up = nn.Linear(hidden, 4 * hidden, dtype=dtype)
        self.down = nn.Linear(4 * hidden, hidden, dtype=dtype)

    def forward(self, x: Any) -> Any:
        return self.down(F.gelu(self.up(x)))


@dataclass(frozen=True)
class Mlp:
    """A step of ``Net`` on ``[seq, batch, hidden]``; ``sequence``: every rank has its piece of the sequence."""

    sequence: bool
    dtype: torch.dtype
    shape: tuple[int, int, int] = (64, 4, 128)

    @property
    def label(self) -> str:
        return f"MLP {'sequence ' * self.sequence}{NAMES[self.dtype]} {list(self.shape)}"

    def small(self) -> "Mlp":
        return replace(self, shape=(8, 2, 16))

    def _made(self) -> tuple[Net, Tensor, Tensor]:
        torch.manual_seed(0)
        net = Net(self.shape[-1], self.dtype)
        return net, *(torch.randn(self.shape).to(self.dtype) for _ in range(2))

    def _here(self, whole: Tensor) -> Tensor:
        return whole.chunk(WORLD)[dist.get_rank()].clone() if self.sequence else whole.clone()

    def steps(self, pg: ProcessGroup) -> dict[str, Step]:
        net, x, gradient = self._made()
        ours, theirs = deepcopy(net), deepcopy(net)
        cuts = {"up.*": ShardSpec([0], [WORLD]), "down.weight": ShardSpec([-1], [WORLD])}
        shard_parameters(ours, cuts, pg, output_shard=0 if self.sequence else None)
        place = Shard(0) if self.sequence else Replicate()
        plan = {"up": ColwiseParallel(input_layouts=place), "down": RowwiseParallel(output_layouts=place)}
        parallelize_module(theirs, pg.device_mesh(), plan, src_data_rank=None)
        inputs = {"ours": self._here(x), "dtensor": self._here(x).requires_grad_()}
        if self.sequence:
            inputs["ours"] = ColoTensor(inputs["ours"], ColoTensorSpec(pg, ShardSpec([0], [WORLD])), self.shape)
        inputs["ours"].requires_grad_()
        nets = {"ours": ours, "dtensor": theirs}
        return {p: _step_of(nets[p], inputs[p], self._here(gradient)) for p in PROVIDERS}

    def expected(self) -> list[Tensor]:
        """Of this rank: the result, and the gradients of the input and of the parameters."""
        net, x, gradient = self._made()
        net, x = net.double(), x.double().requires_grad_()
        found = _step_of(net, x, gradient.double())()
        rank = dist.get_rank()
        pieces = [self._here(whole) for whole in found[:2]]
        return [*pieces, *(w.chunk(WORLD, d)[rank] for w, d in zip(found[2:5], (0, 0, 1), strict=True)), found[5]]


def _step_of(net: nn.Module, x: Any, gradient: Tensor) -> Step:
    return Step(lambda: net(x), (x, *net.parameters()), gradient)


@dataclass(frozen=True)
class Entropy:
    """A step of the cross entropy of ``[tokens, vocabulary]``; ``ignored``: every eighth target does not count."""

    reduction: str
    dtype: torch.dtype
    ignored: bool = False
    shape: tuple[int, int] = (512, 8192)

    @property
    def label(self) -> str:
        words = ["cross entropy", self.reduction, NAMES[self.dtype], *["ignore_index"] * self.ignored]
        return f"{' '.join(words)} {list(self.shape)}"

    def small(self) -> "Entropy":
        return replace(self, shape=(16, 64))

    def _made(self) -> tuple[Tensor, Tensor]:
        torch.manual_seed(0)
        target = torch.randint(self.shape[1], self.shape[:1])
        if self.ignored:
            target[::8] = IGNORED
        return (4 * torch.randn(self.shape)).to(self.dtype), target

    def steps(self, pg: ProcessGroup) -> dict[str, Step]:
        logits, target = self._made()
        here, mesh = logits.chunk(WORLD, 1)[dist.get_rank()], pg.device_mesh()
        ours = ColoTensor(here.clone(), ColoTensorSpec(pg, ShardSpec([-1], [WORLD])), self.shape)
        leaves = {"ours": ours, "dtensor": DTensor.from_local(here.clone(), mesh, [Shard(1)])}
        one = torch.ones((), dtype=self.dtype)
        gradients = {"ours": one, "dtensor": DTensor.from_local(one, mesh, [Replicate()])}
        return {p: self._step(leaves[p].detach().requires_grad_(), target, gradients[p]) for p in PROVIDERS}

    def _step(self, x: Any, target: Tensor, gradient: Any) -> Step:
        def forward() -> Any:
            return F.cross_entropy(x, target, reduction=self.reduction, ignore_index=IGNORED)

        return Step(forward, (x,), gradient)

    def expected(self) -> list[Tensor]:
        """Of this rank: the loss, and the gradient of the logits."""
        logits, target = self._made()
        loss, grad = self._step(logits.double().requires_grad_(), target, torch.ones((), dtype=torch.float64))()
        return [loss, grad.chunk(WORLD, 1)[dist.get_rank()]]


CASES = [
    Mlp(False, torch.float32),
    Mlp(False, torch.bfloat16),
    Mlp(True, torch.float32),
    *(Entropy(reduction, dtype) for reduction in ("mean", "sum") for dtype in (torch.float32, torch.bfloat16)),
    *(Entropy("mean", dtype, ignored=True) for dtype in (torch.float32, torch.bfloat16)),
]


@dataclass
class Row:
    """What one case takes: by provider what is counted, and microseconds."""

    case: Mlp | Entropy
    counted: dict[str, dict[str, float]]
    samples: Samples = field(default_factory=dict)

    @property
    def ratio(self) -> float:
        ours, theirs = (quantile(self.samples[provider], 0.2) for provider in PROVIDERS)
        return ours / theirs

    def figures(self, samples: Samples | None = None) -> dict[str, Any]:
        """The row in the results file."""
        return figures(self.case.label, samples or self.samples, counted=self.counted, limit=WORST)


def check(found: tuple[Any, ...], expected: list[Tensor], case: Mlp | Entropy, provider: str) -> None:
    """Values and gradients are those of plain torch on whole tensors."""
    for place, (x, right) in enumerate(zip(found, expected, strict=True)):
        assert not (isinstance(x, DTensor) and any(each.is_partial() for each in x.placements))
        away = (local(x.detach()).double() - right).abs().max() / right.abs().max()
        assert away <= TOLERANCE[case.dtype], f"{provider}, {case.label}: {away:.1e} from plain torch at {place}"


def count(group: TorchGroup, case: Mlp | Entropy) -> dict[str, tuple[int, ...]]:
    """On this rank: (messages, bytes moved, peak bytes) by provider; the results have to be right."""
    pg = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=WORLD)
    found: dict[str, tuple[int, ...]] = {}
    with loss_parallel():
        expected = case.expected()
        for provider, step in case.steps(pg).items():
            check(step(), expected, case, provider)
            runs = []
            for _ in range(REPEATS):  # Gloo's threads let go of a tensor when they please: the least is what is needed
                with Cost() as cost:
                    step()
                runs.append((cost.messages, cost.moved, cost.peak))
            found[provider] = tuple(min(counts) for counts in zip(*runs, strict=True))
    return found


def over_ranks(pool: Any, case: Mlp | Entropy) -> dict[str, dict[str, float]]:
    """What the ranks counted, in inputs of a rank."""
    ranks = pool.run(count, case, world=WORLD)
    cut = not isinstance(case, Mlp) or case.sequence
    size = case.dtype.itemsize * torch.Size(case.shape).numel() / (WORLD if cut else 1)
    found: dict[str, dict[str, float]] = {}
    for provider in PROVIDERS:
        messages, moved, peak = zip(*(rank[provider] for rank in ranks), strict=True)
        numbers = max(messages), round(sum(moved) / WORLD / (2 * size), 3), round(max(peak) / size, 3)
        found[provider] = dict(zip(COUNTED, numbers, strict=True))
    return found


def measure(case: Mlp | Entropy, pool: Any, pg: ProcessGroup, rounds: int = ROUNDS, inner: int = INNER) -> Row:
    """Both providers in one row."""
    row = Row(case, over_ranks(pool, case))
    with loss_parallel(), quiet_host():
        row.samples = paired(PART, case.small().steps(pg), row.figures, rounds, inner)
    return row


def table(rows: list[Row]) -> str:
    """One line per case: what is counted, and the microseconds at p20."""
    width = max(len(row.case.label) for row in rows)
    lines = [f"{'ours / dtensor':{width}}" + "".join(f"  {name:>15}" for name in COUNTED) + f"  {'host time':>24}"]
    for row in rows:
        cells = "".join(f"  {' / '.join(f'{row.counted[p][what]:.4g}' for p in PROVIDERS):>15}" for what in COUNTED)
        ours, theirs = (quantile(row.samples[provider], 0.2) for provider in PROVIDERS)
        lines.append(f"{row.case.label:{width}}{cells}  {f'{ours:.1f} / {theirs:.1f} = {row.ratio:.2f}':>24}")
    lines.append(f"{'geometric mean':{width + 51}}  {geometric_mean([row.ratio for row in rows]):24.2f}")
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """What misses the targets: nothing worse than DTensor; of the cross entropy, passes and memory better."""
    found = []
    for row in rows:
        ours, theirs = (row.counted[provider] for provider in PROVIDERS)
        for what in COUNTED:
            better = isinstance(row.case, Entropy) and what != "messages"
            if ours[what] > theirs[what] or (better and ours[what] == theirs[what]):
                found.append(f"{row.case.label}: {what} {ours[what]:g}, DTensor's {theirs[what]:g}")
        if row.ratio > WORST:
            found.append(f"{row.case.label}: {row.ratio:.2f} of DTensor's time, at most {WORST}")
    return found


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "unit": "microseconds per step; passes and peak memory in inputs of a rank",
        "world": WORLD,
        "rows": [row.figures() for row in rows],
        "geometric_mean": round(geometric_mean([row.ratio for row in rows]), 3),
    }


@pytest.mark.parametrize(
    ("call", "moved", "peak"),
    [
        pytest.param(lambda x: x + 1, 2, 1, id="add"),
        pytest.param(lambda x: x.add_(1), 2, 0, id="add-in-place"),
        pytest.param(lambda x: (x + 1) + 1, 4, 2, id="add-twice"),
        pytest.param(lambda x: [(x + 1).sum(), (x + 1).sum()], 6 + 2 / 64, 1 + 2 / 64, id="memory-let-go"),
        pytest.param(lambda x: x.t().view(8, 2, 4), 0, 0, id="view"),
        pytest.param(lambda x: x.t().reshape(-1), 2, 1, id="view-that-copies"),
        pytest.param(torch.zeros_like, 1, 1, id="only-written"),
        pytest.param(lambda x: torch.exp(x, out=x.new_empty(8, 8)), 2, 1, id="given-result"),
        pytest.param(lambda x: x + x.bfloat16(), 1.5 + 2.5 + 2, 1.5, id="dtypes-mixed"),
        pytest.param(lambda x: x.logsumexp(-1), 6 + 1 / 8, 1 + 1 / 8, id="composed"),
        pytest.param(
            lambda x: x.index_fill_(0, torch.ones(2, dtype=torch.int64), 0.0), 2 / 16 + 2 / 8, 1 / 16, id="few-rows"
        ),
    ],
)
def test_what_is_counted(call: Callable[[Tensor], Any], moved: float, peak: float) -> None:
    x = torch.ones(8, 8)
    with Cost() as cost:
        call(x)
    assert (cost.moved, cost.peak) == (moved * x.nbytes, peak * x.nbytes)


@pytest.fixture(scope="module")
def ranks() -> Iterator[tuple[Any, ProcessGroup]]:
    with Ranks() as made:
        yield made


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_a_step_costs_no_more_than_dtensors(benchmark: Any, case: Any, ranks: Any, rows: list[Row]) -> None:
    row = measure(case, *ranks)
    rows.append(row)
    benchmark.extra_info["ratio"] = round(row.ratio, 3)
    benchmark.pedantic(case.small().steps(ranks[1])["ours"], rounds=20, iterations=INNER, warmup_rounds=1)
    assert not failures([row])
    assert not [str(line) for line in guard.against_committed(PART, {"rows": [row.figures()]})]


def test_steps_together(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    if len(rows) < len(CASES):
        pytest.skip(f"{len(rows)} of {len(CASES)} steps were measured")
    with capsys.disabled():
        print("\n" + table(rows))


def main() -> int:
    options = part.arguments("Steps of tensor-parallel training against DTensor's.", "cases", ROUNDS)
    warnings.simplefilter("ignore")
    with Ranks() as (pool, pg):
        rows = [measure(case, pool, pg, options.rounds) for case in CASES if options.only in case.label]
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
