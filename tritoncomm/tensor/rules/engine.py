"""Engine of the sharding rules: describes an operator call by labels and runs it on local tensors.

Dims carry labels, as in einsum. Sharding a label shards every operand that has it; operands without it are replicated
and their gradients all-reduced; results without it are partial and all-reduced, unless the rule handles the label
itself (``own``).
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncomm import mappings
from tritoncomm.errors import ShapeError
from tritoncomm.mappings.general import wants_grad
from tritoncomm.mappings.tensor_parallel import copy_to, reduce_from
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.distspec import ReplicaSpec, ShardSpec, _DistSpec, bounds_by_label, uneven_sizes
from tritoncomm.tensor.layout import is_colo, plain, shape_of
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, redistribute

__all__ = [
    "Labels",
    "Operand",
    "OperatorCall",
    "Parts",
    "Sharding",
    "broadcast_labels",
    "broadcast_shapes",
    "choose",
    "dtype_of_result",
    "execute",
    "from_front",
    "is_legal",
    "local_operand",
    "replicated",
    "spec_of",
]

Labels = tuple[Any, ...]
Parts = tuple[tuple[Any, int], ...]


@dataclass(frozen=True, slots=True)
class Sharding:
    """Sharded labels, and the position of this rank.

    Attributes:
        parts: (label, number of shards), ranks assigned row-major; empty if nothing is sharded.
        sizes: global size of every label.
    """

    parts: Parts
    sizes: dict[Any, int]
    pg: ProcessGroup

    @property
    def rank(self) -> int:
        """Rank of this process in ``group``."""
        return self.pg.tp_local_rank()

    @property
    def group(self) -> TorchGroup:
        """The tensor-parallel group."""
        return self.pg.tp_process_group()

    def has(self, label: Any) -> bool:
        """Whether the label is sharded."""
        return any(label == each for each, _ in self.parts)

    def shard(self, label: Any) -> tuple[int, int]:
        """Return (start, size) of this rank's shard of a label; the full range if it is not sharded."""
        if not self.has(label):
            return 0, self.sizes[label]
        bounds = bounds_by_label(self.sizes, self.parts, self.rank)
        return next((start, size) for each, start, size in bounds if each == label)


@dataclass(frozen=True, slots=True)
class Operand:
    """Tensor argument: a ColoTensor, or a plain replicated tensor.

    Attributes:
        labels: one per dim; None for a dim that cannot be sharded.
        is_local: the plain tensor is a local shard already.
        is_factor: ``run`` multiplies matrices with it, so its gradient is new memory that an all-reduce may overwrite.
    """

    tensor: Tensor
    labels: Labels
    is_local: bool = False
    is_factor: bool = False


@dataclass(slots=True)
class OperatorCall:
    """One call of an operator.

    Attributes:
        results: labels of every output tensor, in order.
        run: computes on local tensors: ``run(sharding, *operands, *late)`` returns any structure of tensors; without
            the late ones if the result is partial and ``finish`` is set. A partial result is new memory: the
            all-reduce overwrites it.
        replicated: labels that must not be sharded.
        own: labels that ``run`` handles when they are sharded; results are not reduced over them.
        late: operands that must not be summed (a bias), labelled like the result.
        finish: ``finish(result, *late)`` after a partial result is reduced; None for nothing.
        after: applied to the reduced result; None for nothing.
        prefer: index of the operand whose sharding is used at any cost: a weight with a compute spec.
        legal: a further condition on (label, number of shards, sizes).
        grouped: the label whose size may differ between operands: heads of which several share keys and values.
        gather: whether a sharded result is gathered.
        scatter: dim along which a partial result is reduce-scattered; None all-reduces it.
        sizes: global sizes of the labels, taken from the operands.
        result_sizes: global sizes of labels whose size differs in the result.
        gathered: sharded operands and their gathered copies if no sharding is legal; set by ``execute``.
    """

    operands: Sequence[Operand]
    results: Sequence[Labels]
    run: Callable[..., Any]
    replicated: frozenset[Any] = frozenset()
    own: frozenset[Any] = frozenset()
    late: Sequence[Operand] = ()
    finish: Callable[..., Any] | None = None
    after: Callable[[Tensor], Tensor] | None = None
    prefer: int | None = None
    legal: Callable[[Any, int, dict[Any, int]], bool] | None = None
    grouped: Any = None
    gather: bool = False
    scatter: int | None = None
    sizes: dict[Any, int] = field(default_factory=dict)
    result_sizes: dict[Any, int] = field(default_factory=dict)
    gathered: Sequence[tuple[Any, Tensor]] = ()


