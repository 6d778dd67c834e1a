"""Device time of a training step by owner: tritoncomm's kernels, NCCL's, and all others.

Run as ``python bench/gpu_step.py``. Two ranks train the demo's transformer, in bfloat16 and with sizes of their own, on
one GPU over Gloo or on two over NCCL. ``torch.profiler`` records two steps of every rank; a step ends with the
optimizer's. The shares are of the summed time of all kernels and copies on the device, not of wall time. Results go to
$OUT, or to ``bench/results/<device>/``. ``--dry`` runs the same on the CPU, where no device time exists, and writes
nothing. Exits 1 when a loss differs from one process or no kernel of tritoncomm ran, 2 without a CUDA device.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.autograd import DeviceType
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.profiler import ProfilerActivity, profile, schedule

from bench.timing import results_folder, versions, write_json
from tritoncomm.demo import Settings, run

SKIPPED, RECORDED = 4, 2  # steps
OURS = (
    "_copy_kernel", "_copy_split_kernel", "_copy_table_kernel", "_reduce_kernel", "_segments_kernel", "_rows_kernel",
    "_sum_rows_kernel", "_scale_rows_kernel", "_dot_rows_kernel", "_scale_dot_rows_kernel",
    "_count_ids_kernel", "_scan_ids_kernel", "_place_ids_kernel",
    "_statistics_kernel", "_gradient_kernel", "_wire_order_kernel",
)  # fmt: skip
SIZES = {"hidden": 1024, "heads": 16, "sequence": 2048, "batch": 2, "layers": 2, "dtype": "bfloat16"}


@dataclass(frozen=True)
class Profiler:
    """Called in every rank before training: records steps and writes their device times into ``folder``."""

    folder: Path

    def __call__(self) -> None:
        steps = schedule(wait=SKIPPED - 1, warmup=1, active=RECORDED, repeat=1)
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        profiler = profile(activities=activities, schedule=steps, on_trace_ready=self._write)
        profiler.start()
        register_optimizer_step_post_hook(lambda *_: profiler.step())

    def _write(self, profiler: profile) -> None:
        times = times_on(DeviceType.CUDA, profiler.events() or ())
        (self.folder / f"{os.getpid()}.json").write_text(json.dumps(times))


def times_on(device: DeviceType, events: Iterable[Any]) -> list[tuple[str, float]]:
    """Name and microseconds of every event of a device."""
    # Every event has a DeviceType object of its own, so that ``is`` finds none.
    return [(each.name, each.self_device_time_total) for each in events if each.device_type == device]


def shares(times: Iterable[tuple[str, float]]) -> dict[str, float]:
    """Microseconds of device time by owner, from (name, microseconds) of every kernel and copy."""
    owners = {"tritoncomm": 0.0, "NCCL": 0.0, "others": 0.0}
    for name, us in times:
        owner = "tritoncomm" if name.startswith(OURS) else "NCCL" if name.lower().startswith("nccl") else "others"
        owners[owner] += us
    return owners


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--dry", action="store_true", help=argparse.SUPPRESS)
    dry = parser.parse_args().dry
    if not dry and not torch.cuda.is_available():
        print("gpu_step: no CUDA device here; nothing was measured")
        return 2
    sizes: dict[str, Any] = {"device": "cpu"} if dry else {"device": "cuda", **SIZES}
    settings = Settings(ranks=2, steps=SKIPPED + RECORDED, **sizes)
    with tempfile.TemporaryDirectory() as folder:
        outcome = run(settings, prepare=Profiler(Path(folder)))
        ranks = [shares(json.loads(path.read_text())) for path in sorted(Path(folder).iterdir())]
    return report(ranks, outcome.largest_difference()[0], settings, dry)


def report(ranks: list[dict[str, float]], difference: float, settings: Settings, dry: bool) -> int:
    """Print the shares and write the results; the exit status."""
    assert len(ranks) == settings.ranks, "a rank wrote no profile"
    total = {owner: sum(rank[owner] for rank in ranks) / RECORDED / len(ranks) for owner in ranks[0]}
    device = "cpu" if dry else torch.cuda.get_device_name(0)
    print(f"{device}: {settings.ranks} ranks over {settings.backend()}, {settings.dtype}, hidden {settings.hidden}")
    whole = sum(total.values())
    for owner, us in total.items():
        print(f"{owner:12} {us:12.1f} us of a step on a rank, {us / whole if whole else 0.0:6.1%} of its device time")
    print(f"largest relative difference of a loss to one process: {difference:.1e}, at most {settings.limit:.0e}")
    if not dry:
        content = {"device": device, "backend": settings.backend(), "sizes": SIZES, "versions": versions()}
        path = Path(os.environ.get("OUT") or results_folder(device)) / "gpu_step.json"
        write_json(path, {**content, "us_per_step": total, "difference": difference})
        print("written:", path)
    problems = ["a loss differs from one process"] if difference > settings.limit else []
    problems += ["no kernel of tritoncomm ran on the device"] if not dry and not total["tritoncomm"] else []
    for problem in problems:
        print("FAILED:", problem)
    return int(bool(problems))


if __name__ == "__main__":
    sys.exit(main())
