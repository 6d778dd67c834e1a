"""Drawn arguments of functions that send nothing: layouts, sizes of a job, dry runs, specs."""

from collections.abc import Callable
from typing import Any

import torch
from fuzz_calls import named, problem_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy

import tritoncomm
from tritoncomm.explain import OPS, explain
from tritoncomm.groups import as_mode
from tritoncomm.reshard import Layout, balanced_owners
from tritoncomm.runtime import read_sizes
from tritoncomm.tensor import ShardSpec
from tritoncomm.ulysses import UlyssesAttention

__all__ = ["arguments_of", "check_arguments"]


def _sizes(tensor: Any, pipeline: Any, data: Any, world: Any) -> Any:
    return read_sizes(tensor, pipeline, data, 1, 1, None, None, None).of_world(8)


def _config(pipeline: Any, tensor: Any, mode: Any, key: Any) -> Any:
    config = {"parallel": {"pipeline": pipeline, "tensor": {"size": tensor, "mode": mode, f"{key}": 1}}}
    return read_sizes(1, 1, None, 1, 1, None, None, config if key != "0" else pipeline)


# Each takes four values; a result of any kind is right, and so is an error by name.
_FUNCTIONS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "on_mesh": lambda a, b, c, d: Layout.on_mesh([a, b], [0, 1], [c]),
    "mesh": lambda a, b, c, d: Layout.on_mesh((4, 4), a, [b]),
    "grid": lambda a, b, c, d: Layout.on_mesh((4, 4), [[a, b], [c, d]], [0, None]),
    "placements": lambda a, b, c, d: Layout.on_mesh((4, 4), [[0, 1]], a),
    "shape": lambda a, b, c, d: Layout.replicated(a, [0]),
    "replicated": lambda a, b, c, d: Layout.replicated((4,), a),
    "split": lambda a, b, c, d: Layout.split((4, 4), a, [b, c]),
    "split sizes": lambda a, b, c, d: Layout.split((4, 4), 0, a),
    "split ranks": lambda a, b, c, d: Layout.split((4, 4), 0, {_key(a): 2, _key(b): 2}),
    "boxes": lambda a, b, c, d: Layout.of_boxes((4, 4), {0: [((a, b), (c, d))]}),
    "box": lambda a, b, c, d: Layout.of_boxes((4, 4), {_key(a): b, 1: [c]}),
    "sequence": lambda a, b, c, d: Layout.sequence((a, b), 0, "contiguous", [c, d]),
    "sequence shape": lambda a, b, c, d: Layout.sequence([a, b], 0, "striped", [0, 1], [0, c, d]),
    "sequence kind": lambda a, b, c, d: Layout.sequence((4, 4), a, b, c, d),
    "sequence bounds": lambda a, b, c, d: Layout.sequence((8, 4), 0, "zigzag", [0, 1], a),
    "owners": lambda a, b, c, d: balanced_owners({"x": [a, b], "y": (2, 2)}, [c, d]),
    "owners of": lambda a, b, c, d: balanced_owners(a, b),
    "sizes": _sizes,
    "config": _config,
    "mode": lambda a, b, c, d: as_mode(a),
    "explain": lambda a, b, c, d: explain("all_gather", [a, b], c, dims=[d]),
    "explain op": lambda a, b, c, d: explain(a, (4, 4), b, dims=[0]),
    "explain all": lambda a, b, c, d: [explain(op, (4, a), 2, torch.float32, b) for op in OPS],
    "explain sizes": lambda a, b, c, d: explain("all_gather", (4, 4), 2, sizes=[a, b], rank=c, device=d),
    "explain rows": lambda a, b, c, d: explain("all_to_all", (4, 4), 2, sizes=a, out_sizes=b, stride=c, overwrite=d),
    "explain dtype": lambda a, b, c, d: explain("reduce", (4, 4), 2, a, rates=b, sm_count=c),
    "attention": lambda a, b, c, d: UlyssesAttention(None, layout=a),
    "shards": lambda a, b, c, d: ShardSpec([a, b], [c, d]),
    "path": lambda a, b, c, d: tritoncomm.path(a),
}
_DOCUMENTED = {"shards": (AssertionError,)}
"""Errors that the seed's names have, and not the library's own."""


def _key(x: Any) -> Any:
    """Something that can be a key."""
    return tuple(x) if isinstance(x, list) else x


def arguments_of(junk: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """A function and four values, most of them small integers."""
    one = st.one_of(*[st.integers(0, 4)] * 6, st.integers(-3, 9), junk)
    return st.tuples(st.sampled_from(list(_FUNCTIONS)), st.tuples(one, one, one, one))


def check_arguments(case: tuple[str, tuple[Any, Any, Any, Any]]) -> None:
    """Something comes of them, or they are refused by name."""
    name, values = case
    try:
        _FUNCTIONS[name](*values)
    except _DOCUMENTED.get(name, ()):
        return
    except Exception as error:
        if not named(error):
            raise AssertionError(problem_of(error)) from error
