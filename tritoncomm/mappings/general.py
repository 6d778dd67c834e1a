"""The general mappings: all-gather, reduce-scatter, split, all-to-all along any dims; backward is the adjoint.

An autograd class is entered only when a gradient is wanted; backward calls the adjoint mapping, which enters its own
class only under ``create_graph``, so every mapping can be differentiated twice.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm.core import eager, wire_sum
from tritoncomm.core.autograd import direct, outside_graphs, wants_grad, without_graph
from tritoncomm.core.node_exchange import Levels
from tritoncomm.core.plan import Ints, normalize_sizes
from tritoncomm.core.validation import check_kind, checked_dim, refuse_forward_ad
from tritoncomm.errors import ArgumentError
from tritoncomm.groups import GroupLike, resolve

__all__ = ["all_gather_dim", "all_to_all_dims", "reduce_scatter_dim", "split_dim"]


def checked(input_: Any, group: GroupLike | None, name: str) -> ProcessGroup:
    """Return the group to use; reject anything but a tensor, and forward-mode AD, which ``autograd.Function`` hides."""
    if forward_ad._current_level >= 0 and isinstance(input_, Tensor):
        refuse_forward_ad(input_, name)
    if not isinstance(input_, Tensor):
        raise ArgumentError(f"{name}: input_ must be a tensor, not {type(input_).__name__}")
    # Where nothing is sent, autograd would return a view of another layout. A traced backward cannot ask for it.
    if input_.requires_grad and not is_compiling() and input_.layout is not torch.strided:
        check_kind(input_, name)
    return resolve(group, name)


@direct
class _AllGatherDim(torch.autograd.Function):
    """Forward: all-gather. Backward: reduce-scatter of a partial gradient, or split of a replicated one."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, partial: bool) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes, ctx.partial = dim, group, sizes, partial
        return eager.all_gather(input_, dim, group, "all_gather_dim", sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        adjoint = reduce_scatter_dim if ctx.partial else split_dim
        return adjoint(grad_output, ctx.dim, ctx.group, sizes=ctx.sizes), None, None, None, None


@direct
class _ReduceScatterDim(torch.autograd.Function):
    """Forward: reduce-scatter. Backward: all-gather."""

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        dim: int,
        group: ProcessGroup,
        sizes: Ints | None,
        options: wire_sum.WireOptions | None,
    ) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        if options is None:
            return eager.reduce_scatter(input_, dim, group, "reduce_scatter_dim", sizes)
        return wire_sum.reduce_scatter(input_, dim, group, "reduce_scatter_dim", options, sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return all_gather_dim(grad_output, ctx.dim, ctx.group, sizes=ctx.sizes), None, None, None, None


@direct
class _SplitDim(torch.autograd.Function):
    """Forward: this rank's shard. Backward: all-gather."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None) -> Tensor:
        ctx.dim, ctx.group, ctx.sizes = dim, group, sizes
        return eager.split(input_, dim, group, "split_dim", sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad = all_gather_dim(grad_output, ctx.dim, ctx.group, tensor_parallel_output_grad=False, sizes=ctx.sizes)
        return grad, None, None, None


@direct
class _AllToAllDims(torch.autograd.Function):
    """Forward: split one dim, concatenate another. Backward: the exchange with the dims swapped."""

    @staticmethod
    def forward(
        ctx: Any, input_: Tensor, dims: tuple[int, int], group: ProcessGroup, sizes: tuple[Ints | None, Ints | None]
    ) -> Tensor:
        ctx.dims, ctx.group, ctx.sizes = dims, group, sizes
        return eager.all_to_all(input_, *dims, group, "all_to_all_dims", scatter_sizes=sizes[0], gather_sizes=sizes[1])

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        (scatter_dim, gather_dim), (scatter_sizes, gather_sizes) = ctx.dims, ctx.sizes
        grad = all_to_all_dims(
            grad_output, gather_dim, scatter_dim, ctx.group, scatter_sizes=gather_sizes, gather_sizes=scatter_sizes
        )
        return grad, None, None, None


def all_gather_dim(
    input_: Tensor,
    dim: int,
    group: GroupLike | None = None,
    *,
    tensor_parallel_output_grad: bool = True,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Forward: all-gather along ``dim``. Backward: reduce-scatter along ``dim``.

    With ``tensor_parallel_output_grad=False`` the gradient is the same on every rank and backward only splits it.
    ``sizes`` gives the size of ``dim`` on each rank when they differ.

    Shape: ``[..., n, ...] -> [..., n*world, ...]``, or ``[..., sum(sizes), ...]``.

    Raises:
        ShapeError: no such dim, or sizes that do not fit; before anything is sent.
    """
    name = "all_gather_dim"
    group = checked(input_, group, name)
    dim, per_rank = checked_dim(input_, dim, name), normalize_sizes(sizes, name)
    if wants_grad(input_):
        return _AllGatherDim.apply(input_, dim, group, per_rank, tensor_parallel_output_grad)
    return without_graph(eager.all_gather(input_, dim, group, name, per_rank))


def reduce_scatter_dim(
    input_: Tensor,
    dim: int,
    group: GroupLike | None = None,
    *,
    sizes: Sequence[int] | None = None,
    wire: torch.dtype | None = None,
    exchange: Levels | None = None,
) -> Tensor:
    """Forward: reduce-scatter along ``dim``. Backward: all-gather along ``dim``.

    ``wire`` and ``exchange`` are those of ``collective.reduce_scatter``: bfloat16 or float16 travels, and the sum is
    made in fp32, in rank order, rounded once. Under torch.compile the graph breaks there.

    Shape: ``[..., n, ...] -> [..., n/world, ...]``, or ``[..., sizes[rank], ...]``.

    Raises:
        ShapeError: ``dim`` does not divide, or sizes do not add up to it; before anything is sent.
        ArgumentError: a wire of another dtype, or ``exchange`` without it.
        UnsupportedError: with ``wire`` a tensor that is not floating point; more than one node without ``exchange``.
    """
    name = "reduce_scatter_dim"
    group = checked(input_, group, name)
    dim, per_rank = checked_dim(input_, dim, name), normalize_sizes(sizes, name)
    if wire is not None:
        return _reduce_scatter_over_wire(input_, dim, group, per_rank, wire_sum.WireOptions(wire, exchange=exchange))
    if exchange is not None:
        raise ArgumentError(f"{name}: exchange needs wire, the dtype that travels")
    if wants_grad(input_):
        no_wire = None
        return _ReduceScatterDim.apply(input_, dim, group, per_rank, no_wire)
    return without_graph(eager.reduce_scatter(input_, dim, group, name, per_rank))


@outside_graphs
def _reduce_scatter_over_wire(
    input_: Tensor, dim: int, group: ProcessGroup, sizes: Ints | None, options: wire_sum.WireOptions
) -> Tensor:
    """Run ``reduce_scatter_dim`` with a wire."""
    if wants_grad(input_):
        return _ReduceScatterDim.apply(input_, dim, group, sizes, options)
    return wire_sum.reduce_scatter(without_graph(input_), dim, group, "reduce_scatter_dim", options, sizes)


def split_dim(
    input_: Tensor, dim: int, group: GroupLike | None = None, *, sizes: Sequence[int] | None = None
) -> Tensor:
    """Forward: this rank's shard of ``dim`` of a replicated tensor. Backward: all-gather along ``dim``.

    The shard is contiguous, and a view of the input where it can be.

    Shape: ``[..., n, ...] -> [..., n/world, ...]``, or ``[..., sizes[rank], ...]``.
    """
    name = "split_dim"
    group = checked(input_, group, name)
    dim, per_rank = checked_dim(input_, dim, name), normalize_sizes(sizes, name)
    if wants_grad(input_):
        return _SplitDim.apply(input_, dim, group, per_rank)
    return without_graph(eager.split(input_, dim, group, name, per_rank))


def all_to_all_dims(
    input_: Tensor,
    scatter_dim: int,
    gather_dim: int,
    group: GroupLike | None = None,
    *,
    scatter_sizes: Sequence[int] | None = None,
    gather_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Forward: split ``scatter_dim`` over the ranks, concatenate ``gather_dim`` from them. Backward: the dims swapped.

    The exchange of Ulysses sequence parallelism (DeepSpeed-Ulysses, arXiv 2309.14509): with ``[batch, seq/world, heads,
    head_dim]`` and dims 2, 1 every rank ends up with the full sequence for its share of the heads.

    Args:
        input_: any number of dims, any strides (a slice of a fused qkv is read in place).
        scatter_dim: the dim that is split; divides by the number of ranks unless ``scatter_sizes`` are given.
        gather_dim: the dim that is concatenated.
        group: the ranks.
        scatter_sizes: size of ``scatter_dim`` on every rank (uneven heads).
        gather_sizes: size of ``gather_dim`` on each rank (uneven sequences).

    Shape: ``[..., s, ..., g, ...] -> [..., s/world, ..., g*world, ...]``.

    Raises:
        ShapeError: ``scatter_dim`` does not divide, or sizes do not fit; before anything is sent.
    """
    name = "all_to_all_dims"
    group = checked(input_, group, name)
    dims = (checked_dim(input_, scatter_dim, name), checked_dim(input_, gather_dim, name))
    sizes = (normalize_sizes(scatter_sizes, name), normalize_sizes(gather_sizes, name))
    if wants_grad(input_):
        return _AllToAllDims.apply(input_, dims, group, sizes)
    return without_graph(eager.all_to_all(input_, *dims, group, name, scatter_sizes=sizes[0], gather_sizes=sizes[1]))
