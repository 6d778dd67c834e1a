"""The table of mappings, helpers and collectives: a call of each, and closed forms of its result and its gradient.

A closed form says what one rank ends up with, from what all ranks hold. A new mapping has one line in ``FUNCTIONS``.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import collective as c
from tritoncomm import mappings as m

__all__ = [
    "FUNCTIONS", "GRADS", "LAYOUTS", "MAPPINGS", "SUMMED", "Call", "Function", "Invalid", "Matrix", "Unseen",
    "all_held", "as_asked", "by_sizes", "expected", "expected_gradient", "local_shape", "run", "same", "sizes_of",
    "summed", "value", "with_layout",
]  # fmt: skip

LAYOUTS = ["contiguous", "transposed", "sliced", "permuted"]
SUMMED = ("float32", "float64", "bfloat16", "float16", "int32", "int64", "complex64")
GRADS = ("float32", "float64", "bfloat16", "float16", "complex64")


def value(shape: tuple[int, ...], dtype: str, seed: int) -> Tensor:
    """Small integers (every sum over 8 ranks is exact in every dtype)."""
    made = torch.Generator().manual_seed(seed)
    if dtype == "bool":
        return torch.randint(0, 2, shape, generator=made).bool()
    return torch.randint(-8, 9, shape, generator=made).float().to(getattr(torch, dtype))


def with_layout(x: Tensor, layout: str) -> Tensor:
    """The same values, other strides."""
    if layout == "transposed" and x.dim() > 1:
        return x.transpose(0, -1).contiguous().transpose(0, -1)
    if layout == "sliced" and x.dim():
        wide = x.new_zeros((*x.shape[:-1], 3 * x.shape[-1]))
        wide[..., x.shape[-1] : 2 * x.shape[-1]] = x
        return wide[..., x.shape[-1] : 2 * x.shape[-1]]
    if layout == "fused" and x.dim() > 1:  # the middle third of a fused projection
        return torch.cat([x, x, x], 1)[:, x.shape[1] : 2 * x.shape[1]]
    if layout == "permuted" and x.dim() > 2:
        order = (1, 2, 0, *range(3, x.dim()))
        return x.permute(order).contiguous().permute([order.index(i) for i in range(x.dim())])
    return x.clone()


def same(found: Tensor, wanted: Tensor, what: object) -> None:
    assert found.dtype is wanted.dtype, what
    assert found.shape == wanted.shape, (what, found.shape, wanted.shape)
    if found.numel() == 0:
        return
    a, b = found.contiguous(), wanted.contiguous()
    if found.is_complex():
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    assert torch.equal(a.view(torch.uint8) if a.element_size() == 1 else a, b.view(torch.uint8) if
                       b.element_size() == 1 else b), (what, found, wanted)  # fmt: skip


def all_held(group: ProcessGroup, shape: tuple[int, ...], seed: int, replicated: bool = False) -> list[Tensor]:
    """What each rank of the group holds, in float32."""
    return [value(shape, "float32", seed + (0 if replicated else 1 + rank)) for rank in range(group.size())]


def summed(parts: Sequence[Tensor]) -> Tensor:
    return combined(parts)


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
    shape: tuple[int, ...] = (8, 16)
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


def dim_of(x: Tensor, dim: Any) -> int:
    if not isinstance(dim, int) or not -x.dim() <= dim < x.dim():
        raise Invalid("dim")
    return dim % x.dim()


def sizes_of(sizes: Any, world: int) -> list[int] | None:
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


def pieces(x: Tensor, dim: int, sizes: list[int] | None, world: int) -> Sequence[Tensor]:
    if sizes is None:
        if x.shape[dim] % world:
            raise Invalid("does not divide")
        sizes = [x.shape[dim] // world] * world
    if sum(sizes) != x.shape[dim]:
        raise Invalid("sizes do not add up")
    return x.split(sizes, dim)


def combined(tensors: Sequence[Tensor], op: str = "SUM") -> Tensor:
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
    return combined(parts, call.op)


def gather(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    dim, sizes = dim_of(parts[rank], call.dims[0]), sizes_of(call.sizes[0], len(parts))
    if sizes is not None and sizes[rank] != parts[rank].shape[dim]:
        raise Invalid("own size")
    return torch.cat(parts, dim)


def split(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    dim, world = dim_of(parts[rank], call.dims[0]), len(parts)
    return pieces(parts[rank], dim, sizes_of(call.sizes[0], world), world)[rank]


def reduce_split(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    return split(call, [combined(parts, call.op)] * len(parts), rank)


def shards(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    """The sum, split as ``torch.chunk`` splits."""
    dim, world = dim_of(parts[rank], call.dims[0]), len(parts)
    whole = combined(parts, call.op)
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
    out, given = sizes_of(received, world), sizes_of(sent, world)
    chunks = [pieces(x, 0, given, world) for x in parts]
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
    return rows(replace(call, sizes=sizes), grads, rank)


def dims(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    scatter, join = dim_of(parts[rank], call.dims[0]), dim_of(parts[rank], call.dims[1])
    sent, kept = sizes_of(call.sizes[0], len(parts)), sizes_of(call.sizes[1], len(parts))
    chunks = [pieces(x, scatter, sent, len(parts))[rank] for x in parts]
    if kept is not None and kept[rank] != chunks[rank].shape[join]:
        raise Invalid("own size")
    return torch.cat(chunks, join)


def dims_back(call: Call, grads: list[Tensor], rank: int) -> Tensor:
    """The exchange of the gradient: dims and sizes swapped."""
    return dims(replace(call, dims=call.dims[::-1], sizes=call.sizes[::-1]), grads, rank)


def to_hidden(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    if not parts[rank].dim():
        raise Invalid("dim")
    flat = torch.cat([x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in parts])
    return pieces(flat, 1, None, len(parts))[rank]


def to_rows(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    if not parts[rank].dim():
        raise Invalid("dim")
    flat = torch.cat([x.reshape(math.prod(x.shape[:-1]), x.shape[-1]) for x in parts], 1)
    return pieces(flat, 0, None, len(parts))[rank]


def root(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    if not isinstance(call.dims[0], int) or not 0 <= call.dims[0] < len(parts):
        raise Invalid("root")
    return parts[call.dims[0]]


def reduce_to_root(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    """On other ranks than the root the contents are not specified."""
    source = root(call, parts, rank)
    return combined(parts, call.op) if source is parts[rank] else parts[rank].to("meta")


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

    @property
    def adds(self) -> bool:
        return self.form in (total, reduce_split, reduce_to_root, shards)

    @property
    def moves(self) -> bool:
        """The result is memory of its own on more ranks than one."""
        return self.form in (gather, reduce_split, rows, dims, to_hidden, to_rows)


def _op(call: Call) -> Any:
    return getattr(c.ReduceOp, call.op)


FIRST, LAST = (0, 0), (-1, -1)
FUNCTIONS: dict[str, Function] = {
    "copy_to_tensor_model_parallel_region": Function(
        lambda k, x, g: m.copy_to_tensor_model_parallel_region(x, g), identity, FIRST, total
    ),
    "reduce_from_tensor_model_parallel_region": Function(
        lambda k, x, g: m.reduce_from_tensor_model_parallel_region(x, g), total, FIRST, identity
    ),
    "scatter_to_tensor_model_parallel_region": Function(
        lambda k, x, g: m.scatter_to_tensor_model_parallel_region(x, g), split, LAST, gather
    ),
    "gather_from_tensor_model_parallel_region": Function(
        lambda k, x, g: m.gather_from_tensor_model_parallel_region(x, g), gather, LAST, split
    ),
    "scatter_to_sequence_parallel_region": Function(
        lambda k, x, g: m.scatter_to_sequence_parallel_region(x, g), split, FIRST, gather
    ),
    "gather_from_sequence_parallel_region": Function(
        lambda k, x, g: m.gather_from_sequence_parallel_region(x, group=g, output_split_sizes=k.sizes[0]),
        gather, FIRST, reduce_split, "gathered",
    ),
    "gather_from_sequence_parallel_region, split": Function(
        lambda k, x, g: m.gather_from_sequence_parallel_region(x, False, g, k.sizes[0]),
        gather, FIRST, split, "gathered",
    ),
    "reduce_scatter_to_sequence_parallel_region": Function(
        lambda k, x, g: m.reduce_scatter_to_sequence_parallel_region(x, g, k.sizes[0]),
        reduce_split, FIRST, gather, "split",
    ),
    "all_gather_last_dim_from_tensor_parallel_region": Function(
        lambda k, x, g: m.all_gather_last_dim_from_tensor_parallel_region(x, g), gather, LAST, reduce_split
    ),
    "reduce_scatter_last_dim_to_tensor_parallel_region": Function(
        lambda k, x, g: m.reduce_scatter_last_dim_to_tensor_parallel_region(x, g), reduce_split, LAST, gather
    ),
    "all_to_all": Function(
        lambda k, x, g: m.all_to_all(g, x, *k.sizes, k.asynchronous), rows, FIRST, rows_back, "rows"
    ),
    "all_to_all_sp2hp": Function(lambda k, x, g: m.all_to_all_sp2hp(x, g, k.asynchronous), to_hidden, FIRST, to_rows),
    "all_to_all_hp2sp": Function(lambda k, x, g: m.all_to_all_hp2sp(x, g, k.asynchronous), to_rows, FIRST, to_hidden),
    "all_gather_dim": Function(
        lambda k, x, g: m.all_gather_dim(x, k.dims[0], g, sizes=k.sizes[0]), gather, None, reduce_split, "gathered"
    ),
    "all_gather_dim, split": Function(
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

_DIMS = {"all_gather_dim": (1, 0), "reduce_scatter_dim": (1, 0), "split_dim": (1, 0), "all_to_all_dims": (1, 0)}
MAPPINGS: dict[str, Call] = {
    **{name: Call(name, dims=_DIMS.get(name, (0, 0))) for name, each in FUNCTIONS.items() if each.backward is not None},
    "all_to_all, on a stream": Call("all_to_all", asynchronous=True),
}
"""A call of every mapping with a gradient."""


def run(call: Call, x: Any, group: Any) -> Any:
    return FUNCTIONS[call.function].call(call, x, group)


def _form(call: Call) -> Call:
    """The call as its closed forms take it: with the dims that the function implies, without what it does not take."""
    function = FUNCTIONS[call.function]
    return replace(
        call,
        dims=call.dims if function.fixed is None else function.fixed,
        sizes=call.sizes if function.sizes else (None, None),
        op=call.op if function.ops else "SUM",
    )


def expected(call: Call, parts: list[Tensor], rank: int) -> Tensor:
    """The result of a rank, from what all ranks hold; Invalid for arguments that describe no call."""
    return FUNCTIONS[call.function].form(_form(call), parts, rank)


def expected_gradient(call: Call, grads: list[Tensor], rank: int) -> Tensor:
    """The gradient of the input of a rank, from the gradients of all results; of the same number of elements."""
    backward = FUNCTIONS[call.function].backward
    assert backward is not None, call
    return backward(replace(_form(call), op="SUM"), grads, rank)


_MOST_ROWS = 64  # others are none that fit


def local_shape(call: Call, place: int, world: int) -> tuple[int, ...]:
    """The shape of the input on one rank: the call's, but where its split sizes say another."""
    function, shape = FUNCTIONS[call.function], list(call.shape)
    first, second = call.sizes
    if isinstance(second, Matrix) and shape:
        shape[0] = sum(second.sent(place, world))
    elif call.fits and function.sizes in ("gathered", "both") and shape:
        dims = function.fixed or call.dims
        sizes, dim = (first, dims[0]) if function.sizes == "gathered" else (second, dims[1])
        with suppress(Invalid):
            per_rank = sizes_of(sizes, world)
            if per_rank is not None and per_rank[place] <= _MOST_ROWS:
                shape[dim_of(torch.empty(shape, device="meta"), dim)] = per_rank[place]
    return tuple(shape)


