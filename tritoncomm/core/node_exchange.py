"""Two-level exchange: an all-to-all over nodes of equally many ranks, with messages of a node to a node.

Rank (n, l) is local rank l of node n. On the first level it sends to rank (m, l) of each node m the rows for all ranks
of m, which lie together. On the second level rank (m, l) hands the rows out inside its node. Of N nodes of L ranks each
rank sends N + L messages instead of N * L, and its rows move twice. Both levels are all-to-alls over the same group,
in which most ranks send nothing to each other: backends skip empty messages, and connect no ranks for them.
"""

import math
import os
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import launchers, variables
from tritoncomm.core import backend, exchange
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.ops import SplitPass, contiguous, split_pass
from tritoncomm.core.plan import CollectivePlan, Ints
from tritoncomm.core.validation import PerGroup, ranks_of
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.record import Span

__all__ = ["Levels", "Nodes", "all_to_all", "chosen", "nodes_of"]

Levels = Literal["flat", "node"]
"""Ways of an exchange: from rank to rank, or in two levels."""


class Nodes(NamedTuple):
    """Nodes of a group: rank ``node * size + local`` of the group is local rank ``local`` of node ``node``.

    Attributes:
        count: number of nodes.
        size: ranks of the group on each node.
        node, local: node of this rank, and its number there, from 0.
    """

    count: int
    size: int
    node: int
    local: int

    @property
    def world(self) -> int:
        """Number of ranks of the group."""
        return self.count * self.size

    def across(self, counts: Sequence[int]) -> Ints:
        """Spread one count per node over the group: each for the rank of that node with this rank's local number."""
        spread = [0] * self.world
        spread[self.local :: self.size] = counts
        return tuple(spread)

    def inside(self, counts: Sequence[int]) -> Ints:
        """Spread one count per rank of this rank's node over the group."""
        spread = [0] * self.world
        spread[self.node * self.size : (self.node + 1) * self.size] = counts
        return tuple(spread)

    @classmethod
    def of(cls, group: ProcessGroup, name: str) -> "Nodes":
        """Return the nodes of ``group``, of as many ranks as ``TRITONCOMM_NODE`` or the launcher says."""
        per_node = _ranks_per_node()
        if not per_node:
            raise ArgumentError(
                f"{name}: the launcher does not say how many ranks a node has; set {variables.NODE.name}"
            )
        nodes = _placement_of(group, per_node, name).nodes
        if nodes is None:
            places = [rank // per_node for rank in ranks_of(group, name)]
            raise UnsupportedError(
                f"{name}: a two-level exchange needs a group with equally many ranks on each node, in the order of the "
                f"nodes; with {per_node} ranks per node its ranks are on nodes {places[:16]}"
            )
        return nodes


class _Placement(NamedTuple):
    """Number of nodes of a group with so many ranks on each node of the job; its ``Nodes``, None if they are uneven."""

    per_node: int
    count: int
    nodes: Nodes | None


_placements: PerGroup[_Placement] = PerGroup()


def _placement_of(group: ProcessGroup, per_node: int, name: str) -> _Placement:
    """Return the placement of ``group``, which takes 40 us to find for 1,024 ranks, from the cache."""
    placement = _placements.get(group)
    if placement is None or placement.per_node != per_node:
        places = [rank // per_node for rank in ranks_of(group, name)]
        distinct = list(dict.fromkeys(places))
        count, size, position = len(distinct), len(places) // len(distinct), group.rank()
        is_even = places == [node for node in distinct for _ in range(size)]
        nodes = Nodes(count, size, position // size, position % size) if is_even else None
        placement = _placements.set(group, _Placement(per_node, count, nodes))
    return placement


def chosen(levels: str, group: ProcessGroup, name: str) -> Nodes | None:
    """Return the nodes for an exchange in two levels, or None for a flat one. All ranks come to the same answer."""
    if levels not in ("flat", "node"):
        raise ArgumentError(f"{name}: exchange must be 'flat' or 'node', not {levels!r:.80}")
    if levels == "flat":
        return None
    nodes = Nodes.of(group, name)
    return None if nodes.count == 1 or nodes.size == 1 else nodes


def _ranks_per_node() -> int | None:
    """Return what ``TRITONCOMM_NODE`` or the launcher says; None if neither does."""
    return variables.NODE.value or _launched_per_node()


@cache
def _launched_per_node() -> int | None:
    """Return what the launcher says, whose variables are read once: they take 10 us."""
    launch = launchers.started_by(os.environ)
    return None if launch is None else launch.local_size


def nodes_of(group: ProcessGroup, name: str) -> int:
    """Return the number of nodes of ``group``; 1 where nobody says how many ranks a node has."""
    per_node = _ranks_per_node()
    return _placement_of(group, per_node, name).count if per_node else 1


def _arriving(in_rows: Ints, nodes: Nodes, group: ProcessGroup, name: str, device: torch.device) -> list[list[int]]:
    """Exchange numbers of rows: ``[n][l]`` is the number that the rank of node n sends through this rank to rank l.

    The rank of node n is the one with this rank's local number, and rank l is on this rank's node.
    """
    send_counts = torch.tensor(in_rows, dtype=torch.int64, device=device)
    sizes = nodes.across([nodes.size] * nodes.count)
    recv_counts = exchange.all_to_all(send_counts, sizes, sizes, group, name).recv_wire
    # The host waits for the device here.
    return recv_counts.view(nodes.count, nodes.size).tolist()


def all_to_all(x: Tensor, planned: CollectivePlan, nodes: Nodes, group: ProcessGroup, span: Span) -> Tensor:
    """Run an exchange of the rows of dim 0 in two levels, end the span of the call, and return what arrives."""
    if planned.send_sizes:
        return _by_sizes(x, planned, nodes, group, span)
    plan = _even_levels(x.shape, x.itemsize, nodes)
    x, copied = contiguous(x)
    middle = exchange.all_to_all(x, plan.rows, plan.rows, group, span.name)
    crossed = plan.inside.start((middle.recv_wire,), group, span.name, asynchronous=False)
    results = plan.inside.unpack.results(crossed.recv_wire)
    span.end(crossed.path, copied + crossed.copied + results.copied, plan.bytes_between + plan.inside.bytes_sent)
    return torch.ops.aten._unsafe_view(results.tensors[0], planned.shape)


class _EvenLevels(NamedTuple):
    """Exchanges of equal chunks: rows of dim 0 to each rank on the first level, and its bytes; the second level."""

    rows: Ints
    bytes_between: int
    inside: Exchange[SplitPass, SplitPass]


@lru_cache(maxsize=256)
def _even_levels(shape: Ints, itemsize: int, nodes: Nodes) -> _EvenLevels:
    """Return the exchanges of equal chunks between nodes and inside of the node."""
    count, size = nodes.count, nodes.size
    chunk = shape[0] // nodes.world
    row = math.prod(shape[1:])
    rows = nodes.across([size * chunk] * count)
    # The pack brings [node][local] of the rows in the middle to [local][node], and the unpack brings them back.
    turn = split_pass((count, size, chunk * row), dim=1, world=size)
    counts = nodes.inside([count * chunk * row] * size)
    inside = Exchange(turn, turn, counts, counts, (size - 1) * count * chunk * row * itemsize, shapes=(shape,))
    return _EvenLevels(rows, (count - 1) * size * chunk * row * itemsize, inside)


def _by_sizes(x: Tensor, planned: CollectivePlan, nodes: Nodes, group: ProcessGroup, span: Span) -> Tensor:
    """Run ``all_to_all`` by split sizes, which may be new in every call."""
    name, count, size = span.name, nodes.count, nodes.size
    out = empty(x, planned.shape, contiguous_stride(planned.shape), x.dtype)
    x, copied = contiguous(x)
    x = backend.carrier(x)
    row, in_rows, out_rows = x.shape[1:], planned.send_sizes, planned.recv_sizes
    counts = _arriving(in_rows, nodes, group, name, x.device)
    # First, to the rank of each node with this local rank: the rows for all ranks of that node. ``middle`` has what
    # arrives from all nodes, for the ranks of this node: [node][local rank].
    rows_to_node = [sum(in_rows[node * size : (node + 1) * size]) for node in range(count)]
    crossing = nodes.across([sum(rows) for rows in counts])
    middle = exchange.all_to_all(x, nodes.across(rows_to_node), crossing, group, name)
    # Then, to each rank of this node: its rows from all nodes. ``from_nodes`` counts what arrives: [local rank][node].
    rows_to_local = [sum(column) for column in zip(*counts, strict=True)]
    from_nodes = [list(out_rows[local::size]) for local in range(size)]
    turned = _transposed(middle.recv_wire, counts)
    del middle
    in_node = nodes.inside([sum(rows) for rows in from_nodes])
    in_node_wire = exchange.all_to_all(turned, nodes.inside(rows_to_local), in_node, group, name).recv_wire
    _transposed(in_node_wire, from_nodes, backend.carrier(out))
    rows_sent = sum(rows_to_node) - rows_to_node[nodes.node] + sum(rows_to_local) - rows_to_local[nodes.local]
    copied += 2 * (turned.nbytes + in_node_wire.nbytes)
    span.end("torch", copied, rows_sent * math.prod(row) * x.itemsize)
    return out


def _transposed(x: Tensor, rows: list[list[int]], out: Tensor | None = None) -> Tensor:
    """Transpose blocks of dim 0: block (i, j), of ``rows[i][j]`` rows, moves from row-major to column-major order.

    Example:
        rows ``[[1, 2], [3, 0]]`` bring ``[a, b, b, c, c, c]`` to ``[a, c, c, c, b, b]``.
    """
    width = len(rows[0])
    blocks = x.split([count for row in rows for count in row])
    ordered = [block for j in range(width) for block in blocks[j::width]]
    return torch.cat(ordered, out=out) if out is not None else torch.cat(ordered)
