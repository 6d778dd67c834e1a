"""Tiny random vision-language models, one of every kind that the installed transformers has, with batches of images."""

import inspect
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tritoncomm.verify.transformers_models import small

__all__ = ["LENGTH", "batch_of", "names", "tiny"]

LENGTH, PARAMETERS = 45, 20_000_000
_TOKEN = re.compile(r"(image|video|audio|vision|img|boi|eoi).*_token.*_?(id|index)$")
_FIRST_TOKEN = 80  # ids of images and of what marks them; words are below
_SIDE, _PATCH = 16, 4  # pixels of an image and of a patch

# Fields of the configs of towers, beside the common ones.
_VISION: dict[str, Any] = {
    **dict.fromkeys(["image_size", "input_size"], _SIDE),
    **dict.fromkeys(["patch_size"], _PATCH),
    **dict.fromkeys(["embed_dim", "out_hidden_size", "text_hidden_size", "projection_dim", "output_dim"], 64),
    "depth": 4, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1], "fullatt_block_indexes": [1],
    "window_size": 16, "vision_use_head": False, "num_attention_heads": 4, "num_heads": 4, "mlp_dim": 64,
}  # fmt: skip
_IMAGE = ("image_token_id", "image_token_index", "image_patch_id", "im_patch_id")
_FEATURES = re.compile(r"features:? (\d+)")
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}
_TEXT_MROPE = {"text_config": {"rope_parameters": _MROPE}}
_HALF_MROPE = {"text_config": {"rope_parameters": {**_MROPE, "partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]}}}
_SIGLIP = {"vision_config": {"model_type": "siglip_vision_model"}, "vision_feature_layer": -1}
_TILES = {**_SIGLIP, "image_grid_pinpoints": [[_SIDE, _SIDE]], "vision_feature_select_strategy": "full"}
# What the config of one kind gets besides, or instead. A dict for a config inside stands for one made the same way, of
# another kind where it has a model_type.
_OWN: dict[str, dict[str, Any]] = {
    "aria": {"projector_patch_to_query_dict": {16: 4}},
    "blip-2": {"image_token_index": _FIRST_TOKEN, "num_query_tokens": 4},
    "cohere_compass": {
        "text_config": {
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": {"sliding_attention": _MROPE, "full_attention": _MROPE},
        }
    },
    "dots3_note": {"text_config": {"per_layer_config": {}}},
    "ernie4_5_vl_moe": {"text_config": {"moe_intermediate_size": [32, 32]}},
    "gemma4": {
        "text_config": {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96}
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "glm46v": _TEXT_MROPE,
    "glm4v": _TEXT_MROPE,
    "glm4v_moe": _HALF_MROPE,
    "glm_ocr": _TEXT_MROPE,
    "glmga": _TEXT_MROPE,
    "hunyuan_vl": _TEXT_MROPE,
    "idefics2": {"perceiver_config": {"resampler_n_latents": 4, "resampler_n_heads": 4, "resampler_head_dim": 16}},
    "instructblip": {"image_token_index": _FIRST_TOKEN, "num_query_tokens": 4},
    "llama4": {
        "vision_config": {
            "vision_output_dim": 64,
            "intermediate_size": 256,
            "projector_input_dim": 64,
            "projector_output_dim": 64,
        }
    },
    "llava": _SIGLIP | {"vision_feature_select_strategy": "full"},
    "llava_next": _TILES,
    "llava_next_video": _TILES,
    "llava_onevision": _TILES,
    "paddleocr_vl": _TEXT_MROPE,
    "paligemma": {"projection_dim": 64},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 95, **_TEXT_MROPE},
    "qwen2_5_vl": _TEXT_MROPE,
    "qwen2_vl": _TEXT_MROPE,
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 95},
    "qwen4_exp": {
        "text_config": {
            "hc_lowrank": 32,
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 4,
            "indexer_compress_ratio": 2,
        }
    },
    "shieldgemma2": {"mm_tokens_per_image": 4},
    "step3p7": {"text_config": {"sliding_window": 8}},
    "vipllava": {"vision_config": {"model_type": "siglip_vision_model"}, "vision_feature_layers": [-1, -2]},
}


def names() -> list[str]:
    """Return the model types of transformers' mapping of image and text to text."""
    return list(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def _config(kind: type[Any], own: dict[str, Any]) -> Any:
    """Return a tiny config, with those inside of it."""
    default = kind()
    fields = vars(default)
    settings = small(kind, {})
    is_tower = not hasattr(default, "vocab_size")
    if is_tower:
        settings |= {key: value for key, value in _VISION.items() if key in fields}
    own = dict(own)
    for key in kind.sub_configs:
        inner = fields.get(key)
        if isinstance(inner, PreTrainedConfig):
            of_inner = dict(own.pop(key, {}))
            inner_kind = CONFIG_MAPPING[of_inner.pop("model_type")] if "model_type" in of_inner else type(inner)
            settings[key] = _config(inner_kind, of_inner)
    ropes = fields.get("rope_parameters")
    if isinstance(ropes, dict) and "mrope_section" in ropes:
        half = settings.get("head_dim", 64 // settings.get("num_attention_heads", 4)) // 2
        half = int(half * ropes.get("partial_rotary_factor", 1))
        settings["rope_parameters"] = {**ropes, "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]}
    tokens = sorted(key for key, value in fields.items() if _TOKEN.fullmatch(key) and isinstance(value, int))
    settings |= {key: _FIRST_TOKEN + i for i, key in enumerate(tokens)}
    return kind(**{**settings, **own})


def tiny(name: str, seed: int = 0) -> Any:
    """Build a tiny float32 model of a kind, in eval mode on the CPU; ``seed`` draws its weights."""
    import transformers

    classes = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[name]
    model_class = getattr(transformers, classes if isinstance(classes, str) else classes[0])
    config = _config(CONFIG_MAPPING[name], _OWN.get(name, {}))
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        with torch.device("meta"):
            count = sum(weight.numel() for weight in model_class(config).parameters())
        if count >= PARAMETERS:
            raise ValueError(f"a tiny {name} would have {count} parameters")
        model = model_class(config).eval()
        generator = torch.Generator().manual_seed(seed)
        for weight in model.parameters():
            if weight.dim() >= 2:
                weight.copy_(torch.randn(weight.shape, generator=generator) * 0.1)
    return model


def _images(model: Any, count: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield forms that images may have, of which a model takes one."""
    parameters = inspect.signature(type(model).forward).parameters
    vision = getattr(model.config, "vision_config", None)
    side, patch = getattr(vision, "image_size", _SIDE) or _SIDE, getattr(vision, "patch_size", _PATCH)
    side = side[0] if isinstance(side, list | tuple) else side
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    grid = side // patch
    flat = torch.randn(count, 3, side, side, generator=generator)
    sizes = torch.tensor([[side, side]] * count)
    further = {
        "image_sizes": sizes, "target_sizes": torch.tensor([[grid, grid]] * count),
        "spatial_shapes": torch.tensor([[grid, grid]] * count), "image_merge_sizes": torch.tensor([2] * count),
    }  # fmt: skip
    further = {key: x for key, x in further.items() if key in parameters}
    for name in ("image_grid_thw", "grid_thws"):
        if name in parameters:
            for frames in (getattr(vision, "temporal_patch_size", 1), 1):
                pixels = torch.randn(count * grid * grid, 3 * frames * patch * patch, generator=generator)
                numbers = {name: torch.tensor([[1, grid, grid]] * count)}
                yield {"pixel_values": pixels, **numbers, **further}
                yield {"pixel_values": pixels.view(-1, 3 * frames, patch, patch), **numbers, **further}
                yield {"pixel_values": pixels.view(1, -1, 3 * frames, patch, patch), **numbers, **further}
    yield {"pixel_values": flat, **further}
    yield {"pixel_values": flat}
    for tiles in (1, 2, 3):
        yield {"pixel_values": torch.randn(count, tiles, 3, side, side, generator=generator), **further}
    patches = torch.randn(count, grid * grid, 3 * patch * patch, generator=generator)
    yield {"pixel_values": patches, "pixel_attention_mask": torch.ones(count, grid * grid).int(), **further}


def _with_tokens(model: Any, images: dict[str, Tensor], count: int, image: int, seed: int) -> dict[str, Tensor]:
    """Return a batch of two rows with ``count`` tokens of an image in each, at other positions."""
    ids = torch.randint(3, 70, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    ids[0, 3 : 3 + count] = image
    ids[1, 7 : 7 + count] = image
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in parameters:
            batch[name] = (ids == image).int()
    return batch


def batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Return two rows with an image in each, as many tokens as the model makes of it, and labels of words.

    Raises:
        ValueError: the model takes none of the forms of images.
    """
    image = next((getattr(model.config, key) for key in _IMAGE if getattr(model.config, key, None) is not None), None)
    if image is None:
        raise ValueError("has no token of images")
    errors = []
    for images in _images(model, 2, torch.Generator().manual_seed(seed)):
        count = 1
        for _ in range(2):
            batch = _with_tokens(model, images, count, image, seed)
            try:
                with torch.no_grad():
                    model(**batch, use_cache=False)
            except Exception as error:  # whatever a model says to images that it does not take
                found = _FEATURES.search(str(error))
                rows = int(found[1]) // 2 if found else 0
                count = rows if 0 < rows <= LENGTH - 7 else rows // model.config.get_text_config().hidden_size
                errors.append(f"{type(error).__name__}: {error}"[:90])
                if not 0 < count <= LENGTH - 7:
                    break
                continue
            return {**batch, "labels": batch["input_ids"].masked_fill(batch["input_ids"] == image, -100)}
    raise ValueError(f"takes no images: {errors}")
