"""The request of one call: its arguments, read and checked once, and the executor that is cached or planned for it."""

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, record
from tritoncomm.core import backend
from tritoncomm.core.agreement import agree
from tritoncomm.core.memory import contiguous_stride, extent_of, has_memory, share_elements
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import PerGroup, check_data, check_kind, ranks_of, refuse_transforms
from tritoncomm.errors import ArgumentError, CommError, GroupError, ShapeError
from tritoncomm.groups import GroupLike
from tritoncomm.reshard.execute import Executor
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.names import Kinds, Sides, named, shortened
from tritoncomm.reshard.plan import Item, Participants, check_items

__all__ = [
    "LocalShapes",
    "Request",
    "Wrap",
    "check_locals",
    "compare",
    "executor_for",
    "guessed",
    "is_dtensor",
    "is_kept",
    "local_of",
    "parse",
    "participants_of",
    "refusing",
    "sides_of",
    "source_of",
]  # fmt: skip

Wrap = Callable[[Tensor], Any]
"""Makes a DTensor or a ColoTensor of a local result."""
LocalShapes = tuple[Ints | None, Ints | None]
"""Shapes of a local tensor before and after; None for a layout without a part on the rank."""
_Pairs = Sequence[tuple[Any, Any]]
_PLANS = 64
_PLAIN = (Tensor, torch.nn.Parameter)
_plans: "PerGroup[OrderedDict[Any, Executor]]" = PerGroup()
"""Executors by ``Request.key``, the most recently used last.

Every call reads its arguments before it looks here, and marks its plan as used. So all ranks evict the same plans:
either every rank of a call compares digests or none does.
"""


@dataclass(frozen=True)
class Request:
    """Arguments of one call.

    Attributes:
        kinds: names and dtypes of every tensor, as this rank knows them.
        items: layouts and dtypes of every tensor.
        tensors: local source tensors of this rank, empty ones for the names that it lacks.
        outs: local tensors to write into; empty without ``out``.
        wraps: functions that make local results DTensors or ColoTensors; None for plain results.
        device: of the empty tensors.
        passes_through: for every tensor, whether its layout and dtype are unchanged, so that it is returned as it is.
        error: the error of this rank's local tensors, if any. It is raised after the plan is looked up, because the
            key tells whether the other ranks compare plans now, and have to hear of the error.
    """

    name: str
    participants: Participants
    bucket_bytes: int
    grad: str
    kinds: Kinds
    items: tuple[Item, ...]
    tensors: tuple[Tensor, ...]
    outs: tuple[Tensor, ...]
    wraps: tuple[Wrap | None, ...]
    device: torch.device
    passes_through: tuple[bool, ...]
    error: CommError | None

    @cached_property
    def moving(self) -> tuple[Item, ...]:
        """Layouts and dtypes of the tensors that a plan moves: without pass-through tensors."""
        return tuple([item for item, passes in zip(self.items, self.passes_through, strict=True) if not passes])

    @property
    def passing(self) -> tuple[Item, ...]:
        """Layouts and dtypes of the tensors that are returned as they are."""
        return tuple([item for item, passes in zip(self.items, self.passes_through, strict=True) if passes])

    @cached_property
    def key(self) -> tuple[Any, ...]:
        """Key under which a plan is cached: all arguments that the plan depends on, equal on all ranks."""
        return self.bucket_bytes, self.grad, self.name, self.moving  # the name, as in the digest


def participants_of(group: GroupLike | None, name: str) -> Participants:
    """Return the ranks of a group; without a group, all ranks of the job."""
    process_group = dist.group.WORLD if group is None else groups.as_group(group, name)
    if process_group is None:
        raise GroupError(f"{name}: torch.distributed is not initialized; call tritoncomm.initialize() or pass a group")
    return Participants(process_group, tuple(ranks_of(process_group, name)), process_group.rank())


