"""The arguments of one call: read and checked, the plan for them made or looked up, results in their form."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

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
from tritoncomm.reshard import notes
from tritoncomm.reshard.execute import Exchange, check_dtypes
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.plan import Item, check, digest
from tritoncomm.reshard.specs import Wrap, check_own_layout, local_of, named, source_of, target_of
from tritoncomm.reshard.unanimous import agree

__all__ = ["Call", "check_memory", "group_of"]

_PLANS = 64
_PLAIN = (Tensor, torch.nn.Parameter)
_plans: "PerGroup[OrderedDict[Any, Exchange]]" = PerGroup()


class Call:
    """The arguments of one call: items of the plan, local tensors, and how results are wrapped."""

    def __init__(
        self, tensors: Any, source: Any, target: Any, group: Any, dtype: Any, grad: str, out: Any, name: str,
        ranks: Sequence[int] | None = None, rank: int = 0,
    ) -> None:  # fmt: skip
        self.name, self.grad = name, grad
        self.error: CommError | None = None
        self.group: ProcessGroup | None = None
        if ranks is None:
            self.group = group_of(group, name)
            self.ranks: Ints = tuple(ranks_of(self.group, name))
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
        sources, targets, dtypes = (_by_name(each, list(tensors), self.name) for each in (source, target, dtype))
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
            if local is not x:
                check_own_layout(x, layout, self.name, key)
            if outs and into is not outs[key]:
                check_own_layout(outs[key], goal, self.name, f"out {key}")
            check_kind(local, self.name)
            refuse_transforms(local, self.name, key)
            if local.is_quantized:
                raise ArgumentError(f"{self.name}: {key} is quantized, and its scale would not move; call .int_repr()")
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
                if self.name != "reshard_plan":  # a plan may be made for tensors without data
                    check_data(local, f"{self.name}: {key}")
                    check_memory(local, f"{self.name}: {key}")
                if into is not None:
                    self.check_out(key, goal, into, result)
                    self.outs.append(into)
            except CommError as error:  # of this rank's tensor: the plan is known all the same
                self.error = self.error or error
        try:
            self.check_apart(self.outs)
        except CommError as error:
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

    def check_out(self, key: str, goal: Any, into: Any, result: torch.dtype) -> None:
        """Check a tensor that is written into."""
        if not isinstance(into, Tensor):
            raise ArgumentError(f"{self.name}: out {key} must be a tensor, not {type(into).__name__}")
        check_data(into, f"{self.name}: out {key}")
        check_memory(into, f"{self.name}: out {key}")
        self.check_local(key, goal, into, "out ")
        if into.dtype != result:
            raise ArgumentError(f"{self.name}: out {key} is {into.dtype}, not {result}")
        if into.requires_grad and torch.is_grad_enabled():
            raise ArgumentError(f"{self.name}: out {key} requires grad, and is written into; use torch.no_grad()")
        if into.is_inference() and not torch.is_inference_mode_enabled():
            raise ArgumentError(f"{self.name}: out {key} is an inference tensor; use torch.inference_mode()")
        if not into.is_contiguous() and _overlaps_itself(into):
            raise ArgumentError(f"{self.name}: elements of out {key} share memory; it cannot be written into")

    def check_apart(self, outs: Sequence[Tensor]) -> None:
        """Refuse tensors to write into that share elements."""
        named = [(x.data_ptr(), key, x) for (key, *_), x in zip(self.rows, outs, strict=False) if x.numel()]
        near: list[tuple[int, str, Tensor]] = []  # those that end after the next one begins
        for at, key, x in sorted(named, key=lambda each: each[0]):
            near = [each for each in near if each[0] > at]
            for _, other, y in near:
                if share_elements(x, y):
                    raise ArgumentError(
                        f"{self.name}: out {other} and out {key} share memory; they cannot both be written"
                    )
            near.append((at + extent_of(x), key, x))

    def exchange(self, bucket_bytes: int) -> Exchange:
        """The plan of these arguments, made and compared with that of the other ranks once."""
        if not isinstance(bucket_bytes, int) or bucket_bytes < 1:
            wrong = ArgumentError(f"{self.name}: bucket_bytes must be an int of 1 or more, not {bucket_bytes!r:.80}")
            self.error, bucket_bytes = self.error or wrong, 1
        moving = [row for row, stays in zip(self.rows, self.stays, strict=True) if not stays]
        rows = tuple([(a, b.digest, c.digest, *more) for a, b, c, *more in moving])
        key = bucket_bytes, self.grad, self.name, rows
        if self.group is None:
            made = self._made(bucket_bytes)
            if self.error is not None:
                raise self.error
            assert made is not None
            return made
        plans = _plans.get(self.group)
        if plans is None:
            plans = _plans.set(self.group, OrderedDict())
        if notes.pending:
            notes.withdraw(self.group)
        stay = [row[1].digest for row, stays in zip(self.rows, self.stays, strict=True) if stays]
        if self.is_read and key in plans:
            if stay != plans[key].stay:
                self._check()
                plans[key].stay = stay if self.error is None else []
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
        plans[key], made.stay = made, stay
        if len(plans) > _PLANS:
            plans.popitem(last=False)
        return made

    def _made(self, bucket_bytes: int) -> Exchange | None:
        """A new plan; None where the arguments are refused, and the error is kept."""
        self._check()
        if self.error is None:
            moving = [item for item, stays in zip(self.items, self.stays, strict=True) if not stays]
            try:
                return Exchange(moving, self.ranks, self.position, self.group, bucket_bytes, self.grad)
            except CommError as error:
                self.error = error
        return None

    def _check(self) -> None:
        """Keep what is wrong with the layouts of all tensors, those that stay included."""
        try:
            if self.is_read:
                check(self.items, self.ranks, self.name)
                for item in self.items:
                    check_dtypes(item, self.grad, self.name)
        except CommError as error:
            self.error = error

    def _announce(self, state: bytes) -> None:
        """Let check mode compare, so that ranks that have a plan learn of it, too."""
        if not record.switch._is_profiler_enabled:
            return
        what = "new" if state else f"refused: {self.error}"  # new plans are compared tensor by tensor afterwards
        try:
            _range = record.begin(self.name, "reshard", self.group, self.locals, (what,))
            record.add(self.name, "view", 0, 0, record.now(), calls=0)
        except CommError:
            if self.error is not None:
                raise self.error from None
            raise

    def form(self, given: Any, results: Sequence[Tensor]) -> Any:
        """Results in the form in which the tensors came."""
        made = results
        if self.is_wrapped:
            made = [x if wrap is None else wrap(x) for x, wrap in zip(results, self.wraps, strict=True)]
        if isinstance(given, Tensor):
            return made[0]
        return dict(zip(given, made, strict=True)) if isinstance(given, Mapping) else list(made)

    @cached_property
    def is_wrapped(self) -> bool:
        """Whether a result is a DTensor or a ColoTensor."""
        return any(wrap is not None for wrap in self.wraps)


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


def check_memory(x: Tensor, name: str) -> None:
    """Refuse what has its data in another tensor, with strides and an offset that are not those of that memory.

    Raises:
        ArgumentError: a subclass without memory of its own; memory that was freed, as FSDP frees that of parameters.
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


def group_of(group: GroupLike | None, name: str) -> ProcessGroup:
    """The group that is given, or all ranks of the job.

    Raises:
        GroupError: there is no such group.
    """
    if group is not None:
        return groups.as_group(group, name)
    world = dist.group.WORLD
    if world is None:
        raise GroupError(f"{name}: torch.distributed is not initialized; call tritoncomm.initialize() or pass a group")
    return world


def _by_name(given: Any, names: Sequence[str], name: str) -> Mapping[str, Any]:
    """What is given for each tensor: by name, by position, or for all."""
    if isinstance(given, list):
        if len(given) != len(names):
            raise ArgumentError(f"{name}: {len(given)} entries for {len(names)} tensors")
        return dict(zip(names, given, strict=True))
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    missing = [key for key in names if key not in given]
    if missing:
        raise ArgumentError(f"{name}: nothing is given for {missing}, but for {list(given)}")
    return given
