"""The hop that almost every call is: one tensor at most each way, of known shape, without a header."""

from typing import Any

import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.core.backend import special
from tritoncomm.core.ops import path_for
from tritoncomm.p2p.message import stage
from tritoncomm.p2p.neighbours import Line
from tritoncomm.p2p.transport import keep, move, post

__all__ = ["Result", "exchange_plain"]

Result = tuple[Tensor | None, Tensor | None, Any]


def exchange_plain(
    line: Line,
    name: str,
    to_next: Any,
    to_prev: Any,
    from_prev: Any,
    from_next: Any,
    dtype: torch.dtype | None,
    device: torch.device | str | None,
    batched: bool = True,
    wait: bool = True,
) -> Result | None:
    """``engine.exchange`` of plain tensors, at a fraction of its host time.

    Args:
        line: two neighbours other than this rank.
        name: the function a caller knows, for errors and the record.
        to_next: what is sent to the stage after.
        to_prev: what is sent to the stage before.
        from_prev: shape of what comes from the stage before; None for nothing.
        from_next: shape of what comes from the stage after.
        dtype: of what comes.
        device: where it lives.
        batched: post all transfers as one batch, or one by one.
        wait: for all of them, else hand out their handles.

    Returns:
        (from the stage before, from the stage after, handles), or None for what only ``engine.exchange`` does: dtypes
        that no backend moves, single elements, empty tensors, bad arguments. Nothing has been sent then.
    """
    started, tensors, sent, path, moved = record.now(), {}, 0, "view", 0
    for key, x in (("send_next", to_next), ("send_prev", to_prev)):
        if x is None:
            continue
        if not isinstance(x, Tensor) or x.dtype in special or x.numel() < 2:
            return None  # one element may carry a lazy negative bit
        if x.is_contiguous():
            if not wait:
                x = x.detach()  # the caller may give x other memory before the handle is done
        elif path_for(x) == "torch" and not x.is_neg():
            x, path, moved = x.detach().contiguous(), "torch", moved + 2 * x.nbytes
        else:
            staged = stage([x])
            x, path, moved = staged.wire, staged.path, moved + staged.moved
        tensors[key] = x
        sent += x.nbytes
    before = after = None
    if from_prev is not None or from_next is not None:
        if dtype is None or dtype in special:
            return None
        wanted = dtype.is_floating_point
        try:
            if from_prev is not None:
                before = torch.empty(from_prev, dtype=dtype, device=device, requires_grad=wanted)
                tensors["recv_prev"] = before
            if from_next is not None:
                after = torch.empty(from_next, dtype=dtype, device=device, requires_grad=wanted)
                tensors["recv_next"] = after
        except (RuntimeError, TypeError):
            return None  # the general form says what is wrong with a shape
        if (from_prev is not None and 0 in from_prev) or (from_next is not None and 0 in from_next):
            return None
    handles: Any = None
    if not wait:
        handles = post(line, name, tensors, batched)
        keep(handles.values())
    elif tensors:
        move(line, name, tensors, batched)
    else:
        handles = [] if batched else {}
    record.add(name, path, moved, sent, started)
    return before, after, handles
