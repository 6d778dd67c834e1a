"""Two-level exchange: an all-to-all over nodes of equally many ranks, with messages of a node to a node.

Rank (n, l) is local rank l of node n. On the first level it sends to rank (m, l) of each node m the rows for all ranks
of m, which lie together. On the second level rank (m, l) hands the rows out inside its node. Of N nodes of L ranks each
rank sends N + L messages instead of N * L, and its rows move twice. Both levels are all-to-alls over the same group,
in which most ranks send nothing to each other: backends skip empty messages, and connect no ranks for them.
"""

import math
import os
from collections.abc import Sequence
from functools import lru_cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import launchers, variables
from tritoncomm.core import backend
from tritoncomm.core.exchange import Exchange
from tritoncomm.core.memory import contiguous_stride, empty
from tritoncomm.core.ops import SplitPass, contiguous, split_pass
from tritoncomm.core.plan import CollectivePlan, Ints
from tritoncomm.core.validation import ranks_of
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
        places = [rank // per_node for rank in ranks_of(group, name)]
        size = places.count(places[0])
        count, position = len(places) // size, group.rank()
        if places != [place for place in dict.fromkeys(places) for _ in range(size)]:
            raise UnsupportedError(
                f"{name}: a two-level exchange needs a group with equally many ranks on each node, in the order of the "
                f"nodes; with {per_node} ranks per node its ranks are on nodes {places[:16]}"
            )
        return cls(count, size, position // size, position % size)


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
    if variables.NODE.value:
        return variables.NODE.value
    launch = launchers.started_by(os.environ)
    return None if launch is None else launch.local_size


def nodes_of(group: ProcessGroup, name: str) -> int:
    """Return the number of nodes of ``group``; 1 where nobody says how many ranks a node has."""
    per_node = _ranks_per_node()
    return len({rank // per_node for rank in ranks_of(group, name)}) if per_node else 1


def _arriving(in_rows: Ints, nodes: Nodes, group: ProcessGroup, name: str, device: torch.device) -> list[list[int]]:
    """Exchange numbers of rows: ``[n][l]`` is the number that the rank of node n sends through this rank to rank l.

    The rank of node n is the one with this rank's local number, and rank l is on this rank's node.
    """
    sent = torch.tensor(in_rows, dtype=torch.int64, device=device)
    sizes = nodes.across([nodes.size] * nodes.count)
    exchange = Exchange(shapes=((nodes.world,),), send_counts=sizes, recv_counts=sizes)
    received = exchange.start((sent,), group, name, asynchronous=False).received
    # The host waits for the device here.
    return received.view(nodes.count, nodes.size).tolist()


def all_to_all(x: Tensor, planned: CollectivePlan, nodes: Nodes, group: ProcessGroup, span: Span) -> Tensor:
    """Run an exchange of the rows of dim 0 in two levels, end the span of the call, and return what arrives."""
    if planned.send_sizes:
        return _by_sizes(x, planned, nodes, group, span)
    first, second = _even_levels(x.shape, x.itemsize, nodes)
    middle = first.start((x,), group, span.name, asynchronous=False)
    crossed = second.start((middle.received,), group, span.name, asynchronous=False)
    (out,), _, unpacked = second.unpack.results(crossed.received)
    span.end(crossed.path, middle.copied + crossed.copied + unpacked, first.bytes_sent + second.bytes_sent)
    return torch.ops.aten._unsafe_view(out, planned.shape)


@lru_cache(maxsize=256)
def _even_levels(
    shape: Ints, itemsize: int, nodes: Nodes
) -> tuple[Exchange[None, None], Exchange[SplitPass, SplitPass]]:
    """Return the exchanges of equal chunks between nodes and inside of the node."""
    count, size = nodes.count, nodes.size
    chunk = shape[0] // nodes.world
    row = math.prod(shape[1:])
    rows = nodes.across([size * chunk] * count)
    bytes_sent = (count - 1) * size * chunk * row * itemsize
    first = Exchange(shapes=(shape,), send_counts=rows, recv_counts=rows, bytes_sent=bytes_sent)
    # The pack brings [node][local] of the rows in the middle to [local][node], and the unpack brings them back.
    turn = split_pass((count, size, chunk * row), None, 1, size, None)
    counts = nodes.inside([count * chunk * row] * size)
    return first, Exchange(turn, turn, (shape,), counts, counts, (size - 1) * count * chunk * row * itemsize)


def _by_sizes(x: Tensor, planned: CollectivePlan, nodes: Nodes, group: ProcessGroup, span: Span) -> Tensor:
    """Run ``all_to_all`` by split sizes, which may be new in every call."""
    name, count, size = span.name, nodes.count, nodes.size
    out = empty(x, planned.shape, contiguous_stride(planned.shape), x.dtype)
    x, copied = contiguous(x)
    x = backend.carrier(x)
    row, in_rows, out_rows = x.shape[1:], planned.send_sizes, planned.recv_sizes
    counts = _arriving(in_rows, nodes, group, name, x.device)
    # ``ahead`` counts the rows that this rank sends to the rank of each node, for all ranks of that node. ``middle``
    # gets what the ranks of all nodes send through this rank to the ranks of its node: [node][local rank].
    ahead = [sum(in_rows[node * size : (node + 1) * size]) for node in range(count)]
    shape = (sum(map(sum, counts)), *row)
    crossing = nodes.across([sum(rows) for rows in counts])
    first = Exchange(shapes=(shape,), send_counts=nodes.across(ahead), recv_counts=crossing)
    middle = first.start((x,), group, name, asynchronous=False)
    # ``away`` counts the rows that this rank hands to each rank of its own node; ``arriving`` is [local rank][node].
    away = [sum(column) for column in zip(*counts, strict=True)]
    arriving = [list(out_rows[local::size]) for local in range(size)]
    second = Exchange(
        shapes=((planned.shape[0], *row),),
        send_counts=nodes.inside(away),
        recv_counts=nodes.inside([sum(rows) for rows in arriving]),
    )
    turned = _transposed(middle.received, counts)
    received = second.start((turned,), group, name, asynchronous=False).received
    _transposed(received, arriving, backend.carrier(out))
    sent = sum(ahead) - ahead[nodes.node] + sum(away) - away[nodes.local]
    copied += 2 * (turned.nbytes + received.nbytes)
    span.end("torch", copied, sent * math.prod(row) * x.itemsize)
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
