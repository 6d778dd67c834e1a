"""Runs of Trainer whose weights FSDP2 shards over all ranks and whose sequences the ranks of a group share."""

import importlib
import os
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from tiny_models import tiny
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from trainer_classes import shard_on_cpus

import tritoncomm
from tritoncomm.errors import UnsupportedError
from tritoncomm.integrations import fsdp2
from tritoncomm.integrations import transformers as ours
from tritoncomm.integrations.transformers.experts import register_experts
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

__all__ = ["CASES", "Case", "Results", "run_program", "run_sharded_weights"]

LENGTH, SAMPLES, VOCABULARY = 33, 14, 96
SHARDED = {"version": 2, "reshard_after_forward": True, "state_dict_type": "SHARDED_STATE_DICT"}
FP32_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


class Case(NamedTuple):
    """A run.

    Attributes:
        model: kind of model, of ``tiny_models``.
        options: of ``TrainingArguments``, in one process, too.
        fsdp: more of ``fsdp_config``.
        has_adapters: whether the model is frozen but for LoRA adapters.
        in_bf16: FSDP2 computes in bf16 and sums gradients in fp32.
        has_wire: gradients travel in bf16 by ``fsdp2.use``.
        is_packed: two sequences in a row, in place of one in each row.
        has_experts: the ranks share the experts, too, and transformers shards the model when it loads it.
        replicas: of the model, each sharded over as many ranks as are left (HSDP).
    """

    model: str = "llama"
    options: Mapping[str, Any] = {}
    fsdp: Mapping[str, Any] = {}
    has_adapters: bool = False
    in_bf16: bool = False
    has_wire: bool = False
    is_packed: bool = False
    has_experts: bool = False
    replicas: int = 1


ADAMW = {"optim": "adamw_torch", "learning_rate": 0.01}
SAVED = {**ADAMW, "save_strategy": "steps", "save_steps": 2}


def checkpointed(is_reentrant: bool) -> dict[str, Any]:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": is_reentrant}}


CASES = {
    "Llama": Case(),
    "Llama, AdamW, saved": Case(options=SAVED),
    "Llama, packed": Case(is_packed=True),
    "Llama, checkpointing": Case(options=checkpointed(False)),
    "Llama, reentrant checkpointing": Case(options=checkpointed(True)),
    "Llama, checkpointing of FSDP": Case(fsdp={"activation_checkpointing": True}),
    "Llama, adapters": Case(has_adapters=True),
    "Llama, bf16": Case(in_bf16=True),
    "Llama, bf16 wire": Case(in_bf16=True, has_wire=True),
    "Llama, replicas": Case(replicas=2),
    "Qwen3-Next": Case("qwen3_next"),
    "Qwen3-Next, packed": Case("qwen3_next", is_packed=True),
    "Qwen3-MoE": Case("qwen3_moe"),
    "Qwen3-MoE, AdamW, checkpointing": Case("qwen3_moe", {**ADAMW, **checkpointed(False)}),
    "Qwen3-MoE, experts": Case("qwen3_moe", has_experts=True),
    "Qwen3-MoE, experts, adapters": Case("qwen3_moe", has_experts=True, has_adapters=True),
}


class Results(NamedTuple):
    """Numbers of a run.

    Attributes:
        losses: of every step.
        norms: of the gradients before they are clipped.
        evaluation: the loss.
        weights: of the whole model after training, as arrays.
        is_sharded: whether every parameter is a DTensor, adapters besides experts apart; False in one process.
        loads_again: whether ``save_pretrained`` wrote these weights; None if not tried.
    """

    losses: list[float]
    norms: list[float]
    evaluation: float
    weights: dict[str, Any]
    is_sharded: bool
    loads_again: bool | None


def run_sharded_weights(
    ranks: Sequence[Mapping[str, str]],
    sequence: int,
    names: Sequence[str],
    shared: str,
    device: str = "cpu",
    resumes: bool = False,
) -> dict[str, tuple[Results | None, Results]]:
    """Each case in one process, which is rank 0's (None on other ranks), then over all ranks of the job.

    Args:
        sequence: ranks of a sequence group.
        shared: folder of all ranks, in which checkpoints are.
        resumes: go on from the checkpoint of an earlier job, of any number of ranks.
    """
    transformers = _library()
    is_first = not int(os.environ["PLACE"])
    with tempfile.TemporaryDirectory() as alone:
        one = {name: _run(CASES[name], transformers.Trainer, alone, device) for name in names if is_first}
    group = _join(ranks, sequence, device)
    registered = ours.register(group)
    kind: Any = type("Sharded", (UlyssesTrainerMixin, transformers.Trainer), {})
    results = {}
    for name in names:
        folder = str(Path(shared) / "".join(filter(str.isalnum, name)))
        results[name] = one.get(name), _run(CASES[name], kind, folder, device, resumes, ulysses=registered)
    _check_parallelism_is_refused(kind, shared, device, registered)
    ours.unregister()
    tritoncomm.destroy()
    return results


