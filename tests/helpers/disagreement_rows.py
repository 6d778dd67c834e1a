"""Every public function that ranks call together, and for every kind of disagreement how one of them differs."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from disagreement_layers import INTEGRATIONS, PARALLEL, TENSOR
from disagreement_row import REPLICAS, Row
from torch import Tensor
from torch.distributed import ReduceOp

from tritoncomm import collective as c
from tritoncomm import debug, experts, recurrent, ulysses
from tritoncomm import mappings as m
from tritoncomm.reshard import Layout, OwnedExchange, exchange_owned, reshard, reshard_plan, sequence_layout

__all__ = ["KINDS", "ROWS", "SILENT", "Step", "named", "reason_against", "steps_of"]

KINDS = ("function", "order", "count more", "count fewer", "shape", "dtype", "dim", "sizes", "op", "root", "group")
WORDS = {  # what the error has to name
    "function": "function", "order": "function", "count more": "function", "count fewer": "function",
    "shape": "shape", "dtype": "dtype", "dim": r"(dims?|\w+_dim)", "sizes": r"\w*sizes", "op": "op", "root": "root",
}  # fmt: skip
PARAMETERS = {
    "dim": {"dim", "dims", "scatter_dim", "gather_dim"}, "op": {"op"}, "root": {"src", "dst"},
    "sizes": {"sizes", "scatter_sizes", "gather_sizes", "output_split_sizes", "input_split_sizes", "sequence_sizes",
              "output_split_sizes_"},
}  # fmt: skip
T = torch.ones
Step = Callable[[], Any]


def _sizes(w: int, total: bool) -> list[int]:
    """Sizes other than ``[4] * w``; the last rank's own stays, where ranks pass their own tensors."""
    return [5, 3, *[4] * (w - 2)] if total else [5, *[4] * (w - 1)]


def _even(key: str) -> Callable[[int], dict[str, Any]]:
    return lambda w: {key: [4] * w}


_DIM: dict[str, Any] = {"dim": lambda w: {"dim": 1}}
_GATHER = _DIM | {"sizes": lambda w: {"sizes": _sizes(w, False)}}
_SCATTER = _DIM | {"sizes": lambda w: {"sizes": _sizes(w, True)}}
_OP: dict[str, Any] = {"op": lambda w: {"op": ReduceOp.MAX}}
_LOCAL: dict[str, Any] = {"shape": lambda w: (4, 4 * w), "other": lambda w: (4, 8 * w)}
_WIDER: Callable[[int], tuple[int, ...]] = lambda w: (4 * w, 8 * w)  # noqa: E731


def _sent(w: int) -> dict[str, Any]:
    return {"into": _sizes(w, True), "out": [4] * w}


COLLECTIVES = {
    "all_gather": Row(lambda g, x, dim=0, **o: c.all_gather(x, dim, g, **o), **_LOCAL, differ=_GATHER),
    "reduce_scatter": Row(lambda g, x, dim=0, **o: c.reduce_scatter(x, dim, g, **o), differ=_SCATTER | _OP),
    "all_reduce": Row(lambda g, x, **o: c.all_reduce(x, g, **o), differ=_OP),
    "broadcast": Row(lambda g, x, src=0: c.broadcast(x, src, g), differ={"root": lambda w: {"src": 1}}),
    "reduce": Row(lambda g, x, dst=0, **o: c.reduce(x, dst, g, **o), differ=_OP | {"root": lambda w: {"dst": 1}}),
    "all_to_all": Row(
        lambda g, x, out=None, into=None: c.all_to_all(x, g, out, into), other=_WIDER,
        options=lambda w: {"out": [4] * w, "into": [4] * w}, differ={"sizes": _sent},
    ),
    "split_reduce_scatter": Row(
        lambda g, x, dim=0: c.split_reduce_scatter([x, x], [0, dim], g), differ=_DIM,
        words={"dim": "dims"},
    ),
}  # fmt: skip

