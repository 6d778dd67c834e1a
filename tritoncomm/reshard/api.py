"""``reshard`` and ``reshard_plan``: tensors from one layout to another, over any ranks."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor

from tritoncomm import record
from tritoncomm.core.cost import DEFAULTS, Rates
from tritoncomm.core.function import outside_graphs, without_graph
from tritoncomm.core.memory import share_memory
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import check_data, refuse_transforms
from tritoncomm.errors import ArgumentError, CommError, GroupError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.execute import Exchange, apply
from tritoncomm.reshard.plan import Item
from tritoncomm.reshard.report import text_of
from tritoncomm.reshard.request import (
    Members,
    Options,
    Request,
    check_apart,
    check_local,
    check_memory,
    check_out,
    exchange_for,
    members_of,
    parse,
    refuse,
)
from tritoncomm.reshard.specs import Wrap, check_own_layout, local_of, named

__all__ = ["BUCKET_BYTES", "Grad", "ReshardPlan", "formed", "planned", "reshard", "reshard_plan"]

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
        MismatchError: another rank has other arguments, or refused its own. Nothing was sent.
        PeerError: another rank failed, or did not come within the group's timeout. Ranks that have a plan for their
            arguments do not compare them; a rank with others is named with ``TRITONCOMM_CHECK=1``.
        UnsupportedError: partial placements, or a cast of other dtypes.
    """
    options = Options("reshard", dtype, bucket_bytes, grad, out)
    request, plan = planned(tensors, source, target, members_of(group, "reshard"), options)
    results = plan.run(request.tensors, None if out is None else request.outs)
    return formed(tensors, results, request.wraps) if out is None else out


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
    if ranks is None:
        members = members_of(group, "reshard_plan")
    else:
        every = tuple(ranks)
        if rank not in every:
            raise GroupError(f"reshard_plan: rank {rank!r} is not among the ranks {list(every)}")
        members = Members(None, every, every.index(rank))
    return planned(tensors, source, target, members, Options("reshard_plan", dtype, bucket_bytes, grad))[1]


def planned(
    tensors: Any, source: Any, target: Any, members: Members, options: Options
) -> tuple[Request, "ReshardPlan"]:
    """The request of a call, and its plan, which is cached or agreed on by all ranks of the group.

    Raises:
        CommError: as ``reshard``, on all ranks that agree on a plan.
    """
    try:
        request, error = parse(tensors, source, target, members, options)
    except CommError as problem:
        refuse(problem, members, options.name)
    return request, ReshardPlan(request, exchange_for(request, error))


def formed(tensors: Any, results: Sequence[Tensor], wraps: Sequence[Wrap | None]) -> Any:
    """Results in the form of ``tensors``: one, a list, or a dict by name; DTensors and ColoTensors where wrapped."""
    wrapped = [x if wrap is None else wrap(x) for x, wrap in zip(results, wraps, strict=True)]
    if isinstance(tensors, Tensor):
        return wrapped[0]
    return dict(zip(tensors, wrapped, strict=True)) if isinstance(tensors, Mapping) else wrapped


