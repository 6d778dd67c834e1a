"""A shared expert that runs beside the exchanges of others, against the layer in one process, which exchanges nothing.

tritoncomm verify examples/verify_shared_expert.py:build --ranks 2
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tritoncomm import verify
from tritoncomm.experts import combine, dispatch


def build(rank: int, world: int, group: dist.ProcessGroup, whole: dict[str, Tensor] | None) -> verify.Case:
    model = nn.ModuleDict({"router": nn.Linear(16, 8), "shared": nn.Linear(16, 16)})
    model["experts"] = nn.ParameterList([torch.randn(8 // world, 16, 16) / 4 for _ in range(2)])
    if whole is not None:
        parts = {name: w.chunk(world)[rank] if name.startswith("experts") else w for name, w in whole.items()}
        model.load_state_dict(parts)
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]

    def step() -> Tensor:
        weights, ids = model["router"](x).softmax(-1).topk(3)
        dispatching = dispatch(x, ids, weights, 8, group, async_op=True)
        shared, dispatched = model["shared"](x), dispatching.wait()
        rows, counts = dispatched.by_expert()
        up, down = (matrices.repeat_interleave(counts, 0) for matrices in model["experts"])
        hidden = (rows[:, None] @ up).relu() * dispatched.expert_weights[:, None, None]
        combining = combine(dispatched.summed((hidden @ down)[:, 0], weighted=False), dispatched, async_op=True)
        loss = (shared.square() + combining.wait()).square().mean()
        (loss / world).backward()
        for parameter in (*model["router"].parameters(), *model["shared"].parameters()):
            dist.all_reduce(parameter.grad, group=group)
        return loss

    return verify.Case(model, step)
