"""Embeddings."""

import torch.nn.functional as F
from torch import Tensor

from tritoncomm.core.autograd import wants_grad
from tritoncomm.errors import UnsupportedError
from tritoncomm.mappings.tensor_parallel import reduce_from
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.engine import Operand, OperatorCall, Sharding
from tritoncomm.tensor.rules.matmul import by_weight
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


@rule(
    F.embedding,
    accepts="weight Shard(0) (vocabulary) or Shard(1) (columns); any sharding of the ids",
    result="vocabulary: partial, all-reduced; columns: Shard(-1), gathered if the compute spec sets it; ids: same "
    "sharding",
    collectives="vocabulary: all-reduce; ids: all-reduce of the weight's gradient",
)
def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> OperatorCall | None:  # fmt: skip
    """Describe an embedding; of a sharded vocabulary ranks look up their own ids, zeros for the others, and sum."""
    ids = tuple(range(len(shape_of(input))))
    _refuse("embedding", weight, max_norm, sparse)
    if max_norm is not None or sparse:
        return None
    rows = shape_of(weight)[0]
    padding = None if padding_idx is None else padding_idx % rows

    def run(sharding: Sharding, tokens: Tensor, table: Tensor) -> Tensor:
        if not sharding.has("v"):
            return F.embedding(tokens, table, padding, scale_grad_by_freq=scale_grad_by_freq)
        start, size = sharding.shard("v")
        _check_ids(tokens, rows)
        is_local = (tokens >= start) & (tokens < start + size)
        local_padding = None if padding is None or not start <= padding < start + size else padding - start
        local_ids = (tokens - start).masked_fill(~is_local, 0)
        if size:
            vectors = F.embedding(local_ids, table, local_padding)
        else:
            vectors = table.sum(0).expand(*tokens.shape, -1)  # empty shard; keeps the autograd graph
        elsewhere = ~is_local.unsqueeze(-1)
        return reduce_from(vectors.masked_fill(elsewhere, 0), sharding.group, in_place=True)

    # Labels of the weight: v rows of the vocabulary, h columns.
    # The frequency of a row counts all ids; and ids of other ranks are looked up as row 0, which would be counted.
    replicated = frozenset([*ids, "v"] if scale_grad_by_freq else [])
    operands = [Operand(input, ids), Operand(weight, ("v", "h"))]
    return by_weight(OperatorCall(operands, [(*ids, "h")], run, replicated, own=frozenset({"v"})), weight, index=1)


def _check_ids(ids: Tensor, rows: int) -> None:
    """Check on the CPU only, to avoid a synchronization; on a GPU an id out of range gives a row of zeros."""
    if not ids.is_cuda and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
        raise IndexError(f"embedding: ids from {int(ids.min())} to {int(ids.max())}, but the table has {rows} rows")


def _refuse(name: str, weight: Tensor, max_norm: float | None, sparse: bool) -> None:
    """Reject options that a sharded weight does not support; on replicas they run without a rule."""
    if not (is_colo(weight) and weight.partitions):
        return
    if max_norm is not None:
        raise UnsupportedError(f"{name}: max_norm writes into the weight, which is a shard; redistribute it first")
    if sparse and wants_grad(weight):
        raise UnsupportedError(f"{name}: the gradient of a shard is dense: sparse=True is not supported")


@rule(
    F.embedding_bag,
    accepts="weight Shard(1) (columns); 2-D input Shard(0) (bags)",
    result="columns: Shard(-1), gathered if the compute spec sets it; bags: same sharding",
    collectives="bags: all-reduce of the weight's gradient",
)
def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> OperatorCall | None:  # fmt: skip
    """Describe sums, means or maxima of bags of rows; the vocabulary and the ids of a bag must not be sharded."""
    _refuse("embedding_bag", weight, max_norm, sparse)
    if max_norm is not None or sparse:
        return None
    two = len(shape_of(input)) == 2
    # Labels: b bags, l ids of a bag, o offsets of the bags in flat ids; v and h rows and columns of the weight.
    ids = ("b", "l") if two else ("l",)
    extra = [Operand(x, labels) for x, labels in ((offsets, ("o",)), (per_sample_weights, ids)) if x is not None]

    def run(_: Sharding, tokens: Tensor, table: Tensor, *rest: Tensor) -> Tensor:
        remaining = iter(rest)
        bags, weights = (None if x is None else next(remaining) for x in (offsets, per_sample_weights))
        return F.embedding_bag(
            tokens, table, bags, max_norm=None, norm_type=norm_type, scale_grad_by_freq=scale_grad_by_freq, mode=mode,
            sparse=False, per_sample_weights=weights, include_last_offset=include_last_offset, padding_idx=padding_idx,
        )  # fmt: skip

    replicated = {"v", "l", "o"}
    if per_sample_weights is not None:
        replicated |= {"b", "h"}  # their gradient is a sum over the columns
    if scale_grad_by_freq:
        replicated |= {"b"}  # the frequency of a row counts the ids of all bags
    operands = [Operand(input, ids), Operand(weight, ("v", "h")), *extra]
    call = OperatorCall(operands, [("b" if two else "o", "h")], run, frozenset(replicated))
    return by_weight(call, weight, index=1)
