"""Notes of ``shard_batch`` on the tensors that it makes, for the layers that get them, or slices of their rows."""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling

from tritoncomm.errors import ArgumentError

__all__ = ["BatchNotes", "mask_note_of", "notes_of", "whole_of", "write_mask_note", "write_notes", "write_whole"]

_NOTES, _MADE = "tritoncomm_batch", "tritoncomm_mask"  # attributes of a tensor and of its storage
_WHOLE = "tritoncomm_whole"  # of a tensor


@dataclass(frozen=True, eq=False)
class BatchNotes:
    """Shard of a batch, as layers need it beside their tensors.

    Attributes:
        shape: rows and positions of this rank, ``(b, s)``; None where ``shard_batch`` did not make the batch.
        group: name of the sequence group.
        documents: global starts of packed documents, of each row; None for one document in each.
        columns: this rank's columns of the padding mask, ``[b, s]``; None without padding.
        padded: positions added to a sequence without a mask.
        largest: largest position of each row ``[b]``, without those added; None without positions.
        counted: positions ``[b, s]`` that count no padding, -1 at padding; None without a mask, or with positions of
            the caller.
        layer_mask: mask of this rank's positions ``[b, s]`` that models hand to recurrent layers; it has these notes,
            too, but for itself.
    """

    shape: tuple[int, int] | None = None
    group: str | None = None
    documents: list[list[int]] | None = None
    columns: Tensor | None = None
    padded: int = 0
    largest: Tensor | None = None
    counted: Tensor | None = None
    layer_mask: Tensor | None = None
    _selections: "dict[tuple[int, ...], BatchNotes]" = field(default_factory=dict, repr=False)

    def select(self, rows: tuple[int, ...]) -> "BatchNotes":
        """Return the notes of some rows, made once."""
        if rows not in self._selections:
            documents = None if self.documents is None else [self.documents[row] for row in rows]
            if documents is not None and all(len(starts) == 1 for starts in documents):
                documents = None
            notes = replace(
                self, shape=(len(rows), self.shape[1] if self.shape else 0), documents=documents,
                columns=_take(self.columns, rows), largest=_take(self.largest, rows), counted=None, layer_mask=None,
                _selections={},
            )  # fmt: skip
            # The mask and the positions of these rows carry notes, too, so ``complete`` adds them.
            mask = _take(self.layer_mask, rows)
            counted = _take(self.counted, rows)
            self._selections[rows] = notes if mask is None else notes.complete(mask, counted)
        return self._selections[rows]

    def complete(self, layer_mask: Tensor, counted: Tensor | None) -> "BatchNotes":
        """Return these notes with a mask for recurrent layers and positions without padding, which get them, too."""
        # The notes of a tensor do not have this tensor: a storage that keeps itself alive is never freed.
        write_notes(layer_mask, self)
        notes = replace(self, layer_mask=layer_mask, _selections={})
        if counted is not None:
            write_notes(counted, notes)
        return replace(notes, counted=counted, _selections={})


def write_notes(x: Tensor, notes: BatchNotes) -> None:
    """Write notes on a contiguous tensor ``[..., b, s]``, where torch.compile sees them, and on its storage."""
    setattr(x, _NOTES, notes)
    setattr(x.untyped_storage(), _NOTES, notes)


def notes_of(x: Any, label: str) -> BatchNotes | None:
    """Return the notes on a tensor, or on the tensor that it is a view of; None without any.

    A slice of rows gets the notes of its rows. Other views are rejected, as they have other positions. torch.compile
    sees a tensor's own notes alone, so that views there have none.
    """
    if not isinstance(x, Tensor):
        return None
    if is_compiling():
        return getattr(x, _NOTES, None)
    notes = getattr(x.untyped_storage(), _NOTES, None)
    if notes is None or notes.shape is None:  # no notes, or of a batch that shard_batch did not make: nothing to select
        return notes
    rows = _rows(x, *notes.shape)
    if rows is None:
        raise ArgumentError(
            f"{label}: a view {list(x.shape)} of a tensor {list(notes.shape)} of shard_batch that is no slice of its "
            "rows; rows, x[a:b], count as a batch of their own, and columns cannot: other ranks have the rest"
        )
    return notes if rows == tuple(range(notes.shape[0])) else notes.select(rows)


def write_mask_note(mask: Tensor, value: Any) -> None:
    """Write on a mask that this library has made what it is, where torch.compile sees it, and on its storage."""
    for holder in (mask, mask.untyped_storage()):
        setattr(holder, _MADE, value)


def mask_note_of(mask: Any) -> Any:
    """Return the note of ``write_mask_note`` on a mask, or on one that it is a view of; None on masks of others."""
    if not isinstance(mask, Tensor):
        return None
    return getattr(mask if is_compiling() else mask.untyped_storage(), _MADE, None)


def write_whole(shard: Tensor, *whole: Any) -> None:
    """Write on the labels of a shard the labels of all positions as the caller passed them, for a trainer's loss."""
    setattr(shard, _WHOLE, whole)


def whole_of(x: Any) -> tuple[Any, ...]:
    """Return the labels of all positions of which a tensor is the part of a shard; none of other tensors."""
    return getattr(x, _WHOLE, ())


def _rows(x: Tensor, num_rows: int, positions: int) -> tuple[int, ...] | None:
    """Return the rows that a view ``[..., rows, positions]`` has of a contiguous ``[..., num_rows, positions]``.

    None for a view that has no whole rows, or other rows in each of its first dims.

    Example:
        ``x[1::2]`` of 5 rows of 8 positions begins at element 8 with a stride of 16: row 1, and steps of 2 rows.
    """
    if x.dim() == 0 or x.shape[-1] != positions:
        return None
    if x.numel() == 0:
        return tuple(range(num_rows)) if positions == 0 else ()
    strides = tuple(map(int, x.stride()))
    plane = num_rows * positions  # elements of all rows, for one index of the first dims
    count, row_stride = (x.shape[-2], strides[-2]) if x.dim() > 1 else (1, 0)
    # The view begins in row ``first``, at ``column``, and goes on by ``step`` rows and ``columns``.
    first, column = divmod(int(x.storage_offset()) % plane, positions)
    step, columns = divmod(row_stride, positions) if count > 1 else (0, 0)
    # Strides of dims of one element mean nothing.
    has_whole_rows = column == columns == 0 and (positions == 1 or strides[-1] == 1)
    first_dims = zip(x.shape[:-2], strides, strict=False)
    has_same_rows = all(size == 1 or stride % plane == 0 for size, stride in first_dims)
    if not has_whole_rows or not has_same_rows or first + (count - 1) * step >= num_rows:
        return None
    return tuple(first + index * step for index in range(count))


def _take(x: Tensor | None, rows: tuple[int, ...]) -> Tensor | None:
    """Copy some rows of a tensor; on a GPU the host does not wait."""
    if x is None or not rows:
        return None if x is None else x[:0].clone()
    if rows == tuple(range(rows[0], rows[-1] + 1)):
        return x[rows[0] : rows[-1] + 1].clone()
    return torch.stack([x[row] for row in rows])
