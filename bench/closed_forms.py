"""What every mapping returns on every rank, from the inputs of all ranks, and which mapping its backward is."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.checks import Group, tried
from tritoncomm import mappings

__all__ = [
    "ADJOINT",
    "MAPPINGS",
    "SUMS_FORWARD",
    "against_closed_form",
    "by_sizes",
    "by_sizes_against_closed_form",
    "expected",
    "whole_numbers",
]

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


@dataclass(frozen=True)
class BySizes:
    """A mapping with split sizes: a rank's call and input shape, and its results both ways from all ranks' tensors."""

    call: Callable[[Tensor, Any, int], Tensor]
    shape: Callable[[int], tuple[int, ...]]
    forward: Callable[[list[Tensor], int], Tensor]
    backward: Callable[[list[Tensor], int], Tensor]


def by_sizes(world: int) -> dict[str, BySizes]:
    """Every mapping that takes split sizes, with sizes that differ and some that are zero."""
    rows = [(2 + 3 * rank) % 7 for rank in range(world)]  # 2, 5, 1, 4, 0, 3, 6, 2
    heads = [(3 * rank) % 5 for rank in range(world)]  # 0, 3, 1, 4, 2
    sent = [[(source + 2 * to) % 3 for to in range(world)] for source in range(world)]
    received = [[sent[source][to] for source in range(world)] for to in range(world)]

    def added(parts: list[Tensor]) -> Tensor:
        return torch.stack([part.double() for part in parts]).sum(0).to(parts[0].dtype)

    def exchanged(parts: list[Tensor], rank: int, sizes: list[list[int]]) -> Tensor:
        return torch.cat([part.split(sizes[source])[rank] for source, part in enumerate(parts)])

    def along(dim: int, sizes: list[int], rank: int, joined: bool) -> tuple[int, ...]:
        return (sum(sizes) if joined else sizes[rank], 8) if dim == 0 else (3, sum(sizes) if joined else sizes[rank], 8)

    return {
        "gather_sp by sizes": BySizes(
            lambda x, g, _: mappings.gather_from_sequence_parallel_region(x, group=g, output_split_sizes=rows),
            lambda rank: along(0, rows, rank, False),
            lambda parts, _: torch.cat(parts, 0),
            lambda grads, rank: added(grads).split(rows, 0)[rank],
        ),
        "reduce_scatter_sp by sizes": BySizes(
            lambda x, g, _: mappings.reduce_scatter_to_sequence_parallel_region(x, g, rows),
            lambda rank: along(0, rows, rank, True),
            lambda parts, rank: added(parts).split(rows, 0)[rank],
            lambda grads, _: torch.cat(grads, 0),
        ),
        "all_gather_dim by sizes": BySizes(
            lambda x, g, _: mappings.all_gather_dim(x, 1, g, sizes=rows),
            lambda rank: along(1, rows, rank, False),
            lambda parts, _: torch.cat(parts, 1),
            lambda grads, rank: added(grads).split(rows, 1)[rank],
        ),
        "reduce_scatter_dim by sizes": BySizes(
            lambda x, g, _: mappings.reduce_scatter_dim(x, 1, g, sizes=rows),
            lambda rank: along(1, rows, rank, True),
            lambda parts, rank: added(parts).split(rows, 1)[rank],
            lambda grads, _: torch.cat(grads, 1),
        ),
        "split_dim by sizes": BySizes(
            lambda x, g, _: mappings.split_dim(x, 1, g, sizes=rows),
            lambda rank: along(1, rows, rank, True),
            lambda parts, rank: parts[rank].split(rows, 1)[rank],
            lambda grads, _: torch.cat(grads, 1),
        ),
        "all_to_all by sizes": BySizes(
            lambda x, g, rank: mappings.all_to_all(g, x, received[rank], sent[rank]),
            lambda rank: (sum(sent[rank]), 8),
            lambda parts, rank: exchanged(parts, rank, sent),
            lambda grads, rank: exchanged(grads, rank, received),
        ),
        "all_to_all_dims by sizes": BySizes(
            lambda x, g, _: mappings.all_to_all_dims(x, 1, 0, g, scatter_sizes=heads, gather_sizes=rows),
            lambda rank: (rows[rank], sum(heads), 8),
            lambda parts, rank: torch.cat([part.split(heads, 1)[rank] for part in parts], 0),
            lambda grads, rank: torch.cat([grad.split(rows, 0)[rank] for grad in grads], 1),
        ),
    }


def by_sizes_against_closed_form(
    group: Group, name: str, dtype: torch.dtype, rank: int, pg: Any, device: torch.device
) -> None:
    """Forward and backward of one mapping with split sizes, on small whole numbers."""
    world, case = pg.size(), by_sizes(pg.size())[name]
    parts = [whole_numbers(case.shape(w), dtype, 7 * w, device) for w in range(world)]
    leaf, label = parts[rank].clone().requires_grad_(), f"{name} {dtype}, rank {rank} of {world}"
    out = tried(group, label, case.call, leaf, pg, rank)
    if out is None:
        return
    group.expect(torch.equal(out.detach(), case.forward(parts, rank)), label)
    shapes = [case.forward(parts, w).shape for w in range(world)]
    gradients = [whole_numbers(tuple(shape), dtype, 3 + 5 * w, device) for w, shape in enumerate(shapes)]
    tried(group, f"{label}, backward", out.backward, gradients[rank].clone())
    back = case.backward(gradients, rank)
    group.expect(leaf.grad is not None and torch.equal(leaf.grad, back), f"{label}, backward")


def whole_numbers(shape: tuple[int, ...], dtype: torch.dtype, start: int, device: torch.device) -> Tensor:
    """Whole numbers so small that every dtype of 8 bits of precision holds their sum over 8 ranks exactly."""
    return ((torch.arange(math.prod(shape), device=device) * 5 + start) % 31).to(dtype).view(shape)
