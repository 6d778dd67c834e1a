"""Every kernel, cross-compiled: 16-byte access wherever the bytes allow it, loads in flight, registers, no spills."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from tiles import EVERY_TARGET
from tiles import audit as audit_tiles
from triton.runtime.interpreter import InterpretedFunction
from tritoncomm_kernels import Config, config_for

from bench import audit
from tritoncomm.tune import machine_code
from tritoncomm.tune.machine_code import TARGETS, Build, Code, build_all, compiled_kernels

ROOT = Path(__file__).parents[2]
ELEMENT = {16: ("i64", 2), 8: ("i64", 1), 4: ("i32", 1), 2: ("i16", 1), 1: ("i8", 1)}
on_targets = pytest.mark.parametrize("target", EVERY_TARGET)
TORCH = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
# Triton 3.8 takes a sixth more instructions for a narrow tail on NVIDIA, and on AMD loads of a loop two passes ahead.
IS_NEW = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)
SIZE = {"i64": 8, "i32": 4, "i16": 2, "i8": 1, "fp32": 4, "bf16": 2, "fp64": 8}


def test_no_kernel_calls_what_is_written_in_tritons_language() -> None:
    """Once the interpreter has run ``tl.sum`` or its like, no kernel compiles in that process any more."""
    names = {name for name, value in vars(tl).items() if isinstance(value, triton.JITFunction | InterpretedFunction)}
    assert {"sum", "max", "zeros", "cdiv"} <= names
    paths = [path for folder in ("kernels", "bench") for path in (ROOT / folder).rglob("*.py")]
    found = {f"{path.name}: tl.{name}" for path in paths for name in re.findall(r"\btl\.(\w+)\(", path.read_text())}
    assert {one for one in found if one.partition("tl.")[2] in names} == set()


def tile(name: str, unit: int, element: int, target: str) -> tuple[int, int]:
    """Rows and columns of the tile a GPU would get, in elements; AMD's waves are twice as wide."""
    size = config_for(name, unit, 4096, 8192).block_rows * config_for(name, unit, 4096, 8192).block_cols
    config = config_for(name, unit, 4096, 8192, tile_bytes=size * TARGETS[target].warp_size // 32)
    return config.block_rows, config.block_cols // element


def copy(name: str, target: str, unit: int, form: str = "", **constants: Any) -> Code:
    """pack or unpack in one unit; ``form`` is empty, ``split`` or ``table``, for given sizes of 16 ranks or more."""
    element, vec = ELEMENT[unit]
    return _address(name, target, (element, element), vec, unit, form, **constants)


def _address(name: str, target: str, *kind: Any, **constants: Any) -> Code:
    return build_all([_build(name, target, *kind, **constants)], target)[0]


def _build(
    name: str, target: str, types: tuple[str, str], vec: int, unit: int, form: str = "", **constants: Any
) -> Build:
    kernel = getattr(compiled_kernels()["address"], f"_copy_{form}_kernel".replace("__", "_"))
    rows, cols = tile(name, unit, max(SIZE[kind] for kind in types), target)
    rows = rows // 2 if unit <= 2 and (form or constants.get("STRIDED")) else rows
    ranks = {"": {}, "split": {"RANKS": 16}, "table": {"STEPS": 1, "RANKS": 128}}[form]
    fixed = ranks | {
        "VEC": vec, "OUTER_DIMS": 1, "STRIDED": False, "UNPACK": name == "unpack", "WIDE": None, "HAS_SCALE": False,
        "ACCUMULATE": False, "EVICT_FIRST": False, "BLOCK_ROWS": rows, "BLOCK_COLS": cols,
    }  # fmt: skip
    pointers = {"rows_ptr": f"*{types[0]}", "wire_ptr": f"*{types[1]}", "table_ptr": "*i32"}
    arguments = pointers | {"scale": "i64" if constants.get("WIDE") is tl.float64 else "fp32"}
    return Build(kernel, {n: kind for n, kind in arguments.items() if n in kernel.arg_names}, fixed | constants)


def check(code: Code, unit: int) -> None:
    assert code.coalesced
    assert code.spills == 0
    assert code.registers <= (64 if unit >= 4 else 128)


@on_targets
@pytest.mark.parametrize("name", ["pack", "unpack"])
def test_copies_use_the_full_unit(name: str, target: str) -> None:
    """16 is the aligned case and 8 x odd elements of 2 bytes; 8, 4, 2, 1 what less aligned bytes leave."""
    builds = [_build(name, target, (element, element), vec, unit) for unit, (element, vec) in ELEMENT.items()]
    for unit, code in zip(ELEMENT, build_all(builds, target), strict=True):
        check(code, unit)
        assert set(code.loads) == set(code.stores) == {unit}
        assert code.loads_first == len(code.loads) >= 4, unit


@on_targets
@pytest.mark.parametrize("name", ["pack", "unpack"])
@pytest.mark.parametrize("kind", ["two-outer-dims", "three-outer-dims", "split", "table"])
def test_other_layouts_keep_16_bytes(name: str, target: str, kind: str) -> None:
    dims = {"two-outer-dims": 2, "three-outer-dims": 3}.get(kind, 1)
    code = copy(name, target, 16, kind if kind in ("split", "table") else "", OUTER_DIMS=dims)
    check(code, 16)
    assert set(code.stores) == {16}
    assert code.loads.count(16) == len(code.stores)
    assert code.loads_first == len(code.loads)


@on_targets
def test_element_strides_do_not_spill(target: str) -> None:
    code = copy("pack", target, 2, STRIDED=True)
    check(code, 2)


@on_targets
@pytest.mark.parametrize(
    ("types", "vec", "scaled", "loads", "stores"),
    [
        (("fp32", "bf16"), 8, False, 16, 16),
        (("bf16", "fp32"), 8, False, 16, 16),
        (("bf16", "bf16"), 8, True, 16, 16),
        (("fp32", "fp32"), 4, True, 16, 16),
        (("fp64", "fp64"), 2, True, 16, 16),
    ],
    ids=["fp32-to-bf16", "bf16-to-fp32", "bf16-scaled", "fp32-scaled", "fp64-scaled"],
)
def test_casts_and_scales(target: str, types: tuple[str, str], vec: int, scaled: bool, loads: int, stores: int) -> None:
    wide = tl.float64 if "fp64" in types else tl.float32
    code = _address("pack", target, types, vec, vec * min(SIZE[kind] for kind in types), WIDE=wide, HAS_SCALE=scaled)
    check(code, 16)
    assert set(code.loads) == {loads}
    assert set(code.stores) == {stores}


@on_targets
def test_accumulate(target: str) -> None:
    code = _address("unpack", target, ("fp32", "fp32"), 4, 16, WIDE=tl.float32, ACCUMULATE=True)
    check(code, 16)
    assert set(code.loads) == set(code.stores) == {16}
    assert len(code.loads) == 2 * len(code.stores)


@on_targets
@pytest.mark.parametrize("parts", [2, 8, 64])
def test_reduce(target: str, parts: int) -> None:
    module = compiled_kernels()["reduction"]
    cols = config_for("reduce", 2, 1, 2**20, lanes=TARGETS[target].warp_size).block_cols
    unrolled = parts <= 16
    constants = {
        "VEC": 8, "PARTS": parts if unrolled else 8, "CHUNK": 0 if unrolled else 8, "WIDE": tl.float32,
        "HAS_SCALE": False, "TAIL": False, "BLOCK": cols // torch.bfloat16.itemsize,
    }  # fmt: skip
    pointers = {"wire_ptr": "*bf16", "out_ptr": "*bf16", "scale": "fp32"}
    (code,) = build_all([Build(module._reduce_kernel, pointers, constants)], target)
    assert code.coalesced
    assert code.spills == 0
    assert code.registers <= 128
    assert set(code.loads) == set(code.stores) == {16}


def assert_good(cases: list[audit.Case], target: str) -> list[audit.Figures]:
    """No spills, registers in budget, and accesses as wide as the alignment of both sides allows."""
    figures = audit.measure(cases, target)
    for case, one in zip(cases, figures, strict=True):
        assert one.code.coalesced, case.label
        # ptxas spills a few bytes of 15 and 16 parts on sm_90, for more programs at a time.
        assert one.code.spills <= (10 if case.op == "reduce" and target == "sm_90" else 0), case.label
        assert one.code.registers <= (64 if case.access >= 4 and case.op != "reduce" else 128), case.label
        assert max(one.code.loads) == max(one.code.stores) == case.access, case.label
        if case.op != "reduce":  # whose tail is narrow
            assert set(one.code.stores) == {case.access}, case.label
        if case.op != "reduce" and case.dtypes[0] is case.dtypes[1]:
            assert one.code.loads.count(case.access) >= len(one.code.stores), case.label
        assert 0 < one.lanes <= 1, case.label
    return figures


def test_the_page_is_up_to_date() -> None:
    """A sample of its rows; another Triton makes other machine code."""
    text = audit.PAGE.read_text()
    assert [text.count(f"| {case.name} |") for case in audit.CASES].count(0) == 0
    sample = audit.CASES[::13]
    rows = [audit.row(case, one) for case, one in zip(sample, assert_good(list(sample), "sm_90"), strict=True)]
    if f"Triton {triton.__version__} for sm_90" in text:
        assert [row for row in rows if row not in text] == []
        assert "\n".join(audit._rows_lines("sm_90")) in text


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
def test_every_case_of_the_audit(target: str) -> None:
    assert_good(list(audit.CASES), target)
    if target == "sm_90" and f"Triton {triton.__version__} for sm_90" in audit.PAGE.read_text():
        assert audit.page() == audit.PAGE.read_text()


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_a_tile_of_one_element(target: str) -> None:
    """A single row that is one access long."""
    tiles = [(op, unit, Config(1, unit)) for op in ("pack", "unpack") for unit in (8, 2)]
    assert audit_tiles(tiles, target) == []


def test_lanes_that_walk_down_the_rows_are_seen() -> None:
    """As Triton 3.6 had them; what is no layout of blocks, and no tile, is not coalesced either."""
    layout = "#a = #ttg.blocked<{sizePerThread = [1, 4], threadsPerWarp = [1, 32], warpsPerCTA = [4, 1]}>"
    load = "  %x = tt.load %p, %m : tensor<8x256x!tt.ptr<i32>, #a>"
    assert machine_code._coalesced(f"{layout}\n{load}\n")
    assert machine_code._coalesced(f"{layout.replace('[1, 32]', '[2, 16]')}\n{load.replace('256', '64')}\n")
    for wrong in (layout.replace("[1, 32]", "[8, 4]"), layout.replace("blocked", "linear")):
        assert not machine_code._coalesced(f"{wrong}\n{load}\n")
    assert not machine_code._coalesced(f"{layout}\n")


def cross_entropy_builds(dtype: str, smoothed: bool, target: str) -> list[Build]:
    """The statistics and the gradient kernel of one element type, for long rows."""
    module, wide = compiled_kernels()["cross_entropy"], "fp64" if dtype == "fp64" else "fp32"
    kind, arithmetic = TORCH[dtype], TORCH[wide]
    rows, cols = module.statistics_tile(kind, 2**17, TARGETS[target].warp_size)
    shared = {
        "SMOOTHED": smoothed, "WIDE": tl.float64 if wide == "fp64" else tl.float32,
        "HAS_EX2": TARGETS[target].backend == "cuda",
    }  # fmt: skip
    own = ({"LOWEST": module._LOWEST[arithmetic], "ROWS": rows, "COLS": cols}, {"BLOCK": 8192 // SIZE[dtype]})
    warps = (module._STATISTICS_WARPS, module._WARPS)
    pointers = {f"{name}_ptr": f"*{wide}" for name in ("target_weight", "smoothing", "row_weight", "lse", "upstream")}
    pointers |= {"logits_ptr": f"*{dtype}", "target_col_ptr": "*i64"}
    outputs = ((module._statistics_kernel, wide), (module._gradient_kernel, dtype))
    return [
        Build(kernel, pointers | {"out_ptr": f"*{out}"}, shared | mine, count, ("stride_row", "cols"))
        for (kernel, out), mine, count in zip(outputs, own, warps, strict=True)
    ]


@on_targets
def test_cross_entropy(target: str) -> None:
    """All element types at once: starting the disassembler is what takes time."""
    kinds = [(dtype, smoothed) for dtype in ("bf16", "fp32", "fp64") for smoothed in (False, True)]
    codes = iter(build_all([build for kind in kinds for build in cross_entropy_builds(*kind, target)], target))
    for kind in kinds:
        reads, writes = next(codes), next(codes)
        for code in (reads, writes):
            assert code.coalesced, kind
            assert code.spills == 0, kind
            assert code.registers <= 128, kind
        assert reads.loads.count(16) >= 8, kind  # of a full tile and of the end of a row
        assert writes.loads.count(16) >= 8192 // (8 * TARGETS[target].warp_size) // 16, kind
        assert set(writes.stores) == {16}, kind


def _segments(name: str, target: str, rows: list[tuple[int, ...]], kinds: Sequence[torch.dtype], many: bool) -> Build:
    """The launch of a table, as a call on aligned tensors prepares it."""
    modules = compiled_kernels()
    table = modules["segments"].Segments(rows, kinds)
    tensors = [torch.empty(2**22) for _ in range(17 if many else 1)]
    layouts = modules["segments"].layouts_of(torch.empty(2**24, dtype=torch.uint8), tensors)
    sums = name == "scatter_segments"
    return audit.first_launch(modules["segment_copy"]._plan(name, table, layouts, None, 0, False, False, sums), target)


FLAT, ROWS = (0, 0, 1, 2**20, 2**20, 0), (0, 0, 1024, 512, 1024, 0)
TABLES = {
    "contiguous": ([FLAT], torch.float32, False, 45),
    "rows": ([ROWS], torch.float32, False, 75),
    "many-tensors": ([FLAT], torch.float32, True, 45),
    "many-tensors-rows": ([ROWS], torch.float32, True, 75),
    "padding": ([FLAT, (-1, 0, 1, 64, 0, 2**22)], torch.float32, False, 50),
    "narrow": ([FLAT, (0, 2**20, 1, 999, 0, 2**22 + 2)], torch.float32, False, 72 if IS_NEW else 60),
    "narrow-rows": ([ROWS, (0, 2**20, 9, 9, 13, 2**22 + 1)], torch.float32, False, 110),
    "cast": ([FLAT], torch.bfloat16, False, 95),
    "cast-rows": ([ROWS], torch.bfloat16, False, 110),
    "rows-in-the-wire": ([(*ROWS[:5], 0, 1536)], torch.float32, False, 75),
}
SUMS = {
    "sums": [FLAT, (*FLAT[:5], 2**22)],
    "sums-of-rows-and-copies": [(*ROWS[:5], 2**22 * part, 1536) for part in range(2)]
    + [(0, 2**21, 64, 512, 1024, 11 * 2**20)],
}


def _more(target: str, casts: bool) -> float:
    """Instructions of a target as a multiple of NVIDIA's: AMD's before gfx950 round to bf16 in software."""
    if TARGETS[target].backend == "cuda":
        return 1.0
    return 1.6 if casts else 1.3


@on_targets
@pytest.mark.parametrize("name", ["gather_segments", "scatter_segments"])
def test_segments(name: str, target: str) -> None:
    """16 bytes wherever they are aligned, 45 instructions per 16 bytes, 75 with rows (AMD: 3/10 more), no spills."""
    builds = [
        _segments(name, target, rows, [dtype] * (17 if many else 1), many) for rows, dtype, many, _ in TABLES.values()
    ]
    for (kind, (*_, most)), code in zip(TABLES.items(), build_all(builds, target), strict=True):
        assert code.coalesced, kind
        assert code.spills == 0, kind
        assert code.registers <= (64 if "narrow" not in kind else 96), kind
        widths = {16, 8, 4, 2, 1} if kind == "narrow-rows" else {16, 8, 4, 2} if kind == "narrow" else {16}
        assert set(code.stores) == widths, kind
        per_unit = code.instructions * 16 / sum(code.stores)
        more = _more(target, "cast" in kind)
        assert per_unit <= most * more, (kind, per_unit)


@on_targets
def test_copies(target: str) -> None:
    """As those of a wire, whose addresses are in pairs: by value and in a list."""
    modules = compiled_kernels()
    cases = [
        (rows, kind, pairs) for rows in (FLAT, (*ROWS[:5], 0, 1536)) for kind in ("fp32", "cast") for pairs in (1, 9)
    ]
    builds = []
    for rows, kind, pairs in cases:
        into = torch.bfloat16 if kind == "cast" else torch.float32
        made = [torch.empty(2**22), torch.empty(2**22, dtype=into)] * pairs
        layouts = modules["segments"].layouts_of(made[1], made)
        table = modules["segments"].Copies([rows], [into] * pairs)
        builds.append(
            audit.first_launch(
                modules["segment_copy"]._plan("copy_segments", table, layouts, None, 0, False, False), target
            )
        )
    for (rows, kind, pairs), code in zip(cases, build_all(builds, target), strict=True):
        most = {"fp32": (45, 75), "cast": (95, 110)}[kind][rows is not FLAT]
        more = _more(target, kind == "cast")
        assert (code.coalesced, code.spills, set(code.stores)) == (True, 0, {16}), (rows, kind, pairs)
        assert code.registers <= 64, (rows, kind, pairs)
        assert code.instructions * 16 / sum(code.stores) <= most * more, (rows, kind, pairs)


@on_targets
def test_the_passes_of_a_sum_over_a_wire(target: str) -> None:
    """16 bytes at a time, at most 64 registers."""
    for (name, *_), code in zip(audit.SEGMENTS, audit.measure_segments(target), strict=True):
        assert (code.coalesced, code.spills, set(code.stores)) == (True, 0, {16}), name
        assert code.registers <= 64, name


@on_targets
@pytest.mark.parametrize("kind", SUMS)
def test_sums_of_segments(kind: str, target: str) -> None:
    """16 bytes at a time of every part."""
    (code,) = build_all([_segments("scatter_segments", target, SUMS[kind], [torch.float32], False)], target)
    check(code, 16)
    assert set(code.stores) == {16}
    assert code.instructions / code.loads.count(16) <= 45, (
        code.instructions
    )  # Triton may unroll the loop over the parts


@on_targets
@pytest.mark.parametrize("index", ["i64", "i32"])
def test_rows_by_index(index: str, target: str) -> None:
    """The full unit on both sides, 75 instructions per 16 bytes at most."""
    kernel = compiled_kernels()["row_copy"]._rows_kernel
    kinds = [(name, unit) for name in ("pack", "unpack") for unit in (16, 4, 1)]
    builds = []
    for name, unit in kinds:
        element, vec = ELEMENT[unit]
        rows, cols = tile("unpack", unit, unit // vec, target)
        rows = rows // 2 if unit <= 2 else rows
        constants = {
            "INDEX": tl.int64 if index == "i64" else tl.int32, "SCATTER": name == "unpack", "VEC": vec,
            "BLOCK_ROWS": rows, "BLOCK_COLS": cols,
        }  # fmt: skip
        pointers = {"far_ptr": f"*{element}", "near_ptr": f"*{element}", "scale": "fp32", "index_at": "i64"}
        builds.append(Build(kernel, pointers, constants))
    for (name, unit), code in zip(kinds, build_all(builds, target), strict=True):
        check(code, unit)
        assert set(code.stores) == {unit}, (name, unit)
        assert code.loads.count(unit) >= len(code.stores), (name, unit)
        if unit == 16:
            assert code.instructions * 16 / sum(code.stores) <= 75, (name, code.instructions)


@on_targets
def test_sums_of_rows(target: str) -> None:
    """Eight rows of bf16 in full units of 16 bytes, with the loads of all of them in flight where weights are 1."""
    codes = [code for code, _ in audit.measure_rows(target).values()]
    _, plain, of_two, weighted, scaled, dot, both = codes
    for code in (plain, of_two, weighted, scaled):
        assert (code.coalesced, code.spills, set(code.stores)) == (True, 0, {16})
        assert code.registers <= 72
    for code in (plain, of_two, weighted):
        assert code.loads.count(16) == 8 * len(code.stores)
        assert code.instructions / code.loads.count(16) <= 120, code.instructions
    assert scaled.loads.count(16) == len(scaled.stores)
    assert [(each.coalesced, each.spills) for each in (dot, both)] == [(True, 0)] * 2
    assert 16 in both.stores
    is_ahead = IS_NEW and target.startswith("gfx")
    assert dot.loads.count(16) == (6 if is_ahead else 2)
    assert dot.instructions <= (
        320 if is_ahead else 210
    )  # the tree of ten sums has no pass through shared memory but for the warps
