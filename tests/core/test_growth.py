"""Host cost of a call as the ranks grow: messages and functions entered, over a group that moves no data."""

import sys
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
from torch.distributed import ProcessGroup

from bench.hosts import no_op_group
from tritoncomm import collective
from tritoncomm.core import backend
from tritoncomm.core.passes import Pass
from tritoncomm.core.plan import chunk_sizes
from tritoncomm.recurrent import by_heads, conv_halo

WORLDS = (2, 4, 8, 64, 512, 4096)
LISTS = "allgather allreduce alltoall broadcast gather recv reduce reduce_scatter scatter send"
MESSAGES = (*LISTS.split(), backend._ALL_GATHER, backend._ALL_TO_ALL, backend._REDUCE_SCATTER)


class Cost(NamedTuple):
    """Collectives that a call starts, Python functions that it enters, and bytes of Python objects at its peak."""

    messages: Counter[str]
    functions: int
    memory: int


def counted(name: str, messages: Counter[str]) -> Callable[..., Any]:
    """The method of process groups of this name, which counts its calls."""
    method = getattr(ProcessGroup, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        messages[name] += 1
        return method(*args, **kwargs)

    return call


def _copy_nothing(*args: Any) -> int:
    return 0


def cost_of(call: Callable[[], Any]) -> Cost:
    for _ in range(3):  # plans are made in the first call of a kind
        call()
    messages, functions = Counter[str](), 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal functions
        functions += event == "call"

    with mock.patch.multiple(ProcessGroup, **{name: counted(name, messages) for name in MESSAGES}):
        sys.setprofile(count)
        try:
            call()
        finally:
            sys.setprofile(None)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        call()
        memory = tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()
    return Cost(messages, functions, memory)


@pytest.mark.parametrize("more", [0, 1], ids=["even", "uneven"])
def test_a_sum_is_two_messages_on_any_number_of_ranks(more: int) -> None:
    """An element more than the ranks divide is no broadcast for each of them, and no loop over them in Python."""
    costs = {}
    for world in WORLDS:
        # Of many parts torch's path is a loop; a kernel has a table of them.
        no_copies = mock.patch.multiple(Pass, _pack_blocks=_copy_nothing, _unpack_blocks=_copy_nothing)
        with no_copies, no_op_group(world, world // 2) as group:
            x = torch.zeros(64 * world + more, dtype=torch.bfloat16)
            costs[world] = cost_of(lambda: collective.all_reduce(x, group, wire=torch.bfloat16, exchange="flat"))  # noqa: B023
    expected = {backend._ALL_TO_ALL: 1, backend._ALL_GATHER: 1}
    assert all(cost.messages == expected for cost in costs.values()), costs
    assert max(cost.functions for cost in costs.values()) <= 1.05 * costs[8].functions, costs


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("shorter", ["first", "last"])
def test_a_gather_of_almost_equal_parts_is_one_message(shorter: str, dim: int) -> None:
    """Padding of an eighth of the bytes or less is no broadcast for each rank, wherever the shorter parts are."""
    costs = {}
    for world in WORLDS:
        sizes = [9] * world
        sizes[0 if shorter == "first" else -1] = 7
        no_copies = mock.patch.multiple(Pass, _unpack_blocks=_copy_nothing)
        with no_copies, no_op_group(world, world // 2) as group:
            x = torch.zeros((2, sizes[world // 2]) if dim else (sizes[world // 2], 2))
            costs[world] = cost_of(lambda: collective.all_gather(x, dim, group, sizes=sizes))  # noqa: B023
    assert all(cost.messages == {backend._ALL_GATHER: 1} for cost in costs.values()), costs
    assert max(cost.functions for cost in costs.values()) <= 1.05 * costs[8].functions, costs


def test_a_gather_whose_padding_would_be_more_is_not_padded() -> None:
    with no_op_group(8, 0) as group:
        x = torch.zeros(9)
        cost = cost_of(lambda: collective.all_gather(x, 0, group, sizes=[9, 0, *[9] * 6]))
    assert cost.messages == {"broadcast": 7}


def test_a_recurrent_layer_costs_the_same_on_any_number_of_ranks() -> None:
    """A convolution's halo and a recurrence by heads keep what they know of all ranks: nothing is made in a call."""
    convolutions, recurrences = {}, {}
    for world in WORLDS[1:]:
        no_copies = mock.patch.multiple(Pass, _pack_blocks=_copy_nothing, _unpack_blocks=_copy_nothing)
        with no_copies, no_op_group(world, world // 2) as group, torch.no_grad():
            convolve = conv_halo(lambda x, weight: x, group)
            x, weight = torch.zeros(1, 4, 8), torch.zeros(4, 1, 4)
            convolutions[world] = cost_of(lambda: convolve(x, weight))  # noqa: B023
            recur = by_heads(lambda q, k: q, group)
            q, k = torch.zeros(1, 2, world, 2), torch.zeros(1, 2, world, 2)
            recurrences[world] = cost_of(lambda: recur(q, k))  # noqa: B023
    for costs, messages in ((convolutions, 1), (recurrences, 2)):
        assert all(cost.messages == {backend._ALL_TO_ALL: messages} for cost in costs.values()), costs
        for cost in costs.values():
            assert cost.functions <= 1.05 * costs[8].functions, costs
            assert cost.memory <= 2 * costs[8].memory, costs


@pytest.mark.parametrize("world", [1, 2, 3, 8, 100])
def test_sizes_of_chunks(world: int) -> None:
    for size in (0, 1, 2, 7, 8, 9, 99, 100, 101, 1000):
        sizes = chunk_sizes(size, world)
        chunks = [len(chunk) for chunk in torch.zeros(size).chunk(world)] if size else []
        assert sizes == (*chunks, *[0] * (world - len(chunks)))
