"""``reshard`` and ``reshard_plan``: tensors from one layout to another, over any ranks."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core.cost import DEFAULTS, Rates
from tritoncomm.core.function import outside_graphs, without_graph
from tritoncomm.core.memory import share_memory
from tritoncomm.core.validation import check_data, refuse_transforms
from tritoncomm.errors import ArgumentError, CommError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.arguments import Call, check_memory
from tritoncomm.reshard.execute import Exchange, apply
from tritoncomm.reshard.plan import Item
from tritoncomm.reshard.report import text_of
from tritoncomm.reshard.specs import check_own_layout, local_of, named

__all__ = ["BUCKET_BYTES", "ReshardPlan", "refuse", "reshard", "reshard_plan"]

BUCKET_BYTES = 256 * 2**20
Grad = Literal["replicated", "partial"]


@outside_graphs
def reshard(
    tensors: Any,
    source: Any = None,
    target: Any = None,
    *,
    group: GroupLike | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    grad: Grad = "replicated",
    out: Any = None,
) -> Any:
    """Tensors in another layout, over the same, other or overlapping ranks.

    Forward: every rank gets its boxes of the target from ranks that have them; what it has itself it copies. Backward:
    the same from target to source. Per bucket one pack, one all-to-all-v (between disjoint sets of ranks one batch of
    messages) and one unpack. A tensor whose layout and dtype stay is handed back. Every rank of the group calls, with
    the same layouts and names in the same order. Under torch.compile the graph breaks here.

    Args:
        tensors: one, a sequence, or a mapping by name: local tensors, DTensors or ColoTensors. A rank without a part
            of the source passes an empty tensor of the dtype, on its device, that requires grad if the others do.
        source: a ``Layout``, or one per tensor; None for DTensors and ColoTensors, which know theirs.
        target: a ``Layout``, ``(mesh, placements)`` or a ``ColoTensorSpec``; or one per tensor.
        group: has all ranks of both layouts; all ranks of the job by default.
        dtype: of the results, or by name; fp16, bf16, fp32 and fp64 are cast on the way, at the smaller width.
        bucket_bytes: extra memory at most on the sending and on the receiving side.
        grad: what the gradients of the replicas of a result are: ``replicated``, equal, and count once; ``partial``,
            and are summed in rank order.
        out: tensors to write into, as ``tensors`` are; nothing is differentiable then. They may share memory with the
            tensors if one bucket has room for all.

    Returns:
        As ``tensors``: local tensors for a ``Layout``, DTensors or ColoTensors for the others. On a rank without a part
        of the target an empty tensor, through which backward has to go there.

    Raises:
        ShapeError: shapes that differ, a source that does not cover its tensor, a local tensor of another shape.
        GroupError: a layout has ranks that are not in the group.
        MismatchError: another rank has other arguments, or refused its own. Nothing was sent; but where the others have
            a plan for theirs already, they exchange without it and raise this after the group's timeout.
        UnsupportedError: partial placements, or a cast of other dtypes.
    """
    call = Call(tensors, source, target, group, dtype, grad, out, "reshard")
    plan = ReshardPlan(call, call.exchange(bucket_bytes))
    results = plan.run(call.locals, None if out is None else call.outs)
    return call.form(tensors, results) if out is None else out


def reshard_plan(
    tensors: Any,
    source: Any = None,
    target: Any = None,
    *,
    group: GroupLike | None = None,
    dtype: torch.dtype | Mapping[str, torch.dtype] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    grad: Grad = "replicated",
    ranks: Sequence[int] | None = None,
    rank: int = 0,
) -> "ReshardPlan":
    """The plan of ``reshard``, to look at or to execute repeatedly; ranks compare it here, not when they execute it.

    Args:
        tensors: as for ``reshard``, or their dtypes.
        source, target, group, dtype, bucket_bytes, grad: as for ``reshard``.
        ranks: global ranks of a group that does not exist: a plan to look at, without communication.
        rank: the global rank that such a plan is for.

    It raises what ``reshard`` raises.
    """
    call = Call(tensors, source, target, group, dtype, grad, None, "reshard_plan", ranks, rank)
    plan = ReshardPlan(call, call.exchange(bucket_bytes))
    call.locals.clear()  # a plan keeps no tensors, and no group, which may be destroyed before
    call.group = None
    call.name = "reshard"  # which it executes
    return plan


def refuse(error: CommError, group: ProcessGroup, name: str) -> None:
    """Raise an error of this rank's arguments, and let the ranks that make a plan meanwhile raise, too.

    Raises:
        CommError: ``error``.
    """
    call = Call({}, None, None, group, None, "replicated", None, name)
    call.error, call.is_read = error, False
    call.exchange(BUCKET_BYTES)
    raise error


class ReshardPlan(record.Traffic):
    """A resharding that can be looked at and executed repeatedly; prints as a table.

    Attributes:
        items: what happens to every tensor, those that stay as they are included.
        transfers: messages, buckets and bytes of this rank, and totals of all ranks; of the tensors that move.
    """

    def __init__(self, call: Call, exchange: Exchange) -> None:
        self._call, self._exchange = call, exchange
        self.transfers = exchange.transfers
        self._stays = call.stays
        self._name = "reshard" if call.name == "reshard_plan" else call.name

    bytes_sent = property(attrgetter("transfers.bytes_sent"), doc="Bytes this rank sends, alignment included.")
    bytes_copied = property(attrgetter("transfers.bytes_copied"), doc="Bytes read plus written by this rank's passes.")

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """What happens to every tensor."""
        return tuple(self._call.items)

    @cached_property
    def _names(self) -> list[str]:
        return [item.name for item in self.items]

    @outside_graphs
    def execute(self, tensors: Any, out: Any = None) -> Any:
        """What ``reshard`` does, without comparing plans; arguments and results as there.

        Raises:
            ShapeError: a tensor of another shape than the plan was made for, or a DTensor of another layout.
            ArgumentError: other tensors or dtypes, or a gradient where the plan has none.
        """
        call = self._call
        given, outs = named(tensors, "reshard"), None if out is None else named(out, "reshard")
        if list(given) != self._names or (outs is not None and list(outs) != self._names):
            got = list(given if outs is None or list(given) != self._names else outs)
            raise ArgumentError(f"reshard: the plan is for {self._names}, not for {got}")
        locals_ = [local_of(x) for x in given.values()]
        for item, x, local in zip(self.items, given.values(), locals_, strict=True):
            if local is not x:
                check_own_layout(x, item.source, "reshard", item.name)
        self._check(locals_, out is None and torch.is_grad_enabled())
        if outs is None:
            return call.form(tensors, self.run(locals_, None))
        into = [local_of(x) for x in outs.values()]
        for item, x, local in zip(self.items, outs.values(), into, strict=True):
            if local is not x:
                check_own_layout(x, item.target, "reshard", f"out {item.name}")
            call.check_out(item.name, item.target, local, item.result)
        call.check_apart(into)
        self.run(locals_, into)
        return out

    def _check(self, tensors: Sequence[Any], may_record: bool) -> None:
        """Refuse tensors that are not as the plan has them."""
        for item, x in zip(self.items, tensors, strict=True):
            if not isinstance(x, Tensor):
                raise ArgumentError(f"reshard: {item.name} must be a tensor, not {type(x).__name__}")
            check_data(x, f"reshard: {item.name}")
            check_memory(x, f"reshard: {item.name}")
            refuse_transforms(x, "reshard", item.name)
            self._call.check_local(item.name, item.source, x)
            if x.dtype != item.dtype:
                raise ArgumentError(f"reshard: {item.name} is {x.dtype}, but the plan is for {item.dtype}")
            if may_record and x.requires_grad and not item.has_grad:
                raise ArgumentError(f"reshard: {item.name} requires grad, but did not when the plan was made")

    def run(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
        """``execute`` on checked local tensors.

        Pass-through tensors (layout and dtype are unchanged) are returned, or copied into ``out``.
        """
        moving = self._moving(tensors)
        if out is None:
            moved = iter(apply(self._exchange, moving, self._name))
            staying = tensors if torch.is_grad_enabled() else map(without_graph, tensors)
            return [x if stays else next(moved) for x, stays in zip(staying, self._stays, strict=True)]
        pairs = [(x.detach(), y) for x, y, stays in zip(tensors, out, self._stays, strict=True) if stays]
        if pairs and share_memory(out, tensors):  # the exchange may overwrite them
            pairs = [(x.clone(), y) for x, y in pairs]
        self._exchange.run(moving, self._moving(out), self._name)
        for x, y in pairs:
            y.detach().copy_(x)
        return list(out)

    def _moving(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors without those that pass through."""
        return [x for x, stays in zip(tensors, self._stays, strict=True) if not stays]

    def text(self, rates: Rates | None = None) -> str:
        """Buckets, messages, bytes, launches, memory and predicted time, as a table.

        Args:
            rates: of the prediction; by default ``cost.DEFAULTS`` of GPUs, or of the CPU for a group without them.
        """
        return text_of(self.transfers, DEFAULTS[self._exchange.device] if rates is None else rates)

    def __str__(self) -> str:
        return self.text()
