"""Figures on the pages: each is computed from a committed file, or asserted by a test that this file names."""

import json
import math
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tritoncomm_kernels.copy import _is_in_wire_order

from bench import kept, memory, report

DOCS = report.PAGE.parent
README = DOCS.parent / "README.md"
PAGES = [README, *sorted(DOCS.glob("*.md")), *sorted((DOCS / "architecture").glob("*.md"))]
GENERATED = {"benchmarks.md", "compatibility.md"}  # whole pages, compared by tests of their own
FIGURE = re.compile(r"(?<![\w.])\d{1,2}\.\d{2,}(?![\w.]|\.\d)")
VERSIONS = {f"{major}.{minor}" for major, minors in {
    0: range(16, 21), 1: (15, 16), 2: range(11, 31), 3: range(11, 15), 5: (23, 24),
}.items() for minor in minors}  # fmt: skip
H100 = "nvidia-h100-80gb-hbm3"
H200 = "nvidia-h200"


def rows(*path: str) -> list[dict[str, Any]]:
    return json.loads((report.RESULTS.joinpath(*path)).read_text())["rows"]


def span(values: Iterable[float]) -> str:
    """``smallest to largest``, as a page says it."""
    values = list(values)
    return f"{min(values):.2f} to {max(values):.2f}"


def kernels_of(op: str, dtype: str = "torch.bfloat16") -> list[dict[str, Any]]:
    """Rows of an H100 of an operation, whose elements keep their dtype."""
    found = [row for row in rows(H100, "gpu_bench.json") if row.get("case", {}).get("op") == op]
    return [row for row in found if row["case"]["dtype"] == row["case"]["out_dtype"] == dtype]


def copies(odd: bool = False) -> str:
    """Shares of the roof, on both GPUs, of packs and unpacks of 64 MiB and more in runs of 64 bytes and more.

    ``odd``: those in runs of an odd number of bytes; the others by default.
    """
    cases = [(row, row.get("case", {})) for device in (H100, H200) for row in rows(device, "gpu_bench.json")]
    return span(
        row["share_of_roof"]
        for row, case in cases
        if case.get("op") in ("pack", "unpack") and case["nbytes"] >= 2**26 and case["run_bytes"] >= 64
        and case["run_bytes"] % 2 == odd
    )  # fmt: skip


def against(op: str, peer: str) -> str:
    return span(row["ratio"][peer] for row in kernels_of(op) if peer in row["ratio"])


def compiled() -> str:
    """How much less time torch.compile takes at most for unpacks of short runs, on any GPU."""
    ratios = [
        row["ratio"]["compiled"]
        for device in (H100, H200)
        for row in rows(device, "gpu_bench.json")
        if row.get("case", {}).get("op") == "unpack" and row["case"]["run_bytes"] <= 64 and "compiled" in row["ratio"]
    ]
    return f"{1 - 1 / max(ratios):.0%}".replace("%", " %")


def on_cpu(op: str) -> str:
    found = [row for row in rows("cpu", "kernels.json") if row["row"].startswith(f"{op} ")]
    return span(row["ratio"]["split + cat"] for row in found)


def host_means(peer: str) -> str:
    means = report.communicating(rows("cpu", "host_cost.json")).values()
    return " | ".join(f"{mean[peer]:.2f}" for mean in means)


def ratios(part: str, label: str, peer: str) -> str:
    """Ratios of the rows of a part that begin so, in their order."""
    found = [row for row in rows("cpu", f"{part}.json") if row["row"].startswith(label)]
    return " | ".join(f"{row['ratio'][peer]:.2f}" for row in found)


def span_of(part: str, label: str, peer: str) -> str:
    return span(row["ratio"][peer] for row in rows("cpu", f"{part}.json") if row["row"].startswith(label))


def between_nodes(ranks: int) -> str:
    """Bytes between nodes of sums in two levels, as a share of an fp32 ring's."""
    (line,) = (line for line in kept.table_of("sums_bytes") if line.startswith(f"| {ranks} |"))
    return line.split(" | ")[2]


def orders() -> str:
    """Packs of 64 MiB and more that follow the wire, over the same ones in the order of the rows."""
    found = []
    for row in rows(H100, "orders", "pack_order.json"):
        label = row["row"]
        nbytes, world, mib = (int(number) for number in re.findall(r"run (\d+) \S+ world (\d+) (\d+) MiB", label)[0])
        itemsize = 1 if "bool" in label else 4 if ">float32" in label else 2
        geometry: Any = SimpleNamespace(
            starts=None,
            stride_element=1,
            outer=2,
            world=world,
            run=nbytes // itemsize,
            dims=(2,) * (1 + ("two" in label)),
        )
        if mib >= 64 and _is_in_wire_order("pack", geometry, itemsize, math.gcd(nbytes, 16)):
            found.append(row["ratio"]["in row order"])
    return span(found)


