"""accelerate with gradient accumulation against one process: its loader gives every rank its part of the batch.

tritoncomm verify examples/verify_accelerate.py:build --ranks 2
"""

from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    if whole is not None:
        model.load_state_dict(whole)
    data = torch.randn(16, 8, generator=torch.Generator().manual_seed(1))
    loader: Any = DataLoader(list(data), batch_size=8 // world)
    prepared, loader = accelerator.prepare(model, loader)

    def step() -> Tensor:
        losses = []
        for x in loader:
            with accelerator.accumulate(prepared):
                losses.append(prepared(x).square().mean())
                accelerator.backward(losses[-1])
        return torch.stack(losses).mean()

    return verify.Case(model, step)
