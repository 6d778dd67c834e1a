"""Megatron-LM's tensor-parallel mappings: the collectives of a parallel layer, inside autograd.

Names, arguments, shapes, element order and gradients are those of ``megatron.core.tensor_parallel.mappings``. W is the
number of ranks in ``group``; ``group=None`` is our tensor group, or Megatron's. ``use_global_buffer`` is accepted and
needs nothing: results never alias. ``use_nccl_stream=True`` issues an exchange on the backend's stream and waits.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling
from torch.distributed import ProcessGroup

from tritoncomm.core import eager
from tritoncomm.core.autograd import wants_grad, without_graph
from tritoncomm.core.plan import normalize_sizes
from tritoncomm.core.validation import check_kind, world_of
from tritoncomm.errors import GroupError, ShapeError
from tritoncomm.groups import GroupLike
from tritoncomm.mappings.exchanges import (
    _AllToAll,
    _HiddenToSequence,
    _SequenceToHidden,
    all_to_all_single,
    to_hidden,
    to_sequence,
)
from tritoncomm.mappings.functions import (
    _AllGatherFromTensorParallelRegion,
    _CopyInPlace,
    _CopyToModelParallelRegion,
    _GatherFromModelParallelRegion,
    _GatherFromSequenceParallelRegion,
    _ReduceFromModelParallelRegion,
    _ReduceInPlace,
    _ReduceScatterToSequenceParallelRegion,
    _ReduceScatterToTensorParallelRegion,
    _ScatterToModelParallelRegion,
    _ScatterToSequenceParallelRegion,
)
from tritoncomm.mappings.general import checked
from tritoncomm.mappings.overwriting import is_overwriting, may_overwrite

__all__ = [
    "all_gather_last_dim_from_tensor_parallel_region",
    "all_to_all",
    "all_to_all_hp2sp",
    "all_to_all_sp2hp",
    "copy_to",
    "copy_to_tensor_model_parallel_region",
    "gather_from_sequence_parallel_region",
    "gather_from_tensor_model_parallel_region",
    "reduce_from",
    "reduce_from_tensor_model_parallel_region",
    "reduce_scatter_last_dim_to_tensor_parallel_region",
    "reduce_scatter_to_sequence_parallel_region",
    "scatter_to_sequence_parallel_region",
    "scatter_to_tensor_model_parallel_region",
]


def copy_to_tensor_model_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: identity. Backward: all-reduce.

    Backward copies the gradient once; under ``overwrite_inputs`` it writes into the gradient.

    Shape: unchanged. Source: Megatron-LM (arXiv 1909.08053), the operator f.
    """
    return copy_to(input_, group, is_overwriting())


