"""A tensor-parallel MLP, and the case that compares it with the same MLP in one process.

tritoncomm verify examples/verify_tensor_parallel.py:build --ranks 2
"""

from typing import Any

import torch
from torch import Tensor, nn

from tritoncomm import mappings, verify


class MLP(nn.Module):
    """Column-parallel, then row-parallel."""

    def __init__(self, world: int, group: Any) -> None:
        super().__init__()
        self.group = group
        self.up, self.down = nn.Linear(8, 32 // world), nn.Linear(32 // world, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = mappings.copy_to_tensor_model_parallel_region(x, self.group)
        return mappings.reduce_from_tensor_model_parallel_region(self.down(self.up(x).relu()), self.group)


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    model = MLP(world, group)
    if whole is not None:
        dims = {"up.weight": 0, "up.bias": 0, "down.weight": 1}
        model.load_state_dict({name: whole[name].chunk(world, dim)[rank] for name, dim in dims.items()})
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    return verify.Case(model, step)
