"""One bucket for tensors of certain strides: what is prepared for it once, and how it runs."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.core import segments
from tritoncomm.core.memory import Allocate, part_of
from tritoncomm.core.ops import path_for
from tritoncomm.core.plan import Ints
from tritoncomm.reshard.plan import Bucket, Transfers
from tritoncomm.reshard.tables import Blocks, Pair, Strides, blocks_of, copies_of, joined, local_pairs, table_of

__all__ = ["Addresses", "Start", "Step", "addresses_of", "steps_of"]

Start = Callable[[Bucket, Tensor, Tensor, str, bool], Any]
"""Starts the exchange of a bucket: what is sent, what arrives, the function's name, and whether to return at once."""
Addresses = tuple[tuple[int, ...], tuple[int, ...]]
"""Of all tensors, before and after."""
_address_of = Tensor.data_ptr
_Views = tuple[list[Tensor], list[Tensor]]
_Pass = tuple[Callable[[Any], Any] | None, segments.Prepared]


class Step:
    """One bucket: staging memory, a pack, an exchange and an unpack.

    Args:
        bucket: what moves.
        transfers: the plan that the bucket is of.
        strides: of all tensors before and after, in elements.
        in_place: results share memory with the tensors.

    Attributes:
        direct: numbers of the tensors of which blocks are copied or added directly.
    """

    __slots__ = ("_added", "_bucket", "_copies", "_in_place", "_local", "_pack", "_sizes", "_unpacks", "direct")

    def __init__(self, bucket: Bucket, transfers: Transfers, strides: tuple[Strides, Strides], in_place: bool) -> None:
        self._bucket, self._in_place = bucket, in_place
        carried = [item.carried for item in transfers.items]
        own = bucket.own
        self._sizes = sent, staged, _ = bucket.send.nbytes, bucket.own_bytes, bucket.recv.nbytes
        packed = joined(blocks_of(bucket.send, bucket.send.start), blocks_of(own, own.source, sent))
        self._pack = next(_passes(packed, strides[0], carried), None)
        received = blocks_of(bucket.recv, bucket.recv.start, sent + staged if staged else 0)
        taken = joined(blocks_of(own, own.target, sent), received)
        if not transfers.sums:
            self._unpacks = list(_passes(taken, strides[1], carried, gathers=False))
        else:
            taken = taken.parts(*transfers.added(bucket), carried)
            adds = np.isin(taken.tensor, list(transfers.accumulated))
            self._unpacks = [
                unpack
                for accumulates in (False, True)
                for unpack in _passes(
                    taken.pick(adds == accumulates), strides[1], carried, False, accumulates, sums=True
                )
            ]
        pairs = local_pairs(bucket.local, strides)
        self.direct = {pair[0] for pair in pairs}
        self._local, self._added = (
            [pair for pair in pairs if (pair[0] in transfers.accumulated) is adds] for adds in (False, True)
        )
        table = None if in_place else copies_of(self._local, [item.result for item in transfers.items])
        self._copies = None if table is None else segments.PreparedCopies(table[1], table[0])

    def __bool__(self) -> bool:
        return not self._bucket.is_quiet or self._pack is not None or bool(self._local or self._added)

    def run(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        start: Start,
        name: str,
        new: Allocate | None,
        addresses: Addresses | None = None,
    ) -> record.CopyPath:
        """Pack, exchange, unpack; the path that the passes took, ``view`` where there was none.

        ``new`` makes the staging memory, for tensors that were recognised; see ``core.memory``. ``addresses`` are those
        of all tensors, where the caller has read them.
        """
        path: record.CopyPath = "view"
        of_passes = path_for(sources[0], "segments")
        before, after = addresses or (None, None)
        wire, base, send, receive = self._staging(sources[0]) if new is None else self._new_staging(new)
        if self._pack is not None:
            path = _run_pass(self._pack, sources, wire, before, of_passes)
        copies = None if of_passes == "torch" else self._copies
        copied: _Views | None = None
        added: _Views | None = None
        if copies is not None:
            path = "triton"
        elif self._local:
            path, copied = "torch", self._blocks(self._local, sources, targets, new)
        if self._added:
            path, added = "torch", self._blocks(self._added, sources, targets, new)
        work = None
        if not self._bucket.is_quiet:
            work = start(self._bucket, send, receive, name, bool(self.direct))
        if copies is not None:
            copies(sources, targets, before, after)
        elif copied is not None:
            torch._foreach_copy_(copied[1], copied[0])  # pyright: ignore[reportPrivateImportUsage]
        if added is not None:
            for block, target in zip(*added, strict=True):
                target.add_(block)
        if work is not None:
            work.wait()
        del wire, send, receive  # what was sent is not needed while what arrived is unpacked
        for unpack in self._unpacks:
            path = _run_pass(unpack, targets, base, after, of_passes)
        return path

    def _staging(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """What the pack writes, the unpack reads (one memory where blocks stay), the exchange sends and receives."""
        sent, staged, received = self._sizes
        if staged:
            memory = like.new_empty(sent + staged + received, dtype=torch.uint8)
            return memory, memory, memory[:sent], memory[sent + staged :]
        wire, base = (like.new_empty(nbytes, dtype=torch.uint8) for nbytes in (sent, received))
        return wire, base, wire, base

    def _new_staging(self, new: Allocate) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The same, without the dispatcher."""
        sent, staged, received = self._sizes
        if staged:
            assert part_of is not None
            memory = new((sent + staged + received,), (1,), torch.uint8)
            send, receive = part_of(memory, (sent,), (1,), 0), part_of(memory, (received,), (1,), sent + staged)
            return memory, memory, send, receive
        wire, base = new((sent,), (1,), torch.uint8), new((received,), (1,), torch.uint8)
        return wire, base, wire, base

    def _blocks(
        self, pairs: list[Pair], sources: Sequence[Tensor], targets: Sequence[Tensor], new: Allocate | None
    ) -> _Views:
        """Blocks that are copied or added directly, and where to."""
        view = _view if new is None or part_of is None else part_of
        given = [view(sources[i], size, stride, offset) for i, size, stride, offset, _, _ in pairs]
        into = [view(targets[i], size, stride, offset) for i, size, _, _, stride, offset in pairs]
        return [x.clone() for x in given] if self._in_place else given, into


def addresses_of(before: Sequence[Tensor], after: Sequence[Tensor]) -> Addresses:
    """Those of all tensors."""
    return tuple(map(_address_of, before)), tuple(map(_address_of, after))


def steps_of(transfers: Transfers, before: Strides, after: Strides, in_place: bool) -> list[Step]:
    """All buckets of a plan in which something happens."""
    steps = [Step(bucket, transfers, (before, after), in_place) for bucket in transfers.buckets]
    return [step for step in steps if step]


def _run_pass(
    used_by: _Pass, tensors: Sequence[Tensor], wire: Tensor, addresses: tuple[int, ...] | None, path: record.CopyPath
) -> record.CopyPath:
    pick, copy = used_by
    if pick is None:
        return copy(tensors, wire, addresses, path)
    return copy(pick(tensors), wire, None if addresses is None else pick(addresses), path)


def _passes(
    blocks: Blocks,
    strides: Strides,
    dtypes: Sequence[torch.dtype],
    gathers: bool = True,
    accumulate: bool = False,
    sums: bool = False,
) -> Iterator[_Pass]:
    """What picks the tensors of a pass, None for all in their order, and the pass; nothing without blocks."""
    table = table_of(blocks, strides, dtypes)
    if table is not None:
        pick = None if table[0] == tuple(range(len(dtypes))) else segments.picker(table[0])
        yield pick, segments.Prepared(table[1], gathers, accumulate, sums)


def _view(x: Tensor, size: Ints, stride: Ints, offset: int) -> Tensor:
    return x.as_strided(size, stride, int(x.storage_offset()) + offset)
