"""``reshard`` and ``reshard_plan``: tensors from one layout to another, over any ranks."""

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core.autograd import outside_graphs, without_graph
from tritoncomm.core.cost import DEFAULTS, Rates
from tritoncomm.core.memory import share_memory
from tritoncomm.core.validation import PerGroup
from tritoncomm.errors import ArgumentError, CommError, GroupError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.execute import Executor, apply
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.names import kinds_of, named
from tritoncomm.reshard.plan import Item, Participants
from tritoncomm.reshard.request import (
    LocalShapes,
    Request,
    check_locals,
    compare,
    executor_for,
    guessed,
    is_kept,
    local_of,
    parse,
    participants_of,
    refusing,
    sides_of,
)

__all__ = ["BUCKET_BYTES", "Grad", "ReshardPlan", "planned", "reshard", "reshard_as", "reshard_plan"]

BUCKET_BYTES = 256 * 2**20
Grad = Literal["replicated", "partial"]
_PLAIN = (Tensor, torch.nn.Parameter)
_CALLS = 64  # of a group
_calls: "PerGroup[OrderedDict[Any, ReshardPlan]]" = PerGroup()
"""Plans of the last calls by their looks, the most recently used last."""


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
    """Bring tensors from one layout to another, over the same, other or overlapping ranks.

    Forward: every rank gets its boxes of the target layout from ranks that have them, and copies its own. Backward: the
    same from target to source. Per bucket one pack, one all-to-all-v (between disjoint sets of ranks one batch of
    messages) and one unpack. A tensor whose layout and dtype are unchanged is returned as it is. Every rank of the
    group calls, with the same layouts and names in the same order. Under torch.compile the graph breaks here.

    With layouts by name a rank passes the tensors that it has, in any order: those of which it has a part. It takes the
    dtypes of the others from the last call, or asks for them. So that a change is noticed, such calls are compared each
    time, in one all-gather of 32 bytes a rank; ``ReshardPlan.execute`` compares nothing.

    Args:
        tensors: one, a sequence, or a mapping by name: local tensors, DTensors or ColoTensors. But for a mapping, a
            rank without a part of the source passes an empty tensor of the dtype, on its device, that requires grad if
            the others do.
        source: a ``Layout``, or one per tensor; None for DTensors and ColoTensors, which have their own.
        target: a ``Layout``, ``(mesh, placements)`` or a ``ColoTensorSpec``; or one per tensor.
        group: a group with all ranks of both layouts; all ranks of the job by default.
        dtype: dtype of the results, or by name; fp16, bf16, fp32 and fp64 are cast on the way, at the smaller width.
        bucket_bytes: extra memory at most on the sending and on the receiving side.
        grad: the gradients of the replicas of a result are equal and count once (``replicated``), or differ and are
            summed in rank order (``partial``).
        out: tensors to write into, in the form of ``tensors``, of a mapping those of which the rank has a part; then no
            gradient is recorded. They may share memory with the tensors if one bucket has room for all.

    Returns:
        Results in the form of ``tensors``: local tensors for a ``Layout``, DTensors or ColoTensors for other targets.
        On a rank without a part of the target an empty tensor: where others call backward, it does too, through this
        tensor. A mapping has it only if it requires grad.

    Raises:
        ShapeError: shapes that differ, a source that does not cover its tensor, a local tensor of another shape.
        GroupError: a layout has ranks that are not in the group.
        MismatchError: another rank has other arguments, or refused its own. Nothing was sent.
        PeerError: another rank failed, or did not come within the group's timeout. Ranks that have a plan for their
            arguments do not compare them; a rank with others is named with ``TRITONCOMM_CHECK=1``.
        UnsupportedError: partial placements, or a cast of other dtypes.
        ArgumentError: ``bucket_bytes`` that do not hold one element for every peer. Backward raises it, too, where
            gradients go to more ranks than values come from.
    """
    return reshard_as("reshard", group, tensors, source, target, (dtype, bucket_bytes, grad), out)


