"""What `explain` tells of layers is what `record` counts for the real call, forward and backward."""

import random
from typing import Any

import pytest
import torch
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import mappings, record, variables
from tritoncomm.core import ops, wire_sum
from tritoncomm.core.cost import DEFAULTS
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.experts import combine, dispatch
from tritoncomm.explain import LayerArguments, explain
from tritoncomm.explain.steps import Movement
from tritoncomm.recurrent import by_heads, conv_halo
from tritoncomm.ulysses import UlyssesAttention


def check(movement: Movement, counted: dict[tuple[str, str], record.Count], what: Any) -> None:
    copied, sent = (sum(getattr(count, key) for count in counted.values()) for key in ("bytes_copied", "bytes_sent"))
    assert (movement.bytes_copied, movement.bytes_sent) == (copied, sent), (what, movement, counted)
    assert {path for (_, path), count in counted.items() if count.bytes_copied} <= {movement.path}, (what, counted)


def compared(told: Any, forward: Any, tensors: list[Tensor], what: Any) -> None:
    """Run a call and its backward, and compare what they count with a plan."""
    with record.recording() as counted:
        out = forward()
    check(told.forward, counted, what)
    with record.recording() as counted:
        torch.autograd.grad(out, tensors, torch.ones_like(out))
    check(told.backward, counted, what)


