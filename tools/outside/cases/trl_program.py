"""TRL's SFTTrainer on a small random model, alone or behind the mixin, as one line of JSON.

``trl_program.py MODEL KIND``; under a launcher it runs over sequence shards. MODEL is ``llama`` or ``qwen3_next``. KIND
is ``padded`` (batches with masks), ``packing``, ``padding_free``, ``lora`` (packing, and adapters of peft) or
``router`` (packing, with the router's auxiliary loss, which TRL turns on for a mixture of experts). One process gets
every packed document in a row of its own.
"""

import json
import os
import sys
import tempfile
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from trl import SFTConfig, SFTTrainer

import tritoncomm
from tritoncomm.integrations.transformers import register
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

WORDS, PAD, END = 62, 62, 63
KEYS = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens", "eval_loss", "eval_mean_token_accuracy")


class SequenceSFTTrainer(UlyssesTrainerMixin, SFTTrainer):
    """SFTTrainer over sequence shards."""


class RowTrainer(SFTTrainer):
    """SFTTrainer that gives the model each packed document in a row of its own, padded."""

    def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        if "position_ids" in inputs:
            starts = (inputs["position_ids"][0] == 0).nonzero()[:, 0].tolist()
            stops = [*starts[1:], inputs["position_ids"].shape[1]]
            ones = torch.ones_like(inputs["input_ids"])
            inputs = {
                key: torch.nn.utils.rnn.pad_sequence(
                    [x[0, start:stop] for start, stop in zip(starts, stops, strict=True)], True, value
                )
                for key, x, value in (
                    ("input_ids", inputs["input_ids"], PAD), ("labels", inputs["labels"], -100),
                    ("attention_mask", ones, 0),
                )
            }  # fmt: skip
        return super().compute_loss(model, inputs, *args, **kwargs)


def model_of(name: str) -> Any:
    """A small model with random weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": WORDS + 2, "pad_token_id": PAD, "eos_token_id": END,
    }  # fmt: skip
    torch.manual_seed(0)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    config = Qwen3NextConfig(
        **sizes, head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def rows(count: int, draw: torch.Generator) -> Any:
    """Samples of 4 to 19 tokens."""
    lengths = torch.randint(4, 20, (count,), generator=draw).tolist()
    tokens = [torch.randint(WORDS, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": each} for each in tokens])


def trained(name: str, kind: str) -> list[dict[str, float]]:
    """Four steps, and an evaluation after every second; what the Trainer logged."""
    draw = torch.Generator().manual_seed(0)
    train, evaluated = rows(24, draw), rows(6, draw)
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<pad>": PAD, "</s>": END}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=2, logging_steps=1,
            gradient_accumulation_steps=2, learning_rate=1e-3, report_to=[], disable_tqdm=True, use_cpu=True,
            bf16=False, save_strategy="no", eval_strategy="steps", eval_steps=2,
            gradient_checkpointing=kind == "lora", packing=kind not in ("padded", "padding_free"),
            padding_free=kind == "padding_free", max_length=None if kind == "padding_free" else 32,
            router_aux_loss_coef=0.0 if kind != "router" else None,
        )  # fmt: skip
        own: dict[str, Any] = {"args": args, "train_dataset": train, "eval_dataset": evaluated, "model": model_of(name)}
        if kind == "lora":
            own["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        if "RANK" in os.environ:
            group = tritoncomm.initialize(context=int(os.environ["WORLD_SIZE"])).get_group("context")
            trainer = SequenceSFTTrainer(processing_class=tokenizer, ulysses=register(group), **own)
        else:
            trainer = RowTrainer(processing_class=tokenizer, **own)
        trainer.train()
    return [{key: float(log[key]) for key in KEYS if key in log} for log in trainer.state.log_history]


if __name__ == "__main__":
    logs = trained(*sys.argv[1:])
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(logs))
    if "RANK" in os.environ:
        tritoncomm.destroy()
