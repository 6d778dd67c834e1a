"""Scaled dot-product attention."""

from contextlib import nullcontext
from typing import Any

import torch.nn.functional as F
from torch import Tensor

from tritoncomm.core.plan import chunk_sizes
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding, broadcast_labels
from tritoncomm.tensor.rules.random_ops import agreed_seed, seeded_shard
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


@rule(
    F.scaled_dot_product_attention,
    accepts="Shard(batch dim or heads), the same for query, key and value; Shard(query positions) unless causal",
    collectives="query positions: all-reduce of the gradients of key and value",
)  # fmt: skip
def _attention(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, scale: float | None = None, enable_gqa: bool = False,
) -> OperatorCall | None:  # fmt: skip
    """Describe attention over local heads, batches or queries; broadcast batch dims run on replicas (None)."""
    shapes = [shape_of(x) for x in (query, key, value)]
    count = len(shapes[0]) - 2
    if count < 0 or any(len(shape) != count + 2 for shape in shapes):
        return None
    batch = tuple(range(count))
    if any(shape[:count] != shapes[0][:count] for shape in shapes[1:]) and not enable_gqa:
        return None  # batch dims are broadcast
    kv_heads = shapes[1][count - 1] if count else 1
    grouped = count - 1 if enable_gqa else None  # the dim of heads, of which the query may have more than key and value

    def legal(label: Any, shards: int, sizes: dict[Any, int]) -> bool:
        if not chunk_sizes(sizes[label], shards)[-1]:
            return False  # torch records no graph for empty inputs, so this rank would skip collectives of backward
        if grouped is None or label != grouped:
            return True
        return sizes[label] % shards == 0 and kv_heads % shards == 0

    # Labels of the last dims: l positions of queries, s of keys; e features of queries and keys, v of values.
    operands = [
        Operand(query, (*batch, "l", "e")),
        Operand(key, (*batch, "s", "e")),
        Operand(value, (*batch, "s", "v")),
    ]
    if attn_mask is not None:
        score_shape = (*shapes[0][:-1], shapes[1][-2])
        operands.append(Operand(attn_mask, broadcast_labels(shape_of(attn_mask), score_shape, (*batch, "l", "s"))))
    pg = next(each.tensor.process_group for each in operands if is_colo(each.tensor))
    seed = agreed_seed(pg, query) if dropout_p else 0

    def run(sharding: Sharding, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        with seeded_shard(seed, sharding, q.device) if dropout_p else nullcontext():
            return F.scaled_dot_product_attention(
                q, k, v, mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )

    replicated = frozenset({"s", "e", "v"} | ({"l"} if is_causal else set()))
    return OperatorCall(operands, [(*batch, "l", "v")], run, replicated, legal=legal, grouped=grouped)
