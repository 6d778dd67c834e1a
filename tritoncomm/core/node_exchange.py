"""Two-level exchange: an all-to-all over nodes of equally many ranks, with messages of a node to a node.

Rank (n, l) is local rank l of node n. On the first level it sends to rank (m, l) of each node m the rows for all ranks
of m, which lie together. On the second level rank (m, l) hands the rows out inside its node. Of N nodes of L ranks each
rank sends N + L messages instead of N * L, and its rows move twice. Both levels are all-to-alls over the same group,
in which most ranks send nothing to each other: backends skip empty messages, and connect no ranks for them.
"""

import os
from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import launchers, variables
from tritoncomm.core import backend, ops
from tritoncomm.core.memory import empty_on
from tritoncomm.core.plan import Ints
from tritoncomm.core.validation import ranks_of
from tritoncomm.errors import ArgumentError, UnsupportedError
from tritoncomm.record import CopyPath

__all__ = ["Levels", "Nodes", "all_to_all", "chosen", "nodes_of", "row_counts"]

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


def row_counts(in_rows: Ints, nodes: Nodes, group: ProcessGroup, name: str, device: torch.device) -> list[list[int]]:
    """Exchange numbers of rows: ``[n][l]`` is the number that the rank of node n sends through this rank to rank l.

    The rank of node n is the one with this rank's local number, and rank l is on this rank's node.
    """
    sent = torch.tensor(in_rows, dtype=torch.int64, device=device)
    received = empty_on(device, (nodes.count, nodes.size), torch.int64)
    sizes = nodes.across([nodes.size] * nodes.count)
    backend.all_to_all(received.view(-1), sent, sizes, sizes, group, name)
    # The host waits for the device here.
    return received.tolist()


def all_to_all(
    out: Tensor,
    x: Tensor,
    out_rows: Ints,
    in_rows: Ints,
    nodes: Nodes,
    group: ProcessGroup,
    name: str,
    counts: list[list[int]] | None = None,
) -> tuple[CopyPath, int, int]:
    """Send chunk w of ``x`` to rank w in two levels, and receive the ranks' chunks into ``out``, in rank order.

    Returns the path of the local passes, the bytes copied, and the bytes sent to other ranks. ``out_rows`` and
    ``in_rows`` are rows of dim 0 per rank, empty for equal chunks; ``counts`` are the ``row_counts`` of ``in_rows``.
    """
    if x.dtype in backend.special:
        out, x = backend.carrier(out), backend.carrier(x)
    count, size = nodes.count, nodes.size
    row_bytes = x[:1].nbytes
    if not in_rows:
        chunk = x.shape[0] // nodes.world
        across = nodes.across([size * chunk] * count)
        # Equal chunks need no counts. The first pass brings [node][local] of the arrived rows to [local][node], and the
        # second one back.
        middle = x.new_empty(x.shape)
        backend.all_to_all(middle, x, across, across, group, name)
        shape = (count, size * chunk, *x.shape[1:])
        packed, path, copied = ops.pack(middle.view(shape), dim=1, world=size)
        inside = nodes.inside([count * chunk] * size)
        backend.all_to_all(middle, packed.reshape(x.shape), inside, inside, group, name)
        _, _, copied_back = ops.unpack(middle, shape, dim=1, world=size, out=out.view(shape))
        sent = ((count - 1) * size + (size - 1) * count) * chunk * row_bytes
        return path, copied + copied_back, sent
    if counts is None:
        counts = row_counts(in_rows, nodes, group, name, x.device)
    # ``ahead`` counts the rows that this rank sends to the rank of each node, for all ranks of that node.
    ahead = [sum(in_rows[node * size : (node + 1) * size]) for node in range(count)]
    # ``middle`` gets what the ranks of all nodes send through this rank to the ranks of its node: [node][local rank].
    middle = x.new_empty((sum(map(sum, counts)), *x.shape[1:]))
    backend.all_to_all(middle, x, nodes.across([sum(row) for row in counts]), nodes.across(ahead), group, name)
    packed = _transposed(middle, counts)
    # ``away`` counts the rows that this rank hands to each rank of its own node.
    away = [sum(column) for column in zip(*counts, strict=True)]
    arriving = [list(out_rows[local::size]) for local in range(size)]  # [local rank][node]
    inside = nodes.inside([sum(rows) for rows in arriving])
    received = x.new_empty(out.shape)
    backend.all_to_all(received, packed, inside, nodes.inside(away), group, name)
    _transposed(received, arriving, out)
    sent = sum(ahead) - ahead[nodes.node] + sum(away) - away[nodes.local]
    return "torch", 2 * (middle.nbytes + received.nbytes), sent * row_bytes


def _transposed(x: Tensor, rows: list[list[int]], out: Tensor | None = None) -> Tensor:
    """Transpose blocks of dim 0: block (i, j), of ``rows[i][j]`` rows, moves from row-major to column-major order.

    Example:
        rows ``[[1, 2], [3, 0]]`` bring ``[a, b, b, c, c, c]`` to ``[a, c, c, c, b, b]``.
    """
    width = len(rows[0])
    blocks = x.split([count for row in rows for count in row])
    ordered = [block for j in range(width) for block in blocks[j::width]]
    return torch.cat(ordered, out=out) if out is not None else torch.cat(ordered)
