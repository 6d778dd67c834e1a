"""Host cost of every mapping against megatron-core's own and plain torch, over a no-op process group.

With small CPU tensors and a no-op group a call is all host work: Python, autograd and the calls into the backend.
Megatron overwrites the input of ``reduce_from`` and the gradient of ``copy_to``. Ours does so under
``overwrite_inputs``, in the rows that say so. Without it ours makes a copy first: these rows are listed apart, without
a limit and in no mean.

"By hand" is plain torch, an ``autograd.Function`` over ``torch.distributed`` (``tritoncomm/bench/by_hand.py``). It
checks nothing and counts nothing. A no-op group answers at once, where a real backend has to enqueue. "enqueue" is the
host time of the row's collectives on a Gloo group of one rank, started and not waited for. A ratio "with enqueue" adds
it to both.
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

from bench.guard import mean_target, row_target
from bench.harness import Clock, Row
from bench.hosts import cpu_device, enqueue, megatron_part, no_op_group, peer, run_backward
from tritoncomm import mappings
from tritoncomm.bench import by_hand
from tritoncomm.explain import explain

WORLD = 4
INNER = 40
METHODS = {  # of a process group
    "all-reduce": "allreduce", "all-gather": "_allgather_base", "reduce-scatter": "_reduce_scatter_base",
    "all-to-all": "alltoall_base",
}  # fmt: skip
MODES = ("forward", "forward, with grad", "forward + backward")


@dataclass(frozen=True)
class Case:
    """One mapping with its arguments after the input; ``local_out`` is the shape on rank 0."""

    name: str
    shape: tuple[int, ...]
    local_out: tuple[int, ...]
    arguments: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    fresh: bool = False  # the gradient comes out of another op, as in a model
    temporary: bool = False  # so does the input
    copies: bool = False  # where Megatron overwrites memory
    overwrite: bool = False  # under overwrite_inputs

    def collectives(self, mode: str) -> list[str]:
        """Collectives of one call, as methods of a process group."""
        plan = explain(self.name, self.shape, WORLD, torch.float32, device="cpu")
        directions = [plan.forward]
        if mode == MODES[2] and self.arguments.get("tensor_parallel_output_grad", True):
            directions.append(plan.backward)
        return [METHODS[step.name] for each in directions for step in each.steps if step.path == "backend"]

    @property
    def label(self) -> str:
        return f"{self.name} {list(self.shape)}{f' {self.note}' if self.note else ''}"


X, FLAT = (8, 2, 16), (8, 16)
COPY_TO, REDUCE_FROM = "copy_to_tensor_model_parallel_region", "reduce_from_tensor_model_parallel_region"
GATHER_SP, REDUCE_SCATTER_SP = "gather_from_sequence_parallel_region", "reduce_scatter_to_sequence_parallel_region"
EXCHANGED = {"output_split_sizes_": [1, 2, 4, 3], "input_split_sizes": [1, 2, 3, 2]}
# The fake group gathers shards of one size only, so the sizes of a gather are equal here.
CASES = [
    Case(COPY_TO, FLAT, FLAT, copies=True),
    Case(COPY_TO, FLAT, FLAT, note="overwrite_inputs", fresh=True, overwrite=True),
    Case(REDUCE_FROM, FLAT, FLAT, copies=True),
    Case(REDUCE_FROM, FLAT, FLAT, note="overwrite_inputs", temporary=True, overwrite=True),
    Case("scatter_to_tensor_model_parallel_region", X, (8, 2, 4)),
    Case("gather_from_tensor_model_parallel_region", X, (8, 2, 64)),
    Case("scatter_to_sequence_parallel_region", X, (2, 2, 16)),
    Case(GATHER_SP, X, (32, 2, 16)),
    Case(GATHER_SP, X, (32, 2, 16), {"tensor_parallel_output_grad": False}, "replicated gradient"),
    Case(GATHER_SP, X, (32, 2, 16), {"output_split_sizes": [8] * WORLD}, "sizes"),
    Case(REDUCE_SCATTER_SP, X, (2, 2, 16)),
    Case(REDUCE_SCATTER_SP, X, (2, 2, 16), {"input_split_sizes": [2] * WORLD}, "sizes"),
    Case("all_gather_last_dim_from_tensor_parallel_region", FLAT, (8, 64)),
    Case("reduce_scatter_last_dim_to_tensor_parallel_region", FLAT, (8, 4)),
    Case("all_to_all", FLAT, FLAT),
    Case("all_to_all", FLAT, (10, 16), EXCHANGED, "split sizes"),
    Case("all_to_all_sp2hp", FLAT, (32, 4)),
    Case("all_to_all_hp2sp", FLAT, (2, 64)),
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


def assert_agree(case: Case, *providers: dict[str, Callable[[], Any]]) -> None:
    """Shapes, dtypes and gradients of both; the fake group moves no data, so values are left to the tests."""
    for timed in providers:
        (gradient,) = timed[MODES[2]]()
        results = [(timed[mode](), case.local_out, mode == MODES[1]) for mode in MODES[:2]]
        for x, shape, wants_grad in (*results, (gradient, case.shape, False)):
            assert tuple(x.shape) == shape, (case.label, x.shape)
            assert (x.dtype, x.requires_grad) == (torch.float32, wants_grad), case.label


@contextmanager
def host() -> Iterator[ProcessGroup]:
    with no_op_group(WORLD) as group, cpu_device():
        yield group


def measure(case: Case, group: ProcessGroup, clock: Clock) -> Iterator[Row]:
    """All providers, a row for every mode."""
    modules = {"ours": mappings, "megatron": peer("tensor_parallel.mappings"), "by hand": by_hand}
    providers = {name: calls(module, case, group) for name, module in modules.items()}
    target = {} if case.copies else row_target()
    with mappings.overwrite_inputs(case.overwrite):
        assert_agree(case, *providers.values())
        for mode in MODES:
            timed = {name: provider[mode] for name, provider in providers.items()}
            if collectives := case.collectives(mode):
                timed["enqueue"] = enqueue(collectives)
            yield clock.time(
                f"{case.label}, {mode}",
                timed,
                INNER,
                uncompared=("enqueue",),
                mode=f"{mode}, copied" if case.copies else mode,
                **target,
            )


PART = megatron_part(
    name="host_cost",
    cases=CASES,
    measure=measure,
    host=host,
    rounds=200,
    means={"forward": (MODES[:2], mean_target()), "forward + backward": (MODES[2:], mean_target())},
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
