"""docs/benchmarks.md is what its generator prints, and says what was not measured."""

from pathlib import Path
from typing import Any

from bench import report, timing
from docs import draw


def gpu_row(op: str, share: float, target: float | None) -> dict[str, Any]:
    samples = {provider: [10.0] * 10 for provider in ("ours", "roof", "split + cat")}
    return timing.figures(f"{op} 64 MiB", samples, share_of_roof=share, target=target, case={"op": op, "sweep": "size"})


def test_the_committed_page_is_the_generated_one() -> None:
    wrong = "docs/benchmarks.md is not what bench/results says: run `python bench/report.py --write`"
    assert report.PAGE.read_text() == report.page(), wrong


def test_every_row_of_a_gpu_and_every_faster_peer_is_on_the_page() -> None:
    page = report.page()
    on_cpu = page.partition("\n## On a CPU\n")[2].partition("\n## ")[0].splitlines()
    for path in sorted(report.RESULTS.glob("*/*.json")):
        name = f"{path.parent.name}/{path.stem}"
        rows = report.rows_of(report.json.loads(path.read_text()))
        if path.parent.name == "cpu":
            assert f"| `{name}` |" in page
            for row in rows:
                lines = [line for line in on_cpu if line.startswith(f"| {path.stem} | {row['row']}")]
                faster = {peer: ratio for peer, ratio in row["ratio"].items() if ratio > 1 and peer != "bare"}
                told = [line for line in lines if all(f"`{p}` {ratio:.2f} ± " in line for p, ratio in faster.items())]
                assert bool(lines) >= bool(told) >= bool(faster), row["row"]
                assert faster or not [line for line in lines if f" {row['row']} |" in line], row["row"]
            continue
        section = page.partition(f"## {name}\n")[2].partition("\n## ")[0]
        for row in rows:
            lines = [line for line in section.splitlines() if line.startswith(f"| {row['row']} |")]
            peers = {peer: ratio for peer, ratio in row["ratio"].items() if peer not in report.BOUNDS}
            assert f" {max(peers.values()):.2f} ± " in lines[0], row["row"]
            assert "share_of_roof" not in row or f"| {row['share_of_roof']:.2f} |" in lines[0]


def test_the_picture_of_ratios_has_a_dot_for_every_row_and_peer() -> None:
    drawn = (report.PAGE.parent / "ratios.svg").read_text()
    assert drawn == draw.draw_ratios(), "run `make docs`"
    files = [report.json.loads(path.read_text()) for path in report.RESULTS.glob("cpu/*.json")]
    ratios = [ratio for file in files for row in file["rows"] for peer, ratio in row["ratio"].items() if peer != "bare"]
    assert drawn.count("<circle ") == len(ratios)
    assert drawn.count(f'fill="{draw.COLORS[1]}"') == sum(ratio > 1 for ratio in ratios)


def test_a_gpu_is_not_measured_until_it_is(tmp_path: Path) -> None:
    nothing = report.page(tmp_path)
    assert nothing.count(f"{report.NOT_MEASURED} |") == sum(
        len(lines) for lines in (report.GPU_TARGETS, report.GPU_HOST, report.GPU_PEERS, [report.EXCHANGES])
    )
    rows = [gpu_row("pack", 0.97, 0.95), gpu_row("pack", 0.5, None), gpu_row("unpack", 0.9, 0.95)]
    for name, us in (("launch", 4.5), ("plan, path and launch", 7.5)):
        rows.append(timing.figures(f"host, {name}", {"ours": [us] * 10, "floor": [3.0] * 10, "copy_": [3.0] * 10}))
    content = {"versions": {"torch": "2"}, "rows": rows}
    timing.write_json(tmp_path / "nvidia-x" / "gpu_bench.json", content)
    page = report.page(tmp_path)
    assert "| 0.95 of the roof | nvidia-x: 0.97 ± 0.00 (pack 64 MiB) |" in page
    assert "| 0.95 of the roof | nvidia-x: 0.90 ± 0.00 (unpack 64 MiB), 1 of 1 rows missed |" in page
    assert "| 0.90 of the roof | not measured |" in page
    assert "launch | 2 us above the launcher's own | nvidia-x: 1.5 us above 3.0 |" in page
    assert "plan, path and launch | 4 us above the launcher's own | nvidia-x: 4.5 us above 3.0, missed |" in page
    slower = page.partition("A peer is faster on NVIDIA X in these 2 of 5 comparisons:")[2].partition("\n## ")[0]
    assert slower.count("`copy_`") == slower.count("| host, ") == 2
    assert "| pack 64 MiB | 0.97 | 0.95 | `split + cat` 1.00 ± 0.00 |" in page.split("## nvidia-x/gpu_bench")[1]


def test_a_target_is_missed_by_more_than_the_spread() -> None:
    """A share that is below its target by less than its own spread decides nothing."""
    row = gpu_row("pack", 0.94, 0.95)
    assert report.misses_roof(row)
    assert not report.misses_roof(row | {"spread": {"roof": 0.02}})
    assert not report.misses_roof(row | {"target": None})


def test_mappings_that_communicate_have_means_of_their_own(tmp_path: Path) -> None:
    """Rows without a collective, and rows that copy more than the peer, are in no mean; both sides enqueue."""

    def row(name: str, mode: str, ours: float, enqueue: float | None) -> dict[str, Any]:
        samples = {"ours": [ours] * 10, "megatron": [20.0] * 10, "by hand": [10.0] * 10}
        if enqueue is not None:
            samples["enqueue"] = [enqueue] * 10
        return timing.figures(name, samples, uncompared=("enqueue",), mode=mode)

    rows = [row("a", "forward", 5.0, 10.0), row("b", "forward", 1.0, None), row("c", "forward, copied", 40.0, 10.0)]
    assert report.communicating(rows) == {"forward": {"megatron": 0.25, "with enqueue": 0.5, "by hand": 0.5}}
    timing.write_json(tmp_path / "cpu" / "host_cost.json", {"versions": {}, "rows": rows})
    page = report.page(tmp_path)
    assert "| forward | 0.25 | 0.50 | 0.50 |" in page
    assert "A peer is faster in 1 of 3 rows." in page
    assert "| host_cost | c, copied | `by hand` 4.00 ± 0.00; `megatron` 2.00 ± 0.00 |" in page
