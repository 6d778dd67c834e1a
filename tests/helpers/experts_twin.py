"""Experts on other ranks, token by token in plain torch: the bits of a dispatch, its experts and a combine.

The experts multiply elementwise, so that a row has the same bits in any batch of rows. Every rank knows all draws, and
computes the results of its own tokens without the others.
"""

import random
from dataclasses import dataclass
from typing import Any, NamedTuple

import naive
import torch
from bits import bits
from laid_out import laid_out
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import record
from tritoncomm.experts import Dispatched, Route, combine, dispatch, route

__all__ = [
    "KINDS", "WAYS", "Drawn", "Routing", "apply", "apply_apart", "apply_routed", "draw_of", "run_routing", "twin",
]  # fmt: skip

KINDS = ("even", "even", "skewed", "one expert", "one rank", "equal ids", "grouped", "unused")


@dataclass(frozen=True)
class Routing:
    """One routing.

    Attributes:
        tokens: of every rank.
        experts: of each rank.
        kind: of ``KINDS``.
        alignment: of ``by_expert``.
        path: that is forced.
        how: key of ``WAYS``.
        layouts: of ``LAYOUTS``: of tokens, ids, weights, results and gradients.
    """

    tokens: tuple[int, ...]
    hidden: int
    k: int
    experts: int
    kind: str
    dtype: str
    weights: str
    alignment: int
    path: str
    how: str
    seed: int
    layouts: tuple[str, ...] = ("plain",) * 5


class Drawn(NamedTuple):
    """Tensors of one rank, and the factors of all experts."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    grad: Tensor
    scales: Tensor


def draw_of(routing: Routing, rank: int) -> Drawn:
    draw, tokens, world = random.Random(routing.seed * 64 + rank), routing.tokens[rank], len(routing.tokens)
    generator, total = torch.Generator().manual_seed(routing.seed * 64 + rank), routing.experts * len(routing.tokens)
    dtype, target = getattr(torch, routing.dtype), random.Random(routing.seed).randrange(total)
    ids = []
    for _ in range(tokens):
        pool = list(range(total))
        if routing.kind == "skewed":
            pool = pool[: max(total // 2, 1)] * 3 + pool
        elif routing.kind == "one expert":
            pool = [target]
        elif routing.kind == "one rank":
            pool = [target // routing.experts * routing.experts + e for e in range(routing.experts)]
        elif routing.kind == "grouped":
            first = draw.randrange(world)
            pool = [e for e in pool if e // routing.experts in (first, (first + 1) % world)]
        elif routing.kind == "unused":
            pool = pool[::2]
        draws = routing.kind == "equal ids" or len(pool) < routing.k
        ids.append([draw.choice(pool) for _ in range(routing.k)] if draws else draw.sample(pool, routing.k))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64)
            for shape in ((tokens, routing.hidden), (tokens, routing.k), (tokens, routing.hidden))]  # fmt: skip
    scales = torch.randn(
        total, routing.hidden, generator=torch.Generator().manual_seed(routing.seed), dtype=torch.float64
    )
    index = torch.tensor(ids, dtype=draw.choice([torch.int64, torch.int32])).view(tokens, routing.k)
    return Drawn(made[0].to(dtype), index, made[1].to(getattr(torch, routing.weights)), made[2].to(dtype),
                 scales.to(dtype))  # fmt: skip


def _added(parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Parts in the wide type, from +0 in order, rounded once."""
    total = torch.zeros_like(parts[0])
    for part in parts:
        total = total + part
    return total.to(dtype)