_TENSOR_AND_GROUP = (
    "reduce_from_tensor_model_parallel_region", "scatter_to_tensor_model_parallel_region",
    "gather_from_tensor_model_parallel_region", "scatter_to_sequence_parallel_region",
    "all_gather_last_dim_from_tensor_parallel_region", "reduce_scatter_last_dim_to_tensor_parallel_region",
    "all_to_all_sp2hp", "all_to_all_hp2sp", "_reduce", "_split_along_last_dim", "_split_along_first_dim",
    "_gather_along_last_dim", "_reduce_scatter_along_last_dim",
    "_AllGatherFromTensorParallelRegion", "_GatherFromModelParallelRegion", "_ReduceFromModelParallelRegion",
    "_ReduceScatterToTensorParallelRegion", "_ScatterToModelParallelRegion", "_ScatterToSequenceParallelRegion",
)  # fmt: skip


def _tensor_first(function: Any) -> Callable[..., Any]:
    """``call(group, x)`` of a function, or of an autograd class."""
    called = function.apply if inspect.isclass(function) else function
    return lambda g, x: called(x, g)


MAPPINGS: dict[str, Row] = {
    name: Row(_tensor_first(getattr(m, name))) for name in _TENSOR_AND_GROUP
} | {
    "gather_from_sequence_parallel_region": Row(
        lambda g, x, sizes=None: m.gather_from_sequence_parallel_region(x, group=g, output_split_sizes=sizes),
        **_LOCAL, differ={"sizes": _GATHER["sizes"]},
    ),
    "reduce_scatter_to_sequence_parallel_region": Row(
        lambda g, x, sizes=None: m.reduce_scatter_to_sequence_parallel_region(x, g, sizes),
        differ={"sizes": _SCATTER["sizes"]},
    ),
    "_gather_along_first_dim": Row(
        lambda g, x, sizes=None: m._gather_along_first_dim(x, g, sizes), **_LOCAL, differ={"sizes": _GATHER["sizes"]}
    ),
    "_reduce_scatter_along_first_dim": Row(
        lambda g, x, sizes=None: m._reduce_scatter_along_first_dim(x, g, sizes), differ={"sizes": _SCATTER["sizes"]}
    ),
    "_GatherFromSequenceParallelRegion": Row(
        lambda g, x, sizes=None: m._GatherFromSequenceParallelRegion.apply(x, g, True, sizes), **_LOCAL,
        differ={"sizes": _GATHER["sizes"]},
    ),
    "_ReduceScatterToSequenceParallelRegion": Row(
        lambda g, x, sizes=None: m._ReduceScatterToSequenceParallelRegion.apply(x, g, sizes),
        differ={"sizes": _SCATTER["sizes"]},
    ),
    "all_to_all": Row(
        lambda g, x, out=None, into=None: m.all_to_all(g, x, out, into), other=_WIDER,
        options=lambda w: {"out": [4] * w, "into": [4] * w}, differ={"sizes": _sent},
    ),
    "_AllToAll": Row(
        lambda g, x, out=None, into=None: m._AllToAll.apply(g, x, out, into), other=_WIDER,
        options=lambda w: {"out": [4] * w, "into": [4] * w}, differ={"sizes": _sent},
    ),
    "all_gather_dim": Row(lambda g, x, dim=0, **o: m.all_gather_dim(x, dim, g, **o), **_LOCAL, differ=_GATHER),
    "reduce_scatter_dim": Row(lambda g, x, dim=0, **o: m.reduce_scatter_dim(x, dim, g, **o), differ=_SCATTER),
    "split_dim": Row(lambda g, x, dim=0, **o: m.split_dim(x, dim, g, **o), differ=_SCATTER),
    "all_to_all_dims": Row(
        lambda g, x, dim=0, **o: m.all_to_all_dims(x, dim, 2, g, **o),
        lambda w: (4 * w, 4 * w, 4), lambda w: (4 * w, 8 * w, 4), _even("scatter_sizes"),
        _DIM | {"sizes": lambda w: {"scatter_sizes": _sizes(w, True)}},
    ),
}  # fmt: skip

_COPY = Row(lambda g, x: m.copy_to_tensor_model_parallel_region(x, g))
_FROM_FORWARD = "a backward takes it from its forward, which has compared it"
BACKWARDS = {
    f"{name}, backward": Row(
        row.call, row.shape, row.other, row.options, is_backward=True,
        impossible=dict.fromkeys(("shape", "dtype", "dim", "sizes", "op", "root"), _FROM_FORWARD),
    )
    for name, row in (MAPPINGS | {"copy_to_tensor_model_parallel_region": _COPY}).items()
    if not name.startswith("_") and name != "reduce_from_tensor_model_parallel_region"
}  # fmt: skip


