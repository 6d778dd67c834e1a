"""DeepSpeed's ZeRO, stage 1 to 3, against one process; its gradients are in fp32.

tritoncomm verify examples/verify_deepspeed.py:build --ranks 2 -- 3
"""

import os
import sys
from typing import Any

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # read when it is imported
import deepspeed
import torch
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_grad
from torch import Tensor, nn

from tritoncomm import verify

STAGE = int((sys.argv[1:] or ["1"])[0])


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 4))
    if whole is not None:
        model.load_state_dict(whole)
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(1)).chunk(world)[rank]
    engine: Any = model
    if world > 1:
        settings = {"zero_optimization": {"stage": STAGE}, "zero_allow_untested_optimizer": True}
        settings["train_micro_batch_size_per_gpu"] = len(x)
        optimizer = torch.optim.SGD(model.parameters())
        engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings)

    def step() -> Tensor:
        loss = engine(x).square().mean()
        engine.backward(loss) if world > 1 else loss.backward()
        return loss

    hooks: Any = {"gradient": safe_get_full_grad} | ({"value": safe_get_full_fp32_param} if STAGE == 3 else {})
    return verify.Case(model, step, **(hooks if world > 1 else {}))
