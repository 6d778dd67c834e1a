"""Where the GPU checks run, how large they are, and random bits for them."""

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["FLOATS", "INTEGER", "Setting", "bits", "make_setting"]

INTEGER = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
COPIED = (
    *FLOATS,
    *(getattr(torch, name) for name in ("float8_e4m3fn", "float8_e5m2") if hasattr(torch, name)),
    *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.complex64),
)


@dataclass
class Setting:
    """Where the checks run, and how large they are."""

    device: torch.device
    dry: bool
    generator: torch.Generator

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.bfloat16, torch.float32, torch.bool, torch.complex64) if self.dry else COPIED

    @property
    def backend(self) -> str:
        return "gloo" if self.dry else "nccl"


def bits(setting: Setting, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Random bits of the dtype's width as integers: NaN, infinities, denormals and negative zero included."""
    kind = INTEGER[dtype.itemsize]
    low, high = (0, 2) if dtype is torch.bool else (torch.iinfo(kind).min, torch.iinfo(kind).max)
    return torch.randint(low, high, shape, dtype=kind, device=setting.device, generator=setting.generator)


def make_setting(dry: bool, device: int = 0) -> Setting:
    place = torch.device("cpu") if dry else torch.device("cuda", device)
    if not dry:
        torch.cuda.set_device(place)
    return Setting(place, dry, torch.Generator(place).manual_seed(0))
