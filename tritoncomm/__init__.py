"""A communication layer for tensor, sequence and pipeline parallel training: Triton kernels around the collectives."""

from tritoncomm import collective, mappings
from tritoncomm.errors import ArgumentError, CommError, GroupError, ShapeError, UnsupportedError
from tritoncomm.groups import ParallelMode
from tritoncomm.ops import path
from tritoncomm.record import counters, recording
from tritoncomm.runtime import destroy, device_mesh, initialize

__all__ = [
    "ArgumentError",
    "CommError",
    "GroupError",
    "ParallelMode",
    "ShapeError",
    "UnsupportedError",
    "collective",
    "counters",
    "destroy",
    "device_mesh",
    "initialize",
    "mappings",
    "path",
    "recording",
]

__version__ = "0.1.0"
