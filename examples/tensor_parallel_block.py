"""A transformer block with tensor and sequence parallelism trains as on one process.

    torchrun --nproc-per-node 2 examples/tensor_parallel_block.py

Every rank has its heads and its columns of the MLP; norms and the residual stream are sharded along the sequence.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import tritoncomm
from tritoncomm.mappings import gather_from_sequence_parallel_region, reduce_scatter_to_sequence_parallel_region

HEADS, HEAD_DIM, HIDDEN, BATCH, SHARD, STEPS = 8, 8, 64, 2, 16, 5


def shard(group: dist.ProcessGroup, dim: int, *shape: int) -> nn.Parameter:
    """This rank's shard of a random weight; the seed is the same everywhere."""
    full = torch.randn(shape) / HIDDEN**0.5
    return nn.Parameter(full.chunk(group.size(), dim)[group.rank()].clone())


class Block(nn.Module):
    def __init__(self, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.group, self.norm, self.mlp_norm = group, nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv = shard(group, 1, 3, HEADS, HEAD_DIM, HIDDEN)  # column-parallel
        self.out = shard(group, 1, HIDDEN, HEADS * HEAD_DIM)  # row-parallel
        self.up, self.down = shard(group, 0, 4 * HIDDEN, HIDDEN), shard(group, 1, HIDDEN, 4 * HIDDEN)

    def attention(self, x: Tensor) -> Tensor:
        x = gather_from_sequence_parallel_region(x, group=self.group)  # [s/W, b, h] -> [s, b, h]
        q, k, v = torch.einsum("sbh,cndh->cbnsd", x, self.qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).permute(2, 0, 1, 3).flatten(2)
        return reduce_scatter_to_sequence_parallel_region(F.linear(y, self.out), group=self.group)

    def mlp(self, x: Tensor) -> Tensor:
        y = F.gelu(F.linear(gather_from_sequence_parallel_region(x, group=self.group), self.up))
        return reduce_scatter_to_sequence_parallel_region(F.linear(y, self.down), group=self.group)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm(x))
        return x + self.mlp(self.mlp_norm(x))


def train(group: dist.ProcessGroup, x: Tensor, target: Tensor) -> list[float]:
    """The losses of a few steps; x and target are this rank's positions."""
    torch.manual_seed(0)
    block, losses = Block(group).to(x.device), []
    optimizer = torch.optim.SGD(block.parameters(), lr=0.1)
    for _ in range(STEPS):
        loss = (block(x) - target).square().sum() / (target.numel() * group.size())
        optimizer.zero_grad()
        loss.backward()
        for parameter in [*block.norm.parameters(), *block.mlp_norm.parameters()]:
            dist.all_reduce(parameter.grad, group=group)  # a norm has seen this rank's positions only
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone(), group=group)
        losses.append(total.item())
    return losses


if __name__ == "__main__":
    tritoncomm.initialize()  # NCCL and the GPU of this rank, or Gloo
    group = dist.group.WORLD
    single = [dist.new_group([rank]) for rank in range(group.size())][group.rank()]
    full = torch.randn(2, SHARD * group.size(), BATCH, HIDDEN, generator=torch.Generator().manual_seed(1))
    x, target = full.to("cuda" if torch.cuda.is_available() else "cpu")
    losses = train(group, *(each.chunk(group.size())[group.rank()] for each in (x, target)))
    expected = train(single, x, target)
    if group.rank() == 0:
        for step, (ours, plain) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step}: loss {ours:.6f} on {group.size()} ranks, {plain:.6f} on one")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    tritoncomm.destroy()
