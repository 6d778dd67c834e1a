"""Carrying out a plan, bucket by bucket, and its autograd."""

import threading
import weakref
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import backend
from tritoncomm.core.function import direct
from tritoncomm.core.memory import contiguous_stride, empty, share_memory
from tritoncomm.core.plan import Ints
from tritoncomm.errors import ArgumentError, GroupError, UnsupportedError
from tritoncomm.reshard.plan import Bucket, Item, Side, Transfers, digest
from tritoncomm.reshard.planner import transfers
from tritoncomm.reshard.steps import Step, steps_of

__all__ = ["Exchange", "apply", "check_dtypes", "messages"]

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
        adjoint: the exchange of which this one is the adjoint, where that is the other way round, too.

    Attributes:
        device: kind of device that the exchange is for, ``cpu`` or ``cuda``.
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
        adjoint: "Exchange | None" = None,
    ) -> None:
        self.items, self.grad, self.sums, self._adjoint = tuple(items), grad, sums, adjoint
        self._group = None if group is None else weakref.ref(group)  # plans are cached by their group
        self.device = "cpu" if group is not None and backend.cuda_backend(group) in ("", "gloo") else "cuda"
        self.transfers: Transfers = transfers(items, ranks, position, bucket_bytes, every_replica=sums)
        self.bucket_bytes = bucket_bytes
        self.carried = [item.carried for item in self.items]
        rank = ranks[position]
        self.source_shapes = [item.source.local_shape(rank) for item in self.items]
        shapes = (item.target.local_shape(rank) for item in self.items)
        self.shapes = [(0,) if shape is None else shape for shape in shapes]
        self._makes = [
            (shape, contiguous_stride(shape), self.transfers.arrives(i), covers and i not in self.transfers.accumulated)
            for i, (shape, covers) in enumerate(zip(self.shapes, self.transfers.complete, strict=True))
        ]
        self._steps: dict[Any, tuple[list[int], list[Step]]] = {}
        self._lock = threading.Lock()

    @cached_property
    def _digest(self) -> str:
        """Digest of everything that the ranks have to agree on, in hexadecimal."""
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

    @property
    def adjoint(self) -> "Exchange":
        """The exchange of the gradients, of those tensors that have one."""
        if self._adjoint is None:
            self._adjoint = self._reversed()
        return self._adjoint

    def _reversed(self) -> "Exchange":
        plan = self.transfers
        items = [item.reversed() for item in self.items if item.has_grad]
        sums = self.grad == "partial" and not self.sums
        for item in items:
            if not sums and item.source.problem and "overlap" in item.source.problem:
                raise UnsupportedError(
                    f"reshard.backward: the gradient of {item.name} is ambiguous, as {item.source.problem}; "
                    'pass grad="partial" if they are to be summed'
                )
        adjoint = self if len(items) == len(self.items) else None
        return Exchange(items, plan.ranks, plan.position, self.group, self.bucket_bytes, self.grad, sums, adjoint)

    def run(self, tensors: Sequence[Tensor], results: Sequence[Tensor] | None, name: str) -> Sequence[Tensor]:
        """Exchange the tensors of this rank; without autograd.

        Args:
            tensors: of the source; those of a layout without this rank are not looked at, but for their device.
            results: to write into; new ones by default.
            name: the function, for errors and counters.
        """
        started, _range = record.now(), self._begin(tensors, name)
        sources, copied = tensors, 0
        if any(x.requires_grad or x.is_conj() or x.is_neg() for x in tensors):
            sources = [x.detach().resolve_conj().resolve_neg() for x in tensors]
            pairs = zip(tensors, sources, strict=True)
            copied = sum(2 * x.nbytes for x, source in pairs if x.data_ptr() != source.data_ptr())
        targets = self._made(sources) if results is None else self._into(results)
        in_place = results is not None and self._is_in_place(sources, targets, name)
        after = None if results is None else tuple([(x.stride(), x.get_device()) for x in targets])
        key = tuple([(x.stride(), x.get_device()) for x in sources]), after, in_place
        uneven, steps = self._steps.get(key) or self._steps_for(key, sources, targets)
        if uneven:
            sources = list(sources)
            for i in uneven:
                sources[i] = sources[i].contiguous()
                copied += 2 * sources[i].nbytes
        path = self._run_steps(steps, sources, targets, name)
        if results is not None:
            increment_version(results)
            for x, target in zip(results, targets, strict=True):
                if x.data_ptr() != target.data_ptr():
                    x.copy_(target)
                    copied += 2 * x.nbytes
        for i in self.transfers.accumulated:
            if targets[i].dtype is not self.items[i].result:
                copied += targets[i].nbytes
                targets[i] = targets[i].to(self.items[i].result)
                copied += targets[i].nbytes
        record.add(name, path, copied + self.transfers.bytes_copied, self.transfers.bytes_sent, started)
        return targets

    def _begin(self, tensors: Sequence[Tensor], name: str) -> Any:
        """Report the call to the observer; returns its range for the profiler, if one is on."""
        if record.switch._is_profiler_enabled and self.group is not None:
            return record.begin(name, "reshard", self.group, list(tensors), (self._digest,))
        return None

    def _run_steps(
        self,
        steps: list[Step],
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        name: str,
    ) -> record.CopyPath:
        path: record.CopyPath = "view"
        try:
            for step in steps:
                taken = step.run(sources, targets, self._exchange, name)
                path = path if taken == "view" else taken
        except ValueError as failure:
            if any(x.is_meta for x in sources):  # looked at only now, as it costs every tensor of every call
                raise ArgumentError(f"{name}: a meta tensor has no data to send") from failure
            raise
        return path

    def _made(self, sources: Sequence[Tensor]) -> list[Tensor]:
        """Contiguous memory for the results; zeros where something may not be written, or is added."""
        return [
            empty(x, shape, stride, dtype) if covers else x.new_zeros(shape, dtype=dtype)
            for x, (shape, stride, dtype, covers) in zip(sources, self._makes, strict=True)
        ]

    def _into(self, results: Sequence[Tensor]) -> list[Tensor]:
        """The results, or contiguous memory where rows, or their bits, cannot be written into them."""
        results = [x.detach() for x in results]
        return [x if _is_readable(x) and not (x.is_conj() or x.is_neg()) else x.new_empty(x.shape) for x in results]

    def _is_in_place(self, sources: Sequence[Tensor], targets: Sequence[Tensor], name: str) -> bool:
        """Whether results share memory with the tensors.

        Raises:
            ArgumentError: they do, and there are several buckets.
        """
        if not share_memory([x for x in sources if _is_readable(x)], targets):
            return False
        if sum(not bucket.is_quiet for bucket in self.transfers.buckets) > 1:
            raise ArgumentError(
                f"{name}: out shares memory with the tensors, which needs a single bucket: bucket_bytes of at least "
                f"{int(max(self.transfers.sent.max(), self.transfers.received.max()))}"
            )
        return True

    def _steps_for(
        self, key: Any, sources: Sequence[Tensor], targets: Sequence[Tensor]
    ) -> tuple[list[int], list[Step]]:
        """Tensors whose rows are not contiguous, and all buckets, prepared for these strides once."""
        uneven = [i for i, x in enumerate(sources) if not _is_readable(x)]
        items = self.transfers.items  # in the index space of the plan
        before = tuple(
            item.source.strides_of((x.contiguous() if i in uneven else x).stride())
            for i, (item, x) in enumerate(zip(items, sources, strict=True))
        )
        after = tuple(item.target.strides_of(x.stride()) for item, x in zip(items, targets, strict=True))
        made = uneven, steps_of(self.transfers, before, after, key[-1])
        with self._lock:  # several threads may execute one plan
            while len(self._steps) >= _TABLES:
                self._steps.pop(next(iter(self._steps)))
            self._steps[key] = made
        return made

    def _exchange(self, bucket: Bucket, wire: Tensor, received: Tensor, name: str, asynchronous: bool) -> Any:
        """Start one all-to-all-v, or a batch of messages between disjoint sets of ranks; None when it is over."""
        group = self.group
        if group is None:
            raise GroupError(f"{name}: this plan was made without a group, to be looked at")
        if self.transfers.is_disjoint:
            sends, receives = messages(wire, bucket.send), messages(received, bucket.recv)
            return backend.send_and_receive(sends, receives, group, name)
        return backend.all_to_all(received, wire, bucket.recv.counts, bucket.send.counts, group, name, asynchronous)


def messages(wire: Tensor, side: Side) -> list[tuple[int, Tensor]]:
    """What goes to, or comes from, each rank on the other side."""
    return [(peer, wire.narrow(0, start, count)) for peer, start, count in side.parts]


def _is_readable(x: Tensor) -> bool:
    """Whether rows of ``x`` are contiguous, so that tables describe it well."""
    return x.dim() == 0 or x.shape[-1] <= 1 or x.stride(-1) == 1


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
        ctx.exchange, ctx.group, ctx.name = exchange, exchange.group, name
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
