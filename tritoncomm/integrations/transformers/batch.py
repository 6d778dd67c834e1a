"""Batches over sequence shards: ``shard_batch`` cuts a batch that all ranks have, and notes what its layers need."""

import hashlib
from collections.abc import Mapping
from itertools import pairwise
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import variables
from tritoncomm.core.agreement import agree
from tritoncomm.errors import ArgumentError, CommError, ShapeError, UnsupportedError
from tritoncomm.groups import resolve_sequence
from tritoncomm.integrations.transformers.batch_notes import BatchNotes, write_notes

__all__ = ["IGNORED", "next_labels", "shard_batch"]

IGNORED = -100
_SHARDED = ("input_ids", "position_ids", "attention_mask", "labels", "shift_labels")
# What collators add for packed documents; a shard has none, as the documents are noted for all positions.
_BOUNDARIES = ("seq_idx", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
_MEDIA = ("pixel", "image", "video", "audio", "input_features")  # parts of names of what processors add for them
# (size, own rank) of each group whose ranks have compared their batches.
_compared: "WeakKeyDictionary[ProcessGroup, tuple[int, int]]" = WeakKeyDictionary()


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
            position ids may be ``[3, b, S]``, or ``[4, b, S]`` with the text's first, which say where documents are.
        group: the ranks; the tensor group by default, unless there is a context axis.
        pad_token_id: the token at padded positions.

    Returns:
        ``input_ids`` and global ``position_ids`` ``[b, s]``. With labels: ``shift_labels`` ``[b, s]``, the label of
        each position's successor; ``labels``, which makes the model compute its loss; ``num_items_in_batch``, the
        labels of all ranks: the losses of the ranks add up to the mean over the batch. ``attention_mask`` as it was,
        or ones for packed sequences over several ranks: masks are of all positions, because attention is.

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
    more = -ids.shape[1] % group.size()
    start, end = (rank * (ids.shape[1] + more) // group.size() for rank in (group.rank(), group.rank() + 1))

    def shard(x: Tensor, value: int) -> Tensor:
        """Return this rank's positions of ``x``, padded with ``value`` at the end of the sequence."""
        return F.pad(x, (0, more), value=value)[:, start:end].contiguous()

    mask = batch.get("attention_mask")
    documents = _documents(batch, name) if mask is None else None
    positions = _positions(batch, ids.shape[1] + more, documents)
    out: dict[str, Any] = {
        "input_ids": shard(ids, pad_token_id),
        "position_ids": positions[..., start:end].clone(memory_format=torch.contiguous_format),
    }
    columns = None
    if mask is not None:
        mask = out["attention_mask"] = F.pad(mask, (0, more))
        columns = mask[:, start:end]
    elif documents is not None and group.size() > 1:  # else transformers looks for them in the positions of a shard
        out["attention_mask"] = ids.new_ones(()).expand(positions.shape[-2:])
    of_rows = positions[..., : ids.shape[1]]
    notes = BatchNotes(
        shape=(ids.shape[0], end - start),
        group=group.group_name,
        documents=documents,
        columns=columns,
        padded=0 if mask is not None else more,
        largest=of_rows.amax((0, 2) if of_rows.dim() == 3 else 1) if ids.numel() else None,
    )
    # Boolean, so that transformers' masks, which are made of it as such, are made of this very tensor.
    like = out["input_ids"] if columns is None else columns
    layer_mask = torch.ones(like.shape, dtype=torch.bool, device=like.device)
    if columns is not None:
        layer_mask.copy_(columns)
    counted = None
    if mask is not None and batch.get("position_ids") is None:
        counted = (mask.long().cumsum(1) * mask.long() - 1)[:, start:end].contiguous()
    write_notes(out["position_ids"], notes.complete(layer_mask, counted))
    labels = _next_labels(batch, documents)
    items = batch.get("num_items_in_batch")
    if labels is not None:
        if items is not None and _drops_labels(batch, documents):
            raise ArgumentError(
                f"{name}: num_items_in_batch beside labels at starts of packed documents, which are left out, so that "
                f"the mean would be of other labels; set labels there to {IGNORED} before they are counted, or pass "
                "shift_labels"
            )
        out["shift_labels"] = out["labels"] = shard(labels, IGNORED)
        out["num_items_in_batch"] = (labels != IGNORED).sum() if items is None else items
    return out


def next_labels(batch: Mapping[str, Any]) -> Tensor | None:
    """Return the label of the successor of each position ``[b, S]`` in a whole batch; None without labels.

    A position whose successor is in another document has none. Trainers count these labels.
    """
    is_packed = batch.get("attention_mask") is None and batch.get("shift_labels") is None
    return _next_labels(batch, _documents(batch, "next_labels") if is_packed else None)


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
    here = group.size(), group.rank()
    if variables.CHECK.value or variables.HASH.value or _compared.get(group) != here:
        entries = {} if error is not None else _described(batch)
        digest = hashlib.blake2b(repr(entries).encode(), digest_size=16).digest()
        agree(name, group, digest, error, lambda: entries, things="batches")  # raises on every rank, or on none
        _compared[group] = here
    elif error is not None:
        raise error


def _described(batch: Mapping[str, Any]) -> dict[str, str]:
    """Return the entries of a batch in words, with a digest of their values."""
    entries = {key: _in_words(batch[key]) for key in (*_SHARDED, *_BOUNDARIES) if isinstance(batch.get(key), Tensor)}
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
    others = (*_BOUNDARIES, "num_items_in_batch")
    for key, value in batch.items():
        if key not in _SHARDED and key not in others and any(part in key for part in _MEDIA):
            raise UnsupportedError(
                f"{name}: {key!r}: images, videos and audio are not supported over sequence shards; pass batches of "
                "text alone"
            )
        if key not in _SHARDED and key not in others:
            raise ArgumentError(f"{name}: {key!r} is not supported, only {', '.join((*_SHARDED, *others))}")
        if key in (*_SHARDED, "seq_idx") and not isinstance(value, Tensor | None):
            raise ArgumentError(f"{name}: {key} needs a tensor, not {type(value).__name__}")
        if key in (*_SHARDED, "seq_idx") and value is not None and tuple(value.shape) != shape:
            if key == "position_ids" and value.dim() == 3 and tuple(value.shape[1:]) == shape:
                continue
            raise ShapeError(f"{name}: {key} {list(value.shape)} needs the shape of input_ids, {list(shape)}")
    boundaries = [key for key in _BOUNDARIES if batch.get(key) is not None]
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


def _documents(batch: Mapping[str, Any], name: str) -> list[list[int]] | None:
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
