"""DistributedDataParallel against one process: every rank has its part of the batch.

tritoncomm verify examples/verify_ddp.py:build --ranks 2
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    if whole is not None:
        model.load_state_dict(whole)
    x, target = torch.randn(2, 16, 8, generator=torch.Generator().manual_seed(1))
    x, target = x.chunk(world)[rank], target[:, :4].chunk(world)[rank]
    replica = DistributedDataParallel(model, process_group=group) if world > 1 else model

    def step() -> Tensor:
        loss = (replica(x) - target).square().mean()
        loss.backward()
        return loss

    return verify.Case(model, step)
