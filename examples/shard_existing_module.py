"""An existing module is sharded by torch's ``parallelize_module`` with styles of ``tritoncomm.parallel``, and trained.

    torchrun --nproc-per-node 2 examples/shard_existing_module.py

The module is not edited. Its parameters become DTensors; activations stay plain tensors.
"""

import copy

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import parallelize_module

import tritoncomm
from tritoncomm.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel

RANKS, VOCABULARY, WIDTH, HIDDEN, STEPS = 2, 64, 32, 128, 5


class Model(nn.Module):
    """Written for one process."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm = nn.Embedding(VOCABULARY, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down, self.head = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(x + self.down(F.gelu(self.up(self.norm(x)))))


PLAN = {  # between the layers, activations are sharded along the sequence, dim 1
    "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "up": ColwiseParallel(input_layouts=Shard(1)),
    "down": RowwiseParallel(output_layouts=Shard(1)),
    "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
}


def train(model: nn.Module, ids: Tensor) -> list[float]:
    """The losses of a few steps of next-token prediction; every rank has all ids and the same loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(STEPS):
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def local_numel(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


if __name__ == "__main__":
    mesh = tritoncomm.initialize(tensor=RANKS, data=1)["tensor"]  # NCCL on GPUs, else Gloo
    torch.manual_seed(0)
    plain = Model().to(mesh.device_type)
    sharded = parallelize_module(copy.deepcopy(plain), mesh, PLAN)
    ids = torch.randint(VOCABULARY, (4, 33)).to(mesh.device_type)
    losses, expected = train(sharded, ids), train(plain, ids)
    if mesh.get_rank() == 0:
        held, total = (sum(map(local_numel, model.parameters())) for model in (sharded, plain))
        print(f"rank 0 has {held} of {total} parameters")
        for step, (ours, on_one) in enumerate(zip(losses, expected, strict=True)):
            print(f"step {step}: loss {ours:.6f} on {mesh.size()} ranks, {on_one:.6f} on one")
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=0)
    tritoncomm.destroy()
