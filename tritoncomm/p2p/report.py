"""What a p2p step sends and expects, for the flight record and for check mode."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tritoncomm import record, variables
from tritoncomm.debug.hop_windows import fold_hop
from tritoncomm.debug.hops import Content
from tritoncomm.p2p import header
from tritoncomm.p2p.message import Incoming, Spec, describe, is_one_shape
from tritoncomm.p2p.neighbours import Neighbours

__all__ = ["begin", "contents_of"]

_MAX_SHOWN = 8  # tensors in the words of one message

Raw = tuple[Any, ...]


class _Listed:
    """What goes to the other stages, or comes from them; words are made of it only where the record is written."""

    __slots__ = ("_neighbours", "_to", "_transfers")

    def __init__(self, neighbours: Neighbours, to: str, transfers: list[tuple[str, Raw]]) -> None:
        self._neighbours, self._to, self._transfers = neighbours, to, transfers

    def __str__(self) -> str:
        return ", ".join(f"{_in_words(raw)} {self._to} rank {self._neighbours.peer(k)}" for k, raw in self._transfers)


def begin(
    neighbours: Neighbours,
    name: str,
    to_next: Any,
    to_prev: Any,
    from_prev: Any,
    from_next: Any,
    dtype: torch.dtype | None,
    variable: bool,
) -> Any:
    """``record.begin`` with what goes where, of which nothing keeps a tensor alive; in hash mode it is compared."""
    sends: list[tuple[str, Raw]] = []
    receives: list[tuple[str, Raw]] = []
    if to_next is not None:
        sends.append(("send_next", _raw(to_next)))
    if to_prev is not None:
        sends.append(("send_prev", _raw(to_prev)))
    if from_prev is not None:
        receives.append(("recv_prev", _raw(from_prev)))
    if from_next is not None:
        receives.append(("recv_next", _raw(from_next)))
    words = _Listed(neighbours, "to", sends) if sends else "", _Listed(neighbours, "from", receives) if receives else ""
    opened = record.begin(name, "hop", neighbours.group(), None, words)
    if variables.HASH.value and not neighbours.is_single_rank:
        transfers = [(key, (raw, dtype, variable and key.startswith("recv"))) for key, raw in sends + receives]
        fold_hop(neighbours, name, transfers, _content)
    return opened


def _raw(x: Any) -> Raw:
    """Shape and dtype of every tensor, or the shapes, of any caller, before they are checked."""
    if isinstance(x, Tensor):
        return ((x.shape, x.dtype),)
    if not isinstance(x, list | tuple):
        return (str(x),)
    if is_one_shape(x):
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
    if any_shapes and not any(isinstance(each, tuple) and each[1] is not None for each in raw):
        return _of_any_shapes(len(raw), dtype)
    specs = [each if isinstance(each, str) else [list(each[0]), str(each[1] or dtype)] for each in raw]
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