def experts_ratios(case: str) -> str:
    """Of a layer of 64 tokens, to its peers on a stub GPU, then on CPUs."""
    ours, stub = (f"64 tokens of 64, {case}{where}" for where in ("", ", on a stub GPU"))
    ratios = {row["row"]: row["ratio"] for row in rows("cpu", "experts.json")}
    peers = (stub, "by hand"), (stub, "transformers"), (ours, "by hand"), (ours, "transformers"), (ours, "megatron")
    return " | ".join(f"{ratios[row][peer]:.2f}" for row, peer in peers)


def experts_times() -> str:
    """Of a larger layer, with waits: to transformers and to Megatron-LM."""
    (row,) = (row for row in rows("cpu", "experts.json") if row["row"].endswith("with waits"))
    return f"{row['ratio']['transformers']:.2f} and {row['ratio']['megatron']:.2f}"


def experts_bytes() -> list[str]:
    """MB that rank 0 sends in a larger layer, forward and backward: ours, transformers' and Megatron-LM's."""
    (row,) = (row for row in rows("cpu", "experts.json") if row["row"].endswith("with waits"))
    return [f"{row['sent'][provider] / 1e6:.1f}" for provider in ("ours", "transformers", "megatron")]


def large_model() -> list[str]:
    """GiB of a Llama 8B, 131,072 positions, 8 GPUs: weights, AdamW, activations, logits, peak, peak without logits."""
    held = memory.needed(memory.LLAMA_8B, memory.Run(8, 131_072, True))
    without_logits = held.peak() - held.logits
    kinds = (held.weights, held.optimizer, held.activations, held.logits, held.peak(), without_logits)
    return [f"{x / 2**30:.1f}" for x in kinds]


def terms_of_a_large_model() -> str:
    weights, optimizer, activations, logits, peak, _ = large_model()
    outside = 2 * memory.LLAMA_8B.outside / 2**30
    gathered = f"({outside:.1f} of them weights outside of the layers, which FSDP2 keeps gathered)"
    return f"{weights}, AdamW {optimizer}, activations {activations} {gathered}, logits {logits}; {peak}"


def distance_of_the_formula() -> str:
    """Largest distance of a step's peak on a GPU to the formula, in percent, rounded up."""
    found = json.loads(memory.FILE.read_text())["rows"]
    assert len(found) == 9
    return f"{math.ceil(100 * max(abs(memory.distances(memory.LARGE, row)['peak']) for row in found))}"


def faults_found() -> int:
    """Rows of the table of faults that ``verify`` has found in releases."""
    table = (DOCS / "verify.md").read_text().partition("| release | fault |")[2].partition("\n\n")[0]
    return table.count("\n| ")


# By page: texts in which {} stands for what a function computes from committed files.
CLAIMS: dict[str, list[tuple[str, Callable[[], str]]]] = {
    "README.md": [
        ("{} of the host time of a GPT step", lambda: span_of("megatron_step", "GPT step", "megatron")),
        ("{} of the host time of a step", lambda: span_of("parallel", "tensor", "torch")),
        ("packed and unpacked at {} of the speed of a plain copy", copies),
        ("runs of an odd number of bytes at {}", lambda: copies(odd=True)),
        ("a layer sends {} MB where", lambda: experts_bytes()[0]),
        ('`"all_to_all"` sends {} MB', lambda: experts_bytes()[1]),
        ("holds {} GiB on each of 8 GPUs", lambda: f"{float(large_model()[-2]):.0f}"),
        ("loss in chunks, {}", lambda: f"{float(large_model()[-1]):.0f}"),
        ("peak is within {} % of nine runs", distance_of_the_formula),
        ("{} faults in released versions of transformers", lambda: str(faults_found())),
    ],
    "trainer.md": [
        ("weights in fp32 {} at the peak", terms_of_a_large_model),
        ("never has them all: {} without them", lambda: large_model()[-1]),
    ],
    "tuning.md": [("it takes {} of the time of the order of the rows on an H100", orders)],
    "integrations_megatron.md": [
        ("a GPT step takes {} of its host time", lambda: span_of("megatron_step", "GPT step", "megatron")),
        ("| GPT step | {} |", lambda: ratios("megatron_step", "GPT step", "megatron")),
        ("one row-parallel linear layer | {} |", lambda: ratios("megatron_step", "column", "megatron")),
    ],
    "sums.md": [
        ("{} of fp32's on two nodes of 8", lambda: between_nodes(16)),
        ("and {} on 64, or", lambda: between_nodes(512)),
    ],
    "experts.md": [
        ("it takes {} of their time", experts_times),
        ("sends {} MB from rank 0", lambda: experts_bytes()[0]),
        ('`"all_to_all"` sends {} MB', lambda: experts_bytes()[1]),
        ("all-to-all dispatcher {} MB", lambda: experts_bytes()[2]),
        ("| 2, 2 of 8 | {} |", lambda: experts_ratios("2 of 8 experts, world 2")),
        ("| 2, 8 of 32 | {} |", lambda: experts_ratios("8 of 32 experts, world 2")),
        ("| 4, 8 of 32 | {} |", lambda: experts_ratios("8 of 32 experts, world 4")),
    ],
    "parallelize_module.md": [
        ("| tensor parallel | {} |", lambda: ratios("parallel", "tensor parallel", "torch")),
        ("| tensor and sequence parallel | {} |", lambda: ratios("parallel", "tensor and", "torch")),
    ],
}
# Figures that need no file, and the tests that count the bytes.
BYTES = {
    "0.50": "tests/integrations/test_data_parallel.py::test_fsdp_sums_in_rank_order",
    "0.75": "tests/integrations/test_data_parallel.py::test_the_hook_of_ddp",
}
ASSERTED = {"sums.md": BYTES, "README.md": BYTES}


