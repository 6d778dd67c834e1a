"""Stage functions of ColossalAI: activations go to the next stage of the pipeline, gradients to the previous one.

Names, arguments and guards are those of ``colossalai.communication.p2p``. Neighbours are global ranks and default to
the ring of ``ParallelMode.PIPELINE``. All calls block. They take a tensor, or a list or tuple of tensors with a list of
shapes; several tensors are one message. A received tensor is a leaf with ``requires_grad=True`` where its dtype allows
it. ``dtype`` is the dtype of every received tensor, and ``device`` their device: by default the device of the tensors
sent, else the group's.

With ``scatter_gather_tensors=True`` each tensor-parallel rank sends its shard of the flattened tensor, and the
receivers all-gather the full tensor over the tensor group. The tensor has to be replicated there, and both sides have
to agree.
"""

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm import groups
from tritoncomm.core import eager
from tritoncomm.core.ops import pack
from tritoncomm.core.validation import check_data
from tritoncomm.errors import ArgumentError
from tritoncomm.groups import ParallelMode
from tritoncomm.p2p.hop import exchange, real_device
from tritoncomm.p2p.message import as_shapes, is_one_shape
from tritoncomm.p2p.neighbours import Neighbours

__all__ = [
    "recv_backward",
    "recv_forward",
    "send_backward",
    "send_backward_recv_backward",
    "send_backward_recv_forward",
    "send_forward",
    "send_forward_backward_recv_forward_backward",
    "send_forward_recv_backward",
    "send_forward_recv_forward",
]

Tensors = Tensor | Sequence[Tensor]
Transfer = tuple[Tensors | None, Any, bool]
"""(tensors to send, or None; shape or shapes to receive, or None; whether to receive)."""
_NOTHING: Transfer = (None, None, False)

_warned: set[tuple[int, ...]] = set()


def _neighbours(prev_rank: int | None, next_rank: int | None) -> Neighbours:
    """Return the neighbours of this rank on the pipeline's ring, or with the named global ranks in their place."""
    key = "p2p.stages", prev_rank, next_rank
    neighbours = groups.derived.get(key)
    if neighbours is None:
        # A named neighbour that is not in the pipeline's group is reached over the default group.
        pipeline, named = groups.get_group(ParallelMode.PIPELINE), (prev_rank, next_rank) != (None, None)
        outside = named and groups.is_initialized(ParallelMode.GLOBAL)
        outer = groups.get_group(ParallelMode.GLOBAL) if outside else None
        neighbours = groups.derived[key] = Neighbours.of(pipeline, prev_rank, next_rank, outer)
    return neighbours


def _exchange(
    name: str,
    activation: Transfer,
    gradient: Transfer,
    prev_rank: int | None,
    next_rank: int | None,
    dtype: torch.dtype,
    split: bool,
    device: torch.device | str | None,
) -> tuple[Any, Any]:
    """Make the hop of a stage function; return (from the previous stage, from the next stage).

    Args:
        activation: tensors for the next stage, the shape to receive from the previous one, and whether to receive it.
        gradient: tensors for the previous stage, the shape to receive from the next one, and whether to receive it.
        split: send a shard of each tensor from each tensor-parallel rank, and all-gather the received shards.
    """
    neighbours = _neighbours(prev_rank, next_rank)
    (output, input_shape, recv_prev), (grad, grad_shape, recv_next) = activation, gradient
    # ``activation`` and ``gradient`` have the tensors for one neighbour and the shape to receive from the other.
    before, after = input_shape if recv_prev else None, grad_shape if recv_next else None
    if (recv_prev and before is None) or (recv_next and after is None):
        raise ArgumentError(f"{name}: the shape of what is received must be given")
    if device is not None:
        device = real_device(device, name)
    outgoing, expected = {"send_next": output, "send_prev": grad}, {"recv_prev": before, "recv_next": after}
    if not split:
        received, _ = exchange(neighbours, name, outgoing, expected, dtype, device)
        return received.get("recv_prev"), received.get("recv_next")
    shards = {"send_next": _shard(output, name), "send_prev": _shard(grad, name)}
    parts = {key: _shapes_of_shards(shape, name) for key, shape in expected.items()}
    received, _ = exchange(neighbours, name, shards, parts, dtype, device)
    full = {key: _gather(received.get(key), shape, name) for key, shape in expected.items()}
    return full["recv_prev"], full["recv_next"]


def _as_list(x: Tensors | None) -> list[Any]:
    """Return a tensor, or a list or tuple of tensors, as a list; an empty list for None."""
    return [] if x is None else list(x) if isinstance(x, list | tuple) else [x]


def _shard_size(shape: tuple[int, ...], name: str) -> int:
    """Return the elements of one tensor-parallel rank's shard of a flattened tensor; 0 where all of it is sent."""
    world, size = groups.get_world_size(ParallelMode.TENSOR), math.prod(shape)
    if world == 1:
        return 0
    if size % world == 0:
        return size // world
    # Each shape that does not divide is warned of once.
    if shape not in _warned:
        _warned.add(shape)
        warnings.warn(
            f"{name}: {size} elements of shape {list(shape)} do not divide over {world} tensor ranks; sent in full",
            stacklevel=5,
        )
    return 0


def _shard(x: Tensors | None, name: str) -> Any:
    """Return this tensor-parallel rank's shard of each tensor that is split, as a list; None for no tensors."""
    tensors = _as_list(x)
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor):
            check_data(tensor, name)
        if isinstance(tensor, Tensor) and (size := _shard_size(tuple(tensor.shape), name)):
            # A tensor whose elements do not divide stays as it is.
            full = tensor.detach()
            if not full.is_contiguous():
                full = pack(full, dim=0, world=1)[0]  # a contiguous copy
            tensors[i] = full.view(-1).narrow(0, groups.get_local_rank(ParallelMode.TENSOR) * size, size)
    return tensors or None


