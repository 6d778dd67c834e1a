"""Redistribution, counted: bytes moved outside the collectives and the most new memory held at once, as documented.

Where the pieces are is worked out here with ``torch.chunk``, and what may move from the table of docs/tensor.md.
"""

import itertools
import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pool import Pool
from test_passes import Traffic
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from tritoncomm import record
from tritoncomm.core import backend, eager
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ProcessGroup, ReplicaSpec, ShardSpec
from tritoncomm.tensor.dispatch import plain
from tritoncomm.tensor.distspec import _DistSpec

SHAPES = (
    (8, 4), (9, 7), (2, 5), (1, 8),
    (4, 8, 4), (5, 4, 6), (1, 6, 7), (3, 1, 9),
    (4, 2, 8, 4), (3, 4, 5, 2), (1, 1, 8, 3),
)  # fmt: skip


def ranks_of(group: TorchGroup) -> ProcessGroup:
    ranks = dist.get_process_group_ranks(group)
    return ProcessGroup(ranks=ranks, tp_degree=len(ranks))


def layouts(ndim: int, world: int) -> list[_DistSpec]:
    """Replica, every dim of the first three, the last one counted from the end, and several dims in both orders."""
    found = [ReplicaSpec(), ShardSpec([-1], [world]), *(ShardSpec([dim], [world]) for dim in range(min(ndim, 3)))]
    if world == 4:
        found += [ShardSpec([0, 1], [2, 2]), ShardSpec([-1, 0], [2, 2])]
    return found


def dims_of(spec: _DistSpec, ndim: int) -> list[int]:
    return [dim % ndim for dim in getattr(spec, "dims", ())]


def chunked(full: Tensor, spec: _DistSpec, rank: int) -> Tensor:
    """A rank's piece, by ``torch.chunk``; a view."""
    counts = getattr(spec, "num_partitions", ())
    for place, dim in enumerate(dims_of(spec, full.dim())):
        index = rank // math.prod(counts[place + 1 :]) % counts[place]
        pieces = full.chunk(counts[place], dim)
        full = pieces[index] if index < len(pieces) else full.narrow(dim, 0, 0)
    return full


