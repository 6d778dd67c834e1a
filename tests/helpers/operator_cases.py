"""Every operator with a rule: operands, layouts, and the check against plain torch."""

import itertools
import math
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from shards import ranks_of, shard_of
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.utils._pytree import tree_leaves

from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.distspec import _DistSpec, partitions
from tritoncomm.tensor.layout import plain

__all__ = [
    "CASES",
    "IDS",
    "TARGETS",
    "TOLERANCE",
    "Make",
    "case",
    "check",
    "close",
    "layouts_of",
    "made",
    "run_case",
    "run_under_autocast",
]

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-12}
LOW_TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3}


Make = Callable[..., Any]


IDS = torch.tensor([[0, 3, 7, 7], [5, 1, 2, 6]])


TARGETS = torch.tensor([1, 6, -100, 3, 0, 5])


def case(function: Make, *operands: Any) -> tuple[Make, tuple[Any, ...]]:
    """An operator and its operands: shapes of random tensors, or tensors."""
    return function, operands


CASES: dict[str, tuple[Make, tuple[Any, ...]]] = {
    "linear": case(F.linear, (4, 8), (6, 8), (6,)),
    "linear no bias": case(F.linear, (2, 4, 6), (8, 6)),
    "linear of a vector": case(F.linear, (8,), (4, 8), (4,)),
    "addmm": case(lambda a, b, c: torch.addmm(a, b, c, beta=0.5, alpha=2), (4, 6), (4, 8), (8, 6)),
    "addmm broadcast": case(lambda a, b, c: torch.addmm(a, b, c), (6,), (4, 8), (8, 6)),
    "matmul": case(torch.matmul, (4, 8), (8, 6)),
    "matmul broadcast": case(lambda a, b: a @ b, (4, 1, 2, 4), (3, 4, 5)),
    "matmul vectors": case(torch.matmul, (8,), (8,)),
    "matmul vector": case(torch.matmul, (3, 4, 8), (8,)),
    "bmm": case(torch.bmm, (4, 3, 5), (4, 5, 6)),
    "mm ragged": case(torch.mm, (5, 7), (7, 3)),
    "embedding": case(lambda w: F.embedding(IDS, w), (8, 4)),
    "embedding padding": case(lambda w: F.embedding(IDS, w, padding_idx=7), (8, 4)),
    "embedding ragged": case(lambda w: F.embedding(IDS, w), (9, 5)),
    "embedding ids": case(F.embedding, IDS, (8, 4)),
    "embedding_bag": case(lambda w: F.embedding_bag(IDS, w, mode="sum"), (8, 4)),
    "embedding_bag ids": case(F.embedding_bag, IDS, (8, 4)),
    "layer_norm": case(lambda x, w, b: F.layer_norm(x, (6,), w, b), (4, 2, 6), (6,), (6,)),
    "layer_norm plain": case(lambda x: F.layer_norm(x, (2, 6)), (4, 2, 6)),
    "rms_norm": case(lambda x, w: F.rms_norm(x, (6,), w), (4, 6), (6,)),
    "batch_norm": case(lambda x, w, b: F.batch_norm(x, None, None, w, b, True), (4, 6), (6,), (6,)),
    "batch_norm eval": case(
        lambda x, w, b: F.batch_norm(x, torch.zeros(6, dtype=x.dtype), torch.full((6,), 2, dtype=x.dtype), w, b),
        (4, 6, 2), (6,), (6,),
    ),
    "softmax": case(lambda x: F.softmax(x, -1), (4, 6)),
    "softmax dtype": case(lambda x: torch.softmax(x, 0, torch.float64), (4, 6)),
    "log_softmax": case(lambda x: F.log_softmax(x, 1), (4, 9)),
    "log_softmax ragged": case(lambda x: x.log_softmax(0), (5, 2)),
    "sum": case(torch.sum, (4, 6)),
    "sum dim": case(lambda x: x.sum(1), (4, 6, 2)),
    "sum dims kept": case(lambda x: x.sum((0, 2), keepdim=True), (5, 3, 4)),
    "mean": case(torch.mean, (5, 6)),
    "mean dim": case(lambda x: x.mean(-1), (4, 6)),
    "amax": case(lambda x: torch.amax(x, 1), (4, 6)),
    "amin all": case(lambda x: x.amin((0, 1)), (4, 3)),
    "max": case(lambda x: x.max(), (4, 6)),
    "max dim": case(lambda x: x.max(1), (4, 6)),
    "min dim kept": case(lambda x: torch.min(x, 0, keepdim=True), (5, 3)),
    "max of ties": case(lambda x: (x > 0).to(x.dtype).max(0).indices, (8, 3)),
    "argmax": case(lambda x: x.argmax(1), (4, 6)),
    "argmax vector": case(torch.argmax, (9,)),
    "argmax vector kept": case(lambda x: torch.argmax(x, keepdim=True), (9,)),
    "argmin": case(lambda x: torch.argmin(x, 0, keepdim=True), (4, 6)),
    "all": case(lambda x: (x > -1).all(1), (4, 6)),
    "all of no dims": case(lambda x: torch.all(x > -1, dim=()), (4, 6)),
    "any of no dims": case(lambda x: (x > 1).any([]), (5, 3)),
    "any": case(lambda x: torch.any(x > 1), (4, 6)),
    "count_nonzero": case(lambda x: torch.count_nonzero(x > 0, 1), (4, 6)),
    "norm": case(torch.norm, (4, 6)),
    "norm 1": case(lambda x: x.norm(1, 0), (4, 6)),
    "vector_norm inf": case(lambda x: torch.linalg.vector_norm(x, float("inf"), dim=-1), (4, 6)),
    "vector_norm -1": case(lambda x: torch.linalg.vector_norm(x, -1), (1, 6)),
    "vector_norm -inf": case(lambda x: torch.linalg.vector_norm(x, -math.inf, 0), (1, 6)),
    "vector_norm 3": case(lambda x: torch.linalg.vector_norm(x, 3), (5, 6)),
    "transpose": case(lambda x: x.transpose(0, 2), (4, 3, 2)),
    "t": case(torch.t, (4, 6)),
    "T": case(lambda x: x.T, (4, 6)),
    "mT": case(lambda x: x.mT, (2, 4, 6)),
    "permute": case(lambda x: x.permute(2, 0, 1), (4, 3, 2)),
    "movedim": case(lambda x: torch.movedim(x, 0, -1), (4, 3, 2)),
    "view": case(lambda x: x.view(4, 12), (4, 2, 6)),
    "view merge first": case(lambda x: x.reshape(8, -1), (4, 2, 6)),
    "view part last": case(lambda x: x.view(4, 4, 3), (4, 12)),
    "view part first": case(lambda x: x.reshape(2, 4, 3), (8, 3)),
    "view ragged": case(lambda x: x.view(5, 6), (5, 2, 3)),
    "view_as": case(lambda x: x.view_as(torch.empty(4, 12)), (4, 2, 6)),
    "flatten": case(lambda x: torch.flatten(x, 1), (4, 2, 6)),
    "unflatten": case(lambda x: x.unflatten(1, (4, -1)), (3, 8)),
    "squeeze": case(lambda x: x.squeeze(1), (4, 1, 6)),
    "unsqueeze": case(lambda x: x.unsqueeze(-2), (4, 6)),
    "expand": case(lambda x: x.expand(3, 4, 6), (4, 6)),
    "expand keyword": case(lambda x: x.expand(size=(3, 4, 6)), (4, 6)),
    "expand_as": case(lambda x: x.expand_as(torch.empty(3, 4, 6)), (4, 6)),
    "expand_as keyword": case(lambda x: x.expand_as(other=torch.empty(3, 4, 6)), (4, 6)),
    "view_as keyword": case(lambda x: x.view_as(other=torch.empty(4, 12)), (4, 2, 6)),
    "expand size 1": case(lambda x: x.expand(4, 6), (4, 1)),
    "cat": case(lambda a, b: torch.cat([a, b], 1), (4, 6), (4, 2)),
    "stack": case(lambda a, b: torch.stack([a, b], 1), (4, 6), (4, 6)),
    "split": case(lambda x: x.split(4, 1), (4, 6)),
    "split sizes": case(lambda x: torch.split(x, [1, 3], 0), (4, 6)),
    "chunk": case(lambda x: torch.chunk(x, 3, -1), (4, 7)),
    "unbind": case(lambda x: x.unbind(0), (2, 4, 6)),
    "index": case(lambda x: x[1, :, None, 2:], (3, 4, 6)),
    "index dots": case(lambda x: x[..., 0], (3, 4, 6)),
    "narrow": case(lambda x: x.narrow(1, 2, 3), (4, 6)),
    "select": case(lambda x: x.select(0, 1), (4, 6)),
    "index_select": case(lambda x: torch.index_select(x, 1, torch.tensor([3, 0, 3])), (4, 6)),
    "attention": case(F.scaled_dot_product_attention, (2, 4, 5, 3), (2, 4, 6, 3), (2, 4, 6, 3)),
    "attention causal": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
        (1, 4, 4, 2), (1, 4, 4, 2), (1, 4, 4, 2),
    ),
    "attention masked": case(
        lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, m), (2, 4, 4, 2), (2, 4, 3, 2), (2, 4, 3, 2), (4, 3)
    ),
    "attention grouped": case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
        (2, 8, 3, 2), (2, 4, 3, 2), (2, 4, 3, 2),
    ),
    "cross_entropy": case(lambda x: F.cross_entropy(x, TARGETS), (6, 8)),
    "cross_entropy sum": case(lambda x: F.cross_entropy(x, TARGETS, reduction="sum"), (6, 9)),
    "cross_entropy none": case(lambda x: F.cross_entropy(x, TARGETS, reduction="none"), (6, 8)),
    "cross_entropy ignored": case(lambda x: F.cross_entropy(x, TARGETS.abs() % 8, ignore_index=3), (6, 8)),
    "cross_entropy smooth": case(lambda x: F.cross_entropy(x, TARGETS, label_smoothing=0.2), (6, 7)),
    "cross_entropy weighted": case(
        lambda x, w: F.cross_entropy(x, TARGETS, w.detach().abs(), label_smoothing=0.1), (6, 8), (8,)
    ),
    "cross_entropy weighted mean": case(lambda x, w: F.cross_entropy(x, TARGETS, w.detach().exp()), (6, 8), (8,)),
    "cross_entropy images": case(lambda x: F.cross_entropy(x, TARGETS.view(2, 3) % 4), (2, 4, 3)),
    "cross_entropy soft": case(
        lambda x, p: F.cross_entropy(x, p.detach().softmax(1), label_smoothing=0.1), (6, 8), (6, 8)
    ),
    "cross_entropy soft with gradient": case(lambda x, p: F.cross_entropy(x, p.softmax(1)), (6, 8), (6, 8)),
    "cross_entropy vector": case(lambda x: F.cross_entropy(x, torch.tensor(2)), (8,)),
    "broadcast": case(lambda a, b: a * b + a, (4, 6), (6,)),
    "broadcast size 1": case(torch.mul, (4, 6), (4, 1)),
    "broadcast both": case(torch.add, (4, 1, 6), (3, 6)),
    "where": case(lambda a, b: torch.where(a > 0, a, b), (4, 6), (4, 6)),
    "a plain number": case(lambda a, b: a * b.sum(), (4, 6), (3,)),
    "several": case(lambda a, b: torch.addcmul(a, a, b, value=0.5), (4, 5), (4, 5)),
    "activation": case(F.gelu, (5, 3)),
    "real": case(lambda x: x.real * 2, (4, 6)),
    "std": case(lambda x: x.std(0), (8, 6)),
    "cumsum": case(lambda x: x.cumsum(0), (8, 6)),
    "sort": case(lambda x: x.sort(1, descending=True).values, (8, 6)),
    "flip": case(lambda x: x.flip(0), (5, 6)),
    "roll": case(lambda x: x.roll(1, 1), (8, 6)),
    "gather": case(lambda x: x.gather(1, torch.zeros(2, 2, dtype=torch.int64)), (8, 6)),
    "tril": case(torch.tril, (8, 8)),
    "logsumexp": case(lambda x: x.logsumexp(0), (8, 6)),
    "einsum": case(lambda x: torch.einsum("ij,ij->i", x, x), (8, 6)),
    "softmax of a gathered operator": case(lambda x: (x * x).softmax(0) * x.cumsum(0), (8, 4)),
}  # fmt: skip


