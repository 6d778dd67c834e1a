"""docs/benchmarks.md from the committed results: ``python bench/report.py`` prints it, ``--write`` writes it."""

import argparse
import ast
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bench import guard
from bench.guard import RESULTS, rows_of
from bench.harness import counts
from bench.timing import geometric_mean

__all__ = ["PAGE", "communicating", "page"]

HERE = Path(__file__).resolve().parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
LIBRARY = HERE.parent / "tritoncomm" / "bench" / "__init__.py"
NOT_MEASURED = "not measured"
COPIED = "copied"  # the end of a mode in which ours copies more than the peer

HEAD = """# Benchmarks

Ours over what people use today, each in one run: first the kernels on GPUs, then host time on a CPU. [How they are
measured](#how-they-are-measured) comes last. `tritoncomm bench --ranks N` measures exchanges between the ranks of your
machine, without a clone.
"""

RULES = """## How they are measured

`python bench/report.py --write` writes this page from the files in `bench/results/`, and a test compares the two. Every
row is in its file, with the versions that it was measured with. `make bench` measures on this machine and compares with
these figures, `python -m bench` part by part with pictures. `make bench-against BASE=<commit>` compares two commits.

- A **ratio** is our time over a peer's for the same work: smaller is better. Both are measured in one process, in
  rounds in which every provider takes its turn. Times of different machines do not compare; ratios do.
- Times are microseconds at p20: a fifth of the rounds took less. Load of the machine only ever adds. A ratio is ours at
  p20 over the peer's at p20.
- `±` is half the spread of a ratio. The rounds form ten groups of neighbours, each group gives a ratio, and the
  spread is the distance between their 20 % and 80 % quantiles. Of several runs, each row is the run with the median
  ratio; its spread is the median one, or the range of the ratios if that is larger.
- A row fails in `make bench` above its limit, or above its ratio here by more than 10 % and the spread. It is
  measured again before it fails. The second rule holds only on the processor model that the figures were made on.
- A *no-op process group* answers every collective at once and moves no data. Times over it are the host's work: Python,
  autograd, and the calls into the backend.
- A *pass* reads and writes memory once over. Only local copies count, not those inside a backend.
"""


def _per_row(limit: float) -> str:
    """A limit of rows, with what their spread may add, as a cell of the table of targets."""
    return f"{limit:.2f} of its peer's, {limit + guard.SPREAD:.2f} with its spread"


TARGETS = f"""## Targets

`make bench` holds them; `python bench/reshard_host.py` holds the last one. They are constants of `bench/guard.py`.

| host time | torch | at most |
|---|---|---|
| a row of mappings, p2p, Ulysses, redistribution, tensor, styles | up to 2.13 | {_per_row(guard.ROW)} |
| a p2p hop with variable lengths, or without `batch_p2p_comm` | up to 2.13 | {_per_row(guard.MORE_WORK)} |
| a layer under `torch.compile` | up to 2.13 | {_per_row(guard.COUNTED)} |
| geometric mean of the mappings | up to 2.13 | {guard.MEAN:.2f} of Megatron's |
| geometric mean of the mappings | newer | {guard.NEWEST_MEAN:.2f} of Megatron's |
| a whole Megatron step, patched | every | {guard.STEP:.2f} of its own |
| `plan.execute` of a resharding | every | {guard.BUCKET_US} us per bucket |

A row may be above its first limit by as much as its spread, up to the second one. With torch newer than 2.13 rows have
no limit of their own, because its `autograd.Function` costs Megatron less. `reduce_from` and the gradient of `copy_to`
copy what Megatron overwrites, unless `overwrite_inputs` is on: these rows are listed apart, without a limit. Some hops
do more than Megatron's. A header has dtypes and any number of dims, and is checked where it arrives; Megatron's has
three integers. A single message is checked and counted, and several tensors are packed; Megatron's are bare calls of
`isend`. Its waits for the GPU, up to two in a hop, cost nothing on a CPU. A compiled graph counts each collective when
it runs, 3 us of the host that Megatron's graphs do not spend.
"""

