"""One bucket for tensors of certain strides: what is prepared for it once, and how it runs."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.core import segments
from tritoncomm.core.plan import Ints
from tritoncomm.reshard.plan import Bucket, Transfers
from tritoncomm.reshard.tables import Blocks, Strides, Table, blocks_of, local_pairs, table_of

__all__ = ["Start", "Step", "steps_of"]

Start = Callable[[Bucket, Tensor, Tensor, str, bool], Any]
"""Starts the exchange of a bucket: what is sent, what arrives, the function's name, and whether to return at once."""


class Step:
    """One bucket: staging memory, a pack, an exchange and an unpack.

    Args:
        bucket: what moves.
        transfers: the plan that the bucket is of.
        strides: of all tensors before and after, in elements.
        in_place: results share memory with the tensors.
    """

    __slots__ = ("_bucket", "_in_place", "_local", "_own_turn", "_pack", "_sizes", "_unpacks")

    def __init__(self, bucket: Bucket, transfers: Transfers, strides: tuple[Strides, Strides], in_place: bool) -> None:
        self._bucket, self._in_place = bucket, in_place
        carried = [item.carried for item in transfers.items]
        own, sums = bucket.own, transfers.sums
        self._sizes = sent, staged, _ = bucket.send.nbytes, bucket.own_bytes, bucket.recv.nbytes
        packed = [blocks_of(bucket.send, bucket.send.start), blocks_of(own, own.source, sent)]
        table = table_of(packed, strides[0], carried)
        self._pack = None if table is None else _prepared(table, True)
        kept = blocks_of(own, own.target, sent)
        received = blocks_of(bucket.recv, bucket.recv.start, sent + staged if staged else 0)
        turns = transfers.turns(bucket)
        parts = tuple(zip((kept, received), turns, strict=True))
        every = np.unique(np.concatenate(turns))
        tables = (
            table_of([_chosen(blocks, at == turn) for blocks, at in parts], strides[1], carried) for turn in every
        )
        self._unpacks = [_prepared(table, False, sums) for table in tables if table is not None]
        self._own_turn = int(np.searchsorted(every, transfers.first_turn(bucket, transfers.position))) if sums else -1
        self._local = local_pairs(bucket.local, strides)

    def __bool__(self) -> bool:
        return not self._bucket.is_quiet or self._pack is not None or bool(self._local)

    def run(self, sources: Sequence[Tensor], targets: Sequence[Tensor], start: Start, name: str) -> record.CopyPath:
        """Pack, exchange, unpack; the path that the passes took, ``view`` where there was none."""
        path: record.CopyPath = "torch" if self._local else "view"
        wire, base = self._staging(sources[0])
        if self._pack is not None:
            used, pack = self._pack
            path = pack([sources[i] for i in used], wire)
        local = self._blocks(sources, targets) if self._local else ()
        work = None
        if not self._bucket.is_quiet:
            sent, staged, _ = self._sizes
            send, receive = (wire[:sent], base[sent + staged :]) if staged else (wire, base)
            work = start(self._bucket, send, receive, name, bool(local))
            del send, receive
        if self._own_turn < 0:
            for block, target in local:
                target.copy_(block)
        if work is not None:
            work.wait()
        del wire  # what was sent is not needed while what arrived is unpacked
        for place, (used, unpack) in enumerate(self._unpacks):
            if place == self._own_turn:
                _add(local)
            path = unpack([targets[i] for i in used], base)
        if self._own_turn == len(self._unpacks):
            _add(local)
        return path

    def _staging(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """What the pack writes, and what the unpack reads: the same memory where blocks stay in it."""
        sent, staged, received = self._sizes
        if staged:
            memory = like.new_empty(sent + staged + received, dtype=torch.uint8)
            return memory, memory
        return like.new_empty(sent, dtype=torch.uint8), like.new_empty(received, dtype=torch.uint8)

    def _blocks(self, sources: Sequence[Tensor], targets: Sequence[Tensor]) -> list[tuple[Tensor, Tensor]]:
        """Blocks that are copied directly, and where to."""
        blocks = [
            (_view(sources[i], at[0], at[1], at[2]), _view(targets[i], at[0], at[3], at[4])) for i, at in self._local
        ]
        return [(block.clone(), target) for block, target in blocks] if self._in_place else blocks


def steps_of(transfers: Transfers, before: Strides, after: Strides, in_place: bool) -> list[Step]:
    """All buckets of a plan in which something happens."""
    steps = [Step(bucket, transfers, (before, after), in_place) for bucket in transfers.buckets]
    return [step for step in steps if step]


def _prepared(table: Table, gathers: bool, accumulate: bool = False) -> tuple[Ints, segments.Prepared]:
    return table[0], segments.Prepared(table[1], gathers, accumulate)


def _chosen(blocks: Blocks, mask: Any) -> Blocks:
    tensor, start, size, wire = blocks
    return tensor[mask], start[:, mask], size[:, mask], wire[mask]


def _add(local: Sequence[tuple[Tensor, Tensor]]) -> None:
    for block, target in local:
        target.add_(block)


def _view(x: Tensor, size: Ints, stride: Ints, offset: Ints) -> Tensor:
    return x.as_strided(size, stride, int(x.storage_offset()) + offset[0])
