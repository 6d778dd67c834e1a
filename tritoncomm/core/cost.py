"""Predicted time of collectives and local passes by an alpha-beta model; its figures are assumed, never measured here.

Local passes: ``bytes read and written / memory``. Collectives: ``steps * latency + bytes / bandwidth``, with

- ``world - 1`` steps for an all-gather and a reduce-scatter (a ring), twice as many for an all-reduce, one for an
  all-to-all (all peers at once);
- inside a node every rank sends at ``link``. Across nodes a ring is laid through all network ports of a node and runs
  at the smaller of ``link`` and ``node * network``. Bytes of an all-to-all that leave the node go out at ``network``.
"""

import textwrap
from dataclasses import dataclass

__all__ = ["DEFAULTS", "Rates", "collective_seconds", "pass_seconds"]


@dataclass(frozen=True, slots=True)
class Rates:
    """Assumed rates of a machine.

    Attributes:
        latency: seconds per step of a collective.
        link: bytes per second that one rank sends inside its node.
        network: bytes per second that one rank sends to other nodes.
        memory: bytes per second of a copy, read plus written.
        node: number of ranks in a node.
        source: origin of the figures, in words.
    """

    latency: float
    link: float
    network: float
    memory: float
    node: int
    source: str

    def __str__(self) -> str:
        """Return the rates as indented lines of at most 80 columns."""
        text = (
            f"at {self.latency * 1e6:g} us per step, {self.link / 1e9:g} GB/s per link, {self.network / 1e9:g} GB/s to "
            f"other nodes of {self.node} rank{'s' * (self.node > 1)}, copies at {self.memory / 1e9:g} GB/s "
            f"({self.source}, unless given)"
        )
        return textwrap.fill(text, 80, initial_indent="  ", subsequent_indent="  ")


DEFAULTS = {
    "cuda": Rates(5e-6, 350e9, 50e9, 4000e9, 8, "published figures of an H200 node: NVLink as NCCL uses it, 400 Gb/s"),
    "cpu": Rates(50e-6, 1e9, 1e9, 10e9, 8, "round numbers for Gloo between processes of one machine"),
}
_STEPS = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2}


def pass_seconds(bytes_copied: int, rates: Rates) -> float:
    """Return the predicted seconds of a local pass that reads plus writes ``bytes_copied`` bytes."""
    return bytes_copied / rates.memory


def collective_seconds(kind: str, bytes_sent: int, world: int, rates: Rates, bytes_received: int = 0) -> float:
    """Return the predicted seconds of a collective; ranks of a node are neighbours in the group.

    Args:
        kind: ``all-gather``, ``reduce-scatter``, ``all-reduce`` or ``all-to-all``.
        bytes_sent, bytes_received: bytes of one rank, to and from all others together.

    Example:
        7 GB all-gathered over 8 ranks with ``link`` 350e9 and no latency take 0.02 s.
    """
    if world == 1:
        return 0.0
    # Of the bytes sent and the bytes received the larger number takes the time.
    busiest = max(bytes_sent, bytes_received)
    if kind == "all-to-all":
        outside = busiest * max(world - rates.node, 0) // (world - 1)
        return rates.latency + max((busiest - outside) / rates.link, outside / rates.network)
    # A ring enters and leaves each node once, by the network ports of all its ranks.
    bandwidth = rates.link if world <= rates.node else min(rates.link, rates.node * rates.network)
    return _STEPS[kind] * (world - 1) * rates.latency + busiest / bandwidth
