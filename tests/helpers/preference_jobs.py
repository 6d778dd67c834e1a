"""Runs of a trainer of preferences that makes the calls of TRL's, in one process and over sequence shards.

TRL is not installed where these tests run: the fused head and the loss are written here, and the class bears the name
and the module of TRL's DPOTrainer. ``tools/outside`` runs TRL's own.
"""

import copy
import dataclasses
import io
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny_models import tiny
from torch import Tensor
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import tritoncomm
from tritoncomm.errors import CommError
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

__all__ = ["CASES", "Outcome", "Report", "add_fused_head", "run_job_of_preferences"]

VOCABULARY, PAD, IGNORED = 96, 0, -100


class Case(NamedTuple):
    """A run.

    Attributes:
        model: of ``tiny_models``.
        has_adapters: LoRA, without a reference model, and checkpointed layers.
        generates: a callback gives the model another attention after the first step, and generates.
    """

    model: str = "llama"
    has_adapters: bool = False
    generates: bool = False


CASES = {
    "reference": Case(),
    "hybrid": Case("qwen3_next"),
    "adapters": Case(has_adapters=True),
    "generates": Case(has_adapters=True, generates=True),
}


class Outcome(NamedTuple):
    """What a run found.

    Attributes:
        logs: numbers of each step, of the evaluation, then of each batch.
        weights: as arrays.
        attentions: of the policy, and of the reference if there is one, in every batch.
    """

    logs: list[dict[str, float]]
    weights: list[Any]
    attentions: list[str]


class Report(NamedTuple):
    """Results of a rank.

    Attributes:
        alone: of one process, before it was rank 0; empty on other ranks.
        sharded: over sequence shards.
        errors: of each misuse.
        undone: what is left of the hooks on a model that got another attention: after a run, and of copies.
        outputs: fields of a call of the fused head on a whole batch; of one process, then over the ranks.
    """

    alone: dict[str, Outcome]
    sharded: dict[str, Outcome]
    errors: dict[str, str]
    undone: list[int]
    outputs: list[dict[str, Any]]


def _library() -> Any:
    warnings.simplefilter("ignore")
    import transformers  # takes seconds, and only these processes need it

    transformers.logging.set_verbosity_error()
    return transformers


def _output_class() -> Any:
    names = ("loss", "log_probs", "entropy", "mean_logits", "is_top1", "aux_loss")
    fields = [(name, Any, None) for name in names]
    return dataclasses.make_dataclass("Numbers", fields, bases=(_library().utils.ModelOutput,))


def add_fused_head(model: Any) -> None:
    """Let a model return numbers of its tokens, and no logits, where it is called with ``fused_lm_head=True``.

    As TRL's does it: the weight of the head is gathered where FSDP2 has sharded it, and multiplied past the head.
    """
    output_class = _output_class()
    plain = model.forward

    def forward(
        self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, shift_labels: Any = None, **more: Any
    ) -> Any:
        if not fused_lm_head:
            return plain(*args, labels=labels, shift_labels=shift_labels, **more)
        items, more["use_cache"] = more.pop("num_items_in_batch", None), False
        hidden = self.base_model(*args, **more).last_hidden_state
        if shift_labels is None:
            hidden, shift_labels = hidden[:, :-1], labels[:, 1:]
        weight = self.get_output_embeddings().weight
        weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
        logits, mask = F.linear(hidden, weight), shift_labels != IGNORED
        every = logits.log_softmax(-1)
        log_probs = every.gather(-1, shift_labels.clamp(min=0)[..., None])[..., 0] * mask
        return output_class(
            loss=-log_probs.sum() / (mask.sum().clamp(min=1) if items is None else items), log_probs=log_probs,
            entropy=-(every.exp() * every).sum(-1) * mask, mean_logits=logits.detach().mean(-1),
            is_top1=(logits.argmax(-1) == shift_labels) & mask,
            aux_loss=hidden.mean() if getattr(self, "has_further_loss", False) else None,
        )  # fmt: skip

    model.forward = MethodType(forward, model)


