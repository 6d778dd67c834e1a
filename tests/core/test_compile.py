"""torch.compile(fullgraph=True) of mappings and of blocks around them gives what eager gives, and is counted.

Each graph is compiled once for one shape and once more, with symbols for sizes, for all others.
"""

import shutil
import warnings
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from blocks import BLOCKS, HIDDEN, make_block
from pool import Pool
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.fx.experimental.proxy_tensor import make_fx

from tritoncomm import collective, record, ulysses
from tritoncomm import mappings as m
from tritoncomm.core import ops
from tritoncomm.errors import ShapeError, UnsupportedError

CALLS = 20
LENGTHS = (8, 12, 20)
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("c++")), reason="inductor needs a C++ compiler"
)

on_backends = pytest.mark.parametrize(
    ("backend", "world"),
    [
        ("aot_eager", 2),
        pytest.param("aot_eager", 4, marks=pytest.mark.slow),
        *(pytest.param("eager", world, marks=pytest.mark.slow) for world in (2, 4)),
    ],
)


def whole_layer(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Every sequence- and tensor-parallel mapping, evenly cut."""

    def layer(x: Tensor) -> Tensor:
        hidden = m.all_to_all_sp2hp(x, group)
        rows = m.all_to_all_hp2sp(hidden * 2, group)
        full = m.gather_from_sequence_parallel_region(rows, group=group)
        part = m.reduce_scatter_to_sequence_parallel_region(full.relu(), group)
        heads = m.all_to_all_dims(part.view(4, 4, 4), 1, 0, group)
        copied = m.copy_to_tensor_model_parallel_region(heads, group)
        total = m.reduce_from_tensor_model_parallel_region(copied * 0.5, group)
        last = m.scatter_to_tensor_model_parallel_region(total, group)
        return m.gather_from_tensor_model_parallel_region(last, group).sin()

    return layer


def uneven_layer(group: ProcessGroup) -> Callable[[Tensor], Tensor]:
    """Split sizes: tokens that go to ranks unevenly and come back, and rows and heads that do not divide."""
    rank, world = group.rank(), group.size()
    heads, rows = ((3, 1), (4, 0)) if world == 2 else ((2, 0, 1, 1), (1, 0, 12, 3))
    sent = [1 + (rank + to) % 2 for to in range(world)]
    sent[-1] += 4 * world // 2 - sum(sent)
    table = [[1 + (source + to) % 2 for to in range(world)] for source in range(world)]
    for row in table:
        row[-1] += 4 * world // 2 - sum(row)
    received = [table[source][rank] for source in range(world)]
    sizes = [sum(table[source][to] for source in range(world)) for to in range(world)]

    def layer(x: Tensor) -> Tensor:
        tokens = m.all_to_all(group, x.repeat(world // 2, 1), received, sent)
        full = m.gather_from_sequence_parallel_region(tokens.relu(), group=group, output_split_sizes=sizes)
        part = m.reduce_scatter_to_sequence_parallel_region(full * 2, group, sizes)
        back = m.all_to_all(group, part, sent, received)
        mine = m.all_to_all_dims(back.view(2, world, 4, 4), 2, 1, group, scatter_sizes=heads)
        home = m.all_to_all_dims(mine * 2, 1, 2, group, scatter_sizes=rows, gather_sizes=heads)
        every = m.all_gather_dim(home, 1, group, sizes=rows)
        some = m.reduce_scatter_dim(every.relu(), 1, group, sizes=rows)
        return (some + m.split_dim(every, 1, group, sizes=rows)).sin()

    return layer


def run_compiled(group: ProcessGroup, backend: str, made_by: str = "whole_layer") -> dict[str, int]:
    import torch._dynamo
    from torch._dynamo.utils import counters

    layer = globals()[made_by](group)
    torch._dynamo.reset()
    counters.clear()
    compiled: Any = torch.compile(layer, fullgraph=True, backend=backend)
    made = torch.Generator().manual_seed(group.rank())
    with torch._dynamo.config.patch(error_on_recompile=True):
        for call in range(CALLS):
            values = torch.randn(4, 16, generator=made)
            x, y = values.clone().requires_grad_(), values.clone().requires_grad_()
            if call == 1:
                record.reset()
            out = compiled(x)
            out.sum().backward()
            wanted = layer(y) if call in (0, 1, CALLS - 1) else None
            if wanted is not None:
                wanted.sum().backward()
                torch.testing.assert_close(out, wanted)
                torch.testing.assert_close(x.grad, y.grad)
    assert counters["stats"]["unique_graphs"] == 1, counters["stats"]
    counted = record.counters()
    return {name: count.calls for (name, path), count in counted.items() if path == "compiled"}


def check(answers: list[dict[str, int]]) -> None:
    for calls in answers:
        assert calls.get("all_to_all_sp2hp") == CALLS - 1, calls
        assert calls.get("all_to_all_hp2sp") == CALLS - 1, calls
        assert calls.get("all_to_all_dims", 0) >= CALLS - 1, calls
        assert calls.get("gather_from_sequence_parallel_region") == CALLS - 1, calls
        assert any(name.endswith(".backward") for name in calls), calls


@on_backends
def test_compiled_is_eager(pool: Pool, backend: str, world: int) -> None:
    check(pool.run(run_compiled, backend, world=world))


@pytest.mark.parametrize(("backend", "world"), [("aot_eager", 2), pytest.param("aot_eager", 4, marks=pytest.mark.slow)])
def test_split_sizes_compile(pool: Pool, backend: str, world: int) -> None:
    for calls in pool.run(run_compiled, backend, "uneven_layer", world=world):
        assert calls.get("all_to_all") == 2 * (CALLS - 1), calls
        assert calls.get("all_to_all_dims") == 4 * (CALLS - 1), calls
        assert calls.get("reduce_scatter_dim") == 2 * (CALLS - 1), calls
        assert calls.get("reduce_scatter_to_sequence_parallel_region") == CALLS - 1, calls


@needs_compiler
@pytest.mark.slow
def test_every_mapping_through_inductor(pool: Pool) -> None:
    check(pool.run(run_compiled, "inductor", world=2, timeout=110))


def compiled_once(function: Any, backend: Any) -> Any:
    """``function`` compiled as one graph, with nothing compiled before it."""
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    return torch.compile(function, fullgraph=True, backend=backend)


def graphs() -> int:
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"]


def trained(function: Any, x: Tensor) -> tuple[list[Tensor], tuple[int, int]]:
    """The result and the gradients of the input and of a module's parameters; calls and bytes of the record."""
    leaf = x.clone().requires_grad_()
    parameters = list(function.parameters()) if isinstance(function, torch.nn.Module) else []
    with record.recording() as counted:
        out = function(leaf)
        gradients = torch.autograd.grad(out.sin().sum(), [leaf, *parameters])
    sent = [count for count in counted.values() if count.bytes_sent]
    return [out.detach(), *gradients], (sum(count.calls for count in sent), sum(count.bytes_sent for count in sent))


def block_is_eager(
    group: ProcessGroup, name: str, sequence: bool, backend: Any, lengths: Sequence[int] = LENGTHS
) -> int:
    """Values, gradients, calls and bytes for every length; the number of graphs."""
    plain = make_block(name, group, sequence)
    compiled = compiled_once(plain, backend)
    for length in lengths:
        made = torch.Generator().manual_seed(group.rank() if sequence or name == "ulysses" else 0)
        x = torch.randn(length, 2, HIDDEN, dtype=torch.float64, generator=made)
        (got, counted), (wanted, expected) = trained(compiled, x), trained(plain, x)
        for ours, theirs in zip(got, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-10)
        if name == "checkpointed":  # what is computed again is the compiler's choice: less in torch 2.11
            assert (0, 0) < counted <= expected
        else:
            assert counted == expected > (0, 0)
    return graphs()


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("sequence", [True, False], ids=["sequence", "no-sequence"])
@pytest.mark.parametrize("name", list(BLOCKS))
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=needs_compiler)])
def test_blocks(pool: Pool, backend: str, name: str, sequence: bool) -> None:
    assert pool.run(block_is_eager, name, sequence, backend, world=2, timeout=580) == [2, 2]


