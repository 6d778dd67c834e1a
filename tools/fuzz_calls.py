"""Drawn calls of mappings and collectives, with any tensor, group, dim and split sizes, and what has to come of them.

Every rank makes the same call. What comes of it is a right answer, which is computed here from what all ranks hold, or
an error of the library's own; anything else is a problem.
"""

import itertools
import os
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mapping_cases import (
    FUNCTIONS,
    GRADS,
    SUMMED,
    Call,
    Invalid,
    Unseen,
    as_asked,
    expected,
    expected_gradient,
    identity,
    local_shape,
    run,
    with_layout,
)  # fmt: skip
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed import DeviceMesh, ProcessGroup, distributed_c10d
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils._pytree import tree_map

import tritoncomm
from tritoncomm import CommError, ParallelMode, PeerError, groups
from tritoncomm.core import ops
from tritoncomm.tensor import ColoTensor, ColoTensorSpec, group_registry
from tritoncomm.tensor import ProcessGroup as Groups

__all__ = [
    "DTYPES", "GROUPS", "KINDS", "LAYOUTS", "assert_right", "bits", "filled", "group_of", "named", "problem_of",
    "run_call", "tensor_of", "verdict",
]  # fmt: skip

DTYPES = [
    "float32", "float64", "bfloat16", "float16", "int8", "uint8", "int16", "int32", "int64", "bool", "complex64",
    "complex128", "complex32", "uint16", "uint32", "float8_e4m3fn", "float8_e5m2",
]  # fmt: skip
LAYOUTS = ["contiguous", "transposed", "sliced", "permuted", "expanded", "negative", "conjugate"]
KINDS = [
    "plain", "leaf", "parameter", "inference", "subclass", "wrapper", "dtensor", "colo", "fake", "meta", "sparse",
    "csr", "csr leaf", "nested", "jagged", "mkldnn", "quantized", "none", "number", "list", "array", "text",
]  # fmt: skip
GROUPS = [
    "group", "name", "mesh", "mesh and dim", "solo", "nested", "none", "no member", "destroyed", "unknown", "number",
    "list", "object", "empty mesh dim", "mode",
]  # fmt: skip
_GOOD_GROUPS = ("group", "name", "mesh", "mesh and dim", "solo", "nested")
_TRITONCOMM = os.fspath(Path(tritoncomm.__file__).parent)


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
    return x.clone() if layout in ("expanded", "negative", "conjugate") else with_layout(x, layout)


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
    if kind == "csr leaf":
        return x.to_sparse_csr().requires_grad_()
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


def must_succeed(call: Call) -> bool:
    """Whether valid arguments may not be refused."""
    function = FUNCTIONS[call.function]
    if call.function == "all_to_all_dims" and any(sizes is not None for sizes in call.sizes):
        scatter, gather = (dim % len(call.shape) for dim in call.dims)
        if scatter == gather:
            return False  # two sizes of one dim
    return (
        call.kind in ("plain", "leaf", "parameter")
        and call.group in _GOOD_GROUPS
        and call.path != "triton"
        and (not function.adds or (call.dtype in SUMMED and call.op == "SUM"))
    )


def _expected(call: Call, held: list[Tensor], place: int) -> Tensor | None:
    """What this rank has to get; None for arguments that describe no call, or a sum for which torch has no rule."""
    try:
        return expected(call, held, place)
    except (Invalid, RuntimeError, KeyError, NotImplementedError):
        return None


def run_call(group: ProcessGroup, call: Call, device: torch.device | str = "cpu") -> str:
    """``right``, ``refused: ...``, ``mixed`` (not called: some ranks would refuse it), or ``problem: ...``."""
    try:
        given, meant = group_of(call.group, group)
        ranks = dist.get_process_group_ranks(meant)
        place, world = ranks.index(dist.get_rank()), len(ranks)
        held = [
            _memory(filled(local_shape(call, at, world), call.dtype, 1 + each).to(device), call.layout)
            for at, each in enumerate(ranks)
        ]
        try:
            wanted = [_expected(call, held, w) for w in range(world)]
        except Unseen:
            return "mixed"
        if len({each is None for each in wanted}) > 1:
            return "mixed"
        x = tensor_of(call.kind, held[place], meant)
        if (x is None and call.kind != "none") or (call.kind in ("fake", "meta") and call.path == "triton"):
            return "mixed"  # torch has no such tensor, or it has no memory to launch a kernel on
    except Exception as error:
        return problem_of(error)
    return _outcome(call, as_asked(call, place, ranks), x, given, held, wanted, place)


def _outcome(call: Call, asked: Call, x: Any, given: Any, held: list[Tensor], results: list[Any], place: int) -> str:
    """The same, of the call that this rank makes, from what all hold and what has to come of it on each."""
    function, wanted = FUNCTIONS[call.function], results[place]
    before = held[place].clone() if call.kind in ("plain", "leaf", "parameter") else None
    try:
        with ops.path(call.path):  # pyright: ignore[reportArgumentType]
            out = run(asked, x, given)
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
        return "right"  # a group of one rank looks at no dims
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
    if not problem and function.moves and len(held) > 1 and _is_view(out):
        problem = "the result is a view"
    if problem:
        return f"problem: {problem}"
    if call.function.startswith("collective.") and out is not x and out.requires_grad:
        return "problem: a result with a graph"
    if call.kind in ("leaf", "parameter") and function.backward is not None and call.dtype in GRADS:
        return _gradient(call, x, out, results, place)
    return "right"


def _is_view(out: Any) -> bool:
    """Whether a result is a view; over one rank it may be the input, in a layout that has no strides."""
    return type(out) is Tensor and not (out.is_contiguous() and out._base is None)


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


def _gradient(call: Call, x: Tensor, out: Tensor, results: list[Tensor], place: int) -> str:
    """The gradient of the leaf ``x``, against the closed form."""
    grads = [filled(each.shape, call.dtype, 50 + w).to(x.device) for w, each in enumerate(results)]
    layout = call.layout if call.layout in ("transposed", "sliced", "fused") else "contiguous"
    passed = with_layout(grads[place], layout)
    try:
        with ops.path(call.path):  # pyright: ignore[reportArgumentType]
            out.backward(passed)
    except Exception as error:
        if named(error) and (call.group not in _GOOD_GROUPS or call.path == "triton"):
            return f"refused: {error}"
        return "in backward, " + problem_of(error)
    if x.grad is None:
        return "problem: no gradient"
    problem = _differs(x.grad, expected_gradient(call, grads, place).reshape(x.shape)) or _differs(passed, grads[place])
    return f"problem: the gradient: {problem}" if problem else "right"


def assert_right(group: ProcessGroup, *calls: Call, device: torch.device | str = "cpu") -> None:
    """Each call gives the closed form; none is refused."""
    for call in calls:
        outcome = run_call(group, call, device)
        assert outcome == "right", (call, outcome)


def verdict(outcomes: Sequence[str]) -> str:
    """What is wrong with what the ranks got, in words; empty if nothing is."""
    problems = [f"rank {rank}: {each}" for rank, each in enumerate(outcomes) if "problem: " in each]
    kinds = {each.split(":")[0] for each in outcomes}
    if not problems and len(kinds) > 1:
        problems = [f"ranks differ: {list(outcomes)}"]
    return "; ".join(itertools.islice(problems, 2))
