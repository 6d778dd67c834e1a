"""Point-to-point between pipeline stages: ColossalAI's functions, Megatron-LM's communicator, schedules.

Arguments have one meaning in all modules. ``name`` is the public function that the program called, for errors and
counters. ``neighbours`` are those of this stage. A ``key`` names a transfer from this rank's side: ``send_next`` and
``recv_prev`` carry activations, ``send_prev`` and ``recv_next`` gradients. Dicts of transfers are by key. ``specs``
are the shapes and dtypes of a message's tensors. Ranks are global unless a docstring says "in the group".
"""

from tritoncomm.errors import MismatchError, PeerError
from tritoncomm.p2p.communicator import P2PCommunicator, _batched_p2p_ops, _p2p_ops
from tritoncomm.p2p.hop import check
from tritoncomm.p2p.message import Shape, is_single_shape
from tritoncomm.p2p.stages import (
    recv_backward,
    recv_forward,
    send_backward,
    send_backward_recv_backward,
    send_backward_recv_forward,
    send_forward,
    send_forward_backward_recv_forward_backward,
    send_forward_recv_backward,
    send_forward_recv_forward,
)

__all__ = [
    "MismatchError",
    "P2PCommunicator",
    "PeerError",
    "Shape",
    "_batched_p2p_ops",
    "_p2p_ops",
    "check",
    "is_single_shape",
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
