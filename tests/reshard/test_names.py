"""A rank passes the tensors that it has, and gets those of which it has a part: stages of a pipeline, engines."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any
from unittest import mock

import pytest
import torch
from reshardings import local_of
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tritoncomm import p2p
from tritoncomm.errors import ArgumentError, MismatchError
from tritoncomm.reshard import Layout, request, reshard, reshard_plan

SHAPES = {"embed": (12, 8), "0.qkv": (24, 8), "0.norm": (8,), "1.qkv": (24, 8), "1.norm": (8,), "head": (12, 8)}
DTYPES = {name: torch.float32 if "norm" in name else torch.bfloat16 for name in SHAPES}
FULL = {
    name: torch.arange(torch.Size(shape).numel()).view(shape).add(100 * place).to(DTYPES[name])
    for place, (name, shape) in enumerate(SHAPES.items())
}
Layouts = dict[str, Layout]
ROWS: Any = [0]


def staged(world: int) -> tuple[Layouts, Layouts]:
    """Two stages of tensor-parallel ranks; an engine on the last half of the ranks that has rows of every tensor."""
    half = world // 2
    stages = list(range(half)), list(range(half, world))
    source, target = {}, {}
    for name, shape in SHAPES.items():
        ranks = stages[name in ("1.qkv", "1.norm", "head")]
        placed = [None] if "norm" in name else ROWS
        source[name] = Layout.on_mesh(shape, ranks, placed)
        target[name] = Layout.on_mesh(shape, stages[1], placed)
    return source, target


def named(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """With names that a ParameterDict takes."""
    return {name.replace(".", "_"): x for name, x in tensors.items()}


def parts(layouts: Layouts, rank: int, full: Mapping[str, Tensor] = FULL) -> dict[str, Tensor]:
    """The tensors of which a rank has a part."""
    return {
        name: local_of(layouts[name], rank, x).clone()
        for name, x in full.items()
        if layouts[name].local_shape(rank) is not None
    }


def same(results: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert list(results) == list(expected)
    for name, x in results.items():
        assert x.dtype == expected[name].dtype, name
        assert torch.equal(x, expected[name]), name


@pytest.mark.ranks(2, 4)
def test_a_stage_passes_its_own_tensors(group: ProcessGroup) -> None:
    """In any order; ranks tell each other the dtypes once, and compare later calls. Results load strictly."""
    rank, (source, target) = group.rank(), staged(group.size())
    given, expected = parts(source, rank), parts(target, rank)
    request._plans.forget(group)
    for calls, kind in ((2, dict), (1, dict), (1, OrderedDict), (1, lambda x: dict(reversed(x.items())))):
        with mock.patch.object(request, "agree", wraps=request.agree) as compared:
            same(reshard(kind(given), source, target, group=group), expected)
        assert compared.call_count == calls
    more = {name: x + 1 for name, x in given.items()}
    same(reshard(more, source, target, group=group), {name: x + 1 for name, x in expected.items()})
    engine = nn.ParameterDict({name: nn.Parameter(torch.zeros_like(x)) for name, x in named(expected).items()})
    engine.load_state_dict(named(reshard(given, source, target, group=group)), strict=True)
    plan = reshard_plan(given, source, target, group=group)
    same(plan.execute(given), expected)


@pytest.mark.ranks(2, 4)
def test_an_engine_passes_what_it_writes_into(group: ProcessGroup) -> None:
    """``out`` has the tensors of which the rank has a part, and says their dtypes to those who lack them."""
    rank, (source, target) = group.rank(), staged(group.size())
    given, expected = parts(source, rank), {name: x.half() for name, x in parts(target, rank).items()}
    out = {name: torch.zeros_like(x) for name, x in expected.items()}
    for calls in (2, 1):
        for x in out.values():
            x.zero_()
        with mock.patch.object(request, "agree", wraps=request.agree) as compared:
            assert reshard(given, source, target, group=group, out=out) is out
        assert compared.call_count == calls
        same(out, expected)
    cast = reshard(given, source, target, group=group, dtype=torch.float64)
    same(cast, {name: x.double() for name, x in parts(target, rank).items()})
    plan = reshard_plan(given, source, target, group=group, dtype=torch.float16)
    plan.execute(given, out=out)
    same(out, expected)


@pytest.mark.ranks(2)
def test_a_rank_may_leave_out_what_is_empty_there(group: ProcessGroup) -> None:
    """An empty shard of a split or flat layout has no element: of the source, of ``out``, or in a plan."""
    rank, whole = group.rank(), torch.arange(12.0)
    empty_at_1 = {"split": Layout.split((3, 4), 0, {0: 3, 1: 0}), "flat": Layout.flat((3, 4), {0: [(0, 12)], 1: []})}
    rows = dict.fromkeys(empty_at_1, Layout.split((3, 4), 0, {0: 1, 1: 2}))
    full = {"split": whole.view(3, 4), "flat": whole} if rank == 0 else {}
    part = whole.view(3, 4)[:1] if rank == 0 else whole.view(3, 4)[1:]
    for _ in range(2):
        found = reshard(full, empty_at_1, rows, group=group)
        assert list(found) == ["split", "flat"]
        assert all(torch.equal(x, part) for x in found.values())
    given, out = dict.fromkeys(rows, part), {name: torch.zeros_like(x) for name, x in full.items()}
    reshard(given, rows, empty_at_1, group=group, out=out)
    assert all(torch.equal(x, full[name]) for name, x in out.items())
    plan = reshard_plan(full, empty_at_1, rows, group=group)
    assert all(torch.equal(x, part) for x in plan.execute(full).values())


@pytest.mark.ranks(2)
def test_backward_goes_to_the_ranks_that_have_a_tensor(group: ProcessGroup) -> None:
    """A result that has no part here is there nevertheless where its gradient leads back to a tensor."""
    rank, (source, target) = group.rank(), staged(2)
    given = {name: x.float().requires_grad_("norm" not in name) for name, x in parts(source, rank).items()}
    for _ in range(2):
        results = reshard(given, source, target, group=group)
        wanted = [name for name in SHAPES if rank or "norm" not in name]
        assert list(results) == wanted
        torch.stack([x.sum() * 3 for x in results.values() if x.requires_grad]).sum().backward()
        for x in given.values():
            assert (x.grad is None) == (not x.requires_grad)
            assert x.grad is None or torch.equal(x.grad, torch.full_like(x, 3))
            x.grad = None


@pytest.mark.ranks(2)
@pytest.mark.parametrize("checked", [False, True], ids=["", "checked"])
def test_refusals(group: ProcessGroup, checked: bool) -> None:
    rank, (source, target) = group.rank(), staged(2)
    given, expected = parts(source, rank), parts(target, rank)
    request._plans.forget(group)
    with p2p.check(checked):
        names = [f"none {i}" for i in range(5)]
        more = source | dict.fromkeys(names, source["embed"])
        text = r"rank 0 has parts of none 0, none 1, none 2 and 2 more by the layouts, but does not give them: pass"
        with pytest.raises(MismatchError if rank else ArgumentError, match=text):
            reshard(given, more, target | dict.fromkeys(names, target["embed"]), group=group)
        less = {name: x for name, x in given.items() if name != "1.norm"}
        with pytest.raises(ArgumentError if rank else MismatchError, match=r"rank 1 has parts of 1\.norm by the"):
            reshard(less, source, target, group=group)
        with pytest.raises(ArgumentError, match="nothing is given for"):
            reshard(given | {"more": torch.ones(2)}, source, target, group=group)
        away = {"away": Layout.replicated((4,), [7])}
        with pytest.raises(ArgumentError, match="no rank of the group gives away"):
            reshard(given, source | away, target | {"away": Layout.replicated((4,), [0, 1])}, group=group)
        with pytest.raises(
            MismatchError if rank == 0 else ArgumentError, match=r"rank 1 has parts of embed, 0\.qkv, 0\.norm"
        ):
            reshard(given, source, target, group=group, out={})
        extra = {"own": source["embed"]} if rank else {}
        with pytest.raises(MismatchError, match="the number of names"):
            reshard(given, source | extra, target | extra, group=group)
        with pytest.raises(ArgumentError, match=r"has to know its source|needs a Layout"):
            reshard(given, dict.fromkeys(source), target, group=group)
        same(reshard(given, source, target, group=group), expected)


@pytest.mark.ranks(2)
def test_calls_that_only_other_ranks_can_tell_apart(group: ProcessGroup) -> None:
    """Dtypes, names and gradients change on the rank that has the tensors; the other one guesses, and is told."""
    rank = group.rank()
    source, target = ({name: Layout.replicated((4, 4), [place]) for name in "wv"} for place in (0, 1))
    full = torch.arange(16).view(4, 4)
    dtypes = (torch.float16, torch.bfloat16, torch.float16, torch.float16, torch.bfloat16, torch.int8)
    for turn, dtype in enumerate(dtypes):
        tensors = {name: full.to(dtype) + place for place, name in enumerate("wv")}
        given, expected = ({}, tensors) if rank else (tensors, {})
        kind = OrderedDict if turn % 2 else dict
        same(reshard(kind(given), source, target, group=group), expected)
        result = dtype if turn % 3 == 0 else torch.float32
        if dtype is not torch.int8:
            out = {name: torch.zeros(4, 4, dtype=result) for name in expected}
            reshard(given, source, target, group=group, out=out)
            same(out, {name: x.to(result) for name, x in expected.items()})
    w = full.float().requires_grad_()
    for records in (True, False, True):
        given = {} if rank else {"w": w if records else w.detach(), "v": w.detach()}
        results = reshard(given, source, target, group=group)
        assert [x.requires_grad for x in results.values()] == ([records, False] if rank else [True] * records)
        if records:
            results["w"].sum().backward()
    assert rank or torch.equal(w.grad, torch.full((4, 4), 2.0))