class Live(Traffic):
    """Traffic, and the most bytes of new memory that were held at once."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._seen: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.allocated
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.allocated != before:
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    self._hold(x.untyped_storage())
        return result

    def _hold(self, storage: Any) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._seen:
            return
        self._seen.add(key)
        self.live += size
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._release, key, size)

    def _release(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live -= size


@contextmanager
def collectives_apart() -> Iterator[None]:
    """Collectives are not counted, and get copies: Gloo's thread lets go of a tensor a moment after ``wait()``."""
    originals = {name: getattr(backend, name) for name in ("all_gather", "all_gather_list", "all_to_all")}

    def apart(original: Any) -> Any:
        def call(out: Any, x: Tensor, *args: Any) -> None:
            with _disable_current_modes():
                received = tree_map_only(Tensor, torch.empty_like, out)
                original(received, x.clone(), *args)
                for to, came in zip(tree_leaves(out), tree_leaves(received), strict=True):
                    to.copy_(came)

        return call

    for name, original in originals.items():
        setattr(backend, name, apart(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(backend, name, original)


def test_memory_is_held_until_it_is_released() -> None:
    with Live() as counted:
        a = torch.zeros(100)
        view, b = a.view(10, 10)[2:], torch.zeros(50)
        del a
        assert counted.live == 600, "a view keeps it"
        del view, b
        assert counted.live == 0
        c = torch.zeros(25)
        d = c + 1
        assert (counted.live, counted.peak, counted.allocated) == (200, 600, 800)
    del c, d


def leads(shape: tuple[int, ...], dim: int) -> bool:
    return math.prod(shape[:dim]) == 1


def blocks_in_order(piece: Tensor, parts: list[Tensor]) -> bool:
    """Whether a contiguous piece, read from front to back, is the parts one after the other."""
    places = torch.cat([part.flatten() for part in parts])
    return torch.equal(places, piece.flatten())


def documented(shape: tuple[int, ...], old: _DistSpec, new: _DistSpec, rank: int, world: int) -> tuple[int, int]:
    """(elements read plus written, elements of new memory) by the tables of docs/tensor.md."""
    before, after = dims_of(old, len(shape)), dims_of(new, len(shape))
    places = torch.arange(math.prod(shape)).view(shape)
    mine, kept = chunked(places, old, rank), chunked(places, new, rank)
    n, k = mine.numel(), kept.numel()
    if (before, getattr(old, "num_partitions", ())) == (after, getattr(new, "num_partitions", ())):
        return 0, 0
    if not before:  # cut
        return 2 * k, k
    if not after:  # gather
        return (0, k) if len(before) == 1 and leads(shape, before[0]) else (2 * k, 2 * k)
    if len(before) == len(after) == 1:
        packs, unpacks = not leads(mine.shape, after[0]), not leads(kept.shape, before[0])
        return 2 * (n * packs + k * unpacks), max(n * packs + k, k * (1 + unpacks))
    packs = not blocks_in_order(mine, common(mine, [chunked(places, new, w) for w in range(world)]))
    unpacks = not blocks_in_order(kept, common(kept, [chunked(places, old, w) for w in range(world)]))
    return 2 * (n * packs + k * unpacks), max(n * packs + k, k * (1 + unpacks))


def common(piece: Tensor, others: list[Tensor]) -> list[Tensor]:
    """What the others have of a piece, all being parts of one numbering of the elements."""
    return [piece.flatten()[torch.isin(piece.flatten(), other.flatten())] for other in others]


def transitions(world: int, shapes: Any = SHAPES) -> Iterator[tuple[tuple[int, ...], _DistSpec, _DistSpec]]:
    for shape in shapes:
        for old, new in itertools.product(layouts(len(shape), world), repeat=2):
            yield shape, old, new


def run_floor(group: TorchGroup, shapes: Any) -> None:
    pg, world = ranks_of(group), group.size()
    rank = pg.tp_local_rank()
    for shape, old, new in transitions(world, shapes):
        x = ColoTensor(chunked(torch.ones(shape), old, rank).clone(), ColoTensorSpec(pg, old), shape).requires_grad_()
        x.redistribute(new)  # what is worked out once is not part of it
        with collectives_apart(), record.recording() as counted:
            with Live() as forward:
                y = plain(x.redistribute(new))
            gradient = torch.ones(y.shape)
            with Live() as backward:
                (grad,) = torch.autograd.grad(y, x, gradient)
        assert (y.shape, plain(grad).shape) == (chunked(torch.ones(shape), new, rank).shape, x.shape)
        told = f"{shape} {old} to {new}, rank {rank}"
        recorded = sum(count.packed for count in counted.values())
        assert recorded == forward.moved + backward.moved, f"{told}: the record says {recorded}"
        for which, found, (a, b) in (("forward", forward, (old, new)), ("backward", backward, (new, old))):
            moved, memory = (4 * elements for elements in documented(shape, a, b, rank, world))
            assert found.moved == moved, f"{told}: {which} moved {found.moved} bytes, not {moved}"
            assert found.peak <= memory, f"{told}: {which} held {found.peak} bytes, at most {memory}"


@pytest.mark.parametrize("shapes", [SHAPES[:4], SHAPES[4:8], SHAPES[8:]], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("world", [2, 4])
def test_every_transition_moves_and_holds_what_is_documented(pool: Pool, world: int, shapes: Any) -> None:
    pool.run(run_floor, shapes, world=world)


def run_wasteful(group: TorchGroup, which: str, waste: str) -> None:
    original = getattr(eager, which)

    def wasteful(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        extra = x.clone() if waste == "clone" else x.new_empty(x.shape)
        result = original(extra if waste == "clone" else x, *args, **kwargs)
        del extra
        return result

    setattr(eager, which, wasteful)
    told = "moved|record" if waste == "clone" else "held"
    try:
        with pytest.raises(AssertionError, match=told):
            run_floor(group, ((9, 8, 4),))
    finally:
        setattr(eager, which, original)


@pytest.mark.parametrize("waste", ["clone", "buffer"])
@pytest.mark.parametrize("which", ["gather", "exchange", "exchange_rows"])
def test_waste_is_seen(pool: Pool, which: str, waste: str) -> None:
    pool.run(run_wasteful, which, waste, world=4)


def test_the_documented_movements() -> None:
    """The table that ``documented`` was written from."""
    text = (Path(__file__).parents[1] / "docs" / "tensor.md").read_text()
    table = text[text.index("| movement |") :].split("\n\n")[0].splitlines()
    assert [[cell.strip() for cell in row.split("|")[1:5]] for row in table[2:]] == [
        ["cut", "one pass over the piece", "-", "the piece"],
        ["gather, dim 0", "-", "-", "the whole"],
        ["gather, another dim or several", "-", "one pass over the whole", "wire and whole"],
        ["all-to-all, new dim i, old dim j", "one pass unless i leads in memory", "one pass unless j leads",
         "wire and piece"],
        ["all-to-all, several dims", "one pass unless the blocks lie in order", "one pass unless they do",
         "wire and piece"],
    ]  # fmt: skip
