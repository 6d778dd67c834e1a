"""What ranks run to compare Megatron's GPT on several ranks with the same in one process, by `tritoncomm.verify`."""

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron_cpu import LENGTH, VOCABULARY, core, gpt_chunks, groups, join, on_cpu, transformer_config
from torch import Tensor, nn

from tritoncomm import verify
from tritoncomm.integrations import megatron

__all__ = ["WAYS", "verified"]

MICRO, BATCH = 2, 2
_EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 48, "add_bias_linear": False}
_TENSOR, _PIPELINE, _INTERLEAVED = (
    {"tensor_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2},
    {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
)
_OVER_TENSOR = _TENSOR | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}


@dataclass(frozen=True)
class Way:
    """One way to train.

    Attributes:
        sizes: arguments of ``initialize_model_parallel``; ``settings``: fields of the config.
        ranks: of the job.
        chunks: model chunks per rank.
        skip: modules whose rows have another order on the ranks, rightly.
    """

    sizes: dict[str, int]
    settings: dict[str, Any] = field(default_factory=dict)
    ranks: int = 2
    chunks: int = 1
    skip: tuple[str, ...] = ()


_SEQUENCE = {"sequence_parallel": True}
WAYS = {
    "tensor": Way(_TENSOR),
    "sequence": Way(_TENSOR, _SEQUENCE),
    "pipeline": Way(_PIPELINE),
    "interleaved": Way(_INTERLEAVED, chunks=2),
    "tensor and pipeline": Way(_TENSOR | _PIPELINE, _SEQUENCE, ranks=4),
    "experts, all-gather": Way(_OVER_TENSOR, _SEQUENCE | _EXPERTS | {"moe_token_dispatcher_type": "allgather"}),
    "experts, all-to-all": Way(_OVER_TENSOR, _SEQUENCE | _EXPERTS | {"moe_token_dispatcher_type": "alltoall"}),
    # Experts get the tokens of one rank behind those of another, in one process those of one position together.
    "experts over data": Way(
        {"expert_model_parallel_size": 2},
        _EXPERTS | {"moe_token_dispatcher_type": "alltoall"},
        skip=("*.experts.*", "*.experts"),
    ),
}


class _Names:
    """From names of this rank's chunks to those of the whole model: layers and experts are numbered over all ranks."""

    def __init__(self, chunks: list[nn.Module], experts: int) -> None:
        self.layers = [[layer.layer_number - 1 for layer in chunk.decoder.layers] for chunk in chunks]  # type: ignore
        self.has_parts = sum(map(len, self.layers)) < 4
        self.experts = experts

    def __call__(self, name: str) -> str | None:
        chunk = 0
        if len(self.layers) > 1:
            number, _, name = name.partition(".")
            chunk = int(number)
        parts = name.split(".")
        if parts[:2] == ["decoder", "layers"] and len(parts) > 3:
            parts[2] = str(self.layers[chunk][int(parts[2])])
            if "local_experts" in parts[:-2]:
                at = parts.index("local_experts") + 1
                parts[at] = str(int(parts[at]) + self.experts)
        elif self.has_parts and name in ("", "decoder.", "decoder.layers."):
            return None  # a part of the whole module
        return ".".join(parts)


def _case(way: Way, state: Any, whole: dict[str, Tensor] | None) -> verify.Case:
    """One step of a GPT by Megatron's schedule; gradients are added up as its data-parallel wrapper does."""
    torch.manual_seed(7)
    sizes = {name: size for name, size in way.sizes.items() if not name.startswith("virtual")}
    if way.chunks > 1:
        sizes["virtual_pipeline_model_parallel_size"] = way.chunks
    config = transformer_config(sizes, **way.settings)
    config.pipeline_dtype = torch.float64
    chunks = [chunk.double() for chunk in gpt_chunks(config, state, way.chunks)]
    experts = (
        state.get_expert_model_parallel_rank() * (config.num_moe_experts or 0) // config.expert_model_parallel_size
    )
    case = verify.Case(chunks if len(chunks) > 1 else chunks[0], lambda: None, rename=_Names(chunks, experts))
    tensor, data = state.get_tensor_model_parallel_group(), state.get_data_parallel_group()
    if whole is not None:
        with torch.no_grad():
            for name, p in case.parameters.items():
                full = whole[str(case.whole_name(name))]
                dims = [dim for dim in range(full.dim()) if full.shape[dim] != p.shape[dim]]
                p.copy_(full.chunk(tensor.size(), dims[0])[tensor.rank()] if dims else full)
    generator = torch.Generator().manual_seed(3)
    batches = torch.randint(VOCABULARY, (MICRO, BATCH, LENGTH), generator=generator).chunk(data.size(), 1)[data.rank()]
    positions = torch.arange(LENGTH).expand(batches.shape[1:])
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def forward_step(given: Iterator[Tensor], model: nn.Module, *_: Any) -> Any:
        ids = next(given)
        return model(ids, positions, mask, labels=ids.roll(-1, 1)), lambda out: (out.mean(), out.detach().mean())

    def step() -> Tensor | None:
        losses = core("pipeline_parallel.schedules").get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in chunks] if len(chunks) > 1 else iter(batches),
            model=chunks if len(chunks) > 1 else chunks[0],
            num_microbatches=MICRO,
            seq_length=LENGTH,
            micro_batch_size=batches.shape[1],
            forward_only=False,
        )
        for p in case.parameters.values():
            assert p.grad is not None
            if getattr(p, "sequence_parallel", False) and tensor.size() > 1:
                dist.all_reduce(p.grad, group=tensor)
            p.grad /= data.size()
            if getattr(p, "allreduce", True) and data.size() > 1:
                dist.all_reduce(p.grad, group=data)
        return torch.stack(losses).mean() if losses else None

    return verify.Case(case.model, step, rename=case.rename)


def verified(store: str, names: list[str], ours: bool) -> dict[str, str]:
    """By the way of training what is different; an empty text where nothing is."""
    rank, found = int(os.environ["RANK"]), {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with join(rank, WAYS[names[0]].ranks, store), on_cpu():
            for name in names:
                way = WAYS[name]
                alone_settings = {key: x for key, x in way.settings.items() if key != "sequence_parallel"}
                with groups(tensor_model_parallel_size=1) as state:
                    # One process: the data ranks are alone, too.
                    alone = _alone(Way({}, alone_settings), state)
                    assert isinstance(alone.model, nn.Module)
                    verify.draw(alone.model)
                    parameters = {name: p.detach().clone() for name, p in alone.model.named_parameters()}
                    whole = verify.record(alone, skip=way.skip)
                with groups(**way.sizes) as state, megatron.patched() if ours else contextlib.nullcontext():
                    mine = verify.record(_case(way, state, parameters), skip=way.skip)
                    report = verify.compare(whole, mine, dist.group.WORLD)
                found[name] = "" if report.equal and report.counts["compared"] > 100 else str(report)
    finally:
        torch.set_default_dtype(before)
    return found


class _Single:
    """A group of this rank alone."""

    def size(self) -> int:
        return 1

    def rank(self) -> int:
        return 0


def _alone(way: Way, state: Any) -> verify.Case:
    """The case of one process, on every rank: its data-parallel group counts as one rank."""

    class Alone:
        def __getattr__(self, name: str) -> Any:
            return getattr(state, name)

        def get_data_parallel_group(self) -> Any:
            return _Single()

    return _case(way, Alone(), None)
