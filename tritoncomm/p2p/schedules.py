"""Schedules of a pipeline: one forward, one backward (1F1B), plain and interleaved.

A stage's work is a callable ``chunk(x, microbatch)``: ``x`` is the activation from the previous stage (None on the
first), the result the activation for the next stage, or on the last stage the scalar loss. Gradients accumulate in
``.grad``.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import ShapeError
from tritoncomm.p2p.communicator import P2PCommunicator

__all__ = ["interleaved", "one_forward_one_backward"]

Chunk = Callable[[Tensor | None, int], Tensor]


def _backward(x: Tensor | None, y: Tensor, grad: Tensor | None) -> Tensor | None:
    """Run the backward of one micro-batch from its output ``y`` and gradient ``grad``; return the gradient of ``x``.

    ``x`` is the input of the forward, or None on the first stage, which gives None.
    """
    torch.autograd.backward(y, grad)
    return None if x is None else x.grad


def one_forward_one_backward(
    chunk: Chunk, microbatches: int, communicator: P2PCommunicator, shape: Sequence[int]
) -> list[Tensor]:
    """Run forward and backward of all micro-batches; stage s holds at most ``stages - s`` of them at a time.

    Stage s runs ``stages - s - 1`` forwards ahead, then one backward after each forward, then the backwards left over.

    Args:
        chunk: the forward of this stage, a callable ``chunk(x, microbatch)``.
        microbatches: number of micro-batches.
        communicator: of the pipeline.
        shape: of an activation (any, where the communicator's lengths vary).

    Returns:
        The losses, detached, in order; empty except on the last stage.

    Source: PipeDream-Flush (arXiv 2006.09503).
    """
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    ahead = min(communicator.total_stages - communicator.current_stage - 1, microbatches)
    waiting: list[tuple[Tensor | None, Tensor]] = []
    losses: list[Tensor] = []

    def forward(x: Tensor | None, microbatch: int) -> Tensor:
        """Run the chunk on one micro-batch, and queue its input and output for the backward; return the output."""
        y = chunk(x, microbatch)
        waiting.append((x, y))
        if last:
            losses.append(y.detach())
        return y

    def backward(grad: Tensor | None) -> Tensor | None:
        """Run the backward of the oldest micro-batch in flight; return the gradient of its input."""
        return _backward(*waiting.pop(0), grad)

    shape = torch.Size(shape)
    for microbatch in range(ahead):
        communicator.send_forward(forward(communicator.recv_forward(shape, first), microbatch), last)
    x = communicator.recv_forward(shape, first) if ahead < microbatches else None
    for microbatch in range(ahead, microbatches):
        y = forward(x, microbatch)
        grad = backward(communicator.send_forward_recv_backward(y, shape, last))
        if microbatch + 1 < microbatches:
            x = communicator.send_backward_recv_forward(grad, shape, first)
        else:
            communicator.send_backward(grad, first)
    for _ in range(ahead):
        communicator.send_backward(backward(communicator.recv_backward(shape, last)), first)
    return losses


class _Units:
    """Order in which one rank works through its chunks: unit k is one micro-batch in one chunk.

    Micro-batches go in groups of ``stages`` through chunk 0, then through chunk 1, and so on; backwards go through the
    chunks from the last to the first. Chunk c of stage s is followed by chunk c of stage s + 1, chunk c of the last
    stage by chunk c + 1 of the first.
    """

    def __init__(self, chunks: int, microbatches: int, stage: int, stages: int) -> None:
        self.chunks, self.stage, self.stages = chunks, stage, stages
        self.count = chunks * microbatches
        self.ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, self.count)

    def microbatch(self, k: int) -> int:
        """Return the micro-batch of the k-th forward, and of the k-th backward."""
        return k // (self.stages * self.chunks) * self.stages + k % self.stages

    def forward(self, k: int) -> int:
        """Return the chunk of this rank that the k-th forward runs."""
        return k // self.stages % self.chunks

    def backward(self, k: int) -> int:
        """Return the chunk of this rank that the k-th backward runs."""
        return self.chunks - 1 - self.forward(k)

    def is_first(self, chunk: int) -> bool:
        """Whether this chunk of this rank is the first chunk of the model."""
        return self.stage == 0 and chunk == 0

    def is_last(self, chunk: int) -> bool:
        """Whether this chunk of this rank is the last chunk of the model."""
        return self.stage == self.stages - 1 and chunk == self.chunks - 1

    def takes_input(self, k: int) -> bool:
        """Whether a k-th forward exists and needs an activation from the previous stage."""
        return k < self.count and not self.is_first(self.forward(k))

    def takes_gradient(self, k: int) -> bool:
        """Whether a k-th backward exists and needs a gradient from the next stage."""
        return k < self.count and not self.is_last(self.backward(k))


def interleaved(
    chunks: Sequence[Chunk], microbatches: int, communicator: P2PCommunicator, shape: Sequence[int]
) -> list[Tensor]:
    """Run 1F1B with several chunks of the model per stage, which has a smaller bubble for more messages.

    Args:
        chunks: the forwards of this stage; chunk c of stage s is part ``c * stages + s`` of the model.
        microbatches: number of micro-batches, a multiple of the number of stages.
        communicator: of the pipeline.
        shape: of an activation (any, where the communicator's lengths vary).

    Returns:
        The losses, detached, in the order of their micro-batches; empty except on the last stage.

    Raises:
        ShapeError: the stages do not divide the micro-batches.

    Source: Megatron-LM (arXiv 2104.04473).
    """
    if microbatches % communicator.total_stages:
        raise ShapeError(
            f"interleaved: {microbatches} micro-batches do not divide over {communicator.total_stages} stages"
        )
    units = _Units(len(chunks), microbatches, communicator.current_stage, communicator.total_stages)
    waiting: list[list[tuple[Tensor | None, Tensor]]] = [[] for _ in chunks]
    losses: list[Tensor] = []
    shape = torch.Size(shape)

    def forward(k: int, x: Tensor | None) -> Tensor | None:
        """Run the k-th forward on the input ``x``; return the activation to send, or None for the last chunk.

        The loss of the last chunk is appended to ``losses``.
        """
        chunk = units.forward(k)
        y = chunks[chunk](x, units.microbatch(k))
        waiting[chunk].append((x, y))
        if units.is_last(chunk):
            losses.append(y.detach())
            return None
        return y

    def backward(k: int, grad: Tensor | None) -> Tensor | None:
        """Run the k-th backward from the gradient ``grad``; return the gradient for the previous stage."""
        return _backward(*waiting[units.backward(k)].pop(0), grad)

    ahead, count = units.ahead, units.count
    x = communicator.recv_forward(shape, not units.takes_input(0))
    grad: Any = None
    for k in range(ahead):
        y, takes = forward(k, x), units.takes_input(k + 1)
        if k + 1 == ahead < count:
            gradient = units.takes_gradient(0)
            x, grad = communicator.send_forward_backward_recv_forward_backward(y, None, takes, gradient, shape)
        else:
            x = communicator.send_forward_recv_forward(y, takes, shape)
    for k in range(count - ahead):
        y, sent = forward(k + ahead, x), backward(k, grad)
        receives = (units.takes_input(k + ahead + 1), units.takes_gradient(k + 1))
        x, grad = communicator.send_forward_backward_recv_forward_backward(y, sent, *receives, shape)
    if ahead == count:
        grad = communicator.recv_backward(shape, not units.takes_gradient(0))
    for k in range(count - ahead, count):
        grad = communicator.send_backward_recv_backward(backward(k, grad), units.takes_gradient(k + 1), shape)
    return losses
