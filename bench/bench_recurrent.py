"""Host cost of the exchanges of recurrent layers against the same exchanges by hand, over a no-op process group.

Every row is forward and backward, in CPU time of the calling thread; the recurrence and the convolution themselves are
one multiplication. "By hand" is an ``autograd.Function`` over ``torch.distributed`` for heads that the ranks divide:
one concatenation and one all-to-all each way for the tensors of a dtype, and for a convolution the last positions of
the shard to the next rank. ``python bench/bench_recurrent.py`` prints the table; ``--json PATH`` writes it with
versions.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.bench_ulysses import sampled
from bench.guard import row_target
from bench.harness import Part, Row
from bench.hosts import no_op_group, run_backward
from tritoncomm.recurrent import by_heads, conv_halo

WORLD, TAPS = 4, 4
INNER = 10
LARGEST = 1.1  # of the time by hand


class ToHeads(torch.autograd.Function):
    """All-to-all from positions to heads of tensors ``[b, s, heads, d]`` of one dtype."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.group, ctx.shapes = group, [x.shape[2:] for x in tensors]
        return to_heads(group, tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *to_sequence(ctx.group, grads)


class ToSequence(torch.autograd.Function):
    """All-to-all from heads to positions of a tensor ``[b, S, heads, d]``."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, x: Tensor) -> Tensor:
        ctx.group = group
        return to_sequence(group, [x])[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *to_heads(ctx.group, [grad])


def to_heads(group: ProcessGroup, tensors: Any) -> tuple[Tensor, ...]:
    """Return all positions of this rank's heads."""
    world = group.size()
    parts = [x.unflatten(2, (world, -1)).movedim(2, 0).flatten(3) for x in tensors]
    wire = torch.cat(parts, 3) if len(parts) > 1 else parts[0].contiguous()
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=group)
    joined = arrived.movedim(0, 1).flatten(1, 2).split([part.shape[3] for part in parts], 2)
    return tuple([x.unflatten(2, (-1, like.shape[3])) for x, like in zip(joined, tensors, strict=True)])


def to_sequence(group: ProcessGroup, tensors: Any) -> tuple[Tensor, ...]:
    """Return this rank's positions of all heads."""
    world = group.size()
    parts = [x.flatten(2) for x in tensors]
    joined = torch.cat(parts, 2) if len(parts) > 1 else parts[0]
    wire = joined.unflatten(1, (world, -1)).movedim(1, 0).contiguous()
    arrived = torch.empty_like(wire)
    dist.all_to_all_single(arrived, wire, group=group)
    split = arrived.split([part.shape[2] for part in parts], 3)
    return tuple(
        [
            x.movedim(0, 2).unflatten(3, (-1, like.shape[3])).flatten(2, 3)
            for x, like in zip(split, tensors, strict=True)
        ]
    )


