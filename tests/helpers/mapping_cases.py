"""Every mapping with its closed form; every rank knows what all ranks hold."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings as m

__all__ = [
    "FORMS",
    "LAYOUTS",
    "MAPPINGS",
    "cut",
    "fits",
    "held",
    "hp2sp",
    "laid_out",
    "rows_exchanged",
    "same",
    "sp2hp",
    "summed",
    "value",
]

LAYOUTS = ["contiguous", "transposed", "sliced", "permuted"]


def value(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Small integers (every sum over 8 ranks is exact in every dtype)."""
    made = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=made).bool()
    return torch.randint(-8, 9, shape, generator=made).float().to(getattr(torch, dtype))


def laid_out(x: Tensor, layout: str) -> Tensor:
    """The same values, other strides."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and x.dim():
        wide = x.new_zeros((*x.shape[:-1], 3 * x.shape[-1]))
        wide[..., x.shape[-1] : 2 * x.shape[-1]] = x
        return wide[..., x.shape[-1] : 2 * x.shape[-1]]
    if layout == "permuted" and x.dim() > 2:
        order = (1, 2, 0, *range(3, x.dim()))
        return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
    return x.clone()


def same(found: Tensor, wanted: Tensor, what: object) -> None:
    assert found.dtype is wanted.dtype, what
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    if found.numel() == 0:
        return
    a, b = found.contiguous(), wanted.contiguous()
    if found.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    assert torch.equal(a.view(torch.uint8) if a.element_size() == 1 else a, b.view(torch.uint8) if
                       b.element_size() == 1 else b), (what, found, wanted)  # fmt: skip


def held(group: ProcessGroup, shape: tuple[int, ...], dtype: str, replicated: bool, seed: int) -> list[Tensor]:
    """What each rank of the group holds."""
    return [value(shape, dtype, seed + (0 if replicated else 1 + rank)) for rank in range(group.size())]


def summed(parts: list[Tensor]) -> Tensor:
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total


# Forward: what rank r ends up with, from what all ranks hold; the backward is another line's forward.
def cut(x: Tensor, world: int, rank: int, dim: int) -> Tensor:
    return x.tensor_split(world, dim)[rank]


def sp2hp(parts: list[Tensor], rank: int) -> Tensor:
    rows = torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])
    return cut(rows, len(parts), rank, 1)


def hp2sp(parts: list[Tensor], rank: int) -> Tensor:
    return cut(torch.cat([part.reshape(-1, part.shape[-1]) for part in parts], 1), len(parts), rank, 0)


def rows_exchanged(parts: list[Tensor], rank: int) -> Tensor:
    return torch.cat([cut(part, len(parts), rank, 0) for part in parts])


FORMS: dict[str, Any] = {
    "identity": lambda parts, r: parts[r],
    "sum": lambda parts, r: summed(parts),
    "split last": lambda parts, r: cut(parts[r], len(parts), r, -1),
    "split first": lambda parts, r: cut(parts[r], len(parts), r, 0),
    "join last": lambda parts, r: torch.cat(parts, -1),
    "join first": lambda parts, r: torch.cat(parts, 0),
    "sum, split last": lambda parts, r: cut(summed(parts), len(parts), r, -1),
    "sum, split first": lambda parts, r: cut(summed(parts), len(parts), r, 0),
    "rows": rows_exchanged,
    "sp2hp": sp2hp,
    "hp2sp": hp2sp,
}


# name: (call, forward, backward)
MAPPINGS: dict[str, tuple[Any, str, str]] = {
    "copy": (m.copy_to_tensor_model_parallel_region, "identity", "sum"),
    "reduce_from": (m.reduce_from_tensor_model_parallel_region, "sum", "identity"),
    "scatter_tp": (m.scatter_to_tensor_model_parallel_region, "split last", "join last"),
    "gather_tp": (m.gather_from_tensor_model_parallel_region, "join last", "split last"),
    "scatter_sp": (m.scatter_to_sequence_parallel_region, "split first", "join first"),
    "gather_sp": (
        lambda x, group: m.gather_from_sequence_parallel_region(x, group=group),
        "join first", "sum, split first",
    ),
    "gather_sp-replicated-grad": (
        lambda x, group: m.gather_from_sequence_parallel_region(x, tensor_parallel_output_grad=False, group=group),
        "join first", "split first",
    ),
    "reduce_scatter_sp": (m.reduce_scatter_to_sequence_parallel_region, "sum, split first", "join first"),
    "ag_last": (m.all_gather_last_dim_from_tensor_parallel_region, "join last", "sum, split last"),
    "rs_last": (m.reduce_scatter_last_dim_to_tensor_parallel_region, "sum, split last", "join last"),
    "all_to_all": (lambda x, group: m.all_to_all(group, x), "rows", "rows"),
    "all_to_all-stream": (lambda x, group: m.all_to_all(group, x, use_nccl_stream=True), "rows", "rows"),
    "sp2hp": (m.all_to_all_sp2hp, "sp2hp", "hp2sp"),
    "hp2sp": (m.all_to_all_hp2sp, "hp2sp", "sp2hp"),
}  # fmt: skip


def fits(form: str, shape: tuple[int, ...], world: int) -> bool:
    rows = torch.Size(shape[:-1]).numel()
    if "first" in form or form == "rows":
        return form.startswith("join") or shape[0] % world == 0
    return form != "hp2sp" or rows % world == 0
