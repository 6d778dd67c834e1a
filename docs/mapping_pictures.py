"""Pictures of mappings of a 4 x 4 tensor on two ranks, drawn from their run, in docs/pictures and docs/wire.svg.

Every element is sent through the mapping as a number that says where it comes from: its place in the 4 x 4 tensor and
the rank whose memory it is in. What arrives, sums included, is read back from the numbers of the result, and drawn.
"""

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed import ProcessGroup

from docs.draw import COLORS
from tritoncomm import mappings, ops

SIZE, WORLD = 4, 2
BASE = 100  # numbers of rank 1 are as many times as large, so that the sum of both says what it was made of
EVEN, UNEVEN = (2, 2), (3, 1)

Call = Callable[[Tensor, ProcessGroup], Tensor]
Cell = tuple[str, tuple[int, ...]]  # row and column in the 4 x 4 tensor, the ranks whose values it has or is the sum of
Matrix = list[list[Cell]]


@dataclass(frozen=True)
class Case:
    """A mapping and what it takes.

    Attributes:
        call: the mapping.
        dim: along which the 4 x 4 tensor is sharded; None where every rank holds a 4 x 4 tensor.
        sizes: of that dim, on each rank.
        forward: what the picture says above it.
        backward: the same.
    """

    call: Call
    dim: int | None
    forward: str
    backward: str
    sizes: tuple[int, int] = EVEN


@dataclass(frozen=True)
class Trace:
    """Matrices that one rank held, in order of the run."""

    input: Matrix
    output: Matrix
    output_grad: Matrix
    input_grad: Matrix


@dataclass(frozen=True)
class Exchange:
    """Memory of one rank around the all-to-all of ``all_to_all_sp2hp``: the wire has a block for every rank."""

    input: Matrix
    wire: Matrix
    output: Matrix


def _rows_by_sizes(x: Tensor, group: ProcessGroup) -> Tensor:
    sent = [[1, 1], [2, 0]]  # by rank 0, by rank 1
    rank = group.rank()
    return mappings.all_to_all(group, x, [row[rank] for row in sent], sent[rank])


CASES: dict[str, Case] = {
    "copy_to_tensor_model_parallel_region": Case(
        mappings.copy_to_tensor_model_parallel_region, None, "identity", "all-reduce"
    ),
    "reduce_from_tensor_model_parallel_region": Case(
        mappings.reduce_from_tensor_model_parallel_region, None, "all-reduce", "identity"
    ),
    "scatter_to_tensor_model_parallel_region": Case(
        mappings.scatter_to_tensor_model_parallel_region, None, "split the last dim", "all-gather"
    ),
    "gather_from_tensor_model_parallel_region": Case(
        mappings.gather_from_tensor_model_parallel_region, 1, "all-gather the last dim", "split"
    ),
    "scatter_to_sequence_parallel_region": Case(
        mappings.scatter_to_sequence_parallel_region, None, "split dim 0", "all-gather"
    ),
    "gather_from_sequence_parallel_region": Case(
        lambda x, group: mappings.gather_from_sequence_parallel_region(x, group=group),
        0, "all-gather dim 0", "reduce-scatter",
    ),
    "gather_from_sequence_parallel_region_split": Case(
        lambda x, group: mappings.gather_from_sequence_parallel_region(x, False, group), 0, "all-gather dim 0", "split"
    ),
    "reduce_scatter_to_sequence_parallel_region": Case(
        mappings.reduce_scatter_to_sequence_parallel_region, None, "reduce-scatter dim 0", "all-gather"
    ),
    "all_gather_last_dim_from_tensor_parallel_region": Case(
        mappings.all_gather_last_dim_from_tensor_parallel_region, 1, "all-gather the last dim", "reduce-scatter"
    ),
    "reduce_scatter_last_dim_to_tensor_parallel_region": Case(
        mappings.reduce_scatter_last_dim_to_tensor_parallel_region, None, "reduce-scatter the last dim", "all-gather"
    ),
    "all_to_all_sp2hp": Case(mappings.all_to_all_sp2hp, 0, "all-to-all of columns", "all_to_all_hp2sp"),
    "all_to_all_hp2sp": Case(mappings.all_to_all_hp2sp, 1, "all-to-all of rows", "all_to_all_sp2hp"),
    "all_to_all": Case(_rows_by_sizes, 0, "all-to-all by split sizes", "the sizes swapped"),
    "all_to_all_dims": Case(
        lambda x, group: mappings.all_to_all_dims(x, 0, 1, group, scatter_sizes=UNEVEN),
        1, "all-to-all, dim 1 to dim 0", "dim 0 to dim 1",
    ),
    "all_gather_dim": Case(
        lambda x, group: mappings.all_gather_dim(x, 1, group, sizes=UNEVEN),
        1, "all-gather dim 1", "reduce-scatter", UNEVEN,
    ),
    "reduce_scatter_dim": Case(
        lambda x, group: mappings.reduce_scatter_dim(x, 1, group, sizes=UNEVEN),
        None, "reduce-scatter dim 1", "all-gather",
    ),
    "split_dim": Case(
        lambda x, group: mappings.split_dim(x, 1, group, sizes=UNEVEN), None, "split dim 1", "all-gather"
    ),
}  # fmt: skip


