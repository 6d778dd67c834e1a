"""Host cost of every mapping against megatron-core's own, over a no-op process group.

With small CPU tensors and a fake process group a call is all host work: what is compared is Python, autograd and the
calls into the backend. Where Megatron overwrites an input or a gradient that the caller still holds (the two rows that
say so), ours makes a copy first; what that copy costs is allowed for in the limit of these rows.
``python bench/bench_mappings.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from bench.harness import Clock, Part, Row
from bench.hosts import cpu_device, missing_megatron, no_op_group, peer, run_backward
from tritoncomm import mappings

WORLD = 4
INNER = 40
WORST, MEAN = 1.05, 0.80  # of Megatron's time: no mapping above, geometric mean at most
COPY = 0.03  # one clone of 512 bytes, of that time
MODES = ("forward", "forward, with grad", "forward + backward")


@dataclass(frozen=True)
class Case:
    """One mapping with its arguments after the input; ``local_out`` is the shape on rank 0."""

    name: str
    shape: tuple[int, ...]
    local_out: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    fresh: bool = False  # the gradient comes out of another op, as in a model: nothing but autograd holds it
    temporary: bool = False  # so does the input
    limit: float = WORST

    @property
    def label(self) -> str:
        return f"{self.name} {list(self.shape)}{f' {self.note}' if self.note else ''}"


# The fake group gathers shards of one size only, so the sizes of a gather are equal here.
CASES = [
    Case("copy_to_tensor_model_parallel_region", (8, 16), (8, 16), note="held gradient", limit=WORST + COPY),
    Case("copy_to_tensor_model_parallel_region", (8, 16), (8, 16), note="fresh gradient", fresh=True),
    Case("reduce_from_tensor_model_parallel_region", (8, 16), (8, 16), note="held input", limit=WORST + COPY),
    Case("reduce_from_tensor_model_parallel_region", (8, 16), (8, 16), note="temporary input", temporary=True),
    Case("scatter_to_tensor_model_parallel_region", (8, 2, 16), (8, 2, 4)),
    Case("gather_from_tensor_model_parallel_region", (8, 2, 16), (8, 2, 64)),
    Case("scatter_to_sequence_parallel_region", (8, 2, 16), (2, 2, 16)),
    Case("gather_from_sequence_parallel_region", (8, 2, 16), (32, 2, 16)),
    Case(
        "gather_from_sequence_parallel_region",
        (8, 2, 16),
        (32, 2, 16),
        {"tensor_parallel_output_grad": False},
        "replicated gradient",
    ),
    Case(
        "gather_from_sequence_parallel_region",
        (8, 2, 16),
        (32, 2, 16),
        {"output_split_sizes": [8] * WORLD},
        "sizes",
    ),
    Case("reduce_scatter_to_sequence_parallel_region", (8, 2, 16), (2, 2, 16)),
    Case(
        "reduce_scatter_to_sequence_parallel_region",
        (8, 2, 16),
        (2, 2, 16),
        {"input_split_sizes": [2] * WORLD},
        "sizes",
    ),
    Case("all_gather_last_dim_from_tensor_parallel_region", (8, 16), (8, 64)),
    Case("reduce_scatter_last_dim_to_tensor_parallel_region", (8, 16), (8, 4)),
    Case("all_to_all", (8, 16), (8, 16)),
    Case(
        "all_to_all",
        (8, 16),
        (10, 16),
        {"output_split_sizes_": [2, 1, 4, 3], "input_split_sizes": [1, 2, 3, 2]},
        "split sizes",
    ),
    Case("all_to_all_sp2hp", (8, 16), (32, 4)),
    Case("all_to_all_hp2sp", (8, 16), (2, 64)),
]


def calls(module: Any, case: Case, group: ProcessGroup) -> dict[str, Callable[[], Any]]:
    """The three calls that are timed, of one provider."""
    function, arguments = getattr(module, case.name), case.arguments
    plain = torch.randn(case.shape)
    leaf = torch.randn(case.shape, requires_grad=True)
    gradient = torch.randn(case.local_out)

    def call(x: Tensor) -> Callable[[], Tensor]:
        if case.name == "all_to_all":
            return lambda: function(group, x, **arguments)
        if case.temporary:
            return lambda: function(x * 2.0, group=group, **arguments)
        return lambda: function(x, group=group, **arguments)

    def both() -> tuple[Tensor, ...]:
        out = forward() * 2.0 if case.fresh else forward()
        return run_backward((out,), (gradient,), False, False, (leaf,), True, accumulate_grad=False)

    forward = call(leaf)
    return dict(zip(MODES, (call(plain), forward, both), strict=True))


def assert_agree(case: Case, ours: dict[str, Callable[[], Any]], theirs: dict[str, Callable[[], Any]]) -> None:
    """Shapes, dtypes and gradients of both; the fake group moves no data, so values are left to the tests."""
    for mode in MODES[:2]:
        for result in (ours[mode](), theirs[mode]()):
            assert tuple(result.shape) == case.local_out, (case.label, mode, result.shape)
            assert result.dtype is torch.float32
            assert result.requires_grad is (mode == MODES[1])
    for gradients in (ours[MODES[2]](), theirs[MODES[2]]()):
        (gradient,) = gradients
        assert tuple(gradient.shape) == case.shape, (case.label, gradient.shape)
        assert gradient.dtype is torch.float32


@contextmanager
def host() -> Iterator[ProcessGroup]:
    with no_op_group(WORLD) as group, cpu_device():
        yield group


def measure(case: Case, group: ProcessGroup, clock: Clock) -> Iterator[Row]:
    """Both providers, a row for every mode."""
    ours, theirs = calls(mappings, case, group), calls(peer("tensor_parallel.mappings"), case, group)
    assert_agree(case, ours, theirs)
    for mode in MODES:
        pair = {"ours": ours[mode], "megatron": theirs[mode]}
        yield clock.time(f"{case.label}, {mode}", pair, INNER, mode=mode, limit=case.limit)


PART = Part(
    name="host_cost",
    about="Host cost of every mapping against megatron-core's.",
    unit="microseconds per call",
    cases=CASES,
    measure=measure,
    host=host,
    rounds=200,
    peer="megatron",
    missing=missing_megatron,
    packages=("megatron-core",),
    means={"forward": (MODES[:2], MEAN), "forward + backward": (MODES[2:], MEAN)},
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
