"""A mixture of experts whose experts are on two ranks; every rank has its own tokens.

    torchrun --nproc-per-node 2 examples/experts.py

One rank also trains on all tokens with all experts; the losses are the same.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tritoncomm
from tritoncomm.experts import combine, dispatch

STEPS, RATE, TOKENS, HIDDEN, EXPERTS, K = 4, 1.0, 64, 32, 8, 2


class Mixture(nn.Module):
    """Experts ``first`` to ``first + number`` of all; each is one matrix."""

    def __init__(self, first: int, number: int, group: dist.ProcessGroup) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.group, self.router = group, nn.Linear(HIDDEN, EXPERTS)
        whole = torch.randn(EXPERTS, HIDDEN, HIDDEN) / HIDDEN**0.5
        self.experts = nn.Parameter(whole[first : first + number].clone())

    def forward(self, x: Tensor) -> Tensor:
        weights, ids = self.router(x).softmax(-1).topk(K)
        dispatched = dispatch(x, ids, weights, EXPERTS, self.group)
        rows, counts = dispatched.by_expert()
        parts = rows.split(counts.tolist())
        outputs = torch.cat([part @ expert for part, expert in zip(parts, self.experts, strict=True)])
        return combine(dispatched.summed(outputs), dispatched)


def main() -> None:
    tritoncomm.initialize(data=2, expert=2)
    group = tritoncomm.groups.get_group(tritoncomm.ParallelMode.EXPERT)
    rank, alone = dist.get_rank(), dist.new_subgroups(1)[0]
    mixture, single = Mixture(rank * EXPERTS // 2, EXPERTS // 2, group), Mixture(0, EXPERTS, alone)
    x, target = torch.randn(2, TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    for step in range(STEPS):
        losses = []
        for model, tokens, goal in ((mixture, x.chunk(2)[rank], target.chunk(2)[rank]), (single, x, target)):
            loss = (model(tokens) - goal).square().sum() / x.numel()  # the ranks' losses add up
            loss.backward()
            losses.append(loss.detach())
        for tensor in (losses[0], *(parameter.grad for parameter in mixture.router.parameters())):
            dist.all_reduce(tensor, group=group)  # every rank has the router, and a rank's experts are its own
        for parameter in (*mixture.parameters(), *single.parameters()):
            parameter.data -= RATE * parameter.grad
            parameter.grad = None
        if rank == 0:
            print(f"step {step}: loss {losses[0]:.6f} on 2 ranks, {losses[1]:.6f} on one")
    tritoncomm.destroy()


if __name__ == "__main__":
    main()