def reshard_as(
    name: str,
    group: GroupLike | None,
    tensors: Any,
    source: Any,
    target: Any,
    options: tuple[Any, int, Grad],
    out: Any = None,
) -> Any:
    """Run ``reshard`` under the name of the function that the program called.

    Args:
        name: the function.
        group, tensors, source, target, out: as for ``reshard``.
        options: its ``dtype``, ``bucket_bytes`` and ``grad``.
    """
    process_group = dist.group.WORLD if group is None else participants_of(group, name).group
    # ``looks`` are the values by which an equal call is recognised: it runs the earlier plan, and only its tensors are
    # checked.
    is_asked = False  # whether another rank lacks this plan, so that all have to compare their requests
    looks = None if out is not None else _look(name, tensors, source, target, options)
    if looks is not None and process_group is not None and (recent := _recent_plan(process_group, looks)) is not None:
        try:
            sources = recent.checked(tensors)
        except CommError:
            pass  # found again below, where the other ranks hear of it
        else:
            if recent.is_agreed(process_group, tensors, sources):
                return recent.in_form_of(tensors, recent.run(sources, out=None))
            is_asked = True
    dtype, bucket_bytes, grad = options
    request, plan = planned(
        name, participants_of(group, name), tensors, source, target, is_asked,
        dtype=dtype, bucket_bytes=bucket_bytes, grad=grad, out=out,
    )  # fmt: skip
    if looks is not None and process_group is not None:
        calls = _calls.get(process_group) or _calls.set(process_group, OrderedDict())
        calls[looks] = plan
        if len(calls) > _CALLS:
            calls.popitem(last=False)
    results = plan.run(request.tensors, out=None if out is None else request.outs)
    return plan.in_form_of(tensors, results) if out is None else out


def _look(name: str, tensors: Any, source: Any, target: Any, options: tuple[Any, Any, Any]) -> Any:
    """Return a key of the values that a call's plan depends on; None of arguments that have to be read.

    Plain tensors and layouts have a key. To read and check a few tensors takes the host as long as their exchange.
    """
    dtype, bucket_bytes, grad = options
    form: Any = None  # of one tensor; of a dict its names, of a sequence its length
    if type(tensors) in _PLAIN:
        values = (tensors,)
    elif type(tensors) is dict:
        form, values = tuple(tensors), tuple(tensors.values())
    elif type(tensors) is list or type(tensors) is tuple:
        form, values = len(tensors), tensors
    else:
        return None
    # A side is one layout of all tensors, or one per tensor. Any other has to be read. A dict of sources may have more
    # names than this rank has tensors.
    order = tuple(source) if type(source) is dict and type(form) is tuple else form
    count = len(order) if type(order) is tuple else len(values)
    sides = []
    for side in (source, target):
        if not isinstance(side, Layout):
            given = [side.get(name) for name in order] if type(side) is dict and type(order) is tuple else side
            if type(given) is not list or len(given) != count or not all(isinstance(x, Layout) for x in given):
                return None
            side = tuple(given)
        sides.append(side)
    is_plain = dtype is None or type(dtype) is torch.dtype
    if not is_plain or type(bucket_bytes) is not int or type(grad) is not str:
        return None
    records, kinds = torch.is_grad_enabled(), []
    for x in values:
        if type(x) not in _PLAIN:
            return None
        kinds.append((x.dtype, records and x.requires_grad))
    return (name, *sides, options, order, form, *kinds)


def _recent_plan(group: ProcessGroup, looks: Any) -> "ReshardPlan | None":
    """Return the plan of an earlier call that looked the same, if the group keeps it; then mark both as used."""
    calls = _calls.get(group)
    plan = None if calls is None else calls.get(looks)
    if calls is None or plan is None or not plan.is_kept(group):
        return None
    calls.move_to_end(looks)
    return plan


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
    """Make the plan of a ``reshard``, to look at or to execute repeatedly; ranks compare plans here, not in execution.

    Args:
        tensors: as for ``reshard``, or their dtypes.
        source, target, group, dtype, bucket_bytes, grad: as for ``reshard``.
        ranks: global ranks of a group that does not exist: a plan to look at, without communication.
        rank: the global rank that such a plan is for.

    Raises:
        CommError: as ``reshard``.
    """
    if ranks is None:
        participants = participants_of(group, "reshard_plan")
    else:
        members = tuple(ranks)
        if rank not in members:
            raise GroupError(f"reshard_plan: rank {rank!r} is not among the ranks {list(members)}")
        participants = Participants(group=None, ranks=members, position=members.index(rank))
    options: dict[str, Any] = {"dtype": dtype, "bucket_bytes": bucket_bytes, "grad": grad}
    _request, plan = planned("reshard_plan", participants, tensors, source, target, **options)
    return plan


