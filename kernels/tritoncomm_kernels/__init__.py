"""Triton kernels for the memory work around collectives, and the same functions in plain torch.

Nothing here imports Triton before the first kernel is asked for: its import takes longer than that of all the rest, and
where only torch's path is taken it is never needed.
"""

import importlib
from typing import TYPE_CHECKING, Any

from tritoncomm_kernels import reference
from tritoncomm_kernels.config import Config, config_for
from tritoncomm_kernels.geometry import MAX_PARTS, TooLargeError

if TYPE_CHECKING:
    from tritoncomm_kernels.copy import pack, plain_copy, unpack
    from tritoncomm_kernels.cross_entropy import gradient, statistics
    from tritoncomm_kernels.reduction import reduce

__all__ = [
    "MAX_PARTS",
    "Config",
    "TooLargeError",
    "config_for",
    "gradient",
    "pack",
    "plain_copy",
    "reduce",
    "reference",
    "statistics",
    "unpack",
]

# Functions whose modules import Triton, by the module. None is named as a module is, which would take its name.
_LAZY = {
    "gradient": "cross_entropy",
    "pack": "copy",
    "plain_copy": "copy",
    "reduce": "reduction",
    "statistics": "cross_entropy",
    "unpack": "copy",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'tritoncomm_kernels' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"tritoncomm_kernels.{_LAZY[name]}"), name)
    globals()[name] = value  # from now on an attribute as any other: a warm call does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
