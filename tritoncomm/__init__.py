"""A communication layer for tensor, sequence and pipeline parallel training: Triton kernels around the collectives."""

import importlib
from typing import TYPE_CHECKING, Any

from tritoncomm import collective, mappings
from tritoncomm.core import ops
from tritoncomm.core.ops import path
from tritoncomm.debug import dump
from tritoncomm.errors import (
    ArgumentError,
    CommError,
    GroupError,
    MismatchError,
    PeerError,
    ShapeError,
    UnsupportedError,
)
from tritoncomm.groups import ParallelMode
from tritoncomm.record import counters, recording
from tritoncomm.runtime import destroy, device_mesh, initialize

if TYPE_CHECKING:
    from tritoncomm import p2p, reshard, tensor

__all__ = [
    "ArgumentError",
    "CommError",
    "GroupError",
    "MismatchError",
    "ParallelMode",
    "PeerError",
    "ShapeError",
    "UnsupportedError",
    "collective",
    "counters",
    "destroy",
    "device_mesh",
    "dump",
    "initialize",
    "mappings",
    "ops",
    "p2p",
    "path",
    "recording",
    "reshard",
    "tensor",
]

__version__ = "0.1.0"

_LAZY = ("p2p", "reshard", "tensor")  # imported at their first use: together they take longer than everything else


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"tritoncomm.{name}")
    raise AttributeError(f"module 'tritoncomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
