"""Runs of transformers' Trainer in processes of their own: one process, sequence shards, and every misuse."""

import os
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import IterableDataset

import tritoncomm
from tritoncomm import variables
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers import batch as sequence_batch
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

__all__ = ["KINDS", "PACKED", "Report", "Run", "Steps", "Sums", "run_job_of_trainers"]

LENGTH, SAMPLES = 15, 14


class Steps(NamedTuple):
    """Losses of some steps, and norms of the gradients before they are clipped."""

    losses: list[float]
    norms: list[float]


class Run(NamedTuple):
    """Results of a run of Trainer.

    Attributes:
        losses: of every step.
        norms: of the gradients of every step, before they are clipped.
        tokens: that were seen, and the operations that were counted.
        evaluation: the loss.
        predictions: logits of five samples.
        weights: after training. Arrays, because tensors would be sent as files of a process that has ended.
    """

    losses: list[float]
    norms: list[float]
    tokens: tuple[float, float]
    evaluation: float
    predictions: Any
    weights: list[Any]


class Sums(NamedTuple):
    """What a Trainer found that gathers sums for metrics, as TRL's does.

    Attributes:
        losses: of every step, then of two evaluations.
        counts: labels, right guesses and tokens of the mask of the job's batch, for every call of ``compute_loss``.
    """

    losses: list[float]
    counts: list[tuple[int, ...]]


class Report(NamedTuple):
    """Results of a rank.

    Attributes:
        alone: the run of one process, before it was rank 0; None on other ranks.
        sharded: the run over sequence shards.
        adapted: the same two runs of a model with LoRA adapters; None in a job of more than two ranks.
        saved: files of a checkpoint.
        errors: of each misuse, by its name.
        rounded: steps of each model, by "exact" (in fp32), "alone" and "sharded" (under bf16 autocast); see ``_steps``.
        sums: of the Trainer that gathers sums, alone (None on other ranks) and over sequence shards.
        packed: steps by case: alone, a sequence in each row (None on other ranks); and packed, over shards.
    """

    alone: Run | None
    sharded: Run
    adapted: tuple[Run | None, Run] | None
    saved: list[str]
    errors: dict[str, str]
    rounded: dict[str, dict[str, Steps]]
    sums: tuple[Sums | None, Sums]
    packed: dict[str, tuple[Steps | None, Steps]]


def _library() -> Any:
    warnings.simplefilter("ignore")
    import transformers  # takes seconds, and only these processes need it

    transformers.logging.set_verbosity_error()
    return transformers


def _samples() -> list[dict[str, Tensor]]:
    """Sequences of 15 tokens; every one has another number of labels, all of them in its first or its last part."""
    ids = torch.randint(32, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    samples = []
    for place, tokens in enumerate(ids):
        labels = tokens.clone()
        labels[slice(None, place) if place % 2 else slice(LENGTH - place, None)] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def _model(**more: Any) -> Any:
    torch.manual_seed(0)
    transformers = _library()
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "vocab_size": 32, "head_dim": 8}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, num_key_value_heads=2, **more)
    return transformers.LlamaForCausalLM(config)


def _adapted_model() -> Any:
    """The model, frozen but for LoRA adapters, whose products are not zero at the start."""
    from peft import LoraConfig, get_peft_model  # imports transformers

    torch.manual_seed(1)
    return get_peft_model(_model(), LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))


def _arguments(folder: str, **more: Any) -> Any:
    options = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "optim": "sgd",
        "learning_rate": 0.5, "max_grad_norm": 0.5, "logging_steps": 1, "max_steps": 3, "save_strategy": "no",
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "include_num_input_tokens_seen": True,
    }  # fmt: skip
    return _library().TrainingArguments(**(options | more))


def _run(kind: Any, batch: int, evaluated: int, folder: str, is_adapted: bool = False, **more: Any) -> Run:
    """Three steps of four samples in two parts, an evaluation, and predictions; adapters with checkpointed layers."""
    args = _arguments(
        folder, per_device_train_batch_size=batch, per_device_eval_batch_size=batch, gradient_checkpointing=is_adapted
    )
    samples, model = _samples(), _adapted_model() if is_adapted else _model()
    trainer = kind(model=model, args=args, train_dataset=samples, eval_dataset=samples[:evaluated], **more)
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    unlabelled = [{"input_ids": each["input_ids"]} for each in samples[:evaluated]]
    predictions = [trainer.predict(data).predictions for data in (samples[:evaluated], unlabelled)]
    assert (predictions[0] == predictions[1]).all()
    return Run(
        [float(log["loss"]) for log in logs],
        [float(log["grad_norm"]) for log in logs],
        (trainer.state.num_input_tokens_seen, trainer.state.total_flos),
        trainer.evaluate()["eval_loss"],
        predictions[0],
        [parameter.detach().numpy().copy() for parameter in trainer.model.parameters()],
    )