def parse(
    name: str,
    participants: Participants,
    tensors: Any,
    kinds: Kinds,
    sides: Sides,
    wraps: Sequence[Wrap | None],
    *,
    bucket_bytes: Any,
    grad: Any,
    dtype: Any = None,
    out: Any = None,
) -> Request:
    """Read and check the arguments of a call, and return them as a request.

    Args:
        kinds: the names and dtypes, complete.
        sides, wraps: as ``sides_of`` returns them.
    """
    by_name = named(tensors, name)
    if grad not in ("replicated", "partial"):
        raise ArgumentError(f"{name}: grad must be replicated or partial, not {grad!r}")
    outs_by_name = {} if out is None else named(out, name)
    dtypes = _per_tensor(dtype, kinds.names, name)
    if out is not None and (more := [key for key in outs_by_name if key not in sides]):
        raise ArgumentError(f"{name}: out has {more}, but there are {list(kinds.names)}")
    may_record = out is None and torch.is_grad_enabled()
    is_plan = name == "reshard_plan"  # a plan may be made of dtypes, and of tensors without data
    device = _device_of((*by_name.values(), *outs_by_name.values()), participants)
    items: list[Item] = []
    shapes: list[LocalShapes] = []
    sources: list[tuple[Any, Tensor]] = []
    outs: list[tuple[Any, Tensor]] = []
    for key in kinds.names:
        layout, goal = sides[key]
        source_shape, target_shape = (each.local_shape(participants.rank) for each in (layout, goal))
        value: Any = by_name[key] if key in by_name else kinds.source_of(key, device).view(source_shape or (0,))
        is_dtype = is_plan and isinstance(value, torch.dtype)
        x = torch.empty(0, dtype=value, device="meta") if is_dtype else value
        if not isinstance(x, Tensor):
            raise ArgumentError(f"{name}: {key} must be a tensor, not {type(x).__name__}")
        local = like = local_of(x)  # a result has the dtype of ``like``: the tensor of ``out``, else the source
        if out is not None:
            if key in outs_by_name:
                y = outs_by_name[key]
            else:
                y = kinds.result_of(key, dtypes[key] or local.dtype, device).view(target_shape or (0,))
            like = local_of(y)
            outs.append((y, like))
            if not isinstance(like, Tensor):
                raise ArgumentError(f"{name}: out {key} must be a tensor, not {type(like).__name__}")
        result = dtypes[key] or like.dtype
        if not isinstance(result, torch.dtype):
            raise ArgumentError(f"{name}: the dtype of {key} must be a torch.dtype, not {result!r:.80}")
        items.append(Item(key, layout, goal, local.dtype, result, may_record and x.requires_grad))
        shapes.append((None if is_dtype else source_shape, target_shape))
        sources.append((x, local))
    # An error of a local tensor (another shape, no memory, ...) is returned in the request; see ``Request.error``.
    error: CommError | None = None
    try:
        check_locals(items, shapes, sources, outs, name, participants.rank, has_data=not is_plan)
    except CommError as problem:
        error = problem
    # A plan is cached by its ``bucket_bytes``, so a request cannot be made without this number.
    if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
        raise error or ArgumentError(f"{name}: bucket_bytes must be an int of 1 or more, not {bucket_bytes!r:.80}")
    # Partial gradients of a tensor's replicas have to be summed even if its layout is unchanged.
    passes_through = tuple([
        out is None
        and item.dtype == item.result
        and item.source == item.target
        and not (item.has_grad and grad == "partial")
        for item in items
    ])  # fmt: skip
    return Request(
        name, participants, bucket_bytes, grad, kinds, items=tuple(items), tensors=tuple([x for _, x in sources]),
        outs=tuple([x for _, x in outs]), wraps=tuple(wraps), device=device, passes_through=passes_through, error=error,
    )  # fmt: skip


def sides_of(
    name: str, tensors: Any, names: Sequence[str], source: Any, target: Any, out: Any, rank: int
) -> tuple[Sides, list[Wrap | None]]:
    """Read the layouts of all tensors of a call: (both layouts by name, functions that wrap local results).

    Raise if this rank owns a shard of a tensor that it did not pass.
    """
    by_name, outs = named(tensors, name), None if out is None else named(out, name)
    layouts, targets = (_per_tensor(each, names, name) for each in (source, target))
    sides, wraps = {}, []
    for key in names:
        layout = source_of(by_name.get(key), layouts[key], name, key)
        goal, wrap = _target_of(targets[key], layout.shape, name, key)
        sides[key] = layout, goal
        wraps.append(wrap)
    if len(by_name) < len(sides):
        _check_given(by_name, {key: source for key, (source, _) in sides.items()}, name, rank)
    if outs is not None and len(outs) < len(sides):
        _check_given(outs, {key: goal for key, (_, goal) in sides.items()}, f"{name}: out", rank)
    return sides, wraps


