"""A transformer layer on sequence shards trains as on one process.

    torchrun --nproc-per-node 2 examples/ulysses_attention.py

Every rank holds some of the positions with all heads; only attention needs the others.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tritoncomm
from tritoncomm.ulysses import UlyssesAttention

HEADS, KV_HEADS, HEAD_DIM, HIDDEN, BATCH, SHARD, STEPS = 8, 2, 16, 64, 2, 32, 5


class Layer(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.heads = HEADS, KV_HEADS, KV_HEADS
        self.norm = nn.LayerNorm(HIDDEN)
        self.qkv = nn.Linear(HIDDEN, HEAD_DIM * sum(self.heads))
        self.out = nn.Linear(HEAD_DIM * HEADS, HIDDEN)
        self.attention = UlyssesAttention(group)

    def forward(self, x: Tensor) -> Tensor:
        parts = self.qkv(self.norm(x)).split([HEAD_DIM * n for n in self.heads], dim=-1)
        q, k, v = (part.unflatten(-1, (n, HEAD_DIM)) for part, n in zip(parts, self.heads, strict=True))
        return x + self.out(self.attention(q, k, v, is_causal=True).flatten(2))


def train(group: dist.ProcessGroup, x: Tensor, target: Tensor) -> list[float]:
    """The losses of a few steps; x and target are this rank's positions."""
    torch.manual_seed(0)
    layer = Layer(group).to(x.device)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05)
    losses = []
    for _ in range(STEPS):
        # The mean over all positions is the sum over ranks of their part of it.
        loss = (layer(x) - target).square().sum() / (target.numel() * group.size())
        optimizer.zero_grad()
        loss.backward()
        for parameter in layer.parameters():
            dist.all_reduce(parameter.grad, group=group)
        optimizer.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=group)
        losses.append(total.item())
    return losses


def main() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tritoncomm.initialize()  # the device of this rank, NCCL or Gloo
    group = dist.group.WORLD
    assert group is not None
    alone = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    made = torch.Generator().manual_seed(1)
    x, target = (torch.randn(BATCH, SHARD * group.size(), HIDDEN, generator=made).to(device) for _ in range(2))
    shards = (part.chunk(group.size(), dim=1)[group.rank()] for part in (x, target))
    losses, of_one_process = train(group, *shards), train(alone, x, target)
    if group.rank() == 0:
        for step, pair in enumerate(zip(losses, of_one_process, strict=True)):
            print(f"step {step}: loss {pair[0]:.6f} on {group.size()} ranks, {pair[1]:.6f} on one")
    torch.testing.assert_close(losses, of_one_process, rtol=1e-4, atol=0)
    tritoncomm.destroy()


if __name__ == "__main__":
    main()
