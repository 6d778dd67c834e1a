"""The kernels on one GPU: share of the copy roof, and against what torch code does for the same step today.

Run as ``make gpu-bench``. The roof is a contiguous ``dst.copy_(src)`` that reads and writes as many bytes, measured in
the same rounds; a share of it is of medians. Times are CUDA events around one call with the L2 cache flushed before it.
"statistics" and "gradient" are the two kernels of the cross entropy over a cut vocabulary; a run is a row of the
logits, and torch's formulations compute in float32 as they do. Rows that begin with "host" are the host's time to
enqueue one small call, by the host's clock. Results go to $OUT, or to ``bench/results/<device>/``. ``--dry`` runs
everything but the GPU on the CPU with TRITON_INTERPRET=1 and tiny sizes; its times mean nothing and are not written as
results. Exits 2 without a CUDA device.
"""

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import reference, softmax

from bench.report import GPU_HOST
from bench.timing import figures, quantile, versions, write_json
from tritoncomm import ops

BUDGET_S = 400  # later cases are left out, visibly, so that the run ends within eight minutes
MIB = 2**20
TARGET = {"pack": 0.95, "unpack": 0.95, "reduce": 0.90}
ENTROPY = {"statistics", "gradient"}
Call = Callable[[], Any]


@dataclass(frozen=True)
class Case:
    """One point: ``nbytes`` in runs of ``run_bytes`` for ``world`` ranks, or that many parts of it to sum.

    Of the cross entropy: logits in rows of ``run_bytes``, a piece of the vocabulary of ``world`` ranks.
    """

    op: str
    sweep: str
    nbytes: int
    run_bytes: int
    world: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None

    @property
    def label(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        kind += f">{str(self.out_dtype).removeprefix('torch.')}" if self.out_dtype else ""
        size = f"{self.nbytes / MIB:g} MiB"
        return f"{self.op:10} {size:>10}  run {self.run_bytes:>6}  world {self.world:>2}  {kind}"

    @property
    def has_target(self) -> bool:
        return (
            self.op in TARGET
            and self.nbytes >= 64 * MIB
            and self.run_bytes >= 128
            and (self.op != "reduce" or self.world <= 16)
        )


def cases() -> Iterator[Case]:
    """The sweeps around 64 MiB of bf16 in runs of 512 bytes for 8 ranks; the most telling ones come first."""
    for op in ("pack", "unpack"):
        for run in (16, 32, 64, 128, 256, 512, 1024, 4096, 16384, 65536):
            yield Case(op, "run", 64 * MIB, run, 8)
        for mib in (1, 4, 16, 256, 1024):
            yield Case(op, "size", mib * MIB, 512, 8)
        for world in (2, 4, 16, 32, 64):
            yield Case(op, "world", 64 * MIB, 512, world)
        for run in (144, 200, 100, 1026):  # 16, 8, 4 and 2 bytes per access
            yield Case(op, "alignment", 64 * MIB, run, 8)
        for dtype in (torch.bool, torch.float8_e4m3fn, torch.float32, torch.float64, torch.complex64):
            yield Case(op, "dtype", 64 * MIB, 512, 8, dtype)
    for world in (2, 4, 8, 16, 32, 64):
        yield Case("reduce", "world", 256 * MIB, 256 * MIB // world, world)
    for mib in (1, 16, 64, 1024):
        yield Case("reduce", "size", mib * MIB, mib * MIB // 8, 8)
    for dtype, out in ((torch.bfloat16, torch.float32), (torch.float32, None), (torch.float32, torch.bfloat16)):
        yield Case("reduce", "dtype", 256 * MIB, 32 * MIB, 8, dtype, out)
    for op in ("statistics", "gradient"):  # 4096 tokens, a vocabulary of 128256
        for world, dtype in ((8, torch.bfloat16), (8, torch.float32), (2, torch.bfloat16), (1, torch.bfloat16)):
            run = 128256 // world * dtype.itemsize
            yield Case(op, "vocabulary", 4096 * run, run, world, dtype)
    yield Case("pack", "cast", 64 * MIB, 1024, 8, torch.float32, torch.bfloat16)
    yield Case("unpack", "cast", 64 * MIB, 1024, 8, torch.bfloat16, torch.float32)


def shrunk(case: Case) -> Case:
    """The same case, small enough for the interpreter."""
    run = min(case.run_bytes, 2048)
    if case.op in ENTROPY:
        return Case(case.op, case.sweep, 3 * run, run, case.world, case.dtype)
    if case.op == "reduce":
        return Case("reduce", case.sweep, run * case.world, run, case.world, case.dtype, case.out_dtype)
    return Case(case.op, case.sweep, 3 * run * case.world, run, case.world, case.dtype, case.out_dtype)


def filled(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Finite values of any dtype."""
    if dtype.is_complex:
        return torch.randn(shape, dtype=dtype, device=device)
    if dtype is torch.bool:
        return torch.randint(0, 2, shape, dtype=torch.uint8, device=device).view(torch.bool)
    return torch.randn(shape, dtype=torch.float32, device=device).to(dtype)


@dataclass
class Prepared:
    """What is timed, checked already: ours and the alternatives by name, and the bytes ours moves."""

    calls: dict[str, Call]
    moved: int


def agree(case: Case, got: Tensor, want: Tensor, what: str) -> None:
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[got.dtype.itemsize]
    assert got.dtype is want.dtype, f"{case.label}: {what} has another dtype"
    assert torch.equal(got.reshape(-1).view(kind), want.reshape(-1).view(kind)), f"{case.label}: {what} differs"


def prepare(case: Case, device: torch.device) -> Prepared:
    if case.op in ENTROPY:
        return prepare_entropy(case, device)
    return prepare_reduce(case, device) if case.op == "reduce" else prepare_copy(case, device)


def prepare_copy(case: Case, device: torch.device) -> Prepared:
    """pack: the columns of every rank become its block. unpack: the way back."""
    world, run = case.world, case.run_bytes // case.dtype.itemsize
    outer = max(1, case.nbytes // (case.run_bytes * world))
    out_dtype = case.out_dtype or case.dtype
    if case.op == "pack":
        rows = filled((outer, world * run), case.dtype, device)
        wire, want = (torch.empty((world, outer, run), dtype=out_dtype, device=device) for _ in range(2))
        calls: dict[str, Call] = {
            "ours": lambda: kernels.pack(rows, wire),
            "split + cat": lambda: torch.cat(torch.split(rows.to(out_dtype), run, 1), 0),
            "movedim": lambda: rows.to(out_dtype).unflatten(1, (world, run)).movedim(1, 0).contiguous(),
        }
        reference.pack(rows, want)
        target = wire
    else:
        wire = filled((world, outer, run), case.dtype, device)
        rows, want = (torch.empty((outer, world * run), dtype=out_dtype, device=device) for _ in range(2))
        calls = {
            "ours": lambda: kernels.unpack(wire, rows),
            "split + cat": lambda: torch.cat(wire.to(out_dtype).unbind(0), -1),
            "movedim": lambda: wire.to(out_dtype).movedim(0, 1).contiguous(),
        }
        reference.unpack(wire, want)
        target = rows
    moved = calls["ours"]()
    agree(case, target, want, "ours")
    for name in ("split + cat", "movedim"):
        try:
            result = calls[name]()
        except (RuntimeError, NotImplementedError) as error:  # a dtype that torch has no kernel for
            print(f"{case.label}: {name} left out: {error}")
            del calls[name]
            continue
        agree(case, result, want, name)
    return Prepared(calls, moved)


def prepare_reduce(case: Case, device: torch.device) -> Prepared:
    length = max(1, case.run_bytes // case.dtype.itemsize)
    out_dtype = case.out_dtype or case.dtype
    wire = filled((case.world, length), case.dtype, device)
    out, want = (torch.empty(length, dtype=out_dtype, device=device) for _ in range(2))
    wide = case.dtype if case.out_dtype is None else torch.promote_types(case.dtype, out_dtype)
    calls: dict[str, Call] = {
        "ours": lambda: kernels.reduce(wire, out),
        "sum": lambda: wire.sum(0, dtype=wide).to(out_dtype),
    }
    moved = calls["ours"]()
    reference.reduce(wire, want)
    agree(case, out, want, "ours")
    torch.testing.assert_close(calls["sum"](), want, rtol=2e-2, atol=2e-2)
    return Prepared(calls, moved)


def prepare_entropy(case: Case, device: torch.device) -> Prepared:
    """The statistics of every row, or the gradient of the logits; one target in ``world`` is in this piece."""
    cols = case.run_bytes // case.dtype.itemsize
    rows = case.nbytes // case.run_bytes
    x = filled((rows, cols), case.dtype, device)
    target = torch.randint(cols * case.world, (rows,), device=device)
    here = target < cols
    place, column = torch.where(here, target, -1), torch.where(here, target, 0)[:, None]
    hard, factor = torch.ones(rows, device=device), here.to(torch.float32)[:, None]
    if case.op == "statistics":
        found = torch.empty(2, rows, device=device)

        def statistics() -> Tensor:
            wide = x.float()
            return torch.stack((torch.logsumexp(wide, -1), (wide.gather(1, column) * factor)[:, 0]))

        calls: dict[str, Call] = {
            "ours": lambda: softmax.statistics(x, place, hard, None, found),
            "logsumexp + gather": statistics,
        }
    else:
        found, total = torch.empty_like(x), torch.ones(rows, device=device)
        lse, upstream = torch.logsumexp(x.float(), -1), torch.full((rows,), 1 / rows, device=device)

        def gradient() -> Tensor:
            out = (x - lse[:, None]).exp_()
            return out.scatter_add_(1, column, -factor).mul_(upstream[:, None]).to(case.dtype)

        calls = {
            "ours": lambda: softmax.gradient(x, place, hard, None, total, lse, upstream, found),
            "exp + scatter": gradient,
        }
    moved = calls["ours"]()
    (peer,) = (call for name, call in calls.items() if name != "ours")
    tolerance = 2e-2 if found.dtype is torch.bfloat16 else 1e-4
    torch.testing.assert_close(found, peer(), rtol=tolerance, atol=tolerance / (rows if case.op == "gradient" else 1))
    return Prepared(calls, moved)


class Device:
    """Clocks of the device: CUDA events, or the host's clock when dry."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.name = "dry run on the CPU" if dry else torch.cuda.get_device_name(0)
        cache = 0 if dry else torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(max(4 * cache, 4096), dtype=torch.int8, device=self.device)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, start: Any, end: Any) -> float:
        return (end - start) * 1e6 if self.dry else start.elapsed_time(end) * 1e3

    def times(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        """Microseconds of every call, one sample per round, every provider in every round, caches cold."""
        for call in calls.values():
            for _ in range(3):
                call()
        self.synchronize()
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self._flush.zero_()  # also keeps the device busy while the host prepares the call
                start = self.mark()
                call()
                marks[name].append((start, self.mark()))
        self.synchronize()
        return {name: [self.microseconds(*pair) for pair in pairs] for name, pairs in marks.items()}


def measure(case: Case, device: Device, rounds: int) -> dict[str, Any]:
    """One row of the results: every provider, the roof among them, and ours as a share of it."""
    prepared = prepare(case, device.device)
    source, target = (torch.empty(prepared.moved // 2, dtype=torch.int8, device=device.device) for _ in range(2))
    samples = device.times({"roof": lambda: target.copy_(source), **prepared.calls}, rounds)
    return figures(
        " ".join(case.label.split()),
        samples,
        case={**vars(case), "dtype": str(case.dtype), "out_dtype": str(case.out_dtype or case.dtype)},
        moved=prepared.moved,
        share_of_roof=round(quantile(samples["roof"], 0.5) / quantile(samples["ours"], 0.5), 3),
        target=TARGET[case.op] if case.has_target else None,
    )


@triton.jit
def _plain_kernel(
    a_ptr, b_ptr, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, length, BLOCK: tl.constexpr
):  # fmt: skip
    """As many arguments as our kernels take, launched the ordinary way."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(b_ptr + offs, tl.load(a_ptr + offs, mask=offs < length), mask=offs < length)


def launch_costs(device: Device, rounds: int) -> list[dict[str, Any]]:
    """Rows of the host's microseconds to enqueue one small call; all of them from the same rounds."""
    rows = filled((16, 256), torch.float32, device.device)
    wire = torch.empty(4, 16, 64, device=device.device)
    flat = torch.empty(4096, device=device.device)
    numbers = tuple(range(3, 13))
    calls: dict[str, Call] = {
        "launch": lambda: kernels.pack(rows, wire),
        "plan, path and launch": lambda: ops.pack(rows, 1, 4),
        "fn[grid](...)": lambda: _plain_kernel[(16,)](rows, flat, *numbers, 4096, BLOCK=256),
        "copy_": lambda: flat.copy_(rows.view(-1)),
        "split + cat": lambda: torch.cat(torch.split(rows, 64, 1), 0),
    }
    samples: dict[str, list[float]] = {name: [] for name in calls}
    inner = 2 if device.dry else 100
    for i in range(rounds + 2):
        for name, call in calls.items():
            device.synchronize()
            started = time.perf_counter()
            for _ in range(inner):
                call()
            if i >= 2:
                samples[name].append((time.perf_counter() - started) / inner * 1e6)
    peers = {name: samples.pop(name) for name in ("fn[grid](...)", "copy_", "split + cat")}
    return [
        figures(f"host, {name}", {"ours": ours, **peers}, target_us=GPU_HOST[name]) for name, ours in samples.items()
    ]


def missed(row: dict[str, Any]) -> bool:
    """Below its share of the roof, or above its microseconds."""
    if "target_us" in row:
        return row["us"]["ours"]["p20"] > row["target_us"]
    return row["target"] is not None and row["share_of_roof"] < row["target"]


def line(row: dict[str, Any]) -> str:
    against = "  ".join(f"{ratio:5.2f} of {peer}" for peer, ratio in row["ratio"].items() if peer != "roof")
    ours = row["us"]["ours"]
    roof = f"  roof {row['share_of_roof']:5.2f}" if "share_of_roof" in row else ""
    return (
        f"{row['row']:58} {ours['median']:9.1f} us ({ours['p20']:.1f}-{ours['p80']:.1f}){roof}"
        f"  {against}{'  MISSED' if missed(row) else ''}"
    )


def destination(device: Device) -> Path:
    """$OUT, or the folder of this device beside this file."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / "gpu_bench.json"
    folder = "".join(c if c.isalnum() else "-" for c in device.name.lower())
    return Path(__file__).resolve().parent / "results" / folder / "gpu_bench.json"


def main() -> int:
    parser = argparse.ArgumentParser(description="The kernels against the copy roof of one GPU.")
    parser.add_argument("--dry", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--only", default="", help="only cases whose label contains this")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("gpu_bench: no CUDA device here; nothing was measured")
        return 2
    if options.dry and os.environ.get("TRITON_INTERPRET") != "1":
        print("gpu_bench: --dry needs TRITON_INTERPRET=1")
        return 2
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    started, device = time.monotonic(), Device(options.dry)
    rounds = 2 if options.dry else options.rounds
    print(f"{device.name}, torch {torch.__version__}, triton {triton.__version__}")
    results, left_out = launch_costs(device, rounds), []
    for row in results:
        print(line(row))
    for case in cases():
        if options.only not in case.label:
            continue
        if time.monotonic() - started > BUDGET_S:
            left_out.append(case.label)
            continue
        results.append(measure(shrunk(case) if options.dry else case, device, rounds))
        print(line(results[-1]), flush=True)
        if not options.dry:
            torch.cuda.empty_cache()
    if left_out:
        print(f"{len(left_out)} cases left out, {BUDGET_S} s are over: {'; '.join(left_out)}")
    held = [row for row in results if row.get("target") is not None or "target_us" in row]
    print(f"{len(results)} rows, {len(held)} with a target, {sum(map(missed, held))} of them missed it")
    content = {
        "device": device.name,
        "versions": versions(),
        "unit": "microseconds per call",
        "rows": results,
        "left_out": left_out,
    }
    if options.dry:
        print("dry run: nothing written")
    else:
        print("written:", write_json(destination(device), content))
    return 0


if __name__ == "__main__":
    sys.exit(main())
