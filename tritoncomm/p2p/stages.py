"""ColossalAI's stage functions: activations go to the next stage of the pipeline, gradients to the previous one.

Names, arguments and guards are those of ``colossalai.communication.p2p``. Neighbours are global ranks and default to
the ring of ``ParallelMode.PIPELINE``. All calls block. They take a tensor, or a list or tuple of tensors with a list of
shapes; several tensors are one message. A received tensor is a leaf with ``requires_grad=True`` where its dtype allows
it. ``dtype`` is that of every received tensor, and ``device`` their device: by default that of the tensors sent, else
the group's.

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
    """The pipeline's ring, or the named neighbours: over the default group where they are not in the pipeline's."""
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
    """Shared by the functions below: (from the previous stage, from the next stage).

    ``activation`` is what goes to the next stage, the shape of what the previous one sends, and whether that is
    received; ``gradient`` is the same in the other direction.
    """
    neighbours = _neighbours(prev_rank, next_rank)
    (output, input_shape, recv_prev), (grad, grad_shape, recv_next) = activation, gradient
    before, after = input_shape if recv_prev else None, grad_shape if recv_next else None
    if (recv_prev and before is None) or (recv_next and after is None):
        raise ArgumentError(f"{name}: the shape of what is received must be given")
    if not split:
        return exchange(neighbours, name, output, grad, before, after, dtype, device)[:2]
    sent = next((x[0] for x in map(_listed, (output, grad)) if x), None)
    if device is None:
        device = sent.device if isinstance(sent, Tensor) else neighbours.default_device()
    first = None if before is None else _Sharded(before, dtype, device, name)
    second = None if after is None else _Sharded(after, dtype, device, name)
    from_prev, from_next = first and first.buffers, second and second.buffers
    shards = _shard(output, name), _shard(grad, name)
    x, grad, _ = exchange(neighbours, name, *shards, from_prev, from_next, dtype, device)
    return first and first.gather(x, name), second and second.gather(grad, name)


def _listed(x: Tensors | None) -> list[Any]:
    return [] if x is None else list(x) if isinstance(x, list | tuple) else [x]


def _shard_size(shape: tuple[int, ...], name: str) -> int:
    """Elements of one tensor rank's shard; 0 where the full tensor is sent."""
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
    start = groups.get_local_rank(ParallelMode.TENSOR) * size
    return flat[start : start + size]


def _shard(x: Tensors | None, name: str) -> Any:
    """This tensor rank's shard of each tensor to send."""
    tensors = _listed(x)
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
    """Tensors of which this rank receives a shard.

    Attributes:
        buffers: what to receive, as ``exchange`` takes it: a single shard goes straight into the full tensor.
    """

    def __init__(self, shape: Any, dtype: torch.dtype, device: torch.device | str, name: str) -> None:
        self.is_single, shapes = is_one_shape(shape), as_shapes(shape, name)
        self.sizes = [_shard_size(each, name) for each in shapes]
        if not isinstance(dtype, torch.dtype):
            raise ArgumentError(f"{name}: the dtype must be a torch.dtype, not {dtype!r:.80}")
        try:
            self.full = [
                torch.empty(each, dtype=dtype, device=real_device(device, name)) if size else None
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
        """The full tensors, all-gathered over the tensor group."""
        tensors = [received] if self.is_single else received
        for i, full in enumerate(self.full):
            if full is not None:
                group, shard = groups.group_for(ParallelMode.TENSOR, full, name), tensors[i].detach()
                started, _range = record.now(), None
                if record.switch._is_profiler_enabled:
                    _range = record.begin(name, "all_gather", group, shard, (0, None))
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
    """Receive the input from the previous stage; None on the first stage."""
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
    """Receive the gradient of the output from the next stage; None on the last stage."""
    if groups.is_pipeline_last_stage():
        return None
    options = None, next_rank, dtype, scatter_gather_tensors, device
    return _exchange("recv_backward", _NOTHING, (None, output_grad_shape, True), *options)[1]


def send_forward(output_tensor: Any, next_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send the output to the next stage; nothing on the last stage."""
    if not groups.is_pipeline_last_stage():
        options = None, next_rank, torch.float32, scatter_gather_tensors, None
        _exchange("send_forward", (output_tensor, None, False), _NOTHING, *options)


def send_backward(input_tensor_grad: Any, prev_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send the gradient of the input to the previous stage; nothing on the first stage."""
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
    """Send the output to the next stage and receive its gradient; None, and nothing sent, on the last stage."""
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
    """Send a gradient to the previous stage and receive the next input; None, and nothing sent, on the first stage."""
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
    """Send an output to the next stage and receive an input from the previous one, round the ring at its ends."""
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
    """Send a gradient to the previous stage and receive one from the next stage, round the ring at its ends."""
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
    """Send an output and a gradient, receive an input and a gradient, round the ring; (input, gradient)."""
    options = prev_rank, next_rank, dtype, scatter_gather_tensors, device
    return _exchange(
        "send_forward_backward_recv_forward_backward",
        (output_tensor, input_tensor_shape, recv_prev),
        (input_tensor_grad, output_grad_shape, recv_next),
        *options,
    )
