"""Routes of tokens to the ranks of their experts, and lists of a rank's pairs by expert, from ids on the device."""

from collections.abc import Sequence
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tritoncomm_kernels import MAX_IDS, torch_path

from tritoncomm.core.plan import Ints
from tritoncomm.core.rows import RowRoutes, exchange_counts, row_passes
from tritoncomm.errors import ShapeError
from tritoncomm.experts.listed_rows import PairLists, dense_rows

__all__ = ["ExpertLists", "Routing", "find_routes", "sort_pairs"]


class Routing(NamedTuple):
    """A dispatch as its host knows it.

    Attributes:
        routes: None over one rank, where nothing moves.
        rows: number of rows of ``Dispatched``.
        pairs: number of (row, expert) pairs of this rank.
        first, experts: first expert of this rank, and their number.
    """

    routes: RowRoutes | None
    group: ProcessGroup
    rows: int
    pairs: int
    first: int
    experts: int

    @property
    def counts(self) -> Ints:
        """Rows of ``Dispatched`` from each rank."""
        if self.routes is None:
            return (self.rows,)
        rank, recv = self.group.rank(), self.routes.recv_counts
        return *recv[:rank], self.routes.local, *recv[rank + 1 :]


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
        return Routing(routes=None, group=group, rows=tokens, pairs=tokens * k, first=0, experts=num_experts)
    # Of what goes to each rank, and of what comes: rows, further ids of these rows, and two numbers whose sum is that
    # of ids out of range.
    counts = experts.new_empty((2, world, 4), dtype=torch.int64)
    tokens_of_rows, index = _sorts_of(experts).sort_by_owner(dense_rows(experts), local, rank, counts[0])
    exchange_counts(counts, group, name)
    numbers = counts.cpu().numpy()  # the host waits
    rows, further_pairs, *wrong = numbers[1].sum(0).tolist()
    if any(wrong):
        _raise_if_wrong(numbers[1, :, 2:].sum(1).tolist(), num_experts, group, name)
    kept = int(numbers[0, rank, 0])
    numbers[:, rank, 0] = 0  # rows that stay are not sent
    send, recv = (tuple(line.tolist()) for line in numbers[:, :, 0])
    routes = RowRoutes(send, recv, kept, tokens_of_rows[: sum(send) + kept], index)
    return Routing(routes, group, rows, pairs=rows + further_pairs, first=rank * local, experts=local)


def sort_pairs(ids: Tensor, routing: Routing, alignment: int) -> ExpertLists:
    """Sort the pairs of rows and experts of this rank by expert.

    Args:
        ids: ``[rows, k]``, from 0 to the number of all experts.
        alignment: number of which each expert's rows are a multiple, with padding.
    """
    number, pairs = routing.experts, routing.pairs
    # The host knows a bound only: every expert with rows may need ``alignment - 1`` more.
    total = (pairs + min(number, pairs) * (alignment - 1)) // alignment * alignment
    ids = dense_rows(ids)
    limits = routing.first, number, number * routing.group.size()
    sort = _sorts_of(ids).sort_by_bucket(ids, *limits, total, alignment)
    return ExpertLists(PairLists(sort.pairs, sort.lines, sort.index), sort.counts)


def _sorts_of(ids: Tensor) -> ModuleType:
    """Return the module that sorts these ids: kernels, or torch's path, which has no limit of slots."""
    return torch_path if ids.shape[1] > MAX_IDS else row_passes(ids).kernels


def _raise_if_wrong(counts: Sequence[int], num_experts: int, group: ProcessGroup, name: str) -> None:
    """Raise if a rank, in the order of the group, has ids out of range."""
    if any(counts):
        ranks = dist.get_process_group_ranks(group)
        wrong = ", ".join([f"rank {rank} has {count}" for rank, count in zip(ranks, counts, strict=True) if count])
        raise ShapeError(f"{name}: experts must be from 0 to {num_experts - 1}; {wrong} that are not")
