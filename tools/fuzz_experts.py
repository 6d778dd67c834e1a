"""Drawn routings of tokens to experts, against the same layer token by token."""

from typing import Any

from experts_twin import KINDS, WAYS, Routing, run_routing
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from laid_out import LAYOUTS

__all__ = ["routings", "run_routing"]


@st.composite
def routings(draw: Any, worlds: SearchStrategy[Any]) -> tuple[Any, Routing]:
    """Few tokens of every rank, also none; every number of experts for a token up to 8."""
    world = draw(worlds)
    ranks = len(world) if isinstance(world, tuple) else world
    tokens = tuple(draw(st.lists(st.sampled_from([5, 3, 9, 1, 0, 0]), min_size=ranks, max_size=ranks)))
    dtype = draw(st.sampled_from(["float32", "bfloat16", "float16", "float64"]))
    return world, Routing(
        tokens,
        draw(st.sampled_from([8, 5, 1, 33, 64, 1030])),
        draw(st.integers(1, 8)),
        draw(st.sampled_from([2, 1, 4, 3])),
        draw(st.sampled_from(KINDS)),
        dtype,
        draw(st.sampled_from(["float32", dtype])),
        draw(st.sampled_from([1, 1, 8, 3])),
        draw(st.sampled_from(["torch", "torch", "torch", "triton"])),
        draw(st.sampled_from(["eager", *[how for how in WAYS if "compiled" not in how]])),
        draw(st.integers(0, 10**6)),
        tuple(draw(st.lists(st.sampled_from(LAYOUTS), min_size=5, max_size=5))),
    )
