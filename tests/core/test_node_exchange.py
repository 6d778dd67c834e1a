"""All-to-alls in two levels, over ranks of one machine that stand for nodes: the bits of the flat exchange."""

import random
from typing import Any
from unittest import mock

import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import ArgumentError, CommError, UnsupportedError, collective, record, variables
from tritoncomm.core import backend, node_exchange
from tritoncomm.core.node_exchange import Nodes

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.uint16)


def drawn(case: int, world: int) -> tuple[list[list[int]] | None, tuple[int, ...], torch.dtype]:
    """Rows from every rank to every rank, or None for equal ones; the shape of a row, or of a rank's tensor."""
    draw = random.Random(case)
    inner = tuple(draw.choice((1, 2, 3, 5)) for _ in range(draw.randrange(3)))
    dtype = draw.choice(DTYPES)
    if draw.random() < 0.4:
        return None, (world * draw.randrange(4), *inner), dtype
    most = draw.choice((1, 3, 40))
    return [[draw.randrange(most + 1) for _ in range(world)] for _ in range(world)], inner, dtype


def filled(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    size = torch.Size(shape).numel() * dtype.itemsize
    x = torch.randint(0, 2 if dtype is torch.bool else 256, (size,), generator=generator, dtype=torch.uint8)
    return x.view(dtype).view(shape) if size else torch.empty(shape, dtype=dtype)


def run_drawn(group: ProcessGroup, per_node: int, first: int, cases: int) -> None:
    rank, world = group.rank(), group.size()
    for case in range(first, first + cases):
        rows, shape, dtype = drawn(case, world)
        if rows is None:
            x, sizes = filled(shape, dtype, case * world + rank), (None, None)
        else:
            x = filled((sum(rows[rank]), *shape), dtype, case * world + rank)
            sizes = [row[rank] for row in rows], rows[rank]
        flat = collective.all_to_all(x, group, *sizes)
        with variables.NODE.override(per_node):
            found = collective.all_to_all(x, group, *sizes, exchange="node")
            asynchronous, handle = collective.all_to_all(x, group, *sizes, async_op=True, exchange="node")
        assert handle.wait() is asynchronous
        for each in (found, asynchronous):
            assert (each.shape, each.dtype, each.is_contiguous()) == (flat.shape, flat.dtype, True), case
            assert torch.equal(each.view(-1).view(torch.uint8), flat.view(-1).view(torch.uint8)), case


@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 4)])
def test_the_bits_of_the_flat_exchange(pool: Pool, world: int, per_node: int) -> None:
    pool.run(run_drawn, per_node, 0, 60, world=world)


@pytest.mark.slow
@pytest.mark.parametrize(("world", "per_node"), [(4, 2), (8, 4), (8, 2)])
def test_the_bits_of_the_flat_exchange_in_many_cases(pool: Pool, world: int, per_node: int) -> None:
    pool.run(run_drawn, per_node, 1000, 1000, world=world, timeout=900)


def peers_of_each_exchange(call: Any) -> list[int]:
    """Number of ranks, this one included, to which each all-to-all of the backend sends rows."""
    counted: list[int] = []
    original = backend.all_to_all

    def count(out: Tensor, x: Tensor, out_rows: Any, in_rows: Any, *rest: Any) -> Any:
        counted.append(sum(size > 0 for size in in_rows))
        return original(out, x, out_rows, in_rows, *rest)

    with mock.patch.object(backend, "all_to_all", count):
        call()
    return counted


def run_counted(group: ProcessGroup) -> None:
    world, rank = group.size(), group.rank()
    x = torch.arange(4.0 * world).view(2 * world, 2) + 100 * rank
    sizes = [2] * world, [2] * world
    with variables.NODE.override(4), record.recording() as counts:
        assert peers_of_each_exchange(lambda: collective.all_to_all(x, group, exchange="node")) == [2, 4]
    (line,) = counts.values()
    # To the other node 8 rows of 8 bytes; then to 3 ranks inside the node 4 rows each. Two passes read and write all.
    assert line.bytes_sent == 8 * (8 + 3 * 4)
    assert line.bytes_copied == 2 * 2 * x.nbytes
    with variables.NODE.override(4):  # uneven sizes: the numbers of rows travel first
        assert peers_of_each_exchange(lambda: collective.all_to_all(x, group, *sizes, exchange="node")) == [2, 2, 4]


def test_messages_are_those_of_two_levels(pool: Pool) -> None:
    pool.run(run_counted, world=8)


def run_choices(group: ProcessGroup) -> None:
    world = group.size()
    x = torch.ones(world, 2)

    def exchanges(exchange: Any, per_node: int) -> int:
        with variables.NODE.override(per_node):
            return len(peers_of_each_exchange(lambda: collective.all_to_all(x, group, exchange=exchange)))

    assert exchanges("flat", 2) == 1
    assert exchanges("node", 2) == 2
    assert exchanges("node", 4) == 1  # one node
    assert exchanges("node", 1) == 1  # one rank per node
    with pytest.raises(ArgumentError, match=r"all_to_all: .* set TRITONCOMM_NODE"):
        exchanges("node", 0)
    with pytest.raises(UnsupportedError, match=r"equally many ranks on each node.*nodes \[0, 0, 0, 1\]"):
        exchanges("node", 3)
    with pytest.raises(ArgumentError, match="exchange must be 'flat' or 'node', not 'two'"):
        exchanges("two", 2)
    with pytest.raises(ArgumentError, match="not 'auto'"):  # no network was at hand to measure a limit
        exchanges("auto", 2)


def test_two_levels_where_they_are_asked_for_and_possible(pool: Pool) -> None:
    pool.run(run_choices, world=4)


def run_disagreement(group: ProcessGroup) -> None:
    exchange: Any = "node" if group.rank() else "flat"
    with variables.NODE.override(2), variables.CHECK.override(True), pytest.raises(CommError, match="exchange"):
        collective.all_to_all(torch.ones(4, 2), group, exchange=exchange)


def test_check_mode_names_ranks_that_take_different_ways(pool: Pool) -> None:
    pool.run(run_disagreement, world=4)


def test_nodes_spread_counts_over_the_group() -> None:
    nodes = Nodes(count=2, size=3, node=1, local=2)
    assert nodes.across([7, 8]) == (0, 0, 7, 0, 0, 8)
    assert nodes.inside([1, 2, 3]) == (0, 0, 0, 1, 2, 3)


def run_by_launcher(group: ProcessGroup) -> None:
    ranks = {
        "RANK": group.rank(),
        "WORLD_SIZE": 4,
        "LOCAL_RANK": 0,
        "LOCAL_WORLD_SIZE": 2,
        "TORCHELASTIC_RUN_ID": "job",
    }
    read = node_exchange._launched_per_node.__wrapped__  # variables of this process's launcher are read once
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(node_exchange, "_launched_per_node", read)
        for name, value in ranks.items():
            patch.setenv(name, str(value))
        assert Nodes.of(group, "f") == (2, 2, group.rank() // 2, group.rank() % 2)
        with variables.NODE.override(4):
            assert Nodes.of(group, "f") == (1, 4, 0, group.rank())


def test_the_variable_counts_before_the_launcher(pool: Pool) -> None:
    pool.run(run_by_launcher, world=4)
