"""What a p2p step sends and expects, for the flight record and for check mode."""

from collections.abc import Sequence
from operator import index
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.debug.hop_windows import fold_hop
from tritoncomm.debug.hops import Content
from tritoncomm.p2p import header
from tritoncomm.p2p.message import Incoming, Spec, describe, is_one_shape
from tritoncomm.p2p.neighbours import Neighbours

__all__ = ["begin", "contents_of", "fold"]

_MAX_SHOWN = 8  # tensors in the words of one message
_SENDS, _RECEIVES = ("send_next", "send_prev"), ("recv_prev", "recv_next")

Raw = tuple[Any, ...]
Pair = tuple[Any, Any]
"""For the next and the previous stage, or from the previous and the next one, as ``hop.exchange`` takes them."""


class _Listed:
    """What goes to the other stages, or comes from them; words are made of it only where the record is written."""

    __slots__ = ("_neighbours", "_to", "_transfers")

    def __init__(self, neighbours: Neighbours, to: str, transfers: list[tuple[str, Raw]]) -> None:
        self._neighbours, self._to, self._transfers = neighbours, to, transfers

    def __str__(self) -> str:
        return ", ".join(f"{_in_words(raw)} {self._to} rank {self._neighbours.peer(k)}" for k, raw in self._transfers)


def begin(neighbours: Neighbours, name: str, sent: Pair, received: Pair) -> Any:
    """``record.begin`` with what goes where, of which nothing keeps a tensor alive."""
    sends, receives = _transfers(_SENDS, sent), _transfers(_RECEIVES, received)
    words = _Listed(neighbours, "to", sends) if sends else "", _Listed(neighbours, "from", receives) if receives else ""
    return record.begin(name, "hop", neighbours.group(), None, words)


def fold(
    neighbours: Neighbours,
    name: str,
    sent: Pair,
    received: Pair,
    dtype: torch.dtype | None = None,
    variable: bool = False,
) -> None:
    """In hash mode: note the transfers of a step that has been made.

    Not before: one whose arguments are refused has no other end, and may be repeated with right ones.
    """
    if not neighbours.is_single_rank:
        sends, receives = _transfers(_SENDS, sent), _transfers(_RECEIVES, received)
        transfers = [(key, (raw, dtype, False)) for key, raw in sends]
        transfers += [(key, (raw, dtype, variable)) for key, raw in receives]
        fold_hop(neighbours, name, transfers, _content)


def _transfers(keys: tuple[str, str], pair: Pair) -> list[tuple[str, Raw]]:
    """What there is of both directions; a list of no tensors, or of no shapes, is nothing."""
    return [(key, raw) for key, x in zip(keys, pair, strict=True) if x is not None and (raw := _raw(x, keys is _SENDS))]


def _raw(x: Any, is_sent: bool) -> Raw:
    """Shape and dtype of every tensor, or the shapes, of any caller, before they are checked."""
    if isinstance(x, Tensor):
        return ((x.shape, x.dtype),)
    if not isinstance(x, list | tuple):
        return (str(x),)
    if not is_sent and is_one_shape(x):
        return ((tuple(x), None),)
    return tuple(
        (each.shape, each.dtype) if isinstance(each, Tensor)
        else (tuple(each), None) if isinstance(each, list | tuple) else str(each)
        for each in x
    )  # fmt: skip


def _in_words(raw: Raw) -> str:
    def word(each: Any) -> str:
        if isinstance(each, str):
            return each
        return f"{list(each[0])}" if each[1] is None else describe([each])

    shown = [word(each) for each in raw[:_MAX_SHOWN]]
    return ", ".join(shown + [f"and {len(raw) - _MAX_SHOWN} more"] * (len(raw) > _MAX_SHOWN)) or "nothing"


def _content(transfer: tuple[Raw, Any, bool]) -> Content:
    """What one end of a transfer without a header sends or expects, or with one that alone has the shapes."""
    raw, dtype, any_shapes = transfer
    if any_shapes and not any(each[1] is not None for each in raw):
        return _of_any_shapes(len(raw), dtype)
    specs = [[[int(index(size)) for size in shape], str(own or dtype)] for shape, own in raw]
    return Content(_in_words(raw), specs, len(raw))


def _of_any_shapes(count: int, dtype: torch.dtype | None) -> Content:
    return Content(f"{count} of {str(dtype).removeprefix('torch.')}, any shapes", None, count, str(dtype))


def contents_of(sends: dict[str, header.Contents], receives: dict[str, Incoming]) -> dict[str, Content]:
    """What both ends of every transfer compare in check mode."""

    def listed(specs: Sequence[Spec]) -> list[Any]:
        return [[list(shape), str(dtype)] for shape, dtype in specs]

    contents = {key: Content(describe(each.specs), listed(each.specs)) for key, each in sends.items()}
    for key, each in receives.items():
        if each.specs is not None:
            contents[key] = Content(describe(each.specs), listed(each.specs), each.count)
        else:
            contents[key] = _of_any_shapes(each.count, each.dtype)
    return contents
