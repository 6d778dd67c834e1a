"""bench/results/machine_code.md: what the compiled kernels do per useful 16 bytes, by layout; no GPU takes part.

``python -m bench.audit`` prints the page, ``--write`` writes it. Every case is a real call: planned as for a GPU,
cross-compiled with the compiler and assembler that Triton ships, disassembled and counted.
"""

import argparse
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import triton
from tritoncomm_kernels.launch import TRITON_TYPE

from tritoncomm.core.split import split_of
from tritoncomm.tune.machine_code import TARGETS, Build, Code, build_all, compiled_kernels
from tritoncomm.tune.static import resident

__all__ = ["CASES", "PAGE", "Case", "Figures", "measure", "page"]

PAGE = Path(__file__).resolve().parent / "results" / "machine_code.md"
Ints = tuple[int, ...]
_ONE, _TWO, _THREE = "1 outer dim", "2 outer dims", "3 outer dims"
_SIZE = 2**26

HEAD = """# Machine code

Written by `python -m bench.audit --write`; a test compiles a sample of the rows again, `make test-all` all of them.
Made with Triton {triton} for {target}, without a GPU: these are properties of the code, not times.

- *access*: bytes of a store, as wide as the alignment of both sides allows; the end of a row counts too.
- *lanes*: the part of the lanes of all programs that carries data; the rest is masked off.
- *in flight*: useful bytes of the loads that one multiprocessor has under way, by the threads that fit with their
  registers and the loads they issue before their first store. A copy needs bandwidth times latency: about 9 KB on an
  H100 and 13 KB on an H200, 40 to 64 KB by a stricter measure.
- *instructions*: of all threads of the launch, those that a program may skip included, for every 16 bytes that are
  useful on the side that has more of them. At the speed of a plain copy a warp has about 357 issue slots for as much
  on an H100, 249 on an H200.

Every case moves about 64 MiB with tiles by the built-in rule.
"""


BESIDE = """## Segments, and the kernels of others

Instructions of one thread for every 16 bytes that it reads. Kernels of others were compiled once for sm_90 from their
sources of 2026, without a GPU, and are not compiled by this command. *Reduce, bf16* above is what to compare torch's
`reduce_partials` with.
"""

OTHERS_KERNELS = (
    "| FlashInfer, pack of q, k and v for NCCL | 4 | 225 | - |",
    "| FlashInfer, the pack of the output | 4 | 256 | - |",
    "| torch 2.14, `reduce_partials`, 8 parts of bf16 | 16 | 27 | - |",
)

BY_INDICES = """## Rows by indices

4,096 tokens of 7,168 values of bf16 with 8 experts each: instructions of one thread for every 16 bytes of rows that it
reads, loops once.

| kernel | loads | stores | instructions | registers | programs |
|---|---:|---:|---:|---:|---:|
"""

OTHERS = """## Every target

Instructions for every 16 useful bytes / registers, of the same calls on every target that the tests compile for
(CI for sm_80, sm_90, sm_100 and gfx942, `make test-all` for all). Warps of gfx have 64 lanes, so that their
tiles are twice as large. Of these targets only sm_90 has run the kernels ([hardware](compatibility.md#hardware)).
"""