def _shapes_of_shards(shape: Any, name: str) -> Any:
    """Return the shape, or the list of shapes, of this rank's shards of flattened tensors; None for no shape."""
    if shape is None:
        return None
    shapes = [(size,) if (size := _shard_size(each, name)) else each for each in as_shapes(shape, name)]
    return shapes[0] if is_one_shape(shape) else shapes


def _gather(received: Any, shape: Any, name: str) -> Any:
    """All-gather received shards over the tensor-parallel group; ``shape`` is that of the full tensors."""
    if shape is None:
        return received
    tensors = [received] if is_one_shape(shape) else received
    for i, full_shape in enumerate(as_shapes(shape, name)):
        if _shard_size(full_shape, name):
            shard = tensors[i].detach()
            group = groups.group_for(ParallelMode.TENSOR, shard, name)
            gathered = eager.all_gather(shard, 0, group, f"{name}.all_gather")
            full = torch.ops.aten._unsafe_view(gathered, full_shape)  # no view, as every other received tensor
            tensors[i] = full.requires_grad_(full.is_floating_point() or full.is_complex())
    return tensors[0] if is_one_shape(shape) else tensors


def recv_forward(
    input_tensor_shape: Any,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Receive an activation from the previous stage and return it; on the first stage receive nothing, return None."""
    if groups.is_pipeline_first_stage():
        return None
    options = prev_rank, None, dtype, scatter_gather_tensors, device
    return _exchange("recv_forward", (None, input_tensor_shape, True), _NOTHING, *options)[0]


def recv_backward(
    output_grad_shape: Any,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Receive a gradient from the next stage and return it; on the last stage receive nothing, return None."""
    if groups.is_pipeline_last_stage():
        return None
    options = None, next_rank, dtype, scatter_gather_tensors, device
    return _exchange("recv_backward", _NOTHING, (None, output_grad_shape, True), *options)[1]


def send_forward(output_tensor: Any, next_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send an activation to the next stage; on the last stage send nothing."""
    if not groups.is_pipeline_last_stage():
        # Nothing is received: dtype and device, the third and the last, have no effect.
        options = None, next_rank, torch.float32, scatter_gather_tensors, None
        _exchange("send_forward", (output_tensor, None, False), _NOTHING, *options)


def send_backward(input_tensor_grad: Any, prev_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send a gradient to the previous stage; on the first stage send nothing."""
    if not groups.is_pipeline_first_stage():
        # Nothing is received: dtype and device, the third and the last, have no effect.
        options = prev_rank, None, torch.float32, scatter_gather_tensors, None
        _exchange("send_backward", _NOTHING, (input_tensor_grad, None, False), *options)


def send_forward_recv_backward(
    output_tensor: Any,
    output_grad_shape: Any,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Send an activation to the next stage, receive its gradient and return it; on the last stage only return None."""
    if groups.is_pipeline_last_stage():
        return None
    options = None, next_rank, dtype, scatter_gather_tensors, device
    forward, backward = (output_tensor, None, False), (None, output_grad_shape, recv_next)  # (sent, shape, receives)
    _, gradient = _exchange("send_forward_recv_backward", forward, backward, *options)
    return gradient


def send_backward_recv_forward(
    input_tensor_grad: Any,
    input_tensor_shape: Any,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Send a gradient to the previous stage, receive an activation, return it; on the first stage only return None."""
    if groups.is_pipeline_first_stage():
        return None
    options = prev_rank, None, dtype, scatter_gather_tensors, device
    forward, backward = (
        (None, input_tensor_shape, recv_prev),
        (input_tensor_grad, None, False),
    )  # (sent, shape, receives)
    activation, _ = _exchange("send_backward_recv_forward", forward, backward, *options)
    return activation


def send_forward_recv_forward(
    output_tensor: Any,
    input_tensor_shape: Any,
    recv_prev: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Send an activation to the next stage, receive one from the previous stage, and return it.

    The last stage sends to the first one.
    """
    options = prev_rank, next_rank, dtype, scatter_gather_tensors, device
    return _exchange("send_forward_recv_forward", (output_tensor, input_tensor_shape, recv_prev), _NOTHING, *options)[0]


def send_backward_recv_backward(
    input_tensor_grad: Any,
    output_grad_shape: Any,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Send a gradient to the previous stage, receive one from the next stage, and return it.

    The first stage sends to the last one.
    """
    options = prev_rank, next_rank, dtype, scatter_gather_tensors, device
    return _exchange(
        "send_backward_recv_backward", _NOTHING, (input_tensor_grad, output_grad_shape, recv_next), *options
    )[1]


def send_forward_backward_recv_forward_backward(
    output_tensor: Any,
    input_tensor_grad: Any,
    input_tensor_shape: Any,
    output_grad_shape: Any,
    recv_prev: bool = True,
    recv_next: bool = True,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> tuple[Any, Any]:
    """Send an activation forward and a gradient backward, receive one of each, and return (activation, gradient).

    The last stage and the first one are neighbours, too.
    """
    options = prev_rank, next_rank, dtype, scatter_gather_tensors, device
    return _exchange(
        "send_forward_backward_recv_forward_backward",
        (output_tensor, input_tensor_shape, recv_prev),
        (input_tensor_grad, output_grad_shape, recv_next),
        *options,
    )