def test_a_block_of_several_lengths(pool: Pool) -> None:
    assert pool.run(block_is_eager, "norm", True, "aot_eager", world=2) == [2, 2]


def inspected_block(group: ProcessGroup) -> list[tuple[int, list[int]]]:
    """Inputs of the graphs of a block, and which of them they write; the block is compared with eager, too."""
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    seen: list[tuple[int, list[int]]] = []

    def inner(graph: Any, inputs: Any, **options: Any) -> Any:
        compiled = compile_fx_inner(graph, inputs, **options)
        seen.append((len(inputs), list(compiled.mutated_input_idxs)))  # pyright: ignore[reportAttributeAccessIssue]
        return compiled

    def backend(graph: Any, inputs: Any) -> Any:
        return compile_fx(graph, inputs, inner_compile=inner)

    assert block_is_eager(group, "mlp", True, backend, LENGTHS[:1]) == 1
    return seen


@needs_compiler
@pytest.mark.slow
def test_inductor(pool: Pool) -> None:
    """A block, in graphs that CUDA graphs admit: forward takes the input and parameters, and no graph writes inputs."""
    for forward, backward in pool.run(inspected_block, world=2, timeout=110):
        assert forward == (6, [])
        assert backward[1] == []


def forwards_before_backwards(group: ProcessGroup, backend: str) -> None:
    """As pipelines and accumulated gradients do: what one call counts must not spoil what another has saved."""
    plain = make_block("norm", group, True)
    compiled = compiled_once(plain, backend)
    xs = [torch.randn(8, 2, HIDDEN, dtype=torch.float64) for _ in range(3)]
    leaves = [x.clone().requires_grad_() for x in xs]
    for x, leaf, out in zip(xs, leaves, [compiled(leaf) for leaf in leaves], strict=True):
        (grad,) = torch.autograd.grad(out.sin().sum(), leaf)
        torch.testing.assert_close(grad, trained(plain, x)[0][1], rtol=1e-9, atol=1e-10)


