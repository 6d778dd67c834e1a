"""Parts that run on a GPU: its clocks, or the host's in a dry run, and the command."""

import argparse
import faulthandler
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from tritoncomm_kernels.address import _sum

from bench.harness import Part, Run
from bench.timing import results_folder

__all__ = ["GRACE_S", "Call", "Device", "gpu_main", "machine"]

Call = Callable[[], Any]
GRACE_S = 20  # for a case that began in time
LATE = 3  # exit status
BLOCK = 8192  # integers of 32 bits that a program of the roof of reads sums: 8 loads of 16 bytes for each thread


class Device:
    """Clocks of the device: CUDA events, or the host's clock when dry."""

    def __init__(self, dry: bool) -> None:
        self.dry = dry
        self.device = torch.device("cpu") if dry else torch.device("cuda", 0)
        self.name = "dry run on the CPU" if dry else torch.cuda.get_device_name(0)
        cache = 0 if dry else torch.cuda.get_device_properties(0).L2_cache_size
        self._flush = torch.empty(max(4 * cache, 4096), dtype=torch.int8, device=self.device)

    def synchronize(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        if self.dry:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def microseconds(self, start: Any, end: Any) -> float:
        return (end - start) * 1e6 if self.dry else start.elapsed_time(end) * 1e3

    def times(self, calls: dict[str, Call], rounds: int, is_warm: bool = False) -> dict[str, list[float]]:
        """Microseconds of every call, one sample per round, every provider in every round, caches cold or warm."""
        for call in calls.values():
            for _ in range(3):
                call()
        self.synchronize()
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self._flush.zero_()  # also keeps the device busy while the host prepares the call
                if is_warm:
                    call()
                start = self.mark()
                call()
                marks[name].append((start, self.mark()))
        self.synchronize()
        return {name: [self.microseconds(*pair) for pair in pairs] for name, pairs in marks.items()}

    def copies(self, moved: int) -> Call:
        """A contiguous copy that reads and writes ``moved`` bytes in all."""
        source, target = (torch.empty(moved // 2, dtype=torch.int8, device=self.device) for _ in range(2))
        return lambda: target.copy_(source)

    def reads(self, moved: int) -> Call:
        """A kernel that reads ``moved`` bytes, but for less than a block, and writes one integer for each block."""
        blocks = max(1, moved // (4 * BLOCK))
        source = torch.zeros(blocks * BLOCK, dtype=torch.int32, device=self.device)
        sums = torch.empty(blocks, dtype=torch.int32, device=self.device)
        return partial(_block_sums, source, sums)

    def machine(self) -> list[str]:
        """Driver, clocks, power, temperature and other processes, under the load of a loop of writes."""
        if self.dry:
            return []
        with ThreadPoolExecutor(1) as pool:
            lines = pool.submit(machine)
            while not lines.done():
                self._flush.zero_()
                torch.cuda.synchronize()
        return lines.result()


def _block_sums(source: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    _sum_kernel[(len(sums),)](source, sums, BLOCK=BLOCK, num_warps=8)  # pyright: ignore[reportIndexIssue]
    return sums


@triton.jit
def _sum_kernel(source_ptr, sums_ptr, BLOCK: tl.constexpr):
    """Write the sum of one block, so that no load of it is optimised away."""
    block = tl.program_id(0).to(tl.int64)
    values = tl.load(source_ptr + block * BLOCK + tl.arange(0, BLOCK))
    # Not tl.sum: see the comment in kernels/tritoncomm_kernels/cross_entropy.py.
    tl.store(sums_ptr + block, tl.reduce(values, 0, _sum))


def machine() -> list[str]:
    """Versions, and for every GPU its driver, clocks, power cap, MIG, mode and other processes."""
    lines = [f"torch {torch.__version__}, CUDA {torch.version.cuda}, HIP {torch.version.hip}"]
    smi = shutil.which("nvidia-smi")
    if smi is None:
        return [*lines, "no nvidia-smi here: driver, clocks, power cap, MIG and other processes are unknown"]
    fields = ("index", "name", "driver_version", "compute_mode", "mig.mode.current", "clocks.sm", "clocks.max.sm")
    fields += ("clocks.mem", "power.draw", "power.limit", "power.max_limit", "temperature.gpu", "utilization.gpu")
    queries = [("--query-gpu", fields), ("--query-compute-apps", ("gpu_uuid", "pid", "process_name", "used_memory"))]
    for query, names in queries:
        command = [smi, f"{query}={','.join(names)}", "--format=csv,noheader"]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            lines.append(f"nvidia-smi {query} failed: {error}")
            continue
        if done.returncode:
            lines.append(f"nvidia-smi {query} failed: {(done.stdout + done.stderr).strip()}")
        for row in done.stdout.splitlines() if not done.returncode else ():
            pairs = zip(names, row.split(", "), strict=False)
            lines.append("; ".join(f"{name} {value}" for name, value in pairs))
        if not done.returncode and "apps" in query and not done.stdout.strip():
            lines.append("no other process on the GPUs")
    return lines


def gpu_main(part: Part, around: AbstractContextManager[Any] | None = None) -> int:
    """The command of a part that gets a ``Device``: 0 also where a target is missed, 1 where a case failed.

    ``--dry`` runs it on the CPU; 2 without a CUDA device, 3 where cases were left out for want of time. Whatever ends
    the process, every row has been printed, and beyond its budget it ends with the stack of every thread.
    """
    parser = part.parser()
    parser.add_argument("--rest", metavar="PATH", help="keep the rows of this file, measure what it had no time for")
    parser.add_argument("--dry", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        print(f"{part.name}: no CUDA device here; nothing was measured")
        return 2
    if options.dry and os.environ.get("TRITON_INTERPRET") != "1":
        print(f"{part.name}: --dry needs TRITON_INTERPRET=1")
        return 2
    torch.manual_seed(0)
    if not options.dry:
        sys.stdout.reconfigure(line_buffering=True)  # pyright: ignore[reportAttributeAccessIssue]
        faulthandler.dump_traceback_later(part.budget_s + GRACE_S, exit=True)
    device = Device(options.dry)
    part = replace(part, host=lambda: nullcontext(device))
    path = None if options.dry else options.json or destination(device, part.name)
    print(f"{device.name}, torch {torch.__version__}, triton {triton.__version__}")
    run = Run(
        part,
        2 if options.dry else options.rounds,
        options.only,
        path,
        {"device": device.name, "machine": device.machine()},
    )
    if options.rest:
        run.continue_from(options.rest)
    with around or nullcontext():
        run.measure()
    status = run.finish()
    if options.dry:
        print("dry run: nothing written")
    if status == 1:  # a target that was missed is reported, and no error
        status = int(bool(run.failed))
    return LATE if status == 0 and run.left_out else status


def destination(device: Device, part: str) -> Path:
    """``part.json`` in $OUT, or in the folder of this device beside this file."""
    return Path(os.environ.get("OUT") or results_folder(device.name)) / f"{part}.json"
