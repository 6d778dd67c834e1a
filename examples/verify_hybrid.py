"""A model with recurrent layers on packed documents, over shards of the sequence, against one process.

tritoncomm verify examples/verify_hybrid.py:build --ranks 2 -- qwen3_next
"""

import sys
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor

from tritoncomm import verify
from tritoncomm.integrations.transformers import register, shard_batch, switch


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    dist.init_process_group()
    sizes = dict.fromkeys(["vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"], 32)
    sizes |= dict.fromkeys(["num_hidden_layers", "num_attention_heads", "num_experts", "linear_num_value_heads"], 4)
    sizes |= dict.fromkeys(["head_dim", "linear_key_head_dim", "linear_value_head_dim"], 8)
    sizes |= dict.fromkeys(["num_key_value_heads", "linear_num_key_heads", "num_experts_per_tok"], 2)
    config = transformers.AutoConfig.for_model((sys.argv[1:] or ["qwen3_next"])[0], **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, experts_implementation="eager")
    if whole is not None:
        model.load_state_dict(whole)
    ids = torch.randint(32, (2, 24), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in (5, 1, 11, 7)]).expand(2, -1)  # of four documents
    switch(model, register(group := group or dist.group.WORLD))
    batch = shard_batch({"input_ids": ids, "labels": ids, "position_ids": positions}, group)

    def step() -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        for parameter in (each for each in model.parameters() if each.grad is not None):
            dist.all_reduce(parameter.grad, group=group)  # gradients of the ranks add up
        return loss

    return verify.Case(model, step)
