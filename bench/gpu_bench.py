"""The kernels on one GPU: share of the copy roof, and against what torch code does for the same step today.

Run as ``make gpu-bench``. The roof is a contiguous ``dst.copy_(src)`` that reads and writes as many bytes, measured in
the same rounds; sums and "statistics" mostly read, and their roof is a kernel that only reads as many bytes. Times are
CUDA events around one call with the L2 cache flushed before it, or after an untimed call in rows that end in "warm".
A share of the roof misses its target by more than its spread, from three times the rounds where the spread decides.
"statistics" and "gradient" are the two kernels of the cross entropy over a sharded vocabulary; a run is a row of the
logits, and torch's formulations compute in float32 as they do. "copy-in" packs several tensors of equal size into one
wire and "copy-out" unpacks it, as FSDP2 does around its collectives: ours and FSDP2's ops in one launch; "launch each"
is our kernel for a single tensor, one after the other, "foreach" is ``_foreach_copy_`` of all shards. "mixed-in" and
"mixed-out" are the same of tensors of many sizes: shards of 4 KiB to 8 MiB, 1,000 in all; "mixed-copy" copies half of
the columns of each into a tensor of its own, as a resharding does with what stays on the rank. "gather rows" and
"scatter rows" copy rows by an index, a permutation, as before and after a dispatch of tokens. "sum rows" adds up the
``world`` rows of every token times weights, as behind experts at the shapes of DeepSeek-V3 and Qwen3-30B; "scale rows"
and "dot rows" are its gradients, "scale and dot" both at once. "index_add" is torch's deterministic one; "bmm" and
"view + sum" gather first. "sort owners" and "sort buckets" find the places of 8 ids of every token, by rank and by
expert; "torch" is torch's path. "padded" unpacks shards of which every second one is an element shorter, each padded to
the longest, as behind a gather of almost equal parts.
"split + cat" is what Megatron-LM does, and DTensor where it gathers or reduce-scatters; "movedim" is DTensor's
exchange, "compiled" the same by torch.compile (in some sweeps; compiling is not timed); "chunk + contiguous" is
ColossalAI's way to pack. Rows that begin with "host" are the host's time to enqueue one small call, by the host's
clock; "floor" is Triton's C launcher with ready arguments, the least that a launch costs there. "in row order" is our
pack of runs that are no multiple of 32 bytes as other runs are packed, row by row. Results go to $OUT, or to
``bench/results/<device>/``, after every row. ``--dry`` runs everything but the GPU on the CPU with TRITON_INTERPRET=1
and tiny sizes; its times mean nothing and are not written as results. Exits 1 when results differ, 2 without a CUDA
device.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import triton
import triton.language as tl
import tritoncomm_kernels as kernels
from torch import Tensor
from tritoncomm_kernels import Copies, Segments, cross_entropy, torch_path

from bench.bench_launch import ready, seen
from bench.device import Call, Device, gpu_main
from bench.formulations import OF_LISTS, PEERS, Lists, compiled, exp_scatter, logsumexp_gather
from bench.harness import Clock, Part, Row, Samples
from bench.report import GPU_HOST, above_floor, misses_roof
from bench.timing import figures, quantile
from tritoncomm.core import ops
from tritoncomm.core.eager import padded_pass
from tritoncomm.core.passes import Pass

MIB = 2**20
TARGET = {"pack": 0.95, "unpack": 0.95, "reduce": 0.90, "copy-in": 0.90, "copy-out": 0.90}
TARGET |= {"mixed-in": 0.90, "mixed-out": 0.90, "mixed-copy": 0.90}
READING = {"reduce", "statistics", "sum rows", "dot rows"}  # the roof is a kernel that only reads
MIXED, SMALLEST, LARGEST = {"mixed-in", "mixed-out", "mixed-copy"}, 4096, 8 * MIB
ENTROPY = {"statistics", "gradient"}
ROWS = {"gather rows", "scatter rows"}
LISTS = {"sum rows", "scale rows", "dot rows", "scale and dot"}
SORTS = {"sort owners", "sort buckets"}
COMPILED = {"run", "dtype", "cast"}  # the sweeps in which torch.compile is a peer; a compilation takes seconds


@dataclass(frozen=True)
class Case:
    """One point: ``nbytes`` in runs of ``run_bytes`` for ``world`` ranks, or that many parts of it to sum.

    Of the cross entropy: logits in rows of ``run_bytes``, a shard of the vocabulary of ``world`` ranks. Of a copy-in or
    copy-out: as many tensors as there would be rows. Of lists of rows: ``world`` rows of ``run_bytes`` in each.
    """

    op: str
    sweep: str
    nbytes: int
    run_bytes: int
    world: int
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    is_warm: bool = False

    @property
    def label(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        kind += f">{str(self.out_dtype).removeprefix('torch.')}" if self.out_dtype else ""
        kind += " warm" * self.is_warm
        return f"{self.op} {self.nbytes / MIB:g} MiB run {self.run_bytes} world {self.world} {kind}"

    @property
    def is_compiled(self) -> bool:
        return self.op in ("pack", "unpack") and self.sweep in COMPILED

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
        for mib in (1, 4, 16):
            yield Case(op, "warm", mib * MIB, 512, 8, is_warm=True)
        for world in (2, 4, 16, 32, 64):
            yield Case(op, "world", 64 * MIB, 512, world)
        for run in (144, 200, 100, 1026, 24, 72):  # 16, 8, 4, 2, 8 and 8 bytes per access
            yield Case(op, "alignment", 64 * MIB, run, 8)
        yield Case(op, "alignment", 64 * MIB, 1023, 8, torch.bool)
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
    for op in ("copy-in", "copy-out"):  # 8 and 128 tensors
        for run in (MIB, MIB // 16):
            yield Case(op, "tensors", 64 * MIB, run, 8)
    yield Case("copy-in", "tensors", 64 * MIB, MIB, 8, torch.bfloat16, torch.float32)
    for op in ("mixed-in", "mixed-out", "mixed-copy"):  # a run is the mean of the shards of 125 tensors
        yield Case(op, "tensors", 125 * 8 * 1099776, 1099776, 8)
    for run in (512, 4096):
        yield Case("padded", "padding", 64 * MIB, run, 8)
    for op in ("gather rows", "scatter rows"):
        for run in (256, 4096, 14336):
            yield Case(op, "rows", 256 * MIB // run * run, run, 1)
    for op, world in (("sort owners", 8), ("sort buckets", 8), ("sort buckets", 1)):  # 8 of 256 experts
        yield Case(op, "ids", 4096 * 8 * 8, 64, world, torch.int64)
    for op in ("sum rows", "scale rows", "dot rows", "scale and dot"):  # 4096 tokens of 8 experts
        for hidden in (7168, 2048):
            yield Case(op, "experts", 4096 * 8 * 2 * hidden, 2 * hidden, 8)
    yield Case("pack", "cast", 64 * MIB, 1024, 8, torch.float32, torch.bfloat16)
    yield Case("unpack", "cast", 64 * MIB, 1024, 8, torch.bfloat16, torch.float32)


def shrunk(case: Case) -> Case:
    """Shrink the case for the interpreter."""
    run = min(case.run_bytes, 2048)
    if case.op in MIXED:
        return Case(case.op, case.sweep, 12 * run * case.world, run, case.world, case.dtype)
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
    """Checked calls to time: ours and the peers by name, the bytes ours moves, and the peers that were wrong."""

    calls: dict[str, Call]
    moved: int
    wrong: list[str] = field(default_factory=list)

    def add(self, case: Case, peers: dict[str, Call], check: Callable[[Any], None]) -> None:
        """Take the peers that run and agree; one that does not is reported and left out."""
        for name, call in peers.items():
            try:
                result = call()
            except Exception as error:  # a dtype or size that torch has no kernel for, or no compiler
                print(f"{case.label}: {name} left out: {type(error).__name__}: {str(error).strip().splitlines()[:1]}")
                continue
            try:
                check(result)
            except AssertionError as error:
                self.wrong.append(f"{case.label}: {name}: {error}")
                continue
            self.calls[name] = call


def agree(got: Tensor | Sequence[Tensor], want: Tensor) -> None:
    """Equal bits; a result in several tensors is concatenated."""
    kind = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[want.dtype.itemsize]
    parts = [got] if isinstance(got, Tensor) else got
    assert all(part.dtype is want.dtype for part in parts), "another dtype"
    found = torch.cat([part.reshape(-1).view(kind) for part in parts])
    assert torch.equal(found, want.reshape(-1).view(kind)), "other bits"


def prepare(case: Case, device: Device) -> Prepared:
    if case.op in ENTROPY:
        return prepare_entropy(case, device)
    if case.op == "mixed-copy":
        return prepare_copies(case, device.device)
    if case.op in MIXED:
        return prepare_mixed(case, device.device)
    if case.op in ROWS:
        return prepare_rows(case, device.device)
    if case.op in SORTS:
        return prepare_sorts(case, device.device)
    if case.op in LISTS:
        return prepare_lists(case, device.device)
    if case.op == "padded":
        return prepare_padded(case, device.device)
    return prepare_reduce(case, device.device) if case.op == "reduce" else prepare_copy(case, device)


def prepare_copy(case: Case, device: Device) -> Prepared:
    """pack: the columns of every rank become its block. unpack: the inverse. copy-in, copy-out: of several tensors."""
    world, run = case.world, case.run_bytes // case.dtype.itemsize
    outer = max(1, case.nbytes // (case.run_bytes * world))
    out_dtype = case.out_dtype or case.dtype
    packs = case.op in ("pack", "copy-in")
    shapes = ((outer, world * run), (world, outer, run))[:: 1 if packs else -1]
    source = filled(shapes[0], case.dtype, device.device)
    target, want = (torch.empty(shapes[1], dtype=out_dtype, device=device.device) for _ in range(2))
    (torch_path.pack if packs else torch_path.unpack)(source, want)
    given: Any = source
    if case.op == "copy-in":
        given = [row.clone() for row in source]
    result: Any = [torch.empty_like(row) for row in target] if case.op == "copy-out" else target
    table = segments([run] * outer, world, out_dtype if packs else case.dtype)
    prepared = Prepared({"ours": ours(case.op, given, result, table)}, 0)
    prepared.moved = prepared.calls["ours"]()
    agree(result, want)
    peers: dict[str, Call] = {name: partial(peer, given, world, out_dtype) for name, peer in PEERS[case.op].items()}
    if case.is_compiled:
        peers["compiled"] = compiled(PEERS[case.op]["movedim"], device.dry, given, world, out_dtype)
    if case.op == "pack" and case.sweep == "alignment":
        peers["in row order"] = lambda: again(
            target, partial(kernels.pack, source, target, config=row_tile(case, outer))
        )
    if case.op in ("copy-in", "copy-out"):
        peers |= {name: partial(again, result, call) for name, call in one_by_one(case.op, given, result).items()}
    prepared.add(case, peers, lambda got: agree(got, want))
    return prepared


def row_tile(case: Case, outer: int) -> kernels.Config:
    """The tile of a pack in the order of the rows, which a named tile always takes."""
    return kernels.config_for("pack", math.gcd(case.run_bytes, 16), outer, case.run_bytes * case.world)


def segments(runs: Sequence[int], world: int, dtype: torch.dtype) -> Segments:
    """Tensors of ``world`` shards of ``runs`` elements each, and a wire of that dtype in rank order."""
    starts, size = [0, *accumulate(runs)], dtype.itemsize
    rows = [
        (i, w * run, 1, run, run, (w * starts[-1] + start) * size)
        for w in range(world)
        for i, (run, start) in enumerate(zip(runs, starts, strict=False))
    ]
    return Segments(rows, [dtype] * len(runs))


def mixed_runs(nbytes: int, world: int, mean: int, itemsize: int) -> list[int]:
    """Elements of the shards of as many tensors as have that mean, log-uniform and no power of two."""
    count = max(1, nbytes // (mean * world))
    small, large = (SMALLEST, LARGEST) if mean > SMALLEST else (mean // 8, mean * 4)
    ratio = (large / small) ** (1 / max(count - 1, 1))
    return [int(small * ratio**i) // (8 * itemsize) * 8 for i in range(count)]


def prepare_mixed(case: Case, device: torch.device) -> Prepared:
    """Tensors of many sizes into one wire in rank order, or out of it: in one launch, and as torch does it."""
    world, dtype = case.world, case.dtype
    runs = mixed_runs(case.nbytes, world, case.run_bytes, dtype.itemsize)
    table = segments(runs, world, dtype)
    params = [filled((world * run,), dtype, device) for run in runs]
    shards = [param.view(world, run) for param, run in zip(params, runs, strict=True)]
    want = torch.cat(shards, 1)
    blocks = list(want.split(runs, 1))
    if case.op == "mixed-in":
        wire = torch.empty_like(want)
        calls: dict[str, Call] = {"ours": lambda: kernels.gather_segments(params, wire, table)}
        parts = list(wire.split(runs, 1))
        pairs = [(x[None], part[:, None]) for x, part in zip(params, parts, strict=True)]
        peers: dict[str, Call] = {
            "split + cat": lambda: torch.cat(shards, 1),
            "FSDP2's op": lambda: torch._chunk_cat(params, 0, world, out=wire),  # type: ignore
            "launch each": lambda: again(wire, lambda: [kernels.pack(row, block) for row, block in pairs]),
            "foreach": lambda: again(wire, lambda: torch._foreach_copy_(parts, shards)),  # type: ignore
        }
        result: Any = wire
    else:
        result = [torch.empty_like(param) for param in params]
        outs = [x.view(world, run) for x, run in zip(result, runs, strict=True)]
        calls = {"ours": lambda: kernels.scatter_segments(want, result, table)}
        pairs = [(x[None], part[:, None]) for x, part in zip(result, blocks, strict=True)]
        peers = {
            "chunk + contiguous": lambda: [x.contiguous() for x in want.split(runs, 1)],
            "FSDP2's op": lambda: again(result, lambda: torch.split_with_sizes_copy(want, runs, 1, out=outs)),
            "launch each": lambda: again(result, lambda: [kernels.unpack(block, row) for row, block in pairs]),
            "foreach": lambda: again(result, lambda: torch._foreach_copy_(outs, blocks)),  # type: ignore
        }
    expected = want if case.op == "mixed-in" else torch.cat(params)
    prepared = Prepared(calls, 0)
    prepared.moved = calls["ours"]()
    agree(result, expected)
    prepared.add(case, peers, lambda got: agree(got, expected))
    return prepared


def prepare_copies(case: Case, device: torch.device) -> Prepared:
    """The second half of the columns of every tensor, in one launch and as torch does it."""
    world, dtype = case.world, case.dtype
    runs = mixed_runs(case.nbytes, world, case.run_bytes, dtype.itemsize)
    tensors = [filled((world, 2 * run), dtype, device) for run in runs]
    halves = [x[:, run:] for x, run in zip(tensors, runs, strict=True)]
    want, result = [x.contiguous() for x in halves], [torch.empty_like(x) for x in halves]
    copies = Copies([(i, run, world, run, 2 * run, 0) for i, run in enumerate(runs)], [dtype] * len(runs))
    pairs = list(zip(result, halves, strict=True))
    prepared = Prepared({"ours": lambda: kernels.copy_segments(tensors, result, copies)}, 0)
    prepared.moved = prepared.calls["ours"]()
    agree(result, torch.cat([x.view(-1) for x in want]))
    peers: dict[str, Call] = {
        "contiguous": lambda: [x.contiguous() for x in halves],
        "launch each": lambda: again(result, lambda: [kernels.pack(x, out[None]) for out, x in pairs]),
        "foreach": lambda: again(result, lambda: torch._foreach_copy_(result, halves)),  # type: ignore
    }
    prepared.add(case, peers, lambda got: agree(got, torch.cat([x.view(-1) for x in want])))
    return prepared


def prepare_padded(case: Case, device: torch.device) -> Prepared:
    """Shards that end in padding into rows, ours in one launch by a table."""
    world, run = case.world, case.run_bytes // case.dtype.itemsize
    outer = max(1, case.nbytes // (case.run_bytes * world))
    sizes = tuple([run - w % 2 for w in range(world)])
    wire = filled((world, outer, run), case.dtype, device)
    shards = [shard[:, :size] for shard, size in zip(wire, sizes, strict=True)]
    want = torch.cat(shards, 1)
    out, unpack = torch.empty_like(want), padded_pass(tuple(want.shape), case.dtype, 1, sizes)
    assert isinstance(unpack, Pass)
    table = unpack.table
    assert table is not None
    prepared = Prepared({"ours": lambda: kernels.scatter_segments(wire.view(-1), [out], table)}, 0)
    prepared.moved = prepared.calls["ours"]()
    agree(out, want)
    prepared.add(case, {"split + cat": lambda: torch.cat(shards, 1)}, lambda got: agree(got, want))
    return prepared


def prepare_rows(case: Case, device: torch.device) -> Prepared:
    """Rows of ``run_bytes`` by a permutation of them, and back."""
    row = case.run_bytes // case.dtype.itemsize
    x = filled((case.nbytes // case.run_bytes, row), case.dtype, device)
    index = torch.randperm(len(x), device=device)
    out = torch.empty_like(x)
    gathers = case.op == "gather rows"
    want = x.index_select(0, index) if gathers else torch.empty_like(x).index_copy_(0, index, x)
    copy = kernels.gather_rows if gathers else kernels.scatter_rows
    prepared = Prepared({"ours": lambda: copy(x, index, out)}, 0)
    prepared.moved = prepared.calls["ours"]()
    agree(out, want)
    peers: dict[str, Call] = (
        {
            "index_select": lambda: torch.index_select(x, 0, index, out=out),
            "x[index]": lambda: x[index],
        }
        if gathers
        else {"index_copy_": lambda: out.index_copy_(0, index, x)}
    )
    prepared.add(case, peers, lambda got: agree(got, want))
    return prepared


def prepare_lists(case: Case, device: torch.device) -> Prepared:
    """Every token's results of its experts, in the order of the experts: their weighted sum, and its gradients."""
    slots, hidden = case.world, case.run_bytes // case.dtype.itemsize
    tokens = case.nbytes // case.run_bytes // slots
    x, y = (filled((rows, hidden), case.dtype, device) for rows in (tokens, tokens * slots))
    weights = torch.rand(tokens, slots, device=device)
    pair = torch.randperm(tokens * slots, device=device)
    lists = Lists(x, y, weights, pair, pair.argsort().view(tokens, slots))
    if case.op == "sum rows":
        found: Tensor = torch.empty_like(x)
        calls: dict[str, Call] = {"ours": lambda: kernels.sum_rows(y, lists.index, weights, found)}
    elif case.op == "scale and dot":
        found, dots = torch.empty_like(y), torch.zeros_like(weights)
        calls = {"ours": lambda: kernels.scale_dot_rows(x, y, pair, weights, found, dots)}
    elif case.op == "scale rows":
        found = torch.empty_like(y)
        calls = {"ours": lambda: kernels.scale_rows(x, pair, weights, found)}
    else:
        found = torch.empty_like(weights)
        calls = {"ours": lambda: kernels.dot_rows(x, y, pair, found)}
    prepared = Prepared(calls, 0)
    prepared.moved = calls["ours"]()
    # Others multiply in bf16, and add up to 8 products there: half a unit of the last place for each.
    bounds = {"rtol": 2e-2, "atol": 2e-1} if case.op == "sum rows" else {"rtol": 2e-2, "atol": 2e-2 * hidden**0.5}
    peers: dict[str, Call] = {name: partial(peer, lists) for name, peer in OF_LISTS[case.op].items()}
    prepared.add(case, peers, lambda got: torch.testing.assert_close(got, found, **bounds))
    return prepared


