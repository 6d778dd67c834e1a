"""Drawn calls of mappings and collectives, with any tensor, group, dim and split sizes, and what has to come of them.

Every rank makes the same call. What comes of it is a right answer, which is computed here from what all ranks hold, or
an error of the library's own; anything else is a problem.
"""

import itertools
import math
import os
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mapping_cases import laid_out
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

import tritoncomm
from tritoncomm import CommError, ParallelMode, PeerError, groups
from tritoncomm import collective as c
from tritoncomm import mappings as m
from tritoncomm.core import ops
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, group_registry
from tritoncomm.tensor import ProcessGroup as Groups

__all__ = [
    "DTYPES", "FUNCTIONS", "GRADS", "GROUPS", "KINDS", "SUMMED", "Call", "Invalid", "Matrix", "assert_right", "bits",
    "named", "problem_of", "run_call", "verdict",
]  # fmt: skip

DTYPES = [
    "float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
    "complex128", "complex32", "uint16", "uint32", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
SUMMED = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "complex64")
GRADS = ("float32", "float64", "bfloat16", "float16", "complex64")
LAYOUTS = ["contiguous", "transposed", "sliced", "permuted", "expanded", "negative", "conjugate"]
KINDS = [
    "plain", "leaf", "parameter", "inference", "subclass", "wrapper", "dtensor", "colo", "fake", "meta", "sparse",
    "csr", "nested", "jagged", "mkldnn", "quantized", "none", "number", "list", "array", "text",
]  # fmt: skip
GROUPS = [
    "group", "name", "mesh", "mesh and dim", "solo", "nested", "none", "no member", "destroyed", "unknown", "number",
    "list", "object", "empty mesh dim", "mode",
]  # fmt: skip
_GOOD_GROUPS = ("group", "name", "mesh", "mesh and dim", "solo", "nested")
_TRITONCOMM = os.fspath(Path(tritoncomm.__file__).parent)


class Invalid(Exception):
    """Arguments that describe no call."""


class Unseen(Exception):
    """Arguments that describe no call, which not every rank sees by its own; check mode does."""


@dataclass(frozen=True)
class Call:
    """One call, the same on every rank.

    Attributes:
        function: a key of ``FUNCTIONS``.
        shape: of the tensor on every rank, unless ``sizes`` decide.
        dtype: of the tensor.
        layout: of its memory.
        kind: of tensor, of ``KINDS``.
        group: of ``GROUPS``.
        dims: what is passed as dim, or as both.
        sizes: what is passed as split sizes, or as both.
        fits: the tensors have the sizes that the split sizes say.
        op: of a reduction.
        asynchronous: where the function has that.
        path: forced path.
    """

    function: str
    shape: tuple[int, ...]
    dtype: str = "float32"
    layout: str = "contiguous"
    kind: str = "plain"
    group: str = "group"
    dims: tuple[Any, Any] = (0, 0)
    sizes: tuple[Any, Any] = (None, None)
    fits: bool = True
    op: str = "SUM"
    asynchronous: bool = False
    path: str = "auto"


# ---- closed forms: what a rank ends up with, from what all ranks hold ----


def _dim(x: Tensor, dim: Any) -> int:
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise Invalid("dim")
    return dim % x.dim()


def _sizes(sizes: Any, world: int) -> list[int] | None:
    if sizes is None:
        return None
    if isinstance(sizes, Tensor):
        if sizes.dim() != 1 or sizes.is_floating_point() or sizes.is_meta:
            raise Invalid("sizes")
        sizes = sizes.tolist()
    if not isinstance(sizes, (list, tuple, range, np.ndarray)):
        raise Invalid("sizes")
    if len(sizes) != world or not all(isinstance(size, (int, np.integer)) and size >= 0 for size in sizes):
        raise Invalid("sizes")
    return [int(size) for size in sizes]


