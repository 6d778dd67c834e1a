"""Calls of which no handle is seen: mappings, attention, linears, losses, resharding."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from mapping_cases import MAPPINGS, as_asked, by_sizes, local_shape, run
from mapping_cases import Call as Mapping
from stream_order.program import RANK, WORLD, Program
from stream_order.simulator import DEVICE
from torch import Tensor
from tritoncomm_kernels import torch_path

from tritoncomm import collective
from tritoncomm.experts import RowsHandle, combine, dispatch, routing
from tritoncomm.integrations.megatron import frozen_linear, trained_linear
from tritoncomm.reshard import Layout, reshard
from tritoncomm.tensor.vocab_parallel import cross_entropy_rows
from tritoncomm.ulysses import UlyssesAttention

__all__ = ["CALLS", "DIFFERENTIABLE", "ON_TWO_STREAMS", "Call", "leaf", "outputs"]

Call = Callable[[Program], Any]


def leaf(program: Program, *shape: int) -> Tensor:
    return program.tensor(*shape).requires_grad_()


def of_mapping(call: Mapping) -> Call:
    shape, asked = local_shape(call, RANK, WORLD), as_asked(call, RANK, range(WORLD))
    return lambda program: run(asked, leaf(program, *shape) * 1, program.group)


def attention(layout: str = "bshd", heads: tuple[int, int] = (8, 8), sizes: list[int] | None = None) -> Call:
    def call(program: Program) -> Tensor:
        shape = (2, 8) if layout == "bshd" else (8, 2)
        q, k, v = (leaf(program, *shape, count, 16) * 1 for count in (heads[0], heads[1], heads[1]))
        return UlyssesAttention(group=program.group, layout=layout)(q, k, v, sequence_sizes=sizes)

    return call


def fused_attention(program: Program) -> Tensor:
    return UlyssesAttention(group=program.group)(leaf(program, 2, 8, 3, 8, 16) * 1)


def linear(sequence_parallel: bool, reduced: bool, frozen: bool = False) -> Call:
    def call(program: Program) -> Tensor:
        x, weight = leaf(program, 4, 2, 16) * 1, leaf(program, 8, 16)
        buffers = (lambda: SimpleNamespace(get_tensor=_buffer)) if sequence_parallel else None
        if frozen:
            return frozen_linear._FrozenLinear.apply(x, weight.detach(), None, program.group)
        bias = leaf(program, 8)
        return trained_linear._Linear.apply(x, weight, bias, reduced, program.group, buffers)

    return call


def _buffer(shape: Any, dtype: torch.dtype, name: str) -> Tensor:
    return torch.empty(shape, dtype=dtype, device=DEVICE)


def loss(smoothing: float = 0.0, soft: bool = False) -> Call:
    """The cross entropy of 16 classes on each rank."""

    def call(program: Program) -> Tensor:
        logits = leaf(program, 8, 16) * 1
        target = program.tensor(8, 16) if soft else torch.zeros(8, dtype=torch.int64, device=DEVICE)
        classes = (RANK * 16, 16), WORLD * 16
        return cross_entropy_rows(logits, target, None, *classes, -100, smoothing, program.group)[0]

    return call


IDS, COUNTS = torch.arange(36).view(12, 3) % 16, torch.empty(WORLD, 4, dtype=torch.int64)
torch_path.sort_by_owner(IDS, 16 // WORLD, RANK, COUNTS)  # which no kernel counts here


def mixture(beside: bool = False, elsewhere: bool = False) -> Call:
    """A layer of 16 experts, of which each rank sends what this one sends; other work or streams between."""

    def call(program: Program) -> Tensor:
        make = program.tensor if elsewhere else partial(leaf, program)
        x, weights, shared = (make(12, columns) * 1 for columns in (64, 3, 64))
        other = program.stream() if elsewhere else program.simulator.current
        ids = IDS.to(DEVICE)
        with mock.patch.object(routing, "exchange_counts", lambda counts, *_: counts.copy_(COUNTS)):
            dispatched = dispatch(x, ids, weights, 16, program.group, async_op=beside)
        shared = shared * 2
        with program.simulator.on(other):
            if isinstance(dispatched, RowsHandle):
                dispatched = dispatched.wait()
            results = dispatched.summed(dispatched.by_expert().rows * 2)
        program.simulator.current.wait_stream(other)
        if elsewhere:
            program.simulator.record(results, program.simulator.current)
        y = combine(results, dispatched, async_op=beside)
        shared = shared * 2
        return (y.wait() if isinstance(y, RowsHandle) else y) + shared

    return call


_ALL = range(WORLD)
BIG, SMALL = 4352, 64  # rows and columns: what stays of the first is copied while the exchange runs


def layouts(n: int, first: Any = _ALL, second: Any = _ALL) -> tuple[Layout, Layout]:
    """Rows over some ranks, and columns over others."""
    return Layout.on_mesh((n, n), list(first), [0]), Layout.on_mesh((n, n), list(second), [1])


def moved(n: int, first: Any = _ALL, second: Any = _ALL, count: int = 1, records: bool = True, **options: Any) -> Call:
    def call(program: Program) -> Any:
        rows, columns = layouts(n, first, second)
        local = rows.local_shape(RANK) or (0,)
        tensors = {str(i): program.tensor(*local) for i in range(count)}
        if records:
            tensors = {name: x.requires_grad_() * 1 for name, x in tensors.items()}
        return reshard(tensors, rows, columns, group=program.group, **options)

    return call


DIFFERENTIABLE: dict[str, Call] = {
    **{f"mapping {name}": of_mapping(replace(call, shape=(16, 8, 64))) for name, call in MAPPINGS.items()},
    **{f"mapping {name} by sizes": of_mapping(call) for name, call in by_sizes(WORLD).items()},
    "ulysses": attention(),
    "ulysses shared heads": attention(heads=(8, 2)),
    "ulysses sequence first": attention("sbhd"),
    "ulysses sizes": attention(sizes=[6, 8, 3, 1]),
    "ulysses fused": fused_attention,
    "linear sequence parallel": linear(True, False),
    "linear reduced": linear(False, True),
    "linear frozen": linear(False, True, True),
    "loss": loss(),
    "loss smoothed": loss(0.1),
    "loss soft targets": loss(soft=True),
    "experts": mixture(),
    "experts beside other work": mixture(beside=True),
    "reshard": moved(SMALL),
    "reshard with direct copies": moved(BIG),
    "reshard 20 tensors": moved(SMALL, count=20),
    "reshard in buckets": moved(SMALL, count=4, bucket_bytes=4096),
    "reshard cast": moved(SMALL, dtype=torch.bfloat16),
    "reshard partial gradients": moved(SMALL, grad="partial"),
    "reshard to other ranks": moved(SMALL, (0, 1), (2, 3)),
    "reshard from other ranks": moved(SMALL, (2, 3), (0, 1)),
    "reshard to more ranks": moved(SMALL, (0, 1), _ALL),
}


def onto(n: int, in_place: bool = False) -> Call:
    """Into memory that is there already, three times: repetitions replay the first."""

    def call(program: Program) -> Tensor:
        rows, columns = layouts(n)
        x = program.tensor(*(rows.local_shape(RANK) or (0,)))
        out = x.view(n, -1) if in_place else program.tensor(*(columns.local_shape(RANK) or (0,)))
        for _ in range(3):
            reshard(x, rows, columns, group=program.group, out=out)
        return out

    return call


def split_reduce_scatter(program: Program) -> list[Tensor]:
    gradients = [program.tensor(5, 8), program.tensor(16), *(program.tensor(4, 4) for _ in range(18))]
    return collective.split_reduce_scatter(gradients, [1, 0, *[0] * 18], program.group, scale=0.25)


CALLS: dict[str, Call] = {
    "collective split_reduce_scatter": split_reduce_scatter,
    "reshard into a result": onto(SMALL),
    "reshard with direct copies into a result": onto(BIG),
    "reshard in place": onto(SMALL, True),
    "reshard without gradients": moved(SMALL, records=False),
    "reshard 20 tensors without gradients": moved(SMALL, count=20, records=False),
    "reshard with direct copies without gradients": moved(BIG, records=False),
}
"""Without gradients."""

ON_TWO_STREAMS: dict[str, Call] = {
    "experts waited on another stream": mixture(beside=True, elsewhere=True),
}
"""Without gradients, and with a stream of their own."""


def outputs(made: Any) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else [*(made.values() if isinstance(made, dict) else made)]
