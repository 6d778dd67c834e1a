"""What a kernel launch costs the host, without a GPU: Triton's launcher, and a driver that drops what it is given.

Ours is the launch of a prepared call, and ``ops.pack`` with everything around it: the plan, the choice of the path, the
wire that is allocated. The peer is the ordinary ``fn[grid](...)`` of the same kernel with the same arguments, after the
same allocation where there is one. The driver's own time is not in these figures, nor is a real allocator's;
`gpu_bench.py` measures the whole on a GPU. ``python bench/bench_launch.py`` prints the table; ``--json PATH`` writes it
with versions. Needs a C compiler, and a machine without a CUDA device.
"""

import os
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from tritoncomm_kernels.launch import Launch

from bench import guard, part
from bench.timing import figures, geometric_mean, interleaved, quiet_host, versions
from tritoncomm.core import ops

PART = "launch"
ROUNDS = 100
INNER = 100
PEER = "fn[grid](...)"
SHAPE, WORLD = (16, 256), 4
Calls = tuple[Callable[[], Any], Callable[[], Any]]


def missing() -> str:
    """Why nothing can be measured here, empty if it can."""
    if torch.cuda.is_available():
        return "there is a CUDA device here, and gpu_bench.py measures the launch on it"
    if shutil.which("cc") is None:
        return "there is no C compiler here"
    return "kernels are interpreted: TRITON_INTERPRET=1" if os.environ.get("TRITON_INTERPRET") == "1" else ""


def seen(call: Callable[[], Any]) -> Launch:
    """The prepared launch that a call makes."""
    found: list[Launch] = []
    ordinary = Launch.__call__

    def note(self: Launch, *arguments: Any) -> None:
        found.append(self)
        ordinary(self, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Launch, "__call__", note)
        call()
    (launch,) = found
    return launch


def by_hand(launch: Launch, first: Tensor, second: Tensor) -> Callable[[], Any]:
    """The same launch as a wrapper around a Triton kernel has it."""
    kernel, grid, arguments = launch.kernel, (launch.grid,), launch.arguments
    constants = {**launch.constants, "num_warps": launch.num_warps, "enable_fp_fusion": False}
    return lambda: kernel[grid](first, second, 1.0, *arguments, **constants)


def cases() -> dict[str, Calls]:
    """Ours and the peer's by row; to be called where the device is current."""
    x = torch.randn(SHAPE)
    wire, out = torch.empty(WORLD, SHAPE[0], SHAPE[1] // WORLD), torch.empty(SHAPE[0] * SHAPE[1] // WORLD)
    parts = wire.view(WORLD, -1)
    pack, unpack = seen(lambda: ops.pack(x, 1, WORLD)), seen(lambda: ops.unpack(wire, SHAPE, 1, WORLD))
    reduce = seen(lambda: ops.reduce(parts))

    def after(call: Callable[[], Any], shape: tuple[int, ...]) -> Callable[[], Any]:
        def allocated() -> None:
            torch.empty(shape)
            call()

        return allocated

    kernels = {
        "pack": by_hand(pack, x, wire),
        "unpack": by_hand(unpack, x, wire),
        "reduce": by_hand(reduce, parts, out),
    }
    return {
        "launch, pack": (lambda: pack(x, wire, 1.0), kernels["pack"]),
        "launch, reduce": (lambda: reduce(parts, out, 1.0), kernels["reduce"]),
        "plan, path and launch, pack": (lambda: ops.pack(x, 1, WORLD), after(kernels["pack"], wire.shape)),
        "plan, path and launch, unpack": (lambda: ops.unpack(wire, SHAPE, 1, WORLD), after(kernels["unpack"], SHAPE)),
        "plan, path and launch, reduce": (lambda: ops.reduce(parts), after(kernels["reduce"], out.shape)),
    }


def measure(rounds: int = ROUNDS, only: str = "") -> list[dict[str, Any]]:
    """All rows; one that is worse than committed gets as many rounds again."""
    from bench.fake_gpu.device import Device

    rows = []
    with Device().current(runs=False), quiet_host():
        for label, calls in cases().items():
            if only not in label:
                continue
            samples = interleaved(calls, rounds, INNER)
            if guard.is_worse(PART, row_of(label, samples)):
                samples = [kept + more for kept, more in zip(samples, interleaved(calls, rounds, INNER), strict=True)]
            rows.append(row_of(label, samples))
    return rows


def row_of(label: str, samples: list[list[float]]) -> dict[str, Any]:
    return figures(label, dict(zip(("ours", PEER), samples, strict=True)), limit=1.0)


def table(rows: list[dict[str, Any]]) -> str:
    width = max(len(row["row"]) for row in rows)
    lines = [f"{'us at p20':{width}}  {'ours':>8}  {PEER:>13}  {'ratio':>6}"]
    for row in rows:
        ours, peer = (row["us"][provider]["p20"] for provider in ("ours", PEER))
        lines.append(f"{row['row']:{width}}  {ours:8.2f}  {peer:13.2f}  {row['ratio'][PEER]:6.2f}")
    return "\n".join(lines)


def failures(rows: list[dict[str, Any]]) -> list[str]:
    """What misses the limit: no launch may cost more than Triton's own."""
    return [f"{row['row']}: {row['ratio'][PEER]:.2f} of {PEER}" for row in rows if row["ratio"][PEER] > row["limit"]]


def as_json(rows: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "versions": versions(),
        "unit": "microseconds per call, the driver's left out",
        "rows": rows,
        "geometric_mean": round(geometric_mean([row["ratio"][PEER] for row in rows]), 3),
    }


@pytest.mark.skipif(bool(missing()), reason=missing())
def test_launches_cost_little(benchmark: Any, capsys: pytest.CaptureFixture[str]) -> None:
    from bench.fake_gpu.device import Device

    rows = measure()
    with Device().current(runs=False):
        benchmark.pedantic(cases()["plan, path and launch, pack"][0], rounds=5, iterations=INNER, warmup_rounds=1)
    benchmark.extra_info.update({row["row"]: row["us"]["ours"]["p20"] for row in rows})
    with capsys.disabled():
        print("\n" + table(rows))
    assert not failures(rows)
    assert not [str(line) for line in guard.against_committed(PART, as_json(rows))]


def main() -> int:
    options = part.arguments("The host's part of a kernel launch, without a GPU.", "rows", ROUNDS)
    if reason := missing():
        print(f"nothing was measured: {reason}")
        return 2
    rows = measure(options.rounds, options.only)
    return part.finish(PART, rows, options.json, table, failures, as_json)


if __name__ == "__main__":
    sys.exit(main())
