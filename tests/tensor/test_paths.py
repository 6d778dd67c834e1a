"""Redistribution on the kernels and in plain torch: the same bits forward and backward, whatever the bits are."""

import math
from typing import Any

import pytest
import torch
from bits import bits, random_bits
from redistributions import dims_of, documented, transitions
from shards import ranks_of, shard_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup

from tritoncomm import record
from tritoncomm.core import ops
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup
from tritoncomm.tensor.dispatch import plain
from tritoncomm.tensor.distspec import _DistSpec

QUICK, SLOW = ("bfloat16", "complex64"), ("float8_e4m3fn", "float32", "int64", "bool")  # of every width
SHAPES = {2: ((4, 6), (2, 5, 4)), 4: ((4, 5, 2),)}


def redistributed(
    full: Tensor, gradient: Tensor, old: _DistSpec, new: _DistSpec, pg: ProcessGroup, path: str
) -> tuple[Tensor, Tensor | None, int]:
    """The new shard, the gradient of the old one, and the bytes copied by the path."""
    rank = pg.tp_local_rank()
    x = ColoTensor(shard_of(full, old, rank).contiguous(), ColoTensorSpec(pg, old), full.shape)
    x.requires_grad_(full.is_floating_point() or full.is_complex())
    with ops.path(path), record.recording() as counted:
        y = plain(x.redistribute(new))
        given = shard_of(gradient, new, rank).contiguous()
        grad = plain(torch.autograd.grad(y, x, given)[0]) if x.requires_grad else None
    return y.detach(), grad, sum(count.bytes_copied for (_, taken), count in counted.items() if taken == path)


def several(old: _DistSpec, new: _DistSpec) -> bool:
    """Sharding along several dims, which uses strided copies instead of kernels."""
    return max(len(getattr(spec, "dims", ())) for spec in (old, new)) > 1


def is_rows(shape: tuple[int, ...], old: _DistSpec, new: _DistSpec) -> bool:
    """A split whose shard is contiguous: a plain copy."""
    return not dims_of(old, len(shape)) and all(math.prod(shape[:dim]) == 1 for dim in dims_of(new, len(shape)))


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("dtype", [*QUICK, *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW)])
def test_paths_agree_bit_for_bit(group: TorchGroup, dtype: str) -> None:
    pg, rank = ranks_of(group), group.rank()
    kind = getattr(torch, dtype)
    for place, (shape, old, new) in enumerate(transitions(group.size(), SHAPES[group.size()])):
        full, gradient = random_bits(shape, kind, 2 * place), random_bits(shape, kind, 2 * place + 1)
        context: Any = (shape, old, new)
        result, result_grad, by_kernels = redistributed(full, gradient, old, new, pg, "triton")
        expected, expected_grad, _ = redistributed(full, gradient, old, new, pg, "torch")
        assert torch.equal(bits(result), bits(expected)), context
        assert torch.equal(bits(expected), bits(shard_of(full, new, rank).contiguous())), context
        assert (result_grad is None) == (expected_grad is None)
        if result_grad is not None and expected_grad is not None:
            assert torch.equal(bits(result_grad), bits(expected_grad)), context
            assert torch.equal(bits(expected_grad), bits(shard_of(gradient, old, rank).contiguous())), context
        if not several(old, new):
            kinds = [(a, b, documented(shape, a, b, rank, group.size())[0]) for a, b in ((old, new), (new, old))]
            kinds = kinds[: 1 + (result_grad is not None)]
            expected_bytes = full.element_size() * sum(count for a, b, count in kinds if not is_rows(shape, a, b))
            assert by_kernels == expected_bytes, (context, by_kernels)
