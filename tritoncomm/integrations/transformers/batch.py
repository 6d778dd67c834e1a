"""Batches over sequence shards: ``shard_batch`` cuts a batch that all ranks have, and notes what its layers need."""

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import variables
from tritoncomm.core.agreement import agree
from tritoncomm.core.validation import PerGroup
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from tritoncomm.groups import resolve_sequence
from tritoncomm.integrations.transformers.batch_notes import BatchNotes, write_notes

__all__ = [
    "BOUNDARIES", "IGNORED", "CountedLabels", "NotedPositions", "ShardSpan", "check_same", "counted_labels",
    "documents_of", "is_compared", "is_text", "next_labels", "noted_positions", "shard_batch", "text_of",
]  # fmt: skip

IGNORED = -100
_SHARDED = ("input_ids", "position_ids", "attention_mask", "labels", "shift_labels")
# What collators add for packed documents; a shard has none, as the documents are noted for all positions.
BOUNDARIES = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_MEDIA = ("pixel", "image", "video", "audio", "input_features")  # parts of names of what processors add for them
_compared: PerGroup[set[str]] = PerGroup()  # kinds of batches that the ranks of a group have compared


def shard_batch(
    batch: Mapping[str, Any], group: ProcessGroup | None = None, *, pad_token_id: int = 0
) -> dict[str, Any]:
    """Return this rank's shard of a batch that every rank has in full, as arguments of a causal language model.

    The sequence is padded at its end to a multiple of the ranks; in a causal model no earlier token sees the padding.
    All ranks of the group call. In the first call they compare their batches: 24 bytes per rank, on a GPU one copy to
    the host. In check mode they do so in every call.

    Args:
        batch: ``input_ids`` ``[b, S]`` and, where they exist, ``labels`` or ``shift_labels``, ``position_ids``,
            ``attention_mask`` ``[b, S]`` and ``num_items_in_batch``, a count of labels after the shift. Position ids
            that start again are packed documents, unless there is an attention mask; or a collator says where they
            start: ``seq_idx`` ``[b, S]``, numbers of documents, or ``cu_seq_lens_q``, their boundaries ``0, ..., S``
            in a batch of one row. Without position ids they then start again. With multimodal rotary embeddings
            position ids may be ``[3, b, S]``, or ``[4, b, S]``: then index 0 has the text's, and documents are where
            these start again.
        group: the ranks; the tensor group by default, unless there is a context axis.
        pad_token_id: the token at padded positions.

    Returns:
        ``input_ids`` and global ``position_ids`` ``[b, s]``. With labels: ``shift_labels`` ``[b, s]``, the label of
        each position's successor; ``labels``, which makes the model compute its loss; ``num_items_in_batch``, the
        labels of all ranks: the losses of the ranks add up to the mean over the batch. ``attention_mask`` as it was,
        or ones for packed sequences over several ranks. Masks have all positions, because layers attend to all.

    Raises:
        ArgumentError: an entry that cannot be sharded.
        MismatchError: the ranks of the group have different batches; on every rank, where they compare.
        ShapeError: an entry of another shape than ``input_ids``.
        UnsupportedError: an entry of images, videos or audio.
    """
    name = "shard_batch"
    group = resolve_sequence(group, name)
    _check_batch(batch, group, name)
    ids = batch["input_ids"]
    span = ShardSpan.of(ids.shape[1], group)
    mask = batch.get("attention_mask")
    documents = documents_of(batch, name) if mask is None else None
    out: dict[str, Any] = {"input_ids": span.cut(ids, pad_token_id)}
    positions = _positions(batch, ids.shape[1] + span.padding, documents)
    is_counted = batch.get("position_ids") is None
    placed = noted_positions(positions, mask, span, group, documents, is_counted=is_counted)
    out["position_ids"] = placed.ids
    if placed.mask is not None:
        out["attention_mask"] = placed.mask
    counted = counted_labels(batch, documents, name)
    if counted is not None:
        out["shift_labels"] = out["labels"] = span.cut(counted.labels, IGNORED)
        out["num_items_in_batch"] = counted.count
    return out


