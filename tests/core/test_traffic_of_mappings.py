"""Passes over memory outside the collectives, counted: every mapping moves what it has to and nothing more."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.utils._python_dispatch import _disable_current_modes
from traffic import Traffic

from tritoncomm import mappings as m
from tritoncomm import record
from tritoncomm.core import backend, ops


@contextmanager
def collectives_uncounted() -> Iterator[None]:
    """Gloo makes copies of its own; what happens inside a collective is not our pass."""
    lists = ("all_gather_list", "reduce_scatter_list")
    names = ["all_gather", "reduce_scatter", "all_to_all", "all_reduce", *lists]
    originals = {name: getattr(backend, name) for name in names}

    def hidden(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            with _disable_current_modes():
                return original(*args, **kwargs)

        return call

    for name, original in originals.items():
        setattr(backend, name, hidden(original))
    try:
        yield
    finally:
        for name, original in originals.items():
            setattr(backend, name, original)


def sliced(x: Tensor) -> Tensor:
    """The same values, with a gap after every row: a slice of a fused projection."""
    return torch.cat([x, x], -1)[..., : x.shape[-1]]


# Bytes forward and backward as multiples of n, the bytes of the input; W ranks; shape [8, 3, 16].
Floor = Callable[[int], float]
CASES: dict[str, tuple[Any, Floor, Floor, Floor]] = {  # call, forward, forward of a strided input, backward
    "reduce_from": (m.reduce_from_tensor_model_parallel_region, lambda W: 2, lambda W: 2, lambda W: 0),
    "copy": (m.copy_to_tensor_model_parallel_region, lambda W: 0, lambda W: 0, lambda W: 2),
    "scatter_tp": (m.scatter_to_tensor_model_parallel_region, lambda W: 2 / W, lambda W: 2 / W, lambda W: 2),
    "gather_tp": (m.gather_from_tensor_model_parallel_region, lambda W: 2 * W, lambda W: 2 + 2 * W, lambda W: 2),
    "scatter_sp": (m.scatter_to_sequence_parallel_region, lambda W: 0, lambda W: 2 / W, lambda W: 0),
    "gather_sp": (
        lambda x, g: m.gather_from_sequence_parallel_region(x, group=g),
        lambda W: 0, lambda W: 2, lambda W: 0,
    ),
    "gather_sp-equal-sizes": (
        lambda x, g: m.gather_from_sequence_parallel_region(x, group=g, output_split_sizes=[8] * g.size()),
        lambda W: 0, lambda W: 2, lambda W: 0,
    ),
    "gather_sp-replicated-grad": (
        lambda x, g: m.gather_from_sequence_parallel_region(x, False, g),
        lambda W: 0, lambda W: 2, lambda W: 0,
    ),
    "reduce_scatter_sp": (m.reduce_scatter_to_sequence_parallel_region, lambda W: 0, lambda W: 2, lambda W: 0),
    "reduce_scatter_sp-equal-sizes": (
        lambda x, g: m.reduce_scatter_to_sequence_parallel_region(x, g, [8 // g.size()] * g.size()),
        lambda W: 0, lambda W: 2, lambda W: 0,
    ),
    "ag_last": (
        m.all_gather_last_dim_from_tensor_parallel_region,
        lambda W: 2 * W, lambda W: 2 + 2 * W, lambda W: 2 * W,
    ),
    "rs_last": (m.reduce_scatter_last_dim_to_tensor_parallel_region, lambda W: 2, lambda W: 2, lambda W: 2),
    "all_to_all": (lambda x, g: m.all_to_all(g, x), lambda W: 0, lambda W: 2, lambda W: 0),
    "all_to_all-stream": (
        lambda x, g: m.all_to_all(g, x, use_nccl_stream=True),
        lambda W: 0, lambda W: 2, lambda W: 0,
    ),
    "sp2hp": (m.all_to_all_sp2hp, lambda W: 2, lambda W: 2, lambda W: 2),
    "sp2hp-stream": (lambda x, g: m.all_to_all_sp2hp(x, g, True), lambda W: 2, lambda W: 2, lambda W: 2),
    "hp2sp": (m.all_to_all_hp2sp, lambda W: 2, lambda W: 4, lambda W: 2),
    "hp2sp-stream": (lambda x, g: m.all_to_all_hp2sp(x, g, True), lambda W: 2, lambda W: 4, lambda W: 2),
    "all_gather_dim-0": (lambda x, g: m.all_gather_dim(x, 0, g), lambda W: 0, lambda W: 2, lambda W: 0),
    "all_gather_dim-2": (
        lambda x, g: m.all_gather_dim(x, 2, g),
        lambda W: 2 * W, lambda W: 2 + 2 * W, lambda W: 2 * W,
    ),
    "split_dim-0": (lambda x, g: m.split_dim(x, 0, g), lambda W: 0, lambda W: 2 / W, lambda W: 0),
    "split_dim-2": (lambda x, g: m.split_dim(x, 2, g), lambda W: 2 / W, lambda W: 2 / W, lambda W: 2),
    "reduce_scatter_dim-0": (lambda x, g: m.reduce_scatter_dim(x, 0, g), lambda W: 0, lambda W: 2, lambda W: 0),
    "reduce_scatter_dim-2": (lambda x, g: m.reduce_scatter_dim(x, 2, g), lambda W: 2, lambda W: 2, lambda W: 2),
    "all_to_all_dims-2-0": (lambda x, g: m.all_to_all_dims(x, 2, 0, g), lambda W: 2, lambda W: 2, lambda W: 2),
    "all_to_all_dims-0-2": (lambda x, g: m.all_to_all_dims(x, 0, 2, g), lambda W: 2, lambda W: 4, lambda W: 2),
    "all_to_all_dims-2-1": (lambda x, g: m.all_to_all_dims(x, 2, 1, g), lambda W: 4, lambda W: 4, lambda W: 4),
}  # fmt: skip
# The most new memory, forward and backward, in multiples of n: the wires and the result.
MEMORY: dict[str, tuple[Floor, Floor]] = {
    "reduce_from": (lambda W: 1, lambda W: 0),
    "copy": (lambda W: 0, lambda W: 1),
    "scatter_tp": (lambda W: 1 / W, lambda W: 2),
    "gather_tp": (lambda W: 2 * W, lambda W: 1),
    "scatter_sp": (lambda W: 0, lambda W: 1),
    "gather_sp": (lambda W: W, lambda W: 1),
    "gather_sp-equal-sizes": (lambda W: W, lambda W: 1),
    "gather_sp-replicated-grad": (lambda W: W, lambda W: 0),
    "reduce_scatter_sp": (lambda W: 1 / W, lambda W: 1),
    "reduce_scatter_sp-equal-sizes": (lambda W: 1 / W, lambda W: 1),
    "ag_last": (lambda W: 2 * W, lambda W: W + 1),
    "rs_last": (lambda W: 1 + 1 / W, lambda W: 2),
    "all_to_all": (lambda W: 1, lambda W: 1),
    "all_to_all-stream": (lambda W: 1, lambda W: 1),
    "sp2hp": (lambda W: 2, lambda W: 2),
    "sp2hp-stream": (lambda W: 2, lambda W: 2),
    "hp2sp": (lambda W: 2, lambda W: 2),
    "hp2sp-stream": (lambda W: 2, lambda W: 2),
    "all_gather_dim-0": (lambda W: W, lambda W: 1),
    "all_gather_dim-2": (lambda W: 2 * W, lambda W: W + 1),
    "split_dim-0": (lambda W: 0, lambda W: 1),
    "split_dim-2": (lambda W: 1 / W, lambda W: 2),
    "reduce_scatter_dim-0": (lambda W: 1 / W, lambda W: 1),
    "reduce_scatter_dim-2": (lambda W: 1 + 1 / W, lambda W: 2),
    "all_to_all_dims-2-0": (lambda W: 2, lambda W: 2),
    "all_to_all_dims-0-2": (lambda W: 2, lambda W: 2),
    "all_to_all_dims-2-1": (lambda W: 3, lambda W: 3),
}


def measured(call: Any, x: Tensor, group: ProcessGroup) -> tuple[Traffic, Traffic, int]:
    """The traffic of the forward and of the backward, and the record's sum of both."""
    torch.autograd.grad(call(x, group).sum(), x)  # what is measured once is not part of it
    with collectives_uncounted(), record.recording() as counted:
        with Traffic() as forward:
            out = call(x, group)
        gradient = torch.ones_like(out, memory_format=torch.contiguous_format)
        with Traffic() as backward:
            torch.autograd.grad(out, x, gradient)
    return forward, backward, sum(count.bytes_copied for count in counted.values())


