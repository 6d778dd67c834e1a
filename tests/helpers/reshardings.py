"""Drawn layouts, their local tensors by slicing, and an exchange between ranks of one process."""

import itertools
import math
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from bits import bits, random_bits
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm.reshard import Layout
from tritoncomm.reshard.execute import Executor
from tritoncomm.reshard.plan import Item, Participants, check_items

__all__ = [
    "DTYPES",
    "Cases",
    "Recorded",
    "boxes_of",
    "drawn_items",
    "drawn_layout",
    "lacking",
    "layouts",
    "local_of",
    "ramp",
    "run_cases",
    "same",
    "simulate",
    "values",
]

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64)
_CASTS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
Box = tuple[tuple[int, ...], tuple[int, ...]]


def layouts(group: ProcessGroup, shape: tuple[int, ...] = (8, 12)) -> tuple[Layout, Layout]:
    """Shards of dim 0 and of dim 1 over all ranks; of one rank, the halves of dim 1 the other way round."""
    every, (rows, columns) = range(group.size()), shape
    target = Layout.on_mesh(shape, every, [1])
    if group.size() == 1:
        half = columns // 2
        target = Layout.of_boxes(shape, {0: [((0, half), (rows, columns - half)), ((0, 0), (rows, half))]})
    return Layout.on_mesh(shape, every, [0]), target


def ramp(*shape: int) -> Tensor:
    return torch.arange(float(math.prod(shape))).view(shape)


def same(x: Any, expected: Tensor) -> None:
    assert x.shape == expected.shape
    assert torch.equal(bits(x), bits(expected))


class Cases(dict[str, Callable[[ProcessGroup], None]]):
    """Functions of a rank by their names; a decorator that adds one."""

    def __call__(self, function: Callable[[ProcessGroup], None]) -> Callable[[ProcessGroup], None]:
        self[function.__name__] = function
        return function


def run_cases(cases: Mapping[str, Callable[[ProcessGroup], None]], group: ProcessGroup) -> None:
    """Call every case on a rank; the error of the first that fails says its name."""
    for name, function in cases.items():
        try:
            function(group)
        except Exception as error:
            raise AssertionError(f"case {name}, {group.size()} ranks") from error


def drawn_layout(draw: random.Random, shape: tuple[int, ...], world: int) -> Layout:
    """On a mesh of one to three axes, uneven along a dim, or boxes of any tiling with replicas."""
    ranks = draw.sample(range(world), draw.randint(1, world))
    kind = draw.choice(["mesh", "mesh", "split", "boxes"]) if shape else draw.choice(["mesh", "boxes"])
    if kind == "mesh":
        axes = draw.choice([each for each in _meshes(world) if math.prod(each) <= len(ranks)])
        grid = torch.tensor(ranks[: math.prod(axes)]).view(axes)
        return Layout.on_mesh(shape, grid, [draw.choice([None, *range(-len(shape), len(shape))]) for _ in axes])
    if kind == "split":
        dim = draw.randrange(len(shape))
        bounds = sorted(draw.choices(range(shape[dim] + 1), k=len(ranks) - 1))
        sizes = [b - a for a, b in zip([0, *bounds], [*bounds, shape[dim]], strict=True)]
        return Layout.split(shape, dim, dict(zip(ranks, sizes, strict=True)))
    boxes: dict[int, list[Box]] = {rank: [] for rank in ranks}
    along = draw.randrange(len(shape)) if shape else 0
    for box in _tiling(draw, shape, along, draw.randint(1, 6)):
        for rank in draw.sample(ranks, min(len(ranks), draw.choice([1, 1, 2, 3]))):
            boxes[rank].append(box)
    return Layout.of_boxes(shape, boxes)


def _meshes(world: int) -> list[tuple[int, ...]]:
    sizes = range(1, world + 1)
    return (
        [(a,) for a in sizes]
        + [(a, b) for a in sizes for b in sizes if a * b <= world]
        + [(a, b, c) for a in (1, 2) for b in (1, 2) for c in (2,) if a * b * c <= world]
    )


def _tiling(draw: random.Random, shape: tuple[int, ...], along: int, count: int) -> list[Box]:
    """Slabs along one dim: what a rank has of them can be concatenated."""
    if not shape:
        return [((), ())]
    bounds = [0, *sorted(draw.choices(range(shape[along] + 1), k=count - 1)), shape[along]]
    slabs = []
    for low, high in itertools.pairwise(bounds):
        start, size = [0] * len(shape), list(shape)
        start[along], size[along] = low, high - low
        slabs.append((tuple(start), tuple(size)))
    return draw.sample(slabs, len(slabs))