def _heads(g: Any, x: Tensor, sizes: Any, layout: str = "bshd") -> Any:
    dim, world = layout.index("s"), g.size()
    return ulysses.exchange_for(x, x, x, g, dim, tuple(sizes or [x.shape[dim]] * world), "ulysses")


def _to_heads(g: Any, x: Tensor, sizes: Any = None) -> Any:
    made = _heads(g, x, sizes)
    return ulysses.to_heads([x, x, x], made.qkv, g, made.names)


def _to_sequence(g: Any, x: Tensor, sizes: Any = None) -> Any:
    world, rank = g.size(), g.rank()
    sizes = sizes or [x.shape[1]] * world
    made = _heads(g, x.new_empty(x.shape[0], sizes[rank], 4 * world, x.shape[3]), sizes)
    return ulysses.to_sequence(x.new_ones(x.shape[0], sum(sizes), 4, x.shape[3]), made.out, g, made.names)


_HEADS: dict[str, Any] = {"shape": lambda w: (2, 4, 4 * w, 8), "other": lambda w: (2, 4, 4 * w, 4)}
_LAYOUT = r"(layout|shape|\w+_sizes|collective)"
ULYSSES = {
    "UlyssesAttention": Row(
        lambda g, x, sizes=None: ulysses.UlyssesAttention(g)(x, x, x, sequence_sizes=sizes), **_HEADS,
        differ={"sizes": lambda w: {"sizes": _sizes(w, False)}}, words={"sizes": _LAYOUT},
        function=ulysses.UlyssesAttention.forward,
    ),
    "to_heads": Row(
        _to_heads, **_HEADS, differ={"sizes": lambda w: {"sizes": _sizes(w, False)}}, words={"sizes": _LAYOUT}
    ),
    "to_sequence": Row(
        _to_sequence, **_HEADS, differ={"sizes": lambda w: {"sizes": _sizes(w, False)}}, words={"sizes": _LAYOUT}
    ),
}  # fmt: skip
_ROWS: dict[str, Any] = {"shape": lambda w: (4, 8), "other": lambda w: (4, 16)}


def _dispatch(g: Any, x: Tensor) -> experts.Dispatched:
    """Each token for the experts 0 and 1 of as many as ranks."""
    ids = torch.tensor([[0, 1]], device=x.device).expand(len(x), 2)
    return experts.dispatch(x, ids, torch.ones(ids.shape, device=x.device), g.size(), g)


def _route(g: Any, x: Tensor) -> Any:
    """As many ids of a token as x has columns, of one dtype for each dtype of x."""
    kind = torch.int64 if x.dtype is torch.float32 else torch.int32
    return experts.route(torch.zeros(x.shape, dtype=kind, device=x.device), g.size(), g)


def _combine(g: Any, x: Tensor) -> Tensor:
    """Columns of a dispatch in which all ranks agree."""
    dispatched = _dispatch(g, T(4, 8, dtype=torch.float32))
    return experts.combine(x[:1].expand(sum(dispatched.counts), -1), dispatched)


EXPERTS = {
    "dispatch": Row(lambda g, x: _dispatch(g, x).rows, **_ROWS),
    "route": Row(_route, **_ROWS),
    "combine": Row(_combine, **_ROWS),
}
RECURRENT = {
    "by_heads": Row(
        lambda g, x, sizes=None: recurrent.by_heads(lambda y: y * 2, g)(x, sizes=sizes), **_HEADS,
        differ={"sizes": lambda w: {"sizes": _sizes(w, False)}}, words={"sizes": _LAYOUT},
    ),
    "conv_halo": Row(
        lambda g, x, sizes=None: recurrent.conv_halo(lambda y, weight: y * 2, g)(x, x.new_ones(4, 3), sizes=sizes),
        lambda w: (2, 4, 4), lambda w: (2, 8, 4),
        impossible={"sizes": "shards are longer than the halo, so that the same positions travel"},
    ),
}  # fmt: skip