def run_floor(group: ProcessGroup, name: str) -> None:
    call, floor, strided_floor, backward_floor = CASES[name]
    world = group.size()
    base = torch.ones(8, 3, 16)
    for x, wanted in ((base, floor(world)), (sliced(base), strided_floor(world))):
        leaf = x.clone().requires_grad_() if x is base else x.requires_grad_()
        forward, backward, recorded = measured(call, leaf, group)
        moved, back, n = forward.moved, backward.moved, base.nbytes
        assert moved == wanted * n, f"{name}: forward moved {moved / n} n, not {wanted} n (contiguous {x is base})"
        assert back == backward_floor(world) * n, f"{name}: backward moved {back / n} n, not {backward_floor(world)} n"
        assert recorded == moved + back, f"{name}: the record says {recorded / n} n, not {(moved + back) / n} n"
        most = [memory(world) for memory in MEMORY[name]]
        most[0] += (wanted - floor(world)) / 2  # a strided input that is packed first has a wire of its own
        assert forward.allocated <= most[0] * n, f"{name}: forward allocated {forward.allocated / n} n"
        assert backward.allocated <= most[1] * n, f"{name}: backward allocated {backward.allocated / n} n"


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("name", CASES)
def test_floor(pool: Pool, name: str, world: int) -> None:
    pool.run(run_floor, name, world=world)


