"""Drawn sums over a 16-bit wire: bit for bit the sum by hand, or an error by name."""

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from fuzz_calls import bits, named, problem_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from sums_by_hand import by_hand, shard, values
from torch.distributed import ProcessGroup, ReduceOp

from tritoncomm import collective, variables
from tritoncomm.core import ops
from tritoncomm.core.plan import chunk_sizes

__all__ = ["Sum", "run_sum", "sums"]


@dataclass(frozen=True)
class Sum:
    """One sum, with few odd arguments.

    Attributes:
        function: of ``collective``.
        shape: of the tensors, before ``dim`` gets the size that fits.
        even: the ranks get equal shards; else ``sizes`` of four ranks.
        layouts: of the memory of ranks in turn.
        out: dtype of ``out``; "own" for this rank's shard of the tensor; None for no ``out``.
        node: ranks of a node, by ``TRITONCOMM_NODE``.
    """

    function: str
    shape: tuple[int, ...]
    dim: Any
    even: bool
    sizes: tuple[int, ...]
    dtype: str
    wire: Any
    layouts: tuple[str, ...]
    op: str
    scale: Any
    out: Any
    accumulate: bool
    asynchronous: bool
    exchange: Any
    between: Any
    node: int
    path: str


def sums(worlds: SearchStrategy[Any], junk: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Sums of any world."""
    floats = ["float32", "bfloat16", "float16", "float64"]
    wires = [torch.bfloat16, torch.bfloat16, torch.bfloat16, torch.float16, torch.float16]

    def often(likely: list[Any]) -> SearchStrategy[Any]:
        return st.one_of(*[st.sampled_from(likely)] * 30, junk)

    layouts = st.lists(st.sampled_from(["contiguous", "transposed", "strided", "columns"]), min_size=1, max_size=2)
    one = st.builds(
        Sum,
        st.sampled_from(["reduce_scatter"] * 4 + ["all_reduce", "split_reduce_scatter"]),
        st.lists(st.sampled_from([1, 2, 3, 5, 8, 0]), min_size=1, max_size=3).map(tuple),
        st.sampled_from([0, 0, 0, -1]),
        st.booleans(),
        st.tuples(*[st.sampled_from([0, 1, 2, 5])] * 4),
        st.sampled_from([*floats * 5, "int32", "complex64"]),
        often(wires),
        layouts.map(tuple),
        st.sampled_from(["SUM"] * 8 + ["AVG"] * 8 + ["MAX"]),
        often([None, None, 0.5, -1.7, 3]),
        st.sampled_from([None, None, None, "own", *floats]),
        st.booleans(),
        st.sampled_from([False, False, True]),
        often([None, None, "flat", "node"]),
        st.sampled_from([None, None, None, torch.float32, torch.bfloat16, torch.float16]),
        st.sampled_from([0, 1, 2, 2]),
        st.sampled_from(["auto", "torch", "triton"]),
    )
    return st.tuples(worlds, one.map(_sensible))


def _sensible(case: Sum) -> Sum:
    """The case with what its other arguments need, but for one of ten."""
    if sum(case.sizes) % 10 == 0:
        return case
    return replace(
        case,
        between=case.between if case.exchange == "node" else None,
        node=case.node if case.exchange in ("flat", "node") else 0,
        accumulate=case.accumulate and case.out is not None,
        asynchronous=case.asynchronous and case.function == "reduce_scatter",
        op=case.op if case.function != "split_reduce_scatter" else "SUM",
        out=None if case.out == "own" and (case.dim or set(case.layouts) != {"contiguous"}) else case.out,
    )


def run_sum(group: ProcessGroup, case: Sum) -> str:
    """``right``, ``refused: ...``, ``mixed`` (not called) or ``problem: ...``."""
    world, rank, dtype = group.size(), group.rank(), getattr(torch, case.dtype)
    shape = list(case.shape)
    if not -len(shape) <= case.dim < len(shape):
        dim = 0
    else:
        dim = case.dim % len(shape)
    sizes = None if case.even or case.function != "reduce_scatter" else case.sizes[:world]
    shape[dim] = shape[dim] * world if sizes is None else sum(sizes)
    every = [values(each, tuple(shape), dtype, case.layouts[each % len(case.layouts)]) for each in range(world)]
    options = {"wire": case.wire, "wire_between": case.between, "exchange": case.exchange, "scale": case.scale}
    x, op = every[rank], getattr(ReduceOp, case.op)
    kept = x.clone()
    per_rank = sizes or (shape[dim] // world,) * world
    if case.function == "reduce_scatter" and case.out is not None:
        own = shard(x, dim, per_rank, rank)
        owns = [shard(each, dim, per_rank, place) for place, each in enumerate(every)]
        if case.out == "own" and len({each.is_contiguous() for each in owns}) > 1:
            return "mixed"  # some ranks would refuse it
        options["out"] = own if case.out == "own" else values(99, tuple(own.shape), getattr(torch, case.out)).clone()
        options["accumulate"] = case.accumulate
    before = options["out"].clone() if options.get("accumulate") else None
    try:
        with variables.NODE.override(case.node), ops.path(case.path):
            if case.function == "all_reduce":
                found = collective.all_reduce(x, group, op, **options)
            elif case.function == "split_reduce_scatter":
                found = collective.split_reduce_scatter([x], [case.dim], group, **options)[0]
            else:
                found = collective.reduce_scatter(x, case.dim, group, op, case.asynchronous, sizes=sizes, **options)
                if case.asynchronous:  # over one rank there is nothing to wait for
                    found = found[0] if found[1] is None else found[1].wait()
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}" if named(error) else problem_of(error)
    if case.wire is None:
        return "mixed"  # the backend's sum, which other domains check
    result = found.dtype
    is_average = case.op == "AVG" and case.function != "split_reduce_scatter"
    factor = (1.0 if case.scale is None else case.scale) / world if is_average else case.scale
    if case.function == "all_reduce":
        parts = every
    else:
        per_rank = chunk_sizes(shape[dim], world) if case.function == "split_reduce_scatter" else per_rank
        parts = [shard(each, dim, per_rank, rank) for each in every]
    parts = [kept if each is x else each for each in parts]
    if case.function != "all_reduce":
        parts[rank] = shard(kept, dim, per_rank, rank)
    in_levels = case.exchange == "node" and 1 < case.node < world and world % case.node == 0
    expected = by_hand(
        parts, case.wire, result, factor, before, node=case.node if in_levels else None,
        between=case.between or torch.float32,
    )  # fmt: skip
    if case.scale is not None and math.isnan(case.scale):  # which of many NaN a product gives is up to the processor
        found, expected = found.isnan(), expected.isnan()
    if math.prod(found.shape) and not torch.equal(bits(found), bits(expected)):
        return f"problem: {found} is not {expected}"
    if found.shape != expected.shape:
        return f"problem: shape {tuple(found.shape)}, not {tuple(expected.shape)}"
    if case.function != "all_reduce" and case.out != "own" and not torch.equal(bits(x), bits(kept)):
        return "problem: the input has changed"
    return "right"
