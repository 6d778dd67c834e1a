"""What a p2p step sends and expects, for the flight record and for check mode."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tritoncomm import record
from tritoncomm.debug.hops import Content
from tritoncomm.p2p import header
from tritoncomm.p2p.message import Incoming, Spec, describe, spec_of
from tritoncomm.p2p.neighbours import Neighbours

__all__ = ["begin", "contents_of"]


def begin(neighbours: Neighbours, name: str, to_next: Any, to_prev: Any, from_prev: Any, from_next: Any) -> Any:
    """``record.begin`` with what goes where, in words: nothing that keeps a tensor alive."""
    sends = {rank: x for rank, x in ((neighbours.next, to_next), (neighbours.prev, to_prev)) if x is not None}
    receives = {rank: x for rank, x in ((neighbours.prev, from_prev), (neighbours.next, from_next)) if x is not None}
    words = tuple(
        ", ".join(f"{_in_words(x)} {to} rank {rank}" for rank, x in each.items())
        for to, each in (("to", sends), ("from", receives))
    )
    return record.begin(name, "hop", neighbours.group(), None, words)


def _in_words(x: Any) -> str:
    """Tensors or shapes of any caller, before they are checked."""
    if isinstance(x, Tensor):
        return describe([spec_of(x)])
    if isinstance(x, list | tuple) and x and isinstance(x[0], Tensor):
        return describe([spec_of(each) for each in x if isinstance(each, Tensor)])
    return f"{list(x)}" if isinstance(x, list | tuple) else str(x)


def contents_of(sends: dict[str, header.Contents], receives: dict[str, Incoming]) -> dict[str, Content]:
    """What both ends of every transfer compare in check mode."""

    def listed(specs: Sequence[Spec]) -> list[Any]:
        return [[list(shape), str(dtype)] for shape, dtype in specs]

    contents = {key: Content(describe(each.specs), listed(each.specs)) for key, each in sends.items()}
    for key, each in receives.items():
        if each.specs is not None:
            contents[key] = Content(describe(each.specs), listed(each.specs), each.count)
        else:
            words = f"{each.count} of {str(each.dtype).removeprefix('torch.')}, any shapes"
            contents[key] = Content(words, None, each.count, str(each.dtype))
    return contents