def twin(routing: Routing, rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """The output of a rank's tokens, and the gradients of its tokens and weights."""
    x, ids, given, grad, scales = draw_of(routing, rank)
    world, dtype = len(routing.tokens), x.dtype
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    weights = given.to(wide)
    outs, grads, grad_weights = torch.empty_like(x), torch.empty_like(x), torch.zeros_like(weights)
    zeros, columns = torch.zeros(routing.hidden, dtype=wide), min(routing.k, world)
    for t, row in enumerate(ids.tolist()):
        parts, back, dots = [], [], []
        for owner in sorted({e // routing.experts for e in row}):
            here = [e // routing.experts == owner for e in row]
            results = [(x[t] * scales[e]) for e in row]
            terms = [results[s].to(wide) * weights[t, s] if local else zeros for s, local in enumerate(here)]
            parts.append(_added(terms, dtype).to(wide))
            scaled = [(grad[t].to(wide) * weights[t, s]).to(dtype) for s in range(routing.k)]
            terms = [(scaled[s] * scales[e]).to(wide) if here[s] else zeros for s, e in enumerate(row)]
            back.append(_added(terms, dtype).to(wide))
            dot = torch.zeros(1, routing.k, dtype=wide)
            pair = torch.tensor([s if local else -1 for s, local in enumerate(here)])
            naive.dot_rows(grad[t : t + 1], torch.stack(results), pair, dot)
            dots.append(dot[0])
        parts += [zeros] * (columns - len(parts))
        back += [zeros] * (columns - len(back))
        dots += [torch.zeros(routing.k, dtype=wide)] * (columns - len(dots))
        outs[t], grads[t], grad_weights[t] = _added(parts, dtype), _added(back, dtype), _added(dots, wide)
    return outs, grads, grad_weights.to(given.dtype)


def _scale_gradient(routing: Routing, rank: int) -> Tensor:
    """The gradient of the factors of a rank's experts, in float64."""
    total = torch.zeros(routing.experts, routing.hidden, dtype=torch.float64)
    for source in range(len(routing.tokens)):
        x, ids, weights, grad, _ = draw_of(routing, source)
        for t, row in enumerate(ids.tolist()):
            for s, e in enumerate(row):
                if e // routing.experts == rank:
                    total[e % routing.experts] += weights[t, s].double() * grad[t].double() * x[t].double()
    return total


def _rows_between(routing: Routing, source: int, owner: int) -> int:
    """Tokens of a rank with an expert of the owner; none if it is the same rank."""
    ids = draw_of(routing, source).ids.tolist()
    return sum(any(e // routing.experts == owner for e in row) for row in ids) * (source != owner)


def _bytes_sent(routing: Routing, rank: int) -> dict[str, int]:
    """Of every message with rows: a row for each pair of a token and another rank, there and back."""
    item = torch.empty(0, dtype=getattr(torch, routing.dtype)).itemsize
    row, tail = -(-routing.hidden * item // 8) * 8, 8 if routing.dtype == "float64" else 4
    bare, weighted, whole = (
        -(-n // 16) * 16 for n in (routing.hidden * item, row + routing.k * tail, row + routing.k * (tail + 4))
    )
    there, back = (
        sum(_rows_between(routing, *pair) for pair in pairs)
        for pairs in zip(*[((rank, peer), (peer, rank)) for peer in range(len(routing.tokens))], strict=True)
    )
    passes = 2 if "checkpoint" in routing.how else 1
    return {
        "dispatch": passes * there * whole,  # with weights and ids
        "combine": passes * back * bare,
        "combine.backward": there * bare,
        "dispatch.backward": back * weighted,
    }


def apply(x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, routing: Routing, group: ProcessGroup) -> Tensor:
    """The layer by the library, with this rank's factors."""
    dispatched = dispatch(x, ids, weights, routing.experts * group.size(), group)
    return combine(_summed(dispatched, scales, routing), dispatched)


def apply_apart(
    x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, routing: Routing, group: ProcessGroup
) -> Tensor:
    """The same layer, with work beside both exchanges; it adds and takes away the same."""
    started = dispatch(x, ids, weights, routing.experts * group.size(), group, async_op=True)
    beside = x * 2
    dispatched = started.wait()
    back = combine(_summed(dispatched, scales, routing), dispatched, async_op=True)
    beside = (beside * 0).nan_to_num()
    return torch.where(beside == 0, back.wait(), beside)


def apply_routed(
    x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, routing: Routing, group: ProcessGroup
) -> Tensor:
    """The same layer, whose route is found before."""
    return apply_route(x, weights, scales, routing, route(ids, routing.experts * group.size(), group))


def apply_route(x: Tensor, weights: Tensor, scales: Tensor, routing: Routing, routed: Route) -> Tensor:
    dispatched = routed.dispatch(x, weights)
    return combine(_summed(dispatched, scales, routing), dispatched)


def _summed(dispatched: Dispatched, scales: Tensor, routing: Routing) -> Tensor:
    rows, counts = dispatched.by_expert(routing.alignment)
    factors = scales.repeat_interleave(counts, 0)
    results = rows * torch.cat([factors, factors.new_zeros(len(rows) - len(factors), factors.shape[1])])
    return dispatched.summed(_laid_out_here(results, routing.layouts[3]))


def _in_checkpoint(layer: Any, reentrant: bool) -> Any:
    return lambda *args: torch.utils.checkpoint.checkpoint(layer, *args, use_reentrant=reentrant)


def _compiled(layer: Any) -> Any:
    return lambda *args: torch.compile(layer, backend="eager")(*args)


def _routed_before(
    x: Tensor, ids: Tensor, weights: Tensor, scales: Tensor, routing: Routing, group: ProcessGroup
) -> Tensor:
    routed = route(ids, routing.experts * group.size(), group)
    return _in_checkpoint(apply_route, False)(x, weights, scales, routing, routed)


WAYS: dict[str, Any] = {
    "eager": apply,
    "autocast": apply,
    "apart": apply_apart,
    "apart under autocast": apply_apart,
    "route": apply_routed,
    "compiled": _compiled(apply),
    "compiled apart": _compiled(apply_apart),
    "checkpoint": _in_checkpoint(apply, False),
    "reentrant checkpoint": _in_checkpoint(apply, True),
    "apart in a checkpoint": _in_checkpoint(apply_apart, False),
    "apart in a reentrant checkpoint": _in_checkpoint(apply_apart, True),
    "route before a checkpoint": _routed_before,
}
"""Layers of one value, by the way in which they call the library."""


def _laid_out_here(x: Tensor, layout: str) -> Tensor:
    """In a graph; the backward of a tensor of odd strides would add to zeros, which makes +0 of -0."""
    return x if layout.startswith("odd") else laid_out(x, layout)


def run_routing(group: ProcessGroup, routing: Routing) -> str:
    """``right`` or ``problem: ...``."""
    import tritoncomm

    rank, world = group.rank(), group.size()
    drawn = draw_of(routing, rank)
    x, ids, weights, _, grad = routing.layouts
    x, weights = (laid_out(*each).detach().requires_grad_() for each in ((drawn.x, x), (drawn.weights, weights)))
    ids, grad = laid_out(drawn.ids, ids), laid_out(drawn.grad, grad)
    mine = drawn.scales[rank * routing.experts : (rank + 1) * routing.experts].clone().requires_grad_()
    layer = WAYS[routing.how]
    with tritoncomm.path(routing.path), record.recording() as counted:
        if "autocast" in routing.how:
            with torch.autocast("cpu", torch.float16 if x.dtype is torch.float16 else torch.bfloat16):
                out = layer(x, ids, weights, mine, routing, group)
        else:
            out = layer(x, ids, weights, mine, routing, group)
        out.backward(grad)
    wanted = dict(
        zip(("the output", "the gradient of tokens", "the gradient of weights"), twin(routing, rank), strict=True)
    )
    for (name, value), result in zip(wanted.items(), (out.detach(), x.grad, weights.grad), strict=True):
        if result is None or result.dtype is not value.dtype or not torch.equal(bits(result), bits(value)):
            return f"problem: {name} is {result}, not {value}"[:600]
    exact = _scale_gradient(routing, rank)
    if mine.grad is None:
        return "problem: the experts' parameters have no gradient"
    eps = torch.finfo(mine.dtype).eps
    largest = exact.abs().max().item() if exact.numel() else 0.0
    if not torch.allclose(mine.grad.double(), exact, rtol=0, atol=64 * eps * max(largest, 1)):
        return f"problem: the experts' gradient is {mine.grad}, not {exact}"[:600]
    if world > 1:
        sent, expected = {name: count.bytes_sent for (name, _), count in counted.items()}, _bytes_sent(routing, rank)
        if {name: sent[name] for name in expected} != expected:
            return f"problem: sent {sent}, not {expected}"
    return "right"
