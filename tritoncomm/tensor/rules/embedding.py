"""Embeddings."""

import torch.nn.functional as F
from torch import Tensor

from tritoncomm import mappings
from tritoncomm.errors import UnsupportedError
from tritoncomm.tensor.layout import is_colo, shape_of
from tritoncomm.tensor.rules.call import Call, Cut, Operand
from tritoncomm.tensor.rules.matmul import by_weight
from tritoncomm.tensor.rules.table import rule

__all__: list[str] = []


@rule(
    F.embedding,
    accepts="weight cut in dim 0 (vocabulary) or dim 1 (columns); ids cut in any dim",
    result="vocabulary: a replica; columns: Shard(-1), gathered where the compute spec says so; ids: the cut",
    collectives="vocabulary: all-reduce; ids: all-reduce of the weight's gradient",
)
def _embedding(
    input: Tensor, weight: Tensor, padding_idx: int | None = None, max_norm: float | None = None,
    norm_type: float = 2.0, scale_grad_by_freq: bool = False, sparse: bool = False,
) -> Call | None:  # fmt: skip
    ids = tuple(range(len(shape_of(input))))
    _refuse_renormalising("embedding", weight, max_norm)
    if max_norm is not None or sparse:
        return None
    rows = shape_of(weight)[0]
    padding = None if padding_idx is None else padding_idx % rows

    def run(cut: Cut, found: Tensor, table: Tensor) -> Tensor:
        if not cut.has("v"):
            return F.embedding(found, table, padding, scale_grad_by_freq=scale_grad_by_freq)
        assert cut.group is not None
        start, size = cut.piece("v")
        _check_ids(found, rows)
        here = (found >= start) & (found < start + size)
        own = None if padding is None or not start <= padding < start + size else padding - start
        local = (found - start).masked_fill(~here, 0)
        if not size:
            rows_here = table.sum(0).expand(*found.shape, -1)  # nothing of the table is here, but its graph is
        else:
            rows_here = F.embedding(local, table, own, scale_grad_by_freq=scale_grad_by_freq)
        elsewhere = ~here.unsqueeze(-1)
        return mappings.reduce_from_tensor_model_parallel_region(rows_here.masked_fill(elsewhere, 0), cut.group)

    whole = frozenset(ids) if scale_grad_by_freq else frozenset()
    if scale_grad_by_freq:  # the ids that a rank masks would be counted
        whole |= {"v"}
    operands = [Operand(input, ids), Operand(weight, ("v", "h"))]
    return by_weight(Call(operands, [(*ids, "h")], run, whole, frozenset({"v"})), weight, 1)


def _check_ids(ids: Tensor, rows: int) -> None:
    """On the CPU, where looking costs nothing; on a GPU an id out of range gives a row of zeros."""
    if not ids.is_cuda and ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < rows):
        raise IndexError(f"embedding: ids from {int(ids.min())} to {int(ids.max())}, but the table has {rows} rows")


def _refuse_renormalising(name: str, weight: Tensor, max_norm: float | None) -> None:
    if max_norm is not None and is_colo(weight) and weight._parts:  # type: ignore[attr-defined]
        raise UnsupportedError(f"{name}: max_norm writes into the weight, which is a shard; redistribute it first")


@rule(
    F.embedding_bag,
    accepts="weight cut in dim 1 (columns); bags of a 2-D input cut in dim 0",
    result="columns: Shard(-1), gathered where the compute spec says so; bags: the cut",
    collectives="bags: all-reduce of the weight's gradient",
)
def _embedding_bag(
    input: Tensor, weight: Tensor, offsets: Tensor | None = None, max_norm: float | None = None,
    norm_type: float = 2, scale_grad_by_freq: bool = False, mode: str = "mean", sparse: bool = False,
    per_sample_weights: Tensor | None = None, include_last_offset: bool = False, padding_idx: int | None = None,
) -> Call | None:  # fmt: skip
    _refuse_renormalising("embedding_bag", weight, max_norm)
    if max_norm is not None or sparse:
        return None
    two = len(shape_of(input)) == 2
    ids = ("b", "l") if two else ("l",)
    extra = [Operand(x, labels) for x, labels in ((offsets, ("o",)), (per_sample_weights, ids)) if x is not None]

    def run(_: Cut, found: Tensor, table: Tensor, *rest: Tensor) -> Tensor:
        more = list(rest)
        bags = more.pop(0) if offsets is not None else None
        weights = more.pop(0) if per_sample_weights is not None else None
        return F.embedding_bag(
            found, table, bags, None, norm_type, scale_grad_by_freq, mode, False, weights, include_last_offset,
            padding_idx,
        )  # fmt: skip

    whole = {"v", "l", "o"} | ({"b", "h"} if per_sample_weights is not None else set())
    if scale_grad_by_freq:
        whole |= {"b"}
    operands = [Operand(input, ids), Operand(weight, ("v", "h")), *extra]
    call = Call(operands, [("b" if two else "o", "h")], run, frozenset(whole))
    return by_weight(call, weight, 1)