def as_asked(call: Call, place: int, ranks: Sequence[int]) -> Call:
    """The call as one rank makes it: with its own row and column of a matrix, and a global rank as root."""
    if FUNCTIONS[call.function].form in (root, reduce_to_root):
        return replace(call, dims=(_global(call.dims[0], ranks), None))
    if not isinstance(call.sizes[1], Matrix):
        return call
    matrix, world = call.sizes[1], len(ranks)
    return replace(call, sizes=(matrix.received(place, world), matrix.sent(place, world)))


def _global(place: Any, ranks: Sequence[int]) -> Any:
    """The global rank at ``place`` of a group; one that is not in it for others."""
    return (ranks[place] if 0 <= place < len(ranks) else 10**6 + place) if isinstance(place, int) else place


def by_sizes(world: int) -> dict[str, Call]:
    """A call of every mapping with split sizes, which differ and some of which are zero; of 8 columns."""
    rows = tuple((2 + 3 * rank) % 7 for rank in range(world))  # 2, 5, 1, 4, 0, 3, 6, 2
    heads = tuple((3 * rank) % 5 for rank in range(world))  # 0, 3, 1, 4, 2
    matrix = Matrix(tuple(tuple((rank + 2 * to) % 3 for to in range(world)) for rank in range(world)))
    calls = {}
    for name, call in MAPPINGS.items():
        takes, fixed = FUNCTIONS[call.function].sizes, FUNCTIONS[call.function].fixed
        if takes == "rows":
            calls[name] = replace(call, shape=(0, 8), sizes=(None, matrix))
        elif takes == "both":
            calls[name] = replace(call, shape=(0, sum(heads), 8), sizes=(heads, rows))
        elif takes:
            shape = (sum(rows), 8) if fixed else (3, sum(rows), 8)
            calls[name] = replace(call, shape=shape, sizes=(rows, None))
    return calls
