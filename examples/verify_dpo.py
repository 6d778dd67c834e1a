"""TRL's DPOTrainer over sequence shards against one process: a step, what it logs, and the loss in evaluation.

tritoncomm verify examples/verify_dpo.py:build --ranks 2
"""

from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import DPOConfig, DPOTrainer

from tritoncomm import verify
from tritoncomm.integrations.transformers import register
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin


def build(rank: int, world: int, group: Any, whole: Any) -> verify.Case:
    torch.distributed.init_process_group()
    sizes = {"vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    policy, reference = (LlamaForCausalLM(LlamaConfig(**sizes, num_attention_heads=4)) for _ in range(2))
    policy.load_state_dict(whole or policy.state_dict())
    letters = Tokenizer(models.BPE({chr(code): code for code in range(128)}, []))
    words = PreTrainedTokenizerFast(tokenizer_object=letters, pad_token="\0", eos_token=".")
    pairs = Dataset.from_dict({"prompt": ["why", "what"], "chosen": [" so", " a part"], "rejected": [" no", " not"]})
    args = DPOConfig("out", use_cpu=True, bf16=False, gradient_checkpointing=False, report_to=[])
    kind: Any = type("Sharded", (UlyssesTrainerMixin, DPOTrainer), {}) if whole else DPOTrainer
    ranks = {"ulysses": register(group or torch.distributed.group.WORLD)} if whole else {}
    trainer = kind(policy, reference, args, train_dataset=pairs, processing_class=words, **ranks)

    def step() -> torch.Tensor:
        batch = next(iter(trainer.get_train_dataloader()))
        trainer.accelerator.backward(loss := trainer.compute_loss(policy, batch))
        for parameter in policy.parameters():
            torch.distributed.all_reduce(parameter.grad.div_(world), group=group)  # as DDP does
        logged = [numbers[-1] for _, numbers in sorted(trainer._metrics["train"].items())]
        return torch.tensor([loss, trainer.prediction_step(policy, batch, True)[0], *logged])

    return verify.Case(policy, step)
