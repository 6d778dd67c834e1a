"""Routes of tokens to the ranks of their experts, and lists of a rank's pairs by expert, from ids on the device."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.core.ops import dense
from tritoncomm.core.plan import Ints
from tritoncomm.core.rows import RowRoutes, exchange_counts
from tritoncomm.errors import ShapeError
from tritoncomm.experts.listed_rows import PairLists

__all__ = ["ExpertLists", "Routing", "find_routes", "sort_pairs"]


class Routing(NamedTuple):
    """A dispatch as its host knows it.

    Attributes:
        routes: None over one rank, where nothing moves.
        counts: rows of ``Dispatched`` from each rank.
        pairs: number of (row, expert) pairs of this rank.
        first, experts: first expert of this rank, and their number.
    """

    routes: RowRoutes | None
    group: ProcessGroup
    counts: Ints
    pairs: int
    first: int
    experts: int


class _SentRows(NamedTuple):
    """Rows that this rank sends, before the ranks know each other's numbers.

    Attributes:
        order: ``[tokens*k]``, slots of all tokens sorted by the rank that the row goes to; first those of wrong ids,
            last those whose rank another slot of the token has.
        counts: ``[2, world, 4]``, of what goes to each rank, and memory for what comes from it: rows; other slots of
            that rank; wrong ids, as two addends.
        ramp: ``[tokens*k or more]``, 0, 1, 2 ...
    """

    order: Tensor
    counts: Tensor
    ramp: Tensor


class ExpertLists(NamedTuple):
    """Pairs sorted by expert.

    Attributes:
        counts: ``[experts of this rank]``, pairs of each, padding included.
    """

    lists: PairLists
    counts: Tensor


def find_routes(experts: Tensor, num_experts: int, group: ProcessGroup, name: str) -> Routing:
    """Find the rows for each rank, exchange their numbers, and wait for these on the host.

    Raises:
        ShapeError: on every rank, ids out of range.
    """
    world, rank, (tokens, k) = group.size(), group.rank(), experts.shape
    local = num_experts // world
    if world == 1:
        wrong = experts.clamp(0, num_experts - 1).ne(experts).sum()
        _raise_if_wrong([int(wrong)], num_experts, group, name)
        return Routing(None, group, (tokens,), tokens * k, 0, local)
    rows = _sort_rows(experts, local, world)
    exchange_counts(rows.counts, group, name)
    sent, arriving = rows.counts.tolist()  # the host waits
    _raise_if_wrong([first + second for *_, first, second in arriving], num_experts, group, name)
    counts = tuple([count for count, *_ in arriving])
    routes = _plan_routes(rows, [count for count, *_ in sent], counts, rank, experts.shape)
    pairs = sum([count + beside for count, beside, *_ in arriving])
    return Routing(routes, group, counts, pairs, rank * local, local)


def _sort_rows(experts: Tensor, local: int, world: int) -> _SentRows:
    """Sort the rows of each token by the ranks that they go to.

    Args:
        experts: ``[tokens, k]``, of which each rank has ``local``.

    Example:
        Two ranks of two experts, tokens of the experts (2, 0) and (2, 3): keys (1, 2) and (2, 2 + 3), as 0 is a wrong
        id, and 3 more a rank that occurs twice. One row to rank 0, two to rank 1: order 0, 1, 2, 3, and counts of rows
        1, 2 with 0, 1 slots beside them.
    """
    edges = torch.arange(0, (world + 1) * local, local, dtype=experts.dtype, device=experts.device)
    keys = torch.bucketize(dense(experts), edges, right=True).remainder_(world + 1).sort(1).values
    before, behind = keys[:, :-1], keys[:, 1:]
    behind.add_(before == behind, alpha=world + 1)
    if keys.shape[1] > world:
        keys = keys.sort(1).values  # so that the first slots of a token have all of its ranks
    keys, order = keys.view(-1).sort(stable=True)
    ramp = torch.arange(max(keys.shape[0], 2 * world + 3), device=keys.device)
    sizes = torch.searchsorted(keys, ramp[: 2 * world + 3]).diff()
    wrong, rows, again, beside = sizes.split_with_sizes((1, world, 1, world))
    counts = sizes.new_empty(2, world, 4)
    torch.stack([rows, beside, wrong.expand(world), again.expand(world)], 1, out=counts[0])
    return _SentRows(order, counts, ramp)


def _plan_routes(rows: _SentRows, send: list[int], recv: Ints, rank: int, shape: Ints) -> RowRoutes:
    """Return the routes once the host knows the rows to and from each rank."""
    # Where the keys are sorted, this rank's rows are between those of others; in a buffer they are the last.
    order, start, total, local, (tokens, k) = rows.order, sum(send[:rank]), sum(send), send[rank], shape
    if 0 < local < total - start:
        sizes = start, local, total - start - local, order.shape[0] - total
        first, kept, last, rest = order.split_with_sizes(sizes)
        order = torch.cat([first, last, kept, rest])
    index = torch.empty_like(order).scatter_(0, order, rows.ramp[: order.shape[0]]).view(tokens, k)
    if k > len(recv):  # no token has more rows than that
        index = index[:, : len(recv)].contiguous()
    tokens_of_rows = torch.div(order[:total], k, rounding_mode="floor")
    others = tuple([0 if w == rank else count for w, count in enumerate(send)])
    arriving = tuple([0 if w == rank else count for w, count in enumerate(recv)])
    return RowRoutes(others, arriving, local, tokens_of_rows, index)


def sort_pairs(ids: Tensor, routing: Routing, alignment: int) -> ExpertLists:
    """Sort the pairs of rows and experts of this rank by expert.

    Args:
        ids: ``[rows, slots]``, from 0 to the number of all experts.
        alignment: number of which each expert's rows are a multiple, with padding.
    """
    (rows, slots), number, total = ids.shape, routing.experts, routing.experts * routing.group.size()
    # Experts of this rank come first. Modulo the number of all, those of other ranks come behind them.
    keys, order = torch.sub(ids, routing.first).remainder_(total).reshape(-1).sort(stable=True)
    ramp = torch.arange(max(order.shape[0], number + 1), device=keys.device, dtype=keys.dtype)
    bounds, places = torch.searchsorted(keys, ramp[: number + 1]), ramp[: order.shape[0]]
    counts, pairs = bounds.diff(), order[: routing.pairs]
    if alignment == 1:
        index = ids.new_empty(order.shape).scatter_(0, order, places)
    else:
        padded = torch.div(counts + (alignment - 1), alignment, rounding_mode="floor") * alignment
        # The host knows a bound only: every expert with rows may need ``alignment - 1`` more.
        longest = (routing.pairs + min(number, routing.pairs) * (alignment - 1)) // alignment * alignment
        shift = padded.cumsum(0) - padded - bounds[:-1]
        places = places[: routing.pairs] + shift[keys[: routing.pairs].long()]
        index = order.new_full(order.shape, -1).scatter_(0, pairs, places)
        pairs, counts = order.new_full((longest,), -1).scatter_(0, places, pairs), padded
    lists = PairLists(pairs, torch.div(pairs, slots, rounding_mode="floor"), index.view(rows, slots))
    return ExpertLists(lists, counts)


def _raise_if_wrong(counts: Sequence[int], num_experts: int, group: ProcessGroup, name: str) -> None:
    """Raise if a rank, in the order of the group, has ids out of range."""
    if any(counts):
        ranks = dist.get_process_group_ranks(group)
        wrong = ", ".join([f"rank {rank} has {count}" for rank, count in zip(ranks, counts, strict=True) if count])
        raise ShapeError(f"{name}: experts must be from 0 to {num_experts - 1}; {wrong} that are not")