def _quiet_trainer() -> Any:
    """Trainer, which logs into its state only."""
    transformers = _library()

    class Quiet(transformers.Trainer):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pop_callback(transformers.PrinterCallback)

    return Quiet


def _sharded_trainer() -> Any:
    class Sharded(UlyssesTrainerMixin, _quiet_trainer()):
        pass

    return Sharded


def _summing_trainer() -> Any:
    """A Trainer that makes the calls of TRL's SFTTrainer: a loss and counts of its own, in evaluation, too."""

    class Summing(_quiet_trainer()):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.counts: list[tuple[int, ...]] = []

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            inputs["use_cache"] = False
            outputs = model(**inputs)
            targets = inputs.get("shift_labels")
            if targets is None:
                targets = F.pad(inputs["labels"][:, 1:], (0, 1), value=-100)
            mask = targets != -100
            loss = F.cross_entropy(outputs.logits[mask], targets[mask], reduction="sum")
            loss = loss / (mask.sum() if num_items_in_batch is None else num_items_in_batch)
            if self.args.average_tokens_across_devices and num_items_in_batch is not None:
                loss = loss * self.accelerator.num_processes
            right = (outputs.logits.argmax(-1) == targets) & mask
            gather = self.accelerator.gather_for_metrics
            counts = (gather(x.sum()).sum() for x in (mask, right, inputs["attention_mask"]))
            self.counts.append(tuple(map(int, counts)))
            return (loss, outputs) if return_outputs else loss

        def prediction_step(self, model: Any, inputs: Any, *_: Any, **__: Any) -> Any:
            with torch.no_grad():
                return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    return Summing


def _sums(kind: Any, batch: int, evaluated: int, folder: str, **more: Any) -> Sums:
    """Two steps of four samples in two parts with masks, and two evaluations, of a Trainer that gathers sums."""
    args = _arguments(folder, max_steps=2, per_device_train_batch_size=batch, per_device_eval_batch_size=batch)
    samples = _samples()
    for place, sample in enumerate(samples):
        sample["attention_mask"] = (torch.arange(LENGTH) < LENGTH - place // 2).long()
        sample["labels"][sample["attention_mask"] == 0] = -100
        sample["labels"][1] = sample["input_ids"][1]  # so that every batch has a label
    trainer = kind(model=_model(), args=args, train_dataset=samples, eval_dataset=samples[:evaluated], **more)
    trainer.train()
    losses = [log["loss"] for log in trainer.state.log_history if "loss" in log]
    losses += [trainer.evaluate()["eval_loss"] for _ in range(2)]
    return Sums([float(loss) for loss in losses], trainer.counts)


def _mixed(kind: Any, metrics_are_sums: bool) -> Any:
    """The class behind the mixin, which says of its numbers that they are sums, or does not."""
    return type("Mixed", (UlyssesTrainerMixin, kind), {"metrics_are_sums": metrics_are_sums})


KINDS = ("Llama", "Qwen3")


def _steps(kind: str, trainer: Any, folder: str, in_bf16: bool = True, **more: Any) -> Steps:
    """Four steps of four sequences each, under bf16 autocast or in fp32."""
    from accelerate.state import AcceleratorState  # of one precision until it is reset

    torch.manual_seed(0)
    transformers = _library()
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 64, "head_dim": 16}
    config = getattr(transformers, f"{kind}Config")(**sizes, num_attention_heads=4, num_key_value_heads=2)
    model = getattr(transformers, f"{kind}ForCausalLM")(config)
    ids = torch.randint(64, (16, 32), generator=torch.Generator().manual_seed(0))
    args = _arguments(
        folder, bf16=in_bf16, max_steps=4, per_device_train_batch_size=4, gradient_accumulation_steps=1,
        learning_rate=1e-2, max_grad_norm=1.0,
    )  # fmt: skip
    AcceleratorState._reset_state()
    run = trainer(model=model, args=args, train_dataset=[{"input_ids": x, "labels": x.clone()} for x in ids], **more)
    run.train()
    AcceleratorState._reset_state()
    logs = [log for log in run.state.log_history if "loss" in log]
    return Steps([float(log["loss"]) for log in logs], [float(log["grad_norm"]) for log in logs])


