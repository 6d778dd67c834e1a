"""Calls whose effects are recorded: mappings, sums, attention, messages and reshardings, through public names alone.

A case is prepared by a function that makes its inputs anew, so that it can run again. The inputs of a rank follow from
its number: ranks need no message to agree on them.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from bits import random_bits
from fuzz_calls import _Wrapper  # pyright: ignore[reportPrivateUsage]
from fuzz_stages import _register  # pyright: ignore[reportPrivateUsage]
from mapping_cases import FUNCTIONS, GRADS, MAPPINGS, Call, as_asked, by_sizes, local_shape, run, value, with_layout
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import collective, p2p, variables
from tritoncomm.explain import OPS, explain
from tritoncomm.reshard import Layout, reshard, reshard_plan
from tritoncomm.ulysses import UlyssesAttention

__all__ = ["DOMAINS", "Case", "Prepared"]


class Prepared(NamedTuple):
    """A call that is ready to run, and its inputs."""

    call: Callable[[], Any]
    inputs: Sequence[Tensor]


class Case(NamedTuple):
    """One call of all ranks of a group, by a name; ``around`` is what it runs in."""

    name: str
    prepare: Callable[[], Prepared]
    around: Callable[[], AbstractContextManager[Any]] = nullcontext


def _memory(x: Tensor, layout: str) -> Tensor:
    """Return the values of ``x`` in memory of a layout, or with a lazy bit."""
    if layout == "negative":
        return torch._neg_view(-x)
    if layout == "conjugate":
        return x.conj().clone().conj()
    return _Wrapper(with_layout(x, "sliced")) if layout == "wrapped" else with_layout(x, layout)


# ---- mappings and collectives ----

_KINDS = [(dtype, "contiguous") for dtype in ("float32", "bfloat16", "float64", "int64", "bool", "uint16", "complex64")]
_KINDS += [("float32", layout) for layout in ("transposed", "sliced", "permuted", "negative", "wrapped")]
_KINDS += [("complex64", "conjugate"), ("float8_e4m3fn", "transposed")]
_ROOTED = ("collective.broadcast", "collective.reduce")


def mappings(group: ProcessGroup) -> Iterator[Case]:
    """Yield every function of the table, evenly and by sizes, for every kind of tensor; with its gradient."""
    world, rank = group.size(), group.rank()
    ranks = torch.distributed.get_process_group_ranks(group)
    calls = {name: Call(name, dims=(0, 1) if name not in _ROOTED else (0, 0)) for name in FUNCTIONS}
    calls |= MAPPINGS
    calls = {name: replace(call, shape=(4 * world, 4 * world, 12)) for name, call in calls.items()}
    calls["all_to_all_dims"] = replace(calls["all_to_all_dims"], dims=(1, 0))
    for name, call in list(calls.items()):
        if FUNCTIONS[call.function].fixed is None and name not in (*_ROOTED, "all_to_all_dims"):
            calls[f"{name}, along dim 1"] = replace(call, dims=(1, 1))
    for name, call in list(calls.items()):
        if name.startswith("collective.") and "split_reduce" not in name:
            calls[f"{name}, async"] = replace(call, asynchronous=True)
    calls |= {f"{name}, by sizes": call for name, call in by_sizes(world).items()}
    for (name, call), (dtype, layout) in itertools.product(calls.items(), _KINDS):
        if "by sizes" in name and layout in ("transposed", "permuted"):
            continue  # where the kernels' path is forced, ranks with some elements would refuse it and others would not
        asked = replace(as_asked(call, rank, ranks), dtype=dtype, layout=layout)
        yield Case(f"{name}, {dtype} {layout}", _mapping(asked, local_shape(call, rank, world), group))


def _mapping(call: Call, shape: tuple[int, ...], group: ProcessGroup) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        x = _memory(value(shape, call.dtype, 1 + group.rank()), call.layout)
        wants_grad = FUNCTIONS[call.function].backward is not None and call.dtype in GRADS
        leaf = x.requires_grad_() if wants_grad else x

        def forward_and_backward() -> Any:
            out = run(call, leaf * 1 if wants_grad else leaf, group)
            if isinstance(out, tuple):
                out = out[0] if out[1] is None else out[1].wait()
            if not wants_grad:
                return out
            layout = call.layout if call.layout in ("transposed", "sliced") else "contiguous"
            grad = with_layout(value(tuple(out.shape), call.dtype, 50 + group.rank()), layout)
            return out, torch.autograd.grad(out, leaf, grad)

        return Prepared(forward_and_backward, [x])

    return prepare


def many(group: ProcessGroup) -> Iterator[Case]:
    """Yield ``split_reduce_scatter`` of several tensors: views, padding, casts, scales, lazy bits, many of them."""
    world = group.size()
    shapes = {
        "wires": ([(8 * world, 6), (4 * world,), (12 * world, 2)], (0, 0, 0)),
        "dims": ([(5, 8 * world), (16 * world,), (3, 12 * world, 2)], (1, 0, 1)),
        "padded": ([(5, 7), (9,), (6, 5)], (1, 0, 0)),
        "one": ([(4 * world, 6)], (0,)),
        "empty": ([(0, 6), (4, 0), (world, 2)], (0, 0, 0)),
        "twenty": ([(4, world * (1 + i % 5)) for i in range(20)], (1,) * 20),
    }
    options: list[dict[str, Any]] = [{}, {"dtype": torch.float32}, {"scale": 0.5}]
    options += [{"dtype": torch.bfloat16, "scale": 2.0}, {"wire": torch.bfloat16}, {"wire": torch.float16, "scale": 3}]
    kinds = [("float32", "contiguous"), ("bfloat16", "contiguous"), ("float64", "sliced")]
    kinds += [("float32", "transposed"), ("float32", "negative"), ("int64", "contiguous"), ("complex64", "conjugate")]
    kinds += [("float32", "wrapped"), ("float32", "sliced")]
    for (name, (sizes, dims)), option, kind in itertools.product(shapes.items(), options, kinds):
        if name in ("one", "empty", "twenty") and kind not in kinds[:2]:
            continue
        label = f"split_reduce_scatter, {name}, {kind[0]} {kind[1]}, {option}"
        yield Case(label, _many(group, sizes, dims, option, kind))


def _many(
    group: ProcessGroup, shapes: Sequence[tuple[int, ...]], dims: Any, options: dict[str, Any], kind: tuple[str, str]
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        xs = [_memory(value(shape, kind[0], 9 * i + group.rank()), kind[1]) for i, shape in enumerate(shapes)]
        return Prepared(lambda: collective.split_reduce_scatter(xs, dims, group, **options), xs)

    return prepare


def sums(group: ProcessGroup) -> Iterator[Case]:
    """Yield sums over a 16-bit wire: dims, sizes, memory, results that are given, levels, and several chunks."""
    world = group.size()
    uneven = tuple((2 + 3 * rank) % 7 for rank in range(world))
    cases: dict[str, tuple[tuple[int, ...], int, dict[str, Any]]] = {
        "rows": ((4 * world, 6), 0, {}),
        "columns": ((5, 4 * world, 3), 1, {}),
        "last": ((3, 2, 5 * world), -1, {}),
        "one index a rank": ((world, 6), 0, {}),
        "uneven rows": ((sum(uneven), 6), 0, {"sizes": uneven}),
        "uneven columns": ((3, sum(uneven)), 1, {"sizes": uneven}),
        "scaled": ((4 * world, 6), 0, {"scale": -1.7}),
        "average": ((4 * world, 6), 0, {"op": collective.ReduceOp.AVG}),
        "async": ((4 * world, 6), 0, {"async_op": True}),
        "empty": ((0, 6), 0, {}),
        "chunks": ((12, 1 << 17), 0, {}),  # three chunks, whatever the number of ranks
        "chunks of columns": ((3, 1 << 18), 1, {"sizes": [(1 << 18) - (world - 1) * 65537, *[65537] * (world - 1)]}),
    }
    levels: list[dict[str, Any]] = [{}]
    if world == 4:
        levels += [{"exchange": "node"}, {"exchange": "node", "wire_between": torch.bfloat16}]
    kinds = [("float32", "contiguous"), ("float32", "transposed"), ("float64", "sliced"), ("bfloat16", "contiguous")]
    kinds += [("float32", "negative"), ("float32", "wrapped"), ("float32", "sliced")]
    for (name, (shape, dim, option)), level, (dtype, layout) in itertools.product(cases.items(), levels, kinds):
        if "chunks" in name and (dtype, layout) != kinds[0]:
            continue
        for out in ("", "out", "accumulate") if (dtype, layout) == kinds[0] and "chunks" not in name else ("",):
            given = {"wire": torch.bfloat16, **option, **level}
            label = f"reduce_scatter, {name}, {dtype} {layout}, {level}{', ' * bool(out)}{out}"
            node = 2 if level else 0
            yield Case(
                label, _sum(group, shape, dim, (dtype, layout), given, out), lambda n=node: variables.NODE.override(n)
            )
    for shape, level, (dtype, layout) in itertools.product([(7, 5), (4 * world,), (1,), (0, 3)], levels, kinds):
        options = {"wire": torch.float16, **level}
        label = f"all_reduce, {shape}, {dtype} {layout}, {level}"
        node = 2 if level else 0
        yield Case(
            label, _all_reduce(group, shape, (dtype, layout), options), lambda n=node: variables.NODE.override(n)
        )


def _random(shape: tuple[int, ...], kind: tuple[str, str], seed: int) -> Tensor:
    made = torch.Generator().manual_seed(seed)
    return _memory(torch.randn(shape, generator=made).to(getattr(torch, kind[0])), kind[1])


def _sum(
    group: ProcessGroup, shape: tuple[int, ...], dim: int, kind: tuple[str, str], options: dict[str, Any], out: str
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        x, given = _random(shape, kind, group.rank()), dict(options)
        if out:
            own = list(shape)
            sizes = options.get("sizes")
            own[dim] = shape[dim] // group.size() if sizes is None else sizes[group.rank()]
            given["out"] = _random(tuple(own), ("float32", "contiguous"), 7)
            given["accumulate"] = out == "accumulate"

        def call() -> Any:
            found = collective.reduce_scatter(x, dim, group, **given)
            return found if isinstance(found, Tensor) else found[0] if found[1] is None else found[1].wait()

        return Prepared(call, [x])

    return prepare


def _all_reduce(
    group: ProcessGroup, shape: tuple[int, ...], kind: tuple[str, str], options: dict[str, Any]
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        x = _random(shape, kind, group.rank())
        return Prepared(lambda: collective.all_reduce(x, group, **options), [x])

    return prepare


# ---- attention ----


def attention(group: ProcessGroup) -> Iterator[Case]:
    """Yield Ulysses attention: heads, sizes, memory, dtypes; what ``attention`` gets, the result and all gradients."""
    world = group.size()
    heads = [(8, 8), (8, 2), (6, 3), (5, 5)]
    even, uneven = (5,) * world, tuple(3 + 2 * rank for rank in range(world))
    for (q, kv), sizes, seq, layout in itertools.product(
        heads, (even, uneven), ("bshd", "sbhd"), ("contiguous", "fused", "packed", "swapped", "negative", "wrapped")
    ):
        for dtype, dims in (("float32", (4, 4, 4)), ("bfloat16", (4, 4, 4)), ("float32", (4, 4, 6))):
            is_plain = layout == "contiguous"
            if (layout == "packed" and q != kv) or not (is_plain or (dtype, dims) == ("float32", (4, 4, 4))):
                continue
            label = f"heads {q} {kv}, sizes {sizes}, {seq}, {layout}, {dtype}, head_dim {dims}"
            yield Case(label, _attention(group, (q, kv, kv), dims, sizes, seq, layout, dtype))
            if is_plain:
                yield Case(f"{label}, no grad", _attention(group, (q, kv, kv), dims, sizes, seq, "no grad", dtype))


def _attention(
    group: ProcessGroup,
    heads: Sequence[int],
    dims: Sequence[int],
    sizes: Sequence[int],
    seq: str,
    layout: str,
    dtype: str,
) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        positions, made = sizes[group.rank()], torch.Generator().manual_seed(group.rank())
        lead = (2, positions) if seq == "bshd" else (positions, 2)
        width = [n * d for n, d in zip(heads, dims, strict=True)]
        whole = torch.randn(*lead, sum(width), generator=made).to(getattr(torch, dtype))
        xs = [x.unflatten(2, (n, d)) for x, n, d in zip(whole.split(width, 2), heads, dims, strict=True)]
        if layout == "packed":
            xs = [whole.unflatten(2, (3, heads[0], dims[0]))]
        elif layout == "swapped":
            xs = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in xs]
        elif layout == "negative":
            xs = [torch._neg_view(-x) for x in xs]
        elif layout == "wrapped":
            xs = [_Wrapper(x) for x in xs]
        elif layout != "fused":
            xs = [x.contiguous() for x in xs]
        xs = [x.detach().requires_grad_(layout != "no grad") for x in xs]
        seen: list[Tensor] = []

        def attend(*qkv: Tensor) -> Tensor:
            seen[:] = qkv
            return qkv[2].repeat_interleave(qkv[0].shape[2] // qkv[2].shape[2], 2) * 2

        def call() -> Any:
            module = UlyssesAttention(group, attention=attend, layout=seq)  # pyright: ignore[reportArgumentType]
            out = module(*xs, sequence_sizes=list(sizes))
            if layout == "no grad":
                return out, seen
            grads = [torch.ones_like(x) * (i + 1 + group.rank()) for i, x in enumerate([out, *seen])]
            return out, seen, torch.autograd.grad([out, *seen], xs, grads)

        return Prepared(call, xs)

    return prepare


# ---- messages between stages ----


def messages(group: ProcessGroup) -> Iterator[Case]:
    """Yield hops around the ring: one tensor, several, strided, lazy, special dtypes, and more than a table takes."""
    forms = {
        "one": [(4, 3)],
        "two": [(4, 3), (5,)],
        "odd bytes": [(3,), (5, 1), (7, 3)],
        "empty": [(0, 3), (2, 2)],
        "scalar": [(), (3,)],
        "forty": [(1 + n % 7, 3) for n in range(40)],
    }
    kinds = [(dtype, "contiguous") for dtype in ("float32", "bfloat16", "bool", "uint16", "complex64", "float8_e5m2")]
    kinds += [("float32", "transposed"), ("float32", "negative"), ("int8", "sliced"), ("complex64", "conjugate")]
    kinds += [("float32", "wrapped"), ("float32", "sliced")]
    for (name, shapes), (dtype, layout) in itertools.product(forms.items(), kinds):
        yield Case(f"ring, {name}, {dtype} {layout}", _ring(group, shapes, dtype, layout))


def _ring(group: ProcessGroup, shapes: Sequence[tuple[int, ...]], dtype: str, layout: str) -> Callable[[], Prepared]:
    def prepare() -> Prepared:
        _register(group)
        xs = [_memory(value(shape, dtype, i + 9 * group.rank()), layout) for i, shape in enumerate(shapes)]
        sent, expected = (xs, list(shapes)) if len(xs) > 1 else (xs[0], shapes[0])
        return Prepared(lambda: p2p.send_forward_recv_forward(sent, expected, True, dtype=getattr(torch, dtype)), xs)

    return prepare


# ---- resharding ----


def reshardings(group: ProcessGroup) -> Iterator[Case]:
    """Yield reshardings between layouts of three tensors: buckets, casts, memory, ``out``, and sums in backward."""
    world = group.size()
    shape = (12, 24)
    uneven = [12 - 3 * (world - 1), *[3] * (world - 1)]
    named = {
        "rows": Layout.on_mesh(shape, list(range(world)), [0]),
        "columns": Layout.on_mesh(shape, list(range(world)), [1]),
        "uneven": Layout.split(shape, 0, uneven),
        "replicated": Layout.on_mesh(shape, list(range(world)), [None]),
        "last rank": Layout.on_mesh(shape, [world - 1], [None]),
        "first rank": Layout.on_mesh(shape, [0], [None]),
        "boxes": Layout.of_boxes(
            shape, {r: [((6, 24 // world * r), (6, 24 // world)), ((0, 24 // world * r), (6, 24 // world))]
                    for r in range(world)}
        ),
    }  # fmt: skip
    for (old, source), (new, target) in itertools.product(named.items(), repeat=2):
        for how in ("", "small buckets", "transposed", "negative", "float32 to bfloat16", "partial", "no grad", "text"):
            yield Case(f"{old} to {new}, {how}", _resharding(group, source, target, how))
    for dtype in ("bool", "complex64", "float8_e5m2", "int64"):
        yield Case(f"rows to columns, {dtype}", _resharding(group, named["rows"], named["columns"], dtype))
    yield Case("rows to columns, into out", _resharding(group, named["rows"], named["columns"], "out"))
    yield Case("rows to boxes, into out", _resharding(group, named["rows"], named["boxes"], "out"))


def _resharding(group: ProcessGroup, source: Layout, target: Layout, how: str) -> Callable[[], Prepared]:
    rank, world = torch.distributed.get_rank(), group.size()
    dtype = torch.float32 if how not in ("bool", "complex64", "float8_e5m2", "int64") else getattr(torch, how)

    def prepare() -> Prepared:
        shape = source.local_shape(rank)
        xs = {}
        for i in range(3):
            x = random_bits((0,) if shape is None else shape, dtype, 3 * group.rank() + i)
            if dtype is torch.float32:
                x = x.nan_to_num(0, 1, -1).clamp(-9, 9).contiguous()
            xs[f"w{i}"] = (
                with_layout(x, "transposed") if how == "transposed" else torch._neg_view(-x) if how == "negative" else x
            )
        options: dict[str, Any] = {"grad": "partial"} if how == "partial" else {}
        options |= {"bucket_bytes": 256} if how == "small buckets" else {}
        options |= {"dtype": torch.bfloat16} if how == "float32 to bfloat16" else {}
        leaves = list(xs.values())
        has_grad = dtype is torch.float32 and how not in ("no grad", "out", "text")
        if has_grad:
            leaves = [x.detach().requires_grad_() for x in leaves]
        # Layouts by name, as a rank without a part of the source passes no tensors, and has to know their names.
        given = {} if shape is None else dict(zip(xs, leaves, strict=True))
        sources = dict.fromkeys(xs, source)

        def call() -> Any:
            if how == "text":
                return str(reshard_plan(given, sources, target, group=group))
            if how == "out":
                out_shape = target.local_shape(rank)
                outs = {name: torch.zeros(out_shape or (0,)) for name in xs}
                return reshard(given, sources, target, group=group, out=outs, **options)
            found = reshard(given, sources, target, group=group, **options)
            if not has_grad:
                return found
            results = [x for x in found.values() if x.requires_grad]
            torch.autograd.backward(results, [torch.full_like(x, 1 + world) for x in results])
            return found, [x.grad for x in leaves]

        return Prepared(call, leaves)

    return prepare


# ---- texts ----


def texts(group: ProcessGroup) -> Iterator[Case]:
    """Yield explanations of every mapping, with sizes and strides."""
    for op in OPS:
        for shape in ((8, 8 * group.size(), 16), (6, 4), (12, 24)):
            dims: Sequence[int] = {"all_to_all_dims": (1, 0)}.get(op, ())
            for stride in (None, tuple(torch.empty(shape[::-1]).permute(*reversed(range(len(shape)))).stride())):
                for dtype, device in ((torch.bfloat16, "cuda"), (torch.float32, "cpu")):
                    label = f"explain {op} {shape} by {stride}, {dtype} on {device}"
                    arguments = (op, shape, group.size(), dtype, dims, device)
                    yield Case(label, _explanation(arguments, {"stride": stride, "rank": group.rank()}))
    uneven = tuple(1 + rank for rank in range(group.size()))
    for op in ("all_gather", "reduce_scatter", "split", "gather_sp", "reduce_scatter_sp", "all_to_all"):
        rows = uneven[group.rank()] if op in ("all_gather", "gather_sp") else sum(uneven)
        arguments = (op, (rows, 8), group.size(), torch.float32, (), "cpu")
        yield Case(f"explain {op} by sizes", _explanation(arguments, {"sizes": uneven, "rank": group.rank()}))


def _explanation(arguments: tuple[Any, ...], options: dict[str, Any]) -> Callable[[], Prepared]:
    return lambda: Prepared(lambda: repr(explain(*arguments, **options)), [])


DOMAINS: dict[str, Callable[[ProcessGroup], Iterator[Case]]] = {
    "mappings": mappings, "many": many, "sums": sums, "attention": attention, "messages": messages,
    "reshardings": reshardings, "texts": texts,
}  # fmt: skip
