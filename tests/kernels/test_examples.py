"""The examples in the docstrings of the kernels: each one runs, and its docstring shows the numbers that come out."""

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
import tritoncomm_kernels
from devices import Device
from torch import Tensor
from tritoncomm_kernels import Segments, cross_entropy, id_sort, row_copy, row_sums, segment_copy, segment_kernel
from tritoncomm_kernels.address import (
    _copy_kernel,
    _copy_shard,
    _copy_split_kernel,
    _copy_table_kernel,
    _divide,
    _in_rows,
    _move,
    _row_offset,
    _wire_order_kernel,
)
from tritoncomm_kernels.address import _sum as _count
from tritoncomm_kernels.config import Config
from tritoncomm_kernels.cross_entropy import (
    _HAS_EX2,
    _exp,
    _gradient_kernel,
    _joined,
    _larger,
    _statistics_kernel,
    _weighted,
)
from tritoncomm_kernels.cross_entropy import _sum as _sum_terms
from tritoncomm_kernels.launch import Launch
from tritoncomm_kernels.numerics import converted, multiply, narrow, widen
from tritoncomm_kernels.reduction import _reduce_kernel, _total
from tritoncomm_kernels.row_sums import _add, _folded
from tritoncomm_kernels.segment_kernel import _walk
from tritoncomm_kernels.segments import layouts_of

UNTOUCHED = -1
PLAIN = {
    "WIDE": None, "HAS_SCALE": False, "ACCUMULATE": False, "EVICT_FIRST": False, "OUTER_DIMS": 1, "STRIDED": False,
    "VEC": 1,
}  # fmt: skip
ROWS = [[0, 1, 2, 3, 4, 5], [10, 11, 12, 13, 14, 15]]


def _launch(kernel: Any, programs: int, *arguments: Any, **constants: Any) -> None:
    """Launch as the kernels of the cross entropy are: the stub driver sees the tensors of no other ordinary launch."""
    cross_entropy.launched(kernel, (programs,), *arguments, **constants)


def _is_jit(node: ast.AST) -> bool:
    return isinstance(node, ast.FunctionDef) and any("triton.jit" in ast.unparse(each) for each in node.decorator_list)


DOCS = {
    f"{path.stem}.{node.name}": " ".join((ast.get_docstring(node) or "").split())
    for path in sorted(Path(tritoncomm_kernels.__path__[0]).glob("*.py"))
    for node in ast.parse(path.read_text()).body
    if isinstance(node, ast.FunctionDef) and _is_jit(node)
}
"""By module and name the docstring of every jit function, on one line."""
EXAMPLES: dict[str, Callable[["Shown"], None]] = {}


class Shown:
    """Asserts that a docstring shows values.

    Attributes:
        at: device of the tensors.
        text: the docstring.
    """

    def __init__(self, at: torch.device, text: str) -> None:
        self.at, self.text = at, text

    def values(self, *values: Any) -> None:
        for value in values:
            assert _written(value) in self.text, f"{_written(value)} is not in: {self.text}"

    def tensor(self, values: Any, dtype: torch.dtype = torch.int8) -> Tensor:
        """A tensor of values that the docstring shows."""
        self.values(values)
        return self.hidden(values, dtype)

    def hidden(self, values: Any, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.at)

    def out(self, count: int, dtype: torch.dtype = torch.int8) -> Tensor:
        return torch.full((count,), UNTOUCHED, dtype=dtype, device=self.at)

    def programs(self, grid: int, run: Callable[[int], Tensor]) -> None:
        """Assert that the docstring shows the writes of every program; ``run(n)`` runs the first n of them."""
        before = torch.full_like(run(1), UNTOUCHED)
        for program in range(grid):
            after = run(program + 1)
            self.values(_writes(before, after))
            before = after


def _writes(before: Tensor, after: Tensor) -> list[Any]:
    """The values that changed, and an underscore for the others."""
    pairs = zip(before.tolist(), after.tolist(), strict=True)
    return ["_" if old == new else new for old, new in pairs]