def layouts_of(shape: tuple[int, ...], world: int) -> Iterator[_DistSpec | None]:
    """Plain, replica, every sharding of one dim, and one of two dims."""
    yield None
    yield ReplicaSpec()
    for dim in range(len(shape)):
        yield ShardSpec([dim], [world])
    if world == 4 and len(shape) > 1:
        yield ShardSpec([-1, 0], [2, 2])


def made(operand: Any, dtype: torch.dtype, seed: int) -> Tensor:
    if isinstance(operand, Tensor):
        return operand
    return torch.randn(operand, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def close(result: Tensor, expected: Tensor, dtype: torch.dtype, *what: Any) -> None:
    assert result.shape == expected.shape, (what, result.shape, expected.shape)
    assert result.dtype == expected.dtype, (what, result.dtype, expected.dtype)
    if not expected.is_floating_point():
        assert torch.equal(result, expected), (what, result, expected)
        return
    if not expected.numel():
        return
    scale = max(float(expected.abs().max()), 1.0)
    error = float((result - expected).abs().max()) / scale
    tolerances = TOLERANCE | LOW_TOLERANCE
    assert error <= max(tolerances[dtype], tolerances[result.dtype]), (what, error)


def check(
    function: Make, fulls: list[Tensor], specs: tuple[_DistSpec | None, ...], pg: ProcessGroup, what: Any = "",
    dtype: torch.dtype | None = None,
) -> list[_DistSpec]:  # fmt: skip
    """Run on shards and on global tensors; the layouts of the results. ``dtype`` has the tolerance."""
    dtype = dtype or next((x.dtype for x in fulls if x.is_floating_point()), torch.float32)
    rank = pg.tp_local_rank()
    references = [x.clone().requires_grad_(x.is_floating_point()) for x in fulls]
    expected = [x for x in tree_leaves(function(*references)) if isinstance(x, Tensor)]
    inputs: list[Tensor] = []
    for x, spec in zip(fulls, specs, strict=True):
        own = x.clone() if spec is None else ColoTensor(shard_of(x, spec, rank), ColoTensorSpec(pg, spec), x.shape)
        inputs.append(own.requires_grad_(x.is_floating_point()))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*has no rule for these shards")
        result = [x for x in tree_leaves(function(*inputs)) if isinstance(x, Tensor)]
    context = (what, specs)
    assert len(result) == len(expected), context
    results, ends, upstream, downstream = [], [], [], []
    for place, (x, y) in enumerate(zip(result, expected, strict=True)):
        assert isinstance(x, ColoTensor), (context, type(x))
        results.append(x.dist_spec)
        assert tuple(x.size()) == tuple(y.shape), (context, x.size(), y.shape)
        assert x.partitions == partitions(x.dist_spec, y.dim()), context
        close(plain(x).detach(), shard_of(y.detach(), x.dist_spec, rank), dtype, context, "value", x.dist_spec)
        if y.requires_grad:
            gradient = made(tuple(y.shape), y.dtype, 100 + place)
            ends.append((x, y))
            upstream.append(shard_of(gradient, x.dist_spec, rank))
            downstream.append(gradient)
        assert x.requires_grad == y.requires_grad, context
    if not ends:
        return results
    floating = [i for i, x in enumerate(fulls) if x.is_floating_point()]
    reference_grads = torch.autograd.grad(
        [y for _, y in ends], [references[i] for i in floating], downstream, allow_unused=True
    )
    grads = torch.autograd.grad([plain(x) for x, _ in ends], [inputs[i] for i in floating], upstream, allow_unused=True)
    for i, mine, other in zip(floating, grads, reference_grads, strict=True):
        if other is None:
            assert mine is None or not mine.any(), (context, "unused", i)
            continue
        assert mine is not None, (context, "no gradient", i)
        spec = specs[i]
        close(plain(mine), other if spec is None else shard_of(other, spec, rank), dtype, context, "gradient", i)
    return results


def run_case(group: TorchGroup, name: str, limit: int = 10**6) -> int:
    """All layouts of all operands, or ``limit`` of them, always those in which all operands have the same layout."""
    pg, count = ranks_of(group), 0
    function, operands = CASES[name]
    for dtype in TOLERANCE:
        fulls = [made(operand, dtype, i) for i, operand in enumerate(operands)]
        each = [list(layouts_of(tuple(x.shape), group.size())) for x in fulls]
        every = [specs for specs in itertools.product(*each) if any(spec is not None for spec in specs)]
        if len(every) > limit:
            identical = [specs for specs in every if all(spec == specs[0] for spec in specs)]
            every = identical + random.Random(name).sample(every, limit - len(identical))
        for specs in every:
            check(function, fulls, specs, pg, name)
            count += 1
    return count


def run_under_autocast(group: TorchGroup, name: str, low: torch.dtype, limit: int) -> int:
    """Some layouts under autocast, of fp32 operands, of ``low`` ones, and of both in turn: dtypes and values.

    Losses of fp32 logits lose nothing: torch computes them in fp32, too.
    """
    pg, count = ranks_of(group), 0
    function, operands = CASES[name]
    for dtypes in itertools.product((torch.float32, low), repeat=2):
        fulls = [made(operand, dtypes[i % 2], i) for i, operand in enumerate(operands)]
        with torch.autocast("cpu", low):
            try:
                function(*[x.clone() for x in fulls])
            except (RuntimeError, UserWarning):  # torch refuses these dtypes, or warns of them
                continue
            each = [list(layouts_of(tuple(x.shape), group.size())) for x in fulls]
            every = [specs for specs in itertools.product(*each) if any(spec is not None for spec in specs)]
            exact = name.startswith("cross_entropy") and dtypes[0] is torch.float32
            for specs in random.Random(f"{name} {dtypes}").sample(every, min(limit, len(every))):
                check(function, fulls, specs, pg, (name, dtypes), torch.float32 if exact else low)
                count += 1
    return count