def sizes_change(group: ProcessGroup, backend: str) -> None:
    """Split sizes that differ from call to call, as those of experts do: two graphs, not one for every list."""

    def exchanged(x: Tensor, received: list[int], sent: list[int]) -> Tensor:
        return m.all_to_all(group, x * 2, received, sent).relu()

    rank, compiled = group.rank(), compiled_once(exchanged, backend)
    for a, b, c, d in ((3, 5, 2, 4), (4, 2, 6, 7), (5, 3, 3, 2), (2, 7, 4, 3)):
        sent, received = ([a, b], [a, c]) if rank == 0 else ([c, d], [b, d])
        x = torch.randn(sum(sent), 3, dtype=torch.float64)
        (got, counted), (wanted, expected) = (
            trained(partial(call, received=received, sent=sent), x) for call in (compiled, exchanged)
        )
        assert all(map(torch.equal, got, wanted))
        assert counted == expected
    assert graphs() == 2


def views_unless_triton(group: ProcessGroup) -> None:
    """Pack and unpack of an even split are plain operators, which count no bytes, unless the path is ``triton``.

    A graph for one path is not used for another.
    """
    targets: list[set[str]] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.append({str(node.target) for node in graph.graph.nodes})
        return graph.forward

    def there_and_back(x: Tensor) -> Tensor:
        return m.all_to_all_hp2sp(m.all_to_all_sp2hp(x, group), group)

    compiled, x = compiled_once(there_and_back, backend), torch.randn(4, 8)
    for path, passes in (("auto", 0), ("triton", 2), ("torch", 0), ("auto", 0)):
        with ops.path(path), record.recording() as counted:
            assert torch.equal(compiled(x), x)
        assert sum(count.bytes_copied for count in counted.values()) == passes * 2 * x.nbytes, path
        assert {name for name, _ in counted} == {"all_to_all_sp2hp", "all_to_all_hp2sp"}
    assert [sum("tritoncomm.pack" in name or "tritoncomm.unpack" in name for name in each) for each in targets] == [
        0, 2, 0,
    ]  # fmt: skip


