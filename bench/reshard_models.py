"""Resharding of real models, planned without hardware: trainer layouts to inference layouts, counted.

Every row plans the full parameter list of a model in bf16, from ``pipeline x expert x tensor`` parallel training to
tensor- and data-parallel inference. Messages and bytes are those of all ranks together; "lacking" is what target
ranks do not have themselves, the least that any method sends. Beside them, for the same tensors:

- the point-to-point operations that megatron-core's resharding planner makes (its own functions, if installed; else
  the same formula), of all ranks and of the rank with most;
- bytes of Megatron's M2N service (Megatron-LM#6712), which gives every pair of a source and a target rank a slot of
  the bytes of the largest pair: for the plan as one batch, and for batches of 32 parameters (Megatron-LM#7189);
- bytes if every target rank receives full tensors, as by a broadcast or through a replica of DTensor.

Times of the exchange are projections from assumed figures, not measurements; the plan time is measured here.

    PYTHONPATH=.:kernels python bench/reshard_models.py            # the table of docs/reshard.md
"""

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from bench.kept import keep
from tritoncomm.core.cost import DEFAULTS
from tritoncomm.reshard.api import BUCKET_BYTES
from tritoncomm.reshard.layout import Layout
from tritoncomm.reshard.plan import Item
from tritoncomm.reshard.planner import plan_transfers

__all__ = ["CASES", "Case", "items_of", "m2n_bytes", "megatron_operations", "row"]

BATCH = 32
"""Parameters of a batch in Megatron's resharding by default, since Megatron-LM#7189."""


@dataclass(frozen=True)
class Weight:
    """A parameter: its shape, the dim that tensor parallelism shards, its layer; experts are stacked in dim 0."""

    name: str
    shape: tuple[int, ...]
    dim: int | None
    layer: int
    is_expert: bool = False


def llama_70b() -> Iterator[Weight]:
    """Llama-3-70B: 80 layers, hidden size 8192, 64 heads, 8 key-value heads, MLP 28672, vocabulary 128256."""
    yield Weight("embed", (128256, 8192), 0, 0)
    for layer in range(80):
        for name, shape, dim in (
            ("q", (8192, 8192), 0), ("k", (1024, 8192), 0), ("v", (1024, 8192), 0), ("o", (8192, 8192), 1),
            ("gate", (28672, 8192), 0), ("up", (28672, 8192), 0), ("down", (8192, 28672), 1),
            ("norm1", (8192,), None), ("norm2", (8192,), None),
        ):  # fmt: skip
            yield Weight(f"{layer}.{name}", shape, dim, layer)
    yield Weight("norm", (8192,), None, 79)
    yield Weight("head", (128256, 8192), 0, 79)


def deepseek_v3() -> Iterator[Weight]:
    """DeepSeek-V3: 61 layers, hidden size 7168, latent attention, 3 dense MLPs of 18432, then 256 experts of 2048."""
    yield Weight("embed", (129280, 7168), 0, 0)
    for layer in range(61):
        for name, shape, dim in (
            ("q_a", (1536, 7168), None), ("q_b", (24576, 1536), 0), ("kv_a", (576, 7168), None),
            ("kv_b", (32768, 512), 0), ("o", (7168, 16384), 1), ("norm1", (7168,), None), ("norm2", (7168,), None),
            ("q_norm", (1536,), None), ("kv_norm", (512,), None),
        ):  # fmt: skip
            yield Weight(f"{layer}.{name}", shape, dim, layer)
        width = 18432 if layer < 3 else 2048  # of the dense MLP, or of the shared expert
        for name in ("gate", "up"):
            yield Weight(f"{layer}.{name}", (width, 7168), 0, layer)
        yield Weight(f"{layer}.down", (7168, width), 1, layer)
        if layer >= 3:
            yield Weight(f"{layer}.router", (256, 7168), None, layer)
            yield Weight(f"{layer}.experts.gate", (256, 2048, 7168), 1, layer, True)
            yield Weight(f"{layer}.experts.up", (256, 2048, 7168), 1, layer, True)
            yield Weight(f"{layer}.experts.down", (256, 7168, 2048), 2, layer, True)
    yield Weight("norm", (7168,), None, 60)
    yield Weight("head", (129280, 7168), 0, 60)


