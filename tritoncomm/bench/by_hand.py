"""Mappings in plain torch: an ``autograd.Function`` over ``torch.distributed``, one line for each mapping.

The functions have Megatron's names and the arguments that ``bench_mappings`` passes. As Megatron's they overwrite the
input of ``reduce_from`` and the gradient of ``copy_to``. They check no argument, count nothing, and split even dims
only, except where split sizes are an argument.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to_tensor_model_parallel_region",
    "experts",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]

# torch 2.13 has new names, and warns about the old ones in every call.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)

Collective = Callable[..., Tensor]  # of a tensor, the group, and lists of sizes


class ByHand(Function):
    """Run ``forward_call`` forward and ``backward_call`` backward."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        group: ProcessGroup,
        forward_call: Collective,
        backward_call: Collective,
        *sizes: Sequence[int] | None,
    ) -> Tensor:
        ctx.group, ctx.backward_call, ctx.sizes = group, backward_call, sizes
        return forward_call(x, group, *sizes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return (ctx.backward_call(gradient, ctx.group, *reversed(ctx.sizes)), *[None] * (3 + len(ctx.sizes)))


def identity(x: Tensor, group: ProcessGroup) -> Tensor:
    return x


def all_reduce(x: Tensor, group: ProcessGroup) -> Tensor:
    dist.all_reduce(x, group=group)
    return x


def split(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size())[group.rank()]


def gather(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] * group.size(), *x.shape[1:])
    _all_gather(out, x.contiguous(), group=group)
    return out


def reduce_scatter(x: Tensor, group: ProcessGroup) -> Tensor:
    out = x.new_empty(x.shape[0] // group.size(), *x.shape[1:])
    _reduce_scatter(out, x.contiguous(), group=group)
    return out


def gather_sizes(x: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
    out = x.new_empty(sum(sizes), *x.shape[1:])
    dist.all_gather(list(out.split(sizes)), x.contiguous(), group=group)
    return out


def reduce_scatter_sizes(x: Tensor, group: ProcessGroup, sizes: Sequence[int]) -> Tensor:
    out = x.new_empty(sizes[group.rank()], *x.shape[1:])
    dist.reduce_scatter(out, list(x.contiguous().split(sizes)), group=group)
    return out


def split_last(x: Tensor, group: ProcessGroup) -> Tensor:
    return x.chunk(group.size(), -1)[group.rank()].contiguous()


def gather_last(x: Tensor, group: ProcessGroup) -> Tensor:
    return torch.cat(gather(x, group).chunk(group.size()), -1)


def reduce_scatter_last(x: Tensor, group: ProcessGroup) -> Tensor:
    return reduce_scatter(torch.cat(x.chunk(group.size(), -1)), group)


def exchange(
    x: Tensor,
    group: ProcessGroup,
    out_sizes: Sequence[int] | None = None,
    in_sizes: Sequence[int] | None = None,
) -> Tensor:
    rows = x.shape[0] if out_sizes is None else sum(out_sizes)
    out = x.new_empty(rows, *x.shape[1:])
    dist.all_to_all_single(out, x.contiguous(), out_sizes, in_sizes, group=group)
    return out


def exchange_columns(x: Tensor, group: ProcessGroup) -> Tensor:
    return exchange(torch.cat(x.chunk(group.size(), -1)), group)


def exchange_rows(x: Tensor, group: ProcessGroup) -> Tensor:
    return torch.cat(exchange(x, group).chunk(group.size()), -1)


def copy_to_tensor_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: identity. Backward: all-reduce."""
    return ByHand.apply(x, group, identity, all_reduce)


def reduce_from_tensor_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: all-reduce. Backward: identity."""
    return ByHand.apply(x, group, all_reduce, identity)


def scatter_to_tensor_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: this rank's columns. Backward: all-gather of columns."""
    return ByHand.apply(x, group, split_last, gather_last)


def gather_from_tensor_model_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: all-gather of columns. Backward: this rank's columns."""
    return ByHand.apply(x, group, gather_last, split_last)


def scatter_to_sequence_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: this rank's rows. Backward: all-gather of rows."""
    return ByHand.apply(x, group, split, gather)


def gather_from_sequence_parallel_region(
    x: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: ProcessGroup | None = None,
    output_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Forward: all-gather of rows. Backward: reduce-scatter of rows, or this rank's rows."""
    if output_split_sizes is not None:
        return ByHand.apply(x, group, gather_sizes, reduce_scatter_sizes, output_split_sizes)
    return ByHand.apply(x, group, gather, reduce_scatter if tensor_parallel_output_grad else split)


def reduce_scatter_to_sequence_parallel_region(
    x: Tensor, group: ProcessGroup, input_split_sizes: Sequence[int] | None = None
) -> Tensor:
    """Forward: reduce-scatter of rows. Backward: all-gather of rows."""
    if input_split_sizes is not None:
        return ByHand.apply(x, group, reduce_scatter_sizes, gather_sizes, input_split_sizes)
    return ByHand.apply(x, group, reduce_scatter, gather)


def all_gather_last_dim_from_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: all-gather of columns. Backward: reduce-scatter of columns."""
    return ByHand.apply(x, group, gather_last, reduce_scatter_last)


def reduce_scatter_last_dim_to_tensor_parallel_region(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: reduce-scatter of columns. Backward: all-gather of columns."""
    return ByHand.apply(x, group, reduce_scatter_last, gather_last)


def all_to_all(
    group: ProcessGroup,
    x: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Forward: all-to-all of rows. Backward: the inverse."""
    return ByHand.apply(x, group, exchange, exchange, output_split_sizes_, input_split_sizes)


def experts(
    x: Tensor, ids: Tensor, weights: Tensor, number: int, layer: Callable[[Tensor], Tensor], group: ProcessGroup
) -> Tensor:
    """Send a row for each pair of a token and an expert, run ``layer`` on rows sorted by expert, and sum the results.

    That is the formulation of Megatron-LM's dispatcher by all-to-all.
    """
    world, pairs = group.size(), ids.flatten()
    order = pairs.argsort(stable=True)
    tokens = order // ids.shape[1]
    counts = torch.bincount(pairs, minlength=number).view(world, -1)  # of each rank's experts
    counts_of_ranks = exchange(counts, group)
    to_ranks, from_ranks = torch.stack([counts.sum(1), counts_of_ranks.sum(1)]).tolist()
    rows = all_to_all(group, x.index_select(0, tokens), from_ranks, to_ranks)
    # Rows come by rank, and within a rank by expert.
    number_of_row = torch.arange(number // world, device=x.device).repeat(world)
    by_expert = number_of_row.repeat_interleave(counts_of_ranks.flatten(), output_size=len(rows)).argsort(stable=True)
    results = layer(rows.index_select(0, by_expert)).index_select(0, by_expert.argsort())
    parts = all_to_all(group, results, to_ranks, from_ranks) * weights.flatten()[order, None]
    return parts.new_zeros(x.shape).index_add_(0, tokens, parts).to(x.dtype)


def all_to_all_sp2hp(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: all-to-all, columns for rows. Backward: the inverse."""
    return ByHand.apply(x, group, exchange_columns, exchange_rows)


def all_to_all_hp2sp(x: Tensor, group: ProcessGroup) -> Tensor:
    """Forward: all-to-all, rows for columns. Backward: the inverse."""
    return ByHand.apply(x, group, exchange_rows, exchange_columns)