def collectives_are_eager(group: ProcessGroup, backend: str) -> None:
    """Results and inputs as without a compiler, with whole graphs for sums that are waited for at once."""
    MAX = collective.ReduceOp.MAX

    def gathered(x: Tensor) -> Tensor:
        out, handle = collective.all_gather(x, 0, group, async_op=True)
        handle.wait()
        return out

    def reduced(x: Tensor) -> Tensor:
        collective.all_reduce(x, group)
        return x * 2

    whole: list[Callable[[Tensor], Any]] = [
        lambda x: collective.all_gather(x, 1, group),
        lambda x: collective.reduce_scatter(x, 1, group),
        lambda x: collective.all_to_all(x, group),
        lambda x: collective.all_reduce(x, group),
        lambda x: collective.all_reduce(x.T, group),
        reduced,
    ]
    broken: list[Callable[[Tensor], Any]] = [
        gathered,
        lambda x: collective.reduce_scatter(x, 0, group, MAX),
        lambda x: collective.all_reduce(x, group, MAX),
        lambda x: collective.broadcast(x, 1, group),
        lambda x: collective.reduce(x * 2, 0, group),
        lambda x: collective.split_reduce_scatter([x, x * 2], [0, 1], group, scale=0.5)[1],
    ]
    made = torch.Generator().manual_seed(group.rank())
    values = torch.randn(4, 6, generator=made)
    for i, call in enumerate([*whole, *broken]):
        torch.compiler.reset()
        compiled: Any = torch.compile(call, backend=backend, fullgraph=i < len(whole))
        x, y = values.clone(), values.clone()
        got, wanted = compiled(x), call(y)
        if i != len(whole) + 4 or group.rank() == 0:  # the other ranks of a reduce have scratch
            assert torch.equal(got, wanted), i
        assert torch.equal(x, y), i
        assert (got is x) == (wanted is y), i


def bad_sizes_are_refused(group: ProcessGroup) -> None:
    """Without a full graph by eager mode's own error, in a full graph by one that carries it."""
    x = torch.zeros(4, 6)
    calls: list[Callable[[Tensor], Tensor]] = [
        lambda x: m.all_to_all(group, x, [3, 3], [3, 3]),
        lambda x: m.all_to_all(group, x, [2, 2, 2], None),
        lambda x: m.all_gather_dim(x, 1, group, sizes=(5, 5)),
        lambda x: m.reduce_scatter_dim(x, 1, group, sizes=(4, 1)),
        lambda x: m.split_dim(x, 1, group, sizes=(7, -1)),
        lambda x: m.all_to_all_dims(x, 1, 0, group, scatter_sizes=(3, 4)),
        lambda x: m.all_to_all_dims(x, 1, 0, group, gather_sizes=(5, 5)),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match="ShapeError"):
            compiled_once(call, "eager")(x)
    # Dynamo of torch 2.11 cannot trace `raise ... from None` in the frames that it compiles after the graph break.
    raised = ShapeError if tuple(map(int, torch.__version__.split(".")[:2])) > (2, 12) else (ShapeError, RuntimeError)
    for call in calls[::3]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what Dynamo says of these frames
            with pytest.raises(raised):
                torch.compile(call, backend="eager")(x)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_calls_one_after_another(pool: Pool, backend: str) -> None:
    pool.run(forwards_before_backwards, backend, world=2)
    pool.run(sizes_change, backend, world=2)


