"""Triton kernels for the memory work around collectives, and the same functions in plain torch."""

from tritoncomm_kernels import reference, softmax
from tritoncomm_kernels.config import Config, config_for
from tritoncomm_kernels.copy import pack, unpack
from tritoncomm_kernels.launch import TooLargeError
from tritoncomm_kernels.reduce import MAX_PARTS, reduce

__all__ = ["MAX_PARTS", "Config", "TooLargeError", "config_for", "pack", "reduce", "reference", "softmax", "unpack"]
