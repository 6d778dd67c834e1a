"""pack and unpack on the CPU, where they are torch's own copies, against torch's other ways to write the same step.

Ours is the path that `auto` takes for CPU tensors; the others are what layers do today: ``split`` and ``cat``
(Megatron-LM's sp2hp and hp2sp), ``movedim`` and ``contiguous`` (DTensor), the same through ``torch.compile``, and
``copy_`` of as many bytes without moving any, the roof. "FSDP2's op" is the one of its two fused copies that does this
very step in one call: to pack, ``split_with_sizes_copy`` with the blocks of the wire as ``out=``; to unpack,
``_chunk_cat`` of these blocks. FSDP2 itself uses them the other way round, on parameters cut along dim 0, where nothing
changes its order within a parameter; along another dim it splits and concatenates first, which is the column before.
Compiling is not timed. Kernels on a GPU are `gpu_bench.py`'s. Passes are bytes read and written, as multiples of once
over; what is inside a compiled call is not seen.
``python bench/bench_kernels.py`` prints the table; ``--json PATH`` writes it with versions.
"""

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor

from bench import guard, part
from bench.bench_p2p import Traffic
from bench.timing import figures, geometric_mean, interleaved, quantile, quiet_host, versions
from tritoncomm.core import ops

PART = "kernels"  # of the suite: the name of the results file
ROUNDS = 60
PEERS = ("split + cat", "movedim", "compiled", "FSDP2's op", "roof")
MIB = 2**20


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


@dataclass
class Row:
    """Microseconds by provider over the rounds, and passes over memory."""

    case: Case
    samples: dict[str, list[float]] = field(default_factory=dict)
    passes: dict[str, float] = field(default_factory=dict)

    def cost(self, provider: str) -> float:
        return quantile(self.samples[provider], 0.2)

    @property
    def against_fastest(self) -> float:
        """Ours over the fastest alternative that does the step."""
        return self.cost("ours") / min(self.cost(peer) for peer in PEERS if peer in self.samples and peer != "roof")

    def figures(self) -> dict[str, Any]:
        """The row in the results file."""
        row = figures(self.case.label, self.samples, passes=self.passes)
        for by_peer in (row["ratio"], row["spread"]):
            del by_peer["roof"]  # it allocates nothing: another kind of work, which the guard does not hold us to
        return row


def compiled(function: Callable[[Tensor], Tensor], x: Tensor) -> dict[str, Callable[[], Tensor]]:
    """``function`` of ``x`` through torch.compile, at its first call; nothing where there is no C++ compiler."""
    if not any(shutil.which(name) for name in ("g++", "clang++", "c++")):
        return {}
    torch.compiler.reset()  # every shape for itself: a graph for any size would be slower
    made = torch.compile(function, dynamic=False)
    return {"compiled": lambda: made(x)}


def split_into(x: Tensor, run: int, wire: Tensor) -> Tensor:
    torch.split_with_sizes_copy(x, [run] * len(wire), 1, out=wire.unbind(0))
    return wire


def calls(case: Case) -> dict[str, Callable[[], Tensor]]:
    """The step by every provider; the results of all but the roof are equal."""
    world, run = case.world, case.run_bytes // case.dtype.itemsize
    outer = case.nbytes // (case.run_bytes * world)
    source, target = torch.empty(case.nbytes, dtype=torch.int8), torch.empty(case.nbytes, dtype=torch.int8)
    if case.op == "pack":
        x = torch.randn(outer, world * run).to(case.dtype)

        def moved(x: Tensor) -> Tensor:
            return x.unflatten(1, (world, run)).movedim(1, 0).contiguous()

        return {
            "ours": lambda: ops.pack(x, 1, world)[0],
            "split + cat": lambda: torch.cat(torch.split(x, run, 1), 0),
            "movedim": lambda: moved(x),
            **compiled(moved, x),
            "FSDP2's op": lambda: split_into(x, run, x.new_empty(world, outer, run)),
            "roof": lambda: target.copy_(source),
        }
    wire = torch.randn(world, outer, run).to(case.dtype)
    return {
        "ours": lambda: ops.unpack(wire, (outer, world * run), 1, world)[0],
        "split + cat": lambda: torch.cat(wire.unbind(0), -1),
        "movedim": lambda: wire.movedim(0, 1).flatten(1),
        **compiled(lambda wire: wire.movedim(0, 1).flatten(1), wire),
        "FSDP2's op": lambda: torch._chunk_cat(wire.unbind(0), 0, outer),  # type: ignore
        "roof": lambda: target.copy_(source),
    }


def measure(case: Case, rounds: int = ROUNDS) -> Row:
    """All providers in one row, checked; one that misses its figures gets as many rounds again."""
    row, found = Row(case), calls(case)
    want = found["split + cat"]().flatten()
    for provider, call in found.items():
        assert provider == "roof" or torch.equal(call().flatten(), want), (case.label, provider)
        if provider == "compiled":
            continue
        with Traffic() as traffic:
            call()
        row.passes[provider] = round(traffic.moved / (2 * case.nbytes), 3)
    inner = max(1, 4 * MIB // case.nbytes)
    with quiet_host():
        row.samples = dict(zip(found, interleaved(list(found.values()), rounds, inner), strict=True))
        if guard.is_worse(PART, row.figures()):
            for kept, more in zip(row.samples.values(), interleaved(list(found.values()), rounds, inner), strict=True):
                kept += more
    return row


def table(rows: list[Row]) -> str:
    """One line per step: microseconds at p20 of every provider, ours of the fastest alternative, passes."""
    width = max(len(row.case.label) for row in rows)
    lines = [f"{'us at p20':{width}}" + "".join(f"  {name:>12}" for name in ("ours", *PEERS, "of fastest", "passes"))]
    for row in rows:
        cells = [f"{row.cost(provider):.1f}" if provider in row.samples else "-" for provider in ("ours", *PEERS)]
        cells += [f"{row.against_fastest:.2f}", f"{row.passes['ours']:g}"]
        lines.append(f"{row.case.label:{width}}" + "".join(f"  {cell:>12}" for cell in cells))
    return "\n".join(lines)


def failures(rows: list[Row]) -> list[str]:
    """What misses the targets; times are held by the guard alone."""
    return [f"{row.case.label}: {row.passes['ours']} passes, not 1" for row in rows if row.passes["ours"] != 1]


def as_json(rows: list[Row]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "unit": "microseconds per step",
        "rows": [row.figures() for row in rows],
        "geometric_mean": round(geometric_mean([row.against_fastest for row in rows]), 3),
    }


@pytest.fixture(scope="module")
def rows() -> list[Row]:
    return []


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.label)
def test_step_is_one_pass(benchmark: Any, case: Case, rows: list[Row]) -> None:
    row = measure(case)
    rows.append(row)
    benchmark.extra_info.update(of_fastest=round(row.against_fastest, 3), passes=row.passes["ours"])
    benchmark.pedantic(calls(case)["ours"], rounds=5, iterations=1, warmup_rounds=1)
    assert not failures([row])
    assert not [str(line) for line in guard.against_committed(PART, {"rows": [row.figures()]})]


def test_steps_together(rows: list[Row], capsys: pytest.CaptureFixture[str]) -> None:
    if len(rows) < len(CASES):
        pytest.skip(f"{len(rows)} of {len(CASES)} steps were measured")
    with capsys.disabled():
        print("\n" + table(rows))


def main() -> int:
    options = part.arguments("pack and unpack on the CPU against torch's own formulations.", "steps", ROUNDS)
    rows = [measure(case, options.rounds) for case in CASES if options.only in case.label]
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
