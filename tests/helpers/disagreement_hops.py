"""Every p2p step of both APIs between two ranks, and for every kind of disagreement how one of them differs."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tritoncomm import collective as c
from tritoncomm import p2p

__all__ = ["ELSEWHERE", "HOP_KINDS", "HOP_ROWS", "hop_steps", "is_named"]

T = torch.ones
SHAPE, OTHER = (4, 2), (2, 3)
HOP_KINDS = (
    "function",
    "order",
    "count",
    "shape",
    "dtype",
    "group",
)  # there is no dim, op or root, nor are there sizes


@dataclass(frozen=True)
class Made:
    """What a rank passes to a step.

    Attributes:
        x: sent.
        shape: expected.
        dtype: of what is expected.
        group: of the stages.
    """

    x: Tensor
    shape: tuple[int, ...]
    dtype: torch.dtype
    group: Any

    @property
    def stages(self) -> Any:
        return p2p.P2PCommunicator(self.group, SimpleNamespace(pipeline_dtype=self.dtype))


Ends = tuple[Callable[[Made], Any], Callable[[Made], Any]]  # of rank 0, the first stage, and of rank 1, the last

MEGATRON: dict[str, Ends] = {
    "send_forward, recv_forward": (
        lambda a: a.stages.send_forward(a.x, False), lambda a: a.stages.recv_forward(a.shape, False)
    ),
    "recv_backward, send_backward": (
        lambda a: a.stages.recv_backward(a.shape, False), lambda a: a.stages.send_backward(a.x, False)
    ),
    "send_forward_recv_backward, send_backward_recv_forward": (
        lambda a: a.stages.send_forward_recv_backward(a.x, a.shape, False),
        lambda a: a.stages.send_backward_recv_forward(a.x, a.shape, False),
    ),
    "send_forward_recv_forward": (lambda a: a.stages.send_forward_recv_forward(a.x, True, a.shape),) * 2,
    "send_backward_recv_backward": (lambda a: a.stages.send_backward_recv_backward(a.x, True, a.shape),) * 2,
    "send_forward_backward_recv_forward_backward": (
        lambda a: a.stages.send_forward_backward_recv_forward_backward(a.x, a.x, True, True, a.shape),
    ) * 2,
    "_batched_p2p_ops": (lambda a: _posted(p2p._batched_p2p_ops, a),) * 2,
    "_p2p_ops": (lambda a: _posted(p2p._p2p_ops, a),) * 2,
}  # fmt: skip
STAGES: dict[str, Ends] = {
    "send_forward, recv_forward": (lambda a: p2p.send_forward(a.x), lambda a: p2p.recv_forward(a.shape, dtype=a.dtype)),
    "recv_backward, send_backward": (
        lambda a: p2p.recv_backward(a.shape, dtype=a.dtype), lambda a: p2p.send_backward(a.x)
    ),
    "send_forward_recv_backward, send_backward_recv_forward": (
        lambda a: p2p.send_forward_recv_backward(a.x, a.shape, dtype=a.dtype),
        lambda a: p2p.send_backward_recv_forward(a.x, a.shape, dtype=a.dtype),
    ),
    "send_forward_recv_forward": (lambda a: p2p.send_forward_recv_forward(a.x, a.shape, dtype=a.dtype),) * 2,
    "send_backward_recv_backward": (lambda a: p2p.send_backward_recv_backward(a.x, a.shape, dtype=a.dtype),) * 2,
    "send_forward_backward_recv_forward_backward": (
        lambda a: p2p.send_forward_backward_recv_forward_backward(a.x, a.x, a.shape, a.shape, dtype=a.dtype),
    ) * 2,
}  # fmt: skip
HOP_ROWS: dict[str, Ends] = {f"P2PCommunicator: {name}": ends for name, ends in MEGATRON.items()} | {
    f"p2p: {name}": ends for name, ends in STAGES.items()
}
ELSEWHERE = {  # public names that are no steps
    "MismatchError": "an error", "PeerError": "an error", "Shape": "a type", "P2PCommunicator": "its methods have rows",
    "check": "turns check mode on", "is_single_shape": "computes",
}  # fmt: skip


def _posted(function: Any, a: Made) -> None:
    """A gradient from rank 1 to rank 0."""
    rank = a.group.rank()
    handles = function(
        tensor_send_prev=a.x if rank else None, tensor_recv_next=None if rank else torch.empty(a.shape, dtype=a.dtype),
        tensor_send_next=None, tensor_recv_prev=None,
        group=a.group, prev_pipeline_rank=1 - rank, next_pipeline_rank=1 - rank,
    )  # fmt: skip
    for each in handles.values() if isinstance(handles, dict) else handles:
        each.wait()


def hop_steps(name: str, kind: str, groups: tuple[Any, Any], rank: int, differs: bool) -> list[Callable[[], Any]]:
    """What a rank does, one step after the other."""
    ends, group = HOP_ROWS[name], groups[0]
    shape = OTHER if differs and kind == "shape" else SHAPE
    dtype = torch.float64 if differs and kind == "dtype" else torch.float32

    def step(over: Any = group) -> Any:
        return ends[rank](Made(T(shape, dtype=dtype), shape, dtype, over))

    def sentinel() -> Any:
        return c.all_reduce(T(3), group)

    if not differs:
        return [step, sentinel]
    return {
        "function": [sentinel], "order": [sentinel, step], "count": [step, step, sentinel],
        "group": [lambda: step(groups[1])],
    }.get(kind, [step, sentinel])  # fmt: skip


def is_named(text: str, kind: str) -> bool:
    """Whether an error names what differs: both shapes, or both dtypes, or two calls that wait for each other."""
    if kind == "shape":
        return str(list(SHAPE)) in text and str(list(OTHER)) in text
    if kind == "dtype":
        return "float32" in text and "float64" in text
    return "wait for each other in different calls" in text