def planned(
    name: str,
    participants: Participants,
    tensors: Any,
    source: Any,
    target: Any,
    is_asked: bool = False,
    **options: Any,
) -> tuple[Request, "ReshardPlan"]:
    """Read the arguments of a call; return its request and its plan, which is cached or agreed on by all ranks.

    Args:
        is_asked: whether a rank has already said that it lacks what the others know.
    """
    with refusing(participants, name):
        out = options.get("out")
        kinds = kinds_of(name, tensors, source, options.get("dtype"), out)
        sides, wraps = sides_of(name, tensors, kinds.names, source, target, out, participants.rank)
    group, lacks, is_told = participants.group, not kinds.is_complete, False
    # A rank that lacks kinds of tensors guesses them, and the ranks compare their plans. After a guess that is wrong,
    # or impossible, all ranks tell each other what they know, and the second turn has the plan.
    known = guessed(name, group, kinds, sides, options) if lacks else kinds
    while True:
        if known is not None and not is_asked:
            with refusing(participants, name):
                request = parse(name, participants, tensors, known, sides, wraps, **options)
            if (executor := executor_for(request, lacks, is_told)) is not None:
                return request, ReshardPlan(request, executor)
        elif group is not None and not is_asked:
            compare(group, name, executor=None, names=kinds.names, tensors=(), lacks=True)
        known = kinds.shared(participants, name)
        is_asked, is_told = False, True


def _is_name_of(item: Item, name: object) -> bool:
    """Whether a tensor of a plan has this name."""
    return item.name == name or item.name == str(name)


