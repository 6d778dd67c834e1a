"""The Trainer of transformers on sequence shards, and the same steps on one rank.

    torchrun --nproc-per-node 2 examples/trainer_sequence_parallel.py

The ranks of a sequence group draw the same samples; with more ranks than ``--sequence``, groups are data-parallel.
"""

import argparse
import tempfile

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import tritoncomm
from tritoncomm.integrations.transformers import register, unregister
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

STEPS, RATE = 4, 0.5
SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 8}


class SequenceTrainer(UlyssesTrainerMixin, Trainer):
    """A Trainer that shards every batch; everything else is as ever."""


def samples() -> list[dict[str, torch.Tensor]]:
    """One batch of two samples, the second with a prompt that has no labels."""
    ids = torch.randint(128, (2, 61), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    labels[1, :20] = -100
    return [{"input_ids": ids[each], "labels": labels[each]} for each in range(2)]


def model_of(seed: int) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES, vocab_size=128))


def train_alone(model: LlamaForCausalLM) -> list[float]:
    """Steps of plain SGD on the full batch."""
    batch = {key: torch.stack([sample[key] for sample in samples()]) for key in samples()[0]}
    losses = []
    for _ in range(STEPS):
        loss = model(**batch).loss
        model.zero_grad()
        loss.backward()
        torch.optim.SGD(model.parameters(), RATE).step()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequence", type=int, default=2, help="ranks that share a sequence")
    group = tritoncomm.initialize(context=parser.parse_args().sequence).get_group("context")
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=2, optim="sgd", learning_rate=RATE, max_grad_norm=0,
            lr_scheduler_type="constant", logging_steps=1, report_to=[], disable_tqdm=True, save_strategy="no",
            use_cpu=not torch.cuda.is_available(),
        )  # fmt: skip
        name = register(group)
        trainer = SequenceTrainer(model=model_of(0), args=args, train_dataset=samples(), ulysses=name)
        trainer.train()
    unregister()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    if dist.get_rank() == 0:
        alone = train_alone(model_of(0))
        for step, pair in enumerate(zip(losses, alone, strict=True)):
            print(f"step {step}: loss {pair[0]:.6f} on {group.size()} ranks, {pair[1]:.6f} on one")
        torch.testing.assert_close(losses, alone, rtol=1e-4, atol=0)
    tritoncomm.destroy()


if __name__ == "__main__":
    main()