def _device_of(tensors: Sequence[Any], participants: Participants) -> torch.device:
    """Return the device of the first of a rank's tensors; of a rank without tensors, that of its group."""
    device = next((local_of(x).device for x in tensors if isinstance(x, Tensor)), None)
    if device is None and participants.group is not None:
        device = backend.default_device(backend.cuda_backend(participants.group))
    return device or torch.device("cpu")


def _check_given(given: Collection[str], layouts: Mapping[str, Layout], name: str, rank: int) -> None:
    """Check that a rank gives all tensors of which it has a part by these layouts."""
    absent = [
        key for key, layout in layouts.items() if key not in given and 0 not in (layout.local_shape(rank) or (0,))
    ]
    if absent:
        raise ArgumentError(
            f"{name}: rank {rank} has parts of {shortened(absent)} by the layouts, but does not give them: pass them, "
            "or leave the names out of the layouts"
        )


def _per_tensor(values: Any, names: Sequence[str], name: str) -> Mapping[str, Any]:
    """Return an argument's value for every tensor by name, from a mapping, a list by position, or one value."""
    if isinstance(values, list):
        if len(values) != len(names):
            raise ArgumentError(f"{name}: {len(values)} entries for {len(names)} tensors")
        return dict(zip(names, values, strict=True))
    if not isinstance(values, Mapping):
        return dict.fromkeys(names, values)
    values = {str(key): value for key, value in values.items()}
    missing = [key for key in names if key not in values]
    if missing:
        raise ArgumentError(f"{name}: nothing is given for {missing}, but for {list(values)}")
    return values


def is_dtensor(x: Any) -> bool:
    """Whether a value is a DTensor: has ``device_mesh`` and ``placements``. Torch's DTensor is not imported."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local_of(tensor: Any) -> Tensor:
    """Return the local tensor of a DTensor or ColoTensor; return any other value as it is."""
    if tensor.__class__ is Tensor:  # asking a tensor for a missing attribute takes a microsecond
        return tensor
    if is_dtensor(tensor):
        return tensor.to_local()
    return tensor.reshard_local() if hasattr(tensor, "reshard_local") else tensor


def source_of(tensor: Any, layout: Any, name: str, key: str) -> Layout:
    """Return the source layout of tensor ``key``: ``layout``, or else the tensor's own, of a DTensor or ColoTensor."""
    if isinstance(layout, Layout):
        return layout
    if layout is None and is_dtensor(tensor):
        try:
            return Layout.of_dtensor(tensor)
        except CommError as error:
            raise type(error)(f"{name}: {key}: {error}") from None
    if layout is None and hasattr(tensor, "reshard_layout"):
        return tensor.reshard_layout()
    if tensor is None:
        raise ArgumentError(f"{name}: {key} is not given on this rank, which has to know its source: give its Layout")
    what = "a plain tensor, which needs a Layout" if layout is None else f"given {type(layout).__name__}, not a Layout"
    raise ArgumentError(f"{name}: the source of {key} is {what}")


def _target_of(target: Any, shape: Ints, name: str, key: str) -> tuple[Layout, Wrap | None]:
    """Return the target layout of a tensor, and the function that wraps its local result; None for a plain result.

    Args:
        target: a ``Layout``; ``(mesh, placements)``, for a DTensor; or an object with ``reshard_layout(shape)`` and
            ``reshard_wrap(local, shape)``, such as a ``ColoTensorSpec``.
    """
    if isinstance(target, Layout):
        return target, None
    if hasattr(target, "reshard_layout"):
        return target.reshard_layout(shape), lambda local: target.reshard_wrap(local, shape)
    if isinstance(target, tuple) and len(target) == 2 and hasattr(target[0], "get_coordinate"):
        mesh, placements = target
        layout = Layout.on_mesh(shape, mesh, placements)
        return layout, lambda local: _as_dtensor(local, mesh, placements, shape)
    raise ArgumentError(
        f"{name}: the target of {key} must be a Layout, (mesh, placements) or a ColoTensorSpec, not "
        f"{type(target).__name__}"
    )


