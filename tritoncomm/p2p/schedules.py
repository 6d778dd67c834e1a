"""Schedules of a pipeline: one forward, one backward (1F1B), plain and interleaved.

A stage's work is a callable ``chunk(x, microbatch)``: ``x`` is the activation from the previous stage (None on the
first), the result the activation for the next stage, or on the last stage the scalar loss. With a list of shapes ``x``
is a tuple of tensors, and the result a tuple or list of as many. Gradients accumulate in ``.grad``. An input that a
chunk does not use has a gradient of zeros.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.p2p.communicator import P2PCommunicator
from tritoncomm.p2p.message import as_shapes, is_one_shape

__all__ = ["interleaved", "one_forward_one_backward"]

Chunk = Callable[[Any, int], Any]
Shapes: TypeAlias = Sequence[int] | Sequence[Sequence[int]]
_InFlight = tuple[tuple[Tensor, ...], tuple[Tensor, ...]]
"""Inputs and outputs of a micro-batch between its forward and its backward; no inputs in the first chunk."""


class _Passes:
    """Forward and backward passes of chunks, whose messages the neighbours wait for.

    Attributes:
        shapes: of the tensors between stages: one ``torch.Size``, or a list of them.
        losses: of the last chunk, detached.
    """

    def __init__(self, name: str, shapes: Shapes, communicator: P2PCommunicator) -> None:
        sizes = [torch.Size(shape) for shape in as_shapes(shapes, name)]
        self._name, self._sizes, self._varies = name, sizes, communicator.varies
        self.shapes: Any = sizes[0] if is_one_shape(shapes) else sizes
        self.losses: list[Tensor] = []

    def forward(self, chunk: Chunk, x: Any, microbatch: int, first: bool, last: bool) -> tuple[_InFlight, Any]:
        """Run a chunk on its input ``x``; return inputs and outputs for the backward, and the message to send."""
        is_single = isinstance(self.shapes, torch.Size)
        inputs = () if first else (x,) if is_single else tuple(x)
        y = chunk(None if first else x if is_single else inputs, microbatch)
        if last:
            if not isinstance(y, Tensor):
                raise ArgumentError(f"{self._name}: the last chunk returns a loss, not {type(y).__name__}")
            self.losses.append(y.detach())
            return (inputs, (y,)), None
        outputs = (y,) if is_single else tuple(y) if isinstance(y, list | tuple) else (y,)
        self._check(outputs, microbatch)
        return (inputs, outputs), y if is_single else list(outputs)

    def _check(self, outputs: tuple[Any, ...], microbatch: int) -> None:
        """Check a chunk's outputs against the shapes that the next stage receives."""
        where = f"{self._name}: micro-batch {microbatch}: the chunk returned"
        if wrong := [type(y).__name__ for y in outputs if not isinstance(y, Tensor)]:
            raise ArgumentError(f"{where} {wrong[0]} in place of a tensor; the next stage waits for a tensor")
        if len(outputs) != len(self._sizes):
            raise ArgumentError(f"{where} {len(outputs)} tensors for {len(self._sizes)} shapes")
        for y, size in zip(outputs, self._sizes, strict=True):
            if not self._varies and y.shape != size:
                raise ShapeError(f"{where} shape {list(y.shape)}, and the next stage receives {list(size)}")

    def backward(self, in_flight: _InFlight, grads: Any, last: bool) -> Any:
        """Run the backward of a micro-batch; return the gradients of its inputs, which the previous stage waits for."""
        inputs, outputs = in_flight
        is_single = isinstance(self.shapes, torch.Size)
        received = [None] if last else [grads] if is_single else grads
        # An output without a graph, frozen or detached, takes no gradient.
        pairs = [(y, grad) for y, grad in zip(outputs, received, strict=True) if y.requires_grad]
        if pairs:
            torch.autograd.backward([y for y, _ in pairs], [grad for _, grad in pairs])
        # The previous stage waits for a gradient of each input, also of one that the chunk did not use.
        sent = [torch.zeros_like(x) if x.grad is None else x.grad for x in inputs]
        return (sent[0] if is_single else sent) if sent else None


def one_forward_one_backward(
    chunk: Chunk, microbatches: int, communicator: P2PCommunicator, shape: Shapes
) -> list[Tensor]:
    """Run forward and backward of all micro-batches; stage s holds at most ``stages - s`` of them at a time.

    Stage s runs ``stages - s - 1`` forwards ahead, then one backward after each forward, then the backwards left over.

    Args:
        chunk: the forward of this stage, a callable ``chunk(x, microbatch)``.
        microbatches: number of micro-batches.
        communicator: of the pipeline.
        shape: of an activation, or a list of shapes of several (any, where the communicator's lengths vary).

    Returns:
        The losses, detached, in order; empty except on the last stage.

    Raises:
        ArgumentError: a chunk returned something else than tensors, or not as many as shapes.
        ShapeError: a chunk returned another shape.

    Source: PipeDream-Flush (arXiv 2006.09503).
    """
    first, last = communicator.is_pp_first_stage, communicator.is_pp_last_stage
    ahead = min(communicator.total_stages - communicator.current_stage - 1, microbatches)
    passes = _Passes("one_forward_one_backward", shape, communicator)
    shapes, waiting = passes.shapes, list[_InFlight]()

    def forward(x: Any, microbatch: int) -> Any:
        """Run the chunk on one micro-batch, and queue it for the backward; return the output to send."""
        in_flight, y = passes.forward(chunk, x, microbatch, first, last)
        waiting.append(in_flight)
        return y

    def backward(grad: Any) -> Any:
        """Run the backward of the oldest micro-batch in flight; return the gradient of its input."""
        return passes.backward(waiting.pop(0), grad, last)

    for microbatch in range(ahead):
        communicator.send_forward(forward(communicator.recv_forward(shapes, first), microbatch), last)
    x = communicator.recv_forward(shapes, first) if ahead < microbatches else None
    for microbatch in range(ahead, microbatches):
        y = forward(x, microbatch)
        grad = backward(communicator.send_forward_recv_backward(y, shapes, last))
        if microbatch + 1 < microbatches:
            x = communicator.send_backward_recv_forward(grad, shapes, first)
        else:
            communicator.send_backward(grad, first)
    for _ in range(ahead):
        communicator.send_backward(backward(communicator.recv_backward(shapes, last)), first)
    return passes.losses