def _written(value: Any) -> str:
    if isinstance(value, Tensor):
        value = value.tolist()
    if isinstance(value, list):
        return f"[{', '.join(map(_written, value))}]"
    return str(round(value, 4)) if isinstance(value, float) else str(value)


def example(name: str) -> Callable[[Callable[[Shown], None]], Callable[[Shown], None]]:
    """Decorator: the function runs the example of a jit function."""

    def add(run: Callable[[Shown], None]) -> Callable[[Shown], None]:
        EXAMPLES[name] = run
        return run

    return add


def test_every_jit_function_has_an_example() -> None:
    assert len(DOCS) == 38
    assert set(EXAMPLES) == set(DOCS)
    assert [name for name, text in DOCS.items() if "Example:" not in text] == []


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_example_has_the_numbers_that_it_shows(device: Device, name: str) -> None:
    EXAMPLES[name](Shown(device.at, DOCS[name]))


# --- address


@triton.jit
def divide_kernel(a_ptr, b, out_ptr):
    lane = tl.arange(0, 4)
    tl.store(out_ptr + lane, _divide(tl.load(a_ptr + lane), b))


@example("address._divide")
def _(shown: Shown) -> None:
    a, out = shown.tensor([0, 6, 7, 8], torch.int32), shown.out(4, torch.int32)
    _launch(divide_kernel, 1, a, 3, out)
    shown.values(out)


@triton.jit
def fold_kernel(x_ptr, out_ptr, KIND: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, 4))
    if KIND == 0:
        tl.store(out_ptr, tl.reduce(x, 0, _count))
    elif KIND == 1:
        tl.store(out_ptr, tl.reduce(x, 0, _sum_terms))
    else:
        tl.store(out_ptr, tl.reduce(x, 0, _larger))


def _fold(shown: Shown, values: list[Any], dtype: torch.dtype, kind: int) -> None:
    out = shown.out(1, dtype)
    _launch(fold_kernel, 1, shown.tensor(values, dtype), out, KIND=kind)
    assert f"is {_written(out.tolist()[0])}." in shown.text


@example("address._sum")
def _(shown: Shown) -> None:
    _fold(shown, [1, 1, 1, 0], torch.int32, 0)


@triton.jit
def row_offset_kernel(out_ptr, stride_0, stride_1, size_1):
    o = tl.arange(0, 4)
    tl.store(out_ptr + o, _row_offset(o, stride_0, stride_1, 0, size_1, 1, 2))


@example("address._row_offset")
def _(shown: Shown) -> None:
    out = shown.out(4, torch.int64)
    _launch(row_offset_kernel, 1, out, 20, 5, 3)
    shown.values([0, 1, 2, 3], out)


