"""torch.distributed.pipelining against one process: every rank has some of four layers.

tritoncomm verify examples/verify_pipelining.py:build --ranks 2
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    layers = [nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU()) for _ in range(4)]
    model, count = nn.Sequential(*layers), 4 // world
    if whole is not None:
        model.load_state_dict(whole)
    x, names = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)), range(rank * count, (rank + 1) * count)
    own = nn.ModuleDict({str(i): layers[i] for i in names})
    stage_module = nn.Sequential(*own.values())
    if world > 1:
        stage = PipelineStage(stage_module, rank, world, torch.device("cpu"), group=group)
        schedule = Schedule1F1B(stage, 4, loss_fn=lambda y, _: y.square().mean())

    def step() -> Tensor | None:
        losses: list[Tensor] = []
        if world > 1:
            schedule.step(*([x] if rank == 0 else []), target=x, losses=losses)
            return torch.stack(losses).mean() if losses else None
        for micro_batch in x.chunk(4):
            losses.append(model(micro_batch).square().mean() / 4)
            losses[-1].backward()
        return torch.stack(losses).sum()

    return verify.Case(own if world > 1 else model, step)
