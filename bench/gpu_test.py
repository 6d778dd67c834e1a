"""Correctness on one GPU, without pytest: kernels against the reference, mappings over NCCL and Gloo, launches.

Run as ``make gpu-test``. Groups of checks run in the order of their worth, in a child process: what crashes or hangs is
told, the others go on, and every line is there as soon as it is known. ``--dry`` runs the same checks on the CPU with
TRITON_INTERPRET=1 and tiny sizes, as far as they go there. Exits 0 when everything holds, 1 when something does not, 2
without a CUDA device. Writes ``gpu_test.json`` into $OUT when it is set, after every group.
"""

import argparse
import itertools
import math
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import reference

from bench import gpu_groups, gpu_launches
from bench.checks import Group, summary
from bench.setting import FLOATS, INTEGER, Setting, bits, make_setting
from bench.supervised import run_checks, supervise
from bench.timing import versions, write_json

BUDGET_S = 345  # of all groups; later ones are skipped, visibly
EACH_S = 150  # of one group, which has crashed or hangs beyond that
GUARD = 64


def poison(like: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole storage of ``like`` again, filled with one pattern."""
    count = like.untyped_storage().nbytes() // like.element_size()
    return torch.full((count,), 1 if dtype is torch.bool else 90, dtype=like.dtype, device=like.device)


def same(a: Tensor, b: Tensor) -> bool:
    """Equal bits."""
    kind = INTEGER[a.dtype.itemsize]
    return a.dtype is b.dtype and a.shape == b.shape and bool(torch.equal(a.view(kind), b.view(kind)))


def same_or_nan(a: Tensor, b: Tensor) -> bool:
    """Equal bits, or NaN on both sides (payloads of a NaN that went through arithmetic are nobody's promise)."""
    kind = INTEGER[a.dtype.itemsize]
    return bool(((a.view(kind) == b.view(kind)) | ((a != a) & (b != b))).all())


def layouts(setting: Setting, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Rows as integers in the layouts that the kernels read through strides."""
    n = 3 if setting.dry else 61
    yield "contiguous", bits(setting, (n, 96), dtype)
    yield "one row", bits(setting, (480,), dtype)
    yield "columns of a wider tensor", bits(setting, (n, 160), dtype)[:, 32:128]
    yield "odd offset", bits(setting, (n, 101), dtype)[:, 5:]
    yield "permuted outer dims", bits(setting, (4, n, 96), dtype).transpose(0, 1)
    yield "three outer dims", bits(setting, (2, 5, 3, 2, 120), dtype).permute(2, 0, 3, 1, 4)[..., 0, :96]
    yield "every second element", bits(setting, (n, 192), dtype)[:, ::2]


def copy_both_ways(
    group: Group,
    label: str,
    rows: Tensor,
    dtype: torch.dtype,
    world: int,
    sizes: tuple[int, ...] | None = None,
    gap: int = 0,
) -> None:
    """pack and unpack of ``rows`` (integers; the kernel sees ``dtype``) against the reference, guards included."""
    row = rows.shape[-1]
    outer = rows.numel() // row if row else 0
    run = -(-row // world)
    cells = outer * row if sizes is not None else world * outer * run + (world - 1) * gap

    def wire_of(flat: Tensor) -> Tensor:
        inside = flat[GUARD : GUARD + cells]
        if sizes is not None:
            return inside
        return inside.as_strided((world, outer, run), (outer * run + gap, run, 1))

    got, want = (
        torch.full((cells + 2 * GUARD,), int(dtype is torch.bool) or 90, dtype=rows.dtype, device=rows.device)
        for _ in range(2)
    )
    moved = kernels.pack(rows.view(dtype), wire_of(got.view(dtype)), sizes=sizes)
    counted = reference.pack(rows, wire_of(want), sizes=sizes)
    group.expect(torch.equal(got, want), f"pack {label} {dtype}")
    group.expect(moved == counted, f"pack {label} {dtype}: {moved} bytes stated, {counted} by the reference")
    back, expected = poison(rows, dtype), poison(rows, dtype)
    place = (rows.shape, rows.stride(), rows.storage_offset())
    kernels.unpack(wire_of(got.view(dtype)), back.view(dtype).as_strided(*place), sizes=sizes)
    reference.unpack(wire_of(want), expected.as_strided(*place), sizes=sizes)
    group.expect(torch.equal(back, expected), f"unpack {label} {dtype}")
    group.expect(torch.equal(back.as_strided(*place), rows), f"unpack(pack) {label} {dtype}")


def check_dtypes_and_layouts(group: Group, setting: Setting) -> None:
    for dtype in setting.dtypes:
        for label, rows in layouts(setting, dtype):
            for world in (4,) if setting.dry else (2, 4, 7, 64):
                copy_both_ways(group, f"{label}, world {world}", rows, dtype, world)


def check_units(group: Group, setting: Setting) -> None:
    """Runs and offsets that leave 16, 8, 4, 2 and 1 bytes to an access."""
    for dtype in (torch.int8,) if setting.dry else (torch.int8, torch.bfloat16, torch.float32, torch.float64):
        for run in (16, 24, 20, 18, 17, 1) if setting.dry else (16, 64, 24, 20, 18, 17, 3, 2, 1, 513, 4096 + 8):
            for shift in (0, 1) if setting.dry else (0, 1, 2, 4, 8):
                rows = bits(setting, (5, 4 * run + shift), dtype)[:, shift:]
                copy_both_ways(group, f"run {run}, shift {shift}", rows, dtype, 4)


def check_ragged_and_gaps(group: Group, setting: Setting) -> None:
    """Rows that do not divide (zero padding), empty ranks, and space between the ranks of a wire."""
    for dtype in (torch.float32,) if setting.dry else (torch.bfloat16, torch.float32, torch.uint8):
        for world in (4,) if setting.dry else (2, 3, 4, 8, 64):
            for row in (9, 1, 130) if setting.dry else (1, 9, 63, 65, 130, 1000, 8193):
                copy_both_ways(group, f"row {row}, world {world}", bits(setting, (7, row), dtype), dtype, world)
                copy_both_ways(
                    group, f"row {row}, world {world}, gap", bits(setting, (7, row), dtype), dtype, world, gap=48
                )


def check_sizes(group: Group, setting: Setting) -> None:
    cuts = [(3, 0, 5, 8), (16, 32, 0, 48), (0, 0, 7), (96,), (64, 1, 31)]
    if not setting.dry:
        cuts += [(1000, 24, 4096, 0, 8), tuple(range(33)), (1,) * 64]
    for dtype in (torch.bfloat16,) if setting.dry else (torch.bfloat16, torch.float32, torch.uint8, torch.complex64):
        for sizes in cuts:
            rows = bits(setting, (3, 5, sum(sizes) + 8), dtype).transpose(0, 1)[..., 8:]
            copy_both_ways(group, f"sizes {sizes[:8]}", rows, dtype, len(sizes), sizes)


def check_far_rows(group: Group, setting: Setting) -> None:
    """Rows that begin beyond 2**31 elements, in memory that nobody touches in between."""
    buffer = torch.empty(3 * 2**30 + 2**20, dtype=torch.int8, device=setting.device)
    for step in (2**30, 2**30 + 48, 2**30 + 1):
        rows = buffer.as_strided((4, 8192), (step, 1))
        rows.copy_(bits(setting, tuple(rows.shape), torch.int8))
        wire, want = (torch.empty(4, rows.shape[0], 2048, dtype=torch.int8, device=setting.device) for _ in range(2))
        kernels.pack(rows, wire)
        reference.pack(rows, want)
        group.expect(torch.equal(wire, want), f"pack, rows {step} elements apart")
        kept = rows.clone()
        rows.zero_()
        kernels.unpack(wire, rows)
        group.expect(torch.equal(rows, kept), f"unpack, rows {step} elements apart")


def check_far_wires(group: Group, setting: Setting) -> None:
    """Tensors of more than 2**31 elements."""
    if setting.dry:
        group.skipped = "needs a GPU"
        return
    free = torch.cuda.mem_get_info()[0]
    if free < 16 * 2**30:
        group.skipped = f"needs 16 GiB of free memory, there are {free / 2**30:.0f}"
        return
    rows = torch.randint(-128, 127, (2**16 + 8, 2**15 + 64), dtype=torch.int8, device=setting.device)
    wire = torch.full((2, rows.shape[0], rows.shape[1] // 2), 90, dtype=torch.int8, device=setting.device)
    kernels.pack(rows, wire)
    for w in range(2):
        piece = rows[:, w * wire.shape[2] : (w + 1) * wire.shape[2]]
        group.expect(torch.equal(wire[w], piece), f"pack of {rows.numel()} elements, rank {w}")
    back = torch.full_like(rows, 90)
    kernels.unpack(wire, back)
    group.expect(torch.equal(back, rows), f"unpack of {rows.numel()} elements")


def numbers(setting: Setting, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Ordinary values, then every kind of special one: NaN, infinities, zeros, denormals, overflow and ties."""
    x = torch.randn(shape, dtype=torch.float64, device=setting.device, generator=setting.generator)
    tie = 1 + 2.0**-8  # halfway between two bf16 values
    special = [math.nan, math.inf, -math.inf, 0.0, -0.0, 1e-40, -1e-40, 65520.0, 3.4e38, 1e308, tie, 1 + 3 * 2.0**-8]
    special += [1 + 2.0**-11, 1 + 3 * 2.0**-11, 2.0**-25, 2.0**-24 * 1.5, 6e-8, -tie]
    x.view(-1)[: len(special)] = torch.tensor(special, dtype=torch.float64, device=setting.device)
    return x.to(dtype)


def check_arithmetic(group: Group, setting: Setting) -> None:
    """Casts, scales and accumulation: one rounding, the same bits as the reference."""
    shape, world = ((3, 40), 4) if setting.dry else ((37, 520), 8)
    kinds = (torch.bfloat16, torch.float32) if setting.dry else FLOATS
    for source in kinds:
        for target in kinds:
            for scale in (None, 0.3) if setting.dry else (None, 1.0, 0.3, -1 / 3, 1e-3):
                rows = numbers(setting, shape, source)
                label = f"{source} to {target}, scale {scale}"
                wires = [rows.new_empty((world, shape[0], shape[1] // world), dtype=target) for _ in range(2)]
                kernels.pack(rows, wires[0], scale)
                reference.pack(rows, wires[1], scale)
                group.expect(same_or_nan(*wires), f"pack {label}")
                for accumulate in (False, True):
                    before = numbers(setting, shape, source).flip(0)
                    out = [before.clone(), before.clone()]
                    kernels.unpack(wires[1], out[0], scale, accumulate=accumulate)
                    reference.unpack(wires[1], out[1], scale, accumulate=accumulate)
                    group.expect(same_or_nan(*out), f"unpack {label}, accumulate {accumulate}")


def check_reduce(group: Group, setting: Setting) -> None:
    """Every number of parts in one dtype, every dtype with a few; each combination is a kernel to compile."""
    worlds = (2, 17) if setting.dry else (1, 2, 3, 4, 5, 8, 9, 15, 16, 17, 23, 24, 25, 32, 33, 48, 63, 64)
    for world in worlds:
        sum_parts(group, setting, world, 40 if setting.dry else 4096 + 8, torch.bfloat16, torch.bfloat16, None)
    for world in (3,) if setting.dry else (3, 17):
        for length in (40, 7) if setting.dry else (1, 40, 100_003):
            for source in (torch.bfloat16, torch.float32) if setting.dry else FLOATS:
                for target, scale in ((source, None), (torch.float32, 0.3), (torch.bfloat16, 1 / world)):
                    sum_parts(group, setting, world, length, source, target, scale)
            for exact in (torch.int32,) if setting.dry else (torch.int8, torch.int32, torch.int64, torch.complex64):
                wire = bits(setting, (world, length), torch.int8).to(exact)
                out = [torch.empty(length, dtype=exact, device=setting.device) for _ in range(2)]
                kernels.reduce(wire, out[0])
                reference.reduce(wire, out[1])
                group.expect(same(*out), f"reduce {world} x {length}, {exact}")


def sum_parts(
    group: Group,
    setting: Setting,
    world: int,
    length: int,
    source: torch.dtype,
    target: torch.dtype,
    scale: float | None,
) -> None:
    """One sum over parts with space between them, against the reference."""
    wire = numbers(setting, (world, length + 24), source)[:, 8 : 8 + length]
    out = [torch.empty(length, dtype=target, device=setting.device) for _ in range(2)]
    kernels.reduce(wire, out[0], scale)
    reference.reduce(wire, out[1], scale)
    group.expect(same_or_nan(*out), f"reduce {world} x {length}, {source} to {target}, scale {scale}")


def check_cross_entropy(group: Group, setting: Setting) -> None:
    """Statistics and gradient of the rows of a cut vocabulary, against torch in fp64."""
    shapes = ((2, 5), (3, 130)) if setting.dry else ((1, 1), (7, 5), (64, 129), (33, 16384), (8, 38016), (4, 128_256))
    bound = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: 8e-3}
    for (rows, cols), dtype, smooth in itertools.product(shapes, bound, (False, True)):
        wide = torch.float64 if dtype is torch.float64 else torch.float32
        padded = torch.randn(rows, cols + 3, device=setting.device, generator=setting.generator) * 4
        x = padded.to(dtype)[:, :cols]
        place = torch.arange(rows, device=setting.device) * 7 % (cols + 1) - 1
        hard = torch.linspace(0.5, 1.5, rows, device=setting.device, dtype=wide) * (place >= 0)
        flat = torch.linspace(0, 1e-3, cols, device=setting.device, dtype=wide) if smooth else None
        total, upstream = hard + 1, 2 - hard
        found = torch.empty(2, rows, device=setting.device, dtype=wide)
        out = torch.empty(rows, cols, device=setting.device, dtype=dtype)
        kernels.cross_entropy.statistics(x, place, hard, flat, found)
        exact, factor = x.double(), 0 if flat is None else flat.double()
        lse, at = exact.logsumexp(1), place.clamp(min=0).unsqueeze(1)
        told = exact.gather(1, at).squeeze(1) * hard.double() + (exact * factor).sum(1)
        kernels.cross_entropy.gradient(x, place, hard, flat, total, lse.to(wide), upstream, out)
        one = torch.zeros_like(exact).scatter_(1, at, hard.double().unsqueeze(1))
        grad = (
            (exact - lse.unsqueeze(1)).exp() * total.double().unsqueeze(1) - factor - one
        ) * upstream.double().unsqueeze(1)
        what = f"cross entropy {rows} x {cols}, {dtype}, smooth {smooth}"
        sharp = bound[wide]
        group.expect(bool((found[0] - lse).abs().max() <= sharp * lse.abs().max().clamp(min=1)), f"{what}: lse")
        group.expect(bool((found[1] - told).abs().max() <= sharp * told.abs().max().clamp(min=1)), f"{what}: sums")
        group.expect(
            bool((out - grad).abs().max() <= bound[dtype] * grad.abs().max().clamp(min=1)), f"{what}: gradient"
        )


# Of most worth first: what never ran on a GPU, and what everything else rests on.
CHECKS: dict[str, Callable[[Group, Setting], None]] = {
    "initialize() and destroy()": gpu_groups.check_initialize,
    "mappings: one rank, NCCL": gpu_groups.check_one_rank,
    "copies: dtypes and layouts": check_dtypes_and_layouts,
    "copies: split sizes": check_sizes,
    "mappings: two processes, Gloo": gpu_groups.check_two_processes,
    "capture and replay": gpu_launches.check_capture,
    "streams": gpu_launches.check_streams,
    "p2p: two processes, Gloo": gpu_groups.check_p2p,
    "torch.compile: two processes, Gloo": gpu_groups.check_compile,
    "two processes, NCCL": gpu_groups.check_two_processes_nccl,
    "torch.compile: CUDA graphs": gpu_groups.check_cuda_graphs,
    "launch hooks": gpu_launches.check_hooks,
    "narrow units beyond 2**31": gpu_launches.check_narrow_units,
    "reduce": check_reduce,
    "casts, scales, accumulation": check_arithmetic,
    "cross entropy": check_cross_entropy,
    "async handles on a side stream": gpu_groups.check_async,
    "copies: access widths": check_units,
    "copies: ragged rows, gaps": check_ragged_and_gaps,
    "copies: rows beyond 2**31": check_far_rows,
    "copies: more than 2**31 elements": check_far_wires,
}


def child(options: argparse.Namespace) -> None:
    """Run what nobody has begun."""
    warnings.simplefilter("ignore")
    setting = make_setting(options.dry)
    checks = {name: partial(CHECKS[name], setting=setting) for name in selected(options.only)}
    run_checks(checks, Path(options.progress), options.deadline)


def selected(only: str) -> list[str]:
    return [name for name in CHECKS if only in name]


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness on one GPU.")
    parser.add_argument("--dry", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--only", default="", help="only groups whose name contains this")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds after which nothing new starts")
    parser.add_argument("--progress", help=argparse.SUPPRESS)
    parser.add_argument("--deadline", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print("gpu_test: no CUDA device here; nothing was tested")
        return 2
    if options.dry and os.environ.get("TRITON_INTERPRET") != "1":
        print("gpu_test: --dry needs TRITON_INTERPRET=1")
        return 2
    if options.progress:
        child(options)
        return 0
    return supervised(options)


def supervised(options: argparse.Namespace) -> int:
    started = time.monotonic()
    name = "cpu, interpreter" if options.dry else torch.cuda.get_device_properties(0).name
    print(f"device: {name}, torch {torch.__version__}", flush=True)
    content = {"device": name, "versions": versions()}
    out = os.environ.get("OUT")

    def found(groups: list[Group]) -> None:
        if out:
            write_json(f"{out}/gpu_test.json", {**content, "groups": [group.result() for group in groups]})

    with tempfile.TemporaryDirectory() as folder:
        progress, deadline = Path(folder) / "progress", started + options.budget
        command = [sys.executable, os.path.abspath(__file__), "--progress", str(progress), "--deadline", str(deadline)]
        command += ["--only", options.only, *(["--dry"] if options.dry else [])]
        groups = supervise(command, selected(options.only), progress, deadline, EACH_S, found)
    return 1 if summary(groups, started) else 0


if __name__ == "__main__":
    sys.exit(main())