def run_program(ranks: Sequence[Mapping[str, str]], code: str, folder: str, device: str) -> bool:
    """Run a program of a page as one rank, in a folder of all ranks; whether every parameter is a DTensor."""
    _library()
    from accelerate import state

    _reset()
    os.environ.update(ranks[int(os.environ["PLACE"])])
    if device == "cpu":
        shard_on_cpus(state)
        code = code.replace("TrainingArguments(\n", "TrainingArguments(\n    use_cpu=True, output_dir=", 1)
    os.chdir(folder)
    names: dict[str, Any] = {"__name__": "program"}
    exec(compile(code, "trainer.md", "exec"), names)
    return all(isinstance(parameter, DTensor) for parameter in names["trainer"].model.parameters())


def _check_parallelism_is_refused(kind: Any, folder: str, device: str, registered: str) -> None:
    """accelerate's own context parallelism, which its variables turn on without any argument of Trainer."""
    _reset()
    size = str(dist.get_world_size())
    names = {"ACCELERATE_USE_PARALLELISM_CONFIG": "true", "PARALLELISM_CONFIG_CP_SIZE": size}
    refused = pytest.raises(UnsupportedError, match="parallelism_config: cp_size, sp_size or tp_size: not supported")
    with mock.patch.dict(os.environ, names), refused:
        kind(model=_model(Case()), args=_arguments(Case(), folder, device), ulysses=registered)
    _reset()


def _library() -> Any:
    warnings.simplefilter("ignore")
    import transformers  # takes seconds, and only these processes need it

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _join(ranks: Sequence[Mapping[str, str]], sequence: int, device: str) -> dist.ProcessGroup:
    """Make this process a rank, after it ran a Trainer of its own; the sequence group."""
    from accelerate import state
    from pool import SHARING

    _reset()
    state.AcceleratorState._reset_state(reset_partial_state=True)
    os.environ.update(ranks[int(os.environ["PLACE"])])
    if device == "cpu":
        shard_on_cpus(state)
    elif torch.cuda.device_count() < len(ranks):
        os.environ.update(SHARING, NCCL_HOSTID=f"tritoncomm-{os.environ['RANK']}", LOCAL_RANK="0")
    return tritoncomm.initialize(tensor=sequence).get_group("tensor")


def _reset() -> None:
    from accelerate.state import AcceleratorState, GradientState  # as late as transformers

    AcceleratorState._reset_state()
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by an Accelerator with FSDP, for all that follow


def _samples() -> list[dict[str, Any]]:
    """Sequences of tokens; every one has another number of labels."""
    ids = torch.randint(VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    samples = []
    for place, tokens in enumerate(ids):
        labels = tokens.clone()
        labels[slice(None, place) if place % 2 else slice(LENGTH - place, None)] = -100
        labels[0] = -100  # which has no label where sequences are packed
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def _model(case: Case) -> Any:
    return _adapted(case, tiny(case.model, 0, 4).train())


def _adapted(case: Case, model: Any) -> Any:
    """The model with adapters, if the case has them."""
    if not case.has_adapters:
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(1)
    # Of a model with experts, peft's "all-linear" has the experts, too: sharded ones meet plain adapters, which raises.
    modules = ["q_proj", "k_proj", "v_proj", "o_proj"] if case.has_experts else "all-linear"
    return get_peft_model(model, LoraConfig(r=4, target_modules=modules, init_lora_weights=False))


def _with_experts(case: Case, folder: str) -> Any:
    """The model as transformers loads it from files, its weights sharded and its experts shared out."""
    transformers = _library()
    if dist.get_rank() == 0:
        tiny(case.model, 0, 4).save_pretrained(folder)
    dist.barrier()
    world = dist.get_world_size()
    config = transformers.distributed.DistributedConfig(
        fsdp_size=world, ep_size=world, ep_implementation=register_experts()
    )
    return _adapted(case, transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=config))