@dataclass(frozen=True)
class Case:
    """A model, its trainer ``tensor x pipeline x expert`` on so many ranks, and inference on these or on others."""

    model: str
    ranks: int
    tensor: int
    pipeline: int
    expert: int
    target_ranks: int
    target_tensor: int
    apart: bool

    @property
    def world(self) -> int:
        """Ranks of both."""
        return self.ranks + self.target_ranks if self.apart else max(self.ranks, self.target_ranks)

    def __str__(self) -> str:
        expert = f" EP{self.expert}" if self.expert > 1 else ""
        where = "other ranks" if self.apart else "same ranks"
        trainer = f"TP{self.tensor} PP{self.pipeline}{expert} on {self.ranks}"
        data = self.target_ranks // self.target_tensor
        return f"{self.model} {trainer} to TP{self.target_tensor} DP{data}, {where}"


CASES = (
    Case("Llama-3-70B", 8, 8, 1, 1, 8, 4, False),
    Case("Llama-3-70B", 16, 4, 4, 1, 8, 8, True),
    Case("Llama-3-70B", 64, 8, 4, 1, 64, 4, False),
    Case("Llama-3-70B", 128, 8, 8, 1, 128, 8, True),
    Case("DeepSeek-V3", 64, 1, 8, 8, 64, 32, False),
    Case("DeepSeek-V3", 256, 1, 16, 16, 256, 32, False),
    Case("DeepSeek-V3", 128, 2, 8, 8, 128, 32, True),
)
_COLUMNS = (
    "model and layouts", "tensors", "messages", "GB sent", "GB lacking", "largest rank GB", "launches per rank",
    "plan s", "at 50 GB/s, s", "Megatron operations", "of one rank", "Megatron's M2N GB", "by 32 parameters GB",
    "full tensors GB",
)  # fmt: skip
_MODELS = {"Llama-3-70B": (llama_70b, 80), "DeepSeek-V3": (deepseek_v3, 61)}


