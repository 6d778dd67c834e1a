"""Every method of a communicator, in every mode."""

import itertools
from types import SimpleNamespace
from typing import Any

import torch
from bits import bits
from stage_cases import SHAPES, made, strided
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.p2p import P2PCommunicator

__all__ = ["MODES", "communicator", "run_methods", "same"]

MODES: dict[str, dict[str, Any]] = {
    "batched": {},
    "individual": {"batch_p2p_comm": False},
    "varying": {"variable_seq_lengths": True},
    "varying-individual": {"mtp_standalone": True, "batch_p2p_comm": False},
}


def communicator(group: ProcessGroup, dtype: str = "float32", **settings: Any) -> P2PCommunicator:
    return P2PCommunicator(group, SimpleNamespace(pipeline_dtype=getattr(torch, dtype), **settings))


def same(received: Any, expected: Tensor, what: Any) -> None:
    assert isinstance(received, Tensor), (what, received)
    assert (received.shape, received.dtype) == (expected.shape, expected.dtype), (what, received.shape)
    assert torch.equal(bits(received), bits(expected)), what
    assert received.is_leaf
    assert received._base is None
    assert received.requires_grad == (expected.is_floating_point() or expected.is_complex())


def run_methods(group: ProcessGroup, mode: str, dtypes: tuple[str, ...]) -> None:
    stage, stages = group.rank(), group.size()
    first, last = stage == 0, stage == stages - 1
    before, after = (stage - 1) % stages, (stage + 1) % stages
    for dtype, shape in itertools.product(dtypes, SHAPES):
        c = communicator(group, dtype, **MODES[mode])
        what = (mode, dtype, shape)

        def act(rank: int, *sizes: int, kind: str = dtype, shape: tuple[int, ...] = shape) -> Tensor:
            return made(rank, sizes or shape, kind)

        def grad(rank: int, kind: str = dtype, shape: tuple[int, ...] = shape) -> Tensor:
            return made(rank, shape, kind, 2)

        out, back = strided(act(stage)), strided(grad(stage))
        size = torch.Size(shape)
        x = c.recv_forward(size, first)
        c.send_forward(out, last)
        dx = c.recv_backward(size, last)
        c.send_backward(back, first)
        for received, edge, expected in ((x, first, act(before)), (dx, last, grad(after))):
            if edge:
                assert received is None
            else:
                same(received, expected, what)
        if stage % 2 == 0:
            dx = c.send_forward_recv_backward(out, size, last)
            assert (dx is None) == last
            if dx is not None:
                same(dx, grad(after), what)
        else:
            same(c.send_backward_recv_forward(back, size, first), act(before), what)
        same(c.send_forward_recv_forward(out, True, size), act(before), what)
        same(c.send_backward_recv_backward(back, True, size), grad(after), what)
        x, dx = c.send_forward_backward_recv_forward_backward(out, back, True, True, size)
        same(x, act(before), what)
        same(dx, grad(after), what)
        assert c.send_forward_backward_recv_forward_backward(None, None, False, False, size) == (None, None)
        if not MODES[mode].get("batch_p2p_comm", True):
            x, handles = c.send_forward_recv_forward(out, True, size, overlap_p2p_comm=True)
            dx, more = c.send_backward_recv_backward(back, True, size, overlap_p2p_comm=True)
            keys = set() if torch.Size(shape).numel() == 0 else {"send_next", "recv_prev"}
            assert set(handles) == keys
            for handle in (*more.values(), *handles.values()):
                handle.wait()
            same(x, act(before), what)
            same(dx, grad(after), what)
        x = c.recv_forward([size, (2, 3)], first)
        c.send_forward([out, act(stage, 2, 3)], last)
        if first:
            assert x == [None, None]
        else:
            same(x[0], act(before), what)
            same(x[1], act(before, 2, 3), what)
        if stage % 2 == 0:
            grads = c.send_forward_recv_backward([out], [size], last)
            assert last or torch.equal(bits(grads[0]), bits(grad(after)))
        else:
            same(c.send_backward_recv_forward([back], [size], first)[0], act(before), what)
