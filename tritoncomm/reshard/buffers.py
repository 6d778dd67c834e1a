"""Buffers of several tensors, one after the other, that ranks divide by elements: Megatron's distributed optimizer."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch.distributed as dist
from torch import Tensor

from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import checked_ints
from tritoncomm.errors import ArgumentError
from tritoncomm.reshard.layout import FlatLayout, Layout, checked_pairs

__all__ = ["buffer_layouts", "buffer_views", "megatron_layouts"]

Tensors = Mapping[str, tuple[int, Sequence[int]]]
"""First element in the buffer and shape of every tensor, by name."""


def buffer_layouts(tensors: Tensors, shards: Mapping[int, Sequence[int]]) -> dict[str, Layout]:
    """Build the layouts of tensors in one buffer: the part of every tensor that each rank's shard of the buffer has.

    Args:
        tensors: first element in the buffer and shape of every tensor, by name.
        shards: by global rank, the first element of its shard of the buffer and the first one behind it.

    Returns:
        A ``Layout.flat`` per tensor. The local tensors are views of a shard; see ``buffer_views``.

    Raises:
        ArgumentError: ``tensors`` or ``shards`` is of another kind.
    """
    checked, name = _checked(tensors, "buffer_layouts"), "buffer_layouts: a shard"
    try:
        pairs = list(shards.values())
    except (AttributeError, TypeError) as error:
        raise ArgumentError(f"buffer_layouts: expected (first, end) of every shard by global rank: {error}") from None
    ranks, edges = checked_ints(shards, "buffer_layouts: ranks"), checked_pairs(pairs, name)
    layouts = {}
    for key, (first, shape) in checked.items():
        # Elements of the tensor, not of the buffer; none for a shard that ends before it or begins behind it.
        low, high = np.clip(edges - first, 0, math.prod(shape))
        layouts[key] = FlatLayout(shape, ranks, np.arange(len(ranks)), low, high)
    return layouts


def buffer_views(shard: Tensor, tensors: Tensors, start: int) -> dict[str, Tensor]:
    """Cut a rank's shard of a buffer into views, the local tensors of ``buffer_layouts``; by name.

    Args:
        shard: this rank's shard, of one dim.
        tensors: as for ``buffer_layouts``.
        start: first element of the shard in the buffer.
    """
    views, length = {}, shard.numel()
    for name, (first, shape) in _checked(tensors, "buffer_views").items():
        low, high = first - start, first - start + math.prod(shape)
        views[name] = shard[min(max(low, 0), length) : min(max(high, 0), length)]
    return views


def megatron_layouts(buffers: Iterable[Any], names: Mapping[Any, str]) -> dict[str, Layout]:
    """Build the layouts of the main parameters and states of Megatron-core's ``DistributedOptimizer``.

    Every rank of the data-parallel group owns an equal stretch of each bucket of a buffer. The global tensor of a
    layout is the parameter as one tensor- and pipeline-parallel rank has it. The local tensors are the optimizer's own
    shards: ``main_param`` and its states, which have one dim; a parameter without elements on a rank has none there:
    pass an empty tensor.

    Args:
        buffers: the buffers of an optimizer (``optimizer.buffers``), with the attributes ``buckets``,
            ``param_index_map`` and ``data_parallel_group`` that megatron-core has.
        names: name of every parameter.
    """
    layouts: dict[str, Layout] = {}
    for buffer in buffers:
        ranks = dist.get_process_group_ranks(buffer.data_parallel_group)
        for bucket in buffer.buckets:
            run = bucket.grad_data.numel() // len(ranks)
            shards = {
                rank: (bucket.offset + place * run, bucket.offset + (place + 1) * run)
                for place, rank in enumerate(ranks)
            }
            tensors = {names[param]: (buffer.param_index_map[param][0], tuple(param.shape)) for param in bucket.params}
            layouts |= buffer_layouts(tensors, shards)
    return {name: layouts[name] for name in names.values() if name in layouts}


def _checked(tensors: Any, name: str) -> dict[str, tuple[int, Ints]]:
    """Check first elements and shapes of tensors in a buffer, and return them."""
    try:
        return {
            str(key): (checked_ints((first,), f"{name}: a first element")[0], checked_ints(shape, f"{name}: a shape"))
            for key, (first, shape) in tensors.items()
        }
    except (AttributeError, TypeError, ValueError) as error:
        raise ArgumentError(f"{name}: expected (first element, shape) of every tensor by name: {error}") from None