class ShardSpan(NamedTuple):
    """Positions of this rank, of a sequence that is padded at its end to a multiple of the ranks.

    Attributes:
        padding: number of positions that are added.
    """

    start: int
    end: int
    padding: int

    @classmethod
    def of(cls, length: int, group: ProcessGroup) -> "ShardSpan":
        """Return this rank's span of a sequence."""
        size, rank = group.size(), group.rank()
        run = -(-length // size)
        return cls(rank * run, (rank + 1) * run, size * run - length)

    def cut(self, x: Tensor, value: float) -> Tensor:
        """Return this rank's positions of ``x`` ``[b, S, ...]``, padded with ``value``."""
        part = x[:, self.start : self.end]
        missing = self.end - self.start - part.shape[1]
        if missing:
            return F.pad(part, (0, 0) * (x.dim() - 2) + (0, missing), value=value)
        return part.clone(memory_format=torch.contiguous_format)  # nobody keeps the rest


class NotedPositions(NamedTuple):
    """Position ids of this rank, with the notes of its batch.

    Attributes:
        mask: padding mask of all positions; None without one.
    """

    ids: Tensor
    mask: Tensor | None


def noted_positions(
    positions: Tensor,
    mask: Tensor | None,
    span: ShardSpan,
    group: ProcessGroup,
    documents: list[list[int]] | None,
    *,
    is_counted: bool,
    is_hidden: bool = False,
) -> NotedPositions:
    """Return this rank's position ids with the notes of its batch, and the padding mask of all positions.

    Args:
        positions: of all positions, those of the padding, too ``[.., b, S + more]``.
        mask: padding mask ``[b, S]``.
        is_counted: whether the model may count positions by the mask, from 0 at the first one that is no padding.
        is_hidden: whether masks of the caller, of another kind than ``mask``, hide the padding at the end.
    """
    rows, length = positions.shape[-2], positions.shape[-1] - span.padding
    out = positions[..., span.start : span.end].clone(memory_format=torch.contiguous_format)
    columns = whole_mask = None
    if mask is not None:
        whole_mask = F.pad(mask, (0, span.padding))
        columns = whole_mask[:, span.start : span.end]
    elif documents is not None and group.size() > 1:
        # Without a mask transformers would look for documents in the positions of this shard.
        whole_mask = positions.new_ones(()).expand(positions.shape[-2:])
    of_rows = positions[..., :length]
    notes = BatchNotes(
        shape=(rows, span.end - span.start),
        group=group.group_name,
        documents=documents,
        columns=columns,
        padded=0 if mask is not None or is_hidden else span.padding,
        largest=of_rows.amax((0, 2) if of_rows.dim() == 3 else 1) if rows * length else None,
    )
    # The notes are written on this mask, too. transformers converts masks to bool: of another dtype the layers would
    # get a copy, without the note.
    layer_mask = torch.ones(rows, span.end - span.start, dtype=torch.bool, device=positions.device)
    if columns is not None:
        layer_mask.copy_(columns)
    counted = None
    if whole_mask is not None and columns is not None and is_counted:
        ones = whole_mask.long()
        counted = (ones.cumsum(1) * ones - 1)[:, span.start : span.end].contiguous()
    write_notes(out, notes.complete(layer_mask, counted))
    return NotedPositions(out, whole_mask)


class CountedLabels(NamedTuple):
    """Label of each position's successor ``[b, S]``, and the number by which their loss is divided."""

    labels: Tensor
    count: Tensor | int


def counted_labels(batch: Mapping[str, Any], documents: list[list[int]] | None, name: str) -> CountedLabels | None:
    """Return the labels of a whole batch; None without any."""
    labels = _next_labels(batch, documents)
    items = batch.get("num_items_in_batch")
    if labels is None:
        return None
    if items is not None and _drops_labels(batch, documents):
        raise ArgumentError(
            f"{name}: num_items_in_batch beside labels at starts of packed documents, which are left out, so that "
            f"the mean would be of other labels; set labels there to {IGNORED} before they are counted, or pass "
            "shift_labels"
        )
    return CountedLabels(labels, (labels != IGNORED).sum() if items is None else items)


def is_text(batch: Mapping[str, Any]) -> bool:
    """Whether ``shard_batch`` knows all entries of a batch: none is of images, and none says which tokens are."""
    return batch.keys() <= {*_SHARDED, *BOUNDARIES, "num_items_in_batch"}


def text_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of a batch that ``shard_batch`` knows."""
    return {key: x for key, x in batch.items() if is_text({key: x})}


def next_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the label of the successor of each position ``[b, S]`` in a whole batch; None without labels.

    A position whose successor is in another document has none. Trainers count these labels.
    """
    is_packed = batch.get("attention_mask") is None and batch.get("shift_labels") is None
    return _next_labels(batch, documents_of(batch, "next_labels") if is_packed else None)


def _next_labels(batch: Mapping[str, Any], documents: list[list[int]] | None) -> Tensor | None:
    """Shift labels, and leave out those of the first position of each document."""
    labels = batch.get("shift_labels")
    if labels is None and batch.get("labels") is not None:
        labels = F.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:].clone()
        for row, starts in enumerate(documents or ()):
            labels[row, [start - 1 for start in starts[1:]]] = IGNORED
    return labels


