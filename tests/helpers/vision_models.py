"""Tiny random vision-language models, one of every kind that the installed transformers has, with batches of images."""

import inspect
import random
import re
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import torch
from tiny_models import built
from torch import Tensor
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from tritoncomm.verify.transformers_models import small

__all__ = ["LENGTH", "Form", "batch_of", "drawn_batch", "form_of", "names", "tiny"]

LENGTH = 45
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
    "ernie4_5_vl_moe": {
        "text_config": {"moe_intermediate_size": [32, 32], "rope_parameters": _MROPE | {"mrope_section": [3, 3, 2]}}
    },
    "gemma4": {
        "text_config": {"global_head_dim": 32, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 96},
        "vision_config": {"model_type": "gemma4_vision", "pooling_kernel_size": 2},
    },
    "gemma3": {"mm_tokens_per_image": 4},
    "glm46v": _TEXT_MROPE,
    "glm4v": _TEXT_MROPE,
    "glm4v_moe": _HALF_MROPE,
    "glm_ocr": _TEXT_MROPE,
    "glmga": _TEXT_MROPE,
    "granite4_vision": {
        **_TILES,
        "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 128, "num_attention_heads": 4},
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[0, 1], [1, 2]],
        "spatial_target_layers": [0, 1, 2, 3],
    },
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
    "mllama": {
        "vision_config": {"intermediate_layers_indices": [0, 1], "vision_output_dim": 192, "num_global_layers": 1},
        "text_config": {"cross_attention_layers": [1, 3]},
    },
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
        if isinstance(inner, PreTrainedConfig) or "model_type" in own.get(key, {}):
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
    return built(name, lambda: model_class(config), seed, 0.1)


def _images(model: Any, count: int, generator: torch.Generator) -> Iterator[dict[str, Tensor]]:
    """Yield forms that images may have, of which a model takes one."""
    parameters = inspect.signature(type(model).forward).parameters
    vision = getattr(model.config, "vision_config", None)
    side, patch = getattr(vision, "image_size", _SIDE) or _SIDE, getattr(vision, "patch_size", _PATCH)
    side = side[0] if isinstance(side, list | tuple) else side
    patch = patch[0] if isinstance(patch, list | tuple) else patch
    grid = side // patch
    flat = torch.randn(count, 3, side, side, generator=generator)
    if "aspect_ratio_ids" in parameters:  # four tiles of an image, to which every token attends
        ones = {"aspect_ratio_ids": (count, 1), "aspect_ratio_mask": (count, 1, 4)}
        tiles = {"pixel_values": torch.randn(count, 1, 4, 3, side, side, generator=generator)}
        yield tiles | {key: torch.ones(size, dtype=torch.long) for key, size in ones.items()}
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
    places = torch.cartesian_prod(torch.arange(grid), torch.arange(grid)).flip(-1).expand(count, -1, 2)
    yield {"pixel_values": patches, "image_position_ids": places, **further}
    yield {"pixel_values": patches, "pixel_attention_mask": torch.ones(count, grid * grid).int(), **further}


def _marked(model: Any, ids: Tensor, images: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of these tokens, with what the model wants to know about which of them are of images."""
    batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), **images}
    parameters = inspect.signature(type(model).forward).parameters
    for name in ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids"):
        if name in parameters:
            batch[name] = (ids == _image_token(model)).int()
    return batch


def _image_token(model: Any) -> int:
    values = (getattr(model.config, key, None) for key in _IMAGE)
    token = next((value for value in values if value is not None), None)
    if token is None:
        raise ValueError("has no token of images")
    return token


class Form(NamedTuple):
    """Form of images that a model takes: its place among those of ``_images``, and the tokens of an image."""

    place: int
    tokens: int


def form_of(model: Any) -> Form:
    """Find the form of images that a model takes, by what it says to others.

    Raises:
        ValueError: it takes none.
    """
    image, errors = _image_token(model), []
    for place, images in enumerate(_images(model, 2, torch.Generator().manual_seed(0))):
        count = 1
        for _ in range(2):
            ids = torch.full((2, LENGTH), 5)
            ids[:, 3 : 3 + count] = image
            try:
                with torch.no_grad():
                    model(**_marked(model, ids, images), use_cache=False)
            except Exception as error:  # whatever a model says to images that it does not take
                found = _FEATURES.search(str(error))
                rows = int(found[1]) // 2 if found else 0
                count = rows if 0 < rows <= LENGTH - 7 else rows // model.config.get_text_config().hidden_size
                errors.append(f"{type(error).__name__}: {error}"[:90])
                if not 0 < count <= LENGTH - 7:
                    break
                continue
            return Form(place, count)
    raise ValueError(f"takes no images: {errors}")


def batch_of(model: Any, seed: int = 0) -> dict[str, Tensor]:
    """Return two rows with an image in each, at other positions, and labels of words."""
    form, image = form_of(model), _image_token(model)
    generator = torch.Generator().manual_seed(seed)
    images = next(islice(_images(model, 2, generator), form.place, None))
    ids = torch.randint(3, 70, (2, LENGTH), generator=generator)
    ids[0, 3 : 3 + form.tokens] = image
    ids[1, 7 : 7 + form.tokens] = image
    return {**_marked(model, ids, images), "labels": ids.masked_fill(ids == image, -100)}


def drawn_batch(model: Any, seed: int) -> dict[str, Tensor]:
    """Return one to three rows of a drawn length, with no, one or several images anywhere, some side by side.

    Padding is at the left, at the right, or nowhere; labels may have images' tokens, as those of TRL's collator.
    """
    form, image = form_of(model), _image_token(model)
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    parameters = inspect.signature(type(model).forward).parameters
    step = form.tokens + ("image_grid_thw" in parameters)  # those tell images apart by a token between them
    rows, length = draw.randint(1, 3), draw.randint(3 * step + 4, 3 * step + 21)
    side = draw.choice(["left", "right", "none"])
    ids = torch.randint(3, 70, (rows, length), generator=generator)
    mask, count = torch.ones_like(ids), 0
    for row in range(rows):
        hidden = draw.randint(0, 3) if side != "none" else 0
        free = length - hidden
        if hidden:
            mask[row, slice(None, hidden) if side == "left" else slice(free, None)] = 0
        images = draw.choice([0, 1, 1, 2, 3])
        gaps = sorted(draw.choice([0, draw.randint(0, free - 3 * step)]) for _ in range(images))
        for index, gap in enumerate(gaps):
            start = (hidden if side == "left" else 0) + gap + index * step
            ids[row, start : start + form.tokens] = image
        count += images
    ids[mask == 0] = 0
    forms = _images(model, count, generator) if count else iter([{}])
    batch = _marked(model, ids, next(islice(forms, form.place if count else 0, None)))
    batch["attention_mask"] = mask
    hidden_labels = (mask == 0) | ((ids == image) & draw.choice([True, False]))
    if side == "none" and draw.choice([True, False]):
        del batch["attention_mask"]
    return {**batch, "labels": ids.masked_fill(hidden_labels, -100)}
