"""FSDP2 with gradient accumulation against one process: parameters are sharded, every rank has its part of the batch.

tritoncomm verify examples/verify_fsdp2.py:build --ranks 2
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    blocks = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(2)]
    model = nn.Sequential(*blocks, nn.Linear(8, 4))
    if whole is not None:
        model.load_state_dict(whole)
    # A micro-batch of all ranks together is one of the run in one process.
    x = [each.chunk(world)[rank] for each in torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1))]
    if world > 1:
        mesh = init_device_mesh("cpu", (world,))
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh)

    def step() -> Tensor:
        losses = []
        for micro_batch in x:
            losses.append(model(micro_batch).square().mean() / 2)
            losses[-1].backward()
        return torch.stack(losses).sum()

    return verify.Case(model, step)