class _EveryLabel:
    """Collator that packs samples in a row and leaves the labels at starts of documents, as for pretraining."""

    def __init__(self, collator: Any) -> None:
        self.collator = collator

    def __call__(self, samples: list[Any]) -> dict[str, Tensor]:
        batch = self.collator(samples)
        return {**batch, "labels": batch["input_ids"].clone()}


PACKED: dict[str, dict[str, Any]] = {
    "hybrid": {},
    "labels at starts": {},
    "labels at starts, not averaged": {"average_tokens_across_devices": False},
}


def _packed(case: str, kind: Any, folder: str, is_packed: bool, **more: Any) -> Steps:
    """Three steps and an evaluation of a model on four sequences in rows, or on two by two packed in a row."""
    from tiny_models import tiny

    transformers = _library()
    collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=case == "hybrid")
    if case != "hybrid":
        collator = _EveryLabel(collator)
    samples, model = _samples(), tiny("qwen3_next", 0, 4) if case == "hybrid" else _model()
    for sample in samples:
        sample["labels"] = sample["input_ids"].clone()
        sample["labels"][0] = -100  # which Trainer counts in rows, where it is no label of a position
    packed = [{key: x.tolist() for key, x in sample.items()} for sample in samples]
    data = packed if is_packed else samples
    trainer = kind(
        model=model, args=_arguments(folder, learning_rate=0.05, **PACKED[case]), train_dataset=data,
        eval_dataset=data[:5], data_collator=collator if is_packed else None, **more,
    )  # fmt: skip
    trainer.train()
    logs = [log for log in trainer.state.log_history if "loss" in log]
    losses = [*(float(log["loss"]) for log in logs), trainer.evaluate()["eval_loss"]]
    return Steps(losses, [float(log["grad_norm"]) for log in logs])


def _join(ranks: Sequence[Mapping[str, str]], sequence: int) -> dist.ProcessGroup:
    """Make this process a rank, after it ran a Trainer of its own; the sequence group."""
    from accelerate.state import AcceleratorState, GradientState  # as late as transformers

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    os.environ.update(ranks[int(os.environ["PLACE"])])
    return tritoncomm.initialize(tensor=sequence).get_group("tensor")


def run_job_of_trainers(ranks: Sequence[Mapping[str, str]], sequence: int, batch: int, evaluated: int) -> Report:
    """A Trainer of rank 0 alone, then one over the job; in a job of two ranks a checkpoint and every misuse, too."""
    _library()  # which all ranks import at the same time, not one after the other
    with tempfile.TemporaryDirectory() as folder:
        is_first, is_pair = not int(os.environ["PLACE"]), len(ranks) == 2
        alone = _run(_quiet_trainer(), 2, evaluated, folder) if is_first else None
        adapted = _run(_quiet_trainer(), 2, evaluated, folder, True) if is_first and is_pair else None
        counted = _sums(_summing_trainer(), 2, evaluated, folder) if is_first else None
        in_rows = {case: _packed(case, _quiet_trainer(), folder, False) for case in PACKED if is_first and is_pair}
        rounded: dict[str, dict[str, Steps]] = {kind: {} for kind in KINDS}
        for kind in KINDS if is_first and is_pair else ():
            for name, in_bf16 in (("exact", False), ("alone", True)):
                rounded[kind][name] = _steps(kind, _quiet_trainer(), folder, in_bf16)
        group = _join(ranks, sequence)
        name = ours.register(group)
        sharded = _run(_sharded_trainer(), batch, evaluated, folder, ulysses=name)
        both = (adapted, _run(_sharded_trainer(), batch, evaluated, folder, True, ulysses=name)) if is_pair else None
        sums = _sums(_mixed(_summing_trainer(), True), batch, evaluated, folder, ulysses=name)
        for kind in KINDS if is_pair else ():
            rounded[kind]["sharded"] = _steps(kind, _sharded_trainer(), folder, ulysses=name)
        packed = {
            case: (in_rows.get(case), _packed(case, _sharded_trainer(), folder, True, ulysses=name))
            for case in PACKED if is_pair
        }  # fmt: skip
        saved = _saved(folder, name) if is_pair else []
        errors = _misuses(group, name, folder) if is_pair else {}
    ours.unregister()
    tritoncomm.destroy()
    return Report(alone, sharded, both, saved, errors, rounded, (counted, sums), packed)


