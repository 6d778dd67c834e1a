"""What `explain` tells is what `record` counts for the real call; times and projections follow their formulas."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from mapping_cases import Call, run
from pool import Pool
from torch.distributed import ProcessGroup
from tritoncomm_kernels import tables

from tritoncomm import mappings, record
from tritoncomm.core import ops
from tritoncomm.core.cost import DEFAULTS
from tritoncomm.errors import ArgumentError, ShapeError, UnsupportedError
from tritoncomm.explain import OPS, cost, explain
from tritoncomm.explain.steps import Movement, PlannedCall

DIMS = {"all_to_all_dims": ((2, 1), (0, 2), (1, 0)), "all_gather": ((0,), (2,)), "reduce_scatter": ((1,),)}
DIMS["split"] = ((0,), (-1,))
SHAPES = ((8, 4, 16), (1, 8, 16), (4, 4, 4, 8))
MIB = 2**20


Given = tuple[int, ...] | None


def called(
    op: str, x: torch.Tensor, group: ProcessGroup, dims: tuple[int, ...], sizes: Given = None, out_sizes: Given = None
) -> torch.Tensor:
    given = (out_sizes, sizes) if op == "all_to_all" else (sizes, out_sizes)
    return run(Call(OPS[op], dims=(*dims, 0, 0)[:2], sizes=given), x, group)


def total(counted: dict[tuple[str, str], record.Count]) -> tuple[int, int]:
    return sum(count.bytes_copied for count in counted.values()), sum(count.bytes_sent for count in counted.values())


def check(movement: Movement, counted: dict[tuple[str, str], record.Count], what: Any) -> None:
    assert (movement.bytes_copied, movement.bytes_sent) == total(counted), (what, movement, counted)
    paths = {path for (_, path), count in counted.items() if count.bytes_copied} or {"view"}
    assert paths == {movement.path}, (what, movement, counted)


def run_every_op(group: ProcessGroup, path: str) -> int:
    compared = 0
    for op in OPS:
        for shape in SHAPES:
            for dims in DIMS.get(op, ((),)):
                for overwrite in (False, True) if op in ("copy", "reduce") else (False,):
                    compared += run_one(group, op, shape, dims, overwrite, path, torch.float32)
                # The plan of the same shape with elements of another size, which a cache could take for it.
                compared += run_one(group, op, shape, dims, False, path, torch.float64)
                compared += run_one(group, op, shape, dims, False, path, torch.bfloat16)
    return compared


def run_one(
    group: ProcessGroup,
    op: str,
    shape: tuple[int, ...],
    dims: tuple[int, ...],
    overwrite: bool,
    path: str,
    dtype: torch.dtype,
) -> bool:
    what = (op, shape, dims, overwrite, dtype)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    with ops.path(path):
        try:
            told = explain(op, shape, group.size(), dtype, dims, "cpu", overwrite=overwrite)
        except ShapeError:
            with pytest.raises(ShapeError):
                called(op, x, group, dims)
            return False
        with record.recording() as forward, mappings.overwrite_inputs(overwrite):
            out = called(op, x * 2.0 if op == "reduce" else x, group, dims)
        assert tuple(out.shape) == told.forward.result, what
        assert told.backward.result == shape, what
        check(told.forward, forward, what)
        gradient = torch.ones_like(out)
        with record.recording() as backward:
            torch.autograd.grad(out, x, gradient)
        check(told.backward, backward, what)
    assert {name for name, _ in forward} <= {told.forward.name}, (what, forward)
    return True


@pytest.mark.parametrize(
    ("world", "path"), [(2, "auto"), pytest.param(4, "auto", marks=pytest.mark.slow), (2, "triton")]
)
def test_the_bytes_are_those_of_the_real_call(pool: Pool, world: int, path: str) -> None:
    compared = pool.run(run_every_op, path, world=world)
    assert min(compared) > 150


def strided(shape: tuple[int, ...], stride: Given) -> torch.Tensor:
    """A leaf of that layout in memory."""
    if stride is None:
        return torch.ones(shape, requires_grad=True)
    cells = 1 + sum((n - 1) * step for n, step in zip(shape, stride, strict=True))
    return torch.ones(cells).as_strided(shape, stride).requires_grad_()


def run_layouts(group: ProcessGroup, path: str, cases: list[Any]) -> int:
    """Calls of ``(op, shape per rank, stride, dims, sizes per rank, out_sizes per rank)``; how many passes moved."""
    rank, world, passes = group.rank(), group.size(), 0
    for op, shapes, stride, dims, cut, out in cases:
        what, shape = (op, shapes, stride, dims, cut, out, path), shapes[rank % len(shapes)]
        given, taken = (None if one is None else one[rank % len(one)] for one in (cut, out))
        with ops.path(path):
            options = {"sizes": given, "out_sizes": taken, "rank": rank, "stride": stride}
            x = strided(shape, stride)
            try:
                told = explain(op, shape, world, torch.float32, dims, "cpu", **options)
            except UnsupportedError:
                with pytest.raises(UnsupportedError, match="no kernel walks"):
                    called(op, x, group, dims, given, taken)
                continue
            with record.recording() as forward:
                y = called(op, x, group, dims, given, taken)
            assert tuple(y.shape) == told.forward.result, (what, told.forward)
            check(told.forward, forward, what)
            if op == "copy":
                continue
            gradient = torch.ones_like(y, memory_format=torch.contiguous_format)
            with record.recording() as backward:
                torch.autograd.grad(y, x, gradient)
            check(told.backward, backward, what)
            passes += told.forward.passes
    return passes


# Sizes of two ranks: what rank 0 sends, what rank 1 sends; what comes is the column.
UNEVEN = [
    ("all_to_all", ((5, 4), (3, 4)), None, (), ((2, 3), (3, 0)), ((2, 3), (3, 0))),
    ("all_to_all", ((5, 4), (3, 4)), (8, 2), (), ((2, 3), (0, 3)), ((2, 0), (3, 3))),
    ("all_to_all", ((4, 4),), None, (), ((2, 2),), ((2, 2),)),
    *(("all_gather", shapes, None, (dim,), ((3, 5),), None)
      for dim, shapes in ((0, ((3, 4), (5, 4))), (1, ((4, 3), (4, 5))), (-1, ((2, 2, 3), (2, 2, 5))))),
    ("all_gather", ((4, 3), (4, 5)), (1, 4), (1,), ((3, 5),), None),
    ("all_gather", ((4, 4),), None, (1,), ((4, 4),), None),
    *(("reduce_scatter", ((8, 8),), stride, (dim,), (cut,), None)
      for dim in (0, 1) for stride in (None, (1, 8), (24, 1)) for cut in ((3, 5), (4, 4), (0, 8))),
    ("gather_sp", ((3, 4), (5, 4)), None, (), ((3, 5),), None),
    ("reduce_scatter_sp", ((8, 4),), None, (), ((3, 5),), None),
    *(("split", ((4, 8),), stride, (1,), ((3, 5),), None) for stride in (None, (1, 4))),
    ("all_to_all_dims", ((4, 8, 2),), None, (1, 0), ((3, 5),), None),
    ("all_to_all_dims", ((3, 8, 2), (5, 8, 2)), None, (1, 0), None, ((3, 5),)),
    ("all_to_all_dims", ((3, 8, 2), (5, 8, 2)), (48, 2, 1), (1, 0), ((2, 6),), ((3, 5),)),
    ("all_to_all_dims", ((8, 3, 2), (8, 5, 2)), None, (0, 1), ((3, 5),), ((3, 5),)),
]  # fmt: skip
QKV = (48, 8, 1)  # of a [4, 6, 8] that is the first of three in a fused qkv: pitch 48 of the tokens, no gap inside
STRIDED = [
    (op, (shape,), stride, dims, None, None)
    for shape, strides in {
        (4, 6, 8): ((144, 8, 1), QKV, (48, 1, 6), (8, 32, 1), (96, 16, 2)),
        (8, 12): ((36, 1), (1, 8), (24, 2), (0, 1)),
        (1, 4, 8): ((999, 24, 1),),
    }.items()
    for stride in strides
    for op, dims in (
        ("sp2hp", ()), ("all_to_all", ()), ("all_to_all_dims", (1, 0)), ("all_to_all_dims", (0, 1)),
        ("all_to_all_dims", (-1, 1)), ("all_gather", (0,)), ("all_gather", (1,)), ("reduce_scatter", (0,)),
        ("reduce_scatter", (1,)), ("reduce_scatter", (-1,)), ("split", (0,)), ("split", (1,)), ("ag_last", ()),
        ("rs_last", ()), ("gather_sp", ()), ("scatter_sp", ()), ("gather_tp", ()), ("scatter_tp", ()), ("copy", ()),
        ("reduce", ()),
    )
    if shape[0] % 2 == 0 or (op, dims) not in {
        ("all_to_all", ()), ("reduce_scatter", (0,)), ("split", (0,)), ("scatter_sp", ()), ("all_to_all_dims", (0, 1)),
    }
]  # fmt: skip
STRIDED += [("hp2sp", ((8, 12),), stride, (), None, None) for stride in ((36, 1), (1, 8))]
STRIDED += [
    ("hp2sp", ((4, 6, 8),), stride, (), None, None) for stride in ((144, 24, 1), QKV[::-1], (48, 1, 6), (8, 32, 1))
]


@pytest.mark.parametrize("cases", [UNEVEN, STRIDED], ids=["sizes", "strides"])
def test_the_bytes_are_those_of_the_real_call_with(pool: Pool, cases: list[Any]) -> None:
    for path in ("auto", "triton"):
        some = cases if path == "auto" else cases[::3]  # the interpreter runs kernels slowly
        assert min(pool.run(run_layouts, path, some, world=2)) > len(some) // 4


def test_what_no_kernel_walks_takes_torch_and_a_forced_kernel_refuses(pool: Pool) -> None:
    shape, stride = (2, 4, 3, 5, 4), (4000, 900, 200, 30, 1)
    case = ("rs_last", (shape,), stride, (), None, None)
    pool.run(run_layouts, "auto", [case], world=2)
    (pack, _) = explain("rs_last", shape, 2, torch.float32, stride=stride).forward.steps
    assert (pack.path, pack.bytes_copied) == ("torch", 2 * 480 * 4)
    with ops.path("triton"), pytest.raises(UnsupportedError, match="no kernel walks"):
        explain("rs_last", shape, 2, torch.float32, stride=stride)


def test_a_slice_of_a_fused_qkv_is_read_in_place() -> None:
    contiguous = explain("all_to_all_dims", (2, 1024, 32, 128), 4, dims=(2, 1)).forward
    sliced = explain("all_to_all_dims", (2, 1024, 32, 128), 4, dims=(2, 1), stride=(12582912, 12288, 128, 1)).forward
    assert (sliced.bytes_copied, sliced.bytes_sent) == (contiguous.bytes_copied, contiguous.bytes_sent)
    assert sliced.passes == contiguous.passes
    assert sliced.steps[0].tile.endswith("16 B per access")
    odd = explain("all_to_all_dims", (2, 1024, 32, 128), 4, dims=(2, 1), stride=(12582912, 12290, 128, 1)).forward
    assert odd.steps[0].tile.endswith(" 4 B per access")


def test_the_time_is_that_of_the_larger_direction() -> None:
    rates = cost.Rates(latency=0.0, link=1.0, network=1.0, memory=1.0, node=8, source="")
    told = explain("all_gather", (1, 4), 2, torch.float32, rates=rates, sizes=(1, 9)).forward
    assert (told.bytes_sent, told.seconds[1], told.result) == (16, 9 * 16, (10, 4))


def test_every_mapping_is_explained() -> None:
    public = {name for name in mappings.__all__ if not name.startswith("_")} - {"overwrite_inputs"}
    assert set(OPS.values()) == public
    for short, name in OPS.items():
        dims = DIMS.get(short, ((),))[0]
        assert explain(name, (8, 4, 16), 2, dims=dims) == explain(short, (8, 4, 16), 2, dims=dims)


def test_one_rank_moves_nothing() -> None:
    told = explain("sp2hp", (4, 6), 1)
    assert told.forward.steps == told.backward.steps == ()


def test_a_gpu_takes_kernels_and_says_which_tile() -> None:
    told = explain("sp2hp", (4096, 2, 8192), 8, torch.bfloat16)
    pack, exchange, unpack = told.forward.steps
    assert (pack.name, pack.path, pack.bytes_copied) == ("pack", "triton", 2 * 128 * MIB)
    assert pack.tile.endswith("16 B per access")
    assert pack.origin == "built in"
    assert (exchange.path, exchange.bytes_sent) == ("backend", 128 * MIB * 7 // 8)
    assert unpack.path == "view"
    assert (told.forward.passes, told.forward.result) == (1, (65536, 1024))
    odd = explain("rs_last", (3, 2, 18), 2, torch.bfloat16)  # 9 elements of 2 bytes to each rank
    assert odd.forward.steps[0].tile.endswith(" 2 B per access")
    with ops.path("torch"):
        assert explain("sp2hp", (64, 64), 8).forward.path == "torch"


def test_a_tuned_table_is_named_and_its_crossover_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    table = tmp_path / "nvidia-x.json"
    entry = {"tile_bytes": 4096, "segment_bytes": 1024, "num_warps": 8}
    content = {
        "kind": "measured", "format": tables.FORMAT, "device": "NVIDIA X", "sm_count": 100,
        "source": tables.source_hash(), "triton": triton.__version__,
        "configs": {"pack": {"16": entry}}, "crossover_bytes": {"pack": {"16": 65536}},
    }  # fmt: skip
    table.write_text(json.dumps(content))
    monkeypatch.setenv(tables.VARIABLE, str(table))
    tables.chosen.cache_clear()
    request.addfinalizer(tables.chosen.cache_clear)
    pack = explain("sp2hp", (1024, 1024), 8, device="NVIDIA X").forward.steps[0]
    assert pack.origin == str(table)
    assert "8 warps" in pack.tile
    assert explain("sp2hp", (16, 1024), 8, device="NVIDIA X").forward.path == "torch"
    assert explain("sp2hp", (16, 1024), 8).forward.steps[0].origin == "built in"


def test_times_follow_the_formulas() -> None:
    rates = cost.Rates(latency=1.0, link=10.0, network=1.0, memory=4.0, node=4, source="")
    assert cost.pass_seconds(8, rates) == 2.0
    for kind, steps in (("all-gather", 3), ("reduce-scatter", 3), ("all-reduce", 6), ("all-to-all", 1)):
        assert cost.collective_seconds(kind, 0, 4, rates) == steps, kind
        assert cost.collective_seconds(kind, 20, 4, rates) == steps + 2.0, kind
        assert cost.collective_seconds(kind, 20, 1, rates) == 0.0, kind
    assert cost.collective_seconds("all-gather", 20, 8, rates) == 7 + 20 / 4  # four ports of a node
    assert cost.collective_seconds("all-to-all", 70, 8, rates) == 1 + 40.0  # 40 of 70 leave the node
    told = explain("sp2hp", (4, 8), 2, torch.float32, rates=rates)
    assert told.forward.seconds == pytest.approx((2 * 128 / 4, 1 + 64 / 10))


def test_projection_is_of_both_directions_and_leaves_out_what_does_not_divide() -> None:
    told = explain("sp2hp", (64, 24), 8, torch.float32)
    assert [share.world for share in told.projection] == [2, 4, 8, 16, 32, 64]
    assert [share.share is None for share in told.projection] == [False, False, False, True, True, True]
    here = told.projection[2]
    assert here.local == pytest.approx(told.forward.seconds[0] + told.backward.seconds[0])
    assert here.collective == pytest.approx(told.forward.seconds[1] + told.backward.seconds[1])
    assert here.share == pytest.approx(here.local / (here.local + here.collective))


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (("sp2hp", (4, 6), 4), ShapeError, "does not divide over 4 ranks"),
        (("nothing", (4, 6), 2), ArgumentError, "no mapping 'nothing'"),
        (("sp2hp", (), 2), ShapeError, "plan: shape"),
        (("sp2hp", (4, 6), 0), ShapeError, "0 ranks"),
        (("all_gather", (4, 6), 2, torch.float32, (3,)), ShapeError, "dim 3 is out of range"),
        (("all_gather", (4, 6), 2, torch.float32, (0, 1)), ArgumentError, "takes 1 dims, not 2"),
        (("all_to_all", (4, 6), 2, torch.float32, (0,)), ArgumentError, "takes 2 dims, not 1"),
        (("sp2hp", (4, 6), 2, torch.float32, (0,)), ArgumentError, "takes no dims"),
    ],
)
def test_what_cannot_be_run_cannot_be_explained(arguments: Any, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words.replace("(", r"\(")):
        explain(*arguments)


@pytest.mark.parametrize("name", ["NVIDIA Z", "CPU", "cuda:0", "", "x" * 5000, "\ud800", "a\nb"])
def test_a_device_that_nobody_knows_has_no_figures(name: str) -> None:
    with pytest.raises(ArgumentError, match="nothing is known of a device"):
        explain("sp2hp", (64, 64), 8, device=name)


def test_a_device_that_is_here_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_available", True), ("device_count", 1), ("get_device_name", "NVIDIA Z")):
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)
    assert explain("sp2hp", (64, 64), 8, device="NVIDIA Z").device == "NVIDIA Z"


@pytest.mark.parametrize(
    ("shape", "dtype", "sizes"),
    [
        ((7, 16), torch.bfloat16, (11, 5)),
        ((5, 130), torch.bfloat16, (64, 66)),
        ((3, 6), torch.bfloat16, (3, 3)),
        ((3, 8), torch.bfloat16, (4, 4)),  # a multiple of 8
        ((4, 66), torch.bool, (33, 33)),
        ((3, 12), torch.float32, (4, 8)),
        ((8, 1026), torch.bfloat16, (513, 513)),
        ((4, 9), torch.uint8, (4, 0, 5)),
        ((4, 24), torch.uint8, (1, 22, 1)),
    ],
    ids=str,
)
def test_blocks_that_nccl_copies_by_bytes_are_named(
    shape: tuple[int, ...], dtype: torch.dtype, sizes: tuple[int, ...]
) -> None:
    """The blocks of the wire that a pack of this tensor makes, whose addresses are no multiple of 16."""
    world = len(sizes)
    wire = ops.pack(torch.zeros(shape, dtype=dtype), 1, world, sizes)[0]
    starts = [shape[0] * sum(sizes[:rank]) * dtype.itemsize for rank in range(world)]
    assert starts[-1] + shape[0] * sizes[-1] * dtype.itemsize == wire.nbytes
    expected = tuple(rank for rank in range(world) if sizes[rank] and starts[rank] % 16)
    call = PlannedCall((), world, dtype, "cuda", None, DEFAULTS["cuda"], False)
    counts = tuple(shape[0] * size for size in sizes)
    assert call.misaligned(counts) == call.misaligned((16,) * world, counts) == expected
    assert replace(call, kind="cpu").misaligned(counts) == ()


def test_a_plan_says_which_blocks_are_misaligned() -> None:
    """Sent or received, forward and backward; none of a plain shape, and no other collective."""
    plan = explain("all_to_all_dims", (7, 16), 2, dims=(1, 0), sizes=(8, 8), out_sizes=(7, 3))
    assert plan.backward is not None
    found = {step.name: step.misaligned for step in (*plan.forward.steps, *plan.backward.steps)}
    assert found == {"pack": (), "all-to-all": (), "unpack": ()}
    odd = explain("all_to_all_dims", (7, 10), 2, dims=(1, 0), sizes=(5, 5), out_sizes=(7, 3))
    assert [step.misaligned for step in odd.forward.steps] == [(), (1,), ()]
    assert all(step.misaligned == () for step in explain("gather_sp", (7, 5), 2).forward.steps)


@pytest.mark.parametrize("kind", DEFAULTS)
def test_assumed_rates_are_indented_lines_of_80_columns(kind: str) -> None:
    """A plan of a resharding is printed by programs, without a console that wraps."""
    lines = str(DEFAULTS[kind]).splitlines()
    assert all(line.startswith("  ") and len(line) <= 80 for line in lines)
    assert " ".join(line.strip() for line in lines).endswith(", unless given)")