def items_of(case: Case, divisor: int = 1) -> list[Item]:
    """Every parameter with both layouts; ranks count tensor, then expert or data, then pipeline slowest.

    Args:
        case: of the table.
        divisor: of every dim but that of the experts, for the same plan of less memory.
    """
    weights, layers = _MODELS[case.model]
    data = case.ranks // (case.pipeline * case.tensor)
    trainer = np.arange(case.ranks).reshape(case.pipeline, data // case.expert, case.expert, case.tensor)
    first = case.ranks if case.apart else 0
    inference = np.arange(first, first + case.target_ranks).reshape(-1, case.target_tensor)
    items = []
    for weight in weights():
        stage = weight.layer * case.pipeline // layers
        kept = 1 if weight.is_expert else 0
        shape = (*weight.shape[:kept], *(-(-size // divisor) for size in weight.shape[kept:]))
        source = Layout.on_mesh(shape, trainer[stage], [None, 0 if weight.is_expert else None, weight.dim])
        target = Layout.on_mesh(shape, inference, [None, weight.dim])
        items.append(Item(weight.name, source, target, torch.bfloat16, torch.bfloat16))
    return items


def megatron_operations(case: Case) -> int:
    """Operations that megatron-core plans for one target rank; every target rank has as many.

    A sharded weight takes ``source / gcd(source, target)`` tiles of the least common multiple, another one operation;
    an expert is a weight of its own.
    """
    weights, _ = _MODELS[case.model]
    tiles = case.tensor // math.gcd(case.tensor, case.target_tensor)
    sharded = case.tensor > 1 or case.target_tensor > 1
    counts = ((w.shape[0] if w.is_expert else 1) * (tiles if sharded and w.dim is not None else 1) for w in weights())
    return sum(counts)


def planned_by_megatron(case: Case) -> int | None:
    """The same by megatron-core's own functions; None if it is not installed."""
    try:
        from megatron.core.resharding.planner import _build_descriptors_for_param, _plan_multi_dim_lcm
        from megatron.core.resharding.utils import ParameterMetadata
    except ImportError:
        return None
    total, target = 0, list(range(case.target_tensor))
    for weight in _MODELS[case.model][0]():
        count, shape, dim = 1, weight.shape, weight.dim
        if weight.is_expert:
            count, shape = shape[0], shape[1:]
            dim = None if dim is None else dim - 1
        if dim is None:
            total += count
            continue
        sides = []
        for ranks in (list(range(case.tensor)), target):
            local = tuple(size // len(ranks) if axis == dim else size for axis, size in enumerate(shape))
            sides.append(ParameterMetadata(weight.name, local, torch.bfloat16, 2, len(ranks) > 1, dim,
                                           tensor_parallel_group_ranks=ranks))  # fmt: skip
        described = _build_descriptors_for_param(*sides)
        total += count * (len(_plan_multi_dim_lcm(weight.name, *sides, described, 0)) if described else 1)
    return total


def m2n_bytes(case: Case, batch: int | None = None) -> int | None:
    """Bytes of Megatron's M2N service: per batch, source ranks times target ranks times bytes of the largest pair.

    Its planner takes every tensor from the first replica of its owners, and a tensor that tensor ranks replicate from
    the one at the target rank modulo their number. An expert is a parameter of its own. None where a rank is on both
    sides, which the service refuses.

    Args:
        case: of the table.
        batch: parameters of a batch, in the model's order; all of them by default.
    """
    if not case.apart:
        return None
    weights, layers = _MODELS[case.model]
    sources = np.arange(case.ranks).reshape(case.pipeline, -1, case.expert, case.tensor)[:, 0]
    pairs = np.zeros((case.ranks, case.target_ranks), np.int64)
    total = count = 0
    for weight in weights():
        stage, copies = weight.layer * case.pipeline // layers, weight.shape[0] if weight.is_expert else 1
        shape = weight.shape[1:] if weight.is_expert else weight.shape
        moved = _between_ranks(2 * math.prod(shape), weight.dim is not None, case)
        for copy in range(copies):
            if count == batch:
                total += int(pairs.max())
                pairs[:] = count = 0
            pairs[sources[stage, copy * case.expert // copies]] += moved
            count += 1
    return (total + int(pairs.max())) * case.ranks * case.target_ranks


def _between_ranks(size: int, is_sharded: bool, case: Case) -> np.ndarray:
    """Bytes of a parameter from every tensor rank of its owners to every target rank."""
    ranks, targets = np.arange(case.tensor)[:, None], np.arange(case.target_ranks)[None]
    if not is_sharded:
        return np.where((case.ranks + targets) % case.tensor == ranks, size, 0)
    source, target = size // case.tensor, size // case.target_tensor
    low = np.maximum(ranks * source, targets % case.target_tensor * target)
    high = np.minimum((ranks + 1) * source, (targets % case.target_tensor + 1) * target)
    return np.clip(high - low, 0, None)


def row(case: Case) -> dict[str, Any]:
    """Counts of one case."""
    items = items_of(case)
    ranks, moved, seconds, launches = tuple(range(case.world)), None, [], []
    for position in (0, case.world - 1):
        started = time.perf_counter()
        moved = plan_transfers(items, ranks, position, BUCKET_BYTES)
        seconds.append(time.perf_counter() - started)
        launches.append(moved.launches)
    assert moved is not None
    full = sum(math.prod(item.source.shape) * item.dtype.itemsize for item in items) * case.target_ranks
    operations = megatron_operations(case)
    assert planned_by_megatron(case) in (None, operations)
    largest = max(int(moved.sent.max()), int(moved.received.max()))
    return {
        "tensors": len(items),
        "messages": int(moved.messages.sum()),
        "sent": int(moved.sent.sum()),
        "lacking": int(moved.lacking.sum()),
        "largest": largest,
        "launches": max(launches),
        "plan_seconds": max(seconds),
        "projected": moved.critical / DEFAULTS["cuda"].network,
        "operations": operations,
        "all_operations": operations * case.target_ranks,
        "m2n": m2n_bytes(case),
        "m2n_batches": m2n_bytes(case, BATCH),
        "full": full,
    }


def main() -> None:
    """Print the table, and keep it."""
    table = [f"| {' | '.join(_COLUMNS)} |", "|---|" + "---:|" * (len(_COLUMNS) - 1)]
    print(*table, sep="\n")
    for case in CASES:
        r = row(case)
        cells = [
            *(f"{r[name]:,}" for name in ("tensors", "messages")),
            *(f"{r[name] / 1e9:,.1f}" for name in ("sent", "lacking", "largest")),
            f"{r['launches']:,}",
            *(f"{r[name]:.2f}" for name in ("plan_seconds", "projected")),
            *(f"{r[name]:,}" for name in ("all_operations", "operations")),
            *("refused" if r[name] is None else f"{r[name] / 1e9:,.0f}" for name in ("m2n", "m2n_batches", "full")),
        ]
        table.append(f"| {case} | {' | '.join(cells)} |")
        print(table[-1], flush=True)
    keep("reshard_models", table)


if __name__ == "__main__":
    main()