def _as_dtensor(local: Tensor, mesh: Any, placements: Any, shape: Ints) -> Any:
    """Wrap a local result in a DTensor; return it as it is on a rank outside of the mesh, where backward needs it."""
    if mesh.get_coordinate() is None:
        return local
    # Imported here because it takes as long as everything else, and only users of DTensors have it anyway.
    from torch.distributed.tensor import DTensor

    stride = contiguous_stride(shape)
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def check_locals(
    items: Sequence[Item], shapes: Sequence[LocalShapes], sources: _Pairs, outs: _Pairs, name: str, rank: int,
    *, has_data: bool = True,
) -> None:  # fmt: skip
    """Check this rank's source tensors, and the tensors to write results into, against layouts, dtypes and memory.

    Args:
        shapes: shapes of every local tensor before and after.
        sources: every source tensor as the caller passed it, and its local tensor.
        outs: every tensor to write into, and its local tensor; empty without ``out``.
        has_data: whether source tensors need memory.
    """
    if outs:
        for item, (_, shape), (x, local) in zip(items, shapes, outs, strict=True):
            _check_result(x, local, item, shape, name, rank)
        _check_apart([item.name for item in items], [local for _, local in outs], name)
    may_record = not outs and torch.is_grad_enabled()
    for item, (shape, _), (x, local) in zip(items, shapes, sources, strict=True):
        label = f"{name}: {item.name}"
        if not isinstance(local, Tensor):
            raise ArgumentError(f"{label} must be a tensor, not {type(local).__name__}")
        if local is not x:
            _check_own_layout(x, item.source, name, item.name)
        refuse_transforms(local, name, item.name)
        if has_data:
            check_data(local, label)
            _check_memory(local, label)
        else:
            check_kind(local, label)
        if local.shape != shape:  # the shape is None where this rank has no part: then an empty tensor passes
            _refuse_shape(local, shape, name, item.name, rank)
        if local.dtype != item.dtype:
            raise ArgumentError(f"{label} is {local.dtype}, but the plan is for {item.dtype}")
        if may_record and local.requires_grad and not item.has_grad:
            raise ArgumentError(f"{label} requires grad, but did not when the plan was made")


def _check_result(out: Any, local: Any, item: Item, shape: Ints | None, name: str, rank: int) -> None:
    """Check a tensor of this rank to write a result into; ``shape`` is None if the target has no part here."""
    key = f"out {item.name}"
    label = f"{name}: {key}"
    if not isinstance(local, Tensor):
        raise ArgumentError(f"{label} must be a tensor, not {type(local).__name__}")
    if local is not out:
        _check_own_layout(out, item.target, name, key)
    check_data(local, label)
    _check_memory(local, label)
    if local.shape != shape:
        _refuse_shape(local, shape, name, key, rank)
    if local.dtype != item.result:
        raise ArgumentError(f"{label} is {local.dtype}, not {item.result}")
    if local.requires_grad and torch.is_grad_enabled():
        raise ArgumentError(f"{label} requires grad, and is written into; use torch.no_grad()")
    if local.is_inference() and not torch.is_inference_mode_enabled():
        raise ArgumentError(f"{label} is an inference tensor; use torch.inference_mode()")
    if not local.is_contiguous() and _may_overlap_itself(local):
        raise ArgumentError(f"{name}: elements of {key} share memory; it cannot be written into")


def _check_own_layout(tensor: Any, layout: Layout, name: str, key: str) -> None:
    """Check that a DTensor or a ColoTensor has the layout of the plan; its local shape may be equal in another one."""
    own = source_of(tensor, layout=None, name=name, key=key)
    # A layout of more ranks says that a DTensor over a submesh has replicas on the other submeshes.
    if own != layout and not layout.has_part(own):
        raise ShapeError(f"{name}: {key} is laid out as {own}, not as {layout}")


