"""``reshard`` and ``reshard_plan``: tensors from one layout to another, over any ranks."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, record
from tritoncomm.core.cost import DEFAULTS, Rates
from tritoncomm.core.function import outside_graphs, without_graph
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import check_data, check_kind
from tritoncomm.errors import ArgumentError, CommError, GroupError, ShapeError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard import notes
from tritoncomm.reshard.execute import Exchange, apply, check_dtypes
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.plan import Item, check, digest
from tritoncomm.reshard.report import text_of
from tritoncomm.reshard.specs import Wrap, by_name, local_of, named, source_of, target_of
from tritoncomm.reshard.unanimous import agree

__all__ = ["BUCKET_BYTES", "ReshardPlan", "refuse", "reshard", "reshard_plan"]

BUCKET_BYTES = 256 * 2**20
Grad = Literal["replicated", "partial"]
_PLANS = 64
_plans: WeakKeyDictionary[ProcessGroup, "OrderedDict[Any, Exchange]"] = WeakKeyDictionary()


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
    call = _Call(tensors, source, target, group, dtype, grad, out, "reshard")
    plan = ReshardPlan(call, call.exchange(bucket_bytes))
    if out is not None:
        plan.run(call.locals, call.outs)
        return out
    return call.form(tensors, plan.run(call.locals, None))


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
    call = _Call(tensors, source, target, group, dtype, grad, None, "reshard_plan", ranks, rank)
    plan = ReshardPlan(call, call.exchange(bucket_bytes))
    call.locals.clear()  # a plan keeps no tensors
    return plan


def refuse(error: CommError, group: ProcessGroup, name: str) -> None:
    """Raise an error of this rank's arguments, and let the ranks that make a plan meanwhile raise, too.

    Raises:
        CommError: ``error``.
    """
    call = _Call({}, None, None, group, None, "replicated", None, name)
    call.error, call.is_read = error, False
    call.exchange(BUCKET_BYTES)
    raise error


class _Call:
    """The arguments of one call: items of the plan, local tensors, and how results are wrapped."""

    def __init__(
        self, tensors: Any, source: Any, target: Any, group: Any, dtype: Any, grad: str, out: Any, name: str,
        ranks: Sequence[int] | None = None, rank: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.grad = name, grad
        self.error: CommError | None = None
        self.group: ProcessGroup | None = None
        if ranks is None:
            self.group = _group(group, name)
            self.ranks: Ints = tuple(dist.get_process_group_ranks(self.group))
            self.position = self.group.rank()
        else:
            self.ranks = tuple(ranks)
            if rank not in self.ranks:
                raise GroupError(f"{name}: rank {rank!r} is not among the ranks {list(self.ranks)}")
            self.position = self.ranks.index(rank)
        self.rows: list[tuple[str, Layout, Layout, torch.dtype, torch.dtype, bool]] = []
        self.locals: list[Tensor] = []
        self.outs: list[Tensor] = []
        self.wraps: list[Wrap | None] = []
        self.stays: list[bool] = []
        self.is_read = False
        try:
            self._read(named(tensors, name), source, target, dtype, out)
            self.is_read = True
        except CommError as error:
            self.error = error

    @cached_property
    def items(self) -> list[Item]:
        """What happens to every tensor."""
        return [Item(*row) for row in self.rows]

    def _read(self, tensors: dict[str, Any], source: Any, target: Any, dtype: Any, out: Any) -> None:
        if self.grad not in ("replicated", "partial"):
            raise ArgumentError(f"{self.name}: grad must be replicated or partial, not {self.grad!r}")
        outs = {} if out is None else named(out, self.name)
        if out is not None and list(outs) != list(tensors):
            raise ArgumentError(f"{self.name}: out has {list(outs)}, not {list(tensors)}")
        sources, targets, dtypes = (by_name(each, list(tensors), self.name) for each in (source, target, dtype))
        records = out is None and torch.is_grad_enabled()
        for key, x in tensors.items():
            is_planned = isinstance(x, torch.dtype) and self.name == "reshard_plan"
            if not isinstance(x, Tensor) and not is_planned:
                raise ArgumentError(f"{self.name}: {key} must be a tensor, not {type(x).__name__}")
            x = torch.empty(0, dtype=x, device="meta") if isinstance(x, torch.dtype) else x
            layout = source_of(x, sources[key], self.name, key)
            goal, wrap = target_of(targets[key], layout.shape, self.name, key)
            if outs and not isinstance(outs[key], Tensor):
                raise ArgumentError(f"{self.name}: out {key} must be a tensor, not {type(outs[key]).__name__}")
            local, into = local_of(x), local_of(outs[key]) if outs else None
            (check_data if self.name == "reshard" else check_kind)(local, self.name)
            result = dtypes[key] or (local.dtype if into is None else into.dtype)
            if not isinstance(result, torch.dtype):
                raise ArgumentError(f"{self.name}: the dtype of {key} must be a torch.dtype, not {result!r:.80}")
            has_grad = records and x.requires_grad
            self.rows.append((key, layout, goal, local.dtype, result, has_grad))
            self.locals.append(local)
            self.wraps.append(wrap)
            is_same = out is None and local.dtype == result and layout == goal
            # Gradients of replicas that are partial have to be summed, though nothing moves forward.
            self.stays.append(is_same and not (has_grad and self.grad == "partial"))
            try:
                if not is_planned:
                    self.check_local(key, layout, local)
                if into is not None:
                    self.check_out(key, goal, into, result)
                    self.outs.append(into)
            except CommError as error:  # of this rank's tensor: the plan is known all the same
                self.error = self.error or error

    def check_local(self, key: str, layout: Any, local: Tensor, what: str = "") -> None:
        """Check the shape of a local tensor of this rank."""
        rank = self.ranks[self.position]
        expected = layout.local_shape(rank)
        if expected is None and local.numel():
            raise ShapeError(
                f"{self.name}: {what}{key} is {list(local.shape)} on rank {rank}, which its layout does not have; pass "
                "an empty tensor there"
            )
        if expected is not None and tuple(local.shape) != expected:
            raise ShapeError(
                f"{self.name}: {what}{key} is {list(local.shape)} on rank {rank}, but its layout has {list(expected)} "
                "there"
            )

    def check_out(self, key: str, goal: Any, into: Tensor, result: torch.dtype) -> None:
        """Check a tensor that is written into."""
        self.check_local(key, goal, into, "out ")
        if into.dtype != result:
            raise ArgumentError(f"{self.name}: out {key} is {into.dtype}, not {result}")
        if into.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{self.name}: out {key} requires grad, and is written into; use torch.no_grad()")
        if any(not step and size > 1 for step, size in zip(into.stride(), into.shape, strict=True)):
            raise ArgumentError(f"{self.name}: elements of out {key} share memory; it cannot be written into")

    def exchange(self, bucket_bytes: int) -> Exchange:
        """The plan of these arguments, made and compared with that of the other ranks once."""
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            wrong = ArgumentError(f"{self.name}: bucket_bytes must be an int of 1 or more, not {bucket_bytes!r:.80}")
            self.error, bucket_bytes = self.error or wrong, BUCKET_BYTES
        moving = [row for row, stays in zip(self.rows, self.stays, strict=True) if not stays]
        key = bucket_bytes, self.grad, self.name, tuple([(a, b.digest, c.digest, *more) for a, b, c, *more in moving])
        if self.group is None:
            made = self._made(bucket_bytes)
            if self.error is not None:
                raise self.error
            assert made is not None
            return made
        plans = _plans.setdefault(self.group, OrderedDict())
        if notes.pending:
            notes.withdraw(self.group)
        if self.is_read and key in plans:
            if self.error is not None:  # the others do not compare, and would not hear of it
                self._announce(b"")
                notes.leave(self.group, f"refused its arguments: {self.error}", "refused")
                raise self.error
            plans.move_to_end(key)
            return plans[key]
        made = self._made(bucket_bytes)
        items = [Item(*row) for row in moving]
        state = digest(items, (self.name, bucket_bytes, self.grad, self.ranks))
        self._announce(state)
        options = {"bucket_bytes": str(bucket_bytes), "grad": self.grad}
        agree(self.name, self.group, state, self.error, lambda: {item.name: str(item) for item in items} | options)
        assert made is not None
        plans[key] = made
        if len(plans) > _PLANS:
            plans.popitem(last=False)
        return made

    def _made(self, bucket_bytes: int) -> Exchange | None:
        """A new plan; None where the arguments are refused, and the error is kept."""
        try:
            if self.is_read:
                check(self.items, self.ranks, self.name)
                for item in self.items:
                    check_dtypes(item, self.grad, self.name)
            if self.error is None:
                moving = [item for item, stays in zip(self.items, self.stays, strict=True) if not stays]
                return Exchange(moving, self.ranks, self.position, self.group, bucket_bytes, self.grad)
        except CommError as error:
            self.error = error
        return None

    def _announce(self, state: bytes) -> None:
        """Let check mode compare, so that ranks that have a plan learn of it, too."""
        if not record.switch._is_profiler_enabled:
            return
        what = f"new {state.hex()}" if self.error is None else f"refused: {self.error}"
        try:
            _range = record.begin(self.name, "reshard", self.group, self.locals, (what,))
            record.add(self.name, "view", 0, 0, record.now(), calls=0)
        except CommError:
            if self.error is not None:
                raise self.error from None
            raise

    def form(self, given: Any, results: Sequence[Tensor]) -> Any:
        """Results in the form in which the tensors came."""
        made = [x if wrap is None else wrap(x) for x, wrap in zip(results, self.wraps, strict=True)]
        if isinstance(given, Tensor):
            return made[0]
        return dict(zip(given, made, strict=True)) if isinstance(given, Mapping) else made


def _group(group: GroupLike | None, name: str) -> ProcessGroup:
    if group is not None:
        return groups.as_group(group, name)
    world = dist.group.WORLD
    if world is None:
        raise GroupError(f"{name}: torch.distributed is not initialized; call tritoncomm.initialize() or pass a group")
    return world


class ReshardPlan(record.Traffic):
    """A resharding that can be looked at and executed repeatedly; prints as a table.

    Attributes:
        items: what happens to every tensor, those that stay as they are included.
        transfers: messages, buckets and bytes of this rank, and totals of all ranks; of the tensors that move.
    """

    def __init__(self, call: _Call, exchange: Exchange) -> None:
        self._call, self._exchange = call, exchange
        self.transfers = exchange.transfers
        self._all_move = not any(call.stays)

    bytes_sent = property(attrgetter("transfers.bytes_sent"), doc="Bytes this rank sends, alignment included.")
    bytes_copied = property(attrgetter("transfers.bytes_copied"), doc="Bytes read plus written by this rank's passes.")

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """What happens to every tensor."""
        return tuple(self._call.items)

    @cached_property
    def _names(self) -> list[str]:
        return [item.name for item in self.items]

    @cached_property
    def _expected(self) -> list[tuple[Ints | None, torch.dtype, bool]]:
        """What the local tensors of this rank have to be."""
        rank = self._call.ranks[self._call.position]
        return [(item.source.local_shape(rank), item.dtype, item.has_grad) for item in self.items]

    @outside_graphs
    def execute(self, tensors: Any, out: Any = None) -> Any:
        """What ``reshard`` does, without comparing plans; arguments and results as there.

        Raises:
            ShapeError: a tensor of another shape than the plan was made for.
            ArgumentError: other tensors or dtypes, or a gradient where the plan has none.
        """
        call = self._call
        given, outs = named(tensors, "reshard"), None if out is None else named(out, "reshard")
        if list(given) != self._names or (outs is not None and list(outs) != self._names):
            got = list(given if outs is None or list(given) != self._names else outs)
            raise ArgumentError(f"reshard: the plan is for {self._names}, not for {got}")
        locals_ = [local_of(x) for x in given.values()]
        may_record = out is None and torch.is_grad_enabled()
        for x, (shape, dtype, has_grad) in zip(locals_, self._expected, strict=True):
            if x.shape != shape or x.dtype is not dtype or (x.requires_grad and not has_grad and may_record):
                self._check(locals_, may_record)
                break
        if outs is None:
            return call.form(tensors, self.run(locals_, None))
        into = [local_of(x) for x in outs.values()]
        for item, x in zip(self.items, into, strict=True):
            call.check_out(item.name, item.target, x, item.result)
        self.run(locals_, into)
        return out

    def _check(self, tensors: Sequence[Tensor], may_record: bool) -> None:
        """Refuse tensors that are not as the plan has them."""
        for item, x in zip(self.items, tensors, strict=True):
            self._call.check_local(item.name, item.source, x)
            if x.dtype != item.dtype:
                raise ArgumentError(f"reshard: {item.name} is {x.dtype}, but the plan is for {item.dtype}")
            if x.requires_grad and not item.has_grad and may_record:
                raise ArgumentError(f"reshard: {item.name} requires grad, but did not when the plan was made")

    def run(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
        """``execute`` on checked local tensors."""
        if self._all_move:
            if out is None:
                return list(apply(self._exchange, tensors, "reshard"))
            self._exchange.run(tensors, out, "reshard")
            return list(out)
        stays = self._call.stays
        moving = [x for x, keeps in zip(tensors, stays, strict=True) if not keeps]
        if out is not None:
            for x, into, keeps in zip(tensors, out, stays, strict=True):
                if keeps:
                    into.detach().copy_(x.detach())
            self._exchange.run(moving, [x for x, keeps in zip(out, stays, strict=True) if not keeps], "reshard")
            return list(out)
        moved = iter(apply(self._exchange, moving, "reshard"))
        keep = torch.is_grad_enabled()
        return [
            (x if keep else without_graph(x)) if stays else next(moved) for x, stays in zip(tensors, stays, strict=True)
        ]

    def text(self, rates: Rates | None = None) -> str:
        """Buckets, messages, bytes, launches, memory and predicted time, as a table."""
        return text_of(self.transfers, DEFAULTS["cuda"] if rates is None else rates)

    def __str__(self) -> str:
        return self.text()
