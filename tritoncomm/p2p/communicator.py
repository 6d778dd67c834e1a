"""P2PCommunicator of Megatron-LM: the transfers of its pipeline schedules.

Differences: two stages do not confuse activations and gradients. No shape waits for a tensor, and no device is
synchronised. Tensors have any number of dims, and non-contiguous ones are packed. Several tensors are one message. A
mismatch that a header shows is an error. A floating-point tensor of another dtype than ``pipeline_dtype``, which the
receiver allocates, is cast to it; any other dtype is an error of the sender. ``batch_p2p_sync`` is accepted and has no
effect: handles and stream order say when data is ready.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from tritoncomm.errors import ArgumentError, GroupError, MismatchError, ShapeError, UnsupportedError
from tritoncomm.groups import GroupLike, as_group
from tritoncomm.p2p.header import exchange_headers
from tritoncomm.p2p.hop import exchange, real_device
from tritoncomm.p2p.message import Shape, describe, is_single_shape, specs_of
from tritoncomm.p2p.neighbours import Neighbours
from tritoncomm.p2p.transport import Posted

__all__ = ["P2PCommunicator", "_batched_p2p_ops", "_p2p_ops"]

_TIMERS = {  # Megatron's names
    "recv_forward": "forward-recv",
    "recv_backward": "backward-recv",
    "send_forward": "forward-send",
    "send_backward": "backward-send",
    "send_forward_recv_backward": "forward-send-backward-recv",
    "send_backward_recv_forward": "backward-send-forward-recv",
    "send_forward_recv_forward": "forward-send-forward-recv",
    "send_backward_recv_backward": "backward-send-backward-recv",
    "send_forward_backward_recv_forward_backward": "forward-backward-send-forward-backward-recv",
}


class P2PCommunicator:
    """Sends activations to the next stage of ``pp_group`` and gradients to the previous one.

    Args:
        pp_group: the ranks of the pipeline, in stage order.
        config: any object with ``pipeline_dtype`` and, where they apply, ``batch_p2p_comm``, ``variable_seq_lengths``,
            ``mtp_standalone``, ``use_ring_exchange_p2p``, ``virtual_pipeline_model_parallel_size`` and ``timers``.
            ``pipeline_device`` is an addition: the device of received tensors, by default the group's.

    Source: ``megatron.core.pipeline_parallel.p2p_communication``.
    """

    def __init__(self, pp_group: GroupLike, config: Any) -> None:
        if pp_group is None:
            raise GroupError(f"P2PCommunicator: pp_group must be a process group with this rank, not {pp_group!r}")
        if isinstance(config, Mapping):
            raise ArgumentError("P2PCommunicator: config must have attributes; of a dict SimpleNamespace(**config)")
        self.pp_group, self.config = as_group(pp_group, "P2PCommunicator"), config
        self._neighbours = Neighbours.of(self.pp_group)
        self._default_device: torch.device | None = None
        self.next_rank: int | None = self._neighbours.next
        self.prev_rank: int | None = self._neighbours.prev
        self.virtual_pipeline_model_parallel_size = getattr(config, "virtual_pipeline_model_parallel_size", None)

    @property
    def is_pp_first_stage(self) -> bool:
        """Whether this rank is the first stage of the pipeline."""
        return self._neighbours.stage == 0

    @property
    def is_pp_last_stage(self) -> bool:
        """Whether this rank is the last stage of the pipeline."""
        return self._neighbours.stage == self._neighbours.stages - 1

    @property
    def total_stages(self) -> int:
        """Number of stages of the pipeline, which is the size of its group."""
        return self._neighbours.stages

    @property
    def current_stage(self) -> int:
        """Stage of this rank: its rank in the group of the pipeline, from 0."""
        return self._neighbours.stage

    @property
    def varies(self) -> bool:
        """Whether headers announce the shapes of received tensors: ``variable_seq_lengths`` or ``mtp_standalone``."""
        config = self.config
        return getattr(config, "variable_seq_lengths", False) or getattr(config, "mtp_standalone", False)

    def _device(self) -> torch.device:
        """Return the device of received tensors for a hop without sends: ``pipeline_device``, else the group's."""
        if self._default_device is None:
            device = getattr(self.config, "pipeline_device", None)
            self._default_device = (
                self._neighbours.default_device() if device is None else real_device(device, "P2PCommunicator")
            )
        return self._default_device

    def _exchange(
        self, name: str, outgoing: dict[str, Any], receives: tuple[str, ...] = (), shapes: Any = None, wait: bool = True
    ) -> tuple[dict[str, Any], Any]:
        """Make one hop as the configuration says, inside Megatron's timer of ``name``; return as ``hop.exchange`` does.

        Args:
            receives: the keys of the transfers to receive.
            shapes: the shape, or a list of shapes, to receive from each side.
        """
        config = self.config
        timers = getattr(config, "timers", None)
        if timers is not None and name in _TIMERS:
            timers(_TIMERS[name], log_level=2).start()
        try:
            batched = getattr(config, "batch_p2p_comm", True)
            if getattr(config, "use_ring_exchange_p2p", False):
                raise UnsupportedError(f"{name}: use_ring_exchange_p2p needs a patched torch; leave it off")
            if batched and not wait:
                raise AssertionError(f"{name}: overlap_p2p_comm needs batch_p2p_comm=False")
            dtype, device = getattr(config, "pipeline_dtype", None), None
            expected: dict[str, Any] = {}
            if receives:
                if dtype is None or shapes is None:
                    raise _missing(receives[0], dtype)
                if not outgoing:
                    device = self._device()
                expected = dict.fromkeys(receives, shapes)
            return exchange(
                self._neighbours, name, outgoing, expected, dtype, device,
                batched=batched, variable=self.varies, wait=wait, casts=True,
            )  # fmt: skip
        finally:
            if timers is not None and name in _TIMERS:
                timers(_TIMERS[name]).stop()

    def _communicate(
        self,
        *,
        tensor_send_next: Tensor | None,
        tensor_send_prev: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
        wait_on_reqs: bool = True,
    ) -> tuple[Tensor | None, Tensor | None, Any]:
        """Make up to four transfers at once; return (from the previous stage, from the next stage, handles).

        The handles are None once waited for; without ``wait_on_reqs`` a dict by key. Where nothing was posted they are
        an empty dict, or an empty list with ``batch_p2p_comm``, as Megatron returns them.
        """
        outgoing = _present(tensor_send_next, tensor_send_prev)
        receives = _keys(recv_prev, recv_next)
        received, handles = self._exchange("_communicate", outgoing, receives, tensor_shape, wait_on_reqs)
        if handles is not None and getattr(self.config, "batch_p2p_comm", True):
            assert not handles  # nothing was posted: batches are always waited for, and have None then
            handles = []
        return received.get("recv_prev"), received.get("recv_next"), handles

    def _communicate_shapes(
        self, tensor_send_next: Tensor | None, tensor_send_prev: Tensor | None, recv_prev: bool, recv_next: bool
    ) -> tuple[list[int], list[int]]:
        """Send the shapes of tensors, and receive shapes; return (from the previous stage, from the next stage).

        Shapes have any number of dims. A side from which nothing is received gives ``[0, 0, 0]``.

        Raises:
            MismatchError: a neighbour announced no tensor or several tensors.
        """
        name, neighbours = "_communicate_shapes", self._neighbours
        posted: list[Posted] = []
        sends = _present(tensor_send_next, tensor_send_prev)
        contents = {key: specs_of([x]) for key, x in sends.items()}
        receives = _keys(recv_prev, recv_next)
        device = next((x.device for x in sends.values()), None) or self._device()
        received = dict(exchange_headers(neighbours, name, contents, receives, device, posted))
        for header in posted:
            header.wait()
        for key, specs in received.items():
            if len(specs) != 1:
                sent = f"rank {neighbours.peer(key)} sent {describe(specs)}"
                raise MismatchError(f"{name}: {neighbours} expects one tensor, but {sent}")
        # ``specs`` are (shape, dtype) of one tensor each.
        shapes = {key: list(specs[0][0]) for key, specs in received.items()}
        return shapes.get("recv_prev", [0, 0, 0]), shapes.get("recv_next", [0, 0, 0])

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Receive activations from the previous stage: a tensor for a shape, a list for a list of shapes.

        On the first stage receive nothing, and return None for each tensor.
        """
        if is_first_stage or _is_empty(tensor_shapes):
            return _no_tensors(tensor_shapes)
        received, _ = self._exchange("recv_forward", {}, ("recv_prev",), tensor_shapes)
        return received["recv_prev"]

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Receive gradients from the next stage: a tensor for a shape, a list for a list of shapes.

        On the last stage receive nothing, and return None for each tensor.
        """
        if is_last_stage or _is_empty(tensor_shapes):
            return _no_tensors(tensor_shapes)
        received, _ = self._exchange("recv_backward", {}, ("recv_next",), tensor_shapes)
        return received["recv_next"]

    def send_forward(self, output_tensors: Any, is_last_stage: bool) -> None:
        """Send a tensor or a list of tensors to the next stage; on the last stage send nothing."""
        if not is_last_stage:
            self._exchange("send_forward", {"send_next": _without_none(output_tensors)})

    def send_backward(self, input_tensor_grads: Any, is_first_stage: bool) -> None:
        """Send a gradient or a list of gradients to the previous stage; on the first stage send nothing."""
        if not is_first_stage:
            self._exchange("send_backward", {"send_prev": _without_none(input_tensor_grads)})

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        """Send outputs to the next stage and receive their gradients from it: a tensor for a tensor, a list for a list.

        On the last stage transfer nothing, and return None for each output.
        """
        return self._pair("send_forward_recv_backward", "next", output_tensors, tensor_shapes, is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        """Send gradients to the previous stage and receive inputs from it: a tensor for a tensor, a list for a list.

        On the first stage transfer nothing, and return None for each gradient.
        """
        return self._pair("send_backward_recv_forward", "prev", input_tensor_grads, tensor_shapes, is_first_stage)

    def _pair(self, name: str, side: str, sent: Any, shapes: Any, is_edge: bool) -> Any:
        """Send tensors to one neighbour and receive tensors from it: a tensor for a tensor, a list for a list.

        Args:
            side: of the neighbour: ``next`` or ``prev``.
            sent: a tensor, or a list in which None stands for no tensor.
            is_edge: there is no such neighbour: transfer nothing, and return None for each tensor.
        """
        sends, receives = f"send_{side}", f"recv_{side}"
        # One tensor for one shape, or for a list of one shape, is the usual case.
        if not is_edge and isinstance(sent, Tensor) and len(shapes) > 0:
            is_list_of_one = len(shapes) == 1 and type(shapes[0]) is not int
            shape = shapes[0] if is_list_of_one else shapes
            if isinstance(shape, tuple | list) and shape and type(shape[0]) is int:  # one tensor of one shape
                return self._exchange(name, {sends: sent}, (receives,), shape)[0][receives]
        is_list = isinstance(sent, list | tuple)
        expected = [shapes] if len(shapes) == 0 or is_single_shape(shapes) else list(shapes)
        count = len(sent) if is_list else 1
        if is_edge:
            return [None] * min(count, len(expected)) if is_list else None
        if count != len(expected):
            raise ShapeError(f"{name}: {count} tensors to send, but {len(expected)} shapes to receive")
        tensors = _without_none(sent)
        outgoing = {} if tensors is None else {sends: tensors}
        received = self._exchange(name, outgoing, (receives,), expected)[0][receives]
        return received if is_list else received[0]

    def send_forward_recv_forward(
        self, output_tensor: Tensor | None, recv_prev: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send an activation to the next stage; with ``recv_prev`` receive one from the previous stage, and return it.

        With ``overlap_p2p_comm`` wait for nothing, and return (tensor, handles by key).
        """
        name, receives = "send_forward_recv_forward", ("recv_prev",) if recv_prev else ()
        outgoing = {} if output_tensor is None else {"send_next": output_tensor}
        received, handles = self._exchange(name, outgoing, receives, tensor_shape, not overlap_p2p_comm)
        x = received.get("recv_prev")
        return (x, handles) if overlap_p2p_comm else x

    def send_backward_recv_backward(
        self, input_tensor_grad: Tensor | None, recv_next: bool, tensor_shape: Shape, overlap_p2p_comm: bool = False
    ) -> Any:
        """Send a gradient to the previous stage; with ``recv_next`` receive one from the next stage, and return it.

        With ``overlap_p2p_comm`` wait for nothing, and return (tensor, handles by key).
        """
        name, receives = "send_backward_recv_backward", ("recv_next",) if recv_next else ()
        outgoing = {} if input_tensor_grad is None else {"send_prev": input_tensor_grad}
        received, handles = self._exchange(name, outgoing, receives, tensor_shape, not overlap_p2p_comm)
        grad = received.get("recv_next")
        return (grad, handles) if overlap_p2p_comm else grad

    def send_forward_backward_recv_forward_backward(
        self,
        output_tensor: Tensor | None,
        input_tensor_grad: Tensor | None,
        recv_prev: bool,
        recv_next: bool,
        tensor_shape: Shape,
    ) -> tuple[Tensor | None, Tensor | None]:
        """Send an activation forward and a gradient backward, and receive one of each, at once.

        Return (input from the previous stage, gradient from the next stage); None for a tensor that is not received.
        """
        name = "send_forward_backward_recv_forward_backward"
        outgoing = _present(output_tensor, input_tensor_grad)
        received, _ = self._exchange(name, outgoing, _keys(recv_prev, recv_next), tensor_shape)
        return received.get("recv_prev"), received.get("recv_next")


def _present(send_next: Tensor | None, send_prev: Tensor | None) -> dict[str, Tensor]:
    """Return the tensors to send by key, without those that are None."""
    tensors = {"send_next": send_next, "send_prev": send_prev}
    return {key: x for key, x in tensors.items() if x is not None}


def _keys(recv_prev: bool, recv_next: bool) -> tuple[str, ...]:
    """Return the keys of the transfers that are received."""
    return ("recv_prev",) * bool(recv_prev) + ("recv_next",) * bool(recv_next)


def _missing(key: str, dtype: torch.dtype | None) -> RuntimeError:
    """Return Megatron's error of a receive (``recv_prev`` or ``recv_next``) without a dtype, else without a shape."""
    if dtype is None:
        return RuntimeError(f"{'pipeline_dtype' if key == 'recv_prev' else 'dtype'} must be provided if {key} is True")
    common = "Common tensor_shape is (seq_length, micro_batch_size, hidden_size)"
    return RuntimeError(f"tensor_shape must be specified if {key} is True. {common}")


def _without_none(tensors: Any) -> Any:
    """Return a list or tuple of tensors without its None entries, or None if no tensor is left; a tensor as it is."""
    return [x for x in tensors if x is not None] or None if isinstance(tensors, (list, tuple)) else tensors


def _is_empty(shapes: Any) -> bool:
    """Whether ``shapes`` is a list or tuple of no shapes; a ``torch.Size`` is one shape."""
    return not shapes and shapes is not None and not isinstance(shapes, torch.Size)


def _no_tensors(shapes: Any) -> Any:
    """Return the result of a receive on an edge stage: None for a shape, a list of None for a list of shapes."""
    return None if is_single_shape(shapes) else [None] * len(shapes)


def _batched_p2p_ops(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: GroupLike,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> list[Any]:
    """Start up to four transfers as one batch: send_prev, recv_prev, send_next, recv_next; return a list of handles.

    Where both neighbours are one rank the activations (send_next, recv_prev) go first. Received values are written into
    the tensors of the caller.
    """
    neighbours = Neighbours.of(as_group(group, "_batched_p2p_ops"), prev_pipeline_rank, next_pipeline_rank)
    outgoing = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
    expected = {"recv_prev": tensor_recv_prev, "recv_next": tensor_recv_next}
    _, handles = exchange(neighbours, "_batched_p2p_ops", outgoing, expected, batched=True, wait=False)
    return list(handles.values())


def _p2p_ops(
    *,
    tensor_send_prev: Tensor | None,
    tensor_recv_prev: Tensor | None,
    tensor_send_next: Tensor | None,
    tensor_recv_next: Tensor | None,
    group: GroupLike,
    prev_pipeline_rank: int,
    next_pipeline_rank: int,
) -> dict[str, Any]:
    """Start up to four transfers one by one; return handles by ``send_next``, ``recv_prev``, ``send_prev``, ...

    Even stages send before they receive, odd stages receive first. Received values are written into the tensors of the
    caller.
    """
    neighbours = Neighbours.of(as_group(group, "_p2p_ops"), prev_pipeline_rank, next_pipeline_rank)
    outgoing = {"send_next": tensor_send_next, "send_prev": tensor_send_prev}
    expected = {"recv_prev": tensor_recv_prev, "recv_next": tensor_recv_next}
    _, handles = exchange(neighbours, "_p2p_ops", outgoing, expected, batched=False, wait=False)
    return handles
