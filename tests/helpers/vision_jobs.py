"""Runs of Trainer on batches with images, in one process and over sequence shards."""

import os
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import trainer_jobs
from torch import Tensor
from trainer_jobs import Steps

import tritoncomm
from tritoncomm.integrations import transformers as ours

__all__ = ["CASES", "VisionReport", "VisionRun", "run_job_of_vision"]

SAMPLES, PAD = 12, 0


class Case(NamedTuple):
    """A run.

    Attributes:
        model: of ``vision_models``; Trainer gives ``qwen3_vl`` no count of labels, and takes the mean of each batch.
        has_adapters: LoRA, and checkpointed layers.
        sums: of a Trainer that makes the calls of TRL's SFTTrainer, with counts of its own.
        is_packed: over shards the rows of a batch are documents of one row, with labels at their starts.
    """

    model: str
    has_adapters: bool = False
    sums: bool = False
    is_packed: bool = False


CASES = {
    "a count of labels": Case("llava"),
    "packed": Case("llava", is_packed=True),
    "a mean of each batch, adapters": Case("qwen3_vl", has_adapters=True),
    "calls of SFTTrainer": Case("qwen3_vl", sums=True),
}


class VisionRun(NamedTuple):
    """Results of a run; weights as arrays, and what a Trainer counted."""

    steps: Steps
    evaluation: float
    predictions: Any
    weights: list[Any]
    counts: list[tuple[int, ...]]


class VisionReport(NamedTuple):
    """Results of a rank by case, of one process and then over sequence shards; errors of misuses."""

    alone: dict[str, VisionRun]
    sharded: dict[str, VisionRun]
    errors: dict[str, str]


def _samples(model: Any) -> list[dict[str, Tensor]]:
    """Rows of other lengths, with an image or none; a third of them have no image, and labels have images' tokens."""
    from vision_models import batch_of, form_of  # imports transformers

    batch, tokens = batch_of(model), form_of(model).tokens
    image, generator = batch["input_ids"][0, 3], torch.Generator().manual_seed(1)
    pixels = batch["pixel_values"].chunk(2)[0]
    samples = []
    for place in range(SAMPLES):
        ids = torch.randint(3, 70, (tokens + 9 + 2 * (place % 5),), generator=generator)
        sample = {"input_ids": ids}
        if place % 3 != 2:
            ids[place % 7 : place % 7 + tokens] = image
            sample["pixel_values"] = torch.randn(pixels.shape, generator=generator)
            if "image_grid_thw" in batch:
                sample["image_grid_thw"] = batch["image_grid_thw"][:1]
        samples.append({**sample, "labels": ids.clone()})
    return samples


class _Collator:
    """Pads rows at their right, or packs them, and puts images one after the other."""

    def __init__(self, model: Any, is_packed: bool = False) -> None:
        from vision_models import batch_of

        self.image = batch_of(model)["input_ids"][0, 3]
        self.has_types, self.is_packed = "image_grid_thw" in batch_of(model), is_packed

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        rows = {key: [sample[key] for sample in samples] for key in ("input_ids", "labels")}
        rows["attention_mask"] = [torch.ones_like(ids) for ids in rows["input_ids"]]
        values = {"input_ids": PAD, "labels": -100, "attention_mask": 0}
        batch = {
            key: torch.nn.utils.rnn.pad_sequence(x, batch_first=True, padding_value=values[key])
            for key, x in rows.items()
        }
        if self.is_packed:
            batch = {key: torch.cat(rows[key])[None] for key in ("input_ids", "labels")}
            batch["position_ids"] = torch.cat([torch.arange(len(ids)) for ids in rows["input_ids"]])[None]
        for key in ("pixel_values", "image_grid_thw"):
            if parts := [sample[key] for sample in samples if key in sample]:
                batch[key] = torch.cat(parts)
        if self.has_types:
            batch["mm_token_type_ids"] = (batch["input_ids"] == self.image).int()
        return batch


def _run(case: Case, kind: Any, folder: str, **more: Any) -> VisionRun:
    """Three steps of four samples in two parts, an evaluation, and predictions."""
    from vision_models import tiny

    model = tiny(case.model)
    samples, collator = _samples(model), _Collator(model, case.is_packed and bool(more))
    if case.has_adapters:
        from peft import LoraConfig, get_peft_model

        torch.manual_seed(1)
        config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        model = get_peft_model(model, config)
    args = trainer_jobs._arguments(
        folder, learning_rate=0.1, remove_unused_columns=False, gradient_checkpointing=case.has_adapters,
        include_num_input_tokens_seen=False, ddp_find_unused_parameters=True,
    )  # fmt: skip
    trainer = kind(
        model=model, args=args, train_dataset=samples, eval_dataset=samples[:4], data_collator=collator, **more
    )
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    steps = Steps([float(log["loss"]) for log in logs], [float(log["grad_norm"]) for log in logs])
    evaluation = trainer.evaluate()["eval_loss"]
    ignored = ["past_key_values", "image_hidden_states", "rope_deltas", "hidden_states", "attentions"]
    predictions = None if case.sums or case.is_packed else trainer.predict(samples[:4], ignore_keys=ignored).predictions
    weights = [x.detach().numpy() for x in model.parameters()]
    return VisionRun(steps, float(evaluation), predictions, weights, getattr(trainer, "counts", []))


def run_job_of_vision(ranks: Sequence[Mapping[str, str]]) -> VisionReport:
    """Every case by rank 0 alone, then over the job; and misuses."""
    trainer_jobs._library()
    with tempfile.TemporaryDirectory() as folder:
        plain, summing = trainer_jobs._quiet_trainer(), trainer_jobs._summing_trainer()
        alone = {
            name: _run(case, summing if case.sums else plain, folder)
            for name, case in CASES.items() if not int(os.environ["PLACE"])
        }  # fmt: skip
        group = trainer_jobs._join(ranks, len(ranks))
        name = ours.register(group)
        kinds = trainer_jobs._sharded_trainer(), trainer_jobs._mixed(summing, True)
        sharded = {key: _run(case, kinds[case.sums], folder, ulysses=name) for key, case in CASES.items()}
        errors = {"plain": trainer_jobs._error(lambda: _run_switched(plain, folder, name))}
    ours.unregister()
    tritoncomm.destroy()
    return VisionReport(alone, sharded, errors)


def _run_switched(plain: Any, folder: str, name: str) -> None:
    """Train a switched model by a Trainer without the mixin, whose ranks draw samples of their own."""
    from vision_models import tiny

    from tritoncomm.core.validation import PerGroup
    from tritoncomm.integrations.transformers import batch as sequence_batch

    sequence_batch._compared = PerGroup()  # of the runs before
    model = tiny("qwen3_vl")
    samples, collator = _samples(model), _Collator(model)
    ours.switch(model, name)
    args = trainer_jobs._arguments(folder, remove_unused_columns=False, include_num_input_tokens_seen=False)
    plain(model=model, args=args, train_dataset=samples, data_collator=collator).train()