class _Stream(IterableDataset[dict[str, Tensor]]):
    """The samples, in order."""

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(_samples())


def _saved(folder: str, name: str) -> list[str]:
    """Files of a checkpoint after a step on a stream, in which the attention's name must not be."""
    args = _arguments(str(Path(folder) / str(dist.get_rank())), max_steps=1, save_strategy="steps", save_steps=1)
    trainer = _sharded_trainer()(model=_model(), args=args, train_dataset=_Stream(), ulysses=name)
    with variables.CHECK.override(True):  # ranks of a group compare every batch
        trainer.train()
    found = sorted(path.name for path in Path(args.output_dir, "checkpoint-1").glob("*"))
    for path in Path(args.output_dir).rglob("*.json"):
        assert name not in path.read_text(), path
    return found


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except tritoncomm.errors.CommError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _misuses(group: dist.ProcessGroup, name: str, folder: str) -> dict[str, str]:
    """The error of each misuse, on this rank."""
    from accelerate.state import AcceleratorState  # of one kind until it is reset

    model, kind = _model(attn_implementation=name), _sharded_trainer()
    samples, args, errors = _samples(), _arguments(folder), {}
    plain = _quiet_trainer()(model=model, args=args, train_dataset=samples, eval_dataset=samples)
    errors["train"] = _error(plain.train)
    errors["evaluate"] = _error(plain.evaluate)
    errors["predict"] = _error(lambda: plain.predict(samples))
    own = kind(model=_model(), args=args, train_dataset=samples[group.rank() :: 2], ulysses=name)
    sequence_batch._compared.forget(group)
    errors["own samples"] = _error(own.train)
    with variables.CHECK.override(True):
        errors["own samples, in check mode"] = _error(own.train)
    bare = kind(model=_model(), args=args, train_dataset=[{"input_ids": x["input_ids"]} for x in samples])
    errors["no labels"] = _error(bare.train)
    errors["no registration"] = _error(lambda: kind(model=_model(), args=args, ulysses="none"))
    masked = [sample | {"attention_mask": torch.ones(LENGTH, dtype=torch.long)} for sample in samples]
    summing = _mixed(_summing_trainer(), False)
    may_be_means = summing(model=_model(), args=args, train_dataset=masked, eval_dataset=masked, ulysses=name)
    errors["sums or means, train"] = _error(may_be_means.train)
    errors["sums or means, evaluate"] = _error(may_be_means.evaluate)
    from peft import PromptTuningConfig, get_peft_model
    from tiny_models import tiny

    errors["own loss"] = _error(kind(model=tiny("whisper"), args=args, train_dataset=masked).train)
    prompts = get_peft_model(_model(), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2))
    errors["prompts"] = _error(lambda: kind(model=prompts, args=args, train_dataset=samples))
    transformers = _library()
    sequence = type("Sequence", (UlyssesTrainerMixin, transformers.Seq2SeqTrainer), {})
    generating = transformers.Seq2SeqTrainingArguments(folder, use_cpu=True, report_to=[], predict_with_generate=True)
    errors["generation"] = _error(lambda: sequence(model=_model(), args=generating, train_dataset=samples))
    errors["options"] = _options_refused(kind, args, samples)
    # accelerate makes DDP of it on CPUs.
    fsdp = _arguments(folder, fsdp=True)
    errors["fsdp"] = _error(lambda: kind(model=_model(), args=fsdp, train_dataset=samples))
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # which every later Accelerator would read
    AcceleratorState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    errors["no use_cpu"] = _error(lambda: kind(model=_model(), args=_arguments(folder, use_cpu=False)))
    AcceleratorState._reset_state(reset_partial_state=True)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours.register(dist.new_subgroups(1)[0], name="single")
    (errors["a group of one"],) = (str(warning.message) for warning in caught)
    return errors


def _options_refused(kind: Any, args: Any, samples: list[dict[str, Tensor]]) -> str:
    """Options that the mixin refuses, all at once."""
    args.label_smoothing_factor, args.train_sampling_strategy = 0.1, "batch_rebalance"
    args.accelerator_config.dispatch_batches, args.deepspeed = True, {"zero_optimization": {"stage": 2}}
    loss = lambda *_, **__: None  # noqa: E731
    return _error(lambda: kind(model=_model(), args=args, train_dataset=samples, compute_loss_func=loss))
