"""Clocks of a GPU, or of the host in a dry run, and where the results of a device go."""

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

__all__ = ["Call", "Device", "destination"]

Call = Callable[[], Any]


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

    def times(self, calls: dict[str, Call], rounds: int) -> dict[str, list[float]]:
        """Microseconds of every call, one sample per round, every provider in every round, caches cold."""
        for call in calls.values():
            for _ in range(3):
                call()
        self.synchronize()
        marks: dict[str, list[tuple[Any, Any]]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                self._flush.zero_()  # also keeps the device busy while the host prepares the call
                start = self.mark()
                call()
                marks[name].append((start, self.mark()))
        self.synchronize()
        return {name: [self.microseconds(*pair) for pair in pairs] for name, pairs in marks.items()}

    def roof(self, moved: int) -> Call:
        """A contiguous copy that reads and writes ``moved`` bytes in all."""
        source, target = (torch.empty(moved // 2, dtype=torch.int8, device=self.device) for _ in range(2))
        return lambda: target.copy_(source)


def destination(device: Device, part: str) -> Path:
    """``part.json`` in $OUT, or in the folder of this device beside this file."""
    if os.environ.get("OUT"):
        return Path(os.environ["OUT"]) / f"{part}.json"
    folder = "".join(c if c.isalnum() else "-" for c in device.name.lower())
    return Path(__file__).resolve().parent / "results" / folder / f"{part}.json"