def _drops_labels(batch: Mapping[str, Any], documents: list[list[int]] | None) -> bool:
    """Whether a label is left out because its document starts there. The host waits for the labels."""
    labels = batch.get("labels") if batch.get("shift_labels") is None else None
    if labels is None or documents is None:
        return False
    return any(bool((labels[row, starts[1:]] != IGNORED).any()) for row, starts in enumerate(documents))


def _check_batch(batch: Mapping[str, Any], group: ProcessGroup, name: str) -> None:
    """Check this rank's entries, and in the first call or in check mode that all ranks have the same."""
    error = None
    try:
        _check_entries(batch, name)
    except CommError as problem:
        error = problem
    if not is_compared(group, "sharded"):
        entries = {key: batch.get(key) for key in (*_SHARDED, *BOUNDARIES, "num_items_in_batch")}
        check_same(entries, group, name, "sharded", error)
    elif error is not None:
        raise error


def is_compared(group: ProcessGroup, kind: str) -> bool:
    """Whether the ranks of a group have compared a batch of this kind; never in check mode, which compares all."""
    is_checked = variables.CHECK.value or variables.HASH.value
    return not is_checked and kind in (_compared.get(group) or ())


def check_same(
    batch: Mapping[str, Any], group: ProcessGroup, name: str, kind: str, error: CommError | None = None
) -> None:
    """Raise on every rank of a group if their entries differ, or if one has an error. On a GPU the host waits.

    Args:
        kind: of the batch, for ``is_compared``.
    """
    entries = {} if error is not None else _described(batch)
    digest = hashlib.blake2b(repr(entries).encode(), digest_size=16).digest()
    agree(name, group, digest, error, lambda: entries, things="batches")
    (_compared.get(group) or _compared.set(group, set())).add(kind)


