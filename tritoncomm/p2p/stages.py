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

from tritoncomm import groups, record
from tritoncomm.core import backend
from tritoncomm.core.ops import pack
from tritoncomm.core.validation import check_data
from tritoncomm.errors import ArgumentError
from tritoncomm.groups import ParallelMode
from tritoncomm.p2p.hop import exchange, real_device
from tritoncomm.p2p.message import as_shapes, is_one_shape, no_memory
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
_NOTHING: Transfer = (None, None, False)

_warned: set[tuple[int, ...]] = set()


def _neighbours(prev_rank: int | None, next_rank: int | None) -> Neighbours:
    """Return the neighbours of this rank on the pipeline's ring, or with the named global ranks in their place.

    A named neighbour that is not in the pipeline's group is reached over the default group.
    """
    key = "p2p.stages", prev_rank, next_rank
    neighbours = groups.derived.get(key)
    if neighbours is None:
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
        name: the stage function, for errors and counters.
        activation: tensors for the next stage, the shape to receive from the previous one, and whether to receive it.
        gradient: tensors for the previous stage, the shape to receive from the next one, and whether to receive it.
        prev_rank: global rank of the previous stage, or None for the ring's.
        next_rank: global rank of the next stage, or None for the ring's.
        dtype: of received tensors.
        split: send a shard of each tensor from each tensor-parallel rank, and all-gather the received shards.
        device: of received tensors, or None for the device of the tensors sent, else the group's.

    Raises:
        ArgumentError: something is received, and its shape is None.
    """
    neighbours = _neighbours(prev_rank, next_rank)
    (output, input_shape, recv_prev), (grad, grad_shape, recv_next) = activation, gradient
    before, after = input_shape if recv_prev else None, grad_shape if recv_next else None
    if (recv_prev and before is None) or (recv_next and after is None):
        raise ArgumentError(f"{name}: the shape of what is received must be given")
    if device is not None:
        device = real_device(device, name)
    outgoing, expected = {"send_next": output, "send_prev": grad}, {"recv_prev": before, "recv_next": after}
    if not split:
        received, _ = exchange(neighbours, name, outgoing, expected, dtype, device)
        return received.get("recv_prev"), received.get("recv_next")
    sent = next((x[0] for x in map(_as_list, (output, grad)) if x), None)
    if device is None:
        device = sent.device if isinstance(sent, Tensor) else neighbours.default_device()
    sharded = {key: _Sharded(shape, dtype, device, name) for key, shape in expected.items() if shape is not None}
    buffers = {key: each.buffers for key, each in sharded.items()}
    shards = {key: _shard(x, name) for key, x in outgoing.items()}
    received, _ = exchange(neighbours, name, shards, buffers, dtype, device)
    full = {key: each.gather(received[key], name) for key, each in sharded.items()}
    return full.get("recv_prev"), full.get("recv_next")


def _as_list(x: Tensors | None) -> list[Any]:
    """Return a tensor, or a list or tuple of tensors, as a list; an empty list for None."""
    return [] if x is None else list(x) if isinstance(x, list | tuple) else [x]


def _shard_size(shape: tuple[int, ...], name: str) -> int:
    """Return the number of elements of one tensor-parallel rank's shard of a flattened tensor of ``shape``.

    Return 0 where the full tensor is sent: for one tensor-parallel rank, and with a warning for a size that does not
    divide over the ranks. Each shape is warned of once.
    """
    world, size = groups.get_world_size(ParallelMode.TENSOR), math.prod(shape)
    if world == 1:
        return 0
    if size % world == 0:
        return size // world
    if shape not in _warned:
        _warned.add(shape)
        warnings.warn(
            f"{name}: {size} elements of shape {list(shape)} do not divide over {world} tensor ranks; sent in full",
            stacklevel=5,
        )
    return 0


def _own_shard(flat: Tensor, size: int) -> Tensor:
    """Return this tensor-parallel rank's shard of a flattened tensor, a view of ``size`` elements."""
    start = groups.get_local_rank(ParallelMode.TENSOR) * size
    return flat[start : start + size]


def _shard(x: Tensors | None, name: str) -> Any:
    """Return this tensor-parallel rank's shard of each tensor to send, as a list; None for no tensors.

    A tensor that is not split stays as it is.

    Raises:
        ArgumentError: a tensor has no strided data of this rank.
    """
    tensors = _as_list(x)
    for i, tensor in enumerate(tensors):
        if isinstance(tensor, Tensor):
            check_data(tensor, name)
        if isinstance(tensor, Tensor) and (size := _shard_size(tuple(tensor.shape), name)):
            full = tensor.detach()
            if not full.is_contiguous():
                full = pack(full, 0, 1)[0]
            tensors[i] = _own_shard(full.view(-1), size)
    return tensors or None


class _Sharded:
    """Received tensors of which each tensor-parallel rank receives a shard.

    Attributes:
        is_single: whether the caller expects a tensor and not a list.
        sizes: elements of each tensor's shard; 0 for a tensor that is received in full.
        full: the full tensors, to gather the shards into; None for a tensor that is received in full.
        buffers: argument of ``hop.exchange``: shapes, or the part of the full tensor to receive a shard into.
    """

    def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device | str, name: str) -> None:
        self.is_single, shapes = is_one_shape(shape), as_shapes(shape, name)
        self.sizes = [_shard_size(each, name) for each in shapes]
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name}: the dtype must be a torch.dtype, not {dtype!r:.80}")
        try:
            self.full = [
                torch.empty(each, dtype=dtype, device=device) if size else None
                for each, size in zip(shapes, self.sizes, strict=True)
            ]
        except (RuntimeError, TypeError) as error:
            if backend.is_device_error(error):
                raise
            raise no_memory(tuple([(each, dtype) for each in shapes]), name, error) from error
        self.buffers: Any = [(size,) if size else each for each, size in zip(shapes, self.sizes, strict=True)]
        if self.is_single:
            (full,), (size,) = self.full, self.sizes
            self.buffers = shapes[0] if full is None else _own_shard(full.view(-1), size)

    def gather(self, received: Any, name: str) -> Any:
        """All-gather the received shards over the tensor-parallel group; return the full tensor, or a list of them.

        Args:
            received: the tensor or the list that ``hop.exchange`` received for ``buffers``.
            name: the stage function, for errors and counters.
        """
        tensors = [received] if self.is_single else received
        for i, full in enumerate(self.full):
            if full is not None:
                group, shard = groups.group_for(ParallelMode.TENSOR, full, name), tensors[i].detach()
                started, _span = record.now(), record.begin(name, "all_gather", group, shard, (0, None))
                backend.all_gather(full.view(-1), shard, group, name)
                record.add(name, "view", 0, full.nbytes - shard.nbytes, started, calls=0)
                tensors[i] = full.requires_grad_(full.is_floating_point() or full.is_complex())
        return tensors[0] if self.is_single else tensors


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
        options = None, next_rank, torch.float32, scatter_gather_tensors, None
        _exchange("send_forward", (output_tensor, None, False), _NOTHING, *options)


def send_backward(input_tensor_grad: Any, prev_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send a gradient to the previous stage; on the first stage send nothing."""
    if not groups.is_pipeline_first_stage():
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
    return _exchange(
        "send_forward_recv_backward", (output_tensor, None, False), (None, output_grad_shape, recv_next), *options
    )[1]


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
    return _exchange(
        "send_backward_recv_forward", (None, input_tensor_shape, recv_prev), (input_tensor_grad, None, False), *options
    )[0]


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
