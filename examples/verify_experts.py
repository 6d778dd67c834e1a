"""transformers' expert parallelism against one process: by ``ep_implementation="tritoncomm"``, or by its own exchange.

tritoncomm verify examples/verify_experts.py:build --ranks 2 -- mixtral all_to_all
"""

import sys
from typing import Any

import torch
import transformers
from torch import Tensor

from tritoncomm import verify
from tritoncomm.integrations.transformers.experts import register_experts


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    sizes = dict.fromkeys(["vocab_size", "hidden_size", "intermediate_size", "moe_intermediate_size"], 32)
    sizes |= dict.fromkeys(["num_attention_heads", "num_experts", "num_local_experts", "n_routed_experts"], 4)
    sizes |= dict.fromkeys(["num_hidden_layers", "num_key_value_heads", "num_experts_per_tok", "n_group"], 2)
    family, exchange = sys.argv[1:] or ("mixtral", "tritoncomm")
    config = transformers.AutoConfig.for_model(family, **sizes, head_dim=8)
    # fp32, as FSDP2 divides gradients of fp64 twice over a group of one rank, which has each expert here.
    options: dict[str, Any] = {"experts_implementation": "eager", "dtype": torch.float32}
    if whole is None:
        model: Any = transformers.AutoModelForCausalLM.from_config(config, **options)
    else:
        register_experts()
        shards = {"fsdp_size": world, "ep_size": world, "ep_implementation": exchange}
        options["distributed_config"] = transformers.distributed.DistributedConfig(**shards)
        kind = transformers.AutoModelForCausalLM._model_mapping[type(config)]
        model = kind.from_pretrained(None, config=config, state_dict=whole, **options)
    ids = torch.randint(32, (4, 12), generator=torch.Generator().manual_seed(1)).chunk(world)[rank]

    def step() -> Tensor:
        loss = model.train()(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    return verify.Case(model, step)
