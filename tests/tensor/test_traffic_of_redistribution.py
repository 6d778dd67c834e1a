"""Redistribution: bytes copied outside the collectives and peak new memory, as documented.

The shards are computed with ``torch.chunk``, the limits from the table of docs/tensor.md.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pool import Pool
from redistributions import SHAPES, by_reshard, documented, transitions
from shards import ranks_of, shard_of, sharded
from torch import Tensor
from torch.distributed import ProcessGroup as TorchGroup
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only
from traffic import Held, Traffic

from tritoncomm import record
from tritoncomm.core import backend, eager
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, ShardSpec
from tritoncomm.tensor.dispatch import plain


class Live(Traffic):
    """Traffic, and the new memory that is held."""

    def __init__(self) -> None:
        super().__init__()
        self.held = Held()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before = self.allocated
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if self.allocated != before:
            for x in tree_leaves(result):
                if isinstance(x, Tensor):
                    self.held.add(x)
        return result


@contextmanager
def collectives_apart() -> Iterator[None]:
    """Exclude collectives, which get copies: Gloo's thread releases a tensor some time after ``wait()``."""
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
        assert counted.held.live == 600, "a view keeps it"
        del view, b
        assert counted.held.live == 0
        c = torch.zeros(25)
        d = c + 1
        assert (counted.held.live, counted.held.peak, counted.allocated) == (200, 600, 800)
    del c, d


def run_floor(group: TorchGroup, shapes: Any) -> None:
    pg, world = ranks_of(group), group.size()
    rank = pg.tp_local_rank()
    for shape, old, new in transitions(world, shapes):
        x = ColoTensor(shard_of(torch.ones(shape), old, rank), ColoTensorSpec(pg, old), shape).requires_grad_()
        warm = x.redistribute(new)
        torch.autograd.grad(warm, x, torch.ones_like(warm))  # the first call compares plans, in memory of its own
        with collectives_apart(), record.recording() as counted:
            with Live() as forward:
                y = plain(x.redistribute(new))
            gradient = torch.ones(y.shape)
            with Live() as backward:
                (grad,) = torch.autograd.grad(y, x, gradient)
        assert (y.shape, plain(grad).shape) == (shard_of(torch.ones(shape), new, rank).shape, x.shape)
        context = f"{shape} {old} to {new}, rank {rank}"
        recorded = sum(count.bytes_copied for count in counted.values())
        assert recorded == forward.moved + backward.moved, f"{context}: the record has {recorded}"
        for which, traffic, (a, b) in (("forward", forward, (old, new)), ("backward", backward, (new, old))):
            copied, memory = (4 * elements for elements in documented(shape, a, b, rank, world))
            fits = traffic.moved <= copied if by_reshard(old, new) else traffic.moved == copied
            assert fits, f"{context}: {which} copied {traffic.moved} bytes, not {copied}"
            peak = traffic.held.peak
            assert peak <= memory, f"{context}: {which} peaked at {peak} bytes, at most {memory}"


@pytest.mark.parametrize("shapes", [SHAPES[:4], SHAPES[4:8], SHAPES[8:]], ids=["2d", "3d", "4d"])
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_every_transition_copies_and_allocates_as_documented(pool: Pool, world: int, shapes: Any) -> None:
    pool.run(run_floor, shapes, world=world)


@pytest.mark.ranks(2, 4)
def test_sums_of_products_copy_nothing(group: TorchGroup) -> None:
    """Partial products and the gradients of replicated factors are summed in place; other gradients are left alone."""
    pg, world = ranks_of(group), group.size()
    columns = sharded(torch.ones(2 * world, 3), ShardSpec([0], [world]), pg).requires_grad_()
    rows = sharded(torch.ones(5, 2 * world), ShardSpec([-1], [world]), pg).requires_grad_()
    for bias in (None, torch.ones(5)):
        x = torch.ones(2, 4, 3, requires_grad=True)
        with record.recording() as counted:
            hidden = F.linear(x, columns)  # pyright: ignore[reportArgumentType]
            F.linear(hidden, rows, bias).sum().backward()  # pyright: ignore[reportArgumentType]
        names = {name for name, _ in counted}
        reduced = {"reduce_from_tensor_model_parallel_region", "copy_to_tensor_model_parallel_region.backward"}
        assert reduced <= names, names
        assert sum(count.bytes_copied for count in counted.values()) == 0, counted
        assert torch.equal(x.grad, torch.full_like(x, 2.0 * world * 5))  # pyright: ignore[reportArgumentType]
    shift, shard = torch.ones(1, 3, requires_grad=True), sharded(torch.ones(world, 3), ShardSpec([0], [world]), pg)
    leaf = shard.requires_grad_()
    (((leaf * 1) + shift) * 1).sum().backward()  # one row a rank: the gradients of both are one memory
    assert torch.equal(shift.grad, torch.full((1, 3), float(world)))  # pyright: ignore[reportArgumentType]
    assert torch.equal(plain(leaf.grad), torch.ones(1, 3))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("waste", ["clone", "buffer"])
@pytest.mark.parametrize("which", ["all_gather", "all_to_all"])
def test_waste_is_detected(group: TorchGroup, which: str, waste: str) -> None:
    original = getattr(eager, which)

    def wasteful(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        extra = x.clone() if waste == "clone" else x.new_empty(x.shape)
        result = original(extra if waste == "clone" else x, *args, **kwargs)
        del extra
        return result

    setattr(eager, which, wasteful)
    message = "copied|record" if waste == "clone" else "peaked"
    try:
        with pytest.raises(AssertionError, match=message):
            run_floor(group, ((9, 8, 4),))
    finally:
        setattr(eager, which, original)


def test_the_documented_steps() -> None:
    """The table that ``documented`` was written from."""
    text = (Path(__file__).parents[2] / "docs" / "tensor.md").read_text()
    table = text[text.index("| step |") :].split("\n\n")[0].splitlines()
    assert [[cell.strip() for cell in row.split("|")[1:5]] for row in table[2:]] == [
        ["split", "one pass over the shard", "-", "the shard"],
        ["all-gather, dim 0", "-", "-", "the global tensor"],
        ["all-gather, another dim or several", "-", "one pass over the global tensor", "wire and global tensor"],
        ["all-to-all, new dim i, old dim j", "one pass unless i is outermost in memory", "one pass unless j is",
         "wire and shard"],
        ["all-to-all, several dims", "one pass at most", "one pass at most", "wires of both sides and shard"],
    ]  # fmt: skip
