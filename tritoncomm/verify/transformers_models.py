"""A causal language model of transformers under our Ulysses attention, as a case: made small, unless in full."""

import importlib
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tritoncomm import collective
from tritoncomm.errors import ArgumentError
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import model_parts
from tritoncomm.verify.recording import Case

__all__ = ["case_of", "classes", "small"]

_LAYERS, _HEADS = 4, 4
_BATCH, _LENGTH = 2, 16


# A config gets those of these that it has a field for, unless the field is None by default: that turns a part off.
_SMALL: dict[str, Any] = {
    **dict.fromkeys(["vocab_size", "unpadded_vocab_size"], 96),
    **dict.fromkeys(["hidden_size", "n_embd", "d_model", "lru_width", "word_embed_proj_dim", "conv_dim"], 64),
    **dict.fromkeys(["intermediate_size", "n_inner", "ffn_dim", "block_ff_dim"], 64),
    **dict.fromkeys(["encoder_ffn_dim", "decoder_ffn_dim"], 64),
    **dict.fromkeys(["moe_intermediate_size", "ffn_hidden_size", "expert_ffn_hidden_size"], 32),
    **dict.fromkeys(["shared_expert_intermediate_size", "moe_shared_expert_intermediate_size"], 32),
    "shared_intermediate_size": 32,
    **dict.fromkeys(["num_hidden_layers", "n_layer", "num_layers", "n_layers"], _LAYERS),
    **dict.fromkeys(["encoder_layers", "decoder_layers", "num_encoder_layers", "num_decoder_layers"], _LAYERS),
    **dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "decoder_attention_heads"], _HEADS),
    **dict.fromkeys(["encoder_attention_heads", "num_encoder_attention_heads", "num_decoder_attention_heads"], _HEADS),
    **dict.fromkeys(["head_dim", "rotary_dim", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim"], 16),
    **dict.fromkeys(["q_lora_rank", "kv_lora_rank", "index_head_dim"], 32),
    "index_n_heads": 4,
    "index_topk": 4,  # fewer than the tokens, or the sparse attention would see them all
    **dict.fromkeys(["sliding_window", "attention_chunk_size"], 8),  # half of the tokens
    **dict.fromkeys(["num_experts", "num_local_experts", "n_routed_experts"], 4),
    "num_experts_per_tok": 2,
    **dict.fromkeys(["n_group", "topk_group", "first_k_dense_replace"], 1),
    **dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 16),
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    **dict.fromkeys(["mamba_d_head", "mamba_head_dim", "mamba_d_state", "ssm_state_size"], 16),
    **dict.fromkeys(["mamba_n_heads", "mamba_num_heads"], 8),
    **dict.fromkeys(["n_groups", "mamba_n_groups"], 1),
    "mamba_expand": 2,
    "expand": 1,  # heads of head_dim are then the hidden size
    **dict.fromkeys(["max_position_embeddings", "n_positions"], 128),
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def small(config_class: type[Any], own: dict[str, Any], kv_heads: int = 2) -> dict[str, Any]:
    """Return the arguments that make a config tiny: the common ones that it has, then its own."""
    defaults = vars(config_class())
    if defaults.get("kv_lora_rank"):
        kv_heads = _HEADS  # the low rank is expanded to a key and a value for every query head
    shared = dict.fromkeys(["num_key_value_heads", "kv_n_heads", "num_attention_groups"], kv_heads)
    renamed = config_class.attribute_map
    # Whisper has one field for the heads of both kinds, those of the queries: ``_SMALL``, which has them, comes last.
    settings: dict[str, Any] = {renamed.get(key, key): value for key, value in (shared | _SMALL).items()}
    settings = {
        key: value
        for key, value in settings.items()
        if key in defaults and (defaults[key] is not None or key == "num_key_value_heads")
    }
    types = renamed.get("layer_types", "layer_types")
    if kinds := list(dict.fromkeys(defaults.get(types) or [])):
        settings[types] = (kinds * _LAYERS)[: max(_LAYERS, len(kinds))]
        settings[renamed.get("num_hidden_layers", "num_hidden_layers")] = len(settings[types])
    for key, value in own.items():
        inner = config_class.sub_configs.get(key)
        settings[key] = inner(**small(inner, value, kv_heads)) if inner else value
    return settings


def classes(name: str) -> tuple[type[Any], type[nn.Module]]:
    """Return the config and the model of a kind: those of the text alone where it reads more."""
    transformers = importlib.import_module("transformers")
    models = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    config_class = transformers.CONFIG_MAPPING[name]
    text_class = type(config_class().get_text_config(decoder=True))
    return text_class, models.get(text_class, models[config_class])


def case_of(name: str, full: bool = False) -> Callable[..., Case]:
    """Return the ``build`` of a model type ("llama") or of a JSON file with a config.

    Args:
        full: keep the sizes of the config.
    """
    transformers = importlib.import_module("transformers")
    settings: dict[str, Any] = {}
    if name.endswith(".json"):
        try:
            settings = json.loads(Path(name).read_text())
        except (OSError, ValueError) as error:
            raise ArgumentError(f"{name}: {error}") from None
    kind = settings.get("model_type", name)
    if kind not in transformers.CONFIG_MAPPING:
        raise ArgumentError(f"transformers has no model type {kind!r}; a config file ends in .json")
    return partial(_build, kind, settings, full)


def _build(
    kind: str,
    settings: dict[str, Any],
    full: bool,
    rank: int,
    world: int,
    group: Any,
    whole: dict[str, Tensor] | None,
) -> Case:
    """Build the case on one rank: the model over a part of the sequence, its gradients added up after backward."""
    config_class, model_class = classes(kind)
    config = config_class.from_dict(settings) if settings else config_class()
    if not full:
        for key, value in small(config_class, {}).items():
            setattr(config, key, value)
    config.use_cache = False
    model: Any = model_class(config)
    model.train()
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")  # torch's grouped products know no float64
    if whole is not None:
        model.load_state_dict(whole)
    made = torch.Generator().manual_seed(1)
    ids = torch.randint(3, min(config.vocab_size, 1000), (_BATCH, _LENGTH), generator=made)
    batch = {"input_ids": ids, "labels": ids}
    if world > 1:
        ours.switch(model, ours.register(group))
        batch = ours.shard_batch(batch, group)
    elif model_parts.has_attention(model):
        model.set_attn_implementation("sdpa")

    def step() -> Tensor:
        loss = model(**batch).loss
        loss.backward()
        for parameter in model.parameters():
            if world > 1 and parameter.grad is not None:
                collective.all_reduce(parameter.grad, group)
        return loss

    return Case(model, step)
