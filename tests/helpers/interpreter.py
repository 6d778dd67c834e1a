"""Triton's interpreter without the work that tests of bits do not need: the same bits in half of the time.

It makes a table of all dtypes for each value, looks at every name of ``triton.language`` for each launch and each call
of a device function, reduces element by element by any function that is none of Triton's own, and computes every sum
and product of integers once more in 64 bits, to see whether it is too large: an address that is would be another one,
and other bits.
"""

import inspect
from dataclasses import replace
from functools import cache
from importlib import metadata
from typing import Any

import numpy as np

__all__ = ["KNOWN", "ORIGINAL", "speed_up"]

KNOWN = ("3.6.0", "3.7.1")
"""Versions whose interpreter has these functions; another one is left as it is."""
ORIGINAL: list[Any] = []
"""Triton's own reduction, to compare with."""


def speed_up() -> bool:
    """Replace the functions in this process, whose kernels are interpreted; return whether the version is known."""
    if metadata.version("triton") not in KNOWN:
        return False
    from triton import language as tl
    from triton.runtime import interpreter

    if interpreter.ReduceOps.generic_reduce is not _reduce:
        interpreter._get_np_dtype = _np_dtype_of(interpreter._get_np_dtype, tl)
        interpreter._patch_lang = _patch_once(interpreter._patch_lang, interpreter._LangPatchScope, tl)
        interpreter._patch_builtin = _patch_builtin(interpreter._patch_attr, tl)
        ORIGINAL.append(interpreter.ReduceOps.generic_reduce)
        interpreter.ReduceOps.generic_reduce = _reduce
        interpreter.interpreter_builder.options = replace(
            interpreter.interpreter_builder.options, sanitize_overflow=False
        )
    return True


def _np_dtype_of(of_scalar: Any, tl: Any) -> Any:
    """``_get_np_dtype``, which keeps the dtypes of numpy by Triton's."""
    of_scalar, pointer = cache(of_scalar), np.dtype(np.uint64)

    def np_dtype_of(dtype: Any) -> Any:
        scalar = dtype.element_ty if isinstance(dtype, tl.block_type) else dtype
        return pointer if isinstance(scalar, tl.pointer_type) else of_scalar(scalar)

    return np_dtype_of


def _patch_once(patch: Any, scope: Any, tl: Any) -> Any:
    """``_patch_lang`` of a kernel; a device function that it calls sees the same module, which is patched already."""

    def patched(function: Any) -> Any:
        modules = [x for x in function.__globals__.values() if x is tl or x is tl.core]
        if modules and tl.core not in modules and not tl.core.is_builtin(tl.arange):
            return scope()
        return patch(function)

    return patched


def _patch_builtin(patch_attr: Any, tl: Any) -> Any:
    """``_patch_builtin``, which looks for the builtin functions of a module or class once."""

    @cache
    def builtins(owner: Any) -> list[tuple[str, Any]]:
        return [(name, member) for name, member in inspect.getmembers(owner) if tl.core.is_builtin(member)]

    def patched(owner: Any, builder: Any, scope: Any) -> None:
        for name, member in builtins(owner):
            patch_attr(owner, name, member, builder, scope)

    return patched


def _reduce(self: Any, values: Any) -> list[Any]:
    """``ReduceOps.generic_reduce``: the same order along the axis, but all other elements at once."""
    is_whole = self.axis is None
    values, axis = self.unravel(values, self.axis)
    arrays, dtypes = [x.handle.data for x in values], [x.dtype for x in values]
    total = tuple(self.to_tensor(x.take(0, axis), dtype) for x, dtype in zip(arrays, dtypes, strict=True))
    for index in range(1, arrays[0].shape[axis]):
        following = (self.to_tensor(x.take(index, axis), dtype) for x, dtype in zip(arrays, dtypes, strict=True))
        combined = self.combine_fn.fn(*total, *following)
        total = combined if isinstance(combined, tuple) else (combined,)
    results = []
    for x, array, dtype in zip(total, arrays, dtypes, strict=True):
        data = x.handle.data.astype(array.dtype)
        shape = (*array.shape[:axis], *array.shape[axis + 1 :])
        data = data.reshape(shape) if shape else data.item()
        if self.keep_dims:
            data = np.expand_dims(data, tuple(range(values[0].handle.data.ndim)) if is_whole else axis)
        results.append(self.to_tensor(data, dtype))
    return results
