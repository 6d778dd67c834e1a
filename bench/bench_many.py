"""Calls whose work grows with the ranks or the tensors: ours against plain torch written by hand, on the CPU.

All-to-all by split sizes that are new in every call, over a no-op process group, forward, without a gradient. A
resharding of many tensors, and a reduce-scatter of many, packed by FSDP2's operators. A step of a parallel MLP with
``tritoncomm.parallel``, against our mappings called with plain parameters. The sum of ``reduce``, against a copy of as
many bytes. Rows that only a GPU decides have no limit: a CPU copies each of 1,000 tensors by itself, as the code by
hand does, where a GPU takes one launch for all; and its sums are torch's, bf16 ones through a buffer in fp32. Nor has
the step: what it takes beyond plain parameters is torch's, of modules and DTensors (``bench_parallel`` compares it with
torch's own styles), and is another share of the step on every processor.
``python bench/bench_many.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import copy
import itertools
import random
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import parallelize_module

from bench import bench_parallel
from bench.guard import row_target
from bench.harness import Clock, Part, Row
from bench.hosts import no_op_group
from tritoncomm import collective, mappings, parallel
from tritoncomm.core import ops
from tritoncomm.reshard import Layout, reshard, reshard_plan, sequence_layout

__all__ = ["PART", "Case"]

WORLD = 8
ROWS = range(300, 900)  # that a rank sends to another
LISTS = 512  # of split sizes: no provider sees one again before it has seen as many others


@dataclass(frozen=True)
class Case:
    """One kind of call.

    Attributes:
        label: of its row.
        calls: makes the call of each provider; the peer is the one that is not ours.
        limit: largest ratio; None where a CPU cannot tell.
        inner: calls in a sample.
    """

    label: str
    calls: Callable[[], Iterator[dict[str, Callable[[], Any]]]]
    limit: float | None
    inner: int


def exchanges(world: int) -> Iterator[dict[str, Callable[[], Any]]]:
    """All-to-all by lists that are new in every call."""
    draw, rank = random.Random(0), world // 2
    lists = [[[draw.choice(ROWS) for _ in range(world)] for _ in range(2)] for _ in range(LISTS)]
    for received, sent in lists:
        received[rank] = sent[rank]
    rows = torch.zeros(ROWS.stop * world, 1)

    def plain(group: ProcessGroup, x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        out = x.new_empty([sum(received), *x.shape[1:]])
        dist.all_to_all_single(out, x, received, sent, group=group)
        return out

    with no_op_group(world, rank) as group:

        def call(function: Callable[..., Tensor]) -> Callable[[], Any]:
            turns = itertools.cycle([(rows[: sum(sent)], received, sent) for received, sent in lists])
            return lambda: function(group, *next(turns))

        yield {"ours": call(mappings.all_to_all), "by hand": call(plain)}


def scattered(dim: int, count: int = 1000) -> Iterator[dict[str, Callable[[], Any]]]:
    """Reduce-scatter of many tensors; by hand with FSDP2's operators, which want dim 0."""
    tensors = [torch.randn(64, 128) for _ in range(count)]
    with no_op_group(WORLD, 3) as group:

        def by_hand() -> list[Tensor]:
            leading = tensors if dim == 0 else [torch.cat(torch.chunk(x, WORLD, dim)) for x in tensors]
            total = sum(x.numel() for x in tensors)
            wire = torch.empty(WORLD, total // WORLD)
            torch._chunk_cat(leading, 0, WORLD, out=wire)  # pyright: ignore[reportPrivateImportUsage]
            summed = torch.empty(total // WORLD)
            dist.reduce_scatter_tensor(summed, wire.view(-1), group=group)
            sizes = [x.numel() // WORLD for x in tensors]
            shapes = [(8, 128) if dim == 0 else (64, 16)] * count
            return [part.view(shape) for part, shape in zip(summed.split(sizes), shapes, strict=True)]

        yield {"ours": lambda: collective.split_reduce_scatter(tensors, dim, group), "by hand": by_hand}


def resharded(count: int = 1000, side: int = 128, into: bool = False) -> Iterator[dict[str, Callable[[], Any]]]:
    """From shards of dim 0 to shards of dim 1; by hand one concatenation, one exchange, one copy per tensor."""
    each = side // WORLD
    tensors = {f"w{i}": torch.randn(each, side) for i in range(count)}
    out = {name: torch.empty(side, each) for name in tensors} if into else None
    source, target = (Layout.on_mesh((side, side), range(WORLD), [dim]) for dim in (0, 1))
    with no_op_group(WORLD, 3) as group:
        plan = reshard_plan(tensors, source, target)

        def by_hand() -> dict[str, Tensor]:
            blocks = [x.view(each, WORLD, each).transpose(0, 1).reshape(WORLD, -1) for x in tensors.values()]
            wire = torch.cat(blocks, 1)
            received = torch.empty_like(wire)
            dist.all_to_all_single(received, wire, group=group)
            results = out or {name: torch.empty(side, each) for name in tensors}
            for part, result in zip(received.split(each * each, 1), results.values(), strict=True):
                result.view(WORLD, -1).copy_(part)
            return results

        yield {"ours": lambda: plan.execute(tensors, out=out), "by hand": by_hand}


def rows_to_columns(count: int, is_new: bool = False) -> Iterator[dict[str, Callable[[], Any]]]:
    """``reshard`` of small tensors: calls that look like the one before, or tensors of new shapes in each call."""
    ranks, columns = range(WORLD), itertools.count(2)

    def tensors_of(width: int) -> dict[str, Tensor]:
        return {f"w{i}": torch.ones(1, WORLD * (width + i)) for i in range(count)}

    def layouts_of(tensors: dict[str, Tensor], dim: int) -> dict[str, Layout]:
        return {name: Layout.on_mesh((WORLD, x.shape[1]), ranks, [dim]) for name, x in tensors.items()}

    with no_op_group(WORLD, 3) as group:

        def by_hand(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
            wire = torch.cat([x.view(WORLD, -1) for x in tensors.values()], 1)
            received = torch.empty_like(wire)
            dist.all_to_all_single(received, wire, group=group)
            return dict(zip(tensors, received.split([x.shape[1] // WORLD for x in tensors.values()], 1), strict=True))

        def ours(tensors: dict[str, Tensor]) -> Any:
            return reshard(tensors, layouts_of(tensors, 0), layouts_of(tensors, 1), group=group)

        if is_new:
            yield {
                "ours": lambda: ours(tensors_of(next(columns))),
                "by hand": lambda: by_hand(tensors_of(next(columns))),
            }
        else:
            same = tensors_of(1)
            source, target = layouts_of(same, 0), layouts_of(same, 1)
            yield {"ours": lambda: reshard(same, source, target, group=group), "by hand": lambda: by_hand(same)}


def zigzag() -> Iterator[dict[str, Callable[[], Any]]]:
    """``sequence_layout`` of a small tensor; by hand one exchange of its rows."""
    x = torch.ones(1, 2 * WORLD, 4)
    with no_op_group(WORLD, 3) as group:

        def by_hand() -> Tensor:
            received = torch.empty_like(x)
            dist.all_to_all_single(received.view(-1, 4), x.view(-1, 4), [2] * WORLD, [2] * WORLD, group=group)
            return received.index_select(1, order)

        order = torch.randperm(2 * WORLD)
        yield {"ours": lambda: sequence_layout(x, "contiguous", "zigzag", group=group), "by hand": by_hand}


def planned(count: int = 1000) -> Iterator[dict[str, Callable[[], Any]]]:
    """A plan of distinct tensors, over one of as many tensors of one shape."""
    ranks, sizes = range(WORLD), itertools.count(8, count)

    def plan(is_distinct: bool) -> Any:
        first = next(sizes)
        shapes = {f"w{i}": (8 * WORLD, first + i * is_distinct) for i in range(count)}
        sides = [{name: Layout.on_mesh(shape, ranks, [dim]) for name, shape in shapes.items()} for dim in (0, 1)]
        return reshard_plan(dict.fromkeys(shapes, torch.float32), *sides, ranks=ranks, rank=0)

    yield {"ours": lambda: plan(True), "one shape": lambda: plan(False)}


def styled(sequence: bool) -> Iterator[dict[str, Callable[[], Any]]]:
    """A step of the model of ``bench_parallel``; by hand with the same mappings, and plain parameters."""
    with bench_parallel.mesh_of_one() as mesh:
        group = mesh.get_group()
        torch.manual_seed(0)
        plain = nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
        model = styled_model(plain, mesh, sequence)
        x = torch.randn(2, 8 // bench_parallel.WORLD if sequence else 8, 16, requires_grad=True)
        locals_ = [nn.Parameter(local(each).clone()) for each in model.parameters()]

        def step(function: Callable[[Tensor], Tensor], parameters: list[nn.Parameter]) -> None:
            for each in parameters:
                each.grad = None
            function(x).sum().backward()

        by_hand = partial(forward, parameters=locals_, group=group, sequence=sequence)
        yield {
            "ours": partial(step, model, list(model.parameters())),
            "by hand": partial(step, by_hand, locals_),
        }


def styled_model(plain: nn.Module, mesh: DeviceMesh, sequence: bool) -> nn.Module:
    """The model with our styles."""
    plan = bench_parallel.plan(parallel, sequence)
    return parallelize_module(copy.deepcopy(plain), mesh, plan, src_data_rank=None)


def local(parameter: Any) -> Tensor:
    """This rank's shard of a parameter."""
    return (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()


def forward(x: Tensor, parameters: list[nn.Parameter], group: ProcessGroup, sequence: bool) -> Tensor:
    """The model by hand."""
    norm, shift, first, first_bias, second, second_bias = parameters
    copy_to = mappings.copy_to_tensor_model_parallel_region
    if not sequence:
        x = copy_to(F.layer_norm(x, (16,), norm, shift), group)
        x = F.linear(F.gelu(F.linear(x, first, first_bias)), second)
        return mappings.reduce_from_tensor_model_parallel_region(x, group) + second_bias
    x = F.layer_norm(x, (16,), copy_to(norm, group), copy_to(shift, group))
    x = F.linear(F.gelu(F.linear(mappings.all_gather_dim(x, 1, group), first, first_bias)), second)
    return mappings.reduce_scatter_dim(x, 1, group) + copy_to(second_bias, group)


def summed(parts: int, dtype: torch.dtype, elements: int = 1 << 20) -> Iterator[dict[str, Callable[[], Any]]]:
    """The sum of a wire's parts, and a copy that reads and writes as many bytes."""
    wire = torch.randn(parts, elements).to(dtype)
    out = torch.empty(elements, dtype=dtype)
    moved = (wire.nbytes + out.nbytes) // 2
    source, target = torch.zeros(moved, dtype=torch.uint8), torch.empty(moved, dtype=torch.uint8)
    yield {"ours": lambda: ops.reduce(wire, out=out), "roof": lambda: target.copy_(source)}


CASES = [
    *(
        # Checks and counts are 2 to 3 us at any size, and a larger part of 8 ranks' exchange on a faster processor.
        Case(
            f"all_to_all, sizes new in every call, {world} ranks",
            partial(exchanges, world),
            1.15 if world == 8 else 1.10,
            10,
        )
        for world in (8, 64, 256)
    ),
    *(Case(f"split_reduce_scatter, 1,000 tensors, dim {dim}", partial(scattered, dim), None, 1) for dim in (0, 1)),
    Case("reshard, 1,000 tensors", resharded, None, 1),
    Case("reshard, 1,000 tensors, out=", partial(resharded, into=True), None, 1),
    Case("reshard, one tensor again", partial(rows_to_columns, 1), None, 20),
    Case("reshard, 200 tensors again", partial(rows_to_columns, 200), None, 1),
    Case("reshard, 50 tensors of new shapes", partial(rows_to_columns, 50, True), None, 1),
    Case("sequence_layout, again", zigzag, None, 20),
    Case("reshard_plan, 1,000 distinct tensors", planned, None, 1),
    *(
        Case(f"step, {case}", partial(styled, case == bench_parallel.CASES[1]), None, 5)
        for case in bench_parallel.CASES
    ),
    *(
        Case(f"reduce, {parts} parts, {str(dtype).removeprefix('torch.')}", partial(summed, parts, dtype), None, 1)
        for dtype, numbers in ((torch.float32, (2, 8)), (torch.bfloat16, (4, 8)))
        for parts in numbers
    ),
]


def measure(case: Case, host: None, clock: Clock) -> Iterator[Row]:
    """The one row of a case."""
    for calls in case.calls():
        yield clock.time(case.label, calls, case.inner, **({} if case.limit is None else row_target(case.limit)))


PART = Part(name="many", cases=CASES, measure=measure, rounds=40)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
