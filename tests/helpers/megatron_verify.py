"""What ranks run to compare Megatron's GPT over two ranks with the same in one process, by `tritoncomm.verify`."""

import contextlib
import os
from typing import Any

import torch
import torch.distributed as dist
from megatron_cpu import LENGTH, VOCABULARY, gpt_chunks, groups, join, on_cpu, transformer_config
from torch import Tensor, nn

from tritoncomm import verify
from tritoncomm.integrations import megatron

__all__ = ["verified"]


def _case(tensor: int, state: Any, whole: dict[str, Tensor] | None, settings: dict[str, Any]) -> verify.Case:
    """One step of a GPT on one batch, its gradients of sequence-parallel parameters added up as Megatron does."""
    torch.manual_seed(7)
    sizes = {"tensor_model_parallel_size": tensor}
    (model,) = gpt_chunks(transformer_config(sizes, **settings), state)
    model = model.double()
    rank, group = state.get_tensor_model_parallel_rank(), state.get_tensor_model_parallel_group()
    if whole is not None:
        with torch.no_grad():
            for name, p in model.named_parameters():
                full = whole[name]
                dims = [dim for dim in range(full.dim()) if full.shape[dim] != p.shape[dim]]
                p.copy_(full.chunk(tensor, dims[0])[rank] if dims else full)
    ids = torch.randint(VOCABULARY, (2, LENGTH), generator=torch.Generator().manual_seed(3))
    positions = torch.arange(LENGTH).expand(2, LENGTH)
    mask = torch.triu(torch.ones(1, 1, LENGTH, LENGTH, dtype=torch.bool), 1)

    def step() -> Tensor:
        loss = model(ids, positions, mask, labels=ids.roll(-1, 1)).mean()
        loss.backward()
        for p in model.parameters():
            if getattr(p, "sequence_parallel", False) and tensor > 1:
                dist.all_reduce(p.grad, group=group)
        return loss

    return verify.Case(model, step)


def verified(store: str) -> dict[str, str]:
    """By the way of training what is different; an empty text where nothing is."""
    rank, found = int(os.environ["RANK"]), {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with join(rank, 2, store), on_cpu():
            for label, settings, ours in (
                ("tensor", {}, False),
                ("tensor, ours", {}, True),
                ("sequence", {"sequence_parallel": True}, False),
                ("sequence, ours", {"sequence_parallel": True}, True),
            ):
                with groups(tensor_model_parallel_size=1) as state:
                    alone = _case(1, state, None, {})
                    assert isinstance(alone.model, nn.Module)
                    verify.draw(alone.model)
                    parameters = {name: p.detach().clone() for name, p in alone.model.named_parameters()}
                    whole = verify.record(alone)
                with (
                    groups(tensor_model_parallel_size=2) as state,
                    megatron.patched() if ours else contextlib.nullcontext(),
                ):
                    mine = verify.record(_case(2, state, parameters, settings))
                    report = verify.compare(whole, mine, state.get_tensor_model_parallel_group())
                found[label] = "" if report.equal and report.counts["compared"] > 100 else str(report)
    finally:
        torch.set_default_dtype(before)
    return found