# With split sizes; n and o are the bytes of this rank's input and result: bytes moved, and the most new memory.
Bytes = Callable[[int, int], int]
UNEVEN: dict[str, tuple[Any, tuple[Bytes, Bytes], tuple[Bytes, Bytes]]] = {  # call, forward, backward
    "gather_sp": (
        lambda x, g, s, _: m.gather_from_sequence_parallel_region(x, True, g, s),
        (lambda n, o: 0, lambda n, o: o), (lambda n, o: 0, lambda n, o: n),
    ),
    "gather_sp-replicated-grad": (
        lambda x, g, s, _: m.gather_from_sequence_parallel_region(x, False, g, s),
        (lambda n, o: 0, lambda n, o: o), (lambda n, o: 0, lambda n, o: 0),
    ),
    "reduce_scatter_sp": (
        lambda x, g, s, _: m.reduce_scatter_to_sequence_parallel_region(x, g, s),
        (lambda n, o: 0, lambda n, o: o), (lambda n, o: 0, lambda n, o: n),
    ),
    "all_to_all": (
        lambda x, g, s, t: m.all_to_all(g, x, t, s),
        (lambda n, o: 0, lambda n, o: o), (lambda n, o: 0, lambda n, o: n),
    ),
    "all_gather_dim-1": (
        lambda x, g, s, _: m.all_gather_dim(x, 1, g, sizes=s),
        (lambda n, o: 2 * o, lambda n, o: 2 * o), (lambda n, o: 2 * o, lambda n, o: o + n),
    ),
    "reduce_scatter_dim-1": (
        lambda x, g, s, _: m.reduce_scatter_dim(x, 1, g, sizes=s),
        (lambda n, o: 2 * n, lambda n, o: n + o), (lambda n, o: 2 * n, lambda n, o: 2 * n),
    ),
    "split_dim-1": (
        lambda x, g, s, _: m.split_dim(x, 1, g, sizes=s),
        (lambda n, o: 2 * o, lambda n, o: o), (lambda n, o: 2 * n, lambda n, o: 2 * n),
    ),
    "all_to_all_dims-2-1": (
        lambda x, g, s, t: m.all_to_all_dims(x, 2, 1, g, scatter_sizes=t, gather_sizes=s),
        (lambda n, o: 2 * n + 2 * o, lambda n, o: n + 2 * o), (lambda n, o: 2 * n + 2 * o, lambda n, o: 2 * n + o),
    ),
}  # fmt: skip


