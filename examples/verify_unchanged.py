"""A training script as it is, FSDP2 in one process as on many ranks, with its optimizer: `build` is all that is added.

tritoncomm verify examples/verify_unchanged.py:build --ranks 2
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from tritoncomm import verify


def make_model(state: dict[str, Tensor] | None) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    if state is not None:
        model.load_state_dict(state)
    return fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()
    return loss


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, as ordinary tensors, and is None there."""
    model = make_model(whole)
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
    return verify.Case(model, lambda: train_step(model, optimizer, x))
