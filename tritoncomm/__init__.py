"""A communication layer for tensor, sequence and pipeline parallel training: Triton kernels around the collectives.

Names mean one thing in all modules. ``group`` is a process group, ``world`` the number of its ranks and ``rank`` a
position in it, but ``src``, ``dst`` and lists of ranks are global ranks. ``dim`` is a dim of a tensor, ``axis`` one of
a mesh. ``name`` is the function that the program called, for errors and counters, and ``x`` or ``tensor`` the local
tensor. ``bytes_copied`` are bytes read plus written by local passes, ``bytes_sent`` bytes that this rank sends.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tritoncomm import collective, mappings, ops
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
    from tritoncomm import experts, integrations, p2p, parallel, recurrent, reshard, tensor, ulysses
    from tritoncomm.integrations.megatron import patch as patch_megatron
    from tritoncomm.integrations.megatron import unpatch as unpatch_megatron

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
    "experts",
    "initialize",
    "integrations",
    "mappings",
    "ops",
    "p2p",
    "parallel",
    "patch_megatron",
    "path",
    "recording",
    "recurrent",
    "reshard",
    "tensor",
    "ulysses",
    "unpatch_megatron",
]

__version__ = "0.1.0"

# Imported at their first use: together they take longer than everything else.
_LAZY = ("experts", "integrations", "p2p", "parallel", "recurrent", "reshard", "tensor", "ulysses")
_FUNCTIONS = {
    "patch_megatron": ("integrations.megatron", "patch"),
    "unpatch_megatron": ("integrations.megatron", "unpatch"),
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return importlib.import_module(f"tritoncomm.{name}")
    if name in _FUNCTIONS:
        module, function = _FUNCTIONS[name]
        return getattr(importlib.import_module(f"tritoncomm.{module}"), function)
    raise AttributeError(f"module 'tritoncomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_FUNCTIONS})