def run_uneven_floor(group: ProcessGroup) -> None:
    rank, world = group.rank(), group.size()
    sizes, heads = ((4, 1), (3, 2)) if world == 2 else ((1, 3, 0, 2), (2, 0, 2, 1))
    for name, (call, forward_bytes, backward_bytes) in UNEVEN.items():
        given, other = sizes, heads
        mine = sizes[rank] if name.startswith(("gather", "all_gather", "all_to_all_dims")) else sum(sizes)
        if name == "all_to_all":  # every rank sends alike, so that all that arrive are of one size
            other = (sizes[rank],) * world
        x = torch.ones((2, mine, sum(heads), 3) if name[-1].isdigit() else (mine, 3, 4), requires_grad=True)

        def mapping(x: Tensor, group: ProcessGroup, args: Any = (call, given, other)) -> Tensor:
            return args[0](x, group, *args[1:])

        n, o = x.nbytes, mapping(x, group).nbytes
        forward, backward, recorded = measured(mapping, x, group)
        moved = [wanted(n, o) for wanted, _ in (forward_bytes, backward_bytes)]
        most = [memory(n, o) for _, memory in (forward_bytes, backward_bytes)]
        assert [forward.moved, backward.moved] == moved, (name, n, o)
        assert recorded == sum(moved), (name, n, o, recorded)
        assert forward.allocated <= most[0], (name, n, o, forward.allocated)
        assert backward.allocated <= most[1], (name, n, o, backward.allocated)


@pytest.mark.parametrize("world", [2, 4])
def test_floor_of_split_sizes(pool: Pool, world: int) -> None:
    pool.run(run_uneven_floor, world=world)


def test_triton_floor(group: ProcessGroup) -> None:
    world = group.size()
    base = torch.ones(8, 3, 16)
    for name, (call, floor, strided_floor, backward_floor) in CASES.items():
        for x, wanted in ((base.clone(), floor(world)), (sliced(base), strided_floor(world))):
            if name == "all_to_all_dims-2-1" and not x.is_contiguous():
                continue
            x.requires_grad_()
            with ops.path("triton"), record.recording() as counted:
                out = call(x, group)
                torch.autograd.grad(out, x, torch.ones_like(out, memory_format=torch.contiguous_format))
            packed = sum(count.bytes_copied for count in counted.values())
            assert packed == (wanted + backward_floor(world)) * base.nbytes, (name, packed / base.nbytes)


def test_floor_with_overwrite_inputs(group: ProcessGroup) -> None:
    """Without ``overwrite_inputs`` exactly two mappings copy once more than with it, which is at the floor."""
    base = torch.ones(8, 3, 16)
    packed: dict[tuple[str, bool], int] = {}
    for overwrite in (False, True):
        for name, (call, *_) in CASES.items():
            x = base.clone().requires_grad_()
            with m.overwrite_inputs(overwrite), record.recording() as counted:
                out = call(x * 2.0, group)
                torch.autograd.grad(out, x, torch.ones_like(out, memory_format=torch.contiguous_format))
            packed[name, overwrite] = sum(count.bytes_copied for count in counted.values())
    more = {name: packed[name, False] - packed[name, True] for name in CASES}
    assert {name: n for name, n in more.items() if n} == {"reduce_from": 2 * base.nbytes, "copy": 2 * base.nbytes}
    assert packed["reduce_from", True] == packed["copy", True] == 0


@pytest.mark.parametrize("waste", ["copy", "buffer"])
@pytest.mark.parametrize("which", ["pack", "results"])
def test_waste_is_seen(group: ProcessGroup, which: str, waste: str) -> None:
    original = getattr(ops.SplitPass, which)

    def wasteful(self: ops.SplitPass, given: Any, *args: Any) -> Any:
        x = given if which == "results" else given[0]
        extra = x.clone() if waste == "copy" else x.new_empty(x.shape)
        used = extra if waste == "copy" else x
        return original(self, used if which == "results" else (used,), *args)

    setattr(ops.SplitPass, which, wasteful)
    told = r"moved|record" if waste == "copy" else "allocated"
    try:
        for name in ("sp2hp", "rs_last", "ag_last"):
            with pytest.raises(AssertionError, match=told):
                run_floor(group, name)
        with pytest.raises(AssertionError):
            run_uneven_floor(group)
    finally:
        setattr(ops.SplitPass, which, original)
