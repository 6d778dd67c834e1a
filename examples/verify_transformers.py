"""transformers' tensor parallelism, tp_plan="auto", against one process: a family, and its micro-batches.

tritoncomm verify examples/verify_transformers.py:build --ranks 2 -- llama 1
"""

import sys
import tempfile
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from torch import Tensor

from tritoncomm import verify


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """``whole`` has the parameters of the run in one process, and is None there."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8, "use_cache": False}
    family, micro_batches = sys.argv[1:] or ("llama", "1")
    config = transformers.AutoConfig.for_model(family, **sizes)
    options: dict[str, Any] = {"experts_implementation": "eager"}  # torch's grouped products know no float64
    model: Any = transformers.AutoModelForCausalLM.from_config(config, **options)
    if whole is not None:
        with tempfile.TemporaryDirectory() as folder:
            config.save_pretrained(folder)
            save_file(whole, f"{folder}/model.safetensors", {"format": "pt"})
            model = type(model).from_pretrained(folder, tp_plan="auto", dtype=torch.get_default_dtype(), **options)
    ids = torch.randint(64, (4, 12), generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        losses = []
        for part in ids.chunk(int(micro_batches)):
            losses.append(model(input_ids=part, labels=part).loss / int(micro_batches))
            losses[-1].backward()
        return torch.stack(losses).sum()

    return verify.Case(model, step)
