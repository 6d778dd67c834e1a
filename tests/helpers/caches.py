"""Functions with a cache, and what the keys of their caches keep alive."""

import gc
import sys
from collections.abc import Iterator
from types import MethodType, ModuleType
from typing import Any

__all__ = ["caches", "kept_by"]


def caches() -> Iterator[tuple[str, Any]]:
    """Functions with a cache of our imported modules, by their full names."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("tritoncomm", "tritoncomm_kernels") and isinstance(module, ModuleType):
            for key, value in list(vars(module).items()):
                if callable(getattr(value, "cache_info", None)) and value.__module__ == name:
                    yield f"{name}.{key}", value


def kept_by(cache: Any) -> Iterator[Any]:
    """Arguments among the keys of a cache, and objects of which methods are."""
    for table in gc.get_referents(cache):
        for key in table if isinstance(table, dict) else ():
            for argument in key if isinstance(key, tuple) else (key,):
                yield argument.__self__ if isinstance(argument, MethodType) else argument