def run(group: ProcessGroup) -> dict[str, Trace]:
    """Traces of every mapping on this rank, one of two."""
    return {name: trace(case, group) for name, case in CASES.items()}


def trace(case: Case, group: ProcessGroup) -> Trace:
    """Run a mapping forward and backward on numbers that say where they come from."""
    rank = group.rank()
    places = torch.arange(SIZE * SIZE).view(SIZE, SIZE)
    local = places if case.dim is None else places.split(case.sizes, case.dim)[rank]
    x = numbered(local, rank).requires_grad_()
    out = case.call(x, group)
    output = cells(out)
    grad = numbered(torch.tensor([[int(place[0]) * SIZE + int(place[1]) for place, _ in row] for row in output]), rank)
    out.backward(grad)
    assert x.grad is not None
    return Trace(cells(x), output, cells(grad), cells(x.grad))


def exchange(group: ProcessGroup) -> Exchange:
    """Run ``all_to_all_sp2hp`` on this rank, one of two, and the pack that it begins with."""
    x = numbered(torch.arange(SIZE * SIZE).view(SIZE, SIZE).chunk(WORLD)[group.rank()], group.rank())
    wire, _, _ = ops.pack(x, 1, WORLD)
    return Exchange(cells(x), cells(wire.flatten(0, 1)), cells(mappings.all_to_all_sp2hp(x, group)))


def numbered(places: Tensor, rank: int) -> Tensor:
    """The number of every place, in the digits of a rank."""
    return (places.double() + 1) * BASE**rank


def cells(x: Tensor) -> Matrix:
    """Decode the numbers of a matrix."""
    return [[cell(int(value)) for value in row] for row in x.tolist()]


def cell(value: int) -> Cell:
    """Place and ranks of a number, or of a sum of the numbers that two ranks have for one place."""
    digits = {rank: value // BASE**rank % BASE for rank in range(WORLD)}
    ranks = tuple(rank for rank, digit in digits.items() if digit)
    (place,) = {digits[rank] - 1 for rank in ranks}
    return f"{place // SIZE}{place % SIZE}", ranks


PITCH, BOX, MARGIN, LABELS, BETWEEN = 22, 21, 8, 44, 30
SLOT = SIZE * PITCH
PANEL = 2 * SLOT + BETWEEN
TOP, STEP = 62, SLOT + 10
WIDTH = 2 * MARGIN + LABELS + 2 * PANEL + BETWEEN
HEIGHT = TOP + 2 * STEP
BLUE, ORANGE = COLORS[:WORLD]
STYLE = f"""<style>
text {{ font: 12px sans-serif; fill: #444 }}
.cell text {{ font-size: 13px; fill: white; text-anchor: middle }}
.title {{ font: bold 13px sans-serif; fill: #222 }}
.r0 {{ fill: {BLUE}; font-weight: bold }}
.r1 {{ fill: {ORANGE}; font-weight: bold }}
</style>
<defs>
<rect id="from0" width="{BOX}" height="{BOX}" rx="3" fill="{BLUE}"/>
<rect id="from1" width="{BOX}" height="{BOX}" rx="3" fill="{ORANGE}"/>
<g id="from01"><use href="#from0"/><path d="M{BOX - 1} 1V{BOX - 3}a2 2 0 0 1-2 2H1z" fill="{ORANGE}"/></g>
<path id="right" d="M0 0h14m-5-5l5 5-5 5" fill="none" stroke="#444" stroke-width="1.5"/>
</defs>"""


def draw(name: str, ranks: Sequence[Trace]) -> str:
    """The picture of a mapping: forward at the left, backward at the right, a rank below the other."""
    case, left = CASES[name], MARGIN + LABELS
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}">',
        f"<title>{name} on two ranks: forward {case.forward}, backward {case.backward}</title>",
        STYLE,
        f'<rect width="{WIDTH}" height="{HEIGHT}" rx="6" fill="#f7f7f8"/>',
    ]
    parts += [
        f'<text class="r{rank}" x="{MARGIN}" y="{TOP + rank * STEP + SLOT // 2 + 4}">rank {rank}</text>'
        for rank in range(WORLD)
    ]
    panels = [("forward", case.forward, "input", "output", ""), ("backward", case.backward, "input_grad",
              "output_grad", " transform='rotate(180)'")]  # fmt: skip
    for k, (title, words, first, second, turned) in enumerate(panels):
        x = left + k * (PANEL + BETWEEN)
        middle = x + SLOT + (BETWEEN - PITCH + BOX - 14) // 2
        shift = f"translate({middle + 14 * k} {TOP + STEP - 5})"
        parts.append(f'<text class="title" x="{x}" y="18">{title}</text>')
        parts.append(f'<text x="{x}" y="35">{words}</text>')  # a line of its own: fonts differ in width
        parts.append(f'<g transform="{shift}"><use href="#right"{turned}/></g>')
        for column, kind in ((x, first), (x + SLOT + BETWEEN, second)):
            parts.append(f'<text x="{column}" y="55">{kind.replace("_grad", " gradient")}</text>')
            for rank, one in enumerate(ranks):
                parts.append(_matrix(getattr(one, kind), column, TOP + rank * STEP, f"{kind}-{rank}"))
    return "\n".join([*parts, "</svg>", ""])