@triton.jit
def in_rows_kernel(x_ptr, out_ptr, stride_0):
    o, lane = tl.arange(0, 2)[:, None], tl.arange(0, 4)[None, :]
    x = tl.load(_in_rows(x_ptr, o, lane // 2, lane % 2, stride_0, 0, 0, 1, 1, 1, 2, 1, False))
    tl.store(out_ptr + o * 4 + lane, x)


@example("address._in_rows")
def _(shown: Shown) -> None:
    out = shown.out(8, torch.int32)
    _launch(in_rows_kernel, 1, torch.arange(12, dtype=torch.int32, device=shown.at), out, 3)
    shown.values([[0], [1]], [[0, 0, 1, 1]], [[0, 1, 0, 1]], out.view(2, 4))


@triton.jit
def move_kernel(rows_ptr, wire_ptr, UNPACK: tl.constexpr):
    lane = tl.arange(0, 4)
    _move(rows_ptr + lane, wire_ptr + lane, lane < 3, lane < 4, 1.0, UNPACK, None, False, False, False)


@example("address._move")
def _(shown: Shown) -> None:
    rows, wire = shown.tensor([5, 6, 7, 8]), shown.out(4)
    _launch(move_kernel, 1, rows, wire, UNPACK=False)
    shown.values(wire)
    back = shown.out(4)
    _launch(move_kernel, 1, back, wire, UNPACK=True)
    shown.values(_writes(shown.out(4), back))


@example("address._copy_kernel")
def _(shown: Shown) -> None:
    rows = shown.tensor([0, 1, 2, 3, 4])

    def run(programs: int) -> Tensor:
        wire = shown.out(6)
        # strides 5, 0, 0; sizes 1, 1; stride_element 1; stride_rank 3, outer 1, row 5, run 3, cols 6, blocks 2
        numbers, tile = (5, 0, 0, 1, 1, 1, 3, 1, 5, 3, 6, 2), {"BLOCK_ROWS": 1, "BLOCK_COLS": 4}
        _launch(_copy_kernel, programs, rows, wire, 1.0, *numbers, UNPACK=False, **tile, **PLAIN)
        return wire

    shown.programs(2, run)


@example("address._wire_order_kernel")
def _(shown: Shown) -> None:
    rows = shown.tensor(ROWS)

    def run(programs: int) -> Tensor:
        wire = shown.out(12)
        # strides 6, 0, 0; sizes 1, 1; stride_element 1; stride_rank 6, flat 6, row 6, run 3, world 2
        numbers, tile = (6, 0, 0, 1, 1, 1, 6, 6, 6, 3, 2), {"BLOCK_ROWS": 1, "BLOCK_COLS": 4}
        _launch(_wire_order_kernel, programs, rows, wire, 1.0, *numbers, UNPACK=False, **tile, **PLAIN)
        return wire

    shown.programs(3, run)


@triton.jit(do_not_specialize=["place", "start", "stop", "stride_0", "outer"])
def shard_kernel(rows_ptr, wire_ptr, place, start, stop, stride_0, outer):
    _copy_shard(
        rows_ptr, wire_ptr, 1.0, tl.program_id(0), place, start, stop, stride_0, 0, 0, 1, 1, 1, outer, 1, 1, False,
        False, None, False, False, False, 2, 2,
    )  # fmt: skip


@example("address._copy_shard")
def _(shown: Shown) -> None:
    rows, wire = shown.tensor(ROWS), shown.out(12)
    _launch(shard_kernel, 1, rows, wire, 1, 2, 6, 6, 2)
    shown.values(_writes(shown.out(12), wire))


SPLIT_TILE = {"UNPACK": False, "BLOCK_ROWS": 2, "BLOCK_COLS": 2, **PLAIN}


@example("address._copy_split_kernel")
def _(shown: Shown) -> None:
    rows = shown.tensor(ROWS)

    def run(programs: int) -> Tensor:
        wire = shown.out(12)
        starts, tiles = [2, 2] + [6] * 13, [1, 1] + [3] * 13
        numbers = (6, 0, 0, 1, 1, 1, 2, 6, 3)  # strides; sizes; stride_element; outer, row, tiles
        _launch(_copy_split_kernel, programs, rows, wire, 1.0, *numbers, *starts, *tiles, RANKS=16, **SPLIT_TILE)
        return wire

    shown.programs(3, run)


@example("address._copy_table_kernel")
def _(shown: Shown) -> None:
    rows, table = shown.hidden(ROWS), shown.tensor([0, 1, 1, 2**31 - 1, 0, 2, 2, 6], torch.int32)
    wires = []
    for programs in (1, 2):
        wires.append(shown.out(12))
        numbers = (6, 0, 0, 1, 1, 1, 2, 3)  # strides; sizes; stride_element; outer, tiles
        _launch(_copy_table_kernel, programs, rows, wires[-1], table, 1.0, *numbers, STEPS=1, RANKS=4, **SPLIT_TILE)
    shown.values(_writes(*wires))


# --- segments

SEGMENTS = Segments([(0, 1, 2, 3, 8, 0), (1, 0, 1, 2, 2, 8)], [torch.int8, torch.int16])


def _launch_of(name: str, segments: Segments, tensors: list[Tensor], wire: Tensor, sums: bool = False) -> Any:
    """The prepared launch of a table whose tensors and wire are aligned."""
    ((launch, _),), _ = segment_copy._plan(name, segments, layouts_of(wire, tensors), None, 0, False, False, sums)
    return launch


@triton.jit
def walk_kernel(x_ptr, wire_ptr, units, magic, gap):
    _walk(
        x_ptr.to(tl.int64) + 1, wire_ptr.to(tl.int64), units, 0 * units, magic, gap, 0, x_ptr, 0, units, 1.0, tl.int8,
        tl.int8, 1, 8, None, False, 4, True, False, False, False, False,
    )  # fmt: skip


@example("segment_kernel._walk")
def _(shown: Shown) -> None:
    x, wire = torch.arange(16, dtype=torch.int8, device=shown.at), shown.out(6)
    _launch(walk_kernel, 1, x, wire, 6, 715827883, 5)
    shown.values([0, 1, 2, 8, 9, 10], wire)


@example("segment_kernel._segments_kernel")
def _(shown: Shown) -> None:
    tensors = [torch.arange(16, dtype=torch.int8, device=shown.at), shown.tensor([20, 21], torch.int16)]
    launch = _launch_of("gather_segments", SEGMENTS, tensors, shown.out(12))
    for starts in ((0, 1, 1), (1, 1, 2)):  # the records of one program only
        wire, table = shown.out(12), np.array([*starts, *launch.table[2:]])
        launches = [(replace(launch, grid=2, table=table), None)]
        with mock.patch.object(segment_copy, "_plan", return_value=(launches, 0)):
            segment_copy._run("gather_segments", tensors, wire, SEGMENTS, None, False, False)
        shown.values(_writes(shown.out(12), wire))


def _fields() -> dict[str, tuple[int, int, int]]:
    """By name the word, the lowest bit and the highest bit of every field of a record, as the module's table says."""
    text = (segment_kernel.__doc__ or "").partition("record r")[2].partition("part k")[0]
    rows = re.findall(r"^ +(\d).*?(\d+)(?:-(\d+))?  +(\w+)  ", text, re.MULTILINE)
    return {name: (int(word), int(low), int(high or low)) for word, low, high, name in rows}


def _decoded(record: Any) -> dict[str, int]:
    """The fields of a record, each unsigned."""
    fields = {name: each for name, each in _fields().items() if each[0] < len(record)}
    return {n: int(record[word]) >> low & (1 << high - low + 1) - 1 for n, (word, low, high) in fields.items()}


def test_the_table_of_the_record_has_the_fields_that_are_packed() -> None:
    tensors = [torch.arange(16, dtype=torch.int8), torch.tensor([20, 21], dtype=torch.int16)]
    table = _launch_of("gather_segments", SEGMENTS, tensors, torch.empty(12, dtype=torch.int8)).table
    lines = re.findall(r"^ +(?:starts|record \d)  ([ 0-9a-f]+)", segment_kernel.__doc__ or "", re.MULTILINE)
    assert [int(word, 16) for line in lines for word in line.split()] == table.tolist()
    first, second = (_decoded(table[2 + 4 * i : 6 + 4 * i]) for i in range(2))
    magic = -(-(2**31) // 3)
    assert first == {
        "rows_at": 1, "wire_at": 0, "skip": 0, "units": 6, "magic": magic, "kind": 4, "padding": 0, "tensor": 0,
        "gap": 5,
    }  # fmt: skip
    assert second == first | {"rows_at": 0, "wire_at": 8, "units": 1, "magic": 0, "kind": 2, "tensor": 1, "gap": 0}


def test_the_table_of_the_record_has_the_fields_of_sums() -> None:
    x, wire = torch.zeros(8), torch.zeros(24)
    sums = Segments([(0, 0, 2, 3, 4, 0, 5), (0, 0, 2, 3, 4, 40, 7)], [torch.float32])
    table = _launch_of("scatter_segments", sums, [x], wire, True).table.tolist()
    assert table[:2] == [0, 1]
    record = _decoded(table[2:8])
    assert (record["units"], record["gap"], record["wire_gap"], record["parts"]) == (6, 1, 2, 1)
    assert record["parts_at"] == 8
    assert table[8:] == [40, 4]


# --- numerics


@triton.jit
def widen_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, 2)
    tl.store(out_ptr + lane, widen(tl.load(x_ptr + lane), tl.float32))


@example("numerics.widen")
def _(shown: Shown) -> None:
    out = shown.out(2, torch.float32)
    _launch(widen_kernel, 1, shown.tensor([1.5, -2.0], torch.bfloat16), out)
    shown.values(out)


@triton.jit
def multiply_kernel(x_ptr, scale, out_ptr):
    lane = tl.arange(0, 2)
    tl.store(out_ptr + lane, multiply(tl.load(x_ptr + lane), scale, tl.float64))


@example("numerics.multiply")
def _(shown: Shown) -> None:
    out = shown.out(2, torch.float64)
    _launch(multiply_kernel, 1, shown.tensor([1.5, -2.0], torch.float64), 4602678819172646912, out)
    shown.values(4602678819172646912, out)


@triton.jit
def narrow_kernel(x_ptr, out_ptr):
    lane = tl.arange(0, 2)
    tl.store(out_ptr + lane, narrow(tl.load(x_ptr + lane), tl.bfloat16))


@example("numerics.narrow")
def _(shown: Shown) -> None:
    values, out = [1 + 2**-8, 1 + 3 * 2**-8], shown.out(2, torch.bfloat16)
    assert str(values) in shown.text
    _launch(narrow_kernel, 1, shown.hidden(values, torch.float32), out)
    assert str(out.tolist()) in shown.text


@triton.jit
def converted_kernel(x_ptr, scale, target_ptr, count):
    lane = tl.arange(0, 2)
    out = converted(tl.load(x_ptr + lane), scale, target_ptr + lane, lane < count, tl.float32, tl.float32, True, True)
    tl.store(target_ptr + lane, out)


@example("numerics.converted")
def _(shown: Shown) -> None:
    target = shown.tensor([1.0, 1.0], torch.float32)
    _launch(converted_kernel, 1, shown.tensor([3.0, -4.0], torch.bfloat16), 0.5, target, 2)
    shown.values(target)


# --- reduction, row_copy


@triton.jit
def total_kernel(x_ptr, out_ptr, scale, parts, count):
    lane = tl.arange(0, 2)
    tl.store(out_ptr + lane, _total(x_ptr + lane, lane < count, 2, scale, parts, 2, 2, tl.float32, True))


@example("reduction._total")
def _(shown: Shown) -> None:
    out = shown.out(2, torch.float32)
    parts = [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
    _launch(total_kernel, 1, shown.tensor(parts, torch.float32), out, 0.5, 4, 2)
    shown.values(out)


@example("reduction._reduce_kernel")
def _(shown: Shown) -> None:
    parts = [[1.0, 2.0, 3.0, 4.0, 5.0], [10.0, 20.0, 30.0, 40.0, 50.0]]
    shown.values(parts)
    wire = shown.hidden([[*part, 0.0] for part in parts], torch.float32)

    def run(programs: int) -> Tensor:
        out = shown.out(5, torch.float32)
        constants = {"VEC": 2, "PARTS": 2, "CHUNK": 0, "WIDE": tl.float32, "HAS_SCALE": False, "TAIL": True, "BLOCK": 2}
        _launch(_reduce_kernel, programs, wire, out, 1.0, 3, 2, 1, 2, **constants)  # stride_rank, units, rest, parts
        return out

    shown.programs(2, run)


@example("row_copy._rows_kernel")
def _(shown: Shown) -> None:
    far, rows = shown.tensor([[1, 2], [3, 4]]), shown.tensor([[5, 6], [7, 8], [9, 10]])

    def run(call: Callable[[Tensor, Tensor, Tensor], int], x: Tensor, index: list[int], out: Tensor) -> None:
        # Rows an odd number of bytes apart are copied by units of a byte.
        apart = torch.nn.functional.pad(x, (0, 1))[:, :2]
        call(apart, shown.tensor(index, torch.int64), out.view(-1, 2))

    _first_programs(shown, 6, row_copy, 2, lambda out: run(row_copy.gather_rows, far, [1, -1, 1], out), torch.int8)
    _first_programs(shown, 4, row_copy, 2, lambda out: run(row_copy.scatter_rows, rows, [1, -1, 0], out), torch.int8)


@example("row_sums._sum_rows_kernel")
def _(shown: Shown) -> None:
    x = shown.tensor([[1.0, 2.0], [3.0, 4.0]], torch.float32)
    index = shown.tensor([[1, 0], [-1, 1]], torch.int64)
    weights = shown.tensor([[1.0, 10.0], [9.0, 0.5]], torch.float32)
    _listed(shown, 4, lambda out: row_sums.sum_rows(x, index, weights, out.view(2, 2)))


@example("row_sums._scale_rows_kernel")
def _(shown: Shown) -> None:
    x = shown.tensor([[1.0, 2.0], [3.0, 4.0]], torch.float32)
    weights = shown.tensor([[1.0, 10.0], [9.0, 0.5]], torch.float32)
    pair = shown.tensor([3, -1, 1], torch.int64)
    _listed(shown, 6, lambda out: row_sums.scale_rows(x, pair, weights, out.view(3, 2)), 2)


@example("row_sums._scale_dot_rows_kernel")
def _(shown: Shown) -> None:
    x = shown.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], torch.float32)
    weights = shown.tensor([[1.0, 10.0], [9.0, 0.5]], torch.float32)
    y = shown.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]], torch.float32)
    pair, out, scaled = shown.tensor([3, 0, -1], torch.int64), shown.out(4, torch.float32), torch.empty_like(y)
    row_sums.scale_dot_rows(x, y, pair, weights, scaled, out.view(2, 2))
    shown.values(scaled, [[6.0, "_"], ["_", 10.0]])
    assert out.tolist() == [6.0, UNTOUCHED, UNTOUCHED, 10.0]


