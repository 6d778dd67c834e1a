"""Sharding rules of operators: one row each, over one engine."""

from tritoncomm.tensor.rules import (
    attention,
    cross_entropy,
    embedding,
    foreach,
    indexing,
    matmul,
    normalization,
    random_ops,
    reductions,
    views,
)

__all__ = [
    "attention",
    "cross_entropy",
    "embedding",
    "foreach",
    "indexing",
    "matmul",
    "normalization",
    "random_ops",
    "reductions",
    "views",
]
