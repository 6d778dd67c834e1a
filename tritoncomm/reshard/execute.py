"""Carrying out a plan: pack, one collective and unpack per bucket; local blocks are copied directly. Autograd."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend, segments
from tritoncomm.core.function import direct
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, GroupError, UnsupportedError
from tritoncomm.reshard.builder import transfers
from tritoncomm.reshard.plan import Bucket, Item, Side, Transfers, digest
from tritoncomm.reshard.tables import Strides, Table, local_pairs, strides_of, table_of

__all__ = ["Exchange", "apply", "check_dtypes"]

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_TABLES = 8


def check_dtypes(item: Item, grad: str, name: str) -> None:
    """Refuse arithmetic that the copy kernels do not have.

    Raises:
        UnsupportedError: a cast, or a gradient to be summed, of anything but fp16, bf16, fp32 and fp64.
    """
    if item.dtype != item.result and not {item.dtype, item.result} <= set(_FLOATS):
        raise UnsupportedError(
            f"{name}: {item.name} cannot be cast from {item.dtype} to {item.result} on the way: only fp16, bf16, fp32 "
            "and fp64 are"
        )
    if item.has_grad and grad == "partial" and item.dtype not in _FLOATS:
        raise UnsupportedError(f"{name}: gradients of {item.name} cannot be summed as {item.dtype}")


@dataclass(frozen=True, slots=True)
class _Step:
    """One bucket for tensors of certain strides; see ``Bucket``."""

    bucket: Bucket
    send: Table | None
    receive: tuple[tuple[int, Table | None], ...]  # and the byte of the wire from which on the table counts
    local: list[Any]


class Exchange:
    """A plan with its group, which can be executed repeatedly.

    Args:
        items: the tensors.
        ranks: global ranks of the group.
        position: of this rank in the group.
        group: None for a plan that is only looked at.
        bucket_bytes: bytes of a bucket at most, on each side.
        grad: ``replicated`` or ``partial``, see ``reshard``.
        sums: every replica of the source sends and the target adds them up, in the order of the ranks.
    """

    def __init__(
        self,
        items: Sequence[Item],
        ranks: Ints,
        position: int,
        group: ProcessGroup | None,
        bucket_bytes: int,
        grad: str,
        sums: bool = False,
    ) -> None:
        self.items, self.grad, self.sums = tuple(items), grad, sums
        self._group = None if group is None else weakref.ref(group)  # plans are cached by their group
        self.transfers: Transfers = transfers(items, ranks, position, bucket_bytes, every_replica=sums)
        self.bucket_bytes = bucket_bytes
        self.carried = [item.carried for item in self.items]
        rank = ranks[position]
        self.source_shapes = [item.source.local_shape(rank) for item in self.items]
        shapes = (item.target.local_shape(rank) for item in self.items)
        self.shapes = [(0,) if shape is None else shape for shape in shapes]
        self._covers = [not item.source.problem for item in self.items]
        self._steps: dict[Any, list[_Step]] = {}

    @cached_property
    def _digest(self) -> str:
        """What the ranks have to agree on."""
        return digest(self.items, (self.bucket_bytes, self.grad, self.sums, self.transfers.ranks)).hex()

    @property
    def group(self) -> ProcessGroup | None:
        """The group; None for a plan that is only looked at.

        Raises:
            GroupError: it was destroyed.
        """
        group = None if self._group is None else self._group()
        if group is None and self._group is not None:
            raise GroupError("reshard: the process group of this plan was destroyed")
        return group

    @cached_property
    def adjoint(self) -> "Exchange":
        """The exchange of the gradients, of those tensors that have one."""
        plan = self.transfers
        items = [item.reversed() for item in self.items if item.has_grad]
        sums = self.grad == "partial" and not self.sums
        for item in items:
            if not sums and item.source.problem and "overlap" in item.source.problem:
                raise UnsupportedError(
                    f"reshard.backward: the gradient of {item.name} is ambiguous, as {item.source.problem}; "
                    'pass grad="partial" if they are to be summed'
                )
        made = Exchange(items, plan.ranks, plan.position, self.group, self.bucket_bytes, self.grad, sums)
        if len(items) == len(self.items):
            made.adjoint = self
        return made

    def run(self, tensors: Sequence[Tensor], results: Sequence[Tensor] | None, name: str) -> list[Tensor]:
        """Exchange the tensors of this rank; without autograd.

        Args:
            tensors: of the source; those of a layout without this rank are not looked at, but for their device.
            results: to write into; new ones by default.
            name: the function, for errors and counters.
        """
        started = record.now()
        _range = None
        if record.switch._is_profiler_enabled and self.group is not None:
            _range = record.begin(name, "reshard", self.group, list(tensors), (self._digest,))
        sources = [_readable(x) for x in tensors]
        copied = sum(
            2 * x.nbytes for x, source in zip(tensors, sources, strict=True) if x.data_ptr() != source.data_ptr()
        )
        targets = self._targets(sources, results)
        in_place = results is not None and _share_memory(sources, targets)
        if in_place and sum(not bucket.is_quiet for bucket in self.transfers.buckets) > 1:
            raise ArgumentError(
                f"{name}: out shares memory with the tensors, which needs a single bucket: bucket_bytes of at least "
                f"{int(max(self.transfers.sent.max(), self.transfers.received.max()))}"
            )
        path: record.CopyPath = "view"
        for step in self._steps_for(strides_of(sources), strides_of(targets)):
            path = self._bucket(step, sources, targets, in_place, name) or path
        if results is not None:
            for x, target in zip(results, targets, strict=True):
                if x is not target:
                    x.copy_(target)
                    copied += 2 * x.nbytes
        elif self.sums:
            targets = [
                x if x.dtype == item.result else x.to(item.result) for x, item in zip(targets, self.items, strict=True)
            ]
        record.add(name, path, copied + self.transfers.bytes_copied, self.transfers.bytes_sent, started)
        return targets

    def _targets(self, sources: Sequence[Tensor], results: Sequence[Tensor] | None) -> list[Tensor]:
        """Contiguous memory for the results, or theirs where rows can be written into it."""
        if results is not None:
            return [
                x.detach() if _is_readable(x) else x.new_empty(x.shape) for x in (each.detach() for each in results)
            ]
        if self.sums:
            return [
                x.new_zeros(shape, dtype=torch.float64 if item.result is torch.float64 else torch.float32)
                for x, shape, item in zip(sources, self.shapes, self.items, strict=True)
            ]
        return [
            x.new_empty(shape, dtype=item.result) if covers else x.new_zeros(shape, dtype=item.result)
            for x, shape, item, covers in zip(sources, self.shapes, self.items, self._covers, strict=True)
        ]

    def _steps_for(self, before: Strides, after: Strides) -> list[_Step]:
        """The tables of all buckets, made for these strides once."""
        steps = self._steps.get((before, after))
        if steps is None:
            while len(self._steps) >= _TABLES:
                self._steps.pop(next(iter(self._steps)))
            steps = [
                _Step(
                    bucket, table_of(bucket.send, before, self.carried), self._receives(bucket.recv, after),
                    local_pairs(bucket.local, (before, after)),
                )
                for bucket in self.transfers.buckets
            ]  # fmt: skip
            self._steps[before, after] = steps
        return steps

    def _receives(self, side: Side, strides: Strides) -> tuple[tuple[int, Table | None], ...]:
        """One table; to add up, one for every sender, whose blocks may overlap with those of others."""
        if not self.sums:
            return ((0, table_of(side, strides, self.carried)),)
        tables: list[tuple[int, Table | None]] = []
        first = 0
        for count in side.counts:
            chosen = (side.wire >= first) & (side.wire < first + count)
            tables.append((first, table_of(side, strides, self.carried, chosen)))
            first += count
        return tuple(tables)

    def _bucket(
        self, step: _Step, sources: Sequence[Tensor], targets: Sequence[Tensor], in_place: bool, name: str
    ) -> record.CopyPath | None:
        """Pack, exchange, unpack; the path that the passes took, None where there was none."""
        path: record.CopyPath | None = None
        wire, bucket = None, step.bucket
        if step.send is not None:
            used, table = step.send
            wire = sources[used[0]].new_empty(bucket.send.nbytes, dtype=torch.uint8)
            path, _ = segments.gather([sources[i] for i in used], wire, table)
        local = [
            (_view(sources[i], at[0], at[1], at[2]), _view(targets[i], at[0], at[3], at[4])) for i, at in step.local
        ]
        if in_place:
            local = [(block.clone(), target) for block, target in local]
        received, work = None, None
        if not bucket.is_quiet:
            received, work = self._exchange(bucket, wire, (sources or targets)[0], name)
        if not self.sums:
            for block, target in local:
                target.copy_(block)
        if work is not None:
            work.wait()
        del wire  # what was sent is not needed while what arrived is unpacked
        for place, (first, table) in enumerate(step.receive):
            if self.sums and place == self.transfers.position:
                for block, target in local:
                    target.add_(block)
            if table is not None:
                assert received is not None
                used, rows = table
                path, _ = segments.scatter(received[first:], [targets[i] for i in used], rows, accumulate=self.sums)
        return path or ("torch" if local else None)

    def _exchange(self, bucket: Bucket, wire: Tensor | None, like: Tensor, name: str) -> tuple[Tensor, Any]:
        """Start one all-to-all-v, or a batch of messages between disjoint sets of ranks."""
        group = self.group
        if group is None:
            raise GroupError(f"{name}: this plan was made without a group, to be looked at")
        received = like.new_empty(bucket.recv.nbytes, dtype=torch.uint8)
        wire = received.new_empty(0) if wire is None else wire
        if self.transfers.is_disjoint:
            sends, receives = _messages(wire, bucket.send.counts), _messages(received, bucket.recv.counts)
            return received, backend.send_and_receive(sends, receives, group, name)
        counts = bucket.recv.counts, bucket.send.counts
        return received, backend.all_to_all(received, wire, *counts, group, name, True)


def _messages(wire: Tensor, counts: Ints) -> list[tuple[int, Tensor]]:
    return [(peer, part) for peer, part in enumerate(wire.split(counts)) if part.numel()]


def _is_readable(x: Tensor) -> bool:
    """Whether rows of ``x`` are contiguous, so that tables describe it well."""
    return x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1


def _readable(x: Tensor) -> Tensor:
    """The memory of ``x`` without autograd and lazy views; a contiguous copy if its rows are not contiguous."""
    x = x.detach().resolve_conj().resolve_neg()
    return x if _is_readable(x) else x.contiguous()


def _share_memory(sources: Sequence[Tensor], targets: Sequence[Tensor]) -> bool:
    known = {x.untyped_storage().data_ptr() for x in sources if x.numel()}
    return any(x.untyped_storage().data_ptr() in known for x in targets if x.numel())


def _view(x: Tensor, size: Ints, stride: Ints, offset: Ints) -> Tensor:
    return x.as_strided(size, stride, int(x.storage_offset()) + offset[0])


def apply(exchange: Exchange, tensors: Sequence[Tensor], name: str) -> Sequence[Tensor]:
    """The exchange, inside autograd if one of the tensors wants a gradient."""
    if any(item.has_grad for item in exchange.items) and torch.is_grad_enabled():
        return _Reshard.apply(exchange, name, *tensors)
    return exchange.run(tensors, None, name)


@direct
class _Reshard(torch.autograd.Function):
    """Forward: the exchange. Backward: its adjoint, of those tensors that have a gradient."""

    @staticmethod
    def forward(ctx: Any, exchange: Exchange, name: str, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.exchange, ctx.name = exchange, name
        results = exchange.run(tensors, None, name)
        ctx.mark_non_differentiable(*(x for x, item in zip(results, exchange.items, strict=True) if not item.has_grad))
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype, x.device) for x in results]
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        exchange: Exchange = ctx.exchange
        made = [
            torch.zeros(shape, dtype=dtype, device=device) if grad is None else grad
            for grad, (shape, dtype, device), item in zip(grads, ctx.like, exchange.items, strict=True)
            if item.has_grad
        ]
        name = ctx.name if ctx.name.endswith(".backward") else f"{ctx.name}.backward"
        if any(grad.requires_grad for grad in made):
            results = iter(_Reshard.apply(exchange.adjoint, name, *made))
        else:
            results = iter(exchange.adjoint.run(made, None, name))
        return None, None, *(next(results) if item.has_grad else None for item in exchange.items)
