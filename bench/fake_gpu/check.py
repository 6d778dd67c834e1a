"""The checks of ``gpu_test.py`` on a GPU that is not there: what Triton compiled, launched by Triton, run as PTX.

Run as ``make fake-gpu-test``. It needs a C compiler and takes the CPU; what it says about correctness holds for the
machine code up to its last translation, about speed it says nothing. ``--quick`` takes tiny sizes and fewer dtypes.
Exits 0 when everything holds, 1 when something does not, 2 where it cannot run.
"""

import argparse
import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from unittest import mock

import torch
import tritoncomm_kernels as kernels
from tritoncomm_kernels import copy, launch, reference

from bench import gpu_ranks, gpu_test
from bench.checks import Group, run_check, summary
from bench.fake_gpu.device import Device
from bench.fake_gpu.program import PtxError

CAPABILITIES = {"8.0": (8, 0), "9.0": (9, 0), "10.0": (10, 0)}


def check_variants(group: Group, device: Device, setting: gpu_test.Setting) -> None:
    """Sizes, also those that Triton would specialise for, share a variant; each result is looked at."""
    loaded = set()
    for rows, world, run in ((1, 2, 8), (16, 16, 16), (17, 3, 8), (5, 1, 24), (1, 1, 8), (64, 4, 128)):
        x = gpu_test.bits(setting, (rows, world * run), torch.bfloat16)
        wire, want = (torch.empty(world, rows, run, dtype=torch.int16) for _ in range(2))
        config = kernels.Config(4, 128)
        before = set(device.kernels)
        kernels.pack(x.view(torch.bfloat16), wire.view(torch.bfloat16), config=config)
        reference.pack(x, want)
        group.expect(torch.equal(wire, want), f"pack {rows} x {world} x {run}")
        loaded |= set(device.kernels) - before
    group.expect(len(loaded) <= 1, f"{len(loaded)} variants for one kind of call")


def check_split_sizes(group: Group, device: Device, setting: gpu_test.Setting) -> None:
    """By value up to 16 ranks, in a table beyond, in one step for every 128; equal, empty and hot ranks."""
    for world, kernel in ((1, "split"), (8, "split"), (16, "split"), (17, "table"), (130, "table")):
        before = len(device.launches)
        for sizes in ((8,) * world, tuple(8 * (w % 3) for w in range(world - 1)) + (200,)):
            rows = gpu_test.bits(setting, (5, sum(sizes)), torch.bfloat16)
            gpu_test.copy_both_ways(group, f"{world} ranks, up to {max(sizes)}", rows, torch.bfloat16, world, sizes)
        names = {name for name, _ in device.launches[before:]}
        group.expect(names == {f"_copy_{kernel}_kernel"}, f"{world} ranks by {names}")


def check_ordinary_launch(group: Group, device: Device, setting: gpu_test.Setting) -> None:
    """The launch for a Triton whose direct one is not known."""
    with mock.patch.object(launch, "_known_version", return_value=False):
        group.expect(not launch.is_direct(0), "the direct launch is off")
        gpu_test.check_sizes(group, setting)
        gpu_test.copy_both_ways(group, "ordinary", gpu_test.bits(setting, (3, 96), torch.float32), torch.float32, 4)
    group.expect(launch.is_direct(0), "the direct launch is on")