def words(text: str) -> str:
    """The text of a page, with lines joined."""
    return " ".join(text.split())


@pytest.mark.parametrize("page", CLAIMS)
def test_a_figure_is_that_of_its_file(page: str) -> None:
    text = words((README if page == "README.md" else DOCS / page).read_text())
    for claim, compute in CLAIMS[page]:
        assert claim.format(compute()) in text, claim


@pytest.mark.parametrize("name", kept.PAGES)
def test_a_table_is_the_one_that_was_kept(name: str) -> None:
    assert kept.on_page(name) == kept.table_of(name)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_no_figure_is_without_a_file(path: Path) -> None:
    """Numbers with two decimals and more that are no versions: claims, tables that were kept, or asserted by tests."""
    if path.name in GENERATED:
        return
    tables = {line for name, page in kept.PAGES.items() if page == path.name for line in kept.table_of(name)}
    text = words("\n".join(line for line in path.read_text().splitlines() if line not in tables))
    for claim, compute in CLAIMS.get(path.name, ()):
        text = text.replace(claim.format(compute()), "")
    loose = {figure for figure in FIGURE.findall(text) if figure not in VERSIONS}
    assert loose <= set(ASSERTED.get(path.name, ())), f"{path.name}: {sorted(loose)}"
    for test in ASSERTED.get(path.name, {}).values():
        file, _, name = test.partition("::")
        assert f"def {name}(" in (DOCS.parent / file).read_text(), test


GPUS = {H100: "an H100", "nvidia-h200": "an H200"}
UNKNOWN = re.compile(
    r"(?i)unmeasured|not measured|never measured|has measured|never run|not run|has run|not on a gpu|no figures"
)


def status() -> str:
    """The README's sentence on what is tested and measured, from the files of results."""
    tests = [json.loads(path.read_text()) for path in report.RESULTS.glob("*/tests/nccl.json")]
    names = {result["test"] for content in tests for result in content["tests"] if result["outcome"] == "passed"}
    ranks = [count for word, count in (("two", 2), ("four", 4), ("eight", 8)) if any(f"_{word}_" in n for n in names)]
    files = [json.loads(path.read_text()) for path in report.RESULTS.glob("*/exchanges.json")]
    measured = "measured" if any(file["backend"] == "nccl" for file in files) else "not measured"
    kernels = " and ".join(
        name for device, name in GPUS.items() if (report.RESULTS / device / "gpu_bench.json").exists()
    )
    tested = f"exchanges are tested over NCCL between {' and '.join(map(str, ranks))} ranks of one GPU"
    return f"**Status: {tested}; times between GPUs are {measured}. Kernels are measured on {kernels}**"


def test_the_status_is_what_the_results_say() -> None:
    assert status() in words(README.read_text())
    assert {path.parent.name for path in report.RESULTS.glob("*/gpu_bench.json")} == GPUS.keys()
    hardware = words((DOCS / "compatibility.md").read_text())
    assert "| sm_90 (H100, H200) | in CI | on one GPU | [kernels, on one GPU]" in hardware
    assert "| | 2 ranks | 4 ranks |" in hardware


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_that_speaks_of_hardware_links_to_the_table(path: Path) -> None:
    """One table says what ran and what was measured on GPUs; no page has an answer of its own."""
    if path.name in GENERATED:
        return
    text = re.sub(r"<!--.*?-->|```.*?```", "", path.read_text(), flags=re.DOTALL)
    parts = [part for block in text.split("\n\n") for part in re.split(r"\n(?=- |\|)", block)]
    loose = [
        words(part) for part in parts if UNKNOWN.search(part) and re.search(r"(?i)\bgpus?\b|\bnccl\b|H[12]00", part)
    ]
    assert [part for part in loose if "compatibility.md#hardware" not in part] == []
