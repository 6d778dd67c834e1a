"""Ranges of the flattened tensor: drawn ones against slices of it, on both sides, and several tensors in one buffer."""

import math
import random

import pytest
import torch
from reshardings import drawn_layout, drawn_ranges, local_of, simulate
from torch import Tensor

from tritoncomm.errors import ArgumentError, ShapeError
from tritoncomm.reshard import Layout, reshard_plan
from tritoncomm.reshard.plan import Item

INT = torch.int32


def part_of(full: Tensor, ranges: dict[int, list[tuple[int, int]]], rank: int) -> Tensor:
    return torch.cat([full.new_empty(0), *(full.flatten()[low:high] for low, high in ranges.get(rank, []))])


def check(seed: int) -> int:
    draw = random.Random(seed)
    world = draw.randint(1, 5)
    shape = tuple(draw.randint(1, 6) for _ in range(draw.choice([0, 1, 2, 2, 3, 4])))
    full = torch.arange(math.prod(shape), dtype=INT).view(shape)
    ranges = [drawn_ranges(draw, full.numel(), world) for _ in range(2)]
    flat, other = (Layout.flat(shape, each) for each in ranges)
    assert flat.problem == ""
    boxes = max((len(flat.holders.boxes_of(place)) for place in range(len(flat.ranks))), default=0)
    assert boxes <= max(map(len, ranges[0].values())) * max(1, 2 * len(shape) - 1)
    middle = drawn_layout(draw, shape, world)
    of = {
        flat: lambda rank: part_of(full, ranges[0], rank), other: lambda rank: part_of(full, ranges[1], rank),
        middle: lambda rank: local_of(middle, rank, full),
    }  # fmt: skip
    for source, target in ((flat, middle), (middle, flat), (flat, other)):
        item = Item("x", source, target, INT, INT)
        results, _ = simulate([item], [[of[source](rank)] for rank in range(world)], draw.choice([2**20, 1024]))
        for rank, (result,) in enumerate(results):
            if target.local_shape(rank) is not None:
                assert torch.equal(result, of[target](rank)), (seed, rank, source, target)
    return sum(map(len, ranges[0].values())) + sum(map(len, ranges[1].values()))


def test_drawn_ranges() -> None:
    assert sum(map(check, range(40))) > 200


@pytest.mark.slow
def test_5000_drawn_ranges() -> None:
    assert sum(map(check, range(1000, 1700))) > 5000


def test_a_striped_sequence_as_ranges() -> None:
    """The side with ranges is viewed as rows, too."""
    shape, world = (11, 3), 3
    full = torch.arange(33, dtype=INT).view(shape)
    ranges = {0: [(20, 33)], 2: [(0, 7), (7, 20)]}
    flat, striped = Layout.flat(shape, ranges), Layout.sequence(shape, 0, "striped", range(world))
    for source, target in ((flat, striped), (striped, flat)):
        local = {flat: lambda r: part_of(full, ranges, r), striped: lambda r: full[r::3]}
        results, _ = simulate([Item("x", source, target, INT, INT)], [[local[source](r)] for r in range(world)], 2**20)
        for rank, (result,) in enumerate(results):
            if target.local_shape(rank) is not None:
                assert torch.equal(result, local[target](rank))


def test_equal_layouts() -> None:
    assert Layout.flat((8,), {0: [(0, 4)], 1: [(4, 8)]}) == Layout.on_mesh((8,), [0, 1], [0])
    rows = Layout.flat((8, 2), {0: [(0, 8)], 1: [(8, 16)]})
    assert rows.local_shape(1) == (8,)
    assert rows != Layout.on_mesh((8, 2), [0, 1], [0])


def test_a_range_of_a_large_tensor_is_a_few_boxes() -> None:
    shape = (64, 4096, 8192)
    size = math.prod(shape) // 512
    flat = Layout.flat(shape, {rank: [(rank * size + 5, (rank + 1) * size + 5)] for rank in range(511)})
    assert len(flat.holders.owner) <= 5 * 511
    plan = reshard_plan({"w": torch.bfloat16}, flat.of_boxes(shape, {0: [((0, 0, 0), shape)]}), flat, ranks=range(512))
    assert len(plan.transfers.buckets[0].send.tensor) <= 5 * 511


def test_ranges_that_are_none() -> None:
    for ranges, kind in (
        ({0: [(0, 9)]}, ShapeError), ({0: [(5, 4)]}, ShapeError), ({0: [(-1, 4)]}, ShapeError),
        ({0: [(1, 2, 3)]}, ShapeError), ({0: [(0, "4")]}, ArgumentError), ({0: 3}, ArgumentError),
        (None, ArgumentError),
    ):  # fmt: skip
        with pytest.raises(kind, match=r"Layout\.flat"):
            Layout.flat((2, 4), ranges)  # pyright: ignore[reportArgumentType]
