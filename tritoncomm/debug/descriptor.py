"""Descriptor of a call: fields that its ranks compare, and its text.

All ranks of a call need equal fields. So the shape field of an uneven all-gather leaves out the gathered dim, and the
sizes are a field of their own. The text shows the call of this rank with its own shape.
"""

import hashlib
import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from tritoncomm.errors import ArgumentError

__all__ = ["KINDS", "Descriptor", "as_json", "describe", "difference"]

KINDS: Mapping[str, tuple[str, ...]] = {
    "all_gather": ("dim", "sizes"),
    "reduce_scatter": ("dim", "sizes", "op"),
    "split": ("dim", "sizes"),
    "all_reduce": ("op",),
    "all_to_all_single": ("out_sizes", "in_sizes", "node_size"),
    "all_to_all": ("scatter_dim", "gather_dim", "scatter_sizes", "gather_sizes"),
    "broadcast": ("root", "op"),
    "reduce": ("root", "op"),
    "split_reduce_scatter": ("dims", "dtype", "scale"),
    "wire_sum": ("dims", "sizes", "op", "wire", "wire_between", "node_size", "scale", "into"),
    "reshard": ("plan",),
    "to_heads": ("layout",),
    "to_sequence": ("layout",),
    "to_ranks": ("experts",),
    "to_tokens": ("out_sizes", "in_sizes"),
    "exchange": ("direction",),
    "hop": ("send", "receive", "transfers"),
    "arguments": ("values",),
}
"""Names of the arguments of every kind of call."""

_ANY = "*"


class Descriptor(NamedTuple):
    """Call of one rank.

    Attributes:
        fields: values by name that have to be equal on all ranks.
        digest: 8 bytes of the fields, equal in every process.
        sends: number of rows to every rank; empty but for an all-to-all with split sizes.
        receives: number of rows from every rank, likewise.
    """

    fields: dict[str, str]
    text: str
    digest: bytes
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()


