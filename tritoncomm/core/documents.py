"""Documents of a packed batch: those of one length are computed together, as rows of one batch.

Calls of a function then grow with the number of different lengths, not with that of the documents. Each tensor is
copied once in the order of the groups, and the result once back, unless the documents are in that order.
"""

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function
from torch.compiler import is_compiling

from tritoncomm.core.plan import Ints

__all__ = ["Document", "DocumentGroups", "group_documents"]


class Document(NamedTuple):
    """Place of a document in a batch whose rows stand one behind the other."""

    start: int
    length: int


class DocumentGroups(NamedTuple):
    """Documents of a batch ``[b, S]`` by length.

    Attributes:
        shape: rows and positions ``(b, S)``.
        groups: number of documents and their length, for each length.
        order: for each position of the groups its position in the batch, ``[b*S]``; None if they are the same.
        inverse: for each position of the batch its position in the groups.
    """

    shape: tuple[int, int]
    groups: tuple[tuple[int, int], ...]
    order: Tensor | None = None
    inverse: Tensor | None = None

    def split(self, x: Tensor, batch: int, positions: int) -> list[Tensor]:
        """Return a tensor for each group, with its documents in dim ``batch`` and their positions in ``positions``."""
        flat = x.movedim((batch, positions), (0, 1)).flatten(0, 1)
        if self.order is not None and self.inverse is not None:
            flat = _Reordered.apply(flat, self.order, self.inverse)
        parts = flat.split([count * length for count, length in self.groups])
        return [
            part.unflatten(0, group).movedim((0, 1), (batch, positions))
            for part, group in zip(parts, self.groups, strict=True)
        ]

    def join(self, parts: Sequence[Tensor], batch: int, positions: int) -> Tensor:
        """Return the batch of tensors that ``split`` has made, or of results with as many documents and positions."""
        flat = [part.movedim((batch, positions), (0, 1)).flatten(0, 1) for part in parts]
        rows = torch.cat(flat) if len(flat) > 1 else flat[0]
        if self.order is not None and self.inverse is not None:
            rows = _Reordered.apply(rows, self.inverse, self.order)
        return rows.unflatten(0, self.shape).movedim((0, 1), (batch, positions))


class _Reordered(Function):
    """Rows of a tensor by a permutation; backward is a gather, too, where that of ``index_select`` adds atomically."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, index: Tensor, inverse: Tensor) -> Tensor:
        ctx.save_for_backward(index, inverse)
        return x.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        index, inverse = ctx.saved_tensors
        return _Reordered.apply(grads[0], inverse, index), None, None


def group_documents(rows: tuple[Ints, ...], batch: int, device: torch.device) -> DocumentGroups:
    """Return the groups of documents; layers of a batch get the same ones.

    Args:
        rows: starts of the documents, and the end; of all rows of the batch, or of each.
        device: of the tensors that are split. To copy an index to a GPU the host waits, once for a batch.
    """
    return _make_groups(rows, batch, device) if is_compiling() else _kept_groups(rows, batch, device)


@lru_cache(maxsize=4)  # 8 bytes of the device for each position and entry
def _kept_groups(rows: tuple[Ints, ...], batch: int, device: torch.device) -> DocumentGroups:
    """Make the groups of a batch, whose indices may be kept for a backward."""
    with torch.inference_mode(mode=False):
        return _make_groups(rows, batch, device)


def _make_groups(rows: tuple[Ints, ...], batch: int, device: torch.device) -> DocumentGroups:
    """Group the documents by length, in the order in which the lengths first come.

    Args:
        rows: starts of the documents and the end, of all rows of the batch or of each.
    """
    length = rows[0][-1]
    by_length: dict[int, list[Document]] = {}
    for row, stops in enumerate(rows * batch if len(rows) == 1 else rows):
        for start, stop in pairwise(stops):
            by_length.setdefault(stop - start, []).append(Document(row * length + start, stop - start))
    groups = tuple([(len(documents), size) for size, documents in by_length.items()])
    documents = [document for of_length in by_length.values() for document in of_length]
    if all(a.start < b.start for a, b in pairwise(documents)):
        return DocumentGroups((batch, length), groups)
    order = torch.cat([torch.arange(start, start + size) for start, size in documents])
    inverse = torch.empty_like(order).scatter_(0, order, torch.arange(len(order)))
    indices = [index.to(torch.int32).to(device) for index in (order, inverse)]
    return DocumentGroups((batch, length), groups, *indices)