# What is promised on a GPU: in words, operation, least share of the roof.
GPU_TARGETS = (
    ("pack, 64 MiB or more in runs of 128 B or more", "pack", 0.95),
    ("unpack, the same", "unpack", 0.95),
    ("reduce, 2 to 16 parts", "reduce", 0.90),
)
GPU_HOST = {"launch": 2, "plan, path and launch": 4}  # microseconds of the host above the launcher's own, at most
# Whose way to do the same step: in words, its formulation in gpu_bench.
GPU_PEERS = (
    ("Megatron-LM's way, and DTensor's where it gathers or reduces", "split + cat"),
    ("DTensor's way where it exchanges", "movedim"),
    ("ColossalAI's way to pack", "chunk + contiguous"),
    ("torch.compile of DTensor's way", "compiled"),
)
GPU_FASTER, GPU_NEAR = 1.5, 0.95  # so many times as fast as a peer, or so near to the roof; never slower
BOUNDS = {"roof", "floor", "bare"}  # least times of anybody: no peers
EXCHANGES = "exchanges"  # the file of `tritoncomm bench`


def page(results: Path = RESULTS) -> str:
    """The whole page, from the results files alone."""
    files = {
        f"{path.parent.name}/{path.stem}": json.loads(path.read_text()) for path in sorted(results.glob("*/*.json"))
    }
    on_cpu = {name: content for name, content in files.items() if name.startswith("cpu/")}
    described: set[str] = set()  # parts that ran on several GPUs are described once
    sections = [
        HEAD,
        *_gpu(files),
        *(_section(name, content, described) for name, content in files.items() if name not in on_cpu),
        "## In short\n\n" + "\n".join(_short(files)) + "\n",
        *_communicating(files),
        *_cpu(on_cpu),
        TARGETS,
        RULES,
    ]
    return "\n".join(sections)


def _short(files: dict[str, dict[str, Any]]) -> Iterator[str]:
    """One line per part: what it measures, its rows and the geometric means it states."""
    yield "| results | of | rows | ours / peer, geometric mean |"
    yield "|---|---|---:|---|"
    for name, content in files.items():
        mean = content.get("geometric_mean", {})
        by_mode = mean if isinstance(mean, dict) else {"": mean}
        told = "; ".join(f"{mode} {value:.2f}".strip() for mode, value in by_mode.items() if not mode.endswith(COPIED))
        about = " ".join(_about(name.split("/")[1]).partition("\n\n")[0].split()).removesuffix(".")
        linked = f"`{name}`" if name.startswith("cpu/") else f"[`{name}`](#{name.replace('/', '')})"
        yield f"| {linked} | {about} | {len(rows_of(content))} | {told} |"


def _cpu(files: dict[str, dict[str, Any]]) -> list[str]:
    """All rows as a picture, and a table of those in which a peer is faster."""
    slower = []
    for name, content in files.items():
        for row in rows_of(content):
            ratios = {peer: ratio for peer, ratio in row["ratio"].items() if peer not in BOUNDS}
            if told := "; ".join(f"`{peer}` {_ratio(row, peer)}" for peer, ratio in ratios.items() if ratio > 1):
                slower.append(f"| {name.partition('/')[2]} | {_label(row)} | {told} |")
    if not files:
        return []
    rows = sum(len(rows_of(content)) for content in files.values())
    lines = [
        "## On a CPU",
        "",
        "![Ratios of all rows](ratios.svg)",
        "",
        f"A peer is faster in {len(slower)} of {rows} rows. Rows of",
        '`host_cost` with "copied" copy what Megatron overwrites, unless `overwrite_inputs` is on. Rows of',
        "`exchanges` are times over Gloo on two cores; `bare`, the collectives alone on contiguous buffers, is their",
        "lower bound and not a peer.",
        "",
    ]
    table = ["| part | row | the faster peer, ours / peer |", "|---|---|---|", *slower]
    return ["\n".join(lines + _folded(f"The {len(slower)} rows", table))]


def _label(row: dict[str, Any]) -> str:
    """The row, and whether ours copies in it what the peer overwrites."""
    return row["row"] + ", copied" * row.get("mode", "").endswith(COPIED)


