"""TRL's SFTTrainer on a small random Llama, alone or behind the mixin, as one line of JSON: ``trl_program.py KIND``.

Under a launcher it runs over sequence shards. KIND is ``padded`` (batches with masks), ``positions`` (packed sequences
as position ids alone), ``boundaries`` (packed with the boundaries that TRL adds, which are refused) or ``lora``
(padded batches, and adapters of peft).
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
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

import tritoncomm
from tritoncomm.integrations.trainer import UlyssesTrainerMixin
from tritoncomm.integrations.transformers import register

WORDS, PAD, END = 62, 62, 63
KEYS = ("loss", "grad_norm", "mean_token_accuracy", "entropy", "num_tokens", "eval_loss", "eval_mean_token_accuracy")


class SequenceSFTTrainer(UlyssesTrainerMixin, SFTTrainer):
    """SFTTrainer over sequence shards."""


def rows(count: int, draw: torch.Generator) -> Any:
    """Samples of 4 to 19 tokens."""
    lengths = torch.randint(4, 20, (count,), generator=draw).tolist()
    tokens = [torch.randint(WORDS, (length,), generator=draw).tolist() for length in lengths]
    return Dataset.from_list([{"input_ids": each} for each in tokens])


def trained(kind: str) -> list[dict[str, float]]:
    """Four steps, and an evaluation after every second; what the Trainer logged."""
    draw = torch.Generator().manual_seed(0)
    train, evaluated = rows(24, draw), rows(6, draw)
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<pad>": PAD, "</s>": END}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=WORDS + 2, pad_token_id=PAD, eos_token_id=END,
        )
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        args = SFTConfig(
            folder, max_steps=4, per_device_train_batch_size=2, per_device_eval_batch_size=2, logging_steps=1,
            gradient_accumulation_steps=2, learning_rate=1e-2, report_to=[], disable_tqdm=True, use_cpu=True,
            bf16=False, save_strategy="no", eval_strategy="steps", eval_steps=2, max_length=32,
            gradient_checkpointing=False, packing=kind not in ("padded", "lora"),
        )  # fmt: skip
        own: dict[str, Any] = {"args": args, "train_dataset": train, "eval_dataset": evaluated}
        if kind == "lora":
            own["peft_config"] = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
        if "RANK" in os.environ:
            group = tritoncomm.initialize(context=int(os.environ["WORLD_SIZE"])).get_group("context")
            trainer = SequenceSFTTrainer(model=model, processing_class=tokenizer, ulysses=register(group), **own)
        else:
            trainer = SFTTrainer(model=model, processing_class=tokenizer, **own)
        if kind == "positions":
            collate = trainer.data_collator
            kept = ("input_ids", "labels", "position_ids")
            trainer.data_collator = lambda batch: {name: collate(batch)[name] for name in kept}
        trainer.train()
    return [{key: float(log[key]) for key in KEYS if key in log} for log in trainer.state.log_history]


if __name__ == "__main__":
    logs = trained(sys.argv[1])
    if os.environ.get("RANK", "0") == "0":
        print("RESULT", json.dumps(logs))
    if "RANK" in os.environ:
        tritoncomm.destroy()