@example("row_sums._dot_rows_kernel")
def _(shown: Shown) -> None:
    x = shown.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], torch.float32)
    y = shown.tensor([[1.0, 0.0, 1.0], [1.0, 1.0, 1.0]], torch.float32)
    pair = shown.tensor([3, 0], torch.int64)
    with mock.patch.object(row_sums, "DOT_LANES", 2):
        _listed(shown, 4, lambda out: row_sums.dot_rows(x, y, pair, out.view(2, 2)))


def _listed(shown: Shown, size: int, call: Callable[[Tensor], int], rows: int = 1) -> None:
    _first_programs(shown, size, row_sums, rows, call, torch.float32)


def _first_programs(
    shown: Shown, size: int, module: Any, rows: int, call: Callable[[Tensor], Any], dtype: torch.dtype
) -> None:
    """Show the two programs of a launch over tiles of so many rows, of two columns."""
    launch_all = Launch.__call__

    def run(programs: int) -> Tensor:
        out = shown.out(size, dtype)

        def launch(prepared: Launch, *arguments: Any, grid: int) -> None:
            launch_all(prepared, *arguments, grid=min(grid, programs))

        def tile(*arguments: Any) -> Config:
            return Config(rows, 2 * dtype.itemsize, 4)

        plan = module._plan.__wrapped__  # a cache would have the ordinary tiles
        with (
            mock.patch.object(Launch, "__call__", launch),
            mock.patch.multiple(module, tile_of_rows=tile, _plan=plan),
            mock.patch.object(row_sums, "INTERPRETED", True),  # whose tiles are not other ones
        ):
            call(out)
        return out

    shown.programs(2, run)


