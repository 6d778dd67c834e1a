"""The step of a bucket: its passes, prepared for tensors of certain strides, and the exchange between them."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal

import numpy as np
import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import Segments, in_turns

from tritoncomm import record
from tritoncomm.core import segments
from tritoncomm.core.memory import empty
from tritoncomm.core.ops import path_for
from tritoncomm.core.plan import Ints
from tritoncomm.reshard.plan import Bucket, Transfers
from tritoncomm.reshard.tables import Blocks, Pair, Strides, blocks_of, copies_of, joined, local_pairs, table_of

__all__ = ["Start", "Step", "steps_of"]

Start = Callable[[Bucket, Tensor, Tensor, str, bool], Any]
"""Starts the exchange of a bucket: bytes to send, memory to receive into, function name, whether to return at once."""
_Views = tuple[list[Tensor], list[Tensor]]


class _Pass:
    """One pass over a table, for tensors whose dtypes, shapes, strides and device never change.

    The launches stay here instead of in the kernels' own cache: a plan of a large model has more passes than that
    cache has entries (128), and would prepare each of them again in every execution.

    Args:
        name: the kernels' function.
        used: numbers of the tensors in the table.
        table: the segments.
        accumulate: add to the tensors' values; of a scatter.
        sums: add up segments of the same rows; of a scatter.
    """

    __slots__ = ("_accumulate", "_launches", "_name", "_sums", "_table", "used")

    def __init__(
        self,
        name: Literal["gather_segments", "scatter_segments", "copy_segments"],
        used: Ints,
        table: Segments,
        accumulate: bool = False,
        sums: bool = False,
    ) -> None:
        self._name, self.used, self._table, self._accumulate, self._sums = name, used, table, accumulate, sums
        self._launches: kernels.SegmentCall | None = None

    def run(self, tensors: Sequence[Tensor], wire: Tensor) -> record.CopyPath:
        """Gather from, or scatter into, all tensors of the plan; returns the path taken."""
        chosen = [tensors[i] for i in self.used]
        if path_for(wire, "segments") == "triton":
            self.launch(chosen, wire)
            return "triton"
        if self._name == "gather_segments":
            return segments.gather(chosen, wire, self._table)[0]
        return segments.scatter(wire, chosen, self._table, accumulate=self._accumulate, sums=self._sums)[0]

    def launch(self, tensors: Sequence[Tensor], wire: Tensor) -> None:
        """Run the kernels on the tensors of the table.

        Raises:
            ValueError, TypeError, RuntimeError: as the kernels' function, at the first call.
        """
        _range = record.profiler_range(self._name)
        if self._launches is None:
            self._launches = kernels.SegmentCall(self._name, self._table, tensors, wire, self._accumulate, self._sums)
        self._launches(tensors, wire)


class Step:
    """One bucket: staging memory, a pack, an exchange and an unpack.

    Args:
        bucket: the blocks to move.
        transfers: the plan that the bucket is of.
        strides: of all tensors before and after, in elements.
        in_place: results share memory with the tensors.
    """

    __slots__ = ("_added", "_bucket", "_copies", "_in_place", "_local", "_pack", "_sizes", "_unpacks")

    def __init__(self, bucket: Bucket, transfers: Transfers, strides: tuple[Strides, Strides], in_place: bool) -> None:
        self._bucket, self._in_place = bucket, in_place
        carried = [item.carried for item in transfers.items]
        own = bucket.own
        self._sizes = sent, staged, _ = bucket.send.nbytes, bucket.own_bytes, bucket.recv.nbytes
        packed = joined(blocks_of(bucket.send, bucket.send.start), blocks_of(own, own.source, sent))
        pack = table_of(packed, strides[0], carried)
        self._pack = None if pack is None else _Pass("gather_segments", *pack)
        received = blocks_of(bucket.recv, bucket.recv.start, sent + staged if staged else 0)
        taken = joined(blocks_of(own, own.target, sent), received)
        if not transfers.sums:
            self._unpacks = list(_unpacks(taken, strides[1], carried))
        else:
            taken = taken.parts(*transfers.added(bucket), carried)
            adds = np.isin(taken.tensor, list(transfers.accumulated))
            self._unpacks = [
                unpack
                for accumulate in (False, True)
                for unpack in _unpacks(taken.pick(adds == accumulate), strides[1], carried, accumulate, sums=True)
            ]
        pairs = local_pairs(bucket.local, strides)
        self._local, self._added = (
            [pair for pair in pairs if (pair[0] in transfers.accumulated) is adds] for adds in (False, True)
        )
        table = None if in_place else copies_of(self._local, [item.result for item in transfers.items])
        self._copies = None if table is None else _Pass("copy_segments", *table)

    def __bool__(self) -> bool:
        return not self._bucket.is_quiet or self._pack is not None or bool(self._local or self._added)

    def run(self, sources: Sequence[Tensor], targets: Sequence[Tensor], start: Start, name: str) -> record.CopyPath:
        """Pack, exchange, unpack; returns the path of the passes, ``view`` where there was none."""
        path: record.CopyPath = "view"
        wire, base, send, receive = self._staging(sources[0])
        if self._pack is not None:
            path = self._pack.run(sources, wire)
        copies = self._copies if self._copies is not None and path_for(sources[0], "segments") == "triton" else None
        copied: _Views | None = None
        added: _Views | None = None
        if copies is not None:
            path = "triton"
        elif self._local:
            path, copied = "torch", self._blocks(self._local, sources, targets)
        if self._added:
            path, added = "torch", self._blocks(self._added, sources, targets)
        work = None
        if not self._bucket.is_quiet:
            work = start(self._bucket, send, receive, name, bool(self._local or self._added))
        if copies is not None:
            pairs = in_turns([sources[i] for i in copies.used], [targets[i] for i in copies.used])
            copies.launch(pairs, pairs[-1])
        elif copied is not None:
            torch._foreach_copy_(copied[1], copied[0])  # pyright: ignore[reportPrivateImportUsage]
        if added is not None:
            for block, target in zip(*added, strict=True):
                target.add_(block)
        if work is not None:
            work.wait()
        del wire, send, receive  # the sent bytes are not needed while the received ones are unpacked
        for unpack in self._unpacks:
            path = unpack.run(targets, base)
        return path

    def _staging(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Memory of the pack and of the unpack (one where blocks are staged), parts to send and to receive into."""
        sent, staged, received = self._sizes
        if staged:
            size = sent + staged + received
            memory = empty(like, (size,), (1,), torch.uint8)
            return memory, memory, memory.narrow(0, 0, sent), memory.narrow(0, sent + staged, received)
        wire, base = (empty(like, (size,), (1,), torch.uint8) for size in (sent, received))
        return wire, base, wire, base

    def _blocks(self, pairs: list[Pair], sources: Sequence[Tensor], targets: Sequence[Tensor]) -> _Views:
        """Views of the blocks to copy or add directly, and of their places in the results."""
        blocks = [_view(sources[i], size, stride, offset) for i, size, stride, offset, _, _ in pairs]
        places = [_view(targets[i], size, stride, offset) for i, size, _, _, stride, offset in pairs]
        return [x.clone() for x in blocks] if self._in_place else blocks, places


def steps_of(transfers: Transfers, before: Strides, after: Strides, in_place: bool) -> list[Step]:
    """Steps of all buckets of a plan that are not empty."""
    steps = [Step(bucket, transfers, (before, after), in_place) for bucket in transfers.buckets]
    return [step for step in steps if step]


def _unpacks(
    blocks: Blocks, strides: Strides, dtypes: Sequence[torch.dtype], accumulate: bool = False, sums: bool = False
) -> Iterator[_Pass]:
    """The unpack of these blocks; nothing without blocks."""
    table = table_of(blocks, strides, dtypes)
    if table is not None:
        yield _Pass("scatter_segments", *table, accumulate, sums)


def _view(x: Tensor, size: Ints, stride: Ints, offset: int) -> Tensor:
    return x.as_strided(size, stride, int(x.storage_offset()) + offset)
