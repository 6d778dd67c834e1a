"""ColossalAI's stage functions: a pipeline's activations go to the next stage, its gradients to the one before.

Names, arguments and guards are those of ``colossalai.communication.p2p``. Neighbours are global ranks and default to
the ring of ``ParallelMode.PIPELINE``. All calls block. A tensor, or a list or tuple of tensors with a list of shapes;
several tensors travel as one message. A received tensor is a leaf of its own with ``requires_grad=True`` where its
dtype allows it. ``dtype`` is that of every received tensor, and ``device`` where they live: by default that of the job.

``scatter_gather_tensors=True`` sends each tensor rank's share only and gathers the rest from the tensor group, for
tensors that are the same on all of its ranks; both sides have to say so.
"""

from typing import Any

import torch
from torch import Tensor

from tritoncomm import groups
from tritoncomm.groups import ParallelMode
from tritoncomm.p2p import engine
from tritoncomm.p2p.devices import default_device
from tritoncomm.p2p.fast_path import exchange_plain
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.shapes import is_single_shape
from tritoncomm.p2p.shares import Expected, Tensors, outgoing

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


def _first() -> bool:
    return groups.is_pipeline_first_stage()


def _last() -> bool:
    return groups.is_pipeline_last_stage()


def _line(prev_rank: int | None, next_rank: int | None) -> Line:
    """The pipeline's ring, or the neighbours named; over the default group to one that is not in the pipeline's."""
    key = "p2p.stages", prev_rank, next_rank
    line = groups.derived.get(key)
    if line is None:
        pipeline, named = groups.get_group(ParallelMode.PIPELINE), (prev_rank, next_rank) != (None, None)
        outside = named and groups.is_initialized(ParallelMode.GLOBAL)
        line = Line.of(pipeline, prev_rank, next_rank, groups.get_group(ParallelMode.GLOBAL) if outside else None)
        groups.derived[key] = line
    return line


def _exchange(
    name: str,
    *,
    forward: Tensors | None = None,
    backward: Tensors | None = None,
    forward_shape: Any = None,
    backward_shape: Any = None,
    recv_prev: bool = False,
    recv_next: bool = False,
    prev_rank: int | None = None,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    split: bool = False,
    device: torch.device | str | None = None,
) -> tuple[Any, Any]:
    """Every function below: what is sent each way, and (from the stage before, from the stage after)."""
    line = _line(prev_rank, next_rank)
    if device is None:
        device = _device(line, forward, backward)
    first, second = forward_shape if recv_prev else None, backward_shape if recv_next else None
    if (
        not (split or engine.checking() or line.is_alone)
        and _is_plain(first, recv_prev)
        and _is_plain(second, recv_next)
    ):
        result = exchange_plain(line, name, forward, backward, first, second, dtype, device)
        if result is not None:
            return result[:2]
    sends = {"send_next": outgoing(forward, split, name), "send_prev": outgoing(backward, split, name)}
    expected: dict[str, Expected] = {}
    if recv_prev:
        expected["recv_prev"] = Expected(forward_shape, dtype, split, device, name)
    if recv_next:
        expected["recv_next"] = Expected(backward_shape, dtype, split, device, name)
    receives = {key: each.incoming for key, each in expected.items()}
    hop = engine.exchange(line, name, {k: x for k, x in sends.items() if x}, receives, device)
    hop.wait()
    results = {key: each.finish(hop.received.get(key, [])) for key, each in expected.items()}
    return results.get("recv_prev"), results.get("recv_next")


def _is_plain(shape: Any, is_received: bool) -> bool:
    """Whether nothing comes from a side, or one tensor of a known shape."""
    return not is_received or is_single_shape(shape)


def _device(line: Line, *sent: Tensors | None) -> torch.device:
    """Where what is sent lives, else the job's device."""
    for x in sent:
        if isinstance(x, Tensor):
            return x.device
        if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor):
            return x[0].device
    return default_device(line.group)


def recv_forward(
    input_tensor_shape: Any,
    prev_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Receive the input from the stage before; None on the first stage."""
    if _first():
        return None
    return _exchange(
        "recv_forward",
        forward_shape=input_tensor_shape,
        recv_prev=True,
        prev_rank=prev_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
    )[0]


def recv_backward(
    output_grad_shape: Any,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Receive the gradient of the output from the stage after; None on the last stage."""
    if _last():
        return None
    return _exchange(
        "recv_backward",
        backward_shape=output_grad_shape,
        recv_next=True,
        next_rank=next_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
    )[1]


def send_forward(output_tensor: Any, next_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send the output to the stage after; nothing on the last stage."""
    if not _last():
        _exchange("send_forward", forward=output_tensor, next_rank=next_rank, split=scatter_gather_tensors)


def send_backward(input_tensor_grad: Any, prev_rank: int | None = None, scatter_gather_tensors: bool = False) -> None:
    """Send the gradient of the input to the stage before; nothing on the first stage."""
    if not _first():
        _exchange("send_backward", backward=input_tensor_grad, prev_rank=prev_rank, split=scatter_gather_tensors)


def send_forward_recv_backward(
    output_tensor: Any,
    output_grad_shape: Any,
    recv_next: bool = True,
    next_rank: int | None = None,
    dtype: torch.dtype = torch.float32,
    scatter_gather_tensors: bool = False,
    device: torch.device | str | None = None,
) -> Any:
    """Send the output to the stage after and receive its gradient; None, and nothing sent, on the last stage."""
    if _last():
        return None
    return _exchange(
        "send_forward_recv_backward",
        forward=output_tensor,
        backward_shape=output_grad_shape,
        recv_next=recv_next,
        next_rank=next_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
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
    """Send a gradient to the stage before and receive the next input; None, and nothing sent, on the first stage."""
    if _first():
        return None
    return _exchange(
        "send_backward_recv_forward",
        backward=input_tensor_grad,
        forward_shape=input_tensor_shape,
        recv_prev=recv_prev,
        prev_rank=prev_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
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
    """Send an output to the stage after and receive an input from the one before, round the ring at its ends."""
    return _exchange(
        "send_forward_recv_forward",
        forward=output_tensor,
        forward_shape=input_tensor_shape,
        recv_prev=recv_prev,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
    )[0]


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
    """Send a gradient to the stage before and receive one from the stage after, round the ring at its ends."""
    return _exchange(
        "send_backward_recv_backward",
        backward=input_tensor_grad,
        backward_shape=output_grad_shape,
        recv_next=recv_next,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
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
    return _exchange(
        "send_forward_backward_recv_forward_backward",
        forward=output_tensor,
        backward=input_tensor_grad,
        forward_shape=input_tensor_shape,
        backward_shape=output_grad_shape,
        recv_prev=recv_prev,
        recv_next=recv_next,
        prev_rank=prev_rank,
        next_rank=next_rank,
        dtype=dtype,
        split=scatter_gather_tensors,
        device=device,
    )