class ReshardPlan:
    """A resharding that can be looked at and executed repeatedly; prints as a table.

    It keeps no tensors, and does not keep its process group alive.

    Attributes:
        items: layouts and dtypes of every tensor, pass-through tensors included.
        transfers: messages, buckets and bytes of this rank, and totals of all ranks; without pass-through tensors.
        wraps: functions that make local results DTensors or ColoTensors; None for plain results.
    """

    def __init__(self, request: Request, executor: Executor) -> None:
        self.items, self.transfers = request.items, executor.transfers
        self._executor, self.wraps, self._passes_through = executor, request.wraps, request.passes_through
        self._key, self._device = request.key, request.device
        self._name = "reshard" if request.name == "reshard_plan" else request.name
        self._rank = request.participants.rank

    bytes_sent = property(attrgetter("transfers.bytes_sent"), doc="Bytes this rank sends, alignment included.")
    bytes_copied = property(attrgetter("transfers.bytes_copied"), doc="Bytes read plus written by this rank's passes.")

    @cached_property
    def _shapes(self) -> list[LocalShapes]:
        """Local shape of every tensor of a plan on this rank, before and after; None if the rank has no part there."""
        return [(item.source.local_shape(self._rank), item.target.local_shape(self._rank)) for item in self.items]

    @outside_graphs
    def execute(self, tensors: Any, out: Any = None) -> Any:
        """Reshard tensors by this plan, as ``reshard`` does, without a comparison of plans between ranks.

        Args:
            tensors: as for ``reshard``, with the names, shapes and dtypes that the plan was made for.
            out: tensors to write into, in the form of ``tensors``; see ``reshard``.

        Returns:
            Results in the form of ``tensors``; ``out`` if it is given.

        Raises:
            ShapeError: a tensor of another shape than the plan was made for, or a DTensor of another layout.
            ArgumentError: other tensors or dtypes, or a gradient where the plan has none.
        """
        if out is None:
            return self.in_form_of(tensors, self.run(self.checked(tensors), out=None))
        outs = self._pairs(out, side=1)
        self.run(self.checked(tensors, outs), out=[x for _, x in outs])
        return out

    def checked(self, tensors: Any, outs: Sequence[tuple[Any, Tensor]] = ()) -> list[Tensor]:
        """Return the local tensors of an execution, and check them and those to write into; see ``execute``."""
        sources = self._pairs(tensors, 0)
        check_locals(self.items, self._shapes, sources, outs, "reshard", self._rank)
        return [x for _, x in sources]

    def is_agreed(self, group: ProcessGroup, tensors: Any, sources: Sequence[Tensor]) -> bool:
        """Whether all ranks of a call have this plan, if one lacks tensors; else all have to tell what they know."""
        if not self._executor.compares_calls:
            return True
        names, lacks = [item.name for item in self.items], len(tensors) < len(self.items)
        return compare(group, self._key[2], self._executor, names, sources, lacks=lacks) is not None

    def is_kept(self, group: ProcessGroup) -> bool:
        """Return whether a group still has this plan, and mark it as used."""
        return is_kept(group, self._key, self._executor)

    def in_form_of(self, tensors: Any, results: Sequence[Tensor]) -> Any:
        """Wrap local results, and return them in the form of the tensors that a caller passed: one, a list, or a dict.

        A dict has no result of which the target has no part on this rank, unless backward goes through it.
        """
        wrapped = [x if wrap is None else wrap(x) for x, wrap in zip(results, self.wraps, strict=True)]
        if not isinstance(tensors, Mapping):
            return wrapped[0] if isinstance(tensors, Tensor) else wrapped
        keys = tensors if self._has_names(tensors) else [item.name for item in self.items]
        pairs = zip(keys, wrapped, strict=True)
        if self._has_all_results:
            return dict(pairs)
        parts = [shape for _, shape in self._shapes]
        return {key: x for (key, x), part in zip(pairs, parts, strict=True) if part is not None or x.requires_grad}

    @cached_property
    def _has_all_results(self) -> bool:
        """Whether the target has a part of every tensor on this rank."""
        return all(shape is not None for _, shape in self._shapes)

    def _has_names(self, names: Collection[str]) -> bool:
        """Whether names are those of all tensors of the plan, in its order."""
        return len(names) == len(self.items) and all(map(_is_name_of, self.items, names))

    def _pairs(self, tensors: Any, side: int) -> list[tuple[Any, Tensor]]:
        """Return every tensor that a caller passed, with its local tensor; reject other names than the plan's.

        A name that has no elements on this rank may be left out: it gets an empty tensor. ``side`` is 0 for tensors of
        the source, and 1 for those of the target.
        """
        by_name = named(tensors, "reshard")
        if self._has_names(by_name):
            return [(x, local_of(x)) for x in by_name.values()]
        names = [item.name for item in self.items]
        parts = {key: shapes[side] for key, shapes in zip(names, self._shapes, strict=True)}
        has_elements = [key for key, part in parts.items() if part is not None and 0 not in part]
        lacking = [key for key in has_elements if key not in by_name]
        if lacking or not by_name.keys() <= parts.keys() or not isinstance(tensors, Mapping):
            raise ArgumentError(f"reshard: the plan is for {names}, not for {list(by_name)}")
        device = next((local_of(x).device for x in by_name.values() if isinstance(x, Tensor)), self._device)
        pairs = []
        for item in self.items:
            x = by_name.get(item.name)
            if x is None:
                x = torch.empty(parts[item.name] or 0, dtype=item.result if side else item.dtype, device=device)
                x.requires_grad_(item.has_grad and not side)
            pairs.append((x, local_of(x)))
        return pairs

    def run(self, tensors: Sequence[Tensor], out: Sequence[Tensor] | None) -> list[Tensor]:
        """Reshard checked local tensors and return local results.

        Pass-through tensors, whose layout and dtype are unchanged, are returned as they are, or copied into ``out``.

        Args:
            tensors: this rank's local tensors, one per item.
            out: local tensors to write into; new ones by default.
        """
        moving = self._moving(tensors)
        if out is None:
            moved = iter(apply(self._executor, moving, self._name))
            # Under no_grad a result has no graph, as the results of other torch functions.
            passing = tensors if torch.is_grad_enabled() else map(without_graph, tensors)
            return [x if passes else next(moved) for x, passes in zip(passing, self._passes_through, strict=True)]
        pairs = [(x.detach(), y) for x, y, passes in zip(tensors, out, self._passes_through, strict=True) if passes]
        if pairs and share_memory(out, tensors):  # the exchange may overwrite pass-through tensors
            pairs = [(x.clone(), y) for x, y in pairs]
        self._executor.run(moving, self._name, self._moving(out))
        for x, y in pairs:
            y.detach().copy_(x)
        return list(out)

    def _moving(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Drop the pass-through tensors, whose layout and dtype a plan leaves unchanged; return the others in order."""
        return [x for x, passes in zip(tensors, self._passes_through, strict=True) if not passes]

    def text(self, rates: Rates | None = None) -> str:
        """Return a plan as a table: buckets, messages, bytes, launches, memory and predicted time.

        Args:
            rates: rates of the prediction; by default ``cost.DEFAULTS`` of GPUs, or of the CPU for a group without
                GPUs.
        """
        return self.transfers.text(DEFAULTS[self._executor.device] if rates is None else rates)

    def __str__(self) -> str:
        return self.text()
