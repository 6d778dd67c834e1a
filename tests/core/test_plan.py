"""Shapes and bytes of collectives, against tensors that are really split and concatenated, element by element."""

import random

import pytest
import torch
from torch import Tensor

from tritoncomm.core import plan
from tritoncomm.errors import ArgumentError, ShapeError

ITEM = 4  # of float32
SEEDS = range(200)


def drawn(seed: int) -> tuple[random.Random, int, list[int], int, int]:
    """A generator, a world, a shape, and two different dims of it."""
    draw = random.Random(seed)
    world, dims = draw.choice((1, 2, 3, 4, 8)), draw.randint(2, 4)
    one, other = draw.sample(range(dims), 2)
    return draw, world, [draw.randint(1, 4) for _ in range(dims)], one, other


def sizes_of(draw: random.Random, world: int) -> list[int]:
    return [draw.randint(0, 3) for _ in range(world)]


def filled(shape: list[int], dim: int, size: int) -> Tensor:
    return torch.empty([size if axis == dim else each for axis, each in enumerate(shape)])


def in_order(shards: list[Tensor], dim: int) -> bool:
    """Whether contiguous shards one after the other have the order of their concatenation."""
    counts = torch.arange(sum(shard.numel() for shard in shards)).split([shard.numel() for shard in shards])
    full = torch.cat([count.view(shard.shape) for count, shard in zip(counts, shards, strict=True)], dim)
    return torch.equal(full.flatten(), torch.arange(full.numel()))


@pytest.mark.parametrize("even", [True, False], ids=["even", "sizes"])
def test_all_gather_and_its_adjoint(even: bool) -> None:
    for seed in SEEDS:
        draw, world, shape, dim, _ = drawn(seed)
        sizes = [shape[dim]] * world if even else sizes_of(draw, world)
        shards = [filled(shape, dim, size) for size in sizes]
        full, given = torch.cat(shards, dim), None if even else tuple(sizes)
        for rank, mine in enumerate(shards):
            planned = plan.all_gather(tuple(mine.shape), ITEM, dim - draw.choice((0, mine.dim())), world, rank, given)
            assert planned.shape == tuple(full.shape)
            assert planned.bytes_sent == mine.nbytes * (world - 1)
            assert planned.bytes_received == full.nbytes - mine.nbytes
            assert planned.recv_counts == (() if even else tuple(shard.numel() for shard in shards))
            assert not planned.in_order or in_order(shards, dim)
            adjoint = plan.reduce_scatter(tuple(full.shape), ITEM, dim, world, rank, given)
            assert adjoint.shape == tuple(mine.shape)
            assert adjoint.bytes_sent == full.nbytes * (world - 1) // world
            assert adjoint.send_counts == planned.recv_counts
            start, size = plan.split(tuple(full.shape), dim, world, rank, given)
            assert (start, size) == (sum(sizes[:rank]), sizes[rank])


@pytest.mark.parametrize("even", [True, False], ids=["even", "sizes"])
def test_all_to_all(even: bool) -> None:
    for seed in SEEDS:
        draw, world, shape, split, gather = drawn(seed)
        widths = [shape[split]] * world if even else sizes_of(draw, world)  # of the split dim, by receiver
        lengths = [shape[gather]] * world if even else sizes_of(draw, world)  # of the gathered dim, by sender
        inputs = [filled(list(filled(shape, split, sum(widths)).shape), gather, length) for length in lengths]
        given = (None, None) if even else (tuple(widths), tuple(lengths))
        for rank, mine in enumerate(inputs):
            planned = plan.all_to_all(tuple(mine.shape), ITEM, split, gather, world, rank, *given)
            sent = mine.split(widths, split)
            received = [x.split(widths, split)[rank] for x in inputs]
            assert planned.shape == tuple(torch.cat(received, gather).shape)
            assert planned.bytes_sent == sum(x.nbytes for peer, x in enumerate(sent) if peer != rank)
            assert planned.bytes_received == sum(x.nbytes for peer, x in enumerate(received) if peer != rank)
            assert planned.send_counts == (() if even else tuple(x.numel() for x in sent))
            assert planned.recv_counts == (() if even else tuple(x.numel() for x in received))
            assert not planned.in_order or in_order(received, gather)


def test_all_to_all_of_rows() -> None:
    for seed in SEEDS:
        draw, world, shape, _, _ = drawn(seed)
        rows = [sizes_of(draw, world) for _ in range(world)]  # [sender][receiver]
        for rank in range(world):
            sent, received = rows[rank], [rows[peer][rank] for peer in range(world)]
            mine = filled(shape, 0, sum(sent))
            row = torch.empty(shape[1:]).numel()
            planned = plan.all_to_all_single(tuple(mine.shape), ITEM, world, rank, tuple(received), tuple(sent))
            assert planned.shape == (sum(received), *shape[1:])
            assert planned.bytes_sent == (sum(sent) - sent[rank]) * row * ITEM
            assert planned.bytes_received == (sum(received) - received[rank]) * row * ITEM
            assert (planned.send_sizes, planned.recv_sizes) == (tuple(sent), tuple(received))


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(ShapeError, match="does not divide"):
        plan.reduce_scatter((5, 2), ITEM, 0, 2, 0)
    with pytest.raises(ShapeError, match="do not add up"):
        plan.split((5, 2), 0, 2, 0, (2, 2))
    with pytest.raises(ShapeError, match="this rank's being 5"):
        plan.all_gather((5, 2), ITEM, 0, 2, 1, (5, 4))
    with pytest.raises(ShapeError, match="out of range"):
        plan.all_to_all((4, 4), ITEM, 0, 2, 2, 0)
    with pytest.raises(ArgumentError, match="two different dims"):
        plan.all_to_all((4, 4), ITEM, 1, -1, 2, 0, (2, 2))
    with pytest.raises(ShapeError, match="0-dim"):
        plan.all_to_all_single((), ITEM, 2, 0)


def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather() -> None:
    shard = plan.reduce_scatter((8, 3), ITEM, 0, 4, 0)
    back = plan.all_gather(shard.shape, ITEM, 0, 4, 0)
    assert plan.all_reduce_bytes(8 * 3 * ITEM, 4) == shard.bytes_sent + back.bytes_sent