def _arguments(case: Case, folder: str, device: str) -> Any:
    options: dict[str, Any] = {
        "output_dir": folder, "use_cpu": device == "cpu", "report_to": [], "disable_tqdm": True, "optim": "sgd",
        "learning_rate": 0.05, "max_grad_norm": 0.5, "logging_steps": 1, "max_steps": 4, "save_strategy": "no",
        "gradient_accumulation_steps": 2, "per_device_train_batch_size": 2, "per_device_eval_batch_size": 2,
        "lr_scheduler_type": "constant", "logging_nan_inf_filter": False,
    } | dict(case.options)  # fmt: skip
    if dist.is_initialized() and not case.has_experts:
        layers = sorted({type(module).__name__ for module in _model(case).modules() if _is_layer(module)})
        options |= {"fsdp": True, "fsdp_config": {**SHARDED, "transformer_layer_cls_to_wrap": layers, **case.fsdp}}
    if dist.is_initialized() and case.replicas > 1:
        sizes = {"dp_replicate_size": case.replicas, "dp_shard_size": dist.get_world_size() // case.replicas}
        options["parallelism_config"] = importlib.import_module("accelerate").ParallelismConfig(**sizes)
    return _library().TrainingArguments(**options)


def _is_layer(module: Any) -> bool:
    return type(module).__name__.endswith("DecoderLayer")


def _run(case: Case, kind: Any, folder: str, device: str, resumes: bool = False, **more: Any) -> Results:
    """Four steps of four sequences in two parts, the last step of an epoch of two, and an evaluation."""
    transformers = _library()
    _reset()
    samples, is_sharded, collator = _samples(), dist.is_initialized(), None
    if case.is_packed and is_sharded:
        samples = [{key: x.tolist() for key, x in sample.items()} for sample in samples]
        collator = transformers.DataCollatorWithFlattening(return_flash_attn_kwargs=True, return_seq_idx=True)
    args = _arguments(case, folder, device)
    if is_sharded:
        lanes = dist.get_world_size() // ours.attention.group_of(more["ulysses"]).size()
        args.per_device_train_batch_size = args.per_device_eval_batch_size = 2 // lanes
    model = _with_experts(case, folder) if case.has_experts and is_sharded else _model(case)
    trainer = kind(
        model=model, args=args, train_dataset=samples, eval_dataset=samples[:4], data_collator=collator,
        callbacks=[_wire()] if case.has_wire and is_sharded else [], **more,
    )  # fmt: skip
    trainer.pop_callback(transformers.PrinterCallback)
    if case.in_bf16 and is_sharded:
        trainer.accelerator.state.fsdp_plugin.mixed_precision_policy = FP32_SUMS
    trainer.train(resume_from_checkpoint=f"{folder}/checkpoint-2" if resumes and is_sharded else None)
    parameters = list(trainer.model.parameters())  # an evaluation leaves those of the root whole
    if case.has_experts:  # adapters are added after transformers has sharded the model, and DDP has them
        parameters = [x for x in parameters if not (case.has_adapters and x.requires_grad)]
    are_dtensors = all(isinstance(parameter, DTensor) for parameter in parameters)
    evaluation = trainer.evaluate()["eval_loss"]
    options = StateDictOptions(full_state_dict=True)
    whole = get_model_state_dict(trainer.model, options=options) if is_sharded else trainer.model.state_dict()
    weights = {name: x.detach().float().cpu() for name, x in whole.items() if isinstance(x, Tensor)}
    logs = [log for log in trainer.state.log_history if "loss" in log]
    return Results(
        [float(log["loss"]) for log in logs],
        [float(log["grad_norm"]) for log in logs],
        float(evaluation),
        {name: x.numpy().copy() for name, x in weights.items()},
        are_dtensors,
        # A model that transformers itself has sharded is saved by all ranks.
        None if case.has_experts or not is_sharded or dist.get_rank() else _loads_again(trainer, weights, folder),
    )


def _loads_again(trainer: Any, weights: Mapping[str, Tensor], folder: str) -> bool:
    """Whether ``save_pretrained`` of the whole weights writes what loads as these weights."""
    trainer.model.save_pretrained(f"{folder}/whole", state_dict=weights)
    if hasattr(trainer.model, "peft_config"):
        saved = load_file(f"{folder}/whole/adapter_model.safetensors")
        return all(torch.equal(x, weights[name.replace(".weight", ".default.weight")]) for name, x in saved.items())
    again = _library().AutoModelForCausalLM.from_pretrained(f"{folder}/whole").state_dict()
    return all(torch.equal(again[name].float(), x) for name, x in weights.items())


def _wire() -> Any:
    """A callback that sends gradients in bf16 once FSDP2 has the model."""

    def begin(self: Any, args: Any, state: Any, control: Any, model: Any = None, **unused: Any) -> None:
        assert fsdp2.use(model).modules

    return type("Wire", (_library().TrainerCallback,), {"on_train_begin": begin})()
