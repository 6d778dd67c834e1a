"""Drawn recurrences and convolutions over shards of the sequence, against one process in float64."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from fuzz_calls import named, problem_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from laid_out import LAYOUTS, laid_out
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import MismatchError
from tritoncomm.p2p import check
from tritoncomm.recurrent import Exchanged, Sliced, by_heads, conv_halo

__all__ = ["Recurrence", "recurrences", "run_recurrence"]


@dataclass(frozen=True)
class Recurrence:
    """One call over shards, its gradients, and what differs between ranks.

    Attributes:
        function: ``by_heads`` or ``conv_halo``.
        sizes: positions of every rank.
        heads: of the values, a multiple of those of the keys.
        shared: value heads of a key head.
        taps: of the convolution.
        documents: global starts, for all rows or by row.
        other: documents of the last rank alone; None where all ranks have the same.
        layouts: of the memory of inputs and of the gradient.
        needs: whether each input needs a gradient; on all ranks alike.
        number: seed of the values.
    """

    function: str
    sizes: tuple[int, ...]
    heads: int
    shared: int
    taps: int
    documents: tuple[Any, ...]
    other: tuple[int, ...] | None
    layouts: tuple[str, ...]
    needs: tuple[bool, ...]
    number: int


@st.composite
def recurrences(draw: Any, worlds: SearchStrategy[Any]) -> tuple[Any, Recurrence]:
    """Calls with at least one position, and a key head or more for each rank."""
    world = draw(worlds)
    ranks = len(world) if isinstance(world, tuple) else world
    even = st.integers(1, 5).map(lambda size: [size] * ranks)
    uneven = st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks).filter(any)
    sizes = tuple(draw(st.one_of(even, uneven)))
    starts = st.lists(st.integers(1, max(1, sum(sizes) - 1)), max_size=4, unique=True).map(
        lambda ends: (0, *sorted(end for end in ends if end < sum(sizes)))
    )
    documents = draw(st.one_of(starts, starts, st.tuples(starts, starts)))
    other = draw(starts) if ranks > 1 and draw(st.sampled_from([True, False, False])) else None
    return world, Recurrence(
        draw(st.sampled_from(["by_heads", "by_heads", "conv_halo"])),
        sizes,
        ranks * draw(st.integers(1, 2)) + draw(st.sampled_from([0, 0, 1])),
        draw(st.sampled_from([1, 1, 2])),
        draw(st.integers(1, 4)),
        documents,
        other,
        tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=6, max_size=6))),
        tuple(draw(st.lists(st.sampled_from([True, True, False]), min_size=5, max_size=5).filter(any))),
        draw(st.integers(0, 10**6)),
    )


def _rule(q: Tensor, k: Tensor, v: Tensor, g: Tensor, a: Tensor) -> Tensor:
    """A gated linear recurrence, ``[b, s, heads, d]``, with a scale of each head."""
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q, k))
    state, out = v.new_zeros(v.shape[0], v.shape[2], q.shape[3], v.shape[3]), []
    for i in range(v.shape[1]):
        state = state * g[:, i].sigmoid()[..., None, None] + k[:, i, :, :, None] * v[:, i, :, None]
        out.append((q[:, i, :, :, None] * state).sum(2) * a[:, None])
    return torch.stack(out, 1) if out else v * a[:, None]


def _conv(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv1d(F.pad(x, (weight.shape[1] - 1, 0)), weight[:, None], groups=x.shape[1])


def _conv_of_rows(x: Tensor, weight: Tensor) -> Tensor:
    """The same with positions before channels."""
    return _conv(x.transpose(1, 2), weight).transpose(1, 2)


def _rows(documents: tuple[Any, ...]) -> list[tuple[int, ...]]:
    """The starts of each of the two rows."""
    return list(documents) if isinstance(documents[0], tuple) else [documents, documents]


def _alone(function: Any, case: Recurrence, dim: int, inputs: Sequence[Tensor], parameter: Tensor) -> Tensor:
    """``function`` of every document of every row by itself, in one process."""
    return torch.cat([
        torch.cat([
            function(*(x[row : row + 1].narrow(dim, a, b - a) for x in inputs), parameter)
            for a, b in pairwise((*starts, sum(case.sizes)))
        ], dim)
        for row, starts in enumerate(_rows(case.documents))
    ])  # fmt: skip


def run_recurrence(group: ProcessGroup, case: Recurrence) -> str:
    """What came of a call on this rank: right, refused by name, or a problem."""
    try:
        return _compare(group, case)
    except Exception as error:
        return f"refused: {error}" if named(error) else problem_of(error)


def _compare(group: ProcessGroup, case: Recurrence) -> str:
    draws, n, rank = torch.Generator().manual_seed(case.number), sum(case.sizes), group.rank()

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draws, dtype=torch.float64)

    heads, keys = case.heads * case.shared, case.heads
    if case.function == "by_heads":
        roles = dict.fromkeys("qkvg", Exchanged()) | {"a": Sliced()}
        dim, function, ours = 1, _rule, by_heads(_rule, group, roles)
        inputs = [drawn(2, n, keys, 3), drawn(2, n, keys, 3), drawn(2, n, heads, 2), drawn(2, n, heads)]
        parameter = drawn(heads)
    else:
        dim = 1 + case.number % 2
        function = _conv if dim == 2 else _conv_of_rows
        ours = conv_halo(function, group, dim)
        inputs, parameter = [drawn(2, heads, n) if dim == 2 else drawn(2, n, heads)], drawn(heads, case.taps)
    needs = [*case.needs[: len(inputs)], case.needs[-1]]
    wholes = [x.clone().requires_grad_(need) for x, need in zip([*inputs, parameter], needs, strict=True)]
    wanted = _alone(function, case, dim, wholes[:-1], wholes[-1])
    shards = [x.split(list(case.sizes), dim)[rank] for x in inputs]
    leaves = [
        laid_out(x.detach(), layout).requires_grad_(need)
        for x, layout, need in zip([*shards, parameter], case.layouts, needs, strict=False)
    ]
    is_other = case.other is not None and _rows(case.other) != _rows(case.documents)
    documents = case.other if is_other and rank == group.size() - 1 else case.documents
    with check() if is_other else nullcontext():
        try:
            out = ours(*leaves, documents=documents, sizes=list(case.sizes))
        except MismatchError as error:
            return f"refused: {error}" if is_other else problem_of(error)
    if is_other:
        return "problem: documents of one rank were taken"
    if not torch.allclose(out, wanted.split(list(case.sizes), dim)[rank], rtol=1e-10, atol=1e-11):
        return "problem: values"
    if not any(needs):
        return "right"
    weight = drawn(*wanted.shape)
    grads = torch.autograd.grad((wanted * weight).sum(), [x for x in wholes if x.requires_grad])
    of_out = laid_out(weight.split(list(case.sizes), dim)[rank].contiguous(), case.layouts[-1])
    found = torch.autograd.grad(out, [x for x in leaves if x.requires_grad], of_out)
    for grad, whole, ours_is in zip(grads, [x for x in wholes if x.requires_grad], found, strict=True):
        if whole is wholes[-1]:
            total = ours_is.clone()
            torch.distributed.all_reduce(total, group=group)
        else:
            total, grad = ours_is, grad.split(list(case.sizes), dim)[rank]
        if not torch.allclose(total, grad, rtol=1e-9, atol=1e-10):
            return "problem: gradients"
    return "right"