def _layouts(g: Any, x: Tensor, to: int) -> tuple[Any, Any]:
    """Rows of a matrix of which ``x`` is this rank's shard, and another layout."""
    ranks = dist.get_process_group_ranks(g)
    shape = (x.shape[0] * len(ranks), x.shape[1])
    target = Layout.on_mesh(shape, ranks, [to]) if to else Layout.replicated(shape, ranks)
    return Layout.on_mesh(shape, ranks, [0]), target


def _reshard(g: Any, x: Tensor, dim: int = 1) -> Any:
    source, target = _layouts(g, x, dim)
    return reshard({"w": x}, source, target, group=g)


def _planned(g: Any, x: Tensor, dim: int = 1) -> Any:
    source, target = _layouts(g, x, dim)
    return reshard_plan({"w": x.dtype}, source, target, group=g).execute({"w": x})


def _owned(g: Any, x: Tensor, owner: int = 0) -> Any:
    return exchange_owned({"w": x}, {"w": owner}, lambda name, full: full, _layouts(g, x, 1)[0], group=g)


def _owned_exchange(g: Any, x: Tensor, owner: int = 0) -> Any:
    exchange = OwnedExchange({"w": x}, {"w": owner}, _layouts(g, x, 1)[0], group=g)
    return exchange.distribute(exchange.collect({"w": x}))


def _sequence(g: Any, x: Tensor, dim: int = 1, bounds: Any = None) -> Any:
    return sequence_layout({"w": x}, "contiguous", ("striped", bounds), dim=dim, group=g)


_PLAN = {"shape": "plan", "dtype": "plan", "dim": "plan", "root": "plan"}
_OWNER: dict[str, Any] = {"differ": {"root": lambda w: {"owner": 1}}, "words": _PLAN}
RESHARD = {
    "reshard": Row(_reshard, **_LOCAL, differ={"dim": lambda w: {"dim": 0}}, words=_PLAN),
    "reshard_plan": Row(_planned, **_LOCAL, differ={"dim": lambda w: {"dim": 0}}, words=_PLAN),
    "exchange_owned": Row(_owned, **_LOCAL, **_OWNER),
    "OwnedExchange": Row(_owned_exchange, **_LOCAL, **_OWNER),
    "sequence_layout": Row(
        _sequence,
        **_LOCAL,
        words=_PLAN | {"sizes": "plan"},
        differ={"dim": lambda w: {"dim": 0}, "sizes": lambda w: {"bounds": [0, 1, 4 * w * w]}},
    ),
}
DEBUG = {
    "check_replicas": Row(
        lambda g, x: debug.check_replicas({"w": x}, g), words={"shape": REPLICAS, "dtype": REPLICAS}
    ),
}  # fmt: skip

ROWS: dict[str, Row] = {
    f"{module}.{name}": row
    for module, rows in (
        ("collective", COLLECTIVES), ("mappings", MAPPINGS), ("mappings", BACKWARDS), ("ulysses", ULYSSES),
        ("experts", EXPERTS), ("recurrent", RECURRENT), ("reshard", RESHARD), ("debug", DEBUG), ("tensor", TENSOR),
        ("parallel", PARALLEL), ("integrations", INTEGRATIONS),
    )
    for name, row in rows.items()
}  # fmt: skip
MODULES = {
    "collective": c,
    "experts": experts,
    "mappings": m,
    "recurrent": recurrent,
    "ulysses": ulysses,
    "debug": debug,
}

SILENT = {  # public names that no other rank has to call
    "collective.Handle": "a result of asynchronous calls, which are rows",
    "collective.ReduceOp": "an enumeration",
    "mappings.copy_to_tensor_model_parallel_region": "its forward returns its input; its backward is a row",
    "mappings._CopyToModelParallelRegion": "the class of that",
    "mappings.overwrite_inputs": "a switch of this thread",
    "ulysses.AttentionExchange": "a tuple",
    "ulysses.autocast": "casts, and sends nothing",
    "ulysses.dropout_by_rank": "seeds, and sends nothing",
    "ulysses.exchange_for": "plans, and sends nothing",
    "experts.Dispatched": "what dispatch, a row, returns",
    "experts.ExpertRows": "a tuple",
    "experts.Route": "what route, a row, returns",
    "experts.RowsHandle": "a result of asynchronous calls, which are rows",
    "recurrent.Exchanged": "a role of an argument",
    "recurrent.Gathered": "a role of an argument",
    "recurrent.Documents": "the type of starts",
    "recurrent.Role": "the type of roles",
    "recurrent.Sliced": "a role of an argument",
    "reshard.Layout": "a description",
    "reshard.ReshardPlan": "what reshard_plan, a row, returns",
    "reshard.balanced_owners": "computes",
    "reshard.buffer_layouts": "computes",
    "reshard.buffer_views": "makes views",
    "reshard.megatron_layouts": "computes",
    "debug.dump": "writes a file",
    "debug.watch_replicas": "notes parameters; steps of optimizers compare them as check_replicas, a row, does",
}