@triton.jit
def add_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.arange(0, 4).reshape([2, 2]))
    tl.store(out_ptr + tl.arange(0, 2), tl.reduce(x, 1, _add))


@example("row_sums._add")
def _(shown: Shown) -> None:
    out = shown.out(2, torch.float32)
    _launch(add_kernel, 1, shown.tensor([[1.0, 2.0], [3.0, 4.0]], torch.float32), out)
    shown.values(out)


@triton.jit
def folded_kernel(x_ptr, out_ptr, LANES: tl.constexpr):
    tl.store(out_ptr + tl.arange(0, 1), _folded(tl.load(x_ptr + tl.arange(0, LANES)), LANES))


@example("row_sums._folded")
def _(shown: Shown) -> None:
    out = shown.out(1, torch.float32)
    _launch(folded_kernel, 1, shown.tensor([1.0, 2.0, 3.0, 4.0], torch.float32), out, LANES=4)
    shown.values([3.0, 7.0], out)


# --- id_sort


@triton.jit
def tokens_kernel(n_ptr, out_ptr, KP: tl.constexpr):
    lane = tl.arange(0, 4)
    tl.store(out_ptr + lane, id_sort._token_of(tl.load(n_ptr + lane), KP))


@example("id_sort._token_of")
def _(shown: Shown) -> None:
    out = shown.out(4, torch.int32)
    _launch(tokens_kernel, 1, shown.tensor([0, 1, 3, 4], torch.int32), out, KP=4)
    shown.values(out)


