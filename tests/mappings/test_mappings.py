"""Every mapping, helper and autograd class against closed forms; every rank knows what all ranks hold."""

import itertools
import weakref
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from fuzz_calls import assert_right, tensor_of
from mapping_cases import (
    FUNCTIONS,
    GRADS,
    LAYOUTS,
    MAPPINGS,
    SUMMED,
    Call,
    Matrix,
    all_held,
    by_sizes,
    expected,
    expected_gradient,
    local_shape,
    run,
    same,
    summed,
)  # fmt: skip
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.distributed import ProcessGroup

from tritoncomm import mappings as m
from tritoncomm import record
from tritoncomm.errors import ArgumentError, GroupError, ShapeError

DTYPES = [
    "float32", "bfloat16", "float16", "float64", "int64", "bool", "float8_e4m3fn", "complex64", "int16", "uint16",
]  # fmt: skip
MAPPED = [name for name in FUNCTIONS if not name.startswith("collective.")]
BY_DIM = [name for name in MAPPED if FUNCTIONS[name].fixed is None]
# Split sizes and heads of ranks, by the number of ranks.
SIZES = {2: [(3, 1), (0, 4), (2, 2)], 4: [(3, 1, 0, 2), (2, 2, 2, 2), (0, 0, 5, 0)]}
HEADS = {2: (3, 2), 4: (2, 0, 2, 1)}
ROWS = [
    Matrix(((0, 2, 1, 0), (1, 0, 2, 1), (2, 1, 0, 2), (0, 2, 1, 0))),
    Matrix(((1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1))),
    Matrix(((2, 2, 2, 2),) * 4),
    Matrix(((4, 0, 0, 0),) * 4),
]


def kind_of(dtype: str) -> str:
    return "leaf" if dtype in GRADS else "plain"


@pytest.mark.ranks(1, 2, (1, 3), *(pytest.param(world, marks=pytest.mark.slow) for world in (4, 8)))
@pytest.mark.parametrize("name", MAPPED)
def test_forward_and_backward(group: ProcessGroup, name: str) -> None:
    """Every dtype and layout, and shapes of every number of dims."""
    function = FUNCTIONS[name]
    shapes = [(8, 16), (8, 3, 16), (8, 2, 3, 8), (8, 1, 2, 1, 8), (0, 8), *([(16,)] if "hp" not in name else [])]
    dtypes = SUMMED if function.adds else DTYPES
    for shape, layout in itertools.product(shapes, LAYOUTS):
        for dtype in dtypes if shape == (8, 16) else dtypes[:1]:
            assert_right(group, Call(name, shape, dtype, layout, kind_of(dtype)))
    if name in ("all_to_all", "all_to_all_sp2hp", "all_to_all_hp2sp"):
        assert_right(group, Call(name, (8, 16), kind="leaf", asynchronous=True))


