"""What every mapping returns on every rank, from the inputs of all ranks, and which mapping its backward is."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.checks import Group, tried
from tritoncomm import mappings

__all__ = ["ADJOINT", "MAPPINGS", "SUMS_FORWARD", "against_closed_form", "expected", "whole_numbers"]

Mapping = Callable[[Tensor, Any], Tensor]

MAPPINGS: dict[str, Mapping] = {
    "copy": mappings.copy_to_tensor_model_parallel_region,
    "reduce_from": mappings.reduce_from_tensor_model_parallel_region,
    "scatter_tp": mappings.scatter_to_tensor_model_parallel_region,
    "gather_tp": mappings.gather_from_tensor_model_parallel_region,
    "scatter_sp": mappings.scatter_to_sequence_parallel_region,
    "gather_sp": lambda x, g: mappings.gather_from_sequence_parallel_region(x, group=g),
    "gather_sp(False)": lambda x, g: mappings.gather_from_sequence_parallel_region(x, False, g),
    "reduce_scatter_sp": mappings.reduce_scatter_to_sequence_parallel_region,
    "all_gather_last": mappings.all_gather_last_dim_from_tensor_parallel_region,
    "reduce_scatter_last": mappings.reduce_scatter_last_dim_to_tensor_parallel_region,
    "all_to_all": lambda x, g: mappings.all_to_all(g, x),
    "all_to_all on its stream": lambda x, g: mappings.all_to_all(g, x, use_nccl_stream=True),
    "sp2hp": mappings.all_to_all_sp2hp,
    "hp2sp": mappings.all_to_all_hp2sp,
}
SUMS_FORWARD = {"reduce_from", "reduce_scatter_sp", "reduce_scatter_last"}


def expected(name: str, parts: list[Tensor], rank: int) -> Tensor:
    """Closed form of a mapping's forward on ``rank``, from the inputs of all ranks."""
    world, x = len(parts), parts[rank]
    total = torch.stack([part.double() for part in parts]).sum(0).to(x.dtype)
    rows = [part.reshape(-1, part.shape[-1]) for part in parts]
    if name == "copy":
        return x
    if name == "reduce_from":
        return total
    if name in ("scatter_tp", "scatter_sp"):
        return x.chunk(world, -1 if name == "scatter_tp" else 0)[rank]
    if name in ("gather_tp", "all_gather_last"):
        return torch.cat(parts, -1)
    if name.startswith("gather_sp"):
        return torch.cat(parts, 0)
    if name.startswith("reduce_scatter"):
        return total.chunk(world, 0 if name.endswith("sp") else -1)[rank]
    if name.startswith("all_to_all"):
        return torch.cat([part.chunk(world, 0)[rank] for part in parts], 0)
    if name == "sp2hp":
        return torch.cat([part.chunk(world, -1)[rank] for part in rows], 0)
    return torch.cat([part.chunk(world, 0)[rank] for part in rows], -1)


ADJOINT = {
    "copy": "reduce_from",
    "reduce_from": "copy",
    "scatter_tp": "gather_tp",
    "gather_tp": "scatter_tp",
    "scatter_sp": "gather_sp",
    "gather_sp": "reduce_scatter_sp",
    "gather_sp(False)": "scatter_sp",
    "reduce_scatter_sp": "gather_sp",
    "all_gather_last": "reduce_scatter_last",
    "reduce_scatter_last": "all_gather_last",
    "all_to_all": "all_to_all",
    "all_to_all on its stream": "all_to_all",
    "sp2hp": "hp2sp",
    "hp2sp": "sp2hp",
}


def against_closed_form(group: Group, name: str, dtype: torch.dtype, rank: int, pg: Any, device: torch.device) -> None:
    """Forward and backward of one mapping on small whole numbers."""
    world = pg.size()
    parts = [whole_numbers((8, 2, 16), dtype, 7 * w, device) for w in range(world)]
    leaf = parts[rank].clone().requires_grad_()
    label = f"{name} {dtype}, rank {rank} of {world}"
    out = tried(group, label, MAPPINGS[name], leaf, pg)
    if out is None:
        return
    want = expected(name, parts, rank)
    group.expect(torch.equal(out.detach(), want), label)
    gradients = [whole_numbers(tuple(want.shape), dtype, 3 + 5 * w, device) for w in range(world)]
    tried(group, f"{label}, backward", out.backward, gradients[rank].clone())
    back = expected(ADJOINT[name], gradients, rank).view(leaf.shape)
    group.expect(leaf.grad is not None and torch.equal(leaf.grad, back), f"{label}, backward")


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, start: int, device: torch.device) -> Tensor:
    """Whole numbers so small that every dtype of 8 bits of precision holds their sum over 8 ranks exactly."""
    return ((torch.arange(math.prod(shape), device=device) * 5 + start) % 31).to(dtype).view(shape)
