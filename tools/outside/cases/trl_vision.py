"""TRL's SFTTrainer on small random vision-language models, alone or behind the mixin, as one line of JSON.

``trl_vision.py KIND SEQUENCE``: under a launcher SEQUENCE ranks share each sequence; with 0 TRL trains as it is. KIND
is ``llava``, whose processor makes the batches, ``lora``, the same with adapters and checkpointed layers, or
``qwen3_vl``, of tensors. ``written(folder)`` writes the model, the processor and the data of ``llava``.
"""

import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset, List, load_dataset
from datasets import Image as ImageFeature
from peft import LoraConfig
from PIL import Image
from tokenizers import Tokenizer, models
from trl import SFTConfig, SFTTrainer

import tritoncomm
from tritoncomm.integrations.transformers import register
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

KEYS = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens", "eval_loss", "eval_mean_token_accuracy")
SIZES: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
SPECIAL = ("<image>", "<end>", "<pad>")
CHAT = (
    "{% for message in messages %}{{ message['role'] }}:{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for part in message['content'] %}{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<end>{% endfor %}"
)


class SequenceSFTTrainer(UlyssesTrainerMixin, SFTTrainer):
    """SFTTrainer over sequence shards."""


def written(folder: Path) -> None:
    """Write a model and its processor to ``model``, and conversations about images to ``data.jsonl``."""
    letters = Tokenizer(
        models.BPE({**{chr(code): code for code in range(128)}, **{s: 128 + i for i, s in enumerate(SPECIAL)}}, [])
    )
    letters.add_special_tokens(list(SPECIAL))
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=letters, pad_token="<pad>", eos_token="<end>", extra_special_tokens={"image_token": "<image>"}
    )
    images: Any = transformers.SiglipImageProcessorPil(size={"height": 16, "width": 16})
    processor = transformers.LlavaProcessor(
        image_processor=images, tokenizer=tokenizer, patch_size=4, vision_feature_select_strategy="full",
        chat_template=CHAT,
    )  # fmt: skip
    torch.manual_seed(0)
    config = transformers.LlavaConfig(
        text_config=transformers.LlamaConfig(**SIZES, vocab_size=128 + len(SPECIAL)),
        vision_config=transformers.SiglipVisionConfig(**SIZES, image_size=16, patch_size=4, vision_use_head=False),
        image_token_index=128, vision_feature_select_strategy="full", vision_feature_layer=-1,
    )  # fmt: skip
    transformers.LlavaForConditionalGeneration(config).save_pretrained(folder / "model")
    processor.save_pretrained(folder / "model")
    lines = []
    for place in range(12):
        Image.new("RGB", (20, 16), (20 * place, 40, 255 - 20 * place)).save(folder / f"{place}.png")
        answer = {"role": "assistant", "content": "a colour" + "!" * (place % 5)}
        messages = [{"role": "user", "content": "what is this?"}, answer]
        lines.append(json.dumps({"images": [str(folder / f"{place}.png")], "messages": messages}))
    (folder / "data.jsonl").write_text("\n".join(lines))


def tensors() -> dict[str, Any]:
    """A Qwen3-VL, rows of tokens, and a collator that adds the images of a batch: a third of the rows have none."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
    text = {**SIZES, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 131, "rope_parameters": rope}
    sizes = {"hidden_size": 32, "intermediate_size": 32}
    vision = {
        **sizes, "out_hidden_size": 32, "depth": 2, "num_heads": 4, "patch_size": 2, "deepstack_visual_indexes": [0],
    }  # fmt: skip
    tokens = {"image_token_id": 128, "video_token_id": 129, "vision_start_token_id": 130, "vision_end_token_id": 130}
    torch.manual_seed(0)
    config = transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **tokens)
    draw = torch.Generator().manual_seed(0)
    rows = []
    for place in range(12):
        ids = torch.randint(128, (14 + 3 * (place % 4),), generator=draw)
        if place % 3 != 2:
            ids[place % 9 : place % 9 + 4] = 128
        rows.append({"place": place, "input_ids": ids.tolist()})

    def collated(samples: list[Any]) -> dict[str, torch.Tensor]:
        """Pad rows at their right; images' tokens stay labels."""
        ids = [torch.tensor(sample["input_ids"]) for sample in samples]
        pad = torch.nn.utils.rnn.pad_sequence
        batch = {"input_ids": pad(ids, True, 0), "labels": pad(ids, True, -100)}
        batch["attention_mask"] = pad([torch.ones_like(x) for x in ids], True, 0)
        batch["mm_token_type_ids"] = (batch["input_ids"] == 128).int()
        places = [sample["place"] for sample in samples if 128 in sample["input_ids"]]
        if places:
            pixels = [torch.randn(16, 24, generator=torch.Generator().manual_seed(place)) for place in places]
            batch |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor([[1, 4, 4]] * len(places))}
        return batch

    words = Tokenizer(models.WordLevel({"a": 0, "<end>": 1, "<pad>": 2}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<end>")
    return {
        "model": transformers.Qwen3VLForConditionalGeneration(config), "train_dataset": Dataset.from_list(rows),
        "data_collator": collated, "processing_class": tokenizer,
    }  # fmt: skip


def trained(kind: str, sequence: int, folder: Path) -> list[dict[str, float]]:
    """Three steps of four rows, and an evaluation; what the Trainer logged."""
    batch = 4 if not sequence and "RANK" not in os.environ else 4 * max(sequence, 1) // int(os.environ["WORLD_SIZE"])
    args = SFTConfig(
        str(folder / "out"), max_steps=3, per_device_train_batch_size=batch, per_device_eval_batch_size=batch,
        logging_steps=1, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True, bf16=False, max_length=None,
        save_strategy="no", eval_strategy="steps", eval_steps=3, gradient_checkpointing=kind == "lora",
        dataset_kwargs={"skip_prepare_dataset": True}, remove_unused_columns=False, ddp_find_unused_parameters=True,
    )  # fmt: skip
    own: dict[str, Any] = tensors() if kind == "qwen3_vl" else {"model": str(folder / "model")}
    if kind != "qwen3_vl":
        data = load_dataset(
            "json", data_files=str(folder / "data.jsonl"), split="train", cache_dir=str(folder / "data")
        )
        own["train_dataset"] = data.cast_column("images", List(ImageFeature()))
    if kind == "lora":
        torch.manual_seed(0)
        own["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    own["eval_dataset"] = own["train_dataset"].select(range(4))
    if sequence:
        group = tritoncomm.initialize(context=sequence).get_group("context")
        trainer: Any = SequenceSFTTrainer(args=args, ulysses=register(group), **own)
    else:
        trainer = SFTTrainer(args=args, **own)
    trainer.train()
    return [{key: float(log[key]) for key in KEYS if key in log} for log in trainer.state.log_history]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as name:
        if sys.argv[1] != "qwen3_vl":
            written(Path(name))
        logs = trained(sys.argv[1], int(sys.argv[2]), Path(name))
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(logs))
    if "RANK" in os.environ:
        tritoncomm.destroy()