def as_json(value: Any) -> Any:
    """Return an argument of a call as a JSON value; a dtype is ``float32``, a reduce op ``SUM``."""
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, list | tuple):
        return [as_json(each) for each in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return _word(value)


def _word(value: Any) -> str:
    """Return an argument as text: the name of a reduce op, dim and sizes of a layout of heads, else ``str(value)``."""
    name = getattr(getattr(value, "op", value), "name", None)  # ReduceOp(ReduceOp.SUM) is an object of its own
    if isinstance(name, str):
        return name
    if hasattr(value, "seq_sizes"):
        heads = [[share.heads, *share.sizes] for share in value.shares]
        return f"seq_dim {value.seq_dim}, positions {list(value.seq_sizes)}, heads {heads}"
    return str(value)


def describe(
    name: str, kind: str, shape: Any, dtype: Any, arguments: tuple[Any, ...], world: int, rank: int, device: str
) -> Descriptor:
    """Return the descriptor of a call of this rank, cached by these arguments.

    Args:
        shape: of the tensor, or a list of the tensors' shapes.
        dtype: of the (first) tensor; None without a tensor.
        arguments: of the kind, in the order of ``KINDS``.
    """
    # The cache needs hashable arguments: a list of shapes becomes a tuple. A nested tensor has none.
    shapes = tuple([sizes and tuple(sizes) for sizes in shape]) if type(shape) is list else shape
    return _describe(name, kind, shapes, dtype, arguments, world, rank, device)


@lru_cache(maxsize=8192)
def _describe(
    name: str, kind: str, shape: Any, dtype: Any, arguments: tuple[Any, ...], world: int, rank: int, device: str
) -> Descriptor:
    """Make the descriptor of ``describe``, from hashable arguments."""
    if kind not in KINDS or len(arguments) != len(KINDS[kind]):
        names = (
            f"the arguments {KINDS[kind]}, not {len(arguments)}" if kind in KINDS else f"no kind; {sorted(KINDS)} are"
        )
        raise ArgumentError(f"{name}: the kind {kind!r} of a call has {names}")
    # Those of "arguments" are one list of names and values in words.
    given = dict(arguments[0] if kind == "arguments" else zip(KINDS[kind], arguments, strict=True))
    fields = {"function": name, "collective": kind, "device": device}
    if dtype is not None:
        fields["dtype"] = as_json(dtype)
    sends: tuple[int, ...] = ()
    receives: tuple[int, ...] = ()
    if kind == "all_to_all_single":
        uneven = given["in_sizes"] is not None or given["out_sizes"] is not None
        if uneven:  # even calls of equal shapes fit together
            sends, receives = _rows(shape, given["in_sizes"], world), _rows(shape, given["out_sizes"], world)
        # Leave dim 0 out of the shape, as ranks differ in it; but show it if it contradicts the sizes.
        fits = bool(shape) and sum(sends) == shape[0]
        fields |= {"shape": _shape(shape, 0 if uneven and fits else None), "sizes": "given" if uneven else "even"}
        fields["exchange"] = "flat" if given["node_size"] is None else f"over nodes of {given['node_size']} ranks"
    elif kind == "all_to_all":
        fields["shape"] = _shape(shape, _uneven_dim(shape, given["gather_dim"], given["gather_sizes"], rank))
        fields |= {key: _dim(shape, given[key]) for key in ("scatter_dim", "gather_dim")}
        fields |= {key: _sizes(given[key]) for key in ("scatter_sizes", "gather_sizes")}
    elif kind == "reshard":  # of which every rank has other shards, or none
        fields = {"function": name, "collective": kind, "plan": given["plan"]}
    elif kind == "arguments":
        fields |= given
    elif kind in ("to_heads", "to_sequence"):
        # Each rank has its own number of positions before ``to_heads``, and of heads (dim 2) before ``to_sequence``.
        dim = given["layout"].seq_dim if kind == "to_heads" else 2
        fields["shape"] = ", ".join(_shape(each, dim) for each in shape)
        fields["layout"] = as_json(given["layout"])
    elif kind in ("to_ranks", "to_tokens"):  # each rank has its own number of rows
        fields["shape"] = ", ".join(_shape(part, 0) for part in shape)
        if kind == "to_ranks":
            fields["experts"] = str(given["experts"])
        else:
            sends, receives = given["in_sizes"], given["out_sizes"]
    else:
        fields |= _plain(kind, shape, given, world, rank)
    parts = [] if shape is None else [f"{as_json(dtype) or ''} {_shape(shape)}".strip()]
    parts += [f"{key}={as_json(value)}" for key, value in given.items() if value is not None]
    digest = hashlib.blake2b(repr(sorted(fields.items())).encode(), digest_size=8).digest()
    return Descriptor(fields, f"{name}({', '.join(parts)})", digest, sends, receives)


def _uneven_dim(shape: Any, dim: Any, sizes: Any, rank: int) -> Any:
    """Return ``dim`` if ranks may have different sizes of it, so that the shape field leaves it out; else None.

    ``sizes`` are by rank, None where all are even; ``dim`` may be no dim of the shape.
    """
    # A rank whose tensor contradicts its own sizes will refuse the call, and the other ranks would wait for it. So its
    # shape field keeps the size, and differs from theirs.
    is_dim = isinstance(dim, int) and shape and -len(shape) <= dim < len(shape)
    return dim if sizes is not None and is_dim and rank < len(sizes) and sizes[rank] == shape[dim] else None


def _plain(kind: str, shape: Any, given: dict[str, Any], world: int, rank: int) -> dict[str, str]:
    """Return the fields of a call with at most one dim and one list of sizes: shape, dim, sizes, other arguments."""
    sizes, dim = given.get("sizes"), given.get("dim")
    differs = None
    if sizes is not None and isinstance(dim, int) and shape and -len(shape) <= dim < len(shape):
        # Size of one rank's part: an all-gather starts from a part, the other kinds from the whole dim.
        own = shape[dim] if kind == "all_gather" else shape[dim] // world
        if len(sizes) == world and all(size == own for size in sizes):
            sizes = None  # the even collective
        elif kind == "all_gather":
            differs = _uneven_dim(shape, dim, sizes, rank)
    fields = {"shape": _shape(shape, differs)}
    if "dim" in given:
        fields["dim"] = _dim(shape, dim)
    if "sizes" in given:
        fields["sizes"] = _sizes(sizes)
    rest = {key: value for key, value in given.items() if key not in ("dim", "sizes")}
    if type(rest.get("scale")) is int:  # 2 and 2.0 are one factor
        rest["scale"] = float(rest["scale"])
    if "dtype" in rest:  # which is the field of the tensors' own
        rest["dtype of the wire"] = rest.pop("dtype")
    return fields | {key: str(as_json(value)) for key, value in rest.items()}


def _rows(shape: Any, sizes: Any, world: int) -> tuple[int, ...]:
    """Return ``sizes`` as a tuple; where it is None, the size of dim 0 divided by ``world``, for each rank."""
    if sizes is not None:
        return tuple(sizes)
    return (shape[0] // world,) * world if shape else ()


def _dim(shape: Any, dim: Any) -> str:
    """Return a dim as text: ``-1`` of three dims is ``2``; a dim that the shape does not have stays as it is."""
    return str(dim % len(shape) if isinstance(dim, int) and shape and -len(shape) <= dim < len(shape) else dim)


def _sizes(sizes: Any) -> str:
    """Return a list of sizes as text; ``even`` for None."""
    return "even" if sizes is None else str(list(sizes))


def _shape(shape: Any, differs: int | None = None) -> str:
    """Return a shape as text: ``[4, *]``, ``*`` for dim ``differs``; ``none`` for None; several joined by commas."""
    if shape is None:
        return "none"
    if shape and not isinstance(shape[0], int):
        return ", ".join(_shape(each) for each in shape)
    sizes = [str(size) for size in shape]
    if differs is not None and -len(sizes) <= differs < len(sizes):
        sizes[differs] = _ANY
    return f"[{', '.join(sizes)}]"


def difference(descriptors: Sequence[Descriptor]) -> list[str]:
    """Return the names of the fields in which the calls of a group's ranks, in rank order, differ."""
    first = descriptors[0]
    names = list(dict.fromkeys(name for each in descriptors for name in each.fields))
    differ = [name for name in names if any(each.fields.get(name) != first.fields.get(name) for each in descriptors)]
    if "function" in differ and "collective" in differ:
        differ.remove("collective")
    # All fields are equal, but a rank sends another number of rows than its peer expects.
    if not differ and first.sends and not _rows_match(descriptors):
        differ.append("sizes")
    return differ


def _rows_match(descriptors: Sequence[Descriptor]) -> bool:
    """Whether each rank expects from each rank, itself included, as many rows as that one sends to it."""
    ranks = range(len(descriptors))
    if any(len(each.sends) != len(ranks) or len(each.receives) != len(ranks) for each in descriptors):
        # True where a rank has no list of rows, which its call rejects; False where a list has a wrong length.
        return math.prod(map(len, (each.sends for each in descriptors))) == 0
    return all(descriptors[a].sends[b] == descriptors[b].receives[a] for a in ranks for b in ranks)