def _folded(summary: str, lines: list[str]) -> list[str]:
    """Lines that a page shows when somebody asks for them."""
    return ['<details markdown="1">', f"<summary>{summary}</summary>", "", *lines, "", "</details>", ""]


def communicating(rows: list[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Geometric means over the rows that start a collective, by mode; rows that copy more than the peer are left out.

    "megatron" and "by hand" are ratios to these peers, "with enqueue" is the one to Megatron with a backend's enqueue
    added to both.
    """
    by_mode: dict[str, list[dict[str, Any]]] = {row["mode"]: [] for row in rows if not row["mode"].endswith(COPIED)}
    for row in rows:
        if "enqueue" in row["us"] and row["mode"] in by_mode:
            by_mode[row["mode"]].append(row)
    ratios: dict[str, Callable[[dict[str, Any]], float]] = {
        "megatron": lambda row: row["ratio"]["megatron"],
        "with enqueue": _with_enqueue,
        "by hand": lambda row: row["ratio"]["by hand"],
    }
    return {
        mode: {name: geometric_mean([ratio(row) for row in chosen]) for name, ratio in ratios.items()}
        for mode, chosen in by_mode.items()
        if chosen
    }


def _with_enqueue(row: dict[str, Any]) -> float:
    """Ours over Megatron's host time, with the enqueue of the row's collectives added to both."""
    enqueue = row["us"]["enqueue"]["p20"]
    return (row["us"]["ours"]["p20"] + enqueue) / (row["us"]["megatron"]["p20"] + enqueue)


def _communicating(files: dict[str, dict[str, Any]]) -> list[str]:
    """The means of the mappings that communicate, which say more than those of all rows."""
    means = communicating(rows_of(files.get("cpu/host_cost", {})))
    if not means:
        return []
    lines = [
        "## Mappings that communicate",
        "",
        "Means over the rows of `cpu/host_cost` that start a collective. A real backend's enqueue",
        "costs both sides the same, so the second ratio is nearer to 1. Plain torch checks and counts nothing.",
        "",
        "| mode | ours / Megatron | with Gloo's enqueue added to both | ours / plain torch by hand |",
        "|---|---:|---:|---:|",
    ]
    lines += [
        f"| {mode} | {mean['megatron']:.2f} | {mean['with enqueue']:.2f} | {mean['by hand']:.2f} |"
        for mode, mean in means.items()
    ]
    lines += [
        "",
        "This is Python of tens of microseconds, which a GPU hides wherever the host is ahead. The reasons to prefer",
        "tritoncomm to plain torch are passes, messages, uneven sizes and errors by name.",
        "",
        "![Host time of every mapping as a share of Megatron-LM's](host_time.svg)",
    ]
    return ["\n".join(lines) + "\n"]


def _gpu(files: dict[str, dict[str, Any]]) -> list[str]:
    """Targets on a GPU: share of the roof by device, or that nothing was measured."""
    devices = {name.split("/")[0]: rows_of(found) for name, found in files.items() if name.endswith("/gpu_bench")}
    lines = [
        f"## Kernels on {' and '.join(map(_product, devices)) or 'a GPU'}",
        "",
        "The roof is a contiguous `dst.copy_(src)` that reads and writes as many bytes, measured in the same rounds; a",
        "share of 1.00 is as fast. The roof of a reduce only reads, where its file says so (`roof`). A row misses its",
        "target by more than the spread of its share. `make gpu-bench` measures, on a machine that has the GPU;",
        "`make gpu-ranks` checks many ranks on one GPU, and measures the local part of mappings beside the projection",
        "of `tritoncomm plan`.",
        "",
        "| what | target | worst row with a target |",
        "|---|---:|---|",
    ]
    for what, op, target in GPU_TARGETS:
        lines.append(f"| {what} | {target:.2f} of the roof | {_worst(devices, op)} |")
    lines += [
        f"| host time of a call: {what} | {most} us above the launcher's own | {_host(devices, what)} |"
        for what, most in GPU_HOST.items()
    ]
    target = f"{GPU_FASTER} times as fast, or {GPU_NEAR} of the roof; never slower"
    lines += [
        f"| pack and unpack against {whose}, `{peer}` | {target} | {_against(devices, peer)} |"
        for whose, peer in GPU_PEERS
    ]
    exchanges = {
        name.split("/")[0]: rows_of(found)
        for name, found in files.items()
        if name.endswith(f"/{EXCHANGES}") and found["backend"] == "nccl"
    }
    target = "never slower than Megatron-LM's way"
    lines.append(f"| mappings, sums and hops end to end over NCCL | {target} | {_by_device(exchanges, _exchanged)} |")
    lines += ["", PLACE] * (not exchanges)
    for device, rows in devices.items():
        lines += _slower(device, rows)
    return ["\n".join(lines) + "\n"]


def _product(device: str) -> str:
    """The name of a GPU as its maker writes it, from that of its folder."""
    return device.upper().replace("-", " ")


def _slower(device: str, rows: "Rows") -> list[str]:
    """A table of all rows in which a peer is faster."""
    slower = [
        f"| {row['row']} | `{peer}` | {_ratio(row, peer)} |"
        for row in rows
        for peer, ratio in row["ratio"].items()
        if ratio > 1 and peer not in BOUNDS
    ]
    compared = sum(len(row["ratio"].keys() - BOUNDS) for row in rows)
    heads = ["", f"A peer is faster on {_product(device)} in these {len(slower)} of {compared} comparisons:", ""]
    return [*heads, "| row | peer | ours / peer |", "|---|---|---:|", *slower] if slower else []


def misses_roof(row: dict[str, Any]) -> bool:
    """Whether the share of the roof is below the row's target by more than its spread."""
    return row.get("target") is not None and row["share_of_roof"] < row["target"] - row["spread"]["roof"]


def above_floor(row: dict[str, Any]) -> float:
    """Microseconds of the host above a call of the launcher with ready arguments."""
    return row["us"]["ours"]["p20"] - row["us"]["floor"]["p20"]


Rows = list[dict[str, Any]]
PLACE = """`tritoncomm bench --ranks 8 --json exchanges.json` measures the last line on a machine with 8 GPUs, in five
minutes. This page shows its file from `bench/results/<device>/`."""


def _exchanged(rows: Rows) -> str:
    """The exchange that is slowest against plain torch."""
    worst = max((row for row in rows if "plain" in row["ratio"]), key=lambda row: row["ratio"]["plain"])
    return f"{_ratio(worst, 'plain')} of its time ({worst['row']})"


def _by_device(devices: dict[str, Rows], line: Callable[[Rows], str]) -> str:
    """One entry for every device that has a row of the kind."""
    lines = {device: line(rows) for device, rows in devices.items()}
    return "; ".join(f"{device}: {text}" for device, text in lines.items() if text) or NOT_MEASURED


def _worst(devices: dict[str, Rows], op: str) -> str:
    def line(rows: Rows) -> str:
        kept = [row for row in rows if row.get("target") is not None and row["case"]["op"] == op]
        if not kept:
            return ""
        worst = min(kept, key=lambda row: (row["share_of_roof"] + row["spread"]["roof"]) / row["target"])
        missed = sum(misses_roof(row) for row in kept)
        text = f", {missed} of {len(kept)} rows missed" if missed else ""
        return f"{worst['share_of_roof']:.2f} ± {worst['spread']['roof'] / 2:.2f} ({worst['row']}){text}"

    return _by_device(devices, line)


def _against(devices: dict[str, Rows], peer: str) -> str:
    """The row that misses its target most, or is nearest to missing it, as ours over the peer's time."""

    def over(row: dict[str, Any]) -> float:
        ratio = row["ratio"][peer]
        return max(ratio, min(ratio * GPU_FASTER, GPU_NEAR / row["share_of_roof"]))

    def line(rows: Rows) -> str:
        kept = [row for row in rows if peer in row["ratio"] and row.get("case", {}).get("op") in ("pack", "unpack")]
        if not kept:
            return ""
        worst = max(kept, key=over)
        return f"{worst['ratio'][peer]:.2f} of its time ({worst['row']}){', missed' * (over(worst) > 1)}"

    return _by_device(devices, line)


def _host(devices: dict[str, Rows], what: str) -> str:
    def line(rows: Rows) -> str:
        for row in rows:
            if row["row"] != f"host, {what}":
                continue
            if "floor" not in row["us"]:
                return f"{row['us']['ours']['p20']:.1f} us, and the launcher's own was not measured"
            above = above_floor(row)
            return f"{above:.1f} us above {row['us']['floor']['p20']:.1f}{', missed' * (above > GPU_HOST[what])}"
        return ""

    return _by_device(devices, line)


def _section(name: str, content: dict[str, Any], described: set[str]) -> str:
    """Results of a GPU: how they were made, and a table of all rows."""
    part = name.split("/")[1]
    rows = rows_of(content)
    versions = ", ".join(f"{key} {value}" for key, value in content["versions"].items())
    runs = f"; the median of {content['runs']} runs" if content.get("runs", 1) > 1 else ""
    ranks = f" {content['ranks']} ranks over {content['backend']}, {content['dtype']}." if "ranks" in content else ""
    made = f"Measured with {versions}{runs}.{ranks} Unit: {content.get('unit', 'microseconds')}."
    about = "Rows are those of the part of this name above." if part in described else _about(part)
    described.add(part)
    return "\n".join([f"## {name}", "", about, "", made, "", *_folded(f"All {len(rows)} rows", [*_table(rows)])])


def _about(part: str) -> str:
    """The docstring of the benchmark that wrote these results."""
    for path in (*sorted(HERE.glob("*.py")), *([LIBRARY] if part == EXCHANGES else ())):
        text = path.read_text()
        if path in (HERE / f"{part}.py", LIBRARY) or f'name="{part}"' in text:
            told = ast.get_docstring(ast.parse(text)) or ""
            return told.replace("``", "`")
    return ""


def _table(rows: Rows) -> Iterator[str]:
    """A line per row: its share of the roof, or its time, and its fastest peer. The file has all peers."""
    providers = list(dict.fromkeys(provider for row in rows for provider in row["us"]))
    counted = list(dict.fromkeys(label for row in rows for label in counts(row, providers)))
    shared = any("share_of_roof" in row for row in rows)
    heads = ["row", *(("share of the roof", "target") if shared else ("ours, us",)), "fastest peer, ours / peer"]
    bounds = sorted({peer for row in rows for peer in row["ratio"]} & BOUNDS - {"roof"})
    heads += [f"ours / {bound}" for bound in bounds]
    heads += [f"{label}: {' / '.join(providers)}" for label in counted]
    yield f"| {' | '.join(heads)} |"
    yield "|---|" + "---:|" * (len(heads) - 1)
    for row in rows:
        cells = [row["row"]]
        if shared:
            cells += [f"{row[key]:.2f}" if row.get(key) is not None else "-" for key in ("share_of_roof", "target")]
        else:
            cells.append(f"{row['us']['ours']['p20']:.1f}")
        peer = max(row["ratio"].keys() - BOUNDS, key=lambda peer: (row["ratio"][peer], peer), default="")
        cells.append(f"`{peer}` {_ratio(row, peer)}" if peer else "-")
        cells += [_ratio(row, bound) if bound in row["ratio"] else "-" for bound in bounds]
        figures = counts(row, providers)
        yield f"| {' | '.join([*cells, *(figures.get(label, '-') for label in counted)])} |"


def _ratio(row: dict[str, Any], peer: str) -> str:
    return f"{row['ratio'][peer]:.2f} ± {row['spread'].get(peer, 0.0) / 2:.2f}"


def main() -> int:
    parser = argparse.ArgumentParser(description="docs/benchmarks.md from the committed results.")
    parser.add_argument("--write", action="store_true", help=f"write {PAGE.name} instead of printing it")
    options = parser.parse_args()
    if options.write:
        PAGE.write_text(page())
        print("written:", PAGE)
    else:
        print(page(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
