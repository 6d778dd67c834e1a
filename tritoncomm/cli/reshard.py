"""The command `tritoncomm plan reshard`: reads two layouts from text and prints the plan of one rank."""

import math
import re
from dataclasses import asdict
from typing import Any

import numpy as np

from tritoncomm.core.cost import Rates
from tritoncomm.parsing import dtype_name, parse_dtype, parse_ints
from tritoncomm.reshard import Layout, ReshardPlan, reshard_plan

__all__ = ["as_json", "parse_layout", "plan_reshard"]

_AXIS = re.compile(r"(?:S(?P<dim>-?\d+)|R)\*(?P<size>\d+)")
_MAX_RANKS = 4096


def parse_layout(text: str, shape: tuple[int, ...], option: str) -> Layout:
    """Read a layout from text: ``S0*8``, ``R*2,S1*4`` or ``S0*4@8``; ``option`` is named in errors."""
    # The text lists mesh axes: S0*8 shards dim 0 over 8 ranks, R*2 makes 2 replicas. The rank behind @ is the first
    # one.
    axes, _, first = text.replace(" ", "").partition("@")
    matches = [_AXIS.fullmatch(axis) for axis in axes.split(",")]
    has_valid_first = first.isdigit() or "@" not in text
    if not all(matches) or not has_valid_first:
        raise ValueError(
            f"{option} must be axes like S0*8 or R*2,S1*4 (shards of a dim, replicas), and @8 for the first rank, not "
            f"{text!r}"
        )
    sizes = [int(match["size"]) for match in matches if match]
    count, start = math.prod(sizes), int(first or 0)
    if not 1 <= count <= _MAX_RANKS or start + count > _MAX_RANKS:
        raise ValueError(f"{option} {text!r}: one rank or more, and {_MAX_RANKS} at most")
    placements = [None if match["dim"] is None else int(match["dim"]) for match in matches if match]
    return Layout.on_mesh(shape, np.arange(start, start + count).reshape(sizes), placements)


def plan_reshard(shape: str, source: str, target: str, dtype: str, rank: int, bucket_bytes: int) -> ReshardPlan:
    """Return the plan of one tensor between two layouts, given as text, for the global rank ``rank``."""
    sizes, kind = parse_ints(shape, "--shape", 0), parse_dtype(dtype)
    if not source or not target:
        raise ValueError("reshard needs --source and --target, like --source 'S0*8' --target 'R*2,S1*4'")
    layouts = parse_layout(source, sizes, "--source"), parse_layout(target, sizes, "--target")
    ranks = sorted({*layouts[0].ranks, *layouts[1].ranks})
    if rank not in ranks:
        raise ValueError(f"--rank {rank} is in neither layout: ranks {ranks[0]} to {ranks[-1]}")
    return reshard_plan({"tensor": kind}, *layouts, ranks=ranks, rank=rank, bucket_bytes=bucket_bytes)


def as_json(plan: ReshardPlan, rates: Rates) -> dict[str, Any]:
    """Return the numbers of a plan for JSON output, with times predicted at given rates."""
    moved, (local, collective) = plan.transfers, plan.transfers.seconds(rates)
    return {
        "mapping": "reshard",
        "world": len(moved.ranks),
        "rank": moved.ranks[moved.position],
        "dtype": dtype_name(plan.items[0].dtype),
        "buckets": len(moved.buckets),
        "messages": sum(bucket.send.messages for bucket in moved.buckets),
        "launches": moved.launches,
        "local_copies": moved.local_copies,
        "bytes_copied": moved.bytes_copied,
        "bytes_sent": moved.bytes_sent,
        "bytes_received": moved.bytes_received,
        "largest_bucket": moved.largest,
        "all_ranks": {"bytes_sent": int(moved.sent.sum()), "bytes_lacking": int(moved.lacking.sum()),
                      "messages": int(moved.messages.sum())},
        "predicted_seconds": {"local": local, "collective": collective},
        "assumed": asdict(rates),
    }  # fmt: skip