def leaf(shape: Any, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.ones(shape, dtype=dtype, requires_grad=True)


def options_of(group: ProcessGroup, **options: Any) -> dict[str, Any]:
    layer = LayerArguments(**{key: options.pop(key) for key in LayerArguments._fields if key in options})
    return {"device": "cpu", "rank": group.rank(), "layer": layer, **options}


def attentions_and_recurrences(group: ProcessGroup) -> None:
    world, rank = group.size(), group.rank()

    def repeated(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return (q + k.sum() + v.sum()).contiguous()

    sizes = tuple(3 + w for w in range(world))
    for positions, heads, cut, dtype in (
        (1, (8, 8), None, torch.float32), (1, (8, 2), None, torch.bfloat16), (0, (8, 4), None, torch.float32),
        (1, (6, 6), None, torch.float32), (1, (8, 1), sizes, torch.float64), (0, (7, 7), sizes, torch.float32),
    ):  # fmt: skip
        local = 4 if cut is None else cut[rank]
        shape = (2, local, heads[0], 8) if positions else (local, 2, heads[0], 8)
        q, k, v = (leaf((*shape[:2], count, 8), dtype) for count in (heads[0], heads[1], heads[1]))
        attention = UlyssesAttention(group, layout="bshd" if positions else "sbhd", attention=repeated)
        what = (positions, heads, cut, dtype)
        told = explain("ulysses", shape, world, dtype, (positions,), **options_of(group, heads=heads, sizes=cut))
        compared(told, lambda: attention(q, k, v, sequence_sizes=cut), [q, k, v], what)  # noqa: B023
    for heads, cut in (((8,), None), ((8, 4, 8), None), ((6, 6), sizes)):
        local = 4 if cut is None else cut[rank]
        tensors = [leaf((2, local, count, 8)) for count in heads]

        def added(*tensors: Tensor) -> Tensor:
            return sum((x.sum() for x in tensors[1:]), tensors[0] * 1)

        told = explain("by_heads", (2, local, heads[0], 8), world, torch.float32,
                       **options_of(group, heads=heads, sizes=cut))  # fmt: skip
        compared(told, lambda: by_heads(added, group)(*tensors, sizes=cut), tensors, (heads, cut))  # noqa: B023


def halos(group: ProcessGroup) -> None:
    world, rank = group.size(), group.rank()

    def convolve(x: Tensor, weight: Tensor) -> Tensor:
        width = weight.shape[-1] - 1
        return torch.nn.functional.conv1d(torch.nn.functional.pad(x, (width, 0)), weight, groups=x.shape[1])

    for taps, cut in ((4, None), (1, None), (6, tuple(2 + w for w in range(world)))):
        local = 4 if cut is None else cut[rank]
        x, weight = leaf((2, 3, local)), leaf((3, 1, taps))
        told = explain("conv_halo", x.shape, world, torch.float32, **options_of(group, taps=taps, sizes=cut))
        compared(told, lambda: conv_halo(convolve, group)(x, weight, sizes=cut), [x], (taps, cut))  # noqa: B023


def sums(group: ProcessGroup, path: str) -> None:
    world = group.size()
    cases = [
        (shape, dim, cut, dtype, wire, by_nodes)
        for shape, dim, cut in (
            ((8 * world, 6), 0, None), ((5, 4 * world), 1, None), ((7, 2 * world + 1), 1, (*[2] * (world - 1), 3)),
        )
        for dtype in (torch.float32, torch.bfloat16) for wire in (torch.bfloat16, torch.float16)
        for by_nodes in (False, True)
    ]  # fmt: skip
    for shape, dim, cut, dtype, wire, by_nodes in cases:
        for x in (leaf(shape, dtype), leaf(shape[::-1], dtype).t()):
            rates = DEFAULTS["cpu"].__class__(0.0, 1.0, 1.0, 1.0, 2, "")
            options = options_of(group, wire=wire, by_nodes=by_nodes, sizes=cut, rates=rates)
            with variables.NODE.override(2 if by_nodes else 0), ops.path(path):  # pyright: ignore[reportArgumentType]
                told = explain("reduce_scatter", shape, world, dtype, (dim,), stride=x.stride(), **options)
                exchange = {"exchange": "node" if by_nodes else "flat"}
                compared(
                    told,
                    lambda x=x, dim=dim, cut=cut, wire=wire, exchange=exchange: mappings.reduce_scatter_dim(
                        x, dim, group, sizes=cut, wire=wire, **exchange  # pyright: ignore[reportArgumentType]
                    ),
                    [x], (shape, dim, cut, dtype, wire, by_nodes, x.stride()),
                )  # fmt: skip
    chunk = wire_sum._LEAST
    try:
        wire_sum._LEAST = 64
        x = leaf((32 * world, 6))
        told = explain("reduce_scatter", x.shape, world, x.dtype, (0,), **options_of(group, wire=torch.bfloat16))
        assert all(step.what.endswith(" chunks") for step in told.forward.steps)
        call = lambda: mappings.reduce_scatter_dim(x, 0, group, wire=torch.bfloat16, exchange="flat")  # noqa: E731
        compared(told, call, [x], "chunks")
    finally:
        wire_sum._LEAST = chunk


def experts(group: ProcessGroup, path: str) -> None:
    world, rank = group.size(), group.rank()
    for k, hidden, dtype, tokens in ((1, 8, torch.float32, 6), (3, 24, torch.bfloat16, 9), (2, 5, torch.float64, 7)):
        dice = random.Random(k)
        chosen = [[dice.sample(range(2 * world), k) for _ in range(tokens)] for _ in range(world)]
        rows = [[sum(any(i // 2 == w for i in ids) for ids in chosen[r]) for w in range(world)] for r in range(world)]
        x, ids, weights = leaf((tokens, hidden), dtype), torch.tensor(chosen[rank]), leaf((tokens, k))
        options = options_of(group, topk=k, sizes=rows[rank], out_sizes=[line[rank] for line in rows])
        with ops.path(path):  # pyright: ignore[reportArgumentType]
            told = {name: explain(name, (tokens, hidden), world, dtype, **options) for name in ("dispatch", "combine")}
            received = dispatch(x, ids, weights, 2 * world, group)
            compared(told["dispatch"], lambda: dispatch(x, ids, weights, 2 * world, group).rows, [x], (k, hidden))  # noqa: B023
            y = leaf(received.rows.shape, dtype)
            compared(told["combine"], lambda: combine(y, received), [y], (k, hidden))  # noqa: B023
        assert told["combine"].forward.shape == tuple(received.rows.shape)


CALLS = {
    "attentions and recurrences": (attentions_and_recurrences, ()),
    "halos": (halos, ()),
    **{f"sums-{path}": (sums, (path,)) for path in ("auto", "triton")},
    **{f"experts-{path}": (experts, (path,)) for path in ("auto", "triton")},
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_the_bytes_are_those_of_the_real_call(pool: Pool, call: str, world: int) -> None:
    function, arguments = CALLS[call]
    pool.run(function, *arguments, world=world)


ATTENTION, ROWS = (2, 64, 8, 16), (64, 32)


@pytest.mark.parametrize(
    ("op", "shape", "layer", "options", "error", "words"),
    [
        ("ulysses", (2, 64, 8), {}, {}, ShapeError, "takes [batch, positions, heads, head_dim]"),
        ("ulysses", ATTENTION, {"heads": (4, 4)}, {}, ArgumentError, "8 as in the shape"),
        ("ulysses", ATTENTION, {}, {"dims": (2,)}, ArgumentError, "positions in dim 0 or 1"),
        ("ulysses", ATTENTION, {}, {"dims": (1, 0)}, ArgumentError, "takes one dim"),
        ("ulysses", ATTENTION, {}, {"world": 16}, ShapeError, "fewer than the 16 ranks"),
        ("ulysses", ATTENTION, {}, {"stride": (1, 1, 1, 1)}, ArgumentError, "without strides"),
        ("ulysses", ATTENTION, {"heads": (8, 3)}, {}, ShapeError, "no multiple of 3"),
        ("ulysses", ATTENTION, {"topk": 2}, {}, ArgumentError, "takes no topk; dispatch and combine do"),
        ("ulysses", ATTENTION, {}, {"sizes": (63, 1)}, ShapeError, "this rank holds 64"),
        ("by_heads", ATTENTION, {}, {"dims": (1,)}, ArgumentError, "takes no dims"),
        ("by_heads", ATTENTION, {"heads": (8, 4, 2)}, {}, UnsupportedError, "two different numbers of heads"),
        ("by_heads", ATTENTION, {"heads": (8, 0)}, {}, ArgumentError, "are 1 or more"),
        ("by_heads", ATTENTION, {}, {"world": 16}, UnsupportedError, "columns are not explained"),
        ("by_heads", ATTENTION, {"heads": (4,)}, {}, ArgumentError, "the most heads"),
        ("conv_halo", (2, 3, 8), {}, {}, ArgumentError, "one tap or more"),
        ("conv_halo", (2, 3, 8), {"taps": 2}, {"dims": (0,)}, ArgumentError, "dim 1 or 2"),
        ("conv_halo", (2, 3, 8), {"taps": 2}, {"out_sizes": (4, 4)}, ArgumentError, "no sizes of what comes"),
        ("dispatch", ROWS, {}, {}, ArgumentError, "the number of experts of a token"),
        ("dispatch", ROWS, {"topk": 2}, {"sizes": (1, 2)}, ArgumentError, "from each rank, or neither"),
        ("dispatch", ROWS, {"topk": 2}, {"sizes": (1, 2), "out_sizes": (2, 2)}, ShapeError, "as many for this rank"),
        ("combine", ROWS, {"topk": 2}, {"sizes": (65, 2), "out_sizes": (65, 2)}, ShapeError, "at most 64 rows"),
        ("reduce_scatter", ROWS, {"wire": torch.float32}, {}, ArgumentError, "must be bfloat16 or float16"),
        ("reduce_scatter", ROWS, {"by_nodes": True}, {}, ArgumentError, "two levels need wire"),
        ("reduce_scatter", ROWS, {"wire": torch.bfloat16}, {"dtype": torch.int64}, UnsupportedError, "floating point"),
        ("reduce_scatter", (36, 2), {"wire": torch.bfloat16, "by_nodes": True}, {"world": 12}, UnsupportedError,
         "as many ranks on every node"),
        ("all_gather", ROWS, {"wire": torch.bfloat16}, {}, ArgumentError, "takes no wire; reduce_scatter do"),
    ],
)  # fmt: skip
def test_layers_that_cannot_be_run_cannot_be_explained(
    op: str, shape: tuple[int, ...], layer: Any, options: Any, error: type[Exception], words: str
) -> None:
    world = options.pop("world", 2)
    with pytest.raises(error, match=words.replace("[", r"\[")):
        explain(op, shape, world, layer=LayerArguments(**layer), **options)


def test_one_rank_sends_nothing() -> None:
    for op, shape, layer in (("ulysses", ATTENTION, {}), ("dispatch", ROWS, {"topk": 2})):
        told = explain(op, shape, 1, layer=LayerArguments(**layer))
        assert told.forward.steps == told.backward.steps == ()
    assert explain("reduce_scatter", ROWS, 1, layer=LayerArguments(wire=torch.bfloat16)).forward.steps == ()


def test_a_dispatch_without_sizes_has_the_rows_of_random_experts() -> None:
    told = explain("dispatch", (1000, 64), 8, layer=LayerArguments(topk=8)).forward
    rows = round(1000 * (1 - (7 / 8) ** 8))
    assert told.result == (8 * rows, 64)
    assert told.bytes_sent == 7 * rows * (128 + 8 * 8)


def test_two_levels_take_the_rates_of_the_node_and_of_the_network() -> None:
    told = explain("reduce_scatter", (4096, 4096), 16, layer=LayerArguments(wire=torch.bfloat16, by_nodes=True)).forward
    inside, between = [step for step in told.steps if step.path == "backend"]
    chunks, rates = int(inside.what.split()[-2]), DEFAULTS["cuda"]
    assert inside.seconds == pytest.approx(chunks * rates.latency + inside.bytes_sent / rates.link)
    assert between.seconds == pytest.approx(chunks * rates.latency + between.bytes_sent / rates.network)


def test_chunks_of_a_sum_start_at_multiples_of_16_bytes() -> None:
    """Blocks that start elsewhere are copied by NCCL by single bytes."""
    for shape, by_nodes in (((8192, 8192), True), ((8192, 8192), False), ((4096, 5000), False)):
        told = explain(
            "reduce_scatter", shape, 16, layer=LayerArguments(wire=torch.bfloat16, by_nodes=by_nodes)
        ).forward
        sent = [step for step in told.steps if step.path == "backend"]
        assert all(step.what.endswith(" chunks") and not step.misaligned for step in sent), (shape, sent)
