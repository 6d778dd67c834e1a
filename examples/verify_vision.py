"""Qwen3-VL on two rows with an image in each, over shards of the sequence, against one process.

tritoncomm verify examples/verify_vision.py:build --ranks 2
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

from tritoncomm import verify
from tritoncomm.integrations.transformers import register, switch

SIZES = {"hidden_size": 32, "intermediate_size": 32}
TEXT = {**SIZES, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
TEXT |= {"head_dim": 8, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}}
IMAGES = {**SIZES, "out_hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 2, "deepstack_visual_indexes": [0]}
TOKENS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62, "vision_end_token_id": 63}


def build(rank: int, world: int, group: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    dist.init_process_group()
    model: Any = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=TEXT, vision_config=IMAGES, **TOKENS))
    model.load_state_dict(whole or model.state_dict())
    ids = torch.randint(60, (2, 24), generator=torch.Generator().manual_seed(1))
    ids[0, 3:7] = ids[1, 10:14] = 60  # images of 4 by 4 patches, of which four make a token; one spans two shards
    pixels = torch.randn(32, 24, generator=torch.Generator().manual_seed(2), dtype=torch.get_default_dtype())
    images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * 2)}
    batch = {"input_ids": ids, "labels": ids, "mm_token_type_ids": (ids == 60).int(), **images}
    switch(model, register(group := group or dist.group.WORLD))

    def step() -> Tensor:
        (loss := model(**batch).loss).backward()
        for parameter in (each for each in model.parameters() if each.grad is not None):
            dist.all_reduce(parameter.grad, group=group)  # those of the towers, too, add up over the ranks
        return loss

    return verify.Case(model, step)
