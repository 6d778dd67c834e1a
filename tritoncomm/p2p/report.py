"""Shapes and dtypes of a p2p step's transfers, for the flight record and for check mode."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.debug.hops import Content
from tritoncomm.p2p.message import Incoming, Spec, Specs, describe, is_one_shape
from tritoncomm.p2p.neighbours import Neighbours

__all__ = ["begin", "contents_of"]

_MAX_SHOWN = 8  # tensors in the words of one message
_SENDS, _RECEIVES = ("send_next", "send_prev"), ("recv_prev", "recv_next")

Raw = tuple[Any, ...]
Pair = tuple[Any, Any]
"""For the next and the previous stage, or from the previous and the next one, as ``hop.exchange`` takes them."""


def begin(neighbours: Neighbours, name: str, sent: Pair, received: Pair, depth: int, variable: bool = False) -> Any:
    """``record.begin`` with what goes where, of which nothing keeps a tensor alive; words are made of it by a dump.

    Args:
        neighbours: of this stage.
        name: the function that was called.
        sent: tensors.
        received: shapes, or tensors.
        depth: frames from this one to the program's, or fewer.
        variable: shapes of what is received are not known.
    """
    (to_next, to_prev), (from_prev, from_next) = sent, received
    transfers = (
        _arguments, neighbours, variable,
        None if to_next is None else _raw(to_next, True), None if to_prev is None else _raw(to_prev, True),
        None if from_prev is None else _raw(from_prev), None if from_next is None else _raw(from_next),
    )  # fmt: skip
    return record.begin(name, "hop", neighbours.group(), None, transfers, depth + 1)


def _arguments(neighbours: Neighbours, variable: bool, *transfers: Raw | None) -> tuple[str, str, list[Any]]:
    """What goes to the other stages, and what comes from them, in words; and both by key, for ``debug.transfers``."""
    given = {key: raw for key, raw in zip(_SENDS + _RECEIVES, transfers, strict=True) if raw}
    sent, received = (
        ", ".join(f"{_in_words(given[key])} {where} rank {neighbours.peer(key)}" for key in keys if key in given)
        for keys, where in ((_SENDS, "to"), (_RECEIVES, "from"))
    )
    listed = [
        [key, neighbours.peer(key), None if variable and key in _RECEIVES else [_spec(each) for each in raw]]
        for key, raw in given.items()
    ]
    return sent, received, listed


def _spec(each: Any) -> list[Any]:
    """Shape and dtype; None for what is not known."""
    if isinstance(each, str) or not all(hasattr(size, "__index__") for size in each[0]):
        return [None, None]
    return [[index(size) for size in each[0]], each[1]]


def _raw(x: Any, is_sent: bool = False) -> Raw:
    """Shape and dtype of every tensor, or the shapes, of any caller, before they are checked."""
    kind = type(x)
    if kind is torch.Size:
        return ((x, None),)
    if isinstance(x, Tensor):
        return (_of_tensor(x),)
    if not isinstance(x, list | tuple):
        return (str(x),)
    if not is_sent and is_one_shape(x):
        return ((tuple(x), None),)
    return tuple(
        _of_tensor(each) if isinstance(each, Tensor)
        else (tuple(each), None) if isinstance(each, list | tuple) else str(each)
        for each in x
    )  # fmt: skip


def _of_tensor(x: Tensor) -> Any:
    try:
        return x.shape, x.dtype
    except RuntimeError:  # a nested tensor, which is refused
        return type(x).__name__


def _in_words(raw: Raw) -> str:
    def word(each: Any) -> str:
        if isinstance(each, str):
            return each
        return f"{list(each[0])}" if each[1] is None else describe([each])

    shown = [word(each) for each in raw[:_MAX_SHOWN]]
    return ", ".join(shown + [f"and {len(raw) - _MAX_SHOWN} more"] * (len(raw) > _MAX_SHOWN)) or "nothing"


def _of_any_shapes(count: int, dtype: torch.dtype | None) -> Content:
    return Content(f"{count} of {str(dtype).removeprefix('torch.')}, any shapes", None, count, str(dtype))


def contents_of(sends: dict[str, Specs], receives: dict[str, Incoming]) -> dict[str, Content]:
    """What both ends of every transfer compare in check mode."""

    def listed(specs: Sequence[Spec]) -> list[Any]:
        return [[list(shape), str(dtype)] for shape, dtype in specs]

    contents = {key: Content(describe(specs), listed(specs)) for key, specs in sends.items()}
    for key, each in receives.items():
        if each.specs is not None:
            contents[key] = Content(describe(each.specs), listed(each.specs), each.count)
        else:
            contents[key] = _of_any_shapes(each.count, each.dtype)
    return contents
