"""Redistribution between placements, with or without autograd."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.tensor.distspec import Parts, _DistSpec, global_shape_of, local_shape, partitions
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, check_partitions, redistribute, unchanged

__all__ = ["DistSpecManager", "transition_between"]


class _Depth(threading.local):
    """Nesting depth of ``no_grad()`` in this thread."""

    blocks = 0


_depth = _Depth()


def transition_between(shape: tuple[int, ...], old: _DistSpec, new: _DistSpec, pg: ProcessGroup) -> Transition:
    """Return the transition between two specs; reject specs that do not fit the shape or the ranks."""
    return _transition(shape, partitions(old, len(shape)), partitions(new, len(shape)), pg.tp_world_size())


@lru_cache(maxsize=4096)
def _transition(shape: tuple[int, ...], old: Parts, new: Parts, world: int) -> Transition:
    """Return the transition between partitions over ``world`` ranks, checked; cached."""
    for parts in (old, new):
        check_partitions(parts, world, "redistribute")
    return Transition(shape, old, new)


class DistSpecManager:
    """Redistribution over the tensor-parallel group of a ``ProcessGroup``."""

    @staticmethod
    def handle_trans_spec(
        tensor: Tensor,
        old_dist_spec: _DistSpec,
        dist_spec: _DistSpec,
        pg: ProcessGroup,
        global_shape: Sequence[int] | None = None,
    ) -> Tensor:
        """Redistribute a local tensor from ``old_dist_spec`` to ``dist_spec``.

        Differentiable; the backward is the reverse transition, and nothing is summed.

        Args:
            tensor: the local tensor.
            old_dist_spec: its layout.
            dist_spec: the target layout.
            pg: the process group.
            global_shape: needed if a sharded dim does not divide evenly; otherwise shards are assumed to be equal.

        Raises:
            ArgumentError: an argument is not a dist spec.
            ShapeError: a spec does not match the tensor or the number of ranks.
        """
        for spec in (old_dist_spec, dist_spec):
            if not isinstance(spec, _DistSpec):
                raise ArgumentError(f"handle_trans_spec: expected a dist spec, not {type(spec).__name__}")
        parts = partitions(old_dist_spec, tensor.dim())
        if global_shape is None:
            shape = global_shape_of(tensor.shape, parts)
        else:
            shape = tuple(global_shape)
            expected = local_shape(shape, parts, pg.tp_local_rank()) if parts else shape
            if expected != tuple(tensor.shape):
                raise ShapeError(
                    f"handle_trans_spec: rank {pg.rank()} holds {list(tensor.shape)}, but its shard of {list(shape)} "
                    f"under {old_dist_spec} is {list(expected)}"
                )
        if not parts and not partitions(dist_spec, tensor.dim()):
            return unchanged(tensor)  # before ``pg`` is asked for ranks: made before torch.distributed, it has none yet
        transition = transition_between(shape, old_dist_spec, dist_spec, pg)
        is_in_no_grad = _depth.blocks > 0
        if is_in_no_grad and transition.old != transition.new:
            with torch.no_grad():
                return redistribute(tensor, transition, pg.tp_process_group())
        return redistribute(tensor, transition, pg.tp_process_group())

    @staticmethod
    @contextmanager
    def no_grad() -> Iterator[None]:
        """Redistribution records no backward in this thread; blocks nest, other operators are not affected.

        A tensor that needs no redistribution is returned as is; only ``torch.no_grad()`` detaches it from the graph.
        """
        _depth.blocks += 1
        try:
            yield
        finally:
            _depth.blocks -= 1
