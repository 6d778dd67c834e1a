"""Which call of the process group a collective becomes: the same on every rank, whatever its split sizes."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tritoncomm import collective
from tritoncomm import mappings as m

Table = list[list[int]]


class Work:
    def wait(self) -> bool:
        return True


class RecordingGroup(dist.ProcessGroup):
    """A process group that moves nothing and keeps the names of the calls, with the split sizes of an all-to-all."""

    def __init__(self, rank: int, world: int) -> None:
        super().__init__(rank, world)
        self.calls: list[tuple[Any, ...]] = []

    def _get_backend(self, device: torch.device) -> Any:
        return self

    def name(self) -> str:
        return "nccl"

    def alltoall_base(self, out: Tensor, x: Tensor, received: list[int], sent: list[int], options: Any) -> Work:
        self.calls.append(("all_to_all", tuple(received), tuple(sent)))
        return Work()

    all_to_all_single = alltoall_base  # torch 2.15


def _recorded(name: str) -> Any:
    def call(self: RecordingGroup, *_: Any) -> Work:
        self.calls.append((name,))
        return Work()

    return call


FLAT = {"_allgather_base": "gather", "all_gather_single": "gather"} | dict.fromkeys(
    ("_reduce_scatter_base", "reduce_scatter_single"), "reduce_scatter"
)
for method, kind in FLAT.items():
    setattr(RecordingGroup, method, _recorded(kind))


def _rooted(name: str) -> Any:
    def call(self: RecordingGroup, tensors: list[Tensor], options: Any) -> Work:
        self.calls.append((name, options.rootRank, len(tensors[0])))
        return Work()

    return call


for method in ("broadcast", "reduce"):
    setattr(RecordingGroup, method, _rooted(method))


def calls_of(table: Table, given: tuple[bool, bool] = (True, True)) -> list[tuple[Any, ...]]:
    """The call of every rank, forward and backward; ``table[i][j]`` rows go from rank i to rank j."""
    made = []
    for rank, sent in enumerate(table):
        group = RecordingGroup(rank, len(table))
        received = [row[rank] for row in table]
        x = torch.zeros(sum(sent), 3, requires_grad=True)
        out = m.all_to_all(group, x, received if given[0] else None, sent if given[1] else None)
        assert out.shape == (sum(received), 3)
        out.sum().backward()
        collective.all_to_all(x.detach(), group, received if given[0] else None, sent if given[1] else None)
        assert len(group.calls) == 3
        forward, backward, again = group.calls
        assert (forward[1:], again) == (backward[:0:-1], forward)
        made.append(forward)
    return made


@st.composite
def tables(draw: st.DrawFn) -> Table:
    """Rows from every rank to every rank, often the same number in all of a rank's entries."""
    world = draw(st.integers(2, 4))
    sizes = st.integers(0, 3)
    even = sizes.map(lambda size: [size] * world)
    return draw(st.lists(even | st.lists(sizes, min_size=world, max_size=world), min_size=world, max_size=world))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(tables())
def test_ranks_make_the_same_all_to_all(table: Table) -> None:
    calls = calls_of(table)
    for rank, (name, received, sent) in enumerate(calls):
        assert (name, received, sent) == ("all_to_all", tuple(row[rank] for row in table), tuple(table[rank]))


def test_one_rank_of_uneven_ones_has_equal_sizes() -> None:
    """Rank 0 sends and receives the same number of rows everywhere, ranks 1 and 2 do not."""
    calls = calls_of([[2, 2, 2], [2, 1, 0], [2, 3, 4]])
    assert calls[0] == ("all_to_all", (2, 2, 2), (2, 2, 2))


@pytest.mark.parametrize("given", [(True, False), (False, True), (False, False)])
def test_the_even_form_is_for_ranks_without_sizes(given: tuple[bool, bool]) -> None:
    sizes = (2, 2) if any(given) else ()
    assert calls_of([[2, 2], [2, 2]], given) == [("all_to_all", sizes, sizes)] * 2


@pytest.mark.parametrize("sizes", [(2, 2, 2), None])
def test_gather_and_reduce_scatter_of_equal_sizes_are_flat(sizes: tuple[int, ...] | None) -> None:
    """Every rank is given the same list, so all of them agree."""
    assert gather_and_scatter(sizes) == [[("gather",), ("reduce_scatter",)]] * 3


@pytest.mark.parametrize("sizes", [(3, 2, 1), (0, 6, 0)])
def test_gather_and_reduce_scatter_of_other_sizes_are_a_call_for_every_shard_with_rows(sizes: tuple[int, ...]) -> None:
    roots = [(w, 3 * size) for w, size in enumerate(sizes) if size]
    calls = [(name, *root) for name in ("broadcast", "reduce") for root in roots]
    assert gather_and_scatter(sizes) == [calls] * 3


def gather_and_scatter(sizes: tuple[int, ...] | None) -> list[list[tuple[Any, ...]]]:
    """The calls of every rank: an all-gather, then a reduce-scatter."""
    groups = [RecordingGroup(rank, 3) for rank in range(3)]
    for rank, group in enumerate(groups):
        x = torch.zeros(sizes[rank] if sizes else 2, 3)
        m.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=sizes)
        m.reduce_scatter_to_sequence_parallel_region(torch.zeros(6, 3), group, sizes)
    return [group.calls for group in groups]
