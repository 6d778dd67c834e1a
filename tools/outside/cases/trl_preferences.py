"""TRL's DPOTrainer and KTOTrainer on small random models: as they are, or behind the mixin.

``trl_preferences.py FILE SEQUENCE CASE ...`` writes what each case logged, and the weights after three steps, to FILE.
Under a launcher, SEQUENCE ranks share each sequence; with 0 TRL trains as it is, with samples of its own on each rank.
"""

import importlib
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from datasets import Dataset, load_from_disk
from peft import LoraConfig
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.tensor import DTensor
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
    PrinterCallback,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer

import tritoncomm
from tritoncomm.integrations.transformers import register, unregister
from tritoncomm.integrations.transformers.trainer import UlyssesTrainerMixin

sys.path.append(str(Path(__file__).parents[3] / "tests" / "helpers"))
WORDS, PAD, END, SAMPLES = 62, 62, 63, 12


class Case(NamedTuple):
    """A run.

    Attributes:
        model: ``llama``, ``qwen3_next`` or ``qwen3_moe``.
        options: of the config.
        is_kto: KTOTrainer, in place of DPOTrainer.
        has_adapters: LoRA on the projections; without a reference model unless that is given.
        reference: ``given``, a model of the user; ``loaded``, which TRL loads from the files of the model; or ``none``.
        is_evaluated: an evaluation after the steps.
        is_sharded: by FSDP2, over all ranks.
        rounds: compute in bf16.
    """

    model: str = "llama"
    options: Mapping[str, Any] = {}
    is_kto: bool = False
    has_adapters: bool = False
    reference: str = "given"
    is_evaluated: bool = False
    is_sharded: bool = False
    rounds: bool = False


CHECKPOINTED = {"gradient_checkpointing": True}
PRECOMPUTED = {"precompute_ref_log_probs": True}
CASES = {
    "DPO": Case(),
    "DPO, Qwen3-Next": Case("qwen3_next"),
    "DPO, Qwen3-MoE, FSDP2": Case("qwen3_moe", is_sharded=True),
    "DPO, FSDP2": Case(is_sharded=True, reference="loaded"),
    "IPO": Case(options={"loss_type": ["ipo"]}),
    "IPO, Qwen3-MoE": Case("qwen3_moe", {"loss_type": ["ipo"]}),
    "IPO, Qwen3-Next, FSDP2": Case("qwen3_next", {"loss_type": ["ipo"]}, is_sharded=True),
    "evaluate": Case(is_evaluated=True, options={"gradient_accumulation_steps": 2}),
    "evaluate, Qwen3-MoE": Case("qwen3_moe", is_evaluated=True, reference="loaded"),
    "evaluate, FSDP2": Case(is_evaluated=True, is_sharded=True),
    "LoRA": Case(has_adapters=True, reference="none"),
    "LoRA, Qwen3-Next": Case("qwen3_next", has_adapters=True, reference="none"),
    "LoRA, FSDP2": Case(has_adapters=True, reference="none", is_sharded=True),
    "LoRA and a model": Case(has_adapters=True),
    "LoRA and a model, Qwen3-MoE": Case("qwen3_moe", has_adapters=True),
    "LoRA and a model, Qwen3-Next, FSDP2": Case("qwen3_next", has_adapters=True, is_sharded=True),
    "precomputed": Case(options=PRECOMPUTED, reference="none"),
    "precomputed, Qwen3-Next": Case("qwen3_next", PRECOMPUTED),
    "precomputed, FSDP2": Case(options=PRECOMPUTED, reference="loaded", is_sharded=True),
    "KTO": Case(is_kto=True, is_evaluated=True),
    "KTO, Qwen3-Next": Case("qwen3_next", is_kto=True),
    "KTO, Qwen3-MoE, FSDP2": Case("qwen3_moe", is_kto=True, is_sharded=True),
    "KTO, LoRA": Case(is_kto=True, has_adapters=True, reference="none"),
    "KTO, precomputed, FSDP2": Case(is_kto=True, options=PRECOMPUTED, is_sharded=True),
    "DPO, bf16, checkpointing": Case(options=CHECKPOINTED, rounds=True),
    "DPO, bf16, checkpointing, FSDP2": Case(options=CHECKPOINTED, rounds=True, is_sharded=True),
}


def model_of(name: str, seed: int) -> Any:
    """A small model with random weights."""
    sizes: dict[str, Any] = {
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": WORDS + 2, "pad_token_id": PAD, "eos_token_id": END,
        "bos_token_id": None, "head_dim": 8,
    }  # fmt: skip
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    torch.manual_seed(seed)
    if name == "llama":
        return LlamaForCausalLM(LlamaConfig(**sizes))
    if name == "qwen3_moe":
        return Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    config = Qwen3NextConfig(
        **sizes, **experts, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8,
        linear_value_head_dim=8, shared_expert_intermediate_size=16, layer_types=["linear_attention", "full_attention"],
    )  # fmt: skip
    return Qwen3NextForCausalLM(config)


def tokenizer() -> Any:
    """A tokenizer of words."""
    vocabulary = {f"w{i}": i for i in range(WORDS)} | {"<pad>": PAD, "</s>": END}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="</s>")


