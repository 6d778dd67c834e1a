"""CPU time and memory of one rank's plan against the number of ranks: the table and the curve of docs/scale.md.

Each figure is of one process of its own, which builds the layouts of all tensors and plans for the first, a middle and
the last rank; the slowest of the three counts. Memory is what Python and numpy allocate for the layouts and the plan.

    PYTHONPATH=.:kernels python bench/reshard_scale.py            # prints the table, writes docs/reshard_scale.svg
    PYTHONPATH=.:kernels python bench/reshard_scale.py --one Llama-3-70B 8192
"""

import json
import math
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from typing import NamedTuple

from bench.kept import keep
from bench.reshard_models import Case, items_of
from tritoncomm.reshard.api import BUCKET_BYTES
from tritoncomm.reshard.planner import plan_transfers

__all__ = ["CURVES", "Point", "case_of", "measured"]

CURVES = {"Llama-3-70B": (512, 2048, 8192, 65536), "DeepSeek-V3": (1024, 4096, 16384)}
NAMES = {"Llama-3-70B": "Llama-3-70B, TP8 PP8 to TP8", "DeepSeek-V3": "DeepSeek-V3, PP16 EP16 to TP32"}
PICTURE = Path(__file__).parents[1] / "docs" / "reshard_scale.svg"
WIDTH, HEIGHT, LEFT, TOP = 560, 260, 60, 20


class Point(NamedTuple):
    """One rank's plan: seconds of CPU time of the layouts and of the plan, memory, blocks and buckets."""

    layouts: float
    plan: float
    mebibytes: float
    blocks: int
    buckets: int


def case_of(model: str, ranks: int) -> Case:
    """The model on so many ranks, from training to inference on the same ranks."""
    training, inference = ((8, 8, 1), 8) if model == "Llama-3-70B" else ((1, 16, 16), 32)
    return Case(model, ranks, *training, ranks, inference, False)


def measured(model: str, ranks: int) -> Point:
    """Measure the plans of three ranks; time and memory in runs of their own, as counting memory takes time."""
    started = time.process_time()
    items = items_of(case_of(model, ranks))
    layouts, seconds, blocks, buckets = time.process_time() - started, [], 0, 0
    every = tuple(range(ranks))
    for position in (0, ranks // 2 + 1, ranks - 1):
        started = time.process_time()
        plan = plan_transfers(items, every, position, BUCKET_BYTES)
        seconds.append(time.process_time() - started)
        sides = [side for b in plan.buckets for side in (b.send, b.recv, b.staged, b.direct)]
        blocks, buckets = max(blocks, sum(len(side.tensor) for side in sides)), len(plan.buckets)
    tracemalloc.start()
    items = items_of(case_of(model, ranks))
    plan = plan_transfers(items, every, ranks // 2 + 1, BUCKET_BYTES)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()  # it slows down the plans of the next call
    del plan
    return Point(layouts, max(seconds), peak / 2**20, blocks, buckets)


def picture(points: dict[str, dict[int, Point]]) -> str:
    """Draw seconds of a plan against ranks, both in powers of ten, as SVG."""
    low, high = math.log10(min(map(min, points.values()))), math.log10(max(map(max, points.values())))

    def at(ranks: int, seconds: float) -> tuple[float, float]:
        x = LEFT + (math.log10(ranks) - low) / (high - low) * (WIDTH - LEFT - 20)
        return x, TOP + (1 - math.log10(seconds)) / 3 * (HEIGHT - TOP - 40)  # from 10 s down to 0.01 s

    text = '<text x="{:.0f}" y="{:.0f}" font-size="12" font-family="sans-serif">{}</text>'
    shapes = []
    for seconds in (0.01, 0.1, 1, 10):
        _, y = at(512, seconds)
        shapes += [f'<path d="M{LEFT} {y:.0f}H{WIDTH - 20}" stroke="#ccc"/>', text.format(8, y + 4, f"{seconds} s")]
    for ranks in sorted({ranks for row in points.values() for ranks in row}):
        x, y = at(ranks, 0.01)
        shapes.append(text.format(x - 16, y + 18, f"{ranks:,}"))
    for (model, row), colour in zip(points.items(), ("#0b6", "#06b"), strict=True):
        ends = [at(ranks, point.plan) for ranks, point in row.items()]
        line = "L".join(f"{x:.0f} {y:.0f}" for x, y in ends)
        shapes += [f'<path d="M{line}" stroke="{colour}" stroke-width="2" fill="none"/>']
        shapes.append(text.format(ends[0][0] + 4, ends[0][1] - 8, NAMES[model]))
    shapes.append(text.format(WIDTH // 2, HEIGHT - 6, "ranks"))
    body = "\n".join(shapes)
    return f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}">\n{body}\n</svg>\n'


def main() -> None:
    """Measure all points, each in a process of its own; print the table, keep it and write the picture."""
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(measured(sys.argv[2], int(sys.argv[3]))))
        return
    table = ["| model | ranks | layouts s | plan s | memory MiB | blocks | buckets |", "|---|" + "---:|" * 6]
    print(*table, sep="\n")
    points: dict[str, dict[int, Point]] = {}
    for model, sizes in CURVES.items():
        for ranks in sizes:
            command = [sys.executable, __file__, "--one", model, str(ranks)]
            output = subprocess.run(command, capture_output=True, text=True, check=True, timeout=600).stdout
            point = points.setdefault(model, {})[ranks] = Point(*json.loads(output))
            table.append(
                f"| {NAMES[model]} | {ranks:,} | {point.layouts:.2f} | {point.plan:.2f} | {point.mebibytes:.0f} | "
                f"{point.blocks:,} | {point.buckets} |"
            )
            print(table[-1], flush=True)
    keep("reshard_scale", table)
    PICTURE.write_text(picture(points))


if __name__ == "__main__":
    main()
