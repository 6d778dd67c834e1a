"""Every mapping, helper and autograd class against closed forms; every rank knows what all ranks hold."""

import itertools
import weakref
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mapping_cases import (
    FORMS,
    LAYOUTS,
    MAPPINGS,
    check_mapping,
    cut,
    fits,
    held,
    laid_out,
    rows_exchanged,
    same,
    summed,
    value,
)
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings as m
from tritoncomm.core import ops
from tritoncomm.errors import GroupError

COPIES = ["float32", "bfloat16", "float16", "float64", "int64", "bool", "float8_e4m3fn", "complex64", "int16", "uint16"]
SUMS = ["float32", "bfloat16", "float16", "float64", "int64", "complex64"]


HELPERS: dict[str, tuple[Any, str]] = {
    "_reduce": (m._reduce, "sum"),
    "_split_along_last_dim": (m._split_along_last_dim, "split last"),
    "_split_along_first_dim": (m._split_along_first_dim, "split first"),
    "_gather_along_last_dim": (m._gather_along_last_dim, "join last"),
    "_gather_along_first_dim": (m._gather_along_first_dim, "join first"),
    "_reduce_scatter_along_last_dim": (m._reduce_scatter_along_last_dim, "sum, split last"),
    "_reduce_scatter_along_first_dim": (m._reduce_scatter_along_first_dim, "sum, split first"),
}
# class: (arguments after group, forward, backward)
CLASSES: dict[str, tuple[tuple[Any, ...], str, str]] = {
    "_CopyToModelParallelRegion": ((), "identity", "sum"),
    "_ReduceFromModelParallelRegion": ((), "sum", "identity"),
    "_ScatterToModelParallelRegion": ((), "split last", "join last"),
    "_GatherFromModelParallelRegion": ((), "join last", "split last"),
    "_ScatterToSequenceParallelRegion": ((), "split first", "join first"),
    "_GatherFromSequenceParallelRegion": ((True, None, False), "join first", "sum, split first"),
    "_ReduceScatterToSequenceParallelRegion": ((None, False), "sum, split first", "join first"),
    "_AllGatherFromTensorParallelRegion": ((), "join last", "sum, split last"),
    "_ReduceScatterToTensorParallelRegion": ((), "sum, split last", "join last"),
}
SHAPES = [(16,), (8, 16), (8, 3, 16), (8, 2, 3, 8), (8, 1, 2, 1, 8), (1, 8), (0, 8)]


def run_mappings(group: ProcessGroup, name: str, dtypes: list[str], shapes: list[tuple[int, ...]], path: str) -> int:
    forward = MAPPINGS[name][1]
    cases = 0
    for shape, dtype in itertools.product(shapes, dtypes):
        if not fits(forward, shape, group.size()):
            continue
        adds = "sum" in forward or "sum" in MAPPINGS[name][2]
        if "sum" in forward and dtype not in SUMS:
            continue
        for layout in LAYOUTS if not (adds and dtype != "float32") else LAYOUTS[:2]:
            check_mapping(group, name, shape, dtype, layout, path)
            cases += 1
    return cases


@pytest.mark.parametrize("world", [1, 2, 4, (1, 3)], ids=["world1", "world2", "world4", "ranks1and3"])
@pytest.mark.parametrize("name", MAPPINGS)
def test_forward_and_backward(pool: Pool, name: str, world: Any) -> None:
    several = world in (2, 4)
    dtypes = COPIES if several else ["float32", "bool"]
    shapes = SHAPES if world == 2 else SHAPES[1:3] + SHAPES[-2:]
    cases = pool.run(run_mappings, name, dtypes, shapes, "torch", world=world)
    assert min(cases) >= 2


@pytest.mark.parametrize(
    "name",
    [
        "gather_tp",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("rs_last", "sp2hp", "hp2sp", "reduce_scatter_sp")),
    ],
)
def test_eight_ranks(pool: Pool, name: str) -> None:
    assert min(pool.run(run_mappings, name, ["float32", "bfloat16"], [(8, 16)], "torch", world=8)) >= 4


