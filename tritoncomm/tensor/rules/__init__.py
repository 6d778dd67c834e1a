"""Sharding rules of operators: one row each, over one engine."""

from tritoncomm.tensor.rules import (
    attention,
    extremes,
    foreach,
    joins,
    lookup,
    loss,
    matmul,
    noise,
    norms,
    reductions,
    shapes,
    softmax,
    views,
)

__all__ = [
    "attention",
    "extremes",
    "foreach",
    "joins",
    "lookup",
    "loss",
    "matmul",
    "noise",
    "norms",
    "reductions",
    "shapes",
    "softmax",
    "views",
]
