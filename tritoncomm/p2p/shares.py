"""Each tensor rank sends its share of a tensor that all of them hold; the receivers gather the whole again."""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm import groups
from tritoncomm.core import backend
from tritoncomm.core.ops import pack
from tritoncomm.errors import ArgumentError
from tritoncomm.groups import ParallelMode
from tritoncomm.p2p import engine
from tritoncomm.p2p.shapes import Spec, as_shape, as_shapes, is_single_shape

__all__ = ["Expected", "Tensors", "outgoing"]

Tensors = Tensor | Sequence[Tensor]

_told: set[tuple[int, ...]] = set()


def _share(shape: tuple[int, ...], wanted: bool, name: str) -> int:
    """Elements of one tensor rank's share; 0 where the whole tensor goes."""
    if not wanted:
        return 0
    world, size = groups.get_world_size(ParallelMode.TENSOR), math.prod(shape)
    if world == 1 or size == 0:
        return 0
    if size % world == 0:
        return size // world
    if shape not in _told:
        _told.add(shape)
        warnings.warn(
            f"{name}: {size} elements of shape {list(shape)} do not divide over {world} tensor ranks; sent whole",
            stacklevel=4,
        )
    return 0


def outgoing(x: Tensors | None, split: bool, name: str) -> list[Tensor]:
    """The tensors to send, or this tensor rank's share of each."""
    if x is None:
        return []
    tensors = [x] if isinstance(x, Tensor) else list(x)
    for i, tensor in enumerate(tensors):
        if not isinstance(tensor, Tensor):
            raise ArgumentError(f"{name}: expected a tensor or a list of tensors, not {type(tensor).__name__}")
        if share := _share(tuple(tensor.shape), split, name):
            whole = tensor.detach()
            if not whole.is_contiguous():
                whole = pack(whole, 0, 1)[0]
            rank = groups.get_local_rank(ParallelMode.TENSOR)
            tensors[i] = whole.view(-1)[rank * share : (rank + 1) * share]
    return tensors


class Expected:
    """Results of one receive: buffers of the whole tensors, and what of them comes over the line."""

    def __init__(self, shape: Any, dtype: torch.dtype, split: bool, device: torch.device | str, name: str) -> None:
        if shape is None:
            raise ArgumentError(f"{name}: the shape of what is received must be given")
        self.single = is_single_shape(shape) or (isinstance(shape, tuple) and not shape)
        self.shapes = [as_shape(shape, name)] if self.single else as_shapes(shape, name)
        self.dtype, self.device = dtype, device
        self.shares = [_share(s, split, name) for s in self.shapes]
        self.whole = [
            torch.empty(shape, dtype=dtype, device=device) if share else None
            for shape, share in zip(self.shapes, self.shares, strict=True)
        ]
        specs: list[Spec] = [((n,) if n else s, dtype) for s, n in zip(self.shapes, self.shares, strict=True)]
        self.incoming = engine.Incoming(tuple(specs), requires_grad=not any(self.shares))
        if self.single and self.shares[0]:
            self.incoming.out = self._piece(0)

    def _piece(self, i: int) -> Tensor:
        rank, share, whole = groups.get_local_rank(ParallelMode.TENSOR), self.shares[i], self.whole[i]
        assert whole is not None
        return whole.view(-1)[rank * share : (rank + 1) * share]

    def finish(self, received: list[Tensor]) -> Tensor | list[Tensor]:
        """The whole tensors, shares gathered from the tensor group."""
        for i, whole in enumerate(self.whole):
            if whole is not None:
                group = groups.group_for(ParallelMode.TENSOR, whole, "p2p")
                backend.all_gather(whole.view(-1), received[i].detach(), group)
                received[i] = whole
            if received[i].is_floating_point() or received[i].is_complex():
                received[i].requires_grad_()
        return received[0] if self.single else received
