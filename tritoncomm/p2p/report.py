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

    __slots__ = ("_by_rank", "_to")

    def __init__(self, to: str, by_rank: list[tuple[int, Raw]]) -> None:
        self._to, self._by_rank = to, by_rank

    def __str__(self) -> str:
        return ", ".join(f"{_in_words(raw)} {self._to} rank {rank}" for rank, raw in self._by_rank)


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
    sends = [(key, _raw(x)) for key, x in (("send_next", to_next), ("send_prev", to_prev)) if x is not None]
    receives = [(key, _raw(x)) for key, x in (("recv_prev", from_prev), ("recv_next", from_next)) if x is not None]
    arguments = tuple(
        _Listed(to, [(neighbours.peer(key), raw) for key, raw in each])
        for to, each in (("to", sends), ("from", receives))
    )
    opened = record.begin(name, "hop", neighbours.group(), None, arguments)
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