class Halo(torch.autograd.Function):
    """The last positions of the shard before, ``[b, channels, K-1]``."""

    @staticmethod
    def forward(ctx: Any, group: ProcessGroup, x: Tensor) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        return sent(group, x[:, :, 1 - TAPS :], 1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        whole = grad.new_zeros(ctx.shape)
        whole[:, :, 1 - TAPS :] = sent(ctx.group, grad, -1)
        return None, whole


def sent(group: ProcessGroup, x: Tensor, step: int) -> Tensor:
    """Send ``[b, channels, K-1]`` to the next rank, or to the one before; zeros where nothing arrives."""
    world, rank = group.size(), group.rank()
    rows = x.movedim(2, 0).contiguous()
    sizes = [len(rows) if peer == rank + step else 0 for peer in range(world)]
    received = [len(rows) if peer == rank - step else 0 for peer in range(world)]
    arrived = torch.zeros_like(rows)
    out = arrived if sum(received) else arrived[:0]
    dist.all_to_all_single(out, rows if sum(sizes) else rows[:0], received, sizes, group=group)
    return arrived.movedim(0, 2)


def recurrence(query: Tensor, key: Tensor, value: Tensor, g: Tensor, beta: Tensor) -> Tensor:
    """The least that a recurrence may be: every input reaches the result."""
    return value * (query[..., :1] * key[..., :1] * (g * beta).to(value.dtype)[..., None])


def convolution(x: Tensor, weight: Tensor) -> Tensor:
    """The least that a convolution may be."""
    return x * weight[0, 0]


@dataclass(frozen=True)
class Case:
    """One kind of layer.

    Attributes:
        sizes: batch, positions of the shard, heads (channels) and head_dim.
        mixed: whether the gates are in fp32 beside bf16.
    """

    kind: str
    sizes: tuple[int, int, int, int]
    mixed: bool = False

    @property
    def label(self) -> str:
        return f"{self.kind}, {list(self.sizes)}" + (", gates in fp32 beside bf16" if self.mixed else "")


def forwards_of(case: Case, group: ProcessGroup) -> tuple[dict[str, Callable[[], Tensor]], tuple[Tensor, ...], Tensor]:
    """Forward of ours and by hand, their leaves, and a gradient of the result."""
    batch, positions, heads, size = case.sizes
    if case.kind == "convolution":
        x, weight = torch.randn(batch, heads, positions, requires_grad=True), torch.randn(heads, TAPS)
        gradient, leaves = torch.randn(x.shape), (x,)
        over_shards = conv_halo(convolution, group)

        def ours() -> Tensor:
            return over_shards(x, weight)

        def plain() -> Tensor:
            out = convolution(torch.cat([Halo.apply(group, x), x], 2), weight)
            return out[:, :, TAPS - 1 :]
    else:
        dtype = torch.bfloat16 if case.mixed else torch.float32
        q, k, v = (torch.randn(batch, positions, heads, size, dtype=dtype, requires_grad=True) for _ in range(3))
        g, beta = (torch.randn(batch, positions, heads, requires_grad=True) for _ in range(2))
        gradient, leaves = torch.randn(v.shape, dtype=dtype), (q, k, v, g, beta)
        over_shards = by_heads(recurrence, group)

        def ours() -> Tensor:
            return over_shards(q, k, v, g=g, beta=beta)

        def plain() -> Tensor:
            gates = g.unsqueeze(3), beta.unsqueeze(3)
            if case.mixed:
                tensors = *ToHeads.apply(group, q, k, v), *ToHeads.apply(group, *gates)
            else:
                tensors = ToHeads.apply(group, q, k, v, *gates)
            gates = [x.squeeze(3) for x in tensors[3:]]
            return ToSequence.apply(group, recurrence(*tensors[:3], *gates))

    return {"ours": ours, "by hand": plain}, leaves, gradient


def calls_of(case: Case, group: ProcessGroup) -> dict[str, Callable[[], Any]]:
    """Forward and backward of ours and by hand."""
    forwards, leaves, gradient = forwards_of(case, group)

    def both(forward: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: run_backward((forward(),), (gradient,), False, False, leaves, True, accumulate_grad=False)

    return {provider: both(forward) for provider, forward in forwards.items()}


CASES = [
    Case("recurrence", (1, 16, 8, 16)),
    Case("recurrence", (2, 16, 8, 16)),
    Case("recurrence", (1, 16, 8, 16), mixed=True),
    Case("convolution", (1, 16, 64, 1)),
    Case("convolution", (2, 16, 64, 1)),
]


def measure(case: Case, group: ProcessGroup, clock: Any) -> Iterator[Row]:
    """One row: forward and backward of both."""
    calls = calls_of(case, group)
    if hasattr(clock, "calls"):  # pytest-benchmark repeats ours
        clock.calls.append(calls["ours"])
        clock.repeats.append(INNER)
    yield clock.row(case.label, lambda: sampled(calls, clock.rounds, INNER), mode="layer", **row_target(LARGEST))


PART = Part(
    name="recurrent",
    unit="microseconds per call",
    cases=CASES,
    measure=measure,
    host=lambda: no_op_group(WORLD, 1),
    rounds=60,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
