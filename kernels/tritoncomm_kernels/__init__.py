"""Triton kernels for the memory work around collectives, and the same functions in plain torch."""

from tritoncomm_kernels import cross_entropy, reference
from tritoncomm_kernels.config import Config, config_for
from tritoncomm_kernels.copy import pack, unpack
from tritoncomm_kernels.cross_entropy import gradient, statistics
from tritoncomm_kernels.launch import TooLargeError
from tritoncomm_kernels.reduce import MAX_PARTS, reduce
from tritoncomm_kernels.segment_copy import gather_segments, scatter_segments
from tritoncomm_kernels.segments import PADDING, Segment, Segments

__all__ = [
    "MAX_PARTS",
    "PADDING",
    "Config",
    "Segment",
    "Segments",
    "TooLargeError",
    "config_for",
    "cross_entropy",
    "gather_segments",
    "gradient",
    "pack",
    "reduce",
    "reference",
    "scatter_segments",
    "statistics",
    "unpack",
]