def _refuse_shape(x: Tensor, shape: Ints | None, name: str, key: str, rank: int) -> None:
    """Reject a local tensor of another shape than its layout's; accept an empty one on a rank without a part."""
    if shape is not None:
        raise ShapeError(f"{name}: {key} is {list(x.shape)} on rank {rank}, but its layout has {list(shape)} there")
    if x.numel():
        raise ShapeError(
            f"{name}: {key} is {list(x.shape)} on rank {rank}, which its layout does not have; pass an empty tensor "
            "there"
        )


def _check_apart(names: Sequence[str], outs: Sequence[Tensor], name: str) -> None:
    """Check that no two tensors to write into share an element."""
    # Sorted by address, so that only neighbours are compared: a state dict has thousands of tensors.
    starts = [(x.data_ptr(), key, x) for key, x in zip(names, outs, strict=False) if x.numel()]
    open_ends: list[tuple[int, str, Tensor]] = []  # tensors that end after the next one begins
    for start, key, x in sorted(starts, key=lambda entry: entry[0]):
        open_ends = [entry for entry in open_ends if entry[0] > start]
        for _, other, y in open_ends:
            if share_elements(x, y):
                raise ArgumentError(
                    f"{name}: out {other} and out {key} share memory; they cannot both be written: "
                    "of tied weights leave one name out of the layouts"
                )
        open_ends.append((start + extent_of(x), key, x))


def _check_memory(x: Tensor, label: str) -> None:
    """Check that a local tensor has memory of its own, which was not freed (as FSDP does) or made smaller."""
    if type(x) in _PLAIN:
        is_simple = x.is_contiguous() and not x.storage_offset()  # nearly always; 0.2 us less for each of many tensors
        if not (is_simple and x.untyped_storage().nbytes() >= x.nbytes) and not has_memory(x, extent_of(x)):
            raise ArgumentError(f"{label} has no memory: its storage was freed, or made smaller than the tensor")
    elif x.numel() and not x.is_meta:
        try:
            address = x.data_ptr()
        except RuntimeError:
            address = 0
        if not address:
            raise ArgumentError(f"{label} is a {type(x).__name__} without memory of its own; pass the tensor inside it")


def _may_overlap_itself(x: Tensor) -> bool:
    """Whether two elements of a tensor may share memory: a stride lies within the reach of the smaller ones."""
    if not x.numel():
        return False
    # With strides in ascending order, each has to step over everything that the smaller ones reach.
    reach = 0
    for step, size in sorted((step, size) for step, size in zip(x.stride(), x.shape, strict=True) if size > 1):
        # Also where strides interleave without a shared element.
        if step <= reach:
            return True
        reach += step * (size - 1)
    return False


def executor_for(request: Request, lacks: bool = False, is_told: bool = False) -> Executor | None:
    """Return the executor of a request: a cached one, or a new one whose digest all ranks of the group agree on.

    None where a rank guesses, wrongly, what it lacks: then all ranks have to tell each other what they know.

    Args:
        lacks: whether this rank lacks tensors or results.
        is_told: whether it was told their dtypes.
    """
    name, participants, error = request.name, request.participants, request.error
    group, ranks = participants.group, participants.ranks
    plans = OrderedDict() if group is None else _plans.get(group) or _plans.set(group, OrderedDict())
    executor = plans.get(request.key)
    # The tensors of a cached plan were checked when it was made.
    unchecked = request.items if executor is None else request.passing
    try:
        check_items(unchecked, ranks, name, request.grad)
    except CommError as problem:
        error = problem
    if executor is not None and group is not None and not executor.compares_calls:
        plans.move_to_end(request.key)
        if error is not None:  # the other ranks compare no plans, and hear of the error in check mode alone
            _report(name, group, request.tensors, plan=f"refused: {error}", error=error)
            raise error
        return executor
    if error is None and executor is None:
        try:
            executor = Executor(request.moving, participants, request.bucket_bytes, request.grad)
        except CommError as problem:
            error = problem
    # Raises on all ranks where digests differ, or where any rank has an error.
    lacked = False
    if group is not None:
        lacked = compare(
            group, name, executor, request.kinds.names, request.tensors, error, lacks=lacks, is_told=is_told
        )
        if lacked is None:
            return None
    if error is not None:
        raise error
    assert executor is not None
    executor.compares_calls |= lacked
    plans[request.key] = executor
    plans.move_to_end(request.key)
    if len(plans) > _PLANS:
        plans.popitem(last=False)
    return executor


