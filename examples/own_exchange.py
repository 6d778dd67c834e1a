"""An exchange of one's own: each rank sends every second row to its right neighbour, with its gradient.

    torchrun --nproc-per-node 2 examples/own_exchange.py

A planner lists blocks and counts. The library packs them by a kernel, exchanges, counts, and compares in check mode.
"""

from functools import lru_cache
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

import tritoncomm
from tritoncomm.core.blocks import Block
from tritoncomm.core.call import enter
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.passes import Pass
from tritoncomm.record import Span


@lru_cache
def plan(rows: int, row: int, stride: tuple[int, int], world: int, rank: int, dtype: torch.dtype) -> list[Exchange]:
    """Plan ``[rows, row] -> [rows/2, row]`` to the right, and its adjoint: the gradient goes left into zeros."""
    size, peers, sent = (rows // 2, row), [(rank + 1) % world, (rank - 1) % world], rows // 2 * row * dtype.itemsize
    right, left = (tuple(prod(size) * (w == peer) for w in range(world)) for peer in peers)

    def copies(by: tuple[int, ...], counts: tuple[int, ...]) -> Pass:  # a block for each rank, at a byte of the wire
        starts = [sum(counts[:w]) * dtype.itemsize for w in range(world)]
        blocks = [Block(0, (n // row, row), by, 0, at, (row, 1)) for n, at in zip(counts, starts, strict=True)]
        return Pass(blocks, [dtype], sum(counts))

    there = Exchange(copies((2 * stride[0], stride[1]), right), None, right, left, sent, shapes=[size])
    back = Exchange(copies((row, 1), left), copies((2 * row, 1), right), left, right, sent, shapes=[(rows, row)])
    return [there, back]


class SendEverySecondRow(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group, ctx.shape = group, x.shape
        ctx.plans = plan(*x.shape, x.stride(), group.size(), group.rank(), x.dtype)
        # Check mode compares "right": a rank whose rows go left is named.
        span = enter("every_second_row", "exchange", group, [x], ("right",)) or Span("every_second_row")
        return ctx.plans[0].run([x], group, span)[0]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        name = "every_second_row.backward"
        span = enter(name, "exchange", ctx.group, [grad], ("left",)) or Span(name)
        return ctx.plans[1].run([grad.contiguous()], ctx.group, span, [grad.new_zeros(ctx.shape)])[0], None


def train(x: Tensor, target: Tensor, group: dist.ProcessGroup) -> list[float]:
    """The losses of a few steps; ``x`` is this rank's rows."""
    weight, losses = torch.ones(x.shape[1], x.shape[1], device=x.device).requires_grad_(), []
    for _ in range(5):
        loss = (SendEverySecondRow.apply(x @ weight, group) - target).square().mean() / group.size()
        loss.backward()
        both = torch.cat([weight.grad.flatten(), loss.detach().view(1)])
        dist.all_reduce(both, group=group)
        weight = (weight.detach() - 0.05 * both[:-1].view_as(weight)).requires_grad_()
        losses.append(both[-1].item())
    return losses


if __name__ == "__main__":
    tritoncomm.initialize()  # NCCL and the GPU of this rank, or Gloo
    group, made = dist.group.WORLD, torch.Generator().manual_seed(1)
    full = torch.randn(8 * group.size(), 4, generator=made).to("cuda" if torch.cuda.is_available() else "cpu")
    single = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    mine, before = full.chunk(group.size())[group.rank()], full.roll(8, 0).chunk(group.size())[group.rank()]
    losses, expected = train(mine, before[::2].sin(), group), train(full, full[::2].sin(), single)
    for step, (loss, one) in enumerate(zip(losses, expected, strict=True)) if group.rank() == 0 else ():
        print(f"step {step}: loss {loss:.5f} on {group.size()} ranks, {one:.5f} on one")