def _described(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a batch in words, with a digest of their values."""
    entries = {key: _in_words(x) for key, x in batch.items() if isinstance(x, Tensor) and key != "num_items_in_batch"}
    items = batch.get("num_items_in_batch")
    return entries if items is None else {**entries, "num_items_in_batch": str(torch.as_tensor(items).tolist())}


def _in_words(x: Tensor) -> str:
    """Return shape, dtype and a digest of the values of a tensor; on a GPU the host waits for them."""
    # `contiguous` keeps the strides of dims of one element, and then no bytes of the tensor can be viewed.
    data = torch.empty(x.shape, dtype=x.dtype).copy_(x.detach()).flatten().view(torch.uint8).numpy().tobytes()
    return (
        f"{list(x.shape)} of {str(x.dtype).removeprefix('torch.')}, {hashlib.blake2b(data, digest_size=8).hexdigest()}"
    )


def _check_entries(batch: Mapping[str, Any], name: str) -> None:
    """Reject a batch without ``input_ids`` ``[b, S]``, or with entries that cannot be sharded.

    These are entries of other names, as images, of other shapes, and boundaries of documents beside a padding mask.
    """
    if not isinstance(batch.get("input_ids"), Tensor) or batch["input_ids"].dim() != 2:
        raise ArgumentError(f"{name}: a batch needs input_ids, a tensor [batch, sequence]")
    shape = tuple(batch["input_ids"].shape)
    others = (*BOUNDARIES, "num_items_in_batch")
    for key, value in batch.items():
        if key not in _SHARDED and key not in others and any(part in key for part in _MEDIA):
            raise UnsupportedError(
                f"{name}: {key!r}: a model of images, videos or audio takes the whole batch, model(**batch), once "
                "switch(model, name) has it: it shards what it hands to its language model"
            )
        if key not in _SHARDED and key not in others:
            raise ArgumentError(f"{name}: {key!r} is not supported, only {', '.join((*_SHARDED, *others))}")
        if key in (*_SHARDED, "seq_idx") and not isinstance(value, Tensor | None):
            raise ArgumentError(f"{name}: {key} needs a tensor, not {type(value).__name__}")
        if key in (*_SHARDED, "seq_idx") and value is not None and tuple(value.shape) != shape:
            if key == "position_ids" and value.dim() == 3 and tuple(value.shape[1:]) == shape:
                continue
            raise ShapeError(f"{name}: {key} {list(value.shape)} needs the shape of input_ids, {list(shape)}")
    boundaries = [key for key in BOUNDARIES if batch.get(key) is not None]
    if boundaries and batch.get("attention_mask") is not None:
        raise ArgumentError(f"{name}: {', '.join(boundaries)} and an attention_mask; packed documents have no padding")


def _positions(batch: Mapping[str, Any], length: int, documents: list[list[int]] | None) -> Tensor:
    """Return global position ids; padding goes on counting, so that it starts no document."""
    ids = batch["input_ids"]
    positions = batch.get("position_ids")
    if positions is None:
        positions = torch.arange(length, device=ids.device).expand(ids.shape[0], length)
        if documents is None:
            return positions
        positions = positions.clone()
        for row, starts in zip(positions, documents, strict=True):
            for start, stop in pairwise([*starts, length]):
                row[start:stop] -= start
        return positions
    more = torch.arange(1, length - ids.shape[1] + 1, device=positions.device, dtype=positions.dtype)
    return torch.cat([positions, positions[..., -1:] + more], -1)


def documents_of(batch: Mapping[str, Any], name: str) -> list[list[int]] | None:
    """Return the global starts of the documents of each row; None without packing. On a GPU the host waits."""
    ways: dict[str, list[list[int]]] = {}
    if (positions := _text_positions(batch.get("position_ids"))) is not None:
        ways["position_ids"] = _starts(positions.diff(dim=1) != 1)
    if (numbers := batch.get("seq_idx")) is not None:
        ways["seq_idx"] = _starts(numbers.diff(dim=1) != 0)
    rows, length = batch["input_ids"].shape
    for key in ("cu_seq_lens_q", "cu_seq_lens_k"):
        if batch.get(key) is None:
            continue
        boundaries = batch[key].flatten().tolist()
        is_valid = len(boundaries) > 1 and (boundaries[0], boundaries[-1]) == (0, length)
        if rows != 1 or not is_valid or any(a >= b for a, b in pairwise(boundaries)):
            raise ArgumentError(
                f"{name}: {key} has to ascend from 0 to {length} in a batch of one row; it is {boundaries[:8]}, and "
                f"there are {rows} rows"
            )
        ways[key] = [boundaries[:-1]]
    if len({str(documents) for documents in ways.values()}) > 1:
        raise ArgumentError(f"{name}: {' and '.join(ways)} have documents that start at other positions")
    documents = next(iter(ways.values()), None)
    return None if documents is None or all(len(starts) == 1 for starts in documents) else documents


def _text_positions(positions: Tensor | None) -> Tensor | None:
    """Return position ids ``[b, S]`` that count tokens, the first of four; None where tokens of images share some."""
    if positions is None or positions.dim() == 2:
        return positions
    return positions[0] if len(positions) == 4 else None


def _starts(is_first: Tensor) -> list[list[int]]:
    """Return the starts of documents in each row, from whether each position but the first starts one."""
    return [[0, *(row.nonzero()[:, 0] + 1).tolist()] for row in is_first.cpu()]
