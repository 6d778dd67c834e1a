"""Megatron-LM's autograd classes; ``tensor_parallel`` has the public functions.

The ctx attribute names and one None per extra argument as gradients are part of the contract. Backward enters an
autograd class only under ``create_graph``.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.distributed import ProcessGroup

from tritoncomm.core import eager
from tritoncomm.core.autograd import direct
from tritoncomm.core.plan import normalize_sizes
from tritoncomm.core.validation import world_of
from tritoncomm.mappings.general import split_dim
from tritoncomm.mappings.helpers import (
    _gather_along_first_dim,
    _reduce_scatter_along_first_dim,
)
from tritoncomm.mappings.overwriting import may_overwrite_gradient

__all__ = [
    "_AllGatherFromTensorParallelRegion",
    "_CopyInPlace",
    "_CopyToModelParallelRegion",
    "_GatherFromModelParallelRegion",
    "_GatherFromSequenceParallelRegion",
    "_ReduceFromModelParallelRegion",
    "_ReduceInPlace",
    "_ReduceScatterToSequenceParallelRegion",
    "_ReduceScatterToTensorParallelRegion",
    "_ScatterToModelParallelRegion",
    "_ScatterToSequenceParallelRegion",
]


@direct
class _CopyToModelParallelRegion(Function):
    """Forward: identity. Backward: all-reduce."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return input_

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return input_

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            return _ReduceFromModelParallelRegion.apply(grad_output, ctx.group), None
        return eager.all_reduce(grad_output, ctx.group, "copy_to_tensor_model_parallel_region.backward"), None


@direct
class _CopyInPlace(Function):
    """Copy like ``_CopyToModelParallelRegion``; backward writes into the gradient that it receives."""

    forward = staticmethod(_CopyToModelParallelRegion.forward)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        name = "copy_to_tensor_model_parallel_region.backward"
        in_place = may_overwrite_gradient(grad_output) and world_of(ctx.group, name) > 1
        if grad_output.requires_grad or not in_place:
            return _CopyToModelParallelRegion.backward(ctx, grad_output)
        grad = eager.all_reduce(grad_output, ctx.group, name, in_place=True)
        # A backward that still needs the overwritten tensor raises torch's error then.
        torch.autograd.graph.increment_version(grad)
        return grad, None


@direct
class _ReduceFromModelParallelRegion(Function):
    """Forward: all-reduce. Backward: identity."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return eager.all_reduce(input_, group, "reduce_from_tensor_model_parallel_region")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return eager.all_reduce(input_, group, "reduce_from_tensor_model_parallel_region")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            return _CopyToModelParallelRegion.apply(grad_output, ctx.group), None
        return grad_output, None


@direct
class _ReduceInPlace(Function):
    """Reduce like ``_ReduceFromModelParallelRegion``, into the input, which is marked dirty."""

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        ctx.mark_dirty(input_)
        return eager.all_reduce(input_, group, "reduce_from_tensor_model_parallel_region", in_place=True)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        return _ReduceFromModelParallelRegion.backward(ctx, grad_output)


@direct
class _ScatterToModelParallelRegion(Function):
    """Forward: split the last dim. Backward: all-gather it."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return eager.split(input_.detach(), -1, group, "scatter_to_tensor_model_parallel_region")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return eager.split(input_, -1, group, "scatter_to_tensor_model_parallel_region")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            return _GatherFromModelParallelRegion.apply(grad_output, ctx.group), None
        name = "scatter_to_tensor_model_parallel_region.backward"
        return eager.all_gather(grad_output, -1, ctx.group, name), None


@direct
class _GatherFromModelParallelRegion(Function):
    """Forward: all-gather the last dim. Backward: split it (the gradient is the same on every rank)."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return eager.all_gather(input_.detach(), -1, group, "gather_from_tensor_model_parallel_region")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return eager.all_gather(input_, -1, group, "gather_from_tensor_model_parallel_region")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            return _ScatterToModelParallelRegion.apply(grad_output, ctx.group), None
        name = "gather_from_tensor_model_parallel_region.backward"
        return eager.split(grad_output, -1, ctx.group, name), None


@direct
class _ScatterToSequenceParallelRegion(Function):
    """Forward: split dim 0. Backward: all-gather it."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return eager.split(input_.detach(), 0, group, "scatter_to_sequence_parallel_region")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return eager.split(input_, 0, group, "scatter_to_sequence_parallel_region")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            sums_gradient = False  # its gradient is the same on every rank, and is split
            return _GatherFromSequenceParallelRegion.apply(grad_output, ctx.group, sums_gradient), None
        name = "scatter_to_sequence_parallel_region.backward"
        return eager.all_gather(grad_output, 0, ctx.group, name), None