def copy_to(input_: Tensor, group: GroupLike | None, in_place: bool) -> Tensor:
    """Run ``copy_to_tensor_model_parallel_region``; ``in_place``: nothing but its backward needs the gradient."""
    group = checked(input_, group, "copy_to_tensor_model_parallel_region")
    if type(input_) is not Tensor:
        check_kind(input_, "copy_to_tensor_model_parallel_region")
    if not input_.requires_grad:
        return input_
    if not torch.is_grad_enabled():
        return input_.detach()
    overwrites = in_place and not is_compiling()  # a compiled backward never does
    return (_CopyInPlace if overwrites else _CopyToModelParallelRegion).apply(input_, group)


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: all-reduce. Backward: identity.

    Forward copies the input once; under ``overwrite_inputs`` it writes into the input and returns it.

    Shape: unchanged. Source: Megatron-LM (arXiv 1909.08053), the operator g.
    """
    return reduce_from(input_, group, is_overwriting())


def reduce_from(input_: Tensor, group: GroupLike | None, in_place: bool) -> Tensor:
    """Run ``reduce_from_tensor_model_parallel_region``; ``in_place``: nothing else needs the input."""
    name = "reduce_from_tensor_model_parallel_region"
    group = checked(input_, group, name)
    in_place = in_place and may_overwrite(input_) and world_of(group, name) > 1
    if wants_grad(input_):
        return (_ReduceInPlace if in_place else _ReduceFromModelParallelRegion).apply(input_, group)
    result = eager.all_reduce(input_, group, name, in_place=in_place)
    if in_place:
        torch.autograd.graph.increment_version(result)
    return result.detach() if result.requires_grad else result


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: split the last dim, keep this rank's chunk. Backward: all-gather the last dim.

    Shape: ``[..., H] -> [..., H/W]``.
    """
    name = "scatter_to_tensor_model_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        return _ScatterToModelParallelRegion.apply(input_, group)
    return without_graph(eager.split(input_, -1, group, name))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: all-gather the last dim. Backward: split it, without a sum: the gradient is the same on every rank.

    Shape: ``[..., h] -> [..., h*W]``.
    """
    name = "gather_from_tensor_model_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        return _GatherFromModelParallelRegion.apply(input_, group)
    return without_graph(eager.all_gather(input_, -1, group, name))


def scatter_to_sequence_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: split dim 0, keep this rank's chunk (a view of a contiguous input). Backward: all-gather dim 0.

    Shape: ``[S, ...] -> [S/W, ...]``. Source: sequence parallelism (arXiv 2205.05198).
    """
    name = "scatter_to_sequence_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        return _ScatterToSequenceParallelRegion.apply(input_, group)
    return without_graph(eager.split(input_, 0, group, name))


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: GroupLike | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Forward: all-gather dim 0. Backward: reduce-scatter dim 0, or split it.

    Args:
        input_: this rank's part of the sequence.
        tensor_parallel_output_grad: True when every rank computes a different part of the gradient (it is summed);
            False when all ranks hold the same gradient (it is split).
        group: the ranks.
        output_split_sizes: size of dim 0 on each rank when they differ.
        use_global_buffer: accepted for compatibility.

    Shape: ``[s, ...] -> [s*W, ...]``, or ``[sum(output_split_sizes), ...]``. Source: arXiv 2205.05198, the operator g.
    """
    name = "gather_from_sequence_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        args = (group, tensor_parallel_output_grad, output_split_sizes, use_global_buffer)
        return _GatherFromSequenceParallelRegion.apply(input_, *args)
    return without_graph(eager.all_gather(input_, 0, group, name, normalize_sizes(output_split_sizes, name)))


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: GroupLike | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Forward: reduce-scatter dim 0. Backward: all-gather dim 0.

    Shape: ``[S, ...] -> [S/W, ...]``, or ``[input_split_sizes[rank], ...]``. Source: arXiv 2205.05198, g-bar.
    """
    name = "reduce_scatter_to_sequence_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        args = (group, input_split_sizes, use_global_buffer)
        return _ReduceScatterToSequenceParallelRegion.apply(input_, *args)
    return without_graph(eager.reduce_scatter(input_, 0, group, name, normalize_sizes(input_split_sizes, name)))


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: all-gather the last dim. Backward: reduce-scatter the last dim.

    Shape: ``[..., h] -> [..., h*W]``.
    """
    name = "all_gather_last_dim_from_tensor_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        return _AllGatherFromTensorParallelRegion.apply(input_, group)
    return without_graph(eager.all_gather(input_, -1, group, name))


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: GroupLike | None = None) -> Tensor:
    """Forward: reduce-scatter the last dim. Backward: all-gather the last dim.

    Shape: ``[..., H] -> [..., H/W]``.
    """
    name = "reduce_scatter_last_dim_to_tensor_parallel_region"
    group = checked(input_, group, name)
    if wants_grad(input_):
        return _ReduceScatterToTensorParallelRegion.apply(input_, group)
    return without_graph(eager.reduce_scatter(input_, -1, group, name))


def all_to_all(
    group: GroupLike,
    input_: Tensor,
    output_split_sizes_: Any = None,
    input_split_sizes: Any = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Forward: all-to-all along dim 0. Backward: all-to-all with the split sizes swapped.

    Args:
        group: the ranks; must be given.
        input_: rows, in the order of the ranks they go to.
        output_split_sizes_: rows that arrive from each rank (list, tuple or numpy array); even by default.
        input_split_sizes: rows that go to each rank; even by default.
        use_nccl_stream: issue asynchronously on the backend's stream and wait.

    Shape: ``[n, ...] -> [sum(output_split_sizes_), ...]``, ``[n, ...]`` without them.
    """
    name = "all_to_all"
    if group is None:
        raise GroupError(f"{name}: group should not be None")
    group = checked(input_, group, name)
    args = (output_split_sizes_, input_split_sizes, use_nccl_stream)
    if input_.requires_grad and torch.is_grad_enabled():
        return _AllToAll.apply(group, input_, *args)
    return without_graph(all_to_all_single(input_, group, *args, name))