def test_arguments_are_checked_while_traced(pool: Pool) -> None:
    pool.run(bad_sizes_are_refused, world=2)
    pool.stop()  # after an error torch keeps evaluating frames itself, which adds a reference to every argument


@pytest.mark.ranks(1, pytest.param(2, marks=pytest.mark.slow))
def test_no_graph_under_no_grad(group: ProcessGroup) -> None:
    calls: dict[str, Callable[[Tensor], Tensor]] = {
        "scatter_sp": lambda x: m.scatter_to_sequence_parallel_region(x, group),
        "gather_sp": lambda x: m.gather_from_sequence_parallel_region(x, group=group),
        "sp2hp": lambda x: m.all_to_all_sp2hp(x, group),
        "reduce_from": lambda x: m.reduce_from_tensor_model_parallel_region(x * 2, group),
        "split_dim": lambda x: m.split_dim(x, 0, group),
    }
    for name, call in calls.items():
        x = torch.randn(4, 8, requires_grad=True)
        compiled = compiled_once(call, "eager")
        with torch.no_grad():
            out = compiled(x)
        assert not out.requires_grad, name
        assert torch.equal(out, call(x)), name


def test_views_unless_the_path_is_triton(pool: Pool) -> None:
    pool.run(views_unless_triton, world=2)


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_collectives(pool: Pool, backend: str) -> None:
    pool.run(collectives_are_eager, backend, world=2, timeout=110)


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[needs_compiler, pytest.mark.slow])])
def test_one_rank(pool: Pool, backend: str) -> None:
    """Nothing is sent, and the gradient arrives."""
    assert pool.run(one_rank_is_eager, backend, world=1) == [0]


def one_rank_is_eager(group: ProcessGroup, backend: str) -> int:
    def layer(x: Tensor) -> Tensor:
        return whole_layer(group)(x).cos()

    x = torch.randn(4, 16, dtype=torch.float64)
    (got, counted), (wanted, _) = trained(compiled_once(layer, backend), x), trained(layer, x)
    for ours, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(ours, theirs)
    return counted[0]


def test_traced_calls(group: ProcessGroup) -> None:
    """``make_fx`` records no wait: refused before anything is sent. ``torch.export`` has the functional form."""
    x = torch.arange(16.0).view(4, 4).add(group.rank())
    calls = (
        lambda x: m.all_to_all_sp2hp(x, group),
        lambda x: m.gather_from_sequence_parallel_region(x, group=group, output_split_sizes=[4, 4]),
        lambda x: m.reduce_from_tensor_model_parallel_region(x.requires_grad_(), group),
        lambda x: collective.split_reduce_scatter([x, x], 0, group)[0],
        lambda x: ulysses.UlyssesAttention(group)(*[x.view(1, 4, 2, 2)] * 3),
    )
    for call in calls:
        for mode in ("real", "fake"):
            with pytest.raises(UnsupportedError, match="make_fx does not record the wait for a collective"):
                make_fx(call, tracing_mode=mode)(x.clone())

    class Program(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return m.all_to_all_sp2hp(x * 2, group).sin()

    for strict in (False, True):
        program = torch.export.export(Program(), (x,), strict=strict)
        assert any("wait_tensor" in str(node.target) for node in program.graph.nodes)
        assert torch.equal(program.module()(x), m.all_to_all_sp2hp(x * 2, group).sin())


CARRIED = [torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2]
MOVES: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "all_gather": lambda x, g: m.all_gather_dim(x, 1, g),
    "all_gather of sizes": lambda x, g: m.all_gather_dim(
        x[: 3 + g.rank()], 0, g, sizes=[3 + r for r in range(g.size())]
    ),
    "all_to_all": lambda x, g: m.all_to_all_dims(x, 0, 1, g),
    "rows": lambda x, g: m.all_to_all(g, x),
    "collective": lambda x, g: collective.all_to_all(x, g),
}
SUMS: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "reduce_from": lambda x, g: m.reduce_from_tensor_model_parallel_region(x, g),
    "reduce_scatter": lambda x, g: m.reduce_scatter_dim(x, 1, g),
    "collective": lambda x, g: collective.all_reduce(x, g),
}