def check_faults(group: Group, device: Device, setting: gpu_test.Setting) -> None:
    """What a GPU would not forgive is seen here too: the plan of one call with the tensors of another."""
    x, wire = torch.zeros(8, 64, dtype=torch.bfloat16), torch.zeros(4, 8, 16, dtype=torch.bfloat16)

    def planned(alignment: int) -> launch.Launch:
        layout = (x.shape, x.stride(), wire.shape, wire.stride(), None, False, False, None)
        call = copy._plan("pack", 0, x.dtype, wire.dtype, alignment, *layout)[0]
        assert call is not None
        return call

    def expect_fault(what: str, call: Callable[[], None], message: str) -> None:
        try:
            call()
        except PtxError as error:
            group.expect(message in str(error), f"{what}: {error}")
        else:
            group.expect(False, f"{what} went unseen")

    shifted = torch.zeros(8 * 64 + 1, dtype=torch.bfloat16)[1:].view(8, 64)
    flat = wire.view(-1)
    planned(0)(x, wire, 1.0)
    planned(2)(shifted, wire, 1.0)
    expect_fault("rows at an odd address", lambda: planned(0)(shifted, wire, 1.0), "no multiple of")
    expect_fault("a wire too short", lambda: planned(0)(x, flat[:-8], 1.0), "from a buffer")
    expect_fault("rows too short", lambda: planned(0)(x.view(-1)[:-16], wire, 1.0), "from a buffer")


def check_mappings(group: Group, device: Device, setting: gpu_test.Setting) -> None:
    """Every mapping on ranks in threads that launch at once, evenly and by sizes; ``auto`` takes the kernels here."""
    for world in (2,) if setting.dry else (2, 4, 8):
        gpu_ranks.check_mappings(group, world, setting.device)
        gpu_ranks.check_split_sizes(group, world, setting.device)


def check_transitions(group: Group, device: Device, setting: gpu_test.Setting) -> None:
    """Every redistribution of a sharded tensor, likewise."""
    for world in (2,) if setting.dry else (2, 4, 8):
        gpu_ranks.check_transitions(group, world, setting.device)


Check = Callable[[Group, Device, gpu_test.Setting], None]


def _as_on_a_gpu(check: Callable[[Group, gpu_test.Setting], None]) -> Check:
    return lambda group, device, setting: check(group, setting)


CHECKS: dict[str, Check] = {
    "faults are seen": check_faults,
    "variants": check_variants,
    "split sizes by value and in a table": check_split_sizes,
    "ordinary launch": check_ordinary_launch,
    "copies: dtypes and layouts": _as_on_a_gpu(gpu_test.check_dtypes_and_layouts),
    "copies: access widths": _as_on_a_gpu(gpu_test.check_units),
    "copies: ragged rows, gaps": _as_on_a_gpu(gpu_test.check_ragged_and_gaps),
    "copies: split sizes": _as_on_a_gpu(gpu_test.check_sizes),
    "copies: rows beyond 2**31": _as_on_a_gpu(gpu_test.check_far_rows),
    "casts, scales, accumulation": _as_on_a_gpu(gpu_test.check_arithmetic),
    "reduce": _as_on_a_gpu(gpu_test.check_reduce),
    "cross entropy": _as_on_a_gpu(gpu_test.check_cross_entropy),
    "ranks in threads: mappings": check_mappings,
    "ranks in threads: sharded tensors": check_transitions,
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Correctness of the compiled kernels, without a GPU.")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, fewer dtypes")
    parser.add_argument("--only", action="append", default=[], help="only groups whose name contains this, or another")
    parser.add_argument("--capability", choices=CAPABILITIES, default="9.0", help="of the GPU, 9.0 by default")
    options = parser.parse_args()
    if os.environ.get("TRITON_INTERPRET") == "1" or shutil.which("cc") is None:
        print("fake_gpu: needs a C compiler, and TRITON_INTERPRET unset; nothing was tested")
        return 2
    device, started = Device(CAPABILITIES[options.capability]), time.monotonic()
    setting = gpu_test.Setting(torch.device("cpu"), options.quick, torch.Generator().manual_seed(0))
    with device.current():
        groups = [
            run_check(name, partial(_called, check, device, setting), math.inf)
            for name, check in CHECKS.items()
            if not options.only or any(part in name for part in options.only)
        ]
    print(f"{len(device.kernels)} compiled kernels of sm_{options.capability.replace('.', '')}, ", end="")
    print(f"{len(device.launches)} launches")
    return 1 if summary(groups, started) else 0


def _called(check: Check, device: Device, setting: gpu_test.Setting, group: Group) -> None:
    check(group, device, setting)


if __name__ == "__main__":
    sys.exit(main())