@pytest.mark.ranks(1, 2, 4)
def test_underscore_helpers(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    for name, (call, form) in HELPERS.items():
        for shape, layout, dtype in itertools.product(
            [(8,), (4, 8), (8, 3, 4)], LAYOUTS, ["float32", "bfloat16", "int64"]
        ):
            parts = held(group, shape, dtype, False, 0)
            x = laid_out(parts[rank], layout)
            before = x.clone()
            out = call(x, group)
            same(out, FORMS[form](parts, rank), (name, shape, layout))
            if name == "_reduce" and x.is_contiguous():
                assert out is x
            else:
                same(x, before, (name, shape, layout))
            if name == "_split_along_first_dim" and x.is_contiguous() and world > 1:
                assert out.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
            assert out.is_contiguous() or world == 1


@pytest.mark.ranks(1, 2, 4)
def test_autograd_classes_and_stand_in_ctx(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    shape = (4, 3, 8)
    for name, (extra, forward, backward) in CLASSES.items():
        cls = getattr(m, name)
        parts = held(group, shape, "float32", False, 0)
        wanted = FORMS[forward](parts, rank)
        same(cls.symbolic(None, parts[rank].clone(), group), wanted, name)
        leaf = parts[rank].clone().requires_grad_()
        out = cls.apply(leaf, group, *extra)
        same(out.detach(), wanted, name)
        grads = held(group, tuple(wanted.shape), "float32", False, 50)
        out.backward(grads[rank].clone())
        back = FORMS[backward](grads, rank)
        assert leaf.grad is not None
        same(leaf.grad, back, name)
        ctx = SimpleNamespace(
            group=group, tensor_parallel_output_grad=True, output_split_sizes=None, input_split_sizes=None,
            use_global_buffer=False,
        )  # fmt: skip
        found = cls.backward(ctx, grads[rank].clone())
        assert len(found) == 2 + len(extra)
        assert all(item is None for item in found[1:])
        same(found[0], back, name)
        seen = SimpleNamespace()
        cls.forward(seen, parts[rank].clone(), group, *extra)
        assert seen.group is group
        names = {"_GatherFromSequenceParallelRegion": ("tensor_parallel_output_grad", "output_split_sizes",
                 "use_global_buffer"), "_ReduceScatterToSequenceParallelRegion": ("input_split_sizes",
                 "use_global_buffer")}.get(name, ())  # fmt: skip
        assert all(hasattr(seen, attribute) for attribute in names)
    ctx = SimpleNamespace(group=group, output_split_sizes=None, input_split_sizes=None)
    grads = held(group, shape, "float32", False, 50)
    found = m._AllToAll.backward(ctx, grads[rank])
    assert [item is None for item in found] == [True, False, True, True, True]
    same(found[1], rows_exchanged(grads, rank), "all_to_all")
    seen = SimpleNamespace()
    m._AllToAll.forward(seen, group, grads[rank], None, None)
    assert (seen.group, seen.output_split_sizes, seen.input_split_sizes) == (group, None, None)
    ctx = SimpleNamespace(
        group=group, tensor_parallel_output_grad=False, output_split_sizes=None, use_global_buffer=False
    )
    grads = held(group, shape, "float32", True, 70)
    found = m._GatherFromSequenceParallelRegion.backward(ctx, grads[rank])
    same(found[0], cut(grads[rank], world, rank, 0), "gather_sp(False)")


@pytest.mark.ranks(1)
def test_one_rank_copies_nothing(group: ProcessGroup) -> None:
    for name, (call, _, _) in MAPPINGS.items():
        for x in (torch.ones(4, 6), torch.ones(6, 4).t(), torch.ones(4, 6, requires_grad=True)):
            out = call(x, group)
            assert out.data_ptr() == x.data_ptr(), name
            if not x.requires_grad:
                assert out.shape == x.shape
    x = torch.ones(2, 3, 4)
    for call in (m.all_to_all_sp2hp, m.all_to_all_hp2sp):
        out = call(x, group)
        assert out.shape == (6, 4)
        assert out.data_ptr() == x.data_ptr()
    for name, (call, _) in HELPERS.items():
        assert call(x, group) is x, name
    # as in the reference, nothing is checked where nothing moves
    m.scatter_to_tensor_model_parallel_region(torch.ones(3), group)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["list", "tuple", "numpy"])
def test_split_sizes(group: ProcessGroup, kind: str) -> None:
    rank, world = group.rank(), group.size()
    for sizes in [(3, 1), (0, 4), (2, 2)] if world == 2 else [(3, 1, 0, 2), (2, 2, 2, 2), (0, 0, 5, 0)]:
        given: Any = np.array(sizes) if kind == "numpy" else list(sizes) if kind == "list" else sizes
        for shape, layout in itertools.product([(), (3,), (2, 3)], LAYOUTS[:3]):
            full = value((sum(sizes), *shape), "float32", 0)
            x = laid_out(full.split(list(sizes))[rank], layout).requires_grad_()
            out = m.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=given)
            same(out.detach(), full, (sizes, shape))
            assert out._base is None
            grads = held(group, tuple(full.shape), "float32", False, 20)
            out.backward(grads[rank])
            assert x.grad is not None
            same(x.grad, summed(grads).split(list(sizes))[rank], (sizes, shape))
            # the same gradient on every rank
            x = laid_out(full.split(list(sizes))[rank], layout).requires_grad_()
            m.gather_from_sequence_parallel_region(x, False, group, given).backward(grads[0])
            assert x.grad is not None
            same(x.grad, grads[0].split(list(sizes))[rank], (sizes, shape))
            # and the way back
            y = laid_out(grads[rank], layout).requires_grad_()
            out = m.reduce_scatter_to_sequence_parallel_region(y, group, given)
            same(out.detach(), summed(grads).split(list(sizes))[rank], (sizes, shape))
            pieces = full.split(list(sizes))
            out.backward(pieces[rank])
            assert y.grad is not None
            same(y.grad, full, (sizes, shape))
            same(m._gather_along_first_dim(pieces[rank], group, given), full, sizes)
            same(
                m._reduce_scatter_along_first_dim(grads[rank], group, given),
                summed(grads).split(list(sizes))[rank],
                sizes,
            )


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["list", "numpy"])
def test_all_to_all_sizes(group: ProcessGroup, kind: str) -> None:
    rank, world = group.rank(), group.size()
    made = np.array if kind == "numpy" else list
    tables = [
        [[(a + 2 * b) % 3 for b in range(world)] for a in range(world)],
        [[int(a == b) for b in range(world)] for a in range(world)],
        [[2] * world] * world,
        [[4 if b == 0 else 0 for b in range(world)] for _ in range(world)],
    ]
    for table in tables:  # table[a][b]: rows from rank a to rank b
        into, out_of = table[rank], [table[a][rank] for a in range(world)]
        parts = [value((sum(row), 3), "float32", a) for a, row in enumerate(table)]
        pieces = [part.split(row) for part, row in zip(parts, table, strict=True)]
        wanted = torch.cat([pieces[a][rank] for a in range(world)])
        for stream, layout in itertools.product((False, True), LAYOUTS[:3]):
            x = laid_out(parts[rank], layout).requires_grad_()
            out = m.all_to_all(group, x, made(out_of), made(into), use_nccl_stream=stream)
            same(out.detach(), wanted, (table, layout))
            out.backward(2 * out.detach())
            assert x.grad is not None
            same(x.grad, 2 * parts[rank], (table, layout))
        if all(len(set(row)) == 1 for row in table):
            same(m.all_to_all(group, parts[rank], made(out_of)), wanted, "output sizes only")
            same(m.all_to_all(group, parts[rank], None, made(into)), wanted, "input sizes only")


