"""Tiny random causal language models, one of every kind that the installed transformers has."""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tritoncomm.verify.transformers_models import classes, small

__all__ = ["NOT_RUN", "built", "names", "tiny"]

PARAMETERS = 20_000_000


# What the config of one kind gets besides, or instead: to build at all, to be small, or to have every kind of layer. A
# dict for a config inside it stands for one made the same way.
_OWN: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1, 3]},
    "blt": {
        "encoder_hash_byte_group_vocab": 96,
        "local_attention_window_len": 8,
        "patcher_config": {},
        "encoder_config": {"hidden_size_global": 64},
        "decoder_config": {"hidden_size_global": 64},
        "global_config": {},
    },
    "cohere_compass_text": {
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
            for kind in ("sliding_attention", "full_attention")
        },
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cpmant": {"dim_head": 16, "dim_ff": 64},
    "ctrl": {"dff": 64},
    "dbrx": {"attn_config": {"clip_qkv": 8.0, "rope_theta": 1e4}, "ffn_config": {}},
    "deepseek_v2": {"num_experts_per_tok": 2},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "o_lora_rank": 32,
    },
    "doge": {"keep_window_size": 8},
    "dots1": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "dots3_note_text": {
        "head_dim": 32,
        "shared_experts_intermediate_size": 32,
        "swa_num_attention_heads": 4,
        "swa_num_key_value_heads": 4,
        "swa_q_lora_rank": 32,
        "swa_kv_lora_rank": 32,
        "swa_head_dim": 32,
        "swa_qk_nope_head_dim": 16,
        "swa_v_head_dim": 16,
    },
    "falcon_h1": {"mamba_d_ssm": 128},
    "gemma3n_text": {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
    "gemma4_text": {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
    "gemma4_unified_text": {"global_head_dim": 32},
    "git": {"vision_config": {}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "hunyuan_v1_dense": {"head_dim": 16},
    "hunyuan_v1_moe": {"head_dim": 16},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 3},
    "kimi_linear": {"linear_head_dim": 16, "linear_num_heads": 4},
    "laguna": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"zero_expert_num": 2},  # with the many of the default no token would reach the other experts
    "mellum": {"layer_types": ["full_attention", "sliding_attention"] * 2},
    "mimo_v2_flash": {"num_key_value_heads": 2},  # its sliding layers have twice as many
    "minimax_m3_vl_text": {
        "layer_types": ["full_attention", "minimax_m3_sparse"] * 2,
        "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
        "dense_intermediate_size": 64,
        "index_block_size": 2,
        "index_topk_blocks": 2,
    },
    "ministral": {"head_dim": 16},
    "musicgen_decoder": {"num_codebooks": 1},  # a batch has a row of tokens for each
    "musicgen_melody_decoder": {"num_codebooks": 1},
    "phi4_multimodal": {"vision_config": {}, "audio_config": {}},
    "qwen4_exp_text": {
        "hc_lowrank": 32,
        "indexer_n_heads": 4,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 16,
        "indexer_budget": 4,
        "indexer_compress_ratio": 2,
    },
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "attention_head_size": 16,
        "feed_forward_size": 64,
        "axial_pos_shape": [8, 16],
        "axial_pos_embds_dim": [16, 48],
        "local_attn_chunk_length": 4,
        "lsh_attn_chunk_length": 4,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "roc_bert": {"pronunciation_vocab_size": 96, "shape_vocab_size": 96},
    "xlnet": {"d_inner": 64},
    "xmod": {"default_language": "en_XX"},
    "zaya": {"num_experts_per_tok": 1, "layer_types": ["hybrid", "hybrid_sliding"] * 2, "sliding_window": 8},
}


# The kinds that `tiny` refuses.
NOT_RUN: dict[str, str] = dict.fromkeys(
    ["gemma4_assistant", "gemma4_unified_assistant"],
    "its forward takes embeddings, keys and values of the model that it assists, no input_ids; 5.23.0 cannot build it",
)


def names() -> list[str]:
    """Return the model types of all causal language models."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny(name: str, seed: int = 0, kv_heads: int = 2) -> nn.Module:
    """Build a tiny float32 model of a kind, in eval mode on the CPU; `seed` draws its weights."""
    if name in NOT_RUN:
        raise ValueError(f"{name} does not run: {NOT_RUN[name]}")
    config_class, model_class = classes(name)
    config = config_class(**small(config_class, _OWN.get(config_class.model_type, {}), kv_heads))
    return built(name, lambda: model_class(config), seed, 0.15)


def built(name: str, make: Callable[[], Any], seed: int, scale: float) -> Any:
    """Make a model, unless it would be large, and draw its weights of two dims and more; in eval mode on the CPU."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        with torch.device("meta"):  # takes no memory, however much a setting of its config missed
            count = sum(weight.numel() for weight in make().parameters())
        if count >= PARAMETERS:
            raise ValueError(f"a tiny {name} would have {count} parameters")
        model = make().eval()
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * scale)
    return model
