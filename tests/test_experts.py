"""Experts on other ranks: values, gradients, bits, messages and refusals of dispatch and combine."""

import random
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import product
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from bits import bits
from experts_twin import KINDS, WAYS, Routing, apply, draw_of, run_routing, twin
from laid_out import LAYOUTS
from pool import Pool
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.nn.functional import linear, silu

import tritoncomm
from tritoncomm import ArgumentError, GroupError, MismatchError, ShapeError, p2p, record
from tritoncomm.core import backend
from tritoncomm.experts import Dispatched, combine, dispatch


def routing_of(world: int, **changes: Any) -> Routing:
    tokens = tuple((5, 3, 0, 7, 4, 1, 6, 2)[:world])
    plain = Routing(tokens, 16, 2, 2, "even", "float32", "float32", 1, "torch", "eager", 1)
    return replace(plain, **changes)


@pytest.mark.parametrize(("world", "path"), [*product((1, 2, 4), ("torch", "triton")), (8, "torch")])
def test_kinds_of_routings_have_the_bits_of_the_twin(pool: Pool, world: int, path: str) -> None:
    for seed, kind in enumerate(KINDS[1:]):
        routing = routing_of(
            world, kind=kind, seed=seed, path=path, k=1 + seed, dtype=("float32", "bfloat16")[seed % 2]
        )
        assert pool.run(run_routing, routing, world=world) == ["right"] * world, routing


@pytest.mark.parametrize("path", ["torch", "triton"])
@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("layout", LAYOUTS[1:])
def test_tensors_in_memory_of_every_layout(pool: Pool, layout: str, world: int, path: str) -> None:
    """Also of one id, of one column and of one token, whose strides say nothing: top-1 routing by ``scores.t()``."""
    shapes: list[dict[str, Any]] = [{}, {"k": 1}, {"hidden": 1, "tokens": (1, 3)[:world]}]
    for changes in shapes:
        routing = routing_of(world, path=path, layouts=(layout,) * 5, **changes)
        assert pool.run(run_routing, routing, world=world) == ["right"] * world, routing


@pytest.mark.parametrize("how", WAYS)
def test_ways_to_call(pool: Pool, how: str) -> None:
    for dtype, world in (("float32", 2), ("bfloat16", 4), ("float32", 1)):
        assert pool.run(run_routing, routing_of(world, how=how, dtype=dtype), world=world) == ["right"] * world


@pytest.mark.ranks(4)
def test_bits_are_equal_over_100_runs_paths_and_orders_of_arrival(group: ProcessGroup) -> None:
    routing, results = routing_of(4, k=6, experts=3, hidden=40, dtype="bfloat16"), []
    drawn, start = draw_of(routing, group.rank()), backend.all_to_all
    delay = random.Random(group.rank())

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(delay.random() / 500)
        return start(*args, **kwargs)

    for run in range(100):
        x, weights = drawn.x.clone().requires_grad_(), drawn.weights.clone().requires_grad_()
        scales = drawn.scales[group.rank() * 3 : group.rank() * 3 + 3].clone().requires_grad_()
        with mock.patch.object(backend, "all_to_all", late), tritoncomm.path("triton" if run % 50 == 7 else "torch"):
            out = apply(x, drawn.ids, weights, scales, routing, group)
            out.backward(drawn.grad)
        results.append([bits(y) for y in (out.detach(), x.grad, weights.grad, scales.grad) if y is not None])
    for result in results[1:]:
        assert len(result) == 4
        assert all(torch.equal(a, b) for a, b in zip(results[0], result, strict=True))