def prepare_sorts(case: Case, device: torch.device) -> Prepared:
    """Eight ids of every token out of 256, sorted by rank, or by the experts of the first rank."""
    tokens, k, number = max(case.nbytes // case.run_bytes, 1), 8, 256
    ids = torch.rand(tokens, number, device=device).topk(k).indices
    local, counts = number // case.world, ids.new_empty(case.world, 4)
    pairs = int((ids < local).sum())

    def sort(module: Any) -> Tensor:
        """Return the sorted tokens, undefined behind those that the counts say, or the pairs."""
        if case.op == "sort buckets":
            return module.sort_by_bucket(ids, 0, local, number, pairs).pairs
        return module.sort_by_owner(ids, local, 0, counts).lines

    results = sort(kernels), sort(torch_path)
    length = pairs if case.op == "sort buckets" else int(counts[:, 0].sum())
    agree(results[0][:length].long(), results[1][:length])
    calls: dict[str, Call] = {"ours": lambda: sort(kernels), "torch": lambda: sort(torch_path)}
    return Prepared(calls, tokens * k * (2 * ids.itemsize + 8))


def ours(op: str, source: Any, target: Any, table: Segments) -> Call:
    """Our kernel on these tensors, one launch; says the bytes it moves."""
    if op == "pack":
        return lambda: kernels.pack(source, target)
    if op == "unpack":
        return lambda: kernels.unpack(source, target)
    if op == "copy-in":
        return lambda: kernels.gather_segments(source, target, table)
    return lambda: kernels.scatter_segments(source, target, table)


def one_by_one(op: str, source: Any, target: Any) -> dict[str, Call]:
    """Peers for several tensors: one launch of our kernel for each, and ``_foreach_copy_``."""
    packs = op == "copy-in"
    many, wire = (source, target) if packs else (target, source)
    blocks = [wire[:, i : i + 1] for i in range(len(many))]
    shards = [param.view(len(wire), -1) for param in many]
    lists = ([block[:, 0] for block in blocks], shards)[:: 1 if packs else -1]
    if packs:
        pairs = [(param[None], block) for param, block in zip(many, blocks, strict=True)]
        call: Call = lambda: [kernels.pack(param, block) for param, block in pairs]  # noqa: E731
    else:
        pairs = [(block, param[None]) for param, block in zip(many, blocks, strict=True)]
        call = lambda: [kernels.unpack(block, param) for block, param in pairs]  # noqa: E731
    return {"launch each": call, "foreach": lambda: torch._foreach_copy_(*lists)}  # type: ignore


def again(target: Any, call: Call) -> Any:
    """Call, and hand over what was written."""
    call()
    return target


def prepare_reduce(case: Case, device: torch.device) -> Prepared:
    length = max(1, case.run_bytes // case.dtype.itemsize)
    out_dtype = case.out_dtype or case.dtype
    wire = filled((case.world, length), case.dtype, device)
    out, want = (torch.empty(length, dtype=out_dtype, device=device) for _ in range(2))
    wide = case.dtype if case.out_dtype is None else torch.promote_types(case.dtype, out_dtype)
    prepared = Prepared({"ours": lambda: kernels.reduce(wire, out)}, 0)
    prepared.moved = prepared.calls["ours"]()
    torch_path.reduce(wire, want)
    agree(out, want)
    peers: dict[str, Call] = {"sum": lambda: wire.sum(0, dtype=wide).to(out_dtype)}
    prepared.add(case, peers, lambda got: torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2))
    return prepared


def prepare_entropy(case: Case, device: Device) -> Prepared:
    """The statistics of every row, or the gradient of the logits; about one target in ``world`` is in this shard."""
    cols = case.run_bytes // case.dtype.itemsize
    rows, place = case.nbytes // case.run_bytes, device.device
    x = filled((rows, cols), case.dtype, place)
    target = torch.randint(cols * case.world, (rows,), device=place)
    target[0] = 0
    here = target < cols
    index, column = torch.where(here, target, -1), torch.where(here, target, 0)[:, None]
    hard, factor = torch.ones(rows, device=place), here.to(torch.float32)[:, None]
    if case.op == "statistics":
        found, name, peer = torch.empty(2, rows, device=place), "logsumexp + gather", logsumexp_gather
        arguments: tuple[Tensor, ...] = (x, column, factor)
        prepared = Prepared({"ours": lambda: cross_entropy.statistics(x, index, hard, None, found)}, 0)
    else:
        found, name, peer = torch.empty_like(x), "exp + scatter", exp_scatter
        lse, upstream = torch.logsumexp(x.float(), -1), torch.full((rows,), 1 / rows, device=place)
        arguments, total = (x, lse, column, factor, upstream), torch.ones(rows, device=place)
        prepared = Prepared(
            {"ours": lambda: cross_entropy.gradient(x, index, hard, None, total, lse, upstream, found)}, 0
        )
    prepared.moved = prepared.calls["ours"]()
    tolerance = 2e-2 if found.dtype is torch.bfloat16 else 1e-4
    bounds = {"rtol": tolerance, "atol": tolerance / (rows if case.op == "gradient" else 1)}
    peers: dict[str, Call] = {name: lambda: peer(*arguments), "compiled": compiled(peer, device.dry, *arguments)}
    prepared.add(case, peers, lambda got: torch.testing.assert_close(got, found, **bounds))
    return prepared


def measure(case: Case | str, device: Device, clock: Clock) -> Iterator[Row]:
    """The rows of host time; or one row of every provider, the roof among them, and ours as a share of it."""
    if isinstance(case, str):
        yield from launch_costs(device, clock.rounds)
        return
    case = shrunk(case) if device.dry else case
    prepared = prepare(case, device)
    only_reads = case.op in READING
    calls = {"roof": (device.reads if only_reads else device.copies)(prepared.moved), **prepared.calls}
    described = {
        "case": {**vars(case), "dtype": str(case.dtype), "out_dtype": str(case.out_dtype or case.dtype)},
        "moved": prepared.moved,
        "roof": "reads" if only_reads else "copy",
        "target": TARGET[case.op] if case.has_target else None,
    }
    samples = device.times(calls, clock.rounds, case.is_warm)
    row = of_roof(case.label, samples, described)
    if hangs_on_spread(row):
        for name, more in device.times(calls, 2 * clock.rounds, case.is_warm).items():
            samples[name] += more
        row = of_roof(case.label, samples, described)
    yield row
    if prepared.wrong:
        raise AssertionError("; ".join(prepared.wrong))
    if not device.dry:
        torch.cuda.empty_cache()


def of_roof(label: str, samples: Samples, described: dict[str, Any]) -> Row:
    """A row with ours as a share of the roof."""
    share = quantile(samples["roof"], 0.2) / quantile(samples["ours"], 0.2)
    return figures(label, samples, **described, share_of_roof=round(share, 3))


def hangs_on_spread(row: Row) -> bool:
    """Whether the share of the roof is within its spread of the target."""
    return row["target"] is not None and abs(row["share_of_roof"] - row["target"]) <= row["spread"]["roof"]


@triton.jit
def _plain_kernel(
    a_ptr, b_ptr, n0, n1, n2, n3, n4, n5, n6, n7, n8, n9, length, BLOCK: tl.constexpr
):  # fmt: skip
    """Launch a kernel with as many arguments as ours take, the ordinary way."""
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(b_ptr + offs, tl.load(a_ptr + offs, mask=offs < length), mask=offs < length)


def launch_costs(device: Device, rounds: int) -> list[Row]:
    """Rows of the host's microseconds to enqueue one small call; all of them from the same rounds."""
    rows = filled((16, 256), torch.float32, device.device)
    wire = torch.empty(4, 16, 64, device=device.device)
    flat = torch.empty(4096, device=device.device)
    numbers = tuple(range(3, 13))
    calls: dict[str, Call] = {
        "floor": ready(seen(lambda: kernels.pack(rows, wire)), rows, wire),
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
    peers = {name: samples.pop(name) for name in ("floor", "fn[grid](...)", "copy_", "split + cat")}
    return [
        figures(f"host, {name}", {"ours": ours, **peers}, us_above_floor=GPU_HOST[name])
        for name, ours in samples.items()
    ]


def missed(row: Row) -> list[str]:
    """Describe a share of the roof that is too small, or a host time too far above the floor."""
    if "us_above_floor" in row:
        above, most = above_floor(row), row["us_above_floor"]
        return [f"{row['row']}: {above:.1f} us above the floor, at most {most}"] if above > most else []
    share, spread = row["share_of_roof"], row["spread"]["roof"]
    text = f"{row['row']}: {share:.2f} of the roof, at least {row['target']} less a spread of {spread}"
    return [text] if misses_roof(row) else []


PART = Part(
    name="gpu_bench",
    cases=("host", *cases()),
    measure=measure,
    rounds=50,
    peer=None,
    targets=missed,
    budget_s=240,
)
if __name__ == "__main__":
    sys.exit(gpu_main(PART))
