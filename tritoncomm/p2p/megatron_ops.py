"""Megatron-LM's two ways to start up to four transfers, on tensors that the caller made."""

from typing import Any

from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.errors import ShapeError
from tritoncomm.p2p.message import stage
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.transport import post

__all__ = ["_batched_p2p_ops", "_p2p_ops"]


def _given(**tensors: Tensor | None) -> dict[str, Tensor]:
    """Transfers to make; what is sent is staged, what is received has to be contiguous."""
    found = {}
    for key, tensor in tensors.items():
        if tensor is None:
            continue
        if key.startswith("recv") and not tensor.is_contiguous():
            raise ShapeError(f"{key}: a tensor to receive into must be contiguous, not of strides {tensor.stride()}")
        found[key] = stage([tensor]).wire
    return found


def _batched_p2p_ops(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> list[Any]:
    """Start up to four transfers as one batch: send_prev, recv_prev, send_next, recv_next; a list of handles.

    Where both neighbours are one rank the activations (send_next, recv_prev) go first.
    """
    line = Line.of(group, prev_pipeline_rank, next_pipeline_rank)
    tensors = _given(
        send_prev=tensor_send_prev, recv_prev=tensor_recv_prev, send_next=tensor_send_next, recv_next=tensor_recv_next
    )
    return list(post(line, "_batched_p2p_ops", tensors, True).values())


def _p2p_ops(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: ProcessGroup,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    """Start up to four transfers one by one; handles by ``send_next``, ``recv_prev``, ``send_prev``, ``recv_next``.

    Even stages send before they receive, odd stages receive first.
    """
    line = Line.of(group, prev_pipeline_rank, next_pipeline_rank)
    tensors = _given(
        send_prev=tensor_send_prev, recv_prev=tensor_recv_prev, send_next=tensor_send_next, recv_next=tensor_recv_next
    )
    return dict(post(line, "_p2p_ops", tensors, False))