def all_to_all_sp2hp(input_: Tensor, group: GroupLike | None = None, use_nccl_stream: bool = False) -> Tensor:
    """Sequence-parallel to hidden-parallel. Forward: all-to-all of column chunks. Backward: ``all_to_all_hp2sp``.

    ``out[k*t + i, :]`` is row i of rank k, columns ``r*H/W`` to ``(r+1)*H/W`` on rank r.

    Shape: ``[t.., H] -> [t*W, H/W]``, always 2-D; leading dims are flattened. ``all_to_all_dims`` takes uneven sizes.

    Raises:
        ShapeError: H does not divide by W; before anything is sent.
    """
    name = "all_to_all_sp2hp"
    group = _checked_hidden(input_, group, -1, name)
    if input_.requires_grad and torch.is_grad_enabled():
        shape = None  # of the result: that of the exchange
        return _SequenceToHidden.apply(input_, group, shape, use_nccl_stream)
    return without_graph(to_hidden(input_, group, name, on_stream=use_nccl_stream))


def all_to_all_hp2sp(input_: Tensor, group: GroupLike | None = None, use_nccl_stream: bool = False) -> Tensor:
    """Hidden-parallel to sequence-parallel. Forward: all-to-all of row chunks. Backward: ``all_to_all_sp2hp``.

    The inverse of ``all_to_all_sp2hp``.

    Shape: ``[T.., h] -> [T/W, h*W]``, always 2-D; leading dims are flattened. ``all_to_all_dims`` takes uneven sizes.

    Raises:
        ShapeError: the number of rows T does not divide by W; before anything is sent.
    """
    name = "all_to_all_hp2sp"
    group = _checked_hidden(input_, group, 0, name)
    if input_.requires_grad and torch.is_grad_enabled():
        shape = None  # of the result: that of the exchange
        return _HiddenToSequence.apply(input_, group, shape, use_nccl_stream)
    return without_graph(to_sequence(input_, group, name, on_stream=use_nccl_stream))


def _checked_hidden(input_: Tensor, group: GroupLike | None, dim: int, name: str) -> ProcessGroup:
    """Return the group to use; reject a tensor whose columns (``dim`` -1) or rows (0) do not divide over its ranks."""
    # A tensor and a process group outside of forward-mode AD, the usual arguments, pass ``checked`` unchanged.
    if forward_ad._current_level >= 0 or not (isinstance(input_, Tensor) and isinstance(group, ProcessGroup)):
        group = checked(input_, group, name)
    # The collective rejects tensors that are not strided. Two of them have to be rejected here: nested ones, as they
    # have no shape for the checks below, and sparse ones that train, as over one rank autograd fails to view them.
    is_sparse = not is_compiling() and input_.layout is not torch.strided
    if input_.is_nested or (input_.requires_grad and is_sparse):
        check_kind(input_, name)
    if input_.dim() == 0:
        raise ShapeError(f"{name}: a 0-dim tensor has no hidden dim")
    world = world_of(group, name)
    size = math.prod(input_.shape[:-1]) if dim == 0 else input_.shape[-1]
    if size % world:
        extent = f"{size} rows" if dim == 0 else f"hidden size {size}"
        raise ShapeError(
            f"{name}: {extent} of shape {tuple(input_.shape)} (dim {dim}) "
            f"does not divide over {world} ranks (rank {group.rank()})"
        )
    return group
