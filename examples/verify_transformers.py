"""transformers' tensor parallelism, tp_plan="auto", against one process.

tritoncomm verify examples/verify_transformers.py:build --ranks 2
"""

import tempfile
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=64, num_key_value_heads=4, use_cache=False, **sizes)
    if whole is None:
        model: Any = transformers.LlamaForCausalLM(config)
    else:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            save_file(whole, f"{folder}/model.safetensors", {"format": "pt"})
            dtype = torch.get_default_dtype()
            model = transformers.LlamaForCausalLM.from_pretrained(folder, tp_plan="auto", dtype=dtype)
    ids = torch.randint(64, (2, 12), generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return loss

    return verify.Case(model, step)