class Expert(nn.Module):
    def __init__(self, hidden: int, number: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(number)
        self.up, self.down = (
            nn.Parameter(torch.randn(shape, generator=generator) / hidden**0.5)
            for shape in ((2 * hidden, hidden), (hidden, 2 * hidden))
        )

    def forward(self, x: Tensor) -> Tensor:
        return linear(silu(linear(x, self.up)), self.down)


def experts_of(hidden: int, numbers: Sequence[int], dtype: torch.dtype) -> list[Expert]:
    return [Expert(hidden, number).to(dtype) for number in numbers]


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_experts_with_matrices_against_one_process(group: ProcessGroup, dtype: torch.dtype) -> None:
    """fp32 within 8 eps sqrt(k) of the largest addend, bf16 within its own distance to float64."""
    world, k, rank = group.size(), 4, group.rank()
    routing = routing_of(world, k=k, experts=4, hidden=32, kind="skewed")
    draws = [draw_of(routing, w) for w in range(world)]

    def alone(dtype: torch.dtype) -> tuple[list[Tensor], Tensor]:
        """One process: outputs, gradients of tokens, weights and parameters; and the largest addend of each token."""
        x = torch.cat([d.x for d in draws]).to(dtype).requires_grad_()
        weights, ids = (
            torch.cat([d.weights for d in draws]).to(dtype).requires_grad_(),
            torch.cat([d.ids.long() for d in draws]),
        )
        layers = experts_of(32, range(4 * world), dtype)
        addends = torch.stack(
            [torch.stack([layers[e](row) for e in chosen]) for row, chosen in zip(x, ids.tolist(), strict=True)]
        )
        addends = addends * weights[:, :, None]
        out = addends.sum(1)
        out.backward(torch.cat([d.grad for d in draws]).to(dtype))
        sizes = list(routing.tokens)
        grads = [y.split(sizes)[rank] for y in (out.detach(), x.grad, weights.grad) if y is not None]
        ours = layers[rank * 4 : rank * 4 + 4]
        zero = torch.zeros(64, 32, dtype=dtype)
        grads.append(torch.stack([zero if e.up.grad is None else e.up.grad for e in ours]))
        return grads, addends.abs().max()

    drawn, layers = draws[rank], experts_of(32, range(rank * 4, rank * 4 + 4), dtype)
    x, weights = drawn.x.to(dtype, copy=True).requires_grad_(), drawn.weights.clone().requires_grad_()
    dispatched = dispatch(x, drawn.ids, weights, 4 * world, group)
    rows, counts = dispatched.by_expert()
    parts = [layer(part) for layer, part in zip(layers, rows.split(counts.tolist()), strict=True)]
    out = combine(dispatched.summed(torch.cat(parts)), dispatched)
    out.backward(drawn.grad.to(dtype))
    ups = [layer.up.grad for layer in layers]
    assert all(grad is not None for grad in ups), "an expert that nobody chose has a gradient of zeros"
    ours = [y.detach() for y in (out, x.grad, weights.grad, torch.stack(ups)) if y is not None]  # pyright: ignore
    exact, largest = alone(torch.float64)
    rounded, _ = alone(dtype)
    if dtype is torch.float32:
        bound = 8 * torch.finfo(dtype).eps * k**0.5 * largest
        assert (ours[0].double() - exact[0]).abs().max().item() <= bound if len(out) else True
    for result, wanted, single in zip(ours, exact, rounded, strict=True):
        if not wanted.numel():
            continue
        # The distance of one process to float64, and the rounding of a result that is exact to it.
        distance = (single.double() - wanted).abs().max() + torch.finfo(dtype).eps * wanted.abs().max()
        assert (result.double() - wanted).abs().max() <= 2 * distance


@pytest.mark.ranks(2, 4)
def test_gradients_of_gradients(group: ProcessGroup) -> None:
    """Of a layer that is not linear, against the same of one process, in float64."""
    routing = routing_of(group.size(), dtype="float64", weights="float64", k=3, hidden=6)
    draws = [draw_of(routing, w) for w in range(group.size())]
    rank, world = group.rank(), group.size()

    def second(out: Tensor, x: Tensor, weights: Tensor) -> list[Tensor]:
        grads = torch.autograd.grad((out**3).sum(), (x, weights), create_graph=True)
        total = sum((grad**2).sum() for grad in grads)
        assert isinstance(total, Tensor)
        return list(torch.autograd.grad(total, (x, weights)))

    x, weights = (torch.cat([getattr(d, name) for d in draws]).requires_grad_() for name in ("x", "weights"))
    ids, scales = torch.cat([d.ids.long() for d in draws]), draws[0].scales
    wanted = second((scales[ids] * x[:, None] ** 2 * weights[:, :, None]).sum(1), x, weights)
    x, weights = draws[rank].x.requires_grad_(), draws[rank].weights.requires_grad_()
    dispatched = dispatch(x, draws[rank].ids, weights, 2 * world, group)
    rows, counts = dispatched.by_expert()
    factors = scales[rank * 2 : rank * 2 + 2].repeat_interleave(counts, 0)
    out = combine(dispatched.summed(factors * rows**2), dispatched)
    for result, value in zip(second(out, x, weights), wanted, strict=True):
        torch.testing.assert_close(result, value.split(list(routing.tokens))[rank], rtol=1e-10, atol=1e-10)


@pytest.mark.ranks(1, 3)
def test_rows_ids_and_weights_of_a_rank(group: ProcessGroup) -> None:
    """From other ranks in rank order, then this rank's own; rows are made when they are read, and have a gradient."""
    routing, rank, world = routing_of(group.size(), k=3, kind="equal ids"), group.rank(), group.size()
    order = [*(w for w in range(world) if w != rank), rank]
    drawn = draw_of(routing, rank)
    x = drawn.x.requires_grad_()
    dispatched = dispatch(x, drawn.ids, drawn.weights, 2 * world, group)
    wanted_rows, wanted_ids, wanted_weights, counts = [], [], [], [0] * world
    for source in order:
        other = draw_of(routing, source)
        for t, ids in enumerate(other.ids.tolist()):
            if any(e // 2 == rank for e in ids):
                counts[source] += 1
                wanted_rows.append(other.x[t])
                wanted_ids.append([e % 2 if e // 2 == rank else -1 for e in ids])
                wanted_weights.append(other.weights[t])
    assert dispatched.counts == tuple(counts)
    assert dispatched.experts.tolist() == wanted_ids
    assert dispatched.rows is dispatched.rows
    assert dispatched.rows.is_contiguous()
    assert torch.equal(dispatched.rows, torch.stack(wanted_rows) if wanted_rows else x[:0])
    assert torch.equal(dispatched.weights, torch.stack(wanted_weights) if wanted_rows else drawn.weights[:0])
    combine(dispatched.rows * 2, dispatched).sum().backward()
    ranks = [len({e // 2 for e in ids}) for ids in drawn.ids.tolist()]
    assert x.grad is not None
    assert x.grad[:, 0].tolist() == [2.0 * n for n in ranks]


@pytest.mark.ranks(1, 2)
def test_padding_of_experts(group: ProcessGroup) -> None:
    routing, rank = routing_of(group.size(), k=4, experts=3), group.rank()
    drawn = draw_of(routing, rank)
    dispatched = dispatch(drawn.x, drawn.ids, drawn.weights, 3 * group.size(), group)
    plain, numbers = dispatched.by_expert()
    padded, counts = dispatched.by_expert(8)
    assert counts.tolist() == [-(-n // 8) * 8 for n in numbers.tolist()]
    assert len(padded) % 8 == 0
    start = 0
    for part, count, number in zip(plain.split(numbers.tolist()), counts.tolist(), numbers.tolist(), strict=True):
        assert torch.equal(padded[start : start + number], part)
        assert not padded[start + number : start + count].any()
        start += count
    assert not padded[start:].any()
    summed = dispatched.summed(padded + 1)
    dispatched.by_expert()
    assert torch.equal(summed, dispatched.summed(plain + 1))


@pytest.mark.ranks(2)
def test_messages_and_plans(group: ProcessGroup) -> None:
    """Two all-to-alls of a dispatch, of its counts and its rows; one of a combine, and one of each backward."""
    calls, start = [], backend.all_to_all

    def counted(out: Tensor, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        calls.append(x.dtype)
        return start(out, x, *args, **kwargs)

    from tritoncomm.core import exchange, memory, passes

    caches = [memory.contiguous_stride, passes.whole_tensors]
    before = None
    for seed in range(6):
        drawn = draw_of(routing_of(2, tokens=(5 + seed, 3 + seed), seed=seed), group.rank())
        x = drawn.x.requires_grad_()
        calls.clear()
        with (
            mock.patch.object(backend, "all_to_all", counted),
            mock.patch.object(exchange.backend, "all_to_all", counted),
        ):
            out = apply(x, drawn.ids, drawn.weights, drawn.scales[:2], routing_of(2), group)
            out.sum().backward()
        assert calls == [torch.int64, *[torch.uint8] * 4]
        sizes = [cache.cache_info().currsize for cache in caches]
        before = before if before is not None else sizes
    assert sizes == before, "no cache has an entry for each list of sizes"


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_what_is_kept_for_backward(group: ProcessGroup, path: str) -> None:
    """Rows are kept once, as the experts' outputs; all else is weights and positions, as docs/experts.md says."""
    x, weights = torch.rand(6, 16, requires_grad=True), torch.rand(6, 2, requires_grad=True)
    ids = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 1], [2, 0]])
    storages: dict[int, Tensor] = {}

    def keep(saved: Tensor) -> Tensor:
        storages[saved.untyped_storage().data_ptr()] = saved
        return saved

    with tritoncomm.path(path), torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        dispatched = dispatch(x, ids, weights, 4, group)
        rows, _ = dispatched.by_expert()
        outputs = rows.clone()
        combine(dispatched.summed(outputs), dispatched).sum()
    kept = [saved for saved in storages.values() if saved.is_floating_point()]
    assert sorted(saved.numel() for saved in kept) == sorted([outputs.numel(), 2 * len(dispatched.rows)])
    assert any(saved.data_ptr() == outputs.data_ptr() for saved in kept)
    positions = sum(saved.untyped_storage().nbytes() for saved in storages.values() if not saved.is_floating_point())
    assert positions <= 8 * (2 * len(rows) + 2 * dispatched.rows.shape[0] + 3 * ids.numel())


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("differs", "field"), [("hidden", "shape"), ("k", "shape"), ("dtype", "dtype"), ("experts", "experts")]
)
def test_check_mode_names_what_ranks_differ_in(group: ProcessGroup, differs: str, field: str) -> None:
    """Before anything is sent; the columns of a combine, too."""
    last = group.rank() == 2
    k, hidden = 2 + (last and differs == "k"), 8 + 8 * (last and differs == "hidden")
    x = torch.zeros(group.rank(), hidden, dtype=torch.bfloat16 if last and differs == "dtype" else torch.float32)
    ids, number = torch.zeros(len(x), k, dtype=torch.int64), 6 if last and differs == "experts" else 3
    with p2p.check():
        with pytest.raises(MismatchError, match=rf"differ in {field}"):
            dispatch(x, ids, torch.ones(len(x), k), number, group)
        if differs == "hidden":
            x = torch.zeros(2, 8)
            dispatched = dispatch(x, ids.new_zeros(2, 1), torch.ones(2, 1), 3, group)
            with pytest.raises(MismatchError, match="differ in shape"):
                combine(dispatched.rows[:, : 7 + (not last)], dispatched)


@pytest.mark.ranks(3)
def test_ids_out_of_range_are_refused_by_every_rank_before_a_row_is_sent(group: ProcessGroup) -> None:
    rank = group.rank()
    x, weights = torch.zeros(2, 4), torch.zeros(2, 2)
    ids = torch.tensor([[0, 1], [-7, 8] if rank == 1 else [2, 3]])
    ids[0, 0] = -1 if rank == 1 else 0
    with record.recording() as counted, pytest.raises(ShapeError, match=r"from 0 to 5; rank 1 has 3 that are not"):
        dispatch(x, ids, weights, 6, group)
    assert not sum(count.bytes_sent for count in counted.values())
    dispatched = dispatch(x, ids.clamp(0, 5), weights, 6, group)
    assert combine(dispatched.rows, dispatched).shape == (2, 4)


@pytest.mark.ranks(2)
def test_bad_arguments(group: ProcessGroup) -> None:
    x, ids, weights = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)
    good = dispatch(x, ids, weights, 4, group)
    bad: list[tuple[type[Exception], str, Any]] = [
        (ShapeError, "expected x", lambda: dispatch(x[:2], ids, weights, 4, group)),
        (ShapeError, "expected x", lambda: dispatch(x, ids, weights[:, :1], 4, group)),
        (ShapeError, "expected x", lambda: dispatch(x[None], ids, weights, 4, group)),
        (ShapeError, "a multiple of the ranks", lambda: dispatch(x, ids, weights, 3, group)),
        (ShapeError, "a multiple of the ranks", lambda: dispatch(x, ids, weights, 0, group)),
        (ShapeError, "at least one each", lambda: dispatch(x, ids[:, :0], weights[:, :0], 4, group)),
        (ArgumentError, "fp16, bf16, fp32 or fp64", lambda: dispatch(x.long(), ids, weights, 4, group)),
        (ArgumentError, "fp16, bf16, fp32 or fp64", lambda: dispatch(x.to(torch.complex64), ids, weights, 4, group)),
        (ArgumentError, "int64 or int32", lambda: dispatch(x, ids.short(), weights, 4, group)),
        (ArgumentError, "floating point", lambda: dispatch(x, ids, weights.long(), 4, group)),
        (
            ArgumentError,
            "not a nested",
            lambda: dispatch(torch.nested.nested_tensor([x], layout=torch.jagged), ids, weights, 4, group),
        ),
        (GroupError, "no expert group", lambda: dispatch(x, ids, weights, 4)),
        (ShapeError, "a row for each", lambda: combine(x[:1], good)),
        (ArgumentError, "fp16, bf16", lambda: combine(good.rows.long(), good)),
        (ArgumentError, "positive int", lambda: good.by_expert(0)),
        (ArgumentError, "positive int", lambda: good.by_expert(True)),
        (ArgumentError, "was not called", lambda: good.summed(good.rows)),
    ]
    for kind, text, call in bad:
        with pytest.raises(kind, match=text):
            call()
    good.by_expert()
    with pytest.raises(ShapeError, match="as from by_expert"):
        good.summed(torch.zeros(1, 4))


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("wrong", [None, [[0.0] * 4] * 3, "text", 3.0, "sparse", "meta"], ids=str)
def test_arguments_that_are_no_tensors_with_data(group: ProcessGroup, wrong: Any) -> None:
    """By name, before anything is sent: on the other ranks nothing waits."""
    x, ids, weights = torch.zeros(3, 4), torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2)

    def spoiled(tensor: torch.Tensor) -> Any:
        made = {"sparse": tensor.to_sparse, "meta": lambda: tensor.to("meta")}
        return made[wrong]() if isinstance(wrong, str) and wrong in made else wrong

    good = dispatch(x, ids, weights, 4, group)
    rows, _ = good.by_expert()
    before = record.counters()
    calls: list[tuple[str, Any]] = [
        ("dispatch: x", lambda: dispatch(spoiled(x), ids, weights, 4, group)),
        ("dispatch: experts", lambda: dispatch(x, spoiled(ids), weights, 4, group)),
        ("dispatch: weights", lambda: dispatch(x, ids, spoiled(weights), 4, group)),
        ("summed: rows", lambda: good.summed(spoiled(rows))),
        ("combine: y", lambda: combine(spoiled(x), good)),
    ]
    for words, call in calls:
        with pytest.raises(ArgumentError, match=words):
            call()
    assert record.counters() == before


@pytest.mark.ranks(1, 2)
def test_tensors_that_change_before_they_are_read(group: ProcessGroup) -> None:
    """Over one rank they are those of the call: as over several ranks, or refused, also under inference mode."""
    number = 2 * group.size()
    x, ids, weights = torch.ones(3, 4), torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, 2)

    def changed(index: int, call: Any) -> None:
        given = [x.clone(), ids.clone(), weights.clone()]
        wanted = call(dispatch(*given, number, group))
        dispatched = dispatch(*given, number, group)
        given[index] += 1
        if group.size() > 1:
            assert torch.equal(call(dispatched), wanted)
        else:
            with pytest.raises(ArgumentError, match="have changed in place since; over one rank"):
                call(dispatched)
        given[index] -= 1  # the values of before, as far as anybody knows
        with pytest.raises(ArgumentError) if group.size() == 1 else nullcontext():
            call(dispatched)

    def summed(dispatched: Dispatched) -> Tensor:
        return dispatched.summed(dispatched.by_expert().rows)

    for index, calls in enumerate(
        (
            [lambda d: d.rows, lambda d: d.by_expert().rows],
            [lambda d: d.experts, lambda d: d.by_expert().rows],
            [lambda d: d.weights, summed],
        )
    ):
        for call in calls:
            changed(index, call)
    # What is not read any more may change.
    given = [x.clone(), ids.clone(), weights.clone()]
    dispatched = dispatch(*given, number, group)
    rows, _ = dispatched.by_expert()
    given[0] += 1
    given[1] += 1
    assert torch.equal(combine(dispatched.summed(rows), dispatched), 2 * x)
    # A part of a larger tensor has the version of the whole, and is copied.
    whole = torch.ones(5, 4)
    dispatched = dispatch(whole[:3], ids, weights, number, group)
    whole += 1
    assert torch.equal(combine(summed(dispatched), dispatched), 2 * x)
    with torch.inference_mode():  # without versions
        given = [x.clone(), ids.clone(), weights.clone()]
        assert torch.equal(summed(dispatch(*given, number, group)), summed(dispatch(x, ids, weights, number, group)))


@pytest.mark.ranks(1, 2)
def test_results_of_two_alignments(group: ProcessGroup) -> None:
    """Two of them may have as many rows, in another order: of experts of 2 and 4 rows, 4 and 6 make 12."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(group.rank()))
    first = 2 * group.rank()
    ids = torch.tensor([[0], [1], [1]] * 2) + first
    dispatched = dispatch(x, ids, torch.ones(6, 1), 2 * group.size(), group)
    by_four, by_six = dispatched.by_expert(4).rows, dispatched.by_expert(6).rows
    assert len(by_four) == len(by_six)
    assert not torch.equal(by_four, by_six)
    for rows in (by_four, by_six):
        with pytest.raises(ArgumentError, match=r"12 rows with each of the alignments \[4, 6\]; call summed"):
            dispatched.summed(rows)
    dispatched = dispatch(x, ids, torch.ones(6, 1), 2 * group.size(), group)
    by_four, by_eight = dispatched.by_expert(4).rows, dispatched.by_expert(8).rows
    assert torch.equal(dispatched.summed(by_four), x)
    assert torch.equal(dispatched.summed(by_eight), x)
    dispatched = dispatch(x, ids, torch.ones(6, 1), 2 * group.size(), group)
    for alignment in (4, 6, 1, 1):
        rows, _ = dispatched.by_expert(alignment)
        assert torch.equal(dispatched.summed(rows), x)
        assert torch.equal(dispatched.summed(rows), x)


@pytest.mark.ranks(8)
def test_the_expert_group_is_the_default(group: ProcessGroup) -> None:
    tritoncomm.destroy()
    tritoncomm.initialize(data=8, expert=2)
    try:
        expert = tritoncomm.groups.get_group(tritoncomm.ParallelMode.EXPERT)
        drawn = draw_of(routing_of(2), expert.rank())
        dispatched = dispatch(drawn.x, drawn.ids, drawn.weights, 4)
        assert len(dispatched.counts) == 2
        assert torch.equal(combine(dispatched.rows, dispatched)[:0], drawn.x[:0])
    finally:
        tritoncomm.destroy()


@pytest.mark.ranks(2)
def test_strange_tensors(group: ProcessGroup) -> None:
    """Transposed and expanded tokens, ids of int32, weights of another dtype, no gradients, a frozen router."""
    rank, routing = group.rank(), routing_of(2, tokens=(4, 4), hidden=4)
    drawn = draw_of(routing, rank)
    wanted = twin(routing, rank)[0]
    half = drawn.scales[rank * 2 : rank * 2 + 2]
    for x in (drawn.x.t().contiguous().t(), torch.stack([drawn.x] * 2, 1)[:, 1], nn.Parameter(drawn.x)):
        out = apply(x, drawn.ids, drawn.weights.t().contiguous().t(), half, routing, group)
        assert torch.equal(out, wanted)
    with torch.no_grad():
        assert torch.equal(apply(drawn.x, drawn.ids, drawn.weights, half, routing, group), wanted)
    with torch.inference_mode():
        assert torch.equal(apply(drawn.x, drawn.ids, drawn.weights, half, routing, group), wanted)
    row = drawn.x[:1].expand(4, 4).requires_grad_()
    apply(row, drawn.ids, drawn.weights, half, routing, group).sum().backward()
    # Rows that nobody reads have gradients of zeros, and the rank stays in the backward.
    x = drawn.x.clone().requires_grad_()
    dispatched = dispatch(x, torch.zeros_like(drawn.ids), drawn.weights, 4, group)
    rows, counts = dispatched.by_expert()
    assert counts.tolist() == ([16, 0] if rank == 0 else [0, 0])
    combine(dispatched.summed(rows), dispatched).sum().backward()
    assert x.grad is not None
    torch.testing.assert_close(x.grad[:, 0], drawn.weights.sum(1))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("path", ["torch", "triton"])
def test_rows_of_no_columns(group: ProcessGroup, path: str) -> None:
    drawn = draw_of(routing_of(2), group.rank())
    x = drawn.x[:, :0].requires_grad_()
    with tritoncomm.path(path):
        dispatched = dispatch(x, drawn.ids, drawn.weights, 4, group)
        rows, _ = dispatched.by_expert()
        out = combine(dispatched.summed(rows), dispatched)
        out.sum().backward()
        assert combine(dispatched.rows[:, :0], dispatched).shape == out.shape == x.shape
    assert x.grad is not None
    assert x.grad.shape == x.shape


@pytest.mark.ranks(8)  # a group that some ranks alone make would shift torch's names
def test_a_group_that_was_destroyed(group: ProcessGroup) -> None:
    other = dist.new_group([0, 1])
    if group.rank() > 1:
        return
    drawn = draw_of(routing_of(2), group.rank())
    assert isinstance(other, ProcessGroup)
    x = drawn.x.requires_grad_()
    dispatched = dispatch(x, drawn.ids, drawn.weights, 4, other)
    out = combine(dispatched.rows, dispatched)
    dist.destroy_process_group(other)
    with pytest.raises(GroupError, match="destroyed"):
        dispatch(x, drawn.ids, drawn.weights, 4, other)
    del other, dispatched
    with pytest.raises(GroupError, match="destroyed"):
        out.sum().backward()
