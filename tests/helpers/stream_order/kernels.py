"""The memory that a launch of one of our kernels reads and writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tritoncomm_kernels.launch import Launch

__all__ = ["Accesses", "accesses_of", "name_of"]


@dataclass
class Accesses:
    """Tensors, and addresses where a kernel is given no more.

    Attributes:
        reads, writes: data.
        tables: integers that the kernel reads, which decide what it does.
    """

    reads: list[Tensor | int] = field(default_factory=list)
    writes: list[Tensor | int] = field(default_factory=list)
    tables: list[Tensor] = field(default_factory=list)


def name_of(kernel: object) -> str:
    """The name of a ``triton.jit`` function, compiled or interpreted."""
    return getattr(kernel, "fn", kernel).__name__  # pyright: ignore[reportAttributeAccessIssue]


def accesses_of(call: Launch, first: Tensor, second: Tensor, more: tuple[int, ...]) -> Accesses:
    """The memory behind the arguments of a launch, the table of the call left out."""
    name, constants = name_of(call.kernel), call.constants
    if name.startswith("_copy"):
        if not constants["UNPACK"]:
            return Accesses([first], [second])
        return Accesses([second, first] if constants["ACCUMULATE"] else [second], [first])
    if name == "_reduce_kernel":
        return Accesses([first], [second])
    if name == "_rows_kernel":
        return Accesses([second, more[0]], [first]) if constants["SCATTER"] else Accesses([first, more[0]], [second])
    if name in ("_sum_rows_kernel", "_scale_rows_kernel"):
        beside = [_address(first, more[10], constants)] if constants.get("HAS_BEHIND") else []
        return Accesses([first, *more[:2], *beside], [second])
    if name == "_scale_dot_rows_kernel":
        return Accesses([first, second, more[0], more[2]], [more[1], _address(second, more[8], constants)])
    if name == "_dot_rows_kernel":
        return Accesses([first, second, more[0]], [more[1]])
    if name == "_count_ids_kernel":
        return Accesses([first], [second])
    if name == "_scan_ids_kernel":
        return Accesses([first], [first, second])
    if name == "_place_ids_kernel":
        return Accesses([first, second, more[0]], [*more[1:4]])
    assert name == "_segments_kernel", f"the simulator does not know {name}"
    tables = [second] if constants["LISTED"] else []
    addresses: list[Tensor | int] = [*(second.view(torch.int64).tolist() if tables else filter(None, more))]
    if constants["PAIRED"]:
        return Accesses(addresses[::2], addresses[1::2], tables)
    if constants["SCATTER"]:
        return Accesses([first, *addresses] if constants["ACCUMULATE"] else [first], addresses, tables)
    return Accesses(addresses, [first], tables)


def _address(x: Tensor, units: int, constants: dict[str, Any]) -> int:
    """The address so many units behind the start of a tensor."""
    return x.data_ptr() + units * constants["VEC"] * x.itemsize