@dataclass(frozen=True)
class Case:
    """One call.

    Attributes:
        group: the table it belongs to.
        name: what it is.
        op: ``pack``, ``unpack`` or ``reduce``.
        shape, stride: of the rows ``[*outer, row]``; of the wire for ``reduce``.
        dtypes: of rows and wire; of wire and sum.
        world: ranks.
        sizes: elements of a row per rank.
        alignment: bytes that the addresses are off a multiple of 16.
        accumulate: whether ``unpack`` adds.
        evict_first: whether what is read leaves the caches first.
    """

    group: str
    name: str
    op: str
    shape: Ints
    stride: Ints
    dtypes: tuple[torch.dtype, torch.dtype]
    world: int = 8
    sizes: Ints | None = None
    alignment: int = 0
    accumulate: bool = False
    evict_first: bool = False

    @property
    def label(self) -> str:
        return f"{self.group}: {self.name}"

    @property
    def useful(self) -> int:
        """Bytes that are read or written, whichever are more."""
        cells = math.prod(self.shape)
        if self.op == "reduce":
            return max(cells * self.dtypes[0].itemsize, self.shape[1] * self.dtypes[1].itemsize)
        return cells * max(dtype.itemsize for dtype in self.dtypes)

    @property
    def access(self) -> int:
        """Bytes to which every row and every rank's part of it is aligned on both sides, with the end of a row."""
        strides = [step for size, step in zip(self.shape[:-1], self.stride[:-1], strict=True) if size > 1]
        small = min(dtype.itemsize for dtype in self.dtypes)
        if self.op == "reduce":
            return math.gcd(16, self.alignment, *(step * small for step in strides))
        if self.stride[-1] != 1:
            return math.gcd(16, small)
        row, outer = self.shape[-1], math.prod(self.shape[:-1])
        run = -(-row // self.world)
        starts = [sum(self.sizes[:w]) for w in range(self.world + 1)] if self.sizes else [run, outer * run, row]
        return math.gcd(16, self.alignment, *(n * small for n in (*strides, *starts)))


@dataclass(frozen=True)
class Figures:
    """Figures of one case on one target, as the head of the page lists them."""

    code: Code
    programs: int
    lanes: float
    in_flight: float
    instructions: float


def _permuted(sizes: Ints, row: int) -> tuple[Ints, Ints]:
    """Rows with as many outer dims as sizes, in the opposite order in memory, so that none can be joined."""
    strides, step = [], row
    for size in sizes:
        strides.append(step)
        step *= size
    return (*sizes, row), (*strides, 1)


def _even(op: str, unit: int, dims: int, more: int | None = None) -> Case:
    """Rows of 8 ranks whose runs are 4 KiB long, and by ``more`` bytes longer: for narrow units by one unit."""
    dtype = torch.int8 if unit == 1 else torch.bfloat16
    row = 8 * (4096 + (unit % 16 if more is None else more)) // dtype.itemsize
    outer = _SIZE // (row * dtype.itemsize)
    sizes = {1: (outer,), 2: (16, outer // 16), 3: (8, 16, outer // 128)}[dims]
    group = f"{op}, {(_ONE, _TWO, _THREE)[dims - 1]}"
    name = f"{unit}-byte units" + (f", runs of {4096 + more} bytes" if more else "")
    return Case(group, name, op, *_permuted(sizes, row), (dtype, dtype))


def _rows(group: str, name: str, row: int, pitch: int, dtype: torch.dtype, world: int, **more: Any) -> Case:
    """Rows of ``row`` elements, ``pitch`` apart."""
    outer = _SIZE // (row * dtype.itemsize)
    return Case(group, name, more.pop("op", "pack"), (outer, row), (pitch, 1), (dtype, dtype), world, **more)


def _short(nbytes: int, world: int) -> Case:
    row = nbytes // 2
    return _rows("pack, short rows", f"{nbytes} bytes of bf16 over {world} ranks", row, row, torch.bfloat16, world)


def _split(name: str, sizes: Ints, op: str = "pack") -> Case:
    """Split sizes in bytes, of bf16."""
    parts = tuple(size // 2 for size in sizes)
    row = sum(parts)
    return _rows(f"{op}, split sizes", name, row, row, torch.bfloat16, len(parts), sizes=parts, op=op)


def _cast(name: str, op: str, rows: torch.dtype, wire: torch.dtype, **more: Any) -> Case:
    row = 4096
    return Case("casts and sums on the way", name, op, (_SIZE // (row * 4), row), (row, 1), (rows, wire), **more)


def _sum(name: str, parts: int, length: int, step: int) -> Case:
    return Case("reduce, bf16", name, "reduce", (parts, length), (step, 1), (torch.bfloat16, torch.bfloat16))


def _cases() -> Iterator[Case]:
    for op in ("pack", "unpack"):
        for dims in (1, 2, 3):
            for unit in (16, 8, 4, 2, 1):
                yield _even(op, unit, dims)
    yield _even("pack", 16, 1, 16)  # in the order of the wire, as those of 2 to 8 bytes are
    for nbytes, world in ((8, 4), (12, 2), (16, 8), (16, 2), (18, 3), (24, 3), (30, 5), (32, 2), (48, 3)):
        yield _short(nbytes, world)
    strided = "pack, other layouts"
    yield _rows(strided, "columns of a wider tensor", 2048, 6144, torch.bfloat16, 8)
    yield _rows(strided, "the same, 8 bytes further", 2048, 6144, torch.bfloat16, 8, alignment=8)
    yield _rows(strided, "rows 4098 elements apart", 4096, 4098, torch.bfloat16, 8)
    yield _rows(strided, "a row that does not divide", 4104, 4104, torch.bfloat16, 5)
    yield _rows(strided, "a row that ends in the middle of 16 bytes", 4092, 4096, torch.bfloat16, 8)
    for dtype in (torch.bfloat16, torch.int8):
        outer = _SIZE // (4096 * dtype.itemsize)
        name = f"every second element, {str(dtype).removeprefix('torch.')}"
        yield Case(strided, name, "pack", (outer, 4096), (8192, 2), (dtype, dtype))
    for op in ("pack", "unpack"):
        yield _split("8 of 256 B", (256,) * 8, op)
        yield _split("8 of 64 to 512 B", tuple(64 * (w + 1) for w in range(8)), op)
        yield _split("half of all in one of 8", (7 * 1024, *(1024,) * 7), op)
        yield _split("64 of 64 B", (64,) * 64, op)
        yield _split("128 of 16 B", (16,) * 128, op)
        yield _split("32 of 96 to 160 B", tuple(96 + 32 * (w % 3) for w in range(32)), op)
        yield _split("64, all but 16 B each in one", (7 * 1024, *(16,) * 63), op)
        yield _split("8 of odd sizes", tuple(2 * (101 + 50 * w) for w in range(8)), op)
    for op in ("pack", "unpack"):
        for unit in (16, 8):
            yield replace(
                _even(op, unit, 1), group="evict_first, 1 outer dim", name=f"{op}, {unit}-byte units", evict_first=True
            )
    yield _cast("pack fp32 to bf16", "pack", torch.float32, torch.bfloat16)
    yield _cast("pack bf16 to fp32", "pack", torch.bfloat16, torch.float32)
    yield _cast("pack fp64 to bf16", "pack", torch.float64, torch.bfloat16)
    yield _cast("unpack and accumulate fp32", "unpack", torch.float32, torch.float32, accumulate=True)
    for parts in (2, 8, 16):
        length = _SIZE // (2 * parts)
        yield _sum(f"{parts} parts", parts, length, length)
    yield _sum("8 parts of odd length, aligned", 8, _SIZE // 16 - 1, _SIZE // 16)
    yield _sum("8 parts of odd length, one after the other", 8, _SIZE // 16 - 1, _SIZE // 16 - 1)


CASES = tuple(_cases())
_EVERYWHERE = (
    "pack, 1 outer dim: 16-byte units", "pack, 1 outer dim: 8-byte units", "pack, 1 outer dim: 4-byte units",
    "pack, 1 outer dim: 2-byte units", "pack, 1 outer dim: 1-byte units", "unpack, 1 outer dim: 16-byte units",
    "casts and sums on the way: pack fp32 to bf16", "reduce, bf16: 8 parts",
)  # fmt: skip


def measure(cases: Sequence[Case], target: str = "sm_90") -> list[Figures]:
    """Figures of cases on a target, in their order."""
    with _planning_for(target):
        launches = [_launch(case) for case in cases]
    codes = build_all([_build(launch) for launch in launches], target)
    return [_figures(case, launch, code, target) for case, launch, code in zip(cases, launches, codes, strict=True)]


@contextmanager
def _planning_for(target: str) -> Iterator[None]:
    """Plans inside are those of the target's warps, and nothing of them is cached."""
    modules = compiled_kernels()
    plans = [modules[name]._plan for name in ("copy", "reduction", "row_copy", "row_sums")]
    for plan in plans:
        plan.cache_clear()
    with (
        mock.patch.object(modules["launch"], "lanes_of", return_value=TARGETS[target].warp_size),
        mock.patch.object(modules["row_sums"], "lanes_of", return_value=TARGETS[target].warp_size),
    ):
        yield
    for plan in plans:
        plan.cache_clear()


def _launch(case: Case) -> Any:
    """The launch that a call on a GPU prepares."""
    modules = compiled_kernels()
    if case.op == "reduce":
        ends = (case.shape, case.stride, case.shape[1:], (1,))
        return modules["reduction"]._plan(-1, *case.dtypes, case.alignment, *ends, False, None)[0]
    layout = split_of(case.shape, case.stride, -1, 1).rows
    assert layout is not None
    row, outer = case.shape[-1], math.prod(case.shape[:-1])
    run = -(-row // case.world)
    wire = ((outer * row,), (1,)) if case.sizes else ((case.world, outer, run), (outer * run, run, 1))
    options = (case.sizes, False, case.accumulate, None)
    launch = modules["copy"]._plan(case.op, -1, *case.dtypes, case.alignment, *layout, *wire, *options)[0]
    return replace(launch, constants=launch.constants | {"EVICT_FIRST": case.evict_first}) if launch else launch


def _build(launch: Any) -> Build:
    pointers = [name for name in launch.kernel.arg_names if name.endswith("_ptr")]
    types = dict.fromkeys(pointers, "*i32") | {"scale": "fp32"}
    for name, kind in zip(pointers, launch.types, strict=False):
        types[name] = "*" + str(TRITON_TYPE[kind]).replace("int", "i")
    return Build(launch.kernel, types, launch.constants, launch.num_warps)


def _figures(case: Case, launch: Any, code: Code, target: str) -> Figures:
    constants = launch.constants
    tile = constants["BLOCK"] if case.op == "reduce" else constants["BLOCK_ROWS"] * constants["BLOCK_COLS"]
    cells = case.shape[1] if case.op == "reduce" else math.prod(case.shape)
    lanes = cells * case.dtypes[0].itemsize / launch.types[0].itemsize / (launch.grid * tile)
    of_table = constants.get("STEPS", -3) + 3  # loads that find the rank of a tile
    issued = sum(code.loads[of_table : code.loads_first])
    threads = launch.grid * launch.num_warps * TARGETS[target].warp_size
    return Figures(
        code=code,
        programs=launch.grid,
        lanes=lanes,
        in_flight=resident(code.registers, launch.num_warps, target) * issued * lanes,
        instructions=code.instructions * threads * 16 / case.useful,
    )


def page(target: str = "sm_90") -> str:
    """The whole page."""
    figures = dict(zip(CASES, measure(CASES, target), strict=True))
    lines = [HEAD.format(triton=triton.__version__, target=target)]
    for group in dict.fromkeys(case.group for case in CASES):
        lines += [f"## {group[0].upper()}{group[1:]}", "", *_HEADS]
        lines += [row(case, one) for case, one in figures.items() if case.group == group]
        lines.append("")
    return "\n".join([*lines, *_segment_lines(target), *_rows_lines(target), *_other_targets()])


SEGMENTS = (
    ("q, k and v of 8 ranks, gaps on both sides", "gather_segments", torch.bfloat16, torch.bfloat16, False, 1),
    ("fp32 into a bf16 wire of 8 ranks", "gather_segments", torch.float32, torch.bfloat16, False, 2),
    ("8 parts of a bf16 wire, added to fp32", "scatter_segments", torch.float32, torch.bfloat16, True, 4),
)
"""Tables of segments: name, kernel, dtypes of tensors and of the wire, whether the tensor is added to, and bytes that
are read for one that is stored."""


def measure_segments(target: str = "sm_90") -> list[Code]:
    """The machine code of ``SEGMENTS``."""
    modules, builds = compiled_kernels(), []
    for _, kernel, dtype, wired, adds, _ in SEGMENTS:
        itemsize, length = wired.itemsize, 2**18
        if adds:
            rows = [(0, 0, 1, length, length, part * length * itemsize) for part in range(8)]
        elif dtype is wired:  # heads of a rank are ``length / 64`` rows of 64 numbers, in q, k and v of 3 x 8 x 64
            rows = [(0, 512 * i + 64 * r, 4096, 64, 1536, (3 * r + i) * 2**20, 128) for r in range(8) for i in range(3)]
        else:
            rows = [(0, length * r, 1, length, length, length * r * itemsize) for r in range(8)]
        wire, x = torch.empty(2**25, dtype=torch.uint8), torch.empty(2**23, dtype=dtype)
        layouts = modules["segments"].layouts_of(wire, [x])
        table = modules["segments"].Segments(rows, [wired])
        builds.append(
            first_launch(modules["segment_copy"]._plan(kernel, table, layouts, None, 0, False, adds, adds), target)
        )
    return build_all(builds, target)


ROWS = {
    "gather rows": ("row_copy", "gather_rows", None),
    "sum of 8 rows": ("row_sums", "sum_rows", (False, False)),
    "sum of 8 rows of two tensors": ("row_sums", "sum_rows", (False, True)),
    "sum of 8 rows times weights": ("row_sums", "sum_rows", (True, False)),
    "rows times weights": ("row_sums", "scale_rows", (True, False)),
    "dot products of rows": ("row_sums", "dot_rows", (False, False)),
    "both of these": ("row_sums", "scale_dot_rows", (True, True)),
}
"""Kernels over rows by indices: module, function, and whether they have weights and a second tensor of rows."""


def measure_rows(target: str = "sm_90") -> dict[str, tuple[Code, int]]:
    """The machine code of ``ROWS``, and programs of a launch."""
    builds, grids, modules = [], [], compiled_kernels()
    tokens, slots, row = 4096, 8, 7168
    types = (torch.bfloat16, torch.bfloat16, torch.float32, torch.int64)
    with _planning_for(target):
        for module, kernel, has in ROWS.values():
            count = tokens if kernel == "sum_rows" else tokens * slots
            if module == "row_copy":
                plan = modules[module]._plan(kernel, -1, 16, 2 * row, count, torch.int64)
            else:
                plan = modules[module]._plan(kernel, -1, types, (slots, row, 8), count, has)
            grids.append(plan.grid(kernel, count, row))
            build, params = _build(plan.launch), plan.launch.kernel.params
            wide = {param.name: "i64" for param in params if param.annotation_type == "i64"}
            builds.append(replace(build, types=build.types | wide))
    return dict(zip(ROWS, zip(build_all(builds, target), grids, strict=True), strict=True))


def first_launch(plan: Any, target: str) -> Build:
    """The first launch of a table of segments."""
    launch = plan[0][0][0]
    scale = TARGETS[target].warp_size // 32
    kinds = zip(launch.constants["BLOCK"], launch.constants["WIDE"], strict=True)
    # Warps of 64 threads copy twice as many units at a time; casts and sums have as many threads on any device.
    constants = launch.constants | {"BLOCK": tuple(units * (1 if wide else scale) for units, wide in kinds)}
    integers = {one: "i64" for one in launch.kernel.arg_names if one.startswith("tensor_")}
    pointers = {one: "*i64" for one in launch.kernel.arg_names if one.endswith("_ptr")}
    return Build(launch.kernel, integers | pointers | {"scale": "fp32"}, constants, launch.num_warps // scale)


def _segment_lines(target: str) -> Iterator[str]:
    """Yield the lines of the table of segments, and of the kernels of others beside them."""
    yield from (BESIDE, "| kernel | access | instructions | registers |", "|---|---:|---:|---:|")
    for (name, *_, read), code in zip(SEGMENTS, measure_segments(target), strict=True):
        per_unit = code.instructions * 16 / (read * sum(code.stores))
        yield f"| ours: {name} | {', '.join(map(str, sorted({*code.stores})))} | {per_unit:.0f} | {code.registers} |"
    yield from OTHERS_KERNELS
    yield ""


def _rows_lines(target: str) -> Iterator[str]:
    """Yield the lines of the table of rows by indices."""
    yield BY_INDICES.rstrip("\n")
    for name, (code, programs) in measure_rows(target).items():
        widths = (", ".join(map(str, sorted({*side}))) for side in (code.loads, code.stores))
        per_unit = code.instructions / code.loads.count(16)
        yield f"| {name} | {' | '.join(widths)} | {per_unit:.0f} | {code.registers} | {programs} |"
    yield ""


def _other_targets() -> list[str]:
    """A table of the calls of ``_EVERYWHERE`` on every target."""
    cases = [case for case in CASES if case.label in _EVERYWHERE]
    assert len(cases) == len(_EVERYWHERE)
    lines = [OTHERS, f"| target | {' | '.join(case.label for case in cases)} |", "|---" + "|---:" * len(cases) + "|"]
    for target in TARGETS:
        figures = measure(cases, target)
        cells = [f"{one.instructions:.0f} / {one.code.registers}" for one in figures]
        lines.append(f"| {' | '.join((target, *cells))} |")
    return [*lines, ""]


_HEADS = (
    "| case | access | lanes | in flight, KiB | instructions | registers | programs |",
    "|---|---:|---:|---:|---:|---:|---:|",
)


def row(case: Case, figures: Figures) -> str:
    """One line of a table."""
    code = figures.code
    access = ", ".join(str(width) for width in sorted({*code.stores}))
    told = (access, f"{figures.lanes:.0%}", f"{figures.in_flight / 1024:.0f}", f"{figures.instructions:.0f}")
    return f"| {' | '.join((case.name, *told, str(code.registers), str(figures.programs)))} |"


def main() -> int:
    parser = argparse.ArgumentParser(description="The page about the machine code of the kernels.")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    parser.add_argument("--target", choices=list(TARGETS), default="sm_90", metavar="TARGET", help=", ".join(TARGETS))
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page())
        print("written:", PAGE)
    else:
        print(page(options.target), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