@triton.jit
def keys_kernel(ids_ptr, out_ptr, first, per, buckets, K: tl.constexpr, KP: tl.constexpr):
    n = tl.arange(0, KP)
    tl.store(out_ptr + n, id_sort._key_of(ids_ptr, n, 3, 1, first, per, buckets, K, KP))


@example("id_sort._key_of")
def _(shown: Shown) -> None:
    out = shown.out(4, torch.int32)
    _launch(keys_kernel, 1, shown.tensor([[5, 2, 9]], torch.int64), out, 2, 2, 2, K=3, KP=4)
    shown.values(out)


@triton.jit
def repeats_kernel(keys_ptr, out_ptr, buckets, KP: tl.constexpr):
    i, j = tl.arange(0, KP)[:, None], tl.arange(0, KP)[None, :]
    repeats = id_sort._repeats(tl.load(keys_ptr + i), tl.load(keys_ptr + j), i, j, buckets, KP)
    tl.store(out_ptr + i * KP + j, repeats)


@example("id_sort._repeats")
def _(shown: Shown) -> None:
    out = shown.out(16, torch.int32)
    _launch(repeats_kernel, 1, shown.tensor([1, 1, 0, 1], torch.int32), out, 2, KP=4)
    shown.values(out.view(4, 4))


@example("id_sort._count_ids_kernel")
def _(shown: Shown) -> None:
    ids = shown.tensor([[0, 1], [0, 5]], torch.int32)

    def run(programs: int) -> Tensor:
        out, constants = shown.out(6, torch.int32), {"K": 2, "KP": 2, "IDS": 2, "DISTINCT": False, "CHUNK": 4}
        _launch(id_sort._count_ids_kernel, programs, ids, out, 1.0, 2, 2, 0, 1, 2, 2, **constants)
        return out

    shown.programs(2, run)


