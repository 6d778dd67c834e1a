"""Settings of a benchmark: ranks, device, sizes, time; and the exchanges that they choose."""

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from tritoncomm import launchers
from tritoncomm.bench.exchanges import EXCHANGES, TimedExchange
from tritoncomm.errors import ArgumentError
from tritoncomm.parsing import counted

__all__ = ["Settings", "chosen", "matches"]

SIZES = {
    "cuda": (16.0, 64.0, 4.0, 1.0, 256.0),
    "cpu": (4.0, 16.0, 1.0),
}  # MiB; the most telling first, and last what may not fit
DTYPES = ("bfloat16", "float16", "float32", "float64")


def matches(words: str, name: str) -> bool:
    """Whether a name has all of these words, in any order and case; a number matches no part of a longer number."""
    patterns = (rf"(?<!\d){word}(?!\d)" if word.isdecimal() else re.escape(word) for word in words.split())
    return all(re.search(pattern, name, re.IGNORECASE) for pattern in patterns)


@dataclass(frozen=True)
class Settings:
    """One run.

    Attributes:
        ranks: processes to start; None where a launcher started this one as a rank.
        device: cuda, cpu, or auto: cuda where there is one.
        dtype: of the tensors.
        sizes: MiB of each rank's input; those of the device by default.
        only: words of names, as ``matches`` takes them; an exchange that matches none of these texts is left out.
        budget: seconds after which no further exchange begins.
        timeout: seconds after which a collective fails.
        dry: make the rows of captured calls on CPUs too, where no call is captured.
    """

    ranks: int | None = 2
    device: str = "auto"
    dtype: str = "bfloat16"
    sizes: tuple[float, ...] = ()
    only: tuple[str, ...] = ()
    budget: float = 270.0
    timeout: float = 60.0
    dry: bool = False

    def __post_init__(self) -> None:
        if self.device not in ("auto", "cpu", "cuda"):
            raise ArgumentError(f"the device is auto, cpu or cuda, not {self.device!r}")
        if self.dtype not in DTYPES:
            raise ArgumentError(f"the dtype is {', '.join(DTYPES)}, not {self.dtype}")
        if self.ranks is not None and self.ranks < 2:
            raise ArgumentError("an exchange needs 2 ranks or more")
        if any(not 0 < mib <= 4096 for mib in self.sizes):
            raise ArgumentError("a size is more than 0 and at most 4096 MiB")
        if not any(self._names(exchange) for exchange in EXCHANGES):
            raise ArgumentError(f"no exchange has {' or '.join(map(repr, self.only))} in its name: {_all_names()}")
        if self.device == "cuda" and not torch.cuda.is_available():
            raise ArgumentError("there is no CUDA device; --device cpu runs over Gloo")
        if self.ranks is not None and self.on_gpu() and self.ranks > torch.cuda.device_count():
            gpus = counted(torch.cuda.device_count(), "GPU")
            raise ArgumentError(
                f"{self.ranks} ranks need a GPU each, and there are {gpus}; --device cpu runs over Gloo"
            )

    def _names(self, exchange: TimedExchange) -> bool:
        return not self.only or any(matches(words, exchange.name) for words in self.only)

    def on_gpu(self) -> bool:
        return self.device == "cuda" or (self.device == "auto" and torch.cuda.is_available())

    def backend(self) -> str:
        return "nccl" if self.on_gpu() else "gloo"

    def world(self) -> int:
        """Number of ranks, the launcher's in a process that it started."""
        if self.ranks is not None:
            return self.ranks
        launch = launchers.started_by(os.environ)
        assert launch is not None
        return launch.size

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


def chosen(settings: Settings) -> Iterator[tuple[TimedExchange, float]]:
    """Yield exchanges with their MiB, all exchanges of one size before those of the next."""
    for mib in settings.sizes or SIZES["cuda" if settings.on_gpu() else "cpu"]:
        for exchange in EXCHANGES:
            if settings._names(exchange):
                yield exchange, mib


def _all_names() -> str:
    return ", ".join(exchange.name for exchange in EXCHANGES)