def reason_against(name: str, kind: str) -> str:
    """Why a function cannot be called with a disagreement of a kind; empty if it can."""
    row = ROWS[name]
    if kind in row.impossible:
        return row.impossible[kind]
    if kind not in PARAMETERS or kind in row.differ:
        return ""
    module, _, short = name.partition(".")
    function = row.function or getattr(MODULES.get(module), short, row.call)
    if inspect.isclass(function) and issubclass(function, torch.autograd.Function):
        function = function.forward
    suspect = PARAMETERS[kind] & set(inspect.signature(function).parameters)
    return "" if suspect else f"it takes no {kind}"


def _sentinel(group: Any, name: str) -> Any:
    """A call that every rank makes after the one that is looked at, and another function than that."""
    return c.broadcast(T(3), 0, group) if name == "collective.all_reduce" else c.all_reduce(T(3), group)


def steps_of(name: str, kind: str, groups: tuple[Any, Any], differs: bool) -> list[Step]:
    """What a rank does, one step after the other; ``differs`` on one of them.

    Args:
        name: a key of ``ROWS``.
        kind: of ``KINDS``.
        groups: two groups of the same ranks.
        differs: this is the rank that does not do as the others.
    """
    row, group, world = ROWS[name], groups[0], groups[0].size()
    options = row.options(world)
    if differs and kind in row.differ:
        options = options | row.differ[kind](world)
    shape = row.other(world) if differs and kind == "shape" else row.shape(world)
    dtype = torch.float64 if differs and kind == "dtype" else torch.float32
    if row.is_backward:
        return _backwards(row, kind, groups, differs, options)

    def call(over: Any = group) -> Any:
        return row.call(over, T(shape, dtype=dtype), **options)

    def sentinel() -> Any:
        return _sentinel(group, name)

    if not differs:
        return {"count fewer": [call, call, sentinel], "count more": [call, sentinel]}.get(kind, [call, sentinel])
    return {
        "function": [sentinel], "order": [sentinel, call], "count more": [call, call, sentinel],
        "count fewer": [call, sentinel], "group": [lambda: call(groups[1])],
    }.get(kind, [call, sentinel])  # fmt: skip


def _backwards(row: Row, kind: str, groups: tuple[Any, Any], differs: bool, options: dict[str, Any]) -> list[Step]:
    """Forwards that agree, then backwards that do not."""
    shape = row.shape(groups[0].size())

    def run(over: Any) -> Tensor:
        return row.call(over, T(shape, requires_grad=True), **options).sum()

    def other() -> Tensor:
        x = T(2, 2, requires_grad=True)
        if row.call is _COPY.call:
            return m.all_gather_dim(x, 0, groups[0]).sum()
        return m.copy_to_tensor_model_parallel_region(x, groups[0]).sum()

    first, second, elsewhere, last = run(groups[0]), run(groups[0]), run(groups[1]), other()
    if not differs:
        chosen = [first, second, last] if kind == "count fewer" else [first, last]
    else:
        chosen = {
            "function": [last], "order": [last, first], "count more": [first, second, last],
            "count fewer": [first, last], "group": [elsewhere],
        }[kind]  # fmt: skip
    return [each.backward for each in chosen]


def named(text: str, name: str, kind: str) -> bool:
    """Whether an error names what differs, and both callers."""
    if kind == "group":
        return "wait for each other in different calls" in text
    words = ROWS[name].words.get(kind, WORDS[kind])
    return words in text if words == REPLICAS else re.search(rf"differ in ([\w ,]*, )?{words}\b", text) is not None
