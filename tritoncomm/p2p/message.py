"""One message per peer: contiguous staging of what is sent, and buffers whose pieces are what was received.

A contiguous tensor alone travels as it is. Several tensors lie behind each other in one buffer of bytes, each at a
multiple of 16 bytes; both sides work the places out from shapes and dtypes. A piece owns no memory of its own: it keeps
the whole buffer alive.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from tritoncomm.core import ops
from tritoncomm.core.backend import carrier
from tritoncomm.core.cached import resolved
from tritoncomm.p2p.shapes import Spec, spec_of

__all__ = ["Message", "allocate", "stage"]

_ALIGNMENT = 16


@dataclass(slots=True)
class Message:
    """Tensors for one peer, or from one.

    Attributes:
        wire: what the backend is given: contiguous, in a dtype it moves.
        pieces: the tensors themselves.
        path: view, torch or triton: how the wire was made.
        moved: bytes read plus written for it.
    """

    wire: Tensor
    pieces: list[Tensor]
    path: str = "view"
    moved: int = 0


@lru_cache(maxsize=4096)
def _places(specs: tuple[Spec, ...]) -> tuple[tuple[int, ...], int]:
    """Where each tensor starts in the buffer, in bytes, and the bytes of the whole."""
    starts, end = [], 0
    for shape, dtype in specs:
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        starts.append(start)
        end = start + math.prod(shape) * dtype.itemsize
    return tuple(starts), end


@lru_cache(maxsize=4096)
def _dense(specs: tuple[Spec, ...]) -> bool:
    """Whether the tensors lie behind each other without a gap, in one dtype."""
    ends = [math.prod(shape) * dtype.itemsize for shape, dtype in specs[:-1]]
    return len({dtype for _, dtype in specs}) == 1 and not any(end % _ALIGNMENT for end in ends)


def stage(tensors: Sequence[Tensor]) -> Message:
    """The tensors as one message: without a pass for one contiguous tensor, with one pass otherwise."""
    tensors = [resolved(x.detach()) for x in tensors]  # a handle holds the memory, whatever becomes of x
    on_torch = ops.path_for(tensors[0]) == "torch"
    if len(tensors) == 1:
        (x,) = tensors
        if x.is_contiguous():
            return Message(carrier(x), [x])
        if on_torch:
            return Message(carrier(x.contiguous()), [x], "torch", 2 * x.nbytes)
        wire, path, moved = ops.pack(x, 0, 1)
        return Message(carrier(wire.view(x.shape)), [x], path, moved)
    specs = tuple([spec_of(x) for x in tensors])
    if on_torch and _dense(specs) and all(map(Tensor.is_contiguous, tensors)):
        flat = _flatten_dense_tensors(tensors)
        return Message(flat.view(torch.uint8), tensors, "torch", 2 * flat.nbytes)
    starts, size = _places(specs)
    wire = torch.empty(size, dtype=torch.uint8, device=tensors[0].device)
    pieces = _views(wire, tensors, starts)
    if on_torch:
        torch._foreach_copy_(pieces, tensors)  # pyright: ignore[reportPrivateImportUsage]
        return Message(wire, pieces, "torch", 2 * sum([x.nbytes for x in tensors]))
    message = Message(wire, pieces)
    for x, piece in zip(tensors, pieces, strict=True):
        if x.numel():
            _, message.path, moved = ops.pack(x if x.dim() else x.view(1), 0, 1, out=piece.view(1, 1, -1))
            message.moved += moved
    return message


def _views(wire: Tensor, tensors: Sequence[Tensor], starts: Sequence[int]) -> list[Tensor]:
    """The places of the tensors in the buffer."""
    typed: dict[torch.dtype, Tensor] = {}
    found = []
    for x, start in zip(tensors, starts, strict=True):
        dtype = x.dtype
        whole = typed.get(dtype)
        if whole is None:
            whole = typed[dtype] = wire[: len(wire) // dtype.itemsize * dtype.itemsize].view(dtype)
        found.append(whole.as_strided(x.shape, _strides(x.shape), start // dtype.itemsize))
    return found


def allocate(specs: Sequence[Spec], device: torch.device | str, out: Tensor | None = None) -> Message:
    """A message to receive into; ``out`` is a buffer for one tensor, of its shape and dtype."""
    if len(specs) == 1:
        ((shape, dtype),) = specs
        piece = torch.empty(shape, dtype=dtype, device=device) if out is None else out
        return Message(carrier(piece), [piece])
    starts, size = _places(tuple(specs))
    wire = torch.empty(size, dtype=torch.uint8, device=device)
    storage = wire.untyped_storage()
    pieces = []
    for (shape, dtype), start in zip(specs, starts, strict=True):
        piece = torch.empty(0, dtype=dtype, device=device)
        pieces.append(piece.set_(storage, start // dtype.itemsize, shape, _strides(shape)))  # type: ignore[arg-type]
    return Message(wire, pieces)


@lru_cache(maxsize=4096)
def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))