def _parts(x: Tensor, dim: int, sizes: list[int] | None, world: int) -> Sequence[Tensor]:
    if sizes is None:
        if x.shape[dim] % world:
            raise Invalid("does not divide")
        sizes = [x.shape[dim] // world] * world
    if sum(sizes) != x.shape[dim]:
        raise Invalid("sizes do not add up")
    return x.split(sizes, dim)


def _combined(tensors: Sequence[Tensor], op: str = "SUM") -> Tensor:
    total = tensors[0].clone()
    for x in tensors[1:]:
        if op in ("SUM", "AVG"):
            total = total + x
        else:
            total = {
                "PRODUCT": torch.mul, "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
                "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
            }[op](total, x)  # fmt: skip
    if op == "AVG" and total.dtype is torch.complex32:  # torch cannot divide it on CPUs
        return torch.view_as_complex(torch.view_as_real(total) / len(tensors))
    return total / len(tensors) if op == "AVG" else total


def identity(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    return parts[rank]


def total(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    return _combined(parts, call.op)


def gather(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    dim, sizes = _dim(parts[rank], call.dims[0]), _sizes(call.sizes[0], len(parts))
    if sizes is not None and sizes[rank] != parts[rank].shape[dim]:
        raise Invalid("own size")
    return torch.cat(parts, dim)


def split(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    dim, world = _dim(parts[rank], call.dims[0]), len(parts)
    return _parts(parts[rank], dim, _sizes(call.sizes[0], world), world)[rank]


def reduce_split(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    return split(call, [_combined(parts, call.op)] * len(parts), rank)


def shards(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    """The sum, split as ``torch.chunk`` splits."""
    dim, world = _dim(parts[rank], call.dims[0]), len(parts)
    whole = _combined(parts, call.op)
    step = -(-whole.shape[dim] // world)
    start = min(rank * step, whole.shape[dim])
    return whole.narrow(dim, start, min(step, whole.shape[dim] - start))


def rows(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    """An all-to-all along dim 0; ``sizes`` are (received, sent), or one matrix: of rows from a rank to another."""
    received, sent = call.sizes
    world = len(parts)
    if any(not x.dim() for x in parts):
        raise Invalid("dim")
    if isinstance(sent, Matrix):
        return torch.cat([x.split(sent.rows[w][:world])[rank] for w, x in enumerate(parts)])
    out, given = _sizes(received, world), _sizes(sent, world)
    chunks = [_parts(x, 0, given, world) for x in parts]
    if out is None and parts[rank].shape[0] % world:
        raise Invalid("does not divide")
    expected = [parts[rank].shape[0] // world] * world if out is None else out
    if expected[rank] != len(chunks[rank][rank]):
        raise Invalid("own rows")
    if expected != [len(each[rank]) for each in chunks]:
        raise Unseen
    return torch.cat([each[rank] for each in chunks])


def rows_back(call: Call, grads: list[Tensor], rank: int) -> Tensor:
    """What went from a to b comes back."""
    received, sent = call.sizes
    if isinstance(sent, Matrix):
        sizes: tuple[Any, Any] = (None, Matrix(tuple(zip(*sent.rows, strict=True))))
    else:
        sizes = (sent, received)
    return rows(_replace(call, sizes=sizes), grads, rank)


def dims(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    scatter, join = _dim(parts[rank], call.dims[0]), _dim(parts[rank], call.dims[1])
    sent, kept = _sizes(call.sizes[0], len(parts)), _sizes(call.sizes[1], len(parts))
    chunks = [_parts(x, scatter, sent, len(parts))[rank] for x in parts]
    if kept is not None and kept[rank] != chunks[rank].shape[join]:
        raise Invalid("own size")
    return torch.cat(chunks, join)


def dims_back(call: Call, grads: list[Tensor], rank: int) -> Tensor:
    """The exchange of the gradient: dims and sizes swapped."""
    return dims(_replace(call, dims=call.dims[::-1], sizes=call.sizes[::-1]), grads, rank)


def to_hidden(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    if not parts[rank].dim():
        raise Invalid("dim")
    flat = torch.cat([x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in parts])
    return _parts(flat, 1, None, len(parts))[rank]


def to_rows(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    if not parts[rank].dim():
        raise Invalid("dim")
    flat = torch.cat([x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in parts], 1)
    return _parts(flat, 0, None, len(parts))[rank]


def root(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    if not isinstance(call.dims[0], int) or not 0 <= call.dims[0] < len(parts):
        raise Invalid("root")
    return parts[call.dims[0]]


def reduce_to_root(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    """On other ranks than the root the contents are not specified."""
    source = root(call, parts, rank)
    return _combined(parts, call.op) if source is parts[rank] else parts[rank].to("meta")


@dataclass(frozen=True)
class Matrix:
    """Rows of an all-to-all: ``rows[a][b]`` go from rank a to rank b."""

    rows: tuple[tuple[int, ...], ...]

    def sent(self, rank: int, world: int) -> list[int]:
        return list(self.rows[rank][:world])

    def received(self, rank: int, world: int) -> list[int]:
        return [self.rows[w][rank] for w in range(world)]


@dataclass(frozen=True)
class Function:
    """A function of the product.

    Attributes:
        call: with the drawn arguments, a tensor and a group.
        form: closed form of its result.
        fixed: arguments of the form that the function does not take.
        backward: closed form of the gradient; None where there is no graph.
        sizes: which split sizes it takes: none, those that are gathered, those that are split, or rows.
        ops: takes an op.
        in_place: may write into its input.
    """

    call: Callable[[Call, Any, Any], Any]
    form: Callable[[Call, list[Tensor], int], Tensor]
    fixed: tuple[Any, Any] | None = None
    backward: Callable[[Call, list[Tensor], int], Tensor] | None = None
    sizes: str = ""
    ops: bool = False
    in_place: bool = False


def _op(call: Call) -> Any:
    return getattr(c.ReduceOp, call.op)


FIRST, LAST = (0, 0), (-1, -1)
FUNCTIONS: dict[str, Function] = {
    "copy": Function(lambda k, x, g: m.copy_to_tensor_model_parallel_region(x, g), identity, FIRST, total),
    "reduce_from": Function(
        lambda k, x, g: m.reduce_from_tensor_model_parallel_region(x, g), total, FIRST, identity
    ),
    "scatter_tp": Function(lambda k, x, g: m.scatter_to_tensor_model_parallel_region(x, g), split, LAST, gather),
    "gather_tp": Function(lambda k, x, g: m.gather_from_tensor_model_parallel_region(x, g), gather, LAST, split),
    "scatter_sp": Function(lambda k, x, g: m.scatter_to_sequence_parallel_region(x, g), split, FIRST, gather),
    "gather_sp": Function(
        lambda k, x, g: m.gather_from_sequence_parallel_region(x, group=g, output_split_sizes=k.sizes[0]),
        gather, FIRST, reduce_split, "gathered",
    ),
    "gather_sp, replicated": Function(
        lambda k, x, g: m.gather_from_sequence_parallel_region(x, False, g, k.sizes[0]),
        gather, FIRST, split, "gathered",
    ),
    "reduce_scatter_sp": Function(
        lambda k, x, g: m.reduce_scatter_to_sequence_parallel_region(x, g, k.sizes[0]),
        reduce_split, FIRST, gather, "split",
    ),
    "ag_last": Function(
        lambda k, x, g: m.all_gather_last_dim_from_tensor_parallel_region(x, g), gather, LAST, reduce_split
    ),
    "rs_last": Function(
        lambda k, x, g: m.reduce_scatter_last_dim_to_tensor_parallel_region(x, g), reduce_split, LAST, gather
    ),
    "all_to_all": Function(
        lambda k, x, g: m.all_to_all(g, x, *k.sizes, k.asynchronous), rows, FIRST, rows_back, "rows"
    ),
    "sp2hp": Function(lambda k, x, g: m.all_to_all_sp2hp(x, g, k.asynchronous), to_hidden, FIRST, to_rows),
    "hp2sp": Function(lambda k, x, g: m.all_to_all_hp2sp(x, g, k.asynchronous), to_rows, FIRST, to_hidden),
    "all_gather_dim": Function(
        lambda k, x, g: m.all_gather_dim(x, k.dims[0], g, sizes=k.sizes[0]), gather, None, reduce_split, "gathered"
    ),
    "all_gather_dim, replicated": Function(
        lambda k, x, g: m.all_gather_dim(x, k.dims[0], g, tensor_parallel_output_grad=False, sizes=k.sizes[0]),
        gather, None, split, "gathered",
    ),
    "reduce_scatter_dim": Function(
        lambda k, x, g: m.reduce_scatter_dim(x, k.dims[0], g, sizes=k.sizes[0]), reduce_split, None, gather, "split"
    ),
    "split_dim": Function(
        lambda k, x, g: m.split_dim(x, k.dims[0], g, sizes=k.sizes[0]), split, None, gather, "split"
    ),
    "all_to_all_dims": Function(
        lambda k, x, g: m.all_to_all_dims(x, *k.dims, g, scatter_sizes=k.sizes[0], gather_sizes=k.sizes[1]),
        dims, None, dims_back, "both",
    ),
    "_reduce": Function(lambda k, x, g: m._reduce(x, g), total, FIRST, in_place=True),
    "_gather_along_first_dim": Function(
        lambda k, x, g: m._gather_along_first_dim(x, g, k.sizes[0]), gather, FIRST, None, "gathered"
    ),
    "_gather_along_last_dim": Function(lambda k, x, g: m._gather_along_last_dim(x, g), gather, LAST),
    "_reduce_scatter_along_first_dim": Function(
        lambda k, x, g: m._reduce_scatter_along_first_dim(x, g, k.sizes[0]), reduce_split, FIRST, None, "split"
    ),
    "_reduce_scatter_along_last_dim": Function(
        lambda k, x, g: m._reduce_scatter_along_last_dim(x, g), reduce_split, LAST
    ),
    "_split_along_first_dim": Function(lambda k, x, g: m._split_along_first_dim(x, g), split, FIRST),
    "_split_along_last_dim": Function(lambda k, x, g: m._split_along_last_dim(x, g), split, LAST),
    "collective.all_gather": Function(
        lambda k, x, g: c.all_gather(x, k.dims[0], g, k.asynchronous, sizes=k.sizes[0]), gather, None, None, "gathered"
    ),
    "collective.reduce_scatter": Function(
        lambda k, x, g: c.reduce_scatter(x, k.dims[0], g, _op(k), k.asynchronous, sizes=k.sizes[0]),
        reduce_split, None, None, "split", ops=True,
    ),
    "collective.all_reduce": Function(
        lambda k, x, g: c.all_reduce(x, g, _op(k), k.asynchronous), total, FIRST, ops=True, in_place=True
    ),
    "collective.broadcast": Function(
        lambda k, x, g: c.broadcast(x, k.dims[0], g, k.asynchronous), root, in_place=True
    ),
    "collective.reduce": Function(
        lambda k, x, g: c.reduce(x, k.dims[0], g, _op(k), k.asynchronous),
        reduce_to_root, ops=True, in_place=True,
    ),
    "collective.all_to_all": Function(
        lambda k, x, g: c.all_to_all(x, g, *k.sizes, k.asynchronous), rows, FIRST, None, "rows"
    ),
    "collective.split_reduce_scatter": Function(
        lambda k, x, g: c.split_reduce_scatter([x, x], [k.dims[0]] * 2, g)[1], shards
    ),
}  # fmt: skip


def _global(place: Any, ranks: Sequence[int]) -> Any:
    """The global rank at ``place`` of a group; one that is not in it for others."""
    return (ranks[place] if 0 <= place < len(ranks) else 10**6 + place) if isinstance(place, int) else place


# ---- tensors and groups of every kind ----


def filled(shape: Sequence[int], dtype: str, seed: int) -> Tensor:
    """Small integers: every sum and product over four ranks is exact in every dtype."""
    made = torch.Generator().manual_seed(seed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # complex32 is experimental
        return torch.randint(0, 4, tuple(shape), generator=made).float().to(getattr(torch, dtype))


def _memory(x: Tensor, layout: str) -> Tensor:
    """The same values in memory of another layout."""
    if layout == "expanded" and x.dim() and x.shape[0]:
        return x[:1].expand(x.shape)
    if layout == "negative" and x.dtype in (torch.float32, torch.float64):
        return torch._neg_view(-x)
    if layout == "conjugate" and x.dtype in (torch.complex64, torch.complex128):
        return x.conj().clone().conj()
    return x.clone() if layout in ("expanded", "negative", "conjugate") else laid_out(x, layout)


class _Mine(Tensor):
    """A subclass that changes nothing."""


class _Wrapper(Tensor):
    """A subclass that has its data in another tensor."""

    @staticmethod
    def __new__(cls, x: Tensor) -> "_Wrapper":
        return Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype, device=x.device, strides=x.stride())

    def __init__(self, x: Tensor) -> None:
        self.inside = x.resolve_conj().resolve_neg()  # which the wrapper itself does not say

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def out(x: Any) -> Any:
            return x.inside if isinstance(x, _Wrapper) else x

        def back(x: Any) -> Any:
            return _Wrapper(x) if isinstance(x, Tensor) else x

        return tree_map(back, func(*tree_map(out, args), **tree_map(out, kwargs or {})))


def tensor_of(kind: str, x: Tensor, group: ProcessGroup) -> Any:
    """``x`` as a tensor of that kind; None where torch has none."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some are prototypes
        try:
            return _tensor_of(kind, x, group)
        except (RuntimeError, TypeError, NotImplementedError, ValueError, IndexError):
            return None


def _tensor_of(kind: str, x: Tensor, group: ProcessGroup) -> Any:
    if kind in ("none", "number", "list", "array", "text"):
        return {"none": None, "number": 3, "list": [1.0], "array": np.ones(3, np.float32), "text": "x"}[kind]
    if kind == "plain":
        return x
    if kind == "leaf":
        return x.detach().requires_grad_()
    if kind == "parameter":
        return torch.nn.Parameter(x.detach())
    if kind == "inference":
        with torch.inference_mode():
            return x.clone()
    if kind == "subclass":
        return x.as_subclass(_Mine)
    if kind == "wrapper":
        return _Wrapper(x)
    if kind == "dtensor":
        ranks = dist.get_process_group_ranks(group)
        mesh = DeviceMesh("cpu", ranks, _init_backend=False)  # other ranks make no group
        return DTensor.from_local(x, mesh, [Shard(0) if x.dim() else Replicate()], run_check=False)
    if kind == "colo":
        ranks = dist.get_process_group_ranks(group)
        return ColoTensor(x, ColoTensorSpec(Groups(ranks=ranks, tp_degree=len(ranks))))
    if kind == "fake":
        return FakeTensorMode().from_tensor(x)
    if kind == "meta":
        return x.to("meta")
    if kind == "quantized":
        return torch.quantize_per_tensor(x.float(), 1.0, 0, torch.qint8)
    if kind == "nested":
        return torch.nested.nested_tensor(list(x) if x.dim() > 1 else [x.reshape(-1)])
    if kind == "jagged":
        rows = list(x) if x.dim() > 1 else [x.reshape(-1)]
        return torch.nested.nested_tensor(rows, layout=torch.jagged)
    return {"sparse": x.to_sparse, "csr": x.to_sparse_csr, "mkldnn": x.to_mkldnn}[kind]()


_destroyed: dict[tuple[int, ...], Any] = {}


def group_of(kind: str, group: ProcessGroup) -> tuple[Any, ProcessGroup]:
    """What is passed as group, and the group that it stands for."""
    ranks, rank = tuple(dist.get_process_group_ranks(group)), dist.get_rank()
    if kind == "name":
        return group.group_name, group
    if kind in ("mesh", "mesh and dim", "empty mesh dim"):
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("tensor",))
        return {"mesh": mesh, "mesh and dim": (mesh, "tensor"), "empty mesh dim": (mesh, "data")}[kind], group
    if kind == "solo":
        solo = group_registry.group_over((rank,), rank)
        return solo, solo
    if kind == "nested" and len(ranks) > 2:
        half = ranks[: len(ranks) // 2] if rank in ranks[: len(ranks) // 2] else ranks[len(ranks) // 2 :]
        inner = next(g for g, of in distributed_c10d._world.pg_group_ranks.items() if tuple(of) == half)
        return inner, inner
    if kind == "destroyed":
        if ranks not in _destroyed:
            _destroyed[ranks] = groups.make_group("destroyed", ranks, "gloo")
            dist.destroy_process_group(_destroyed[ranks])
        return _destroyed[ranks], group
    if kind == "mode":  # as initialize() registers it
        groups.register({ParallelMode.TENSOR: groups.Group(group, ParallelMode.TENSOR)})
        return ParallelMode.TENSOR, group
    others = {
        "none": None, "no member": dist.GroupMember.NON_GROUP_MEMBER, "unknown": "no such group", "number": 1,
        "list": list(ranks), "object": object(),
    }  # fmt: skip
    return others.get(kind, group), group


# ---- verdicts ----


def bits(x: Tensor) -> Tensor:
    """The bytes of a tensor, as it is seen."""
    x = x.detach().resolve_conj().resolve_neg().clone(memory_format=torch.contiguous_format)
    return x.flatten().view(torch.uint8) if x.numel() else x.new_empty(0, dtype=torch.uint8)


def named(error: BaseException) -> bool:
    """Whether an error is the library's own, of a mistake of the caller."""
    return isinstance(error, CommError) and not isinstance(error, PeerError)


def problem_of(error: BaseException) -> str:
    """An error that nobody named, with the last frames that raised it."""
    frames = traceback.extract_tb(error.__traceback__)[-4:]
    places = " < ".join(f"{Path(each.filename).name}:{each.lineno}" for each in reversed(frames))
    return f"problem: {type(error).__name__}: {str(error)[:300]} ({places})"


_MOST_ROWS = 64  # others are none that fit


def _held(call: Call, ranks: Sequence[int]) -> list[Tensor]:
    """What each of these global ranks holds."""
    tensors, world = [], len(ranks)
    function = FUNCTIONS[call.function]
    for place, rank in enumerate(ranks):
        shape = list(call.shape)
        first, second = call.sizes
        if isinstance(second, Matrix) and shape:
            shape[0] = sum(second.sent(place, world))
        elif call.fits and function.sizes in ("gathered", "both") and shape:
            dims = function.fixed or call.dims
            sizes, dim = (first, dims[0]) if function.sizes == "gathered" else (second, dims[1])
            with suppress(Invalid):
                per_rank = _sizes(sizes, world)
                if per_rank is not None and per_rank[place] <= _MOST_ROWS:
                    shape[_dim(torch.empty(shape, device="meta"), dim)] = per_rank[place]
        x = filled(shape, call.dtype, 1 + rank)
        tensors.append(_memory(x, call.layout))
    return tensors


def _asked(call: Call, place: int, ranks: Sequence[int]) -> Call:
    """The call as one rank makes it: with its own row and column of a matrix, and a global rank as root."""
    if FUNCTIONS[call.function].form in (root, reduce_to_root):
        return _replace(call, dims=(_global(call.dims[0], ranks), None))
    if not isinstance(call.sizes[1], Matrix):
        return call
    matrix, world = call.sizes[1], len(ranks)
    return _replace(call, sizes=(matrix.received(place, world), matrix.sent(place, world)))


def _replace(call: Call, **changes: Any) -> Call:
    return Call(**{**vars(call), **changes})


def _expected(call: Call, held: list[Tensor], place: int) -> Tensor | None:
    """What this rank has to get; None for arguments that describe no call."""
    function = FUNCTIONS[call.function]
    form = call if function.fixed is None else _replace(call, dims=function.fixed)
    form = form if function.sizes else _replace(form, sizes=(None, None))
    form = form if function.ops else _replace(form, op="SUM")
    try:
        return function.form(form, held, place)
    except Invalid:
        return None
    except (RuntimeError, KeyError, NotImplementedError):  # no such sum: torch has no rule for the dtype
        return None


def must_succeed(call: Call) -> bool:
    """Whether valid arguments may not be refused."""
    function = FUNCTIONS[call.function]
    adds = function.form in (total, reduce_split, reduce_to_root, shards)
    if call.function == "all_to_all_dims" and call.sizes != (None, None):
        scatter, gather = (dim % len(call.shape) for dim in call.dims)
        if scatter == gather:
            return False  # two sizes of one dim
    return (
        call.kind in ("plain", "leaf", "parameter")
        and call.group in _GOOD_GROUPS
        and call.path != "triton"
        and (not adds or (call.dtype in SUMMED and call.op == "SUM"))
    )


def run_call(group: ProcessGroup, call: Call) -> str:
    """``right``, ``refused: ...``, ``mixed`` (not called: some ranks would refuse it), or ``problem: ...``."""
    try:
        given, meant = group_of(call.group, group)
        ranks = dist.get_process_group_ranks(meant)
        place, world = ranks.index(dist.get_rank()), len(ranks)
        held = _held(call, ranks)
        try:
            expected = [_expected(call, held, w) for w in range(world)]
        except Unseen:
            return "mixed"
        if len({each is None for each in expected}) > 1:
            return "mixed"
        x = tensor_of(call.kind, held[place], meant)
        if (x is None and call.kind != "none") or (call.kind in ("fake", "meta", "wrapper") and call.path == "triton"):
            return "mixed"  # torch has no such tensor, or it has no memory to launch a kernel on
    except Exception as error:
        return problem_of(error)
    return _outcome(call, _asked(call, place, ranks), x, given, held, expected, place)


def _outcome(call: Call, asked: Call, x: Any, given: Any, held: list[Tensor], expected: list[Any], place: int) -> str:
    function, wanted = FUNCTIONS[call.function], expected[place]
    before = held[place].clone() if call.kind in ("plain", "leaf", "parameter") else None
    try:
        with ops.path(call.path):  # pyright: ignore[reportArgumentType]
            out = function.call(asked, x, given)
            if isinstance(out, tuple):
                out, handle = out
                out = out if handle is None else handle.wait()
    except Exception as error:
        if not named(error):
            return problem_of(error)
        refused = f"refused: {type(error).__name__}: {error}"
        return f"problem: {refused}" if wanted is not None and must_succeed(call) else refused
    if out is x and (function.form is identity or len(held) == 1):
        return "right"
    if wanted is None and len(held) == 1 and isinstance(out, Tensor) and out.shape == held[place].shape:
        return "right"  # a group of one rank looks at no dims and sizes
    if wanted is None:
        return f"problem: invalid arguments are accepted, and give {type(out).__name__} {getattr(out, 'shape', '')}"
    problem = _differs(out, wanted)
    if (
        not problem
        and before is not None
        and not function.in_place
        and not torch.equal(bits(held[place]), bits(before))
    ):
        problem = "the input was written into"
    is_moved = len(held) > 1 and function.form in (gather, reduce_split, rows, dims, to_hidden, to_rows)
    if not problem and is_moved and type(out) is Tensor and not (out.is_contiguous() and out._base is None):
        problem = "the result is a view"
    if problem:
        return f"problem: {problem}"
    if call.function.startswith("collective.") and out is not x and out.requires_grad:
        return "problem: a result with a graph"
    if call.kind in ("leaf", "parameter") and function.backward is not None and call.dtype in GRADS:
        return _gradient(call, x, out, expected, place)
    return "right"


def _differs(out: Any, wanted: Tensor) -> str:
    if not isinstance(out, Tensor) or out.is_nested:
        return f"a result of type {type(out).__name__}"
    if isinstance(out, FakeTensor) or out.is_meta:
        return "" if out.shape == wanted.shape else f"shape {tuple(out.shape)}, not {tuple(wanted.shape)}"
    if isinstance(out, _Wrapper):
        out = out.inside
    if isinstance(out, DTensor):
        out = out.to_local()
    if isinstance(out, ColoTensor):
        out = out.as_subclass(Tensor)
    if out.layout is not torch.strided:
        out = out.to_dense()
    if out.is_quantized:
        out = out.dequantize().to(wanted.dtype)
    if (out.shape, out.dtype) != (wanted.shape, wanted.dtype):
        return f"{out.dtype} {tuple(out.shape)}, not {wanted.dtype} {tuple(wanted.shape)}"
    if wanted.is_meta:
        return ""
    return "" if torch.equal(bits(out), bits(wanted)) else f"wrong values: {out.tolist()}, not {wanted.tolist()}"


def _gradient(call: Call, x: Tensor, out: Tensor, expected: list[Tensor], place: int) -> str:
    """The gradient of the leaf ``x``, against the closed form."""
    function = FUNCTIONS[call.function]
    assert function.backward is not None
    grads = [filled(each.shape, call.dtype, 50 + w) for w, each in enumerate(expected)]
    form = call if function.fixed is None else _replace(call, dims=function.fixed)
    form = form if function.sizes else _replace(form, sizes=(None, None))
    passed = laid_out(grads[place], call.layout if call.layout in ("transposed", "sliced", "fused") else "contiguous")
    try:
        with ops.path(call.path):  # pyright: ignore[reportArgumentType]
            out.backward(passed)
    except Exception as error:
        if named(error) and (call.group not in _GOOD_GROUPS or call.path == "triton"):
            return f"refused: {error}"
        return "in backward, " + problem_of(error)
    wanted = function.backward(_replace(form, op="SUM"), grads, place).reshape(x.shape)
    if x.grad is None:
        return "problem: no gradient"
    problem = _differs(x.grad, wanted) or _differs(passed, grads[place])
    return f"problem: the gradient: {problem}" if problem else "right"


def assert_right(group: ProcessGroup, *calls: Call) -> None:
    """Each call gives the closed form; none is refused."""
    for call in calls:
        outcome = run_call(group, call)
        assert outcome == "right", (call, outcome)


def verdict(outcomes: Sequence[str]) -> str:
    """What is wrong with what the ranks got, in words; empty if nothing is."""
    problems = [f"rank {rank}: {each}" for rank, each in enumerate(outcomes) if "problem: " in each]
    kinds = {each.split(":")[0] for each in outcomes}
    if not problems and len(kinds) > 1:
        problems = [f"ranks differ: {list(outcomes)}"]
    return "; ".join(itertools.islice(problems, 2))
