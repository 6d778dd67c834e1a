"""Megatron-LM's ``P2PCommunicator`` on our exchange engine: what its pipeline schedules call between two stages.

Differences: nothing is swapped between two stages, no shape waits for a tensor, no device is synchronised, any number
of dims travels, non-contiguous tensors are staged, several tensors travel as one message, and a mismatch that a header
shows is an error. ``batch_p2p_sync`` is accepted and needs nothing: handles and stream order say when data is ready.
"""

from typing import Any

from torch import Tensor

from tritoncomm.errors import MismatchError, ShapeError
from tritoncomm.p2p.hops import Hops
from tritoncomm.p2p.shapes import Shape, is_single_shape

__all__ = ["P2PCommunicator"]


class P2PCommunicator(Hops):
    """Sends activations to the next stage of ``pp_group`` and gradients to the one before.

    Args:
        pp_group: the ranks of the pipeline, in stage order.
        config: any object with ``pipeline_dtype`` and, where they apply, ``batch_p2p_comm``, ``variable_seq_lengths``,
            ``mtp_standalone``, ``use_ring_exchange_p2p``, ``virtual_pipeline_model_parallel_size`` and ``timers``.
            ``pipeline_device`` is ours: where received tensors live, by default where the group moves tensors.

    Source: ``megatron.core.pipeline_parallel.p2p_communication``.
    """

    def _many(
        self,
        name: str,
        timer: str,
        *,
        send_next: Any = None,
        send_prev: Any = None,
        recv_prev: bool = False,
        recv_next: bool = False,
        shapes: Any = None,
    ) -> Any:
        """One hop with a tensor or a list each way; what was received, in the form of ``shapes``."""
        sent = send_next if send_prev is None else send_prev
        few = not isinstance(sent, list | tuple) or len(sent) == 1
        if few and (shapes is None or (isinstance(shapes, list) and len(shapes) == 1)):
            return self._one(name, timer, send_next, send_prev, recv_prev, recv_next, shapes)
        single = is_single_shape(shapes)
        expected = [shapes] if single else shapes
        with self._timed(timer):
            hop = self._start(
                name,
                send_next=_listed(send_next),
                send_prev=_listed(send_prev),
                recv_prev=recv_prev,
                recv_next=recv_next,
                shapes=expected,
            )
            hop.wait()
        if not (recv_prev or recv_next):
            return None
        received = hop.received.get("recv_prev" if recv_prev else "recv_next", [])
        if expected is not None and len(received) != len(expected):
            raise MismatchError(f"{name}: {hop.line} expects {len(expected)} tensors, got {len(received)}")
        return received[0] if single else received

    def _one(
        self, name: str, timer: str, send_next: Any, send_prev: Any, recv_prev: bool, recv_next: bool, shapes: Any
    ) -> Any:
        """``_many`` with lists of one."""
        sends = tuple(x[0] if isinstance(x, list | tuple) else x for x in (send_next, send_prev))
        with self._timed(timer):
            before, after, _ = self._single(name, sends, (recv_prev, recv_next), shapes and shapes[0])
        return [before if recv_prev else after] if recv_prev or recv_next else None

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receive from the stage before: a tensor for a shape, a list for a list of shapes; None on the first stage."""
        if is_first_stage:
            return _nothing(tensor_shapes)
        if is_single_shape(tensor_shapes):
            with self._timed("forward-recv"):
                return self._single("recv_forward", _NOTHING, (True, False), tensor_shapes)[0]
        return self._many("recv_forward", "forward-recv", recv_prev=True, shapes=tensor_shapes)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receive gradients from the stage after: a tensor or a list; None on the last stage."""
        if is_last_stage:
            return _nothing(tensor_shapes)
        if is_single_shape(tensor_shapes):
            with self._timed("backward-recv"):
                return self._single("recv_backward", _NOTHING, (False, True), tensor_shapes)[1]
        return self._many("recv_backward", "backward-recv", recv_next=True, shapes=tensor_shapes)

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send a tensor or a list of tensors to the stage after; nothing on the last stage."""
        if isinstance(output_tensors, Tensor) and not is_last_stage:
            with self._timed("forward-send"):
                self._single("send_forward", (output_tensors, None), (False, False), None)
        elif not is_last_stage:
            self._many("send_forward", "forward-send", send_next=output_tensors)

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send a gradient or a list of them to the stage before; nothing on the first stage."""
        if isinstance(input_tensor_grads, Tensor) and not is_first_stage:
            with self._timed("backward-send"):
                self._single("send_backward", (None, input_tensor_grads), (False, False), None)
        elif not is_first_stage:
            self._many("send_backward", "backward-send", send_prev=input_tensor_grads)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send outputs to the stage after and receive their gradients: a tensor for a tensor, a list for a list."""
        return self._pair(
            "send_forward_recv_backward",
            "forward-send-backward-recv",
            "next",
            output_tensors,
            tensor_shapes,
            is_last_stage,
        )

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Send gradients to the stage before and receive the next inputs: a tensor for a tensor, a list for a list."""
        return self._pair(
            "send_backward_recv_forward",
            "backward-send-forward-recv",
            "prev",
            input_tensor_grads,
            tensor_shapes,
            is_first_stage,
        )

    def _pair(self, name: str, timer: str, side: str, sent: Any, shapes: Any, is_edge: bool) -> Any:
        """Send to and receive from the same neighbour; the form of what is sent decides the form of the result."""
        many = isinstance(sent, list | tuple)
        x = sent[0] if many and len(sent) == 1 else sent
        shape = shapes[0] if isinstance(shapes, list) and len(shapes) == 1 else shapes
        if isinstance(x, Tensor) and is_single_shape(shape) and not is_edge:
            to_next = side == "next"
            with self._timed(timer):
                sends = (x, None) if to_next else (None, x)
                found = self._single(name, sends, (not to_next, to_next), shape)[1 if to_next else 0]
            return [found] if many else found
        one = is_single_shape(shapes) or len(shapes) == 0
        expected = [shapes] if one else list(shapes)
        tensors = list(sent) if many else [sent]
        if len(tensors) != len(expected):
            raise ShapeError(f"{name}: {len(tensors)} tensors to send, but {len(expected)} shapes to receive")
        if is_edge:
            return [None] * len(tensors) if many else None
        key = f"send_{side}"
        received = self._many(
            name, timer, **{key: tensors}, recv_prev=side == "prev", recv_next=side == "next", shapes=expected
        )
        return received if many else received[0]

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send to the stage after, receive from the one before; (tensor, handles) with ``overlap_p2p_comm``."""
        name = "send_forward_recv_forward"
        with self._timed("forward-send-forward-recv"):
            sends, receives = (output_tensor, None), (recv_prev, False)
            found, _, handles = self._single(name, sends, receives, tensor_shape, not overlap_p2p_comm)
        return (found, handles) if overlap_p2p_comm else found

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send to the stage before, receive from the one after; (tensor, handles) with ``overlap_p2p_comm``."""
        name = "send_backward_recv_backward"
        with self._timed("backward-send-backward-recv"):
            sends, receives = (None, input_tensor_grad), (False, recv_next)
            _, found, handles = self._single(name, sends, receives, tensor_shape, not overlap_p2p_comm)
        return (found, handles) if overlap_p2p_comm else found

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Tensor | None, Tensor | None]:
        """All four directions at once; (input from the stage before, gradient from the stage after)."""
        name = "send_forward_backward_recv_forward_backward"
        with self._timed("forward-backward-send-forward-backward-recv"):
            sends, receives = (output_tensor, input_tensor_grad), (recv_prev, recv_next)
            before, after, _ = self._single(name, sends, receives, tensor_shape)
        return before, after


_NOTHING = (None, None)


def _listed(tensors: Any) -> list[Any]:
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def _nothing(shapes: Any) -> Any:
    """What an edge stage gets in place of a tensor or a list."""
    return None if is_single_shape(shapes) else [None] * len(shapes)