def test_global_buffer_results_never_alias(group: ProcessGroup) -> None:
    rank = group.rank()
    parts = held(group, (4, 3), "float32", False, 0)
    more = held(group, (4, 3), "float32", False, 9)
    first = m.gather_from_sequence_parallel_region(parts[rank], group=group, use_global_buffer=True)
    second = m.gather_from_sequence_parallel_region(more[rank], group=group, use_global_buffer=True)
    third = m.reduce_scatter_to_sequence_parallel_region(parts[rank], group, use_global_buffer=True)
    same(first, torch.cat(parts), "first")
    same(second, torch.cat(more), "second")
    same(third, cut(summed(parts), group.size(), rank, 0), "third")
    assert len({t.untyped_storage().data_ptr() for t in (first, second, third)}) == 3


@pytest.mark.ranks(2, 4)
def test_inputs_and_gradients_are_left_alone(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    parts = held(group, (4, 3), "float32", False, 0)
    total = summed(parts)
    reduce, copy = m.reduce_from_tensor_model_parallel_region, m.copy_to_tensor_model_parallel_region

    x = parts[rank].clone()
    y = reduce(x, group)
    same(x, parts[rank], "a held input")
    assert y.data_ptr() != x.data_ptr()
    same(y, total, "its result")

    leaf = parts[rank].clone().requires_grad_()
    product = leaf * 2
    y = reduce(product, group)
    same(product.detach(), parts[rank] * 2, "a held product")
    same(y.detach(), 2 * total, "its result")

    leaf = parts[rank].clone().requires_grad_()
    y = reduce(leaf.exp(), group)  # exp saves its output for backward
    y.sum().backward()
    assert leaf.grad is not None
    torch.testing.assert_close(leaf.grad, parts[rank].exp(), rtol=0, atol=0)

    base = parts[rank].clone()
    y = reduce(base.view(-1), group)
    same(base, parts[rank], "the base of a temporary view")
    same(y, total.view(-1), "its result")

    # AddBackward hands one gradient tensor to both branches
    for swap in (False, True):
        a = parts[rank].clone().requires_grad_()
        b = parts[rank].clone().requires_grad_()
        left, right = copy(a, group), b * 1
        out = right + left if swap else left + right
        grads = held(group, (4, 3), "float32", False, 30)
        out.backward(grads[rank].clone())
        assert a.grad is not None
        assert b.grad is not None
        same(a.grad, summed(grads), "copied branch")
        same(b.grad, grads[rank], "plain branch")

    a = parts[rank].clone().requires_grad_()
    seen: list[Tensor] = []
    copied = copy(a * 1, group)
    copied.register_hook(seen.append)
    (copied * 3).sum().backward()
    same(seen[0], torch.full((4, 3), 3.0), "a gradient that a hook kept")
    assert a.grad is not None
    same(a.grad, torch.full((4, 3), 3.0 * world), "and its sum")

    a = parts[rank].clone().requires_grad_()
    copied = copy(a * 1, group)
    copied.retain_grad()
    (copied * 3).sum().backward()
    assert copied.grad is not None
    same(copied.grad, torch.full((4, 3), 3.0), "a retained gradient")


def run_dims(group: ProcessGroup, path: str) -> None:
    rank, world = group.rank(), group.size()
    shape = (4, 8, 4)
    with ops.path(path):
        for dim, layout in itertools.product(range(-3, 3), LAYOUTS[:2] if path == "torch" else LAYOUTS[:1]):
            parts = held(group, shape, "float32", False, 0)
            x = laid_out(parts[rank], layout).requires_grad_()
            joined = torch.cat(parts, dim)
            out = m.all_gather_dim(x, dim, group)
            same(out.detach(), joined, dim)
            grads = held(group, tuple(joined.shape), "float32", False, 10)
            out.backward(grads[rank])
            assert x.grad is not None
            same(x.grad, cut(summed(grads), world, rank, dim), dim)
            x.grad = None
            m.all_gather_dim(x, dim, group, tensor_parallel_output_grad=False).backward(grads[0])
            same(x.grad, cut(grads[0], world, rank, dim), dim)
            x.grad = None
            out = m.reduce_scatter_dim(x, dim, group)
            same(out.detach(), cut(summed(parts), world, rank, dim), dim)
            pieces = [cut(grads[0], world, r, dim) for r in range(world)]
            small = [cut(parts[0], world, r, dim).contiguous() for r in range(world)]
            out.backward(small[rank])
            same(x.grad, parts[0], dim)
            x.grad = None
            out = m.split_dim(x, dim, group)
            same(out.detach(), cut(parts[rank], world, rank, dim), dim)
            out.backward(small[rank])
            same(x.grad, parts[0], dim)
            assert len(pieces) == world
            for gather in range(3):
                x.grad = None
                out = m.all_to_all_dims(x, dim, gather, group)
                wanted = torch.cat([cut(part, world, rank, dim) for part in parts], gather)
                same(out.detach(), wanted, (dim, gather))
                assert world == 1 or out._base is None
                out.backward(out.detach() * 2)
                same(x.grad, parts[rank] * 2, (dim, gather))


@pytest.mark.parametrize(("world", "path"), [(1, "torch"), (2, "torch"), (4, "torch"), (2, "triton")])
def test_any_dim(pool: Pool, world: int, path: str) -> None:
    pool.run(run_dims, path, world=world)


@pytest.mark.ranks(2, 4)
def test_uneven_heads_and_sequences(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    heads, rows = ((3, 2), (4, 1)) if world == 2 else ((2, 0, 2, 1), (1, 3, 0, 2))
    full = value((2, sum(rows), sum(heads), 3), "float32", 0)
    for layout in LAYOUTS:
        x = laid_out(full.split(rows, 1)[rank], layout).requires_grad_()
        out = m.all_to_all_dims(x, 2, 1, group, scatter_sizes=heads, gather_sizes=rows)
        same(out.detach(), full.split(heads, 2)[rank], layout)
        assert out._base is None
        out.backward(3 * out.detach())
        assert x.grad is not None
        same(x.grad, 3 * full.split(rows, 1)[rank], layout)
        for dim, sizes in ((1, rows), (2, heads)):
            pieces = full.split(sizes, dim)
            same(m.all_gather_dim(laid_out(pieces[rank], layout), dim, group, sizes=sizes), full, layout)
            same(m.reduce_scatter_dim(laid_out(full, layout), dim, group, sizes=sizes), world * pieces[rank], layout)
            same(m.split_dim(laid_out(full, layout), dim, group, sizes=sizes), pieces[rank], layout)


@pytest.mark.ranks(1, 2, 3)
def test_meta_tensors_propagate_shapes(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    x = torch.ones(2 * world, 2 * world, device="meta", requires_grad=True)
    for name, (mapping, _, _) in MAPPINGS.items():
        out = mapping(x, group)
        assert (out.is_meta, out.shape) == (True, mapping(torch.ones(x.shape), group).shape), name
        (gradient,) = torch.autograd.grad(out, x, torch.ones_like(out))
        assert (gradient.is_meta, gradient.shape) == (True, x.shape), name
    sizes = [*range(1, world)] + [0]
    rows, total = x.narrow(0, 0, sizes[rank]), sum(sizes)
    gathered = m.all_gather_dim(rows, 0, group, sizes=sizes)
    assert (gathered.is_meta, gathered.shape) == (True, (total, 2 * world))
    summed = m.reduce_scatter_dim(x.narrow(0, 0, total), 0, group, sizes=sizes)
    assert (summed.is_meta, summed.shape) == (True, rows.shape)
    assert torch.autograd.grad(summed, x, torch.ones_like(summed))[0].shape == x.shape
    columns = m.all_to_all_dims(rows, 1, 0, group, gather_sizes=sizes)
    assert (columns.is_meta, columns.shape) == (True, (total, 2))


# The dot-product test: <f(x), y> = <x, f'(y)>; a replicated side counts once, the others sum over the ranks.
REPLICATED = {  # (input, output)
    "copy": (True, False),
    "reduce_from": (False, True),
    "scatter_tp": (True, False),
    "gather_tp": (False, True),
    "scatter_sp": (True, False),
    "gather_sp-replicated-grad": (False, True),
}


def _total(dot: Tensor, group: ProcessGroup, replicated: bool) -> float:
    dot = dot.detach().clone()
    if not replicated:
        dist.all_reduce(dot, group=group)
    return float(dot)


def _random(shape: tuple[int, ...], seed: int, rank: int, replicated: bool) -> Tensor:
    made = torch.Generator().manual_seed(seed + (0 if replicated else 1000 * (1 + rank)))
    return torch.randn(shape, generator=made, dtype=torch.float64)


@pytest.mark.ranks(1, 2, 4)
@pytest.mark.parametrize("name", MAPPINGS)
def test_adjoint_and_double_backward(group: ProcessGroup, name: str) -> None:
    call, (x_same, y_same) = MAPPINGS[name][0], REPLICATED.get(name, (False, False))
    rank, shape = group.rank(), (8, 3, 16)
    x = _random(shape, 1, rank, x_same).requires_grad_()
    out = call(x, group)
    y = _random(tuple(out.shape), 2, rank, y_same).requires_grad_()
    (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
    left = _total((out * y).sum(), group, y_same)
    right = _total((x * grad).sum(), group, x_same)
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12), name
    assert abs(left) > 1e-3
    # grad is linear in y: its derivative towards v is the forward of v
    v = _random(shape, 3, rank, x_same)
    (twice,) = torch.autograd.grad(grad, y, v, create_graph=True)
    same(twice.detach(), call(v, group), ("double backward", name))
    assert _total((v * grad).sum(), group, x_same) == pytest.approx(_total((twice * y).sum(), group, y_same), rel=1e-12)


@pytest.mark.ranks(2, 4)
def test_sums_of_random_data(group: ProcessGroup) -> None:
    """Random data: within one rounding of the dtype per rank."""
    rank, world = group.rank(), group.size()
    for dtype, tolerance in (
        (torch.float32, 2e-6),
        (torch.bfloat16, 2e-2),
        (torch.float16, 3e-3),
        (torch.float64, 1e-14),
    ):
        parts = [_random((8, 16), 7, r, False).to(dtype) for r in range(world)]
        exact = summed([part.double() for part in parts])
        scale = float(exact.abs().max())
        for out, wanted in (
            (m.reduce_from_tensor_model_parallel_region(parts[rank], group), exact),
            (m.reduce_scatter_to_sequence_parallel_region(parts[rank], group), cut(exact, world, rank, 0)),
            (m.reduce_scatter_last_dim_to_tensor_parallel_region(parts[rank], group), cut(exact, world, rank, -1)),
        ):
            assert float((out.double() - wanted).abs().max()) <= tolerance * scale * world


@pytest.mark.ranks(8)
def test_the_sum_does_not_keep_its_group(group: ProcessGroup) -> None:
    for held_input in (False, True):
        made = dist.new_group(dist.get_process_group_ranks(group))
        assert isinstance(made, ProcessGroup)
        x = torch.ones(4, 3, requires_grad=True)
        out = m.reduce_from_tensor_model_parallel_region(x if held_input else x * 1, made)
        dist.destroy_process_group(made)
        reference = weakref.ref(made)
        del made
        assert reference() is None  # a node that kept it could be freed, with it, by a thread of its own
        same(torch.autograd.grad(out.sum(), x, retain_graph=True)[0], torch.ones(4, 3), held_input)
        with pytest.raises(GroupError, match="its process group was destroyed"):
            torch.autograd.grad(out, x, torch.ones(4, 3, requires_grad=True), create_graph=True)
