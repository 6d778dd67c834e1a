"""Megatron-core's resharding of weights ("refit") with one message per pair of ranks and bucket.

``PackedCopyService`` is a copy service for ``swap_model_weights(src, dst, refit_method=PackedCopyService(group))``. The
segment kernel packs what Megatron's planner submits, in one launch for all messages of a bucket.
"""

import hashlib
import importlib
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend
from tritoncomm.core.agreement import largest
from tritoncomm.core.blocks import MOST_SEGMENTS
from tritoncomm.core.exchange import all_to_all
from tritoncomm.core.memory import empty_on
from tritoncomm.core.passes import whole_tensors
from tritoncomm.core.validation import check_data
from tritoncomm.errors import ArgumentError, CommError, GroupError, MismatchError, UnsupportedError

__all__ = ["PackedCopyService"]

_NAME = "PackedCopyService.run"
_ALIGNMENT = 16  # bytes: the widest access of the kernels


class _Copy(NamedTuple):
    """A tensor that goes to, or comes from, a rank of the group."""

    tensor: Tensor
    peer: int
    task_id: int | None


class PackedCopyService:
    """A copy service of Megatron-core's resharding that sends one message per pair of ranks and bucket.

    Tensors of a pair of ranks go in the order of their ``task_id``, or in that of their submission, where both ranks
    give none. Before anything is sent, all ranks compare what each of them sends with what its peer expects.

    It is a ``CopyService`` of the Megatron that is installed: the first object registers the class.

    Args:
        group: the process group of the resharding; ranks are ranks of this group. None is the default group.
        bucket_bytes: extra memory of a rank at most, on the sending and on the receiving side each; a larger tensor
            is a bucket of its own. Tensors that are sent and share memory with one that is received are copied before.

    Source: ``megatron.core.resharding.copy_services`` (0.16.1 to 0.19.2).
    """

    requires_process_group_barrier = True
    """Whether Megatron waits for all ranks after ``run``, as for its own services."""

    def __init__(self, group: ProcessGroup | None = None, *, bucket_bytes: int = 256 * 2**20) -> None:
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            raise ArgumentError(
                f"PackedCopyService: bucket_bytes must be an int of 1 or more, not {bucket_bytes!r:.80}"
            )
        # Importing it takes seconds, and this module is imported without it.
        try:
            base = importlib.import_module("megatron.core.resharding.copy_services.base")
        except ImportError as error:
            raise UnsupportedError(
                f"PackedCopyService: no Megatron-core with resharding can be imported: {error}"
            ) from error
        base.CopyService.register(PackedCopyService)
        self.group = group
        self.rank = dist.get_rank(group)
        self.world_size = dist.get_world_size(group)
        self._bucket_bytes = bucket_bytes
        self._sends: list[_Copy] = []
        self._receives: list[_Copy] = []

    def submit_send(self, src_tensor: Tensor, dest_rank: int, task_id: int | None = None) -> None:
        """Take note of a tensor that goes to ``dest_rank``; it is read in ``run``."""
        self._sends.append(_Copy(src_tensor, dest_rank, task_id))

    def submit_recv(self, dest_tensor: Tensor, src_rank: int, task_id: int | None = None) -> None:
        """Take note of a tensor that ``run`` overwrites by one from ``src_rank``."""
        self._receives.append(_Copy(dest_tensor, src_rank, task_id))

    def submit_send_with_id(self, task_id: int, src_tensor: Tensor, dest_rank: int) -> None:
        """``submit_send``, as Megatron 0.16.1 calls it."""
        self.submit_send(src_tensor, dest_rank, task_id)

    def submit_recv_with_id(self, task_id: int, dest_tensor: Tensor, src_rank: int) -> None:
        """``submit_recv``, as Megatron 0.16.1 calls it."""
        self.submit_recv(dest_tensor, src_rank, task_id)

    def close(self) -> None:
        """Nothing to release: buffers live as long as ``run``."""

    @torch.no_grad()
    def run(self) -> None:
        """Make all copies that were submitted; every rank of the group calls.

        Raises:
            MismatchError: a rank sends other tensors than its peer expects, or refused its own. Nothing was sent.
            ArgumentError: a tensor without data, or tensors on several devices.
            PeerError: another rank failed, or did not come within the group's timeout.
        """
        started = record.now()
        sends, receives = self._sends, self._receives
        self._sends, self._receives = [], []
        group = dist.group.WORLD if self.group is None else self.group
        if group is None:
            raise GroupError(f"{_NAME}: the process groups were destroyed")
        outgoing = _by_peer(sends)
        incoming = _by_peer(receives)
        error: CommError | None = None
        try:
            _check([*sends, *receives])
        except CommError as problem:
            error = problem
        _compare(outgoing, incoming, group, self.rank, error)
        outgoing = _clone_overwritten(outgoing, receives)
        own = zip(incoming.pop(self.rank, ()), outgoing.pop(self.rank, ()), strict=True)
        targets, sources = [], []
        for target, source in own:
            targets.append(target.tensor.detach())
            sources.append(source.tensor.detach())
        if targets:
            torch._foreach_copy_(targets, sources)  # pyright: ignore[reportPrivateImportUsage]
        copied = 2 * sum([x.nbytes for x in targets])
        path, more, sent = self._exchange(outgoing, incoming, group)
        record.add(_NAME, path, copied + more, sent, started)

    def _exchange(
        self, outgoing: Mapping[int, Sequence[_Copy]], incoming: Mapping[int, Sequence[_Copy]], group: ProcessGroup
    ) -> tuple[record.CopyPath, int, int]:
        """Send and receive bucket by bucket; return (path of the copies, bytes read plus written, bytes sent)."""
        # Both ends of a pair divide its tensors alike, by this limit, so that buckets need no negotiation. The first
        # buckets of all pairs travel together, then the second ones.
        pair_bytes = max(self._bucket_bytes // self.world_size, 1)
        sending = {peer: list(_buckets(copies, pair_bytes, self.world_size)) for peer, copies in outgoing.items()}
        receiving = {peer: list(_buckets(copies, pair_bytes, self.world_size)) for peer, copies in incoming.items()}
        path: record.CopyPath = "view"
        copied = sent = 0
        for turn in range(max(map(len, (*sending.values(), *receiving.values())), default=0)):
            packed = _Wire({peer: buckets[turn] for peer, buckets in sending.items() if turn < len(buckets)})
            arriving = _Wire({peer: buckets[turn] for peer, buckets in receiving.items() if turn < len(buckets)})
            if packed.tensors:
                _, path, more = packed.plan.pack(packed.tensors, packed.memory)
                copied, sent = copied + more, sent + packed.memory.nbytes
            through_host = backend.cuda_backend(group) in ("", "gloo")  # no backend that sends from the GPU
            out = packed.messages(through_host, is_send=True)
            into = arriving.messages(through_host, is_send=False)
            backend.send_and_receive(list(out.items()), list(into.items()), group, _NAME).wait()
            if arriving.tensors:
                arriving.arrive(into)
                _, path, more = arriving.plan.unpack(arriving.memory, arriving.tensors)
                copied += more
        return path, copied, sent


class _Wire:
    """The messages of one bucket, one after the other in one buffer.

    Attributes:
        tensors: of all messages.
        memory: the buffer.
        plan: pass from the tensors to the buffer, and back.
    """

    def __init__(self, copies_by_peer: Mapping[int, Sequence[_Copy]]) -> None:
        """Lay the tensors out in one buffer; without any there is no ``memory`` and no ``plan``."""
        self.tensors: list[Tensor] = []
        self._spans: dict[int, tuple[int, int]] = {}  # bytes [start, end) of each peer's message
        starts, end = [], 0
        for peer, copies in copies_by_peer.items():
            start = end
            for copy in copies:
                self.tensors.append(copy.tensor.detach())
                starts.append(end)
                end += -(-copy.tensor.nbytes // _ALIGNMENT) * _ALIGNMENT  # rounded up
            self._spans[peer] = start, end
        if self.tensors:
            self.memory = empty_on(self.tensors[0].device, (end,), torch.uint8)
            layouts = tuple([(x.shape, x.dtype, x.stride()) for x in self.tensors])
            self.plan = whole_tensors(layouts, tuple(starts))

    def messages(self, through_host: bool, *, is_send: bool) -> dict[int, Tensor]:
        """The message of every peer: in the buffer, or in host memory where the group carries no CUDA tensors."""
        if not self._spans:
            return {}
        memory = self.memory
        if through_host and memory.is_cuda:
            memory = torch.empty(memory.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
            if is_send:
                memory.copy_(self.memory)
        return {peer: memory[first:end] for peer, (first, end) in self._spans.items()}

    def arrive(self, messages: Mapping[int, Tensor]) -> None:
        """Copy what arrived in host memory into the buffer."""
        for peer, (first, end) in self._spans.items():
            if messages[peer].device != self.memory.device:
                self.memory[first:end].copy_(messages[peer])


def _clone_overwritten(outgoing: Mapping[int, Sequence[_Copy]], receives: Sequence[_Copy]) -> dict[int, list[_Copy]]:
    """Return the copies to send with clones of tensors that share memory with one to receive.

    Ranks that swap a tensor, or a send in a later bucket, would read what has arrived already.
    """
    ranges = [(x.data_ptr(), x.data_ptr() + x.nbytes) for x in (copy.tensor for copy in receives)]
    written = sorted((start, end) for start, end in ranges if start)  # an empty tensor has no address
    starts = [start for start, _ in written]
    furthest_ends = [*accumulate((end for _, end in written), max)]  # of all ranges so far, which may be nested

    def is_written(x: Tensor) -> bool:
        """Whether some of the memory is overwritten."""
        # Overlap: of the ranges that begin before its end, the furthest end lies behind its start.
        before = bisect_left(starts, x.data_ptr() + x.nbytes)
        return before > 0 and furthest_ends[before - 1] > x.data_ptr()

    return {
        peer: [
            copy._replace(tensor=copy.tensor.detach().clone()) if is_written(copy.tensor) else copy for copy in copies
        ]
        for peer, copies in outgoing.items()
    }


def _by_peer(copies: Sequence[_Copy]) -> dict[int, list[_Copy]]:
    """Return the copies of every peer, in ascending order of ranks, and of their tasks where they have one."""
    by_peer: dict[int, list[_Copy]] = {}
    for copy in sorted(copies, key=lambda copy: (copy.peer, -1 if copy.task_id is None else copy.task_id)):
        by_peer.setdefault(copy.peer, []).append(copy)
    return by_peer


def _buckets(copies: Sequence[_Copy], most: int, world: int) -> Iterator[list[_Copy]]:
    """Divide the tensors of a pair of ranks into buckets of ``most`` bytes; a larger tensor is one by itself."""
    bucket: list[_Copy] = []
    size = 0
    for copy in copies:
        nbytes = copy.tensor.nbytes
        if nbytes and bucket and (size + nbytes > most or len(bucket) >= max(MOST_SEGMENTS // world, 1)):
            yield bucket
            bucket, size = [], 0
        if nbytes:
            bucket.append(copy)
            size += nbytes
    if bucket:
        yield bucket


def _check(copies: Sequence[_Copy]) -> None:
    """Check that all tensors have data, are contiguous and lie on one device."""
    for copy in copies:
        check_data(copy.tensor, _NAME)
        if not copy.tensor.is_contiguous():
            raise ArgumentError(f"{_NAME}: a tensor of strides {copy.tensor.stride()}; pass a contiguous one")
    if len(devices := sorted({str(copy.tensor.device) for copy in copies})) > 1:
        raise ArgumentError(f"{_NAME}: tensors on {' and '.join(devices)}; pass tensors on one device")


class _Summary(NamedTuple):
    """Hash, number and bytes of the tensors that one rank sends to another, which both ends compare."""

    hash: int
    tensors: int
    nbytes: int


def _summary(copies: Sequence[_Copy]) -> _Summary:
    """Return the summary of what one rank sends to another."""
    specs = [(copy.task_id, copy.tensor.numel(), str(copy.tensor.dtype)) for copy in copies]
    digest = hashlib.blake2b(repr(specs).encode(), digest_size=8).digest()
    nbytes = sum([copy.tensor.nbytes for copy in copies])
    return _Summary(int.from_bytes(digest, "little", signed=True), len(copies), nbytes)


def _compare(
    outgoing: Mapping[int, Sequence[_Copy]],
    incoming: Mapping[int, Sequence[_Copy]],
    group: ProcessGroup,
    rank: int,
    own_error: CommError | None,
) -> None:
    """Compare what this rank sends and expects with what its peers expect and send; raise on every rank, or on none.

    Args:
        own_error: what this rank has found wrong before, which it raises.
    """
    peers, error = range(group.size()), own_error
    send_summaries = [_summary(outgoing.get(peer, ())) for peer in peers]
    expected = [_summary(incoming.get(peer, ())) for peer in peers]
    device = backend.default_device(backend.cuda_backend(group))
    summaries = torch.tensor([send_summaries, expected], dtype=torch.int64, device=device).transpose(0, 1).contiguous()
    # Row p is (summary of what this rank sends to p, of what it expects from p); what arrives is p's view of both.
    peer_summaries = all_to_all(summaries, send_counts=(), recv_counts=(), group=group, name=_NAME).recv_wire
    for peer, (peer_sends, peer_expects) in enumerate(peer_summaries.tolist()):
        for source, target, sends, expects in (
            (peer, rank, _Summary(*peer_sends), expected[peer]),
            (rank, peer, send_summaries[peer], _Summary(*peer_expects)),
        ):
            if error is None and sends != expects:
                error = MismatchError(
                    f"{_NAME}: rank {source} sends {sends.tensors} tensors of {sends.nbytes} bytes to rank {target}, "
                    f"which expects {expects.tensors} of {expects.nbytes} bytes, or others by task_id or dtype; "
                    "nothing was sent"
                )
    (any_failed,) = largest(_NAME, group, [0 if error is None else 1])
    if error is not None:
        raise error
    if any_failed:
        raise MismatchError(f"{_NAME}: refused on another rank, nothing was sent")
