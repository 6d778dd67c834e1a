"""Runs a call on pieces: chooses what is cut, brings every operand there, computes, sums, names the result's layout."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from tritoncomm import mappings
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.mappings.general import wants_grad
from tritoncomm.tensor.compute_spec import ComputePattern, ComputeSpec
from tritoncomm.tensor.distspec import ReplicaSpec, ShardSpec, _DistSpec
from tritoncomm.tensor.layout import is_colo, plain, shape_of, wrap
from tritoncomm.tensor.process_group import ProcessGroup
from tritoncomm.tensor.redistribute import Transition, redistribute
from tritoncomm.tensor.rules.call import Call, Cut, Labels, Operand, Parts

__all__ = ["choose", "execute", "is_legal", "piece_of", "spec_of"]


def execute(call: Call) -> Any:
    """The result of the call, ColoTensors where tensors come out."""
    everything = (*call.operands, *call.late)
    coloured = [each for each in everything if is_colo(each.tensor)]
    pg: ProcessGroup = coloured[0].tensor.process_group  # type: ignore[attr-defined]
    for each in everything:
        if each.is_piece:
            continue  # the tensor it is a piece of is there too
        for label, size in zip(each.labels, shape_of(each.tensor), strict=True):
            if label is not None:
                call.sizes.setdefault(label, size)
    with torch._C.DisableTorchFunctionSubclass():
        chosen = choose(call, pg)
        parts = chosen or ()
        cut = Cut(parts, call.sizes, pg.tp_local_rank() if parts else 0, pg.tp_process_group() if parts else None)
        pieces = [piece_of(each, parts, pg) for each in call.operands]
        if parts and parts[0][0] not in call.results[0] and parts[0][0] not in call.own:
            early = [] if call.finish is not None else [piece_of(each, (), pg) for each in call.late]
            found, tree = tree_flatten(call.run(cut, *pieces, *early))
            found, parts = _summed(found, call, cut, pg)
            gather = column = False
        else:
            gather, column = call.gather, not call.gather and _by_column(call, parts)
            late = [piece_of(each, parts, pg) for each in call.late]
            if chosen is None:
                pairs = zip(call.operands, pieces, strict=True)
                call.gathered = [(each.tensor, x) for each, x in pairs if _parts(each)]
            found, tree = tree_flatten(call.run(cut, *pieces, *late))
        made = [
            _made(x, labels, call, parts, pg, coloured, gather) if isinstance(x, Tensor) else x
            for x, labels in zip(found, call.results, strict=True)
        ]
        for x in made if column else ():
            x.compute_spec = ComputeSpec(ComputePattern.TP1D)
    return tree_unflatten(made, tree)


def choose(call: Call, pg: ProcessGroup) -> Parts | None:
    """What is cut: of the ways the operands are cut now, the one that moves least; None when no way will do."""
    found: list[Parts] = []
    sharded = False
    for place, each in enumerate(call.operands):
        have = _parts(each)
        if not have:
            continue
        sharded = True
        parts = tuple((each.labels[dim], count) for dim, count in have)
        if is_legal(call, parts):
            if call.prefer == place:
                return parts
            if parts not in found:
                found.append(parts)
    if not found:
        return None if sharded else ()
    return found[0] if len(found) == 1 else min(found, key=lambda parts: _moved(call, parts, pg.tp_world_size()))


def _parts(each: Operand) -> Parts:
    return each.tensor._parts if is_colo(each.tensor) else ()  # type: ignore[attr-defined]


def _by_column(call: Call, parts: Parts) -> bool:
    """Whether the weight with a compute spec is cut along a dim of the result: column-parallel."""
    if call.prefer is None or not parts:
        return False
    return parts[0][0] in call.operands[call.prefer].labels and parts[0][0] in call.results[0]


def is_legal(call: Call, parts: Parts) -> bool:
    """Whether the operator can run on pieces cut like this."""
    labels = [label for label, _ in parts]
    if any(label is None or label in call.whole for label in labels):
        return False
    if call.legal is not None and not all(call.legal(label, count, call.sizes) for label, count in parts):
        return False
    sides = [each.labels for each in (*call.operands, *call.late)] + list(call.results)
    if len(labels) > 1:
        if any(label in call.own for label in labels):
            return False
        if any(0 < sum(label in side for label in labels) < len(labels) for side in sides):
            return False
    return True


def _moved(call: Call, parts: Parts, world: int) -> float:
    """Bytes a rank moves, forward and backward, in units of (world - 1) / world."""
    total, labels = 0.0, [label for label, _ in parts]
    for each in call.operands:
        x = each.tensor
        size, graded = math.prod(shape_of(each.tensor)) * x.element_size(), wants_grad(x)
        have = x._parts if is_colo(x) else ()  # type: ignore[attr-defined]
        if labels[0] in each.labels:
            same = have == tuple((each.labels.index(label), count) for label, count in parts)
            total += 0 if same else (size * graded if not have else size / world * (1 + graded))
        else:
            total += size * ((1 if have else 0) + graded * (1 if have else 2))
    for result in call.results:
        if labels[0] not in result and labels[0] not in call.own:
            total += 2 * math.prod(call.sizes.get(label, 1) for label in result) * 4
    return total


def piece_of(each: Operand, parts: Parts, pg: ProcessGroup) -> Tensor:
    """The operand as the cut wants it: this rank's piece, or the whole with a gradient that is summed.

    A shard that has to be whole is gathered and its gradient reduce-scattered; a replica's is all-reduced.
    """
    x = each.tensor
    if each.is_piece:
        return x
    if not is_colo(x):
        have, here = (), x
    else:
        if x.process_group is not pg and x.process_group != pg:  # type: ignore[attr-defined]
            x = x.redistribute(ReplicaSpec(), pg)  # type: ignore[attr-defined]
        have, here = x._parts, plain(x)  # type: ignore[attr-defined]
    want = tuple((each.labels.index(label), count) for label, count in parts if label in each.labels)
    if want == have and (want or not parts):
        return here
    group = pg.tp_process_group()
    if want:
        return redistribute(here, Transition(tuple(shape_of(each.tensor)), have, want), group)
    if have:
        shape = tuple(shape_of(each.tensor))
        if parts and len(have) == 1:
            ((dim, count),) = have
            sizes = None if shape[dim] % count == 0 else chunk_sizes(shape[dim], count)
            return mappings.all_gather_dim(here, dim, group, sizes=sizes)
        here = redistribute(here, Transition(shape, have, ()), group)
    return mappings.copy_to_tensor_model_parallel_region(here, group) if parts and wants_grad(here) else here


def _summed(found: list[Any], call: Call, cut: Cut, pg: ProcessGroup) -> tuple[list[Any], Parts]:
    """The sum over the ranks, with what must not be summed after it; and how the result is cut."""
    group, parts = pg.tp_process_group(), ()
    if call.scatter is None:
        summed: list[Any] = []
        while found:  # popped: a temporary that nobody else holds is summed in place
            summed.append(mappings.reduce_from_tensor_model_parallel_region(found.pop(0), group))
        found = summed if call.after is None else [call.after(x) for x in summed]
    else:
        dim, world = call.scatter % found[0].dim(), pg.tp_world_size()
        size = found[0].shape[dim]
        sizes = None if size % world == 0 else chunk_sizes(size, world)
        found = [mappings.reduce_scatter_dim(x, dim, group, sizes=sizes) for x in found]
        parts = ((call.results[0][dim], world),)
    if call.finish is not None:
        late = [piece_of(each, parts, pg) for each in call.late]
        found = [call.finish(x, *late) for x in found]
    return found, parts


def _made(
    x: Tensor, labels: Labels, call: Call, parts: Parts, pg: ProcessGroup, coloured: Sequence[Operand], gather: bool
) -> Any:
    """A result as a ColoTensor, laid out in the words of an operand that is laid out the same."""
    there = tuple((labels.index(label), count) for label, count in parts if label in labels)
    shape = list(x.shape)
    for dim, _ in there:
        shape[dim] = call.result_sizes.get(labels[dim], call.sizes[labels[dim]])
    if there and gather:
        x, there = redistribute(x, Transition(tuple(shape), there, ()), pg.tp_process_group()), ()
    for each in coloured:
        if each.labels == labels and each.tensor._parts == there:  # type: ignore[attr-defined]
            return wrap(x, pg, each.tensor.dist_spec, shape)  # type: ignore[attr-defined]
    return wrap(x, pg, spec_of(there, len(shape)), shape)


def spec_of(parts: Sequence[tuple[int, int]], ndim: int) -> _DistSpec:
    """A spec of these cuts; the last of several dims is written -1."""
    if not parts:
        return ReplicaSpec()
    dims = [-1 if dim == ndim - 1 and ndim > 1 else dim for dim, _ in parts]
    return ShardSpec(dims, [count for _, count in parts])