def guessed(
    name: str, group: ProcessGroup | None, kinds: Kinds, sides: Sides, options: Mapping[str, Any]
) -> Kinds | None:
    """Complete ``kinds`` of a rank that lacks tensors, as the last plan of these layouts had them; None without one."""
    for key in reversed((None if group is None else _plans.get(group)) or {}):
        *others, moving = key
        known = kinds.told_by(moving, sides) if others == [options["bucket_bytes"], options["grad"], name] else None
        if known is not None:
            return known
    return None


def compare(
    group: ProcessGroup,
    name: str,
    executor: Executor | None,
    names: Sequence[str],
    tensors: Sequence[Tensor],
    error: CommError | None = None,
    *,
    lacks: bool = False,
    is_told: bool = False,
) -> bool | None:
    """Compare a plan over all ranks of a group; return and raise as ``agree`` does.

    Args:
        executor: of the plan; None on a rank with an error, or that cannot guess its plan.
        names: of all tensors of the call, pass-through tensors included.
        tensors: for the flight record.
        lacks, is_told: as for ``executor_for``.
    """
    _report(name, group, tensors, plan="new", error=error)
    if executor is None:  # ``dict``: there is no plan to describe
        return agree(name, group, digest=None, error=error, describe=dict, names=names, lacks=lacks)
    items = {item.name: item for item in executor.items}
    options = {"bucket_bytes": str(executor.bucket_bytes), "grad": executor.grad}
    digest = hashlib.blake2b(name.encode() + executor.digest, digest_size=16).digest()
    return agree(
        name, group, digest, error, lambda: {each: str(item) for each, item in items.items()} | options,
        parts=lambda each: items[each].boxes() if each in items else [], names=names, lacks=lacks, is_told=is_told,
    )  # fmt: skip


def is_kept(group: ProcessGroup, key: tuple[Any, ...], executor: Executor) -> bool:
    """Whether the group still has this plan; mark it as used, as a call that reads its arguments does."""
    plans = _plans.get(group)
    if plans is None or plans.get(key) is not executor:
        return False
    plans.move_to_end(key)
    return True


@contextmanager
def refusing(participants: Participants, name: str) -> Iterator[None]:
    """Raise an error of this rank's arguments on the ranks that make a plan meanwhile, too."""
    try:
        yield
    except CommError as error:
        # The other ranks may be comparing plans: without this rank they would wait for the group's timeout.
        if participants.group is not None:
            raise_together(name, participants.group, error)
        raise


def raise_together(name: str, group: ProcessGroup, error: CommError | None) -> None:
    """Raise an error of this rank on every rank of the group; all of them call, None being that of one without."""
    _report(name, group, tensors=(), plan="new", error=error)
    # There is no request to hash, or to describe: the error alone makes all ranks raise.
    agree(name, group, digest=bytes(16), error=error, describe=dict)


def _report(name: str, group: ProcessGroup, tensors: Sequence[Tensor], plan: str, error: CommError | None) -> None:
    """Report to the flight record and to check mode that this rank calls without a cached plan.

    ``plan`` is "new" for a plan that ``agree`` compares afterwards, or the reason why there is none.
    """
    if not record.is_observed():
        return
    try:
        # Check mode compares this with the calls of the other ranks, so that ranks with a cached plan raise, too. This
        # rank's own error is raised in place of that difference.
        _range = record.begin(name, "reshard", group, list(tensors), (plan,))  # a profiler's, until this function ends
        record.add(name, "view", bytes_copied=0, bytes_sent=0, started=record.now(), calls=0)  # ends this call
    except CommError:
        if error is not None:
            raise error from None
        raise
