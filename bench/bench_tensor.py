"""Parts of a tensor-parallel model: ours against torch's DTensor, on the same ranks, forward and backward.

An MLP, column-parallel and then row-parallel, against ``parallelize_module`` (in "sequence" its input and output are
sharded along the sequence); and the cross entropy of logits sharded along the vocabulary, against ``loss_parallel``.
Values and gradients of both are compared with those of plain torch on full tensors in float64.

Counted on four Gloo ranks: messages (collective calls), passes (bytes that local ops read and write, as multiples of
once over this rank's input; mean over the ranks) and the most new memory held at once (in inputs; of the rank that
holds most). Host time is taken with small tensors over a no-op process group.
``python bench/bench_tensor.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup as TorchGroup
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, loss_parallel, parallelize_module

from bench.cost import PROVIDERS, WORLD, Counts, dtensor_part, least, local, more_than, over_ranks
from bench.guard import row_target
from bench.harness import Clock, Row
from bench.hosts import run_backward
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ShardSpec, shard_parameters

INNER = 5
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
    """A step of ``Net`` on ``[seq, batch, hidden]``; ``sequence``: every rank has its shard of the sequence."""

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

    def _local(self, x: Tensor) -> Tensor:
        return x.chunk(WORLD)[dist.get_rank()].clone() if self.sequence else x.clone()

    def steps(self, pg: ProcessGroup) -> dict[str, Step]:
        net, x, gradient = self._made()
        ours, theirs = deepcopy(net), deepcopy(net)
        specs = {"up.*": ShardSpec([0], [WORLD]), "down.weight": ShardSpec([-1], [WORLD])}
        shard_parameters(ours, specs, pg, output_shard=0 if self.sequence else None)
        place = Shard(0) if self.sequence else Replicate()
        plan = {"up": ColwiseParallel(input_layouts=place), "down": RowwiseParallel(output_layouts=place)}
        parallelize_module(theirs, pg.device_mesh(), plan, src_data_rank=None)
        inputs = {"ours": self._local(x), "dtensor": self._local(x).requires_grad_()}
        if self.sequence:
            inputs["ours"] = ColoTensor(inputs["ours"], ColoTensorSpec(pg, ShardSpec([0], [WORLD])), self.shape)
        inputs["ours"].requires_grad_()
        nets = {"ours": ours, "dtensor": theirs}
        return {p: _step_of(nets[p], inputs[p], self._local(gradient)) for p in PROVIDERS}

    def expected(self) -> list[Tensor]:
        """Of this rank: the result, and the gradients of the input and of the parameters."""
        net, x, gradient = self._made()
        net, x = net.double(), x.double().requires_grad_()
        results = _step_of(net, x, gradient.double())()
        rank = dist.get_rank()
        shards = [self._local(x) for x in results[:2]]
        return [*shards, *(w.chunk(WORLD, d)[rank] for w, d in zip(results[2:5], (0, 0, 1), strict=True)), results[5]]


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


def check(results: tuple[Any, ...], expected: list[Tensor], case: Mlp | Entropy, provider: str) -> None:
    """Values and gradients are those of plain torch on full tensors."""
    for i, (x, right) in enumerate(zip(results, expected, strict=True)):
        assert not (isinstance(x, DTensor) and any(each.is_partial() for each in x.placements))
        error = (local(x.detach()).double() - right).abs().max() / right.abs().max()
        assert error <= TOLERANCE[case.dtype], f"{provider}, {case.label}: {error:.1e} from plain torch, result {i}"


def count(group: TorchGroup, case: Mlp | Entropy) -> dict[str, Counts]:
    """Costs of a step on this rank, by provider; the results have to be right."""
    pg = ProcessGroup(ranks=dist.get_process_group_ranks(group), tp_degree=WORLD)
    counted: dict[str, Counts] = {}
    with loss_parallel():
        expected = case.expected()
        for provider, step in case.steps(pg).items():
            check(step(), expected, case, provider)
            counted[provider] = least(step)
    return counted


def measure(case: Mlp | Entropy, host: tuple[Any, ProcessGroup], clock: Clock) -> Iterator[Row]:
    """Both providers in one row; counts are in inputs of a rank."""
    pool, pg = host
    ranks = pool.run(count, case, world=WORLD)
    sharded = not isinstance(case, Mlp) or case.sequence
    size = case.dtype.itemsize * torch.Size(case.shape).numel() / (WORLD if sharded else 1)
    counted = {provider: over_ranks([rank[provider] for rank in ranks], size) for provider in PROVIDERS}
    with loss_parallel():
        yield clock.time(case.label, dict(case.small().steps(pg)), INNER, counted=counted, **row_target())


def missed(row: Row) -> list[str]:
    """Nothing more than DTensor; of the cross entropy, less passes and memory."""
    ours, theirs = (row["counted"][provider] for provider in PROVIDERS)
    result = more_than(row["row"], ours, theirs, "DTensor")
    if row["row"].startswith("cross entropy"):
        equal = [what for what in ("passes", "peak") if ours[what] == theirs[what]]
        result += [f"{row['row']}: {what} {ours[what]:g}, no less than DTensor's" for what in equal]
    return result


PART = dtensor_part(
    name="tensor",
    unit="microseconds per step; passes and peak memory in inputs of a rank",
    cases=CASES,
    measure=measure,
    targets=missed,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
