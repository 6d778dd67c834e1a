"""Every mapping with its closed form; every rank knows what all ranks hold."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings as m
from tritoncomm.core import ops

__all__ = [
    "BY_SIZES",
    "FORMS",
    "LAYOUTS",
    "MAPPINGS",
    "check_by_sizes",
    "check_mapping",
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
GRADS = ["float32", "bfloat16", "float16", "float64", "complex64"]
MAY_SHARE = {"scatter_tp", "copy", "scatter_sp"}  # storage with their input


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
    if layout == "fused" and x.dim() > 1:  # the middle third of a fused projection
        return torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]]
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


def held(
    group: ProcessGroup,
    shape: tuple[int, ...],
    dtype: str,
    replicated: bool,
    seed: int,
    device: torch.device | str = "cpu",
) -> list[Tensor]:
    """What each rank of the group holds."""
    return [value(shape, dtype, seed + (0 if replicated else 1 + rank)).to(device) for rank in range(group.size())]


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


def check_mapping(
    group: ProcessGroup,
    name: str,
    shape: tuple[int, ...],
    dtype: str,
    layout: str,
    path: str,
    device: torch.device | str = "cpu",
) -> None:
    """Forward, and backward where the dtype has gradients."""
    call, forward, backward = MAPPINGS[name]
    what = (name, shape, dtype, layout, path, group.size())
    rank = group.rank()
    parts = held(group, shape, dtype, False, 0, device)
    x = laid_out(parts[rank], layout)
    wanted = FORMS[forward](parts, rank)
    with ops.path(path):
        before = x.clone()
        out = call(x, group)
        same(out, wanted, what)
        same(x, before, what)
        if group.size() > 1 and name not in MAY_SHARE:
            assert out._base is None, what
            assert out.is_contiguous(), what
        if dtype not in GRADS:
            return
        # autograd wants the layout of a non-leaf here: the leaf is made contiguous and then laid out
        leaf = laid_out(parts[rank], layout).requires_grad_()
        out = call(leaf, group)
        same(out.detach(), wanted, what)
        grads = held(group, tuple(wanted.shape), dtype, False, 100, device)
        mine = laid_out(grads[rank], layout)
        kept = mine.clone()
        out.backward(mine)
        assert leaf.grad is not None, what
        same(leaf.grad, FORMS[backward](grads, rank).reshape(shape), ("backward", *what))
        same(mine, kept, ("the caller's gradient", *what))


@dataclass(frozen=True)
class BySizes:
    """A mapping with split sizes: a rank's call and input shape, and both directions from the tensors of all ranks."""

    call: Callable[[Tensor, ProcessGroup], Tensor]
    shape: Callable[[int, int], tuple[int, ...]]  # of a rank among as many
    forward: Callable[[list[Tensor], int], Tensor]
    backward: Callable[[list[Tensor], int], Tensor]


def _rows(world: int) -> list[int]:
    return [(2 + 3 * rank) % 7 for rank in range(world)]  # 2, 5, 1, 4, 0, 3, 6, 2


def _heads(world: int) -> list[int]:
    return [(3 * rank) % 5 for rank in range(world)]  # 0, 3, 1, 4, 2


def _sent(rank: int, world: int) -> list[int]:
    return [(rank + 2 * to) % 3 for to in range(world)]


def _received(rank: int, world: int) -> list[int]:
    return [_sent(source, world)[rank] for source in range(world)]


def _share(x: Tensor, rank: int, world: int, dim: int) -> Tensor:
    return x.split(_rows(world), dim)[rank]


def _all_gather(call: Callable[..., Tensor], dim: int, ahead: tuple[int, ...]) -> BySizes:
    return BySizes(
        lambda x, g: call(x, g, _rows(g.size())),
        lambda rank, world: (*ahead, _rows(world)[rank], 8),
        lambda parts, rank: torch.cat(parts, dim),
        lambda grads, rank: _share(summed(grads), rank, len(grads), dim),
    )


def _reduce_scatter(call: Callable[..., Tensor], dim: int, ahead: tuple[int, ...], adds: bool = True) -> BySizes:
    return BySizes(
        lambda x, g: call(x, g, _rows(g.size())),
        lambda rank, world: (*ahead, sum(_rows(world)), 8),
        lambda parts, rank: _share(summed(parts) if adds else parts[rank], rank, len(parts), dim),
        lambda grads, rank: torch.cat(grads, dim),
    )


def _exchanged(sizes: Callable[[int, int], list[int]]) -> Callable[[list[Tensor], int], Tensor]:
    return lambda parts, rank: torch.cat([x.split(sizes(a, len(parts)))[rank] for a, x in enumerate(parts)])


# Split sizes that differ, and some that are zero.
BY_SIZES = {
    "gather_sp": _all_gather(
        lambda x, g, sizes: m.gather_from_sequence_parallel_region(x, group=g, output_split_sizes=sizes), 0, ()
    ),
    "reduce_scatter_sp": _reduce_scatter(m.reduce_scatter_to_sequence_parallel_region, 0, ()),
    "all_gather_dim": _all_gather(lambda x, g, sizes: m.all_gather_dim(x, 1, g, sizes=sizes), 1, (3,)),
    "reduce_scatter_dim": _reduce_scatter(lambda x, g, sizes: m.reduce_scatter_dim(x, 1, g, sizes=sizes), 1, (3,)),
    "split_dim": _reduce_scatter(lambda x, g, sizes: m.split_dim(x, 1, g, sizes=sizes), 1, (3,), adds=False),
    "all_to_all": BySizes(
        lambda x, g: m.all_to_all(g, x, _received(g.rank(), g.size()), _sent(g.rank(), g.size())),
        lambda rank, world: (sum(_sent(rank, world)), 8),
        _exchanged(_sent),
        _exchanged(_received),
    ),
    "all_to_all_dims": BySizes(
        lambda x, g: m.all_to_all_dims(x, 1, 0, g, scatter_sizes=_heads(g.size()), gather_sizes=_rows(g.size())),
        lambda rank, world: (_rows(world)[rank], sum(_heads(world)), 8),
        lambda parts, rank: torch.cat([part.split(_heads(len(parts)), 1)[rank] for part in parts], 0),
        lambda grads, rank: torch.cat([_share(grad, rank, len(grads), 0) for grad in grads], 1),
    ),
}


def check_by_sizes(group: ProcessGroup, name: str, dtype: str, path: str, device: torch.device | str = "cpu") -> None:
    """Forward and backward of a mapping with split sizes."""
    rank, world, case = group.rank(), group.size(), BY_SIZES[name]
    what = (f"{name} by sizes", dtype, f"rank {rank} of {world}")
    parts = [value(case.shape(w, world), dtype, w).to(device) for w in range(world)]
    leaf = parts[rank].clone().requires_grad_()
    with ops.path(path):
        out = case.call(leaf, group)
        same(out.detach(), case.forward(parts, rank), what)
        grads = [value(tuple(case.forward(parts, w).shape), dtype, 100 + w).to(device) for w in range(world)]
        out.backward(grads[rank].clone())
    assert leaf.grad is not None, what
    same(leaf.grad, case.backward(grads, rank), ("backward", *what))