@pytest.mark.ranks(1, 2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("name", BY_DIM)
def test_any_dim(group: ProcessGroup, name: str) -> None:
    for dims, layout in itertools.product(itertools.product(range(-3, 3), range(3)), LAYOUTS[:2]):
        assert_right(group, Call(name, (4, 8, 4), layout=layout, kind="leaf", dims=dims))


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize("name", [name for name in MAPPED if FUNCTIONS[name].sizes in ("gathered", "split")])
def test_split_sizes(group: ProcessGroup, name: str) -> None:
    for sizes, layout, given in itertools.product(SIZES[group.size()], LAYOUTS, (list, tuple, np.array)):
        for shape in [(sum(sizes),), (sum(sizes), 2, 3)]:
            assert_right(group, Call(name, shape, layout=layout, kind="leaf", sizes=(given(sizes), None)))
        if name in BY_DIM:
            shape = (2, sum(sizes), 3)
            assert_right(group, Call(name, shape, layout=layout, kind="leaf", dims=(1, 0), sizes=(given(sizes), None)))


@pytest.mark.ranks(2, 4)
def test_uneven_heads_and_sequences(group: ProcessGroup) -> None:
    heads = HEADS[group.size()]
    for rows, layout in itertools.product(SIZES[group.size()], LAYOUTS):
        shape = (2, 0, sum(heads), 3)  # as many rows as the sizes of the rank say
        call = Call("all_to_all_dims", shape, layout=layout, kind="leaf", dims=(2, 1), sizes=(heads, rows))
        assert_right(group, call)


@pytest.mark.ranks(2, 4)
def test_all_to_all_sizes(group: ProcessGroup) -> None:
    sizes: list[tuple[Any, Any]] = [(None, matrix) for matrix in ROWS]
    even = np.array([2] * group.size())
    sizes += [(even, even), (list(even), None), (None, tuple(even))]
    for given, layout, asynchronous in itertools.product(sizes, LAYOUTS[:3], (False, True)):
        shape = (2 * group.size(), 3)
        call = Call("all_to_all", shape, layout=layout, kind="leaf", sizes=given, asynchronous=asynchronous)
        assert_right(group, call)


NEITHER, BOTH = (False, False), (True, True)
# mapping and dims: where a kernel runs, forward and backward; the others move whole rows or nothing
ON_KERNELS: dict[tuple[str, tuple[int, int]], tuple[bool, bool]] = {
    **{(name, (0, 0)): NEITHER for name in MAPPED if FUNCTIONS[name].fixed is not None and not name.startswith("_")},
    ("scatter_to_tensor_model_parallel_region", (0, 0)): (False, True),
    ("gather_from_tensor_model_parallel_region", (0, 0)): (True, False),
    ("all_gather_last_dim_from_tensor_parallel_region", (0, 0)): BOTH,
    ("reduce_scatter_last_dim_to_tensor_parallel_region", (0, 0)): BOTH,
    ("all_to_all_sp2hp", (0, 0)): BOTH,
    ("all_to_all_hp2sp", (0, 0)): BOTH,
    ("all_gather_dim", (1, 0)): BOTH,
    ("reduce_scatter_dim", (0, 0)): NEITHER,
    ("reduce_scatter_dim", (1, 0)): BOTH,
    ("split_dim", (1, 0)): (False, True),
    ("all_to_all_dims", (0, 1)): BOTH,
    ("all_to_all_dims", (1, 0)): BOTH,
    ("all_to_all_dims", (2, 1)): BOTH,
}


def calls_on_kernels(group: ProcessGroup, call: Call) -> int:
    with record.recording() as counted:
        assert_right(group, replace(call, path="triton"))
    return sum(count.calls for (_, path), count in counted.items() if path == "triton")


def kernels_of(group: ProcessGroup, call: Call) -> tuple[bool, bool]:
    """Whether kernels run forward, and backward."""
    forward = calls_on_kernels(group, replace(call, kind="plain"))
    return forward > 0, calls_on_kernels(group, replace(call, kind="leaf")) > forward


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
@pytest.mark.parametrize(("name", "dims"), ON_KERNELS)
def test_kernels(group: ProcessGroup, name: str, dims: tuple[int, int]) -> None:
    """Every dtype and layout on the kernels, which run where they are said to."""
    call = Call(name, (8, 4, 12), dims=dims)
    assert kernels_of(group, call) == ON_KERNELS[name, dims]
    for dtype in SUMMED if FUNCTIONS[name].adds else DTYPES:
        calls_on_kernels(group, replace(call, dtype=dtype, kind=kind_of(dtype)))
    layouts = LAYOUTS if FUNCTIONS[name].fixed is not None else ["contiguous", "fused"]
    for shape, layout in itertools.product([(4, 4, 4, 4), (4, 4, 4, 2, 4)], layouts):
        calls_on_kernels(group, replace(call, shape=shape, layout=layout, kind="leaf"))


@pytest.mark.ranks(2, pytest.param(4, marks=pytest.mark.slow))
def test_kernels_of_uneven_pieces(group: ProcessGroup) -> None:
    heads, rows = ((3, 2), (4, 1)) if group.size() == 2 else ((2, 0, 2, 1), (1, 3, 0, 2))
    uneven = {
        "all_gather_dim": BOTH, "reduce_scatter_dim": BOTH, "split_dim": (False, True), "all_to_all_dims": BOTH
    }  # fmt: skip
    for (name, kernels), layout in itertools.product(uneven.items(), ("contiguous", "fused")):
        exchange = name == "all_to_all_dims"
        dims, sizes = ((2, 1), (heads, rows)) if exchange else ((1, 0), (rows, None))
        call = Call(name, (2, sum(rows), sum(heads), 3), layout=layout, dims=dims, sizes=sizes)
        assert kernels_of(group, call) == kernels, name


# class: (its mapping, arguments after group)
CLASSES: dict[str, tuple[str, tuple[Any, ...]]] = {
    "_CopyToModelParallelRegion": ("copy_to_tensor_model_parallel_region", ()),
    "_ReduceFromModelParallelRegion": ("reduce_from_tensor_model_parallel_region", ()),
    "_ScatterToModelParallelRegion": ("scatter_to_tensor_model_parallel_region", ()),
    "_GatherFromModelParallelRegion": ("gather_from_tensor_model_parallel_region", ()),
    "_ScatterToSequenceParallelRegion": ("scatter_to_sequence_parallel_region", ()),
    "_GatherFromSequenceParallelRegion": ("gather_from_sequence_parallel_region", (True, None, False)),
    "_ReduceScatterToSequenceParallelRegion": ("reduce_scatter_to_sequence_parallel_region", (None, False)),
    "_AllGatherFromTensorParallelRegion": ("all_gather_last_dim_from_tensor_parallel_region", ()),
    "_ReduceScatterToTensorParallelRegion": ("reduce_scatter_last_dim_to_tensor_parallel_region", ()),
}


@pytest.mark.ranks(1, 2, 4)
def test_autograd_classes_and_stand_in_ctx(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    shape = (4, 3, 8)
    for name, (mapping, extra) in CLASSES.items():
        cls, call = getattr(m, name), MAPPINGS[mapping]
        parts = all_held(group, shape, 0)
        wanted = expected(call, parts, rank)
        same(cls.symbolic(None, parts[rank].clone(), group), wanted, name)
        leaf = parts[rank].clone().requires_grad_()
        out = cls.apply(leaf, group, *extra)
        same(out.detach(), wanted, name)
        grads = all_held(group, tuple(wanted.shape), 50)
        out.backward(grads[rank].clone())
        back = expected_gradient(call, grads, rank)
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
    grads = all_held(group, shape, 50)
    found = m._AllToAll.backward(ctx, grads[rank])
    assert [item is None for item in found] == [True, False, True, True, True]
    same(found[1], expected_gradient(MAPPINGS["all_to_all"], grads, rank), "all_to_all")
    seen = SimpleNamespace()
    m._AllToAll.forward(seen, group, grads[rank], None, None)
    assert (seen.group, seen.output_split_sizes, seen.input_split_sizes) == (group, None, None)
    ctx = SimpleNamespace(
        group=group, tensor_parallel_output_grad=False, output_split_sizes=None, use_global_buffer=False
    )
    grads = all_held(group, shape, 70, replicated=True)
    found = m._GatherFromSequenceParallelRegion.backward(ctx, grads[rank])
    same(found[0], grads[rank].chunk(world)[rank], "a gradient that is split")


@pytest.mark.ranks(1)
def test_one_rank_copies_nothing(group: ProcessGroup) -> None:
    for name, mapping in MAPPINGS.items():
        for x in (torch.ones(4, 6), torch.ones(6, 4).t(), torch.ones(4, 6, requires_grad=True)):
            out = run(mapping, x, group)
            assert out.data_ptr() == x.data_ptr(), name
            if not x.requires_grad:
                assert out.shape == x.shape
    x = torch.ones(2, 3, 4)
    for call in (m.all_to_all_sp2hp, m.all_to_all_hp2sp):
        out = call(x, group)
        assert out.shape == (6, 4)
        assert out.data_ptr() == x.data_ptr()
    for name in (name for name in FUNCTIONS if name.startswith("_")):
        assert getattr(m, name)(x, group) is x, name
    # as in the reference, nothing is checked where nothing moves
    m.scatter_to_tensor_model_parallel_region(torch.ones(3), group)


@pytest.mark.ranks(1)
def test_sizes_are_checked_over_one_rank(group: ProcessGroup) -> None:
    """Otherwise a wrong list is seen on the second GPU only."""
    x = torch.ones(4, 4)
    for name, call in by_sizes(1).items():
        for sizes in ([4], [3], [5], [2, 2]):
            second = sizes if FUNCTIONS[call.function].sizes in ("rows", "both") else None
            asked = replace(call, sizes=(sizes, second))
            if sizes == [4]:
                assert run(asked, x, group).data_ptr() == x.data_ptr(), name
            else:
                with pytest.raises(ShapeError):
                    run(asked, x, group)
            with pytest.raises(ArgumentError, match="not a nested one"):
                run(asked, tensor_of("nested", x, group), group)


def test_global_buffer_results_never_alias(group: ProcessGroup) -> None:
    rank = group.rank()
    parts, more = all_held(group, (4, 3), 0), all_held(group, (4, 3), 9)
    first = m.gather_from_sequence_parallel_region(parts[rank], group=group, use_global_buffer=True)
    second = m.gather_from_sequence_parallel_region(more[rank], group=group, use_global_buffer=True)
    third = m.reduce_scatter_to_sequence_parallel_region(parts[rank], group, use_global_buffer=True)
    same(first, torch.cat(parts), "first")
    same(second, torch.cat(more), "second")
    same(third, summed(parts).chunk(group.size())[rank], "third")
    assert len({t.untyped_storage().data_ptr() for t in (first, second, third)}) == 3


def test_helpers_that_copy_nothing(group: ProcessGroup) -> None:
    x = torch.ones(4, 6)
    assert m._reduce(x, group) is x
    assert m._split_along_first_dim(x, group).untyped_storage().data_ptr() == x.untyped_storage().data_ptr()


@pytest.mark.ranks(1, 2, 3)
def test_meta_tensors_propagate_shapes(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    x = torch.ones(2 * world, 2 * world, device="meta", requires_grad=True)
    for name, call in MAPPINGS.items():
        out = run(call, x, group)
        assert (out.is_meta, out.shape) == (True, run(call, torch.ones(x.shape), group).shape), name
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


@pytest.mark.ranks(2)
def test_fake_tensors_of_any_strides_propagate_shapes(group: ProcessGroup) -> None:
    """A view that strides do not allow is another error with them."""
    world, mode = group.size(), FakeTensorMode()
    plain = torch.ones(4 * world, 2, 2 * world)
    x = mode.from_tensor(torch.ones(2 * world, 2, 4 * world)).permute(2, 1, 0)
    for name, call in MAPPINGS.items():
        assert run(call, x, group).shape == run(call, plain, group).shape, name


# The dot-product test: <f(x), y> = <x, f'(y)>; a replicated side counts once, the others sum over the ranks.
REPLICATED = {  # (input, output)
    "copy_to_tensor_model_parallel_region": (True, False),
    "reduce_from_tensor_model_parallel_region": (False, True),
    "scatter_to_tensor_model_parallel_region": (True, False),
    "gather_from_tensor_model_parallel_region": (False, True),
    "scatter_to_sequence_parallel_region": (True, False),
    "gather_from_sequence_parallel_region, split": (False, True),
    "all_gather_dim, split": (False, True),
    "split_dim": (True, False),
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
    call, (x_same, y_same) = MAPPINGS[name], REPLICATED.get(name, (False, False))
    rank, shape = group.rank(), (8, 4, 16)
    x = _random(shape, 1, rank, x_same).requires_grad_()
    out = run(call, x, group)
    y = _random(tuple(out.shape), 2, rank, y_same).requires_grad_()
    (grad,) = torch.autograd.grad(out, x, y, create_graph=True)
    left = _total((out * y).sum(), group, y_same)
    right = _total((x * grad).sum(), group, x_same)
    assert left == pytest.approx(right, rel=1e-12, abs=1e-12), name
    assert abs(left) > 1e-3
    # grad is linear in y: its derivative towards v is the forward of v
    v = _random(shape, 3, rank, x_same)
    (twice,) = torch.autograd.grad(grad, y, v, create_graph=True)
    same(twice.detach(), run(call, v, group), ("double backward", name))
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
            (m.reduce_scatter_to_sequence_parallel_region(parts[rank], group), exact.chunk(world)[rank]),
            (m.reduce_scatter_last_dim_to_tensor_parallel_region(parts[rank], group), exact.chunk(world, -1)[rank]),
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


@pytest.mark.ranks(2)
def test_who_replaces_apply_sees_every_mapping(group: ProcessGroup) -> None:
    """Checkers of types that patch ``torch.autograd.Function.apply``, as spmd_types does."""
    if not hasattr(torch.autograd.Function.apply, "__func__"):
        pytest.skip("torch enters every function by itself")
    seen: list[str] = []
    torchs = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def watched(cls: Any, *args: Any) -> Any:
        seen.append(cls.__name__)
        return torchs(cls, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.autograd.Function, "apply", classmethod(watched))
        for name, call in MAPPINGS.items():
            if not name.startswith("collective."):
                seen.clear()
                run(call, torch.ones(local_shape(call, group.rank(), 2), requires_grad=True), group)
                assert seen, name
