"""Redistribution between placements, and the switch that leaves autograd out of it."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.tensor.distspec import _DistSpec, local_shape, partitions
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, check, redistribute

__all__ = ["DistSpecManager", "transition_between"]


class _Depth(threading.local):
    """How many ``no_grad()`` blocks this thread is in."""

    blocks = 0


_depth = _Depth()


def transition_between(shape: Sequence[int], old: _DistSpec, new: _DistSpec, pg: ProcessGroup) -> Transition:
    """What has to happen to a tensor of the whole ``shape``.

    Raises:
        ShapeError: a dim that is not there, or as many pieces as there are no ranks.
    """
    parts = tuple(tuple(partitions(spec, len(shape)).items()) for spec in (old, new))
    for each in parts:
        check(each, pg.tp_world_size(), "redistribute")
    return Transition(tuple(shape), *parts)


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
        """This rank's piece of a tensor, laid out as ``dist_spec`` instead of ``old_dist_spec``.

        Differentiable; the gradient goes the other way, and nothing is summed.

        Args:
            tensor: this rank's piece.
            old_dist_spec: how the whole is laid out.
            dist_spec: how it is to be laid out.
            pg: the ranks.
            global_shape: of the whole; needed when a cut dim does not divide, otherwise pieces are taken to be equal.

        Raises:
            ArgumentError: a spec is not a spec.
            ShapeError: a spec does not fit tensor or ranks.
        """
        for spec in (old_dist_spec, dist_spec):
            if not isinstance(spec, _DistSpec):
                raise ArgumentError(f"handle_trans_spec: expected a dist spec, not {type(spec).__name__}")
        parts = partitions(old_dist_spec, tensor.dim())
        if global_shape is None:
            shape = tuple(size * parts.get(dim, 1) for dim, size in enumerate(tensor.shape))
        else:
            shape = tuple(global_shape)
            mine = local_shape(shape, parts, pg.tp_local_rank()) if parts else shape
            if mine != tuple(tensor.shape):
                raise ShapeError(
                    f"handle_trans_spec: rank {pg.rank()} holds {list(tensor.shape)}, but its piece of {list(shape)} "
                    f"under {old_dist_spec} is {list(mine)}"
                )
        transition = transition_between(shape, old_dist_spec, dist_spec, pg)
        if _depth.blocks and transition.old != transition.new:
            with torch.no_grad():
                return redistribute(tensor, transition, pg.tp_process_group())
        return redistribute(tensor, transition, pg.tp_process_group())

    @staticmethod
    @contextmanager
    def no_grad() -> Iterator[None]:
        """Redistribution registers no backward in this thread; blocks nest, other operators are not touched.

        A tensor that does not move is handed back as it is; only ``torch.no_grad()`` takes it out of the graph.
        """
        _depth.blocks += 1
        try:
            yield
        finally:
            _depth.blocks -= 1