def samples(is_kto: bool) -> Any:
    """Prompts of 2 to 8 words with completions of 1 to 9: a pair, or one that is good or bad."""
    draw = torch.Generator().manual_seed(1)

    def text(low: int, high: int) -> str:
        count = int(torch.randint(low, high, (1,), generator=draw))
        return "".join(f" w{i}" for i in torch.randint(WORDS, (count,), generator=draw).tolist())

    rows = [{"prompt": text(2, 9), "chosen": text(1, 10), "rejected": text(1, 10)} for _ in range(SAMPLES)]
    if not is_kto:
        return Dataset.from_list(rows)
    return Dataset.from_list(
        [
            {"prompt": row["prompt"], "completion": row["chosen"], "label": place % 3 > 0}
            for place, row in enumerate(rows)
        ]
    )


def arguments(case: Case, folder: str, lanes: int) -> Any:
    """The config: three steps of four samples of all lanes."""
    batch = 4 // lanes
    options: dict[str, Any] = {
        "max_steps": 3, "per_device_train_batch_size": batch, "per_device_eval_batch_size": batch, "optim": "sgd",
        "learning_rate": 0.3, "lr_scheduler_type": "constant", "logging_steps": 1, "report_to": [], "seed": 3,
        "disable_tqdm": True, "save_strategy": "no", "use_cpu": True, "bf16": case.rounds,
        "gradient_checkpointing": False, "router_aux_loss_coef": 0.0,
    } | dict(case.options)  # fmt: skip
    if case.is_sharded and dist.is_initialized():
        layer = {"llama": "Llama", "qwen3_moe": "Qwen3Moe", "qwen3_next": "Qwen3Next"}[case.model] + "DecoderLayer"
        options |= {
            "fsdp": True,
            "fsdp_config": {"version": 2, "reshard_after_forward": True, "transformer_layer_cls_to_wrap": [layer]},
        }
    return (KTOConfig if case.is_kto else DPOConfig)(folder, **options)


def trained(case: Case, group: Any, shared: Path, lanes: int) -> dict[str, Any]:
    """Three steps, and an evaluation if the case has one: what was logged, and the weights."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state()
    GradientState._reset_state()
    os.environ.pop("ACCELERATE_USE_FSDP", None)  # set by an Accelerator with FSDP, for all that follow
    data = load_from_disk(str(shared / ("kto" if case.is_kto else "pairs")))  # ranks share what TRL precomputes
    model = model_of(case.model, 0)
    model.config._name_or_path = str(shared / case.model)  # from which TRL loads a reference
    own: dict[str, Any] = {"model": model, "train_dataset": data, "eval_dataset": data.select(range(6))}
    if case.reference == "given":
        own["ref_model"] = model_of(case.model, 5)
    if case.has_adapters:
        own["peft_config"] = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    kind: Any = KTOTrainer if case.is_kto else DPOTrainer
    if group is not None:
        unregister()
        kind, own["ulysses"] = type(f"Sequence{kind.__name__}", (UlyssesTrainerMixin, kind), {}), register(group)
    with tempfile.TemporaryDirectory() as folder:
        args = arguments(case, folder, lanes)
        trainer = kind(args=args, processing_class=tokenizer(), **own)
        trainer.pop_callback(PrinterCallback)
        trainer.train()
        parameters = list(trainer.model.parameters())
        assert any(isinstance(x, DTensor) for x in parameters) is (case.is_sharded and dist.is_initialized())
        evaluation = trainer.evaluate() if case.is_evaluated else {}
    options = StateDictOptions(full_state_dict=True)
    weights = get_model_state_dict(trainer.model, options=options) if case.is_sharded else trainer.model.state_dict()
    logs = [log for log in trainer.state.log_history if "loss" in log] + [evaluation]
    times = ("runtime", "per_second", "epoch", "learning_rate")
    return {
        "logs": [{k: float(x) for k, x in log.items() if not any(each in k for each in times)} for log in logs],
        "weights": {name: x.detach().float().clone() for name, x in weights.items() if isinstance(x, torch.Tensor)},
    }


def main() -> None:
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    file, sequence, *names = sys.argv[1:]
    shared = Path(file).parent / f"shared-{Path(file).stem}"
    world, is_first = int(os.environ.get("WORLD_SIZE", 1)), os.environ.get("RANK", "0") == "0"
    if is_first:
        for is_kto in (False, True):
            samples(is_kto).save_to_disk(str(shared / ("kto" if is_kto else "pairs")))
        for model in {CASES[name].model for name in names}:
            model_of(model, 0).save_pretrained(shared / model)
    group = None
    if world > 1:
        importlib.import_module("trainer_classes").shard_on_cpus(importlib.import_module("accelerate.state"))
        size = int(sequence)
        mesh = tritoncomm.initialize(context=max(size, 1))
        group = mesh.get_group("context") if size else None
        dist.barrier()
    lanes = world // max(int(sequence), 1)
    results = {name: trained(CASES[name], group, shared, lanes) for name in names}
    if is_first:
        torch.save(results, file)
    if world > 1:
        tritoncomm.destroy()


if __name__ == "__main__":
    main()