def with_dtypes(names: Iterable[str]) -> pytest.MarkDecorator:
    """Two of the dtypes per name, in turn; with all of them a slow test."""
    quick = [pytest.param(name, CARRIED[place % 3 :: 3], id=name) for place, name in enumerate(names)]
    slow = [pytest.param(name, CARRIED, id=f"{name}, all", marks=pytest.mark.slow) for name in names]
    return pytest.mark.parametrize(("name", "dtypes"), quick + slow)


@with_dtypes(MOVES)
def test_dtypes_that_backends_lack_move_as_bytes(group: ProcessGroup, name: str, dtypes: list[torch.dtype]) -> None:
    for dtype in dtypes:
        x = (
            (torch.arange(32).view(8, 4) + group.rank())
            .to(torch.int64 if dtype.itemsize > 1 else torch.float32)
            .to(dtype)
        )
        torch.compiler.reset()
        found = torch.compile(MOVES[name], backend="aot_eager", fullgraph=True)(x, group)
        wanted = MOVES[name](x, group)
        assert found.dtype is wanted.dtype is dtype
        assert torch.equal(found.contiguous().view(torch.uint8), wanted.contiguous().view(torch.uint8)), dtype


@with_dtypes(SUMS)
def test_sums_of_dtypes_that_backends_lack_are_refused(
    group: ProcessGroup, name: str, dtypes: list[torch.dtype]
) -> None:
    for dtype in dtypes:
        x = torch.ones(8, 4).to(dtype)
        torch.compiler.reset()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
            for call in (SUMS[name], torch.compile(SUMS[name], backend="aot_eager")):
                with pytest.raises(Exception, match=r"8-bit floats would have to be decoded|no such integers"):
                    call(x.clone(), group)


IN_PLACE: dict[str, Callable[[Tensor, ProcessGroup], Tensor]] = {
    "all_gather 0": lambda x, g: m.all_gather_dim(x, 0, g),
    "all_gather 1": lambda x, g: m.all_gather_dim(x, 1, g),
    "reduce_scatter 0": lambda x, g: m.reduce_scatter_dim(x, 0, g),
    "reduce_scatter 1": lambda x, g: m.reduce_scatter_dim(x, 1, g),
    "all_to_all": lambda x, g: m.all_to_all_dims(x, 0, 1, g),
    "rows": lambda x, g: m.all_to_all(g, x),
    "reduce_from": lambda x, g: m.reduce_from_tensor_model_parallel_region(x, g),
    "scatter_to": lambda x, g: m.scatter_to_tensor_model_parallel_region(x, g),
}
FEW = ("all_gather 1", "reduce_scatter 0", "all_to_all", "reduce_from")


@pytest.mark.parametrize(
    "name", [name if name in FEW else pytest.param(name, marks=pytest.mark.slow) for name in IN_PLACE]
)
def test_results_may_be_written_in_place(group: ProcessGroup, name: str) -> None:
    """A result of a traced forward is no view for autograd, as in eager mode."""

    def run(x: Tensor) -> Tensor:
        return IN_PLACE[name](x * 1, group).mul_(3).relu_()

    torch.compiler.reset()
    grads, values = [], []
    for call in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        x = (torch.arange(32.0).view(8, 4) - 9).requires_grad_()
        values.append(call(x))
        values[-1].sum().backward()
        grads.append(x.grad)
    assert torch.equal(*values)
    assert torch.equal(*grads)
