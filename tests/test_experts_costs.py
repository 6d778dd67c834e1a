"""What a layer of experts starts: operators, launches of kernels, messages and waits of the host, by their number."""

import tracemalloc
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import TorchDispatchMode
from tritoncomm_kernels import torch_path
from tritoncomm_kernels.launch import Launch

import tritoncomm
from bench.hosts import no_op_group
from tritoncomm.core import backend
from tritoncomm.experts import combine, dispatch, routing

TOKENS, HIDDEN = 64, 64


class Operators(TorchDispatchMode):
    """The names of operators that read or write memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name, returns = func._schema.name.removeprefix("aten::"), func._schema.returns
        is_view = bool(returns) and returns[0].alias_info is not None and not returns[0].alias_info.is_write
        if not is_view and not name.startswith(("empty", "new_empty", "detach", "c10d")):
            self.names.append(name)
        return func(*args, **(kwargs or {}))


class Cost(NamedTuple):
    """Operators of one pass, and its numbers of launches and messages."""

    operators: list[str]
    launches: int
    messages: int


class Layer:
    """A layer over a group that moves nothing, whose kernels launch nothing.

    Attributes:
        waits: of the host, for the counts.
    """

    def __init__(self, world: int, k: int, group: ProcessGroup, tokens: int = TOKENS, local: int = 8) -> None:
        self.group, self.number, self.waits, self.tokens = group, local * world, 0, tokens
        self.ids = torch.rand(tokens, self.number, generator=torch.Generator().manual_seed(1)).topk(k).indices
        self.counts = torch.empty(world, 4, dtype=torch.int64)
        torch_path.sort_by_owner(self.ids, local, 0, self.counts)
        self.launches = self.messages = 0

    @contextmanager
    def counting(self, path: str) -> Iterator[None]:
        start, exchange, cpu = backend.all_to_all, routing.exchange_counts, Tensor.cpu

        def launch(*_: Any, **__: Any) -> None:
            self.launches += 1

        def started(*arguments: Any, **options: Any) -> Any:
            self.messages += 1
            return start(*arguments, **options)

        def exchanged(counts: Tensor, *arguments: Any) -> None:
            exchange(counts, *arguments)
            with torch.utils._python_dispatch._disable_current_modes():
                counts.copy_(self.counts)

        def read(x: Tensor) -> Any:
            self.waits += 1
            return cpu(x)

        with (
            tritoncomm.path(path),
            mock.patch.object(Launch, "__call__", launch),
            mock.patch.object(backend, "all_to_all", started),
            mock.patch.object(routing, "exchange_counts", exchanged),
            mock.patch.object(Tensor, "cpu", read),
        ):
            yield

    def costs(self, path: str) -> list[Cost]:
        """Of forward and of backward; the second time, when everything is prepared."""
        for _ in range(2):
            x, weights = (
                torch.ones(self.tokens, columns, requires_grad=True) for columns in (HIDDEN, self.ids.shape[1])
            )
            costs, out, ones = [], x, torch.ones(self.tokens, HIDDEN)
            for backward in (False, True):
                self.launches = self.messages = self.waits = 0
                with self.counting(path), Operators() as operators:
                    if backward:
                        torch.autograd.grad(out, (x, weights), ones)
                        assert not self.waits
                    else:
                        dispatched = dispatch(x, self.ids, weights, self.number, self.group)
                        rows, _ = dispatched.by_expert()
                        out = combine(dispatched.summed(rows), dispatched)
                        assert self.waits == (self.group.size() > 1)
                costs.append(Cost(operators.names, self.launches, self.messages))
        return costs


@pytest.mark.parametrize(("world", "k"), [(2, 2), (8, 8), (4, 8), (64, 8)])
def test_launches_of_a_layer_on_a_gpu(world: int, k: int) -> None:
    """27 operators and launches; transformers' all-to-all has 20 operators forward and 8 backward, all but experts."""
    with no_op_group(world) as group:
        forward, backward = Layer(world, k, group).costs("triton")
    assert forward.operators == ["_to_copy", "cat", "clone"]  # ids in 32 bits; with weights; weights out of the buffer
    assert forward.launches == 3 + 4 + 3 + 1 + 1 + 1  # sort, rows and tails, sort, rows by expert, sum, sum of ranks
    assert sorted(backward.operators) == ["copy_", "copy_", "new_zeros", "zeros"]  # into the wire; of weights; of ids
    assert backward.launches == 2 + 1 + 1 + 2
    assert (forward.messages, backward.messages) == (3, 2)


@pytest.mark.parametrize(("world", "k", "most"), [(2, 2, 24), (8, 8, 24), (64, 8, 24), (4, 8, 26)])
def test_operators_of_the_routing_on_torchs_path(world: int, k: int, most: int) -> None:
    """With more slots than ranks they are sorted once more, and the index is cut."""
    x, weights = torch.ones(TOKENS, HIDDEN), torch.ones(TOKENS, k)
    with no_op_group(world) as group:
        layer = Layer(world, k, group)
        for _ in range(2):
            with layer.counting("torch"), Operators() as operators, passes_of_nothing():
                dispatched = dispatch(x, layer.ids, weights, layer.number, group)
                dispatched.by_expert()
    assert len(operators.names) == 3 + most, operators.names  # as on a GPU: ids in 32 bits, their tail, weights


@contextmanager
def passes_of_nothing() -> Iterator[None]:
    """Without the passes over rows, which are five to thirteen operators each."""
    with mock.patch.multiple(torch_path, gather_rows=lambda *_: 0, sum_rows=lambda *_: 0):
        yield


@pytest.mark.parametrize("world", [1, 4])
def test_launches_do_not_grow_with_experts_or_tokens(world: int) -> None:
    costs = []
    for tokens, local in ((64, 8), (700, 8), (64, 500)):
        with no_op_group(world) as group:
            passes = Layer(world, 8, group, tokens, local).costs("triton")
        costs.append([(len(each.operators), each.launches, each.messages) for each in passes])
    assert costs[0] == costs[1] == costs[2]


def test_python_memory_of_a_dispatch_over_4096_ranks() -> None:
    """Three sequences of a number for each rank: rows to them, rows from them, and one on the way there."""
    peaks = []
    for world in (8, 4096):
        with no_op_group(world) as group:
            layer = Layer(world, 8, group)
            x, weights = torch.ones(TOKENS, HIDDEN), torch.ones(layer.ids.shape)
            with layer.counting("torch"):
                for _ in range(3):
                    dispatch(x, layer.ids, weights, layer.number, group)
                tracemalloc.start()
                dispatch(x, layer.ids, weights, layer.number, group)
                peaks.append(tracemalloc.get_traced_memory()[1])
                tracemalloc.stop()
    assert peaks[1] - peaks[0] < 3.5 * 8 * 4096, peaks
