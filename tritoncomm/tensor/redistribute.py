"""Redistribution as a case table: the collective from one placement to another, forward and backward.

| from \\ to | Replicate() | Shard, one dim | Shard, several dims |
|---|---|---|---|
| Replicate() | - | split | split |
| Shard, one dim | all-gather | all-to-all (none for the same dim) | all-to-all |
| Shard, several dims | all-gather | all-to-all | all-to-all (none for the same dims) |

A split keeps this rank's shard. Split and all-gather are each other's adjoint: a replicated tensor has the same
gradient on every rank, so nothing is summed. Dims that do not divide are split like ``torch.chunk``. An all-to-all
sends to every rank the intersection of its new shard with the sender's old one; of several dims ``reshard`` sends it.
"""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.core import eager, ops
from tritoncomm.core.autograd import direct, without_graph
from tritoncomm.core.call import compare_arguments
from tritoncomm.core.plan import Ints, padded_size
from tritoncomm.errors import PeerError, ShapeError
from tritoncomm.reshard import Layout, reshard
from tritoncomm.tensor.distspec import Parts, local_shape, shard_of, uneven_sizes
from tritoncomm.tensor.layout import plain, shares_storage

__all__ = ["Transition", "check_partitions", "layout_over", "layouts", "redistribute", "steps", "unchanged"]


@dataclass(frozen=True, slots=True)
class Transition:
    """Change from one sharding of a tensor to another, over the same ranks.

    Attributes:
        old: (dim, number of shards) of every sharded dim before; empty for a replica.
        new: (dim, number of shards) of every sharded dim afterwards; empty for a replica.
    """

    shape: tuple[int, ...]
    old: Parts
    new: Parts = ()

    def reversed(self) -> "Transition":
        """Return the reverse transition, by which gradients travel."""
        return Transition(self.shape, self.new, self.old)


def steps(old: Parts, new: Parts) -> tuple[str, ...]:
    """Return the steps from ``old`` to ``new``: split, all_gather or all_to_all."""
    if old == new:
        return ()
    if not old:
        return ("split",)
    return ("all_to_all",) if new else ("all_gather",)


def check_partitions(parts: Parts, world: int, name: str) -> None:
    """Check that there are as many shards as ranks."""
    count = math.prod(shards for _, shards in parts)
    if parts and count != world:
        raise ShapeError(f"{name}: {count} shards need {count} tensor-parallel ranks, not {world}")


def unchanged(x: Tensor) -> Tensor:
    """Return the input itself as a result, detached if grad mode is off."""
    return x if torch.is_grad_enabled() else without_graph(x)


