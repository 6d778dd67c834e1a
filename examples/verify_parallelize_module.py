"""torch's tensor parallelism with sequence parallelism, by parallelize_module, against one process.

tritoncomm verify examples/verify_parallelize_module.py:build --ranks 2
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, PrepareModuleInput, RowwiseParallel, SequenceParallel
from torch.distributed.tensor.parallel import parallelize_module as parallelize

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    mlp = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    model = nn.Sequential(nn.LayerNorm(8), mlp, nn.LayerNorm(8))
    if whole is not None:
        model.load_state_dict(whole)
    x = torch.randn(2, 8, 8, generator=torch.Generator().manual_seed(1)).chunk(world, 1)[rank]
    if world > 1:
        inside = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        plan = {"0": SequenceParallel(), "1": inside, "2": SequenceParallel()}
        plan |= {"1.0": ColwiseParallel(), "1.2": RowwiseParallel(output_layouts=Shard(1))}
        parallelize(model, init_device_mesh("cpu", (world,)), plan)

    def step() -> Tensor:
        out = model(x)
        loss = (out.full_tensor() if hasattr(out, "full_tensor") else out).square().mean()  # pyright: ignore
        loss.backward()
        return loss

    return verify.Case(model, step)