@direct
class _AllGatherFromTensorParallelRegion(Function):
    """Forward: all-gather the last dim. Backward: reduce-scatter it."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return eager.all_gather(input_.detach(), -1, group, "all_gather_last_dim_from_tensor_parallel_region")

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return eager.all_gather(input_, -1, group, "all_gather_last_dim_from_tensor_parallel_region")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            return _ReduceScatterToTensorParallelRegion.apply(grad_output, ctx.group), None
        name = "all_gather_last_dim_from_tensor_parallel_region.backward"
        return eager.reduce_scatter(grad_output, -1, ctx.group, name), None


@direct
class _ReduceScatterToTensorParallelRegion(Function):
    """Forward: reduce-scatter the last dim. Backward: all-gather it."""

    @staticmethod
    def symbolic(graph: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        name = "reduce_scatter_last_dim_to_tensor_parallel_region"
        return eager.reduce_scatter(input_.detach(), -1, group, name)

    @staticmethod
    def forward(ctx: Any, input_: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        return eager.reduce_scatter(input_, -1, group, "reduce_scatter_last_dim_to_tensor_parallel_region")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            return _AllGatherFromTensorParallelRegion.apply(grad_output, ctx.group), None
        name = "reduce_scatter_last_dim_to_tensor_parallel_region.backward"
        return eager.all_gather(grad_output, -1, ctx.group, name), None


@direct
class _GatherFromSequenceParallelRegion(Function):
    """Forward: all-gather dim 0. Backward: reduce-scatter it, or split a replicated gradient."""

    @staticmethod
    def symbolic(
        graph: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return _gather_along_first_dim(input_, group, output_split_sizes, use_global_buffer)

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        ctx.group = group
        ctx.output_split_sizes = output_split_sizes
        ctx.use_global_buffer = use_global_buffer
        name = "gather_from_sequence_parallel_region"
        return eager.all_gather(input_, 0, group, name, normalize_sizes(output_split_sizes, name))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        group, sizes = ctx.group, ctx.output_split_sizes
        name = "gather_from_sequence_parallel_region.backward"
        if not ctx.tensor_parallel_output_grad:
            grad = split_dim(grad_output, 0, group, sizes=sizes)
        elif grad_output.requires_grad:
            grad = _ReduceScatterToSequenceParallelRegion.apply(grad_output, group, sizes, ctx.use_global_buffer)
        else:
            grad = eager.reduce_scatter(grad_output, 0, group, name, normalize_sizes(sizes, name))
        return grad, None, None, None, None


@direct
class _ReduceScatterToSequenceParallelRegion(Function):
    """Forward: reduce-scatter dim 0. Backward: all-gather it."""

    @staticmethod
    def symbolic(
        graph: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Return the result of ``forward``: a part of the class in Megatron, which nothing calls here."""
        return _reduce_scatter_along_first_dim(input_, group, input_split_sizes, use_global_buffer)

    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: ProcessGroup,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        ctx.group = group
        ctx.input_split_sizes = input_split_sizes
        ctx.use_global_buffer = use_global_buffer
        name = "reduce_scatter_to_sequence_parallel_region"
        return eager.reduce_scatter(input_, 0, group, name, normalize_sizes(input_split_sizes, name))

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        if grad_output.requires_grad:
            # True: the gradient of the gather's result differs between ranks, and is summed.
            args = (True, ctx.input_split_sizes, ctx.use_global_buffer)
            grad = _GatherFromSequenceParallelRegion.apply(grad_output, ctx.group, *args)
        else:
            name = "reduce_scatter_to_sequence_parallel_region.backward"
            grad = eager.all_gather(grad_output, 0, ctx.group, name, normalize_sizes(ctx.input_split_sizes, name))
        return grad, None, None, None
