"""Drawn steps of ColossalAI's stage functions on a ring, and what has to come of them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fuzz_calls import bits, filled, named, problem_of, tensor_of
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from mapping_cases import with_layout
from torch import Tensor
from torch.distributed import ProcessGroup

from tritoncomm import groups, p2p
from tritoncomm.groups import Group, ParallelMode
from tritoncomm.tensor import group_registry

__all__ = ["StageStep", "run_stages", "stage_steps"]


@dataclass(frozen=True)
class StageStep:
    """One step that every stage makes, with few odd arguments.

    Attributes:
        function: of ``p2p``; ``chain`` for the functions of a pipeline with a first and a last stage.
        shapes: of the tensors that are sent; one is sent alone.
        dtype: of them.
        passed: what is passed as dtype; ``own`` for theirs.
        memory: layout of their memory.
        kind: of tensor.
        expected: what is passed as shape; None for that of what is sent.
        recv: whether something is received.
        peers: what is passed as ranks of the neighbours: ``none``, ``right``, or something else.
        split: with shards over tensor-parallel ranks.
        device: what is passed.
        groups: whether groups are registered.
        checked: in check mode.
    """

    function: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    passed: Any
    memory: str
    kind: str
    expected: Any
    recv: bool
    peers: Any
    split: bool
    device: Any
    groups: bool
    checked: bool


def stage_steps(worlds: SearchStrategy[Any], junk: SearchStrategy[Any]) -> SearchStrategy[Any]:
    """Steps of any world."""
    shape = st.lists(st.sampled_from([4, 1, 2, 3, 0]), max_size=3).map(tuple)
    odd = st.sampled_from([(-1, 4), (2.5,), ("4",), (None,), (2**40, 2**40), (2**62,), "x", 4, None, [[4], "x"]])
    expected = st.one_of(*[st.none()] * 6, odd)
    step = st.builds(
        StageStep,
        st.sampled_from(["forward", "backward", "both", "chain"]),
        st.one_of(shape.map(lambda one: (one,)), st.lists(shape, min_size=1, max_size=3).map(tuple)),
        st.sampled_from(["float32", "bfloat16", "int64", "bool", "complex64", "float8_e5m2", "uint16"]),
        st.one_of(*[st.just("own")] * 8, junk),
        st.sampled_from(["contiguous", "transposed", "sliced", "permuted"]),
        st.sampled_from(
            ["plain"] * 10 + ["leaf", "parameter", "inference", "meta", "fake", "sparse", "nested", "number"]
        ),
        expected,
        st.sampled_from([True] * 4 + [False]),
        st.sampled_from(["none"] * 6 + ["right", "right", -1, 99, "x", 1.5]),
        st.sampled_from([False, False, True]),
        st.sampled_from([None] * 6 + ["cpu", "cpu", "meta", "gpu9", 3.5, torch.device("cpu")]),
        st.sampled_from([True] * 9 + [False]),
        st.sampled_from([False] * 5 + [True]),
    )
    return st.tuples(worlds, step)


def _register(group: ProcessGroup) -> None:
    """The pipeline is the group; the tensor group is this rank alone."""
    rank = dist.get_rank()
    solo = group_registry.group_over((rank,), rank)
    members = {ParallelMode.PIPELINE: group, ParallelMode.TENSOR: solo, ParallelMode.GLOBAL: dist.group.WORLD}
    groups.register({m: Group(g, m) for m, g in members.items() if g})


def run_stages(group: ProcessGroup, step: StageStep) -> str:
    """``right``, ``refused: ...``, ``mixed`` (not called) or ``problem: ...``."""
    try:
        if step.groups:
            _register(group)
        return _chain(group, step) if step.function == "chain" else _ring(group, step)
    except Exception as error:
        return f"refused: {type(error).__name__}: {error}" if named(error) else problem_of(error)


def _tensors(step: StageStep, of: int, seed: int = 0) -> list[Tensor]:
    made = [filled(shape, step.dtype, seed + 10 * of + i) for i, shape in enumerate(step.shapes)]
    return [with_layout(x, step.memory) for x in made]


def _form(step: StageStep, values: list[Any]) -> Any:
    return values[0] if len(step.shapes) == 1 else values


def _ring(group: ProcessGroup, step: StageStep) -> str:
    rank, world = group.rank(), group.size()
    ranks = dist.get_process_group_ranks(group)
    before, after = (rank - 1) % world, (rank + 1) % world
    sent = [tensor_of(step.kind, x, group) for x in _tensors(step, rank)]
    if any(x is None for x in sent):
        return "mixed"  # torch has no such tensor
    shapes = _form(step, [tuple(shape) for shape in step.shapes])
    expected = shapes if step.expected is None else step.expected
    if step.expected is not None and not step.recv:
        return "mixed"
    if not step.recv and world > 1:
        return "mixed"  # what is sent has to be received
    peers: dict[str, Any] = {}
    if step.peers == "right":
        peers = {"prev_rank": ranks[before], "next_rank": ranks[after]}
    elif step.peers != "none":
        peers = {"prev_rank": step.peers, "next_rank": step.peers}
    dtype = getattr(torch, step.dtype) if step.passed == "own" else step.passed
    options = {"dtype": dtype, "scatter_gather_tensors": step.split, "device": step.device, **peers}
    with p2p.check(step.checked):
        if step.function == "forward":
            got = [p2p.send_forward_recv_forward(_form(step, sent), expected, step.recv, **options)]
            sources = [before]
        elif step.function == "backward":
            got = [p2p.send_backward_recv_backward(_form(step, sent), expected, step.recv, **options)]
            sources = [after]
        else:
            both = p2p.send_forward_backward_recv_forward_backward(
                _form(step, sent), _form(step, sent), expected, expected, step.recv, step.recv, **options
            )
            got, sources = list(both), [before, after]
    for x, source in zip(got, sources, strict=True):
        if step.recv and (problem := _differs(step, x, source)):
            return problem
    return "right"


def _chain(group: ProcessGroup, step: StageStep) -> str:
    """From the first stage to the last, and gradients back; arguments are right."""
    rank, world = group.rank(), group.size()
    if not step.groups or step.kind not in ("plain", "leaf", "parameter", "inference"):
        return "mixed"
    sent = [tensor_of(step.kind, x, group) for x in _tensors(step, rank)]
    if any(x is None for x in sent):
        return "mixed"
    shapes, dtype = _form(step, [tuple(shape) for shape in step.shapes]), getattr(torch, step.dtype)
    with p2p.check(step.checked):
        x = p2p.recv_forward(shapes, dtype=dtype, scatter_gather_tensors=step.split)
        p2p.send_forward(_form(step, sent), scatter_gather_tensors=step.split)
        grad = p2p.recv_backward(shapes, dtype=dtype, scatter_gather_tensors=step.split)
        p2p.send_backward(_form(step, sent), scatter_gather_tensors=step.split)
    if (x is None, grad is None) != (rank == 0, rank == world - 1):
        return f"problem: stage {rank} of {world} got {type(x).__name__} and {type(grad).__name__}"
    return (x is not None and _differs(step, x, rank - 1)) or (
        grad is not None and _differs(step, grad, rank + 1)
    ) or "right"  # fmt: skip


def _differs(step: StageStep, received: Any, source: int) -> str:
    received = [received] if isinstance(received, Tensor) else received
    for x, wanted in zip(received, _tensors(step, source), strict=True):
        if (x.shape, x.dtype) != (wanted.shape, wanted.dtype) or x.is_meta or not torch.equal(bits(x), bits(wanted)):
            return f"problem: {x.dtype} {tuple(x.shape)} arrived, not {wanted.dtype} {wanted.tolist()}"
    return ""
