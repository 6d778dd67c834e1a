"""Models of transformers under its tensor parallelism: what `verify` says, and what gradients alone say."""

import tempfile
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm import verify

__all__ = ["FAMILIES", "Outcome", "run_family"]

FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {"head_dim": 8},
    "gemma2": {"head_dim": 8},
    "phi3": {"bos_token_id": 1, "eos_token_id": 2},
    "olmo2": {"bos_token_id": 1, "eos_token_id": 2},
    "cohere": {"bos_token_id": 1, "eos_token_id": 2},
    "glm4": {"head_dim": 8, "eos_token_id": 2},
    "granite": {},
}
_SIZES: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "use_cache": False, "pad_token_id": 0,
}  # fmt: skip


class Outcome(NamedTuple):
    """What two ways to look at one step say of it.

    Attributes:
        report: of ``verify``.
        wrong: parameters whose gradients differ from one process, by ``full_tensor`` alone.
    """

    report: verify.Report
    wrong: list[str]


def model_of(kind: str, state: dict[str, Tensor] | None) -> Any:
    """A small model of a family; with a state dict, loaded by transformers over the ranks of the job."""
    import transformers
    from safetensors.torch import save_file

    config = transformers.AutoConfig.for_model(kind, **_SIZES, **FAMILIES[kind])
    model = transformers.AutoModelForCausalLM.from_config(config)
    if state is None:
        return model
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        untied = {name: x for name, x in state.items() if name in dict(model.named_parameters())}
        save_file(untied, f"{folder}/model.safetensors", {"format": "pt"})
        return type(model).from_pretrained(folder, tp_plan="auto", dtype=torch.get_default_dtype())


def step_of(model: nn.Module, micro_batches: int) -> Callable[[], Tensor]:
    """Forward and backward of a batch, in micro-batches."""
    ids = torch.randint(3, 64, (4, 12), generator=torch.Generator().manual_seed(1))

    def step() -> Tensor:
        losses = []
        for part in ids.chunk(micro_batches):
            losses.append(model(input_ids=part, labels=part).loss / micro_batches)
            losses[-1].backward()
        return torch.stack(losses).sum().detach()

    return step


def run_family(group: ProcessGroup, kind: str, micro_batches: int) -> Outcome:
    """Run a step in this process and over the ranks of the job, by ``verify`` and without it, in float64."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    warnings.simplefilter("ignore")
    try:
        torch.manual_seed(0)
        alone = model_of(kind, None)
        verify.draw(alone)
        state = {name: x.detach().clone() for name, x in alone.state_dict().items()}
        whole = verify.record(verify.Case(alone, step_of(alone, micro_batches)))
        ranks = model_of(kind, state)
        report = verify.compare(whole, verify.record(verify.Case(ranks, step_of(ranks, micro_batches))), group)
        # The same step without any hook of ours.
        plain, reference = model_of(kind, state), dict(alone.named_parameters())
        step_of(plain, micro_batches)()
        wrong = []
        for name, parameter in plain.named_parameters():
            gradient: Any = parameter.grad
            gradient = gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
            expected = reference[name].grad
            assert expected is not None
            if gradient.shape != expected.shape:  # a shard that is no DTensor
                parts = [torch.empty_like(gradient) for _ in range(group.size())]
                dist.all_gather(parts, gradient.contiguous(), group)
                (dim,) = (d for d in range(expected.dim()) if gradient.shape[d] != expected.shape[d])
                gradient = torch.cat(parts, dim)
            if not torch.allclose(gradient, expected, rtol=1e-6, atol=1e-9 * float(expected.abs().max())):
                wrong.append(name)
        return Outcome(report, wrong)
    finally:
        torch.set_default_dtype(before)
