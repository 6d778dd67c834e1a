"""Samples of several providers as one row: quantiles, ratios of ours to each peer, and how much the ratios vary."""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

__all__ = ["figures", "geometric_mean", "quantile", "spread"]

GROUPS = 10


def quantile(samples: Sequence[float], q: float) -> float:
    """Return the sample that a share ``q`` of all samples does not exceed."""
    ordered = sorted(samples)
    return ordered[min(int(q * len(ordered)), len(ordered) - 1)]


def spread(ours: Sequence[float], theirs: Sequence[float], groups: int = GROUPS) -> float:
    """Return p80 - p20 of the ratios of groups of neighbouring rounds."""
    size = max(1, len(ours) // groups)
    starts = range(0, len(ours) - size + 1, size)
    ratios = [quantile(ours[i : i + size], 0.2) / quantile(theirs[i : i + size], 0.2) for i in starts]
    return quantile(ratios, 0.8) - quantile(ratios, 0.2)


def figures(
    row: str, samples: Mapping[str, Sequence[float]], uncompared: Collection[str] = (), **more: Any
) -> dict[str, Any]:
    """Return one row of a results file: ``us`` of each provider, ``ratio`` and ``spread`` to every peer.

    A ratio is ours at p20 over the peer's at p20. Providers in ``uncompared`` get none.
    """
    ours = samples["ours"]
    us = {
        name: {key: round(quantile(times, q), 3) for key, q in (("p20", 0.2), ("median", 0.5), ("p80", 0.8))}
        for name, times in samples.items()
    }
    peers = {name: times for name, times in samples.items() if name not in ("ours", *uncompared)}
    ratio = {name: round(quantile(ours, 0.2) / quantile(times, 0.2), 3) for name, times in peers.items()}
    wander = {name: round(spread(ours, times), 3) for name, times in peers.items()}
    return {"row": row, "us": us, "ratio": ratio, "spread": wander, **more}


def geometric_mean(ratios: Sequence[float]) -> float:
    """Return the geometric mean."""
    return math.exp(sum(math.log(ratio) for ratio in ratios) / len(ratios))
