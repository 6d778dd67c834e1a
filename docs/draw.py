"""Draws docs/address_map.svg, docs/experts.svg, docs/packages.svg, and of the committed figures docs/host_time.svg,
docs/ratios.svg and docs/memory.svg.

All have a background of their own, so that they can be read on dark pages.
"""

import ast
import html
import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]

COLORS = ("#4e79a7", "#b85c00", "#3f7f38")  # dark enough for white digits
CELL = 34


def cell(x: int, y: int, color: str, label: str) -> str:
    text = f'<text x="{x + CELL // 2}" y="{y + 22}" text-anchor="middle" font-size="12" fill="white">{label}</text>'
    box = f'<rect x="{x}" y="{y}" width="{CELL - 2}" height="{CELL - 2}" rx="4" fill="{color}"/>'
    return box + (text if label else "")


def note(x: int, y: int, text: str, size: int = 13) -> str:
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="#333">{text}</text>'


def draw(outer: int = 2, row: int = 8, world: int = 3) -> str:
    run = -(-row // world)
    parts = [note(20, 26, f"rows [outer={outer}, row={row}]", 14)]
    for o in range(outer):
        for c in range(row):
            parts.append(cell(20 + c * CELL, 40 + o * CELL, COLORS[c // run], f"{o}{c}"))
    parts.append(note(20, 136, f"wire [world={world}, outer={outer}, run={run}]", 14))
    for w in range(world):
        left = 20 + w * (run * CELL + 24)
        parts.append(note(left, 156, f"rank {w}"))
        for o in range(outer):
            for k in range(run):
                c = w * run + k
                color, label = (COLORS[w], f"{o}{c}") if c < row else ("#ccc", "")
                parts.append(cell(left + k * CELL, 164 + o * CELL, color, label))
    parts.append(note(20, 256, "wire[w, o, k] = rows[o, w*run + k] where w*run + k &lt; row"))
    parts.append(note(20, 274, "grey is padding, only on the wire"))
    return picture(40 + world * (run * CELL + 24), 290, parts)


def picture(width: int, height: int, parts: list[str]) -> str:
    body = "\n".join([f'<rect width="{width}" height="{height}" fill="white"/>', *parts])
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-family="sans-serif">'
        f"\n{body}\n</svg>\n"
    )


ROUTING = (((0, 1), (1, 2), (2, 3)), ((0, 3), (2, 3), (0, 1)))  # experts of each token of two ranks with two each


def draw_experts() -> str:
    """Tokens of two ranks, the rows between them, the rows of every expert, and the parts of each token."""
    tokens = [(rank, i, ids) for rank, each in enumerate(ROUTING) for i, ids in enumerate(each)]
    columns, height, top = (70, 220, 390, 540), 3 * CELL + 28, 60
    titles = (
        ("tokens", "and their experts"), ("dispatch", "once for each rank"), ("by_expert", "rows of each expert"),
        ("combine", "parts, in rank order"),
    )  # fmt: skip
    parts = []
    for x, (title, words) in zip(columns, titles, strict=True):
        parts += [note(x, 24, title, 14), note(x, 44, words, 12)]
    for here in range(2):
        y = top + here * height
        parts.append(note(12, y + 20, f"rank {here}"))
        # Rows from the other rank, then those of this one.
        rows = sorted((token for token in tokens if any(e // 2 == here for e in token[2])), key=lambda t: t[0] == here)
        arriving = [token for token in rows if token[0] != here]
        for i, ids in enumerate(ROUTING[here]):
            parts.append(cell(columns[0], y + i * CELL, COLORS[here], f"{here}{i}"))
            parts.append(note(columns[0] + CELL + 6, y + i * CELL + 21, f"{ids[0]}, {ids[1]}"))
            owners = sorted({e // 2 for e in ids})
            for k, owner in enumerate(owners):
                x, middle = columns[3] + k * (2 * CELL + 20), y + i * CELL + 21
                parts.append(cell(x, y + i * CELL, COLORS[here], f"{here}{i}"))
                parts.append(note(x + CELL + 2, middle, f"of {owner}", 12))
                if k:
                    parts.append(note(x - 16, middle, "+"))
        parts.append(note(columns[1], y + CELL + 14, f"from rank {1 - here}", 12))
        for i, (rank, k, _) in enumerate(arriving):
            parts.append(cell(columns[1] + i * CELL, y, COLORS[rank], f"{rank}{k}"))
        for i, expert in enumerate((2 * here, 2 * here + 1)):
            parts.append(note(columns[2] - 14, y + i * (CELL + 8) + 21, f"{expert}"))
            mine = [token for token in rows if expert in token[2]]
            for j, (rank, k, _) in enumerate(mine):
                parts.append(cell(columns[2] + j * CELL, y + i * (CELL + 8), COLORS[rank], f"{rank}{k}"))
    crossing = [(token, e // 2) for token in tokens for e in token[2] if e // 2 != token[0]]
    words = f"{len(set(crossing))} rows cross; {len(crossing)} would, with a row for each expert"
    parts.append(note(12, top + 2 * height - 8, words))
    return picture(720, top + 2 * height + 8, parts)


def draw_host_time() -> str:
    """A bar for every mapping: host time of forward + backward, as a share of Megatron-LM's in the same run."""
    content = json.loads((ROOT / "bench" / "results" / "cpu" / "host_cost.json").read_text())
    rows = [row for row in content["rows"] if row["mode"] == "forward + backward"]
    ratios: dict[str, list[float]] = {}
    for row in rows:
        ratios.setdefault(row["row"].split(" ")[0], []).append(row["ratio"]["megatron"])
    means = {name: math.prod(each) ** (1 / len(each)) for name, each in ratios.items()}
    slower = sum(mean > 1 for mean in means.values())
    claim = f"{slower} of {len(means)} mappings cost" if slower else "Every mapping costs"
    left, scale, step, top = 370, 280, 22, 78
    bottom = top + step * len(means)
    parts = [note(20, 26, f"{claim} the host {'more' if slower else 'less'} than Megatron-LM's", 14)]
    parts.append(note(20, 44, "forward + backward, small CPU tensors, no-op group; mean over the cases of each", 12))
    parts.append(note(20, 60, "copy_to and reduce_from overwrite as Megatron-LM does (overwrite_inputs)", 12))
    for share in (0.0, 0.5, 1.0):
        x = left + round(share * scale)
        parts.append(f'<line x1="{x}" y1="{top - 6}" x2="{x}" y2="{bottom}" stroke="#333" stroke-dasharray="4 3"/>')
        parts.append(
            f'<text x="{x}" y="{bottom + 15}" text-anchor="middle" font-size="12" fill="#333">{share:g}</text>'
        )
    for i, (name, ratio) in enumerate(sorted(means.items(), key=lambda item: item[1])):
        y = top + step * i
        parts.append(note(20, y + 12, name, 12))
        parts.append(f'<rect x="{left}" y="{y}" width="{ratio * scale:.0f}" height="15" fill="{COLORS[0]}"/>')
        end = left + round(ratio * scale) - 6
        parts.append(f'<text x="{end}" y="{y + 12}" text-anchor="end" font-size="12" fill="white">{ratio:.2f}</text>')
    parts.append(note(left, bottom + 33, "host time, as a share of Megatron-LM's", 12))
    return picture(680, bottom + 46, parts)


RATIOS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)


def draw_ratios() -> str:
    """A dot for every row and peer of the parts that run on a CPU: our time over the peer's, on a logarithmic axis."""
    strips: dict[str, list[float]] = {}
    for path in sorted((ROOT / "bench" / "results" / "cpu").glob("*.json")):
        for row in json.loads(path.read_text())["rows"]:
            for peer, ratio in row["ratio"].items():
                if peer != "bare":  # a lower bound, no peer
                    strips.setdefault(f"{path.stem}, {peer}", []).append(ratio)
    left, width, step, top = 230, 430, 20, 66
    bottom = top + step * len(strips)

    def place(ratio: float) -> float:
        share = math.log(max(ratio, RATIOS[0]) / RATIOS[0]) / math.log(RATIOS[-1] / RATIOS[0])
        return left + width * min(share, 1.02)

    parts = [note(20, 26, "Our time over a peer's, every row measured on a CPU", 14)]
    parts.append(note(20, 44, "left of the line ours takes less time; a row per part and peer", 12))
    for ratio in RATIOS:
        style = "" if ratio == 1 else ' stroke-dasharray="2 4"'
        x = f"{place(ratio):.0f}"
        parts.append(f'<line x1="{x}" y1="{top - 8}" x2="{x}" y2="{bottom}" stroke="#333"{style}/>')
        parts.append(
            f'<text x="{x}" y="{bottom + 16}" text-anchor="middle" font-size="12" fill="#333">{ratio:g}</text>'
        )
    for i, (name, ratios) in enumerate(sorted(strips.items())):
        y = top + step * i + 4
        parts.append(note(20, y + 4, html.escape(name, quote=False), 12))
        for ratio in sorted(ratios):
            color = COLORS[1] if ratio > 1 else COLORS[0]
            parts.append(f'<circle cx="{place(ratio):.1f}" cy="{y}" r="4" fill="{color}" fill-opacity="0.5"/>')
    return picture(left + width + 30, bottom + 30, parts)


KINDS = {"weights": "#4e79a7", "optimizer": "#7a5195", "activations": "#3f7f38", "logits": "#b85c00"}


def draw_memory() -> str:
    """What a rank holds at the peak of a step: a Llama 8B by the formula, a small one also as measured."""
    from bench import memory  # imports torch

    rows = [row for row in json.loads(memory.FILE.read_text())["rows"] if row["run"]["length"] == 65_536]
    large = [memory.Run(ranks, 131_072, True) for ranks in (1, 2, 4, 8)]
    left, width, step = 110, 470, 24
    parts = [note(20, 26, "What each GPU holds at the peak of a training step", 14)]
    x = 20
    for name, color in KINDS.items():
        parts.append(f'<rect x="{x}" y="38" width="12" height="12" fill="{color}"/>')
        parts.append(note(x + 17, 49, name, 12))
        x += 105

    def bars(y: int, title: str, runs: list[Any], model: Any, most: float, measured: list[float]) -> int:
        parts.append(note(20, y, title, 12))
        for i, run in enumerate(runs):
            held, top, at = memory.needed(model, run), y + 10 + step * i, float(left)
            parts.append(note(20, top + 13, f"{run.ranks} GPU{'s' * (run.ranks > 1)}", 12))
            for name, color in KINDS.items():
                size = getattr(held, name) / memory.GIB / most * width
                parts.append(f'<rect x="{at:.1f}" y="{top}" width="{size:.1f}" height="16" fill="{color}"/>')
                at += size
            parts.append(note(round(at) + 8, top + 13, f"{held.peak() / memory.GIB:.0f} GiB", 12))
            for total in measured[i : i + 1]:
                place = left + total / memory.GIB / most * width
                mark = f'x1="{place:.1f}" x2="{place:.1f}" y1="{top - 3}" y2="{top + 19}"'
                parts.append(f'<line {mark} stroke="black" stroke-width="2"/>')
        return y + 10 + step * len(runs) + 22

    title = "Llama 8B, 131,072 positions, layers checkpointed, weights sharded over all GPUs: computed"
    y = bars(76, title, large, memory.LLAMA_8B, 330, [])
    runs = [memory.Run(**row["run"]) for row in rows]
    shards = [memory.needed(memory.LARGE, run).weights for run in runs]
    totals = [row["bytes"]["optimizer"] + row["bytes"]["peak"] + shard for row, shard in zip(rows, shards, strict=True)]
    title = "The same formula (bars) and an H200 (black marks): 0.75 billion weights, 65,536 positions"
    y = bars(y, title, runs, memory.LARGE, 135, totals)
    parts.append(note(20, y, "Not in it: NCCL's buffers, workspaces of libraries, fragmentation; with gradient", 12))
    parts.append(note(20, y + 16, "accumulation, the gradients, as large as the weights", 12))
    return picture(680, y + 30, parts)


def package_imports() -> dict[str, set[str]]:
    """Return what each package or module right below ``tritoncomm`` imports, and the kernels, as the files say.

    Imports for type checkers alone are left out, and ``__init__``, which stands for the whole.
    """
    graph: dict[str, set[str]] = {"tritoncomm_kernels": set()}
    for path in sorted((ROOT / "tritoncomm").rglob("*.py")):
        name = path.relative_to(ROOT / "tritoncomm").parts[0].removesuffix(".py")
        if name in ("__init__", "__main__"):
            continue
        statements: list[ast.AST] = [ast.parse(path.read_text())]
        while statements:
            node = statements.pop()
            if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
                continue
            statements += ast.iter_child_nodes(node)
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            if isinstance(node, ast.ImportFrom):
                names = [f"{node.module}.{each}" for each in names]
            for parts in (each.split(".") for each in names):
                if parts[0] == "tritoncomm_kernels":
                    graph.setdefault(name, set()).add(parts[0])
                elif parts[0] == "tritoncomm" and len(parts) > 1:
                    graph.setdefault(name, set()).add(parts[1])
        graph.setdefault(name, set())
    return {name: {each for each in imports if each in graph and each != name} for name, imports in graph.items()}


BOX, GAP, FLOOR = 106, 14, 74


def draw_packages() -> str:
    """A box for each package, above all that it imports; lines to those that it does not also reach by another one."""
    graph = package_imports()
    floors: dict[str, int] = {}
    below: dict[str, set[str]] = {}

    def visit(name: str) -> int:
        if name not in floors:
            floors[name] = 1 + max([visit(each) for each in sorted(graph[name])], default=-1)
            below[name] = graph[name].union(*(below[each] for each in graph[name]))
        return floors[name]

    rows: list[list[str]] = [[] for _ in range(1 + max(map(visit, sorted(graph))))]
    for name in sorted(graph):
        rows[floors[name]].append(name)
    # A line past a floor has a place of its own there, between the boxes: a name with an arrow.
    lines: list[list[str]] = []
    for name in sorted(graph):
        for each in sorted(graph[name] - set().union(*(below[other] for other in graph[name]))):
            passed = [f"{name}>{each}@{floor}" for floor in range(floors[name] - 1, floors[each], -1)]
            for floor, bend in zip(range(floors[name] - 1, floors[each], -1), passed, strict=True):
                rows[floor].append(bend)
            lines.append([name, *passed, each])
    neighbors: dict[str, list[str]] = {}
    for line in lines:
        for upper, lower in pairwise(line):
            neighbors.setdefault(upper, []).append(lower)
            neighbors.setdefault(lower, []).append(upper)
    widths = [sum(GAP + (0 if ">" in name else BOX) for name in row) for row in rows]
    middles: dict[str, float] = {}
    for _ in range(12):  # near to what is below and above
        for row, width in zip(rows, widths, strict=True):
            near = {name: [middles[each] for each in neighbors[name] if each in middles] for name in row}
            row.sort(key=lambda name: (sum(near[name]) / len(near[name]) if near[name] else 0, name))
            left = -width / 2
            for name in row:
                size = GAP + (0 if ">" in name else BOX)
                middles[name], left = left + size / 2, left + size
    width, height = 40 + max(widths), 70 + FLOOR * len(rows)
    place = {
        name: (middles[name] + width / 2, height - 40 - FLOOR * floor) for floor, row in enumerate(rows) for name in row
    }
    parts = [note(20, 26, "Packages, each above all that it imports", 14)]
    parts.append(note(20, 44, "lines of imports that follow from others are left out", 12))
    for line in lines:
        (x, y), path = place[line[0]], ""
        for name in line[1:]:
            (end, floor), half = place[name], 0 if ">" in name else 15
            path += f"C{x:.0f} {y + 45} {end:.0f} {floor - 45} {end:.0f} {floor - half} " + (
                f"V{floor + 15} " if half == 0 else ""
            )
            x, y = end, floor
        parts.append(f'<path d="M{place[line[0]][0]:.0f} {place[line[0]][1] + 15} {path}" stroke="#999" fill="none"/>')
    for name in sorted(graph):
        x, y = place[name]
        color = COLORS[1] if name == "tritoncomm_kernels" else COLORS[0]
        parts.append(
            f'<rect x="{x - BOX / 2:.0f}" y="{y - 15}" width="{BOX}" height="30" rx="4" fill="{color}"/>'
            f'<text x="{x:.0f}" y="{y + 5}" text-anchor="middle" font-size="13" fill="white">'
            f"{name.removeprefix('tritoncomm_')}</text>"
        )
    return picture(round(width), height, parts)


if __name__ == "__main__":
    Path(__file__).with_name("packages.svg").write_text(draw_packages())
    Path(__file__).with_name("address_map.svg").write_text(draw())
    Path(__file__).with_name("experts.svg").write_text(draw_experts())
    Path(__file__).with_name("host_time.svg").write_text(draw_host_time())
    Path(__file__).with_name("ratios.svg").write_text(draw_ratios())
    Path(__file__).with_name("memory.svg").write_text(draw_memory())