class ReshardPlan(record.Traffic):
    """A resharding that can be looked at and executed repeatedly; prints as a table.

    It keeps no tensors, and does not keep its process group.

    Attributes:
        items: source, target and dtypes of every tensor, pass-through tensors included.
        transfers: messages, buckets and bytes of this rank, and totals of all ranks; without pass-through tensors.
    """

    def __init__(self, request: Request, exchange: Exchange) -> None:
        self.items, self.transfers = request.items, exchange.transfers
        self._exchange, self._wraps, self._passes_through = exchange, request.wraps, request.passes_through
        self._name = "reshard" if request.name == "reshard_plan" else request.name
        self._rank = request.members.rank

    bytes_sent = property(attrgetter("transfers.bytes_sent"), doc="Bytes this rank sends, alignment included.")
    bytes_copied = property(attrgetter("transfers.bytes_copied"), doc="Bytes read plus written by this rank's passes.")

    @cached_property
    def _shapes(self) -> list[tuple[Ints | None, Ints | None]]:
        """Shapes of this rank's local tensors before and after; None where it has no part."""
        return [(item.source.local_shape(self._rank), item.target.local_shape(self._rank)) for item in self.items]

    @outside_graphs
    def execute(self, tensors: Any, out: Any = None) -> Any:
        """What ``reshard`` does, without comparing plans; arguments and results as there.

        Raises:
            ShapeError: a tensor of another shape than the plan was made for, or a DTensor of another layout.
            ArgumentError: other tensors or dtypes, or a gradient where the plan has none.
        """
        sources, results = named(tensors, "reshard"), None if out is None else named(out, "reshard")
        names = [item.name for item in self.items]
        if list(sources) != names or (results is not None and list(results) != names):
            got = list(sources if results is None or list(sources) != names else results)
            raise ArgumentError(f"reshard: the plan is for {names}, not for {got}")
        may_record = results is None and torch.is_grad_enabled()
        locals_ = [local_of(x) for x in sources.values()]
        for item, x, local, (shape, _) in zip(self.items, sources.values(), locals_, self._shapes, strict=True):
            if local is not x:
                check_own_layout(x, item.source, "reshard", item.name)
            self._check(local, item, shape, may_record)
        if results is None:
            return formed(tensors, self.run(locals_, None), self._wraps)
        outs = [local_of(x) for x in results.values()]
        for item, x, local, (_, shape) in zip(self.items, results.values(), outs, self._shapes, strict=True):
            if local is not x:
                check_own_layout(x, item.target, "reshard", f"out {item.name}")
            check_out(local, item, shape, "reshard", self._rank)
        check_apart(names, outs, "reshard")
        self.run(locals_, outs)
        return out

    def _check(self, x: Any, item: Item, shape: Ints | None, may_record: bool) -> None:
        """Check that a local tensor is as the plan has it."""
        name = f"reshard: {item.name}"
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name} must be a tensor, not {type(x).__name__}")
        check_data(x, name)
        check_memory(x, name)
        refuse_transforms(x, "reshard", item.name)
        check_local(x, shape, "reshard", item.name, self._rank)
        if x.dtype != item.dtype:
            raise ArgumentError(f"{name} is {x.dtype}, but the plan is for {item.dtype}")
        if may_record and x.requires_grad and not item.has_grad:
            raise ArgumentError(f"{name} requires grad, but did not when the plan was made")

    def run(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
        """``execute`` on checked local tensors.

        Pass-through tensors (layout and dtype are unchanged) are returned, or copied into ``out``.
        """
        moving = self._moving(tensors)
        if out is None:
            moved = iter(apply(self._exchange, moving, self._name))
            passing = tensors if torch.is_grad_enabled() else map(without_graph, tensors)
            return [x if passes else next(moved) for x, passes in zip(passing, self._passes_through, strict=True)]
        pairs = [(x.detach(), y) for x, y, passes in zip(tensors, out, self._passes_through, strict=True) if passes]
        if pairs and share_memory(out, tensors):  # the exchange may overwrite them
            pairs = [(x.clone(), y) for x, y in pairs]
        self._exchange.run(moving, self._moving(out), self._name)
        for x, y in pairs:
            y.detach().copy_(x)
        return list(out)

    def _moving(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The tensors without those that pass through."""
        return [x for x, passes in zip(tensors, self._passes_through, strict=True) if not passes]

    def text(self, rates: Rates | None = None) -> str:
        """Buckets, messages, bytes, launches, memory and predicted time, as a table.

        Args:
            rates: of the prediction; by default ``cost.DEFAULTS`` of GPUs, or of the CPU for a group without them.
        """
        return text_of(self.transfers, DEFAULTS[self._exchange.device] if rates is None else rates)

    def __str__(self) -> str:
        return self.text()