def _preference_trainer() -> Any:
    """TRL's DPOTrainer in its calls: a policy, a reference, numbers that are gathered, one of them in the loss."""
    transformers = _library()

    class Preferences(transformers.Trainer):
        loss_is_scaled_for_ga = False

        def __init__(self, *args: Any, ref_model: Any = None, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.pop_callback(transformers.PrinterCallback)
            self.model_accepts_loss_kwargs = False  # of transformers before 5.19, for the same
            self.ref_model = ref_model
            self.metrics: list[dict[str, float]] = []
            self.attentions: list[str] = []
            for model in (self.model, ref_model):
                if model is not None:
                    add_fused_head(model.get_base_model() if hasattr(model, "peft_config") else model)
            if ref_model is not None:
                self.ref_model = self.accelerator.prepare_model(ref_model, evaluation_mode=True)

        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            labels = inputs["input_ids"].masked_fill(inputs["completion_mask"] == 0, IGNORED)
            given = {name: inputs[name] for name in ("input_ids", "attention_mask")}
            with torch.no_grad():
                if self.ref_model is None:
                    with self.model.disable_adapter():
                        reference = self.model(**given, labels=labels, fused_lm_head=True)
                else:
                    reference = self.ref_model(**given, labels=labels, fused_lm_head=True)
            out = model(**given, labels=labels, fused_lm_head=True)
            with torch.no_grad():  # KTO has a further forward before the backward
                again = model(**given, labels=labels, fused_lm_head=True).log_probs.sum()
            difference = (out.log_probs - reference.log_probs).sum(1)
            gather = self.accelerator.gather_for_metrics
            baseline = gather(difference.mean().detach()).mean().clamp(min=0)
            chosen, rejected = difference.chunk(2)
            loss = -F.logsigmoid(0.1 * (chosen - rejected - baseline)).mean()
            mask = inputs["completion_mask"][:, 1:]
            numbers = {
                "baseline": baseline, "again": gather(again).sum(), "right": gather(out.is_top1.sum()).sum(),
                "entropy": gather((out.entropy.detach() * mask).sum()).sum(),
                "logits": gather((out.mean_logits * mask).sum()).sum() / gather(mask.sum()).sum(),
                "margins": self.accelerator.gather((chosen - rejected).detach()).mean(),
                "tokens": gather(inputs["attention_mask"].sum()).sum(),
            }  # fmt: skip
            models = [self.model] if self.ref_model is None else [self.model, self.ref_model]
            self.attentions += [model.config._attn_implementation for model in models]
            self.metrics.append({name: float(x) for name, x in numbers.items()} | {"step_loss": float(loss)})
            return (loss, model(**given)) if return_outputs else loss

        def prediction_step(self, model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None) -> Any:
            with torch.no_grad():
                found = self.compute_loss(model, self._prepare_inputs(inputs), not prediction_loss_only)
            return (found, None, None) if prediction_loss_only else (found[0], found[1].logits, inputs["input_ids"])

    Preferences.__name__ = Preferences.__qualname__ = "DPOTrainer"
    Preferences.__module__ = "trl.trainer.dpo_trainer"
    return Preferences


def _label_trainer() -> Any:
    """TRL's SFTTrainer in its calls: the loss of the fused head."""
    transformers = _library()

    class Labels(transformers.Trainer):
        def compute_loss(
            self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
        ) -> Any:
            return model(**{**inputs, "num_items_in_batch": num_items_in_batch}, fused_lm_head=True).loss

    Labels.__name__ = Labels.__qualname__ = "SFTTrainer"
    Labels.__module__ = "trl.trainer.sft_trainer"
    return Labels


def _pad(rows: list[Tensor], value: int) -> Tensor:
    return torch.nn.utils.rnn.pad_sequence(rows, True, value, padding_side="left")


def _collate(samples: list[Any]) -> dict[str, Tensor]:
    """Chosen rows, then rejected ones, padded on the left."""
    rows = [(sample[kind], sample["prompt"]) for kind in ("chosen", "rejected") for sample in samples]
    return {
        "input_ids": _pad([ids for ids, _ in rows], PAD),
        "attention_mask": _pad([torch.ones_like(ids) for ids, _ in rows], 0),
        "completion_mask": _pad([(torch.arange(len(ids)) >= prompt).long() for ids, prompt in rows], 0),
    }


def _samples() -> list[dict[str, Any]]:
    """Pairs of 7 to 18 tokens; some completions are all in one shard."""
    draw = torch.Generator().manual_seed(2)
    samples = []
    for _ in range(12):
        prompt, *lengths = torch.randint(1, 9, (3,), generator=draw).tolist()
        ids = [torch.randint(1, VOCABULARY, (6 + prompt + more,), generator=draw) for more in lengths]
        samples.append({"prompt": 6 + prompt, "chosen": ids[0], "rejected": ids[1]})
    return samples


def _model(case: Case, seed: int) -> Any:
    model = tiny(case.model, seed, 4).train()
    if not case.has_adapters:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    return get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))


