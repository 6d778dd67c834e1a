"""The executor of a transfer plan: one step per bucket (pack, exchange, unpack), and its autograd function."""

import weakref
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend
from tritoncomm.core.autograd import direct
from tritoncomm.core.blocks import Block
from tritoncomm.core.exchange import all_to_all
from tritoncomm.core.memory import contiguous_stride, empty, share_memory
from tritoncomm.core.ops import has_lazy, resolved
from tritoncomm.core.passes import TablePass, takes_kernel
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, GroupError, UnsupportedError
from tritoncomm.reshard import tables
from tritoncomm.reshard.plan import Bucket, Item, Participants, Side, TransferPlan, digest_of
from tritoncomm.reshard.planner import plan_transfers

__all__ = ["Executor", "apply", "messages"]

_PREPARED = 8  # combinations of strides whose steps an executor keeps


class BucketStep:
    """Passes of one bucket, prepared for tensors of certain strides, and the exchange between them.

    Args:
        strides: strides of all tensors before and after, in elements.
        in_place: results share memory with the tensors.
    """

    def __init__(
        self, bucket: Bucket, plan: TransferPlan, strides: tuple[tables.Strides, tables.Strides], in_place: bool
    ) -> None:
        self._bucket, self._in_place = bucket, in_place
        # Where blocks are staged, one memory has the sent, the staged and the received bytes, in this order. The pack
        # writes the first two, the unpack reads the last two.
        self._sizes = bucket.send.nbytes, bucket.staged_bytes, bucket.recv.nbytes
        carried = [item.carried for item in plan.items]
        self._pack = self._packs(strides[0], carried)
        self._unpacks = list(self._unpacks_of(plan, strides[1], carried))
        # Blocks that stay on this rank are copied into their results, or added to what other buckets bring.
        dtypes = [item.result for item in plan.items]
        own_blocks = tables.staying_blocks(bucket.direct, strides, dtypes)
        self._direct = [block for block in own_blocks if block.tensor not in plan.accumulated]
        self._summed = [block for block in own_blocks if block.tensor in plan.accumulated]
        # Results that share memory with the tensors are written from clones, see ``_views``.
        self._copies = None if in_place else tables.copies_between(self._direct, dtypes)

    def _packs(self, strides: tables.Strides, dtypes: Sequence[torch.dtype]) -> TablePass | None:
        """Return the pass that packs what is sent and what is staged; None without blocks."""
        bucket, (send_bytes, _, _) = self._bucket, self._sizes
        blocks = tables.concatenated(
            tables.blocks_of(bucket.send, bucket.send.start),
            tables.blocks_of(bucket.staged, bucket.staged.source, send_bytes),
        )
        return tables.pass_of(blocks, strides, dtypes)

    def _unpacks_of(
        self, plan: TransferPlan, strides: tables.Strides, dtypes: Sequence[torch.dtype]
    ) -> Iterator[tuple[TablePass, bool]]:
        """Yield the passes that unpack what was staged and what arrived, and whether they add to the results."""
        bucket, (send_bytes, staged, _) = self._bucket, self._sizes
        start = (
            send_bytes + staged if staged else 0
        )  # without staged blocks the received bytes have a memory of their own
        blocks = tables.concatenated(
            tables.blocks_of(bucket.staged, bucket.staged.target, send_bytes),
            tables.blocks_of(bucket.recv, bucket.recv.start, start),
        )
        groups = [(blocks, False)]
        if plan.sums:
            blocks = blocks.cut(*plan.summands(bucket), dtypes)  # so that pieces are equal or disjoint
            # A tensor to which several buckets contribute is added to; the others are written, by a pass of their own.
            adds = np.isin(blocks.tensor, list(plan.accumulated))
            groups = [(blocks.pick(~adds), False), (blocks.pick(adds), True)]
        for blocks, accumulate in groups:
            unpack = tables.pass_of(blocks, strides, dtypes, sums=plan.sums)
            if unpack is not None:
                yield unpack, accumulate

    def __bool__(self) -> bool:
        """Whether a step has to run: some rank sends, or this rank has blocks to pack or to copy."""
        return not self._bucket.is_quiet or self._pack is not None or bool(self._direct or self._summed)

    def run(
        self, sources: Sequence[Tensor], targets: Sequence[Tensor], executor: "Executor", name: str
    ) -> record.CopyPath:
        """Pack, exchange and unpack one bucket; copy the direct blocks meanwhile. Return the path of the last pass."""
        path: record.CopyPath = "view"
        pack_memory, unpack_memory, send, receive = self._staging(sources[0])
        if self._pack is not None:
            path = self._pack.pack(sources, pack_memory).path
        copies = self._copies if self._copies is not None and takes_kernel(sources[0]) else None
        # On torch's path blocks that are written to results sharing memory with the sources are read before the
        # exchange, which may overwrite them. In that case ``self._copies`` is None, so the kernel never has to.
        copied = self._views(self._direct, sources, targets) if self._direct and copies is None else None
        summed = self._views(self._summed, sources, targets) if self._summed else None
        work = None
        # The exchange returns at once only if there are blocks to copy meanwhile.
        if not self._bucket.is_quiet:
            has_copies = bool(self._direct or self._summed)
            work = executor.exchange(self._bucket, send, receive, name, asynchronous=has_copies)
        if copies is not None:
            path = copies.copy(sources, targets).path
        elif copied is not None:
            path = "torch"
            torch._foreach_copy_(copied[1], copied[0])  # pyright: ignore[reportPrivateImportUsage]
        if summed is not None:
            path = "torch"
            for block, target in zip(*summed, strict=True):
                target.add_(block)
        if work is not None:
            work.wait()
        del pack_memory, send, receive  # the sent bytes are not needed while the received ones are unpacked
        for unpack, accumulate in self._unpacks:
            path = unpack.unpack(unpack_memory, targets, accumulate).path
        return path

    def _staging(self, like: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Allocate the staging memory of one bucket, on the device of a tensor ``like``.

        Returns:
            The memory that the pack writes, the memory that the unpack reads (the same memory if blocks are staged),
            the bytes to send, and the bytes to receive into.
        """
        sent, staged, received = self._sizes
        if staged:
            size = sent + staged + received
            memory = empty(like, (size,), (1,), torch.uint8)
            return memory, memory, memory.narrow(0, 0, sent), memory.narrow(0, sent + staged, received)
        wire, base = (empty(like, (size,), (1,), torch.uint8) for size in (sent, received))
        return wire, base, wire, base

    def _views(
        self, blocks: list[Block], sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Return views of staying blocks, cloned if results share their memory, and of their places in the results."""
        views = [block.view(sources[block.tensor]) for block in blocks]
        places = [block.in_wire(targets[block.tensor]) for block in blocks]
        return [x.clone() for x in views] if self._in_place else views, places


class Executor:
    """Transfer plan with its group, which can be executed repeatedly, by several threads at once.

    Args:
        bucket_bytes: the most bytes of a bucket, on each side.
        sums: every replica of a source sends, and the receivers sum in the order of the ranks.

    Attributes:
        has_grad: whether a tensor of the plan may have a gradient.
        device: kind of device that the plan is for, ``cpu`` or ``cuda``.
        compares_calls: whether ranks compare each call of the plan, as one of them lacks tensors, and may guess
        wrongly.
    """

    def __init__(
        self, items: Sequence[Item], participants: Participants, bucket_bytes: int, grad: str, sums: bool = False
    ) -> None:
        group, ranks, position = participants
        self.items, self.grad, self.bucket_bytes = tuple(items), grad, bucket_bytes
        self.has_grad = any(item.has_grad for item in items)
        self.compares_calls = False
        self._group = None if group is None else weakref.ref(group)  # plans are cached by their group
        has_nccl = group is None or backend.cuda_backend(group) not in ("", "gloo")  # "": no backend for CUDA tensors
        self.device = "cuda" if has_nccl else "cpu"
        self.transfers = plan = plan_transfers(items, ranks, position, bucket_bytes, every_replica=sums)
        source_shapes = [item.source.local_shape(ranks[position]) or () for item in self.items]
        shapes = [item.target.local_shape(ranks[position]) for item in self.items]
        shapes = [(0,) if shape is None else shape for shape in shapes]
        # Shape, strides and dtype of every new result, and whether its memory needs no zeros.
        self._results = [
            (shape, contiguous_stride(shape), plan.arrives(i), is_complete and i not in plan.accumulated)
            for i, (shape, is_complete) in enumerate(zip(shapes, plan.complete, strict=True))
        ]
        # The cache is thread-safe, and does not refer to the executor: without a circle plans are freed at once.
        result_strides = [stride for _, stride, _, _ in self._results]
        self._prepared = lru_cache(_PREPARED)(partial(_prepared_steps, plan, source_shapes, result_strides))

    @cached_property
    def digest(self) -> bytes:
        """16-byte hash of a plan's tensors, options and ranks, which ranks compare."""
        return digest_of(self.items, (self.bucket_bytes, self.grad, self.transfers.sums, self.transfers.ranks))

    @property
    def group(self) -> ProcessGroup | None:
        """Process group that a plan was made for, which is referenced weakly; None for a plan without a group."""
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise GroupError("reshard: the process group of this plan was destroyed")
        return group

    @cached_property
    def adjoint(self) -> "Executor":
        """Executor of the gradients: from target to source layouts, for the tensors that have a gradient."""
        items = [item.reversed() for item in self.items if item.has_grad]
        sums = self.grad == "partial" and not self.transfers.sums
        # A problem is a text. Elements that the target left out have no gradient, and only overlaps are ambiguous.
        for item in items:
            if not sums and item.source.problem and "overlap" in item.source.problem:
                raise UnsupportedError(
                    f"reshard.backward: the gradient of {item.name} is ambiguous, as {item.source.problem}; "
                    'pass grad="partial" if they are to be summed'
                )
        participants = Participants(self.group, self.transfers.ranks, self.transfers.position)
        return Executor(items, participants, self.bucket_bytes, self.grad, sums=sums)

    def run(self, tensors: Sequence[Tensor], name: str, results: Sequence[Tensor] | None = None) -> Sequence[Tensor]:
        """Reshard the local tensors of this rank, without autograd, and return the local results.

        Args:
            tensors: local source tensors. Of a layout without this rank, only the device matters.
            results: tensors to write into; new ones by default. They may share memory with ``tensors`` if the plan has
                one bucket.
        """
        started, _range = record.now(), None  # a profiler shows the call until ``_range`` is dropped, at the end
        if record.is_observed() and self.group is not None:
            _range = record.begin(name, "reshard", self.group, list(tensors), (self.digest.hex(),))
        # Kernels copy bits, and lazy conjugates and negatives are not in the bits.
        sources, copied = tensors, 0
        is_readable = not has_lazy(tensors)
        for x in tensors:
            is_readable = is_readable and not x.requires_grad
        if not is_readable:
            sources = [resolved(x.detach()) for x in tensors]
            pairs = zip(tensors, sources, strict=True)
            copied = sum(2 * x.nbytes for x, source in pairs if x.data_ptr() != source.data_ptr())
        if results is None:
            # A result starts as zeros if no block writes a part of it, or if buckets add to it.
            targets = [
                empty(x, shape, stride, dtype) if is_complete else x.new_zeros(shape, dtype=dtype)
                for x, (shape, stride, dtype, is_complete) in zip(sources, self._results, strict=True)
            ]
            after, in_place = None, False
        else:
            # A result whose rows are not dense, or with lazy bits, is written through new memory and copied at the end.
            detached = [x.detach() for x in results]
            targets = [
                x if _has_dense_rows(x.shape, x.stride()) and not has_lazy((x,)) else x.new_empty(x.shape)
                for x in detached
            ]
            after = tuple([(x.stride(), x.get_device()) for x in targets])
            in_place = self._is_in_place(sources, targets, name)
        before = tuple([(x.stride(), x.get_device()) for x in sources])
        uneven, steps = self._prepared(before, after, in_place)
        if uneven:
            sources = list(sources)
            for i in uneven:
                sources[i] = sources[i].contiguous()
                copied += 2 * sources[i].nbytes
        path: record.CopyPath = "view"
        for step in steps:
            taken = step.run(sources, targets, self, name)
            path = path if taken == "view" else taken  # a step without passes changes nothing
        if results is not None:
            increment_version(results)  # kernels write below autograd, which would miss that saved tensors changed
            for x, target in zip(results, targets, strict=True):
                if x.data_ptr() != target.data_ptr():
                    x.copy_(target)
                    copied += 2 * x.nbytes
        # Sums over several buckets were made in fp32 or wider, in new results alone; see ``TransferPlan.arrives``.
        for i in self.transfers.accumulated:
            if targets[i].dtype is not self.items[i].result:
                copied += targets[i].nbytes
                targets[i] = targets[i].to(self.items[i].result)
                copied += targets[i].nbytes
        record.add(name, path, copied + self.transfers.bytes_copied, self.transfers.bytes_sent, started)
        return targets

    def _is_in_place(self, sources: Sequence[Tensor], targets: Sequence[Tensor], name: str) -> bool:
        """Whether results share memory with source tensors; raise if they do and the plan has several buckets."""
        # Source tensors with other rows are copied before.
        in_place = share_memory([x for x in sources if _has_dense_rows(x.shape, x.stride())], targets)
        if in_place and sum(not bucket.is_quiet for bucket in self.transfers.buckets) > 1:
            raise ArgumentError(
                f"{name}: out shares memory with the tensors, which needs a single bucket: bucket_bytes of at least "
                f"{int(max(self.transfers.sent.max(), self.transfers.received.max()))}"
            )
        return in_place

    def exchange(self, bucket: Bucket, wire: Tensor, recv_wire: Tensor, name: str, asynchronous: bool) -> Any:
        """Start the exchange of one bucket; return a handle to wait for, None if the exchange is over."""
        group = self.group
        if group is None:
            raise GroupError(f"{name}: this plan was made without a group, to be looked at")
        # No rank both sends and receives: a batch of messages in place of an all-to-all-v.
        if self.transfers.is_disjoint:
            sends, receives = messages(wire, bucket.send), messages(recv_wire, bucket.recv)
            return backend.send_and_receive(sends, receives, group, name)
        return all_to_all(wire, bucket.send.counts, bucket.recv.counts, group, name, recv_wire, asynchronous).work


def _prepared_steps(
    plan: TransferPlan,
    source_shapes: Sequence[Ints],
    result_strides: Sequence[Ints],
    before: Sequence[tuple[Ints, int]],
    after: Sequence[tuple[Ints, int]] | None,
    in_place: bool,
) -> tuple[list[int], list[BucketStep]]:
    """Prepare the steps of all buckets of a plan for tensors of certain strides.

    Args:
        source_shapes: shapes of this rank's source tensors; ``()`` for a layout without a part on this rank.
        result_strides: strides of new results.
        before: strides and device number of every source tensor. Launches of a step belong to a device.
        after: strides and device number of every result that the caller passed; None for new results.

    Returns:
        Indices of the source tensors whose rows are not contiguous, which have to be made contiguous first; and the
        steps of all buckets that are not empty.
    """
    uneven = [i for i, (stride, _) in enumerate(before) if not _has_dense_rows(source_shapes[i], stride)]
    sources = [contiguous_stride(source_shapes[i]) if i in uneven else stride for i, (stride, _) in enumerate(before)]
    targets = result_strides if after is None else [stride for stride, _ in after]
    strides = (  # in the plan's index space, which has two dims for a strided one, so that boxes are dense
        tuple(item.source.strides_of(stride) for item, stride in zip(plan.items, sources, strict=True)),
        tuple(item.target.strides_of(stride) for item, stride in zip(plan.items, targets, strict=True)),
    )
    steps = [BucketStep(bucket, plan, strides, in_place) for bucket in plan.buckets]
    return uneven, [step for step in steps if step]


def messages(wire: Tensor, side: Side) -> list[tuple[int, Tensor]]:
    """Cut the bytes that a rank sends in a bucket, or receives: return (position, view) of every peer's message."""
    return [(peer, wire.narrow(0, start, count)) for peer, start, count in side.parts]


def _has_dense_rows(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Whether the rows of a tensor of this shape and stride are contiguous: its last dim has stride 1."""
    # Tensors with other rows are copied before they are sent, because each of their elements would be a segment.
    return not shape or shape[-1] <= 1 or stride[-1] == 1


def apply(executor: Executor, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
    """Reshard local tensors and return the local results; autograd records the call if a gradient is wanted."""
    if executor.has_grad and torch.is_grad_enabled():
        return _Reshard.apply(executor, name, *tensors)
    return executor.run(tensors, name)


@direct
class _Reshard(torch.autograd.Function):
    """Forward: execute the plan. Backward: execute the plan's adjoint, for the tensors that have a gradient."""

    @staticmethod
    def forward(ctx: Any, executor: Executor, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.executor, ctx.group, ctx.name = executor, executor.group, name
        results = executor.run(tensors, name)
        ctx.mark_non_differentiable(*(x for x, item in zip(results, executor.items, strict=True) if not item.has_grad))
        ctx.set_materialize_grads(False)  # ``backward`` makes zeros of missing gradients itself
        ctx.like = [(x.shape, x.dtype, x.device) for x in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        executor: Executor = ctx.executor
        # Missing gradients are zeros: all ranks of a plan have to send the same tensors.
        present = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device), item in zip(grads, ctx.like, executor.items, strict=True)
            if item.has_grad
        ]
        name = ctx.name if ctx.name.endswith(".backward") else f"{ctx.name}.backward"
        if any(grad.requires_grad for grad in present):
            results = iter(_Reshard.apply(executor.adjoint, name, *present))
        else:
            results = iter(executor.adjoint.run(present, name))
        return None, None, *(next(results) if item.has_grad else None for item in executor.items)