@example("id_sort._scan_ids_kernel")
def _(shown: Shown) -> None:
    for alignment in (1, 4):
        counts, totals = shown.tensor([[1, 1, 0], [2, 0, 5]], torch.int32), shown.out(2, torch.int64)
        constants = {"DISTINCT": False, "COLUMNS": 1, "ROWS": 2, "CHUNK": 2}
        _launch(id_sort._scan_ids_kernel, 1, counts, totals, 1.0, 2, 2, alignment, **constants)
        shown.values(counts, totals)


@example("id_sort._place_ids_kernel")
def _(shown: Shown) -> None:
    sort = id_sort.sort_by_bucket(shown.tensor([[1, 0], [0, 5]], torch.int64), 0, 2, 6, 3)
    shown.values(sort.counts, sort.pairs, sort.lines, sort.index)


# --- cross_entropy


@example("cross_entropy._larger")
def _(shown: Shown) -> None:
    _fold(shown, [1.0, 3.0, -2.0, 0.0], torch.float32, 2)


@example("cross_entropy._sum")
def _(shown: Shown) -> None:
    _fold(shown, [1.0, 3.0, -2.0, 0.0], torch.float32, 1)


@triton.jit
def exp_kernel(x_ptr, out_ptr, HAS_EX2: tl.constexpr):
    lane = tl.arange(0, 4)
    tl.store(out_ptr + lane, _exp(tl.load(x_ptr + lane), HAS_EX2))