class _Units:
    """Order in which one rank works through its chunks: unit k is one micro-batch in one chunk.

    Micro-batches go in groups of ``stages`` through chunk 0, then through chunk 1, and so on; backwards go through the
    chunks from the last to the first. Chunk c of stage s is followed by chunk c of stage s + 1, chunk c of the last
    stage by chunk c + 1 of the first.
    """

    def __init__(self, chunks: int, microbatches: int, stage: int, stages: int) -> None:
        self.chunks, self.stage, self.stages = chunks, stage, stages
        self.count = chunks * microbatches
        # Number of forwards before the first backward.
        self.ahead = min((stages - stage - 1) * 2 + (chunks - 1) * stages, self.count)

    def microbatch(self, k: int) -> int:
        """Return the micro-batch of the k-th forward, and of the k-th backward."""
        # With 2 stages and 2 chunks: 0, 1, 0, 1, 2, 3, 2, 3; the chunks of the forwards are 0, 0, 1, 1, 0, 0, 1, 1.
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
    chunks: Sequence[Chunk], microbatches: int, communicator: P2PCommunicator, shape: Shapes
) -> list[Tensor]:
    """Run 1F1B with several chunks of the model per stage, which has a smaller bubble for more messages.

    Args:
        chunks: the forwards of this stage; chunk c of stage s is part ``c * stages + s`` of the model.
        microbatches: number of micro-batches, a multiple of the number of stages.
        communicator: of the pipeline.
        shape: of an activation, or a list of shapes of several (any, where the communicator's lengths vary).

    Returns:
        The losses, detached, in the order of their micro-batches; empty except on the last stage.

    Raises:
        ArgumentError: a chunk returned something else than tensors, or not as many as shapes.
        ShapeError: a chunk returned another shape, or the stages do not divide the micro-batches.

    Source: Megatron-LM (arXiv 2104.04473).
    """
    if microbatches % communicator.total_stages:
        raise ShapeError(
            f"interleaved: {microbatches} micro-batches do not divide over {communicator.total_stages} stages"
        )
    units = _Units(len(chunks), microbatches, communicator.current_stage, communicator.total_stages)
    passes = _Passes("interleaved", shape, communicator)
    shapes, waiting = passes.shapes, [list[_InFlight]() for _ in chunks]

    def forward(k: int, x: Any) -> Any:
        """Run the k-th forward on the input ``x``; return the activation to send, or None for the last chunk."""
        chunk = units.forward(k)
        ends = units.is_first(chunk), units.is_last(chunk)
        in_flight, y = passes.forward(chunks[chunk], x, units.microbatch(k), *ends)
        waiting[chunk].append(in_flight)
        return y

    def backward(k: int, grad: Any) -> Any:
        """Run the k-th backward from the gradient ``grad``; return the gradient for the previous stage."""
        chunk = units.backward(k)
        return passes.backward(waiting[chunk].pop(0), grad, units.is_last(chunk))

    ahead, count = units.ahead, units.count
    x = communicator.recv_forward(shapes, not units.takes_input(0))
    grad: Any = None
    for k in range(ahead):
        y, takes_input = forward(k, x), units.takes_input(k + 1)
        is_last_ahead = k + 1 == ahead and ahead < count
        if is_last_ahead:  # a forward with the first backward comes next, so its gradient is received, too
            takes_gradient = units.takes_gradient(0)
            x, grad = communicator.send_forward_backward_recv_forward_backward(
                y, None, recv_prev=takes_input, recv_next=takes_gradient, tensor_shape=shapes
            )
        else:
            x = communicator.send_forward_recv_forward(y, takes_input, shapes)
    for k in range(count - ahead):
        y, sent = forward(k + ahead, x), backward(k, grad)
        # What the next turn needs: an activation for its forward, and a gradient for its backward.
        receives = (units.takes_input(k + ahead + 1), units.takes_gradient(k + 1))
        x, grad = communicator.send_forward_backward_recv_forward_backward(y, sent, *receives, shapes)
    # If all forwards ran ahead, neither loop has received the first gradient.
    if ahead == count:
        grad = communicator.recv_backward(shapes, not units.takes_gradient(0))
    for k in range(count - ahead, count):
        grad = communicator.send_backward_recv_backward(backward(k, grad), units.takes_gradient(k + 1), shapes)
    return passes.losses