def redistribute(x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
    """Redistribute the local tensor ``x`` by the case table; ``unchanged(x)`` if the layouts are equal."""
    if not steps(transition.old, transition.new):
        return unchanged(x)
    x = x if type(x) is Tensor else plain(x)
    if x.requires_grad and torch.is_grad_enabled():
        return _Redistribute.apply(x, transition, group)
    return _run(x, transition, group, "redistribute")


@direct
class _Redistribute(torch.autograd.Function):
    """Forward: the transition. Backward: the reverse transition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
        ctx.transition, ctx.group = transition, group
        return _run(x, transition, group, "redistribute")

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        grad_output, back = plain(grad_output), ctx.transition.reversed()
        if grad_output.requires_grad:
            return _Redistribute.apply(grad_output, back, ctx.group), None, None
        return _run(grad_output, back, ctx.group, "redistribute.backward"), None, None


def _run(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """Run the steps of a transition on the local tensor; the error of a missing rank says which ranks have to call."""
    compare_arguments(name, group, old_dims=transition.old, new_dims=transition.new)
    for step in steps(transition.old, transition.new):
        try:
            x = _STEPS[step](x, transition, group, name)
        except PeerError as error:
            ranks, cause = dist.get_process_group_ranks(group), error.__cause__ or error
            raise PeerError(
                f"{name}: the {step} of {list(transition.shape)} over ranks {ranks} failed: "
                f"{cause}. All of these ranks have to call it. That includes every operator that "
                "gathers a shard: numpy(), tolist(), iteration, those without a rule; a rank that calls one alone "
                "waits for the others"
            ) from cause
    return x


def _split(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """Copy this rank's shard of a replica; the result is never a view."""
    # Every rank has the replica, so nothing is sent.
    span = record.begin(name, "split", group, x, (transition.new, None))
    shard = shard_of(x, transition.new, group.rank())
    if shard.is_contiguous() or not shard.numel():
        span.end("torch", 2 * shard.nbytes, 0)
        return shard.clone(memory_format=torch.contiguous_format)
    out = shard.new_empty(shard.shape)
    # Packing for one rank is a copy into contiguous memory.
    _, path, bytes_copied = ops.pack(shard, dim=0, world=1, out=out.view(1, 1, -1))
    span.end(path, bytes_copied, 0)
    return out


def _all_gather(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """Gather the global tensor from the shards of all ranks."""
    shape, parts, world = transition.shape, transition.old, group.size()
    if len(parts) == 1:
        ((dim, count),) = parts
        return eager.all_gather(x, dim, group, name, uneven_sizes(shape[dim], count))
    shapes = [local_shape(shape, parts, rank) for rank in range(world)]
    counts = tuple(math.prod(each) for each in shapes)
    sent, copied, padded = x.reshape(-1), 0, padded_size(counts)  # 0 where a gather by sizes is cheaper
    if sent.numel() < padded:
        # Padded here, so that one pass puts the shards in place: the gather by sizes would make a second.
        sent, copied = x.new_empty(padded), 2 * x.nbytes
        sent[: x.numel()].copy_(x.reshape(-1))
    wire = eager.all_gather(sent, 0, group, name, None if padded else counts)
    started = record.now()
    # The wire has the shards in rank order, each flattened; of several dims no reshape puts them in place.
    out = x.new_empty(shape)
    for rank, block in enumerate(wire.split(padded or counts)):
        shard_of(out, parts, rank).copy_(block[: counts[rank]].view(shapes[rank]))
    # More bytes of the call that the all-gather above has counted already.
    record.add(name, "torch", bytes_copied=copied + 2 * out.nbytes, bytes_sent=0, started=started, calls=0)
    return out


def _all_to_all(x: Tensor, transition: Transition, group: ProcessGroup, name: str) -> Tensor:
    """Split the new dims, concatenate along the old ones."""
    shape, (old, world), (new, _) = transition.shape, transition.old[0], transition.new[0]
    if len(transition.old) > 1 or len(transition.new) > 1:
        return _reshard(x, transition, group)
    scatter_sizes, gather_sizes = uneven_sizes(shape[new], world), uneven_sizes(shape[old], world)
    return eager.all_to_all(x, new, old, group, name, scatter_sizes=scatter_sizes, gather_sizes=gather_sizes)


def _reshard(x: Tensor, transition: Transition, group: ProcessGroup) -> Tensor:
    """Exchange the blocks of shards along several dims; the result is new memory."""
    result = reshard(x.detach(), *layouts(transition, tuple(dist.get_process_group_ranks(group))), group=group)
    return result.clone() if shares_storage(result, x) else result


@lru_cache(maxsize=4096)  # a layout takes as long as the exchange of a small tensor
def layouts(transition: Transition, ranks: Ints) -> tuple[Layout, Layout]:
    """Return the layouts before and after a transition, as ``reshard`` takes them."""
    return layout_over(transition.shape, transition.old, ranks), layout_over(transition.shape, transition.new, ranks)


def layout_over(shape: Ints, parts: Parts, ranks: Ints) -> Layout:
    """Return ``reshard``'s layout of shards over ranks; where there are several times as many, replicas of each."""
    grid = torch.tensor(ranks, device="cpu").view(-1, *[count for _, count in parts])
    return Layout.on_mesh(shape, grid, [None, *[dim for dim, _ in parts]])


_STEPS = {"split": _split, "all_gather": _all_gather, "all_to_all": _all_to_all}