@example("cross_entropy._exp")
def _(shown: Shown) -> None:
    out = shown.out(4, torch.float32)
    _launch(exp_kernel, 1, shown.tensor([0.0, 1.0, -1.0, float("-inf")], torch.float32), out, HAS_EX2=_HAS_EX2)
    shown.values(out)


@triton.jit
def joined_kernel(x_ptr, max_ptr, sum_ptr, HAS_EX2: tl.constexpr):
    col = tl.arange(0, 2)
    x = tl.load(x_ptr + tl.arange(0, 2)[:, None] * 2 + col[None, :])
    new_max, new_sum = _joined(x, tl.load(max_ptr + col), tl.load(sum_ptr + col), HAS_EX2)
    tl.store(max_ptr + col, new_max)
    tl.store(sum_ptr + col, new_sum)


@example("cross_entropy._joined")
def _(shown: Shown) -> None:
    x = shown.tensor([[0.0, 1.0], [0.0, 3.0]], torch.float32)
    maxima, sums = (shown.tensor(values, torch.float32) for values in ([0.0, 2.0], [1.0, 1.0]))
    _launch(joined_kernel, 1, x, maxima, sums, HAS_EX2=_HAS_EX2)
    shown.values(maxima, sums)


@triton.jit
def weighted_kernel(x_ptr, weight_ptr, out_ptr):
    place = tl.arange(0, 2)[:, None] * 2 + tl.arange(0, 2)[None, :]
    tl.store(out_ptr + tl.arange(0, 2), _weighted(tl.load(x_ptr + place), tl.load(weight_ptr + place)))


@example("cross_entropy._weighted")
def _(shown: Shown) -> None:
    out = shown.out(2, torch.float32)
    x, weight = [[1.0, 2.0], [3.0, float("inf")]], [[0.5, 0.5], [0.5, 0.0]]
    _launch(weighted_kernel, 1, shown.tensor(x, torch.float32), shown.tensor(weight, torch.float32), out)
    shown.values(out)


@example("cross_entropy._statistics_kernel")
def _(shown: Shown) -> None:
    logits, target = shown.tensor([[1.0, 1.0], [2.0, 2.0]], torch.float32), shown.tensor([0, -1], torch.int64)
    weight = torch.ones(2, device=shown.at)

    def run(programs: int) -> Tensor:
        out = shown.out(4, torch.float32)
        _launch(
            _statistics_kernel, programs,
            logits, target, weight, weight, out, 2, 2, 2, SMOOTHED=False, WIDE=tl.float32, LOWEST=-3.4e38,
            HAS_EX2=_HAS_EX2, ROWS=1, COLS=16,
        )  # fmt: skip
        return out

    shown.programs(2, run)


@example("cross_entropy._gradient_kernel")
def _(shown: Shown) -> None:
    logits, target = shown.tensor([[0.0, 0.0, 0.0, 0.0]], torch.float32), shown.hidden([2], torch.int64)
    one = torch.ones(1, device=shown.at)

    def run(programs: int) -> Tensor:
        out = shown.out(4, torch.float32)
        _launch(
            _gradient_kernel, programs,
            logits, target, one, one, one, (4 * one).log(), 4 * one, out, 4, 4, 2, SMOOTHED=False, WIDE=tl.float32,
            HAS_EX2=_HAS_EX2, BLOCK=2,
        )  # fmt: skip
        return out

    shown.programs(2, run)