def broadcast_shapes(shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the shape to which all shapes are broadcast."""
    sizes = [1] * max(map(len, shapes), default=0)
    for shape in shapes:
        for dim in range(-len(shape), 0):
            if shape[dim] != 1 and sizes[dim] not in (1, shape[dim]):
                raise ShapeError(f"shapes {' and '.join(str(list(s)) for s in shapes)} do not broadcast")
            sizes[dim] = sizes[dim] if shape[dim] == 1 else shape[dim]
    return tuple(sizes)


def broadcast_labels(shape: Sequence[int], sizes: Sequence[int], names: Sequence[Any] | None = None) -> Labels:
    """Return the labels of an operand that is broadcast to ``sizes``: its dims, the last one as -1, or their names."""
    dims = range(-len(shape), 0)
    # Global shapes decide: the shards of one rank may broadcast where the tensors do not.
    if len(shape) > len(sizes) or any(shape[dim] not in (1, sizes[dim]) for dim in dims):
        raise ShapeError(f"{list(shape)} cannot be broadcast to {list(sizes)}")
    # None for a dim of size 1 that is broadcast: it cannot be sharded.
    return tuple((dim if names is None else names[dim]) if shape[dim] == sizes[dim] else None for dim in dims)


def dtype_of_result(local: Callable[[Tensor], Tensor], x: Tensor) -> torch.dtype:
    """Return the dtype in which torch returns ``local`` of tensors like ``x``, for rules that compute it themselves."""
    device = x.device.type
    if not (torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)):
        return x.dtype
    # Torch's lists of autocast decide, by device and version, so torch is asked with one element.
    return local(x.detach().new_zeros(1)).dtype


def from_front(dim: int, count: int) -> int:
    """Return ``dim`` of a tensor of ``count`` dims, counted from the front; a number has dim 0, as in torch."""
    count = max(count, 1)
    if not -count <= dim < count:
        raise IndexError(f"Dimension out of range (expected to be in range of [{-count}, {count - 1}], but got {dim})")
    return dim % count


def execute(call: OperatorCall) -> Any:
    """Run the call; tensors of the result are ColoTensors."""
    operands = (*call.operands, *call.late)
    colo_operands: list[Any] = [each for each in operands if is_colo(each.tensor)]
    pg: ProcessGroup = colo_operands[0].tensor.process_group
    for each in operands:
        if each.is_local:
            continue  # a ColoTensor with the same labels is an operand, too
        for label, size in zip(each.labels, shape_of(each.tensor), strict=True):
            if label is not None and call.sizes.setdefault(label, size) != size and label != call.grouped:
                _refuse_sizes(call, operands)
    with torch._C.DisableTorchFunctionSubclass():
        chosen = choose(call, pg)
        parts = chosen or ()
        sharding = Sharding(parts, call.sizes, pg)
        shards = [local_operand(each, parts, pg) for each in call.operands]
        # One label decides for all: several sharded labels are together in a result, or in none (``is_legal``).
        # The sharded label is summed away. ``late`` operands come after the sum, or go to ``run`` without a ``finish``.
        if parts and parts[0][0] not in call.results[0] and parts[0][0] not in call.own:
            early = [] if call.finish is not None else [local_operand(each, (), pg) for each in call.late]
            outputs, tree = tree_flatten(call.run(sharding, *shards, *early))
            outputs, parts = _reduce_outputs(outputs, call, sharding, pg)
            gather = is_column_parallel = False
        else:
            gather = call.gather
            is_column_parallel = not gather and _is_column_parallel(call, parts, pg)
            late = [local_operand(each, parts, pg) for each in call.late]
            if chosen is None:  # no sharding is legal, so the operands were gathered
                pairs = zip(call.operands, shards, strict=True)
                call.gathered = [(each.tensor, x) for each, x in pairs if _partitions(each)]
            outputs, tree = tree_flatten(call.run(sharding, *shards, *late))
        results = [
            _wrap_result(x, labels, call, parts, pg, colo_operands, gather) if isinstance(x, Tensor) else x
            for x, labels in zip(outputs, call.results, strict=True)
        ]
        if is_column_parallel:
            for x in results:  # for the layer behind, which is parallel by rows; over one rank the spec says so, too
                x.compute_spec = ComputeSpec(ComputePattern.TP1D)
                if not parts:
                    x.dist_spec = ShardSpec([-1], [1])
    return tree_unflatten(results, tree)


def _refuse_sizes(call: OperatorCall, operands: Sequence[Operand]) -> NoReturn:
    """Raise on every rank: on some ranks the local shards would fit, and those ranks would hang."""
    shapes = " and ".join(str(list(shape_of(each.tensor))) for each in operands)
    raise ShapeError(f"the sizes of {shapes} do not fit each other")


def choose(call: OperatorCall, pg: ProcessGroup) -> Parts | None:
    """Return the cheapest legal sharding of an operand; () without shards, None if no sharding of theirs is legal."""
    candidates: list[Parts] = []
    sharded = False
    for index, each in enumerate(call.operands):
        current = _partitions(each)
        if not current:
            continue
        sharded = True
        parts = tuple((each.labels[dim], count) for dim, count in current)
        if is_legal(call, parts):
            if call.prefer == index:
                return parts
            if parts not in candidates:
                candidates.append(parts)
    if not candidates:
        return None if sharded else ()
    if len(candidates) == 1:
        return candidates[0]
    return min(candidates, key=lambda parts: _bytes_moved(call, parts, pg.tp_world_size()))


def _partitions(each: Operand) -> Parts:
    return each.tensor.partitions if is_colo(each.tensor) else ()


def _is_column_parallel(call: OperatorCall, parts: Parts, pg: ProcessGroup) -> bool:
    """Whether the weight with a compute spec is sharded along a dim of the result; over one rank, by its spec."""
    if call.prefer is None:
        return False
    labels = call.operands[call.prefer].labels
    weight: Any = call.operands[call.prefer].tensor
    if not parts:
        one_dim = is_colo(weight) and weight.is_sharded() and len(weight.dist_spec.dims) == 1
        return one_dim and pg.tp_world_size() == 1 and labels[weight.dist_spec.dims[0]] in call.results[0]
    return parts[0][0] in labels and parts[0][0] in call.results[0]


def is_legal(call: OperatorCall, parts: Parts) -> bool:
    """Whether the operator can run with this sharding."""
    labels = [label for label, _ in parts]
    if any(label is None or label in call.replicated for label in labels):
        return False
    if call.legal is not None and not all(call.legal(label, count, call.sizes) for label, count in parts):
        return False
    labelled = [each.labels for each in (*call.operands, *call.late)] + list(call.results)
    if len(labels) > 1:
        # A label that ``run`` reduces by itself would be summed over the whole group, also along the other label.
        if any(label in call.own for label in labels):
            return False
        # A tensor has all sharded labels or none: one with only some of them would be a replica within a part of the
        # group.
        if any(0 < sum(label in side for label in labels) < len(labels) for side in labelled):
            return False
    return True


def _bytes_moved(call: OperatorCall, parts: Parts, world: int) -> float:
    """Return the bytes sent per rank, forward and backward, in units of (world - 1) / world."""
    # An all-reduce counts 2, other collectives 1. ``graded`` is 1 for an operand that wants a gradient, else 0.
    total, labels = 0.0, [label for label, _ in parts]
    for each in call.operands:
        x = each.tensor
        size, graded = math.prod(shape_of(each.tensor)) * x.element_size(), wants_grad(x)
        current = _partitions(each)
        if labels[0] in each.labels:
            wanted = tuple((each.labels.index(label), count) for label, count in parts)
            if not current:  # a replica is cut without a message, and its gradient gathered
                total += size * graded
            elif current != wanted:  # another shard is exchanged, forward and backward
                total += size / world * (1 + graded)
        elif current:  # a shard is gathered, and its gradient reduce-scattered
            total += size * (1 + graded)
        else:  # the gradient of a replica is all-reduced
            total += size * 2 * graded
    for result in call.results:  # partial ones are all-reduced, in 4 bytes an element
        if labels[0] not in result and labels[0] not in call.own:
            total += 2 * math.prod(call.sizes.get(label, 1) for label in result) * 4
    return total


def local_operand(each: Operand, parts: Parts, pg: ProcessGroup) -> Tensor:
    """Return the operand as a plain local tensor under this sharding; replicated if it has none of the labels."""
    x = each.tensor
    if each.is_local:
        return x
    if is_colo(x) and x.process_group is not pg and x.process_group != pg:
        x = x.redistribute(ReplicaSpec(), pg)
    # Current and requested partitions, by dim.
    current, local = (x.partitions, plain(x)) if is_colo(x) else ((), x)
    target = tuple((each.labels.index(label), count) for label, count in parts if label in each.labels)
    is_replica_beside_shards = bool(parts) and not target
    if target == current and not is_replica_beside_shards:
        return local
    # Gradients: a shard that is gathered gets its own reduce-scattered, a replica its own all-reduced. Each rank has
    # used the replica for another part of the result.
    group, shape = pg.tp_process_group(), shape_of(each.tensor)
    if target:
        return redistribute(local, Transition(shape, current, target), group)
    if current:
        if parts and len(current) == 1:  # backward: reduce-scatter
            ((dim, count),) = current
            return mappings.all_gather_dim(local, dim, group, sizes=uneven_sizes(shape[dim], count))
        local = redistribute(local, Transition(shape, current), group)
    # A replica beside shards. Backward: all-reduce.
    return copy_to(local, group, each.is_factor) if parts and wants_grad(local) else local


def replicated(x: Tensor, pg: ProcessGroup) -> Tensor:
    """Return the global tensor as a plain tensor without gradient."""
    return local_operand(Operand(x, (None,) * len(shape_of(x))), parts=(), pg=pg).detach()


def _reduce_outputs(
    outputs: list[Any], call: OperatorCall, sharding: Sharding, pg: ProcessGroup
) -> tuple[list[Any], Parts]:
    """Reduce partial results over the ranks, then apply ``finish``; return the results and their sharding.

    ``after`` is for whole sums, so it follows an all-reduce; ``late`` are operands that only ``finish`` reads.
    """
    group, parts = pg.tp_process_group(), ()
    if call.scatter is None:
        outputs = [reduce_from(x, group, in_place=True) for x in outputs]
        if call.after is not None:
            outputs = [call.after(x) for x in outputs]
    else:
        dim, world = from_front(call.scatter, outputs[0].dim()), pg.tp_world_size()
        sizes = uneven_sizes(outputs[0].shape[dim], world)
        outputs = [mappings.reduce_scatter_dim(x, dim, group, sizes=sizes) for x in outputs]
        parts = ((call.results[0][dim], world),)
    if call.finish is not None:
        late = [local_operand(each, parts, pg) for each in call.late]
        outputs = [call.finish(x, *late) for x in outputs]
    return outputs, parts


def _wrap_result(
    x: Tensor,
    labels: Labels,
    call: OperatorCall,
    parts: Parts,
    pg: ProcessGroup,
    colo_operands: Sequence[Any],
    gather: bool,
) -> Any:
    """Wrap a result as a ColoTensor; the spec of an operand of this layout is reused, to keep its notation."""
    result_parts = tuple((labels.index(label), count) for label, count in parts if label in labels)
    shape = list(x.shape)  # global, with the sizes of the sharded dims
    for dim, _ in result_parts:
        shape[dim] = call.result_sizes.get(labels[dim], call.sizes[labels[dim]])
    if result_parts and gather:
        x = redistribute(x, Transition(tuple(shape), result_parts), pg.tp_process_group())
        result_parts = ()
    for each in colo_operands:
        if each.labels == labels and each.tensor.partitions == result_parts:
            return each.tensor._wrap(x, pg, each.tensor.dist_spec, shape)
    return colo_operands[0].tensor._wrap(x, pg, spec_of(result_parts, len(shape)), shape)


def spec_of(parts: Sequence[tuple[int, int]], ndim: int) -> _DistSpec:
    """Return the spec of these partitions; the last of several dims is written -1."""
    if not parts:
        return ReplicaSpec()
    dims = [-1 if dim == ndim - 1 and ndim > 1 else dim for dim, _ in parts]
    return ShardSpec(dims, [count for _, count in parts])