def draw_exchange(ranks: Sequence[Exchange]) -> str:
    """The picture of an exchange: input, wire and output from left to right, a rank below the other."""
    left, top, step, gap = MARGIN + LABELS, 46, SLOT + 10, 64
    columns = (left, left + SLOT + gap, left + 2 * SLOT + 2 * gap)
    width, height = columns[2] + SLOT, top + WORLD * step
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<title>all_to_all_sp2hp on two ranks: tokens, the wire in rank order, columns</title>",
        STYLE,
        f'<rect width="{width}" height="{height}" rx="6" fill="#f7f7f8"/>',
    ]
    titles = (("before", "my tokens"), ("wire", "in rank order"), ("after", "my columns"))
    for x, (title, words) in zip(columns, titles, strict=True):
        parts.append(f'<text class="title" x="{x}" y="18">{title}</text><text x="{x}" y="36">{words}</text>')
    for x, word in zip(columns[1:], ("pack", "all-to-all"), strict=True):
        shift = f"translate({x - gap // 2 - 7} {top + step - 5})"
        parts.append(f'<g transform="{shift}"><use href="#right"/></g>')
        parts.append(f'<text x="{x - gap // 2}" y="{top + step - 14}" text-anchor="middle">{word}</text>')
    for rank, one in enumerate(ranks):
        y = top + rank * step
        parts.append(f'<text class="r{rank}" x="{MARGIN}" y="{y + SLOT // 2 + 4}">rank {rank}</text>')
        for x, kind in zip(columns, ("input", "wire", "output"), strict=True):
            parts.append(_matrix(getattr(one, kind), x, y, f"{kind}-{rank}"))
        for peer in range(WORLD):
            at = y + (2 * peer + 1) * SLOT // (2 * WORLD) + 4
            parts.append(f'<text x="{columns[1] + SLOT // 2 + 6}" y="{at}">to {peer}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _matrix(rows: Matrix, x: int, y: int, name: str) -> str:
    boxes = [
        f'<g transform="translate({x + j * PITCH} {y + i * PITCH})"><use href="#from{"".join(map(str, ranks))}"/>'
        f'<text x="{BOX / 2}" y="15">{label}</text></g>'
        for i, row in enumerate(rows)
        for j, (label, ranks) in enumerate(row)
    ]
    return "\n".join([f'<g class="cell" id="{name}">', *boxes, "</g>"])


def _rank_main(rank: int, store: str, traces: Any) -> None:
    dist.init_process_group("gloo", store=dist.FileStore(store, WORLD), rank=rank, world_size=WORLD)
    assert dist.group.WORLD is not None
    traces[rank] = run(dist.group.WORLD), exchange(dist.group.WORLD)
    dist.destroy_process_group()


def main() -> None:
    """Run every mapping on two ranks and write the pictures."""
    folder = Path(__file__).with_name("pictures")
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, mp.Manager() as manager:
        traces = manager.dict()
        mp.spawn(_rank_main, args=(str(Path(temporary) / "store"), traces), nprocs=WORLD)
        for name in CASES:
            (folder / f"{name}.svg").write_text(draw(name, [traces[rank][0][name] for rank in range(WORLD)]))
        (folder.parent / "wire.svg").write_text(draw_exchange([traces[rank][1] for rank in range(WORLD)]))


if __name__ == "__main__":
    main()
