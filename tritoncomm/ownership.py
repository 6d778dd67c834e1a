"""Whether anybody but the caller can see a tensor's memory, so that a collective may write into it.

A tensor is ours alone when it is contiguous, no leaf that wants a gradient, and nothing else holds the Python object,
the tensor or its storage. How many references "nothing else" means depends on the Python and torch versions: it is
measured once, on a tensor that is held elsewhere and on one that is not; where the two look the same, the answer is no.
"""

import sys
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

__all__ = ["gradient_is_ours", "temporary_is_ours"]

Counts = tuple[int, int, int]


def _use_count(x: Tensor) -> int:
    return x._use_count()  # pyright: ignore[reportAttributeAccessIssue]


def _storage_count(x: Tensor) -> int:
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)  # pyright: ignore[reportAttributeAccessIssue]


def _may_be_written(x: Tensor) -> bool:
    return x.is_contiguous() and not (x.requires_grad and x.is_leaf) and not x.is_neg() and not x.is_conj()


def _probe(x: Tensor, _: Any = None) -> Counts:
    """Called like a mapping: what the references to its first argument look like."""
    return sys.getrefcount(x), _use_count(x), _storage_count(x)


@lru_cache(maxsize=1)
def _temporary_counts() -> Counts | None:
    held = torch.empty(1)
    alone, shared = _probe(torch.empty(1)), _probe(held)
    return alone if alone[0] < shared[0] else None


def temporary_is_ours(x: Tensor, references: int) -> bool:
    """Whether ``x``, an argument with ``sys.getrefcount`` of ``references``, is a temporary nobody else can see."""
    counts = _temporary_counts()
    if counts is None or references > counts[0] or not _may_be_written(x):
        return False
    return _use_count(x) <= counts[1] and _storage_count(x) <= counts[2]


class _Gradient(torch.autograd.Function):
    """Identity that reports the references to the gradient it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[Counts]) -> Tensor:
        ctx.seen = seen
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> Any:
        ctx.seen.append(
            (
                sys.getrefcount(grad_output),
                _use_count(grad_output),
                _storage_count(grad_output),
            )
        )
        return grad_output, None


@lru_cache(maxsize=1)
def _gradient_counts() -> Counts | None:
    seen: list[Counts] = []
    kept: list[Tensor] = []
    with torch.enable_grad():
        for hold in (False, True):
            x = torch.ones(1, requires_grad=True)
            y = _Gradient.apply(x, seen)
            if hold:
                y.register_hook(kept.append)
            (y * 2).backward(torch.ones(1))
    alone, shared = seen
    return alone if alone[0] < shared[0] else None


def measure() -> None:
    """Take the measurement now (a mapping's forward does, so that no backward has to)."""
    _gradient_counts()


def gradient_is_ours(grad: Tensor, references: int) -> bool:
    """Whether ``grad``, handed to ``backward`` with ``sys.getrefcount`` of ``references``, is held nowhere else."""
    counts = _gradient_counts()
    if counts is None or references > counts[0] or not _may_be_written(grad):
        return False
    return _use_count(grad) <= counts[1] and _storage_count(grad) <= counts[2]
