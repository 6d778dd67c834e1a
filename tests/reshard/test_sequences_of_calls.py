"""Drawn sequences of calls with the same layouts: the next one may have any other tensors, results, modes and forms."""

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import Any

import pytest
import torch
from pool import Pool
from reshardings import drawn_layout, local_of, same
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed import ProcessGroup

from tritoncomm.core import ops
from tritoncomm.reshard import reshard, reshard_plan

DTYPES = (torch.float32, torch.float32, torch.bfloat16, torch.complex64, torch.int64)


def window(x: Tensor) -> Tensor:
    """The same values in columns of something wider, from an offset on."""
    if not x.dim():
        return torch.stack([x, x])[1]
    return x.new_zeros(*x.shape[:-1], x.shape[-1] + 5)[..., 2 : 2 + x.shape[-1]].copy_(x)


def interleaved(x: Tensor) -> Tensor:
    return torch.stack([x, x], -1)[..., 1]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "plain": torch.clone,
    "parameter": lambda x: nn.Parameter(x.clone(), requires_grad=x.is_floating_point() or x.is_complex()),
    "result": lambda x: x.clone().requires_grad_() * 1 if x.is_floating_point() else x.clone(),
    "window": window,
    "interleaved": interleaved,
    "transposed": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x.clone(),
    "conjugated": lambda x: x.conj().resolve_conj().conj(),
    "negated": lambda x: torch._neg_view(x.neg()),
}
MODES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "none": nullcontext,
    "no_grad": torch.no_grad,
    "inference": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "hooks": lambda: saved_tensors_hooks(torch.clone, lambda x: x),
}


def of_graph(x: Tensor) -> tuple[Any, ...]:
    return x.__class__, x.requires_grad, x.is_leaf, x.is_inference(), x.stride(), x.is_conj(), x.is_neg()


def run_sequence(group: ProcessGroup, seed: int, path: Any) -> None:
    """As many calls as ``seed`` says, of one set of layouts; ranks draw the same, so all have the same kinds."""
    draw, rank = random.Random(seed), group.rank()
    names = draw.choice([None, ["0"], ["0", "1"], ["a", "b", "c"]])
    shapes = [tuple(draw.randint(1, 6) for _ in range(draw.choice([0, 1, 2, 2, 3]))) for _ in names or [""]]
    dtypes = [draw.choice(DTYPES) for _ in shapes]
    sources, targets = ([drawn_layout(draw, shape, group.size()) for shape in shapes] for _ in range(2))

    def formed(given: list[Any]) -> Any:
        return given[0] if names is None else given if names[0] == "0" else dict(zip(names, given, strict=True))

    kept = formed(sources), formed(targets)
    has_gradients = draw.random() < 0.5
    zeros = [local_of(x, rank, torch.zeros(x.shape, dtype=dtype)) for x, dtype in zip(sources, dtypes, strict=True)]
    plan = reshard_plan(
        formed([KINDS["parameter" if has_gradients else "plain"](x) for x in zeros]), *kept, group=group
    )
    kind, mode, how, into = "plain", "none", "same", None
    for call in range(draw.randint(4, 9)):
        made = torch.Generator().manual_seed(100 * seed + call)
        fulls = [torch.randint(-99, 99, shape, generator=made).to(x) for shape, x in zip(shapes, dtypes, strict=True)]
        before, after = (
            [local_of(x, rank, full) for x, full in zip(layouts, fulls, strict=True)] for layouts in (sources, targets)
        )
        # Half of what the call before had is kept: what comes again may be replayed.
        kind, mode, how, into = (
            draw.choice([last, draw.choice(others)])
            for last, others in (
                (kind, [*KINDS]), (mode, ["none", *MODES]), (how, ["same", "same", "plan", "new"]),
                (into, [None, None, "plain", "window", "transposed"]),
            )
        )  # fmt: skip
        with MODES[mode](), ops.path(path):
            given = [KINDS[kind](x) for x in before]
            if how == "plan" and not has_gradients:
                given = [x.detach() for x in given]
            sides = deepcopy(kept) if how == "new" else kept
            out = None if into is None else [KINDS[into](torch.zeros_like(x)) for x in after]

            def run(tensors: list[Tensor], sides: tuple[Any, Any], out: Any, how: str) -> list[Tensor]:
                of_out = None if out is None else formed(out)
                if how == "plan":
                    got = plan.execute(formed(tensors), out=of_out)
                else:
                    got = reshard(formed(tensors), *sides, group=group, out=of_out)
                return [got] if names is None else list(got) if names[0] == "0" else [got[name] for name in names]

            got = run(given, sides, out, how)
            first = run([KINDS[kind](x) for x in given], deepcopy(kept), None, "new")
        text = f"seed {seed}, call {call}: {kind}, {mode}, {how}, into {into}"
        for x, y, wanted, local, source in zip(got, first, after, given, before, strict=True):
            assert torch.equal(x.detach().resolve_conj().resolve_neg(), wanted), text
            assert torch.equal(local.detach().resolve_conj().resolve_neg(), source), f"{text}: its source"
            assert out is not None or how == "plan" or of_graph(x) == of_graph(y), text
        leaves = [x for x in given if x.requires_grad]
        if out is None and mode in ("none", "autocast", "hooks") and leaves:
            assert all(x.requires_grad for x, source in zip(got, given, strict=True) if source.requires_grad), text
            results = [x for x in got if x.requires_grad]
            wanted = [x for x, source in zip(before, given, strict=True) if source.requires_grad]
            grads = torch.autograd.grad(results, leaves, [x.detach().clone() for x in results])
            for x, source in zip(grads, wanted, strict=True):
                same(x.resolve_conj().resolve_neg(), source)


def run_sequences(group: ProcessGroup, seeds: range, path: Any) -> None:
    for seed in seeds:
        run_sequence(group, seed, path)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_sequences_of_calls(pool: Pool, world: int) -> None:
    pool.run(run_sequences, range(20), "auto", world=world)


def test_sequences_of_calls_by_kernels(pool: Pool) -> None:
    pool.run(run_sequences, range(100, 106), "triton", world=2)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3, 4])
def test_more_sequences_of_calls(pool: Pool, world: int) -> None:
    pool.run(run_sequences, range(1000, 1300), "auto", world=world)