def drawn_ranges(draw: random.Random, elements: int, world: int) -> dict[int, list[tuple[int, int]]]:
    """A tiling of up to ten ranges, of which a rank has any in any order."""
    edges = sorted(draw.choices(range(elements + 1), k=draw.randint(0, 9)))
    ranges: dict[int, list[tuple[int, int]]] = {rank: [] for rank in draw.sample(range(world), draw.randint(1, world))}
    for low, high in draw.sample(pairs := list(zip([0, *edges], [*edges, elements], strict=True)), len(pairs)):
        for rank in draw.sample(sorted(ranges), min(len(ranges), draw.choice([1, 1, 1, 2]))):
            ranges[rank].append((low, high))
    return ranges


def drawn_items(draw: random.Random, world: int) -> list[Item]:
    """One to three tensors of 0 to 5 dims."""
    items = []
    for index in range(draw.choice([1, 1, 2, 3])):
        shape = tuple(draw.randint(1, 6) for _ in range(draw.choice([0, 1, 2, 2, 3, 4, 5])))
        if draw.random() < 0.05 and shape:
            shape = (0, *shape[1:])
        dtype = result = draw.choice(DTYPES)
        if dtype in _CASTS and draw.random() < 0.5:
            result = draw.choice(_CASTS)
        source, target = drawn_layout(draw, shape, world), drawn_layout(draw, shape, world)
        has_grad = dtype in _CASTS
        items.append(Item(f"t{index}", source, target, dtype, result, has_grad))
    return items


def values(item: Item, seed: int) -> Tensor:
    """Any bits where they are copied, else small integers, which every dtype holds and adds exactly."""
    if item.dtype == item.result:
        return random_bits(item.source.shape, item.dtype, seed)
    made = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, item.source.shape, generator=made).to(item.dtype)


def boxes_of(layout: Layout, rank: int) -> list[tuple[tuple[slice, ...], tuple[slice, ...]]]:
    """Slices of the global tensor and of the local one."""
    result = []
    for owner, start, size, at in zip(*(x.tolist() for x in layout.boxes()), strict=True):
        if layout.ranks[owner] == rank:
            result.append(tuple(
                tuple(slice(a, a + n) for a, n in zip(first, size, strict=True)) for first in (start, at)
            ))  # fmt: skip
    return result


def local_of(layout: Layout, rank: int, full: Tensor) -> Tensor:
    """The local tensor by slicing; empty on a rank that the layout does not have."""
    shape = layout.local_shape(rank)
    if shape is None:
        return full.new_empty(0)
    local = full.new_empty(shape)
    for of_global, of_local in boxes_of(layout, rank):
        local[of_local] = full[of_global]
    return local


def lacking(item: Item, rank: int) -> int:
    """Bytes of a rank's target that it does not have, by masks."""
    owned = torch.zeros(item.source.shape, dtype=torch.bool)
    for of_global, _ in boxes_of(item.source, rank):
        owned[of_global] = True
    missing = sum(int((~owned[of_global]).sum()) for of_global, _ in boxes_of(item.target, rank))
    return missing * item.carried.itemsize


class Recorded(Executor):
    """An executor whose wires are kept, and delivered in a second pass."""

    wires: list[Tensor]
    delivered: list[Tensor] | None = None

    def exchange(self, bucket: Any, wire: Tensor, received: Tensor, name: str, asynchronous: bool) -> Any:
        if self.delivered is not None:
            received.copy_(self.delivered.pop(0))
        else:
            self.wires.append(wire.clone())


def simulate(
    items: Sequence[Item], tensors: Sequence[Sequence[Tensor]], bucket_bytes: int, sums: bool = False
) -> tuple[list[list[Tensor]], list[Recorded]]:
    """Results of every rank, and their plans; all ranks run one after the other, twice."""
    world = len(tensors)
    if not sums:  # sources of sums may overlap
        check_items(items, range(world), "simulate", "replicated")
    plans = [
        Recorded(items, Participants(None, tuple(range(world)), rank), bucket_bytes, "replicated", sums)
        for rank in range(world)
    ]
    for plan, mine in zip(plans, tensors, strict=True):
        plan.wires = []
        plan.run(mine, "simulate")
    active = [[bucket for bucket in plan.transfers.buckets if not bucket.is_quiet] for plan in plans]
    assert len({len(each) for each in active}) == 1
    for rank, plan in enumerate(plans):
        plan.delivered = []
        for place, bucket in enumerate(active[rank]):
            parts = [sender.wires[place].split(active[w][place].send.counts)[rank] for w, sender in enumerate(plans)]
            assert tuple(part.numel() for part in parts) == bucket.recv.counts
            plan.delivered.append(torch.cat(parts))
    return [list(plan.run(mine, "simulate")) for plan, mine in zip(plans, tensors, strict=True)], plans
