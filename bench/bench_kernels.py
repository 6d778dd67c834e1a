"""pack and unpack on the CPU, where they are torch's own copies, against torch's other ways to write the same step.

Ours is the path that `auto` takes for CPU tensors; the others are what layers do today: ``split`` and ``cat``
(Megatron-LM's sp2hp and hp2sp), ``movedim`` and ``contiguous`` (DTensor), the same through ``torch.compile``, and
``copy_`` of as many bytes without moving any, the roof. "FSDP2's op" is the one of its two fused copies that does this
very step in one call: to pack, ``split_with_sizes_copy`` with the blocks of the wire as ``out=``; to unpack,
``_chunk_cat`` of these blocks. FSDP2 itself uses them the other way round, on parameters sharded along dim 0, where
nothing changes its order within a parameter; along another dim it splits and concatenates first, as in the column
before.
Compiling is not timed. Kernels on a GPU are `gpu_bench.py`'s. Passes are bytes read and written, as multiples of once
over; what is inside a compiled call is not seen.
``python bench/bench_kernels.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import shutil
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from bench.cost import Cost
from bench.formulations import compiled
from bench.harness import Clock, Part, Row
from tritoncomm.core import ops

MIB = 2**20
Step = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """``nbytes`` in runs of ``run_bytes`` for ``world`` ranks."""

    op: str
    nbytes: int
    run_bytes: int
    world: int
    dtype: torch.dtype

    @property
    def label(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op} {self.nbytes / MIB:g} MiB, run {self.run_bytes} B, world {self.world}, {kind}"


CASES = [
    Case(op, nbytes, run, world, dtype)
    for op in ("pack", "unpack")
    for nbytes, run, world, dtype in (
        (MIB // 4, 1024, 4, torch.bfloat16),
        (MIB, 64, 8, torch.bfloat16),
        (MIB, 512, 8, torch.bfloat16),
        (MIB, 4096, 2, torch.bfloat16),
        (4 * MIB, 4096, 8, torch.float32),
    )
]


HAS_COMPILER = any(shutil.which(name) for name in ("g++", "clang++", "c++"))


def split_into(x: Tensor, run: int, wire: Tensor) -> Tensor:
    torch.split_with_sizes_copy(x, [run] * len(wire), 1, out=wire.unbind(0))
    return wire


def calls(case: Case) -> dict[str, Callable[[], Tensor]]:
    """The step by every provider; the results of all but the roof are equal."""
    world, run = case.world, case.run_bytes // case.dtype.itemsize
    outer = case.nbytes // (case.run_bytes * world)
    source, target = torch.empty(case.nbytes, dtype=torch.int8), torch.empty(case.nbytes, dtype=torch.int8)
    x = torch.randn((outer, world * run) if case.op == "pack" else (world, outer, run)).to(case.dtype)
    pack: dict[str, Step] = {
        "ours": lambda x: ops.pack(x, 1, world)[0],
        "split + cat": lambda x: torch.cat(torch.split(x, run, 1), 0),
        "movedim": lambda x: x.unflatten(1, (world, run)).movedim(1, 0).contiguous(),
        "FSDP2's op": lambda x: split_into(x, run, x.new_empty(world, outer, run)),
    }
    unpack: dict[str, Step] = {
        "ours": lambda wire: ops.unpack(wire, (outer, world * run), 1, world)[0],
        "split + cat": lambda wire: torch.cat(wire.unbind(0), -1),
        "movedim": lambda wire: wire.movedim(0, 1).flatten(1),
        "FSDP2's op": lambda wire: torch._chunk_cat(wire.unbind(0), 0, outer),  # type: ignore
    }
    steps = pack if case.op == "pack" else unpack
    timed = {name: partial(step, x) for name, step in steps.items()}
    last = timed.pop("FSDP2's op")
    if HAS_COMPILER:
        timed["compiled"] = compiled(steps["movedim"], False, x)
    return {**timed, "FSDP2's op": last, "roof": lambda: target.copy_(source)}


def measure(case: Case, host: None, clock: Clock) -> Iterator[Row]:
    """All providers in one row, checked; the roof gets no ratio, because it allocates nothing."""
    steps, passes = calls(case), {}
    expected = steps["split + cat"]().flatten()
    for provider, call in steps.items():
        assert provider == "roof" or torch.equal(call().flatten(), expected), (case.label, provider)
        if provider != "compiled":
            with Cost() as cost:
                call()
            passes[provider] = round(cost.moved / (2 * case.nbytes), 3)
    inner = max(1, 4 * MIB // case.nbytes)
    yield clock.time(case.label, steps, inner, uncompared=("roof",), passes=passes)


def missed(row: Row) -> list[str]:
    """Times are held by the guard alone."""
    return [f"{row['row']}: {row['passes']['ours']} passes, not 1"] if row["passes"]["ours"] != 1 else []


PART = Part(
    name="kernels",
    unit="microseconds per step",
    cases=CASES,
    measure=measure,
    rounds=60,
    targets=missed,
)

test_case = PART.test()

if __name__ == "__main__":
    sys.exit(PART.main())