def _arguments(folder: str, **more: Any) -> Any:
    options = {
        "output_dir": folder, "use_cpu": True, "report_to": [], "disable_tqdm": True, "optim": "sgd", "max_steps": 3,
        "learning_rate": 0.3, "logging_steps": 1, "save_strategy": "no", "gradient_accumulation_steps": 2,
        "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "remove_unused_columns": False,
    }  # fmt: skip
    return _library().TrainingArguments(**(options | more))


def _generating() -> Any:
    """A callback that generates on full sequences, and gives the attention back never."""

    def on_step_end(self: Any, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
        if state.global_step == 1:
            ours.switch(model, "sdpa")
            with torch.no_grad():
                model.generate(input_ids=torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, do_sample=False)

    return type("Generating", (_library().TrainerCallback,), {"on_step_end": on_step_end})()


def _trainer(case: Case, kind: Any, folder: str, lanes: int = 1, **more: Any) -> Any:
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state()
    batch, samples = 2 // lanes, _samples()
    args = _arguments(
        folder, gradient_checkpointing=case.has_adapters, per_device_train_batch_size=batch,
        per_device_eval_batch_size=batch,
    )  # fmt: skip
    return kind(
        model=_model(case, 0), ref_model=None if case.has_adapters else _model(case, 5), args=args,
        train_dataset=samples, eval_dataset=samples[:4], data_collator=_collate, **more,
    )  # fmt: skip


def _run(case: Case, kind: Any, folder: str, lanes: int = 1, **more: Any) -> tuple[Outcome, Any]:
    """Three steps of four pairs in two parts, and an evaluation."""
    callbacks = [_generating()] if case.generates else []
    trainer = _trainer(case, kind, folder, lanes, callbacks=callbacks, **more)
    trainer.train()
    logs = [{name: float(log[name]) for name in ("loss", "grad_norm")} for log in trainer.state.log_history[:-1]]
    evaluation = {"eval_loss": trainer.evaluate()["eval_loss"]}
    weights = [parameter.detach().numpy().copy() for parameter in trainer.model.parameters()]
    return Outcome([*logs, evaluation, *trainer.metrics], weights, trainer.attentions), trainer


def _fields(model: Any, **more: Any) -> dict[str, Any]:
    """Every field of a call of the fused head, and gradients of the loss and of all fields."""
    batch = _collate(_samples()[:2])
    labels = batch["input_ids"].masked_fill(batch.pop("completion_mask") == 0, IGNORED)
    out = model(**batch, labels=labels, fused_lm_head=True, **more)
    model.zero_grad()
    (out.loss + out.log_probs.square().sum() + out.entropy.sum()).backward()
    grads = [x.grad.clone() for x in model.parameters() if x.grad is not None]
    if dist.is_initialized():  # each has its part, times the ranks
        for x in grads:
            dist.all_reduce(x)
            x /= dist.get_world_size()
    return {name: x.detach().numpy().copy() for name, x in out.items()} | {
        f"gradient {place}": x.numpy().copy() for place, x in enumerate(grads)
    }


def _error(call: Callable[[], Any]) -> str:
    try:
        call()
    except CommError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _misuses(kind: Any, folder: str, name: str) -> dict[str, str]:
    """The error of each misuse, on this rank."""
    case, errors = CASES["reference"], {}
    trainer = _trainer(case, kind, folder, ulysses=name)
    batch = _collate(_samples()[:2])
    mask = batch.pop("completion_mask")
    call = {**batch, "labels": batch["input_ids"], "fused_lm_head": True}
    errors["logits of predict"] = _error(lambda: trainer.predict(_samples()[:2]))
    errors["metrics of logits"] = _error(
        lambda: _trainer(case, kind, folder, ulysses=name, compute_metrics=lambda _: {})
    )
    errors["no fused head"] = _error(lambda: trainer.model(**batch))
    errors["by place"] = _error(lambda: trainer.model(batch["input_ids"], labels=mask, fused_lm_head=True))
    errors["no labels"] = _error(lambda: trainer.model(**batch, fused_lm_head=True))
    errors["unknown entry"] = _error(lambda: trainer.model(**call, token_type_ids=mask))
    trainer.model.has_further_loss = True
    errors["router's loss"] = _error(lambda: trainer.model(**call))
    fully_shard(trainer.model.lm_head)
    pairs = _collate(_samples()[:2])
    errors["head of a unit"] = _error(lambda: trainer.compute_loss(trainer.model, pairs))
    labels = type("Sharded", (UlyssesTrainerMixin, _label_trainer()), {})
    tuned = labels(model=_model(case, 0), args=_arguments(folder), train_dataset=_samples(), ulysses=name)
    add_fused_head(tuned.model)
    rows = {"input_ids": pairs["input_ids"], "labels": pairs["input_ids"]}
    assert tuned.compute_loss(tuned.model, rows).isfinite()
    fully_shard(tuned.model.lm_head)
    errors["head of a unit, labels"] = _error(lambda: tuned.compute_loss(tuned.model, rows))
    trl = sys.modules["trl"]
    sys.modules["trl"] = SimpleNamespace(__version__="1.14.2")  # pyright: ignore[reportArgumentType]
    errors["earlier TRL"] = _error(lambda: _trainer(case, kind, folder, ulysses=name))
    sys.modules["trl"] = trl
    return errors


def _hooks(model: Any) -> int:
    return sum(len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules())


def _undone(model: Any) -> list[int]:
    """Hooks that are left on the model of a run, on a copy of it, and on one that was saved and loaded."""
    del model.forward  # a bound method of the model that it was made for
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    models = [copy.deepcopy(model), torch.load(file, weights_only=False), model]
    for each in models:
        ours.switch(each, "sdpa")
    return [_hooks(each) for each in models]


def run_job_of_preferences(ranks: Sequence[Mapping[str, str]], sequence: int, names: Sequence[str]) -> Report:
    """Each case by rank 0 alone, then over the job in groups of ``sequence`` ranks; every misuse; what is undone."""
    from accelerate.state import AcceleratorState, GradientState

    _library()
    sys.modules["trl"] = SimpleNamespace(__version__="1.15.0")  # pyright: ignore[reportArgumentType]
    is_first, lanes = not int(os.environ["PLACE"]), len(ranks) // sequence
    with tempfile.TemporaryDirectory() as folder:
        alone = {name: _run(CASES[name], _preference_trainer(), folder)[0] for name in names if is_first}
        plain = tiny("llama", 0, 4)
        add_fused_head(plain)
        outputs = [_fields(plain, use_cache=False)]
        AcceleratorState._reset_state(reset_partial_state=True)
        GradientState._reset_state()
        os.environ.update(ranks[int(os.environ["PLACE"])])
        name = ours.register(tritoncomm.initialize(tensor=sequence).get_group("tensor"))
        kind = type("Mixed", (UlyssesTrainerMixin, _preference_trainer()), {})
        runs = {each: _run(CASES[each], kind, folder, lanes, ulysses=name) for each in names}
        errors = _misuses(kind, folder, name) if lanes == 1 else {}
        if lanes == 1:
            trainer = _trainer(CASES["reference"], kind, folder, ulysses=name)
            outputs += [_fields(trainer.model), _fields(trainer.model, num_items_in_batch=7)]
        undone = _undone(runs[names[0]][1].model)
    ours.unregister()
    tritoncomm.destroy()
    return Report(alone, {each: outcome for each, (outcome, _) in runs.items()}, errors, undone, outputs)
