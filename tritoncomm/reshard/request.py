"""The request of one call: its arguments, read and checked once, and the exchange that is cached or planned for it."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, record
from tritoncomm.core.memory import extent_of, has_memory, share_elements
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import PerGroup, check_data, check_kind, ranks_of, refuse_transforms
from tritoncomm.errors import ArgumentError, CommError, GroupError, ShapeError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.consistency import agree
from tritoncomm.reshard.execute import Exchange, check_dtypes
from tritoncomm.reshard.plan import Item, check, digest
from tritoncomm.reshard.specs import Wrap, check_own_layout, local_of, named, source_of, target_of

__all__ = [
    "Members", "Options", "Request", "check_apart", "check_local", "check_memory", "check_out", "exchange_for",
    "members_of", "parse", "refuse",
]  # fmt: skip

_PLANS = 64
_PLAIN = (Tensor, torch.nn.Parameter)
_plans: "PerGroup[OrderedDict[Any, Exchange]]" = PerGroup()
"""Exchanges by ``Request.key``, the most recently used last.

Every call reads its arguments before it looks here, and marks its plan as used. So all ranks evict the same plans:
either every rank of a call compares digests or none does.
"""


class Members(NamedTuple):
    """The ranks of a call.

    Attributes:
        group: None for a plan that is only looked at.
        ranks: global ranks of the group.
        position: of this rank in the group.
    """

    group: ProcessGroup | None
    ranks: Ints
    position: int

    @property
    def rank(self) -> int:
        """The global rank of this rank."""
        return self.ranks[self.position]


class Options(NamedTuple):
    """The arguments of a call besides tensors and layouts, unchecked; see ``reshard``."""

    name: str
    dtype: Any = None
    bucket_bytes: Any = 0
    grad: Any = "replicated"
    out: Any = None


@dataclass(frozen=True)
class Request:
    """The arguments of one call.

    Attributes:
        name: the function, for messages.
        members: the ranks of the call.
        bucket_bytes, grad: as for ``reshard``.
        items: source, target and dtypes of every tensor.
        tensors: local source tensors of this rank.
        outs: local tensors to write into; empty without ``out``.
        wraps: functions that make local results DTensors or ColoTensors; None for plain results.
        passes_through: for every tensor, whether layout and dtype are unchanged, so that it is returned as it is.
    """

    name: str
    members: Members
    bucket_bytes: int
    grad: str
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    wraps: tuple[Wrap | None, ...]
    passes_through: tuple[bool, ...]

    @cached_property
    def moving(self) -> tuple[Item, ...]:
        """Items of the tensors that do not pass through."""
        return tuple([item for item, passes in zip(self.items, self.passes_through, strict=True) if not passes])

    @property
    def passing(self) -> list[Item]:
        """Items of the tensors that pass through."""
        return [item for item, passes in zip(self.items, self.passes_through, strict=True) if passes]

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """The arguments that an exchange depends on; equal on all ranks of a right call, like the digest."""
        return self.bucket_bytes, self.grad, self.name, self.moving


def members_of(group: GroupLike | None, name: str) -> Members:
    """The ranks of a group; of the job without one.

    Raises:
        GroupError: there is no such group.
    """
    process_group = dist.group.WORLD if group is None else groups.as_group(group, name)
    if process_group is None:
        raise GroupError(f"{name}: torch.distributed is not initialized; call tritoncomm.initialize() or pass a group")
    return Members(process_group, tuple(ranks_of(process_group, name)), process_group.rank())


def parse(
    tensors: Any, source: Any, target: Any, members: Members, options: Options
) -> tuple[Request, CommError | None]:
    """Read the arguments of a call.

    Returns:
        The request, and the error of this rank's local tensors. Such an error does not prevent the request: its key
        tells whether the other ranks compare plans now, and have to hear of the error.

    Raises:
        CommError: arguments that cannot be read.
    """
    name, given_tensors = options.name, named(tensors, options.name)
    if options.grad not in ("replicated", "partial"):
        raise ArgumentError(f"{name}: grad must be replicated or partial, not {options.grad!r}")
    given_outs = {} if options.out is None else named(options.out, name)
    if options.out is not None and list(given_outs) != list(given_tensors):
        raise ArgumentError(f"{name}: out has {list(given_outs)}, not {list(given_tensors)}")
    values = (source, target, options.dtype)
    sources, targets, dtypes = (_by_name(each, list(given_tensors), name) for each in values)
    may_record = options.out is None and torch.is_grad_enabled()
    items: list[Item] = []
    locals_: list[Tensor] = []
    outs: list[Tensor] = []
    wraps: list[Wrap | None] = []
    error: CommError | None = None
    for key, x in given_tensors.items():
        is_dtype = isinstance(x, torch.dtype) and name == "reshard_plan"
        if not isinstance(x, Tensor) and not is_dtype:
            raise ArgumentError(f"{name}: {key} must be a tensor, not {type(x).__name__}")
        x = torch.empty(0, dtype=x, device="meta") if isinstance(x, torch.dtype) else x
        out = given_outs.get(key)
        layout = source_of(x, sources[key], name, key)
        goal, wrap = target_of(targets[key], layout.shape, name, key)
        if given_outs and not isinstance(out, Tensor):
            raise ArgumentError(f"{name}: out {key} must be a tensor, not {type(out).__name__}")
        local, local_out = local_of(x), None if out is None else local_of(out)
        if local is not x:
            check_own_layout(x, layout, name, key)
        if local_out is not out:
            check_own_layout(out, goal, name, f"out {key}")
        check_kind(local, name)
        refuse_transforms(local, name, key)
        if local.is_quantized:
            raise ArgumentError(f"{name}: {key} is quantized, and its scale would not move; call .int_repr()")
        result = dtypes[key] or (local.dtype if local_out is None else local_out.dtype)
        if not isinstance(result, torch.dtype):
            raise ArgumentError(f"{name}: the dtype of {key} must be a torch.dtype, not {result!r:.80}")
        item = Item(key, layout, goal, local.dtype, result, may_record and x.requires_grad)
        items.append(item)
        locals_.append(local)
        wraps.append(wrap)
        try:
            if not is_dtype:
                check_local(local, layout.local_shape(members.rank), name, key, members.rank)
            if name != "reshard_plan":  # a plan may be made for tensors without data
                check_data(local, f"{name}: {key}")
                check_memory(local, f"{name}: {key}")
            if local_out is not None:
                check_out(local_out, item, goal.local_shape(members.rank), name, members.rank)
                outs.append(local_out)
        except CommError as problem:
            error = error or problem
    try:
        check_apart([item.name for item in items], outs, name)
    except CommError as problem:
        error = error or problem
    bucket_bytes = options.bucket_bytes
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise error or ArgumentError(f"{name}: bucket_bytes must be an int of 1 or more, not {bucket_bytes!r:.80}")
    passes_through = tuple([options.out is None and _passes_through(item, options.grad) for item in items])
    request = Request(
        name, members, bucket_bytes, options.grad, tuple(items), tuple(locals_), tuple(outs), tuple(wraps),
        passes_through,
    )  # fmt: skip
    return request, error


def _passes_through(item: Item, grad: str) -> bool:
    """Whether a tensor is returned as it is; partial gradients of replicas have to be summed all the same."""
    is_same = item.dtype == item.result and item.source == item.target
    return is_same and not (item.has_grad and grad == "partial")


def check_local(x: Tensor, shape: Ints | None, name: str, key: str, rank: int) -> None:
    """Check the shape of a local tensor against that of its layout; None for a rank without a part.

    Raises:
        ShapeError: another shape; on a rank without a part, elements.
    """
    if shape is None:
        if x.numel():
            raise ShapeError(
                f"{name}: {key} is {list(x.shape)} on rank {rank}, which its layout does not have; pass an empty "
                "tensor there"
            )
    elif x.shape != shape:
        raise ShapeError(f"{name}: {key} is {list(x.shape)} on rank {rank}, but its layout has {list(shape)} there")


def check_out(out: Any, item: Item, shape: Ints | None, name: str, rank: int) -> None:
    """Check a local tensor to write into.

    Args:
        out: the tensor.
        item: whose result it gets.
        shape: of the target on this rank, as for ``check_local``.
        name: the function.
        rank: this global rank.

    Raises:
        ShapeError: another shape.
        ArgumentError: no tensor, another dtype, or memory that cannot be written.
    """
    key = f"out {item.name}"
    if not isinstance(out, Tensor):
        raise ArgumentError(f"{name}: {key} must be a tensor, not {type(out).__name__}")
    check_data(out, f"{name}: {key}")
    check_memory(out, f"{name}: {key}")
    check_local(out, shape, name, key, rank)
    if out.dtype != item.result:
        raise ArgumentError(f"{name}: {key} is {out.dtype}, not {item.result}")
    if out.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{name}: {key} requires grad, and is written into; use torch.no_grad()")
    if out.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(f"{name}: {key} is an inference tensor; use torch.inference_mode()")
    if not out.is_contiguous() and _overlaps_itself(out):
        raise ArgumentError(f"{name}: elements of {key} share memory; it cannot be written into")


def check_apart(names: Sequence[str], outs: Sequence[Tensor], name: str) -> None:
    """Check that no two tensors to write into share elements.

    Raises:
        ArgumentError: two do.
    """
    starts = [(x.data_ptr(), key, x) for key, x in zip(names, outs, strict=False) if x.numel()]
    open_ends: list[tuple[int, str, Tensor]] = []  # tensors that end after the next one begins
    for start, key, x in sorted(starts, key=lambda each: each[0]):
        open_ends = [each for each in open_ends if each[0] > start]
        for _, other, y in open_ends:
            if share_elements(x, y):
                raise ArgumentError(f"{name}: out {other} and out {key} share memory; they cannot both be written")
        open_ends.append((start + extent_of(x), key, x))


def check_memory(x: Tensor, name: str) -> None:
    """Reject subclasses without storage of their own, and tensors whose storage was freed (FSDP) or shrunk.

    Raises:
        ArgumentError: such a tensor.
    """
    if type(x) in _PLAIN:
        simple = x.is_contiguous() and not x.storage_offset()
        if not (simple and x.untyped_storage().nbytes() >= x.nbytes) and not has_memory(x, extent_of(x)):
            raise ArgumentError(f"{name} has no memory: its storage was freed, or made smaller than the tensor")
    elif x.numel() and not x.is_meta:
        try:
            address = x.data_ptr()
        except RuntimeError:
            address = 0
        if not address:
            raise ArgumentError(f"{name} is a {type(x).__name__} without memory of its own; pass the tensor inside it")


def exchange_for(request: Request, error: CommError | None) -> Exchange:
    """Look the exchange up, or plan it and agree on its digest with the other ranks.

    Args:
        request: the arguments.
        error: of this rank's local tensors, if any.

    Raises:
        CommError: ``error``; layouts that do not fit, or another rank's error or other plan: see ``reshard``.
    """
    group, moving = request.members.group, request.moving
    if group is None:
        _check_layouts(request, request.items)
        if error is not None:
            raise error
        return _planned(request)
    plans = _plans.get(group)
    if plans is None:
        plans = _plans.set(group, OrderedDict())
    cached_plan = plans.get(request.key)
    if cached_plan is not None:
        plans.move_to_end(request.key)
        try:
            _check_layouts(request, request.passing)
            if error is not None:
                raise error
        except CommError as problem:  # the other ranks compare no plans, and hear of it in check mode alone
            _report(request.name, group, request.tensors, f"refused: {problem}", problem)
            raise
        return cached_plan
    exchange: Exchange | None = None
    try:
        _check_layouts(request, request.items)
        if error is None:
            exchange = _planned(request)
    except CommError as problem:
        error = problem
    state = digest(moving, (request.name, request.bucket_bytes, request.grad, request.members.ranks))
    options = {"bucket_bytes": str(request.bucket_bytes), "grad": request.grad}
    _report(request.name, group, request.tensors, "new", error)
    agree(request.name, group, state, error, lambda: {item.name: str(item) for item in moving} | options)
    assert exchange is not None  # an error is raised by ``agree``
    plans[request.key] = exchange
    if len(plans) > _PLANS:
        plans.popitem(last=False)
    return exchange


def refuse(error: CommError, members: Members, name: str) -> NoReturn:
    """Raise an error of this rank's arguments, and let the ranks that make a plan meanwhile raise, too.

    Raises:
        CommError: ``error``.
    """
    if members.group is not None:
        _report(name, members.group, (), "new", error)
        agree(name, members.group, bytes(16), error, dict)
    raise error


def _check_layouts(request: Request, items: Sequence[Item]) -> None:
    """Check layouts and dtypes of tensors.

    Raises:
        CommError: as ``plan.check`` and ``check_dtypes``.
    """
    check(items, request.members.ranks, request.name)
    for item in items:
        check_dtypes(item, request.grad, request.name)


def _planned(request: Request) -> Exchange:
    members = request.members
    return Exchange(request.moving, members.ranks, members.position, members.group, request.bucket_bytes, request.grad)


def _report(name: str, group: ProcessGroup, tensors: Sequence[Tensor], plan: str, error: CommError | None) -> None:
    """Report a call that executes no cached plan to the observer: in check mode ranks with a plan hear of it.

    Args:
        name: the function.
        group: of the call.
        tensors: local tensors, for the text of the call.
        plan: "new", which ``agree`` compares tensor by tensor afterwards, or the reason why there is none.
        error: of this rank, which comes before the error of the comparison.
    """
    if not record.switch._is_profiler_enabled:
        return
    try:
        _range = record.begin(name, "reshard", group, list(tensors), (plan,))
        record.add(name, "view", 0, 0, record.now(), calls=0)
    except CommError:
        if error is not None:
            raise error from None
        raise


def _by_name(values: Any, names: Sequence[str], name: str) -> Mapping[str, Any]:
    """An argument for every tensor: a mapping by name, a list by position, or one value for all."""
    if isinstance(values, list):
        if len(values) != len(names):
            raise ArgumentError(f"{name}: {len(values)} entries for {len(names)} tensors")
        return dict(zip(names, values, strict=True))
    if not isinstance(values, Mapping):
        return dict.fromkeys(names, values)
    missing = [key for key in names if key not in values]
    if missing:
        raise ArgumentError(f"{name}: nothing is given for {missing}, but for {list(values)}")
    return values


def _overlaps_itself(x: Tensor) -> bool:
    """Whether elements share memory: a step that is not beyond all elements of the smaller steps.

    Some strides of which only arithmetic shows that no two elements meet count as if they did.
    """
    if not x.numel():
        return False
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False
